"""Kill the process that writes a run, at random moments, and see what is left.

    python benchmarks/torture.py --kills 200

After every kill the run must open, pass its checks and hold every step that `flush()` acknowledged, with the values
that were written; the next process resumes it. A run that was killed before it began must not be there at all, and then
begin as a new one. At the end every run is resumed once more and closed. Prints what was counted as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import numpy as np

from gyroscope.store import Event, LayerInfo, QuantityInfo, Rows, Scalars, Writer, load

LAYERS = [LayerInfo(f"layer{i}.weight", "linear", (8, 8), part=i % 2) for i in range(300)]
QUANTITIES = {name: QuantityInfo(name, "1", "a number") for name in ("rotation", "rate", "lr")}
#: Each run is killed this often, so that most kills hit a run that has been resumed.
KILLS_A_RUN = 10
#: The longest that a process lives after it has opened its run, in seconds: it writes, flushes, closes and resumes.
LIFE = 0.1


def values(step: int, part: int) -> dict[str, np.ndarray]:
    """What is written at a step: known from the step alone."""
    made = np.random.default_rng([step, part]).standard_normal((1, 150)).astype(np.float32)
    return {"rotation": made, "rate": np.where(made > 2, np.nan, -made), "lr": np.full_like(made, 0.5**step)}


def write(folder: Path, start: int, seed: int, acknowledge: int) -> NoReturn:
    """Write until killed; the step is told through the pipe when the run is open, and after each flush."""
    chance = random.Random(seed)
    writer = Writer(folder, LAYERS, QUANTITIES, step=start, tick=0.005, queue=chance.choice([2, 16, 256]))
    step = start
    os.write(acknowledge, b"%d\n" % step)
    while True:
        for _ in range(chance.choice([1, 1, 5, 50])):
            step += 1
            for part in (0, 1):
                while not writer.put(Rows(part, np.array([step]), values(step, part))):
                    time.sleep(0)
            writer.put(Scalars(step, {"loss": step / 7}))
        writer.put(Event(step, "note", f"step {step}"))
        if chance.random() < 0.1:
            writer.close()
            os.write(acknowledge, b"%d\n" % step)
            writer = Writer(folder, LAYERS, QUANTITIES, step=step, tick=0.005)
            continue
        writer.flush()
        os.write(acknowledge, b"%d\n" % step)


def killed(folder: Path, start: int, chance: random.Random, life: float = LIFE) -> int:
    """Let a process write from step `start` on and kill it; the last step that it acknowledged."""
    told, tell = os.pipe()
    seed = chance.randrange(1 << 30)
    child = os.fork()
    if child == 0:
        try:
            write(folder, start, seed, tell)
        finally:
            os._exit(1)
    os.close(tell)
    if chance.random() < 0.75:
        select.select([told], [], [], 60)
        time.sleep(chance.uniform(0, life))
    else:  # while it opens the run
        time.sleep(chance.uniform(0, life / 10))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        sys.exit(f"{folder}: the writing process failed by itself")
    with open(told, "rb") as lines:
        acknowledged = lines.read().split()
    return int(acknowledged[-1]) if acknowledged else start


def verify(folder: Path, acknowledged: int) -> int:
    """Raise if anything acknowledged is not there, or anything there is not what was written; the last step there."""
    with load(folder) as run:
        run.check()
        assert run.state != "running"
        steps = run.steps.tolist()
        assert steps == list(range(1, len(steps) + 1)), "steps are missing"
        assert len(steps) >= acknowledged, f"{acknowledged} was acknowledged, {len(steps)} is the last"
        if not steps:
            return 0
        for step, parts in zip(steps, zip(*(run.series(name) for name in QUANTITIES), strict=True), strict=True):
            for part in (0, 1):
                for name, row in zip(QUANTITIES, parts, strict=True):
                    there, written = row[part::2], values(step, part)[name][0]
                    unknown = (
                        step > acknowledged and np.isnan(there).all()
                    )  # the other part was written, this one not yet
                    assert unknown or np.array_equal(there, written, equal_nan=True), f"{name} at step {step}"
        if acknowledged:
            loss = dict(zip(*(column.tolist() for column in run.scalars["loss"]), strict=True))
            assert all(loss[step] == step / 7 for step in range(1, acknowledged + 1))
        return len(steps)


def torture(
    folder: Path, kills: int, seed: int = 0, *, life: float = LIFE, seen_from: Path | None = None
) -> dict[str, int]:
    """Kill writers in `folder`; what is left is read there, or where another mount shows the same folder."""
    chance = random.Random(seed)
    counts = {
        "kills": 0,
        "before_the_run_began": 0,
        "resumed": 0,
        "steps_acknowledged": 0,
        "steps_beyond": 0,
        "runs": 0,
    }
    while counts["kills"] < kills:
        run, acknowledged = folder / f"run{counts['runs']}", 0
        counts["runs"] += 1
        for _ in range(min(KILLS_A_RUN, kills - counts["kills"])):
            existed = (run / "run.sqlite").exists()
            acknowledged = killed(run, acknowledged, chance, life)
            counts["kills"] += 1
            if not (run / "run.sqlite").exists():
                assert acknowledged == 0
                counts["before_the_run_began"] += 1
                continue
            counts["resumed"] += existed
            counts["steps_beyond"] += verify((seen_from or folder) / run.name, acknowledged) - acknowledged
        counts["steps_acknowledged"] += acknowledged
        with Writer(run, LAYERS, QUANTITIES, step=acknowledged) as writer:
            for part in (0, 1):
                writer.put(Rows(part, np.array([acknowledged + 1]), values(acknowledged + 1, part)))
            writer.put(Scalars(acknowledged + 1, {"loss": (acknowledged + 1) / 7}))
        assert verify((seen_from or folder) / run.name, acknowledged + 1) == acknowledged + 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(torture(Path(folder), given.kills, given.seed)))


if __name__ == "__main__":
    main()
