"""Published bug reports: each breaks what its report says, its twin does not, and the easy ones are found."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from gyroscope.diagnosis import KINDS
from gyroscope_lab.faults.injections import accuracy, train
from gyroscope_lab.faults.published import REPORTS, prepared, to_json, verdict

ALONE = [name for name, report in REPORTS.items() if report.ranks == 1]


def test_accepted_kinds_exist_and_reports_beside_the_training_have_none():
    for report in REPORTS.values():
        assert report.accepted <= set(KINDS)
        assert report.inside or not report.accepted


@pytest.mark.parametrize("name", ALONE)
def test_every_twin_learns(name):
    it = prepared(name, 0, faulty=False, steps=40)
    losses: list[float] = []
    train(it, each=lambda step, value: losses.append(float(value)))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_nothing_trains_where_the_report_says_so():
    it = prepared("PyTorch forum 84911", 0, faulty=True, steps=5)
    before = [parameter.clone() for parameter in it.model.parameters()]
    train(it)
    assert all(torch.equal(one, other) for one, other in zip(before, it.model.parameters(), strict=True))


@pytest.mark.parametrize("faulty", [True, False])
def test_a_compiled_step_without_gradients_is_the_last_one_that_does_something(faulty):
    it = prepared("PyTorch 115607", 0, faulty=faulty, steps=20)
    weights: list[torch.Tensor] = []
    train(it, each=lambda step, value: weights.append(it.layer(it.names[0]).detach().clone()))
    assert torch.equal(weights[1], weights[2])
    assert torch.equal(weights[2], weights[-1]) is faulty


@pytest.mark.parametrize("faulty", [True, False])
def test_workers_that_share_random_numbers_add_the_same_noise(faulty):
    it = prepared("StackOverflow 67180955", 0, faulty=faulty)
    raw = it.network.batches(0)
    noise = []
    for _ in range(2):
        (clean, _), (x, _) = next(raw), next(it.batches)
        shifts = [x - clean.roll((i, j), (2, 3)) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        noise.append(min(shifts, key=lambda one: float(one.norm())))
    assert torch.allclose(noise[0], noise[1], atol=1e-5) is faulty


@pytest.mark.parametrize("faulty", [True, False])
def test_dropout_that_stays_on_makes_evaluations_differ_and_leaves_the_training_alone(faulty):
    it = prepared("Transformers 33844", 0, faulty=faulty, steps=3)
    train(it)
    it.model.eval()
    x, _ = it.network.tested()
    assert torch.equal(it.model(x[:4]), it.model(x[:4])) is not faulty
    twin = prepared("Transformers 33844", 0, faulty=not faulty, steps=3)
    train(twin)
    for one, other in zip(it.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("faulty", [True, False])
def test_linear_layers_leave_autocast_where_the_report_says_so(faulty):
    it = prepared("Lightning Thunder 725", 0, faulty=faulty)
    seen: set[torch.dtype] = set()
    for module in it.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    it.forward(next(it.batches)[0])
    assert seen == {torch.float32 if faulty else torch.bfloat16}


def test_the_rest_of_the_trainings_alone_are_what_their_reports_say():
    assert not prepared("StackOverflow 60335387", 0, faulty=True).clears
    assert len(next(prepared("Transformers 34204", 0, faulty=True).batches)[0]) == 1
    assert prepared("Transformers 33455", 0, faulty=True).network.steps == 100
    frozen = [not p.requires_grad for p in prepared("MMPretrain 702", 0, faulty=False).model.parameters()]
    assert any(frozen)
    assert not all(frozen)
    assert 0 <= accuracy(prepared("PyTorch 51800", 0, faulty=True)) <= 1


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("name", "kind", "steps"),
    [("PyTorch 104336", "ranks_differ", 60), ("StackOverflow 60335387", "gradients_accumulate", None)],
)
@pytest.mark.parametrize("faulty", [True, False])
def test_reports_are_diagnosed(name, kind, steps, faulty):
    found = verdict(name, 0, faulty=faulty, steps=steps)
    assert [one[0] for one in found.alarms[:1]] == ([kind] if faulty else [])
    assert json.loads(to_json(found))["faulty"] is faulty
