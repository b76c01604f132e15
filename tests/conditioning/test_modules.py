"""Σx and Σ∇h of every way to use a weight, compared with the rows of a literal forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.prune import random_unstructured
from torch.utils.checkpoint import checkpoint

import gyroscope
from gyroscope.conditioning import Conditioning
from oracles.conditioning import Rows, Tape, agree, agree_weight, last, one_hot, patches, positions

Watched = dict[str, tuple[nn.Module, Rows, Rows]]
Replay = Callable[..., Any]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def square(output: Any, _: Any) -> Tensor:
    """A mean over all elements of a tensor, or of the first of several."""
    output = output if isinstance(output, Tensor) else output[0]
    ramp = torch.linspace(0.5, 1.5, output.shape[-1], dtype=output.dtype)
    return ((output - 0.3) * ramp).square().mean()


NONE = torch.zeros(1)


def with_hooks(model: nn.Module, watched: Watched, inputs: Iterable[Any], loss: Any = square, **given: Any) -> None:
    """All layers of a model, compared with what hooks on the modules see."""
    tape = Tape()
    model.zero_grad()
    handles = [tape.watch(name, *seen) for name, seen in watched.items()]
    several = list(inputs)
    for x in several:
        tape.backward(loss(model(*x) if isinstance(x, tuple) else model(x), NONE))
    for handle in handles:
        handle.remove()
    found = gyroscope.condition(model, loss, [(x, NONE) for x in several], spectra=True, reduction="mean", **given)
    agree(found, tape, list(watched))
    if len(several) == 1:
        for layer in gyroscope.layers(model):
            if layer.name in found.layers:
                agree_weight(found[layer.name], layer.parameter, layer.parameter.grad)


def with_replay(model: nn.Module, replay: Replay, *inputs: Any, loss: Any = square, **given: Any) -> Conditioning:
    """All layers of a model, compared with the same computation written out, with its products recorded."""
    tape = Tape()
    output = replay(tape, *inputs)
    straight = model(*inputs)
    for a, b in zip(_tuple(output), _tuple(straight), strict=False):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    tape.backward(loss(output, NONE))
    batch = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], Tensor) else inputs
    found = gyroscope.condition(model, loss, (batch, NONE), spectra=True, reduction="mean", **given)
    agree(found, tape, [name for name in found.layers if name in tape.x])
    assert set(found.layers) == set(tape.x)
    return found


def _tuple(given: Any) -> tuple[Tensor, ...]:
    return (given,) if isinstance(given, Tensor) else tuple(a for a in given if isinstance(a, Tensor))


class Does(nn.Module):
    """A model of these parts with this forward pass."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.does = forward
        for name, part in parts.items():
            setattr(self, name, part)
        self.double()

    def forward(self, *args: Any) -> Any:
        return self.does(self, *args)


# Linear


