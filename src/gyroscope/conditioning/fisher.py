"""The Fisher matrix of a small network, exactly: F, the second-moment matrix M, and their blocks, one a layer.

    F = (1/N) Σ_i E_{y ~ q(y|x_i)} ∇ℓ_i ∇ℓ_iᵀ        M = (1/N) Σ_i ∇ℓ_i ∇ℓ_iᵀ with the labels of the data

(section 2 of Huang et al., 2020), over θ, the weights and biases that require gradients. ℓ_i is the loss of sample i,
defined so that the mean loss is L = (1/N) Σ_i ℓ_i. `gyroscope.condition` approximates the blocks by Σx ⊗ Σ∇h, for
networks of any size; these are what it approximates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from gyroscope.base.accepted import flag, real
from gyroscope.conditioning.fisher_moments import Moments, Sum
from gyroscope.conditioning.fisher_parameters import Parameters, parameters
from gyroscope.conditioning.fisher_rows import gradient_rows
from gyroscope.conditioning.fisher_scores import Labels, scores_of
from gyroscope.conditioning.spectra import Spectrum
from gyroscope.errors import ConditioningError
from gyroscope.passes.batches import batches
from gyroscope.passes.labels import Loss
from gyroscope.passes.network import borrowed, cast_loss, check_run, first_output, network
from gyroscope.vectors.eager import accumulator

__all__ = ["Exact", "fisher", "gradient_rows", "parameters", "scores_of"]


@dataclass(frozen=True, eq=False)
class Exact:
    """An exact matrix of second moments of gradients, or its blocks.

    Attributes:
        parameters: names of the parameters; that of a layer's weight is the layer's.
        sizes: how many elements each has; P is their sum.
        layers: those of the parameters that are the weight of a layer.
        samples: N, without samples that have no label (`ignore_index` everywhere).
        epsilon: machine epsilon of the dtype the network was run in.
        moments: the whole matrix under None, or the blocks under the names of their layers.
    """

    parameters: tuple[str, ...]
    sizes: tuple[int, ...]
    layers: tuple[str, ...]
    samples: int
    epsilon: float = field(repr=False)
    moments: dict[str | None, Moments] = field(repr=False)

    @property
    def matrix(self) -> Tensor | None:
        """The matrix [P, P] in float64; None where only the blocks were asked for.

        Rows and columns are in the order of `parameters`, each flattened as it is stored: W of a linear layer row by
        row, so that one sample's block is gᵀg ⊗ xᵀx.
        """
        return self.moments[None].matrix if None in self.moments else None

    @property
    def slices(self) -> dict[str, slice]:
        """Where each parameter lies in the rows and columns of the matrix, by name."""
        ends = accumulate(self.sizes)
        return {n: slice(end - size, end) for n, size, end in zip(self.parameters, self.sizes, ends, strict=True)}

    @property
    def blocks(self) -> dict[str, Tensor]:
        """The block [size, size] of each layer's weight."""
        return {layer: self.block(layer) for layer in self.layers}

    def block(self, layer: str) -> Tensor:
        """The block F_k of one layer's weight."""
        return self._moments(layer).matrix

    def spectrum(self, layer: str | None = None) -> Spectrum:
        """The eigenvalues of the whole matrix, or of the block of one layer."""
        moments = self._moments(layer)
        return moments.spectrum(tolerance=max(moments.dimension * 2.0**-52, (4 * self.epsilon) ** 2))

    def _moments(self, layer: str | None) -> Moments:
        if layer in self.moments:
            return self.moments[layer]
        if layer is None:
            raise ConditioningError("only the blocks were asked for: name a layer, or leave out blocks=True.")
        if layer not in self.layers:
            raise ConditioningError(f"there is no layer {layer!r}; the layers are {', '.join(self.layers) or 'none'}.")
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
    """Form the Fisher matrix F of a network, or its second-moment matrix M, exactly.

    The expectation over labels is exact: for the cross-entropy F = (1/N) Σ_i J_iᵀ (diag q_i − q_i q_iᵀ) J_i with J_i
    the Jacobian of the logits. Where ℓ is the negative log-likelihood of q, F is also the Gauss-Newton matrix. That is
    so for all losses of one prediction a sample, for squared errors, and for sums; but where a mean is taken over D
    labels of a sample (pixels, tokens, several Bernoulli labels), ℓ is 1/D of it and F is 1/D of Gauss-Newton.

    The network is run in the mode it is in. With batch statistics (batch normalisation in training mode) ℓ_i depends on
    the whole batch, and ∇ℓ_i is row i of the Jacobian of all N losses: right, but N times the work. A network that
    draws random numbers, such as dropout in training mode, is refused. The model is left as it was found.

    Args:
        model: any module whose output is one tensor [N, ...].
        loss: `loss(output, target)`: a mean over the batch, a sum, or one value a sample; all give the same matrix for
            one prediction a sample. Class weights count in M.
        batch: (inputs, targets), or an iterable of these; inputs are a tensor, a tuple of positional arguments or a
            dict of keyword arguments. Tensors whose leading dimension is N are split into samples.
        labels: "model" for F; "sampled" for F with one label a sample drawn from the model; "true" for M; or a function
            (output, generator) → targets that draws them. `gyroscope.passes.labels` says from which losses the
            model's distribution is known.
        blocks: form the blocks of the layers' weights alone, never the whole.
        layers: glob patterns on the names of layers: the matrix is over the weights of these alone.
        limit: the most parameters of a matrix.
        seed: of the generator that labels are drawn with.
        dtype: what the network is run in: float64, so that small eigenvalues are not rounding; None for its own.
            Second moments are added up in float64 either way.

    Raises:
        ConditioningError: there are more parameters than `limit`, the loss has no likelihood, the network is random; no
            work has been done then.

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
            f"labels is {labels!r}; accepted are 'model', 'sampled', 'true', or a function (output, generator) → "
            "targets."
        )
    most = real(limit)
    if not most > 0:
        raise ConditioningError(f"limit is {limit!r}; accepted is a number of parameters above 0.")
    chosen = parameters(model, only=layers, weights=blocks)
    _refuse_large(chosen, blocks, most)
    device = next(p.device for name, p in chosen.model.named_parameters() if name in chosen.names)
    generator = torch.Generator(device).manual_seed(seed)
    # A device without float64 has its gradients added up on the host.
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
        which = f"the block of {name!r}" if blocks else "the matrix"
        smaller = "" if blocks else "blocks=True for one matrix a layer, "
        raise ConditioningError(
            f"{which} is over {most:,} parameters, above the limit of {limit:,.15g}: it would take "
            f"{8 * most**2 / 1e9:,.1f} GB. Use gyroscope.condition for the spectra of all layers at any size, "
            f"top_eigenvalue for λmax alone, {smaller}layers= for some of the layers, or raise limit=."
        )
