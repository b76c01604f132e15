"""Figures with the layers along the x axis, and those of neurons."""

import numpy as np
import pytest

from figures.made import example_run, run_of, texts
from gyroscope.errors import FigureError
from gyroscope.figures import moment_percentiles, neurons


def moments(steps=(0, 10, 1000), layers=3):
    middle = 10.0 ** -np.arange(layers) * np.ones((len(steps), 1)) / (1 + np.arange(len(steps)))[:, None]
    return run_of(steps=steps, moment_p10=middle / 10, moment_p50=middle, moment_p90=middle * 5)


def test_bars_go_from_the_tenth_to_the_ninetieth_percentile_around_the_median():
    ax = moment_percentiles(moments(), steps=[0])
    assert ax.get_yscale() == "log"
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [1, 0.1, 0.01], rtol=1e-6)
    bars = np.array([segment[:, 1] for segment in ax.collections[0].get_segments()])
    np.testing.assert_allclose(bars, [[0.1, 5], [0.01, 0.5], [0.001, 0.05]], rtol=1e-6)


def test_three_steps_over_the_run_are_shown_unless_others_are_asked_for():
    assert texts(moment_percentiles(example_run(steps=1001)).get_legend()) == ["step 20", "step 200", "step 1,000"]
    assert texts(moment_percentiles(moments(), steps=[900, 3]).get_legend()) == ["step 1,000", "step 0"]


def test_steps_are_told_apart_by_marker_as_well_as_by_color():
    lines = [line for line in moment_percentiles(example_run()).lines if line.get_marker() in "os^"]
    assert len({line.get_marker() for line in lines}) == 3
    assert len({line.get_color() for line in lines}) == 3


def test_bars_of_many_layers_run_together_into_bands():
    few, many = moment_percentiles(example_run(layers=34)), moment_percentiles(example_run(layers=1202))
    assert len(few.lines[0].get_xdata()) == 34
    assert len(many.collections) == 3  # one band a step
    np.testing.assert_allclose(many.lines[0].get_ydata(), example_run(layers=1202).series("moment_p50")[2])
    assert many.get_xlim() == (0.5, 1202.5)


def test_a_few_layers_are_named_and_many_are_numbered():
    few, many = moment_percentiles(example_run(layers=3)), moment_percentiles(example_run(layers=34))
    assert [label.get_text() for label in few.get_xticklabels()] == ["block1.conv1", "block1.conv2", "block2.conv1"]
    many.figure.canvas.draw()
    assert "10" in [label.get_text() for label in many.get_xticklabels()]


def test_moments_that_are_zero_can_be_drawn():
    zero = np.zeros((2, 3))
    assert moment_percentiles(run_of(moment_p10=zero, moment_p50=zero, moment_p90=zero)).get_yscale() == "linear"


@pytest.mark.parametrize(
    ("steps", "says"), [([], "`steps` must be at least one step"), (range(6), "at most 5 steps, got 6")]
)
def test_no_steps_or_too_many_are_refused(steps, says):
    with pytest.raises(FigureError, match=says):
        moment_percentiles(moments(), steps=steps)


def test_a_run_without_moments_says_which_optimizers_keep_them():
    with pytest.raises(FigureError, match=r"no second moments .* such as Adam and RMSprop"):
        moment_percentiles(example_run(quantities=["rotation"]))


def test_dying_is_solid_and_full_is_dashed_at_the_sampled_steps():
    ax = neurons(example_run(layers=3))
    assert [line.get_linestyle() for line in ax.lines] == ["-"] * 3 + ["--"] * 3
    assert ax.lines[0].get_xdata().tolist() == list(range(0, 101, 10))
    assert texts(ax.get_legend()) == ["dying (never active)", "full (always active)"]


def test_the_axis_of_fractions_follows_the_largest_but_does_not_magnify_nothing():
    assert neurons(run_of(dying=[[0.0], [0.4]])).get_ylim() == (0, pytest.approx(0.46))
    assert neurons(run_of(dying=[[0.0], [0.95]])).get_ylim() == (0, 1.02)
    assert neurons(run_of(full=[[0.0], [0.0]])).get_ylim() == (0, 0.05)


@pytest.mark.parametrize("layers", [3, 34, 1202])
def test_neurons_rotation_is_shown_by_layer_at_the_last_step(layers):
    run = example_run(layers=layers)
    ax = neurons(run, "rotation")
    np.testing.assert_allclose(ax.lines[0].get_ydata(), run.series("neuron_p50")[-1])
    assert ax.get_ylabel() == "rotation of neurons at step 100"
    assert ax.get_ylim()[0] == 0
    assert run.series("neuron_p100")[-1].max() <= ax.get_ylim()[1] <= 1


def test_rotation_is_shown_where_there_is_no_activity():
    run = example_run(quantities=[f"neuron_p{q}" for q in (0, 10, 50, 90, 100)])
    assert neurons(run).get_xlabel() == "layer, in forward order"
    with pytest.raises(FigureError, match="has no dying or full"):
        neurons(run, "activity")


def test_what_is_not_known_is_refused():
    with pytest.raises(FigureError, match="`show` must be one of 'activity', 'rotation', got 'dead'"):
        neurons(example_run(), "dead")
