"""The built site: complete, whole, nothing fetched from outside, and right in a real browser."""

import io
import json
import re
import shutil
import subprocess
import sys
from base64 import b64decode, b64encode
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pandas as pd
import pytest
from docutils import nodes
from docutils.core import publish_doctree
from execnb.nbio import mk_cell, read_nb, write_nb
from matplotlib import pyplot as plt
from PIL import Image
from website import DOCS, MODULES, ROOT, Page, dotted, exported, pages_of

from kl_comedy import __version__
from kl_comedy.auditing.libraries import load_records, setting_rows

sys.path.insert(0, str(DOCS))
import build  # noqa: E402
import conf  # noqa: E402
import execute  # noqa: E402


def problems(root):
    """Everything on the pages under `root` that leads nowhere or is fetched from outside."""
    pages = {path: Page(path) for path in pages_of(root)}
    found = []
    for path, page in pages.items():
        for address in page.links + page.fetched:
            url = urlsplit(address)
            where = f"{path.relative_to(root)}: {address}"
            if url.scheme or url.netloc:
                if address in page.fetched and url.scheme != "data":
                    found.append(f"{where} is fetched from outside")
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if target.is_dir():
                target = target / "index.html"
            if not target.is_relative_to(root.resolve()) or not target.exists():
                found.append(f"{where} does not exist")
            elif (
                url.fragment
                and target in pages
                and (unquote(url.fragment) not in pages[target].anchors)
            ):
                found.append(f"{where} has no such anchor")
    for path in root.rglob("*.css"):
        for address in re.findall(
            r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)", path.read_text(errors="replace")
        ):
            found.append(f"{path.relative_to(root)}: {address} is fetched from outside")
    return found


def test_every_link_anchor_and_image_resolves_and_nothing_is_fetched_from_outside(site):
    assert problems(site) == []


GOOD = '<a href="b/two.html#there">x</a><a href="https://arxiv.org/">y</a><a href="#a">z</a>'


@pytest.mark.parametrize(
    "fault, report",
    [
        ("", []),
        ('<a href="b/three.html">', ["one.html: b/three.html does not exist"]),
        ('<a href="b/two.html#gone">', ["one.html: b/two.html#gone has no such anchor"]),
        ('<img src="b/plot.png">', ["one.html: b/plot.png does not exist"]),
        ('<a href="../outside.html">', ["one.html: ../outside.html does not exist"]),
        (
            '<script src="https://cdn.example/x.js"></script>',
            ["one.html: https://cdn.example/x.js is fetched from outside"],
        ),
        (
            '<link rel="stylesheet" href="//cdn.example/x.css">',
            ["one.html: //cdn.example/x.css is fetched from outside"],
        ),
    ],
)
def test_the_check_of_links_finds_a_planted_fault(tmp_path, fault, report):
    (tmp_path / "outside.html").write_text("")
    (tmp_path / "site" / "b").mkdir(parents=True)
    (tmp_path / "site" / "one.html").write_text(f'<h1 id="a">{GOOD}{fault}')
    (tmp_path / "site" / "b" / "two.html").write_text('<h1 id="there"><a href="../one.html">')
    assert problems(tmp_path / "site") == report


def test_a_font_from_outside_is_found(tmp_path):
    (tmp_path / "x.css").write_text("@font-face { src: url('https://fonts.example/a.woff2') }")
    assert problems(tmp_path) == ["x.css: https://fonts.example/a.woff2 is fetched from outside"]


# The adapters have no page in the API: each needs a library that is not here.
DOCUMENTED = [module for module in MODULES if module.parent.name != "adapters"]


@pytest.mark.parametrize("module", DOCUMENTED, ids=dotted)
def test_every_exported_name_is_in_the_api_pages(site, module):
    anchors = Page(site / "api" / f"{dotted(module)}.html").anchors
    assert {f"{dotted(module)}.{name}" for name in exported(module)} <= anchors


ROOMS = sorted(path.parent for path in ROOT.glob("kl_comedy/*/**/__init__.py"))


