"""Claims that two ranks on a CPU must agree on, in one pair of processes, whose start costs more than the claims."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import forked

Claim = Callable[[Path], None]
Rank = Callable[[int, str], None]


def run(claims: Sequence[Claim], rank: int, folder: str) -> None:
    """Run the claims one after the other; the file `done` names those that hold on both ranks."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for claim in claims:
        place = Path(folder) / claim.__name__
        place.mkdir(exist_ok=True)
        claim(place)
        dist.barrier()
        if rank == 0:
            with (Path(folder) / "done").open("a") as done:
                done.write(f"{claim.__name__}\n")
    dist.destroy_process_group()
    # The claims hold and the group is gone, yet one exit in ten or so of the interpreter aborts inside torch
    # ("terminate called without an active exception"), so it is skipped.
    os._exit(0)


def outcome(rank: Rank, folder: Path) -> tuple[list[str], str]:
    """The claims that hold, and what the first that does not says."""
    error = ""
    try:
        forked.start(rank, str(folder), processes=2)
    except Exception as raised:
        error = str(raised)
    done = folder / "done"
    return done.read_text().split() if done.exists() else [], error


def assert_held(claim: str, claims: Sequence[Claim], found: tuple[list[str], str]) -> None:
    names = [one.__name__ for one in claims]
    held, error = found
    if claim not in held and names.index(claim) > len(held):
        pytest.fail(f"not reached, because {names[len(held)]} failed before")
    assert claim in held, error
