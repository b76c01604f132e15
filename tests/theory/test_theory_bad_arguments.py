"""Arguments that are no numbers, no models or no layers are refused in words of the room's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import gyroscope
from gyroscope import conditioning, control, theory
from gyroscope.errors import DynamicsError
from gyroscope.store.example import write_example
from gyroscope.theory import adaptive, decay, least_squares
from gyroscope.theory.batch_norm import batch_norm
from gyroscope.theory.equilibrium import fixed_point, steps_to_rest
from gyroscope.theory.exponential import shrinkage

X, Y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2
W, G, ROWS = X[0], X[1], X


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)


# By function: how it is called, and numbers that it takes.
NUMBERS = {
    "rmsprop": (lambda **k: adaptive.rmsprop(W, G, **k), {"lr": 0.5, "beta": 0.5, "eps": 0.5}),
    "adam": (lambda **k: adaptive.adam(W, G, **k), {"lr": 0.5, "eps": 0.5}),
    "adagrad_as_rmsprop": (adaptive.adagrad_as_rmsprop, {"k": 2, "lr": 0.5}),
    "batch_norm": (lambda **k: batch_norm(X, **k), {"eps": 0.5}),
    "BatchCenter": (theory.BatchCenter, {"features": 3, "momentum": 0.5}),
    "with_decay": (lambda **k: decay.with_decay(decay.sgd, **k), {"lr": 0.5, "decay": 0.5}),
    "norm_squares": (theory.norm_squares, {"lr": 0.5, "decay": 0.5, "steps": 3, "start": 1.0, "gradient": 1.0}),
    "fixed_point": (fixed_point, {"lr": 0.5, "decay": 0.5, "gradient": 1.0}),
    "steps_to_rest": (steps_to_rest, {"lr": 0.5, "decay": 0.5, "within": 0.5}),
    "effective_lr": (lambda **k: theory.effective_lr(weight_norm=1.0, **k), {"momentum": 0.5, "lr": 0.5}),
    "norm_growth": (theory.norm_growth, {"lr": 0.5, "steps": 2, "norm": 1.0, "gradient": 1.0}),
    "decay_time": (theory.decay_time, {"lr": 0.5, "norm": 1.0, "gradient": 1.0}),
    "implicit_decay": (lambda **k: theory.implicit_decay([0, 1], **k), {"k0": 2.0, "start": 1.0}),
    "second_moment": (lambda **k: theory.second_moment(ROWS, **k), {"batch_size": 2}),
    "step_gain": (lambda **k: theory.step_gain(ROWS, **k), {"batch_size": 2, "larger": 4}),
    "batch_law": (lambda **k: theory.batch_law(ROWS, [1, 2], **k), {"draws": 2, "seed": 0}),
    "equilibrium": (theory.equilibrium, {"lr": 0.5, "decay": 0.5, "momentum": 0.5, "dampening": 0.5}),
    "shrinkage": (shrinkage, {"lr": 0.5, "decay": 0.5, "momentum": 0.0}),
    "exponential_rates": (theory.exponential_rates, {"lr": 0.5, "decay": 0.5, "steps": 3}),
    "jacobian_norm": (lambda **k: theory.jacobian_norm(nn.Linear(3, 2), X, **k), {"limit": 1000}),
    "estimated_jacobian_norm": (
        lambda **k: theory.estimated_jacobian_norm(nn.Linear(3, 2), X, **k),
        {"probes": 2, "seed": 0},
    ),
    "Knockout": (theory.Knockout, {"shift": 0.5, "spread": 0.5}),
    "decay_law": (lambda **k: theory.decay_law([0, 1, 2], [3.0, 2.0, 1.5], **k), {"lr": 0.5, "shrinkage": 0.0}),
    "line_problem": (least_squares.line_problem, {"samples": 5, "noise": 1.0, "seed": 0}),
    "figure2": (theory.figure2, {"steps": 2}),
    "properties": (lambda **k: theory.properties(net(), X, **k), {"tolerance": 0.01, "seed": 0}),
    "invariance": (
        lambda **k: theory.invariance(net(), F.cross_entropy, (X, Y), **k),
        {"tolerance": 0.05, "points": 2, "seed": 0},
    ),
    "outliers": (
        lambda **k: conditioning.outliers(net(), F.cross_entropy, (X, Y), "0", **k),
        {"count": 1, "limit": 100},
    ),
    "renormalize_": (lambda **k: control.renormalize_(net(), **k), {"radius": 1.0}),
    "KFAC": (
        lambda **k: control.KFAC(sgd(model := net()), model, F.cross_entropy, **k),
        {"damping": 0.5, "decay": 0.5, "every": 2, "decompose_every": 2, "clip": 0.5, "largest": 9, "seed": 0},
    ),
}  # fmt: skip
EACH = [(name, argument) for name, (_, taken) in NUMBERS.items() for argument in taken]


@pytest.mark.parametrize(("name", "argument"), EACH, ids=[" ".join(one) for one in EACH])
def test_what_is_no_number_is_refused_by_its_name(name, argument):
    call, taken = NUMBERS[name]
    for wrong in ("0.5", ["0.5"], object()):
        with pytest.raises(DynamicsError, match=rf"\b{argument}\b"):
            call(**{**taken, argument: wrong})


@pytest.mark.parametrize("whole", [np.int64, np.array, torch.tensor], ids=["numpy", "array", "tensor"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_numpy_and_torch_are_numbers(name, whole):
    call, taken = NUMBERS[name]
    call(**{argument: whole(n) if isinstance(n, int) else np.float32(n) for argument, n in taken.items()})


def same(found, expected):
    """Whether all that is in them is, to the bit."""
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_one_learning_rate_in_a_list_is_one_for_all_steps():
    k, e = np.arange(5), 0.1 / np.sqrt(1 + np.arange(5) / 3)
    assert same(theory.decay_law(k, e, lr=[0.1]), theory.decay_law(k, e, lr=0.1))
    assert same(theory.decay_law(k, e, shrinkage=[0.01]), theory.decay_law(k, e, shrinkage=0.01))
    assert same(theory.fit_norms(k, 1 + k, lr=[0.1]), theory.fit_norms(k, 1 + k, lr=0.1))


def test_rates_of_methods_may_be_an_array():
    rates = (0.1, 0.02, 0.03)
    found, expected = (theory.figure2(steps=3, rates=given) for given in (np.array(rates), rates))
    assert same(*((one.gradient, one.natural, one.empirical) for one in (found, expected)))


@pytest.mark.parametrize("form", [float, np.float32, np.array, torch.tensor])
def test_steps_in_formulas_may_be_floats_of_whole_numbers(form):
    assert adaptive.adagrad_as_rmsprop(form(4), lr=1.0, eps=0.5) == adaptive.adagrad_as_rmsprop(4, lr=1.0, eps=0.5)
    for wrong in (3.5, float("inf")):
        with pytest.raises(DynamicsError, match="`k` must be a whole number"):
            adaptive.adagrad_as_rmsprop(wrong, lr=1.0)


def test_no_limit_is_an_infinite_one():
    inf = float("inf")
    assert theory.jacobian_norm(nn.Linear(3, 2), X, limit=inf) > 0
    assert len(conditioning.outliers(net(), F.cross_entropy, (X, Y), "0", limit=inf).predicted) == 4


def test_seeds_go_on_from_the_largest():
    assert theory.batch_law(ROWS, [1, 2], draws=2, seed=2**64 - 1).measured.shape == (2,)


class Unasked(nn.Module):
    """Is not to be called."""

    def forward(self, x):
        raise AssertionError


def test_arguments_are_refused_before_any_work():
    with pytest.raises(DynamicsError, match=r"`limit` must be .* got -1"):
        theory.jacobian_norm(Unasked(), X, limit=-1)
    with pytest.raises(DynamicsError, match=r"`seed` must be .* got 0\.5"):
        theory.estimated_jacobian_norm(Unasked(), X, seed=0.5)


def test_groups_are_positions_however_they_are_written():
    for groups in ([0, 0], np.array([0]), (torch.tensor(0),), {0}):
        optimizer = sgd(net())
        theory.undo_decay(optimizer, groups=groups)
        assert optimizer.param_groups[0]["weight_decay"] == 0


REFUSED = {
    "no loss": (lambda: gyroscope.invariance(net(), None, (X, Y)), "`loss` must be a function .*, got a NoneType"),
    "layers": (lambda: gyroscope.invariance(net(), F.cross_entropy, (X, Y), layers=5), "`layers` must be a list"),
    "a tensor for layers": (
        lambda: gyroscope.invariance(net(), F.cross_entropy, (X, Y), layers=torch.tensor(1.0)),
        "`layers` must be a list",
    ),
    "no inputs": (lambda: theory.properties(net(), None), "`x` must be .*, got a NoneType"),
    "no optimizer": (lambda: control.keep_norms(None, net()), "must be a torch.optim.Optimizer, got a NoneType"),
    "no layers": (lambda: control.renormalize_(5), "must be a model or a list of layers"),
    "groups": (lambda: theory.undo_decay(sgd(net()), groups=0), "`groups` must be positions"),
    "groups of groups": (lambda: theory.undo_decay(sgd(net()), groups=[[0]]), r"`groups` must be .* got \[\[0\]\]"),
    "groups beyond": (lambda: theory.undo_decay(sgd(net()), groups=[-1]), r"`groups` must be .* got \[-1\]"),
    "mixed groups": (lambda: theory.undo_decay(sgd(net()), groups=[0, "a"]), "must be positions from 0 to 0"),
    "no rates": (lambda: theory.ExponentialRates(sgd(net()), None), "`shrinkage` must .* got None"),
    "rates of what": (lambda: theory.ExponentialRates(None, [0.1]), "`optimizer` must be .*, got a NoneType"),
    "betas": (lambda: adaptive.adam(W, G, lr=0.1, betas=0.9), "`betas` must .* got 0.9"),
    "gain": (lambda: theory.Knockout(gain=2.0), "`gain` must .* got 2.0"),
    "rates": (lambda: theory.figure2(rates=0.1), "`rates` must .* got 0.1"),
    "batch sizes": (lambda: theory.batch_law(ROWS, [1, 2.5]), r"`batch_sizes` must .* got \[1, 2.5\]"),
    "steps back": (lambda: theory.decay_law([3, 2, 1], [1.0, 2.0, 3.0]), "`steps` must be numbers in ascending order"),
    "rates of other steps": (lambda: theory.decay_law([1, 2, 3], [1.0, 2.0, 3.0], lr=[0.1, 0.2]), r"shape \(2,\)"),
    "rates of other norms": (lambda: theory.fit_norms([1, 2, 3], [1.0, 2.0, 3.0], lr=[0.1, 0.2]), r"shape \(2,\)"),
    "negative shrinkage": (lambda: theory.decay_law([1, 2, 3], [1.0, 2.0, 3.0], shrinkage=-1.0), "must be ≥ 0"),
    "nothing decays": (lambda: theory.fixed_point(1e-200, 1e-200), "nothing decays"),
    "an empty batch": (lambda: theory.BatchCenter(3)(X[:0]), "must not be empty"),
    "a list of layers": (lambda: conditioning.outliers(net(), F.cross_entropy, (X, Y), ["0"]), "of a linear layer"),
    "shares of no optimizer": (lambda: theory.optimizer_shares(None), "`optimizer` must be .*, got a NoneType"),
    "shares of layers": (
        lambda: theory.optimizer_shares(sgd(model := net()), gyroscope.layers(model)),
        "`parameters` must be a list of tensors, got a list of Layers",
    ),
    "shares of a model": (lambda: theory.optimizer_shares(sgd(model := net()), model), "list of tensors"),
    "shares of a folder": (lambda: theory.recorded_shares("runs/first"), "`run` must be a run, got a str"),
    "moments": (lambda: theory.variance_shares([1.0]), "`moments` must be tensors, got a float"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_treated_is_refused_in_words(call, says):
    with pytest.raises(DynamicsError, match=says):
        call()


def test_an_explanation_of_no_layers_or_with_no_invariance_is_refused_in_words(tmp_path):
    with write_example(tmp_path / "run") as run:
        for layers in (5, ["conv1*", 5], torch.tensor(1.0)):
            with pytest.raises(DynamicsError, match="one or more glob patterns on layer names"):
                gyroscope.explain(run, layers=layers)
        with pytest.raises(DynamicsError, match=r"`invariance` must be the result of gyroscope.invariance, got int"):
            gyroscope.explain(run, invariance=5)


def test_an_empty_batch_leaves_a_running_mean_as_it_was():
    layer = theory.BatchCenter(3)
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
        conditioning.outliers(model, F.cross_entropy, (X, Y), "0")


class Hungry(nn.Linear):
    """Runs out of memory where it is told to."""

    def __init__(self, where, error):
        super().__init__(3, 4)
        self.where, self.error = where, error

    def forward(self, x):
        if self.where == "pass":
            raise self.error
        return super().forward(x)

    def __deepcopy__(self, memo):
        if self.where == "copy":
            raise self.error
        return Hungry(self.where, self.error)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("none left"), MemoryError("none left")], ids=["torch", "host"]
)
@pytest.mark.parametrize("where", ["copy", "pass"])
def test_running_out_of_memory_is_not_put_down_to_the_model(where, error):
    with pytest.raises(type(error), match="none left"):
        conditioning.outliers(nn.Sequential(Hungry(where, error), nn.Linear(4, 2)), F.cross_entropy, (X, Y), "1")
