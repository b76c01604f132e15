"""Networks with batch normalization trained at five rates: norms, effective rates and verdicts."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.dynamics.implicit_decay import STUDIES, Course, report, spread, trials
from gyroscope_lab.training.archive import Archive
from lab.made_lab import made, percent, raw

[STUDY] = STUDIES
RATES = [0.1, 0.3, 1.0, 3.0, 10.0]


@pytest.fixture(scope="module")
def found(lab):
    return STUDY.run(lab)


def test_at_full_scale_mnist_and_cifar_10_are_trained_at_five_constant_rates(tmp_path):
    its = trials(Lab(Archive(tmp_path), "full"))
    assert [one.recipe.rate for one in its] == RATES * 4
    assert {(one.task.source.name, one.task.model) for one in its} == {("mnist", "mlp-4x784"), ("cifar-10", "c10-cnn1")}
    for one in its:
        assert (one.recipe.weight_decay, one.recipe.momentum, one.schedule.milestones) == (0.0, 0.0, [])
        assert one.schedule.epochs * one.schedule.passes == 10
    assert [one.recipe.frozen for one in its[:10]] == [(-1,)] * 5 + [()] * 5


def test_norms_begin_as_the_network_does_whose_gradients_are_orthogonal_to_its_weights(lab, found):
    trial = trials(lab)[2]
    kept = found.numbers["digits-mlp"]["classifier as drawn"][2]
    model = trial.network().double()
    split = trial.task.source.load()
    before = [layer.weight.norm().item() for layer in (model.linear1, model.linear2, model.linear3)]
    assert kept["norms"][0] == pytest.approx(before, rel=1e-4)
    assert kept["effective_rates"][0] == pytest.approx([1 / norm**2 for norm in before], rel=1e-4)
    loss = F.cross_entropy(model(split.x_train.double()), split.y_train)
    weights = [model.linear1.weight, model.linear2.weight, model.linear3.weight]
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        cosine = F.cosine_similarity(weight.detach().flatten(), gradient.flatten(), dim=0)
        assert abs(cosine) < 1e-4  # scale-invariant: what equation 19 needs
    for row, norms in zip(kept["effective_rates"], kept["norms"], strict=True):
        assert row == pytest.approx([1 / norm**2 for norm in norms], rel=1e-3)


def test_the_table_has_the_numbers_of_the_archive(lab, found):
    drawn, trained = found.tables
    assert [row[0] for row in (*drawn.rows, *trained.rows)] == ["0.1", "0.3", "1", "3", "10", "0.1", "10"]
    for row, trial in zip((*drawn.rows, *trained.rows), trials(lab), strict=True):
        result = raw(lab, trial)
        assert row[-1] == pytest.approx(percent(result)[0])
        ends = np.array(result["norms"][-1][:-1])
        assert float(row[2]) == pytest.approx(np.exp(np.log(ends).mean()), rel=0.01)
        assert float(row[4]) == pytest.approx(trial.recipe.rate / np.exp(np.log(ends**2).mean()), rel=0.01)


def test_on_digits_equation_19_holds_and_rates_a_hundredfold_apart_come_together(found):
    holds = [one.holds for one in found.verdicts]
    assert holds[:2] == [True, True]
    assert holds[2] is not False
    assert holds[-1] is True  # the classifier, which nothing normalizes, brings large gradients where rates are large
    kept = found.numbers["digits-mlp"]["classifier as drawn"]
    ends = np.array([one["effective_rates"][-1] for one in kept])
    assert (ends.max(axis=0) / ends.min(axis=0) < 10).all()
    assert max(one["equation_19_off"] for one in kept) < 1e-3


def course(rate, lab, *, steps=4000, gradient=1.0, test=0.9, examples=10_000):
    """A layer of equation 19 with a constant gradient."""
    squares = [1.0]
    for _ in range(steps):
        squares.append(squares[-1] + (rate * gradient) ** 2 / squares[-1])
    norms = np.sqrt(squares)[:, None]
    gradients = np.full_like(norms, gradient)
    gradients[0] = np.nan
    result = replace(made(trials(lab)[0]), test_accuracy=test)
    return Course(rate, ("one.weight",), np.arange(steps + 1), norms, gradients, result, examples)


def test_a_layer_of_constant_gradients_shows_all_that_the_chapter_says(lab):
    drawn = [course(rate, lab) for rate in (0.1, 1.0, 3.0)]
    assert spread(drawn, 0) == pytest.approx(30)
    assert drawn[0].off() < 1e-12
    [law] = drawn[0].laws()
    assert law.k0 == pytest.approx(50 + 1, rel=0.03)  # 1/(2α²), from the first step on
    told = report({"made": (drawn, [course(0.1, lab), course(3.0, lab, gradient=9.0)])})
    assert [one.holds for one in told.verdicts] == [True] * 6


def test_trainings_that_are_unlike_it_are_said_to_be_so(lab):
    frozen, other = course(0.1, lab, gradient=1e-6), course(3.0, lab, gradient=1e-6, test=0.5)
    other = replace(other, norms=other.norms * np.linspace(1, 0.5, len(other.steps))[:, None])
    told = report({"made": ([frozen, other], [frozen, other])})
    assert [one.holds for one in told.verdicts] == [False, False, False, False, None, False]


@pytest.mark.parametrize(
    ("tests", "examples", "holds"),
    [
        ((0.90, 0.91), 10_000, True),
        ((0.90, 0.93), 10_000, False),
        ((0.90, 0.93), 1_597, None),  # each has an error of 0.7 points, and a difference one of 1
        ((0.90, 0.95), 1_597, False),
        ((0.90, 0.92), 10_000, None),
    ],
)
def test_accuracies_that_differ_after_the_transient_phase_contradict_the_chapter(lab, tests, examples, holds):
    settled = [course(rate, lab, test=test, examples=examples) for rate, test in zip((1.0, 3.0), tests, strict=True)]
    assert report({"made": (settled, [])}).verdicts[4].holds is holds
    early = course(0.01, lab, test=0.5)  # k₀ is 5,000 steps, of which it has taken 4,000
    assert report({"made": ([early, *settled[:1]], [])}).verdicts[4].holds is None


def test_of_some_steps_equation_19_takes_gradients_to_hold_in_between(lab):
    whole = course(0.3, lab, steps=100)
    thinned = {name: getattr(whole, name)[::10] for name in ("steps", "norms", "gradients")}
    some = replace(whole, **thinned)
    assert some.off() < 1e-12
    assert report({"made": ([some, replace(some, rate=0.4)], [])}).verdicts[0].holds is None
    assert report({"made": ([some], [])}).verdicts == ()


def test_without_trainings_the_study_says_that_it_needs_them(lab, tmp_path):
    with pytest.raises(LabError, match="trainings are not in"):
        STUDY.run(replace(lab, archive=Archive(tmp_path), known=True))


def test_the_report_on_implicit_decay_is_strict_json_and_its_figure_has_two_rows(lab, found):
    json.dumps(STUDY.as_json(lab, found), allow_nan=False)
    axes = found.figures["figure"].axes
    assert [len(ax.lines) for ax in axes] == [5, 10, 2, 4]
    assert {(ax.get_xscale(), ax.get_yscale()) for ax in axes} == {("log", "log")}
