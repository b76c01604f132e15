"""`dots`, `combine_` and the products of a monitor on a CPU, each in one compiled pass (`native.c`).

It needs a C compiler, so it is used only where the environment variable `GYROSCOPE_BACKEND` is `native`. A source is
compiled on first use (`library`). The result is kept in the user's cache folder, under a name that depends on source,
compiler and processor. Threads are those of torch (`torch.set_num_threads`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyroscope.errors import VectorError
from gyroscope.vectors import eager
from gyroscope.vectors.launch import Ints, cut, rows_of
from gyroscope.vectors.layout import aligned, is_dense, like, splits_in_memory

SOURCE = Path(__file__).with_suffix(".c")
CHUNK = 8192  # elements; as in the source
_MOST_LISTS = 8
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math")


def dots(lists: Sequence[Sequence[Tensor]], pairs: Sequence[tuple[int, int]], segments: Sequence[int]) -> Tensor:
    """Return the inner products `[sum(segments), len(pairs)]` of the pairs of lists, all on the CPU."""
    if len(lists) > _MOST_LISTS:
        return eager.dots(lists, pairs, segments)
    table = Table([[_readable(t) for t in one] for one in lists], segments)
    partial = np.empty((len(table.segment), len(pairs)))
    order = np.array(pairs, dtype=np.int8)
    compiled().chunk_dots(
        len(table.segment), _at(table.segment), _at(table.place), _at(table.lengths), len(table.lengths),
        len(lists), _at(table.addresses), _at(table.kinds), len(pairs), _at(order), _at(partial),
    )  # fmt: skip
    return torch.from_numpy(np.add.reduceat(partial, table.first[:-1], axis=0))


def combine_(x: Sequence[Tensor], y: Sequence[Tensor], a: Tensor, b: Tensor, segments: Sequence[int]) -> None:
    """Update x ← a x + b y for lists on the CPU; `a` and `b` hold one number per segment."""
    mine = [
        xi.dtype in KINDS and yi.dtype in KINDS and is_dense(xi) and splits_in_memory(xi, n)
        for xi, yi, n in zip(x, y, segments, strict=True)
    ]
    if not all(mine):
        for ok, combine in ((True, combine_), (False, eager.combine_)):
            if members := [i for i, one in enumerate(mine) if one == ok]:
                rows, counts = torch.from_numpy(rows_of(members, segments)), [segments[i] for i in members]
                combine([x[i] for i in members], [y[i] for i in members], a[rows], b[rows], counts)
        return
    table = Table([x, y], segments)
    factors = [np.ascontiguousarray(one.detach().numpy(), dtype=np.float64) for one in (a, b)]
    compiled().chunk_combine(
        len(table.segment), _at(table.segment), _at(table.place), _at(table.lengths), len(table.lengths),
        _at(table.addresses), _at(table.kinds), *map(_at, factors),
    )  # fmt: skip
    torch.autograd.graph.increment_version([t for t in x if not t.is_inference()])


def moves(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    offsets: Sequence[int],
    buffers: Sequence[Tensor | None],
    *,
    moved: bool,
    keep: bool,
) -> Tensor:
    """Return the inner products that a monitor needs, `[layers, 13]`; see `chunk_moves` in the source.

    Args:
        weights, gradients: contiguous tensors, each list of one dtype.
        offsets: where each layer begins in the buffers.
        buffers: flat: w₀, the weights before the step, those at the last measured step, the last displacement.
        moved: whether the last displacement is known.
        keep: whether the new displacement replaces the last one.
    """
    table = Table([weights, gradients], [1] * len(weights))
    kinds = np.array([KINDS[(t if t is not None else weights[0]).dtype] for t in (weights[0], gradients[0], *buffers)])
    begin, kinds = np.array(offsets, dtype=np.int64), kinds.astype(np.int8)
    starts = np.array([0 if t is None else t.data_ptr() for t in buffers], dtype=np.int64)
    partial = np.empty((len(table.segment), 13))
    compiled().chunk_moves(
        len(table.segment), _at(table.segment), _at(table.place), _at(table.lengths), len(table.lengths),
        _at(table.addresses), _at(begin), _at(starts), _at(kinds),
        int(moved), int(keep), _at(partial),
    )  # fmt: skip
    return torch.from_numpy(np.add.reduceat(partial, table.first[:-1], axis=0))


def reads(*tensors: Tensor | None) -> bool:
    """Return whether the compiled functions know the types of these tensors."""
    return all(t is None or t.dtype in KINDS for t in tensors)


class Table:
    """Addresses of the segments of tensors, and the chunks that they are cut into.

    Attributes:
        addresses, kinds: of each list and segment, [lists, segments].
        lengths: elements of each segment.
        segment, place, first: the chunks; see `gyroscope.vectors.launch.cut`.
    """

    def __init__(self, lists: Sequence[Sequence[Tensor]], segments: Sequence[int]) -> None:
        self._kept: Any = lists  # the copies among them must live as long as their addresses
        if not all(map(Tensor.is_contiguous, chain.from_iterable(lists))):
            # Copies for tensors whose elements lie in another order than those of the first list.
            rows = [_in_one_order(tensors, n) for tensors, n in zip(zip(*lists, strict=True), segments, strict=True)]
            lists = self._kept = list(zip(*rows, strict=True))
        self.addresses: Ints = np.array([list(map(Tensor.data_ptr, one)) for one in lists], dtype=np.int64)
        self.kinds = np.array([[KINDS[t.dtype] for t in one] for one in lists], dtype=np.int8)
        sizes: tuple[int, ...] = tuple(map(Tensor.numel, lists[0]))
        if any(n > 1 for n in segments):
            counts = np.asarray(segments)
            layer = np.repeat(np.arange(len(counts)), counts)
            within = np.concatenate([np.arange(n) for n in segments])
            each = (np.array(sizes) // counts)[layer]
            widths = np.array([[t.element_size() for t in one] for one in lists])[:, layer]
            self.addresses = np.ascontiguousarray(self.addresses[:, layer] + within * each * widths)
            self.kinds = np.ascontiguousarray(self.kinds[:, layer])
            sizes = tuple(each.tolist())
        self.lengths, self.segment, self.place, self.first = _chunks(sizes)


@lru_cache(maxsize=256)
def _chunks(lengths: tuple[int, ...]) -> tuple[Ints, Ints, Ints, Ints]:
    return np.array(lengths, dtype=np.int64), *cut(lengths, CHUNK)


def _readable(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in KINDS else tensor.detach().float()


def _in_one_order(tensors: Sequence[Tensor], segments: int) -> list[Tensor]:
    if is_dense(tensors[0]) and splits_in_memory(tensors[0], segments):
        return [like(t.detach(), tensors[0]) for t in tensors]
    return aligned(tensors, segments)


def _at(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data


@cache
def compiled() -> ctypes.CDLL:
    """Return the functions of `native.c`.

    >>> compiled().chunk_dots.restype is None
    True
    """
    found = library(SOURCE)
    whole, address = ctypes.c_int64, ctypes.c_void_p
    chunks: list[Any] = [whole, address, address, address, whole]
    found.chunk_dots.argtypes = [*chunks, whole, address, address, whole, address, address]
    found.chunk_combine.argtypes = [*chunks, address, address, address, address]
    found.chunk_moves.argtypes = [*chunks, address, address, address, address, ctypes.c_int, ctypes.c_int, address]
    for function in (found.chunk_dots, found.chunk_combine, found.chunk_moves):
        function.restype = None
    return found


def library(source: Path) -> ctypes.CDLL:
    """Return what a source compiles to, from the cache folder or from the compiler; it may include `native.c`."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise VectorError(
            "GYROSCOPE_BACKEND is 'native', which needs a C compiler, and there is none on the PATH. Install gcc or "
            "clang (or name one in CC), or unset the variable."
        )
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gyroscope")
    path = folder / f"{source.stem}-{_made_from(compiler, source)}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _compile(compiler, source, path)
    return ctypes.CDLL(str(path))


