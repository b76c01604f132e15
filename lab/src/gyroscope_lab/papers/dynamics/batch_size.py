"""Steps of Adam and RMSprop by batch size (sections 2.1 and 6 of Grosse's chapter, equation 4).

Both divide by the root of diag(F_emp^batch) = Cov(∇J_{x,t})/|B| + (∇J)², which falls with the batch size |B|: "larger
batch sizes imply larger effective learning rates", which does not hold for SGD. The study measures the law and its
consequences at fixed weights, at the start and after some training. It then trains for the same number of steps with
small and with large batches, and compares the recorded updates. Section 6 of the chapter states the opposite ("larger
batch sizes result in more gradient noise, and hence smaller steps"), which must be a slip; it is tested on the same
numbers.

At fixed weights, the gradients are those of batches drawn at one point, because in a training, batches of other sizes
also lead to other weights. Two numbers describe a step Δ: its length E‖Δ‖, and its distance down the whole loss, E⟨Δ,
−∇J⟩/‖∇J‖. Gradients of small batches are mostly noise, which makes the steps of SGD long without taking them far.
RMSprop divides by noise and signal together, so the length hardly depends on the batch, but the distance does. Adam's
steps also grow in length, because it averages the noise out of the numerator but not out of the denominator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from gyroscope.store import Run
from gyroscope.theory import batch_law, per_example_gradients, step_gain
from gyroscope.theory.adaptive import Moments, adam, rmsprop
from gyroscope.theory.decay import Rule, sgd
from gyroscope_lab.data.source import Source
from gyroscope_lab.data.split import Split
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import recorded
from gyroscope_lab.papers.dynamics.measurements import kept, split_of
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.training import Training
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure


RULES: dict[str, Rule[Any]] = {
    "sgd": partial(sgd, lr=0.1),
    "rmsprop": partial(rmsprop, lr=1e-3),
    "adam": partial(adam, lr=1e-3),
}


@dataclass(frozen=True)
class Setting:
    """Everything that a measurement depends on.

    Attributes:
        source: the data.
        model: the network.
        options: the options of the network.
        sizes: |B|, in increasing order.
        trained: the number of preceding steps of Adam, with batches of 64.
        steps: the number of batches drawn per size.
        warm: the number of first steps to leave out, until the averages are filled.
        elements: the number of elements of the gradient, chosen at random, on which the law is measured.
        examples: the most examples to draw from.
        seed: the seed of all random choices.
    """

    source: Source
    model: str
    options: tuple[tuple[str, Any], ...]
    sizes: tuple[int, ...]
    trained: int
    steps: int
    warm: int
    elements: int = 256
    examples: int = 2000
    seed: int = 0


def held(lab: Lab, setting: Setting) -> dict[str, Any]:
    """The law of the second moment, gains and steps at one point, as JSON values.

    Returns:
        The "exponent" of |B|; per size the "measured" and "predicted" traces, and the share of "noise" in them; the
        "gain" of 1/√s from the smallest size to each, "measured" in Adam and "predicted"; and "length" and "along" of
        each rule.
    """

    def measured() -> dict[str, Any]:
        model, x, y = _point(lab, setting)
        g = per_example_gradients(model, lambda z, t: F.cross_entropy(z, t), x, y, chunk=256)
        order = torch.Generator().manual_seed(setting.seed)
        some = torch.randperm(g.shape[1], generator=order)[: setting.elements].to(g.device)
        law = batch_law(g[:, some], setting.sizes, draws=setting.steps, seed=setting.seed)
        drawn = [_batches(g, size, setting.steps, order) for size in setting.sizes]
        found = {name: [steps_of(rule, one, g.mean(0), setting.warm) for one in drawn] for name, rule in RULES.items()}
        squares = [_square(one) for one in drawn]
        small = setting.sizes[0]
        return {
            "law": {"exponent": law.exponent, "measured": law.measured.tolist(), "predicted": law.predicted.tolist(),
                    "noise": law.noise.tolist()},
            "gain": {
                "measured": [float((squares[0] / one).sqrt().nanmedian()) for one in squares],
                "predicted": [step_gain(g, small, size).median for size in setting.sizes],
                "most": [step_gain(g, small, size).most for size in setting.sizes],
            },
            "steps": {name: {"length": [a for a, _ in its], "along": [b for _, b in its]}
                      for name, its in found.items()},
        }  # fmt: skip

    return kept(lab, "batch-size", setting, measured)


def steps_of(rule: Rule[Any], gradients: Tensor, whole: Tensor, warm: int) -> tuple[float, float]:
    """E‖Δ‖ and E⟨Δ, −∇J⟩/‖∇J‖ of a rule on gradients [K, P], one step per gradient, at fixed weights.

    >>> g = torch.tensor([[3.0, 4.0], [3.0, -4.0]])
    >>> steps_of(partial(sgd, lr=0.1), g, g.mean(0), 0)
    (0.5, 0.30000001192092896)
    """
    state, there = None, torch.zeros_like(whole)
    lengths, ways = [], []
    for step, g in enumerate(gradients):
        move, state = rule(there, g, state)
        if step >= warm:
            lengths.append(float(move.norm()))
            ways.append(float(-(move @ whole) / whole.norm()))
    return sum(lengths) / len(lengths), sum(ways) / len(ways)


def _square(gradients: Tensor) -> Tensor:
    """Adam's ŝ after the last step."""
    state: Moments | None = None
    there = torch.zeros_like(gradients[0])
    for g in gradients:
        _, state = adam(there, g, state, lr=0.0)
    assert state is not None
    return state.square / (1 - 0.999**state.step)


