"""A box of GPU minutes: trainings that end in time, one archive of their files, and its collection.

`run_box` trains for a given time and writes an archive, a tar file. It holds `box.json` (the time, the machine, and the
status of each trial) and the files of each trial in `<task>/<trial>/`. `collect` merges an archive into the folder of
trainings, and writes results in their small form to the folder of kept results. No finished training is lost, and
collecting an archive twice changes nothing.
"""

from __future__ import annotations

import json
import signal
import sqlite3
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from math import inf
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any, Literal

import torch

import gyroscope
from gyroscope.base import whole_file
from gyroscope.store import connect
from gyroscope.store.schema import FILE as RUN
from gyroscope.store.schema import sidecars
from gyroscope_lab.data.download import extract
from gyroscope_lab.engine.engine import uninterrupted
from gyroscope_lab.engine.population import Deadline, run_population
from gyroscope_lab.engine.run_one import Note, loaded
from gyroscope_lab.errors import LabError
from gyroscope_lab.training import checkpoint, last_layer
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.training import RATES, WEIGHTS, Training
from gyroscope_lab.training.trial import Trial, from_description

Status = Literal["finished", "resumable", "started", "failed"]

_BOX, _RESULT = "box.json", "result.json"
# The files of a trial that later trainings and studies read. The result comes last: a folder with a result is complete.
_FILES = (RUN, last_layer.FILE, RATES, WEIGHTS, checkpoint.FILE, _RESULT)
_VERSION = 1
# The time for writing the archive: this share of the minutes plus this many seconds, and at most a fifth of them.
_SHARE, _SECONDS, _MOST = 0.03, 5.0, 0.2
# Seconds for trainings to end their epoch after a signal: most systems leave half a minute in all.
_GRACE = 10.0


@dataclass(frozen=True)
class Touched:
    """A trial that a box worked on.

    Attributes:
        trial: the trial.
        status: "finished" with a result, "resumable" from a checkpoint, "started" without one, or "failed".
        epochs: the number of completed epochs.
        seconds: the time spent on it, in this box and in earlier ones.
        reason: the reason of a failure.
    """

    trial: Trial
    status: Status
    epochs: int
    seconds: float
    reason: str | None = None


@dataclass(frozen=True)
class Box:
    """The result of a box.

    Attributes:
        path: the archive.
        minutes: the time limit.
        used: the minutes it took, without writing the archive.
        signal: the name of the signal that ended it early, or None.
        trials: the trials that it worked on.
        left_out: the number of unfinished trainings left out because the archive would be too large.
        lean: the number of finished trainings whose database was left out for the same reason.
    """

    path: Path
    minutes: float
    used: float
    signal: str | None
    trials: tuple[Touched, ...]
    left_out: int = 0
    lean: int = 0


