"""`reference_memory`: w₀ within a limit; beyond it, rotation from a sample whose error is that of the docs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from resume_models import hooks
from torch import nn
from watched import copies_of, inputs, train

import gyroscope
from gyroscope.errors import MonitorError
from gyroscope.monitor import reference
from gyroscope.monitor.reference import Holding, Reference, standard_error
from oracles.monitor import cosine_distance, flat, measured

# Quantities of sampled layers that are estimates.
ESTIMATED = ("rotation", "alignment")


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr, momentum=0.9)


def watch(model, optimizer, path, **options) -> gyroscope.Monitor:
    return gyroscope.watch(model, optimizer, path, **{"budget": None, "activations": False, **options})


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Layers of 240, 4,000 and 300 elements."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 100), nn.Tanh(), nn.Linear(100, 3)).to(dtype)


ALL, DRAWN = 4000, 1024
# Bytes: the small layers whole, in pieces of 512 elements, and a sample of the second one with its positions.
LIMIT = (2 * 512 + DRAWN) * 4 + DRAWN * 4


@pytest.fixture(autouse=True)
def small_samples(monkeypatch):
    monkeypatch.setattr(reference, "_FEWEST", 512)


def test_within_the_limit_nothing_is_sampled(tmp_path):
    runs = []
    for limit in (None, "1 MB"):
        model = mlp()
        optimizer = sgd(model)
        with watch(model, optimizer, tmp_path / str(limit), reference_memory=limit) as monitor:
            train(model, optimizer, inputs(4))
            assert monitor.cost().sampled_share == 1.0
            assert "sample" not in monitor.held
        runs.append(gyroscope.load(monitor.path))
    for name in runs[0].quantities:
        np.testing.assert_array_equal(runs[0].series(name), runs[1].series(name), err_msg=name)
    assert "reference_sample" not in runs[1].meta


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_but_rotation_and_alignment_of_a_sampled_layer_is_exact(tmp_path, every, dtype):
    model = mlp(dtype=dtype)
    optimizer, copies = sgd(model), copies_of(model)
    limit = (2 * 512 + DRAWN) * dtype.itemsize + DRAWN * 4
    with watch(model, optimizer, tmp_path / "run", reference_memory=limit, every=every) as monitor:
        train(model, optimizer, inputs(9, dtype=dtype), copies=copies)
        cost = monitor.cost()
    assert monitor.error is None
    with gyroscope.load(monitor.path) as run:
        drawn = run.meta["reference_sample"]["elements"]
        assert list(drawn) == ["2.weight"]
        assert drawn["2.weight"] == DRAWN
        assert cost.sampled_share == DRAWN / ALL
        assert cost.reference_bytes <= limit
        assert "samples on cpu" in cost.held
        assert "of the elements of 1 layer" in str(cost)
        expected = measured(copies, range(0, 10, every))
        for name, values in expected.items():
            found = run.series(name)
            exact = [0, 2] if name in ESTIMATED else [0, 1, 2]
            known = slice(1, None) if "lr" in name or name == "weight_decay" else slice(None)
            small = 1e-6 if name in ("alignment", "invariance") else 0.0
            np.testing.assert_allclose(
                found[known, exact], values[known, exact], rtol=1e-4, atol=small, err_msg=name
            )  # fmt: skip
            assert (np.isnan(found[known, 1]) == np.isnan(values[known, 1])).all(), name
        turned, full = run.series("rotation")[1:, 1], expected["rotation"][1:, 1]
        assert run.series("rotation")[0, 1] == 0.0
        assert (abs(turned - full) <= 6 * full * (2 - full) * run.meta["reference_sample"]["error"]["2.weight"]).all()
        angles, full = run.series("alignment")[2:, 1], expected["alignment"][2:, 1]
        assert (abs(angles - full) <= 6 * standard_error(DRAWN, ALL)).all()


class Many(nn.Module):
    """Forty layers of 16,384 elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(40))
        for layer in self.layers:
            nn.init.normal_(layer.weight)


