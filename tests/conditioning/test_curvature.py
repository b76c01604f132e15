from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from conditioning.curvature_cases import NETWORKS, N, Y, assert_same, cnn, everything, mlp, normal, seeded
from conditioning.devices import DEVICES
from gyroscope.conditioning.curvature import top_eigenvalue
from gyroscope.conditioning.fisher import fisher
from gyroscope.errors import ConditioningError, MissingExtraError
from oracles import fisher as oracle

MATRICES = ("fisher", "second_moment", "gauss_newton", "hessian")
exactly = functools.partial(top_eigenvalue, tolerance=1e-10, dtype=torch.float64)


def literal(model: nn.Module, loss: Any, x: Tensor, y: Tensor, matrix: str, layer: str | None = None) -> Tensor:
    """Eigenvalues in ascending order of the matrix as its definition reads."""
    net, x = oracle.double(model), x.double() if x.is_floating_point() else x
    y = y.double() if y.is_floating_point() else y
    chosen = oracle.trained(net) if layer is None else [dict(net.named_parameters())[layer]]
    match matrix:
        case "fisher":
            found = oracle.fisher(net, loss, x, chosen, oracle.classes)
        case "second_moment":
            found = oracle.second_moment(net, loss, x, y, chosen)
        case "gauss_newton":
            found = oracle.gauss_newton(net, loss, x, y, chosen)
        case _:
            found = oracle.hessian(lambda: loss(net(x), y), chosen)
    return torch.linalg.eigvalsh(found)


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_top_eigenvalue_is_that_of_the_whole_matrix(name: str, matrix: Any) -> None:
    make, x = NETWORKS[name]
    model = seeded(make)
    expected = float(literal(model, F.cross_entropy, x, Y, matrix)[-1])
    assert exactly(model, F.cross_entropy, (x, Y), matrix=matrix) == pytest.approx(expected, rel=1e-8)
    assert top_eigenvalue(model, F.cross_entropy, (x, Y), matrix=matrix) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("layer", ["0.weight", "2.weight"])
def test_a_layer_has_the_top_eigenvalue_of_its_block(layer: str, matrix: Any) -> None:
    model, x = seeded(mlp), normal(N, 4)
    expected = float(literal(model, F.cross_entropy, x, Y, matrix, layer)[-1])
    found = exactly(model, F.cross_entropy, (x, Y), matrix=matrix, layer=layer)
    assert found == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss(reduction="none"), lambda o, y: F.cross_entropy(o, y),
     lambda o, y: -o.log_softmax(1).gather(1, y[:, None]).sum()],
    ids=["sum", "none", "own mean", "own sum"],
)  # fmt: skip
@pytest.mark.parametrize("matrix", MATRICES[1:])
def test_reductions_agree(loss: Any, matrix: Any) -> None:
    model, x = seeded(mlp), normal(N, 4)
    expected = exactly(model, F.cross_entropy, (x, Y), matrix=matrix)
    assert exactly(model, loss, (x, Y), matrix=matrix) == pytest.approx(expected, rel=1e-8)


LOSSES: dict[str, tuple[Any, Tensor]] = {
    "squared error": (F.mse_loss, normal(N, 3, seed=3)),
    "sum of squared errors": (nn.MSELoss(reduction="sum"), normal(N, 3, seed=3)),
    "bce": (F.binary_cross_entropy_with_logits, (normal(N, 3, seed=3) > 0).float()),
    "sum of bce": (nn.BCEWithLogitsLoss(reduction="sum"), (normal(N, 3, seed=3) > 0).float()),
}


@pytest.mark.parametrize("labels", ["model", "sampled"])
@pytest.mark.parametrize("name", LOSSES)
def test_products_and_whole_matrices_agree_on_every_likelihood(name: str, labels: Any) -> None:
    loss, y = LOSSES[name]
    model, x = seeded(mlp), normal(N, 4)
    expected = fisher(model, loss, (x, y), labels=labels, seed=3).spectrum().largest
    assert exactly(model, loss, (x, y), labels=labels, seed=3) == pytest.approx(expected, rel=1e-8)
    expected = fisher(model, loss, (x, y), labels="true").spectrum().largest
    assert exactly(model, loss, (x, y), matrix="second_moment") == pytest.approx(expected, rel=1e-8)


