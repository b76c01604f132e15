"""True, empirical and batch Fisher matrices as preconditioners (section 2.1 of Grosse's chapter, an open question).

    F           = E_x E_{t ~ r(·|x)} [Dw Dwᵀ]         gradients of single examples, labels drawn from the model     (1)
    F_emp       = E_{x,t} [∇J_{x,t} ∇J_{x,t}ᵀ]        gradients of single examples, labels of the data              (2)
    F_emp^batch = E_B [∇J_B ∇J_Bᵀ]                    gradients of batches, as in RMSprop and Adam                  (4)

The chapter's "per-example" matrices are the first two: they average the squares of the gradients of single examples,
whereas adaptive methods square the average of a batch. F approximates the Hessian; F_emp need not, and its version of
batches resembles F less. The chapter says that the effects of these choices on training seem not to have been measured.

Here they are. All three are running averages of the same decay, and precondition the same gradients:

    w ← w − η (d + λ)^(−p) ∇J        d the diagonal of a matrix; p = 1/2 as in RMSprop, p = 1 as in equation 3
    K-FAC                            F or F_emp with Kronecker factors in place of a diagonal, and p = 1

Each method has its best learning rate η and damping λ of a grid, which goes on, up to six times, while the best is at
its edge. Losses are those of the whole training set, over the same number of steps from the same weights. There are two
measures, and the best rate and damping of each: the last loss, and the geometric mean of those after every epoch. They
differ. The empirical matrices vanish with the gradients of a training set that is nearly learned, so that steps get
longer and a last loss very low; the mean also tells how soon a training set is learned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, inf, log
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import Optimizer

from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.at_hand import pixels
from gyroscope_lab.papers.chance import gain
from gyroscope_lab.papers.dynamics.measurements import followed, kept, mean_curve, training_of
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, no_trials
from gyroscope_lab.training.recipe import Recipe, register
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Matrix = Literal["true", "empirical", "batch"]
Form = Literal["diagonal, -1/2", "diagonal, -1", "K-FAC"]
_NAMES: dict[Matrix, str] = {"true": "F", "empirical": "F_emp", "batch": "F_emp of batches"}
_COLORS: dict[Matrix, str] = {"true": "C0", "empirical": "C1", "batch": "C2"}
_POWERS: dict[Form, float] = {"diagonal, -1/2": 0.5, "diagonal, -1": 1.0}
#: The methods: matrices by form. There is no Kronecker factorization of the gradients of batches.
METHODS: dict[Form, tuple[Matrix, ...]] = {
    "diagonal, -1/2": ("true", "empirical", "batch"),
    "diagonal, -1": ("true", "empirical", "batch"),
    "K-FAC": ("true", "empirical"),
}
# The decay of all averages.
_DECAY = 0.95
Measure = Literal["last", "mean"]
MEASURES: dict[Measure, str] = {"last": "last loss", "mean": "mean loss"}
# How often a grid goes on past its edge; rates lie a factor of √10 apart, dampings one of 100.
_FURTHER = 6
# The least loss that is told from 0.
_LEAST = 1e-30


class FisherDiagonal(Optimizer):
    """w ← w − η (d + λ)^(−p) ∇J for a perceptron, with d a running average of squared gradients.

    The t-th measurement has the weight max(1/t, 1 − decay) in the average. With the matrix "true" the labels of each
    example are drawn once per step.

    Args:
        model: a perceptron, all of whose parameters are those of linear layers; its loss is the mean cross-entropy.
        rate: η.
        matrix: whose gradients are squared.
        power: p.
        damping: λ.
        seed: the seed of the labels that are drawn.
    """

    def __init__(
        self, model: nn.Module, *, rate: float, matrix: Matrix, power: float, damping: float, seed: int = 0
    ) -> None:
        super().__init__(model.parameters(), {"lr": rate})
        self.model, self.matrix, self.power, self.damping = model, matrix, power, damping
        self.diagonal: dict[Tensor, Tensor] = {}
        self._steps, self._draw = 0, torch.Generator().manual_seed(seed)
        self._x: Tensor | None = None
        self._gradient: Tensor | None = None
        model.register_forward_hook(self._see)

    def _see(self, _: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad and output.grad_fn is not None and self.matrix != "batch" and self.model.training:
            self._x = args[0].detach()
            output.register_hook(self._keep)  # type: ignore[no-untyped-call]

    def _keep(self, gradient: Tensor) -> None:
        self._gradient = gradient.detach()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Measure the diagonal on the batch of this step, average it, and take the step."""
        self._steps += 1
        weight = max(1 / self._steps, 1 - _DECAY)
        new = self._squares()
        for group in self.param_groups:
            for parameter in group["params"]:
                d = self.diagonal.setdefault(parameter, torch.zeros_like(parameter))
                d.lerp_(new[parameter], weight)
                parameter.sub_(group["lr"] * parameter.grad / (d + self.damping) ** self.power)

    def _squares(self) -> dict[Tensor, Tensor]:
        if self.matrix == "batch":
            return {one: one.grad.square() for group in self.param_groups for one in group["params"]}
        assert self._x is not None
        assert self._gradient is not None
        # The loss is a mean over the batch.
        given = self._gradient * len(self._x) if self.matrix == "empirical" else None
        return squared_gradients(self.model, self._x, given, generator=self._draw)


