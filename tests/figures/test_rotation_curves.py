import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from gyroscope.figures import rotation_curves
from gyroscope.figures.depth import depth_colours

CURVES = np.array([[0.0, 0.0, 0.0], [0.1, 0.2, 0.3], [0.4, 0.5, 0.9]])


def luminance(colour):
    return float(np.dot(to_rgb(colour), [0.2126, 0.7152, 0.0722]))


def test_one_line_a_layer_through_its_values():
    ax = rotation_curves(CURVES, [0, 10, 20])
    assert len(ax.lines) == 3
    for layer, line in enumerate(ax.lines):
        assert line.get_xdata().tolist() == [0, 10, 20]
        assert line.get_ydata().tolist() == CURVES[:, layer].tolist()


def test_axes_span_zero_to_one_and_the_times():
    ax = rotation_curves(CURVES, [5, 10, 20])
    assert ax.get_ylim() == (0, 1)
    assert ax.get_xlim() == (5, 20)


def test_lines_go_from_dark_to_light_with_depth():
    colours = [luminance(line.get_color()) for line in rotation_curves(np.zeros((2, 7))).lines]
    assert colours == sorted(colours)
    assert len(set(colours)) == 7


def test_colours_start_at_viridis_dark_end_and_stop_short_of_its_yellow():
    first, *_, last = depth_colours(5)
    viridis = matplotlib.colormaps["viridis"]
    assert first == pytest.approx(viridis(0.0))
    assert luminance(last) < luminance(viridis(1.0)) - 0.05


def test_a_single_time_and_a_single_layer_can_be_drawn():
    assert len(rotation_curves([[0.0]]).lines) == 1


def test_given_axes_are_drawn_on_and_labels_are_optional():
    ax = Figure().subplots()
    assert rotation_curves(CURVES, ax=ax, title="SGD", xlabel="step", ylabel="") is ax
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == ("SGD", "step", "")


def test_pyplot_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    rotation_curves(CURVES).get_figure().canvas.draw()
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize(
    ("curves", "x", "says"),
    [
        ([0.0, 0.1], None, r"curves has shape \(2,\); it must be \[times, layers\]"),
        (CURVES, [0, 1], r"x has shape \(2,\); for curves of shape \(3, 3\) it must be \(3,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(curves, x, says):
    with pytest.raises(ValueError, match=says):
        rotation_curves(curves, x)
