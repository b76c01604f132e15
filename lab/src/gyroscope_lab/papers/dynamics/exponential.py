"""Weight decay and an exponentially growing learning rate: the same training (section 4.3; Li and Arora, 2020).

If every trained weight is scale-invariant, SGD at the rate η with weight decay λ computes the same functions as SGD
without decay at the rates η̃_t = η a^{−(2t+1)}. Here a = 1 − ηλ, or with momentum the larger root of a² − (1 + β − ηλ)a
+ β = 0. The weights without decay are a^{−t} times as long. Both are trained here on the same batches, in float64 and
in float32. Two further trainings are baselines: one without weight decay, and one with it whose initial weights differ
in their last digit, which shows the effect of rounding alone.

The schedule keeps an effective rate where it is: at the equilibrium of weight decay. From other weights it first goes
there. So the schedule is also begun after a training with weight decay, whose weights are at their equilibrium.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gyroscope.base import write_whole
from gyroscope.theory import effective_lr, shrinkage, undo_decay
from gyroscope_lab.data.split import Split
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.engine.run_one import loaded, one_thread
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, no_trials
from gyroscope_lab.training.recipe import Recipe, register
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.training import Training
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: With weight decay; with the exponential schedule instead; with neither; with decay and another last digit at the
#: start.
Way = Literal["decay", "exponential", "neither", "rounding"]

# Negligible compared with any variance; torch rejects 0. Layers are scale-invariant up to rounding.
NO_EPS = 1e-30
_PROBES = 200


@dataclass(frozen=True)
class Setting:
    """A perceptron with batch normalization and its training: everything that a pair of trainings depends on.

    Its classifier is not trained, so that every trained weight is scale-invariant.

    Attributes:
        source: the name of the data.
        pixels: the number of pixels per image.
        width: the width of the three hidden layers.
        rate: η.
        decay: λ.
        momentum: β.
        batch: examples per step, drawn for each step.
        steps: the number of steps.
        every: steps between measurements.
        double: True for float64, False for float32.
        eps: ε of batch normalization.
        seed: the seed of the weights and batches.
        before: steps with weight decay before the training begins.
    """

    source: str
    pixels: int
    width: int
    rate: float
    decay: float
    momentum: float = 0.0
    batch: int = 100
    steps: int = 1000
    every: int = 10
    double: bool = True
    eps: float = NO_EPS
    seed: int = 0
    before: int = 0


@dataclass(frozen=True, eq=False)
class Course:
    """One training: outputs for test images [measurements, images, classes], norms and rate over time."""

    outputs: Tensor
    norms: npt.NDArray[np.float64]
    rates: npt.NDArray[np.float64]
    test: float


@dataclass(frozen=True)
class Twins:
    """The kept comparison of a training with the one with weight decay.

    Attributes:
        steps: the steps of the measurements.
        apart: the largest difference of outputs at each measurement, as a share of the largest output.
        agree: the share of test images that both put in the same class at the end.
        norms: the norms of the layers [measurements][layers], with weight decay and without.
        rates: the learning rates, with weight decay and without.
        tests: the test accuracies, with weight decay and without.
    """

    steps: list[int]
    apart: list[float]
    agree: float
    norms: tuple[list[list[float]], list[list[float]]]
    rates: tuple[list[float], list[float]]
    tests: tuple[float, float]

    def write(self, path: Path) -> None:
        """Write it to a file atomically."""
        write_whole(path, json.dumps(asdict(self), allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> Twins:
        """Read a file of `write`."""
        try:
            kept: dict[str, Any] = json.loads(path.read_text())
            return cls(**kept | {name: tuple(kept[name]) for name in ("norms", "rates", "tests")})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LabError(f"{path} cannot be read ({error}). Delete it to train again.") from error


def key(setting: Setting, way: Way) -> str:
    """A name for the file of a pair; it differs for everything that could change the outcome.

    >>> one = Setting("digits", 64, 8, 0.3, 0.03)
    >>> key(one, "exponential") == key(one, "exponential"), key(one, "exponential") == key(one, "neither")
    (True, False)
    """
    told = json.dumps([asdict(setting), way], sort_keys=True)
    return f"{way}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def train(setting: Setting, way: Way, split: Split, *, device: str = "cpu") -> Course:
    """Train in one of the ways, on one thread if on a CPU; after `before` steps with weight decay.

    >>> from gyroscope_lab.data.source import Source
    >>> split = Source("digits").load()
    >>> train(Setting("digits", 64, 8, 0.3, 0.03, steps=20), "exponential", split).rates.round(3).tolist()
    [0.303, 0.363, 0.435]
    """
    with one_thread():
        if not setting.before:
            return _train(setting, way, split, device)[0]
        _, model = _train(replace(setting, steps=setting.before, every=setting.before), "decay", split, device)
        return _train(setting, way, split, device, model)[0]


def _train(
    setting: Setting, way: Way, split: Split, device: str, model: nn.Module | None = None
) -> tuple[Course, nn.Module]:
    """Train `model`, by default a new one, and return it too."""
    dtype = torch.float64 if setting.double else torch.float32
    options = (("batch_norm", True), ("inputs", setting.pixels), ("eps", setting.eps))
    schedule = Schedule(epochs=1, batch=setting.batch, cuts=(), drawn=setting.steps)
    source = task(_TASKS[setting.source]).source
    learned = Task("exp-schedule", source, f"mlp-4x{setting.width}", options, schedule)
    decay = 0.0 if way == "neither" else setting.decay
    optimizer = "sgd-undone-decay" if way == "exponential" else "sgd"
    recipe = Recipe(way, setting.rate, optimizer, weight_decay=decay, momentum=setting.momentum, frozen=(-1,))
    trial = Trial(learned, recipe, setting.seed)
    model = trial.network().to(dtype) if model is None else model
    hidden = [weight for weight in model.parameters() if weight.requires_grad]
    if way == "rounding":
        _jog(hidden, setting.seed)
    training = Training(trial, split.converted(dtype), device=device, network=model)
    split = training.split
    probe = split.inputs(split.x_test[:_PROBES]).to(device)
    outputs, norms, rates = [], [], []

    def look() -> None:
        outputs.append(_outputs(model, probe).cpu().double())
        norms.append([float(weight.detach().double().norm()) for weight in hidden])
        rates.append(float(training.optimizer.param_groups[0]["lr"]))

    look()
    for step, _ in zip(range(1, setting.steps + 1), training.proceed(), strict=False):
        if step % setting.every == 0:
            look()
    return Course(torch.stack(outputs), np.array(norms), np.array(rates), _test(model, split, device)), model


def _undone(recipe: Recipe, model: nn.Module) -> Optimizer:
    """SGD at the exponential rates that replace its weight decay; they are set after every step."""
    sgd = SGD(
        [weight for weight in model.parameters() if weight.requires_grad], lr=recipe.rate, momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
    )  # fmt: skip
    schedule = undo_decay(sgd)
    sgd.register_step_post_hook(lambda *_: schedule.step())
    return sgd


register("sgd-undone-decay", _undone, own_rates=True)


@torch.no_grad()
def _jog(weights: Sequence[Tensor], seed: int) -> None:
    """Change every weight by its last digit, up or down."""
    draw = torch.Generator().manual_seed(seed + 1)
    for weight in weights:
        signs = torch.randint(0, 2, weight.shape, generator=draw).to(weight) * 2 - 1
        weight.mul_(1 + torch.finfo(weight.dtype).eps * signs)


@torch.no_grad()
def _outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Return outputs normalized over these images: the running averages of the twins have different scales."""
    averages = {name: value.clone() for name, value in model.state_dict().items() if "running" in name}
    found: Tensor = model(x)
    model.load_state_dict(averages, strict=False)
    return found


