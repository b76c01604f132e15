"""Figures, one function each; every one returns matplotlib objects and none touches pyplot's state."""

from importlib.util import find_spec

from gyroscope.errors import MissingExtraError

if find_spec("matplotlib") is None:
    raise MissingExtraError("gyroscope.figures needs matplotlib, which is not installed: pip install 'gyroscope[lab]'")

from gyroscope.figures.rotation_curves import rotation_curves
from gyroscope.figures.rotation_panels import Panel, rotation_panels
from gyroscope.figures.save import save

__all__ = ["Panel", "rotation_curves", "rotation_panels", "save"]
