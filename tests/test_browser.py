"""Every page in a real browser: formulas, images, weight, width, colours, accessibility, search."""

import json
import shutil
from importlib.resources import files

import pytest
from chromium import in_a_browser
from website import ask_browser

# Loads every page in a frame, at two widths, and writes what is wrong with it into the document.
PROBE = """
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
    if (box.scrollWidth > box.clientWidth && box.tabIndex != 0)
      say("a formula that scrolls cannot be reached with the keyboard");
    if (ink.getBoundingClientRect().left + box.scrollLeft < cut)
      say("a formula is cut at the left: " + ink.textContent.slice(0, 40));
  }
  for (const image of doc.images) {
    image.loading = "eager";
    await image.decode().catch(() => say("image " + image.src));
  }
  for (const {name} of view.performance.getEntriesByType("resource"))
    if (/^https?:/.test(name) && new URL(name).origin !== location.origin) say("fetches " + name);
  if (!maths && view.MathJax) say("MathJax, and no maths");
  const own = view.performance.getEntries().filter(entry => entry.decodedBodySize &&
    !/\\.woff2|tex-svg\\.js/.test(entry.name)).reduce((sum, e) => sum + e.decodedBodySize, 0);
  if (own > 1e6) say(`${(own / 1e6).toFixed(2)} MB beyond fonts and MathJax`);
  const wide = doc.scrollingElement.scrollWidth;
  if (wide > width) say(`the page is ${wide} wide`);
  frame.remove();
}
(async () => {
  for (const page of PAGES) for (const width of [390, 1280]) {
    try { await look(page, width) } catch (e) { wrong.push(page + ": " + e) }
  }
  report(wrong);
})();
"""


@in_a_browser
def test_every_page_is_right_in_a_browser(site, tmp_path):
    assert ask_browser(site, tmp_path / "profile", PROBE) == []


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
        <div class="math" style="width: 99px; overflow-x: auto">\[a+b+c+d+e+f+g+h+i+j+k+l\]</div>
        <div style="width: 700px">wide</div><script src="http://cdn.example/x.js"></script>
        <script src="heavy.js"></script>""")
    (pages / "heavy.js").write_text(f"// {'x' * 1_100_000}")
    wrong = ask_browser(pages, tmp_path / "profile", PROBE)
    assert any("formula" in w and "tag" in w for w in wrong), wrong
    assert any("gone.png" in w for w in wrong), wrong
    assert len([w for w in wrong if "cut at the left" in w]) == 2, wrong  # at both widths
    assert [w for w in wrong if "wide" in w and "390" in w] and not [
        w for w in wrong if "wide" in w and "1280" in w], wrong
    assert any("a formula that scrolls" in w for w in wrong), wrong
    assert any("1.10 MB beyond fonts and MathJax" in w for w in wrong), wrong
    assert any("fetches http://cdn.example/x.js" in w for w in wrong), wrong


# Loads every page in a frame at two widths, in the light theme and the dark one, and lets axe-core
# look. Only rules about colour can tell themes apart, and only rules about what is hidden, small or
# scrolled can tell widths apart: the rest is looked at once. Formulas are left as text: as
# pictures of thousands of strokes they take minutes.
AXE = r"""
const wrong = [], BAD = ["serious", "critical"];
const COLOUR = ["color-contrast", "link-in-text-block"];
const LAYOUT = ["scrollable-region-focusable", "aria-hidden-focus", "target-size", "button-name",
                "link-name", "summary-name"];
const RULES = {colour: {runOnly: COLOUR}, all: {}, layout: {runOnly: LAYOUT}};
const VISITS = [[1280, "light", "all"], [1280, "dark", "colour"], [390, "light", "layout"]];
async function look(page) {
  const frame = document.createElement("iframe");
  frame.height = 800; frame.src = page;
  const loaded = new Promise(done => frame.onload = done);
  document.body.append(frame);
  await loaded;
  const view = frame.contentWindow, doc = frame.contentDocument;
  for (const [tag, text] of [["script", SOURCE], ["style", "* { transition: none !important }"]])
    doc.head.append(Object.assign(doc.createElement(tag), {textContent: text}));
  // Thousands of words of code in one of ten colours take axe minutes: of each, one is left.
  const seen = new Set();
  for (const word of doc.querySelectorAll(".highlight span"))
    if (seen.has(word.className)) word.replaceWith(...word.childNodes);
    else seen.add(word.className);
  for (const [width, theme, rules] of VISITS) {
    frame.width = width;
    for (const name of ["theme", "mode"]) doc.documentElement.dataset[name] = theme;
    await new Promise(done => setTimeout(done, 50));
    const found = await view.axe.run(doc, {resultTypes: ["violations"], ...RULES[rules]});
    for (const {id, impact, nodes} of found.violations) if (BAD.includes(impact))
      wrong.push(`${page} at ${width}, ${theme}: ${id}, ${nodes.length} times: ` +
                 nodes[0].html.slice(0, 120));
  }
  frame.remove();
}
(async () => {
  window.SOURCE = await (await fetch("axe.js")).text();
  for (const page of PAGES) await look(page);
  report(wrong);
})();
"""


@pytest.fixture(scope="session")
def axe():
    """What is served beside the site: axe-core, and no MathJax."""
    source = (files("axe_playwright_python") / "axe.min.js").read_text()
    return {"axe.js": source, "_static/tex-svg.js": ""}


@in_a_browser
def test_axe_finds_no_serious_violation(site, tmp_path, axe):
    assert ask_browser(site, tmp_path / "profile", AXE, axe) == []


@in_a_browser
def test_axe_finds_planted_violations(tmp_path, axe):
    pages = tmp_path / "site"
    pages.mkdir()
    (pages / "page.html").write_text("""<!doctype html><html lang="en"><title>x</title><main>
        <h1>Title</h1><style>[data-theme=dark] p { background: black }</style>
        <p style="color: #333">read</p><img src="x.png"><button></button></main></html>""")
    wrong = ask_browser(pages, tmp_path / "profile", AXE, axe)
    assert [w for w in wrong if "dark: color-contrast" in w] and not [
        w for w in wrong if "light: color-contrast" in w], wrong
    assert [w for w in wrong if "image-alt" in w], wrong
    assert len([w for w in wrong if "button-name" in w]) == 2, wrong  # at both widths


SEARCH = """
const NAMES = %s, missed = [];
(async () => {
  for (const name of NAMES) {
    const frame = document.createElement("iframe");
    frame.width = 1280; frame.height = 800; frame.src = "search.html?q=" + name;
    document.body.append(frame);
    const shown = () => frame.contentDocument?.querySelector("#search-results li a")?.textContent;
    for (let i = 0; i < 100 && !shown(); i++) await new Promise(done => setTimeout(done, 50));
    if (!shown()?.includes(name)) missed.push(`${name}: ${shown()}`);
    frame.remove();
  }
  report(missed);
})();
"""


@in_a_browser
def test_the_search_page_finds_a_name(site, tmp_path):
    names = ["gradient_variance", "KLConfig", "audit_trainer"]
    assert ask_browser(site, tmp_path / "profile", SEARCH % json.dumps(names)) == []
