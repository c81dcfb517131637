"""Build the site: `python docs/build.py [FOLDER]` (default docs/_build/html).

The notebooks are staged in docs/_src in the layout of the repository, so that their relative
links hold, executed (`execute.py`), and read by Sphinx; every warning is an error and nothing is
fetched. Derivations, library and gallery are executed; experiments train, so they are shown as they
are. Figures and tables of the home page are those that the gallery has drawn in this build.
Each room of the package has a page, under which the menu folds the room's chapters.
nbdev's `proc_nbs` would take the exported cells out of the pages and the hidden ones out of the
execution: the same nbdev machinery is used here with one processor of our own. The finished site
replaces the old one; a failed build leaves it.
"""

import ast
import os
import re
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import pandas as pd
from execnb.nbio import mk_cell, write_nb
from nbdev.process import NBProcessor

from kl_comedy.study.sweeps import load_sweep, plan

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
SRC = DOCS / "_src"
PAGES = ["CHANGELOG.md", "CONTRIBUTING.md", "data/README.md"]
LINKED = ["data/*", "kl_comedy", "tests", "Makefile", "LICENSE", "README.md"]  # may be linked to
# Titles of rooms in the menu, where the name of the package is not enough.
ROOM_TITLES = {"auditing": "The audit", "auditing/adapters": "Adapters of libraries"}
# Folders of notebooks that are no room of the package: title, sentence, notebooks.
FOLDERS = {
    "experiments": (
        "Experiments",
        "Notebooks that papermill executes, one for each kind of run. They train or measure, and "
        "write what they found; the pages of the study draw it.",
        "/nbs/experiments/*",
    ),
    "package": ("Files and commands", "What stands above the rooms.", "/nbs/*"),
}
NOT_RUN = """```{note}
This notebook is shown without outputs. It trains: `kl_comedy reproduce` runs it, once for each cell
of a sweep.
```"""


def page_cell(cell, folded=False):
    "Turn nbdev's directives into tags that myst-nb knows; take directives and empty cells out."
    if cell.cell_type != "code":
        return
    tags = cell.metadata.setdefault("tags", [])
    if folded:
        tags.append("hide-input")
    if "hide" in cell.directives_:
        tags.append("remove-cell")
    if cell.directives_.get("eval:") == ["false"]:
        tags.append("skip-execution")
    cell.source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.MULTILINE).strip("\n")
    if not cell.source:
        del cell["source"]


def describe_figures(cells):
    "Give what the code cells draw an alternative text: the heading that they stand under."
    heading = ""
    for cell in cells:
        if cell.cell_type == "markdown":
            found = re.findall(r"^#+ (.*)$", cell.source, re.MULTILINE)
            heading = found[-1] if found else heading
        elif "subplots(" in cell.get("source", ""):
            plain = re.sub(r"[$`*\\\\]", "", heading)
            cell.metadata["mystnb"] = {"image": {"alt": f"Figure: {plain}"}}


def stale(root):
    """Why recorded runs under `root` cannot be drawn by the code of today: a list of reasons.

    The name of a run holds the hash of its parameters, so it tells whether the sweep and its
    notebook would make the same run now.
    """
    found = []
    for path in sorted(root.glob("data/sweeps/*.yaml")):
        sweep, table = load_sweep(path, root), root / "data" / "runs" / path.stem / "runs.csv"
        if sweep.gallery is None:
            continue
        again = f"record it with kl_comedy reproduce {sweep.name} --scale cpu --record"
        if not table.exists():
            found.append(f"{table.relative_to(root)} is missing: {again}")
            continue
        runs = pd.read_csv(table)
        if lacking := sorted({"run", "scale", "state", "version"} - set(runs)):
            found.append(f"{table.relative_to(root)} has no column {', '.join(lacking)}: {again}")
            continue
        for scale, rows in runs.groupby("scale"):
            planned = set(plan(sweep, scale)) if scale in sweep.scales else set()
            if odd := sorted(planned ^ set(rows.run)):
                found.append(
                    f"{table.relative_to(root)} is not what {path.name} says of scale "
                    f"{scale}, as to {len(odd)} runs such as {odd[0]}: {again}"
                )
    return found


def stage_notebook(path, executed):
    "Write the page of the notebook at `path`, a path in the repository, to docs/_src."
    # The gallery is read for its figures: the code that draws them is one click away.
    process = partial(page_cell, folded=path.parent.name == "gallery")
    page = NBProcessor(ROOT / path, procs=[process], process=True).nb
    describe_figures(page.cells)
    if not executed:
        page.cells.insert(1, mk_cell(NOT_RUN, "markdown"))
    (SRC / path).parent.mkdir(parents=True, exist_ok=True)
    write_nb(page, SRC / path)


def room_sentence(package):
    "What lives in a room, and what it may import: the docstring of its package."
    return ast.get_docstring(ast.parse((package / "__init__.py").read_text()))


def rooms():
    "The packages of kl_comedy, a room each, and those within them: paths of folders."
    return sorted(path.parent for path in ROOT.glob("kl_comedy/*/**/__init__.py"))


def stage_room(name, title, sentence, entries):
    "Write the page of a room, with the chapters that its folded entry in the menu holds."
    lines = [f"# {title}", "", sentence, "", "```{toctree}", ":glob:"]
    lines += [":maxdepth: 1", *entries, "```"]
    page = SRC / "rooms" / f"{name}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(lines) + "\n")


