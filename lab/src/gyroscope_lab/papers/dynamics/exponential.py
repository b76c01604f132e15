"""Weight decay, or a learning rate that grows exponentially: the same training (section 4.3; Li and Arora, 2020).

Where every weight that is trained is scale-invariant, SGD at the rate η with weight decay λ goes through the same
functions as SGD without it at the rates η̃_t = η a^{−(2t+1)}, with a = 1 − ηλ, or with momentum the larger root of
a² − (1 + β − ηλ)a + β = 0; weights are a^{−t} times as long. Both are trained here on the same batches, in float64 and
in float32; and beside them one without weight decay, and one with it whose first weights differ in their last digit:
what becomes of that is what rounding alone does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from gyroscope_lab.data.split import Split
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.engine.run_one import loaded
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.dynamics.schedules import nothing_trained
from gyroscope_lab.papers.dynamics.twins import Course, Setting, Twins, Way, compare, key, train
from gyroscope_lab.papers.dynamics.twins_report import Pair, report
from gyroscope_lab.papers.study import Report, Study
from gyroscope_lab.training.tasks import task

#: What the digits' task and MNIST's are called, and how a scale trains on them.
SETTINGS = {
    "smoke": Setting("digits", 64, 16, rate=0.3, decay=0.03, batch=50, steps=60, every=5),
    "small": Setting("digits", 64, 64, rate=0.3, decay=0.03, steps=1000),
    "full": Setting("mnist", 784, 784, rate=0.3, decay=0.01, batch=128, steps=5000, every=50),
}
_TASKS = {"digits": "digits-mlp", "mnist": "mnist-mlp"}
#: The ε that torch's batch normalization has unless told.
USUAL_EPS = 1e-5


def pairs(setting: Setting) -> list[Pair]:
    """What is trained beside the same with weight decay: the name, the setting, the way.

    With momentum the rate is a tenth, and a step is as long in the end.

    >>> [pair.name for pair in pairs(SETTINGS["small"])][:2]
    ['float64', 'float64, momentum 0.9']
    """
    heavy = replace(setting, rate=setting.rate / 10, momentum=0.9)
    single = replace(setting, double=False)
    return [
        Pair("float64", setting, "exponential"),
        Pair("float64, momentum 0.9", heavy, "exponential"),
        Pair("float64, ε = 1e-5", replace(setting, eps=USUAL_EPS), "exponential"),
        Pair("float32", single, "exponential"),
        Pair("float64, another last digit", setting, "rounding"),
        Pair("float32, another last digit", single, "rounding"),
        Pair("float64, neither", setting, "neither"),
    ]


def found(lab: Lab, wanted: Iterable[Pair]) -> list[Twins]:
    """Every pair, trained now unless the archive has it; the training with weight decay is shared."""
    courses: dict[tuple[Setting, Way], Course] = {}
    return [_twins(lab, pair, courses) for pair in wanted]


def _twins(lab: Lab, pair: Pair, courses: dict[tuple[Setting, Way], Course]) -> Twins:
    kept = lab.archive.root / "dynamics" / "exp-schedule" / f"{key(pair.setting, pair.way)}.json"
    if kept.exists():
        return Twins.read(kept)
    if lab.known:
        raise LabError(f"the pair '{pair.name}' is not in {kept}; let it be trained (leave --known out)")
    split, device = _split(lab, pair.setting), "cuda" if torch.cuda.is_available() else "cpu"

    def course(way: Way) -> Course:
        if (pair.setting, way) not in courses:
            courses[pair.setting, way] = train(pair.setting, way, split, device=device)
        return courses[pair.setting, way]

    twins = compare(pair.setting, course("decay"), course(pair.way))
    twins.write(kept)
    return twins


def _split(lab: Lab, setting: Setting) -> Split:
    source = task(_TASKS[setting.source]).source
    return loaded(source, None if lab.data is None else Path(lab.data))


def conclude(lab: Lab) -> Report:
    """Draw how far apart outputs are, the two schedules, and the effective learning rates."""
    wanted = pairs(SETTINGS[lab.scale])
    return report(wanted, found(lab, wanted))


STUDIES = (
    Study(
        "dynamics/exp-schedule",
        "Section 4.3: weight decay, and the exponential learning rates that take its place",
        nothing_trained,
        conclude,
    ),
)
