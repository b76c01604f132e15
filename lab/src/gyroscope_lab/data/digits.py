"""Scikit-learn's digits: 1,797 handwritten digits of 8×8 pixels, shipped inside the package."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from gyroscope_lab.data.official import Normalization, choose, first_of_each_class
from gyroscope_lab.data.split import Split
from gyroscope_lab.errors import LabError

CLASSES = 10
PER_CLASS = 20
_BRIGHTEST = 16


def digits(
    *, per_class: int = PER_CLASS, seed: int = 0, validation: float = 0.0, normalization: Normalization = "scalar"
) -> Split:
    """Return the digits, `per_class` of each class to train on and all others to test on.

    The split is the same on every call and in every trial: a trial's seed changes the initialization and the
    order of the examples, never the examples. Pixels are shifted and scaled by the mean and the
    standard deviation of the whole training set (one number each).

    Args:
        per_class: the number of training examples per class.
        seed: the seed of this choice.
        validation: the share of the training examples to hold out. The test examples stay the same.
        normalization: "none" for pixels from 0 to 1 instead. There is one channel, so "channel" is "scalar".

    >>> split = digits()
    >>> split.x_train.shape, split.x_test.shape
    (torch.Size([200, 1, 8, 8]), torch.Size([1597, 1, 8, 8]))
    """
    pixels, labels = stored_digits()
    x, y = pixels.float(), labels
    fewest = int(torch.bincount(y, minlength=CLASSES).min())
    if not 1 <= per_class < fewest:
        raise LabError(f"`per_class` must be from 1 to {fewest - 1} for the digits, got {per_class}.")

    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    chosen = first_of_each_class(y, order, classes=CLASSES, per_class=per_class, name="digits")
    training = torch.zeros(len(y), dtype=torch.bool)
    training[chosen] = True

    if normalization == "none":
        x = x / _BRIGHTEST
    else:
        mean, std = x[training].mean(), x[training].std(correction=0)
        x = (x - mean) / std
    whole = Split(x_train=x[training], y_train=y[training], x_test=x[~training], y_test=y[~training])
    return _held_out(whole, validation, seed) if validation else whole


def stored_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pixels of all digits, from 0 to 16 and [1797, 1, 8, 8], and their labels, as `load_digits` reads them.

    The file is read without importing scikit-learn, which takes a second.

    >>> pixels, labels = stored_digits()
    >>> pixels.max().item(), labels[:5].tolist()
    (16.0, [0, 1, 2, 3, 4])
    """
    package = find_spec("sklearn")
    file = Path(package.origin if package and package.origin else "").with_name("datasets") / "data" / "digits.csv.gz"
    if file.is_file():
        with gzip.open(file, "rt", encoding="ascii") as lines:
            rows = np.loadtxt(lines, delimiter=",")
        pixels, labels = rows[:, :-1], rows[:, -1]
    else:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
    return torch.as_tensor(pixels).reshape(-1, 1, 8, 8), torch.as_tensor(labels, dtype=torch.int64)


def _held_out(whole: Split, validation: float, seed: int) -> Split:
    x, y = whole.x_train, whole.y_train
    train, val = choose(y, classes=CLASSES, validation=validation, per_class=None, seed=seed, name="digits")
    return Split(x[train], y[train], whole.x_test, whole.y_test, x_val=x[val], y_val=y[val])
