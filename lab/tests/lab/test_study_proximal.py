"""The study of the link to proximal back-propagation."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from gyroscope_lab.models.mlp import mlp
from gyroscope_lab.papers.conditioning.proximal import (
    STUDIES,
    Conditions,
    classification_error,
    conditions,
    regression_error,
    report,
    step_errors,
    violations,
)

[STUDY] = STUDIES
EQUAL = {"1": 1e-15, "6": 1e-14, "7": 1e-14}
LEFT = [(10.0, 0.1, 1e-3), (100.0, 0.01, 1e-5)]


@pytest.fixture(scope="module")
def found(lab):
    return STUDY.run(lab)


@pytest.fixture
def batch():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(30, 6, generator=draw, dtype=torch.float64), torch.arange(30) % 10


def network(**options):
    return mlp(0, **({"depth": 3, "width": 5, "inputs": 6} | options)).double()


def test_one_step_on_the_layers_problems_is_a_step_of_gradient_descent(batch):
    """Written out: with the target ĥ = h − η ∂L/∂h a step of length 1 on ½‖ĥ − Wx‖² moves W by −η ∂L/∂W."""
    x, y = batch
    model, rate = network(), 0.3
    assert max(step_errors(model, x, y, rate=rate).values()) < 1e-13
    first, second = model[1], model[3]
    h = (x @ first.weight.detach().T).requires_grad_()
    loss = F.cross_entropy(model[5](F.relu(second(F.relu(h)))), y, reduction="sum")
    [gradient] = torch.autograd.grad(loss, h)
    residual = h.detach() - rate * gradient - h.detach()
    model.zero_grad()
    F.cross_entropy(model(x), y, reduction="sum").backward()
    torch.testing.assert_close(residual.T @ x, -rate * first.weight.grad)


def test_other_nonlinearities_would_be_noticed(batch):
    x, y = batch
    model = nn.Sequential(*(nn.Tanh() if isinstance(one, nn.ReLU) else one for one in network()))
    errors = step_errors(model, x, y, rate=0.3)
    assert errors["6"] > 0.01  # the problem has a ReLU, and the network a tanh
    assert errors["7"] < 1e-13


def test_the_hessian_of_a_layers_regression_is_that_of_its_inputs(batch):
    assert regression_error(network(), batch[0]) < 1e-13


def test_equation_2_is_exact_where_all_classes_are_equally_likely(batch):
    model = network()
    assert classification_error(model, batch[0]) > 1e-3
    nn.init.zeros_(model[-1].weight)
    assert classification_error(model, batch[0]) < 1e-13


def test_conditions_are_those_of_the_fisher_matrix_and_of_second_moments(batch):
    x, y = batch
    model = network(depth=1)
    nn.init.zeros_(model[-1].weight)
    found = conditions("softmax", model, x, y)
    # F = E[xxᵀ] ⊗ S, and λmax(S) = 1/c.
    assert found.largest == pytest.approx(found.layers_largest / 10)
    assert found.layers_largest == pytest.approx(float(torch.linalg.eigvalsh(x.T @ x / 30)[-1]))


def test_the_distance_that_a_penalty_leaves_is_inversely_proportional_to_it():
    (_, first, _), (_, second, above) = violations((1000.0, 10000.0))
    assert first / second == pytest.approx(10, rel=0.05)
    assert 0 <= above < 1e-6


def test_at_smoke_scale_the_equalities_hold_and_equation_2_does_not(found):
    assert [one.holds for one in found.verdicts] == [True, True, True, True, False, None, None]


def made(count, *, order=1):
    return [Conditions(str(i), 2.0**i, 3.0**i, 2.0 ** (order * i), 3.0 ** (order * i)) for i in range(count)]


def verdicts(equal=EQUAL, second=(0.05, 0.05, 0.1), networks=None, left=LEFT):
    return [one.holds for one in report(equal, second, made(8) if networks is None else networks, left).verdicts]


def test_each_verdict_turns_with_its_numbers():
    assert verdicts() == [True] * 7
    assert verdicts(left=[(10.0, 0.1, 1e-3), (100.0, 0.05, 1e-5)])[0] is False
    assert verdicts(left=[(10.0, 0.1, 0.5), (100.0, 0.01, 0.5)])[0] is False
    for place, name in enumerate(("6", "7", "1"), start=1):
        assert [i for i, holds in enumerate(verdicts(EQUAL | {name: 1e-3})) if not holds] == [place]
    assert verdicts(second=(0.05, 0.5, 0.1))[4] is False
    assert verdicts(networks=made(8, order=-1))[5:] == [False, False]
    assert verdicts(networks=made(4))[5:] == [None, None]
    mixed = [replace(one, layers_kappa=(i * 5) % 8 + 1.0) for i, one in enumerate(made(8))]
    assert verdicts(networks=mixed)[5:] == [True, None]


def test_the_report_is_strict_json(lab, found, tmp_path):
    json.dumps(STUDY.as_json(lab, found), allow_nan=False)
    assert STUDY.trials(lab) == []
    written = {path.name for path in STUDY.save(lab, found, tmp_path)}
    assert written == {"figure.png", "figure.svg", "README.md", "result.json"}
