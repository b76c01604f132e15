"""Run trials anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.last_layer import FILE
from gyroscope_lab.training.trial import Trial


def forget(archive: Archive, trials: Sequence[Trial]) -> None:
    """Delete what an archive holds of `trials`: their runs, results and checkpoints. Nothing else is touched.

    >>> import tempfile
    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.engine.run_one import run_one
    >>> from gyroscope_lab.training.tasks import task
    >>> trial = Trial(task("digits").lasting(1), Recipe("SGD", 0.1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     archive = Archive(folder)
    ...     _ = run_one(trial, archive)
    ...     forget(archive, [trial])
    ...     archive.result(trial) is None
    True
    """
    for trial in trials:
        # Claimed, so that nobody's folder is taken away while they train.
        with archive.claimed(trial) as folder:
            for path in _own(folder):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # somebody else's files are in it
                folder.rmdir()


# What a trial leaves in its folder.
_OWN = (
    "run.sqlite*",
    "run.lock",
    "reference*.pt*",
    "reference*.new",
    "checkpoint.pt*",
    "result.json",
    "result.new",
    "rates.pt",
    "rates-*.new",
    "weights.pt",
    FILE,
)


def _own(folder: Path) -> Iterator[Path]:
    for pattern in _OWN:
        yield from folder.glob(pattern)