def rotate(w: torch.Tensor, cosine: float, generator: torch.Generator, kurtosis: float | None = None) -> torch.Tensor:
    """Weights at an angle to `w`, by a random direction; of two sizes of elements if it has a kurtosis."""
    across = torch.randn(w.shape, generator=generator)
    if kurtosis is not None:  # a share p of the elements is nonzero: κ = 3/p
        across *= torch.rand(w.shape, generator=generator) < 3 / kurtosis
    across -= w * (w * across).sum() / w.square().sum()
    return cosine * w + (1 - cosine**2) ** 0.5 * across * w.norm() / across.norm()


def errors(folder, drawn: int, kurtosis: float | None = None) -> np.ndarray:
    """The error of each layer's rotation over the standard error d(2 − d)√((1 − m/n)/m)."""
    model = Many()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    start = [flat(layer.weight) for layer in model.layers]
    generator = torch.Generator().manual_seed(drawn)
    limit = 40 * drawn * 4 + drawn * 4  # of float32, and one list of positions
    with watch(model, optimizer, folder, reference_memory=limit) as monitor:
        assert monitor.cost().reference_bytes <= limit
        for layer, cosine in zip(model.layers, np.linspace(0.0, 0.9999, 40).tolist(), strict=True):
            layer.weight.grad = layer.weight.detach() - rotate(layer.weight.detach(), cosine, generator, kurtosis)
        optimizer.step()
    full = np.array([cosine_distance(flat(one.weight), w) for one, w in zip(model.layers, start, strict=True)])
    with gyroscope.load(folder) as run:
        stated = np.array(list(run.meta["reference_sample"]["error"].values()))
        np.testing.assert_allclose(stated, standard_error(drawn, 128**2), rtol=0.01)
        return (run.series("rotation")[1] - full) / (full * (2 - full) * stated)


def test_the_error_of_a_sample_is_as_stated_and_falls_with_its_root(tmp_path):
    found = {drawn: errors(tmp_path / str(drawn), drawn) for drawn in (512, 2048, 8192)}
    for drawn, error in found.items():
        assert abs(error).max() < 4.5, drawn  # 40 draws of a normal distribution
        assert 0.7 < np.sqrt(np.square(error).mean()) < 1.35, drawn  # ± 3 standard errors of a root mean square
        assert abs(error.mean()) < 3.5 / np.sqrt(40), drawn


def test_uneven_displacements_have_larger_errors_as_the_docs_say(tmp_path):
    kurtosis = 60.0
    error = errors(tmp_path / "run", 4096, kurtosis)[20:]  # rotations below a half
    factor = np.sqrt((3 + kurtosis - 2) / 4)
    assert 0.4 * factor < np.sqrt(np.square(error).mean()) < 1.5 * factor


def test_memory_is_shared_evenly_and_kept_to():
    sizes = [10, 5000, 100_000, 100_000, 300_000, 1_000_000]
    weights = [torch.zeros(n) for n in sizes]
    dtypes = [w.dtype for w in weights]
    for limit in (150_000, 400_000, 1_000_000, 5_000_000):
        how = Holding(limit=limit).within([(weights, dtypes)])
        drawn = how.drawn(weights, dtypes)
        assert len({d for d in drawn if d}) == 1
        smallest = min(n for n, d in zip(sizes, drawn, strict=True) if d)
        assert all((d == 0) == (n < smallest) for n, d in zip(sizes, drawn, strict=True))
        held = Reference.take(weights, None, how)
        assert held.bytes <= limit
        assert held.bytes > 0.8 * limit
        assert held.drawn.tolist() == drawn
    assert Holding(limit=(sum(sizes) + 512 * len(sizes)) * 4).within([(weights, dtypes)]).most is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0, "number of bytes ≥ 1"),
        (-1, "number of bytes ≥ 1"),
        (float("nan"), "number of bytes ≥ 1"),
        (True, "number of bytes ≥ 1"),
        ("many", "number of bytes ≥ 1"),
        ("2 XB", "number of bytes ≥ 1"),
        ("1..5 GB", "number of bytes ≥ 1"),
        ([2], None),
        (100, "at least .* bytes for the 3 layers that are trained, got 100"),
    ],
)
def test_a_bad_limit_is_refused_before_anything_is_changed(tmp_path, given, said):
    model = mlp()
    optimizer = sgd(model)
    with pytest.raises(MonitorError, match=f"`reference_memory` must be .*{said or ''}"):
        watch(model, optimizer, tmp_path / "run", reference_memory=given)
    assert not (tmp_path / "run").exists()
    assert hooks(optimizer) == 0


