import json
from math import sqrt

import numpy as np
import pytest

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.rotation.recipes import layca
from gyroscope_lab.papers.rotation.tuned_rates import STUDIES, TRAIN, TUNED, best, between, extended, search
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.trial import Trial
from lab.made_lab import MadeLab, made

FIG2, TABLE2 = STUDIES
ALPHAS = (-0.8, -0.6, -0.4, -0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8)


def raw(lab, power, alpha):
    """The archive's own result of a configuration, or None if it was not tried."""
    trial = lab.trial(Trial(lab.task("c10-cnn1"), layca(power, alpha=alpha)))
    path = lab.archive.folder(trial) / "result.json"
    return json.loads(path.read_text())["result"] if path.exists() else None


@pytest.fixture(scope="module")
def report(lab):
    return FIG2.run(lab)


def peak_at(optimum):
    """Scores that fall from log3 rho = optimum(alpha) on, and a record of the requests, round by round."""
    rounds = []

    def score(places):
        rounds.append(list(places))
        return [-abs(power - optimum(alpha)) for alpha, power in places]

    return score, rounds


def test_a_search_whose_best_rate_is_inside_stops_after_three():
    score, rounds = peak_at(lambda alpha: -3)
    assert search([0.0], score) == {0.0: {-3: 0, -4: -1, -2: -1}}
    assert rounds == [[(0.0, -3), (0.0, -4), (0.0, -2)], []]


@pytest.mark.parametrize(("optimum", "tried"), [(-6, [-7, -6, -5, -4, -3, -2]), (0, [-4, -3, -2, -1, 0, 1])])
def test_a_search_whose_best_rate_is_at_an_end_goes_on_by_factors_of_three(optimum, tried):
    score, rounds = peak_at(lambda alpha: optimum)
    assert sorted(search([0.0], score)[0.0]) == tried
    assert all(len(places) == 1 for places in rounds[1:-1])


@pytest.mark.parametrize(("direction", "end"), [(1, 2), (-1, -7)])
def test_a_search_that_never_ends_is_ended_at_the_papers_other_grids_ends(direction, end):
    [tried] = search([0.0], lambda places: [direction * power for _, power in places]).values()
    assert best(tried) == end
    assert set(tried) == set(range(-4, 3) if direction > 0 else range(-7, -1))


def test_neighbours_whose_best_rates_differ_by_three_try_the_one_between_both_and_no_others():
    score, rounds = peak_at(lambda alpha: {-0.6: -2, 0.0: -3, 0.4: -3, 0.6: -5}[alpha])
    tried = search([0.6, 0.0, -0.6, 0.4], score)
    assert sorted(rounds[-1]) == [(-0.6, -2.5), (0.0, -2.5)]
    assert layca(-2.5).rate == pytest.approx(layca(-3).rate * sqrt(3))
    assert sorted(tried[0.4]) == [-4, -3, -2]


def test_a_rate_between_is_chosen_where_it_is_better():
    tried = search([0.0, 0.1], lambda places: [-abs(p - (-2.6 if alpha else -2.4)) for alpha, p in places])
    assert {alpha: best(its) for alpha, its in tried.items()} == {0.0: -2.5, 0.1: -2.5}


def test_of_equal_scores_the_first_tried_is_taken_so_that_the_search_ends_soonest():
    assert search([0.0], lambda places: [0.1 for _ in places]) == {0.0: dict.fromkeys((-3, -4, -2), 0.1)}
    assert extended({-3: 0.1, -4: 0.1, -2: 0.1}) == []
    assert between({0.0: {-3: 0.5}, 0.1: {-3: 0.5}}) == []