@torch.no_grad()
def _test(model: nn.Module, split: Split, device: str) -> float:
    """Return the test accuracy, with batch statistics of the test set for the same reason."""
    x = split.inputs(split.x_test).to(device)
    return float((model(x).argmax(1).cpu() == split.y_test.cpu()).double().mean())


def compare(setting: Setting, first: Course, second: Course) -> Twins:
    """Return the distance between two trainings.

    >>> outputs = torch.tensor([[[1.0, 2.0]], [[1.0, 4.0]]])
    >>> one = Course(outputs, np.ones((2, 1)), np.ones(2), 0.5)
    >>> other = Course(outputs + torch.tensor([0.0, 1.0]), np.ones((2, 1)), np.ones(2), 0.5)
    >>> compare(Setting("digits", 64, 8, 0.3, 0.03, steps=10), one, other).apart
    [0.5, 0.25]
    """
    largest = first.outputs.abs().flatten(1).max(dim=1).values
    apart = (first.outputs - second.outputs).abs().flatten(1).max(dim=1).values / largest
    if not bool(apart.isfinite().all()):
        raise LabError(f"The outputs of a training with {setting} are not finite. Take fewer steps, or less decay.")
    same = first.outputs[-1].argmax(-1) == second.outputs[-1].argmax(-1)
    return Twins(
        list(range(0, setting.steps + 1, setting.every)),
        apart.tolist(),
        float(same.double().mean()),
        (first.norms.tolist(), second.norms.tolist()),
        (first.rates.tolist(), second.rates.tolist()),
        (first.test, second.test),
    )


