"""The quasi-diagonal preconditioner against equation 10, written out."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from gyroscope.conditioning.outliers import outliers
from gyroscope.control.preconditioners import affine_layers
from gyroscope.control.preconditioners.affine_layers import Place, joined, split
from gyroscope.control.preconditioners.quasi_diagonal import QuasiDiagonal, quasi_diagonal
from gyroscope.control.preconditioners.running import Spreads
from gyroscope.errors import DynamicsError


def double(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sgd(net, lr=1.0, **options):
    return torch.optim.SGD(net.parameters(), lr=lr, **options)


def flat(tensors):
    return torch.cat([t.detach().flatten(1) if t.dim() > 1 else t.detach().unsqueeze(1) for t in tensors], 1)


def literal(G, m, variance, *, biased=True):
    """[RRᵀ]⁻¹ of equation 10, or its block of the weights, inverted as a matrix of all parameters."""
    inner = torch.diag(variance) + torch.outer(m, m)
    if biased:
        inner = torch.cat([torch.cat([inner, m[:, None]], 1), torch.cat([m, m.new_ones(1)])[None]], 0)
    curvature = torch.kron(inner, torch.eye(len(G), dtype=G.dtype))
    return torch.linalg.solve(curvature, G.T.reshape(-1)).reshape(G.shape[1], G.shape[0]).T


@pytest.mark.parametrize("biased", [True, False])
def test_it_inverts_the_matrix_of_equation_10(biased):
    m, variance = 2 + double(4), double(4, seed=1).square() + 0.1
    G = double(3, 4 + biased, seed=2)
    found = joined(quasi_diagonal(split(G, biased), m, variance))
    torch.testing.assert_close(found, literal(G, m, variance, biased=biased), rtol=1e-10, atol=1e-12)


def test_it_is_gradient_descent_on_the_weights_of_equation_9():
    """Step W̃ and b̃ by their own gradients, and go back to W and b."""
    layer, x, y = nn.Linear(3, 2).double(), 4 + double(20, 3), double(20, 2, seed=1)
    m, variance = x.mean(0), x.var(0, correction=0)
    before = flat(layer.parameters())
    W = (layer.weight * variance.sqrt()).detach().requires_grad_()
    b = (layer.bias + layer.weight @ m).detach().requires_grad_()
    F.mse_loss((x - m) / variance.sqrt() @ W.T + b, y).backward()
    W, b = W.detach() - 0.1 * W.grad, b.detach() - 0.1 * b.grad
    W = W / variance.sqrt()
    expected = torch.cat([W, (b - W @ m).unsqueeze(1)], 1)
    optimizer = QuasiDiagonal(sgd(layer, 0.1), layer, damping=0.0)
    F.mse_loss(layer(x), y).backward()
    optimizer.step()
    torch.testing.assert_close(flat(layer.parameters()), expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(before, expected)


CONVS = [
    {"padding": 1},
    {"padding": (2, 0), "stride": (2, 1), "dilation": (1, 2)},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": "same", "padding_mode": "circular"},
    {"padding": "same"},
    {},
]


def moments(place, x):
    mean, variance = place.pixel_moments(x)
    if isinstance(place.module, nn.Linear):
        return mean, variance
    windows = affine_layers.windows(place.module, mean)
    means, variances = affine_layers.patch_moments(torch.stack([mean, variance]).unsqueeze(1), windows)
    return means[0], variances[0]


@pytest.mark.parametrize("small", [0, 1 << 20])
@pytest.mark.parametrize("options", CONVS)
def test_moments_of_patches_are_those_of_all_patches(options, small, monkeypatch):
    monkeypatch.setattr(affine_layers, "_SMALL", small)
    conv = nn.Conv2d(2, 3, (3, 2), dtype=torch.float64, **options)
    x = 10 + 0.1 * double(4, 2, 5, 6)
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    padded = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
    patches = F.unfold(padded, conv.kernel_size, conv.dilation, 0, conv.stride).movedim(1, -1).flatten(0, 1)
    place = Place("", conv, True)
    mean, variance = moments(place, x)
    torch.testing.assert_close(mean, patches.mean(0))
    torch.testing.assert_close(variance, patches.var(0, correction=0), rtol=1e-9, atol=1e-12)
    homogeneous = torch.cat([patches, torch.ones(len(patches), 1, dtype=x.dtype)], 1)
    torch.testing.assert_close(place.second_moment(x), homogeneous.T @ homogeneous / len(patches))
    torch.testing.assert_close(place.second_moment(x[0]), place.second_moment(x[:1]))


def test_variances_of_uncentered_activations_keep_their_digits_in_float32():
    conv, linear = nn.Conv2d(1, 1, 1), nn.Linear(1, 1)
    x = 1000 + torch.randn(64, 1, 4, 4, dtype=torch.float64)
    for module, given in ((conv, x), (linear, x.reshape(-1, 1))):
        mean, variance = moments(Place("", module, True), given.float())
        assert variance.item() == pytest.approx(x.var(correction=0).item(), rel=1e-3)
        assert mean.item() == pytest.approx(x.mean().item(), rel=1e-6)


@pytest.mark.parametrize("labels", [None, "true"])
def test_a_step_of_a_convolution_follows_equation_10_on_patches(labels):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(36, 2)).double()
    x, y = 3 + double(5, 2, 3, 2), double(5, 2, seed=1)
    optimizer = QuasiDiagonal(sgd(net), net, labels=labels, damping=0.2)
    before = flat(net[0].parameters())
    hidden = net[0](x)
    output = net[1:](hidden)
    # Called in parts, the model is not seen; the step is of the pass below.
    (Ds,) = torch.autograd.grad(F.mse_loss(output, y) * 5, hidden)
    F.mse_loss(net(x), y).backward()
    optimizer.step()
    patches = F.unfold(x, 2, padding=1).movedim(1, -1).flatten(0, 1)
    variance = patches.var(0, correction=0)
    G = flat([net[0].weight.grad, net[0].bias.grad])
    P = literal(G, patches.mean(0), variance + 0.2 * variance.mean())
    if labels:
        S = Ds.movedim(1, -1).reshape(-1, 3).square().sum(0) / 5
        P = P / (S + 0.2 * S.mean()).unsqueeze(1)
    torch.testing.assert_close(before - flat(net[0].parameters()), P, rtol=1e-9, atol=1e-12)


def test_running_moments_are_those_of_a_mixture_of_batches():
    batches = [double(7, 3, seed=s) + s for s in range(5)]
    spread = Spreads([3], decay=0.7, like=batches[0])
    mean = second = None
    for t, batch in enumerate(batches, start=1):
        spread.update([batch.mean(0)], [batch.var(0, correction=0)])
        w = max(1 / t, 0.3)
        new = batch.mean(0), batch.square().mean(0)
        mean, second = new if t == 1 else ((1 - w) * mean + w * new[0], (1 - w) * second + w * new[1])
    torch.testing.assert_close(spread.mean, mean)
    torch.testing.assert_close(spread.variance, second - mean.square())


def test_layers_of_one_shape_are_stepped_as_each_alone_also_where_one_has_no_gradient():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))).double()
    optimizer = QuasiDiagonal(sgd(net), net, damping=0.3)
    x = 2 + double(9, 3)
    net(x).square().mean().backward()
    net[1].weight.grad = net[1].bias.grad = None
    before = [flat(layer.parameters()) for layer in net]
    with torch.no_grad():
        inputs = [x, net[0](x), net[:2](x)]
    optimizer.step()
    assert torch.equal(flat(net[1].parameters()), before[1])
    for i in (0, 2):
        variance = inputs[i].var(0, correction=0)
        G = flat([net[i].weight.grad, net[i].bias.grad])
        P = literal(G, inputs[i].mean(0), variance + 0.3 * variance.mean())
        torch.testing.assert_close(before[i] - flat(net[i].parameters()), P, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("labels", [None, "true"])
def test_passes_before_a_step_count_as_one_batch(labels):
    start = nn.Sequential(nn.Conv2d(1, 2, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)).double()
    x = 3 + double(8, 1, 2, 3)
    found = []
    for parts in (1, 4):
        net = copy.deepcopy(start)
        optimizer = QuasiDiagonal(sgd(net), net, labels=labels)
        for part in x.chunk(parts):
            net(part).square().mean().backward()
        optimizer.step()
        found.append(optimizer._statistics.state(0))
    for name in ("mean", "variance") if labels is None else ("mean", "variance", "slopes"):
        torch.testing.assert_close(found[0][name], found[1][name])
    assert found[1]["count"] == 1


class Stashing(nn.Module):
    """Gives one thing and keeps another, which the loss is of."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x):
        self.features = self.body(x)
        return self.head(self.features)


