"""One writer per run: a lock that the system releases when its holder ends, however it ends."""

from __future__ import annotations

import os
import platform
import sys
import time
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from gyroscope.errors import StoreError

FILE = "run.lock"
#: Seconds to try: a reader that checks whether a run is being written holds the lock for an instant.
_PATIENCE = 0.5
# A link in a folder of unknown origin, for example from an archive, may lead to any file. Windows has no such flag.
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


class HeldError(StoreError):
    """Another writer holds the lock.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lock = Lock(Path(folder))
    ...     try:
    ...         Lock(Path(folder))
    ...     except HeldError:
    ...         print("another writer holds it")
    ...     lock.release()
    another writer holds it
    """


class Lock:
    """A lock on a run, held by this process alone from its creation until `release`.

    Raises:
        HeldError: another writer holds it.
        StoreError: it is a link, or the file system has no file locks.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lock = Lock(Path(folder))
    ...     during = is_held(Path(folder))
    ...     lock.release()
    ...     during, is_held(Path(folder))
    (True, False)
    """

    def __init__(self, folder: Path) -> None:
        self._file: int | None = None
        if (folder / FILE).is_symlink():
            raise StoreError(f"{folder / FILE} is a link, and writing would follow it. Delete it and try again.")
        self._file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | _NO_LINKS, 0o644)
        try:
            _wait(self._file, folder)
            os.ftruncate(self._file, 0)
            os.write(self._file, f"{os.getpid()} {platform.node()}\n".encode())
        except (OSError, StoreError):
            self.release()
            raise
        _held.add(self)

    @property
    def held(self) -> bool:
        """True if this process holds the lock."""
        return self._file is not None

    def release(self) -> None:
        """Release the lock. A forked child only releases what it inherited; the parent keeps the lock."""
        # Closing instead of unlocking: forked children share the lock, and unlocking would release it for all.
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.release()


def _wait(file: int, folder: Path) -> None:
    end = time.monotonic() + _PATIENCE
    try:
        while not _take(file, alone=True):
            if time.monotonic() > end:
                raise HeldError(
                    f"{folder} is being written by another writer ({_holder(file)}). Close that one, or write to "
                    "another folder."
                )
            time.sleep(0.02)
    except OSError as error:
        if os.fstat(file).st_size == 0:  # nobody has had it before
            (folder / FILE).unlink(missing_ok=True)
        raise StoreError(
            f"{folder} is on a file system without file locks ({error.strerror}), where two writers could damage each "
            "other's files. Write to a local disk, and copy the folder when the run has ended."
        ) from error


def _holder(file: int) -> str:
    """Return the process that holds the lock, and its machine if that is another one."""
    text = ""
    with suppress(OSError):  # some network file systems let nobody else read a locked file
        text = os.read(file, 300).decode(errors="replace")
    process, _, machine = text.strip().partition(" ")
    return f"process {process or 'unknown'}" + (f" on {machine}" if machine not in ("", platform.node()) else "")


_held: WeakSet[Lock] = WeakSet()


def _disown() -> None:
    """Release the parent's locks in a forked child, which would otherwise hold them until it ends."""
    for one in _held:
        one.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)


def is_held(folder: Path) -> bool:
    """Return True if a process is writing the run in `folder`; False on file systems without locks, which it needs.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     is_held(Path(folder))
    False
    """
    try:
        file = os.open(folder / FILE, os.O_RDONLY | _NO_LINKS)
    except OSError:
        return False
    try:
        return not _take(file, alone=False)
    except OSError:
        return False
    finally:
        os.close(file)


if sys.platform == "win32":  # pragma: no cover
    import msvcrt

    def _take(file: int, *, alone: bool) -> bool:
        try:
            os.lseek(file, 1 << 20, os.SEEK_SET)  # beyond the process number, which others read
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _take(file: int, *, alone: bool) -> bool:
        # flock, not lockf: locks of lockf belong to the process, so two writers in one process would both get it. Any
        # other error than that of a held lock means that the file system has none (Lustre without `-o flock`).
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
