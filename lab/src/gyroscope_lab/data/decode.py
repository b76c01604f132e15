"""JPEG files as arrays of pixels, many at a time in worker processes."""

from __future__ import annotations

import multiprocessing
import signal
import warnings
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gyroscope.errors import MissingExtraError
from gyroscope_lab.data.moments import histogram
from gyroscope_lab.errors import LabError
from gyroscope_lab.orphans import end_with_parent

# One of ImageNet's files is a PNG by another name.
_FORMATS = ("JPEG", "PNG")


@dataclass(frozen=True)
class Batch:
    """Images to decode, and where in a file to write them, one after the other.

    Attributes:
        files: the images.
        side: of the square that is kept.
        short: what the shorter side is made before that.
        to: the file to write to.
        start: the first byte there.

    >>> Batch((Path("n01443537_0.JPEG"),), side=64, short=64, to=Path("images.npy.part"), start=128).side
    64
    """

    files: tuple[Path, ...]
    side: int
    short: int
    to: Path
    start: int


def decode(path: Path | str, *, side: int, short: int) -> npt.NDArray[np.uint8]:
    """Return the middle of an image, bytes [3, side, side], in RGB whatever it was in.

    The image is scaled so that its shorter side is `short`, interpolating linearly with a triangle as wide as what
    falls into a new pixel; then the middle is kept, half a pixel towards the top and the left if it must be.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("L", (12, 8), 100).save(f"{folder}/grey.JPEG")
    ...     decode(f"{folder}/grey.JPEG", side=4, short=4)[:, 0, 0]
    array([100, 100, 100], dtype=uint8)
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("reading images needs Pillow: pip install 'gyroscope-lab[images]'") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=_FORMATS) as file:
                image = file.convert("RGB")
    except Exception as error:
        # A damaged image fails in whatever way the bytes at hand happen to lead to.
        raise LabError(f"{path} is no image that can be read ({error}); fetch it again") from error
    width, height = image.size
    if min(width, height) != short:
        scale = short / min(width, height)
        if width * height * scale**2 > (Image.MAX_IMAGE_PIXELS or inf):
            said = f"{path} has {width} × {height} pixels, too many once the shorter side has {short}"
            raise LabError(f"{said}; it is damaged, or no photograph: fetch it again")
        image = image.resize((round(width * scale), round(height * scale)), Image.Resampling.BILINEAR)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    kept = image.crop((left, top, left + side, top + side))
    return np.ascontiguousarray(np.asarray(kept).transpose(2, 0, 1))


def decode_all(batches: Sequence[Batch], *, workers: int) -> Generator[tuple[Batch, torch.Tensor]]:
    """Decode batches in any order; yield each with its `histogram` as soon as it is written.

    Args:
        batches: what to decode.
        workers: how many processes to start; with 1 none is, and this one decodes.

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
                    "a process that decodes images ended: it was killed or ran out of memory, or the script that loads "
                    'the data does so outside of `if __name__ == "__main__":`, and each process runs it again'
                ) from error
            raise


def _decode_batch(batch: Batch) -> torch.Tensor:
    images = np.empty((len(batch.files), 3, batch.side, batch.side), dtype=np.uint8)
    for image, path in zip(images, batch.files, strict=True):
        image[:] = decode(path, side=batch.side, short=batch.short)
    # Written, not memory-mapped: on a full disk a write fails, where a process that touches a map is killed.
    with batch.to.open("r+b") as file:
        file.seek(batch.start)
        file.write(images.data)
    return histogram(torch.from_numpy(images))


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent alone decides
    torch.set_num_threads(1)
    end_with_parent()
