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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gyroscope.conditioning.batches import batches
from gyroscope.conditioning.fisher_network import borrowed, cast_loss, first_output, network
from gyroscope.conditioning.fisher_parameters import Parameters, parameters
from gyroscope.conditioning.fisher_rows import Rows, gradient_rows
from gyroscope.conditioning.fisher_scores import Labels, scores_of
from gyroscope.conditioning.labels import Loss
from gyroscope.errors import ConditioningError
from gyroscope.vectors.eager import accumulator

if TYPE_CHECKING:
    from gyroscope.conditioning.spectra import Spectrum


@dataclass(frozen=True, eq=False)
class Exact:
    """An exact matrix of second moments of gradients, or its blocks.

    Attributes:
        matrix: [P, P] in float64, rows and columns in the order of `parameters`, each flattened as it is stored; None
            where only the blocks were asked for.
        parameters: names of the parameters; that of a layer's weight is the layer's.
        sizes: how many elements each has; P is their sum.
        blocks: for the weight of each layer, its block [size, size]; views of `matrix` where there is one.
        samples: N.
        gradients: how many gradients were added up; the rank is not above that.
        epsilon: machine epsilon of the dtype the network was run in.
    """

    matrix: Tensor | None = field(repr=False)
    parameters: tuple[str, ...]
    sizes: tuple[int, ...]
    blocks: dict[str, Tensor] = field(repr=False)
    samples: int
    gradients: int
    epsilon: float = field(repr=False)

    @property
    def slices(self) -> dict[str, slice]:
        """Where each parameter lies in the rows and columns of the matrix, by name."""
        return _slices(self.parameters, self.sizes)

    def block(self, layer: str) -> Tensor:
        """The block of one layer's weight, F_k."""
        if layer not in self.blocks:
            raise ConditioningError(
                f"there is no block of {layer!r}; the layers are {', '.join(self.blocks) or 'none'}."
            )
        return self.blocks[layer]

    def spectrum(self, layer: str | None = None) -> Spectrum:
        """The eigenvalues of the whole matrix, or of the block of one layer."""
        from gyroscope.conditioning.spectra import Spectrum, eigenvalues

        if layer is None and self.matrix is None:
            raise ConditioningError("only the blocks were asked for: name a layer, or leave out blocks=True.")
        matrix = self.block(layer) if layer is not None else self.matrix
        assert matrix is not None
        d = len(matrix)
        tolerance = max(d * 2.0**-52, (4 * self.epsilon) ** 2)
        return Spectrum.of(eigenvalues([matrix])[0][: self.gradients], d, tolerance=tolerance)


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
            (output, generator) → targets that draws them. `gyroscope.conditioning.labels` says from which losses the
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
    if labels not in ("model", "sampled", "true") and not callable(labels):
        raise ConditioningError(
            f"labels is {labels!r}; accepted are 'model', 'sampled', 'true', or a function (output, generator) → "
            "targets."
        )
    chosen = parameters(model, only=layers, weights=blocks)
    _refuse_large(chosen, blocks, limit)
    total = _Sum(chosen, blocks)
    generator = torch.Generator(total.device).manual_seed(seed)
    with borrowed(chosen.model):
        own = cast_loss(loss, dtype)
        for one in batches(batch, total.device):
            f = network(chosen.model, chosen.names, one, dtype)
            output = first_output(f)
            scores = scores_of(own, output, f.batch.target, labels, generator)
            total.samples += scores.samples
            for rows in gradient_rows(f, output, scores):
                total.add(rows)
    return total.mean(torch.finfo(output.dtype).eps)


def _refuse_large(chosen: Parameters, blocks: bool, limit: int) -> None:
    sizes = dict(zip(chosen.names.values(), chosen.sizes, strict=True)) if blocks else {"": sum(chosen.sizes)}
    name, most = max(sizes.items(), key=lambda item: item[1])
    if most > limit:
        which = f"the block of {name!r}" if blocks else "the matrix"
        smaller = "" if blocks else "blocks=True for one matrix a layer, "
        raise ConditioningError(
            f"{which} is over {most:,} parameters, above the limit of {limit:,}: it would take "
            f"{8 * most**2 / 1e9:,.1f} GB. Use gyroscope.condition for the spectra of all layers at any size, "
            f"top_eigenvalue for λmax alone, {smaller}layers= for some of the layers, or raise limit=."
        )


class _Sum:
    """Second moments as they add up: of all parameters together, or of each."""

    def __init__(self, chosen: Parameters, blocks: bool) -> None:
        own = dict(chosen.model.named_parameters())
        self.chosen, self.device = chosen, next(own[name].device for name in chosen.names)
        self.samples = self.gradients = 0
        # A device without float64 has its gradients added up on the host.
        where = self.device if accumulator(self.device) is torch.float64 else torch.device("cpu")
        sizes = chosen.sizes if blocks else (sum(chosen.sizes),)
        self.sums = [torch.zeros(size, size, dtype=torch.float64, device=where) for size in sizes]
        self.blocks = blocks

    def add(self, rows: Rows) -> None:
        pieces = [row.to(self.sums[0].device, torch.float64) for row in rows.values()]
        self.gradients += len(pieces[0])
        for total, piece in zip(self.sums, pieces if self.blocks else [torch.cat(pieces, dim=1)], strict=True):
            total.addmm_(piece.T, piece)

    def mean(self, epsilon: float) -> Exact:
        for total in self.sums:
            total.div_(self.samples)
        names, sizes = tuple(self.chosen.names.values()), self.chosen.sizes
        at = _slices(names, sizes)
        if self.blocks:
            blocks = dict(zip(names, self.sums, strict=True))
        else:
            blocks = {name: self.sums[0][at[name], at[name]] for name in self.chosen.weights}
        matrix = None if self.blocks else self.sums[0]
        return Exact(matrix, names, sizes, blocks, self.samples, self.gradients, epsilon)


def _slices(names: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, slice]:
    ends = accumulate(sizes)
    return {name: slice(end - size, end) for name, size, end in zip(names, sizes, ends, strict=True)}