def stage_rooms():
    """Write a page for each room whose chapters have a folder of their own, to docs/_src/rooms.

    Theory and lab have none: their chapters are the derivations, which the menu shows in full."""
    for package in rooms():
        name = package.relative_to(ROOT / "kl_comedy").as_posix()
        if not any((ROOT / "nbs" / name).glob("*.ipynb")):
            continue
        inner = [path for path in rooms() if path.parent == package]
        entries = [f"/nbs/{name}/*", *(f"{package.name}/{path.name}" for path in inner)]
        title = ROOM_TITLES.get(name, package.name.capitalize())
        stage_room(name, title, room_sentence(package), entries)
    for name, (title, sentence, entry) in FOLDERS.items():
        stage_room(name, title, sentence, [entry])


def stage_home():
    """Write the home page to docs/_src, less the places in its menu that no notebook takes yet.

    Such a place is a pattern that matches nothing, of which Sphinx would warn."""
    lines = (DOCS / "index.md").read_text().splitlines(keepends=True)
    patterns = {line for line in lines if re.match(r"nbs/\S*[*[]\S*$", line)}
    empty = {line for line in patterns if not any(ROOT.glob(f"{line.strip()}.ipynb"))}
    (SRC / "index.md").write_text("".join(line for line in lines if line not in empty))


def stage_api_index():
    "Write the index of the API: for each room its sentence and its modules."
    text = (DOCS / "api.rst").read_text()
    for package in [ROOT / "kl_comedy", *rooms()]:
        name = ".".join(package.relative_to(ROOT).parts)
        sentence = room_sentence(package).replace("`", "``")
        title = name.removeprefix("kl_comedy.")
        lines = ["", title, "-" * len(title), "", sentence]
        pages = [f"   {name}.{module.stem}" for module in exported_modules(package)]
        if pages:
            lines += ["", ".. toctree::", "   :maxdepth: 1", "", *pages]
        text += "\n".join(lines) + "\n"
    (SRC / "api" / "index.rst").write_text(text)


def exported_modules(package):
    """The modules right in a package that a notebook exports: paths of Python files.

    Adapters are left out: to be imported each needs a library that is not here. Their chapters
    show them whole."""
    if package.name == "adapters":
        return []
    return [path for path in sorted(package.glob("[a-z]*.py")) if notebook_of(path)]


def notebook_of(module):
    "The notebook that exports a module, a path without its ending; empty if none does."
    found = re.search(r"File to edit: (?:\.\./)+(nbs/.*)\.ipynb", module.read_text())
    return found[1] if found else ""


def constants(text):
    "The public names that the code of a module assigns, which automodule leaves out."
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            public = [name.id for name in names if isinstance(name, ast.Name)]
            yield from (name for name in public if not name.startswith("_"))


def stage_api(module):
    "Write the API page of one exported module, a path of a Python file, to docs/_src/api."
    text, notebook = module.read_text(), notebook_of(module)
    name = ".".join(module.relative_to(ROOT).with_suffix("").parts)
    lines = [
        ":nosearch:",  # of its words, which its chapter has too; its names are still found
        "",
        name,
        "=" * len(name),
        "",
        f"The chapter: :doc:`/{notebook}`.",
        "",
        f".. automodule:: {name}",
    ]
    for constant in constants(text):
        lines += ["", f".. py:data:: {constant}", f"   :module: {name}"]
    (SRC / "api" / f"{name}.rst").write_text("\n".join(lines) + "\n")


def stage():
    "Lay out the sources of the site in docs/_src, anew; the paths of the notebooks to execute."
    shutil.rmtree(SRC, ignore_errors=True)
    for folder in ("api", "data"):
        (SRC / folder).mkdir(parents=True)
    for page in DOCS.glob("*.md"):
        shutil.copy(page, SRC)
    stage_home()
    stage_api_index()
    stage_rooms()
    for name in PAGES:
        shutil.copy(ROOT / name, SRC / name)
    for path in (p.relative_to(ROOT) for name in LINKED for p in ROOT.glob(name)):
        if path.as_posix() not in PAGES:
            (SRC / path).symlink_to(ROOT / path)
    notebooks = sorted(p.relative_to(ROOT) for p in ROOT.glob("nbs/**/*.ipynb"))
    for path in notebooks:
        stage_notebook(path, path.parent.name != "experiments")
    for package in [ROOT / "kl_comedy", *rooms()]:
        for module in exported_modules(package):
            stage_api(module)
    return [SRC / path for path in notebooks if path.parent.name != "experiments"]


def read_by_sphinx(arguments):
    "Build with Sphinx in this process, which has the packages imported that autodoc asks for."
    from sphinx.cmd.build import main as sphinx

    sys.exit(sphinx([str(argument) for argument in arguments]))


def main():
    started = time.monotonic()
    out = Path(sys.argv[1] if len(sys.argv) > 1 else DOCS / "_build" / "html").resolve()
    new = out.with_name(f"{out.name}.new")
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    os.environ.pop("MPLBACKEND", None)  # figures go into the pages
    if reasons := stale(ROOT):
        sys.exit("The site was not built:\n" + "\n".join(reasons))
    from execute import FORK, execute_all  # imports torch, which reads the environment

    shutil.rmtree(new, ignore_errors=True)
    jobs = min(4, os.cpu_count())
    failed = execute_all(stage(), jobs)
    if failed:
        sys.exit(
            f"The site was not built, by {', '.join(p.name for p in failed)}: the reason is "
            f"above. {out} was left as it was."
        )
    sphinx = FORK.Process(
        target=read_by_sphinx,
        args=(
            [
                "-n",
                "-W",
                "--keep-going",
                "-E",
                "-j",
                jobs,
                "-c",
                DOCS,
                "-d",
                out.with_name("doctrees"),
                SRC,
                new,
            ],
        ),
    )
    sphinx.start()
    sphinx.join()
    if sphinx.exitcode:
        sys.exit(f"The site was not built: the reason is above. {out} was left as it was.")
    shutil.rmtree(out, ignore_errors=True)
    new.rename(out)
    print(f"{out}/index.html, built in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
