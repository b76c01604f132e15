"""What a report costs: seconds, memory and bytes for 1,202 layers × 10,000 steps, and the bytes of the demo.

    python benchmarks/page.py --report
    python benchmarks/page.py --live     # what the live page costs: see page_live.py
    python benchmarks/page.py --browser  # what a reader waits for: see page_browser.py

A run of made-up numbers that behave like a residual network under SGD is written to a temporary folder, with the
quantities of the target and with all that `gyroscope.watch` records. Each report is made by the command, in a process
of its own on one core.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import page_browser
import page_live
from gyroscope.page.document import BUNDLE, parts
from gyroscope.store import LayerInfo, QuantityInfo, Rows, Scalars, Writer
from timing import environment, write

LAYERS, STEPS = 1202, 10_000
#: The quantities of the target, and those that watch records by default.
SIX = ("rotation", "rate_per_step", "weight_norm", "gradient_norm", "update_ratio", "effective_lr")
ALL = (
    "rotation", "rate", "rate_per_step", "weight_norm", "weight_norm_before", "gradient_norm", "update_norm",
    "update_ratio", "effective_lr", "effective_lr_measured", "alignment", "invariance", "lr", "weight_decay",
)  # fmt: skip
_PIECE = 250


def write_run(folder: Path, layers: int = LAYERS, steps: int = STEPS, quantities: tuple[str, ...] = SIX) -> Path:
    """Write a run with a value at every step: noise from step to step and between layers, a slow drift, two cuts of the
    learning rate.
    """
    draw = np.random.default_rng(0)
    names = [f"layer{1 + 3 * i // layers}.{(i // 2) % 200}.conv{1 + i % 2}.weight" for i in range(layers)]
    names = names if len(set(names)) == layers else [f"layer{i}.weight" for i in range(layers)]
    table = [LayerInfo(name, "conv", (16, 16, 3, 3)) for name in names]
    about = {name: QuantityInfo(name, "1", "made up") for name in quantities}
    meta = {"model": "made up", "optimizers": [{"class": "SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}]}
    depth = np.linspace(0, 1, layers)[None]
    pace, start = np.exp(0.4 * draw.standard_normal((1, layers))), 3 * np.exp(0.3 * draw.standard_normal((1, layers)))
    drift = turned = np.zeros((1, layers))
    with Writer(folder, table, about, meta=meta) as writer:
        for begin in range(0, steps, _PIECE):
            k = np.arange(begin, min(begin + _PIECE, steps))[:, None]
            shape = (len(k), layers)
            drifts = drift + np.cumsum(0.02 * draw.standard_normal(shape), axis=0)
            drift = drifts[-1:]
            lr = np.broadcast_to(0.1 * np.where(k < steps / 2, 1.0, np.where(k < 0.75 * steps, 0.1, 0.01)), shape)
            noise = np.exp(0.3 * drifts + 0.35 * draw.standard_normal(shape))
            gradient = 0.3 * (1 - 0.6 * depth) * np.exp(-2 * k / steps) * pace * noise
            norm = start * (1 + 0.5 * np.sqrt(k / steps)) * np.exp(1e-3 * drifts)
            ratio = lr * gradient / norm
            rate = ratio * np.exp(0.05 * draw.standard_normal(shape))
            angles = np.sqrt(turned**2 + np.cumsum(30 * rate**2, axis=0))
            turned = angles[-1:]
            values = {
                "rotation": 1 - np.cos(np.minimum(angles, np.pi / 2)),
                "rate": rate,
                "rate_per_step": rate,
                "weight_norm": norm,
                "weight_norm_before": norm,
                "gradient_norm": gradient,
                "update_norm": ratio * norm,
                "update_ratio": ratio,
                "effective_lr": lr / norm**2,
                "effective_lr_measured": lr / norm**2 * np.exp(0.1 * draw.standard_normal(shape)),
                "alignment": np.tanh(0.3 * draw.standard_normal(shape) + 0.2),
                "invariance": 1e-6 * draw.standard_normal(shape),
                "lr": lr,
                "weight_decay": np.full(shape, 5e-4),
            }
            record = Rows(0, k[:, 0].astype(np.int64), {name: values[name].astype(np.float32) for name in quantities})
            while not writer.put(record):
                time.sleep(0.01)
            for step in k[:, 0].tolist():
                writer.put(Scalars(step, {"loss": 2.3 * np.exp(-4 * step / steps) + 0.1 * draw.random()}))
    if writer.error is not None:
        sys.exit(str(writer.error))
    return folder


#: The command, and then what its process took. A child's own account would begin with the memory of its parent.
_MEASURED = """
import os, re, sys, time
from gyroscope.cli import main
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
try:
    main()
