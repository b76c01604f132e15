"""Activations on sampled steps: dying and full units, means, ν and rank, read by temporary forward hooks.

A *dying* unit is active for no sample of a batch, a *full* one for all of them (Huang et al., section 4.2). Means far
from zero give the curvature an outlying eigenvalue ν = ‖m‖² + 1, m being the mean activation (Grosse, section 3).
Modules are recognized by the names of their classes, so that those of transformers and of users count like torch's.
Activations are reduced to small tensors on their device at once: none outlives the call, and nothing waits for the
device.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gyroscope.base.hooks import is_capturing, listens
from gyroscope.errors import MonitorError
from gyroscope.layers.class_names import is_norm
from gyroscope.layers.layer import Layer
from gyroscope.store.record import QuantityInfo
from gyroscope.vectors.eager import accumulator
from gyroscope.vectors.layout import is_sharded

_MEANING = {
    "dying": "share of the units that were active for no sample of the batch (a unit: a channel at a position)",
    "full": "share of the units that were active for every sample of the batch",
    "dying_channels": "share of the channels that were active for no sample and at no position",
    "full_channels": "share of the channels that were active for every sample and at every position",
    "activation_mean": "mean activation over units and samples; of the layer's own output where no module rectifies it",
    "nu": "ν = ‖m‖² + 1 of the channels' mean activations m: how far an eigenvalue of the curvature lies out",
    "activation_rank": "numerical rank of the matrix of activations, samples by channels",
}
_ENTERS = {
    "input_mean": "mean of the numbers that enter the layer",
    "input_rms": "root mean square of the numbers that enter the layer",
    "input_low": "smallest number that enters the layer",
    "input_high": "largest number that enters the layer",
}
COLUMNS, INPUTS = tuple(_MEANING), tuple(_ENTERS)
INFO = {name: QuantityInfo(name, "1", meaning) for name, meaning in (_MEANING | _ENTERS).items()}

Source = Literal["own", "norm", "rectifier"]  # the module whose output was taken for a layer's activation

# Singular values below this share of their root mean square are taken for rounding errors.
_ROUNDING = {torch.bfloat16: 2.0**-4, torch.float16: 2.0**-7}
_ROUNDING_ELSE = 2.0**-16
_GOLDEN = 40503  # 2¹⁶ divided by the golden ratio: its multiples fill 0..2¹⁶ evenly

Role = int | Literal["norm", "rectifier"]

_RECTIFIER = re.compile(r"relu|elu|silu|swish|mish|^threshold$", re.IGNORECASE)

_LOG = logging.getLogger("gyroscope")


def unavailable(model: nn.Module) -> str | None:
    """Return why hooks cannot see the activations of a model; None if they can.

    >>> unavailable(nn.Linear(2, 2)) is None
    True
    >>> print(unavailable(torch.compile(nn.Linear(2, 2), backend="eager")))
    the model is compiled, so temporary hooks do not see its activations
    """
    for path, module in model.named_modules():
        # Lightning unwraps a compiled module, and keeps in `_compiler_ctx` what it needs to call its compiled methods.
        own = vars(module)
        in_place = any(own.get(name) is not None for name in ("_compiled_call_impl", "_compiler_ctx"))
        if type(module).__name__ == "OptimizedModule" or in_place:
            return f"{_named(path)} is compiled, so temporary hooks do not see its activations"
        if isinstance(module, torch.jit.ScriptModule):
            return f"{_named(path)} is scripted, so hooks do not see its activations"
    return None


def _named(path: str) -> str:
    return f"the module {path.removeprefix('_orig_mod.')!r}" if path else "the model"


class ActivationProbe:
    """Measures the activations of a model's layers while it is attached.

    A layer's activation is the output of the first ReLU-like module that runs after it and before the next layer: any
    module without children whose class is called ...ReLU, ...ELU, GELU, SiLU, Swish, Mish or Threshold. A unit is
    active where this output is above zero, which for all of these means that the input is (for `Threshold`, above its
    threshold). For layers without such a module (functional ReLUs, a last layer) the activation is their own output, or
    that of the normalizer that takes it, and is active above `threshold`.

    Units are counted over all forward passes since `reset` that run with gradients enabled: evaluation under `no_grad`
    does not count. For convolutions a unit is a channel at a position, otherwise an index of the last dimension; tokens
    of a sequence are samples. Activations that are recomputed in the backward pass (checkpointing) are not counted
    twice. Not seen, and NaN: a layer that was not used; a module whose output is not a plain floating-point tensor; all
    but the last weight of a module that has several (recurrent networks); the input projection of `MultiheadAttention`.

    Outputs, gradients, statistics and random numbers are not changed. Only small sums of the activations are kept, and
    nothing waits for the device. An error is logged once and ends the measurement, never the training.

    Args:
        model: the model; see `unavailable`.
        layers: the layers to measure, from `gyroscope.layers`.
        threshold: a layer's output above it is active if no ReLU-like module follows.
        rank: the most channels used for `activation_rank`, with twice as many samples; 0 for no rank (NaN).

    >>> import gyroscope
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> with torch.no_grad():
    ...     _ = net[0].weight.zero_(), net[0].bias.copy_(torch.tensor([-1.0, 0.5, 1.0]))
    >>> probe = ActivationProbe(net, gyroscope.layers(net))
    >>> probe.attach()
    >>> _ = net(torch.ones(10, 2))
    >>> dict(zip(COLUMNS, [round(v, 3) for v in probe.collect()[0].tolist()]))
    {'dying': 0.333, 'full': 0.667, 'dying_channels': 0.333, 'full_channels': 0.667, 'activation_mean': 0.5,
     'nu': 2.25, 'activation_rank': 1.0}
    >>> dict(zip(INPUTS, probe.inputs()[0].tolist()))
    {'input_mean': 1.0, 'input_rms': 1.0, 'input_low': 1.0, 'input_high': 1.0}
    >>> probe.detach()
    """

    what = "Activations"

    def __init__(self, model: nn.Module, layers: Sequence[Layer], *, threshold: float = 0.0, rank: int = 512) -> None:
        if not layers:
            raise MonitorError("`layers` must have at least one layer, got none. Try gyroscope.layers(model).")
        if rank < 0:
            raise MonitorError(f"`rank` must be a number of channels ≥ 0, got {rank}. Try 512, or 0 for no rank.")
        self.model, self.layers = model, tuple(layers)
        self.threshold, self.rank = threshold, rank
        self.error: Exception | None = None
        self._handles: list[RemovableHandle] = []
        self._roles: dict[int, Role] = {}
        self._sources: list[set[Source]] = [set() for _ in self.layers]
        self._expected: list[Source] = ["own"] * len(self.layers)
        self.reset()

    def attach(self) -> None:
        """Attach forward hooks to the modules, if they are not attached."""
        if self._handles:
            return
        modules = list(self.model.modules())
        self._roles = _roles(modules, self.layers)
        hook = Hook(self)
        self._handles = [m.register_forward_hook(hook) for m in modules if id(m) in self._roles]

    def detach(self) -> None:
        """Remove the hooks, if they are attached. What was measured stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def reset(self) -> None:
        """Discard what was measured."""
        # A layer whose activation was always that of a following module is not measured before that module runs. If the
        # module does not run this time, the layer is unknown this once.
        for i, found in enumerate(self._sources):
            if found:
                self._expected[i] = next(iter(found)) if len(found) == 1 else "own"
        self._sources = [set() for _ in self.layers]
        self._tallies: list[_Tally | None] = [None] * len(self.layers)
        self._inputs: list[list[Tensor]] = [[] for _ in self.layers]
        self._pending: _Pending | None = None
        self._seen: set[int] = set()
        self._node: int | None = None

    def collect(self) -> Tensor:
        """Return the numbers since `reset`, [layers, columns] on the first layer's device; NaN for unseen layers."""
        self._settle()
        device = self.layers[0].parameter.device
        unseen = torch.full((len(COLUMNS),), torch.nan, device=device)
        return torch.stack([
            unseen if tally is None else tally.values().to(device, torch.float32, non_blocking=True)
            for tally in self._tallies
        ])  # fmt: skip

    def inputs(self) -> Tensor:
        """Return the numbers of `INPUTS` since `reset`, [layers, columns]; NaN for layers that got no tensor."""
        device = self.layers[0].parameter.device
        unfed = torch.full((len(INPUTS),), torch.nan, device=device)
        return torch.stack([
            _together(fed).to(device, torch.float32, non_blocking=True) if fed else unfed for fed in self._inputs
        ])  # fmt: skip

    def _settle(self) -> None:
        """Count the last layer as it was seen so far, because no activation module has followed it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._count(pending)

    def _count(self, found: _Pending) -> None:
        self._sources[found.layer].add(found.source)
        before = self._tallies[found.layer]
        if found.seen is not None:
            self._tallies[found.layer] = _Tally(found.seen) if before is None else before.add(found.seen)

    def ran(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Look at a call of a module."""
        role, x, node = self._roles.get(id(module)), first_tensor(output), _backward_node()
        if node != self._node:
            self._settle()
            self._node = node
        if isinstance(role, int):
            self._settle()
            if x is not None and (node is None or role not in self._seen):
                self._seen |= {role} if node is None else set()
                if args:
                    self._feed(role, args[0])
                layout = Layout.of(self.layers[role], x)
                seen = self._look(x, layout, self.threshold) if self._expected[role] == "own" else None
                self._pending = _Pending(role, layout, "own", seen, weakref.ref(x))
        elif x is not None and (last := self._pending) is not None:
            if role == "rectifier":
                self._pending = None
                seen = self._look(x, last.layout, _activity_threshold(module))
                self._count(_Pending(last.layer, last.layout, role, seen, last.output))
            elif args and last.output() is args[0]:
                seen = self._look(x, last.layout, self.threshold) if self._expected[last.layer] != "rectifier" else None
                self._pending = _Pending(last.layer, last.layout, "norm", seen, weakref.ref(x))

    def _feed(self, layer: int, x: Any) -> None:
        if (fed := _fed(x)) is not None:
            self._inputs[layer].append(fed)

    def _look(self, x: Tensor, layout: Layout, threshold: float) -> _Look:
        x, axis, positions = layout.place(x.detach())
        return look(x, axis, positions=positions, threshold=threshold, rank=self.rank)


