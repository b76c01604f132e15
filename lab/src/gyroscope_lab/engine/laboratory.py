"""The laboratory of a study: tasks at its scale, an engine that runs trials, and the archive of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch

from gyroscope_lab.engine.engine import Engine, run_trials
from gyroscope_lab.engine.run_one import Note
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.task import Precision, Task
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.trial import Trial

Scale = Literal["smoke", "small", "full"]

#: The scales: seconds on a CPU, minutes on a CPU, the paper's own protocol on a GPU.
SCALES: tuple[Scale, ...] = get_args(Scale)

#: Further seeds of a full-scale configuration: used if their results are kept, but not needed by any study.
EXTRA_SEEDS = range(1, 3)

# The task that replaces a paper's task without its data or a GPU, by the kind of its network.
_STAND_INS = {
    "c10-resnet110": "digits-resnet",
    "c10-deep": "digits-deep",
    "c100-deep": "digits-deep",
    "mnist-mlp": "digits-mlp",
    "mnist-one-layer": "digits-one-layer",
}
# A smoke test trains for this share of the epochs.
_SMOKE = 0.25


@dataclass(frozen=True)
class Lab:
    """The laboratory at one scale.

    At the scales "smoke" and "small", the embedded digits replace the papers' data, and small networks of the same kind
    replace the papers' networks. "smoke" trains a quarter as long, from one seed.

    Attributes:
        archive: the archive of the results.
        scale: "smoke", "small" or "full".
        data: the folder of the datasets.
        engine: the engine that runs trials; see `gyroscope_lab.engine.engine.run_trials`.
        jobs: the most trials at a time.
        only: the tasks of a study to use; by default all.
        precision: the precision of the trials; by default the task's, or bf16 on a GPU and float32 on a CPU. Known
            trials at full scale were trained on a GPU.
        known: conclude from the results in the archive, and train nothing.
        on_asked: called with the trials that a study asks for.
        on_note: called as each training ends an epoch.
        on_begin: called with the trials that are about to be run.
        on_done: called as each ends.

    >>> lab = Lab(Archive("runs"), "small")
    >>> lab.task("c10-cnn1").name, list(lab.seeds)
    ('digits', [0, 1, 2])
    """

    archive: Archive
    scale: Scale = "smoke"
    data: Path | str | None = None
    engine: Engine = "auto"
    jobs: int | None = None
    only: tuple[str, ...] = ()
    precision: Precision | None = None
    known: bool = False
    on_asked: Callable[[Sequence[Trial]], None] = lambda trials: None
    on_note: Callable[[Note], None] = lambda note: None
    on_begin: Callable[[Sequence[Trial]], None] = lambda trials: None
    on_done: Callable[[Trial, Result], None] = lambda trial, result: None

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise LabError(f"`scale` must be one of {', '.join(map(repr, SCALES))}, got {self.scale!r}.")
        for name in self.only:
            task(name)

    @property
    def seeds(self) -> range:
        """The seeds of each configuration.

        The small scale has three, because one seed is not enough for a conclusion on networks of that size. The full
        scale needs one; a laboratory that trains nothing (`known`) also uses the `EXTRA_SEEDS` in its archive.
        """
        if self.scale == "full" and self.known:
            return range(EXTRA_SEEDS.stop)
        return range(3 if self.scale == "small" else 1)

    def task(self, name: str) -> Task:
        """The task, or its replacement at this scale.

        >>> Lab(Archive("runs"), "full").task("c10-cnn1").name, Lab(Archive("runs")).task("c10-cnn1").name
        ('c10-cnn1', 'digits')
        """
        asked = task(name)
        if self.scale == "full":
            return asked
        stand_in = asked if asked.source.name == "digits" else task(_STAND_INS.get(name, "digits"))
        if self.scale == "small":
            return stand_in
        return stand_in.lasting(max(1, round(_SMOKE * stand_in.schedule.epochs)))

    def tasks(self, names: Sequence[str]) -> list[Task]:
        """The requested tasks, or their replacements at this scale, each once.

        >>> [one.name for one in Lab(Archive("runs")).tasks(["c10-cnn1", "c100-resnet"])]
        ['digits']
        """
        chosen = [name for name in names if not self.only or name in self.only]
        if not chosen:
            raise LabError(f"`only` must name tasks of this study ({', '.join(names)}), got {', '.join(self.only)}.")
        return list({one.name: one for one in map(self.task, chosen)}.values())

    def trial(self, trial: Trial) -> Trial:
        """The trial in the precision of this laboratory."""
        on_gpu = self.engine in ("auto", "population") and torch.cuda.is_available()
        suited: Precision = "bf16" if on_gpu or (self.known and self.scale == "full") else "float32"
        return replace(trial, precision=self.precision or trial.task.precision or suited)

    def held(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials from which a study concludes: all, or with `known` those that have a result."""
        self.on_asked(trials)
        return [one for one in trials if not self.known or self.archive.result(self.trial(one)) is not None]

    def run(self, trials: Sequence[Trial]) -> list[Result]:
        """Return the result of each trial, in order; trials with a result are not run again."""
        mine = [self.trial(trial) for trial in trials]
        missing = self.archive.missing(mine)
        if self.known:  # the source of a known trial is not needed
            missing = [trial for trial in mine if self.archive.result(trial) is None]
        if missing and self.known:
            raise LabError(
                f"{len(missing)} of the {len(mine)} trainings that the study needs are not in {self.archive.root}, "
                f"such as {missing[0].slug}. Leave --known out to train them."
            )
        if missing:
            self.on_begin(missing)
        if self.known:
            return [result for trial in mine if (result := self.archive.result(trial)) is not None]
        return run_trials(
            mine,
            self.archive,
            engine=self.engine,
            jobs=self.jobs,
            data=self.data,
            on_note=self.on_note,
            on_done=self.on_done,
        )
