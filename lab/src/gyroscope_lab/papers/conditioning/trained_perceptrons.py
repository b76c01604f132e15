"""Deep perceptrons while they are trained (figures 3, 5, A5 to A7 and A12 of the conditioning paper).

A network of 20 layers of 256 units, with batch normalization ("BN") and without ("Plain"), from weights of
U(±1/√fan_in) ("random") and of N(0, 2/fan_in) ("He"). With h_k = W_k x_{k−1}, λmax(Σx) is the magnitude of the inputs
of layer k, and λmax(Σ∇h) that of the gradients at its outputs. A ReLU halves E[x²] and a random start divides it by 3,
so that both lose a factor of 6 per layer in the plain network, and none from He's start. Batch normalization preserves
the magnitude of the inputs; the gradients still grow backwards, by π/(π − 1) ≈ 1.47 per layer at the start of a wide
network.

Choices that the paper does not state: all pixels less their mean, divided by their standard deviation; no biases;
normalization without gain and bias, not after the last layer; Adam with its usual ε of 1e-8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, log
from typing import Any, Literal

import numpy as np

from gyroscope.conditioning import percent
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.at_hand import at_hand, examples, pixels
from gyroscope_lab.papers.conditioning.perceptron_courses import (
    FACTORS,
    STARTS,
    About,
    Course,
    Courses,
    Kind,
    Values,
    a_layer,
    courses,
    draw_all,
    draw_conditions,
    draw_iterations,
    draw_magnitudes,
    draw_units,
)
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

#: "Exponential" is taken to mean a factor of two per layer: 5·10⁵ over the 19 layers between.
EXPONENTIAL = 2.0
#: "Stable" and "preserved" are taken to mean: in every analysis the largest of all layers is at most this many times
#: the smallest.
APART = 10.0
#: A claim that compares two networks is taken to mean: the factor between layers of one is at most that of the other to
#: this power. Half as many orders of magnitude lie between its layers.
FAR_LESS = 0.5
#: "Better" is taken to mean in nine cases of ten; see `mostly`.
MOSTLY = 0.9
#: A claim about networks that have learned as much rests on at least this many analyses of the normalized one.
ANALYSES = 3
#: The share p of the κ_p that is compared throughout the training.
SHARE = 0.5
# The loss of guessing among ten classes; a network that does not train stays within a tenth of it.
_GUESS = log(10)
#: From this training loss on, a network has not begun to learn.
LEARNING = 0.9 * _GUESS
_PASSES = {"x": ("input", "forward"), "g": ("output gradient", "backward")}
_WHENS = {"at first": 0, "in the end": -1}
#: The training of a network: with the gradient of all examples, with that of batches, or with Adam on batches.
Way = Literal["gradient", "sgd", "adam"]


@dataclass(frozen=True)
class Plan:
    """The trainings of a scale.

    Attributes:
        model: the network.
        rates: the learning rates of gradient descent and of SGD.
        adam: the learning rates of Adam.
        few: examples per class where every step takes all of them; None for all there are.
        more: examples per class where a step takes a batch.
        batch: the size of a batch.
        iterations: steps with the gradient of all examples.
        epochs: epochs of SGD.
        adam_epochs: epochs of Adam.
        analyses: the approximate number of analyses of the layers.
    """

    model: str
    rates: tuple[float, ...]
    adam: tuple[float, ...]
    few: int | None
    more: int | None
    batch: int
    iterations: int
    epochs: int
    adam_epochs: int
    analyses: int


_RATES, _ADAM = (0.05, 0.1, 0.5, 1.0), (1e-3, 5e-4, 1e-4)
# The paper does not state how long it trained.
PLANS = {
    "smoke": Plan("mlp-12x32", (0.1, 0.5), (1e-3,), 20, 20, 50, iterations=30, epochs=8, adam_epochs=20, analyses=4),
    "small": Plan("mlp-20x256", _RATES, _ADAM, 50, 100, 256, iterations=40, epochs=12, adam_epochs=40, analyses=6),
    "full": Plan("mlp-20x256", _RATES, _ADAM, None, None, 1024, iterations=500, epochs=20, adam_epochs=20, analyses=25),
}


def task_of(lab: Lab, way: Way, kind: Kind) -> Task:
    """Return the task of a network; with the gradient of all examples an epoch is one step.

    >>> from gyroscope_lab.training.archive import Archive
    >>> task = task_of(Lab(Archive("runs"), "full"), "gradient", Kind("he_normal", normalized=True))
    >>> task.name, task.schedule.batch, task.schedule.epochs
    ('mnist-mlp-20x256', 60000, 500)
    """
    plan = PLANS[lab.scale]
    per_class = plan.few if way == "gradient" else plan.more
    source = at_hand(lab, Source("mnist", per_class=per_class))
    if source.name == "digits":
        source = replace(source, per_class=per_class)
    epochs = {"gradient": plan.iterations, "sgd": plan.epochs, "adam": plan.adam_epochs}[way]
    schedule = Schedule(epochs, batch=examples(source) if way == "gradient" else plan.batch, cuts=())
    options: tuple[tuple[str, Any], ...] = (("batch_norm", kind.normalized), ("init", kind.init), *pixels(source))
    name = f"{source.name}-{plan.model}"
    return Task(name, source, plan.model, options=options, schedule=schedule, precision="float32")


def trials(lab: Lab, way: Way, starts: Sequence[str] = tuple(STARTS)) -> dict[Kind, list[Trial]]:
    """Return the trials of every network at every learning rate.

    >>> from gyroscope_lab.training.archive import Archive
    >>> its = trials(Lab(Archive("runs"), "full"), "adam", ["uniform"])
    >>> [(kind.name, kind.start, [trial.recipe.rate for trial in some]) for kind, some in its.items()]
    [('Plain', 'random', [0.001, 0.0005, 0.0001]), ('BN', 'random', [0.001, 0.0005, 0.0001])]
    """
    plan = PLANS[lab.scale]
    optimizer, called, eps = ("adam", "Adam", 1e-8) if way == "adam" else ("sgd", "SGD", None)
    found: dict[Kind, list[Trial]] = {}
    for kind in (Kind(init, normalized) for init in starts for normalized in (False, True)):
        task = task_of(lab, way, kind)
        steps = task.schedule.epochs * task.schedule.steps(examples(task.source))
        found[kind] = [
            Trial(
                task,
                Recipe(f"{kind.name}, {kind.start} start, {called} {rate:g}", rate, optimizer, eps=eps),
                every=1,  # or the first iteration would not be analyzed
                conditions=max(1, steps // plan.analyses),
            )
            for rate in (plan.adam if way == "adam" else plan.rates)
        ]
    return found


def _magnitudes(lab: Lab, way: Way, label: str) -> Report:
    """Report λmax of both matrices by layer, and the training loss."""
    its = courses(lab, trials(lab, way))
    about = _about(lab, way, label)
    return Report(
        {"figure": draw_magnitudes(its, about), "iterations": draw_iterations(its, about)},
        (_loss_table(its, about), _factor_table(its)),
        tuple(magnitude_verdicts(its)),
        {"networks": [one.numbers() | one.magnitudes() for one in its.values()]},
    )


def _conditions(lab: Lab, way: Way, label: str) -> Report:
    """Report κ_p of both matrices by layer."""
    its = courses(lab, trials(lab, way))
    about = _about(lab, way, label)
    return Report(
        {"figure": draw_conditions(its, about)},
        (_kappa_table(its), _loss_table(its, about)),
        tuple(condition_verdicts(its)),
        {"networks": [one.numbers() | one.conditions() for one in its.values()]},
    )


def _adam(lab: Lab) -> Report:
    """Report λmax, κ_p and losses of Adam from random weights, compared with SGD on the plain network."""
    its = courses(lab, trials(lab, "adam", ["uniform"]))
    sgd = next(iter(courses(lab, _sgd_for_adam(lab)).values()), None)
    about = _about(lab, "adam", "A7")
    return Report(
        {"figure": draw_all(its, about), "iterations": draw_iterations(its, about)},
        (_loss_table(its, about), _factor_table(its), _kappa_table(its)),
        tuple(adam_verdicts(its, sgd)),
        {
            "networks": [one.numbers() | one.magnitudes() | one.conditions() for one in its.values()],
            "sgd": None if sgd is None else sgd.numbers() | sgd.magnitudes(),
        },
    )


def _sgd_for_adam(lab: Lab) -> dict[Kind, list[Trial]]:
    return {kind: its for kind, its in trials(lab, "sgd", ["uniform"]).items() if not kind.normalized}


def _units(lab: Lab) -> Report:
    """Report dying and full units by layer, from He's initialization."""
    its = courses(lab, trials(lab, "gradient", ["he_normal"]))
    about = _about(lab, "gradient", "A12")
    return Report(
        {"figure": draw_units(its, about)},
        (_unit_table(its), _loss_table(its, about)),
        tuple(unit_verdicts(its)),
        {"networks": [one.numbers() | one.counts() for one in its.values()]},
    )


