from math import inf, nan

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from gyroscope.conditioning.outliers import outliers
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.dynamics.ics import (
    CENTERED,
    FIXED,
    PLANS,
    STUDIES,
    THROUGH,
    Setting,
    centered_at,
    network,
    report,
    steps_apart,
    trained,
    training,
)
from gyroscope_lab.papers.dynamics.measurements import Arm, followed, kept, mean_curve, training_of
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task

[STUDY] = STUDIES
PLAN = PLANS["smoke"]
METHODS = ("SGD, BN", "quasi-diagonal", "K-FAC")
# The distance of losses with moved inputs, by K-FAC's damping.
STEPS = {0.0: 1e-9, 0.03: 0.01}


@pytest.fixture(scope="module")
def found(lab):
    return STUDY.run(lab)


def verdicts(report):
    return {verdict.says: verdict.holds for verdict in report.verdicts}


def setting(method="SGD", rate=0.1, moved=0.0):
    return Setting(PLAN.source, PLAN.depth, PLAN.width, PLAN.schedule, method, rate, moved, 0)


def arms(losses):
    """Arms of three seeds by method and shift, from their mean losses; in all arms seeds differ by 1 %."""
    factors = (0.99, 1.0, 1.01)
    return {
        key: Arm(key[0], 0.1, [{"loss": [loss * f, loss * f] if loss else [None], "test": 90.0} for f in factors])
        for key, loss in losses.items()
    }


ALIKE = arms({(method, moved): 1.0 for method in PLAN.rates for moved in (0.0, 2.0)})


# The loop


def test_a_training_takes_the_steps_of_a_literal_loop_over_the_same_batches(lab):
    split, one = PLAN.source.load(), setting(rate=0.2)
    model = network(lab, one)
    schedule = Schedule(epochs=3, batch=64, cuts=(0.4,), factor=4.0)
    task = Task("made", PLAN.source, "mlp-3x16", schedule=schedule)
    told = followed(training_of(lab, task, Recipe("SGD", 0.2), seed=5, network=model))
    own, generator = network(lab, one), torch.Generator().manual_seed(5)
    sgd = torch.optim.SGD(own.parameters(), lr=0.2)
    for epoch in range(3):
        order, losses = torch.randperm(200, generator=generator), []
        sgd.param_groups[0]["lr"] = 0.2 if epoch < 1 else 0.05
        for chosen in order.split(64):
            sgd.zero_grad()
            loss = F.cross_entropy(own(split.x_train[chosen].double()), split.y_train[chosen])
            loss.backward()
            sgd.step()
            losses.append(float(loss.detach()) * len(chosen))
        assert told["loss"][epoch] == pytest.approx(sum(losses) / 200, rel=1e-12)
    for p, q in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=0)


def test_a_training_that_diverges_ends_and_is_kept_as_none(tmp_path):
    lab, one = Lab(Archive(tmp_path)), setting(rate=1e300)
    losses = kept(lab, "made", one, lambda: followed(training(lab, one)))["loss"]
    assert losses[-1] is None
    assert len(losses) < PLAN.schedule.epochs
    assert mean_curve([losses], 3)[-1] == inf


def test_what_a_laboratory_that_only_shows_does_not_know_is_refused(tmp_path):
    lab = Lab(Archive(tmp_path), known=True)
    with pytest.raises(LabError, match="leave --known out"):
        trained(lab, setting())


def test_a_damaged_file_is_refused_by_name(tmp_path):
    lab = Lab(Archive(tmp_path))
    kept(lab, "made", setting(), lambda: {"loss": [nan]})
    [path] = tmp_path.rglob("*.json")
    path.write_text("{")
    with pytest.raises(LabError, match=path.name):
        kept(lab, "made", setting(), dict)


# What is trained


