"""One network before training: the spectra of its curvature matrices and of their approximations."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from gyroscope.conditioning import condition
from gyroscope_lab import models
from gyroscope_lab.papers.conditioning.choices import Choices, Plan
from gyroscope_lab.papers.conditioning.exact_result import Line, line
from gyroscope_lab.papers.conditioning.exact_spectra import exact_spectra
from gyroscope_lab.papers.conditioning.small_images import SmallImages

#: What `fisher` calls the labels of each matrix.
_LABELS: dict[str, Literal["model", "true"]] = {"F": "model", "M": "true"}
_DEFAULT = Choices()


def network(name: str, images: SmallImages, *, batch_norm: bool, seed: int, choices: Choices = _DEFAULT) -> nn.Module:
    """Return the network in float64, in the mode that it is to be differentiated in.

    With frozen statistics it is in evaluation mode, with exactly the means and variances of all images, so that its
    outputs are those of training mode.

    >>> from gyroscope_lab.papers.conditioning.small_images import small_images
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
            # What is kept for evaluation divides by N − 1, what normalizes the batch by N.
            assert norm.running_var is not None
            norm.running_var.mul_((len(images.x) - 1) / len(images.x))
    return model.eval()


def measure(model: nn.Module, images: SmallImages, plan: Plan, *, name: str, choices: Choices = _DEFAULT) -> list[Line]:
    """Return the lines that `plan` shows of one network, called `name`.

    >>> from gyroscope_lab.papers.conditioning.small_images import small_images
    >>> images = small_images(20)
    >>> plain = network("mlp-4x24", images, batch_norm=False, seed=0)
    >>> lines = measure(plain, images, Plan("mlp-4x24", whole=False, layers=(2,), approximate=True), name="plain")
    >>> [(line.symbol, line.approximate, line.dimension) for line in lines]
    [('F_2', False, 576), ('F_2', True, 576)]
    """
    weights = {number: f"linear{number}.weight" for number in plan.layers}
    lines = []
    for matrix in plan.matrices:
        labels, blocks = _LABELS[matrix], list(weights.values())
        spectra = exact_spectra(model, images.x, images.y, labels=labels, layers=blocks, whole=plan.whole)
        shown: dict[int | None, str | None] = {None: None} if plan.whole else {}
        lines += [
            line(spectra[weight], choices.p, network=name, matrix=matrix, layer=number)
            for number, weight in (shown | weights).items()
        ]
        if plan.approximate:
            lines += _approximations(model, images, weights, name=name, matrix=matrix, choices=choices)
    return lines


def _approximations(
    model: nn.Module, images: SmallImages, weights: dict[int, str], *, name: str, matrix: str, choices: Choices
) -> list[Line]:
    batch, labels = (images.x, images.y), choices.approximate_labels
    found = condition(model, F.cross_entropy, batch, p=choices.p, labels=labels, layers=list(weights.values()))
    rows = {row["layer"]: row for row in found.rows()}
    return [
        Line(
            name,
            matrix,
            number,
            True,
            rows[weight]["lambda_f"],
            tuple(rows[weight]["kappa_f"][p] for p in choices.p),
            rows[weight]["rank_x"] * rows[weight]["rank_g"],
            rows[weight]["dimension_x"] * rows[weight]["dimension_g"],
        )
        for number, weight in weights.items()
    ]
