"""The queue of full-scale trainings that are still missing, most valuable first.

`missing_trials` compares what the studies need with what an archive holds, and adds what follows from results that it
holds, such as the further seeds of the best rate. `write` puts the list into a Markdown file that a person can read and
reorder, and `read` takes it from there. GPU time is spent from the top of that file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import groupby
from math import inf
from pathlib import Path

from gyroscope.base import write_whole
from gyroscope_lab.engine.cost import expected
from gyroscope_lab.engine.laboratory import EXTRA_SEEDS, Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.catalogue import studies
from gyroscope_lab.papers.study import Study, Table
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.training import RATES
from gyroscope_lab.training.trial import Trial

# Digits of a trial's key in the file: 48 bits tell a few thousand trials apart.
_DIGITS = 12
_ROW = re.compile(rf"\|\s*`([0-9a-f]{{{_DIGITS}}})`\s*\|")
_COLUMNS = ("key", "task", "recipe", "seed", "minutes", "studies")
# Data sets that most machines lack: one is licensed, the other has a single publisher.
_REMOTE = ("tiny-imagenet", "imagenet")
# Seconds from which a training waits for all shorter ones: C100-WRN, and networks of 230 layers and more.
_LONG = 600.0

# A configuration that so many studies use is worth its seeds before others.
_SHARED = 6
_FIRST_SEEDS = f"Second and third seeds of kept CIFAR configurations that {_SHARED} studies or more use"
# By task, recipes whose single seed left a claim undecided or came out far from the paper's number, as of 2026-11-20.
_OPEN = {
    "c10-cnn1": ("LARS 3^-3", "SGD 3^0"),
    "c100-resnet": (
        "LARS 3^-3",
        "Layca 3^-6",
        "Layca 3^-3, alpha -0.1",
        "Layca 3^-3, alpha -0.4",
        "Adam-Layca 3^-4.3",
        "Adam-Layca 3^-5",
        "SGD_AMom-Layca 3^-5",
    ),
}
_OPEN_SEEDS = "Second and third seeds of CIFAR configurations of which one seed leaves a claim open"
_SEEDS = "Second and third seeds of the other kept CIFAR configurations"
_LAST = "Trainings of more than ten minutes each"
_NO_DATA = "Trainings on Tiny ImageNet and ImageNet, whose data must be downloaded first"


@dataclass(frozen=True)
class Entry:
    """A missing trial.

    Attributes:
        trial: the trial, with its precision.
        seconds: its price on the GPU, its share where several trials run side by side; None if unknown.
        studies: the names of the studies that it serves; for an additional seed, those of seed 0.
        group: the heading under which it stands in the file.
    """

    trial: Trial
    seconds: float | None
    studies: tuple[str, ...]
    group: str


@dataclass(frozen=True)
class _Group:
    """Trials that have the same value: those of these studies on these tasks, given by name or pattern.

    With `once`, those of seed 0 alone.
    """

    title: str
    studies: tuple[str, ...]
    tasks: tuple[str, ...] = ("*",)
    once: bool = False

    def holds(self, entry: Entry) -> bool:
        its = _matches([entry.trial.task.name], self.tasks) and _matches(entry.studies, self.studies)
        return its and not (self.once and entry.trial.seed)


_SWEPT = ("c10-cnn1", "c100-resnet")
#: The order of value. Trials in none of these groups come after them, study by study, the cheapest study first.
GROUPS = (
    _Group("Adam under Layca on C100-resnet, by rate", ("rotation/adam-layca-rates",)),
    _Group(
        "Cheap studies that never ran at full scale",
        (
            *(f"conditioning/{name}" for name in ("fig3", "fig4", "fig5", "a5", "a6", "a7", "a11", "a12")),
            *("rotation/fig5", "rotation/fig10", "speed/fig8"),
        ),
    ),
    _Group("AdaptCopy on C10-CNN1 and C100-resnet", ("rotation/fig7",), _SWEPT),
    _Group(
        "The remaining rates and skews of C10-CNN1 and C100-resnet",
        ("rotation/*", "speed/fig6", "speed/fig9", "speed/fig10"),
        _SWEPT,
    ),
    _Group("ResNet-110 with and without a warm-up", ("rotation/fig4",), once=True),
    _Group(_FIRST_SEEDS, ()),  # found by their seed, as the other seeds
    _Group(_OPEN_SEEDS, ()),
    _Group("ResNet-110 with LastBN", ("rotation/lastbn",), once=True),
    _Group(_SEEDS, ()),
    _Group("Conditioning of trained convolutions", ("conditioning/a8", "conditioning/a9")),
    _Group("Rates for initial weights of another size on C10-CNN1-light", ("speed/fig7",)),
    _Group("Rates tuned for each skew on C10-CNN1 and C100-resnet", ("speed/fig2",), _SWEPT),
    _Group("Other cheap studies", ("dynamics/*", "conditioning/a10")),
    _Group("Crops of the 56-layer networks", ("conditioning/crops",)),
    _Group("C10-CNN2", ("rotation/*", "speed/*"), ("c10-cnn2",)),
)
_TITLES = [one.title for one in GROUPS]


def missing_trials(lab: Lab) -> list[Entry]:
    """Return every full-scale trial that the laboratory's archive does not hold, most valuable first.

    Equal trials are listed once. The second and third seed of a CIFAR configuration are listed once its first seed is
    kept. A trial comes after the one whose rates it copies; that one is listed too where its rates are not kept.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     entries = missing_trials(Lab(Archive(folder)))
    >>> entries[0].group, entries[-1].trial.task.name
    ('Adam under Layca on C100-resnet, by rate', 'imagenet-resnet-lastbn-50')
    """
    listed = _catalog() | _following(lab.archive)
    is_kept = {key: lab.archive.result(one.trial) is not None for key, one in listed.items()}
    grouped = []
    for key, one in listed.items():
        first = replace(one.trial, seed=0).key
        more = one.trial.seed in EXTRA_SEEDS and "cifar" in one.trial.task.source.name and is_kept.get(first, False)
        if not is_kept[key] and (more or one.required):
            grouped.append(replace(one.entry, group=_group(one.entry, more=more)))
    ordered = _in_order(grouped)
    return _after_sources(ordered, listed, lab.archive)


def kept_trials(lab: Lab) -> int:
    """Return how many full-scale trials of the studies the laboratory's archive holds.

    >>> kept_trials(Lab(Archive("no/such/folder")))
    0
    """
    listed = _catalog() | _following(lab.archive)
    return sum(lab.archive.result(one.trial) is not None for one in listed.values())


def wanted(entries: Sequence[Entry], runs: Archive, kept: Archive) -> list[Entry]:
    """Return the entries of a queue that neither archive has a result of.

    A trial whose rates one of them copies is trained again where its recorded rates are not in `runs`.
    """
    missing = [one.trial for one in entries if runs.result(one.trial) is None and kept.result(one.trial) is None]
    sources = {one.key for trial in missing for one in trial.lineage[:-1] if not (runs.folder(one) / RATES).exists()}
    keys = sources | {trial.key for trial in missing}
    return [one for one in entries if one.trial.key in keys]


def write(entries: Sequence[Entry], path: Path, *, kept: int) -> None:
    """Write the queue as Markdown: one section per group, one row per trial.

    Args:
        entries: the trials, most valuable first.
        path: the file, replaced as a whole.
        kept: how many full-scale trainings are kept already.
    """
    unpriced = sum(one.seconds is None for one in entries)
    parts = [
        "# The queue of full-scale trainings",
        f"{len(entries):,} full-scale trainings are missing, {kept:,} are kept. The missing ones take "
        f"about {_minutes(entries) / 60:,.0f} hours on one H200"
        + (f", and {unpriced} of them have no price yet." if unpriced else "."),
        "`gyroscope reproduce --queue` makes this file from the studies and from `runs/`, most valuable first. "
        "`gyroscope reproduce --minutes M` trains from the top for M minutes. Rows may be moved or deleted; only "
        "their order and their keys are read. A trial that copies the rates of another always runs after it. "
        "Minutes are estimates for one trial among several that share the GPU.",
    ]
    for group, its in groupby(entries, key=lambda entry: entry.group):
        rows = list(its)
        parts.append(f"## {group}")
        known = sum(one.seconds is not None for one in rows)
        total = f"{_minutes(rows):,.1f} minutes" if known == len(rows) else f"{_minutes(rows):,.1f} minutes and more"
        parts.append(f"{_counted(len(rows))}, {total if known else 'price unknown'}.")
        parts.append(Table(group, _COLUMNS, tuple(map(_row, rows))).markdown())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "\n\n".join(parts) + "\n")


def read(path: Path, lab: Lab, kept: Archive | None = None) -> list[Entry]:
    """Return the trials of a queue in the order of its rows, without those that the laboratory's archive now holds.

    Args:
        path: the file.
        lab: the laboratory.
        kept: the archive that the queue was made from, and from which some of its trials follow; by default the
            laboratory's.

    Raises:
        LabError: the file is missing, or a row does not name a trial of the studies. Rows of trials that no longer
            follow from what is kept are skipped.
    """
    again = "Run `gyroscope reproduce --queue` to write it again."
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"The queue {path} cannot be read: {error}. {again}") from error
    listed = _catalog() | _following(kept or lab.archive)
    by_digits = {key[:_DIGITS]: one.entry for key, one in listed.items()}
    found: dict[str, Entry] = {}
    group = ""
    for number, line in enumerate(lines, start=1):
        if line.startswith("## "):
            group = line.removeprefix("## ").strip()
        first = line.removeprefix("|").split("|")[0].strip()
        if not line.startswith("|") or first == _COLUMNS[0] or not first.strip("-:"):  # a heading, and the line below
            continue
        row = _ROW.match(line)
        if row is not None and row[1] not in by_digits and _may_follow(line):
            continue
        if row is None or row[1] not in by_digits:
            raise LabError(f"Line {number} of {path} does not name a trial of the studies: {line[:60]!r}. {again}")
        found.setdefault(row[1], replace(by_digits[row[1]], group=group))
    missing = [one for one in found.values() if lab.archive.result(one.trial) is None]
    return _after_sources(missing, listed, lab.archive)


@dataclass(frozen=True)
class _Listed:
    """A trial of the studies, and whether one of them needs it; additional seeds are welcome, not needed."""

    entry: Entry
    required: bool

    @property
    def trial(self) -> Trial:
        return self.entry.trial


def _catalog() -> dict[str, _Listed]:
    """Every full-scale trial of the studies by its key, with what it copies and with additional seeds."""
    return dict(_listed(tuple(studies().items())))


def _following(archive: Archive) -> dict[str, _Listed]:
    """The trials by key that follow from the results in an archive, and are not in the catalog."""
    catalog, served = _catalog(), dict[Trial, list[str]]()
    for name, study in studies().items():
        if study.follow is not None:
            asked: list[Trial] = []
            study.follow(Lab(archive, "full", known=True, on_asked=asked.extend))
            for trial in dict.fromkeys(map(_kept_as, asked)):
                if trial.key not in catalog:
                    served.setdefault(trial, []).append(name)
    return {trial.key: _Listed(_entry(trial, names), required=True) for trial, names in served.items()}


def _may_follow(row: str) -> bool:
    """Return whether a row of the queue is of a study whose trials may follow from results."""
    names = row.rstrip().removesuffix("|").rpartition("|")[2].split(",")
    return any((study := studies().get(name.strip())) and study.follow for name in names)


@lru_cache(maxsize=1)
def _listed(named: tuple[tuple[str, Study], ...]) -> Mapping[str, _Listed]:
    """The catalog of these studies; at full scale their trials depend neither on an archive nor on a data folder."""
    full = Lab(Archive("."), "full")
    trials: dict[str, Trial] = {}
    served: dict[str, list[str]] = {}
    required: set[str] = set()
    for name, study in named:
        needed = {one.key for trial in study.trials(full) for one in _kept_as(trial).lineage}
        required |= needed
        for trial in study.trials(replace(full, known=True)):
            for one in _kept_as(trial).lineage:
                if one.task.test_curve or one.key not in trials:  # of equal trials, the one that measures more
                    trials[one.key] = one
                served.setdefault(one.key, [])
                if name not in served[one.key]:
                    served[one.key].append(name)
    return {key: _Listed(_entry(trial, served[key]), key in required) for key, trial in trials.items()}


def _kept_as(trial: Trial) -> Trial:
    """The trial in the precision in which full-scale trainings are kept, on any machine."""
    return replace(trial, precision=trial.task.precision or "bf16")


def _entry(trial: Trial, names: Sequence[str]) -> Entry:
    price = expected(trial)
    return Entry(trial, None if price is None else price.seconds, tuple(names), group="")


def _group(entry: Entry, *, more: bool) -> str:
    """The heading of a trial; empty for those that are grouped by study."""
    if entry.trial.task.source.name in _REMOTE:
        return _NO_DATA
    is_long = entry.seconds is None or entry.seconds > _LONG
    if more and not is_long:
        left_open = entry.trial.recipe.name in _OPEN.get(entry.trial.task.name, ())
        return _FIRST_SEEDS if len(entry.studies) >= _SHARED else _OPEN_SEEDS if left_open else _SEEDS
    return next((one.title for one in GROUPS if one.holds(entry)), _LAST if is_long else "")


def _in_order(entries: Sequence[Entry]) -> list[Entry]:
    """Groups by value, then studies by price, then long trainings, then those without data."""
    rest = [one for one in entries if not one.group]
    by_study: list[Entry] = []
    while rest:
        of_study = {name: [one for one in rest if name in one.studies] for one in rest for name in one.studies}
        cheapest = min(of_study, key=lambda name: _minutes(of_study[name]))
        heading = f"{cheapest}: {studies()[cheapest].title}"
        by_study += _by_task([replace(one, group=heading) for one in of_study[cheapest]])
        rest = [one for one in rest if cheapest not in one.studies]
    found = {title: _by_task([one for one in entries if one.group == title]) for title in (*_TITLES, _LAST, _NO_DATA)}
    return [*(one for title in _TITLES for one in found[title]), *by_study, *found[_LAST], *found[_NO_DATA]]


def _by_task(entries: Sequence[Entry]) -> list[Entry]:
    """The cheapest task first, and the cheapest trial first within it; trials without a price come last."""
    of_task: dict[str, list[Entry]] = {}
    for one in sorted(entries, key=lambda one: inf if one.seconds is None else one.seconds):
        of_task.setdefault(one.trial.task.name, []).append(one)
    return [one for its in of_task.values() for one in its]


def _after_sources(entries: Sequence[Entry], listed: Mapping[str, _Listed], archive: Archive) -> list[Entry]:
    """The same trials, each after those whose rates it copies; these join where the archive lacks their rates."""
    given = {one.trial.key: one for one in entries}
    placed: dict[str, Entry] = {}
    for entry in entries:
        for one in entry.trial.lineage[:-1]:
            if not (archive.folder(one) / RATES).exists():
                placed.setdefault(one.key, replace(given.get(one.key, listed[one.key].entry), group=entry.group))
        placed.setdefault(entry.trial.key, entry)
    return list(placed.values())


def _row(entry: Entry) -> tuple[object, ...]:
    trial = entry.trial
    warmup = f", warm-up {trial.schedule.warmup:g} epochs" if trial.schedule.warmup else ""
    minutes = "?" if entry.seconds is None else f"{entry.seconds / 60:.2f}"
    named = ", ".join(entry.studies)
    return (f"`{trial.key[:_DIGITS]}`", trial.task.name, trial.recipe.name + warmup, trial.seed, minutes, named)


def _minutes(entries: Iterable[Entry]) -> float:
    return sum(one.seconds or 0.0 for one in entries) / 60


def _counted(trials: int) -> str:
    return "1 training" if trials == 1 else f"{trials:,} trainings"


def _matches(names: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
