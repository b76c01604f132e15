"""Counts, means and ranks of activations, against loops over single numbers and against nets with known dead units."""

from __future__ import annotations

import pytest
import torch
from activation_models import Functional, close, seeded, watched
from torch import nn

from gyroscope.passes.activations import numerical_rank, positive_eigenvalues, spread
from oracles.activations import rank, statistics


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# A layer, its input, and whether it puts out images.
LAYERS = {
    "linear": (lambda: nn.Linear(5, 12), (6, 5), False),
    "a sequence": (lambda: nn.Linear(5, 12), (3, 4, 5), False),
    "one sample": (lambda: nn.Linear(5, 12), (5,), False),
    "conv1d": (lambda: nn.Conv1d(3, 6, 3), (4, 3, 8), True),
    "conv2d": (lambda: nn.Conv2d(3, 6, 3), (4, 3, 6, 6), True),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2), (3, 2, 3, 4, 4), True),
    "transposed": (lambda: nn.ConvTranspose2d(3, 6, 3), (4, 3, 4, 4), True),
    "as many channels as columns": (lambda: nn.Conv2d(3, 4, 3), (4, 3, 6, 6), True),
}


@pytest.mark.parametrize(("make", "shape", "images"), LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("module", [True, False], ids=["nn.ReLU", "output"])
def test_statistics_equal_the_literal_ones(make, shape, images, module):
    layer, x = make(), seeded(shape)
    net = nn.Sequential(layer, nn.ReLU()) if module else nn.Sequential(layer)
    (got,) = watched(net, lambda: net(x)).values()
    assert close(got, statistics([net(x)], images=images))


RECTIFIERS = [
    nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.LeakyReLU(0.1), nn.LeakyReLU(0.1, inplace=True), nn.PReLU(),
    nn.RReLU(), nn.ELU(), nn.CELU(), nn.SELU(), nn.GELU(), nn.SiLU(), nn.SiLU(inplace=True), nn.Mish(), nn.Hardswish(),
]  # fmt: skip


@pytest.mark.parametrize("module", RECTIFIERS, ids=repr)
def test_a_unit_is_active_where_the_input_of_its_nonlinearity_is_positive(module):
    layer, x = nn.Linear(3, 40), seeded((4, 3))
    net = nn.Sequential(layer, module)
    got = watched(net, lambda: net(x))["0.weight"]
    expected = statistics([layer(x)])
    assert 0 < expected["dying"] < 1
    assert (got["dying"], got["full"]) == pytest.approx((expected["dying"], expected["full"]))
    torch.manual_seed(1)
    out = net(x)
    torch.manual_seed(1)
    assert watched(net, lambda: net(x))["0.weight"]["activation_mean"] == pytest.approx(out.mean().item())


def test_a_threshold_module_is_active_above_its_threshold():
    layer, x = nn.Linear(3, 40), seeded((4, 3))
    net = nn.Sequential(layer, nn.Threshold(0.5, 0.2))
    got = watched(net, lambda: net(x))["0.weight"]
    assert got["dying"] == pytest.approx(statistics([layer(x)], threshold=0.5)["dying"])


def test_a_threshold_for_outputs_is_heeded():
    net, x = nn.Sequential(nn.Linear(3, 40)), seeded((4, 3))
    got = watched(net, lambda: net(x), threshold=0.7)["0.weight"]
    assert close(got, statistics([net(x)], threshold=0.7))


def test_dead_and_full_units_are_counted_exactly():
    net = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 1))
    with torch.no_grad():
        net[0].bias.zero_()
        net[0].bias[:3] = -1e3
        net[0].bias[3:5] = 1e3
    got = watched(net, lambda: net(seeded((64, 4))))["0.weight"]
    assert (got["dying"], got["full"]) == (pytest.approx(0.3), pytest.approx(0.2))
    assert got["activation_rank"] == 7


