"""A network as a function of its parameters, f(θ, x), which never writes to the model itself."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from gyroscope.base import accepted
from gyroscope.errors import ConditioningError, GyroscopeError
from gyroscope.layers.untouched import untouched
from gyroscope.passes.batches import Batch
from gyroscope.passes.likelihood import Loss


@dataclass(frozen=True)
class Network:
    """The function f(θ, x).

    Attributes:
        model: the module whose forward pass is run.
        theta: the parameters to differentiate with respect to, detached, by name.
        others: the other parameters.
        buffers: the buffers; every call gets copies, so that running statistics do not change.
        batch: the inputs x and their targets.
    """

    model: nn.Module
    theta: dict[str, Tensor]
    others: dict[str, Tensor]
    buffers: dict[str, Tensor]
    batch: Batch

    def __call__(self, theta: dict[str, Tensor], batch: Batch | None = None) -> Tensor:
        """Return f(θ, x)."""
        batch = self.batch if batch is None else batch
        state = {**self.others, **{name: b.clone() for name, b in self.buffers.items()}, **theta}
        output = functional_call(self.model, state, batch.args, batch.kwargs)
        if not isinstance(output, Tensor) or not output.is_floating_point() or not output.dim():
            raise ConditioningError(
                "The output must be one floating-point tensor [samples, ...], got "
                f"{_what(output)} from {type(self.model).__name__}. Wrap the model in a module that returns one tensor."
            )
        return output

    def part(self, samples: int, which: slice) -> Network:
        """Return the same network with some of the samples of its batch."""
        return replace(self, batch=part(self.batch, samples, which))


def network(model: nn.Module, names: Mapping[str, object], batch: Batch, dtype: torch.dtype | None) -> Network:
    """Return f(θ, x) of `model` for the parameters called `names`, in `dtype`, or in its own dtype if that is None."""
    parameters = {name: _cast(p.detach(), dtype) for name, p in model.named_parameters()}
    return Network(
        model,
        {name: parameters.pop(name) for name in names},
        parameters,
        {name: _cast(b.detach(), dtype) for name, b in model.named_buffers()},
        cast(batch, dtype),
    )


def check_run(loss: Any, dtype: Any, seed: Any) -> int:
    """Reject an invalid loss, dtype or seed; return the seed as generators take it.

    >>> check_run(print, None, 5)
    5
    """
    if not callable(loss):
        raise ConditioningError(f"`loss` must be a function of (output, target), got {type(loss).__name__}.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConditioningError(
            f"`dtype` must be a floating-point torch.dtype, or None for the model's own, got {dtype!r}. Try "
            "torch.float64."
        )
    return accepted.seed(seed, ConditioningError)


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return a batch, or any nest of tensors, with its floating-point tensors detached and in `dtype`.

    >>> cast({"x": torch.ones(1), "n": torch.ones(1, dtype=torch.int64)}, torch.float64)
    {'x': tensor([1.], dtype=torch.float64), 'n': tensor([1])}
    """
    if isinstance(tree, Batch):
        return replace(tree, **{key: cast(getattr(tree, key), dtype) for key in ("args", "kwargs", "target")})
    return mapped(lambda tensor: _cast(tensor.detach(), dtype), tree)


def cast_loss(loss: Loss, dtype: torch.dtype | None) -> Loss:
    """Return a copy of a loss whose own tensors, such as class weights, are in `dtype`."""
    if isinstance(loss, nn.Module):
        copied = deepcopy(loss)
        return copied if dtype is None else copied.to(dtype)
    if isinstance(loss, partial):
        return partial(loss.func, *cast(loss.args, dtype), **cast(loss.keywords, dtype))
    return loss


