"""One training on several processes, which divide every batch and reach the result of one process.

With "fsdp" the weights are divided too: networks are sharded block by block, and checkpoints hold whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from gyroscope_lab.data.split import Split
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.gauge import Reading, correct
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.training import Parallel, Training
from gyroscope_lab.training.trial import Trial

T = TypeVar("T")


def in_a_group() -> bool:
    """Return whether this process belongs to a process group.

    >>> in_a_group()
    False
    """
    return dist.is_available() and dist.is_initialized()


def from_first(ask: Callable[[], T]) -> T:
    """Return the result of `ask` on rank 0 to every rank, or raise its error; only rank 0 calls it."""
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = ask()
        except Exception as error:
            found[1] = error
    dist.broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    result: T = found[0]
    return result


class Spread(Training):
    """A training in which the ranks of a process group take every step together.

    Rank r of R has the r-th part of every batch B, and the gradient is that of the whole batch:

        ∇L_B = (1/R) Σ_r (R |B_r| / |B|) ∇L_{B_r},

    the mean of the ranks' gradients, weighted by the size of their shares, which may differ. The shares come from the
    batches of one process, with the same augmentation, so the training is the same except for the order of
    floating-point additions. Evaluations are divided too. Only rank 0 writes. Its checkpoints hold whole tensors, so
    any number of ranks, or a single process, can resume them.

    Two things differ. Batch normalization uses the statistics of a rank's share instead of the batch, and the running
    statistics of rank 0 are evaluated and kept. Dropout draws different activations on every rank, and different ones
    from a single process. A trial's key does not depend on the ranks, so keep the results of such networks in a
    separate archive. Every run records its number of ranks.

    Args:
        parallel: "ddp": every rank has all weights, and gradients are averaged (`DistributedDataParallel`); "fsdp":
            every rank has a part of each weight, gradient and optimizer state, and weights are gathered when they are
            needed (FSDP2's `fully_shard`).
    """

    def __init__(self, trial: Trial, split: Split, *, parallel: Parallel = "ddp", **options: Any) -> None:
        if parallel not in get_args(Parallel):
            raise LabError(f"`parallel` must be {' or '.join(map(repr, get_args(Parallel)))}, got {parallel!r}.")
        if trial.follows:
            raise LabError("`follows` must be False on several processes. Train this trial without torchrun.")
        self.rank, self.ranks, self.parallel = dist.get_rank(), dist.get_world_size(), parallel
        examples = len(split.y_train)
        smallest = min(trial.schedule.batches(examples))
        if smallest < self.ranks:
            raise LabError(
                f"{self.ranks} processes cannot share a batch of {smallest}, the smallest of an epoch of {examples} "
                f"examples by {trial.schedule.batch}. Start at most {smallest}, change the batch, or leave out the "
                "last one of an epoch (drop_last=True)."
            )
        super().__init__(trial, split, **options)
        if parallel == "ddp":
            index = [self.device] if self.device.type == "cuda" else None
            self.forward = nn.parallel.DistributedDataParallel(self.model, device_ids=index)
        if self.monitor is not None:
            self.monitor.note(f"divided among {self.ranks} processes ({parallel})")

    def _placed(self, model: nn.Module) -> nn.Module:
        model = super()._placed(model)
        return _shard(model, self.device, self.ranks) if self.parallel == "fsdp" else model

    def _found(self, folder: Path) -> dict[str, Any] | None:
        return from_first(lambda: super(Spread, self)._found(folder))

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(_laid_out(state, self.model, self.optimizer, self.gauge.initial))

    def _evaluated(self, x: Tensor, y: Tensor) -> Tensor:
        # All ranks gather a sharded network together, so each needs the same number of examples. Where shares overlap,
        # the examples of the previous rank get a label that no prediction can match.
        each = -(-len(y) // self.ranks)
        begin = min(self.rank * each, len(y) - each)
        labels = y[begin : begin + each].clone()
        labels[: self.rank * each - begin] = -1
        self._turn_to("eval")
        with self._autocast():
            found = correct(self.model, self.split, x[begin : begin + each], labels)
        dist.all_reduce(found)
        return found / y.numel()

    def _read(self) -> Reading:
        dist.all_reduce(self._sums)
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)
        return super()._read()

    def _keep(self, folder: Path, result: Result) -> None:
        if self.rank == 0:
            super()._keep(folder, result)
        elif self.trial.keeps:
            self._weights()
        dist.barrier()

    def _weights(self) -> dict[str, dict[str, Any]]:
        weights: dict[str, dict[str, Any]] = whole(super()._weights())
        return weights

    def _save_in_time(self) -> None:
        if self.folder is not None and from_first(lambda: self.pace.due):
            self.save()

    def save(self) -> None:
        """Save everything that the rest of the training depends on; all ranks call it together."""
        if self.rank == 0:
            super().save()
        else:
            self._state()

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = whole(super()._state())
        return state

    def proceed(self, on_epoch: Callable[[Training], None] = lambda training: None) -> Iterator[None]:
        """Train to the end, yielding after every step and while waiting."""
        with self._alone_if_it_fails():
            yield from super().proceed(on_epoch)

    def finish(self) -> Result:
        """Test, and return the result; it is also written to the folder."""
        with self._alone_if_it_fails():
            return super().finish()

    @contextmanager
    def _alone_if_it_fails(self) -> Iterator[None]:
        """Close the monitor without the other ranks, which may not reach the same point."""
        try:
            yield
        except BaseException as error:
            if self.monitor is not None:
                self.monitor.__exit__(type(error), error, error.__traceback__)
            raise


def _shard(model: nn.Module, device: torch.device, ranks: int) -> nn.Module:
    """Divide each weight among the ranks (FSDP2), in place: blocks of a chain one by one, the rest together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (ranks,))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The members of chains (`nn.Sequential`) that have members themselves; they are sharded one by one.

    >>> inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> _blocks(nn.Sequential(inner, nn.Linear(2, 2))) == [inner]
    True
    """
    found = []
    for child in model.children():
        is_block = isinstance(model, nn.Sequential) and any(True for _ in child.children())
        found += [child] if is_block else _blocks(child)
    return [block for block in found if any(True for _ in block.parameters())]


def whole(state: Any) -> Any:
    """Return nested dicts and lists with every sharded tensor gathered; all ranks call it together.

    >>> whole({"a": [1, torch.ones(2)]})
    {'a': [1, tensor([1., 1.])]}
    """
    return tree_map(_full, state)


def _full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _laid_out(
    state: dict[str, Any], model: nn.Module, optimizer: Optimizer, initial: Sequence[Tensor]
) -> dict[str, Any]:
    """Return a saved state of whole tensors, sharded as the model is on the ranks.

    Optimizer state in the shape of a parameter is sharded as that parameter.
    """
    now = model.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = state["optimizer"]
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    kept = {
        key: {name: _as(value, parameter) for name, value in saved["state"].get(key, {}).items()}
        for key, parameter in zip(keys, parameters, strict=True)
        if key in saved["state"]
    }
    best = state["best"]
    return state | {
        "model": {name: _as(value, now[name]) for name, value in state["model"].items()},
        "optimizer": saved | {"state": kept},
        "initial": [_as(value, there) for value, there in zip(state["initial"], initial, strict=True)],
        "best": best and [*best[:2], {name: _as(value, now[name]) for name, value in best[2].items()}],
    }


def _as(value: Any, like: Any) -> Any:
    if not (hasattr(like, "full_tensor") and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
