"""The Gauss-Newton norm of the weights beside the matrix itself, and beside the Jacobian by the inputs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gyroscope.conditioning.fisher import fisher
from gyroscope.errors import DynamicsError
from gyroscope.theory.batch_norm import BatchCenter
from gyroscope.theory.empirical_fisher import fisher_diagonal, per_example_gradients
from gyroscope.theory.jacobian import (
    estimated_jacobian_norm,
    gauss_newton_norm,
    jacobian_norm,
    kfac_norm,
    weight_degree,
)


def net(*sizes: int, relu: bool = True, bias: bool = False, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential()
    for i, (a, b) in enumerate(pairwise(sizes)):
        model.append(nn.Linear(a, b, bias=bias))
        if relu and i < len(sizes) - 2:
            model.append(nn.ReLU())
    return model.double()


def noise(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def whitened(n: int, size: int, sigma: float = 1.0) -> torch.Tensor:
    q, _ = torch.linalg.qr(noise(n, size))
    return q * n**0.5 * sigma


@pytest.mark.parametrize("bias", [False, True])
def test_the_norm_is_that_of_the_matrix_for_the_cross_entropy(bias):
    model, x = net(3, 4, 3, bias=bias), noise(6, 3)
    G = fisher(model, cross_entropy, (x, torch.zeros(6, dtype=torch.int64))).matrix
    w = flat(model)
    torch.testing.assert_close(gauss_newton_norm(model, x, hessian="softmax"), w @ G @ w)


def test_the_norm_is_that_of_the_matrix_for_squared_errors():
    model, x = net(3, 4, 2, bias=True), noise(6, 3)
    square = 0.0
    for one in x:
        rows = [torch.autograd.grad(z, model.parameters(), retain_graph=True) for z in model(one)]
        square += sum(float((torch.cat([g.flatten() for g in row]) @ flat(model)) ** 2) for row in rows)
    assert float(gauss_newton_norm(model, x)) == pytest.approx(square / 6)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_the_norm_of_a_bias_free_relu_network_is_the_squared_depth_times_that_of_its_outputs(depth):
    model, x = net(4, *[6] * (depth - 1), 3), noise(20, 4)
    outputs = model(x).detach().square().sum(1).mean()
    torch.testing.assert_close(gauss_newton_norm(model, x), depth**2 * outputs)
    jacobians = torch.stack([torch.autograd.functional.jacobian(model, one) for one in x])
    along = torch.einsum("noi,ni->no", jacobians, x).square().sum(1).mean()
    torch.testing.assert_close(gauss_newton_norm(model, x), depth**2 * along)
    assert weight_degree(model, x)[0] == pytest.approx(depth)


@pytest.mark.parametrize("sigma", [1.0, 0.3])
def test_on_whitened_inputs_it_is_the_jacobians_norm_for_linear_networks(sigma):
    model, x = net(4, 5, 6, 3, relu=False), whitened(30, 4, sigma)
    torch.testing.assert_close(gauss_newton_norm(model, x), 9 * sigma**2 * jacobian_norm(model, x))


def two_sided(depth: int, size: int = 4, width: int = 6) -> tuple[nn.Sequential, torch.Tensor]:
    """A ReLU network and inputs that fall into two of its linear pieces, isotropic on each.

    An orthonormal frame of vectors with equal components along a lies in one cone and its negative in another, if all
    units look nearly along a or −a.
    """
    model = net(size, *[width] * (depth - 1), 3, seed=3)
    along = torch.ones(size, dtype=torch.float64)
    sides = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(width)[:width, None]
    model[0].weight.data = sides * (along + 0.05 * noise(width, size))
    frame = torch.eye(size, dtype=torch.float64)
    return model, torch.cat([frame, -frame])


@pytest.mark.parametrize("depth", [2, 3])
def test_where_inputs_are_isotropic_on_each_linear_piece_it_is_the_jacobians_norm_for_relu_networks_too(depth):
    model, x = two_sided(depth)
    # The two sides differ, and on each all units agree about all inputs.
    active = torch.cat([model[:k](x) > 0 for k in range(2, len(model), 2)], dim=1)
    assert len({tuple(row) for row in active[:4].tolist()}) == len({tuple(row) for row in active[4:].tolist()}) == 1
    assert not torch.equal(active[0], active[4])
    torch.testing.assert_close(gauss_newton_norm(model, x), depth**2 * jacobian_norm(model, x) / 4)


def test_on_inputs_that_are_white_as_a_whole_alone_relu_networks_come_only_near_it():
    model, x = net(6, 12, 4), whitened(400, 6)
    ratio = float(gauss_newton_norm(model, x) / (4 * jacobian_norm(model, x)))
    assert abs(ratio - 1) > 1e-3
    assert 0.5 < ratio < 2


def test_biases_break_the_proportion():
    assert weight_degree(net(4, 6, 3, bias=True), noise(20, 4))[1] > 0.01


def test_under_k_fac_a_linear_network_has_the_depth_times_the_norm_of_its_outputs():
    model, x = net(4, 5, 3, 2, relu=False), whitened(30, 4)
    weights = [layer.weight.detach() for layer in model]
    total, before = torch.zeros((), dtype=torch.float64), x
    for i, w in enumerate(weights):
        after = torch.eye(2, dtype=torch.float64)
        for later in reversed(weights[i + 1 :]):
            after = after @ later
        total += kfac_norm(w, before.T @ before / 30, after.T @ after)
        before = before @ w.T
    torch.testing.assert_close(total, 3 * model(x).detach().square().sum(1).mean())
    torch.testing.assert_close(total, 3 * jacobian_norm(model, x))


def test_the_exact_norm_is_that_of_jacobians_taken_one_by_one():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GELU(), nn.Dropout(), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    model.eval()
    x = noise(3, 1, 4, 4)
    literal = sum(float(torch.autograd.functional.jacobian(model, one[None]).square().sum()) for one in x) / 3
    assert float(jacobian_norm(model, x)) == pytest.approx(literal)


def test_the_estimate_is_within_its_errors_of_the_exact_norm():
    model, x = net(4, 16, 10, bias=True), noise(8, 4)
    exact = float(jacobian_norm(model, x))
    errors = []
    for seed in range(20):
        found = estimated_jacobian_norm(model, x, probes=40, seed=seed)
        assert 0 < found.error < 0.2 * exact
        errors.append((found.value - exact) / found.error)
    scores = torch.tensor(errors)
    assert float(scores.square().mean().sqrt()) == pytest.approx(1.0, abs=0.45)
    assert abs(float(scores.mean())) < 0.7


def test_running_statistics_stay_as_they_are():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    before = {name: b.clone() for name, b in model.named_buffers()}
    gauss_newton_norm(model, noise(8, 3))
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_the_estimate_leaves_the_model_alone_and_is_the_same_for_the_same_seed():
    model, x = net(4, 6, 3), noise(8, 4)
    assert estimated_jacobian_norm(model, x, seed=1) == estimated_jacobian_norm(model, x, seed=1)
    assert estimated_jacobian_norm(model, x, seed=1) != estimated_jacobian_norm(model, x, seed=2)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: jacobian_norm(nn.BatchNorm1d(3), x), "mixes the samples of a batch. Put the model into eval mode"),
        (lambda x: estimated_jacobian_norm(nn.Dropout(), x), "drops units at random"),
        (lambda x: estimated_jacobian_norm(nn.Linear(3, 2), x, probes=1), "`probes` must .* got 1"),
        (lambda x: jacobian_norm(nn.Linear(3, 2), x, limit=5), "have 24 elements, above `limit` = 5"),
        (lambda x: jacobian_norm(nn.Flatten(0), x), "must return one tensor"),
        (lambda x: gauss_newton_norm(nn.Linear(3, 2), x, hessian="mse"), "`hessian` must .* got 'mse'"),
        (lambda x: gauss_newton_norm(nn.ReLU(), x), "No parameter of `model` requires a gradient"),
        (lambda x: kfac_norm(x, torch.eye(4), torch.eye(4)), r"must have shapes \[o, i\]"),
    ],
)
def test_what_has_no_jacobian_of_one_sample_is_refused(call, says):
    with pytest.raises(DynamicsError, match=says):
        call(torch.ones(4, 3))


def test_outputs_that_are_all_zero_have_no_degree():
    model = net(3, 2)
    with pytest.raises(DynamicsError, match="All outputs are zero"):
        weight_degree(model, torch.zeros(4, 3, dtype=torch.float64))


class Counting(nn.Module):
    """Counts its passes in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.linear(x)


