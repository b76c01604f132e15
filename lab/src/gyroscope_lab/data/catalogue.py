"""The datasets that are read from files: their publishers, their files, and the checks of these files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path, PurePosixPath

from gyroscope_lab.errors import LabError


@dataclass(frozen=True)
class File:
    """A published file or folder.

    Attributes:
        name: the name of the file; for a download, relative to the folder of the datasets. A folder's name ends in a
            slash.
        size: the size in bytes, if known.
        checksum: "md5:" or "sha256:" and the digits, if known.
        urls: its addresses; the first that works is used.
    """

    name: str
    size: int | None = None
    checksum: str | None = None
    urls: tuple[str, ...] = ()

    @property
    def known_by(self) -> str:
        """The property that identifies the file: "md5", "sha256", "size", or only its "name".

        >>> File("train.bin", size=153_700_000).known_by
        'size'
        """
        return self.checksum.split(":")[0] if self.checksum else "name" if self.size is None else "size"


@dataclass(frozen=True)
class Piece:
    """One download.

    Attributes:
        download: the file or the archive; None if people have to fetch it themselves.
        parts: the files to read; each part in any one of its forms.
        counts: the number of files or folders that a pattern must match, below the folder of the parts.
    """

    download: File | None
    parts: tuple[tuple[File, ...], ...]
    counts: tuple[tuple[str, int], ...] = ()

    @property
    def archive(self) -> File | None:
        """The download, if it has to be unpacked.

        >>> dataset("mnist").pieces[0].archive is None, dataset("cifar-10").pieces[0].archive.name
        (True, 'cifar-10-binary.tar.gz')
        """
        return self.download if self.download and self.download.name.endswith((".tar.gz", ".zip")) else None


@dataclass(frozen=True)
class Dataset:
    """A dataset and its files.

    Attributes:
        name: its name on the command line.
        title: its usual name.
        source: the name of the `gyroscope_lab.data.Source` that reads it.
        within: the folders to search for its parts, below the folder of the datasets.
        pieces: its files.
        note: its authors, its license, and what to cite.
        by_hand: how to get it if it cannot be downloaded.
    """

    name: str
    title: str
    source: str
    within: tuple[str, ...]
    pieces: tuple[Piece, ...]
    note: str
    by_hand: str = ""


@dataclass(frozen=True)
class Condition:
    """The state of a file, or of several files, on disk.

    Attributes:
        path: the path of the file, or the pattern of the files.
        problem: the problem with it, or None.
        by: the property that was compared: its "md5", "sha256", "size", a "count", or only its "name".
    """

    path: Path
    problem: str | None
    by: str


def dataset(name: str) -> Dataset:
    """Return the dataset called `name`.

    >>> dataset("mnist").title
    'MNIST'
    >>> dataset("cifar10")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: No dataset is called 'cifar10'. Did you mean cifar-10? There are: mnist, ...
    """
    names = [known.name for known in DATASETS]
    if name in names:
        return DATASETS[names.index(name)]
    close = get_close_matches(name, names, n=1)
    meant = f"Did you mean {close[0]}? There are" if close else "There are"
    raise LabError(f"No dataset is called {name!r}. {meant}: {', '.join(names)}.")


def wrong(path: Path, file: File) -> str | None:
    """Return the difference between the file at `path` and the published one, or None if there is none.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "greeting.txt")
    ...     _ = path.write_text("Hello")
    ...     wrong(path, File("greeting.txt", size=6))
    'it has 5 bytes, and 6 are expected'
    """
    try:
        size = path.stat().st_size
        if file.size is not None and size != file.size:
            return f"it has {size:,} bytes, and {file.size:,} are expected"
        if file.checksum is not None:
            kind, expected = file.checksum.split(":")
            if (found := _digest(path, kind)) != expected:
                return f"its {kind.upper()} is {found}, and {expected} is expected"
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    return None


def find(dataset: Dataset, piece: Piece, folder: Path) -> list[tuple[Path, File] | None]:
    """Return the path and the form of each part of a piece; None for a missing part.

    >>> shakespeare = dataset("shakespeare")
    >>> find(shakespeare, shakespeare.pieces[0], Path("no/such/folder"))
    [None]
    """
    places = [folder / within for within in dataset.within]
    return [
        next(((place / form.name, form) for place in places for form in part if _is_there(place, form)), None)
        for part in piece.parts
    ]


def missing(dataset: Dataset, folder: Path) -> list[str]:
    """Return the names of the missing parts.

    >>> missing(dataset("shakespeare"), Path("no/such/folder"))
    ['tinyshakespeare.txt']
    """
    looked = [zip(piece.parts, find(dataset, piece, folder), strict=True) for piece in dataset.pieces]
    return [part[0].name for piece in looked for part, found in piece if found is None]


def check(dataset: Dataset, folder: Path) -> Iterator[Condition]:
    """Yield the condition of each file of a dataset on disk: the parts that are read, and the archives.

    >>> list(check(dataset("shakespeare"), Path("no/such/folder")))
    []
    """
    for piece in dataset.pieces:
        yield from check_parts(dataset, piece, folder)
        if piece.archive and (folder / piece.archive.name).is_file():
            yield _condition(folder / piece.archive.name, piece.archive)


def check_parts(dataset: Dataset, piece: Piece, folder: Path) -> Iterator[Condition]:
    """Yield the condition of each part of a piece on disk.

    >>> cifar = dataset("cifar-10")
    >>> list(check_parts(cifar, cifar.pieces[0], Path("no/such/folder")))
    []
    """
    there = [found for found in find(dataset, piece, folder) if found]
    yield from (_condition(path, file) for path, file in there)
    for path, file in there[:1]:
        root = path.parents[len(PurePosixPath(file.name).parts) - 1]
        for pattern, expected in piece.counts:
            found = sum(1 for _ in root.glob(pattern))
            problem = None if found == expected else f"there are {found:,}, and {expected:,} are expected"
            yield Condition(root / pattern, problem, "count")


def _is_there(place: Path, file: File) -> bool:
    return (place / file.name).is_dir() if file.name.endswith("/") else (place / file.name).is_file()


def _condition(path: Path, file: File) -> Condition:
    return Condition(path, wrong(path, file), file.known_by)


def _digest(path: Path, kind: str) -> str:
    # Publishers give MD5 checksums. They detect damage, not forgery.
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def _file(row: str, *mirrors: str) -> File:
    """A file from its name, size and MD5, with ? for unpublished values."""
    name, size, md5 = row.split()
    urls = tuple(f"{mirror}/{name}" for mirror in mirrors)
    return File(name, None if size == "?" else int(size), None if md5 == "?" else f"md5:{md5}", urls)


def _mnist(name: str, packed: str, plain: str) -> Piece:
    download = _file(
        f"{name}.gz {packed}",
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
        "http://yann.lecun.com/exdb/mnist",  # the publisher's own server, which is often unreachable
    )
    forms = (_file(f"{name} {plain}"), download)
    spelled = (replace(form, name=form.name.replace("-idx", ".idx")) for form in forms)
    return Piece(replace(download, name=f"MNIST/raw/{download.name}"), parts=((*forms, *spelled),))


def _cifar(name: str, title: str, source: str, within: str, archive: str, *parts: str) -> Dataset:
    download = _file(archive, "https://www.cs.toronto.edu/~kriz", "https://cave.cs.toronto.edu/kriz")
    piece = Piece(download, parts=tuple((_file(part),) for part in parts))
    note = "A. Krizhevsky, Learning multiple layers of features from tiny images, 2009; no license is stated"
    return Dataset(name, title, source, ("", within), (piece,), note)


_PLAYS = File(
    "tinyshakespeare.txt",
    1_115_394,
    "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
)

#: The datasets.
DATASETS = (
    Dataset(
        name="mnist",
        title="MNIST",
        source="mnist",
        within=("", "MNIST/raw", "MNIST", "mnist"),
        pieces=(
            _mnist(
                "train-images-idx3-ubyte",
                packed="9912422 f68b3c2dcbeaaa9fbdd348bbdeb94873",
                plain="47040016 6bbc9ace898e44ae57da46a324031adb",
            ),
            _mnist(
                "train-labels-idx1-ubyte",
                packed="28881 d53e105ee54ea40749a09fcbcd1e9432",
                plain="60008 a25bea736e30d166cdddb491f175f624",
            ),
            _mnist(
                "t10k-images-idx3-ubyte",
                packed="1648877 9fb629c4189551a2d022fa330f9573f3",
                plain="7840016 2646ac647ad5339dbf082846283269ea",
            ),
            _mnist(
                "t10k-labels-idx1-ubyte",
                packed="4542 ec29112dd5afa0611ce80d1b7f02629c",
                plain="10008 27ae3e4e09519cfbb04c329615203637",
            ),
        ),
        note="Y. LeCun, C. Cortes and C. Burges, The MNIST database of handwritten digits; CC BY-SA 3.0",
    ),
    _cifar(
        *("cifar-10", "CIFAR-10, binary", "cifar-10", "cifar-10-batches-bin"),
        "cifar-10-binary.tar.gz 170052171 c32a1d4ab5d03f1284b67883e8d87530",
        "data_batch_1.bin 30730000 5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin 30730000 5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin 30730000 942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin 30730000 ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin 30730000 53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin 30730000 803d5f7f4d78ea53de84dbe85f74fb6d",
    ),
    _cifar(
        *("cifar-10-python", "CIFAR-10, Python", "cifar-10", "cifar-10-batches-py"),
        "cifar-10-python.tar.gz 170498071 c58f30108f718f92721af3b95e74349a",
        "data_batch_1 ? c99cafc152244af753f735de768cd75f",
        "data_batch_2 ? d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3 ? 54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4 ? 634d18415352ddfa80567beed471001a",
        "data_batch_5 ? 482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch ? 40351d587109b95175f43aff81a1287e",
    ),
    _cifar(
        *("cifar-100", "CIFAR-100, binary", "cifar-100", "cifar-100-binary"),
        "cifar-100-binary.tar.gz 168513733 03b5dce01913d631647c71ecec9e9cb8",
        "train.bin 153700000 ?",
        "test.bin 30740000 ?",
    ),
    _cifar(
        *("cifar-100-python", "CIFAR-100, Python", "cifar-100", "cifar-100-python"),
        "cifar-100-python.tar.gz 169001437 eb9058c3a382ffc7106e4002c42a8d85",
        "train ? 16019d7e3df5f24257cddd939b257f8d",
        "test ? f0ef6b0ae62326f3e7ffdfab6717acfc",
    ),
    Dataset(
        name="tiny-imagenet",
        title="Tiny ImageNet",
        source="tiny-imagenet",
        within=("", "tiny-imagenet-200"),
        pieces=(
            Piece(
                _file(
                    "tiny-imagenet-200.zip 248100043 90528d7ca1a48142e341f4ef8d21d0de", "https://cs231n.stanford.edu"
                ),
                parts=((File("wnids.txt"),), (File("val/val_annotations.txt"),)),
                counts=(("train/*/images/*.JPEG", 100_000), ("val/images/*.JPEG", 10_000)),
            ),
        ),
        note="Stanford's CS231n; a part of ImageNet, for non-commercial research and teaching",
    ),
    Dataset(
        name="shakespeare",
        title="tinyshakespeare",
        source="shakespeare",
        within=("", "tinyshakespeare"),
        pieces=(Piece(_PLAYS, parts=((_PLAYS, replace(_PLAYS, name="input.txt")),)),),
        note="Shakespeare's plays, in the public domain, as A. Karpathy put them together in char-rnn",
    ),
    Dataset(
        name="imagenet",
        title="ImageNet 2012",
        source="imagenet",
        within=("", "imagenet", "ImageNet", "ILSVRC2012"),
        pieces=(
            Piece(
                None,
                # The first class, which distinguishes it from Tiny ImageNet.
                parts=((File("train/n01440764/"),), (File("val/n01440764/"),)),
                counts=(("train/*/", 1000), ("val/*/", 1000)),
            ),
        ),
        note="O. Russakovsky et al., ImageNet large scale visual recognition challenge, 2015; non-commercial research",
        by_hand="ask for ILSVRC2012 at https://image-net.org, and put its images into imagenet/train/CLASS/*.JPEG and "
        "imagenet/val/CLASS/*.JPEG, a folder for each of the 1,000 classes",
    ),
)
