"""Launching kernels over lists of tensors: chunks of work, tables on the device, copies for CUDA graphs, relaunching.

A kernel finds its tensors by a table of addresses. Where the tensors lie as in an earlier step, the table exists
already, and a kernel that has been launched before is called without inspecting its arguments again, which costs the
host more than the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyroscope.base.hooks import is_capturing
from gyroscope.base.transfer import pinned

CHUNK = 8192  # elements that a program works on; a multiple of every block size

Ints = npt.NDArray[np.int64]


def cut(lengths: Sequence[int] | Ints, chunk: int = CHUNK) -> tuple[Ints, Ints, Ints]:
    """Cut segments of the given lengths into chunks.

    Returns:
        For each chunk its segment and its position within the segment, and for each segment its first chunk, with the
        number of chunks at the end. An empty segment has one empty chunk, so that its sums are written, as zeros.

    >>> [t.tolist() for t in cut([10, 0, 3], chunk=4)]
    [[0, 0, 0, 1, 2], [0, 1, 2, 0, 0], [0, 3, 4, 5]]
    """
    counts = np.maximum(1, -(-np.asarray(lengths, dtype=np.int64) // chunk))
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    segment = np.repeat(np.arange(len(counts)), counts)
    return segment, np.arange(first[-1]) - first[segment], first


def rows_of(members: Sequence[int], counts: Sequence[int] | Ints) -> Ints:
    """Return the rows of the segments of the layers `members`, where layer l has `counts[l]` rows.

    >>> rows_of([0, 2], [1, 2, 3]).tolist()
    [0, 3, 4, 5]
    """
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    return np.concatenate([np.arange(starts[i], starts[i + 1]) for i in members])


def schedule(chunks: int) -> Ints:
    """Return the order in which one launch first sums all chunks and then updates them.

    Updates go backward, from the chunks that were read last and are still in the cache. Chunk c is listed as c where
    it is summed and as −c − 1 where it is updated.

    >>> schedule(3).tolist()
    [0, 1, 2, -3, -2, -1]
    """
    order = np.arange(chunks)
    return np.concatenate([order, -order[::-1] - 1])


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return an array on the device; on CUDA, without waiting for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return pinned(tensor).to(device, non_blocking=True)
    return tensor.to(device, copy=True)


def is_aligned(pointers: Ints) -> bool:
    """Return whether every pointer allows 16-byte loads."""
    return not bool((pointers & 15).any())


def on(device: torch.device) -> Any:
    """Return a context that launches on the tensors' own device, where that is not the current one."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


