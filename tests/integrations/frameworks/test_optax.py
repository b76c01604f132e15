"""optax's transformations next to torch's Layca, the float64 oracles and the installed Flax and Equinox."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.tree_utils import tree_get

import gyroscope
from gyroscope.errors import ControlError, MonitorError, StoreError
from gyroscope.integrations.optax import layca, record, rotation
from oracles.control import four_operations
from oracles.monitor import Copies, measured

Tree = dict[str, Any]
SHAPES = {"a": (20, 30), "b": (30,), "c": (3, 3, 4, 5)}
INNER: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (lambda: optax.sgd(0.01), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (lambda: optax.sgd(0.01, 0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "adam": (lambda: optax.adam(0.01), lambda p: torch.optim.Adam(p, lr=0.1)),
}


@pytest.fixture(params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    jax.config.update("jax_enable_x64", request.param == "float64")
    yield request.param
    jax.config.update("jax_enable_x64", False)


def arrays(seed: int, dtype: str = "float32") -> Tree:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def gradients(count: int, dtype: str = "float32") -> list[Tree]:
    start = arrays(0, dtype)  # a part of each is along the weights
    return [{name: g + 0.3 * start[name] for name, g in arrays(1 + k, dtype).items()} for k in range(count)]


def taken(tx: Any, params: Tree, given: list[Tree], **extra: Any) -> tuple[Tree, Any]:
    """The parameters and the state after one step for each of the gradients."""
    state = tx.init(params)
    params = jax.tree.map(jnp.asarray, params)

    @jax.jit
    def step(params: Tree, state: Any, g: Tree) -> tuple[Tree, Any]:
        updates, state = tx.update(g, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for g in given:
        params, state = step(params, state, g)
    return params, state


def updated(tx: Any, g: Tree, state: Any, params: Tree, **extra: Any) -> tuple[Tree, Any]:
    """The update and the next state, compiled: operation by operation takes longer."""
    found: tuple[Tree, Any] = jax.jit(tx.update)(g, state, params, **extra)
    return found


def distance(found: Any, expected: Any) -> float:
    """The largest distance of a leaf to the expected one, relative to its norm."""
    pairs = [(np.asarray(x, float), np.asarray(y, float)) for x, y in zip(found, expected, strict=True)]
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {}),
        ("momentum", {"alpha": -0.3}),
        ("adam", {}),
        ("sgd", {"project": False}),
        ("sgd", {"project": False, "reproject": False}),
    ],
)
def test_layca_equals_that_of_torch(name: str, options: dict[str, Any], dtype: str) -> None:
    here, there = INNER[name]
    params, given = arrays(0, dtype), gradients(10, dtype)
    found, _ = taken(layca(here(), 0.1, **options), params, given)
    theirs = [torch.nn.Parameter(torch.tensor(value)) for value in params.values()]
    optimizer = gyroscope.Layca(there(theirs), others_lr=0.01, **options)
    for g in given:
        for p, one in zip(theirs, g.values(), strict=True):
            p.grad = torch.tensor(one)
        optimizer.step()
    expected = [p.detach().numpy() for p in theirs]
    assert distance(found.values(), expected) < (1e-6 if dtype == "float32" else 1e-12)


def test_a_step_turns_by_arctan_of_the_rate_and_keeps_the_norm(dtype: str) -> None:
    params = arrays(0, dtype)
    found, state = taken(layca(optax.adam(1e-3), 3**-3), params, gradients(1, dtype))
    for k, name in enumerate(("a", "c")):
        w, new = params[name].astype(float), np.asarray(found[name], float)
        cosine = np.vdot(w, new) / np.linalg.norm(w) / np.linalg.norm(new)
        assert math.tan(math.acos(cosine)) == pytest.approx(3**-3, rel=1e-5)
        assert float(state.radius[k]) == pytest.approx(np.linalg.norm(w), rel=1e-6)
        assert np.linalg.norm(new) == pytest.approx(np.linalg.norm(w), rel=1e-6)


def test_vectors_get_the_inner_update_unchanged() -> None:
    params, given = arrays(0), gradients(1)[0]
    inner = optax.adam(1e-3)
    expected, _ = updated(inner, given, inner.init(params), params)
    tx = layca(inner, 0.1)
    found, _ = updated(tx, given, tx.init(params), params)
    assert np.array_equal(found["b"], expected["b"])
    assert not np.allclose(found["a"], expected["a"])


@pytest.mark.parametrize("why", ["no displacement", "zero weights", "rate 0", "not finite", "along the weights"])
def test_without_a_step_or_a_direction_a_layer_stays_exactly(why: str) -> None:
    params, given, rate = arrays(0), gradients(1)[0], 0.1
    if why == "no displacement":
        given["a"] = np.zeros_like(given["a"])
    elif why == "zero weights":
        params["a"] = np.zeros_like(params["a"])
    elif why == "rate 0":
        rate = 0.0
    elif why == "not finite":
        given["a"][0, 0] = math.inf
    else:
        given["a"] = 1e-3 * params["a"]
    tx = layca(optax.sgd(0.1), rate)
    updates, _ = updated(tx, given, tx.init(params), params)
    assert np.array_equal(updates["a"], np.zeros_like(params["a"]))
    assert bool(jnp.any(updates["c"] != 0)) is (rate > 0)


def test_a_layer_that_was_zero_is_held_at_its_first_norm() -> None:
    params = arrays(0)
    _, state = taken(layca(optax.sgd(0.1), 0.1), {**params, "a": np.zeros_like(params["a"])}, gradients(2))
    assert float(state.radius[0]) == 0.0
    tx = layca(optax.sgd(0.1), 0.1)
    _, state = updated(tx, gradients(1)[0], state, params)
    assert float(state.radius[0]) == pytest.approx(np.linalg.norm(params["a"]), rel=1e-6)


def test_a_schedule_sets_the_rate_of_each_step() -> None:
    schedule = optax.linear_schedule(0.1, 0.3, 2)
    tx = optax.chain(layca(optax.sgd(1.0), schedule), rotation(quantities=["rate"]))
    for count, rate in ((1, 0.1), (2, 0.2)):
        _, state = taken(tx, arrays(0), gradients(count))
        assert float(tree_get(state, "values")["rate"][0]) == pytest.approx(math.atan(rate), rel=1e-5)


def test_inject_hyperparams_moves_the_rate_under_jit() -> None:
    tx = optax.inject_hyperparams(layca, static_args=("alpha",))(inner=optax.sgd(1.0), rate=0.1)
    found, state = taken(tx, arrays(0), gradients(2))
    expected, _ = taken(layca(optax.sgd(1.0), 0.1), arrays(0), gradients(2))
    assert distance(found.values(), expected.values()) < 1e-7
    state.hyperparams["rate"] = jnp.array(0.0)
    updates, _ = jax.jit(tx.update)(gradients(1)[0], state, found)
    assert not np.any(updates["a"])
    with pytest.raises(ControlError, match="static_args"):
        taken(optax.inject_hyperparams(layca)(inner=optax.sgd(1.0), rate=0.1), arrays(0), gradients(1))


@pytest.mark.parametrize(
    "mask",
    [
        {"a": True, "b": True, "c": False},
        lambda params: {name: name != "c" for name in params},
    ],
    ids=["tree", "function"],
)
def test_the_mask_chooses_layers(mask: Any) -> None:
    params, given = arrays(0), gradients(1)
    found, state = taken(layca(optax.sgd(0.5), 0.1, mask=mask), params, given)
    assert state.radius.shape == (2,)
    expected = four_operations(
        torch.tensor(params["b"]), -torch.tensor(given[0]["b"]), 0.1, np.linalg.norm(params["b"])
    )
    assert distance([found["b"]], [expected]) < 1e-6
    assert distance([found["c"]], [params["c"] - 0.5 * given[0]["c"]]) < 1e-6


def test_a_prefix_of_the_parameters_is_a_mask() -> None:
    params = {"features": {"w": jnp.ones((2, 2))}, "head": {"w": jnp.ones((2, 2))}}
    state = layca(optax.sgd(1.0), 0.1, mask={"features": True, "head": False}).init(params)
    assert state.radius.shape == (1,)


def test_a_step_of_bfloat16_weights_is_rounded_once() -> None:
    w = jnp.asarray(arrays(0)["a"], jnp.bfloat16)
    g = jnp.asarray(gradients(1)[0]["a"], jnp.bfloat16)
    tx = layca(optax.sgd(1.0), 1e-3)
    updates, _ = updated(tx, {"a": g}, tx.init({"a": w}), {"a": w})
    assert updates["a"].dtype == jnp.float32
    exact = np.asarray(w, np.float64)
    literal = four_operations(
        torch.tensor(exact), -torch.tensor(np.asarray(g, np.float64)), 1e-3, np.linalg.norm(exact)
    )
    # Relative to a change of 0.001 of the weights; rounding them to bfloat16 would give 1.
    assert distance([updates["a"]], [literal.numpy() - exact]) < 1e-3
    assert optax.apply_updates({"a": w}, updates)["a"].dtype == jnp.bfloat16


def test_vmap_steps_each_network_by_itself() -> None:
    several = [arrays(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *several)
    g = jax.tree.map(lambda *x: jnp.stack(x), *gradients(3))
    tx = optax.chain(layca(optax.adam(1e-3), 0.1), rotation())
    state = jax.vmap(tx.init)(stacked)
    updates, state = jax.jit(jax.vmap(tx.update))(g, state, stacked)
    update = jax.jit(tx.update)
    for k, params in enumerate(several):
        alone, _ = update(gradients(3)[k], tx.init(params), params)
        assert distance([x[k] for x in updates.values()], alone.values()) < 1e-5
    assert tree_get(state, "values")["rotation"].shape == (3, 2)


def test_scan_takes_the_same_steps() -> None:
    tx = optax.chain(layca(optax.sgd(0.1, 0.9), 0.1), rotation(2))
    params, given = jax.tree.map(jnp.asarray, arrays(0)), gradients(6)

    def step(carry: Any, g: Tree) -> Any:
        params, state = carry
        updates, state = tx.update(g, state, params)
        return (optax.apply_updates(params, updates), state), tree_get(state, "values")["rotation"]

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *given)
    (found, _), curve = jax.jit(lambda *c: jax.lax.scan(step, c, stacked))(params, tx.init(params))
    expected, state = taken(tx, params, given)
    assert distance(found.values(), expected.values()) < 1e-6
    assert np.allclose(curve[-1], tree_get(state, "values")["rotation"], rtol=1e-5)
    assert np.array_equal(curve[2], curve[1])  # step 3 is not measured
    assert np.isnan(curve[0]).all()


# Without check_vma JAX does not say which layers are on all devices.
@pytest.mark.parametrize(("check_vma", "of_c"), [(True, P(None, None, "d")), (False, P(None, None, "d")), (True, P())])
def test_two_devices_take_the_steps_of_one_with_one_psum(check_vma: bool, of_c: P) -> None:
    spec = {"a": P("d"), "b": P(), "c": of_c}
    assert jax.device_count() == 2
    tx = layca(optax.sgd(0.1, 0.9), 0.1, axis_name="d")
    measure = rotation(axis_name="d")
    params, given = arrays(0), gradients(3)
    alone = optax.chain(layca(optax.sgd(0.1, 0.9), 0.1), rotation())
    expected, last = taken(alone, params, given, grad=given[0])

    mesh = jax.make_mesh((2,), ("d",))
    put = lambda tree: {name: jax.device_put(x, NamedSharding(mesh, spec[name])) for name, x in tree.items()}  # noqa: E731

    def start(params: Tree) -> Any:
        return tx.init(params), measure.init(params)

    def step(params: Tree, state: Any, g: Tree, grad: Tree) -> Any:
        updates, first = tx.update(g, state[0], params)
        updates, second = measure.update(updates, state[1], params, grad=grad)
        return optax.apply_updates(params, updates), (first, second)

    of_layers = (spec["a"], spec["c"])
    states = (
        type(tx.init(params))(P(), P(), jax.tree.map(lambda _: P(), tx.init(params).inner)),
        type(measure.init(params))(P(), of_layers, (), P(), {name: P() for name in measure.init(params).values}),
    )
    momentum = jax.tree.unflatten(jax.tree.structure(params), list(spec.values()))
    states = (states[0]._replace(inner=(type(tx.init(params).inner[0])(momentum), optax.EmptyState())), states[1])
    sharded = {"mesh": mesh, "check_vma": check_vma}
    begin = jax.jit(jax.shard_map(start, in_specs=(spec,), out_specs=states, **sharded))
    go = jax.jit(jax.shard_map(step, in_specs=(spec, states, spec, spec), out_specs=(spec, states), **sharded))
    here, state = put(params), begin(put(params))
    for g in given:
        here, state = go(here, state, put(g), put(given[0]))
    assert distance([here[name] for name in SHAPES], [expected[name] for name in SHAPES]) < 1e-6
    for name, value in tree_get(last, "values").items():
        assert np.allclose(state[1].values[name], value, rtol=1e-5), name
    alone_step = jax.shard_map(tx.update, in_specs=(spec, states[0], spec), out_specs=(spec, states[0]), **sharded)
    assert str(jax.make_jaxpr(alone_step)(put(params), state[0], put(params))).count("psum") == 1


def test_two_devices_write_one_row_with_the_whole_shape(tmp_path: Path) -> None:
    w, u = arrays(0)["a"], arrays(1)["a"]
    recording = record(tmp_path / "run", quantities=["rotation", "weight_norm"], axis_name="d")
    state = recording.init({"a": w})
    of_state = type(state)(P(), (P("d"),), (), P(), dict.fromkeys(state.values, P()))
    mesh = jax.make_mesh((2,), ("d",))
    specs = {"in_specs": ({"a": P("d")}, of_state, {"a": P("d")}), "out_specs": ({"a": P("d")}, of_state)}
    put = lambda x: {"a": jax.device_put(x, NamedSharding(mesh, P("d")))}  # noqa: E731
    sharded = state._replace(reference=(put(w)["a"],))
    jax.jit(jax.shard_map(recording.update, mesh=mesh, **specs))(put(u), sharded, put(w))
    recording.close()
    run = gyroscope.load(tmp_path / "run")
    assert [layer.shape for layer in run.layer_table] == [(30, 20)]
    assert run.steps.tolist() == [0, 1]
    assert np.allclose(run.series("weight_norm")[:, 0], [np.linalg.norm(w), np.linalg.norm(w + u)])


def test_sharded_arrays_under_jit_need_nothing(tmp_path: Path) -> None:
    mesh = jax.make_mesh((2,), ("d",))
    put = lambda tree: {"a": jax.device_put(tree["a"], NamedSharding(mesh, P("d")))}  # noqa: E731
    with record(tmp_path / "run", quantities=["rotation"]) as recording:
        tx = optax.chain(layca(optax.sgd(0.1), 0.1), recording)
        found, _ = taken(tx, put(arrays(0)), [put(g) for g in gradients(2)])
    expected, _ = taken(layca(optax.sgd(0.1), 0.1), {"a": arrays(0)["a"]}, [{"a": g["a"]} for g in gradients(2)])
    assert distance(found.values(), expected.values()) < 1e-6
    assert gyroscope.load(tmp_path / "run").steps.tolist() == [0, 1, 2]


def followed(tx: Any, params: Tree, given: list[Tree]) -> tuple[Copies, list[dict[str, np.ndarray]]]:
    """Copies for the oracle, and the values in the state after each step."""
    ours = {name: torch.tensor(value) for name, value in params.items()}
    copies = Copies(lambda: [ours["a"], ours["c"]])
    now, state, values = jax.tree.map(jnp.asarray, params), tx.init(params), []
    step = jax.jit(lambda g, state, params: tx.update(g, state, params, grad=g))
    for g in given:
        for name, p in ours.items():
            p.grad = torch.tensor(g[name])
        copies.keep_gradients()
        updates, state = step(g, state, now)
        now = optax.apply_updates(now, updates)
        for name, p in ours.items():
            p.copy_(torch.tensor(np.asarray(now[name])))
        copies.keep_step(torch.optim.SGD([torch.zeros(1)], lr=0.1))
        values.append(jax.tree.map(np.asarray, tree_get(state, "values")))
    return copies, values


@pytest.mark.parametrize(("name", "every"), [("plain", 1), ("layca", 3)])
def test_quantities_are_those_of_the_oracle(name: str, every: int, dtype: str) -> None:
    inner = optax.sgd(1e-3, 0.9)
    tx = optax.chain(layca(inner, 0.01) if name == "layca" else inner, rotation(every))
    copies, values = followed(tx, arrays(0, dtype), gradients(6, dtype))
    steps = list(range(0, 7, every))
    expected = measured(copies, steps)
    for row, step in enumerate(steps[1:], start=1):
        for quantity, found in values[step - 1].items():
            assert np.allclose(found, expected[quantity][row], rtol=1e-4 if dtype == "float32" else 1e-8), quantity


def test_rotation_of_many_weights_is_right_in_float32() -> None:
    random = np.random.default_rng(0)
    w = random.standard_normal((2000, 2000), dtype=np.float32)
    u = 0.5 * random.standard_normal((2000, 2000), dtype=np.float32)
    tx = rotation()
    _, state = jax.jit(tx.update)({"w": u}, tx.init({"w": w}), {"w": w})
    new = (w + u).astype(np.float64)
    cosine = np.vdot(w.astype(np.float64), new) / np.linalg.norm(w.astype(np.float64)) / np.linalg.norm(new)
    assert float(state.values["rotation"][0]) == pytest.approx(1 - cosine, abs=1e-6)


def test_updates_pass_through_and_w0_has_the_dtype_of_the_weights() -> None:
    w = {"a": jnp.ones((2, 2), jnp.bfloat16)}
    u = {"a": jnp.full((2, 2), 0.5, jnp.bfloat16)}
    tx = rotation(5)
    updates, state = tx.update(u, tx.init(w), w)
    assert updates is u
    assert state.reference[0].dtype == jnp.bfloat16


def test_the_quantities_are_chosen_by_name() -> None:
    assert list(rotation(quantities=["rate"]).init(arrays(0)).values) == ["rate"]
    with pytest.raises(MonitorError, match="quantities"):
        rotation(quantities=["ratio"])


def test_a_run_has_the_numbers_of_the_state(tmp_path: Path) -> None:
    with record(tmp_path / "run", lr=3**-3, meta={"seed": 3}) as recording:
        tx = optax.chain(layca(optax.sgd(0.1), 3**-3), recording)
        params, state = arrays(0), tx.init(arrays(0))
        step = jax.jit(lambda g, state, params, loss: tx.update(g, state, params, value=loss, grad=g))
        curves: list[Any] = []
        for k, g in enumerate(gradients(12)):
            updates, state = step(g, state, params, 2.0 - 0.1 * k)
            params = optax.apply_updates(params, updates)
            curves.append(tree_get(state, "values"))
        assert recording.run.steps[-1] == 12
    run = gyroscope.load(tmp_path / "run")
    assert run.state == "ended"
    assert run.layers == ("a", "c")
    assert [layer.shape for layer in run.layer_table] == [(30, 20), (5, 3, 3, 4)]
    assert run.steps.tolist() == list(range(13))
    assert run.series("rotation")[0].tolist() == [0.0, 0.0]
    assert np.allclose(run.series("weight_norm")[0], [np.linalg.norm(arrays(0)[name]) for name in ("a", "c")])
    for name in ("rotation", "rate", "gradient_norm"):
        assert np.array_equal(run.series(name)[1:], [curve[name] for curve in curves])
    assert np.allclose(run.series("rate")[1:], math.atan(3**-3), rtol=1e-4)
    assert run.scalars["loss"].values[:2].tolist() == pytest.approx([2.0, 1.9])
    assert (run.meta["framework"], run.meta["seed"]) == ("optax", 3)
    assert np.allclose(run.series("lr")[1:], 3**-3)
    found = gyroscope.diagnose(run)
    assert found.decided
    assert not found.serious


def test_a_run_is_recorded_from_within_scan(tmp_path: Path) -> None:
    recording = record(tmp_path / "run", every=2, quantities=["rotation", "weight_norm", "gradient_norm"])
    tx = optax.chain(optax.adam(1e-2), recording)
    params = jax.tree.map(jnp.asarray, arrays(0))

    def step(carry: Any, g: Tree) -> Any:
        params, state = carry
        updates, state = tx.update(g, state, params)
        return (optax.apply_updates(params, updates), state), None

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *gradients(7))
    jax.jit(lambda *c: jax.lax.scan(step, c, stacked))(params, tx.init(params))
    recording.flush()
    run = gyroscope.load(tmp_path / "run")
    assert run.steps.tolist() == [0, 2, 4, 6]
    assert set(run.quantities) == {"rotation", "weight_norm"}  # the gradients were not passed
    recording.close()


def test_a_resumed_training_continues_its_run(tmp_path: Path) -> None:
    def chain() -> tuple[Any, Any]:
        recording = record(tmp_path / "run", quantities=["rotation"])
        return optax.chain(optax.sgd(0.1), recording), recording

    tx, recording = chain()
    step = jax.jit(lambda g, state, params: tx.update(g, state, params))
    stages = [(arrays(0), tx.init(arrays(0)))]
    for g in gradients(5):
        params, state = stages[-1]
        updates, state = step(g, state, params)
        stages.append((optax.apply_updates(params, updates), state))
    recording.close()
    before = gyroscope.load(tmp_path / "run").series("rotation")
    tx, recording = chain()
    params, state = stages[3]
    updates, state = updated(tx, gradients(4)[3], state, params)
    recording.close()
    run = gyroscope.load(tmp_path / "run")
    assert run.steps.tolist() == [0, 1, 2, 3, 4]
    assert len(run.attempts) == 2
    assert np.array_equal(run.series("rotation"), before[:5])


def test_an_accumulated_gradient_is_one_step(tmp_path: Path) -> None:
    with record(tmp_path / "run", quantities=["rotation"]) as recording:
        tx = optax.MultiSteps(optax.chain(layca(optax.sgd(0.1), 0.1), recording), every_k_schedule=2)
        taken(tx, arrays(0), gradients(4))
    assert gyroscope.load(tmp_path / "run").steps.tolist() == [0, 1, 2]


def test_training_goes_on_without_a_run_and_flush_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with record(tmp_path / "run") as recording:
        taken(optax.chain(optax.sgd(0.1), recording), arrays(0), gradients(1))
    recording = record(tmp_path / "run", mask={"a": True, "b": False, "c": False})
    taken(optax.chain(optax.sgd(0.1), recording), arrays(0), gradients(2))
    with pytest.raises(StoreError):
        recording.flush()
    assert "training continues" in caplog.text
    recording.close()
    assert gyroscope.load(tmp_path / "run").steps.tolist() == [0, 1]


def test_an_exception_leaves_an_interrupted_run(tmp_path: Path) -> None:
    def train() -> None:
        with record(tmp_path / "run", quantities=["rotation"]) as recording:
            taken(optax.chain(optax.sgd(0.1), recording), arrays(0), gradients(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert gyroscope.load(tmp_path / "run").state == "interrupted"


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(3)(x)


def network(library: str) -> tuple[Any, Callable[[Any, Any], Any], list[str]]:
    """Parameters, predictions and names of layers."""
    if library == "linen":
        linen = Linen()
        params = linen.init(jax.random.key(0), jnp.ones((4, 5)))
        return params, linen.apply, ["params.Dense_0.kernel", "params.Dense_1.kernel"]
    if library == "nnx":
        layers = nnx.Linear(5, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 3, rngs=nnx.Rngs(1))
        graph, state = nnx.split(nnx.Sequential(*layers))
        return state, lambda p, x: nnx.merge(graph, p)(x), ["layers.0.kernel", "layers.1.kernel"]
    params, static = eqx.partition(eqx.nn.MLP(5, 3, 8, 1, key=jax.random.key(0)), eqx.is_inexact_array)
    return params, lambda p, x: jax.vmap(eqx.combine(p, static))(x), ["layers.0.weight", "layers.1.weight"]


@pytest.mark.parametrize("library", ["linen", "nnx", "equinox"])
def test_networks_of_flax_and_equinox_train_and_are_recorded(library: str, tmp_path: Path) -> None:
    params, predict, names = network(library)
    x, y = jax.random.normal(jax.random.key(1), (16, 5)), jax.random.normal(jax.random.key(2), (16, 3))
    with record(tmp_path / "run") as recording:
        tx = optax.chain(layca(optax.adam(1e-2), 3**-3), recording)

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            loss, g = jax.value_and_grad(lambda p: jnp.mean((predict(p, x) - y) ** 2))(params)
            updates, state = tx.update(g, state, params, value=loss, grad=g)
            return optax.apply_updates(params, updates), state

        state = tx.init(params)
        for _ in range(20):
            params, state = step(params, state)
    run = gyroscope.load(tmp_path / "run")
    assert list(run.layers) == names
    assert [layer.shape for layer in run.layer_table] == [(8, 5), (3, 8)]
    assert np.allclose(run.series("rate")[1:], math.atan(3**-3), rtol=1e-4)
    assert run.scalars["loss"].values[-1] < run.scalars["loss"].values[0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: layca(0.1, 0.1), "`inner` must be an optax.GradientTransformation"),
        (lambda: layca(optax.sgd(1.0), -1), "`rate` must be a finite number ≥ 0"),
        (lambda: layca(optax.sgd(1.0), "fast"), "`rate` must be"),
        (lambda: layca(optax.sgd(1.0), 0.1, alpha=2), "`alpha` must be"),
        (lambda: layca(optax.sgd(1.0), 0.1, project="no"), "`project` must be True or False"),
        (lambda: layca(optax.sgd(1.0), 0.1, mask={"a": True}).init(arrays(0)), "`mask` must have the structure"),
        (lambda: layca(optax.sgd(1.0), 0.1, mask={"a": 1, "b": 0, "c": 0}).init(arrays(0)), "True or False"),
        (lambda: layca(optax.sgd(1.0), 0.1, mask={"a": True}).init({"a": jnp.ones((2, 2), int)}), "real numbers"),
        (lambda: layca(optax.sgd(1.0), 0.1).init({"b": jnp.ones(3)}), "must have at least one layer"),
        (lambda: step_without_params(layca(optax.sgd(1.0), 0.1)), "`params` must be the parameters"),
        (lambda: rotation().update({"a": jnp.ones((2, 2))}, None, {"b": jnp.ones((2, 2))}), "structure of the gradien"),
        (lambda: step_without_params(rotation()), "`params` must be the parameters"),
        (lambda: rotation(lr=-1), "`lr` must be a finite number ≥ 0"),
        (lambda: rotation(0), "`every` must be a whole number of steps ≥ 1"),
        (lambda: record(5), "`run` must be the path of a folder"),
        (lambda: record("run", meta=3), "`meta` must be a dict"),
        (lambda: record("run").update(arrays(0), None, arrays(0), value=jnp.ones(3)), "`value` must be one number"),
    ],
)
def test_invalid_arguments_say_what_is_accepted(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((ControlError, MonitorError), match=words):
        make()


def step_without_params(tx: Any) -> Any:
    return tx.update(arrays(1), tx.init(arrays(0)))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("donated", [(0,), (1,), (0, 1)])
def test_a_step_may_donate_the_parameters_and_the_state(tmp_path: Path, every: int, donated: tuple[int, ...]) -> None:
    with record(tmp_path / "run", every) as recording:
        tx = optax.chain(optax.sgd(0.1), recording)
        params = jax.tree.map(jnp.asarray, arrays(0))
        state = tx.init(params)

        def step(params: Tree, state: Any, g: Tree) -> tuple[Tree, Any]:
            updates, state = tx.update(g, state, params)
            return optax.apply_updates(params, updates), state

        for g in gradients(4):
            params, state = jax.jit(step, donate_argnums=donated)(params, state, g)
        expected, _ = taken(optax.chain(optax.sgd(0.1), rotation(every)), arrays(0), gradients(4))
        assert all(np.array_equal(params[name], expected[name]) for name in SHAPES)
        assert recording.run.steps.tolist() == [0, *range(every, 5, every)]


@pytest.mark.parametrize("scale", [1e-34, 1e-30, 1e-19, 1.0, 1e18, 1e37])
def test_updates_of_any_size_turn_a_layer_by_the_same_angle(scale: float) -> None:
    g = {name: (scale * one).astype(np.float32) for name, one in arrays(1).items()}
    turned, _ = taken(layca(optax.sgd(1.0), rate=0.1), arrays(0), [g])
    expected, _ = taken(layca(optax.sgd(1.0), rate=0.1), arrays(0), [arrays(1)])
    for name in ("a", "c"):
        np.testing.assert_allclose(turned[name], expected[name], rtol=0, atol=1e-5)
