"""The examples of an epoch, on the device, in the order of training."""

from __future__ import annotations

import torch
from torch import Tensor

from gyroscope.base import pinned
from gyroscope_lab.data.augment import Augmentation, augment
from gyroscope_lab.data.split import Split


class Feed:
    """The training examples batch by batch, shuffled anew for each epoch.

    Random numbers are drawn on the CPU, for a whole epoch. `take` runs on the device alone, always at the same
    addresses, so that a CUDA graph can capture it. The position in the epoch is counted on the device too.

    Args:
        split: the examples, on the device, or elsewhere if they do not fit.
        batch: the batch size, for augmentations that are the same for a whole batch.
        augmentation: how images are shifted and mirrored.
        seed: the seed of the order and of the augmentation.
        device: the device of the batches.
        passes: passes over the examples per epoch, each in a new order.
        drawn: batches per epoch, drawn with replacement, in place of passes; 0 for passes.
        share: (r, R) to take the r-th of R near-equal parts of every batch; the R parts make up the batch.
    """

    def __init__(
        self,
        split: Split,
        *,
        batch: int,
        augmentation: Augmentation | None,
        seed: int,
        device: torch.device,
        passes: int = 1,
        drawn: int = 0,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self._split = split
        self._batch = batch
        self._augmentation = augmentation
        self._share = share
        self._passes = 0 if drawn else passes
        count = drawn * batch or passes * len(split.y_train)
        self._order = torch.zeros(count, dtype=torch.int64, device=device)
        self._moves = None if augmentation is None else torch.zeros(count, 3, dtype=torch.int8, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._offsets = torch.arange(batch, device=device)

    @property
    def resident(self) -> bool:
        """True if the examples are on the device of the batches."""
        return self._split.x_train.device == self._order.device

    def shuffle(self) -> None:
        """Begin an epoch."""
        count, examples = len(self._order), len(self._split.y_train)
        if self._passes:
            orders = [torch.randperm(examples, generator=self.generator) for _ in range(self._passes)]
            _fill(self._order, torch.cat(orders))
        else:
            _fill(self._order, torch.randint(0, examples, (count,), generator=self.generator))
        if self._augmentation is not None and self._moves is not None:
            _fill(self._moves, self._augmentation.draw(count, self._batch, self.generator))
        self._at.zero_()

    def take(self, count: int) -> tuple[Tensor, Tensor]:
        """The next `count` inputs, as the network expects them, and their labels; or this feed's share of them."""
        part, parts = self._share
        where = self._at + self._offsets[part * count // parts : (part + 1) * count // parts]
        chosen = self._order[where]
        x, y = self._split.x_train, self._split.y_train
        taken = x[chosen] if self.resident else x[chosen.to(x.device)].to(chosen.device)
        self._at += count
        if self._augmentation is None or self._moves is None:
            return self._split.inputs(taken), y[chosen]
        moves, fill = self._moves[where], self._augmentation.fill
        if fill == "zero":  # in the normalized image
            return augment(self._split.inputs(taken), moves, fill=fill), y[chosen]
        return self._split.inputs(augment(taken, moves, fill=fill)), y[chosen]


def _fill(there: Tensor, values: Tensor) -> None:
    """Copy to the device without waiting for it."""
    there.copy_(pinned(values) if there.is_cuda else values, non_blocking=True)
