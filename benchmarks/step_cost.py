"""What an optimizer step costs: Layca against torch's own optimizers, on the weights of three networks.

    python benchmarks/step_cost.py --device cpu
    python benchmarks/step_cost.py --device cuda

Before anything is timed, one step of each of ours is compared with the four literal operations in float64.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gyroscope import Layca
from parameter_sets import SETS
from timing import captured, copy_bandwidth, environment, interleaved, under, write

RATE = 3**-5
STILL = 1e-9  # torch's own steps at a rate that leaves the shared weights about where they are
Params = list[torch.nn.Parameter]
Make = Callable[[Params], torch.optim.Optimizer]


class Literal(torch.optim.Optimizer):
    """The four operations of Algorithm 1 as they are written, layer by layer, over plain SGD."""

    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.norms = [p.detach().norm() for p in params]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p, norm in zip(self.param_groups[0]["params"], self.norms, strict=True):
            s = -p.grad
            s = s - (s * p).sum() / (p * p).sum() * p
            s = s * p.norm() / s.norm()
            new = p + self.param_groups[0]["lr"] * s
            p.copy_(new * norm / new.norm())


def contenders(cuda: bool, capturable: bool = False) -> dict[str, Make]:
    """Ours and theirs by name; `general` forces the path that any optimizer takes."""
    opt = torch.optim
    extra: dict[str, Any] = {"capturable": True} if capturable else {}
    fused: dict[str, Any] = {"fused": True}
    found: dict[str, Make] = {
        "torch sgd fused": lambda p: opt.SGD(p, lr=STILL, **fused),
        "torch sgd-momentum fused": lambda p: opt.SGD(p, lr=STILL, momentum=0.9, **fused),
        "torch sgd-momentum foreach": lambda p: opt.SGD(p, lr=STILL, momentum=0.9, foreach=True),
        "torch adam fused": lambda p: opt.Adam(p, lr=STILL, **fused, **extra),
        "torch adamw fused": lambda p: opt.AdamW(p, lr=STILL, **fused, **extra),
        "torch adamw foreach": lambda p: opt.AdamW(p, lr=STILL, foreach=True, **extra),
        "torch nadam foreach": lambda p: opt.NAdam(p, lr=STILL, foreach=True, **extra),
        "torch adamax foreach": lambda p: opt.Adamax(p, lr=STILL, foreach=True, **extra),
        "layca sgd": lambda p: Layca(opt.SGD(p, lr=RATE)),
        "layca sgd-momentum": lambda p: Layca(opt.SGD(p, lr=RATE, momentum=0.9, **fused)),
        "layca adam": lambda p: Layca(opt.Adam(p, lr=RATE, **fused, **extra)),
        "layca adamw": lambda p: Layca(opt.AdamW(p, lr=RATE, **fused, **extra)),
        "layca nadam": lambda p: Layca(opt.NAdam(p, lr=RATE, **extra)),
        "layca adamax": lambda p: Layca(opt.Adamax(p, lr=RATE, **extra)),
        "layca sgd-momentum general": lambda p: general(Layca(opt.SGD(p, lr=RATE, momentum=0.9, **fused))),
        "layca adamw general": lambda p: general(Layca(opt.AdamW(p, lr=RATE, **fused, **extra))),
        "literal sgd": lambda p: Literal(p, lr=RATE),
    }
    if not cuda:
        found = {k: v for k, v in found.items() if "foreach" not in k}
        ours = [label for label in found if label.startswith("layca") and "general" not in label]
        found |= {f"{label} native": native(found[label]) for label in ours if shutil.which("cc")}
    return found


def native(make: Make) -> Make:
    """The same with the compiled backend of CPUs."""

    def made(params: Params) -> torch.optim.Optimizer:
        optimizer = make(params)
        optimizer.step = under("native", optimizer.step)  # type: ignore[method-assign]
        return optimizer

    return made


def general(optimizer: Layca) -> Layca:
    """Forget that the inner optimizer has a kernel, and take the path of optimizers that have none."""
    proposer = optimizer._steering.proposer
    proposer.rule = replace(proposer.rule, kernel=None)
    return optimizer


def parameters(name: str, device: torch.device) -> Params:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in SETS[name]()]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def check(make: Make, name: str, device: torch.device) -> float:
    """The largest error of two steps against the literal operations in float64, relative to the largest weight."""
    few = slice(1, 13)
    params = parameters(name, device)[few]
    ours = make(params)
    exact = [torch.nn.Parameter(p.detach().double()) for p in params]
    options = {k: v for k, v in ours.inner.defaults.items() if k != "decoupled_weight_decay"}
    optimizer = type(ours.inner)(exact, **options)
    norms = [q.detach().norm() for q in exact]
    for _ in range(2):
        for p, q in zip(params, exact, strict=True):
            q.grad = p.grad.double()
        before = [q.detach().clone() for q in exact]
        optimizer.step()
        ours.step()
        for q, w, norm in zip(exact, before, norms, strict=True):
            s = q.detach() - w
            s = s - (s * w).sum() / (w * w).sum() * w
            new = w + RATE * s * w.norm() / s.norm()
            q.data.copy_(new * norm / new.norm())
    return max(float((p - q).detach().abs().max() / q.detach().abs().max()) for p, q in zip(params, exact, strict=True))


def measure(name: str, device: torch.device, rounds: int, seconds: float) -> dict[str, Any]:
    cuda = device.type == "cuda"
    params = parameters(name, device)
    errors = {}
    for label, make in contenders(cuda).items():
        if label.startswith("layca"):
            errors[label] = check(make, name, device)
            if not errors[label] < 1e-6:
                sys.exit(f"{label} on {name} is off by {errors[label]}: nothing is timed")
    made = {label: make(params) for label, make in contenders(cuda).items()}
    steps = {label: optimizer.step for label, optimizer in made.items()}
    n = sum(p.numel() for p in params)
    result: dict[str, Any] = {
        "layers": len(params),
        "elements": n,
        "errors": errors,
        "eager": interleaved(steps, device, rounds=rounds, warmup=3, seconds=seconds),
    }
    if cuda:
        del made, steps
        torch.cuda.empty_cache()
        graphs = {
            label: captured(make(params).step)
            for label, make in contenders(cuda, capturable=True).items()
            if label != "literal sgd"
        }
        result["graph"] = interleaved(graphs, device, rounds=rounds, warmup=3, seconds=seconds)
    return result


def ratios(result: dict[str, Any]) -> dict[str, Any]:
    """What the targets speak of, from the medians."""
    bandwidth = result["copy_bandwidth"]
    out: dict[str, Any] = {}
    for name, one in result["sets"].items():
        rows: dict[str, float] = {}
        for mode in ("eager", "graph"):
            if mode not in one:
                continue
            t = {label: values["median_ms"] for label, values in one[mode].items()}
            base = t["torch sgd-momentum fused"]
            rows[f"{mode}: layca sgd / fused sgd-momentum"] = t["layca sgd"] / base
            if "layca sgd native" in t:
                rows[f"{mode}: layca sgd native / fused sgd-momentum"] = t["layca sgd native"] / base
                for label in ("sgd-momentum", "adam", "adamw"):
                    same = t[f"torch {label} fused"]
                    rows[f"{mode}: layca {label} native / fused {label}"] = t[f"layca {label} native"] / same
            rows[f"{mode}: layca sgd-momentum / fused sgd-momentum"] = t["layca sgd-momentum"] / base
            rows[f"{mode}: layca adam / fused adam"] = t["layca adam"] / t["torch adam fused"]
            rows[f"{mode}: layca adamw / fused adamw"] = t["layca adamw"] / t["torch adamw fused"]
            for label in ("nadam", "adamax"):  # torch has no fused ones
                if f"torch {label} foreach" in t:
                    rows[f"{mode}: layca {label} / foreach {label}"] = t[f"layca {label}"] / t[f"torch {label} foreach"]
            copies = 1e3 * 8 * one["elements"] / bandwidth
            for label, inner in (("sgd-momentum", "sgd-momentum"), ("adamw", "adamw")):
                extra = t[f"layca {label} general"] - t[f"torch {inner} fused"]
                rows[f"{mode}: general path over {label}, copies of the parameters"] = extra / copies
            if "literal sgd" in t:
                rows[f"{mode}: literal sgd / fused sgd-momentum"] = t["literal sgd"] / base
            five = 20 * one["elements"] / (1e-3 * t["layca sgd"])
            rows[f"{mode}: layca sgd, five passes, share of copy bandwidth"] = five / bandwidth
        host = one["eager"]["layca sgd"]["host_ms"]
        rows["host microseconds a layer, layca sgd"] = 1e3 * host / one["layers"]
        out[name] = rows
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default=None, help="JSON file; default benchmarks/results/step_cost_DEVICE.json")
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=60.0, help="at most this long a set")
    given = parser.parse_args()
    device = torch.device(given.device)
    rounds = given.rounds or (100 if device.type == "cuda" else 15)
    result: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/step_cost.py", *sys.argv[1:]]),
        "environment": environment(device),
        "copy_bandwidth": copy_bandwidth(device),
        "sets": {},
    }
    print(f"copy bandwidth {result['copy_bandwidth'] / 1e9:.0f} GB/s", flush=True)
    for name in given.sets:
        result["sets"][name] = measure(name, device, rounds, given.seconds)
        for mode in ("eager", "graph"):
            for label, v in result["sets"][name].get(mode, {}).items():
                print(
                    f"{name:12} {mode:6} {label:30} {v['median_ms']:9.3f} ms  [{v['low_ms']:.3f}, {v['high_ms']:.3f}]"
                    f"  host {v['host_ms']:.3f}",
                    flush=True,
                )
    result["ratios"] = ratios(result)
    for name, rows in result["ratios"].items():
        for label, value in rows.items():
            print(f"{name:12} {label:60} {value:8.3f}")
            assert math.isfinite(value)
    here = Path(__file__).parent
    write(given.out or here / "results" / f"step_cost_{device.type}.json", result)


if __name__ == "__main__":
    main()
