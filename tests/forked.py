"""Functions in processes of their own, forked from a server that has imported torch already, once for all tests.

A process that imports it alone takes seconds. The server itself does nothing, so what one process sets is not seen by
the next.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any
from unittest.mock import patch

import torch.multiprocessing as mp

# The optimizers and sharded modules of torch import torch._dynamo when they are first called.
PRELOAD = [
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "gyroscope",
    "gyroscope_lab",
]


def context() -> multiprocessing.context.ForkServerContext:
    """What pools of processes take to be forked so."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    with patch.dict(os.environ, TRITON_INTERPRET="1"):  # heard by Triton, as it is imported
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def start(act: Callable[..., None], *args: Any, processes: int = 1) -> None:
    """Call act(0, *args), act(1, *args), … in a process each; the first that fails ends all and is raised."""
    mp.start_processes(act, args=args, nprocs=processes, start_method=context().get_start_method())


def execute(program: str) -> None:
    """Execute a program where torch is imported, and of gyroscope nothing but the package itself."""
    start(_execute, program)


def _execute(_: int, program: str) -> None:
    warnings.simplefilter("error")
    exec(program, {"__name__": "__main__"})
