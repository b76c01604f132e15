"""Arguments that are no numbers, no models or no layers are refused in words of the room's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import gyroscope
from gyroscope import dynamics
from gyroscope.dynamics import adaptive, damping, decay, deep_linear, homogeneity, least_squares
from gyroscope.dynamics.batch_norm import batch_norm
from gyroscope.dynamics.decay_schedule import fixed_point, steps_to_rest
from gyroscope.dynamics.errors import DynamicsError
from gyroscope.dynamics.exponential import shrinkage
from gyroscope.dynamics.renormalize import sphere_step
from gyroscope.store.example import write_example

X, Y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2
W, G, EYE, ROWS = X[0], X[1], torch.eye(3), X


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)


def walk(w, g, state):
    return w - 0.1 * g, None


# By function: how it is called, and numbers that it takes.
NUMBERS = {
    "rmsprop": (lambda **k: adaptive.rmsprop(W, G, **k), {"lr": 0.5, "beta": 0.5, "eps": 0.5}),
    "adam": (lambda **k: adaptive.adam(W, G, **k), {"lr": 0.5, "eps": 0.5}),
    "adagrad_as_rmsprop": (adaptive.adagrad_as_rmsprop, {"k": 2, "lr": 0.5}),
    "batch_norm": (lambda **k: batch_norm(X, **k), {"eps": 0.5}),
    "BatchCenter": (dynamics.BatchCenter, {"features": 3, "momentum": 0.5}),
    "damped_step": (lambda **k: damping.damped_step(EYE, G, **k), {"damping": 0.5}),
    "effective_damping": (damping.effective_damping, {"damping": 0.5, "scale": 2.0}),
    "first_order_rate": (damping.first_order_rate, {"lr": 0.5, "damping": 0.5, "norm": 2.0}),
    "balance_scale": (damping.balance_scale, {"eigenvalue": 2.0, "damping": 0.5}),
    "with_decay": (lambda **k: decay.with_decay(decay.sgd, **k), {"lr": 0.5, "decay": 0.5}),
    "norm_squares": (dynamics.norm_squares, {"lr": 0.5, "decay": 0.5, "steps": 3, "start": 1.0, "gradient": 1.0}),
    "fixed_point": (fixed_point, {"lr": 0.5, "decay": 0.5, "gradient": 1.0}),
    "steps_to_rest": (steps_to_rest, {"lr": 0.5, "decay": 0.5, "within": 0.5}),
    "schatten": (lambda **k: dynamics.schatten(EYE, **k), {"p": 0.5}),
    "shrunk": (lambda **k: deep_linear.shrunk(W, **k), {"decay": 0.5, "depth": 3}),
    "balanced_factors": (lambda **k: dynamics.balanced_factors(EYE, **k), {"depth": 2, "width": 3}),
    "effective_lr": (lambda **k: dynamics.effective_lr(weight_norm=1.0, **k), {"momentum": 0.5, "lr": 0.5}),
    "norm_growth": (dynamics.norm_growth, {"lr": 0.5, "steps": 2, "norm": 1.0, "gradient": 1.0}),
    "decay_time": (dynamics.decay_time, {"lr": 0.5, "norm": 1.0, "gradient": 1.0}),
    "implicit_decay": (lambda **k: dynamics.implicit_decay([0, 1], **k), {"k0": 2.0, "start": 1.0}),
    "second_moment": (lambda **k: dynamics.second_moment(ROWS, **k), {"batch_size": 2}),
    "step_gain": (lambda **k: dynamics.step_gain(ROWS, **k), {"batch_size": 2, "larger": 4}),
    "batch_law": (lambda **k: dynamics.batch_law(ROWS, [1, 2], **k), {"draws": 2, "seed": 0}),
    "equilibrium": (dynamics.equilibrium, {"lr": 0.5, "decay": 0.5, "momentum": 0.5, "dampening": 0.5}),
    "shrinkage": (shrinkage, {"lr": 0.5, "decay": 0.5, "momentum": 0.0}),
    "exponential_rates": (dynamics.exponential_rates, {"lr": 0.5, "decay": 0.5, "steps": 3}),
    "homogeneity": (lambda **k: homogeneity.homogeneity(torch.sum, W, **k), {"factor": 2.0}),
    "jacobian_norm": (lambda **k: dynamics.jacobian_norm(nn.Linear(3, 2), X, **k), {"limit": 1000}),
    "estimated_jacobian_norm": (
        lambda **k: dynamics.estimated_jacobian_norm(nn.Linear(3, 2), X, **k),
        {"probes": 2, "seed": 0},
    ),
    "Knockout": (dynamics.Knockout, {"shift": 0.5, "spread": 0.5}),
    "decay_law": (lambda **k: dynamics.decay_law([0, 1, 2], [3.0, 2.0, 1.5], **k), {"lr": 0.5, "shrinkage": 0.0}),
    "line_problem": (least_squares.line_problem, {"samples": 5, "noise": 1.0, "seed": 0}),
    "figure2": (dynamics.figure2, {"steps": 2}),
    "properties": (lambda **k: dynamics.properties(net(), X, **k), {"tolerance": 0.01, "seed": 0}),
    "invariance": (
        lambda **k: dynamics.invariance(net(), F.cross_entropy, (X, Y), **k),
        {"tolerance": 0.05, "points": 2, "seed": 0},
    ),
    "outliers": (
        lambda **k: dynamics.outliers(net(), F.cross_entropy, (X, Y), "0", **k),
        {"count": 1, "limit": 100},
    ),
    "random_walk": (
        lambda **k: dynamics.random_walk(walk, **k),
        {"steps": 2, "start": 1.0, "gradient": 1.0, "size": 4, "walks": 2, "agreement": 0.5, "seed": 0},
    ),
    "sphere_step": (lambda **k: sphere_step(W, G, **k), {"lr": 0.5, "radius": 1.0}),
    "renormalize_": (lambda **k: dynamics.renormalize_(net(), **k), {"radius": 1.0}),
    "KFAC": (
        lambda **k: dynamics.KFAC(sgd(model := net()), model, F.cross_entropy, **k),
        {"damping": 0.5, "decay": 0.5, "every": 2, "decompose_every": 2, "clip": 0.5, "largest": 9, "seed": 0},
    ),
}  # fmt: skip
EACH = [(name, argument) for name, (_, taken) in NUMBERS.items() for argument in taken]


@pytest.mark.parametrize(("name", "argument"), EACH, ids=[" ".join(one) for one in EACH])
def test_what_is_no_number_is_refused_by_its_name(name, argument):
    call, taken = NUMBERS[name]
    for wrong in ("0.5", ["0.5"], object()):
        with pytest.raises(DynamicsError, match=f"{argument}|steps at the rate|steps of|samples with"):
            call(**{**taken, argument: wrong})


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_numpy_are_numbers(name):
    call, taken = NUMBERS[name]
    call(**{argument: np.int64(n) if isinstance(n, int) else np.float32(n) for argument, n in taken.items()})


REFUSED = {
    "no loss": (lambda: gyroscope.invariance(net(), None, (X, Y)), "The loss is a NoneType"),
    "layers": (lambda: gyroscope.invariance(net(), F.cross_entropy, (X, Y), layers=5), "layers must be a list"),
    "no inputs": (lambda: dynamics.properties(net(), None), "The inputs are a NoneType"),
    "no optimizer": (lambda: dynamics.keep_norms(None, net()), "The optimizer is a NoneType"),
    "no layers": (lambda: dynamics.renormalize_(5), "no list from gyroscope.layers"),
    "groups": (lambda: dynamics.undo_decay(sgd(net()), groups=0), "groups is 0; accepted are positions"),
    "mixed groups": (lambda: dynamics.undo_decay(sgd(net()), groups=[0, "a"]), "accepted are positions from 0 to 0"),
    "no rates": (lambda: dynamics.ExponentialRates(sgd(net()), None), "shrinkage is None"),
    "rates of what": (lambda: dynamics.ExponentialRates(None, [0.1]), "The optimizer is a NoneType"),
    "betas": (lambda: adaptive.adam(W, G, lr=0.1, betas=0.9), "betas is 0.9; accepted are two"),
    "gain": (lambda: dynamics.Knockout(gain=2.0), "gain is 2.0; accepted are two"),
    "rates": (lambda: dynamics.figure2(rates=0.1), "rates is 0.1; accepted are three"),
    "batch sizes": (lambda: dynamics.batch_law(ROWS, [1, 2.5]), r"batch_sizes is \[1, 2.5\]"),
    "steps back": (lambda: dynamics.decay_law([3, 2, 1], [1.0, 2.0, 3.0]), "The steps go back"),
    "rates of other steps": (lambda: dynamics.decay_law([1, 2, 3], [1.0, 2.0, 3.0], lr=[0.1, 0.2]), r"shape \(2,\)"),
    "rates of other norms": (lambda: dynamics.fit_norms([1, 2, 3], [1.0, 2.0, 3.0], lr=[0.1, 0.2]), r"shape \(2,\)"),
    "negative shrinkage": (lambda: dynamics.decay_law([1, 2, 3], [1.0, 2.0, 3.0], shrinkage=-1.0), "below 0"),
    "nothing decays": (lambda: dynamics.fixed_point(1e-200, 1e-200), "nothing decays"),
    "a matrix of NaN": (lambda: dynamics.balanced_factors(EYE * float("nan"), 2), "finite numbers"),
    "an empty batch": (lambda: dynamics.BatchCenter(3)(X[:0]), "it is empty"),
    "a list of layers": (lambda: dynamics.outliers(net(), F.cross_entropy, (X, Y), ["0"]), "no linear layer"),
    "shares of no optimizer": (lambda: dynamics.optimizer_shares(None), "The optimizer is a NoneType"),
    "shares of layers": (
        lambda: dynamics.optimizer_shares(sgd(model := net()), gyroscope.layers(model)),
        "parameters is of Layers; accepted is a list of tensors",
    ),
    "shares of a model": (lambda: dynamics.optimizer_shares(sgd(model := net()), model), "list of tensors"),
    "shares of a folder": (lambda: dynamics.recorded_shares("runs/first"), "run is a str; accepted is what"),
    "moments": (lambda: dynamics.variance_shares([1.0]), "are a float; accepted are tensors"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_treated_is_refused_in_words(call, says):
    with pytest.raises(DynamicsError, match=says):
        call()


def test_an_explanation_of_no_layers_or_with_no_invariance_is_refused_in_words(tmp_path):
    with write_example(tmp_path / "run") as run:
        for layers in (5, ["conv1*", 5]):
            with pytest.raises(DynamicsError, match="accepted are glob patterns on the names of layers"):
                gyroscope.explain(run, layers=layers)
        with pytest.raises(DynamicsError, match="invariance is a int; accepted is what"):
            gyroscope.explain(run, invariance=5)


def test_an_empty_batch_leaves_a_running_mean_as_it_was():
    layer = dynamics.BatchCenter(3)
    with pytest.raises(DynamicsError):
        layer(X[:0])
    assert torch.equal(layer.running_mean, torch.zeros(3))


def test_steps_to_rest_are_right_where_the_contraction_rounds_to_one():
    assert steps_to_rest(1e-9, 1e-9) == pytest.approx(np.log(2) / 4e-18, rel=1e-6)


@pytest.mark.parametrize("tie", [False, True], ids=["parametrized", "tied"])
def test_outliers_of_a_weight_that_is_not_the_layers_own_are_refused(tie):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    if tie:
        model[2].weight = model[0].weight
    else:
        nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(DynamicsError, match="shares parameters with '2'" if tie else "computed from other parameters"):
        dynamics.outliers(model, F.cross_entropy, (X, Y), "0")