def test_labels_may_be_drawn_by_the_caller() -> None:
    model, x = seeded(mlp), normal(N, 4)
    given = exactly(model, F.cross_entropy, (x, Y), labels=lambda output, draw: torch.zeros(len(output)).long())
    expected = exactly(model, F.cross_entropy, (x, torch.zeros(N).long()), matrix="second_moment")
    assert given == pytest.approx(expected, rel=1e-8)


def test_positions_and_missing_labels_agree_with_the_whole_matrix() -> None:
    model, x = seeded(lambda: nn.Sequential(mlp(6), nn.Unflatten(1, (3, 2)))), normal(N, 4)
    y = torch.randint(3, (N, 2), generator=torch.Generator().manual_seed(0))
    y[0], y[1, 0], y[2, 1] = -100, -100, -100
    for reduction in ("mean", "sum", "none"):
        loss = nn.CrossEntropyLoss(reduction=reduction)
        expected = fisher(model, loss, (x, y)).spectrum().largest
        assert exactly(model, loss, (x, y)) == pytest.approx(expected, rel=1e-8)


def test_equation_1_linear_regression_has_twice_the_second_moment_of_its_input() -> None:
    model, x = nn.Linear(30, 4, bias=False), normal(50, 30)
    x64 = x.double()
    expected = 2 * float(torch.linalg.eigvalsh(x64.T @ x64 / 50)[-1])
    batch = (x, normal(50, 4, seed=2))
    for matrix in ("hessian", "gauss_newton", "fisher"):
        found = exactly(model, nn.MSELoss(reduction="sum"), batch, matrix=matrix)
        assert found == pytest.approx(expected, rel=1e-8)


def test_gradient_descent_diverges_above_two_over_the_top_eigenvalue() -> None:
    x, y = normal(50, 30), normal(50, 4, seed=2)
    start = seeded(lambda: nn.Linear(30, 4, bias=False)).double()
    x, y = x.double(), y.double()
    largest = exactly(start, F.mse_loss, (x, y), matrix="hessian")
    ends = []
    for rate in (1.98 / largest, 2.02 / largest):
        w = start.weight.detach().clone()
        for _ in range(3000):
            w -= rate * torch.func.grad(lambda w: F.mse_loss(x @ w.T, y))(w)
        ends.append(F.mse_loss(x @ w.T, y))
    assert ends[0] < F.mse_loss(start(x), y) < 1e6 * ends[0] < 1e-6 * ends[1]


def saddle(o: Tensor, y: Tensor) -> Tensor:
    """A loss whose Hessian has a large negative and a small positive eigenvalue, for each output."""
    return (torch.tensor([-5.0, 1.0, 0.5], dtype=o.dtype) * o.square()).sum(1).mean()


def test_of_a_hessian_the_largest_is_not_that_of_largest_magnitude() -> None:
    model, x = seeded(lambda: nn.Linear(9, 3, bias=False)), normal(N, 9)
    values = literal(model, saddle, x, Y, "hessian")
    assert -values[0] > values[-1] > 0
    ask = functools.partial(exactly, model, saddle, (x, Y), matrix="hessian")
    assert ask() == pytest.approx(float(values[-1]), rel=1e-8)
    assert ask(which="magnitude") == pytest.approx(float(values[0]), rel=1e-8)


