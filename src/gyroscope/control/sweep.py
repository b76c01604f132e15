"""One controlled update of a list of layers in the two primitives: `dots`, coefficients, `combine_`."""

from __future__ import annotations

from collections.abc import Sequence

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
    products = dots({"ww": (w, w), "wd": (w, d), "dd": (d, d)}, segments=counts)
    ww, wd, dd = products.unbind(1)
    if sign != 1.0 or along != 0.0:
        products = torch.stack([ww, sign * wd + along * ww, dd + 2 * sign * along * wd + along * along * ww], 1)
    here = _index(rows, ww.device)
    radius = ledger.radius[here]
    radius = torch.where((radius < 0) & torch.isfinite(ww), ww.sqrt(), radius)
    if isinstance(lr, Tensor):
        lr = lr.to(ww.device, ww.dtype)
    a, b, _ = coefficients(products, lr * ledger.multiplier[here], radius, law)
    combine_(w, d, a + along * b, sign * b, segments=counts)
    bad = (~torch.isfinite(products).all(1)).to(torch.int64)
    ledger.radius[here] = radius
    ledger.bad[here] = bad
    ledger.skipped[here] += bad


def _index(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Rows that stand together as a slice, which costs no copy to the device."""
    if rows and rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(list(rows), device=device)
