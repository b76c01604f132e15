"""`gyroscope diagnose`: what is wrong with a run, in which layer, since when, and what to do about it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from gyroscope.cli.fail import BAD_ARGUMENT, reported
from gyroscope.cli.options import RunPath
from gyroscope.cli.printed import console, echo, text

#: Exit codes: a serious finding, and a run that does not hold enough to tell.
SERIOUS, UNDECIDED = 3, 4
_UNBOUNDED = 150
_STYLES = {"serious": "red", "warning": "yellow", "note": "dim"}


def diagnose(
    run: RunPath,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    mute: Annotated[list[str] | None, typer.Option(metavar="KIND", help="Leave out findings of this kind.")] = None,
) -> None:
    """State what is wrong with a run, in which layer, since when, and what to try.

    **serious**: training is broken or wasted; **warning**: it likely costs quality; **note**: worth knowing. The exit
    status is 3 with a serious finding, 4 if the run does not hold enough to tell, and else 0.

    For example: gyroscope diagnose runs/first --mute repeated_batch
    """
    from gyroscope.diagnosis.diagnose import checked_kinds
    from gyroscope.diagnosis.diagnose import diagnose as diagnosed

    with reported(code=BAD_ARGUMENT):
        muted = checked_kinds(mute or ())
    with reported():
        found = diagnosed(run, mute=muted)
    if as_json:
        echo(found.to_json())
    else:
        screen = console(_UNBOUNDED)
        screen.print(text(found.headline()))
        if found:
            table = Table(box=SIMPLE_HEAD, show_lines=False)
            for head in ("", "finding", "what to try"):
                table.add_column(head, overflow="fold")
            for one in found:
                style = _STYLES[one.severity]
                table.add_row(text(one.severity, style=style), text(one.sentence), text(one.remedy))
            screen.print(table)
        for line in found.missing:
            screen.print(text(line))
    if found.serious:
        raise typer.Exit(SERIOUS)
    if not found.decided:
        raise typer.Exit(UNDECIDED)
