"""What can go wrong in the laboratory."""

from __future__ import annotations

from gyroscope.errors import GyroscopeError


class LabError(GyroscopeError, ValueError):
    """A name, an option, a folder or a file that was given cannot be used.

    >>> from gyroscope_lab import models
    >>> models.make("digit-cnn", seed=0)
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: no model is called 'digit-cnn'; there are: digits-cnn, mlp-{depth}x{width}, ...
    """


class TrialError(LabError, RuntimeError):
    """A trial failed while it ran, its worker process died, or its result is lost."""
