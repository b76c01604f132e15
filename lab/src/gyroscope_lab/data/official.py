"""A published dataset: the folder of its files, the moments of its pixels, and its division into a split."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Literal, Protocol

import torch

from gyroscope_lab.data.split import Split, fits
from gyroscope_lab.errors import LabError

#: The environment variable that names the folder of the datasets.
DATA = "GYROSCOPE_DATA"


def data_folder(folder: Path | str | None, name: str) -> Path:
    """Return the folder of a dataset: the given one, or otherwise the one that GYROSCOPE_DATA names.

    Args:
        folder: the given folder, or None.
        name: the usual name of the dataset.

    >>> data_folder("no/such/folder", "MNIST")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: There is no folder no/such/folder to look for MNIST in. Give one that exists.
    """
    given = os.environ.get(DATA) if folder is None else folder
    if not given:
        raise LabError(f"No folder was given for {name}. Give one, or set {DATA} to the folder of your datasets.")
    root = Path(given).expanduser()
    if not root.is_dir():
        named = f" ({DATA} names it)" if folder is None else ""
        raise LabError(f"There is no folder {root}{named} to look for {name} in. Give one that exists.")
    return root


_BLOCK = 2**20


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes."""


def to_the_end(stream: Readable) -> None:
    """Read the rest of a compressed stream: its checksum is at the very end, and is only compared when it is read.

    >>> import io
    >>> stream = io.BytesIO(b"abc")
    >>> to_the_end(stream)
    >>> stream.tell()
    3
    """
    while stream.read(_BLOCK):
        continue


def choose(
    labels: torch.Tensor, *, classes: int, validation: float, per_class: int | None, seed: int, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of the training examples and of the held-out examples, both in increasing order.

    The examples are shuffled, depending only on the seed. The first `validation` share of them is held out. The
    training examples are all others, or the first `per_class` of each class among them.

    >>> train, held_out = choose(
    ...     torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]), classes=2, validation=0.25, per_class=2, seed=0, name="made"
    ... )
    >>> len(train), len(held_out), set(train.tolist()) & set(held_out.tolist())
    (4, 2, set())
    """
    count = round(validation * len(labels))
    if validation and not 0 < count < len(labels):
        raise LabError(
            f"`validation` must hold out at least one of the {len(labels):,} training examples of {name} and leave at "
            f"least one, got {validation}, which holds out {count:,}."
        )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out, rest = order[:count], order[count:]
    if per_class is not None:
        rest = first_of_each_class(labels, rest, classes=classes, per_class=per_class, name=name)
    return rest.sort().values, held_out.sort().values


def first_of_each_class(
    labels: torch.Tensor, order: torch.Tensor, *, classes: int, per_class: int, name: str
) -> torch.Tensor:
    """Return the first `per_class` indices of each class in `order`, class by class.

    >>> first_of_each_class(
    ...     torch.tensor([0, 0, 1, 1]), torch.tensor([3, 0, 2, 1]), classes=2, per_class=1, name="made"
    ... )
    tensor([0, 3])
    """
    fewest = int(torch.bincount(labels[order], minlength=classes).min())
    if not 1 <= per_class <= fewest:
        raise LabError(
            f"`per_class` must be from 1 to {fewest:,} for {name} without its held-out examples, got {per_class}."
        )
    return torch.cat([order[labels[order] == c][:per_class] for c in range(classes)])


# Images per chunk: a memory-mapped file is never in memory as a whole.
_CHUNK = 4096


def histogram(images: torch.Tensor) -> torch.Tensor:
    """Return how often each value of a byte occurs in each channel of images [N, C, H, W], as [C, 256] whole numbers.

    >>> histogram(torch.tensor([[[[3, 3, 255]]]], dtype=torch.uint8))[0, [0, 3, 255]]
    tensor([0, 2, 1])
    """
    counts = torch.zeros(images.shape[1], 256, dtype=torch.int64)
    for chunk in torch.split(images, _CHUNK):
        for channel, count in enumerate(counts):
            count += torch.bincount(chunk[:, channel].flatten(), minlength=256)
    return counts


def moments(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return μ = Σ h(v) v / n and σ = √(Σ h(v) v² / n − μ²), where h(v) of the n pixels have the value v.

    Both are computed in whole numbers, σ from n Σ h(v) v² − (Σ h(v) v)², and rounded once. They do not depend on the
    order of the pixels, unlike sums of 180 million floats.

    Args:
        counts: h, [256], or [C, 256] for separate moments of each channel.

    >>> moments(torch.bincount(torch.tensor([0, 0, 4, 4]), minlength=256))
    (tensor(2.), tensor(2.))
    """
    if counts.dim() == 1:
        mean, std = _moments(counts.tolist())
        return torch.tensor(mean, dtype=torch.float32), torch.tensor(std, dtype=torch.float32)
    means, stds = zip(*(_moments(count) for count in counts.tolist()), strict=True)
    return torch.tensor(means, dtype=torch.float32), torch.tensor(stds, dtype=torch.float32)


