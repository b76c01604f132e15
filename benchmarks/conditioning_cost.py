"""What the conditioning of all layers costs, in gradients of the same batch, and beside other libraries.

    python benchmarks/conditioning_cost.py --device cpu
    python benchmarks/conditioning_cost.py --device cuda
    python benchmarks/conditioning_cost.py --device cpu --smoke    # tiny networks, seconds; writes only where told
    python benchmarks/conditioning_cost.py --device cpu --floor    # counts operations of both sizes; times nothing

The unit is one gradient: forward and backward pass of the mean loss, nothing measured. `condition, λmax` is
`gyroscope.condition` with `p=()`; `condition` the default, with λmax and κ_p; `condition, patches` the same with the
unfolded patches that K-FAC has for convolutions. That is what curvlinops and nngeometry compute, as far as they can be
imported and take the network; their eigenvalues come from `torch.linalg.eigvalsh`. Before anything is timed, all
eigenvalues of theirs are compared with ours on the batch that is timed, in one scale and in units of the largest.

`--floor` counts the operations of the covariances relative to those of the gradient, R·d·min(R, d) for R samples of
dimension d: half of a product, because it is symmetric. κ_p needs them, in float64; λmax alone does not.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.flop_counter import FlopCounterMode

import conditioning_peers
import gyroscope
import networks
from conditioning_peers import PEERS, Peer
from timing import environment, interleaved, write

Step = Callable[[], Any]
Timed = dict[str, float]
TOLERANCE = 1e-3  # of the largest eigenvalue: float32 passes through a hundred layers lie between


@dataclass(frozen=True)
class Size:
    """A network and its batch: images of the given shape, or token sequences where the shape has two numbers."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int


_CIFAR, _SMALL = (128, 3, 32, 32), (8, 3, 16, 16)
SIZES: dict[str, dict[str, Size]] = {
    "cuda": {
        "resnet18": Size(networks.resnet18, _CIFAR, 10),
        "resnet50": Size(networks.resnet50, (128, 3, 224, 224), 1000),
        "resnet110": Size(networks.resnet110, _CIFAR, 10),
        "transformer": Size(networks.Transformer, (64, 128), 4096),
    },
    "cpu": {
        "resnet18": Size(networks.resnet18, (32, 3, 32, 32), 10),
        "resnet50": Size(networks.resnet50, (8, 3, 128, 128), 1000),
        "resnet110": Size(networks.resnet110, (32, 3, 32, 32), 10),
        "transformer": Size(networks.Transformer, (4, 128), 4096),
    },
    "smoke": {
        "resnet18": Size(partial(networks.resnet18, 8), _SMALL, 10),
        "resnet50": Size(partial(networks.resnet50, 8), (4, 3, 32, 32), 1000),
        "resnet110": Size(partial(networks.resnet110, 2), _SMALL, 10),
        "transformer": Size(partial(networks.Transformer, 100, 16, 64, 2), (4, 16), 100),
    },
}


@dataclass(frozen=True)
class Task:
    """A network in training mode and the one batch it is looked at on."""

    model: nn.Module
    x: Tensor
    y: Tensor

    def gradient(self) -> None:
        self.model.zero_grad(set_to_none=True)
        cross_entropy(self.model(self.x), self.y).backward()

    def condition(self, **options: Any) -> Any:
        return gyroscope.condition(self.model, cross_entropy, (self.x, self.y), **options)

    def steps(self) -> dict[str, Step]:
        """What is timed of ours, the gradient first."""
        return {
            "gradient": self.gradient,
            "condition, λmax": partial(self.condition, p=()),
            "condition": self.condition,
            "condition, patches": partial(self.condition, patches=True),
        }

    def peer(self, peer: Peer) -> Step:
        return lambda: peer.spectra(self.model, self.x, self.y)


def task(size: Size, device: torch.device) -> Task:
    torch.manual_seed(0)
    model = size.make().to(device).train()
    if len(size.shape) == 2:
        return Task(model, *(words(size.shape, size.classes).to(device) for _ in range(2)))
    return Task(model, pictures(size.shape).to(device), torch.randint(size.classes, size.shape[:1], device=device))


def words(shape: tuple[int, ...], vocabulary: int) -> Tensor:
    """Tokens as frequent as Zipf's law has them in a text: the k-th one in proportion to 1/k.

    Of tokens that are all as frequent as each other, the largest eigenvalues would differ by chance alone.
    """
    frequencies = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    return torch.multinomial(frequencies, shape[0] * shape[1], replacement=True).reshape(shape)


