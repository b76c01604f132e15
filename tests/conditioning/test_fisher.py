from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from conditioning.curvature_cases import NETWORKS, N, Y, assert_same, cnn, everything, generator, mlp, normal, seeded
from conditioning.devices import DEVICES
from gyroscope.conditioning.fisher import Exact, fisher
from gyroscope.errors import ConditioningError, LayerError
from oracles import fisher as oracle


@pytest.fixture(params=NETWORKS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    make, x = NETWORKS[request.param]
    return seeded(make), x


def literal(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor, list[Tensor]]:
    model = oracle.double(model)
    return model, x.double() if x.is_floating_point() else x, oracle.trained(model)


def test_the_fisher_matrix_is_the_sum_over_samples_and_classes(case: tuple[nn.Module, Tensor]) -> None:
    model, x = case
    net, x64, parameters = literal(model, x)
    expected = oracle.fisher(net, F.cross_entropy, x64, parameters, oracle.classes)
    found = fisher(model, F.cross_entropy, (x, Y))
    assert found.matrix is not None
    assert found.matrix.dtype == torch.float64
    assert torch.allclose(found.matrix, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))
    assert found.parameters == tuple(name for name, _ in model.named_parameters())
    assert found.samples == N


def test_the_second_moment_matrix_is_the_sum_over_samples(case: tuple[nn.Module, Tensor]) -> None:
    model, x = case
    net, x64, parameters = literal(model, x)
    expected = oracle.second_moment(net, F.cross_entropy, x64, Y, parameters)
    found = fisher(model, F.cross_entropy, (x, Y), labels="true")
    assert torch.allclose(found.matrix, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))


def test_the_fisher_matrix_is_gauss_newton_for_one_prediction_a_sample(case: tuple[nn.Module, Tensor]) -> None:
    model, x = case
    net, x64, parameters = literal(model, x)
    expected = oracle.gauss_newton(net, F.cross_entropy, x64, Y, parameters)
    found = fisher(model, F.cross_entropy, (x, Y))
    assert torch.allclose(found.matrix, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))


LIKELIHOODS: dict[str, tuple[Any, Callable[[], nn.Module], Any]] = {
    "nll": (F.nll_loss, lambda: nn.Sequential(mlp(), nn.LogSoftmax(1)), functools.partial(oracle.classes, log=True)),
    "bce, mean": (nn.BCEWithLogitsLoss(), mlp, oracle.coins),
    "bce, sum": (nn.BCEWithLogitsLoss(reduction="sum"), mlp, oracle.coins),
    "squared error, mean": (F.mse_loss, mlp, oracle.normals(1.5)),
    "squared error, sum": (nn.MSELoss(reduction="sum"), mlp, oracle.normals(0.5)),
    "positions, mean": (F.cross_entropy, lambda: nn.Sequential(mlp(6), nn.Unflatten(1, (3, 2))), oracle.classes),
    "positions, sum": (nn.CrossEntropyLoss(reduction="sum"), lambda: nn.Sequential(mlp(6), nn.Unflatten(1, (3, 2))),
                       oracle.classes),
}  # fmt: skip
# How many labels of a sample are averaged over: F is that much smaller than Gauss-Newton. NLL is linear in its output.
AVERAGED = {"bce, mean": 3, "bce, sum": 1, "squared error, mean": 1, "squared error, sum": 1, "positions, mean": 2,
            "positions, sum": 1}  # fmt: skip


