"""What a training has to itself, whoever takes turns with it: its random numbers, and what products are computed in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Own:
    """The random numbers of one training, such as dropout's, and its precision; both in place during its turns alone.

    torch has one generator of random numbers a device, and one precision, for everything. Between turns they are what
    they were: to whoever calls, to other trainings, and to the captured steps of these, which keep the generator that
    they were captured with.

    Args:
        device: what the training is on.
        seed: of the training.
        rank: of the process, of those that divide its batches: each has other random numbers.
        tf32: whether a GPU may round what it multiplies to TF32.

    >>> first, other = (Own(torch.device("cpu"), seed=1) for _ in range(2))
    >>> _ = torch.manual_seed(0)
    >>> with first.turn():
    ...     one = torch.rand(1)
    >>> between = torch.rand(1)
    >>> with other.turn():
    ...     torch.rand(1) == one
    tensor([True])
    >>> between == torch.rand(1, generator=torch.Generator().manual_seed(0))
    tensor([True])
    """

    def __init__(self, device: torch.device, *, seed: int, rank: int = 0, tf32: bool = False) -> None:
        self._seed, self._rank, self._tf32 = seed, rank, tf32
        self._gpu: torch.Generator | None = None
        if device.type == "cuda":
            self._index = torch.cuda.current_device() if device.index is None else device.index
            self._gpu = torch.Generator(torch.device("cuda", self._index))
        self._begin(epoch=0)

    def _begin(self, *, epoch: int) -> None:
        # Not the seed itself, which the weights and the order of the examples are drawn from; 32 bits of it count.
        seed = ((self._seed * 1_000_003 + epoch) * 1_000_003 + self._rank + 1) % 2**32
        self._cpu = torch.Generator().manual_seed(seed).get_state()
        if self._gpu is not None:
            self._gpu.manual_seed(seed)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Have a turn."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._cpu)
        try:
            with self._on_gpu():
                yield
        finally:
            self._cpu = torch.get_rng_state()
            torch.set_rng_state(before)

    @contextmanager
    def _on_gpu(self) -> Iterator[None]:
        if self._gpu is None:
            yield
            return
        products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
        tf32 = products.allow_tf32, convolutions.allow_tf32
        shared = torch.cuda.default_generators[self._index]
        before = shared.graphsafe_get_state()
        # Its state itself, not a copy: captured steps count on in it.
        shared.graphsafe_set_state(self._gpu)
        products.allow_tf32 = convolutions.allow_tf32 = self._tf32
        try:
            yield
        finally:
            products.allow_tf32, convolutions.allow_tf32 = tf32
            shared.graphsafe_set_state(before)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"random": self._cpu, "random_cuda": None if self._gpu is None else self._gpu.get_state()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a training's checkpoint, which is that of its first process."""
        if self._rank > 0:
            self._begin(epoch=state["epoch"])
            return
        torch.Generator().set_state(state["random"])  # refuses what is none
        self._cpu = state["random"]
        if self._gpu is not None and state["random_cuda"] is not None:
            self._gpu.set_state(state["random_cuda"])
