"""Newton's method with the true Fisher matrix goes straight, with the empirical one it does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gyroscope.errors import DynamicsError
from gyroscope.theory.empirical_fisher import second_moment
from gyroscope.theory.least_squares import Problem, detour, direction, figure2, line_problem, newton_step, path


@pytest.fixture(scope="module")
def problem() -> Problem:
    return line_problem(samples=40)


def test_gradient_and_curvature_are_those_of_autograd(problem):
    theta = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    features, targets = torch.tensor(problem.features), torch.tensor(problem.targets)

    def cost(w: torch.Tensor) -> torch.Tensor:
        return 0.5 * (features @ w - targets).square().mean()

    assert problem.cost([0.3, -0.7]) == pytest.approx(cost(theta).item())
    assert problem.gradient([0.3, -0.7]) == pytest.approx(torch.autograd.grad(cost(theta), theta)[0].numpy())
    assert problem.fisher() == pytest.approx(torch.autograd.functional.hessian(cost, theta.detach()).numpy())


def test_the_empirical_fisher_is_the_second_moment_of_single_gradients(problem):
    theta = np.array([0.3, -0.7])
    rows = problem.features * (problem.features @ theta - problem.targets)[:, None]
    assert problem.empirical_fisher(theta) == pytest.approx(second_moment(torch.tensor(rows), full=True).numpy())


def test_one_full_step_of_the_natural_gradient_is_the_optimum(problem):
    end = path(problem, "natural", start=[4.5, 4.5], lr=1.0, steps=1)[-1]
    assert end == pytest.approx(problem.optimum)
    assert problem.gradient(end) == pytest.approx([0, 0], abs=1e-12)


def test_the_natural_gradient_goes_straight_to_the_optimum(problem):
    points = path(problem, "natural", start=[4.5, 4.5], lr=0.1, steps=300)
    assert detour(points) == pytest.approx(1.0)
    assert points[-1] == pytest.approx(problem.optimum)
    assert points == pytest.approx(problem.optimum + 0.9 ** np.arange(301)[:, None] * ([4.5, 4.5] - problem.optimum))


def test_larger_errors_make_smaller_steps_with_the_empirical_fisher():
    problem, theta = line_problem(samples=40), np.array([4.0, -1.0])
    errors = problem.features @ theta - problem.targets
    worse = Problem(problem.features, problem.features @ theta - 10 * errors)
    assert worse.gradient(theta) == pytest.approx(10 * problem.gradient(theta))
    assert direction(worse, theta, "natural") == pytest.approx(10 * direction(problem, theta, "natural"))
    assert direction(worse, theta, "empirical") == pytest.approx(direction(problem, theta, "empirical") / 10)


def test_one_full_batch_gradient_makes_a_step_that_shrinks_as_it_grows():
    g = np.array([0.2, -3.0, 1.0])
    assert newton_step(np.outer(g, g), g) == pytest.approx(g / (g @ g))


def test_where_errors_are_unit_noise_the_empirical_fisher_is_the_true_one():
    problem = line_problem(samples=20_000, noise=1.0)
    assert problem.empirical_fisher(problem.optimum) == pytest.approx(problem.fisher(), rel=0.05)


def test_figure_2_has_all_three_arrive_the_empirical_one_by_a_long_way_round():
    paths = figure2()
    optimum = paths.problem.optimum
    for points in (paths.gradient, paths.natural, paths.empirical):
        assert points[0].tolist() == [4.5, 4.5]
        assert points[-1] == pytest.approx(optimum, abs=1e-3)
    assert detour(paths.natural) == pytest.approx(1.0)
    assert detour(paths.natural) < detour(paths.gradient) < detour(paths.empirical)
    # At first it walks away from the optimum in one of the two parameters.
    assert paths.empirical[:, 1].max() > 6 > 4.5 > optimum[1]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p: direction(p, [0.0, 0.0], "adam"), "`method` must .* got 'adam'"),
        (lambda p: path(p, "natural", start=[0.0], lr=0.1, steps=1), "`start` must have shape"),
        (lambda p: path(p, "natural", start=[0.0, 0.0], lr=0.0, steps=1), "`lr` must be .* got 0.0"),
        (lambda p: line_problem(samples=1), "`samples` must be .* got 1"),
        (lambda p: detour(np.zeros((3, 2))), "a closed path"),
    ],
)
def test_what_is_no_path_is_refused(problem, call, says):
    with pytest.raises(DynamicsError, match=says):
        call(problem)
