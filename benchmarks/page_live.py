"""What the live page costs: the server's processor time, and whether anybody who writes or reads has to wait.

    python benchmarks/page.py --live

Twenty runs of 100 layers, of which ten are written by another process: a row of six quantities and a flush every 50 ms
each. `gyroscope live` is a process of its own, whose processor time the system counts. Clients are connections that
wait for events and then read what the page reads: the list of runs, or also a run with its heatmap and two curves. A
browser is not among them: it would compete for the same cores. For the writer, flushes with and without readers take
turns. The processor time of everybody else on the machine is recorded, as the load.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from gyroscope.store import LayerInfo, QuantityInfo, Rows, Scalars, Writer
from timing import environment, write

LAYERS = [LayerInfo(f"layer{i}.weight", "conv", (16, 16, 3, 3)) for i in range(100)]
QUANTITIES = ("rotation", "rate_per_step", "weight_norm", "gradient_norm", "update_norm", "lr")
RUNS, WRITTEN, PACE = 20, 10, 0.05
_TICK = os.sysconf("SC_CLK_TCK")


def opened(folder: Path, step: int = 0) -> Writer:
    about = {name: QuantityInfo(name, "1", "a number") for name in QUANTITIES}
    return Writer(folder, LAYERS, about, step=step, queue=10_000)


def values(steps: np.ndarray) -> dict[str, np.ndarray]:
    layers = 1 + np.arange(len(LAYERS)) / len(LAYERS)
    found = {name: np.outer(1 + steps / 1000, layers).astype(np.float32) for name in QUANTITIES}
    return found | {"lr": np.full((len(steps), len(LAYERS)), 0.1, dtype=np.float32)}


def put(writer: Writer, first: int, count: int) -> None:
    steps = np.arange(first, first + count)
    writer.put(Rows(0, steps, values(steps)))
    for step in steps:
        writer.put(Scalars(int(step), {"loss": 1.0 / (1 + step), "accuracy": 0.5}))


def write_runs(folder: Path, begun: int) -> None:
    """Write runs at a pace, until standard input ends; each line of the output says how many flushes were made."""
    writers = [opened(folder / f"run{i:02}", begun) for i in range(WRITTEN)]
    print("begun", flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    start, step = time.perf_counter(), begun
    while not ended.is_set():
        for writer in writers:
            put(writer, step, 1)
        for writer in writers:
            writer.flush()
        step += 1
        ended.wait(max(start + (step - begun) * PACE - time.perf_counter(), 0))
    for writer in writers:
        writer.close()
    print(json.dumps({"flushes": step - begun, "seconds": time.perf_counter() - start}), flush=True)


def processor_time(process: int) -> float:
    """Seconds that a process and its threads have used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def machine_time() -> float:
    """Seconds that all processes have used, on all cores."""
    fields = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]))
    return sum(fields[:3] + fields[5:8]) / _TICK


