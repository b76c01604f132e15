"""A recorded run explained by the theory: scale invariance, effective learning rates, equilibria, weight decay."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from math import isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gyroscope.base.accepted import listed
from gyroscope.base.by_layer import ByLayer
from gyroscope.diagnosis.evidence import Evidence, evidence, resumed_at
from gyroscope.diagnosis.scale_invariance import orthogonality
from gyroscope.diagnosis.statements import (
    TOPICS,
    Statement,
    Topic,
    Verdict,
    change,
    decay_statement,
    equilibrium_statement,
    law_statement,
    number,
    rate_statement,
    scale_statement,
    times,
)
from gyroscope.errors import DynamicsError
from gyroscope.store import Run, load
from gyroscope.theory.invariance_result import Invariance, LayerInvariance

if TYPE_CHECKING:  # runs are explained without torch
    from torch import nn


__all__ = ["TOPICS", "Explanation", "LayerExplanation", "Statement", "explain"]

#: The columns of the table.
HEADS = ["layer", "scale-invariant", "η", "effective η", "norm factor", "k₀", "rate", "predicted", "equilibrium"]

_WIDTH = 110


def explain(
    run: Run | str | Path,
    *,
    layers: str | Iterable[str] | None = None,
    model: nn.Module | None = None,
    loss: Any = None,
    batch: Any = None,
    invariance: Invariance | None = None,
) -> Explanation:
    """Explain what the layers of a run did, by sections 4.3 and 5 of Grosse's chapter.

    Each layer gets one statement per topic. Each statement rests on those before it:

    1. scale invariance: ⟨w,∇⟩ = 0 at every step (equation 16 with k = 0);
    2. effective learning rate: η/‖w‖² compared with η, and the effect of the norm's growth on it;
    3. implicit decay: the law 1/√(1 + k/k₀) fitted to it (equation 19);
    4. equilibrium: whether decay takes as much norm as steps add, so that the layer turns by √(2ηλ) per step (equations
       23 to 25; with momentum √(2ηλ/(1+β)), for AdamW √(2ηλ(1−β₁)/(1+β₁)));
    5. weight decay: by which of its three mechanisms it can act (sections 5.1 to 5.3).

    The chapter writes α for the learning rate η. Each `Statement` has a verdict: "yes" or "no" if the run decides it;
    "does not apply" with the measured or recorded reason; "undecided" with the measurement that is missing.

    Args:
        run: a run, or its folder.
        layers: glob patterns on the names of layers; all layers if None.
        model, loss, batch: find out with `gyroscope.theory.invariance` whether each unit is scale-invariant on its own.
            The model is left as it was.
        invariance: the result of `gyroscope.theory.invariance`, instead of `model`, `loss` and `batch`.

    Raises:
        DynamicsError: an argument is invalid, or no layer matches.
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
        raise DynamicsError(
            f"`run` must be a run or its folder, got {type(run).__name__}. Try gyroscope.load('runs/first')."
        )
    chosen = _chosen(run, layers)
    units = _units(run, model, loss, batch, invariance)
    entries = [_entry(one, units.get(one.info.name)) for one in evidence(run, chosen)]
    return Explanation(run.name, tuple(entries), len(run.steps), resumed_at(run))


