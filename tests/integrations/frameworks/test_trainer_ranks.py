"""Two ranks on a CPU under the Trainer: DDP and FSDP2 record what one process does, and resume."""

from __future__ import annotations

import pytest
from trainer_ranks import CLAIMS, alone, layca, rank

import two_ranks


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    folder = tmp_path_factory.mktemp("ranks")
    alone(folder / "alone")
    alone(folder / "steered", **layca())
    return two_ranks.outcome(rank, folder)


@pytest.mark.parametrize("claim", [claim.__name__ for claim in CLAIMS])
def test_two_ranks_agree_that(claim: str, outcome: tuple[list[str], str]) -> None:
    two_ranks.assert_held(claim, CLAIMS, outcome)
