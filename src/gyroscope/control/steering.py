"""A controlled step: every update as w' = a w + b s, with a and b from three inner products per layer.

With s the displacement that the inner optimizer proposes, ρ the rate and w₀ the initial weights, Algorithm 1 of the
layer-rotation paper is

    1  u  = s − (⟨s,w⟩/⟨w,w⟩) w          onto the tangent of the sphere          (`project`)
    2  u ← u ‖w‖/‖u‖                     the rate becomes an angle               (`scale="relative"`)
    3  w' = w + ρ u
    4  w' ← w' ‖w₀‖/‖w'‖                 back to the sphere                      (`reproject`)

u is orthogonal to w, so ‖u‖² = ⟨s,s⟩ − ⟨w,s⟩²/⟨w,w⟩ and ‖w'‖² = ⟨w,w⟩ + ρ²‖w‖²: no further reduction is needed.

There are three ways to get s for a group of layers, all with the same result:

- *fused*: torch's common optimizers on CUDA, and on CPUs with the compiled backend. The inner rule runs inside the pass
  that computes the inner products;
- *plain*: SGD without momentum elsewhere. The gradient is the displacement, up to sign;
- *proposed*: everything else. The inner optimizer steps, and what it does to the layers is caught (`proposal`).

Other parameters are stepped by the inner optimizer itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, repeat
from operator import is_
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from gyroscope.base.hooks import is_capturing
from gyroscope.control.proposal import Group, Proposal, Proposer, decay_of, kernel_of
from gyroscope.control.roster import Entry, Roster, few
from gyroscope.control.torch_contract import OWN, floats_in
from gyroscope.errors import ControlError
from gyroscope.vectors import backend, combine_, dots
from gyroscope.vectors.eager import accumulator
from gyroscope.vectors.launch import to_device
from gyroscope.vectors.layout import any_sharded, is_dense, local, splits_in_memory

Array = TypeVar("Array", Tensor, npt.NDArray[np.float64])
Others = Literal["inner", "frozen"]

# State that one bad gradient does not spoil: a count, and the history of LBFGS, which is of the whole model.
_NOT_OF_GRADIENTS = ("step", "old_dirs", "old_stps", "ro")

# A tangent below this share of the displacement (both squared) is rounding noise: there is no direction to turn to.
# The same holds for weights that a step reduces to this share of their length and of its own.
TANGENT_FLOOR = 1e-14
# Where inner products are float32, as in JAX: a displacement along the weights was seen with a tangent of 7e-7.
_NARROW_FLOOR = 1e-5


@dataclass(frozen=True)
class Law:
    """The operations that are performed, of the four.

    Attributes:
        project: perform operation 1.
        scale: operation 2: `"relative"` for a step of length ρ‖w‖, `"unit"` for a step of length ρ.
        reproject: perform operation 4.
        growth: without operation 4, the largest growth of a norm in one step, as a share of ‖w₀‖.
    """

    project: bool = True
    scale: Literal["relative", "unit"] = "relative"
    reproject: bool = True
    growth: float | None = None

    def said(self) -> str:
        """Return the law in a sentence.

        >>> print(Law().said())
        Each step turns a layer by arctan ρ, and holds its norm at ‖w₀‖.
        >>> print(Law(project=False, reproject=False, growth=1e-4).said())
        Each step of a layer is ρ‖w‖ long; its norm grows by at most 0.0001 ‖w₀‖ per step.
        """
        if self == Law():
            return "Each step turns a layer by arctan ρ, and holds its norm at ‖w₀‖."
        length = "ρ‖w‖" if self.scale == "relative" else "ρ"
        step = f"Each step of a layer is {length} long{' and at a right angle to its weights' if self.project else ''}"
        if self.reproject:
            return f"{step}; its norm is then set back to ‖w₀‖."
        free = "is free" if self.growth is None else f"grows by at most {self.growth:g} ‖w₀‖ per step"
        return f"{step}; its norm {free}."


def coefficients(dots: Array, rate: Array, radius: Array, law: Law, *, xp: Any = None) -> tuple[Array, Array, Array]:
    """Return (a, b, moved) from `dots` = [⟨w,w⟩, ⟨w,s⟩, ⟨s,s⟩] per layer, `rate` = ρ and `radius` = ‖w₀‖.

    Where there is no step or no direction (ρ = 0, s = 0, s parallel to w under operation 1, a step that ends at 0
    before operation 4, w = 0, anything not finite), a = 1, b = 0 and `moved` is False. The arrays are tensors, or NumPy
    arrays, which on a CPU cost a fraction at these sizes; those of another framework come with its functions, `xp`.

    >>> w_and_s = torch.tensor([[1.0, 0.0, 4.0]], dtype=torch.float64)   # w = (1, 0), s = (0, 2)
    >>> a, b, moved = coefficients(w_and_s, torch.tensor([1.0]), torch.tensor([1.0]), Law())
    >>> torch.stack([a, 2 * b], 1)                                       # w' = (a, 2b): turned by 45°
    tensor([[0.7071, 0.7071]], dtype=torch.float64)
    """
    xp = xp or (torch if isinstance(dots, Tensor) else np)
    floor = TANGENT_FLOOR if "64" in str(dots.dtype) else _NARROW_FLOOR
    ww, ws, ss = dots[:, 0], dots[:, 1], dots[:, 2]
    along = ws / ww
    square = ss - along * ws if law.project else ss
    moved = xp.isfinite(ww + abs(ws) + ss) & (ww > 0) & (ss > 0)
    moved = moved & (rate > 0) & xp.isfinite(rate) & (square > floor * ss)
    norm = xp.sqrt(ww)
    length = rate * (norm if law.scale == "relative" else xp.ones_like(norm))
    c = length / xp.sqrt(square)
    one = xp.ones_like(c)
    # ‖c u‖ is the length, whatever c: for a tiny displacement c² would be infinite.
    far = ww + length * length
    if law.project:
        a = 1 - c * along
        new = xp.sqrt(far)
    else:
        a = one
        new = xp.sqrt(xp.maximum(far + 2 * c * ws, xp.zeros_like(far)))
    moved = moved & xp.isfinite(new)
    if law.reproject:
        moved = moved & (new * new > floor * far)
        k = radius / new
    elif law.growth is not None:
        k = xp.minimum(one, (norm + law.growth * radius) / new)
    else:
        k = one
    return xp.where(moved, k * a, one), xp.where(moved, k * c, xp.zeros_like(c)), moved


@dataclass(frozen=True)
class Ledger:
    """The numbers that are kept between steps, one per row; a row is a layer, or a segment of one.

    Attributes:
        multiplier: the row's factor on the rate.
        radius: ‖w₀‖, and −1 before the first step.
        skipped: the number of steps that were skipped because something was not finite.
        bad: 1 if the last step was skipped.
        power1: β₁ᵗ of an inner rule with bias correction, for NAdam the product of its μ; for momentum 1 before the
            first step, then 0.
        power2: β₂ᵗ of an inner rule with bias correction.
        age: t, the number of steps of an inner rule with bias correction.
        first: for weights that begin at zero, the length of their first step by their rate; else 0.
        moments: for norms that are learned, the running means of d and d², d = ∂loss/∂ln‖w‖, and their number of steps.
    """

    multiplier: Tensor
    radius: Tensor
    skipped: Tensor
    bad: Tensor
    power1: Tensor
    power2: Tensor
    age: Tensor
    first: Tensor
    moments: Tensor

    @classmethod
    def blank(cls, rows: int, device: torch.device) -> Ledger:
        """Return a ledger as it is before the first step.

        >>> Ledger.blank(2, torch.device("cpu")).radius
        tensor([-1., -1.], dtype=torch.float64)
        """
        exact = accumulator(device)
        return cls(
            multiplier=torch.ones(rows, dtype=exact, device=device),
            radius=torch.full((rows,), -1.0, dtype=exact, device=device),
            skipped=torch.zeros(rows, dtype=torch.int64, device=device),
            bad=torch.zeros(rows, dtype=torch.int64, device=device),
            power1=torch.ones(rows, dtype=exact, device=device),
            power2=torch.ones(rows, dtype=exact, device=device),
            age=torch.zeros(rows, dtype=exact, device=device),
            first=torch.zeros(rows, dtype=exact, device=device),
            moments=torch.zeros(rows, 3, dtype=exact, device=device),
        )


# The number of steps between two looks at the layers of zeros.
_CHECK_GROWING = 64

# Layers are updated together up to this many elements, so that the update finds them in a CPU's cache.
_TOGETHER = 1 << 21


@dataclass(frozen=True)
class Move:
    """Layers on one device and their displacements, s = sign · displacement + along · w.

    Attributes:
        weights: the layers' weights, updated in place.
        displacements: one tensor per layer.
        rows: the layers' rows in the ledger, `counts[l]` of them for layer l.
        counts: the number of segments of each layer.
        lr: ρ, before the multipliers.
        sign: −1 where gradients are given as displacements.
        along: the multiple of the weights in the displacement.
        grows: whether weights that began at zero may still be zero.
    """

    weights: list[Tensor]
    displacements: list[Tensor]
    rows: list[int]
    counts: list[int]
    lr: float | Tensor
    sign: float = 1.0
    along: float = 0.0
    grows: bool = False


def sweep(moves: Sequence[Move], ledger: Ledger, law: Law) -> None:
    """Update w ← a w + b s for every move, all on the ledger's device, and the ledger with it."""
    if any(any_sharded(one) for move in moves for one in (move.weights, move.displacements)):
        # The inner products of all layers together, whatever their groups: one all-reduce.
        w = [w for m in moves for w in m.weights]
        d = [d for m in moves for d in m.displacements]
        products = dots({"ww": (w, w), "wd": (w, d), "dd": (d, d)}, segments=[n for m in moves for n in m.counts])
        start = 0
        for move in moves:
            a, b = _factors(move, products[start : start + len(move.rows)], ledger, law)
            combine_(move.weights, move.displacements, a, b, segments=move.counts)
            start += len(move.rows)
        return
    for move in moves:
        # Displacements have the shapes and devices of their weights, so the backend is called without checking them.
        device = move.weights[0].device
        compute = backend(device)
        for part in _in_cache(move) if device.type == "cpu" else [move]:
            products = compute.dots([part.weights, part.displacements], [(0, 0), (0, 1), (1, 1)], part.counts)
            a, b = _factors(part, products, ledger, law)
            compute.combine_(part.weights, part.displacements, a, b, part.counts)


