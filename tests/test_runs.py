"""Runs, sweeps and batches: what a kill leaves, who may write, what is refused."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import time

import pandas as pd
import papermill
import pytest
from toy import SWEEP, TRAIN, kill, make_clone, results, start, wait_for, write_notebook

import kl_comedy
from kl_comedy.study.batch import gallery_job, reproduce
from kl_comedy.study.forks import imported_by, modules
from kl_comedy.study.jobs import Job, locked, run_all, take
from kl_comedy.study.metrics import Metrics, RunError, read_lines, read_metrics
from kl_comedy.study.parameters import SweepError
from kl_comedy.study.progress import survey
from kl_comedy.study.runs import Run, read_status
from kl_comedy.study.sweeps import load_sweep, load_sweeps, plan
from kl_comedy.study.tables import collect

# --- the files of one run -------------------------------------------------------------------


@pytest.mark.parametrize("tail", [b"{", b'{"step": 2, "x"', b'{"step": 2, "x": 0.5}', b"\xff\xfe"])
def test_a_torn_last_line_is_skipped_and_then_healed(tmp_path, tail):
    run = Run(tmp_path)
    run.log(1, x=0.25)
    whole = run.dir.joinpath("metrics.jsonl").read_bytes()
    run.dir.joinpath("metrics.jsonl").write_bytes(whole + tail)
    assert read_metrics(tmp_path)["step"].tolist() == [1]
    again = Run(tmp_path)
    again.log(2, x=0.75)
    assert [line["x"] for line in read_lines(tmp_path / "metrics.jsonl")] == [0.25, 0.75]


def test_lines_are_on_disk_when_log_returns(tmp_path):
    code = f"""from kl_comedy.study.runs import Run; import os, signal
run = Run({str(tmp_path)!r})
run.log(0, x=1.5); run.log(1, x=2.5); os.kill(os.getpid(), signal.SIGKILL)"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert read_metrics(tmp_path)["x"].tolist() == [1.5, 2.5]


@pytest.mark.parametrize("value", [1, 1.5, float("inf"), True, 10**12])
def test_numbers_come_back_as_they_went(tmp_path, value):
    Run(tmp_path).log(0, x=value)
    assert Run(tmp_path).metrics()["x"].tolist() == [value]


def test_nan_is_kept_and_missing_is_nan(tmp_path):
    run = Run(tmp_path)
    run.log(0, x=float("nan"), y=1)
    run.log(1, y=2)
    assert run.metrics()["x"].isna().tolist() == [True, True]


