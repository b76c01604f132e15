import json
from itertools import pairwise

import numpy as np
import pytest

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.rotation.plateaus import FIG3, STUDIES, height, paper_curves, trials
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.schedule import Schedule

FIG11, SPEED_3, SPEED_10 = STUDIES
# When the rate is first cut, and so how many epochs are averaged for the plateau.
CUTS = {"c10-cnn1": (80, 8), "c100-resnet": (70, 7), "tiny-cnn": (70, 7)}


def raw(lab, trial):
    return json.loads((lab.archive.folder(lab.trial(trial)) / "result.json").read_text())["result"]


@pytest.fixture(scope="module")
def report(lab):
    return FIG11.run(lab)


@pytest.fixture
def full(tmp_path):
    return Lab(Archive(tmp_path), "full", engine="serial", precision="float32")


def test_a_plateau_is_the_mean_loss_of_the_last_tenth_of_the_epochs_before_the_cut():
    loss = [float(epoch) for epoch in range(100)]
    assert height(loss, Schedule(epochs=100, cuts=(0.8, 0.9))) == sum(range(72, 80)) / 8
    assert height(loss, Schedule(epochs=100, cuts=())) == sum(range(90, 100)) / 10
    assert height(loss[:10], Schedule(epochs=10, cuts=(0.5,))) == 4.0


def test_a_training_that_stopped_before_the_cut_has_the_plateau_it_reached():
    assert height([3.0, 2.0, 1.0], Schedule(epochs=100, cuts=(0.2,))) == 1.5


def test_the_table_has_the_plateaus_and_accuracies_of_the_archive(lab, report):
    results = {trial.recipe.name: raw(lab, trial) for trial in FIG11.trials(lab)}
    [table] = report.tables
    assert [row[0] for row in table.rows] == list(results)
    for name, plateau, told, test, told_test, train in table.rows:
        # Twelve of fifteen epochs before the cut: the last of them is the last tenth.
        assert plateau == pytest.approx(results[name]["loss"][11])
        assert test == f"{100 * results[name]['test_accuracy']:.2f}"
        assert train == pytest.approx(100 * results[name]["train_accuracy"])
        assert told is None
        assert told_test is None


def test_on_digits_plateaus_are_higher_the_faster_and_the_more_uniformly_layers_turn(lab, report):
    heights = {trial.recipe.name: raw(lab, trial)["loss"][11] for trial in FIG11.trials(lab)}
    assert heights["Layca 3^-2"] > heights["Layca 3^-3"] > heights["Layca 3^-4"]
    assert heights["Layca 3^-2"] > max(heights["Layca 3^-2, alpha -0.6"], heights["Layca 3^-2, alpha +0.6"])
    assert [verdict.word for verdict in report.verdicts[:3]] == ["shown"] * 3


def test_high_plateaus_and_good_generalisation_are_compared_pair_by_pair(lab, report):
    pairs = [(one["loss"][11], one["test_accuracy"]) for one in (raw(lab, trial) for trial in FIG11.trials(lab))]
    signs = [np.sign((a - c) * (b - d)) for i, (a, b) in enumerate(pairs) for c, d in pairs[:i]]
    tau = sum(signs) / len(signs)
    assert f"Kendall's τ = {tau:+.2f} (p = 0.2) over 5 of 5" in report.verdicts[-1].here
    assert report.verdicts[-1].holds is None


def test_the_figure_draws_the_archives_losses_with_one_legend_a_column(lab, report):
    results = {trial.recipe.name: raw(lab, trial) for trial in FIG11.trials(lab)}
    first, last, rate = report.figures["figure"].axes
    drawn = {
        line.get_label(): list(line.get_ydata()) for line in rate.get_lines() if not line.get_label().startswith("_")
    }
    assert drawn == {f"$3^{{-{p}}}$": pytest.approx(results[f"Layca 3^-{p}"]["loss"]) for p in (2, 3, 4)}
    assert [text.get_text() for text in first.get_legend().get_texts()] == ["0", "-0.6"]
    assert [text.get_text() for text in last.get_legend().get_texts()] == ["0", "+0.6"]


def test_the_papers_curves_show_what_it_says():
    for name, curves in paper_curves().items():
        first, many = CUTS[name]
        heights = {key: np.mean(curve[first - many : first]) for key, curve in curves.items()}
        rates = [heights[f"Layca 3^-{power}"] for power in ("3", "3.2", "3.4", "3.6", "3.8", "4")]
        assert all(a > b for a, b in pairwise(rates))
        for sign in "-+":
            alphas = [heights["Layca 3^-3"], *(heights[f"Layca 3^-3, alpha {sign}0.{d}"] for d in (1, 2, 3, 4))]
            assert all(a > b for a, b in pairwise(alphas))
        assert heights["Layca 3^-3"] == max(heights.values())
        assert all(curve[first] < 0.85 * curve[first - 1] for curve in curves.values())


