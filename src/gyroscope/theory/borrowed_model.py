"""A user's model as a function of its layers' weights: outputs, loss and gradients, with the model left unchanged."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from gyroscope.base.hooks import alone
from gyroscope.errors import DynamicsError, GyroscopeError
from gyroscope.layers.layer import Layer, chosen_layers
from gyroscope.vectors.layout import any_sharded

Loss = Callable[[Any, Any], Tensor]
Layers = Sequence[Layer] | str | Iterable[str] | None


class BorrowedModel:
    """J(w) of a model, for a loss and a batch, with w the weights of its layers.

    Every pass runs on copies of parameters and buffers in `dtype`, in the model's mode and uncompiled. Weights,
    gradients, buffers, modes and random numbers of the model are left unchanged, and every pass begins with the same
    random numbers: dropout drops the same units.

    Args:
        model: any module; compiled and data-parallel ones are unwrapped; sharded ones are rejected.
        batch: (inputs, targets), inputs a tensor, a tuple of positional or a dict of keyword arguments.
        loss: `loss(output, target)`; without it only outputs are available.
        layers: layers from `gyroscope.layers`, or glob patterns on their names; all by default.
        dtype: type of the copies; None for the model's own.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> borrowed = BorrowedModel(net, (torch.eye(2), torch.zeros(2, 1)), nn.functional.mse_loss)
    >>> value, (gradient,) = borrowed.gradients([torch.tensor([[1.0, 3.0]], dtype=torch.float64)])
    >>> value, gradient.tolist(), net.weight.grad
    (5.0, [[1.0, 3.0]], None)
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss | None = None,
        *,
        layers: Layers = None,
        dtype: torch.dtype | None = torch.float64,
    ) -> None:
        from gyroscope.layers.untouched import bare
        from gyroscope.passes.batches import batches, is_pair
        from gyroscope.passes.network import cast, cast_loss

        self.layers, self.dtype = _chosen(model, layers), dtype
        if loss is not None and not callable(loss):
            raise DynamicsError(f"`loss` must be a function of (output, target), got a {type(loss).__name__}.")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise DynamicsError(
                f"`dtype` must be a floating-point type, or None for the model's own, got {dtype!r:.80}."
            )
        if not is_pair(batch):
            raise DynamicsError(
                f"`batch` must be one pair (inputs, targets), with inputs a tensor, a tuple of positional or a dict of "
                f"keyword arguments of the model, got a {type(batch).__name__}."
            )
        self.model = bare(model)
        if any_sharded(self.model.parameters()):
            raise DynamicsError(
                "`model` must not be sharded, got DTensor parameters. Call this before fully_shard, or with a full "
                "copy."
            )
        self.loss = None if loss is None else cast_loss(loss, dtype)
        try:
            (one,) = batches(batch, self.layers[0].parameter.device)
        except GyroscopeError as error:
            raise DynamicsError(str(error)) from error
        with torch.inference_mode(False):  # its tensors have no gradients
            self.batch = cast(one, dtype)
        self.held = dict(self.model.named_parameters())
        keys = {id(parameter): name for name, parameter in self.held.items()}
        self.keys = [keys[id(layer.parameter)] for layer in self.layers]

    def weights(self) -> list[Tensor]:
        """Return copies of the layers' weights."""
        return [self._copy(layer.parameter) for layer in self.layers]

    def output(self, weights: Sequence[Tensor] | None = None) -> Any:
        """Return the model's output for the batch's inputs at these weights; its own if not given."""
        return self._run(self._forward, self.weights() if weights is None else weights, gradients=False)

    def gradients(self, weights: Sequence[Tensor] | None = None) -> tuple[float, list[Tensor | None]]:
        """Return the loss and its gradient per layer; None for a layer that the loss does not depend on."""
        with torch.inference_mode(False):
            leaves = [w.detach().clone().requires_grad_(True) for w in (self.weights() if weights is None else weights)]
        value: float = self._run(self._backward, leaves, gradients=True)
        found = [leaf.grad for leaf in leaves]
        return value, [g.to_dense() if g is not None and g.is_sparse else g for g in found]

    def _forward(self, model: nn.Module) -> Any:
        # A model may write to its input.
        from gyroscope.passes.network import mapped

        args, kwargs = mapped(torch.clone, (self.batch.args, self.batch.kwargs))
        try:
            return model(*args, **kwargs)
        except Exception as error:
            raise DynamicsError(
                f"The forward pass in {self.dtype or 'its own type'} failed with {type(error).__name__}: {error}. The "
                "model is unchanged. Try dtype=None to run it in its own type."
            ) from error

    def _backward(self, model: nn.Module) -> float:
        assert self.loss is not None
        output = self._forward(model)
        try:
            value = self.loss(output, self.batch.target)
        except Exception as error:
            raise DynamicsError(
                f"The loss failed with {type(error).__name__}: {error}. It is called as loss(output, target) in "
                f"{self.dtype or 'its own type'}. The model is unchanged. Try dtype=None to keep types."
            ) from error
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() == 0:
            raise DynamicsError(f"`loss` must return a real tensor, one number or one per sample, got {value!r:.80}.")
        value = value.mean()
        if not value.requires_grad:
            raise DynamicsError("The loss does not depend on the weights of any layer. Is it computed under no_grad?")
        if not bool(value.isfinite()):
            raise DynamicsError(
                f"The loss must be finite, got {float(value.detach())}: its gradients say nothing about the layers."
            )
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    def _run(self, what: Callable[[nn.Module], Any], weights: Sequence[Tensor], *, gradients: bool) -> Any:
        from torch.func import functional_call

        from gyroscope.layers.untouched import untouched

        state = {f"model.{name}": self._copy(parameter) for name, parameter in self.held.items()}
        state |= {f"model.{key}": weight for key, weight in zip(self.keys, weights, strict=True)}
        state |= {f"model.{name}": self._copy(buffer) for name, buffer in self.model.named_buffers()}
        with ExitStack() as stack:
            stack.enter_context(alone())
            stack.enter_context(untouched(self.model))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(gradients))
            for kind in {"cpu", *(parameter.device.type for parameter in self.held.values())} - {"meta"}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            if "torch._dynamo" in sys.modules:  # takes seconds to load; nothing is compiled without it
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if any(isinstance(module, nn.RNNBase) for module in self.model.modules()):
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # no gradients in evaluation mode
            # The backward pass also runs within the call: checkpointing uses the parameters again.
            return functional_call(_Within(self.model), state, (what,))

    def _copy(self, tensor: Tensor) -> Tensor:
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        with torch.inference_mode(False):
            return tensor.detach().to(dtype, copy=True)