def test_on_digits_the_search_is_that_of_the_appendix(lab, report):
    """The search is followed by hand in the archive's results: for each alpha, the tried rates and the best one."""
    told = {row[0]: row for row in report.tables[0].rows}
    optima = {}
    for alpha in (-0.6, 0.0, 0.6):
        scores = {power: raw(lab, power, alpha)["test_accuracy"] for power in (-3, -4, -2)}
        while (top := max(scores, key=scores.get)) in (min(scores), max(scores)):
            power = top - 1 if top == min(scores) else top + 1
            scores[power] = raw(lab, power, alpha)["test_accuracy"]
        optima[alpha] = (top, scores)
    for low, high in ((-0.6, 0.0), (0.0, 0.6)):
        (a, _), (b, _) = optima[low], optima[high]
        if abs(a - b) == 1:
            for alpha in (low, high):
                optima[alpha][1][(a + b) / 2] = raw(lab, (a + b) / 2, alpha)["test_accuracy"]
    for alpha, (_, scores) in optima.items():
        name, power, tries, test = told[f"{alpha:+g}" if alpha else "0"][:4]
        assert tries == len(scores), name
        assert test == f"{100 * max(scores.values()):.2f}"
        assert scores[float(power[2:])] == max(scores.values())


def test_the_second_table_has_the_rates_at_alpha_zero(lab, report):
    rows = report.tables[1].rows
    assert [row[0] for row in rows] == ["3^-7", "3^-5", "3^-4", "3^-3", "3^-2"]
    for power, test, told, difference, train, rotation in rows:
        result = raw(lab, int(power[2:]), 0.0)
        assert (test, train) == (f"{100 * result['test_accuracy']:.2f}", pytest.approx(100 * result["train_accuracy"]))
        assert rotation == pytest.approx(np.mean(result["rotation"][-1]))
        assert told is difference is None


def test_on_digits_first_layers_matter_more_high_rates_are_best_and_zero_is_even(report):
    uniform, *others = report.verdicts
    assert [verdict.word for verdict in others] == ["shown"] * 3
    first, middle, last = [row[3] for row in report.tables[0].rows]
    assert first > last
    # One seed cannot tell the first from the middle.
    assert first > middle > last
    assert uniform.holds is None
    tests = [row[1] for row in report.tables[1].rows]
    assert tests == sorted(tests)


@pytest.fixture(scope="module")
def columns(report):
    """The five columns of figure 2b, as powers of 3 and alphas."""
    chosen = report.numbers["digits"]["chosen"]
    tuned = [(float(chosen[f"{alpha:g}"][2:]), alpha) for alpha in (-0.6, 0.6, 0.0)]
    return [*tuned[:2], (-5, 0.0), (-4, 0.0), tuned[2]]


def test_layers_turn_most_evenly_at_alpha_zero(lab, report, columns):
    finals = [raw(lab, *place)["rotation"][-1] for place in columns]
    first, last, _, _, even = [np.std(final) / np.mean(final) for final in finals]
    assert even < min(first, last)
    assert f"{even:.0%} of their mean" in report.verdicts[-1].here


def test_the_figures_show_the_chosen_rates_and_the_five_columns(lab, report, columns):
    left, right = report.figures["figure"].axes
    assert list(left.get_lines()[0].get_ydata()) == pytest.approx(
        [float(row[3]) for row in report.tables[0].rows], abs=0.005
    )
    assert list(right.get_lines()[0].get_xdata()) == [3.0**power for power in (-7, -5, -4, -3, -2)]
    panels = report.figures["curves"].axes[:5]
    assert [r"\alpha" in ax.get_title() for ax in panels] == [True, True, False, False, False]
    for ax, (power, alpha) in zip(panels, columns, strict=True):
        assert f"$3^{{{power:g}}}$" in ax.get_title()
        drawn = np.array([line.get_ydata() for line in ax.get_lines()[:7]]).T
        np.testing.assert_allclose(drawn, raw(lab, power, alpha)["rotation"])


def test_the_training_accuracies_are_those_of_the_last_epoch(lab, columns):
    found = TABLE2.run(lab)
    [table] = found.tables
    results = [raw(lab, *place) for place in columns]
    assert [row[1] for row in table.rows] == pytest.approx([100 * result["accuracy"][-1] for result in results])
    assert [row[2] for row in table.rows] == [None] * 5
    assert found.verdicts[0].holds == (min(result["accuracy"][-1] for result in results) >= 0.97)


