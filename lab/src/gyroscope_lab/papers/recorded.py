"""What the monitor recorded while a trial was trained."""

from __future__ import annotations

from gyroscope.errors import StoreError
from gyroscope.store import Run, load
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.trial import Trial


def recorded(lab: Lab, trial: Trial) -> Run:
    """The run of a trial, which is trained if it is not known yet.

    >>> import tempfile
    >>> from gyroscope_lab.training.archive import Archive
    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.data.source import Source
    >>> from gyroscope_lab.training.task import Task
    >>> task = Task("digits", Source("digits"), "mlp-2x8", options=(("inputs", 64),)).lasting(1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     len(recorded(Lab(Archive(folder), engine="serial"), Trial(task, Recipe("SGD", 0.1))).layers)
    2
    """
    lab.run([trial])
    folder = lab.archive.folder(lab.trial(trial))
    try:
        return load(folder)
    except StoreError as error:
        said = f"the result of {trial.recipe.name} on {trial.task.name} is in {folder}, but not what was recorded"
        raise LabError(f"{said} while it was trained; train it in another folder") from error
