"""K-FAC: the natural gradient with a Kronecker-factored curvature for each layer, around any optimizer.

    G ≈ A ⊗ S        A = E[ā āᵀ],  S = E[Ds Dsᵀ]        (equation 5 of Grosse's chapter 5)

ā are a layer's activations with a homogeneous coordinate, and Ds is the gradient of one sample's loss at its output.
For the matrix P of a step on [W b], (A ⊗ S) vec(P) = vec(S P A). A layer that is used at T positions of a sample (of an
image, of a sequence) has the curvature T A ⊗ E[Ds Dsᵀ] with both means over samples and positions; T is kept with S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gyroscope.base.accepted import choice
from gyroscope.control.preconditioners.affine_layers import Cohort, Parts, Place, Shelf, joined, shelves, split
from gyroscope.control.preconditioners.observer import Labels
from gyroscope.control.preconditioners.preconditioner import Preconditioner
from gyroscope.control.preconditioners.running import Counts
from gyroscope.errors import DynamicsError
from gyroscope.passes.likelihood import Loss
from gyroscope.theory.domains import count, fraction, nonnegative

Tikhonov = Literal["factored", "exact"]


@dataclass(frozen=True, eq=False)
class Eigen:
    """A = U diag(a) Uᵀ and S = V diag(s) Vᵀ, of one layer or, with a leading dimension, of several."""

    a: Tensor
    U: Tensor
    s: Tensor
    V: Tensor
    _inverses: dict[float, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def solve(self, G: Tensor, damping: float, tikhonov: Tikhonov = "factored") -> Tensor:
        """Return the P that the damped curvature maps to the gradient G, [outputs, inputs + 1].

            exact       (A ⊗ S + λI) vec(P) = vec(G)                         equation 26
            factored    (A + π√λ I) ⊗ (S + √λ/π I) vec(P) = vec(G),          π² = (tr A / dim A) / (tr S / dim S)

        With λ = 0 both are the pseudo-inverse: directions in which A or S is zero are left out.

        >>> eigen = eigen_of(torch.diag(torch.tensor([2.0, 1.0])), torch.tensor([[4.0]]))
        >>> eigen.solve(torch.tensor([[8.0, 8.0]]), 0.0)
        tensor([[1., 2.]])
        >>> eigen.solve(torch.tensor([[8.0, 8.0]]), 4.0, "exact").round(decimals=4)
        tensor([[0.6667, 1.0000]])
        """
        if damping > 0 and tikhonov == "exact":
            scale = 1 / (self.s.unsqueeze(-1) * self.a.unsqueeze(-2) + damping)
            return self.V @ ((self.V.mT @ G @ self.U) * scale) @ self.U.mT
        if damping not in self._inverses:
            self._inverses.clear()
            self._inverses[damping] = self._inverted(damping)
        A, S = self._inverses[damping]
        return S @ G @ A

    def forget(self) -> None:
        """Drop the cached inverses, because the decompositions were written to."""
        self._inverses.clear()

    def _inverted(self, damping: float) -> tuple[Tensor, Tensor]:
        """Return (A + π√λ I)⁻¹ and (S + √λ/π I)⁻¹."""
        a, s = _reciprocal(self.a), _reciprocal(self.s)
        if damping > 0:
            pi = (self.a.mean(-1, keepdim=True) / self.s.mean(-1, keepdim=True)).sqrt()
            pi = torch.where(torch.isfinite(pi) & (pi > 0), pi, 1.0)
            a, s = 1 / (self.a + damping**0.5 * pi), 1 / (self.s + damping**0.5 / pi)
        return (self.U * a.unsqueeze(-2)) @ self.U.mT, (self.V * s.unsqueeze(-2)) @ self.V.mT


def eigen_of(A: Tensor, S: Tensor) -> Eigen:
    """Both decompositions; eigenvalues below 0 are rounding."""
    a, U = torch.linalg.eigh(A)
    s, V = torch.linalg.eigh(S)
    # Laid out in memory as they are when loaded, so that a resumed run is equal bit for bit.
    return Eigen(a.clamp_min(0), U.contiguous(), s.clamp_min(0), V.contiguous())


def _reciprocal(values: Tensor) -> Tensor:
    """Return 1/λ, and 0 for eigenvalues that are 0 up to rounding."""
    floor = values.amax(-1, keepdim=True) * (values.shape[-1] * torch.finfo(values.dtype).eps)
    return torch.where(values > floor, 1 / values, 0.0)


@dataclass(eq=False)
class Held:
    """The factors of layers of one shape: A is [layers, inputs, inputs] and S is [layers, outputs, outputs]."""

    cohort: Cohort
    A: Tensor
    S: Tensor
    eigen: Eigen | None = None


class Factors:
    """The factors of layers as running averages, and their decompositions as of the last `decompose`.

    Layers of one shape are averaged, decomposed and solved for together.

    Args:
        places: the layers.
        decay: the decay of the averages.
    """

    def __init__(self, places: Sequence[Place], decay: float) -> None:
        self.places, self.decay = tuple(places), decay
        self.decomposed: set[int] = set()
        self._shelves: list[tuple[Counts, list[Held]]] = []
        self._where: dict[int, tuple[Held, int, Counts, int]] = {}
        self._seen: set[int] = set()
        self._uses: dict[int, list[tuple[Tensor, Tensor, object]]] = {}

    @property
    def held(self) -> list[Held]:
        """The factors of each cohort, on the device that its weights have at the first use."""
        self._make()
        return [one for _, several in self._shelves for one in several]

    def add(self, uses: Sequence[tuple[int, Tensor, Tensor | None]], samples: int, batch: object) -> None:
        """Add uses of layers; see `gyroscope.control.preconditioners.observer.Statistics`."""
        for index, x, g in uses:
            place = self.places[index]
            assert g is not None
            rows = place.rows(g)
            part = place.second_moment(x), (rows.T @ rows).mul_(samples), batch
            self._uses.setdefault(index, []).append(part)

    def fold(self) -> None:
        """Update the averages with the uses added; a factor that is not finite leaves its average as it is."""
        new = {i: _of_a_step(uses) for i, uses in self._uses.items()}
        self._uses = {}
        if not new:
            return
        self._make()
        for counts, several in self._shelves:
            order = [i for one in several for i in one.cohort.indices]
            if any(i in new for i in order):
                counts.add([i in new for i in order])
                w = counts.weights()
                _average_([one.A for one in several], [new[i][0] if i in new else None for i in order], w)
                _average_([one.S for one in several], [new[i][1] if i in new else None for i in order], w)
        self._seen.update(new)

    def decompose(self) -> None:
        """Decompose all factors as they are now."""
        for one in self.held:
            one.eigen = eigen_of(one.A, one.S)
        self.decomposed = set(self._seen)

    def known(self, index: int) -> bool:
        """Return whether there are statistics of a layer."""
        return index in self._seen

    def state(self, index: int) -> dict[str, Any]:
        """Return the statistics of a layer, with its decomposition, which may be older than the factors."""
        one, at, counts, place = self._find(index)
        own = {"A": one.A[at].clone(), "S": one.S[at].clone(), "count": int(counts.value[place])}
        if one.eigen is None or index not in self.decomposed:
            return own
        return {**own, **{name: getattr(one.eigen, name)[at].clone() for name in _EIGEN}}

    def load(self, index: int, state: dict[str, Any]) -> None:
        """Load the statistics of a layer; an empty state deletes them."""
        self._uses = {}
        self.decomposed.discard(index)
        (self._seen.add if state else self._seen.discard)(index)
        if not state and not self._shelves:
            return
        one, at, counts, place = self._find(index)
        counts.value[place] = state.get("count", 0)
        for name in ("A", "S"):
            getattr(one, name)[at] = state.get(name, 0.0)
        if "U" in state:
            if one.eigen is None:
                (a, U), (s, V) = ((M.new_zeros(M.shape[:2]), torch.zeros_like(M)) for M in (one.A, one.S))
                one.eigen = Eigen(a, U, s, V)
            for name in _EIGEN:
                getattr(one.eigen, name)[at] = state[name]
            one.eigen.forget()
            self.decomposed.add(index)

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors in the state of a layer."""
        place = self.places[index]
        inputs = place.inputs + place.biased
        return {"A": (inputs, inputs), "S": (place.outputs, place.outputs)}

    def _make(self) -> None:
        if not self._shelves:
            self._shelves = [self._made(shelf) for shelf in shelves(self.places)]
            for counts, several in self._shelves:
                places = ((one, at, i) for one in several for at, i in enumerate(one.cohort.indices))
                self._where |= {i: (one, at, counts, place) for place, (one, at, i) in enumerate(places)}

    def _made(self, shelf: Shelf) -> tuple[Counts, list[Held]]:
        held = []
        for cohort in shelf.cohorts:
            n, inputs = len(cohort.indices), cohort.inputs + cohort.biased
            A, S = shelf.like.new_zeros(n, inputs, inputs), shelf.like.new_zeros(n, cohort.outputs, cohort.outputs)
            held.append(Held(cohort, A, S))
        return Counts(len(shelf.order), self.decay, shelf.like), held

    def _find(self, index: int) -> tuple[Held, int, Counts, int]:
        """Return the factors of a layer's cohort, the counts of its device, and its index in each."""
        self._make()
        return self._where[index]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_uses": {}}