def _about(lab: Lab, way: Way, label: str) -> About:
    """The words in figures and tables about the source of their numbers."""
    task = task_of(lab, way, Kind("uniform", normalized=False))
    depth, width = task.model.removeprefix("mlp-").split("x")
    ways = {
        "gradient": "full gradient",
        "sgd": f"SGD in batches of {task.schedule.batch:,}",
        "adam": f"Adam in batches of {task.schedule.batch:,}",
    }
    images = f"{examples(task.source):,} images of {'MNIST' if task.source.name == 'mnist' else 'digits'}"
    setting = f"{depth} layers of {width} units, {images}, {ways[way]}"
    return About(label, setting, "iteration" if way == "gradient" else "epoch")


def _listed(way: Way, starts: Sequence[str] = tuple(STARTS)) -> Callable[[Lab], list[Trial]]:
    return lambda lab: [trial for its in trials(lab, way, starts).values() for trial in its]


def _listed_for_adam(lab: Lab) -> list[Trial]:
    compared = [trial for its in _sgd_for_adam(lab).values() for trial in its]
    return _listed("adam", ["uniform"])(lab) + compared


def _loss_table(courses: Courses, about: About) -> Table:
    """The last training loss of every learning rate; the paper prints none."""
    lasted = max(len(one.result.loss) for one in courses.values())
    rates = sorted({rate for one in courses.values() for rate in one.tried})
    columns = ("initialization", "network", *(f"rate {rate:g}" for rate in rates), "best", "paper")
    rows = tuple(
        (kind.start, kind.name, *(_loss(one.tried.get(rate)) for rate in rates), f"{one.rate:g}", None)
        for kind, one in courses.items()
    )
    return Table(f"Training loss after {lasted} {about.epoch}s: {about.setting}", columns, rows)


