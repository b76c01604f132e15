"""A recorded run explained by the theory: scale invariance, effective learning rates, equilibria, weight decay."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gyroscope.base.accepted import listed
from gyroscope.diagnose.explain_decay import decay_statement, equilibrium_statement
from gyroscope.diagnose.explain_evidence import Evidence, evidence, resumed_at
from gyroscope.diagnose.explain_law import law_statement
from gyroscope.diagnose.explain_measure import orthogonality_of
from gyroscope.diagnose.explain_result import Explanation, LayerExplanation
from gyroscope.diagnose.explain_scale import change, rate_statement, scale_statement
from gyroscope.diagnose.explain_statement import TOPICS, Statement
from gyroscope.store import Run, load
from gyroscope.theory.errors import DynamicsError
from gyroscope.theory.invariance_result import Invariance, LayerInvariance

if TYPE_CHECKING:  # runs are explained without torch
    from torch import nn

__all__ = ["TOPICS", "Explanation", "LayerExplanation", "Statement", "explain"]


def explain(
    run: Run | str | Path,
    *,
    layers: str | Iterable[str] | None = None,
    model: nn.Module | None = None,
    loss: Any = None,
    batch: Any = None,
    invariance: Invariance | None = None,
) -> Explanation:
    """Say what the layers of a run did, by sections 4.3 and 5 of Grosse's chapter, where measurements support it.

    Of each layer, in this order, since each rests on those before it:

    1. scale invariance: ⟨w,∇⟩ = 0 at every step (equation 16 with k = 0);
    2. effective learning rate: α/‖w‖² beside α, and what the norm's growth did to it;
    3. implicit decay: the law 1/√(1 + k/k₀) fitted to it (equation 19);
    4. equilibrium: whether decay takes as much norm as steps add, so that the layer turns by √(2αλ) a step (equations
       23 to 25; with momentum √(2αλ/(1+β)), for AdamW √(2αλ(1−β₁)/(1+β₁)));
    5. weight decay: by which of its three mechanisms it can act (sections 5.1 to 5.3).

    Each is a `Statement` with a verdict: "yes" or "no" where the run says so; "does not apply" because of something
    that is measured or recorded; "undecided" for want of a measurement, and then which.

    Args:
        run: a run, or its folder.
        layers: glob patterns on names; all unless given.
        model, loss, batch: the model, to see also whether each unit is scale-invariant by itself, as
            `gyroscope.theory.invariance` finds out; left as it is.
        invariance: or what that has found.

    Raises:
        DynamicsError: an argument cannot be treated, or no layer has such a name.
        StoreError: there is no run, or it cannot be read.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(f"{folder}/first") as opened:
    ...     print(explain(opened, layers="conv1*")["conv1.weight"].about("scale invariance"))
    scale invariance: undecided. The run has no series invariance; gyroscope.watch records it unless quantities= leaves
    it out. (equation 16)
    """
    if isinstance(run, str | Path):
        with load(run) as opened:
            return explain(opened, layers=layers, model=model, loss=loss, batch=batch, invariance=invariance)
    if not isinstance(run, Run):
        raise DynamicsError(f"run is {type(run).__name__}; accepted is what gyroscope.load gives, or a run's folder.")
    chosen = _chosen(run, layers)
    units = _units(run, model, loss, batch, invariance)
    entries = [_entry(one, units.get(one.info.name)) for one in evidence(run, chosen)]
    return Explanation(run.name, tuple(entries), len(run.steps), resumed_at(run))


def _entry(layer: Evidence, unit: LayerInvariance | None) -> LayerExplanation:
    seen = orthogonality_of(layer)
    scale, short = scale_statement(layer, seen, unit)
    invariant = {"yes": True, "no": False}.get(scale.verdict)
    moved = change(layer)
    rate = rate_statement(layer, invariant, moved)
    law, k0, r2 = law_statement(layer, invariant)
    rest, balance = equilibrium_statement(layer, invariant)
    decay, mechanisms = decay_statement(layer, invariant)
    shown = moved if rate.verdict == "yes" else None
    lr, decays = (one[layer.since :] for one in (layer.lr, layer.decay))
    lr, decays = lr[lr > 0], decays[np.isfinite(decays)]
    return LayerExplanation(
        layer=layer.info.name,
        kind=layer.info.kind,
        optimizer=layer.optimizer.name,
        scale_invariant=short,
        deviation=_known(seen.median),
        lr_first=float(lr[0]) if len(lr) else None,
        lr_last=float(lr[-1]) if len(lr) else None,
        effective_first=None if shown is None else shown.effective[0],
        effective_last=None if shown is None else shown.effective[1],
        implicit_factor=None if shown is None else shown.implicit,
        k0=_known(k0),
        law_r2=_known(r2),
        weight_decay=float(decays[-1]) if len(decays) else None,
        half_life=None if balance is None else _known(balance.predicted.half_life),
        steps_to_equilibrium=None if balance is None else _known(balance.until),
        predicted_rate=None if balance is None else balance.predicted.rate,
        measured_rate=None if balance is None else balance.rate,
        predicted_norm=None if balance is None else _known(balance.predicted.norm),
        measured_norm=None if balance is None else balance.norm,
        at_equilibrium=rest.verdict,
        mechanisms=mechanisms,
        statements=(scale, rate, law, rest, decay),
    )


def _known(value: float) -> float | None:
    return value if isfinite(value) else None


def _chosen(run: Run, layers: str | Iterable[str] | None) -> list[int]:
    patterns = ["*"] if layers is None else listed(layers)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise DynamicsError(f"layers is {layers!r}; accepted are glob patterns on the names of layers, one or more.")
    chosen = [i for i, name in enumerate(run.layers) if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not chosen:
        raise DynamicsError(f"layers is {layers!r}; none of {', '.join(run.layers) or 'no layers'} is called so.")
    return chosen


def _units(
    run: Run, model: nn.Module | None, loss: Any, batch: Any, found: Invariance | None
) -> dict[str, LayerInvariance]:
    if model is None and (loss is not None or batch is not None):
        raise DynamicsError("A loss or a batch was given without a model; give all three, or none.")
    if model is not None:
        if found is not None:
            raise DynamicsError("model and invariance were both given; give the model, or what was found of it.")
        if loss is None or batch is None:
            raise DynamicsError("A model was given without a loss or a batch; give all three, or invariance=.")
        from gyroscope.layers.layer import layers
        from gyroscope.theory.invariance import invariance

        found = invariance(model, loss, batch)
        theirs = {info.name: tuple(info.shape) for info in run.layer_table}
        for layer in layers(model):
            shape = tuple(layer.parameter.shape)
            if theirs.get(layer.name, shape) != shape:
                raise DynamicsError(
                    f"The layer {layer.name} has shape {shape} in the model and {theirs[layer.name]} in the run: it is "
                    "of another model. Pass the model that was recorded."
                )
    if found is None:
        return {}
    if not isinstance(found, Invariance):
        raise DynamicsError(f"invariance is a {type(found).__name__}; accepted is what gyroscope.invariance gives.")
    if not set(found.layers) & set(run.layers):
        raise DynamicsError(
            f"The model has the layers {', '.join(found.layers[:3])}, … and the run {', '.join(run.layers[:3])}, …: it "
            "is of another model."
        )
    return {entry.layer: entry for entry in found.entries}
