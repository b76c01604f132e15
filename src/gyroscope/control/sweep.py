"""One controlled update of a list of layers in the two primitives: `dots`, coefficients, `combine_`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gyroscope.control.coefficients import Law, coefficients
from gyroscope.control.ledger import Ledger
from gyroscope.vectors import combine_, dots
from gyroscope.vectors.sharded import any_sharded

# Layers are taken together up to this many elements, so that the update finds them in a CPU's cache.
_TOGETHER = 1 << 21


def sweep(
    weights: Sequence[Tensor],
    displacements: Sequence[Tensor],
    rows: Sequence[int],
    counts: Sequence[int],
    ledger: Ledger,
    lr: float | Tensor,
    law: Law,
    *,
    sign: float = 1.0,
    along: float = 0.0,
) -> None:
    """w ← a w + b s with s = sign · displacement + along · w, and the ledger brought up to date.

    Args:
        weights: the layers' weights, updated in place.
        displacements: one tensor a layer.
        rows: the layers' rows in the ledger, `counts[l]` of them for layer l.
        counts: the segments of each layer.
        ledger: radii, multipliers and counts of skipped steps.
        lr: ρ, before the multipliers.
        law: which operations are performed.
        sign: −1 where gradients stand in for displacements.
        along: a multiple of the weights that belongs to the displacement.
    """
    start = 0
    first = 0
    together = 0
    sharded = any_sharded(weights)
    for i, w in enumerate(weights):
        together += w.numel()
        last = i + 1 == len(weights)
        # Sharded layers go all in one: one all-reduce for all of them.
        if last or (together >= _TOGETHER and not sharded and w.device.type == "cpu"):
            n = sum(counts[start : i + 1])
            _sweep(
                list(weights[start : i + 1]),
                list(displacements[start : i + 1]),
                rows[first : first + n],
                counts[start : i + 1],
                ledger,
                lr,
                law,
                sign,
                along,
            )
            start, first, together = i + 1, first + n, 0


def _sweep(
    w: list[Tensor],
    d: list[Tensor],
    rows: Sequence[int],
    counts: Sequence[int],
    ledger: Ledger,
    lr: float | Tensor,
    law: Law,
    sign: float,
    along: float,
) -> None:
    products: Any = dots({"ww": (w, w), "wd": (w, d), "dd": (d, d)}, segments=counts)
    device = products.device
    here: Any = _index(rows, device)
    if device.type == "cpu":
        # Views of the same memory: arithmetic on a few numbers is much quicker in NumPy.
        products, book = products.numpy(), {name: value.numpy() for name, value in vars(ledger).items()}
        if isinstance(lr, Tensor):
            lr = float(lr)
    else:
        book = vars(ledger)
        if isinstance(lr, Tensor):
            lr = lr.to(device, products.dtype)
    with np.errstate(all="ignore"):
        a, b = _update_book(products, book, here, lr, law, sign, along)
    combine_(w, d, torch.as_tensor(a), torch.as_tensor(b), segments=counts)


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
    return torch.tensor(list(rows), device=device)
