"""Finding runs on disk: one by its path, or all within a folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from gyroscope.errors import StoreError
from gyroscope.store import schema
from gyroscope.store.arguments import path_of
from gyroscope.store.folder import is_dir, is_file
from gyroscope.store.reader import Run

_LOG = logging.getLogger("gyroscope")
#: The depth of folders to look for runs in.
DEPTH = 3


def load(path: str | os.PathLike[str] | Run) -> Run:
    """Open a run from its folder, or the `run.sqlite` in it. A `Run`, such as `monitor.run`, is opened again.

    Raises:
        StoreError: there is no run, it is damaged, or it is from a newer Gyroscope; the message says what to do.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_example(f"{folder}/first").close()
    ...     load(f"{folder}/first").layers
    ('conv1.weight', 'conv2.weight', 'head.weight')
    """
    given = path.path if isinstance(path, Run) else path_of(path)
    if is_file(given):
        if given.name != schema.FILE:
            raise StoreError(f"{given} is a file; a run is a folder with a {schema.FILE} in it. Pass that folder.")
        given = given.parent
    return Run(given)


def runs(folder: str | os.PathLike[str] = "runs", *, broken: list[StoreError] | None = None) -> list[Run]:
    """Return all runs in a folder and the folders within, up to three deep, in the order in which they were started.

    Args:
        folder: the folder to look in.
        broken: a list for the error of every run that cannot be read; if None, these are logged as warnings.

    Raises:
        StoreError: there is no such folder.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("a", "b"):
    ...         write_example(f"{folder}/sweep/{name}").close()
    ...     [run.name for run in runs(folder)]
    ['a', 'b']
    """
    top = path_of(folder, "the folder to look for runs in")
    if is_file(top):
        raise StoreError(f"{top} is a file. Pass the folder of a run, or one that holds runs.")
    if not is_dir(top):
        raise StoreError(
            f"There is no folder {top}. Pass one that runs have been written to; `gyroscope.watch(model, optimizer, "
            f"'{top}/first')` creates one."
        )
    found: list[tuple[float, str, Run]] = []
    for path in run_folders(top, DEPTH):
        try:
            # Closed at once, because there may be more runs than files that can be open.
            with load(path) as run:
                found.append((run.attempts[0].time if run.attempts else 0.0, str(path), run))
        except StoreError as error:
            if broken is None:
                _LOG.warning("%s", error)
            else:
                broken.append(error)
    return [run for _, _, run in sorted(found, key=lambda entry: entry[:2])]


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """Return the names of runs, or their paths from a common folder if the names are not distinct.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     distinct_names([write_example(f"{folder}/{name}") for name in ("a/seed-0", "b/seed-0")])
    ['a/seed-0', 'b/seed-0']
    """
    return distinct([run.path for run in runs])


def distinct(paths: Sequence[Path]) -> list[str]:
    """Return the names of folders, or their paths from a common one if the names are not distinct.

    >>> distinct([Path("/runs/a/seed-0"), Path("/runs/b/seed-0")]), distinct([Path("/runs/a"), Path("/other/b")])
    (['a/seed-0', 'b/seed-0'], ['a', 'b'])
    """
    short = [path.name for path in paths]
    if len(set(short)) == len(set(paths)):
        return short
    root = os.path.commonpath([path.parent for path in paths])
    return [os.path.relpath(path, root) for path in paths]


def run_folders(folder: Path, depth: int, within: str | None = None) -> Iterator[Path]:
    """Yield the folders of runs: `folder` itself, or those within, up to `depth` deep.

    Links that lead out of the real path `within` are not followed, if it is given.
    """
    if (folder / schema.FILE).is_file():
        yield folder
    elif depth > 0:
        try:
            with os.scandir(folder) as entries:
                inner = [
                    Path(entry) for entry in entries
                    if entry.is_dir() and not entry.name.startswith(".")
                    and (within is None or not entry.is_symlink() or is_within(entry.path, within))
                ]  # fmt: skip
        except OSError:
            return
        for path in sorted(inner):
            yield from run_folders(path, depth - 1, within)


def is_within(path: str | os.PathLike[str], folder: str) -> bool:
    """Return True if a path, its links followed, lies in `folder`, a real path, or is that folder.

    >>> is_within("/usr/../etc/hosts", "/usr"), is_within("/usr/lib", "/usr"), is_within("/usr2", "/usr")
    (False, True, False)
    """
    real = os.path.realpath(path)
    return real == folder or real.startswith(folder.rstrip(os.sep) + os.sep)
