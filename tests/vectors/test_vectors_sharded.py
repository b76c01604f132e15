"""Two ranks on a CPU: inner products of whole tensors from what each rank holds of them."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from vector_layouts import assert_combined, assert_dot, values

import forked
from gyroscope.errors import VectorError
from gyroscope.vectors import combine_, dots

# Two ranks share a layer of this shape in this way; None: an ordinary tensor, the same on both.
LAYERS: dict[str, tuple[tuple[int, ...], int | str | None]] = {
    "even": ((4, 3), 0),
    "uneven": ((5, 3), 0),
    "empty on rank 1": ((1, 3), 0),
    "vector": ((7,), 0),
    "second dimension": ((3, 5), 1),
    "replicated": ((2, 3), "replicate"),
    "plain": ((2, 2), None),
}


def whole(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [values(seed + i, dtype, shape) for i, (shape, _) in enumerate(LAYERS.values())]


def spread(full: list[Tensor]) -> list[Tensor]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2,))
    how = [placement for _, placement in LAYERS.values()]
    return [
        t.clone() if p is None else distribute_tensor(t.clone(), mesh, [Replicate() if p == "replicate" else Shard(p)])
        for t, p in zip(full, how, strict=True)
    ]


def together(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


@contextmanager
def counted() -> Iterator[list[int]]:
    """The calls of all_reduce, as numbers of elements."""
    calls: list[int] = []
    real = dist.all_reduce

    def spy(tensor: Tensor, *args: object, **kwargs: object) -> object:
        calls.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    with patch("torch.distributed.all_reduce", spy):
        yield calls


def assert_same_on_both_ranks(t: Tensor) -> None:
    both = [torch.empty_like(t) for _ in range(2)]
    dist.all_gather(both, t)
    assert both[0].equal(both[1])


def dots_are_those_of_the_full_tensors() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        full_x, full_y = whole(0, dtype), whole(100, dtype)
        x, y = spread(full_x), spread(full_y)
        got = dots({"xx": (x, x), "xy": (x, y), "yy": (y, y)})
        for row, p, q in zip(got, full_x, full_y, strict=True):
            for value, (one, other) in zip(row, [(p, p), (p, q), (q, q)], strict=True):
                assert_dot(value, one, other)
        assert_same_on_both_ranks(got)


def each_kind_of_layer_alone_is_right_too() -> None:
    for full, one in zip(whole(0), spread(whole(0)), strict=True):
        got = dots({"xx": ([one], [one])})
        assert_dot(got, full, full)
        assert_same_on_both_ranks(got)


def one_all_reduce_serves_all_layers() -> None:
    x, y = spread(whole(0)), spread(whole(100))
    with counted() as calls:
        dots({"xx": (x, x), "xy": (x, y), "yy": (y, y)})
    assert calls == [5 * 3]  # five sharded layers, three columns; replicas and plain tensors stay at home


def many_layers_still_take_one_all_reduce() -> None:
    x = [t for i in range(20) for t in spread(whole(i))[:3]]
    with counted() as calls:
        dots({"xx": (x, x)})
    assert calls == [60]


def replicas_and_plain_tensors_take_no_all_reduce() -> None:
    x = spread(whole(0))[-2:]
    with counted() as calls:
        dots({"xx": (x, x)})
    assert calls == []


def replicas_of_shards_are_not_summed() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    full = values(0, shape=(5, 3))
    # Replicate × shard: in the first mesh the two ranks hold shards, in the second replicas of the one shard.
    for mesh_shape, reductions in (((1, 2), 1), ((2, 1), 0)):
        mesh = dist.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
        x = distribute_tensor(full, mesh, [Replicate(), Shard(0)])
        with counted() as calls:
            got = dots({"xx": ([x], [x])})
        assert len(calls) == reductions
        assert_dot(got, full, full)
        assert_same_on_both_ranks(got)


def norms_of_an_fsdp_model_are_those_of_the_model() -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    before = [p.detach().clone() for p in model.parameters()]
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    model(torch.ones(2, 3)).sum().backward()
    w = list(model.parameters())
    g = [p.grad for p in w]
    got = dots({"ww": (w, w), "wg": (w, g), "gg": (g, g)})
    for row, full, grad in zip(got, before, [t.full_tensor() for t in g], strict=True):
        for value, (p, q) in zip(row, [(full, full), (full, grad), (grad, grad)], strict=True):
            assert_dot(value, p, q)


def combine_updates_the_local_shards() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        full_x, full_y = whole(0, dtype), whole(100, dtype)
        x, y = spread(full_x), spread(full_y)
        a, b = torch.linspace(0.5, 1.5, len(x)), torch.linspace(-1, 2, len(x))
        with counted() as calls:
            combine_(x, y, a, b)
        assert calls == []
        for i, new in enumerate(x):
            assert_combined(together(new), full_x[i], full_y[i], a[i].item(), b[i].item())
            assert together(y[i]).equal(full_y[i])


def combine_updates_sharded_parameters_without_a_graph() -> None:
    full = whole(0)[0]
    w = nn.Parameter(spread(whole(0))[0])
    combine_([w], [w.detach().clone()], torch.tensor([0.5]), torch.tensor([1.0]))
    assert w.grad_fn is None
    assert_combined(w.full_tensor(), full, full, 0.5, 1.0)


def a_partial_tensor_is_refused_in_either_place() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = dist.init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(2, 3), mesh, [Partial()], run_check=False)
    replica = DTensor.from_local(torch.ones(2, 3), mesh, [Replicate()], run_check=False)
    plain = torch.ones(2, 3)
    for x, y in [(partial, partial), (partial, replica), (replica, partial), (plain, partial)]:
        with pytest.raises(VectorError, match="Layer 0 has a Partial placement"):
            dots({"xy": ([x], [y])})
        with pytest.raises(VectorError, match="Layer 0 has a Partial placement"):
            combine_([x], [y], torch.tensor([2.0]), torch.tensor([2.0]))
    assert plain.equal(torch.ones(2, 3))


def segments_of_a_sharded_tensor_are_refused() -> None:
    even, replicated = spread(whole(0))[0], spread(whole(0))[5]
    x, before = [replicated, even], even.to_local().clone()
    with pytest.raises(VectorError, match="Layer 1 is sharded over ranks, so it must have one segment, got 4"):
        dots({"xx": (x, x)}, segments=[2, 4])
    with pytest.raises(VectorError, match="Layer 0 is sharded over ranks, so it must have one segment, got 4"):
        combine_([even], [even], torch.full((4,), 2.0), torch.full((4,), 2.0), segments=[4])
    assert even.to_local().equal(before)


def segments_of_replicas_are_those_of_the_whole() -> None:
    full, replicated = whole(0)[5], spread(whole(0))[5]
    for row, part in zip(dots({"xx": ([replicated], [replicated])}, segments=[2]), full, strict=True):
        assert_dot(row, part, part)


def lists_sharded_in_different_ways_are_refused() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2,))
    full = values(0, shape=(4, 4))
    rows, columns, replica = (distribute_tensor(full, mesh, [p]) for p in (Shard(0), Shard(1), Replicate()))
    for x, y in [(rows, columns), (rows, replica), (replica, rows), (rows, full), (full, rows)]:
        with pytest.raises(VectorError, match=r"Layer 0 must be laid out over the ranks in one way, got .* and"):
            dots({"xx": ([x], [x]), "xy": ([x], [y])})
        with pytest.raises(VectorError, match=r"Layer 0 must be laid out over the ranks in one way, got .* and"):
            combine_([x], [y], torch.tensor([2.0]), torch.tensor([2.0]))
    assert together(rows).equal(values(0, shape=(4, 4)))


def equal_meshes_with_groups_of_their_own_take_one_all_reduce() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    meshes = [DeviceMesh.from_group(dist.new_group([0, 1]), "cpu") for _ in range(2)]
    full = [values(1, torch.float64, (4, 3)), values(2, torch.float64, (6,))]
    # Each layer's two tensors, and the two layers, lie on different meshes.
    x = [distribute_tensor(t, mesh, [Shard(0)]) for t, mesh in zip(full, meshes, strict=True)]
    y = [distribute_tensor(t, mesh, [Shard(0)]) for t, mesh in zip(full, reversed(meshes), strict=True)]
    with counted() as calls:
        found = dots({"xy": (x, y)})
    assert len(calls) == 1
    torch.testing.assert_close(found[:, 0], torch.stack([t.square().sum() for t in full]))


CLAIMS: list[Callable[[], None]] = [
    dots_are_those_of_the_full_tensors,
    each_kind_of_layer_alone_is_right_too,
    one_all_reduce_serves_all_layers,
    many_layers_still_take_one_all_reduce,
    replicas_and_plain_tensors_take_no_all_reduce,
    replicas_of_shards_are_not_summed,
    norms_of_an_fsdp_model_are_those_of_the_model,
    combine_updates_the_local_shards,
    combine_updates_sharded_parameters_without_a_graph,
    a_partial_tensor_is_refused_in_either_place,
    segments_of_a_sharded_tensor_are_refused,
    segments_of_replicas_are_those_of_the_whole,
    lists_sharded_in_different_ways_are_refused,
    equal_meshes_with_groups_of_their_own_take_one_all_reduce,
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
        except (Exception, pytest.fail.Exception):
            outcome[claim.__name__] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps(outcome))
    dist.barrier()
    dist.destroy_process_group()
    # One exit in ten or so of the interpreter aborts inside torch once the group is gone, so it is skipped.
    os._exit(0)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The findings of each rank: starting two processes takes longer than all claims together."""
    folder = tmp_path_factory.mktemp("ranks")
    forked.start(_rank, str(folder), processes=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("claim", [claim.__name__ for claim in CLAIMS])
def test_on_both_ranks(claim: str, outcomes: list[dict[str, str]]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome[claim] == "holds", f"rank {rank}:\n{outcome[claim]}"