class Share:
    """The share of one core that a process uses, and that everybody uses, between two moments."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._start = time.perf_counter(), processor_time(process), machine_time()

    def __call__(self) -> dict[str, float]:
        then, own, all_ = self._start
        seconds = time.perf_counter() - then
        return {
            "seconds": seconds,
            "server": (processor_time(self._process) - own) / seconds,
            "machine": (machine_time() - all_) / seconds,
        }


@contextmanager
def serving(folder: Path) -> Iterator[tuple[int, str, float]]:
    """Yield the process of a server, its address, and the seconds until it answered."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "gyroscope", "live", str(folder), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        address = next(line.strip() for line in process.stdout if line.startswith("http"))
        with socket.create_connection((urlsplit(address).hostname, urlsplit(address).port)) as connection:
            connection.sendall(f"GET /?{urlsplit(address).query} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            assert b"303" in connection.recv(100)
        yield process.pid, address, time.perf_counter() - start
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


@contextmanager
def writing(folder: Path, begun: int, told: dict[str, Any]) -> Iterator[None]:
    """Write runs in another process meanwhile."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder), str(begun)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    try:
        yield
    finally:
        told |= json.loads(process.communicate("")[0])


class Client:
    """A page without a browser: it waits for events, and reads what the page reads."""

    def __init__(self, address: str, run: str | None = None) -> None:
        self._parts, self._run = urlsplit(address), run
        self.reads = self.events = self.bytes = 0
        self.delays: list[float] = []

    async def follow(self) -> None:
        await self.read()
        reader, writer = await self._sent("/api/changes", "text/event-stream")
        try:
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    self.events += 1
                    changed = json.loads(line[6:])
                    await self.read(changed["runs"])
                    await asyncio.sleep(0.4)  # as the page does
        finally:
            writer.close()

    async def read(self, changed: list[str] | None = None) -> None:
        self.runs = json.loads(await self.get("/api/runs"))
        if self._run is not None and (changed is None or self._run in changed):
            await self.get(f"/api/run/{self._run}")
            for quantity in ("rotation", "rate_per_step", "weight_norm"):
                await self.get(f"/api/run/{self._run}/series/{quantity}?bins=512")
        self.reads += 1

    async def get(self, path: str) -> bytes:
        reader, writer = await self._sent(path, "*/*")
        try:
            answer = await reader.read()
        finally:
            writer.close()
        self.bytes += len(answer)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0], head
        return body

    async def _sent(self, path: str, accept: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._parts.hostname, self._parts.port)
        path += ("&" if "?" in path else "?") + self._parts.query
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\nConnection: close\r\n\r\n".encode()
        )
        return reader, writer


async def followed(clients: list[Client], seconds: float, share: Any) -> dict[str, float]:
    """Let clients follow for a while, after a warm-up, and return the share of the processor."""
    tasks = [asyncio.create_task(client.follow()) for client in clients]
    await asyncio.sleep(6)  # first reads, first diagnoses
    measured = share()
    await asyncio.sleep(seconds)
    found = measured()
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(ended, asyncio.CancelledError):
            raise RuntimeError("a client has failed") from ended
    return dict(found)


def shares(folder: Path, seconds: float, begun: int) -> dict[str, Any]:
    """The server's share of one core, at rest and while ten runs are written."""
    found: dict[str, Any] = {}
    cases: dict[str, list[str | None]] = {"nobody": [], "the list": [None], "the list and a run": [None, "run00"]}
    for name, wanted in cases.items():
        for busy in (False, True):
            told: dict[str, Any] = {}
            with serving(folder) as (process, address, start):
                clients = [Client(address, run) for run in wanted]
                if busy:
                    with writing(folder, begun, told):
                        share = asyncio.run(followed(clients, seconds, lambda p=process: Share(p)))
                    begun += int(told["flushes"])
                else:
                    share = asyncio.run(followed(clients, seconds, lambda p=process: Share(p)))
            key = f"{name}, {'ten runs are written' if busy else 'at rest'}"
            found[key] = {**share, "start": start, "writer": told, "reads": sum(one.reads for one in clients)}
            print(f"{key}: {100 * share['server']:.1f} % of a core (all: {100 * share['machine']:.0f} %)", flush=True)
    return found


async def hear(clients: list[Client], folder: Path, begun: int, flushes: int) -> dict[str, Any]:
    """Write one run and let all clients read it; return the delays from a flush to the step in what they have read."""
    tasks = [asyncio.create_task(client.follow()) for client in clients]
    await asyncio.sleep(3)
    delays: list[float] = []
    missed = 0
    writer = opened(folder / "run00", begun)
    rng = np.random.default_rng(0)
    for step in range(begun, begun + flushes):
        put(writer, step, 1)
        await asyncio.to_thread(writer.flush)
        flushed = time.perf_counter()
        waiting = set(clients)
        while waiting and time.perf_counter() < flushed + 10:
            await asyncio.sleep(0.005)
            for client in list(waiting):
                if next(one["steps"] for one in client.runs if one["id"] == "run00") == step:
                    delays.append(time.perf_counter() - flushed)
                    waiting.discard(client)
        missed += len(waiting)
        await asyncio.sleep(float(rng.uniform(0, 0.5)))  # not in step with the server
    writer.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "clients": len(clients), "flushes": flushes, "missed": missed, "median_s": statistics.median(delays),
        "p95_s": sorted(delays)[int(0.95 * len(delays))], "longest_s": max(delays), "delays": delays,
    }  # fmt: skip


def flush_times(folder: Path, begun: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a flush with and without eight clients that read the run as fast as they can, taking turns."""
    found: dict[str, list[float]] = {"alone": [], "read": []}
    logs: list[int] = []
    writer = opened(folder / "run00", begun)
    step = begun

    async def hammer(address: str, stop: asyncio.Event) -> None:
        client = Client(address, "run00")
        while not stop.is_set():
            await client.read()

    async def turn(address: str, kind: str) -> None:
        nonlocal step
        stop = asyncio.Event()
        tasks = [asyncio.create_task(hammer(address, stop)) for _ in range(8 if kind == "read" else 0)]
        await asyncio.sleep(0.5)
        for _ in range(25):
            put(writer, step, 1)
            start = time.perf_counter()
            await asyncio.to_thread(writer.flush)
            found[kind].append(1e3 * (time.perf_counter() - start))
            step += 1
            await asyncio.sleep(0.02)
            logs.append((folder / "run00" / "run.sqlite-wal").stat().st_size)
        stop.set()
        await asyncio.gather(*tasks)

    with serving(folder) as (_, address, _):
        for _ in range(rounds):
            for kind in found:
                asyncio.run(turn(address, kind))
    writer.close()
    return {"ms": found, "largest_log_bytes": max(logs)} | {
        kind: {"median_ms": statistics.median(times), "p95_ms": sorted(times)[int(0.95 * len(times))], "n": len(times)}
        for kind, times in found.items()
    }


def live(out: Path, *, steps: int = 2000, seconds: float = 20.0, folder: str | None = None) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        runs = Path(place)
        for i in range(RUNS):
            with opened(runs / f"run{i:02}") as writer:
                for first in range(0, steps, 500):
                    put(writer, first, min(500, steps - first))
        result: dict[str, Any] = {
            "command": "python benchmarks/page.py --live",
            "environment": environment(torch.device("cpu")) | {"cores": os.cpu_count(), "load": os.getloadavg()},
            "runs": RUNS, "layers": len(LAYERS), "steps": steps, "written": WRITTEN, "pace_s": PACE,
        }  # fmt: skip
        result["shares"] = shares(runs, seconds, steps)
        later = steps + 20_000
        with serving(runs) as (_, address, _):
            result["updates"] = asyncio.run(hear([Client(address) for _ in range(32)], runs, later, 30))
        said = {key: value for key, value in result["updates"].items() if key != "delays"}
        print("32 clients:", json.dumps(said), flush=True)
        result["flushes"] = flush_times(runs, later + 1000, 8)
        print("flushes:", json.dumps({key: result["flushes"][key] for key in ("alone", "read", "largest_log_bytes")}))
        result["load_at_the_end"] = os.getloadavg()
    write(out, result)


if __name__ == "__main__":  # the process that writes the runs
    write_runs(Path(sys.argv[1]), int(sys.argv[2]))
