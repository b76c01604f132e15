"""What can go wrong in the laboratory."""

from __future__ import annotations

from gyroscope.errors import GyroscopeError


class LabError(GyroscopeError):
    """A model has no such name, a trial diverged, or a worker process died.

    >>> from gyroscope_lab import models
    >>> models.make("digit-cnn", seed=0)
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: no model is called 'digit-cnn'; there are: digits-cnn, mlp-{depth}x{width}, ...
    """
