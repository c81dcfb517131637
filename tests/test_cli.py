"""The command: friendly without arguments, fast, and one clear error for each wrong request."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from toy import SWEEP, make_clone, start, wait_for, write_notebook

from kl_comedy import __version__
from kl_comedy.cli import main
from kl_comedy.study.sweeps import load_sweep

COMMAND = Path(sys.executable).with_name("kl_comedy")


@pytest.fixture
def clone(tmp_path, monkeypatch):
    root = make_clone(tmp_path / "clone")
    monkeypatch.chdir(root)
    return root


def tree(folder):
    return {p: p.read_bytes() if p.is_file() else None for p in Path(folder).rglob("*")}


def refused(arguments, capsys, folder="."):
    """The one line that refuses the request; nothing may have been written."""
    before = tree(folder)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert tree(folder) == before and out == ""
    assert err.startswith("kl_comedy: ") and err.count("\n") == 1, err
    return err


def test_help_is_friendly_and_needs_nothing_heavy(tmp_path):
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    for arguments in ([], ["--help"]):
        ran = subprocess.run([COMMAND, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0 and "reproduce" in ran.stdout and "status" in ran.stdout
    code = "import sys, kl_comedy.cli; print({'pandas', 'torch', 'papermill'} & {*sys.modules})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "set()\n"
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began < 1  # 3 processes


@pytest.mark.parametrize("arguments", [["--help"], ["reproduce", "--help"], ["audit", "--help"]])
def test_arguments_are_read_without_anything_heavy(arguments):
    code = (
        "import sys, kl_comedy.cli as cli\n"
        f"try:\n    cli.main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "print({'torch', 'pandas', 'transformers', 'yaml', 'papermill'} & {*sys.modules})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1] == "set()" and "usage: kl_comedy" in ran.stdout


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    "arguments",
    [["reproduce", "--jobs", "two"], ["redo"], ["status", "x"], ["reproduce", "--scales", "quick"]],
)
def test_usage_errors_have_exit_code_2(clone, arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2 and "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nope"], "no sweep nope; there are: toy"),
        (
            ["toy", "--scale", "paper"],
            "sweep 'toy' has no scale 'paper'; it has: smoke, quick, cpu",
        ),
        (["--scale", "paper"], "no sweep has a scale 'paper'"),
        (["--jobs", "0"], "jobs must be 1 or more, got 0"),
        (["--jobs", "-2"], "jobs must be 1 or more, got -2"),
        (["--runs-dir", "nbs/train.ipynb"], "runs directory"),
        (["--runs-dir", "nbs/train.ipynb/runs"], "cannot be written"),
        (["--runs-dir", "/proc/runs"], "runs directory /proc/runs cannot be written"),
    ],
)
def test_requests_that_cannot_be_carried_out(clone, arguments, message, capsys):
    assert message in refused(["reproduce", *arguments], capsys)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("notebook:", "notebok:", "'notebook' is missing"),
        ("prefix:", "colour: red\nprefix:", "'colour' is not a key; the keys are notebook, prefix"),
        ("nbs/train.ipynb", "nbs/none.ipynb", "none.ipynb is not a notebook that can be read"),
        ("nbs/draw.ipynb", "nbs/none.ipynb", "none.ipynb is not a notebook that can be read"),
        ("nbs/draw.ipynb", "nbs/train.ipynb", "needs out_dir, runs_dir in its parameters cell"),
        ("nbs/train.ipynb", "nbs/draw.ipynb", "needs run_dir in its parameters cell"),
        ("nbs/train.ipynb", "data/sweeps/toy.yaml", "is not a notebook that can be read"),
        ("rate: 1,", "rat: 1,", "'rat' is not a parameter of nbs/train.ipynb; it has: end, rate"),
        ("rate: 1,", "rate: fast,", "rate must be float as its default 0.5 is, got 'fast'"),
        ("rate: 1,", "rate: true,", "rate must be float as its default 0.5 is, got True"),
        ("rate: 1,", "rate: .nan,", "rate must be float as its default 0.5 is, got nan"),
        ("rate: 1,", "rate: 1, rate: 2,", "rate is given twice"),
        ("rate: 1,", f"rate: {10**400},", "rate must be float as its default 0.5 is, got 1000"),
        ("rate: 1,", "run_dir: here,", "'run_dir' is not a parameter"),
        ("{rate: 1, sleep: 0.02}", "[rate]", "parameters must be dict, got ['rate']"),
        ("seed: [0]", "seed: [0.5]", "seed must be int as its default 0 is, got 0.5"),
        ("seed: [0]", "seed: ['0']", "seed must be int as its default 0 is, got '0'"),
        ("seed: [0]", "seed: [false]", "seed must be int as its default 0 is, got False"),
        ("seed: [0]", "seed: 0", "seed must be a list of one or more values"),
        ("seed: [0]", "sed: [0]", "'sed' is not a parameter"),
        ("grid: {seed: [0, 1, 2]}", "cells: []", "cells must be a list of one or more values"),
        ("grid: {seed: [0, 1, 2]}", "cells: [seed]", "must be a mapping of parameters, got 'seed'"),
        ("[0, 1, 2]", "[0, 1, 1]", "two of its runs are the same, s1-"),
        ("quick:", "fast:", "'fast' is not a key; the keys are smoke, quick, cpu, paper, bench"),
        ("s{seed}", "s{sed}", "prefix 's{sed}' cannot be filled in from the parameters end, rate"),
        ("s{seed}", "s" * 300 + "{seed}", "the name of a run has 310 characters, 150 are allowed"),
        ("s{seed}", "{}", "prefix '{}' cannot be filled in"),
        ("s{seed}", "{seed", "prefix '{seed' cannot be filled in"),
        ("scales:", "scales: [", "toy.yaml: while parsing"),
        ("scales:", "order: first\nscales:", "order must be int, got 'first'"),
    ],
)
def test_sweeps_that_are_wrong(clone, old, new, message, capsys):
    assert old in SWEEP
    (clone / "data/sweeps/toy.yaml").write_text(SWEEP.replace(old, new))
    assert message in refused(["reproduce", "toy", "--scale", "quick"], capsys)


@pytest.mark.parametrize(
    "sources, tagged, message",
    [
        (["x = 1"], None, "has no cells tagged 'parameters'"),
        (["import os", "run_dir = os.getcwd()"], 1, "its parameters cell must hold lines NAME ="),
        (["import os", "run_dir = ''\nprint(run_dir)"], 1, "its parameters cell must hold lines"),
        (["import os", "a = b = 1"], 1, "its parameters cell must hold lines"),
        (["import os", "%matplotlib inline"], 1, "its parameters cell must hold lines"),
    ],
)
def test_notebooks_that_are_wrong(clone, sources, tagged, message, capsys):
    write_notebook(clone / "nbs/train.ipynb", sources, tagged)
    assert message in refused(["reproduce"], capsys)


@pytest.mark.parametrize("text", ['{"cells": 5}', '{"cells": [{}]}', '{"cells": [1]}', "[]"])
def test_what_is_no_notebook(clone, text, capsys):
    (clone / "nbs/train.ipynb").write_text(text)
    assert "is not a notebook that can be read" in refused(["reproduce"], capsys)


def test_a_merged_mapping_is_yaml_as_written(clone):
    sweep = load_sweep(clone / "data/sweeps/toy.yaml", clone)
    same = SWEEP.replace("{rate: 1, sleep: 0.02}", "{<<: {rate: 1}, sleep: 0.02}")
    (clone / "data/sweeps/toy.yaml").write_text(same)
    assert load_sweep(clone / "data/sweeps/toy.yaml", clone).parameters == sweep.parameters


def test_status_of_nothing_and_of_damage(clone, capsys):
    assert "is not a folder" in refused(["status", "--runs-dir", "none"], capsys)
    folder = clone / "runs/toy/s0-00000000"
    folder.mkdir(parents=True)
    for name, text in (("params.yaml", "["), ("status.json", "{"), ("metrics.jsonl", "x\ny\n")):
        (folder / name).write_text(text)
    assert main(["status"]) == 0
    assert "damaged" in capsys.readouterr().out


def test_outside_a_clone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "is not in a clone of the repository" in refused(["reproduce"], capsys)
    assert "is not in a clone of the repository" in refused(["status"], capsys)


def test_a_mistake_in_one_sweep_stops_all_before_any_run(clone, capsys):
    (clone / "data/sweeps/later.yaml").write_text(SWEEP.replace("seed: [0]", "seed: [x]"))
    assert "later.yaml" in refused(["reproduce", "--scale", "smoke"], capsys)
    assert not (clone / "runs").exists()


def test_ctrl_c_then_status_says_interrupted(clone, capsys):
    sweep = SWEEP.replace("sleep: 0.02", "sleep: 300.0")
    (clone / "data/sweeps/toy.yaml").write_text(sweep)
    assert main(["status"]) == 0
    assert "no runs in runs yet" in capsys.readouterr().out
    batch = start(clone, "--scale", "smoke")
    (folder,) = wait_for(lambda: [p.parent for p in (clone / "runs").glob("toy/*/starts")])
    main(["status"])
    assert "running" in capsys.readouterr().out
    batch.send_signal(signal.SIGINT)
    out, _ = batch.communicate(timeout=120)
    assert batch.returncode == 130 and "the same command goes on from here" in out
    assert "Traceback" not in out

    def says_interrupted():
        main(["status"])
        return "interrupted" in capsys.readouterr().out

    wait_for(says_interrupted, 60)
    assert os.listdir(folder)
