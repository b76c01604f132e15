"""Newton's method with the empirical Fisher matrix in place of the Hessian, on least squares (equation 3, figure 2).

For predictions θᵀφ and squared errors, with residuals e_n = θᵀφ_n − t_n,

    ∇J = (1/N) Σ e_n φ_n,        H = F = (1/N) Σ φ_n φ_nᵀ,        F_emp = (1/N) Σ e_n² φ_n φ_nᵀ.

F does not depend on the targets, and θ − F⁻¹∇J is the optimum. F_emp grows with the square of the errors: its step is
small where errors are large, and examples that fit badly count as if they were known well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from gyroscope.base.accepted import choice
from gyroscope.errors import DynamicsError
from gyroscope.theory.domains import count, nonnegative, numbers, positive

Floats = npt.NDArray[np.float64]
Method = Literal["gradient", "natural", "empirical"]

METHODS: tuple[Method, ...] = ("gradient", "natural", "empirical")


@dataclass(frozen=True, eq=False)
class Problem:
    """Least squares: features φ [N, D] and targets t [N].

    >>> problem = Problem(np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([1.0, 4.0]))
    >>> problem.optimum.round(6), problem.cost([1.0, 2.0]), problem.fisher().tolist()
    (array([1., 2.]), 0.0, [[0.5, 0.0], [0.0, 2.0]])
    """

    features: Floats
    targets: Floats

    @property
    def optimum(self) -> Floats:
        """The θ with the smallest squared error."""
        return np.asarray(np.linalg.lstsq(self.features, self.targets, rcond=None)[0])

    def cost(self, theta: npt.ArrayLike) -> float:
        """J = (1/2N) Σ e_n²."""
        return float(np.square(self._errors(theta)).mean() / 2)

    def gradient(self, theta: npt.ArrayLike) -> Floats:
        """∇J."""
        return np.asarray(self.features.T @ self._errors(theta) / len(self.targets))

    def fisher(self) -> Floats:
        """F, which equals H."""
        return np.asarray(self.features.T @ self.features / len(self.targets))

    def empirical_fisher(self, theta: npt.ArrayLike) -> Floats:
        """F_emp."""
        rows = self.features * self._errors(theta)[:, None]
        return np.asarray(rows.T @ rows / len(self.targets))

    def _errors(self, theta: npt.ArrayLike) -> Floats:
        return np.asarray(self.features @ np.asarray(theta, dtype=np.float64) - self.targets)


def line_problem(
    *, samples: int = 200, slope: float = 2.0, offset: float = 1.0, noise: float = 1.0, seed: int = 0
) -> Problem:
    """Return points around a line, t = offset + slope · x + noise, with θ = (offset, slope).

    >>> line_problem(noise=0.0).optimum.round(6)
    array([1., 2.])
    """
    many = count("samples", samples, least=2)
    nonnegative("noise", noise)
    draw = np.random.default_rng(count("seed", seed, least=0))
    x = draw.uniform(0.0, 2.0, many)
    t = offset + slope * x + noise * draw.standard_normal(many)
    return Problem(np.stack([np.ones(many), x], axis=1), t)


def direction(problem: Problem, theta: npt.ArrayLike, method: Method) -> Floats:
    """Return the step that a method subtracts from θ: ∇J, F⁻¹∇J, or F_emp⁻¹∇J (equation 3).

    >>> problem = line_problem(noise=0.0)
    >>> (np.array([5.0, 5.0]) - direction(problem, [5.0, 5.0], "natural")).round(6)
    array([1., 2.])
    """
    choice(method, "method", METHODS, DynamicsError)
    gradient = problem.gradient(theta)
    if method == "gradient":
        return gradient
    matrix = problem.fisher() if method == "natural" else problem.empirical_fisher(theta)
    return newton_step(matrix, gradient)


def newton_step(matrix: npt.ArrayLike, gradient: npt.ArrayLike) -> Floats:
    """Return M⁻¹∇J, with the pseudo-inverse if M is singular.

    For the extreme case of equation 3, one full-batch gradient and M = ∇J∇Jᵀ, this is ∇J/‖∇J‖²: the larger the
    gradient, the smaller the step.

    >>> g = np.array([3.0, 4.0])
    >>> newton_step(np.outer(g, g), g).round(4), newton_step(np.outer(2 * g, 2 * g), 2 * g).round(4)
    (array([0.12, 0.16]), array([0.06, 0.08]))
    """
    return np.asarray(
        np.linalg.pinv(np.asarray(matrix, dtype=np.float64), rcond=1e-12, hermitian=True) @ np.asarray(gradient)
    )


def path(problem: Problem, method: Method, *, start: npt.ArrayLike, lr: float, steps: int) -> Floats:
    """Return θ after 0, 1, … steps of one method [steps + 1, D].

    >>> problem = line_problem(noise=0.0)
    >>> path(problem, "natural", start=[5.0, 5.0], lr=0.5, steps=2).round(6)
    array([[5.  , 5.  ],
           [3.  , 3.5 ],
           [2.  , 2.75]])
    """
    many, rate = count("steps", steps, least=0), positive("lr", lr, hint="0.1")
    theta = numbers("start", start).copy()
    if theta.shape != problem.features.shape[1:]:
        raise DynamicsError(f"`start` must have shape {problem.features.shape[1:]}, got {theta.shape}.")
    found = [theta]
    for _ in range(many):
        theta = theta - rate * direction(problem, theta, method)
        found.append(theta)
    return np.stack(found)


def detour(points: Floats) -> float:
    """Return the length of a path divided by the distance between its ends: 1 for a straight path.

    >>> detour(np.array([[0.0, 0.0], [3.0, 0.0], [3.0, 4.0]]))
    1.4
    """
    distance = float(np.linalg.norm(points[-1] - points[0]))
    if distance == 0:
        raise DynamicsError(
            "`points` must end at another point than they start at, got a closed path: its detour is undefined."
        )
    return float(np.linalg.norm(np.diff(points, axis=0), axis=1).sum()) / distance


@dataclass(frozen=True, eq=False)
class Paths:
    """Figure 2: the problem, and the path of each method from one start [steps + 1, 2].

    >>> paths = figure2()
    >>> paths.gradient.shape == paths.natural.shape == paths.empirical.shape
    True
    """

    problem: Problem
    gradient: Floats
    natural: Floats
    empirical: Floats


def figure2(
    problem: Problem | None = None,
    *,
    start: npt.ArrayLike = (4.5, 4.5),
    steps: int = 1500,
    rates: npt.ArrayLike = (0.1, 0.02, 0.03),
) -> Paths:
    """Return the paths of gradient descent, natural gradient descent and the empirical Fisher matrix from one start.

    The natural gradient goes straight to the optimum. The empirical one barely moves at first, because errors are
    large, and takes another path.

    Args:
        problem: points around a line by default; the chapter's picture shows another data set.
        start: θ at the start.
        steps: number of steps.
        rates: learning rates of the three methods.

    >>> paths = figure2()
    >>> round(detour(paths.natural), 2), round(detour(paths.gradient), 2), round(detour(paths.empirical), 2)
    (1.0, 1.16, 2.4)
    """
    each = numbers("rates", rates)
    if each.shape != (len(METHODS),):
        raise DynamicsError(f"`rates` must be three numbers, for {', '.join(METHODS)}, got {rates!r:.80}.")
    at = line_problem() if problem is None else problem
    ways = (path(at, m, start=start, lr=lr, steps=steps) for m, lr in zip(METHODS, each.tolist(), strict=True))
    return Paths(at, *ways)