@dataclass(frozen=True)
class Pair:
    """A training to compare with the one with weight decay, and its name."""

    name: str
    setting: Setting
    way: Way


# Outputs that differ by at most this share of the largest are equal: rounding of float64, magnified by training.
_SAME = 1e-9
# An effective learning rate is constant if the means over both halves of the steps differ by at most this factor, and
# at rest if those over the last two quarters do. It fluctuates with the gradients, so single steps say less.
_STAYS = 1.1
# Curves that equal the one of rounding, up to this factor by chance, have the same cause.
_ALIKE = 100.0


def report(pairs: Sequence[Pair], found: Sequence[Twins]) -> Report:
    """Return the report on all pairs."""
    by_name = {pair.name: (pair, twins) for pair, twins in zip(pairs, found, strict=True)}
    rows = tuple(
        (pair.name, f"{max(twins.apart):.1g}", _step_apart(twins), 100 * twins.agree, None,
         f"{twins.rates[1][-1]:.3g}", f"{twins.norms[0][-1][0]:.3g}", f"{twins.norms[1][-1][0]:.3g}",
         100 * twins.tests[0], 100 * twins.tests[1])
        for pair, twins in by_name.values()
    )  # fmt: skip
    columns = ("compared with weight decay in the same type", "largest difference of outputs", "1 % apart from step",
               "same class at the end, %", "paper", "last rate", "first layer's norm with decay", "without",
               "test % with decay", "without")  # fmt: skip
    one = pairs[0].setting
    title = (
        f"{one.source}, perceptron of 4 layers, {one.width} wide: {one.steps:,} steps at η = {one.rate:g}, "
        f"λ = {one.decay:g} (with momentum η = {one.rate / 10:g})"
    )
    return Report(
        {"figure": draw(by_name)},
        (Table(title, columns, rows),),
        _verdicts(by_name),
        {name: _numbers(twins) for name, (_, twins) in by_name.items()},
    )


def _step_apart(twins: Twins) -> int | None:
    """The first measurement at which outputs are a hundredth apart."""
    return next((step for step, apart in zip(twins.steps, twins.apart, strict=True) if apart > 0.01), None)


def _verdicts(by_name: dict[str, tuple[Pair, Twins]]) -> tuple[Verdict, ...]:
    pair, plain = by_name["float64"]
    heavy, neither = by_name["float64, momentum 0.9"][1], by_name["float64, neither"][1]
    usual, single = by_name["float64, ε = 1e-5"][1], by_name["float32"][1]
    jogged, jogged32 = by_name["float64, another last digit"][1], by_name["float32, another last digit"][1]
    worst = max(*plain.apart, *heavy.apart)
    scale = max(_scale_off(by_name[name]) for name in ("float64", "float64, momentum 0.9"))
    rates, falling = (_effective(by_name[name][1], 1) for name in (SETTLED, SETTLED_NEITHER))
    levels, halves = _quarters(rates), [float(np.mean(half)) for half in np.array_split(rates, 2)]
    from_start = _quarters(_effective(plain, 1))
    rests = from_start[-1] / from_start[-2]
    return (
        Verdict(
            "training with weight decay and training with the exponential schedule instead give the same function",
            "exactly",
            f"in float64 outputs are at most {max(plain.apart):.1g} apart over {pair.setting.steps:,} steps, in which "
            f"the rate grows by a factor of {plain.rates[1][-1] / plain.rates[0][-1]:.2g}; with momentum "
            f"{max(heavy.apart):.1g}; without weight decay at a constant rate {max(neither.apart):.2g}",
            bool(worst < _SAME < max(neither.apart)),
        ),
        Verdict(
            "with weight decay, weights are a^t times as long as with the schedule",
            "exactly",
            f"within {scale:.1g} of that",
            scale < _SAME,
        ),
        Verdict(
            "an exponentially increasing learning rate compensates the implicit decay: the effective rate is constant",
            "in words",
            f"from the equilibrium of weight decay α̂ is {_said_levels(levels)}, the means of quarters of the steps; "
            f"without schedule and decay {_said_levels(_quarters(falling))}",
            max(halves) < _STAYS * min(halves),
        ),
        Verdict(
            "from a random start the effective rate reaches an equilibrium, as with weight decay",
            "–",
            f"from {_effective(plain, 1)[0]:.3g} to {from_start[-1]:.3g}; "
            f"α̂ of the last quarter of the steps is {rests:.2f} times that of the quarter before",
            _rests(from_start),
        ),
        Verdict(
            "the remaining difference is rounding, magnified by training",
            "–",
            f"{max(plain.apart):.1g}, and {max(jogged.apart):.1g} from another last digit of the initial weights; in "
            f"float32 {max(single.apart):.1g} and {max(jogged32.apart):.1g}, a hundredth {_said(single)} and "
            f"{_said(jogged32)}",
            max(plain.apart) < _ALIKE * max(jogged.apart) and max(single.apart) < _ALIKE * max(jogged32.apart),
        ),
        Verdict(
            "an ε in batch normalization breaks the scale invariance",
            "–",
            f"with ε = 1e-5 outputs are {max(usual.apart):.1g} apart in float64, a hundredth "
            f"{_said(usual)}; test accuracies are {100 * usual.tests[0]:.1f} and {100 * usual.tests[1]:.1f} %",
            max(usual.apart) > _SAME,
        ),
    )  # fmt: skip


