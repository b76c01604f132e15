"""One trial on several processes that torchrun started: `torchrun --nproc-per-node 2 -m gyroscope.lab.ranks digits`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist

from gyroscope.lab.archive import Archive
from gyroscope.lab.errors import LabError
from gyroscope.lab.recipe import CONTROLS, OPTIMIZERS, Recipe
from gyroscope.lab.result import Result
from gyroscope.lab.run_one import Note, loaded
from gyroscope.lab.spread import from_first
from gyroscope.lab.tasks import task
from gyroscope.lab.training import Parallel, train
from gyroscope.lab.trial import Trial


def started_by_torchrun() -> bool:
    """Whether this process is one of several that torchrun started.

    >>> started_by_torchrun()
    False
    """
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def process_group(*, cuda: bool = False) -> Iterator[str]:
    """The processes that torchrun started, as a group for as long as this lasts; gives the device of this one.

    Args:
        cuda: whether each has a GPU of its own, and NCCL between them; else they are on CPUs, with Gloo between them.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if cuda and local >= torch.cuda.device_count():
        raise LabError(
            f"process {local} of this machine has no GPU of its own; torch sees {torch.cuda.device_count()}: start as "
            "many (torchrun --nproc-per-node), or train on CPUs"
        )
    if "MASTER_ADDR" not in os.environ:
        raise LabError("no process group can be made: start with torchrun --nproc-per-node 2 -m gyroscope.lab.ranks")
    device = f"cuda:{local}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=torch.device(device) if cuda else None)
    try:
        yield device
    finally:
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

    Rank 0 alone looks into the archive and writes there; the others may be on machines that do not see it. What is
    copied is trained first. How ranks share a training, and where it differs from that of one: `lab.spread.Spread`.

    Args:
        trial: what to train.
        archive: where rank 0 keeps results.
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
        reason = str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {error}"
        raise LabError(f"{trial.recipe.name}, seed {trial.seed}: {reason}") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a task on the processes that torchrun started; rank 0 says what comes of it."""
    parser = argparse.ArgumentParser(prog="gyroscope.lab.ranks", description=__doc__)
    parser.add_argument("task", help="what to learn, by its name in gyroscope.lab.tasks")
    parser.add_argument("--parallel", choices=get_args(Parallel), default="ddp", help="replicas, or shards")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="sgd")
    parser.add_argument("--control", choices=(*CONTROLS, "none"), default="layca")
    parser.add_argument("--rate", type=float, default=3.0**-3)
    parser.add_argument("--epochs", type=int, help="the task's, unless given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, help="folder of the datasets; GYROSCOPE_DATA, unless given")
    parser.add_argument("--archive", type=Path, default=Path("runs/lab"), help="folder of the results")
    given = parser.parse_args(arguments)
    try:
        control = None if given.control == "none" else given.control
        recipe = Recipe(f"{control or given.optimizer} {given.rate:g}", given.rate, given.optimizer, control)
        chosen = task(given.task) if given.epochs is None else task(given.task).lasting(given.epochs)
        trial = Trial(chosen, recipe, given.seed, precision="float32" if given.device == "cpu" else "bf16")
        archive = Archive(given.archive)
        with process_group(cuda=given.device == "cuda") as device:
            result = run_on_ranks(trial, archive, given.data, parallel=given.parallel, device=device)
            if dist.get_rank() == 0:
                said = f"train {100 * result.train_accuracy:.2f} %, test {100 * result.test_accuracy:.2f} %"
                print(f"{chosen.name}, {recipe.name}, on {dist.get_world_size()} processes: {said}")
                print(f"The run is {archive.folder(trial)}")
    except LabError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