def run_box(
    trials: Sequence[Trial],
    archive: Archive,
    *,
    minutes: float,
    path: Path | str | None = None,
    data: Path | str | None = None,
    at_once: int = 8,
    device: str = "cuda",
    began: float | None = None,
    grace: float = _GRACE,
    limit: int | None = None,
    whole: Collection[Trial] = (),
    on_note: Callable[[Note], None] = lambda note: None,
    on_done: Callable[[Trial, Result], None] = lambda trial, result: None,
    on_failed: Callable[[Trial, str], None] = lambda trial, why: None,
) -> Box:
    """Train for `minutes`, and write the files of the trainings to one archive.

    Trials run side by side (see `run_population`). Trainings that do not end in time are saved, and can be resumed
    where the archive is collected. The time includes writing the archive. SIGTERM and Ctrl-C end the box early, in the
    same way. A second Ctrl-C ends it at once, and the archive holds the checkpoints saved before.

    Args:
        trials: the trials, the most important first; a trial that copies rates comes after their source.
        archive: the folder of trainings. Trials with a checkpoint are resumed.
        minutes: the time limit, a positive number.
        path: the archive file; by default `box-<date and time>.tar` in the current folder.
        data: the folder of the datasets; by default GYROSCOPE_DATA.
        at_once: the most trials that share the device.
        device: the GPU; "cpu" trains them in turns.
        began: the `time.monotonic()` at which the minutes begin; by default now.
        grace: seconds for trainings to end their epoch after a signal.
        limit: the largest size of the archive in bytes. If it would be larger, unfinished trainings are left out, those
            farthest from their end first, and then the databases of finished ones that were measured once per epoch,
            as their results are, and are not `whole`; all of it stays in the folder of `archive`.
        whole: trials whose databases studies read; these are never left out.
        on_note: called as each training ends an epoch.
        on_done: called as each ends.
        on_failed: called with each trial that fails, and the reason.

    Raises:
        LabError: `minutes` is not a positive number, or the archive exists or cannot be written.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.tasks import task
    >>> trial = Trial(task("digits").lasting(1), Recipe("SGD", 0.1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     box = run_box([trial], Archive(f"{folder}/a"), minutes=1, path=f"{folder}/box.tar", device="cpu")
    ...     [one.status for one in collect(box.path, f"{folder}/runs", f"{folder}/kept")]
    ['finished']
    """
    if not 0 < minutes < inf:
        raise LabError(f"`minutes` must be a finite number > 0, got {minutes}. Try 30.")
    began = time.monotonic() if began is None else began
    opened, seconds = datetime.now(UTC), 60 * minutes
    target = Path(f"box-{opened:%Y%m%dT%H%M%SZ}.tar") if path is None else Path(path)
    _require_new(target)
    deadline = Deadline(began + seconds - min(_SHARE * seconds + _SECONDS, _MOST * seconds))
    folder = None if data is None else Path(data)
    progress: dict[str, tuple[int, float]] = {}
    touched: dict[str, Touched] = {}

    def end_epoch(training: Training) -> None:
        spent = training.before + time.perf_counter() - training.began
        progress[training.trial.key] = training.epoch, spent
        on_note(Note.of(training))

    def finish(trial: Trial, result: Result) -> None:
        touched[trial.key] = Touched(trial, "finished", len(result.loss), result.seconds)
        on_done(trial, result)

    def fail(trial: Trial, why: str) -> None:
        touched[trial.key] = Touched(trial, "failed", *progress.get(trial.key, (0, 0.0)), reason=why)
        on_failed(trial, why)

    by_key = {trial.key: trial for trial in trials}
    left: list[Trial] = []
    with _stopped_by_signals(deadline, grace) as signals:
        try:
            left = run_population(
                list(by_key.values()),
                lambda trial: loaded(trial.task.source, folder),
                archive,
                at_once=at_once,
                device=device,
                until=deadline,
                on_epoch=end_epoch,
                on_done=finish,
                on_failed=fail,
            ).left
        finally:
            # Also after a second Ctrl-C: a training that has ended an epoch may have a checkpoint.
            for key in dict.fromkeys([*(trial.key for trial in left), *progress]):
                if key not in touched:
                    saved = checkpoint.epoch(archive.folder(by_key[key]))
                    status: Status = "resumable" if saved else "started"
                    touched[key] = Touched(by_key[key], status, saved, progress.get(key, (0, 0.0))[1])
            used = (time.monotonic() - began) / 60
            trained = tuple(touched.values())
            with uninterrupted():
                out, lean = _left_out(trained, archive, inf if limit is None else limit, {one.key for one in whole})
                ended_by = signals[0] if signals else None
                box = Box(target, minutes, used, ended_by, trained, len(out), len(lean))
                _write(box, archive, opened, device, out, lean)
    return box


def _require_new(target: Path) -> None:
    """Reject a path that exists, or that the archive could not be written to at the end."""
    if target.exists():
        raise LabError(f"{target} exists. Collect it and delete it, or give the archive another name.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as new:
            new.touch()
        target.unlink()
    except OSError as error:
        raise LabError(f"{target} cannot be written ({error}). Give the archive another name.") from error


@contextmanager
def _stopped_by_signals(deadline: Deadline, grace: float) -> Iterator[list[str]]:
    """Let SIGTERM and SIGINT bring the deadline forward; the second SIGINT interrupts as usual."""
    received: list[str] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield received
        return

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)
        deadline.stop(within=grace)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write(box: Box, archive: Archive, opened: datetime, device: str, left_out: set[str], lean: set[str]) -> None:
    """Write the archive atomically, without the trials that are `left_out` and the databases of the `lean` ones."""
    on_gpu = torch.device(device).type == "cuda"
    about = {
        "version": _VERSION,
        "began": opened.isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "minutes": box.minutes,
        "used": round(box.used, 3),
        "signal": box.signal,
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "torch": torch.__version__,
        "gyroscope": gyroscope.__version__,
        "trials": [_described(one, archive) for one in box.trials],
    }
    text = json.dumps(about, indent=1, allow_nan=False).encode()
    try:
        with whole_file(box.path) as new, tarfile.open(new, "w") as tar:
            entry = tarfile.TarInfo(_BOX)
            entry.size, entry.mtime = len(text), int(time.time())
            tar.addfile(entry, BytesIO(text))
            for one in box.trials:
                folder = archive.folder(one.trial)
                for name in _FILES:
                    leaves = one.trial.key in left_out or (name == RUN and one.trial.key in lean)
                    if (folder / name).is_file() and not leaves:
                        tar.add(folder / name, f"{_place(one.trial, archive)}/{name}", filter=_anonymous)
    except OSError as error:
        raise LabError(f"{box.path} cannot be written ({error}). The trainings are in {archive.root}.") from error