def test_a_channel_that_is_dead_at_some_positions_is_a_dying_unit_there_and_no_dying_channel():
    conv = nn.Conv2d(1, 2, 1, bias=False)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([1.0, -1.0]).view(2, 1, 1, 1))
    x = torch.ones(5, 1, 2, 2)
    x[:, :, 0] = -1.0
    net = nn.Sequential(conv, nn.ReLU())
    got = watched(net, lambda: net(x))["0.weight"]
    assert (got["dying"], got["full"], got["dying_channels"], got["full_channels"]) == (0.5, 0.5, 0.0, 0.0)
    assert got["activation_mean"] == 0.5
    assert got["nu"] == 1.5


def test_several_passes_count_as_one_batch():
    net = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU())
    one, two, three = seeded((2, 2, 5, 5)), seeded((3, 2, 5, 5), 1), seeded((1, 2, 5, 5), 2)

    def run():
        for x in (one, two, three):
            net(x)

    got = watched(net, run)["0.weight"]
    whole = statistics([net(torch.cat([one, two, three]))], images=True)
    apart = statistics([net(one), net(two), net(three)], images=True)
    assert close(got, whole | {"activation_rank": apart["activation_rank"]})


def test_passes_of_images_of_different_sizes_add_up():
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU())
    small, large = seeded((2, 1, 4, 4)), seeded((2, 1, 5, 5), 1)
    got = watched(net, lambda: (net(small), net(large)))["0.weight"]
    apart = [statistics([net(x)], images=True) for x in (small, large)]
    units = [3 * 4, 3 * 9]
    assert got["dying"] == pytest.approx(sum(s["dying"] * n for s, n in zip(apart, units, strict=True)) / sum(units))
    assert got["activation_mean"] == pytest.approx(
        (apart[0]["activation_mean"] * 4 + apart[1]["activation_mean"] * 9) / 13, rel=1e-5
    )


def test_passes_of_sequences_of_different_lengths_add_up():
    net = nn.Sequential(nn.Linear(4, 7), nn.ReLU())
    one, two = seeded((2, 3, 4)), seeded((2, 9, 4), 1)
    got = watched(net, lambda: (net(one), net(two)))["0.weight"]
    whole = statistics([torch.cat([net(one).flatten(0, 1), net(two).flatten(0, 1)])])
    assert close({**got, "activation_rank": whole["activation_rank"]}, whole)


def test_an_empty_batch_counts_for_nothing():
    net, x = nn.Sequential(nn.Linear(4, 7), nn.ReLU()), seeded((3, 4))
    with_empty = watched(net, lambda: (net(x[:0]), net(x), net(x[:0])))
    assert with_empty == watched(net, lambda: net(x))


def test_channels_last_images_give_the_same():
    net, x = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU()), seeded((4, 3, 6, 6))
    expected = watched(net, lambda: net(x))
    assert watched(net, lambda: net(x.to(memory_format=torch.channels_last))) == {
        "0.weight": pytest.approx(expected["0.weight"])
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_counted_as_they_are(dtype):
    net, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).to(dtype), seeded((32, 8)).to(dtype)
    got = watched(net, lambda: net(x))["0.weight"]
    assert close(got, statistics([net(x)]))


def test_under_autocast_sums_are_not():
    net, x = nn.Sequential(nn.Linear(8, 300), nn.ReLU()), seeded((64, 8)) + 5
    with torch.autocast("cpu", torch.bfloat16):
        got = watched(net, lambda: net(x))["0.weight"]
        out = net(x)
    assert out.dtype is torch.bfloat16
    assert got["activation_mean"] == pytest.approx(out.double().mean().item(), rel=1e-6)


def test_an_activation_that_is_not_finite_makes_everything_unknown():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), seeded((5, 3))
    x[0, 0] = torch.inf
    got = watched(net, lambda: net(x))["0.weight"]
    assert all(value != value for value in got.values())


