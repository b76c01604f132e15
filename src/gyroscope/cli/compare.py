"""`gyroscope compare`: recorded runs side by side."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from gyroscope.cli.fail import BAD_ARGUMENT, FAILED, INTERRUPTED, fail
from gyroscope.cli.printed import echo, text
from gyroscope.cli.target import Target, is_run, out_option
from gyroscope.errors import GyroscopeError, StoreError

if TYPE_CHECKING:
    from gyroscope.lab.compare import Compared
    from gyroscope.store import Run

# A pipe or a file has no width; this holds every column.
_UNBOUNDED = 170


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folders of runs, or folders that have runs in them.", show_default=False
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
        ),
    ] = None,
) -> None:
    """Put recorded runs side by side: how they were trained, how far their layers rotated, and how good they are.

    **rotation** is how far layers have turned from where they started at the end, 0 not at all and 1 a right angle: the
    least rotated layer, the mean, the most rotated layer. Accuracies and losses are the last that were logged. A dash
    is not known.

    With --out, the figure puts mean rotation against accuracy, one point a run.

    For example: gyroscope compare runs/lab/digits --out rotation.png
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
            found = _find(runs, problems, stack)
            if found:
                _print(found)
            written = _draw(found, accuracy, figure) if found and figure is not None else []
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
    import gyroscope.lab

    if figures:
        import gyroscope.figures  # noqa: F401


def _figure(out: Target) -> Path:
    from gyroscope.figures.save import paths

    figure = out.path / "compare" if out.folder else out.path
    paths(figure)  # refuses formats there are not, before anything is read
    return figure


def _find(given: list[Path], problems: list[StoreError], stack: ExitStack) -> list[Run]:
    """The runs at these paths and in these folders, each once; what cannot be read is told of."""
    from gyroscope import store
    from gyroscope.lab.compare import compared

    found: dict[Path, Run] = {}
    for path in given:
        told = len(problems)
        try:
            inside = [store.load(path)] if is_run(path) else store.runs(path, broken=problems)
            if not inside and len(problems) == told:
                problems.append(StoreError(f"there are no runs in {path}; gyroscope runs {path.parent} looks further"))
            for run in inside:
                stack.callback(run.close)
                compared([run])  # so that a damaged one is left out, and the others are shown
                found.setdefault(run.path, run)
        except StoreError as error:
            problems.append(error)
    return list(found.values())


def _print(runs: list[Run]) -> None:
    from gyroscope.lab.compare import ACCURACIES, compared, in_words

    rows = compared(runs)
    kinds = [kind for kind in ACCURACIES if any(kind in row.accuracies for row in rows)][::-1]
    table = Table()
    table.add_column("run", overflow="fold")
    table.add_column("optimizer", overflow="fold")
    for column in ("rate", "steps", "rotation\nmin", "\nmean", "\nmax", "loss", *(f"{kind}\n%" for kind in kinds)):
        table.add_column(column, justify="right")
    scales = {kind: _percent([row.accuracies[kind] for row in rows if kind in row.accuracies]) for kind in kinds}
    for row in rows:
        table.add_row(*map(text, _cells(row, scales)))
    console = Console()
    (console if console.is_terminal else Console(width=_UNBOUNDED)).print(table)
    unfinished = [row.name for row in rows if row.state != "ended"]
    if unfinished:
        echo(f"Not ended: {', '.join(unfinished)}")
    if said := in_words(rows):
        echo(said)


def _percent(values: list[float]) -> float:
    """What makes percents of accuracies: nothing where some are above 1, and so are percents."""
    return 100.0 if max(values) <= 1 else 1.0


def _cells(row: Compared, scales: dict[str, float]) -> list[str]:
    turned = ["–"] * 3 if row.rotation is None else [f"{value:.3f}" for value in row.rotation]
    accuracies = {kind: scale * row.accuracies[kind] for kind, scale in scales.items() if kind in row.accuracies}
    reached = [f"{accuracies[kind]:.2f}" if kind in accuracies else "–" for kind in scales]
    return [
        row.name,
        row.optimizer or "–",
        "–" if row.rate is None else f"{row.rate:.4g}",
        "–" if row.steps is None else f"{row.steps:,}",
        *turned,
        "–" if row.loss is None else f"{row.loss:.4g}",
        *reached,
    ]


def _draw(runs: list[Run], accuracy: str | None, target: Path) -> list[Path]:
    from gyroscope import figures
    from gyroscope.lab.compare import shared_accuracy

    return figures.save(figures.compare(runs, accuracy=accuracy or shared_accuracy(runs) or "test_accuracy"), target)