def _loss(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}" if isfinite(value) else "diverged"


def _factor_table(courses: Courses) -> Table:
    """The factor of λmax per layer, forward for Σx and backward for Σ∇h, and its extremes over the layers."""
    rows: list[tuple[Any, ...]] = []
    for kind, one in courses.items():
        for name, symbol in FACTORS.items():
            values = one.lambdas[name]
            ends = (a_layer(values[place], forward=name == "x") for place in (0, -1))
            # Without the images, and without the last layer, whose outputs are the network's.
            its = inner(values[0], name)
            rows.append((kind.start, kind.name, f"λmax({symbol})", *(f"{end:.3g}" for end in ends),
                         f"{its.min():.2g} to {its.max():.2g}", None))  # fmt: skip
    columns = ("initialization", "network", "of", "per layer, at first", "in the end", "over layers, at first", "paper")
    return Table("The factor of λmax from layer to layer, in the pass that makes it", columns, tuple(rows))


def _kappa_table(courses: Courses) -> Table:
    """κ_p of both matrices, the median over layers."""
    rows: list[tuple[Any, ...]] = []
    for kind, one in courses.items():
        for name, symbol in FACTORS.items():
            for p, values in one.kappas[name].items():
                both = (_as_text(_middle(inner(values[place], name))) for place in (0, -1))
                rows.append((kind.start, kind.name, symbol, f"{percent(p)} %", *both, None))
    columns = ("initialization", "network", "of", "p", "at first", "in the end", "paper")
    return Table("κ_p, the median over layers", columns, tuple(rows))


def inner(values: Values, name: str) -> Values:
    """Return values [..., layers] without those of the images, which all networks share, and of the outputs.

    Args:
        values: of every layer.
        name: "x" for values of layer inputs, "g" for values of output gradients.

    >>> inner(np.array([1.0, 2.0, 3.0]), "x"), inner(np.array([1.0, 2.0, 3.0]), "g")
    (array([2., 3.]), array([1., 2.]))
    """
    return values[..., 1:] if name == "x" else values[..., :-1]