_EIGEN = ("a", "U", "s", "V")


def _of_a_step(uses: list[tuple[Tensor, Tensor, object]]) -> tuple[Tensor, Tensor]:
    """Return A as a mean over all uses of a layer, and S as a sum over those of a pass and a mean over passes."""
    A, S, _ = uses[0]
    if len(uses) > 1:
        passes = {id(batch) if batch is not None else id(A) for A, _, batch in uses}
        A, S = sum(a for a, _, _ in uses[1:]) + A, sum(s for _, s, _ in uses[1:]) + S
        A, S = A / len(uses), S / len(passes)
    return A, S


def _average_(known: Sequence[Tensor], new: Sequence[Tensor | None], w: Tensor) -> None:
    """Update stacks of averaged factors with the new factor of each layer, with weights [layers]."""
    given = [one for one in new if one is not None]
    norms = torch._foreach_norm(given, 1)
    each = iter(norms)
    # Without a new factor, the weight is 0 already.
    use = torch.isfinite(torch.stack([norms[0] if one is None else next(each) for one in new]))
    rest = iter(new)
    for stack, own in zip(known, (w * use).split_with_sizes([len(stack) for stack in known]), strict=True):
        own = own.view(-1, 1, 1)
        parts = torch.stack([old if (part := next(rest)) is None else part.to(old.dtype) for old in stack.unbind()])
        stack.lerp_(torch.where(own > 0, parts, stack), own)


