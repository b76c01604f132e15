"""Blocks that keep their input alone, and compute the rest again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def recomputed(block: nn.Module, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return y = compute(x), keeping x alone for the backward pass, which computes the rest again.

    Outputs, gradients and running averages are those of `compute(x)`, bit for bit. Batch normalization that is run
    twice would count a batch twice in its averages: the second time it has others to write to. That time the modules
    are in the modes of the first, whatever has become of them since. Random state is kept for blocks that drop out
    alone, so that steps of the others can be captured in CUDA graphs. Within `torch.compile` this does nothing, as the
    compiler decides itself what to keep.

    Args:
        block: the module whose work this is.
        compute: its work.
        x: its input.

    >>> norm = nn.BatchNorm1d(2)
    >>> recomputed(norm, norm, torch.randn(8, 2)).sum().backward()
    >>> int(norm.num_batches_tracked)
    1
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return compute(x)

    modules = list(block.modules())

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _Again(modules)

    drops = any(module.training and _drops(module) for module in modules)
    y: Tensor = checkpoint(compute, x, use_reentrant=False, preserve_rng_state=drops, context_fn=contexts)
    return y


def _drops(module: nn.Module) -> bool:
    """Whether a module draws random numbers in training: dropout of any kind, alone or within layers of one's own."""
    return (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0) or bool(getattr(module, "dropout", 0))


class _Again(AbstractContextManager[None]):
    """The second time, and every further one: modes as when this was made, averages that nobody reads."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modes = [(module, module.training) for module in modules]

    def __enter__(self) -> None:
        self._found = [(module, module.training, dict(module._buffers)) for module, _ in self._modes]
        for module, training in self._modes:
            module.training = training
            if isinstance(module, _BatchNorm) and training:
                # Tensors of the same shapes, since what is saved for the backward pass is compared with the first time.
                for name in ("running_mean", "running_var"):
                    average = module._buffers[name]
                    module._buffers[name] = None if average is None else torch.empty_like(average)
                module._buffers["num_batches_tracked"] = None

    def __exit__(self, *_: object) -> None:
        for module, training, buffers in self._found:
            module.training = training
            module._buffers.update(buffers)
