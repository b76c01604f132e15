"""The conditioning paper's figures on small perceptrons, as studies of a laboratory.

They train nothing: `gyroscope_lab.papers.conditioning` measures networks as they start.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from math import isinf

from gyroscope_lab.data.official import DATA
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.at_hand import at_hand
from gyroscope_lab.papers.conditioning import exact as conditioning
from gyroscope_lab.papers.conditioning.exact_findings import findings
from gyroscope_lab.papers.conditioning.exact_result import PAPER_LARGEST, PAPER_MODEL, Line
from gyroscope_lab.papers.conditioning.exact_result import Study as Measured
from gyroscope_lab.papers.study import Finding, Report, Study, Table
from gyroscope_lab.training.trial import Trial

TITLES = {
    "fig1": "Figure 1: spectra of the Fisher matrix and of two of its blocks, with batch normalization and without",
    "fig2": "Figure 2: blocks of the Fisher matrix beside Σx ⊗ Σ∇h",
    "a1": "Figure A1: spectra of the Fisher matrix and of all its blocks",
    "a2": "Figure A2: spectra of the second moments of the gradients, and of all their blocks",
    "a3": "Figure A3: both in networks of 4 layers of 24 units",
    "a4": "Figure A4: both in networks of 4 layers of 36 units",
}
# Seconds to measure and to save: CPU time of one thread on a core of an AMD EPYC, each figure by itself. At full scale
# they were not measured.
_SECONDS = {
    "fig1": {"smoke": 4.3, "small": 104.0},
    "fig2": {"smoke": 4.4, "small": 26.0},
    "a1": {"smoke": 7.5, "small": 110.0},
    "a2": {"smoke": 1.7, "small": 6.3},
    "a3": {"smoke": 6.7, "small": 54.0},
    "a4": {"smoke": 9.5, "small": 165.0},
}
# The condition numbers that a table has room for; all are among the report's numbers.
_PERCENTS = (10, 25, 50, 75, 100)


def report(measured: Measured) -> Report:
    """What was measured for a figure, as the report of a study.

    >>> found = report(conditioning.fig1(choices=conditioning.Choices(samples=20)))
    >>> list(found.figures), found.tables[0].columns[:4]
    (['figure'], ('network', 'matrix', 'λmax', 'paper'))
    """
    shown = [place for place, share in enumerate(measured.p) if round(100 * share) in _PERCENTS]
    columns = ("network", "matrix", "λmax", "paper", *(f"κ at {100 * measured.p[place]:g} %" for place in shown))
    rows = tuple(
        (line.network, _symbol(line), f"{line.largest:.3g}", _paper(measured, line),
         *(_kappa(line.kappa[place]) for place in shown), f"{line.rank} of {line.dimension}")
        for line in measured.lines
    )  # fmt: skip
    title = f"{measured.model} on {measured.samples} images of {measured.data}"
    return Report(
        {"figure": measured.draw()},
        (Table(title, (*columns, "rank"), rows),),
        tuple(Finding(one.says, one.paper, one.here, one.holds) for one in findings(measured)),
        measured.as_json(),
    )


def _symbol(line: Line) -> str:
    return f"{line.symbol} as Σx ⊗ Σ∇h" if line.approximate else line.symbol


def _paper(measured: Measured, line: Line) -> str | None:
    """The one number that the paper prints: λmax of the whole Fisher matrix of its 8-layer network."""
    known = measured.model == PAPER_MODEL and line.matrix == "F" and line.layer is None
    return f"around {PAPER_LARGEST[line.network]:g}" if known else None


def _kappa(value: float | None) -> str | None:
    return None if value is None else "∞" if isinf(value) else f"{value:.3g}"


def _none(lab: Lab) -> list[Trial]:
    return []


def _conclude(figure: str) -> Callable[[Lab], Report]:
    def conclude(lab: Lab) -> Report:
        # Where digits stand in, the report says so; at full scale they do where no folder of MNIST is named at all.
        data = os.environ.get(DATA) if lab.data is None and lab.scale == "full" else lab.data
        taken = data if at_hand(lab, Source("mnist")).name == "mnist" else None
        return report(conditioning.reproduce(figure, scale=lab.scale, data=taken))

    return conclude


STUDIES = tuple(
    Study(f"conditioning/{name}", title, _none, _conclude(name), beside=_SECONDS[name])
    for name, title in TITLES.items()
)