def _fed(x: Any) -> Tensor | None:
    """Return the number, sum, sum of squares, minimum and maximum of what enters a layer; None if it is not dense."""
    if not isinstance(x, Tensor) or not x.numel() or x.is_complex() or is_sharded(x) or not _is_dense(x):
        return None
    x = x.detach()
    values = x if x.is_floating_point() else x.to(torch.float32)
    kind = accumulator(x.device)
    low, high = values.aminmax()
    total, squares = values.sum(dtype=kind), torch.linalg.vector_norm(values, dtype=kind).square()
    return torch.stack([torch.full_like(total, x.numel()), total, squares, low.to(kind), high.to(kind)])


def _together(fed: Sequence[Tensor]) -> Tensor:
    """Return the mean, root mean square, minimum and maximum over calls."""
    count, total, squares, low, high = torch.stack(list(fed)).unbind(1)
    n = count.sum()
    return torch.stack([total.sum() / n, (squares.sum() / n).sqrt(), low.amin(), high.amax()])


@dataclass(frozen=True)
class _Pending:
    """The layer that ran last, with its own output as activation until a better one follows."""

    layer: int
    layout: Layout
    source: Source
    seen: _Look | None
    output: Callable[[], Any]  # a weak reference


def _backward_node() -> int | None:
    """Return the number of the backward node that recomputes the running module; None in a forward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


class Probe(Protocol):
    """An instrument that forward hooks call.

    Attributes:
        what: what it measures, in the plural.
        error: the error that ended it, or None.
    """

    what: str
    error: Exception | None

    def ran(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Look at a call of a module."""

    def reset(self) -> None:
        """Discard what was measured."""


