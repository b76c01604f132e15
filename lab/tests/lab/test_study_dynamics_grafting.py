import json
from dataclasses import replace
from math import exp, inf, isfinite, log

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from gyroscope.control import Graft
from gyroscope_lab import models
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.dynamics.grafting import (
    METHODS,
    PLANS,
    STUDIES,
    Curves,
    _verdicts,
    closed,
    course,
    make,
    settings,
)
from gyroscope_lab.training.archive import Archive

[GRAFTING] = STUDIES
LAYERWISE, REVERSED = "Adam's lengths, SGD's directions", "SGD's lengths, Adam's directions"
GLOBAL = "Adam's length, SGD's direction, global"


@pytest.fixture(scope="module")
def report(lab):
    return GRAFTING.run(lab)


def short(**changes):
    [[first], *_] = settings(PLANS["smoke"], "8 layers", LAYERWISE)
    return replace(first, steps=12, every=4, **changes)


def made(ends, *, seeds=3, start=2.0):
    """Curves that fall geometrically to an end, {method: end}, at the middle of three rates; the other rates differ."""
    along = np.linspace(0, 1, 5)
    losses = {}
    for method in METHODS:
        best = start * (ends[method] / start) ** along
        worse = np.full_like(best, start)
        rows = [[one * (1 + 0.001 * seed) for seed in range(seeds)] for one in (worse, best, worse)]
        losses[method] = np.array(rows)
    return Curves(dict.fromkeys(METHODS, (1.0, 2.0, 3.0)), losses, every=1)


def ends(sgd, adam, layerwise, reverse, globally, globally_reversed=0.5):
    return dict(zip(METHODS, (sgd, adam, layerwise, reverse, globally, globally_reversed), strict=True))


def test_a_course_is_what_steps_by_hand_give_with_each_tensors_length(lab):
    setting = short()
    split = setting.source.load()
    x, y = split.x_train.double(), split.y_train
    model = models.make(setting.model, seed=0, **dict(setting.options)).double()
    weights = list(model.parameters())
    speed = [torch.zeros_like(w) for w in weights]
    mean, square = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    order = torch.Generator().manual_seed(0)
    losses = []
    for step in range(setting.steps + 1):
        if step % setting.every == 0:
            losses.append(F.cross_entropy(model(x), y).item())
        some = torch.randint(0, len(y), (64,), generator=order)
        gradients = torch.autograd.grad(F.cross_entropy(model(x[some]), y[some]), weights)
        for i, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            speed[i] = 0.9 * speed[i] + g
            mean[i] = 0.9 * mean[i] + 0.1 * g
            square[i] = 0.999 * square[i] + 0.001 * g * g
            root = (square[i] / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
            length = (setting.rate * mean[i] / (1 - 0.9 ** (step + 1)) / root).norm()
            w.data -= length * speed[i] / speed[i].norm()
    assert course(lab, setting) == pytest.approx(losses, rel=1e-9)


def test_an_optimizer_grafted_onto_itself_at_another_rate_trains_the_same():
    curves = []
    for grafted in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).double()
        adam = make("Adam", "Adam", "tensor", model, 0.01)
        optimizer = Graft(adam, make("Adam", "Adam", "tensor", model, 3.0)) if grafted else adam
        x, y = torch.randn(30, 4, dtype=torch.float64), torch.arange(30) % 3
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        curves.append(loss.item())
    assert curves[1] == pytest.approx(curves[0], rel=1e-9)


def test_the_table_of_distances_is_the_mean_difference_of_logarithms(lab, report):
    plan, numbers = PLANS["smoke"], report.numbers["8 layers"]

    def curve(method):
        [[setting]] = settings(plan, "8 layers", method)  # one rate, one seed
        return course(lab, setting)

    shown = {row[0]: row[2:4] for row in report.tables[0].rows}
    for method in METHODS:
        apart = [
            sum(abs(log(a / b)) for a, b in zip(curve(method), curve(other), strict=True)) / len(curve(method))
            for other in ("SGD", "Adam")
        ]
        assert shown[method] == pytest.approx(apart)
        assert numbers["methods"][method]["curve"] == pytest.approx(curve(method), rel=1e-3)


