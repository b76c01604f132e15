"""Every number that `watch` records is that of a literal float64 oracle on copies of the weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watched import backward, check, copies_of, inputs, mlp, train

import gyroscope
from gyroscope.monitor import bundle
from oracles.monitor import cosine_distance, measured

pytestmark = pytest.mark.usefixtures("cpu_backend")


def plain(model: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def watch(model, optimizer, path, **options) -> gyroscope.Monitor:
    return gyroscope.watch(model, optimizer, path, **{"budget": None, "activations": False, **options})


def trial(tmp_path, model, xs, *, optimizer=None, step=backward, **tolerances) -> None:
    optimizer = plain(model) if optimizer is None else optimizer
    copies = copies_of(model)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, xs, copies=copies, step=step)
    assert monitor.error is None
    check(monitor.path, copies, range(len(xs) + 1), **tolerances)


@pytest.mark.parametrize("every", [1, 4])
def test_every_quantity_equals_the_oracle(tmp_path, every):
    model, count = mlp(), 12
    optimizer, copies = plain(model, weight_decay=0.01), copies_of(model)
    with watch(model, optimizer, tmp_path / "run", every=every) as monitor:
        train(model, optimizer, inputs(count), copies=copies)
    check(monitor.path, copies, range(0, count + 1, every))


def test_the_last_step_is_recorded_also_when_it_was_not_due(tmp_path):
    model = mlp()
    optimizer, copies = plain(model), copies_of(model)
    with watch(model, optimizer, tmp_path / "run", every=4) as monitor:
        train(model, optimizer, inputs(10), copies=copies)
    check(monitor.path, copies, [0, 4, 8, 10], whole=[False, True, True, False])


def test_the_run_of_a_monitor_can_be_loaded_before_during_and_after_training(tmp_path):
    model = mlp()
    optimizer = plain(model)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        assert gyroscope.load(monitor.path).layers == monitor.layers
        assert gyroscope.load(monitor.run).steps.tolist() == [0]
        train(model, optimizer, inputs(3))
        assert gyroscope.load(monitor.run).steps.tolist() == [0, 1, 2, 3]
        assert gyroscope.load(monitor.path).state == "running"
    assert gyroscope.load(monitor.run).state == gyroscope.load(monitor.path).state == "ended"


def test_step_zero_is_recorded_before_any_step_and_without_one(tmp_path):
    model = mlp()
    with watch(model, plain(model), tmp_path / "run") as monitor:
        assert monitor.run.steps.tolist() == [0]
    with gyroscope.load(monitor.path) as run:
        assert run.steps.tolist() == [0]
        assert run.series("rotation").tolist() == [[0.0, 0.0, 0.0]]
        assert np.isnan(run.series("gradient_norm")).all()


def test_rates_are_since_the_last_measured_step_when_the_interval_changes(tmp_path):
    model = mlp()
    optimizer, copies = plain(model), copies_of(model)
    with watch(model, optimizer, tmp_path / "run", every=4) as monitor:

        def change(i):
            if i == 5:
                monitor.every = 1
            if i == 8:
                monitor.every = 4

        train(model, optimizer, inputs(14), copies=copies, each=change)
    check(monitor.path, copies, [0, 4, 6, 7, 8, 12, 14], whole=[False, *[True] * 5, False])


@pytest.mark.parametrize("shrinks_to", [1e-2, 1e-4, 1e-7])
def test_the_rotation_of_weights_that_have_all_but_vanished_is_right(tmp_path, shrinks_to):
    """As those of layers without a gradient do under weight decay: in float32, w − w₀ is little but −w₀."""
    model = nn.Linear(40, 30, bias=False)
    optimizer, copies = plain(model, lr=1.0, momentum=0.0), copies_of(model)
    target = shrinks_to * (model.weight.detach() + 0.1 * torch.randn(30, 40))

    def shrink(model, _):
        model.weight.grad = model.weight.detach() - target

    with watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, [0, 1], copies=copies, step=shrink)
    expected = cosine_distance(copies.weights[-1][0], copies.weights[0][0])
    assert monitor.run.series("rotation")[-1, 0] == pytest.approx(expected, abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("across", [3e-2, 3e-3])
def test_steps_that_go_mostly_along_the_weights_turn_them_by_what_they_do(tmp_path, across):
    model = nn.Linear(200, 100, bias=False)
    optimizer, copies = plain(model, lr=1.0, momentum=0.0), copies_of(model)

    def shrink(model, _):
        w, noise = model.weight.detach(), torch.randn(100, 200)
        model.weight.grad = 0.03 * (w + across * noise * w.norm() / noise.norm())

    with watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, range(3), copies=copies, step=shrink)
    found = measured(copies, range(4))
    for name in ("rate", "rotation"):
        np.testing.assert_allclose(monitor.run.series(name)[1:], found[name][1:], rtol=1e-5, err_msg=name)


def test_sampled_steps_in_the_middle_are_measured_one_by_one(tmp_path):
    model = mlp()
    optimizer, copies = plain(model), copies_of(model)
    with watch(model, optimizer, tmp_path / "run", every=8) as monitor:
        train(model, optimizer, inputs(16), copies=copies, each=lambda i: monitor.sample(3) if i == 5 else None)
    check(monitor.path, copies, [0, 6, 7, 8, 16])


@pytest.mark.parametrize("tile", [512, 1024, 2048])
@pytest.mark.parametrize("every", [1, 3])
def test_layers_larger_than_a_tile_are_measured_piece_by_piece(tmp_path, monkeypatch, tile, every):
    monkeypatch.setattr(bundle, "_TILE", tile)
    model = nn.Sequential(nn.Linear(6, 100), nn.Tanh(), nn.Linear(100, 31), nn.Tanh(), nn.Linear(31, 3))
    optimizer, copies = plain(model), copies_of(model)
    with watch(model, optimizer, tmp_path / "run", every=every) as monitor:
        train(model, optimizer, inputs(6), copies=copies)
    check(monitor.path, copies, range(0, 7, every))


@pytest.mark.parametrize("every", [1, 3])
def test_float64_models_keep_their_digits(tmp_path, every):
    model = mlp(dtype=torch.float64)
    optimizer, copies = plain(model, lr=1e-7), copies_of(model)
    with watch(model, optimizer, tmp_path / "run", every=every) as monitor:
        train(model, optimizer, inputs(6, torch.float64), copies=copies, step=backward64)
    check(monitor.path, copies, range(0, 7, every), rtol=3e-7)


def backward64(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    (model(x) - 1.0).square().mean().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("every", [1, 3])
def test_models_of_half_precision_are_measured_in_more(tmp_path, dtype, every):
    model = mlp(dtype=dtype)
    optimizer, copies = plain(model, lr=0.05), copies_of(model)
    with watch(model, optimizer, tmp_path / "run", every=every) as monitor:
        train(model, optimizer, inputs(6, dtype), copies=copies)
    check(monitor.path, copies, range(0, 7, every), leave_out=["alignment"])


class Mixed(nn.Module):
    """Layers of three precisions, in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.b.double()
        self.c.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(self.a(x).double()))
        return self.d(self.c(x.bfloat16()).float())


