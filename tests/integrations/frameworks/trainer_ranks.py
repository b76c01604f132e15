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

Claim = Callable[[Path], None]
STEPS = 4
# Plain SGD, because Adam turns rounding noise in gradients, which ranks add up in another order, into weights.
PLAIN: dict[str, Any] = {"max_steps": STEPS, "optim": "sgd", "learning_rate": 0.1}
SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
CLOSE = 1e-5


def train(folder: Path, *, rows: int, resume: bool = False, **options: Any) -> Any:
    """Train on `rows` sentences per rank and step, and return the Trainer and its callback."""
    from trainers import trainer

    from gyroscope.integrations.transformers import GyroscopeCallback

    watching = GyroscopeCallback(folder / "run", budget=None, activations=False)
    training = trainer(folder / "out", watching, per_device_train_batch_size=rows, **PLAIN | SAVED | options)
    training.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2") if resume else None)
    if dist.is_initialized():
        dist.barrier()  # the first rank has closed the run
    return training, watching


def alone(folder: Path, **options: Any) -> None:
    """The same in one process, for the ranks to compare with."""
    train(folder, rows=4, **options)


def steered(model: torch.nn.Module, rate: float) -> gyroscope.Layca:
    return gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), model)


LAYCA: dict[str, Any] = {"optimizer_cls_and_kwargs": (lambda: steered, {"rate": 0.02})}


def assert_same(run: gyroscope.Run, other: gyroscope.Run) -> None:
    assert run.layers == other.layers
    steps = run.steps.tolist()
    assert steps == other.steps.tolist() == list(range(STEPS + 1)), (steps, run.attempts, run.all_events)
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
        _, watching = train(folder, rows=2, optim="adamw_torch", **FSDP2, **LAYCA)
    run = watching.run
    np.testing.assert_allclose(run.series("rate")[1:], np.arctan(run.series("lr")[1:]), rtol=1e-4)
    assert_same(run, gyroscope.load(folder.parent / "steered" / "run"))


CLAIMS: list[Claim] = [
    data_parallel_trainings_record_what_one_process_does,
    data_parallel_trainings_are_resumed,
    sharded_trainings_record_what_one_process_does_and_are_resumed,
    sharded_layers_turn_by_the_rate_of_layca,
]


def rank(number: int, folder: str) -> None:
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    two_ranks.run(CLAIMS, number, folder)