def mapped(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return a nest of tuples, lists and mappings with `function` applied to every tensor.

    >>> mapped(lambda t: t.sum().item(), (torch.ones(2), [torch.ones(3), None]))
    (2.0, [3.0, None])
    """
    match tree:
        case Tensor():
            return function(tree)
        case tuple() if hasattr(tree, "_fields"):
            return type(tree)(*(mapped(function, branch) for branch in tree))
        case tuple() | list():
            return type(tree)(mapped(function, branch) for branch in tree)
        case Mapping():
            return {key: mapped(function, branch) for key, branch in tree.items()}
    return tree


@contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """Restore mode, buffers, gradients, random state and attributes of a model on exit.

    Inside, everything runs uncompiled, in its own dtype, with attention that can be differentiated twice.
    """
    with ExitStack() as stack:
        stack.enter_context(untouched(model))
        stack.enter_context(torch.inference_mode(False))  # which also enables gradients
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for kind in {"cpu", *(p.device.type for p in model.parameters())} - {"meta"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        # cuDNN's recurrent networks have no second derivative and no gradient in evaluation mode.
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.enter_context(warnings.catch_warnings())
        # vmap warns if it takes samples one after another, which is slower but correct.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def first_output(f: Network) -> Tensor:
    """Return the output for the whole batch, without a graph; reject a network that draws random numbers."""
    with torch.no_grad():
        before = _random_state(f)
        try:
            output = f(f.theta)
        except ConditioningError:
            raise
        except Exception as error:
            own = next(iter(f.theta.values())).dtype
            raise ConditioningError(
                f"The forward pass in {own} failed with {type(error).__name__}: {error}. `batch` must be (inputs, "
                "targets), with inputs a tensor, a tuple of positional arguments or a dict of keyword arguments; "
                "dtype=None runs the network in its own dtype."
            ) from error
        drawn = not all(torch.equal(a, b) for a, b in zip(before, _random_state(f), strict=True))
    if drawn:
        named = [
            f"{name or 'the model'} ({type(module).__name__})"
            for name, module in f.model.named_modules()
            if module.training and (getattr(module, "dropout", 0) or isinstance(module, nn.modules.dropout._DropoutNd))
        ]
        raise ConditioningError(
            "The forward pass draws random numbers, so its gradients are random too. "
            + (f"In training mode: {', '.join(named[:5])}. " if named else "")
            + "Set dropout to evaluation mode with model.eval(), or with module.eval() for these modules if batch "
            "normalization should stay in training mode."
        )
    if not bool(output.isfinite().all()):
        raise ConditioningError("The network's output is not finite, so its gradients have no second moments.")
    return output


def independent(f: Network, output: Tensor) -> bool:
    """Return True if the output for a sample depends on that sample alone, which is not so with batch statistics.

    It is tested away from θ, because behind a gain of zero only gradients depend on the batch.
    """
    for module in f.model.modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            return False
    if len(output) == 1:
        return True
    draw = torch.Generator("cpu").manual_seed(0)
    near = {name: p + 0.01 * torch.randn(p.shape, generator=draw, device="cpu").to(p) for name, p in f.theta.items()}
    try:
        with torch.no_grad():
            among, alone = f(near), f.part(len(output), slice(0, 1))(near)
    except GyroscopeError:
        raise
    except (RuntimeError, ValueError, IndexError):
        return False
    close = torch.finfo(output.dtype).eps ** 0.5 * among.abs().max()
    return alone.shape == output[:1].shape and bool((alone - among[:1]).abs().max() <= close)


def part(batch: Batch, samples: int, which: slice) -> Batch:
    """Return some samples of a batch.

    >>> part(Batch((torch.arange(4), torch.ones(1)), {}, torch.arange(4)), 4, slice(1, 3))
    Batch(args=(tensor([1, 2]), tensor([1.])), kwargs={}, target=tensor([1, 2]))
    """
    leaves, rebuild = batched(batch, samples)
    return rebuild([leaf[which] for leaf in leaves])


def batched(batch: Batch, samples: int) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Batch]]:
    """Return the tensors of a batch whose leading dimension is the number of samples, and how to replace them."""
    leaves: list[Tensor] = []
    tree = (batch.args, batch.kwargs, batch.target)

    def of_samples(tensor: Tensor) -> bool:
        return tensor.dim() > 0 and len(tensor) == samples

    mapped(lambda tensor: leaves.append(tensor) if of_samples(tensor) else None, tree)

    def rebuild(others: Sequence[Tensor]) -> Batch:
        left = iter(others)
        return Batch(*mapped(lambda tensor: next(left) if of_samples(tensor) else tensor, tree))

    return leaves, rebuild


def _what(output: object) -> str:
    return f"{output.dtype} {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _random_state(f: Network) -> list[Tensor]:
    devices = {p.device for p in (*f.theta.values(), *f.others.values()) if p.device.type not in ("cpu", "meta")}
    states = [torch.get_device_module(device).get_rng_state(device) for device in sorted(devices, key=str)]
    return [torch.get_rng_state(), torch.tensor(hash(random.getstate()), device="cpu"), *states]
