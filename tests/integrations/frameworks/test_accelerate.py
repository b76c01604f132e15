"""Trainings with the installed Accelerate: its optimizer, its logs, its checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.tracking import GeneralTracker
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper, DummyOptim
from torch import nn
from trainers import reset

import gyroscope
from gyroscope import Layca
from gyroscope.errors import ControlError, MonitorError
from gyroscope.integrations.accelerate import GyroscopeTracker
from monitor.watched import check, copies_of, inputs, mlp
from oracles.monitor import Copies

ALL: dict[str, Any] = {"budget": None}  # every step is measured


@pytest.fixture(autouse=True)
def _fresh() -> None:
    reset()


def accelerator(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(machine: Accelerator, model: nn.Module, optimizer: Any, count: int, copies: Copies | None = None) -> None:
    """Steps on accumulated batches, clipped, with the calls that Accelerate's documents ask for."""
    for x in inputs(count):
        with machine.accumulate(model):
            machine.backward((model(x) - 1.0).square().mean())
            if machine.sync_gradients:
                machine.clip_grad_norm_(model.parameters(), 0.5)
                if copies is not None:
                    copies.keep_gradients()
            optimizer.step()
            if machine.sync_gradients and copies is not None:
                copies.keep_step(optimizer)
            optimizer.zero_grad()


@pytest.mark.parametrize("prepared", [False, True], ids=["before prepare", "after prepare"])
def test_the_numbers_are_those_of_the_oracle(tmp_path: Path, prepared: bool) -> None:
    machine, model = accelerator(gradient_accumulation_steps=2), mlp()
    optimizer, copies = sgd(model), copies_of(model)
    if not prepared:
        monitor = gyroscope.watch(model, optimizer, tmp_path / "run", **ALL)
    model, optimizer = machine.prepare(model, optimizer)
    assert isinstance(optimizer, AcceleratedOptimizer)
    if prepared:
        monitor = gyroscope.watch(model, optimizer, tmp_path / "run", **ALL)
    train(machine, model, optimizer, 8, copies)
    monitor.close()
    check(tmp_path / "run", copies, range(5), rtol=1e-5)