def squared_gradients(
    model: nn.Module, x: Tensor, given: Tensor | None, *, generator: torch.Generator | None = None
) -> dict[Tensor, Tensor]:
    """Return the mean over examples of the squared gradient of each parameter of linear layers.

    A layer h = Wx + b has the gradient g xᵀ for an example with g = ∂ℓ/∂h, so that the mean is E[g² (x²)ᵀ].

    Args:
        model: the model; it must treat examples independently.
        x: the examples.
        given: the gradient of each example's loss at the outputs; None for that of labels drawn from the model.
        generator: draws them.

    >>> layer = nn.Linear(1, 1)
    >>> squared_gradients(layer, torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [2.0]]))[layer.weight].item()
    20.0
    """
    with _uses(model) as uses, torch.enable_grad():
        output = model(x)
        if given is None:
            p = output.detach().softmax(1)
            # By the inverse of the distribution function: `multinomial` raises where a training has diverged.
            drawn = torch.rand(len(p), 1, generator=generator).to(p)
            labels = (p.cumsum(1) < drawn).sum(1).clamp(max=p.shape[1] - 1)
            given = p - F.one_hot(labels, p.shape[1])
        gradients = torch.autograd.grad(output, [h for _, _, h in uses], grad_outputs=given)
    found = {}
    for (module, inputs, _), g in zip(uses, gradients, strict=True):
        squares = g.square()
        found[module.weight] = squares.T @ inputs.square() / len(x)
        if module.bias is not None:
            found[module.bias] = squares.mean(0)
    return found


