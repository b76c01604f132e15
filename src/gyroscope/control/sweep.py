"""Controlled updates of lists of layers in the two primitives: `dots`, coefficients, `combine_`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gyroscope.control.coefficients import Law, coefficients
from gyroscope.control.ledger import Ledger
from gyroscope.vectors import combine_, dots
from gyroscope.vectors.launch import to_device
from gyroscope.vectors.layout import any_sharded

# Layers are taken together up to this many elements, so that the update finds them in a CPU's cache.
_TOGETHER = 1 << 21


@dataclass(frozen=True)
class Move:
    """Layers on one device, and where they are to go: s = sign · displacement + along · w.

    Attributes:
        weights: the layers' weights, updated in place.
        displacements: one tensor a layer.
        rows: the layers' rows in the ledger, `counts[l]` of them for layer l.
        counts: the segments of each layer.
        lr: ρ, before the multipliers.
        sign: −1 where gradients stand in for displacements.
        along: a multiple of the weights that belongs to the displacement.
    """

    weights: list[Tensor]
    displacements: list[Tensor]
    rows: list[int]
    counts: list[int]
    lr: float | Tensor
    sign: float = 1.0
    along: float = 0.0


def sweep(moves: Sequence[Move], ledger: Ledger, law: Law) -> None:
    """w ← a w + b s for every move, all on the ledger's device, and the ledger brought up to date."""
    if any(any_sharded(move.weights) for move in moves):
        # The inner products of all layers together, whatever their groups: one all-reduce.
        products = _products(
            [w for m in moves for w in m.weights],
            [d for m in moves for d in m.displacements],
            [n for m in moves for n in m.counts],
        )
        start = 0
        for move in moves:
            _apply(move, products[start : start + len(move.rows)], ledger, law)
            start += len(move.rows)
        return
    for move in moves:
        for part in _in_cache(move) if move.weights[0].device.type == "cpu" else [move]:
            _apply(part, _products(part.weights, part.displacements, part.counts), ledger, law)


def _in_cache(move: Move) -> Iterator[Move]:
    """The same move in parts that a cache holds until they are updated."""
    start = first = together = 0
    for i, w in enumerate(move.weights):
        together += w.numel()
        if together >= _TOGETHER or i + 1 == len(move.weights):
            counts = move.counts[start : i + 1]
            yield replace(
                move,
                weights=move.weights[start : i + 1],
                displacements=move.displacements[start : i + 1],
                rows=move.rows[first : first + sum(counts)],
                counts=counts,
            )
            start, first, together = i + 1, first + sum(counts), 0


def _products(w: list[Tensor], d: list[Tensor], counts: list[int]) -> Tensor:
    return dots({"ww": (w, w), "wd": (w, d), "dd": (d, d)}, segments=counts)


def _apply(move: Move, products: Any, ledger: Ledger, law: Law) -> None:
    device = products.device
    here: Any = _index(move.rows, device)
    lr: Any = move.lr
    if device.type == "cpu":
        # Views of the same memory: arithmetic on a few numbers is much quicker in NumPy.
        products, book = products.numpy(), {name: value.numpy() for name, value in vars(ledger).items()}
        lr = float(lr)
    else:
        book = vars(ledger)
        if isinstance(lr, Tensor):
            lr = lr.to(device, products.dtype)
    with np.errstate(all="ignore"):
        ab = _update_book(products, book, here, lr, law, move.sign, move.along)
    a, b = (torch.as_tensor(one, device=device) for one in ab)
    combine_(move.weights, move.displacements, a, b, segments=move.counts)


def _update_book(
    products: Any, book: dict[str, Any], here: Any, lr: Any, law: Law, sign: float, along: float
) -> tuple[Any, Any]:
    """The coefficients of w and of the displacement as it was given; radii and skipped steps go into the book."""
    xp: Any = torch if isinstance(products, Tensor) else np
    ww, wd, dd = products[:, 0], products[:, 1], products[:, 2]
    if sign != 1.0 or along != 0.0:
        products = xp.stack([ww, sign * wd + along * ww, dd + 2 * sign * along * wd + along * along * ww], 1)
    radius = book["radius"][here]
    radius = xp.where((radius <= 0) & xp.isfinite(ww), xp.sqrt(ww), radius)
    a, b, _ = coefficients(products, lr * book["multiplier"][here], radius, law)
    bad = ~xp.isfinite(products).all(1)
    book["radius"][here] = radius
    book["bad"][here] = bad
    book["skipped"][here] += bad
    return a + along * b, sign * b


def _index(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Rows that stand together as a slice, which costs no copy to the device."""
    if rows and rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return to_device(np.array(rows, dtype=np.int64), device)