def test_at_full_scale_the_search_starts_with_three_rates_at_thirteen_alphas(tmp_path):
    listed = FIG2.trials(Lab(Archive(tmp_path), "full"))
    assert listed == TABLE2.trials(Lab(Archive(tmp_path), "full"))
    starts = {(alpha, 3.0**power) for alpha in ALPHAS for power in (-4, -3, -2)}
    sweep = {(0.0, 3.0**power) for power in range(-7, 1)}
    for name, milestones, factor in (
        ("c10-cnn1", [80, 90, 97], 5.0),
        ("c100-resnet", [70, 90, 97], 10.0),
        ("tiny-cnn", [70], 5.0),
    ):
        its = [trial for trial in listed if trial.task.name == name]
        assert {(trial.recipe.alpha, trial.recipe.rate) for trial in its} == starts | sweep
        assert len({trial.key for trial in its}) == len(its) == 44
        assert {(trial.recipe.control, trial.recipe.weight_decay, trial.seed) for trial in its} == {("layca", 0.0, 0)}
        assert all((trial.schedule.milestones, trial.schedule.factor) == (milestones, factor) for trial in its)
        assert all(trial.task.source.validation == 0.1 for trial in its)


def test_results_like_the_papers_are_reported_as_such_and_validation_chooses(tmp_path):
    """A made-up task: the paper's accuracies at the rate that validation prefers, independent of the test set."""
    lab = Lab(Archive(tmp_path), "full", engine="serial", precision="float32", only=("tiny-cnn",))
    told = TUNED["tiny-cnn"]
    places = {(alpha, power) for alpha in ALPHAS for power in (-4, -3, -2)}
    for alpha, power in places | {(0.0, power) for power in range(-7, 1)}:
        trial = Trial(lab.task("tiny-cnn"), layca(power, alpha=alpha))
        chosen = power == -3
        test = told.get(alpha, 10.0) / 100 if chosen else 0.6 + 0.01 * power
        turned = [0.9, 0.9] if alpha == 0 else [0.9, 0.1]
        made = Result(
            1.0,
            test,
            loss=[1.0, 0.1],
            layers=["a", "b"],
            rotation=[[0.0, 0.0], turned],
            accuracy=[0.5, 0.99],
            validation=[0.5, 0.4] if chosen else [0.3, 0.2],
        )
        folder = lab.archive.folder(trial)
        folder.mkdir(parents=True)
        made.write(folder / "result.json", trial.description)
    report = FIG2.conclude(lab)
    rows = {row[0]: row for row in report.tables[0].rows}
    assert len(rows) == 13
    for alpha in ALPHAS:
        row = rows[f"{alpha:+g}" if alpha else "0"]
        assert row[1:3] == ("3^-3", 3)
        assert row[4] == told.get(alpha)
        assert row[5] == (pytest.approx(0.0) if alpha in told else None)
    assert [verdict.word for verdict in report.verdicts[:2]] == ["shown", "shown"]
    assert report.numbers["tiny-cnn"]["chosen by"] == "validation accuracy"
    [table] = TABLE2.conclude(lab).tables
    assert [row[1:3] for row in table.rows] == [(pytest.approx(99.0), number) for number in TRAIN["tiny-cnn"]]


def test_saving_writes_both_figures_the_page_and_every_try(lab, report, tmp_path):
    names = {path.name for path in FIG2.save(lab, report, tmp_path)}
    assert names >= {"figure.png", "curves.png", "README.md", "result.json"}
    tried = json.loads((tmp_path / "speed/fig2/result.json").read_text())["numbers"]["digits"]["tried"]
    for alpha, its in tried.items():
        for power, kept in its.items():
            assert kept["score"] == pytest.approx(100 * raw(lab, float(power[2:]), float(alpha))["test_accuracy"])


def test_where_one_rate_alone_learns_there_is_nothing_to_compare_it_with(tmp_path):
    def make(trial):
        return made(trial, test=0.6, train=1.0 if trial.recipe.rate == 3.0**-3 else 0.5, rotation=0.5)

    lab = MadeLab(Archive(tmp_path), "full", only=("c10-cnn1",), make=make)
    verdict = FIG2.run(lab).verdicts[2]
    assert verdict.here.startswith("best at Layca 3^-3, +0.0 ± 0.7 points over Layca 3^-3")
    assert verdict.holds is None
