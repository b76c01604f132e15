import json

import pytest
import torch

from gyroscope.layers.layer import layers
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.cells import Cell
from gyroscope_lab.papers.rotation.rescaled import BLOCK, LAYCA, SGD, STUDIES, recipe, regret
from gyroscope_lab.papers.rotation.tuned_rates import best_by_validation
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.trial import Trial
from lab.made_lab import BriefLab, printed

[STUDY] = STUDIES


@pytest.fixture(scope="module")
def lab(lab):
    """Factors and rates that no other study has, which five epochs tell apart."""
    return BriefLab(lab.archive, lab.scale, engine=lab.engine, epochs=5)


@pytest.fixture(scope="module")
def report(lab):
    return STUDY.run(lab)


@pytest.fixture(scope="module")
def raw(lab, report):
    """The archive's own results by method, log3 f and log3 of the rate."""
    found = {}
    for trial in STUDY.trials(lab):
        result = json.loads((lab.archive.folder(lab.trial(trial)) / "result.json").read_text())["result"]
        method = {"layca": LAYCA, "block": BLOCK, None: SGD}[trial.recipe.control]
        power = next(p for p in range(-9, 9) if trial.recipe.rate == 3.0**p)
        found[method, {1.0: 0, 9.0: 2}[trial.recipe.scale], power] = result
    return found


def made(tests, validations=None):
    """Cells with the given test accuracies, by power."""
    validations = validations or tests
    return {
        power: Cell(
            task("digits"),
            Recipe(f"at 3^{power}", 3.0**power),
            (Result(1.0, tests[power], loss=[0.0], layers=[], rotation=[[]], validation=[0.0, validations[power]]),),
        )
        for power in tests
    }


def test_the_best_rate_is_chosen_by_validation_and_of_equals_the_lowest():
    assert best_by_validation(made({-3: 0.8, -2: 0.9, -1: 0.7})) == -2
    assert best_by_validation(made({-3: 0.8, -2: 0.9, -1: 0.7}, {-3: 0.1, -2: 0.2, -1: 0.3})) == -1
    assert best_by_validation(made({-1: 0.5, -3: 0.5})) == -3


def test_the_regret_is_the_most_that_another_factors_best_rate_costs():
    lines = {0: made({-3: 0.90, -1: 0.80}), 2: made({-3: 0.65, -1: 0.85})}
    assert regret(lines) == pytest.approx(20.0)
    assert regret({0: made({-3: 0.9, -1: 0.8}), 2: made({-3: 0.6, -1: 0.3})}) == 0.0


@pytest.mark.parametrize("method", [LAYCA, BLOCK, SGD])
def test_the_networks_start_with_every_layer_multiplied_by_the_factor(method):
    plain = layers(Trial(task("digits"), recipe(task("digits"), method, -1, 0)).network())
    scaled = layers(Trial(task("digits"), recipe(task("digits"), method, -1, 2)).network())
    for a, b in zip(plain, scaled, strict=True):
        assert torch.equal(b.parameter, 9 * a.parameter)


def test_a_step_of_layca_turns_by_the_rate_and_one_of_block_normalized_sgd_is_as_long_as_it():
    for factor in (0, 2):
        for method in (LAYCA, BLOCK):
            chosen = recipe(task("digits"), method, -1, factor)
            model = Trial(task("digits"), chosen).network().double()
            optimizer = chosen.make(model)
            its = [layer.parameter for layer in layers(model)]
            before = [parameter.detach().clone() for parameter in its]
            generator = torch.Generator().manual_seed(1)
            for parameter in its:
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            optimizer.step()
            for old, new in zip(before, its, strict=True):
                if method == BLOCK:
                    assert (new - old).norm().item() == pytest.approx(3.0**-1)
                else:
                    cosine = (old * new).sum() / (old.norm() * new.norm())
                    assert torch.tan(torch.acos(cosine)).item() == pytest.approx(3.0**-1)


