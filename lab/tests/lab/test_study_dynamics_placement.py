"""The study of batch normalization before and after the ReLU."""

import json

import pytest
import torch

from gyroscope_lab.papers.dynamics.measurements import Arm
from gyroscope_lab.papers.dynamics.placement import PLACES, PLANS, STUDIES, Setting, network, report, trained

[STUDY] = STUDIES
PLAN = PLANS["smoke"]


@pytest.fixture(scope="module")
def found(lab):
    return STUDY.run(lab)


def setting(place):
    return Setting(PLAN.source, PLAN.depth, PLAN.width, PLAN.schedule, place, 0.3, 0)


def test_all_places_have_the_same_weights_and_the_normalization_is_where_it_is_said_to_be():
    models = {place: network(setting(place)) for place in PLACES}
    for name, weight in models["none"].named_parameters():
        assert all(torch.equal(weight, model.get_parameter(name)) for model in models.values())
    x = torch.randn(20, 1, 8, 8)
    h = models["none"][1](x.flatten(1))
    normal = torch.nn.BatchNorm1d(PLAN.width, affine=False)
    torch.testing.assert_close(models["before"][:4](x), normal(h).relu())
    torch.testing.assert_close(models["after"][:4](x), normal(h.relu()))


def test_activations_are_centered_after_the_relu_alone(lab, found):
    shares = {place: trained(lab, setting(place))["share"] for place in PLACES}
    assert shares["after"] < 1e-12 < 0.05 < min(shares["before"], shares["none"])
    assert found.verdicts[0].holds
    assert [one.holds for one in found.verdicts[1:]] == [None] * 4  # one seed


def made(place, loss, test, share):
    runs = [{"loss": [loss * f, loss * f], "test": test + f, "share": share} for f in (1.0, 1.02, 0.98)]
    return Arm(place, 0.1, runs)


@pytest.mark.parametrize(
    ("before", "after", "holds"),
    [
        ((1.0, 95.0, 0.3), (2.0, 90.0, 0.0), [True, True, True, True, True]),
        ((2.0, 90.0, 0.3), (1.0, 95.0, 0.0), [True, False, False, True, True]),
        ((9.0, 90.0, 0.3), (1.0, 95.0, 0.1), [False, False, False, False, True]),
    ],
)
def test_verdicts_turn_with_their_numbers(before, after, holds):
    arms = {"none": made("none", 4.0, 80.0, 0.5), "before": made("before", *before), "after": made("after", *after)}
    for place, arm in arms.items():  # seeds that differ alike would have no error
        arm.runs[0]["loss"][0] *= 1.001 if place == "none" else 1.002 if place == "after" else 1.0
        arm.runs[0]["test"] += 0.01 if place == "after" else 0.0
    assert [one.holds for one in report(arms).verdicts] == holds


def test_where_a_training_diverges_at_every_rate_its_speed_is_undecided():
    arms = {"none": made("none", 4.0, 80.0, 0.5), "before": made("before", 1.0, 95.0, 0.3)}
    arms |= {"after": made("after", 2.0, 90.0, 0.0)}
    arms["none"].runs[0]["loss"][1] = None
    assert [one.holds for one in report(arms).verdicts[3:]] == [None, None]


def test_the_report_is_strict_json(lab, found, tmp_path):
    json.dumps(STUDY.as_json(lab, found), allow_nan=False)
    written = {path.name for path in STUDY.save(lab, found, tmp_path)}
    assert written == {"figure.png", "figure.svg", "README.md", "result.json"}
