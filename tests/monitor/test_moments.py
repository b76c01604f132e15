"""Percentiles of second moments, against numpy.percentile."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gyroscope
from gyroscope.errors import MonitorError
from gyroscope.monitor.detail import MOMENT_INFO, MOMENT_NAMES, moment_percentiles

OPTIMIZERS = {
    "Adam": (lambda p: torch.optim.Adam(p), "exp_avg_sq"),
    "AdamW, amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), "exp_avg_sq"),
    "NAdam": (lambda p: torch.optim.NAdam(p), "exp_avg_sq"),
    "RAdam": (lambda p: torch.optim.RAdam(p), "exp_avg_sq"),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, centered=True), "square_avg"),
    "Adadelta": (lambda p: torch.optim.Adadelta(p), "square_avg"),
    "Adagrad": (lambda p: torch.optim.Adagrad(p), "sum"),
    "Layca over Adam": (lambda p: gyroscope.Layca(torch.optim.Adam(p)), "exp_avg_sq"),
}


def stepped(make, shapes=((7, 5), (3, 4), (7, 5), (2, 3, 3, 3)), steps: int = 3, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=draw).to(dtype)) for s in shapes]
    optimizer = make(params)
    for _ in range(steps):
        for i, p in enumerate(params):
            p.grad = (torch.randn(p.shape, generator=draw) * 10.0 ** -(i % 4)).to(dtype)
        optimizer.step()
    return optimizer, params


def literal(values: list[Tensor], percents=(10, 50, 90)) -> np.ndarray:
    return np.array([np.percentile(v.detach().double().numpy(), percents) for v in values])


@pytest.mark.parametrize(("make", "key"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_percentiles_are_those_of_numpy(make, key):
    optimizer, params = stepped(make)
    got = moment_percentiles(optimizer, params)
    assert got.dtype is torch.float32
    assert got.numpy() == pytest.approx(literal([optimizer.state[p][key] for p in params]), rel=1e-5)


@pytest.mark.parametrize("percents", [(0, 100), (50,), (2.5, 33.3, 97.5)])
def test_any_percents_may_be_asked_for(percents):
    optimizer, params = stepped(torch.optim.Adam)
    expected = literal([optimizer.state[p]["exp_avg_sq"] for p in params], percents)
    assert moment_percentiles(optimizer, params, percents).numpy() == pytest.approx(expected, rel=1e-5)


def test_the_moment_is_that_which_the_optimizer_keeps_without_correction():
    # As in the paper's figure: after one step v = (1 − β₂) g².
    optimizer, params = stepped(torch.optim.Adam, shapes=[(5, 5)], steps=1)
    expected = literal([0.001 * params[0].grad.square()])
    assert moment_percentiles(optimizer, params).numpy() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("make", [torch.optim.SGD, lambda p: torch.optim.SGD(p, momentum=0.9), torch.optim.Adamax])
def test_optimizers_without_second_moments_give_nothing(make):
    assert moment_percentiles(*stepped(make)) is None


def test_before_the_first_step_there_is_nothing_and_no_state_is_made():
    params = [nn.Parameter(torch.randn(3, 3))]
    optimizer = torch.optim.Adam(params)
    assert moment_percentiles(optimizer, params) is None
    assert len(optimizer.state) == 0


def test_a_parameter_without_state_is_not_known():
    params = [nn.Parameter(torch.randn(3, 3)) for _ in range(3)]
    optimizer = torch.optim.Adam(params)
    params[1].grad = torch.ones(3, 3)
    optimizer.step()
    got = moment_percentiles(optimizer, params)
    assert got.isnan().all(1).tolist() == [True, False, True]
    assert got[1].tolist() == pytest.approx([0.001] * 3)


def test_state_in_another_form_is_not_known():
    optimizer, params = stepped(torch.optim.Adam)
    optimizer.state[params[0]]["exp_avg_sq"] = torch.zeros(7)  # factored: one number a row
    optimizer.state[params[1]]["exp_avg_sq"] = torch.zeros(3, 4, dtype=torch.uint8)  # quantized
    assert moment_percentiles(optimizer, params).isnan().all(1).tolist() == [True, True, False, False]


def test_state_and_random_numbers_are_left_as_they_are():
    optimizer, params = stepped(torch.optim.Adam)
    before, random = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    moment_percentiles(optimizer, params, most=8)
    after = optimizer.state_dict()
    assert torch.get_rng_state().equal(random)
    assert all(
        after["state"][i][name].equal(value) for i, state in before["state"].items() for name, value in state.items()
    )


@pytest.mark.parametrize("order", ["rows", "columns", "channels last"])
def test_of_many_elements_some_are_looked_at_that_stand_for_all(order):
    # Moments that change from row to row or from column to column by orders of magnitude.
    optimizer, params = stepped(torch.optim.Adam, shapes=[(64, 64, 8, 8)])
    v = optimizer.state[params[0]]["exp_avg_sq"]
    ramp = torch.logspace(-6, 0, 64)
    values = (v / v.mean()) * (ramp.view(-1, 1, 1, 1) if order == "rows" else ramp.view(1, -1, 1, 1))
    if order == "channels last":
        values = values.to(memory_format=torch.channels_last)
    optimizer.state[params[0]]["exp_avg_sq"] = values
    got = moment_percentiles(optimizer, params, most=4096)
    assert got.log10().numpy() == pytest.approx(np.log10(literal([values])), abs=0.1)
    assert moment_percentiles(optimizer, params, most=4096).equal(got)
    assert moment_percentiles(optimizer, params, most=10**6).numpy() == pytest.approx(literal([values]), rel=1e-4)


def test_half_precision_state_is_read_in_float32():
    optimizer, params = stepped(torch.optim.Adam, dtype=torch.bfloat16)
    expected = literal([optimizer.state[p]["exp_avg_sq"].float() for p in params])
    assert moment_percentiles(optimizer, params).numpy() == pytest.approx(expected, rel=1e-5)


def test_nothing_is_read_back_from_the_device(monkeypatch):
    optimizer, params = stepped(torch.optim.Adam)

    def refuse(*_, **__):
        raise AssertionError("waits for the device")

    for name in ("item", "__bool__", "__int__", "__float__", "__index__", "tolist", "numpy", "cpu", "nonzero"):
        monkeypatch.setattr(Tensor, name, refuse)
    got = moment_percentiles(optimizer, params, most=16)
    monkeypatch.undo()
    assert got.isfinite().all()


def test_arguments_that_make_no_sense_are_refused():
    optimizer, params = stepped(torch.optim.Adam)
    with pytest.raises(MonitorError, match="`percents` must be"):
        moment_percentiles(optimizer, params, (10, 101))
    with pytest.raises(MonitorError, match="`most` must be a number ≥ 1, got 0"):
        moment_percentiles(optimizer, params, most=0)


def test_every_column_says_what_it_means():
    assert tuple(MOMENT_INFO) == MOMENT_NAMES == ("moment_p10", "moment_p50", "moment_p90")
    assert all(info.unit and info.meaning for info in MOMENT_INFO.values())
