"""Figures as the value of a notebook's cell: pictures without `%matplotlib inline`, by IPython's protocol alone."""

import pickle
from copy import deepcopy
from io import BytesIO

import matplotlib.figure
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.image import imread

import gyroscope
from gyroscope import figures

NO_FIGURES = {"Example", "Panel", "drawing", "example_run", "save"}


def conditioning():
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    batch = torch.randn(20, 6), torch.arange(20) % 3
    return gyroscope.condition(model, torch.nn.functional.cross_entropy, batch, spectra=True)


RUN = figures.example_run(layers=4, steps=20)
GIVEN = {
    "compare": lambda: ([RUN, figures.example_run(seed=1)],),
    "conditioning_by_layer": lambda: (conditioning(),),
    "curves": lambda: (RUN, "rotation"),
    "rotation_panels": lambda: ([figures.Panel("slow", [[0.0], [0.1]])],),
    "spectra": lambda: (conditioning(),),
}


def drawn(name):
    return getattr(figures, name)(*GIVEN.get(name, lambda: (RUN,))())


def pixels(shown):
    return imread(BytesIO(shown._repr_png_()), format="png")


@pytest.mark.parametrize("name", sorted(set(figures.__all__) - NO_FIGURES))
def test_every_figure_is_a_picture_to_a_notebook(name):
    image = pixels(drawn(name))
    assert np.ptp(image[..., :3]) > 0.5


def test_the_picture_shows_what_was_drawn_later():
    ax = figures.rotation_curves(RUN)
    before = pixels(ax)
    ax.axhline(0.5)
    assert not np.array_equal(pixels(ax), before)


def test_axes_and_their_figure_are_the_same_picture():
    ax = figures.rotation_curves(RUN)
    ax._repr_png_()  # the layout settles when it is first drawn
    assert ax._repr_png_() == ax.figure._repr_png_()


def test_a_picture_has_the_size_of_its_figure():
    height, width, _ = pixels(ax := figures.rotation_curves(RUN)).shape
    assert [width, height] == (ax.figure.get_size_inches() * ax.figure.dpi).tolist()


def test_classes_are_those_of_matplotlib():
    """Tools recognize figures by the name of their class."""
    assert type(drawn("dashboard")) is matplotlib.figure.Figure
    assert type(drawn("rates")) is Axes
    assert not hasattr(matplotlib.figure.Figure, "_repr_png_")


def test_axes_that_were_given_stay_as_they_are():
    ax = matplotlib.figure.Figure().subplots()
    assert not hasattr(figures.rotation_curves(RUN, ax=ax), "_repr_png_")


@pytest.mark.parametrize("copied", [deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["deepcopy", "pickle"])
def test_a_copy_shows_itself(copied):
    ax = figures.rotation_curves(RUN)
    other = copied(ax)
    ax.figure.clear()
    assert np.ptp(pixels(ax)) == 0
    assert np.ptp(pixels(other)) > 0.5
