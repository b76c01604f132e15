"""`gyroscope runs`: the runs in a folder."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.table import Table
from rich.text import Text

from gyroscope.cli.fail import fail_if, reported
from gyroscope.cli.printed import console, echo, text
from gyroscope.errors import StoreError

if TYPE_CHECKING:
    from gyroscope.store import Run

_STYLES = {"running": "green", "ended": "", "interrupted": "yellow"}
# Width for a pipe or a file; every column fits.
_UNBOUNDED = 150


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder to search, up to three levels deep.", show_default=True)
    ] = Path("runs"),
) -> None:
    """List the runs in a folder, the newest last.

    **measured** is the number of measured steps. **rotation** is the mean over layers of how far they have turned from
    their initialization: 0 for not at all, 1 for a right angle. A run that was **interrupted** was killed or crashed;
    what it had written is intact, and it can be resumed.

    For example: gyroscope runs experiments
    """
    from gyroscope import store

    broken: list[StoreError] = []
    with reported():
        found = store.runs(folder, broken=broken)
    table = Table()
    table.add_column("run", overflow="fold")
    for column in ("layers", "measured", "last step", "rotation"):
        table.add_column(column, justify="right")
    table.add_column("state")
    table.add_column("started", no_wrap=True)
    shown = 0
    for run in found:
        try:
            table.add_row(*_row(run, folder))
            shown += 1
        except StoreError as error:
            broken.append(error)
        finally:
            run.close()
    if shown:
        console(_UNBOUNDED).print(table)
    elif not broken:
        echo(f"There are no runs in {folder}. gyroscope.watch(model, optimizer, '{folder}/first') writes one.")
    fail_if(broken)


def _row(run: Run, folder: Path) -> list[Text]:
    top = folder.absolute()
    name = run.name if run.path == top else str(run.path.relative_to(top))
    steps, state = run.steps, run.state
    started = datetime.fromtimestamp(run.attempts[0].time).strftime("%Y-%m-%d %H:%M") if run.attempts else "–"
    words = (
        name,
        f"{len(run.layers):,}",
        f"{len(steps):,}",
        f"{steps[-1]:,}" if len(steps) else "–",
        _rotation(run),
    )
    return [*map(text, words), text(state, style=_STYLES[state]), text(started)]


def _rotation(run: Run) -> str:
    """Return the mean rotation of the layers at the last step at which it was measured."""
    if "rotation" not in run.quantities or not len(run.where("rotation")):
        return "–"
    return f"{np.nanmean(run.series('rotation', steps=run.where('rotation')[-1:])):.3f}"
