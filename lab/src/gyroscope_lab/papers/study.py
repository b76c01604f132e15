"""Studies: trials, and the report that compares their results with the paper's numbers."""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch

import gyroscope
from gyroscope.base import write_whole
from gyroscope_lab.engine.laboratory import SCALES, Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Characters of a heading per inch.
_PER_INCH = 11
# An accuracy with its spread over seeds, as `Cell.test_told` has it, and what a page says of it.
_SEEDS = re.compile(r"± [\d.]+ \(\d+\)$")
_ERRORS = (
    "± after an accuracy is the standard deviation over the seeds, whose number follows; without it there is one seed. "
    "± after a difference is its standard error over the seeds; for one seed it is that over the test examples."
)


@dataclass(frozen=True)
class Table:
    """A table: its columns, and rows of numbers, words or None for missing values.

    >>> print(Table("Accuracy", ("rate", "here", "paper"), (("3^-3", 88.35, 88.45), ("3^-2", 81.0, None))).markdown())
    | rate | here | paper |
    |---|---|---|
    | 3^-3 | 88.35 | 88.45 |
    | 3^-2 | 81.00 | – |
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        cells = [" | ".join(map(as_text, line)) for line in lines]
        return "\n".join(f"|{line.replace(' | ', '|')}|" if i == 1 else f"| {line} |" for i, line in enumerate(cells))


@dataclass(frozen=True)
class Verdict:
    """The conclusion of a study about one claim of the paper.

    Attributes:
        says: the claim, in words.
        paper: the paper's number, or its observation.
        here: ours.
        holds: True if the claim is shown, False if not, None if that is undecided.
        over: tells the trainings that the claim is about from the others of the study; by default all are. While one of
            them is missing, the claim is undecided: `Study.run` sees to it.

    >>> Verdict("the best rate is 3^-3", paper="88.45 %", here="88.35 %", holds=True).word
    'shown'
    """

    says: str
    paper: str
    here: str
    holds: bool | None
    over: Callable[[Trial], bool] = field(default=lambda trial: True, compare=False, repr=False)

    @property
    def word(self) -> str:
        """The conclusion in a word or two."""
        return "undecided" if self.holds is None else "shown" if self.holds else "not shown"


def on_task(name: str, verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return verdicts that are about the trainings on the task called `name` alone."""
    return [replace(one, over=lambda trial: trial.task.name == name) for one in verdicts]


@dataclass(frozen=True)
class Report:
    """The report of a study.

    Attributes:
        figures: by name; the main one is called "figure".
        tables: our numbers and the paper's.
        verdicts: the paper's claims, and whether they are shown.
        numbers: all other numbers worth keeping, as JSON can hold them.
    """

    figures: dict[str, Figure] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """A figure or table of a paper, reproduced.

    Attributes:
        name: the paper and the figure, as in "rotation/fig1".
        title: what the paper shows there.
        trials: lists the trials at the laboratory's scale; more may follow from their results.
        conclude: makes the report, once these trials are done.
        follow: asks the laboratory for the trials that follow from known results, such as the seeds of the best rate.
        beside: the seconds that it takes in addition to its trials, by scale, where they are many and were measured: on
            one core of a CPU, or at full scale on an H200.
        seeds: the seeds of each configuration, by scale, of a study that trains without trials.
        reads_runs: whether it also reads the databases of its trials' runs.
    """

    name: str
    title: str
    trials: Callable[[Lab], Sequence[Trial]]
    conclude: Callable[[Lab], Report]
    follow: Callable[[Lab], object] | None = None
    beside: Mapping[str, float] = field(default_factory=dict, compare=False)
    seeds: Mapping[str, int] = field(default_factory=dict, compare=False)
    reads_runs: bool = field(default=False, compare=False)

    def run(self, lab: Lab) -> Report:
        """Run the trials that have no result yet, and return the report; see `Verdict.over` for what it leaves open."""
        lab.run(lab.held(self.trials(lab)))
        try:
            return self._decided(lab, self.conclude(lab))
        except (LookupError, ValueError, LabError) as error:
            missing = self.not_trained(lab)
            if not missing:
                raise
            precision = lab.trial(self.trials(lab)[0]).precision
            raise LabError(
                f"The study cannot be shown in part: {len(missing)} trainings are not in {lab.archive.root}, such as "
                f"{missing[0]} in {precision}. Train them first (leave --known out)."
            ) from error

    def _decided(self, lab: Lab, report: Report) -> Report:
        """The report, in which verdicts over trainings that are missing, or on tasks not asked for, are undecided."""
        used = set(lab.held(self.trials(lab)))
        wanted = self.trials(replace(lab, known=False, only=()))

        def decided(one: Verdict) -> Verdict:
            its = [trial for trial in wanted if one.over(trial)]
            missing = sum(trial not in used for trial in its)
            here = f"{one.here} ({missing} of {len(its)} trainings are missing)"
            return replace(one, here=here, holds=None) if missing else one

        return replace(report, verdicts=tuple(map(decided, report.verdicts)))

    def refuse_to_replace(self, lab: Lab, out: Path | str) -> None:
        """Reject a folder that holds this study at a larger scale, which may have taken hours on a GPU."""
        path = Path(out, self.name, "result.json")
        try:
            there = json.loads(path.read_text(encoding="utf-8"))["scale"]
            larger = SCALES.index(there) > SCALES.index(lab.scale)
        except (OSError, ValueError, KeyError, TypeError):
            return
        if larger:
            raise LabError(
                f"{path.parent} holds {self.name} at scale {there}; scale {lab.scale} would replace it. "
                "Write to another folder (--out FOLDER), or delete it first."
            )

    def save(self, lab: Lab, report: Report, out: Path | str) -> list[Path]:
        """Write the figures (png, svg), the tables (README.md) and all numbers (result.json) to `out`/`name`."""
        from gyroscope.figures.save import save

        self.refuse_to_replace(lab, out)
        folder = Path(out, self.name)
        folder.mkdir(parents=True, exist_ok=True)
        for figure in report.figures.values():
            _fit_heading(figure)
        written = [
            path for name, figure in report.figures.items() for path in save(figure, folder / name, palette=True)
        ]
        numbers = folder / "result.json"
        write_whole(numbers, json_text(self.as_json(lab, report)) + "\n")
        page = folder / "README.md"
        write_whole(page, self.page(lab, report))
        return [*written, page, numbers]

    def as_json(self, lab: Lab, report: Report) -> dict[str, Any]:
        """Return every number, to 7 significant digits, with the versions of the software that made it."""
        return {
            "study": self.name,
            "title": self.title,
            "scale": lab.scale,
            **versions(),
            "concluded_on": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "not_trained": self.not_trained(lab),
            "findings": [
                {"says": one.says, "paper": one.paper, "here": one.here, "holds": one.holds, "verdict": one.word}
                for one in report.verdicts
            ],
            "tables": [clean(asdict(table), digits=7) for table in report.tables],
            "numbers": clean(report.numbers, digits=7),
        }

    def not_trained(self, lab: Lab) -> list[str]:
        """Return the trainings that the study needs and a laboratory with `known` lacks: names of tasks and recipes."""
        held = lab.held(trials := self.trials(replace(lab, known=False)))
        return [f"{one.task.name}: {one.recipe.name}" for one in trials if one not in held]

    def page(self, lab: Lab, report: Report) -> str:
        """Return the report as a Markdown page."""
        parts = [f"# {self.name}\n\n{self.title}\n\nScale: {lab.scale}. Every number is in `result.json`."]
        if missing := self.not_trained(lab):
            by_task = Counter(name.partition(": ")[0] for name in missing)
            said = "; ".join(f"{task}: {count}" for task, count in by_task.items())
            several = "trainings are" if len(missing) > 1 else "training is"
            parts.append(
                f"Shown in part: {len(missing)} {several} not there yet ({said}). "
                "`result.json` lists all, as `not_trained`."
            )
        with_seeds = any(_SEEDS.search(str(cell)) for table in report.tables for row in table.rows for cell in row)
        if with_seeds or ("cells" in report.numbers and any("±" in one.here for one in report.verdicts)):
            parts.append(_ERRORS)
        if report.verdicts:
            columns = ("the paper says", "paper", "here", "")
            rows = tuple((one.says, one.paper, one.here, one.word) for one in report.verdicts)
            parts.append("## Verdicts\n\n" + Table("Verdicts", columns, rows).markdown())
        parts += [f"## {table.title}\n\n{table.markdown()}" for table in report.tables]
        parts += [f"![{name}]({name}.png)" for name in report.figures]
        return "\n\n".join(parts) + "\n"