def _batches(g: Tensor, size: int, count: int, order: torch.Generator) -> Tensor:
    """The gradients of `count` batches drawn with replacement, [count, P]: one product instead of many sums."""
    drawn = torch.randint(0, len(g), (count, size), generator=order)
    shares = torch.zeros(count, len(g)).scatter_add_(1, drawn, torch.full(drawn.shape, 1 / size))
    return shares.to(g) @ g


def _point(lab: Lab, setting: Setting) -> tuple[nn.Module, Tensor, Tensor]:
    """The network after its first steps of training, and the examples to draw from."""
    split = split_of(lab, setting.source)
    order = torch.Generator().manual_seed(setting.seed)
    chosen = torch.randperm(len(split.y_train), generator=order)[: setting.examples].to(split.y_train.device)
    x, y = split.inputs(split.x_train[chosen.to(split.x_train.device)]).to(split.y_train.device), split.y_train[chosen]
    x = x.double()
    schedule = Schedule(epochs=1, batch=64, cuts=(), drawn=setting.trained)
    task = Task("batch-size", setting.source, setting.model, setting.options, schedule)
    trial = Trial(task, Recipe("Adam", 1e-3, optimizer="adam", eps=1e-8), setting.seed)
    model = trial.network().to(x)
    if setting.trained:
        training = Training(trial, Split(x, y, x, y, classes=split.classes), device=y.device, network=model)
        training.feed.generator.set_state(order.get_state())  # the batches follow the choice of examples
        for _ in training.proceed():
            pass
    return model, x, y


Held = Mapping[str, dict[str, Any]]
ByRecipe = Mapping[str, npt.NDArray[np.float64]]

# The tolerance for the exponent of |B| and for gains relative to their prediction; growth must exceed it.
_CLOSE = 0.1
# Updates are compared over this share of the training, while all batch sizes still learn, and over all of it.
_EARLY = 1 / 3
_NAMES = {"sgd": "SGD", "rmsprop": "RMSprop", "adam": "Adam"}
_COLORS = {"SGD": "C0", "RMSprop": "C1", "Adam": "C3"}


def growth(values: Sequence[float] | npt.NDArray[np.float64]) -> float:
    """The factor from the smallest batch to the largest.

    >>> growth([2.0, 3.0, 5.0])
    2.5
    """
    return float(values[-1]) / float(values[0])


