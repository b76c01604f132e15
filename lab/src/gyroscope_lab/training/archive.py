"""Archives of results: a folder of many trials, or the folder of one trial. They prevent running a trial twice."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from gyroscope.control.rates import Rates
from gyroscope.errors import ControlError, StoreError
from gyroscope.store import load, schema
from gyroscope.store.lock import HeldError, Lock, is_held
from gyroscope_lab.errors import LabError
from gyroscope_lab.training import checkpoint
from gyroscope_lab.training.last_layer import FILE as LAST_LAYER
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.training import RATES, WEIGHTS
from gyroscope_lab.training.trial import Trial, describes, file_name


class Archive:
    """A folder of trials. Each trial has its own folder with its run, its result and, until it ends, its checkpoint.

    A trial is found by its key: the same training under another name is the same trial, and a changed training is not.

    >>> import tempfile
    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.tasks import task
    >>> from gyroscope_lab.training.training import train
    >>> digits = task("digits").lasting(1)
    >>> trial = Trial(digits, Recipe("SGD", 0.1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     archive = Archive(folder)
    ...     before = archive.result(trial)
    ...     result = train(trial, digits.source.load(), folder=archive.folder(trial))
    ...     before is None, archive.result(trial) == result
    (True, True)
    """

    def __init__(self, folder: Path | str) -> None:
        self.root = Path(folder)

    def folder(self, trial: Trial) -> Path:
        """The folder of a trial, whatever name it was run under."""
        own = self.root / file_name(trial.task.name) / trial.slug
        if own.exists():
            return own
        return next(iter(sorted(self.root.glob(f"*/*-{trial.key[:8]}"))), own)

    def result(self, trial: Trial) -> Result | None:
        """The result of a trial, or None if it has none yet."""
        path = self.folder(trial) / "result.json"
        try:
            content = json.loads(path.read_text())
            described, result = content["trial"], Result.from_json(content["result"], path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, LabError) as error:
            said = str(error) if isinstance(error, LabError) else f"{path} cannot be read ({error})"
            raise LabError(f"{said}. Delete it to run the trial again.") from error
        if not describes(described, trial):
            raise LabError(f"{path} holds the result of another trial. Move it elsewhere to run this one.")
        return result

    def holds(self, trial: Trial) -> bool:
        """Return whether a trial has its result and, if its recipe records rates for others, these rates."""
        known = self.result(trial) is not None
        return known and (not trial.recipe.records or (self.folder(trial) / RATES).exists())

    def missing(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials without a result, without duplicates. A trial that copies rates comes after their source."""
        wanted: dict[str, Trial] = {}
        for trial in trials:
            if trial.key not in wanted and self.result(trial) is None:
                wanted |= {one.key: one for one in trial.lineage[:-1] if self.result(one) is None} | {trial.key: trial}
        return list(wanted.values())

    def rates(self, trial: Trial) -> Rates | None:
        """Return the rates that a trial copies, or None if it copies none."""
        if trial.source is None:
            return None
        where = self.folder(trial.source)
        if not where.exists():
            said = f"{trial.recipe.name} copies the rates of {trial.source.recipe.name}, which is not in {self.root}"
            raise LabError(f"{said}. Run that trial first, or pass both to run_trials.")
        try:
            return Rates.load(where / RATES)
        except ControlError as error:
            raise LabError(f"{error} Delete {where} to run {trial.source.recipe.name} again.") from error
        except Exception as error:
            said = f"{where / RATES} cannot be read ({type(error).__name__}: {error})"
            raise LabError(f"{said}. Delete {where} to run {trial.source.recipe.name} again.") from error

    def weights(self, trial: Trial) -> dict[str, dict[str, Tensor]]:
        """Return the weights that a trial with `keeps` kept: "initial" (its layers at the start) and "tested" (all)."""
        path = self.folder(trial) / WEIGHTS
        try:
            return checkpoint.read(path)
        except FileNotFoundError:
            raise LabError(f"{path} does not exist. Run the trial with keeps=True.") from None
        except Exception as error:
            said = f"{path} cannot be read ({type(error).__name__}: {error})"
            raise LabError(f"{said}. Delete its folder to run the trial again.") from error

    @contextmanager
    def claimed(self, trial: Trial, *, on_wait: Callable[[], None] = lambda: None) -> Iterator[Path]:
        """Lock a trial's folder: other processes that want to run the trial wait, and then find its result."""
        while True:
            with self.claimed_if_free(trial) as folder:
                if folder is not None:
                    yield folder
                    return
            on_wait()
            time.sleep(0.5)

    @contextmanager
    def claimed_if_free(self, trial: Trial) -> Iterator[Path | None]:
        """Lock a trial's folder without waiting, for callers with other locks; yield None if another process has it."""
        claim = self.root / ".claims" / trial.key[:16]
        claim.mkdir(parents=True, exist_ok=True)
        try:
            lock = None if is_held(claim) else Lock(claim)
        except HeldError:
            lock = None
        try:
            yield None if lock is None else self.folder(trial)
        finally:
            if lock is not None:
                lock.release()


class OneFolder(Archive):
    """An archive of one trial, which uses the archive's folder itself.

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
    gyroscope_lab.errors.LabError: ...mine holds another training (digits: SGD, seed 0, rate 0.1). Give another folder.
    """

    def __init__(self, folder: Path | str, trial: Trial) -> None:
        super().__init__(folder)
        self.trial = trial
        there = self._there()
        if there is not None and not describes(there, trial):
            raise LabError(f"{self.root} holds another training ({_described(there)}). Give another folder.")

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
            if not (self.root / schema.FILE).exists():
                return None
            with load(self.root) as run:
                return dict(run.meta["trial"])
        except (OSError, ValueError, KeyError, TypeError, StoreError) as error:
            said = f"it holds no training of the laboratory ({type(error).__name__}: {error})"
            raise LabError(f"{self.root} cannot be resumed: {said}. Give another folder.") from error


def _described(description: Any) -> str:
    try:
        task, recipe = description["task"], description["recipe"]
        return f"{task['name']}: {recipe['name']}, seed {description['seed']}, rate {recipe['rate']:g}"
    except (KeyError, TypeError, ValueError):  # recorded by another program, with its own meaning of "trial"
        return "of something else than the laboratory"


def forget(archive: Archive, trials: Sequence[Trial]) -> None:
    """Delete the runs, results and checkpoints of `trials` in an archive, and nothing else.

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
        # Claimed, so that no folder is deleted while another process trains in it.
        with archive.claimed(trial) as folder:
            for path in _own(folder):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # it contains other files
                folder.rmdir()


# The files that a trial leaves in its folder.
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
    LAST_LAYER,
)


def _own(folder: Path) -> Iterator[Path]:
    for pattern in _OWN:
        yield from folder.glob(pattern)
