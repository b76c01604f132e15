"""Weight domination: layers that hardly move because their weight is large compared with its gradient, and since when.

Definition 1 of the conditioning paper: layer k is dominated by its weight if

    σmax(∂L/∂W_k) ≪ σmax(W_k).

The ratio falls in every layer as a training converges, so a small ratio alone does no harm. The harm is a layer that
stands still while others move: under batch normalization a weight that has grown c-fold has a gradient of 1/c (theorem
2), and moves by 1/c² of itself; the same happens to a layer whose input has shrunk. A layer is reported if

1. its ratio is below `threshold`: Definition 1, with a number for ≪;
2. its ratio is below `share` of that of moving layers: others are not in the same state;
3. its update, relative to its weight, is below `share` of that of moving layers; where updates were not measured, as
   in the steps of a CUDA graph, its rotation rate. An optimizer whose steps scale with the norm of the weight (Layca,
   LARS) moves a layer however small its gradient, and nothing is wrong.

The ratio of moving layers is the 90th percentile over layers, with at least one layer above it. The median would not
do: in a network of 200 layers most are dominated after the first step (figure A10). Nor would the maximum: a layer that
starts at zero has an unbounded ratio. A layer whose gradient is zero (dead ReLUs, an expert without tokens) is not
dominated by its weight, whatever its size, and is left out of the comparison too. A layer whose first gradient is zero
is left out for good: it is behind a gain that starts at zero, as in residual branches, and its gradient grows with that
gain.

A layer is reported after this has held for `patience` measurements in a row, and is free again after one of the three
bounds has been exceeded by a factor of three for as many: a layer that hovers around a bound is reported once.

One state is domination without comparison: the stall of section 5, in which the last layer's input has become small,
its weight large, and the gradients of all layers small at once. Then the last layer is reported for as long as the
stall lasts; `gyroscope.diagnosis.stall` describes how it shows.

The bounds have margins on both sides. In healthy trainings of perceptrons, residual networks and a transformer, with
SGD and Adam, no layer stayed below 0.06 of the moving layers in both 2. and 3.; a layer scaled by 30 under batch
normalization is at 0.001, the lower quarter of a 100-layer perceptron after its first step at 10⁻⁴ to 10⁻⁶. With Adam,
whose updates do not shrink with the gradient, a layer scaled by c is at 1/c in 3., and is reported from about c = 40.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope.base.accepted import real
from gyroscope.diagnosis.evidence import require_run
from gyroscope.diagnosis.stall import Stall, stalls
from gyroscope.errors import MonitorError
from gyroscope.store import Run
from gyroscope.store.record import LayerInfo

THRESHOLD, SHARE, PATIENCE = 0.01, 0.03, 3
#: The series that show how far a layer moves, the best first.
MOTIONS = ("update_ratio", "rate_per_step")
# The factor by which a bound must be exceeded for a layer to be free again.
_FREE = 3.0

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Domination:
    """A period in which a layer is dominated by its weight.

    Attributes:
        layer: the layer's name.
        since: the first step of it.
        until: the step at which the layer was free again; None if it was not.
        ratio: of the gradient to the weight, at the step at which the layer was reported.
        typical: the ratio of moving layers at the same step: the 90th percentile, with at least one layer above it.
        spectral: True for σmax(∂L/∂W)/σmax(W), from an analysis of the conditioning; False for ‖∂L/∂W‖/‖W‖.
        stall: the stall of the network that shows the domination, if one does; the ratios are then the last known ones.

    >>> print(Domination("2.weight", 3, None, 2.3e-7, 0.06))
    2.weight has been dominated by its weight since step 3: its gradient's norm is 2.3e-07 times its weight's, compared
    with 0.06 times in layers that move. Its weight is too large, or its gradient vanishes. Try gyroscope.Layca, which
    rotates it as fast as the others.
    """

    layer: str
    since: int
    until: int | None
    ratio: float
    typical: float
    spectral: bool = False
    stall: Stall | None = None

    def __str__(self) -> str:
        when, past = f"has been dominated by its weight since step {self.since:,}", self.until is not None
        if past:
            when = f"was dominated by its weight from step {self.since:,} to {self.until:,}"
        if self.stall is not None:
            return f"{self.layer} {when}, and the network guess{'ed' if past else 'es'}: {self.stall.why('its')}"
        norm, verb = "spectral norm" if self.spectral else "norm", "was" if past else "is"
        ratio = (
            f"its gradient's {norm} {verb} {self.ratio:.2g} times its weight's, compared with {self.typical:.2g} times "
            "in layers that move"
        )
        if past:
            return f"{self.layer} {when}: {ratio}."
        return (
            f"{self.layer} {when}: {ratio}. Its weight is too large, or its gradient vanishes. Try gyroscope.Layca, "
            "which rotates it as fast as the others."
        )


def dominated(
    run: Run, *, threshold: float = THRESHOLD, share: float = SHARE, patience: int = PATIENCE
) -> list[Domination]:
    """Return the periods in which layers of a run were dominated by their weights, in the order of steps.

    A stall of the network is among them, as a domination of the last layer, if the run holds its evidence (see
    `stalled`).

    The ratio is the series `domination`, from `watch(conditioning=...)`, if the run holds it; otherwise ‖∂L/∂W‖/‖W‖,
    from `gradient_norm` and `weight_norm`, which every measured step has. Gradients have few large singular values and
    weights many, so the latter is a few times smaller, in all layers. Embeddings are left out, since most of their
    rows have no gradient, and so are layers at steps without a gradient. Layers of one optimizer are compared with each
    other.

    Args:
        run: from `gyroscope.load`.
        threshold: a ratio below it is small.
        share: a layer below this share of moving layers stands still while others move.
        patience: the number of measurements in a row for which this must hold.

    Raises:
        MonitorError: the run does not hold the quantities needed, or an argument is invalid.

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
            "`threshold` must be a number > 0, `share` one between 0 and 1, and `patience` a whole number ≥ 1, got "
            f"threshold={threshold!r}, share={share!r} and patience={patience!r}. Try the defaults."
        )
    steps = known_steps(run)
    bounds = {"threshold": least, "share": most, "patience": int(lasts)}
    found = list(followed(run.layer_table, steps, _series(run, steps), **bounds))
    with suppress(MonitorError):  # the evidence of a stall was not recorded
        for stall in stalls(run):
            # A stall says more than a small ratio in the same period.
            found = [one for one in found if one.layer != stall.layer or not _overlap(one, stall)]
            found.append(_of_stall(run, stall))
    place = {layer.name: i for i, layer in enumerate(run.layer_table)}
    return sorted(found, key=lambda one: (one.since, place[one.layer]))


