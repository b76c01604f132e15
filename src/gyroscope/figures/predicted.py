"""Predictions that stand beside measurements, where a run holds what they need."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from gyroscope.errors import GyroscopeError
from gyroscope.figures.given import Measured

if TYPE_CHECKING:
    from gyroscope.diagnose.predict import Prediction


def predicted(run: Measured, layers: Collection[str]) -> dict[str, Prediction]:
    """Return the predictions for `layers` by name; none where the run does not hold what they are made from.

    >>> from gyroscope.figures import example_run
    >>> predicted(example_run(quantities=["rotation"]), ["block1.conv1.weight"])
    {}
    """
    from gyroscope.diagnose.predict import predictions

    measured: Any = run  # an `Example` has no layer table, and predictions do without
    try:
        found = predictions(measured)
    except GyroscopeError:
        return {}
    return {prediction.layer: prediction for prediction in found if prediction.layer in layers}
