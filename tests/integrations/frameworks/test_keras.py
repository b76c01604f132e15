"""Keras next to the literal operations in float64 and torch's Layca; with JAX, and with torch in a second process."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import ops

import gyroscope
from gyroscope.errors import ControlError, LayerError, MonitorError, StoreError
from gyroscope.integrations.keras import Layca, LayerRotation
from oracles.control import four_operations

Arrays = list[np.ndarray]
SHAPES = [(6, 8), (8,), (8, 3)]


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="this is that process")
def test_all_of_this_holds_with_torch_as_the_backend() -> None:
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="once is enough")
def test_a_backend_that_is_not_installed_is_named() -> None:
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    program = "import sys; sys.modules['tensorflow'] = None; import gyroscope.integrations.keras"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert "its backend tensorflow is not installed. Try the environment variable KERAS_BACKEND" in done.stderr


def arrays(seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype(np.float32) for shape in SHAPES]


def variables(values: Arrays) -> list[Any]:
    return [keras.Variable(value, name=f"weight{i}") for i, value in enumerate(values)]


def stepped(optimizer: Any, values: Arrays, gradients: list[Arrays]) -> Arrays:
    """Weights after one step for each of the gradients."""
    weights = variables(values)
    for g in gradients:
        optimizer.apply([ops.convert_to_tensor(one) for one in g], weights)
    return [ops.convert_to_numpy(v.value) for v in weights]


def distance(found: Arrays, expected: Arrays) -> float:
    pairs = [(np.asarray(x, float), np.asarray(y, float)) for x, y in zip(found, expected, strict=True)]
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs)


OPTIMIZERS: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (lambda: keras.optimizers.SGD(0.01), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        lambda: keras.optimizers.SGD(0.01, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ),
    "adam": (
        lambda: keras.optimizers.Adam(0.01, epsilon=1e-12), lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-12),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {}),
        ("momentum", {"alpha": 0.4}),
        ("adam", {}),
        ("sgd", {"project": False}),
        ("sgd", {"project": False, "reproject": False}),
        ("adam", {"others": "frozen"}),
    ],
)
def test_layca_equals_that_of_torch(name: str, options: dict[str, Any]) -> None:
    here, there = OPTIMIZERS[name]
    start, gradients = arrays(0), [arrays(k) for k in range(1, 11)]
    found = stepped(Layca(here(), 0.1, **options), start, gradients)
    theirs = [torch.nn.Parameter(torch.tensor(value)) for value in start]
    optimizer = gyroscope.Layca(there(theirs), others_lr=0.01, **options)
    for g in gradients:
        for p, one in zip(theirs, g, strict=True):
            p.grad = torch.tensor(one)
        optimizer.step()
    assert distance(found, [p.detach().numpy() for p in theirs]) < 1e-6


def test_layca_over_sgd_is_the_papers_algorithm() -> None:
    start, gradients = arrays(0), [arrays(k) for k in range(1, 11)]
    found = stepped(Layca(keras.optimizers.SGD(0.5), 3**-3, others="frozen"), start, gradients)
    literal = [torch.tensor(w, dtype=torch.float64) for w in start]
    for g in gradients:
        literal = [
            four_operations(w, -torch.tensor(one), 3**-3, np.linalg.norm(first)) if w.dim() > 1 else w
            for w, one, first in zip(literal, g, start, strict=True)
        ]
    assert distance(found, [w.numpy() for w in literal]) < 1e-6


def test_other_weights_are_stepped_by_the_inner_optimizer_at_its_own_rate() -> None:
    found = stepped(Layca(keras.optimizers.SGD(0.5), 0.1), arrays(0), [arrays(1)])
    assert np.allclose(found[1], arrays(0)[1] - 0.5 * arrays(1)[1])


@pytest.mark.parametrize("why", ["no displacement", "zero weights", "rate 0", "not finite", "no gradient"])
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_without_a_step_or_a_direction_a_layer_stays_exactly(why: str) -> None:
    start, g, rate = arrays(0), [ops.convert_to_tensor(one) for one in arrays(1)], 0.1
    if why == "no displacement":
        g[0] = ops.zeros_like(g[0])
    elif why == "zero weights":
        start[0] = np.zeros_like(start[0])
    elif why == "rate 0":
        rate = 0.0
    elif why == "not finite":
        g[0] = g[0] * math.inf
    else:
        g[0] = None
    weights = variables(start)
    Layca(keras.optimizers.SGD(0.5), rate).apply(g, weights)
    assert np.array_equal(ops.convert_to_numpy(weights[0].value), start[0])
    assert np.array_equal(ops.convert_to_numpy(weights[2].value), start[2]) is (rate == 0)


def test_a_tiny_learning_rate_of_the_inner_optimizer_loses_no_digits() -> None:
    expected = stepped(Layca(keras.optimizers.SGD(1.0), 0.1), arrays(0), [arrays(1)])
    found = stepped(Layca(keras.optimizers.SGD(1e-9), 0.1), arrays(0), [arrays(1)])
    assert distance(found[::2], expected[::2]) < 1e-6


class Reading(keras.optimizers.SGD):
    """An optimizer that depends on the weights."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient + variable.value * gradient, variable, learning_rate)

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        for g, v in zip(grads, trainable_variables, strict=True):
            step = ops.cast(learning_rate, "float32") * (g + v.value * g)
            v.assign(v.value - step)


