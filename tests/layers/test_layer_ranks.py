"""Two ranks on a CPU: what a rank holds is a part, what it reports is the whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import forked
from gyroscope.errors import LayerError
from gyroscope.layers.layer import layers, zero_norm


def _zero_norms_of_shards() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 2), nn.Linear(2, 2))
    nn.init.ones_(model[0].weight)  # one row: the shard of rank 1 is empty
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[2].weight).data[1, 0] = 1  # the shard of rank 0 is zero
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    found = layers(model, granularity="row")
    assert [layer.segments for layer in found] == [1, 2, 2]
    assert [layer.name for layer in zero_norm(found)] == ["1.weight"]


def _refusals_of_fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    for original in (True, False):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        sharded = FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
        with pytest.raises(LayerError, match="is flattened"):
            layers(sharded)


def _rank(rank: int, claim: Callable[[], None], store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    claim()
    dist.destroy_process_group()
    # The claim holds and the group is gone, yet one exit in ten or so of the interpreter aborts inside torch
    # ("terminate called without an active exception"), so it is skipped.
    os._exit(0)


@pytest.mark.parametrize("claim", [_zero_norms_of_shards, _refusals_of_fsdp1])
def test_all_ranks_agree(claim: Callable[[], None], tmp_path: Path) -> None:
    forked.start(_rank, claim, str(tmp_path / "store"), processes=2)
