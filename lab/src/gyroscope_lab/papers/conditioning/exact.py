"""Full and layer-wise conditioning of small perceptrons: figures 1, 2 and A1 to A4 of the conditioning paper.

Huang, Qin, Liu, Zhu, Shao: Layer-wise Conditioning Analysis in Exploring the Learning Dynamics of DNNs (2020),
section 3 and appendix B. Perceptrons small enough for their whole Fisher matrix F, with batch normalization and
without, before training: does the spectrum of each layer's block F_k tell what that of F does (figures 1, A1), also of
the second moments M (A2) and in networks of other sizes (A3, A4)? And does Σx ⊗ Σ∇h tell what F_k does (figure 2)?

The paper leaves open how many images it takes, how they are normalized, whether the normalization of its networks
has a gain, and what "the gradient of a sample" is under batch normalization: `Choices` has what is chosen here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, TypedDict, Unpack

from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.conditioning.choices import Choices, Plan, union
from gyroscope_lab.papers.conditioning.exact_measure import measure, network
from gyroscope_lab.papers.conditioning.exact_result import Line, Study
from gyroscope_lab.papers.conditioning.small_images import small_images

__all__ = [
    "PLANS",
    "SAMPLES",
    "Choices",
    "Plan",
    "Study",
    "a1",
    "a2",
    "a3",
    "a4",
    "fig1",
    "fig2",
    "reproduce",
    "reproduce_all",
]

Scale = Literal["smoke", "small", "full"]

#: How many images each scale takes. More hardly move λmax: they raise the smallest eigenvalues.
SAMPLES: dict[str, int] = {"smoke": 200, "small": 2_000, "full": 10_000}

#: The figures.
PLANS: dict[str, Plan] = {
    "fig1": Plan("mlp-8x24", layers=(3, 6)),
    "fig2": Plan("mlp-8x24", layers=(1, 2, 3, 4, 5, 6, 7, 8), whole=False, approximate=True),
    "a1": Plan("mlp-8x24", layers=(1, 2, 3, 4, 5, 6, 7, 8)),
    "a2": Plan("mlp-8x24", ("M",), layers=(1, 2, 3, 4, 5, 6, 7, 8)),
    "a3": Plan("mlp-4x24", ("F", "M"), layers=(1, 2, 3, 4)),
    "a4": Plan("mlp-4x36", ("F", "M"), layers=(1, 2, 3, 4)),
}


class Options(TypedDict, total=False):
    """What every figure can be told; see `reproduce_all`."""

    scale: Scale
    data: Path | str | None
    seed: int
    out: Path | str | None
    choices: Choices


def reproduce(figure: str, **options: Unpack[Options]) -> Study:
    """Make one figure of `PLANS` again and return its numbers; see `reproduce_all` for the options.

    >>> study = reproduce("a3", choices=Choices(samples=20))
    >>> study.data, study.samples, study.find("plain").dimension
    ('digits', 20, 4848)
    """
    return reproduce_all([figure], **options)[figure]


def reproduce_all(
    figures: Sequence[str] = tuple(PLANS),
    *,
    scale: Scale = "small",
    data: Path | str | None = None,
    seed: int = 0,
    out: Path | str | None = None,
    choices: Choices = Choices(),  # noqa: B008  (frozen)
) -> dict[str, Study]:
    """Make figures of the paper again, by name; what several of them show is measured once.

    Each shows the plain and the batch normalized network.

    Args:
        figures: some of `PLANS`.
        scale: how many images: "smoke" is 200 and takes seconds, "small" 2,000 and minutes, "full" 10,000.
        data: the folder of MNIST; without it scikit-learn's 1,797 digits stand in, and the result says so.
        seed: of the weights; both networks start from the same.
        out: a folder to write the figures (.png, .svg) and the numbers (.json) to.
        choices: what the paper leaves open.

    >>> list(reproduce_all(["fig1", "a1"], choices=Choices(samples=20)))
    ['fig1', 'a1']
    """
    for figure in figures:
        if figure not in PLANS:
            raise LabError(f"no figure is called {figure!r}; there are: {', '.join(PLANS)}")
    if scale not in SAMPLES:
        raise LabError(f"scale is {scale!r}; it can be {', '.join(map(repr, SAMPLES))}")
    count = SAMPLES[scale] if choices.samples is None else choices.samples
    images = small_images(count, data=data, crop=choices.crop, normalization=choices.normalization)
    settings = {"scale": scale, "seed": seed, **asdict(choices), "p": list(choices.p)}
    studies: dict[str, Study] = {}
    for model in dict.fromkeys(PLANS[figure].model for figure in figures):
        start = time.perf_counter()
        shown = {figure: PLANS[figure] for figure in figures if PLANS[figure].model == model}
        lines: list[Line] = []
        for name in ("plain", "bn"):
            made = network(model, images, batch_norm=name == "bn", seed=seed, choices=choices)
            lines += measure(made, images, union(list(shown.values())), name=name, choices=choices)
        seconds = time.perf_counter() - start
        for figure, plan in shown.items():
            chosen = tuple(line for line in lines if plan.shows(line.matrix, line.layer, line.approximate))
            studies[figure] = Study(figure, model, images.name, len(images.x), settings, choices.p, chosen, seconds)
            if out is not None:
                studies[figure].save(out)
    return {figure: studies[figure] for figure in figures}


def fig1(**options: Unpack[Options]) -> Study:
    """Figure 1: F of the 8-layer network, and the blocks of its layers 3 and 6.

    >>> study = fig1(choices=Choices(samples=20))
    >>> study.find("plain").largest < 1e-3 < 0.1 < study.find("bn").largest
    True
    """
    return reproduce("fig1", **options)


def fig2(**options: Unpack[Options]) -> Study:
    """Figure 2: each block of F beside its approximation Σx ⊗ Σ∇h (of all eight layers).

    >>> study = fig2(choices=Choices(samples=20))
    >>> exact, near = (study.find("bn", layer=6, approximate=approximate) for approximate in (False, True))
    >>> exact.dimension == near.dimension
    True
    """
    return reproduce("fig2", **options)


def a1(**options: Unpack[Options]) -> Study:
    """Figure A1: figure 1 with the blocks of all layers.

    >>> {line.symbol for line in a1(choices=Choices(samples=20)).lines} == {"F", *(f"F_{k}" for k in range(1, 9))}
    True
    """
    return reproduce("a1", **options)


def a2(**options: Unpack[Options]) -> Study:
    """Figure A2: the same of M, the second moments of the gradients for the true labels.

    >>> a2(choices=Choices(samples=20)).find("bn", "M").rank
    20
    """
    return reproduce("a2", **options)


def a3(**options: Unpack[Options]) -> Study:
    """Figure A3: F and M of networks of 4 layers of 24 units.

    >>> len(a3(choices=Choices(samples=20)).lines)
    20
    """
    return reproduce("a3", **options)


def a4(**options: Unpack[Options]) -> Study:
    """Figure A4: F and M of networks of 4 layers of 36 units.

    >>> a4(choices=Choices(samples=20)).find("plain", "M").dimension
    8136
    """
    return reproduce("a4", **options)