@pytest.mark.parametrize("method", ["SGD", "SGD, BN", "quasi-diagonal", "K-FAC"])
def test_moved_inputs_leave_what_a_network_computes(lab, method):
    x = torch.randn(20, 1, 8, 8, dtype=torch.float64)
    here, there = (network(lab, setting(method, moved=moved)).eval()(x + moved) for moved in (0.0, 2.0))
    torch.testing.assert_close(here, there)


def test_batch_normalization_and_the_quasi_diagonal_do_not_see_where_the_inputs_are(found):
    by = {(one["method"], one["moved"]): one["loss"] for one in found.numbers["curves"]}
    for method in ("SGD, BN", "quasi-diagonal"):
        assert by[method, 0.0][:3] == pytest.approx(by[method, 2.0][:3], rel=1e-6)
    assert by["SGD", 0.0][-1] < by["SGD", 2.0][-1]


def test_undamped_kfac_takes_the_same_steps_wherever_the_inputs_are_and_damped_kfac_does_not(lab, found):
    apart = steps_apart(lab)
    assert apart[0.0] < 1e-8 < 1e-3 < apart[0.03]
    [said] = [one for one in found.verdicts if "undamped" in one.says]
    assert said.holds
    told = verdicts(report(2.0, 0.5, ALIKE, found.numbers["spectra"], {0.0: 0.01, 0.03: 0.01}))
    assert told["undamped K-FAC takes the same steps wherever the inputs are"] is False


def test_at_full_scale_mnist_is_learned_at_rates_three_apart():
    plan = PLANS["full"]
    assert (plan.source, plan.schedule.batch) == (Source("mnist"), 128)
    for rates in plan.rates.values():
        assert np.diff(np.log(rates)) == pytest.approx(np.log(3))
    assert STUDY.trials(Lab(Archive("nowhere"), "full")) == []


# What comes of it


def test_measured_eigenvalues_are_those_of_a_fisher_matrix_made_example_by_example(lab, found):
    split = PLAN.source.load()
    model = network(lab, setting())
    x, y = split.x_train[: PLAN.examples].double(), split.y_train[: PLAN.examples]
    weight = dict(model.named_modules())[PLAN.layer].weight
    F_ = torch.zeros(weight.numel(), weight.numel(), dtype=torch.float64)
    for i in range(len(x)):
        log_p = model(x[i : i + 1]).log_softmax(1)[0]
        for c in range(10):
            [g] = torch.autograd.grad(log_p[c], weight, retain_graph=True)
            F_ += log_p[c].exp().detach() * torch.outer(g.flatten(), g.flatten()) / len(y)
    expected = torch.linalg.eigvalsh(F_).flip(0)[:9]
    told = found.numbers["spectra"]["plain"]["start"]
    torch.testing.assert_close(torch.tensor(told["measured"]), expected.float(), rtol=1e-4, atol=1e-7)
    before = nn.Sequential(*list(model)[: [name for name, _ in model.named_children()].index(PLAN.layer)])
    assert told["nu"] == pytest.approx(1 + float(before(x).detach().mean(0).square().sum()))


def test_the_outliers_are_there_without_normalization_and_gone_through_its_statistics(found):
    assert list(verdicts(found).values())[:2] == [True, True]
    spectra = found.numbers["spectra"]
    for when in ("start", "end"):
        assert spectra["BN"][when]["predicted"][0] < 1e-12
        assert spectra["BN"][when]["measured"][0] < spectra["BN, statistics fixed"][when]["measured"][0]
        assert spectra["BN, fixed, inputs centered"][when]["nu"] == pytest.approx(1)


def test_without_their_mean_inputs_have_the_curvature_of_their_covariance():
    torch.manual_seed(0)
    x = torch.randn(40, 3, dtype=torch.float64) + 5
    net = nn.Sequential(nn.Linear(3, 2)).double()
    other, name = centered_at(net, "0", x.mean(0))
    torch.testing.assert_close(other(x), net(x))
    top = outliers(other, F.mse_loss, (x, torch.zeros(40, 2, dtype=torch.float64)), name).measured[0]
    # Of squared errors S = I.
    assert float(top) == pytest.approx(float(torch.linalg.eigvalsh((x - x.mean(0)).T @ (x - x.mean(0)) / 40)[-1]))


