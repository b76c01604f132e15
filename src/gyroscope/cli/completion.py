"""What the shell completes: paths of runs, and the names of what is in them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gyroscope.errors import GyroscopeError

if TYPE_CHECKING:
    from gyroscope.store import Run

_MOST = 200
_DEPTH = 2
# Names in a run come from anywhere, and some shells evaluate what they are given: no other characters reach them.
_PLAIN = re.compile(r"[\w./@%+=,-]+")


def run_paths(incomplete: str) -> list[str]:
    """Return the runs whose paths begin so; those in `runs` if there is no beginning. The shell knows all other paths.

    >>> run_paths("/nowhere/at/all")
    []
    """
    from gyroscope.store.find import run_folders

    parent, start = os.path.split(incomplete or "runs")
    try:
        names = sorted(name for name in os.listdir(parent or ".") if name.startswith(start))
    except OSError:
        return []
    found = (folder for name in names for folder in run_folders(Path(parent, name), _DEPTH))
    typed = incomplete.removesuffix(start)  # as it is: ./runs is not runs to a shell
    return _plain(typed + os.path.relpath(folder, parent or ".") for folder in islice(found, _MOST))


#: The argument of commands that read one run.
RunPath = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="The folder of a run, as it was given to gyroscope.watch.",
        show_default=False,
        autocompletion=run_paths,
    ),
]


def names_in(read: Callable[[Run], Iterable[str]]) -> Callable[[typer.Context, str], list[str]]:
    """Return what completes names that `read` finds in the run of the command line, or in the first of its runs."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        from gyroscope.store import load
        from gyroscope.store.find import run_folders

        # Before an option that still lacks its value, arguments are left as they were typed.
        typed = [ctx.params.get("run"), *(ctx.params.get("runs") or ()), *ctx.args]
        given = next((Path(str(one)) for one in typed if one is not None), None)
        if given is None:
            return []
        try:
            with load(next(run_folders(given, _DEPTH), given)) as run:
                return _plain(name for name in read(run) if name.startswith(incomplete))
        except GyroscopeError:  # the command says it
            return []

    return complete


quantities = names_in(lambda run: run.quantities)
scalars = names_in(lambda run: run.scalars)
quantities_and_scalars = names_in(lambda run: [*run.quantities, *run.scalars])
layers = names_in(lambda run: run.layers)
event_kinds = names_in(lambda run: dict.fromkeys(event.kind for event in run.all_events))


def _plain(names: Iterable[str]) -> list[str]:
    return [name for name in names if _PLAIN.fullmatch(name)]