def _middle(values: Values) -> float:
    """Return the median, where an undefined κ (λmax is 0) counts as infinite.

    >>> _middle(np.array([1.0, 2.0, np.nan]))
    2.0
    """
    ordered = np.sort(np.where(np.isnan(values), np.inf, values).ravel())
    return float(ordered[(len(ordered) - 1) // 2])  # the lower one of two: the mean of ∞ and a number says nothing


def _as_text(value: float) -> str:
    """Return the text of a condition number in a table.

    >>> _as_text(1234.5), _as_text(np.inf)
    ('1.23e+03', '∞')
    """
    return f"{value:.3g}" if isfinite(value) else "∞"


def _unit_table(courses: Courses) -> Table:
    """Dying and full units of every layer, when first looked at and when last."""
    columns = [f"{kind.name}: {name}, {when}" for kind in courses for name in ("dying", "full") for when in _WHENS]
    counts = [one.units[name][at] for one in courses.values() for name in ("dying", "full") for at in _WHENS.values()]
    rows = tuple((layer, *(int(count) for count in row)) for layer, row in enumerate(np.transpose(counts), start=1))
    return Table("Dying and full units by layer (the paper prints no numbers)", ("layer", *columns), rows)


def magnitude_verdicts(courses: Courses) -> list[Verdict]:
    """Return the verdicts of figures 3 and A5."""
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
                    f"λmax({FACTORS[name]}) × {first:.2g} per layer at first, × {last:.2g} in the end",
                    bool(max(first, last) < 1 / EXPONENTIAL),
                )
            )
    for name, (what, _) in _PASSES.items():
        if he in courses:
            its = apart(courses[he], name)
            found.append(
                Verdict(
                    f"from He's start the magnitude of the layer {what} of Plain is stable across layers",
                    "stable",
                    f"λmax({FACTORS[name]}) differs between layers by a factor of {_over_time(its)}",
                    max(its) <= APART,
                )
            )
    return found + _preserved(courses) + _trains(courses)


def ends(course: Course, name: str) -> tuple[float, float]:
    """Return the factor per layer, at the first analysis and at the last."""
    first, last = (a_layer(course.lambdas[name][place], forward=name == "x") for place in (0, -1))
    return first, last


def apart(course: Course, name: str) -> list[float]:
    """Return the largest λmax over the smallest in each analysis; infinite where that is 0.

    A factor per layer says less: a factor of 1.4 makes 600 over 19 layers.
    """
    return [_apart(values) for values in inner(course.lambdas[name], name)]


def _apart(values: Values) -> float:
    return float(values.max() / values.min()) if values.min() > 0 and isfinite(values.max()) else inf


def _over_time(factors: Sequence[float]) -> str:
    return f"{factors[0]:.3g} at first, {factors[-1]:.3g} in the end, {max(factors):.3g} at most"


def _far_less(ours: float, theirs: float) -> bool:
    """Return whether a factor between layers is far less than another.

    >>> _far_less(624.0, 7.6e13), _far_less(624.0, 1e4)
    (True, False)
    """
    return isfinite(ours) and ours <= theirs**FAR_LESS


def _preserved(courses: Courses) -> list[Verdict]:
    """The verdicts on batch normalization: relative to the plain network from a random start, and absolute."""
    found = []
    random, normalized = (courses.get(Kind("uniform", normalized=which)) for which in (False, True))
    for name, (what, passes) in _PASSES.items():
        if random is not None and normalized is not None:
            ours, theirs = apart(normalized, name), apart(random, name)
            found.append(
                Verdict(
                    f"from a random start BN preserves the magnitude of the layer {what} far better than Plain does",
                    "well preserved, against an exponential decrease",
                    f"λmax({FACTORS[name]}) differs between layers by a factor of {_over_time(ours)}; of Plain "
                    f"{_over_time(theirs)}",
                    all(_far_less(*pair) for pair in zip(ours, theirs, strict=False)),
                )
            )
        its = {kind: apart(one, name) for kind, one in courses.items() if kind.normalized}
        if its:
            told = (
                f"{kind.start}: {_over_time(factors)} (× {ends(courses[kind], name)[0]:.2f} per layer in the {passes} "
                "pass at first)"
                for kind, factors in its.items()
            )
            found.append(
                Verdict(
                    f"BN preserves the magnitude of the layer {what} for both initializations, to a factor of "
                    f"{APART:g} between layers",
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
            normalized.loss < _GUESS / 2 and not plain.loss < LEARNING,
        )
    ]


