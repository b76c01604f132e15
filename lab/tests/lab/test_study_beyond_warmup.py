import pytest

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.beyond.warmup import STUDIES, gains, residual, transformers, trials
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from lab.made_lab import raw
from lab.test_study_no_tuning import lab_of

[STUDY] = STUDIES


def result(*, loss=2.0, accuracy=0.9):
    epochs = 30
    return Result(
        accuracy, accuracy, loss=[1.0] * epochs, layers=["a"], rotation=[[0.0]] * (epochs + 1),
        accuracy=[accuracy] * epochs, test_losses=[loss],
    )  # fmt: skip


def test_each_transformer_is_trained_without_a_warm_up_and_with_one(tmp_path):
    found = transformers(Lab(Archive(tmp_path), "full"))
    for post in (False, True):
        its = [trial for trial in found if dict(trial.task.options)["post_norm"] is post]
        cold = {(t.recipe, t.seed) for t in its if not t.schedule.warmup}
        warm = {(t.recipe, t.seed) for t in its if t.schedule.warmup == pytest.approx(0.1 * t.schedule.epochs)}
        assert cold == warm
        assert len(cold) == 4 * 3


def test_the_residual_networks_are_those_of_rotation_lastbn_from_three_seeds(tmp_path):
    found = residual(Lab(Archive(tmp_path), "full"))
    assert [trial.seed for trial in found] == [0, 1, 2] * 5
    assert {trial.task.model for trial in found} == {"resnet-110", "resnet-lastbn-110"}


def outcome(*, adamw=0.0, steered=0.0, failing=0.1, plain=0.1, lastbn=0.9, layca=0.9):
    """Results in which a warm-up gains these, and residual networks reach these training accuracies."""

    def make(trial):
        task, recipe = trial.task, trial.recipe
        if "resnet" in task.model:
            if "lastbn" in task.model:
                return result(accuracy=lastbn)
            if not dict(task.options).get("keras"):
                return result(accuracy=plain)
            return result(accuracy=layca if recipe.control else 0.9 if task.schedule.warmup else failing)
        gain = steered if recipe.optimizer == "steer" else adamw
        return result(loss=2.0 + (0.0 if task.schedule.warmup else gain))

    return make


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"adamw": 0.3}, [True, True, True]),
        ({"steered": 0.3}, [False, False, True]),
        ({"adamw": 0.3, "lastbn": 0.2}, [True, True, False]),
        ({"adamw": 0.3, "plain": 0.9}, [True, True, False]),
        ({"adamw": 0.3, "layca": 0.1}, [True, True, False]),
        ({"adamw": float("inf"), "failing": 0.9}, [True, True, None]),
    ],
    ids=["cured", "steering needs it", "LastBN fails", "no stall", "Layca fails", "it starts"],
)
def test_verdicts_turn_with_the_numbers(tmp_path, options, expected):
    report = STUDY.conclude(lab_of(tmp_path, outcome(**options)))
    assert [verdict.holds for verdict in report.verdicts] == expected


@pytest.mark.parametrize(
    ("gain", "noise", "expected"),
    [(0.1, 0.01, [True, False]), (0.1, 0.2, [None, None]), (-0.1, 0.01, [False, True]), (-0.1, 0.2, [None, None])],
)
def test_a_warm_up_is_needed_or_not_only_beyond_what_seeds_differ_by(tmp_path, gain, noise, expected):
    def make(trial):
        warm = bool(trial.task.schedule.warmup)
        side = (-1) ** trial.seed * noise * (1 if warm else -1)
        return result(loss=2.0 + (0.0 if warm else gain) + side)

    report = STUDY.conclude(lab_of(tmp_path, make))
    assert [verdict.holds for verdict in report.verdicts[:2]] == expected
    told = {True: "yes", False: "no", None: "undecided"}[expected[0]]
    assert {row[-1] for row in report.tables[0].rows} == {told}


@pytest.mark.parametrize(("failing", "told"), [(1, "undecided"), (9, "yes")])
def test_trainings_that_diverge_decide_if_they_are_more_than_by_chance(tmp_path, failing, told):
    """Without a warm-up, some seeds have no loss, and the others are better than with one."""

    def make(trial):
        if trial.task.schedule.warmup:
            return result(loss=2.05 + 1e-3 * trial.seed)
        return result(loss=float("inf") if trial.seed < failing else 2.0)

    report = STUDY.conclude(lab_of(tmp_path, make))
    assert {row[-1] for row in report.tables[0].rows} == {told}
    expected = [None, None] if told == "undecided" else [True, False]
    assert [verdict.holds for verdict in report.verdicts[:2]] == expected


def test_a_smoke_test_has_the_numbers_of_the_archive(lab, tmp_path):
    report = STUDY.run(lab)
    assert {verdict.holds for verdict in report.verdicts} == {None}
    first = gains(lab)[0]
    cold, warm = (min(raw(lab, trial)["test_losses"]) for trial in trials(lab)[:2])
    assert first.value == pytest.approx(cold - warm)
    STUDY.save(lab, report, tmp_path)
