"""Claims about a monitor that two ranks check together; test_watch_ranks starts the ranks."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gyroscope
import two_ranks
from gyroscope import Layca, Run
from gyroscope.diagnosis.finding import FindingError
from gyroscope.errors import MonitorError, StoreError
from gyroscope.monitor import clock
from gyroscope.monitor.reference import standard_error
from gyroscope.passes.activations import spread
from oracles.monitor import COSINES

Claim = Callable[[Path], None]
# The activations of a sharded model are not looked at; those of others on their half of a batch are other numbers.
PLAIN: dict[str, Any] = {"budget": None, "activations": False}
CLOSE = 1e-6


class Kinds(nn.Module):
    """Every kind of layer; of 7, 5, 3 and 1 rows, so that shards are of unequal size, and one is empty."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 8)
        self.conv = nn.Conv1d(8, 7, 3, padding=1)
        self.attention = nn.MultiheadAttention(7, 1, batch_first=True)
        self.three = nn.Linear(7, 3)
        self.turned = nn.ConvTranspose1d(4, 6, 1)
        self.one = nn.Linear(3, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.embedding(words).transpose(1, 2)).transpose(1, 2)
        x = self.attention(x, x, x)[0].tanh()
        y = self.turned(x[..., :4].transpose(1, 2)).sum(dim=(1, 2))
        return self.one(self.three(x).tanh()).sum(dim=(1, 2)) + 0.1 * y


def batch(seed: int) -> torch.Tensor:
    return torch.randint(5, (8, 6), generator=torch.Generator().manual_seed(seed))


def shard(model: Kinds, mesh: Any = None) -> nn.Module:
    """Shard one layer by itself and the others with the model; a step takes longer the more there are by themselves."""
    mesh = init_device_mesh("cpu", (2,)) if mesh is None else mesh
    fully_shard(model.conv, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def layca(model: nn.Module) -> torch.optim.Optimizer:
    return Layca(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), model)


def go(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Any, split: bool) -> None:
    """Steps on batches of 8; split over the ranks, each takes its half."""
    for step in steps:
        x = batch(step)
        if split:
            x = x.chunk(2)[dist.get_rank()]
        optimizer.zero_grad()
        (model(x) - 1.0).square().mean().backward()
        optimizer.step()


def alone(folder: Path, make: Callable[..., Any] = adamw, steps: int = 12, **options: Any) -> Run:
    """The run of one process: each rank makes its own."""
    model = Kinds()
    optimizer = make(model)
    path = folder / f"alone-{dist.get_rank()}"
    # A process that is one of two writes on rank 0 alone, so the other is told that it is rank 0 as well.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gyroscope.monitor.resume.rank", lambda: 0)
        with gyroscope.watch(model, optimizer, path, **PLAIN | options):
            go(model, optimizer, range(steps), split=False)
    return gyroscope.load(path)


def assert_same_numbers(run: Run, whole: Run, *, resumed: int | None = None) -> None:
    assert run.layers == whole.layers
    assert run.steps.tolist() == whole.steps.tolist()
    assert set(run.quantities) >= set(whole.quantities)
    for name in whole.quantities:
        one, other = run.series(name).astype(np.float64), whole.series(name).astype(np.float64)
        if resumed is not None and (name == "alignment" or name.startswith("moment")):
            one, other = (np.delete(x, resumed, axis=0) for x in (one, other))
        # Norms and angles are compared relative to the largest: gradients that vanish are rounding noise.
        size = max(np.nanmax(abs(other), initial=0.0), 1.0 if name in COSINES else 0.0)
        # Adam turns rounding noise in the gradients of a sharded run, which add up in another order, into weights.
        np.testing.assert_allclose(one, other, rtol=0, atol=CLOSE * size * 10, err_msg=name)


def assert_first_numbers_agree(run: Run, whole: Run) -> None:
    """At step 0, where both runs have the same weights to the last bit."""
    norms, expected = run.series("weight_norm")[0], whole.series("weight_norm")[0]
    np.testing.assert_allclose(norms, expected, rtol=CLOSE)
    assert (run.series("rotation")[0] == 0).all()


def whole_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {layer.name: layer.parameter.detach() for layer in gyroscope.layers(model)}
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for n, p in found.items()}


