"""The exact Fisher matrix F of a small network, its second-moment matrix M, and their blocks, one per layer.

    F = (1/N) Σ_i E_{y ~ q(y|x_i)} ∇ℓ_i ∇ℓ_iᵀ        M = (1/N) Σ_i ∇ℓ_i ∇ℓ_iᵀ with the labels of the data

(section 2 of Huang et al., 2020), over θ, the weights and biases that require gradients (`parameters`). ℓ_i is the loss
of sample i, defined so that the mean loss is L = (1/N) Σ_i ℓ_i. `gyroscope.condition` approximates the blocks by
Σx ⊗ Σ∇h, for networks of any size.

With J the Jacobian of the output f of a sample and s = ∂ℓ/∂f its score, ∇ℓ = Jᵀs, so that every matrix of second
moments is

    (1/N) Σ_i J_iᵀ E(s sᵀ) J_i,     E(s sᵀ) = Σ_r b_r b_rᵀ.

`scores_of` gives the rows b_r: a single one for a known or drawn label. The expectation over the model's own labels has
a closed form, with c the share of a prediction in ℓ:

    categorical   E(s sᵀ) = c² (diag q − q qᵀ) = Σ_k c² q_k (q − e_k)(q − e_k)ᵀ      (c² diag q for log-probabilities)
    Bernoulli     E(s sᵀ) = c² q (1 − q)
    Gaussian      E(s sᵀ) = I / σ²

`gradient_rows` pulls the rows b_r back through the network, to the rows Jᵀb_r of a factor G of the matrix. `Moments`
holds GᵀG/N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import vjp, vmap
from torch.nn.parameter import is_lazy

from gyroscope.base.accepted import flag, real
from gyroscope.conditioning.eigen import eigenvalues
from gyroscope.conditioning.spectra import Spectrum
from gyroscope.errors import ConditioningError, GyroscopeError, LayerError
from gyroscope.layers.class_names import ancestry, unwrapped
from gyroscope.layers.layer import layers
from gyroscope.passes.batches import batches
from gyroscope.passes.likelihood import (
    Likelihood,
    Loss,
    class_dimension,
    distribution,
    known,
    probabilities,
    sample_targets,
)
from gyroscope.passes.losses import mean_loss
from gyroscope.passes.network import (
    Network,
    batched,
    borrowed,
    cast,
    cast_loss,
    check_run,
    first_output,
    independent,
    network,
)
from gyroscope.vectors.eager import accumulator

__all__ = ["Exact", "fisher", "gradient_rows", "parameters", "scores_of"]

Labels = Literal["model", "sampled", "true"] | Callable[[Tensor, torch.Generator], Any]

# Elements held at a time: of gradient rows, and of the activations that they are propagated through.
_ROWS = 1 << 23
_ACTIVATIONS = 1 << 25

Rows = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Exact:
    """An exact matrix of second moments of gradients, or its blocks.

    Attributes:
        parameters: names of the parameters; a layer's weight has the layer's name.
        sizes: the number of elements of each; P is their sum.
        layers: the parameters that are the weight of a layer.
        samples: N, without samples that have no label (`ignore_index` everywhere).
        epsilon: machine epsilon of the dtype the network was run in.
        moments: the whole matrix under None, or the blocks under the names of their layers.

    >>> from torch.nn.functional import cross_entropy
    >>> net = nn.Linear(2, 3)
    >>> exact = fisher(net, cross_entropy, (torch.eye(2), torch.tensor([0, 1])))
    >>> exact.parameters, exact.sizes, exact.samples, tuple(exact.matrix.shape)
    (('weight', 'bias'), (6, 3), 2, (9, 9))
    """

    parameters: tuple[str, ...]
    sizes: tuple[int, ...]
    layers: tuple[str, ...]
    samples: int
    epsilon: float = field(repr=False)
    moments: dict[str | None, Moments] = field(repr=False)

    @property
    def matrix(self) -> Tensor | None:
        """The matrix [P, P] in float64; None if only the blocks were asked for.

        Rows and columns are in the order of `parameters`, each flattened as it is stored: W of a linear layer row by
        row, so that one sample's block is gᵀg ⊗ xᵀx.
        """
        return self.moments[None].matrix if None in self.moments else None

    @property
    def slices(self) -> dict[str, slice]:
        """Slice of the matrix's rows and columns for each parameter, by name."""
        ends = accumulate(self.sizes)
        return {n: slice(end - size, end) for n, size, end in zip(self.parameters, self.sizes, ends, strict=True)}

    @property
    def blocks(self) -> dict[str, Tensor]:
        """Block [size, size] of each layer's weight."""
        return {layer: self.block(layer) for layer in self.layers}

    def block(self, layer: str) -> Tensor:
        """Return the block F_k of one layer's weight."""
        return self._moments(layer).matrix

    def spectrum(self, layer: str | None = None) -> Spectrum:
        """Return the eigenvalues of the whole matrix, or of the block of one layer."""
        moments = self._moments(layer)
        return moments.spectrum(tolerance=max(moments.dimension * 2.0**-52, (4 * self.epsilon) ** 2))

    def _moments(self, layer: str | None) -> Moments:
        if layer in self.moments:
            return self.moments[layer]
        if layer is None:
            raise ConditioningError("Only the blocks were formed. Pass `layer`, or call fisher without blocks=True.")
        if layer not in self.layers:
            raise ConditioningError(
                f"`layer` must be the name of a layer, got {layer!r}. There are {', '.join(self.layers) or 'none'}."
            )
        return self.moments[None].part(self.slices[layer])


