"""The built site, and a browser that looks at it, for the tests of the site."""

import ast
import fcntl
import json
import re
import subprocess
import sys
import threading
from functools import partial
from html import unescape
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from chromium import CHROMIUM

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SITE = DOCS / "_build" / "html"
SOURCES = ["docs/*.*", "docs/_static/*", "nbs/*/*.ipynb", "kl_comedy/*.py", "data/**/*", "*.md"]
# What a browser fetches by itself to show a page, tag by tag; a link is only followed by a reader.
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src",
           "audio": "src", "embed": "src", "object": "data", "link": "href", "image": "href"}


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


def exported(module):
    """The names in `__all__` of an exported module."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


MODULES = [m for m in sorted(ROOT.glob("kl_comedy/[a-z]*.py")) if exported(m)]


class Handler(SimpleHTTPRequestHandler):
    """Serves a site, and the texts of `extra` beside it."""

    extra = {}

    def do_GET(self):
        name = self.path.removeprefix("/").partition("?")[0]
        if name not in self.extra:
            return super().do_GET()
        kind = "text/javascript" if name.endswith(".js") else "text/html"
        body = self.extra[name].encode()
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def ask_browser(root, profile, probe, extra=()):
    """What the script `probe` reports of the pages under `root`, in a browser without a network.

    It finds the names of the pages in PAGES and calls `report` once. `extra`: texts by the path
    that they are served at, in the place of what is there.
    """
    pages = [p.relative_to(root).as_posix() for p in pages_of(root)]
    html = ('<!doctype html><title>probe</title><pre id="report"></pre><script>'
            f"const PAGES = {json.dumps(pages)}, report = found => document.getElementById("
            f"'report').textContent = JSON.stringify(found);\n{probe}</script>")
    files = {"probe.html": html, **dict(extra)}
    handler = partial(type("SiteHandler", (Handler,), {"extra": files}), directory=root)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ran = subprocess.run(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
             "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
             "--timeout=540000", "--virtual-time-budget=3000000", "--dump-dom",
             f"http://127.0.0.1:{server.server_port}/probe.html"],
            capture_output=True, text=True, timeout=600)
        server.shutdown()
    found = re.search(r'<pre id="report">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert found and found[1], f"the browser did not finish: {ran.stdout[-500:]}{ran.stderr}"
    return json.loads(unescape(found[1]))

