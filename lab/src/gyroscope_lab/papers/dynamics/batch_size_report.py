"""What came of batch sizes, as a figure, tables and verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gyroscope_lab.papers.study import Table, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Held = Mapping[str, dict[str, Any]]
ByRecipe = Mapping[str, npt.NDArray[np.float64]]

# The exponent of |B|, and gains, as a share of what they are predicted to be, within this; growth is beyond it.
_CLOSE = 0.1
# Updates are compared over this share of the training, while all batch sizes still learn, and over all of it.
_EARLY = 1 / 3
_NAMES = {"sgd": "SGD", "rmsprop": "RMSprop", "adam": "Adam"}
_COLOURS = {"SGD": "C0", "RMSprop": "C1", "Adam": "C3"}


def growth(values: Sequence[float] | npt.NDArray[np.float64]) -> float:
    """From the smallest batch to the largest, as a factor.

    >>> growth([2.0, 3.0, 5.0])
    2.5
    """
    return float(values[-1]) / float(values[0])


def early(updates: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The mean update of each batch size over the first third of the steps.

    >>> early(np.array([[1.0, 3.0, 9.0, 9.0, 9.0, 9.0]])).tolist()
    [2.0]
    """
    return np.asarray(updates[:, : max(1, round(_EARLY * updates.shape[1]))].mean(axis=1))


def verdicts(sizes: Sequence[int], at: Held, updates: ByRecipe, moved: ByRecipe) -> tuple[Verdict, ...]:
    """What the chapter says of batch sizes, and what came out."""
    exponents = [one["law"]["exponent"] for one in at.values()]
    gains = [(one["gain"]["measured"][-1], one["gain"]["predicted"][-1]) for one in at.values()]
    most = next(iter(at.values()))["gain"]["most"][-1]
    between = f"from |B| = {sizes[0]} to {sizes[-1]}"
    ways = {name: [growth(one["steps"][name]["along"]) for one in at.values()] for name in _NAMES}
    found = [
        Verdict(
            "the noise in the second moment of batch gradients falls as 1/|B|",
            "exponent −1 (equation 4)",
            "exponent " + _each(exponents, at, ".3f"),
            all(abs(one + 1) < _CLOSE for one in exponents),
        ),
        Verdict(
            f"larger batches imply larger effective learning rates: 1/√s grows {between}",
            f"by up to √(|B'|/|B|) = {most:.2f}",
            "median factor "
            + ", ".join(f"{a:.2f} (by equation 4: {b:.2f}) {name}" for (a, b), name in zip(gains, at, strict=True)),
            all(a > 1 + _CLOSE and abs(a / b - 1) < _CLOSE for a, b in gains),
        ),
        *(
            Verdict(
                f"at held weights {_NAMES[name]} goes further down the loss in a step",
                f"larger steps {between}",
                "by a factor of " + _each(ways[name], at, ".2f"),
                all(one > 1 + _CLOSE for one in ways[name]),
            )
            for name in ("rmsprop", "adam")
        ),
        Verdict(
            "SGD does not share this",
            "the same step in the mean",
            "by a factor of " + _each(ways["sgd"], at, ".2f"),
            all(abs(one - 1) < _CLOSE for one in ways["sgd"]),
        ),
    ]
    for name, grows in (("RMSprop", True), ("Adam", True), ("SGD", False)):
        first, whole = growth(early(updates[name])), growth(updates[name].mean(axis=1))
        found.append(
            Verdict(
                f"in training, updates of {name} {'are longer' if grows else 'are not longer'} with larger batches",
                f"{'larger' if grows else 'no larger'} steps {between}",
                f"by a factor of {first:.2f} in the first third, {whole:.2f} over all steps; "
                f"in the end weights are {growth(moved[name]):.2f} times as far from their start",
                first > 1 + _CLOSE if grows else first < 1 + _CLOSE,
            )
        )
    shorter = {name: growth(early(updates[name])) for name in ("RMSprop", "Adam")}
    found.append(
        Verdict(
            "(section 6) for Adam and RMSprop, larger batches result in smaller steps",
            "smaller, which contradicts section 2.1",
            "updates in training by a factor of " + ", ".join(f"{one:.2f} ({name})" for name, one in shorter.items()),
            all(one < 1 - _CLOSE for one in shorter.values()),
        )
    )
    return tuple(found)