@pytest.mark.parametrize("how", ["flattened", "pooled", "channels moved", "one image"])
def test_what_lies_between_layer_and_nonlinearity_may_change_the_shape(how):
    conv, x = nn.Conv2d(1, 6, 2), seeded((4, 1, 4, 4))
    forward, images = {
        "flattened": (lambda m, x: m.relu(m.conv(x).flatten(1)), False),
        "pooled": (lambda m, x: m.relu(m.conv(x).mean((2, 3))), False),
        "channels moved": (lambda m, x: m.relu(m.conv(x).movedim(1, -1)), False),
        "one image": (lambda m, x: m.relu(m.conv(x[0]))[None], True),
    }[how]
    net = Functional(lambda m, x: forward(m, x), conv=conv, relu=nn.ReLU())
    got = watched(net, lambda: net(x))["parts.conv.weight"]
    assert close(got, statistics([net(x)], images=images))


def test_sequences_whose_channels_lie_before_time_are_still_samples():
    net = Functional(
        lambda m, x: m.relu(m.norm(m.linear(x).transpose(1, 2))),
        linear=nn.Linear(3, 5), norm=nn.BatchNorm1d(5), relu=nn.ReLU(),
    )  # fmt: skip
    x = seeded((4, 7, 3))
    got = watched(net, lambda: net(x))["parts.linear.weight"]
    assert close(got, statistics([net(x).transpose(1, 2)]))


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (30, 30), (1, 5), (5, 1)])
@pytest.mark.parametrize("true", [1, 3, 12, 30])
def test_the_numerical_rank_is_that_of_the_singular_values(shape, true):
    m, n = shape
    matrix = seeded((m, true)) @ seeded((true, n), 1) + 2.0
    assert numerical_rank(matrix) == rank(matrix.double().numpy()) <= true + 1


@pytest.mark.parametrize("matrix", [torch.zeros(6, 4), torch.eye(5) * 1e-20, torch.eye(5) * 1e15], ids=str)
def test_the_rank_does_not_depend_on_the_scale(matrix):
    assert numerical_rank(matrix) == rank(matrix.double().numpy())


@pytest.mark.parametrize("n", [2, 5, 40])
def test_positive_eigenvalues_of_indefinite_matrices_are_counted(n):
    # With zeros on the diagonal the factorization needs 2×2 blocks.
    matrix = seeded((n, n)).double()
    matrix = (matrix + matrix.T).fill_diagonal_(0.0)
    assert positive_eigenvalues(matrix) == (torch.linalg.eigvalsh(matrix) > 0).sum()


def test_a_rank_of_many_channels_and_samples_is_that_of_some():
    net, x = nn.Sequential(nn.Linear(10, 600, bias=False)), seeded((3000, 10))
    assert watched(net, lambda: net(x), rank=32)["0.weight"]["activation_rank"] == 10
    assert watched(net, lambda: net(x), rank=4)["0.weight"]["activation_rank"] == 4
    assert watched(net, lambda: net(x), rank=0)["0.weight"]["activation_rank"] != 10


@pytest.mark.parametrize(("n", "most"), [(10, 10), (11, 10), (1000, 7), (65537, 65536), (10**6, 1000)])
def test_positions_are_spread_evenly_and_no_two_are_the_same(n, most):
    found = spread(n, most, torch.device("cpu"))
    assert len(found) == min(n, most)
    assert found[0] >= 0
    assert found[-1] < n
    gaps = found.diff()
    assert gaps.min() >= 1
    assert gaps.max() <= 2 * -(-n // most)


@pytest.mark.parametrize("period", [2, 7, 32, 64, 100, 512])
def test_positions_fall_in_step_with_nothing_that_repeats(period):
    found = spread(64 * 8192, 8192, torch.device("cpu")) % period
    counts = torch.bincount(found, minlength=period)
    assert counts.min() > 0.5 * 8192 / period
