"""What Layca adds to a step of torch's Muon, on the 48 hidden matrices of GPT-2 124M.

    python benchmarks/muon.py --device cpu
    python benchmarks/muon.py --device cuda

Before anything is timed, two steps of Layca over Muon are compared with the four literal operations in float64, on the
displacements that torch's Muon proposes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from gyroscope import Layca
from parameter_sets import SETS
from step_cost import RATE, STILL, Make, parameters
from timing import environment, interleaved, write

NAME = "gpt2-124m"
HIDDEN = slice(2, None)
#: The largest time of Layca over Muon, in steps of Muon.
TARGET = 1.1

CONTENDERS: dict[str, Make] = {
    "torch muon": lambda p: torch.optim.Muon(p, lr=STILL, weight_decay=0.0),
    "layca muon": lambda p: Layca(torch.optim.Muon(p, lr=RATE, weight_decay=0.0)),
}


def error(device: torch.device) -> float:
    """The largest error of two steps of twelve matrices, relative to the largest weight of each."""
    params = parameters(NAME, device)[HIDDEN][:12]
    ours = CONTENDERS["layca muon"](params)
    exact = [p.detach().double() for p in params]
    norms = [w.norm() for w in exact]
    # Muon does not read the weights: from zero it goes to the displacement.
    proposed = [torch.nn.Parameter(torch.zeros_like(p)) for p in params]
    muon = torch.optim.Muon(proposed, lr=1.0, weight_decay=0.0)
    for _ in range(2):
        for p, s in zip(params, proposed, strict=True):
            s.grad = p.grad
            s.detach().zero_()
        muon.step()
        ours.step()
        for w, proposal, norm in zip(exact, proposed, norms, strict=True):
            s = proposal.detach().double()
            s = s - (s * w).sum() / (w * w).sum() * w
            new = w + RATE * s * w.norm() / s.norm()
            w.copy_(new * norm / new.norm())
    return max(float((p.detach() - w).abs().max() / w.abs().max()) for p, w in zip(params, exact, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=120.0, help="stop after this long")
    parser.add_argument("--out", default=None, help="JSON file; default benchmarks/results/muon_DEVICE.json")
    given = parser.parse_args()
    device = torch.device(given.device)
    off = error(device)
    if not off < 1e-6:
        sys.exit(f"Layca over Muon is off by {off}: nothing is timed")
    params = parameters(NAME, device)[HIDDEN]
    steps = {label: make(params).step for label, make in CONTENDERS.items()}
    times = interleaved(steps, device, rounds=given.rounds, warmup=1, seconds=given.seconds)
    ratio = times["layca muon"]["median_ms"] / times["torch muon"]["median_ms"]
    for label, one in times.items():
        print(f"{label:12} {one['median_ms']:9.3f} ms  [{one['low_ms']:.3f}, {one['high_ms']:.3f}]")
    print(f"Layca over Muon takes {ratio:.3f} steps of Muon; at most {TARGET} is the target")
    result = {
        "command": " ".join(["python", "benchmarks/muon.py", *sys.argv[1:]]),
        "environment": environment(device),
        "matrices": len(SETS[NAME]()[HIDDEN]),
        "error": off,
        "eager": times,
        "ratio": ratio,
        "target": TARGET,
    }
    write(given.out or Path(__file__).parent / "results" / f"muon_{device.type}.json", result)


if __name__ == "__main__":
    main()