@pytest.mark.parametrize(
    ("through", "centered", "holds"),
    [(1.0, 1.0, True), (0.5, 1.0, True), (9.0, 1.0, False), (1.5, 1.0, False), (9.0, 9.9, None)],
)
def test_outliers_are_gone_that_are_no_larger_than_those_of_centered_inputs(found, through, centered, holds):
    def largest(value):
        return {when: {"nu": 1.0, "share": 1.0, "rest": 1.0, "predicted": [1.0], "measured": [value]} for when in told}

    told = ("start", "end")
    spectra = dict(found.numbers["spectra"])
    spectra |= {FIXED: largest(10.0), CENTERED: largest(centered), THROUGH: largest(through)}
    [said] = [one for one in report(2.0, 0.5, ALIKE, spectra, STEPS).verdicts if "the effect of the means" in one.says]
    assert said.holds is holds
    assert f"It is then {through:.0f} and {through:.0f} times" in said.here


def test_a_report_is_saved_whole(lab, found, tmp_path):
    written = {path.name for path in STUDY.save(lab, found, tmp_path)}
    assert written == {"figure.png", "figure.svg", "README.md", "result.json"}


def test_a_cost_that_stays_and_one_that_cannot_be_told_are_told_apart(found):
    spectra = found.numbers["spectra"]

    def gone(plain, others, spread=0.0):
        losses = {("SGD", 0.0): 1.0, ("SGD", 2.0): plain}
        losses |= {(method, moved): others if moved else 1.0 for method in METHODS for moved in (0.0, 2.0)}
        found = arms(losses)
        for (method, moved), arm in found.items():
            if moved and method != "SGD":
                arm.runs[0]["loss"][:] = [others and others * (1 + spread)]
        told = verdicts(report(2.0, 0.5, found, spectra, STEPS))
        names = ("SGD, BN", "quasi-diagonal", "K-FAC, damped,")
        return {told[f"{name} removes the cost of the means"] for name in names}

    assert gone(2.0, 1.05) == {True}
    assert gone(2.0, 1.5) == {False}
    assert gone(1.0, 1.5) == {None}
    assert gone(2.0, 1.05, spread=0.5) == gone(2.0, 1.5, spread=-0.5) == {None}  # within the chance of seeds
    assert gone(2.0, None) == gone(None, 1.05) == {None}  # diverged


@pytest.mark.parametrize(
    ("loss", "spread", "holds"),
    [(2.0, 0.0, True), (1.05, 0.0, False), (0.5, 0.0, False), (1.2, 0.5, None), (2.0, None, None)],
)
def test_a_difference_of_losses_counts_from_the_margin_on_and_beyond_the_chance_of_seeds(found, loss, spread, holds):
    losses = {(method, moved): 1.0 for method in PLAN.rates for moved in (0.0, 2.0)}
    made = arms(losses | {("SGD", 2.0): loss, ("SGD", 0.0): 1.0})
    made["SGD", 2.0].runs[0]["loss"][:] = [None if spread is None else loss * (1 + spread)]
    slowed = verdicts(report(2.0, 0.5, made, found.numbers["spectra"], STEPS))
    assert slowed["means far from zero slow down gradient descent"] is holds

    made = arms(losses | {("SGD", 0.0): loss, ("SGD", 2.0): loss})
    made["SGD", 0.0].runs[0]["loss"][:] = [None if spread is None else loss * (1 + spread)]
    faster = verdicts(report(2.0, 0.5, made, found.numbers["spectra"], STEPS))
    assert [faster[f"{method} learns faster than SGD without normalization"] for method in METHODS] == [holds] * 3
