"""`dots` and `combine_` on a device: every case checked against eager in float64, then timed.

    python benchmarks/vectors.py --device cuda

Nothing is timed unless every case agrees.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gyroscope.vectors import backend, combine_, dots, eager
from parameter_sets import SETS
from timing import copy_bandwidth, environment, interleaved, write

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def cases(device: torch.device) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Lists of pairs that have bitten somebody: layouts, sizes, and values that float32 sums get wrong."""
    g = torch.Generator(device).manual_seed(0)

    def pair(*shape: int, layout: str = "contiguous") -> tuple[Tensor, Tensor]:
        x, y = (torch.randn(shape, generator=g, device=device) for _ in range(2))
        if layout == "channels-last":
            x, y = (t.to(memory_format=torch.channels_last) for t in (x, y))
        if layout == "mixed":
            y = y.to(memory_format=torch.channels_last)
        if layout == "transposed":
            x, y = x.t(), y.t()
        if layout == "sliced":
            x, y = x[:, ::2], y[:, ::2]
        return x, y

    found = {
        "empty and tiny": [pair(0, 3), pair(1), pair(2, 2), pair(16385)],
        "channels-last": [pair(64, 32, 3, 3, layout="channels-last"), pair(8, 3, 7, 7, layout="channels-last")],
        "layouts that differ": [pair(64, 32, 3, 3, layout="mixed"), pair(64, 32, layout="transposed")],
        "with gaps": [pair(64, 32, layout="sliced"), pair(100, 100)],
        "not aligned": [tuple(t[1:] for t in pair(5001)), pair(4096)],  # type: ignore[list-item]
        "ten thousand layers": [pair(17) for _ in range(10_000)],
    }
    if device.type == "cuda":
        found["10⁸ elements"] = [pair(10**8)]
        found["10⁸ equal elements"] = [(torch.full((10**8,), 0.1, device=device),) * 2]
    return found


def check(device: torch.device) -> dict[str, Any]:
    worst: dict[str, Any] = {}
    for label, pairs in cases(device).items():
        for name, dtype in DTYPES.items():
            x, y = [p[0].to(dtype) for p in pairs], [p[1].to(dtype) for p in pairs]
            ours = dots({"xx": (x, x), "xy": (x, y), "yy": (y, y)})
            exact = eager.dots([x, y], [(0, 0), (0, 1), (1, 1)], [1] * len(x))
            scale = (exact[:, :1] * exact[:, 2:]).sqrt().clamp(min=1e-300)
            off = float(
                ((ours - exact).abs() / torch.cat([exact[:, :1], scale, exact[:, 2:]], 1).clamp(min=1e-300)).max()
            )
            a, b = (torch.rand(len(x), device=device, dtype=torch.float64) for _ in range(2))
            a[0], b[0] = 1.0, 0.0
            one, two = [t.clone() for t in x], [t.clone() for t in x]
            combine_(one, y, a, b)
            for i, t in enumerate(two):
                eager._exact_(t, y[i], a[i : i + 1], b[i : i + 1])
            ulp = torch.finfo(dtype).eps
            apart = max(
                (
                    float(((p - q).abs() / (q.abs() + 1)).max()) / ulp
                    for p, q in zip(one, two, strict=True)
                    if p.numel()
                ),
                default=0.0,
            )
            worst[f"{label}, {name}"] = {"dots_relative": off, "combine_ulp": apart}
            if not (off < 1e-12 and apart <= 4.0):
                sys.exit(f"{label}, {name}: dots off by {off}, combine_ by {apart} ulp; nothing is timed")
    worst["angles"] = angles(device)
    return worst


def angles(device: torch.device) -> dict[str, float]:
    """Relative error of the angle between float32 vectors, from their inner products alone."""
    out = {}
    for n in (1000, 10**6) + ((10**8,) if device.type == "cuda" else ()):
        for theta in (1e-4, 1e-2, 1.0):
            u, v = torch.randn(2, n, device=device, dtype=torch.float64)
            v -= (u @ v) / (u @ u) * u
            w = [u.float()]
            turned = [
                (torch.cos(torch.tensor(theta)) * u + torch.sin(torch.tensor(theta)) * v * u.norm() / v.norm()).float()
            ]
            truth = _angle(*(t[0].double() for t in (w, turned)))
            ww, wt, tt = dots({"ww": (w, w), "wt": (w, turned), "tt": (turned, turned)})[0]
            measured = torch.atan2((ww * tt - wt * wt).clamp(min=0).sqrt(), wt)
            out[f"{n} elements, {theta} rad"] = float((measured - truth).abs() / truth)
            if not out[f"{n} elements, {theta} rad"] < 1e-3:
                sys.exit(f"the angle {theta} at {n} elements is off by {out}; nothing is timed")
    return out


def _angle(u: Tensor, v: Tensor) -> Tensor:
    u, v = u / u.norm(), v / v.norm()
    return 2 * torch.atan2((u - v).norm(), (u + v).norm())


def time_sets(device: torch.device) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, shapes in SETS.items():
        w = [torch.randn(s, device=device) for s in shapes()]
        s = [torch.randn_like(t) for t in w]
        a = torch.full((len(w),), 0.999, dtype=torch.float64, device=device)
        b = torch.full((len(w),), 1e-3, dtype=torch.float64, device=device)
        steps = {
            "dots ww ws ss": lambda w=w, s=s: dots({"ww": (w, w), "ws": (w, s), "ss": (s, s)}),
            "combine_": lambda w=w, s=s, a=a, b=b: combine_(w, s, a, b),
            "torch foreach_norm": lambda w=w: torch._foreach_norm(w),
            "torch foreach_add_": lambda w=w, s=s: torch._foreach_add_(w, s, alpha=1e-6),
            "torch dot a layer": lambda w=w, s=s: [
                torch.dot(x.view(-1), y.view(-1)) for x, y in zip(w, s, strict=True)
            ],
        }
        out[name] = interleaved(steps, device, rounds=50 if device.type == "cuda" else 10, warmup=3, seconds=20)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default=None)
    given = parser.parse_args()
    device = torch.device(given.device)
    result = {
        "command": " ".join(["python", "benchmarks/vectors.py", *sys.argv[1:]]),
        "environment": environment(device),
        "backend": backend(device).__name__ + (" (interpreted)" if os.environ.get("TRITON_INTERPRET") else ""),
        "checked": check(device),
        "copy_bandwidth": copy_bandwidth(device),
        "timed": time_sets(device),
    }
    print(f"all {len(result['checked'])} checks passed; copy bandwidth {result['copy_bandwidth'] / 1e9:.0f} GB/s")
    for name, rows in result["timed"].items():
        for label, v in rows.items():
            print(f"{name:12} {label:20} {v['median_ms']:9.3f} ms [{v['low_ms']:.3f}, {v['high_ms']:.3f}]")
    write(given.out or Path(__file__).parent / "results" / f"vectors_{device.type}.json", result)


if __name__ == "__main__":
    main()