@pytest.mark.parametrize(
    "step, metrics", [(2, {"x": 1}), (3, {"x": 1}), (3, {"y": 1, "x": 1}), (-1, {})]
)
def test_a_forgotten_rewind_is_refused(tmp_path, step, metrics):
    run = Run(tmp_path)
    run.log(3, x=1)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="rewind"):
        Run(tmp_path).log(step, **metrics)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_metric_that_is_no_number_leaves_no_line(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(TypeError, match="'kl' must be a number"):
        run.log(0, x=1, kl=[1])
    assert read_lines(tmp_path / "metrics.jsonl") == []
    run.log(0, x=1)


def test_rewind_then_log_equals_never_killed(tmp_path):
    whole = Metrics(tmp_path / "whole.jsonl")
    for step in range(5):
        whole.log(step, {"x": step / 3})
    for done in range(-1, 5):
        part = tmp_path / f"{done}.jsonl"
        part.write_bytes(whole.path.read_bytes())
        resumed = Metrics(part)
        resumed.rewind(done)
        for step in range(done + 1, 5):
            resumed.log(step, {"x": step / 3})
        assert part.read_bytes() == whole.path.read_bytes()


def test_the_collected_tables_do_not_round(tmp_path):
    value = 0.1 + 1e-16 + 2**-40
    for name in ("a", "b"):
        run = Run(tmp_path / name)
        run.log(0, x=value)
        run.save_table("t", pd.DataFrame({"v": [value]}))
        (run.dir / "params.yaml").write_text("seed: 1\n")
        run.finish(x=value)
    paths = collect([tmp_path / "b", tmp_path / "a"], tmp_path / "out", "smoke")
    tables = {p.stem: pd.read_csv(p, dtype=str) for p in paths}
    assert tables["runs"]["run"].tolist() == ["b", "a"]
    for name, column in (("runs", "x"), ("metrics", "x"), ("t", "v")):
        assert tables[name][column].map(float).tolist() == [value] * 2, name


def test_a_summary_that_contradicts_a_parameter_is_refused(tmp_path):
    run = Run(tmp_path / "a")
    (run.dir / "params.yaml").write_text("steps: 10\n")
    run.finish(steps=9)
    with pytest.raises(ValueError, match="steps is a parameter and in the summary"):
        collect([run.dir], tmp_path / "out", "smoke")


# --- sweeps -----------------------------------------------------------------------------------


def test_scales_share_equal_runs_and_ids_depend_on_every_parameter(tmp_path):
    root = make_clone(tmp_path)
    sweep = load_sweep(root / "data/sweeps/toy.yaml", root)
    smoke, quick = plan(sweep, "smoke"), plan(sweep, "quick")
    assert set(smoke) < set(quick) and len(quick) == 3
    write_notebook(root / "nbs/train.ipynb", [s.replace("steps = 5", "steps = 6") for s in TRAIN])
    changed = plan(load_sweep(root / "data/sweeps/toy.yaml", root), "quick")
    assert not set(changed) & set(quick)


def test_the_parameters_are_those_that_papermill_sees(tmp_path):
    root = make_clone(tmp_path)
    sweep = load_sweep(root / "data/sweeps/toy.yaml", root)
    assert sweep.defaults.keys() == papermill.inspect_notebook(root / "nbs/train.ipynb").keys()


def test_sweeps_run_by_order_then_name(tmp_path):
    root = make_clone(tmp_path)
    for name, order in (("a", 2), ("z", 1), ("m", 1)):
        (root / f"data/sweeps/{name}.yaml").write_text(SWEEP + f"order: {order}\n")
    assert [s.name for s in load_sweeps(root, "quick")] == ["toy", "m", "z", "a"]


# --- what a batch depends on ------------------------------------------------------------------


@pytest.mark.parametrize("module", ["auditing/adapters/x.py", "theory/estimators.py", "files.py"])
def test_a_gallery_is_drawn_again_when_a_module_changes_at_any_depth(module, tmp_path, monkeypatch):
    root, package = make_clone(tmp_path / "clone"), tmp_path / "kl_comedy"
    (package / module).parent.mkdir(parents=True)
    for path in (package / "__init__.py", package / module):
        path.write_text("x = 1\n")
    monkeypatch.setattr(kl_comedy, "__file__", str(package / "__init__.py"))
    sweep = load_sweep(root / "data/sweeps/toy.yaml", root)
    before, same = (gallery_job(sweep, "smoke", tmp_path, 1).inputs for _ in "ab")
    (package / module).write_text("x = 2\n")
    changed = gallery_job(sweep, "smoke", tmp_path, 1).inputs
    (tmp_path / "toy/smoke").mkdir(parents=True)
    (tmp_path / "toy/smoke/runs.csv").write_text("run\n")
    assert before == same and len({before, changed}) == 2
    assert gallery_job(sweep, "smoke", tmp_path, 1).inputs not in (before, changed)


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is imported beforehand")
@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from kl_comedy.lab.gradients import (\n    bias,\n    sample,\n)", ["lab.gradients"]),
        ("from kl_comedy.lab import gradients, variance", ["lab.gradients", "lab.variance"]),
        ("import kl_comedy.theory.estimators as e, json", ["theory.estimators"]),
        ("if True:\n    from kl_comedy.study.runs import Run", ["study.runs"]),
        ("%matplotlib inline\nfrom kl_comedy.files import write_atomic", ["files"]),
        ("# from kl_comedy.cli import main\ntext = 'import kl_comedy.cli'", []),
        ("from kl_comedy_else import x\nimport numpy\nfrom . import y", []),
    ],
)
def test_what_a_notebook_imports_is_found_however_it_is_written(source, names, tmp_path):
    write_notebook(tmp_path / "n.ipynb", ["run_dir = ''", source], tagged=0)
    assert modules([tmp_path / "n.ipynb"]) == [f"kl_comedy.{name}" for name in names]


def test_a_name_of_the_package_itself_stands_for_its_module(tmp_path, monkeypatch):
    monkeypatch.setattr(kl_comedy, "_HOME", {"KLConfig": "theory.surrogate"}, raising=False)
    assert [*imported_by("from kl_comedy import KLConfig")] == ["kl_comedy.theory.surrogate"]
    assert [*imported_by("from kl_comedy import __version__")] == ["kl_comedy"]
    assert [*imported_by("import kl_comedy")] == ["kl_comedy"]


