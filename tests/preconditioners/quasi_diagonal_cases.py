"""The kernels of the quasi-diagonal preconditioner against torch's operations; run in Triton's interpreter.

`test_quasi_diagonal_kernels` starts these in a process of their own. On a machine with a GPU the same claims are
checked on it: `make gpu`.
"""

import copy
import os

import pytest
import torch
from recorder import Recorder
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import _disable_current_modes

import gyroscope.control.preconditioners.direction_kernel as direction_kernel
import gyroscope.control.preconditioners.moment_kernels as moment_kernels
import gyroscope.control.preconditioners.observer as observer
import gyroscope.control.preconditioners.preconditioner as preconditioner
import gyroscope.control.preconditioners.quasi_diagonal as module
import gyroscope.control.preconditioners.running as running
import gyroscope.vectors.launch as launch
from gyroscope.control.preconditioners.affine_layers import Place
from gyroscope.control.preconditioners.direction_kernel import Directions
from gyroscope.control.preconditioners.moment_kernels import MomentLaunches
from gyroscope.control.preconditioners.quasi_diagonal import QuasiDiagonal
from gyroscope.control.preconditioners.running import Spreads
from gyroscope.errors import DynamicsError
from gyroscope.vectors.launch import Addresses, Launcher
from interpreted import hasten_interpreter

hasten_interpreter()
DEVICE = torch.device(os.environ.get("GYROSCOPE_TEST_DEVICE", "cpu"))
# The interpreter computes with numpy, which warns where a GPU quietly gives inf or nan.
pytestmark = [pytest.mark.any_device, pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
# cuDNN adds up the gradients of weights in any order.
ALIKE = CLOSE if DEVICE.type == "cuda" else {"rtol": 0.0, "atol": 0.0}


def make_net(dtype=torch.float64):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Conv2d(3, 3, 3, padding=1),
        nn.Tanh(), nn.Conv2d(3, 2, (2, 3), stride=2, bias=False), nn.Flatten(),
        nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 5, bias=False), nn.Linear(5, 3),
    )  # fmt: skip
    return net.to(DEVICE, dtype)


def batch(step, dtype=torch.float64, n=6):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(n, 2, 5, 6, generator=generator, dtype=torch.float64) + step
    return x.to(DEVICE, dtype), torch.randint(3, (n,), generator=generator).to(DEVICE)


def train(net, optimizer, step, n=6):
    optimizer.zero_grad()
    dtype = next(net.parameters()).dtype
    x, y = batch(step, dtype, n)
    F.cross_entropy(net(x).float() if dtype == torch.bfloat16 else net(x), y).backward()
    optimizer.step()


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def torchs(monkeypatch):
    """Switch the kernels off, for optimizers that are made and stepped under it."""

    def switch(on):
        monkeypatch.setattr(module, "has_kernels", lambda held: not on and len(held) == 1)

    return switch


@pytest.fixture
def launched(monkeypatch):
    """Names of what was done by kernels."""
    names = []
    for cls, name in ((MomentLaunches, "measure"), (MomentLaunches, "fold"), (Directions, "__call__")):
        real = getattr(cls, name)

        def call(self, *given, real=real, name=name):
            found = real(self, *given)
            if name == "fold" or found is not None:
                names.append(name)
            return found

        monkeypatch.setattr(cls, name, call)
    return names