def data_parallel_ranks_have_one_run_and_it_is_that_of_one_process(folder: Path) -> None:
    whole = alone(folder)
    model = DistributedDataParallel(Kinds())
    optimizer = adamw(model)
    place = folder / f"own-{dist.get_rank()}"  # what rank 1 writes, if it does, cannot be missed
    with gyroscope.watch(model, optimizer, place, **PLAIN) as monitor:
        go(model, optimizer, range(6), split=True)
        monitor.log(loss=torch.tensor(1.0))
        monitor.note("half way")
        monitor.sample(next_steps=2)
        monitor.flush()
        state = monitor.state_dict()
        go(model, optimizer, range(6, 12), split=True)
        monitor.cost()
        repr(monitor)
        assert monitor.error is None
    monitor.close()
    if dist.get_rank() == 1:
        assert not place.exists()
        assert not optimizer._optimizer_step_post_hooks
        return
    assert state["steps"] == [6]
    run = gyroscope.load(place)
    assert run.scalars["loss"].values.tolist() == [1.0]
    assert "half way" in [event.text for event in run.events]
    assert run.steps.tolist() == whole.steps.tolist()
    for name in ("rotation", "rate", "weight_norm", "gradient_norm", "update_norm", "alignment"):
        np.testing.assert_allclose(run.series(name), whole.series(name), rtol=2e-5, atol=2e-6, err_msg=name)


def a_data_parallel_run_resumes_on_both_ranks(folder: Path) -> None:
    whole = alone(folder)
    model = DistributedDataParallel(Kinds())
    optimizer = adamw(model)
    with gyroscope.watch(model, optimizer, folder / "run", **PLAIN) as monitor:
        go(model, optimizer, range(6), split=True)
        states = [monitor.state_dict()]
    dist.broadcast_object_list(states)  # a checkpoint is written by rank 0 and read by all
    with gyroscope.watch(model, optimizer, folder / "run", **PLAIN) as monitor:
        monitor.load_state_dict(states[0])
        go(model, optimizer, range(6, 12), split=True)
    dist.barrier()
    run = gyroscope.load(folder / "run")
    assert run.steps.tolist() == whole.steps.tolist()
    np.testing.assert_allclose(run.series("rotation"), whole.series("rotation"), rtol=2e-5, atol=2e-6)


def _sharded(folder: Path, make: Callable[..., Any], mesh: Any = None, **options: Any) -> Run:
    model = shard(Kinds(), mesh)
    optimizer = make(model)
    with gyroscope.watch(model, optimizer, folder / "run", **PLAIN | options) as monitor:
        go(model, optimizer, range(12), split=True)
        assert monitor.error is None, monitor.error
    dist.barrier()
    return gyroscope.load(folder / "run")


def a_sharded_run_has_the_numbers_of_one_process(folder: Path) -> None:
    for make in (adamw, layca):
        for every in (1, 3):
            place = folder / f"{make.__name__}-{every}"
            place.mkdir(exist_ok=True)
            whole, run = alone(place, make, every=every), _sharded(place, make, every=every)
            assert run.steps.tolist() == [0, *range(every, 13, every)]
            assert_first_numbers_agree(run, whole)
            assert_same_numbers(run, whole)


def shards_of_the_same_weights_have_the_same_numbers_to_one_in_a_million(folder: Path) -> None:
    """Weights and gradients are set, so that nothing differs but where they lie."""
    runs = []
    for name in ("alone", "sharded"):
        model = Kinds() if name == "alone" else shard(Kinds())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        path = folder / (f"alone-{dist.get_rank()}" if name == "alone" else "run")
        with pytest.MonkeyPatch.context() as patch:
            if name == "alone":
                patch.setattr("gyroscope.monitor.resume.rank", lambda: 0)
            with gyroscope.watch(model, optimizer, path, every=1, **PLAIN) as monitor:
                for step in range(6):
                    generator = torch.Generator().manual_seed(1000 + step)
                    for p in model.parameters():
                        g = torch.randn(p.shape, generator=generator)
                        if isinstance(p, DTensor):
                            from torch.distributed.tensor import distribute_tensor

                            g = distribute_tensor(g, p.device_mesh, p.placements)
                        p.grad = g
                    optimizer.step()
                assert monitor.error is None
        dist.barrier()
        runs.append(gyroscope.load(path))
    whole, run = runs
    assert run.steps.tolist() == whole.steps.tolist() == list(range(7))
    for name in whole.quantities:
        cosine = name in COSINES
        np.testing.assert_allclose(
            run.series(name), whole.series(name), rtol=CLOSE, atol=CLOSE if cosine else 0, err_msg=name
        )


