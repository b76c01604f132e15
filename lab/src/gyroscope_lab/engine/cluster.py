"""Trials on a Ray cluster: each trial is one Ray task, on any free machine."""

from __future__ import annotations

import copy
import logging
import os
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from gyroscope.base import required
from gyroscope.store import lock, schema
from gyroscope_lab.data.official import DATA
from gyroscope_lab.engine.engine import AT_ONCE
from gyroscope_lab.engine.run_one import Note, run_one
from gyroscope_lab.errors import LabError, TrialError
from gyroscope_lab.training import checkpoint
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.training import RATES
from gyroscope_lab.training.trial import Trial

# Seconds until a file written by one machine is visible to all machines that share its folder over a network.
_SEEN_WITHIN = 60.0
# Seconds that a finished trial waits for its last notes to arrive before it reports its end.
_NOTES_WITHIN = 10.0


def run_on_ray(
    trials: Sequence[Trial],
    archive: Archive,
    *,
    data: Path | None = None,
    on_note: Callable[[Note], None] = lambda note: None,
    on_done: Callable[[Trial, Result], None] = lambda trial, result: None,
    jobs: int | None = None,
    gpus: float | None = None,
    retries: int = 3,
) -> None:
    """Train all of `trials` on a Ray cluster, and keep their results in `archive`; see `lab.engine.run_trials`.

    The cluster is the one that this process is connected to (`ray.init`); otherwise the one that RAY_ADDRESS names or
    that `ray start` started on this machine; otherwise a new one on this machine, which is stopped at the end. Its
    machines need Gyroscope installed. Machines that see the archive's folder at the same path train in it: if a worker
    is lost, its trial resumes from the checkpoint. Other machines send their results: if a worker is lost, its trial
    starts again.

    Args:
        trials: the trials; one that copies rates begins when their source has ended, and receives them.
        archive: the archive of the results, on this machine.
        data: the folder of the datasets; machines without it use their own GYROSCOPE_DATA.
        on_note: called as each training ends an epoch.
        on_done: called as each ends.
        jobs: the most trials that are submitted at a time; by default all that can begin.
        gpus: the share of a GPU that a trial takes in addition to a CPU; by default an eighth if the cluster has GPUs,
            otherwise 0.
        retries: how often a trial is started again after its worker is lost.

    Raises:
        LabError: some trials failed. It is raised after all others have finished and their results are kept.
    """
    ray = imported()
    failed: list[str] = []
    with connected(ray), _marked(archive) as mark, _interrupts() as heed:
        crew = _Crew(ray, archive, mark, _folder(data), gpus=gpus, retries=retries)
        waiting, running = list(trials), dict[Any, Trial]()
        try:
            while waiting or running:
                ready = [t for t in waiting if t.source is None or archive.result(t.source) is not None]
                ready = ready[: None if jobs is None else jobs - len(running)]
                running |= {crew.begin(trial): trial for trial in ready}
                waiting = [t for t in waiting if t not in ready]
                if not running:
                    failed += [f"{_name(t)}: the trial whose rates it copies failed" for t in waiting]
                    break
                failed += _ended(crew, archive, running, on_note, on_done, heed)
        except BaseException:
            crew.dismiss(running)
            raise
        finally:
            crew.close()
    if failed:
        raise TrialError(f"{len(failed)} of {len(trials)} trials failed: {'; '.join(failed)}")


def _ended(
    crew: _Crew,
    archive: Archive,
    running: dict[Any, Trial],
    on_note: Callable[[Note], None],
    on_done: Callable[[Trial, Result], None],
    heed: Callable[[], None] = lambda: None,
) -> list[str]:
    """Wait until some trials have ended; return the failed ones with their reasons."""
    done, failed = list[Any](), list[str]()
    while not done:
        heed()
        done = crew.wait(running)
        for note in crew.notes():
            on_note(note)
    for task in done:
        trial = running.pop(task)
        outcome = crew.outcome(task, trial)
        if outcome.failed is not None:
            failed.append(outcome.failed)
            continue
        try:
            if outcome.parcel is not None:
                _deliver(outcome.parcel, trial, archive)
            result = _seen(archive, trial)
        except (LabError, OSError) as error:
            failed.append(f"{_name(trial)}: {error}")
            continue
        on_done(trial, result)
    return failed


