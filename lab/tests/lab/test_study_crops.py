from dataclasses import replace

import pytest

from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.conditioning.crops import STUDIES
from gyroscope_lab.papers.conditioning.depth_table import table1_trials
from gyroscope_lab.training.archive import Archive
from lab.made_lab import MadeLab, made, percent, raw

[STUDY] = STUDIES


def test_at_full_scale_trials_are_those_of_table_1_and_the_same_with_a_crop_per_image(tmp_path):
    full = Lab(Archive(tmp_path), "full")
    found = STUDY.trials(full)
    own = [one for one in found if one.task.augmentation.per == "image"]
    published = [one for one in found if one.task.augmentation.per == "batch"]
    assert {one.key for one in published} <= {one.key for one in table1_trials(full)}
    wanted = Augmentation(shift=4, flip=True, per="image", fill="zero", rounding="uniform", half=False)
    assert {one.task.augmentation for one in own} == {wanted}
    as_published = [replace(one, task=replace(one.task, augmentation=published[0].task.augmentation)) for one in own]
    assert [one.task.model for one in as_published] == [one.task.model for one in published]
    assert [(one.recipe, one.schedule, one.seed) for one in own] == [
        (one.recipe, one.schedule, one.seed) for one in published
    ]


@pytest.mark.parametrize(
    ("error", "spread", "expected"),
    [(7.5, 0.1, [True, True]), (6.4, 0.1, [None, False]), (5.4, 0.1, [False, False]), (7.5, 1.0, [None, None])],
    ids=["explains it", "changes nothing", "lowers it", "chance"],
)
def test_verdicts_turn_with_the_errors(tmp_path, error, spread, expected):
    """ResNet-56 has 6.4 % with one crop per batch."""

    def make(trial):
        own = trial.task.augmentation.per == "image"
        side = {1: -1.0, 2: 0.0, 3: 1.0}[trial.seed] * (spread if own else -spread)
        return made(trial, test=1 - ((error if own else 6.4) + side) / 100)

    report = STUDY.conclude(MadeLab(Archive(tmp_path), "full", make=make))
    assert [verdict.holds for verdict in report.verdicts[:2]] == expected
    assert "7.52 ± 0.30" in report.verdicts[1].paper


def test_a_smoke_test_decides_nothing_and_has_the_numbers_of_the_archive(lab, tmp_path):
    report = STUDY.run(lab)
    assert {verdict.holds for verdict in report.verdicts} == {None}
    errors = [100 - percent(raw(lab, trial))[0] for trial in STUDY.trials(lab)]
    assert [row[2] for row in report.tables[0].rows] == pytest.approx(errors)
    STUDY.save(lab, report, tmp_path)