@pytest.mark.parametrize("shape", [(7,), (1, 7), (20, 7), (3, 4, 7), (2, 3, 2, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_a_linear_layer_are_its_samples(shape: tuple[int, ...], bias: bool) -> None:
    net = nn.Sequential(nn.Linear(7, 5, bias=bias), nn.Tanh(), nn.Linear(5, 3, bias=bias)).double()
    with_hooks(net, {f"{i}.weight": (net[i], last, last) for i in (0, 2)}, [drawn(*shape)])


def test_inputs_that_are_not_contiguous_are_the_same_samples() -> None:
    net = nn.Sequential(nn.Linear(7, 5)).double()
    watched = {"0.weight": (net[0], last, last)}
    for x in (drawn(7, 12).T, drawn(4, 7, 3).transpose(1, 2), drawn(1, 7).expand(6, 7), drawn(6, 14)[:, ::2]):
        with_hooks(net, watched, [x])


def test_a_layer_called_three_times_is_one_call_with_all_the_rows() -> None:
    shared = nn.Linear(6, 6)
    net = Does(lambda m, x: m.lin(torch.tanh(m.lin(torch.tanh(m.lin(x))))), lin=shared)
    with_hooks(net, {"lin.weight": (shared, last, last)}, [drawn(4, 6)])
    once = Does(lambda m, a, b, c: torch.cat([m.lin(a), m.lin(b), m.lin(c)]), lin=shared)
    parts = drawn(3, 6), drawn(4, 6), drawn(5, 6)
    apart = gyroscope.condition(once, square, (parts, NONE))
    together = gyroscope.condition(Does(lambda m, x: m.lin(x), lin=shared), square, (torch.cat(parts), NONE))
    assert apart["lin.weight"].samples == 12
    assert apart["lin.weight"].lambda_x == pytest.approx(together["lin.weight"].lambda_x, rel=1e-12)
    assert apart["lin.weight"].lambda_g == pytest.approx(together["lin.weight"].lambda_g, rel=1e-12)


def test_two_modules_with_one_weight_are_one_layer() -> None:
    a, b = nn.Linear(6, 6), nn.Linear(6, 6)
    b.weight = a.weight
    net = Does(lambda m, x: m.b(m.a(x).tanh()), a=a, b=b)

    def replay(tape: Tape, x: Tensor) -> Tensor:
        h = tape.linear("a.weight", x, a.weight, a.bias).tanh()
        return tape.linear("a.weight", h, a.weight, b.bias)

    with_replay(net, replay, drawn(9, 6))


def test_an_output_that_goes_several_ways_has_the_sum_of_their_gradients() -> None:
    lin, more = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.lin(x)
        return h + m.more(h).relu() + h.square().mean(0)

    net = Does(forward, lin=lin, more=more)
    with_hooks(net, {"lin.weight": (lin, last, last), "more.weight": (more, last, last)}, [drawn(9, 6)])


@pytest.mark.parametrize(
    "after",
    [
        lambda h: h.relu_(),
        lambda h: h.mul_(3.0).add_(1.0),
        lambda h: F.leaky_relu(h, 0.1, inplace=True) * 2,
        lambda h: F.dropout(h, 0.0, inplace=True).clamp_(-1, 1),
        lambda h: h[..., :3].zero_() + h[..., 3:],
    ],
    ids=["relu", "affine", "leaky", "clamp", "slice"],
)
@pytest.mark.parametrize("shape", [(9, 5), (2, 4, 5), (1, 2, 3, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_the_output_before_anything_is_done_to_it_in_place(
    after: Any, shape: tuple[int, ...], bias: bool
) -> None:
    """The output for [..., d] is a view, and what is done in place to a view is another operation."""
    lin = nn.Linear(5, 6, bias=bias)
    net = Does(lambda m, x: after(m.lin(x)), lin=lin)
    with_hooks(net, {"lin.weight": (lin, last, last)}, [drawn(*shape)])


def test_in_place_residuals_after_layers_of_every_kind() -> None:
    for layer, x, rows in (
        (nn.Linear(5, 5), drawn(2, 4, 5), (last, last)),
        (Conv1D(5, 5), drawn(2, 4, 5), (last, last)),
        (nn.Conv2d(5, 5, 3, padding=1), drawn(2, 5, 4, 3), (positions(2), positions(2))),
        (nn.Conv1d(5, 5, 3, padding=1), drawn(5, 4), (positions(1), positions(1))),
        (nn.ConvTranspose1d(5, 5, 1), drawn(5, 4), (positions(1), positions(1))),
    ):
        net = Does(lambda m, x: m.layer(x).add_(x).relu_(), layer=layer)
        with_hooks(net, {"layer.weight": (layer, *rows)}, [x])
    emb = nn.Embedding(9, 5)
    with_hooks(
        Does(lambda m, i: m.emb(i).add_(1).relu_(), emb=emb), {"emb.weight": (emb, one_hot(9), last)}, [tokens(2, 4)]
    )


@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: nn.Linear(6, 5), (9, 6)), (lambda: nn.Conv2d(3, 4, 3), (2, 3, 6, 5))],
    ids=["linear", "conv"],
)
def test_an_input_that_autocast_converted_may_be_overwritten_afterwards(make: Any, shape: tuple[int, ...]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = x.clone()
        h = m.layer(x)
        if m.overwrites:
            x.zero_()
        return h

    net = Does(forward, layer=make(), overwrites=False).float()
    x = torch.randn(shape)
    with torch.autocast("cpu", torch.bfloat16):
        before = gyroscope.condition(net, square, (x, NONE), reduction="mean")
        net.overwrites = True
        after = gyroscope.condition(net, square, (x, NONE), reduction="mean")
    assert after.entries[0].lambda_x == before.entries[0].lambda_x > 0


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("layer", "view", "shape"),
    [
        (lambda: nn.Linear(6, 5), lambda x: x.transpose(0, 1), (4, 9, 6)),
        (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), lambda x: x, (2, 3, 6, 5)),
    ],
    ids=["contiguous", "padded"],
)
def test_an_input_that_is_overwritten_while_the_graph_has_a_copy_is_listed(
    layer: Any, view: Any, shape: tuple[int, ...], streamed: bool
) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = x.clone()
        h = m.layer(view(x))
        if len(m.seen) == 1:
            x.zero_()
        m.seen.append(1)
        return m.last(h)

    net = Does(forward, layer=layer(), last=nn.Linear(5, 2), seen=[] if streamed else [1])
    found = gyroscope.condition(net, square, [(drawn(*shape), NONE)] * (3 if streamed else 1), reduction="mean")
    assert found.layers == ("last.weight",)
    assert found.untreated == {"layer.weight": "its input was overwritten before the backward pass"}


@pytest.mark.parametrize("train", [True, False])
def test_layers_around_normalisations_in_either_mode(train: bool) -> None:
    norm = nn.BatchNorm1d(6, dtype=torch.float64)
    norm.running_mean.normal_()
    net = nn.Sequential(nn.Linear(5, 6), norm, nn.ReLU(inplace=True), nn.Linear(6, 4), nn.LayerNorm(4)).double()
    net.train(train)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x = drawn(9, 5)
    found = gyroscope.condition(net, square, (x, NONE), spectra=True, reduction="mean")
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    tape = Tape()
    for i in (0, 3):
        tape.watch(f"{i}.weight", net[i])
    tape.backward(square(net(x), NONE))
    agree(found, tape)


def test_a_loss_may_pick_from_a_tuple_or_a_dict() -> None:
    lin, side = nn.Linear(5, 6), nn.Linear(5, 4)
    x = drawn(9, 5)
    watched = {"lin.weight": (lin, last, last)}

    def picks(output: Any, _: Any) -> Tensor:
        return square(output["h"] if isinstance(output, dict) else output[1], None)

    for forward in (
        lambda m, x: (m.side(x), m.lin(x)),
        lambda m, x: {"side": m.side(x), "h": m.lin(x)},
        lambda m, x: [None, m.lin(x), "text"],
    ):
        net = Does(forward, lin=lin, side=side)
        tape = Tape()
        handle = tape.watch("lin.weight", lin)
        tape.backward(picks(net(x), None))
        handle.remove()
        found = gyroscope.condition(net, picks, (x, NONE), spectra=True)
        agree(found, tape, list(watched))
        assert list(found.untreated) == ["side.weight"]
        lin.weight.grad = None


def test_what_other_hooks_make_of_an_output_is_not_the_layer_s_output() -> None:
    lin = nn.Linear(5, 6)
    net = Does(lambda m, x: m.lin(x), lin=lin)
    lin.register_forward_hook(lambda module, args, output: (3 * output).tanh())
    x, tape = drawn(9, 5), Tape()
    found = gyroscope.condition(net, square, (x, NONE), spectra=True, reduction="mean")
    tape.backward(square((3 * tape.linear("lin.weight", x, lin.weight, lin.bias)).tanh(), NONE))
    agree(found, tape)


def test_inputs_may_be_keyword_arguments_all_the_way_down() -> None:
    lin = nn.Linear(5, 6)
    net = Does(lambda m, x: m.lin(input=x), lin=lin)
    x = drawn(9, 5)
    found = gyroscope.condition(net, square, (x, NONE), spectra=True, reduction="mean")
    tape = Tape()
    tape.backward(square(tape.linear("lin.weight", x, lin.weight, lin.bias), NONE))
    agree(found, tape)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = lin

        def forward(self, *, first: Tensor, scale: float) -> Tensor:
            return self.lin(first * scale)

    found = gyroscope.condition(Named(), square, ({"first": x / 2, "scale": 2.0}, NONE), spectra=True, reduction="mean")
    agree(found, tape)


# Convolutions

CONVOLUTIONS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(3, 5, 3), (4, 3, 9)),
    "1d-stride-dilation": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=3, dilation=2, groups=2), (3, 4, 11)),
    "1d-unbatched": (lambda: nn.Conv1d(3, 5, 3, padding=1), (3, 9)),
    "1x1": (lambda: nn.Conv2d(6, 4, 1), (3, 6, 5, 4)),
    "3x3": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 6, 7)),
    "padding": (lambda: nn.Conv2d(3, 4, (3, 2), padding=(2, 1)), (2, 3, 6, 5)),
    "same": (lambda: nn.Conv2d(3, 4, (4, 3), padding="same", dilation=(1, 2)), (2, 3, 6, 7)),
    "valid": (lambda: nn.Conv2d(3, 4, 3, padding="valid"), (2, 3, 6, 7)),
    "stride": (lambda: nn.Conv2d(3, 4, 3, stride=(2, 3), padding=1), (2, 3, 7, 8)),
    "stride-beyond-kernel": (lambda: nn.Conv2d(3, 4, 2, stride=3), (2, 3, 9, 8)),
    "dilation": (lambda: nn.Conv2d(3, 4, 3, dilation=(2, 1), padding=2), (2, 3, 6, 5)),
    "groups": (lambda: nn.Conv2d(6, 8, 3, groups=2, padding=1), (2, 6, 5, 4)),
    "depthwise": (lambda: nn.Conv2d(5, 5, 3, groups=5, padding=1), (3, 5, 5, 4)),
    "depthwise-multiplier": (lambda: nn.Conv2d(3, 6, 3, groups=3), (2, 3, 6, 5)),
    "unbatched": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 6, 5)),
    "unbatched-groups": (lambda: nn.Conv2d(4, 4, 3, groups=2), (4, 6, 5)),
    "reflect": (lambda: nn.Conv2d(3, 4, 3, padding=2, padding_mode="reflect"), (2, 3, 6, 5)),
    "replicate": (lambda: nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="replicate"), (2, 3, 6, 5)),
    "circular": (lambda: nn.Conv2d(3, 4, 3, padding="same", padding_mode="circular"), (2, 3, 6, 5)),
    "no-bias": (lambda: nn.Conv2d(3, 4, 3, bias=False), (2, 3, 6, 7)),
    "one-position": (lambda: nn.Conv2d(3, 4, 5), (2, 3, 5, 5)),
    "few-samples": (lambda: nn.Conv2d(20, 30, 3), (1, 20, 4, 3)),
    "few-dilated": (lambda: nn.Conv2d(8, 4, 3, dilation=(2, 1), stride=(1, 2)), (1, 8, 6, 5)),
    "few-same": (lambda: nn.Conv2d(8, 4, (4, 3), padding="same", dilation=(1, 2)), (1, 8, 4, 3)),
    "few-groups": (lambda: nn.Conv1d(8, 4, 5, groups=2, padding=1), (1, 8, 5)),
    "few-circular": (lambda: nn.Conv2d(8, 4, 3, padding=(1, 2), padding_mode="circular"), (1, 8, 3, 3)),
    "few-3d": (lambda: nn.Conv3d(4, 3, (2, 3, 2), dilation=(2, 1, 2), padding=(1, 0, 1)), (1, 4, 3, 4, 3)),
    "3d": (lambda: nn.Conv3d(2, 3, (2, 3, 2), padding=(1, 0, 1), stride=(1, 2, 1)), (2, 2, 3, 5, 4)),
    "3d-groups": (lambda: nn.Conv3d(4, 4, 2, groups=2, dilation=(1, 1, 2)), (2, 4, 3, 3, 4)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("by_patches", [False, True], ids=["channels", "patches"])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_positions_of_a_convolution_are_its_samples(case: str, by_patches: bool) -> None:
    make, shape = CONVOLUTIONS[case]
    conv = make().double()
    spatial = len(conv.kernel_size)
    x_rows = patches(conv) if by_patches else positions(spatial, conv.groups)
    with_hooks(
        nn.Sequential(conv), {"0.weight": (conv, x_rows, positions(spatial))}, [drawn(*shape)], patches=by_patches
    )


@pytest.mark.parametrize("by_patches", [False, True], ids=["channels", "patches"])
def test_channels_last_changes_nothing(by_patches: bool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2)).double()
    x = drawn(3, 3, 8, 7)
    plain = gyroscope.condition(net, square, (x, NONE), patches=by_patches, spectra=True)
    net.to(memory_format=torch.channels_last)
    last_ = gyroscope.condition(
        net, square, (x.contiguous(memory_format=torch.channels_last), NONE), patches=by_patches, spectra=True
    )
    for name in plain.layers:
        a, b = plain.spectra[name], last_.spectra[name]
        assert b.x.full() == pytest.approx(a.x.full(), rel=1e-12, abs=1e-12 * a.x.largest)
        assert b.g.full() == pytest.approx(a.g.full(), rel=1e-12, abs=1e-12 * a.g.largest)


