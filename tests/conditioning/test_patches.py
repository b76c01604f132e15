"""Sums of patch·patchᵀ, from the patches and from shifts.

Images of small whole numbers leave nothing to rounding: both must then equal the literal sums to the last bit.
"""

import itertools
import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from gyroscope.errors import ConditioningError
from gyroscope.passes import patches
from gyroscope.passes.patches import Axis, effort, patch_count, patch_gram
from oracles import patches as oracle

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
HOW = {"patches": False, "shifts": True}


def by(how, x, *, most=None, **conv):
    """`patch_gram`, made to take one of the two ways."""
    with (
        mock.patch.object(patches, "_shifts_pay", return_value=HOW[how]),
        mock.patch.object(patches, "_MOST", most or patches._MOST),
    ):
        return patch_gram(x, **conv)


def whole(*shape, seed=0, dtype=torch.float32):
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def literal(x, **conv):
    """The sum, and the number of rows, from the patches one number at a time."""
    spatial = x.dim() - 2
    each = {"stride": 1, "padding": 0, "dilation": 1} | conv
    for name in ("kernel_size", "stride", "padding", "dilation"):
        each[name] = [each[name]] * spatial if isinstance(each[name], int) else each[name]
    rows = oracle.patches(x, **each)
    return torch.from_numpy(rows.T @ rows), len(rows)


def agrees(x, **conv):
    """Check both ways and the count against the literal sums."""
    expected, rows = literal(x, **conv)
    assert patch_count(x.shape, **conv) == rows
    for how in HOW:
        found = by(how, x, **conv)
        assert found.dtype == torch.float64
        assert torch.equal(found, expected), how
        assert torch.equal(found, found.T)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    list(itertools.product([1, 2, 3, 5, (3, 1), (2, 5)], [1, 2, (1, 3)], [0, 1, (2, 0)], [1, 2])),
)
def test_the_sum_is_that_of_unfolded_columns(how, kernel, stride, padding, dilation):
    x = whole(2, 3, 11, 12)
    shape = {"stride": stride, "padding": padding, "dilation": dilation}
    columns = functional.unfold(x.double(), kernel, **shape)
    expected = (columns @ columns.mT).sum(0)
    found = by(how, x, kernel_size=kernel, **shape)
    assert torch.equal(found, expected)
    assert torch.equal(found, found.T)
    assert patch_count(x.shape, kernel_size=kernel, **shape) == columns.shape[0] * columns.shape[2]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    list(itertools.product([1, 2, 3, 5], [1, 2, 3], [0, 1, 4], [1, 3])),
)
def test_sequences_agree_with_literal_sums(kernel, stride, padding, dilation, groups):
    agrees(whole(2, 4, 13), kernel_size=kernel, stride=stride, padding=padding, dilation=dilation, groups=groups)


@pytest.mark.parametrize(
    "conv",
    [
        {"kernel_size": 2},
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": (3, 1, 2), "padding": (1, 0, 1), "stride": (1, 1, 2)},
        {"kernel_size": (1, 3, 3), "padding": (0, 1, 1), "groups": 2},
        {"kernel_size": (2, 2, 3), "dilation": (2, 1, 2), "padding": 1},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": (2, 3, 2), "padding": "same"},
    ],
    ids=str,
)
def test_volumes_agree_with_literal_sums(conv):
    agrees(whole(2, 2, 4, 5, 6), **conv)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize(
    ("shape", "conv"),
    [
        ((2, 2, 7), {"kernel_size": 4, "padding": 3}),
        ((2, 2, 5, 6), {"kernel_size": 3, "padding": 1}),
        ((2, 4, 5, 6), {"kernel_size": (2, 3), "padding": (1, 2), "stride": 2, "groups": 2}),
        ((2, 2, 5, 6), {"kernel_size": (2, 3), "padding": "same", "dilation": (3, 1)}),
        ((1, 2, 4, 3, 5), {"kernel_size": 3, "padding": (1, 2, 0)}),
    ],
    ids=str,
)
def test_what_is_put_around_the_image_is_that_of_the_padding_mode(shape, conv, mode):
    agrees(whole(*shape), **conv, padding_mode=mode)


@pytest.mark.parametrize("shape", [(3, 6, 9), (3, 6, 5, 4), (2, 6, 3, 4, 3)], ids=str)
def test_a_depthwise_convolution_pools_its_channels(shape):
    for conv in ({"padding": 1}, {"stride": 2}):
        agrees(whole(*shape), kernel_size=3, groups=6, **conv)


