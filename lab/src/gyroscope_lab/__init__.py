"""The laboratory: small tasks, the networks they train, and the demo that ties them together."""

from typing import TYPE_CHECKING

from gyroscope.base import lazy

if TYPE_CHECKING:
    from gyroscope_lab import data, models

__version__ = "0.1.0"

__all__ = ["data", "models"]

if not TYPE_CHECKING:  # type checkers reject names that are not listed above
    __getattr__ = lazy(__name__, {})
