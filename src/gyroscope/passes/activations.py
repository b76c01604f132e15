"""Activations on sampled steps: dying and full units, means, ν and rank, through forward hooks that come and go.

A *dying* unit is active for no sample of a batch, a *full* one for all of them (Huang et al., section 4.2). Means far
from zero give the curvature an outlying eigenvalue ν = ‖m‖² + 1, m being the mean activation (Grosse, section 3).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gyroscope.base.alone import listens
from gyroscope.errors import MonitorError
from gyroscope.layers.layer import Layer
from gyroscope.passes.modules import Layout, Role, activity_threshold, first_tensor, roles
from gyroscope.passes.units import Look, Tally, look
from gyroscope.store.record import QuantityInfo
from gyroscope.vectors.launch import is_capturing

_MEANING = {
    "dying": "share of the units that were active for no sample of the batch (a unit: a channel at a position)",
    "full": "share of the units that were active for every sample of the batch",
    "dying_channels": "share of the channels that were active for no sample and at no position",
    "full_channels": "share of the channels that were active for every sample and at every position",
    "activation_mean": "mean activation over units and samples; of the layer's own output where no module rectifies it",
    "nu": "ν = ‖m‖² + 1 of the channels' mean activations m: how far an eigenvalue of the curvature lies out",
    "activation_rank": "numerical rank of the matrix of activations, samples by channels",
}
COLUMNS = tuple(_MEANING)
INFO = {name: QuantityInfo(name, "1", meaning) for name, meaning in _MEANING.items()}

Source = Literal["own", "norm", "rectifier"]  # whose output was taken for a layer's activation

_LOG = logging.getLogger("gyroscope")


def unavailable(model: nn.Module) -> str | None:
    """Why the activations of a model cannot be seen through hooks; None where they can.

    >>> unavailable(nn.Linear(2, 2)) is None
    True
    >>> print(unavailable(torch.compile(nn.Linear(2, 2), backend="eager")))
    the model is compiled: its activations are not seen by hooks that come and go
    """
    for name, module in model.named_modules():
        what = f"the module {name.removeprefix('_orig_mod.')!r}" if name else "the model"
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            return f"{what} is compiled: its activations are not seen by hooks that come and go"
        if isinstance(module, torch.jit.ScriptModule):
            return f"{what} is scripted: its activations are not seen by hooks"
    return None


class ActivationProbe:
    """Looks at what the layers of a model put out, while it is attached.

    A layer's activation is the output of the first ReLU-like module that runs after it and before the next layer: any
    module without children whose class is called ...ReLU, ...ELU, GELU, SiLU, Swish, Mish or Threshold. A unit of it is
    active where the output is above zero, which for all of these is where the input is (for `Threshold`, above its
    threshold). Layers that no such module follows (functional ReLUs, a last layer) are looked at through their own
    output, or that of the normalisation module that takes it, and are active above `threshold`.

    Units are counted over all forward passes since `reset` that run with gradients enabled: evaluation under `no_grad`
    does not count. For convolutions a unit is a channel at a position, and for all else the last dimension; tokens of a
    sequence are samples. Activations that are recomputed in the backward pass (checkpointing) are not counted twice.
    Not seen, and NaN: a layer that was not used; a module that puts out no plain floating tensor; all but the last
    weight of a module that has several (recurrent networks); the input projection of `MultiheadAttention`.

    Outputs, gradients, statistics and random numbers stay as they are. Nothing is kept of the activations but small
    sums, and nothing waits for the device. An error is logged once and ends the looking, never the training.

    Args:
        model: the model; see `unavailable`.
        layers: the layers to look at, from `gyroscope.layers`.
        threshold: above it a layer's output counts as active where no ReLU-like module follows.
        rank: channels looked at for `activation_rank`, at most, and samples twice as many; 0 for none (NaN).

    >>> import gyroscope
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> with torch.no_grad():
    ...     _ = net[0].weight.zero_(), net[0].bias.copy_(torch.tensor([-1.0, 0.5, 1.0]))
    >>> probe = ActivationProbe(net, gyroscope.layers(net))
    >>> probe.attach()
    >>> _ = net(torch.randn(10, 2))
    >>> dict(zip(COLUMNS, [round(v, 3) for v in probe.collect()[0].tolist()]))
    {'dying': 0.333, 'full': 0.667, 'dying_channels': 0.333, 'full_channels': 0.667, 'activation_mean': 0.5,
     'nu': 2.25, 'activation_rank': 1.0}
    >>> probe.detach()
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], *, threshold: float = 0.0, rank: int = 512) -> None:
        if not layers:
            raise MonitorError("No layers were given to look at; `gyroscope.layers(model)` finds a model's.")
        if rank < 0:
            raise MonitorError(f"rank is {rank}; accepted are numbers of channels from 0 (no rank).")
        self.model, self.layers = model, tuple(layers)
        self.threshold, self.rank = threshold, rank
        self.error: Exception | None = None
        self._handles: list[RemovableHandle] = []
        self._roles: dict[int, Role] = {}
        self._sources: list[set[Source]] = [set() for _ in self.layers]
        self._expected: list[Source] = ["own"] * len(self.layers)
        self.reset()

    def attach(self) -> None:
        """Put forward hooks on the modules; again does nothing."""
        if self._handles:
            return
        self._roles = roles(self.model, self.layers)
        hook = _Hook(self)
        self._handles = [m.register_forward_hook(hook) for m in self.model.modules() if id(m) in self._roles]

    def detach(self) -> None:
        """Take all of them off; again does nothing. What was seen stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def reset(self) -> None:
        """Forget what was seen."""
        # A layer whose activation was always that of a module behind it is not looked at before that module runs; if it
        # does not run this time, the layer is not known, this once.
        for i, found in enumerate(self._sources):
            if found:
                self._expected[i] = next(iter(found)) if len(found) == 1 else "own"
        self._sources = [set() for _ in self.layers]
        self._tallies: list[Tally | None] = [None] * len(self.layers)
        self._pending: _Pending | None = None
        self._seen: set[int] = set()
        self._node: int | None = None

    def collect(self) -> Tensor:
        """What was seen since `reset`: [layers, columns] on the first layer's device, NaN for a layer not seen."""
        self._settle()
        device = self.layers[0].parameter.device
        unseen = torch.full((len(COLUMNS),), torch.nan, device=device)
        return torch.stack([
            unseen if tally is None else tally.values().to(device, torch.float32, non_blocking=True)
            for tally in self._tallies
        ])  # fmt: skip

    def _settle(self) -> None:
        """Count the last layer as it was seen so far, since no activation module has followed it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._count(pending)

    def _count(self, found: _Pending) -> None:
        self._sources[found.layer].add(found.source)
        before = self._tallies[found.layer]
        if found.seen is not None:
            self._tallies[found.layer] = Tally(found.seen) if before is None else before.add(found.seen)

    def _ran(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        role, x, node = self._roles.get(id(module)), first_tensor(output), _backward_node()
        if node != self._node:
            self._settle()
            self._node = node
        if isinstance(role, int):
            self._settle()
            if x is not None and (node is None or role not in self._seen):
                self._seen |= {role} if node is None else set()
                layout = Layout.of(self.layers[role], x)
                seen = self._look(x, layout, self.threshold) if self._expected[role] == "own" else None
                self._pending = _Pending(role, layout, "own", seen, weakref.ref(x))
        elif x is not None and (last := self._pending) is not None:
            if role == "rectifier":
                self._pending = None
                self._count(replace(last, source=role, seen=self._look(x, last.layout, activity_threshold(module))))
            elif args and last.output() is args[0]:
                seen = self._look(x, last.layout, self.threshold) if self._expected[last.layer] != "rectifier" else None
                self._pending = replace(last, source="norm", seen=seen, output=weakref.ref(x))

    def _look(self, x: Tensor, layout: Layout, threshold: float) -> Look:
        x, axis, positions = layout.place(x.detach())
        return look(x, axis, positions=positions, threshold=threshold, rank=self.rank)


@dataclass(frozen=True)
class _Pending:
    """The layer that ran last: as seen through its own output, until something better follows."""

    layer: int
    layout: Layout
    source: Source
    seen: Look | None
    output: Callable[[], Any]  # a weak reference


def _backward_node() -> int | None:
    """Which node of a backward pass recomputes what runs now; None in a forward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


class _Hook:
    """The forward hook. It does not keep the probe alive, and a copy of the model gets one that does nothing."""

    def __init__(self, probe: ActivationProbe | None) -> None:
        self.probe: Callable[[], ActivationProbe | None] = (lambda: None) if probe is None else weakref.ref(probe)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or is_capturing():
            return
        probe = self.probe()
        if probe is None or probe.error is not None or not torch.is_grad_enabled() or torch._C._get_tracing_state():
            return
        if not listens(probe):
            return
        try:
            with torch.no_grad(), torch._C._DisableAutocast():
                probe._ran(module, args, output)
        except Exception as error:
            probe.error = error
            probe.reset()
            _LOG.warning("Activations are no longer looked at: %s: %s", type(error).__name__, error)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None]]:
        return _Hook, (None,)
