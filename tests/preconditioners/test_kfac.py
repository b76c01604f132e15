"""K-FAC's steps against Kronecker products formed literally."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from gyroscope.conditioning.fisher import fisher
from gyroscope.control.preconditioners.kfac import KFAC, eigen_of
from gyroscope.errors import DynamicsError


def double(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sgd(net, lr=1.0, **options):
    return torch.optim.SGD(net.parameters(), lr=lr, **options)


def flat(layer):
    """[W b], or W, as a matrix."""
    W = layer.weight.detach().flatten(1)
    return W.clone() if layer.bias is None else torch.cat([W, layer.bias.detach().unsqueeze(1)], 1)


def flat_gradient(layer):
    W = layer.weight.grad.flatten(1)
    return W.clone() if layer.bias is None else torch.cat([W, layer.bias.grad.unsqueeze(1)], 1)


def literal(A, S, G, damping, tikhonov):
    """The direction by inverting a matrix of all parameters."""
    eye_a, eye_s = (torch.eye(len(one), dtype=torch.float64) for one in (A, S))
    if tikhonov == "exact":
        curvature = torch.kron(A, S) + damping * torch.eye(len(A) * len(S), dtype=torch.float64)
    else:
        pi = ((A.trace() / len(A)) / (S.trace() / len(S))) ** 0.5
        curvature = torch.kron(A + pi * damping**0.5 * eye_a, S + damping**0.5 / pi * eye_s)
    vec = G.T.reshape(-1)  # columns after one another, as in A ⊗ S
    return torch.linalg.solve(curvature, vec).reshape(G.shape[1], G.shape[0]).T


def sample_gradients(net, layer, x, y, loss):
    """Ds at the output of a layer, one sample at a time: a list of [positions, outputs]."""
    found = []
    for one, target in zip(x, y, strict=True):
        outputs = []
        handle = layer.register_forward_hook(lambda *given, seen=outputs: seen.append(given[2]))
        value = loss(net(one.unsqueeze(0)), target.unsqueeze(0))
        handle.remove()
        g = torch.autograd.grad(value, outputs[0])[0]
        g = g.movedim(1, -1) if isinstance(layer, nn.Conv2d) else g
        found.append(g.reshape(-1, g.shape[-1]))
    return found


def activations(layer, inputs):
    """ā at every position of every sample: [rows, inputs + 1]."""
    if isinstance(layer, nn.Conv2d):
        patches = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        rows = patches.transpose(1, 2).reshape(-1, patches.shape[1])
    else:
        rows = inputs.reshape(-1, inputs.shape[-1])
    return rows if layer.bias is None else torch.cat([rows, torch.ones(len(rows), 1, dtype=rows.dtype)], 1)


NETS = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (9, 3)),
    "no bias": (lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)), (9, 3)),
    "tokens": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 2)), (6, 2, 3)),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)),
        (5, 2, 3, 2),
    ),
    "dilated": (
        lambda: nn.Sequential(nn.Conv2d(2, 2, (1, 2), dilation=2, bias=False), nn.Flatten(), nn.Linear(6, 2)),
        (5, 2, 3, 3),
    ),
}


@pytest.mark.parametrize("tikhonov", ["factored", "exact"])
@pytest.mark.parametrize("kind", NETS)
def test_a_step_is_the_inverse_of_the_damped_kronecker_product_times_the_gradient(kind, tikhonov):
    torch.manual_seed(0)
    make, shape = NETS[kind]
    net, x, y = make().double(), double(*shape), torch.arange(shape[0]) % 2
    layer, last = net[0], net[-1]
    net[1].inplace = False  # so that autograd shows the gradients in front of it
    Ds = {one: sample_gradients(net, one, x, y, F.cross_entropy) for one in (layer, last)}
    net[1].inplace = kind == "tokens"
    with torch.no_grad():
        inputs = {layer: x, last: net[:-1](x)}
    optimizer = KFAC(sgd(net), net, labels="true", damping=0.3, tikhonov=tikhonov)
    before = {one: flat(one) for one in (layer, last)}
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    for one in (layer, last):
        a = activations(one, inputs[one])
        A = a.T @ a / len(a)
        # (1/N) Σ over samples and positions: T · E[Ds Dsᵀ], the positions' number with S.
        S = sum(g.T @ g for g in Ds[one]) / len(Ds[one])
        P = literal(A, S, flat_gradient(one), 0.3, tikhonov)
        torch.testing.assert_close(before[one] - flat(one), P, rtol=1e-9, atol=1e-12)


def exact_noise(output, generator):
    """Labels of a squared error's model with the second moment of their noise exactly σ²I, σ² = D/2."""
    n, d = output.shape
    noise = (d / 2 * d) ** 0.5 * torch.eye(d, dtype=output.dtype).repeat(n // d, 1)
    return output.detach() + noise


def test_a_step_on_a_linear_least_squares_layer_is_the_exact_natural_gradient():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 2)).double()
    x, y = double(12, 3) + 2, double(12, 2, seed=1)
    exact = fisher(net, F.mse_loss, (x, y))
    optimizer = KFAC(sgd(net), net, F.mse_loss, labels=exact_noise, damping=0.0)
    before = torch.cat([p.detach().flatten().clone() for p in net.parameters()])
    F.mse_loss(net(x), y).backward()
    gradient = torch.cat([p.grad.flatten() for p in net.parameters()])
    optimizer.step()
    after = torch.cat([p.detach().flatten() for p in net.parameters()])
    torch.testing.assert_close(before - after, torch.linalg.solve(exact.matrix, gradient), rtol=1e-9, atol=1e-12)


