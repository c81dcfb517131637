"""The built site: complete, whole, nothing fetched from outside, and right in a real browser."""

import ast
import fcntl
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from html import unescape
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from execnb.nbio import mk_cell, read_nb, write_nb

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SITE = DOCS / "_build" / "html"
SOURCES = ["docs/*.*", "docs/_static/*", "nbs/*/*.ipynb", "kl_comedy/*.py", "data/**/*",
           "CONTRIBUTING.md"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# What a browser fetches by itself to show a page, tag by tag; a link is only followed by a reader.
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src",
           "audio": "src", "embed": "src", "object": "data", "link": "href", "image": "href"}

spec = importlib.util.spec_from_file_location("docs_build", DOCS / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


@pytest.fixture(scope="session")
def site():
    """The folder of the site, built unless it is newer than everything that it is made of."""
    (DOCS / "_build").mkdir(exist_ok=True)
    with open(DOCS / "_build" / "lock", "w") as lock:  # one build, whatever the number of workers
        fcntl.flock(lock, fcntl.LOCK_EX)
        index = SITE / "index.html"
        newest = max(p.stat().st_mtime for name in SOURCES for p in ROOT.glob(name))
        if not index.exists() or index.stat().st_mtime < newest:
            command = [sys.executable, DOCS / "build.py"]
            ran = subprocess.run(command, capture_output=True, text=True)
            assert ran.returncode == 0, (ran.stdout + ran.stderr)[-5000:]
    return SITE


class Page(HTMLParser):
    """Anchors, links and fetched addresses of one HTML file."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.fetched = set(), [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs[name] for name in ("id", "name") if attrs.get(name)}
        if FETCHED.get(tag) in attrs and attrs.get("rel") not in ("search", "next", "prev"):
            self.fetched.append(attrs[FETCHED[tag]])
        elif tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])


def pages_of(root):
    """The pages under `root`: the HTML files in _static are templates of the theme."""
    return [p for p in sorted(root.rglob("*.html")) if "_static" not in p.relative_to(root).parts]


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
            elif url.fragment and target in pages and (
                    unquote(url.fragment) not in pages[target].anchors):
                found.append(f"{where} has no such anchor")
    for path in root.rglob("*.css"):
        for address in re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)",
                                  path.read_text(errors="replace")):
            found.append(f"{path.relative_to(root)}: {address} is fetched from outside")
    return found


def test_every_link_anchor_and_image_resolves_and_nothing_is_fetched_from_outside(site):
    assert problems(site) == []


GOOD = '<a href="b/two.html#there">x</a><a href="https://arxiv.org/">y</a><a href="#a">z</a>'


@pytest.mark.parametrize("fault, report", [
    ("", []),
    ('<a href="b/three.html">', ["one.html: b/three.html does not exist"]),
    ('<a href="b/two.html#gone">', ["one.html: b/two.html#gone has no such anchor"]),
    ('<img src="b/plot.png">', ["one.html: b/plot.png does not exist"]),
    ('<a href="../outside.html">', ["one.html: ../outside.html does not exist"]),
    ('<script src="https://cdn.example/x.js"></script>',
     ["one.html: https://cdn.example/x.js is fetched from outside"]),
    ('<link rel="stylesheet" href="//cdn.example/x.css">',
     ["one.html: //cdn.example/x.css is fetched from outside"])])
def test_the_check_of_links_finds_a_planted_fault(tmp_path, fault, report):
    (tmp_path / "outside.html").write_text("")
    (tmp_path / "site" / "b").mkdir(parents=True)
    (tmp_path / "site" / "one.html").write_text(f'<h1 id="a">{GOOD}{fault}')
    (tmp_path / "site" / "b" / "two.html").write_text('<h1 id="there"><a href="../one.html">')
    assert problems(tmp_path / "site") == report


def test_a_font_from_outside_is_found(tmp_path):
    (tmp_path / "x.css").write_text("@font-face { src: url('https://fonts.example/a.woff2') }")
    assert problems(tmp_path) == ["x.css: https://fonts.example/a.woff2 is fetched from outside"]


def exported(module):
    """The names in `__all__` of an exported module."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


MODULES = [m for m in sorted(ROOT.glob("kl_comedy/[a-z]*.py")) if exported(m)]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.stem)
def test_every_exported_name_is_in_the_api_pages(site, module):
    anchors = Page(site / "api" / f"{module.stem}.html").anchors
    assert {f"kl_comedy.{module.stem}.{name}" for name in exported(module)} <= anchors


