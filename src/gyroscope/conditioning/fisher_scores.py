"""The side of the loss: second moments of the scores s = ∂ℓ/∂f of each sample, over the labels that are meant.

With J the Jacobian of the output f of a sample, ∇ℓ = Jᵀs, so that every matrix of second moments is

    F = (1/N) Σ_i J_iᵀ E(s sᵀ) J_i,     E(s sᵀ) = Σ_r b_r b_rᵀ,

and the rows b_r pulled back through the network are the rows of a factor of F. One label known or drawn gives one row.
The expectation over the model's own labels is known in closed form, with c the share of a prediction in ℓ:

    categorical   E(s sᵀ) = c² (diag q − q qᵀ) = Σ_k c² q_k (q − e_k)(q − e_k)ᵀ      (c² diag q for log-probabilities)
    Bernoulli     E(s sᵀ) = c² q (1 − q)
    Gaussian      E(s sᵀ) = I / σ²
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from gyroscope.errors import ConditioningError
from gyroscope.passes.labels import (
    Likelihood,
    Loss,
    class_dimension,
    distribution,
    known,
    probabilities,
    sample_targets,
)
from gyroscope.passes.losses import mean_loss
from gyroscope.passes.network import cast

Labels = Literal["model", "sampled", "true"] | Callable[[Tensor, torch.Generator], Any]


@dataclass(frozen=True)
class Scores:
    """E(s sᵀ) of every sample of a batch.

    Attributes:
        samples: how many have a label; the others count for nothing.
        factor: the rows b_r of some of the samples, [samples, r, ...].
        times: E(s sᵀ) t of every sample, for t of the form of the output.
    """

    samples: int
    factor: Callable[[slice], Tensor]
    times: Callable[[Tensor], Tensor]


def scores_of(loss: Loss, output: Tensor, target: Any, labels: Labels, generator: torch.Generator) -> Scores:
    """Scores over the labels that are meant.

    Args:
        loss: the loss of (output, target).
        output: f of the whole batch.
        target: the labels of the data.
        labels: "model" for the expectation over the model's own, "sampled" for one of these drawn a sample, "true" for
            `target`; or a function (output, generator) → targets.
        generator: where draws come from.
    """
    if labels == "model":
        return model_scores(loss, output, target)
    if labels == "sampled":
        like = target if isinstance(target, Tensor) else None
        target = sample_targets(loss, output, generator=generator, like=like)
    elif callable(labels):
        target = cast(labels(output, generator), output.dtype)
    return label_scores(loss, output, target)


def model_scores(loss: Loss, output: Tensor, target: Any) -> Scores:
    """Scores in expectation over labels drawn from the model; positions whose true target says so have none.

    >>> from torch.nn.functional import cross_entropy
    >>> model_scores(cross_entropy, torch.zeros(1, 2), torch.tensor([0])).times(torch.tensor([[1.0, 0.0]]))
    tensor([[ 0.2500, -0.2500]])
    """
    q = distribution(loss, output)
    if q.family == "categorical":
        if output.dim() < 2:
            raise ConditioningError(f"the output has shape {list(output.shape)}; accepted is [samples, classes, ...].")
        if q.log_probabilities:
            total = probabilities(q, output).sum(1)
            if not torch.allclose(total, torch.ones_like(total), atol=1e-2):
                raise ConditioningError(
                    f"the loss takes log-probabilities, but exp(output) adds up to {total.flatten()[0]:.3g}: end the "
                    "model in log_softmax, or use the cross-entropy on its logits."
                )
    labelled = _labelled(q, output, target)
    predictions = labelled[:1].numel()
    samples = _some(int(labelled.reshape(len(output), -1).any(1).sum()) if len(output) else 0)
    share = {"sum": 1.0, "none": 1 / predictions, "mean": samples / max(1, int(labelled.sum()))}[q.reduction]
    each = share * labelled.to(output.dtype)
    return Scores(samples, lambda which: _factor(q, output[which], each[which]), partial(_times, q, output, each))


def label_scores(loss: Loss, output: Tensor, target: Any) -> Scores:
    """Scores for one label a sample, s_i = N ∂L/∂f_i with L the mean loss.

    >>> from torch.nn.functional import mse_loss
    >>> label_scores(mse_loss, torch.ones(2, 1), torch.tensor([[0.0], [-1.0]])).factor(slice(0, 2)).flatten()
    tensor([2., 4.])
    """
    samples, q = _some(len(output)), known(loss)
    rows = _scores(loss, output, target)
    if q is None:
        _refuse_mixing(loss, output, target, rows)
    elif q.family == "categorical" and output.dim() > 1:
        samples = int(_labelled(q, output, target).flatten(1).any(1).sum())
        if q.reduction == "mean":
            rows = rows * (samples / len(output))

    def times(t: Tensor) -> Tensor:
        inner = (rows * t).reshape(len(rows), -1).sum(1)
        return rows * inner.reshape(-1, *[1] * (t.dim() - 1))

    return Scores(_some(samples), lambda which: rows[which, None], times)


def _some(samples: int) -> int:
    if not samples:
        raise ConditioningError("no sample has a label: the batch is empty, or every target is the ignore_index.")
    return samples


def _labelled(q: Likelihood, output: Tensor, target: Any) -> Tensor:
    """Which predictions have a label: [N, 1, ...] for a categorical distribution, else of the output's shape."""
    if q.family != "categorical":
        return torch.ones_like(output, dtype=torch.bool)
    if isinstance(target, Tensor) and not target.is_floating_point() and target.shape == output[:, 0].shape:
        return target.ne(q.ignore_index).unsqueeze(1)
    return torch.ones_like(output[:, :1], dtype=torch.bool)


