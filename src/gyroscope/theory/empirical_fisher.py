"""The true Fisher matrix, the empirical one, and the one that batches give (section 2.1, equations 1, 2 and 4).

    F           = E_x E_{t ~ r(·|x)} [Dw Dwᵀ]                             targets drawn from the model         (1)
    F_emp       = E_{x,t} [∇J_{x,t} ∇J_{x,t}ᵀ]  = Cov(∇J_{x,t}) + ∇J ∇Jᵀ    targets of the data                  (2)
    F_emp^batch = E_B [∇J_B ∇J_Bᵀ]              = Cov(∇J_{x,t})/|B| + ∇J ∇Jᵀ                                     (4)

RMSprop and Adam estimate the diagonal of the third. It falls with the batch size, down to ∇J ∇Jᵀ, so that larger
batches mean larger steps at the same learning rate: by up to √(|B'|/|B|) where gradients are mostly noise, not at all
where they are not. (Section 6 of the chapter states this the other way round by mistake.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.functional import embedding_bag

from gyroscope.base import accepted
from gyroscope.base.accepted import whole
from gyroscope.errors import DynamicsError
from gyroscope.theory.domains import count, generator
from gyroscope.theory.per_sample import buffers, check_inputs, parts, passing, refuse_mixing

Likelihood = Literal["categorical", "gaussian"]

# Numbers of gradients held at a time: 256 MiB in float32, beside what is returned.
_HELD = 2**26
# Examples at a time where gradients are few: what is held of them in between, such as activations, grows too.
_TOGETHER = 64


def per_example_gradients(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    chunk: int | None = None,
) -> Tensor:
    """∇J_{x,t} for every example, [N, P]: a row an example, the parameters flattened in the order of the model's.

    Args:
        model: any module that treats samples one by one (batch normalization in eval mode).
        loss: `loss(output, target)`; it is given batches of one, so that a mean over the batch and a sum are the same.
        inputs: [N, ...].
        targets: [N, ...].
        chunk: how many examples at once; unless given as many as hold 2²⁶ numbers together, P each.

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
        raise DynamicsError(f"The targets are {given}; accepted is a tensor [N, ...], one row an input.")
    if len(inputs) != len(targets):
        raise DynamicsError(f"{len(inputs)} inputs and {len(targets)} targets; accepted is one target an input.")

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
    """The diagonal of the true Fisher matrix (equation 1), [P], with the expectation over targets taken exactly.

    Args:
        model: any module that treats samples one by one, with outputs [N, C].
        inputs: [N, ...].
        likelihood: "categorical", r = softmax(z): Σ_c r_c (∂ log r_c)²; "gaussian", r = N(z, I): Σ_c (∂z_c)².
        chunk: how many examples at once; unless given 64, or as few as hold 2²⁶ numbers together, C P each.

    >>> net = nn.Linear(1, 2, bias=False)
    >>> _ = nn.init.zeros_(net.weight)
    >>> fisher_diagonal(net, torch.tensor([[2.0]]))               # x² r(1 − r)
    tensor([1., 1.])
    """
    if likelihood not in ("categorical", "gaussian"):
        raise DynamicsError(f"likelihood is {likelihood!r}; accepted are 'categorical' and 'gaussian'.")
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
    """The empirical Fisher matrix of batches of a size (equations 2 and 4), exactly: its diagonal [P], or all of it.

    Args:
        gradients: of the examples [N, P].
        batch_size: |B|; with 1 this is F_emp.
        replacement: whether an example may come twice in a batch, as in equation 4. Without, as in an epoch, Cov/|B| is
            multiplied by (N − |B|)/(N − 1), and is zero for the full batch.
        full: the matrix [P, P] instead of its diagonal.

    >>> g = torch.tensor([[1.0], [3.0]])                           # mean 2, variance 1
    >>> [second_moment(g, batch_size=b).item() for b in (1, 2, 4)]
    [5.0, 4.5, 4.25]
    >>> second_moment(g, batch_size=2, replacement=False).item()
    4.0
    """
    n, batch_size = _check(gradients, batch_size, replacement)
    mean = gradients.mean(0)
    centred = gradients - mean
    share = 1 / batch_size if replacement else (n - batch_size) / (max(1, n - 1) * batch_size)
    if full:
        return share * centred.T @ centred / n + torch.outer(mean, mean)
    return share * centred.square().mean(0) + mean.square()


def measured_second_moment(
    gradients: Tensor, *, batch_size: int, draws: int = 1000, replacement: bool = True, seed: int = 0
) -> Tensor:
    """The diagonal of F_emp^batch as an optimizer meets it: the mean of (∇J_B)² over batches drawn at random, [P].

    >>> g = torch.tensor([[1.0], [3.0]])
    >>> abs(measured_second_moment(g, batch_size=4, draws=20_000).item() - 4.25) < 0.05
    True
    """
    _, batch_size = _check(gradients, batch_size, replacement)
    draws = count("draws", draws, least=1)
    found = torch.zeros_like(gradients[0])
    for some in _batches(gradients.shape, batch_size, draws, replacement, seed):
        # As gradients[some].mean(1), without a copy of the gradients of every batch.
        found += embedding_bag(some.to(gradients.device), gradients, mode="mean").square().sum(0)
    return found / draws