class Spare:
    """Page-locked host memory for the copies of CUDA graphs, within which none can be allocated.

    One piece is ready for the next graph. The pieces that earlier graphs copy from are kept.

    Args:
        device: the device that is copied to.

    >>> spare = Spare(torch.device("cpu"))
    >>> spare.copied([1, 2]) is None             # nothing was provided
    True
    >>> spare.provide((2,)); spare.copied([1, 2])
    tensor([1, 2])
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._next: Tensor | None = None
        self._taken: list[Tensor] = []

    def provide(self, shape: Sequence[int]) -> None:
        """Allocate memory for integers of this shape; outside of graphs, whenever a graph may come next."""
        if self._next is None:
            memory = torch.empty(tuple(shape), dtype=torch.int64, device="cpu")
            self._next = pinned(memory) if self.device.type == "cuda" else memory

    def copied(self, values: npt.ArrayLike) -> Tensor | None:
        """Return the values on the device, copied again at every replay, or None if no memory was provided."""
        if self._next is None:
            return None
        source, self._next = self._next, None
        source.numpy()[:] = np.asarray(values)
        self._taken.append(source)
        return source.to(self.device, non_blocking=True)


def in_two(value: float) -> tuple[float, float]:
    """Split a number into the nearest float32 and the rest, because arguments of kernels are rounded to float32.

    >>> sum(in_two(0.1)) == 0.1
    True
    """
    near = float(np.float32(value))
    return near, value - near


def relauncher(compiled: Any, programs: int) -> Callable[..., None] | None:
    """Return a function that launches a compiled kernel with all its arguments, or None if there is none.

    Args:
        compiled: the result of the first launch. The interpreter returns nothing.
        programs: the number of programs.

    >>> relauncher(None, 3)
    """
    if not hasattr(compiled, "function"):
        return None
    launch: Callable[..., None] = compiled[(programs, 1, 1)]
    return launch


def stream_of(device: torch.device) -> int:
    """Return the current stream of a device; 0 on the CPU.

    It is part of every key below: a stream must not read a table that another is still uploading.
    """
    if device.type != "cuda":
        return 0
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if device.index is None else device.index)


_Table = TypeVar("_Table")


class Kept(Generic[_Table]):
    """The last used of what was uploaded for launches, by key.

    A CUDA graph holds the addresses of what it reads, nothing else. So what a graph has captured is kept for good, and
    found again under the same key: another in its place would free it.

    >>> kept = Kept(2)
    >>> for key in "abc":
    ...     kept.keep(key, key.upper())
    >>> kept.find("a"), kept.find("c")
    (None, 'C')
    """

    def __init__(self, most: int = 16) -> None:
        self.most = most
        self._known: dict[Any, _Table] = {}
        self._captured: dict[Any, _Table] = {}

    def find(self, key: Any) -> _Table | None:
        """Return what was kept under a key, and keep it longer: for good where a graph is being captured."""
        known = self._captured.get(key)
        if known is None and (known := self._known.pop(key, None)) is not None:
            self._known[key] = known  # the last used is the last to go
            if is_capturing():
                self._captured[key] = known
        return known

    def keep(self, key: Any, table: _Table) -> None:
        """Keep a table until `most` others have been used."""
        while len(self._known) >= self.most:
            self._known.pop(next(iter(self._known)))
        self._known[key] = table

    def __len__(self) -> int:
        return len(self._known)


class Addresses:
    """Tables of the addresses of some tensors, on their device.

    Args:
        device: the device of the tensors.

    >>> x = torch.zeros(3)
    >>> addresses = Addresses(x.device)
    >>> table = addresses.table([x.data_ptr()])
    >>> bool(table == x.data_ptr()), addresses.table([x.data_ptr()]) is table
    (True, True)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kept: Kept[Tensor] = Kept()
        self._spare = Spare(device)
        self._shape: tuple[int, ...] = ()

    def table(self, addresses: npt.ArrayLike) -> Tensor | None:
        """Return the table, or None where a CUDA graph is captured and no memory was provided for it."""
        array = np.asarray(addresses, dtype=np.int64)
        key = (stream_of(self.device), array.tobytes())
        known = self.kept.find(key)
        if is_capturing():
            return self._spare.copied(array) if known is None else known
        if known is None:
            known = to_device(array, self.device)
            self.kept.keep(key, known)
        self._shape = array.shape
        self.provide()
        return known

    def provide(self) -> None:
        """Have memory ready for the next graph, outside of graphs: the last one may have taken it."""
        self._spare.provide(self._shape)


class Launcher:
    """A kernel with a fixed number of programs.

    Arguments may change from launch to launch, except for types and integers, which are compiled in. Tensors must start
    at multiples of 16 bytes, as all allocated tensors do.

    Args:
        kernel: a Triton function.
        programs: the number of programs.
        device: the device to launch on.
        warps: the number of warps per program.
    """

    def __init__(self, kernel: Any, programs: int, device: torch.device, *, warps: int = 4) -> None:
        self.kernel, self.programs, self.device, self.warps = kernel, programs, device, warps
        self._run: Any = None

    def __call__(self, arguments: Sequence[Any]) -> None:
        """Launch the kernel."""
        with on(self.device):
            if self._run is not None:
                self._run(*arguments)
                return
            compiled = self.kernel[(self.programs,)](*arguments, num_warps=self.warps)
        self._run = relauncher(compiled, self.programs)


def shared_out(counts: Sequence[int]) -> tuple[npt.NDArray[np.int32], Ints]:
    """Return the item that each program works on, and the first program of each item.

    >>> [t.tolist() for t in shared_out([2, 1, 3])]
    [[0, 0, 1, 2, 2, 2], [0, 2, 3]]
    """
    each = np.array(counts, dtype=np.int64)
    return np.repeat(np.arange(len(each), dtype=np.int32), each), np.cumsum(each) - each
