"""`gyroscope compare`: recorded runs side by side."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from gyroscope.cli import options
from gyroscope.cli.fail import BAD_ARGUMENT, fail, fail_if, reported
from gyroscope.cli.options import Labeled, LabeledRuns, Target, check_logged, is_run, out_option
from gyroscope.cli.printed import console, echo, text
from gyroscope.errors import StoreError

if TYPE_CHECKING:
    from gyroscope.diagnosis.compare import Compared
    from gyroscope.store import Run

# Width for a pipe or a file; every column fits.
_UNBOUNDED = 190
_NAMES = ("run", "optimizer")
# Letters to which names are folded before a narrow terminal leaves out columns, in the order of _YIELD.
_FOLDED = 12
_YIELD = ("rotation\nmin", "rotation\nmax", "steps", "loss")


def compare(
    runs: LabeledRuns,
    out: Annotated[
        Target | None,
        out_option("File to draw to (.png, .svg, .pdf; without an ending, .png and .svg)", "no figure"),
    ] = None,
    accuracy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Logged number that the figure draws against rotation.",
            show_default="test_accuracy, or what all runs have",
            autocompletion=options.scalars,
        ),
    ] = None,
) -> None:
    """Compare recorded runs: how they were trained, how far their layers rotated, and what they reached.

    **rate**, **weight decay** and **momentum** (β₁ of Adam) are those at the start of training. If weight decay differs
    between layers, its smallest and largest value are shown.

    **rotation** is how far layers have turned from their initialization at the end, 0 for not at all and 1 for a right
    angle: the least rotated layer, the mean, the most rotated layer. Accuracies and losses are the last ones logged. A
    dash means unknown.

    With --out, a figure shows mean rotation against accuracy, one point per run.

    For example: gyroscope compare runs/lab/digits --out rotation.png, or gyroscope compare plain=runs/1 decay=runs/2
    """
    if accuracy is not None and out is None:
        fail("`--accuracy` must be used with `--out`, the file of the figure. Add --out FILE.", code=BAD_ARGUMENT)
    with reported(code=BAD_ARGUMENT):
        figure = None if out is None else _figure(out)
    problems: list[StoreError] = []
    with reported(writes=out), ExitStack() as stack:
        found, labels = _find(runs, problems, stack)
        if found:
            _print(found, labels)
        written = _draw(found, labels, accuracy, figure) if found and figure is not None else []
    if written:
        echo(f"Wrote {', '.join(map(str, written))}")
    fail_if(problems)


def _figure(out: Target) -> Path:
    from gyroscope.figures.save import paths

    figure = out.path / "compare" if out.folder else out.path
    paths(figure, "--out")  # rejects unknown formats before anything is read
    return figure


def _find(listed: list[Labeled], problems: list[StoreError], stack: ExitStack) -> tuple[list[Run], list[str]]:
    """Return the runs at these paths and in these folders, each once, and their labels; collect unreadable ones."""
    from gyroscope import store
    from gyroscope.diagnosis.compare import compared
    from gyroscope.store.find import distinct_names

    found: dict[Path, Run] = {}
    labels: dict[Path, str] = {}
    for one in listed:
        path, before = one.path, len(problems)
        try:
            inside = [store.load(path)] if is_run(path) else store.runs(path, broken=problems)
            if not inside and len(problems) == before:
                problems.append(
                    StoreError(f"There are no runs in {path}; `gyroscope runs {path.parent}` searches deeper.")
                )
            for run in inside:
                stack.callback(run.close)
                compared([run])  # a damaged run is left out, and the others are shown
                found.setdefault(run.path, run)
                if one.label is not None:
                    within = os.path.relpath(run.path, path.absolute())
                    labels[run.path] = one.label if is_run(path) else f"{one.label}/{within}"
        except StoreError as error:
            problems.append(error)
    runs = list(found.values())
    return runs, [labels.get(run.path, name) for run, name in zip(runs, distinct_names(runs), strict=True)]


def _print(runs: list[Run], labels: list[str]) -> None:
    from gyroscope.diagnosis.compare import compared, in_words

    rows = compared(runs, labels=labels)
    wide = console(_UNBOUNDED)
    columns = _columns(rows)
    left_out = []
    for heading in _YIELD:
        if sum(_width(*column) for column in columns.items()) < wide.width:
            break
        del columns[heading]
        left_out.append(heading.replace("\n", " "))
    table = Table()
    for heading in columns:
        named = heading in _NAMES
        table.add_column(heading, justify="left" if named else "right", overflow="fold", no_wrap=not named)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(text, cells))
    wide.print(table)
    if left_out:
        echo(f"A wider terminal also shows {', '.join(left_out)}.")
    unfinished = [row.name for row in rows if row.state != "ended"]
    if unfinished:
        echo(f"Not finished: {', '.join(unfinished)}")
    if said := in_words(rows):
        echo(said)


def _columns(rows: list[Compared]) -> dict[str, list[str]]:
    """Return the cells of all rows, by the heading of their column."""
    from gyroscope.diagnosis.compare import ACCURACIES

    columns = {
        "run": [row.name for row in rows],
        "optimizer": [row.optimizer or "–" for row in rows],
        "rate": [_said(row.rate, ".4g") for row in rows],
        "weight\ndecay": [_range(row.weight_decay) for row in rows],
        "momentum": [_said(row.momentum, ".4g") for row in rows],
        "steps": [_said(row.steps, ",") for row in rows],
    }
    for place, which in enumerate(("min", "mean", "max")):
        columns[f"rotation\n{which}"] = [_said(row.rotation and row.rotation[place], ".3f") for row in rows]
    columns["loss"] = [_said(row.loss, ".4g") for row in rows]
    for kind in list(ACCURACIES)[::-1]:
        reached = [row.accuracies.get(kind) for row in rows]
        if known := [value for value in reached if value is not None]:
            scale = 100.0 if max(known) <= 1 else 1.0  # values above 1 are percentages
            columns[f"{kind}\n%"] = [_said(value and scale * value, ".2f") for value in reached]
    return columns


def _said(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _range(ends: tuple[float, float] | None) -> str:
    return "–" if ends is None else "–".join(dict.fromkeys(f"{end:.3g}" for end in ends))


def _width(heading: str, cells: list[str]) -> int:
    """Return the width of a column with its border; names can be folded."""
    longest = max(map(len, (*heading.split("\n"), *cells)))
    return (min(longest, _FOLDED) if heading in _NAMES else longest) + 3


def _draw(runs: list[Run], labels: list[str], accuracy: str | None, target: Path) -> list[Path]:
    from gyroscope import figures
    from gyroscope.diagnosis.compare import shared_accuracy

    shown = accuracy or shared_accuracy(runs) or "test_accuracy"
    check_logged(runs, shown)
    return figures.save(figures.compare(runs, accuracy=shown, labels=labels), target)