def mean_of(loss: Loss, output: Tensor, target: Any) -> Tensor:
    """L, the mean loss of a batch.

    >>> from torch.nn.functional import mse_loss
    >>> mean_of(mse_loss, torch.ones(2, 1), torch.zeros(2, 1))
    tensor(1.)
    """
    try:
        value = mean_loss(loss, output, target)[0]
    except ConditioningError:
        raise
    except Exception as error:
        raise ConditioningError(
            f"the loss failed with {type(error).__name__}: {error}. It is called as loss(output, target), the output "
            f"being {output.dtype}; dtype=None runs the network in its own dtype."
        ) from error
    if not bool(value.isfinite()):
        raise ConditioningError(f"the loss is {value.item()}: there is no curvature to speak of.")
    return value


def _scores(loss: Loss, output: Tensor, target: Any) -> Tensor:
    leaf = output.detach().requires_grad_()
    value = mean_of(loss, leaf, target)
    if not value.requires_grad:
        return torch.zeros_like(output)
    (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True, materialize_grads=True)
    return gradient.detach() * len(output)


def _refuse_mixing(loss: Loss, output: Tensor, target: Any, rows: Tensor) -> None:
    """Refuse a loss in which a sample's score depends on the others, but for a common factor such as Σ weights."""
    n = len(output)
    half = n // 2
    if not half or not isinstance(target, Tensor) or not target.dim() or len(target) != n:
        return
    alone = _scores(loss, output[:half], target[:half])
    among = rows[:half]
    scale = (alone * among).sum() / alone.square().sum().clamp_min(torch.finfo(alone.dtype).tiny)
    if not bool((alone * scale - among).norm() <= 1e-3 * among.norm()):
        raise ConditioningError(
            "the loss of a sample depends on the other samples of the batch, so that it has no gradients of samples; "
            'accepted is a mean, a sum or a list of losses of samples. top_eigenvalue(matrix="hessian" or '
            '"gauss_newton") takes any loss.'
        )


def _factor(q: Likelihood, output: Tensor, share: Tensor) -> Tensor:
    """All b_r of each sample: [n, r, ...]. A prediction has as many as classes, or one."""
    shape, n = output.shape, len(output)
    if q.family == "categorical":
        p = probabilities(q, output).flatten(2) if output.dim() > 2 else probabilities(q, output)[:, :, None]
        classes = p.shape[1]
        one = torch.eye(classes, dtype=p.dtype, device=p.device)[None, :, :, None]
        by_class = p.sqrt()[:, :, None] * (one if q.log_probabilities else one - p[:, None])  # [n, label, class, place]
        by_class = by_class * share.reshape(n, 1, 1, -1)
        rows = torch.diag_embed(by_class).permute(0, 3, 1, 2, 4)
    else:
        rows = torch.diag_embed(_deviation(q, output, share).reshape(n, -1))
    return rows.reshape(n, -1, *shape[1:]).to(output.dtype)


def _times(q: Likelihood, output: Tensor, share: Tensor, t: Tensor) -> Tensor:
    if q.family != "categorical":
        return (_deviation(q, output, share).square() * t).to(t.dtype)
    p = probabilities(q, output)
    mean = 0.0 if q.log_probabilities else (p * t).sum(class_dimension(output), keepdim=True)
    return (share.square() * p * (t - mean)).to(t.dtype)


def _deviation(q: Likelihood, output: Tensor, share: Tensor) -> Tensor:
    """√E(s²) of each element, for distributions whose elements are independent."""
    if q.family == "gaussian":
        return torch.full_like(output, q.variance**-0.5)
    p = probabilities(q, output)
    return share * (p * (1 - p)).sqrt()
