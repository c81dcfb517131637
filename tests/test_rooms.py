"""The rooms of the package: imports run one way, and a public name means one thing."""

import ast
import subprocess
import sys
from collections import defaultdict
from importlib.util import resolve_name
from pathlib import Path

import pytest
from website import MODULES, ROOT, dotted, exported

# What a room may import, beside `files` and itself. The face, `__init__`, imports lazily.
MAY_IMPORT = {
    "files": set(),
    "theory": set(),
    "lab": {"theory"},
    "trainers": {"theory", "lab"},
    "auditing": {"theory", "lab", "trainers"},  # the last for the adapter of TRL alone
    "tasks": set(),
    "policies": {"theory", "tasks"},
    "study": {"theory", "lab", "trainers", "tasks", "policies"},
    "report": {"theory", "lab", "study"},
    "cli": {"auditing", "study", "report"},
}
# The audit's core is imported beside other libraries, where nothing but torch and numpy is.
CORE = [
    "theory",
    "lab",
    "auditing.toy",
    "auditing.expectation",
    "auditing.probes",
    "auditing.precision",
    "auditing.clamps",
    "auditing.naming",
    "auditing.report",
    "auditing.audit",
]


def room_of(name):
    """The room of an imported module, "" for the package itself, None for another package."""
    package, _, inner = name.partition(".")
    return inner.partition(".")[0] if package == "kl_comedy" else None


def imported(path):
    """The full names of the modules that the file at `path` imports, wherever it does."""
    package = dotted(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = resolve_name("." * node.level + (node.module or ""), package)
            yield name
            if name == "kl_comedy":
                yield from (f"{name}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_between_rooms_run_one_way(path):
    own = room_of(dotted(path))
    allowed = MAY_IMPORT[own] | {own, "files", "", "__version__"}
    if own == "auditing" and path.name != "trl.py":
        allowed -= {"trainers"}
    assert {room_of(name) for name in imported(path)} - {None} <= allowed


def test_the_order_of_the_rooms_has_no_cycle():
    seen = set()
    for room, may in MAY_IMPORT.items():
        assert may <= seen, f"{room} imports a room that is listed after it"
        seen.add(room)


def test_every_room_says_what_lives_in_it():
    for room in [path for path in (ROOT / "kl_comedy").rglob("*") if path.is_dir()]:
        if room.name == "__pycache__" or "data" in room.parts[-2:]:
            continue
        words = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
        assert words and "imports" in words, room.name


def test_notebooks_lie_in_the_rooms_that_they_export_to():
    books = {"theory": "derivations", "lab": "derivations"}
    for module in MODULES:
        notebook = Path(module.read_text().split("File to edit: ", 1)[1].split("\n", 1)[0][:-1])
        folder = list(notebook.parts[notebook.parts.index("nbs") + 1 : -1])
        room = list(dotted(module).split(".")[1:-1])
        assert folder == [books.get(name, name) for name in room], module


def test_a_public_name_means_one_thing():
    """Adapters apart: each speaks the language of its library."""
    places = defaultdict(list)
    for module in MODULES:
        if module.parent.name != "adapters":
            for name in exported(module):
                places[name].append(dotted(module))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_the_core_of_the_audit_needs_torch_and_numpy_alone():
    modules = [
        dotted(m)
        for m in MODULES
        if any(dotted(m).removeprefix("kl_comedy.").startswith(c) for c in CORE)
    ]
    code = (
        "import sys\nfor name in ('transformers', 'trl', 'datasets', 'pandas', 'scipy', "
        "'matplotlib', 'yaml', 'papermill'):\n    sys.modules[name] = None\n"
        + "\n".join(f"import {name}" for name in modules)
    )
    subprocess.run([sys.executable, "-c", code], check=True)