def test_layers_of_several_precisions_in_one_model(tmp_path):
    trial(tmp_path, Mixed(), inputs(5), leave_out=["alignment"])


def conv() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 3), nn.Flatten(1))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolutions_in_either_layout(tmp_path, memory_format):
    model = conv().to(memory_format=memory_format)
    xs = [x.to(memory_format=memory_format) for x in inputs(5, shape=(4, 3, 7, 7))]
    # A convolution before a normalisation is scale-invariant: ⟨w,g⟩ is rounding of the backward pass, no more.
    trial(tmp_path, model, xs, rtol=2e-5)


def test_a_model_moved_to_channels_last_goes_on_with_its_curves(tmp_path):
    model, xs = conv(), inputs(6, shape=(4, 3, 7, 7))
    optimizer, copies = plain(model), copies_of(model)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        move = lambda i: model.to(memory_format=torch.channels_last) if i == 3 else None  # noqa: E731
        train(model, optimizer, xs, copies=copies, each=move)
    assert monitor.error is None
    check(monitor.path, copies, range(7), leave_out=["alignment"], rtol=2e-5)


class Transposed(nn.Module):
    """Weights that lie in memory across: one transposed, one a permutation of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 10)
        self.first.weight = nn.Parameter(torch.randn(6, 10).T)
        self.second = nn.Conv1d(10, 4, 3)
        self.second.weight = nn.Parameter(torch.randn(3, 4, 10).permute(1, 2, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).T[None])


def test_weights_that_lie_across_in_memory(tmp_path):
    trial(tmp_path, Transposed(), inputs(5))


@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings_with_dense_and_sparse_gradients(tmp_path, sparse):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 7, sparse=sparse), nn.Tanh(), nn.Linear(7, 3))
    xs = [torch.randint(30, (9,), generator=torch.Generator().manual_seed(i)) for i in range(5)]
    trial(tmp_path, model, xs, optimizer=torch.optim.SGD(model.parameters(), 0.5))


def test_tied_weights_are_one_layer(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 7), nn.Tanh(), nn.Linear(7, 30, bias=False))
    model[2].weight = model[0].weight
    xs = [torch.randint(30, (9,), generator=torch.Generator().manual_seed(i)) for i in range(5)]
    trial(tmp_path, model, xs)
    with gyroscope.load(tmp_path / "run") as run:
        assert len(run.layers) == 1


class Sequences(nn.Module):
    """Modules with several weights, of other names, and one that is made of two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.rnn = nn.LSTM(6, 8)
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(self.embed(x)[:, None])
        return self.attention(h, h, h)[0]


