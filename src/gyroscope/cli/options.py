"""Arguments and options that commands share: paths of runs, files to write, and what shells complete."""

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

from gyroscope.errors import FigureError, GyroscopeError

if TYPE_CHECKING:
    from gyroscope.store import Run


_MOST = 200
_DEPTH = 2
# Names in a run come from anywhere, and some shells evaluate completions: no other characters are passed on.
_PLAIN = re.compile(r"[\w./@%+=,-]+")


def run_paths(incomplete: str) -> list[str]:
    """Return the runs whose paths start with `incomplete`, or those in `runs`. The shell completes other paths.

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
    typed = incomplete.removesuffix(start)  # verbatim: ./runs is not runs to a shell
    return _plain(typed + os.path.relpath(folder, parent or ".") for folder in islice(found, _MOST))


#: Argument of commands that read one run.
RunPath = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="Folder of a run, as given to gyroscope.watch.",
        show_default=False,
        autocompletion=run_paths,
    ),
]


@dataclass(frozen=True)
class Labeled:
    """A path that holds a run or runs, and its label, if given."""

    path: Path
    label: str | None = None

    def __str__(self) -> str:
        return str(self.path)


def labeled(words: str) -> Labeled:
    """Parse RUN or LABEL=RUN; a folder may have = in its name, and a label has no slash.

    >>> labeled("warm-up=runs/7").label, labeled("runs/lr=0.1").label
    ('warm-up', None)
    """
    label, equals, path = words.partition("=")
    if not (label and equals and path) or "/" in label or os.sep in label or os.path.exists(words):
        return Labeled(Path(words))
    return Labeled(Path(path), label)


#: Argument of commands that read several runs.
LabeledRuns = Annotated[
    list[Labeled],
    typer.Argument(
        parser=labeled,
        metavar="[LABEL=]RUN...",
        help="Folders of runs, or folders that contain runs; LABEL is shown instead of the folder's name.",
        show_default=False,
        autocompletion=run_paths,
    ),
]


def _names_in(read: Callable[[Run], Iterable[str]]) -> Callable[[typer.Context, str], list[str]]:
    """Return a completion of names that `read` finds in the run of the command line, or in the first of its runs."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        from gyroscope.store import load
        from gyroscope.store.find import run_folders

        # While an option still lacks its value, arguments are not parsed yet.
        typed = [ctx.params.get("run"), *(ctx.params.get("runs") or ()), *ctx.args]
        given = next((Path(str(one)) for one in typed if one is not None), None)
        if given is None:
            return []
        try:
            with load(next(run_folders(given, _DEPTH), given)) as run:
                return _plain(name for name in read(run) if name.startswith(incomplete))
        except GyroscopeError:  # the command reports it
            return []

    return complete


quantities = _names_in(lambda run: run.quantities)
scalars = _names_in(lambda run: run.scalars)
quantities_and_scalars = _names_in(lambda run: [*run.quantities, *run.scalars])
layers = _names_in(lambda run: run.layers)
event_kinds = _names_in(lambda run: dict.fromkeys(event.kind for event in run.all_events))


def _plain(names: Iterable[str]) -> list[str]:
    return [name for name in names if _PLAIN.fullmatch(name)]


@dataclass(frozen=True)
class Target:
    """The value of --out.

    Attributes:
        path: the file or folder.
        folder: whether it is a folder: an existing one, or any that is given with a slash at its end.
    """

    path: Path
    folder: bool

    def __str__(self) -> str:
        return str(self.path)

    @contextmanager
    def made(self) -> Iterator[None]:
        """Create its folder if it does not exist, and remove it again if the block fails.

        Raises:
            OSError: the folder cannot be created.

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
    """Parse --out; a path alone does not distinguish a new folder from a file.

    >>> target("figures/").folder, target("figures.png").folder
    (True, False)
    """
    return Target(Path(given), os.path.isdir(given) or given.endswith(("/", os.sep)))


def is_run(path: Path) -> bool:
    """Return whether to load this path as a run; otherwise it is a folder that may contain runs.

    A path that is neither is left to `load`, which reports the reason.

    >>> is_run(Path("nowhere")), is_run(Path("x" * 300)), is_run(Path.cwd())
    (True, True, False)
    """
    return not os.path.isdir(path) or os.path.exists(path / "run.sqlite")  # false for a name that is too long


def check_logged(runs: Iterable[Run], accuracy: str) -> None:
    """Reject what a figure would draw, in the words of the command line, if a run has not logged it.

    >>> check_logged([], "test_accuracy")
    """
    for run in runs:
        if accuracy not in run.scalars:
            known = ", ".join(run.scalars) or "none"
            raise FigureError(
                f"The run {run.name!r} has no scalar {accuracy!r}; its scalars are: {known}. Name another with "
                "--accuracy."
            )


def out_option(what: str, default: str) -> Any:
    """Return the option --out, or -o, of a command, for a `Target`.

    >>> out_option("File to write", "no file").help
    'File to write, or folder to write to; a new folder ends in /.'
    """
    return typer.Option(
        "--out",
        "-o",
        parser=target,
        metavar="<path>",
        help=f"{what}, or folder to write to; a new folder ends in /.",
        show_default=default,
    )