class Episodes:
    """The dominations of one optimizer's layers, followed from measurement to measurement.

    Attributes:
        found: all dominations so far, in the order in which they began.
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
        self._met = np.zeros(len(layers), dtype=bool)  # True once a ratio of the layer is known
        self._bounds, self._patience = (threshold, share), patience
        # The number of measurements for which a layer has contradicted its reported state, and the first of them.
        self._count = np.zeros(len(layers), dtype=np.int64)
        self._first = np.zeros(len(layers), dtype=np.int64)
        self._open = np.full(len(layers), -1)  # the index in `found` of the domination that lasts
        self._busy = False  # True if any layer is counted or dominated

    def see(self, steps: Sequence[int], ratio: npt.ArrayLike, update: npt.ArrayLike) -> list[tuple[int, Domination]]:
        """Take in measurements, and return the dominations that they establish, each with the step.

        Args:
            steps: the steps of the measurements [S].
            ratio: of gradient to weight [S, L].
            update: ‖Δw‖/‖w‖ [S, L]; NaN if unknown, which counts neither way.
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
        if not low.any() and not self._busy:  # the usual case
            return []
        free = (r >= _FREE * at_most) | ((u >= _FREE * slow) & ~np.isnan(r))
        begun = []
        for i, step in enumerate(steps):
            begun += self._one(int(step), low[i], free[i], ~np.isnan(r[i]), r[i], float(moving[i]))
        self._busy = bool((self._open >= 0).any() or self._count.any())
        return begun

    def _starts_at_zero(self, ratio: Array) -> npt.NDArray[np.bool_]:
        """Return the layers whose first known ratio is zero: a gain that starts at zero follows them."""
        known = np.isfinite(ratio)
        if not len(ratio) or self._met.all():
            return np.zeros(len(self._met), dtype=bool)
        first = ratio[known.argmax(axis=0), np.arange(len(self._met))]
        new = known.any(axis=0) & ~self._met
        self._met |= new
        return np.asarray(new & (first == 0))

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
        # An unknown ratio leaves the count as it is.
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
    """Return ‖∂L/∂W‖/‖W‖ from norms as a run holds them, in float32; infinite or NaN for a weight of zero.

    >>> norms_ratio([1.0, 1.0], [4.0, 0.0]).tolist()
    [0.25, inf]
    """
    with np.errstate(all="ignore"):
        g, w = (np.asarray(given, dtype=np.float32).astype(np.float64) for given in (gradient, weight))
        found: Array = g / w
    return found


