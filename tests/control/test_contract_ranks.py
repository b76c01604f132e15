"""Two ranks on a CPU: data parallel and FSDP2 runs are the run on one process, and checkpoints continue them."""

from __future__ import annotations

import pytest
from contract_ranks import CLAIMS, rank

import two_ranks


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    return two_ranks.outcome(rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("claim", [claim.__name__ for claim in CLAIMS])
def test_two_ranks_agree_that(claim: str, outcome: tuple[list[str], str]) -> None:
    two_ranks.assert_held(claim, CLAIMS, outcome)
