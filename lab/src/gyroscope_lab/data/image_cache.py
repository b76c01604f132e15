"""A cache of decoded images in one file, read from disk on demand; worker processes decode the JPEG files."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from gyroscope.base import required
from gyroscope.store.lock import HeldError, Lock
from gyroscope_lab.data.official import histogram
from gyroscope_lab.errors import LabError
from gyroscope_lab.orphans import end_with_parent

Progress = Callable[[int, int], None]

_IMAGES, _INDEX = "images.npy", "index.json"
# The version of the cache's files; a cache of another version is built again.
_VERSION = 1
_MOST = 256
# Decoding fewer images takes less time than starting a process.
_FEW = 1000
_PATIENCE = 0.5


@dataclass(frozen=True)
class Listing:
    """Images in the order of their indices, with their sizes and times to detect changes.

    Attributes:
        files: their paths below a folder.
        sizes: their sizes in bytes.
        times: when they were last written, in nanoseconds.
        train: the number of training images, which come first.

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
    """Return images as bytes [N, 3, side, side] and the `histogram` of the training images.

    They are decoded once into the file `images.npy`. The images returned are a memory map of that file: they take
    memory only as they are read, and must not be modified. `index.json` in the same folder lists the files that were
    decoded. If the name, size or time of one of them has changed, all are decoded again. The index is written last, so
    an interrupted build does not count. If several processes need the cache, one builds it and the others wait.

    Args:
        root: the folder of the images.
        listing: the images.
        cache: the folder of the cache.
        side: the side of the images returned.
        short: the length of the shorter side after scaling, before the middle is cropped.
        workers: the number of processes that decode; by default one per core, or only this one for few images.
        on_progress: called with the numbers of decoded images and of all images, if any have to be decoded.

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
            found = _read(cache, wanted)  # another process may have built it by now
            if found is None:
                _build(root, wanted, cache, workers or _workers(listing), on_progress or (lambda done, total: None))
                found = _read(cache, wanted)
    if found is None:
        raise LabError(f"The images in {cache} changed while they were read. Is another program writing there?")
    return found


def _read(cache: Path, wanted: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The images, or None if they are missing, damaged, or decoded from other files."""
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
        # torch has no read-only tensors. With a writable map, ImageNet would count as used memory.
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
    # Closed at once if `on_progress` raises, not when the error is garbage-collected: closing ends the processes.
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
            f"The decoded images take {size / 1e9:.1f} GB, and {cache} has {free / 1e9:.1f} GB left. Free some space, "
            "set GYROSCOPE_CACHE to a folder elsewhere, or ask for smaller ones (side)."
        )


def _not_writable(cache: Path, error: OSError) -> NoReturn:
    raise LabError(
        f"{cache} cannot be written: {error.strerror or error}. Set GYROSCOPE_CACHE to a folder for decoded images."
    ) from error


def _workers(listing: Listing) -> int:
    return 1 if len(listing.files) < _FEW else _cores()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_not_starting() -> None:
    # A new process runs the main script up to its guard. Without a guard it would come here, and wait for the lock of
    # the process that waits for it. multiprocessing itself checks this attribute to reject the same mistake.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LabError('Images are decoded by several processes. Load them within `if __name__ == "__main__":`.')


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


# One of ImageNet's files is a PNG named .JPEG.
_FORMATS = ("JPEG", "PNG")


@dataclass(frozen=True)
class Batch:
    """Images to decode, and their place in a file.

    Attributes:
        files: the images.
        side: the side of the square that is kept.
        short: the length of the shorter side after scaling, before cropping.
        to: the file to write to.
        start: the offset of the first byte in it.

    >>> Batch((Path("n01443537_0.JPEG"),), side=64, short=64, to=Path("images.npy.part"), start=128).side
    64
    """

    files: tuple[Path, ...]
    side: int
    short: int
    to: Path
    start: int


def decode(path: Path | str, *, side: int, short: int) -> npt.NDArray[np.uint8]:
    """Return the middle of an image, bytes [3, side, side], converted to RGB.

    The image is scaled so that its shorter side is `short`, with linear interpolation and antialiasing. Then the middle
    is kept, shifted by half a pixel to the top and left if necessary.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("L", (12, 8), 100).save(f"{folder}/grey.JPEG")
    ...     decode(f"{folder}/grey.JPEG", side=4, short=4)[:, 0, 0]
    array([100, 100, 100], dtype=uint8)
    """
    Image = required("PIL.Image", "Reading images", "gyroscope-lab[images]")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=_FORMATS) as file:
                image = file.convert("RGB")
    except Exception as error:
        # A damaged image can raise any of many errors.
        raise LabError(f"{path} cannot be read as an image ({error}). Fetch it again.") from error
    width, height = image.size
    if min(width, height) != short:
        scale = short / min(width, height)
        if width * height * scale**2 > (Image.MAX_IMAGE_PIXELS or inf):
            said = f"{path} has {width} × {height} pixels, too many once the shorter side has {short}"
            raise LabError(f"{said}. It is damaged, or not a photograph. Fetch it again.")
        image = image.resize((round(width * scale), round(height * scale)), Image.Resampling.BILINEAR)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    kept = image.crop((left, top, left + side, top + side))
    return np.ascontiguousarray(np.asarray(kept).transpose(2, 0, 1))


def decode_all(batches: Sequence[Batch], *, workers: int) -> Generator[tuple[Batch, torch.Tensor]]:
    """Decode batches in any order; yield each with its `histogram` as soon as it is written.

    Args:
        batches: the batches to decode.
        workers: the number of processes; with 1 this process decodes.

    >>> list(decode_all([], workers=2))
    []
    """
    if workers == 1 or len(batches) < 2:
        for batch in batches:
            yield batch, _decode_batch(batch)
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(batches)), context, initializer=_start) as pool:
        try:
            futures = {pool.submit(_decode_batch, batch): batch for batch in batches}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException as error:
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise LabError(
                    "A process that decodes images ended: it was killed or ran out of memory, or the script that loads "
                    'the data does so outside of `if __name__ == "__main__":`, and each process runs it again.'
                ) from error
            raise


def _decode_batch(batch: Batch) -> torch.Tensor:
    images = np.empty((len(batch.files), 3, batch.side, batch.side), dtype=np.uint8)
    for image, path in zip(images, batch.files, strict=True):
        image[:] = decode(path, side=batch.side, short=batch.short)
    # Written, not memory-mapped: on a full disk a write raises an error, but access to a map kills the process.
    with batch.to.open("r+b") as file:
        file.seek(batch.start)
        file.write(images.data)
    return histogram(torch.from_numpy(images))


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; only the parent handles it
    torch.set_num_threads(1)
    end_with_parent()
