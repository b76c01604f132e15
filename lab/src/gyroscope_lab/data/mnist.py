"""MNIST: 70,000 handwritten digits of 28×28 pixels, read from the files they are published as."""

from __future__ import annotations

from pathlib import Path

import torch

from gyroscope_lab.data.folders import data_folder
from gyroscope_lab.data.idx import read_idx
from gyroscope_lab.data.official import Official
from gyroscope_lab.data.split import Split
from gyroscope_lab.errors import LabError

CLASSES = 10
SIDE = 28
# Beside the folder itself: where torchvision puts them, and where people do.
_WITHIN = ("", "MNIST/raw", "MNIST", "mnist")


def mnist(folder: Path | str | None = None) -> Split:
    """Return MNIST with pixels from 0 to 1: 60,000 images to train on, 10,000 to test on, [N, 1, 28, 28].

    Nothing is downloaded. The four files are `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and the same with
    `t10k` for `train`; each may be compressed (.gz).

    Args:
        folder: where the files are, or a folder that has them in `MNIST/raw` as torchvision keeps them; if not given,
            the folder that the environment variable GYROSCOPE_DATA names.

    >>> mnist("no/such/folder")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: there is no folder no/such/folder to look for MNIST in; give one that exists
    """
    read = read_mnist(folder)
    return Split(
        x_train=read.x_train.float() / 255, y_train=read.y_train, x_test=read.x_test.float() / 255, y_test=read.y_test
    )


def read_mnist(folder: Path | str | None = None) -> Official:
    """Return MNIST as it is published, with pixels from 0 to 255; see `mnist` for the files and the folder.

    >>> read_mnist("no/such/folder")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: there is no folder no/such/folder to look for MNIST in; give one that exists
    """
    root = data_folder(folder, "MNIST")
    x_train, y_train = _part(root, "train")
    x_test, y_test = _part(root, "t10k")
    return Official("MNIST", x_train, y_train, x_test, y_test, classes=CLASSES)


def _part(root: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = _find(root, f"{part}-images-idx3-ubyte"), _find(root, f"{part}-labels-idx1-ubyte")
    x = read_idx(images, shape=[None, SIDE, SIDE])
    y = read_idx(labels, shape=[None]).long()
    if len(x) != len(y) or not len(x):
        raise LabError(f"{images} holds {len(x):,} images and {labels} {len(y):,} labels; they do not belong together")
    if int(y.max()) >= CLASSES:
        raise LabError(f"{labels} has a label {int(y.max())}; MNIST's are 0 to {CLASSES - 1}. Is it another dataset's?")
    return x[:, None], y


def _find(root: Path, name: str) -> Path:
    # Both spellings are about: some programs unpack `-idx3-ubyte` to `.idx3-ubyte`.
    names = [spelling + ending for spelling in (name, name.replace("-idx", ".idx")) for ending in ("", ".gz")]
    for within in _WITHIN:
        for spelling in names:
            if (root / within / spelling).is_file():
                return root / within / spelling
    raise LabError(
        f"{name}, plain or .gz, is neither in {root} nor in its {', '.join(w for w in _WITHIN if w)}; "
        "put MNIST's four files there, or name the folder that has them"
    )