def _entry(layer: Evidence, unit: LayerInvariance | None) -> LayerExplanation:
    seen = orthogonality(layer.cosine, prod(layer.info.shape))
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
        raise DynamicsError(f"`layers` must be one or more glob patterns on layer names, got {layers!r}. Try 'conv*'.")
    chosen = [i for i, name in enumerate(run.layers) if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not chosen:
        raise DynamicsError(f"`layers` must match a layer of the run, got {layers!r}. It has {', '.join(run.layers)}.")
    return chosen


def _units(
    run: Run, model: nn.Module | None, loss: Any, batch: Any, found: Invariance | None
) -> dict[str, LayerInvariance]:
    if model is None and (loss is not None or batch is not None):
        raise DynamicsError("A loss or a batch was given without a model. Pass `model`, `loss` and `batch`, or none.")
    if model is not None:
        if found is not None:
            raise DynamicsError("Both `model` and `invariance` were given. Pass only one of them.")
        if loss is None or batch is None:
            raise DynamicsError(
                "A model was given without a loss or a batch. Pass `model`, `loss` and `batch`, or `invariance`."
            )
        from gyroscope.layers.layer import layers
        from gyroscope.theory.invariance import invariance

        found = invariance(model, loss, batch)
        theirs = {info.name: tuple(info.shape) for info in run.layer_table}
        for layer in layers(model):
            shape = tuple(layer.parameter.shape)
            if theirs.get(layer.name, shape) != shape:
                raise DynamicsError(
                    f"The layer {layer.name} has shape {shape} in the model and {theirs[layer.name]} in the run: the "
                    "run is of another model. Pass the model that was recorded."
                )
    if found is None:
        return {}
    if not isinstance(found, Invariance):
        raise DynamicsError(
            f"`invariance` must be the result of gyroscope.invariance, got {type(found).__name__}. Pass `model`, "
            "`loss` and `batch` instead."
        )
    if not set(found.layers) & set(run.layers):
        raise DynamicsError(
            f"The model has the layers {', '.join(found.layers[:3])}, … and the run {', '.join(run.layers[:3])}, …: "
            "the run is of another model. Pass the model that was recorded."
        )
    return {entry.layer: entry for entry in found.entries}


@dataclass(frozen=True)
class LayerExplanation:
    """Explanation of one layer; a number that does not apply or is undecided is None, and `statements` say why.

    Attributes:
        layer, kind: its name and kind.
        optimizer: the name of its optimizer.
        scale_invariant: with a model, "unit" if each unit is invariant on its own and "tensor" if only the weights as a
            whole are; "yes" from a run alone, which cannot tell units apart; "no", or "undecided" and why.
        deviation: the median of √n|⟨w,∇⟩|/(‖w‖‖∇‖): zero for a scale-invariant layer, 0.67 for unrelated directions.
        lr_first, lr_last: η at the first and the last measured step at which it is above zero.
        effective_first, effective_last: η/‖w‖² there (for Adam-like optimizers η/‖w‖).
        implicit_factor: the factor by which the norm alone changed it.
        k0, law_r2: k₀ and R² of the law 1/√(1 + k/k₀), in steps at the largest learning rate; k₀ only if the law holds.
        weight_decay: λ at the last measured step.
        half_life: the half-life of the approach to the equilibrium, in steps.
        steps_to_equilibrium: predicted steps from the beginning of the analyzed stretch to within 5 % of the norm at
            equilibrium, for gradients as long as in the stretch's later half.
        predicted_rate, measured_rate: radians per step.
        predicted_norm, measured_norm: ‖w‖.
        at_equilibrium: the verdict.
        mechanisms: through which weight decay can act: "effective learning rate", "damping" or "regularization".
        statements: one per topic.
    """

    layer: str
    kind: str
    optimizer: str
    scale_invariant: str
    deviation: float | None
    lr_first: float | None
    lr_last: float | None
    effective_first: float | None
    effective_last: float | None
    implicit_factor: float | None
    k0: float | None
    law_r2: float | None
    weight_decay: float | None
    half_life: float | None
    steps_to_equilibrium: float | None
    predicted_rate: float | None
    measured_rate: float | None
    predicted_norm: float | None
    measured_norm: float | None
    at_equilibrium: Verdict
    mechanisms: tuple[str, ...]
    statements: tuple[Statement, ...]

    def about(self, topic: Topic) -> Statement:
        """Return the statement on one topic."""
        for one in self.statements:
            if one.topic == topic:
                return one
        raise DynamicsError(f"`topic` must be one of {', '.join(TOPICS)}, got {topic!r}.")

    def words(self) -> list[str]:
        """Return the statements as text; those with the same reason are joined."""
        together: list[list[Statement]] = []
        for one in self.statements:
            if together and (one.verdict, one.words) == (together[-1][0].verdict, together[-1][0].words):
                together[-1].append(one)
            else:
                together.append([one])
        return [_joined(group) for group in together]

    def __str__(self) -> str:
        return "\n".join([self.layer, *map(_wrapped, self.words())])


@dataclass(frozen=True)
class Explanation(ByLayer[LayerExplanation]):
    """Explanation of the layers of a run. Its text is a table, and the statements for one layer of each sort.

    Attributes:
        run: the run's name.
        entries: one per layer.
        measured: the number of measured steps.
        resumed: the step at which the run was last resumed, or None.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(f"{folder}/first") as opened:
    ...     found = explain(opened)
    >>> found.run, found.measured, len(found.entries), found.statements[0].topic
    ('first', 5, 3, 'scale invariance')
    """

    _error = DynamicsError

    run: str
    entries: tuple[LayerExplanation, ...]
    measured: int
    resumed: int | None = None

    @property
    def statements(self) -> tuple[Statement, ...]:
        """All statements, layer by layer, in the order of `TOPICS`."""
        return tuple(statement for entry in self.entries for statement in entry.statements)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per layer: the attributes of `LayerExplanation` except the statements."""
        return [{key: v for key, v in asdict(entry).items() if key != "statements"} for entry in self.entries]

    def sorts(self) -> list[tuple[LayerExplanation, ...]]:
        """Return groups of layers with the same verdict on every topic and the same optimizer."""
        found: dict[tuple[object, ...], list[LayerExplanation]] = {}
        for entry in self.entries:
            verdicts = (one.verdict for one in entry.statements)
            found.setdefault((entry.optimizer, entry.scale_invariant, *verdicts), []).append(entry)
        return [tuple(alike) for alike in found.values()]

    def __str__(self) -> str:
        lines = [headline(self), "", *_table([HEADS, *(cells(entry) for entry in self.entries)])]
        for alike in self.sorts():
            lines += ["", title(alike), *map(_wrapped, alike[0].words())]
        return "\n".join(lines)


def cells(entry: LayerExplanation) -> list[str]:
    """Return the row of a layer in the table."""
    said = {"unit": "per unit", "tensor": "as a whole", "yes": "yes (units unknown)"}
    short = said.get(entry.scale_invariant, entry.scale_invariant)
    return [
        entry.layer,
        short.split(":")[0],
        _course(entry.lr_first, entry.lr_last),
        _course(entry.effective_first, entry.effective_last),
        "–" if entry.implicit_factor is None else f"×{entry.implicit_factor:.3g}",
        _number(entry.k0),
        _number(entry.measured_rate),
        _number(entry.predicted_rate),
        entry.at_equilibrium,
    ]


def headline(found: Explanation) -> str:
    """Return the run's name and the number of its layers and measured steps."""
    layers = "layer" if len(found) == 1 else "layers"
    resumed = "" if found.resumed is None else f", resumed at step {found.resumed:,}"
    return f"{found.run}: {len(found):,} {layers}, measured at {times(found.measured)}{resumed}"


def title(alike: tuple[LayerExplanation, ...]) -> str:
    """Return the name of the layer that the words are about, and of those like it."""
    first, *others = [entry.layer for entry in alike]
    if not others:
        return first
    if len(others) <= 3:
        return f"{first} (the same holds for {', '.join(others)})"
    return f"{first} (the same holds for {len(others):,} more: {others[0]}, {others[1]}, … {others[-1]})"


def _course(first: float | None, last: float | None) -> str:
    if first is None or last is None:
        return "–"
    return number(first) if number(first) == number(last) else f"{number(first)} → {number(last)}"


def _number(value: float | None) -> str:
    return "–" if value is None else number(value)


def _joined(group: list[Statement]) -> str:
    if len(group) == 1:
        return str(group[0])
    topics, sources = ([getattr(one, name) for one in group] for name in ("topic", "source"))
    said = str(replace(group[0], source="; ".join(dict.fromkeys(sources))))
    return said.replace(topics[0], ", ".join(topics), 1).replace(": does not", ": do not", 1)


def _wrapped(statement: str) -> str:
    return textwrap.fill(statement, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _table(lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = (0, 1, len(widths) - 1)
    return [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        .rstrip()
        for line in lines
    ]  # fmt: skip
