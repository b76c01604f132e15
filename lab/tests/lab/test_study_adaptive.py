from dataclasses import replace

import numpy as np
import pytest

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.rotation import adaptive, paper
from gyroscope_lab.papers.rotation.adaptive import alike, columns, distance, equivalents, lead, shake
from gyroscope_lab.papers.rotation.recipes import layca
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from lab.made_lab import MadeLab, printed
from lab.pretended import full_lab, raw

STUDIES = {study.name: study for study in adaptive.STUDIES}
EVERY_25 = [25, 50, 75, 100, 125, 150, 175, 200, 225]


@pytest.fixture(scope="module")
def reports(lab):
    return {name: study.run(lab) for name, study in STUDIES.items()}


def verdicts(report):
    return {verdict.says: verdict.holds for verdict in report.verdicts}


def table(report):
    """The rows of a report's first table, by their first two cells."""
    return {row[:2]: row[2:] for row in report.tables[0].rows}


# What is trained at full scale

# Protocol: optimizer, rate, weight decay (twice Keras's number), epochs, cuts and their factor.
METHODS = {
    "c10-cnn1": ("rmsprop", 3.0**-6, 0.0, 100, [80, 90, 97], 5.0),
    "c100-resnet": ("adam", 3.0**-5, 0.0, 100, [70, 90, 97], 10.0),
    "tiny-cnn": ("adagrad", 3.0**-4, 0.0, 80, [70], 5.0),
    "c10-cnn2": ("rmsprop", 3e-4, 1e-3, 250, EVERY_25, 2.0),
    "c100-wrn": ("adam", 3e-4, 1e-3, 200, [60, 120, 160], 5.0),
}
LAYCA = {
    "c10-cnn1": ("rmsprop", "sgd", 3.0**-3, 100, [80, 90, 97]),
    "c100-resnet": ("adam", "sgd-amom", 3.0**-5, 100, [70, 90, 97]),
    "tiny-cnn": ("adagrad", "sgd", 3.0**-3, 80, [70]),
    "c10-cnn2": ("rmsprop", "sgd", 3.0**-3, 250, [100, 170, 220]),
    "c100-wrn": ("adam", "sgd-amom", 3.0**-5, 250, [100, 170, 220]),
}
SGD = {
    "c10-cnn1": (3.0**-1, 2e-3, 0.0, 100),
    "c100-resnet": (3.0**-1, 2e-3, 0.0, 100),
    "tiny-cnn": (3.0**-1, 2e-3, 0.0, 100),
    "c10-cnn2": (0.5, 1e-3, 0.0, 250),
    "c100-wrn": (0.1, 1e-3, 0.9, 200),
}


@pytest.fixture(scope="module")
def papers():
    return {column.task.name: column for column in columns(Lab(Archive("nowhere"), "full"))}


def test_the_columns_are_the_papers_five_tasks(papers):
    assert list(papers) == list(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_adaptive_methods_are_trained_as_the_protocol_says(papers, name):
    task, recipe = papers[name].method
    schedule = task.schedule
    assert (recipe.optimizer, pytest.approx(recipe.rate), recipe.weight_decay) == METHODS[name][:3]
    assert (schedule.epochs, schedule.milestones, schedule.factor) == METHODS[name][3:]
    assert recipe.control is None


@pytest.mark.parametrize("name", LAYCA)
def test_under_layca_they_and_their_equivalents_share_rate_and_schedule_and_drop_decay(papers, name):
    adaptive_kind, plain_kind, rate, epochs, milestones = LAYCA[name]
    pairs = {adaptive_kind: papers[name].controlled, plain_kind: papers[name].plain}
    for kind, (task, recipe) in pairs.items():
        assert (recipe.optimizer, recipe.control, recipe.weight_decay) == (kind, "layca", 0.0)
        assert recipe.rate == pytest.approx(rate)
        assert (task.schedule.epochs, task.schedule.milestones) == (epochs, milestones)


@pytest.mark.parametrize("name", METHODS)
def test_a_copy_has_the_schedule_and_the_recipe_of_what_it_copies(papers, name):
    (task, copied), (its, method) = papers[name].copied, papers[name].method
    assert task == its
    assert copied.copies == method
    assert method.records
    assert copied.optimizer == LAYCA[name][1]


@pytest.mark.parametrize("name", SGD)
def test_sgd_with_decay_is_trained_as_the_protocol_says(papers, name):
    task, recipe = papers[name].decayed
    assert (pytest.approx(recipe.rate), recipe.weight_decay, recipe.momentum, task.schedule.epochs) == SGD[name]


def test_every_trial_is_listed_once():
    for study in adaptive.STUDIES:
        for scale in ("smoke", "small", "full"):
            keys = [trial.key for trial in study.trials(Lab(Archive("nowhere"), scale))]
            assert len(keys) == len(set(keys)), (study.name, scale)


def test_the_equivalent_of_rmsprop_is_the_trial_of_figure_1(lab):
    full = Lab(Archive("nowhere"), "full")
    column = columns(full)[0]
    plain = next(trial for trial in STUDIES["speed/fig6"].trials(full) if trial.recipe == column.plain[1])
    best = next(trial for trial in STUDIES["rotation/fig6"].trials(full) if trial.recipe == layca(-3))
    assert plain.key == best.key


# Curves


def test_distance_lead_and_shake_are_what_loops_over_epochs_give():
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0, 100, 9), rng.uniform(0, 100, 7)
    assert distance(a, b) == pytest.approx(sum(abs(x - y) for x, y in zip(a, b, strict=False)) / 7)
    assert lead(a, b) == pytest.approx(sum(x - y for x, y in zip(a, b, strict=False)) / 7)
    assert shake(a) == pytest.approx((sum(abs(a[t + 1] - a[t]) for t in range(8)) - abs(a[8] - a[0])) / 8)
    assert shake(a[:1]) == 0.0


