"""Run trials anew."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from gyroscope.lab.archive import Archive
from gyroscope.lab.trial import Trial


def forget(archive: Archive, trials: Sequence[Trial]) -> None:
    """Delete what an archive holds of `trials`: their runs, results and checkpoints. Nothing else is touched.

    >>> import tempfile
    >>> from gyroscope.lab.recipe import Recipe
    >>> from gyroscope.lab.run_one import run_one
    >>> from gyroscope.lab.tasks import task
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
            if folder.exists():
                shutil.rmtree(folder)
