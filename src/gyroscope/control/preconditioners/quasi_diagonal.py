"""The quasi-diagonal preconditioner: centred, standardized activations without changing the network (equation 10)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gyroscope.control.preconditioners.moments import Held, Moments, has_kernels
from gyroscope.control.preconditioners.observer import Labels
from gyroscope.control.preconditioners.places import Parts
from gyroscope.control.preconditioners.preconditioner import Exchange, Preconditioner, check_number
from gyroscope.control.preconditioners.running import Averages, noise
from gyroscope.errors import DynamicsError
from gyroscope.passes.likelihood import Loss
from gyroscope.vectors.chunks import is_capturing

if TYPE_CHECKING:
    from gyroscope.control.preconditioners.direction_launch import Directions


def quasi_diagonal(gradient: Parts, mean: Tensor, variance: Tensor) -> Parts:
    """R Rᵀ applied to the gradient of a layer s = W a + b (equation 10 of Grosse's chapter 5).

    Gradient descent on W̃ = W Σ^(1/2) and b̃ = b + W m (equation 9) is, on W and b, descent along

        P_W = (∇W − ∇b mᵀ) Σ⁻¹        P_b = ∇b − P_W m

    which is the inverse of [RRᵀ]⁻¹ = ((Σ + mmᵀ, m), (mᵀ, 1)) ⊗ I. Without a bias to take up the shift the inverse is
    that of the block of the weights, (Σ + mmᵀ) ⊗ I. A coordinate whose variance is 0 is left where it is.

    Args:
        gradient: ∇W as [..., outputs, inputs] of one layer or of several, and ∇b, or None if there is no bias.
        mean: m, [..., inputs].
        variance: the diagonal of Σ, [..., inputs].

    Returns:
        P_W and P_b.

    >>> quasi_diagonal((torch.tensor([[8.0]]), torch.tensor([2.0])), torch.tensor([3.0]), torch.tensor([4.0]))
    (tensor([[0.5000]]), tensor([0.5000]))
    """
    precision = _reciprocal(variance)
    scaled = precision * mean
    return _direction(gradient, mean, precision, scaled / (1 + (scaled * mean).sum(-1, keepdim=True)))


def _direction(gradient: Parts, mean: Tensor, precision: Tensor, back: Tensor) -> Parts:
    W, b = gradient
    m, precision = mean.unsqueeze(-2), precision.unsqueeze(-2)
    P = W * precision if b is None else torch.addcmul(W, b.unsqueeze(-1), m, value=-1).mul_(precision)
    # Products of several matrices with a vector each are slow on a CPU.
    along = P @ m.mT if P.is_cuda or len(P) == 1 else (P * m).sum(-1, keepdim=True)
    if b is not None:
        return P, b - along.squeeze(-1)
    return P.addcmul_(along, back.unsqueeze(-2), value=-1), None  # Sherman and Morrison's formula


def _beyond_rounding(variance: Tensor, mean: Tensor) -> Tensor:
    """Variances, and 0 where they are no more than the mean's rounding makes of numbers that are all the same."""
    return torch.where(variance > (noise(mean.dtype) * mean).square(), variance, 0.0)


def _reciprocal(values: Tensor) -> Tensor:
    return torch.where(values > 0, values.reciprocal(), 0.0)


class QuasiDiagonal(Preconditioner[Moments]):
    """Gives an optimizer the gradients of a network with centred and standardized activations (equation 10).

    With m and Σ running means and variances of a layer's input, the inner optimizer steps along `quasi_diagonal` of
    the gradient. The curvature's outliers, which come from means far from zero, go away; the network's function, its
    forward and its backward pass stay what they are. A convolution is a layer on patches: m and Σ are of each channel
    at each position of the kernel.

    With labels also the scale of each unit j of the pre-activations is taken out: row j is divided by
    S_jj = E[(Ds_j)²]. Undamped, the step is then invariant to affine maps of single activations and single
    pre-activations; without labels, of single activations.

    Statistics are weighted by max(1/t, 1 − decay) at their t-th update. Layers other than `nn.Linear` and `nn.Conv2d`
    are passed through, and listed in `unsupported`. Learning rates are of coordinates with unit variance: where
    activations are small they are lower than without. Gradients may not be scaled (`GradScaler`) or accumulated over
    several backward passes where labels are "true".

    On a GPU the gradients that the inner optimizer sees lie in buffers that the next step writes again: one that keeps
    them must copy them.

    Where it looks at every step, and no labels are drawn, a whole training step may be captured in a CUDA graph, after
    three that are not.

    Args:
        optimizer: the inner optimizer.
        model: the model that is trained; it is called as a whole.
        loss: the loss, where labels are drawn.
        labels: None for equation 10 as it is; "sampled" for S under labels drawn from the model (Fisher), which takes
            a backward pass more where it is measured; a function (output, generator) → targets that draws them; "true"
            for those of the training loop (empirical Fisher), a mean over the first dimension of the model's output.
        biases: whether biases are preconditioned with the weights. A bias makes up for the weights' step where the
            activations' mean is, so both go together: False under a controller such as `Layca`, which sets the length
            of the weights' step alone.
        damping: what is added to variances and to the S_jj, as a share of their mean over the layer. It keeps
            activations that hardly vary from large steps; 0 is exact.
        decay: of the running averages.
        every: steps between two measurements.
        seed: of the generator that draws labels.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = QuasiDiagonal(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> model(3 + torch.randn(16, 4)).square().mean().backward(); optimizer.step()
        >>> optimizer.layers
        ('0', '2')

    Reference:
        Grosse, Neural net training dynamics, chapter 5, section 3.1; Ollivier, Riemannian metrics for neural networks.
    """

    prefix = "quasi_diagonal_"

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        loss: Loss | None = None,
        *,
        labels: Labels | None = None,
        biases: bool = True,
        damping: float = 0.1,
        decay: float = 0.95,
        every: int = 1,
        seed: int = 0,
    ) -> None:
        check_number("damping", damping, below=float("inf"))
        check_number("decay", decay, below=1.0)
        if labels is None and loss is not None:
            raise DynamicsError(
                "A loss was given, and labels=None has no use for one; give labels='sampled' for the pre-activations "
                "to be scaled as well, or no loss."
            )
        self.damping = damping
        self._launches: list[Directions] | None = None
        super().__init__(
            optimizer, model, lambda found: Moments(found, decay, labels is not None),
            loss=loss, labels="true" if labels is None else labels, biases=biases, every=every, seed=seed,
            inputs=labels is None, capturable=every == 1,
        )  # fmt: skip

    def _at_once(self) -> Exchange | None:
        known = self._statistics
        if not known.complete:
            return None
        if self._launches is None:
            if is_capturing():
                return None
            self._launches = []
            if has_kernels(known.held):
                from gyroscope.control.preconditioners.direction_launch import Directions

                self._launches = [Directions(self._places, known.held[0])]
        return self._launches[0](self.damping) if self._launches else None

    @property
    def scales(self) -> bool:
        """Whether the scales of pre-activations are taken out too, which takes labels."""
        return self._statistics.scales

    def _directions(self, gradients: dict[int, Parts]) -> dict[int, Parts]:
        found: dict[int, Parts] = {}
        for held in self._statistics.held:
            a, cohorts = held.activations, held.shelf.cohorts
            precision = _reciprocal(self._damped(a, _beyond_rounding(a.variance, a.mean)))
            back = precision * a.mean
            back = back / a.spread(1 + a.sums(back * a.mean))
            lengths = [len(cohort.indices) * cohort.inputs for cohort in cohorts]
            means, precisions, backs = (one.split_with_sizes(lengths) for one in (a.mean, precision, back))
            scales = self._scales(held)
            for k, cohort in enumerate(cohorts):
                if any(i in gradients for i in cohort.indices):
                    W, b = cohort.stacked(gradients)
                    shape, kind = W.shape[::2], W.dtype
                    own = (one[k].view(shape).to(kind) for one in (means, precisions, backs))
                    W, b = _direction((W, b), *own)
                    if scales is not None:
                        S = scales[k].view(W.shape[:2]).to(kind)
                        W, b = W.mul_(S.unsqueeze(-1)), None if b is None else b.mul_(S)
                    found |= cohort.unstacked((W, b), gradients)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_launches": None}

    def _scales(self, held: Held) -> Sequence[Tensor] | None:
        """1/S_jj, cohort by cohort."""
        if held.slopes is None:
            return None
        flat = _reciprocal(self._damped(held.slopes, held.slopes.value[0]))
        return flat.split_with_sizes([len(cohort.indices) * cohort.outputs for cohort in held.shelf.cohorts])

    def _damped(self, averages: Averages, values: Tensor) -> Tensor:
        """With a share of the layer's mean added."""
        if self.damping == 0:
            return values
        return values + averages.spread(averages.sums(values) * self.damping / averages.lengths)