def a_hybrid_mesh_has_the_numbers_of_one_process(folder: Path) -> None:
    for shape in ((2, 1), (1, 2)):
        place = folder / f"{shape[0]}x{shape[1]}"
        place.mkdir(exist_ok=True)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        whole, run = alone(place), _sharded(place, adamw, mesh)
        assert_first_numbers_agree(run, whole)
        assert_same_numbers(run, whole)


def a_sharded_state_is_whole_and_resumes(folder: Path) -> None:
    whole = alone(folder)
    model = shard(Kinds())
    start = whole_tensors(model)
    optimizer = adamw(model)
    state: dict[str, Any] = {}
    for first, last in ((0, 6), (6, 12)):
        with gyroscope.watch(model, optimizer, folder / "run", **PLAIN) as monitor:
            if first:
                monitor.load_state_dict(state)
            go(model, optimizer, range(first, last), split=True)
            state = monitor.state_dict()
            assert monitor.error is None
        dist.barrier()
        assert state["steps"] == [last]
        assert all(type(t) is torch.Tensor and torch.equal(t, start[n]) for n, t in state["reference"].items())
        kept = torch.load(folder / "run" / "reference.pt", weights_only=True)["tensors"]
        assert kept.keys() == start.keys()
        assert all(torch.equal(t, start[n]) for n, t in kept.items())
    assert_same_numbers(gyroscope.load(folder / "run"), whole, resumed=7)


def a_sharded_run_is_recognised_by_its_weights(folder: Path) -> None:
    whole = alone(folder)
    model = shard(Kinds())
    optimizer = adamw(model)
    for steps in (range(6), range(6, 12)):
        with gyroscope.watch(model, optimizer, folder / "run", **PLAIN) as monitor:
            go(model, optimizer, steps, split=True)
            assert monitor.error is None
        dist.barrier()
    run = gyroscope.load(folder / "run")
    assert [a.start_step for a in run.attempts] == [0, 6]
    assert_same_numbers(run, whole, resumed=7)


def a_sharded_run_is_measured_from_a_whole_model(folder: Path) -> None:
    other = Kinds(seed=7)
    for i, source in enumerate((other, other.state_dict())):
        model = shard(Kinds())
        optimizer = adamw(model)
        with gyroscope.watch(model, optimizer, folder / f"run-{i}", reference=source, **PLAIN):
            go(model, optimizer, range(2), split=True)
        dist.barrier()
        found = gyroscope.load(folder / f"run-{i}").series("rotation")[-1]
        now, then = whole_tensors(model), whole_tensors(other)
        for name, value in zip(now, found, strict=True):
            a, b = now[name].double().flatten(), then[name].double().flatten()
            assert value == pytest.approx(float(1 - a @ b / (a.norm() * b.norm())), abs=CLOSE)


def what_is_logged_before_the_first_step_of_a_sharded_model_is_on_disk_after_flush(folder: Path) -> None:
    model = shard(Kinds())
    with gyroscope.watch(model, adamw(model), folder / "run", **PLAIN) as monitor:
        monitor.log(loss=2.5)
        monitor.note("before")
        monitor.flush()
        if dist.get_rank() == 0:
            with gyroscope.load(folder / "run") as run:
                assert run.scalars["loss"].values.tolist() == [2.5]
                assert [event.text for event in run.events] == ["before"]


def a_sharded_run_that_is_resumed_is_flushed_after_its_first_step(folder: Path) -> None:
    for resumed in (False, True):
        model = shard(Kinds())
        optimizer = adamw(model)
        with gyroscope.watch(model, optimizer, folder / "run", **PLAIN) as monitor:
            monitor.log(loss=2.5)
            if dist.get_rank() == 0 and resumed:
                with pytest.raises(StoreError, match="with the first step"):
                    monitor.flush()
            go(model, optimizer, range(2), split=True)
            monitor.flush()
        dist.barrier()
    if dist.get_rank() == 0:
        with gyroscope.load(folder / "run") as run:
            assert run.scalars["loss"].values.tolist() == [2.5]


