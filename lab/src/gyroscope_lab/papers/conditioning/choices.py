"""What a figure of full and layer-wise conditioning shows, and what the paper leaves to whoever makes it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from gyroscope_lab.errors import LabError
from gyroscope_lab.models.mlp import Gain
from gyroscope_lab.papers.conditioning.small_images import Normalization

Statistics = Literal["frozen", "batch"]
ApproximateLabels = Literal["true", "sampled"]


@dataclass(frozen=True)
class Choices:
    """What the paper does not say.

    Attributes:
        samples: how many images; None for what the scale takes.
        crop: how much of MNIST's images is kept; see `small_images`.
        normalization: of the pixels; see there too.
        affine: whether batch normalization has a gain γ and a bias β. They are no part of F: its θ is {W_k}.
        gain: where γ starts; "uniform", U(0, 1), is what Torch 7 does.
        statistics: what is differentiated under batch normalization. "frozen": the means and variances of all images
            are constants, so that the loss of a sample depends on that sample alone, as F and Σx ⊗ Σ∇h have it;
            "batch": they depend on the weights too, and the gradient of one sample's loss goes through all samples.
        approximate_labels: the labels of Σ∇h in figure 2: the "true" ones as in the paper (the empirical distribution),
            or "sampled" from the network.
        p: the shares at which κ_p is given.

    >>> Choices(normalization="unit").crop
    20
    """

    samples: int | None = None
    crop: int = 20
    normalization: Normalization = "centred"
    affine: bool = False
    gain: Gain = "ones"
    statistics: Statistics = "frozen"
    approximate_labels: ApproximateLabels = "true"
    p: tuple[float, ...] = tuple(k / 20 for k in range(1, 21))

    def __post_init__(self) -> None:
        for name, accepted in (("statistics", Statistics), ("approximate_labels", ApproximateLabels)):
            if getattr(self, name) not in get_args(accepted):
                can = " or ".join(map(repr, get_args(accepted)))
                raise LabError(f"{name} is {getattr(self, name)!r}; it can be {can}")


@dataclass(frozen=True)
class Plan:
    """What a figure shows of the networks of one size.

    Attributes:
        model: their name.
        matrices: "F", the Fisher matrix, "M", the second moments of the gradients, or both.
        whole: whether the whole matrices are shown.
        layers: the layers whose blocks are shown, from 1.
        approximate: whether Σx ⊗ Σ∇h is shown beside each block.

    >>> Plan("mlp-8x24", layers=(3, 6)).matrices
    ('F',)
    """

    model: str
    matrices: tuple[str, ...] = ("F",)
    whole: bool = True
    layers: tuple[int, ...] = ()
    approximate: bool = False

    def shows(self, matrix: str, layer: int | None, approximate: bool) -> bool:
        """Whether a line of the figure is of this."""
        part = self.whole if layer is None else layer in self.layers
        return matrix in self.matrices and part and (self.approximate or not approximate)


def union(plans: Sequence[Plan]) -> Plan:
    """Return what is to be measured of a model to show all `plans` of it.

    >>> union([Plan("mlp-8x24", layers=(3, 6)), Plan("mlp-8x24", ("M",), whole=False, layers=(3, 4))])
    Plan(model='mlp-8x24', matrices=('F', 'M'), whole=True, layers=(3, 4, 6), approximate=False)
    """
    return Plan(
        plans[0].model,
        tuple(sorted({matrix for plan in plans for matrix in plan.matrices})),
        any(plan.whole for plan in plans),
        tuple(sorted({layer for plan in plans for layer in plan.layers})),
        any(plan.approximate for plan in plans),
    )
