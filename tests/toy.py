"""A clone in miniature: a notebook that trains something tiny and resumes, a sweep, a gallery."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import nbformat
import pandas as pd
import psutil
from nbformat.v4 import new_code_cell, new_notebook

# A recurrence stands for training: each step needs the state of the one before.
TRAIN = [
    """
    import json, os, time
    from pathlib import Path
    import pandas as pd
    from kl_comedy.files import write_atomic
    from kl_comedy.study.runs import Run
    """,
    """
    run_dir = None
    seed = 0
    steps = 5
    rate = 0.5
    sleep = 0.0
    end = "finish"
    """,
    """
    run = Run(run_dir)
    saved = run.dir / "checkpoint.json"
    step, x = json.loads(saved.read_text()) if saved.exists() else (-1, float(seed))
    run.rewind(step)
    with open(run.dir / "starts", "a") as f:
        f.write(f"{os.getpid()}\\n")
    """,
    """
    for step in range(step + 1, steps):
        time.sleep(sleep)
        x += rate * (1 - x) / (step + 2)
        run.log(step, x=x)
        time.sleep(sleep)
        write_atomic(saved, json.dumps([step, x]))
    """,
    """
    run.save_table("squares", pd.DataFrame({"n": [1, 2], "x2": [x * x, 2 * x * x]}))
    if end == "raise":
        raise ValueError("the rate is\\ntoo high")
    if end == "diverge":
        run.fail(steps, "x left the earth")
    if end == "finish":
        run.finish(x=x, threads=int(os.environ.get("OMP_NUM_THREADS", 0)))
    """,
]
DRAW = [
    "from pathlib import Path\nimport pandas as pd",
    "runs_dir = '.'\nout_dir = '.'",
    "Path(out_dir, 'mean.csv').write_text(str(pd.read_csv(Path(runs_dir, 'runs.csv')).x.mean()))",
]
SWEEP = """
notebook: nbs/train.ipynb
gallery: nbs/draw.ipynb
prefix: "s{seed}"
parameters: {rate: 1, sleep: 0.02}
scales:
  smoke: {grid: {seed: [0]}}
  quick: {grid: {seed: [0, 1, 2]}}
  cpu: {cells: [{seed: 3}, {seed: 4, end: raise}, {seed: 5, end: diverge}, {seed: 6, end: stop}]}
"""


def write_notebook(path, sources, tagged=1):
    """Write code cells to a notebook; number `tagged` is its parameters cell."""
    nb = new_notebook(
        cells=[new_code_cell(textwrap.dedent(s).strip(), id=f"c{i}") for i, s in enumerate(sources)]
    )
    nb.metadata["kernelspec"] = {"name": "python3", "display_name": "python3", "language": "python"}
    if tagged is not None:
        nb.cells[tagged].metadata["tags"] = ["parameters"]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, path)


def make_clone(root, sweep=SWEEP):
    """The clone in the folder `root`, with the sweep `toy`."""
    write_notebook(root / "nbs" / "train.ipynb", TRAIN)
    write_notebook(root / "nbs" / "draw.ipynb", DRAW)
    (root / "data" / "sweeps").mkdir(parents=True)
    (root / "data" / "sweeps" / "toy.yaml").write_text(sweep)
    return root


def start(root, *arguments):
    """Start `kl_comedy reproduce` in the clone; its output goes to a pipe."""
    command = Path(sys.executable).with_name("kl_comedy")
    return subprocess.Popen(
        [command, "reproduce", *arguments],
        cwd=root,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait_for(condition, seconds=60):
    """Wait until `condition()` is true; returns its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {seconds} s: {condition}")


def kill(batch):
    """SIGKILL a batch, and wait until all that it had started has ended by itself."""
    family = psutil.Process(batch.pid).children(recursive=True)
    batch.kill()
    batch.communicate()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, f"left behind: {[p.cmdline() for p in alive]}"


def results(runs_dir):
    """Name -> text of all that a kill must not change: metrics, tables and figures.

    runs.csv is compared without `seconds`, the time that the last attempt took."""
    found = {
        path.relative_to(runs_dir): path.read_text()
        for pattern in ("metrics.jsonl", "*.csv", "checkpoint.json")
        for path in sorted(Path(runs_dir).rglob(pattern))
        if path.name != "runs.csv"
    }
    for path in sorted(Path(runs_dir).rglob("runs.csv")):
        found[path.relative_to(runs_dir)] = pd.read_csv(path).drop(columns="seconds").to_csv()
    return found
