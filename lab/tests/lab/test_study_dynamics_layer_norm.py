"""The study of layer normalization and the outliers of the curvature."""

import json

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from gyroscope_lab.papers.dynamics.layer_norm import CENTERED, PLANS, STUDIES, WAYS, LayerNorm, Setting, network, report

[STUDY] = STUDIES
PLAN = PLANS["smoke"]
SETTING = Setting(PLAN.source, PLAN.depth, PLAN.width, PLAN.examples, PLAN.schedule, PLAN.rate, 0)


@pytest.fixture(scope="module")
def found(lab):
    return STUDY.run(lab)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_computes_layer_normalization(way):
    h = torch.randn(5, 8, dtype=torch.float64)
    norm = LayerNorm()
    norm.through = WAYS[way]
    torch.testing.assert_close(norm(h), F.layer_norm(h, (8,)), rtol=1e-4, atol=1e-4)


def test_derivatives_go_through_all_of_it_or_around_what_is_held():
    h = torch.randn(1, 6, dtype=torch.float64)
    norm, slopes = LayerNorm(), {}
    for name, through in WAYS.items():
        norm.through = through
        slopes[name] = torch.autograd.functional.jacobian(norm, h)[0, :, 0]
    told = torch.autograd.functional.jacobian(lambda h: F.layer_norm(h, (6,)), h)[0, :, 0]
    torch.testing.assert_close(slopes["all of it"], told)
    sigma = h.std(correction=0)
    torch.testing.assert_close(slopes["μ and σ held"], torch.eye(6).double() / sigma, rtol=1e-3, atol=1e-3)
    # Through the centering a shift of all units does nothing; with μ held it does.
    shift = torch.ones(6, dtype=torch.float64)
    assert (slopes["all of it"] @ shift).abs().max() < 1e-12
    assert (slopes["μ held"] @ shift).abs().max() > 0.1


def test_eigenvalues_at_the_start_are_those_of_a_fisher_matrix_made_example_by_example(lab, found):
    split = PLAN.source.load()
    model = network(SETTING).double()
    x, y = split.x_train[: PLAN.examples].double(), split.y_train[: PLAN.examples]
    weight = model.get_submodule("linear2").weight
    matrix = torch.zeros(weight.numel(), weight.numel(), dtype=torch.float64)
    for i in range(len(x)):
        log_p = model(x[i : i + 1]).log_softmax(1)[0]
        for c in range(10):
            [g] = torch.autograd.grad(log_p[c], weight, retain_graph=True)
            matrix += log_p[c].exp().detach() * torch.outer(g.flatten(), g.flatten()) / len(y)
    [run] = found.numbers["runs"]
    assert run["start"]["all of it"] == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-5)


def test_moving_the_mean_into_the_bias_makes_the_largest_eigenvalue_smaller(found):
    [run] = found.numbers["runs"]
    assert run["start"][CENTERED] < 0.5 * run["start"]["all of it"]
    assert [one.holds for one in found.verdicts] == [None] * 3  # one seed


def made(through, held, fixed, centered):
    values = dict(zip((*WAYS, CENTERED), (through, held, fixed, centered), strict=True))
    return [
        {when: {name: value * (1 + 0.01 * seed) for name, value in values.items()} for when in ("start", "end")}
        for seed in range(3)
    ]


@pytest.mark.parametrize(
    ("values", "holds"),
    [
        ((2.0, 3.0, 4.0, 1.0), [True, True, True]),
        ((2.0, 2.05, 2.1, 1.95), [False, False, False]),
        ((2.0, 3.0, 3.0, 1.0), [True, True, False]),
    ],
)
def test_a_step_attenuates_that_makes_the_largest_eigenvalue_smaller_by_more_than_a_tenth(values, holds):
    runs = made(*values)
    for seed, run in enumerate(runs):
        run["start"]["all of it"] *= 1 + 1e-4 * seed  # or the seeds would not differ at all
        run["end"]["all of it"] *= 1 - 1e-4 * seed
        for when in ("start", "end"):
            run[when]["μ and σ held"] *= 1 + 1e-4 * seed**2
            run[when][CENTERED] *= 1 + 1e-4 * seed**2
    assert [one.holds for one in report(runs).verdicts] == holds


def test_the_report_is_strict_json(lab, found, tmp_path):
    json.dumps(STUDY.as_json(lab, found), allow_nan=False)
    written = {path.name for path in STUDY.save(lab, found, tmp_path)}
    assert written == {"figure.png", "figure.svg", "README.md", "result.json"}