def plain(page):
    """The words of a page."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page.read_text())).split())


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_the_api_says_what_lives_in_each_room(site, room):
    sentence = " ".join(build.room_sentence(room).replace("'", "\u2019").split())
    assert sentence in plain(site / "api" / "index.html").replace("'", "\u2019")


def sidebar(page):
    """The menu of a page: of each entry, how deep it stands and where it leads."""
    text = page.read_text()
    start = text.index('<nav class="bd-links')
    menu = text[start : text.index("</nav>", start)]
    return re.findall(r'<li class="toctree-l(\d)[^>]*><a class="[^"]*" href="([^"]*)"', menu)


def test_the_menu_shows_the_journey_and_folds_the_rooms(site):
    """The chapters of rooms, adapters and the API's modules stand below an entry of the menu."""
    depths = {}
    for depth, link in sidebar(site / "index.html"):
        depths.setdefault(link, int(depth))
    for link, depth in depths.items():
        folder = link.rpartition("/")[0]
        if folder in ("nbs/derivations", "nbs/gallery", "rooms"):
            assert depth == 1, link
        elif folder.startswith("nbs") or folder == "api" and link != "api/index.html":
            assert depth > 1, link
    assert depths["nbs/auditing/adapters/trl.html"] == 3
    assert sum(depth == 1 for depth in depths.values()) < 40
    assert "<details open" not in (site / "index.html").read_text()


LEADS = ["30a_table1", "30b_figure1", "31_on_policy", "31b_variants", "35_claims", "37_speed"]


@pytest.mark.parametrize("name", LEADS)
def test_a_page_of_the_study_opens_with_its_answer_and_a_figure(site, name):
    text = (site / "nbs" / "gallery" / f"{name}.html").read_text()
    article = text[text.index("<article") :]
    shown = article.index("<table" if name == "30a_table1" else "_images/")
    code = article.index("<details")
    assert article.index("<strong>") < shown < code
    assert article.count('class="cell lead') == 1


def test_a_docstring_is_plain_text_and_a_doctest_stays_as_it_is():
    words = "A *b* of |c_d_| and `e_f*`, a \\."
    doctest = """>>> x_y = [1, 2]
>>> print(*x_y, "`|\\\\")
1 2 `|\\"""
    lines = f"{words}\n\n{doctest}\n\n{words}".split("\n")
    conf.plain_docstring(None, "function", "f", None, None, lines)
    tree = publish_doctree("\n".join(lines), settings_overrides={"report_level": 5})
    first, example, last = tree.children
    assert isinstance(example, nodes.doctest_block) and example.astext() == doctest
    assert first.astext() == last.astext() == words.replace("`", "")


def test_every_notebook_is_a_page_in_the_menu(site):
    home = {urlsplit(link).path for link in Page(site / "index.html").links}
    notebooks = {
        p.relative_to(ROOT).with_suffix(".html").as_posix() for p in ROOT.glob("nbs/**/*.ipynb")
    }
    assert notebooks <= home


def test_no_nbdev_directive_is_left_on_a_page(site):
    marked = [
        p.name
        for p in site.glob("nbs/*/*.html")
        if re.search(r"#\|\s*(export|hide|default_exp|eval)", p.read_text())
    ]
    assert marked == []


def test_derivations_show_their_figures(site):
    for path in ROOT.glob("nbs/derivations/*.ipynb"):
        if ".subplots(" in path.read_text():
            page = site / path.relative_to(ROOT).with_suffix(".html")
            assert "_images/" in page.read_text(), f"{page.name} has no figure"


def staged(monkeypatch, folder, *cells, executed=True):
    """The notebook of `cells`, staged as a page in `folder`."""
    path = Path("nbs/experiments/01_test.ipynb")
    monkeypatch.setattr(build, "ROOT", folder)
    monkeypatch.setattr(build, "SRC", folder / "src")
    (folder / path).parent.mkdir(parents=True)
    write_nb(
        {
            "cells": list(cells),
            "nbformat": 4,
            "nbformat_minor": 5,
            "metadata": {"kernelspec": {"name": "python3", "language": "python"}},
        },
        folder / path,
    )
    build.stage_notebook(path, executed)
    return read_nb(folder / "src" / path)


def test_directives_become_what_the_page_needs(tmp_path, monkeypatch):
    page = staged(
        monkeypatch,
        tmp_path,
        mk_cell("# Title", "markdown"),
        mk_cell("#| default_exp x"),
        mk_cell("#| export\ndef f(): pass"),
        mk_cell("#| hide\nimport nbdev"),
        mk_cell("#| eval: false\nboom()"),
    )
    assert [(c.source, c.metadata.get("tags", [])) for c in page.cells] == [
        ("# Title", []),
        ("def f(): pass", []),
        ("import nbdev", ["remove-cell"]),
        ("boom()", ["skip-execution"]),
    ]


def test_a_notebook_that_is_not_executed_says_so(tmp_path, monkeypatch):
    page = staged(monkeypatch, tmp_path, mk_cell("# Title", "markdown"), executed=False)
    assert "without outputs" in page.cells[1].source


