"""The quasi-diagonal preconditioner: centred, standardized activations without changing the network (equation 10)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gyroscope.conditioning.labels import Loss
from gyroscope.dynamics.errors import DynamicsError
from gyroscope.dynamics.observer import Labels
from gyroscope.dynamics.places import Parts, Place
from gyroscope.dynamics.preconditioner import Preconditioner, check_number
from gyroscope.dynamics.running import Average, Spread


def quasi_diagonal(gradient: Parts, mean: Tensor, variance: Tensor) -> Parts:
    """R Rᵀ applied to the gradient of a layer s = W a + b (equation 10 of Grosse's chapter 5).

    Gradient descent on W̃ = W Σ^(1/2) and b̃ = b + W m (equation 9) is, on W and b, descent along

        P_W = (∇W − ∇b mᵀ) Σ⁻¹        P_b = ∇b − P_W m

    which is the inverse of [RRᵀ]⁻¹ = ((Σ + mmᵀ, m), (mᵀ, 1)) ⊗ I. Without a bias to take up the shift the inverse is
    that of the block of the weights, (Σ + mmᵀ) ⊗ I. A coordinate whose variance is 0 is left where it is.

    Args:
        gradient: ∇W as [outputs, inputs], and ∇b, or None if there is no bias.
        mean: m, [inputs].
        variance: the diagonal of Σ, [inputs].

    Returns:
        P_W and P_b.

    >>> quasi_diagonal((torch.tensor([[8.0]]), torch.tensor([2.0])), torch.tensor([3.0]), torch.tensor([4.0]))
    (tensor([[0.5000]]), tensor([0.5000]))
    """
    W, b = gradient
    precision = torch.where(variance > 0, 1 / variance, 0.0)
    if b is not None:
        P = torch.addr(W, b, mean, alpha=-1).mul_(precision)
        return P, b - P @ mean
    # Sherman and Morrison's formula.
    scaled = precision * mean
    return torch.addr(W * precision, W @ scaled / (1 + mean @ scaled), scaled, alpha=-1), None


class QuasiDiagonal(Preconditioner["Moments"]):
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

    Args:
        optimizer: the inner optimizer.
        model: the model that is trained; it is called as a whole.
        loss: the loss, where labels are drawn.
        labels: None for equation 10 as it is; "sampled" for S under labels drawn from the model (Fisher), which takes
            a backward pass more where it is measured; a function (output, generator) → targets that draws them; "true"
            for those of the training loop (empirical Fisher).
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
        super().__init__(
            optimizer, model, lambda found: Moments(found, decay, labels is not None),
            loss=loss, labels="true" if labels is None else labels, biases=biases, every=every, seed=seed,
        )  # fmt: skip

    def _directions(self, gradients: dict[int, Parts]) -> dict[int, Parts]:
        found = {}
        for i, gradient in gradients.items():
            kind = gradient[0].dtype
            activations, slopes = self._statistics.activations[i], self._statistics.slopes[i]
            variance = activations.variance + self.damping * activations.variance.mean()
            W, b = quasi_diagonal(gradient, activations.mean.to(kind), variance.to(kind))
            if self._statistics.scales:
                S = (slopes.value + self.damping * slopes.value.mean()).to(kind)
                precision = torch.where(S > 0, 1 / S, 0.0)
                W, b = W.mul_(precision.unsqueeze(1)), None if b is None else b * precision
            found[i] = W, b
        return found


class Moments:
    """Running means and variances of the inputs of layers, and running mean squares of the gradients there.

    Args:
        places: the layers.
        decay: of the averages.
        scales: whether gradients are looked at.
    """

    def __init__(self, places: Sequence[Place], decay: float, scales: bool) -> None:
        self.places, self.scales = tuple(places), scales
        self.activations = [Spread(decay) for _ in places]
        self.slopes = [Average(decay) for _ in places]

    def add(self, index: int, x: Tensor, g: Tensor, samples: int, batch: object) -> None:
        """A layer was used: see `gyroscope.dynamics.observer.Statistics`."""
        place = self.places[index]
        self.activations[index].add(*place.moments(x))
        if self.scales:
            # E[(Ds_j)²] summed over the rows of a sample, as in K-FAC.
            self.slopes[index].add(place.rows(g).square().sum(0) * samples, batch)

    def fold(self) -> None:
        """Take what was added into the averages."""
        for activations, slopes in zip(self.activations, self.slopes, strict=True):
            activations.fold()
            slopes.fold()

    def known(self, index: int) -> bool:
        """Whether there is any of this layer."""
        return self.activations[index].count > 0

    def state(self, index: int) -> dict[str, Any]:
        """What is known of a layer."""
        a = self.activations[index]
        own = {"mean": a.mean, "variance": a.variance, "count": a.count}
        return {**own, "slopes": self.slopes[index].value} if self.scales else own

    def load(self, index: int, state: dict[str, Any]) -> None:
        """Go on from that."""
        like = self.places[index].module.weight.device
        self.activations[index].load(state.get("mean"), state.get("variance"), state.get("count", 0), like)
        self.slopes[index].load(state.get("slopes"), state.get("count", 0), like)

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """Of the tensors in a state."""
        place = self.places[index]
        own: dict[str, tuple[int, ...]] = {"mean": (place.inputs,), "variance": (place.inputs,)}
        return {**own, "slopes": (place.outputs,)} if self.scales else own
