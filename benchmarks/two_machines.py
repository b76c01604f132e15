"""One run, two machines, as far as one machine can play both: a folder that is mounted twice, through FUSE.

    python benchmarks/two_machines.py                   # as root, with mfusepy and libfuse3; writes results/

Each mount has a kernel's caches of its own: names are remembered for three seconds, as NFS does, and nothing of what is
read is kept. Locks go to the folder that both show, so that each mount sees those of the other. What it cannot play: a
server that is restarted, a network that fails, caches of what was read, locks that no other machine sees.

Writers are on the first mount, readers on the second. Readers follow a run while it is written, and must see whole
transactions; writers are killed, and what is left is read from the other side (see torture.py); a second writer, on the
second mount, must be refused. Any of these that fails ends the benchmark.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gyroscope
from gyroscope.errors import StoreError
from gyroscope.store import LayerInfo, QuantityInfo, Rows, Scalars, Writer
from timing import environment, write
from torture import torture

#: Seconds that a mount remembers names, and the longest that a writer lives: everything takes longer here.
REMEMBERS, LIFE = 3.0, 1.0
LAYERS = [LayerInfo(name, "linear", (2, 2), part) for part, name in enumerate("ab")]
ABOUT = {"rotation": QuantityInfo("rotation", "1", "a number")}
READ = """
import sys
from gyroscope.store import load
read, seen = 0, set()
with load(sys.argv[1]) as run:
    while run.state == "running":
        run.refresh()
        [(rows, numbers)] = run._ask("SELECT (SELECT count(*) FROM series), (SELECT count(*) FROM scalars)")
        assert rows == 2 * numbers, "half of a transaction"
        values = run.series("rotation")
        assert (values[:, 0] + 1 == values[:, 1]).all(), "half of a transaction"
        read += 1
        seen.add(len(run.steps))
        if read == 1:
            print("reading", flush=True)