def test_the_oracle_of_patches_has_them_in_the_order_of_unfold() -> None:
    conv = nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2))
    x = drawn(2, 3, 6, 7)
    unfolded = F.unfold(x, conv.kernel_size, conv.dilation, conv.padding, conv.stride)
    assert torch.equal(patches(conv)(x), torch.cat(list(unfolded.mT)))


def test_sigma_x_of_patches_is_what_the_gradient_of_the_kernel_is_made_of() -> None:
    """∂L/∂W = GᵀX with the patches X and the gradients G: its norm cannot be above what λmax of both allows."""
    conv = nn.Conv2d(3, 4, 3, padding=1).double()
    found = gyroscope.condition(nn.Sequential(conv), square, (drawn(3, 3, 6, 5), NONE), patches=True)["0.weight"]
    assert 0 < found.gradient_spectral <= (found.lambda_x * found.lambda_g) ** 0.5


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.ConvTranspose1d(3, 5, 3, stride=2), (4, 3, 6)),
        (lambda: nn.ConvTranspose2d(3, 5, 3, stride=2, padding=1, output_padding=1), (2, 3, 4, 5)),
        (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 4, 5)),
        (lambda: nn.ConvTranspose2d(3, 5, 2, dilation=2), (3, 4, 5)),
        (lambda: nn.ConvTranspose3d(2, 3, 2), (2, 2, 3, 2, 3)),
    ],
    ids=["1d", "stride", "groups", "unbatched-dilation", "3d"],
)
def test_positions_of_a_transposed_convolution_are_its_samples(make: Any, shape: tuple[int, ...]) -> None:
    conv = make().double()
    n = len(conv.kernel_size)
    rows = positions(n), positions(n, conv.groups)
    with_hooks(nn.Sequential(conv), {"0.weight": (conv, *rows)}, [drawn(*shape)])