def pictures(shape: tuple[int, ...]) -> Tensor:
    """Noise that is stronger the larger its patterns are, as in photographs, of mean 0 and variance 1."""
    images = torch.zeros(shape)
    for pattern in (1, 2, 4, 8, 16):
        coarse = torch.randn(*shape[:2], *(-(-side // pattern) for side in shape[2:]))
        images += pattern * interpolate(coarse, size=shape[2:], mode="bilinear", align_corners=False)
    return (images - images.mean()) / images.std()


def agreement(task: Task) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """How far any eigenvalue of a peer is from ours, in units of the largest of its factor; and who did not run, why.

    Passes take float32 here even where TF32 would be allowed, so that a disagreement is one of formulas. Peers get
    copies of the model: one that fails leaves its hooks behind.
    """
    found, missing = {}, {}
    with _float32():
        ours = task.condition(p=(), patches=True, spectra=True)
        rows = {row["layer"].removesuffix(".weight"): row["samples"] for row in ours.rows()}
        for name, peer in PEERS.items():
            try:
                theirs = peer.as_ours(copy.deepcopy(task.model), task.x, task.y, rows)
            except Exception as error:  # a peer that cannot take this network is a result
                missing[name] = f"{type(error).__name__}: {error}"
                continue
            worst = max(
                (_apart(getattr(ours.spectra[f"{layer}.weight"], factor), values), layer, factor)
                for layer, both in theirs.items()
                for factor, values in zip("xg", both, strict=True)
            )
            again = sum(values.dtype == torch.float64 for both in theirs.values() for values in both)
            found[name] = dict(zip(("largest", "layer", "factor"), worst, strict=True))
            found[name] |= {"layers": len(theirs), "repeated_in_float64": again}
            if not worst[0] < TOLERANCE:
                raise SystemExit(f"{name} and gyroscope disagree: {found[name]}; nothing is timed")
    return found, missing


@contextmanager
def _float32() -> Iterator[None]:
    """Convolutions without TF32, for a while."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _apart(ours: Any, theirs: Tensor) -> float:
    """max |λ − λ'| / λmax."""
    mine = torch.from_numpy(ours.full())
    return float((mine - theirs.cpu()).abs().max() / mine.max())


def in_turn(steps: dict[str, Step], device: torch.device, *, rounds: int, seconds: float) -> dict[str, Timed]:
    """Milliseconds of each and how many gradients that is, in as many rounds as fit into the seconds, at least two."""
    start = time.perf_counter()
    for step in steps.values():  # a warm-up, which also tells how long a round will take
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    fit = int(seconds / (2 * (time.perf_counter() - start)))
    timed = interleaved(steps, device, rounds=max(2, min(rounds, fit)), warmup=1 if fit > 2 else 0, seconds=seconds)
    unit = timed["gradient"]["median_ms"]
    for numbers in timed.values():
        numbers["gradients"] = numbers["median_ms"] / unit
        numbers["low"], numbers["high"] = numbers["low_ms"] / unit, numbers["high_ms"] / unit
    return timed


def memory(steps: dict[str, Step], model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Bytes that each takes above what it starts from, at most: allocated on CUDA, resident on a CPU."""
    peak = _peak_allocated if device.type == "cuda" else _peak_resident
    found: dict[str, Any] = {}
    for name, step in steps.items():
        model.zero_grad(set_to_none=True)
        gc.collect()
        try:
            found[name] = {"peak_above": peak(step)}
        except OSError as error:
            return {"skipped": f"peak memory cannot be read here: {error}"}
    for numbers in found.values():
        numbers["gradients"] = numbers["peak_above"] / found["gradient"]["peak_above"]
    return found


def _peak_allocated(step: Step) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - start


def _peak_resident(step: Step) -> int:
    """Linux keeps the peak of a process and lets it be reset; freed memory goes back before, or it would be reused."""
    status = Path("/proc/self/status")

    def kilobytes(field: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field))

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    start = kilobytes("VmRSS:")
    step()
    return 1024 * max(0, kilobytes("VmHWM:") - start)


def measure(size: Size, device: torch.device, *, rounds: int, seconds: float, peers: bool) -> dict[str, Any]:
    ready = task(size, device)
    agreed, missing = agreement(ready) if peers else ({}, {})
    ours, theirs = ready.steps(), {name: ready.peer(PEERS[name]) for name in agreed}
    result: dict[str, Any] = {
        "batch": "×".join(map(str, size.shape)),
        "parameters": sum(p.numel() for p in ready.model.parameters()),
        "layers": len(conditioning_peers.layers(ready.model)),
        "agreement": agreed,
        "missing": missing,
    }
    # Other libraries by themselves, beside gradients of their own: they are so slow that few rounds would be left.
    timed = in_turn(ours, device, rounds=rounds, seconds=seconds)
    if theirs:
        beside = in_turn({"gradient": ready.gradient, **theirs}, device, rounds=rounds, seconds=seconds)
        result["gradient_beside_peers"] = beside.pop("gradient")
        timed |= beside
    return result | {"contenders": timed, "memory": memory(ours | theirs, ready.model, device)}


def floor(size: Size) -> dict[str, float]:
    """Operations of a gradient, and those of all covariances relative to them; nothing is computed."""
    with torch.device("meta"):
        model = size.make()
        tokens = len(size.shape) == 2
        x = torch.zeros(size.shape, dtype=torch.int64) if tokens else torch.zeros(size.shape)
        y = torch.zeros(size.shape if tokens else size.shape[:1], dtype=torch.int64)
    covariances = 0

    def count(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal covariances
        for a in (args[0], output):
            if a.is_floating_point():  # tokens are one-hot: their covariance is diagonal
                d = a.shape[1 if isinstance(module, nn.Conv2d) else -1]
                covariances += a.numel() * min(a.numel() // d, d)

    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Embedding)):
            module.register_forward_hook(count)
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(x), y).backward()
    gradient = counter.get_total_flops()
    return {"gradient_flops": gradient, "covariances": covariances / gradient}


def _show(name: str, found: dict[str, Any]) -> None:
    for contender, t in found["contenders"].items():
        held = found["memory"].get(contender)
        bytes_ = "" if held is None else f"{held['peak_above'] / 2**20:9.1f} MiB {held['gradients']:6.2f} ×"
        print(
            f"{name:12} {contender:20} {t['median_ms']:10.2f} ms {t['gradients']:8.2f} gradients "
            f"[{t['low']:.2f}, {t['high']:.2f}], n = {t['n']:<3} {bytes_}"
        )
    for peer, far in found["agreement"].items():
        again = f"; {far['repeated_in_float64']} factors needed float64" if far["repeated_in_float64"] else ""
        print(f"{name:12} {peer:20} agrees to {far['largest']:.1e} of λmax in {far['layers']} layers{again}")
    for peer, why in found["missing"].items():
        print(f"{name:12} {peer:20} left out: {why[:100]}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--networks", nargs="*", choices=list(SIZES["cuda"]), default=list(SIZES["cuda"]))
    parser.add_argument("--rounds", type=int, default=30, help="at most so many")
    parser.add_argument("--seconds", type=float, default=60.0, help="for ours, and again for the peers, of one network")
    parser.add_argument("--smoke", action="store_true", help="tiny networks and two rounds; writes to --out alone")
    parser.add_argument("--ours", action="store_true", help="leave out other libraries")
    parser.add_argument("--floor", action="store_true", help="count operations only; writes conditioning_floor.json")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.floor:
        counted = {
            device: {name: floor(SIZES[device][name]) for name in options.networks} for device in ("cuda", "cpu")
        }
        write(
            options.out or Path(__file__).parent / "results" / "conditioning_floor.json",
            {"command": " ".join(["python", *sys.argv]), **counted},
        )
        for device, networks_ in counted.items():
            print(device, {name: round(one["covariances"], 3) for name, one in networks_.items()})
        return
    device = torch.device(options.device)
    sizes = SIZES["smoke" if options.smoke else device.type]
    rounds, seconds = (2, 1.0) if options.smoke else (options.rounds, options.seconds)
    if options.smoke:
        torch.set_num_threads(1)  # networks so small gain nothing from more, and lose much on a busy machine
    about = {"peers": conditioning_peers.versions(), "tf32_convolutions": torch.backends.cudnn.allow_tf32}
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(device) | about,
        "networks": {},
    }
    standard = Path(__file__).parent / "results" / f"conditioning_cost_{device.type}{'_ours' * options.ours}.json"
    out = options.out or (None if options.smoke else standard)
    for name in options.networks:
        found = result["networks"][name] = measure(
            sizes[name], device, rounds=rounds, seconds=seconds, peers=not options.ours
        )
        _show(name, found)
        if out is not None:
            write(out, result)


if __name__ == "__main__":
    main()
