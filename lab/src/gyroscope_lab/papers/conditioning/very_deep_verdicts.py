"""What section 5 of the conditioning paper says of last layers, held against courses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from gyroscope_lab.papers.conditioning.very_deep_course import Course
from gyroscope_lab.papers.study import Verdict


def of_depths(courses: Sequence[Course], *, full: bool) -> list[Verdict]:
    """Figure 6: ResNets, the shallow ones first.

    Args:
        courses: of ResNets, by depth.
        full: whether they are the paper's; where not, a network that is not stuck says nothing.
    """
    return [
        _grows(
            courses,
            "the larger is the input of its last layer at the start",
            "λmax(Σx)",
            lambda one: float(one.followed.lambda_x[0]),
        ),
        _grows(courses, "the more its loss rises in the first steps", "largest over first loss", lambda one: one.rise),
        _grows(
            courses,
            "the larger is the gradient of its last layer at the start",
            "λmax of its second moment",
            lambda one: float(one.followed.lambda_m[0]),
        ),
        _grows(
            courses,
            "the larger does the weight of its last layer become",
            "largest ‖W‖",
            lambda one: one.largest("weight_norm"),
            full=full,
        ),
        *(verdict for one in courses for verdict in _stuck(one, full=full)),
    ]


def of_last_norm(courses: Sequence[Course], *, full: bool) -> list[Verdict]:
    """Figure 7: a ResNet, and the same with batch normalization before its last layer."""
    plain, normal = (_of(courses, name) for name in ("ResNet", "ResNet_LastBN"))
    if plain is None or normal is None:
        return []
    return [
        _steady(plain, normal, full=full),
        _smaller_input(normal, [plain]),
        Verdict(
            f"{normal.network}: the loss does not rise as it does without the normalization",
            "steady",
            f"to {normal.rise:.3g} times the first, against {plain.rise:.3g}",
            normal.rise < plain.rise,
        ),
        *_stuck(plain, full=full),
    ]


def of_preactivation(courses: Sequence[Course], *, full: bool) -> list[Verdict]:
    """Figure 9: a ResNet, a PreResNet, and PreResNet_v1, which has no batch normalization before its last layer."""
    plain, normal, without = (_of(courses, name) for name in ("ResNet", "PreResNet", "PreResNet_v1"))
    if plain is None or normal is None or without is None:
        return []
    shorter = 0 < without.stuck < plain.stuck
    return [
        Verdict(
            f"{without.network}: the network is stuck at ln {without.classes}, for less long than ResNet",
            "stuck, and escapes faster",
            f"{_steps(without)} against {_steps(plain)}",
            shorter if full or shorter else None,
        ),
        _steady(plain, normal, full=full),
        _smaller_input(normal, [plain, without]),
        *_stuck(without, full=full),
    ]


def _of(courses: Sequence[Course], architecture: str) -> Course | None:
    return next((one for one in courses if one.network.architecture == architecture), None)


def _grows(
    courses: Sequence[Course], what: str, symbol: str, value: Callable[[Course], float], *, full: bool = True
) -> Verdict:
    values = [value(one) for one in courses]
    grows = all(a < b for a, b in pairwise(values))
    told = ", ".join(f"{one.network.depth}: {number:.3g}" for one, number in zip(courses, values, strict=True))
    decided = len(values) > 1 and (full or grows)
    return Verdict(f"the deeper a ResNet, {what}", "so", f"{symbol} by depth: {told}", grows if decided else None)


def _stuck(one: Course, *, full: bool) -> list[Verdict]:
    """Whether the loss came to stay at that of a guess, with a small input and a large weight, and whether it left."""
    its = one.dominated
    # A network whose input is off from the start of it on is dead, which is another thing.
    holds = its.stop - its.start >= one.least
    found = Verdict(
        f"{one.network}: after its rise the loss stays at ln {one.classes}, with a small input and a large weight in "
        "the last layer",
        "stuck at ln 10: weight domination",
        _told(one),
        holds if full or holds else None,
    )
    return [found] if one.stall is None else [found, _escapes(one, full=full)]


def _told(one: Course) -> str:
    found, its = one.stall, one.dominated
    if found is None:
        return f"not within {len(one.followed):,} steps; loss {one.last_loss:.3g} in the end"
    if its.start == its.stop:
        return f"dead from step {found.since:,} on"
    low, high = one.before
    small, last = float(np.median(one.followed.lambda_x[its])), float(one.followed.weight_norm[its.stop - 1])
    return (
        f"for {its.stop - its.start:,} of {len(one.followed):,} steps, from step {found.since:,}, at a loss of "
        f"{np.median(one.followed.loss[its]):.3g} (before: {low:.3g} to {high:.3g}); λmax(Σx) fell from "
        f"{found.lambda_x[0]:.3g} to {small:.3g}, ‖W‖ grew from {found.weight_norm[0]:.3g} to {last:.3g}"
    )


def _escapes(one: Course, *, full: bool) -> Verdict:
    """Whether a network that was stuck learned in the end; one that still moves may need more steps than there were."""
    steps, until = len(one.followed), None if one.stall is None else one.stall.until
    here, holds = f"not within {steps:,} steps", None
    if until is not None:
        here, holds = f"at step {until:,}; loss {one.last_loss:.3g} in the end", True
    elif one.dead is not None:
        off = one.off[one.dead - 1 :]
        here = (
            f"dead since step {one.dead:,}: x = 0 and ∂L/∂W = 0 in {off.sum():,} of {len(off):,} batches; "
            f"test accuracy {100 * one.result.test_accuracy:.1f} %"
        )
        holds = False if full else None
    return Verdict(f"{one.network}: it escapes from there", "with enough iterations", here, holds)


def _steady(plain: Course, normal: Course, *, full: bool) -> Verdict:
    holds = plain.stuck > 0 and normal.stuck == 0
    return Verdict(
        f"{normal.network}: the network is trained steadily where ResNet is stuck",
        "no weight domination",
        f"at ln {normal.classes} for {_steps(normal)} against {_steps(plain)}; loss {normal.last_loss:.3g} against "
        f"{plain.last_loss:.3g} in the end",
        holds if full or holds else None,
    )


def _steps(one: Course) -> str:
    return f"{one.stuck:,} steps" + (f" (dead since step {one.dead:,})" if one.dead is not None else "")


def _smaller_input(normal: Course, others: Sequence[Course]) -> Verdict:
    largest = normal.largest("lambda_x")
    of_others = [one.largest("lambda_x") for one in others]
    return Verdict(
        f"{normal.network}: the input of the last layer never becomes as large as without batch normalization",
        "no large input",
        f"λmax(Σx) up to {largest:.3g}, against "
        + " and ".join(
            f"{value:.3g} ({one.network.architecture})" for one, value in zip(others, of_others, strict=True)
        ),
        largest < min(of_others),
    )
