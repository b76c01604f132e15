"""The exceptions of Gyroscope. Their messages say what is accepted, what was given, and what to do.

Each also derives from a built-in exception. Errors about arguments are a `ValueError`, those about runs on disk
and their pages a `RuntimeError`, and those about packages that are not installed an `ImportError`.
"""

from __future__ import annotations


class GyroscopeError(Exception):
    """Base class of every error that Gyroscope raises on purpose.

    >>> import gyroscope
    >>> issubclass(gyroscope.errors.LayerError, gyroscope.GyroscopeError)
    True
    >>> issubclass(gyroscope.errors.LayerError, ValueError)
    True
    """


class LayerError(GyroscopeError, ValueError):
    """A model has no layers, a pattern matches none, or a layer is not suitable."""


class VectorError(GyroscopeError, ValueError):
    """`dots` or `combine_` was given lists of tensors that do not fit together."""


class ControlError(GyroscopeError, ValueError):
    """A controller was given a rate, an optimizer, a gradient or a state it cannot work with."""


class MonitorError(GyroscopeError, ValueError):
    """A monitor was given a model, an optimizer, a quantity or a state it cannot measure."""


class StoreError(GyroscopeError, RuntimeError):
    """A run cannot be created, read or written; the message names the file and what was found there."""


class PageError(GyroscopeError, RuntimeError):
    """A page cannot be made or shown: there is no run to show, an option is invalid, or a file cannot be written."""


class FigureError(GyroscopeError, ValueError):
    """A figure was given runs or numbers that do not hold what it shows."""


class MissingExtraError(GyroscopeError, ImportError):
    """An optional dependency is needed and not installed; the message names the extra to install."""


class ConditioningError(GyroscopeError, ValueError):
    """A conditioning analysis was given a model, a loss, a batch or a network size it cannot treat."""


class DynamicsError(GyroscopeError, ValueError):
    """A function of the theory was given a model, a batch, a series or a number that it does not cover."""