class _Within(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, what: Callable[[nn.Module], Any]) -> Any:
        return what(self.model)


def _chosen(model: Any, given: Any) -> list[Layer]:
    chosen = list({id(one.parameter): one for one in chosen_layers(model, given, DynamicsError)}.values())
    held = {id(parameter) for parameter in model.parameters()}
    for layer in chosen:
        if id(layer.parameter) not in held:
            raise DynamicsError(
                f"`layers` must be layers of `model`, got {layer.name!r} of another. Try gyroscope.layers(model)."
            )
    return chosen


def outputs_of(output: Any) -> list[Tensor]:
    """Return the tensors of examples in a network's output."""
    from gyroscope.layers.untouched import tensors

    found = [one for one in tensors(output) if one.is_floating_point() and one.dim() > 0]
    if not found or not all(len(one) > 1 for one in found):
        raise DynamicsError(
            f"The module must return tensors of two or more examples, got shapes {[tuple(one.shape) for one in found]}."
        )
    return found


def relative_change(there: list[Tensor], here: list[Tensor]) -> float:
    """Return ‖f′ − f‖/‖f‖ over all tensors together.

    >>> relative_change([torch.tensor([3.0, 5.0])], [torch.tensor([3.0, 4.0])])
    0.2
    """
    off = sum(float((a - b).square().sum()) for a, b in zip(there, here, strict=True))
    size = sum(float(b.square().sum()) for b in here)
    return (off / size) ** 0.5 if size else (0.0 if off == 0 else float("inf"))
