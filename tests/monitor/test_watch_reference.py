"""w₀: where it may come from, what is refused before anything is changed, and what holding it rounded costs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from resume_models import go, hooks, momentum, net, rotations, weights
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import gyroscope
from gyroscope.errors import MonitorError
from gyroscope.monitor import reference
from gyroscope.monitor.resume import Saved

NAMES = ("0.weight", "2.weight", "4.weight")


def measured(model, folder, steps=2, **options):
    """The rotations that a run records, and the monitor it was made by."""
    optimizer = momentum(model.parameters())
    with gyroscope.watch(model, optimizer, folder, budget=None, **options) as monitor:
        go(model, optimizer, range(steps))
    with gyroscope.load(folder) as run:
        return run.series("rotation").astype(np.float64), monitor


def saved(content, path: Path) -> Path:
    torch.save(content, path)
    return path


def prefixed(prefix, model):
    return {prefix + key: value for key, value in model.state_dict().items()}


SOURCES = {
    "a second model": lambda other, _: other,
    "a wrapped model": lambda other, _: nn.DataParallel(other),
    "a compiled model": lambda other, _: torch.compile(other, backend="eager"),
    "a state dict": lambda other, _: other.state_dict(),
    "a float64 state dict": lambda other, _: {k: v.double() for k, v in other.state_dict().items()},
    "a file": lambda other, tmp: saved(other.state_dict(), tmp / "a.pt"),
    "the name of a file": lambda other, tmp: str(saved(other.state_dict(), tmp / "a.pt")),
    "a checkpoint with model": lambda other, tmp: saved({"model": other.state_dict(), "epoch": 3}, tmp / "a.pt"),
    "a checkpoint with state_dict": lambda other, tmp: saved({"state_dict": other.state_dict()}, tmp / "a.pt"),
    "a checkpoint with model_state_dict": lambda other, tmp: saved({"model_state_dict": other.state_dict()}, tmp / "a"),
    "a data-parallel checkpoint": lambda other, tmp: saved({"model": prefixed("module.", other)}, tmp / "a.pt"),
    "a compiled checkpoint": lambda other, tmp: saved(prefixed("_orig_mod.", other), tmp / "a.pt"),
    "a compiled data-parallel one": lambda other, tmp: saved(prefixed("_orig_mod.module.", other), tmp / "a.pt"),
    "a data-parallel compiled one": lambda other, tmp: saved(prefixed("module._orig_mod.", other), tmp / "a.pt"),
}


def test_without_a_reference_rotation_is_zero_at_step_0_and_counted_from_there(tmp_path):
    model = net()
    start = weights(model)
    found, _ = measured(model, tmp_path / "run", steps=3)
    assert (found[0] == 0).all()
    np.testing.assert_allclose(found[-1], rotations(model, start, NAMES), rtol=1e-5, atol=1e-9)
    assert (found[-1] > 1e-5).all()


@pytest.mark.parametrize("source", SOURCES)
def test_rotation_is_measured_from(source, tmp_path):
    model, other = net(), net(seed=7)
    given, start = SOURCES[source](other, tmp_path), rotations(model, weights(other), NAMES)
    assert (start > 0.1).all()
    found, _ = measured(model, tmp_path / "run", reference=given)
    np.testing.assert_allclose(found[0], start, rtol=1e-6)
    np.testing.assert_allclose(found[-1], rotations(model, weights(other), NAMES), rtol=1e-6)


def test_rotation_is_measured_from_where_another_run_began(tmp_path):
    start = weights(net())
    measured(net(), tmp_path / "first")
    model = net(seed=3)
    found, _ = measured(model, tmp_path / "second", reference=tmp_path / "first")
    np.testing.assert_allclose(found[-1], rotations(model, start, NAMES), rtol=1e-6)


def test_a_run_keeps_the_reference_it_was_given(tmp_path):
    other = net(seed=7)
    measured(net(), tmp_path / "run", reference=other)
    kept = torch.load(tmp_path / "run" / "reference.pt", weights_only=True)["tensors"]
    assert all(torch.equal(kept[name], w) for name, w in weights(other).items())


def test_a_reference_is_a_copy(tmp_path):
    model, other = net(), net(seed=7)
    state = other.state_dict()
    start = rotations(model, weights(other), NAMES)
    optimizer = momentum(model.parameters())
    with gyroscope.watch(model, optimizer, tmp_path / "run", reference=state) as monitor:
        for value in state.values():
            value.zero_()
        monitor.flush()
    np.testing.assert_allclose(gyroscope.load(tmp_path / "run").series("rotation")[0], start, rtol=1e-6)


@pytest.mark.parametrize("parametrized", [True, False])
def test_a_parametrized_weight_is_measured_from_its_direction(parametrized, tmp_path):
    def normed(seed):
        model = net(seed)
        weight_norm(model[2])
        return model

    model, other = normed(0), normed(7) if parametrized else net(7)
    start = weights(other)
    given = other.state_dict()
    assert ("2.parametrizations.weight.original1" in given) == parametrized
    for i, source in enumerate((other, given)):
        found, _ = measured(model, tmp_path / f"run-{i}", reference=source)
        np.testing.assert_allclose(found[-1], rotations(model, start, NAMES), rtol=1e-6)


def bad(tmp):
    short, wide = net().state_dict(), net(width=7)
    del short["2.weight"]
    listed = saved([1, 2], tmp / "list.pt")
    text = tmp / "text.pt"
    text.write_text("no checkpoint")
    (tmp / "empty").mkdir()
    return [
        (short, r"must have the weight '2\.weight'"),
        (wide, r"'0\.weight' of shape \(6, 4\), as the model has, got \(7, 4\)"),
        ({"model": {}}, r"must have the weight '0\.weight'"),
        ({**net().state_dict(), "4.weight": "words"}, r"must hold tensors, got a str for '4\.weight'"),
        (nn.Linear(4, 6), r"must have the weight '0\.weight', got weight"),
        (tmp / "missing.pt", r"no file .*missing\.pt"),
        (tmp / "empty", r"no file .*reference\.pt"),
        (text, r"text\.pt cannot be read as a checkpoint"),
        (listed, r"must hold a state dict, got a list"),
        (3, r"`reference` must be a model, .*, got a int"),
    ]


def test_a_bad_reference_is_refused_before_anything_is_changed(tmp_path):
    for given, said in bad(tmp_path):
        model = net()
        optimizer = momentum(model.parameters())
        with pytest.raises(MonitorError, match=said):
            gyroscope.watch(model, optimizer, tmp_path / "run", reference=given)
        assert not (tmp_path / "run").exists()
        assert hooks(optimizer) == 0
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Malicious:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("place", ["a checkpoint", "the folder of a run"])
def test_nothing_in_a_reference_is_executed(place, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    file = folder / "reference.pt"
    torch.save({"tensors": net().state_dict(), "squares": Malicious(tmp_path / "harm")}, file)
    model = net()
    with pytest.raises(MonitorError, match="cannot be read as a checkpoint"):
        gyroscope.watch(
            model, momentum(model.parameters()), tmp_path / "run", reference=file if place == "a checkpoint" else folder
        )
    assert not (tmp_path / "harm").exists()
    torch.load(file, weights_only=False)
    assert (tmp_path / "harm").exists(), "the file harms whoever executes it"


def large(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 2)).to(dtype)


@pytest.fixture
def small_is_large(monkeypatch):
    """The thresholds of a large model, met by the second of the three layers (6,144 elements)."""
    monkeypatch.setattr(reference, "_LARGE", 1000)
    monkeypatch.setattr(reference, "_WORTH_ROUNDING", 1000)


SIZES = np.array([384, 6144, 128])


@pytest.mark.parametrize(
    ("precision", "rounded"),
    [("auto", [False, True, False]), ("float32", [False] * 3), ("bfloat16", [True] * 3)],
)
@pytest.mark.usefixtures("small_is_large")
def test_a_rounded_reference_costs_a_thousandth_over_root_n(precision, rounded, tmp_path):
    model = large()
    start = weights(model)
    found, monitor = measured(model, tmp_path / "run", steps=5, reference_dtype=precision)
    assert (found[0] == 0).all() if not any(rounded) else (found[0][~np.array(rounded)] == 0).all()
    assert (np.abs(found[0]) <= np.where(rounded, 1e-7, 0)).all()  # ⟨w,w₀⟩ is as exact as float64 sums of it
    error = np.abs(found[-1] - rotations(model, start, NAMES))
    assert (error <= np.where(rounded, 1e-3 / np.sqrt(SIZES), 1e-7)).all(), error
    words = monitor.held
    assert ("bfloat16" in words) == any(rounded)
    assert ("float32" in words) == (not all(rounded))
    assert "cpu" in words
    assert "MB" in words
    assert words in str(monitor.cost())


def test_small_models_are_held_exactly_unless_asked(tmp_path):
    _, monitor = measured(large(), tmp_path / "run")
    assert "float32" in monitor.held
    assert "bfloat16" not in monitor.held


@pytest.mark.usefixtures("small_is_large")
def test_rounding_halves_what_is_held(tmp_path):
    held = {}
    for precision in ("float32", "bfloat16"):
        model = large()
        monitor = gyroscope.watch(
            model,
            momentum(model.parameters()),
            tmp_path / precision,
            reference_dtype=precision,
            quantities=["rotation"],
        )
        held[precision] = monitor.bytes
        monitor.close()
    assert held["bfloat16"] * 2 == held["float32"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["auto", "float32", "bfloat16"])
def test_half_precision_weights_are_held_as_they_are(dtype, precision, tmp_path):
    model = large(dtype=dtype)
    start = weights(model)
    found, monitor = measured(model, tmp_path / "run", steps=3, reference_dtype=precision)
    assert (found[0] == 0).all()
    np.testing.assert_allclose(found[-1], rotations(model, start, NAMES), rtol=1e-5, atol=1e-9)
    assert (found[-1] > 0).all()
    assert str(dtype).removeprefix("torch.") in monitor.held


@pytest.mark.parametrize(("precision", "bound"), [("auto", 1e-7), ("float32", 1e-7), ("bfloat16", 1e-3)])
def test_a_float32_reference_of_a_bfloat16_model(precision, bound, tmp_path):
    origin = large()
    model = large(dtype=torch.bfloat16)
    start = weights(origin)
    found, monitor = measured(model, tmp_path / "run", steps=3, reference=origin, reference_dtype=precision)
    error = np.abs(found[-1] - rotations(model, start, NAMES))
    assert (error <= bound / (np.sqrt(SIZES) if precision == "bfloat16" else 1)).all(), error
    assert ("bfloat16" if precision == "bfloat16" else "float32") in monitor.held


def test_a_reference_on_the_cpu_is_where_the_weights_of_a_cpu_model_are(tmp_path):
    found, monitor = measured(net(), tmp_path / "run", reference_device="cpu")
    assert "on cpu" in monitor.held
    assert (found[0] == 0).all()


def test_a_channels_last_model_has_the_rotations_of_a_plain_one(tmp_path):
    rows = []
    for form in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=form)
        torch.manual_seed(1)
        other = nn.Conv2d(3, 4, 3)
        optimizer = momentum(model.parameters())
        with gyroscope.watch(model, optimizer, tmp_path / str(len(rows)), reference=other):
            model(torch.ones(2, 3, 5, 5)).square().mean().backward()
            optimizer.step()
        rows.append(gyroscope.load(tmp_path / str(len(rows))).series("rotation"))
        kept = torch.load(tmp_path / str(len(rows) - 1) / "reference.pt", weights_only=True)["tensors"]["weight"]
        assert torch.equal(kept, other.weight)
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-6)


def test_the_reference_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    saw = []
    sync, replace = os.fsync, os.replace

    def synced(file):
        saw.append(("fsync", os.readlink(f"/proc/self/fd/{file}") if os.path.exists("/proc/self/fd") else ""))
        sync(file)

    def replaced(old, new):
        saw.append(("replace", str(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    file = tmp_path / "reference.pt"
    Saved({"w": torch.arange(3.0)}, {"w": [5.0, 1.0]}).write(file)
    assert [what for what, _ in saw] == ["fsync", "replace", "fsync"]
    if saw[0][1]:
        assert [where for _, where in saw] == [str(file.with_suffix(".new")), str(file), str(tmp_path)]
    assert Saved.read(file).tensors["w"].tolist() == [0.0, 1.0, 2.0]
