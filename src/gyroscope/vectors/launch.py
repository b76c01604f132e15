"""Launching kernels over lists of tensors: chunks of work, tables on the device, copies for CUDA graphs, relaunching.

A kernel finds its tensors by a table of addresses. Where the tensors lie as in an earlier step, the table exists
already, and a kernel that has been launched before is called without inspecting its arguments again, which costs the
host more than the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyroscope.base.transfer import pinned

CHUNK = 8192  # elements a program works on; a multiple of every block size

Ints = npt.NDArray[np.int64]


def cut(lengths: Sequence[int] | Ints, chunk: int = CHUNK) -> tuple[Ints, Ints, Ints]:
    """Cut segments of the given lengths into chunks.

    Returns:
        For each chunk its segment, and its position within the segment; and for each segment (one more at the
        end) its first chunk. An empty segment has one empty chunk, so that its sums are written, as zeros.

    >>> [t.tolist() for t in cut([10, 0, 3], chunk=4)]
    [[0, 0, 0, 1, 2], [0, 1, 2, 0, 0], [0, 3, 4, 5]]
    """
    counts = np.maximum(1, -(-np.asarray(lengths, dtype=np.int64) // chunk))
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    segment = np.repeat(np.arange(len(counts)), counts)
    return segment, np.arange(first[-1]) - first[segment], first


def rows_of(members: Sequence[int], counts: Sequence[int] | Ints) -> Ints:
    """The rows that the segments of some layers take among those of all, of which `counts` says how many each has.

    >>> rows_of([0, 2], [1, 2, 3]).tolist()
    [0, 3, 4, 5]
    """
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    return np.concatenate([np.arange(starts[i], starts[i + 1]) for i in members])


def schedule(chunks: int) -> Ints:
    """The order in which one launch first sums all chunks and then updates them.

    Updates go backwards, from what was read last and still lies in the cache. Chunk c is listed as c where it is
    summed and as −c − 1 where it is updated.

    >>> schedule(3).tolist()
    [0, 1, 2, -3, -2, -1]
    """
    order = np.arange(chunks)
    return np.concatenate([order, -order[::-1] - 1])


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device, without waiting for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return pinned(tensor).to(device, non_blocking=True)
    return tensor.clone()


def is_aligned(pointers: Ints) -> bool:
    """Whether every pointer allows 16-byte loads."""
    return not bool((pointers & 15).any())


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, so that nothing may wait for the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def on(device: torch.device) -> Any:
    """Launch on the tensors' own device, where that is not the current one."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


class Spare:
    """Host memory that is ready for the next graph, and what earlier ones copy from.

    Args:
        device: where copies go.

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
        """Have memory ready for so many whole numbers; outside of graphs, as often as one may come next."""
        if self._next is None:
            memory = torch.empty(tuple(shape), dtype=torch.int64, device="cpu")
            self._next = pinned(memory) if self.device.type == "cuda" else memory

    def copied(self, values: npt.ArrayLike) -> Tensor | None:
        """Values on the device, copied anew at every replay, so that their source stays as it is; None without one."""
        if self._next is None:
            return None
        source, self._next = self._next, None
        source.numpy()[:] = np.asarray(values)
        self._taken.append(source)
        return source.to(self.device, non_blocking=True)


def in_two(value: float) -> tuple[float, float]:
    """A number as the float32 next to it and what is missing: arguments of kernels are rounded to float32.

    >>> sum(in_two(0.1)) == 0.1
    True
    """
    near = float(np.float32(value))
    return near, value - near


def relauncher(compiled: Any, programs: int) -> Callable[..., None] | None:
    """What launches a compiled kernel with all its arguments; None where that is for the kernel itself to do.

    Args:
        compiled: what the first launch gave. The interpreter gives nothing.
        programs: how many of it run.

    >>> relauncher(None, 3)
    """
    if not hasattr(compiled, "function"):
        return None
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
        return None  # a compiled kernel took its arguments without those that are compiled in
    launch: Callable[..., None] = compiled[(programs, 1, 1)]
    return launch


_TABLES_KEPT = 16


class Addresses:
    """Tables of the addresses of some tensors, on their device.

    Args:
        count: how many tensors there are.
        device: where they lie.

    >>> x = torch.zeros(3)
    >>> addresses = Addresses(1, x.device)
    >>> table = addresses.table([x.data_ptr()])
    >>> bool(table == x.data_ptr()), addresses.table([x.data_ptr()]) is table
    (True, True)
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._spare = Spare(device)
        self._captured: list[Tensor] = []  # a graph knows addresses alone, so what it has captured is kept

    def table(self, addresses: list[int]) -> Tensor | None:
        """The table; None where a CUDA graph is captured and there is nothing to capture it from."""
        cuda = self.device.type == "cuda"
        # What one stream is still uploading another must not read.
        stream = torch._C._cuda_getCurrentRawStream(self.device.index) if cuda else 0
        key = (stream, *addresses)
        known = self._known.pop(key, None)
        if is_capturing():
            return self._in_a_graph(addresses, known, key)
        if known is None:
            known = to_device(np.array(addresses, dtype=np.int64), self.device)
            while len(self._known) >= _TABLES_KEPT:
                self._known.pop(next(iter(self._known)))
        self._known[key] = known  # the last used is the last to go
        self._spare.provide((self.count,))
        return known

    def _in_a_graph(self, addresses: list[int], known: Tensor | None, key: tuple[int, ...]) -> Tensor | None:
        if known is not None:
            self._known[key] = known
            self._captured.append(known)
            return known
        return self._spare.copied(addresses)


class Launcher:
    """A kernel with a number of programs.

    What is passed may change from launch to launch but for types and whole numbers, which are compiled in. Tensors
    start at multiples of 16 bytes, as all do that are allocated.

    Args:
        kernel: a function of Triton.
        programs: how many of it run.
        device: where.
        warps: the threads of a program, over 32.
    """

    def __init__(self, kernel: Any, programs: int, device: torch.device, *, warps: int = 4) -> None:
        self.kernel, self.programs, self.device, self.warps = kernel, programs, device, warps
        self._run: Any = None

    def __call__(self, arguments: Sequence[Any]) -> None:
        """Launch it."""
        with on(self.device):
            if self._run is not None:
                self._run(*arguments)
                return
            compiled = self.kernel[(self.programs,)](*arguments, num_warps=self.warps)
        self._run = relauncher(compiled, self.programs)


def shared_out(counts: Sequence[int]) -> tuple[npt.NDArray[np.int32], Ints]:
    """Which of several things each program works on, and the first program of each.

    >>> [t.tolist() for t in shared_out([2, 1, 3])]
    [[0, 0, 1, 2, 2, 2], [0, 2, 3]]
    """
    each = np.array(counts, dtype=np.int64)
    return np.repeat(np.arange(len(each), dtype=np.int32), each), np.cumsum(each) - each