def test_neurons_need_all_of_the_reference(tmp_path):
    model = mlp()
    with pytest.raises(MonitorError, match="`neurons` must be False where only samples"):
        watch(model, sgd(model), tmp_path / "run", reference_memory=LIMIT, neurons=True)
    watch(model, sgd(model), tmp_path / "run", reference_memory="1 GB", neurons=True).close()


def test_the_limit_is_for_layers_that_are_trained(tmp_path):
    model = mlp()
    model[2].requires_grad_(False)
    with watch(model, sgd(model), tmp_path / "run", reference_memory=LIMIT) as monitor:
        assert monitor.cost().sampled_share == 1.0


def test_a_layer_that_thaws_gets_what_is_left_of_the_limit(tmp_path):
    model = mlp()
    model[2].requires_grad_(False)
    optimizer, copies = torch.optim.SGD(model.parameters(), 0.1), copies_of(model)
    with watch(model, optimizer, tmp_path / "run", reference_memory=LIMIT) as monitor:
        train(model, optimizer, inputs(2), copies=copies)
        assert monitor.cost().sampled_share == 1.0
        model[2].requires_grad_(True)
        train(model, optimizer, inputs(3, seed=5), copies=copies)
        share = monitor.cost().sampled_share
    assert 0 < share < 1
    full = np.array([cosine_distance(copies.weights[step][1], copies.weights[0][1]) for step in (3, 4, 5)])
    with gyroscope.load(monitor.path) as run:
        assert np.isnan(run.series("rotation")[:3, 1]).all()
        error = abs(run.series("rotation")[3:, 1] - full) / (full * (2 - full) * standard_error(int(share * ALL), ALL))
        assert (error < 6).all()


def test_a_sampled_layer_that_was_zero_is_measured_from_its_first_direction(tmp_path):
    model = mlp()
    nn.init.zeros_(model[2].weight)
    optimizer, copies = sgd(model), copies_of(model)
    with watch(model, optimizer, tmp_path / "run", reference_memory=LIMIT) as monitor:
        train(model, optimizer, inputs(8), copies=copies)
        drawn = round(monitor.cost().sampled_share * ALL)
    full = np.array([cosine_distance(copies.weights[step][1], copies.weights[1][1]) for step in range(2, 9)])
    with gyroscope.load(monitor.path) as run:
        found = run.series("rotation")[:, 1]
        assert np.isnan(found[:2]).all()
        assert (abs(found[2:] - full) < 8 * full * (2 - full) * standard_error(drawn, ALL)).all()


@pytest.mark.parametrize("form", ["channels-last", "transposed", "with gaps"])
def test_a_sample_does_not_depend_on_the_layout_in_memory(tmp_path, form):
    found = []
    for changed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 40, 5), nn.Flatten(), nn.Linear(40, 3))
        if changed:
            model[0].weight.data = laid_out(model[0].weight.data, form)
        optimizer = sgd(model)
        with watch(model, optimizer, tmp_path / str(changed), reference_memory=10_500) as monitor:
            train(model, optimizer, inputs(4, shape=(8, 3, 5, 5)))
            assert monitor.cost().sampled_share < 1
        found.append(gyroscope.load(monitor.path).series("rotation"))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


def laid_out(w: torch.Tensor, form: str) -> torch.Tensor:
    match form:
        case "channels-last":
            return w.contiguous(memory_format=torch.channels_last)
        case "transposed":
            return w.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
        case _:
            wide = torch.zeros(*w.shape[:-1], 2 * w.shape[-1])
            wide[..., ::2] = w
            return wide[..., ::2]


def test_a_sample_follows_weights_that_are_laid_out_anew(tmp_path):
    found = []
    for moves in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 40, 5), nn.Flatten(), nn.Linear(40, 3))
        optimizer = sgd(model)
        with watch(model, optimizer, tmp_path / str(moves), reference_memory=10_500) as monitor:
            train(model, optimizer, inputs(2, shape=(8, 3, 5, 5)))
            if moves:
                model[0].weight.data = laid_out(model[0].weight.data, "channels-last")
            train(model, optimizer, inputs(3, seed=4, shape=(8, 3, 5, 5)))
        assert monitor.error is None
        found.append(gyroscope.load(monitor.path).series("rotation"))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


