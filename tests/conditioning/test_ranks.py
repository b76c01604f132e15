"""Two ranks on a CPU: the conditioning of a model whose batch is spread over them is that on one process."""

from __future__ import annotations

import pytest

import two_ranks
from conditioning.rank_claims import CLAIMS, rank


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    return two_ranks.outcome(rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("claim", [claim.__name__ for claim in CLAIMS])
def test_two_ranks_agree_that(claim: str, outcome: tuple[list[str], str]) -> None:
    two_ranks.assert_held(claim, CLAIMS, outcome)
