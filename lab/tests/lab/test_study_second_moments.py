import numpy as np
import pytest
import torch

from gyroscope.errors import DynamicsError
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.rotation import adaptive, second_moments
from gyroscope_lab.papers.rotation.second_moments import (
    STUDIES,
    Moments,
    draw,
    moments,
    of_paper,
    share_between,
    spans,
    trials,
)
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.training import Training
from lab.made_lab import knowing


@pytest.fixture(scope="module")
def report(lab):
    return STUDIES[0].run(lab)


def lognormal(medians, deviations):
    """The percentiles of layers whose log v is normal; 1.2816 is the 90th percentile."""
    medians, deviations = np.array(medians), np.array(deviations)
    return np.exp(medians[:, None] + deviations[:, None] * np.array([-1.28155, 0.0, 1.28155]))


def test_adam_trains_c10_cnn1_past_the_loss_at_which_others_stop():
    [trial] = trials(Lab(Archive("nowhere"), "full"))
    assert trial.task.name == "c10-cnn1"
    assert trial.task.stop_at is None
    assert (trial.schedule.epochs, trial.schedule.milestones, trial.schedule.batch) == (100, [80, 90, 97], 128)
    assert (trial.recipe.optimizer, trial.recipe.control, trial.recipe.weight_decay) == ("adam", None, 0.0)


def test_on_digits_the_training_is_the_one_of_the_adaptive_methods(lab):
    assert trials(lab)[0].key in {trial.key for study in adaptive.STUDIES for trial in study.trials(lab)}


def test_the_papers_percentiles_are_those_of_25_layers_at_three_epochs():
    assert list(of_paper()) == [1, 10, 50]
    for percentiles in of_paper().values():
        assert percentiles.shape == (25, 3)
        assert (np.diff(percentiles, axis=1) > 0).all()
    first = of_paper()[1]
    np.testing.assert_allclose(first[0], [2.07e-4, 2.39e-3, 9.21e-3], rtol=5e-3)
    np.testing.assert_allclose(first[23], [1.49e-8, 3.78e-8, 9.05e-8], rtol=5e-3)
    np.testing.assert_allclose(first[24], [3.98e-6, 1.15e-5, 4.20e-5], rtol=5e-3)


def test_the_share_between_layers_is_that_of_the_distributions_that_the_percentiles_are_of():
    medians, deviations = [-9.0, -4.0, -7.5, -2.0], [0.5, 1.0, 2.0, 0.1]
    mean = sum(medians) / 4
    between = sum((m - mean) ** 2 for m in medians) / 4
    within = sum(s**2 for s in deviations) / 4
    assert share_between(lognormal(medians, deviations)) == pytest.approx(between / (between + within), rel=1e-4)


def test_the_share_between_layers_is_close_to_that_of_all_elements():
    generator = torch.Generator().manual_seed(0)
    layers = [
        (mean + deviation * torch.randn(20_000, generator=generator, dtype=torch.float64)).exp().numpy()
        for mean, deviation in ((-8.0, 1.0), (-5.0, 0.5), (-6.0, 1.5))
    ]
    logs = [np.log(layer) for layer in layers]
    total = np.concatenate(logs).var()
    literal = 1 - np.mean([one.var() for one in logs]) / total
    percentiles = np.stack([np.percentile(layer, [10, 50, 90]) for layer in layers])
    assert share_between(percentiles) == pytest.approx(literal, abs=0.01)


def test_layers_without_gradients_are_left_out_and_all_of_them_refused():
    alive = lognormal([-9.0, -4.0], [0.5, 1.0])
    dead = np.array([[0.0, 0.0, 1e-9]])
    assert share_between(np.concatenate([alive, dead])) == share_between(alive)
    assert spans(np.concatenate([alive, dead])) == spans(alive)
    with pytest.raises(DynamicsError, match="No layer has second moments"):
        share_between(dead)


def test_the_recorded_percentiles_are_those_of_adams_own_state(lab, report):
    [trial] = trials(lab)
    wanted = {round(one.epoch): one.percentiles for one in moments(lab, trial)}
    assert 1 in wanted
    assert len(wanted) > 1
    seen = {}

    def look(training):
        states = [training.optimizer.state[weight] for weight in training.gauge._weights]
        seen[training.epoch] = np.stack([np.percentile(state["exp_avg_sq"].numpy(), [10, 50, 90]) for state in states])

    training = Training(lab.trial(trial), trial.task.source.load())
    for _ in training.proceed(look):
        if training.epoch == max(wanted):
            break
    for epoch, percentiles in wanted.items():
        np.testing.assert_allclose(percentiles, seen[epoch], rtol=1e-3)


def test_second_moments_vary_more_between_layers_than_inside_them(lab, report):
    assert len(report.verdicts) == len(report.numbers["moments"]) > 1
    assert all(verdict.holds for verdict in report.verdicts)
    for row, kept in zip(report.tables[0].rows, report.numbers["moments"], strict=True):
        logs = np.log(np.array(kept["percentiles"]))
        between, within = logs[:, 1].var(), (((logs[:, 2] - logs[:, 0]) / 2.5631) ** 2).mean()
        assert row[1] == pytest.approx(100 * between / (between + within))
        assert row[2] is None  # the papers have no digits


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_a_report_is_saved_whole(lab, study, tmp_path):
    written = {path.name for path in study.save(lab, study.run(lab), tmp_path)}
    assert written == {"figure.png", "figure.svg", "README.md", "result.json"}


def test_at_full_scale_the_papers_percentiles_stand_beside(monkeypatch):
    monkeypatch.setattr(second_moments, "moments", lambda lab, trial: made)
    made = [Moments(1.0, 2 * of_paper()[1]), Moments(11.0, of_paper()[10]), Moments(51.0, of_paper()[50] ** 0.5)]
    report = second_moments.figure5(Lab(Archive("nowhere"), "full"))
    shares, medians = report.tables
    assert [row[0] for row in shares.rows] == [1, 11, 51]
    for row, epoch in zip(shares.rows, (1, 10, 50), strict=True):
        assert row[2] == pytest.approx(100 * share_between(of_paper()[epoch]))
    assert shares.rows[0][1] == pytest.approx(shares.rows[0][2])  # a factor changes nothing
    assert len(medians.rows) == 25
    assert medians.rows[0][1:3] == ("4.77e-03", "2.38e-03")
    axes = report.figures["figure"].axes
    assert [ax.get_title() for ax in axes] == ["epoch 1", "epoch 11", "epoch 51"]


def test_bars_reach_from_the_10th_to_the_90th_percentile():
    percentiles = np.array([[1.0, 2.0, 4.0], [3.0, 5.0, 9.0]])
    [ax] = draw("digits", [(Moments(3.0, percentiles), None)]).axes
    ends = [segment[:, 1].tolist() for segment in ax.collections[0].get_segments()]
    assert ends == [[1.0, 4.0], [3.0, 9.0]]


def test_a_result_without_its_run_says_that_the_run_is_missing(lab, tmp_path):
    known = knowing(lab, tmp_path, STUDIES[0].trials(lab))
    with pytest.raises(LabError, match=r"holds the result of .*Adam.*, but not its recorded run"):
        STUDIES[0].run(known)
