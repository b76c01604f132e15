"""The runs of a folder while they are written: which there are, which have changed, and what the page asks about them.

`Following.look` notices changes by the state of the files, without opening them. Every change gets a number, larger
than all before; `since` says what has changed after a number, so that nobody who asks can miss a change. What is read
from a run is kept until the run changes, so that any number of readers costs as much as one.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from gyroscope import diagnosis, page  # both load what they name at the first question: a server starts without
from gyroscope.diagnosis.finding import SEVERITIES, Diagnosis, Finding
from gyroscope.errors import GyroscopeError, StoreError
from gyroscope.store import lock, schema
from gyroscope.store.find import DEPTH, is_within, run_folders
from gyroscope.store.folder import request
from gyroscope.store.growing import GrowingRun

#: Seconds for which a list of runs is read at a time; runs beyond that come with the next list.
_PATIENCE = 0.7
#: Seconds between two searches for new runs, and the least ratio of that time to the time that a search takes.
_SEARCH, _SEARCH_SHARE = 1.0, 50
#: Seconds between two diagnoses of a run, and the least ratio of the time between any two to the time that one takes.
_DIAGNOSE, _DIAGNOSE_SHARE = 4.0, 40
#: Seconds for which a file may still change without a new time: clocks of file systems are coarse.
_COARSE = 0.05
#: Seconds after which what nobody asks for any more is forgotten, and bytes that are kept for a run.
_FORGET, _KEPT = 60.0, 1 << 25
_SUMMARY = ("summary",)

#: What a file shows of its content without being opened; None if there is no such file.
Stamp = tuple[int, int, int] | None


class UnknownRunError(StoreError):
    """There is no such run in the folder, or not any more.

    Attributes:
        gone: True if it was there before.
    """

    def __init__(self, text: str, *, gone: bool) -> None:
        super().__init__(text)
        self.gone = gone


class Changes(NamedTuple):
    """The number of the last change, the ids of the runs, and whether runs came or went."""

    now: int
    runs: list[str]
    listed: bool


class Seen(NamedTuple):
    """The state of a run's files, which changes whenever anything is written."""

    file: Stamp
    log: Stamp
    held: bool


@dataclass(eq=False)
class Entry:
    """A run of the folder.

    Attributes:
        id: the id under which the page asks for it.
        name: its path from the folder.
        path: its folder.
        version: the number of its last change.
        fault: why it is not read at all, if so.
        lock: held while it is read; one reader at a time.
        asked: when it was last asked for.
    """

    id: str
    name: str
    path: Path
    version: int
    fault: str | None
    seen: Seen | None = None
    settled: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)
    run: GrowingRun | None = None
    number: int = 0
    read: int = -1
    asked: float = 0.0
    answers: dict[tuple[Any, ...], tuple[int, bytes]] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None
    diagnosed: int = -1
    diagnosed_at: float = 0.0
    findings: int = 0