def fisher(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    labels: Labels = "model",
    blocks: bool = False,
    layers: str | Iterable[str] | None = None,
    limit: int = 20_000,
    seed: int = 0,
    dtype: torch.dtype | None = torch.float64,
) -> Exact:
    """Form the exact Fisher matrix F of a network, or its second-moment matrix M.

    The expectation over labels is exact: for the cross-entropy F = (1/N) Σ_i J_iᵀ (diag q_i − q_i q_iᵀ) J_i with J_i
    the Jacobian of the logits. If ℓ is the negative log-likelihood of q, F is also the Gauss-Newton matrix. This holds
    for all losses of one prediction per sample, for squared errors, and for sums. If a mean is taken over D labels of a
    sample (pixels, tokens, several Bernoulli labels), ℓ is 1/D of it and F is 1/D of Gauss-Newton.

    The network is run in its current mode. With batch statistics (batch normalization in training mode) ℓ_i depends on
    the whole batch, and ∇ℓ_i is row i of the Jacobian of all N losses, which takes N times the work. A network that
    draws random numbers, such as dropout in training mode, is rejected. The model is left as it was.

    Args:
        model: any module whose output is one tensor [N, ...].
        loss: `loss(output, target)`: a mean over the batch, a sum, or one value per sample; all give the same matrix
            for one prediction per sample. Class weights count in M.
        batch: (inputs, targets), or an iterable of these; inputs are a tensor, a tuple of positional arguments or a
            dict of keyword arguments. Tensors whose leading dimension is N are split into samples.
        labels: "model" for F; "sampled" for F with one label per sample drawn from the model; "true" for M; or a
            function (output, generator) → targets that draws them. `gyroscope.passes.likelihood` lists the losses whose
            distribution is known.
        blocks: form only the blocks of the layers' weights, never the whole matrix.
        layers: glob patterns on the names of layers; the matrix is over the weights of these alone.
        limit: the largest number of parameters of a matrix.
        seed: the seed of the generator that draws labels.
        dtype: the dtype that the network is run in: float64, so that small eigenvalues are not rounding errors, or None
            for its own. Second moments are accumulated in float64 either way.

    Raises:
        ConditioningError: there are more parameters than `limit`, the loss has no likelihood, or the network is random;
            raised before any work is done.

    Example:
        Softmax regression at W = 0 has F = E(xxᵀ) ⊗ S with S = (I − 11ᵀ/c)/c (equation 2).

        >>> from torch.nn.functional import cross_entropy
        >>> net = nn.Linear(2, 3, bias=False)
        >>> _ = nn.init.zeros_(net.weight)
        >>> x = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> F = fisher(net, cross_entropy, (x, torch.tensor([0, 1])))
        >>> F.spectrum().values.round(4)
        array([0.3333, 0.3333, 0.3333, 0.3333, 0.    , 0.    ])
    """
    seed, blocks = check_run(loss, dtype, seed), flag(blocks, "blocks", ConditioningError)
    if not callable(labels) and not (isinstance(labels, str) and labels in ("model", "sampled", "true")):
        raise ConditioningError(
            f"`labels` must be 'model', 'sampled', 'true' or a function (output, generator) → targets, got {labels!r}."
        )
    most = real(limit)
    if not most > 0:
        raise ConditioningError(f"`limit` must be a number of parameters > 0, got {limit!r}. Try 20_000.")
    chosen = parameters(model, only=layers, weights=blocks)
    _refuse_large(chosen, blocks, most)
    device = next(p.device for name, p in chosen.model.named_parameters() if name in chosen.names)
    generator = torch.Generator(device).manual_seed(seed)
    # Gradients from a device without float64 are accumulated on the host.
    held = device if accumulator(device) is torch.float64 else torch.device("cpu")
    sizes = dict(zip(chosen.names, chosen.sizes, strict=True)) if blocks else {None: sum(chosen.sizes)}
    sums = {name: Sum(size, held) for name, size in sizes.items()}
    samples = 0
    with borrowed(chosen.model):
        own = cast_loss(loss, dtype)
        for one in batches(batch, device):
            f = network(chosen.model, chosen.names, one, dtype)
            output = first_output(f)
            scores = scores_of(own, output, f.batch.target, labels, generator)
            samples += scores.samples
            for rows in gradient_rows(f, output, scores):
                for name, total in sums.items():
                    total.add(torch.cat([row.to(held) for row in rows.values()], dim=1) if name is None else rows[name])
    names = tuple(chosen.names.values())
    moments = {None if name is None else chosen.names[name]: total.mean(samples) for name, total in sums.items()}
    return Exact(names, chosen.sizes, chosen.weights, samples, torch.finfo(output.dtype).eps, moments)


