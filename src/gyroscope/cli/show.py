"""`gyroscope show`: a run in the terminal."""

from __future__ import annotations

import time
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live

from gyroscope.cli import options
from gyroscope.cli.fail import BAD_ARGUMENT, fail, reported
from gyroscope.cli.options import RunPath
from gyroscope.cli.printed import console, text

if TYPE_CHECKING:
    from gyroscope.store import Run


_ROWS = 24
_EVENTS = 3
_SECONDS = 2.0
# Width for a pipe or a file; every column fits.
_UNBOUNDED = 150


def show(
    run: RunPath,
    quantity: Annotated[
        str,
        typer.Option(
            help="Quantity that the last column draws over the steps, such as gradient_norm.",
            autocompletion=options.quantities,
        ),
    ] = "rotation",
    layers: Annotated[
        str,
        typer.Option(
            metavar="N|all|PATTERN",
            help="Number of layers to show, or a pattern on their names.",
            autocompletion=options.layers,
        ),
    ] = str(_ROWS),
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep watching a run that is still running.")] = False,
) -> None:
    """Show a run as a table: one row per layer, with its last values and their course.

    **rotation** is how far a layer has turned from its initialization, 0 for not at all and 1 for a right angle.
    **rad/step** is how fast it turns now, net over the steps since the previous measurement, **‖w‖** the norm of its
    weights, **‖Δw‖/‖w‖** the size of an update relative to them, **η/‖w‖²** its effective learning rate. **merged** is
    the rotation of a frozen layer with its adapters merged. A dash means unknown, nan not finite.

    For example: gyroscope show runs/first --layers all
    """
    from gyroscope.cli.layer_table import Kept
    from gyroscope.store import load

    with reported(), load(run) as found, Kept(found.path) as opened:
        _check(opened, quantity)
        screen = console(_UNBOUNDED)
        if follow:
            _follow(opened, screen, quantity, layers)
        else:
            screen.print(_page(opened, quantity, _rows(opened, layers), screen.width))


def _follow(run: Run, screen: Console, quantity: str, layers: str) -> None:
    with Live(console=screen, auto_refresh=False) as live:
        try:
            while True:
                going = run.state == "running"
                run.refresh()
                live.update(_page(run, quantity, _rows(run, layers), screen.width), refresh=True)
                if not going:
                    return
                time.sleep(_SECONDS)
        except KeyboardInterrupt:  # the way to stop watching
            return


def _page(run: Run, quantity: str, rows: list[int], width: int) -> RenderableType:
    from gyroscope.cli.layer_table import layer_table, of_earlier_steps
    from gyroscope.diagnosis.standing_out import in_words

    table, left_out = layer_table(run, quantity=quantity, rows=rows, width=width)
    below = [in_words(run)]
    headings = [str(column.header) for column in table.columns]
    earlier = of_earlier_steps(run, quantity=quantity, headings=headings)
    if earlier:
        below.append(earlier)
    if "rad/step" in headings and len(run.steps) > 1 and (since := int(run.steps[-1] - run.steps[-2])) > 1:
        below.append(
            f"rad/step is the angle over the last {since:,} steps divided by their number: less than a single step "
            "turns if steps partly undo each other."
        )
    if len(rows) < len(run.layers):
        below.append(f"Showing {len(rows)} of {len(run.layers):,} layers; --layers all shows all.")
    if left_out:
        below.append(f"A wider terminal also shows {', '.join(left_out)}.")
    return Group(*map(text, _header(run)), table, *map(text, below))


def _header(run: Run) -> list[str]:
    steps = run.steps
    span = f"steps {steps[0]:,} to {steps[-1]:,}, {len(steps):,} measured" if len(steps) else "no steps yet"
    lines = [f"{run.name}: {len(run.layers):,} layers, {span}, {run.state}"]
    last = [f"{name} {curve.values[-1]:.4g}" for name, curve in run.scalars.items() if len(curve.values)]
    if last:
        lines.append(", ".join(last))
    events = run.events
    if len(events) > _EVENTS:
        lines.append(f"{len(events):,} events; the last ones (gyroscope events lists all):")
    lines += [f"  step {event.step:,} {event.kind}: {event.text}" for event in events[-_EVENTS:]]
    return lines


def _check(run: Run, quantity: str) -> None:
    known = list(run.quantities)
    if quantity not in known and known:
        close = get_close_matches(quantity, known, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        # "rotation" is the default: a run without it is shown anyway.
        if quantity != "rotation":
            fail(f"`--quantity` must be one of {', '.join(known)}, got {quantity}.{hint}", code=BAD_ARGUMENT)


def _rows(run: Run, layers: str) -> list[int]:
    count = len(run.layers)
    if layers == "all":
        return list(range(count))
    if layers.isascii() and layers.isdigit():
        wanted = count if len(layers) > 9 else min(int(layers), count)
        if wanted < 1:
            fail("`--layers` must be a number ≥ 1, all, or a pattern, got 0.", code=BAD_ARGUMENT)
        first = (wanted + 1) // 2
        return [*range(first), *range(count - (wanted - first), count)]
    rows = [i for i, name in enumerate(run.layers) if fnmatchcase(name, layers)]
    if not rows:
        close = get_close_matches(layers, run.layers, n=1, cutoff=0)[0]
        fail(
            f"`--layers` must match at least one of the {count:,} layers, got {layers}. One of them is {close}.",
            code=BAD_ARGUMENT,
        )
    return rows
