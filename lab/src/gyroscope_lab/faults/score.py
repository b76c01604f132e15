"""Scores of a diagnosis: recall, precision, false alarms, layers and steps, with exact 95 % intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from scipy.stats import binomtest

from gyroscope_lab.faults.benchmark import Case, Outcome
from gyroscope_lab.faults.injections import FAULTS
from gyroscope_lab.faults.networks import NETWORKS

#: A dated fault is found in time if the step that a finding names is at most this far off.
NEAR = 20
# A fault shows if it costs at least this much accuracy, in every seed.
_COSTS = 0.01


@dataclass(frozen=True)
class Rate:
    """A share of successes.

    >>> str(Rate(9, 10))
    '0.90 (9 of 10; 0.55 to 1.00)'
    """

    right: int
    count: int

    @property
    def value(self) -> float:
        """The share; NaN without cases."""
        return self.right / self.count if self.count else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """The exact 95 % interval of Clopper and Pearson."""
        if not self.count:
            return float("nan"), float("nan")
        found = binomtest(self.right, self.count).proportion_ci(method="exact")
        return float(found.low), float(found.high)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.2f} ({self.right:,} of {self.count:,}; {low:.2f} to {high:.2f})"


@dataclass(frozen=True)
class Score:
    """Scores over some outcomes.

    Attributes:
        recall: runs with a fault that shows, whose first alarm has an accepted kind.
        latent: the same for faults that cost nothing in these runs.
        precision: alarms of an accepted kind among all alarms, those of healthy runs included.
        false_alarms: healthy runs with an alarm.
        layer_first, layer_among_three: runs with a fault in a known layer that shows, in which that layer is named
            first, or among the first three.
        step: runs with a dated fault that shows, whose first alarm names a step at most `NEAR` off.
    """

    recall: Rate
    latent: Rate
    precision: Rate
    false_alarms: Rate
    layer_first: Rate
    layer_among_three: Rate
    step: Rate


def score(outcomes: Iterable[Outcome], shows: Callable[[Case], bool], *, with_loss: bool = True) -> Score:
    """Return the scores of a diagnosis.

    Args:
        outcomes: the outcomes of cases.
        shows: whether a fault costs accuracy in its network; see `showing`.
        with_loss: score the alarms of runs with their loss, or those of the same runs without it.
    """
    tally: dict[str, list[bool]] = {name: [] for name in Score.__dataclass_fields__}
    for one in outcomes:
        alarms = one.alarms if with_loss else one.alarms_default
        if one.case.fault is None:
            tally["false_alarms"].append(bool(alarms))
            tally["precision"] += [False for _ in alarms]
            continue
        accepted = FAULTS[one.case.fault].accepted
        tally["precision"] += [kind in accepted for kind, _, _ in alarms]
        right = bool(alarms) and alarms[0][0] in accepted
        if not shows(one.case):
            tally["latent"].append(right)
            continue
        tally["recall"].append(right)
        if one.layers:
            named = list(alarms[0][1]) if right else []
            tally["layer_first"].append(bool(named) and named[0] in one.layers)
            tally["layer_among_three"].append(any(name in one.layers for name in named[:3]))
        if one.since is not None:
            since = alarms[0][2] if right else None
            tally["step"].append(since is not None and abs(since - one.since) <= NEAR)
    return Score(**{name: Rate(sum(found), len(found)) for name, found in tally.items()})


def showing(outcomes: Sequence[Outcome]) -> Callable[[Case], bool]:
    """Return a function that says whether a fault shows: whether every seed is worse than every healthy one.

    It must also cost a point of accuracy on average. Healthy are the runs of the network as it is.
    """
    healthy: dict[str, list[float]] = {}
    faulty: dict[tuple[str, str], list[float]] = {}
    for one in outcomes:
        if one.case.variant == "as it is":
            healthy.setdefault(one.case.network, []).append(one.accuracy)
        elif one.case.fault is not None:
            faulty.setdefault((one.case.network, one.case.fault), []).append(one.accuracy)

    def shows(case: Case) -> bool:
        usual, found = healthy.get(case.network, []), faulty.get((case.network, str(case.fault)), [])
        if not usual or not found:
            return True
        return max(found) < min(usual) and mean(found) <= mean(usual) - _COSTS

    return shows


def parts(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Return the outcomes by how much the rules have seen of them."""
    return {
        "development: six networks, first seed": [one for one in outcomes if not one.case.is_held_out],
        "held out: the same networks, other seeds": [
            one for one in outcomes if one.case.is_held_out and not NETWORKS[one.case.network].held_out
        ],
        "held out: four networks that no threshold has seen": [
            one for one in outcomes if NETWORKS[one.case.network].held_out
        ],
    }


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Return the scores as Markdown: by part, with and without the loss, and per fault."""
    shows = showing(outcomes)
    heads = ["", "recall", "precision", "healthy runs with an alarm", "layer first", "among three", "step"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name, some in parts(outcomes).items():
        for with_loss in (True, False) if some else ():
            found = score(some, shows, with_loss=with_loss)
            cells = [found.recall, found.precision, found.false_alarms, found.layer_first, found.layer_among_three]
            how = "with the loss" if with_loss else "by default"
            lines.append(f"| {name}, {how} | {' | '.join(map(str, [*cells, found.step]))} |")
    lines += ["", "| fault | shows: found | shows: layer first | latent: found | alarms that are not accepted |"]
    lines.append("|---|---|---|---|---|")
    for fault in FAULTS:
        some = [one for one in outcomes if one.case.fault == fault and one.case.is_held_out]
        if some:
            found = score(some, shows)
            wrong = sorted({kind for one in some for kind, _, _ in one.alarms if kind not in FAULTS[fault].accepted})
            row = [_short(found.recall), _short(found.layer_first), _short(found.latent), ", ".join(wrong)]
            lines.append(f"| {fault} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _short(rate: Rate) -> str:
    return f"{rate.right} of {rate.count}" if rate.count else "–"