def test_an_optimizer_that_reads_the_weights_proposes_the_same_step() -> None:
    start, g = arrays(0), arrays(1)
    found = stepped(Layca(Reading(1.0), 0.1), start, [g])
    step = -torch.tensor(g[0] + start[0] * g[0])
    expected = four_operations(torch.tensor(start[0]), step, 0.1, np.linalg.norm(start[0]))
    assert distance([found[0]], [expected.numpy()]) < 1e-6


def test_weight_decay_counts_where_the_step_is_not_projected() -> None:
    start, g = arrays(0), arrays(1)
    options = {"project": False, "reproject": False}
    found = stepped(Layca(keras.optimizers.SGD(0.5, weight_decay=0.3), 0.1, **options), start, [g])
    step = -0.5 * torch.tensor(g[0]) - 0.15 * torch.tensor(start[0])
    expected = four_operations(torch.tensor(start[0]), step, 0.1, 1.0, **options)
    assert distance([found[0]], [expected.numpy()]) < 1e-5


def test_a_failed_step_leaves_the_weights() -> None:
    class Failing(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            for v in trainable_variables:
                v.assign(ops.ones(v.shape))
            raise ZeroDivisionError

    weights = variables(arrays(0))
    with pytest.raises(ZeroDivisionError):
        Layca(Failing(1.0), 0.1).apply([ops.convert_to_tensor(g) for g in arrays(1)], weights)
    assert np.array_equal(ops.convert_to_numpy(weights[0].value), arrays(0)[0])


def model(seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    hidden, head = keras.layers.Dense(8, activation="relu", name="hidden"), keras.layers.Dense(3, name="head")
    return keras.Sequential([keras.Input((6,)), hidden, head])


def data(count: int = 64) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(count, 6)).astype(np.float32), random.normal(size=(count, 3)).astype(np.float32)


def fitted(network: Any, optimizer: Any, *callbacks: Any, **options: Any) -> Any:
    network.compile(optimizer, loss="mse", run_eagerly=options.pop("run_eagerly", False))
    options = {"batch_size": 16, "epochs": 2, "verbose": 0, "shuffle": False} | options
    network.fit(*data(), callbacks=list(callbacks), **options)
    return network


def kernels(network: Any) -> Arrays:
    return [ops.convert_to_numpy(network.get_layer(name).kernel.value).copy() for name in ("hidden", "head")]


class Copies(keras.callbacks.Callback):
    """Copies of the kernels after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Arrays] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.weights = self.weights or [kernels(self.model)]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.weights.append(kernels(self.model))


def rotation_of(w: np.ndarray, first: np.ndarray) -> float:
    """1 − cos as the authors' tools computed it, in float64."""
    w, first = w.astype(float), first.astype(float)
    return 1 - float(np.sum(w * first) / np.sqrt(np.sum(w**2)) / np.sqrt(np.sum(first**2)))


def angle_of(w: np.ndarray, before: np.ndarray) -> float:
    u, v = (x.astype(float) / np.linalg.norm(x.astype(float)) for x in (w, before))
    return 2 * math.atan2(float(np.linalg.norm(u - v)), float(np.linalg.norm(u + v)))


@pytest.mark.parametrize(("every", "steps"), [(None, [0, 4, 8]), (1, list(range(9))), (3, [0, 3, 4, 6, 8])])
def test_the_run_has_the_rotations_of_the_weights(tmp_path: Path, every: int | None, steps: list[int]) -> None:
    copies, rotation = Copies(), LayerRotation(tmp_path / "run", every, meta={"seed": 0})
    fitted(model(), keras.optimizers.Adam(0.01), rotation, copies)
    run = gyroscope.load(tmp_path / "run")
    assert run.state == "ended"
    assert run.layers == ("hidden/kernel", "head/kernel")
    assert [layer.shape for layer in run.layer_table] == [(8, 6), (3, 8)]
    assert run.steps.tolist() == steps
    first = copies.weights[0]
    for row, step in enumerate(steps):
        now = copies.weights[step]
        expected = [rotation_of(w, start) for w, start in zip(now, first, strict=True)]
        assert np.allclose(run.series("rotation")[row], expected, rtol=1e-5, atol=1e-12)
        assert np.allclose(run.series("weight_norm")[row], [np.linalg.norm(w) for w in now])
        if row:
            turned = [angle_of(w, b) for w, b in zip(now, copies.weights[steps[row - 1]], strict=True)]
            assert np.allclose(run.series("rate")[row], turned, rtol=1e-5)
            single = step - steps[row - 1] == 1
            lengths = [np.linalg.norm(w - b) for w, b in zip(now, copies.weights[step - 1], strict=True)]
            assert np.allclose(run.series("update_norm")[row], lengths if single else np.nan, equal_nan=True)
    assert np.allclose(run.series("lr"), 0.01)
    assert run.scalars["loss"].steps[-1] == 8
    assert run.meta["optimizers"][0] == {"class": "Adam", "amsgrad": False, "betas": [0.9, 0.999]}
    assert (run.meta["framework"], run.meta["seed"]) == ("keras", 0)
    assert not gyroscope.diagnose(run).serious


def test_the_callback_does_not_change_the_training(tmp_path: Path) -> None:
    alone = fitted(model(), keras.optimizers.Adam(0.01))
    watched = fitted(model(), keras.optimizers.Adam(0.01), LayerRotation(tmp_path / "run", every=1))
    for one, other in zip(kernels(watched), kernels(alone), strict=True):
        assert np.array_equal(one, other)


def test_fit_turns_each_kernel_by_arctan_of_the_learning_rate(tmp_path: Path) -> None:
    rotation = LayerRotation(tmp_path / "run", every=1)
    network = fitted(model(), Layca(keras.optimizers.SGD(0.1, momentum=0.9), 3**-3), rotation)
    run = rotation.run
    assert np.allclose(run.series("rate")[1:], math.atan(3**-3), rtol=1e-4)
    assert np.allclose(run.series("weight_norm"), run.series("weight_norm")[0], rtol=1e-6)
    about = run.meta["optimizers"][0]
    assert (about["class"], about["inner"], about["law"]["project"]) == ("Layca", "SGD", True)
    assert int(ops.convert_to_numpy(network.optimizer.iterations.value)) == 8


def test_schedules_and_callbacks_move_the_rate(tmp_path: Path) -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.1, 0.01])
    rotation = LayerRotation(tmp_path / "run", every=1)
    fitted(model(), Layca(keras.optimizers.SGD(0.1), schedule), rotation)
    rates = np.arctan([0.1] * 4 + [0.01] * 4)
    assert np.allclose(rotation.run.series("rate")[1:], rates[:, None], rtol=1e-4)
    moves = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 if epoch == 0 else 0.02)
    rotation = LayerRotation(tmp_path / "second", every=1)
    fitted(model(), Layca(keras.optimizers.SGD(0.1)), moves, rotation)
    assert np.allclose(rotation.run.series("rate")[5:], math.atan(0.02), rtol=1e-4)