class Dropping(nn.Linear):
    """Drops units whatever its mode."""

    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x))


OF_SAMPLES = {
    "jacobian_norm": jacobian_norm,
    "estimated_jacobian_norm": estimated_jacobian_norm,
    "fisher_diagonal": fisher_diagonal,
    "per_example_gradients": lambda model, x: per_example_gradients(
        model, cross_entropy, x, torch.zeros(len(x)).long()
    ),
}


@pytest.mark.parametrize("function", OF_SAMPLES.values(), ids=OF_SAMPLES)
def test_what_is_of_single_samples_refuses_layers_that_mix_them_or_draw_and_leaves_the_model_as_it_was(function):
    x = torch.randn(5, 3)
    centered = nn.Sequential(nn.Linear(3, 4), BatchCenter(4), nn.Linear(4, 2))
    with pytest.raises(DynamicsError, match=r"undefined because 1 \(BatchCenter\) mixes the samples of a batch"):
        function(centered, x)
    assert not centered[1].running_mean.any()
    dropping, before = Dropping(3, 2), torch.get_rng_state()
    with pytest.raises(DynamicsError, match="random"):
        function(dropping, x)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(DynamicsError, match="has no values yet"):
        function(nn.LazyLinear(2), x)
    with pytest.raises(DynamicsError, match=r"`inputs` must be .*, got a list"):
        function(nn.Linear(3, 2), x.tolist())
    with pytest.raises(DynamicsError, match="failed with RuntimeError"):
        function(nn.Linear(4, 2), x)
    counting = Counting()
    function(counting, x)
    assert counting.passes == 0


@pytest.mark.parametrize(
    "function", [jacobian_norm, gauss_newton_norm, lambda net, x: estimated_jacobian_norm(net, x).value]
)
def test_norms_are_the_same_within_inference_mode(function):
    torch.manual_seed(0)
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    outside = function(net, x)
    with torch.inference_mode():
        assert function(net, x.clone()) == outside
