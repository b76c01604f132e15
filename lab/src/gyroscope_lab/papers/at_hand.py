"""The images of the conditioning paper where they are available, and scikit-learn's digits otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gyroscope_lab.data.catalogue import DATASETS, missing
from gyroscope_lab.data.digits import PER_CLASS
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab

DIGITS = Source("digits")
_CLASSES = 10
# Published training examples, and the pixels and channels of each.
_EXAMPLES = {"digits": _CLASSES * PER_CLASS, "mnist": 60_000, "cifar-10": 50_000, "cifar-100": 50_000}
_PIXELS = {"digits": 64, "mnist": 784, "cifar-10": 3072}
_CHANNELS = {"digits": 1, "mnist": 1, "cifar-10": 3}


def at_hand(lab: Lab, wanted: Source) -> Source:
    """Return `wanted` at full scale, and at the small one if its files are in the laboratory's folder; else the digits.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [at_hand(Lab(Archive("runs"), scale), Source("mnist")).name for scale in ("smoke", "small", "full")]
    ['digits', 'digits', 'mnist']
    """
    if lab.scale == "full" or (lab.scale == "small" and _is_there(wanted.name, lab.data)):
        return wanted
    return DIGITS


def examples(source: Source) -> int:
    """Return the number of training examples.

    >>> examples(Source("mnist")), examples(Source("mnist", per_class=100)), examples(Source("digits"))
    (60000, 1000, 200)
    """
    return _EXAMPLES[source.name] if source.per_class is None else _CLASSES * source.per_class


def pixels(source: Source) -> tuple[tuple[str, Any], ...]:
    """Return the options that tell a perceptron the size of the images.

    >>> pixels(Source("mnist"))
    (('inputs', 784),)
    """
    return (("inputs", _PIXELS[source.name]),)


def channels(source: Source) -> tuple[tuple[str, Any], ...]:
    """Return the options that tell a convolutional network the channels of the images.

    >>> channels(Source("cifar-10"))
    (('channels', 3),)
    """
    return (("channels", _CHANNELS[source.name]),)


def _is_there(name: str, folder: Path | str | None) -> bool:
    forms = [known for known in DATASETS if known.source == name]
    return folder is not None and any(not missing(known, Path(folder).expanduser()) for known in forms)
