"""Tiny ImageNet and ImageNet: photographs in one folder per class."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import torch

from gyroscope_lab.data.image_cache import Listing, Progress, cached_images
from gyroscope_lab.data.official import Official, data_folder
from gyroscope_lab.errors import LabError

#: The environment variable that names a folder for decoded images.
CACHE = "GYROSCOPE_CACHE"

_WITHIN_TINY = ("", "tiny-imagenet-200")
_WITHIN_IMAGENET = ("", "imagenet", "ImageNet", "ILSVRC2012")
_ENDINGS = (".jpeg", ".jpg")


def read_tiny_imagenet(
    folder: Path | str | None = None,
    *,
    side: int = 64,
    workers: int | None = None,
    on_progress: Progress | None = None,
) -> Official:
    """Return Tiny ImageNet: 100,000 images to train on, 10,000 to test on, of 200 classes, bytes [N, 3, 64, 64].

    The test set is the published validation set, as in the papers: the labels of the published test set are not public.
    Classes are numbered in the order of their names.

    Args:
        folder: a folder with `wnids.txt`, `train/CLASS/images/*.JPEG`, `val/images/*.JPEG` and
            `val/val_annotations.txt`, or with these in `tiny-imagenet-200`; by default the folder that the environment
            variable GYROSCOPE_DATA names.
        side: the side of the images; they are published with 64.
        workers: the number of processes that decode them, once; see `gyroscope_lab.data.image_cache`.
        on_progress: called with the numbers of decoded images and of all images, if any have to be decoded.

    >>> read_tiny_imagenet("no/such/folder")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: There is no folder no/such/folder to look for Tiny ImageNet in. Give one that exists.
    """
    root = _root(folder, "Tiny ImageNet", _WITHIN_TINY, ("wnids.txt", "train", "val"))
    names = sorted(set(_lines(root / "wnids.txt")))
    if strangers := sorted({entry.name for entry in _folders(root / "train")} - set(names)):
        raise LabError(f"{root / 'train'} has {strangers[0]}, a class that {root / 'wnids.txt'} does not name.")
    train = _by_class(root, names, "train/{}/images")
    test = _annotated(root, names)
    found = _Found("Tiny ImageNet", root, len(names), train, test)
    return _official(found, side, side, workers, on_progress)


def read_imagenet(
    folder: Path | str | None = None,
    *,
    side: int = 224,
    workers: int | None = None,
    on_progress: Progress | None = None,
) -> Official:
    """Return ImageNet (ILSVRC 2012): 1.28 million images to train on, 50,000 to test on, of 1,000 classes.

    Images are scaled so that their shorter side is 8/7 of `side` (256 for 224), and their middle is kept. Decoded, they
    take 193 GB of disk, and memory only as they are read. The test set is the published validation set.

    Args:
        folder: a folder with `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`, or with these in `imagenet`, `ImageNet` or
            `ILSVRC2012`; by default the folder that the environment variable GYROSCOPE_DATA names.
        side: the side of the images.
        workers: the number of processes that decode them, once; see `gyroscope_lab.data.image_cache`.
        on_progress: called with the numbers of decoded images and of all images, if any have to be decoded.

    >>> read_imagenet("no/such/folder")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: There is no folder no/such/folder to look for ImageNet in. Give one that exists.
    """
    root = _root(folder, "ImageNet", _WITHIN_IMAGENET, ("train", "val"))
    names = sorted(entry.name for entry in _folders(root / "train"))
    if sorted(entry.name for entry in _folders(root / "val")) != names or not names:
        raise LabError(
            f"{root / 'train'} and {root / 'val'} must have one folder of images per class, the same in both; there "
            f"are {len(names):,} and {len(_folders(root / 'val')):,}. Sort the images of val into such folders."
        )
    train, test = _by_class(root, names, "train/{}"), _by_class(root, names, "val/{}")
    found = _Found("ImageNet", root, len(names), train, test)
    return _official(found, side, round(side * 8 / 7), workers, on_progress)


class _Image(NamedTuple):
    path: str
    size: int
    time: int
    label: int


class _Found(NamedTuple):
    title: str
    root: Path
    classes: int
    train: list[_Image]
    test: list[_Image]


def _root(folder: Path | str | None, title: str, within: tuple[str, ...], parts: tuple[str, ...]) -> Path:
    given = data_folder(folder, title)
    for name in within:
        if all((given / name / part).exists() for part in parts):
            return given / name
    *others, last = (name for name in within if name)
    places = f"{', '.join(others)} or {last}" if others else last
    raise LabError(
        f"{title} is not in {given}: neither there nor in its {places} are {', '.join(parts)} side by side. Unpack it "
        "there, or name the folder that has them."
    )


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:
        raise LabError(f"{folder} cannot be read: {error.strerror or error}. Unpack the dataset again.") from error


def _images(root: Path, folder: str, label: int) -> list[_Image]:
    try:
        with os.scandir(root / folder) as entries:
            images = [
                _Image(f"{folder}/{entry.name}", entry.stat().st_size, entry.stat().st_mtime_ns, label)
                for entry in entries
                if entry.name.lower().endswith(_ENDINGS) and not entry.name.startswith(".")
            ]
    except OSError as error:
        problem = error.strerror or error
        raise LabError(f"{root / folder} cannot be read: {problem}. Unpack the dataset again.") from error
    if not images:
        raise LabError(f"There are no images (.JPEG) in {root / folder}. Unpack the dataset again.")
    return sorted(images)


def _by_class(root: Path, names: list[str], pattern: str) -> list[_Image]:
    return [image for label, name in enumerate(names) for image in _images(root, pattern.format(name), label)]


def _annotated(root: Path, names: list[str]) -> list[_Image]:
    """The images of val, which are in one folder; a file gives their classes."""
    path = root / "val" / "val_annotations.txt"
    labels = {name: label for label, name in enumerate(names)}
    annotated = {image: rest.split("\t")[0] for image, _, rest in (line.partition("\t") for line in _lines(path))}
    images = []
    for image in _images(root, "val/images", 0):
        name = annotated.pop(Path(image.path).name, None)
        if name not in labels:
            said = "does not name it" if name is None else f"says {name!r}, which is not a class"
            raise LabError(f"The class of {root / image.path} is not known: {path} {said}. Unpack the dataset again.")
        images.append(image._replace(label=labels[name]))
    if annotated:
        raise LabError(f"{path} names {next(iter(annotated))}, which is not in {root / 'val/images'}. Unpack it again.")
    return images


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{path} cannot be read: {error}. Unpack the dataset again.") from error
    if not any(lines):
        raise LabError(f"{path} is empty. Unpack the dataset again.")
    return [line for line in lines if line]


def _official(found: _Found, side: int, short: int, workers: int | None, on_progress: Progress | None) -> Official:
    if side < 1 or (workers is not None and workers < 1):
        raise LabError(f"`side` and `workers` must be ≥ 1 (workers=None: one per core), got {side} and {workers}.")
    images = [*found.train, *found.test]
    listing = Listing(
        [image.path for image in images],
        [image.size for image in images],
        [image.time for image in images],
        train=len(found.train),
    )
    cache = _cache(found.root, f"{found.title.lower().replace(' ', '-')}-{side}")
    x, counts = cached_images(
        found.root, listing, cache, side=side, short=short, workers=workers, on_progress=on_progress
    )
    y = torch.tensor([image.label for image in images])
    x_train, x_test = x[: listing.train], x[listing.train :]
    y_train, y_test = y[: listing.train], y[listing.train :]
    return Official(found.title, x_train, y_train, x_test, y_test, classes=found.classes, counts=counts)


def _cache(root: Path, name: str) -> Path:
    elsewhere = os.environ.get(CACHE)
    if not elsewhere:
        return root / "gyroscope-cache" / name
    # This folder may hold the images of several datasets.
    which = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:12]
    return Path(elsewhere).expanduser() / f"{name}-{which}"