def _left_out(trained: Sequence[Touched], archive: Archive, limit: float, whole: set[str]) -> tuple[set[str], set[str]]:
    """Return the keys of the unfinished trials to leave out, and of the finished ones whose database to leave out."""
    sizes, databases = {}, {}
    for one in trained:
        folder = archive.folder(one.trial)
        _merge_log(folder / RUN)
        its = {path.name: _in_archive(path) for name in _FILES if (path := folder / name).is_file()}
        sizes[one.trial.key] = sum(its.values())
        per_epoch = one.trial.every is None and one.trial.conditions is None
        if one.status == "finished" and per_epoch and one.trial.key not in whole:
            databases[one.trial.key] = its.get(RUN, 0)
    total = tarfile.RECORDSIZE + sum(sizes.values())
    out: set[str] = set()
    for one in sorted(trained, key=lambda one: one.epochs / one.trial.schedule.epochs):
        if total > limit and one.status != "finished":
            total -= sizes[one.trial.key]
            out.add(one.trial.key)
    lean: set[str] = set()
    for key in sorted(databases, key=databases.__getitem__, reverse=True):
        if total > limit and databases[key]:
            total -= databases[key]
            lean.add(key)
    return out, lean


def _in_archive(path: Path) -> int:
    return path.stat().st_size + tarfile.RECORDSIZE


def _described(one: Touched, archive: Archive) -> dict[str, Any]:
    trial = one.trial
    return {
        "key": trial.key,
        "folder": _place(trial, archive),
        "name": f"{trial.recipe.name}, seed {trial.seed}",
        "task": trial.task.name,
        "status": one.status,
        "reason": one.reason,
        "epochs": one.epochs,
        "of": trial.schedule.epochs,
        "seconds": round(one.seconds, 3),
        "trial": trial.description,
    }


def _place(trial: Trial, archive: Archive) -> str:
    return archive.folder(trial).relative_to(archive.root).as_posix()


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _merge_log(file: Path) -> None:
    """Move what a run that was not closed has outside its file into it."""
    if any(path.exists() for path in sidecars(file)):
        with suppress(sqlite3.Error):
            connection = connect(file, "rw")
            try:
                connection.execute("BEGIN IMMEDIATE")  # undoes what a kill has left half committed
                connection.execute("ROLLBACK")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                connection.close()


@dataclass(frozen=True)
class Collected:
    """The outcome of one trial of an archive.

    Attributes:
        trial: the trial.
        status: as in `Touched`, in the box.
        taken: True if its files in `runs` now come from the archive; if not, the files there are finished, the same, or
            further along.
        kept: True if its result is new among the kept results.
        epochs: the number of epochs completed in the box.
        test: its test accuracy in the box; None if it did not finish there.
        before: the test accuracy that was kept before; None if there was none.
        reason: the reason of a failure.
    """

    trial: Trial
    status: Status
    taken: bool
    kept: bool
    epochs: int
    test: float | None = None
    before: float | None = None
    reason: str | None = None


def collect(path: Path | str, runs: Path | str, kept: Path | str) -> list[Collected]:
    """Merge the archive of a box into the folder of trainings, and its results into the folder of kept results.

    An unfinished training never replaces a result, an earlier checkpoint never replaces a later one, and a kept result
    is never replaced. A result in `runs` that lacks files of the archive, such as recorded rates, is replaced as a
    whole.

    Args:
        path: the archive.
        runs: the folder of trainings, where they are resumed and studies look for them; every file goes here.
        kept: the folder of kept results, in their small form, and of measurements of last layers.

    Raises:
        LabError: the file is not the archive of a box, or it is damaged; nothing has been changed. Or one of its trials
            is being trained.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.tasks import task
    >>> trial = Trial(task("digits").lasting(1), Recipe("SGD", 0.1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     box = run_box([trial], Archive(f"{folder}/a"), minutes=1, path=f"{folder}/box.tar", device="cpu")
    ...     [one] = collect(box.path, f"{folder}/runs", f"{folder}/kept")
    ...     one.status, Archive(f"{folder}/runs").result(trial) is not None
    ('finished', True)
    """
    path, archive, keeper = Path(path), Archive(runs), Archive(kept)
    archive.root.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that files can be moved into place.
    with tempfile.TemporaryDirectory(prefix=".collect-", dir=archive.root) as temporary:
        staged = Archive(temporary)
        try:
            with tarfile.open(path, "r:") as tar:  # boxes do not compress; a compressed file may expand to any size
                listed = _checked(tar, path)
                extract(tar, staged.root)
        except (OSError, tarfile.TarError, EOFError) as error:
            raise LabError(f"{path} cannot be read as the archive of a box ({error}).") from error
        checked = [_read(about, trial, staged, path) for about, trial in listed]
        return [_merged(one, test, staged.folder(one.trial), archive, keeper) for one, test in checked]


