"""`gyroscope explain`: what a run's layers did and why, in words with the equations behind them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from gyroscope.cli.fail import BAD_ARGUMENT, fail, reported
from gyroscope.cli.options import RunPath, layers
from gyroscope.cli.printed import console, echo, text

if TYPE_CHECKING:
    from gyroscope.diagnosis.explain import Explanation

# Width for a pipe or a file; every column fits.
_UNBOUNDED = 150
_WORDS = 110
# Positions of the columns that a narrow terminal leaves out, in this order; the text has them all.
_YIELD = (4, 2, 5, 7, 6, 3)
_STYLES = {"yes": "green", "no": "yellow", "undecided": "magenta", "does not apply": "dim"}


def explain(
    run: RunPath,
    layer: Annotated[
        str, typer.Option(metavar="GLOB", help="Explain only layers whose name matches.", autocompletion=layers)
    ] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print rows and statements as JSON.")] = False,
) -> None:
    """Explain a run: which layers are scale-invariant, and how their effective learning rates developed.

    For each layer: whether its norm affects the loss; **η**, its learning rate, and the **effective η**, with the
    **norm factor** in the change; **k₀** of its decay as 1/√(1 + k/k₀); the rotation **rate** in radians per step
    next to the one **predicted** at the balance of weight decay and steps; and how weight decay can act on it.
    Nothing is claimed that a run does not show: the text says what is missing.

    For example: gyroscope explain runs/first --layer 'conv*'
    """
    from fnmatch import fnmatchcase

    from gyroscope.diagnosis import diagnose
    from gyroscope.diagnosis.explain import explain as explained
    from gyroscope.store import load

    with reported(), load(run) as opened:
        if not any(fnmatchcase(name, layer) for name in opened.layers):
            named = f"One of them is {opened.layers[0]}." if opened.layers else "There are none."
            fail(
                f"`--layer` must match at least one of the {len(opened.layers):,} layers, got {layer}. {named}",
                code=BAD_ARGUMENT,
            )
        found = explained(opened, layers=layer)
        alarms = [] if as_json else diagnose(opened).alarms
    if as_json:
        echo(json.dumps(_plain(found), ensure_ascii=False, indent=2, allow_nan=False))
        return
    wide = console(_UNBOUNDED)
    for alarm in alarms:
        wide.print(text(f"{alarm} (gyroscope diagnose)", style="bold"))
    wide.print(_page(found, wide.width))


def _plain(found: Explanation) -> dict[str, object]:
    from dataclasses import asdict

    return {"run": found.run, "rows": found.rows(), "statements": [asdict(one) for one in found.statements]}


def _table(found: Explanation, width: int) -> Table:
    from gyroscope.diagnosis.explain import HEADS, cells

    columns = dict(zip(HEADS, zip(*map(cells, found.entries), strict=True), strict=True))
    for head in (HEADS[place] for place in _YIELD):
        if sum(max(map(len, (name, *column))) + 3 for name, column in columns.items()) > width:
            del columns[head]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for head in columns:
        table.add_column(head, justify="left" if head in (*HEADS[:2], HEADS[-1]) else "right", overflow="fold")
    for *most, last in zip(*columns.values(), strict=True):
        table.add_row(*map(text, most), text(last, style=_STYLES[last]))
    return table


def _page(found: Explanation, width: int) -> RenderableType:
    from gyroscope.diagnosis.explain import headline, title

    parts: list[RenderableType] = [text(headline(found)), _table(found, width)]
    for alike in found.sorts():
        parts.append(text(title(alike), style="bold"))
        parts += [_statement(words) for words in alike[0].words()]
        parts.append(text())
    return Group(*parts[:-1])


def _statement(words: str) -> RenderableType:
    """Lay out a statement with its topic and verdict highlighted, indented and at a readable width."""
    said = text(words)
    topic, _, rest = words.partition(": ")
    verdict = next((v for v in _STYLES if rest.startswith(v)), "does not apply")
    said.stylize("italic", 0, len(topic))
    said.stylize(_STYLES[verdict], len(topic) + 2, len(topic) + 2 + len(verdict))
    column = Table.grid()
    column.add_column(max_width=_WORDS)
    column.add_row(said)
    return Padding(column, (0, 0, 0, 2), expand=False)
