"""The study of the noise of batch normalization."""

import json

import pytest
import torch
from torch import nn

from gyroscope_lab.papers.dynamics.ghost_batches import (
    PLANS,
    STUDIES,
    GhostNorm,
    Setting,
    exponent,
    network,
    noise,
    noises,
    report,
)

[STUDY] = STUDIES
PLAN = PLANS["smoke"]


@pytest.fixture(scope="module")
def found(lab):
    return STUDY.run(lab)


def setting(group=0):
    return Setting(PLAN.source, PLAN.depth, PLAN.width, PLAN.sizes, PLAN.draws, group, PLAN.epochs, PLAN.rate, 0)


def test_groups_are_normalized_on_their_own_in_training_and_alike_in_evaluation():
    x = torch.randn(10, 3)
    ghost, whole = GhostNorm(3, size=4), nn.BatchNorm1d(3, affine=False)
    torch.testing.assert_close(ghost(x)[4:8], whole(x[4:8]))
    torch.testing.assert_close(ghost(x)[8:], whole(x[8:]))
    torch.testing.assert_close(GhostNorm(3, size=0)(x), whole(x))
    assert torch.equal(ghost.eval()(x[:1]), ghost(x)[:1])


def test_the_noise_of_a_mean_over_a_batch_is_inversely_proportional_to_its_size():
    """An example less the mean of its batch of B: the other B − 1 make the noise, which is 1/(B − 1)."""

    class Centered(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    x = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0))
    found = [noise(Centered(), x, size, draws=8, seed=0) for size in (8, 16, 32)]
    assert found == pytest.approx([1 / 7, 1 / 15, 1 / 31], rel=0.1)


def test_measuring_the_noise_leaves_the_network_as_it_was():
    model, x = network(setting(group=10)), torch.randn(80, 1, 8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    noises(model, x, setting())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {module.size for module in model.modules() if isinstance(module, GhostNorm)} == {10}


def test_at_smoke_scale_the_noise_falls_as_one_over_the_batch_size_and_layers_have_none(found):
    assert [one.holds for one in found.verdicts] == [True, True, None, None]
    [run] = found.numbers["runs"]["0"]
    assert exponent(PLAN.sizes, run["start"]) == pytest.approx(-1, abs=0.1)
    assert run["layer"] == 0.0


def made(tests, *, power=-1.0, layer=0.0):
    noise = [size**power for size in (8, 16, 32)]
    return [{"start": noise, "end": noise, "layer": layer, "loss": 0.1, "test": test} for test in tests]


def test_each_verdict_turns_with_its_numbers():
    def said(middle, least, **options):
        runs = {0: made([90.0, 91.0, 90.5], **options), 20: made(middle), 5: made(least), 50: made([90.0] * 3)}
        return [one.holds for one in report((8, 16, 32), runs).verdicts]

    better, worse = [92.0, 93.1, 92.4], [85.0, 86.1, 85.4]
    assert said(better, better) == [True, True, True, True]
    assert said(better, worse) == [True, True, True, False]
    assert said(worse, better) == [True, True, False, True]
    assert said([90.0, 91.5, 90.2], worse)[2] is None
    assert said(better, better, power=-0.8)[0] is False
    assert said(better, better, layer=0.1)[1] is False


def test_the_report_is_strict_json(lab, found, tmp_path):
    json.dumps(STUDY.as_json(lab, found), allow_nan=False)
    written = {path.name for path in STUDY.save(lab, found, tmp_path)}
    assert written == {"figure.png", "figure.svg", "README.md", "result.json"}
