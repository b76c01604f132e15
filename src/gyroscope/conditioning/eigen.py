"""Eigenvalues of many symmetric matrices at once, and the largest of each alone.

All eigenvalues come from `torch.linalg.eigvalsh` (`eigvalsh`). The largest alone is found by Lanczos iteration
(`lanczos`), which also takes a matrix AAᵀ that is never formed (`Product`). For matrices that are formed, a GPU uses
`largest_by_squaring`, because starting kernels takes longer than multiplying matrices, and `krylov` for large ones.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from gyroscope.vectors.eager import accumulator, power_of_two

Given = TypeVar("Given")
Found = TypeVar("Found")

# Matrices are stacked up to this many elements: an eighth of a gigabyte in float64. A CPU gains nothing from large
# stacks.
_STACK, _STACK_ON_CPU = 2**24, 2**19
# Up to this size, decomposing a matrix on a CPU takes no longer than Lanczos iteration for λmax alone.
_DIRECT = 192
# Up to this sum of d³ over a stack, repeated squaring takes a GPU less time than launching the many kernels of a Krylov
# space. Up to this size, matrices of all sizes are squared together, filled up with zeros.
_WORK, _FILLED = 2**33, 128
# Squarings before a Krylov space is tried, and before it is tried again for matrices whose λmax it has not reached: a
# GPU multiplies matrices fast compared with launching kernels.
_SQUARINGS = (1, 3)
# The residual, relative to λmax. Eigenvalues within a few times this distance of λmax may be taken for it.
_RESIDUAL = 1e-8

# Matrices that a GPU decomposes at the same time, each in a stream of its own. Up to this size it takes a whole stack
# in one call. Stacks of more than this many elements are not made: each would be a copy.
_STREAMS, _BATCHED, _STACK_OF_ALL = 4, 32, 2**20
# A CPU with at least so many threads decomposes the smaller matrices meanwhile. Milliseconds for d = 512 and exponents
# of d, fitted from d = 64 to 2048: those of an H200 that is shared by streams, and of one core of its host.
_THREADS, _GPU, _CORE = 8, (3.1, 1.4), (48.0, 2.4)
# Above this size, one matrix after the other with all threads of a CPU is as fast as one per thread.
_LARGEST = 512

# Products of `krylov` with the squared matrix.
_DEGREE = 32
# Further products with the vector that was found: it loses half of its digits in PᵀP, and powers restore them.
_POLISH = 4

# Steps after which `lanczos` looks at what it has found, which waits for the device. After the last one, decomposing
# the matrix is faster.
_LOOKS = {"cpu": (8, 10, 12, 15, 19, 24, 30, 38, 48, 60, 75, 94, 118, 148), "cuda": (16, 32, 64, 148)}
# AAᵀ is not formed for its λmax if A has more rows than this, and at most so many times as many columns or so many
# elements: 16 megabytes in float32, which stay in a cache. A GPU with fast float64 forms all of them.
_UNFORMED = {"cpu": 192, "cuda": 1024}
_COLUMNS, _ELEMENTS = 8, 2**22
# The residual in float32, relative to λmax, and the one that is accepted when it is computed in float64.
_RESIDUAL_32, _ACCEPTED_32 = 1e-6, 1e-5

# Squarings of `largest_by_squaring` that are followed by a division by the trace: the last two, and so many before that
# the trace, which falls to d^−(2^k − 1) at the least in k squarings, stays in the range of float64.
_DIVIDED = (5, 11, 17, 22, 23)

# Compute capabilities whose float64 throughput is at least half their float32 throughput.
_FAST_DOUBLE = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}


@cache
def has_fast_double(device: torch.device) -> bool:
    """Return True if products in float64 take at most about twice as long as in float32.

    >>> has_fast_double(torch.device("cpu"))
    True
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) in _FAST_DOUBLE
    return accumulator(device) is torch.float64


def eigenvalues(matrices: Sequence[Tensor], *, owned: bool = False) -> list[Tensor]:
    """Return the eigenvalues of symmetric matrices [d, d], each as [d] in descending order, in float64.

    They are found in float64, on a CPU if the device has none; see `eigvalsh`. The eigenvalues of a matrix that is not
    finite are NaN. Matrices that are `owned` may be overwritten, to save memory.

    >>> eigenvalues([torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([[5.0]])])
    [tensor([3., 1.], dtype=torch.float64), tensor([5.], dtype=torch.float64)]
    """
    groups = alike([(len(m), m.device) for m in matrices], most=_STACK_OF_ALL)
    scaled = [_scaled([matrices[i] for i in indices], owned=owned) for indices in groups]
    found: dict[int, Tensor] = {}
    for indices, (_, scale), values in zip(groups, scaled, eigvalsh([stack for stack, _ in scaled]), strict=True):
        found.update(zip(indices, values.flip(-1) * scale, strict=True))
    return [found[i] for i in range(len(matrices))]


