"""Claims that two ranks check together; test_contract_ranks starts the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contract_models import RHO, Make, adamw, batch, momentum, reads_weights, sgd, snapshot
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import two_ranks
from gyroscope import Layca, steer
from gyroscope.errors import ControlError

Claim = Callable[[Path], None]
SHARDED: list[Make] = [sgd, momentum, adamw, reads_weights]


def net(seed: int = 0) -> nn.Sequential:
    """Shards of unequal size (7 and 5 rows), and one that is empty (1 row)."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    options.setdefault("mesh", init_device_mesh("cpu", (2,)))
    fully_shard(model[0], **options)
    fully_shard(model, **options)
    return model


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own(model: nn.Module) -> list[Tensor]:
    """This rank's part of each parameter."""
    return [(p.detach().to_local() if isinstance(p, DTensor) else p.detach()).clone() for p in model.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def go(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, split: bool) -> None:
    """One step on a batch of 8; split over the ranks, each on its half."""
    backward(model, seed, split)
    optimizer.step()


def backward(model: nn.Module, seed: int, split: bool) -> None:
    x = batch(seed).to(next(model.parameters()).dtype)
    if split:
        x = x.chunk(2)[dist.get_rank()]
    model.zero_grad()
    (model(x) - 1.0).square().mean().backward()


def assert_whole_close(model: nn.Module, reference: nn.Module, tolerance: float, case: str) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        worst = (whole(p).double() - q[1].detach().double()).abs().max().item()
        assert worst <= tolerance, f"{case}: {name} differs by {worst}"


@contextmanager
def counted() -> Iterator[list[int]]:
    """How often `torch.distributed.all_reduce` is called, and how many collectives of any kind there are."""
    real = dist.all_reduce
    counts = [0, 0]

    def count(*args: Any, **kwargs: Any) -> Any:
        counts[0] += 1
        return real(*args, **kwargs)

    dist.all_reduce = count
    try:
        with CommDebugMode() as communication:
            yield counts
    finally:
        dist.all_reduce = real
    counts[1] = communication.get_total_counts()


def a_sharded_run_is_the_run_on_one_process(_: Path) -> None:
    for make in SHARDED:
        alone, model = net(), shard(net())
        reference = Layca(make(alone.parameters()), alone)
        optimizer = Layca(make(model.parameters()), model)
        assert optimizer.layers == reference.layers
        start = whole(model[0].bias)
        for seed in range(5):
            go(alone, reference, seed, split=False)
            go(model, optimizer, seed, split=True)
        assert_whole_close(model, alone, 1e-6, make.__name__)
        assert (whole(model[0].bias) - start).abs().max() > 1e-3  # the biases were stepped too
        sharded, single = optimizer.state_dict()["state"], reference.state_dict()["state"]
        for k, p in enumerate(optimizer.param_groups[0]["params"]):
            one, other = sharded[k]["radius"].item(), single[k]["radius"].item()
            assert one == pytest.approx(other, rel=1e-12)
            assert whole(p).double().norm().item() == pytest.approx(one, rel=1e-6)


def a_step_of_all_layers_is_one_all_reduce(_: Path) -> None:
    for make in SHARDED:
        for zero_norm, first in (("raise", 2), ("skip", 1)):  # the first step also looks for layers of norm zero
            model = shard(net())
            optimizer = Layca(make(model.parameters()), model, zero_norm=zero_norm)
            for seed in range(3):
                backward(model, seed, split=True)
                with counted() as counts:
                    optimizer.step()
                expected = first if seed == 0 else 1
                assert counts == [expected, expected], f"{make.__name__}, step {seed}: {counts}"


def layers_in_several_groups_are_still_one_all_reduce(_: Path) -> None:
    for make in SHARDED:
        model = shard(net())
        groups = [{"params": list(block.parameters())} for block in model.children() if list(block.parameters())]
        assert len(groups) > 1
        optimizer = Layca(make(groups), model, zero_norm="skip")
        for seed in range(2):
            backward(model, seed, split=True)
            with counted() as counts:
                optimizer.step()
            assert counts == [1, 1], f"{make.__name__}, step {seed}: {counts}"


def a_hybrid_mesh_sums_over_its_shards_alone(_: Path) -> None:
    for shape, expected in (((2, 1), 0), ((1, 2), 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        alone, model = net(), shard(net(), mesh=mesh)
        reference = Layca(adamw(alone.parameters()), alone)
        optimizer = Layca(adamw(model.parameters()), model, zero_norm="skip")
        for seed in range(5):
            go(alone, reference, seed, split=False)
            backward(model, seed, split=True)
            with counted() as counts:
                optimizer.step()
            assert counts[0] == expected
        assert_whole_close(model, alone, 1e-6, str(shape))


def a_data_parallel_run_is_the_run_on_one_process(_: Path) -> None:
    for make in SHARDED:
        alone, model = net(), DistributedDataParallel(net())
        reference = Layca(make(alone.parameters()), alone)
        optimizer = Layca(make(model.parameters()), model)
        assert optimizer.layers == reference.layers
        for seed in range(5):
            go(alone, reference, seed, split=False)
            backward(model, seed, split=True)
            with counted() as counts:
                optimizer.step()
            assert counts == [0, 0]
        assert_whole_close(model.module, alone, 1e-6, make.__name__)


def a_gradient_that_is_not_finite_on_one_rank_leaves_the_layer_on_all(_: Path) -> None:
    for make in SHARDED:
        model = shard(net())
        optimizer = Layca(make(model.parameters()), model)
        go(model, optimizer, 0, split=True)
        backward(model, 1, split=True)
        if dist.get_rank() == 0:
            model[0].weight.grad.to_local()[0, 0] = torch.nan
        before = own(model)
        optimizer.step()
        after = own(model)
        assert torch.equal(before[0], after[0]), make.__name__
        assert not torch.equal(before[2], after[2]) or before[2].numel() == 0
        assert optimizer.skipped() == {"0.weight": 1}
        go(model, optimizer, 2, split=True)
        assert not torch.equal(own(model)[0], after[0]), make.__name__
        assert all(part.isfinite().all() for part in own(model))


def a_layer_of_norm_zero_is_refused_on_every_rank(_: Path) -> None:
    model = net()
    nn.init.zeros_(model[2].weight)
    shard(model)
    optimizer = Layca(sgd(model.parameters()), model)
    backward(model, 0, split=True)
    before = own(model)
    with pytest.raises(ControlError, match=r"2\.weight"):
        optimizer.step()
    assert equal(before, own(model))


def half_precision_shards_turn_by_the_rate_unless_the_optimizer_may_read_them(_: Path) -> None:
    for make in (sgd, momentum, adamw):
        model = shard(net().bfloat16())
        optimizer = Layca(make(model.parameters()), model)
        optimizer.param_groups[0]["lr"] = 0.5
        for seed in range(3):
            before = whole(model[0].weight).double()
            go(model, optimizer, seed, split=True)
            after = whole(model[0].weight).double()
            cosine = (before * after).sum() / (before.norm() * after.norm())
            assert torch.tan(torch.arccos(cosine)).item() == pytest.approx(0.5, rel=0.02), make.__name__
    model = shard(net().bfloat16())
    optimizer = Layca(reads_weights(model.parameters()), model)
    backward(model, 0, split=True)
    before = own(model)
    with pytest.raises(ControlError, match="rounding noise"):
        optimizer.step()
    assert equal(before, own(model))


def an_inner_optimizer_that_raises_leaves_the_shards_as_they_were(_: Path) -> None:
    def stop(*_: Any) -> None:
        raise InterruptedError

    for make in SHARDED:
        model, twin = shard(net()), shard(net())
        optimizer, reference = (Layca(make(m.parameters()), m) for m in (model, twin))
        for m, o in ((model, optimizer), (twin, reference)):
            go(m, o, 0, split=True)
            backward(m, 1, split=True)
        before = own(model)
        options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        given = [p.grad for p in model.parameters()]
        handle = optimizer.inner.register_step_post_hook(stop)  # by now the inner optimizer has stepped
        with pytest.raises(InterruptedError):
            optimizer.step()
        handle.remove()
        assert equal(before[::2], own(model)[::2]), make.__name__
        assert all(p.grad is g for p, g in zip(model.parameters(), given, strict=True))
        assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == options
        optimizer.step()
        reference.step()
        if make in (sgd, reads_weights):  # no momentum that has seen the gradient twice
            assert equal(own(model)[::2], own(twin)[::2]), make.__name__


def a_distributed_checkpoint_continues_as_if_not_interrupted(folder: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for make in (sgd, momentum, adamw):
            case = f"{make.__name__}, {dtype}"
            model = shard(net().to(dtype))
            optimizer = Layca(make(model.parameters()), model)
            for seed in range(3):
                go(model, optimizer, seed, split=True)
            saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            place = folder / f"{make.__name__}-{dtype}"
            dcp.save(saved, checkpoint_id=place)

            other = shard(net(seed=1).to(dtype))
            resumed = Layca(make(other.parameters()), other)
            found = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, resumed)}
            dcp.load(found, checkpoint_id=place)
            set_model_state_dict(other, found["model"])
            set_optimizer_state_dict(other, resumed, found["optimizer"])
            for seed in range(3, 6):
                go(model, optimizer, seed, split=True)
                go(other, resumed, seed, split=True)
            assert equal(own(other), own(model)), case
            radius = optimizer.state[model[0].weight]["radius"]
            assert radius.dtype == torch.float64
            assert torch.equal(resumed.state[other[0].weight]["radius"], radius), case


def a_plain_state_dict_of_shards_continues_as_if_not_interrupted(_: Path) -> None:
    for make in SHARDED:
        model = shard(net())
        optimizer = Layca(make(model.parameters()), model)
        for seed in range(3):
            go(model, optimizer, seed, split=True)
        other = shard(net(seed=1))
        resumed = Layca(make(other.parameters()), other)
        other.load_state_dict(copy.deepcopy(model.state_dict()))
        resumed.load_state_dict(snapshot(optimizer))
        for seed in range(3, 5):
            go(model, optimizer, seed, split=True)
            go(other, resumed, seed, split=True)
        assert equal(own(other), own(model)), make.__name__
        assert resumed.layers == optimizer.layers


def a_layer_that_is_not_sharded_is_not_summed_over_the_ranks(_: Path) -> None:
    alone, model = net(), net()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model[2], mesh=init_device_mesh("cpu", (2,)))
    optimizer = Layca(torch.optim.SGD(model.parameters(), lr=RHO), model, others="frozen")
    reference = Layca(torch.optim.SGD(alone.parameters(), lr=RHO), alone, others="frozen")
    for seed in range(3):
        go(alone, reference, seed, split=False)
        backward(model, seed, split=True)
        last = model[4].weight.grad
        dist.all_reduce(last)
        last /= 2
        with counted() as counts:
            optimizer.step()
        assert counts[0] == (2 if seed == 0 else 1)
    assert_whole_close(model, alone, 1e-6, "mixed")


def a_steered_model_is_sharded_as_it_is_on_one_process(_: Path) -> None:
    for inner in ("adamw", "sgd", "muon"):
        alone, model = net(), net()
        for one in (alone, model):
            nn.init.zeros_(one[2].weight)
        shard(model)
        heads: Any = "plain" if inner == "muon" else "turn"  # torch's Muon cannot step a matrix of one row, sharded
        reference, optimizer = steer(alone, inner, heads=heads), steer(model, inner, heads=heads)
        for seed in range(5):
            go(alone, reference, seed, split=False)
            go(model, optimizer, seed, split=True)
        # Muon orthogonalizes in bfloat16.
        assert_whole_close(model, alone, 1e-5 if inner != "muon" else 3e-3, inner)
        assert str(optimizer) == str(reference)


def a_matrix_of_fewer_rows_than_ranks_is_left_to_adamw(_: Path) -> None:
    for sharded, inner in ((False, "Muon"), (True, "AdamW")):
        model = shard(net()) if sharded else net()
        optimizer = steer(model, heads="turn")
        assert f"Layca over {inner} turns" in str(optimizer)
        go(model, optimizer, 0, split=sharded)
    with pytest.raises(ControlError, match=r"got 4\.weight \(1 × 5 on 2 ranks\)\."):
        steer(model, "muon", heads="turn")


def a_distributed_checkpoint_of_a_steered_model_continues(folder: Path) -> None:
    model = shard(net())
    optimizer = steer(model, embeddings="frozen")
    for seed in range(3):
        go(model, optimizer, seed, split=True)
    saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=folder / "steered")
    other = shard(net(seed=1))
    resumed = steer(other, embeddings="frozen")
    found = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, resumed)}
    dcp.load(found, checkpoint_id=folder / "steered")
    set_model_state_dict(other, found["model"])
    set_optimizer_state_dict(other, resumed, found["optimizer"])
    for seed in range(3, 6):
        go(model, optimizer, seed, split=True)
        go(other, resumed, seed, split=True)
    assert equal(own(other), own(model))
    name = optimizer.layers[0]
    mine, theirs = (o.state[dict(m.named_parameters())[name]] for m, o in ((model, optimizer), (other, resumed)))
    assert torch.equal(mine["norm_moments"], theirs["norm_moments"])
    assert mine["norm_moments"][0, 2] == 5


CLAIMS: list[Claim] = [
    a_sharded_run_is_the_run_on_one_process,
    a_step_of_all_layers_is_one_all_reduce,
    layers_in_several_groups_are_still_one_all_reduce,
    a_hybrid_mesh_sums_over_its_shards_alone,
    a_data_parallel_run_is_the_run_on_one_process,
    a_gradient_that_is_not_finite_on_one_rank_leaves_the_layer_on_all,
    a_layer_of_norm_zero_is_refused_on_every_rank,
    half_precision_shards_turn_by_the_rate_unless_the_optimizer_may_read_them,
    an_inner_optimizer_that_raises_leaves_the_shards_as_they_were,
    a_distributed_checkpoint_continues_as_if_not_interrupted,
    a_plain_state_dict_of_shards_continues_as_if_not_interrupted,
    a_layer_that_is_not_sharded_is_not_summed_over_the_ranks,
    a_steered_model_is_sharded_as_it_is_on_one_process,
    a_matrix_of_fewer_rows_than_ranks_is_left_to_adamw,
    a_distributed_checkpoint_of_a_steered_model_continues,
]


def rank(rank: int, folder: str) -> None:
    two_ranks.run(CLAIMS, rank, folder)
