"""The odd path of the empirical Fisher matrix on least squares (figure 2 of Grosse's chapter, after Kunstner et al.).

For predictions θᵀφ with errors e_n, Newton's step divides by F = (1/N) Σ φ_n φ_nᵀ, the step of equation 3 by F_emp =
(1/N) Σ e_n² φ_n φ_nᵀ, which grows with the square of the errors. So steps are small far from the optimum, where
gradients are large. The chapter does not state the data of its figure; ours are points around a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi, sin
from typing import TYPE_CHECKING, Any

import numpy as np

from gyroscope.theory.least_squares import (
    METHODS,
    Floats,
    Method,
    Paths,
    Problem,
    detour,
    direction,
    figure2,
    line_problem,
)
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.dynamics.schedules import spaced
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, no_trials

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The starts of the paths, as (offset, slope): all around the optimum, which is near (1, 2).
STARTS = tuple((1 + 3.5 * cos(pi * turn / 4), 2 + 3.5 * sin(pi * turn / 4)) for turn in range(8))
#: The distances from the optimum at which step lengths are compared, as multiples of that of a start.
DISTANCES = (1.0, 2.0, 4.0)
_TITLES = {"gradient": "gradient descent", "natural": "natural gradient", "empirical": "empirical Fisher"}
_COLORS = {"gradient": "C0", "natural": "C2", "empirical": "C3"}
# The number of random data sets and of starts; a smoke test uses one data set and half of the starts.
_PLANS = {"smoke": (1, 4), "small": (10, 8), "full": (10, 8)}
_OFFSETS, _SLOPES = (-4.0, 6.0), (-3.0, 7.0)
_ARROWS = 7
# A path leads away if it is at some time this many times as far from the optimum as at its start.
_AWAY = 1.01


@dataclass(frozen=True, eq=False)
class Ways:
    """The paths on one data set, one per start."""

    problem: Problem
    paths: tuple[Paths, ...]

    def way(self, method: Method, start: int) -> Floats:
        """θ over the steps, [steps + 1, 2]."""
        return np.asarray(getattr(self.paths[start], method))

    def detours(self, method: Method) -> list[float]:
        """The length of each path over the distance between its ends."""
        return [detour(self.way(method, start)) for start in range(len(self.paths))]

    def distances(self, method: Method) -> list[Floats]:
        """Return the distance of each path from the optimum over its steps, relative to that at the start."""
        ways = (self.way(method, start) for start in range(len(self.paths)))
        far = [np.linalg.norm(way - self.problem.optimum, axis=1) for way in ways]
        return [one / one[0] for one in far]


def ways(seed: int, starts: Sequence[tuple[float, float]] = STARTS) -> Ways:
    """The three methods from every start, on points drawn from a seed.

    >>> [round(one, 2) for one in ways(0, [(4.5, 4.5)]).detours("empirical")]
    [2.4]
    """
    problem = line_problem(seed=seed)
    return Ways(problem, tuple(figure2(problem, start=start) for start in starts))


def step_lengths(problem: Problem, method: Method, start: Sequence[float]) -> list[float]:
    """‖M⁻¹∇J‖ at θ* + c(θ₀ − θ*) for c in `DISTANCES`, over that at c = 1.

    Newton's step is as long as the distance to the optimum; with F_emp it shrinks while gradients grow.

    >>> [round(one, 2) for one in step_lengths(line_problem(), "natural", STARTS[0])]
    [1.0, 2.0, 4.0]
    """
    at = problem.optimum
    away = np.asarray(start) - at
    lengths = [float(np.linalg.norm(direction(problem, at + c * away, method))) for c in DISTANCES]
    return [length / lengths[0] for length in lengths]


def conclude(lab: Lab) -> Report:
    """Draw the paths on one data set, and report their lengths on all."""
    seeds, begun = _PLANS[lab.scale]
    starts = STARTS[:begun]
    found = [ways(seed, starts) for seed in range(seeds)]
    detours = {method: [one for its in found for one in its.detours(method)] for method in METHODS}
    far = {method: np.array([one for its in found for one in its.distances(method)]) for method in METHODS}
    steps = {
        method: np.array([step_lengths(its.problem, method, start) for its in found for start in starts])
        for method in METHODS
    }
    rows = tuple(
        (_TITLES[method], float(np.median(detours[method])), max(detours[method]), None, _led_away(far[method]),
         f"{far[method][:, -1].max():.1g}", float(np.median(steps[method][:, -1])))
        for method in METHODS
    )  # fmt: skip
    columns = ("method", "detour, median", "largest", "paper", "lead away at first", "largest share left",
               f"step at {DISTANCES[-1]:g} times the distance")  # fmt: skip
    title = f"Paths from {begun} starts on {len(found)} data sets, of 1,500 steps"
    return Report(
        {"figure": draw(found[0])},
        (Table(title, columns, rows),),
        _verdicts(detours, far, steps),
        _numbers(found[0], detours),
    )


def _verdicts(
    detours: dict[Method, list[float]], far: dict[Method, Floats], steps: dict[Method, Floats]
) -> tuple[Verdict, ...]:
    odd, gradient = detours["empirical"], detours["gradient"]
    away = {method: _led_away(far[method]) for method in METHODS}
    lengths = steps["empirical"][:, -1]
    return (
        Verdict(
            "preconditioning with the inverse of the empirical Fisher matrix results in a rather bizarre path",
            "a picture",
            f"up to {max(odd):.2f} times the straight line, compared with {max(gradient):.2f} for gradient descent and "
            f"{max(detours['natural']):.2f} for the natural gradient; {away['empirical']} of {len(odd)} paths first "
            f"lead away from the optimum, compared with {away['gradient']} and {away['natural']}",
            max(odd) > max(gradient) and away["empirical"] > max(away["gradient"], away["natural"]),
        ),
        Verdict(
            "it takes smaller steps where there is a larger gradient",
            "in words",
            f"{DISTANCES[-1]:g} times as far from the optimum, its step is {lengths.min():.2f} to {lengths.max():.2f} "
            f"times as long; that of the natural gradient {steps['natural'][:, -1].mean():.2f} times",
            bool((lengths < 1).all()),
        ),
        Verdict(
            "the natural gradient goes straight to the optimum",
            "a picture",
            f"its detours are at most {max(detours['natural']):.6f}; "
            f"{far['natural'][:, -1].max():.1g} of the distance is left",
            max(detours["natural"]) < 1 + 1e-6 and bool(far["natural"][:, -1].max() < 1e-6),
        ),
    )


def _led_away(far: Floats) -> int:
    """Return the number of paths that were farther from the optimum than at their start at some time."""
    return int((far.max(axis=1) > _AWAY).sum())


def _numbers(shown: Ways, detours: dict[Method, list[float]]) -> dict[str, Any]:
    points = spaced(len(shown.way("gradient", 0)), points=30)
    return {
        "optimum": shown.problem.optimum.tolist(),
        "starts": [path.gradient[0].tolist() for path in shown.paths],
        "detours": {method: [round(one, 4) for one in its] for method, its in detours.items()},
        "steps": points.tolist(),
        "paths": {
            method: [shown.way(method, start)[points].round(4).tolist() for start in range(len(shown.paths))]
            for method in METHODS
        },
    }


def draw(shown: Ways) -> Figure:
    """Draw the data on the left, and one panel per method: arrows for its steps, and the paths from every start."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 2.8), layout="constrained")
    data, *panels = figure.subplots(1, 4)
    x, problem = shown.problem.features[:, 1], shown.problem
    data.scatter(x, problem.targets, s=7, color="0.6", linewidths=0)
    ends = np.array([x.min(), x.max()])
    data.plot(ends, problem.optimum[0] + problem.optimum[1] * ends, color="k", linewidth=1.5, label="least squares")
    data.set_xlabel("x", fontsize=9)
    data.set_ylabel("t", fontsize=9)
    data.legend(fontsize=8, loc="upper left")
    data.set_title("data", fontsize=10)
    data.set_box_aspect(1)
    for ax, method in zip(panels, METHODS, strict=True):
        _panel(ax, shown, method)
    return figure


