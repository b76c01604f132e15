"""Small pieces of HTML for notebooks: safe text, tables and curves.

They are complete in themselves: no scripts, no style sheets, nothing to fetch. Colors are those of the page around
them, light or dark. Names come from anywhere, so all text is escaped.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

#: The rows of a long table that are shown: the first ones and the last ones.
FIRST, LAST = 20, 10
# Characters of a text in a cell, and points of a curve.
_LONGEST, POINTS = 64, 32
_WIDTH, _HEIGHT = 96, 20
# Control characters except tab and newline, DEL, C1, marks that change text direction, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Markup(str):
    """HTML, which is not escaped again."""

    __slots__ = ()


def plain(words: object) -> str:
    r"""Return `words` with the characters that a terminal or a page would act on written as escapes.

    >>> print(plain("w\x1b[2J"))
    w\u001b[2J
    """
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", str(words))


def number(value: float | None) -> str:
    """Return a number with three digits, or a dash.

    >>> number(1234.5), number(None), number(0.0)
    ('1.23e+03', '–', '0')
    """
    return "–" if value is None or math.isnan(value) else f"{value:.3g}"


def text(words: object, longest: int = _LONGEST) -> Markup:
    """Return text as HTML, cut in the middle if it is long; `Markup` stays as it is.

    >>> print(text("a < b"), text("layers.0.attention.out.weight", longest=15))
    a &lt; b layers.….weight
    """
    if isinstance(words, Markup):
        return words
    said = plain(words)
    if len(said) > longest:
        half = (longest - 1) // 2
        said = f"{said[:half]}…{said[-half:]}"
    return Markup(html.escape(said))


def paragraph(words: object) -> Markup:
    """Return a paragraph. A longer text than a cell's is shown, but not a page of it.

    >>> print(paragraph("all is well"))
    <p>all is well</p>
    """
    return Markup(f"<p>{text(words, longest=600)}</p>")


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], *, words: Iterable[int] = (0,)) -> Markup:
    """Return a table; of more than 30 rows, the first 20 and the last 10.

    Args:
        heads: the heads of the columns.
        rows: the cells, which are text or `Markup`.
        words: the columns that hold words, which are aligned to the left.

    >>> print(table(["layer", "norm"], [["fc1", "2.5"]]))
    <table><thead><tr><th style="text-align:left">layer</th><th>norm</th></tr></thead><tbody><tr><td
    style="text-align:left">fc1</td><td>2.5</td></tr></tbody></table>
    """
    left = set(words)

    def line(kind: str, cells: Iterable[object]) -> str:
        styles = (' style="text-align:left"' if i in left else "" for i in range(len(heads)))
        return "<tr>" + "".join(f"<{kind}{s}>{text(c)}</{kind}>" for s, c in zip(styles, cells, strict=True)) + "</tr>"

    shown = [line("td", row) for row in (rows if len(rows) <= FIRST + LAST else [*rows[:FIRST], *rows[-LAST:]])]
    if len(rows) > FIRST + LAST:
        said = f"… {len(rows) - FIRST - LAST:,} more …"
        shown.insert(FIRST, f'<tr><td colspan="{len(heads)}" style="text-align:left">{said}</td></tr>')
    return Markup(f"<table><thead>{line('th', heads)}</thead><tbody>{''.join(shown)}</tbody></table>")


def curve(places: Sequence[float] | Any, values: Sequence[float] | Any, low: float, high: float, name: str) -> Markup:
    """Return a small curve as SVG, of values over the range from `low` to `high`; gaps where they are not finite.

    >>> print(curve([0, 10, 20], [0.0, 0.5, 1.0], 0.0, 1.0, "rotation"))
    <svg role="img" aria-label="rotation" width="96" height="20" viewBox="0 0 96 20"><path d="M1,19L48,10L95,1"
    fill="none" stroke="currentColor" stroke-width="1.5"/></svg>
    """
    path, pen = [], "M"
    for place, value in zip(places, values, strict=True):
        if not math.isfinite(value):
            pen = "M"
            continue
        x = 1 + (_WIDTH - 2) * _share(place, places[0], places[-1])
        y = _HEIGHT - 1 - (_HEIGHT - 2) * _share(value, low, high)
        path.append(f"{pen}{x:.3g},{y:.3g}")
        pen = "L"
    return Markup(
        f'<svg role="img" aria-label="{text(name)}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}"><path d="{"".join(path)}" fill="none" stroke="currentColor" '
        'stroke-width="1.5"/></svg>'
    )


def _share(value: float, low: float, high: float) -> float:
    return min(max((float(value) - float(low)) / (float(high) - float(low)), 0.0), 1.0) if high > low else 0.0
