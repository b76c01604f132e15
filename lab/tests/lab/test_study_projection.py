import pytest

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.beyond.problems import SEEDS
from gyroscope_lab.papers.beyond.projection import STUDIES, trials
from gyroscope_lab.training.archive import Archive
from lab.made_lab import raw
from lab.test_study_no_tuning import lab_of, made

[STUDY] = STUDIES


def test_both_ways_differ_in_operation_1_alone(tmp_path):
    found = trials(Lab(Archive(tmp_path), "small"))
    on, off = set(), set()
    for one in found:
        own = tuple(pair for pair in one.recipe.options if pair[0] != "project")
        (on if own == one.recipe.options else off).add((one.task, one.recipe.rate, own, one.seed))
    assert on == off
    assert {seed for *_, seed in on} == set(range(SEEDS["small"]))


@pytest.mark.parametrize(
    ("points", "nats", "noise", "expected"),
    [
        (1.0, 0.02, 0.0, [True, False]),
        (-1.0, -0.02, 0.0, [False, False]),
        (1.0, -0.02, 0.0, [False, False]),
        (0.4, 0.005, 0.0, [False, True]),
        (1.0, 0.02, 5.0, [None, None]),  # as little is known as is seen
    ],
    ids=["better", "worse", "mixed", "alike", "noise"],
)
def test_verdicts_turn_with_the_numbers(tmp_path, points, nats, noise, expected):
    def make(trial):
        on = ("project", False) not in trial.recipe.options
        shift = noise * (-1) ** trial.seed * (1 if on else -1)
        return made(test=0.8 + (on * points + shift) / 100, loss=2.0 - on * nats + shift)

    report = STUDY.conclude(lab_of(tmp_path, make))
    assert [verdict.holds for verdict in report.verdicts] == expected


@pytest.mark.parametrize(("failing_on", "expected"), [(True, [False, False]), (False, [True, False])])
def test_trainings_that_diverge_one_way_alone_count_against_it(tmp_path, failing_on, expected):
    def make(trial):
        fails = (("project", False) not in trial.recipe.options) is failing_on
        return made(test=0.8 - 0.1 * fails, loss=float("inf") if fails else 2.0)

    report = STUDY.conclude(lab_of(tmp_path, make))
    assert [verdict.holds for verdict in report.verdicts] == expected


def test_a_smoke_test_has_the_numbers_of_the_archive(lab, tmp_path):
    report = STUDY.run(lab)
    assert {verdict.holds for verdict in report.verdicts} == {None}
    trial = trials(lab)[0]
    [table] = report.tables
    assert float(table.rows[0][3]) == pytest.approx(100 - 100 * raw(lab, trial)["test_accuracy"], abs=1e-3)
    assert len(table.rows) == 2 * (2 + 3 * 3)
    STUDY.save(lab, report, tmp_path)
