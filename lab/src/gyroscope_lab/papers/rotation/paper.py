"""The papers' numbers for the layer-rotation studies: test accuracies in percent, unless stated otherwise.

They are decoded from the figures where these hold them exactly, and read off them elsewhere. The tables are as printed,
except for the heads of the columns of training accuracies for α = ±0.6, which the paper has swapped (its loss curves
show so).
"""

from __future__ import annotations

#: The five tasks of table 1.
TASKS = ("c10-cnn1", "c100-resnet", "tiny-cnn", "c10-cnn2", "c100-wrn")

#: Tilt toward the last layers (`adaptive.tilt`) of the cosine distances within epochs 1 and 50, computed from the
#: authors' published records of SGD; None where no layer moves any more. They published none of adaptive methods.
SGD_TILT: dict[str, tuple[float, float | None]] = {
    "c10-cnn1": (-0.79, None), "c100-resnet": (-0.07, 0.17), "tiny-cnn": (-0.17, 0.04),
}  # fmt: skip

#: Figure 9 (arXiv): by α at ρ(0) = 3⁻³.
BY_ALPHA: dict[str, dict[float, float]] = {
    "c10-cnn1": {
        -0.8: 78.95, -0.6: 83.11, -0.4: 83.87, -0.3: 84.05, -0.2: 85.01, -0.1: 86.36, 0.0: 88.45,
        0.1: 88.87, 0.2: 88.10, 0.3: 86.44, 0.4: 83.73, 0.6: 68.67, 0.8: 50.10,
    },
    "c100-resnet": {
        -0.6: 44.26, -0.4: 44.52, -0.3: 46.89, -0.2: 49.78, -0.1: 52.42, 0.0: 59.81,
        0.1: 57.37, 0.2: 53.47, 0.3: 48.26, 0.4: 40.14, 0.6: 29.63, 0.8: 20.79,
    },
    "tiny-cnn": {
        -0.6: 40.41, -0.4: 42.03, -0.3: 41.24, -0.2: 40.59, -0.1: 44.13, 0.0: 50.89,
        0.1: 49.75, 0.2: 46.47, 0.3: 40.68, 0.4: 37.19, 0.6: 28.21, 0.8: 20.08,
    },
    "c10-cnn2": {-0.6: 92.16, 0.0: 93.40, 0.6: 86.79},
    "c100-wrn": {-0.6: 74.67, 0.0: 80.69, 0.6: 73.10},
}  # fmt: skip

#: Figure 9 (arXiv): by log₃ ρ(0) at α = 0.
BY_RATE: dict[str, dict[int, float]] = {
    "c10-cnn1": {-7: 57.11, -6: 68.61, -5: 81.01, -4: 86.04, -3: 88.45, -2: 81.91, -1: 10.10, 0: 10.00},
    "c100-resnet": {-7: 30.83, -6: 32.95, -5: 35.39, -4: 46.78, -3: 59.81, -2: 1.00, -1: 1.00, 0: 1.00},
    "tiny-cnn": {-7: 30.28, -6: 31.50, -5: 35.68, -4: 40.19, -3: 50.89, -2: 6.51, -1: 0.62, 0: 0.56},
    "c10-cnn2": {-5: 91.55, -4: 92.98, -3: 93.40},
    "c100-wrn": {-5: 75.68, -4: 78.76, -3: 80.69},
}

#: The best of Layca (α = 0, ρ(0) = 3⁻³), which differences Δη refer to.
REFERENCE: dict[str, float] = {name: BY_RATE[name][-3] for name in TASKS}

