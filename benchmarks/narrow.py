"""3×3 convolutions of few channels: the kernels of `gyroscope_lab.engine.narrow` against cuDNN's.

    python benchmarks/narrow.py

Microseconds of the forward pass and of both gradients for batches of 128 images in bf16, channels last, each captured
as a CUDA graph of ten calls; cuDNN with the algorithms that it finds to be fastest. Contenders take turns. cuDNN's
times are without the cast of the weights to bf16, which the other kernels do on the fly. Every result is compared with
float64 first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from gyroscope_lab.engine.narrow import convolve, input_gradient, weight_gradient
from timing import environment, write

# Channels, outputs, height and width of the images.
SHAPES = ((3, 16, 32), (3, 32, 32), (16, 16, 32), (32, 32, 32), (32, 32, 16), (32, 64, 16), (64, 64, 16), (64, 64, 8))
IMAGES, CALLS = 128, 10


def captured(call: Callable[[], Any]) -> Callable[[], float]:
    """A function that replays ten calls and returns the microseconds per call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()

    def timed() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
        return 1e3 * start.elapsed_time(end) / CALLS

    return timed


def gradients(g: Tensor, x: Tensor, w: Tensor, which: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten.convolution_backward(g, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [*which, False])


def apart(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def measured(inputs: int, outputs: int, size: int, rounds: int) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(0)

    def rand(*shape: int) -> Tensor:
        values = torch.randn(*shape, device="cuda", generator=generator)
        return values.contiguous(memory_format=torch.channels_last)

    x, g = rand(IMAGES, inputs, size, size).bfloat16(), rand(IMAGES, outputs, size, size).bfloat16()
    w = rand(outputs, inputs, 3, 3) * (2 / (9 * inputs)) ** 0.5
    rounded = w.bfloat16()
    calls = {
        "forward": {"cudnn": lambda: F.conv2d(x, rounded, padding=1), "narrow": lambda: convolve(x, w, False)[0]},
        "weight gradient": {
            "cudnn": lambda: gradients(g, x, rounded, [False, True])[1],
            "narrow": lambda: weight_gradient(x, g),
        },
    }
    exact_input, exact_weight, _ = gradients(g.double(), x.double(), rounded.double(), [True, True])
    exact = {"forward": F.conv2d(x.double(), rounded.double(), padding=1), "weight gradient": exact_weight}
    if inputs > 3:  # images need no gradient
        calls["input gradient"] = {
            "cudnn": lambda: gradients(g, x, rounded, [True, False])[0],
            "narrow": lambda: input_gradient(g, w),
        }
        exact["input gradient"] = exact_input
    found: dict[str, Any] = {}
    for name, contenders in calls.items():
        far = {who: apart(call(), exact[name]) for who, call in contenders.items()}
        assert max(far.values()) < 0.01, (name, far)
        graphs = {who: captured(call) for who, call in contenders.items()}
        times: dict[str, list[float]] = {who: [] for who in graphs}
        for _ in range(rounds):
            for who, graph in graphs.items():
                times[who].append(graph())
        found[name] = {who: {"us": sorted(all_)[rounds // 2], "error": far[who]} for who, all_ in times.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    results: dict[str, Any] = {
        "environment": environment(torch.device("cuda")),
        "command": "python benchmarks/narrow.py",
        "images": IMAGES,
    }
    for inputs, outputs, size in SHAPES:
        name = f"{inputs} to {outputs} channels, {size}×{size}"
        results[name] = measured(inputs, outputs, size, options.rounds)
        shown = (f"{what} {one['cudnn']['us']:.1f} / {one['narrow']['us']:.1f}" for what, one in results[name].items())
        print(f"{name}, µs by cuDNN / narrow: {', '.join(shown)}", flush=True)
    write(options.out / "narrow_cuda.json", results)


if __name__ == "__main__":
    main()
