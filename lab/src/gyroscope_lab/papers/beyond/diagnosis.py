"""The share of right diagnoses, on faults that were put into small networks and on healthy trainings.

The cases are those of `gyroscope benchmark diagnosis`. The verdicts are kept in the archive, one per line, and cases
that are there are not trained again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.faults.benchmark import SUBSET, Case, Outcome, cases, continued, read
from gyroscope_lab.faults.injections import FAULTS
from gyroscope_lab.faults.score import Rate, Score, score, showing
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, no_trials

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What is aimed at: the name of a score, the least or the most that it should be, and the claim in words.
_AIMS = (
    ("recall", 0.9, "faults that cost accuracy are found"),
    ("precision", 0.95, "alarms are right"),
    ("false_alarms", 0.02, "healthy trainings raise no alarm"),
    ("layer_first", 0.8, "the right layer is named first"),
    ("layer_among_three", 0.95, "or among the first three"),
    ("step", 0.95, "the step of a dated fault is at most 20 off"),
)
# The cases of the smoke scale: one fault of each family, and two healthy variants.
_SMOKE = {"faults": ("absent", "weights x 100", "NaN gradient"), "variants": ("as it is", "warm-up")}


def _cases(lab: Lab) -> Iterator[Case]:
    if lab.scale == "smoke":
        return cases(networks=("mlp-4",), seeds=SUBSET, **_SMOKE)
    return cases(seeds=SUBSET) if lab.scale == "small" else cases()


def conclude(lab: Lab) -> Report:
    """Score the diagnosis of held-out runs."""
    path = lab.archive.root / f"diagnosis-{lab.scale}.jsonl"
    if lab.known and not path.exists():
        raise LabError(f"{path} is not there. Train the cases first (leave --known out).")
    outcomes = read(path) if lab.known else continued(path, _cases(lab), jobs=lab.jobs or 2)
    held_out = [one for one in outcomes if one.case.is_held_out]
    found = score(held_out, showing(outcomes))
    silent = score(held_out, showing(outcomes), with_loss=False)
    rows = tuple((says, str(getattr(found, name)), str(getattr(silent, name))) for name, _, says in _AIMS)
    return Report(
        figures={"figure": _figure(held_out, outcomes)},
        tables=(Table("Scores on runs that no threshold has seen", ("", "with the loss", "by default"), rows),),
        verdicts=tuple(_verdict(found, name, aim, says, lab) for name, aim, says in _AIMS),
        numbers={"cases": len(outcomes), "held_out": len(held_out)},
    )


def _verdict(found: Score, name: str, aim: float, says: str, lab: Lab) -> Verdict:
    rate: Rate = getattr(found, name)
    most = name == "false_alarms"
    holds = None
    if rate.count and lab.scale != "smoke":
        holds = rate.value <= aim if most else rate.value >= aim
    return Verdict(says, f"{'at most' if most else 'at least'} {aim:g} (our aim)", str(rate), holds)


def _figure(held_out: list[Outcome], outcomes: list[Outcome]) -> Figure:
    """Draw the share of runs in which each fault is found: where it costs accuracy, and where it does not."""
    from matplotlib.figure import Figure

    shows = showing(outcomes)
    scores = {name: score([one for one in held_out if one.case.fault == name], shows) for name in FAULTS}
    scores = {name: one for name, one in reversed(scores.items()) if one.recall.count + one.latent.count}
    figure = Figure(figsize=(6.4, 0.6 + 0.22 * len(scores)), layout="constrained")
    ax = figure.subplots()
    for place, one in enumerate(scores.values()):
        for rate, color, offset in ((one.recall, "C0", 0.18), (one.latent, "C7", -0.18)):
            ax.barh(place + offset, rate.value, 0.32, color=color)
            ax.text(1.01, place + offset, f"{rate.right}/{rate.count}" if rate.count else "", va="center", fontsize=5)
    ax.set_yticks(range(len(scores)), list(scores), fontsize=7)
    ax.set_xlim(0, 1)
    ax.set_xlabel("share of runs in which the fault is found (blue: it costs accuracy; gray: it does not)", fontsize=7)
    return figure


STUDIES = (
    Study(
        "beyond/diagnosis",
        "Faults in small networks: how often the diagnosis is right",
        no_trials,
        conclude,
        beside={"small": 2400.0},
    ),
)