def test_curves_of_one_noise_are_alike_and_curves_of_different_heights_are_not():
    rng = np.random.default_rng(1)
    climb = 90 * (1 - np.exp(-np.arange(100) / 10))
    first, second = climb + 5 * rng.standard_normal(100), climb + 5 * rng.standard_normal(100)
    assert distance(first, second) > 3.0
    assert alike(first, second)
    assert alike(climb, climb + 2.9)
    assert not alike(climb, climb + 3.1)
    assert not alike(first, second + 15)


# The smoke test


@pytest.mark.parametrize("name", ["rotation/fig6", "speed/fig5"])
def test_accuracies_and_rotations_are_those_of_the_archive(lab, reports, name):
    rows = table(reports[name])
    for column in columns(lab):
        for task, recipe in adaptive.compared(column) if name == "rotation/fig6" else [column.method]:
            if (task.name, recipe.name) not in rows:
                assert (task, recipe) == column.sgd
                continue
            trial = next(t for t in STUDIES[name].trials(lab) if (t.task, t.recipe) == (task, recipe))
            found = raw(lab, trial)
            test, told, difference, train, mean, uneven, tilt = rows[task.name, recipe.name]
            turned = found["rotation"][-1]
            half = len(turned) // 2
            early, late = sum(turned[:half]) / half, sum(turned[-half:]) / half
            assert (told, difference) == (None, None)
            assert test == printed(found)
            assert train == pytest.approx(100 * found["train_accuracy"])
            assert mean == pytest.approx(sum(turned) / len(turned))
            assert uneven == pytest.approx(np.std(turned) / np.mean(turned))
            assert tilt == pytest.approx((late - early) / (late + early))


def test_adaptive_methods_generalize_worse_and_turn_late_layers_more_and_layca_fixes_rmsprop(reports):
    found = verdicts(reports["rotation/fig6"])
    for method in ("RMSprop", "Adam"):
        assert found[f"digits: {method} generalizes worse than Layca at its best"]
        assert found[f"digits: {method} turns layers less evenly"]
    assert found["adaptive methods tend to turn the last layers more than SGD does"]
    assert found["digits: RMSprop under Layca generalizes on par with SGD + L2, and better than without"]


def test_sgd_that_copies_rotation_trains_as_the_adaptive_method_does(lab, reports):
    report = reports["rotation/fig7"]
    assert all(verdicts(report).values())
    rows = {row[0]: row[1:] for row in report.tables[0].rows}
    trials = STUDIES["rotation/fig7"].trials(lab)
    for column in columns(lab):
        method, decayed, copied = (
            raw(lab, next(t for t in trials if (t.task, t.recipe) == pair))
            for pair in (column.method, column.decayed, column.copied)
        )
        apart = np.mean([100 * abs(a - b) for a, b in zip(method["accuracy"], copied["accuracy"], strict=True)])
        ahead = np.mean([100 * (a - b) for a, b in zip(method["accuracy"], decayed["accuracy"], strict=True)])
        far = np.mean([100 * abs(a - b) for a, b in zip(method["accuracy"], decayed["accuracy"], strict=True)])
        assert rows[column.name][:3] == tuple(printed(one) for one in (method, copied, decayed))
        assert rows[column.name][3:] == pytest.approx((ahead, apart, far))


def test_a_copy_turns_every_layer_about_as_far_as_what_it_copies(lab, reports):
    trials = STUDIES["rotation/fig7"].trials(lab)
    for column in columns(lab):
        method, copied = (
            raw(lab, next(t for t in trials if (t.task, t.recipe) == pair)) for pair in (column.method, column.copied)
        )
        np.testing.assert_allclose(copied["rotation"][-1], method["rotation"][-1], rtol=0.5, atol=0.01)


