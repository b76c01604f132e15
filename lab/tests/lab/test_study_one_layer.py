from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.rotation.one_layer import (
    FIGURE1,
    PLANS,
    STUDIES,
    Outcome,
    _as_told,
    _course,
    _verdicts,
    feedback,
    figure1,
    follow,
    silhouette,
    task_of,
    trained,
    trials,
)
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.trial import Trial
from lab.pretended import full_lab, raw

FIG1, FIG8 = STUDIES


@pytest.fixture(scope="module")
def reports(lab):
    return {study.name: study.run(lab) for study in STUDIES}


def verdicts(report):
    return {verdict.says: verdict.holds for verdict in report.verdicts}


# What is trained at full scale


def test_each_of_ten_layers_is_trained_ten_times_as_the_protocol_says():
    its = FIG1.trials(Lab(Archive("nowhere"), "full"))
    assert sorted((trial.seed, trial.recipe.only) for trial in its) == [(r, i) for r in range(10) for i in range(10)]
    for trial in its:
        assert (trial.recipe.optimizer, trial.recipe.rate, trial.recipe.momentum) == ("sgd", 10.0, 0.0)
        assert (trial.task.model, trial.schedule.cuts) == ("mlp-11x784", ())
        assert trial.schedule.epochs * trial.schedule.steps(100) == 4000
        assert (trial.task.source.name, trial.task.source.per_class) == ("mnist", 10)
        assert set(trial.schedule.batches(100)) == {100}  # all examples in one batch
        assert dict(trial.task.options)["init"] == "glorot_uniform"


def test_a_repetition_draws_both_examples_and_network_anew():
    its = FIG1.trials(Lab(Archive("nowhere"), "full"))
    assert all(trial.task.source.seed == trial.seed for trial in its)


def test_figure_8_adds_the_same_with_orthogonal_starts():
    lab = Lab(Archive("nowhere"), "full")
    both, glorot = FIG8.trials(lab), FIG1.trials(lab)
    assert [trial.key for trial in both[:100]] == [trial.key for trial in glorot]
    assert {dict(trial.task.options)["init"] for trial in both[100:]} == {"orthogonal"}
    assert len({trial.key for trial in both}) == 200


def test_the_feedback_is_looked_at_as_the_protocol_says():
    plan = PLANS["full"]
    assert (plan.feedback_epochs, plan.samples) == (500, 5000)


# Feedback and its silhouette


def test_feedback_is_the_gradient_of_each_example_by_the_layers_output():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    x, y = torch.randn(7, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    found = feedback(model, 2, x, y)
    for example in range(7):
        h = model[:3](x[example : example + 1]).detach().requires_grad_(True)
        F.cross_entropy(model[3:](h), y[example : example + 1]).backward()
        torch.testing.assert_close(found[example], h.grad[0])


def test_feedback_leaves_no_gradients_behind():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    feedback(model, 1, torch.randn(5, 4), torch.zeros(5, dtype=torch.int64))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_silhouette_is_what_loops_over_examples_and_classes_give():
    generator = torch.Generator().manual_seed(0)
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 2, 0])
    vectors = torch.randn(11, 6, generator=generator) + 2 * F.one_hot(y, 6)
    rows = vectors.double().tolist()

    def apart(a, b):
        dot = sum(p * q for p, q in zip(a, b, strict=True))
        return 1 - dot / sqrt(sum(p * p for p in a) * sum(q * q for q in b))

    total = 0.0
    for i, row in enumerate(rows):
        means = {}
        for label in range(3):
            others = [apart(row, other) for j, other in enumerate(rows) if j != i and y[j] == label]
            means[label] = sum(others) / len(others)
        inside = means.pop(int(y[i]))
        outside = min(means.values())
        total += (outside - inside) / max(inside, outside)
    assert silhouette(vectors, y) == pytest.approx(total / len(rows))


def test_following_a_training_measures_it_and_does_not_change_it(lab):
    once = replace(task_of(lab), schedule=replace(task_of(lab).schedule, epochs=6, passes=1))
    trial = Trial(once, trained(1.0, 0))
    split = trial.task.source.load()
    course = follow(trial, split, every=3, samples=100)
    assert course.epochs == [0, 3, 6]
    model, x, y = trial.network(), split.x_test[:100], split.y_test[:100]
    assert course.silhouettes[0] == silhouette(feedback(model, 2, x, y), y)
    # The same steps, by hand: one batch of all examples, the first layer alone.
    optimizer = torch.optim.SGD(model[1].parameters(), lr=1.0)
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(model(split.x_train), split.y_train).backward()
        optimizer.step()
    assert course.silhouettes[-1] == pytest.approx(silhouette(feedback(model, 2, x, y), y), abs=1e-4)
    right = (model(split.x_test).argmax(1) == split.y_test).double().mean()
    assert course.result.test_accuracy == pytest.approx(float(right), abs=2e-3)


# The smoke test


