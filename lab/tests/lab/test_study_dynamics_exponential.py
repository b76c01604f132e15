"""The study of weight decay and the exponential schedule that replaces it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from gyroscope_lab import models
from gyroscope_lab.data import Source
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.dynamics.exponential import (
    SETTINGS,
    STUDIES,
    Course,
    Setting,
    Twins,
    compare,
    key,
    pairs,
    report,
    train,
)
from gyroscope_lab.training.archive import Archive

[STUDY] = STUDIES
SETTING = SETTINGS["smoke"]


@pytest.fixture(scope="module")
def found(lab):
    return STUDY.run(lab)


def test_at_full_scale_mnist_is_trained_and_rates_stay_within_float32():
    full = SETTINGS["full"]
    assert (full.source, full.pixels, full.width) == ("mnist", 784, 784)
    growth = -2 * full.steps * np.log10(1 - full.rate * full.decay)
    assert 6 < growth < 38
    assert [pair.way for pair in pairs(full)].count("exponential") == 5
    assert sum(not pair.setting.double for pair in pairs(full)) == 2


@pytest.mark.parametrize("way", ["decay", "exponential"])
def test_a_training_is_that_of_a_loop_by_hand(way):
    setting = replace(SETTING, steps=6, every=6, width=8)
    split = Source("digits").load()
    model = models.make("mlp-4x8", seed=0, batch_norm=True, inputs=64, eps=1e-30).double()
    weights, a = list(model.parameters())[:-1], 1 - 0.3 * 0.03
    draw = torch.Generator().manual_seed(0)
    for t in range(6):
        chosen = torch.randint(0, 200, (setting.batch,), generator=draw)
        loss = F.cross_entropy(model(split.x_train[chosen].double()), split.y_train[chosen])
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            if way == "decay":
                weight.data = a * weight.data - 0.3 * gradient
            else:
                weight.data = weight.data - 0.3 * a ** -(2 * t + 1) * gradient
    course = train(setting, way, split)
    assert course.norms[-1] == pytest.approx([weight.detach().norm().item() for weight in weights], rel=1e-12)
    outputs = model(split.x_test[:200].double())
    torch.testing.assert_close(course.outputs[-1], outputs.detach(), rtol=1e-10, atol=1e-12)
    assert torch.get_num_threads() >= 1


def test_at_smoke_scale_all_is_shown_but_an_equilibrium_from_a_random_start_which_is_still_under_way(found):
    assert [one.holds for one in found.verdicts] == [True, True, True, None, True, True]


def test_a_training_may_begin_where_weight_decay_has_led():
    """Ten steps and then ten more are twenty, but for the batches, which begin anew."""
    split = Source("digits").load()
    setting = replace(SETTING, steps=10, every=10)
    first, second = (train(one, "decay", split) for one in (setting, replace(setting, before=10)))
    assert second.norms[0] == pytest.approx(first.norms[-1], rel=1e-14)
    torch.testing.assert_close(second.outputs[0], first.outputs[-1], rtol=1e-10, atol=1e-12)
    assert second.norms[-1] != pytest.approx(first.norms[-1], rel=1e-3)


def test_outputs_that_are_never_a_hundredth_apart_are_said_to_be_so_at_no_step(found):
    [said] = [one.here for one in found.verdicts if "rounding" in one.says]
    assert said.endswith("a hundredth at no step and at no step")
    assert "none" not in "".join(one.here for one in found.verdicts)


def test_float64_agrees_to_rounding_float32_to_its_own_and_neither_differs(found):
    worst = {name: max(its["apart"]) for name, its in found.numbers.items()}
    assert max(worst["float64"], worst["float64, momentum 0.9"]) < 1e-12
    assert 1e-9 < worst["float32"] < 1e-3
    assert worst["float64, ε = 1e-5"] > 1e-6
    assert worst["float64, neither"] > 0.01


def test_rates_grow_exponentially_and_effective_rates_are_alike_up_to_a_step_of_decay(found):
    its = found.numbers["float64"]
    a = 1 - SETTING.rate * SETTING.decay
    assert its["rates"] == pytest.approx([0.3 * a ** -(2 * t + 1) for t in its["steps"]], rel=1e-5)
    # η̃_t/‖w̃_t‖² = η a^{−(2t+1)}/(a^{−2t}‖w_t‖²)
    assert its["effective_rates_without"] == pytest.approx(
        [rate / a for rate in its["effective_rates_with_decay"]], rel=1e-4
    )


def course(outputs, norms, rates=1.0):
    return Course(torch.as_tensor(outputs), np.asarray(norms), np.full(len(norms), rates), 0.5)


def test_twins_that_differ_are_said_to():
    setting = Setting("digits", 64, 8, 0.3, 0.03, steps=20)
    one = course(np.ones((3, 2, 2)), [[1.0]] * 3)
    other = course(np.ones((3, 2, 2)) + 0.5, [[2.0], [1.5], [1.0]])
    twins = compare(setting, one, other)
    assert twins.apart == [0.5] * 3
    told = report(pairs(setting), [twins] * 9)
    assert [one.holds for one in told.verdicts] == [False, False, False, False, True, True]


@pytest.mark.parametrize(
    ("rates", "verdicts"),
    [
        ([2.0] * 8, [True, True]),  # constant
        ([2.0, 2.0, 2.1, 2.1, 2.05, 2.05, 2.15, 2.15], [True, True]),
        ([0.2, 1.0, 1.8, 2.0, 2.0, 2.0, 2.0, 2.0], [False, True]),  # comes to rest far from where it began
        ([2.0, 2.0, 2.8, 2.8, 3.9, 3.9, 5.5, 5.5], [False, False]),  # grows by 1.4 from quarter to quarter
        ([2.0, 2.0, 1.8, 1.8, 1.5, 1.5, 1.2, 1.2], [False, False]),
        ([2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 7.5, 7.5], [False, None]),  # grows less and less, and may come to rest
        ([2.0, 4.0], [False, None]),  # one change, of which it is not known whether it gets smaller
        ([2.0, 2.1], [True, True]),
    ],
)
def test_an_effective_rate_is_constant_that_stays_and_comes_to_rest_where_it_stays_in_the_end(rates, verdicts):
    # Of a norm of 1 the effective learning rate is the rate.
    setting = Setting("digits", 64, 8, 0.3, 0.03, steps=10 * (len(rates) - 1))
    one = course(np.ones((len(rates), 2, 2)), [[1.0]] * len(rates))
    twins = compare(setting, one, replace(one, rates=np.array(rates)))
    assert [said.holds for said in report(pairs(setting), [twins] * 9).verdicts[2:4]] == verdicts


def test_outputs_that_are_no_numbers_are_refused():
    setting = Setting("digits", 64, 8, 0.3, 0.03, steps=20)
    with pytest.raises(LabError, match="fewer steps, or less decay"):
        compare(setting, course(np.ones((3, 2, 2)), [[1.0]] * 3), course(np.full((3, 2, 2), np.nan), [[1.0]] * 3))


def test_pairs_are_kept_and_read_again(lab, found, tmp_path):
    kept = lab.archive.root / "dynamics" / "exp-schedule"
    assert {path.stem for path in kept.glob("*.json")} >= {key(pair.setting, pair.way) for pair in pairs(SETTING)}
    again = STUDY.run(replace(lab, known=True))
    assert again.numbers == found.numbers
    path = tmp_path / "one.json"
    path.write_text('{"steps": []}')
    with pytest.raises(LabError, match="Delete it to train again"):
        Twins.read(path)
    with pytest.raises(LabError, match="leave --known out"):
        STUDY.run(replace(lab, archive=Archive(tmp_path), known=True))


def test_the_report_on_the_exponential_schedule_is_strict_json_with_three_panels(lab, found):
    json.dumps(STUDY.as_json(lab, found), allow_nan=False)
    assert [len(ax.lines) for ax in found.figures["figure"].axes] == [9, 2, 4]
    assert [row[4] for row in found.tables[0].rows] == [None] * 9
