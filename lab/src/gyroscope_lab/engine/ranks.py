"""One trial on several processes: `torchrun --nproc-per-node 2 -m gyroscope_lab train digits-mlp`."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from gyroscope_lab.engine.run_one import Note, in_trial, loaded
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.spread import from_first
from gyroscope_lab.training.training import Parallel, train
from gyroscope_lab.training.trial import Trial


def started_by_torchrun() -> bool:
    """Return whether this process is one of several that torchrun started.

    >>> started_by_torchrun()
    False
    """
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def process_group(*, cuda: bool = False) -> Iterator[str]:
    """Join the processes that torchrun started into a group within this context; yield the device of this one.

    Args:
        cuda: True for one GPU per process, connected by NCCL; False for CPUs, connected by Gloo.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if cuda and local >= torch.cuda.device_count():
        raise LabError(
            f"Process {local} of this machine has no GPU of its own: torch sees {torch.cuda.device_count()}. Start at "
            "most that many processes (torchrun --nproc-per-node), or train on CPUs."
        )
    if "MASTER_ADDR" not in os.environ:
        raise LabError("There is no process group. Start with torchrun --nproc-per-node 2 -m gyroscope_lab train.")
    device = f"cuda:{local}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=torch.device(device) if cuda else None)
    try:
        yield device
    finally:
        # An object that still refers to the group, such as a model in a reference cycle, would end its threads after
        # the interpreter, which sometimes aborts the process.
        gc.collect()
        dist.destroy_process_group()


def run_on_ranks(
    trial: Trial,
    archive: Archive,
    data: Path | None = None,
    tell: Callable[[Note], None] = lambda note: None,
    *,
    parallel: Parallel = "ddp",
    device: str = "cpu",
) -> Result:
    """Return a trial's result on all ranks of the process group, which call this together; see `lab.run_one`.

    Only rank 0 reads and writes the archive; other ranks may be on machines without access to it. The source of copied
    rates is trained first. `lab.spread.Spread` describes how ranks share a training, and where the result differs from
    that of one process.

    Args:
        trial: the trial to train.
        archive: the archive of the results, used by rank 0.
        data: the folder of the datasets, on every machine.
        tell: called on rank 0 at the end of every epoch.
        parallel: "ddp", or "fsdp" for networks that do not fit in the memory of one GPU.
        device: the device of this rank.
    """
    known = from_first(lambda: archive.result(trial))
    if known is not None:
        return known
    if trial.source is not None:
        run_on_ranks(trial.source, archive, data, tell, parallel=parallel, device=device)
    first = dist.get_rank() == 0
    try:
        split = loaded(trial.task.source, data)  # before anything is written
        with ExitStack() as claim:
            folder, known = from_first(lambda: (claim.enter_context(archive.claimed(trial)), archive.result(trial)))
            if known is not None:
                return known
            return train(
                trial,
                split,
                folder=folder,
                device=device,
                rates=from_first(lambda: archive.rates(trial)),
                on_epoch=lambda training: tell(Note.of(training)) if first else None,
                parallel=parallel,
            )
    except Exception as error:
        raise in_trial(trial, error) from error
