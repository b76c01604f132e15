"""A dataset divided into training, validation and test examples, on a device with enough memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch


@dataclass(frozen=True)
class Split:
    """Inputs `[N, ...]` and integer labels, one per input `[N]` or, for text, one per character `[N, T]`.

    Images are kept as the published bytes. A network takes (x − mean) / std, which `inputs` computes for a batch at a
    time. This needs a quarter of the memory and is as exact.

    Attributes:
        x_train: the training inputs.
        y_train: their labels.
        x_test: the test inputs.
        y_test: their labels.
        x_val: the inputs held out of the training set, or None.
        y_val: their labels.
        mean: the mean that `inputs` subtracts, one number or one per channel; None if x is already normalized.
        std: the standard deviation that `inputs` divides by.
        classes: the number of possible labels.

    >>> x, y = torch.tensor([[[[0, 255]]], [[[51, 102]]]], dtype=torch.uint8), torch.tensor([0, 1])
    >>> split = Split(x, y, x[:1], y[:1], mean=torch.tensor(51.0), std=torch.tensor(102.0), classes=2)
    >>> split.inputs(split.x_test)
    tensor([[[[-0.5000,  2.0000]]]])
    """

    x_train: torch.Tensor
    y_train: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    x_val: torch.Tensor | None = None
    y_val: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    std: torch.Tensor | None = None
    classes: int = 10

    def to(self, device: torch.device | str) -> Split:
        """Return the same examples on another device.

        Inputs that do not fit in its free memory, such as ImageNet's, stay where they are: take batches of them there,
        and move the batches. Labels, mean and std are always moved.

        >>> x, y = torch.zeros(1, 1, 2, 2), torch.zeros(1, dtype=torch.int64)
        >>> Split(x, y, x, y).to("meta").x_test.device
        device(type='meta')
        """
        device = torch.device(device)

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device)

        def moved_if_it_fits(x: torch.Tensor) -> torch.Tensor:
            return x.to(device) if x.device == device or fits(x.nbytes, device) else x

        return replace(
            self,
            x_train=moved_if_it_fits(self.x_train),
            y_train=self.y_train.to(device),
            x_test=moved_if_it_fits(self.x_test),
            y_test=self.y_test.to(device),
            x_val=None if self.x_val is None else moved_if_it_fits(self.x_val),
            y_val=moved(self.y_val),
            mean=moved(self.mean),
            std=moved(self.std),
        )

    def converted(self, dtype: torch.dtype, *, moved: float = 0.0) -> Split:
        """Return the same examples with inputs in `dtype` instead of float32, and `moved` added to each.

        >>> x, y = torch.ones(1, 1, 1, 1), torch.tensor([0])
        >>> Split(x, y, x, y).converted(torch.float64, moved=2.0).x_test
        tensor([[[[3.]]]], dtype=torch.float64)
        """
        if dtype == torch.float32 and not moved:
            return self

        def taken(x: torch.Tensor) -> torch.Tensor:
            return self.inputs(x).to(dtype) + moved

        x_val = None if self.x_val is None else taken(self.x_val)
        x_train, x_test = taken(self.x_train), taken(self.x_test)
        return replace(self, x_train=x_train, x_test=x_test, x_val=x_val, mean=None, std=None)

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return (x − mean) / std in float32 for some of the inputs, as a network takes them; x itself without a mean.

        It does not wait for the device and has no branches on values, so a CUDA graph can capture it.

        >>> x, y = torch.tensor([[[[7]], [[8]]]], dtype=torch.uint8), torch.tensor([0])
        >>> split = Split(x, y, x, y, mean=torch.tensor([7.0, 6.0]), std=torch.tensor([1.0, 4.0]))
        >>> split.inputs(x).flatten()
        tensor([0.0000, 0.5000])
        """
        if self.mean is None or self.std is None:
            return x
        if self.mean.dim() == 0:
            return (x - self.mean) / self.std
        return (x - self.mean[:, None, None]) / self.std[:, None, None]


# The rest is for the network, its gradients and its activations.
_SHARE = 0.5
_AVAILABLE = Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")


def fits(size: int, device: torch.device | str) -> bool:
    """Return whether `size` bytes take at most half of the free memory of a device.

    >>> fits(1, "cpu"), fits(2**60, "cpu")
    (True, False)
    """
    free = free_memory(device)
    return free is None or size <= _SHARE * free


def free_memory(device: torch.device | str) -> int | None:
    """Return the number of free bytes on a device; None if unknown.

    On a CPU, these are the bytes that the system can provide without swapping, or the container's limit if it is lower.

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
