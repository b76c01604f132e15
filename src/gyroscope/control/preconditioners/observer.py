"""The inputs of layers and the gradients at their outputs, observed while a model is trained.

Hooks on the modules find the node of each output in the autograd graph. The gradients are those of the loss in the
backward pass of the training loop (the empirical Fisher matrix), or those of a loss with labels drawn from the model's
own predictions (the Fisher matrix), from a separate backward pass to the layers' outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gyroscope.base.hooks import is_capturing, listens
from gyroscope.control.preconditioners.affine_layers import Place
from gyroscope.errors import ConditioningError, DynamicsError
from gyroscope.layers.untouched import tensors
from gyroscope.passes.likelihood import Loss, distribution, known, sample_targets
from gyroscope.passes.losses import Reduction, mean_loss, reduction_of

Draw = Callable[[Any, torch.Generator], Any]
Labels = Literal["sampled", "true"] | Draw
Used = tuple[int, Tensor, Tensor | None]


class Statistics(Protocol):
    """An object that receives the uses of layers."""

    def add(self, uses: Sequence[Used], samples: int, batch: object) -> None:
        """Add uses of layers.

        Args:
            uses: the index of the place, the input, and the gradient of the mean loss at the output, or None for
                statistics of inputs.
            samples: the number of predictions that the loss is a mean over.
            batch: the same object for all uses in one pass of the model.
        """


@dataclass(eq=False)
class _Pass:
    """One pass of the model."""

    samples: int | None = None
    uses: list[tuple[int, Tensor, GradientEdge | None]] = field(default_factory=list)


class Observer:
    """Tells statistics about the uses of some layers of a model, while `looks` is True.

    Args:
        model: the model; it is called as a whole.
        places: its layers.
        statistics: the object that receives them.
        loss: the loss whose labels are drawn.
        labels: "true" for the labels of the training loop, "sampled" for labels drawn from the model, or a function
            (output, generator) → targets that draws them.
        seed: the seed of the generator that draws labels.
        inputs: whether the statistics are of inputs only. Then all layers of a pass count as soon as the output of the
            model gets a gradient, which takes one hook in the backward pass, instead of one per layer.
        capturable: whether to observe while a CUDA graph is captured.
    """

    def __init__(
        self,
        model: nn.Module,
        places: Sequence[Place],
        statistics: Statistics,
        *,
        loss: Loss | None,
        labels: Labels,
        seed: int,
        inputs: bool = False,
        capturable: bool = False,
    ) -> None:
        self.model, self.places, self.statistics = model, tuple(places), statistics
        self.loss, self.labels, self.seed = loss, labels, seed
        self.inputs = inputs
        # The state of a generator is on the host, so drawing labels cannot be captured.
        self.looks, self.capturable = True, capturable and labels == "true"
        self.drawn: Tensor | None = None  # a loaded state of the generator
        self._generator: torch.Generator | None = None
        self._before: Tensor | None = None  # the state before labels that have not been used yet
        self._reduction: Reduction = "auto"
        self._pass: _Pass | None = None
        self._handles: list[RemovableHandle] = []
        check_labels(labels, loss)
        self.attach()

    def attach(self) -> None:
        """Register the hooks."""
        for index, place in enumerate(self.places):
            hook = _Hook(self, "_ran", index)
            self._handles.append(place.module.register_forward_hook(hook, with_kwargs=True, prepend=True))
        # The model may be a layer itself: its own hook comes first then, by `prepend`.
        self._handles.append(self.model.register_forward_pre_hook(_Hook(self, "_begins", 0), with_kwargs=True))
        self._handles.append(self.model.register_forward_hook(_Hook(self, "_ends", 0), with_kwargs=True))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator that draws labels."""
        if self._generator is None or self._generator.device != device:
            self._before = None
            self._generator = torch.Generator(device).manual_seed(self.seed)
            if self.drawn is not None:
                self._generator.set_state(self.drawn)
        return self._generator

    def state(self) -> Tensor | None:
        """Return the state of the generator."""
        if self._before is not None:
            return self._before
        return self.drawn if self._generator is None else self._generator.get_state()

    def load(self, state: Tensor | None) -> None:
        """Continue from a state of the generator."""
        # Generators take their state from the host; torch.load(map_location=...) may have moved it.
        self.drawn, self._generator, self._before = None if state is None else state.cpu(), None, None

    def _begins(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._pass = _Pass() if torch.is_grad_enabled() else None

    def _ends(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        now, self._pass = self._pass, None
        if now is None:
            return
        if isinstance(output, Tensor) and output.dim() > 0:
            now.samples = output.shape[0]
        else:
            sized = [one for one in tensors((output, args, kwargs)) if one.dim() > 0]
            now.samples = len(sized[0]) if sized else None
        if now.uses and self.labels != "true":
            self._draw(now, output)
        elif now.uses:
            self._await(now, output)

    def _ran(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = args if args and isinstance(args[0], Tensor) else tensors((args, kwargs))
        # Activation checkpointing recomputes in the backward pass what was seen before.
        again = torch._C._current_autograd_node() is not None
        if again or not given or not isinstance(output, Tensor) or not output.requires_grad:
            return
        x, now = given[0].detach(), self._pass
        if self.inputs and now is not None:
            now.uses.append((index, x, None))
            return
        edge = _edge(output)
        if self.labels != "true":
            if now is not None:
                now.uses.append((index, x, edge))
            return
        me, nr = weakref.ref(self), edge.output_nr

        def arrived(gradients: tuple[Tensor | None, ...]) -> None:
            observer, g = me(), gradients[nr]
            # Gradients of gradients are not those of the loss.
            if observer is not None and g is not None and not torch.is_grad_enabled():
                samples = now.samples if now is not None and now.samples is not None else len(x)
                observer._tell([(index, x, g)], samples, now)

        edge.node.register_prehook(arrived)

    def _await(self, now: _Pass, output: Any) -> None:
        """Report all uses in a pass, for statistics of inputs only."""

        def tell(observer: Observer, uses: list[Any]) -> None:
            observer._tell(uses, len(uses[0][1]) if now.samples is None else now.samples, now)

        self._when_trained(output, tell, now.uses)

    def _draw(self, now: _Pass, output: Any) -> None:
        """Draw labels, and compute their gradients at the outputs of all layers."""
        assert self.loss is not None
        first = tensors(output)[0]
        generator = self.generator(first.device)
        # Labels of a pass that was not trained on are drawn again, so that evaluating a model changes nothing.
        if self._before is not None:
            generator.set_state(self._before)
        self._before = generator.get_state()
        if callable(self.labels):
            targets = self.labels(output, generator)
        else:
            targets = sample_targets(self.loss, first, generator=generator)
            output = first
        if self._reduction == "auto":  # only once: it takes further calls of the loss, and waits for the device
            self._reduction = reduction_of(self.loss, output, targets)
        value, _ = mean_loss(self.loss, output, targets, reduction="sum" if self._reduction == "sum" else "mean")
        edges = [edge for _, _, edge in now.uses if edge is not None]
        gradients = torch.autograd.grad(value, edges, retain_graph=True, allow_unused=True)
        samples = _predictions(self.loss, len(first) if first.dim() else 1, targets)
        found = [(index, x, g) for (index, x, _), g in zip(now.uses, gradients, strict=True) if g is not None]
        now.uses.clear()  # and with them the parts of the graph that they hold

        def tell(observer: Observer, uses: list[Any]) -> None:
            observer._before = None
            observer._tell(uses, samples, now)

        self._when_trained(output, tell, found)

    def _when_trained(self, output: Any, tell: Callable[[Observer, list[Any]], None], uses: list[Any]) -> None:
        """Report uses once the gradient of the loss reaches the output of their pass; other passes do not count."""
        me = weakref.ref(self)

        def arrived(gradients: tuple[Tensor | None, ...]) -> None:
            observer = me()
            if observer is not None and not torch.is_grad_enabled():  # gradients of gradients are not those of the loss
                taken = uses[:]
                uses.clear()
                if taken:
                    tell(observer, taken)

        for one in (output,) if isinstance(output, Tensor) else tensors(output):
            node = one.grad_fn
            if node is not None:
                if one._is_view():
                    node = _edge(one).node
                node.register_prehook(arrived)

    def _tell(self, uses: Sequence[Used], samples: int, batch: object) -> None:
        kind = uses[0][1].device.type
        if torch.is_grad_enabled() or torch.is_autocast_enabled(kind):
            with torch.no_grad(), torch.autocast(kind, enabled=False):
                self.statistics.add(uses, samples, batch)
        else:
            self.statistics.add(uses, samples, batch)

    def __getstate__(self) -> dict[str, Any]:
        none = {"_pass": None, "_generator": None, "_before": None}
        return {**self.__dict__, **none, "_handles": [], "drawn": self.state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.attach()


class _Hook:
    """Calls a method of an observer. It does not keep it alive, and a copied model gets a hook that does nothing."""

    def __init__(self, observer: Observer | None, method: str, index: int) -> None:
        self.observer: Callable[[], Observer | None] = (lambda: None) if observer is None else weakref.ref(observer)
        self.method, self.index = method, index

    def __call__(self, *given: Any) -> None:
        observer = self.observer()
        if observer is None or not observer.looks or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if listens(observer) and (observer.capturable or not is_capturing()):
            getattr(observer, self.method)(self.index, *given)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None, str, int]]:
        return _Hook, (None, self.method, self.index)


def check_labels(labels: Any, loss: Any) -> None:
    """Reject labels that cannot be drawn."""
    if labels not in ("sampled", "true") and not callable(labels):
        raise DynamicsError(
            f"`labels` must be 'sampled', 'true', or a function (output, generator) → targets, got {labels!r}."
        )
    if labels != "true" and not callable(loss):
        raise DynamicsError(
            f"`loss` must be the function (output, targets) that is trained where labels are drawn, got {loss!r}. Give "
            "one, or use labels='true' for the labels of the training loop (the empirical Fisher matrix)."
        )
    if labels == "sampled":
        try:
            distribution(loss, torch.zeros(1, 1))
        except ConditioningError as error:
            raise DynamicsError(str(error)) from error


def _predictions(loss: Loss, samples: int, targets: Any) -> int:
    """Return the number of predictions that a mean loss is over: one per sample, or one per label."""
    q = known(loss)
    if q is None or q.family == "gaussian" or q.reduction == "sum" or not isinstance(targets, Tensor):
        return samples
    return targets.numel() if not (q.family == "categorical" and targets.is_floating_point()) else samples


def _edge(output: Tensor) -> GradientEdge:
    """Return the edge that carries the gradient of a module's output, also if it is later modified in place."""
    base = output._base if output._is_view() else None
    # Modifying a view in place (products of [..., d] are views) takes its node out of the graph, not its base's.
    return get_gradient_edge(output if base is None or base.grad_fn is None else base)