def notebook(folder, *cells):
    """The path of a notebook of `cells` in `folder`."""
    folder.mkdir(exist_ok=True)
    write_nb(
        {
            "cells": list(cells),
            "nbformat": 4,
            "nbformat_minor": 5,
            "metadata": {"kernelspec": {"name": "python3"}},
        },
        folder / "page.ipynb",
    )
    return folder / "page.ipynb"


@pytest.mark.parametrize(
    "cell, words",
    [
        ("1 / 0", "ZeroDivisionError"),
        ("x = ", "SyntaxError"),
        ("import time; time.sleep(60)", "more than 2 s"),
        ("import os; os._exit(3)", ""),
    ],
)
def test_a_cell_that_fails_or_hangs_fails_the_build(tmp_path, monkeypatch, capfd, cell, words):
    monkeypatch.setattr(execute, "PRELOADED", [])
    monkeypatch.setattr(execute, "TIMEOUT", 2)
    bad = notebook(tmp_path / "a", mk_cell(cell))
    good = notebook(tmp_path / "b", mk_cell("x = 6 * 7"), mk_cell("print(x)\nx"))
    assert execute.execute_all([bad, good], 2) == [bad]
    assert words in capfd.readouterr().err
    printed, value = read_nb(good).cells[1].outputs
    assert (printed["text"], value["data"]["text/plain"]) == (["42\n"], ["42"])


def drawn(curves, shade):
    """A figure of so many curves, as PNG in base64."""
    fig, ax = plt.subplots(figsize=(7, 5))
    for i in range(curves):
        wave = np.sin(np.linspace(0, 9, 300) + i)
        ax.plot(wave, lw=2, color=plt.cm.hsv(i / curves), label=f"{i}")
        ax.fill_between(range(300), 0, i / curves, alpha=shade)
    ax.legend(ncols=3)
    fig.savefig(file := io.BytesIO(), format="png")
    plt.close(fig)
    return b64encode(file.getvalue()).decode()


def test_a_picture_gets_smaller_and_looks_the_same():
    before = drawn(curves=4, shade=0.1)
    after = execute.smaller(before)
    pixels = [
        np.asarray(Image.open(io.BytesIO(b64decode(png))).convert("RGB"), int)
        for png in (before, after)
    ]
    assert len(after) < len(before) / 2 and 0 < abs(pixels[0] - pixels[1]).max() <= 25
    colours, count = np.unique(pixels[0].reshape(-1, 3), axis=0, return_counts=True)
    for shade in colours[np.argsort(-count)[:8]]:  # paper, curves, bands: none is changed
        of_it = (pixels[0] == shade).all(-1)
        assert of_it.sum() > 100 and (pixels[1][of_it] == shade).all()


def test_a_picture_of_too_many_colours_stays():
    before = drawn(curves=12, shade=0.1)
    assert execute.smaller(before) == before


def test_a_broken_link_fails_the_build(tmp_path):
    path = notebook(tmp_path / "src", mk_cell("# Title\n\n[gone](gone.ipynb)", "markdown"))
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-n",
            "-W",
            "-E",
            "-q",
            "-c",
            DOCS,
            "-D",
            "root_doc=page",
            "-D",
            "include_patterns=page.ipynb",
            path.parent,
            tmp_path / "out",
        ],
        capture_output=True,
        text=True,
    )
    assert ran.returncode != 0 and "gone.ipynb" in ran.stderr


def test_no_recorded_run_is_stale():
    assert build.stale(ROOT) == []


def without_runs(root):
    (root / "data/runs/table1/runs.csv").unlink()


def with_another_sweep(root):
    path = root / "data/sweeps/table1.yaml"
    path.write_text(path.read_text().replace("horizon: 4", "horizon: 5"))


def with_a_new_parameter(root):
    path = root / "nbs/experiments/24_gradients.ipynb"
    path.write_text(path.read_text().replace('"seed = 0\\n"', '"seed = 0\\n", "more = 1\\n"'))


def without_version(root):
    path = root / "data/runs/table1/runs.csv"
    pd.read_csv(path).drop(columns="version").to_csv(path, index=False)


