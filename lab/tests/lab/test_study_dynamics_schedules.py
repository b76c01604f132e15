"""Figures 2, 6 and 7 of the chapter, against handwritten loops."""

import json

import numpy as np
import pytest

from gyroscope.theory.least_squares import line_problem
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.catalogue import study
from gyroscope_lab.papers.dynamics import least_squares as dynamics_least_squares
from gyroscope_lab.papers.dynamics import schedules as dynamics_schedules
from gyroscope_lab.papers.dynamics.least_squares import STARTS, Ways, step_lengths, ways
from gyroscope_lab.papers.dynamics.schedules import DECAY, PRODUCT, RATES, STEPS, spaced
from gyroscope_lab.training.archive import Archive

FIG2, FIG6, FIG7 = (*dynamics_least_squares.STUDIES, *dynamics_schedules.STUDIES)


@pytest.fixture(scope="module")
def reports(lab):
    return {one.name: one.run(lab) for one in (FIG2, FIG6, FIG7)}


def loop(alpha, decay, steps=STEPS):
    square = 1.0
    for _ in range(steps):
        square = (1 - alpha * decay) ** 2 * square + alpha**2 / square
    return square


@pytest.mark.parametrize("scale", ["smoke", "full"])
def test_simulations_train_nothing_and_are_in_the_catalogue(tmp_path, scale):
    for one in (FIG2, FIG6, FIG7):
        assert one.trials(Lab(Archive(tmp_path), scale)) == []
        assert study(one.name) is one


def test_every_claim_of_the_three_figures_is_shown(reports):
    assert {name: [one.holds for one in its.verdicts] for name, its in reports.items()} == {
        "dynamics/fig2": [True] * 3,
        "dynamics/fig6": [True] * 4,
        "dynamics/fig7": [True] * 3,
    }


def test_the_path_of_the_empirical_fisher_is_that_of_newtons_step_with_it_in_place_of_the_hessian(reports):
    problem, theta = line_problem(), np.array(STARTS[1])
    numbers = reports["dynamics/fig2"].numbers
    x, t, path = problem.features, problem.targets, [theta]
    for _ in range(numbers["steps"][-1]):
        each = (x @ theta - t)[:, None] * x
        theta = theta - 0.03 * np.linalg.solve(each.T @ each / len(t), each.mean(axis=0))
        path.append(theta)
    path = np.array(path)
    np.testing.assert_allclose(numbers["paths"]["empirical"][1], path[numbers["steps"]], atol=1e-4)
    length = np.linalg.norm(np.diff(path, axis=0), axis=1).sum() / np.linalg.norm(path[-1] - path[0])
    assert numbers["detours"]["empirical"][1] == pytest.approx(length, abs=1e-4)
    assert length > 2
    far = np.linalg.norm(path - problem.optimum, axis=1)
    assert far.max() > 1.01 * far[0]  # it leads away at first


def test_a_step_with_the_empirical_fisher_is_shorter_where_the_gradient_is_larger():
    problem = line_problem()
    near, _, far = (problem.optimum + c * (np.array(STARTS[0]) - problem.optimum) for c in (1, 2, 4))
    assert np.linalg.norm(problem.gradient(far)) == pytest.approx(4 * np.linalg.norm(problem.gradient(near)))
    one, two, four = step_lengths(problem, "empirical", STARTS[0])
    assert one == 1 > two > four
    assert step_lengths(problem, "natural", STARTS[0]) == pytest.approx([1, 2, 4])


def test_the_distances_of_a_path_are_shares_of_the_first():
    found = ways(3, STARTS[:1])
    assert isinstance(found, Ways)
    [far] = found.distances("natural")
    assert far[0] == 1
    assert far[-1] == pytest.approx((1 - 0.02) ** 1500, rel=1e-6)  # at the rate 0.02 each step leaves 98 %


def test_norms_and_effective_rates_are_those_of_equation_19(reports):
    its = reports["dynamics/fig6"].numbers
    for i, alpha in enumerate(RATES):
        square = loop(alpha, 0.0)
        assert its["norms"][i][-1] == pytest.approx(np.sqrt(square), rel=1e-5)
        assert its["effective_rates"][i][-1] == pytest.approx(alpha / square, rel=1e-5)
        assert its["effective_rates"][i][0] == alpha
    table = reports["dynamics/fig6"].tables[0]
    assert [row[-1] for row in table.rows] == [None] * len(RATES)  # the chapter has no numbers
    assert float(table.rows[0][2]) == pytest.approx(1 / (2 * RATES[0] ** 2), rel=0.01)


def test_with_weight_decay_rates_end_at_the_fixed_point_of_equation_23(reports):
    halves = reports["dynamics/fig7"].numbers
    for says, decays in ((f"λ = {DECAY:g}", [DECAY] * 4), (f"αλ = {PRODUCT:g}", [PRODUCT / a for a in RATES])):
        for i, (alpha, decay) in enumerate(zip(RATES, decays, strict=True)):
            end = halves[says]["effective_rates"][i][-1]
            assert end == pytest.approx(alpha / loop(alpha, decay), rel=1e-5)
            assert end == pytest.approx(np.sqrt(2 * alpha * decay), rel=alpha * decay)


def test_places_on_a_logarithmic_axis_begin_and_end_where_they_should():
    for count in (1, 2, 3, 10, 1001, 100_001):
        places = spaced(count)
        assert places[0] == 0
        assert places[-1] == count - 1
        assert (np.diff(places) > 0).all()
        assert len(places) <= 80


def test_saving_a_simulation_writes_the_figure_the_page_and_all_numbers(lab, reports, tmp_path):
    names = {path.name for path in FIG7.save(lab, reports[FIG7.name], tmp_path)}
    assert names == {"README.md", "result.json", "figure.png", "figure.svg"}
    assert json.loads((tmp_path / FIG7.name / "result.json").read_text())["scale"] == "smoke"
    for one in (FIG2, FIG6):
        json.dumps(one.as_json(lab, reports[one.name]), allow_nan=False)


def test_the_figures_have_the_chapters_panels_and_axes(reports):
    assert [len(reports[f"dynamics/fig{number}"].figures["figure"].axes) for number in (2, 6, 7)] == [4, 2, 2]
    for number in (6, 7):
        for ax in reports[f"dynamics/fig{number}"].figures["figure"].axes:
            assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
