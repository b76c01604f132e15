"""What Gyroscope costs the host of a GPU: the Python around its kernels, without the kernels.

    python benchmarks/host_time.py

On a GPU, Layca and `watch` look up tensors, check them, and launch one or two kernels. Here tensors are on a CPU, and
launching does nothing, neither that of our kernels nor those of torch's optimizers. What is left is the host's own
work: processor time of the training thread, which other programs change less than the time on the clock.

It leaves out what the CUDA driver needs for launches, events and copies, and what torch's optimizers do in C++ to pack
addresses. On another processor all numbers scale; their ratios are what this is for.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {"TRITON_INTERPRET": "1", "GYROSCOPE_BACKEND": "triton"}  # kernels for tensors on a CPU

import torch
from triton.runtime.interpreter import InterpretedFunction

import gyroscope
from gyroscope import Layca
from parameter_sets import SETS
from step_cost import general
from timing import environment, summary, write

Params = list[torch.nn.Parameter]
Step = Callable[[], Any]
RATE = 3**-5
LAYERS = 112  # of the network that is watched
# What the steps of torch's optimizers below call for their arithmetic.
TORCHS = ("_fused_sgd_", "_fused_adam_", "_foreach_mul_", "_foreach_add_")


class Compiled:
    """Stands in for a compiled kernel, whose launch returns at once."""

    function = None

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_: None


@contextmanager
def nothing_launched() -> Iterator[None]:
    """Let every launch return at once, of our kernels and of torch's optimizers."""
    compiled = Compiled()
    with patch.object(InterpretedFunction, "__getitem__", lambda *_: lambda *_, **__: compiled):
        theirs = [patch.object(torch, name, lambda *_, **__: None) for name in TORCHS]
        for one in theirs:
            one.start()
        try:
            yield
        finally:
            for one in theirs:
                one.stop()


class Still(torch.optim.Optimizer):
    """A step that does nothing, so that what is timed is the hooks around it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


def layca(inner: torch.optim.Optimizer) -> Layca:
    return Layca(inner, zero_norm="skip")  # inner products are not computed, so nothing may depend on them


def contenders(params: Params) -> dict[str, Step]:
    """Steps by name: torch's own, Layca's, and Layca's around optimizers without a kernel."""
    opt = torch.optim
    momentum: dict[str, Any] = {"lr": RATE, "momentum": 0.9, "fused": True}
    hooked = layca(opt.SGD(params, **momentum))
    hooked.inner.register_step_post_hook(lambda *_: None)  # then its own step must be called
    grads = [[p.grad for p in params], [torch.empty_like(p) for p in params]]

    def elsewhere() -> None:
        grads.reverse()
        for p, g in zip(params, grads[0], strict=True):
            p.grad = g

    BEFORE["layca sgd, gradients moved"] = elsewhere
    return {
        "torch sgd-momentum fused": opt.SGD(params, **momentum).step,
        "torch sgd-momentum foreach": opt.SGD(params, lr=RATE, momentum=0.9, foreach=True).step,
        "torch adam fused": opt.Adam(params, lr=RATE, fused=True).step,
        "layca sgd": layca(opt.SGD(params, lr=RATE)).step,
        "layca sgd, gradients moved": layca(opt.SGD(params, lr=RATE)).step,
        "layca sgd-momentum": layca(opt.SGD(params, **momentum)).step,
        "layca adam": layca(opt.Adam(params, lr=RATE, fused=True)).step,
        "layca sgd-momentum general": general(layca(opt.SGD(params, **momentum))).step,
        "layca sgd-momentum general, with a hook": hooked.step,
        "layca adam general": general(layca(opt.Adam(params, lr=RATE, fused=True))).step,
    }


# What happens right before a step, untimed.
BEFORE: dict[str, Step] = {}


def watched(folder: str) -> tuple[dict[str, Step], list[Step]]:
    """Steps that do nothing, bare and watched, of a network of 112 layers, and what closes the monitors."""
    steps: dict[str, Step] = {}
    closes: list[Step] = []
    for label, every in (("bare", None), ("measured", 1), ("not measured", 10**9)):
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(LAYERS)))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer = Still(model.parameters())
        if every is not None:
            options = {"every": every, "budget": None, "activations": False, "diagnose": False}
            closes.append(gyroscope.watch(model, optimizer, f"{folder}/{label}", **options).close)
        steps[label] = optimizer.step
    return steps, closes


def timed(steps: dict[str, Step], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds of processor time a step, where contenders take turns in random order.

    `warm` is right after a step that is not timed; `cold` is after other work has filled the processor's caches, as
    forward and backward passes do.
    """
    names, shuffled = list(steps), random.Random(0)
    found: dict[str, dict[str, list[float]]] = {name: {"warm": [], "cold": []} for name in steps}
    other = torch.zeros(1 << 23)
    for _ in range(5):
        for name in names:
            steps[name]()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for kind in ("warm", "cold"):
                shuffled.shuffle(names)
                for name in names:
                    steps[name]()
                    BEFORE.get(name, lambda: None)()
                    if kind == "cold":
                        other.add_(1)
                    start = time.thread_time()
                    steps[name]()
                    found[name][kind].append(1e3 * (time.thread_time() - start))
    finally:
        gc.enable()
    return {name: {kind: summary(values) for kind, values in its.items()} for name, its in found.items()}


def parameters(name: str) -> Params:
    params = [torch.nn.Parameter(torch.empty(shape)) for shape in SETS[name]()]
    for p in params:
        p.grad = torch.empty_like(p)
    return params


def show(name: str, found: dict[str, dict[str, dict[str, float]]], layers: int) -> None:
    for label, v in found.items():
        warm, cold = (1e3 * v[kind]["median_ms"] / layers for kind in ("warm", "cold"))
        print(f"{name:12} {label:42} {warm:8.3f} µs warm, {cold:8.3f} cold", flush=True)


def measure(result: dict[str, Any], watching: dict[str, Step], rounds: int) -> None:
    """Time all steps, and add what was found to the result."""
    for name in SETS:
        params = parameters(name)
        found = timed(contenders(params), rounds)
        result["sets"][name] = {"layers": len(params), "steps": found}
        show(name, found, len(params))
    found = timed(watching, rounds)
    result["watch"] = {"layers": LAYERS, "steps": found}
    show("watch", found, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=Path(__file__).parent / "results" / "host_time_cpu.json")
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/host_time.py", *sys.argv[1:]]),
        "environment": environment(torch.device("cpu")),
        "sets": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        steps, closes = watched(folder)  # before launches are left out: what a monitor does depends on its reference
        with nothing_launched():
            measure(result, steps, given.rounds)
        for close in closes:
            close()
    write(given.out, result)


if __name__ == "__main__":
    main()
