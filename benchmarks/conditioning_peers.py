"""Kronecker factors of each layer by other libraries, and their eigenvalues, as one gets them there today.

With X and G the inputs of a layer and the gradients of the mean loss at its outputs, one row a position of an image or
a token (R rows, B samples, N terms of the loss: B images, or all tokens), the three conventions are

    =============  =============  =====================
                   x              g
    =============  =============  =====================
    gyroscope      XᵀX / R        R · GᵀG
    curvlinops     XᵀX / R        N · GᵀG
    nngeometry     XᵀX / B        B² / R · GᵀG
    =============  =============  =====================

so that eigenvalues differ by a number for each layer and factor, and condition numbers agree. X are unfolded patches
where the layer is a convolution (`patches=True`). nngeometry appends a column of ones to X where the layer has a bias.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Factors = dict[str, tuple[Tensor, Tensor]]


def layers(model: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """The layers that both libraries have factors for, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}


def curvlinops_factors(model: nn.Module, x: Tensor, y: Tensor) -> Factors:
    """K-FAC, "expand", with the labels of the batch, of weights alone.

    The sizes are given and the check for determinism is left out: each would be another pass over the batch.
    """
    from curvlinops import FisherType, KFACLinearOperator, KFACType

    operator = KFACLinearOperator(
        model, nn.CrossEntropyLoss(), [m.weight for m in layers(model).values()], [(x, y)],
        fisher_type=FisherType.EMPIRICAL, kfac_approx=KFACType.EXPAND, check_deterministic=False,
        num_data=len(x), num_per_example_loss_terms=y.numel() // len(x),
    )  # fmt: skip
    operator.compute_kronecker_factors()
    held = operator.state_dict()  # references, not copies
    return {name: (held["input_covariances"][name], held["gradient_covariances"][name]) for name in layers(model)}


def nngeometry_factors(model: nn.Module, x: Tensor, y: Tensor) -> Factors:
    """PMatKFAC of the loss of each sample, which makes it the empirical Fisher.

    It differentiates with respect to the batch, so there is none for a network that takes whole numbers, and its linear
    layers take rows, not sequences.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # backslashes in its docstrings, when they are compiled for the first time
        from nngeometry.backend import TorchHooksJacobianBackend
        from nngeometry.layercollection import LayerCollection
        from nngeometry.object import PMatKFAC

    collection = LayerCollection()  # not `from_model`: there is no K-FAC of normalisation layers
    for layer in layers(model).values():
        collection.add_layer_from_model(model, layer)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y, reduction="none").unsqueeze(1)

    backend = TorchHooksJacobianBackend(model=model, function=losses, layer_collection=collection)
    return dict(PMatKFAC(generator=backend, examples=(x, y)).data)


def eigenvalues(factors: Factors) -> Factors:
    """The eigenvalues of both factors of each layer, ascending, in the precision of the factors as far as it does."""
    return {name: (_eigenvalues(x), _eigenvalues(g)) for name, (x, g) in factors.items()}


def _eigenvalues(matrix: Tensor) -> Tensor:
    try:
        return torch.linalg.eigvalsh(matrix)
    except torch.linalg.LinAlgError:  # LAPACK does not converge in float32 on some matrices of low rank
        return torch.linalg.eigvalsh(matrix.double())


@dataclass(frozen=True)
class Peer:
    """A library with Kronecker factors.

    Attributes:
        distribution: its name where it is installed from.
        factors: of a model with cross-entropy on a batch.
        scales: what to multiply its factors x and g with to get ours, from R, B and N.
    """

    distribution: str
    factors: Callable[[nn.Module, Tensor, Tensor], Factors]
    scales: Callable[[int, int, int], tuple[float, float]]

    def spectra(self, model: nn.Module, x: Tensor, y: Tensor) -> Factors:
        """What there is to compare with: factors and their eigenvalues."""
        return eigenvalues(self.factors(model, x, y))

    def as_ours(self, model: nn.Module, x: Tensor, y: Tensor, rows: dict[str, int]) -> Factors:
        """Eigenvalues in our scale and of the weights alone, in descending order; `rows` are R by layer."""
        factors = self.factors(model, x, y)
        for name, layer in layers(model).items():
            d = layer.weight[0].numel()  # a bias has its row and column after those of the weights
            factors[name] = (factors[name][0][:d, :d], factors[name][1])
        found: Factors = {}
        for name, (a, g) in eigenvalues(factors).items():
            scale_a, scale_g = self.scales(rows[name], len(x), y.numel())
            found[name] = (scale_a * a.flip(0), scale_g * g.flip(0))
        return found


PEERS = {
    "curvlinops": Peer("curvlinops-for-pytorch", curvlinops_factors, lambda R, B, N: (1.0, R / N)),
    "nngeometry": Peer("nngeometry", nngeometry_factors, lambda R, B, N: (B / R, (R / B) ** 2)),
}


def versions() -> dict[str, str | None]:
    """The versions of the peers; None for what is not installed, or only lies on the path."""
    found: dict[str, str | None] = {}
    for peer in PEERS.values():
        try:
            found[peer.distribution] = version(peer.distribution)
        except PackageNotFoundError:
            found[peer.distribution] = None
    return found