@pytest.mark.parametrize("prepared", [False, True], ids=["before prepare", "after prepare"])
def test_layca_steps_once_for_each_accumulated_batch(tmp_path: Path, prepared: bool) -> None:
    machine, model = accelerator(gradient_accumulation_steps=2), mlp()
    if prepared:
        model, optimizer = machine.prepare(model, sgd(model))
        optimizer = Layca(optimizer, model)
    else:
        model, optimizer = machine.prepare(model, Layca(sgd(model), model))
    copies = copies_of(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run", **ALL) as monitor:
        train(machine, model, optimizer, 8, copies)
    assert monitor.steps == 4
    check(tmp_path / "run", copies, range(5), leave_out=("effective_lr",), rtol=1e-5)
    np.testing.assert_allclose(gyroscope.load(tmp_path / "run").series("rate")[1:], np.arctan(0.05), rtol=1e-4)


def test_layca_refuses_a_prepared_optimizer_that_unscales_gradients() -> None:
    accelerator()
    model = mlp()
    prepared = AcceleratedOptimizer(sgd(model), scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ControlError, match=r"must not be prepared yet .* Try accelerator\.prepare\(Layca\("):
        Layca(prepared, model)


class DeepSpeedOptimizer:
    """Has the name of the base class of DeepSpeed's optimizers, which are not torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        flat = torch.cat([p.detach().flatten() for group in optimizer.param_groups for p in group["params"]])
        self.param_groups = [{**optimizer.param_groups[0], "params": [flat]}]


def test_deepspeed_zero_is_refused(tmp_path: Path) -> None:
    accelerator()
    model = mlp()
    for optimizer in (zero := DeepSpeedOptimizer(sgd(model)), DeepSpeedOptimizerWrapper(zero)):
        with pytest.raises(MonitorError, match=r"got DeepSpeed's DeepSpeedOptimizer.* Use FSDP2"):
            gyroscope.watch(model, optimizer, tmp_path / "run")
        with pytest.raises(ControlError, match=r"got DeepSpeed's DeepSpeedOptimizer.* Use FSDP2"):
            Layca(optimizer, model)
    assert not (tmp_path / "run").exists()


def test_optimizers_that_deepspeed_leaves_as_they_are_can_be_watched(tmp_path: Path) -> None:
    accelerator()
    model, copies = (made := mlp()), copies_of(made)
    inner = sgd(model)
    with gyroscope.watch(model, DeepSpeedOptimizerWrapper(inner), tmp_path / "run", **ALL):
        for x in inputs(3):
            model(x).square().mean().backward()
            copies.keep_gradients()
            inner.step()  # DeepSpeed's engine does
            copies.keep_step(inner)
            inner.zero_grad()
    check(tmp_path / "run", copies, range(4), rtol=1e-5)


def test_what_is_no_optimizer_is_refused(tmp_path: Path) -> None:
    model = mlp()
    with pytest.raises(MonitorError, match=r"must be a torch\.optim\.Optimizer or a list of them, got a DummyOptim"):
        gyroscope.watch(model, DummyOptim(model.parameters()), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_run_holds_what_the_accelerator_logs(tmp_path: Path) -> None:
    tracker = GyroscopeTracker(tmp_path / "run", meta={"mine": 1}, **ALL)
    assert isinstance(tracker, GeneralTracker)
    machine, model = accelerator(log_with=tracker), mlp()
    model, optimizer = machine.prepare(model, sgd(model))
    machine.init_trackers("first", config={"lr": 0.05, "betas": (0.9, 0.99), "limit": float("inf")})
    machine.log({"accuracy": 0.1})  # waits for the run
    monitor = tracker.watch(model, optimizer)
    assert machine.get_tracker("gyroscope") is tracker
    assert machine.get_tracker("gyroscope", unwrap=True) is monitor
    train(machine, model, optimizer, 3)
    machine.log({"loss": torch.tensor(0.5), "accuracy": np.float64(0.7), "stage": "one", "done": True}, step=100)
    machine.log({"error": {"train": 1, "test": 2.0}})
    machine.end_training()
    machine.log({"loss": 9.0})  # after the end
    run = gyroscope.load(tmp_path / "run")
    assert run.state == "ended"
    found = {name: (one.steps.tolist(), one.values.tolist()) for name, one in run.scalars.items()}
    assert found == {
        "accuracy": ([0, 3], [0.1, 0.7]), "loss": ([3], [0.5]), "error/train": ([3], [1.0]), "error/test": ([3], [2.0])
    }  # fmt: skip
    assert [event.text for event in run.events if event.kind == "note"] == ["stage: one"]
    assert run.meta["config"] == {"lr": 0.05, "betas": "(0.9, 0.99)", "limit": "inf"}
    assert run.meta["mine"] == 1


def test_a_tracker_watches_one_training_at_a_time(tmp_path: Path) -> None:
    tracker, model = GyroscopeTracker(tmp_path / "run", **ALL), mlp()
    optimizer = sgd(model)
    tracker.watch(model, optimizer)
    with pytest.raises(MonitorError, match="one training at a time"):
        tracker.watch(model, optimizer)
    train(accelerator(), model, optimizer, 2)
    tracker.finish()
    tracker.watch(model, optimizer)
    train(accelerator(), model, optimizer, 2)
    tracker.finish()
    assert gyroscope.load(tmp_path / "run").steps.tolist() == [0, 1, 2, 3, 4]


def test_a_tracker_that_never_watches_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = GyroscopeTracker(tmp_path / "run")
    machine = accelerator(log_with=tracker)
    machine.init_trackers("first")
    machine.log({"loss": 1.0})
    with caplog.at_level(logging.WARNING, "gyroscope"):
        machine.end_training()
    assert "call tracker.watch(model, optimizer) before training" in caplog.text
    assert not (tmp_path / "run").exists()
    with pytest.raises(TypeError, match="evry"):
        GyroscopeTracker(tmp_path / "run", evry=10)


def test_a_configuration_that_comes_after_watch_is_a_note(tmp_path: Path) -> None:
    tracker, model = GyroscopeTracker(tmp_path / "run"), mlp()
    machine = accelerator(log_with=tracker)
    tracker.watch(model, sgd(model))
    machine.init_trackers("first", config={"lr": 0.05})
    machine.end_training()
    run = gyroscope.load(tmp_path / "run")
    assert [event.text for event in run.events if event.kind == "note"] == ["config: {'lr': 0.05}"]


def test_a_monitor_is_saved_and_loaded_with_the_state_of_the_accelerator(tmp_path: Path) -> None:
    def begin(folder: Path, seed: int) -> tuple[Any, ...]:
        machine, model = accelerator(), mlp(seed)
        model, optimizer = machine.prepare(model, sgd(model))
        monitor = gyroscope.watch(model, optimizer, folder, every=2, **ALL)
        machine.register_for_checkpointing(monitor)
        return machine, model, optimizer, monitor

    runs = []
    for folder in (tmp_path / "straight", tmp_path / "run"):
        machine, model, optimizer, monitor = begin(folder, 0)
        train(machine, model, optimizer, 3)
        machine.save_state(str(tmp_path / "state"))
        if folder.name == "run":
            monitor.close()
            machine, model, optimizer, monitor = begin(folder, 7)
            machine.load_state(str(tmp_path / "state"))
        train(machine, model, optimizer, 3)
        monitor.close()
        runs.append(gyroscope.load(folder))
    straight, resumed = runs
    assert [one.start_step for one in resumed.attempts] == [0, 3]
    shared = sorted(set(straight.steps.tolist()) & set(resumed.steps.tolist()))
    assert {0, 2, 4, 6} <= set(shared)
    np.testing.assert_array_equal(
        straight.series("rotation", steps=shared), resumed.series("rotation", steps=shared)
    )  # fmt: skip
