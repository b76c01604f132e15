"""What watching a fine-tuning costs in time and memory: all weights, all weights within a limit, and adapters alone.

    python benchmarks/fine_tuning.py --device cpu --size 110m
    python benchmarks/fine_tuning.py --device cuda --size 7b
    python benchmarks/fine_tuning.py --size 7b --adapters --batch 1 --length 16   # 16 GiB of memory are enough

The model is a decoder as Llama's, randomly initialized, in bfloat16, under AdamW. Every contender trains in a process
of its own, so that the peak of its memory is its own, on the same batches and from the same weights. Watched ones
measure every step. "all weights, limited" holds w₀ within a tenth of its size; its rotations are compared with those of
"all weights", which holds all of it: on a CPU both trainings are the same to the last bit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import gyroscope
from timing import environment, summary, write


@dataclass(frozen=True)
class Size:
    """The sizes of a model, and the batch that it trains on."""

    width: int
    hidden: int
    depth: int
    heads: int
    words: int
    batch: int
    length: int


SIZES = {
    "5m": Size(256, 768, 2, 4, 4000, 1, 16),
    "110m": Size(768, 2048, 12, 12, 16000, 1, 64),
    "340m": Size(1024, 2816, 24, 16, 16000, 1, 64),
    "1b": Size(2048, 5632, 22, 16, 32000, 1, 32),
    "7b": Size(4096, 11008, 32, 32, 32000, 4, 1024),
}
RANK = 16
# The share of w₀ that the limited contender may hold.
SHARE = 0.1


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(size.width, size.width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.before, self.attention = nn.RMSNorm(size.width), Attention(size)
        self.between = nn.RMSNorm(size.width)
        self.gate_proj, self.up_proj = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        y = self.between(x)
        return x + self.down_proj(silu(self.gate_proj(y)) * self.up_proj(y))


class Decoder(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.words, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, size.words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Adapted(nn.Module):
    """A frozen layer under a low-rank adapter, built as those of peft are."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.scaling, self.active_adapters = base, {"default": 2.0}, ["default"]
        about: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, RANK, **about)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, base.out_features, **about)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