def test_groups_add_up():
    x = whole(3, 8, 6, 6)
    apart = [patch_gram(part, kernel_size=3, padding=1) for part in x.chunk(4, 1)]
    assert torch.equal(patch_gram(x, kernel_size=3, padding=1, groups=4), sum(apart))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("size", "conv"),
    [
        ((5, 4), {"kernel_size": (5, 4)}),  # one output
        ((3, 3), {"kernel_size": 5, "padding": 1}),
        ((1, 1), {"kernel_size": 3, "padding": 1}),
        ((1, 1), {"kernel_size": 1}),
        ((2, 3), {"kernel_size": 5, "padding": 4, "dilation": 2}),  # shifts beyond the image
        ((2, 9), {"kernel_size": (2, 3), "padding": (5, 0), "dilation": (1, 4)}),  # windows of zeros alone, and of gaps
        ((9, 9), {"kernel_size": 2, "stride": 4}),  # rows that no patch has
    ],
    ids=str,
)
def test_borders_that_are_all_there_is(how, size, conv):
    x = whole(3, 2, *size)
    assert torch.equal(by(how, x, **conv), literal(x, **conv)[0])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_both_ways_agree_with_literal_sums_whatever_the_convolution(data):
    spatial = data.draw(st.integers(1, 3))
    groups, channels, samples = (data.draw(st.integers(1, 3)) for _ in range(3))
    per = lambda low, high: data.draw(st.tuples(*[st.integers(low, high)] * spatial))  # noqa: E731
    size, kernel, dilation = per(1, 8 if spatial < 3 else 4), per(1, 5 if spatial < 3 else 3), per(1, 3)
    stride, padding = per(1, 3), per(0, 4 if spatial < 3 else 2)
    assume(all(n + 2 * p > d * (k - 1) for n, p, d, k in zip(size, padding, dilation, kernel, strict=True)))
    # Torch reflects and repeats an image once at most.
    modes = ["zeros", "replicate"] + ["reflect", "circular"] * all(p < n for n, p in zip(size, padding, strict=True))
    mode = data.draw(st.sampled_from(modes))
    if mode == "zeros" and data.draw(st.booleans()):
        stride, padding = [1] * spatial, "same"
    x = whole(samples, groups * channels, *size, seed=data.draw(st.integers(0, 99)))
    conv = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    conv["padding_mode"] = mode
    expected, rows = literal(x, **conv)
    assert patch_count(x.shape, **conv) == rows
    most = data.draw(st.sampled_from([1, 40, 1000, 10**6]))
    for how in HOW:
        assert torch.equal(by(how, x, most=most, **conv), expected), how


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", ["same", "valid", 1])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_the_sum_gives_the_squares_of_any_convolution_of_torch(spatial, padding, mode):
    """Σ h² = wᵀ(Σ patch·patchᵀ)w, with the same w for every group."""
    torch.manual_seed(0)
    groups = 2
    module = CONV[spatial](4, 2, 4 if spatial < 3 else 2, padding=padding, groups=groups, bias=False, padding_mode=mode)
    module = module.double()
    w = torch.randn_like(module.weight[:1])
    module.weight.data.copy_(w.expand_as(module.weight))
    x = torch.randn(3, 4, *[6, 5, 7][:spatial], dtype=torch.float64)
    h = module(x)
    shape = {
        name: getattr(module, name)
        for name in ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    }
    assert patch_count(x.shape, **shape) == h.numel()
    for how in HOW:
        gram = by(how, x, **shape)
        assert (w.flatten() @ gram @ w.flatten()).item() == pytest.approx(h.square().sum().item(), rel=1e-12)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("shape", [(0, 4, 5), (0, 4, 5, 6), (0, 4, 3, 3, 3)], ids=str)
@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_no_samples_sum_to_zero(how, shape, mode):
    conv = {"kernel_size": 3, "padding": 1, "groups": 2, "padding_mode": mode}
    found = by(how, torch.empty(shape), **conv)
    size = 2 * 3 ** (len(shape) - 2)
    assert torch.equal(found, torch.zeros(size, size, dtype=torch.float64))
    assert patch_count(shape, **conv) == 0


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mode", ["zeros", "reflect"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_near_overflow_are_summed_exactly(how, dtype, mode):
    x = (whole(4, 3, 6, 6) * 6600).to(dtype)
    assert 5.9e4 <= x.abs().max() < math.inf
    conv = {"kernel_size": 3, "padding": 1, "padding_mode": mode}
    assert torch.equal(by(how, x, **conv), literal(x, **conv)[0])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
