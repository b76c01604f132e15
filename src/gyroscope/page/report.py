"""`report`: runs as one HTML file, with everything in it."""

from __future__ import annotations

import logging
import os
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gyroscope import __version__
from gyroscope.base import accepted
from gyroscope.base.markup import plain
from gyroscope.base.whole_file import whole_file
from gyroscope.diagnosis.diagnose import diagnose
from gyroscope.errors import GyroscopeError, PageError, StoreError
from gyroscope.page.data import Json, cleaned, head, summary, unreadable
from gyroscope.page.document import Embedded, document, json_text
from gyroscope.page.frames import BINS, LIMIT, frame
from gyroscope.store import Run, load
from gyroscope.store.arguments import can_be_named
from gyroscope.store.find import DEPTH, distinct, run_folders
from gyroscope.store.folder import is_dir, is_file, run_file

if TYPE_CHECKING:
    from gyroscope.monitor.monitor import Monitor

    Given = Run | Monitor | str | os.PathLike[str]

_LOG = logging.getLogger("gyroscope")


def report(
    runs: Given | Sequence[Given],
    path: str | os.PathLike[str] = "report.html",
    *,
    full: bool = False,
    bins: int = BINS,
    title: str | None = None,
    labels: Sequence[str | None] | None = None,
    about: str | Sequence[str] = (),
    broken: list[GyroscopeError] | None = None,
) -> Path:
    """Write runs as one HTML file, and return its path. The file makes no request: it can be opened anywhere.

    Series of more than `bins` measured steps are shown in `bins` bins, with the mean, the minimum and the maximum of
    each; the page says so. If there are several runs, or many layers, values are kept to 1/4094 of their range.

    Args:
        runs: a run, its folder, the monitor that records it, a folder that holds runs, or a list of these.
        path: the file to write. It is replaced at the end, or stays as it was.
        full: whether to keep every measured step; the file may become large.
        bins: the most bins of a series.
        title: the title of the page; the name of the run by default.
        labels: a name for each of `runs` instead of that of its folder, or None; for a folder that holds runs, it comes
            before their names.
        about: text at the top of the page; paragraphs are separated by empty lines, or given as a list.
        broken: a list for the error of every run that cannot be read; if None, these are logged as warnings. The page
            lists such runs with their errors.

    Raises:
        PageError: there is no run to show, the file cannot be written, or an option is invalid.
        StoreError: the only run cannot be read.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_example(f"{folder}/first").close()
    ...     written = report(f"{folder}/first", f"{folder}/report.html")
    ...     written.name, written.read_text()[:15]
    ('report.html', '<!doctype html>')
    """
    file, most, paragraphs = _file(path), _most(bins, full), _paragraphs(about)
    named = _title(title)
    problems: list[GyroscopeError] = []
    entries = _entries(runs, labels, problems)
    called = [entry.label or name for entry, name in zip(entries, distinct([one.path for one in entries]), strict=True)]
    limit = LIMIT if len(entries) == 1 else 0
    shown, data = [], []
    for i, (entry, name) in enumerate(zip(entries, called, strict=True)):
        try:
            with load(entry.path) if entry.run is None else nullcontext(entry.run) as run:
                said, its = _parts(run, str(i), name, most, limit)
        except GyroscopeError as error:
            problems.append(error)
            said, its = unreadable(error, id=str(i), name=name), []
        shown.append(said)
        data += its
    if not data:
        first, *others = problems
        raise PageError(f"None of {len(problems)} runs can be shown. {first}") if others else first
    config = {
        "mode": "report",
        "version": __version__,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "title": plain(named or (called[0] if len(called) == 1 else f"{len(called)} runs")),
        "about": list(map(plain, paragraphs)),
        "runs": shown,
        "docs": "",
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as new, new.open("w", encoding="utf-8", newline="\n") as out:
            out.writelines(document(config, data))
    except OSError as error:
        why = f"{error.filename} is a file" if isinstance(error, FileExistsError) else error.strerror or error
        raise PageError(f"{file} cannot be written: {why}. Check its folder and the disk, or pass another.") from error
    if broken is None:
        for problem in problems:
            _LOG.warning("%s", problem)
    else:
        broken += problems
    return file


class _Entry(NamedTuple):
    """A run to show: its folder, its label if one was given, and the run itself if it was given."""

    path: Path
    label: str | None = None
    run: Run | None = None


def _parts(run: Run, id: str, name: str, bins: int | None, limit: int) -> tuple[Json, list[Embedded]]:
    """Return the summary of a run, and its data: the head, and one frame per quantity."""
    found = diagnose(run)
    shown = head(run, id=id, name=name, diagnosis=found, bins=bins)
    listed = {one["name"] for one in shown["quantities"]}
    data = [Embedded(f"run-{id}", "application/json", json_text(shown))]
    for i, quantity in enumerate(one for one in run.quantities if cleaned(one) in listed):
        packed = frame(run, quantity, bins=bins, limit=limit)
        data.append(Embedded(f"run-{id}-{i}", "application/octet-stream", b64encode(packed).decode()))
    return summary(run, id=id, name=name, diagnosis=found), data


def _entries(runs: Any, labels: Any, problems: list[GyroscopeError]) -> list[_Entry]:
    """Return the runs to show, each once."""
    alone = isinstance(runs, Run | str | os.PathLike) or hasattr(runs, "run")
    given = [runs] if alone else accepted.listed(runs)
    called = [None] * len(given) if labels is None else accepted.listed(labels)
    if len(called) != len(given) or not all(one is None or accepted.text(one) for one in called):
        raise PageError(
            f"`labels` must have a text, or None, for each of {len(given)} runs, got {labels!r:.80}. Try labels=None."
        )
    found: dict[Path, _Entry] = {}
    for one, label in zip(given, called, strict=True):
        for entry in _within(one, label, problems):
            found.setdefault(entry.path, entry)
    if not found:
        raise problems[0] if problems else PageError("`runs` must be at least one run, got none. Try 'runs/first'.")
    return list(found.values())


def _within(given: Any, label: str | None, problems: list[GyroscopeError]) -> Iterator[_Entry]:
    """Yield the run that was given, or those in the folder that was given, in the order in which they were started."""
    own = given if isinstance(given, Run) else getattr(given, "run", None)
    if isinstance(own, Run):
        yield _Entry(own.path, label, own)
        return
    if not isinstance(given, str | os.PathLike) or not can_be_named(os.fspath(given)):
        raise PageError(
            f"`runs` must be runs, their folders or monitors, got {given!r:.80}. Try 'runs/first', or a list of these."
        )
    top = Path(given).absolute()
    if not is_dir(top) or is_file(run_file(top)):
        yield _Entry(top.parent if is_file(top) and run_file(top.parent) == top else top, label)
        return
    inside = list(run_folders(top, DEPTH))
    if not inside:
        problems.append(PageError(f"There are no runs in {top}; `gyroscope runs {top.parent}` searches deeper."))
    for path in sorted(inside, key=_started):
        yield _Entry(path, None if label is None else f"{label}/{path.relative_to(top)}")


def _started(path: Path) -> tuple[float, Path]:
    """Return when a run was started, to sort by; unreadable ones come last."""
    try:
        with load(path) as run:
            return run.attempts[0].time if run.attempts else 0.0, path
    except StoreError:
        return float("inf"), path


def _file(given: Any) -> Path:
    if not isinstance(given, str | os.PathLike) or not can_be_named(os.fspath(given)) or not os.fspath(given):
        raise PageError(f"`path` must be the file to write, got {given!r:.80}. Try 'report.html'.")
    if is_dir(Path(given)):
        raise PageError(f"`path` must be the file to write, got the folder {given}. Try {Path(given, 'report.html')}.")
    return Path(given)


def _most(bins: Any, full: Any) -> int | None:
    most = accepted.whole(bins, 1)
    if most is None:
        raise PageError(f"`bins` must be a whole number ≥ 1, got {bins!r:.80}. Try {BINS}.")
    return None if accepted.flag(full, "full", PageError) else most


def _title(given: Any) -> str | None:
    if given is not None and accepted.text(given) is None:
        raise PageError(f"`title` must be text, got {given!r:.80}. Try 'My runs'.")
    return given or None


def _paragraphs(given: Any) -> list[str]:
    texts = re.split(r"\n\s*\n", given) if isinstance(given, str) else accepted.listed(given)
    if not all(isinstance(one, str) for one in texts):
        raise PageError(f"`about` must be text, or a list of paragraphs, got {given!r:.80}. Try 'What is shown.'.")
    return [" ".join(one.split()) for one in texts if one.strip()]