def test_a_loss_of_something_other_than_the_output_is_told_of_once_and_then_seen():
    net = Stashing().double()
    optimizer = QuasiDiagonal(sgd(net), net)
    net(double(6, 2))
    net.features.sum().backward()
    with pytest.warns(UserWarning, match="There are no statistics of the layers body"):
        optimizer.step()
    net(double(6, 2))
    net.features.sum().backward()
    optimizer.step()
    assert optimizer._statistics.known(0)
    assert not optimizer._statistics.known(1)


def test_activations_that_never_vary_do_not_move_and_do_no_harm():
    layer = nn.Linear(3, 2).double()
    x = double(10, 3) * torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    before = layer.weight.detach().clone()
    optimizer = QuasiDiagonal(sgd(layer), layer, damping=0.0)
    layer(x).square().mean().backward()
    optimizer.step()
    assert torch.isfinite(layer.weight).all()
    assert torch.equal(layer.weight[:, 1], before[:, 1])
    assert not torch.equal(layer.weight[:, 0], before[:, 0])


def test_uncentered_least_squares_converges_as_if_it_were_centered():
    """The outlier ν is what holds gradient descent back; equation 10 takes it away."""
    torch.manual_seed(1)
    x = 5 + double(50, 4)
    y = x @ double(4, 1, seed=2) + 1
    start = nn.Linear(4, 1).double()
    assert outliers(start, F.mse_loss, (x, y), "").nu > 90
    found = {}
    for name, lr in (("sgd", 2 / 220), ("quasi-diagonal", 0.4)):
        net = copy.deepcopy(start)
        optimizer = sgd(net, lr)
        if name != "sgd":
            optimizer = QuasiDiagonal(optimizer, net, damping=0.0)
        for _ in range(60):
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
        found[name] = loss.item()
    assert found["quasi-diagonal"] < 1e-6 < 1e-3 < found["sgd"]


