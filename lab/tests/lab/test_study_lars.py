import json

import numpy as np
import pytest

from gyroscope.layers.layer import layers
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.rotation.lars import ROTATION, STUDIES
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.tasks import task
from lab.made_lab import MadeLab, made, printed, raw

FIG12, SPEED9 = STUDIES
EPOCHS = {"c10-cnn1": 100, "c100-resnet": 100, "tiny-cnn": 80}


@pytest.fixture
def full(tmp_path):
    return Lab(Archive(tmp_path), "full")


@pytest.mark.parametrize("study", STUDIES, ids=["rotation", "speed"])
def test_at_full_scale_lars_is_trained_as_layca_but_from_weights_a_quarter_of_the_size(full, study):
    trials = study.trials(full)
    assert [trial.task.name for trial in trials] == [name for name in EPOCHS for _ in range(2)]
    for lars, layca in zip(trials[::2], trials[1::2], strict=True):
        assert (lars.recipe.control, layca.recipe.control) == ("lars", "layca")
        assert lars.recipe.rate == layca.recipe.rate == pytest.approx(1 / 27)
        assert (lars.recipe.scale, layca.recipe.scale) == (0.25, 1.0)
        assert lars.schedule == layca.schedule
        assert lars.schedule.epochs == EPOCHS[lars.task.name]


@pytest.mark.parametrize("name", EPOCHS)
def test_the_authors_files_have_a_rotation_for_every_layer(name):
    assert len(ROTATION[name]) == len(layers(task(name).network(0)))


def test_the_tables_have_the_numbers_of_the_archive(lab):
    report = FIG12.run(lab)
    lars, layca = (raw(lab, trial) for trial in FIG12.trials(lab))
    whole, by_layer = report.tables
    [row] = whole.rows
    assert row[1] == printed(lars)
    assert row[5] == pytest.approx(100 * lars["accuracy"][-1])
    assert row[3] == pytest.approx(100 * (lars["test_accuracy"] - layca["test_accuracy"]))
    assert (row[7], row[9]) == pytest.approx((np.mean(lars["rotation"][-1]), np.mean(layca["rotation"][-1])))
    assert (row[2], row[4], row[6], row[8]) == (None,) * 4
    assert [line[0] for line in by_layer.rows] == lars["layers"]
    assert [line[1] for line in by_layer.rows] == pytest.approx(lars["rotation"][-1])
    assert [line[3] for line in by_layer.rows] == pytest.approx(layca["rotation"][-1])


def test_on_digits_lars_generalizes_about_as_layca_does(lab):
    lars, layca = (raw(lab, trial)["test_accuracy"] for trial in FIG12.trials(lab))
    assert abs(lars - layca) < 0.02
    # One seed cannot tell that they are within a point of each other.
    assert FIG12.run(lab).verdicts[0].holds is None


def full_scale(folder, *, test, rotation):
    """Results of LARS, with Layca at 88 % and a rotation of 0.95 in all layers."""

    def make(trial):
        controlled = trial.recipe.control == "layca"
        return made(trial, test=0.88 if controlled else test, rotation=0.95 if controlled else rotation)

    return MadeLab(Archive(folder), "full", make=make, many=3)


@pytest.mark.parametrize(
    ("test", "rotation", "expected"), [(0.884, 0.96, True), (0.86, 0.5, False)], ids=["like", "unlike"]
)
def test_results_like_the_papers_show_what_it_says_and_others_do_not(tmp_path, test, rotation, expected):
    lab = full_scale(tmp_path, test=test, rotation=rotation)
    report = FIG12.run(lab)
    assert [verdict.holds for verdict in report.verdicts] == [expected] * 9
    apart = sum(abs(value - rotation) for value in ROTATION["tiny-cnn"]) / 11
    assert f"{apart:.3f} apart" in report.verdicts[-1].here


def test_the_papers_numbers_stand_beside_ours(tmp_path):
    whole, *by_layer = FIG12.run(full_scale(tmp_path, test=0.88, rotation=0.9)).tables
    assert [row[2] for row in whole.rows] == [88.51, 59.92, 50.96]
    assert [row[4] for row in whole.rows] == pytest.approx([0.06, 0.11, 0.07])
    assert [row[6] for row in whole.rows] == [99.93, 99.09, 98.91]
    assert [row[2] for row in by_layer[2].rows] == list(ROTATION["tiny-cnn"])


def test_the_figure_has_lars_above_layca_and_the_authors_rotations_at_the_end_of_its_curves(tmp_path):
    axes = FIG12.run(full_scale(tmp_path, test=0.88, rotation=0.9)).figures["figure"].axes[:6]
    assert [ax.get_title().split("\n")[0] for ax in axes] == list(EPOCHS) * 2
    for ax, (name, epochs) in zip(axes, EPOCHS.items(), strict=False):
        marks = [line for line in ax.lines if line.get_marker() == "o"]
        assert [float(mark.get_ydata()[0]) for mark in marks] == list(ROTATION[name])
        assert {float(mark.get_xdata()[0]) for mark in marks} == {epochs}
    assert not any(line.get_marker() == "o" for ax in axes[3:] for line in ax.lines)


@pytest.mark.parametrize("study", STUDIES, ids=["rotation", "speed"])
def test_saving_writes_the_figure_the_page_and_all_numbers(lab, tmp_path, study):
    report = study.run(lab)
    names = {path.name for path in study.save(lab, report, tmp_path)}
    assert names == {"README.md", "result.json", "figure.png", "figure.svg"}
    kept = json.loads((tmp_path / study.name / "result.json").read_text())
    assert [cell["recipe"] for cell in kept["numbers"]["cells"]] == ["LARS 3^-3", "Layca 3^-3"]