def _checked(tar: tarfile.TarFile, path: Path) -> list[tuple[dict[str, Any], Trial]]:
    """The trials that an archive lists; reject an archive with any other files."""
    members = tar.getmembers()
    # A sparse file may be small in the archive and expand to any size, so not even box.json is read.
    if sparse := [one.name for one in members if one.issparse()]:
        raise LabError(f"{path} is not the archive of a box: {sparse[0]!r} is sparse. Nothing was collected.")
    try:
        file = tar.extractfile(_BOX)
        assert file is not None
        about = json.load(file)
        if about["version"] != _VERSION:
            raise LabError(f"{path} has version {about['version']}, and this Gyroscope reads version {_VERSION}.")
        listed = [(one, from_description(one["trial"])) for one in about["trials"]]
        folders = {one["folder"]: (one, trial) for one, trial in listed}
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError, LabError) as error:
        raise LabError(f"{path} is not the archive of a box: its {_BOX} cannot be read ({error}).") from error
    accepted = {_BOX} | {f"{folder}/{name}" for folder in folders for name in _FILES}
    names = [member.name for member in members]
    foreign = [one.name for one in members if one.name not in accepted or not one.isreg() or names.count(one.name) > 1]
    for folder, (one, trial) in folders.items():
        parts = PurePosixPath(folder).parts
        if len(parts) != 2 or ".." in parts or one["key"] != trial.key or not folder.endswith(f"-{trial.key[:8]}"):
            foreign.append(folder)
    if foreign or len(folders) != len(listed):
        said = f"it holds {foreign[0]!r}" if foreign else "it lists a folder twice"
        raise LabError(f"{path} is not the archive of a box: {said}, which no box writes. Nothing was collected.")
    return listed


def _read(about: dict[str, Any], trial: Trial, staged: Archive, path: Path) -> tuple[Touched, Result | None]:
    """A trial as its files describe it, and its result; `box.json` is used only for failures and times."""
    folder = staged.folder(trial)
    try:
        result = staged.result(trial)
        state = checkpoint.load(folder, key=trial.key)
        epochs = len(result.loss) if result is not None else 0 if state is None else int(state["epoch"])
    except (LabError, KeyError, TypeError, ValueError) as error:
        raise LabError(f"{path} is damaged: {about['folder']} ({error}). Nothing was collected.") from error
    status: Status = "finished" if result is not None else "resumable" if state is not None else "started"
    reason = about.get("reason") if result is None else None
    return Touched(trial, "failed" if reason else status, epochs, float(about["seconds"]), reason), result


def _merged(one: Touched, result: Result | None, new: Path, archive: Archive, keeper: Archive) -> Collected:
    trial = one.trial
    with archive.claimed_if_free(trial) as folder:
        if folder is None:
            raise LabError(f"{archive.folder(trial)} is being trained. Collect again when that has ended.")
        known, before = archive.result(trial), keeper.result(trial)
        there = {name for name in _FILES if (folder / name).exists()}
        if result is not None:
            taken = known is None or not {path.name for path in new.iterdir()} <= there
        else:
            # A finished trial is only trained again if its recorded rates are needed.
            needed = before is None or (trial.recipe.records and RATES not in there)
            saved = checkpoint.epoch(folder) if checkpoint.FILE in there else 0
            taken = known is None and needed and one.epochs > saved
        if taken:
            _move(new, folder)
        if archive.result(trial) is not None:
            (folder / checkpoint.FILE).unlink(missing_ok=True)
        finished = archive.result(trial) if before is None else None
        if finished is not None:
            _keep(trial, finished, folder, keeper.folder(trial))
    test, earlier = (None if its is None else its.test_accuracy for its in (result, before))
    return Collected(trial, one.status, taken, finished is not None, one.epochs, test, earlier, one.reason)


def _move(new: Path, folder: Path) -> None:
    """Replace the files of a training by those of another, the result last."""
    folder.mkdir(parents=True, exist_ok=True)
    # The journal of another run would be read as part of this run.
    for path in (folder / _RESULT, *sidecars(folder / RUN)):
        path.unlink(missing_ok=True)
    for name in _FILES:
        if (new / name).exists():
            (new / name).replace(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def _keep(trial: Trial, result: Result, folder: Path, kept: Path) -> None:
    kept.mkdir(parents=True, exist_ok=True)
    followed = folder / last_layer.FILE
    if followed.exists():
        with whole_file(kept / last_layer.FILE) as new:
            new.write_bytes(followed.read_bytes())
    result.write(kept / _RESULT, trial.description, small=True)