def test_least_squares_is_solved_in_one_step():
    net = nn.Linear(3, 2).double()
    x, y = double(12, 3), double(12, 2, seed=1)
    optimizer = KFAC(sgd(net), net, F.mse_loss, labels=exact_noise, damping=0.0)
    F.mse_loss(net(x), y).backward()
    optimizer.step()
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(12, 1, dtype=x.dtype)], 1), y).solution.T
    torch.testing.assert_close(flat(net), solution, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("tokens", [False, True])
def test_sampled_labels_give_the_fisher_matrix_and_not_the_empirical_one(tokens):
    """Softmax regression at W = 0: S = (I − 11ᵀ/c)/c, whatever the true labels; at every position of a sequence."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 3)

        def forward(self, x):
            return self.head(x).movedim(-1, 1)

    net = Tokens()
    for p in net.parameters():
        nn.init.zeros_(p)
    x = torch.randn(*((1000, 4) if tokens else (4000,)), 2)
    optimizer = KFAC(sgd(net), net, F.cross_entropy)
    F.cross_entropy(net(x), torch.zeros(x.shape[:-1], dtype=torch.int64)).backward()
    optimizer.step()
    S = optimizer._statistics.state(0)["S"]
    torch.testing.assert_close(S, (torch.eye(3) - 1 / 3) / 3, rtol=0, atol=0.01)


def test_averages_and_decompositions_follow_a_literal_loop():
    torch.manual_seed(2)
    net = nn.Linear(3, 2).double()
    batches = [(double(8, 3, seed=s), double(8, 2, seed=10 + s)) for s in range(7)]
    twin = copy.deepcopy(net)
    optimizer = KFAC(sgd(net, 0.1), net, labels="true", damping=0.1, decay=0.6, every=2, decompose_every=3)
    A = S = eigen = None
    t = 0
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        twin.zero_grad()
        output = twin(x)
        output.retain_grad()
        F.mse_loss(output, y).backward()
        if step % 2 == 0:
            t += 1
            w = max(1 / t, 0.4)
            a, g = activations(twin, x), output.grad * len(x)
            A = a.T @ a / 8 if A is None else (1 - w) * A + w * a.T @ a / 8
            S = g.T @ g / 8 if S is None else (1 - w) * S + w * g.T @ g / 8
        if step % 3 == 0:
            eigen = eigen_of(A, S)
        P = eigen.solve(flat_gradient(twin), 0.1)
        with torch.no_grad():
            twin.weight -= 0.1 * P[:, :-1]
            twin.bias -= 0.1 * P[:, -1]
    torch.testing.assert_close(flat(net), flat(twin), rtol=1e-10, atol=1e-12)


class Twice(nn.Module):
    """One layer, used two times in a pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


def test_a_layer_that_is_used_twice_has_both_uses_in_its_factors():
    torch.manual_seed(4)
    net, x, y = Twice().double(), double(7, 3), double(7, 3, seed=1)
    twin = copy.deepcopy(net)
    optimizer = KFAC(sgd(net), net, labels="true", damping=0.1)
    F.mse_loss(net(x), y).backward()
    optimizer.step()
    first = twin.layer(x)
    hidden = torch.tanh(first)
    second = twin.layer(hidden)
    Ds = [g * 7 for g in torch.autograd.grad(F.mse_loss(second, y), (first, second))]
    a = torch.cat([activations(twin.layer, one.detach()) for one in (x, hidden)])
    torch.testing.assert_close(optimizer._statistics.state(0)["A"], a.T @ a / 14)
    torch.testing.assert_close(optimizer._statistics.state(0)["S"], sum(g.T @ g for g in Ds) / 7)


def test_drawn_labels_of_accumulated_passes_are_those_of_one_pass_over_all():
    torch.manual_seed(5)
    start = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = double(12, 3)
    found = []
    for parts in (1, 3):
        net = copy.deepcopy(start)
        optimizer = KFAC(sgd(net), net, F.mse_loss, labels=exact_noise)
        for part in x.chunk(parts):
            (net(part).square().mean() / parts).backward()
        optimizer.step()
        found.append(torch.cat([flat(net[0]).flatten(), flat(net[2]).flatten()]))
    torch.testing.assert_close(found[0], found[1])


def test_a_layer_with_factors_too_large_is_listed_and_passed_through():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    optimizer = KFAC(sgd(net), net, labels="true", largest=4)
    assert optimizer.layers == ("0", "1")
    net[0] = nn.Linear(4, 4)
    optimizer = KFAC(sgd(net), net, labels="true", largest=4)
    assert optimizer.layers == ("1",)
    assert optimizer.unsupported == {"0": "a factor would have 5 rows, and largest is 4"}


def test_clipping_bounds_the_squared_length_in_the_metric_and_leaves_short_steps_alone():
    torch.manual_seed(3)
    start = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = double(9, 3), double(9, 2, seed=1)
    moved = {}
    for clip in (None, 1e-4, 1e6):
        net = copy.deepcopy(start)
        optimizer = KFAC(sgd(net, 0.5), net, labels="true", damping=0.1, clip=clip)
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        moved[clip] = sum(
            float(0.5 * ((flat(a) - flat(b)) * flat_gradient(b)).sum()) for a, b in ((start[i], net[i]) for i in (0, 2))
        )
    assert moved[None] > 1e-3
    # At a step shortened by k both the length and the product are k times less: k ⟨P, ∇J⟩ η² with k² η² ⟨P, ∇J⟩ = clip.
    assert moved[1e-4] == pytest.approx((1e-4 * moved[None]) ** 0.5, rel=1e-9)
    assert moved[1e6] == pytest.approx(moved[None], rel=1e-12)


def test_undamped_directions_that_the_curvature_does_not_see_are_left_alone():
    eigen = eigen_of(torch.diag(torch.tensor([2.0, 0.0])), torch.diag(torch.tensor([1.0, 0.0])))
    P = eigen.solve(torch.ones(2, 2), 0.0)
    torch.testing.assert_close(P, torch.tensor([[0.5, 0.0], [0.0, 0.0]]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": -1.0}, "`damping` must be a finite number ≥ 0, got -1.0"),
        ({"decay": 1.0}, "`decay` must be a number ≥ 0 and < 1, got 1.0"),
        ({"biases": "no"}, "`biases` must be True or False, got 'no'"),
        ({"every": 0}, "`every` must be .* got 0"),
        ({"decompose_every": 1.5}, "`decompose_every` must be .* got 1.5"),
        ({"tikhonov": "other"}, "`tikhonov` must be one of 'factored', 'exact', got 'other'"),
        ({"clip": float("nan")}, "`clip` must be a finite number ≥ 0, got nan"),
        ({"largest": 0}, "`largest` must be .* got 0"),
        ({"labels": "sampled"}, "`loss` must be the function .*got None"),
        ({"labels": "other"}, "`labels` must be 'sampled', 'true', .*got 'other'"),
        ({"labels": "sampled", "loss": F.l1_loss}, "l1_loss"),
    ],
)
def test_bad_options_are_refused_by_name(options, message):
    net = nn.Linear(2, 2)
    with pytest.raises(DynamicsError, match=message):
        KFAC(sgd(net), net, **{"labels": "true", **options})


def test_with_a_clip_networks_train_at_rates_that_they_are_lost_at_without():
    def loss_after(clip, lr):
        torch.manual_seed(0)
        x = torch.randn(256, 6)
        y = (x[:, :3].argmax(1) + (x[:, 3] > 0)) % 3
        net = nn.Sequential(
            nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
        )
        inner = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
        optimizer = KFAC(inner, net, F.cross_entropy, clip=clip, damping=1e-2)
        for step in range(40):
            some = torch.arange(32) + 32 * (step % 8)
            optimizer.zero_grad()
            F.cross_entropy(net(x[some]), y[some]).backward()
            optimizer.step()
        return F.cross_entropy(net(x), y).item()

    assert max(loss_after(1e-3, lr) for lr in (0.05, 0.3)) < 0.6
    assert not loss_after(None, 0.3) < 1.1  # ln 3 is that of guessing; not a number counts as well


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_is_asked_once_whether_it_is_a_mean_and_then_called_once_a_step(reduction):
    calls = []

    def loss(output, target):
        calls.append(len(output))
        return F.cross_entropy(output, target, reduction=reduction)

    def factors(given):
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        x, y = torch.randn(8, 3), torch.arange(8) % 2
        optimizer = KFAC(torch.optim.SGD(net.parameters(), lr=0.1), net, given, labels=lambda output, generator: y)
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        return optimizer._statistics.state(0)["S"]

    assert torch.allclose(factors(loss), factors(F.cross_entropy), atol=1e-6)
    assert calls[-3:] == [8, 8, 8]
    assert len(calls) <= 7


@pytest.mark.parametrize("first", [0.0, float("nan"), float("inf")], ids=["zero", "nan", "inf"])
def test_a_sum_is_known_for_one_after_a_first_loss_that_told_nothing(first):
    x, y = double(8, 3), torch.arange(8) % 2

    def factor(asked):
        torch.manual_seed(0)
        net, scale = nn.Linear(3, 2).double(), [first]

        def loss(output, target):
            return F.cross_entropy(output, target, reduction="sum") * scale[0]

        if not asked:
            loss.reduction = "sum"
        optimizer = KFAC(sgd(net, 0.0), net, loss, labels=lambda output, generator: y)
        for scale[0] in (first, 1.0, 1.0):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
        return optimizer._statistics.state(0)["S"]

    assert factor(asked=False).abs().max() > 0
    torch.testing.assert_close(factor(asked=True), factor(asked=False))