def test_a_transposed_convolution_has_no_patches_and_says_so() -> None:
    net = nn.Sequential(nn.ConvTranspose1d(3, 5, 3), nn.Conv1d(5, 2, 3)).double()
    found = gyroscope.condition(net, square, (drawn(4, 3, 6), NONE), patches=True)
    assert found.layers == ("1.weight",)
    assert found.untreated == {"0.weight": "a transposed convolution has no patches"}


# Embeddings and tied weights


def tokens(*shape: int, classes: int = 9) -> Tensor:
    return torch.randint(classes, shape)


@pytest.mark.parametrize("given", [{}, {"padding_idx": 0}, {"scale_grad_by_freq": True}], ids=["plain", "pad", "freq"])
@pytest.mark.parametrize("shape", [(5,), (3, 4), (40, 3)])
def test_sigma_x_of_an_embedding_has_the_frequencies_of_its_tokens(shape: tuple[int, ...], given: Any) -> None:
    net = nn.Sequential(nn.Embedding(9, 4, **given), nn.Linear(4, 3)).double()
    x = tokens(*shape)
    with_hooks(net, {"0.weight": (net[0], one_hot(9), last), "1.weight": (net[1], last, last)}, [x])
    counts = torch.bincount(x.flatten(), minlength=9).double().sort(descending=True).values / x.numel()
    found = gyroscope.condition(net, square, (x, NONE), spectra=True, reduction="mean")
    assert found.spectra["0.weight"].x.full().tolist() == counts.tolist()


def test_an_embedding_that_renormalises_its_weight_is_given_back_as_it_was() -> None:
    net = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5)).double()
    before = net[0].weight.detach().clone()
    found = gyroscope.condition(net, square, (tokens(12), NONE), reduction="mean")
    assert torch.equal(net[0].weight, before)
    assert found.layers == ("0.weight",)


def tied(tape: Tape, model: Any, x: Tensor, *, names: tuple[str, str]) -> Tensor:
    weight = model.emb.weight
    h = tape.put(names[0], x, F.embedding(x, weight), one_hot(len(weight)), last)
    return tape.linear(names[1], h.tanh(), weight)


def test_a_head_that_shares_the_weight_of_the_embedding_is_analysed_apart_from_it() -> None:
    net = Does(lambda m, x: m.head(m.emb(x).tanh()), emb=nn.Embedding(9, 4), head=nn.Linear(4, 9, bias=False))
    net.head.weight = net.emb.weight
    found = with_replay(net, lambda tape, x: tied(tape, net, x, names=("emb.weight", "head.weight")), tokens(30))
    assert [entry.kind for entry in found.entries] == ["embedding", "linear"]
    # One weight, one gradient.
    assert found["emb.weight"].gradient_spectral == found["head.weight"].gradient_spectral


def test_a_head_may_come_before_the_embedding_that_shares_its_weight() -> None:
    net = Does(lambda m, x: m.head(m.emb(x).tanh()), head=nn.Linear(4, 9, bias=False), emb=nn.Embedding(9, 4))
    net.emb.weight = net.head.weight
    found = with_replay(net, lambda tape, x: tied(tape, net, x, names=("emb.weight", "head.weight")), tokens(30))
    assert {entry.layer: entry.kind for entry in found.entries} == {"emb.weight": "embedding", "head.weight": "linear"}


@pytest.mark.parametrize(
    "multiply",
    [lambda h, w: F.linear(h, w), lambda h, w: h @ w.T, lambda h, w: torch.matmul(h, w.transpose(0, 1))],
    ids=["linear", "at", "matmul"],
)
@pytest.mark.parametrize("shape", [(30,), (5, 6)])
def test_a_head_that_uses_the_weight_of_the_embedding_in_a_function_is_analysed_too(multiply: Any, shape: Any) -> None:
    net = Does(lambda m, x: multiply(m.emb(x).tanh(), m.emb.weight), emb=nn.Embedding(9, 4))
    names = "emb.weight", "emb.weight (as linear)"
    found = with_replay(net, lambda tape, x: tied(tape, net, x, names=names), tokens(*shape))
    assert [entry.kind for entry in found.entries] == ["embedding", "linear"]


# Attention