@contextmanager
def _uses(model: nn.Module) -> Iterator[list[tuple[nn.Linear, Tensor, Tensor]]]:
    """The linear layers that are used within, with their inputs and outputs."""
    found: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def see(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        found.append((module, args[0].detach(), output))

    hooks = [one.register_forward_hook(see) for one in model.modules() if isinstance(one, nn.Linear)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _made(recipe: Recipe, model: nn.Module) -> Optimizer:
    return FisherDiagonal(model, rate=recipe.rate, **dict(recipe.options))


register("fisher-diagonal", _made)


@dataclass(frozen=True)
class Plan:
    """The trainings of a scale.

    Attributes:
        source: the data.
        model: the network.
        schedule: the epochs and the size of a batch.
        rates: the rates by form, 10^(k/2).
        dampings: the dampings, 10^j.
        seeds: the number of seeds.
        decompose_every: the number of steps between two decompositions of K-FAC's factors.
    """

    source: Source
    model: str
    schedule: Schedule
    rates: dict[Form, tuple[int, ...]]
    dampings: tuple[int, ...]
    seeds: int
    decompose_every: int = 1


_RATES: dict[Form, tuple[int, ...]] = {
    "diagonal, -1/2": (-5, -4, -3, -2, -1),
    "diagonal, -1": (-6, -5, -4, -3, -2),
    "K-FAC": (-4, -3, -2, -1, 0),
}
# Powers of ten.
_DAMPINGS = (-9, -7, -5, -3, -1)
PLANS = {
    "smoke": Plan(
        Source("digits"), "mlp-3x16", Schedule(epochs=4, batch=50, cuts=()),
        {"diagonal, -1/2": (-3,), "diagonal, -1": (-4,), "K-FAC": (-2,)}, (-3,), 1,
    ),
    "small": Plan(Source("digits"), "mlp-3x32", Schedule(epochs=15, batch=50, cuts=()), _RATES, _DAMPINGS, 10),
    "full": Plan(
        Source("mnist", per_class=1000), "mlp-3x128", Schedule(epochs=5, batch=128, cuts=(), drop_last=True), _RATES,
        _DAMPINGS, 3, decompose_every=10,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Everything that one training depends on."""

    source: Source
    model: str
    schedule: Schedule
    form: Form
    matrix: Matrix
    rate: float
    damping: float
    seed: int
    decompose_every: int = 1


def trained(lab: Lab, setting: Setting) -> dict[str, Any]:
    """Return the loss of the training set before the first and after every epoch, and the test accuracy."""

    def measure() -> dict[str, Any]:
        options = (*pixels(setting.source), ("biases", True), ("init", "he_normal"))
        task = Task("fisher", setting.source, setting.model, options, setting.schedule)
        its = training_of(lab, task, _recipe(setting), seed=setting.seed)

        def look() -> dict[str, Any]:
            with torch.no_grad():
                outputs = its.model(its.split.inputs(its.split.x_train))
                return {"whole": float(F.cross_entropy(outputs, its.split.y_train))}

        found = followed(its, look)
        return {"loss": found["whole"], "test": 100 * its.finish().test_accuracy}

    return kept(lab, "fisher", setting, measure)


def _recipe(setting: Setting) -> Recipe:
    options: dict[str, Any] = {"damping": setting.damping, "seed": setting.seed}
    if setting.form == "K-FAC":
        labels = "sampled" if setting.matrix == "true" else "true"
        options |= {"labels": labels, "decay": _DECAY, "decompose_every": setting.decompose_every}
    else:
        options |= {"matrix": setting.matrix, "power": _POWERS[setting.form]}
    optimizer = "kfac" if setting.form == "K-FAC" else "fisher-diagonal"
    return Recipe(setting.form, setting.rate, optimizer, options=tuple(options.items()))


@dataclass(frozen=True)
class Arm:
    """A method at a rate and a damping: the number of epochs, and the runs of all seeds."""

    form: Form
    matrix: Matrix
    rate: float
    damping: float
    epochs: int
    runs: list[dict[str, Any]]

    def logs(self, measure: Measure) -> list[float]:
        """ln of the last loss of the training set, or its mean over epochs, seed by seed; inf if it diverged."""
        kept = [[one for one in run["loss"][1:] if one is not None] for run in self.runs]
        logs = [[log(max(one, _LEAST)) for one in losses] for losses in kept]
        return [
            inf if len(its) < self.epochs else its[-1] if measure == "last" else float(np.mean(its)) for its in logs
        ]

    def loss(self, measure: Measure) -> float:
        """The geometric mean over seeds of a measure."""
        return exp(float(np.mean(self.logs(measure))))

    @property
    def curve(self) -> npt.NDArray[np.float64]:
        """The geometric mean over seeds of the loss of the training set, before the first and after every epoch."""
        logs = [[None if one is None else log(max(one, _LEAST)) for one in run["loss"]] for run in self.runs]
        return np.exp(mean_curve(logs, self.epochs + 1))


Key = tuple[Form, Matrix]


@dataclass(frozen=True)
class Grid:
    """All trainings of a method, by the exponents of their rate and damping."""

    arms: dict[tuple[int, int], Arm]

    def best(self, measure: Measure) -> tuple[int, int]:
        """Return the exponents of the best rate and damping."""
        return min(self.arms, key=lambda one: self.arms[one].loss(measure))

    def edges(self, measure: Measure) -> list[tuple[int, int]]:
        """Return the axis (0 for rates, 1 for dampings) and the side (±1) of each edge at which the best is."""
        best, found = self.best(measure), []
        for axis in (0, 1):
            values = [one[axis] for one in self.arms]
            if min(values) < max(values):
                found += [(axis, side) for side, end in ((-1, min(values)), (1, max(values))) if best[axis] == end]
        return found


def tuned(lab: Lab) -> dict[Key, Grid]:
    """Return the trainings of every method."""
    plan = PLANS[lab.scale]

    def at(form: Form, matrix: Matrix, k: int, j: int) -> Arm:
        rate, damping = 10 ** (k / 2), 10.0**j
        told = (plan.source, plan.model, plan.schedule, form, matrix, rate, damping)
        runs = [trained(lab, Setting(*told, seed, plan.decompose_every)) for seed in range(plan.seeds)]
        return Arm(form, matrix, rate, damping, plan.schedule.epochs, runs)

    def grid(form: Form, matrix: Matrix) -> Grid:
        exponents = [list(plan.rates[form]), list(plan.dampings)]
        found = Grid({})
        for _ in range(1 + _FURTHER):
            pairs = [(k, j) for k in exponents[0] for j in exponents[1] if (k, j) not in found.arms]
            found = Grid(found.arms | {pair: at(form, matrix, *pair) for pair in pairs})
            beyond = sorted({edge for measure in MEASURES for edge in found.edges(measure)})
            for axis, side in beyond:
                exponents[axis].append(side * (axis + 1) + (max if side > 0 else min)(exponents[axis]))
            if not beyond:
                break
        return found

    return {(form, matrix): grid(form, matrix) for form, several in METHODS.items() for matrix in several}


def report(found: dict[Key, Grid]) -> Report:
    """The figure, the tables and the verdicts."""
    best = {measure: {key: grid.arms[grid.best(measure)] for key, grid in found.items()} for measure in MEASURES}
    tables, numbers = [], []
    for measure, name in MEASURES.items():
        rows = []
        for (form, matrix), arm in best[measure].items():
            edges = ("rate", "damping")
            at = ", ".join(edges[axis] for axis, _ in found[form, matrix].edges(measure)) or "no"
            rows.append(
                (form, _NAMES[matrix], f"{arm.rate:.3g}", f"{arm.damping:g}", at, f"{arm.loss(measure):.3g}",
                 ", ".join(f"{exp(one):.3g}" for one in arm.logs(measure)),
                 float(np.mean([run["test"] for run in arm.runs])))
            )  # fmt: skip
            numbers.append({"measure": measure, "form": form, "matrix": matrix, "rate": arm.rate,
                            "damping": arm.damping, "runs": arm.runs})  # fmt: skip
        columns = ("preconditioner", "matrix", "best rate", "best damping", "at an edge of the grid", name, "by seed",
                   "test %")  # fmt: skip
        tables.append(Table(f"Each method at the rate and damping of its least {name}", columns, tuple(rows)))
    grids = [
        {"form": one.form, "matrix": one.matrix, "rate": one.rate, "damping": one.damping}
        | {measure: one.loss(measure) for measure in MEASURES}
        for grid in found.values()
        for one in grid.arms.values()
    ]
    return Report(
        {"figure": _figure(best)},
        tuple(tables),
        tuple(verdict for measure in MEASURES for verdict in _verdicts(best[measure], measure)),
        {"methods": numbers, "grids": grids},
    )


def _verdicts(best: dict[Key, Arm], measure: Measure) -> Iterator[Verdict]:
    for form in METHODS:
        yield _better(
            f"{form}: F trains further than F_emp", "profound differences; F is the better curvature",
            best[form, "true"], best[form, "empirical"], measure,
        )  # fmt: skip
    for form in _POWERS:
        yield _better(
            f"{form}: F_emp of single examples trains further than that of batches",
            "that of batches resembles F less", best[form, "empirical"], best[form, "batch"], measure,
        )  # fmt: skip
    half, whole = _POWERS
    squared: tuple[Matrix, ...] = ("empirical", "batch")
    for matrix in squared:
        yield _better(
            f"the power -1/2 of {_NAMES[matrix]} trains further than -1",
            "F_emp is nearly always used to the power -1/2", best[half, matrix], best[whole, matrix], measure,
        )  # fmt: skip


def _better(says: str, paper: str, one: Arm, other: Arm, measure: Measure) -> Verdict:
    says, logs = f"{says}, by the {MEASURES[measure]}", (one.logs(measure), other.logs(measure))
    if not np.isfinite(logs).all():
        return Verdict(says, paper, "a training diverges at every rate", None)
    ahead = gain(logs[1], logs[0])
    return Verdict(says, paper, f"{one.loss(measure):.3g} against {other.loss(measure):.3g}: {ahead.as_factor}",
                   ahead.above)  # fmt: skip


def _figure(best: dict[Measure, dict[Key, Arm]]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10.2, 5.8), layout="constrained")
    axes = figure.subplots(len(MEASURES), len(METHODS), sharex=True, sharey=True)
    for (measure, its), row in zip(best.items(), axes, strict=True):
        for form, ax in zip(METHODS, row, strict=True):
            for matrix in METHODS[form]:
                arm = its[form, matrix]
                label = f"{_NAMES[matrix]}: η = {arm.rate:.3g}, λ = {arm.damping:g}"
                for run in arm.runs:
                    losses = [np.nan if one is None else one for one in run["loss"]]
                    ax.semilogy(range(len(losses)), losses, color=_COLORS[matrix], linewidth=0.6, alpha=0.5)
                ax.semilogy(range(arm.epochs + 1), arm.curve, color=_COLORS[matrix], label=label)
            named = "K-FAC" if form == "K-FAC" else f"diagonal, power −{'1/2' if '/' in form else '1'}"
            ax.set_title(f"{named}, least {MEASURES[measure]}", fontsize=9)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.tick_params(labelsize=8)
            ax.legend(fontsize=7, loc="lower left")
            ax.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel("loss of the training set", fontsize=9)
    for ax in axes[-1]:
        ax.set_xlabel("epoch", fontsize=9)
    figure.suptitle("True, empirical and batch Fisher matrices as preconditioners", fontsize=11)
    return figure


def conclude(lab: Lab) -> Report:
    """Report the losses of all methods after the same number of steps."""
    return report(tuned(lab))


STUDIES = (
    Study("dynamics/fisher", "Section 2.1: true, empirical and batch Fisher matrices as preconditioners",
          no_trials, conclude, seeds={scale: plan.seeds for scale, plan in PLANS.items()}),
)  # fmt: skip
