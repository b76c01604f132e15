"""The site: `make docs` builds it with Sphinx from the Markdown files of this folder, into `_build/html`.

It makes no request: what it shows is in its folder, and it can be read from there, with its search.
"""

import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "api"))  # reference.py and command_line.py

from docutils import nodes  # noqa: E402
from latex2mathml.converter import convert  # noqa: E402

import gyroscope  # noqa: E402

project = "Gyroscope"
author = "The Gyroscope developers"
project_copyright = author
release = version = gyroscope.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "reference",
    "command_line",
]
exclude_patterns = ["_build", "**/.*", "**/README.md"]
templates_path = ["_templates"]
nitpicky = True
# Types in signatures: those of other packages have no page here, and some results of functions have no public name.
nitpick_ignore_regex = [("py:.*", r"(?!gyroscope).*"), ("py:class", ".*")]
# A type of a signature may be the name of several classes; the nearest is linked to.
suppress_warnings = ["ref.python"]

# Names of other packages are links into the web if GYROSCOPE_DOCS_INTERSPHINX is set; building then makes requests.
if os.environ.get("GYROSCOPE_DOCS_INTERSPHINX"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "matplotlib": ("https://matplotlib.org/stable", None),
    }

# Markdown as GitHub reads it, with what the front page and the tutorials need.
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
html_math_renderer = "mathml"  # formulas without scripts

# Tutorials are executed. Outputs are kept for as long as neither the tutorial nor the library changes.
_SOURCES = sorted(file for package in ("src", "lab/src") for file in (HERE.parent / package).rglob("*.py"))
_STATE = hashlib.sha256(b"".join(file.read_bytes() for file in _SOURCES)).hexdigest()[:16]
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "executed" / _STATE)
nb_execution_timeout = 300  # seconds per cell; on idle cores each takes a few
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_in_temp = True
nb_merge_streams = True

highlight_language = "text"
smartquotes_action = "D"  # dashes alone
add_module_names = False
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 90
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
napoleon_custom_sections = ["Reference", ("Attributes", "params_style")]
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "pydata_sphinx_theme"
html_title = "Gyroscope"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/mark.svg"
html_show_search_summary = False  # for which the search would have to fetch pages, which no browser does from the disk
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {"**": ["contents.html"]}
html_theme_options = {
    "logo": {"text": "Gyroscope", "image_light": "_static/mark.svg", "image_dark": "_static/mark.svg"},
    "navbar_start": ["navbar-logo"],
    "navbar_center": [],
    "navbar_end": ["theme-switcher"],
    "show_nav_level": 1,
    "navigation_depth": 3,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}

# Documents at the top of the repository that are pages of the site.
_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "project/contributing.md", "CHANGELOG.md": "project/changes.md"}
_LINK = re.compile(r"(?<!!)\[([^\]\[]*)\]\(([^)\s]+)\)")


def _read(app: Any, docname: str, source: list[str]) -> None:
    """Adapt a page of Markdown to the site: its links to files outside this folder, and its place.

    Such a link leads to the file in the clone that the site was built in, or to GYROSCOPE_DOCS_SOURCE, the address of
    the repository's files.
    """
    page = HERE / f"{docname}.md"
    if not page.exists():
        return
    moved = next((HERE.parent / name for name, there in _PAGES.items() if there == f"{docname}.md" != "index.md"), None)
    if moved is not None:
        source[0] = moved.read_text(encoding="utf-8")
        app.env.note_dependency(str(moved))
    built = HERE / "_build" / "html" / docname
    outside = os.environ.get("GYROSCOPE_DOCS_SOURCE") or os.path.relpath(HERE.parent, built.parent)

    def adapted(link: re.Match[str]) -> str:
        path, mark, anchor = link[2].partition("#")
        if not path or re.match(r"\w+:", path):
            return link[0]
        target = Path(os.path.normpath((moved or page).parent / path))
        if not target.is_relative_to(HERE.parent) or not target.exists():
            return link[0]
        name = target.relative_to(HERE.parent).as_posix()
        target = HERE / _PAGES[name] if name in _PAGES else target
        if target.is_relative_to(HERE):
            return f"[{link[1]}]({os.path.relpath(target, page.parent)}{mark}{anchor})"
        return f'<a href="{outside}/{name}">{link[1]}</a>'

    source[0] = _LINK.sub(adapted, source[0])


def _write_formula(writer: Any, node: Any) -> None:
    """Write a formula as MathML, which browsers draw by themselves."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    formula = convert(node.astext(), display=display)
    writer.body.append(f'<div class="math">{formula}</div>' if display == "block" else formula)
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Connect to Sphinx."""
    app.add_html_math_renderer("mathml", (_write_formula, None), (_write_formula, None))
    # Where a build fails early, the theme would copy its logo to a file of this name.
    Path(app.outdir, "_static").mkdir(parents=True, exist_ok=True)
    app.connect("source-read", _read)