def heads(tape: Tape, name: str, module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Multi-head attention written out for inputs [batch, tokens, width], the projections on tape."""
    e, n = module.embed_dim, module.num_heads
    if not module._qkv_same_embed_dim:
        weights = [(f"{p}_proj_weight", getattr(module, f"{p}_proj_weight")) for p in "qkv"]
        three = [
            tape.linear(f"{name}{part}", a, w, b)
            for (part, w), a, b in zip(weights, (q, k, v), module.in_proj_bias.chunk(3), strict=True)
        ]
    elif k is v:
        whole, bias = module.in_proj_weight, module.in_proj_bias
        if q is k:
            three = list(tape.linear(f"{name}in_proj_weight", q, whole, bias).chunk(3, -1))
        else:
            first = tape.linear(f"{name}in_proj_weight[0:{e}]", q, whole[:e], None if bias is None else bias[:e])
            rest = tape.linear(f"{name}in_proj_weight[{e}:{3 * e}]", k, whole[e:], None if bias is None else bias[e:])
            three = [first, *rest.chunk(2, -1)]
    else:
        three = [
            tape.linear(f"{name}in_proj_weight[{i * e}:{(i + 1) * e}]", a, w, b)
            for i, (a, w, b) in enumerate(
                zip((q, k, v), module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True)
            )
        ]
    a, b, c = (t.unflatten(-1, (n, e // n)).transpose(1, 2) for t in three)
    mixed = (a @ b.mT / (e // n) ** 0.5).softmax(-1) @ c
    return tape.linear(
        f"{name}out_proj.weight", mixed.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias
    )


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_projections_of_self_attention(need_weights: bool, batch_first: bool, bias: bool, train: bool) -> None:
    attention = nn.MultiheadAttention(8, 2, bias=bias, batch_first=batch_first)
    net = Does(lambda m, x: m.at(x, x, x, need_weights=need_weights)[0], at=attention).train(train)

    def replay(tape: Tape, x: Tensor) -> Tensor:
        x = x if batch_first else x.transpose(0, 1)
        out = heads(tape, "at.", attention, x, x, x)
        return out if batch_first else out.transpose(0, 1)

    found = with_replay(net, replay, drawn(3, 5, 8))
    assert {entry.kind for entry in found.entries} == {"attention"}


@pytest.mark.parametrize("need_weights", [True, False])
def test_cross_attention_is_analysed_by_the_rows_of_the_projection_that_see_the_same_input(need_weights: bool) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    net = Does(lambda m, x, y: m.at(x, y, y, need_weights=need_weights)[0], at=attention)
    found = with_replay(net, lambda tape, x, y: heads(tape, "at.", attention, x, y, y), drawn(3, 5, 8), drawn(3, 4, 8))
    assert list(found.layers) == ["at.in_proj_weight[0:8]", "at.in_proj_weight[8:24]", "at.out_proj.weight"]
    w = attention.in_proj_weight.detach()
    assert found["at.in_proj_weight[0:8]"].weight_norm == pytest.approx(w[:8].norm().item(), rel=1e-12)
    assert found["at.in_proj_weight[8:24]"].weight_norm == pytest.approx(w[8:].norm().item(), rel=1e-12)


def test_attention_with_three_inputs_has_three_parts() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    net = Does(lambda m, x, y, z: m.at(x, y, z)[0], at=attention)
    given = drawn(3, 5, 8), drawn(3, 4, 8), drawn(3, 4, 8)
    with_replay(net, lambda tape, x, y, z: heads(tape, "at.", attention, x, y, z), *given)


def test_attention_with_keys_and_values_of_other_widths() -> None:
    attention = nn.MultiheadAttention(8, 2, kdim=5, vdim=3, batch_first=True)
    net = Does(lambda m, x, y, z: m.at(x, y, z)[0], at=attention)
    given = drawn(3, 5, 8), drawn(3, 4, 5), drawn(3, 4, 3)
    with_replay(net, lambda tape, x, y, z: heads(tape, "at.", attention, x, y, z), *given)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_layers_of_a_transformer_encoder(train: bool, norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=norm_first)
    net = Does(lambda m, x: m.enc(x), enc=layer).train(train)

    def forward(tape: Tape, x: Tensor) -> Tensor:
        h = tape.linear("enc.linear1.weight", x, layer.linear1.weight, layer.linear1.bias).relu()
        return tape.linear("enc.linear2.weight", h, layer.linear2.weight, layer.linear2.bias)

    def replay(tape: Tape, x: Tensor) -> Tensor:
        if norm_first:
            y = layer.norm1(x)
            x = x + heads(tape, "enc.self_attn.", layer.self_attn, y, y, y)
            return x + forward(tape, layer.norm2(x))
        x = layer.norm1(x + heads(tape, "enc.self_attn.", layer.self_attn, x, x, x))
        return layer.norm2(x + forward(tape, x))

    found = with_replay(net, replay, drawn(3, 5, 8))
    assert len(found) == 4
    assert found.untreated == {}


def test_layers_of_a_transformer_decoder() -> None:
    layer = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    net = Does(lambda m, x, y: m.dec(x, y), dec=layer)

    def replay(tape: Tape, x: Tensor, y: Tensor) -> Tensor:
        x = layer.norm1(x + heads(tape, "dec.self_attn.", layer.self_attn, x, x, x))
        x = layer.norm2(x + heads(tape, "dec.multihead_attn.", layer.multihead_attn, x, y, y))
        h = tape.linear("dec.linear1.weight", x, layer.linear1.weight, layer.linear1.bias).relu()
        return layer.norm3(x + tape.linear("dec.linear2.weight", h, layer.linear2.weight, layer.linear2.bias))

    found = with_replay(net, replay, drawn(3, 5, 8), drawn(3, 4, 8))
    assert len(found) == 7
    assert found.untreated == {}


def test_every_layer_of_a_stack_of_encoders_is_found() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    net = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double()
    found = gyroscope.condition(net, square, (drawn(3, 5, 8), NONE))
    assert found.layers == tuple(one.name for one in gyroscope.layers(net))


# Recurrent networks


def cell(tape: Tape, name: str, kind: str, w: dict[str, Tensor], x: Tensor, state: Any) -> Any:
    """One step of a recurrent network: its equations."""
    h = state[0] if kind == "LSTM" else state
    a = tape.linear(f"weight_ih{name}", x, w["ih"], w.get("b_ih"))
    b = tape.linear(f"weight_hh{name}", h, w["hh"], w.get("b_hh"))
    if kind == "RNN":
        return (a + b).tanh()
    if kind == "GRU":
        (r, z, n), (rh, zh, nh) = a.chunk(3, -1), b.chunk(3, -1)
        r, z = (r + rh).sigmoid(), (z + zh).sigmoid()
        n = (n + r * nh).tanh()
        return (1 - z) * n + z * h
    i, f, g, o = (a + b).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (tape.linear(f"weight_hr{name}", h, w["hr"]) if "hr" in w else h), c


def recurrent(tape: Tape, net: Any, x: Tensor) -> Tensor:
    """A recurrent network written out, for inputs [batch, time, width]."""
    kind = net.mode.split("_")[0]
    out = net.proj_size or net.hidden_size
    for layer in range(net.num_layers):
        directions = []
        for reverse in range(2 if net.bidirectional else 1):
            name = f"_l{layer}" + ("_reverse" if reverse else "")
            w = {p: getattr(net, f"weight_{p}{name}") for p in ("ih", "hh", "hr") if hasattr(net, f"weight_{p}{name}")}
            w |= {f"b_{p}": getattr(net, f"bias_{p}{name}") for p in ("ih", "hh")} if net.bias else {}
            h = x.new_zeros(len(x), out)
            state: Any = (h, x.new_zeros(len(x), net.hidden_size)) if kind == "LSTM" else h
            steps = []
            for t in range(x.shape[1]):
                state = cell(tape, name, kind, w, x[:, -1 - t if reverse else t], state)
                steps.append(state[0] if kind == "LSTM" else state)
            directions.append(torch.stack(steps[::-1] if reverse else steps, 1))
        x = torch.cat(directions, -1)
    return x


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("given", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_steps_of_a_recurrent_network_are_its_samples(kind: Any, given: Any, batch_first: bool) -> None:
    net = kind(4, 5, batch_first=batch_first, **given).double()

    def replay(tape: Tape, x: Tensor) -> Any:
        out = recurrent(tape, net, x if batch_first else x.transpose(0, 1))
        return (out if batch_first else out.transpose(0, 1),)

    found = with_replay(net, replay, drawn(3, 4, 4))
    assert found.layers == tuple(layer.name for layer in gyroscope.layers(net))
    assert {entry.kind for entry in found.entries} == {"recurrent"}


def test_an_lstm_with_projections() -> None:
    net = nn.LSTM(4, 5, proj_size=3, batch_first=True).double()
    found = with_replay(net, lambda tape, x: (recurrent(tape, net, x),), drawn(3, 4, 4))
    assert len(found) == 3


def test_padding_of_packed_sequences_is_no_sample() -> None:
    net = nn.LSTM(4, 5, batch_first=True).double()
    x, lengths = drawn(3, 4, 4), torch.tensor([4, 3, 1])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    found = gyroscope.condition(
        net, lambda out, _: square(out[0].data, None), ((packed,), NONE), spectra=True, reduction="mean"
    )
    tape = Tape()
    outputs = [recurrent(tape, net, x[i : i + 1, :n]) for i, n in enumerate(lengths.tolist())]
    tape.backward(square(torch.cat(outputs, 1), None))
    agree(found, tape)
    assert found["weight_ih_l0"].samples == 8


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_cells_called_step_by_step(kind: str) -> None:
    one = getattr(nn, f"{kind}Cell")(4, 5)

    def forward(m: Any, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = m.cell(x[:, t], state)
        return state[0] if kind == "LSTM" else state

    net = Does(forward, cell=one)

    def replay(tape: Tape, x: Tensor) -> Tensor:
        w = {"ih": one.weight_ih, "hh": one.weight_hh, "b_ih": one.bias_ih, "b_hh": one.bias_hh}
        h = x.new_zeros(len(x), 5)
        state: Any = (h, h) if kind == "LSTM" else h
        named = Renamed(tape)
        for t in range(x.shape[1]):
            state = cell(named, "", kind, w, x[:, t], state)
        return state[0] if kind == "LSTM" else state

    with_replay(net, replay, drawn(3, 4, 4))


class Renamed(Tape):
    """A tape within a module called `cell`."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def linear(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.tape.linear(f"cell.{name}", x, weight, bias)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_in_float32_are_not_hidden_in_fused_kernels(kind: Any) -> None:
    net = kind(4, 5, batch_first=True).double()
    x = drawn(3, 4, 4)
    double = gyroscope.condition(net, square, (x, NONE), reduction="mean")
    single = gyroscope.condition(net.float(), square, (x.float(), NONE), reduction="mean")
    for a, b in zip(double.entries, single.entries, strict=True):
        assert (b.layer, b.samples) == (a.layer, a.samples)
        assert (b.lambda_x, b.lambda_g) == pytest.approx((a.lambda_x, a.lambda_g), rel=1e-4)


def test_a_recurrent_network_runs_fused_again_afterwards() -> None:
    before = torch._C._get_mkldnn_enabled()
    gyroscope.condition(nn.LSTM(4, 5), lambda out, _: square(out, None), (torch.randn(3, 2, 4), NONE))
    with pytest.raises(gyroscope.GyroscopeError):
        gyroscope.condition(nn.LSTM(4, 5), square, (torch.randn(3, 2, 7), NONE))
    assert torch._C._get_mkldnn_enabled() == before


# Weights used in functions


class Weight(nn.Module):
    """A module of a class nobody knows, with a weight of this shape."""

    def __init__(self, does: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(drawn(*shape))
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        return self.does(x, self.weight)


PRODUCTS: dict[str, tuple[Any, tuple[int, ...], Any]] = {
    "linear": (lambda x, w: F.linear(x, w), (6, 4), lambda h: h),
    "bias": (lambda x, w: F.linear(x, w, torch.ones(6, dtype=torch.float64)), (6, 4), lambda h: h + 1),
    "at": (lambda x, w: x @ w, (4, 6), lambda h: h),
    "transposed": (lambda x, w: x @ w.T, (6, 4), lambda h: h),
    "contiguous": (lambda x, w: torch.matmul(x, w.transpose(-1, -2).contiguous()), (6, 4), lambda h: h),
    "in-place": (lambda x, w: F.linear(x, w).relu_(), (6, 4), torch.relu),
    "reshaped": (lambda x, w: F.linear(x, w.reshape(6, 4)), (2, 3, 4), lambda h: h),
}


@pytest.mark.parametrize("case", PRODUCTS)
@pytest.mark.parametrize("given", [(9, 4), (2, 5, 4)])
def test_a_weight_in_a_product_is_found_in_the_graph(case: str, given: tuple[int, ...]) -> None:
    does, shape, after = PRODUCTS[case]
    net = Weight(does, *shape)

    def replay(tape: Tape, x: Tensor) -> Tensor:
        weight = net.weight.T if shape == (4, 6) else net.weight.reshape(6, 4)
        return after(tape.linear("weight", x, weight))

    found = with_replay(net, replay, drawn(*given))
    assert found.entries[0].kind == "linear"


@pytest.mark.parametrize("by_patches", [False, True], ids=["channels", "patches"])
@pytest.mark.parametrize(
    ("shape", "given"),
    [((4, 3, 3), {"padding": 1}), ((4, 3, 3, 3), {"stride": 2}), ((4, 2, 3, 3), {"groups": 2, "dilation": 2}),
     ((3, 2, 2, 2, 2), {})],
    ids=["1d", "2d", "groups", "3d"],
)  # fmt: skip
def test_a_convolution_called_as_a_function(shape: Any, given: Any, by_patches: bool) -> None:
    spatial = len(shape) - 2
    function = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    net = Weight(lambda x, w: function(x, w, **given), *shape)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[spatial - 1]
    groups = given.get("groups", 1)
    conv = kind(shape[1] * groups, shape[0], shape[2:], **given)
    x_rows = patches(conv) if by_patches else positions(spatial, groups)

    def replay(tape: Tape, x: Tensor) -> Tensor:
        return tape.put("weight", x, function(x, net.weight, **given), x_rows, positions(spatial))

    x = drawn(2, shape[1] * groups, *(6, 7, 5)[:spatial])
    found = with_replay(net, replay, x, patches=by_patches)
    assert found.entries[0].kind == "conv"


def test_a_transposed_convolution_called_as_a_function() -> None:
    net = Weight(lambda x, w: F.conv_transpose2d(x, w, stride=2, groups=2), 4, 3, 2, 2)

    def replay(tape: Tape, x: Tensor) -> Tensor:
        return tape.put("weight", x, net(x), positions(2), positions(2, 2))

    with_replay(net, replay, drawn(2, 4, 4, 3))


def test_an_embedding_called_as_a_function() -> None:
    net = Weight(F.embedding, 9, 4)
    found = with_replay(net, lambda tape, x: tape.put("weight", x, net(x), one_hot(9), last), tokens(5, 4))
    assert found.entries[0].kind == "embedding"


def test_a_function_called_several_times_is_one_call_with_all_the_rows() -> None:
    net = Weight(lambda x, w: F.linear(F.linear(x, w).tanh(), w), 5, 5)

    def replay(tape: Tape, x: Tensor) -> Tensor:
        return tape.linear("weight", tape.linear("weight", x, net.weight).tanh(), net.weight)

    with_replay(net, replay, drawn(7, 5))


@pytest.mark.parametrize("width", [5, 4])
def test_a_weight_that_is_used_both_ways_is_analysed_in_each(width: int) -> None:
    """A tied autoencoder: h = Wx and y = Wᵀh have inputs and outputs of other widths, or of the same by chance."""
    net = Weight(lambda x, w: F.linear(F.linear(x, w).tanh(), w.t()), width, 4)

    def replay(tape: Tape, x: Tensor) -> Tensor:
        return tape.linear("weight (transposed)", tape.linear("weight", x, net.weight).tanh(), net.weight.T)

    found = with_replay(net, replay, drawn(9, 4))
    assert found.layers == ("weight", "weight (transposed)")
    straight = Weight(lambda x, w: (x @ w).tanh() @ w.T, 4, width)
    assert gyroscope.condition(straight, square, (drawn(9, 4), NONE), reduction="mean").layers == found.layers


class Conv1D(nn.Module):
    """A linear layer with a weight [in, out], as language models have."""

    def __init__(self, nx: int, nf: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(drawn(nx, nf))
        self.bias = nn.Parameter(drawn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


def test_a_linear_layer_with_its_weight_transposed() -> None:
    net = nn.Sequential(Conv1D(4, 6), nn.GELU(), Conv1D(6, 4))
    with_hooks(net, {f"{i}.weight": (net[i], last, last) for i in (0, 2)}, [drawn(3, 5, 4)])


# Weights that are made of other weights


@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
    ],
)
def test_factors_are_those_of_the_weight_that_multiplies(wrap: Any) -> None:
    lin = wrap(nn.Linear(5, 4).double()).eval()
    net = nn.Sequential(lin)
    with_replay(net, lambda tape, x: tape.linear("0.weight", x, lin.weight, lin.bias), drawn(9, 5))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_normalised_by_hooks() -> None:
    lin = nn.utils.weight_norm(nn.Linear(5, 4).double())
    with_replay(nn.Sequential(lin), lambda tape, x: tape.linear("0.weight", x, lin.weight, lin.bias), drawn(9, 5))


# Passes out of the ordinary


def test_layers_inside_a_checkpoint_are_counted_once() -> None:
    inner = nn.Sequential(nn.Linear(6, 7), nn.ReLU(inplace=True), nn.Linear(7, 6))
    first, last_ = nn.Linear(5, 6), nn.Linear(6, 3)
    net = Does(
        lambda m, x: m.last(checkpoint(m.inner, m.first(x), use_reentrant=False)), first=first, inner=inner, last=last_
    )
    modules = {"first": first, "inner.0": inner[0], "inner.2": inner[2], "last": last_}
    plain = Does(lambda m, x: m.last(m.inner(m.first(x))), first=first, inner=inner, last=last_)
    x, tape = drawn(9, 5), Tape()
    handles = [tape.watch(f"{name}.weight", module) for name, module in modules.items()]
    tape.backward(square(plain(x), None))
    for handle in handles:
        handle.remove()
    found = gyroscope.condition(net, square, (x, NONE), spectra=True, reduction="mean")
    agree(found, tape)


def test_the_pass_runs_in_the_autocast_it_is_called_in() -> None:
    net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    x, y = torch.randn(64, 20), torch.arange(64) % 5
    tape = Tape()
    handles = [tape.watch(f"{i}.weight", net[i]) for i in (0, 2)]
    with torch.autocast("cpu", torch.bfloat16):
        tape.backward(F.cross_entropy(net(x), y))
        for handle in handles:
            handle.remove()
        found = gyroscope.condition(net, F.cross_entropy, (x, y), spectra=True)
    # Gradients are those of the mean times 64, an exact scale: they round alike.
    for name in found.layers:
        row, expected = found[name], tape[name]
        assert row.lambda_x == pytest.approx(torch.linalg.eigvalsh(expected.sigma_x)[-1].item(), rel=1e-6)
        assert row.lambda_g == pytest.approx(torch.linalg.eigvalsh(expected.sigma_g)[-1].item(), rel=2e-2)


@pytest.mark.parametrize(("dtype", "accuracy"), [(torch.float16, 2e-2), (torch.bfloat16, 5e-2)])
def test_models_in_half_precision_are_near_to_those_in_double(dtype: torch.dtype, accuracy: float) -> None:
    net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5)).to(dtype)
    x, y = torch.randn(64, 20).to(dtype), torch.arange(64) % 5
    half = gyroscope.condition(net, F.cross_entropy, (x, y), spectra=True)
    double = gyroscope.condition(net.double(), F.cross_entropy, (x.double(), y), spectra=True)
    for name in half.layers:
        for side in ("x", "g"):
            a, b = getattr(half.spectra[name], side).full(), getattr(double.spectra[name], side).full()
            assert a == pytest.approx(b, abs=accuracy * b[0])
        assert half[name].gradient_spectral == pytest.approx(double[name].gradient_spectral, rel=accuracy)
        assert half[name].weight_spectral == pytest.approx(double[name].weight_spectral, rel=1e-6)


