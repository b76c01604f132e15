"""Studies in the terminal: their list, read from the index without loading a study or torch, and their reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from gyroscope.cli.printed import console
from gyroscope_lab.papers import catalogue

if TYPE_CHECKING:
    from gyroscope_lab.engine.laboratory import Lab
    from gyroscope_lab.papers.study import Report, Study

# A pipe or a file has no width; every column fits into this one.
_UNBOUNDED = 170
# From this width on, names and titles have separate columns.
_WIDE = 130
_STYLES = {"shown": "green", "not shown": "red"}

#: By study, or "all", and by scale: the number of trainings and their time.
Costs = Mapping[str, Mapping[str, str]]


def print_list(out: Path, costs: Costs | None = None) -> None:
    """Print the studies, their cost at each scale, and whether their results are in `out`.

    Args:
        out: the folder of results.
        costs: their costs, if they differ from the index.

    >>> print_list(Path("results"))
    ┏...
    """
    known = catalogue.index()
    costs = {name: one.costs for name, one in known.items()} if costs is None else costs
    scales = list(known["all"].costs)
    screen = console(_UNBOUNDED)
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
        "Trainings and their time: smoke and small on one core of a CPU, full on an H200. Studies share trainings, and "
        "each is run once; some studies train more, depending on their first results. none: the study measures, and "
        "where no time is shown, it may train small networks of its own, in minutes. ≈ marks an estimate "
        f"({known['all'].title}).",
        highlight=False,
    )


def results_in(out: Path, name: str) -> str:
    """Return the scale of the results of a study in `out`, in a word or two.

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
    """Print the report of a study: its verdicts, then its tables.

    >>> from gyroscope_lab.engine.laboratory import Lab
    >>> from gyroscope_lab.papers.study import Report, Study
    >>> from gyroscope_lab.training.archive import Archive
    >>> print_report(Study("a/fig1", "Figure 1", list, list), Report(), Lab(Archive("runs")))
    a/fig1: Figure 1 (scale smoke)
    """
    from gyroscope_lab.papers.study import as_text

    out = console(_UNBOUNDED)
    out.print(Text(f"{study.name}: {study.title} (scale {lab.scale})", style="bold"))
    if report.verdicts:
        table = Table(title="Verdicts", title_justify="left")
        for column in ("the paper says", "paper", "here", ""):
            table.add_column(column, overflow="fold")
        for one in report.verdicts:
            verdict = Text(one.word, style=_STYLES.get(one.word, "yellow"))
            table.add_row(Text(one.says), Text(one.paper), Text(one.here), verdict)
        out.print(table)
    for given in report.tables:
        table = Table(title=Text(given.title), title_justify="left")
        for place, column in enumerate(given.columns):
            table.add_column(Text(column), justify="right" if _numeric(given.rows, place) else "left", overflow="fold")
        for row in given.rows:
            table.add_row(*(Text(as_text(value)) for value in row))
        out.print(table)


def _numeric(rows: Sequence[Sequence[Any]], place: int) -> bool:
    return all(value is None or isinstance(value, int | float) for value in (row[place] for row in rows))
