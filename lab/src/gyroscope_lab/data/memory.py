"""What fits in the memory of a device."""

from __future__ import annotations

from pathlib import Path

import torch

# The rest is for the network, its gradients and its activations.
_SHARE = 0.5
_AVAILABLE = Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")


def fits(size: int, device: torch.device | str) -> bool:
    """Tell whether `size` bytes take at most half of the memory that is free on a device.

    >>> fits(1, "cpu"), fits(2**60, "cpu")
    (True, False)
    """
    free = free_memory(device)
    return free is None or size <= _SHARE * free


def free_memory(device: torch.device | str) -> int | None:
    """Return how many bytes are free on a device; None where that cannot be told.

    On a CPU these are the bytes the system could give without swapping, or the limit of the container if it is less.

    >>> free_memory("meta") is None
    True
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu" or not _AVAILABLE.is_file():
        return None
    kilobytes = dict(line.split(":", 1) for line in _AVAILABLE.read_text().splitlines())
    free = int(kilobytes["MemAvailable"].split()[0]) * 1024
    limit = _LIMIT.read_text().strip() if _LIMIT.is_file() else "max"
    return free if limit == "max" else min(free, int(limit))
