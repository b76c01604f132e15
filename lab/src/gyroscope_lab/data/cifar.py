"""CIFAR-10 and CIFAR-100: 60,000 colour photographs of 32×32 pixels, read from the files they are published as."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gyroscope_lab.data.cifar_files import CIFAR_10, CIFAR_100, Edition, contents
from gyroscope_lab.data.folders import data_folder
from gyroscope_lab.data.official import Official
from gyroscope_lab.data.plain_pickle import PlainArray, read_plain_pickle
from gyroscope_lab.errors import LabError

SIDE = 32
PIXELS = 3 * SIDE * SIDE


def read_cifar10(folder: Path | str | None = None) -> Official:
    """Return CIFAR-10 as it is published: 50,000 images to train on, 10,000 to test on, bytes [N, 3, 32, 32].

    Its files are `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`; or the same without `.bin`, which are
    pickles, and are read without running what they may contain; or the archives they come in,
    `cifar-10-binary.tar.gz` and `cifar-10-python.tar.gz`, which are read without unpacking them.

    Args:
        folder: where these are, or a folder that has the files in `cifar-10-batches-bin` or `cifar-10-batches-py`; if
            not given, the folder that the environment variable GYROSCOPE_DATA names.

    >>> read_cifar10("no/such/folder")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: there is no folder no/such/folder to look for CIFAR-10 in; give one that exists
    """
    return _read(CIFAR_10, folder)


def read_cifar100(folder: Path | str | None = None) -> Official:
    """Return CIFAR-100 as it is published, with its 100 fine labels; see `read_cifar10`.

    Its files are `train.bin` and `test.bin`, `train` and `test`, `cifar-100-binary.tar.gz` or
    `cifar-100-python.tar.gz`; the folders looked in are `cifar-100-binary` and `cifar-100-python`.

    >>> read_cifar100("no/such/folder")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: there is no folder no/such/folder to look for CIFAR-100 in; give one that exists
    """
    return _read(CIFAR_100, folder)


class _Batch(NamedTuple):
    x: npt.NDArray[np.uint8]
    y: npt.NDArray[np.int64]


def _read(edition: Edition, folder: Path | str | None) -> Official:
    root = data_folder(folder, edition.title)
    batches: dict[str, _Batch] = {}
    for batch, path, content in contents(root, edition):
        decode = _binary if path.endswith(".bin") else _pickled
        batches[batch] = decode(edition, path, content)
    x_train, y_train = _whole(edition, root, [batches[name] for name in edition.train])
    x_test, y_test = _whole(edition, root, [batches[edition.test]])
    return Official(edition.title, x_train, y_train, x_test, y_test, classes=edition.classes)


def _binary(edition: Edition, path: str, content: bytes) -> _Batch:
    """One record after the other: a byte for each kind of label, the last of them ours, and the planes of an image."""
    length = len(edition.labels) + PIXELS
    if not content or len(content) % length:
        raise LabError(
            f"{path} is truncated or no {edition.title}: its {len(content):,} bytes are no whole number of images of "
            f"{length:,} bytes each; fetch it again"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, length)
    for (kind, classes), labels in zip(edition.labels.items(), records.T, strict=False):
        _check_labels(path, kind, classes, int(labels.min()), int(labels.max()))
    return _Batch(records[:, -PIXELS:], records[:, -PIXELS - 1].astype(np.int64))


def _pickled(edition: Edition, path: str, content: bytes) -> _Batch:
    """A dictionary of an array [N, 3072] and lists of labels, whose keys are bytes if Python 2 wrote it."""
    read = read_plain_pickle(content, name=path)
    if not isinstance(read, dict):
        raise LabError(f"{path} holds a {type(read).__name__}, not the dictionary of a batch of {edition.title}")
    batch = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in read.items()}
    kind = list(edition.labels)[-1]
    data, labels = batch.get("data"), batch.get(kind)
    if not isinstance(data, PlainArray) or not isinstance(labels, list) or not all(type(y) is int for y in labels):
        keys = ", ".join(map(str, batch)) or "nothing"
        raise LabError(
            f"{path} is no batch of {edition.title}, whose images are an array 'data' and whose labels a list "
            f"{kind!r}; it holds {keys}"
        )
    x = data.bytes()
    if x.shape != (len(labels), PIXELS) or not labels:
        shape = " × ".join(map(str, x.shape))
        raise LabError(f"{path} is damaged: its pixels are {shape}, and it has {len(labels):,} labels; fetch it again")
    _check_labels(path, kind, edition.labels[kind], min(labels), max(labels))
    return _Batch(x, np.asarray(labels, dtype=np.int64))


def _check_labels(path: str, kind: str, classes: int, *extremes: int) -> None:
    for label in extremes:
        if not 0 <= label < classes:
            raise LabError(
                f"{path} is damaged: there is {label} among its {kind}, which are 0 to {classes - 1}; fetch it again"
            )


def _whole(edition: Edition, root: Path, batches: list[_Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    x = np.concatenate([batch.x for batch in batches]).reshape(-1, 3, SIDE, SIDE)
    y = np.concatenate([batch.y for batch in batches])
    # Every class has the same number of images, so a file cut between two images, or there twice, is noticed.
    counts = np.bincount(y, minlength=edition.classes)
    if counts.min() != counts.max():
        raise LabError(
            f"{edition.title} in {root} is not whole: it has as many images of each class, and here "
            f"{counts.max():,} of class {counts.argmax()} and {counts.min():,} of class {counts.argmin()}; "
            "a file is cut, or has the name of another: fetch them again"
        )
    return torch.from_numpy(x), torch.from_numpy(y)
