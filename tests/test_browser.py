"""Every page in a real browser: formulas, images, weight, width, colours, accessibility, search."""

import json
import re
import shutil
from importlib.resources import files
from pathlib import Path
from urllib.parse import unquote, urlsplit

from chromium import in_a_browser
from website import pages_of

pytestmark = in_a_browser

# What is wrong with a page on this screen.
LOOK = r"""(async width => {
  const wrong = [], say = what => wrong.push(what);
  const maths = document.querySelectorAll(".math").length;
  if (maths && !window.MathJax?.startup) say("MathJax is missing");
  else if (maths) await MathJax.startup.promise;
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  const drawn = document.querySelectorAll("mjx-container").length;
  if (drawn < maths) say(`${maths} formulas, ${drawn} drawn`);
  for (const bad of document.querySelectorAll(
      "[data-mjx-error], mjx-merror, g[data-mml-node=merror]"))
    say("formula: " + (bad.dataset.mjxError || bad.getAttribute("title") || bad.textContent));
  for (const ink of document.querySelectorAll("div.math g[data-mml-node=math]")) {
    const box = ink.closest("div.math"), cut = box.getBoundingClientRect().left - 2;
    if (box.scrollWidth > box.clientWidth && box.tabIndex != 0)
      say("a formula that scrolls cannot be reached with the keyboard");
    if (ink.getBoundingClientRect().left + box.scrollLeft < cut)
      say("a formula is cut at the left: " + ink.textContent.slice(0, 40));
  }
  for (const image of document.images) {
    image.loading = "eager";
    await image.decode().catch(() => say("image " + image.src));
  }
  if (!maths && window.MathJax) say("MathJax, and no maths");
  const wide = document.scrollingElement.scrollWidth;
  if (wide > width) say(`the page is ${wide} wide`);
  return wrong;
})"""


def weight(addresses):
    """Bytes of the files that were fetched, beyond fonts and MathJax."""
    paths = {Path(unquote(urlsplit(url).path)) for url in addresses if url.startswith("file:")}
    return sum(
        path.stat().st_size
        for path in paths
        if path.exists() and path.suffix != ".woff2" and path.name != "tex-svg.js"
    )


def looked_at(browser, root):
    """What is wrong with the pages under `root`, on a desktop screen and on a phone's."""
    wrong = []
    for page in pages_of(root):
        browser.screen(1280)
        browser.open(page.as_uri())
        for width in (1280, 390):
            browser.screen(width)
            wrong += [f"{page.name} at {width}: {what}" for what in browser.run(f"{LOOK}({width})")]
        fetched = browser.fetched()
        wrong += [
            f"{page.name} fetches {url}" for url in fetched if not re.match("file:|data:", url)
        ]
        if (own := weight(fetched)) > 1e6:
            wrong.append(f"{page.name}: {own / 1e6:.2f} MB beyond fonts and MathJax")
    return wrong


def test_every_page_is_right_in_a_browser(site, chromium):
    assert looked_at(chromium, site) == []


def test_the_browser_finds_planted_faults(site, tmp_path, chromium):
    shutil.copy(site / "_static" / "tex-svg.js", tmp_path)
    (tmp_path / "page.html").write_text(r"""<!doctype html><meta name="viewport"
        content="width=device-width"><script defer src="tex-svg.js"></script>
        <div class="math">\[\begin{split}a \\ b \tag{1}\end{split}\]</div>
        <div class="math">\[x^2 \tag{2}\]</div>
        <div class="math" style="display: flex; flex-direction: row-reverse; width: 200px">
        \[a+b+c+d+e+f+g+h+i+j+k+l+m+n+o+p+q+r+s+t+u+v+w+x+y+z \tag{2}\]</div><img src="gone.png">
        <div class="math" style="width: 99px; overflow-x: auto">\[a+b+c+d+e+f+g+h+i+j+k+l\]</div>
        <div style="width: 700px">wide</div><script src="http://cdn.example/x.js"></script>
        <script src="heavy.js"></script>""")
    (tmp_path / "heavy.js").write_text(f"// {'x' * 1_100_000}")
    wrong = looked_at(chromium, tmp_path)
    assert any("formula" in w and "tag" in w for w in wrong), wrong
    assert any("gone.png" in w for w in wrong), wrong
    assert len([w for w in wrong if "cut at the left" in w]) == 2, wrong  # at both widths
    assert [w for w in wrong if "wide" in w and "390" in w] and not [
        w for w in wrong if "wide" in w and "1280" in w
    ], wrong
    assert any("a formula that scrolls" in w for w in wrong), wrong
    assert any("1.10 MB beyond fonts and MathJax" in w for w in wrong), wrong
    assert "page.html fetches http://cdn.example/x.js" in wrong, wrong


