"""The study of Adagrad's implicit schedule."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from gyroscope_lab import models
from gyroscope_lab.papers.dynamics.adagrad import PLANS, STUDIES, Setting, arms, exponent, exponents, report, trained
from gyroscope_lab.papers.dynamics.measurements import Arm

[STUDY] = STUDIES
PLAN = PLANS["smoke"]


@pytest.fixture(scope="module")
def found(lab):
    return STUDY.run(lab)


def setting(method, rate):
    return Setting(PLAN.source, PLAN.model, PLAN.schedule, method, rate, 0)


def literal(method, rate, steps):
    """The losses of the first epochs, and the second moments after `steps`, from a loop by hand."""
    split = PLAN.source.load()
    model = models.make(PLAN.model, seed=0, inputs=64).double()
    weights = list(model.parameters())
    sums, average = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    generator, k, losses = torch.Generator().manual_seed(0), 0, []
    while k < steps:
        losses.append([])
        for chosen in torch.randperm(200, generator=generator).split(50):
            k += 1
            loss = F.cross_entropy(model(split.x_train[chosen].double()), split.y_train[chosen])
            losses[-1].append(float(loss.detach()))
            for w, g, f, s in zip(weights, torch.autograd.grad(loss, weights), sums, average, strict=True):
                f.add_(g**2)
                s.mul_(0.9).add_(0.1 * g**2)
                scale, eta = (f, rate) if method == "Adagrad" else (s, rate / k**0.5 if "√" in method else rate)
                w.data -= eta * g / (scale.sqrt() + 1e-7)
    f, s = (torch.cat([one.flatten() for one in its]) for its in (sums, average))
    s = s / (1 - 0.9**steps)
    return np.mean(losses, axis=1), float((s[f > 0] / f[f > 0]).sqrt().median())


@pytest.mark.parametrize(("method", "rate"), [("Adagrad", 0.03), ("RMSprop", 0.003), ("RMSprop, η/√k", 0.03)])
def test_trainings_are_those_of_a_loop_by_hand(lab, method, rate):
    told = trained(lab, setting(method, rate))
    count = 60
    losses, ratio = literal(method, rate, count)
    assert told["loss"] == pytest.approx(losses, rel=1e-6)
    if method == "Adagrad":
        assert told["steps"][-1] == count
        assert told["ratio"][-1] == pytest.approx(ratio, rel=1e-6)


def test_at_held_weights_the_ratio_falls_as_the_root_of_the_steps(lab, found):
    _, held = arms(lab)
    assert held.rate == 0.0
    assert exponents(held, "ratio") == pytest.approx([-0.5], abs=0.05)
    assert found.verdicts[0].holds


def test_an_exponent_is_the_slope_of_a_line_from_the_tenth_step_on():
    steps = [1, 3, 10, 30, 100]
    assert exponent(steps, [9.0, 9.0, *(k**-0.7 for k in steps[2:])]) == pytest.approx(-0.7)


def made(method, power, losses):
    steps = [10, 100, 1000]
    values = [k**power for k in steps]
    return Arm(method, 0.1, [{"loss": loss, "steps": steps, "rate": values, "ratio": values} for loss in losses])


@pytest.mark.parametrize(("power", "holds"), [(-0.5, True), (-0.59, True), (-0.61, False), (-0.3, False)])
def test_verdicts_turn_with_the_exponents(power, holds):
    methods = {name: made(name, power, [[1.0, 0.5]] * 2) for name in ("Adagrad", "RMSprop", "RMSprop, η/√k")}
    said = report(methods, made("Adagrad", -0.5, [[1.0, 1.0]] * 2)).verdicts
    assert [one.holds for one in said[:3]] == [True, holds, holds]


@pytest.mark.parametrize(("root", "constant", "holds"), [(1.1, 2.0, True), (2.0, 1.1, False), (1.5, 1.5, None)])
def test_the_nearer_curve_is_that_whose_losses_are_nearer_for_all_seeds(root, constant, holds):
    def times(factor):
        return [[factor, 0.5 * factor], [1.01 * factor, 0.5 * factor]]

    methods = {"Adagrad": made("Adagrad", -0.5, times(1.0))}
    methods |= {"RMSprop": made("RMSprop", 0, times(constant)), "RMSprop, η/√k": made("R", 0, times(root))}
    assert report(methods, methods["Adagrad"]).verdicts[-1].holds is holds


@pytest.mark.parametrize("diverged", [[2.0, None], [None]], ids=["in the last epoch", "early"])
def test_where_a_training_diverges_distances_and_exponents_are_undecided(diverged):
    curves = [[1.0, 0.5], [1.1, 0.5]]
    whole = {name: made(name, -0.5, curves) for name in ("Adagrad", "RMSprop", "RMSprop, η/√k")}
    for method in whole:
        methods = whole | {method: made(method, -0.5, [curves[0], diverged])}
        holds = [one.holds for one in report(methods, whole["Adagrad"]).verdicts]
        assert holds == [True, *[None if method == "Adagrad" else True] * 2, None]


def test_the_report_is_strict_json_with_two_panels(lab, found, tmp_path):
    json.dumps(STUDY.as_json(lab, found), allow_nan=False)
    assert [len(ax.lines) for ax in found.figures["figure"].axes] == [5, 3]
    written = {path.name for path in STUDY.save(lab, found, tmp_path)}
    assert written == {"figure.png", "figure.svg", "README.md", "result.json"}