except SystemExit as end:
    if end.code:
        raise
with open("/proc/self/status") as status:
    print(1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1]), time.process_time())
"""


def reported(run: Path, *options: str) -> dict[str, Any]:
    """Make a report by the command, on one core, and return what it took."""
    out = run.parent / "report.html"
    start = time.perf_counter()
    command = [sys.executable, "-c", _MEASURED, "report", str(run), "--out", str(out), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.perf_counter() - start
    peak, used = done.stdout.split()[-2:]
    return {
        "seconds": seconds,
        "cpu_seconds": float(used),
        "peak_bytes": int(peak),
        "file_bytes": out.stat().st_size,
    }


def demo_bytes(folder: Path) -> int:
    """Run the demo with one seed, which shows the same runs as with three, and return the bytes of its page."""
    command = [sys.executable, "-m", "gyroscope", "demo", "--seeds", "1", "--out", str(folder)]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return (folder / "index.html").stat().st_size


def report(out: Path) -> None:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        six, everything = (
            write_run(Path(folder, name), quantities=names) for name, names in (("six", SIX), ("all", ALL))
        )
        for name, run, options in (
            ("6 quantities, 512 bins", six, ()),
            ("6 quantities, 400 bins", six, ("--bins", "400")),
            ("6 quantities, every step (--full)", six, ("--full",)),
            ("14 quantities, 512 bins", everything, ()),
        ):
            found[name] = reported(run, *options)
            print(f"{name:36}", {key: round(value, 1) for key, value in found[name].items()})
        demo = demo_bytes(Path(folder, "demo"))
    bundle = parts(BUNDLE)
    size = sum(len(text.encode()) for text in (bundle.template, *bundle.styles, *bundle.scripts))
    print(f"demo {demo} bytes, of which {size} are the page itself")
    write(out, {
        "command": "python benchmarks/page.py --report",
        "environment": environment(torch.device("cpu")),
        "size": {"layers": LAYERS, "steps": STEPS},
        "reports": found,
        "demo_bytes": demo,
        "bundle_bytes": size,
    })  # fmt: skip


def browser(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        large = scratch / "large.html"
        command = [sys.executable, "-m", "gyroscope", "report", str(write_run(scratch / "six")), "--out", str(large)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        small = write_run(scratch / "small" / "run", layers=200, steps=1000, quantities=("rotation",))
        found = page_browser.measured(large, small, scratch)
    print({name: one["median"] for name, one in found["large"].items() if name != "file_bytes"})
    for name, row in found["two_hundred_layers"].items():
        print(f"{name:20}", {key: one["median"] for key, one in row.items()})
    write(out, {
        "command": "python benchmarks/page.py --browser",
        "environment": environment(torch.device("cpu")),
        **found,
    })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="reports: seconds, memory and bytes")
    parser.add_argument("--live", action="store_true", help="the live page: processor time, delays, flushes")
    parser.add_argument("--browser", action="store_true", help="pages in a browser, compared with TensorBoard")
    results = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.report + given.live + given.browser != 1:
        parser.error("say what to measure: --report, --live or --browser")
    if given.report:
        report(given.out or results / "page_report_cpu.json")
    elif given.browser:
        browser(given.out or results / "page_browser_cpu.json")
    else:
        page_live.live(given.out or results / "page_live.json")


if __name__ == "__main__":
    main()
