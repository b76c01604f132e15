"""K-FAC: the natural gradient with a Kronecker-factored curvature for each layer, around any optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gyroscope.control.preconditioners.cohorts import Cohort
from gyroscope.control.preconditioners.kfac_factors import Factors, Tikhonov
from gyroscope.control.preconditioners.observer import Labels
from gyroscope.control.preconditioners.places import Parts, Place, joined, split
from gyroscope.control.preconditioners.preconditioner import Preconditioner, check_number
from gyroscope.errors import DynamicsError
from gyroscope.passes.likelihood import Loss
from gyroscope.theory.given import count


class KFAC(Preconditioner[Factors]):
    """Gives an optimizer natural gradients with a Kronecker-factored curvature of each layer.

    The step of a layer's [W b] is along the P with (A ⊗ S + damping) vec(P) = vec(∇J), where A = E[ā āᵀ] is the second
    moment of its activations and S = E[Ds Dsᵀ] that of the gradients at its output (equations 5 and 26 of Grosse's
    chapter 5). Undamped, a step changes the network's function in the same way whatever affine maps the activations
    and pre-activations are looked at through (section 3.2); so it is also immune to the implicit decay of learning
    rates in scale-invariant networks (section 4.3).

    Convolutions are layers on patches, all positions alike (KFC). Other modules are passed through with their
    gradients as they are, and are listed in `unsupported`. Averages are weighted by max(1/t, 1 − decay) at their t-th
    update. Where labels are "true", gradients may not be scaled (`GradScaler`) or accumulated over several backward
    passes. `Layca(KFAC(..., biases=False))` takes the direction of the weights and sets the angle itself.

    Args:
        optimizer: the inner optimizer.
        model: the model that is trained; it is called as a whole.
        loss: the loss, whose labels are drawn; not needed where labels are "true".
        labels: "sampled" for S under labels drawn from the model's predictions (the Fisher matrix), which takes
            another backward pass where it is measured; a function (output, generator) → targets that draws them;
            "true" for the gradients of the training loop (the empirical Fisher matrix), a mean over the samples: the
            first dimension of the output. Where the loss is a mean over more, such as the T tokens of [N, C, T],
            S is T times too small; flatten outputs to [N·T, C], or let labels be sampled.
        biases: whether biases are preconditioned with the weights, as one [W b]. They make up for each other, so both
            go together: False under a controller such as `Layca`, which sets the length of the weights' step alone.
        damping: λ.
        tikhonov: "factored" for (A + π√λ I) ⊗ (S + √λ/π I) with π² the ratio of the mean eigenvalues of A and S;
            "exact" for A ⊗ S + λ I.
        decay: of the running averages.
        every: steps between two measurements of the factors.
        decompose_every: steps between two decompositions of them.
        clip: the most η² ⟨P, ∇J⟩ may be over all layers, about twice the Kullback-Leibler divergence of a step of
            length η; longer steps are shortened. None for no bound, with which rates that SGD takes well may diverge:
            1e-3 is a good start, with a damping of 1e-2.
        largest: the most rows of a factor; a layer with more inputs or outputs is passed through, and listed.
        seed: of the generator that draws labels.

    Example:
        Least squares with a linear layer is solved in one step.

        >>> x = torch.randn(32, 3, dtype=torch.float64)
        >>> y = x @ torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64) + 4
        >>> model = nn.Linear(3, 1, dtype=torch.float64)
        >>> half = lambda output, target: (output - target).square().sum(1) / 2
        >>> unit = lambda output, generator: output.detach() + 1           # (Ds)² = 1, its expectation
        >>> optimizer = KFAC(torch.optim.SGD(model.parameters(), lr=1.0), model, half, labels=unit, damping=0.0)
        >>> half(model(x), y).mean().backward(); optimizer.step()
        >>> model.weight.detach().round(decimals=6), model.bias.detach().round(decimals=6)
        (tensor([[1., 2., 3.]], dtype=torch.float64), tensor([4.], dtype=torch.float64))

    Reference:
        Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate curvature; Grosse and
        Martens, A Kronecker-factored approximate Fisher matrix for convolution layers.
    """

    prefix = "kfac_"

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        loss: Loss | None = None,
        *,
        labels: Labels = "sampled",
        biases: bool = True,
        damping: float = 1e-3,
        tikhonov: Tikhonov = "factored",
        decay: float = 0.95,
        every: int = 1,
        decompose_every: int = 10,
        clip: float | None = None,
        largest: int = 8192,
        seed: int = 0,
    ) -> None:
        check_number("damping", damping, below=float("inf"))
        check_number("decay", decay, below=1.0)
        self.decompose_every = count("decompose_every", decompose_every, least=1)
        self.largest = count("largest", largest, least=1)
        if clip is not None:
            check_number("clip", clip, below=float("inf"))
        if tikhonov not in get_args(Tikhonov):
            raise DynamicsError(f"tikhonov is {tikhonov!r}; accepted are {', '.join(map(repr, get_args(Tikhonov)))}.")
        self.damping, self.tikhonov, self.clip = damping, tikhonov, clip

        def factors(found: Sequence[Place]) -> Factors:
            return Factors(found, decay)

        super().__init__(optimizer, model, factors, loss=loss, labels=labels, biases=biases, every=every, seed=seed)

    def _refuses(self, place: Place) -> str | None:
        rows = max(place.inputs + place.biased, place.outputs)
        return None if rows <= self.largest else f"a factor would have {rows:,} rows, and largest is {self.largest:,}"

    def _directions(self, gradients: dict[int, Parts]) -> dict[int, Parts]:
        known = self._statistics
        if self._steps % self.decompose_every == 0 or not known.decomposed.issuperset(gradients):
            known.decompose()
        some = [one for one in known.held if any(i in gradients for i in one.cohort.indices)]
        G, P = [], []
        for one in some:
            assert one.eigen is not None
            # Factors of activations in float32 stay so beside weights in float64.
            G.append(joined(one.cohort.stacked(gradients)).to(one.A.dtype))
            P.append(one.eigen.solve(G[-1], self.damping, self.tikhonov))
        if self.clip is not None and P:
            shorter = self._shorter([one.cohort for one in some], G, P, self.clip)
            P = [p * shorter.to(p) for p in P]
        found: dict[int, Parts] = {}
        for one, p in zip(some, P, strict=True):
            found |= one.cohort.unstacked(split(p, one.cohort.biased), gradients)
        return found

    def _shorter(self, cohorts: Sequence[Cohort], G: Sequence[Tensor], P: Sequence[Tensor], clip: float) -> Tensor:
        """The factor on all directions that keeps η² ⟨P, ∇J⟩ at `clip` or below."""
        rates = {id(p): group["lr"] for group in self.param_groups for p in group["params"]}
        parts = []
        for cohort, g, p in zip(cohorts, G, P, strict=True):
            for i, along in zip(cohort.indices, (p * g).sum((1, 2)).unbind(), strict=True):
                parts.append(rates[id(self._places[i].module.weight)] ** 2 * along)
        total = torch.stack([part.to(parts[0]) for part in parts]).sum()
        return torch.where(total > clip, (clip / total).sqrt(), 1.0)