#: Differences Δη to `REFERENCE`, as figures 1 to 6 (arXiv) print them.
SGD_RATES: dict[str, dict[int, float]] = {
    "c10-cnn1": {-4: -19.92, -3: -14.73, -2: -9.73, -1: -8.77, 0: -9.06},
    "c100-resnet": {-4: -25.13, -3: -21.95, -2: -18.54, -1: -14.28, 0: -18.00},
    "tiny-cnn": {-4: -21.48, -3: -15.50, -2: -10.73, -1: -8.63, 0: -15.22},
    "c10-cnn2": {-4: -6.56, -3: -3.72, -2: -2.26, -1: -1.70, 0: -16.95},
    "c100-wrn": {-4: -6.01, -3: -4.89, -2: -3.95, -1: -4.97, 0: -29.81},
}
WEIGHT_DECAY: dict[str, float] = dict(zip(TASKS, (-0.30, 0.30, -0.85, -0.12, -0.24), strict=True))
ADAPTIVE: dict[str, float] = dict(zip(TASKS, (-3.58, -11.99, -13.17, -1.55, -1.33), strict=True))
#: The adaptive method of each task, by the first word of its recipes' names.
METHODS = dict(zip(TASKS, ("RMSprop", "Adam", "Adagrad", "RMSprop", "Adam"), strict=True))
ADAPTIVE_LAYCA: dict[str, float] = dict(zip(TASKS, (-0.20, -1.65, -0.34, 0.07, -1.05), strict=True))
LARS: dict[str, float] = {"c10-cnn1": 88.51, "c100-resnet": 59.92, "tiny-cnn": 50.96}

#: Table 2 (arXiv), training accuracies: α = −0.6, α = +0.6, ρ = 3⁻⁵, ρ = 3⁻⁴, best.
TRAIN_LAYCA: dict[str, tuple[float, float, float, float, float]] = {
    "c10-cnn1": (100.0, 99.99, 100.0, 100.0, 99.99),
    "c100-resnet": (82.09, 99.54, 99.87, 99.99, 99.75),
    "tiny-cnn": (99.98, 99.95, 99.97, 99.97, 98.91),
    "c10-cnn2": (100.0, 99.94, 99.99, 99.99, 99.97),
    "c100-wrn": (99.88, 99.91, 99.97, 99.99, 99.96),
}


def absolute(task: str, difference: float | None) -> float | None:
    """Return a difference Δη as a test accuracy.

    >>> round(absolute("c10-cnn1", WEIGHT_DECAY["c10-cnn1"]), 2)
    88.15
    """
    return None if difference is None or task not in REFERENCE else REFERENCE[task] + difference


def told(task: str, recipe: str) -> float | None:
    """Return the paper's test accuracy for a recipe by its name, None where it has none.

    >>> told("c10-cnn1", "Layca 3^-4"), told("c10-cnn1", "Layca 3^-3, alpha +0.6"), told("c10-cnn1", "LARS 3^-3")
    (86.04, 68.67, 88.51)
    >>> [round(told("c10-cnn1", name), 2) for name in ("SGD 3^-1", "SGD + L2", "RMSprop", "RMSprop-Layca 3^-3")]
    [79.68, 88.15, 84.87, 88.25]
    >>> told("c10-cnn1", "Adam"), told("digits", "Layca 3^-3, alpha +0.6")
    (None, None)
    """
    kind, _, rest = recipe.partition(" ")
    if "alpha" in rest:
        return BY_ALPHA.get(task, {}).get(float(rest.split()[-1]))
    if recipe == "SGD + L2":
        return absolute(task, WEIGHT_DECAY.get(task))
    if kind == "LARS":
        return LARS.get(task)
    power = rest.removeprefix("3^")
    if kind in ("Layca", "SGD"):
        if not power.lstrip("-").isdigit():
            return None
        rate = int(power)
        return BY_RATE.get(task, {}).get(rate) if kind == "Layca" else absolute(task, SGD_RATES.get(task, {}).get(rate))
    if kind.removesuffix("-Layca") != METHODS.get(task):
        return None
    return absolute(task, (ADAPTIVE_LAYCA if kind.endswith("-Layca") else ADAPTIVE).get(task))
