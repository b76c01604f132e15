import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from figures.made import example_run, run_of, texts
from gyroscope.figures import rotation_curves
from gyroscope.figures.drawing import depth_colors

CURVES = np.array([[0.0, 0.0, 0.0], [0.1, 0.2, 0.3], [0.4, 0.5, 0.9]])


def luminance(color):
    return float(np.dot(to_rgb(color), [0.2126, 0.7152, 0.0722]))


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
    colors = [luminance(line.get_color()) for line in rotation_curves(np.zeros((2, 7))).lines]
    assert colors == sorted(colors)
    assert len(set(colors)) == 7


def test_colors_start_at_viridis_dark_end_and_stop_short_of_its_yellow():
    first, *_, last = depth_colors(5)
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
        ([0.0, 0.1], None, r"`curves` must be \[times, layers\], got shape \(2,\)"),
        (CURVES, [0, 1], r"`x` must have shape \(3,\) for curves of shape \(3, 3\), got \(2,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(curves, x, says):
    with pytest.raises(ValueError, match=says):
        rotation_curves(curves, x)


def test_a_runs_curves_are_drawn_against_its_steps():
    ax = rotation_curves(run_of(rotation=CURVES, steps=[0, 10, 400]))
    assert [line.get_xdata().tolist() for line in ax.lines] == [[0, 10, 400]] * 3
    assert (ax.get_xlabel(), ax.get_xlim()) == ("step", (0, 400))


def test_other_times_can_stand_in_for_a_runs_steps():
    ax = rotation_curves(run_of(rotation=CURVES, steps=[0, 10, 400]), [0, 0.5, 20], xlabel="epoch")
    assert ax.lines[0].get_xdata().tolist() == [0, 0.5, 20]
    with pytest.raises(ValueError, match=r"`x` must have shape \(3,\) for a run of 3 steps, got \(2,\)"):
        rotation_curves(run_of(rotation=CURVES), [0, 1])


def test_gaps_are_bridged_and_a_single_value_is_a_dot():
    rotation = [[0.0, np.nan, np.nan], [np.nan, 0.3, np.nan], [0.5, np.nan, np.nan]]
    bridged, alone, empty = rotation_curves(run_of(rotation=rotation)).lines
    assert bridged.get_xydata().tolist() == [[0, 0], [2, 0.5]]
    assert alone.get_xydata().tolist() == [pytest.approx([1, 0.3])]
    assert (alone.get_marker(), bridged.get_marker()) == ("o", "")
    assert len(empty.get_xdata()) == 0


def test_the_axis_goes_beyond_one_only_if_a_layer_does():
    assert rotation_curves([[0.0], [1.37]]).get_ylim() == (0, 1.4)


def test_a_few_layers_are_named_first_to_last():
    legend = rotation_curves(example_run(layers=3)).get_legend()
    assert texts(legend) == ["block1.conv1", "block1.conv2", "block2.conv1"]
    colors = [luminance(handle.get_color()) for handle in legend.legend_handles]
    assert colors == sorted(colors)


@pytest.mark.parametrize(("layers", "ticks"), [(34, ["1", "34"]), (1202, ["1", "1,202"])])
def test_many_layers_are_numbered_from_the_top_of_a_color_bar(layers, ticks):
    ax = rotation_curves(example_run(layers=layers, steps=5))
    bar = ax.figure.axes[-1]
    assert ax.get_legend() is None
    assert bar.get_ylim() == (layers, 1)
    labels = [label.get_text() for label in bar.get_yticklabels()]
    assert [labels[0], labels[-1]] == ticks


def test_a_legend_can_be_left_out():
    ax = rotation_curves(example_run(), legend=False)
    assert ax.get_legend() is None
    assert len(ax.figure.axes) == 1


def test_1202_lines_are_thin_translucent_and_an_image_in_vector_formats():
    few, many = (rotation_curves(example_run(layers=n, steps=5)).lines for n in (3, 1202))
    assert len(many) == 1202
    assert many[0].get_linewidth() < few[0].get_linewidth() / 2
    assert many[0].get_alpha() < 1
    assert all(line.get_rasterized() for line in many)
    assert not any(line.get_rasterized() for line in few)


def test_long_runs_are_drawn_with_about_a_thousand_points_that_include_the_last():
    [line] = rotation_curves(np.linspace(0, 0.7, 10_000)[:, None]).lines
    assert len(line.get_xdata()) <= 1002
    assert line.get_xydata()[-1].tolist() == [9999, 0.7]
