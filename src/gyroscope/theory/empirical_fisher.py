"""The true Fisher matrix, the empirical one, and the one of batches (section 2.1, equations 1, 2 and 4).

    F           = E_x E_{t ~ r(·|x)} [Dw Dwᵀ]                             targets drawn from the model         (1)
    F_emp       = E_{x,t} [∇J_{x,t} ∇J_{x,t}ᵀ]  = Cov(∇J_{x,t}) + ∇J ∇Jᵀ    targets of the data                  (2)
    F_emp^batch = E_B [∇J_B ∇J_Bᵀ]              = Cov(∇J_{x,t})/|B| + ∇J ∇Jᵀ                                     (4)

RMSprop and Adam estimate the diagonal of the third. It falls with the batch size, down to ∇J ∇Jᵀ, so that larger
batches mean larger steps at the same learning rate: by up to √(|B'|/|B|) if gradients are mostly noise, and not at
all if they have none. (Section 6 of the chapter states this the other way round by mistake.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.functional import embedding_bag

from gyroscope.base import accepted
from gyroscope.base.accepted import choice, whole
from gyroscope.errors import DynamicsError
from gyroscope.theory.domains import count, generator
from gyroscope.theory.per_sample import buffers, check_inputs, parts, passing, refuse_mixing

Likelihood = Literal["categorical", "gaussian"]

# Gradient elements held at a time: 256 MiB in float32, in addition to the result.
_HELD = 2**26
# Examples at a time if gradients are small: intermediate values, such as activations, take memory as well.
_TOGETHER = 64


def per_example_gradients(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    chunk: int | None = None,
) -> Tensor:
    """Return ∇J_{x,t} for every example, [N, P]: one row per example, parameters flattened in the model's order.

    Args:
        model: any module that treats samples independently (batch normalization in eval mode).
        loss: `loss(output, target)`; it is called with batches of one, so that a mean and a sum over the batch agree.
        inputs: [N, ...].
        targets: [N, ...].
        chunk: number of examples at once; by default as many as hold 2²⁶ numbers together, P each.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> x, t = torch.tensor([[1.0], [2.0]]), net(torch.tensor([[1.0], [2.0]])).detach() + 1
    >>> per_example_gradients(net, lambda z, t: 0.5 * (z - t).square().sum(), x, t)
    tensor([[-1.],
            [-2.]])
    """
    weights, others = _parts(model, inputs)
    if not isinstance(targets, Tensor) or targets.dim() < 1:
        given = (
            f"{targets.dtype} {tuple(targets.shape)}" if isinstance(targets, Tensor) else f"a {type(targets).__name__}"
        )
        raise DynamicsError(f"`targets` must be a tensor [N, ...] with one row per input, got {given}.")
    if len(inputs) != len(targets):
        raise DynamicsError(f"`inputs` and `targets` must have equal lengths, got {len(inputs)} and {len(targets)}.")

    def one(w: dict[str, Tensor], x: Tensor, t: Tensor) -> Tensor:
        return loss(functional_call(model, {**w, **others, **buffers(model)}, (x[None],)), t[None])

    size = sum(w.numel() for w in weights.values())
    at_once = _at_once(size, chunk)
    found: Tensor | None = None
    for start in range(0, len(inputs), at_once):
        part = slice(start, start + at_once)
        with passing():
            rows = vmap(grad(one), in_dims=(None, 0, 0))(weights, inputs[part], targets[part])
        together = torch.cat([rows[name].flatten(1) for name in weights], dim=1)
        found = together.new_empty(len(inputs), size) if found is None else found
        found[part] = together
    assert found is not None
    return found


def fisher_diagonal(
    model: nn.Module, inputs: Tensor, *, likelihood: Likelihood = "categorical", chunk: int | None = None
) -> Tensor:
    """Return the diagonal of the true Fisher matrix (equation 1), [P], with the expectation over targets taken exactly.

    Args:
        model: any module that treats samples independently, with outputs [N, C].
        inputs: [N, ...].
        likelihood: "categorical", r = softmax(z): Σ_c r_c (∂ log r_c)²; "gaussian", r = N(z, I): Σ_c (∂z_c)².
        chunk: number of examples at once; by default 64, or as few as hold 2²⁶ numbers together, C P each.

    >>> net = nn.Linear(1, 2, bias=False)
    >>> _ = nn.init.zeros_(net.weight)
    >>> fisher_diagonal(net, torch.tensor([[2.0]]))               # x² r(1 − r)
    tensor([1., 1.])
    """
    choice(likelihood, "likelihood", get_args(Likelihood), DynamicsError)
    weights, others = _parts(model, inputs)

    def one(w: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        z = functional_call(model, {**w, **others, **buffers(model)}, (x[None],))[0].flatten()
        scores = z.log_softmax(0) if likelihood == "categorical" else z
        return scores, scores.detach()

    with passing(undrawn=inputs.device), torch.no_grad():
        outputs = functional_call(model, {**weights, **others, **buffers(model)}, (inputs[:1],)).numel()
    at_once = _at_once(outputs * sum(w.numel() for w in weights.values()), chunk, most=_TOGETHER)
    total: Tensor | None = None
    for some in torch.split(inputs, at_once):
        with passing():
            rows, scores = vmap(jacrev(one, has_aux=True), in_dims=(None, 0))(weights, some)
        r = scores.exp() if likelihood == "categorical" else torch.ones_like(scores)
        part = torch.cat([torch.einsum("nc,ncp->p", r, rows[name].flatten(2).square()) for name in weights])
        total = part if total is None else total + part
    assert total is not None
    return total / len(inputs)


def second_moment(gradients: Tensor, *, batch_size: int = 1, replacement: bool = True, full: bool = False) -> Tensor:
    """Return the exact empirical Fisher matrix of batches (equations 2 and 4): its diagonal [P], or all of it.

    Args:
        gradients: gradients of the examples [N, P].
        batch_size: |B|; with 1 this is F_emp.
        replacement: whether a batch may contain an example twice, as in equation 4. Without replacement, as in an
            epoch, Cov/|B| is multiplied by (N − |B|)/(N − 1), and is zero for the full batch.
        full: return the matrix [P, P] instead of its diagonal.

    >>> g = torch.tensor([[1.0], [3.0]])                           # mean 2, variance 1
    >>> [second_moment(g, batch_size=b).item() for b in (1, 2, 4)]
    [5.0, 4.5, 4.25]
    >>> second_moment(g, batch_size=2, replacement=False).item()
    4.0
    """
    n, batch_size = _check(gradients, batch_size, replacement)
    mean = gradients.mean(0)
    centered = gradients - mean
    share = 1 / batch_size if replacement else (n - batch_size) / (max(1, n - 1) * batch_size)
    if full:
        return share * centered.T @ centered / n + torch.outer(mean, mean)
    return share * centered.square().mean(0) + mean.square()


def measured_second_moment(
    gradients: Tensor, *, batch_size: int, draws: int = 1000, replacement: bool = True, seed: int = 0
) -> Tensor:
    """Return the diagonal of F_emp^batch as an optimizer sees it: the mean of (∇J_B)² over random batches, [P].

    >>> g = torch.tensor([[1.0], [3.0]])
    >>> abs(measured_second_moment(g, batch_size=4, draws=20_000).item() - 4.25) < 0.05
    True
    """
    _, batch_size = _check(gradients, batch_size, replacement)
    draws = count("draws", draws, least=1)
    found = torch.zeros_like(gradients[0])
    for some in _batches(gradients.shape, batch_size, draws, replacement, seed):
        # gradients[some].mean(1), without copying the gradients of every batch.
        found += embedding_bag(some.to(gradients.device), gradients, mode="mean").square().sum(0)
    return found / draws


@dataclass(frozen=True, eq=False)
class BatchLaw:
    """Decrease of the second moment of batch gradients with the batch size.

    Attributes:
        batch_sizes: |B| [S].
        measured: trace of F_emp^batch over drawn batches [S].
        predicted: the same by equation 4 [S].
        exponent: exponent of |B| in the measured tr F_emp^batch − ‖∇J‖²; −1 by equation 4.
        noise: share of tr Cov/|B| in the predicted trace [S]: the part of F_emp^batch that resembles a Fisher matrix.
    """

    batch_sizes: npt.NDArray[np.int64]
    measured: npt.NDArray[np.float64]
    predicted: npt.NDArray[np.float64]
    exponent: float
    noise: npt.NDArray[np.float64]


def batch_law(gradients: Tensor, batch_sizes: Sequence[int], *, draws: int = 1000, seed: int = 0) -> BatchLaw:
    """Draw batches of several sizes and measure how the second moment of their gradients falls (equation 4).

    >>> g = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    >>> round(batch_law(g, [1, 4, 16, 64], draws=2000).exponent, 1)
    -1.0
    """
    if not isinstance(batch_sizes, Iterable) or any(whole(b, 1) is None for b in batch_sizes):
        raise DynamicsError(
            f"`batch_sizes` must be two or more whole numbers ≥ 1, got {batch_sizes!r:.80}. Try [1, 4, 16]."
        )
    sizes = [index(b) for b in batch_sizes]
    if len(sizes) < 2 or len(set(sizes)) != len(sizes):
        raise DynamicsError(f"`batch_sizes` must be at least two different numbers, got {sizes}. Try [1, 4, 16].")
    _check(gradients, 1, True)
    first = accepted.seed(seed, DynamicsError)
    g = gradients.double()
    measured = np.array(
        [
            float(measured_second_moment(g, batch_size=b, draws=draws, seed=(first + i) % 2**64).sum())
            for i, b in enumerate(sizes)
        ]
    )
    predicted = np.array([float(second_moment(g, batch_size=b).sum()) for b in sizes])
    signal = float(g.mean(0).square().sum())
    if predicted.max() - signal <= 1e-12 * signal:
        raise DynamicsError(
            "`gradients` must differ between examples, got the same gradient for all: there is no noise to measure."
        )
    falls = np.maximum(measured - signal, np.finfo(float).tiny)
    exponent = float(np.polyfit(np.log(sizes), np.log(falls), 1)[0])
    return BatchLaw(np.array(sizes), measured, predicted, exponent, (predicted - signal) / predicted)


@dataclass(frozen=True, eq=False)
class StepGain:
    """Growth of steps with the batch size, at the same learning rate and gradient.

    Attributes:
        each: √(diag F_B / diag F_B'), per element [P]; NaN where no example has a gradient.
        median: median of `each`.
        most: √(|B'|/|B|), for elements whose gradients are pure noise.
    """

    each: Tensor
    median: float
    most: float


def step_gain(gradients: Tensor, batch_size: int, larger: int) -> StepGain:
    """Return the factor by which RMSprop's and Adam's steps grow when batches grow from |B| to |B'|.

    A step is divided by √(Cov/|B| + (∇J)²). SGD's steps have the same mean whatever the batch size.

    Args:
        gradients: gradients of the examples [N, P].
        batch_size: |B|.
        larger: |B'|.

    >>> g = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])                # noise alone, and no noise
    >>> step_gain(g, 16, 64).each
    tensor([2., 1.])
    """
    small, large = whole(batch_size, 1), whole(larger, 1)
    if small is None or large is None or small > large:
        raise DynamicsError(
            f"`batch_size` and `larger` must be whole numbers ≥ 1 with `batch_size` ≤ `larger`, got {batch_size!r} "
            f"and {larger!r}."
        )
    before, after = (second_moment(gradients, batch_size=b) for b in (small, large))
    each = (before / after).sqrt()
    return StepGain(each, float(each.nanmedian()), (large / small) ** 0.5)


def _parts(model: nn.Module, inputs: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters that gradients are taken with respect to, and the other parameters."""
    weights, others = parts(model)
    if not weights:
        raise DynamicsError("No parameter of `model` requires a gradient. Call requires_grad_() on some.")
    refuse_mixing(model, "Per-example gradients")
    check_inputs(inputs)
    return weights, others


