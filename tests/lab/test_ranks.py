"""Two ranks on a CPU: a training that they divide is that of one process."""

from __future__ import annotations

import pytest

import two_ranks
from lab.lab_ranks import CLAIMS, rank


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    return two_ranks.outcome(rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("claim", [claim.__name__ for claim in CLAIMS])
def test_two_ranks_agree_that(claim: str, outcome: tuple[list[str], str]) -> None:
    two_ranks.assert_held(claim, CLAIMS, outcome)
