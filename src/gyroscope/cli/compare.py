"""`gyroscope compare`: recorded runs side by side."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from gyroscope.cli import options
from gyroscope.cli.fail import BAD_ARGUMENT, FAILED, INTERRUPTED, fail
from gyroscope.cli.options import Target, is_run, out_option
from gyroscope.cli.printed import echo, text
from gyroscope.errors import GyroscopeError, StoreError

if TYPE_CHECKING:
    from gyroscope.diagnose.compare import Compared
    from gyroscope.store import Run

# A pipe or a file has no width; this holds every column.
_UNBOUNDED = 190
_NAMES = ("run", "optimizer")
# To how many letters names are folded before a narrow terminal goes without columns: these, the first first.
_FOLDED = 12
_YIELD = ("rotation\nmin", "rotation\nmax", "steps", "loss")


@dataclass(frozen=True)
class Given:
    """A path to compare, and what to call it, if that was said."""

    path: Path
    label: str | None = None

    def __str__(self) -> str:
        return str(self.path)


def given(words: str) -> Given:
    """Read RUN or LABEL=RUN; a folder may have = in its name, and a label has no slash.

    >>> given("warm-up=runs/7").label, given("runs/lr=0.1").label
    ('warm-up', None)
    """
    label, equals, path = words.partition("=")
    if not (label and equals and path) or "/" in label or os.sep in label or os.path.exists(words):
        return Given(Path(words))
    return Given(Path(path), label)


def compare(
    runs: Annotated[
        list[Given],
        typer.Argument(
            parser=given,
            metavar="[LABEL=]RUN...",
            help="Folders of runs, or folders that have runs in them; LABEL is what to call them.",
            show_default=False,
            autocompletion=options.run_paths,
        ),
    ],
    out: Annotated[
        Target | None,
        out_option("File to draw into (.png, .svg, .pdf, or both of the first)", "no figure"),
    ] = None,
    accuracy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The logged number that the figure puts against rotation.",
            show_default="test_accuracy, or what all runs have",
            autocompletion=options.scalars,
        ),
    ] = None,
) -> None:
    """Put recorded runs side by side: how they were trained, how far their layers rotated, and how good they are.

    **rate**, **weight decay** and **momentum** (β₁ of Adam) are those that training began with; where weight decay
    differs between layers, its smallest and largest value.

    **rotation** is how far layers have turned from where they started at the end, 0 not at all and 1 a right angle: the
    least rotated layer, the mean, the most rotated layer. Accuracies and losses are the last that were logged. A dash
    is not known.

    With --out, the figure puts mean rotation against accuracy, one point a run.

    For example: gyroscope compare runs/lab/digits --out rotation.png, or gyroscope compare plain=runs/1 decay=runs/2
    """
    if accuracy is not None and out is None:
        fail("--accuracy is for the figure, and none is asked for; give a file for it: --out", code=BAD_ARGUMENT)
    try:
        _load(figures=out is not None)
        figure = None if out is None else _figure(out)
    except GyroscopeError as error:
        fail(str(error), code=BAD_ARGUMENT if out is not None else FAILED)
    problems: list[StoreError] = []
    try:
        with ExitStack() as stack:
            found, labels = _find(runs, problems, stack)
            if found:
                _print(found, labels)
            written = _draw(found, labels, accuracy, figure) if found and figure is not None else []
    except KeyboardInterrupt:
        fail("interrupted", code=INTERRUPTED)
    except GyroscopeError as error:
        fail(str(error), code=FAILED)
    except OSError as error:
        fail(f"{out} cannot be written: {error.strerror or error}", code=FAILED)
    if written:
        echo(f"Wrote {', '.join(map(str, written))}")
    for problem in problems:
        echo(f"gyroscope: {problem}", err=True)
    if problems:
        raise typer.Exit(FAILED)


def _load(*, figures: bool) -> None:
    if figures:
        import gyroscope.figures  # noqa: F401


def _figure(out: Target) -> Path:
    from gyroscope.figures.save import paths

    figure = out.path / "compare" if out.folder else out.path
    paths(figure)  # refuses formats there are not, before anything is read
    return figure


def _find(listed: list[Given], problems: list[StoreError], stack: ExitStack) -> tuple[list[Run], list[str]]:
    """The runs at these paths and in these folders, each once, and their labels; what cannot be read is reported."""
    from gyroscope import store
    from gyroscope.diagnose.compare import compared
    from gyroscope.store.find import distinct_names

    found: dict[Path, Run] = {}
    labels: dict[Path, str] = {}
    for one in listed:
        path, told = one.path, len(problems)
        try:
            inside = [store.load(path)] if is_run(path) else store.runs(path, broken=problems)
            if not inside and len(problems) == told:
                problems.append(StoreError(f"there are no runs in {path}; gyroscope runs {path.parent} looks further"))
            for run in inside:
                stack.callback(run.close)
                compared([run])  # so that a damaged one is left out, and the others are shown
                found.setdefault(run.path, run)
                if one.label is not None:
                    within = os.path.relpath(run.path, path.absolute())
                    labels[run.path] = one.label if is_run(path) else f"{one.label}/{within}"
        except StoreError as error:
            problems.append(error)
    runs = list(found.values())
    return runs, [labels.get(run.path, name) for run, name in zip(runs, distinct_names(runs), strict=True)]


def _print(runs: list[Run], labels: list[str]) -> None:
    from gyroscope.diagnose.compare import compared, in_words

    rows = compared(runs, labels=labels)
    console = Console()
    console = console if console.is_terminal else Console(width=_UNBOUNDED)
    columns = _columns(rows)
    left_out = []
    for heading in _YIELD:
        if sum(_width(*column) for column in columns.items()) < console.width:
            break
        del columns[heading]
        left_out.append(heading.replace("\n", " "))
    table = Table()
    for heading in columns:
        named = heading in _NAMES
        table.add_column(heading, justify="left" if named else "right", overflow="fold", no_wrap=not named)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(text, cells))
    console.print(table)
    if left_out:
        echo(f"A wider terminal also shows {', '.join(left_out)}.")
    unfinished = [row.name for row in rows if row.state != "ended"]
    if unfinished:
        echo(f"Not ended: {', '.join(unfinished)}")
    if said := in_words(rows):
        echo(said)


def _columns(rows: list[Compared]) -> dict[str, list[str]]:
    """The cells of all rows, by the heading of their column."""
    from gyroscope.diagnose.compare import ACCURACIES

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
            scale = 100.0 if max(known) <= 1 else 1.0  # where some are above 1, they are percents
            columns[f"{kind}\n%"] = [_said(value and scale * value, ".2f") for value in reached]
    return columns


def _said(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _range(ends: tuple[float, float] | None) -> str:
    return "–" if ends is None else "–".join(dict.fromkeys(f"{end:.3g}" for end in ends))


def _width(heading: str, cells: list[str]) -> int:
    """How wide a column is with its border; names can be folded."""
    longest = max(map(len, (*heading.split("\n"), *cells)))
    return (min(longest, _FOLDED) if heading in _NAMES else longest) + 3


def _draw(runs: list[Run], labels: list[str], accuracy: str | None, target: Path) -> list[Path]:
    from gyroscope import figures
    from gyroscope.diagnose.compare import shared_accuracy

    shown = accuracy or shared_accuracy(runs) or "test_accuracy"
    return figures.save(figures.compare(runs, accuracy=shown, labels=labels), target)
