from math import log10, pi

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from gyroscope.layers.layer import layers
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.conditioning.gradient_explosion import ITERATIONS, STUDIES, Course, _draw, _verdicts, trials
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.feed import Feed

[A10] = STUDIES


@pytest.fixture(scope="module")
def report(lab):
    return A10.run(lab)


def first_batch(trial):
    split, schedule = trial.task.source.load(), trial.schedule
    feed = Feed(
        split, batch=schedule.batch, augmentation=None, seed=trial.seed, device=torch.device("cpu"),
        passes=schedule.passes,
    )  # fmt: skip
    feed.shuffle()
    return feed.take(schedule.batch)


def rows_of(values):
    """One row per sample; for convolutions, one per position."""
    return values.flatten(2).movedim(1, 2).flatten(0, 1) if values.ndim == 4 else values


def literal(trial, chosen):
    """λmax(Σx)·λmax(Σ∇h) and σmax(W) of layers before the first step, from hooks on these layers."""
    model, (x, y) = trial.network(), first_batch(trial)
    modules, seen = [layer.module for layer in layers(model)], {}

    def keep(module, given, output):
        output.retain_grad()
        seen[module] = given[0].detach(), output

    for place in chosen:
        modules[place].register_forward_hook(keep)
    F.cross_entropy(model.train()(x), y).backward()
    found = []
    for place in chosen:
        inputs, outputs = seen[modules[place]]
        x_rows, g_rows = rows_of(inputs).double(), rows_of(outputs.grad).double()
        sigma_x, sigma_g = x_rows.T @ x_rows / len(x_rows), len(g_rows) * (g_rows.T @ g_rows)
        largest = [float(torch.linalg.eigvalsh(sigma)[-1]) for sigma in (sigma_x, sigma_g)]
        weight = modules[place].weight.detach().flatten(1)
        found.append((largest[0] * largest[1], float(torch.linalg.matrix_norm(weight, 2))))
    return np.array(found).T


# What is trained


def test_eight_steps_of_a_perceptron_of_100_layers_and_of_a_vgg_of_110():
    deep, convolutional = A10.trials(Lab(Archive("nowhere"), "full"))
    assert (deep.task.model, deep.task.source.name, deep.schedule.batch) == ("mlp-100x256", "mnist", 1024)
    told = convolutional.task
    assert (told.model, told.source.name, told.schedule.batch) == ("vgg-110", "cifar-10", 128)
    for trial in (deep, convolutional):
        assert dict(trial.task.options)["batch_norm"] is True
        sizes = list(trial.schedule.batches(10 * trial.task.source.per_class))
        assert sizes == [trial.schedule.batch] * 8
        assert (trial.schedule.epochs, trial.every, trial.conditions) == (1, 1, 1)


# The smoke test


def test_every_iteration_of_every_layer_is_there(lab, report):
    for trial, kept in zip(trials(lab), report.numbers["networks"], strict=True):
        count = len(layers(trial.network()))
        for name in ("lambda_f", "weight_spectral", "domination"):
            values = np.array(kept[name], dtype=float)
            assert values.shape == (ITERATIONS, count)
            assert (values > 0).all()


@pytest.mark.parametrize("which", [0, 1], ids=["perceptron", "vgg"])
def test_iteration_0_is_what_hooks_on_the_layers_see(lab, report, which):
    trial, kept = trials(lab)[which], report.numbers["networks"][which]
    chosen = [0, 1, 20, len(kept["lambda_f"][0]) - 1]
    curvature, weight = literal(trial, chosen)
    assert [kept["lambda_f"][0][place] for place in chosen] == pytest.approx(curvature.tolist(), rel=1e-3)
    assert [kept["weight_spectral"][0][place] for place in chosen] == pytest.approx(weight.tolist(), rel=1e-5)


def test_everything_the_paper_says_of_the_first_iterations_shows(report):
    assert len(report.verdicts) == 8
    assert [verdict.says for verdict in report.verdicts if verdict.holds is not True] == []


def test_gradients_grow_by_about_what_a_rectifier_and_its_normalization_make_of_them(report):
    # Var[ReLU(z)] = (1 − 1/π)/2 of a standard normal z: normalizing divides by it what the rectifier halves.
    for kept in report.numbers["networks"]:
        assert kept["slope"] == pytest.approx(log10(pi / (pi - 1)), rel=0.15)


def test_the_first_step_is_what_the_weights_of_the_first_layer_become(lab, report):
    kept = report.numbers["networks"][0]
    weights, ratios = np.array(kept["weight_spectral"]), np.array(kept["domination"])
    step = kept["rate"] * ratios[0] * weights[0]  # η σmax(∂L/∂W)
    assert weights[1, 0] == pytest.approx(step[0], rel=1e-2)


def test_the_table_has_medians_over_a_quarter_of_the_layers(report):
    for table, kept in zip(report.tables, report.numbers["networks"], strict=True):
        assert [row[0] for row in table.rows] == list(range(ITERATIONS))
        assert {row[3] for row in table.rows} == {None}
        values = np.array(kept["lambda_f"])[2]
        quarter = len(values) // 4
        told = float(table.rows[2][1]), float(table.rows[2][2])
        assert told == pytest.approx((np.median(values[:quarter]), np.median(values[-quarter:])), rel=5e-3)


def test_a_report_is_saved_whole_with_a_line_for_every_iteration(lab, report, tmp_path):
    written = {path.name for path in A10.save(lab, report, tmp_path)}
    assert written == {"figure.png", "figure.svg", "README.md", "result.json"}
    axes = report.figures["figure"].axes
    assert len(axes) == 6
    lines = [line for line in axes[0].get_lines() if line.get_label().startswith("Iter")]
    assert [line.get_label() for line in lines] == [f"Iter{number}" for number in range(8)]
    assert lines[3].get_ydata().tolist() == report.numbers["networks"][0]["lambda_f"][3]


# Made-up courses


def course(*, explodes, rate=1.0, grows=True, shrinks=True):
    """Sixteen layers over three iterations."""
    depth = np.arange(16.0)
    first = 10.0 ** (-depth if explodes else 0 * depth)
    weight = np.stack([np.ones(16), 1 + 1e6 * first, 1 + 1e6 * first]) if grows else np.ones((3, 16))
    curvature = np.stack([first, *([1e-3 * first if shrinks else first] * 2)])
    domination = np.stack([1e3 * first, *([1e-3 * first if shrinks else 1e3 * first] * 2)])
    return Course("made up", rate, curvature, weight, domination)


def verdicts(one):
    return [verdict.holds for verdict in _verdicts(one, many=False)]


def test_what_does_not_explode_grow_or_shrink_is_told_of():
    assert verdicts(course(explodes=True)) == [True] * 4
    assert verdicts(course(explodes=False))[0] is False
    assert verdicts(course(explodes=True, grows=False))[1] is False
    assert verdicts(course(explodes=True, shrinks=False))[2:] == [False, False]


def test_a_network_whose_first_step_is_small_cannot_tell_what_a_large_one_does():
    assert verdicts(course(explodes=True, rate=1e-3)) == [True, None, None, None]


def test_the_legend_of_a_figure_of_one_network_fits_into_it():
    eight = np.ones((8, 16))
    figure = _draw([Course("made up", 1.0, eight, eight, eight)])
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= box.x0
    assert box.x1 <= figure.bbox.x1
