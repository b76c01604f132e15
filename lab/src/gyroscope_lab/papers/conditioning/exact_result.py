"""What the study of full and layer-wise conditioning found, as numbers."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import gyroscope
from gyroscope.conditioning import Spectrum
from gyroscope_lab.errors import LabError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: λmax of the full Fisher matrix of the 8-layer network, as section 3 of the paper has it: "around".
PAPER_LARGEST = {"plain": 1e-5, "bn": 1.0}
#: The network those numbers belong to.
PAPER_MODEL = "mlp-8x24"


@dataclass(frozen=True)
class Line:
    """The spectrum of one matrix of one network, as a line of a figure shows it.

    Attributes:
        network: "plain", or "bn" for the batch normalized one.
        matrix: "F" for the Fisher information, "M" for the second moment of the gradients.
        layer: which block of it, 1 for the first layer; None for the whole matrix.
        approximate: whether it is Σx ⊗ Σ∇h in place of the block.
        largest: λmax.
        kappa: κ_p for each p of the study: infinite where λ_p = 0, None where λmax is too.
        rank: how many eigenvalues are above zero.
        dimension: of how many.

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


def line(
    spectrum: Spectrum,
    p: tuple[float, ...],
    *,
    network: str,
    matrix: str,
    layer: int | None = None,
) -> Line:
    """Return what is kept of the exact `spectrum` of a matrix.

    >>> import numpy as np
    >>> line(Spectrum(np.array([4.0, 2.0, 0.0]), 3), (0.5, 1.0), network="plain", matrix="F").kappa
    (2.0, inf)
    """
    kappa = tuple(spectrum.kappa(share) for share in p)
    return Line(network, matrix, layer, False, spectrum.largest, kappa, spectrum.rank, spectrum.dimension)


@dataclass(frozen=True)
class Verdict:
    """One thing the paper says, and what came out here.

    >>> Verdict("λmax of F, plain", paper="around 1e-05", here="2.1e-05", holds=True).holds
    True
    """

    says: str
    paper: str
    here: str
    holds: bool


@dataclass(frozen=True)
class Study:
    """One figure of the paper, as numbers: `lines`, one for each matrix of each network, at the shares `p`.

    `settings` is all that was chosen, by name; `data` says which images were used, `samples` how many.
    """

    figure: str
    model: str
    data: str
    samples: int
    settings: dict[str, Any]
    p: tuple[float, ...]
    lines: tuple[Line, ...]
    seconds: float

    def find(self, network: str, matrix: str = "F", layer: int | None = None, *, approximate: bool = False) -> Line:
        """Return one line; `layer` counts from 1, None is the whole matrix."""
        wanted = (network, matrix, layer, approximate)
        for one in self.lines:
            if (one.network, one.matrix, one.layer, one.approximate) == wanted:
                return one
        raise LabError(f"{self.figure} has no line {wanted}; it has {[(o.network, o.symbol) for o in self.lines]}")

    def as_json(self) -> dict[str, Any]:
        """Return every number and every setting, as what strict JSON can hold: "inf" for infinity."""
        from gyroscope_lab.papers.conditioning.exact_verdicts import verdicts

        return {
            "gyroscope": gyroscope.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "seconds": round(self.seconds, 1),
            "study": f"conditioning/{self.figure}",
            "model": self.model,
            "data": self.data,
            "samples": self.samples,
            "settings": self.settings,
            "findings": [asdict(verdict) for verdict in verdicts(self)],
            "p": list(self.p),
            "lines": [asdict(one) | {"kappa": [in_json(k) for k in one.kappa]} for one in self.lines],
        }

    def draw(self) -> Figure:
        """Return the figure."""
        from gyroscope_lab.papers.conditioning.exact_figure import draw

        return draw(self)

    def save(self, out: Path | str) -> list[Path]:
        """Write the figure (.png, .svg) and the numbers (.json) to the folder `out` and return their paths."""
        from gyroscope.figures.save import save

        written = save(self.draw(), Path(out, self.figure))
        numbers = Path(out, f"{self.figure}.json")
        text = json.dumps(self.as_json(), indent=1, ensure_ascii=False, allow_nan=False)
        numbers.write_text(text + "\n", encoding="utf-8")
        return [*written, numbers]


def in_json(kappa: float | None) -> float | str | None:
    """Return a condition number as strict JSON can hold it.

    >>> in_json(2.0), in_json(float("inf")), in_json(None)
    (2.0, 'inf', None)
    """
    return "inf" if kappa is not None and isinf(kappa) else kappa