def _in_cache(move: Move) -> Iterator[Move]:
    """Split a move into parts that stay in the cache until they are updated."""
    start = first = together = 0
    for i, w in enumerate(move.weights):
        together += w.numel()
        if together >= _TOGETHER or i + 1 == len(move.weights):
            counts = move.counts[start : i + 1]
            yield replace(
                move,
                weights=move.weights[start : i + 1],
                displacements=move.displacements[start : i + 1],
                rows=move.rows[first : first + sum(counts)],
                counts=counts,
            )
            start, first, together = i + 1, first + sum(counts), 0


def _factors(move: Move, products: Any, ledger: Ledger, law: Law) -> tuple[Tensor, Tensor]:
    """Return the factors on the weights and on the displacements as given, one per row, and update the ledger."""
    device, sign, along = products.device, move.sign, move.along
    here: Any = _index(move.rows, device)
    xp: Any = torch
    book: dict[str, Any] = vars(ledger)
    lr: Any = move.lr
    if device.type == "cpu":
        # Views of the same memory: arithmetic on a few numbers is much quicker in NumPy.
        xp, products, book = np, products.numpy(), {name: value.numpy() for name, value in book.items()}
        lr = float(lr)
    else:
        lr = _scalar(lr, products)
    with np.errstate(all="ignore"):
        ww, wd, dd = products[:, 0], products[:, 1], products[:, 2]
        if sign != 1.0 or along != 0.0:
            products = xp.stack([ww, sign * wd + along * ww, dd + 2 * sign * along * wd + along * along * ww], 1)
        known, rate = book["radius"][here], lr * book["multiplier"][here]
        radius = xp.where((known <= 0) & xp.isfinite(ww), xp.sqrt(ww), known)
        a, b, _ = coefficients(products, rate, radius, law)
        bad = ~xp.isfinite(products).all(1)
        if move.grows:
            # Weights of zero take a plain step, and have a direction and a radius from the next step on.
            first, ss = book["first"][here], products[:, 2]
            steps = (ww == 0) & (first > 0) & ~bad & (ss > 0) & (rate > 0) & xp.isfinite(rate)
            b = xp.where(steps, rate * first / xp.sqrt(ss), b)
        book["radius"][here] = radius
        book["bad"][here] = bad
        book["skipped"][here] += bad
        a, b = a + along * b, sign * b
    return torch.as_tensor(a, device=device), torch.as_tensor(b, device=device)


