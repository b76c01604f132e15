"""What studies take, in words: how many trainings, and how long they last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gyroscope.errors import GyroscopeError
from gyroscope_lab.engine.cost import cost
from gyroscope_lab.engine.laboratory import SCALES, Lab
from gyroscope_lab.papers.study import Study
from gyroscope_lab.training.trial import Trial


def costs(studies: Sequence[Study], lab: Lab) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return what each study takes by scale, in words, and what all of them take together; – for what has no task."""
    labs: dict[str, Lab] = {scale: replace(lab, scale=scale, known=False) for scale in SCALES}
    needed = {study.name: {scale: _needs(study, one) for scale, one in labs.items()} for study in studies}
    each = {
        name: {scale: "–" if one is None else _cost([one]) for scale, one in needs.items()}
        for name, needs in needed.items()
    }
    sums = {scale: _cost([one for needs in needed.values() if (one := needs[scale]) is not None]) for scale in labs}
    return each, sums


def _needs(study: Study, lab: Lab) -> tuple[Sequence[Trial], float] | None:
    """The trainings of a study and the seconds beside them; None if it has none of the tasks that were asked for."""
    try:
        return study.trials(lab), study.beside.get(lab.scale, 0.0)
    except GyroscopeError:
        return None


def _cost(needs: Sequence[tuple[Sequence[Trial], float]]) -> str:
    beside = sum(seconds for _, seconds in needs)
    whole = cost([trial for trials, _ in needs for trial in trials], beside=beside)
    return f"{whole.trials or 'none'}: {whole.words}" if whole.trials or beside else "none"