def _moments(counts: list[int]) -> tuple[float, float]:
    n = sum(counts)
    first = sum(count * value for value, count in enumerate(counts))
    second = sum(count * value**2 for value, count in enumerate(counts))
    spread = n * second - first**2
    if not spread:
        raise LabError("All pixels to train on are equal, so they cannot be divided by their standard deviation.")
    return first / n, sqrt(spread) / n


Normalization = Literal["scalar", "channel", "none"]


@dataclass(frozen=True)
class Official:
    """Images as bytes, [N, C, H, W], and their labels, divided into training and test set as published.

    Attributes:
        name: the name of the dataset.
        x_train: the training images.
        y_train: their labels.
        x_test: the test images.
        y_test: their labels.
        classes: the number of classes.
        counts: the histogram of the pixels of `x_train`, [C, 256], if already known.

    >>> x, y = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])
    >>> Official("made", x, y, x, y, classes=2).split(normalization="none").x_train.shape
    torch.Size([2, 3, 4, 4])
    """

    name: str
    x_train: torch.Tensor
    y_train: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    classes: int
    counts: torch.Tensor | None = None

    def split(
        self,
        *,
        validation: float = 0.0,
        normalization: Normalization = "scalar",
        per_class: int | None = None,
        seed: int = 0,
    ) -> Split:
        """Return the examples, some held out and some left out; see `gyroscope_lab.data.Source`.

        >>> x, y = torch.arange(8, dtype=torch.uint8).reshape(8, 1, 1, 1), torch.arange(8) % 2
        >>> split = Official("made", x, y, x, y, classes=2).split(validation=0.25)
        >>> len(split.x_train), len(split.x_val), float(split.mean)
        (6, 2, 3.5)
        """
        mean, std = self._moments(normalization)
        whole = Split(self.x_train, self.y_train, self.x_test, self.y_test, None, None, mean, std, self.classes)
        if not validation and per_class is None:
            return whole
        train, val = choose(
            self.y_train, classes=self.classes, validation=validation, per_class=per_class, seed=seed, name=self.name
        )
        size = self.x_train[:1].nbytes * (len(train) + len(val))
        if not fits(size, "cpu"):
            raise LabError(
                f"Choosing examples of {self.name} copies {size / 1e9:.0f} GB, more than half of the free memory. "
                "Take all (validation=0, per_class=None), which are read from the disk as they are needed, or fewer."
            )
        return Split(
            x_train=self.x_train[train],
            y_train=self.y_train[train],
            x_test=self.x_test,
            y_test=self.y_test,
            x_val=self.x_train[val] if len(val) else None,
            y_val=self.y_train[val] if len(val) else None,
            mean=mean,
            std=std,
            classes=self.classes,
        )

    def _moments(self, normalization: Normalization) -> tuple[torch.Tensor, torch.Tensor]:
        if normalization == "none":
            return torch.tensor(0, dtype=torch.float32), torch.tensor(255, dtype=torch.float32)
        counts = histogram(self.x_train) if self.counts is None else self.counts
        return moments(counts.sum(0) if normalization == "scalar" else counts)
