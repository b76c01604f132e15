"""The list of studies in the terminal, which is read from their index: no study is loaded, nor torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gyroscope_lab.papers import catalogue

# A pipe or a file has no width; this holds every column.
_UNBOUNDED = 170
# From here names and titles have columns of their own.
_WIDE = 130

#: By study, or "all", and by scale, the trainings that it takes and how long they last.
Costs = Mapping[str, Mapping[str, str]]


def print_list(out: Path, costs: Costs | None = None) -> None:
    """Print the studies, what they take at each scale, and whether their results are in `out`.

    Args:
        out: the folder of results.
        costs: what they take, where that is not what the index says.

    >>> print_list(Path("results"))
    ┏...
    """
    known = catalogue.index()
    costs = {name: one.costs for name, one in known.items()} if costs is None else costs
    scales = list(known["all"].costs)
    screen = console()
    narrow = screen.width < _WIDE
    between = "\n" if narrow else " "
    table = Table(show_lines=narrow)
    for column in ("study",) if narrow else ("study", "what the paper shows"):
        table.add_column(column, overflow="fold", no_wrap=column == "study" and not narrow)
    for scale in scales:
        table.add_column(scale, justify="right", no_wrap=True)
    table.add_column("results", no_wrap=True)
    for name, one in known.items():
        is_last = name == "all"
        if is_last:
            table.add_section()
        title = "" if is_last else one.title
        words = (f"{name}\n{title}".strip(),) if narrow else (name, title)
        taken = (costs[name][scale].replace(": ", f":{between}") for scale in scales)
        table.add_row(*map(Text, (*words, *taken, "" if is_last else results_in(out, name))))
    screen.print(table)
    screen.print(
        "Trainings, and how long they take: smoke and small on one core of a CPU, full on an H200. Studies share "
        "trainings, and each is run once; some studies go on with more, as their first results tell. none: something "
        f"is measured, nothing trained. ≈ is an estimate, where no time was measured ({known['all'].title}).",
        highlight=False,
    )


def results_in(out: Path, name: str) -> str:
    """At which scale the results of a study are in `out`, in a word or two.

    >>> results_in(Path("nowhere"), "rotation/fig1")
    '–'
    """
    path = out / name / "result.json"
    try:
        return str(json.loads(path.read_bytes())["scale"])
    except FileNotFoundError:
        return "–"
    except (OSError, ValueError, KeyError, TypeError):
        return "unreadable"


def console() -> Console:
    """The terminal, or a file that holds every column."""
    found = Console()
    return found if found.is_terminal else Console(width=_UNBOUNDED)