def test_recurrent_attentive_and_parametrized_modules(tmp_path):
    trial(tmp_path, Sequences(), inputs(4), rtol=2e-5)


@pytest.mark.parametrize("slices", [(slice(None), slice(None, None, 2)), (slice(None, None, 3), slice(None))])
def test_weights_with_gaps_between_their_elements(tmp_path, slices):
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    model.weight = nn.Parameter(torch.randn(15, 12)[slices][:5, :6])
    trial(tmp_path, model, inputs(4))


def test_weights_that_share_one_buffer(tmp_path):
    model = mlp()
    buffer = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    for p, part in zip(model.parameters(), buffer.split([p.numel() for p in model.parameters()]), strict=True):
        p.data = part.view(p.shape)
    trial(tmp_path, model, inputs(4))


def test_a_model_that_changes_its_precision_mid_run_goes_on_with_its_curves(tmp_path):
    model = mlp()
    optimizer, copies = torch.optim.SGD(model.parameters(), 0.1), copies_of(model)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(2), copies=copies)
        model.double()
        train(model, optimizer, inputs(2, torch.float64), copies=copies, step=backward64)
    check(monitor.path, copies, range(5), leave_out=["alignment"])


def test_a_layer_of_one_element_turns_by_nothing_or_by_half_a_turn(tmp_path):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        for gradient in (-1.0, 0.5, 3.0):  # w = 2, 1.5, −1.5: numbers whose squares are exact
            model.weight.grad = torch.full((1, 1), gradient)
            optimizer.step()
    with gyroscope.load(monitor.path) as run:
        assert run.series("rotation")[:, 0].tolist() == [0.0, 0.0, 0.0, 2.0]
        assert run.series("rate")[1:, 0].tolist() == pytest.approx([0.0, 0.0, math.pi])
        assert run.series("alignment")[2:, 0].tolist() == [-1.0, 1.0]
        assert run.series("update_ratio")[1:, 0].tolist() == [1.0, 0.25, 2.0]


def test_layers_without_gradients_have_all_but_what_needs_them(tmp_path):
    model = mlp()
    optimizer, copies = torch.optim.SGD(model.parameters(), 0.1), copies_of(model)

    def lose_one(model, x):
        backward(model, x)
        model[2].weight.grad = None

    with watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(2), copies=copies)
        train(model, optimizer, inputs(2, seed=5), copies=copies, step=lose_one)
        train(model, optimizer, inputs(2, seed=6), copies=copies)
    check(monitor.path, copies, range(7))


def test_layers_of_norm_zero_give_nan_and_no_error(tmp_path):
    model = mlp()
    nn.init.zeros_(model[2].weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(2))
    assert monitor.error is None
    with gyroscope.load(monitor.path) as run:
        for name in ("rotation", "rate", "update_ratio", "effective_lr", "effective_lr_measured", "invariance"):
            assert np.isnan(run.series(name)[:, 1]).all(), name
        assert run.series("weight_norm")[:, 1].tolist() == [0.0, 0.0, 0.0]
        assert run.series("update_norm")[1:, 1].tolist() == [0.0, 0.0]