print(read, len(seen))
"""


def serve(folder: Path, mount: Path) -> None:
    """Show `folder` at `mount` until it is unmounted."""
    import mfusepy

    class Passed(mfusepy.Operations):
        """Passes everything on to the folder. POSIX locks belong to whoever asks: each owner has a file of its own."""

        use_ns = True

        def __init__(self) -> None:
            self._owners: dict[tuple[int, int], int] = {}

        def _at(self, path: str) -> str:
            return f"{folder}{path}"

        def getattr(self, path: str, fi: Any = None) -> dict[str, Any]:
            found = os.fstat(fi.fh) if fi is not None else os.lstat(self._at(path))
            names = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino")
            times = {f"st_{c}time": getattr(found, f"st_{c}time_ns") for c in "amc"}
            return {name: getattr(found, name) for name in names} | times

        def readdir(self, path: str, fi: Any) -> list[str]:
            return [".", "..", *os.listdir(self._at(path))]

        def mkdir(self, path: str, mode: int) -> None:
            os.mkdir(self._at(path), mode)

        def rmdir(self, path: str) -> None:
            os.rmdir(self._at(path))

        def unlink(self, path: str) -> None:
            os.unlink(self._at(path))

        def rename(self, old: str, new: str, *_: Any) -> None:
            os.rename(self._at(old), self._at(new))

        def chmod(self, path: str, mode: int) -> None:
            os.chmod(self._at(path), mode)

        def utimens(self, path: str, times: Any = None) -> None:
            os.utime(self._at(path), ns=times)

        def truncate(self, path: str, length: int, fi: Any = None) -> None:
            os.truncate(self._at(path), length)

        def open(self, path: str, fi: Any) -> int:
            fi.fh = os.open(self._at(path), fi.flags & ~os.O_NOFOLLOW)
            fi.direct_io = 1
            return 0

        def create(self, path: str, mode: int, fi: Any) -> int:
            fi.fh = os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)
            fi.direct_io = 1
            return 0

        def read(self, path: str, size: int, offset: int, fi: Any) -> bytes:
            return os.pread(fi.fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fi: Any) -> int:
            return os.pwrite(fi.fh, data, offset)

        def fsync(self, path: str, datasync: int, fi: Any) -> None:
            os.fsync(fi.fh)

        def fsyncdir(self, path: str, datasync: int, fi: Any) -> None:
            return None

        def flush(self, path: str, fi: Any) -> None:
            held = self._owners.pop((os.fstat(fi.fh).st_ino, fi.lock_owner), None)
            if held is not None:
                os.close(held)  # whoever closes a file loses all locks on it

        def release(self, path: str, fi: Any) -> None:
            os.close(fi.fh)

        def flock(self, path: str, fi: Any, operation: int) -> int:
            fcntl.flock(fi.fh, operation | fcntl.LOCK_NB)
            return 0

        def lock(self, path: str, fi: Any, command: int, asked: Any) -> int:
            key = (os.fstat(fi.fh).st_ino, fi.lock_owner)
            if key not in self._owners:
                self._owners[key] = os.open(f"/proc/self/fd/{fi.fh}", os.O_RDWR)
            own = {fcntl.F_GETLK: fcntl.F_OFD_GETLK}.get(command, fcntl.F_OFD_SETLK)
            it = asked.contents
            given = struct.pack("hhqqi4x", it.l_type, it.l_whence, it.l_start, it.l_len, 0)
            it.l_type, it.l_whence, it.l_start, it.l_len, _ = struct.unpack(
                "hhqqi4x", fcntl.fcntl(self._owners[key], own, given)
            )
            return 0

    mfusepy.FUSE(
        Passed(), str(mount), foreground=True, raw_fi=True, attr_timeout=0, entry_timeout=REMEMBERS,
        negative_timeout=REMEMBERS, subtype="gyroscope", fsname="shared",
    )  # fmt: skip


@contextmanager
def mounted(folder: Path, mount: Path) -> Iterator[Path]:
    mount.mkdir()
    process = subprocess.Popen([sys.executable, __file__, "--serve", folder, mount])
    try:
        for _ in range(600):
            if os.path.ismount(mount):
                break
            time.sleep(0.1)
        else:
            sys.exit(f"{mount} was not mounted")
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", mount], check=False)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()


def followed(here: Path, there: Path, steps: int) -> dict[str, Any]:
    """Write a run on one mount while two processes read it on the other."""
    writer = Writer(here, LAYERS, ABOUT, tick=600)

    def put(step: int) -> float:
        for part in (0, 1):
            writer.put(Rows(part, np.array([step]), {"rotation": np.array([[step + part]])}))
        writer.put(Scalars(step, {"loss": 1.0}))
        start = time.perf_counter()
        writer.flush()
        return time.perf_counter() - start

    put(0)
    command = [sys.executable, "-c", READ, there]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
    flushes = []
    for step in range(1, steps):
        flushes.append(put(step))
        time.sleep(0.05)
    try:
        Writer(there, LAYERS, ABOUT)
    except StoreError as error:
        refused = str(error)
    else:
        sys.exit("a second writer was not refused")
    state = gyroscope.load(there).state
    writer.close()
    counts = [tuple(map(int, reader.communicate(timeout=60)[0].split())) for reader in readers]
    if writer.error is not None or any(reader.returncode for reader in readers):
        sys.exit(f"following failed: {writer.error}, {[reader.returncode for reader in readers]}")
    with gyroscope.load(there) as run:
        assert run.state == "ended"
        assert run.steps.tolist() == list(range(steps))
        meta = run.meta
    return {
        "steps": steps,
        "meta": meta,
        "state_while_written": state,
        "second_writer": refused.rpartition("/")[2],
        "reads": [read for read, _ in counts],
        "lengths_seen": [lengths for _, lengths in counts],
        "flush_ms": {"median": 1e3 * float(np.median(flushes)), "max": 1e3 * max(flushes)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--serve", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", default=Path(__file__).parent / "results" / "two_machines.json")
    given = parser.parse_args()
    if given.serve:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        serve(*given.serve)
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as top:
        folder = Path(top, "folder")
        folder.mkdir()
        with mounted(folder, Path(top, "first")) as first, mounted(folder, Path(top, "second")) as second:
            result = {
                "command": " ".join(["python", "benchmarks/two_machines.py", *sys.argv[1:]]),
                "environment": environment(torch.device("cpu")),
                "remembers_names_seconds": REMEMBERS,
                "followed": followed(first / "run", second / "run", given.steps),
                "torture": torture(first, given.kills, life=LIFE, seen_from=second),
            }
    print(result["followed"])
    print(result["torture"])
    write(given.out, result)


if __name__ == "__main__":
    main()
