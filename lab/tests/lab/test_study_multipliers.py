import json
from math import exp, log

import pytest

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.rotation.multipliers import SIZES, STUDIES, turned
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.tasks import task


def equation_1(alpha, layers):
    """The paper's formula, layer by layer, through logarithms."""
    last = layers - 1
    if alpha > 0:
        return [exp(5 * (last - layer) / last * log(1 - alpha)) for layer in range(layers)]
    return [exp(5 * layer / last * log(1 + alpha)) for layer in range(layers)]


@pytest.fixture(scope="module")
def report(lab):
    return STUDIES[0].run(lab)


@pytest.mark.parametrize("alpha", [-0.8, -0.6, 0.0, 0.1, 0.6, 0.8])
def test_a_step_turns_the_layers_of_a_deep_network_by_equation_1(alpha):
    assert turned(task("digits-one-layer"), alpha) == pytest.approx(equation_1(alpha, 11), rel=1e-9)


@pytest.mark.parametrize("kind", ["equation", "one step"])
def test_the_report_holds_equation_1_for_every_alpha(report, kind):
    assert sorted(report.numbers[kind]) == sorted({sign * size for size in SIZES for sign in (-1, 1)})
    for alpha, line in report.numbers[kind].items():
        assert line == pytest.approx(equation_1(alpha, 7), rel=1e-9)


def test_the_table_has_the_slowest_layers(report):
    [table] = report.tables
    for alpha, here, paper in table.rows:
        slowest = 100 * min(equation_1(float(alpha), 7))
        assert (here, paper) == (pytest.approx(slowest, rel=1e-9), pytest.approx(slowest, rel=1e-9))


def test_the_figure_has_the_negative_half_on_the_left_and_the_positive_on_the_right(report):
    left, right = report.figures["figure"].axes
    for ax, sign in ((left, -1), (right, 1)):
        lines, dots = ax.get_lines()[::2], ax.get_lines()[1::2]
        for size, line, dot in zip(SIZES, lines, dots, strict=True):
            expected = equation_1(sign * size, 7)
            assert line.get_label() == f"{size:g}"
            assert list(line.get_xdata()) == [layer / 7 for layer in range(7)]
            assert list(line.get_ydata()) == pytest.approx(expected)
            assert list(dot.get_ydata()) == pytest.approx(expected)


def test_all_that_the_papers_say_is_shown(report):
    assert [verdict.word for verdict in report.verdicts] == ["shown"] * 4


def test_both_papers_figures_train_nothing_at_any_scale(tmp_path):
    assert [study.name for study in STUDIES] == ["rotation/fig13", "speed/fig12"]
    for scale in ("smoke", "small", "full"):
        assert all(list(study.trials(Lab(Archive(tmp_path), scale))) == [] for study in STUDIES)


def test_saving_writes_the_figure_the_page_and_the_numbers(lab, report, tmp_path):
    written = STUDIES[1].save(lab, report, tmp_path)
    assert {path.name for path in written} >= {"figure.png", "README.md", "result.json"}
    kept = json.loads((tmp_path / "speed/fig12/result.json").read_text())
    assert kept["numbers"]["one step"]["0.6"] == pytest.approx(equation_1(0.6, 7), rel=1e-5)