# Lets axe-core look at a page. Formulas are left as text: as pictures of thousands of strokes they
# take minutes. So do thousands of words of code in one of ten colours: of each, one is left.
PREPARE = r"""(() => {
  document.head.append(Object.assign(document.createElement("style"),
                                     {textContent: "* { transition: none !important }"}));
  const seen = new Set();
  for (const word of document.querySelectorAll(".highlight span"))
    if (seen.has(word.className)) word.replaceWith(...word.childNodes);
    else seen.add(word.className);
})()"""
AXE = r"""(async (theme, rules) => {
  for (const name of ["theme", "mode"]) document.documentElement.dataset[name] = theme;
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  const found = await axe.run(document, {resultTypes: ["violations"], ...rules});
  return found.violations.filter(({impact}) => ["serious", "critical"].includes(impact)).map(
    ({id, nodes}) => `${id}, ${nodes.length} times: ${nodes[0].html.slice(0, 120)}`);
})"""
# The contrast of all words of a page takes 80% of axe's time, and is the same for all elements of a
# kind. Rules about colour alone can tell themes apart, and rules about what is hidden, small or
# scrolled alone can tell widths apart.
COLOUR = ["color-contrast", "link-in-text-block"]
LAYOUT = [
    "scrollable-region-focusable",
    "aria-hidden-focus",
    "target-size",
    "button-name",
    "link-name",
    "summary-name",
]
VISITS = [(1280, "light", {"rules": {"color-contrast": {"enabled": False}}})]
OF_EACH_KIND = [
    (1280, "light", {"runOnly": COLOUR}),
    (1280, "dark", {"runOnly": COLOUR}),
    (390, "light", {"runOnly": LAYOUT}),
]


def of_each_kind(pages):
    """As few of the `pages` as have every kind of element: a tag with its classes, or a style.

    What a script draws is not in their text: the home page and the explorer are always taken."""

    def kinds(page):
        text = re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL)
        named = re.findall(r'<(\w+)[^>]*? class="([^"]*)"', text)
        return {
            *re.findall(r"<\w+", text),
            *re.findall(r' style="[^"]*"', text),
            *((tag, re.sub(r"\b(row|col|level)\d+", "", name)) for tag, name in named),
        }

    has = {page: kinds(page) for page in pages}
    left, taken = set().union(*has.values()), []
    for page in pages:
        if page.name in ("index.html", "explorer.html"):
            taken.append(page)
            left -= has[page]
    while left:
        taken.append(max(pages, key=lambda page: len(has[page] & left)))
        left -= has[taken[-1]]
    return taken


def violations(browser, root):
    """What axe-core finds: on every page, and in all colours and on a phone on one of each kind."""
    axe = (files("axe_playwright_python") / "axe.min.js").read_text()
    wrong, pages = [], pages_of(root)
    few = of_each_kind(pages)
    browser.send("Network.setBlockedURLs", urls=["*/tex-svg.js"])
    for page in pages:
        before = None
        for width, theme, rules in VISITS + OF_EACH_KIND * (page in few):
            if width != before:
                browser.screen(width)
                browser.open(page.as_uri())
                browser.run(f"{axe};0")
                browser.run(PREPARE)
                before = width
            found = browser.run(f"{AXE}({theme!r}, {json.dumps(rules)})")
            wrong += [f"{page.name} at {width}, {theme}: {what}" for what in found]
    browser.send("Network.setBlockedURLs", urls=[])
    return wrong


def test_axe_finds_no_serious_violation(site, chromium):
    assert violations(chromium, site) == []


def test_axe_finds_planted_violations(tmp_path, chromium):
    (tmp_path / "index.html").write_text("""<!doctype html><html lang="en"><title>x</title><main>
        <h1>Title</h1><style>[data-theme=dark] p { background: black }</style>
        <p style="color: #333">read</p><img src="x.png"><button></button></main></html>""")
    wrong = violations(chromium, tmp_path)
    assert [w for w in wrong if "dark: color-contrast" in w] and not [
        w for w in wrong if "light: color-contrast" in w
    ], wrong
    assert [w for w in wrong if "image-alt" in w], wrong
    assert len([w for w in wrong if "button-name" in w]) == 2, wrong  # at both widths


def test_every_kind_of_element_is_on_a_page_that_is_taken(tmp_path):
    x, y, z = '<p class="x">', '<td class="y">', '<p class="z">'
    for name, body in {"a": x, "b": x + y, "c": z, "d": y, "index": ""}.items():
        (tmp_path / f"{name}.html").write_text(body)
    assert [page.stem for page in of_each_kind(pages_of(tmp_path))] == ["index", "b", "c"]


def found_by_search(browser, site, words):
    """The titles of what the search page finds."""
    browser.screen(1280)
    browser.open(f"{(site / 'search.html').as_uri()}?q={words.replace(' ', '+')}")
    return browser.run("""(async () => {
        const said = () => document.querySelector("#search-results .search-summary")?.textContent;
        for (let i = 0; i < 400 && !said(); i++) await new Promise(wait => setTimeout(wait, 25));
        return [...document.querySelectorAll("#search-results li a")].map(a => a.textContent);
    })()""")


def test_the_search_page_finds_every_kind_of_name_first(site, chromium):
    for name in ["gradient_variance", "KLConfig", "audit_trainer"]:
        assert name in found_by_search(chromium, site, name)[0]
