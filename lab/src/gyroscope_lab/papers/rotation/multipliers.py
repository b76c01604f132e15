"""The effect of α on each layer's rate (figure 13 of the rotation paper, figure 12 of the speed paper).

Nothing is trained.

Equation 1 of both papers gives layer l of L, counted from 0, the rate

    ρ_l(t) = (1 − α)^(5 (L−1−l)/(L−1)) ρ(t)   where α > 0,      ρ_l(t) = (1 + α)^(5 l/(L−1)) ρ(t)   where α ≤ 0.

The formula is compared with a step: ρ_l/ρ = tan θ_l/ρ, with θ_l the angle by which layer l turned in one step.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from gyroscope.control.rates import alpha_multipliers
from gyroscope.layers import layers
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.rotation import paper
from gyroscope_lab.papers.rotation.recipes import layca
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, no_trials
from gyroscope_lab.training.task import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The values of |α| that the papers train with.
SIZES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
# Layers that should turn equally fast may differ by rounding, no more.
_CLOSE = 1e-6

Lines = dict[float, list[float]]


def turned(task: Task, alpha: float) -> list[float]:
    """tan θ_l/ρ of one step of Layca on the task's network, along random gradients, first layer first.

    >>> from gyroscope_lab.training.tasks import task
    >>> [round(value, 4) for value in turned(task("digits-mlp"), 0.6)]
    [0.0102, 1.0]
    """
    model = task.network(seed=0).double()
    recipe = layca(-3, alpha=alpha)
    optimizer = recipe.make(model)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    its = [layer.parameter for layer in layers(model)]
    before = [parameter.detach().clone().flatten() for parameter in its]
    optimizer.step()
    pairs = zip(before, its, strict=True)
    return [_tangent(old, new.detach().flatten()) / recipe.rate for old, new in pairs]


def conclude(lab: Lab) -> Report:
    """Report multipliers over depth, by the formula and by a step."""
    task = lab.tasks(paper.TASKS)[0]
    alphas = sorted([*SIZES, *(-size for size in SIZES if size)])
    stepped = {alpha: turned(task, alpha) for alpha in alphas}
    depth = len(stepped[0.0])
    formula = {alpha: alpha_multipliers(alpha, depth) for alpha in alphas}
    rows = tuple((f"{alpha:+g}", 100 * min(stepped[alpha]), 100 * (1 - abs(alpha)) ** 5) for alpha in alphas)
    return Report(
        {"figure": _draw(formula, stepped)},
        (Table(f"Slowest layer of {task.model}, in percent of ρ", ("α", "one step here", "equation 1"), rows),),
        _verdicts(formula, stepped),
        {"layers": depth, "equation": formula, "one step": stepped},
    )


def _tangent(old: torch.Tensor, new: torch.Tensor) -> float:
    axis = old / old.norm()
    along = torch.dot(new, axis)
    return float((new - along * axis).norm() / along)


def _verdicts(formula: Lines, stepped: Lines) -> tuple[Verdict, ...]:
    pairs = [(a, b) for alpha in formula for a, b in zip(formula[alpha], stepped[alpha], strict=True)]
    worst = max(abs(a - b) / a for a, b in pairs)
    spread = max(stepped[0.0]) / min(stepped[0.0]) - 1
    falls = all(_sorted(line, falling=alpha <= 0) for alpha, line in stepped.items())
    slowest = {alpha: min(line) for alpha, line in stepped.items()}
    return (
        Verdict("every layer turns by what equation 1 says", "ρ_l = tan θ_l", f"to {worst:.1e}", worst < _CLOSE),
        Verdict("α = 0: uniform rotation rates", "all equal", f"equal to {spread:.1e}", spread < _CLOSE),
        Verdict(
            "α < 0: the first layers turn faster; α > 0: the last",
            "exponentially with depth",
            "in order of depth for every α" if falls else "not in order of depth",
            falls,
        ),
        Verdict(
            "at α = ±0.6 the slowest layer turns at a hundredth of the rate",
            "0.01024",
            f"{slowest[-0.6]:.5f} and {slowest[0.6]:.5f}",
            max(abs(slowest[alpha] / 0.4**5 - 1) for alpha in (-0.6, 0.6)) < _CLOSE,
        ),
    )


def _sorted(line: list[float], *, falling: bool) -> bool:
    ordered = line if falling else line[::-1]
    return all(a >= b * (1 - _CLOSE) for a, b in pairwise(ordered))


def _draw(formula: Lines, stepped: Lines) -> Figure:
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 3.1), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    sides = ((-1.0, "α ≤ 0: first layers faster"), (1.0, "α ≥ 0: last layers faster"))
    for ax, (sign, words) in zip(axes, sides, strict=True):
        for size in SIZES:
            line = formula[sign * size]
            places = [index / len(line) for index in range(len(line))]
            color = matplotlib.colormaps["viridis"](size)
            ax.plot(places, line, color=color, label=f"{size:g}")
            ax.plot(places, stepped[sign * size], ".", color=color, markersize=5)
        ax.set_title(words, fontsize=10)
        ax.set_xlabel("layer index $l$ / number of layers $L$", fontsize=9)
        ax.set_xlim(0, 1)
    axes[0].set_ylabel("multiplier of ρ", fontsize=9)
    figure.suptitle("Lines: equation 1. Dots: tan θ / ρ of one step.", fontsize=9)
    axes[1].legend(title="|α|", fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


STUDIES = (
    Study("rotation/fig13", "Figure 13: the multipliers of the layers' rates, by depth and α", no_trials, conclude),
    Study("speed/fig12", "Figure 12: the multipliers of the layers' rates, by depth and α", no_trials, conclude),
)