@dataclass(frozen=True)
class Product:
    """The matrix AAᵀ of a matrix A [d, n], d ≤ n, that is not formed: λmax takes a few products with A and Aᵀ.

    >>> len(Product(torch.tensor([[3.0, 4.0]]))), largest([Product(torch.tensor([[3.0, 4.0]]))])
    (1, tensor([25.], dtype=torch.float64))
    """

    a: Tensor

    dtype = torch.float64

    def __len__(self) -> int:
        return len(self.a)

    @classmethod
    def of(cls, a: Tensor) -> Product:
        """Return the smaller one of AAᵀ and AᵀA."""
        return cls(a if a.shape[0] <= a.shape[1] else a.T)

    @staticmethod
    def suits(rows: int, columns: int, device: torch.device) -> bool:
        """Return True if λmax of the smaller one of AAᵀ and AᵀA is found faster than the matrix is formed."""
        if device.type == "cuda" and has_fast_double(device):
            return False
        short, long = sorted((rows, columns))
        return short > _UNFORMED.get(device.type, long) and long <= max(_COLUMNS * short, _ELEMENTS // short)


def largest(matrices: Sequence[Tensor | Product], *, owned: bool = False) -> Tensor:
    """Return λmax of symmetric positive semidefinite matrices [d, d], as [n] in float64 on the device of the first.

    It is found to a relative 1e-6 or better. On a CPU, large matrices take Lanczos iteration, and decomposition if that
    converges slowly; on a GPU, repeated squaring, and a small Krylov space before if that is faster. Matrices that are
    `owned` may be overwritten, to save memory.

    >>> largest([torch.eye(3), torch.tensor([[2.0, 1.0], [1.0, 2.0]])])
    tensor([1., 3.], dtype=torch.float64)
    """
    chunks: list[tuple[Sequence[int], Tensor]] = []
    formed = {i: matrix for i, matrix in enumerate(matrices) if isinstance(matrix, Tensor)}
    groups = _of_one_shape({i: matrix.a for i, matrix in enumerate(matrices) if isinstance(matrix, Product)})
    parts = [[a.detach() for a in some.values()] for some in groups]
    # Threads would leave the current stream of a GPU.
    on_cpu = all(a.device.type == "cpu" for some in parts for a in some)
    solved = side_by_side(_largest_products, parts) if on_cpu else [_largest_products(part) for part in parts]
    for some, (value, reached) in zip(groups, solved, strict=True):
        chunks.append((list(some), value))
        slow = [i for i, enough in zip(some, reached.tolist(), strict=True) if not enough]
        formed |= {i: _formed(some[i]) for i in slow}
    sizes = {i: matrix.shape[0] for i, matrix in formed.items()}  # `len` of a tensor takes four times as long
    places = sorted(formed, key=sizes.__getitem__)
    for group in alike([(_filled(sizes[i], formed[i].device), formed[i].device) for i in places]):
        indices = [places[i] for i in group]
        stack, scale = _scaled([formed[i] for i in indices], owned=owned)
        chunks.append((indices, _largest(stack) * scale[:, 0]))
    return _in_order(chunks)


def _filled(size: int, device: torch.device) -> int:
    """Return the size of the matrices that one of this size is stacked with, or a larger one."""
    return max(size, _FILLED) if device.type == "cuda" else size


def _in_order(chunks: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
    """Return the values by index, on the device of the first; those of later chunks replace earlier ones."""
    if not chunks:
        return torch.zeros(0, dtype=torch.float64)
    at = {i: place for place, i in enumerate(i for indices, _ in chunks for i in indices)}
    device = next(values.device for indices, values in chunks if 0 in indices)
    order = torch.tensor([at[i] for i in range(len(at))])
    return torch.cat([values.to(device) for _, values in chunks])[order.to(device, non_blocking=True)]


def side_by_side(work: Callable[[Given], Found], parts: Sequence[Given]) -> list[Found]:
    """Return `work` of each part, in threads that share the threads torch has on a CPU.

    The operations of Lanczos iteration take microseconds, and dividing each among threads makes every one of them wait
    for all threads: on a busy machine that takes ten times as long as one thread.

    >>> side_by_side(torch.sum, [torch.ones(2), torch.ones(3)])
    [tensor(2.), tensor(3.)]
    """
    threads = torch.get_num_threads()
    workers = min(threads, len(parts))
    if workers < 2:
        return [work(part) for part in parts]
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,)) as pool:
            return list(pool.map(work, parts))
    finally:
        torch.set_num_threads(threads)  # a thread's own number is also what threads that start later get


