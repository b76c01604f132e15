"""Studies in the terminal: what they cost, and what came of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table
from rich.text import Text

from gyroscope.errors import GyroscopeError
from gyroscope_lab.cli.study_list import console
from gyroscope_lab.cost import cost
from gyroscope_lab.laboratory import SCALES, Lab
from gyroscope_lab.studies.study import Report, Study, as_text
from gyroscope_lab.trial import Trial

_STYLES = {"shown": "green", "not shown": "red"}


def costs(studies: Sequence[Study], lab: Lab) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return what each study takes by scale, in words, and what all of them take together; – for what has no task."""
    labs: dict[str, Lab] = {scale: replace(lab, scale=scale, known=False) for scale in SCALES}
    needed = {study.name: {scale: _needs(study, one) for scale, one in labs.items()} for study in studies}
    each = {
        name: {scale: "–" if one is None else _cost([one]) for scale, one in needs.items()}
        for name, needs in needed.items()
    }
    sums = {scale: _cost([one for needs in needed.values() if (one := needs[scale]) is not None]) for scale in labs}
    return each, sums


def print_report(study: Study, report: Report, lab: Lab) -> None:
    """Print what came of a study: its findings, then its tables.

    >>> from gyroscope_lab.archive import Archive
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


def _needs(study: Study, lab: Lab) -> tuple[Sequence[Trial], float] | None:
    """The trainings of a study and the seconds beside them; None if it has none of the tasks that were asked for."""
    try:
        return study.trials(lab), study.beside.get(lab.scale, 0.0)
    except GyroscopeError:
        return None


def _cost(needs: Sequence[tuple[Sequence[Trial], float]]) -> str:
    beside = sum(seconds for _, seconds in needs)
    whole = cost([trial for trials, _ in needs for trial in trials], beside=beside)
    return f"{whole.trials or 'none'}: {whole.words}" if whole.trials or beside else "none"
