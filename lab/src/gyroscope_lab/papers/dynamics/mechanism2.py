"""Weight decay and the damping of K-FAC (section 5.2, mechanism 2; Zhang et al. 2019).

With batch normalization the curvature of a layer is proportional to 1/‖w‖², while the damping η of a second-order step,
(G + ηI)⁻¹∇J (equation 26), is constant. At the unit vector it is η‖w‖², so growing weights turn K-FAC into gradient
descent, and weight decay keeps them from growing. If that is the effect of decay, keeping norms at their initial values
must work as well: it does not change the function of the network, and the effective damping stays constant.

K-FAC depends on the size of weights in no other way, so no effective learning rate is involved as in mechanism 1. But
the curvature also falls with the loss, and damping outweighs it for that reason too. Long steps make weights grow, so
the study has runs with steps of any length and runs with short steps. If norms stay low, steps are long enough to
magnify rounding, so the digits of these runs depend on the order of summation.

The law behind this: if only the direction of w matters, w → γw takes ∇J to ∇J/γ and G to G/γ², while η is constant, so
that

    (G(γw) + ηI)⁻¹ ∇J(γw)  =  γ (G(w) + γ²ηI)⁻¹ ∇J(w):

relative to the weights, the step at γw is that at w with the damping γ²η. Without damping the norm makes no difference.
G is the curvature of one layer: the Gauss-Newton matrix, or K-FAC's A ⊗ S, whose eigenvalues are the products of those
of A and of S. A does not change with γ, and S is proportional to 1/γ².
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)
from torch.optim import SGD, Optimizer

from gyroscope.control import KFAC
from gyroscope.layers import layers
from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.chance import gain, reproduced
from gyroscope_lab.papers.dynamics.measurements import followed, kept, mean_curve, training_of
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, no_trials
from gyroscope_lab.training.recipe import Recipe, register
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task

_COLORS = {"no decay": "C0", "decay": "C3", "norms held": "C2"}
# A cause accounts for an effect if this share of the effect disappears with it.
_HALF = 0.5
# A norm, a damping or an angle is larger than another from this factor on.
_MORE = 1.2
# Runs can be compared if their mean losses are within this factor.
_COMPARABLE = 2.0
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Arm:
    """A kind of run over seeds; curves are means over seeds and normalized layers.

    Attributes:
        kind: its name.
        tests: test accuracies in percent, seed by seed.
        loss: the loss of every epoch.
        grown: ‖w‖²/‖w₀‖² before the first and after every epoch, the geometric mean: the growth factor of the effective
            damping η‖w‖².
        damping: η as a multiple of the mean curvature of the layer after every epoch, the geometric mean.
        cosine: the cosine between steps and gradients in every epoch, 1 for gradient descent.
    """

    kind: str
    tests: list[float]
    loss: Floats
    grown: Floats
    damping: Floats
    cosine: Floats

    @classmethod
    def of(cls, kind: str, damping: float, runs: Sequence[dict[str, Any]]) -> Arm:
        """Return the arm of the runs of all seeds.

        >>> run = {"test": 90.0, "loss": [1.0], "squares": [[1.0], [4.0]], "curvature": [None, [0.5]],
        ...        "cosine": [None, 0.7]}
        >>> arm = Arm.of("decay", 0.1, [run])
        >>> arm.grown.tolist(), arm.damping.round(9).tolist(), arm.cosine.tolist()
        ([1.0, 4.0], [0.2], [0.7])
        """
        # Up to the last epoch that is known of all seeds: one that diverges has fewer.
        known = min(len(run["squares"]) for run in runs)
        squares = np.log([run["squares"][:known] for run in runs])
        curvature = np.log([run["curvature"][1:known] for run in runs])
        return cls(
            kind,
            [run["test"] for run in runs],
            mean_curve([run["loss"] for run in runs], max(len(run["loss"]) for run in runs)),
            np.asarray(np.exp((squares - squares[:, :1]).mean(axis=(0, 2)))),
            np.asarray(damping / np.exp(curvature.mean(axis=(0, 2)))),
            np.asarray(np.mean([run["cosine"][1:known] for run in runs], axis=0)),
        )

    @property
    def test(self) -> float:
        """The mean over seeds."""
        return float(np.mean(self.tests))

    def numbers(self) -> dict[str, Any]:
        """Return its numbers for JSON."""
        curves = {name: getattr(self, name).tolist() for name in ("loss", "grown", "damping", "cosine")}
        return {"kind": self.kind, "tests": self.tests, **curves}


def report(regimes: dict[str, list[Arm]]) -> Report:
    """The figure, the table and the verdicts of arms by the name of their regime."""
    columns = ("steps", "run", "test %", "last loss", "‖w‖² has grown by", "damping / mean curvature, first epoch",
               "last epoch", "cosine of steps and gradients, first epoch", "last epoch")  # fmt: skip
    rows = tuple(
        (name, arm.kind, arm.test, float(arm.loss[-1]), float(arm.grown[-1]), float(arm.damping[0]),
         float(arm.damping[-1]), float(arm.cosine[0]), float(arm.cosine[-1]))
        for name, arms in regimes.items() for arm in arms
    )  # fmt: skip
    return Report(
        {"figure": _figure(regimes)},
        (Table("K-FAC with batch normalization", columns, rows),),
        tuple(verdict for name, arms in regimes.items() for verdict in verdicts(name, arms)),
        {name: [arm.numbers() for arm in arms] for name, arms in regimes.items()},
    )


def verdicts(name: str, arms: Sequence[Arm]) -> tuple[Verdict, ...]:
    """Return the verdicts on the chapter's statements for one regime."""
    none, decay, held = (next(arm for arm in arms if arm.kind == kind) for kind in _COLORS)
    gains = gain(decay.tests, none.tests)
    alone = gain(held.tests, none.tests)
    # True if steps have come nearer to the gradient.
    turned = bool(_angle(none.cosine[0]) > _MORE * _angle(none.cosine[-1]))
    return (
        Verdict(
            f"{name}: without decay, weights and the effective damping η‖w‖² grow; with decay it stays lower",
            "the norm increases over training",
            f"it grows {none.grown[-1]:.2f}-fold without decay, {decay.grown[-1]:.2f}-fold with it",
            bool(none.grown[-1] > _MORE and none.grown[-1] > _MORE * decay.grown[-1]),
        ),
        Verdict(
            f"{name}: without decay, the damping comes to outweigh the curvature",
            "comes to dominate the preconditioner",
            f"damping / mean curvature is {none.damping[-1]:.3g} at the end ({none.damping[0]:.3g} after one epoch), "
            f"with decay {decay.damping[-1]:.3g}, with constant norms {held.damping[-1]:.3g}",
            # Above the curvature at the end, by more than at first and by more than with decay.
            bool(none.damping[-1] > max(1.0, _MORE * none.damping[0], _MORE * decay.damping[-1])),
        ),
        Verdict(
            f"{name}: without decay, K-FAC behaves increasingly like a first-order method, and with decay less so",
            "retains its second-order behavior",
            f"the cosine of steps and gradients goes from {none.cosine[0]:.3f} to {none.cosine[-1]:.3f} without decay, "
            f"to {decay.cosine[-1]:.3f} with it, to {held.cosine[-1]:.3f} with constant norms; the angles are then "
            f"{_angle(none.cosine[-1]):.0f}°, {_angle(decay.cosine[-1]):.0f}° and {_angle(held.cosine[-1]):.0f}°",
            turned and bool(_angle(decay.cosine[-1]) > _MORE * _angle(none.cosine[-1])),
        ),
        Verdict(
            f"{name}: the norm is the cause: with constant norms, K-FAC stays a second-order method without decay",
            "due to the growing weight norm",
            f"the cosine changes by {_rise(held):+.3f} with constant norms, by {_rise(none):+.3f} without decay; mean "
            f"losses are {held.loss.mean():.2g} and {none.loss.mean():.2g}",
            # If the curvature has not fallen because the loss has not, it says nothing about norms.
            _rise(held) < _HALF * _rise(none) if turned and _as_low(held, none) else None,
        ),
        Verdict(
            f"{name}: weight decay raises test accuracy under K-FAC",
            "improves generalization",
            f"{gains.told} points",
            gains.above,
        ),
        Verdict(
            f"{name}: the gain comes from the damping: constant norms without decay gain as much",
            "the explanation of mechanism 2",
            f"{alone.told} of {gains.told} points",
            reproduced(*(np.subtract(arm.tests, none.tests) for arm in (decay, held)), share=_HALF),
        ),
    )


