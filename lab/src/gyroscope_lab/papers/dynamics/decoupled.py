"""Weight decay and L2 regularization: equal for gradient descent, different for Adam (section 5 of Grosse's chapter).

Decay is w ← (1 − ηλ)w − ηC⁻¹∇J (equation 22), L2 is w ← w − ηC⁻¹(∇J + λw). They are equal for C = I, unless a running
average of gradients is used, as in momentum.

The first part compares trajectories of four rules from the same weights on the same batches, decay with λ' against L2
with λ. Their distance is given as a share of the effect of L2,

    d_k(λ') = ‖w_k(L2 λ) − w_k(decay λ')‖ / ‖w_k(L2 λ) − w_k(neither)‖,

which is 0 if the two are equal, and 1 if decay comes no closer to L2 than neither. λ' covers a range, so that a
difference in strength does not count. The trajectories follow the pure rules of `gyroscope.theory` in float64, without
an optimizer, so they are not trainings.

The second part is the test accuracy of Adam over a grid of λ and rates, with L2 (`torch.optim.Adam`) and with decay
(`torch.optim.AdamW`). The two λ are not comparable, so each has its own range. The best of each grid, chosen by test
accuracy, is trained again from seeds that had no part in the choice. The comparison is made on those, seed by seed,
with the same initial weights and batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from gyroscope.theory.adaptive import adam, rmsprop
from gyroscope.theory.decay import Rule, sgd, with_decay, with_l2
from gyroscope_lab import models
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import Cell, cells
from gyroscope_lab.papers.chance import gain
from gyroscope_lab.papers.dynamics.measurements import kept, split_of
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: The rules by name, with their rates.
RULES: dict[str, tuple[Rule[Any], float]] = {
    "SGD": (partial(sgd, lr=0.1), 0.1),
    "SGD with momentum 0.9": (partial(sgd, lr=0.02, momentum=0.9), 0.02),
    "RMSprop": (partial(rmsprop, lr=1e-3), 1e-3),
    "Adam": (partial(adam, lr=3e-3), 3e-3),
}


@dataclass(frozen=True)
class Setting:
    """Everything that the trajectories of a rule depend on.

    Attributes:
        rule: one of `RULES`.
        source: the data.
        decay: λ of L2.
        multiples: λ'/λ of decay.
        steps: the number of steps.
        batch: examples per step, drawn with replacement.
        seed: the seed of the weights and of the batches.
        model: the network.
    """

    rule: str
    source: Source
    decay: float = 0.03
    multiples: tuple[float, ...] = (1.0, 10.0)
    steps: int = 100
    batch: int = 50
    seed: int = 0
    model: str = "mlp-2x32"


@dataclass(frozen=True, eq=False)
class Apart:
    """The distance of decay from L2.

    Attributes:
        multiples: λ'/λ [M].
        shares: d_k(λ') [M, K], for k = 1 … K.
    """

    multiples: npt.NDArray[np.float64]
    shares: npt.NDArray[np.float64]

    @property
    def closest(self) -> int:
        """The index of the λ' that ends closest to L2."""
        return int(np.argmin(self.shares[:, -1]))


def apart(lab: Lab, setting: Setting) -> Apart:
    """Return the distance of decay from L2 over the steps of one rule."""

    def measured() -> dict[str, Any]:
        model, gradient = _problem(lab, setting)
        rule, lr = RULES[setting.rule]
        start = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
        penalized = path(with_l2(rule, decay=setting.decay), gradient, start, setting.steps)
        plain = path(rule, gradient, start, setting.steps)
        effect = (penalized - plain).norm(dim=1)
        decayed = [
            path(with_decay(rule, lr=lr, decay=multiple * setting.decay), gradient, start, setting.steps)
            for multiple in setting.multiples
        ]
        return {"shares": [((penalized - one).norm(dim=1) / effect).tolist() for one in decayed]}

    found = kept(lab, "adamw-vs-l2", setting, measured)
    return Apart(np.array(setting.multiples), np.array(found["shares"], dtype=np.float64))


def path(rule: Rule[Any], gradient: Callable[[Tensor, int], Tensor], start: Tensor, steps: int) -> Tensor:
    """Return the weights after each step of a rule [steps, P].

    Args:
        rule: (w, g, state) → (w, state).
        gradient: the gradient as a function of the weights and the step, from 0.
        start: the initial weights [P].
        steps: the number of steps.

    >>> path(partial(sgd, lr=0.5), lambda w, k: w, torch.tensor([1.0]), 2)
    tensor([[0.5000],
            [0.2500]])
    """
    w, state, found = start, None, []
    for step in range(steps):
        w, state = rule(w, gradient(w, step), state)
        found.append(w)
    return torch.stack(found)


def _problem(lab: Lab, setting: Setting) -> tuple[nn.Module, Callable[[Tensor, int], Tensor]]:
    """The network, and the gradient of its loss on the batch of a step, with respect to all weights in one row."""
    split = split_of(lab, setting.source)
    # In double precision at every scale, so that equal trajectories stay equal.
    x, y = split.inputs(split.x_train).double(), split.y_train
    inputs = x[0].numel()
    model = models.make(setting.model, seed=setting.seed, inputs=inputs, biases=True, init="glorot_uniform").to(x)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    order = torch.Generator().manual_seed(setting.seed)
    batches = torch.randint(0, len(y), (setting.steps, setting.batch), generator=order).to(y.device)

    def loss(w: Tensor, some: Tensor) -> Tensor:
        parts = torch.split(w, [shape.numel() for shape in shapes.values()])
        weights = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return F.cross_entropy(functional_call(model, weights, (x[some],)), y[some])

    of = grad(loss)
    return model, lambda w, step: of(w, batches[step])


#: In double precision, two trajectories are equal below this share of the effect of L2, and differ above a hundredth.
ONE, TWO = 1e-9, 0.01
_KINDS = {"adam": "L2", "adamw": "decay"}


@dataclass(frozen=True)
class Plan:
    """The trainings of a scale: network, length, rates, λ of L2 and of decay, number of seeds, and number of further
    seeds for the best of both."""

    model: str
    schedule: Schedule
    rates: tuple[float, ...]
    l2: tuple[float, ...]
    decay: tuple[float, ...]
    seeds: int
    fresh: int
    steps: int
    multiples: tuple[float, ...]


_CUTS = (0.8, 0.9)
PLANS = {
    "smoke": Plan("mlp-3x64", Schedule(6, 32, _CUTS), (3e-3,), (1e-2, 1e-1), (1.0, 10.0), 1, 1, 20, (1.0, 10.0, 30.0)),
    "small": Plan(
        "mlp-3x128", Schedule(60, 32, _CUTS), (1e-3, 3e-3), (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), (0.1, 0.3, 1.0, 3.0, 10.0),
        5, 10, 100, tuple(float(10 ** (k / 4)) for k in range(-2, 11)),
    ),
    "full": Plan(
        "mlp-3x784", Schedule(100, 128, _CUTS), (3e-4, 1e-3, 3e-3), (1e-5, 1e-4, 1e-3, 1e-2),
        (1e-2, 3e-2, 0.1, 0.3, 1.0), 5, 10, 300, tuple(float(10 ** (k / 4)) for k in range(-2, 11)),
    ),
}  # fmt: skip


def task_of(lab: Lab) -> Task:
    """The task: a perceptron without normalization, because with it L2 would not constrain the function."""
    [task] = lab.tasks(("mnist-mlp",))
    plan, options = PLANS[lab.scale], dict(task.options)
    kept = tuple((name, options[name]) for name in ("biases", "init", "inputs"))
    return replace(task, model=plan.model, options=kept, schedule=plan.schedule)


def trials(lab: Lab) -> list[Trial]:
    """Return Adam with neither, with L2 and with decay, at every rate, from every seed.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [trial.recipe.name for trial in trials(Lab(Archive("runs")))]
    ['Adam 0.003', 'L2 0.01 at 0.003', 'L2 0.1 at 0.003', 'decay 1 at 0.003', 'decay 10 at 0.003']
    """
    plan, task = PLANS[lab.scale], task_of(lab)
    recipes = [
        recipe for rate in plan.rates for recipe in (
            Recipe(f"Adam {rate:g}", rate=rate, optimizer="adam"),
            *(Recipe(f"L2 {one:g} at {rate:g}", rate, "adam", weight_decay=one) for one in plan.l2),
            *(Recipe(f"decay {one:g} at {rate:g}", rate, "adamw", weight_decay=one) for one in plan.decay),
        )
    ]  # fmt: skip
    return [Trial(task, recipe, seed) for recipe in recipes for seed in range(plan.seeds)]


def conclude(lab: Lab) -> Report:
    """Report distances of trajectories, and test accuracies over the grids."""
    plan, found = PLANS[lab.scale], cells(lab, trials(lab))
    source = task_of(lab).source
    paths = {
        rule: apart(lab, Setting(rule, multiples=plan.multiples, steps=plan.steps, source=source)) for rule in RULES
    }
    plain = max((cell for cell in found if not cell.recipe.weight_decay), key=lambda cell: cell.test)
    chosen = [again(lab, cell) for cell in (best(found, "adam"), best(found, "adamw"), plain)]
    return Report(
        {"figure": _figure(paths, found)},
        (
            _trajectories(paths),
            _accuracies(f"Adam: accuracy over the grid ({found[0].task.model} on {source.name})", found),
            _accuracies("The best of each grid from other seeds", chosen),
        ),
        (*_paths_verdicts(paths), _better(*chosen)),
        {
            "trajectories": {
                name: {"multiples": its.multiples.tolist(), "end": its.shares[:, -1].tolist(),
                       "closest": its.shares[its.closest].tolist()} for name, its in paths.items()
            },
            "accuracies": [_numbers(cell) for cell in found],
            "again": [_numbers(cell) for cell in chosen],
        },
    )  # fmt: skip


def _trajectories(paths: dict[str, Apart]) -> Table:
    rows = [
        (rule, f"{_at_one(its):.3g}", float(its.multiples[its.closest]), f"{its.shares[its.closest, -1]:.3g}")
        for rule, its in paths.items()
    ]
    columns = ("rule", "distance at λ' = λ", "closest λ'/λ", "distance there")
    return Table("Distance of decay from L2 after the last step, as a share of the effect of L2", columns, tuple(rows))


def _at_one(its: Apart) -> float:
    """Return their distance at the end with the same λ."""
    return float(its.shares[int(np.argmin(np.abs(np.log(its.multiples)))), -1])


def _accuracies(title: str, found: list[Cell]) -> Table:
    rows = [
        (cell.recipe.rate, _KINDS[cell.recipe.optimizer] if cell.recipe.weight_decay else "neither",
         cell.recipe.weight_decay or None, cell.test, cell.spread, cell.train)
        for cell in found
    ]  # fmt: skip
    return Table(title, ("rate", "with", "λ", "test %", "± over seeds", "train %"), tuple(rows))


def _paths_verdicts(paths: dict[str, Apart]) -> list[Verdict]:
    same = float(paths["SGD"].shares[int(np.argmin(np.abs(np.log(paths["SGD"].multiples))))].max())
    found = [
        Verdict(
            "for gradient descent, weight decay equals an L2 penalty",
            "equal (equation 22)",
            f"at most {same:.1g} of the effect of L2 apart over {paths['SGD'].shares.shape[1]} steps",
            same < ONE,
        )
    ]
    for rule, its in paths.items():
        if rule != "SGD":
            least, where = float(its.shares[:, -1].min()), its.multiples[its.closest]
            found.append(
                Verdict(
                    f"for {rule}, weight decay differs from an L2 penalty of any strength",
                    "only in the context of gradient descent",
                    f"{100 * least:.0f} % of the effect of L2 apart at the closest λ' ({where:.3g} λ)",
                    least > TWO,
                )
            )
    return found


def best(found: list[Cell], kind: str) -> Cell:
    """The rate and λ of the highest test accuracy, with "adam" (L2) or "adamw" (decay); λ = 0 is excluded."""
    return max((c for c in found if c.recipe.optimizer == kind and c.recipe.weight_decay), key=lambda cell: cell.test)


def again(lab: Lab, chosen: Cell) -> Cell:
    """Train a chosen recipe from seeds that had no part in the choice."""
    plan = PLANS[lab.scale]
    seeds = range(plan.seeds, plan.seeds + plan.fresh)
    return Cell(chosen.task, chosen.recipe, tuple(lab.run([Trial(chosen.task, chosen.recipe, seed) for seed in seeds])))


def _better(l2: Cell, decay: Cell, without: Cell) -> Verdict:
    better = gain(*([100 * result.test_accuracy for result in cell.results] for cell in (decay, l2)))
    seeds = len(decay.results)
    return Verdict(
        "with Adam, decay can work significantly better than L2",
        "significantly better",
        f"{decay.test:.2f} % ({decay.recipe.name}) against {l2.test:.2f} % ({l2.recipe.name}): {better.told} points, "
        f"{seeds} {'seed' if seeds == 1 else 'seeds'}; {without.test:.2f} % with neither",
        better.above,
    )


def _numbers(cell: Cell) -> dict[str, Any]:
    tests = [100 * result.test_accuracy for result in cell.results]
    its = {"rate": cell.recipe.rate, "optimizer": cell.recipe.optimizer, "weight_decay": cell.recipe.weight_decay}
    return {**its, "test": tests, "train": cell.train, "loss": float(cell.loss[-1])}


def _figure(paths: dict[str, Apart], found: list[Cell]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for place, (rule, its) in enumerate(paths.items()):
        steps = np.arange(1, its.shares.shape[1] + 1)
        # Exact zeros have no logarithm.
        left.plot(steps, np.maximum(its.shares[its.closest], 1e-17), color=f"C{place}", label=rule)
        middle.plot(its.multiples, np.maximum(its.shares[:, -1], 1e-17), "o-", markersize=3, color=f"C{place}")
    for ax in (left, middle):
        ax.axhline(1.0, color="0.7", linewidth=0.8, linestyle=":")
        ax.set_yscale("log")
        ax.set_ylabel("distance from L2 / effect of L2", fontsize=9)
    left.set_xlabel("step", fontsize=9)
    left.set_title("Distance of decay from L2, at the closest λ'", fontsize=10)
    left.legend(fontsize=8, frameon=False)
    middle.set_xscale("log")
    middle.set_xlabel("λ' of decay / λ of L2", fontsize=9)
    # The range of SGD's line would leave no room for the others.
    middle.set_ylim(bottom=3e-3)
    middle.set_title(f"At the last step; SGD at λ' = λ: {_at_one(paths['SGD']):.0e}", fontsize=10)
    _draw_accuracies(right, found)
    for ax in (left, middle, right):
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_accuracies(ax: Axes, found: list[Cell]) -> None:
    for style, rate in zip(("-", "--", ":"), sorted({cell.recipe.rate for cell in found}), strict=False):
        for kind, color in (("adam", "C3"), ("adamw", "C2")):
            its = [c for c in found if (c.recipe.optimizer, c.recipe.rate) == (kind, rate) and c.recipe.weight_decay]
            spread = [c.spread or 0.0 for c in its]
            ax.errorbar(
                [c.recipe.weight_decay for c in its], [c.test for c in its], yerr=spread, fmt=f"o{style}", capsize=2,
                markersize=3, color=color, label=f"{_KINDS[kind]}, rate {rate:g}",
            )  # fmt: skip
        [none] = [c for c in found if c.recipe.rate == rate and not c.recipe.weight_decay]
        ax.axhline(none.test, color="0.6", linestyle=style, linewidth=1, label=f"neither, rate {rate:g}")
    ax.set_xscale("log")
    ax.set_xlabel("λ", fontsize=9)
    ax.set_ylabel("test accuracy (%)", fontsize=9)
    ax.set_title(f"Adam: {found[0].task.model} on {found[0].task.source.name}", fontsize=10)
    ax.legend(fontsize=7, frameon=False)


STUDIES = (
    Study("dynamics/adamw-vs-l2", "Weight decay and L2: one for gradient descent, two for Adam", trials, conclude),
)
