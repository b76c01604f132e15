"""The exceptions of the laboratory."""

from __future__ import annotations

from gyroscope.errors import GyroscopeError


class LabError(GyroscopeError, ValueError):
    """A name, option, folder or file that cannot be used.

    >>> from gyroscope_lab import models
    >>> models.make("digit-cnn", seed=0)
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: The model must be one of digits-cnn, ..., got 'digit-cnn'.
    """


class TrialError(LabError, RuntimeError):
    """A trial failed while it ran, its worker process died, or its result is lost."""
