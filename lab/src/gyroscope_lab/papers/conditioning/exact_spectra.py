"""Exact spectra of the curvature matrices of small perceptrons, before training.

Digits of 12×12 pixels make perceptrons small enough for their whole Fisher matrix F and for the second moments M of
their gradients. `Choices` holds what the conditioning paper does not state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from gyroscope.conditioning import Spectrum, condition, eigenvalues
from gyroscope.conditioning.fisher import fisher, gradient_rows, parameters, scores_of
from gyroscope.layers import untouched
from gyroscope.passes import Batch, borrowed, first_output
from gyroscope.passes import network as function_of
from gyroscope_lab import models
from gyroscope_lab.data.digits import stored_digits
from gyroscope_lab.data.mnist import mnist
from gyroscope_lab.errors import LabError
from gyroscope_lab.models.mlp import Gain

Normalization = Literal["unit", "centered", "standard"]
Statistics = Literal["frozen", "batch"]
ApproximateLabels = Literal["true", "sampled"]
Labels = Literal["model", "true"]

SIDE = 12
# The choice of images does not depend on the seed of a study, which sets the weights.
_CHOICE_SEED = 0
# The name in `fisher` of the labels of each matrix.
_LABELS: dict[str, Labels] = {"F": "model", "M": "true"}


@dataclass(frozen=True)
class Choices:
    """Choices that the paper does not state.

    Attributes:
        samples: the number of images; None for that of the scale.
        crop: the side of the middle of MNIST's images that is kept; see `small_images`.
        normalization: of the pixels; see `small_images`.
        affine: whether batch normalization has a gain γ and a bias β. They are not part of F, whose θ is {W_k}.
        gain: the initial γ; "uniform", U(0, 1), is that of Torch 7.
        statistics: what is differentiated under batch normalization. "frozen": the means and variances of all images
            are constants, so that the loss of a sample depends on that sample alone, as in F and in Σx ⊗ Σ∇h;
            "batch": they depend on the weights too, and the gradient of one sample's loss goes through all samples.
        approximate_labels: the labels of Σ∇h in figure 2: the "true" ones as in the paper (the empirical distribution),
            or labels "sampled" from the network.
        p: the shares at which κ_p is given.

    >>> Choices(normalization="unit").crop
    20
    """

    samples: int | None = None
    crop: int = 20
    normalization: Normalization = "centered"
    affine: bool = False
    gain: Gain = "ones"
    statistics: Statistics = "frozen"
    approximate_labels: ApproximateLabels = "true"
    p: tuple[float, ...] = tuple(k / 20 for k in range(1, 21))

    def __post_init__(self) -> None:
        for name, accepted in (
            ("normalization", Normalization),
            ("statistics", Statistics),
            ("approximate_labels", ApproximateLabels),
        ):
            given, can = getattr(self, name), " or ".join(map(repr, get_args(accepted)))
            if given not in get_args(accepted):
                raise LabError(f"`{name}` must be {can}, got {given!r}.")


_DEFAULT = Choices()


@dataclass(frozen=True)
class SmallImages:
    """Inputs [N, 1, 12, 12] in float64, labels [N], and the name of the data.

    >>> small_images(3).x.shape
    torch.Size([3, 1, 12, 12])
    """

    x: torch.Tensor
    y: torch.Tensor
    name: str


def small_images(
    count: int, *, data: Path | str | None = None, crop: int = 20, normalization: Normalization = "centered"
) -> SmallImages:
    """Return `count` images, the same in every call, or all if there are fewer.

    Args:
        count: how many.
        data: the folder of MNIST, whose training images are cropped and resized. Without it scikit-learn's 1,797 digits
            of 8×8 pixels stand in; they are only resized, so that their 144 pixels span 64 dimensions.
        crop: the side of the middle of MNIST's 28×28 pixels that is kept before resizing. The digits were fitted into
            20×20 and then centered by mass: 20 keeps 97 % of the ink; 24 keeps all but 0.2 %, together with 8 of 144
            pixels that fewer than one image in a hundred uses, "uninformative" in the paper's words.
        normalization: "unit" for pixels from 0 to 1, "centered" for these less the mean of all pixels (one number),
            "standard" for these divided by the standard deviation of all pixels as well.

    >>> images = small_images(5, normalization="unit")
    >>> images.name, float(images.x.min()) >= 0, float(images.x.max()) <= 1
    ('digits', True, True)
    """
    if count < 2:
        raise LabError(f"`samples` must be 2 or more, got {count}: batch normalization needs two images.")
    x, y = _digits() if data is None else _mnist(data, crop)
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(_CHOICE_SEED))[:count]
    x, y = resize(x[chosen].double(), SIDE), y[chosen]
    if normalization != "unit":
        x = x - x.mean()
    if normalization == "standard":
        x = x / x.std(correction=0)
    return SmallImages(x, y, "digits" if data is None else "MNIST")


def _mnist(folder: Path | str, crop: int) -> tuple[torch.Tensor, torch.Tensor]:
    split = mnist(folder)
    return center_crop(split.x_train, crop), split.y_train


def center_crop(images: torch.Tensor, side: int) -> torch.Tensor:
    """Return the middle `side`×`side` pixels of `images`, [..., height, width].

    If they cannot be exactly in the middle, they are shifted by half a pixel to the top and left.

    >>> center_crop(torch.arange(16).reshape(4, 4), 2)
    tensor([[ 5,  6],
            [ 9, 10]])
    """
    height, width = images.shape[-2:]
    if not 1 <= side <= min(height, width):
        raise LabError(f"`side` must be from 1 to {min(height, width)} for images of {height}×{width}, got {side}.")
    top, left = (height - side) // 2, (width - side) // 2
    return images[..., top : top + side, left : left + side]


def resize(images: torch.Tensor, side: int) -> torch.Tensor:
    """Return `images`, [N, channels, height, width], with `side`×`side` pixels.

    Pixels are interpolated linearly in both directions, with antialiasing if the image shrinks. This preserves the
    brightness and the range.

    >>> resize(torch.ones(1, 1, 8, 8), 12).shape
    torch.Size([1, 1, 12, 12])
    """
    if side < 1:
        raise LabError(f"`side` must be a whole number ≥ 1, got {side}.")
    return F.interpolate(images, size=(side, side), mode="bilinear", antialias=True, align_corners=False)


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    pixels, labels = stored_digits()
    return pixels / 16, labels


def network(name: str, images: SmallImages, *, batch_norm: bool, seed: int, choices: Choices = _DEFAULT) -> nn.Module:
    """Return the network in float64, in the mode in which it is to be differentiated.

    With frozen statistics it is in evaluation mode, with exactly the means and variances of all images, so that its
    outputs are those of training mode.

    >>> images = small_images(50)
    >>> frozen = network("mlp-4x24", images, batch_norm=True, seed=0)
    >>> batch = network("mlp-4x24", images, batch_norm=True, seed=0, choices=Choices(statistics="batch"))
    >>> frozen.training, batch.training, torch.allclose(frozen(images.x), batch(images.x), atol=1e-12)
    (False, True, True)
    """
    options = {"batch_norm": True, "affine": choices.affine, "gain": choices.gain} if batch_norm else {}
    model = models.make(name, seed=seed, **options).double().train()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    if choices.statistics == "batch" and norms:
        return model
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model(images.x)
        for norm in norms:
            # The variance for evaluation divides by N − 1, that of the batch by N.
            assert norm.running_var is not None
            norm.running_var.mul_((len(images.x) - 1) / len(images.x))
    return model.eval()


def exact_spectra(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, labels: Labels, layers: Sequence[str], whole: bool
) -> dict[str | None, Spectrum]:
    """Return the spectra of the blocks of `layers`, and under None that of the whole matrix over all layers' weights.

    Let G hold the N·r gradients of N samples, one per row, where r is 1 for true labels and the number of classes for
    the model's. The matrix is GᵀG/N. Where it has more rows than G, its nonzero eigenvalues are found from GGᵀ/N.

    >>> net = nn.Sequential(nn.Linear(3, 9, bias=False), nn.ReLU(), nn.Linear(9, 2, bias=False)).double()
    >>> x, y = torch.ones(2, 3, dtype=torch.float64), torch.tensor([0, 1])
    >>> found = exact_spectra(net, x, y, labels="model", layers=["0.weight"], whole=True)
    >>> found[None].dimension, found["0.weight"].dimension, found[None].rank
    (45, 27, 1)
    """
    size = sum(parameters(model, only="*").sizes)
    with untouched(model), torch.no_grad():
        classes = model(x[:2]).shape[1]
    gradients = len(x) * (classes if labels == "model" else 1)
    if gradients < size:
        return _from_gradients(model, x, y, labels, layers, whole)
    only = "*" if whole else layers
    exact = fisher(model, F.cross_entropy, (x, y), labels=labels, blocks=not whole, layers=only)
    spectra: dict[str | None, Spectrum] = {None: exact.spectrum()} if whole else {}
    return spectra | {name: exact.spectrum(name) for name in layers}


def _from_gradients(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, labels: Labels, layers: Sequence[str], whole: bool
) -> dict[str | None, Spectrum]:
    chosen = parameters(model, only="*")
    with borrowed(model):
        f = function_of(model, chosen.names, Batch((x,), {}, y), torch.float64)
        output = first_output(f)
        scores = scores_of(F.cross_entropy, output, y, labels, torch.Generator())
        pieces = list(gradient_rows(f, output, scores))
    by_name = {name: torch.cat([piece[name] for piece in pieces]) for name in chosen.names}
    spectra: dict[str | None, Spectrum] = {}
    if whole:
        spectra[None] = _spectrum(torch.cat(list(by_name.values()), dim=1), len(x))
    return spectra | {name: _spectrum(by_name[name], len(x)) for name in layers}


def _spectrum(gradients: torch.Tensor, samples: int) -> Spectrum:
    rows, size = gradients.shape
    gram = gradients @ gradients.T if rows < size else gradients.T @ gradients
    tolerance = max(size * 2.0**-52, (4 * torch.finfo(torch.float64).eps) ** 2)
    return Spectrum.of(eigenvalues([gram / samples])[0], size, tolerance=tolerance)


@dataclass(frozen=True)
class Line:
    """The spectrum of one matrix of one network, as a line of a figure shows it.

    Attributes:
        network: "plain", or "bn" for the batch normalized one.
        matrix: "F" for the Fisher information, "M" for the second moments of the gradients.
        layer: the block, 1 for the first layer; None for the whole matrix.
        approximate: whether it is Σx ⊗ Σ∇h in place of the block.
        largest: λmax.
        kappa: κ_p for each p: infinite where λ_p = 0, None where λmax = 0 too.
        rank: the number of eigenvalues above zero.
        dimension: the number of all eigenvalues.

    >>> Line("bn", "F", 3, False, 1.5, (1.0, 2.0), 2, 2).symbol
    'F_3'
    """

    network: str
    matrix: str
    layer: int | None
    approximate: bool
    largest: float
    kappa: tuple[float | None, ...]
    rank: int
    dimension: int

    @property
    def symbol(self) -> str:
        """The matrix as the paper writes it."""
        return self.matrix if self.layer is None else f"{self.matrix}_{self.layer}"


@dataclass(frozen=True)
class Plan:
    """The contents of a figure: matrices of the networks of one size.

    Attributes:
        model: their name.
        matrices: "F", the Fisher matrix, "M", the second moments of the gradients, or both.
        whole: whether the whole matrices are shown.
        layers: the layers whose blocks are shown, from 1.
        approximate: whether Σx ⊗ Σ∇h is shown for each block.

    >>> Plan("mlp-8x24", layers=(3, 6)).matrices
    ('F',)
    """

    model: str
    matrices: tuple[str, ...] = ("F",)
    whole: bool = True
    layers: tuple[int, ...] = ()
    approximate: bool = False


def measure(model: nn.Module, images: SmallImages, plan: Plan, *, name: str, choices: Choices = _DEFAULT) -> list[Line]:
    """Return the lines that `plan` shows of one network, called `name`.

    >>> images = small_images(20)
    >>> plain = network("mlp-4x24", images, batch_norm=False, seed=0)
    >>> lines = measure(plain, images, Plan("mlp-4x24", whole=False, layers=(2,), approximate=True), name="plain")
    >>> [(line.symbol, line.approximate, line.dimension) for line in lines]
    [('F_2', False, 576), ('F_2', True, 576)]
    """
    weights = {number: f"linear{number}.weight" for number in plan.layers}
    blocks: dict[int | None, str | None] = ({None: None} if plan.whole else {}) | weights
    lines = []
    for matrix in plan.matrices:
        spectra = exact_spectra(
            model, images.x, images.y, labels=_LABELS[matrix], layers=list(weights.values()), whole=plan.whole
        )
        for number, weight in blocks.items():
            found = spectra[weight]
            kappa = tuple(found.kappa(p) for p in choices.p)
            lines.append(Line(name, matrix, number, False, found.largest, kappa, found.rank, found.dimension))
        if plan.approximate:
            lines += _approximations(model, images, weights, name=name, matrix=matrix, choices=choices)
    return lines


def _approximations(
    model: nn.Module, images: SmallImages, weights: dict[int, str], *, name: str, matrix: str, choices: Choices
) -> list[Line]:
    batch, labels = (images.x, images.y), choices.approximate_labels
    found = condition(model, F.cross_entropy, batch, p=choices.p, labels=labels, layers=list(weights.values()))
    rows = {row["layer"]: row for row in found.rows()}
    lines = []
    for number, weight in weights.items():
        row = rows[weight]
        kappa = tuple(row["kappa_f"][p] for p in choices.p)
        rank, dimension = row["rank_x"] * row["rank_g"], row["dimension_x"] * row["dimension_g"]
        lines.append(Line(name, matrix, number, True, row["lambda_f"], kappa, rank, dimension))
    return lines