def _rests(levels: Sequence[float]) -> bool | None:
    """Return whether the last level is within a tenth of the one before.

    If it is not: None if the changes get smaller, or if there is only one. None also where the training diverged.
    """
    changes = np.abs(np.diff(np.log(levels)))
    if not np.isfinite(changes).all():
        return None
    if changes[-1] < np.log(_STAYS):
        return True
    return None if len(changes) == 1 or changes[-1] < changes[-2] else False


def _said_levels(levels: Sequence[float]) -> str:
    return ", ".join(f"{level:.3g}" for level in levels)


def _said(twins: Twins) -> str:
    step = _step_apart(twins)
    return "at no step" if step is None else f"from step {step:,} on"


def _scale_off(known: tuple[Pair, Twins]) -> float:
    """Return the largest relative distance of ‖w_t‖ from a^t ‖w̃_t‖."""
    one, twins = known[0].setting, known[1]
    a = 1 - shrinkage(one.rate, one.decay, momentum=one.momentum)
    with_decay, without = (np.array(norms) for norms in twins.norms)
    told = without * a ** np.array(twins.steps)[:, None]
    return float(np.abs(told / with_decay - 1).max())


def _effective(twins: Twins, which: int) -> list[float]:
    """η/‖w‖² of the first layer over the measurements."""
    norms = [norm[0] for norm in twins.norms[which]]
    found: list[float] = effective_lr(twins.rates[which], norms).tolist()
    return found


def _quarters(rates: Sequence[float]) -> list[float]:
    """The means of the four quarters, or of as many parts as there are measurements.

    >>> _quarters([1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0])
    [1.0, 2.0, 3.0, 4.0]
    """
    return [float(np.mean(part)) for part in np.array_split(rates, min(4, len(rates)))]


def _numbers(twins: Twins) -> dict[str, object]:
    at = sorted({round(place) for place in np.linspace(0, len(twins.steps) - 1, 41)})
    return {
        "steps": [twins.steps[i] for i in at],
        "apart": [float(f"{twins.apart[i]:.3g}") for i in at],
        "rates": [float(f"{twins.rates[1][i]:.6g}") for i in at],
        "effective_rates_with_decay": [float(f"{_effective(twins, 0)[i]:.5g}") for i in at],
        "effective_rates_without": [float(f"{_effective(twins, 1)[i]:.5g}") for i in at],
        "agree": twins.agree,
        "test": list(twins.tests),
    }


