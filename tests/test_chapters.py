"""What a notebook that exports is like: short pieces, and types on what is public."""

import ast
import json
import re

import pytest
from website import MODULES, ROOT, dotted

CELL, NOTEBOOK = 25, 150  # lines of exported code, at most
REASON = "Longer than a chapter should be:"
EXPORTING = [
    path
    for path in sorted(ROOT.glob("nbs/**/*.ipynb"))
    if "#| export" in path.read_text() and ".ipynb_checkpoints" not in path.parts
]


def without_docstrings(tree):
    """The lines of docstrings, as a set of numbers."""
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines |= {*range(first.lineno, first.end_lineno + 1)}
    return lines


def code_lines(source):
    """How many lines of a cell are code: not blank, comment, docstring or import."""
    tree = ast.parse(source)
    left_out = without_docstrings(tree)
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= {*range(node.lineno, node.end_lineno + 1)}
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in left_out
        for number, line in enumerate(source.splitlines(), 1)
    )


@pytest.mark.parametrize("path", EXPORTING, ids=lambda p: p.stem)
def test_a_chapter_is_short_or_says_why_not(path):
    cells = json.loads(path.read_text())["cells"]
    exported = {
        cell["id"]: code_lines("".join(cell["source"]))
        for cell in cells
        if cell["cell_type"] == "code"
        and re.search(r"^#\| export\b", "".join(cell["source"]), re.M)
    }
    long = {cell: lines for cell, lines in exported.items() if lines > CELL}
    total = sum(exported.values())
    if REASON in "".join(cells[0]["source"]):
        assert long or total > NOTEBOOK, "it is short: take the reason out"
    else:
        assert not long and total <= NOTEBOOK, f"{total} lines in all; too long: {long}"


@pytest.mark.parametrize("path", EXPORTING, ids=lambda p: p.stem)
def test_a_chapter_begins_with_a_title_and_what_it_is_for(path):
    cells = json.loads(path.read_text())["cells"]
    opening = "".join(cells[0]["source"])
    assert cells[0]["cell_type"] == "markdown" and opening.startswith("# ")
    assert len(opening.splitlines()) > 2, "a title alone"


def functions(tree):
    """Public functions, and public methods of public classes with their class."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node, None
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    if not inner.name.startswith("_") or inner.name in ("__init__", "__call__"):
                        yield inner, node


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_what_is_public_has_types_and_a_docstring(path):
    bare = []
    for function, owner in functions(ast.parse(path.read_text())):
        arguments = function.args.posonlyargs + function.args.args
        static = any(ast.unparse(d) == "staticmethod" for d in function.decorator_list)
        if owner is not None and not static:
            arguments = arguments[1:]
        arguments = arguments + function.args.kwonlyargs
        name = f"{owner.name}.{function.name}" if owner else function.name
        bare += [f"{name}({a.arg})" for a in arguments if a.annotation is None]
        if function.returns is None and function.name != "__init__":
            bare.append(f"{name} -> ?")
        if not ast.get_docstring(function) and function.name not in ("__init__", "__call__"):
            if owner is None or not owner.bases:  # an override has its docstring above it
                bare.append(f"{name}: no docstring")
    assert bare == []
