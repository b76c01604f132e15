"""The last linear layer of very deep residual networks (figures 6, 7 and 9 of the conditioning paper, its section 5).

The deeper a residual network, the larger is what its blocks have added up in the end: the input x of the last layer.
With it grow that layer's gradient, its weight W and the loss, until the blocks have turned x off and the network can
but guess. Batch normalization before the last layer, as in ResNet_LastBN and, by the way, in PreResNet, prevents it.

The layer h = Wx, without a bias, is followed at every step of the first six epochs of 390, from seed 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from gyroscope.diagnose import MARGIN
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.conditioning.by_depth import SGD, Network, network_of, of_network
from gyroscope_lab.papers.conditioning.very_deep_course import LEAST, NEAR, Course
from gyroscope_lab.papers.conditioning.very_deep_figure import draw
from gyroscope_lab.papers.conditioning.very_deep_verdicts import of_depths, of_last_norm, of_preactivation
from gyroscope_lab.papers.rotation.beside_layca import some
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.last_layer import followed
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The depths that are compared; figures 7 and 9 have the deepest.
DEPTHS: dict[str, tuple[int, ...]] = {"smoke": (8, 20, 56), "small": (20, 32, 56, 110), "full": (56, 110, 230, 1202)}
#: How many epochs are followed.
EPOCHS = {"smoke": 4, "small": 20, "full": 6}
#: How near to ln C is at ln C, and for how many steps: the stand-in has 24 or 120 steps with batches of 32.
_JUDGED = {"smoke": (0.1, 5), "small": (MARGIN, LEAST), "full": (NEAR, LEAST)}
SEED = 1
#: What the paper says of each architecture.
PAPER = {
    "ResNet": "stuck at ln 10",
    "ResNet_LastBN": "trained steadily",
    "PreResNet": "trained steadily",
    "PreResNet_v1": "stuck, but for less long than ResNet",
}


def depths(lab: Lab) -> list[Trial]:
    """What figure 6 trains.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [(one.task.model, one.schedule.epochs) for one in depths(Lab(Archive("runs"), "full"))][2:]
    [('resnet-230', 6), ('resnet-1202', 6)]
    """
    return [_trial(lab, "ResNet", depth) for depth in DEPTHS[lab.scale]]


def last_norm(lab: Lab) -> list[Trial]:
    """What figure 7 trains.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [one.task.model for one in last_norm(Lab(Archive("runs"), "full"))]
    ['resnet-1202', 'resnet-lastbn-1202']
    """
    return [_trial(lab, one, DEPTHS[lab.scale][-1]) for one in ("ResNet", "ResNet_LastBN")]


def preactivation(lab: Lab) -> list[Trial]:
    """What figure 9 trains.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [one.task.model for one in preactivation(Lab(Archive("runs"), "full"))]
    ['resnet-1202', 'preresnet-1202', 'preresnet-v1-1202']
    """
    return [_trial(lab, one, DEPTHS[lab.scale][-1]) for one in ("ResNet", "PreResNet", "PreResNet_v1")]


def _trial(lab: Lab, architecture: str, depth: int) -> Trial:
    task = of_network(lab, "c10-deep", Network(architecture, depth))
    # Without cuts, which would be shares of the few epochs that are followed; and the paper follows a layer Wx.
    schedule = replace(task.schedule, epochs=EPOCHS[lab.scale], cuts=())
    options = (*task.options, ("classifier_bias", False))
    return Trial(replace(task, options=options, schedule=schedule), SGD, SEED, follows=True)


def figure6(lab: Lab) -> Report:
    """The last layer of ResNets, by depth."""
    found = courses(lab, depths(lab))
    heading = "The last linear layer of residual networks, by depth"
    figure = draw({str(one.network.depth): one for one in found}, heading=heading, legend="layers")
    return _report(found, figure, of_depths(found, full=lab.scale == "full"))


def figure7(lab: Lab) -> Report:
    """The last layer of the deepest ResNet, with batch normalization before it and without."""
    return _of_deepest(lab, last_norm(lab), "with batch normalization before it and without", of_last_norm)


def figure9(lab: Lab) -> Report:
    """The last layer of the deepest networks with pre-activation."""
    return _of_deepest(lab, preactivation(lab), "with pre-activation and without", of_preactivation)


def courses(lab: Lab, trials: Sequence[Trial]) -> list[Course]:
    """The course of the last layer in each of the trials; of what is known, those whose course was kept."""
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
