"""What all eigenvalues of many matrices cost on a GPU and on the cores of its host, and λmax alone on the GPU.

    python benchmarks/eigenvalues.py

The sizes and numbers of matrices are those of the networks of conditioning_cost.py. Times are in milliseconds, the
better of two runs. It decides what `gyroscope.conditioning.eigen` lends to the host, and where it squares matrices.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from gyroscope.conditioning import eigen

ALL = [(64, 74), (128, 10), (256, 18), (512, 10), (512, 31), (1024, 14), (1536, 6), (2048, 6), (2048, 12), (4096, 1)]
LARGEST = [(128, 48), (256, 20), (512, 16), (512, 64), (1024, 1), (1024, 15), (1536, 6), (2048, 2), (2048, 4)]
CORES = os.cpu_count() or 1


def milliseconds(work: Callable[..., Any], stack: Tensor, **options: Any) -> float:
    """The better of two runs, after one that is not timed."""
    work(stack, **options)
    best = float("inf")
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work(stack, **options)
        torch.cuda.synchronize()
        best = min(best, 1e3 * (time.perf_counter() - start))
    return best


def made(count: int, size: int, device: str) -> Tensor:
    """Covariances [count, size, size] in float64, whose eigenvalues span four orders of magnitude."""
    x = torch.randn(count, size, 2 * size, device=device, dtype=torch.float64)
    x *= torch.logspace(0, -2, size, device=device, dtype=torch.float64)[:, None]
    return x @ x.mT


def on_cores(stack: Tensor) -> Tensor:
    """Decompose on the host, one core per matrix, copies included."""
    before, host = torch.get_num_threads(), stack.cpu()
    try:
        with ThreadPoolExecutor(CORES, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return torch.stack(list(pool.map(torch.linalg.eigvalsh, host))).to(stack.device)
    finally:
        torch.set_num_threads(before)


def main(device: str = "cuda") -> None:
    print(f"{torch.cuda.get_device_name(device)}, {CORES} cores; torch {torch.__version__}")
    print("all eigenvalues, ms: matrices | one call | gyroscope | the host's cores")
    for size, count in ALL:
        stack = made(count, size, device)
        ways = (torch.linalg.eigvalsh, lambda one: eigen.eigvalsh([one]), on_cores)
        print(f"{count:3} × {size:4} | " + " | ".join(f"{milliseconds(way, stack):.1f}" for way in ways))
    print("λmax, ms, and how many are reached: matrices | squaring | Krylov space after 0, 1, 2, 3 squarings")
    for size, count in LARGEST:
        stack = made(count, size, device)
        cells = [f"{milliseconds(eigen.largest_by_squaring, stack):.2f}"]
        for times in range(4):
            reached = eigen.krylov(stack, residual=1e-8, squarings=times)[1]
            spent = milliseconds(eigen.krylov, stack, residual=1e-8, squarings=times)
            cells.append(f"{spent:.2f} ({int(reached.sum())})")
        print(f"{count:3} × {size:4} | " + " | ".join(cells))


if __name__ == "__main__":
    main()
