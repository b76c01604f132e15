"""Corners where weights are used, batches are given and passes fail in unusual ways."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import gyroscope
from gyroscope.errors import ConditioningError
from oracles.conditioning import Literal, Tape, agree, agree_layer, agree_weight

NONE = torch.zeros(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def drawn(*s: int) -> Tensor:
    return torch.randn(*s, dtype=torch.float64)


def square(o: Any, _: Any) -> Tensor:
    o = o if isinstance(o, Tensor) else o[0]
    return ((o - 0.3) * torch.linspace(0.5, 1.5, o.shape[-1], dtype=o.dtype)).square().mean()


def analysed(net: nn.Module, x: Any, **g: Any) -> Any:
    return gyroscope.condition(net, square, (x, NONE), reduction="mean", spectra=True, **g)


class Does(nn.Module):
    def __init__(self, forward: Any, **parts: Any) -> None:
        super().__init__()
        self.does = forward
        for name, part in parts.items():
            setattr(self, name, part)
        self.double()

    def forward(self, *a: Any) -> Any:
        return self.does(self, *a)


class Weight(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(drawn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).tanh()


def test_layers_within_a_reentrant_checkpoint_are_read() -> None:
    inner, a, b = nn.Sequential(nn.Linear(6, 7), nn.Tanh()), nn.Linear(5, 6), nn.Linear(7, 3)
    net = Does(lambda m, x: m.b(checkpoint(m.inner, m.a(x), use_reentrant=True)), a=a, inner=inner, b=b)
    x, tape = drawn(9, 5), Tape()
    hs = [tape.watch(n, m) for n, m in (("a.weight", a), ("inner.0.weight", inner[0]), ("b.weight", b))]
    tape.backward(square(b(inner(a(x))), None))
    for h in hs:
        h.remove()
    net.zero_grad()
    agree(analysed(net, x), tape)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("kind", ["functional", "attention"])
def test_a_functional_use_within_a_checkpoint_is_read(kind: str) -> None:
    if kind == "functional":
        inner: Any = Weight(6, 6)
    else:
        at = nn.MultiheadAttention(6, 2, batch_first=True)
        inner = Does(lambda m, x: m.at(x, x, x, need_weights=False)[0], at=at)
    net = Does(
        lambda m, x: m.b(checkpoint(m.inner, m.a(x), use_reentrant=False)),
        a=nn.Linear(6, 6),
        inner=inner,
        b=nn.Linear(6, 3),
    )
    plain = Does(lambda m, x: m.b(m.inner(m.a(x))), a=net.a, inner=inner, b=net.b)
    x = drawn(2, 5, 6)
    one, two = analysed(plain, x), analysed(net, x)
    assert one.layers == two.layers
    for a, b in zip(one.entries, two.entries, strict=True):
        assert (a.lambda_x, a.lambda_g, a.samples) == pytest.approx((b.lambda_x, b.lambda_g, b.samples), rel=1e-12)


@pytest.mark.parametrize("batches", [1, 3])
def test_an_embedding_with_sparse_gradients_is_read(batches: int) -> None:
    net = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)).double()
    x = torch.randint(9, (6,))
    found = gyroscope.condition(net, square, [(x, NONE)] * batches, reduction="mean")
    square(net(x), None).backward()
    agree_weight(found["0.weight"], net[0].weight, net[0].weight.grad.to_dense())


def test_gradients_taken_within_the_forward_pass_are_not_those_of_the_loss() -> None:
    a, b = nn.Linear(4, 5), nn.Linear(5, 1)

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(m.b(m.a(x).tanh()).sum(), x, create_graph=True)[0]

    net, x = Does(forward, a=a, b=b), drawn(9, 4)
    found = analysed(net, x)
    outputs: list[Tensor] = []
    a.register_forward_hook(lambda m, args, h: outputs.append(h))
    (g,) = torch.autograd.grad(square(net(x), None), outputs)
    agree_layer(found, "a.weight", Literal(x, 9 * g))


def test_gradients_without_a_graph_within_the_forward_pass() -> None:
    a = nn.Linear(4, 3)

    def forward(m: Any, x: Tensor) -> Tensor:  # an adversarial example: one step up the gradient of the input
        y = x.detach().requires_grad_()
        return m.a(x + torch.autograd.grad(m.a(y).square().sum(), y)[0].sign())

    net, x = Does(forward, a=a), drawn(9, 4)
    assert analysed(net, x)["a.weight"].samples == 9


def test_a_batch_that_does_not_use_a_layer_adds_zero_to_its_gradient() -> None:
    net = Does(lambda m, x, which: (m.a if which else m.b)(x), a=nn.Linear(4, 3), b=nn.Linear(4, 3))
    x = [drawn(6, 4) for _ in range(4)]
    use = [1, 0, 0, 1]
    found = gyroscope.condition(
        net, square, [((one, w), NONE) for one, w in zip(x, use, strict=True)], reduction="mean"
    )
    sum(square(net(one, w), None) for one, w in zip(x, use, strict=True)).div(4).backward()
    agree_weight(found["a.weight"], net.a.weight, net.a.weight.grad)
    agree_weight(found["b.weight"], net.b.weight, net.b.weight.grad)


def test_an_empty_batch_is_refused() -> None:
    net = nn.Linear(4, 3)
    with pytest.raises(ConditioningError):
        gyroscope.condition(net, lambda o, t: o.sum(), (torch.zeros(0, 4), torch.zeros(0, 3)))


def test_an_empty_batch_in_a_stream_is_refused() -> None:
    net, x, y = nn.Linear(4, 3), torch.randn(6, 4), torch.randn(6, 3)
    with pytest.raises(ConditioningError, match="empty"):
        gyroscope.condition(net, lambda o, t: (o * t).sum(), [(x, y), (x[:0], y[:0])])


def test_a_loss_that_is_not_finite_is_refused_without_a_warning() -> None:
    with pytest.raises(ConditioningError, match="loss is nan"):
        gyroscope.condition(nn.Linear(4, 3), lambda o, t: o.mean() * math.nan, (torch.randn(6, 4), torch.randn(6, 3)))


def test_a_failing_backward_pass_is_told_in_our_words() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = x.clone()
        h = m.f(x)
        x.add_(1)
        return m.b(h + x)

    net = Does(forward, f=nn.Linear(4, 4).requires_grad_(False), b=nn.Linear(4, 3))
    square(net(drawn(3, 4)), None).backward()  # trains
    with pytest.raises(ConditioningError):
        analysed(net, drawn(3, 4))


def test_a_call_whose_output_is_not_used_does_not_count_in_one_factor_alone() -> None:
    lin = nn.Linear(4, 3)
    once = analysed(Does(lambda m, x: m.lin(x), lin=lin), (x := drawn(6, 4)))["lin.weight"]
    twice = analysed(Does(lambda m, x: (m.lin(x + 5), m.lin(x))[1], lin=lin), x)["lin.weight"]
    assert (twice.samples, twice.lambda_x, twice.lambda_g) == pytest.approx(
        (once.samples, once.lambda_x, once.lambda_g)
    )


def test_a_functional_use_beside_a_module_call_counts() -> None:
    lin = nn.Linear(4, 4, bias=False)
    net, x, tape = Does(lambda m, x: F.linear(m.lin(x).tanh(), m.lin.weight), lin=lin), drawn(6, 4), Tape()
    found = analysed(net, x)
    tape.backward(square(tape.linear("w", tape.linear("w", x, lin.weight).tanh(), lin.weight), None))
    agree_layer(found, "lin.weight", tape["w"])


@pytest.mark.parametrize("n", [64, 4096])
def test_float16_weight_gradients_do_not_underflow(n: int) -> None:
    lin = nn.Linear(8, 3, bias=False)
    x, y = torch.randn(n, 8).half().float(), torch.zeros(n, 3)
    with torch.no_grad():
        lin.weight.copy_(lin.weight.half())

    def loss(o: Tensor, t: Tensor) -> Tensor:
        return (1e-4 * (o.float() - t).square().sum(1)).mean()

    double = gyroscope.condition(lin.double(), loss, (x.double(), y.double())).entries[0]
    half = gyroscope.condition(lin.half(), loss, (x.half(), y)).entries[0]
    assert half.lambda_g == pytest.approx(double.lambda_g, rel=2e-2)
    assert half.gradient_spectral == pytest.approx(double.gradient_spectral, rel=1e-2)
    stream = gyroscope.condition(lin.half(), loss, list(zip(x.half().chunk(8), y.chunk(8), strict=True))).entries[0]
    assert stream.gradient_spectral == pytest.approx(double.gradient_spectral, rel=1e-2)


@pytest.mark.parametrize(("dtype", "n"), [(torch.float64, 1000), (torch.float64, 100_000), (torch.float32, 100_000)])
def test_rank_of_the_same_sample_many_times_is_one(dtype: torch.dtype, n: int) -> None:
    net = nn.Linear(12, 4).to(dtype)
    x, y = torch.randn(1, 12).to(dtype), torch.randn(1, 4).to(dtype)
    e = gyroscope.condition(net, lambda o, t: (o - t).square().mean(), (x.expand(n, 12), y.expand(n, 4))).entries[0]
    assert (e.rank_x, e.rank_g) == (1, 1)


def test_p_that_is_no_sequence_is_refused() -> None:
    with pytest.raises(ConditioningError):
        gyroscope.condition(nn.Linear(4, 3), F.mse_loss, (torch.randn(6, 4), torch.randn(6, 3)), p=None)


def test_a_network_none_of_whose_layers_can_be_treated_is_refused() -> None:
    with pytest.raises(ConditioningError, match="None of the 1 layers"):
        gyroscope.condition(nn.EmbeddingBag(9, 4), lambda o, t: o.mean(), (torch.randint(9, (3, 2)), torch.zeros(3)))


def test_parts_of_a_projection_are_in_their_order() -> None:
    at = nn.MultiheadAttention(8, 2).double()
    found = analysed(Does(lambda m, x: m.at(x, x + 1, x + 2)[0], at=at), drawn(5, 3, 8))
    assert found.layers == (
        "at.in_proj_weight[0:8]",
        "at.in_proj_weight[8:16]",
        "at.in_proj_weight[16:24]",
        "at.out_proj.weight",
    )


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_submodule_is_left_alone() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    net = nn.Sequential(scripted, nn.Linear(4, 3))
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    assert "1.weight" in gyroscope.condition(net, square, (torch.randn(6, 4), NONE), reduction="mean").layers
    assert all(torch.equal(before[name], buffer) for name, buffer in net.named_buffers())
