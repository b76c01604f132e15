"""Evidence of one layer of a run: its recorded series, its optimizer, and what is measured from them.

The measures are the fit of the implicit-decay law (section 4.3 of Grosse's chapter) and the balance of steps and weight
decay in a stretch of constant learning rate (section 5.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isfinite, log, nan, prod, sqrt
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gyroscope.diagnosis.scale_invariance import ENOUGH
from gyroscope.errors import DynamicsError, MonitorError
from gyroscope.store import LayerInfo, Run
from gyroscope.theory.effective_rate import Floats, decay_law
from gyroscope.theory.equilibrium import Equilibrium, equilibrium, steps_until
from gyroscope.theory.recurrence import Optimizer, optimizer_of, optimizers_in

SERIES = (
    "invariance", "lr", "weight_decay", "weight_norm", "gradient_norm", "rate", "update_ratio", "effective_lr",
)  # fmt: skip
# Learning rates are recorded in float32, and schedulers compute the same one in several ways.
_SAME = 1e-6
_HELD = 1e-4
_BATCHES = 5
# A layer within this share of the predicted norm has arrived; the predicted time may be off the run's pace by _PACE.
_NEAR, _PACE = 0.05, 3.0
# A quantity that the law assumes to be constant was not, if its values over quarters of a run differ by this factor.
_UNSTEADY = 1.2


def require_run(run: Any) -> None:
    """Reject an argument that is not a run, such as the path of one.

    >>> require_run("runs/first")
    Traceback (most recent call last):
    gyroscope.errors.MonitorError: `run` must be a run, got str. Try gyroscope.load('runs/first').
    """
    if not hasattr(run, "series") or not hasattr(run, "quantities"):
        raise MonitorError(f"`run` must be a run, got {type(run).__name__}. Try gyroscope.load('runs/first').")


@dataclass(frozen=True, eq=False)
class Evidence:
    """One layer of a run, at the steps at which its optimizer was measured; unknown numbers are NaN.

    Attributes:
        info: its name, kind and shape.
        optimizer: the optimizer that steps it.
        recorded: the series that the run has.
        steps: k, [S].
        cosine: ⟨w,∇⟩/(‖w‖‖∇‖), [S].
        lr, decay: η and λ, [S].
        norm, gradient: ‖w‖ after the step and ‖∇‖, [S].
        angle: the angle of that single step, in radians, [S].
        resumed: the step at which the run was last resumed, or None. The optimizer before that is not recorded.
    """

    info: LayerInfo
    optimizer: Optimizer
    recorded: frozenset[str]
    steps: npt.NDArray[np.int64]
    cosine: Floats
    lr: Floats
    decay: Floats
    norm: Floats
    gradient: Floats
    angle: Floats
    resumed: int | None

    @cached_property
    def since(self) -> int:
        """Index of the first measurement made under the recorded optimizer."""
        return 0 if self.resumed is None else int(np.searchsorted(self.steps, self.resumed, side="right"))

    @cached_property
    def stepped(self) -> bool:
        """True if an optimizer updates the layer, or if the run does not say."""
        known = "weight_decay" in self.recorded and len(self.decay[self.since :])
        return not known or bool(np.isfinite(self.decay[self.since :]).any())

    @cached_property
    def decayed(self) -> bool:
        """True if weight decay acted at any step since the run was last resumed."""
        return self.optimizer.unseen or bool((self.decay[self.since :] > 0).any())

    @cached_property
    def norms(self) -> Floats:
        """Known norms since the run was last resumed."""
        norm = self.norm[self.since :]
        return np.asarray(norm[np.isfinite(norm)])

    @cached_property
    def held(self) -> bool:
        """True if the norm was the same at all steps since the run was last resumed."""
        return len(self.norms) > 1 and float(np.ptp(self.norms)) <= _HELD * float(self.norms.mean())

    @cached_property
    def broken(self) -> int | None:
        """First step of the final stretch in which the norm is not finite, or None."""
        return self._ends(self.norm)

    @cached_property
    def ungraded(self) -> int | None:
        """First step of the final stretch in which the gradient is not finite, or None.

        A single row does not count: the row that closes a run is measured without gradients.
        """
        since = self._ends(self.gradient)
        return None if since is not None and since == self.steps[-1] else since

    def _ends(self, series: Floats) -> int | None:
        known = np.flatnonzero(np.isfinite(series))
        return int(self.steps[known[-1] + 1]) if len(known) and known[-1] + 1 < len(series) else None

    @cached_property
    def stretches(self) -> list[slice]:
        """Successive measurements with one learning rate, above 0, and one weight decay."""
        if not len(self.steps):
            return []
        lr, decay = self.lr[self.since :], self.decay[self.since :]
        with np.errstate(invalid="ignore"):
            same = [np.abs(np.diff(one)) <= _SAME * np.abs(one[1:]) for one in (lr, np.nan_to_num(decay))]
        cuts = self.since + 1 + np.flatnonzero(~(same[0] & same[1]))
        edges = [self.since, *cuts.tolist(), len(self.steps)]
        return [slice(a, b) for a, b in pairwise(edges) if b > a and self.lr[a] > 0]

    def missing(self, *names: str) -> list[str]:
        """Return those of these series that the run lacks."""
        return [name for name in names if name not in self.recorded]


def evidence(run: Run, chosen: Sequence[int]) -> Iterator[Evidence]:
    """Yield the evidence for the layers at the positions `chosen`.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     (found,) = evidence(run, [1])
    >>> found.info.name, found.missing("rate", "weight_norm"), found.steps.tolist()
    ('conv2.weight', ['weight_norm'], [10, 20, 30, 40])
    """
    recorded = frozenset(SERIES) & frozenset(run.quantities)
    # As they were read, and layer by layer: in double precision, long runs of many layers would not fit into memory.
    series = {name: np.ascontiguousarray(run.series(name)[:, chosen].T) for name in recorded}
    nothing = np.full(len(run.steps), np.nan)
    given = optimizers_in(run.meta)
    resumed = resumed_at(run)
    for place, i in enumerate(chosen):
        info = run.layer_table[i]
        columns = {name: series[name][place].astype(np.float64) if name in series else nothing for name in SERIES}
        there = np.any([np.isfinite(columns[name]) for name in SERIES], axis=0)
        columns = {name: column[there] for name, column in columns.items()}
        known: Mapping[str, Any] = given[info.part] if info.part < len(given) else {}
        yield Evidence(
            info=info,
            optimizer=optimizer_of(known, steered=not np.isfinite(columns["effective_lr"]).any(), layer=info.name),
            recorded=recorded,
            steps=run.steps[there],
            cosine=columns["invariance"],
            lr=columns["lr"],
            decay=columns["weight_decay"],
            norm=columns["weight_norm"],
            gradient=columns["gradient_norm"],
            angle=_angle(run.steps[there], columns["rate"], columns["update_ratio"]),
            resumed=resumed,
        )


def resumed_at(run: Run) -> int | None:
    """Return the step at which a run was last resumed; None if it never was, or from the beginning."""
    return (run.attempts[-1].start_step or None) if len(run.attempts) > 1 else None


def _angle(steps: npt.NDArray[np.int64], rate: Floats, ratio: Floats) -> Floats:
    """Return the angle of single steps: the measured one if the previous step was measured too.

    Otherwise it follows from the length of the step: a step that keeps the norm turns by 2 arcsin(½‖Δw‖/‖w‖).
    """
    single = np.diff(steps, prepend=steps[:1] - 2) == 1
    with np.errstate(invalid="ignore"):
        chord = 2 * np.arcsin(np.clip(ratio / 2, 0.0, 1.0))
    return np.asarray(np.where(single & np.isfinite(rate), rate, chord))


class Fit(NamedTuple):
    """The law of section 4.3, fitted.

    Attributes:
        k0, r2: of the law.
        off: the root mean square of its relative deviation from the effective learning rate.
        fall: the share of ‖w‖⁴ that decay takes per step at the largest learning rate. Steps add 1/k₀ of its initial
            value, so the norm comes down to its equilibrium if 1/k₀ is smaller.
        grown: the share of the final ‖w‖⁴ (for Adam-like optimizers ‖w‖²) that steps have added; the rest is what decay
            has left of the initial value.
    """

    k0: float
    r2: float
    off: float
    fall: float
    grown: float


def fitted(layer: Evidence) -> Fit:
    """Fit the law of section 4.3 to the steps since the run was last resumed; NaN if the optimizer has no law."""
    part = slice(layer.since, None)
    lr, norm, kind = layer.lr[part], layer.norm[part], layer.optimizer.kind
    steps = layer.steps[part]
    moving = np.flatnonzero(np.isfinite(norm) & np.isfinite(lr))
    if kind is None or len(moving) < ENOUGH or not (lr > 0).any():
        return Fit(nan, nan, nan, nan, nan)
    lost = layer.optimizer.memory.shrinkage(lr, np.nan_to_num(layer.decay[part]))
    k, rate, lost, power = steps[moving], lr[moving], lost[moving], 2 if kind == "sgd" else 1
    with np.errstate(divide="ignore", invalid="ignore"):
        felt = rate / norm[moving] ** 2
        law = decay_law(k, felt, lr=rate, shrinkage=lost, kind=kind)
        off = np.square(law.curve / felt - 1)
        remains = np.exp(-2 * power * np.cumsum(lost * np.diff(k, prepend=k[0])))
        grown = 1 - remains * (rate.max() / law.e0 * law.curve / rate) ** power
    if not isfinite(law.e0):
        return Fit(nan, nan, nan, nan, nan)
    fall = 2 * power * float(lost[int(rate.argmax())])
    return Fit(law.k0, law.r2, sqrt(float(off[np.isfinite(off)].mean())), fall, float(grown[np.isfinite(grown)][-1]))


def unsteady(layer: Evidence, *, began: int = 0) -> tuple[float, float] | None:
    """Return the range, over quarters of the steps from `began` on, of the quantity that the law assumes constant.

    For SGD that is ‖∇‖‖w‖, for Adam-like optimizers the length of a step across the weights over the learning rate.
    None if it stayed constant, or was not measured often enough.
    """
    part = slice(max(layer.since, int(np.searchsorted(layer.steps, began))), None)
    with np.errstate(divide="ignore", invalid="ignore"):
        pulls = (layer.gradient if layer.optimizer.kind == "sgd" else layer.angle / layer.lr)[part] * layer.norm[part]
    pulls = pulls[np.isfinite(pulls)]
    if len(pulls) < ENOUGH:
        return None
    means = [sqrt(float(np.square(quarter).mean())) for quarter in np.array_split(pulls, 4)]
    return (min(means), max(means)) if max(means) > _UNSTEADY * min(means) else None


@dataclass(frozen=True)
class Balance:
    """A stretch of constant learning rate and weight decay: the predicted behavior of a layer, and the measured one.

    Attributes:
        first, last: the analyzed steps: the later half of the stretch.
        began: the first step of the stretch.
        lr, decay: η and λ there.
        shrinkage: d, the share of the weights that decay takes per step.
        predicted: the equilibrium that this leads to.
        rate: the root mean square of the angles of single steps.
        error: the relative standard error of `rate`.
        norm: the root mean square of ‖w‖.
        drift: the change of ln‖w‖ per step.
        until: predicted steps from the beginning of the stretch to within 5 % of the predicted norm.
        ends: ‖w‖ at its end.
        left: predicted steps from its end.
        count: the number of measured angles.
        tolerance: how far `rate` may be from the predicted one, as a share of that.
    """

    first: int
    last: int
    began: int
    lr: float
    decay: float
    shrinkage: float
    predicted: Equilibrium
    rate: float
    error: float
    norm: float
    drift: float
    until: float
    ends: float
    left: float
    count: int
    tolerance: float

    @property
    def verdict(self) -> Literal["noisy", "there", "growing", "shrinking", "near", "elsewhere"]:
        """The state of the layer: "there" if the rate is within `tolerance` and decay is balanced to within 20 %.

        For SGD the two are equivalent by Pythagoras: growth over decay is (rate/predicted)². The layer is "noisy" if
        the error is above 10 %, unless the rate is more than three errors off, and "near" if the norm is constant and
        the rate within two errors of the predicted one.
        """
        off, change = self.rate / self.predicted.rate - 1, self.drift / self.shrinkage
        if self.error > 0.1 and abs(off) <= 3 * self.error * self.rate / self.predicted.rate:
            return "noisy"
        if abs(change) > 0.2:
            return "growing" if change > 0 else "shrinking"
        if abs(off) <= self.tolerance:
            return "there"
        return "near" if abs(self.rate - self.predicted.rate) <= 2 * self.error * self.rate else "elsewhere"

    @property
    def arrives(self) -> bool:
        """True if the run agrees with `left`: the norm moves that way, at that pace to within a factor of three."""
        if not (isfinite(self.left) and self.left > 0 and isfinite(self.drift) and self.drift):
            return False
        near = self.predicted.norm * (1 + _NEAR if self.ends > self.predicted.norm else 1 - _NEAR)
        paced = log(near / self.ends) / self.drift  # negative if the norm moves the other way
        return paced / _PACE <= self.left <= paced * _PACE


def balance(layer: Evidence) -> Balance | None:
    """Return the last stretch of constant learning rate and decay above 0 with enough measured steps, or None."""
    for stretch in reversed(layer.stretches):
        if layer.decay[stretch.start] > 0 and layer.lr[stretch.start] * layer.decay[stretch.start] < 1:
            found = _balance(layer, stretch)
            if found is not None:
                return found
    return None


def _balance(layer: Evidence, stretch: slice) -> Balance | None:
    rule, steps = layer.optimizer, layer.steps
    assert rule.kind is not None
    began, end = int(steps[stretch.start]), int(steps[stretch.stop - 1])
    later = np.arange(stretch.start, stretch.stop)
    later = later[steps[later] > max((began + end) / 2, began + rule.settles)]
    angles, norms = layer.angle[later], layer.norm[later]
    angles, there, known = angles[np.isfinite(angles)], steps[later][np.isfinite(norms)], norms[np.isfinite(norms)]
    if len(angles) < ENOUGH or len(known) < ENOUGH or there[-1] <= there[0]:
        return None
    lr, decay = float(layer.lr[stretch.start]), float(layer.decay[stretch.start])
    pull = _pull(layer, later)
    at = equilibrium(lr, decay, kind=rule.kind, gradient=pull, **rule.options)
    quarter = max(1, len(known) // 4)
    change = float(np.log(known[-quarter:]).mean() - np.log(known[:quarter]).mean())
    rate = sqrt(float(np.square(angles).mean()))
    start = layer.norm[stretch]
    return Balance(
        first=int(there[0]),
        last=int(there[-1]),
        began=began,
        lr=lr,
        decay=decay,
        shrinkage=float(rule.memory.shrinkage(lr, decay)),
        predicted=at,
        rate=rate,
        error=_error(np.square(angles)) / 2,
        norm=sqrt(float(np.square(known).mean())),
        drift=change / float(there[-quarter:].mean() - there[:quarter].mean()),
        until=_until(at, float(start[np.isfinite(start)][0]), layer),
        ends=float(known[-1]),
        left=_until(at, float(known[-1]), layer),
        count=len(angles),
        tolerance=rule.tolerance,
    )


def _pull(layer: Evidence, later: np.ndarray) -> float | None:
    """Return what the norm at equilibrium depends on: g̃ = ‖∇‖‖w‖ for SGD, √n for AdamW."""
    if layer.optimizer.kind == "adamw":
        return sqrt(prod(layer.info.shape))
    turns = layer.gradient[later] * layer.norm[later]
    seen = turns[np.isfinite(turns)]
    return sqrt(float(np.square(seen).mean())) if len(seen) else None


def _error(squares: Floats) -> float:
    """Return the relative standard error of a mean, from means of consecutive batches because steps are correlated."""
    means = np.array([part.mean() for part in np.array_split(squares, _BATCHES)])
    mean = float(squares.mean())
    return float(means.std(ddof=1)) / sqrt(_BATCHES) / mean if mean > 0 else nan


def _until(at: Equilibrium, start: float, layer: Evidence) -> float:
    if not (isfinite(at.norm) and at.norm > 0 and isfinite(start) and start > 0):
        return nan
    try:
        return steps_until(at, start=start, within=_NEAR, kind=layer.optimizer.kind or "sgd")
    except DynamicsError:
        return nan
