"""The study of true, empirical and batch Fisher matrices as preconditioners."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from gyroscope.theory import fisher_diagonal, per_example_gradients
from gyroscope_lab.models.mlp import mlp
from gyroscope_lab.papers.dynamics import fisher_in_training
from gyroscope_lab.papers.dynamics.fisher_in_training import (
    METHODS,
    PLANS,
    STUDIES,
    Arm,
    FisherDiagonal,
    Grid,
    Plan,
    report,
    squared_gradients,
    tuned,
)

[STUDY] = STUDIES


@pytest.fixture(scope="module")
def found(lab):
    return STUDY.run(lab)


@pytest.fixture
def batch():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(30, 6, generator=draw, dtype=torch.float64), torch.arange(30) % 10


def network(seed=0):
    return mlp(seed, depth=3, width=5, inputs=6, biases=True, init="he_normal").double()


def flat(model, squares):
    return torch.cat([squares[one].flatten() for one in model.parameters()])


def stepped(matrix, batch, *, power=1.0, steps=1, rate=0.1):
    x, y = batch
    model = network()
    optimizer = FisherDiagonal(model, rate=rate, matrix=matrix, power=power, damping=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, optimizer


def test_the_squares_of_labels_that_are_given_are_those_of_single_examples(batch):
    x, y = batch
    model = network()
    gradient = model(x).softmax(1) - F.one_hot(y, 10)
    squares = flat(model, squared_gradients(model, x, gradient.detach()))
    torch.testing.assert_close(squares, per_example_gradients(model, F.cross_entropy, x, y).square().mean(0))


def test_the_squares_of_labels_that_are_drawn_have_the_true_fisher_as_their_mean(batch):
    x, _ = batch
    model, draw = network(), torch.Generator().manual_seed(1)
    many = torch.stack([flat(model, squared_gradients(model, x, None, generator=draw)) for _ in range(400)])
    exact = fisher_diagonal(model, x)
    assert ((many.mean(0) - exact).abs() <= 5 * many.std(0) / 20 + 1e-12).all()


def test_a_training_that_diverges_is_measured_to_its_end(batch):
    model, _ = stepped("true", batch, steps=4, rate=1e200)
    assert not model[1].weight.isfinite().all()


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_a_first_step_is_the_literal_one(batch, power):
    x, y = batch
    start = network()
    F.cross_entropy(start(x), y).backward()
    gradient = torch.cat([one.grad.flatten() for one in start.parameters()])
    before = torch.cat([one.detach().flatten() for one in start.parameters()])
    singles = per_example_gradients(start, F.cross_entropy, x, y)
    for matrix, d in (("empirical", singles.square().mean(0)), ("batch", gradient.square())):
        model, _ = stepped(matrix, batch, power=power)
        after = torch.cat([one.detach().flatten() for one in model.parameters()])
        torch.testing.assert_close(after, before - 0.1 * gradient / (d + 1e-3) ** power)


def test_the_average_has_the_weights_it_is_said_to_have(batch):
    _, optimizer = stepped("batch", batch, steps=30, rate=0.0)
    once, _ = stepped("batch", batch, rate=0.0)
    gradients = [one.grad.square() for one in once.parameters()]
    for d, square in zip(optimizer.diagonal.values(), gradients, strict=True):
        torch.testing.assert_close(d, square)  # the same measurement every time
    x, y = batch
    model = network()
    optimizer = FisherDiagonal(model, rate=0.0, matrix="batch", power=1.0, damping=1e-3)
    seen = []
    for step in range(30):
        optimizer.zero_grad()
        ((1 + step) * F.cross_entropy(model(x), y)).backward()
        seen.append(model[1].weight.grad.square())
        optimizer.step()
    average = torch.zeros_like(seen[0])
    for step, one in enumerate(seen, 1):
        weight = max(1 / step, 0.05)
        average = (1 - weight) * average + weight * one
    torch.testing.assert_close(optimizer.diagonal[model[1].weight], average)


def test_evaluations_between_steps_change_nothing(batch):
    x, _ = batch
    one, optimizer = stepped("empirical", batch)
    with torch.no_grad():
        one(x[:3])
    one.eval()
    one(x[:3])
    one.train()
    assert len(optimizer._x) == len(x)


def test_one_seed_decides_nothing(found):
    assert [one.holds for one in found.verdicts] == [None] * 14
    assert [len(one.rows) for one in found.tables] == [sum(map(len, METHODS.values()))] * 2 == [8, 8]


def made(form, matrix, loss, *, rate=0.1):
    runs = [{"loss": [2.3, loss * factor], "test": 90.0} for factor in (1.0, 1.05, 0.97)]
    return Grid({(-2, -3): Arm(form, matrix, rate, 1e-3, 1, runs)})


def arms(**losses):
    """Losses by matrix, multiplied by those of their form."""
    factors = {"diagonal, -1/2": 1.0, "diagonal, -1": losses.pop("whole", 1.0), "K-FAC": 1.0}
    several = ((form, matrix) for form, matrices in METHODS.items() for matrix in matrices)
    shifts = iter((1.0, 1.001, 1.003, 0.998, 1.002, 0.997, 1.004, 0.999))
    found = {key: made(*key, losses[key[1]] * factors[key[0]]) for key in several}
    for grid in found.values():  # seeds that differ alike would have no error
        grid.arms[-2, -3].runs[0]["loss"][1] *= next(shifts)
    return found


@pytest.mark.parametrize(
    ("losses", "holds"),
    [
        ({"true": 0.1, "empirical": 0.2, "batch": 0.3, "whole": 2.0}, [True] * 14),
        ({"true": 0.3, "empirical": 0.2, "batch": 0.1, "whole": 0.5}, [False] * 14),
        ({"true": 0.2, "empirical": 0.2, "batch": 0.2}, [None] * 14),
    ],
)
def test_verdicts_turn_with_their_numbers(losses, holds):
    assert [one.holds for one in report(arms(**losses)).verdicts] == holds


def test_a_method_that_diverges_decides_nothing():
    found = arms(true=0.1, empirical=0.2, batch=0.3, whole=2.0)
    found["K-FAC", "true"].arms[-2, -3].runs[1]["loss"] = [2.3]
    verdict = report(found).verdicts[2]
    assert verdict.holds is None
    assert "diverges" in verdict.here


def test_the_last_loss_and_the_mean_are_those_after_epochs():
    arm = Arm("K-FAC", "true", 0.1, 1e-3, 2, [{"loss": [9.0, 0.1, 0.001]}, {"loss": [9.0, 0.4]}, {"loss": [9.0, None]}])
    assert arm.logs("last") == pytest.approx([math.log(0.001), math.inf, math.inf])
    assert arm.logs("mean")[0] == pytest.approx(math.log(0.01))
    assert arm.curve[0] == pytest.approx(9.0)
    assert np.isinf(arm.curve[2])


@pytest.mark.parametrize(("measure", "best"), [("last", (3, -9)), ("mean", (-4, -3))])
def test_a_grid_goes_on_while_the_best_of_a_measure_is_at_its_edge(lab, monkeypatch, measure, best):
    """The last loss is least far above the rates and below the dampings of the grid, the mean within it."""

    def trained(_, setting):
        place = 2 * math.log10(setting.rate), math.log10(setting.damping)
        last = 1e-3 + abs(place[0] - 3) + abs(place[1] + 9)
        mean = 1e-3 + abs(place[0] + 4) + abs(place[1] + 3)
        # Four epochs, and the geometric mean of their losses.
        return {"loss": [2.3, *[(mean**4 / last) ** (1 / 3)] * 3, last], "test": 90.0}

    plan = PLANS["smoke"]
    rates = dict.fromkeys(METHODS, (-5, -4, -3, -2, -1, 0))
    monkeypatch.setattr(fisher_in_training, "trained", trained)
    monkeypatch.setitem(PLANS, "smoke", Plan(plan.source, plan.model, plan.schedule, rates, (-5, -3, -1), 2))
    for grid in tuned(lab).values():
        assert grid.best(measure) == best
        assert grid.edges(measure) == []
        assert {one[0] for one in grid.arms} == set(range(-5, 5))
        assert {one[1] for one in grid.arms} == {-11, -9, -7, -5, -3, -1}


def test_the_report_is_strict_json(lab, found, tmp_path):
    json.dumps(STUDY.as_json(lab, found), allow_nan=False)
    written = {path.name for path in STUDY.save(lab, found, tmp_path)}
    assert written == {"figure.png", "figure.svg", "README.md", "result.json"}
