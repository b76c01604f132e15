"""The laboratory: small tasks, the networks they train, and the demo that ties them together."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from gyroscope.base.lazy import lazy
from gyroscope.errors import MissingExtraError

if TYPE_CHECKING:
    from gyroscope.lab import data, models

# Looked up rather than imported: scikit-learn takes a second to load and only `data` needs it.
if find_spec("sklearn") is None:
    raise MissingExtraError("gyroscope.lab needs scikit-learn, which is not installed: pip install 'gyroscope[lab]'")

__all__ = ["data", "models"]

if not TYPE_CHECKING:  # to a type checker, what is not listed above is a mistake
    __getattr__ = lazy(__name__, {})