def made(size: Size, device: torch.device, adapters: bool) -> nn.Module:
    """A model in bfloat16, with random weights of 0.02, made where it trains."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # made in float32 first, 7 billion parameters would take 28 GB
    with torch.device(device):
        model = Decoder(size)
        for layer in gyroscope.layers(model):
            nn.init.normal_(layer.parameter, std=0.02)
        if adapters:
            model.requires_grad_(False)
            for block in model.blocks:
                for name in ("q_proj", "v_proj"):
                    setattr(block.attention, name, Adapted(getattr(block.attention, name)))
    torch.set_default_dtype(torch.float32)
    return model


CONTENDERS: dict[str, dict[str, Any]] = {
    "all weights, bare": {},
    "all weights": {"watch": {}},
    "all weights, limited": {"watch": {"limited": True}},
    "all weights, limited, no alignment": {"watch": {"limited": True, "quantities": True}},
    "adapters, bare": {"adapters": True},
    "adapters": {"adapters": True, "watch": {}},
}


def contend(name: str, size: Size, kind: str, steps: int, answer: Any) -> None:
    """Train one contender, and answer with what it took."""
    device, options = torch.device(kind), CONTENDERS[name]
    model = made(size, device, options.get("adapters", False))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
    whole = sum(layer.parameter.numel() * 2 for layer in gyroscope.layers(model) if layer.parameter.requires_grad)
    monitor, attached = None, 0.0
    with tempfile.TemporaryDirectory() as folder:
        if "watch" in options:
            given: dict[str, Any] = {"budget": None, "activations": False, "detail_every": steps, "diagnose": False}
            if options["watch"].get("limited"):
                given["reference_memory"] = int(SHARE * whole)
            if options["watch"].get("quantities"):
                given["quantities"] = [n for n in gyroscope.monitor.known() if n != "alignment"]
            start = time.perf_counter()
            monitor = gyroscope.watch(model, optimizer, Path(folder) / "run", **given)
            attached = time.perf_counter() - start
        times = [_step(model, optimizer, size, device, seed) for seed in range(steps)]
        found: dict[str, Any] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "trained": sum(p.numel() for p in trained),
            "w0_bytes": whole,
            "step": summary(times[2:]),
        }
        if monitor is not None:
            cost = monitor.cost()
            found["watch"] = {
                "attach_seconds": attached, "seconds": cost.seconds, "held": cost.held, "bytes": cost.bytes,
                "reference_bytes": cost.reference_bytes, "sampled_share": cost.sampled_share,
            }  # fmt: skip
            monitor.close()
            if monitor.error is not None:
                raise monitor.error
            with gyroscope.load(Path(folder) / "run") as run:
                found["watch"] |= {
                    "rotation": dict(zip(run.layers, map(float, run.series("rotation")[-1]), strict=True)),
                    "sample": run.meta.get("reference_sample"),
                }
                if "merged_rotation" in run.quantities:
                    merged = run.series("merged_rotation")
                    found["watch"]["merged"] = {"layers": int(np.isfinite(merged).any(0).sum()),
                                                "largest": float(np.nanmax(merged))}  # fmt: skip
    found["peak_bytes"] = (
        torch.cuda.max_memory_allocated(device)
        if device.type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    answer.put(found)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, size: Size, device: torch.device, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(size.words, (size.batch, size.length + 1), generator=generator).to(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = cross_entropy(model(words[:, :-1]).flatten(0, 1).float(), words[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def errors(whole: dict[str, Any], limited: dict[str, Any]) -> dict[str, Any]:
    """How far the rotations of samples are from those of whole layers, in standard errors."""
    stated = limited["sample"]["error"]
    found = []
    for name, error in stated.items():
        d = whole["rotation"][name]
        found.append((limited["rotation"][name] - d) / (d * (2 - d) * error))
    relative = [abs(limited["rotation"][name] / whole["rotation"][name] - 1) for name in stated]
    return {
        "layers": len(found),
        "largest": max(map(abs, found)),
        "largest_in": list(stated)[int(np.argmax(np.abs(found)))],
        "root_mean_square": float(np.sqrt(np.mean(np.square(found)))),
        "largest_relative": max(relative),
        "elements": sorted(set(limited["sample"]["elements"].values())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="110m", choices=list(SIZES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, help="another number of sequences")
    parser.add_argument("--length", type=int, help="another length of the sequences")
    parser.add_argument("--adapters", action="store_true", help="the contenders with adapters alone")
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    device, size = torch.device(arguments.device), SIZES[arguments.size]
    size = replace(size, batch=arguments.batch or size.batch, length=arguments.length or size.length)
    result: dict[str, Any] = {
        "environment": environment(device),
        "command": "python benchmarks/fine_tuning.py " + " ".join(sys.argv[1:]),
        "size": {"name": arguments.size, **vars(size)},
        "contenders": {},
    }
    context = multiprocessing.get_context("spawn")
    for name in CONTENDERS:
        if arguments.adapters and not name.startswith("adapters"):
            continue
        answer = context.SimpleQueue()
        process = context.Process(target=contend, args=(name, size, device.type, arguments.steps, answer))
        process.start()
        process.join()
        if process.exitcode != 0 or answer.empty():
            sys.exit(f"{name} has failed with exit code {process.exitcode}")
        found = result["contenders"][name] = answer.get()
        held = found.get("watch", {}).get("held", "")
        print(f"{name:36} {found['step']['median_ms']:9.1f} ms  peak {found['peak_bytes'] / 2**30:6.2f} GiB  {held}")
    watched = {name: one["watch"] for name, one in result["contenders"].items() if "watch" in one}
    if device.type == "cpu" and not arguments.adapters:
        result["sample"] = errors(watched["all weights"], watched["all weights, limited"])
        print(result["sample"])
    for one in watched.values():  # they are compared above, and long
        del one["rotation"]
        if one["sample"]:
            one["sample"] = {"layers": len(one["sample"]["error"]), "error": max(one["sample"]["error"].values())}
    here = Path(__file__).parent / "results" / f"fine_tuning_{arguments.size}_{device.type}.json"
    write(arguments.out or here, result)


if __name__ == "__main__":
    main()