class Hook:
    """A forward hook of a probe. It does not keep the probe alive, and its copies in a copied model do nothing.

    An error of the probe is logged once and ends the measurement, never the training.
    """

    def __init__(self, probe: Probe | None) -> None:
        self.probe: Callable[[], Probe | None] = (lambda: None) if probe is None else weakref.ref(probe)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Pass a call of a module on to the probe, if it listens."""
        if torch.compiler.is_compiling() or is_capturing():
            return
        probe = self.probe()
        if probe is None or probe.error is not None or not torch.is_grad_enabled() or torch._C._get_tracing_state():
            return
        if not listens(probe):
            return
        try:
            with torch.no_grad(), torch._C._DisableAutocast():
                probe.ran(module, args, output)
        except Exception as error:
            probe.error = error
            probe.reset()
            first_line = str(error).partition("\n")[0]
            _LOG.warning("%s are no longer measured: %s: %s", probe.what, type(error).__name__, first_line)

    def __reduce__(self) -> tuple[type[Hook], tuple[None]]:
        return Hook, (None,)


def _roles(modules: Sequence[nn.Module], layers: Sequence[Layer]) -> dict[int, Role]:
    """Return the roles of modules by id: the position of the layer that they output, "norm" or "rectifier".

    >>> from gyroscope.layers.layer import layers
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.LeakyReLU(), nn.Tanh())
    >>> list(_roles(list(net.modules()), layers(net)).values())
    [0, 'norm', 'rectifier']
    """
    found: dict[int, Role] = {}
    own = {id(layer.module): position for position, layer in enumerate(layers)}  # the last of several on one module
    for module in modules:
        if isinstance(module, nn.MultiheadAttention):
            # It applies its `out_proj` without calling it: its output is that of this layer.
            last = own.get(id(module.out_proj))
            if last is not None:
                found[id(module)] = last
        elif id(module) in own:
            # A module that contains other layers outputs theirs, not that of its own weight.
            leaf = not module._modules
            if leaf or not any(id(child) in own for child in module.modules() if child is not module):
                found[id(module)] = own[id(module)]
        elif not module._modules and (role := _role_of(cast(Any, type(module)))) is not None:
            found[id(module)] = role
    return found


@lru_cache(maxsize=1024)
def _role_of(kind: Any) -> Literal["norm", "rectifier"] | None:
    if is_norm(kind):
        return "norm"
    return "rectifier" if any(_RECTIFIER.search(cls.__name__) for cls in kind.__mro__) else None


def _activity_threshold(module: nn.Module) -> float:
    """Return the output above which a unit of a ReLU-like module is active: 0, except for `nn.Threshold`.

    The outputs of ReLU, ReLU6, LeakyReLU, RReLU, PReLU with positive slopes, ELU, CELU, SELU, GELU, SiLU, Mish and
    Hardswish are positive exactly where their inputs are. So the output is enough, also of a module that overwrites its
    input.

    >>> _activity_threshold(nn.Threshold(0.1, 0.0)), _activity_threshold(nn.GELU())
    (0.1, 0.0)
    """
    return float(module.threshold) if isinstance(module, nn.Threshold) else 0.0


def first_tensor(output: Any) -> Tensor | None:
    """Return the activations in a module's output: the tensor, or the first of a tuple; None if there are none."""
    while isinstance(output, tuple | list):  # tuples of tuples: a packed sequence and its last state
        output = next((item for item in output if isinstance(item, Tensor | tuple | list)), None)
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.numel() == 0 or output.dim() == 0:
        return None
    # Inside `torch.func` transforms, and of tensors sharded over ranks, only parts would be visible.
    strange = is_sharded(output) or not _is_dense(output)
    return None if strange or torch._C._functorch.is_functorch_wrapped_tensor(output) else output