@pytest.mark.parametrize("size", [1, 2, 3, 19, 20, 21, 22])
@pytest.mark.parametrize("matrix", MATRICES)
def test_small_matrices_are_no_exception(size: int, matrix: Any) -> None:
    model, x = seeded(lambda: nn.Linear(size, 1, bias=False)), normal(N, size)
    y = normal(N, 1, seed=4)
    labels = {"fisher": lambda: fisher(model, F.mse_loss, (x, y)), "second_moment": lambda: fisher(
        model, F.mse_loss, (x, y), labels="true")}  # fmt: skip
    if matrix in labels:
        expected = labels[matrix]().spectrum().largest
    else:
        expected = float(literal(model, F.mse_loss, x, y, matrix)[-1])
    assert exactly(model, F.mse_loss, (x, y), matrix=matrix) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
@pytest.mark.parametrize("size", [5, 60])
def test_the_size_of_eigenvalues_does_not_matter(scale: float, size: int) -> None:
    model, x = seeded(lambda: nn.Linear(size, 3)), normal(N, size)
    x = x * scale
    expected = fisher(model, F.mse_loss, (x, normal(N, 3)), layers="weight").spectrum().largest
    found = top_eigenvalue(model, F.mse_loss, (x, normal(N, 3)), layer="weight")
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("size", [2, 60])
def test_a_matrix_of_zeros_has_zero(size: int) -> None:
    model, x = seeded(lambda: nn.Linear(size, 3)), normal(N, size)
    for matrix in ("hessian", "gauss_newton"):
        assert top_eigenvalue(model, lambda o, y: o.mean(), (x, Y), matrix=matrix) == 0
    log = nn.Sequential(model, nn.LogSoftmax(1))
    assert top_eigenvalue(log, F.nll_loss, (x, Y), matrix="gauss_newton") == 0
    assert top_eigenvalue(log, F.nll_loss, (x, Y)) > 0


def test_log_probabilities_have_the_largest_probability_as_their_top_eigenvalue() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log = nn.Parameter(normal(30).log_softmax(0))

        def forward(self, x: Tensor) -> Tensor:
            return self.log.expand(len(x), 30)

    model = Table()
    largest = float(model.log.detach().double().exp().max())
    assert exactly(model, F.nll_loss, (normal(N, 1), Y)) == pytest.approx(largest, rel=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_networks_are_run_in_float32(dtype: torch.dtype) -> None:
    model, x = seeded(mlp).to(dtype), normal(N, 4).to(dtype)
    for matrix in MATRICES:
        expected = float(literal(model, F.cross_entropy, x, Y, matrix)[-1])
        assert top_eigenvalue(model, F.cross_entropy, (x, Y), matrix=matrix) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_about_the_model_changes(name: str, matrix: Any) -> None:
    make, x = NETWORKS[name]
    model = seeded(make)
    for parameter in list(model.parameters())[:2]:
        parameter.grad = torch.full_like(parameter, 3.0)
    before = everything(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        top_eigenvalue(model, F.cross_entropy, (x, Y), matrix=matrix)
    assert_same(model, before)


def test_autocast_outside_does_not_reach_inside() -> None:
    model, x = seeded(mlp), normal(N, 4)
    expected = top_eigenvalue(model, F.cross_entropy, (x, Y))
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert top_eigenvalue(model, F.cross_entropy, (x, Y)) == expected


def test_frozen_parameters_are_left_out_and_shared_ones_counted_once() -> None:
    model, x = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))), normal(N, 4)
    model[2].weight = model[0].weight
    model[3].requires_grad_(False)
    for matrix in MATRICES:
        expected = float(literal(model, F.cross_entropy, x, Y, matrix)[-1])
        assert exactly(model, F.cross_entropy, (x, Y), matrix=matrix) == pytest.approx(expected, rel=1e-8)


def test_the_seed_decides_where_the_iteration_starts_not_where_it_ends() -> None:
    model, x = seeded(lambda: cnn().eval()), normal(N, 1, 5, 5)
    found = [top_eigenvalue(model, F.cross_entropy, (x, Y), seed=seed) for seed in (0, 0, 1)]
    assert found[0] == found[1]
    assert found[2] == pytest.approx(found[0], rel=1e-4)