def test_the_papers_curves_are_of_its_lengths_and_heights():
    assert {name: [len(curves), max(map(len, curves.values()))] for name, curves in paper_curves().items()} == {
        "c10-cnn1": [16, 100],
        "c100-resnet": [16, 100],
        "tiny-cnn": [16, 80],
    }
    told = {"Layca 3^-3": (2.00, 0.824, 0.506, 0.466), "Layca 3^-4": (1.67, 0.265, 0.082, 0.065)}
    for name, losses in told.items():
        curve = paper_curves()["c10-cnn1"][name]
        assert [curve[epoch] for epoch in (0, 10, 40, 65)] == pytest.approx(losses, abs=0.005)


def test_at_full_scale_the_papers_protocol_is_trained(full):
    listed = FIG11.trials(full)
    assert len(listed) == 3 * 16
    for trial in listed:
        recipe, schedule = trial.recipe, trial.schedule
        assert (recipe.control, recipe.optimizer, recipe.weight_decay, trial.seed) == ("layca", "sgd", 0.0, 0)
        epochs, cuts, factor = {
            "c10-cnn1": (100, [80, 90, 97], 5.0),
            "c100-resnet": (100, [70, 90, 97], 10.0),
            "tiny-cnn": (80, [70], 5.0),
        }[trial.task.name]
        assert (schedule.epochs, schedule.milestones, schedule.factor) == (epochs, cuts, factor)
    some = {(trial.recipe.alpha, trial.recipe.rate) for trial in listed if trial.task.name == "tiny-cnn"}
    alphas = {(sign * size, 3.0**-3) for size in (0.1, 0.2, 0.3, 0.4, 0.6) for sign in (-1, 1)}
    assert some == alphas | {(0.0, 3.0**power) for power in (-3, -3.2, -3.4, -3.6, -3.8, -4)}


def test_the_speed_papers_figures_have_some_of_these_panels(full):
    assert {trial.task.name for trial in SPEED_3.trials(full)} == {"tiny-cnn"}
    assert all(trial.recipe.alpha >= 0 for trial in SPEED_3.trials(full))
    signs = {name: {np.sign(t.recipe.alpha) for t in SPEED_10.trials(full) if t.task.name == name} for name in CUTS}
    assert signs == {"c10-cnn1": {-1, 0}, "c100-resnet": {0, 1}, "tiny-cnn": set()}
    known = {trial.key for trial in FIG11.trials(full)}
    assert {trial.key for trial in (*SPEED_3.trials(full), *SPEED_10.trials(full))} <= known


def test_no_trial_is_kept_apart_by_the_sign_of_zero(full):
    assert all(str(trial.recipe.alpha) != "-0.0" for trial in FIG11.trials(full))


def test_results_like_the_papers_are_reported_as_such(full):
    """With the paper's curves in place of ours there is no difference, and everything is shown."""
    for trial in trials(full, FIG3):
        loss = paper_curves()["tiny-cnn"][trial.recipe.name]
        folder = full.archive.folder(trial)
        folder.mkdir(parents=True)
        result = Result(1.0, 0.5, loss=loss, layers=["a"], rotation=[[0.0], [0.5]])
        result.write(folder / "result.json", trial.description)
    report = SPEED_3.conclude(full)
    assert [verdict.word for verdict in report.verdicts] == ["shown", "shown"]
    assert all(verdict.paper == verdict.here for verdict in report.verdicts)
    [table] = report.tables
    assert all(row[1] == row[2] for row in table.rows)
    assert dict(zip(("3^-3", "3^-4"), (table.rows[0][4], table.rows[-1][4]), strict=True)) == {
        "3^-3": 50.89,
        "3^-4": 40.19,
    }
    ours, dotted = report.figures["figure"].axes[0].get_lines()[:2]
    assert dotted.get_linestyle() == ":"
    assert list(ours.get_ydata()) == list(dotted.get_ydata())


def test_saving_writes_both_figures_the_page_and_the_numbers(lab, report, tmp_path):
    names = {path.name for path in FIG11.save(lab, report, tmp_path)}
    assert names >= {"figure.png", "paper.png", "README.md", "result.json"}
    kept = json.loads((tmp_path / "rotation/fig11/result.json").read_text())
    results = [raw(lab, trial) for trial in FIG11.trials(lab)]
    assert [cell["plateau"] for cell in kept["numbers"]["cells"]] == pytest.approx([one["loss"][11] for one in results])
