"""What the conditioning paper says of perceptrons in training (section 4, appendix C), beside what came out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, isfinite, log

import numpy as np

from gyroscope.conditioning import percent
from gyroscope_lab.papers.conditioning.perceptron_courses import FACTORS, Course, Kind, Values, a_layer
from gyroscope_lab.papers.conditioning.perceptron_tables import as_text, inner, middle
from gyroscope_lab.papers.study import Verdict

Courses = Mapping[Kind, Course]

#: A factor of two a layer is what "exponential" is taken to mean: 5·10⁵ over the 19 layers between.
EXPONENTIAL = 2.0
#: "Stable" and "preserved" are taken to mean: the largest of all layers is at most so many times the smallest.
APART = 10.0
#: "Better" is taken to mean in nine cases of ten.
MOSTLY = 0.9
#: Which κ_p is compared throughout the training.
SHARE = 0.5
# The loss of guessing among ten classes; a network that does not train stays within a tenth of it.
_GUESS = log(10)
_PASSES = {"x": ("input", "forward"), "g": ("output gradient", "backward")}


def magnitudes(courses: Courses) -> list[Verdict]:
    """Of figures 3 and A5."""
    random, he = Kind("uniform", normalized=False), Kind("he_normal", normalized=False)
    found = []
    for name, (what, passes) in _PASSES.items():
        if random in courses:
            first, last = ends(courses[random], name)
            found.append(
                Verdict(
                    f"from a random start the magnitude of the layer {what} of Plain decreases exponentially in the "
                    f"{passes} pass",
                    "exponential decrease",
                    f"λmax({FACTORS[name]}) × {first:.2g} a layer at first, × {last:.2g} in the end",
                    bool(max(first, last) < 1 / EXPONENTIAL),
                )
            )
    for name, (what, _) in _PASSES.items():
        if he in courses:
            first, last = apart(courses[he], name)
            found.append(
                Verdict(
                    f"from He's start the magnitude of the layer {what} of Plain is stable across layers",
                    "stable",
                    f"λmax({FACTORS[name]}) differs by a factor of {first:.3g} between layers at first, {last:.3g} in "
                    "the end",
                    first <= APART,
                )
            )
    return found + _preserved(courses) + _trains(courses)


def ends(course: Course, name: str) -> tuple[float, float]:
    """The factor a layer, at the first analysis and at the last."""
    first, last = (a_layer(course.lambdas[name][place], forward=name == "x") for place in (0, -1))
    return first, last


def apart(course: Course, name: str) -> tuple[float, float]:
    """The largest λmax of all layers over the smallest, at the first analysis and at the last; infinite if that is 0.

    A factor a layer says less: of 1.4 it makes 600 over 19 layers.
    """
    first, last = (inner(course.lambdas[name][place], name) for place in (0, -1))
    return _apart(first), _apart(last)


def _apart(values: Values) -> float:
    return float(values.max() / values.min()) if values.min() > 0 and isfinite(values.max()) else inf


def exponential(factor: float) -> bool:
    """Whether a factor a layer, up or down, is exponential.

    >>> exponential(1.4), exponential(0.2)
    (False, True)
    """
    return not 1 / EXPONENTIAL < factor < EXPONENTIAL


def _preserved(courses: Courses) -> list[Verdict]:
    found = []
    for name, (what, passes) in _PASSES.items():
        its = {kind: apart(one, name) for kind, one in courses.items() if kind.normalized}
        if its:
            told = (
                f"{kind.start}: {first:.3g} at first (× {ends(courses[kind], name)[0]:.2f} a layer in the {passes} "
                f"pass), {last:.3g} in the end"
                for kind, (first, last) in its.items()
            )
            found.append(
                Verdict(
                    f"BN preserves the magnitude of the layer {what} for both initializations",
                    "well preserved",
                    f"λmax({FACTORS[name]}) differs between layers by a factor of, {'; '.join(told)}",
                    all(max(factors) <= APART for factors in its.values()),
                )
            )
    return found


def _trains(courses: Courses) -> list[Verdict]:
    plain, normalized = (courses.get(Kind("uniform", normalized=which)) for which in (False, True))
    if plain is None or normalized is None:
        return []
    return [
        Verdict(
            "from a random start BN trains, and Plain does not",
            "a figure of losses, no numbers",
            f"training loss {normalized.loss:.3g} and {plain.loss:.3g}; guessing has {_GUESS:.3g}",
            normalized.loss < _GUESS / 2 and not plain.loss < 0.9 * _GUESS,
        )
    ]


def conditions(courses: Courses) -> list[Verdict]:
    """Of figures 5 and A6."""
    found = []
    for init in dict.fromkeys(kind.init for kind in courses):
        plain, normalized = (courses.get(Kind(init, normalized=which)) for which in (False, True))
        if plain is None or normalized is None:
            continue
        for name, (what, _) in _PASSES.items():
            says = f"BN improves the conditioning of the layer {what}, from a {plain.kind.start} start"
            found += [_at_first(plain, normalized, name, says), _throughout(plain, normalized, name, says)]
    return found


def _at_first(plain: Course, normalized: Course, name: str, says: str) -> Verdict:
    """Of all p and all layers, wherever at least one of the two is finite."""
    pairs = [
        (a, b)
        for p, values in plain.kappas[name].items()
        for a, b in zip(*(_known(one, name)[0] for one in (values, normalized.kappas[name][p])), strict=True)
        if min(a, b) < np.inf
    ]
    lower = sum(bool(b < a) for a, b in pairs)
    here = f"κ_p({FACTORS[name]}) lower in {lower} of {len(pairs)} layers and p"
    return Verdict(f"{says}: at first", "lower κ_p", here, bool(pairs and lower >= MOSTLY * len(pairs)))


def _throughout(plain: Course, normalized: Course, name: str, says: str) -> Verdict:
    """Of one p, at all analyses that both have."""
    both = [_known(one.kappas[name][SHARE], name) for one in (plain, normalized)]
    count = min(map(len, both))
    a, b = (one[:count] for one in both)
    lower = int((b < a).sum())
    here = (
        f"κ_{percent(SHARE)}%({FACTORS[name]}) lower in {lower} of {a.size} layers and analyses; "
        f"{as_text(middle(b))} and {as_text(middle(a))} in the middle; in the last analysis in "
        f"{int((b[-1] < a[-1]).sum())} of {len(a[-1])}, {as_text(middle(b[-1]))} and {as_text(middle(a[-1]))}"
    )
    return Verdict(f"{says}: over the training", "lower κ_p", here, bool(lower >= MOSTLY * a.size))


def _known(values: Values, name: str) -> Values:
    """Of the layers that differ, with what is undefined as infinite."""
    return np.nan_to_num(inner(values, name), nan=np.inf, posinf=np.inf)


def adam(courses: Courses, sgd: Course | None) -> list[Verdict]:
    """Of figure A7; `sgd` is what SGD made of the plain network."""
    plain, normalized = (courses.get(Kind("uniform", normalized=which)) for which in (False, True))
    found = []
    if plain is not None and sgd is not None:
        for name, (what, _) in _PASSES.items():
            first, last = ends(plain, name)
            beside = ends(sgd, name)[1]
            found.append(
                Verdict(
                    f"Adam adjusts the magnitude of the layer {what} of Plain, and SGD does not",
                    "well adjusted",
                    f"λmax({FACTORS[name]}) × {first:.2g} a layer at first, × {last:.2g} in the end (a factor of "
                    f"{apart(plain, name)[1]:.3g} between layers); with SGD × {beside:.2g} ({apart(sgd, name)[1]:.3g})",
                    apart(plain, name)[1] <= APART and exponential(beside),
                )
            )
    if plain is not None and normalized is not None:
        found.append(_steadier(plain, normalized))
    return found + conditions(courses)


def _steadier(plain: Course, normalized: Course) -> Verdict:
    """Stable is taken to mean: whatever the learning rate."""
    ranges = [sorted(nan_last(one.tried.values())) for one in (normalized, plain)]
    ours, theirs = ranges
    return Verdict(
        "BN stabilizes the training",
        "better than without",
        f"over the learning rates the loss ends at {ours[0]:.3g} to {ours[-1]:.3g} with BN, {theirs[0]:.3g} to "
        f"{theirs[-1]:.3g} without",
        ours[0] < theirs[0] and ours[-1] < theirs[-1],
    )


def nan_last(values: Iterable[float]) -> list[float]:
    """Losses with those that diverged as infinite, so that they can be ordered.

    >>> nan_last([1.0, float("nan")])
    [1.0, inf]
    """
    return [value if isfinite(value) else inf for value in values]


def units(courses: Courses) -> list[Verdict]:
    """Of figure A12."""
    found = []
    for kind, one in courses.items():
        if kind.normalized:
            most = {name: int(values.max()) for name, values in one.units.items()}
            found.append(
                Verdict(
                    "BN has no dying and no full neurons",
                    "none",
                    f"at most {most['dying']} dying and {most['full']} full in a layer, at any time",
                    not any(most.values()),
                )
            )
            continue
        for name, counts in one.units.items():
            third = max(1, counts.shape[1] // 3)
            shallow, deep = (part.mean() for part in (counts[0, :third], counts[0, -third:]))
            found.append(
                Verdict(
                    f"Plain has {name} neurons, more of them in later layers",
                    "increasing with the layer",
                    f"at first {shallow:.1f} a layer in the first third of the layers and {deep:.1f} in the last",
                    bool(deep > shallow),
                )
            )
            before, after = counts[0].sum(), counts[-1].sum()
            found.append(
                Verdict(
                    f"its {name} neurons are most obvious in the initial iterations",
                    "in the initial iterations",
                    f"{before:.0f} in all layers at first, {after:.0f} in the end",
                    bool(before > after),
                )
            )
    return found