def early(updates: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The mean update of each batch size over the first third of the steps.

    >>> early(np.array([[1.0, 3.0, 9.0, 9.0, 9.0, 9.0]])).tolist()
    [2.0]
    """
    return np.asarray(updates[:, : max(1, round(_EARLY * updates.shape[1]))].mean(axis=1))


def verdicts(sizes: Sequence[int], at: Held, updates: ByRecipe, moved: ByRecipe) -> tuple[Verdict, ...]:
    """Return the verdicts on the chapter's statements on batch sizes."""
    exponents = [one["law"]["exponent"] for one in at.values()]
    gains = [(one["gain"]["measured"][-1], one["gain"]["predicted"][-1]) for one in at.values()]
    most = next(iter(at.values()))["gain"]["most"][-1]
    between = f"from |B| = {sizes[0]} to {sizes[-1]}"
    ways = {name: [growth(one["steps"][name]["along"]) for one in at.values()] for name in _NAMES}
    found = [
        Verdict(
            "the noise in the second moment of batch gradients falls as 1/|B|",
            "exponent −1 (equation 4)",
            "exponent " + _each(exponents, at, ".3f"),
            all(abs(one + 1) < _CLOSE for one in exponents),
        ),
        Verdict(
            f"larger batches imply larger effective learning rates: 1/√s grows {between}",
            f"by up to √(|B'|/|B|) = {most:.2f}",
            "median factor "
            + ", ".join(f"{a:.2f} (by equation 4: {b:.2f}) {name}" for (a, b), name in zip(gains, at, strict=True)),
            all(a > 1 + _CLOSE and abs(a / b - 1) < _CLOSE for a, b in gains),
        ),
        *(
            Verdict(
                f"at fixed weights, a step of {_NAMES[name]} goes further down the loss with larger batches",
                f"larger steps {between}",
                "by a factor of " + _each(ways[name], at, ".2f"),
                all(one > 1 + _CLOSE for one in ways[name]),
            )
            for name in ("rmsprop", "adam")
        ),
        Verdict(
            "SGD does not share this",
            "the same step on average",
            "by a factor of " + _each(ways["sgd"], at, ".2f"),
            all(abs(one - 1) < _CLOSE for one in ways["sgd"]),
        ),
    ]
    for name, grows in (("RMSprop", True), ("Adam", True), ("SGD", False)):
        first, whole = growth(early(updates[name])), growth(updates[name].mean(axis=1))
        found.append(
            Verdict(
                f"in training, updates of {name} are {'longer' if grows else 'not longer'} with larger batches",
                f"{'larger' if grows else 'no larger'} steps {between}",
                f"by a factor of {first:.2f} in the first third, {whole:.2f} over all steps; "
                f"at the end the weights are {growth(moved[name]):.2f} times as far from their start",
                first > 1 + _CLOSE if grows else first < 1 + _CLOSE,
            )
        )
    shorter = {name: growth(early(updates[name])) for name in ("RMSprop", "Adam")}
    found.append(
        Verdict(
            "(section 6) for Adam and RMSprop, larger batches result in smaller steps",
            "smaller, which contradicts section 2.1",
            "updates in training by a factor of " + ", ".join(f"{one:.2f} ({name})" for name, one in shorter.items()),
            all(one < 1 - _CLOSE for one in shorter.values()),
        )
    )
    return tuple(found)


def _each(values: Sequence[float], at: Held, form: str) -> str:
    return ", ".join(f"{value:{form}} {name}" for value, name in zip(values, at, strict=True)).replace("-", "−")


def tables(sizes: Sequence[int], at: Held, updates: ByRecipe, moved: ByRecipe, losses: ByRecipe) -> tuple[Table, ...]:
    """One table per point with fixed weights, and one for training."""
    found = [_held_table(sizes, name, one) for name, one in at.items()]
    rows = []
    for name, its in updates.items():
        first, whole = 1000 * early(its), 1000 * its.mean(axis=1)
        numbers = np.stack([first, whole, moved[name], losses[name]], axis=1)
        rows += [(name, size, *row) for size, row in zip(sizes, numbers.tolist(), strict=True)]
    columns = ("", "batch", "1000 ‖Δw‖, first third", "all steps", "‖w − w₀‖ at the end", "loss, mean of all steps")
    return (*found, Table("In training: lengths of updates, and distance of the weights", columns, tuple(rows)))


def _held_table(sizes: Sequence[int], name: str, one: dict[str, Any]) -> Table:
    law, gain, steps = one["law"], one["gain"], one["steps"]
    rows = []
    for i, size in enumerate(sizes):
        shares = [steps[rule][kind][i] / steps[rule][kind][0] for rule in _NAMES for kind in ("length", "along")]
        second = law["measured"][i] / law["predicted"][i]
        rows.append((size, second, law["noise"][i], gain["measured"][i], gain["predicted"][i], *shares))
    each = [f"{rule}: {kind}" for rule in _NAMES.values() for kind in ("length of a step", "along −∇J")]
    columns = ("batch", "second moment / equation 4", "noise in it", "gain of 1/√s", "by equation 4", *each)
    return Table(
        f"Weights fixed {name}; gains and steps as multiples of those of the smallest batch", columns, tuple(rows)
    )


def figure(sizes: Sequence[int], at: Held, updates: ByRecipe) -> Figure:
    """Draw the law, the gain and the steps at fixed weights, and updates in training."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(13.5, 3.9), layout="constrained")
    law, gain, held, trained = drawn.subplots(1, 4)
    last = list(at.values())[-1]
    for place, (name, one) in enumerate(at.items()):
        color, top = f"C{4 + place}", one["law"]["predicted"][0]
        law.plot(sizes, np.array(one["law"]["measured"]) / top, "o", markersize=4, color=color, label=name)
        law.plot(sizes, np.array(one["law"]["predicted"]) / top, "-", linewidth=1, color=color)
        gain.plot(sizes, one["gain"]["measured"], "o", markersize=4, color=color, label=name)
        gain.plot(sizes, one["gain"]["predicted"], "-", linewidth=1, color=color)
    gain.plot(sizes, last["gain"]["most"], ":", color="0.6", label="√(|B'|/|B|)")
    for rule, name in _NAMES.items():
        for kind, style in (("along", "-"), ("length", ":")):
            its = np.array(last["steps"][rule][kind])
            label = name if kind == "along" else None
            # The curves of Adam and RMSprop nearly coincide: one is drawn wider.
            width = 4.0 if (rule, kind) == ("rmsprop", "along") else 1.4
            held.plot(
                sizes, its / its[0], f"o{style}", markersize=3, linewidth=width, color=_COLORS[name], label=label
            )  # fmt: skip
    for name, its in updates.items():
        mean = early(its)
        trained.plot(sizes, mean / mean[0], "o-", markersize=3, color=_COLORS[name], label=name)
    titles = (
        "tr F_emp^batch (points), equation 4 (lines)",
        "Gain of 1/√s in Adam, and by equation 4",
        f"Fixed {list(at)[-1]}: along −∇J (line),\nlength (dotted)",
        "In training: lengths of updates,\nfirst third of the steps",
    )
    for ax, title in zip((law, gain, held, trained), titles, strict=True):
        ax.set_title(title, fontsize=9)
        ax.set_xscale("log", base=2)
        ax.set_xticks(list(sizes), [str(size) for size in sizes])
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:g}")
        ax.tick_params(which="both", labelsize=8)
        ax.set_xlabel("batch size", fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(fontsize=8, frameon=False)
    law.set_ylabel("relative to the smallest batch", fontsize=9)
    return drawn


#: The recipes: rates at which all of them learn.
RECIPES = (
    Recipe("SGD", 0.1),
    Recipe("RMSprop", 1e-3, optimizer="rmsprop"),
    Recipe("Adam", 1e-3, optimizer="adam"),
)


@dataclass(frozen=True)
class Plan:
    """The trainings and measurements of a scale.

    Attributes:
        per_class: examples per class.
        sizes: the batch sizes.
        steps: the steps of each training.
        seeds: the seeds of the trainings.
        drawn: the steps at fixed weights.
        warm: the number of these to leave out at the start.
        trained: the steps of training before the second measurement at fixed weights.
    """

    per_class: int
    sizes: tuple[int, ...]
    steps: int
    seeds: int
    drawn: int
    warm: int
    trained: int


PLANS = {
    "smoke": Plan(16, (16, 256), steps=30, seeds=1, drawn=150, warm=100, trained=30),
    "small": Plan(96, (16, 32, 64, 128, 256, 512), steps=180, seeds=3, drawn=600, warm=300, trained=100),
    "full": Plan(1000, (16, 64, 256, 1024), steps=1250, seeds=5, drawn=1000, warm=300, trained=300),
}


def task_of(lab: Lab, batch: int) -> Task:
    """The task with a batch size; larger batches take the examples more often, for the same number of steps.

    >>> from gyroscope_lab.training.archive import Archive
    >>> for batch in (16, 512):
    ...     schedule = task_of(Lab(Archive("runs"), "small"), batch).schedule
    ...     schedule.steps(960), schedule.passes
    (180, 3)
    (180, 96)
    """
    [task] = lab.tasks(("mnist-mlp",))
    plan, options = PLANS[lab.scale], dict(task.options)
    kept = tuple((name, options[name]) for name in ("biases", "init", "inputs"))
    passes, rest = divmod(plan.steps * batch, 10 * plan.per_class)
    assert not rest, "the batches of a training must be whole passes"
    schedule = Schedule(1, batch, cuts=(), passes=passes)
    source = replace(task.source, per_class=plan.per_class)
    return replace(task, model="mlp-3x32", options=kept, schedule=schedule, source=source)


def trials(lab: Lab) -> list[Trial]:
    """Return every recipe with every batch size and seed, measured at every step.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [(one.recipe.name, one.schedule.batch) for one in trials(Lab(Archive("runs")))][:3]
    [('SGD', 16), ('SGD', 256), ('RMSprop', 16)]
    """
    plan = PLANS[lab.scale]
    return [
        Trial(task_of(lab, size), recipe, seed, every=1)
        for recipe in RECIPES
        for size in plan.sizes
        for seed in range(plan.seeds)
    ]


@dataclass(frozen=True, eq=False)
class Trained:
    """Recorded trainings of one recipe, means over seeds.

    Attributes:
        updates: ‖Δw‖ over all layers [sizes, steps].
        moved: ‖w − w₀‖ after the last step [sizes].
        loss: the training loss, the mean over its steps [sizes].
    """

    updates: npt.NDArray[np.float64]
    moved: npt.NDArray[np.float64]
    loss: npt.NDArray[np.float64]


def trained(lab: Lab, recipe: Recipe) -> Trained:
    """Return the recorded trainings of a recipe."""
    plan = PLANS[lab.scale]
    its = [one for one in trials(lab) if one.recipe == recipe]
    results = lab.run(its)
    runs = [update_lengths(recorded(lab, one)) for one in its]
    shape = len(plan.sizes), plan.seeds
    updates = np.array([update for update, _ in runs]).reshape(*shape, -1).mean(axis=1)
    moved = np.array([way for _, way in runs]).reshape(shape).mean(axis=1)
    loss = np.array([result.loss[-1] for result in results]).reshape(shape).mean(axis=1)
    return Trained(updates, moved, loss)


def update_lengths(run: Run) -> tuple[npt.NDArray[np.float64], float]:
    """The length of every update of a recorded training, [steps], and the distance of the weights from their start."""
    steps = run.steps[run.steps > 0]
    each = np.asarray(run.series("update_norm", steps=steps), dtype=np.float64)
    norms = np.asarray(run.series("weight_norm"), dtype=np.float64)
    turned = np.asarray(run.series("rotation"), dtype=np.float64)[-1]
    first, last = norms[0], norms[-1]
    # ‖w − w₀‖² by the law of cosines; rotation is 1 − cos.
    squares = first**2 + last**2 - 2 * first * last * (1 - turned)
    return np.sqrt((each**2).sum(axis=1)), float(np.sqrt(squares.sum()))


def points(lab: Lab) -> dict[str, dict[str, Any]]:
    """Return the measurements at fixed weights, at the start and after some training."""
    plan = PLANS[lab.scale]
    task = task_of(lab, plan.sizes[0])
    after = {"at the start": 0, f"after {plan.trained} steps": plan.trained}
    return {
        name: held(lab, Setting(task.source, task.model, task.options, plan.sizes, steps, plan.drawn, plan.warm))
        for name, steps in after.items()
    }


def conclude(lab: Lab) -> Report:
    """Report the law, the gain, and steps at fixed weights and in training, by batch size."""
    plan = PLANS[lab.scale]
    at, runs = points(lab), {recipe.name: trained(lab, recipe) for recipe in RECIPES}
    told: dict[str, Any] = {
        name: {"update": its.updates.mean(axis=1).tolist(), "moved": its.moved.tolist(), "loss": its.loss.tolist()}
        for name, its in runs.items()
    }
    updates = {name: its.updates for name, its in runs.items()}
    moved = {name: its.moved for name, its in runs.items()}
    losses = {name: its.loss for name, its in runs.items()}
    return Report(
        {"figure": figure(plan.sizes, at, updates)},
        tables(plan.sizes, at, updates, moved, losses),
        verdicts(plan.sizes, at, updates, moved),
        {"sizes": list(plan.sizes), "held": at, "training": told},
    )


STUDIES = (
    Study("dynamics/batch-size", "Equation 4: adaptive steps grow with the batch, SGD's do not", trials, conclude),
)
