"""What a run holds of one layer: its series, its optimizer, and the stretches in which nothing was turned by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope.diagnose.explain_optimizer import Optimizer, optimizer_of
from gyroscope.store import LayerInfo, Run
from gyroscope.theory.law import Floats
from gyroscope.theory.recurrence import optimizers_in

SERIES = (
    "invariance", "lr", "weight_decay", "weight_norm", "gradient_norm", "rate", "update_ratio", "effective_lr",
)  # fmt: skip
#: Measured steps without which nothing is said.
ENOUGH = 10
# Learning rates are recorded in float32, and schedulers compute the same one in several ways.
_SAME = 1e-6
_HELD = 1e-4


@dataclass(frozen=True, eq=False)
class Evidence:
    """One layer of a run, at the steps at which its optimizer was measured; NaN where a number is not known.

    Attributes:
        info: its name, kind and shape.
        optimizer: what steps it.
        recorded: which of the series the run has.
        steps: k, [S].
        cosine: ⟨w,∇⟩/(‖w‖‖∇‖), [S].
        lr, decay: α and λ, [S].
        norm, gradient: ‖w‖ after the step and ‖∇‖, [S].
        angle: by how much it turned in the one step, in radians, [S].
        resumed: the step at which the run was last gone on with, or None. Which optimizer went before is not recorded.
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
        """The first measurement that the recorded optimizer answers for."""
        return 0 if self.resumed is None else int(np.searchsorted(self.steps, self.resumed, side="right"))

    @cached_property
    def stepped(self) -> bool:
        """Whether an optimizer holds it; where the run does not say, it is taken to be so."""
        known = "weight_decay" in self.recorded and len(self.decay[self.since :])
        return not known or bool(np.isfinite(self.decay[self.since :]).any())

    @cached_property
    def decayed(self) -> bool:
        """Whether weight decay acted at any step since the run was last gone on with."""
        return self.optimizer.unseen or bool((self.decay[self.since :] > 0).any())

    @cached_property
    def norms(self) -> Floats:
        """The norms that are known since then."""
        norm = self.norm[self.since :]
        return np.asarray(norm[np.isfinite(norm)])

    @cached_property
    def held(self) -> bool:
        """Whether its norm was the same at all steps since then."""
        return len(self.norms) > 1 and float(np.ptp(self.norms)) <= _HELD * float(self.norms.mean())

    @cached_property
    def broken(self) -> int | None:
        """The step from which on its norm is not finite, or None."""
        return self._ends(self.norm)

    @cached_property
    def ungraded(self) -> int | None:
        """The step from which on it has no gradient that is finite, or None.

        One row without a gradient is no sign of it: the row that closes a run is measured without gradients.
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
        """Which of these series the run lacks."""
        return [name for name in names if name not in self.recorded]


def evidence(run: Run, chosen: Sequence[int]) -> list[Evidence]:
    """What a run holds of its layers at some positions.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     (found,) = evidence(run, [1])
    >>> found.info.name, found.missing("rate", "weight_norm"), found.steps.tolist()
    ('conv2.weight', ['weight_norm'], [10, 20, 30, 40])
    """
    recorded = frozenset(SERIES) & frozenset(run.quantities)
    series = {name: run.series(name).astype(np.float64) for name in recorded}
    nothing = np.full((len(run.steps), len(run.layers)), np.nan)
    given = optimizers_in(run.meta)
    resumed = resumed_at(run)
    found = []
    for i in chosen:
        info = run.layer_table[i]
        columns = {name: series.get(name, nothing)[:, i] for name in SERIES}
        there = np.any([np.isfinite(columns[name]) for name in SERIES], axis=0)
        columns = {name: column[there] for name, column in columns.items()}
        known: Mapping[str, Any] = given[info.part] if info.part < len(given) else {}
        found.append(
            Evidence(
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
        )
    return found


def resumed_at(run: Run) -> int | None:
    """The step at which a run was last gone on with; None where it never was, or from the beginning."""
    return (run.attempts[-1].start_step or None) if len(run.attempts) > 1 else None


def _angle(steps: npt.NDArray[np.int64], rate: Floats, ratio: Floats) -> Floats:
    """The angle of single steps: as it was measured where the step before was measured too.

    Else from the length of the step: by 2 arcsin(½‖Δw‖/‖w‖) a step turns that leaves the norm as it is.
    """
    single = np.diff(steps, prepend=steps[:1] - 2) == 1
    with np.errstate(invalid="ignore"):
        chord = 2 * np.arcsin(np.clip(ratio / 2, 0.0, 1.0))
    return np.asarray(np.where(single & np.isfinite(rate), rate, chord))
