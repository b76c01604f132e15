"""One writer a run: a lock that the system gives back when its holder ends, however it ends."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from weakref import WeakSet

from gyroscope.errors import StoreError

FILE = "run.lock"
#: Seconds to try: a reader that looks whether a run is being written holds the lock for an instant.
_PATIENCE = 0.5
# A link in a folder that somebody else has made, or that came in an archive, may lead to any file. Windows has no such
# flag.
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


class HeldError(StoreError):
    """Another writer holds the lock."""


class Lock:
    """Held from its making until `release`, by this process alone.

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
            raise StoreError(f"{folder / FILE} is a link, and would be written through: delete it, and try again.")
        self._file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | _NO_LINKS, 0o644)
        try:
            _wait(self._file, folder)
            os.ftruncate(self._file, 0)
            os.write(self._file, f"{os.getpid()}\n".encode())
        except (OSError, StoreError):
            self.release()
            raise
        _held.add(self)

    @property
    def held(self) -> bool:
        """Whether this process holds it."""
        return self._file is not None

    def release(self) -> None:
        """Let others write. In a forked child this only lets go of what it inherited; the parent keeps the lock."""
        # Closing, not unlocking: a lock is shared with forked children, and unlocking would unlock it for all.
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
                holder = os.read(file, 20).decode(errors="replace").strip()
                raise HeldError(
                    f"{folder} is being written by another writer (process {holder or 'unknown'}): close that one, or "
                    "write to another folder."
                )
            time.sleep(0.02)
    except OSError as error:
        if os.fstat(file).st_size == 0:  # nobody has had it before
            (folder / FILE).unlink(missing_ok=True)
        raise StoreError(
            f"{folder} is on a file system without file locks ({error.strerror}), where two writers could damage each "
            "other's files. Write to a local disk, and copy the folder when the run has ended."
        ) from error


_held: WeakSet[Lock] = WeakSet()


def _disown() -> None:
    """In a forked child: let go of the parent's locks, which would last as long as the child otherwise."""
    for one in _held:
        one.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)


def is_held(folder: Path) -> bool:
    """Whether some process is writing the run in `folder`; False where there are no file locks, which writing needs."""
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
        # other error than of a lock that is held says that the file system has none (Lustre without `-o flock`).
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
