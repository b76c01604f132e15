from dataclasses import replace

import numpy as np
import pytest
import torch

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.dynamics.knockout import (
    KINDS,
    PLANS,
    STUDIES,
    Drift,
    Setting,
    network,
    trained,
    verdicts,
)
from gyroscope_lab.papers.dynamics.measurements import Arm
from gyroscope_lab.training.archive import Archive

[STUDY] = STUDIES
PLAN = PLANS["smoke"]


@pytest.fixture(scope="module")
def found(lab):
    return STUDY.run(lab)


def setting(kind, **others):
    return Setting(PLAN.source, PLAN.depth, PLAN.width, PLAN.schedule, kind, PLAN.rates[0], 0, **others)


def arm(kind, loss, drift, spread):
    """Three seeds whose losses and drifts are apart by a share; the order of the seeds depends on the kind."""
    first, runs = KINDS.index(kind), []
    for place in range(3):
        factor = 1 + spread * ((first + place) % 3 - 1)
        its = None if loss is None else loss * factor
        runs.append({"loss": [its], "drift": None if drift is None else drift * factor, "test": 90.0})
    return Arm(kind, 0.1, runs)


def held(plain, normal, noisy, spared, drifts=(0.4, 0.0, 0.4, 0.3), spread=0.01):
    losses = (plain, normal, noisy, spared)
    arms = [arm(kind, loss, drift, spread) for kind, loss, drift in zip(KINDS, losses, drifts, strict=True)]
    return [verdict.holds for verdict in verdicts(arms, 0.5)]


def test_all_kinds_start_from_the_same_weights(lab):
    weights = [list(network(lab, setting(kind)).parameters()) for kind in KINDS]
    for others in weights[1:]:
        for p, q in zip(weights[0], others, strict=True):
            assert torch.equal(p, q)


def test_noise_gives_units_means_and_scales_within_its_bounds_and_new_ones_for_every_batch(lab):
    model, seen = network(lab, setting("BN + noise")), []
    model.relu1.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    x = torch.randn(50, 1, 8, 8, dtype=torch.float64)
    model(x), model(x)
    for one in seen:
        assert one.mean(0).abs().max() <= 0.5
        assert 0.49 < one.std(0, correction=0).min() < 0.8 < 1.2 < one.std(0, correction=0).max() < 1.51
    assert (seen[0].mean(0) - seen[1].mean(0)).abs().mean() > 0.1


def test_the_last_normalization_is_spared_where_none_follows(lab):
    model, seen = network(lab, setting("BN + noise, not behind the last")), []
    model.relu3.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    model(torch.randn(50, 1, 8, 8, dtype=torch.float64))
    assert seen[0].mean(0).abs().max() < 1e-12


def test_how_far_means_move_is_what_a_loop_over_units_and_steps_gives():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
    drift, batches = Drift(model), [torch.randn(6, 3) for _ in range(4)]
    for x in batches:
        model(x)
    model.eval()(100 + batches[0])  # not looked at
    s = [model[0](x).detach().double().numpy() for x in batches]
    moves = [
        abs(s[t + 1][:, j].mean() - s[t][:, j].mean()) / s[t][:, j].std() for t in range(3) for j in range(4)
    ]  # fmt: skip
    assert drift.mean == pytest.approx(np.mean(moves), rel=1e-5)


def test_the_table_has_what_the_trainings_told(lab, found):
    for row, kind in zip(found.tables[0].rows, KINDS, strict=True):
        run = trained(lab, setting(kind))
        assert row[0] == kind
        assert row[3:] == pytest.approx((np.mean(run["loss"]), run["loss"][-1], run["test"], run["drift"]))
        first = [epoch for epoch, loss in enumerate(run["loss"], 1) if loss <= PLAN.bound]
        assert row[2] == (first[0] if first else None)


def test_noise_puts_the_shift_back_and_training_stays_better_than_without_normalization(found):
    plain, normal, noisy, _ = found.numbers["arms"]
    assert noisy["drifts"][0] > max(plain["drifts"][0] / 2, normal["drifts"][0])
    assert max(normal["area"], noisy["area"]) < plain["area"]
    assert [verdict.holds for verdict in found.verdicts] == [None] * 5  # one seed


def test_noise_that_takes_all_of_the_gain_is_no_small_matter():
    assert held(1.0, 0.2, 0.25, 0.2) == [True, True, True, True, True]
    assert held(1.0, 0.2, 1.1, 0.9) == [True, True, False, False, False]
    assert held(0.2, 0.3, 0.4, 0.3)[1:4] == [False, None, None]
    assert held(1.0, 0.2, 0.25, 0.2, drifts=(0.4, 0.0, 0.1, 0.1))[0] is False


def test_differences_within_the_chance_of_seeds_are_undecided():
    assert held(1.0, 0.9, 0.9, 0.9, spread=0.2)[1:] == [None] * 4
    assert held(1.0, 0.2, 0.4, 0.3, spread=0.02)[1:] == [True, None, True, True]  # 25 % of the gain, and 12.5 %
    assert held(1.0, 0.2, 0.25, 0.2, drifts=(0.4, 0.0, 0.21, 0.2), spread=0.2)[0] is None


def test_where_a_training_diverges_its_verdicts_are_undecided():
    assert held(None, 0.3, None, 0.3) == [True, None, None, None, None]
    assert held(None, None, 0.3, 0.3)[1:] == [None] * 4
    assert held(1.0, 0.2, None, 0.2)[1:] == [True, None, True, None]
    for kind in range(3):
        drifts = [0.4, 0.0, 0.4, 0.3]
        drifts[kind] = None
        assert held(1.0, 0.2, 0.25, 0.2, drifts=drifts)[0] is None


def test_the_share_of_the_gain_has_the_error_of_a_ratio_of_means():
    arms = [arm(kind, loss, 0.4, 0.05) for kind, loss in zip(KINDS, (1.0, 0.2, 0.5, 0.4), strict=True)]
    plain, normal, noisy = (np.array([run["loss"][0] for run in one.runs]) for one in arms[:3])
    share = (noisy - normal).mean() / (plain - normal).mean()
    # The deviation of a seed from the line c = b g through the bound b that the share is compared with.
    error = np.std((noisy - normal) - 0.25 * (plain - normal), ddof=1) / np.sqrt(3) / (plain - normal).mean()
    assert f"{100 * share:.0f} ± {100 * error:.0f} % of the gain" in verdicts(arms, 0.5)[2].here


def test_noise_of_no_width_changes_nothing(tmp_path):
    lab = Lab(Archive(tmp_path))
    short = replace(PLAN.schedule, epochs=2)
    quiet = replace(setting("BN + noise", shift=0.0, gain=(1.0, 1.0)), schedule=short)
    normal = replace(setting("BN"), schedule=short)
    assert trained(lab, quiet)["loss"] == pytest.approx(trained(lab, normal)["loss"], rel=1e-9)


def test_a_report_is_saved_whole(lab, found, tmp_path):
    written = {path.name for path in STUDY.save(lab, found, tmp_path)}
    assert written == {"figure.png", "figure.svg", "README.md", "result.json"}
