import json
from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.rotation.weight_decay import STUDIES
from gyroscope_lab.training.archive import Archive
from lab.made_lab import MadeLab, knowing, made, percent, printed, raw

FIG3, TABLE4, SPEED4, SPEED3 = STUDIES
IDS = ["figure 3", "table 4", "speed figure 4", "speed table 3"]
# rate, weight decay (twice what Keras calls l2), momentum, epochs, epochs at which the rate is cut, by how much
DECAYED = {
    "c10-cnn1": (1 / 3, 2e-3, 0.0, 100, [80, 90, 97], 5),
    "c100-resnet": (1 / 3, 2e-3, 0.0, 100, [70, 90, 97], 10),
    "tiny-cnn": (1 / 3, 2e-3, 0.0, 100, [70, 90, 97], 5),
    "c10-cnn2": (0.5, 1e-3, 0.0, 250, [25, 50, 75, 100, 125, 150, 175, 200, 225], 2),
    "c100-wrn": (0.1, 1e-3, 0.9, 200, [60, 120, 160], 5),
}
# The speed paper trains tiny-CNN as long with decay as without.
SPEED = DECAYED | {"tiny-cnn": (1 / 3, 2e-3, 0.0, 80, [70], 5)}


@pytest.fixture
def full(tmp_path):
    return Lab(Archive(tmp_path), "full")


def setting(trial):
    recipe, schedule = trial.recipe, trial.schedule
    assert recipe.nesterov == (recipe.momentum > 0)
    return recipe.rate, recipe.weight_decay, recipe.momentum, schedule.epochs, schedule.milestones, schedule.factor


@pytest.mark.parametrize(("study", "told"), [(FIG3, DECAYED), (SPEED4, SPEED)], ids=["rotation", "speed"])
def test_at_full_scale_decay_rate_and_schedule_are_the_authors(full, study, told):
    decayed = {trial.task.name: setting(trial) for trial in study.trials(full) if trial.recipe.weight_decay}
    assert decayed == told


def test_residual_networks_decay_their_convolutions_and_the_others_all_layers(full):
    parts = {trial.task.name: trial.task.decayed for trial in FIG3.trials(full)}
    assert [name for name, part in parts.items() if part == "convolutions"] == ["c100-resnet"]


def test_without_decay_the_speed_paper_trains_at_the_best_rate_or_as_with_decay(full):
    plain = {
        trial.task.name: setting(trial)
        for trial in SPEED4.trials(full)
        if not trial.recipe.weight_decay and not trial.recipe.control
    }
    for name, (_, _, _, epochs, cuts, factor) in SPEED.items():
        rate, momentum = {"c10-cnn2": (0.5, 0.0), "c100-wrn": (0.1, 0.9)}.get(name, (1 / 3, 0.0))
        assert plain[name] == (rate, 0.0, momentum, epochs, cuts, factor)


def test_only_the_speed_paper_has_dropout_in_the_deep_cnn_for_all_that_it_is_trained_with(full):
    def dropouts(study):
        its = [trial for trial in study.trials(full) if trial.task.name == "c10-cnn2"]
        return [sum(isinstance(module, nn.Dropout) for module in trial.task.network(0).modules()) for trial in its]

    assert dropouts(FIG3) == [0, 0]
    assert len(dropouts(SPEED4)) == 3
    assert min(dropouts(SPEED4)) == max(dropouts(SPEED4)) > 0


def test_figure_3_has_the_numbers_of_the_archive(lab):
    report = FIG3.run(lab)
    decayed, best = (raw(lab, trial) for trial in FIG3.trials(lab))
    [row] = report.tables[0].rows
    assert (row[0], row[2], row[4]) == ("digits", None, None)
    assert (row[1], row[5]) == (printed(decayed), pytest.approx(percent(decayed)[1]))
    assert row[3] == pytest.approx(100 * (decayed["test_accuracy"] - best["test_accuracy"]))
    assert row[6:] == pytest.approx((np.mean(decayed["rotation"][-1]), np.mean(best["rotation"][-1])))
    far, on_par = report.verdicts
    # In so short a training Layca does not turn layers far either.
    assert far.holds is None
    # One seed cannot tell whether a point is missing.
    assert on_par.holds is None


def test_the_speed_figure_has_the_numbers_of_the_archive_and_on_digits_sgd_alone_is_worse_than_layca(lab):
    plain, decayed, best = (raw(lab, trial) for trial in SPEED4.trials(lab))
    assert best["test_accuracy"] > plain["test_accuracy"]
    report = SPEED4.run(lab)
    worse, further, _, _ = report.verdicts
    assert worse.holds is True
    turned = [np.mean(one["rotation"][-1]) for one in (plain, decayed)]
    assert turned[1] > turned[0]
    assert further.holds is None
    assert f"{turned[1]:.3f} against {turned[0]:.3f}" in further.here
    without, with_it = report.tables
    assert without.rows[0][1] == printed(plain)
    assert without.rows[0][3] == pytest.approx(100 * (plain["test_accuracy"] - best["test_accuracy"]))
    assert with_it.rows[0][1] == printed(decayed)


def made_lab(folder, plain, decayed, best):
    """(test accuracy, rotation, training accuracy) of SGD, of SGD with decay and of Layca, in every task."""

    def make(trial):
        test, rotation, train = best if trial.recipe.control else decayed if trial.recipe.weight_decay else plain
        return made(trial, test=test, rotation=rotation, train=train)

    return MadeLab(Archive(folder), "full", make=make, many=3)


LIKE, UNLIKE = (0.80, 0.4, 1.0), (0.885, 0.96, 1.0)


