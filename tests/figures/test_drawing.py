import numpy as np
import pytest

from gyroscope.figures.drawing import draw_course, moving_mean, own_axes, thin, window
from gyroscope.store.labels import Look


def noise(times, layers, seed=0):
    return np.random.default_rng(seed).standard_normal((times, layers))


def test_short_curves_keep_every_point():
    values = noise(1000, 3)
    x, y = thin(np.arange(1000), values, keep=1000)
    assert np.array_equal(y, values)
    assert np.array_equal(x[:, 1], np.arange(1000))


@pytest.mark.parametrize("times", [1001, 9_999, 10_000, 12_345])
def test_long_curves_keep_their_extremes_their_order_and_their_ends(times):
    values = noise(times, 5)
    x, y = thin(np.arange(times), values)
    assert len(x) <= 1002
    assert np.array_equal(y.max(axis=0), values.max(axis=0))
    assert np.array_equal(y.min(axis=0), values.min(axis=0))
    assert (np.diff(x, axis=0) >= 0).all()
    assert (x[0] == 0).all()
    assert (x[-1] == times - 1).all()
    assert all(np.array_equal(y[:, layer], values[x[:, layer].astype(int), layer]) for layer in range(5))


def test_values_between_gaps_are_kept():
    values = np.full((10_000, 1), np.nan)
    values[::50] = noise(200, 1)
    _, y = thin(np.arange(10_000), values, keep=1000)
    assert np.nanmax(y) == np.nanmax(values)
    assert np.isfinite(y).sum() >= 200


@pytest.mark.parametrize("log", [False, True])
def test_the_moving_mean_is_the_mean_of_what_is_known_around(log):
    values = np.abs(noise(60, 2)) + 0.1
    values[20:23, 0] = np.nan
    mean = moving_mean(values, 5, log=log)
    for at in range(60):
        around = values[max(at - 2, 0) : at + 3]
        expected = np.exp(np.nanmean(np.log(around), axis=0)) if log else np.nanmean(around, axis=0)
        expected[np.isnan(values[at])] = np.nan
        np.testing.assert_allclose(mean[at], expected)


def test_the_window_is_a_fiftieth_of_long_curves_and_nothing_of_short_ones():
    assert (window(99), window(1000), window(10_000)) == (1, 21, 201)


def drawn(values, scale):
    """The number of values that each point of noisy lines averages."""
    steps, depth = np.arange(len(values)), np.linspace(0, 1, values.shape[1])
    return draw_course(own_axes(), steps, values, depth=depth, look=Look("a", scale, noisy=True))


@pytest.mark.parametrize("scale", ["log", "linear"])
@pytest.mark.parametrize("unit", [1.0, 1e-6])
def test_noise_is_smoothed_whatever_its_unit_and_a_trend_is_not_however_steep(scale, unit):
    steps, jumps = np.arange(500)[:, None], 0.1 + np.random.default_rng(0).random((500, 30))
    trend = np.tile(1.1**steps if scale == "log" else 1.0 + steps, 30)
    assert (drawn(unit * trend, scale), drawn(unit * jumps, scale)) == (1, 11)


def test_steps_without_values_do_not_hide_noise_and_no_values_are_not_smoothed():
    values = np.random.default_rng(0).random((900, 30))
    values[::3] = np.nan
    assert drawn(values, "log") > 1
    assert drawn(np.full((900, 30), np.nan), "linear") == 1