def test_the_layout_in_memory_makes_no_difference(how, groups, kernel):
    x = whole(3, 4, 6, 7)
    conv = {"kernel_size": kernel, "padding": kernel // 2, "groups": groups}
    expected = literal(x, **conv)[0]
    wide = torch.full((3, 8, 6, 14), torch.nan)
    wide[:, ::2, :, 1::2] = x
    layouts = {
        "channels last": x.to(memory_format=torch.channels_last),
        "transposed": x.transpose(2, 3).contiguous().transpose(2, 3),
        "samples last": x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
        "every other number": wide[:, ::2, :, 1::2],
        "requires grad": x.clone().requires_grad_(),
    }
    for name, one in layouts.items():
        found = by(how, one, **conv)
        assert torch.equal(found, expected), name
        assert not found.requires_grad
    repeated = x[:1].expand(3, -1, -1, -1)
    assert torch.equal(by(how, repeated, **conv), 3 * by(how, x[:1], **conv))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("most", [1, 100, 700, 10**4])
@pytest.mark.parametrize(
    "conv",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3},
        {"kernel_size": (2, 5), "stride": 2, "padding": 2, "padding_mode": "circular"},
    ],
    ids=str,
)
def test_parts_of_any_size_add_up(how, most, conv):
    x = whole(5, 3, 9, 8)
    assert torch.equal(by(how, x, most=most, **conv), literal(x, **conv)[0])


class Seen(TorchDispatchMode):
    """Every operation on tensors, by name, and the largest tensor any of them made but for views of `x`."""

    def __init__(self, x):
        super().__init__()
        self.names, self.largest, self.given = [], 0, x.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() != self.given:
            self.largest = max(self.largest, made.untyped_storage().nbytes() // made.element_size())
        return made


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("shape", "kernel"),
    [
        ((16, 4, 24, 24), 3),  # four times the bound, and its patches nine times that
        ((1, 4, 48, 48), 3),  # of a single sample
        ((1, 16, 24, 24), (1, 2)),  # products of channels are more than the image
    ],
    ids=["many samples", "one large sample", "many channels"],
)
def test_temporaries_stay_within_bounds(how, shape, kernel):
    x, most = whole(*shape), 4 * 48 * 48
    with Seen(x) as seen:
        by(how, x, most=most, kernel_size=kernel, padding="same")
    assert seen.largest <= 1.2 * most  # 1.2 for the padding


@pytest.mark.parametrize("how", HOW)
def test_operations_are_as_many_for_a_large_image_as_for_a_small_and_none_waits(how):
    counts = []
    for samples, size in ((2, 8), (16, 40)):
        x = whole(samples, 4, size, size)
        with Seen(x) as seen:
            by(how, x, kernel_size=3, padding=1)
        assert not {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item"} & set(seen.names)
        counts.append(len(seen.names))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("how", HOW)
def test_out_is_added_to_in_place(how):
    x, y = whole(2, 3, 6, 6, seed=1), whole(4, 3, 5, 9, seed=2)
    conv = {"kernel_size": 3, "padding": 1}
    total = by(how, x, **conv)
    assert by(how, y, **conv, out=total) is total
    assert torch.equal(total, literal(x, **conv)[0] + literal(y, **conv)[0])


@pytest.mark.parametrize("how", HOW)
def test_rounding_does_not_break_symmetry(how):
    torch.manual_seed(0)
    x = torch.randn(3, 37, 9, 6)
    for conv in ({"padding": 1}, {"stride": 2}, {"dilation": 2}):
        found = by(how, x, kernel_size=3, **conv)
        assert torch.equal(found, found.T)
        torch.testing.assert_close(found, literal(x, kernel_size=3, **conv)[0], rtol=1e-12, atol=1e-10)


def test_shifts_cancel_nothing_at_a_border_that_is_far_larger_than_the_rest():
    """Sums over the inner kernel positions alone do not see the border, and keep all their digits."""
    torch.manual_seed(0)
    x = torch.rand(4, 2, 8, 8, dtype=torch.float64)
    inner = x[:, :, 1:-1, 1:-1].clone()
    x *= 1e12
    x[:, :, 1:-1, 1:-1] = inner
    expected = literal(x, kernel_size=3)[0]
    torch.testing.assert_close(by("shifts", x, kernel_size=3), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("how", HOW)
def test_autocast_does_not_reach_the_products(how):
    x = whole(2, 3, 6, 6) + 0.5 + 2.0**-12  # more digits than bfloat16 has
    conv = {"kernel_size": 3, "padding": 1, "dtype": torch.float32}
    expected = by(how, x, **conv)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = by(how, x, **conv)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(128, 64, 32, 32), (128, 128, 16, 16), (128, 256, 8, 8), (128, 512, 4, 4)], ids=str)
