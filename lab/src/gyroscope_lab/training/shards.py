"""Networks whose weights lie in parts on several ranks, and checkpoints of them in whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map


def shard(model: nn.Module, device: torch.device, ranks: int) -> nn.Module:
    """Divide each weight among the ranks (FSDP2), in place: blocks of a chain one by one, and the rest together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (ranks,))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    """The members of chains (`nn.Sequential`) that have members themselves: what is worth having one at a time.

    >>> inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> blocks(nn.Sequential(inner, nn.Linear(2, 2))) == [inner]
    True
    """
    found = []
    for child in model.children():
        is_block = isinstance(model, nn.Sequential) and any(True for _ in child.children())
        found += [child] if is_block else blocks(child)
    return [block for block in found if any(True for _ in block.parameters())]


def whole(state: Any) -> Any:
    """The same nest of dicts and lists with every sharded tensor put together; all ranks ask together.

    >>> whole({"a": [1, torch.ones(2)]})
    {'a': [1, tensor([1., 1.])]}
    """
    return tree_map(_full, state)


def _full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def laid_out(
    state: dict[str, Any], model: nn.Module, optimizer: Optimizer, initial: Sequence[Tensor]
) -> dict[str, Any]:
    """The state of a training, saved in whole tensors, as its model lies on the ranks.

    What an optimizer keeps in the shape of a parameter lies as that one does.
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
