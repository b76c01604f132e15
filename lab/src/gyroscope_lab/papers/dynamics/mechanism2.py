"""Weight decay and the damping of K-FAC (section 5.2, mechanism 2; Zhang et al. 2019).

With batch normalization the curvature of a layer goes as 1/‖w‖² while the damping η of a second-order step,
(G + ηI)⁻¹∇J (equation 26), stays: at the unit vector it is η‖w‖², and growing weights make K-FAC gradient descent.
Weight decay keeps them from growing. If that is what it does, holding norms where they started must do as well: it
changes nothing that the network computes, and the effective damping stays what it was.

K-FAC does not see the size of weights otherwise, so no effective learning rate is in play as in mechanism 1. But the
curvature falls with the loss too, and damping outweighs it for that reason as well. Weights grow by long steps; so
runs are made with steps of any length and, beside them, with short ones. Where norms stay low, steps are long enough to
magnify rounding: these runs come out differently, digit by digit, wherever sums are taken in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)
from torch.optim import SGD

from gyroscope.control import KFAC
from gyroscope.layers import layers
from gyroscope_lab import models
from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.dynamics.loop import accuracy, device_of, dtype_of, kept, split_of, train
from gyroscope_lab.papers.dynamics.mechanism2_report import Arm, report
from gyroscope_lab.papers.study import Report, Study
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.trial import Trial

Kind = Literal["no decay", "decay", "norms held"]
KINDS: tuple[Kind, ...] = ("no decay", "decay", "norms held")


@dataclass(frozen=True)
class Regime:
    """How long steps are.

    Attributes:
        name: in words.
        rate: the learning rate.
        decay: λ of the runs with decay.
        clip: the most of a step's divergence, as of `KFAC`; longer ones are shortened.
    """

    name: str
    rate: float
    decay: float
    clip: float | None = None


@dataclass(frozen=True)
class Plan:
    """What a scale trains.

    Attributes:
        source, model, options, schedule, augmentation: the task; all layers but the last are normalized.
        regimes: how long steps are.
        damping: η.
        every, decompose_every: steps between two measurements of the factors, and between two decompositions.
        seeds: of the weights and the order of examples.
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
        (Regime("steps of any length", 0.1, 0.3), Regime("short steps", 0.3, 0.01, clip=1e-2)), 1e-2, 1, 5, 4,
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
    """All that one training depends on."""

    plan: Plan
    regime: Regime
    kind: Kind
    seed: int


def trained(lab: Lab, setting: Setting) -> dict[str, Any]:
    """Loss and test accuracy; and over epochs, of normalized layers, what damping there was and what came of it."""
    return kept(lab, "wd-mechanism-2", setting, lambda: _run(lab, setting))


class Steps:
    """The cosine of a damped step with the gradient, layer by layer; and what holds norms, where these are held.

    1 is gradient descent, (G + ηI)⁻¹ ≈ I/η.

    Args:
        optimizer: K-FAC around SGD.
        weights: of the layers that are looked at.
        holds: whether to bring them back to the norms they start with after every step.
        decay: that of the optimizer, which is no part of the direction.
    """

    def __init__(self, optimizer: KFAC, weights: list[nn.Parameter], *, holds: bool, decay: float) -> None:
        self._optimizer, self._weights, self._holds, self._decay = optimizer, weights, holds, decay
        self.start = [float(weight.detach().norm()) for weight in weights]
        self._before: list[tuple[Tensor, Tensor]] = []
        self._cosines: list[Tensor] = []

    def before(self, step: int) -> None:
        """The step is about to be taken."""
        grads = [weight.grad for weight in self._weights]
        self._before = [
            (w.detach().clone(), g.clone()) for w, g in zip(self._weights, grads, strict=True) if g is not None
        ]

    @torch.no_grad()
    def after(self, step: int) -> None:
        """It was taken."""
        rate, cosines = self._optimizer.param_groups[0]["lr"], []
        for weight, (was, gradient), norm in zip(self._weights, self._before, self.start, strict=True):
            direction = (was - weight) / rate - self._decay * was
            cosines.append(F.cosine_similarity(direction.flatten(), gradient.flatten(), dim=0))
            if self._holds:
                weight.mul_(norm / weight.norm())
        self._cosines.append(torch.stack(cosines).mean())

    def cosine(self) -> float | None:
        """The mean over layers and the steps since the last time."""
        seen, self._cosines = self._cosines, []
        return float(torch.stack(seen).mean()) if seen else None


def _run(lab: Lab, setting: Setting) -> dict[str, Any]:
    plan, regime, split = setting.plan, setting.regime, split_of(lab, setting.plan.source)
    model = models.make(plan.model, seed=setting.seed, **dict(plan.options)).to(device_of(lab), dtype_of(lab))
    decay = regime.decay if setting.kind == "decay" else 0.0
    its = [layer.parameter for layer in layers(model)][:-1]
    mine = {id(weight) for weight in its}
    others = [p for p in model.parameters() if id(p) not in mine]
    # The last layer is not decayed: its size matters, and would be another reason for a difference.
    groups: list[dict[str, Any]] = [{"params": its, "weight_decay": decay}, {"params": others}]
    inner = SGD(groups, lr=regime.rate)
    optimizer = KFAC(
        inner, model, F.cross_entropy, damping=plan.damping, tikhonov="exact", every=plan.every,
        decompose_every=plan.decompose_every, clip=regime.clip, seed=setting.seed,
    )  # fmt: skip
    steps = Steps(optimizer, its, holds=setting.kind == "norms held", decay=decay)

    def look() -> dict[str, Any]:
        squares = [float(weight.detach().norm()) ** 2 for weight in its]
        state = optimizer.state_dict()["state"]
        return {
            "squares": squares,
            "curvature": [_mean_curvature(state[i]) for i in range(len(its))] if state else None,
            "cosine": steps.cosine(),
        }

    found = train(
        model, optimizer, split, plan.schedule, seed=setting.seed, augmentation=plan.augmentation, look=look,
        before=steps.before, after=steps.after,
    )  # fmt: skip
    return {**found, "test": accuracy(model, split)}


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


def trials(lab: Lab) -> list[Trial]:
    """None of the laboratory's own: K-FAC has no recipe."""
    return []


def conclude(lab: Lab) -> Report:
    """Effective damping and what came of it."""
    return report({regime.name: arms(lab, regime) for regime in PLANS[lab.scale].regimes})


STUDIES = (Study("dynamics/wd-mechanism-2", "Section 5.2: weight decay, and the damping of K-FAC", trials, conclude),)