def _made_from(compiler: str, source: Path) -> str:
    """Return a name for what is made from a source, by this compiler, on this processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    try:
        said = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        processor = "".join(sorted(line for line in said if line.startswith(("flags", "Features", "model name"))))
    except OSError:
        processor = platform.processor()
    about = (" ".join(_FLAGS), processor, torch.__version__)
    parts = (SOURCE.read_bytes(), source.read_bytes(), version, *map(str.encode, about))
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, source: Path, path: Path) -> None:
    """Compile to `path`: with threads where the compiler and torch have OpenMP, else without."""
    said = ""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, object_file = Path(folder, path.name), str(Path(folder, "native.o"))
        for threads in (["-fopenmp"], ["-fopenmp-simd"], []):
            # OpenMP is not linked: its functions are found in the library that torch has loaded, whose threads it uses.
            for step in (
                [compiler, *_FLAGS, *threads, "-c", str(source), "-o", object_file],
                [compiler, "-shared", object_file, "-o", str(made)],
            ):
                result = subprocess.run(step, capture_output=True, text=True, check=False)
                if result.returncode:
                    said = result.stderr
                    break
            else:
                try:
                    ctypes.CDLL(str(made))
                except OSError as error:
                    said = str(error)
                    continue
                os.replace(made, path)
                return
    raise VectorError(f"{compiler} could not compile {source.name}: {said.strip():.500}. Unset GYROSCOPE_BACKEND.")