def frozen(*which: int) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    for i in which:
        net[i].requires_grad_(False)
    return net


@pytest.mark.parametrize("which", [(0,), (2,), (4,), (0, 2, 4)], ids=str)
def test_frozen_layers_are_analysed_like_others_and_stay_frozen(which: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    net = frozen(*which)
    torch.manual_seed(1)
    free = frozen()
    x = drawn(9, 5)
    flags = [p.requires_grad for p in net.parameters()]
    found = gyroscope.condition(net, square, (x, NONE), spectra=True, reduction="mean")
    assert [p.requires_grad for p in net.parameters()] == flags
    assert all(p.grad is None for p in net.parameters())
    tape = Tape()
    for i in (0, 2, 4):
        tape.watch(f"{i}.weight", free[i])
    tape.backward(square(free(x), None))
    agree(found, tape)
    for i in (0, 2, 4):
        agree_weight(found[f"{i}.weight"], free[i].weight, free[i].weight.grad)


@pytest.mark.parametrize("inner", [True, False], ids=["inner", "whole"])
def test_compiled_models_are_analysed_as_they_are_without(inner: bool) -> None:
    net = frozen()
    x = drawn(9, 5)
    plain = gyroscope.condition(net, square, (x, NONE), spectra=True, reduction="mean")
    compiled: Any = nn.Sequential(torch.compile(net, backend="eager")) if inner else torch.compile(net, backend="eager")
    compiled(x)
    found = gyroscope.condition(compiled, square, (x, NONE), spectra=True, reduction="mean")
    for a, b in zip(plain.entries, found.entries, strict=True):
        assert (a.lambda_x, a.lambda_g, a.kappa_f) == (b.lambda_x, b.lambda_g, b.kappa_f)


def test_streams_of_batches_are_over_all_rows_each_batch_with_its_own_mean() -> None:
    net = frozen()
    with_hooks(net, {f"{i}.weight": (net[i], last, last) for i in (0, 2, 4)}, [drawn(n, 5) for n in (2, 7, 1, 12)])


def test_a_stream_of_images_of_several_sizes() -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1).double()
    several = [drawn(n, 3, h, w) for n, h, w in ((2, 4, 5), (1, 7, 3), (3, 3, 3))]
    for by_patches in (False, True):
        rows = patches(conv) if by_patches else positions(2)
        with_hooks(nn.Sequential(conv), {"0.weight": (conv, rows, positions(2))}, several, patches=by_patches)


