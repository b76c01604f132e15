"""The laboratory: small tasks, the networks they train, and the demo that ties them together."""

from importlib.util import find_spec

from gyroscope.errors import MissingExtraError

# Looked up rather than imported: scikit-learn takes a second to load and only `data` needs it.
if find_spec("sklearn") is None:
    raise MissingExtraError("gyroscope.lab needs scikit-learn, which is not installed: pip install 'gyroscope[lab]'")

from gyroscope.lab import data, models

__all__ = ["data", "models"]
