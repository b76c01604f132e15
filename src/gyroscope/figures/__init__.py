"""Figures, one function each; all return matplotlib objects and none touches pyplot's state."""

from importlib.util import find_spec

from gyroscope.errors import MissingExtraError

if find_spec("matplotlib") is None:
    raise MissingExtraError(
        "gyroscope.figures needs matplotlib, which is not installed: pip install 'gyroscope[figures]'"
    )

from gyroscope.figures import drawing
from gyroscope.figures.compare import compare
from gyroscope.figures.conditioning_by_layer import conditioning_by_layer
from gyroscope.figures.conditioning_over_time import conditioning_over_time
from gyroscope.figures.curves import curves, norms, rates
from gyroscope.figures.dashboard import dashboard
from gyroscope.figures.effective_rates import effective_rates
from gyroscope.figures.example_run import Example, example_run
from gyroscope.figures.moment_percentiles import moment_percentiles
from gyroscope.figures.neurons import neurons
from gyroscope.figures.rotation import Panel, rotation_curves, rotation_heatmap, rotation_panels
from gyroscope.figures.save import save
from gyroscope.figures.scalars import scalars
from gyroscope.figures.spectra import spectra

__all__ = [
    "Example",
    "Panel",
    "compare",
    "conditioning_by_layer",
    "conditioning_over_time",
    "curves",
    "dashboard",
    "drawing",
    "effective_rates",
    "example_run",
    "moment_percentiles",
    "neurons",
    "norms",
    "rates",
    "rotation_curves",
    "rotation_heatmap",
    "rotation_panels",
    "save",
    "scalars",
    "spectra",
]