# What cannot be treated


def test_layers_that_cannot_be_treated_are_listed_with_the_reason() -> None:
    def forward(m: Any, x: Tensor, i: Tensor) -> Tensor:
        with torch.no_grad():
            x = x + m.hidden(x)
        m.aside(x)
        h = m.lin(x).detach() + m.lin_2(x)
        return m.bilinear(h, h) + m.bag(i).mean(0) + m.product.weight @ h.T[:, :4].T

    net = Does(
        forward,
        lin=nn.Linear(4, 4),
        lin_2=nn.Linear(4, 4),
        hidden=nn.Linear(4, 4),
        aside=nn.Linear(4, 4),
        idle=nn.Linear(4, 4),
        bilinear=nn.Bilinear(4, 4, 4),
        bag=nn.EmbeddingBag(9, 4),
        product=Weight(lambda x, w: x, 4, 4),
    )
    found = gyroscope.condition(net, square, ((drawn(4, 4), tokens(4, 3)), NONE), reduction="mean")
    assert found.layers == ("lin_2.weight",)
    assert found.untreated == {
        "lin.weight": "no gradient reached its output",
        "hidden.weight": "no use of it was found",
        "aside.weight": "no gradient reached its output",
        "idle.weight": "no use of it was found",
        "bilinear.weight": "a Bilinear has two inputs",
        "bag.weight": "an EmbeddingBag sums its tokens before its output can be seen",
        "product.weight": "it is multiplied from the left",
    }
    assert "not treated: aside.weight" in str(found)


