"""Libraries in environments of their own: one that is made here, without a network; records."""

import fcntl
import json
import re
import shutil
import threading
import zipfile
from pathlib import Path

import pytest
import yaml

from kl_comedy.auditing import libraries
from kl_comedy.auditing import venvs as environments_module
from kl_comedy.auditing.libraries import (
    audit_library,
    library_as_text,
    load_records,
    objective_in_words,
    record,
    refused,
    setting_rows,
    settings_for,
)
from kl_comedy.auditing.venvs import AuditError, Recipe, environment_key, load_recipes
from kl_comedy.cli import main

ROOT = Path(__file__).resolve().parent.parent
ADAPTER = """
import sys
from importlib.util import find_spec
from absent.kernels import fast
import tiny
from tiny import penalty
from kl_comedy.auditing.adapter import Setting

assert find_spec("transformers") is None, "the environment is not its own"
assert "site-packages/tiny" in sys.modules["tiny"].__file__

def settings():
    print("libraries print")
    yield Setting("k3=True", penalty, "K3 in loss", default=True, docs="says", where="there")

KIND, CONFIG = "text", "tiny/options.py"

def written(label):
    return {"k3": "True", "kl_coef": "0.1"}, ["k3=True", "kl_coef=0.1"]

def parsed(lines):
    return tiny.parse(lines)
"""
LIBRARY = """
def parse(lines):
    known = {"k3": False, "kl_coef": 0.0}
    for name, value in (line.split("=") for line in lines):
        known[name] = {"True": True}.get(value) or float(value)
    return known

def penalty(b):
    gap = (b.ref_logp - b.logp).masked_fill(~b.mask, 0)
    return (gap.expm1() - gap).sum(1).mean()
"""


def write_wheel(folder, name="tiny", version="1.0"):
    """A wheel of one module, written by hand: to build one takes a network."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", LIBRARY)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the tests share, since an environment takes seconds: wheel, package and cache."""
    folder = tmp_path_factory.mktemp("shared")
    shutil.copytree(
        ROOT / "kl_comedy", folder / "kl_comedy", ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "kl_comedy" / "auditing" / "adapters" / "tiny_library.py").write_text(ADAPTER)
    write_wheel(folder)
    return folder