# Decay rates of the moments of a norm that is learned, and its ε: where the part of a gradient along the weights is a
# smaller share of it, as in scale-invariant layers, it is rounding, and the norm stays.
_NORM_BETAS = (0.9, 0.95)
_NORM_FLOOR = 1e-4


def _learn(ledger: Ledger, rows: Sequence[int], sums: Tensor, lr: float | Tensor, sign: float) -> None:
    """Take a step of Adam on the logarithm of radii, from `sums` = [⟨w,∇⟩, ⟨∇,∇⟩] per row."""
    here: Any = _index(rows, sums.device)
    d, gg = sign * sums[:, 0], sums[:, 1]
    radius, (m, v, t) = ledger.radius[here], ledger.moments[here].unbind(1)
    rate = _scalar(lr, radius) * ledger.multiplier[here]
    known = torch.isfinite(d) & torch.isfinite(gg) & (gg > 0) & (radius > 0) & torch.isfinite(rate) & (rate > 0)
    first, second = _NORM_BETAS
    t = t + 1
    m, v = first * m + (1 - first) * d, second * v + (1 - second) * d * d
    floor = _NORM_FLOOR * torch.sqrt(gg) * radius
    step = m / (1 - first**t) / (torch.sqrt(v / (1 - second**t)) + floor)
    ledger.radius[here] = torch.where(known, radius * torch.exp(-rate * step), radius)
    ledger.moments[here] = torch.where(known[:, None], torch.stack([m, v, t], 1), ledger.moments[here])


