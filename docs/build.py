"""Build the site: `python docs/build.py [FOLDER]` (default docs/_build/html).

The notebooks are staged in docs/_src in the layout of the repository, so that their relative
links hold, and read by Sphinx; every warning is an error and nothing is fetched. Derivations,
library and gallery are executed; experiments train, so they are shown as they are. nbdev's
`proc_nbs` would take the exported cells out of the pages and the hidden ones out of the execution:
the same nbdev machinery is used here with one processor of our own. The finished site replaces the
old one; a failed build leaves it.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml
from execnb.nbio import mk_cell, write_nb
from nbdev.process import NBProcessor

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
SRC = DOCS / "_src"
PAGES = ["CONTRIBUTING.md", "data/README.md"]
LINKED = ["data/*", "kl_comedy", "tests", "Makefile", "LICENSE", "README.md"]  # may be linked to
NOT_RUN = """```{note}
This notebook is shown without outputs. %s
```"""
WHY = {"experiments": "It trains: `kl_comedy reproduce` runs it, once for each cell of a sweep.",
       "gallery": "Its runs have not been recorded yet."}


def page_cell(cell):
    "Turn nbdev's directives into tags that myst-nb knows; take directives and empty cells out."
    if cell.cell_type != "code":
        return
    tags = cell.metadata.setdefault("tags", [])
    if "hide" in cell.directives_:
        tags.append("remove-cell")
    if cell.directives_.get("eval:") == ["false"]:
        tags.append("skip-execution")
    cell.source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.MULTILINE).strip("\n")
    if not cell.source:
        del cell["source"]


def unrecorded():
    "Gallery notebooks, as paths in the repository, of the sweeps whose runs are not in data/runs."
    sweeps = {path: yaml.safe_load(path.read_text()) for path in ROOT.glob("data/sweeps/*.yaml")}
    return {sweep.get("gallery") for path, sweep in sweeps.items()
            if not (ROOT / "data" / "runs" / path.stem).is_dir()}


def stage_notebook(path, executed):
    "Write the page of the notebook at `path`, a path in the repository, to docs/_src."
    page = NBProcessor(ROOT / path, procs=[page_cell], process=True).nb
    page.metadata["mystnb"] = {"execution_mode": "force" if executed else "off"}
    if not executed:
        page.cells.insert(1, mk_cell(NOT_RUN % WHY[path.parent.name], "markdown"))
    (SRC / path).parent.mkdir(parents=True, exist_ok=True)
    write_nb(page, SRC / path)


def stage_api(module):
    "Write the API page of one exported module, a path of a Python file, to docs/_src/api."
    text = module.read_text()
    notebook = re.search(r"File to edit: \.\./(nbs/.*)\.ipynb", text)
    if notebook is None:
        return
    name = f"kl_comedy.{module.stem}"
    lines = [name, "=" * len(name), "", f"The chapter: :doc:`/{notebook[1]}`.", "",
             f".. automodule:: {name}"]
    for node in ast.parse(text).body:  # constants, which automodule leaves out
        for constant in ast.walk(node) if isinstance(node, ast.Assign) else ():
            if isinstance(constant, ast.Name) and isinstance(constant.ctx, ast.Store) and (
                    not constant.id.startswith("_")):
                lines += ["", f".. py:data:: {constant.id}", f"   :module: {name}"]
    (SRC / "api" / f"{module.stem}.rst").write_text("\n".join(lines) + "\n")


def stage():
    "Lay out the sources of the site in docs/_src, anew."
    shutil.rmtree(SRC, ignore_errors=True)
    for folder in ("api", "data"):
        (SRC / folder).mkdir(parents=True)
    for name in ("index.md", "explorer.md"):
        shutil.copy(DOCS / name, SRC)
    shutil.copy(DOCS / "api.rst", SRC / "api" / "index.rst")
    for name in PAGES:
        shutil.copy(ROOT / name, SRC / name)
    for path in (p.relative_to(ROOT) for name in LINKED for p in ROOT.glob(name)):
        if path.as_posix() not in PAGES:
            (SRC / path).symlink_to(ROOT / path)
    without_data = unrecorded()
    for path in sorted(p.relative_to(ROOT) for p in ROOT.glob("nbs/*/*.ipynb")):
        kind = path.parent.name
        stage_notebook(path, kind in ("derivations", "library", "adapters")
                       or kind == "gallery" and path.as_posix() not in without_data)
    for module in sorted(ROOT.glob("kl_comedy/[a-z]*.py")):
        stage_api(module)


def main():
    started = time.monotonic()
    out = Path(sys.argv[1] if len(sys.argv) > 1 else DOCS / "_build" / "html").resolve()
    new = out.with_name(f"{out.name}.new")
    stage()
    for folder in (new, out.with_name("jupyter_execute")):
        shutil.rmtree(folder, ignore_errors=True)
    jobs = min(4, os.cpu_count())
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
                        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env.pop("MPLBACKEND", None)  # figures go into the pages
    sphinx = [sys.executable, "-m", "sphinx", "-n", "-W", "--keep-going", "-E", "-j", str(jobs),
              "-c", DOCS, "-d", out.with_name("doctrees"), SRC, new]
    if subprocess.run(sphinx, env=env).returncode:
        sys.exit(f"The site was not built: the reason is above. {out} was left as it was.")
    shutil.rmtree(out, ignore_errors=True)
    new.rename(out)
    print(f"{out}/index.html, built in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
