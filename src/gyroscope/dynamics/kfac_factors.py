"""K-FAC's curvature of a layer: two Kronecker factors, kept as running averages, and their eigenvectors.

    G ≈ A ⊗ S        A = E[ā āᵀ],  S = E[Ds Dsᵀ]        (equation 5 of Grosse's chapter 5)

ā are a layer's activations with a homogeneous coordinate and Ds the gradient of one sample's loss at its output. For
the matrix P of a step on [W b], (A ⊗ S) vec(P) = vec(S P A). A layer that is used at T positions of a sample (of an
image, of a sequence) has T A ⊗ E[Ds Dsᵀ] with both means over samples and positions; the T is kept with S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from gyroscope.dynamics.places import Place
from gyroscope.dynamics.running import Average

Tikhonov = Literal["factored", "exact"]


@dataclass(frozen=True, eq=False)
class Eigen:
    """A = U diag(a) Uᵀ and S = V diag(s) Vᵀ."""

    a: Tensor
    U: Tensor
    s: Tensor
    V: Tensor
    _inverses: dict[float, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def solve(self, G: Tensor, damping: float, tikhonov: Tikhonov = "factored") -> Tensor:
        """The P that a damped curvature takes to the gradient G, [outputs, inputs + 1].

            exact       (A ⊗ S + λI) vec(P) = vec(G)                         equation 26
            factored    (A + π√λ I) ⊗ (S + √λ/π I) vec(P) = vec(G),          π² = (tr A / dim A) / (tr S / dim S)

        With λ = 0 both are the pseudo-inverse: directions that A or S does not see are left alone.

        >>> eigen = eigen_of(torch.diag(torch.tensor([2.0, 1.0])), torch.tensor([[4.0]]))
        >>> eigen.solve(torch.tensor([[8.0, 8.0]]), 0.0)
        tensor([[1., 2.]])
        >>> eigen.solve(torch.tensor([[8.0, 8.0]]), 4.0, "exact").round(decimals=4)
        tensor([[0.6667, 1.0000]])
        """
        if damping > 0 and tikhonov == "exact":
            scale = 1 / (torch.outer(self.s, self.a) + damping)
            return self.V @ ((self.V.T @ G @ self.U) * scale) @ self.U.T
        if damping not in self._inverses:
            self._inverses.clear()
            self._inverses[damping] = self._inverted(damping)
        A, S = self._inverses[damping]
        return S @ G @ A

    def _inverted(self, damping: float) -> tuple[Tensor, Tensor]:
        """(A + π√λ I)⁻¹ and (S + √λ/π I)⁻¹."""
        a, s = _reciprocal(self.a), _reciprocal(self.s)
        if damping > 0:
            pi = (self.a.mean() / self.s.mean()).sqrt()
            pi = torch.where(torch.isfinite(pi) & (pi > 0), pi, 1.0)
            a, s = 1 / (self.a + damping**0.5 * pi), 1 / (self.s + damping**0.5 / pi)
        return (self.U * a) @ self.U.T, (self.V * s) @ self.V.T


def eigen_of(A: Tensor, S: Tensor) -> Eigen:
    """Both decompositions; eigenvalues below 0 are rounding."""
    a, U = torch.linalg.eigh(A)
    s, V = torch.linalg.eigh(S)
    return Eigen(a.clamp_min(0), U, s.clamp_min(0), V)


def _reciprocal(values: Tensor) -> Tensor:
    """1/λ, and 0 for eigenvalues that are 0 to rounding."""
    floor = values.max() * len(values) * torch.finfo(values.dtype).eps
    return torch.where(values > floor, 1 / values, 0.0)


class Factors:
    """The factors of layers as running averages, and their decompositions as of when they were last asked for.

    Args:
        places: the layers.
        decay: of the averages.
    """

    def __init__(self, places: Sequence[Place], decay: float) -> None:
        self.places = tuple(places)
        self.A = [Average(decay) for _ in places]
        self.S = [Average(decay) for _ in places]
        self.eigen: dict[int, Eigen] = {}

    def add(self, index: int, x: Tensor, g: Tensor, samples: int, batch: object) -> None:
        """A layer was used: see `gyroscope.dynamics.observer.Statistics`."""
        place = self.places[index]
        rows = place.rows(g)
        # A mean over all uses; S is a sum over those of a sample.
        self.A[index].add(place.second_moment(x), None)
        self.S[index].add(rows.T @ rows * samples, batch)

    def fold(self) -> None:
        """Take what was added into the averages."""
        for one in (*self.A, *self.S):
            one.fold()

    def decompose(self) -> None:
        """Find the eigenvectors of all factors as they are now."""
        for i, (A, S) in enumerate(zip(self.A, self.S, strict=True)):
            if A.count:
                self.eigen[i] = eigen_of(A.value, S.value)

    def known(self, index: int) -> bool:
        """Whether there is any of this layer."""
        return self.A[index].count > 0

    def state(self, index: int) -> dict[str, Any]:
        """What is known of a layer; with its decomposition, which may be older than the factors."""
        own = {"A": self.A[index].value, "S": self.S[index].value, "count": self.A[index].count}
        eigen = self.eigen.get(index)
        return own if eigen is None else {**own, **{name: getattr(eigen, name) for name in ("a", "U", "s", "V")}}

    def load(self, index: int, state: dict[str, Any]) -> None:
        """Go on from that."""
        like = self.places[index].module.weight.device
        for name, one in (("A", self.A[index]), ("S", self.S[index])):
            one.load(state.get(name), state.get("count", 0), like)
        self.eigen.pop(index, None)
        if "U" in state:
            self.eigen[index] = Eigen(*(state[name].detach().to(like, copy=True) for name in ("a", "U", "s", "V")))

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """Of the tensors in a state."""
        place = self.places[index]
        inputs = place.inputs + place.biased
        return {"A": (inputs, inputs), "S": (place.outputs, place.outputs)}
