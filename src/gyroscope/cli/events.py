"""`gyroscope events`: all events of a run."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from gyroscope.cli.fail import BAD_ARGUMENT, fail, reported
from gyroscope.cli.options import RunPath, event_kinds
from gyroscope.cli.printed import console, echo, text

# Width for a pipe or a file; most texts fit in one line.
_UNBOUNDED = 400


def events(
    run: RunPath,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="Show only events of this kind, such as note; may be repeated.",
            autocompletion=event_kinds,
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Also show events after the step at which the run was later resumed.")
    ] = False,
) -> None:
    """List all events of a run, in the order of steps.

    Events are notes (monitor.note), starts, resumes and stops, changes of the interval between measurements, findings
    and errors.

    For example: gyroscope events runs/first --kind note
    """
    from gyroscope.store import load

    with reported(), load(run) as opened:
        found = opened.all_events if every else opened.events
    kinds = list(dict.fromkeys(event.kind for event in found))
    unknown = [one for one in kind or () if one not in kinds]
    if unknown:
        there = f"Its kinds are {', '.join(kinds)}." if kinds else "It has no events."
        fail(f"`--kind` must be a kind of event in {run}, got {unknown[0]}. {there}", code=BAD_ARGUMENT)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("step", justify="right")
    for column in ("time", "kind"):
        table.add_column(column, no_wrap=True)
    table.add_column("event", overflow="fold")
    shown = [event for event in found if not kind or event.kind in kind]
    for event in shown:
        at = datetime.fromtimestamp(event.time).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(*map(text, (f"{event.step:,}", at, event.kind, event.text)))
    if not shown:
        echo(f"{run} has no events.")
        return
    console(_UNBOUNDED).print(table)