# --- batches ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return make_clone(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def unkilled(clone):
    """Results of a batch that nothing disturbed."""
    assert reproduce(clone, "quick", workers=2)
    return results(clone / "runs")


def test_a_batch_makes_runs_tables_and_figure(clone, unkilled):
    sweep = load_sweep(clone / "data/sweeps/toy.yaml", clone)
    for name, parameters in plan(sweep, "quick").items():
        folder = clone / "runs" / "toy" / name
        status = read_status(folder)
        assert status["state"] == "done" and status["threads"] == max(1, os.cpu_count() // 2)
        assert read_metrics(folder)["step"].tolist() == list(range(5))
        assert "injected-parameters" in (folder / "run.ipynb").read_text()
        assert f"rate: {parameters['rate']}" in (folder / "params.yaml").read_text()
    runs = pd.read_csv(clone / "runs/toy/quick/runs.csv")
    assert runs["seed"].tolist() == [0, 1, 2] and set(runs["scale"]) == {"quick"}
    assert len(pd.read_csv(clone / "runs/toy/quick/metrics.csv")) == 15
    drawn = float((clone / "runs/figures/quick/toy/mean.csv").read_text())
    assert drawn == pytest.approx(runs["x"].mean())


def test_what_is_done_is_not_done_again(clone, unkilled, capsys):
    before = {p: p.stat().st_mtime_ns for p in (clone / "runs").rglob("*") if p.is_file()}
    assert reproduce(clone, "quick", workers=2)
    assert {p: p.stat().st_mtime_ns for p in (clone / "runs").rglob("*") if p.is_file()} == before
    out = capsys.readouterr().out
    assert "3 done already, 0 to do" in out and "runs/figures/quick/toy/mean.csv" in out


def test_a_smaller_scale_finds_its_runs_done_and_draws_its_own_figure(clone, unkilled, capsys):
    assert reproduce(clone, "smoke", workers=1)
    assert "1 done already, 0 to do" in capsys.readouterr().out
    assert float((clone / "runs/figures/smoke/toy/mean.csv").read_text()) == pytest.approx(
        pd.read_csv(clone / "runs/toy/smoke/runs.csv")["x"][0]
    )


def test_record_publishes_the_tables(clone, unkilled):
    assert reproduce(clone, "quick", workers=1, record=True)
    for name in ("runs", "metrics", "squares"):
        published = (clone / "data/runs/toy" / f"{name}.csv").read_text()
        assert published == (clone / "runs/toy/quick" / f"{name}.csv").read_text()


def test_a_record_is_of_one_scale_and_of_nothing_else(clone, unkilled):
    assert reproduce(clone, "quick", workers=1, record=True)
    stale = clone / "data/runs/toy/other.csv"
    stale.write_text("run")
    with pytest.raises(SweepError, match="holds the record of scale quick: delete it"):
        reproduce(clone, "smoke", workers=1, record=True)
    assert reproduce(clone, "quick", workers=1, record=True) and not stale.exists()


def test_a_run_that_lost_a_table_is_made_again(clone, unkilled, capsys):
    next((clone / "runs/toy").glob("s0-*/squares.csv")).unlink()
    assert reproduce(clone, "quick", workers=1)
    assert "2 done already, 1 to do" in capsys.readouterr().out
    assert next((clone / "runs/toy").glob("s0-*/squares.csv")).exists()


def test_damage_is_one_line(clone, unkilled):
    folder = next((clone / "runs/toy").glob("s0-*"))
    (folder / "params.yaml").unlink()
    with pytest.raises(RunError, match="params.yaml cannot be read"):
        reproduce(clone, "quick", workers=1)
    Run(folder, {"seed": 0})
    with pytest.raises(RunError, match="holds the run with seed=0, not 1: give another"):
        Run(folder, {"seed": 1})


def test_runs_fail_alone_and_say_why(clone, capsys):
    assert not reproduce(clone, "cpu", workers=2)
    out = capsys.readouterr().out
    states = {r.run[:2]: r.state for r in survey(clone / "runs").itertuples()}
    assert [states[f"s{i}"] for i in (3, 4, 5, 6)] == ["done", "failed", "diverged", "failed"]
    assert "ValueError: the rate is too high" in out and "Traceback" not in out
    assert "ended without run.finish()" in out and "runs/toy/s4-" in out
    assert "not collected, 2 of 4 runs failed" in out
    assert not (clone / "runs/toy/cpu").exists()
    diverged = next((clone / "runs/toy").glob("s5-*"))
    assert read_status(diverged)["cause"] == "x left the earth"
    starts = {p: p.read_text() for p in (clone / "runs/toy").glob("*/starts")}
    assert not reproduce(clone, "cpu", workers=2)  # only the failed ones are tried again
    changed = {p.parent.name[:2] for p, old in starts.items() if p.read_text() != old}
    assert changed == {"s4", "s6"}


def test_a_killed_worker_ends_its_own_run_only(clone, tmp_path):
    jobs = [
        Job(
            "toy",
            name,
            clone / "nbs/train.ipynb",
            tmp_path / name,
            {"sleep": 0.2, "steps": 8, "run_dir": str(tmp_path / name)},
            1,
        )
        for name in ("killed", "free")
    ]
    ended = []
    code = f"""
import os, signal, time
from pathlib import Path
path = Path({str(tmp_path)!r}, "killed", "starts")
while not path.exists() or not path.read_text().endswith("\\n"):
    time.sleep(.05)
os.kill(int(path.read_text()), signal.SIGKILL)
"""
    killer = subprocess.Popen([sys.executable, "-c", code])
    run_all(list(jobs), 2, lambda job: ended.append(job.name) or [], print)
    assert killer.wait() == 0
    killed, free = (read_status(job.folder) for job in jobs)
    assert free["state"] == "done" and sorted(ended) == ["free", "killed"]
    assert killed["state"] == "failed"
    assert "-9" in killed["cause"] and "killed, or out of memory" in killed["cause"]
    run_all([jobs[0]], 1, lambda job: [], print)
    assert read_metrics(jobs[0].folder).equals(read_metrics(jobs[1].folder))


def test_two_batches_share_the_runs_of_a_study(tmp_path):
    queue = [Job("toy", name, tmp_path / "x.ipynb", tmp_path / name, {}, 1) for name in "abc"]
    (tmp_path / "a").mkdir()
    with locked(tmp_path / "a"):  # another batch is making it
        assert [take(queue).name for _ in range(2)] == ["b", "c"]
        assert take(queue).name == "a" and not queue  # nothing else is left: wait for it


@pytest.fixture
def subreaper():
    """Orphans come to this process, and not to init: as under systemd --user on a desktop."""
    ctypes.CDLL(None).prctl(36, 1)
    yield
    ctypes.CDLL(None).prctl(36, 0)


def test_sigkill_anywhere_and_again_gives_the_same_results(clone, unkilled, tmp_path, subreaper):
    """Killed at the start, in a run, between runs; no orphan stays, and the next batch goes on."""
    runs = tmp_path / "runs"
    arguments = ("--scale", "quick", "--jobs", "2", "--runs-dir", str(runs))

    def starting():
        return list(runs.rglob("status.json"))

    def in_a_run():
        return sum(len(read_lines(path)) for path in runs.rglob("metrics.jsonl")) >= 2

    def between_runs():
        return "done" in {read_status(path.parent)["state"] for path in runs.rglob("status.json")}

    for moment in (starting, in_a_run, between_runs):
        batch = start(clone, *arguments)
        wait_for(moment)
        time.sleep(random.uniform(0, 0.3))
        kill(batch)
        left = {path: path.read_bytes() for path in runs.rglob("metrics.jsonl")}
        time.sleep(0.3)
        assert {path: path.read_bytes() for path in runs.rglob("metrics.jsonl")} == left
    out, _ = (batch := start(clone, *arguments)).communicate(timeout=120)
    assert batch.returncode == 0, out
    assert results(runs) == unkilled


def test_two_batches_in_one_folder_share_the_work(clone, unkilled, tmp_path):
    runs = tmp_path / "runs"
    both = [start(clone, "--scale", "quick", "--jobs", "2", "--runs-dir", str(runs)) for _ in "ab"]
    outs = [batch.communicate(timeout=120)[0] for batch in both]
    assert [batch.returncode for batch in both] == [0, 0], outs
    assert results(runs) == unkilled
    for path in runs.rglob("starts"):
        assert len(path.read_text().split()) == 1, "a run was made twice"


def test_papermill_alone_makes_a_run(clone, tmp_path):
    papermill.execute_notebook(
        clone / "nbs/train.ipynb",
        tmp_path / "out.ipynb",
        {"run_dir": str(tmp_path / "r"), "seed": 7},
        progress_bar=False,
    )
    assert read_status(tmp_path / "r")["state"] == "done"