def targets(loss: Any, model: nn.Module, x: Tensor) -> Tensor:
    shape = model(x).shape
    if loss is F.nll_loss or loss is F.cross_entropy or isinstance(loss, nn.CrossEntropyLoss):
        return torch.randint(3, shape[:1] + shape[2:], generator=generator())
    return torch.randint(2, shape, generator=generator()).float()


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_every_known_likelihood_is_summed_over_its_labels(name: str) -> None:
    loss, make, labels = LIKELIHOODS[name]
    model, x = seeded(make), normal(N, 4)
    net, x64, parameters = literal(model, x)
    expected = oracle.fisher(net, loss, x64, parameters, labels)
    found = fisher(model, loss, (x, targets(loss, model, x)))
    assert torch.allclose(found.matrix, expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", AVERAGED)
def test_the_fisher_matrix_is_gauss_newton_over_the_labels_a_mean_is_taken_of(name: str) -> None:
    loss, make, _ = LIKELIHOODS[name]
    model, x = seeded(make), normal(N, 4)
    net, x64, parameters = literal(model, x)
    y = targets(loss, model, x)
    mean = (lambda o, t: loss(o, t) / N) if name.endswith("sum") else loss
    newton = oracle.gauss_newton(net, mean, x64, y if y.dtype == torch.int64 else y.double(), parameters)
    found = fisher(model, loss, (x, y))
    assert torch.allclose(found.matrix, newton / AVERAGED[name], rtol=1e-9, atol=1e-14)


class Table(nn.Module):
    """Log-probabilities as parameters: they are normalized at first, and nothing keeps them so."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(normal(3).log_softmax(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.log.expand(len(x), 3)


def test_log_probabilities_have_the_probabilities_as_their_fisher_matrix() -> None:
    model = Table()
    expected = torch.diag(model.log.detach().double().exp())
    found = fisher(model, F.nll_loss, (normal(N, 1), Y))
    assert torch.allclose(found.matrix, expected, atol=1e-14)


@pytest.mark.parametrize("labels", ["model", "true"])
def test_one_value_a_position_is_a_mean_over_them(labels: Any) -> None:
    model, x = seeded(lambda: nn.Sequential(mlp(6), nn.Unflatten(1, (3, 2)))), normal(N, 4)
    y = torch.randint(3, (N, 2), generator=generator())
    mean, none = (
        fisher(model, nn.CrossEntropyLoss(reduction=reduction), (x, y), labels=labels).matrix
        for reduction in ("mean", "none")
    )
    assert torch.allclose(none, mean, rtol=1e-10, atol=1e-18)


def test_power_iterations_of_spectral_norm_start_where_they_stand_in_every_pass() -> None:
    model, x = seeded(lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)))), normal(N, 4)
    net, x64, parameters = literal(model, x)
    expected = oracle.fisher(net, F.cross_entropy, x64, parameters, oracle.classes)
    before = everything(model)
    found = fisher(model, F.cross_entropy, (x, Y))
    assert_same(model, before)
    assert torch.allclose(found.matrix, expected, rtol=1e-9, atol=1e-15)


def test_equation_1_the_hessian_of_linear_regression_is_twice_the_second_moment_of_the_input() -> None:
    # The text drops the factor 2 of the derivative of a square.
    model, x = seeded(lambda: nn.Linear(4, 3, bias=False)), normal(N, 4)
    net, x64, parameters = literal(model, x)
    y = normal(N, 3, seed=2)
    square = nn.MSELoss(reduction="sum")
    expected = 2 * torch.kron(torch.eye(3, dtype=torch.float64), x64.T @ x64 / N)
    h = oracle.hessian(lambda: square(net(x64), y.double()) / N, parameters)
    assert torch.allclose(h, expected, atol=1e-12)
    assert torch.allclose(fisher(model, square, (x, y)).matrix, expected, atol=1e-12)


def test_equation_2_softmax_regression_at_zero_has_second_moments_times_s() -> None:
    c = 5
    model, x = nn.Linear(4, c, bias=False), normal(N, 4)
    nn.init.zeros_(model.weight)
    s = (torch.eye(c, dtype=torch.float64) - torch.ones(c, c, dtype=torch.float64) / c) / c
    found = fisher(model, F.cross_entropy, (x, torch.arange(N) % c))
    x64 = x.double()
    # W is [c, d] and flattened by rows, so that the classes are the outer index.
    assert torch.allclose(found.matrix, torch.kron(s, x64.T @ x64 / N), atol=1e-15)


def test_the_hessian_of_softmax_regression_is_the_fisher_matrix() -> None:
    model, x = seeded(lambda: nn.Linear(4, 3)), normal(N, 4)
    net, x64, parameters = literal(model, x)
    h = oracle.hessian(lambda: F.cross_entropy(net(x64), Y), parameters)
    assert torch.allclose(fisher(model, F.cross_entropy, (x, Y)).matrix, h, atol=1e-14)


def test_the_block_of_one_sample_is_the_product_of_its_factors() -> None:
    # Equation 4 without its approximation: input and output-gradient are independent where there is one input.
    model, x = seeded(lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3))), normal(1, 4)
    net, x64, _ = literal(model, x)
    h = net[0](x64)
    sigma_x = x64.T @ x64
    sigma_g = torch.zeros(5, 5, dtype=torch.float64)
    output = net[1:](h)
    for y, q in oracle.classes(output):
        g = oracle.gradient(F.cross_entropy(output, y), [h])
        sigma_g += q * torch.outer(g, g)
    block = fisher(model, F.cross_entropy, (x, Y[:1])).block("0.weight")
    assert torch.allclose(block, torch.kron(sigma_g, sigma_x), atol=1e-15)
    spectrum = fisher(model, F.cross_entropy, (x, Y[:1]), blocks=True).spectrum("0.weight")
    product = torch.linalg.eigvalsh(sigma_g).max() * sigma_x.trace()
    assert spectrum.largest == pytest.approx(float(product), rel=1e-12)


def test_drawn_labels_give_the_fisher_matrix_on_average() -> None:
    model, x = seeded(mlp), normal(N, 4)
    exact = fisher(model, F.cross_entropy, (x, Y)).matrix
    mean = torch.zeros_like(exact)
    for seed in range(400):
        mean += fisher(model, F.cross_entropy, (x, Y), labels="sampled", seed=seed).matrix / 400
    assert (mean - exact).norm() < 0.1 * exact.norm()


def test_drawn_labels_are_those_of_the_seed() -> None:
    model, x = seeded(mlp), normal(N, 4)
    first, again, other = (
        fisher(model, F.cross_entropy, (x, Y), labels="sampled", seed=seed).matrix for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_labels_may_be_drawn_by_the_caller() -> None:
    model, x = seeded(mlp), normal(N, 4)

    def second_class(output: Tensor, draw: torch.Generator) -> Tensor:
        assert isinstance(draw, torch.Generator)
        return torch.ones(len(output), dtype=torch.int64)

    given = fisher(model, F.cross_entropy, (x, Y), labels=second_class).matrix
    assert torch.equal(given, fisher(model, F.cross_entropy, (x, torch.ones(N).long()), labels="true").matrix)


REDUCTIONS = {
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "none": nn.CrossEntropyLoss(reduction="none"),
    "partial": functools.partial(F.cross_entropy, reduction="none"),
}
OWN = {
    "own mean": lambda o, y: F.cross_entropy(o, y),
    "own sum": lambda o, y: -o.log_softmax(1).gather(1, y[:, None]).sum(),
    "own list": lambda o, y: -o.log_softmax(1).gather(1, y[:, None])[:, 0],
}


@pytest.mark.parametrize("labels", ["model", "sampled", "true"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_agree(name: str, labels: Any) -> None:
    model, x = seeded(mlp), normal(N, 4)
    expected = fisher(model, F.cross_entropy, (x, Y), labels=labels).matrix
    found = fisher(model, REDUCTIONS[name], (x, Y), labels=labels).matrix
    assert torch.allclose(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", OWN)
def test_losses_written_by_hand_agree_with_their_model(name: str) -> None:
    model, x = seeded(mlp), normal(N, 4)
    expected = fisher(model, F.cross_entropy, (x, Y), labels="true").matrix
    assert torch.allclose(fisher(model, OWN[name], (x, Y), labels="true").matrix, expected, rtol=1e-10, atol=1e-18)
    with pytest.raises(ConditioningError, match="labels="):
        fisher(model, OWN[name], (x, Y))


def test_class_weights_are_those_the_mean_loss_is_made_of() -> None:
    model, x, weight = seeded(mlp), normal(N, 4), torch.tensor([1.0, 2.0, 5.0])
    net, x64, parameters = literal(model, x)
    share = weight.double()[Y] / weight.double()[Y].sum() * N
    output = net(x64)
    losses = share * F.cross_entropy(output, Y, reduction="none")
    assert torch.allclose(losses.mean(), F.cross_entropy(output, Y, weight=weight.double()))
    rows = oracle.jacobian(losses, parameters)
    for loss in (nn.CrossEntropyLoss(weight=weight), functools.partial(F.cross_entropy, weight=weight)):
        found = fisher(model, loss, (x, Y), labels="true")
        assert torch.allclose(found.matrix, rows.T @ rows / N, rtol=1e-10, atol=1e-14)
        with pytest.raises(ConditioningError, match="weight"):
            fisher(model, loss, (x, Y))


@pytest.mark.parametrize("labels", ["model", "true"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_samples_without_a_label_are_as_good_as_absent(reduction: str, labels: Any) -> None:
    model, x = seeded(mlp), normal(N, 4)
    y = Y.clone()
    y[[1, 4]] = -100
    kept = y != -100
    loss = nn.CrossEntropyLoss(reduction=reduction)
    found = fisher(model, loss, (x, y), labels=labels)
    expected = fisher(model, F.cross_entropy, (x[kept], y[kept]), labels=labels)
    assert found.samples == N - 2
    assert torch.allclose(found.matrix, expected.matrix, rtol=1e-10, atol=1e-18)
    with pytest.raises(ConditioningError, match=r"ignore_index|nan"):
        fisher(model, loss, (x, torch.full_like(Y, -100)), labels=labels)


def test_a_loss_that_mixes_samples_has_no_second_moments() -> None:
    def contrastive(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o @ o.T, y)

    with pytest.raises(ConditioningError, match="other samples"):
        fisher(seeded(mlp), contrastive, (normal(N, 4), torch.arange(N)), labels="true")


def test_blocks_are_those_of_the_whole() -> None:
    model, x = seeded(lambda: cnn().eval()), normal(N, 1, 5, 5)
    whole, parts = fisher(model, F.cross_entropy, (x, Y)), fisher(model, F.cross_entropy, (x, Y), blocks=True)
    assert parts.matrix is None
    assert list(parts.blocks) == list(whole.blocks) == ["0.weight", "3.weight", "7.weight"]
    for name in parts.blocks:
        at = whole.slices[name]
        assert torch.allclose(parts.block(name), whole.matrix[at, at], rtol=1e-10, atol=1e-18)
        assert torch.allclose(whole.block(name), whole.matrix[at, at], rtol=1e-12, atol=0)
    with pytest.raises(ConditioningError, match="Pass `layer`"):
        parts.spectrum()
    with pytest.raises(ConditioningError, match=r"got '0\.bias'. There are 0\.weight, 3\.weight"):
        whole.block("0.bias")


def test_patterns_choose_the_weights_of_some_layers() -> None:
    model, x = seeded(mlp), normal(N, 4)
    whole, last = fisher(model, F.cross_entropy, (x, Y)), fisher(model, F.cross_entropy, (x, Y), layers="2.*")
    assert last.parameters == ("2.weight",)
    assert torch.allclose(last.matrix, whole.block("2.weight"), rtol=1e-12, atol=1e-18)
    with pytest.raises(LayerError, match="nothing"):
        fisher(model, F.cross_entropy, (x, Y), layers="nothing")


@pytest.mark.parametrize("layer", [None, "0.weight"])
def test_spectra_are_those_of_a_full_decomposition(layer: str | None) -> None:
    model, x = seeded(mlp), normal(N, 4)
    found = fisher(model, F.cross_entropy, (x, Y))
    matrix = found.matrix if layer is None else found.block(layer)
    expected = np.linalg.eigvalsh(matrix.numpy())[::-1]
    spectrum = found.spectrum(layer)
    assert spectrum.dimension == len(matrix)
    assert np.allclose(spectrum.full(), np.where(expected > len(matrix) * 2**-52 * expected[0], expected, 0), rtol=1e-8)
    assert spectrum.rank <= 2 * N


def test_there_are_no_more_eigenvalues_than_gradients() -> None:
    model, x = seeded(mlp), normal(N, 4)
    assert fisher(model, F.cross_entropy, (x, Y), labels="true").spectrum().rank == N
    # One direction of the C logits moves no probability.
    assert fisher(model, F.cross_entropy, (x[:1], Y[:1])).spectrum().rank == 2


def test_too_large_a_matrix_is_refused_before_anything_is_run() -> None:
    called = []
    model = nn.Sequential(nn.Linear(100, 250), nn.Linear(250, 3))
    model.register_forward_pre_hook(lambda *_: called.append(1))
    for arguments in ({}, {"blocks": True}):
        with pytest.raises(ConditioningError) as caught:
            fisher(model, F.cross_entropy, (normal(2, 100), Y[:2]), **arguments)
        text = str(caught.value)
        for word in ("limit of 20,000", "gyroscope.condition", "top_eigenvalue", "`layers`", "raise `limit`"):
            assert word in text
        assert "25,000" in text if arguments else "26,003 parameters" in text
        assert ("5.0 GB" if arguments else "5.4 GB") in text
        assert ("blocks=True" in text) == (not arguments)
    assert not called
    small = fisher(model, F.cross_entropy, (normal(2, 100), Y[:2]), layers="1.*", limit=750)
    assert small.matrix.shape == (750, 750)


@pytest.mark.parametrize("labels", ["model", "sampled", "true"])
def test_nothing_about_the_model_changes(case: tuple[nn.Module, Tensor], labels: Any) -> None:
    model, x = case
    for parameter in list(model.parameters())[:2]:
        parameter.grad = torch.full_like(parameter, 3.0)
    before = everything(model)
    fisher(model, F.cross_entropy, (x, Y), labels=labels)
    assert_same(model, before)


def test_nothing_changes_either_when_the_forward_pass_fails() -> None:
    model = seeded(lambda: cnn().train())
    before = everything(model)
    with pytest.raises(ConditioningError, match=r"pass in torch\.float64 failed with RuntimeError: .*dtype=None"):
        fisher(model, F.cross_entropy, (normal(N, 2, 5, 5), Y))
    assert_same(model, before)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = mlp(), None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.net(x)
        return self.last


def test_what_a_module_remembers_of_its_last_pass_is_not_ours() -> None:
    model, x = seeded(Remembers), normal(N, 4)
    last = model(x)
    fisher(model, F.cross_entropy, (x, Y))
    assert model.last is last


class Center(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(0))


class CenteredByHand(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), norm or Center(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


@pytest.mark.parametrize("gain", [1.0, 0.0])
@pytest.mark.parametrize("make", [CenteredByHand, lambda: CenteredByHand(nn.BatchNorm1d(5))], ids=["own", "torch"])
def test_batch_statistics_are_found_out_whoever_takes_them(make: Callable[[], nn.Module], gain: float) -> None:
    model, x = seeded(make), normal(N, 4)
    nn.init.constant_(model.norm.weight, gain)  # behind a gain of zero the output does not depend on the batch
    net, x64, parameters = literal(model, x)
    expected = oracle.second_moment(net, F.cross_entropy, x64, Y, parameters)
    found = fisher(model, F.cross_entropy, (x, Y), labels="true")
    assert torch.allclose(found.matrix, expected, rtol=1e-9, atol=1e-15)


class Unbatchable(torch.autograd.Function):
    """The identity, in a form that vmap does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.from_numpy(g.numpy().copy())


class WithUnbatchable(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.first, self.last, self.mode = nn.Linear(4, 5), nn.Linear(5, 3), mode
        self.norm = nn.BatchNorm1d(5) if mode == "batch" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(Unbatchable.apply(self.norm(self.first(x)))))


@pytest.mark.parametrize("mode", ["plain", "batch"])
def test_operations_that_cannot_be_batched_are_done_one_at_a_time(mode: str) -> None:
    model, x = seeded(lambda: WithUnbatchable(mode)), normal(N, 4)
    net, x64, parameters = literal(model, x)
    expected = oracle.fisher(net, F.cross_entropy, x64, parameters, oracle.classes)
    assert torch.allclose(fisher(model, F.cross_entropy, (x, Y)).matrix, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", ["mlp", "cnn, training mode"])
def test_pieces_do_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, x = NETWORKS[name]
    model = seeded(make)
    whole = fisher(model, F.cross_entropy, (x, Y)).matrix
    for rows in (1, 2, 5):
        size = sum(p.numel() for p in model.parameters())
        monkeypatch.setattr("gyroscope.conditioning.fisher._ROWS", rows * size)
        assert torch.allclose(fisher(model, F.cross_entropy, (x, Y)).matrix, whole, rtol=1e-10, atol=1e-18)


def test_several_batches_are_one_where_samples_are_independent() -> None:
    model, x = seeded(mlp), normal(N, 4)
    whole = fisher(model, F.cross_entropy, (x, Y))
    parts = fisher(model, F.cross_entropy, [(x[:3], Y[:3]), (x[3:], Y[3:])])
    assert parts.samples == N
    assert torch.allclose(parts.matrix, whole.matrix, rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize("make", [lambda: nn.Dropout(0.5), lambda: nn.RReLU()], ids=["dropout", "rrelu"])
def test_random_networks_are_refused_unless_they_are_not_random(make: Callable[[], nn.Module]) -> None:
    model, x = seeded(lambda: nn.Sequential(nn.Linear(4, 5), make(), nn.Linear(5, 3))), normal(N, 4)
    before = everything(model)
    with pytest.raises(ConditioningError, match="random numbers"):
        fisher(model, F.cross_entropy, (x, Y))
    assert_same(model, before)
    assert fisher(model.eval(), F.cross_entropy, (x, Y)).samples == N


def test_frozen_parameters_are_not_in_the_matrix() -> None:
    model, x = seeded(mlp), normal(N, 4)
    whole = fisher(model, F.cross_entropy, (x, Y))
    model[0].requires_grad_(False)
    rest = fisher(model, F.cross_entropy, (x, Y))
    assert rest.parameters == ("2.weight", "2.bias")
    assert list(rest.blocks) == ["2.weight"]
    assert torch.allclose(rest.matrix, whole.matrix[25:, 25:], rtol=1e-12, atol=1e-18)
    with pytest.raises(ConditioningError, match="requires gradients"):
        fisher(model, F.cross_entropy, (x, Y), layers="0.weight")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_shared_weights_are_counted_once_with_both_their_uses() -> None:
    model, x = seeded(Tied), normal(N, 4)
    net, x64, parameters = literal(model, x)
    found = fisher(model, F.cross_entropy, (x, Y))
    assert found.parameters == ("first.weight", "first.bias", "second.bias", "last.weight", "last.bias")
    assert list(found.blocks) == ["first.weight", "last.weight"]
    expected = oracle.fisher(net, F.cross_entropy, x64, parameters, oracle.classes)
    assert torch.allclose(found.matrix, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_networks_are_run_in_float64(dtype: torch.dtype) -> None:
    model, x = seeded(mlp).to(dtype), normal(N, 4).to(dtype)
    net, x64, parameters = literal(model, x)
    expected = oracle.fisher(net, F.cross_entropy, x64, parameters, oracle.classes)
    assert torch.allclose(fisher(model, F.cross_entropy, (x, Y)).matrix, expected, rtol=1e-9, atol=1e-15)
    own = fisher(model, F.cross_entropy, (x, Y), dtype=None)
    assert own.matrix.dtype == torch.float64
    assert (own.matrix - expected).norm() < 20 * torch.finfo(dtype).eps * expected.norm()
    assert not torch.allclose(own.matrix, expected, rtol=1e-9, atol=1e-15)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, *, shift: Tensor, scale: float) -> Tensor:
        return self.net(scale * x + shift)


def test_inputs_may_be_named_and_need_not_all_be_samples() -> None:
    model, x, shift = seeded(Named), normal(N, 4), normal(4, seed=5)
    found = fisher(model, F.cross_entropy, ({"x": x, "shift": shift, "scale": 2.0}, Y))
    expected = fisher(model.net, F.cross_entropy, (2 * x.double() + shift.double(), Y))
    assert torch.allclose(found.matrix, expected.matrix, rtol=1e-9, atol=1e-15)


def test_wrapped_networks_are_those_inside() -> None:
    model, x = seeded(mlp), normal(N, 4)
    expected = fisher(model, F.cross_entropy, (x, Y))
    for wrapped in (torch.compile(model, backend="eager"), nn.DataParallel(model)):
        found = fisher(wrapped, F.cross_entropy, (x, Y))
        assert found.parameters == expected.parameters
        # A data-parallel wrapper may have moved the network to a GPU.
        assert torch.allclose(found.matrix.cpu(), expected.matrix, rtol=1e-12, atol=1e-18)


def test_parametrized_weights_go_by_the_name_of_the_layer() -> None:
    model, x = seeded(lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))), normal(N, 4)
    net, x64, parameters = literal(model, x)
    expected = oracle.fisher(net, F.cross_entropy, x64, parameters, oracle.classes)
    found = fisher(model, F.cross_entropy, (x, Y))
    assert "0.weight" in found.parameters
    assert found.block("0.weight").shape == (12, 12)
    assert torch.allclose(found.matrix, expected, rtol=1e-9, atol=1e-15)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x


def test_a_network_without_layers_has_a_matrix_still() -> None:
    x, y = normal(N, 1), normal(N, 1, seed=3)
    found = fisher(Bare(), F.mse_loss, (x, y), labels="true")
    assert found.blocks == {}
    expected = (2 * (2 * x - y) * x).double().square().mean()
    assert float(found.matrix) == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(LayerError):
        fisher(Bare(), F.mse_loss, (x, y), blocks=True)


def test_parameters_that_are_never_used_have_zeros() -> None:
    for make, x in (NETWORKS["mlp"], NETWORKS["cnn, training mode"]):
        model = seeded(make)
        model.unused = nn.Linear(2, 2)
        model.forward = functools.partial(nn.Sequential.forward, model[: len(model) - 1])
        found = fisher(model, F.cross_entropy, (x, Y))
        at = found.slices["unused.weight"]
        assert found.matrix[at].abs().max() == 0
        assert found.matrix[: at.start, : at.start].abs().max() > 0


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "labels": ({"labels": "fake"}, "'model', 'sampled', 'true'"),
    "model": ({"model": F.relu}, "torch.nn.Module"),
    "batch": ({"batch": normal(3, 4)}, "pair"),
    "output": ({"model": nn.LSTM(4, 3)}, "must be one floating-point tensor"),
    "log-probabilities": ({"loss": F.nll_loss}, "log_softmax"),
    "loss": ({"loss": lambda o, y: o @ y, "labels": "true"}, "The loss failed with RuntimeError"),
    "loss that is not finite": ({"loss": lambda o, y: o.mean() / 0, "labels": "true"}, "The loss is -?inf"),
    "not finite": ({"batch": (normal(N, 4) * torch.inf, Y)}, "not finite"),
    "no loss": ({"loss": None}, r"`loss` must be a function of \(output, target\), got NoneType"),
    "labels in an array": ({"labels": np.array([1, 2])}, "'model', 'sampled', 'true'"),
    "dtype in words": ({"dtype": "float64"}, "`dtype` must be a floating-point torch.dtype.*got 'float64'"),
    "dtype of whole numbers": ({"dtype": torch.int32}, "`dtype` must be a floating-point torch.dtype"),
    "seed": ({"seed": "a"}, "`seed` must be a whole number"),
    "limit": ({"limit": None}, "`limit` must be a number of parameters > 0, got None"),
    "no values": ({"model": mlp().to("meta")}, "on the meta device"),
    "no samples": ({"batch": (normal(0, 4), Y[:0])}, "the batch is empty"),
    "no samples, true labels": ({"batch": (normal(0, 4), Y[:0]), "labels": "true"}, "the batch is empty"),
    "no classes": ({"model": nn.Sequential(mlp(1), nn.Flatten(0))}, r"\[samples, classes, ...\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_treated_is_refused_in_words(name: str) -> None:
    changed, message = BAD[name]
    arguments: dict[str, Any] = {"model": seeded(mlp), "loss": F.cross_entropy, "batch": (normal(N, 4), Y)} | changed
    model, loss, batch = (arguments.pop(key) for key in ("model", "loss", "batch"))
    with pytest.raises(ConditioningError, match=message):
        fisher(model, loss, batch, **arguments)


def test_copies_of_a_result_are_plain_data() -> None:
    found = fisher(seeded(mlp), F.cross_entropy, (normal(N, 4), Y))
    assert isinstance(copy.deepcopy(found), Exact)
    assert "matrix" not in repr(found)


def test_few_and_many_gradients_give_the_same_from_either_side() -> None:
    model, x = seeded(lambda: nn.Linear(4, 3, bias=False)), normal(N, 4)
    for n in (1, 3, 4, 5, N):
        found = fisher(model, F.cross_entropy, (x[:n], Y[:n]))
        net, x64, parameters = literal(model, x[:n])
        expected = oracle.fisher(net, F.cross_entropy, x64, parameters, oracle.classes)
        assert torch.allclose(found.matrix, expected, rtol=1e-10, atol=1e-16)
        for layer in (None, "weight"):
            values = np.linalg.eigvalsh(expected.numpy())[::-1]
            assert found.spectrum(layer).dimension == 12
            assert np.allclose(found.spectrum(layer).full(), values, rtol=1e-10, atol=1e-15)
            assert found.spectrum(layer).rank == min(2 * n, 8)


@pytest.mark.parametrize("device", DEVICES)
def test_devices_agree(case: tuple[nn.Module, Tensor], device: str) -> None:
    model, x = case
    for labels in ("model", "true"):
        expected = fisher(model.cpu(), F.cross_entropy, (x, Y), labels=labels)
        found = fisher(model.to(device), F.cross_entropy, (x, Y), labels=labels)
        assert found.matrix.device.type == device
        assert torch.allclose(found.matrix.cpu(), expected.matrix, rtol=1e-9, atol=1e-12)
        assert found.spectrum().largest == pytest.approx(expected.spectrum().largest, rel=1e-9)
