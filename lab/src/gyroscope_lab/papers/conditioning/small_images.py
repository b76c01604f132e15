"""Handwritten digits of 12×12 pixels, small enough for exact curvature matrices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from gyroscope_lab.data.mnist import mnist
from gyroscope_lab.data.resize import centre_crop, resize
from gyroscope_lab.errors import LabError

Normalization = Literal["unit", "centred", "standard"]

SIDE = 12
# Which images are used never depends on the seed of a study: that one sets the weights.
_CHOICE_SEED = 0


@dataclass(frozen=True)
class SmallImages:
    """Inputs [N, 1, 12, 12] in float64 and labels [N], and in words what they are.

    >>> small_images(3).x.shape
    torch.Size([3, 1, 12, 12])
    """

    x: torch.Tensor
    y: torch.Tensor
    name: str


def small_images(
    count: int,
    *,
    data: Path | str | None = None,
    crop: int = 20,
    normalization: Normalization = "centred",
) -> SmallImages:
    """Return `count` images, the same at every call, or all if there are fewer.

    Args:
        count: how many.
        data: the folder of MNIST, whose training images are cropped and resized; without it scikit-learn's 1,797 digits
            of 8×8 pixels stand in, which are resized alone, so that their 144 pixels span 64 dimensions.
        crop: the side of the middle of MNIST's 28×28 pixels that is kept, before resizing. The digits were fitted
            into 20×20 and then centred by mass: 20 keeps 97 % of the ink; 24 keeps all but 0.2 %, and in return 8
            of 144 pixels that fewer than one image in a hundred uses, "uninformative" in the paper's words.
        normalization: "unit" for pixels from 0 to 1, "centred" for these less the mean of all pixels (one number),
            "standard" for these divided by the standard deviation of all pixels as well.

    >>> images = small_images(5, normalization="unit")
    >>> images.name, float(images.x.min()) >= 0, float(images.x.max()) <= 1
    ('digits', True, True)
    """
    if normalization not in ("unit", "centred", "standard"):
        raise LabError(f"normalization is {normalization!r}; it can be 'unit', 'centred' or 'standard'")
    if count < 2:
        raise LabError(f"{count} images were asked for; batch normalization needs 2 or more")
    x, y = _digits() if data is None else _mnist(data, crop)
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(_CHOICE_SEED))[:count]
    x, y = resize(x[chosen].double(), SIDE), y[chosen]
    if normalization != "unit":
        x = x - x.mean()
    if normalization == "standard":
        x = x / x.std(correction=0)
    return SmallImages(x, y, "digits" if data is None else "MNIST")


def _mnist(folder: Path | str, crop: int) -> tuple[torch.Tensor, torch.Tensor]:
    split = mnist(folder)
    return centre_crop(split.x_train, crop), split.y_train


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.as_tensor(pixels).reshape(-1, 1, 8, 8) / 16, torch.as_tensor(labels, dtype=torch.int64)
