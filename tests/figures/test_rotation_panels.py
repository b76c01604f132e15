import numpy as np
import pytest
from matplotlib.image import imread

from gyroscope.errors import FigureError
from gyroscope.figures import Panel, rotation_panels, save


def panels(count):
    return [Panel(f"run {i}", np.full((4, 7), i / 10), note=f"{i} %") for i in range(count)]


def drawn(figure):
    return [ax for ax in figure.axes if ax.lines]


def test_ten_panels_make_two_rows_of_five():
    axes = drawn(rotation_panels(panels(10)))
    assert len(axes) == 10
    assert all(len(ax.lines) == 7 for ax in axes)
    assert {ax.get_gridspec().get_geometry() for ax in axes} == {(2, 5)}


def test_each_panel_shows_its_own_run_title_and_note():
    for i, ax in enumerate(drawn(rotation_panels(panels(3)))):
        assert ax.get_title() == f"run {i}"
        assert [text.get_text() for text in ax.texts] == [f"{i} %"]
        assert ax.lines[0].get_ydata().tolist() == [i / 10] * 4


def test_axes_are_shared():
    first, *others = drawn(rotation_panels(panels(7)))
    assert first.get_ylim() == (0, 1)
    first.set_xlim(0, 99)
    assert all(ax.get_xlim() == (0, 99) for ax in others)


def test_an_incomplete_row_leaves_no_empty_axes():
    figure = rotation_panels(panels(7))
    assert len(figure.axes) == 7 + 1


def test_every_column_has_epochs_under_its_lowest_panel():
    figure = rotation_panels(panels(7))
    figure.canvas.draw()
    labeled = [any(label.get_visible() for label in ax.get_xticklabels()) for ax in drawn(figure)]
    assert labeled == [False] * 2 + [True] * 5


def test_the_color_bar_explains_depth():
    figure = rotation_panels(panels(2))
    assert figure.axes[-1].get_ylabel() == "layer: first → last"


def test_no_panels_are_refused():
    with pytest.raises(ValueError, match="`panels` must be at least one Panel"):
        rotation_panels([])


@pytest.mark.parametrize("given", [[5], 5, [[[0.0], [0.1]]], "ab"])
def test_what_are_no_panels_is_refused(given):
    with pytest.raises(FigureError, match="`panels` must be a list of Panel, got "):
        rotation_panels(given)


def test_a_title_is_written_as_text():
    assert rotation_panels(panels(2), title=5).get_suptitle() == "5"


def test_save_writes_each_format_where_it_says(tmp_path):
    png, svg = save(rotation_panels(panels(2)), tmp_path / "rates.v1")
    assert (png, svg) == (tmp_path / "rates.v1.png", tmp_path / "rates.v1.svg")
    assert imread(png).std() > 0
    assert "<svg" in svg.read_text()