def test_every_notebook_is_a_page_in_the_menu(site):
    home = {urlsplit(link).path for link in Page(site / "index.html").links}
    notebooks = {p.relative_to(ROOT).with_suffix(".html").as_posix()
                 for p in ROOT.glob("nbs/*/*.ipynb")}
    assert notebooks <= home


def test_no_nbdev_directive_is_left_on_a_page(site):
    marked = [p.name for p in site.glob("nbs/*/*.html")
              if re.search(r"#\|\s*(export|hide|default_exp|eval)", p.read_text())]
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
    write_nb({"cells": list(cells), "nbformat": 4, "nbformat_minor": 5,
              "metadata": {"kernelspec": {"name": "python3", "language": "python"}}}, folder / path)
    build.stage_notebook(path, executed)
    return read_nb(folder / "src" / path)


def test_directives_become_what_the_page_needs(tmp_path, monkeypatch):
    page = staged(monkeypatch, tmp_path, mk_cell("# Title", "markdown"),
                  mk_cell("#| default_exp x"), mk_cell("#| export\ndef f(): pass"),
                  mk_cell("#| hide\nimport nbdev"), mk_cell("#| eval: false\nboom()"))
    assert [(c.source, c.metadata.get("tags", [])) for c in page.cells] == [
        ("# Title", []), ("def f(): pass", []), ("import nbdev", ["remove-cell"]),
        ("boom()", ["skip-execution"])]
    assert page.metadata.mystnb.execution_mode == "force"


def test_a_notebook_that_is_not_executed_says_so(tmp_path, monkeypatch):
    page = staged(monkeypatch, tmp_path, mk_cell("# Title", "markdown"), executed=False)
    assert "without outputs" in page.cells[1].source
    assert page.metadata.mystnb.execution_mode == "off"


@pytest.mark.parametrize("cell, kind, words", [
    ("1 / 0", "code", "ZeroDivisionError"),
    ("[gone](gone.ipynb)", "markdown", "gone.ipynb")])
def test_a_failing_cell_and_a_broken_link_fail_the_build(tmp_path, cell, kind, words):
    (tmp_path / "src").mkdir()
    write_nb({"cells": [mk_cell("# Title", "markdown"), mk_cell(cell, kind)], "nbformat": 4,
              "nbformat_minor": 5, "metadata": {"kernelspec": {"name": "python3"}}},
             tmp_path / "src" / "page.ipynb")
    ran = subprocess.run(
        [sys.executable, "-m", "sphinx", "-n", "-W", "-E", "-q", "-c", DOCS, "-D", "root_doc=page",
         "-D", "include_patterns=page.ipynb", tmp_path / "src", tmp_path / "out"],
        capture_output=True, text=True)
    assert ran.returncode != 0 and words in ran.stderr


