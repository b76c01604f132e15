"""The last linear layer of very deep residual networks (figures 6, 7 and 9 of the conditioning paper, its section 5).

The deeper a residual network, the larger the sum of its blocks, which is the input x of the last layer. That layer's
gradient, its weight W and the loss grow with it, until the blocks have turned x off and the network can only guess.
Batch normalization before the last layer, as in ResNet_LastBN and also in PreResNet, prevents this.

The layer h = Wx, without a bias, is followed at every step of the first six epochs of 390 steps, from seed 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gyroscope.diagnosis import MARGIN, Stall, stall
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.cells import some
from gyroscope_lab.papers.conditioning.by_depth import SGD, Network, network_of, of_network
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.last_layer import Followed, followed
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The panels of figures 6, 7 and 9: a quantity, and its name.
PANELS = {
    "loss": "training loss",
    "lambda_x": r"$\lambda_{\max}(\Sigma_x)$",
    "lambda_m": r"$\lambda_{\max}(\Sigma_{\partial L/\partial W})$",
    "weight_norm": r"$\|W\|$",
}
#: A loss is that of a guess if it stays within this share of ln C for this many steps.
NEAR, LEAST = 0.02, 25
# The steps that are kept of each curve, evenly spread over a logarithmic axis.
_KEPT = 300
#: The depths that are compared; figures 7 and 9 have the deepest.
DEPTHS: dict[str, tuple[int, ...]] = {"smoke": (8, 20, 56), "small": (20, 32, 56, 110), "full": (56, 110, 230, 1202)}
#: The number of epochs that are followed.
EPOCHS = {"smoke": 4, "small": 20, "full": 6}
#: `NEAR` and `LEAST` of each scale: the stand-in has 24 or 120 steps with batches of 32.
_JUDGED = {"smoke": (0.1, 5), "small": (MARGIN, LEAST), "full": (NEAR, LEAST)}
SEED = 1
#: The paper's words on each architecture.
PAPER = {
    "ResNet": "stuck at ln 10",
    "ResNet_LastBN": "trained steadily",
    "PreResNet": "trained steadily",
    "PreResNet_v1": "stuck, but for less long than ResNet",
}
# The colors, dark to light, so that an order of depths can be seen.
_COLORS = ("#440154", "#2c728e", "#28ae80", "#e8a500")


def depths(lab: Lab) -> list[Trial]:
    """Return the trials of figure 6.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [(one.task.model, one.schedule.epochs) for one in depths(Lab(Archive("runs"), "full"))][2:]
    [('resnet-230', 6), ('resnet-1202', 6)]
    """
    return [_trial(lab, "ResNet", depth) for depth in DEPTHS[lab.scale]]


def last_norm(lab: Lab) -> list[Trial]:
    """Return the trials of figure 7.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [one.task.model for one in last_norm(Lab(Archive("runs"), "full"))]
    ['resnet-1202', 'resnet-lastbn-1202']
    """
    return [_trial(lab, one, DEPTHS[lab.scale][-1]) for one in ("ResNet", "ResNet_LastBN")]


def preactivation(lab: Lab) -> list[Trial]:
    """Return the trials of figure 9.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [one.task.model for one in preactivation(Lab(Archive("runs"), "full"))]
    ['resnet-1202', 'preresnet-1202', 'preresnet-v1-1202']
    """
    return [_trial(lab, one, DEPTHS[lab.scale][-1]) for one in ("ResNet", "PreResNet", "PreResNet_v1")]


def _trial(lab: Lab, architecture: str, depth: int) -> Trial:
    task = of_network(lab, "c10-deep", Network(architecture, depth))
    # Without cuts, which would be shares of the few epochs that are followed; without a bias, as in the paper.
    schedule = replace(task.schedule, epochs=EPOCHS[lab.scale], cuts=())
    options = (*task.options, ("classifier_bias", False))
    return Trial(replace(task, options=options, schedule=schedule), SGD, SEED, follows=True)


def figure6(lab: Lab) -> Report:
    """Report the last layer of ResNets, by depth."""
    found = courses(lab, depths(lab))
    heading = "The last linear layer of residual networks, by depth"
    figure = draw({str(one.network.depth): one for one in found}, heading=heading, legend="layers")
    return _report(found, figure, of_depths(found, full=lab.scale == "full"))


def figure7(lab: Lab) -> Report:
    """Report the last layer of the deepest ResNet, with batch normalization before it and without."""
    return _of_deepest(lab, last_norm(lab), "with batch normalization before it and without", of_last_norm)


def figure9(lab: Lab) -> Report:
    """Report the last layer of the deepest networks with pre-activation."""
    return _of_deepest(lab, preactivation(lab), "with pre-activation and without", of_preactivation)


def courses(lab: Lab, trials: Sequence[Trial]) -> list[Course]:
    """Return the course of the last layer in each trial; where only `known` ones are shown, those that were kept."""
    held = lab.held(trials)
    found = []
    for trial, result in zip(held, lab.run(held), strict=True):
        try:
            course = followed(lab.archive.folder(lab.trial(trial)))
        except LabError:
            if not lab.known:
                raise
            continue
        classes = dict(trial.task.options).get("classes", 10)
        found.append(Course(network_of(trial.task), course, result, classes, *_JUDGED[lab.scale]))
    return list(some(found))


def _of_deepest(lab: Lab, trials: Sequence[Trial], what: str, verdicts: Callable[..., list[Verdict]]) -> Report:
    found = courses(lab, trials)
    heading = f"The last linear layer of residual networks of {found[0].network.depth} layers, {what}"
    figure = draw({one.network.architecture: one for one in found}, heading=heading)
    return _report(found, figure, verdicts(found, full=lab.scale == "full"))


def _report(found: Sequence[Course], figure: Figure, verdicts: Sequence[Verdict]) -> Report:
    columns = (
        "network", "paper", "steps at ln C", "steps with x = 0", "λmax(Σx) at first", "its largest", "its least",
        "largest λmax of the gradient's moment", "‖W‖ at first", "largest ‖W‖",
        "loss at first", "largest loss", "last loss",
    )  # fmt: skip
    rows = tuple(_row(one) for one in found)
    table = Table(f"The last layer over {len(found[0].followed):,} steps", columns, rows)
    return Report({"figure": figure}, (table,), tuple(verdicts), {"courses": [one.numbers() for one in found]})


def _row(one: Course) -> tuple[object, ...]:
    course = one.followed
    return (
        str(one.network), PAPER[one.network.architecture], one.stuck, int(one.off.sum()),
        float(course.lambda_x[0]), one.largest("lambda_x"), float(np.nanmin(course.lambda_x)), one.largest("lambda_m"),
        float(course.weight_norm[0]), one.largest("weight_norm"),
        float(course.loss[0]), one.largest("loss"), one.last_loss,
    )  # fmt: skip


@dataclass(frozen=True)
class Course:
    """A network, and the last layer of its training at every step.

    Attributes:
        network: the architecture and the depth.
        followed: the quantities of the last layer.
        result: the result of the training.
        classes: the number of classes C.
        near: the share of ln C by which the loss of a guess may be off; small batches of few examples need more.
        least: the number of steps for which it must be so near; losses are medians over as many.
    """

    network: Network
    followed: Followed
    result: Result
    classes: int = 10
    near: float = NEAR
    least: int = LEAST

    @property
    def chance(self) -> float:
        """The loss of a guess, ln C."""
        return log(self.classes)

    @cached_property
    def loss(self) -> npt.NDArray[np.float64]:
        """The loss over steps: the median of `least` batches around each, since single batches are noisy."""
        return smoothed(self.followed.loss, self.least)

    @cached_property
    def stall(self) -> Stall | None:
        """The steps in which it only guessed, with a small input and a large weight in the last layer; None if none."""
        its = self.followed
        return stall(
            self.loss, its.lambda_x, its.weight_norm, classes=self.classes, margin=self.near, patience=self.least,
            steps=np.arange(1, len(its) + 1),
        )  # fmt: skip

    @property
    def stuck(self) -> int:
        """The number of steps of `stall`."""
        if self.stall is None:
            return 0
        return (len(self.followed) + 1 if self.stall.until is None else self.stall.until) - self.stall.since

    @cached_property
    def off(self) -> npt.NDArray[np.bool_]:
        """The steps in whose batch x = 0 and ∂L/∂W = 0 exactly.

        The ReLUs before the layer are off, and let no gradient through: none reaches any weight.
        """
        return np.asarray((self.followed.lambda_x == 0) & (self.followed.gradient_norm == 0))

    @cached_property
    def dead(self) -> int | None:
        """The step from which on, to the end, most of the `least` batches around each are `off`; None if there is none.

        A dominated network has small gradients and may still escape; a dead one has no gradients.
        """
        count = len(self.off)
        alive = np.flatnonzero(smoothed(self.off.astype(np.float64), self.least) < 1)
        since = int(alive[-1]) + 1 if len(alive) else 0
        return None if count - since < self.least else since + int(self.off[since:].argmax()) + 1

    @property
    def dominated(self) -> slice:
        """The steps of `stall` before the network was dead, counted from 0; an empty slice without a stall."""
        if self.stall is None:
            return slice(0, 0)
        ends = (len(self.followed) + 1, self.stall.until, self.dead)
        return slice(self.stall.since - 1, max(self.stall.since, min(end for end in ends if end is not None)) - 1)

    @property
    def before(self) -> tuple[float, float]:
        """The least loss before `stall`, and the largest of a batch: below ln C, it had learned and unlearned."""
        end = len(self.followed) if self.stall is None else self.stall.since - 1
        return float(np.nanmin(self.loss[:end])), float(np.nanmax(self.followed.loss[:end]))

    @property
    def rise(self) -> float:
        """The largest loss of a step, as a multiple of the first: above 1 the loss rose."""
        return float(np.nanmax(self.followed.loss) / self.followed.loss[0])

    @property
    def last_loss(self) -> float:
        """The smoothed loss of the last step."""
        return float(self.loss[-1])

    def largest(self, quantity: str) -> float:
        """Return the largest value of a quantity."""
        return float(np.nanmax(getattr(self.followed, quantity)))

    def numbers(self) -> dict[str, Any]:
        """Return the numbers as JSON holds them: every curve at some of its steps, counted from 1."""
        chosen = np.unique(np.geomspace(1, len(self.followed), _KEPT).round().astype(int))
        curves = {name: getattr(self.followed, name)[chosen - 1] for name in asdict(self.followed)}
        return {
            "network": self.network.model,
            "steps": len(self.followed),
            "stuck": self.stuck,
            "stall": None if self.stall is None else asdict(self.stall),
            "off": int(self.off.sum()),
            "dead": self.dead,
            "before": list(self.before),
            "at": chosen.tolist(),
            **{name: [float(f"{value:.5g}") for value in values] for name, values in curves.items()},
            "test": 100 * self.result.test_accuracy,
            "seconds": round(self.result.seconds, 1),
        }


def smoothed(values: npt.NDArray[np.float64], window: int) -> npt.NDArray[np.float64]:
    """Return the median of `window` values around each, or of those there are at the ends; nan stays nan.

    >>> smoothed(np.array([1.0, 9.0, 2.0, 3.0]), 3).tolist()
    [5.0, 2.0, 3.0, 2.5]
    """
    side = window // 2
    around = np.lib.stride_tricks.sliding_window_view(np.pad(values, side, constant_values=np.nan), window)
    found = np.full(len(values), np.nan)
    known = np.isfinite(values)
    found[known] = np.nanmedian(around[known], axis=1)
    return found


def of_depths(courses: Sequence[Course], *, full: bool) -> list[Verdict]:
    """Return the verdicts of figure 6 on ResNets, the shallow ones first.

    Args:
        courses: the courses of ResNets, by depth.
        full: True for the paper's networks; a shallower one that is not stuck says nothing.
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
    """Return the verdicts of figure 7 on a ResNet, and on the same with batch normalization before its last layer."""
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
    """Return the verdicts of figure 9; PreResNet_v1 has no batch normalization before its last layer."""
    plain, normal, without = (_of(courses, name) for name in ("ResNet", "PreResNet", "PreResNet_v1"))
    if plain is None or normal is None or without is None:
        return []
    shorter = 0 < without.stuck < plain.stuck
    return [
        Verdict(
            f"{without.network}: the network is stuck at ln {without.classes}, for less long than ResNet",
            "stuck, and escapes faster",
            f"{_steps(without)} against {_steps(plain)}",
            shorter if full or shorter or (plain.stuck and without.stuck) else None,
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
    """The verdicts on whether the loss came to stay at that of a guess, and whether it left."""
    its = one.dominated
    # A network whose input is off from its start on is dead, which is different.
    holds = its.stop - its.start >= one.least
    found = Verdict(
        f"{one.network}: after its rise the loss stays at ln {one.classes}, with a small input and a large weight in "
        "the last layer",
        "stuck at ln 10: weight domination",
        _told(one),
        holds if full or holds else None,
        over=_of_network(one.network),
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
    """The verdict on whether a network that was stuck learned in the end.

    A network that still moves may need more steps. So may a dead one, if an image still passes through it now and then.
    Only if no gradient reaches any weight in any batch are more steps of no use.
    """
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
        holds = False if full and off.all() else None
    return Verdict(
        f"{one.network}: it escapes from there",
        "with enough iterations",
        here,
        holds,
        over=_of_network(one.network),
    )


def _of_network(network: Network) -> Callable[[Trial], bool]:
    return lambda trial: network_of(trial.task) == network


def _steady(plain: Course, normal: Course, *, full: bool) -> Verdict:
    holds = plain.stuck > 0 and normal.stuck == 0
    return Verdict(
        f"{normal.network}: the network is trained steadily where ResNet is stuck",
        "no weight domination",
        f"at ln {normal.classes} for {_steps(normal)} against {_steps(plain)}; loss {normal.last_loss:.3g} against "
        f"{plain.last_loss:.3g} in the end",
        holds if full or plain.stuck else None,
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


def draw(courses: Mapping[str, Course], *, heading: str, legend: str = "") -> Figure:
    """Draw the loss, λmax(Σx), λmax of the weight gradient's second moment and ‖W‖ of up to four trainings.

    Steps at which a quantity is exactly 0 are marked in rows below its axis.

    Args:
        courses: the trainings, by name.
        heading: the heading of the figure.
        legend: the heading of their names.

    >>> from gyroscope_lab.training.last_layer import Followed
    >>> from gyroscope_lab.training.result import Result
    >>> course = Course(Network("ResNet", 56), Followed(*np.ones((7, 9))), Result(0.1, 0.1, [], [], []))
    >>> [ax.get_yscale() for ax in draw({"56": course}, heading="By depth").axes]
    ['log', 'log', 'log', 'log']
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from gyroscope.figures.drawing import edged, log_ticks, say

    figure = Figure(figsize=(12.4, 3.1), layout="constrained")
    axes = figure.subplots(1, len(PANELS))
    zeros = False
    for letter, (quantity, title), ax in zip("abcd", PANELS.items(), axes, strict=True):
        values = {name: getattr(course.followed, quantity) for name, course in courses.items()}
        colors = dict(zip(courses, _COLORS, strict=False))
        for name, its in values.items():
            ax.plot(np.arange(1, len(its) + 1), its, color=colors[name], linewidth=0.9, label=name)
        # A logarithmic axis has no place for zeros, and a curve that ends in them would look like one that was stopped.
        off = {name: np.flatnonzero(its == 0) + 1 for name, its in values.items() if (its == 0).any()}
        edges = edged(ax, np.concatenate(list(values.values())), below=len(off))
        for (name, steps), y in zip(off.items(), edges.below, strict=True):
            ax.plot(steps, np.full(len(steps), y), color=colors[name], linestyle="", marker="|", markersize=5)
        say(ax, "0", edges.below)
        zeros = zeros or bool(off)
        if quantity == "loss":
            course = next(iter(courses.values()))
            ax.axhline(course.chance, color="0.4", linestyle=":", linewidth=1, label=f"ln {course.classes}")
        ax.set(xscale="log")
        log_ticks(ax.xaxis, *ax.get_xlim())
        ax.set_title(f"({letter}) {title}", fontsize=9)
        ax.set_xlabel("step", fontsize=9)
        ax.tick_params(labelsize=8)
        ax.grid(which="major", color="0.9", linewidth=0.6)
        ax.set_axisbelow(True)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    handles, names = axes[0].get_legend_handles_labels()
    if zeros:
        handles.append(Line2D([], [], color="0.25", linestyle="", marker="|", markersize=5))
        names.append("exactly 0")
    figure.legend(handles, names, title=legend or None, loc="outside right center", fontsize=8, title_fontsize=8)
    figure.suptitle(heading, fontsize=11)
    return figure


STUDIES = (
    Study("conditioning/fig6", "Figure 6: the last linear layer of residual networks, by depth", depths, figure6),
    Study(
        "conditioning/fig7",
        "Figure 7: the last linear layer of the deepest, with batch normalization before it and without",
        last_norm,
        figure7,
    ),
    Study(
        "conditioning/fig9",
        "Figure 9: the last linear layer of the deepest networks with pre-activation",
        preactivation,
        figure9,
    ),
)
