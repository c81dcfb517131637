"""The built site and what is on its pages, for the tests of the site."""

import ast
import fcntl
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SITE = DOCS / "_build" / "html"
SOURCES = ["docs/*.*", "docs/_static/*", "nbs/**/*.ipynb", "kl_comedy/**/*.py", "data/**/*", "*.md"]
# What a browser fetches by itself to show a page, tag by tag; a link is only followed by a reader.
FETCHED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
    "object": "data",
    "link": "href",
    "image": "href",
}


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


MODULES = [m for m in sorted(ROOT.glob("kl_comedy/**/[a-z]*.py")) if exported(m)]


def dotted(module):
    """The name by which a module, a path of the repository, is imported."""
    return ".".join(module.relative_to(ROOT).with_suffix("").parts)