class KFAC(Preconditioner[Factors]):
    """Gives an optimizer natural gradients with a Kronecker-factored curvature of each layer.

    The step of a layer's [W b] is along P with (A ⊗ S + damping) vec(P) = vec(∇J), where A = E[ā āᵀ] is the second
    moment of its activations and S = E[Ds Dsᵀ] that of the gradients at its output (equations 5 and 26 of Grosse's
    chapter 5). An undamped step changes the network's function in the same way under any affine reparameterization
    of activations and pre-activations (section 3.2); so it is also immune to the implicit decay of learning rates in
    scale-invariant networks (section 4.3).

    Convolutions are layers on patches, all positions alike (KFC). Other modules are passed through with their gradients
    as they are, and are listed in `unsupported`. The t-th update of an average has the weight max(1/t, 1 − decay). With
    labels "true", gradients must not be scaled (`GradScaler`) or accumulated over several backward passes.
    `Layca(KFAC(..., biases=False))` uses the direction of the weights and sets the angle itself.

    Args:
        optimizer: the inner optimizer.
        model: the model that is trained; it is called as a whole.
        loss: the loss, whose labels are drawn; not needed with labels "true".
        labels: "sampled" for S under labels drawn from the model's predictions (the Fisher matrix), which takes another
            backward pass whenever it is measured; a function (output, generator) → targets that draws them; "true" for
            the gradients of the training loop (the empirical Fisher matrix), where the loss is a mean over the samples,
            the first dimension of the output. If it is a mean over more, such as the T tokens of [N, C, T], S is T
            times too small; flatten outputs to [N·T, C], or use "sampled".
        biases: whether biases are preconditioned with the weights, as one [W b]. They compensate each other, so both
            must be stepped together: use False under a controller such as `Layca`, which sets the length of the
            weights' step only.
        damping: λ.
        tikhonov: "factored" for (A + π√λ I) ⊗ (S + √λ/π I) with π² the ratio of the mean eigenvalues of A and S;
            "exact" for A ⊗ S + λ I.
        decay: the decay of the running averages.
        every: the number of steps between two measurements of the factors.
        decompose_every: the number of steps between two decompositions of the factors.
        clip: the upper bound on η² ⟨P, ∇J⟩ over all layers, about twice the Kullback-Leibler divergence of a step of
            length η; longer steps are shortened. With None there is no bound, and learning rates that work with SGD may
            diverge: 1e-3 is a good start, with a damping of 1e-2.
        largest: the largest number of rows of a factor; a layer with more inputs or outputs is passed through, and
            listed in `unsupported`.
        seed: the seed of the generator that draws labels.

    Example:
        One step solves least squares with a linear layer.

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
        nonnegative("damping", damping, hint="1e-3")
        fraction("decay", decay, hint="0.95")
        self.decompose_every = count("decompose_every", decompose_every, least=1)
        self.largest = count("largest", largest, least=1)
        if clip is not None:
            nonnegative("clip", clip, hint="1e-3")
        choice(tikhonov, "tikhonov", get_args(Tikhonov), DynamicsError)
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
            # Factors of activations in float32 stay in float32 also where weights are in float64.
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
        """Return the factor on all directions that keeps η² ⟨P, ∇J⟩ at `clip` or below."""
        rates = {id(p): group["lr"] for group in self.param_groups for p in group["params"]}
        parts = []
        for cohort, g, p in zip(cohorts, G, P, strict=True):
            for i, along in zip(cohort.indices, (p * g).sum((1, 2)).unbind(), strict=True):
                parts.append(rates[id(self._places[i].module.weight)] ** 2 * along)
        total = torch.stack([part.to(parts[0]) for part in parts]).sum()
        return torch.where(total > clip, (clip / total).sqrt(), 1.0)
