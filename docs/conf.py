"""Sphinx configuration; `docs/build.py` stages the sources and calls Sphinx."""

import importlib.util
import json
import re
from pathlib import Path

from docutils import nodes

project = "kl_comedy"
author = "the kl_comedy developers"
copyright = f"2026, {author}"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx_copybutton"]
include_patterns = ["*.md", "api/*.rst", "rooms/*.md", "rooms/**/*.md", "data/README.md"]
include_patterns += ["nbs/*.ipynb", "nbs/**/*.ipynb"]
exclude_patterns = ["README.md"]
default_role = "code"  # docstrings write `name` as Markdown does
nitpick_ignore_regex = [("py:.*", r"(?!kl_comedy).*")]  # other packages are not at hand offline

nb_execution_mode = "off"  # build.py has executed them
nb_merge_streams = True
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"

autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_typehints = "none"

# One MathJax file, served by the site itself. Its menu could fetch more files: it is off.
mathjax = importlib.util.find_spec("sphinx-mathjax-offline").submodule_search_locations[0]
mathjax_path = "tex-svg.js"
mathjax3_config = {"options": {"enableMenu": False}, "svg": {"fontCache": "local"}}

html_theme = "sphinx_book_theme"
html_title = "kl_comedy"
html_static_path = ["_static", str(Path(mathjax) / "static" / "mathjax" / mathjax_path)]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_sphinx = False
html_theme_options = {
    "navbar_persistent": [],
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "use_fullscreen_button": False,
}


def keep_tags(app, doctree):
    r"Keep Sphinx from wrapping display maths that holds `\\` in `split`, where `\tag` is an error."
    for block in doctree.findall(nodes.math_block):
        if r"\\" in block.astext():
            block["no-wrap"] = block["nowrap"] = True
            block.children = [nodes.Text(rf"\[{block.astext()}\]")]


def lead_first(app, doctree):
    """Show what the cell tagged `lead` draws right below the text that a page opens with.

    The code that it needs comes before it in the notebook, and stays where it is on the page."""
    cells = [node for node in doctree.findall(nodes.container) if "cell" in node["classes"]]
    for lead in [cell for cell in cells if "tag_lead" in cell["classes"]]:
        for output in [part for part in lead if "cell_output" in part.get("classes", [])]:
            lead.remove(output)
            shown = nodes.container(classes=["cell", "lead"])
            shown += output
            cells[0].parent.insert(cells[0].parent.index(cells[0]), shown)


def plain_docstring(app, what, name, obj, options, lines):
    """Docstrings are plain text with `code` and doctests: escape what RST would take for markup.

    A doctest, from its first `>>>` to the next blank line, is shown as it stands.
    """
    paragraphs = re.split(r"(\n\s*\n)", "\n".join(lines))
    for i, paragraph in enumerate(paragraphs):
        if not paragraph.lstrip().startswith(">>>"):
            parts = paragraph.split("`")
            parts[::2] = [re.sub(r"([*|_\\])", r"\\\1", text) for text in parts[::2]]
            paragraphs[i] = "`".join(parts)
    lines[:] = "".join(paragraphs).split("\n")


def leave_values_out(app, what, name, obj, skip, options):
    "Attributes of classes are left out: the signature and the docstring say what they are."
    return True if what == "class" and not callable(obj) and not isinstance(obj, property) else None


def load_explorer(app, pagename, *_):
    "On its page, the explorer's script and style, and the one colour of each configuration."
    if pagename == "explorer":
        from kl_comedy.report.colours import COLOURS

        colours = {"-".join(key): colour for key, colour in COLOURS.items()}
        app.add_js_file(None, body=f"window.klColours = {json.dumps(colours)}")
        app.add_js_file("explorer.js", loading_method="defer")
        app.add_css_file("explorer.css")


SEARCH = re.compile(r'<script src="[^"]*(searchtools|language_data|searchindex)\.js"></script>')


def lighten(app, error):
    """Take out of the site what no page needs: maps of scripts, a script of 1.5 MB that draws the
    theme's icons, which its style sheet draws from a font as well, and, but for the page that
    searches, the index of the search."""
    if error or app.builder.name != "html":
        return
    static = Path(app.outdir, "_static")
    for path in [*static.rglob("*.js.map"), *static.rglob("*.css.map")]:
        path.unlink()
    (static / "scripts" / "fontawesome.js").write_text("")
    for page in Path(app.outdir).rglob("*.html"):
        if page.name != "search.html" and static not in page.parents:
            page.write_text(SEARCH.sub("", page.read_text()))


def setup(app):
    app.connect("html-page-context", load_explorer)
    app.connect("build-finished", lighten)
    app.connect("autodoc-skip-member", leave_values_out)
    app.connect("autodoc-process-docstring", plain_docstring)
    app.connect("doctree-read", keep_tags)
    app.connect("doctree-read", lead_first)
    return {"parallel_read_safe": True}