def _refuse_large(chosen: Parameters, blocks: bool, limit: float) -> None:
    sizes = dict(zip(chosen.names.values(), chosen.sizes, strict=True)) if blocks else {"": sum(chosen.sizes)}
    name, most = max(sizes.items(), key=lambda item: item[1])
    if most > limit:
        which = f"The block of {name!r}" if blocks else "The matrix"
        smaller = "" if blocks else "blocks=True for one matrix per layer, "
        raise ConditioningError(
            f"{which} is over {most:,} parameters, above the limit of {limit:,.15g}: it would take "
            f"{8 * most**2 / 1e9:,.1f} GB. Use gyroscope.condition for the spectra of all layers at any size, "
            f"top_eigenvalue for λmax alone, {smaller}`layers` for some of the layers, or raise `limit`."
        )


@dataclass(frozen=True)
class Parameters:
    """The parameters of a matrix, in order.

    Attributes:
        model: the module they are in, without wrappers that would communicate or compile.
        names: the names to show, by their name in `named_parameters`; a layer's weight has the layer's name.
        sizes: the number of elements of each.
        weights: the names to show of those that are the weight of a layer.
    """

    model: nn.Module
    names: dict[str, str]
    sizes: tuple[int, ...]
    weights: tuple[str, ...]


def parameters(model: nn.Module, *, only: str | Iterable[str] | None = None, weights: bool = False) -> Parameters:
    """Return the weights and biases of `model` that require gradients, shared ones once.

    Args:
        model: any module.
        only: glob patterns; the weights of the layers they match, instead of all parameters.
        weights: True for the weights of all layers, instead of all parameters.

    >>> net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    >>> parameters(net).names, parameters(net).weights
    ({'0.weight': '0.weight', '0.bias': '0.bias', '1.weight': '1.weight'}, ('0.weight', '1.weight'))
    """
    if not isinstance(model, nn.Module):
        raise ConditioningError(f"`model` must be a torch.nn.Module, got {type(model).__name__}.")
    model = unwrapped(model)
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if is_lazy(parameter) or parameter.is_meta or "DTensor" in ancestry(parameter) or parameter.is_complex():
            raise ConditioningError(
                f"{name!r} is lazy, on the meta device, sharded or complex. Pass a model whose parameters are real, "
                "unsharded tensors with values."
            )
    try:
        shown = {id(layer.parameter): layer.name for layer in layers(model, include=only)}
    except LayerError:
        # A network without layers still has a matrix over all of its parameters.
        if only is not None or weights:
            raise
        shown = {}
    trained = {name: p for name, p in named.items() if p.requires_grad and p.numel()}
    if only is not None or weights:
        trained = {name: p for name, p in trained.items() if id(p) in shown}
    if not trained:
        which = "No parameter" if only is None else f"No weight of the layers {only!r}"
        raise ConditioningError(f"{which} requires gradients. Call requires_grad_() on those to analyze.")
    names = {name: shown.get(id(p), name) for name, p in trained.items()}
    of_layers = tuple(names[name] for name, p in trained.items() if id(p) in shown)
    return Parameters(model, names, tuple(p.numel() for p in trained.values()), of_layers)