def test_weights_that_cease_to_be_zero(tmp_path):
    model = mlp()
    nn.init.zeros_(model[4].weight)
    # Its steps are nearly radial, and only in float32 is that known; from where it rotates is told in test_fine_tuning.
    trial(tmp_path, model, inputs(4), rtol=3e-5, leave_out=["rotation"])


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_gradients_that_are_not_finite_stay_in_their_layer(tmp_path, bad):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def spoil(model, x):
        backward(model, x)
        model[2].weight.grad[0, 0] = bad

    with watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(2))
        train(model, optimizer, inputs(1, seed=5), step=spoil)
    assert monitor.error is None
    with gyroscope.load(monitor.path) as run:
        assert run.steps.tolist() == [0, 1, 2, 3]
        assert np.isfinite(run.series("gradient_norm")[1:, [0, 2]]).all()
        assert np.isfinite(run.series("rotation")[:, [0, 2]]).all()
        last = run.series("gradient_norm")[3, 1]
        assert math.isnan(last) if math.isnan(bad) else math.isinf(last)
        assert math.isnan(run.series("rotation")[3, 1])


@pytest.mark.parametrize("scale", [1e25, 1e-25])
@pytest.mark.parametrize("every", [1, 2])
def test_gradients_far_out_in_the_range_of_float32(tmp_path, scale, every):
    model = mlp()
    optimizer, copies = torch.optim.SGD(model.parameters(), 0.1 / scale), copies_of(model)

    def scaled(model, x):
        backward(model, x)
        for p in model.parameters():
            p.grad *= scale

    with watch(model, optimizer, tmp_path / "run", every=every) as monitor:
        train(model, optimizer, inputs(4), copies=copies, step=scaled)
    check(monitor.path, copies, range(0, 5, every))


def test_a_parameter_exchanged_mid_run_is_followed(tmp_path):
    model = mlp()
    optimizer, copies = torch.optim.SGD(model.parameters(), 0.1), copies_of(model)

    def exchange(i):
        if i == 2:
            old = model[2].weight
            model[2].weight = nn.Parameter(old.detach().clone())
            params = optimizer.param_groups[0]["params"]
            params[[p is old for p in params].index(True)] = model[2].weight

    with watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(5), copies=copies, each=exchange)
    check(monitor.path, copies, range(6))


def test_data_exchanged_in_place_is_followed(tmp_path):
    model = mlp()
    optimizer, copies = plain(model), copies_of(model)

    def exchange(i):
        if i == 2:
            model[2].weight.data = model[2].weight.data.clone()

    with watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(5), copies=copies, each=exchange)
    check(monitor.path, copies, range(6))


def test_a_weight_of_another_shape_stops_the_monitor_and_not_training(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(2))
        model[4].weight = nn.Parameter(torch.randn(4, 30))
        model[4].bias = nn.Parameter(torch.randn(4))
        train(model, optimizer, inputs(2))
    assert "'4.weight'" in str(monitor.error)
    assert "(4, 30)" in str(monitor.error)