def test_the_table_has_the_archives_best_rates(raw, report):
    [table] = report.tables
    assert len(table.rows) == 6
    for method, factor, rate, told, test, train in table.rows:
        tests = {p: one["test_accuracy"] for (m, f, p), one in raw.items() if (m, f"3^{f}") == (method, factor)}
        # Digits hold nothing out, so the best rate is that of the best test accuracy.
        power = sorted(tests, key=lambda p: (-tests[p], p))[0]
        chosen = raw[method, int(factor[2:]), power]
        assert rate == f"3^{power}"
        assert (test, train) == (printed(chosen), pytest.approx(100 * chosen["train_accuracy"]))
        assert told == ("3^-3" if method == LAYCA else None)


def test_on_digits_the_best_rate_of_layca_stays_and_that_of_block_normalized_sgd_moves(raw, report):
    tests = {key: one["test_accuracy"] for key, one in raw.items()}
    for factor in (0, 2):
        assert tests[LAYCA, factor, -3] > max(tests[LAYCA, factor, -5], tests[LAYCA, factor, -1])
    assert tests[BLOCK, 0, -1] > tests[BLOCK, 0, 1]
    assert tests[BLOCK, 2, 1] > tests[BLOCK, 2, -1]
    cost = 100 * max(tests[BLOCK, 2, 1] - tests[BLOCK, 2, -1], tests[BLOCK, 0, -1] - tests[BLOCK, 0, 1])
    assert f"up to 0.0 and {cost:.1f} points" in report.verdicts[-1].here
    assert [verdict.word for verdict in report.verdicts] == ["shown"] * 3


def test_the_figure_has_a_panel_a_method_tests_full_and_trainings_dotted(raw, report):
    for ax, method in zip(report.figures["figure"].axes, (LAYCA, BLOCK, SGD), strict=True):
        assert ax.get_title() == method
        for factor, full, dotted in zip((0, 2), ax.get_lines()[::2], ax.get_lines()[1::2], strict=True):
            powers = sorted(p for m, f, p in raw if (m, f) == (method, factor))
            for line, style, key in ((full, "-", "test_accuracy"), (dotted, ":", "train_accuracy")):
                assert line.get_linestyle() == style
                assert list(line.get_xdata()) == [3.0**power for power in powers]
                assert list(line.get_ydata()) == pytest.approx([100 * raw[method, factor, p][key] for p in powers])


def test_at_full_scale_ten_rates_are_trained_for_every_method_and_factor(tmp_path):
    listed = STUDY.trials(Lab(Archive(tmp_path), "full"))
    expected = {
        (control, 3.0**power, 3.0**factor)
        for control in ("layca", "block", None)
        for power in range(-7, 3)
        for factor in (-1, 0, 1)
    }
    assert {(trial.recipe.control, trial.recipe.rate, trial.recipe.scale) for trial in listed} == expected
    assert len({trial.key for trial in listed}) == len(listed) == 90
    for trial in listed:
        assert (trial.task.model, trial.task.source.name) == ("c10-cnn1-light", "cifar-10")
        assert (trial.schedule.epochs, trial.schedule.milestones, trial.schedule.factor) == (100, [80, 90, 97], 5.0)
        assert (trial.recipe.optimizer, trial.recipe.momentum, trial.recipe.weight_decay) == ("sgd", 0.0, 0.0)


def test_tasks_that_the_study_does_not_have_are_refused(tmp_path):
    with pytest.raises(LabError, match="c10-cnn1-light"):
        STUDY.trials(Lab(Archive(tmp_path), "full", only=("tiny-cnn",)))


def test_saving_writes_the_figure_the_page_and_the_numbers(lab, raw, report, tmp_path):
    names = {path.name for path in STUDY.save(lab, report, tmp_path)}
    assert names >= {"figure.png", "README.md", "result.json"}
    kept = json.loads((tmp_path / "speed/fig7/result.json").read_text())
    tests = [cell["test"] for cell in kept["numbers"]["cells"]]
    assert tests == pytest.approx([100 * one["test_accuracy"] for one in raw.values()])
