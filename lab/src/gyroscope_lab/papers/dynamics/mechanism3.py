"""Weight decay under K-FAC as a penalty on the input-output Jacobian (section 5.3, mechanism 3; Zhang et al. 2019).

Without normalization, weight decay beside a preconditioner C⁻¹ is a penalty on wᵀCw (equation 27). For the Gauss-Newton
matrix of a network of L layers with ReLUs and without biases that is L² E‖z‖², z = J_zx x its outputs; and so, where
inputs are spread evenly, the Frobenius norm of its input-output Jacobian. Networks are trained by K-FAC with ever more
decay, their Jacobian is measured, and set beside the test accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)
from torch.optim import SGD

from gyroscope.control import KFAC
from gyroscope.theory import estimated_jacobian_norm, gauss_newton_norm
from gyroscope_lab import models
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.dynamics.loop import accuracy, device_of, dtype_of, kept, split_of, train
from gyroscope_lab.papers.dynamics.mechanism3_report import Level, report
from gyroscope_lab.papers.study import Report, Study
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.trial import Trial


@dataclass(frozen=True)
class Plan:
    """What a scale trains.

    Attributes:
        source, model, options, depth, schedule: the task: a network without normalization and biases, of `depth`
            layers.
        rate, damping, clip: of K-FAC.
        decays: λ, one run each.
        examples: how many test examples the Jacobian is measured on.
        seeds: of the weights and the order of examples.
    """

    source: Source
    model: str
    options: tuple[tuple[str, Any], ...]
    depth: int
    schedule: Schedule
    rate: float
    damping: float
    clip: float
    decays: tuple[float, ...]
    examples: int
    seeds: int


_MLP = (("inputs", 64), ("init", "glorot_uniform"))
PLANS = {
    "smoke": Plan(
        Source("digits"), "mlp-3x16", _MLP, 3, Schedule(epochs=8, batch=50, cuts=()), 0.1, 0.1, 0.1, (0.0, 0.03, 0.1),
        100, 1,
    ),
    "small": Plan(
        Source("digits"), "mlp-4x48", _MLP, 4, Schedule(epochs=80, batch=50, cuts=(0.8,), factor=10.0), 0.1, 0.1, 0.1,
        (0.0, 0.003, 0.01, 0.03, 0.1, 0.3), 500, 5,
    ),
    # Damping as the authors have it without normalization; rates and decays are ours.
    "full": Plan(
        Source("mnist", per_class=1000), "mlp-5x400", (("inputs", 784), ("init", "glorot_uniform")), 5,
        Schedule(epochs=60, batch=128, cuts=(0.8,), factor=10.0, drop_last=True), 0.1, 1e-2, 1e-2,
        (0.0, 0.003, 0.01, 0.03, 0.1, 0.3), 2000, 3,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """All that one training depends on."""

    plan: Plan
    decay: float
    seed: int


def trained(lab: Lab, setting: Setting) -> dict[str, Any]:
    """Loss, test accuracy, and on test examples: E‖J‖²_F, E‖z‖², wᵀGw, and the cross-entropy."""
    return kept(lab, "wd-mechanism-3", setting, lambda: _run(lab, setting))


def _run(lab: Lab, setting: Setting) -> dict[str, Any]:
    plan, split = setting.plan, split_of(lab, setting.plan.source)
    model = models.make(plan.model, seed=setting.seed, **dict(plan.options)).to(device_of(lab), dtype_of(lab))
    # Beside the natural gradient, not through it: the inner optimizer's decay is that of equation 22.
    inner = SGD(model.parameters(), lr=plan.rate, weight_decay=setting.decay)
    optimizer = KFAC(inner, model, F.cross_entropy, damping=plan.damping, clip=plan.clip, seed=setting.seed)
    x = split.inputs(split.x_test[: plan.examples]).to(device_of(lab), dtype_of(lab))
    found = train(model, optimizer, split, plan.schedule, seed=setting.seed)
    test = accuracy(model, split)
    z = model(x).detach()
    return {
        **found,
        "test": test,
        "jacobian": estimated_jacobian_norm(model, x, seed=setting.seed).value,
        "outputs": float(z.square().sum(1).mean()),
        "gauss_newton": float(gauss_newton_norm(model, x)),
        "weights": float(sum(p.detach().square().sum() for p in model.parameters())),
        "test_loss": float(F.cross_entropy(z, split.y_test[: plan.examples])),
    }


def levels(lab: Lab) -> list[Level]:
    """Every decay, over seeds."""
    plan = PLANS[lab.scale]
    return [
        Level(decay, [trained(lab, Setting(plan, decay, seed)) for seed in range(plan.seeds)]) for decay in plan.decays
    ]


def trials(lab: Lab) -> list[Trial]:
    """None of the laboratory's own: K-FAC has no recipe."""
    return []


def conclude(lab: Lab) -> Report:
    """The Jacobian's norm and test accuracy by decay."""
    return report(PLANS[lab.scale].depth, levels(lab))


STUDIES = (
    Study("dynamics/wd-mechanism-3", "Section 5.3: weight decay under K-FAC, and the input-output Jacobian", trials,
          conclude),
)  # fmt: skip