def _each(values: Sequence[float], at: Held, form: str) -> str:
    return ", ".join(f"{value:{form}} {name}" for value, name in zip(values, at, strict=True)).replace("-", "−")


def tables(sizes: Sequence[int], at: Held, updates: ByRecipe, moved: ByRecipe, losses: ByRecipe) -> tuple[Table, ...]:
    """Held weights, a table each; and training."""
    found = [_held_table(sizes, name, one) for name, one in at.items()]
    rows = []
    for name, its in updates.items():
        first, whole = 1000 * early(its), 1000 * its.mean(axis=1)
        numbers = np.stack([first, whole, moved[name], losses[name]], axis=1)
        rows += [(name, size, *row) for size, row in zip(sizes, numbers.tolist(), strict=True)]
    columns = ("", "batch", "1000 ‖Δw‖, first third", "all steps", "‖w − w₀‖ in the end", "loss, mean of all steps")
    return (*found, Table("In training: lengths of updates, and how far weights came", columns, tuple(rows)))


def _held_table(sizes: Sequence[int], name: str, one: dict[str, Any]) -> Table:
    law, gain, steps = one["law"], one["gain"], one["steps"]
    rows = []
    for i, size in enumerate(sizes):
        shares = [steps[rule][kind][i] / steps[rule][kind][0] for rule in _NAMES for kind in ("length", "along")]
        second = law["measured"][i] / law["predicted"][i]
        rows.append((size, second, law["noise"][i], gain["measured"][i], gain["predicted"][i], *shares))
    each = [f"{rule}: {kind}" for rule in _NAMES.values() for kind in ("length of a step", "along −∇J")]
    columns = ("batch", "second moment / equation 4", "noise in it", "gain of 1/√s", "by equation 4", *each)
    return Table(
        f"Weights held {name}; gains and steps as multiples of those of the smallest batch", columns, tuple(rows)
    )


def figure(sizes: Sequence[int], at: Held, updates: ByRecipe) -> Figure:
    """The law; the gain and the steps at held weights; updates in training."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(13.5, 3.9), layout="constrained")
    law, gain, held, trained = drawn.subplots(1, 4)
    last = list(at.values())[-1]
    for place, (name, one) in enumerate(at.items()):
        colour, top = f"C{4 + place}", one["law"]["predicted"][0]
        law.plot(sizes, np.array(one["law"]["measured"]) / top, "o", markersize=4, color=colour, label=name)
        law.plot(sizes, np.array(one["law"]["predicted"]) / top, "-", linewidth=1, color=colour)
        gain.plot(sizes, one["gain"]["measured"], "o", markersize=4, color=colour, label=name)
        gain.plot(sizes, one["gain"]["predicted"], "-", linewidth=1, color=colour)
    gain.plot(sizes, last["gain"]["most"], ":", color="0.6", label="√(|B'|/|B|)")
    for rule, name in _NAMES.items():
        for kind, style in (("along", "-"), ("length", ":")):
            its = np.array(last["steps"][rule][kind])
            label = name if kind == "along" else None
            # Adam's and RMSprop's ways are alike: one is drawn around the other.
            width = 4.0 if (rule, kind) == ("rmsprop", "along") else 1.4
            held.plot(
                sizes, its / its[0], f"o{style}", markersize=3, linewidth=width, color=_COLOURS[name], label=label
            )  # fmt: skip
    for name, its in updates.items():
        mean = early(its)
        trained.plot(sizes, mean / mean[0], "o-", markersize=3, color=_COLOURS[name], label=name)
    titles = (
        "tr F_emp^batch (points), equation 4 (lines)",
        "Gain of 1/√s in Adam, and by equation 4",
        f"Held {list(at)[-1]}: along −∇J (line),\nlength (dotted)",
        "In training: lengths of updates,\nfirst third of the steps",
    )
    for ax, title in zip((law, gain, held, trained), titles, strict=True):
        ax.set_title(title, fontsize=9)
        ax.set_xscale("log", base=2)
        ax.set_xticks(list(sizes), [str(size) for size in sizes])
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:g}")
        ax.tick_params(which="both", labelsize=8)
        ax.set_xlabel("batch size", fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(fontsize=8, frameon=False)
    law.set_ylabel("relative to the smallest batch", fontsize=9)
    return drawn
