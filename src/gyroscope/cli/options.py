"""What the shell completes: paths of runs, and the names of what is in them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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


@dataclass(frozen=True)
class Target:
    """What was given as --out.

    Attributes:
        path: the file or folder.
        folder: whether it is a folder: one that is there, or any that is given with a slash at its end.
    """

    path: Path
    folder: bool

    def __str__(self) -> str:
        return str(self.path)

    @contextmanager
    def made(self) -> Iterator[None]:
        """The folder it is in, which is made if it is not there, and taken away again if nothing comes of it.

        Raises:
            OSError: it cannot be made.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as here, target(f"{here}/new/").made():
        ...     os.path.isdir(f"{here}/new")
        True
        """
        folder = self.path if self.folder else self.path.parent
        new = not folder.exists()
        if new:
            folder.mkdir(parents=True)
        try:
            yield
        except BaseException:
            if new:
                with suppress(OSError):
                    folder.rmdir()
            raise


def target(given: str) -> Target:
    """Read --out; a path alone cannot tell a folder that is not there from a file.

    >>> target("figures/").folder, target("figures.png").folder
    (True, False)
    """
    return Target(Path(given), os.path.isdir(given) or given.endswith(("/", os.sep)))


def is_run(path: Path) -> bool:
    """Whether to load this path as a run; else it is a folder that may have runs in it.

    What is neither is left to `load`, which says what is wrong with it.

    >>> is_run(Path("nowhere")), is_run(Path("x" * 300)), is_run(Path.cwd())
    (True, True, False)
    """
    return not os.path.isdir(path) or os.path.exists(path / "run.sqlite")  # a name that is too long is neither


def out_option(what: str, default: str) -> Any:
    """The option --out of a command, for a `Target`.

    >>> out_option("File to write", "no file").help
    'File to write, or folder to write into; a new folder ends in /.'
    """
    return typer.Option(
        parser=target,
        metavar="<path>",
        help=f"{what}, or folder to write into; a new folder ends in /.",
        show_default=default,
    )
