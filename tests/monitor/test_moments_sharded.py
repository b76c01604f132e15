"""Two ranks on a CPU: percentiles of whole tensors from what each rank holds of them."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import forked
from gyroscope.monitor.detail import moment_percentiles


class State:
    """An optimizer's state and nothing else."""

    def __init__(self, parameters: list[Tensor], moments: list[Tensor]) -> None:
        self.state = {p: {"exp_avg_sq": v} for p, v in zip(parameters, moments, strict=True)}


def shards_give_what_the_whole_gives() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2,))
    draw = torch.Generator().manual_seed(0)
    cases = [((40, 30), Shard(0)), ((7, 5), Shard(0)), ((1, 9), Shard(0)), ((6, 11), Shard(1)), ((4, 4), Replicate())]
    whole = [torch.randn(shape, generator=draw).square() for shape, _ in cases] + [torch.rand(3, 3, generator=draw)]
    split = [distribute_tensor(v.clone(), mesh, [how]) for v, (_, how) in zip(whole, cases, strict=False)] + [whole[-1]]
    for most in (10, 100, 65536):
        expected = moment_percentiles(State(whole, whole), whole, most=most)
        assert moment_percentiles(State(split, split), split, most=most).equal(expected), most


def shards_of_shards_give_what_the_whole_gives() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = torch.rand(9, 5, generator=torch.Generator().manual_seed(0))
    expected = moment_percentiles(State([whole], [whole]), [whole], most=20)
    for shape in ((2, 1), (1, 2)):
        mesh = dist.init_device_mesh("cpu", shape)
        for how in ([Shard(0), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Shard(0)]):
            split = distribute_tensor(whole.clone(), mesh, how)
            assert moment_percentiles(State([split], [split]), [split], most=20).equal(expected)


def an_fsdp_model_gives_what_the_model_gives() -> None:
    from torch.distributed.fsdp import fully_shard

    def stepped(model: nn.Module) -> Tensor | None:
        optimizer = torch.optim.Adam(model.parameters())
        for seed in range(3):
            torch.manual_seed(seed)
            model(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return moment_percentiles(optimizer, list(model.parameters()), most=16)

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))

    sharded = net()
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (2,)))
    torch.testing.assert_close(stepped(sharded), stepped(net()), rtol=1e-5, atol=0)


CLAIMS: list[Callable[[], None]] = [
    shards_give_what_the_whole_gives,
    shards_of_shards_give_what_the_whole_gives,
    an_fsdp_model_gives_what_the_model_gives,
]


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    outcome = {}
    for claim in CLAIMS:
        try:
            claim()
            outcome[claim.__name__] = "holds"
        except Exception:
            outcome[claim.__name__] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps(outcome))
    dist.barrier()
    dist.destroy_process_group()
    # One exit in ten or so of the interpreter aborts inside torch once the group is gone, so it is skipped.
    os._exit(0)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("ranks")
    forked.start(_rank, str(folder), processes=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("claim", [claim.__name__ for claim in CLAIMS])
def test_on_both_ranks(claim: str, outcomes: list[dict[str, str]]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome[claim] == "holds", f"rank {rank}:\n{outcome[claim]}"