def _at_once(numbers: int, chunk: int | None = None, *, most: int = _HELD) -> int:
    """Return the number of examples at once, if each takes `numbers` elements; `chunk` if given."""
    if chunk is None:
        return min(most, max(1, _HELD // numbers))
    return count("chunk", chunk, least=1)


def _batches(shape: Sequence[int], size: int, draws: int, replacement: bool, seed: int) -> Iterator[Tensor]:
    """Yield indices of batches [some, size], few enough that they and their gradients [some, P] fit in memory."""
    drawn = generator(seed)
    n, parameters = shape
    at_once = _at_once(max(parameters, size if replacement else n))
    for start in range(0, draws, at_once):
        some = min(at_once, draws - start)
        if replacement:
            yield torch.randint(0, n, (some, size), generator=drawn)
        else:
            yield torch.rand(some, n, generator=drawn).argsort(1)[:, :size]


def _check(gradients: Tensor, batch_size: int, replacement: bool) -> tuple[int, int]:
    """Return the number of examples and the batch size."""
    if not isinstance(gradients, Tensor) or gradients.dim() != 2 or not len(gradients):
        given = tuple(gradients.shape) if isinstance(gradients, Tensor) else f"a {type(gradients).__name__}"
        raise DynamicsError(f"`gradients` must be a tensor [examples, parameters], got {given}.")
    size = whole(batch_size, 1)
    if size is None or (not replacement and size > len(gradients)):
        most = "" if replacement else f" and ≤ {len(gradients)}, the number of examples"
        raise DynamicsError(f"`batch_size` must be a whole number ≥ 1{most}, got {batch_size!r:.80}.")
    return len(gradients), size