def test_a_step_never_waits_for_the_device(monkeypatch):
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    optimizer = QuasiDiagonal(sgd(net, 0.1, momentum=0.9), net, labels="true")

    def refuse(*_):
        raise AssertionError("a value was read back")

    def train():
        optimizer.zero_grad()
        F.mse_loss(net(torch.ones(3, 1, 3, 3)), torch.ones(3, 2)).backward()
        optimizer.step()

    train()
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    train()


def test_a_loss_without_labels_is_refused():
    net = nn.Linear(2, 2)
    with pytest.raises(DynamicsError, match="labels='sampled'"):
        QuasiDiagonal(sgd(net), net, F.mse_loss)
    with pytest.raises(DynamicsError, match="`damping` must be a finite number ≥ 0, got inf"):
        QuasiDiagonal(sgd(net), net, damping=float("inf"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("constant", [slice(0, 1), slice(None)], ids=["one", "all"])
def test_weights_of_inputs_that_are_the_same_in_all_samples_are_left_where_they_are(dtype, damping, constant):
    # Seven times such a number over seven is another one, by rounding, and leaves a variance.
    torch.manual_seed(0)
    net = nn.Linear(3, 2, dtype=dtype)
    x = torch.randn(7, 3, dtype=dtype)
    x[:, constant] = torch.tensor([0.1, 0.7, -3.3], dtype=dtype)[constant]
    optimizer = QuasiDiagonal(torch.optim.SGD(net.parameters(), lr=0.01), net, damping=damping)
    before, bias = net.weight.detach().clone(), net.bias.detach().clone()
    net(x).square().mean().backward()
    optimizer.step()
    moved = (net.weight - before).abs()
    if damping == 0 or constant == slice(None):
        assert not moved[:, constant].any()
    assert moved.max() < 1
    assert not torch.equal(net.bias, bias)