def follow(make, steps, torchs, start=None):
    """Train on the same batches by kernels and by torch's operations."""
    nets, optimizers = [], []
    for plain in (False, True):
        torchs(plain)
        net = make_net() if start is None else copy.deepcopy(start)
        optimizer = make(net)
        for step in steps:
            train(net, optimizer, step)
        nets.append(net)
        optimizers.append(optimizer)
    for ours, theirs in zip(nets[0].state_dict().values(), nets[1].state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    for i in range(len(optimizers[0].layers)):
        ours, theirs = (one._statistics.state(i) for one in optimizers)
        assert ours["count"] == theirs["count"]
        for name in ("mean", "variance"):
            torch.testing.assert_close(ours[name], theirs[name], **CLOSE)
    return nets[0], optimizers[0]


@pytest.mark.parametrize("options", [{}, {"damping": 0.0, "decay": 0.5}, {"biases": False, "every": 2}])
def test_training_is_that_of_torchs_operations(options, torchs, launched):
    follow(lambda net: QuasiDiagonal(sgd(net), net, **options), range(3), torchs)
    looks = 2 if "every" in options else 3
    assert [launched.count(name) for name in ("measure", "fold", "__call__")] == [looks, looks, 3]


@pytest.mark.parametrize("labels", ["true", "sampled"])
def test_scales_of_preactivations_are_those_of_torchs_operations(labels, torchs, launched):
    loss = None if labels == "true" else F.cross_entropy
    follow(lambda net: QuasiDiagonal(sgd(net), net, loss, labels=labels), range(2), torchs)
    assert launched == ["__call__"] * 2


def test_training_with_channels_last_is_that_of_torchs_operations(torchs, launched):
    start = make_net().to(memory_format=torch.channels_last)
    follow(lambda net: QuasiDiagonal(sgd(net), net), range(2), torchs, start)
    assert len(launched) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shorter_numbers_give_the_step_of_torchs_operations_to_their_rounding(dtype, torchs, launched):
    found = []
    for plain in (False, True):
        torchs(plain)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 7), nn.Tanh(), nn.Linear(7, 70, bias=False)).to(DEVICE, dtype)
        before = [p.detach().double() for p in net.parameters()]
        optimizer = QuasiDiagonal(torch.optim.SGD(net.parameters(), lr=1.0), net)
        x = torch.randn(70, 20, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
        net(x).float().square().mean().backward()
        optimizer.step()
        found.append([p.detach().double() - old for p, old in zip(net.parameters(), before, strict=True)])
    assert len(launched) == 3
    for ours, theirs in zip(*found, strict=True):
        bound = 4 * torch.finfo(dtype).eps
        assert float((ours - theirs).norm()) <= bound * (float(theirs.norm()) + 5), (ours, theirs)


SIZES = [(1, 3), (64, 33), (65, 31), (300, 40)]


def batch_moments(place, x):
    """What the kernels find of a first batch."""
    spreads = Spreads([place.inputs], 0.9, torch.empty((), dtype=torch.float64, device=DEVICE))
    launches = MomentLaunches([place], [0], spreads)
    measured = launches.measure([0], [x], len(x), None)
    launches.fold(measured)
    return spreads, measured


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_moments_of_rows_are_those_of_numbers_in_float64(size, dtype):
    x = (3 + torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).to(DEVICE, dtype)
    spreads, _ = batch_moments(Place("", nn.Linear(size[1], 2), True), x)
    close = CLOSE if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(spreads.mean, x.double().mean(0), **close)
    torch.testing.assert_close(spreads.variance, x.double().var(0, correction=0), **close)


def test_rows_of_many_parts_are_put_together(monkeypatch):
    monkeypatch.setattr(moment_kernels, "_PART", 64)
    monkeypatch.setattr(moment_kernels, "_PARTS", 4)
    place = Place("", nn.Linear(3, 2), True)
    for rows in (65, 128, 200, 400):
        x = torch.randn(rows, 3, dtype=torch.float64, device=DEVICE) + torch.arange(rows, device=DEVICE)[:, None]
        spreads, measured = batch_moments(place, x)
        assert 1 < measured.plan.matrices[0].parts <= 4
        torch.testing.assert_close(spreads.mean, x.mean(0), **CLOSE)
        torch.testing.assert_close(spreads.variance, x.var(0, correction=0), **CLOSE)
        ((mean, variance),) = measured.plan.moments(measured.partial)
        torch.testing.assert_close(mean, x.mean(0), **CLOSE)
        torch.testing.assert_close(variance, x.var(0, correction=0), **CLOSE)


@pytest.mark.parametrize("outlier", [0.0, 1e6])
def test_variances_far_from_zero_keep_their_digits_in_float32(outlier):
    x = 1000 + torch.randn(300, 2, dtype=torch.float64, device=DEVICE)
    x[0] += outlier
    spreads, _ = batch_moments(Place("", nn.Linear(2, 2), True), x.float())
    torch.testing.assert_close(spreads.variance, x.float().double().var(0, correction=0), rtol=2e-4, atol=0)


CONVS = [
    {"kernel_size": (3, 2), "padding": 1},
    {"kernel_size": (3, 2), "padding": (2, 0), "stride": (2, 1), "dilation": (1, 2)},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    {"kernel_size": 3, "padding": "same", "padding_mode": "circular"},
    {"kernel_size": (2, 3), "padding": "same"},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": 5, "padding": 2},
]


@pytest.mark.parametrize(("options", "last"), [*((one, False) for one in CONVS), (CONVS[1], True), (CONVS[4], True)])
def test_moments_of_patches_are_those_of_all_patches(options, last):
    conv = nn.Conv2d(3, 2, **options).double()
    x = 10 + torch.randn(4, 3, 11, 13, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x.to(memory_format=torch.channels_last) if last else x
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    padded = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
    rows = F.unfold(padded, conv.kernel_size, conv.dilation, 0, conv.stride).movedim(1, -1).flatten(0, 1)
    spreads, measured = batch_moments(Place("", conv, True), x.to(DEVICE))
    assert measured.plan.matrices[0].last == last
    torch.testing.assert_close(spreads.mean.cpu(), rows.mean(0), **CLOSE)
    torch.testing.assert_close(spreads.variance.cpu(), rows.var(0, correction=0), **CLOSE)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_counts_and_changes_nothing_else(bad):
    place = Place("", nn.Conv2d(2, 1, 2, padding=1), True)
    x = torch.randn(3, 2, 4, 4, device=DEVICE)
    spreads, _ = batch_moments(place, x)
    launches, before = MomentLaunches([place], [0], spreads), spreads.value.clone()
    x[1, 1, 2, 2] = bad
    launches.fold(launches.measure([0], [x], 3, None))
    assert torch.equal(spreads.value, before)
    assert spreads.counts.value.tolist() == [2]


class Odd(nn.Module):
    """What kernels leave to torch, by name."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.first, self.second = kind, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = x.flatten(1)[:, :8]
        h = self.first(x[:, ::2] if self.kind == "strided" else x[:, :4].contiguous())
        if self.kind == "twice":
            h = self.first(h.tanh())
        return h.sum(1) if self.kind == "unused" else self.second(h.tanh())[:, :3]


@pytest.mark.parametrize(
    "kind", ["strided", "twice", "unused", "half", "accumulated", "no bias gradient", "transposed"]
)
def test_what_is_out_of_the_ordinary_is_left_to_torchs_operations(kind, torchs, launched):
    found = []
    for plain in (False, True):
        torchs(plain)
        net = Odd(kind).double().to(DEVICE)
        if kind == "half":
            net.second.float()
            net.second.register_forward_pre_hook(lambda _, args: args[0].float())
        optimizer = QuasiDiagonal(sgd(net), net)
        for step in range(2):
            optimizer.zero_grad()
            for part in range(2 if kind == "accumulated" else 1):
                net(batch(2 * step + part)[0]).square().mean().backward()
            if kind == "no bias gradient" and step == 1:
                net.first.bias.grad = None
            if kind == "transposed" and step > 0:
                net.first.weight.grad = net.first.weight.grad.T.contiguous().T
            optimizer.step()
        found.append([p.detach() for p in net.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, **(CLOSE if kind != "half" else {"rtol": 1e-5, "atol": 1e-6}))
    folds, calls = launched.count("fold"), launched.count("__call__")
    assert (folds, calls) == {
        "strided": (0, 2), "twice": (0, 2), "unused": (0, 0), "half": (2, 0), "accumulated": (0, 2),
        "no bias gradient": (2, 1), "transposed": (2, 1),
    }[kind]  # fmt: skip


def test_inputs_of_several_dtypes_are_measured_in_a_launch_each(torchs, launched):
    found = []
    for plain in (False, True):
        torchs(plain)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(DEVICE)
        optimizer = QuasiDiagonal(sgd(net), net)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = net(torch.ones(5, 4, device=DEVICE).cumsum(0)).float().square().mean()
        loss.backward()
        optimizer.step()
        found.append(optimizer._statistics.state(1))
    assert launched == ["measure", "fold", "__call__"]
    for name in ("mean", "variance"):
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-4, atol=1e-5)


def test_sizes_of_batches_and_damping_may_change(torchs):
    found = []
    for plain in (False, True):
        torchs(plain)
        net = make_net()
        optimizer = QuasiDiagonal(sgd(net), net)
        for step, n in enumerate((6, 70, 6)):
            optimizer.damping = 0.1 * step
            train(net, optimizer, step, n)
        found.append([p.detach() for p in net.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("constant", [slice(0, 1), slice(None)], ids=["one", "all"])
def test_inputs_that_are_the_same_in_all_samples_have_no_variance(torchs, damping, biased, constant):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    x[:, constant] = torch.tensor([0.1, 0.7, -3.3], dtype=torch.float64)[constant]
    found = []
    for plain in (False, True):
        torchs(plain)
        torch.manual_seed(0)
        net = nn.Linear(3, 2, bias=biased).to(DEVICE, torch.float64)
        before = net.weight.detach().clone()
        optimizer = QuasiDiagonal(torch.optim.SGD(net.parameters(), lr=0.01), net, damping=damping)
        for _ in range(2):  # the kernels are made for the second
            optimizer.zero_grad()
            net(x.to(DEVICE)).square().mean().backward()
            optimizer.step()
        moved = net.weight.detach() - before
        assert moved.abs().max() < 1
        found.append(moved)
    torch.testing.assert_close(*found, **CLOSE)


def test_copies_and_loaded_states_train_on_alike_and_gradients_are_the_loops_own():
    net = make_net()
    optimizer = QuasiDiagonal(sgd(net), net)
    for step in range(2):
        train(net, optimizer, step)
    twin, its = copy.deepcopy((net, optimizer))
    third = make_net()
    third.load_state_dict(net.state_dict())
    loaded = QuasiDiagonal(sgd(third), third)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, own in ((net, optimizer), (twin, its), (third, loaded)):
        train(one, own, 2)
    for ours, copied, other in zip(net.parameters(), twin.parameters(), third.parameters(), strict=True):
        torch.testing.assert_close(copied, ours, **ALIKE)
        torch.testing.assert_close(other, ours, **ALIKE)
    x, y = batch(5)
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    before = [(p.grad, p.grad.clone()) for p in net.parameters()]
    optimizer.step()
    for p, (grad, value) in zip(net.parameters(), before, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, value)


class WithLaunches(Recorder):
    """Records launches of kernels too."""

    def __init__(self, monkeypatch):
        super().__init__()
        real = Launcher.__call__

        def launch(launcher, arguments):
            self.calls.append((real, (launcher, arguments), {}, None))
            with _disable_current_modes():  # what the interpreter does is no part of it
                real(launcher, arguments)

        monkeypatch.setattr(Launcher, "__call__", launch)


@pytest.fixture
def capturing(monkeypatch):
    def switch(on):
        for one in (module, observer, preconditioner, running, moment_kernels, direction_kernel, launch):
            monkeypatch.setattr(one, "is_capturing", lambda: on)

    return switch


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a real graph is captured there")
@pytest.mark.parametrize("labels", [None, "true"])
def test_a_replayed_step_trains_as_one_that_is_taken(labels, capturing, monkeypatch, launched):
    net = make_net()
    optimizer = QuasiDiagonal(sgd(net), net, labels=labels, decay=0.8)
    for step in range(2):
        train(net, optimizer, step)
    twin, its = copy.deepcopy((net, optimizer))
    x, y = batch(2)
    held = optimizer._statistics.held[0]
    averages = [one for one in (held.activations, held.slopes) if one is not None]
    kept = [t for one in averages for t in (one.value, one.counts.value)]
    kept += [*net.state_dict().values(), *(s["momentum_buffer"] for s in optimizer.state.values())]
    start = [t.clone() for t in kept]
    launched.clear()
    capturing(True)
    with monkeypatch.context() as patched, WithLaunches(patched) as graph:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    capturing(False)
    assert launched == (["measure", "fold", "__call__"] if labels is None else ["__call__"])
    # Unlike a graph, the recorder takes the step that it records: go back.
    with torch.no_grad():
        for t, before in zip(kept, start, strict=True):
            t.copy_(before)
    for step in range(2, 4):
        for static, given in zip((x, y), batch(step), strict=True):
            static.copy_(given)
        graph.replay()
        train(twin, its, step)
    for ours, theirs in zip(net.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    assert optimizer._statistics.state(0)["count"] == 4


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a real graph is captured there")
def test_a_graph_without_a_step_before_it_is_refused_and_a_second_one_right_after_goes_torchs_way(capturing, launched):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    optimizer = QuasiDiagonal(sgd(net), net)
    kept = []  # all that a table has the address of: one that came back would need no new table
    for layer in net:
        layer.register_forward_pre_hook(lambda _, given: kept.append(given))

    def step():
        optimizer.zero_grad()
        net(torch.randn(4, 3, dtype=torch.float64)).square().mean().backward()
        kept.append([p.grad for p in net.parameters()])
        optimizer.step()

    capturing(True)
    with pytest.raises(DynamicsError, match="no step before it had"):
        step()
    capturing(False)
    step()
    capturing(True)
    launched.clear()
    step()
    step()
    assert launched == ["measure", "fold", "__call__"]
    assert optimizer._statistics.state(0)["count"] == 3


def test_tables_are_found_again_by_address_and_kept_where_a_graph_has_them(capturing):
    addresses = Addresses(torch.device("cpu"))
    first = addresses.table([3, 5])
    assert first.tolist() == [3, 5]
    assert addresses.table([3, 6]).tolist() == [3, 6]
    assert addresses.table([3, 5]) is first
    capturing(True)
    assert addresses.table([3, 5]) is first
    inside = addresses.table([7, 8])
    assert inside.tolist() == [7, 8]
    assert addresses.table([7, 9]) is None
    capturing(False)
    for i in range(40):
        assert addresses.table([i, 9]).tolist() == [i, 9]
    assert inside.tolist() == [7, 8]