def _as_low(these: Arm, those: Arm) -> bool:
    """Return whether the mean loss of these is comparable to that of those."""
    return float(these.loss.mean()) < _COMPARABLE * float(those.loss.mean())


def _rise(arm: Arm) -> float:
    """The change of the cosine between steps and gradients."""
    return float(arm.cosine[-1] - arm.cosine[0])


def _angle(cosine: float) -> float:
    """Return the angle of a cosine in degrees.

    >>> round(_angle(0.5), 9)
    60.0
    """
    return float(np.degrees(np.arccos(cosine)))


def _figure(regimes: dict[str, list[Arm]]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 0.5 + 1.9 * len(regimes)), layout="constrained")
    panels = {
        "grown": (r"$\|w\|^2/\|w_0\|^2$", "effective damping"),
        "damping": (r"$\eta$ / mean of $\lambda(A \otimes S)$", "damping and curvature"),
        "cosine": ("cosine with gradient", "1: gradient descent"),
        "loss": ("training loss", "training"),
    }
    for row, (regime, arms) in zip(figure.subplots(len(regimes), 4, squeeze=False), regimes.items(), strict=True):
        for ax, (name, (label, title)) in zip(row, panels.items(), strict=True):
            for arm in arms:
                values = getattr(arm, name)
                epochs = np.arange(len(values)) + (0 if name == "grown" else 1)
                ax.plot(epochs, values, color=_COLORS[arm.kind], linewidth=1.4, label=arm.kind)
            if name in ("damping", "loss"):
                ax.set_yscale("log")
            ax.tick_params(labelsize=7)
            ax.set_xlabel("epoch", fontsize=8)
            ax.set_ylabel(label, fontsize=8)
            ax.set_title(f"{regime}:\n{title}" if name == "grown" else title, fontsize=8.5)
            ax.spines[["top", "right"]].set_visible(False)
    handles, told = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, told, loc="outside lower center", ncols=len(told), fontsize=8, frameon=False)
    figure.suptitle("K-FAC with batch normalization: damping, with and without weight decay")
    return figure