def _panel(ax: Axes, shown: Ways, method: Method) -> None:
    problem, across, up = shown.problem, np.linspace(*_OFFSETS, 50), np.linspace(*_SLOPES, 50)
    costs = np.array([[problem.cost((offset, slope)) for offset in across] for slope in up])
    floor = problem.cost(problem.optimum)
    ax.contour(across, up, costs - floor, levels=np.geomspace(0.5, 30, 4), colors="0.85", linewidths=0.8)
    inner = [np.linspace(low, high, 2 * _ARROWS + 1)[1::2] for low, high in (_OFFSETS, _SLOPES)]
    points = np.array([(offset, slope) for slope in inner[1] for offset in inner[0]])
    towards = -np.array([direction(problem, point, method) for point in points])
    towards /= np.linalg.norm(towards, axis=1, keepdims=True)
    ax.quiver(*points.T, *towards.T, color="0.7", angles="xy", scale=16, width=0.005)
    for start in range(len(shown.paths)):
        ax.plot(*shown.way(method, start).T, color=_COLORS[method], linewidth=1.4)
    begun = np.array([path.gradient[0] for path in shown.paths])
    ax.scatter(begun[:, 0], begun[:, 1], s=16, color=_COLORS[method], zorder=3)
    ax.scatter(problem.optimum[0], problem.optimum[1], marker="*", s=90, color="k", zorder=4)
    ax.set_xlim(*_OFFSETS)
    ax.set_ylim(*_SLOPES)
    ax.set_aspect("equal")
    ax.set_xlabel("offset θ₀", fontsize=9)
    ax.set_ylabel("slope θ₁", fontsize=9)
    ax.set_title(_TITLES[method], fontsize=10)


STUDIES = (
    Study(
        "dynamics/fig2",
        "Figure 2: paths of gradient descent, natural gradient and empirical Fisher on least squares",
        no_trials,
        conclude,
    ),
)