def condition_verdicts(courses: Courses) -> list[Verdict]:
    """Return the verdicts of figures 5 and A6."""
    found = []
    for init in dict.fromkeys(kind.init for kind in courses):
        plain, normalized = (courses.get(Kind(init, normalized=which)) for which in (False, True))
        if plain is None or normalized is None:
            continue
        for name, (what, _) in _PASSES.items():
            says = f"BN improves the conditioning of the layer {what}, from a {plain.kind.start} start"
            found += [_at_first(plain, normalized, name, says), _throughout(plain, normalized, name, says)]
            if name == "g":
                found.append(_at_equal_losses(plain, normalized, says))
    return found


def mostly(better: int, of: int, *, layers: int) -> bool | None:
    """Return whether `better` of all cases are enough: True from `MOSTLY` on, False if one layer more would not be.

    Between, it is None. So one layer of one seed cannot turn a claim that is shown into one that is not.

    Args:
        better: the cases in which the claim holds.
        of: all cases, about as many of each layer.
        layers: the layers that they are of.

    >>> [mostly(better, 20, layers=20) for better in (18, 17, 16)], mostly(170, 200, layers=20)
    ([True, None, False], None)
    """
    if not of:
        return None
    return True if better >= MOSTLY * of else False if better + of / layers < MOSTLY * of else None


def _at_first(plain: Course, normalized: Course, name: str, says: str) -> Verdict:
    """The verdict on all p and all layers where at least one of the two is finite."""
    pairs = [
        (layer, a, b)
        for p, values in plain.kappas[name].items()
        for layer, (a, b) in enumerate(
            zip(*(_known(one, name)[0] for one in (values, normalized.kappas[name][p])), strict=True)
        )
        if min(a, b) < np.inf
    ]
    lower, layers = sum(bool(b < a) for _, a, b in pairs), len({layer for layer, *_ in pairs})
    here = f"κ_p({FACTORS[name]}) lower in {lower} of {len(pairs)} layers and p"
    return Verdict(f"{says}: at first", "lower κ_p", here, mostly(lower, len(pairs), layers=layers))


def _throughout(plain: Course, normalized: Course, name: str, says: str) -> Verdict:
    """The verdict on one p, at all analyses that both have."""
    both = [_known(one.kappas[name][SHARE], name) for one in (plain, normalized)]
    count = min(map(len, both))
    a, b = (one[:count] for one in both)
    lower = int((b < a).sum())
    here = (
        f"κ_{percent(SHARE)}%({FACTORS[name]}) lower in {lower} of {a.size} layers and analyses; "
        f"{_as_text(_middle(b))} and {_as_text(_middle(a))} in the middle; in the last analysis in "
        f"{int((b[-1] < a[-1]).sum())} of {len(a[-1])}, {_as_text(_middle(b[-1]))} and {_as_text(_middle(a[-1]))}"
    )
    return Verdict(f"{says}: over the training", "lower κ_p", here, mostly(lower, a.size, layers=a.shape[-1]))


def _at_equal_losses(plain: Course, normalized: Course, says: str) -> Verdict:
    """The verdict on output gradients where the normalized network has learned at least as much.

    κ_p(Σ∇h) mostly grows while a network learns. Step by step, a network that has learned is compared with one that has
    not. Here each analysis of the plain network is compared with the one of the normalized network with an equal
    training loss or the next lower one, so that the normalized network has learned more, if they differ. Analyses of
    the plain network are left out where its loss is outside the range of those of the normalized network, or where it
    has not begun to learn. The verdict is undecided if all of them share fewer than `ANALYSES` of the normalized one.
    """
    (theirs, a), (ours, b) = (_by_loss(one, "g") for one in (plain, normalized))
    highest = min(ours.max(initial=-inf), LEARNING)
    pairs = [
        (int(np.where(ours <= loss, ours, -inf).argmax()), values)
        for loss, values in zip(theirs, a, strict=True)
        if ours.min(initial=inf) <= loss <= highest
    ]
    lower = sum(int((b[at] < values).sum()) for at, values in pairs)
    count, shared = sum(len(values) for _, values in pairs), len({at for at, _ in pairs})
    here = f"κ_{percent(SHARE)}%(Σ∇h) lower in {lower} of {count} layers and analyses of Plain, against {shared} of BN"
    return Verdict(
        f"{says}: at training losses as low or lower",
        "not asked",
        here if pairs else f"the losses do not overlap below {LEARNING:.3g}, nine tenths of that of guessing",
        mostly(lower, count, layers=a.shape[-1]) if shared >= ANALYSES else None,
    )