@dataclass(frozen=True)
class Scores:
    """E(s sᵀ) of every sample of a batch.

    Attributes:
        samples: the number of samples with a label; the others do not count.
        factor: a function that returns the rows b_r of some samples, [samples, r, ...].
        times: a function that returns E(s sᵀ) t of every sample, for t with the shape of the output.
    """

    samples: int
    factor: Callable[[slice], Tensor]
    times: Callable[[Tensor], Tensor]


def scores_of(loss: Loss, output: Tensor, target: Any, labels: Labels, generator: torch.Generator) -> Scores:
    """Return the scores for a choice of labels.

    Args:
        loss: the loss of (output, target).
        output: f of the whole batch.
        target: the labels of the data.
        labels: "model" for the expectation over the model's own labels, "sampled" for one of these per sample, "true"
            for `target`; or a function (output, generator) → targets.
        generator: the generator to draw with.

    >>> from torch.nn.functional import mse_loss
    >>> output, target = torch.ones(2, 1), torch.tensor([[0.0], [-1.0]])
    >>> scores_of(mse_loss, output, target, "true", torch.Generator()).factor(slice(0, 2)).flatten()
    tensor([2., 4.])
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
    """Return the scores in expectation over labels drawn from the model; ignored positions of `target` have none.

    >>> from torch.nn.functional import cross_entropy
    >>> model_scores(cross_entropy, torch.zeros(1, 2), torch.tensor([0])).times(torch.tensor([[1.0, 0.0]]))
    tensor([[ 0.2500, -0.2500]])
    """
    q = distribution(loss, output)
    if q.family == "categorical":
        if output.dim() < 2:
            raise ConditioningError(f"The output must have shape [samples, classes, ...], got {list(output.shape)}.")
        if q.log_probabilities:
            total = probabilities(q, output).sum(1)
            if not torch.allclose(total, torch.ones_like(total), atol=1e-2):
                raise ConditioningError(
                    f"The loss takes log-probabilities, but exp(output) sums to {total.flatten()[0]:.3g}. End the "
                    "model with log_softmax, or use the cross-entropy on its logits."
                )
    labeled = _labeled(q, output, target)
    predictions = labeled[:1].numel()
    samples = _some(int(labeled.reshape(len(output), -1).any(1).sum()) if len(output) else 0)
    share = {"sum": 1.0, "none": 1 / predictions, "mean": samples / max(1, int(labeled.sum()))}[q.reduction]
    each = share * labeled.to(output.dtype)
    return Scores(samples, lambda which: _factor(q, output[which], each[which]), partial(_times, q, output, each))


def label_scores(loss: Loss, output: Tensor, target: Any) -> Scores:
    """Return the scores for one label per sample, s_i = N ∂L/∂f_i with L the mean loss.

    >>> from torch.nn.functional import mse_loss
    >>> label_scores(mse_loss, torch.ones(2, 1), torch.tensor([[0.0], [-1.0]])).factor(slice(0, 2)).flatten()
    tensor([2., 4.])
    """
    samples, q = _some(len(output)), known(loss)
    rows = _scores(loss, output, target)
    if q is None:
        _refuse_mixing(loss, output, target, rows)
    elif q.family == "categorical" and output.dim() > 1:
        samples = int(_labeled(q, output, target).flatten(1).any(1).sum())
        if q.reduction == "mean":
            rows = rows * (samples / len(output))

    def times(t: Tensor) -> Tensor:
        inner = (rows * t).reshape(len(rows), -1).sum(1)
        return rows * inner.reshape(-1, *[1] * (t.dim() - 1))

    return Scores(_some(samples), lambda which: rows[which, None], times)


def _some(samples: int) -> int:
    if not samples:
        raise ConditioningError("No sample has a label: the batch is empty, or every target is the ignore_index.")
    return samples


def _labeled(q: Likelihood, output: Tensor, target: Any) -> Tensor:
    """Return a mask of predictions with a label: [N, 1, ...] for a categorical distribution, else like the output."""
    if q.family != "categorical":
        return torch.ones_like(output, dtype=torch.bool)
    if isinstance(target, Tensor) and not target.is_floating_point() and target.shape == output[:, 0].shape:
        return target.ne(q.ignore_index).unsqueeze(1)
    return torch.ones_like(output[:, :1], dtype=torch.bool)


def mean_of(loss: Loss, output: Tensor, target: Any) -> Tensor:
    """Return L, the mean loss of a batch.

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
            f"The loss failed with {type(error).__name__}: {error}. It is called as loss(output, target), with output "
            f"in {output.dtype}; dtype=None runs the network in its own dtype."
        ) from error
    if not bool(value.isfinite()):
        raise ConditioningError(f"The loss is {value.item()}, so its curvature is not finite either.")
    return value


