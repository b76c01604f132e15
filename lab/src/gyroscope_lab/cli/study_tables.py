"""Studies in the terminal: what they cost, and what came of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from gyroscope_lab.cli.study_list import console
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.study import Report, Study, as_text

_STYLES = {"shown": "green", "not shown": "red"}


def print_report(study: Study, report: Report, lab: Lab) -> None:
    """Print what came of a study: its findings, then its tables.

    >>> from gyroscope_lab.training.archive import Archive
    >>> print_report(Study("a/fig1", "Figure 1", list, list), Report(), Lab(Archive("runs")))
    a/fig1: Figure 1 (scale smoke)
    """
    out = console()
    out.print(Text(f"{study.name}: {study.title} (scale {lab.scale})", style="bold"))
    if report.findings:
        table = Table(title="Findings", title_justify="left")
        for column in ("the paper says", "paper", "here", ""):
            table.add_column(column, overflow="fold")
        for one in report.findings:
            verdict = Text(one.verdict, style=_STYLES.get(one.verdict, "yellow"))
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