def test_results_like_the_papers_show_what_they_say(tmp_path):
    lab = made_lab(tmp_path, LIKE, (0.88, 0.95, 1.0), (0.885, 0.97, 1.0))
    assert [verdict.holds for verdict in FIG3.run(lab).verdicts] == [True] * 10
    assert [verdict.holds for verdict in SPEED4.run(lab).verdicts] == [True] * 20
    assert [study.run(lab).verdicts[0].holds for study in (TABLE4, SPEED3)] == [True, True]


def test_results_unlike_the_papers_are_said_to_be_so(tmp_path):
    lab = made_lab(tmp_path, UNLIKE, (0.86, 0.5, 0.8), (0.88, 0.97, 1.0))
    assert [verdict.holds for verdict in FIG3.run(lab).verdicts] == [False] * 10
    assert [verdict.holds for verdict in SPEED4.run(lab).verdicts] == [False] * 20
    assert [study.run(lab).verdicts[0].holds for study in (TABLE4, SPEED3)] == [False, False]


def test_each_papers_own_numbers_stand_beside_ours(tmp_path):
    lab = made_lab(tmp_path, LIKE, UNLIKE, (0.885, 0.97, 1.0))
    [table] = FIG3.run(lab).tables
    assert [row[2] for row in table.rows] == pytest.approx([88.15, 60.11, 50.04, 93.28, 80.45])
    without, with_it = SPEED4.run(lab).tables
    assert [row[2] for row in without.rows] == pytest.approx([79.68, 45.53, 42.26, 87.41, 77.63])
    assert [row[2] for row in with_it.rows] == pytest.approx([88.15, 60.11, 49.78, 92.58, 80.45])
    assert [row[2] for row in TABLE4.run(lab).tables[0].rows] == [100.0] * 5
    told = [row[3] for row in SPEED3.run(lab).tables[0].rows]
    assert (told[0::2], told[1::2]) == ([100.0, 100.0, 100.0, 91.0, 100.0], [100.0, 100.0, 89.8, 99.5, 100.0])


def test_the_speed_figure_has_a_column_a_task_without_decay_above_with(tmp_path):
    lab = made_lab(tmp_path, LIKE, UNLIKE, (0.885, 0.97, 1.0))
    titles = [ax.get_title() for ax in SPEED4.run(lab).figures["figure"].axes[:10]]
    assert [title.split("\n")[0] for title in titles] == list(DECAYED) * 2
    assert ["L2" in title for title in titles] == [False] * 5 + [True] * 5


def test_tables_of_training_accuracies_have_that_of_the_last_epoch_beside_the_papers(tmp_path):
    lab = MadeLab(Archive(tmp_path), "full", make=lambda trial: made(trial, train=0.9, accuracy=[0.1, 0.4], epochs=2))
    assert [row[1:] for row in TABLE4.run(lab).tables[0].rows] == [(40.0, 100.0, 90.0)] * 5


@pytest.mark.parametrize("study", [TABLE4, SPEED3], ids=["table 4", "speed table 3"])
def test_tables_of_training_accuracies_have_those_of_the_archive(lab, study):
    results = [raw(lab, trial) for trial in study.trials(lab) if not trial.recipe.control]
    rows = study.run(lab).tables[0].rows
    assert [row[-3] for row in rows] == pytest.approx([100 * one["accuracy"][-1] for one in results])
    assert [row[-1] for row in rows] == pytest.approx([100 * one["train_accuracy"] for one in results])
    assert [row[-2] for row in rows] == [None] * len(rows)


@pytest.mark.parametrize("study", STUDIES, ids=IDS)
def test_saving_writes_the_figure_the_page_and_all_numbers(lab, tmp_path, study):
    report = study.run(lab)
    names = {path.name for path in study.save(lab, report, tmp_path)}
    drawn = {f"{name}.{form}" for name in report.figures for form in ("png", "svg")}
    assert names == {"README.md", "result.json"} | drawn
    kept = json.loads((tmp_path / study.name / "result.json").read_text())
    assert len(kept["numbers"]["cells"]) == len(study.trials(lab))


def test_of_what_is_known_in_part_only_what_belongs_together_is_shown(lab, tmp_path):
    plain, decayed, best = SPEED4.trials(lab)
    without_plain = knowing(lab, tmp_path / "some", [decayed, best])
    assert len(FIG3.run(without_plain).tables[0].rows) == 1
    with pytest.raises(LabError, match="known"):
        SPEED4.run(without_plain)
    with pytest.raises(LabError, match="known"):
        FIG3.run(knowing(lab, tmp_path / "no reference", [plain, decayed]))


def test_one_seed_cannot_show_that_two_accuracies_are_on_par(tmp_path):
    """88 and 88.5 % of 10,000 test examples differ by 0.5 ± 0.5 points, and 1 is the limit."""
    three = replace(made_lab(tmp_path, LIKE, (0.88, 0.95, 1.0), (0.885, 0.97, 1.0)), only=("c10-cnn1",))
    _, on_par = FIG3.run(three).verdicts[:2]
    _, undecided = FIG3.run(replace(three, many=1)).verdicts[:2]
    assert (on_par.holds, on_par.here) == (True, "-0.50 ± 0.00 points")
    assert (undecided.holds, undecided.here) == (None, "-0.50 ± 0.46 points")
    pages = [FIG3.page(lab, FIG3.run(lab)) for lab in (three, replace(three, many=1))]
    assert all("for one seed it is that over the test examples" in page for page in pages)
    assert ["88.00 ± 0.00 (3)" in page for page in pages] == [True, False]
