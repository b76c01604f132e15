"""`diagnose`: what is wrong with a run, in which layer, since when, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gyroscope.base.accepted import listed
from gyroscope.diagnosis.course import Course, course_of
from gyroscope.diagnosis.finding import PAGE, Diagnosis, Finding
from gyroscope.diagnosis.rules import CONSEQUENCES, KINDS, LIMITS, RULES, of_stall, told
from gyroscope.diagnosis.stall import LAST_LAYER_FILE, stalled
from gyroscope.errors import GyroscopeError, MonitorError
from gyroscope.store import Run, load

#: The series without which rules cannot tell that nothing is wrong.
NEEDED = ("rate_per_step", "weight_norm", "gradient_norm", "lr")


def diagnose(run: Run | str | Path | Any, *, mute: str | Iterable[str] = ()) -> Diagnosis:
    """State what is wrong with a run, the most important first.

    The rules and their thresholds are in `gyroscope.diagnosis.rules`; docs/diagnosis.md explains each, and says how
    often they are right. A finding is stated only if the measurements support it.

    Args:
        run: a run, its folder, or the monitor that records it.
        mute: kinds of finding to leave out.

    Raises:
        MonitorError: an argument is invalid.
        StoreError: there is no run, or it cannot be read.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(f"{folder}/first") as opened:
    ...     print(diagnose(opened))
    first: the run does not hold enough to tell more
    It has 5 measured steps; rules need 10. Train longer, or measure more often: watch(every=1).
    It has no series rate_per_step, weight_norm, gradient_norm, lr; gyroscope.watch records them unless quantities= ...
    """
    muted = checked_kinds(mute)
    if isinstance(run, str | Path):
        with load(run) as opened:
            return diagnose(opened, mute=muted)
    if not isinstance(run, Run):
        own = getattr(run, "run", None)
        if not isinstance(own, Run):
            raise MonitorError(
                f"`run` must be a run, its folder or a monitor, got {type(run).__name__}. Try 'runs/first'."
            )
        with own as opened:
            return diagnose(opened, mute=muted)
    course = course_of(run)
    found = findings(course)
    if not any(one.kind == "stalled" for one in found):
        found = [*_followed(run), *found]
    found += _balance(run)
    missing = _missing(course)
    return Diagnosis(run.name, ordered(found, muted), missing, decided=not missing)


def checked_kinds(given: Any) -> tuple[str, ...]:
    """Return kinds of finding, or reject unknown ones."""
    kinds = tuple(listed(given))
    unknown = [one for one in kinds if one not in KINDS]
    if unknown:
        raise MonitorError(f"`mute` must name kinds of finding ({', '.join(KINDS)}), got {unknown[0]!r:.80}.")
    return kinds


def findings(course: Course) -> list[Finding]:
    """Return what the rules find, in their order.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as opened:
    ...     findings(course_of(opened))
    []
    """
    if not course.layers or not len(course.steps):
        return []
    with np.errstate(all="ignore"):
        return [found for rule in RULES if (found := rule(course)) is not None]


def ordered(found: Iterable[Finding], muted: Iterable[str] = ()) -> tuple[Finding, ...]:
    """Return findings by importance; consequences of an alarm become notes.

    An alarm may have consequences that rules find too: a rate that is far too high kills units. The first alarm, in the
    order of the rules, is the likeliest cause, so later ones that are such consequences become notes.

    >>> fast = Finding("too_fast", "serious", (), None, "The rate is too high.")
    >>> dead = Finding("dead_units", "warning", ("fc.weight",), 10, "Half of the units are dead.")
    >>> [(one.kind, one.severity) for one in ordered([fast, dead])]
    [('too_fast', 'serious'), ('dead_units', 'note')]
    """
    kept: list[Finding] = []
    for one in found:
        if one.kind in set(muted):
            continue
        if one.is_alarm and one.kind in CONSEQUENCES and any(other.is_alarm for other in kept):
            one = replace(one, severity="note", sentence=f"Likely a consequence: {one.sentence}")
        kept.append(one)
    # Stable: among equals, the order of the rules.
    return tuple(sorted(kept, key=lambda one: not one.is_alarm))


def _missing(course: Course) -> tuple[str, ...]:
    """Return what the run lacks to tell that nothing is wrong, and how to record it."""
    said = []
    measured = int(np.isfinite(course["lr"]).any(1).sum()) if course.known("lr") else len(course.steps)
    if measured < LIMITS.enough:
        said.append(
            f"It has {measured} measured {'step' if measured == 1 else 'steps'}; rules need {LIMITS.enough}. Train "
            "longer, or measure more often: watch(every=1)."
        )
    lacking = [name for name in NEEDED if name not in course.series]
    if lacking:
        said.append(
            f"It has no series {', '.join(lacking)}; gyroscope.watch records them unless quantities= leaves them out."
        )
    return tuple(said)


def _followed(run: Run) -> list[Finding]:
    """Return the stall that a file of the last layer at every step shows, if the run has one."""
    if not (run.path / LAST_LAYER_FILE).exists():
        return []
    with suppress(MonitorError):  # a damaged file
        stall = stalled(run)
        return [of_stall(stall)] if stall is not None and stall.until is None else []
    return []


def _balance(run: Run) -> list[Finding]:
    """Return a note about layers that weight decay and steps keep in balance, or not: what `explain` states of each."""
    if not {"invariance", "lr", "weight_decay", "weight_norm"} <= run.quantities.keys():
        return []  # explain could not decide it
    from gyroscope.diagnosis.explain import explain  # loads the theory, which the live diagnosis does not need

    with suppress(GyroscopeError):  # too little was recorded
        known = [one for one in explain(run).entries if one.at_equilibrium in ("yes", "no")]
        there = [one.layer for one in known if one.at_equilibrium == "yes"]
        away = [one.layer for one in known if one.at_equilibrium == "no"]
        if known:
            said = (
                f"{len(there):,} of {len(known):,} scale-invariant layers turn at the rate at which steps and weight "
            )
            said += "decay balance" + (f"; {told(away)} {'does' if len(away) == 1 else 'do'} not." if away else ".")
            remedy = "Until all are there, the learning rate does not determine how fast layers turn: see explain."
            return [Finding(
                "equilibrium", "note", tuple(away), None, said, {"there": len(there), "away": len(away)},
                remedy if away else "Nothing needs to be done: η and λ determine how fast these layers turn.",
                f"{PAGE}#equilibrium",
            )]  # fmt: skip
    return []