@pytest.mark.parametrize(
    "plant, words",
    [
        (without_runs, "data/runs/table1/runs.csv is missing"),
        (with_another_sweep, "is not what table1.yaml says of scale cpu"),
        (with_a_new_parameter, "is not what table1.yaml says of scale cpu"),
        (without_version, "has no column version"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_figure_whose_runs_are_missing_or_old_fails_the_build(
    tmp_path, monkeypatch, plant, words
):
    for name in (
        "data/sweeps/table1.yaml",
        "data/runs/table1/runs.csv",
        "nbs/experiments/24_gradients.ipynb",
        "nbs/gallery/30a_table1.ipynb",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert build.stale(tmp_path) == []
    plant(tmp_path)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["build.py", str(tmp_path / "html")])
    with pytest.raises(SystemExit, match=words):
        build.main()


def test_the_figure_of_the_readme_is_the_one_that_was_drawn(site):
    (drawn,) = site.glob("_images/headline*.png")
    assert drawn.read_bytes() == (DOCS / "_static" / "headline.png").read_bytes()


def test_the_readme_is_short():
    """Code and tables count as well."""
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) < 900
    assert [line for line in text.splitlines() if len(line) >= 120] == []


def test_the_readme_opens_with_what_to_do():
    """On the first screen: what to type in TRL, when it does not hold, and what was not done."""
    start = " ".join((ROOT / "README.md").read_text()[:2200].split())
    for words in (
        "use `RLOOTrainer`",
        "**Why.**",
        "**When it does not hold.**",
        "No large model has been trained",
    ):
        assert words in start


PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_the_code_of_the_readme_runs(tmp_path):
    """What needs no model from the hub: the audit, and every import."""
    blocks = PYTHON.findall((ROOT / "README.md").read_text())
    code = [block for block in blocks if "trainer = " not in block]
    assert len(blocks) == 3 and len(code) == 1
    imports = [line for block in blocks for line in block.splitlines() if line.startswith("from ")]
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join([*imports, *code])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = re.findall(r"^# (.*?)(?:, \.\.\.)?$", "\n".join(code), re.MULTILINE)
    assert len(said) >= 2 and all(words in ran.stdout for words in said), ran.stdout


def test_the_home_page_says_what_each_library_does_by_default(site):
    text = " ".join(re.sub(r"<[^>]*>", " ", (site / "index.html").read_text()).split())
    for found in load_records(ROOT / "data" / "libraries").values():
        for row in setting_rows(found):
            if row["default"]:
                words = unescape(row["verdict"]).removesuffix(", but where a clamp acts")
                assert re.search(
                    rf"{found['title']} [^|]{{3,90}}{re.escape(words)}", text.replace("\u2019", "'")
                ), (found["title"], words)


def test_the_menu_leads_from_the_choice_to_the_reference(site):
    links = [urlsplit(link).path for link in Page(site / "index.html").links]
    order = [
        "nbs/gallery/36_choose",
        "nbs/derivations/01_estimators",
        "nbs/derivations/08_optimum",
        "nbs/gallery/31_on_policy",
        "nbs/gallery/30b_figure1",
        "nbs/gallery/34_libraries",
        "nbs/gallery/35_claims",
        "rooms/auditing",
        "nbs/auditing/01_toy",
        "nbs/auditing/adapters/trl",
        "nbs/experiments/20_on_policy",
        "api/index",
        "reproduce",
        "CHANGELOG",
        "CONTRIBUTING",
    ]
    menu = list(dict.fromkeys(link for link in links if link in {f"{x}.html" for x in order}))
    assert menu == [f"{x}.html" for x in order]


def test_the_changelog_has_this_version():
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def search_index(site):
    text = (site / "searchindex.js").read_text()
    return json.loads(text[text.index("(") + 1 : text.rindex(")")])


def test_search_finds_every_exported_name(site):
    objects = search_index(site)["objects"]
    known = {f"{prefix}.{entry[-1]}" for prefix, entries in objects.items() for entry in entries}
    wanted = {f"{dotted(m)}.{name}" for m in DOCUMENTED for name in exported(m)}
    assert wanted - known == set()


NOTEBOOKS = [p.relative_to(ROOT) for p in sorted(ROOT.glob("nbs/**/*.ipynb"))]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_page_offers_its_notebook(site, path):
    page = site / path.with_suffix(".html")
    (link,) = {link for link in Page(page).links if link.endswith(".ipynb")}
    offered = (page.parent / link).resolve()
    plain = re.compile(r"^#\|.*\n?", re.M)
    code = [
        [
            plain.sub("", cell.source).strip("\n")
            for cell in read_nb(nb).cells
            if cell.cell_type == "code"
        ]
        for nb in (offered, ROOT / path)
    ]
    assert code[0] == [source for source in code[1] if source]


def test_a_notebook_from_the_site_runs(site, tmp_path):
    """In its folder of a clone, papermill's parameters included."""
    path = Path("nbs/gallery/30a_table1.ipynb")
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "papermill",
            site / "_sources" / path,
            tmp_path / "out.ipynb",
            "--cwd",
            ROOT / path.parent,
            "-p",
            "out_dir",
            tmp_path,
        ],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert (tmp_path / "table1.csv").exists()