class Following:
    """Runs in some folders, up to three levels deep. Its methods may be called from any thread.

    Args:
        folders: where to look. Links that lead out of them are not followed.

    Attributes:
        now: the number of the last change.
        looked: when all files were last looked at.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_example(f"{folder}/sweep/first").close()
    ...     runs = Following([Path(folder)])
    ...     runs.look()
    ...     runs.since(0).runs, json.loads(runs.summaries())[0]["steps"]
    (['sweep/first'], 40)
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._roots: dict[str, Path] = {}
        self._entries: dict[str, Entry] = {}
        self._gone: dict[str, str] = {}
        self._list: tuple[list[bytes], bytes] = ([], b"[]")
        self._lock = threading.Lock()
        self._search_at = self._diagnose_at = 0.0
        self._favors = False
        self.looked = -float("inf")
        # Numbers are milliseconds as long as there are no more changes than that: those of a server that is started
        # again are larger than those before, and the changes of the last seconds can be told.
        self.now = self._listed = int(time.time() * 1000)
        for folder in folders:
            self.add(folder)

    def add(self, folder: Path) -> None:
        """Follow the runs of one more folder."""
        with self._lock:
            self._roots[os.path.realpath(folder)] = folder
            self._search_at = 0.0

    def look(self) -> None:
        """Look at the state of all files once."""
        with self._lock:
            now = time.monotonic()
            if now >= self._search_at:
                self._search()
                self._search_at = time.monotonic() + max(_SEARCH, _SEARCH_SHARE * (time.monotonic() - now))
            for entry in self._entries.values():
                self._see(entry)
                if entry.run is not None and entry.asked < now - _FORGET and entry.lock.acquire(blocking=False):
                    try:
                        entry.run.forget_values()
                        entry.answers = {key: one for key, one in entry.answers.items() if key == _SUMMARY}
                    finally:
                        entry.lock.release()
            self.looked = time.monotonic()

    def since(self, number: int) -> Changes:
        """Return what has changed after a number that was returned before. Does not wait for anyone who looks."""
        now = self.now  # first: what changes from here on has a larger number, and is sent again
        runs = [entry.id for entry in list(self._entries.values()) if entry.version > number]
        return Changes(now, runs, self._listed > number)

    def summaries(self) -> bytes:
        """Return the list of runs as JSON; those that cannot be read in time are in the next list."""
        end = time.monotonic() + _PATIENCE
        entries = list(self._entries.values())
        found: dict[str, bytes] = {}
        for entry in sorted(entries, key=lambda one: -one.asked):  # first those that someone looks at
            version, earlier = entry.answers.get(_SUMMARY, (-1, b""))
            if version != entry.version and time.monotonic() > end:
                found[entry.id] = earlier
                self._changed(entry, listed=True)
                continue
            try:
                found[entry.id] = self._answer(entry, _SUMMARY, partial(self._summary, entry))
            except UnknownRunError:  # deleted meanwhile
                continue
            except Exception as error:  # a file that was damaged, or made by someone else, may hold anything
                if not isinstance(error, GyroscopeError):
                    error = StoreError(f"{entry.path} cannot be shown: {type(error).__name__}: {error}")
                found[entry.id] = _json(page.data.unreadable(error, id=entry.id, name=entry.name))
        shown = [found[entry.id] for entry in entries if found.get(entry.id)]
        if shown != self._list[0]:
            self._list = shown, b"[" + b",".join(shown) + b"]"
        return self._list[1]

    def head(self, id: str) -> bytes:
        """Return a run as JSON, without its series.

        Raises:
            UnknownRunError: there is no such run.
            StoreError: it cannot be read.
        """
        entry = self.entry(id)

        def made(run: GrowingRun) -> bytes:
            recorded = _recorded(run)
            if entry.diagnosis is None or entry.findings != len(recorded):
                self._diagnose(entry, run)
            return _json(page.data.head(run, id=entry.id, name=entry.name, diagnosis=entry.diagnosis))

        return self._answer(entry, ("head",), made)

    def frame(self, id: str, quantity: str, bins: int, first: int | None, last: int | None) -> bytes:
        """Return a quantity of a run as a frame (see `gyroscope.page.frames`).

        Raises:
            UnknownRunError: there is no such run, or it has no such quantity.
            StoreError: it cannot be read.
        """
        entry = self.entry(id)

        def made(run: GrowingRun) -> bytes:
            if quantity not in run.quantities:
                raise UnknownRunError(f"{entry.name} has no series {quantity!r}.", gone=False)
            return page.data.frame(run, quantity, bins=bins, first=first, last=last)

        return self._answer(entry, ("frame", quantity, bins, first, last), made)

    def sample(self, id: str, steps: int) -> bool:
        """Ask the job that writes a run for detail on its next steps; return False if it is not running.

        Raises:
            UnknownRunError: there is no such run.
            OSError: its folder cannot be written.
        """
        entry = self.entry(id)
        if entry.fault is not None or not lock.is_held(entry.path):
            return False
        request(entry.path, steps)
        return True

    def diagnose_one(self) -> None:
        """Diagnose the run that needs it most, if it is time."""
        now = time.monotonic()
        if now < self._diagnose_at:
            return
        due = [
            entry for entry in list(self._entries.values())
            if entry.fault is None and entry.read >= 0 and entry.diagnosed < entry.version
            and entry.diagnosed_at < now - _DIAGNOSE
        ]  # fmt: skip
        if not due:
            return
        # In turn, the one that someone looks at and the one that has waited longest.
        self._favors = not self._favors
        entry = max(due, key=lambda one: (one.asked if self._favors else 0, -one.diagnosed_at))
        before = entry.diagnosis
        try:
            with entry.lock, self._opened(entry) as run:
                self._diagnose(entry, run)
        except Exception:  # reported with its summary
            entry.diagnosed, entry.diagnosed_at = entry.version, time.monotonic()
        self._diagnose_at = time.monotonic() + _DIAGNOSE_SHARE * (time.monotonic() - now)
        if entry.diagnosis != before:
            with self._lock:
                same = entry.diagnosed == entry.version
                entry.version = self._step()
                if same:  # the findings are those of the run as it is now
                    entry.diagnosed = entry.version

    def knows(self, id: str) -> bool:
        """Return True if a run is listed under this id, or has this path."""
        return id in self._entries or _id(id) in self._entries

    def entry(self, id: str) -> Entry:
        """Return a run by the id under which it is listed, or by its path.

        Raises:
            UnknownRunError: no such run is listed.
        """
        if not self.knows(id):
            self._search_at = 0.0  # it may have begun a moment ago
            self.look()
        found = self._entries.get(id) or self._entries.get(_id(id))
        if found is not None:
            return found
        for one in (id, _id(id)):
            if one in self._gone:
                raise UnknownRunError(f"The run {self._gone[one]} was deleted or renamed.", gone=True)
        raise UnknownRunError("There is no such run in the folder.", gone=False)

    def close(self) -> None:
        """Close all files."""
        for entry in self._entries.values():
            if entry.run is not None:
                entry.run.close()

    def _search(self) -> None:
        """Find the runs that there are now."""
        found: dict[str, tuple[str, Path, str | None]] = {}
        places: set[str] = set()
        for real, root in self._roots.items():
            for path in run_folders(root, DEPTH, within=real):
                place = os.path.realpath(path)
                if place in places:  # through a link within the folder
                    continue
                places.add(place)
                name = base = path.name if path == root else os.path.relpath(path, root)
                count = 1
                while _id(name) in found:
                    count += 1
                    name = f"{base} ({count})"
                found[_id(name)] = name, path, _fault(path, real)
        for id in self._entries.keys() - found.keys():
            entry = self._entries.pop(id)
            self._gone[id] = entry.name
            self._step(listed=True)
            if entry.run is not None and entry.lock.acquire(blocking=False):
                entry.run.close()
                entry.lock.release()
        for id, (name, path, fault) in found.items():
            known = self._entries.get(id)
            if known is None or known.fault != fault or known.path != path:
                self._gone.pop(id, None)
                self._entries[id] = Entry(id, name, path, self._step(listed=True), fault)

    def _see(self, entry: Entry) -> None:
        """Give the run a new number if its files have changed."""
        log, _, _ = schema.sidecars(file := entry.path / schema.FILE)
        seen = Seen(_stamp(file), _stamp(log), lock.is_held(entry.path))
        if seen.file is None:
            self._search_at = 0.0
        if seen != entry.seen:
            newest = max((stamp[2] for stamp in seen[:2] if stamp is not None), default=0)
            entry.settled = time.time_ns() - newest > _COARSE * 1e9
            if entry.seen is not None:
                entry.version = self._step()
            entry.seen = seen
        elif not entry.settled:  # it may have been written again after it was seen, and look the same
            entry.settled = True
            entry.version = self._step()

    def _step(self, *, listed: bool = False) -> int:
        self.now = max(self.now + 1, int(time.time() * 1000))
        if listed:
            self._listed = self.now
        return self.now

    def _changed(self, entry: Entry, *, listed: bool = False) -> None:
        with self._lock:
            entry.version = self._step(listed=listed)

    def _answer(self, entry: Entry, key: tuple[Any, ...], made: Callable[[GrowingRun], bytes]) -> bytes:
        """Return what was made since the last change, or make it."""
        with entry.lock:
            if key != _SUMMARY:
                entry.asked = time.monotonic()
            version, answer = entry.answers.pop(key, (-1, b""))
            if version != entry.version:
                version = entry.version
                with self._opened(entry) as run:
                    answer = made(run)
            entry.answers[key] = version, answer  # the last, which is dropped last
            while sum(len(one) for _, one in entry.answers.values()) > _KEPT:
                entry.answers.pop(next(iter(entry.answers)))
            return answer

    @contextmanager
    def _opened(self, entry: Entry) -> Iterator[GrowingRun]:
        """Yield the run as it is after its last change."""
        run = self._refreshed(entry)
        try:
            yield run
        finally:
            if not lock.is_held(entry.path):
                run.close()  # there may be more runs than files that can be open

    def _refreshed(self, entry: Entry) -> GrowingRun:
        if entry.fault is not None:
            raise StoreError(entry.fault)
        version, number = entry.version, (_stamp(entry.path / schema.FILE) or (0,))[0]
        if entry.run is not None and entry.number != number:  # another file under the same name
            entry.run.close()
            entry.run = entry.diagnosis = None
        try:
            if entry.run is None:
                entry.run, entry.number = GrowingRun(entry.path), number
            elif entry.read != version:
                entry.run.refresh()
            entry.read = version
            return entry.run
        except GyroscopeError:
            if entry.run is not None:
                entry.run.close()
                entry.run = None
            if not (entry.path / schema.FILE).exists():
                self._search_at = 0.0
                raise UnknownRunError(f"The run {entry.name} was deleted or renamed.", gone=True) from None
            raise

    def _summary(self, entry: Entry, run: GrowingRun) -> bytes:
        # Diagnoses take long; until there is one, what the monitor has found itself is shown.
        found = entry.diagnosis
        if found is None:
            found = Diagnosis(entry.name, tuple(_recorded(run)), decided=False)
        return _json(page.data.summary(run, id=entry.id, name=entry.name, diagnosis=found))

    def _diagnose(self, entry: Entry, run: GrowingRun) -> None:
        entry.diagnosed, entry.findings = entry.version, len(_recorded(run))
        try:
            entry.diagnosis = diagnosis.diagnose(run)
        finally:
            entry.diagnosed_at = time.monotonic()


def _recorded(run: GrowingRun) -> list[Finding]:
    """Return what the monitor has found and recorded as events."""
    found = []
    for event in run.events:
        severity, _, sentence = event.text.partition(": ")
        for known in SEVERITIES:
            if event.kind == "finding" and severity == known:
                found.append(Finding("recorded", known, (), event.step, sentence))
    return found


def _id(name: str) -> str:
    """Return an id that any address can hold: the path, in which all that is special is written as bytes.

    >>> _id("sweep/seed 0")
    'sweep/seed%200'
    """
    return quote(os.fsencode(name), safe="/")


def _fault(path: Path, root: str) -> str | None:
    """Return why a run is not read: it has a file that is a link out of the folder."""
    from gyroscope.diagnosis.stall import LAST_LAYER_FILE

    for name in (schema.FILE, *(file.name for file in schema.sidecars(path / schema.FILE)), LAST_LAYER_FILE):
        if os.path.islink(path / name) and not is_within(path / name, root):
            return f"{name} of this run is a link that leads out of the folder, and is not followed."
    return None


def _stamp(file: Path) -> Stamp:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
