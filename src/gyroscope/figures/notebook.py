"""Figures as notebooks show them."""

from __future__ import annotations

from functools import partial
from io import BytesIO
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Drawn = TypeVar("Drawn", Figure, Axes)


def as_picture(drawn: Drawn) -> Drawn:
    """Let notebooks show `drawn`, a figure or axes, as a picture where it is the value of a cell, and return it.

    IPython shows what has a `_repr_png_`. Figures of matplotlib have none: they are shown by a formatter, which exists
    once `%matplotlib inline` has been run and then goes first, and axes are not shown at all. The method belongs to the
    object, because tools such as wandb and Streamlit recognize figures by the name of their class.

    >>> as_picture(Figure())._repr_png_()[:4]
    b'\\x89PNG'
    """
    vars(drawn)["_repr_png_"] = partial(_png, drawn)
    return drawn


def _png(drawn: Figure | Axes) -> bytes:
    figure: Any = drawn.get_figure(root=True)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi="figure")
    return picture.getvalue()
