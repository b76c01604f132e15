"""MNIST: 70,000 handwritten digits of 28×28 pixels, read from the published idx files."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch

from gyroscope_lab.data.official import Official, data_folder
from gyroscope_lab.data.split import Split
from gyroscope_lab.errors import LabError

CLASSES = 10
SIDE = 28
# The folder itself, the folder that torchvision uses, and other usual ones.
_WITHIN = ("", "MNIST/raw", "MNIST", "mnist")


def mnist(folder: Path | str | None = None) -> Split:
    """Return MNIST with pixels from 0 to 1: 60,000 images to train on, 10,000 to test on, [N, 1, 28, 28].

    Nothing is downloaded. The four files are `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and the same with
    `t10k` for `train`; each may be compressed (.gz).

    Args:
        folder: the folder of the files, or one that has them in `MNIST/raw`, as torchvision keeps them; by default the
            folder that the environment variable GYROSCOPE_DATA names.

    >>> mnist("no/such/folder")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: There is no folder no/such/folder to look for MNIST in. Give one that exists.
    """
    read = read_mnist(folder)
    return Split(
        x_train=read.x_train.float() / 255, y_train=read.y_train, x_test=read.x_test.float() / 255, y_test=read.y_test
    )


def read_mnist(folder: Path | str | None = None) -> Official:
    """Return MNIST as published, with pixels from 0 to 255; see `mnist` for the files and the folder.

    >>> read_mnist("no/such/folder")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: There is no folder no/such/folder to look for MNIST in. Give one that exists.
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
        raise LabError(f"{images} holds {len(x):,} images and {labels} {len(y):,} labels. They do not belong together.")
    if int(y.max()) >= CLASSES:
        raise LabError(
            f"{labels} has a label {int(y.max())}; MNIST's are 0 to {CLASSES - 1}. Is it from another dataset?"
        )
    return x[:, None], y


def _find(root: Path, name: str) -> Path:
    # Both spellings occur: some programs unpack `-idx3-ubyte` to `.idx3-ubyte`.
    names = [spelling + ending for spelling in (name, name.replace("-idx", ".idx")) for ending in ("", ".gz")]
    for within in _WITHIN:
        for spelling in names:
            if (root / within / spelling).is_file():
                return root / within / spelling
    raise LabError(
        f"{name}, plain or .gz, is neither in {root} nor in its {', '.join(w for w in _WITHIN if w)}. "
        "Put MNIST's four files there, or name the folder that has them."
    )


_UNSIGNED_BYTES = 0x08
# No file of this format is larger; one whose header claims more is damaged, and is not read into memory.
_LARGEST = 2**31


def read_idx(path: Path | str, *, shape: Sequence[int | None]) -> torch.Tensor:
    """Return the bytes of an idx file, plain or compressed (.gz), as a tensor of `uint8`.

    The file begins with two zero bytes, the type of its elements (8: bytes), the number of its dimensions and the size
    of each in four bytes, big-endian. The elements follow, row by row, and nothing else.

    Args:
        path: the file.
        shape: the required size of each dimension; None for any.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "labels-idx1-ubyte")
    ...     _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 5, 0, 4]))
    ...     read_idx(path, shape=[None])
    tensor([5, 0, 4], dtype=torch.uint8)
    """
    path = Path(path)
    length = 4 + 4 * len(shape)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(length)
            sizes = _sizes(path, header, shape)
            content = file.read(prod(sizes) + 1)
    except EOFError as error:
        raise LabError(f"{path} is truncated: its compressed data ends early. Fetch it again.") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise LabError(f"{path} is damaged, or not compressed by gzip ({error}). Fetch it again.") from error
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror or error}.") from error
    if len(content) < prod(sizes):
        found = f"{prod(sizes):,} bytes should follow its header and {len(content):,} do"
        raise LabError(f"{path} is truncated: {found}. Fetch it again.")
    if len(content) > prod(sizes):
        raise LabError(f"{path} is damaged: more than the {prod(sizes):,} bytes of its header follow. Fetch it again.")
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).reshape(sizes).copy())


def _sizes(path: Path, header: bytes, shape: Sequence[int | None]) -> list[int]:
    if len(header) < 4 or header[:2] != b"\0\0" or header[2] != _UNSIGNED_BYTES:
        begins = f"it begins with {header[:4].hex(' ')}" if header else "it is empty"
        raise LabError(f"{path} is not an idx file of bytes: {begins}, not with 00 00 08. Fetch it again.")
    if header[3] != len(shape):
        raise LabError(
            f"{path} has {header[3]} dimensions; {len(shape)} are expected: "
            "three for images (idx3), one for labels (idx1). Does it have the name of another file?"
        )
    if len(header) < 4 + 4 * len(shape):
        raise LabError(f"{path} is truncated: it ends within its header. Fetch it again.")
    sizes = [int.from_bytes(header[4 + 4 * i : 8 + 4 * i], "big") for i in range(len(shape))]
    if any(wanted is not None and wanted != size for wanted, size in zip(shape, sizes, strict=True)):
        wanted = " × ".join("any" if size is None else str(size) for size in shape)
        raise LabError(f"{path} holds an array of {' × '.join(map(str, sizes))}; {wanted} is expected.")
    if prod(sizes) > _LARGEST:
        raise LabError(f"{path} is damaged: its header claims {prod(sizes):,} bytes. Fetch it again.")
    return sizes