def versions() -> dict[str, str]:
    """Return the versions of the software that made the numbers.

    >>> list(versions())
    ['gyroscope', 'torch', 'python']
    """
    return {"gyroscope": gyroscope.__version__, "torch": torch.__version__, "python": platform.python_version()}


def no_trials(lab: Lab) -> list[Trial]:
    """Return no trials: for a study that measures, simulates, or trains in a way that no recipe describes."""
    return []


def _fit_heading(figure: Figure) -> None:
    """Break a heading that is wider than its figure, as for a single task."""
    heading = figure.get_suptitle()
    if heading:
        figure.suptitle(fill(heading, round(_PER_INCH * figure.get_figwidth())), fontsize=11)


def as_text(value: Any) -> str:
    """Return the text of a cell of a table.

    >>> as_text(None), as_text(0.5), as_text(3), as_text("a|b"), as_text(float("nan"))
    ('–', '0.50', '3', 'a/b', '–')
    """
    if value is None or (isinstance(value, float) and not isfinite(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) >= 0.01 or value == 0 else f"{value:.2g}"
    return str(value).replace("|", "/")


def clean(value: Any, *, digits: int | None = None) -> Any:
    """Return the value as strict JSON can hold it: None replaces numbers that are not finite.

    Args:
        value: numbers, words and None, in dictionaries, lists and tuples.
        digits: round numbers to this many significant digits.

    >>> clean({"a": [1.0, float("inf")]}), clean((68.17999999999999, 1e-9 / 3), digits=6)
    ({'a': [1.0, None]}, [68.18, 3.33333e-10])
    """
    if isinstance(value, dict):
        return {str(key): clean(one, digits=digits) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [clean(one, digits=digits) for one in value]
    if not isinstance(value, float):
        return value
    if not isfinite(value):
        return None
    return value if digits is None else float(f"{value:.{digits}g}")


def json_text(value: Any, *, indent: str = "\n") -> str:
    """Return strict JSON with one entry per line, and with each list of numbers or words on a single line.

    >>> print(json_text({"rates": [0.1, 0.3], "cells": [{"rate": 0.1}]}))
    {
     "rates": [0.1, 0.3],
     "cells": [
      {
       "rate": 0.1
      }
     ]
    }
    """
    deeper = indent + " "
    if isinstance(value, dict) and value:
        lines = (f"{json_text(str(key))}: {json_text(one, indent=deeper)}" for key, one in value.items())
        return "{" + deeper + f",{deeper}".join(lines) + indent + "}"
    if isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        return "[" + deeper + f",{deeper}".join(json_text(one, indent=deeper) for one in value) + indent + "]"
    return json.dumps(value, allow_nan=False, ensure_ascii=False)