@pytest.fixture
def tiny(folder, monkeypatch):
    """The recipe of a library with one setting."""
    monkeypatch.setattr(libraries, "package_folder", lambda: folder / "kl_comedy")
    monkeypatch.setenv("KL_COMEDY_CACHE", str(folder / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    version = ".".join(map(str, libraries.sys.version_info[:2]))
    return Recipe(
        "tiny_library",
        "Tiny",
        "tiny",
        "1.0",
        "2026-01-01",
        f"{folder}/tiny-1.0-py3-none-any.whl\n",
        ("absent", "absent.kernels"),
        (version,),
        "",
    )


def environments(folder):
    return sorted(p.name for p in (folder / "cache" / "audit").iterdir() if p.is_dir())


def test_a_library_is_installed_asked_and_recorded(tiny, folder, tmp_path):
    unfinished = folder / "cache" / "audit" / f"{environment_key(tiny)}.unfinished"
    unfinished.mkdir(parents=True)  # as a kill leaves it
    lines = []
    found = audit_library(tiny, lines.append)
    assert environments(folder) == [environment_key(tiny)] and "installing 1 packages" in lines[1]
    (setting,) = found["settings"]
    assert found["version"] == "1.0" and objective_in_words(setting) == "token forward KL"
    assert settings_for(found)["K3 in the loss (forward)"] == ["k3=True"]
    assert "* k3=True\n    token forward KL  factor 1  bias 0.5" in library_as_text(found)
    assert setting["written"] == {
        "lines": ["k3=True", "kl_coef=0.1"],
        "refused": "",
        "defaults": {"k3": "False", "kl_coef": "0.0"},
    }
    assert (found["kind"], found["config"]) == ("text", "tiny/options.py")

    (tmp_path / "data" / "libraries").mkdir(parents=True)
    record(found, tmp_path)
    assert load_records(tmp_path / "data" / "libraries") == {"tiny_library": found}
    assert str(folder) not in json.dumps(found)

    again = []
    second = audit_library(tiny, again.append)
    assert again == ["tiny_library: auditing"]  # the environment was there
    assert {**found, "settings": 0} == {**second, "settings": 0}


@pytest.mark.parametrize(
    ("parse", "words"),
    [
        ("return {'k3': bool(lines)}", "ValueError: there is no option kl_coef"),
        ("return {'k3': bool(lines), 'kl_coef': 0.2}", "ValueError: kl_coef becomes 0.2, not 0.1"),
        (
            "sys.exit('usage: --k3') if lines else None; return {'k3': 0, 'kl_coef': 0}",
            "SystemExit: usage: --k3",
        ),
    ],
)
def test_lines_that_the_library_does_not_take_are_refused(tiny, folder, parse, words):
    adapter = folder / "kl_comedy" / "auditing" / "adapters" / "tiny_library.py"
    kept = adapter.read_text()
    adapter.write_text(kept.replace("return tiny.parse(lines)", parse))
    try:
        found = audit_library(tiny, lambda line: None)
    finally:
        adapter.write_text(kept)
    assert refused(found) == {"k3=True": words}
    assert library_as_text(found).endswith(f"! k3=True\n    its lines are refused: {words}")


def test_another_release_is_said_to_be_untested(tiny):
    lines = []
    recipe = Recipe(**vars(tiny) | {"version": "0.9", "python": ("2.7",)})
    audit_library(recipe, lines.append)
    assert "not tried with Python" in lines[0]
    assert lines[-1].endswith("untested version 1.0; its adapter was written for 0.9")


def test_what_decides_the_environment_decides_its_name(tiny):
    other = Recipe(**vars(tiny) | {"requirements": tiny.requirements + "more==1\n"})
    assert environment_key(other) != environment_key(tiny)
    same = Recipe(**vars(tiny) | {"note": "read again"})
    assert environment_key(same) == environment_key(tiny)


def test_a_failing_pip_is_one_error_and_leaves_nothing_to_be_used(tiny, folder):
    recipe = Recipe(**vars(tiny) | {"requirements": "nothing-of-this-name==1.0\n"})
    with pytest.raises(AuditError, match="tiny_library: pip failed: ERROR: No matching dist"):
        audit_library(recipe, lambda line: None)
    assert environment_key(recipe) not in environments(folder)


def test_a_failing_adapter_and_a_cache_that_cannot_be(tiny, tmp_path, monkeypatch):
    recipe = Recipe(**vars(tiny) | {"stand_ins": ()})
    with pytest.raises(AuditError, match="its adapter failed: ModuleNotFoundError: No module n"):
        audit_library(recipe, lambda line: None)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KL_COMEDY_CACHE", str(tmp_path / "file"))
    with pytest.raises(AuditError, match="no environment can be made"):
        audit_library(tiny, lambda line: None)


def test_a_broken_environment_is_made_again_and_a_relative_cache_is_found(
    tiny, folder, monkeypatch
):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KL_COMEDY_CACHE", "cache")
    made = folder / "cache" / "audit" / environment_key(tiny)
    shutil.rmtree(made / "bin", ignore_errors=True)
    made.mkdir(parents=True, exist_ok=True)
    lines = []
    audit_library(tiny, lines.append)
    assert "making an environment" in lines[0] and (made / "bin" / "python").exists()


def test_without_a_network_or_space_the_error_says_so(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("KL_COMEDY_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    recipe = Recipe(**vars(tiny) | {"requirements": "tiny==1.0\n"})
    with pytest.raises(AuditError, match="pip failed: no network to the package index; ERROR"):
        audit_library(recipe, lambda line: None)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(environments_module, "link_shared", full)
    with pytest.raises(AuditError, match="tiny_library: no environment can be made:.*No space"):
        audit_library(recipe, lambda line: None)


def test_what_takes_too_long_is_stopped(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(libraries, "ADAPTER_LIMIT", 0.05)
    with pytest.raises(AuditError, match="its adapter took more than 0.05 seconds"):
        audit_library(tiny, lambda line: None)
    monkeypatch.setenv("KL_COMEDY_CACHE", str(tmp_path))
    monkeypatch.setattr(environments_module, "BUILD_LIMIT", 0.01)
    with pytest.raises(AuditError, match="tiny_library: venv took more than 0.01 seconds"):
        audit_library(tiny, lambda line: None)


def test_who_waits_for_another_audit_says_so(tiny, folder):
    lines, waits = [], threading.Event()

    def say(line):
        lines.append(line)
        waits.set()

    environments_module.prepare(tiny, lines.append)
    lines.clear()
    path = folder / "cache" / "audit" / f"{environment_key(tiny)}.lock"
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = threading.Thread(target=environments_module.prepare, args=(tiny, say))
        other.start()
        assert waits.wait(60) and other.is_alive()
    other.join(60)
    assert lines == ["tiny_library: waiting for another audit, which makes its environment"]
    assert not other.is_alive()


def test_the_command(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["audit", "trll"]) == 2
    assert "no library trll; there are: trl, verl" in capsys.readouterr().err
    kept = load_records(ROOT / "data" / "libraries")

    def answer(recipe, say):
        if recipe.name == "verl":
            raise AuditError("verl: pip failed: no network")
        return kept[recipe.name]

    monkeypatch.setattr(libraries, "audit_library", answer)
    assert main(["audit", "trl", "verl", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == [kept["trl"]] and "kl_comedy: verl: pip failed" in err
    assert main(["audit", "trl"]) == 0
    assert "token reverse KL  factor 1" in capsys.readouterr().out


@pytest.mark.parametrize("name", load_recipes(ROOT))
def test_a_recipe_is_whole_and_recorded(name):
    recipe, found = load_recipes(ROOT)[name], load_records(ROOT / "data" / "libraries")[name]
    assert (ROOT / "kl_comedy" / "auditing" / "adapters" / f"{name}.py").is_file()
    if recipe.requirements is not None:
        pins = recipe.requirements.split()
        assert all(re.fullmatch(r"[\w.\-]+==[\w.+!\-]+", pin) for pin in pins)
        own = f"{recipe.distribution}=={recipe.version}".replace("_", "-").lower()
        assert own in [pin.replace("_", "-").lower() for pin in pins]
    assert found["version"] == recipe.version and found["read"] == recipe.date
    assert found["settings"] and len({s["label"] for s in found["settings"]}) == len(
        found["settings"]
    )
    for row in setting_rows(found):
        assert row["setting"] and row["cell"] and row["verdict"]
    assert found["kind"] in ("text", "yaml", "python") and found["config"]
    assert refused(found) == {}
    assert all(
        s["written"]["lines"]
        for s in found["settings"]
        if not s["label"].startswith(("(none)", "kl_comedy", "kl_penalty_coef=0"))
    )


def test_what_was_only_read_says_where_and_what_is_open():
    read = yaml.safe_load((ROOT / "data" / "libraries.yaml").read_text())["read"]
    run = {recipe.title for recipe in load_recipes(ROOT).values()}
    assert not run & {row["library"] for row in read}
    for row in read:
        assert {*row} == {"library", "version", "date", "source", "settings", "reading", "open"}
        assert re.fullmatch(r"[0-9a-f]{12}|[0-9]+(\.[0-9]+)+", row["version"]), row["library"]
        assert re.search(r"\.py\b", row["source"]) and row["settings"] and row["reading"]


def test_the_lines_that_were_recorded_are_those_of_the_adapters():
    from kl_comedy.auditing.adapters import trl

    found = load_records(ROOT / "data" / "libraries")["trl"]
    for setting in found["settings"]:
        assert trl.written(setting["label"])[1] == setting["written"]["lines"]
    assert trl.parsed([])["GRPOConfig.beta"] == 0 and trl.parsed([])["RLOOConfig.beta"] == 0.05


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run: {a: {title: A}}", "a needs title, distribution"),
        (
            "run: {a: {title: A, distribution: a, version: '1', date: d, packages: true, "
            "stand_ins: [], python: [], note: ''}}",
            "its pinned packages are missing",
        ),
    ],
)
def test_a_recipe_that_is_not_whole_is_refused(tmp_path, text, words):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "libraries.yaml").write_text(text)
    with pytest.raises(AuditError, match=words):
        load_recipes(tmp_path)
