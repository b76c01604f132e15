"""Predictions of the theory for each layer of a run, to be compared with its measurements."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import degrees, inf, isfinite, nan, prod, sqrt
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gyroscope.diagnosis.evidence import require_run
from gyroscope.diagnosis.scale_invariance import ENOUGH, scale_invariant
from gyroscope.errors import MonitorError
from gyroscope.store.record import LayerInfo
from gyroscope.theory.effective_rate import Floats, Kind, Law, decay_law, effective_lr
from gyroscope.theory.equilibrium import Equilibrium, Memory, equilibrium
from gyroscope.theory.recurrence import CONTROLLERS, optimizers_in, recurrence_of

__all__ = [
    "Equilibrium",
    "Law",
    "Prediction",
    "decay_law",
    "effective_lr",
    "equilibrium",
    "in_words",
    "predictions",
    "scale_invariant",
]


class Measured(Protocol):
    """The part of a run that predictions are made from."""

    @property
    def layers(self) -> Sequence[str]: ...
    @property
    def layer_table(self) -> Sequence[LayerInfo]: ...
    @property
    def steps(self) -> npt.NDArray[np.int64]: ...
    @property
    def quantities(self) -> Mapping[str, Any]: ...
    @property
    def meta(self) -> Mapping[str, Any]: ...
    def series(self, name: str) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True)
class Prediction:
    """Prediction of the theory for one layer; NaN where there is none.

    Attributes:
        layer: the layer's name.
        scale_invariant: True if only the direction of its weights matters; None if that is undecided.
        effective_lr: η/‖w‖² at the run's steps [S].
        law_k0: k₀ of the fitted decay law of the effective learning rate, in steps at the largest learning rate.
        law_r2: R² of the fit.
        law: the fitted values at the run's steps [S], to be compared with `effective_lr`.
        equilibrium_rate: the rotation rate, in radians per step, that weight decay leads to.
        equilibrium_norm: the norm it leads to.
        half_life: the half-life of the approach, in steps.
        kind: the theory that was used, "sgd" or "adamw"; None if there is none for the optimizer.
    """

    layer: str
    scale_invariant: bool | None
    effective_lr: Floats
    law_k0: float
    law_r2: float
    law: Floats
    equilibrium_rate: float
    equilibrium_norm: float
    half_life: float
    kind: Kind | None = None


def predictions(run: Measured, layers: Collection[str] | None = None) -> list[Prediction]:
    """Return the predictions for every layer of a run, or for those with the given names, in the run's order.

    They are made from the series `lr`, `weight_decay`, `weight_norm`, `gradient_norm` and `invariance`, and from
    `run.meta["optimizers"]`, one dict per optimizer: its `class` and its options. Only scale-invariant layers have a
    law and an equilibrium, under SGD (with any momentum), AdamW, and Adam and RMSprop without weight decay. The
    equilibrium is that of the last learning rate and weight decay above zero; its norm takes ‖∇‖‖w‖ from the run's
    later half.

    Raises:
        MonitorError: the run holds no weight norms, or has no layer of a given name.

    >>> from types import SimpleNamespace
    >>> k = np.arange(50)[:, None]
    >>> values = {"lr": 0.1 + 0 * k, "weight_norm": (1 + k / 20) ** 0.25, "invariance": 1e-8 * (-1.0) ** k}
    >>> run = SimpleNamespace(
    ...     layers=("conv1",), layer_table=(LayerInfo("conv1", "conv", (8, 3, 3, 3)),), steps=k[:, 0],
    ...     quantities=values, series=values.get, meta={"optimizers": [{"class": "SGD"}]},
    ... )
    >>> print(in_words(predictions(run)[0]))
    conv1 is scale-invariant, so only its direction matters. Without weight decay its norm grows, and its effective
    learning rate decays on its own, to a half after 60 steps (R² 1.00).
    """
    require_run(run)
    wanted = None if layers is None else [layers] if isinstance(layers, str) else list(layers)
    unknown = [name for name in wanted or () if name not in run.layers]
    if unknown:
        raise MonitorError(f"`layers` must name layers of the run, got {unknown[0]!r}. Try {run.layers[0]!r}.")
    if "weight_norm" not in run.quantities:
        raise MonitorError(
            "This run holds no weight norms, which predictions need. Record the quantities weight_norm, gradient_norm, "
            "invariance, lr and weight_decay, as gyroscope.watch does by default."
        )
    count, empty = len(run.layers), np.full((len(run.steps), len(run.layers)), nan)

    def held(name: str) -> Floats:
        return run.series(name).astype(np.float64) if name in run.quantities else empty

    table = getattr(run, "layer_table", ())
    sizes: list[int] | None = [prod(layer.shape) for layer in table] if table else None
    optimizers = [_optimizer(run, table[i].part if table else 0) for i in range(count)]
    found = scale_invariant(held("invariance"), sizes)
    columns = [np.ascontiguousarray(held(name).T) for name in ("lr", "weight_decay", "weight_norm", "gradient_norm")]
    return [
        _predict(run.layers[i], found[i], run.steps, optimizers[i], *(column[i] for column in columns), size=size)
        for i, size in enumerate(sizes or [None] * count)
        if wanted is None or run.layers[i] in wanted
    ]


def _predict(
    layer: str,
    invariant: bool | None,
    steps: npt.NDArray[np.int64],
    optimizer: Mapping[str, Any],
    lr: Floats,
    decay: Floats,
    norm: Floats,
    gradient: Floats,
    *,
    size: int | None,
) -> Prediction:
    nothing, rule = np.full(len(steps), nan), recurrence_of(optimizer)
    rates = nothing if optimizer.get("class") in CONTROLLERS else effective_lr(lr, norm)
    law, at = Law(nan, nan, nan, nothing), Equilibrium(nan, nan, nan)
    acts = bool((decay > 0).any())
    if invariant and rule is not None and (rule.decays or not acts):
        shrinkage = Memory.of(rule.kind, **rule.options).shrinkage(lr, np.nan_to_num(decay))
        law = decay_law(steps, rates, lr=lr, shrinkage=shrinkage, kind=rule.kind)
        pulled = np.flatnonzero((lr > 0) & (decay > 0))
        if len(pulled) and lr[pulled[-1]] * decay[pulled[-1]] < 1:  # else a step takes all of the weights
            later = (gradient * norm)[len(steps) // 2 :]
            seen = later[np.isfinite(later)]
            turns = sqrt(float(np.square(seen).mean())) if len(seen) else None
            pull = turns if rule.kind == "sgd" else None if size is None else sqrt(size)
            last = pulled[-1]
            at = equilibrium(float(lr[last]), float(decay[last]), kind=rule.kind, gradient=pull, **rule.options)
    return Prediction(layer, invariant, rates, law.k0, law.r2, law.curve, *at, kind=None if rule is None else rule.kind)


def _optimizer(run: Measured, part: int) -> Mapping[str, Any]:
    given = optimizers_in(getattr(run, "meta", {}))
    return given[part] if part < len(given) else {}


def in_words(prediction: Prediction) -> str:
    """Return a prediction as text.

    >>> nothing = np.full(3, np.nan)
    >>> print(in_words(Prediction("conv1", True, nothing, nan, nan, nothing, 0.01, 3.2, 3466.0, "sgd")))
    conv1 is scale-invariant, so only its direction matters. With this weight decay it will turn by 0.01 rad (0.57°) per
    step at a norm of 3.2; the half-life of the approach is 3466 steps.
    """
    name, at = prediction.layer, prediction.equilibrium_rate
    if prediction.scale_invariant is None:
        return (
            f"It is undecided whether {name} is scale-invariant: its gradient was measured at fewer than {ENOUGH} "
            "steps, or is only nearly orthogonal to its weights."
        )
    if not prediction.scale_invariant:
        return f"{name} is not scale-invariant: its norm matters, and the laws of normalized layers do not hold."
    start = f"{name} is scale-invariant, so only its direction matters."
    if isfinite(at) and at > 0:
        norm = f" at a norm of {prediction.equilibrium_norm:.3g}" if isfinite(prediction.equilibrium_norm) else ""
        return (
            f"{start} With this weight decay it will turn by {at:.3g} rad ({degrees(at):.2f}°) per step{norm}; the "
            f"half-life of the approach is {prediction.half_life:.0f} steps."
        )
    if prediction.law_k0 == inf:
        return f"{start} Its norm does not grow, and its effective learning rate does not decay."
    if isfinite(prediction.law_k0):
        # Adam's steps do not shrink as the norm grows: its effective learning rate is η/‖w‖, which has the same law.
        halved = 3 * prediction.law_k0
        return (
            f"{start} Without weight decay its norm grows, and its effective learning rate decays on its own, to a "
            f"half after {halved:.0f} steps (R² {prediction.law_r2:.2f})."
        )
    return f"{start} There is no theory for its norm under this optimizer."
