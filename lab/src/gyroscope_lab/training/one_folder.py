"""A trial in a folder of one's own choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gyroscope.errors import StoreError
from gyroscope.store import load
from gyroscope.store.schema import FILE
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.trial import Trial, describes


class OneFolder(Archive):
    """An archive of one trial, whose folder is the archive's.

    >>> import tempfile
    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.engine.run_one import run_one
    >>> from gyroscope_lab.training.tasks import task
    >>> digits = task("digits").lasting(1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mine = OneFolder(f"{folder}/mine", Trial(digits, Recipe("SGD", 0.1)))
    ...     _ = run_one(mine.trial, mine)
    ...     OneFolder(f"{folder}/mine", Trial(digits, Recipe("SGD", 0.2)))
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: ...mine holds another training (digits: SGD, seed 0, rate 0.1); give another folder
    """

    def __init__(self, folder: Path | str, trial: Trial) -> None:
        super().__init__(folder)
        self.trial = trial
        there = self._there()
        if there is not None and not describes(there, trial):
            raise LabError(f"{self.root} holds another training ({_described(there)}); give another folder")

    def folder(self, trial: Trial) -> Path:
        """The folder itself."""
        return self.root

    def _there(self) -> dict[str, Any] | None:
        """The description of the trial that the folder holds, whether it has ended or not."""
        path = self.root / "result.json"
        try:
            if path.exists():
                found: dict[str, Any] = json.loads(path.read_text())["trial"]
                return found
            if not (self.root / FILE).exists():
                return None
            with load(self.root) as run:
                return dict(run.meta["trial"])
        except (OSError, ValueError, KeyError, TypeError, StoreError) as error:
            said = f"it holds no training of the laboratory ({type(error).__name__}: {error})"
            raise LabError(f"{self.root} cannot be gone on with: {said}; give another folder") from error


def _described(description: Any) -> str:
    try:
        task, recipe = description["task"], description["recipe"]
        return f"{task['name']}: {recipe['name']}, seed {description['seed']}, rate {recipe['rate']:g}"
    except (KeyError, TypeError, ValueError):  # recorded by somebody else, who calls something else a trial
        return "of something else than the laboratory"