def test_a_saved_model_goes_on_as_if_it_had_not_been_saved(tmp_path: Path) -> None:
    def optimizer() -> Any:
        return Layca(keras.optimizers.SGD(0.1, momentum=0.9), 0.05, alpha=-0.2, layers="*/kernel", others="frozen")

    network = fitted(model(), optimizer(), epochs=1)
    network.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == network.optimizer.get_config()
    assert np.array_equal(*(ops.convert_to_numpy(one.optimizer.radius.value) for one in (loaded, network)))
    for one in (loaded, network):
        one.fit(*data(), batch_size=16, epochs=1, verbose=0, shuffle=False)
    assert distance(kernels(loaded), kernels(network)) < 1e-6
    loaded.fit(*data(), batch_size=16, epochs=1, verbose=0)
    biases = ops.convert_to_numpy(loaded.get_layer("hidden").bias.value)
    assert not biases.any()  # frozen


def test_a_schedule_survives_its_configuration() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    optimizer = Layca(keras.optimizers.Adam(1e-3), schedule, name="turning")
    again = Layca.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    assert type(again.inner).__name__ == "Adam"


def test_accumulated_gradients_are_one_step(tmp_path: Path) -> None:
    rotation = LayerRotation(tmp_path / "run", every=1)
    fitted(model(), Layca(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), 0.1), rotation)
    rates = np.arctan([0.0, 0.1] * 4)
    assert np.allclose(rotation.run.series("rate")[1:], rates[:, None], rtol=1e-4, atol=1e-9)