def test_the_layers_of_a_resnet_are_summed_by_shifts(shape):
    x = torch.empty((*shape[:2], 1, 1)).expand(shape)
    with mock.patch.object(patches, "add_shifted") as shifted, mock.patch.object(patches, "add_unfolded") as unfolded:
        patch_gram(x, kernel_size=3, padding=1)
        assert (shifted.call_count, unfolded.call_count) == (1, 0)
        patch_gram(x, kernel_size=1, stride=2)
        assert (shifted.call_count, unfolded.call_count) == (1, 1)


def test_each_product_of_two_positions_is_taken_once():
    """3×3 positions have 25 differences, 13 up to sign; only pairs of positions in the image count."""
    size = 7
    pairs = {
        frozenset([(a, b), (a + i, b + j)])
        for a, b, i, j in itertools.product(range(size), range(size), range(-2, 3), range(-2, 3))
        if a + i in range(size) and b + j in range(size)
    }
    same = Axis(size=size, kernel=3, before=1, after=1)
    assert effort([same, same]).products == len(pairs)
    valid = Axis(size=size, kernel=3)
    assert effort([valid, valid]).products == len(pairs)


@pytest.mark.parametrize(
    ("shape", "conv", "says"),
    [
        ((4, 5), {"kernel_size": 1}, r"1 to 3 spatial dimensions, got shape \[4, 5\]"),
        ((1, 1, 2, 2, 2, 2), {"kernel_size": 1}, "1 to 3 spatial dimensions"),
        ((1, 4, 5), {"kernel_size": 1, "groups": 3}, "divide the 4 channels, got 3"),
        ((1, 4, 5), {"kernel_size": 1, "groups": 0}, "divide the 4 channels, got 0"),
        ((1, 4, 5), {"kernel_size": 6}, r"kernel of \[6\] with dilation \[1\] does not fit into an input of \[5\]"),
        ((1, 4, 5), {"kernel_size": 3, "dilation": 3}, "does not fit"),
        ((1, 4, 5), {"kernel_size": (1, 1)}, r"`kernel_size` must be .* got \(1, 1\)"),
        ((1, 4, 5), {"kernel_size": 0}, "`kernel_size` must be .* got 0"),
        ((1, 4, 5), {"kernel_size": 1, "stride": 0}, "`stride` must be .* got 0"),
        ((1, 4, 5), {"kernel_size": 1, "padding": -1}, "`padding` must be .* got -1"),
        ((1, 4, 5), {"kernel_size": 1, "padding": "full"}, "numbers, 'same' or 'valid', got 'full'"),
        ((1, 4, 5), {"kernel_size": 3, "padding": "same", "stride": 2}, "got 'same' with stride 2"),
        ((1, 4, 5), {"kernel_size": 1, "padding_mode": "mirror"}, "one of 'zeros', 'reflect'.* got 'mirror'"),
    ],
)
def test_what_is_no_convolution_is_refused(shape, conv, says):
    with pytest.raises(ConditioningError, match=says):
        patch_gram(torch.zeros(shape), **conv)
    with pytest.raises(ConditioningError, match=says):
        patch_count(shape, **conv)


def test_inputs_and_outs_of_another_kind_are_refused():
    with pytest.raises(ConditioningError, match=r"real floating-point tensor, got torch\.int64"):
        patch_gram(torch.zeros(1, 1, 5, dtype=torch.int64), kernel_size=2)
    x = torch.zeros(1, 1, 5)
    with pytest.raises(ConditioningError, match=r"\[2, 2\] in torch.float64 on cpu .* got \[3, 3\]"):
        patch_gram(x, kernel_size=2, out=torch.zeros(3, 3, dtype=torch.float64))
    with pytest.raises(ConditioningError, match=r"got \[2, 2\] in torch.float32"):
        patch_gram(x, kernel_size=2, out=torch.zeros(2, 2))


def test_the_order_is_channels_then_kernel_positions():
    x = torch.zeros(1, 2, 2, 2)
    x[0, 1, 1, 0] = 1
    expected = np.zeros((8, 8))
    expected[6, 6] = 1
    for how in HOW:
        assert torch.equal(by(how, x, kernel_size=2), torch.from_numpy(expected))
