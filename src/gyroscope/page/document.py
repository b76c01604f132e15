"""The HTML document of the page, put together from the files in `bundle`: nothing in it is fetched from elsewhere.

Scripts and styles are inlined, and a content-security policy names their hashes: no other script runs, whatever the
names in a run say, and nothing is requested.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

BUNDLE = Path(__file__).with_name("bundle")


class Embedded(NamedTuple):
    """Data in the document, in a script element that is not run: its id, its MIME type, and its text.

    The text must not contain "<": base64, or what `json_text` returns.
    """

    id: str
    type: str
    text: str


class Parts(NamedTuple):
    """The bundle: a jinja2 template, and the texts of the style and script elements."""

    template: str
    styles: tuple[str, ...]
    scripts: tuple[str, ...]


def document(config: Mapping[str, Any], embedded: Iterable[Embedded] = (), *, policy: bool = True) -> Iterator[str]:
    """Yield the document in pieces.

    Args:
        config: the configuration of the page, as JSON; its "title" is that of the document.
        embedded: the data.
        policy: whether the document states its content-security policy, or a server does.
    """
    found = parts(BUNDLE)
    template = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True).from_string(
        found.template
    )
    yield from template.generate(
        title=config["title"],
        csp=Markup(policy_of()) if policy else "",
        styles=list(map(Markup, found.styles)),
        scripts=list(map(Markup, found.scripts)),
        config=Markup(json_text(config)),
        embedded=({"id": one.id, "type": one.type, "text": Markup(one.text)} for one in embedded),
    )


def policy_of(connect: str = "'none'") -> str:
    """Return the content-security policy of the document; `connect` says which hosts its scripts may ask."""
    found = parts(BUNDLE)
    scripts, styles = (" ".join(map(_hash, texts)) for texts in (found.scripts, found.styles))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def json_text(data: Any) -> str:
    r"""Return data as JSON that can stand in a script element: nothing in it ends the element or begins a comment.

    >>> print(json_text({"name": "</script><script>alert(1)"}))
    {"name":"\u003c/script>\u003cscript>alert(1)"}
    """
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


@lru_cache(maxsize=4)
def parts(folder: Path) -> Parts:
    """Read the bundle in `folder`: the scripts in `vendor`, each with its license before it, and the page's own.

    The page's own are made from the files in `front` by `tools/build_page`.
    """

    def text(path: Path) -> str:
        return path.read_text(encoding="utf-8")

    def licensed(path: Path) -> str:
        license = path.with_name(f"{path.name.split('.')[0]}.LICENSE")
        return f"/*\n{text(license)}*/\n{text(path)}"

    vendor = folder / "vendor"
    return Parts(
        template=text(folder / "page.html"),
        styles=(*map(text, sorted(vendor.glob("*.css"))), text(folder / "page.min.css")),
        scripts=(*map(licensed, sorted(vendor.glob("*.js"))), text(folder / "page.min.js")),
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
