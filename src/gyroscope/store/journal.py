"""The journal of a run's file: a write-ahead log on a local disk, a rollback journal where machines share the disk.

SQLite's write-ahead log needs memory that all its users share, so it works within one machine only, whatever the file
system. A rollback journal needs file locks alone: whoever reads under them, on any machine, sees whole transactions.
"""

from __future__ import annotations

import os
import re
import sqlite3
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from gyroscope.errors import StoreError

Kind = Literal["wal", "rollback"]
#: The environment variable that overrides the choice.
VARIABLE = "GYROSCOPE_JOURNAL"
#: The key of a run's meta that says why it has a rollback journal.
META = "journal"

_MOUNTS = Path("/proc/self/mountinfo")
# File systems that several machines may have mounted, or a machine and its guests. All of FUSE's count as such: most of
# them are, many of the others cannot share memory, and a rollback journal is right on a local disk too.
_SHARED = frozenset({
    "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs",
    "nfs", "nfs4", "ocfs2", "panfs", "prl_fs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs",
    "wekafs",
})  # fmt: skip


class Journal(NamedTuple):
    """The journal that a run is to be written with, and the type of the file system it is on, if known."""

    kind: Kind
    file_system: str | None


def journal_for(folder: Path) -> Journal:
    """Return the journal for a run in `folder`: a rollback journal on a file system that several machines may share.

    The environment variable `GYROSCOPE_JOURNAL` ("wal" or "rollback") overrides the choice.

    Raises:
        StoreError: the variable has another value.
    """
    found = file_system(folder)
    asked = os.environ.get(VARIABLE, "")
    for kind in get_args(Kind):
        if asked == kind:
            return Journal(kind, found)
    if asked:
        raise StoreError(
            f"`{VARIABLE}` must be 'wal' or 'rollback', got {asked!r}. Unset it: the file system then decides."
        )
    return Journal("rollback" if is_shared(found) else "wal", found)


def is_shared(file_system: str | None) -> bool:
    """Return True if several machines may have mounted a file system of this type; False if it is unknown.

    >>> is_shared("nfs4"), is_shared("fuse.sshfs"), is_shared("ext4"), is_shared(None)
    (True, True, False, False)
    """
    return file_system is not None and (file_system in _SHARED or file_system.startswith("fuse."))


def file_system(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """Return the type of the file system that `path` is on, as Linux names it; None elsewhere.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = Path(folder, "mountinfo")
    ...     _ = table.write_text("22 1 8:1 / / rw - ext4 /dev/sda rw\\n30 22 0:31 / /home rw - nfs4 server:/home rw")
    ...     file_system(Path("/home/ada/runs"), table), file_system(Path("/homes"), table)
    ('nfs4', 'ext4')
    """
    try:
        table = mounts.read_bytes()
    except OSError:
        return None
    inside = os.fsencode(os.path.realpath(path))
    best: tuple[int, bytes] | None = None
    for line in table.splitlines():
        place, _, kind = line.partition(b" - ")
        fields, kinds = place.split(), kind.split()
        if len(fields) < 5 or not kinds:
            continue
        point = re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8) & 255]), fields[4]).rstrip(b"/")
        # The deepest mount counts; of several at one place, the last, which hides the others.
        if (inside == point or inside.startswith(point + b"/")) and (best is None or len(point) >= best[0]):
            best = len(point), kinds[0]
    return None if best is None else os.fsdecode(best[1])


def prepare(connection: sqlite3.Connection, kind: Kind) -> None:
    """Act before anything is read through a connection that is to write.

    A log that a writer on a local disk left is then merged alone and without shared memory.
    """
    if kind == "rollback":
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")


def adopt(connection: sqlite3.Connection, kind: Kind, file: Path) -> None:
    """Give the file this journal, whichever it had. Every later commit is on the disk when it returns."""
    connection.execute("PRAGMA synchronous = FULL")
    if kind == "wal":
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        connection.execute("PRAGMA journal_size_limit = 16000000")
    else:
        # Truncated rather than deleted: its name stays while the run is written, and says so to readers, on machines
        # that remember for a while which names a folder has, too.
        connection.execute("PRAGMA journal_mode = TRUNCATE")
        file.with_name(f"{file.name}-shm").unlink(missing_ok=True)  # the index of a log that was merged
        connection.execute("PRAGMA locking_mode = NORMAL")
        # Readers are kept out during the commit alone, however large the transaction.
        connection.execute("PRAGMA cache_spill = OFF")


def merge(connection: sqlite3.Connection, kind: Kind) -> None:
    """Leave nothing of the run outside its file."""
    connection.execute("PRAGMA busy_timeout = 1000")
    if kind == "wal":
        # A long-running reader keeps the write-ahead file; the next writer merges it.
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    else:
        connection.execute("PRAGMA journal_mode = DELETE")
