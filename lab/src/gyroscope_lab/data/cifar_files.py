"""Where the files of CIFAR-10 and CIFAR-100 are, and what is in them."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from gyroscope_lab.data.streams import to_the_end
from gyroscope_lab.errors import LabError

# The largest of them has 155 million bytes; a larger one is damaged, and is not read into memory.
_LARGEST = 2**29


@dataclass(frozen=True)
class Edition:
    """The names its publishers gave to the parts of one of the two datasets.

    Attributes:
        title: what it is called.
        train: the files to train on, without `.bin`.
        test: the file to test on.
        labels: each kind of label an image has, as pickles call it, and how many classes of it there are; ours last.
        folders: what its archives unpack to.
        archives: what it comes in.

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
        """How many classes there are.

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
    """Yield each file of a dataset: its name without `.bin`, where it is, and the bytes in it.

    The first place that has all files is read: the folder, the folders its archives unpack to, the archives.

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
        raise LabError(f"{edition.title} is not whole: {found}. Fetch it again, all files from one archive")
    raise LabError(
        f"{edition.title} is not in {root}: looked there, and in its {' and '.join(edition.folders)}, for "
        f"{', '.join(edition.files('.bin'))} or the same without .bin; and for {' and '.join(edition.archives)}. "
        "Put one of these there, or name the folder that has them"
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
        # As a stream, from first to last: seeking in compressed data means starting over.
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
        raise LabError(f"{path} is truncated or no archive ({error}); fetch it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise LabError(f"{path} is damaged, or not compressed by gzip ({error}); fetch it again") from error
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror or error}") from error
    if wanted:
        raise LabError(f"{path} has no {' and no '.join(wanted)}; fetch it again")


def _check_size(where: str, size: int) -> None:
    if size > _LARGEST:
        raise LabError(f"{where} has {size:,} bytes, more than any file of CIFAR; fetch it again")
