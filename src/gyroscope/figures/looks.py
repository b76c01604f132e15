"""Labels and scales of quantities, and names that fit next to a figure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10
from typing import Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from gyroscope.figures.log_axis import log_ticks
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

    `noisy` quantities jump from step to step: for many layers their moving mean is drawn.

    >>> look_of("rotation").scale
    'fraction'
    """

    label: str
    scale: Scale | None = None
    noisy: bool = False


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
    "lambda_x": Look(r"$\lambda_{\max}(\Sigma_x)$", "log"),
    "lambda_g": Look(r"$\lambda_{\max}(\Sigma_{\nabla h})$", "log", noisy=True),
    "lambda_f": Look(r"$\lambda_{\max}(F)$", "log", noisy=True),
    "rank_x": Look(r"rank of $\Sigma_x$"),
    "rank_g": Look(r"rank of $\Sigma_{\nabla h}$"),
    "weight_spectral": Look(r"$\sigma_{\max}(W)$", "log"),
    "gradient_spectral": Look(r"$\sigma_{\max}(\partial L/\partial W)$", "log", noisy=True),
    "domination": Look(r"$\sigma_{\max}(\partial L/\partial W)\,/\,\sigma_{\max}(W)$", "log", noisy=True),
}
_KAPPA = re.compile(r"kappa_([xgf])_p([\d.]+)")
_MATRICES = {"x": r"\Sigma_x", "g": r"\Sigma_{\nabla h}", "f": "F"}


def look_of(quantity: str, info: QuantityInfo | None = None) -> Look:
    """Return the look of a quantity; an unknown one is labeled with its name and unit.

    >>> look_of("sharpness", QuantityInfo("sharpness", "1/step", "largest curvature")).label
    'sharpness (1/step)'
    >>> look_of("kappa_f_p50").label
    '$\\\\kappa_{50\\\\%}(F)$'
    """
    if quantity in _LOOKS:
        return _LOOKS[quantity]
    if kappa := _KAPPA.fullmatch(quantity):
        return Look(rf"$\kappa_{{{kappa[2]}\%}}({_MATRICES[kappa[1]]})$", "log", noisy=True)
    unit = "" if info is None or info.unit in ("", "1") else f" ({info.unit})"
    return Look(literal(quantity.replace("_", " ") + unit))


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


def frame(ax: Axes, look: Look, values: npt.ArrayLike, *, close: bool = False) -> None:
    """Set the scale and the limits of the y axis of `ax` to suit settled `values`; see `limits`.

    >>> from matplotlib.figure import Figure
    >>> ax = Figure().subplots()
    >>> frame(ax, look_of("weight_norm"), [1.0, 10.0])
    >>> ax.get_yscale()
    'log'
    """
    low, high = limits(look, values, close=close)
    if look.scale == "log":
        ax.set_yscale("log")
        margin = (high / low) ** 0.05
        ax.set_ylim(low / margin, high * margin)
        log_ticks(ax.yaxis, low, high)
    elif look.scale == "linear":
        margin = 0.05 * (high - low)
        ax.set_ylim(low - margin, high + margin)
    else:
        ax.set_ylim(low, high)
    if look.scale == "fraction" and high > 1:
        ax.axhline(1, color="0.6", linewidth=0.8, linestyle=":", zorder=1)


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


_LONGEST = 26


def short_names(names: Sequence[str], *, longest: int = _LONGEST) -> list[str]:
    """Return `names` without a common ending ".weight", and with the middle of long names left out.

    If that makes several equal, the common beginning and end are left out instead, or parts are abbreviated.

    >>> short_names(["conv1.weight", "fc.weight"])
    ['conv1', 'fc']
    >>> short_names(["transformer.h.11.attention.c_proj"], longest=20)
    ['transforme…on.c_proj']
    >>> short_names([f"transformer.h.{i}.attention.c_proj" for i in (1, 2)], longest=20)
    ['…1…', '…2…']
    >>> short_names(["transformer.layers.1.attention.c_proj", "transformer.layers.2.attention.c_proj", "lm_head"])
    ['tran.laye.1.atte.c_pr', 'tran.laye.2.atte.c_pr', 'lm_head']
    >>> short_names([f"features.denseblock{i}.denselayer16.conv1" for i in (1, 2)] + ["classifier"])
    ['feat.dens1.dens16.conv1', 'feat.dens2.dens16.conv1', 'classifier']
    """
    if all(name.endswith(".weight") for name in names):
        names = [name.removesuffix(".weight") for name in names]
    best = [_shortened(name, longest) for name in names]
    for other in (_differing, _abbreviated, _initials):
        if len(set(best)) < len(set(names)):
            pairs = zip(names, other(names), strict=True)
            short = [name if len(name) <= longest else _shortened(brief, longest) for name, brief in pairs]
            best = short if len(set(short)) > len(set(best)) else best
    return [literal(name) for name in best]


def literal(name: str) -> str:
    r"""Return `name` escaped so that matplotlib prints it verbatim and does not parse any of it as a formula.

    Bytes of a folder's name that are not valid characters are printed as escapes.

    >>> print(literal("$x$"), literal("\udcff"))
    \$x\$ \udcff
    """
    return name.encode("utf-8", "backslashreplace").decode().replace("$", r"\$")


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` positions, evenly spread from the first to the last.

    >>> spread(5, 10), spread(100, 4)
    ([0, 1, 2, 3, 4], [0, 33, 66, 99])
    """
    if count <= most:
        return list(range(count))
    return [int(i) for i in np.linspace(0, count - 1, max(most, 2))]


def stride(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` positions at equal distances, starting with the first.

    >>> stride(5, 10), stride(100, 4)
    ([0, 1, 2, 3, 4], [0, 25, 50, 75])
    """
    return list(range(0, count, max(ceil(count / max(most, 1)), 1)))


def _differing(names: Sequence[str]) -> list[str]:
    split = [name.split(".") for name in names]
    begin, end = _alike(split), _alike([parts[::-1] for parts in split])
    # A name that consists of the common beginning and end keeps one part.
    kept = [".".join(parts[begin : max(len(parts) - end, begin + 1)]) for parts in split]
    return [f"{'…' * bool(begin)}{part}{'…' * bool(end)}" for part in kept]


def _abbreviated(names: Sequence[str], letters: int = 4) -> list[str]:
    # A number at the end of a part is kept in full: it distinguishes blocks.
    stems = [[(part, part.rstrip("0123456789")) for part in name.split(".")] for name in names]
    return [".".join(stem[:letters] + part[len(stem) :] for part, stem in parts) for parts in stems]


def _initials(names: Sequence[str]) -> list[str]:
    return _abbreviated(names, letters=2)


def _alike(split: Sequence[Sequence[str]]) -> int:
    """Return the number of leading parts that all names share, at most all but one of the shortest."""
    least = min(len(parts) for parts in split) - 1
    return next((i for i in range(least) if len({parts[i] for parts in split}) > 1), max(least, 0))


def _shortened(name: str, longest: int) -> str:
    if len(name) <= longest:
        return name
    head = longest // 2
    return f"{name[:head]}…{name[len(name) - (longest - 1 - head) :]}"
