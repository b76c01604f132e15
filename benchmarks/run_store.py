"""What a run costs on disk: 1,202 layers × 10,000 steps × 6 quantities, written at full speed and at 5 ms a step.

    python benchmarks/run_store.py

Then every series is loaded and compared with what was written, once from the disk and once from the system's cache. The
same with a flush after every step, as slow training would write it: the rows of a quantity then lie scattered on the
disk. At last, 200 processes that write runs are killed (see torture.py). All of it once more with the rollback journal
that runs on network file systems have, on the same disk. The folder is temporary; --folder says where.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gyroscope.store import LayerInfo, QuantityInfo, Rows, Writer, load
from timing import environment, write
from torture import torture

LAYERS = [LayerInfo(f"layer{i}.weight", "conv", (16, 16, 3, 3)) for i in range(1202)]
QUANTITIES = ("rotation", "rate", "weight_norm", "gradient_norm", "update_norm", "effective_lr")
STEP = 5e-3
#: Values repeat after this many steps, so that the making of them is no part of what is timed.
PERIOD = 64
VALUES = {
    name: np.random.default_rng(i).standard_normal((PERIOD, 1202)).astype(np.float32)
    for i, name in enumerate(QUANTITIES)
}


def record(step: int) -> Rows:
    i = step % PERIOD
    return Rows(0, np.array([step]), {name: values[i : i + 1] for name, values in VALUES.items()})


def written(folder: Path, steps: int, pace: float, *, flush: bool = False) -> dict[str, Any]:
    """Write a run with one record a step, one every `pace` seconds; a record that is refused is put again."""
    puts, flushes, refused, late = [], [], 0, 0.0
    writer = Writer(folder, LAYERS, {name: QuantityInfo(name, "1", "a number") for name in QUANTITIES})
    start = time.perf_counter()
    for step in range(steps):
        due = start + step * pace
        while (now := time.perf_counter()) < due:
            time.sleep(due - now)
        late = max(late, now - due) if pace else 0.0
        made = record(step)
        before = time.perf_counter()
        taken = writer.put(made)
        puts.append(time.perf_counter() - before)
        while not taken:
            refused += 1
            time.sleep(1e-4)
            taken = writer.put(made)
        if flush:
            before = time.perf_counter()
            writer.flush()
            flushes.append(time.perf_counter() - before)
    last_put = time.perf_counter()
    writer.flush()
    flushed = time.perf_counter()
    writer.close()
    if writer.error is not None:
        sys.exit(str(writer.error))
    closed = time.perf_counter()
    on_disk = sum(file.stat().st_size for file in folder.iterdir())
    puts.sort()
    flushes.sort()
    return {
        "steps": steps,
        "seconds": flushed - start,
        "rows_per_second": steps * len(QUANTITIES) / (flushed - start),
        "megabytes_per_second": on_disk / 1e6 / (flushed - start),
        "refused": refused,
        "put_us": {
            "median": 1e6 * statistics.median(puts),
            "p99": 1e6 * puts[int(0.99 * steps)],
            "max": 1e6 * puts[-1],
        },
        "last_flush_seconds": flushed - last_put,
        "close_seconds": closed - flushed,
        "writer_cpu_ms_per_step": 1e3 * writer.busy_seconds / steps,
        "bytes": on_disk,
        **({"flush_ms": {"median": 1e3 * statistics.median(flushes), "max": 1e3 * flushes[-1]}} if flush else {}),
        **({"milliseconds_a_step": 1e3 * pace, "latest_step_ms": 1e3 * late, "kept_up": refused == 0} if pace else {}),
    }


def loaded(folder: Path, steps: int, *, evict: bool) -> dict[str, float]:
    """Seconds to open the run and load each series, compared with what was written."""
    seconds = {}
    expected = np.arange(steps) % PERIOD
    for name in QUANTITIES:
        if evict:
            file = os.open(folder / "run.sqlite", os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
        start = time.perf_counter()
        with load(folder) as run:
            values = run.series(name)
        seconds[name] = time.perf_counter() - start
        if not np.array_equal(values, VALUES[name][expected]):
            sys.exit(f"{name} is not what was written; nothing is reported")
    return seconds


def measured(folder: Path, steps: int, kills: int) -> dict[str, Any]:
    """All that is measured of one journal."""
    result: dict[str, Any] = {}
    for part, pace, flush in (("full_speed", 0.0, False), ("paced", STEP, False), ("flushed_every_step", 0.0, True)):
        run = folder / part
        result[part] = written(run, steps, pace, flush=flush)
        result[part]["load_seconds_from_disk"] = loaded(run, steps, evict=True)
        result[part]["load_seconds_from_cache"] = loaded(run, steps, evict=False)
        shutil.rmtree(run)
    result["torture"] = torture(folder / "torture", kills)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--folder", default=None, help="where the temporary folder is made")
    parser.add_argument("--out", default=Path(__file__).parent / "results" / "run_store_cpu.json")
    given = parser.parse_args()
    result: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/run_store.py", *sys.argv[1:]]),
        "environment": environment(torch.device("cpu")) | _machine(),
        "size": {"layers": len(LAYERS), "steps": given.steps, "quantities": len(QUANTITIES)},
    }
    for journal in ("wal", "rollback"):
        os.environ["GYROSCOPE_JOURNAL"] = journal
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            result[journal] = measured(Path(folder), given.steps, given.kills)
        for part, r in result[journal].items():
            if part == "torture":
                print(f"{journal:8} torture {r}")
                continue
            print(
                f"{journal:8} {part:18} {r['rows_per_second']:7.0f} rows/s, put {r['put_us']['median']:.1f} us (99 %: "
                f"{r['put_us']['p99']:.1f}), {r['refused']} refused, {r['writer_cpu_ms_per_step']:.2f} ms of CPU per "
                f"step, {r['bytes'] / 1e6:.1f} MB; a series loads in {max(r['load_seconds_from_disk'].values()):.2f} s "
                f"from disk, {max(r['load_seconds_from_cache'].values()):.2f} s from cache"
            )
    write(given.out, result)


def _machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "sqlite": sqlite3.sqlite_version, "load_average_before": os.getloadavg()[0]}


if __name__ == "__main__":
    main()