def test_on_a_deep_network_layer_lengths_make_sgd_train_like_adam_and_adam_like_sgd(report):
    like, reverse, gap, layerwise = report.verdicts
    assert (like.holds, reverse.holds) == (True, True)
    assert (gap.holds, layerwise.holds) == (None, None)  # one seed


def test_a_distance_and_a_gap_are_those_of_curves_whose_ends_are_known():
    its = made(ends(0.2, 0.002, 0.02, 0.2, 0.2))
    # ln falls linearly, so the mean distance is half that at the end.
    assert its.distance("SGD", "Adam") == pytest.approx(log(100) / 2)
    gap, part = closed(its, LAYERWISE)
    assert gap.mean() == pytest.approx(log(100))
    assert part.mean() / gap.mean() == pytest.approx(0.5)
    assert closed(its, GLOBAL)[1].mean() == pytest.approx(0.0, abs=1e-9)
    assert its.best("SGD") == 1


@pytest.mark.parametrize(
    ("given", "verdicts"),
    [
        (ends(0.2, 0.002, 0.002, 0.2, 0.02), [True, True, True, True]),
        (ends(0.2, 0.002, 0.2, 0.002, 0.02), [False, False, False, False]),
        (ends(0.002, 0.2, 0.2, 0.002, 0.2, 0.2), [True, True, True, True]),  # SGD is the better one
        (ends(0.2, 0.2, 0.002, 0.002, 0.002), [None, None, None, None]),  # there is nothing to tell apart
    ],
    ids=["like the chapter", "unlike it", "the other way round", "no gap"],
)
def test_verdicts_follow_the_curves(given, verdicts):
    assert [one.holds for one in _verdicts("made", made(given))] == verdicts


def test_a_graft_far_from_both_is_like_neither():
    like = _verdicts("made", made(ends(0.2, 0.02, 1e-6, 0.2, 0.2)))[0]
    assert like.holds is False


def test_a_training_that_diverges_is_never_the_best_rate():
    its = made(ends(0.2, 0.002, 0.02, 0.2, 0.2))
    its.losses["Adam"][0, 0, 3:] = inf
    assert its.best("Adam") == 1
    assert not isfinite(its.end("Adam")[0])
    assert its.end("Adam")[1] == pytest.approx(exp(np.mean([log(0.002 * (1 + 0.001 * s)) for s in range(3)])))


def test_what_is_known_alone_trains_nothing(tmp_path):
    with pytest.raises(LabError, match="--known"):
        GRAFTING.run(Lab(Archive(tmp_path), "smoke", known=True))


def test_at_full_scale_every_network_is_trained_with_every_method_at_every_rate():
    plan = PLANS["full"]
    assert GRAFTING.trials(Lab(Archive("nowhere"), "full")) == []
    for method, (lengths, directions, over) in METHODS.items():
        rows = settings(plan, "8 layers", method)
        assert [row[0].rate for row in rows] == list(plan.rates[lengths])
        assert {(one.lengths, one.directions, one.over) for row in rows for one in row} == {(lengths, directions, over)}
        assert dict(rows[0][0].options)["inputs"] == 784


def test_a_choice_of_other_tasks_is_refused():
    with pytest.raises(LabError, match="mnist-mlp"):
        GRAFTING.trials(Lab(Archive("nowhere"), "full", only=("c10-cnn1",)))


def test_saving_writes_figure_page_and_numbers(lab, report, tmp_path):
    names = {path.name for path in GRAFTING.save(lab, report, tmp_path)}
    assert names == {"figure.png", "figure.svg", "README.md", "result.json"}
    kept = json.loads((tmp_path / "dynamics" / "grafting" / "result.json").read_text())
    assert set(kept["numbers"]["8 layers"]["methods"]) == set(METHODS)
