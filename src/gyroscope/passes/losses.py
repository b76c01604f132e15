"""The mean loss, from a loss that is a mean, a sum, or one value per sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from gyroscope.base.accepted import choice
from gyroscope.errors import ConditioningError
from gyroscope.layers.untouched import tensors

Loss = Callable[[Any, Any], Tensor]
Reduction = Literal["auto", "mean", "sum"]

_MEANS = tuple(
    getattr(functional, name)
    for name in ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
                 "binary_cross_entropy", "binary_cross_entropy_with_logits")
)  # fmt: skip


def mean_loss(loss: Loss, output: Any, target: Any, *, reduction: Reduction = "auto") -> tuple[Tensor, str | None]:
    """Return the mean of a loss over the batch, and a note on how it was obtained, or None.

    One value per sample (or token, or any other shape) is averaged. For a single value, `reduction` says whether it is
    a mean or a sum. "auto" uses the loss's attribute `reduction` if it has one; otherwise it compares the loss of a few
    samples with that of the same samples twice, which is equal for a mean and doubled for a sum. A sum is divided by
    the number of samples in the batch. A loss that is neither is taken for a mean.

    >>> out, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    >>> mean = functional.cross_entropy(out, y)
    >>> bool(torch.isclose(mean_loss(lambda o, t: functional.cross_entropy(o, t, reduction="sum"), out, y)[0], mean))
    True
    >>> bool(torch.isclose(mean_loss(torch.nn.CrossEntropyLoss(reduction="none"), out, y)[0], mean))
    True
    """
    value = loss(output, target)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        given = f"a {value.dtype} tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ConditioningError(
            "`loss` must return a real tensor (the mean over the batch, the sum, or one value per sample), got "
            f"{given}."
        )
    if value.numel() == 0:
        raise ConditioningError("The loss returned no values: the batch is empty.")
    if value.numel() > 1 or (value.dim() > 0 and _length(output) == 1):
        return value.mean(), None
    value = value.reshape(())
    found, note = (reduction, None) if reduction != "auto" else _reduction(loss, output, target)
    if found == "sum":
        n = _length(output)
        if n is None:
            raise ConditioningError(
                "The loss is a sum, but the output has no tensor whose length is the number of samples. Use a loss "
                "that is a mean."
            )
        return value / n, note
    return value, note


def reduction_of(loss: Loss, output: Any, target: Any) -> Reduction:
    """Return whether a loss of one value is a mean or a sum, as `mean_loss` finds out, for repeated use.

    "auto" if these samples do not tell, because their loss is zero, not finite or neither; other samples may.

    >>> out, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    >>> reduction_of(lambda o, t: functional.cross_entropy(o, t, reduction="sum"), out, y)
    'sum'
    >>> reduction_of(lambda o, t: functional.cross_entropy(o, t, reduction="sum"), out, torch.full((6,), -100))
    'auto'
    """
    return _reduction(loss, output, target)[0]


def counts_equally(loss: Loss, output: Any, target: Any) -> bool:
    """Return True if all samples of a batch count the same in its mean loss, as far as the loss can be evaluated.

    Add as many copies of one sample to a batch as it has samples. In a weighted mean, the loss is then not halfway
    between the loss of the batch and that of the sample, unless the sample has the mean weight. Each half of the batch
    is tested with the sample, of the first four, whose loss is farthest from its own.

    >>> out, y = torch.randn(6, 3), torch.tensor([0, 1, -100, 0, 1, 2])
    >>> mean = lambda output, target: functional.cross_entropy(output, target)
    >>> counts_equally(mean, out[3:], y[3:]), counts_equally(mean, out, y)
    (True, False)
    """
    n = _length(output)
    if n is None or n < 2 or any(loss is one for one in _MEANS):
        return True
    rough = any(one.dtype in (torch.float16, torch.bfloat16) for one in tensors(output))

    def asked(*rows: int) -> float:
        def some(given: Tensor) -> Tensor:
            return given[list(rows)]

        return float(loss(_with_rows(output, n, some), _with_rows(target, n, some)).mean())

    try:
        with torch.no_grad():
            if reduction_of(loss, output, target) == "sum":
                return True
            alone = {i: asked(i) for i in range(min(4, n))}
            if not all(map(math.isfinite, alone.values())):  # a sample without a label has no mean
                return False
            for rows in (range(n // 2), range(n // 2, n)):
                own = asked(*rows)
                i = max(alone, key=lambda i: abs(alone[i] - own))
                both = asked(*rows, *[i] * len(rows))
                # Not `>`: the loss of half a batch without labels is NaN.
                if not abs(both - (own + alone[i]) / 2) <= (0.02 if rough else 1e-4) * max(abs(own), abs(alone[i])):
                    return False
    except Exception:
        return True
    return True


def check_reduction(reduction: Any) -> None:
    """Reject an invalid reduction."""
    choice(reduction, "reduction", get_args(Reduction), ConditioningError)


def _length(output: Any) -> int | None:
    """Return the number of samples in an output, from its first tensor that has rows; None if there is none."""
    return next((int(one.shape[0]) for one in tensors(output) if one.dim() > 0), None)


def _reduction(loss: Loss, output: Any, target: Any) -> tuple[Reduction, str | None]:
    """Return the reduction of a loss, "auto" if it is unknown and a mean is assumed, and a note or None."""
    told = getattr(loss, "reduction", None)
    inner = getattr(loss, "func", None)  # functools.partial
    if inner is not None:
        told = getattr(loss, "keywords", {}).get("reduction", told)
    if isinstance(told, str) and told in ("mean", "sum"):
        return "sum" if told == "sum" else "mean", None
    if any(one is loss or one is inner for one in _MEANS):
        return "mean", None
    try:
        with torch.no_grad():
            once, twice = _asked(loss, output, target)
    except Exception:
        return "auto", "the loss could not be tested for being a mean; it was taken for one"
    close = 0.02 * abs(once)
    if 0 < close < math.inf and abs(twice - once) <= close:
        return "mean", None
    if 0 < close < math.inf and abs(twice - 2 * once) <= close:
        return "sum", "the loss is a sum over the batch; it was divided by the number of samples"
    if once == twice == 0:
        return "auto", None
    return "auto", "the loss is neither a mean nor a sum over the batch; it was taken for a mean"


def _asked(loss: Loss, output: Any, target: Any) -> tuple[float, float]:
    """Return the loss of a few samples and of the same samples twice; of all samples if the few do not tell."""
    n = _length(output)
    if not n:
        raise ConditioningError("The output has no rows, so its samples cannot be repeated.")

    def asked(few: int, times: int) -> float:
        def some(rows: Tensor) -> Tensor:
            return torch.cat([rows[:few]] * times)

        # One value per sample is averaged.
        return float(loss(_with_rows(output, n, some), _with_rows(target, n, some)).mean())

    few = 4
    once = asked(few, 1)
    if once == 0 or not math.isfinite(once):  # none of them has a loss, for example because all labels are ignored
        few = n
        once = asked(few, 1)
    return once, asked(few, 2)


def _with_rows(given: Any, n: int, rows: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy with other rows in every tensor that has one per sample; a loss may write to all of it."""
    match given:
        case Tensor():
            return rows(given.detach()) if given.dim() > 0 and given.shape[0] == n else given.detach().clone()
        case tuple() if hasattr(given, "_fields"):
            return type(given)(*(_with_rows(one, n, rows) for one in given))
        case tuple() | list():
            return type(given)(_with_rows(one, n, rows) for one in given)
        case Mapping():
            named = {key: _with_rows(one, n, rows) for key, one in given.items()}
            return named if type(given) is dict else type(given)(**named)
    return given
