"""A dataset as it is published, and its division into a split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from gyroscope_lab.data.choice import choose
from gyroscope_lab.data.memory import fits
from gyroscope_lab.data.moments import histogram, moments
from gyroscope_lab.data.split import Split
from gyroscope_lab.errors import LabError

Normalization = Literal["scalar", "channel", "none"]


@dataclass(frozen=True)
class Official:
    """Images as bytes, [N, C, H, W], and their labels, in the two parts their publishers made.

    Attributes:
        name: of the dataset.
        x_train: the images to train on.
        y_train: their labels.
        x_test: the images to test on.
        y_test: their labels.
        classes: the number of classes.
        counts: how often each value of a pixel occurs in `x_train`, [C, 256], where that is known already.

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
        """Return the examples, some held out and some left out as `gyroscope_lab.data.Source` says.

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
                f"choosing examples of {self.name} copies {size / 1e9:.0f} GB, more than half of the free memory; "
                "take all (validation=0, per_class=None), which are read from the disk as they are needed, or fewer"
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
