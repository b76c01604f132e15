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
    """A model has no layers, a pattern matches none, or a layer is not suitable.

    >>> import torch, gyroscope
    >>> gyroscope.layers(torch.nn.Linear(2, 2), include="conv*")
    Traceback (most recent call last):
    gyroscope.errors.LayerError: ...
    """


class VectorError(GyroscopeError, ValueError):
    """`dots` or `combine_` was given lists of tensors that do not fit together.

    >>> import torch, gyroscope
    >>> gyroscope.vectors.dots({"wg": ([torch.ones(2)], [torch.ones(3)])})
    Traceback (most recent call last):
    gyroscope.errors.VectorError: ...
    """


class ControlError(GyroscopeError, ValueError):
    """A controller was given a rate, an optimizer, a gradient or a state it cannot work with.

    >>> import gyroscope
    >>> gyroscope.control.rates.alpha_multipliers(2.0, 3)
    Traceback (most recent call last):
    gyroscope.errors.ControlError: ...
    """


class MonitorError(GyroscopeError, ValueError):
    """A monitor was given a model, an optimizer, a quantity or a state it cannot measure.

    >>> import gyroscope
    >>> gyroscope.monitor.forget("rotation")
    Traceback (most recent call last):
    gyroscope.errors.MonitorError: `name` must be a quantity of your own, got 'rotation', which is built in. ...
    """


class StoreError(GyroscopeError, RuntimeError):
    """A run cannot be created, read or written; the message names the file and what was found there.

    >>> import gyroscope
    >>> gyroscope.load("no such folder")
    Traceback (most recent call last):
    gyroscope.errors.StoreError: ...
    """


class PageError(GyroscopeError, RuntimeError):
    """A page cannot be made or shown: there is no run to show, an option is invalid, or a file cannot be written.

    >>> import gyroscope
    >>> gyroscope.page.live("no such folder")
    Traceback (most recent call last):
    gyroscope.errors.PageError: `folder` must be a run or a folder with runs, got ...
    """


class FigureError(GyroscopeError, ValueError):
    """A figure was given runs or numbers that do not hold what it shows.

    >>> import gyroscope
    >>> gyroscope.figures.example_run(layers=0)
    Traceback (most recent call last):
    gyroscope.errors.FigureError: ...
    """


class MissingExtraError(GyroscopeError, ImportError):
    """An optional dependency is needed and not installed; the message names the extra to install.

    >>> from gyroscope.integrations.mirror import imported
    >>> imported("no_such_tool", sink="NoSuch", extra="nosuch")
    Traceback (most recent call last):
    gyroscope.errors.MissingExtraError: NoSuch cannot import no_such_tool ...
    """


class ConditioningError(GyroscopeError, ValueError):
    """A conditioning analysis was given a model, a loss, a batch or a network size it cannot treat.

    >>> import torch, gyroscope
    >>> gyroscope.condition(torch.nn.Linear(2, 2), torch.nn.functional.mse_loss, "no batch")
    Traceback (most recent call last):
    gyroscope.errors.ConditioningError: ...
    """


class DynamicsError(GyroscopeError, ValueError):
    """A function of the theory was given a model, a batch, a series or a number that it does not cover.

    >>> import gyroscope
    >>> gyroscope.theory.fixed_point(0.1, 0.0)
    Traceback (most recent call last):
    gyroscope.errors.DynamicsError: ...
    """
