"""Hooks that read Σx and Σ∇h during one forward and one backward pass.

A module that multiplies its input by a weight shows both: the input in a forward hook, the gradient at its output in a
hook on that output. A weight that is used without its module being called (the projections of `MultiheadAttention`, a
recurrent network, a tied head) is found in the autograd graph; see `graph.py`. Each is reduced to its factor at once:
no activation outlives the pass.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gyroscope.base.hooks import is_capturing, listens
from gyroscope.conditioning import graph
from gyroscope.conditioning.factors import Factor
from gyroscope.conditioning.uses import Reader, Use, reader, unreadable
from gyroscope.layers.class_names import is_conv1d
from gyroscope.layers.layer import Layer
from gyroscope.layers.untouched import tensors

_NUMBERS = count()
_CALLED = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag)


class Capture:
    """The factors of some layers of a model, read while the hooks are attached.

    Args:
        model: the model.
        layers: the layers to read.
        patches: True to read convolutions by their patches.
        top: True if only λmax of the factors will be asked for.
        complete: called with a use as soon as all its samples have been read, if there is one batch; it may release the
            factors. `scale` must be set by then.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        *,
        patches: bool = False,
        top: bool = False,
        complete: Callable[[Use], None] | None = None,
    ) -> None:
        self.model, self.layers, self.patches, self.top, self.complete = model, tuple(layers), patches, top, complete
        self.scale = 1.0
        self.waits = False  # True while gradients are not those of the loss
        self._looking = False
        self.broken: Exception | None = None
        self._handles: list[RemovableHandle] = []
        self._refused: dict[int, str] = {}
        self._mark = f"gyroscope {next(_NUMBERS)}"  # marks the nodes of a graph that are accounted for
        self.reset()

    def reset(self) -> None:
        """Discard what was read."""
        self.uses: dict[tuple[int, str], Use] = {}
        self.reasons: dict[int, str] = dict(self._refused)

    def attach(self) -> None:
        """Attach the forward hooks, if they are not attached."""
        if self._handles:
            return
        by_parameter = {id(layer.parameter): i for i, layer in enumerate(self.layers)}
        by_module: defaultdict[int, list[int]] = defaultdict(list)
        for i, layer in enumerate(self.layers):
            by_module[id(layer.module)].append(i)
        for name, module in self.model.named_modules():
            if isinstance(module, _CALLED) or is_conv1d(module):
                for position in _own(module, by_parameter, by_module):
                    self._put(module, position, name)

    def detach(self) -> None:
        """Remove the hooks, if they are attached. What was read stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self, scale: float = 1.0, *, share: float = 1.0) -> None:
        """Close a batch after both passes, which had the gradient of `scale` times the mean loss.

        The samples of Σ∇h are the R gradients of the mean loss at the output, times R, and times the `share` of the
        batch's samples that the mean is over.
        """
        for use in self.uses.values():
            if use.done:
                continue
            if use.why_not is not None:
                use.x, use.g = Factor(), Factor()
            elif use.g.pending == 0:
                use.x.drop()
                if use.calls:
                    self.reasons.setdefault(use.position, "no gradient reached its output")
            else:
                use.x.close()
                use.g.close(share * use.g.pending / scale)
            use.calls = use.arrived = 0

    def find_functional(self, roots: Iterable[Tensor]) -> bool:
        """Attach hooks to the uses of weights that no module call has shown, in the graph that leads to `roots`.

        Returns:
            True if the graph has a reentrant checkpoint, which supports only a full `backward`.
        """
        wanted = {id(layer.parameter): i for i, layer in enumerate(self.layers) if i not in self._refused}
        uses, reentrant = graph.find(roots, wanted, self._mark)
        for found in sorted(uses, key=lambda one: one.transposed):
            layer = self.layers[found.position]
            if self.patches and getattr(found.node, "_saved_transposed", False):
                self.reasons.setdefault(found.position, "a transposed convolution has no patches")
                continue
            if isinstance(found.how, str):
                self.reasons.setdefault(found.position, found.how)
                continue
            kind = layer.kind if layer.kind in ("attention", "recurrent") else found.kind
            name = f"{layer.name} (as {found.kind})" if kind != layer.kind == "embedding" else layer.name
            use = self._use(found.position, kind, name, rows=found.rows, transposed=found.transposed)
            use.early = False
            # A checkpoint that recomputes this calls the modules' hooks as well.
            self._looking = True
            try:
                graph.hook(found, use, patches=self.patches, wanted=self._wants, failed=self._failed)
            finally:
                self._looking = False
        return reentrant

    def _wants(self, use: Use) -> bool:
        # Gradients of gradients, with gradients enabled, are taken while a loss is computed, and are not those of it.
        return not self.waits and not use.done and not torch.is_grad_enabled()

    def _put(self, module: nn.Module, position: int, name: str) -> None:
        layer = self.layers[position]
        how = reader(module, patches=self.patches)
        if isinstance(how, str):
            self.reasons[position] = self._refused[position] = how
            return
        kind, called = layer.kind, layer.name
        if (kind == "embedding") != isinstance(module, nn.Embedding):
            # An embedding and a head share one weight, in either order.
            kind, called = "linear" if kind == "embedding" else "embedding", f"{name}.weight"
        hook = _Hook(self, position, kind, called, how)
        self._handles.append(module.register_forward_hook(hook, with_kwargs=True, prepend=True))

    def _use(self, position: int, kind: str, name: str, *, rows: slice | None = None, transposed: bool = False) -> Use:
        part = "" if rows is None else f"[{rows.start}:{rows.stop}]"
        name, key = name + part, (position, kind + part + " transposed" * transposed)
        if key not in self.uses:
            # A weight that is used both ways, as in a tied autoencoder, has two uses with different dimensions.
            taken = transposed and any(use.name == name for use in self.uses.values())
            self.uses[key] = Use(
                f"{name} (transposed)" if taken else name,
                kind,
                position,
                rows,
                Factor(top=self.top),
                Factor(top=self.top),
            )
        return self.uses[key]

    def _ran(self, position: int, kind: str, name: str, how: Reader, x: Tensor, h: Tensor) -> None:
        use = self._use(position, kind, name)
        why_not = unreadable(x) or unreadable(h)
        if why_not is not None:
            self.reasons[position] = use.why_not = why_not
            return
        if h.grad_fn is not None:
            graph.claim(h.grad_fn, self._mark)
        use.calls += 1
        x = x.detach()
        # The input is read when the gradient arrives: the graph keeps it until then, and memory has been freed by then.
        # So an input counts if its gradient arrives, also if it was recomputed in the backward pass (checkpointing). If
        # the graph does not keep it, because the weight is frozen, the input was converted (autocast) or will be
        # recomputed, it is read at once.
        kept = _is_kept(self.layers[position].parameter) and (x.dtype is h.dtype or not x.is_floating_point())
        again = torch._C._current_autograd_node() is not None
        later = kept or again
        use.early = use.early and not again
        if not later:
            how.x(use.x, x)
        keep, version = (x, x._version) if later else (None, 0)
        me = weakref.ref(self)

        def arrived(g: Tensor) -> None:
            capture = me()
            if capture is None or not capture._wants(use) or capture.broken is not None or use.why_not is not None:
                return
            if keep is not None and keep._version != version:
                # The graph has its own copy, such as a padded or a contiguous one.
                capture.reasons[position] = use.why_not = "its input was overwritten before the backward pass"
                return
            try:
                with torch._C._DisableAutocast():
                    if keep is not None:
                        how.x(use.x, keep)
                    how.g(use.g, g.detach())
                    use.arrived += 1
                    capture._perhaps_complete(use)
            except Exception as error:
                capture._failed(error)

        _on_gradient(h, arrived)

    def _perhaps_complete(self, use: Use) -> None:
        if self.complete is not None and use.early and use.arrived == use.calls and not use.done:
            use.x.close()
            use.g.close(use.g.pending / self.scale)
            use.done = True
            self.complete(use)

    def _failed(self, error: Exception) -> None:
        self.broken = self.broken or error


class _Hook:
    """The forward hook. It does not keep the capture alive, and its copies in a copied model do nothing."""

    def __init__(self, capture: Capture | None, position: int, kind: str, name: str, how: Reader | None) -> None:
        self.capture: Callable[[], Capture | None] = (lambda: None) if capture is None else weakref.ref(capture)
        self.position, self.kind, self.name, self.how = position, kind, name, how

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or is_capturing():
            return
        capture = self.capture()
        if capture is None or capture.broken is not None or self.how is None or not torch.is_grad_enabled():
            return
        if capture._looking or not listens(capture):
            return
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        given = args[:1] if args and isinstance(args[0], Tensor) else tensors((args, kwargs))
        if not given:
            return
        try:
            with torch.no_grad(), torch._C._DisableAutocast():
                capture._ran(self.position, self.kind, self.name, self.how, given[0], output)
        except Exception as error:
            capture._failed(error)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None, int, str, str, None]]:
        return _Hook, (None, 0, "", "", None)


def _on_gradient(h: Tensor, arrived: Callable[[Tensor], None]) -> None:
    """Call `arrived` with the gradient at a module's output, even if the output is modified in place afterwards."""
    base: Any = h._base if h._is_view() else None
    if base is None or base.grad_fn is None:
        h.register_hook(arrived)  # type: ignore[no-untyped-call]
        return
    # Modifying a view in place (products of [..., d] return one) removes its node from the graph, but not its base's.
    output = base.output_nr

    def comes(gradients: tuple[Tensor | None, ...]) -> None:
        if (g := gradients[output]) is not None:
            arrived(g)

    base.grad_fn.register_prehook(comes)


def _is_kept(weight: Tensor) -> bool:
    """Return True if the graph keeps the input that a weight is multiplied by, unchanged."""
    return weight.requires_grad and torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def _own(module: nn.Module, by_parameter: dict[int, int], by_module: dict[int, list[int]]) -> list[int]:
    """Return the layers whose weight a module multiplies by: its own, or one that it shares."""
    if id(module) in by_module:
        return by_module[id(module)]
    tied = by_parameter.get(id(getattr(module, "weight", None)))
    return [] if tied is None else [tied]
