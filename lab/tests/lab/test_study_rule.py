import json
from itertools import permutations
from math import nan, sqrt

import numpy as np
import pytest

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.rotation.rule import FITS, STUDIES, configurations, correlation
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.tasks import task

[STUDY] = STUDIES


def kendall(x, y):
    """Tau-b pair by pair."""
    pairs = [
        (np.sign(a - c), np.sign(b - d))
        for i, (a, b) in enumerate(zip(x, y, strict=True))
        for c, d in zip(x[:i], y[:i], strict=True)
    ]
    agree = sum(a * b for a, b in pairs)
    return agree / sqrt(sum(a != 0 for a, _ in pairs) * sum(b != 0 for _, b in pairs))


def spearman(x, y):
    """Pearson's correlation of ranks, ties sharing theirs."""
    ranks = [[sum(b < a for b in z) + (sum(b == a for b in z) + 1) / 2 for a in z] for z in (x, y)]
    return np.corrcoef(*ranks)[0, 1]


@pytest.fixture(scope="module")
def report(lab):
    return STUDY.run(lab)


@pytest.fixture(scope="module")
def raw(lab, report):
    """The archive's own results, by recipe."""
    return {
        trial.recipe.name: json.loads((lab.archive.folder(lab.trial(trial)) / "result.json").read_text())["result"]
        for trial in STUDY.trials(lab)
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ties", [False, True])
def test_correlations_are_those_of_the_definitions(seed, ties):
    generator = np.random.default_rng(seed)
    x, y = generator.normal(size=(2, 12))
    y += x
    if ties:
        x, y = np.round(x), np.round(y)
    found = correlation(list(x), list(y))
    assert found.count == 12
    assert found.kendall == pytest.approx(kendall(list(x), list(y)))
    assert found.spearman == pytest.approx(spearman(list(x), list(y)))


def test_kendalls_p_value_is_the_share_of_orders_that_agree_as_well():
    x, y = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 3.0, 2.0, 4.0, 6.0, 5.0]
    taus = [kendall(x, list(order)) for order in permutations(y)]
    as_good = np.mean([abs(tau) >= kendall(x, y) - 1e-12 for tau in taus])
    assert correlation(x, y).kendall_p == pytest.approx(as_good)


@pytest.mark.parametrize(("x", "y"), [([], []), ([0.1, 0.2], [1.0, 2.0]), ([0.1] * 4, [1.0, 2.0, 3.0, 4.0])])
def test_too_few_or_equal_values_have_no_correlation_and_no_warning(x, y):
    found = correlation(x, y)
    assert found.count == len(x)
    assert np.isnan([found.kendall, found.kendall_p, found.spearman, found.spearman_p]).all()


def test_every_configuration_is_listed_with_whether_it_counts(raw, report):
    table = report.tables[1]
    assert {row[0] for row in table.rows} == set(raw)
    assert len(table.rows) == len(raw) == 14
    for name, _, mean, least, test, told, train, fits, learned in table.rows:
        result = raw[name]
        assert (mean, least) == pytest.approx((np.mean(result["rotation"][-1]), min(result["rotation"][-1])))
        assert (test, train) == (f"{100 * result['test_accuracy']:.2f}", pytest.approx(100 * result["train_accuracy"]))
        assert told is None
        assert fits == ("yes" if result["train_accuracy"] >= 0.99 else "no")
        assert learned == ("yes" if result["train_accuracy"] >= 0.90 else "no")
    assert [row[4] for row in table.rows] == sorted((row[4] for row in table.rows), reverse=True)


@pytest.mark.parametrize(
    ("words", "threshold"), [("train ≥ 99 %", 0.99), ("train ≥ 90 %", 0.90), ("all that did not diverge", 0.0)]
)
def test_the_correlations_are_those_of_the_archives_results(raw, report, words, threshold):
    counted = [one for one in raw.values() if one["train_accuracy"] >= threshold]
    tests = [one["test_accuracy"] for one in counted]
    for which, pick in (("mean", np.mean), ("least", min)):
        rotations = [float(pick(one["rotation"][-1])) for one in counted]
        [row] = [row for row in report.tables[0].rows if row[1:3] == (words, which)]
        assert row[3] == len(counted)
        assert (row[4], row[6]) == pytest.approx((kendall(rotations, tests), spearman(rotations, tests)))


def test_the_slowest_configuration_does_not_fit_the_digits_and_does_not_count(raw, report):
    assert raw["Layca 3^-7"]["train_accuracy"] < 0.9
    assert report.tables[0].rows[0][3] == 13
    assert "13 of 14 count" in report.verdicts[0].here


def test_on_digits_larger_rotations_go_with_better_generalisation(report):
    assert [verdict.word for verdict in report.verdicts] == ["shown", "shown", "undecided"]


