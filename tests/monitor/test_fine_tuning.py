"""Fine-tuning: frozen layers cost nothing, layers that were zero get a direction, adapters have merged weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from watched import backward, check, copies_of, inputs, mlp, train

import gyroscope
from gyroscope.errors import MonitorError
from gyroscope.monitor import adapters
from oracles.monitor import cosine_distance, flat, measured, norm


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr, momentum=0.9)


def watch(model, optimizer, path, **options) -> gyroscope.Monitor:
    return gyroscope.watch(model, optimizer, path, **{"budget": None, "activations": False, **options})


def events(path, kind="note") -> list[tuple[int, str]]:
    with gyroscope.load(path) as run:
        return [(event.step, event.text) for event in run.events if event.kind == kind]


def series(path, name, layer) -> list[float]:
    with gyroscope.load(path) as run:
        return run.series(name)[:, layer].astype(np.float64).tolist()


# Where w₀ is.


def test_pretrained_means_the_weights_at_the_start(tmp_path):
    model = mlp()
    optimizer, copies = sgd(model), copies_of(model)
    with watch(model, optimizer, tmp_path / "run", reference="pretrained") as monitor:
        train(model, optimizer, inputs(3), copies=copies)
    check(monitor.path, copies, range(4))


# Frozen layers.


def backbone(seed: int = 0) -> nn.Sequential:
    model = mlp(seed)
    model[:3].requires_grad_(False)
    return model


@pytest.mark.parametrize("every", [1, 2])
def test_frozen_layers_are_neither_measured_nor_held(tmp_path, every):
    model = backbone()
    optimizer, copies = sgd(model), copies_of(model)
    with watch(model, optimizer, tmp_path / "run", every=every) as monitor:
        train(model, optimizer, inputs(4), copies=copies)
        size = model[4].weight.numel()
        assert monitor.cost().reference_bytes == -(-size // 512) * 512 * 4  # w₀ in pieces of 512 elements
        assert "2 layers frozen and not held" in monitor.held
    expected = measured(copies, range(0, 5, every))
    with gyroscope.load(monitor.path) as run:
        assert run.meta["facts"]["frozen"] == ["0.weight", "2.weight"]
        for name in ("rotation", "rate", "update_norm", "update_ratio", "gradient_norm", "alignment", "lr"):
            assert np.isnan(run.series(name)[:, :2]).all(), name
            np.testing.assert_allclose(run.series(name)[1:, 2], expected[name][1:, 2], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(run.series("weight_norm"), expected["weight_norm"], rtol=1e-6)
    assert any("2 layers (0.weight, 2.weight) are frozen" in text for _, text in events(monitor.path))
    assert sorted(torch.load(monitor.path / "reference.pt", weights_only=True)["tensors"]) == ["4.weight"]


def test_a_frozen_layer_that_an_optimizer_holds_is_frozen_too(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model[0].requires_grad_(False)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(2))
    assert np.isnan(series(monitor.path, "rotation", 0)).all()
    np.testing.assert_allclose(series(monitor.path, "lr", 0)[1:], 0.1, rtol=1e-6)


def test_all_layers_may_be_frozen(tmp_path):
    model = mlp()
    for i in (0, 2, 4):
        model[i].weight.requires_grad_(False)  # biases train
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norms = [norm(flat(model[i].weight)) for i in (0, 2, 4)]
    with watch(model, optimizer, tmp_path / "run", every=2) as monitor:
        train(model, optimizer, inputs(4))
    assert monitor.error is None
    with gyroscope.load(monitor.path) as run:
        assert run.steps.tolist() == [0, 2, 4]
        np.testing.assert_allclose(run.series("weight_norm"), [norms] * 3, rtol=1e-6)


def test_a_frozen_layer_is_measured_from_a_reference_that_it_differs_from(tmp_path):
    model, other = backbone(), mlp()
    with torch.no_grad():
        other[0].weight.add_(0.05)
    start = cosine_distance(flat(model[0].weight), flat(other[0].weight))
    optimizer = sgd(model)
    with watch(model, optimizer, tmp_path / "run", reference=other) as monitor:
        train(model, optimizer, inputs(2))
    np.testing.assert_allclose(series(monitor.path, "rotation", 0), [start] * 3, rtol=1e-5)
    assert np.isnan(series(monitor.path, "rotation", 1)).all()  # this one is its own reference


@pytest.mark.parametrize("every", [1, 3])
def test_a_layer_that_begins_to_train_is_measured_from_where_it_begins(tmp_path, every):
    model = backbone()
    optimizer, copies = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), copies_of(model)

    def thaw(i):
        if i == 4:
            model[2].requires_grad_(True)

    with watch(model, optimizer, tmp_path / "run", every=every) as monitor:
        train(model, optimizer, inputs(9), copies=copies, each=thaw)
    assert monitor.error is None
    steps = list(range(0, 10, every))
    expected = measured(copies, steps)
    trained = np.array(steps) > 4
    for name in ("rotation", "update_norm", "weight_norm", "gradient_norm", "rate"):
        found = np.array(series(monitor.path, name, 1))
        np.testing.assert_allclose(found[trained], expected[name][trained, 1], rtol=1e-5, err_msg=name)
        if name != "weight_norm":
            assert np.isnan(found[~trained]).all(), name
    assert any(text.startswith("2.weight has begun to train") and step == 4 for step, text in events(monitor.path)), (
        events(monitor.path)
    )
    assert np.isnan(series(monitor.path, "rotation", 0)).all()


@pytest.mark.parametrize("how", ["in place", "through .data", "another tensor"])
def test_a_frozen_average_of_other_weights_is_found_to_move(tmp_path, how):
    torch.manual_seed(0)
    model = nn.ModuleDict({"student": nn.Linear(6, 5), "teacher": nn.Linear(6, 5)})
    model["teacher"].requires_grad_(False)
    optimizer = sgd(model)
    copies = copies_of(model)

    def average(i):
        mine, other = model["teacher"].weight, model["student"].weight
        with torch.no_grad():
            match how:
                case "in place":
                    mine.lerp_(other, 0.3)
                case "through .data":
                    mine.data.mul_(0.7).add_(other.data, alpha=0.3)
                case _:
                    mine.data = 0.7 * mine.data + 0.3 * other.data

    with watch(model, optimizer, tmp_path / "run") as monitor:
        train(model["student"], optimizer, inputs(6), copies=copies, each=average)
    assert monitor.error is None
    found = np.array(series(monitor.path, "rotation", 1))
    # It moved before step 1, which is measured then, and so it is held from before step 2 on.
    assert np.isnan(found[:2]).all()
    weights = [copies.weights[step][1] for step in range(7)]
    start = weights[2]  # the teacher moves between steps: before step 2 it is as after step 2
    np.testing.assert_allclose(found[2:], [cosine_distance(w, start) for w in weights[2:]], rtol=1e-5, atol=1e-12)
    assert any("teacher.weight has changed though frozen" in text for _, text in events(monitor.path))


def test_frozen_layers_change_nothing_about_training(tmp_path):
    weights = []
    for watched in (False, True):
        model = backbone()
        optimizer = sgd(model)
        monitor = watch(model, optimizer, tmp_path / "run") if watched else None
        train(model, optimizer, inputs(4))
        if monitor is not None:
            monitor.close()
        weights.append([p.detach().clone() for p in model.parameters()])
        assert not model[0].weight.requires_grad
        assert model[0].weight.grad is None
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


# Layers that begin at zero.


@pytest.mark.parametrize("every", [1, 3])
def test_a_layer_that_is_zero_has_no_direction_until_a_step_gives_it_one(tmp_path, every):
    model = mlp()
    nn.init.zeros_(model[4].weight)
    optimizer, copies = sgd(model), copies_of(model)
    with watch(model, optimizer, tmp_path / "run", every=every) as monitor:
        train(model, optimizer, inputs(12), copies=copies)
    found = np.array(series(monitor.path, "rotation", 2))
    steps = list(range(0, 13, every))
    assert np.isnan(found[:2]).all()
    # It was found not to be zero at the first measured step; w₀ is its weights before the second.
    start = copies.weights[steps[2] - 1][2]
    expected = [cosine_distance(copies.weights[step][2], start) for step in steps[2:]]
    np.testing.assert_allclose(found[2:], expected, rtol=1e-5)
    said = events(monitor.path)
    assert (0, "4.weight is zero: without a direction, and so without rotation, until a step changes it") in said
    assert [step for step, text in said if text.startswith("4.weight has a direction now")] == [steps[2] - 1]


def test_a_layer_that_stays_zero_is_said_to_be_so_once(tmp_path):
    model = mlp()
    nn.init.zeros_(model[2].weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(5))
    assert np.isnan(series(monitor.path, "rotation", 1)).all()
    assert len([text for _, text in events(monitor.path) if "2.weight" in text]) == 1


def test_a_zero_layer_is_held_exactly_though_others_are_rounded(tmp_path):
    model = mlp()
    nn.init.zeros_(model[2].weight)
    optimizer, copies = sgd(model), copies_of(model)
    with watch(model, optimizer, tmp_path / "run", reference_dtype="bfloat16") as monitor:
        train(model, optimizer, inputs(6), copies=copies)
    expected = [cosine_distance(copies.weights[step][1], copies.weights[1][1]) for step in range(2, 7)]
    np.testing.assert_allclose(series(monitor.path, "rotation", 1)[2:], expected, rtol=1e-5)


# Going on.


def mixed() -> nn.Sequential:
    model = backbone()
    nn.init.zeros_(model[4].weight)
    return model


@pytest.mark.parametrize("how", ["a state", "its weights", "a step"])
def test_a_run_with_frozen_and_zero_layers_is_resumed(tmp_path, how):
    xs = inputs(8)
    whole = mixed()
    optimizer = sgd(whole)
    with watch(whole, optimizer, tmp_path / "whole"):
        train(whole, optimizer, xs)

    model = mixed()
    optimizer = sgd(model)
    monitor = watch(model, optimizer, tmp_path / "run")
    train(model, optimizer, xs[:5])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "monitor": monitor.state_dict()}
    monitor.close()
    assert state["monitor"]["frozen"] == ["0.weight", "2.weight"]
    assert sorted(state["monitor"]["reference"]) == ["4.weight"]

    again = mixed()
    again.load_state_dict(state["model"])
    optimizer = sgd(again)
    optimizer.load_state_dict(state["optimizer"])
    monitor = watch(again, optimizer, tmp_path / "run", **({"step": 5} if how == "a step" else {}))
    if how == "a state":
        monitor.load_state_dict(state["monitor"])
    train(again, optimizer, xs[5:])
    monitor.close()
    for name in ("rotation", "weight_norm", "update_norm"):
        for layer in range(3):
            found, expected = (series(tmp_path / path, name, layer) for path in ("run", "whole"))
            np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("quantities", [None, ["rotation"]])
def test_a_run_whose_frozen_layers_are_to_train_is_resumed(tmp_path, quantities):
    model, xs = backbone(), inputs(8)
    optimizer = sgd(model)
    with watch(model, optimizer, tmp_path / "run", quantities=quantities):
        train(model, optimizer, xs[:5])
    model.requires_grad_(True)
    optimizer, copies = sgd(model), copies_of(model)
    with watch(model, optimizer, tmp_path / "run", quantities=quantities):
        train(model, optimizer, xs[5:], copies=copies)
    with gyroscope.load(tmp_path / "run") as run:
        assert run.steps.tolist() == list(range(9))
        assert np.isnan(run.series("rotation")[:6, 0]).all()
    expected = [cosine_distance(one[0], copies.weights[0][0]) for one in copies.weights[1:]]
    np.testing.assert_allclose(series(tmp_path / "run", "rotation", 0)[6:], expected, rtol=1e-5)


def test_a_layer_that_was_frozen_and_has_changed_has_no_reference_to_resume_from(tmp_path):
    model = backbone()
    optimizer = sgd(model)
    monitor = watch(model, optimizer, tmp_path / "run")
    train(model, optimizer, inputs(2))
    state = monitor.state_dict()
    monitor.close()
    model.requires_grad_(True)
    again = watch(model, sgd(model), tmp_path / "second")
    again.load_state_dict(state)  # it trains now, from the weights that it had
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    with pytest.raises(MonitorError, match=r"no copy of '0\.weight', which was frozen, and its weights have changed"):
        again.load_state_dict(state)
    again.close()


def test_another_backbone_is_another_run(tmp_path):
    model = backbone()
    optimizer = sgd(model)
    with watch(model, optimizer, tmp_path / "run"):
        train(model, optimizer, inputs(3))
    with torch.no_grad():
        model[0].weight.mul_(1.01)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(2))
    with gyroscope.load(monitor.path) as run:
        assert any("a new attempt" in event.text for event in run.events)


def test_the_folder_of_a_run_with_frozen_layers_says_what_it_does_not_hold(tmp_path):
    model = backbone()
    with watch(model, sgd(model), tmp_path / "first"):
        pass
    other = mlp()
    with pytest.raises(MonitorError, match=r"'0\.weight'.*A run keeps no whole copy of layers that were frozen"):
        watch(other, sgd(other), tmp_path / "second", reference=tmp_path / "first")


# Adapters.


class Adapted(nn.Module):
    """A linear layer under low-rank adapters, built as those of peft are."""

    def __init__(self, base: nn.Module, rank: int, names=("default",), *, turned: bool = False) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        inner, outer = reversed(base.weight.shape[:2]) if not turned else base.weight.shape
        self.lora_A = nn.ModuleDict({name: nn.Linear(inner, rank, bias=False) for name in names})
        self.lora_B = nn.ModuleDict({name: nn.Linear(rank, outer, bias=False) for name in names})
        self.scaling = {name: 2.0 / (i + 1) for i, name in enumerate(names)}
        self.active_adapters, self.fan_in_fan_out = list(names), turned
        for b in self.lora_B.values():
            nn.init.zeros_(b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base_layer(x)
        for name in self.active_adapters:
            y = y + self.scaling[name] * self.lora_B[name](self.lora_A[name](x))
        return y

    def formed(self) -> torch.Tensor:
        """The literal merged weight, in float64."""
        w = self.base_layer.weight.double()
        for name in self.active_adapters:
            change = self.scaling[name] * self.lora_B[name].weight.double() @ self.lora_A[name].weight.double()
            w = w + (change.T if self.fan_in_fan_out else change)
        return w


class Turned(nn.Module):
    """A linear layer whose weight has inputs first, as transformers' Conv1D."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inner, outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def adapted(names=("default",), dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    first, second = Adapted(nn.Linear(6, 40), 3, names), Adapted(Turned(40, 30), 2, names, turned=True)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(30, 3)).to(dtype)


