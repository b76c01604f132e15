"""Scikit-learn's digits: 1,797 handwritten digits of 8×8 pixels, shipped inside the package."""

from __future__ import annotations

import torch

from gyroscope.lab.data.split import Split

CLASSES = 10
SPLIT_SEED = 0


def digits(*, per_class: int = 20) -> Split:
    """Return the digits, `per_class` of each class to train on and all others to test on.

    The split is the same on every call and in every trial: a seed changes the initialization and the
    order of the examples, never the examples. Pixels are shifted and scaled by the mean and the
    standard deviation of the whole training set (one number each).

    >>> split = digits()
    >>> split.x_train.shape, split.x_test.shape
    (torch.Size([200, 1, 8, 8]), torch.Size([1597, 1, 8, 8]))
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.as_tensor(labels, dtype=torch.int64)
    fewest = int(torch.bincount(y, minlength=CLASSES).min())
    if not 1 <= per_class < fewest:
        raise ValueError(f"per_class is {per_class}; the digits allow 1 to {fewest - 1}")

    generator = torch.Generator().manual_seed(SPLIT_SEED)
    order = torch.randperm(len(y), generator=generator)
    chosen = torch.cat([order[y[order] == c][:per_class] for c in range(CLASSES)])
    training = torch.zeros(len(y), dtype=torch.bool)
    training[chosen] = True

    mean, std = x[training].mean(), x[training].std(correction=0)
    x = (x - mean) / std
    return Split(x_train=x[training], y_train=y[training], x_test=x[~training], y_test=y[~training])