def test_equivalents_are_compared_on_test_digits_too(lab, reports):
    report = reports["speed/fig6"]
    # One seed cannot tell that the second pair, whose test accuracies differ more, is within two points.
    assert list(verdicts(report).values()) == [True, None]
    trials = STUDIES["speed/fig6"].trials(lab)
    for column, row in zip(columns(lab), report.tables[0].rows, strict=True):
        method, plain = (
            raw(lab, next(t for t in trials if (t.task, t.recipe) == pair)) for pair in equivalents(lab, column)
        )
        assert len(method["validation"]) == len(method["accuracy"])
        for place, which in ((3, "accuracy"), (4, "test_accuracies")):
            apart = np.mean([100 * abs(a - b) for a, b in zip(method[which], plain[which], strict=True)])
            assert row[place] == pytest.approx(apart)


def test_kept_trainings_without_test_curves_are_compared_on_held_out_images(tmp_path):
    def make(trial):
        validation = [0.4, 0.6 if "SGD" in trial.recipe.name else 0.5]
        return Result(1.0, 0.88, [1.0, 0.5], ["a"], [[0.0], [0.8]], accuracy=[0.5, 1.0], validation=validation)

    study = STUDIES["speed/fig6"]
    report = study.run(MadeLab(Archive(tmp_path), "full", make=make))
    assert report.tables[0].columns[4] == "validation"
    assert [row[3:5] for row in report.tables[0].rows] == [pytest.approx((0.0, 5.0))] * 5
    assert {one.holds for one in report.verdicts} == {False}
    tested = MadeLab(Archive(tmp_path), "full", make=lambda trial: replace(make(trial), test_accuracies=[0.4, 0.5]))
    report = study.run(tested)
    assert report.tables[0].columns[4] == "test"
    assert {one.holds for one in report.verdicts} == {True}
    assert {trial.task.test_curve for trial in study.trials(tested)} == {True}


def test_the_stand_in_trains_on_as_many_digits_as_it_holds_out(lab):
    task, _ = equivalents(lab, columns(lab)[0])[0]
    split = task.source.load()
    assert len(split.y_train) == len(split.y_val) == 200


def test_training_accuracies_are_tabled(lab, reports):
    for name, count in (("rotation/table6", 4), ("speed/table4", 2)):
        rows = table(reports[name])
        assert len(rows) == count
        assert reports[name].figures == {}
        for trial in STUDIES[name].trials(lab):
            kept = raw(lab, trial)
            told = (100 * kept["accuracy"][-1], None, 100 * kept["train_accuracy"])
            assert rows[trial.task.name, trial.recipe.name] == pytest.approx(told)


@pytest.mark.parametrize("name", STUDIES)
def test_a_report_is_saved_whole(lab, reports, name, tmp_path):
    written = {path.name for path in STUDIES[name].save(lab, reports[name], tmp_path)}
    drawn = {f"{figure}.{form}" for figure in reports[name].figures for form in ("png", "svg")}
    assert written == drawn | {"README.md", "result.json"}


# Reports at full scale, of made-up results


@pytest.mark.parametrize("name", STUDIES)
def test_at_full_scale_every_number_stands_beside_the_papers(name, tmp_path):
    study = STUDIES[name]
    lab, made = full_lab(tmp_path / "archive", study.trials)
    report = study.conclude(lab)
    study.save(lab, report, tmp_path)
    by_name = {(trial.task.name, trial.recipe.name): made[lab.trial(trial).key] for trial in study.trials(lab)}
    if name in ("rotation/fig7", "speed/fig6"):
        assert len(report.tables[0].rows) == 5
        assert len(report.figures["figure"].axes) == (5 if name == "rotation/fig7" else 10)
        return
    rows = table(report)
    expected = {
        "rotation/fig6": {
            ("c10-cnn1", "RMSprop"): 84.87,
            ("c10-cnn1", "RMSprop-Layca 3^-3"): 88.25,
            ("c100-resnet", "Adam"): 47.82,
            ("tiny-cnn", "SGD + L2"): 50.04,
            ("c100-wrn", "Layca 3^-3"): 80.69,
        },
        "speed/fig5": {("c10-cnn2", "RMSprop + L2"): 91.19, ("c100-wrn", "Adam + L2"): 79.36},
        "rotation/table6": {("c100-wrn", "Adam + L2"): 99.9, ("tiny-cnn", "Adagrad-Layca 3^-3"): 99.2},
        "speed/table4": {("c10-cnn2", "RMSprop + L2"): 98.72},
    }[name]
    for key, number in expected.items():
        here, told = rows[key][:2]
        trained, tested = by_name[key].accuracy[-1], by_name[key].test_accuracy
        assert here == (pytest.approx(100 * trained) if "table" in name else f"{100 * tested:.2f}")
        assert told == pytest.approx(number)
    assert {key[0] for key in rows} == set(paper.TASKS)
