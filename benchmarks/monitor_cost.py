"""What measuring costs: training steps with a monitor against bare ones, and beside other tools on a CPU.

    python benchmarks/monitor_cost.py --device cpu [--peers]
    python benchmarks/monitor_cost.py --device cuda
    python benchmarks/monitor_cost.py --device cpu --budget    # the default alone, sharper

Every contender trains its own copy of the network; they take turns in one run. `every step` measures all quantities on
the weight side at every step; `default` is what `gyroscope.watch(model, optimizer)` does, after it has learnt the
price, in blocks of seconds beside bare ones. On CUDA steps of each network also run under
`torch.cuda.set_sync_debug_mode("error")`, and `host` is what a measured step adds to the time of the host alone.
`--seconds 8` is meant to end within about 100 seconds on an H200.
"""

from __future__ import annotations

import argparse
import gc
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import gyroscope
import networks
from gyroscope.monitor import clock
from timing import environment, interleaved, summary, under, write

Step = Callable[[], None]
Close = Callable[[], None]
WARM = {"every step": 5, "every step native": 5, "default": 200}


class Task:
    """A network, a batch and a bare training step."""

    def __init__(self, name: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.name, self.device = name, device
        make, batch, optimizer = _TASKS[name]
        self.model = make().to(device)
        self.amp = device.type == "cuda"
        if self.amp and name != "gpt2":
            self.model = self.model.to(memory_format=torch.channels_last)
        self.x, self.y = batch(device)
        self.optimizer = optimizer(self.model.parameters(), device)
        self.after: Step = lambda: None
        self.written = 0.0  # processor seconds of the writer's thread, up to the last turn

    def loss(self) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            out = self.model(self.x)
        return cross_entropy(out.flatten(0, -2).float() if out.dim() > 2 else out.float(), self.y)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()
        self.after()


def _images(count: int, side: int, classes: int) -> Callable[[torch.device], tuple[torch.Tensor, torch.Tensor]]:
    def batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count, 3, side, side, device=device).to(memory_format=torch.channels_last)
        return x, torch.randint(classes, (count,), device=device)

    return batch


