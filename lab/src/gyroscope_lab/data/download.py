"""Downloads from publishers: continued after a broken connection, checked, and only then renamed."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import stat
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PureWindowsPath
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from gyroscope_lab.data.catalogue import Dataset, File, check_parts, find, missing, wrong
from gyroscope_lab.data.official import to_the_end
from gyroscope_lab.errors import LabError

_BLOCK = 1 << 18
# After a connection that brought this many bytes, the count of failures starts again.
_MUCH = 1 << 20
_LONGEST_WAIT = 60.0


@dataclass(frozen=True)
class Patience:
    """Waiting times for a server.

    Attributes:
        timeout: seconds without a byte after which a connection is abandoned.
        attempts: consecutive failures without much data after which a server is abandoned.
        pause: seconds before the second attempt; doubled before each further one, up to a minute.
    """

    timeout: float = 30.0
    attempts: int = 5
    pause: float = 1.0


@dataclass(frozen=True)
class Watcher:
    """Callbacks while files are fetched.

    Attributes:
        on_bytes: called with the name of a file, its bytes so far, and its total bytes if known.
        on_news: called with a sentence when a download is tried again or unpacked.
    """

    on_bytes: Callable[[str, int, int | None], None] = lambda name, here, total: None
    on_news: Callable[[str], None] = lambda sentence: None


_UNWATCHED, _PATIENT = Watcher(), Patience()


def fetch(
    dataset: Dataset, folder: Path, *, again: bool = False, watcher: Watcher = _UNWATCHED, patience: Patience = _PATIENT
) -> bool:
    """Put the files of a dataset into `folder`, and return whether any had to be fetched or unpacked.

    Existing files that are right are kept. Existing files that are wrong are an error; with `again` they are replaced.

    >>> from gyroscope_lab.data.catalogue import dataset
    >>> fetch(dataset("imagenet"), Path("no/such/folder"))
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: imagenet cannot be downloaded: ask for ILSVRC2012 at https://image-net.org, ...
    """
    if dataset.by_hand and missing(dataset, folder):
        raise LabError(f"{dataset.name} cannot be downloaded: {dataset.by_hand}.")
    fetched = False
    for piece in dataset.pieces:
        bad = {verdict.path: verdict.problem for verdict in check_parts(dataset, piece, folder) if verdict.problem}
        if piece.download is None or (not bad and None not in find(dataset, piece, folder)):
            continue
        to = folder / piece.download.name
        if to.is_file() and (problem := wrong(to, piece.download)):
            bad[to] = problem
        if bad and not again:
            said = "; ".join(f"{path} is not as it was published: {problem}" for path, problem in bad.items())
            raise LabError(f"{said}. To replace it: gyroscope data get {dataset.name} --again")
        if to in bad or not to.is_file():
            download(piece.download, to, watcher=watcher, patience=patience)
        if piece.archive:
            watcher.on_news(f"unpacking {to.name}")
            unpack(to, folder)
        fetched = True
        if None in find(dataset, piece, folder):
            raise LabError(f"{', '.join(missing(dataset, folder))} cannot be found after {to.name} was fetched.")
        for verdict in check_parts(dataset, piece, folder):
            if verdict.problem:
                raise LabError(f"{verdict.path} is in the way: {verdict.problem}. Move it elsewhere, and try again.")
    return fetched


def download(file: File, to: Path, *, watcher: Watcher = _UNWATCHED, patience: Patience = _PATIENT) -> None:
    """Fetch a file from the first of its addresses that works, and name it `to` when it is complete and right.

    Until then it is called `to` with the suffix `.part`. If the program is interrupted, this part is kept, and the next
    connection or the next call continues from it.

    >>> download(File("greeting.txt"), Path("greeting.txt"))
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: greeting.txt cannot be downloaded: no address of it is known.
    """
    part = to.with_name(f"{to.name}.part")
    problems = [] if file.urls else ["no address of it is known"]
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        _check_room(file, part)
        for url in file.urls:
            transfer = _Transfer(url, file, part, watcher, patience)
            try:
                transfer.run()
            except _RefusedError as refusal:
                problems.append(f"{url}: {refusal}")
                continue
            os.replace(part, to)
            transfer.forget()
            return
    except OSError as error:
        raise LabError(f"{to} cannot be written: {error.strerror or error}.") from error
    raise LabError(f"{to.name} cannot be downloaded: {'; '.join(problems)}.")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive (.zip, or .tar with any compression) into `folder`, and overwrite existing files.

    Entries and links that lead outside the folder are rejected. Nothing is moved there until everything is unpacked.

    >>> unpack(Path("no/such/file.zip"), Path())
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: no/such/file.zip cannot be unpacked into .: No such file or directory.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=f".{archive.name}-", dir=folder) as fresh:
            (_unzip if archive.suffix == ".zip" else _untar)(archive, fresh)
            for entry in sorted(Path(fresh).iterdir()):
                _move(entry, folder / entry.name)
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise LabError(f"{archive} is damaged, or not safe to unpack ({error}). Fetch it again.") from error
    except OSError as error:
        raise LabError(f"{archive} cannot be unpacked into {folder}: {error.strerror or error}.") from error


def _untar(archive: Path, fresh: str) -> None:
    with tarfile.open(archive) as tar:
        extract(tar, fresh)
        if tar.fileobj is not None:
            to_the_end(tar.fileobj)


def extract(tar: tarfile.TarFile, folder: Path | str) -> None:
    """Put the entries of an archive into a folder; raise TarError for one that would be put elsewhere.

    Python before 3.11.4 has no filters. There, links and devices are rejected too.
    """
    if hasattr(tarfile, "data_filter"):
        tar.extractall(folder, filter="data")
        return
    for entry in tar.getmembers():
        _check_place(entry.name, tarfile.TarError)
        if not (entry.isfile() or entry.isdir()):
            raise tarfile.TarError(f"{entry.name} is neither a file nor a folder")
    tar.extractall(folder)


def _check_place(name: str, error: type[Exception]) -> None:
    # A Windows path splits at both kinds of slashes.
    path = PureWindowsPath(name)
    if path.anchor or ".." in path.parts:
        raise error(f"{name} would be put elsewhere")


def _unzip(archive: Path, fresh: str) -> None:
    with zipfile.ZipFile(archive) as packed:
        for entry in packed.infolist():
            _check_place(entry.filename, zipfile.BadZipFile)
            if stat.S_ISLNK(entry.external_attr >> 16):
                raise zipfile.BadZipFile(f"{entry.filename} is a link")
        packed.extractall(fresh)


def _move(source: Path, target: Path) -> None:
    """Move new files and whole new folders; merge folders that exist."""
    if source.is_dir() and target.is_dir():
        for entry in source.iterdir():
            _move(entry, target / entry.name)
    else:
        os.replace(source, target)


def _check_room(file: File, part: Path) -> None:
    here = part.stat().st_size if part.exists() else 0
    free = shutil.disk_usage(part.parent).free
    if file.size is not None and file.size - here > free:
        raise LabError(
            f"{file.name} needs {(file.size - here) / 1e6:,.0f} MB, and {part.parent} has {free / 1e6:,.0f} MB left. "
            "Free some space, or put it into another folder."
        )


class _DroppedError(Exception):
    """A failure worth trying again, after `wait` seconds if the server gave a time."""

    def __init__(self, problem: str, *, wait: float | None = None) -> None:
        super().__init__(problem)
        self.wait = wait


class _RefusedError(Exception):
    """The server does not provide the file."""


_PAGE = "a web page came instead of the file, as from a network that wants you to log in"
_VERSION = ("ETag", "Last-Modified")
_BROKEN = (TimeoutError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)


@dataclass(frozen=True)
class _Transfer:
    """A download from one address, over any number of connections."""

    url: str
    file: File
    part: Path
    watcher: Watcher
    patience: Patience

    def run(self) -> None:
        resumed = self._until_whole()
        if resumed and wrong(self.part, self.file):
            # The beginning may be damaged, or belong to another version.
            self.forget()
            self._until_whole()
        if problem := wrong(self.part, self.file):
            self.forget()
            raise _RefusedError(f"what came is not the file that was published: {problem}")

    def forget(self) -> None:
        self.part.unlink(missing_ok=True)
        self._origin.unlink(missing_ok=True)

    def _until_whole(self) -> bool:
        """Connect until the file is complete; return whether it came in several parts or connections."""
        failures, furthest, resumed = 0, 0, False
        while True:
            start = self._start()
            resumed |= start > 0
            try:
                self._connect(start)
                return resumed
            except _DroppedError as drop:
                here = self._here()
                if here >= furthest + _MUCH:
                    failures, furthest = 0, here
                failures += 1
                if failures >= self.patience.attempts:
                    raise _RefusedError(f"{drop}; tried {failures} times") from drop
                wait = min(drop.wait or self.patience.pause * 2 ** (failures - 1), _LONGEST_WAIT)
                self.watcher.on_news(f"{self.file.name}: {drop}; trying again in {wait:.0f} s")
                time.sleep(wait)

    def _here(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _start(self) -> int:
        """Return the number of bytes on disk that the download can continue from."""
        noted = self._noted()
        same = noted.get("url") == self.url and any(noted.get(key) for key in _VERSION)
        # With a checksum, a continuation from another address or of another version is detected at the end.
        if self._here() > (self.file.size or self._here()) or not (self.file.checksum or same):
            self.forget()
        return self._here()

    def _connect(self, start: int) -> None:
        if start and start == self.file.size:
            return
        with self._open(start) as answer:
            if start and not self._continues(answer, start):
                self.forget()
                # Without a range, the response is the file from its beginning.
                start = 0
                if answer.status == 206:
                    raise _DroppedError("the file there has changed", wait=self.patience.pause)
            total = self._total(answer, start)
            block = self._read(answer)
            if not start and block.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
                raise _RefusedError(_PAGE)
            self._note(answer)
            with self.part.open("r+b" if start else "wb") as part:
                here = part.seek(start)
                while block:
                    here += part.write(block)
                    self.watcher.on_bytes(self.file.name, here, total)
                    block = self._read(answer)
                part.flush()
                os.fsync(part.fileno())
        if total is not None and here < total:
            raise _DroppedError(f"the connection ended after {here:,} of {total:,} bytes")

    def _open(self, start: int) -> HTTPResponse:
        headers = {"User-Agent": "gyroscope", "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        try:
            answer: HTTPResponse = urlopen(Request(self.url, headers=headers), timeout=self.patience.timeout)
            return answer
        except HTTPError as error:
            error.close()
            if error.code == 416 and start:
                return self._open(0)
            problem = f"the server answered {error.code} {error.reason}"
            if error.code in (408, 425, 429) or error.code >= 500:
                after = error.headers.get("Retry-After", "")
                raise _DroppedError(problem, wait=float(after) if after.isdigit() else None) from error
            raise _RefusedError(problem) from error
        except URLError as error:
            if isinstance(error.reason, _BROKEN):
                raise self._broken(error.reason) from error
            raise _RefusedError(f"the server cannot be reached, as without a network ({error.reason})") from error
        except (OSError, HTTPException) as error:
            raise self._broken(error) from error

    def _read(self, answer: HTTPResponse) -> bytes:
        try:
            return answer.read1(_BLOCK)
        except (OSError, HTTPException) as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> _DroppedError:
        if isinstance(error, TimeoutError):
            return _DroppedError(f"nothing came for {self.patience.timeout:g} s")
        return _DroppedError(f"the connection broke ({error})")

    def _continues(self, answer: HTTPResponse, start: int) -> bool:
        noted = self._noted()
        versions = [(noted.get(key), answer.headers.get(key)) for key in _VERSION]
        changed = noted.get("url") == self.url and any(old and new and old != new for old, new in versions)
        begins = answer.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        return answer.status == 206 and begins and not changed

    def _total(self, answer: HTTPResponse, start: int) -> int | None:
        if answer.headers.get_content_type() == "text/html":
            raise _RefusedError(_PAGE)
        length = answer.headers.get("Content-Length", "")
        total = start + int(length) if length.isdigit() else self.file.size
        if self.file.size is not None and total != self.file.size:
            raise _RefusedError(f"the file there has {total:,} bytes, and {self.file.size:,} are expected")
        return total

    @property
    def _origin(self) -> Path:
        return self.part.with_name(f"{self.part.name}.json")

    def _note(self, answer: HTTPResponse) -> None:
        self._origin.write_text(json.dumps({"url": self.url} | {key: answer.headers.get(key) for key in _VERSION}))

    def _noted(self) -> dict[str, str | None]:
        try:
            return dict(json.loads(self._origin.read_text()))
        except (OSError, ValueError, TypeError):
            return {}
