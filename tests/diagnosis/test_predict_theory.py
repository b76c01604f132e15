"""The formulas against random walks in float64, and against cases that can be worked out exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gyroscope.diagnosis.predict import decay_law, effective_lr, equilibrium, scale_invariant
from gyroscope.errors import DynamicsError, MonitorError
from oracles.equilibrium import slide, walk

SGD = {"lr": 0.02, "decay": 5e-3}
ADAM = {"lr": 1e-2, "decay": 0.02, "kind": "adamw"}
OPTIMIZERS = {
    "sgd": SGD,
    "momentum": SGD | {"lr": 0.01, "momentum": 0.9},
    "dampened": SGD | {"momentum": 0.8, "dampening": 0.5},
    "sgd_amom": SGD | {"momentum": 0.9, "dampening": 0.9},
    "nesterov": SGD | {"lr": 0.01, "momentum": 0.9, "nesterov": True},
    "adamw": ADAM | {"momentum": 0.9},
    "adamw without momentum": ADAM,
}


def pull(options: dict, size: int = 128) -> float:
    return math.sqrt(size) if options.get("kind") == "adamw" else 1.0


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_random_walk_settles_at_the_rate_and_the_norm_of_the_equilibrium(options):
    at = equilibrium(**options, gradient=pull(options))
    norms, angles = walk(round(14 * at.half_life), **options, start=at.norm)
    settled = round(2 * at.half_life)
    assert math.sqrt(np.square(angles[settled:]).mean()) == pytest.approx(at.rate, rel=0.02)
    assert norms[settled:].mean() == pytest.approx(at.norm, rel=0.03)


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("start", [0.5, 1.5])
def test_half_of_the_way_to_the_equilibrium_takes_one_half_life(options, start):
    at = equilibrium(**options, gradient=pull(options))
    norms, _ = walk(round(3 * at.half_life), **options, start=start * at.norm)
    power = 2 if options.get("kind") == "adamw" else 4
    gone = (norms**power - norms[0] ** power) / (at.norm**power - norms[0] ** power)
    assert int(np.argmax(gone >= 0.5)) == pytest.approx(at.half_life, rel=0.2)


def test_the_angle_of_plain_sgd_is_the_arccosine_of_one_minus_eta_lambda():
    lr, decay = 0.5, 0.1
    norm = (lr**2 / (1 - (1 - lr * decay) ** 2)) ** 0.25  # the exact fixed point of equation 23
    norms, angles = walk(20, lr, decay, start=norm)
    assert norms == pytest.approx(norm, rel=1e-12)
    assert angles == pytest.approx(math.acos(1 - lr * decay), rel=1e-9)
    assert equilibrium(lr, decay).rate == pytest.approx(math.acos(1 - lr * decay), rel=0.01)


@pytest.mark.parametrize("name", ["momentum", "sgd_amom", "adamw"])
def test_the_rate_is_the_same_whether_successive_gradients_agree_or_not(name):
    options = OPTIMIZERS[name]
    at = equilibrium(**options)
    _, angles = walk(round(12 * at.half_life), **options, start=3.0, steady=True)
    settled = round(4 * at.half_life)
    assert math.sqrt(np.square(angles[settled:]).mean()) == pytest.approx(at.rate, rel=0.03)


def test_the_norm_under_momentum_is_larger_where_successive_gradients_agree_up_to_a_bound():
    options = OPTIMIZERS["momentum"]
    at = equilibrium(**options, gradient=1.0)
    norms, _ = walk(round(12 * at.half_life), **options, start=2 * at.norm, steady=True)
    assert 1.3 < norms[round(6 * at.half_life) :].mean() / at.norm < ((1 + 0.9) / (1 - 0.9)) ** 0.25


def test_without_weight_decay_there_is_no_equilibrium():
    with pytest.raises(DynamicsError, match="nothing decays"):
        equilibrium(0.1, 0.0, gradient=1.0)


def test_the_norm_is_not_known_without_the_gradient():
    assert math.isnan(equilibrium(0.1, 1e-4).norm)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": -1.0, "decay": 0.1}, "`lr` must be .* got -1.0"),
        ({"lr": 0.1, "decay": math.nan}, "`decay` must be .* got nan"),
        ({"lr": 0.1, "decay": 0.1, "momentum": 1.0}, "`momentum` must be .* got 1.0"),
        ({"lr": 0.1, "decay": 0.1, "kind": "lion"}, "`kind` must be one of .sgd., .adamw., got .lion."),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, says):
    with pytest.raises(DynamicsError, match=says):
        equilibrium(**options)


def test_effective_lr_divides_by_the_square_of_the_norm():
    assert effective_lr([0.1, 0.2], [2.0, 4.0]) == pytest.approx([0.025, 0.0125])
    assert effective_lr(0.1, 2.0, momentum=0.9) == pytest.approx(0.25)
    assert np.isnan(effective_lr(0.1, 0.0))


def test_the_law_has_the_k0_of_the_theory_where_the_gradient_keeps_its_size():
    lr, gradient, start = 0.05, 2.0, 3.0
    norms, _ = walk(5000, lr, gradient=gradient, start=start)
    law = decay_law(np.arange(5001), lr / norms**2)
    assert law.k0 == pytest.approx(start**4 / (2 * lr**2 * gradient**2), rel=1e-3)
    assert law.e0 == pytest.approx(lr / start**2, rel=1e-3)
    assert law.r2 > 0.999999
    assert law.curve == pytest.approx(lr / norms**2, rel=1e-3)


def test_the_law_holds_on_a_scale_invariant_loss():
    # The gradient's norm at the unit sphere is √(1 − ⟨a, w/‖w‖⟩²), whose square is 1 − 1/64 on average.
    norms = slide(4000, 0.1)
    law = decay_law(np.arange(4001), 0.1 / norms**2)
    assert law.k0 == pytest.approx(1 / (2 * 0.1**2 * (1 - 1 / 64)), rel=0.05)
    assert law.r2 > 0.999


def test_the_law_of_adam_has_the_norms_square_grow():
    norms, _ = walk(3000, 1e-3, kind="adamw", momentum=0.9, beta2=0.999, start=2.0)
    law = decay_law(np.arange(3001), 1e-3 / norms**2, kind="adamw")
    assert law.k0 == pytest.approx(2.0**2 / (1e-6 * 128), rel=0.1)
    assert law.r2 > 0.99


def test_a_learning_rate_schedule_leaves_k0_as_it_is():
    # y = ‖w‖⁴ grows by 2η²g̃² a step, whatever η is at that step.
    lr = np.concatenate([np.linspace(0, 0.1, 200), np.full(500, 0.1), np.full(500, 0.01)])
    norms = (1 + 2 * np.cumsum(lr**2)) ** 0.25
    law = decay_law(np.arange(1200), lr / norms**2, lr=lr)
    assert law.k0 == pytest.approx(1 / (2 * 0.1**2), rel=1e-3)
    assert law.curve[1:] == pytest.approx(lr[1:] / norms[1:] ** 2, rel=1e-3)


def test_measuring_at_some_steps_gives_the_same_law():
    k = np.array([0, 1, 5, 20, 21, 80, 200, 1000])
    law = decay_law(k, 0.1 / np.sqrt(1 + k / 30))
    assert (law.k0, law.e0) == pytest.approx((30, 0.1))


def test_with_weight_decay_the_law_levels_off_at_the_equilibrium():
    options = OPTIMIZERS["sgd"]
    at = equilibrium(**options, gradient=1.0)
    norms, _ = walk(round(8 * at.half_life), **options, start=0.3)
    k = np.arange(len(norms))
    law = decay_law(k, options["lr"] / norms**2, lr=options["lr"], shrinkage=options["lr"] * options["decay"])
    assert law.k0 == pytest.approx(0.3**4 / (2 * options["lr"] ** 2), rel=0.15)
    assert law.curve == pytest.approx(options["lr"] / norms**2, rel=0.06)
    assert law.curve[-1] == pytest.approx(options["lr"] / at.norm**2, rel=0.02)


@pytest.mark.parametrize("shrinkage", [1e-4, 1e-2, 0.5, 20.0])
def test_the_law_solves_its_equation_however_strong_the_decay(shrinkage):
    # y ← y e^(−4d) + b (1 − e^(−4d))/(4d) is y' = −4dy + b over one step.
    y, decay = [7.0], math.exp(-4 * shrinkage)
    for _ in range(300):
        y.append(y[-1] * decay + 0.2 * (1 - decay) / (4 * shrinkage))
    law = decay_law(np.arange(301), np.array(y) ** -0.5, shrinkage=shrinkage)
    assert law.curve == pytest.approx(np.array(y) ** -0.5, rel=1e-6)
    assert law.k0 == pytest.approx(7.0 / 0.2, rel=1e-6)


def test_a_norm_that_stays_has_an_infinite_k0():
    still = decay_law(np.arange(100), np.full(100, 0.1, np.float32))
    assert (still.k0, still.r2) == (math.inf, 1.0)
    assert still.curve == pytest.approx(0.1)


def test_a_norm_that_shrinks_has_an_infinite_k0_and_a_bad_fit():
    law = decay_law(np.arange(100), 0.1 * (1 + np.arange(100) / 50))
    assert law.k0 == math.inf
    assert law.r2 < 0.5


def test_what_was_not_measured_is_left_out_of_the_fit():
    k = np.arange(100)
    e = 0.1 / np.sqrt(1 + k / 10)
    e[::3] = np.nan
    e[7] = 0.0
    law = decay_law(k, e)
    assert law.k0 == pytest.approx(10)
    assert np.isfinite(law.curve).all()


@pytest.mark.parametrize("e", [[], [0.1, 0.1], [np.nan] * 10, [0.1, np.nan, np.nan, 0.2]])
def test_too_few_measurements_give_no_law(e):
    law = decay_law(np.arange(len(e)), e)
    assert np.isnan([law.k0, law.e0, law.r2]).all()
    assert law.curve.shape == (len(e),)


def test_series_of_different_lengths_are_refused():
    with pytest.raises(DynamicsError, match="two series of equal length"):
        decay_law([1, 2, 3], [0.1, 0.2])


def test_small_cosines_by_chance_make_no_layer_scale_invariant():
    cosines = np.full((20, 1), 0.1)
    cosines[5:13] = 1e-9
    assert scale_invariant(cosines) == [False]
    cosines[5:17] = 1e-9  # most of them, so that the median is small too
    assert scale_invariant(cosines) == [None]


def test_one_large_cosine_by_accident_leaves_a_layer_scale_invariant():
    cosines = np.full((20, 1), 1e-8)
    cosines[7] = 0.3
    assert scale_invariant(cosines) == [True]


def test_the_tolerance_follows_what_chance_gives_a_layer_of_that_size():
    cosines = np.full((10, 3), 3e-4)
    assert scale_invariant(cosines, [10_000, 10**6, 10**8]) == [True, None, False]


def test_a_layer_that_was_hardly_measured_is_not_judged():
    cosines = np.full((20, 2), np.nan)
    cosines[3:12, 0] = 1e-9
    cosines[3:13, 1] = 1e-9
    assert scale_invariant(cosines) == [None, True]


def test_cosines_of_another_shape_are_refused():
    with pytest.raises(MonitorError, match=r"the shape \[steps, layers\], got \[2\]"):
        scale_invariant([0.1, 0.2])
    with pytest.raises(MonitorError, match="one size per layer, got 1 for 2 layers"):
        scale_invariant([[0.1, 0.2]], [10])