@dataclass(frozen=True, eq=False)
class BatchLaw:
    """How the second moment of batch gradients falls with the batch size.

    Attributes:
        batch_sizes: |B| [S].
        measured: the trace of F_emp^batch over drawn batches [S].
        predicted: by equation 4 [S].
        exponent: of |B| in the measured tr F_emp^batch − ‖∇J‖²; −1 by equation 4.
        noise: the share of tr Cov/|B| in the predicted trace [S]: what of F_emp^batch is like a Fisher matrix at all.
    """

    batch_sizes: npt.NDArray[np.int64]
    measured: npt.NDArray[np.float64]
    predicted: npt.NDArray[np.float64]
    exponent: float
    noise: npt.NDArray[np.float64]


def batch_law(gradients: Tensor, batch_sizes: Sequence[int], *, draws: int = 1000, seed: int = 0) -> BatchLaw:
    """Draw batches of several sizes, and see how the second moment of their gradients falls (equation 4).

    >>> g = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    >>> round(batch_law(g, [1, 4, 16, 64], draws=2000).exponent, 1)
    -1.0
    """
    if not isinstance(batch_sizes, Iterable) or any(whole(b, 1) is None for b in batch_sizes):
        raise DynamicsError(f"batch_sizes is {batch_sizes!r}; accepted are two or more whole numbers from 1.")
    sizes = [index(b) for b in batch_sizes]
    if len(sizes) < 2 or len(set(sizes)) != len(sizes):
        raise DynamicsError(f"batch_sizes is {sizes}; at least two different ones are needed.")
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
        raise DynamicsError("The law does not apply because the gradients of all examples are the same: no noise.")
    falls = np.maximum(measured - signal, np.finfo(float).tiny)
    exponent = float(np.polyfit(np.log(sizes), np.log(falls), 1)[0])
    return BatchLaw(np.array(sizes), measured, predicted, exponent, (predicted - signal) / predicted)


@dataclass(frozen=True, eq=False)
class StepGain:
    """By how much steps grow with the batch size, at the same learning rate and gradient.

    Attributes:
        each: √(diag F_B / diag F_B'), element by element [P]; NaN where no example has a gradient.
        median: of those.
        most: √(|B'|/|B|), for elements whose gradients are noise alone.
    """

    each: Tensor
    median: float
    most: float


def step_gain(gradients: Tensor, batch_size: int, larger: int) -> StepGain:
    """By how much RMSprop's and Adam's steps grow when batches grow from |B| to |B'|.

    What divides a step is √(Cov/|B| + (∇J)²). SGD's steps have the same mean whatever the batch size.

    Args:
        gradients: of the examples [N, P].
        batch_size: |B|.
        larger: |B'|.

    >>> g = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])                # noise alone, and no noise
    >>> step_gain(g, 16, 64).each
    tensor([2., 1.])
    """
    small, large = whole(batch_size, 1), whole(larger, 1)
    if small is None or large is None or small > large:
        raise DynamicsError(
            f"batch_size is {batch_size!r} and larger {larger!r}; accepted are whole numbers from 1: give the smaller "
            "one first."
        )
    before, after = (second_moment(gradients, batch_size=b) for b in (small, large))
    each = (before / after).sqrt()
    return StepGain(each, float(each.nanmedian()), (large / small) ** 0.5)


def _parts(model: nn.Module, inputs: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What gradients are taken by, and the other parameters."""
    weights, others = parts(model)
    if not weights:
        raise DynamicsError("No parameter requires a gradient.")
    refuse_mixing(model, "Gradients of single examples do")
    check_inputs(inputs)
    return weights, others


def _at_once(numbers: int, chunk: int | None = None, *, most: int = _HELD) -> int:
    """How many examples at once, where each takes so many numbers; as many as were asked for, if any were."""
    if chunk is None:
        return min(most, max(1, _HELD // numbers))
    return count("chunk", chunk, least=1)


def _batches(shape: Sequence[int], size: int, draws: int, replacement: bool, seed: int) -> Iterator[Tensor]:
    """Indices of batches [some, size], so many at a time that they fit, and so do their gradients [some, P]."""
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
    """How many examples there are, and how many in a batch."""
    if not isinstance(gradients, Tensor) or gradients.dim() != 2 or not len(gradients):
        given = tuple(gradients.shape) if isinstance(gradients, Tensor) else f"a {type(gradients).__name__}"
        raise DynamicsError(f"gradients is {given}; accepted is [examples, parameters].")
    size = whole(batch_size, 1)
    if size is None or (not replacement and size > len(gradients)):
        most = "" if replacement else f" to {len(gradients)}, the number of examples"
        raise DynamicsError(f"batch_size is {batch_size!r}; accepted are numbers from 1{most}.")
    return len(gradients), size