def _is_dense(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested


@dataclass(frozen=True)
class Layout:
    """The place of the channels in a layer's output.

    Attributes:
        width: the number of channels.
        spatial: the number of spatial dimensions, 1 to 3 for a convolution and else 0.
    """

    width: int
    spatial: int

    @classmethod
    def of(cls, layer: Layer, x: Tensor) -> Layout:
        """Return the layout of a layer whose output is `x`."""
        if isinstance(layer.module, nn.modules.conv._ConvNd):
            spatial = len(layer.module.kernel_size)
            return cls(x.shape[x.dim() - spatial - 1], spatial)
        return cls(x.shape[-1], 0)

    def place(self, x: Tensor) -> tuple[Tensor, int, bool]:
        """Return activations with a batch dimension, the axis of their channels, and whether positions follow it.

        They are laid out like the layer's output unless the shape says otherwise: pooled, flattened, or with channels
        moved.

        >>> Layout(8, 2).place(torch.zeros(4, 8, 5, 5))[1:], Layout(8, 2).place(torch.zeros(4, 5, 5, 8))[1:]
        ((1, True), (3, False))
        """
        if x.dim() == 1 or (self.spatial and x.dim() == self.spatial + 1 and x.shape[0] == self.width):
            x = x[None]
        last = x.shape[-1] == self.width
        if self.spatial and x.dim() == self.spatial + 2 and (x.shape[1] == self.width or not last):
            return x, 1, True
        moved = not last and x.dim() > 2 and x.shape[1] == self.width
        return x, 1 if moved else x.dim() - 1, False


@dataclass(frozen=True)
class _Look:
    """The activations of a layer in one call, reduced.

    Attributes:
        alive: True for units that were active for some sample, [channels, positions].
        full: True for units that were active for all samples.
        total: the sum over samples and positions, [channels].
        samples: the number of summands.
        rows: some of the samples, [rows, channels], for the rank; None if it is not wanted.
    """

    alive: Tensor
    full: Tensor
    total: Tensor
    samples: int
    rows: Tensor | None


def look(x: Tensor, axis: int, *, positions: bool, threshold: float, rank: int) -> _Look:
    """Reduce the activations `x`, whose channels lie along `axis`.

    Args:
        x: the activations, not empty.
        axis: the dimension of the channels.
        positions: True if the dimensions after `axis` are positions of an image, so that a unit is a channel at a
            position and dimensions before `axis` are samples; otherwise all dimensions but `axis` are samples.
        threshold: a unit is active where its activation is above this.
        rank: the most channels used for the rank, with twice as many samples; 0 for no rank.

    >>> x = torch.tensor([[1.0, -1.0, 2.0], [1.0, -2.0, -2.0]])
    >>> seen = look(x, 1, positions=False, threshold=0.0, rank=8)
    >>> seen.alive[:, 0].tolist(), seen.full[:, 0].tolist(), seen.total.tolist()
    ([True, False, True], [True, False, False], [2.0, -3.0, 0.0])
    """
    others = [d for d in range(x.dim()) if d != axis]
    over = others[:axis] if positions else others
    alive, full = x.amax(over) > threshold, x.amin(over) > threshold
    channels = x.shape[axis]
    total = x.sum(others, dtype=accumulator(x.device))
    rows = _rows(x, axis, rank) if rank else None
    return _Look(alive.reshape(channels, -1), full.reshape(channels, -1), total, x.numel() // channels, rows)


def _rows(x: Tensor, axis: int, most: int) -> Tensor:
    """Return a copy of some of the samples and channels, at most [2·most, most]."""
    picked, channels = samples(x, axis, 2 * most), x.shape[axis]
    return picked if channels <= most else picked.index_select(1, spread(channels, most, x.device))


def samples(x: Tensor, axis: int, most: int) -> Tensor:
    """Return a copy of at most `most` of the samples of `x`, [samples, channels]; its channels lie along `axis`."""
    x = x.movedim(axis, -1)
    *leading, channels = x.shape
    at = spread(x.numel() // channels, most, x.device)
    index: list[Tensor] = []
    for size in reversed(leading):
        index.insert(0, at % size)
        at = at // size
    return x[tuple(index)] if index else x[None]


class _Tally:
    """The sum of several calls of one layer."""

    def __init__(self, first: _Look) -> None:
        self.maps = {first.alive.shape[1]: (first.alive, first.full)}
        self.total, self.samples = first.total, first.samples
        self.rank = numerical_rank(first.rows) if first.rows is not None else None

    def add(self, seen: _Look) -> _Tally:
        """Add one more call; if its number of channels differs, start again with it."""
        if seen.total.shape != self.total.shape:
            return _Tally(seen)
        size = seen.alive.shape[1]
        alive, full = self.maps.get(size, (seen.alive, seen.full))
        self.maps[size] = alive | seen.alive, full & seen.full
        self.total, self.samples = self.total + seen.total, self.samples + seen.samples
        if seen.rows is not None and self.rank is not None:
            self.rank = torch.maximum(self.rank, numerical_rank(seen.rows))
        return self

    def values(self) -> Tensor:
        """Return the numbers of `COLUMNS`, in that order; all NaN if an activation is not finite."""
        alive = torch.cat([a for a, _ in self.maps.values()], dim=1)
        full = torch.cat([f for _, f in self.maps.values()], dim=1)
        kind = self.total.dtype
        mean = self.total / self.samples
        nan = torch.full((), torch.nan, dtype=kind, device=mean.device)
        found = torch.stack([
            1 - alive.to(kind).mean(),
            full.to(kind).mean(),
            1 - alive.any(1).to(kind).mean(),
            full.all(1).to(kind).mean(),
            mean.mean(),
            mean.square().sum() + 1,
            nan if self.rank is None else self.rank.to(kind),
        ])  # fmt: skip
        return torch.where(mean.sum().isfinite(), found, nan)


def numerical_rank(rows: Tensor) -> Tensor:
    """Return the rank of a matrix: the number of singular values above the rounding errors of its dtype.

    These are σ > tol‖A‖_F/√k, k the smaller side of A, with tol = 2⁻¹⁶, or 2⁻⁷ for float16 and 2⁻⁴ for bfloat16. Their
    squares are eigenvalues of AᵀA. The number of these above τ is the number of positive eigenvalues of AᵀA − τI, which
    by Sylvester's law of inertia is that of its factor D in LDLᵀ. Unlike eigenvalues, this does not wait for the
    device.

    >>> numerical_rank(torch.ones(5, 3) + torch.tensor([0.0, 0.0, 1.0]))
    tensor(1., dtype=torch.float64)
    >>> numerical_rank(torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 2.0]]))
    tensor(2., dtype=torch.float64)
    """
    tol = _ROUNDING.get(rows.dtype, _ROUNDING_ELSE)
    if accumulator(rows.device) is not torch.float64:
        return torch.full((), torch.nan, device=rows.device)
    a = rows.to(torch.float64)
    gram = a.T @ a if a.shape[0] > a.shape[1] else a @ a.T
    square = gram.diagonal().mean()
    gram = gram.nan_to_num(0.0, 0.0, 0.0)
    gram.diagonal().sub_(tol**2 * square.nan_to_num(0.0, 0.0, 0.0))
    return torch.where(square.isfinite(), positive_eigenvalues(gram), torch.nan)


def positive_eigenvalues(symmetric: Tensor) -> Tensor:
    """Return the number of positive eigenvalues of a symmetric matrix: that of positive pivots of its elimination.

    >>> positive_eigenvalues(torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64))
    tensor(1., dtype=torch.float64)
    """
    if symmetric.device.type == "cuda":
        # LDLᵀ would choose its pivots on the host. Without pivoting U = DLᵀ, and a tiny pivot makes the next one large
        # and of the other sign, so the count stays right, except for a pivot of exactly zero.
        upper: Tensor = torch.linalg.lu_factor_ex(symmetric, pivot=False)[0]
        return (upper.diagonal() > 0).sum().to(symmetric.dtype)
    factor, pivots, _ = torch.linalg.ldl_factor_ex(symmetric)
    # A negative pivot marks a row of a 2×2 block of D, which has one positive and one negative eigenvalue.
    return torch.where(pivots < 0, 0.5, (factor.diagonal() > 0).to(symmetric.dtype)).sum()


def spread(n: int, most: int, device: torch.device) -> Tensor:
    """Return at most `most` of the positions 0..n−1, ascending: all of them, or one of each of `most` equal stretches.

    The offset within the stretch advances by the golden ratio, so that the choice does not align with rows, image sizes
    or anything else that repeats. No random numbers are drawn, and nothing waits for the device.

    >>> spread(4, 10, torch.device("cpu")).tolist()
    [0, 1, 2, 3]
    >>> spread(1000, 5, torch.device("cpu")).tolist()
    [0, 323, 447, 770, 894]
    """
    if n <= most:
        return torch.arange(n, device=device)
    i = torch.arange(most + 1, device=device)
    edge = i * n // most
    start, length = edge[:-1], edge[1:] - edge[:-1]
    return start + ((i[:-1] * _GOLDEN % 65536) * length) // 65536