def test_weights_that_are_used_otherwise_are_listed_with_the_operation() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.lin(x) * m.scale.weight[0] + torch.bmm(x[None], m.batched.weight)[0]

    net = Does(
        forward,
        lin=nn.Linear(4, 4),
        scale=Weight(lambda x, w: x, 2, 4),
        batched=Weight(lambda x, w: x, 1, 4, 4),
    )
    found = gyroscope.condition(net, square, (drawn(5, 4), NONE), reduction="mean", layers=["lin.*", "scale.*"])
    assert found.layers == ("lin.weight",)
    assert found.untreated["scale.weight"].startswith("it is used in a ")


def test_the_layers_that_are_chosen_have_the_numbers_they_have_among_all() -> None:
    net = frozen()
    x = drawn(9, 5)
    every = gyroscope.condition(net, square, (x, NONE), reduction="mean")["2.weight"]
    found = gyroscope.condition(net, square, (x, NONE), reduction="mean", layers="2.*", spectra=True)
    tape = Tape()
    tape.watch("2.weight", net[2])
    tape.backward(square(net(x), None))
    agree(found, tape)
    some = found["2.weight"]
    assert (some.lambda_x, some.lambda_g, some.kappa_f) == (every.lambda_x, every.lambda_g, every.kappa_f)
    assert (some.gradient_spectral, some.domination) == (every.gradient_spectral, every.domination)


class UsedTwice(nn.Module):
    """A weight that a module multiplies by, and that something else uses in another way."""

    def __init__(self, other: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.other = nn.Linear(4, 4), nn.Linear(4, 3), other

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h + self.other(h, self.first.weight))


OTHERWISE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "einsum": (lambda h, w: torch.einsum("bi,oi->bo", h, w), "it is used in a Unsqueeze"),
    "a stack of one": (lambda h, w: torch.bmm(h[None], w.T[None])[0], "it is used in a Unsqueeze"),
    "from the left": (lambda h, w: (w @ h.T).T, "it is multiplied from the left"),
    "elementwise": (lambda h, w: h * w[0], "it is used in a Select"),
}


@pytest.mark.parametrize(("other", "why"), OTHERWISE.values(), ids=OTHERWISE)
def test_a_use_that_cannot_be_read_beside_one_that_can_is_said_to_be_missing(other: Any, why: str) -> None:
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
    found = gyroscope.condition(UsedTwice(other), F.cross_entropy, batch)
    assert found["first.weight"].samples == 8
    assert found.notes == (f"some uses of weights are not included: first.weight: {why}",)
    assert "some uses of weights are not included" in str(found)


@pytest.mark.parametrize(
    "made",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.spectral_norm,
        lambda module: random_unstructured(module, "weight", 1),
    ],
    ids=["weight norm", "spectral norm", "spectral norm by a hook", "pruning"],
)
def test_what_a_weight_is_computed_from_is_not_used_in_another_way(made: Any) -> None:
    model = nn.Sequential(made(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))
    found = gyroscope.condition(model, F.cross_entropy, (torch.randn(8, 4), torch.arange(8) % 3))
    assert found.layers == ("0.weight", "2.weight")
    assert found.notes == ()
