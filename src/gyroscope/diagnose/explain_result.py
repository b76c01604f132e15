"""What a run says of its layers: rows, statements, and both as text."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, replace
from typing import Any

from gyroscope.base.by_layer import ByLayer
from gyroscope.diagnose.explain_statement import TOPICS, Statement, Topic, Verdict, number, times
from gyroscope.theory.errors import DynamicsError

_WIDTH = 110


@dataclass(frozen=True)
class LayerExplanation:
    """One layer; None where a number does not apply or is undecided, and `statements` say why.

    Attributes:
        layer, kind: its name and kind.
        optimizer: what steps it.
        scale_invariant: where a model was given, "unit" for each unit by itself and "tensor" for only as a whole; "yes"
            where the run alone says so, which knows nothing of units; "no", or "undecided" and why.
        deviation: the median of √n|⟨w,∇⟩|/(‖w‖‖∇‖): zero for a scale-invariant layer, 0.67 for unrelated directions.
        lr_first, lr_last: α at the first and the last measured step with one above zero.
        effective_first, effective_last: α/‖w‖² there (Adam and its kin: α/‖w‖).
        implicit_factor: the factor on it that is due to the norm.
        k0, law_r2: of the law 1/√(1 + k/k₀), in steps at the largest learning rate; k₀ only where it holds.
        weight_decay: λ at the last measured step.
        half_life: the steps in which half of the way to the equilibrium is gone.
        steps_to_equilibrium: from the beginning of the stretch that was looked at to within 5 % of the norm there, as
            theory has it for gradients as long as in its later half.
        predicted_rate, measured_rate: radians a step.
        predicted_norm, measured_norm: ‖w‖.
        at_equilibrium: the verdict.
        mechanisms: by which weight decay can act: "effective learning rate", "damping" or "regularization".
        statements: one a topic.
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
        """The statement on one topic."""
        for one in self.statements:
            if one.topic == topic:
                return one
        raise DynamicsError(f"There is no topic {topic!r}; there are {', '.join(TOPICS)}.")

    def words(self) -> list[str]:
        """The statements as text; those that stand for the same reason, together."""
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
    """What a run says of its layers. Printed, it is a table, and words for one layer of each sort.

    Attributes:
        run: the run's name.
        entries: one a layer.
        measured: at how many steps anything was measured.
        resumed: the step at which the run was last gone on with, or None.
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
        """One dict a layer: the attributes of `LayerExplanation` but for the statements."""
        return [{key: v for key, v in asdict(entry).items() if key != "statements"} for entry in self.entries]

    def sorts(self) -> list[tuple[LayerExplanation, ...]]:
        """The layers that are alike: the same verdict on every topic, for the same optimizer."""
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


#: What the columns of the table are called.
HEADS = ["layer", "scale-invariant", "α", "effective α", "norm's part", "k₀", "rate", "predicted", "equilibrium"]


def cells(entry: LayerExplanation) -> list[str]:
    """A layer's row of the table."""
    said = {"unit": "a unit", "tensor": "as a whole", "yes": "yes (units not known)"}
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
    """What was looked at."""
    layers = "layer" if len(found) == 1 else "layers"
    resumed = "" if found.resumed is None else f", resumed at step {found.resumed:,}"
    return f"{found.run}: {len(found):,} {layers}, measured at {times(found.measured)}{resumed}"


def title(alike: tuple[LayerExplanation, ...]) -> str:
    """Which layer the words are of, and which are like it."""
    first, *others = [entry.layer for entry in alike]
    if not others:
        return first
    named = ", ".join(others) if len(others) <= 3 else f"{others[0]}, {others[1]}, … {others[-1]}"
    return f"{first}, and likewise {named} ({len(others):,} more)" if len(others) > 3 else f"{first}, likewise {named}"


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