def _seen(archive: Archive, trial: Trial) -> Result:
    end = time.monotonic() + _SEEN_WITHIN
    while (result := archive.result(trial)) is None:
        if time.monotonic() > end:
            raise TrialError(
                f"The result was written, but {archive.folder(trial)} has none. Do the machines share that folder?"
            )
        time.sleep(0.2)
    return result


def _name(trial: Trial) -> str:
    return f"{trial.recipe.name}, seed {trial.seed}"


def _folder(data: Path | None) -> Path | None:
    found = data or os.environ.get(DATA)
    return Path(found).resolve() if found else None


@contextmanager
def _interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises a lost interrupt: exceptions within Ray's callbacks do not propagate."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread is interrupted
        yield lambda: None
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        came.append(number)
        if callable(before):
            before(number, frame)

    def heed() -> None:
        if came:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield heed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _marked(archive: Archive) -> Iterator[Path]:
    """A file in the archive by which other machines recognize that they share the folder."""
    mark = archive.root.resolve() / ".claims" / uuid.uuid4().hex
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Job:
    """The job of a worker."""

    trial: Trial
    archive: Archive
    mark: Path
    data: Path | None
    device: str


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a job: why it failed, or its files if the worker does not share the archive."""

    failed: str | None = None
    parcel: Parcel | None = None


class _Crew:
    """The cluster's workers, as the driver sees them."""

    def __init__(
        self, ray: Any, archive: Archive, mark: Path, data: Path | None, *, gpus: float | None, retries: int
    ) -> None:
        self._ray, self._archive, self._mark, self._data, self._retries = ray, archive, mark, data, retries
        has = ray.cluster_resources().get("GPU", 0.0)
        if gpus is not None and (gpus < 0 or gpus > has):
            raise LabError(
                f"`gpus` must be at most the {has:g} GPUs of the cluster, got {gpus:g}. Try gpus=0 for CPUs only."
            )
        share = gpus if gpus is not None else (1 / AT_ONCE if has else 0.0)
        options: dict[str, Any] = {"num_cpus": 1, "max_retries": retries} | ({"num_gpus": share} if share else {})
        self._device = "cuda" if share else "cpu"
        self._train = ray.remote(**options)(_train)
        self._queue = import_module("ray.util.queue").Queue(actor_options={"num_cpus": 0})
        self._rates: dict[str, Any] = {}
        self._there = copy.copy(archive)
        self._there.root = archive.root.resolve()

    def begin(self, trial: Trial) -> Any:
        """Submit a trial; return Ray's reference to its outcome."""
        rates = None
        if trial.source is not None:
            if trial.source.key not in self._rates:  # many trials may copy from one
                file = self._archive.folder(trial.source) / RATES
                self._rates[trial.source.key] = self._ray.put(file.read_bytes() if file.exists() else None)
            rates = self._rates[trial.source.key]
        job = _Job(trial, self._there, self._mark, self._data, self._device)
        return self._train.remote(job, rates, self._queue)

    def wait(self, running: dict[Any, Trial]) -> list[Any]:
        """A task that has ended, if one ends within a moment."""
        done: list[Any] = self._ray.wait(list(running), timeout=0.2)[0]
        return done

    def notes(self) -> list[Note]:
        """Return the notes of the workers since the last call."""
        try:
            waiting = self._queue.qsize()
            return [Note(*values) for values in self._queue.get_nowait_batch(waiting)]
        except self._ray.exceptions.RayError:  # its machine is lost; the trials continue
            return []

    def outcome(self, task: Any, trial: Trial) -> _Outcome:
        """Return the outcome of a worker."""
        try:
            outcome: _Outcome = self._ray.get(task)
            return outcome
        except self._ray.exceptions.WorkerCrashedError:
            said = f"its worker was killed, or ran out of memory, {self._retries + 1} times"
            return _Outcome(failed=f"{_name(trial)}: {said}")
        except self._ray.exceptions.RayError as error:
            return _Outcome(failed=f"{_name(trial)}: {type(error).__name__}: {error}")

    def dismiss(self, running: dict[Any, Trial]) -> None:
        """Cancel the running tasks."""
        for task in running:
            with suppress(Exception):
                self._ray.cancel(task, force=True)

    def close(self) -> None:
        """Remove everything of this run from the cluster."""
        with suppress(Exception):
            self._queue.shutdown(force=True)


