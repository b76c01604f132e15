import json
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from gyroscope.theory.adaptive import adam, rmsprop
from gyroscope.theory.decay import sgd
from gyroscope_lab import models
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import recorded
from gyroscope_lab.papers.dynamics.batch_size import (
    PLANS,
    RECIPES,
    STUDIES,
    points,
    steps_of,
    task_of,
    trials,
    update_lengths,
    verdicts,
)
from gyroscope_lab.training.archive import Archive
from lab.made_lab import raw

[BATCHES] = STUDIES


@pytest.fixture(scope="module")
def report(lab):
    return BATCHES.run(lab)


@pytest.mark.parametrize("scale", PLANS)
def test_every_training_takes_as_many_steps_whatever_its_batches(scale):
    plan = PLANS[scale]
    its = BATCHES.trials(Lab(Archive("nowhere"), scale))
    examples = 10 * plan.per_class
    assert {trial.schedule.steps(examples) * trial.schedule.epochs for trial in its} == {plan.steps}
    assert all(set(trial.schedule.batches(examples)) == {trial.schedule.batch} for trial in its)
    assert {(t.recipe.name, t.schedule.batch, t.seed) for t in its} == {
        (recipe.name, size, seed) for recipe in RECIPES for size in plan.sizes for seed in range(plan.seeds)
    }
    assert {trial.every for trial in its} == {1}
    assert len({(trial.recipe.rate, trial.recipe.optimizer) for trial in its}) == len(RECIPES)  # not by size


def test_the_law_is_that_of_gradients_taken_one_by_one(lab):
    plan = PLANS["smoke"]
    task = task_of(lab, 16)
    split = task.source.load()
    order = torch.randperm(160, generator=torch.Generator().manual_seed(0))
    x, y = split.x_train[order].double(), split.y_train[order]
    model = models.make(task.model, seed=0, **dict(task.options)).double()
    rows = []
    for i in range(160):
        gradients = torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in gradients]))
    g = torch.stack(rows)
    squares = [g.var(0, correction=0) / size + g.mean(0).square() for size in plan.sizes]
    found = points(lab)["at the start"]
    assert found["gain"]["predicted"][-1] == pytest.approx((squares[0] / squares[1]).sqrt().nanmedian().item())
    assert found["law"]["exponent"] == pytest.approx(-1, abs=0.1)
    share = found["law"]["measured"][1] / found["law"]["predicted"][1]
    assert share == pytest.approx(1, abs=0.1)


def test_steps_at_held_weights_have_the_lengths_that_theory_gives_for_noise_alone():
    # Gradients that are noise of deviation 1/√B around μ: Adam averages over (1 + β)/(1 − β) = 19 steps.
    order, μ, elements = torch.Generator().manual_seed(0), 0.25, 2000
    for size in (1, 16):
        σ = size**-0.5
        g = μ + σ * torch.randn(400, elements, generator=order, dtype=torch.float64)
        whole = torch.full((elements,), μ, dtype=torch.float64)
        root = (μ**2 + σ**2) ** 0.5
        rules = {"sgd": sgd, "rmsprop": partial(rmsprop, beta=0.99), "adam": adam}
        found = {name: steps_of(partial(rule, lr=1.0), g, whole, 200) for name, rule in rules.items()}
        assert found["sgd"] == pytest.approx((root * elements**0.5, μ * elements**0.5), rel=0.03)
        # Ten percent more than 1 at most: the mean of 100 squares is itself noisy, and not yet full at the start.
        assert found["rmsprop"] == pytest.approx((elements**0.5, μ / root * elements**0.5), rel=0.1)
        ratio = ((μ**2 + σ**2 / 19) / (μ**2 + σ**2)) ** 0.5
        assert found["adam"] == pytest.approx((ratio * elements**0.5, μ / root * elements**0.5), rel=0.03)


def test_updates_are_those_of_the_same_training_by_hand(lab):
    trial = next(one for one in trials(lab) if one.recipe.name == "Adam" and one.schedule.batch == 256)
    lab.run([trial])
    updates, moved = update_lengths(recorded(lab, trial))
    split, model = trial.task.source.load(), trial.network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-7)
    order = torch.Generator().manual_seed(0)
    chosen = torch.cat([torch.randperm(160, generator=order) for _ in range(trial.schedule.passes)])
    kernels = [p for p in model.parameters() if p.dim() == 2]
    start = [p.detach().clone() for p in kernels]
    lengths = []
    for some in chosen.split(256):
        before = [p.detach().clone() for p in kernels]
        optimizer.zero_grad()
        F.cross_entropy(model(split.x_train[some]), split.y_train[some]).backward()
        optimizer.step()
        lengths.append(sum((p - q).square().sum().item() for p, q in zip(kernels, before, strict=True)) ** 0.5)
    assert updates == pytest.approx(lengths, rel=1e-3)
    way = sum((p - q).square().sum().item() for p, q in zip(kernels, start, strict=True)) ** 0.5
    assert moved == pytest.approx(way, rel=1e-2)


def test_adaptive_steps_grow_with_the_batch_and_rmsprops_in_their_mean_alone(report):
    law, gain, rmsprop_along, adam_along, sgd_along, rmsprop_long, adam_long, sgd_long, section6 = report.verdicts
    for shown in (law, gain, rmsprop_along, adam_along, sgd_along, adam_long, sgd_long):
        assert shown.holds is True
    assert rmsprop_long.holds is False
    assert section6.holds is False


def test_the_table_of_trainings_is_that_of_the_archive(lab, report):
    for row, trial in zip(report.tables[-1].rows, trials(lab), strict=True):
        updates, moved = update_lengths(recorded(lab, trial))
        assert row[:2] == (trial.recipe.name, trial.schedule.batch)
        assert row[2:5] == pytest.approx((1000 * np.mean(updates[:10]), 1000 * np.mean(updates), moved))
        assert row[5] == pytest.approx(raw(lab, trial)["loss"][-1])


def made(gain, along, length):
    """Measurements at fixed weights and in training, made up so that steps of adaptive rules grow by these factors."""
    steps = {
        name: {"length": [1.0, length], "along": [1.0, along if name != "sgd" else 1.0]}
        for name in ("sgd", "rmsprop", "adam")
    }
    held = {"law": {"exponent": -1.0}, "gain": {"measured": [1.0, gain], "predicted": [1.0, 2.0], "most": [1.0, 4.0]}}
    updates = {name: np.array([[1.0] * 6, [length] * 6]) for name in ("SGD", "RMSprop", "Adam")}
    moved = {name: np.array([1.0, length]) for name in updates}
    return [one.holds for one in verdicts((16, 256), {"here": {**held, "steps": steps}}, updates, moved)]


def test_verdicts_follow_the_numbers():
    assert made(2.0, 2.0, 2.0) == [True, True, True, True, True, True, True, False, False]
    assert made(1.0, 1.0, 0.5) == [True, False, False, False, True, False, False, True, True]


def test_saving_writes_figure_page_and_numbers(lab, report, tmp_path):
    names = {path.name for path in BATCHES.save(lab, report, tmp_path)}
    assert names == {"figure.png", "figure.svg", "README.md", "result.json"}
    kept = json.loads((tmp_path / "dynamics" / "batch-size" / "result.json").read_text())
    assert kept["numbers"]["sizes"] == list(PLANS["smoke"].sizes)
