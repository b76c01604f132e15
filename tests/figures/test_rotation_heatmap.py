from itertools import pairwise

import numpy as np
import pytest
from matplotlib.colors import LogNorm

from figures.made import example_run, run_of
from gyroscope.figures import rotation_heatmap


def drawn(run, **settings):
    return rotation_heatmap(run, **settings).images[0]


def color_at(image, step, layer):
    """The value shown at a place of the picture."""
    left, right, bottom, top = image.get_extent()
    values = np.ma.filled(image.get_array(), np.nan)
    rows, columns = values.shape
    return values[int((layer - top) / (bottom - top) * rows), int((step - left) / (right - left) * columns)]


@pytest.mark.parametrize("layers", [3, 34, 1202])
def test_a_row_is_a_layer_and_a_column_a_step_with_the_first_layer_on_top(layers):
    run = example_run(layers=layers, steps=50)
    image = drawn(run)
    assert np.array_equal(np.ma.filled(image.get_array(), np.nan), run.series("rotation").T.astype(float))
    assert tuple(image.get_extent()) == (-0.5, 49.5, layers - 0.5, -0.5)
    assert image.origin == "upper"


def test_rotation_is_colored_from_zero_to_one_or_to_less_where_all_is_less():
    assert drawn(run_of(rotation=[[0.0], [0.6]])).get_clim() == (0, 1)
    assert drawn(run_of(rotation=[[0.0], [0.04]])).get_clim() == (0, 0.05)
    assert drawn(run_of(rotation=[[0.0], [0.04]]), limits=(0, 1)).get_clim() == (0, 1)
    assert drawn(run_of(rotation=[[0.0], [1.7]])).get_clim() == pytest.approx((0, 1.7))


def test_an_end_of_the_colors_that_is_not_given_is_what_suits_the_quantity():
    run = run_of(rotation=[[0.0], [0.04]])
    assert drawn(run, limits=(None, 1)).get_clim() == (0, 1)
    assert drawn(run, limits=[np.float32(0.03125), None]).get_clim() == (0.03125, 0.05)
    assert drawn(run, limits=(None, None)).get_clim() == (0, 0.05)


def test_ends_that_are_equal_are_taken_as_matplotlib_takes_them():
    below, above = drawn(run_of(rotation=[[0.0], [0.04]]), limits=(0, 0)).get_clim()
    assert below == -above


def test_uneven_steps_are_where_they_belong():
    steps = [0, 1, 10, 100, 1000]
    rotation = np.arange(10).reshape(5, 2) / 10
    image = drawn(run_of(rotation=rotation, steps=steps))
    assert tuple(image.get_extent()) == (-0.5, 1000.5, 1.5, -0.5)
    for row, step in enumerate(steps):
        if step > 1:  # finer than a column
            assert color_at(image, step, 1) == pytest.approx(rotation[row, 1])
    assert color_at(image, 54, 0) == pytest.approx(rotation[2, 0])
    assert color_at(image, 57, 0) == pytest.approx(rotation[3, 0])


def test_ten_thousand_steps_become_a_thousand_columns_up_to_the_last():
    image = drawn(run_of(rotation=np.linspace(0, 1, 10_001)[:, None]))
    assert image.get_array().shape == (1, 1000)
    assert image.get_array()[0, -1] == pytest.approx(1, abs=1e-3)
    assert (np.diff(image.get_array()[0]) > 0).all()


def test_gaps_between_values_are_filled_with_the_value_before_and_others_are_grey():
    nan = np.nan
    image = drawn(run_of(rotation=[[0.1, nan], [nan, 0.2], [0.3, nan]]))
    shown = np.ma.filled(image.get_array(), nan)
    np.testing.assert_allclose(shown, [[0.1, 0.1, 0.3], [nan, 0.2, nan]], rtol=1e-6)
    assert image.cmap.get_bad()[:3].tolist() == [0.85] * 3


def test_norms_and_rates_are_on_a_logarithmic_scale_where_zero_is_the_smallest():
    image = drawn(run_of(gradient_norm=[[0.0, 1.0], [0.01, 10.0]]), quantity="gradient_norm")
    assert isinstance(image.norm, LogNorm)
    assert image.get_clim() == pytest.approx((0.01, 10))
    assert image.get_array()[0, 0] == pytest.approx(0.01)


def test_the_color_bar_names_the_quantity():
    ax = rotation_heatmap(example_run(), quantity="update_ratio")
    assert ax.figure.axes[-1].get_ylabel() == "update ratio ‖Δw‖/‖w‖"


@pytest.mark.parametrize("layers", [3, 34, 224, 1202])
def test_the_layers_names_do_not_overlap(layers):
    ax = rotation_heatmap(example_run(layers=layers, steps=5))
    ax.figure.canvas.draw()
    boxes = [label.get_window_extent() for label in ax.get_yticklabels()]
    assert 3 <= len(boxes) <= 45
    assert all(upper.y0 - lower.y0 >= upper.height * 0.9 for upper, lower in pairwise(boxes))
    assert ax.get_yticklabels()[0].get_text() == "block1.conv1"


def test_more_layers_make_a_higher_picture_up_to_a_page():
    heights = [rotation_heatmap(example_run(n, 3)).figure.get_size_inches()[1] for n in (3, 20, 34, 1202)]
    assert heights == sorted(heights)
    assert heights[-1] < 7
