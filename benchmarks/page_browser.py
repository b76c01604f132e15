"""What a reader waits for: the page in headless Chromium, software rendering, and TensorBoard with the same run.

Run by `python benchmarks/page.py --browser`; needs playwright and Chromium.
"""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gyroscope
from gyroscope.integrations import TensorBoard
from gyroscope.page.document import BUNDLE
from gyroscope.store import Rows

ROUNDS = 7


@contextmanager
def browser() -> Any:
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
    if path is None:
        sys.exit("There is no Chromium on the PATH. Try: apt-get install chromium-headless-shell")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


def opened(one: Any, address: str) -> dict[str, float]:
    """Open a page of ours, and return how long it took and how fast it redraws, in milliseconds."""
    page = one.new_page(viewport={"width": 1300, "height": 900})
    start = time.perf_counter()
    page.goto(address)
    page.evaluate("window.gyroscope.ready")
    ready = 1e3 * (time.perf_counter() - start)
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    found = {"ready_ms": ready, "first_paint_ms": paint}
    for name in ("redrawMs", "hoverMs"):
        found[name.replace("Ms", "_ms")] = page.evaluate(f"window.gyroscope.heatmap.{name}(60)")
    page.close()
    return found


def large(one: Any, report: Path) -> dict[str, Any]:
    """Open the report of the large run several times."""
    rounds = [opened(one, report.as_uri()) for _ in range(ROUNDS)]
    return summaries(rounds)


def summaries(rounds: list[dict[str, float]]) -> dict[str, Any]:
    columns = {name: [one[name] for one in rounds] for name in rounds[0]}
    return {name: {"median": statistics.median(values), "all": values} for name, values in columns.items()}


def counted(one: Any, address: str, shown: str) -> dict[str, float]:
    """Open an address, and return the seconds until an element is shown, and the bytes that came over the network."""
    page = one.new_page(viewport={"width": 1300, "height": 900})
    client = page.context.new_cdp_session(page)
    client.send("Network.enable")
    received = [0]
    client.on("Network.dataReceived", lambda event: received.__setitem__(0, received[0] + event["encodedDataLength"]))
    start = time.perf_counter()
    page.goto(address)
    page.locator(shown).first.wait_for(timeout=60_000)
    seconds = time.perf_counter() - start
    page.wait_for_timeout(1000)
    page.close()
    return {"seconds": seconds, "bytes": received[0]}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def tensorboard(logs: Path) -> Any:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(logs),
        "--port",
        str(port),
        "--load_fast=false",
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(600):
            try:
                # Until it has read the run: what it shows before is empty.
                with urllib.request.urlopen(f"{address}data/plugin/scalars/tags", timeout=5) as answer:
                    if len(answer.read()) > 200:
                        break
            except OSError:
                pass
            time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait()


@contextmanager
def live(folder: Path) -> Any:
    server = subprocess.Popen(
        [sys.executable, "-m", "gyroscope", "live", str(folder), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        yield next(line.strip() for line in server.stdout if "http://" in line)
    finally:
        server.terminate()
        server.wait()


def measured(large_report: Path, run: Path, scratch: Path) -> dict[str, Any]:
    """Return everything; `run` is the one of 200 layers."""
    with gyroscope.load(run) as opened_run:
        sink = TensorBoard(scratch / "tensorboard" / run.name, every=1, quantities=["rotation"])
        sink.open(opened_run.layer_table, {"rotation": opened_run.quantities["rotation"]}, {})
        sink.write(Rows(0, opened_run.steps, {"rotation": opened_run.series("rotation")}))
        sink.close(opened_run)
    report = gyroscope.report(run, scratch / "small.html")
    result: dict[str, Any] = {"bundle_bytes": sum(f.stat().st_size for f in BUNDLE.rglob("*") if f.is_file())}
    with browser() as one:
        result["large"] = {"file_bytes": large_report.stat().st_size, **large(one, large_report)}
        rows: dict[str, list[Any]] = {"report": [], "live": [], "tensorboard": []}
        with live(run.parent) as address, tensorboard(scratch / "tensorboard") as theirs:
            for _ in range(ROUNDS):
                rows["report"].append({**counted(one, report.as_uri(), ".heat canvas"), "bytes": report.stat().st_size})
                rows["live"].append(counted(one, f"{address}#run={run.name}", ".heat canvas"))
                rows["tensorboard"].append(counted(one, f"{theirs}#timeseries", "card-view"))
    result["two_hundred_layers"] = {name: summaries(found) for name, found in rows.items()}
    return result