def test_mixed_precision_steps_through_a_scaled_loss(tmp_path: Path) -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        rotation = LayerRotation(tmp_path / "run", every=1)
        network = fitted(model(), Layca(keras.optimizers.SGD(0.1), 0.1), rotation)
    finally:
        keras.config.set_dtype_policy("float32")
    assert type(network.optimizer).__name__ == "LossScaleOptimizer"
    assert np.allclose(rotation.run.series("rate")[1:], math.atan(0.1), rtol=1e-4)


def test_a_second_fit_and_a_resumed_one_continue_the_run(tmp_path: Path) -> None:
    copies, rotation = Copies(), LayerRotation(tmp_path / "run", every=2)
    network = fitted(model(), keras.optimizers.SGD(0.1), rotation, copies, epochs=1)
    network.fit(*data(), batch_size=16, epochs=1, verbose=0, callbacks=[rotation, copies])
    network.save(tmp_path / "model.keras")
    resumed = keras.models.load_model(tmp_path / "model.keras")  # as in another process
    resumed.fit(
        *data(), batch_size=16, epochs=1, verbose=0, callbacks=[LayerRotation(tmp_path / "run", every=2), copies]
    )
    run = gyroscope.load(tmp_path / "run")
    assert run.steps.tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert len(run.attempts) == 3
    expected = [[rotation_of(w, first) for w, first in zip(copies.weights[k], copies.weights[0], strict=True)]
                for k in run.steps]  # fmt: skip
    assert np.allclose(run.series("rotation"), expected, rtol=1e-4, atol=1e-9)