def _scores(loss: Loss, output: Tensor, target: Any) -> Tensor:
    leaf = output.detach().requires_grad_()
    value = mean_of(loss, leaf, target)
    if not value.requires_grad:
        return torch.zeros_like(output)
    (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True, materialize_grads=True)
    return gradient.detach() * len(output)


def _refuse_mixing(loss: Loss, output: Tensor, target: Any, rows: Tensor) -> None:
    """Reject a loss in which a sample's score depends on the others, except for a common factor such as Σ weights."""
    n = len(output)
    half = n // 2
    if not half or not isinstance(target, Tensor) or not target.dim() or len(target) != n:
        return
    alone = _scores(loss, output[:half], target[:half])
    among = rows[:half]
    scale = (alone * among).sum() / alone.square().sum().clamp_min(torch.finfo(alone.dtype).tiny)
    if not bool((alone * scale - among).norm() <= 1e-3 * among.norm()):
        raise ConditioningError(
            "`loss` must be a mean, a sum or a list of losses of samples; here the loss of a sample depends on the "
            "other samples of the batch, so there are no gradients of samples. Try top_eigenvalue with "
            'matrix="hessian" or "gauss_newton", which takes any loss.'
        )


def _factor(q: Likelihood, output: Tensor, share: Tensor) -> Tensor:
    """Return all b_r of each sample, [n, r, ...]. A prediction has one per class, or one."""
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
    """Return √E(s²) of each element, for distributions with independent elements."""
    if q.family == "gaussian":
        return torch.full_like(output, q.variance**-0.5)
    p = probabilities(q, output)
    return share * (p * (1 - p)).sqrt()


