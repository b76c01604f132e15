"""Checkpoints: torch's distributed format in one process, and states that belong to another model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from contract_models import (
    DEVICE,
    RHO,
    Make,
    adam,
    adamw,
    assert_same_state,
    give_gradients,
    mlp,
    momentum,
    radii,
    reads_weights,
    same,
    sgd,
    snapshot,
    train,
    weights,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import gyroscope
from gyroscope import Graft, Layca
from gyroscope.errors import ControlError

pytestmark = pytest.mark.any_device


@pytest.mark.parametrize("others", ["inner", "frozen"])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [sgd, momentum, adamw])
def test_a_distributed_state_dict_continues_as_if_not_interrupted(
    make: Make, dtype: torch.dtype, flat: bool, others: Any
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = mlp(dtype=dtype)
    optimizer = Layca(make(model.parameters()), model, others=others)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    other = mlp(seed=1, dtype=dtype)
    resumed = Layca(make(other.parameters()), other, others=others)
    set_model_state_dict(other, copy.deepcopy(get_model_state_dict(model)))
    set_optimizer_state_dict(other, resumed, saved, options=options)
    train(model, optimizer, range(3, 6))
    train(other, resumed, range(3, 6))
    assert same(weights(other), weights(model))
    assert same(radii(resumed), radii(optimizer))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_distributed_checkpoint_continues_as_if_not_interrupted(
    make: Make, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = mlp(dtype=dtype)
    optimizer = Layca(make(model.parameters()), model)
    train(model, optimizer, range(3))
    saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path)
    other = mlp(seed=1, dtype=dtype)
    resumed = Layca(make(other.parameters()), other)
    found = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, resumed)}
    dcp.load(found, checkpoint_id=tmp_path)
    set_model_state_dict(other, found["model"])
    set_optimizer_state_dict(other, resumed, found["optimizer"])
    train(model, optimizer, range(3, 6))
    train(other, resumed, range(3, 6))
    assert same(weights(other), weights(model))
    assert same(radii(resumed), radii(optimizer))


@pytest.mark.parametrize("make", [sgd, momentum, adamw])
def test_asking_a_fresh_optimizer_for_its_distributed_state_moves_no_weight(make: Make) -> None:
    """torch takes a step with zero gradients at rate zero to have some state to show."""
    model = mlp()
    optimizer = Layca(make(model.parameters()), model)
    before = weights(model)
    state = get_optimizer_state_dict(model, optimizer)
    assert same(before, weights(model))
    assert state["state"]["0.weight"]["radius"].item() == pytest.approx(before[0].double().norm().item(), rel=1e-12)
    assert [group["lr"] for group in optimizer.param_groups] == [RHO, RHO]


# States of another model


def _foreign(kind: str, make: Make) -> dict[str, Any]:
    """The state of an optimizer that has stepped, for a model that is not `mlp()`."""
    if kind == "names":
        model: nn.Module = nn.Sequential(nn.Identity(), *mlp())
    elif kind == "shapes":
        model = mlp(hidden=6)
    elif kind == "layers":
        model = nn.Sequential(*mlp(), nn.Tanh(), nn.Linear(3, 3))
    elif kind == "no biases":
        model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))
    else:
        model = mlp()
    params: Any = list(model.to(DEVICE).parameters())
    if kind == "groups":
        params = [{"params": params[:2]}, {"params": params[2:]}]
    chosen = gyroscope.layers(model, granularity="row") if kind == "granularity" else model
    optimizer = Layca(make(params), chosen)
    give_gradients(model, 0)
    optimizer.step()
    state = snapshot(optimizer)
    if kind.startswith("no "):
        state.pop(kind.removeprefix("no "), None)
    return state


KINDS = [
    "names",
    "shapes",
    "layers",
    "no biases",
    "groups",
    "granularity",
    "no state",
    "no param_groups",
]


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [sgd, momentum, adamw, reads_weights])
def test_the_state_of_another_model_is_refused_and_nothing_changes(make: Make, kind: str, stepped: bool) -> None:
    state = _foreign(kind, make)
    model, twin = mlp(), mlp()
    optimizer, reference = (Layca(make(m.parameters()), m) for m in (model, twin))
    if stepped:
        train(model, optimizer, range(2))
        train(twin, reference, range(2))
    before, own = weights(model), snapshot(optimizer)
    with pytest.raises(ControlError):
        optimizer.load_state_dict(state)
    assert same(before, weights(model))
    assert_same_state(snapshot(optimizer), own)
    train(model, optimizer, range(2, 4))
    train(twin, reference, range(2, 4))
    assert same(weights(model), weights(twin))


def _radius(value: object) -> Callable[[dict[str, Any]], object]:
    return lambda s: s["state"][0].__setitem__("radius", value)


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "multipliers that are no rates": lambda s: s.update(multipliers=torch.tensor([1.0, torch.nan])),
    "too many multipliers": lambda s: s.update(multipliers=torch.ones(3)),
    "multipliers of another type": lambda s: s.update(multipliers="x"),
    "layers of another type": lambda s: s.update(layers=5),
    "shapes of another type": lambda s: s.update(shapes=5),
    "a shape of another type": lambda s: s.update(shapes=[1, 2]),
    "a radius that is no number": _radius("x"),
    "a radius that is not finite": _radius(torch.tensor(torch.inf)),
    "a state of another type": lambda s: s.update(state=[]),
    "an entry of another type": lambda s: s["state"].update({0: 5}),
    "groups of another type": lambda s: s.update(param_groups=None),
    "a group of another type": lambda s: s["param_groups"].__setitem__(0, 1),
    "an inner state without its count of steps": lambda s: [one.pop("step", None) for one in s["state"].values()],
    "an entry without its count of steps": lambda s: s["state"][1].pop("step"),
    "an entry without its first moment": lambda s: s["state"][0].pop("exp_avg"),
    "a first moment of None": lambda s: s["state"][0].update(exp_avg=None),
    "a first moment that is no tensor": lambda s: s["state"][0].update(exp_avg=0.5),
    "a first moment without values": lambda s: s["state"][0].update(exp_avg=s["state"][0]["exp_avg"].to("meta")),
    "a radius without a value": _radius(torch.ones((), device="meta")),
    "a group without its betas": lambda s: s["param_groups"][0].pop("betas"),
    "a group without parameters": lambda s: s["param_groups"][0].pop("params"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused_and_nothing_changes(damage: str) -> None:
    model, other = mlp(), mlp(seed=1)
    optimizer, source = (Layca(adam(m.parameters()), m) for m in (model, other))
    train(model, optimizer, range(2))
    train(other, source, range(3))
    own, state = snapshot(optimizer), snapshot(source)
    DAMAGES[damage](state)
    with pytest.raises(ControlError):
        optimizer.load_state_dict(state)
    assert_same_state(snapshot(optimizer), own)


@pytest.mark.parametrize("lost", ["betas", "eps"])
def test_a_state_of_two_optimizers_of_which_one_is_damaged_is_loaded_into_neither(lost: str) -> None:
    model, other = mlp(), mlp(seed=1)
    optimizer, source = (Graft(momentum(m.parameters()), adam(m.parameters())) for m in (model, other))
    train(model, optimizer, range(2))
    train(other, source, range(3))
    own, state = snapshot(optimizer), snapshot(source)
    del state["direction"]["param_groups"][0][lost]
    with pytest.raises(ControlError, match=f"its groups lack '{lost}'.*nothing was changed"):
        optimizer.load_state_dict(state)
    assert_same_state(snapshot(optimizer), own)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("wrap", [lambda inner, _: Layca(inner), lambda inner, other: Graft(inner, other)])
def test_what_an_optimizer_keeps_of_itself_and_not_of_a_parameter_comes_back(
    wrap: Callable[..., Any], stepped: bool
) -> None:
    """torch copies entries under keys that are no parameter's as they are, in both directions."""
    model = mlp()
    optimizer = wrap(momentum(model.parameters()), adam(model.parameters()))
    optimizer.inner.state["calls"] = 3
    if stepped:
        train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    other = wrap(momentum(model.parameters()), adam(model.parameters()))
    other.load_state_dict(saved)
    assert saved["state"]["calls"] == other.inner.state["calls"] == other.state_dict()["state"]["calls"] == 3