def known_steps(run: Run) -> npt.NDArray[np.int64]:
    """Return the steps at which the ratio is known; raise an error that says what to record if it never is."""
    if "domination" in run.quantities:
        return run.where("domination")
    missing = [name for name in ("gradient_norm", "weight_norm") if name not in run.quantities]
    if missing:
        raise MonitorError(
            f"This run holds no {' and no '.join(missing)}, and no domination. Record these quantities, as "
            "gyroscope.watch does by default, or the conditioning of layers with watch(conditioning=...)."
        )
    return run.steps


def followed(
    table: Sequence[LayerInfo], steps: npt.NDArray[np.int64], series: Mapping[str, Array], **bounds: Any
) -> Iterator[Domination]:
    """Yield the dominations that series [S, L] show, for the layers of each optimizer.

    Args:
        table: the layers.
        steps: the steps [S].
        series: `domination`, or `gradient_norm` and `weight_norm`; and what is known of `MOTIONS`.
        bounds: those of `dominated`.
    """
    ratio = ratios(series)
    update = np.full(ratio.shape, np.nan)
    for name in MOTIONS:
        update = np.where(np.isnan(update), series.get(name, np.nan), update)
    for part in range(1 + max((layer.part for layer in table), default=0)):
        members = [i for i, layer in enumerate(table) if layer.part == part]
        if members:
            episodes = Episodes([table[i] for i in members], spectral="domination" in series, **bounds)
            episodes.see(steps.tolist(), ratio[:, members], update[:, members])
            yield from episodes.found


def ratios(series: Mapping[str, Array]) -> Array:
    """Return the ratio of gradient to weight [S, L]: of spectral norms where it was analyzed, else of norms."""
    if "domination" in series:
        return series["domination"]
    return norms_ratio(series["gradient_norm"], series["weight_norm"])


def _series(run: Run, steps: npt.NDArray[np.int64]) -> dict[str, Array]:
    needed = ["domination"] if "domination" in run.quantities else ["gradient_norm", "weight_norm"]
    names = [name for name in (*needed, *MOTIONS) if name in run.quantities]
    return {name: run.series(name, steps=steps).astype(np.float64) for name in names}


def _overlap(one: Domination, stall: Stall) -> bool:
    after_one, after_stall = (np.inf if until is None else until for until in (one.until, stall.until))
    return one.since < after_stall and stall.since < after_one


def _of_stall(run: Run, stall: Stall) -> Domination:
    steps = known_steps(run)
    steps = steps[(steps >= stall.since) & (steps < (np.inf if stall.until is None else stall.until))]
    ratio = ratios(_series(run, steps[-1:]))
    return of_stall(stall, run.layer_table, ratio, spectral="domination" in run.quantities)


def of_stall(stall: Stall, table: Sequence[LayerInfo], ratio: Array, *, spectral: bool) -> Domination:
    """Return a stall as a domination of the last layer.

    Args:
        stall: the stall of the network.
        table: the run's layers.
        ratio: of gradient to weight of these layers, at no step or one [S, L].
        spectral: True if it is a ratio of spectral norms.

    >>> table = [LayerInfo("conv", "conv", (8, 3, 3, 3)), LayerInfo("fc", "linear", (10, 8))]
    >>> stall = Stall("fc", 15, None, 2.3, 2.303, (1047.0, 0.012), (1.8, 28.0))
    >>> print(of_stall(stall, table, np.array([[1e-4, 2e-4]]), spectral=False))
    fc has been dominated by its weight since step 15, and the network guesses: λmax of its input fell from 1.05e+03 to
    0.012 while the norm of its weight grew from 1.8 to 28, so its outputs carry no information and it hardly moves.
    Normalize the input of this layer (gyroscope.layers.last_norm), or start with a smaller learning rate.
    """
    column = next(i for i, layer in enumerate(table) if layer.name == stall.layer)
    same = [i for i, layer in enumerate(table) if layer.part == table[column].part and layer.kind != "embedding"]
    own, others = (ratio[0, column], _of_moving(ratio[:, same])[0]) if len(ratio) else (np.nan, np.nan)
    return Domination(stall.layer, stall.since, stall.until, float(own), float(others), spectral, stall)


def _of_moving(values: Array) -> Array:
    """Return the 90th percentile of each row's known values, with one above it, or the median if that is larger.

    NaN if no value is known. The median is the larger one only in networks of two layers. NumPy's own quantiles are
    slow, and warn of NaN.
    """
    known = np.sort(values, axis=1)  # NaN come last
    count = (~np.isnan(values)).sum(axis=1)
    rows = np.arange(len(values))
    middle = (known[rows, np.maximum(count - 1, 0) // 2] + known[rows, count // 2]) / 2
    upper = known[rows, np.maximum(count - 1 - np.maximum(count // 10, 1), 0)]
    return np.where(count > 0, np.maximum(middle, upper), np.nan)
