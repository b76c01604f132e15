"""Labels and scales of quantities, for figures and pages alike."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import ceil, floor, log10
from typing import Literal

import numpy as np
import numpy.typing as npt

from gyroscope.store.record import QuantityInfo

Scale = Literal["fraction", "signed", "log", "linear"]

# Decades below the largest value at which an axis ends: following tiny values down would flatten the rest.
_DECADES = 8
# A logarithmic axis that spans less than this factor has too few round numbers on it.
_VARIES = 3
# Values that vary by less than this share count as constant.
_STAYS = 0.02


@dataclass(frozen=True)
class Look:
    """A label and a scale: "fraction" is 0 to 1 (or to the largest value), "signed" is symmetric around 0.

    `noisy` quantities jump from step to step: for many layers their moving mean is drawn. The label is plain text; some
    have a `formula` in addition, as matplotlib typesets it.

    >>> look_of("rotation").scale
    'fraction'
    >>> print(look_of("lambda_x").label, look_of("lambda_x").drawn)
    λmax(Σx) $\\lambda_{\\max}(\\Sigma_x)$
    """

    label: str
    scale: Scale | None = None
    noisy: bool = False
    formula: str | None = None

    @property
    def drawn(self) -> str:
        """The label for matplotlib."""
        return literal(self.label) if self.formula is None else self.formula


_LOOKS = {
    "rotation": Look("rotation (cosine distance)", "fraction"),
    "rate": Look("rotation since the last measurement (rad)", "log", noisy=True),
    "rate_per_step": Look("net rotation (rad per step)", "log", noisy=True),
    "weight_norm": Look("weight norm ‖w‖", "log"),
    "weight_norm_before": Look("weight norm before the step", "log"),
    "gradient_norm": Look("gradient norm ‖g‖", "log", noisy=True),
    "update_norm": Look("update norm ‖Δw‖", "log", noisy=True),
    "update_ratio": Look("update ratio ‖Δw‖/‖w‖", "log", noisy=True),
    "effective_lr": Look("effective learning rate η/‖w‖²", "log"),
    "effective_lr_measured": Look("effective learning rate, measured", "log", noisy=True),
    "alignment": Look("alignment of consecutive updates", "signed", noisy=True),
    "invariance": Look("⟨w, g⟩ / (‖w‖ ‖g‖)", "signed", noisy=True),
    "lr": Look("learning rate η", "log"),
    "weight_decay": Look("weight decay λ", "log"),
    "moment_p10": Look("second moment, 10th percentile", "log"),
    "moment_p50": Look("second moment, median", "log"),
    "moment_p90": Look("second moment, 90th percentile", "log"),
    "neuron_p0": Look("rotation of the least rotated neuron", "fraction"),
    "neuron_p10": Look("rotation of neurons, 10th percentile", "fraction"),
    "neuron_p50": Look("rotation of neurons, median", "fraction"),
    "neuron_p90": Look("rotation of neurons, 90th percentile", "fraction"),
    "neuron_p100": Look("rotation of the most rotated neuron", "fraction"),
    "dying": Look("dying neurons (fraction)", "fraction"),
    "full": Look("full neurons (fraction)", "fraction"),
    "dying_channels": Look("dying channels (fraction)", "fraction"),
    "full_channels": Look("full channels (fraction)", "fraction"),
    "nu": Look("ν = ‖m‖² + 1", "log"),
    "lambda_x": Look("λmax(Σx)", "log", formula=r"$\lambda_{\max}(\Sigma_x)$"),
    "lambda_g": Look("λmax(Σ∇h)", "log", noisy=True, formula=r"$\lambda_{\max}(\Sigma_{\nabla h})$"),
    "lambda_f": Look("λmax(F)", "log", noisy=True, formula=r"$\lambda_{\max}(F)$"),
    "rank_x": Look("rank of Σx", formula=r"rank of $\Sigma_x$"),
    "rank_g": Look("rank of Σ∇h", formula=r"rank of $\Sigma_{\nabla h}$"),
    "weight_spectral": Look("σmax(W)", "log", formula=r"$\sigma_{\max}(W)$"),
    "gradient_spectral": Look("σmax(∂L/∂W)", "log", noisy=True, formula=r"$\sigma_{\max}(\partial L/\partial W)$"),
    "domination": Look(
        "σmax(∂L/∂W) / σmax(W)",
        "log",
        noisy=True,
        formula=r"$\sigma_{\max}(\partial L/\partial W)\,/\,\sigma_{\max}(W)$",
    ),
}
_KAPPA = re.compile(r"kappa_([xgf])_p([\d.]+)")
_MATRICES = {"x": ("Σx", r"\Sigma_x"), "g": ("Σ∇h", r"\Sigma_{\nabla h}"), "f": ("F", "F")}


def look_of(quantity: str, info: QuantityInfo | None = None) -> Look:
    """Return the look of a quantity; an unknown one is labeled with its name and unit.

    >>> look_of("sharpness", QuantityInfo("sharpness", "1/step", "largest curvature")).label
    'sharpness (1/step)'
    >>> look_of("kappa_f_p50").label
    'κ50(F)'
    """
    if quantity in _LOOKS:
        return _LOOKS[quantity]
    if kappa := _KAPPA.fullmatch(quantity):
        matrix, symbol = _MATRICES[kappa[1]]
        formula = rf"$\kappa_{{{kappa[2]}\%}}({symbol})$"
        return Look(f"κ{kappa[2]}({matrix})", "log", noisy=True, formula=formula)
    unit = "" if info is None or info.unit in ("", "1") else f" ({info.unit})"
    return Look(quantity.replace("_", " ") + unit)


def settle(look: Look, values: npt.ArrayLike) -> Look:
    """Return `look` with a scale that suits `values`: not logarithmic if none is positive or they hardly vary.

    >>> settle(Look("mine"), [1.0, 1000.0]).scale, settle(Look("mine"), [-1.0, 1.0]).scale
    ('log', 'linear')
    >>> settle(look_of("gradient_norm"), [0.0, 0.0]).scale
    'linear'
    """
    known = _known(values)
    positive = known[known > 0]
    if look.scale is None:
        wide = bool(known.size) and known.min() > 0 and known.max() > 100 * known.min()
        return replace(look, scale="log" if wide else "linear")
    if look.scale == "log" and (not positive.size or positive.max() < _VARIES * positive.min()):
        return replace(look, scale="linear")
    return look


def limits(look: Look, values: npt.ArrayLike, *, close: bool = False) -> tuple[float, float]:
    """Return the limits of the axis, or of the colors, for settled `values`.

    Fractions range from 0 to 1, or beyond 1 if the values do; with `close`, the upper limit may be below 1.

    >>> limits(look_of("rotation"), [0.0, 0.4]), limits(look_of("rotation"), [0.0, 1.23])
    ((0.0, 1.0), (0.0, 1.3))
    >>> limits(look_of("rotation"), [0.0, 0.04], close=True)
    (0.0, 0.05)
    >>> limits(look_of("alignment"), [-0.2, 0.1])
    (-1.0, 1.0)
    """
    known = _known(values)
    if look.scale == "fraction":
        largest = float(known.max(initial=0))
        return 0.0, _round_above(largest) if close and largest <= 0.5 else _beyond_one(largest)
    if look.scale == "signed":
        return -1.0, 1.0
    if look.scale == "log":
        positive = known[known > 0]
        high = float(positive.max())
        low = max(float(positive.min()), high * 10.0**-_DECADES)
        return (low, high) if low < high else (low / 2, high * 2)
    if not known.size:
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    # Rounding of constant values must not fill the axis.
    margin = max(_STAYS * max(abs(low), abs(high)) - (high - low), 0) / 2
    return (low - margin, high + margin) if low < high or margin else (low - 0.5, high + 0.5)


def literal(name: str) -> str:
    r"""Return `name` escaped so that matplotlib prints it verbatim and does not parse any of it as a formula.

    Bytes of a folder's name that are not valid characters are printed as escapes.

    >>> print(literal("$x$"), literal("\udcff"))
    \$x\$ \udcff
    """
    return name.encode("utf-8", "backslashreplace").decode().replace("$", r"\$")


def _beyond_one(largest: float) -> float:
    # A cosine distance reaches 2. Rounding just above 1 does not extend the axis of the paper.
    return 1.0 if largest <= 1.005 else min(ceil(10 * largest - 0.001) / 10, 2.0)


def _round_above(largest: float) -> float:
    if largest <= 0:
        return 1.0
    unit = 10.0 ** floor(log10(largest))
    return float(f"{next(unit * digit for digit in (1, 2, 5, 10) if unit * digit >= largest):.1g}")


def _known(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    array = np.asarray(values, dtype=float)
    known: npt.NDArray[np.float64] = array[np.isfinite(array)]
    return known