def _train(job: _Job, rates: bytes | None, queue: Any) -> _Outcome:
    """Run a trial on a worker."""
    torch.set_num_threads(1)
    data = job.data if job.data is not None and job.data.is_dir() else None
    told: list[Any] = []

    def tell(note: Note) -> None:
        told[:] = [queue.actor.put_nowait.remote(astuple(note))]

    try:
        if job.mark.exists():
            run_one(job.trial, job.archive, data, tell, device=job.device)
            return _Outcome()
        with tempfile.TemporaryDirectory(prefix="gyroscope-") as scratch:
            own = Archive(scratch)
            if job.trial.source is not None and rates is not None:
                place = own.folder(job.trial.source)
                place.mkdir(parents=True)
                (place / RATES).write_bytes(rates)
            run_one(job.trial, own, data, tell, device=job.device)
            return _Outcome(parcel=_pack(own.folder(job.trial)))
    except LabError as error:
        return _Outcome(failed=str(error))
    finally:
        with suppress(Exception):  # notes are not part of the result
            imported().get(told, timeout=_NOTES_WITHIN)


# Seconds for a cluster to accept a connection.
_KNOCK_WITHIN = 10.0


def imported() -> Any:
    """Return the module `ray`, or raise an error that says how to install it.

    >>> imported().__name__
    'ray'
    """
    return required("ray", "The engine 'ray'", "gyroscope-lab[ray]")


@contextmanager
def connected(ray: Any) -> Iterator[None]:
    """Connect to a cluster; a cluster that is started here is stopped at the end."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS", "")
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "include_dashboard": False}
    try:
        try:
            _knock(address or _noted())
            ray.init(**quiet)
        except OSError as error:
            if address:
                raise LabError(
                    f"No Ray cluster answers at RAY_ADDRESS={address} ({error}). Start it, set RAY_AUTH_MODE=token if "
                    "it asks for one, or unset RAY_ADDRESS to use this machine alone."
                ) from error
            ray.init(address="local", **quiet)  # the cluster that `ray start` started here no longer exists
        yield
    finally:
        ray.shutdown()
        if in_main:  # Ray has set its own handlers
            signal.signal(signal.SIGTERM, handler)


def _noted() -> str:
    """The address of the cluster that `ray start` last started on this machine; it may no longer exist."""
    place = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        return Path(place, "ray", "ray_current_cluster").read_text().strip()
    except OSError:
        return ""


def _knock(address: str) -> None:
    """Raise an OSError if nothing listens at the address; Ray itself would notice only after minutes."""
    host, found, port = address.removeprefix("ray://").rpartition(":")
    if found and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_WITHIN).close()


#: The files by name.
Parcel = dict[str, bytes]

# Files that an interrupted training may have left; a database must not be read with the journal of another.
_LEFT = (checkpoint.FILE, schema.FILE, *(path.name for path in schema.sidecars(Path(schema.FILE))))


def _pack(folder: Path) -> Parcel:
    """Read the files of a trial's folder: its result, its run, and all others it keeps.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "result.json").write_text("{}")
    ...     _pack(Path(folder))
    {'result.json': b'{}'}
    """
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != lock.FILE}


def _deliver(parcel: Parcel, trial: Trial, archive: Archive) -> None:
    """Write the files to the archive, the result last and atomically, unless it has a result by now.

    >>> import tempfile
    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.engine.run_one import run_one
    >>> from gyroscope_lab.training.tasks import task
    >>> trial = Trial(task("digits").lasting(1), Recipe("SGD", 0.1))
    >>> with tempfile.TemporaryDirectory() as there, tempfile.TemporaryDirectory() as here:
    ...     result = run_one(trial, Archive(there))
    ...     _deliver(_pack(Archive(there).folder(trial)), trial, Archive(here))
    ...     Archive(here).result(trial) == result
    True
    """
    with archive.claimed(trial) as folder:
        if archive.result(trial) is not None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for name in _LEFT:
            (folder / name).unlink(missing_ok=True)
        for name in sorted(parcel, key=lambda name: name == "result.json"):
            new = folder / f"{name}.new"
            new.write_bytes(parcel[name])
            new.replace(folder / name)
