"""The distribution q(y|x) of labels that a loss is the negative log-likelihood of, and labels drawn from it.

The Fisher matrix F = E_{p(x), q(y|x)}(∇ℓ ∇ℓᵀ) (section 2) averages over labels drawn from the model. With f the output,

    cross-entropy, NLL     q = softmax(f), or exp(f)       one categorical label per position
    BCE with logits        q = sigmoid(f)                  one Bernoulli label per element
    squared error          y ~ N(f, σ²I), 1/(2σ²) = a      with ℓ = a‖y − f‖²

a is 1 for reduction="sum" and 1/D for "mean" and "none", D the elements of one sample's output: σ² is 1/2 or D/2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from gyroscope.errors import ConditioningError
from gyroscope.vectors.eager import accumulator

Loss = Callable[..., Tensor]

# Probabilities are held for this many elements at a time: a vocabulary times all tokens in float64 would not fit.
_PIECE = 1 << 22


@dataclass(frozen=True)
class Likelihood:
    """The distribution of one sample's labels given its output, as far as the loss determines it.

    Attributes:
        family: "categorical", "bernoulli" or "gaussian".
        reduction: the reduction over the predictions of a batch: "mean", "sum" or "none".
        log_probabilities: True if the output holds log q instead of logits.
        ignore_index: the target that marks a position without a label.
        variance: σ² of a Gaussian.

    >>> distribution(F.mse_loss, torch.zeros(8, 6)).variance
    3.0
    """

    family: Literal["categorical", "bernoulli", "gaussian"]
    reduction: Literal["mean", "sum", "none"]
    log_probabilities: bool = False
    ignore_index: int = -100
    variance: float = 0.0


def distribution(loss: Loss, output: Tensor) -> Likelihood:
    """Return the distribution whose negative log-likelihood `loss` is for `output`, up to a constant.

    A loss with class weights or label smoothing has none, because Σ_y exp(−ℓ(y)) then depends on the output.

    Args:
        loss: cross-entropy, NLL, BCE with logits or squared error, as a function of `torch.nn.functional`, a module of
            `torch.nn`, or a `functools.partial` of one with keyword arguments.
        output: the model's output for a batch: [N, classes, ...] or [classes] for a categorical distribution, else
            [N, ...].

    Raises:
        ConditioningError: the loss is another one, or has no likelihood.

    >>> distribution(nn.CrossEntropyLoss(reduction="sum"), torch.zeros(8, 10))
    Likelihood(family='categorical', reduction='sum', log_probabilities=False, ignore_index=-100, variance=0.0)
    """
    q = known(loss)
    settings = _settings(loss)[1]
    if q is None:
        _refuse(loss, "is not known as the negative log-likelihood of a distribution over labels")
    for name in ("weight", "pos_weight"):
        if settings.get(name) is not None:
            _refuse(loss, f"has `{name}`, and a weighted log-likelihood is not a log-likelihood")
    if settings.get("label_smoothing", 0.0) != 0.0:
        _refuse(loss, f"has label_smoothing={settings['label_smoothing']}, with which exp(−ℓ) does not sum to 1")
    if q.family == "gaussian":
        return replace(q, variance=(1 if q.reduction == "sum" or not output.dim() else output[:1].numel()) / 2)
    if q.family == "categorical" and not output.dim():
        raise ConditioningError("The output must have shape [N, classes, ...] for this loss, got a single number.")
    return q


def known(loss: Loss) -> Likelihood | None:
    """Return the likelihood of a known loss, even if weights or smoothing keep it from being one; else None.

    >>> known(nn.NLLLoss(weight=torch.ones(3)))
    Likelihood(family='categorical', reduction='mean', log_probabilities=True, ignore_index=-100, variance=0.0)
    >>> known(F.l1_loss) is None
    True
    """
    base, settings = _settings(loss)
    reduction = settings.get("reduction", "mean")
    if base is None or reduction not in ("mean", "sum", "none"):
        return None
    if base is F.mse_loss:
        return Likelihood("gaussian", reduction)
    if base is F.binary_cross_entropy_with_logits:
        return Likelihood("bernoulli", reduction)
    return Likelihood("categorical", reduction, base is F.nll_loss, settings.get("ignore_index", -100))


def labeled(loss: Loss, target: Any, n: int) -> float:
    """Return the sum of the weights that a batch of `n` samples has in the mean of its loss.

    A sample has weight 1. In torch's cross-entropy and NLL loss, a sample without a label (`ignore_index`) has weight
    0, and any other the weight of its class if the loss has a `weight`: the mean is Σ w_y ℓ / Σ w_y.

    >>> labeled(F.cross_entropy, torch.tensor([0, -100, 1]), 3)
    2.0
    >>> labeled(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0])), torch.tensor([0, -100, 1]), 3)
    5.0
    """
    q = known(loss)
    classes = isinstance(target, Tensor) and not target.is_floating_point()
    if q is None or q.family != "categorical" or q.reduction != "mean" or not classes:
        return float(n)
    labels = target[target.ne(q.ignore_index)]
    weight = _settings(loss)[1].get("weight")
    if weight is None:
        return float(labels.numel())
    return float(weight.detach().to(labels.device, accumulator(labels.device))[labels.long()].sum())


def sample_targets(loss: Loss, output: Tensor, *, generator: torch.Generator, like: Tensor | None = None) -> Tensor:
    """Return targets drawn from the model's own distribution, in the form that `loss(output, targets)` takes.

    Args:
        loss: a loss that `distribution` knows.
        output: the model's output.
        generator: the generator to draw with, on any device; the global random state is not used.
        like: the true targets, whose dtype and form are used (class indices, or probabilities of shape [N, classes,
            ...], which become one-hot). Positions with the loss's ignore_index stay ignored.

    >>> generator = torch.Generator().manual_seed(0)
    >>> sample_targets(F.cross_entropy, torch.tensor([[0.0, 50.0], [50.0, 0.0]]), generator=generator)
    tensor([1, 0])
    """
    q = distribution(loss, output)
    output = output.detach()
    if q.family == "categorical":
        return _categorical(q, output, generator, like)
    if like is not None and like.shape != output.shape:
        raise ConditioningError(
            f"The targets must have the shape of the output, {list(output.shape)}, got {list(like.shape)}."
        )
    kind = like.dtype if like is not None and like.is_floating_point() else output.dtype
    if q.family == "bernoulli":
        return (_uniform(output.shape, generator, output.device) < probabilities(q, output)).to(kind)
    noise = torch.randn(output.shape, generator=generator, device=generator.device, dtype=accumulator(generator.device))
    exact = accumulator(output.device)
    drawn: Tensor = output.to(exact) + q.variance**0.5 * noise.to(output.device, exact)
    return drawn.to(kind)


def probabilities(q: Likelihood, output: Tensor) -> Tensor:
    """Return q(y|x) of each class along the class dimension, or of the label 1 at each element, in float64.

    >>> probabilities(Likelihood("bernoulli", "mean"), torch.zeros(2)).tolist()
    [0.5, 0.5]
    """
    output = output.to(accumulator(output.device))
    if q.family == "bernoulli":
        return output.sigmoid()
    return output.exp() if q.log_probabilities else output.softmax(class_dimension(output))


def class_dimension(output: Tensor) -> int:
    """Return the dimension of the classes in a categorical output: 1 in [N, classes, ...], 0 in [classes].

    >>> class_dimension(torch.zeros(8, 10, 5, 5))
    1
    """
    return min(1, output.dim() - 1)


def _categorical(q: Likelihood, output: Tensor, generator: torch.Generator, like: Tensor | None) -> Tensor:
    dim = class_dimension(output)
    soft = like is not None and like.is_floating_point()
    shape = output.shape[:dim] + output.shape[dim + 1 :]
    expected = output.shape if soft else shape
    if like is not None and like.shape != expected:
        raise ConditioningError(
            f"The targets must have shape {list(shape)} (class indices) or {list(output.shape)} (class probabilities), "
            f"got {list(like.shape)}."
        )
    rows = output.movedim(dim, -1).reshape(-1, output.shape[dim])
    u = _uniform(torch.Size([len(rows), 1]), generator, output.device)
    size = max(1, _PIECE // rows.shape[1])
    pieces = zip(torch.split(rows, size), torch.split(u, size), strict=True)
    drawn = [_inverse(probabilities(q, row), v) for row, v in pieces]
    labels = torch.cat(drawn).reshape(shape) if drawn else torch.empty(shape, dtype=torch.int64, device=output.device)
    if like is None:
        return labels
    if soft:
        return F.one_hot(labels, output.shape[dim]).movedim(-1, dim).to(like.dtype)
    return torch.where(like.eq(q.ignore_index), like, labels.to(like.dtype))


def _inverse(p: Tensor, u: Tensor) -> Tensor:
    """Return the first class in each row at which the distribution function exceeds u."""
    below = p.cumsum(1)
    # At most the last class, also for a row that is not finite: an index out of range would stop a GPU.
    return torch.searchsorted(below, u * below[:, -1:], right=True).clamp_(max=p.shape[1] - 1)[:, 0]


def _uniform(shape: torch.Size, generator: torch.Generator, device: torch.device) -> Tensor:
    drawn = torch.rand(shape, generator=generator, device=generator.device, dtype=accumulator(generator.device))
    return drawn.to(device, accumulator(device))


_MODULES: dict[type[nn.Module], Loss] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.MSELoss: F.mse_loss,
}
_SETTINGS = ("reduction", "weight", "pos_weight", "ignore_index", "label_smoothing")


def _settings(loss: Loss) -> tuple[Loss | None, dict[str, Any]]:
    """Return the function of `torch.nn.functional` behind a loss, or None, and its keyword arguments."""
    settings: dict[str, Any] = {}
    while isinstance(loss, functools.partial) and not loss.args:
        settings, loss = {**loss.keywords, **settings}, loss.func
    if any(loss is known for known in _MODULES.values()):
        return (loss if settings.keys() <= set(_SETTINGS) else None), settings
    for module, function in _MODULES.items():
        # A subclass that computes something else is another loss.
        if isinstance(loss, module) and type(loss).forward is module.forward and not settings:
            return function, {name: getattr(loss, name) for name in _SETTINGS if hasattr(loss, name)}
    return None, settings


def _refuse(loss: Loss, why: str) -> NoReturn:
    while isinstance(loss, functools.partial):
        loss = loss.func
    name = getattr(loss, "__name__", type(loss).__name__)
    known = ", ".join(f"{f.__name__} ({m.__name__})" for m, f in _MODULES.items())
    raise ConditioningError(
        f"The loss {name} {why}, so labels cannot be drawn from the model. Use one of {known} without class weights or "
        "label smoothing, pass labels= a function (output, generator) -> targets that draws them, or use the true "
        "labels."
    )
