"""Claims about the Trainer and Accelerate that two ranks check together; test_trainer_ranks starts the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import gyroscope
import two_ranks
from monitor.watched import inputs, mlp

Claim = Callable[[Path], None]
STEPS = 4
# Not Adam, which turns rounding noise in gradients, which ranks add up in another order, into weights.
SGD: dict[str, Any] = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})}
SAVED: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2}
CLOSE = 1e-5


def train(folder: Path, *, rows: int, resume: bool = False, **options: Any) -> Any:
    """Train on `rows` sentences per rank and step, and return the Trainer and its callback."""
    from trainers import trainer

    from gyroscope.integrations.transformers import GyroscopeCallback

    watching = GyroscopeCallback(folder / "run", budget=None, activations=False)
    training = trainer(folder / "out", watching, per_device_train_batch_size=rows, **SGD | SAVED | options)
    training.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2") if resume else None)
    if dist.is_initialized():
        dist.barrier()  # the first rank has closed the run
    return training, watching


def alone(folder: Path, **options: Any) -> None:
    """The same in one process, for the ranks to compare with."""
    train(folder, rows=4, **options)


def layca() -> dict[str, Any]:
    from trainers import Steered

    return {"optimizer_cls_and_kwargs": (Steered, {"rate": 0.02})}


def assert_same(run: gyroscope.Run, other: gyroscope.Run) -> None:
    assert run.layers == other.layers
    assert run.steps.tolist() == other.steps.tolist() == list(range(STEPS + 1))
    for name in ("rotation", "rate", "weight_norm", "gradient_norm", "update_norm", "lr"):
        one, two = run.series(name), other.series(name)
        np.testing.assert_allclose(one, two, rtol=CLOSE, atol=CLOSE * np.nanmax(abs(two)), err_msg=name)


def sharding(patch: pytest.MonkeyPatch) -> None:
    """Let Accelerate shard on a CPU, which it only lacks in a list of devices."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    original = AcceleratorState.__init__

    def begin(self: Any, *given: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        original(self, *given, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    patch.setattr(AcceleratorState, "__init__", begin)


FSDP2: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}


def data_parallel_trainings_record_what_one_process_does(folder: Path) -> None:
    training, watching = train(folder, rows=2)
    assert type(training.model_wrapped).__name__ == "DistributedDataParallel"
    assert_same(watching.run, gyroscope.load(folder.parent / "alone" / "run"))


def data_parallel_trainings_are_resumed(folder: Path) -> None:
    before = folder.parent / "data_parallel_trainings_record_what_one_process_does"
    _, watching = train(before, rows=2, resume=True)
    assert [one.start_step for one in watching.run.attempts] == [0, 2]
    assert_same(watching.run, gyroscope.load(folder.parent / "alone" / "run"))


def sharded_trainings_record_what_one_process_does_and_are_resumed(folder: Path) -> None:
    from torch.distributed.tensor import DTensor

    with pytest.MonkeyPatch.context() as patch:
        sharding(patch)
        for resume in (False, True):
            training, watching = train(folder, rows=2, resume=resume, **FSDP2)
            assert all(isinstance(p, DTensor) for p in training.model.parameters())
            assert_same(watching.run, gyroscope.load(folder.parent / "alone" / "run"))
    assert [one.start_step for one in watching.run.attempts] == [0, 2]


def sharded_layers_turn_by_the_rate_of_layca(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        sharding(patch)
        _, watching = train(folder, rows=2, **FSDP2, **layca())
    run = watching.run
    np.testing.assert_allclose(run.series("rate")[1:], np.arctan(run.series("lr")[1:]), rtol=1e-4)
    assert_same(run, gyroscope.load(folder.parent / "steered" / "run"))


def accelerated(**options: Any) -> tuple[Any, torch.nn.Module, Any]:
    """A sharding Accelerator, a model and its optimizer."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    machine, model = Accelerator(cpu=True, fsdp_plugin=plugin, **options), mlp()
    return machine, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def steps(machine: Any, model: torch.nn.Module, optimizer: Any) -> None:
    for x in inputs(STEPS):
        optimizer.zero_grad()
        machine.backward((model(x.chunk(2)[dist.get_rank()]) - 1.0).square().mean())
        optimizer.step()


def a_tracker_records_what_a_sharding_accelerator_logs(folder: Path) -> None:
    from gyroscope.integrations.accelerate import GyroscopeTracker

    tracker = GyroscopeTracker(folder / "run", budget=None, activations=False)
    with pytest.MonkeyPatch.context() as patch:
        sharding(patch)
        machine, model, optimizer = accelerated(log_with=tracker)
        model, optimizer = machine.prepare(model, optimizer)
        machine.init_trackers("first")
        tracker.watch(model, optimizer)
        steps(machine, model, optimizer)
        machine.log({"loss": 0.5})
        tracker.finish()  # as end_training does, which then ends the process group
    dist.barrier()
    run = gyroscope.load(folder / "run")
    assert run.scalars["loss"].steps.tolist() == [STEPS]
    reference = mlp()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gyroscope.monitor.resume.rank", lambda: 0)  # both ranks record a run of their own
        with gyroscope.watch(reference, optimizer, folder / f"alone-{dist.get_rank()}", budget=None, activations=False):
            for x in inputs(STEPS):
                optimizer.zero_grad()
                (reference(x) - 1.0).square().mean().backward()
                optimizer.step()
    assert_same(run, gyroscope.load(folder / f"alone-{dist.get_rank()}"))


def a_model_that_is_sharded_after_watch_is_refused_and_trains(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        sharding(patch)
        machine, model, optimizer = accelerated()
        monitor = gyroscope.watch(model, optimizer, folder / "run")
        model, optimizer = machine.prepare(model, optimizer)
        before = [p.to_local().clone() for p in model.parameters()]
        steps(machine, model, optimizer)
        monitor.close()
    assert not any(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True) if a.numel())
    if dist.get_rank() == 0:
        assert "Call watch after fully_shard, or after accelerator.prepare" in str(monitor.error)


CLAIMS: list[Claim] = [
    data_parallel_trainings_record_what_one_process_does,
    data_parallel_trainings_are_resumed,
    sharded_trainings_record_what_one_process_does_and_are_resumed,
    sharded_layers_turn_by_the_rate_of_layca,
    a_tracker_records_what_a_sharding_accelerator_logs,
    a_model_that_is_sharded_after_watch_is_refused_and_trains,
]


def rank(number: int, folder: str) -> None:
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    two_ranks.run(CLAIMS, number, folder)
