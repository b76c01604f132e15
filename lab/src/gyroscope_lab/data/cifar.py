"""CIFAR-10 and CIFAR-100: 60,000 color photographs of 32×32 pixels, read from the published files."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gyroscope_lab.data.official import Official, data_folder, to_the_end
from gyroscope_lab.data.plain_pickle import PlainArray, read_plain_pickle
from gyroscope_lab.errors import LabError

# The largest file has 155 million bytes; a larger one is damaged, and is not read into memory.
_LARGEST = 2**29


@dataclass(frozen=True)
class Edition:
    """The published names of the parts of one of the two datasets.

    Attributes:
        title: its name.
        train: the training files, without `.bin`.
        test: the test file.
        labels: the kinds of label of an image, as in the pickles, with their numbers of classes; the one used comes
            last.
        folders: the folders that its archives unpack to.
        archives: the archives that contain it.

    >>> CIFAR_10.files(".bin")[-2:]
    ['data_batch_5.bin', 'test_batch.bin']
    """

    title: str
    train: tuple[str, ...]
    test: str
    labels: Mapping[str, int]
    folders: tuple[str, ...]
    archives: tuple[str, ...]

    @property
    def classes(self) -> int:
        """The number of classes.

        >>> CIFAR_100.classes
        100
        """
        return list(self.labels.values())[-1]

    def files(self, ending: str) -> list[str]:
        """Return the names of its files: with the ending `.bin`, or with none for pickles.

        >>> CIFAR_100.files("")
        ['train', 'test']
        """
        return [name + ending for name in (*self.train, self.test)]


CIFAR_10 = Edition(
    title="CIFAR-10",
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
    labels=MappingProxyType({"labels": 10}),
    folders=("cifar-10-batches-bin", "cifar-10-batches-py"),
    archives=("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"),
)
CIFAR_100 = Edition(
    title="CIFAR-100",
    train=("train",),
    test="test",
    labels=MappingProxyType({"coarse_labels": 20, "fine_labels": 100}),
    folders=("cifar-100-binary", "cifar-100-python"),
    archives=("cifar-100-binary.tar.gz", "cifar-100-python.tar.gz"),
)


def contents(root: Path, edition: Edition) -> Iterator[tuple[str, str, bytes]]:
    """Yield each file of a dataset: its name without `.bin`, its path, and its bytes.

    The files are read from the first place that has all of them: the folder, the folders its archives unpack to, or the
    archives.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in CIFAR_100.files(".bin"):
    ...         _ = Path(folder, name).write_bytes(b"images")
    ...     [(name, content) for name, _, content in contents(Path(folder), CIFAR_100)]
    [('train', b'images'), ('test', b'images')]
    """
    incomplete = []
    for folder in (root, *(root / name for name in edition.folders)):
        for ending in (".bin", ""):
            files = edition.files(ending)
            missing = [file for file in files if not (folder / file).is_file()]
            if not missing:
                return _in_folder(folder, files)
            if len(missing) < len(files):
                incomplete.append(f"{folder} has no {' and no '.join(missing)}")
    for archive in edition.archives:
        if (root / archive).is_file():
            return _in_archive(root / archive, edition)
    if incomplete:
        found = "; ".join(incomplete)
        raise LabError(f"{edition.title} is incomplete: {found}. Fetch it again, all files from one archive.")
    raise LabError(
        f"{edition.title} is not in {root}: looked there, and in its {' and '.join(edition.folders)}, for "
        f"{', '.join(edition.files('.bin'))} or the same without .bin; and for {' and '.join(edition.archives)}. "
        "Put one of these there, or name the folder that has them."
    )


def _in_folder(folder: Path, files: list[str]) -> Iterator[tuple[str, str, bytes]]:
    for file in files:
        path = folder / file
        try:
            _check_size(str(path), path.stat().st_size)
            content = path.read_bytes()
        except OSError as error:
            raise LabError(f"{path} cannot be read: {error.strerror or error}") from error
        yield file.removesuffix(".bin"), str(path), content


def _in_archive(path: Path, edition: Edition) -> Iterator[tuple[str, str, bytes]]:
    wanted = edition.files(".bin" if "binary" in path.name else "")
    try:
        # As a stream: seeking in compressed data means starting over.
        with gzip.open(path) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                file = Path(member.name).name
                if file in wanted and member.isfile():
                    where = f"{path}/{member.name}"
                    _check_size(where, member.size)
                    content = tar.extractfile(member)
                    assert content is not None
                    wanted.remove(file)
                    yield file.removesuffix(".bin"), where, content.read()
            to_the_end(stream)
    except (EOFError, tarfile.TarError) as error:
        raise LabError(f"{path} is truncated, or is not an archive ({error}). Fetch it again.") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise LabError(f"{path} is damaged, or not compressed by gzip ({error}). Fetch it again.") from error
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror or error}") from error
    if wanted:
        raise LabError(f"{path} has no {' and no '.join(wanted)}. Fetch it again.")


def _check_size(where: str, size: int) -> None:
    if size > _LARGEST:
        raise LabError(f"{where} has {size:,} bytes, more than any file of CIFAR. Fetch it again.")


SIDE = 32
PIXELS = 3 * SIDE * SIDE


def read_cifar10(folder: Path | str | None = None) -> Official:
    """Return CIFAR-10 as published: 50,000 images to train on, 10,000 to test on, bytes [N, 3, 32, 32].

    Its files are `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`; or the same without `.bin`, which are
    pickles and are read without running code in them; or the archives `cifar-10-binary.tar.gz` and
    `cifar-10-python.tar.gz`, which are read without unpacking them.

    Args:
        folder: the folder of these files, or one that has them in `cifar-10-batches-bin` or `cifar-10-batches-py`; by
            default the folder that the environment variable GYROSCOPE_DATA names.

    >>> read_cifar10("no/such/folder")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: There is no folder no/such/folder to look for CIFAR-10 in. Give one that exists.
    """
    return _read(CIFAR_10, folder)


def read_cifar100(folder: Path | str | None = None) -> Official:
    """Return CIFAR-100 as published, with its 100 fine labels; see `read_cifar10`.

    Its files are `train.bin` and `test.bin`, `train` and `test`, `cifar-100-binary.tar.gz` or
    `cifar-100-python.tar.gz`; the folders searched are `cifar-100-binary` and `cifar-100-python`.

    >>> read_cifar100("no/such/folder")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: There is no folder no/such/folder to look for CIFAR-100 in. Give one that exists.
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
    """Records, one per image: one byte per kind of label, of which the last is used, and the planes of the image."""
    length = len(edition.labels) + PIXELS
    if not content or len(content) % length:
        raise LabError(
            f"{path} is truncated, or is not {edition.title}: its {len(content):,} bytes are not a whole number of "
            f"images of {length:,} bytes each. Fetch it again."
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
            f"{path} is not a batch of {edition.title}, which has images in an array 'data' and labels in a list "
            f"{kind!r}; it holds {keys}"
        )
    x = data.bytes()
    if x.shape != (len(labels), PIXELS) or not labels:
        shape = " × ".join(map(str, x.shape))
        raise LabError(f"{path} is damaged: its pixels are {shape}, and it has {len(labels):,} labels. Fetch it again.")
    _check_labels(path, kind, edition.labels[kind], min(labels), max(labels))
    return _Batch(x, np.asarray(labels, dtype=np.int64))


def _check_labels(path: str, kind: str, classes: int, *extremes: int) -> None:
    for label in extremes:
        if not 0 <= label < classes:
            raise LabError(
                f"{path} is damaged: there is {label} among its {kind}, which are 0 to {classes - 1}. Fetch it again."
            )


def _whole(edition: Edition, root: Path, batches: list[_Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    x = np.concatenate([batch.x for batch in batches]).reshape(-1, 3, SIDE, SIDE)
    y = np.concatenate([batch.y for batch in batches])
    # Every class has the same number of images, so a file that ends early between two images, or is read twice, is
    # noticed.
    counts = np.bincount(y, minlength=edition.classes)
    if counts.min() != counts.max():
        raise LabError(
            f"{edition.title} in {root} is incomplete: classes must have equally many images, and there are "
            f"{counts.max():,} of class {counts.argmax()} and {counts.min():,} of class {counts.argmin()}. "
            "A file is truncated, or has the name of another. Fetch them again."
        )
    return torch.from_numpy(x), torch.from_numpy(y)
