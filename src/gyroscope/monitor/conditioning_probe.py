"""Conditioning of every layer on some steps of a training, from its own forward and backward passes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gyroscope.base.hooks import is_capturing, listens
from gyroscope.conditioning import ranks
from gyroscope.conditioning.capture import Capture
from gyroscope.conditioning.result import LayerConditioning, flat, percent, quantity
from gyroscope.conditioning.schedule import Schedule
from gyroscope.conditioning.solve import solve
from gyroscope.conditioning.uses import in_order
from gyroscope.layers.layer import Layer
from gyroscope.layers.untouched import bare, tensors
from gyroscope.store.record import QuantityInfo

_LOG = logging.getLogger("gyroscope")

_MEANING = {
    "lambda_x": ("activation²", "λmax of Σx, the mean of xxᵀ over the samples of the layer's input"),
    "lambda_g": ("gradient²", "λmax of Σ∇h, the mean of ggᵀ over the samples of the gradient at the layer's output"),
    "lambda_f": (
        "activation²·gradient²",
        "λmax of the layer's Fisher information, approximated by Σx ⊗ Σ∇h: how steep the loss is",
    ),
    "rank_x": ("1", "eigenvalues of Σx above zero"),
    "rank_g": ("1", "eigenvalues of Σ∇h above zero"),
    "weight_spectral": ("weight", "the largest singular value of W, before the step"),
    "gradient_spectral": ("gradient", "the largest singular value of ∂L/∂W"),
    "domination": ("gradient/weight", "σmax(∂L/∂W)/σmax(W): far below 1, the weight dominates"),
}
_FACTORS = {"kappa_x": "Σx", "kappa_g": "Σ∇h", "kappa_f": "Σx ⊗ Σ∇h"}


class Conditioned:
    """Analyzes the layers of one optimizer on the steps it is attached for.

    The gradient at a layer's output is assumed to be that of the mean loss over all samples of the step. This holds if
    the loss is a mean and, with accumulation, divided by the number of parts. Samples whose gradients are discarded do
    not count: those of a step that a `GradScaler` skips, or of another optimizer's step.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], schedule: Schedule, *, shared: bool) -> None:
        self.model, self.layers, self.schedule = bare(model), tuple(layers), schedule
        self.error: Exception | None = None
        self._capture = Capture(self.model, layers, patches=schedule.patches)
        self._groups = ranks.groups_of(model) if shared else []
        self._handles: list[RemovableHandle] = []
        self._weights: list[Tensor] = []
        self._found: npt.NDArray[np.float64] | None = None

    @property
    def infos(self) -> dict[str, QuantityInfo]:
        """Names, units and meanings of the quantities that may be found."""
        found = {name: QuantityInfo(name, unit, meaning) for name, (unit, meaning) in _MEANING.items()}
        for name, factor in _FACTORS.items():
            for p in self.schedule.p:
                meaning = f"κ of {factor} at {percent(p)} %: λmax over the eigenvalue at that share of the dimension"
                found[quantity(name, p)] = QuantityInfo(quantity(name, p), "1", meaning)
        return found

    @property
    def names(self) -> list[str]:
        """Names of the quantities, in the order of the columns of `take`."""
        return list(self.infos)

    @property
    def attached(self) -> bool:
        """True if hooks are attached."""
        return bool(self._handles)

    def attach(self) -> None:
        """Attach hooks for one step."""
        if self.error is None:
            self._capture.reset()
            self._weights = self._parameters()  # they hold the gradients; FSDP2 exchanges them within a pass
            if not self._handles:
                self._capture.attach()
                self._handles.append(self.model.register_forward_hook(_Hook(self._ran)))
                for module in {self.model, *(layer.module for layer in self.layers)}:
                    self._handles.append(module.register_forward_pre_hook(_Hook(self._begins)))

    def detach(self) -> None:
        """Remove the hooks."""
        if self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles = []
            self._capture.detach()
        self._weights = []

    def analyze(self, *, scale: Tensor | None = None) -> str | None:
        """Analyze the passes before this step, with the current weights and gradients.

        All ranks of a sharded model call it together. An error is reported once and ends the analyses, not training.

        Args:
            scale: the loss scale that the gradients still contain, if the optimizer is to divide by it.

        Returns:
            A message if the analysis failed, else None.
        """
        self._found = None
        if self.error is not None:
            return None
        try:
            self._found = self._analyzed(scale)
        except Exception as error:
            self.error = error
            self.detach()
            problem = f"the conditioning of layers is no longer measured: {type(error).__name__}: {error}"
            _LOG.warning("%s", problem[0].upper() + problem[1:])
            return problem
        finally:
            self._capture.reset()
        return None

    def take(self) -> Tensor | None:
        """Return what was found at this step, [layers, quantities], or None."""
        found, self._found = self._found, None
        return None if found is None else torch.from_numpy(found)

    def _analyzed(self, left: Tensor | None) -> npt.NDArray[np.float64] | None:
        capture, scale = self._capture, self.schedule.scale
        problem: Exception | None = capture.broken
        capture.broken = None
        if problem is None:
            try:
                capture.close(float(scale() if callable(scale) else scale))
            except Exception as error:
                problem = error
        if self._groups:
            ranks.agree(problem, self._groups)
        elif problem is not None:
            raise problem
        uses = {key: use for key, use in capture.uses.items() if use.x.samples and use.g.samples}
        device = self.layers[0].parameter.device
        if self._groups:
            uses = ranks.gather(uses, self._groups, device)
        if not uses:
            return None
        gradients = {i: p.grad.detach() for i, p in enumerate(self._parameters()) if p.grad is not None}
        if left is not None:
            gradients = {i: gradient / left.to(gradient.device) for i, gradient in gradients.items()}
        whole = [use for use in in_order(uses) if use.rows is None]
        entries, _ = ranks.together(
            self._groups,
            lambda: solve(whole, self.layers, gradients, {}, p=tuple(self.schedule.p), spectra=False),
        )
        return self._table(entries)

    def _parameters(self) -> list[Tensor]:
        return [layer.parameter for layer in self.layers]

    def _table(self, entries: Sequence[LayerConditioning]) -> npt.NDArray[np.float64]:
        names = self.names
        table = np.full((len(self.layers), len(names)), np.nan)
        for entry in entries:
            row = flat(entry.row())
            # A tied weight is used twice; its own use comes first.
            if np.isnan(table[entry.position]).all():
                table[entry.position] = [np.nan if row[name] is None else row[name] for name in names]
        return table

    def _begins(self, module: nn.Module, *_: Any) -> None:
        """Drop the samples of gradients that were discarded before a module is called again."""
        if self._ignores() or torch._C._current_autograd_node() is not None:
            return
        for use in self._capture.uses.values():
            mine = module is self.model or self.layers[use.position].module is module
            weight = self._weights[use.position]
            if mine and use.g.pending and weight.requires_grad and weight.grad is None:
                use.x.drop()
                use.g.drop()

    def _ran(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._ignores():
            return
        try:
            self._capture.find_functional(tensors(output))
        except Exception as error:
            self._capture.broken = error

    def _ignores(self) -> bool:
        if torch.compiler.is_compiling() or is_capturing() or torch._C._get_tracing_state():
            return True
        if not torch.is_grad_enabled() or self._capture.broken is not None:
            return True
        return not listens(self._capture)


class _Hook:
    """A hook on a module. It does not keep the analyses alive, and does nothing in a copy of the model."""

    def __init__(self, act: Callable[..., None] | None) -> None:
        self.act = None if act is None else weakref.WeakMethod(act)

    def __call__(self, *given: Any) -> None:
        act = None if self.act is None else self.act()
        if act is not None:
            act(*given)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None]]:
        return _Hook, (None,)
