"""The options --queue, --minutes and --collect of `gyroscope reproduce`: training on a GPU for some minutes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from gyroscope.cli.fail import BAD_ARGUMENT, FAILED, INTERRUPTED, fail
from gyroscope.cli.printed import console, echo, text
from gyroscope.errors import GyroscopeError
from gyroscope_lab.cli.lab_progress import described
from gyroscope_lab.cli.missing_data import lacking, to_get
from gyroscope_lab.cli.shared import make_folder

if TYPE_CHECKING:
    from gyroscope_lab.engine.laboratory import Lab
    from gyroscope_lab.engine.run_one import Note
    from gyroscope_lab.papers.queue import Entry
    from gyroscope_lab.training.result import Result
    from gyroscope_lab.training.trial import Trial

# A pipe or a file has no width; every column fits into this one.
_UNBOUNDED = 170
# Seconds between two lines about the progress of a box.
_EVERY = 60.0


def write_queue(out: Path) -> None:
    """Write `out/queue.md` from the studies and the results kept in `out/runs`."""
    from gyroscope_lab.engine.laboratory import Lab
    from gyroscope_lab.papers import queue
    from gyroscope_lab.training.archive import Archive

    kept, path = out / "runs", out / "queue.md"
    try:
        lab = Lab(Archive(kept), "full")
        entries = queue.missing_trials(lab)
        queue.write(entries, path, kept=queue.kept_trials(lab))
    except (GyroscopeError, OSError) as error:
        fail(str(error), code=FAILED)
    echo(f"Wrote {path}: {len(entries)} trainings")


def run_minutes(
    lab: Lab,
    names: Sequence[str],
    *,
    minutes: float,
    out: Path,
    data: Path,
    archive: Path | None,
    limit: int | None,
    began: float,
) -> None:
    """Train from the top of `out/queue.md` for `minutes`, and write one archive.

    Args:
        lab: the laboratory, with the archive of the trainings, the `jobs` at a time, and the tasks.
        names: the studies to train for; empty for all.
        minutes: the time limit, including the writing of the archive.
        out: the folder of the queue and of the kept results.
        data: the folder of the datasets.
        archive: the file to write.
        limit: its largest size in MiB; see `gyroscope_lab.engine.box.run_box`.
        began: the `time.monotonic()` at which the minutes begin.
    """
    from gyroscope_lab.engine.box import run_box
    from gyroscope_lab.engine.engine import AT_ONCE
    from gyroscope_lab.papers import queue
    from gyroscope_lab.papers.catalogue import studies
    from gyroscope_lab.papers.queue import wanted
    from gyroscope_lab.training.archive import Archive

    device = _device()
    make_folder(lab.archive.root, "--runs")
    try:
        entries = [
            one
            for one in queue.read(out / "queue.md", lab, Archive(out / "runs"))
            if (not names or set(names) & set(one.studies)) and (not lab.only or one.trial.task.name in lab.only)
        ]
        missing = _with_data(wanted(entries, lab.archive, Archive(out / "runs")), data)
        trials = [one.trial for one in missing]
        whole = [one.trial for one in missing if any(studies()[name].reads_runs for name in one.studies)]
        if not trials:
            echo("Nothing to train: every training of the queue is finished, or its data is not here.", err=True)
            return
        progress = _Lines(minutes, began)
        progress.say(f"{len(trials)} trainings are missing, the most valuable first")
        try:
            box = run_box(
                trials, lab.archive, minutes=minutes, path=archive, data=data, at_once=lab.jobs or AT_ONCE,
                device=device, limit=None if limit is None else limit * 2**20, whole=whole, began=began,
                on_note=progress.on_note,
                on_done=progress.on_done, on_failed=progress.on_failed,
            )  # fmt: skip
        except KeyboardInterrupt:
            fail("Interrupted twice. The archive holds the trainings saved before.", code=INTERRUPTED)
    except (GyroscopeError, OSError) as error:
        fail(str(error), code=FAILED)
    counts: Counter[str] = Counter(one.status for one in box.trials)
    ended = f", ended by {box.signal}" if box.signal else ""
    echo(f"{_counted(counts)} in {box.used:.1f} of {minutes:g} minutes{ended}")
    echo(f"Wrote {box.path} ({box.path.stat().st_size / 2**20:.1f} MiB)")
    if box.left_out:
        echo(f"{box.left_out} unfinished trainings were left out of it; they are in {lab.archive.root}")
    if box.lean:
        echo(f"The databases of {box.lean} finished trainings were left out of it; their results are in it")
    echo(f"To merge it: gyroscope reproduce --collect {box.path}")
    if counts["failed"] == len(box.trials) > 0:
        fail("Every training failed.", code=FAILED)


def collect_archive(path: Path, *, runs: Path, out: Path) -> None:
    """Merge the archive of a box into `runs` and `out/runs`, and print the outcome of each trial."""
    from gyroscope_lab.engine.box import collect

    make_folder(runs, "--runs")
    make_folder(out, "--out")
    try:
        rows = collect(path, runs, out / "runs")
    except (GyroscopeError, OSError) as error:
        fail(str(error), code=FAILED)
    table = Table()
    for column in ("training", "status", "epochs", "test %", "before"):
        side = "right" if column in ("epochs", "test %", "before") else "left"
        table.add_column(column, overflow="fold", justify=side)  # type: ignore[arg-type]
    for row in rows:
        trial = row.trial
        said = row.status if row.reason is None else f"{row.status}: {row.reason}"
        cells = (
            trial.title,
            said if row.taken or row.kept or row.status in ("failed", "started") else f"{said}, known already",
            f"{row.epochs}/{trial.schedule.epochs}",
            _percent(row.test),
            _percent(row.before),
        )
        table.add_row(*map(text, cells))
    console(_UNBOUNDED).print(table)
    new = sum(row.kept for row in rows)
    echo(f"{_counted(Counter(row.status for row in rows))}; {new} new results in {out / 'runs'}")


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        said = "`--minutes` trains side by side on a GPU, and no CUDA device was found"
        fail(f"{said}. Try gyroscope reproduce NAME --scale small.", code=BAD_ARGUMENT)
    return "cuda"


def _with_data(entries: Sequence[Entry], folder: Path) -> list[Entry]:
    """The entries whose data is in a folder; print one line about the skipped ones."""
    missing = lacking([one.trial for one in entries], folder)
    skipped = Counter(one.trial.task.source.name for one in entries if one.trial.task.source.name in missing)
    if skipped:
        each = ", ".join(f"{name} ({count})" for name, count in skipped.items())
        said = f"Skipped {skipped.total()} trainings whose data is not in {folder}: {each}"
        echo(f"{said}. {to_get(list(skipped), folder)}", err=True)
    return [one for one in entries if one.trial.task.source.name not in missing]


class _Lines:
    """Progress of a box on standard error: one line per minute, and one per training that ends."""

    def __init__(self, minutes: float, began: float) -> None:
        self._minutes, self._began = minutes, began
        self._said = time.monotonic()
        self._notes: dict[str, Note] = {}
        self._done = 0

    def say(self, text: str) -> None:
        passed = (time.monotonic() - self._began) / 60
        echo(f"{passed:5.1f} of {self._minutes:g} min: {text}", err=True)

    def on_note(self, note: Note) -> None:
        self._notes[note.key] = note
        if time.monotonic() - self._said >= _EVERY:
            self._said = time.monotonic()
            under_way = ", ".join(f"{one.name} {one.epoch}/{one.epochs}" for one in self._notes.values())
            self.say(f"{self._done} finished, training {under_way}")

    def on_done(self, trial: Trial, result: Result) -> None:
        self._notes.pop(trial.key, None)
        self._done += 1
        self.say(described(trial, result))

    def on_failed(self, trial: Trial, why: str) -> None:
        self._notes.pop(trial.key, None)
        self.say(f"{trial.title} failed: {why}")


def _counted(counts: Counter[str]) -> str:
    """Return the number of trainings per status.

    >>> _counted(Counter(["resumable", "finished", "finished"]))
    '2 finished, 1 resumable'
    """
    order = ("finished", "resumable", "started", "failed")
    return ", ".join(f"{counts[name]} {name}" for name in order if counts[name]) or "nothing trained"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f}"