def _flat(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(128, 784, device=device), torch.randint(10, (128,), device=device)


def _narrow(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(128, 32, device=device), torch.randint(10, (128,), device=device)


def _text(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(50257, (64, 1025), device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()


def _sgd(params: Any, device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def _adamw(params: Any, device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=device.type == "cuda")


_TASKS: dict[str, tuple[Any, Any, Any]] = {
    "mlp": (networks.mlp, _flat, _sgd),
    "small_layers": (networks.small_layers, _narrow, _sgd),
    "cnn": (networks.cnn, _images(64, 32, 10), _sgd),
    "resnet50": (networks.resnet50, _images(128, 224, 1000), _sgd),
    "resnet50-64": (networks.resnet50, _images(64, 224, 1000), _sgd),
    "gpt2": (networks.GPT2, _text, _adamw),
    "resnet110": (networks.resnet110, _images(128, 32, 10), _sgd),
}


def _watched(task: Task, folder: str, **options: Any) -> Close:
    monitor = gyroscope.watch(task.model, task.optimizer, folder, **options)
    task.monitor = monitor  # type: ignore[attr-defined]
    return monitor.close


def contenders(
    task: str, device: torch.device, folder: str, peers: bool
) -> tuple[dict[str, Task], list[Close], dict[str, str]]:
    """Copies of the task, each with its tool; what to close; and which tools could not be had, and why."""
    every = {"every": 1, "budget": None, "activations": False, "detail_every": 10**9}
    tools: dict[str, Callable[[Task], Close]] = {
        "every step": lambda t: _watched(t, f"{folder}/{task}-every", **every),
        "default": lambda t: _watched(t, f"{folder}/{task}-default"),
    }
    if device.type == "cpu" and shutil.which("cc"):
        tools["every step native"] = under("native", lambda t: _watched(t, f"{folder}/{task}-native", **every))
    if peers:
        import peers as others

        tools |= others.attachments(folder)
    ready, closes, missing = {"bare": Task(task, device)}, [], {}
    for name, attach in tools.items():
        contender = Task(task, device)
        try:
            closes.append(attach(contender))
            if "native" in name:
                under("native", contender.step)()  # the backend is chosen at the first measured step
            else:
                contender.step()
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"
            continue
        ready[name] = contender
    return ready, closes, missing


def _never_waits(task: Task) -> bool:
    """Whether monitored steps run where every synchronisation is an error."""
    for _ in range(3):
        task.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            task.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def measure(
    name: str, device: torch.device, folder: str, *, peers: bool, rounds: int, seconds: float
) -> dict[str, Any]:
    ready, closes, missing = contenders(name, device, folder, peers)
    block = 2

    def several(task: Task) -> Step:
        def steps() -> None:
            for _ in range(block):
                task.step()

        return steps

    for contender in [name for name in WARM if name in ready]:
        for _ in range(WARM[contender] if device.type == "cpu" or contender == "every step" else clock.LEARNING + 2):
            ready[contender].step()
    if device.type == "cuda":  # on a CPU the default is measured by `measure_budget`
        _learns(ready["default"])
    result: dict[str, Any] = {"parameters": sum(p.numel() for p in ready["bare"].model.parameters())}
    if device.type == "cuda":
        result["never_waits"] = _never_waits(ready["every step"])
        result["memory"] = {n: _memory(ready[n]) for n in ("bare", "every step")}
    # Other tools by themselves, beside a bare loop of their own: some are so slow that few rounds would be left.
    ours = {n: several(ready[n]) for n in ("bare", "every step", "every step native") if n in ready}
    theirs = {n: several(t) for n, t in ready.items() if n not in WARM}
    timed = interleaved(ours, device, rounds=rounds, warmup=2, seconds=seconds)
    timed = _over(timed, block)
    if len(theirs) > 1:
        beside = _over(interleaved(theirs, device, rounds=rounds, warmup=2, seconds=seconds), block)
        result["bare_beside_peers"] = beside.pop("bare")
        timed |= beside
    timed["default"] = _in_long_blocks(ready["bare"], ready["default"], timed["bare"]["median_ms"], seconds)
    result |= {"contenders": timed, "missing": missing}
    for contender in [name for name in WARM if name in ready]:
        cost = ready[contender].monitor.cost()  # type: ignore[attr-defined]
        result["contenders"][contender]["own_account"] = {
            "share": cost.share, "seconds": cost.seconds, "step_seconds": cost.step_seconds,
            "interval": cost.interval, "measured": cost.measured, "steps": cost.steps, "held": cost.held,
        }  # fmt: skip
    for close in closes:
        close()
    return result


def _learns(watched: Task) -> None:
    """Train until the monitor may stretch its interval."""
    start = time.perf_counter()
    while watched.monitor._pace.clock.trained < clock.SECONDS:  # type: ignore[attr-defined]
        watched.step()
        assert time.perf_counter() < start + 3 * clock.SECONDS, "the monitor does not count the time of training"


def _in_long_blocks(bare: Task, watched: Task, step_ms: float, seconds: float) -> dict[str, float]:
    """A monitor that keeps to a budget must see training as it is, and is measured now and then: long blocks.

    Milliseconds a step are means over a block; the ratio is that of two blocks that follow each other. Blocks are of
    two seconds, or fewer and shorter ones that take half of `seconds` in all.
    """
    pairs, block = (9, 2.0) if seconds >= 25 else (6, seconds / 24)
    steps = max(3, round(1e3 * block / step_ms))
    rows: list[tuple[float, float]] = []
    for _ in range(pairs):
        pair = []
        for task in (bare, watched):
            _wait(task)
            start = time.perf_counter()
            for _ in range(steps):
                task.step()
            _wait(task)
            pair.append(1e3 * (time.perf_counter() - start) / steps)
        rows.append((pair[0], pair[1]))
    rows = rows[1:]  # the first is a warm-up
    result = summary([after for _, after in rows])
    ratios = summary([after / before - 1.0 for before, after in rows])
    return {**result, "over_bare": ratios["median_ms"], "block": steps, "blocks": rows}  # type: ignore[dict-item]


def measure_host(device: torch.device, folder: str, *, rounds: int) -> dict[str, Any]:
    """Milliseconds of the host for a step of the optimizer alone, with an idle device, bare and measured.

    Contenders take turns in random order. `warm` is right after a step that is not timed; `cold` is after other work
    has filled the processor's caches, as forward and backward passes do. `added` is the difference of the medians.
    """

    def linear() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(112)))

    found: dict[str, Any] = {}
    shuffled, other = random.Random(0), torch.zeros(1 << 23)
    for name, make in {"112 layers": linear, "ResNet-50": networks.resnet50}.items():
        steps: dict[str, Step] = {}
        monitors = []
        for label in ("bare", "measured"):
            model = make().to(device)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
            if label == "measured":
                every = {"every": 1, "budget": None, "activations": False, "detail_every": 10**9}
                monitors.append(gyroscope.watch(model, optimizer, f"{folder}/host-{name}", **every))
            steps[label] = optimizer.step
            for _ in range(20):
                optimizer.step()
        times: dict[str, dict[str, list[float]]] = {label: {"warm": [], "cold": []} for label in steps}
        gc.collect()
        gc.disable()
        try:
            for r in range(rounds):
                if r % 20 == 0:
                    monitors[0].flush()  # so that its queue is never full: steps alone are faster than the disk
                for kind in ("warm", "cold"):
                    for label in shuffled.sample(list(steps), len(steps)):
                        steps[label]()
                        if kind == "cold":
                            other.add_(1)
                        if device.type == "cuda":
                            torch.cuda.synchronize()
                        start = time.perf_counter()
                        steps[label]()
                        times[label][kind].append(1e3 * (time.perf_counter() - start))
                        if device.type == "cuda":
                            torch.cuda.synchronize()
        finally:
            gc.enable()
        assert monitors[0].interval == 1, "measurements were dropped"
        one: dict[str, Any] = {label: {kind: summary(ms) for kind, ms in its.items()} for label, its in times.items()}
        one["added_ms"] = {
            kind: one["measured"][kind]["median_ms"] - one["bare"][kind]["median_ms"] for kind in ("warm", "cold")
        }
        found[name] = {"layers": len(monitors[0].layers), "tensors": len(optimizer.param_groups[0]["params"]), **one}
        monitors[0].close()
    return found


def measure_budget(name: str, device: torch.device, folder: str, *, seconds: float) -> dict[str, Any]:
    """The default budget, and every fourth step whatever it costs, against the same loop without the hooks.

    Each trains one network, with and without the monitor's hooks in turns: another copy would lie elsewhere in memory,
    which changes its speed by up to a percent. Turns are a fifth of a second long. Eight together are compared with the
    eight bare ones among them, and a tenth of these ratios at either end is left out, as the noise of a shared machine.
    `cpu` is the same in processor time, of training and of the writer's thread: other programs hardly change it.
    """
    options: dict[str, dict[str, Any]] = {"default": {}, "every 4 steps": {"every": 4, "budget": None}}
    result: dict[str, Any] = {}
    for i, (one, given) in enumerate(options.items()):
        task = Task(name, device)
        close = _watched(task, f"{folder}/{name}-{i}", **given)
        start = time.perf_counter()
        for _ in range(20):
            task.step()
        steps = max(4, round(4 / (time.perf_counter() - start)))
        while time.perf_counter() < start + 3 * clock.SECONDS:  # the interval is stretched, and stretched again
            task.step()
        monitor = task.monitor  # type: ignore[attr-defined]
        _turn(task, steps)
        before, ratios, bare_ms = monitor.cost(), ([], []), []  # type: ignore[var-annotated]
        end = time.perf_counter() + (seconds if one == "default" else seconds / 3)
        while time.perf_counter() < end:
            spent = {True: [0.0, 0.0, 0], False: [0.0, 0.0, 0]}
            for turn in range(_TOGETHER):
                for watched in (True, False) if turn % 2 else (False, True):
                    for kind, value in enumerate(_turn(task, steps) if watched else _bare_turn(task, steps)):
                        spent[watched][kind] += value
            per_step = {w: (wall / count, cpu / count) for w, (wall, cpu, count) in spent.items()}
            bare_ms.append(1e3 * per_step[False][0])
            for kind, found in enumerate(ratios):
                found.append(per_step[True][kind] / per_step[False][kind] - 1.0)
        cost = monitor.cost()
        result.setdefault("bare_ms", statistics.median(bare_ms))
        result[one] = {
            "block": steps, "rounds": len(bare_ms), "wall": _ratio(ratios[0]), "cpu": _ratio(ratios[1]),
            "own_account": {
                "share": cost.share, "seconds": cost.seconds, "idle_seconds": cost.idle_seconds,
                "step_seconds": cost.step_seconds, "interval": cost.interval,
                "measured": cost.measured - before.measured, "steps": cost.steps - before.steps,
            },
        }  # fmt: skip
        close()
    return result


def _turn(task: Task, steps: int) -> tuple[float, float, int]:
    """Seconds by the clock, those of the processor for training and the writer's thread, and steps."""
    monitor = task.monitor  # type: ignore[attr-defined]
    track, taken = monitor._tracks[0], 0
    monitor._loop.stopwatch.since = time.perf_counter()  # it takes no part in the pause
    start, used = time.perf_counter(), time.thread_time()
    # To a step after which nothing is prepared for the next one.
    while taken < steps or track.fresh or track.sampling:
        task.step()
        taken += 1
    spent, used = time.perf_counter() - start, time.thread_time() - used
    # What is written between turns counts in the next one.
    written, task.written = task.written, monitor._recorder.writer.busy_seconds
    return spent, used + task.written - written, taken


def _bare_turn(task: Task, steps: int) -> tuple[float, float, int]:
    """The same without the monitor's hooks."""
    optimizer: Any = task.optimizer
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        start, used = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            task.step()
        return time.perf_counter() - start, time.thread_time() - used, steps
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks


# Blocks whose time is compared as one.
_TOGETHER = 8


def _ratio(ratios: list[float]) -> dict[str, Any]:
    ordered = sorted(ratios)
    kept = ordered[len(ordered) // 10 : len(ordered) - len(ordered) // 10]
    return {
        "over_bare": statistics.mean(kept), "standard_error": statistics.stdev(kept) / len(kept) ** 0.5,
        "median": statistics.median(ordered), "ratios": ordered,
    }  # fmt: skip


def _wait(task: Task) -> None:
    if task.device.type == "cuda":
        torch.cuda.synchronize()


def _over(timed: dict[str, dict[str, float]], block: int) -> dict[str, dict[str, float]]:
    """Milliseconds a step instead of a block, and how much more than the bare loop of the same run."""
    bare = timed["bare"]["median_ms"]
    for numbers in timed.values():
        numbers["over_bare"] = numbers["median_ms"] / bare - 1.0
        numbers.update({key: numbers[key] / block for key in ("median_ms", "low_ms", "high_ms", "host_ms")})
    return timed


def _memory(task: Task) -> dict[str, int]:
    """Bytes that a training step takes above what it starts from, at most; and what a monitor holds all the time."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    task.step()
    torch.cuda.synchronize()
    monitor = getattr(task, "monitor", None)
    return {"peak_above": torch.cuda.max_memory_allocated() - start, "held": 0 if monitor is None else monitor.bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--tasks", nargs="*", help="which networks; default: those of the device")
    parser.add_argument("--peers", action="store_true", help="other tools beside, as far as they are installed")
    parser.add_argument("--budget", action="store_true", help="the default budget alone, beside a bare loop")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=60.0, help="at most so long for one network")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    second = "small_layers" if options.budget else "cnn"
    large = ["resnet50", "resnet50-64", "gpt2", "resnet110"]
    names = options.tasks or (["mlp", second] if device.type == "cpu" else large)
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(device),
        "tasks": {},
    }
    stem = "monitor_budget" if options.budget else "monitor_cost"
    out = options.out or Path(__file__).parent / "results" / f"{stem}_{device.type}.json"
    for name in names if options.budget else ():
        with tempfile.TemporaryDirectory() as folder:
            found = result["tasks"][name] = measure_budget(name, device, folder, seconds=options.seconds)
        for one in ("default", "every 4 steps"):
            wall, cpu, own = (found[one][key] for key in ("wall", "cpu", "own_account"))
            print(
                f"{name:13} {one:14} {100 * wall['over_bare']:+6.2f} ± {100 * wall['standard_error']:.2f} %, processor "
                f"{100 * cpu['over_bare']:+6.2f} ± {100 * cpu['standard_error']:.2f} %, own account "
                f"{100 * own['share']:.2f} %, every {own['interval']} steps",
                flush=True,
            )
        write(out, result)
    if device.type == "cuda" and not options.budget:
        with tempfile.TemporaryDirectory() as folder:
            result["host"] = measure_host(device, folder, rounds=100)
        for name, found in result["host"].items():
            warm, cold = (1e3 * found["added_ms"][kind] for kind in ("warm", "cold"))
            print(f"{name:13} a measured step takes {warm:.0f} µs more of the host, {cold:.0f} cold", flush=True)
    for name in () if options.budget else names:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(
                name, device, folder, peers=options.peers, rounds=options.rounds, seconds=options.seconds
            )  # fmt: skip
        result["tasks"][name] = found
        for contender, numbers in found["contenders"].items():
            over = 100 * numbers["over_bare"]
            print(f"{name:13} {contender:28} {numbers['median_ms']:9.3f} ms {over:+8.2f} %", flush=True)
        for contender, why in found["missing"].items():
            print(f"{name:13} {contender:28} missing: {why[:100]}")
        write(out, result)


if __name__ == "__main__":
    main()