def test_a_fit_that_raised_is_interrupted_and_the_next_one_goes_on(tmp_path: Path) -> None:
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                raise ZeroDivisionError

    rotation = LayerRotation(tmp_path / "run", every=1)
    network = model()
    with pytest.raises(ZeroDivisionError):
        fitted(network, keras.optimizers.SGD(0.1), rotation, Stops(), epochs=1)
    network.fit(*data(), batch_size=16, epochs=1, verbose=0, callbacks=[rotation])
    run = gyroscope.load(tmp_path / "run")
    assert [attempt.ended is None for attempt in run.attempts] == [True, False]
    assert run.steps.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_patterns_choose_layers(tmp_path: Path) -> None:
    rotation = LayerRotation(tmp_path / "run", layers="head/*")
    network = fitted(model(), Layca(keras.optimizers.SGD(0.1), 0.1, layers=["head/kernel"]), rotation)
    assert rotation.run.layers == ("head/kernel", "head/bias")
    assert network.optimizer.radius.shape == (1,)


def test_biases_of_attention_are_no_layers(tmp_path: Path) -> None:
    x = keras.Input((5, 6))
    network = keras.Model(x, keras.layers.MultiHeadAttention(2, 3, name="attention")(x, x))
    network.compile(Layca(keras.optimizers.SGD(0.1), 0.1), loss="mse")
    rotation = LayerRotation(tmp_path / "run")
    inputs = np.random.default_rng(0).normal(size=(8, 5, 6)).astype(np.float32)
    network.fit(inputs, inputs, verbose=0, callbacks=[rotation])
    parts = ("query", "key", "value", "attention_output")
    assert rotation.run.layers == tuple(f"attention/{part}/kernel" for part in parts)


def test_training_goes_on_without_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    rotation = LayerRotation(tmp_path)
    fitted(model(), keras.optimizers.SGD(0.1), rotation)
    assert "training continues" in caplog.text
    with pytest.raises(StoreError):
        _ = rotation.run


@pytest.mark.parametrize("every", [None, 1])
def test_a_fit_of_other_layers_trains_and_leaves_the_run_as_it_was(
    every: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rotation, network = LayerRotation(tmp_path / "run", every), model()
    network.get_layer("hidden").trainable = False
    fitted(network, keras.optimizers.SGD(0.1), rotation)
    network.get_layer("hidden").trainable = True
    before = kernels(network)
    fitted(network, keras.optimizers.SGD(0.1), rotation)
    assert not np.array_equal(kernels(network)[0], before[0])
    assert "training continues" in caplog.text
    with pytest.raises(StoreError, match="a run of other layers"):
        _ = rotation.run
    assert gyroscope.load(tmp_path / "run").steps[-1] == 8


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="steps_per_execution must be 1 with torch")
@pytest.mark.parametrize(("every", "steps"), [(None, [0, 8, 16]), (1, [0, 3, 6, 8, 11, 14, 16])])
def test_an_execution_of_fewer_batches_is_counted_as_so_many(
    every: int | None, steps: list[int], tmp_path: Path
) -> None:
    rotation, network = LayerRotation(tmp_path / "run", every), model()
    network.compile("sgd", loss="mse", steps_per_execution=3)
    network.fit(*data(), batch_size=8, epochs=2, verbose=0, callbacks=[rotation])
    assert rotation.run.steps.tolist() == steps
    network.compile("sgd", loss="mse", steps_per_execution=3)  # another optimizer, which begins to count at 0
    network.fit(*data(), batch_size=8, epochs=1, verbose=0, callbacks=[rotation])
    run = rotation.run
    assert run.steps[-1] == run.scalars["loss"].steps[-1] == 24


def test_a_run_exists_once_a_step_was_measured(tmp_path: Path) -> None:
    with pytest.raises(MonitorError, match="once a step has been measured"):
        _ = LayerRotation(tmp_path / "run").run


