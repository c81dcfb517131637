"""The repository keeps its own rules: generated files are current, notebooks clean, words clean."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kl_comedy.study.sweeps import SCALES, SWEEP_KEYS, load_sweep, plan

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
SKIPPED = {
    ".git",
    ".venv",
    "runs",
    "_proc",
    "_docs",
    "_build",
    "_src",
    "__pycache__",
    ".ipynb_checkpoints",
    ".pytest_cache",
    ".ruff_cache",
    "dist",
    "build",
}
NOTEBOOKS = sorted(p for p in ROOT.glob("nbs/**/*.ipynb") if not SKIPPED & set(p.parts))
EXECUTED = [p for p in NOTEBOOKS if p.parent.name in ("experiments", "gallery")]


def own_files():
    """The files that belong to the repository, whether or not git is there."""
    for folder, inner, names in os.walk(ROOT):
        kept = SKIPPED - {"runs"} if Path(folder) == ROOT / "data" else SKIPPED
        inner[:] = sorted(name for name in inner if name not in kept)
        kept = [name for name in sorted(names) if name != ".git"]  # a file in a git worktree
        yield from (Path(folder, name) for name in kept)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of what nbdev reads and writes, so that the checks leave the working tree alone."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("settings.ini", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("nbs", "kl_comedy"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(*SKIPPED))
    return folder


def nbdev(name, folder):
    ran = subprocess.run([BIN / name], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def changed(folder, pattern):
    """Files of the repository that match `pattern` and differ in the copy `folder`."""
    names = {
        p.relative_to(base)
        for base in (ROOT, folder)
        for p in base.glob(pattern)
        if not SKIPPED & set(p.parts)
    }
    return [
        str(name)
        for name in sorted(names)
        if not (
            (ROOT / name).exists()
            and (folder / name).exists()
            and (ROOT / name).read_bytes() == (folder / name).read_bytes()
        )
    ]


def test_modules_are_what_the_notebooks_export(copy):
    for module in (copy / "kl_comedy").glob("**/*.py"):
        if module.name != "__init__.py":
            module.unlink()
    nbdev("nbdev_export", copy)
    assert changed(copy, "kl_comedy/**/*.py") == [], "run nbdev_export and commit"


def test_notebooks_are_clean(copy):
    nbdev("nbdev_clean", copy)
    assert changed(copy, "nbs/**/*.ipynb") == [], "run nbdev_clean and commit"


@pytest.mark.parametrize("path", EXECUTED, ids=lambda p: p.name)
def test_what_papermill_executes_has_one_parameters_cell(path, copy):
    needed = {"experiments": {"run_dir"}, "gallery": {"runs_dir", "out_dir"}}[path.parent.name]
    cleaned = copy / path.relative_to(ROOT)
    for notebook in (path, cleaned):  # nbdev_clean has been over the copy, and kept the tag
        cells = json.loads(notebook.read_text())["cells"]
        (tagged,) = [c for c in cells if "parameters" in c["metadata"].get("tags", [])]
        assert all(re.search(rf"^{name}\b", "".join(tagged["source"]), re.M) for name in needed)


def test_cleaning_keeps_the_parameters_tag(copy):
    path = copy / "nbs" / "tagged.ipynb"
    cell = {
        "cell_type": "code",
        "id": "a",
        "execution_count": 3,
        "source": "x = 1",
        "outputs": [],
        "metadata": {"tags": ["parameters"], "scrolled": True},
    }
    notebook = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(notebook))
    subprocess.run([BIN / "nbdev_clean", "--fname", path], cwd=copy, check=True)
    cleaned = json.loads(path.read_text())["cells"][0]
    path.unlink()
    assert cleaned["metadata"] == {"tags": ["parameters"]} and cleaned["execution_count"] is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_a_notebook_holds_no_outputs(path):
    """Results come from runs, not from what a cell once printed; nbdev_clean leaves outputs."""
    cells = json.loads(path.read_text())["cells"]
    assert not [c["id"] for c in cells if c.get("outputs")], "clear all outputs and save"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_code_fits_the_width_of_the_page(path):
    """A code block of the site holds 92 columns; a longer line makes it scroll sideways."""
    cells = json.loads(path.read_text())["cells"]
    wide = [
        f"cell {cell['id']}, line {n}: {len(line)} columns"
        for cell in cells
        if cell["cell_type"] == "code"
        for n, line in enumerate("".join(cell["source"]).splitlines(), 1)
        if len(line) > 92
    ]
    assert wide == [], "break the line at a natural place"


SWEEPS = sorted(ROOT.glob("data/sweeps/*.yaml"))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.name)
def test_every_sweep_can_be_run(path):
    sweep = load_sweep(path, ROOT)
    assert sweep.description and all(plan(sweep, scale) for scale in sweep.scales)
    assert set(sweep.scales) <= set(SCALES)


def test_every_data_file_is_described():
    text = (ROOT / "data" / "README.md").read_text()
    for path in own_files():
        inside = path.relative_to(ROOT)
        if inside.parts[0] == "data" and inside.name != "README.md":
            name = inside.parts[1] + "/" * (len(inside.parts) > 2)
            assert f"`{name}" in text, f"{inside} is not in data/README.md"
    for key in SWEEP_KEYS:
        assert f"| `{key}` |" in text


def test_the_readme_starts_with_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert 0 <= text.find("make reproduce") and 0 <= text.find("make test")
    assert text.find("make reproduce") < text.find("kl_comedy reproduce")


def test_the_licence_is_whole():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text and len(text) > 11000


# Paths of one machine, and hosts that only one place has, do not belong in a repository.
PATHS = re.compile(r"/(home|Users|root|work|tmp)/|file:///|C:\\\\")
HOSTS = re.compile(r"https?://[^\s\"')]*(simple/|index-url|pypi\b)")


@pytest.mark.parametrize("pattern", [PATHS, HOSTS], ids=["paths", "hosts"])
def test_no_file_speaks_of_one_machine(pattern):
    found = []
    for path in own_files():
        if path.suffix in (".safetensors", ".png") or path == Path(__file__).resolve():
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        found += [f"{path.relative_to(ROOT)}: {match.group(0)}" for match in pattern.finditer(text)]
    assert found == []