def test_the_figure_has_a_point_a_configuration_open_where_it_does_not_count(raw, report):
    for ax, pick in zip(report.figures["figure"].axes, (np.mean, min), strict=True):
        drawn = {(float(line.get_xdata()[0]), float(line.get_ydata()[0])): line for line in ax.get_lines()}
        assert len(ax.get_lines()) == len(raw)
        for result in raw.values():
            place = (float(pick(result["rotation"][-1])), 100 * result["test_accuracy"])
            line = next(line for known, line in drawn.items() if known == pytest.approx(place))
            assert (line.get_markerfacecolor() == "none") == (result["train_accuracy"] < 0.99)


@pytest.mark.parametrize(
    ("name", "count", "epochs"),
    [
        ("c10-cnn1", 29, {"SGD + L2": 100, "adaptive": 100}),
        ("c100-resnet", 29, {"SGD + L2": 100, "adaptive": 100}),
        ("tiny-cnn", 29, {"SGD + L2": 100, "adaptive": 80}),
        ("c10-cnn2", 13, {"SGD + L2": 250, "adaptive": 250}),
        ("c100-wrn", 13, {"SGD + L2": 200, "adaptive": 200}),
    ],
)
def test_at_full_scale_all_that_the_papers_train_is_there_with_their_numbers(tmp_path, name, count, epochs):
    found = configurations(Lab(Archive(tmp_path), "full"), task(name))
    assert len(found) == len({(one.task, one.recipe) for one in found}) == count
    assert {one.recipe.rate for one in found if one.kind == "SGD"} == {3.0**power for power in (-4, -3, -2, -1, 0)}
    for one in found:
        assert one.task.schedule.epochs == epochs.get(one.kind, task(name).schedule.epochs)
        assert (one.recipe.weight_decay > 0) == (one.kind == "SGD + L2" or one.recipe.name.endswith("+ L2"))
    assert any(one.kind == "LARS" for one in found) == (count == 29)
    # Figure 9 leaves out what did not reach 90 % on the training set.
    without = {one.recipe.name for one in found if one.told is None}
    assert without <= {"Layca 3^-3, alpha -0.8"}


def test_the_papers_numbers_stand_beside_the_right_configurations(tmp_path):
    found = configurations(Lab(Archive(tmp_path), "full"), task("c100-resnet"))
    told = {one.recipe.name: one.told for one in found}
    expected = {
        "Layca 3^-3": 59.81,
        "SGD 3^-1": 45.53,
        "SGD + L2": 60.11,
        "Adam": 47.82,
        "Adam-Layca 3^-5": 58.16,
        "LARS 3^-3": 59.92,
    }
    assert {name: told[name] for name in expected} == {name: pytest.approx(value) for name, value in expected.items()}


def test_thresholds_and_divergence_decide_what_counts_and_the_verdict_needs_significance(tmp_path):
    """Made-up results in perfect order; one network fits 98 %, one diverges, and in one task nearly all fail."""
    only = ("c10-cnn2", "c100-wrn")
    lab = Lab(Archive(tmp_path), "full", engine="serial", precision="float32", only=only)
    for place, trial in enumerate(STUDY.trials(lab)):
        share = (place % 13 + 1) / 20
        train = 0.98 if place == 0 else 0.5 if place >= 13 + 3 else 1.0
        rotation = nan if place == 1 else share
        result = Result(train, share, loss=[0.1], layers=["a", "b"], rotation=[[0.0, 0.0], [rotation, rotation]])
        folder = lab.archive.folder(trial)
        folder.mkdir(parents=True)
        result.write(folder / "result.json", trial.description)
    report = STUDY.conclude(lab)
    counts = {(row[0], row[1]): row[3] for row in report.tables[0].rows}
    assert counts == {
        ("c10-cnn2", "train ≥ 99 %"): 11,
        ("c10-cnn2", "train ≥ 90 %"): 12,
        ("c10-cnn2", "all that did not diverge"): 12,
        ("c100-wrn", "train ≥ 99 %"): 3,
        ("c100-wrn", "train ≥ 90 %"): 3,
        ("c100-wrn", "all that did not diverge"): 13,
    }
    assert all(row[4] == pytest.approx(1.0) for row in report.tables[0].rows)
    assert [len(table.rows) for table in report.tables[1:]] == [13, 13]
    verdicts = [verdict.word for verdict in report.verdicts]
    undecided = "undecided"
    assert verdicts == ["shown", "shown", "not shown", undecided, undecided, "not shown", undecided]


def test_saving_writes_the_figure_the_page_and_the_threshold(lab, report, tmp_path):
    names = {path.name for path in STUDY.save(lab, report, tmp_path)}
    assert names >= {"figure.png", "README.md", "result.json"}
    numbers = json.loads((tmp_path / "rotation/rule/result.json").read_text())["numbers"]
    assert numbers["fits from"] == FITS == 99.0
    assert sum(cell["counted"] for cell in numbers["cells"]) == 13
    assert len(numbers["correlations"]["digits"]) == 6