SGD = keras.optimizers.SGD


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layca("sgd"), "`optimizer` must be a keras.optimizers.Optimizer, got a str"),
        (lambda: Layca(Layca(SGD(0.1))), "steers already"),
        (lambda: Layca(keras.optimizers.LossScaleOptimizer(SGD(0.1))), "goes around Layca"),
        (lambda: Layca(SGD(0.1, use_ema=True)), "`use_ema` of the inner optimizer must be False"),
        (lambda: Layca(SGD(0.1), clipnorm=1.0), "`clipnorm` must be given to the inner optimizer"),
        (lambda: Layca(SGD(0.1), -1.0), "`learning_rate` must be a finite number ≥ 0"),
        (lambda: Layca(SGD(0.1), alpha=2), "`alpha` must be"),
        (lambda: Layca(SGD(0.1), others="free"), "`others` must be one of 'inner', 'frozen'"),
        (lambda: Layca(SGD(0.1), project="no"), "`project` must be True or False"),
        (lambda: Layca(SGD(0.1), layers=3), "`layers` must be a pattern"),
        (lambda: Layca(SGD(0.1), layers="conv*").build(variables(arrays(0))), "`layers` must match at least one"),
        (lambda: Layca(SGD(0.1)).build(variables([np.ones(3)])), "`variables` must have at least one layer"),
        (lambda: Layca(SGD(0.1)).apply([ops.ones((2, 2))]), "`trainable_variables` must be given"),
        (lambda: Layca(SGD(0.1)).build(bound()), "must have no constraint"),
        (lambda: Layca(built()), "`optimizer` must be new"),
        (lambda: LayerRotation(5), "`run` must be the path of a folder"),
        (lambda: LayerRotation("run", every=0), "`every` must be a whole number of batches ≥ 1"),
        (lambda: LayerRotation("run", layers=[]), "`layers` must be a pattern"),
        (lambda: LayerRotation("run", meta=3), "`meta` must be a dict"),
    ],
)
def test_invalid_arguments_say_what_is_accepted(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((ControlError, MonitorError, LayerError), match=words):
        make()


def bound() -> list[Any]:
    layer = keras.layers.Dense(3, kernel_constraint="unit_norm")
    layer.build((None, 4))
    return [layer.kernel]


def built() -> Any:
    optimizer = SGD(0.1)
    optimizer.build(variables(arrays(0)))
    return optimizer


@pytest.mark.parametrize("rate", [1.0, 1e-10, 1e-22])
def test_the_rate_of_the_inner_optimizer_turns_no_layer_however_small_it_is(rate: float) -> None:
    found = stepped(Layca(keras.optimizers.SGD(rate), 0.05), arrays(0), [arrays(1)])
    expected = stepped(Layca(keras.optimizers.SGD(1.0), 0.05), arrays(0), [arrays(1)])
    assert distance([found[0], found[2]], [expected[0], expected[2]]) < 1e-6


def test_the_optimizer_inside_that_of_mixed_precision_is_recorded(tmp_path: Path) -> None:
    found = {}
    for kind in ("plain", "scaled"):
        inner = keras.optimizers.AdamW(1e-3, weight_decay=0.1, gradient_accumulation_steps=2)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="one")])
        model.compile(keras.optimizers.LossScaleOptimizer(inner) if kind == "scaled" else inner, "mse")
        rotation = LayerRotation(tmp_path / kind, every=1)
        model.fit(np.ones((16, 4)), np.ones((16, 3)), batch_size=4, verbose=0, callbacks=[rotation])
        run = rotation.run
        found[kind] = run.meta["optimizers"], run.series("weight_decay").tolist(), run.steps.tolist()
    assert found["scaled"] == found["plain"]
    assert found["plain"][1][-1] == pytest.approx([0.1])


def test_a_callback_measures_another_model_from_its_own_start(tmp_path: Path) -> None:
    rotation = LayerRotation(tmp_path / "run")
    for seed in (0, 1):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="one")])
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        model.fit(np.ones((16, 4)), np.ones((16, 3)), batch_size=4, verbose=0, callbacks=[rotation])
    assert rotation.run.steps.tolist() == [0, 4]
    assert rotation.run.series("rotation").max() < 0.01
    assert len(rotation.run.attempts) == 2