# Loads every page in a frame, at two widths, and writes what is wrong with it into the document.
PROBE = """<!doctype html><pre id="report"></pre><script>
const wrong = [];
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 800; frame.src = page;
  const loaded = new Promise(done => frame.onload = done);
  document.body.append(frame);
  await loaded;
  const view = frame.contentWindow, doc = frame.contentDocument, say = what =>
    wrong.push(`${page} at ${width}: ${what}`);
  const maths = doc.querySelectorAll(".math").length;
  if (maths && !view.MathJax?.startup) say("MathJax is missing");
  else if (maths) await view.MathJax.startup.promise;
  const drawn = doc.querySelectorAll("mjx-container").length;
  if (drawn < maths) say(`${maths} formulas, ${drawn} drawn`);
  for (const bad of doc.querySelectorAll("[data-mjx-error], mjx-merror, g[data-mml-node=merror]"))
    say("formula: " + (bad.dataset.mjxError || bad.getAttribute("title") || bad.textContent));
  for (const ink of doc.querySelectorAll("div.math g[data-mml-node=math]")) {
    const box = ink.closest("div.math"), cut = box.getBoundingClientRect().left - 2;
    if (ink.getBoundingClientRect().left + box.scrollLeft < cut)
      say("a formula is cut at the left: " + ink.textContent.slice(0, 40));
  }
  for (const image of doc.images) {
    image.loading = "eager";
    await image.decode().catch(() => say("image " + image.src));
  }
  for (const {name} of view.performance.getEntriesByType("resource"))
    if (/^https?:/.test(name) && new URL(name).origin !== location.origin) say("fetches " + name);
  const wide = doc.scrollingElement.scrollWidth;
  if (wide > width) say(`the page is ${wide} wide`);
  frame.remove();
}
(async () => {
  for (const page of PAGES) for (const width of [390, 1280]) {
    try { await look(page, width) } catch (e) { wrong.push(page + ": " + e) }
  }
  document.getElementById("report").textContent = JSON.stringify(wrong);
})();
</script>"""


class Handler(SimpleHTTPRequestHandler):
    """Serves a site, and the probe beside it."""

    probe = b""

    def do_GET(self):
        if self.path != "/probe.html":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(self.probe)))
        self.end_headers()
        self.wfile.write(self.probe)

    def log_message(self, *_):
        pass


def browse(root, profile):
    """What a browser without a network finds wrong with the pages under `root`."""
    pages = [p.relative_to(root).as_posix() for p in pages_of(root)]
    probe = PROBE.replace("PAGES", json.dumps(pages)).encode()
    handler = partial(type("SiteHandler", (Handler,), {"probe": probe}), directory=root)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ran = subprocess.run(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
             "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
             "--timeout=240000", "--virtual-time-budget=1000000", "--dump-dom",
             f"http://127.0.0.1:{server.server_port}/probe.html"],
            capture_output=True, text=True, timeout=300)
        server.shutdown()
    report = re.search(r'<pre id="report">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert report and report[1], f"the browser did not finish: {ran.stdout[-500:]}{ran.stderr}"
    return json.loads(unescape(report[1]))


in_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium: install Debian's chromium for the browser checks")


@in_a_browser
def test_every_page_is_right_in_a_browser(site, tmp_path):
    assert browse(site, tmp_path / "profile") == []


@in_a_browser
def test_the_browser_finds_planted_faults(site, tmp_path):
    pages = tmp_path / "site"
    pages.mkdir()
    shutil.copy(site / "_static" / "tex-svg.js", pages)
    (pages / "page.html").write_text(r"""<script defer src="tex-svg.js"></script>
        <div class="math">\[\begin{split}a \\ b \tag{1}\end{split}\]</div>
        <div class="math">\[x^2 \tag{2}\]</div>
        <div class="math" style="display: flex; flex-direction: row-reverse; width: 200px">
        \[a+b+c+d+e+f+g+h+i+j+k+l+m+n+o+p+q+r+s+t+u+v+w+x+y+z \tag{2}\]</div><img src="gone.png">
        <div style="width: 700px">wide</div><script src="http://cdn.example/x.js"></script>""")
    wrong = browse(pages, tmp_path / "profile")
    assert any("formula" in w and "tag" in w for w in wrong), wrong
    assert any("gone.png" in w for w in wrong), wrong
    assert len([w for w in wrong if "cut at the left" in w]) == 2, wrong  # at both widths
    assert [w for w in wrong if "wide" in w and "390" in w] and not [
        w for w in wrong if "wide" in w and "1280" in w], wrong
    assert any("fetches http://cdn.example/x.js" in w for w in wrong), wrong
