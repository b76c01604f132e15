"""Timing that is fair to all: contenders take turns in one run, and medians are reported with their spread."""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Step = Callable[[], Any]


def environment(device: torch.device) -> dict[str, Any]:
    about: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device.type,
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        about["gpu"] = torch.cuda.get_device_name(device)
        about["cuda"] = torch.version.cuda
    try:
        import triton

        about["triton"] = triton.__version__
    except ImportError:
        about["triton"] = None
    return about


def under(backend: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, with GYROSCOPE_BACKEND set to `backend` while it runs."""

    def wrapped(*arguments: Any, **options: Any) -> Any:
        os.environ["GYROSCOPE_BACKEND"] = backend
        try:
            return call(*arguments, **options)
        finally:
            del os.environ["GYROSCOPE_BACKEND"]

    return wrapped


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def interleaved(
    steps: Mapping[str, Step], device: torch.device, *, rounds: int, warmup: int, seconds: float = 60.0
) -> dict[str, dict[str, float]]:
    """Milliseconds a step: each round takes every contender once, in random order, after a step that is not timed.

    On CUDA the device is idle before each step, and the time is from the first event to the last, so that what the
    host needs to launch counts; `host_ms` is how long the call took to return.
    """
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    host: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        for _ in range(warmup):
            steps[name]()
    end = time.perf_counter() + seconds
    shuffled = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for r in range(rounds):
            shuffled.shuffle(names)
            for name in names:
                steps[name]()
                t, h = _one(steps[name], device)
                times[name].append(t)
                host[name].append(h)
            if time.perf_counter() > end and r >= 4:
                break
    finally:
        gc.enable()
    return {name: {**summary(times[name]), "host_ms": statistics.median(host[name])} for name in steps}


def _one(step: Step, device: torch.device) -> tuple[float, float]:
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        spent = 1e3 * (time.perf_counter() - start)
        return spent, spent
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    start = time.perf_counter()
    step()
    returned = time.perf_counter()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last), 1e3 * (returned - start)


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median_ms": statistics.median(ordered),
        "low_ms": ordered[len(ordered) // 10],
        "high_ms": ordered[-1 - len(ordered) // 10],
        "n": len(ordered),
    }


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, counting what is read and what is written."""
    n = (1 << 28) if device.type == "cuda" else (1 << 26)
    source, target = torch.randn(n, device=device), torch.empty(n, device=device)
    result = interleaved({"copy": lambda: target.copy_(source)}, device, rounds=20, warmup=3)
    return 2 * 4 * n / (1e-3 * result["copy"]["median_ms"])


def captured(step: Step) -> Step:
    """The step as a CUDA graph, captured on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()

    def replay(kept: Step = step) -> None:  # the graph reads the memory of what it was captured from
        graph.replay()

    return replay


def write(path: str | os.PathLike[str], result: dict[str, Any]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1) + "\n")