@pytest.mark.parametrize("how", ["a state", "its weights"])
@pytest.mark.parametrize("limit", [LIMIT, 2 * LIMIT, None])
def test_a_sampled_run_is_resumed_with_its_sample(tmp_path, how, limit):
    xs = inputs(8)
    whole = mlp()
    optimizer = sgd(whole)
    with watch(whole, optimizer, tmp_path / "whole", reference_memory=LIMIT):
        train(whole, optimizer, xs)

    model = mlp()
    optimizer = sgd(model)
    monitor = watch(model, optimizer, tmp_path / "run", reference_memory=LIMIT)
    train(model, optimizer, xs[:5])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "monitor": monitor.state_dict()}
    monitor.close()
    assert list(state["monitor"]["samples"]) == ["2.weight"]
    assert "2.weight" not in state["monitor"]["reference"]

    again = mlp()
    again.load_state_dict(state["model"])
    optimizer = sgd(again)
    optimizer.load_state_dict(state["optimizer"])
    monitor = watch(again, optimizer, tmp_path / "run", reference_memory=limit)
    if how == "a state":
        monitor.load_state_dict(state["monitor"])
    train(again, optimizer, xs[5:])
    monitor.close()
    for name in ("rotation", "weight_norm", "update_norm"):
        found, expected = (gyroscope.load(tmp_path / path).series(name) for path in ("run", "whole"))
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=name)


def test_a_whole_reference_can_be_resumed_within_a_limit(tmp_path):
    model = mlp()
    optimizer, copies = sgd(model), copies_of(model)
    monitor = watch(model, optimizer, tmp_path / "run")
    train(model, optimizer, inputs(3), copies=copies)
    state = monitor.state_dict()
    monitor.close()
    with watch(model, optimizer, tmp_path / "second", reference_memory=LIMIT) as monitor:
        monitor.load_state_dict(state)
        train(model, optimizer, inputs(3, seed=4), copies=copies)
        drawn = round(monitor.cost().sampled_share * ALL)
    assert drawn < ALL
    full = np.array([cosine_distance(copies.weights[step][1], copies.weights[0][1]) for step in (4, 5, 6)])
    with gyroscope.load(monitor.path) as run:
        found = run.series("rotation")[-3:, 1]
        assert (abs(found - full) < 6 * full * (2 - full) * standard_error(drawn, ALL)).all()


def test_a_bad_sample_in_a_state_is_refused(tmp_path):
    model = mlp()
    with watch(model, sgd(model), tmp_path / "run", reference_memory=LIMIT) as monitor:
        state = monitor.state_dict()
        with pytest.raises(MonitorError, match=r"`state\['samples'\]\['2\.weight'\]` must be a tensor, got a str"):
            monitor.load_state_dict({**state, "samples": {"2.weight": "no"}})
        with pytest.raises(MonitorError, match=r"`state\['samples'\]` must be a dict"):
            monitor.load_state_dict({**state, "samples": [1]})
        with pytest.raises(MonitorError, match=r"`state\['samples'\]\['2\.weight'\]` must have at most 4,000 elements"):
            monitor.load_state_dict({**state, "samples": {"2.weight": torch.zeros(5000)}})
        with pytest.raises(MonitorError, match="must have all layers"):
            monitor.load_state_dict({**state, "samples": {}})


def test_the_memory_of_displacements_is_that_of_samples_too(tmp_path):
    held = {}
    for limit in (None, 400_000):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000))
        optimizer = sgd(model)
        with watch(model, optimizer, tmp_path / str(limit), reference_memory=limit, every=2) as monitor:
            train(model, optimizer, inputs(3, shape=(4, 1000)))
            held[limit] = monitor.bytes, monitor.cost().reference_bytes
    whole, small = held.values()
    assert whole[1] >= 2e6 * 4
    assert small[1] <= 400_000
    assert small[0] - small[1] < 0.8 * (whole[0] - whole[1])