@pytest.mark.parametrize("precision", ["medium", "high"])
def test_the_precision_of_matrix_products_does_not_matter(tmp_path, precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        trial(tmp_path, mlp(), inputs(4))
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_surrounding_autocast_does_not_matter(tmp_path):
    with torch.autocast("cpu", torch.bfloat16):
        trial(tmp_path, mlp(), inputs(4))


def test_no_grad_around_the_step_does_not_matter(tmp_path):
    model = mlp()
    optimizer, copies = plain(model), copies_of(model)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        for x in inputs(4):
            backward(model, x)
            copies.keep_gradients()
            with torch.no_grad():
                optimizer.step()
            copies.keep_step(optimizer)
    check(monitor.path, copies, range(5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_default_dtype_does_not_matter(tmp_path, dtype):
    model = mlp()
    torch.set_default_dtype(dtype)
    try:
        trial(tmp_path, model, [x.float() for x in inputs(4)])
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_default_device_does_not_matter(tmp_path):
    model, xs = mlp(), inputs(4)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    train(model, optimizer, inputs(1))  # Adam makes its own state
    copies = copies_of(model)
    torch.set_default_device("meta")
    try:
        monitor = gyroscope.watch(model, optimizer, tmp_path / "run", budget=None, neurons=True)
        train(model, optimizer, xs, copies=copies)
        monitor.close()
    finally:
        torch.set_default_device(None)
    assert monitor.error is None
    check(monitor.path, copies, range(5))


def test_gradients_are_those_after_clipping_and_accumulation(tmp_path):
    def accumulate(model, x):
        model.zero_grad()
        for part in x.chunk(4):
            (model(part) - 1).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    trial(tmp_path, mlp(), inputs(5), step=accumulate)
    with gyroscope.load(tmp_path / "run") as run:
        assert (run.series("gradient_norm")[1:] <= 0.01 * (1 + 1e-5)).all()


def test_rotation_is_measured_from_a_reference_that_is_given(tmp_path):
    model, other = mlp(), mlp(seed=7)
    optimizer, copies, theirs = plain(model), copies_of(model), copies_of(other)
    with watch(model, optimizer, tmp_path / "run", reference=other) as monitor:
        train(model, optimizer, inputs(3), copies=copies)
    expected = [[cosine_distance(w, r) for w, r in zip(ws, theirs.weights[0], strict=True)] for ws in copies.weights]
    with gyroscope.load(monitor.path) as run:
        np.testing.assert_allclose(run.series("rotation"), expected, rtol=1e-6)


def test_neuron_quantiles_are_those_of_the_rows(tmp_path):
    model = mlp()
    optimizer = plain(model)
    start = [m.weight.detach().double().clone() for m in (model[0], model[2], model[4])]
    with watch(model, optimizer, tmp_path / "run", neurons=True, detail_every=1) as monitor:
        train(model, optimizer, inputs(3))
    with gyroscope.load(monitor.path) as run:
        for layer, (module, first) in enumerate(zip((model[0], model[2], model[4]), start, strict=True)):
            rows = [cosine_distance(a, b) for a, b in zip(module.weight.detach().double(), first, strict=True)]
            for percent in (0, 10, 50, 90, 100):
                got = run.series(f"neuron_p{percent}")[3, layer]
                assert got == pytest.approx(np.percentile(rows, percent), rel=1e-5, abs=1e-9)


def test_the_last_step_can_be_recorded_before_its_weights_are_replaced(tmp_path):
    model = mlp()
    optimizer, copies = torch.optim.SGD(model.parameters(), 0.1), copies_of(model)
    best = {name: value.clone() for name, value in model.state_dict().items()}
    with watch(model, optimizer, tmp_path / "run", every=4) as monitor:
        train(model, optimizer, inputs(6), copies=copies)
        monitor.record()
        model.load_state_dict(best)
    check(tmp_path / "run", copies, [0, 4, 6], whole=[False, True, False], rtol=1e-5)


class Device:
    """Copies as a GPU makes them: wrong numbers until an event that comes after them has been waited for."""

    def __init__(self) -> None:
        self.queued: list[tuple[Tensor, Tensor]] = []

    def to_host(self, values: Tensor) -> Tensor:
        copy = torch.full_like(values, 1e30)
        self.queued.append((copy, values.clone()))
        return copy

    def mark(self, weights, timed):
        return Arrival(list(self.queued))


class Arrival:
    def __init__(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        self.copies = copies

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        for copy, values in self.copies:
            copy.copy_(values)

    def elapsed_time(self, end: Arrival) -> float:
        return 0.0


def test_what_a_sampled_step_found_is_read_after_it_has_arrived(tmp_path, monkeypatch):
    series = []
    for name in ("at once", "late"):
        if name == "late":
            device = Device()
            monkeypatch.setattr("gyroscope.monitor.detail.to_host", device.to_host)
            monkeypatch.setattr("gyroscope.monitor.track._mark", device.mark)
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters())
        with watch(model, optimizer, tmp_path / name, activations=True) as monitor:
            train(model, optimizer, inputs(1))
        run = gyroscope.load(monitor.path)
        series.append({quantity: run.series(quantity) for quantity in run.quantities})
    assert {"gradient_carried", "moment_p50", "input_rms"} <= set(series[0]) == set(series[1])
    for quantity, values in series[0].items():
        np.testing.assert_array_equal(series[1][quantity], values, err_msg=quantity)