def test_one_layer_alone_turns(lab, reports):
    for trial in FIG8.trials(lab):
        turned = raw(lab, trial)["rotation"][-1]
        moved = [place for place, rotation in enumerate(turned) if rotation > 0]
        assert moved == [trial.recipe.only]


def test_the_table_is_the_mean_over_repetitions_of_what_the_archive_holds(lab, reports):
    plan = PLANS[lab.scale]
    for row, layer in zip(reports["speed/fig1"].tables[0].rows, plan.layers, strict=True):
        its = [raw(lab, trial) for trial in FIG1.trials(lab) if trial.recipe.only == layer]
        tests = [100 * one["test_accuracy"] for one in its]
        mean = sum(tests) / len(tests)
        deviation = sqrt(sum((test - mean) ** 2 for test in tests) / (len(tests) - 1))
        assert len(its) == plan.repetitions
        assert row[:3] == (f"layer {layer}", pytest.approx(mean), pytest.approx(deviation))
        assert row[4] == pytest.approx(100 * sum(one["train_accuracy"] for one in its) / len(its))


def test_the_orthogonal_column_is_of_orthogonal_networks(lab, reports):
    plan = PLANS[lab.scale]
    for row, layer in zip(reports["speed/fig8"].tables[0].rows, plan.layers, strict=True):
        its = [t for t in trials(lab, "orthogonal") if t.recipe.only == layer]
        weight = its[0].network()[3].weight
        torch.testing.assert_close(weight @ weight.T, torch.eye(len(weight)), rtol=0, atol=1e-5)
        assert row[3] == pytest.approx(100 * np.mean([raw(lab, trial)["test_accuracy"] for trial in its]))


def test_any_layer_learns_the_digits_and_the_first_generalizes_best(reports):
    assert all(verdicts(reports["speed/fig1"]).values())


def test_orthogonal_starts_narrow_the_gap_and_training_betters_the_feedback(reports):
    held = verdicts(reports["speed/fig8"])
    assert held["and slightly reduces the gap between first and last layers"]
    assert held["the feedback of the first layer tells classes apart better as this layer is trained"]
    course = reports["speed/fig8"].numbers["silhouette"]
    shown = dict(row[:2] for row in reports["speed/fig8"].tables[1].rows)
    for epoch in (0, 50):
        assert shown[f"silhouette after epoch {epoch}"] == course["silhouettes"][course["epochs"].index(epoch)]
    assert shown["test accuracy at the end, %"] == course["test"]


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_a_report_is_saved_whole(lab, reports, study, tmp_path):
    written = {path.name for path in study.save(lab, reports[study.name], tmp_path)}
    assert written == {"figure.png", "figure.svg", "README.md", "result.json"}


@pytest.mark.parametrize(
    ("gains", "holds"), [((4.0, 4.0), True), ((4.0, 0.0), None), ((4.0, -0.5), None), ((4.0, -4.0), False)]
)
@pytest.mark.usefixtures("reports")
def test_every_layer_gains_only_if_each_does_beyond_chance_on_the_same_examples(lab, gains, holds):
    """Repetitions differ by tens of points, and their gains by a point."""
    rng = np.random.default_rng(0)
    test = rng.normal(60.0, 20.0, (10, 2))
    glorot = Outcome(test, np.full((10, 2), 100.0))
    orthogonal = Outcome(test + np.array(gains) + rng.normal(0.0, 1.0, (10, 2)), np.full((10, 2), 100.0))
    of_all = _verdicts(glorot, orthogonal, _course(lab))[1]
    assert of_all.says == "orthogonal initialization raises the test accuracy of every layer"
    assert of_all.holds is holds


@pytest.mark.parametrize(("off", "spread", "holds"), [(0.1, 0.5, True), (0.1, 3.0, None), (2.5, 0.5, False)])
def test_accuracies_are_the_papers_only_if_chance_does_not_reach_a_point(tmp_path, off, spread, holds):
    sides = spread * np.linspace(-1.5, 1.5, 10)[:, None]
    found = Outcome(np.array(FIGURE1) + off + sides, np.full((10, 10), 100.0))
    [verdict] = _as_told(Lab(Archive(tmp_path), "full"), found)
    assert verdict.holds is holds


# A report at full scale, of made-up results


def test_at_full_scale_the_papers_ten_numbers_stand_beside(tmp_path):
    lab, made = full_lab(tmp_path, FIG1.trials)
    report = figure1(lab)
    assert [row[3] for row in report.tables[0].rows] == list(FIGURE1)
    assert (FIGURE1[0], FIGURE1[9]) == (74.47, 57.52)
    first = [made[lab.trial(trial).key].test_accuracy for trial in FIG1.trials(lab) if trial.recipe.only == 0]
    assert report.tables[0].rows[0][1] == pytest.approx(100 * np.mean(first))
    assert [text.get_text() for text in report.figures["figure"].axes[0].get_legend().get_texts()] == ["paper", "here"]


def test_a_gap_is_from_the_first_layer_to_the_last():
    assert Outcome(np.array([[80.0, 70.0], [90.0, 60.0]]), np.full((2, 2), 100.0)).gap == 20.0