def draw(by_name: dict[str, tuple[Pair, Twins]]) -> Figure:
    """Draw the distances of outputs, the schedules, and effective learning rates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.4, 1, 1))
    styles = dict(zip(by_name, ("C0-", "C2-", "C4-", "C3-", "C0:", "C3:", "k-", "C1-", "0.6"), strict=True))
    for name, (_, twins) in by_name.items():
        style = styles[name]
        color, dash = (style, "-") if style[0] == "0" else (style[:-1], style[-1])
        shown = [apart if apart > 0 else np.nan for apart in twins.apart]
        left.plot(twins.steps, shown, color=color, linestyle=dash, linewidth=1.3, label=name)
    left.set_ylim(1e-17, 1e12)
    left.legend(fontsize=7, loc="upper left", ncols=2, columnspacing=1.0, handlelength=1.5)
    _finish(left, "largest difference of outputs, relative", "Outputs compared with those with weight decay")
    plain, neither = by_name["float64"][1], by_name["float64, neither"][1]
    middle.plot(plain.steps, plain.rates[0], "k--", label="with weight decay: η")
    middle.plot(plain.steps, plain.rates[1], "C0-", label="without: η a^−(2t+1)")
    middle.legend(fontsize=8, loc="upper left")
    _finish(middle, "learning rate", "Learning rates")
    right.plot(plain.steps, _effective(plain, 1), "C0-", linewidth=2.5, alpha=0.5, label="exponential schedule")
    right.plot(plain.steps, _effective(plain, 0), "k--", linewidth=1, label="weight decay")
    right.plot(neither.steps, _effective(neither, 1), color="0.5", label="neither")
    settled = by_name[SETTLED][1]
    right.plot(settled.steps, _effective(settled, 1), "C1-", linewidth=1, label="exponential, from equilibrium")
    right.legend(fontsize=8, loc="center right")
    _finish(right, "effective learning rate η/‖w‖²", "Effective learning rates, first layer")
    return figure


def _finish(ax: Axes, says: str, title: str) -> None:
    ax.set_yscale("log")
    ax.set_xlabel("step t", fontsize=9)
    ax.set_ylabel(says, fontsize=9)
    ax.set_title(title, fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)


#: The names of the tasks on digits and MNIST, and the settings of each scale.
SETTINGS = {
    "smoke": Setting("digits", 64, 16, rate=0.3, decay=0.03, batch=50, steps=60, every=5),
    "small": Setting("digits", 64, 64, rate=0.3, decay=0.03, steps=1000),
    "full": Setting("mnist", 784, 784, rate=0.3, decay=0.01, batch=128, steps=5000, every=50),
}
_TASKS = {"digits": "digits-mlp", "mnist": "mnist-mlp"}
#: The default ε of torch's batch normalization.
USUAL_EPS = 1e-5
#: The names of the pairs that begin at the equilibrium of weight decay.
SETTLED, SETTLED_NEITHER = "float64, from equilibrium", "float64, from equilibrium, neither"


def pairs(setting: Setting) -> list[Pair]:
    """Return the trainings to compare with the same training with weight decay: name, setting, way.

    With momentum the rate is a tenth, so that steps are as long in the long run.

    >>> [pair.name for pair in pairs(SETTINGS["small"])][:2]
    ['float64', 'float64, momentum 0.9']
    """
    heavy = replace(setting, rate=setting.rate / 10, momentum=0.9)
    single, settled = replace(setting, double=False), replace(setting, before=2 * setting.steps)
    return [
        Pair("float64", setting, "exponential"),
        Pair("float64, momentum 0.9", heavy, "exponential"),
        Pair("float64, ε = 1e-5", replace(setting, eps=USUAL_EPS), "exponential"),
        Pair("float32", single, "exponential"),
        Pair("float64, another last digit", setting, "rounding"),
        Pair("float32, another last digit", single, "rounding"),
        Pair("float64, neither", setting, "neither"),
        Pair(SETTLED, settled, "exponential"),
        Pair(SETTLED_NEITHER, settled, "neither"),
    ]


def found(lab: Lab, wanted: Iterable[Pair]) -> list[Twins]:
    """Return every pair, trained now unless the archive has it; the training with weight decay is shared."""
    courses: dict[tuple[Setting, Way], Course] = {}
    return [_twins(lab, pair, courses) for pair in wanted]


def _twins(lab: Lab, pair: Pair, courses: dict[tuple[Setting, Way], Course]) -> Twins:
    kept = lab.archive.root / "dynamics" / "exp-schedule" / f"{key(pair.setting, pair.way)}.json"
    if kept.exists():
        return Twins.read(kept)
    if lab.known:
        raise LabError(f"The pair '{pair.name}' is not in {kept}. Train it first (leave --known out).")
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
    """Draw the differences of outputs, the two schedules, and the effective learning rates."""
    wanted = pairs(SETTINGS[lab.scale])
    return report(wanted, found(lab, wanted))


STUDIES = (
    Study(
        "dynamics/exp-schedule",
        "Section 4.3: weight decay, and the exponential learning rates that take its place",
        no_trials,
        conclude,
    ),
)
