"""Decoded images kept in one file, and read from the disk as they are needed."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from gyroscope.store.lock import HeldError, Lock
from gyroscope_lab.data.decode import Batch, decode_all
from gyroscope_lab.errors import LabError

Progress = Callable[[int, int], None]

_IMAGES, _INDEX = "images.npy", "index.json"
# What the files of a cache mean; one of another number is made anew.
_VERSION = 1
_MOST = 256
# As long as fewer take, a process takes to start.
_FEW = 1000
_PATIENCE = 0.5


@dataclass(frozen=True)
class Listing:
    """Images in the order of their numbers, and what tells whether they have changed.

    Attributes:
        files: their paths below a folder.
        sizes: in bytes.
        times: when they were last written, in nanoseconds.
        train: how many of them, the first, are to train on.

    >>> Listing(["train/a.JPEG", "val/b.JPEG"], [1700, 2100], [0, 0], train=1).files[0]
    'train/a.JPEG'
    """

    files: list[str]
    sizes: list[int]
    times: list[int]
    train: int


def cached_images(
    root: Path,
    listing: Listing,
    cache: Path,
    *,
    side: int,
    short: int,
    workers: int | None = None,
    on_progress: Progress | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images as bytes [N, 3, side, side] and the `histogram` of those to train on.

    They are decoded once, by `gyroscope_lab.data.decode`, into the file `images.npy`. The images returned are a map of
    that file: they take memory only as they are looked at, and must not be written to. Beside it, `index.json` says
    which files they are of; if one of these is another by its name, size or time, all are decoded again. The index is
    written last, so that a build which is killed is none. Of several processes one builds, and the others wait.

    Args:
        root: the folder of the images.
        listing: which ones.
        cache: the folder to keep them in.
        side: of the images returned.
        short: what the shorter side is made before their middle is kept.
        workers: how many processes decode; if not given, one for each core, and none beside this one for few images.
        on_progress: called with how many are decoded and how many there are, if any have to be.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "grey.JPEG")
    ...     Image.new("L", (12, 8), 100).save(path)
    ...     listing = Listing(["grey.JPEG"], [path.stat().st_size], [path.stat().st_mtime_ns], train=1)
    ...     images, counts = cached_images(Path(folder), listing, Path(folder, "cache"), side=4, short=4)
    ...     images.shape, counts[:, 100]
    (torch.Size([1, 3, 4, 4]), tensor([16, 16, 16]))
    """
    wanted = {"version": _VERSION, "side": side, "short": short, **asdict(listing)}
    found = _read(cache, wanted)
    if found is None:
        _check_not_starting()
        with _alone(cache):
            found = _read(cache, wanted)  # another process may have built it meanwhile
            if found is None:
                _build(root, wanted, cache, workers or _workers(listing), on_progress or (lambda done, total: None))
                found = _read(cache, wanted)
    if found is None:
        raise LabError(f"the images in {cache} changed while they were read; is another program writing there?")
    return found


def _read(cache: Path, wanted: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The images, or None if they are not there, are of other files, or damaged."""
    try:
        index = json.loads((cache / _INDEX).read_bytes())
        counts = torch.tensor(index.pop("counts"))
        if index != wanted | {"images": _identity(cache / _IMAGES)}:
            return None
        images = np.load(cache / _IMAGES, mmap_mode="r")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return None
    shape = (len(wanted["files"]), 3, wanted["side"], wanted["side"])
    if images.shape != shape or images.dtype != np.uint8 or counts.shape != (3, 256):
        return None
    with warnings.catch_warnings():
        # Torch has no tensors that cannot be written to. Mapped so that they could, ImageNet would count as memory.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(images), counts


def _build(root: Path, wanted: dict[str, Any], cache: Path, workers: int, on_progress: Progress) -> None:
    part, note = cache / f"{_IMAGES}.part", cache / f"{_INDEX}.part"
    try:
        counts = _decode_into(part, root, wanted, workers, on_progress)
        _settle(part, cache / _IMAGES)
        index = wanted | {"images": _identity(cache / _IMAGES), "counts": counts.tolist()}
        note.write_text(json.dumps(index))
        _settle(note, cache / _INDEX)
    except OSError as error:
        _not_writable(cache, error)
    finally:
        part.unlink(missing_ok=True)
        note.unlink(missing_ok=True)


def _decode_into(part: Path, root: Path, wanted: dict[str, Any], workers: int, on_progress: Progress) -> torch.Tensor:
    side, total, train = wanted["side"], len(wanted["files"]), wanted["train"]
    _check_room(part.parent, total * 3 * side**2)
    array = np.lib.format.open_memmap(part, "w+", dtype=np.uint8, shape=(total, 3, side, side))
    first = part.stat().st_size - array.nbytes
    del array
    size = max(1, min(_MOST, total // (4 * workers)))
    numbers = {}
    for start, end in ((0, train), (train, total)):
        for number in range(start, end, size):
            files = tuple(root / file for file in wanted["files"][number : min(number + size, end)])
            numbers[Batch(files, side, wanted["short"], part, first + number * 3 * side**2)] = number
    counts, done = torch.zeros(3, 256, dtype=torch.int64), 0
    on_progress(0, total)
    # Closed at once if `on_progress` raises, and not when the error is forgotten: closing ends the processes.
    with closing(decode_all(list(numbers), workers=workers)) as decoded:
        for batch, count in decoded:
            if numbers[batch] < train:
                counts += count
            done += len(batch.files)
            on_progress(done, total)
    return counts


def _settle(part: Path, path: Path) -> None:
    with part.open("r+b") as file:
        os.fsync(file.fileno())
    os.replace(part, path)


def _identity(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _check_room(cache: Path, size: int) -> None:
    free = shutil.disk_usage(cache).free
    if size > free:
        raise LabError(
            f"the decoded images take {size / 1e9:.1f} GB, and {cache} has {free / 1e9:.1f} GB left; make room, set "
            "GYROSCOPE_CACHE to a folder elsewhere, or ask for smaller ones (side)"
        )


def _not_writable(cache: Path, error: OSError) -> NoReturn:
    raise LabError(
        f"{cache} cannot be written: {error.strerror or error}; set GYROSCOPE_CACHE to a folder for decoded images"
    ) from error


def _workers(listing: Listing) -> int:
    return 1 if len(listing.files) < _FEW else _cores()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_not_starting() -> None:
    # A process that starts runs the main script up to its guard. Without one it would come here, and wait for the lock
    # of the process that waits for it. The attribute is what multiprocessing itself looks at when it refuses this.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LabError('images are decoded by several processes: load them within `if __name__ == "__main__":`')


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    while True:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            lock = Lock(cache)
            break
        except HeldError:
            time.sleep(_PATIENCE)
        except OSError as error:
            _not_writable(cache, error)
    try:
        yield
    finally:
        lock.release()
