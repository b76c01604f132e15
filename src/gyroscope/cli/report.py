"""`gyroscope report`: runs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gyroscope.cli.fail import BAD_ARGUMENT, fail, fail_if, reported
from gyroscope.cli.options import LabeledRuns, Target, out_option
from gyroscope.cli.printed import echo
from gyroscope.errors import GyroscopeError

_NAME = "report.html"


def report(
    runs: LabeledRuns,
    out: Annotated[Target | None, out_option("File to write", _NAME)] = None,
    full: Annotated[bool, typer.Option("--full", help="Keep every measured step.")] = False,
    bins: Annotated[int, typer.Option(help="Most bins of a series; longer ones are shown in bins.")] = 512,
    title: Annotated[str | None, typer.Option(help="Title of the page.", show_default="the name of the run")] = None,
) -> None:
    """Write runs as one HTML file, which can be opened anywhere and mailed.

    The page shows findings, a heatmap of layers and steps, curves, a table of the layers, and several runs side by
    side. Everything is in the file: it makes no request.

    Series of more steps than --bins are shown in bins, with mean, minimum and maximum of each; --full keeps every step.

    For example: gyroscope report runs/first -o first.html, or gyroscope report plain=runs/1 decay=runs/2
    """
    from gyroscope.page.report import report as write

    if bins < 1:
        fail(f"`--bins` must be a whole number ≥ 1, got {bins}. Try 512.", code=BAD_ARGUMENT)
    file = Path(_NAME) if out is None else out.path / _NAME if out.folder else out.path
    problems: list[GyroscopeError] = []
    with reported():
        paths, labels = [one.path for one in runs], [one.label for one in runs]
        written = write(paths, file, full=full, bins=bins, title=title, labels=labels, broken=problems)
    echo(f"Wrote {written} ({written.stat().st_size / 1e3:,.0f} kB)")
    fail_if(problems)
