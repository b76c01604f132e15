"""Studies in the terminal: the list of them, and what came of one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gyroscope.errors import GyroscopeError
from gyroscope_lab.cost import PACES, cost
from gyroscope_lab.laboratory import SCALES, Lab
from gyroscope_lab.studies.study import Report, Study, as_text
from gyroscope_lab.trial import Trial

# A pipe or a file has no width; this holds every column.
_UNBOUNDED = 170
# From here names and titles have columns of their own.
_WIDE = 130
_STYLES = {"shown": "green", "not shown": "red"}


def print_list(studies: Sequence[Study], lab: Lab, out: Path) -> None:
    """Print the studies, what they take at each scale, and whether their results are in `out`.

    >>> from gyroscope_lab.archive import Archive
    >>> from gyroscope_lab.studies.rotation.alpha_and_rate import STUDIES
    >>> print_list(STUDIES[:1], Lab(Archive("runs")), Path("results"))
    ┏...
    """
    console = _console()
    narrow = console.width < _WIDE
    table = Table(show_lines=narrow)
    for column in ("study",) if narrow else ("study", "what the paper shows"):
        table.add_column(column, overflow="fold", no_wrap=column == "study" and not narrow)
    for scale in SCALES:
        table.add_column(scale, justify="right", no_wrap=True)
    table.add_column("results", no_wrap=True)
    labs, between = [replace(lab, scale=scale, known=False) for scale in SCALES], "\n" if narrow else " "
    needed = [[_needs(study, one) for one in labs] for study in studies]
    for study, needs in zip(studies, needed, strict=True):
        costs = ["–" if one is None else _cost([one], between) for one in needs]
        words = (f"{study.name}\n{study.title}",) if narrow else (study.name, study.title)
        table.add_row(*map(Text, (*words, *costs, results_in(out, study.name))))
    table.add_section()
    all_of_them = [_cost([one for one in at if one is not None], between) for at in zip(*needed, strict=True)]
    table.add_row(*("all",) if narrow else ("all", ""), *map(Text, all_of_them), "")
    console.print(table)
    guessed = ", ".join(name for name, pace in PACES.items() if not pace.measured)
    console.print(
        "Trainings, and how long they take: smoke and small on one core of a CPU, full on an H200. Studies share "
        "trainings, and each is run once; some studies go on with more, as their first results tell. none: something "
        f"is measured, nothing trained. ≈ is an estimate, where no time was measured ({guessed}).",
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


def print_report(study: Study, report: Report, lab: Lab) -> None:
    """Print what came of a study: its findings, then its tables.

    >>> from gyroscope_lab.archive import Archive
    >>> print_report(Study("a/fig1", "Figure 1", list, list), Report(), Lab(Archive("runs")))
    a/fig1: Figure 1 (scale smoke)
    """
    console = _console()
    console.print(Text(f"{study.name}: {study.title} (scale {lab.scale})", style="bold"))
    if report.findings:
        table = Table(title="Findings", title_justify="left")
        for column in ("the paper says", "paper", "here", ""):
            table.add_column(column, overflow="fold")
        for one in report.findings:
            verdict = Text(one.verdict, style=_STYLES.get(one.verdict, "yellow"))
            table.add_row(Text(one.says), Text(one.paper), Text(one.here), verdict)
        console.print(table)
    for given in report.tables:
        table = Table(title=Text(given.title), title_justify="left")
        for place, column in enumerate(given.columns):
            table.add_column(Text(column), justify="right" if _numeric(given.rows, place) else "left", overflow="fold")
        for row in given.rows:
            table.add_row(*(Text(as_text(value)) for value in row))
        console.print(table)


def _numeric(rows: Sequence[Sequence[Any]], place: int) -> bool:
    return all(value is None or isinstance(value, int | float) for value in (row[place] for row in rows))


def _needs(study: Study, lab: Lab) -> tuple[Sequence[Trial], float] | None:
    """The trainings of a study and the seconds beside them; None if it has none of the tasks that were asked for."""
    try:
        return study.trials(lab), study.beside.get(lab.scale, 0.0)
    except GyroscopeError:
        return None


def _cost(needs: Sequence[tuple[Sequence[Trial], float]], between: str) -> str:
    beside = sum(seconds for _, seconds in needs)
    whole = cost([trial for trials, _ in needs for trial in trials], beside=beside)
    return f"{whole.trials or 'none'}:{between}{whole.words}" if whole.trials or beside else "none"


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_UNBOUNDED)
