"""Weight domination: which layers hardly move because their weight is large beside its gradient, and since when.

Definition 1 of the conditioning paper says that layer k is dominated by its weight where

    σmax(∂L/∂W_k) ≪ σmax(W_k).

The ratio falls in every layer as a training converges, so being small is not enough to be harmful. What harms is a
layer that stands still while others move: under batch normalization a weight that has grown α-fold has a gradient of
1/α (theorem 2), and moves by 1/α² of itself; a layer whose input has shrunk fares alike. A layer is named where

1. its ratio is below `threshold`: Definition 1, with ≪ made a number;
2. its ratio is below `share` of what the layers that move have: others are not in the same state;
3. its update is below `share` of theirs too, each beside its weight. An optimizer whose steps heed the norm of the
   weight (Layca, LARS) moves a layer however small its gradient: there nothing is wrong.

What layers that move have is what a tenth of the layers exceed, one at least: not the median, for in a network of 200
layers most are dominated after the first step (figure A10), nor the largest, for a layer that starts at zero has a
ratio without bound. A layer whose gradient is zero (dead ReLUs, an expert that gets nothing) is not dominated by its
weight, whatever its size: it is left out, of the comparison too. A layer whose first gradient is zero is left out for
good: it is behind a gain that starts at zero, as in residual branches, and its gradient grows with that gain.

It is named when this has held for `patience` measurements in a row, and is free again when one of the three bounds has
been exceeded three times over for as many: what hovers about a bound is named once.

One state is domination without comparison: the stall of section 5, in which the last layer's input has become small,
its weight large, and the gradients of all layers small at once. There the last layer is named for as long as the stall
lasts; `gyroscope.diagnose.stall` says how it shows.

The bounds leave room on both sides. In sound trainings of perceptrons, residual networks and a transformer, with SGD
and Adam, no layer stayed below 0.06 of the layers that move in both 2. and 3.; a layer scaled by 30 under batch
normalization is at 0.001, the lower quarter of a 100-layer perceptron after its first step at 10⁻⁴ to 10⁻⁶. With Adam,
whose updates do not shrink with the gradient, a layer scaled by α is at 1/α in 3., and named from about 40 on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope.base.accepted import real
from gyroscope.diagnose.evidence import require_run
from gyroscope.diagnose.stall import Stall, stalls
from gyroscope.errors import MonitorError
from gyroscope.store import Run
from gyroscope.store.record import LayerInfo

THRESHOLD, SHARE, PATIENCE = 0.01, 0.03, 3
# By how much a bound must be exceeded for a layer to be free again.
_FREE = 3.0

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Domination:
    """A time in which a layer is dominated by its weight.

    Attributes:
        layer: the layer's name.
        since: the first step at which it was.
        until: the step at which it was free again; None where it was not.
        ratio: of the gradient to the weight, when there was no doubt any more.
        typical: what layers that move have, at the same step: a tenth of the network's layers, one at least, have more.
        spectral: whether the ratio is σmax(∂L/∂W)/σmax(W), from an analysis of the conditioning, or ‖∂L/∂W‖/‖W‖.
        stall: that of the network, where this is what shows it; the ratios are then the last known ones of this time.

    >>> print(Domination("2.weight", 3, None, 2.3e-7, 0.06))
    2.weight is dominated by its weight since step 3: its gradient has 2.3e-07 of the weight's norm, 0.06 in layers
    that move, so it hardly does: its weight is too large, or its gradient vanishes. Try gyroscope.Layca, which turns
    it as fast as the others.
    """

    layer: str
    since: int
    until: int | None
    ratio: float
    typical: float
    spectral: bool = False
    stall: Stall | None = None

    def __str__(self) -> str:
        when, past = f"is dominated by its weight since step {self.since:,}", self.until is not None
        if past:
            when = f"was dominated by its weight from step {self.since:,} to {self.until:,}"
        if self.stall is not None:
            return f"{self.layer} {when}, and the network guess{'ed' if past else 'es'}: {self.stall.why('its')}"
        norm, has = "spectral norm" if self.spectral else "norm", "had" if past else "has"
        ratio = f"its gradient {has} {self.ratio:.2g} of the weight's {norm}, {self.typical:.2g} in layers that move"
        if past:
            return f"{self.layer} {when}: {ratio}."
        return (
            f"{self.layer} {when}: {ratio}, so it hardly does: its weight is too large, or its gradient "
            "vanishes. Try gyroscope.Layca, which turns it as fast as the others."
        )


def dominated(
    run: Run, *, threshold: float = THRESHOLD, share: float = SHARE, patience: int = PATIENCE
) -> list[Domination]:
    """The layers of a run that were dominated by their weights, each as often as it was, in the order of steps.

    Among them is the last one in a stall of the network, where the run holds what shows it (see `stalled`).

    Where the run holds `domination`, from `watch(conditioning=...)`, that is the ratio; else ‖∂L/∂W‖/‖W‖, from
    `gradient_norm` and `weight_norm`, which every measured step has. Gradients have few large singular values and
    weights many, so the latter is some times smaller, in all layers alike. Embeddings are left out, since most of their
    rows have no gradient, and so are layers at steps at which they have none at all; layers of one optimizer are
    compared with each other.

    Args:
        run: from `gyroscope.load`.
        threshold: below which a ratio may be called small.
        share: of what layers that move have, below which a layer stands still while others move.
        patience: for how many measurements.

    Raises:
        MonitorError: the run does not hold what is needed.

    >>> import tempfile, torch, gyroscope
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
    ... )
    >>> _ = model[0].weight.data.mul_(300)
    >>> optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.eye(4).repeat(4, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with gyroscope.watch(model, optimizer, folder) as monitor:
    ...         for _ in range(5):
    ...             optimizer.zero_grad(); model(x)[:, 0].exp().mean().backward(); optimizer.step()
    ...     with gyroscope.load(folder) as run:
    ...         [(one.layer, one.since, one.until) for one in dominated(run)]
    [('0.weight', 1, None)]
    """
    require_run(run)
    least, most, lasts = real(threshold), real(share), real(patience)
    if not (least > 0 and 0 < most < 1 and lasts >= 1 and lasts.is_integer()):
        raise MonitorError(
            f"threshold={threshold!r}, share={share!r} and patience={patience!r} were given; accepted are a threshold "
            "above 0, a share between 0 and 1, and a patience of 1 or more."
        )
    parts = seen(run, known_steps(run), threshold=least, share=most, patience=int(lasts))
    found = [one for part in parts for one in part.found]
    with suppress(MonitorError):  # what shows a stall was not recorded
        for stall in stalls(run):
            # It says more than that the ratio was small meanwhile.
            found = [one for one in found if one.layer != stall.layer or not _overlap(one, stall)]
            found.append(_of_stall(run, stall))
    place = {layer.name: i for i, layer in enumerate(run.layer_table)}
    return sorted(found, key=lambda one: (one.since, place[one.layer]))


class Episodes:
    """Follows the layers of one optimizer from measurement to measurement.

    Attributes:
        found: all that was found so far, each when it began.
    """

    def __init__(
        self,
        layers: Sequence[LayerInfo],
        *,
        spectral: bool,
        threshold: float = THRESHOLD,
        share: float = SHARE,
        patience: int = PATIENCE,
    ) -> None:
        self.found: list[Domination] = []
        self.spectral = spectral
        self._names = [layer.name for layer in layers]
        self._left_out = np.array([layer.kind == "embedding" for layer in layers], dtype=bool)
        self._met = np.zeros(len(layers), dtype=bool)  # whether a ratio of it was known
        self._bounds, self._patience = (threshold, share), patience
        # For how many measurements a layer has been where it is not reckoned to be, and since which step.
        self._count = np.zeros(len(layers), dtype=np.int64)
        self._first = np.zeros(len(layers), dtype=np.int64)
        self._open = np.full(len(layers), -1)  # where in `found` its domination is that goes on
        self._busy = False  # whether any layer is counted or dominated

    def see(self, steps: Sequence[int], ratio: npt.ArrayLike, update: npt.ArrayLike) -> list[tuple[int, Domination]]:
        """Look at measurements, and return the dominations that they leave no more doubt of, each with the step.

        Args:
            steps: when they were made [S].
            ratio: of gradient to weight [S, L].
            update: ‖Δw‖/‖w‖ [S, L]; NaN where it is not known, which speaks neither for nor against.
        """
        r, u = (np.array(given, dtype=np.float64) for given in (ratio, update))
        self._left_out |= self._starts_at_zero(r)
        r[:, self._left_out] = np.nan
        r[~np.isfinite(r) | (r == 0)] = np.nan
        u[np.isnan(r)] = np.nan
        moving, pace = _of_moving(r), _of_moving(u)
        threshold, share = self._bounds
        at_most = np.minimum(threshold, share * moving)[:, None]
        slow = share * pace[:, None]
        low = (r < at_most) & ~(u >= slow)
        if not low.any() and not self._busy:  # as a rule
            return []
        free = (r >= _FREE * at_most) | ((u >= _FREE * slow) & ~np.isnan(r))
        begun = []
        for i, step in enumerate(steps):
            begun += self._one(int(step), low[i], free[i], ~np.isnan(r[i]), r[i], float(moving[i]))
        self._busy = bool((self._open >= 0).any() or self._count.any())
        return begun

    def _starts_at_zero(self, ratio: Array) -> npt.NDArray[np.bool_]:
        """Which layers' first known ratio is zero: they are behind a gain that starts at zero, and wake up slowly."""
        known = np.isfinite(ratio)
        if not len(ratio) or self._met.all():
            return np.zeros(len(self._met), dtype=bool)
        first = ratio[known.argmax(axis=0), np.arange(len(self._met))]
        new = known.any(axis=0) & ~self._met
        self._met |= new
        return np.asarray(new & (first == 0))

    def go_on(self, earlier: Episodes) -> None:
        """Take over which layers are dominated."""
        self.found, self._open, self._busy = list(earlier.found), earlier._open.copy(), True
        self._left_out, self._met = earlier._left_out.copy(), earlier._met.copy()

    def _one(
        self,
        step: int,
        low: npt.NDArray[np.bool_],
        free: npt.NDArray[np.bool_],
        known: npt.NDArray[np.bool_],
        ratio: Array,
        moving: float,
    ) -> list[tuple[int, Domination]]:
        changing = np.where(self._open >= 0, free, low)
        self._first = np.where(changing & (self._count == 0), step, self._first)
        # What is not known at this step leaves things as they are.
        self._count = np.where(changing, self._count + 1, np.where(known, 0, self._count))
        begun = []
        for i in np.flatnonzero(changing & (self._count >= self._patience)):
            since, self._count[i] = int(self._first[i]), 0
            if self._open[i] >= 0:
                self.found[self._open[i]] = replace(self.found[self._open[i]], until=since)
                self._open[i] = -1
            else:
                one = Domination(self._names[i], since, None, float(ratio[i]), moving, self.spectral)
                self._open[i] = len(self.found)
                self.found.append(one)
                begun.append((step, one))
        return begun


def norms_ratio(gradient: npt.ArrayLike, weight: npt.ArrayLike) -> Array:
    """‖∂L/∂W‖/‖W‖ from norms as a run holds them, in float32; infinite or NaN for a weight of zero.

    >>> norms_ratio([1.0, 1.0], [4.0, 0.0]).tolist()
    [0.25, inf]
    """
    with np.errstate(all="ignore"):
        g, w = (np.asarray(given, dtype=np.float32).astype(np.float64) for given in (gradient, weight))
        found: Array = g / w
    return found


def known_steps(run: Run) -> npt.NDArray[np.int64]:
    """The steps at which the ratio is known, or else an error that says what to record."""
    if "domination" in run.quantities:
        return run.where("domination")
    missing = [name for name in ("gradient_norm", "weight_norm") if name not in run.quantities]
    if missing:
        raise MonitorError(
            f"This run holds no {' and no '.join(missing)}, and no domination: record these quantities, as "
            "gyroscope.watch does unless told otherwise, or the conditioning of layers, with watch(conditioning=...)."
        )
    return run.steps


def seen(run: Run, steps: npt.NDArray[np.int64], **bounds: Any) -> Iterator[Episodes]:
    """What a run says at some steps, for each of its parts."""
    table, ratio = run.layer_table, _ratio(run, steps)
    update = _held(run, "update_ratio", steps) if "update_ratio" in run.quantities else np.full(ratio.shape, np.nan)
    for part in range(1 + max((layer.part for layer in table), default=0)):
        members = [i for i, layer in enumerate(table) if layer.part == part]
        if not members:
            continue
        episodes = Episodes([table[i] for i in members], spectral="domination" in run.quantities, **bounds)
        episodes.see(steps.tolist(), ratio[:, members], update[:, members])
        yield episodes


def _held(run: Run, name: str, steps: npt.NDArray[np.int64]) -> Array:
    return run.series(name, steps=steps).astype(np.float64)


def _ratio(run: Run, steps: npt.NDArray[np.int64]) -> Array:
    if "domination" in run.quantities:
        return _held(run, "domination", steps)
    return norms_ratio(_held(run, "gradient_norm", steps), _held(run, "weight_norm", steps))


def _overlap(one: Domination, stall: Stall) -> bool:
    after_one, after_stall = (np.inf if until is None else until for until in (one.until, stall.until))
    return one.since < after_stall and stall.since < after_one


def _of_stall(run: Run, stall: Stall) -> Domination:
    steps = known_steps(run)
    steps = steps[(steps >= stall.since) & (steps < (np.inf if stall.until is None else stall.until))]
    return of_stall(stall, run.layer_table, _ratio(run, steps[-1:]), spectral="domination" in run.quantities)


def of_stall(stall: Stall, table: Sequence[LayerInfo], ratio: Array, *, spectral: bool) -> Domination:
    """The domination of the last layer that a stall is.

    Args:
        stall: the network's.
        table: the run's layers.
        ratio: of gradient to weight of these layers, at no step or one [S, L].
        spectral: which ratio it is.

    >>> table = [LayerInfo("conv", "conv", (8, 3, 3, 3)), LayerInfo("fc", "linear", (10, 8))]
    >>> stall = Stall("fc", 15, None, 2.3, 2.303, (1047.0, 0.012), (1.8, 28.0))
    >>> print(of_stall(stall, table, np.array([[1e-4, 2e-4]]), spectral=False))
    fc is dominated by its weight since step 15, and the network guesses: λmax of its input fell from 1.05e+03 to 0.012
    while the norm of its weight grew from 1.8 to 28, so its outputs say nothing and it hardly moves. Normalize the
    input of this layer (gyroscope.layers.last_norm), or start with a smaller learning rate.
    """
    column = next(i for i, layer in enumerate(table) if layer.name == stall.layer)
    same = [i for i, layer in enumerate(table) if layer.part == table[column].part and layer.kind != "embedding"]
    own, others = (ratio[0, column], _of_moving(ratio[:, same])[0]) if len(ratio) else (np.nan, np.nan)
    return Domination(stall.layer, stall.since, stall.until, float(own), float(others), spectral, stall)


def _of_moving(values: Array) -> Array:
    """What a tenth of each row's known values exceed, one at least, or the median if it is more; NaN without any.

    The median counts in networks of two layers alone. (NumPy's own quantiles warn of NaN, and take long.)
    """
    known = np.sort(values, axis=1)  # NaN come last
    count = (~np.isnan(values)).sum(axis=1)
    rows = np.arange(len(values))
    middle = (known[rows, np.maximum(count - 1, 0) // 2] + known[rows, count // 2]) / 2
    upper = known[rows, np.maximum(count - 1 - np.maximum(count // 10, 1), 0)]
    return np.where(count > 0, np.maximum(middle, upper), np.nan)
