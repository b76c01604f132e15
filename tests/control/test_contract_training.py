"""The usual things people do around a step: clipping, accumulation, compilation, hooks, new groups, interruptions."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from contract_models import (
    DEVICE,
    INNERS,
    NEAR,
    RHO,
    TIGHT,
    Literal64,
    Make,
    adam,
    adamw,
    assert_close,
    assert_same_state,
    backward,
    batch,
    give_gradients,
    gradients,
    loss_of,
    mlp,
    momentum,
    radii,
    reads_weights,
    same,
    sgd,
    snapshot,
    tangent,
    train,
    weights,
)
from torch import nn
from torch.optim import Optimizer

from gyroscope import Layca
from gyroscope.control.rates import alpha_multipliers

pytestmark = pytest.mark.any_device

# Gradient clipping and accumulation


@pytest.mark.parametrize("make", [sgd, lambda p: torch.optim.Adam(p, lr=RHO, eps=1e-30)])
def test_clipping_to_another_norm_does_not_change_the_layers(make: Make) -> None:
    """Under the same factor at every step: what an adaptive rule sees is then the same gradient, scaled."""
    model, twin = mlp(dtype=torch.float64), mlp(dtype=torch.float64)
    clipped, free = (Layca(make(m.parameters()), m, others="frozen") for m in (model, twin))
    for seed in range(4):
        for m in (model, twin):
            give_gradients(m, seed)
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        clipped.step()
        free.step()
    assert_close(model, twin, 1e-8)  # torch's clipping adds 1e-6 to the norm, so its factor is not quite constant


def test_clipping_by_a_different_factor_each_step_does_not_change_plain_descent() -> None:
    model, twin = mlp(dtype=torch.float64), mlp(dtype=torch.float64)
    clipped, free = (Layca(sgd(m.parameters()), m, others="frozen") for m in (model, twin))
    for seed in range(4):
        backward(model, seed)
        backward(twin, seed)
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3) > 1e-2
        clipped.step()
        free.step()
    assert_close(model, twin, 1e-12)


@pytest.mark.parametrize("make", INNERS)
def test_accumulated_gradients_make_one_step_on_their_sum(make: Make) -> None:
    model, twin = mlp(dtype=torch.float64), mlp(dtype=torch.float64)
    piecewise, whole = (Layca(make(m.parameters()), m) for m in (model, twin))
    for seed in range(3):
        x = batch(seed, 12, torch.float64)
        piecewise.zero_grad()
        for part in x.chunk(4):
            ((model(part) - 1.0).square().sum() / 36).backward()
        whole.zero_grad()
        ((twin(x) - 1.0).square().sum() / 36).backward()
        piecewise.step()
        whole.step()
    assert_close(model, twin, 1e-12)


# torch.compile


@pytest.mark.parametrize("make", INNERS)
def test_a_compiled_model_trains_as_the_plain_one(make: Make) -> None:
    model, twin = mlp(), mlp()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = Layca(make(compiled.parameters()), compiled)
    reference = Layca(make(twin.parameters()), twin)
    assert optimizer.layers == reference.layers == ("0.weight", "2.weight")
    train(compiled, optimizer, range(3))
    train(twin, reference, range(3))
    assert_close(model, twin, 1e-6)


@pytest.mark.parametrize("make", INNERS)
def test_a_compiled_training_step_is_the_plain_one(make: Make) -> None:
    model, twin = mlp(), mlp()
    optimizer = Layca(make(model.parameters()), model)
    reference = Layca(make(twin.parameters()), twin)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    compiled = torch.compile(step, backend="eager")
    for seed in range(3):
        compiled(batch(seed))
        train(twin, reference, [seed])
    assert_close(model, twin, 1e-6)
    assert_same_radii(optimizer, reference)


def test_a_compiled_step_function_sees_a_new_rate() -> None:
    model = mlp(dtype=torch.float64)
    optimizer = Layca(adam(model.parameters()), model)
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    for seed, rate in enumerate([0.1, 0.01, 0.3]):
        optimizer.param_groups[0]["lr"] = rate
        before = weights(model)
        backward(model, seed)
        compiled()
        assert tangent(before[0], model[0].weight) == pytest.approx(rate, rel=NEAR)


def assert_same_radii(a: Layca, b: Layca) -> None:
    assert same(radii(a), radii(b))


# Hooks


@pytest.mark.parametrize("make", INNERS)
def test_step_hooks_run_on_the_wrapper_and_on_the_inner_optimizer(make: Make) -> None:
    model, twin = mlp(), mlp()
    optimizer = Layca(make(model.parameters()), model)
    reference = Layca(make(twin.parameters()), twin)
    heard: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda o, *_: heard.append(f"pre {type(o).__name__}")),
        optimizer.inner.register_step_pre_hook(lambda *_: heard.append("inner pre")),
        optimizer.inner.register_step_post_hook(lambda *_: heard.append("inner post")),
        optimizer.register_step_post_hook(lambda o, *_: heard.append(f"post {type(o).__name__}")),
    ]
    train(model, optimizer, range(2))
    assert heard == ["pre Layca", "inner pre", "inner post", "post Layca"] * 2
    for handle in handles:
        handle.remove()
    train(model, optimizer, [2])
    assert len(heard) == 8
    train(twin, reference, range(3))
    assert_close(model, twin, 1e-7)


def test_a_pre_hook_may_change_the_gradients_and_a_post_hook_sees_the_turned_weights() -> None:
    model = mlp(dtype=torch.float64)
    oracle = Literal64(model, sgd)
    optimizer = Layca(sgd(model.parameters()), model)

    def negate(o: Optimizer, *_: Any) -> None:
        for group in o.param_groups:
            for p in group["params"]:
                p.grad.neg_()

    seen = []
    optimizer.register_step_pre_hook(negate)
    optimizer.register_step_post_hook(lambda *_: seen.extend(weights(model)))
    give_gradients(model, 0)
    oracle.step([-g for g in gradients(model)])
    optimizer.step()
    assert same(seen, weights(model))
    assert_close(model, oracle.model, TIGHT)


def test_state_dict_hooks_run_on_the_wrapper() -> None:
    model = mlp()
    optimizer = Layca(adam(model.parameters()), model)
    train(model, optimizer, range(2))
    heard: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda o: heard.append("saving"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: heard.append(f"loading {state['note']}"))
    optimizer.register_load_state_dict_post_hook(lambda o: heard.append("loaded"))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert heard == ["saving", "loading 1", "loaded"]


def test_a_load_hook_may_replace_the_state() -> None:
    model = mlp()
    optimizer = Layca(sgd(model.parameters()), model)
    train(model, optimizer, [0])
    state = snapshot(optimizer)

    def doubled(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        values = {k: {name: 2 * r for name, r in v.items()} for k, v in state["state"].items()}
        return {**state, "state": values}

    optimizer.register_load_state_dict_pre_hook(doubled)
    optimizer.load_state_dict(state)
    train(model, optimizer, [1])
    assert radii(optimizer) == [2 * state["state"][i]["radius"] for i in (0, 1)]


# The object itself


def test_groups_state_and_defaults_are_the_inner_objects() -> None:
    model = mlp()
    inner = adamw(model.parameters())
    optimizer = Layca(inner, model)
    assert isinstance(optimizer, Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    train(model, optimizer, range(2))
    optimizer.load_state_dict(snapshot(optimizer))
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state


def test_zero_grad_forgets_or_zeroes_the_gradients_of_all_parameters() -> None:
    model = mlp()
    optimizer = Layca(sgd(model.parameters()), model)
    give_gradients(model, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_repr_names_the_wrapper_and_shows_the_inner_options() -> None:
    text = repr(Layca(torch.optim.SGD(mlp().parameters(), lr=0.25, momentum=0.75)))
    assert text.startswith("Layca over SGD (")
    assert "lr: 0.25" in text
    assert "momentum: 0.75" in text


def test_a_discarded_wrapper_is_freed_though_the_inner_optimizer_lives() -> None:
    model = mlp()
    inner = adam(model.parameters())
    optimizer = Layca(inner, model)
    train(model, optimizer, [0])
    state = {key: snapshot(optimizer)[key] for key in ("state", "param_groups")}
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    inner.load_state_dict(state)


def test_without_a_model_every_matrix_is_a_layer() -> None:
    model, twin = mlp(), mlp()
    optimizer = Layca(momentum(model.parameters()))
    reference = Layca(momentum(twin.parameters()), twin)
    assert optimizer.layers == ("group0.0", "group0.2")
    train(model, optimizer, range(3))
    train(twin, reference, range(3))
    assert same(weights(model), weights(twin))


def test_named_parameters_of_the_inner_optimizer_name_the_layers_and_stay_with_their_parameters() -> None:
    model = mlp()
    optimizer = Layca(torch.optim.SGD(model.named_parameters(), lr=RHO))
    assert optimizer.layers == ("0.weight", "2.weight")
    assert [g["param_names"] for g in optimizer.param_groups] == [["0.weight", "2.weight"], ["0.bias", "2.bias"]]
    named = dict(model.named_parameters())
    for group in optimizer.param_groups:
        assert all(named[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))
    train(model, optimizer, range(2))
    saved = snapshot(optimizer)
    other = mlp(seed=1)
    resumed = Layca(torch.optim.SGD(other.named_parameters(), lr=RHO))
    resumed.load_state_dict(saved)
    assert_same_state(snapshot(resumed), saved)


# Groups added mid-run


@pytest.mark.parametrize("make", INNERS)
def test_a_group_added_mid_run_is_controlled_and_the_others_go_on(make: Make) -> None:
    model, late = mlp(dtype=torch.float64), mlp(seed=1, dtype=torch.float64)
    oracle, late_oracle = Literal64(model, make), Literal64(late, make)
    optimizer = Layca(make(model.parameters()), model)

    def go(seeds: Iterable[int], *both: tuple[nn.Module, Literal64]) -> None:
        for seed in seeds:
            for m, o in both:
                give_gradients(m, seed)
                o.step(gradients(m))
            optimizer.step()

    go(range(3), (model, oracle))
    known = radii(optimizer)
    states = {p: dict(optimizer.state[p]) for p in model.parameters() if p in optimizer.state}
    optimizer.add_param_group({"params": list(late.parameters())})
    assert same(radii(optimizer), known)
    for p, state in states.items():
        assert all(optimizer.state[p][k] is v for k, v in state.items() if k != "radius")
    go(range(3, 6), (model, oracle), (late, late_oracle))
    assert_close(model, oracle.model, TIGHT)
    assert_close(late, late_oracle.model, TIGHT)
    assert len(optimizer.layers) == 4
    assert len(set(optimizer.layers)) == 4


def test_alpha_is_spread_over_the_layers_of_an_added_group_too() -> None:
    model, late = mlp(dtype=torch.float64), nn.Linear(4, 2).to(DEVICE, torch.float64)
    optimizer = Layca(sgd(model.parameters()), model, alpha=-0.3)
    train(model, optimizer, range(2))
    optimizer.add_param_group({"params": list(late.parameters()), "lr": 2 * RHO})
    expected = alpha_multipliers(-0.3, 3)
    assert optimizer.multipliers.tolist() == expected
    before = [*weights(model)[::2], late.weight.detach().clone()]
    give_gradients(model, 5)
    give_gradients(late, 6)
    optimizer.step()
    after = [*weights(model)[::2], late.weight]
    turned = [tangent(x, y) for x, y in zip(before, after, strict=True)]
    assert turned == pytest.approx([RHO * expected[0], RHO * expected[1], 2 * RHO * expected[2]], rel=NEAR)


def test_the_others_of_an_added_group_have_their_own_rate_too() -> None:
    model, late = mlp(), nn.Linear(4, 2)
    optimizer = Layca(sgd(model.parameters()), model, others_lr=1e-3)
    optimizer.param_groups[1]["lr"] = 5e-4  # as a scheduler has left it
    optimizer.add_param_group({"params": late.parameters(), "lr": 2 * RHO})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5})
    assert [group["lr"] for group in optimizer.param_groups] == [RHO, 5e-4, 2 * RHO, 1e-3, 1e-3, 0.5]
    assert [optimizer.controls(i) for i in range(6)] == [True, False, True, False, False, False]


def test_the_names_of_an_added_group_name_its_layers() -> None:
    model, late = mlp(), nn.Linear(4, 2)
    optimizer = Layca(torch.optim.SGD(model.named_parameters(), lr=RHO))
    optimizer.add_param_group({"params": [(f"head.{name}", p) for name, p in late.named_parameters()]})
    assert optimizer.layers == ("0.weight", "2.weight", "head.weight")


def test_an_added_group_is_saved_and_loaded() -> None:
    def build(seed: int) -> tuple[nn.Module, Layca]:
        model = nn.ModuleList([mlp(seed), nn.Linear(4, 2)]).to(DEVICE)
        optimizer = Layca(adam(model[0].parameters()), model[0])
        optimizer.add_param_group({"params": list(model[1].parameters())})
        return model, optimizer

    model, optimizer = build(0)
    for seed in range(3):
        give_gradients(model, seed)
        optimizer.step()
    other, resumed = build(1)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(snapshot(optimizer))
    for m, o in ((model, optimizer), (other, resumed)):
        give_gradients(m, 7)
        o.step()
    assert same(weights(model), weights(other))
    assert_same_state(snapshot(resumed), snapshot(optimizer))


# Interruptions


class StopHereError(Exception):
    pass


def _interrupting(base: type[Optimizer]) -> type[Optimizer]:
    """An optimizer that breaks off between two layers when told to; `base` keeps its exact class otherwise."""

    class Fails(base):  # type: ignore[misc,valid-type]
        fail = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if self.fail:
                first = self.param_groups[0]["params"][0]
                first.add_(first.grad, alpha=-1.0)
                first.grad = first.grad * 0 + 7
                raise StopHereError
            return super().step(closure)

    return Fails


@pytest.mark.parametrize("told", [None, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [momentum, adamw, reads_weights])
def test_an_inner_optimizer_that_raises_leaves_everything_as_it_was(
    make: Make, dtype: torch.dtype, told: bool | None
) -> None:
    model, twin = mlp(dtype=dtype), mlp(dtype=dtype)
    inner = make(model.parameters())
    kind = type(inner)
    inner.__class__ = _interrupting(kind)
    optimizer = Layca(inner, model, reads_weights=told)
    other = make(twin.parameters())
    other.__class__ = _interrupting(type(other))
    reference = Layca(other, twin, reads_weights=told)
    for m, o in ((model, optimizer), (twin, reference)):
        for seed in range(2):
            give_gradients(m, seed)
            o.step()
        give_gradients(m, 2)
    before, given, state = weights(model), gradients(model), snapshot(optimizer)
    addresses = [p.data_ptr() for p in model.parameters()]
    inner.fail = True
    with pytest.raises(StopHereError):
        optimizer.step()
    inner.fail = False
    assert same(before, weights(model))
    assert same(given, gradients(model))
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert_same_state(snapshot(optimizer), state)
    optimizer.step()
    reference.step()
    assert same(weights(model), weights(twin))


@pytest.mark.parametrize("make", [momentum, adam])
def test_a_known_optimizer_stopped_by_its_own_hook_leaves_everything_as_it_was(make: Make) -> None:
    model, twin = mlp(), mlp()
    optimizer, reference = (Layca(make(m.parameters()), m) for m in (model, twin))
    train(model, optimizer, range(2))
    train(twin, reference, range(2))
    backward(model, 2)
    before, given, state = weights(model), gradients(model), snapshot(optimizer)

    def stop(*_: Any) -> None:
        raise StopHereError

    handle = optimizer.inner.register_step_pre_hook(stop)
    with pytest.raises(StopHereError):
        optimizer.step()
    handle.remove()
    assert same(before, weights(model))
    assert same(given, gradients(model))
    assert_same_state(snapshot(optimizer), state)
    optimizer.step()
    train(twin, reference, [2])
    assert_close(model, twin, 1e-7)


@pytest.mark.parametrize("make", INNERS)
def test_a_closure_that_raises_leaves_the_weights_as_they_were(make: Make) -> None:
    model = mlp()
    optimizer = Layca(make(model.parameters()), model)
    train(model, optimizer, range(2))
    before, state = weights(model), snapshot(optimizer)

    def closure() -> None:
        raise StopHereError

    with pytest.raises(StopHereError):
        optimizer.step(closure)
    assert same(before, weights(model))
    assert_same_state(snapshot(optimizer), state)


@pytest.mark.parametrize("make", [*INNERS, lambda p: torch.optim.LBFGS(p, lr=RHO, max_iter=1)])
def test_the_gradients_a_closure_makes_are_there_after_the_step(make: Make) -> None:
    model, twin = mlp(), mlp()
    optimizer = Layca(make(model.parameters()), model)
    for seed in range(3):
        twin.load_state_dict(model.state_dict())

        def closure(seed: int = seed) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch(seed))
            loss.backward()
            return loss

        optimizer.step(closure)
        backward(twin, seed)
        assert same(gradients(model), gradients(twin))


def test_the_inner_learning_rate_and_decay_are_back_after_a_step() -> None:
    model = mlp()
    optimizer = Layca(adamw(model.parameters()), model)
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    train(model, optimizer, range(2))
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == options


def test_state_thrown_away_before_a_checkpoint_is_set_up_anew_and_keeps_its_radius():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(5, 3))
    optimizer = Layca(torch.optim.Adam([p], lr=0.1))
    norm = p.detach().norm()
    for _ in range(2):
        p.grad = torch.randn_like(p)
        optimizer.step()
        optimizer.state.clear()
        saved = optimizer.state_dict()
        torch.testing.assert_close(saved["state"][0]["radius"].float(), norm)
    q = torch.nn.Parameter(3 * p.detach())
    other = Layca(torch.optim.Adam([q], lr=0.1))
    other.load_state_dict(saved)
    q.grad = torch.randn_like(q)
    other.step()
    torch.testing.assert_close(q.detach().norm(), norm)