@pytest.mark.parametrize("wrap", [lambda inner, _: Layca(inner), lambda inner, other: Graft(inner, other)])
def test_what_is_no_state_is_refused_by_its_type(wrap: Callable[..., Any]) -> None:
    params = list(mlp().parameters())
    with pytest.raises(ControlError, match=r"`state_dict` must be a dict, got a NoneType. Pass what state_dict"):
        wrap(adam(params), sgd(params)).load_state_dict(None)


def test_a_state_of_whole_layers_is_refused_by_rows_and_the_reverse() -> None:
    model, twin = mlp(), mlp()
    whole = Layca(sgd(model.parameters()), model)
    rows = Layca(sgd(twin.parameters()), gyroscope.layers(twin, granularity="row"))
    train(model, whole, [0])
    train(twin, rows, [0])
    with pytest.raises(ControlError, match=r"1 radii for layer 0\.weight, which has 5 segments"):
        rows.load_state_dict(snapshot(whole))
    with pytest.raises(ControlError, match=r"5 radii for layer 0\.weight, which has 1 segments"):
        whole.load_state_dict(snapshot(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_radii_of_rows_are_saved_and_loaded(dtype: torch.dtype) -> None:
    model, other = mlp(dtype=dtype), mlp(seed=1, dtype=dtype)
    optimizer, resumed = (Layca(adam(m.parameters()), gyroscope.layers(m, granularity="row")) for m in (model, other))
    train(model, optimizer, range(3))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(snapshot(optimizer))
    train(model, optimizer, range(3, 5))
    train(other, resumed, range(3, 5))
    assert same(weights(other), weights(model))
    assert [r.numel() for r in radii(resumed)] == [5, 3]
    assert same(radii(resumed), radii(optimizer))


class Float32Momentum(torch.optim.Optimizer):
    """Keeps float32 state for parameters in half precision, which torch's own loading would cast away."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": RHO})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p, dtype=torch.float32))
                    buffer.mul_(0.9).add_(p.grad)
                    p.add_(buffer.to(p.dtype), alpha=-group["lr"])


def test_float32_state_of_half_precision_parameters_is_loaded_in_float32() -> None:
    model, other = mlp(dtype=torch.bfloat16), mlp(seed=1, dtype=torch.bfloat16)
    optimizer, resumed = (Layca(Float32Momentum(m.parameters()), m) for m in (model, other))
    for seed in range(3):
        give_gradients(model, seed)
        optimizer.step()
    saved = snapshot(optimizer)
    resumed.load_state_dict(copy.deepcopy(saved))
    assert_same_state(snapshot(resumed), saved)


def graft(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return Graft(momentum(params), adam(params))


def over_adamw(params: Any) -> torch.optim.Optimizer:
    return Layca(adamw(params))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float64)],
)
@pytest.mark.parametrize("make", [over_adamw, graft])
def test_a_state_continues_in_a_model_of_another_dtype(make: Make, saved: torch.dtype, loaded: torch.dtype) -> None:
    model, other = mlp(dtype=saved), mlp(seed=1, dtype=loaded)
    optimizer, resumed = make(model.parameters()), make(other.parameters())
    train(model, optimizer, range(3))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(snapshot(optimizer))
    radius = [value["radius"] for value in optimizer.state.values() if "radius" in value]
    assert [value["radius"] for value in resumed._save()["state"].values() if "radius" in value] == radius
    before = weights(other)
    train(model, optimizer, [3])
    train(other, resumed, [3])
    for start, p, q in zip(before, weights(other), weights(model), strict=True):
        assert not torch.equal(start, p)
        assert torch.allclose(p.float(), q.float(), rtol=0.02, atol=0.02)
    for p, kept in resumed.state.items():
        assert {
            value.dtype for value in kept.values() if isinstance(value, torch.Tensor) and value.shape == p.shape
        } <= {loaded}


# Graft


def _graft(model: nn.Module, direction: Make = adam) -> Graft:
    return Graft(momentum(model.parameters()), direction(model.parameters()))


def test_a_saved_graft_continues_as_if_not_interrupted() -> None:
    model, other = mlp(), mlp(seed=1)
    optimizer, resumed = _graft(model), _graft(other)
    train(model, optimizer, range(3))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(snapshot(optimizer))
    train(model, optimizer, range(3, 5))
    train(other, resumed, range(3, 5))
    assert same(weights(other), weights(model))
    assert_same_state(snapshot(resumed), snapshot(optimizer))


@pytest.mark.parametrize("part", ["inner", "direction"])
def test_a_graft_refuses_the_state_of_another_model_and_nothing_changes(part: str) -> None:
    model, wider = mlp(), mlp(hidden=6)
    optimizer, foreign = _graft(model), _graft(wider)
    train(model, optimizer, range(2))
    train(wider, foreign, range(2))
    state, own = snapshot(foreign), snapshot(optimizer)
    if part == "direction":
        state = {**copy.deepcopy(own), "direction": state["direction"]}
        for values in state["state"].values():
            values["momentum_buffer"] = values["momentum_buffer"] + 1
    with pytest.raises(ControlError, match="another model"):
        optimizer.load_state_dict(state)
    assert_same_state(snapshot(optimizer), own)


def _deepcopied(x: Any) -> Any:
    return copy.deepcopy(x)


def _pickled(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("duplicate", [_deepcopied, _pickled])
def test_a_copy_of_a_scheduled_graft_continues_apart_from_the_original(duplicate: Callable[[Any], Any]) -> None:
    model = mlp()
    optimizer = _graft(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, range(2))
    twin, other = duplicate((model, optimizer))
    train(model, optimizer, range(2, 4))
    train(twin, other, range(2, 4))
    assert same(weights(twin), weights(model))
    assert_same_state(snapshot(other), snapshot(optimizer))


class KeepsScalars(torch.optim.Optimizer):
    """Keeps one second moment per layer, under a name that torch gives to tensors of the layer's shape (NovoGrad)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("exp_avg_sq", p.new_zeros([])).lerp_(p.grad.square().sum(), 0.1)
                p.sub_(p.grad / state["exp_avg_sq"].sqrt(), alpha=group["lr"])


def test_a_state_with_one_scalar_per_layer_continues_as_if_not_interrupted() -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = (Layca(KeepsScalars(m.parameters()), m) for m in (model, twin))
    train(model, optimizer, range(2))
    train(twin, reference, range(2))
    resumed = Layca(KeepsScalars(model.parameters()), model)
    resumed.load_state_dict(snapshot(optimizer))
    train(model, resumed, range(2, 4))
    train(twin, reference, range(2, 4))
    assert same(weights(model), weights(twin))
