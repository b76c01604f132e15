"""The laboratory: small tasks, the networks they train, and the demo that ties them together."""

from typing import TYPE_CHECKING

from gyroscope.base import lazy

if TYPE_CHECKING:
    from gyroscope_lab import data, models

__all__ = ["data", "models"]

if not TYPE_CHECKING:  # to a type checker, what is not listed above is a mistake
    __getattr__ = lazy(__name__, {})