@pytest.mark.parametrize("names", [("default",), ("one", "other")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_merged_weight_rotates_as_if_it_were_formed(tmp_path, names, dtype):
    model = adapted(names, dtype)
    model[4].requires_grad_(False)
    optimizer = sgd(model, lr=0.05)
    expected = []

    def keep(model, x):
        if not (model[0].lora_B[names[0]].weight == 0).all():
            expected.append(
                [cosine_distance(flat(model[i].formed()), flat(model[i].base_layer.weight)) for i in (0, 2)]
            )
        backward(model, x)

    with watch(model, optimizer, tmp_path / "run", detail_every=1) as monitor:
        train(model, optimizer, inputs(6, dtype=dtype), step=keep)
        keep(model, inputs(1, dtype=dtype)[0])
    assert monitor.error is None
    with gyroscope.load(monitor.path) as run:
        columns = [run.layers.index(f"{i}.base_layer.weight") for i in (0, 2)]
        found = run.series("merged_rotation")
        assert np.isnan(np.delete(found, columns, axis=1)).all()
        np.testing.assert_allclose(found[1:, columns], expected, rtol=2e-5)
        assert min(map(min, expected)) > 1e-9
        assert {f"0.lora_A.{names[0]}.weight", f"0.lora_B.{names[0]}.weight"} <= set(run.layers)


def test_large_weights_are_read_in_parts(tmp_path, monkeypatch):
    model = adapted()
    nn.init.normal_(model[0].lora_B["default"].weight)
    found = adapters.Adapters(model, gyroscope.layers(model))
    whole = adapters.rotation(found.measure())
    monkeypatch.setattr(adapters, "_AT_ONCE", 50)
    np.testing.assert_allclose(adapters.rotation(found.measure()), whole, rtol=1e-6)
    expected = cosine_distance(flat(model[0].formed()), flat(model[0].base_layer.weight))
    np.testing.assert_allclose(whole[0], expected, rtol=1e-6)


@pytest.mark.parametrize("what", ["merged", "disabled", "none active", "rescaled"])
def test_a_weight_that_is_not_the_sum_in_the_forward_pass_has_no_merged_rotation(what):
    model = adapted()
    nn.init.normal_(model[0].lora_B["default"].weight)
    match what:
        case "merged":
            model[0].merged = True
        case "disabled":
            model[0].disable_adapters = True
        case "none active":
            model[0].active_adapters = []
        case _:
            model[0].lora_magnitude_vector = nn.ParameterDict({"default": nn.Parameter(torch.ones(40))})
    found = adapters.rotation(adapters.Adapters(model, gyroscope.layers(model)).measure())
    assert math.isnan(found[0])
    assert found[3] == 0.0  # the other one has adapters that are zero


def test_adapters_and_new_heads_on_a_frozen_backbone_are_healthy(tmp_path):
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    torch.manual_seed(1)
    teacher = torch.randn(6, 3)

    def step(model, x):
        optimizer.zero_grad()
        loss = (model(x) - torch.tanh(x @ teacher)).square().mean()
        loss.backward()
        monitor.log(loss=loss)

    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None, detail_every=50) as monitor:
        train(model, optimizer, inputs(300, shape=(64, 6)), step=step)
    found = gyroscope.diagnose(monitor.path)
    assert [one.kind for one in found.alarms] == [], str(found)
    assert [event for event in gyroscope.load(monitor.path).events if event.kind == "finding"] == []
