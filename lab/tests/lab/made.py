"""A small MNIST, written in the format of the real one."""

import gzip
import struct

import numpy as np

NAMES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


def idx(array):
    """The format in one line: 0, 0, 8 for bytes, the dimensions, their sizes big-endian, the bytes."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def images(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 28, 28), dtype=np.uint8)


def labels(count):
    return np.arange(count, dtype=np.uint8) % 10


def write(folder, *, packed=(), **files):
    """Write the four files, with seven training images and five test images, except for files given by name."""
    folder.mkdir(parents=True, exist_ok=True)
    content = dict(zip(NAMES, map(idx, [images(7), labels(7), images(5, seed=1), labels(5)]), strict=True)) | files
    for name, bytes_ in content.items():
        path = folder / (f"{name}.gz" if name in packed else name)
        path.write_bytes(gzip.compress(bytes_) if name in packed else bytes_)
    return folder