def _by_loss(course: Course, name: str) -> tuple[Values, Values]:
    """The training losses at the analyses, between the means of epochs, and κ of the inner layers, [analyses, layers].

    Analyses before the middle of the first epoch, and after that of the last, are left out.
    """
    epochs = len(course.result.loss)
    middles = course.steps[-1] / epochs * (np.arange(epochs) + 0.5) + 0.5
    losses = np.interp(course.steps, middles, course.result.loss, left=np.nan, right=np.nan)
    known = np.isfinite(losses) & (losses > 0)
    return losses[known], _known(course.kappas[name][SHARE], name)[known]


def _known(values: Values, name: str) -> Values:
    """The inner layers, with undefined values as infinite."""
    return np.nan_to_num(inner(values, name), nan=np.inf, posinf=np.inf)


def adam_verdicts(courses: Courses, sgd: Course | None) -> list[Verdict]:
    """Return the verdicts of figure A7; `sgd` is the plain network trained by SGD."""
    plain, normalized = (courses.get(Kind("uniform", normalized=which)) for which in (False, True))
    found = []
    if plain is not None and sgd is not None:
        for name, (what, _) in _PASSES.items():
            first, last = ends(plain, name)
            ours, by_sgd = apart(plain, name)[-1], apart(sgd, name)[-1]
            found.append(
                Verdict(
                    f"Adam adjusts the magnitude of the layer {what} of Plain, compared with SGD",
                    "well adjusted, compared with SGD",
                    f"in the end λmax({FACTORS[name]}) differs by a factor of {ours:.3g} between layers, with SGD by "
                    f"{by_sgd:.3g}; × {first:.2g} per layer at first, × {last:.2g} in the end, with SGD × "
                    f"{ends(sgd, name)[1]:.2g}",
                    _far_less(ours, by_sgd),
                )
            )
    if plain is not None and normalized is not None:
        found.append(_steadier(plain, normalized))
    return found + condition_verdicts(courses)


def _steadier(plain: Course, normalized: Course) -> Verdict:
    """The verdict on stability, which is taken to mean: at all learning rates."""
    ranges = [sorted(_nan_last(one.tried.values())) for one in (normalized, plain)]
    ours, theirs = ranges
    return Verdict(
        "BN stabilizes the training",
        "better than without",
        f"over the learning rates the loss ends at {ours[0]:.3g} to {ours[-1]:.3g} with BN, {theirs[0]:.3g} to "
        f"{theirs[-1]:.3g} without",
        ours[0] < theirs[0] and ours[-1] < theirs[-1],
    )


def _nan_last(values: Iterable[float]) -> list[float]:
    """Return losses with diverged ones as infinite, so that they can be ordered.

    >>> _nan_last([1.0, float("nan")])
    [1.0, inf]
    """
    return [value if isfinite(value) else inf for value in values]


def unit_verdicts(courses: Courses) -> list[Verdict]:
    """Return the verdicts of figure A12."""
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
                    f"at first {shallow:.1f} per layer in the first third of the layers and {deep:.1f} in the last",
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


STUDIES = (
    Study(
        "conditioning/fig3",
        "Figure 3: the magnitude of layer inputs and output gradients of a deep perceptron, and its training loss",
        _listed("gradient"),
        lambda lab: _magnitudes(lab, "gradient", "3"),
    ),
    Study(
        "conditioning/fig5",
        "Figure 5: the condition numbers of layer inputs and output gradients of the same perceptron",
        _listed("gradient"),
        lambda lab: _conditions(lab, "gradient", "5"),
    ),
    Study(
        "conditioning/a5",
        "Figure A5: figure 3 with SGD in batches",
        _listed("sgd"),
        lambda lab: _magnitudes(lab, "sgd", "A5"),
    ),
    Study(
        "conditioning/a6",
        "Figure A6: figure 5 with SGD in batches",
        _listed("sgd"),
        lambda lab: _conditions(lab, "sgd", "A6"),
    ),
    Study("conditioning/a7", "Figure A7: figures 3 and 5 with Adam", _listed_for_adam, _adam),
    Study(
        "conditioning/a12",
        "Figure A12: dying and full neurons of the perceptron of figure 3",
        _listed("gradient", ["he_normal"]),
        _units,
    ),
)