def gradient_rows(f: Network, output: Tensor, scores: Scores) -> Iterator[Rows]:
    """Yield the gradients Jᵀb of all samples in pieces [rows, size] by parameter; some rows may be zero.

    If the output of a sample depends on that sample alone, gradients are taken for many samples in parallel, each with
    its own forward pass (`vmap`). With batch statistics it depends on the whole batch through mean and variance: then
    ∇ℓ_i is row i of the Jacobian of all losses with respect to θ, and each row is a backward pass through the batch.

    Args:
        f: the network on its batch.
        output: f(θ) for the whole batch.
        scores: rows b of each sample.

    >>> from gyroscope.passes import Batch
    >>> net, x = nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    >>> _ = nn.init.ones_(net.weight)
    >>> f = network(net, ["weight"], Batch((x,), {}, torch.zeros(2, 1)), None)
    >>> scores = scores_of(nn.functional.mse_loss, first_output(f), f.batch.target, "true", torch.Generator())
    >>> [rows["weight"].tolist() for rows in gradient_rows(f, first_output(f), scores)]  # 2 e_i x_i
    [[[2.0, 0.0], [0.0, 18.0]]]
    """
    n = len(output)
    if not independent(f, output):
        yield from _together(f, scores, _most(f))
        return
    most = _most(f.part(n, slice(0, 1)))
    pulled = _puller(f, n)
    try:
        pulled(slice(0, 1), scores.factor(slice(0, 1)))
    except GyroscopeError:
        raise
    except (RuntimeError, ValueError):
        # vmap does not support some operation. One sample after another is slower, but always works.
        for i in range(n):
            yield from _together(f.part(n, slice(i, i + 1)), scores, most, start=i)
        return
    for some, rows in _pieces(n, scores, most):
        yield {name: row.reshape(rows.shape[:2].numel(), -1) for name, row in pulled(some, rows).items()}


def _puller(f: Network, n: int) -> Callable[[slice, Tensor], Rows]:
    """Return a function that pulls rows [samples, r, ...] at the outputs of some samples back to the parameters."""
    leaves, rebuild = batched(f.batch, n)

    def one(sample: list[Tensor], rows: Tensor) -> Rows:
        batch = rebuild([leaf[None] for leaf in sample])
        pull: Callable[[Tensor], tuple[Rows]] = vjp(lambda theta: f(theta, batch)[0], f.theta)[1]
        found: Rows = vmap(lambda row: pull(row)[0])(rows)
        return found

    def pulled(some: slice, rows: Tensor) -> Rows:
        found: Rows = vmap(one)([leaf[some] for leaf in leaves], rows)
        return found

    return pulled


def _together(f: Network, scores: Scores, most: int, *, start: int = 0) -> Iterator[Rows]:
    """Yield gradients of the samples of one forward pass, the first of which is sample `start` of the scores."""
    theta = {name: p.detach().requires_grad_() for name, p in f.theta.items()}
    output = f(theta)
    for some, rows in _pieces(len(output), scores, most, start=start):
        k, r = rows.shape[:2]
        cotangents = output.new_zeros(k, r, *output.shape)
        index = torch.arange(k, device=output.device)
        cotangents[index, :, index + some.start - start] = rows
        pulled = _pull(output, list(theta.values()), cotangents.flatten(0, 1))
        yield {name: row.reshape(k * r, -1) for name, row in zip(theta, pulled, strict=True)}