Kind = Literal["no decay", "decay", "norms held"]
KINDS: tuple[Kind, ...] = ("no decay", "decay", "norms held")


@dataclass(frozen=True)
class Regime:
    """A regime of step lengths.

    Attributes:
        name: a description.
        rate: the learning rate.
        decay: λ of the runs with decay.
        clip: the largest divergence of a step, as in `KFAC`; longer steps are shortened.
    """

    name: str
    rate: float
    decay: float
    clip: float | None = None


@dataclass(frozen=True)
class Plan:
    """The trainings of a scale.

    Attributes:
        source, model, options, schedule, augmentation: the task; all layers except the last are normalized.
        regimes: the regimes of step lengths.
        damping: η.
        every, decompose_every: steps between two measurements of the factors, and between two decompositions.
        seeds: the seeds of the weights and of the order of examples.
    """

    source: Source
    model: str
    options: tuple[tuple[str, Any], ...]
    schedule: Schedule
    augmentation: Augmentation | None
    regimes: tuple[Regime, ...]
    damping: float
    every: int
    decompose_every: int
    seeds: int


_MLP = (("batch_norm", True), ("inputs", 64), ("init", "glorot_uniform"))
PLANS = {
    "smoke": Plan(
        Source("digits"), "mlp-3x16", _MLP, Schedule(epochs=10, batch=50, cuts=()), None,
        (Regime("steps of any length", 0.1, 0.3),), 1e-2, 1, 5, 1,
    ),
    "small": Plan(
        Source("digits"), "mlp-4x48", _MLP, Schedule(epochs=60, batch=50, cuts=(0.8,), factor=10.0), None,
        (Regime("steps of any length", 0.1, 0.3), Regime("short steps", 0.3, 0.01, clip=1e-2)), 1e-2, 1, 5, 10,
    ),
    # The authors' schedule, damping and intervals; their rates and decays for K-FAC are not known.
    "full": Plan(
        Source("cifar-10", normalization="channel"), "c10-cnn2", (),
        Schedule(epochs=100, batch=128, cuts=(0.41, 0.82), factor=10.0), Augmentation(),
        (Regime("steps of any length", 0.01, 0.1), Regime("short steps", 0.01, 0.1, clip=1e-3)), 1e-3, 10, 100, 1,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Everything that one training depends on."""

    plan: Plan
    regime: Regime
    kind: Kind
    seed: int


def trained(lab: Lab, setting: Setting) -> dict[str, Any]:
    """Loss and test accuracy; and over epochs, the damping of normalized layers and its effect."""
    return kept(lab, "wd-mechanism-2", setting, lambda: _run(lab, setting))


class Steps:
    """Hooks that measure the cosine of damped steps with the gradient, and keep norms constant if `holds`.

    A cosine of 1 is gradient descent, (G + ηI)⁻¹ ≈ I/η.

    Args:
        optimizer: the optimizer, whose steps are damped.
        weights: the weights of the measured layers.
        holds: True to restore their initial norms after every step.
        decay: the weight decay of the optimizer, which is not part of the direction.
    """

    def __init__(self, optimizer: Optimizer, weights: list[nn.Parameter], *, holds: bool, decay: float) -> None:
        self._optimizer, self._weights, self._holds, self._decay = optimizer, weights, holds, decay
        self.start = [float(weight.detach().norm()) for weight in weights]
        self._before: list[tuple[Tensor, Tensor]] = []
        self._cosines: list[Tensor] = []

    def before(self, *_: Any) -> None:
        """Record weights and gradients; a hook before the step."""
        grads = [weight.grad for weight in self._weights]
        self._before = [
            (w.detach().clone(), g.clone()) for w, g in zip(self._weights, grads, strict=True) if g is not None
        ]

    @torch.no_grad()
    def after(self, *_: Any) -> None:
        """Record the cosine, and restore norms; a hook after the step."""
        rate, cosines = self._optimizer.param_groups[0]["lr"], []
        for weight, (was, gradient), norm in zip(self._weights, self._before, self.start, strict=True):
            direction = (was - weight) / rate - self._decay * was
            cosines.append(F.cosine_similarity(direction.flatten(), gradient.flatten(), dim=0))
            if self._holds:
                weight.mul_(norm / weight.norm())
        self._cosines.append(torch.stack(cosines).mean())

    def cosine(self) -> float | None:
        """The mean over layers and over the steps since the last call."""
        seen, self._cosines = self._cosines, []
        return float(torch.stack(seen).mean()) if seen else None


def _run(lab: Lab, setting: Setting) -> dict[str, Any]:
    plan, regime = setting.plan, setting.regime
    decay = regime.decay if setting.kind == "decay" else 0.0
    told = {"damping": plan.damping, "tikhonov": "exact", "every": plan.every, "decompose_every": plan.decompose_every,
            "clip": regime.clip, "seed": setting.seed}  # fmt: skip
    recipe = Recipe(
        setting.kind, regime.rate, "kfac-normalized", weight_decay=decay, options=tuple(told.items())
    )  # fmt: skip
    task = Task("wd-mechanism-2", plan.source, plan.model, plan.options, plan.schedule, plan.augmentation)
    its = training_of(lab, task, recipe, seed=setting.seed)
    optimizer, weights = its.optimizer, _normalized(its.model)
    steps = Steps(optimizer, weights, holds=setting.kind == "norms held", decay=decay)

    def look() -> dict[str, Any]:
        squares = [float(weight.detach().norm()) ** 2 for weight in weights]
        state = optimizer.state_dict()["state"]
        return {
            "squares": squares,
            "curvature": [_mean_curvature(state[i]) for i in range(len(weights))] if state else None,
            "cosine": steps.cosine(),
        }

    optimizer.register_step_pre_hook(steps.before)
    optimizer.register_step_post_hook(steps.after)
    found = followed(its, look)
    return {**found, "test": 100 * its.finish().test_accuracy}


def _normalized(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of all layers except the last, which no normalization follows."""
    return [layer.parameter for layer in layers(model)][:-1]


def _kfac_normalized(recipe: Recipe, model: nn.Module) -> Optimizer:
    """K-FAC around SGD that decays normalized layers only: the size of the last layer matters to the function."""
    weights = _normalized(model)
    mine = {id(weight) for weight in weights}
    others = [p for p in model.parameters() if id(p) not in mine]
    groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": recipe.weight_decay}, {"params": others}]
    return KFAC(SGD(groups, lr=recipe.rate), model, F.cross_entropy, **dict(recipe.options))


register("kfac-normalized", _kfac_normalized)


def _mean_curvature(state: dict[str, Any]) -> float:
    """The mean eigenvalue of A ⊗ S, (tr A / dim A)(tr S / dim S)."""
    A, S = state["kfac_A"], state["kfac_S"]
    return float(A.diagonal().mean() * S.diagonal().mean())


def arms(lab: Lab, regime: Regime) -> list[Arm]:
    """Every kind of run."""
    plan = PLANS[lab.scale]
    return [
        Arm.of(kind, plan.damping, [trained(lab, Setting(plan, regime, kind, seed)) for seed in range(plan.seeds)])
        for kind in KINDS
    ]


def conclude(lab: Lab) -> Report:
    """Report the effective damping and its effects."""
    return report({regime.name: arms(lab, regime) for regime in PLANS[lab.scale].regimes})


STUDIES = (
    Study("dynamics/wd-mechanism-2", "Section 5.2: weight decay, and the damping of K-FAC", no_trials, conclude,
          seeds={scale: plan.seeds for scale, plan in PLANS.items()}),
)  # fmt: skip
