"""The tables of docs/claims.md: the papers' claims, and what the results in the repository say about them.

`benchmarks/report.py` puts them into the page, and their summary into docs/results.md.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.catalogue import index, studies
from gyroscope_lab.papers.study import Study, Table
from gyroscope_lab.training.archive import Archive

RESULTS = Path(__file__).parent.parent / "results"
#: The papers, by the first part of their studies' names, and the headings of their sections.
PAPERS = {
    "rotation": "Layer rotation",
    "speed": "Layer-level training speed",
    "conditioning": "Layer-wise conditioning",
    "dynamics": "Training dynamics",
    "beyond": "Beyond the papers",
}
# The studies of the conditioning paper's experiments on ImageNet have a folder of their own.
_PAPER = {"imagenet": "conditioning"}
_PRECISIONS = ("float32", "tf32", "bf16")
# The most letters of a cell; the study's own page has all of them.
_MOST = 110


@dataclass(frozen=True)
class Kept:
    """A study's results in the repository: its folder, and its `result.json`."""

    folder: Path
    told: dict[str, Any]

    @property
    def study(self) -> Study:
        return studies()[self.told["study"]]

    @property
    def paper(self) -> str:
        name = self.study.name.partition("/")[0]
        return _PAPER.get(name, name)

    @property
    def label(self) -> str:
        """The figure or table, and what is different about results that are not in the study's own folder."""
        name = self.study.name.partition("/")[2]
        own = self.folder == RESULTS / self.study.name
        scale = self.told["scale"]
        return name + ("" if own else f", {self.folder.relative_to(RESULTS).parts[0]}") + f" ({scale})"

    def seeds(self, claim: str = "") -> list[int]:
        """The numbers of seeds of the configurations, from the fewest to the most; empty if nothing was trained.

        Where a claim names its task first, the other tasks' configurations do not count.
        """
        numbers = self.told["numbers"]
        cells = [*numbers.get("cells", ()), *(cell for one in numbers.get("columns", ()) for cell in one["cells"])]
        named = re.split("[:,]", claim)[0]
        own = [cell for cell in cells if cell.get("task") == named]
        if cells:
            return sorted({len(cell["seeds"]) for cell in own or cells})
        scale = self.told["scale"]
        if scale in self.study.seeds:
            return [self.study.seeds[scale]]
        missing, counts = Counter(self.told["not_trained"]), Counter[Any]()
        for one in self.study.trials(Lab(Archive(RESULTS / "runs"), scale)):
            name = f"{one.task.name}: {one.recipe.name}"
            missing[name] -= 1
            if missing[name] < 0:
                counts[name, one.task.model, one.task.options, one.schedule, one.recipe] += 1
        return sorted(set(counts.values()))


@cache
def kept() -> list[Kept]:
    """All results, in the order of the catalogue; further results of a study follow the ones in its own folder."""
    order = list(index())
    paths = [path for path in RESULTS.rglob("result.json") if RESULTS / "runs" not in path.parents]
    found = [Kept(path.parent, json.loads(path.read_text())) for path in paths]
    return sorted(found, key=lambda one: (order.index(one.study.name), one.folder != RESULTS / one.study.name))


def trainings(paper: str) -> int:
    """Count the trainings in results/runs that the full-scale studies of a paper use."""
    archive = Archive(RESULTS / "runs")
    its = [study for name, study in studies().items() if _PAPER.get(first := name.partition("/")[0], first) == paper]
    trials = {trial for study in its for trial in study.trials(Lab(archive, "full", known=True))}
    labs = [Lab(archive, "full", precision=precision) for precision in _PRECISIONS]
    wanted = {lab.trial(trial) for lab in labs for trial in trials}
    return sum((archive.folder(one) / "result.json").exists() for one in wanted)


def span(counts: list[int]) -> str:
    """Return a range in words.

    >>> span([]), span([1]), span([1, 3])
    ('–', '1', '1 to 3')
    """
    return "–" if not counts else f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"


def short(text: str) -> str:
    """Return the first clauses of a text, as many as are short enough, with what it says about missing trainings.

    >>> short("56: 6.62 against 6.38; " + 40 * "and " + "so on (36 of 40 trainings are missing)")
    '56: 6.62 against 6.38 … (36 of 40 trainings are missing)'
    """
    missing = re.search(r" \(\d+ of \d+ trainings are missing\)$", text)
    end = missing.group() if missing else ""
    whole = text.removesuffix(end)
    first, *others = whole.split("; ")
    for clause in others:
        if len(first) + len(clause) > _MOST:
            break
        first += f"; {clause}"
    if len(first) > _MOST:
        first = first[:_MOST].rpartition(" ")[0].rstrip(",;:")
    return first + (" …" if first != whole else "") + end


def rows(paper: str) -> Iterator[tuple[str, ...]]:
    """Yield one row per claim."""
    for one in kept():
        if one.paper == paper:
            where = f"../results/{one.folder.relative_to(RESULTS).as_posix()}"
            page, raw = f"[{one.label}]({where}/README.md)", f"[raw]({where}/result.json)"
            for said in one.told["findings"]:
                n = span(one.seeds(said["says"]))
                verdict = said["verdict"] if said["holds"] else f"**{said['verdict']}**"
                yield page, short(said["says"]), short(said["paper"]), short(said["here"]), n, verdict, raw


def claims(paper: str) -> list[str]:
    """Return the table of a paper's claims."""
    columns = ("study (scale)", "claim", "paper", "here", "seeds", "verdict", "numbers")
    found = tuple(rows(paper))
    return Table("", columns, found).markdown().splitlines() if found else ["No results are kept yet."]


def summary() -> list[str]:
    """Return the table of all papers: verdicts, trainings and seeds."""
    lines = []
    for paper, title in PAPERS.items():
        its = [one for one in kept() if one.paper == paper]
        words = Counter(said["verdict"] for one in its for said in one.told["findings"])
        seeds = sorted({count for one in its for count in one.seeds()})
        link = f"[{title}](#{title.lower().replace(' ', '-')})"
        counts = (words["shown"], words["not shown"], words["undecided"])
        lines.append((link, len(its), *counts, trainings(paper), span(seeds)))
    columns = ("", "studies", "claims shown", "not shown", "undecided", "full-scale trainings kept", "seeds")
    return Table("", columns, tuple(lines)).markdown().splitlines()


def tables() -> dict[str, list[str]]:
    """Return the tables by name."""
    return {"summary": summary(), **{f"claims {paper}": claims(paper) for paper in PAPERS}}
