"""Execute the notebooks of the site: each in a fork of one process that has imported the packages.

Imports take up to ten seconds of a core, more than most notebooks do: here they are made once. A
fork is as fresh as a new kernel: no notebook sees what another one did.
"""

import importlib
import multiprocessing
import os
import sys
import time
from base64 import b64decode, b64encode
from io import BytesIO
from multiprocessing.connection import wait

import numpy as np
from execnb.nbio import read_nb, write_nb
from execnb.shell import CaptureShell
from PIL import Image

PRELOADED = [
    "kl_comedy.report.figures",
    "kl_comedy.trainers.rloo_grpo",
    "kl_comedy.auditing.audit",
    "papermill",
]
TIMEOUT = 300  # seconds of one notebook
FORK = multiprocessing.get_context("fork")


def skipped(cell):
    "Whether a cell is shown and not run."
    return cell.cell_type != "code" or "skip-execution" in cell.metadata.get("tags", [])


def smaller(picture):
    """A PNG in base64 with at most 256 colours: a quarter of the bytes, no difference to the eye.

    Colours that fill areas and lines, the most frequent ones, stay exactly as they are; the others
    become the nearest of those kept. A picture of which one would change by more than a tenth
    stays."""
    image, file = Image.open(BytesIO(b64decode(picture))).convert("RGB"), BytesIO()
    pixels = np.asarray(image).reshape(-1, 3) @ [1 << 16, 1 << 8, 1]
    codes, place, count = np.unique(pixels, return_inverse=True, return_counts=True)
    colours = np.stack([codes >> 16, codes >> 8 & 255, codes & 255], -1)
    far = np.full(len(codes), 256)  # from the nearest that is kept
    nearest, palette = np.zeros(len(codes), np.uint8), []
    frequent = np.argsort(-count)[:48]
    for n in range(min(256, len(codes))):
        palette.append(colours[frequent[n] if n < len(frequent) else far.argmax()])
        away = abs(colours - palette[-1]).max(1)
        nearest[away < far], far = n, np.minimum(away, far)
    if far.max() > 25:
        return picture
    few = Image.fromarray(nearest[place].reshape(image.size[::-1]))
    few.putpalette(np.concatenate(palette).astype(np.uint8).tobytes())
    few.save(file, "PNG", optimize=True)
    return b64encode(file.getvalue()).decode()


def execute(path):
    "Run the notebook at `path` in its folder, write its outputs into it; exit with 1 if it fails."
    os.chdir(path.parent)
    page = read_nb(path)
    shell = CaptureShell(path=path.parent, mpl_format="png")
    for number, cell in enumerate(page.cells):
        if skipped(cell):
            continue
        shell.cell(cell)
        if shell.exc:
            errors = [out for out in cell.outputs if out["output_type"] == "error"]
            print(
                f"{path}, cell {number}:\n{cell.source}\n",
                *errors[0]["traceback"],
                sep="\n",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
        cell.outputs = [out for out in cell.get("outputs", []) if out.get("name") != "stderr"]
        for data in [out["data"] for out in cell.outputs if "image/png" in out.get("data", {})]:
            data["image/png"] = smaller(data["image/png"])
    write_nb(page, path)


def execute_all(paths, jobs):
    "Execute notebooks, `jobs` at a time; the paths of those that failed."
    for name in PRELOADED:
        importlib.import_module(name)
    waiting, running, failed = list(paths)[::-1], {}, []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                path = waiting.pop()
                process = FORK.Process(target=execute, args=(path,))
                process.start()
                running[process.sentinel] = process, path, time.monotonic()
            done = wait(list(running), timeout=1)
            for sentinel, (process, path, started) in list(running.items()):
                if sentinel not in done and time.monotonic() - started > TIMEOUT:
                    print(f"{path}: more than {TIMEOUT} s", file=sys.stderr)
                    process.kill()
                    done.append(sentinel)
                if sentinel in done:
                    process.join()
                    del running[sentinel]
                    failed += [path] if process.exitcode else []
    finally:
        for process, *_ in running.values():
            process.kill()
    return failed