def _of_one_shape(given: dict[int, Tensor]) -> list[dict[int, Tensor]]:
    """Return the matrices in groups of one shape and device; each by itself on a CPU, where a group gains nothing."""
    groups: dict[tuple[torch.Size, torch.device, int], dict[int, Tensor]] = defaultdict(dict)
    for place, (i, a) in enumerate(given.items()):
        group = place if a.device.type == "cpu" else place // max(1, _STACK // a.numel())
        groups[a.shape, a.device, group][i] = a
    return list(groups.values())


def _largest_products(given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return λmax of AAᵀ for matrices A of one shape, and whether it was reached, both [b].

    The eigenvector v is found in float32, unless A is in float64. Then λmax = ‖Aᵀv‖²/‖v‖² is taken in float64: its
    error is the square of the vector's.
    """
    single = given[0].dtype is not torch.float64
    near = [a.float() if single else a for a in given]
    _, reached, vectors = lanczos(near, residual=_RESIDUAL_32 if single else _RESIDUAL, products=True)
    found = []
    for a, v in zip(given, torch.nn.functional.normalize(vectors.double(), dim=1), strict=True):
        wide = a.double()
        z = wide.T.mv(v)
        value = z.dot(z)
        found.append(torch.stack([value, torch.linalg.vector_norm(wide.mv(z) - value * v)]))
    value, off = torch.stack(found, dim=1)
    close = off <= (_ACCEPTED_32 if single else _RESIDUAL) * value
    return value, reached & close


def _formed(a: Tensor) -> Tensor:
    wide = a.detach().double()
    return wide @ wide.T


def _largest(stack: Tensor) -> Tensor:
    """Return λmax of matrices [b, d, d] that are scaled to elements near 1, as [b]."""
    d, cuda = stack.shape[-1], stack.device.type == "cuda"
    if d == 0:
        return stack.new_zeros(len(stack))
    if d <= _DIRECT and not cuda:
        return eigvalsh([stack])[0][:, -1]
    if cuda:
        return _largest_on_gpu(stack)
    value, reached, _ = lanczos(stack, residual=_RESIDUAL)
    slow = torch.nonzero(~reached)[:, 0]
    if len(slow):
        value[slow] = torch.linalg.eigvalsh(stack[slow])[:, -1]
    return value


def _largest_on_gpu(stack: Tensor, squarings: Sequence[int] = _SQUARINGS) -> Tensor:
    """Return λmax of matrices [b, d, d], as [b]: by squaring, but if that is much work, by a Krylov space before.

    >>> _largest_on_gpu(torch.diag(torch.tensor([0.0, 1.0], dtype=torch.float64))[None])
    tensor([1.], dtype=torch.float64)
    """
    if not squarings or len(stack) * stack.shape[-1] ** 3 <= _WORK:
        return largest_by_squaring(stack)
    value, reached = krylov(stack, residual=_RESIDUAL, squarings=squarings[0])
    slow = torch.nonzero(~reached)[:, 0]
    if len(slow):
        value[slow] = _largest_on_gpu(stack[slow], squarings[1:])
    return value


def alike(keys: Sequence[tuple[int, torch.device]], *, most: int = _STACK) -> list[list[int]]:
    """Return the indices of matrices to stack: of one size and device, and at most so many elements at a time.

    >>> cpu = torch.device("cpu")
    >>> alike([(3, cpu), (2, cpu), (3, cpu)]), alike([(2**13, cpu)] * 2)
    ([[0, 2], [1]], [[0], [1]])
    """
    groups: dict[tuple[int, torch.device], list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        groups[key].append(i)
    batches = []
    for (size, device), indices in groups.items():
        count = max(1, (_STACK_ON_CPU if device.type == "cpu" else most) // max(1, size**2))
        batches += [indices[at : at + count] for at in range(0, len(indices), count)]
    return batches


def _scaled(matrices: Sequence[Tensor], *, owned: bool = False) -> tuple[Tensor, Tensor]:
    """Return the matrices as a stack in float64, scaled to elements near 1, and the divisors, [b, 1].

    Matrices that are not finite are zeros in the stack, and their divisor is NaN. If the device has no float64, the
    stack is on the CPU.
    """
    if owned and len(matrices) == 1:
        stack = matrices[0].detach()[None]
    else:
        stack = _stack(matrices).detach()
    stack = stack.to("cpu" if stack.device.type == "mps" else stack.device, torch.float64)
    scale = power_of_two(magnitudes(stack))[:, None]
    return stack.div_(scale[..., None]).nan_to_num_(0.0, 0.0, 0.0), scale


def _stack(matrices: Sequence[Tensor]) -> Tensor:
    """Return matrices in ascending order of size as a stack; smaller ones are filled up with zeros."""
    sizes = [m.shape[0] for m in matrices]
    if sizes[0] == sizes[-1]:
        return torch.stack(list(matrices))
    stack = matrices[-1].new_zeros(len(sizes), sizes[-1], sizes[-1])
    for size in sorted(set(sizes)):
        same = slice(bisect_left(sizes, size), bisect_right(sizes, size))
        stack[same, :size, :size] = torch.stack(list(matrices[same]))
    return stack


def magnitudes(stack: Tensor) -> Tensor:
    """Return the largest absolute value in each matrix of a stack, [b]; 0 for empty matrices.

    >>> magnitudes(torch.tensor([[[1.0, -2.0]], [[0.0, 0.5]]])), magnitudes(torch.zeros(1, 0, 3))
    (tensor([2.0000, 0.5000]), tensor([0.]))
    """
    if not stack.numel():
        return stack.new_zeros(len(stack))
    found: Tensor = torch.linalg.vector_norm(stack, torch.inf, dim=(1, 2))
    return found


def eigvalsh(stacks: Sequence[Tensor]) -> list[Tensor]:
    """Return `torch.linalg.eigvalsh` of stacks [b, d, d], with matrices decomposed in parallel if that is faster.

    A solver takes the matrices of a stack one after the other, and spends most of its time between kernels too small to
    fill a GPU, or on a CPU in steps that gain nothing from a second thread. So matrices are decomposed in several
    threads and streams at once. Threads of a CPU also decompose the smaller matrices of a GPU. Which ones depends on
    the sizes and the number of threads alone (`lent_to_cpu`): another split would change the last bits.

    >>> eigvalsh([torch.tensor([[[2.0, 1.0], [1.0, 2.0]]]), torch.ones(1, 1, 1)])
    [tensor([[1., 3.]]), tensor([[1.]])]
    """
    found: dict[int, Tensor] = {}
    on: defaultdict[torch.device, list[int]] = defaultdict(list)
    for i, stack in enumerate(stacks):
        on[stack.device].append(i)
    for device, indices in on.items():
        work = _eigvalsh_on_gpu if device.type == "cuda" else _eigvalsh_on_cpu
        found.update(zip(indices, work([stacks[i] for i in indices]), strict=True))
    return [found[i] for i in range(len(stacks))]


def _eigvalsh_on_cpu(stacks: Sequence[Tensor]) -> list[Tensor]:
    def decompose(stack: Tensor) -> Tensor:
        if not _BATCHED < stack.shape[-1] <= _LARGEST:
            return _eigvalsh(stack)
        return torch.cat(side_by_side(_eigvalsh, stack.chunk(torch.get_num_threads())))

    return [decompose(stack) for stack in stacks]


def _eigvalsh_on_gpu(stacks: Sequence[Tensor]) -> list[Tensor]:
    device, threads = stacks[0].device, torch.get_num_threads()
    split = [torch.split(stack, 1 if stack.shape[-1] > _BATCHED else len(stack)) for stack in stacks]
    parts = [part for some in split for part in some]
    if len(parts) < 2:
        return [_eigvalsh(stack) for stack in stacks]
    order = sorted(range(len(parts)), key=lambda i: parts[i].shape[-1])
    batched = [i for i in order if parts[i].shape[-1] <= _BATCHED]
    single = order[len(batched) :]
    cores = threads - _STREAMS if threads >= _THREADS else 0  # a thread that waits for a GPU occupies a core as well
    count = lent_to_cpu([parts[i].shape[-1] for i in single], cores)
    lent, kept = single[:count][::-1], [*batched, *single[count:]][::-1]  # the largest first
    current, (copies, *free) = torch.cuda.current_stream(device), _streams(device)
    for stream in (copies, *free):
        stream.wait_stream(current)  # which may still compute the matrices

    def on_cpu(i: int) -> Tensor:
        with torch.cuda.stream(copies):
            return _eigvalsh(parts[i].cpu())

    def on_gpu(i: int) -> Tensor:
        found = _eigvalsh(parts[i])
        # Memory belongs to the stream that allocated it, which may reuse it as soon as it is released: that of the
        # matrix to `current`, that of its eigenvalues to this one.
        torch.cuda.current_stream(device).synchronize()
        found.record_stream(current)
        return found

    with ThreadPoolExecutor(_STREAMS, initializer=lambda: torch.cuda.set_stream(free.pop())) as pool:
        waiting = pool.map(on_gpu, kept)
        found = dict(zip(lent, side_by_side(on_cpu, lent), strict=True))
        found.update(zip(kept, waiting, strict=True))
    if lent:
        back = torch.cat([found[i] for i in lent], dim=1).to(device)
        found.update(zip(lent, torch.split(back, [parts[i].shape[-1] for i in lent], dim=1), strict=True))
    ordered = (found[i] for i in range(len(parts)))
    return [torch.cat(list(islice(ordered, len(some)))) for some in split]


def lent_to_cpu(sizes: Sequence[int], cores: int) -> int:
    """Return how many of some matrices, of ascending sizes, the cores of a CPU decompose while a GPU has the others.

    They are as many as are finished before the others: at the latest when their times divided by the number of cores,
    and the time of the last one, are over. The estimates are fixed, so that the same matrices are always split alike.

    >>> lent_to_cpu([64] * 74, 12), lent_to_cpu([512] * 31 + [2048] * 6, 12), lent_to_cpu([64], 12)
    (62, 25, 0)
    """
    gpu, core = ([at_512 * (d / 512) ** power for d in sizes] for at_512, power in (_GPU, _CORE))
    taken, left = 0.0, sum(gpu)
    for count, (one, other) in enumerate(zip(core, gpu, strict=True) if cores > 0 else ()):
        taken, left = taken + one / cores, left - other
        if taken + one > left:
            return count
    return 0  # a GPU has the last one at least


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Return a stream for copies to the host, and those that decompose; always the same, as each keeps memory."""
    # torch loads the solver of a GPU in the first call, and raises if several threads make that call at once.
    _eigvalsh(torch.eye(1, dtype=torch.float64, device=device))
    return [torch.cuda.Stream(device) for _ in range(1 + _STREAMS)]  # type: ignore[no-untyped-call]


def _eigvalsh(stack: Tensor) -> Tensor:
    found: Tensor = torch.linalg.eigvalsh(stack)
    return found


def krylov(stack: Tensor, *, residual: float, squarings: int = 1) -> tuple[Tensor, Tensor]:
    """Return λmax of positive semidefinite matrices [b, d, d], and whether it was reached, both [b].

    A few squarings are followed by a Krylov space in a Chebyshev basis. GPUs square matrices fast, and a product with
    the squared matrix is worth several with the matrix itself. In a basis of Chebyshev polynomials such a product is
    nearly all of a step: no orthogonalization, no norm. So this takes a fraction of the kernels of Lanczos iteration.

    With B a multiple of A^n, n = 2^squarings, and C = 2B/f − 1, f = ‖B‖_F ≥ λmax(B), the vectors p_0 = q, p_1 = Cq,
    p_{k+1} = 2C p_k − p_{k−1} span the same space as q, Bq, B²q, ... and stay apart. With P their columns, the largest
    eigenvalue of PᵀBP y = θ PᵀP y belongs to v = Py, where PᵀBP follows from PᵀP by the recurrence. Then λ = vᵀAv/vᵀv
    is reached when ‖Av − λv‖ ≤ residual·λ‖v‖.

    >>> value, reached = krylov(torch.diag(torch.tensor([3.0, 1.0, 0.5], dtype=torch.float64))[None], residual=1e-8)
    >>> round(value.item(), 9), reached.item()
    (3.0, True)
    """
    b, d, _ = stack.shape
    power = stack
    for _ in range(squarings):
        # Dividing by the trace keeps powers from vanishing or growing.
        trace = power.diagonal(dim1=1, dim2=2).sum(1)
        half = power / torch.where(trace > 0, trace, 1.0)[:, None, None]
        power = torch.bmm(half, half)
    bound = torch.linalg.vector_norm(power, dim=(1, 2))
    bound = torch.where(bound > 0, bound, 1.0)
    # 2C, so that a step is one product.
    twice = power * (4 / bound)[:, None, None]
    twice.diagonal(dim1=1, dim2=2).sub_(2)
    del power
    basis = stack.new_empty(_DEGREE + 1, b, d, 1)
    basis[0] = _start(d).to(stack)[:, None]
    torch.baddbmm(basis[0], twice, basis[0], beta=0, alpha=0.5, out=basis[1])
    for k in range(1, _DEGREE):
        torch.baddbmm(basis[k - 1], twice, basis[k], beta=-1, out=basis[k + 1])
    p = basis[..., 0].transpose(0, 1)  # [b, degree + 1, d]
    v = torch.bmm(p[:, :-1].mT, _best(torch.bmm(p, p.mT)))
    for _ in range(_POLISH):
        v = torch.baddbmm(v, twice, v, beta=2)  # 4B/f
    v = torch.nn.functional.normalize(v, dim=1)
    av = torch.bmm(stack, v)
    # The error of the quotient is the square of the vector's, including its rounding errors.
    value = (v * av).sum((1, 2))
    off = torch.linalg.vector_norm(av - value[:, None, None] * v, dim=(1, 2))
    return value, off <= residual * value


def _best(gram: Tensor) -> Tensor:
    """Return the coefficients y of the largest eigenvalue, [b, degree, 1], from PᵀP with one vector more than used."""
    inner, once = gram[:, :-1, :-1], gram[:, :-1]
    # 4B p_k/f = p_{k+1} + 2 p_k + p_{k−1}, and 4B p_0/f = 2 p_1 + 2 p_0
    image = 2 * inner
    image[:, :, 1:] += once[:, :, 2:] + once[:, :, :-2]
    image[:, :, 0] += 2 * once[:, :, 1]
    values, vectors = torch.linalg.eigh(inner)
    kept = values > values[:, -1:] * 1e-13
    root = vectors * torch.where(kept, values.abs().rsqrt(), 0.0)[:, None, :]
    small = root.mT @ image @ root
    _, y = torch.linalg.eigh((small + small.mT) / 2)
    found: Tensor = root @ y[:, :, -1:]
    return found


def lanczos(
    matrices: Sequence[Tensor] | Tensor, *, residual: float, products: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return λmax of positive semidefinite matrices A [d, d], whether it was reached, and its eigenvectors.

    They are [b], [b] and [b, d].

    Lanczos: q_{k+1} β_k = A q_k − α_k q_k − β_{k−1} q_{k−1}, with α_k = q_kᵀA q_k and β_k for ‖q_{k+1}‖ = 1, makes A
    tridiagonal in the basis of the q. The largest eigenvalue θ of the first k rows and columns, with the eigenvector s,
    grows toward λmax, and some eigenvalue of A is within β_k |s_k| of θ. It is reached when this is at most residual·θ.

    The q are not made orthogonal again: once rounding has spoiled that, θ appears more than once among the eigenvalues,
    which does no harm to the largest. A space that A maps to itself cannot grow: the vectors after it are zero, and so
    are the eigenvalues they add. These are not above λmax, because A is positive semidefinite. Products with one vector
    at a time are as fast as A is read, on every device, and never use TF32.

    Args:
        matrices: the matrices, all of one shape, with elements near 1.
        residual: of the eigenvectors, relative to λmax.
        products: True if the matrices are multiples of BBᵀ for the given B [d, n], with elements of any size.

    >>> value, reached, _ = lanczos(torch.diag(torch.linspace(0, 1, 100, dtype=torch.float64))[None], residual=1e-8)
    >>> round(value.item(), 9), reached.item()
    (1.0, True)
    """
    first = matrices[0]
    looks = _LOOKS.get(first.device.type, _LOOKS["cpu"])
    q = _start(len(first)).to(first).expand(len(matrices), -1)
    before, beta = torch.zeros_like(q), q.new_zeros(len(q), 1)
    tiny = torch.finfo(q.dtype).tiny
    basis: list[Tensor] = []
    steps: list[Tensor] = []
    for k in range(1, looks[-1] + 1):
        if products:
            z = torch.stack([b.T.mv(v) for b, v in zip(matrices, q, strict=True)])
            if k == 1:
                size = power_of_two(z.abs().amax(1, keepdim=True))
            w = torch.stack([b.mv(v) for b, v in zip(matrices, z.div_(size), strict=True)]).div_(size)
        else:
            w = torch.stack([a.mv(v) for a, v in zip(matrices, q, strict=True)])
        alpha = torch.linalg.vecdot(q, w)[:, None]
        w = w.addcmul_(alpha, q, value=-1).addcmul_(beta, before, value=-1)
        beta = torch.linalg.vector_norm(w, dim=1, keepdim=True)
        basis.append(q)
        steps += [alpha, beta]
        before, q = q, w / beta.clamp_min(tiny)
        if k in looks:
            value, reached, s = _ritz(torch.cat(steps, dim=1).double().cpu(), residual)
            if reached.all():
                break
    # Not as a product of matrices, which may use TF32.
    vectors = (torch.stack(basis) * s.T[..., None].to(first)).sum(0)
    return value.to(first.device), reached.to(first.device), vectors


def _ritz(steps: Tensor, residual: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return θ, whether it is reached, and s, from α_1, β_1, α_2, β_2, ... [b, 2k]; NaN, True and NaN if not finite."""
    fine = steps.isfinite().all(1)
    alpha, beta = steps.where(fine[:, None], 0.0)[:, ::2], steps.where(fine[:, None], 0.0)[:, 1::2]
    values, vectors = torch.linalg.eigh(torch.diag_embed(alpha) + torch.diag_embed(beta[:, :-1], -1))  # the lower part
    theta, s = values[:, -1], vectors[:, :, -1]
    reached = beta[:, -1] * s[:, -1].abs() <= residual * theta
    return theta.where(fine, torch.nan), reached | ~fine, s.where(fine[:, None], torch.nan)


def _start(d: int) -> Tensor:
    """Return a random direction from a fixed seed: no layer's matrix avoids it, and it is the same at every call."""
    drawn = torch.randn(d, dtype=torch.float64, generator=torch.Generator().manual_seed(0x6C7972))
    return torch.nn.functional.normalize(drawn, dim=0)


def largest_by_squaring(stack: Tensor) -> Tensor:
    """Return λmax of positive semidefinite matrices [b, d, d], as [b]; 0 for matrices of zeros, NaN if not finite.

    Squaring takes more arithmetic than Lanczos iteration but far fewer kernels, and nothing waits for the device. It is
    faster on a GPU unless matrices are large and many.

    With B_0 = A/tr A and B_k = B_{k−1}², divided by its trace t_k at some k, the traces multiply to the power

        tr A^n = Π_j t_j^{n/2^j},   n = 2^k,

    and (tr A^{2n}/tr A^n)^{1/n} grows toward λmax: of eigenvalues λ_i = λmax(1 − δ_i) only those with δ_i < 1/n
    contribute, and these are equal to λmax. With n = 2^22 the relative error is below ln(d)/2n, 1e-6, for the worst
    spectrum; rounding in B_k counts 2^−k times.

    >>> largest_by_squaring(torch.diag(torch.linspace(0, 1, 100, dtype=torch.float64))[None])
    tensor([1.], dtype=torch.float64)
    """
    traces = [_trace(stack)]
    power = stack / traces[0][:, None, None]
    for k in range(1, _DIVIDED[-1] + 1):
        power = torch.bmm(power, power)
        if k in _DIVIDED:
            traces.append(_trace(power))
            power = power.div_(traces[-1][:, None, None])
    logarithms = torch.stack(traces).log()
    found = torch.einsum("kb,k->b", logarithms, _shares(stack.dtype, stack.device)).exp()
    return torch.where(traces[0] == 0, 0.0, found)


@cache
def _shares(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weight of each trace. Cached, because a CUDA graph cannot hold the copy to its device."""
    shares = [2.0**-k for k in (0, *_DIVIDED)]
    # The last trace adds ln(tr A^2n)/2n − ln(tr A^n)/n; counted twice, it leaves ln(tr A^2n/tr A^n)/n.
    shares[-1] *= 2
    return torch.tensor(shares, dtype=dtype, device=device)


def _trace(stack: Tensor) -> Tensor:
    return stack.diagonal(dim1=1, dim2=2).sum(1)