def the_folder_that_the_first_rank_makes_is_known_where_it_can_be(folder: Path) -> None:
    """Ranks that hold shards hear of it; ranks that hold replicas do not, and say so."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(import_module("gyroscope.monitor.watch"), "strftime", lambda _: f"clock-of-{rank}")
        model = shard(Kinds())
        with gyroscope.watch(model, adamw(model), **PLAIN) as monitor:
            assert monitor.path == folder / "runs/clock-of-0"
        replica = Kinds()
        with gyroscope.watch(replica, adamw(replica), **PLAIN) as monitor:
            assert monitor.path == (folder / "runs/clock-of-0-2" if rank == 0 else None)
            if rank == 1:
                assert "recorded by the first rank" in repr(monitor)
                with pytest.raises(MonitorError, match="The first rank records this run"):
                    _ = monitor.run
        assert not (folder / "runs/clock-of-1").exists()


def frozen_and_zero_layers_of_shards_are_those_of_one_process(folder: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        model.embedding.requires_grad_(False)
        model.conv.requires_grad_(False)
        for p in (model.three.weight, model.attention.out_proj.weight):
            with torch.no_grad():
                p.mul_(0.0)
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    whole, run = alone(folder, make), _sharded(folder, make)
    assert np.isnan(run.series("rotation")[:, [0, 1]]).all()
    assert_same_numbers(run, whole)
    later = torch.load(folder / "run" / "reference.later.pt", weights_only=True)
    assert sorted(later["tensors"]) == ["attention.out_proj.weight", "three.weight"]
    assert any("has a direction now" in event.text or "have a direction now" in event.text for event in run.events)


def a_sample_of_shards_is_that_of_the_whole_layers(folder: Path) -> None:
    def large(sharded: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(60, 101), nn.Tanh(), nn.Linear(101, 70), nn.Tanh(), nn.Linear(70, 1))
        return fully_shard(model) if sharded else model

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, some: range) -> None:
        for step in some:
            x = torch.randn(8, 60, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    start = [layer.parameter.detach() for layer in gyroscope.layers(large(sharded=False))]
    drawn = 2 * 1024
    limit = (2 * 1024 + 512) * 4 + 2 * 1024 * 4  # on each rank: two samples with positions, and a small layer
    model = large(sharded=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gyroscope.monitor.reference._FEWEST", 512)
        for first, last in ((0, 4), (4, 8)):
            options = PLAIN | {"reference_memory": limit if first == 0 else 2 * limit}
            with gyroscope.watch(model, optimizer, folder / "run", **options) as monitor:
                if first:
                    monitor.load_state_dict(state)
                steps(model, optimizer, range(first, last))
                state = monitor.state_dict()
                assert monitor.error is None, monitor.error
            dist.barrier()
            assert list(state["samples"]) == ["0.weight", "2.weight"]
            for name, w in zip(("0.weight", "2.weight"), start, strict=False):
                at = spread(w.numel(), drawn, torch.device("cpu"))
                assert torch.equal(state["samples"][name], w.flatten()[at])
    run = gyroscope.load(folder / "run")
    now = [layer.parameter.full_tensor().detach() for layer in gyroscope.layers(model)]
    pairs = [(a.double().flatten(), b.double().flatten()) for a, b in zip(now, start, strict=True)]
    full = np.array([float(1 - a @ b / (a.norm() * b.norm())) for a, b in pairs])
    error = full * (2 - full) * np.array([standard_error(drawn, w.numel()) for w in start[:2]] + [CLOSE])
    assert (abs(run.series("rotation")[-1] - full) < 6 * error).all()
    expected = [float(a.norm()) for a, _ in pairs]
    np.testing.assert_allclose(run.series("weight_norm")[-1], expected, rtol=CLOSE)


def neurons_of_shards_are_refused(folder: Path) -> None:
    model = shard(Kinds())
    optimizer = adamw(model)
    with pytest.raises(MonitorError):
        gyroscope.watch(model, optimizer, folder / "run", neurons=True)
    assert not (folder / "run").exists()
    assert not optimizer._optimizer_step_post_hooks


def a_budget_is_kept_by_both_ranks_together(folder: Path) -> None:
    """Measuring is made to look dear on rank 0 and cheap on rank 1: rank 0 decides."""
    model = shard(Kinds())
    optimizer = adamw(model)
    with pytest.MonkeyPatch.context() as patch:
        price = 5.0 if dist.get_rank() == 0 else 0.0
        patch.setattr(clock, "SECONDS", 0.0)  # so that a short run shows what long ones do
        patch.setattr(clock.Clock, "price", property(lambda self: price * self.train * self.budget))
        with gyroscope.watch(model, optimizer, folder / "run", activations=False, detail_every=1000) as monitor:
            go(model, optimizer, range(80), split=True)
            assert monitor.error is None
            assert monitor.interval == 5
    dist.barrier()
    steps = gyroscope.load(folder / "run").steps
    assert steps[:65].tolist() == list(range(65))
    assert set(np.diff(steps[64:]).tolist()) == {5, 1} or set(np.diff(steps[64:]).tolist()) == {5}
    assert steps[-1] == 80


def a_rank_whose_shards_are_all_empty_takes_part(folder: Path) -> None:
    model = fully_shard(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gyroscope.watch(model, optimizer, folder / "run", layers=["1.weight"], **PLAIN) as monitor:
        for seed in range(3):
            model(batch(seed)).square().mean().backward()
            optimizer.step()
        assert monitor.error is None, monitor.error


def detail_is_looked_at_by_both_ranks_together(folder: Path) -> None:
    """Detail is made to look dear on rank 1 alone."""
    model = shard(Kinds())
    optimizer = adamw(model)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(clock.Clock, "details_stretched", lambda self, every: 3 * every)
        with gyroscope.watch(
            model, optimizer, folder / "run", activations=False, detail_every=5, budget=0.5
        ) as monitor:
            go(model, optimizer, range(30), split=True)
            assert monitor.error is None, monitor.error


def a_serious_finding_is_raised_on_both_ranks_together(folder: Path) -> None:
    """The finding is known on the rank that records; the other learns of it when they next agree."""
    model = shard(Kinds())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e3)
    with (  # noqa: PT012
        pytest.raises(FindingError) as caught,
        gyroscope.watch(model, optimizer, folder / "run", **PLAIN, on_finding="raise") as monitor,
    ):
        for step in range(300):
            go(model, optimizer, [step], split=True)
            monitor.flush()
    assert caught.value.finding.severity == "serious"
    assert (caught.value.finding.kind == "unknown") == (dist.get_rank() > 0)


def ranks_that_train_around_their_wrapper_are_told_apart(folder: Path) -> None:
    """The forward pass calls the model inside, so gradients are not averaged; through the wrapper they are."""
    for around in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        path = folder / f"around-{around}"
        with gyroscope.watch(model, optimizer, path, **PLAIN):
            for step in range(80):
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
                optimizer.zero_grad()
                (model if around else wrapped)(x).square().mean().backward()
                optimizer.step()
                dist.barrier()
        if dist.get_rank() == 0:
            found = [one for one in gyroscope.diagnose(path) if one.kind == "ranks_differ"]
            assert [one.severity for one in found] == (["serious"] if around else [])
            assert not around or found[0].since <= 64
        dist.barrier()


CLAIMS: list[Claim] = [
    data_parallel_ranks_have_one_run_and_it_is_that_of_one_process,
    a_data_parallel_run_resumes_on_both_ranks,
    shards_of_the_same_weights_have_the_same_numbers_to_one_in_a_million,
    a_sharded_run_has_the_numbers_of_one_process,
    a_hybrid_mesh_has_the_numbers_of_one_process,
    a_sharded_state_is_whole_and_resumes,
    a_sharded_run_is_recognised_by_its_weights,
    a_sharded_run_is_measured_from_a_whole_model,
    what_is_logged_before_the_first_step_of_a_sharded_model_is_on_disk_after_flush,
    a_sharded_run_that_is_resumed_is_flushed_after_its_first_step,
    the_folder_that_the_first_rank_makes_is_known_where_it_can_be,
    frozen_and_zero_layers_of_shards_are_those_of_one_process,
    a_sample_of_shards_is_that_of_the_whole_layers,
    neurons_of_shards_are_refused,
    a_budget_is_kept_by_both_ranks_together,
    a_rank_whose_shards_are_all_empty_takes_part,
    detail_is_looked_at_by_both_ranks_together,
    a_serious_finding_is_raised_on_both_ranks_together,
    ranks_that_train_around_their_wrapper_are_told_apart,
]


def rank(rank: int, folder: str) -> None:
    two_ranks.run(CLAIMS, rank, folder)
