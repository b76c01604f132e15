"""Two ranks on a CPU: what a monitor records of data parallel and FSDP2 runs is what it records on one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.multiprocessing as mp
from watch_ranks import CLAIMS, rank

NAMES = [claim.__name__ for claim in CLAIMS]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """The claims that hold, and what the first that does not says: starting ranks costs more than all claims."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    error = ""
    try:
        mp.spawn(rank, args=(str(folder),), nprocs=2)
    except Exception as raised:
        error = str(raised)
    done = folder / "done"
    return done.read_text().split() if done.exists() else [], error


@pytest.mark.parametrize("claim", NAMES)
def test_two_ranks_agree_that(claim: str, outcome: tuple[list[str], str]) -> None:
    held, error = outcome
    if claim not in held and NAMES.index(claim) > len(held):
        pytest.fail(f"not reached, because {NAMES[len(held)]} failed before")
    assert claim in held, error