def _scalar(lr: float | Tensor, like: Tensor) -> float | Tensor:
    """Return a rate of one number that can be multiplied with a tensor, without waiting for its device."""
    if not isinstance(lr, Tensor):
        return lr
    return lr.item() if lr.device.type == "cpu" else lr.to(like.device, like.dtype).reshape(())


def _index(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Return consecutive rows as a slice, which needs no copy to the device, and other rows as a tensor."""
    if rows and rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return to_device(np.array(rows, dtype=np.int64), device)


class Members(tuple[Entry, ...]):
    """Some layers of a group, in its order."""

    @cached_property
    def rows(self) -> list[int]:
        """The layers' rows in the ledger."""
        return [row for e in self for row in e.rows]

    @cached_property
    def counts(self) -> list[int]:
        """The number of segments of each layer."""
        return [e.segments for e in self]

    @cached_property
    def whole(self) -> bool:
        """True if no layer has several segments."""
        return all(n == 1 for n in self.counts)


@dataclass(frozen=True)
class Work:
    """The layers of one group that have a gradient in this step."""

    group: Group
    params: list[Tensor]
    grads: list[Any]  # tensors; None where a closure has yet to compute one
    entries: Members

    @property
    def rows(self) -> list[int]:
        """The layers' rows in the ledger."""
        return self.entries.rows

    @property
    def counts(self) -> list[int]:
        """The number of segments of each layer."""
        return self.entries.counts

    @property
    def views(self) -> list[Tensor]:
        """The weights with their segments along the leading dimension."""
        return [e.view(p) for e, p in zip(self.entries, self.params, strict=True)]


class Steering:
    """Steps the layers of a roster by a law, in the directions that the inner optimizer proposes."""

    def __init__(self, inner: Optimizer, roster: Roster, law: Law, others: Others, reads_weights: bool | None) -> None:
        self.inner = inner
        self.roster = roster
        self.law = law
        self.others: Others = others
        self.proposer = Proposer(inner, reads_weights)
        for group, own in zip(inner.param_groups, roster.groups, strict=True):
            if own and not self.proposer.reads_weights:
                self.proposer.decay_in(group)
        self.ledgers: dict[torch.device, Ledger] = {}
        self.multipliers = torch.ones(roster.layers, dtype=torch.float64, device="cpu")
        #: η/ρ, for a plain step of layers of zeros, which gives them a direction; 0 leaves them as they are.
        self.grows = 0.0
        #: Whether norms are learned.
        self.learns = False
        self._growing: set[int] = set()  # layers of zeros, by index, as far as the host knows
        self._until_checked = 0
        self._layer_of_row: dict[torch.device, Tensor] = {}
        self._drivers: dict[Any, Any] = {}  # of fused kernels, by group and by ("given", group)
        self._all: dict[int, Members] = {}  # all layers of a group

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_drivers": {}}

    def ledger(self, device: torch.device) -> Ledger:
        """Return the ledger on a device, made at the first call."""
        if device not in self.ledgers:
            self.ledgers[device] = Ledger.blank(self.roster.rows, device)
            self.write_multipliers()
        return self.ledgers[device]

    def write_multipliers(self) -> None:
        """Copy the multipliers to the ledgers, without waiting for the device."""
        for device, ledger in self.ledgers.items():
            where = self._layer_of_row.get(device)
            if where is None or where.numel() != self.roster.rows:
                of_row = sorted((row, e.index) for e in self.roster.in_order() for row in e.rows)
                where = self._layer_of_row[device] = torch.tensor([i for _, i in of_row], device=device)
            ledger.multiplier.copy_(self.multipliers.to(device, ledger.multiplier.dtype, non_blocking=True)[where])

    def grow(self, old: dict[torch.device, Ledger]) -> None:
        """Extend the ledgers for layers that were added; the numbers of the others are kept."""
        self.ledgers = {}
        for device, ledger in old.items():
            new = self.ledgers[device] = Ledger.blank(self.roster.rows, device)
            for name in ("radius", "skipped", "bad", "power1", "power2", "age", "first", "moments"):
                getattr(new, name)[: len(ledger.radius)] = getattr(ledger, name)
        self._drivers.clear()
        self._all.clear()
        self.write_multipliers()

    def ready(self) -> list[int]:
        """Return the groups whose fused kernel can be launched again as it is."""
        if self._hooked():
            return []
        groups = self.inner.param_groups
        return [i for i, driver in self._drivers.items() if isinstance(i, int) and driver.ready(groups[i])]

    def forget(self) -> None:
        """Rebuild all tables at the next step, because a state was loaded."""
        self._drivers.clear()
        self.proposer.forget_states()

    def _hooked(self) -> bool:
        """Return whether the inner optimizer has step hooks, so that its own step must be called."""
        return bool(self.inner._optimizer_step_pre_hooks or self.inner._optimizer_step_post_hooks)

    def work(self, but: Collection[int] = (), *, late: bool = False) -> dict[int, Work]:
        """Return the layers that have a gradient, or get one `late`, of each controlled group that is not in `but`."""
        found = {}
        for i in self.roster.controlled():
            if i in but:
                continue
            group, entries = self.inner.param_groups[i], self.roster.groups[i]
            every = group["params"]
            params = [every[j] for j in entries] if len(every) > len(entries) else every
            grads = [p.grad for p in params]
            its = self._members(i)
            if any(map(is_, grads, repeat(None))):
                having = [k for k, g in enumerate(grads) if g is not None or (late and params[k].requires_grad)]
                params, grads = [params[k] for k in having], [grads[k] for k in having]
                its = Members(its[k] for k in having)
            found[i] = Work(group, params, grads, its)
        return found

    def _members(self, i: int, positions: Sequence[int] | None = None) -> Members:
        """Return the layers at some positions of a group, by default all of them."""
        entries = self.roster.groups[i]
        if positions is not None and len(positions) < len(entries):
            return Members(entries[j] for j in positions)
        if len(self._all.get(i, ())) != len(entries):
            self._all[i] = Members(entries.values())
        return self._all[i]

    def step(self, work: dict[int, Work], ready: Sequence[int], closure: Callable[[], Any] | None) -> Any:
        """Take the step; `closure` only for an inner optimizer that evaluates it itself."""
        try:
            ways = {i: way for i, w in work.items() if (way := self._way(w)) is not None}
            proposals, loss = self._propose(work, {*ways, *ready}, closure)
            moves: list[tuple[torch.device, Move]] = []
            after: list[Callable[[], None]] = []
            for i, proposal in proposals.items():
                if proposal.params:
                    self._follow(i, proposal, moves, after)
            for i, way in ways.items():
                if way == "plain":
                    moves += self._plain(work[i])
                else:
                    self._fused(i, way, work[i])
            for device in dict.fromkeys(device for device, _ in moves):
                sweep([move for where, move in moves if where == device], self.ledger(device), self.law)
            for action in after:
                action()
            for i in ready:
                self._drivers[i].run(self.inner.param_groups[i])
            if self._growing:
                self._check_growing()
            return loss
        except BaseException:
            self.proposer.forget()
            raise

    def _way(self, work: Work) -> str | None:
        """Return `"plain"`, the rule of the fused kernel, or None where the inner optimizer must step."""
        if self.proposer.reads_weights or self._hooked() or not work.params:
            return None
        kernel = kernel_of(self.proposer.rule, work.group)
        if kernel is None or any(g.is_sparse for g in work.grads):
            return None
        if self._kernel_runs(work):
            return kernel
        return "plain" if kernel == "sgd" else None

    def _kernel_runs(self, work: Work, *, known: bool = False) -> bool:
        """Return whether the kernel can step these layers; `known` if it did, and all of them lie where they did."""
        device = work.params[0].device
        launch = _launch_on(device)
        if launch is None or self._any_growing(work.entries):
            return False
        if known:
            return True
        if not launch.takes(*work.params, *work.grads):
            return False
        if any(p.device != device for p in work.params) or any_sharded(work.params):
            return False
        if work.entries.whole:
            return all(p.is_contiguous() or is_dense(p) for p in work.params)
        return all(is_dense(v) and splits_in_memory(v, n) for v, n in zip(work.views, work.counts, strict=True))

    def _fused(self, i: int, kernel: str, work: Work) -> None:
        from gyroscope.control.fast import Fast

        _check_shapes(work)
        if i not in self._drivers:
            device = work.params[0].device
            launch, rule = _launch_on(device), self.proposer.rule
            self._drivers[i] = Fast(launch, self.inner, rule, self.law, self.ledger(device))
        self._drivers[i].prepare(kernel, work.group, work.params, work.grads, work.rows, work.counts)
        self._drivers[i].run(work.group)

    def _plain(self, work: Work) -> list[tuple[torch.device, Move]]:
        _check_shapes(work)
        how, decay = decay_of(self.proposer.rule, work.group)
        sign = 1.0 if work.group.get("maximize", False) else -1.0
        return self._moves(work, work.grads, sign=sign, along=-decay if how == "coupled" else 0.0)

    def _propose(
        self, work: dict[int, Work], done: set[int], closure: Callable[[], Any] | None
    ) -> tuple[dict[int, Proposal], Any]:
        """Step the other parameters, and catch the displacements of the layers that need the inner step."""
        groups = self.inner.param_groups
        asked = [i for i in work if i not in done and (work[i].params or closure is not None)]
        rest = [i for i, own in enumerate(self.roster.groups) if not own] if self.others == "inner" else []
        active = any(p.grad is not None for i in rest for p in groups[i]["params"])
        if not asked and not active:
            return {}, None
        sparse = [
            e.name
            for i in asked
            if any(g is not None and g.is_sparse for g in work[i].grads)
            for e, g in zip(work[i].entries, work[i].grads, strict=True)
            if g is not None and g.is_sparse
        ]
        if sparse:
            raise ControlError(
                f"{few(sparse)} has a sparse gradient; nothing was changed. Use sparse=False in the embedding, or "
                "exclude it (gyroscope.layers(model, exclude=...)) so that the inner optimizer steps it."
            )
        seen = {*asked, *rest}
        with _keeping_rates([groups[i] for i in asked]) if self.proposer.rule.reads_weights else nullcontext():
            proposals, loss = self.proposer.propose(
                [list(entries) for entries in self.roster.groups],
                hidden={i for i in range(len(groups)) if i not in seen},
                frozen=asked if self.others == "frozen" else (),
                closure=closure,
                subtract=False,
                grads={i: work[i].grads for i in asked if len(work[i].grads) == len(groups[i]["params"])}
                if closure is None
                else {},
            )
        return {i: proposals[i] for i in asked}, loss

    def _follow(
        self, i: int, proposal: Proposal, moves: list[tuple[torch.device, Move]], after: list[Callable[[], None]]
    ) -> None:
        """Turn the layers in the proposed directions, by a kernel now or with the other moves."""
        work = Work(self.inner.param_groups[i], proposal.params, [], self._members(i, proposal.positions))
        self._drivers.pop(i, None)  # its count of steps is behind now
        driver = self._drivers.get(("given", i))
        runs = self._kernel_runs(work, known=driver is not None and driver.knows(proposal))
        if not runs or not work.entries.whole:  # whether a change is mere rounding is asked of whole layers
            self.proposer.subtract(proposal)
        if runs:
            from gyroscope.control.fast import Given

            device = proposal.params[0].device
            if driver is None:
                driver = self._drivers["given", i] = Given(_launch_on(device))
            ledger = self.ledger(device)
            driver.step(proposal, work.rows, work.counts, ledger, work.group["lr"], self.law)
            driver.clear(self.inner, work.params, work.rows, work.counts, ledger)
            if self.proposer.reads_weights:
                self._clear(work, shaped=False)
            return

        def finish() -> None:
            self.proposer.release(proposal)
            self._clear(work)

        moves += self._moves(work, proposal.displacements, along=proposal.along)
        after.append(finish)

    def _moves(
        self, work: Work, displacements: Sequence[Tensor], *, sign: float = 1.0, along: float = 0.0
    ) -> list[tuple[torch.device, Move]]:
        """Return the moves of a group's layers, one per device."""
        found = []
        for device, members in _by_device(work.params).items():
            entries = [work.entries[k] for k in members]
            move = Move(
                weights=[e.view(work.params[k]) for k, e in zip(members, entries, strict=True)],
                displacements=[e.view(displacements[k]) for k, e in zip(members, entries, strict=True)],
                rows=[row for e in entries for row in e.rows],
                counts=[e.segments for e in entries],
                lr=work.group["lr"],
                sign=sign,
                along=along,
                grows=self._any_growing(entries),
            )
            found.append((device, move))
        return found

    def grow_from_zero(self, weight: Tensor, e: Entry, segments: Sequence[int]) -> None:
        """Let segments of a layer begin with a plain step of length η√n, with n the number of their elements."""
        first = self.ledger(weight.device).first
        first[[e.row + segment for segment in segments]] = self.grows * math.sqrt(weight.numel() / e.segments)
        self._growing.add(e.index)
        self._until_checked = 0

    def learn_norms(self) -> None:
        """Move the radius of every layer that has a gradient: Adam on ln‖w‖, at the layer's rate.

        d = ∂loss/∂ln‖w‖ = ⟨∇, w⟩;  m, v are running means of d and d²;  ln r ← ln r − ρ m̂/(√v̂ + ε‖∇‖r)
        """
        found: list[tuple[Tensor, Tensor, Entry, Group]] = [
            (p, grad, e, work.group)
            for work in self.work().values()
            for p, grad, e in zip(work.params, work.grads, work.entries, strict=True)
            if not grad.is_sparse
        ]
        for device, members in _by_device([p for p, *_ in found]).items():
            its = [found[k] for k in members]
            counts = [e.segments for _, _, e, _ in its]
            weights, grads = ([e.view(pair[i]) for *pair, e, _ in its] for i in (0, 1))
            sums = dots({"wg": (weights, grads), "gg": (grads, grads)}, segments=counts)
            start = 0
            for _, of_group in groupby(its, key=lambda one: id(one[3])):
                own = list(of_group)
                rows, options = [row for _, _, e, _ in own for row in e.rows], own[0][3]
                sign = -1.0 if options.get("maximize", False) else 1.0
                _learn(self.ledger(device), rows, sums[start : start + len(rows)], options["lr"], sign)
                start += len(rows)

    def _any_growing(self, entries: Sequence[Entry]) -> bool:
        return bool(self._growing) and any(e.index in self._growing for e in entries)

    def _check_growing(self) -> None:
        """Find out now and then, because it waits for the device, which layers have a direction by now."""
        self._until_checked -= 1
        if self._until_checked >= 0 or is_capturing():
            return
        self._until_checked = _CHECK_GROWING
        zero = [(ledger.first > 0) & (ledger.radius <= 0) for ledger in self.ledgers.values()]
        rows = {row for one in zero for row in one.nonzero().flatten().tolist()}
        self._growing = {e.index for e in self.roster.in_order() if not rows.isdisjoint(e.rows)}

    def _states(self, work: Work, shaped: bool) -> list[tuple[list[Tensor], list[int], list[int]]]:
        """Return the inner state of the layers by name and dtype, with rows and numbers of segments.

        Without `shaped`, only the state that has another shape than its layer, such as Adafactor's rows and columns.
        """
        found: dict[tuple[str, torch.dtype], tuple[list[Tensor], list[int], list[int]]] = {}
        # Single numbers of torch's own optimizers do not come from gradients.
        scalars = self.proposer.rule.reads_weights
        for p, e in zip(work.params, work.entries, strict=True):
            for name, held in self.inner.state[p].items() if p in self.inner.state else ():
                if name in OWN or name in _NOT_OF_GRADIENTS:
                    continue
                for value in floats_in(held):
                    checked = value.device == p.device and (scalars or value.dim() > 0)
                    if checked and (shaped or value.shape != p.shape):
                        tensors, rows, counts = found.setdefault((name, value.dtype), ([], [], []))
                        tensors.append(local([value])[0])
                        rows.extend(e.rows)
                        counts.append(e.segments)
        return list(found.values())

    def _clear(self, work: Work, *, shaped: bool = True) -> None:
        """Set what is not finite to 0 in the inner state of layers whose step was skipped."""
        where = {p.device for p in work.params}
        if {device.type for device in where} == {"cpu"} and not any(self.ledger(d).bad.any() for d in where):
            return  # the usual case
        for states, rows, counts in self._states(work, shaped):
            start = 0
            for state, n in zip(states, counts, strict=True):
                bad = self.ledger(state.device).bad[rows[start] : rows[start] + n].any()
                start += n
                # On a CPU the value is known; elsewhere reading it would wait, so the whole state is rewritten.
                if state.device.type != "cpu":
                    state.copy_(torch.where(bad & ~torch.isfinite(state), torch.zeros_like(state), state))
                elif bad:
                    state[~torch.isfinite(state)] = 0

    def zero_layers(self, work: dict[int, Work]) -> list[tuple[Tensor, Entry, list[int]]]:
        """Return the layers among `work` with zero weights, and which of their segments (waits for the device)."""
        params = [p for w in work.values() for p in w.params]
        entries = [e for w in work.values() for e in w.entries]
        views = [view for w in work.values() for view in w.views]
        squares = dots({"ww": (views, views)}, segments=[e.segments for e in entries])[:, 0].tolist()
        found, start = [], 0
        for p, e in zip(params, entries, strict=True):
            zeros = [k for k in range(e.segments) if squares[start + k] == 0]
            if zeros:
                found.append((p, e, zeros))
            start += e.segments
        return found

    def nonfinite(self) -> list[str]:
        """Return the parameters whose gradients are not finite (waits for the device)."""
        names, grads = [], []
        for g, group in enumerate(self.inner.param_groups):
            given = group.get("param_names") or [f"parameter {j} of group {g}" for j in range(len(group["params"]))]
            for j, p in enumerate(group["params"]):
                if p.grad is not None:
                    e = self.roster.groups[g].get(j)
                    names.append(e.name if e else given[j])
                    dense = p.grad.to_dense() if p.grad.is_sparse else p.grad
                    grads.append(torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense)
        finite = torch.isfinite(dots({"gg": (grads, grads)})[:, 0]).tolist()
        return [name for name, ok in zip(names, finite, strict=True) if not ok]


def _launch_on(device: torch.device) -> Any:
    """Return the class of the fused step on a device, or None where there is none."""
    name = backend(device).__name__
    if name.endswith("triton"):
        from gyroscope.control.fused import Launch

        return Launch
    if name.endswith("native"):
        from gyroscope.control import native_step

        return native_step.Launch
    return None


def _check_shapes(work: Work) -> None:
    for e, p, g in zip(work.entries, work.params, work.grads, strict=True):
        if g.shape != p.shape:  # after an assignment to the data of a parameter
            raise ControlError(
                f"The gradient of {e.name} must have the shape {tuple(p.shape)} of its weights, got "
                f"{tuple(g.shape)}. Compute the gradients again."
            )


def _by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    """Return the positions of the tensors on each device."""
    devices: dict[torch.device, list[int]] = {}
    for k, tensor in enumerate(tensors):
        devices.setdefault(tensor.device, []).append(k)
    return devices


@contextmanager
def _keeping_rates(groups: Sequence[Group]) -> Iterator[None]:
    """Undo what an optimizer writes into the rates of controlled groups, which are angles that the user sets."""
    rates = [group["lr"] for group in groups]
    values = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
    try:
        yield
    finally:
        for group, rate, value in zip(groups, rates, values, strict=True):
            if isinstance(rate, Tensor):
                rate.copy_(value)
            group["lr"] = rate