def test_an_iteration_that_is_cut_short_says_so() -> None:
    torch.manual_seed(0)
    model = nn.Linear(400, 1, bias=False)
    x = torch.eye(400) + 1e-3 * torch.diag(torch.linspace(0, 1, 400))
    with pytest.raises(ConditioningError, match="iterations"):
        exactly(model, F.mse_loss, (x, torch.zeros(400, 1)), iterations=20)


def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingExtraError, match=r"gyroscope\[curvature\]"):
        top_eigenvalue(seeded(mlp), F.cross_entropy, (normal(N, 4), Y))


class Once(torch.autograd.Function):
    """The identity, in a form that can be differentiated once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clone()


class WithOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(Once.apply(self.first(x))))


def batch() -> tuple[Tensor, Tensor]:
    return normal(N, 4), Y


BAD: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "matrix": (mlp, {"matrix": "inverse"}, "'gauss_newton', 'hessian'"),
    "which": (mlp, {"which": "smallest"}, "'largest', 'magnitude'"),
    "true labels": (mlp, {"labels": "true"}, "None with the others"),
    "labels elsewhere": (mlp, {"labels": "model", "matrix": "hessian"}, "None with the others"),
    "tolerance": (mlp, {"tolerance": 0.0}, "between 0 and 1"),
    "iterations": (mlp, {"iterations": 0}, "a whole number ≥ 1"),
    "matrices": (mlp, {"matrix": ["hessian"]}, "'gauss_newton', 'hessian'"),
    "ends": (mlp, {"which": ["largest"]}, "'largest', 'magnitude'"),
    "tolerance in words": (mlp, {"tolerance": "a"}, "tolerance='a'"),
    "no iterations": (mlp, {"iterations": None}, "iterations=None"),
    "half an iteration": (mlp, {"iterations": 10.5}, "iterations=10.5"),
    "no loss": (mlp, {"loss": None}, r"`loss` must be a function of \(output, target\), got NoneType"),
    "dtype": (mlp, {"dtype": "float64"}, "`dtype` must be a floating-point torch.dtype"),
    "seed": (mlp, {"seed": 0.5}, "`seed` must be a whole number"),
    "no samples": (mlp, {"batch": (normal(0, 4), Y[:0])}, "the batch is empty"),
    "batches": (mlp, {"batch": [batch(), batch()]}, "must be one pair"),
    "random": (lambda: nn.Sequential(nn.Dropout(), mlp()), {}, r"random numbers.*0 \(Dropout\)"),
    "once": (WithOnce, {}, "cannot be differentiated twice"),
    "not finite": (mlp, {"loss": lambda o, y: (o - o).sqrt().mean(), "matrix": "hessian"}, "not finite"),
    "infinite": (mlp, {"loss": lambda o, y: o.sum() / 0, "matrix": "hessian"}, "The loss is -?inf"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_treated_is_refused_in_words(name: str) -> None:
    make, changed, message = BAD[name]
    arguments = {"loss": F.cross_entropy, "batch": batch()} | changed
    model = seeded(make)
    before = everything(model)
    with pytest.raises(ConditioningError, match=message):
        top_eigenvalue(model, arguments.pop("loss"), arguments.pop("batch"), **arguments)
    assert_same(model, before)


def test_a_function_without_second_derivatives_matters_only_where_they_are_needed() -> None:
    model, x = seeded(WithOnce), normal(N, 4)
    expected = fisher(model, F.cross_entropy, (x, Y), layers="last.*").spectrum().largest
    assert exactly(model, F.cross_entropy, (x, Y), layer="last.*") == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("name", NETWORKS)
def test_devices_agree(name: str, matrix: Any, device: str) -> None:
    make, x = NETWORKS[name]
    model = seeded(make)
    expected = top_eigenvalue(model, F.cross_entropy, (x, Y), matrix=matrix)
    before = everything(model.to(device))
    assert top_eigenvalue(model, F.cross_entropy, (x, Y), matrix=matrix) == pytest.approx(expected, rel=1e-3)
    assert_same(model, before)
