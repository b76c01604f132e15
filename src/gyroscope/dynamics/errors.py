"""What can go wrong in the theory."""

from __future__ import annotations

from gyroscope.errors import GyroscopeError


class DynamicsError(GyroscopeError):
    """A function of the theory was given a model, a batch, a series or a number it has nothing to say about.

    >>> issubclass(DynamicsError, GyroscopeError)
    True
    """