def _pull(output: Tensor, theta: list[Tensor], cotangents: Tensor) -> list[Tensor]:
    """Return Jᵀ of many cotangents, at once if every operation supports it, otherwise one after another."""
    found: Sequence[Tensor | None]
    try:
        found = torch.autograd.grad(
            output, theta, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
    except (RuntimeError, ValueError):
        each = [torch.autograd.grad(output, theta, c, retain_graph=True, allow_unused=True) for c in cotangents]
        found = [None if row[0] is None else torch.stack(row) for row in zip(*each, strict=True)]
    zero = (len(cotangents),)
    return [p.new_zeros(zero + p.shape) if row is None else row for p, row in zip(theta, found, strict=True)]


def _pieces(n: int, scores: Scores, most: int, *, start: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """Yield some samples at a time with some of their rows: at most `most` rows, or those of one sample."""
    each = scores.factor(slice(start, start + 1)).shape[1]
    samples = max(1, most // each)
    for first in range(start, start + n, samples):
        some = slice(first, min(first + samples, start + n))
        for rows in torch.split(scores.factor(some), min(each, most), dim=1):
            yield some, rows


def _most(f: Network) -> int:
    """Return how many rows to take at a time, so that they and the activations they need fit in memory."""
    held = [1]

    def count(tensor: Tensor) -> Tensor:
        held.append(tensor.numel())
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        f({name: p.detach().requires_grad_() for name, p in f.theta.items()})
    size = sum(math.prod(p.shape) for p in f.theta.values())
    return max(1, min(_ROWS // size, _ACTIVATIONS // sum(held)))


@dataclass(frozen=True, eq=False)
class Moments:
    """A matrix of second moments GᵀG/N of dimension d, stored as its rows G as long as these are fewer than d.

    The eigenvalues of GᵀG/N above zero are those of GGᵀ/N, which is then the smaller of the two.

    Attributes:
        held: G/√N, [rows, d], if there are fewer rows than d; otherwise GᵀG/N, [d, d].
        dimension: d.

    >>> one = Moments(torch.tensor([[3.0, 4.0]], dtype=torch.float64), 2)
    >>> one.matrix.tolist(), one.spectrum(tolerance=0.0).full()
    ([[9.0, 12.0], [12.0, 16.0]], array([25.,  0.]))
    """

    held: Tensor
    dimension: int

    @cached_property
    def matrix(self) -> Tensor:
        """GᵀG/N itself."""
        return self.held.T @ self.held if len(self.held) < self.dimension else self.held

    def part(self, where: slice) -> Moments:
        """Return the block of some of the dimensions."""
        size = where.stop - where.start
        if len(self.held) == self.dimension:
            return Moments(self.held[where, where], size)
        rows = self.held[:, where]
        return Moments(rows if len(rows) < size else rows.T @ rows, size)

    def spectrum(self, *, tolerance: float) -> Spectrum:
        """Return the eigenvalues, from the smaller side."""
        smaller = self.held @ self.held.T if len(self.held) < self.dimension else self.held
        return Spectrum.of(eigenvalues([smaller])[0], self.dimension, tolerance=tolerance)


class Sum:
    """Running sum Σ g gᵀ over rows g, in float64."""

    def __init__(self, dimension: int, device: torch.device) -> None:
        self.dimension, self.device = dimension, device
        self.rows: list[Tensor] = []
        self.count = 0
        self.total: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Add some rows, [k, dimension]."""
        rows = rows.to(self.device, torch.float64)
        self.count += len(rows)
        if self.total is None and self.count < self.dimension:
            self.rows.append(rows)
            return
        if self.total is None:
            self.total = torch.zeros(self.dimension, self.dimension, dtype=torch.float64, device=self.device)
        for one in (*self.rows, rows):
            self.total.addmm_(one.T, one)
        self.rows = []

    def mean(self, samples: int) -> Moments:
        """Return the sum divided by the number of samples."""
        if self.total is None:
            return Moments(torch.cat(self.rows) / samples**0.5, self.dimension)
        return Moments(self.total.div_(samples), self.dimension)
