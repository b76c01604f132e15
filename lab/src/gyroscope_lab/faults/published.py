"""Faults that others have published: the silent training errors that TrainCheck reproduced from bug reports.

Jiang et al. (OSDI 2025, "Training with Confidence") reproduce 20 reports and find six more. Those whose program trains,
and that a CPU can show, are written here from their root causes: small trainings of the same kind, each with a twin in
which the bug is fixed. The kinds of finding that answer a report were written down before any was diagnosed; a report
that no kind answers has none.

Not here: DeepSpeed 5794, 6714 and 6089 (the job hangs), 6770 (it stops with an error), 6772 (a model is placed on the
wrong GPU), 5489 and Transformers 29903 (a checkpoint file is incomplete), Transformers 23723 (generation, no training).
"""

from __future__ import annotations

import json
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

import gyroscope
from gyroscope.errors import GyroscopeError, MonitorError
from gyroscope_lab.faults.benchmark import Alarms, diagnosed
from gyroscope_lab.faults.injections import Scene, accuracy, scene, train
from gyroscope_lab.faults.networks import NETWORKS, Attention, Batch


@dataclass(frozen=True)
class Report:
    """A published bug report as a small training.

    Attributes:
        name: the project or forum, and the number of the report.
        wrong: the root cause, in one line.
        network: the network it is put into.
        prepare: changes a scene; with the bug if told so, else as the fix of the report does.
        accepted: the kinds of finding that answer it, its consequences included; empty where no kind does.
        inside: whether the bug changes the training; otherwise only what happens before or around it.
        ranks: the number of processes that train.
    """

    name: str
    wrong: str
    network: str
    prepare: Callable[[Scene, bool], None]
    accepted: frozenset[str]
    inside: bool = True
    ranks: int = 1


REPORTS: dict[str, Report] = {}
Prepare = Callable[[Scene, bool], None]


def _report(
    name: str, wrong: str, network: str, *accepted: str, inside: bool = True, ranks: int = 1
) -> Callable[[Prepare], Prepare]:
    def register(prepare: Prepare) -> Prepare:
        REPORTS[name] = Report(name, wrong, network, prepare, frozenset(accepted), inside, ranks)
        return prepare

    return register


# The optimizer and what it holds


@_report(
    "PyTorch forum 84911",
    "all weights but the normalizers' are frozen, and the optimizer holds only the head, which is frozen too",
    "cnn", "frozen", "not_in_optimizer", "no_gradient", "too_slow", "at_chance",
)  # fmt: skip
def _nothing_trains(it: Scene, faulty: bool) -> None:
    if not faulty:
        return
    for module in it.model.modules():
        if not isinstance(module, nn.BatchNorm2d):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
    head = it.module(it.names[-1])
    it.build = lambda model: it.network.optimizer(head.parameters())


@_report(
    "StackOverflow 60335387", "gradients are never cleared", "cnn", "gradients_accumulate", "too_fast", "not_finite"
)
def _not_cleared(it: Scene, faulty: bool) -> None:
    it.clears = not faulty


class _Unguarded(torch.optim.Adam):
    """Adam that does nothing any more once it was called without gradients, like a step compiled for that case."""

    empty = False

    def step(self, closure: Any = None) -> Any:
        """Take a step, unless there ever was one without gradients."""
        self.empty = self.empty or all(p.grad is None for group in self.param_groups for p in group["params"])
        return None if self.empty else super().step(closure)


@_report(
    "PyTorch 115607",
    "after a step without gradients, the compiled optimizer keeps the code of that step, which does nothing",
    "cnn", "too_slow", "slow_layer", "stalled",
)  # fmt: skip
def _unguarded(it: Scene, faulty: bool) -> None:
    def drop(step: int) -> None:
        if step == it.network.steps // 10:
            it.model.zero_grad(set_to_none=True)

    it.after_backward.append(drop)
    kind = _Unguarded if faulty else torch.optim.Adam
    it.build = lambda model: kind(model.parameters(), lr=2e-3)


@_report(
    "Accelerate 2665",
    "the optimizer is made before FSDP replaces the parameters by flat ones",
    "transformer", "replaced", ranks=2,
)  # fmt: skip
def _flattened(it: Scene, faulty: bool) -> None:
    def wrap() -> None:
        it.model = FullyShardedDataParallel(it.model, use_orig_params=False, device_id=torch.device("cpu"))

    it.clip = None
    if faulty:
        it.after_build.append(wrap)
    else:
        wrap()


@_report(
    "Accelerate 2665, FSDP2",
    "the optimizer is made before FSDP2 replaces the parameters by sharded ones",
    "transformer", "replaced", ranks=2,
)  # fmt: skip
def _sharded(it: Scene, faulty: bool) -> None:
    it.clip = None
    if faulty:
        it.after_build.append(lambda: _shard(it.model))
    else:
        _shard(it.model)


def _shard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Attention):
            fully_shard(module)
    fully_shard(model)


# Ranks that should agree


@_report(
    "PyTorch 104336",
    "parameters are moved away and back after DDP was made, so its hooks are gone and gradients are not averaged",
    "cnn", "ranks_differ", ranks=2,
)  # fmt: skip
def _moved(it: Scene, faulty: bool) -> None:
    wrapped = DistributedDataParallel(it.model)
    it.forward = wrapped
    if faulty:  # to another type and back: on a CPU, what another device is on a GPU
        wrapped.double().float()


@_report(
    "X, jxmnop (DDP out of sync)",
    "the forward pass sometimes calls the model, sometimes its DDP wrapper",
    "transformer", "ranks_differ", ranks=2,
)  # fmt: skip
def _sometimes(it: Scene, faulty: bool) -> None:
    wrapped = DistributedDataParallel(it.model)
    it.forward = wrapped

    def choose(step: int) -> None:
        it.forward = it.model if step % 2 else wrapped

    if faulty:
        it.before_forward.append(choose)


@_report(
    "DeepSpeed 1801",
    "gradients of replicated normalizers are clipped on the first rank alone, so the ranks' normalizers drift apart",
    "transformer", "ranks_differ", ranks=2,
)  # fmt: skip
def _clipped_on_one_rank(it: Scene, faulty: bool) -> None:
    it.forward, it.clip = DistributedDataParallel(it.model), None
    norms = {id(p) for m in it.model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}

    def clip(step: int) -> None:
        grads = [p.grad for p in it.model.parameters() if p.grad is not None]
        factor = (0.1 / (torch.nn.utils.get_total_norm(grads) + 1e-6)).clamp(max=1.0)
        for parameter in it.model.parameters():
            if parameter.grad is not None and not (faulty and dist.get_rank() and id(parameter) in norms):
                parameter.grad.mul_(factor)

    it.after_backward.append(clip)


@_report(
    "PyTorch 84803, 96600, Baichuan2 86",
    "one transfer in a hundred between two GPUs arrives as zeros",
    "transformer", "ranks_differ", ranks=2,
)  # fmt: skip
def _lost(it: Scene, faulty: bool) -> None:
    it.forward = DistributedDataParallel(it.model)
    chance = torch.Generator().manual_seed(10 * it.seed + dist.get_rank())

    def lost() -> bool:
        return faulty and float(torch.rand(1, generator=chance)) < 0.01

    def receive(step: int) -> None:  # the averaged gradients, which are sent in one piece
        if lost():
            for parameter in it.model.parameters():
                parameter.grad = torch.zeros_like(parameter)

    it.after_backward.append(receive)
    batches = it.batches
    it.batches = ((torch.zeros_like(x) if lost() else x, y) for x, y in batches)


# Data and the loop


@_report(
    "StackOverflow 67180955",
    "the workers of the data loader share their random numbers, so they all augment their batches alike",
    "cnn", "repeated_batch",
)  # fmt: skip
def _alike(it: Scene, faulty: bool) -> None:
    workers = [torch.Generator().manual_seed(it.seed + (0 if faulty else 100 * i)) for i in range(4)]
    batches = it.batches

    def augmented() -> Iterator[Batch]:
        for i, (x, y) in enumerate(batches):
            generator = workers[i % len(workers)]
            down, right = (int(n) for n in torch.randint(-1, 2, (2,), generator=generator))
            noise = torch.randn(x.shape, generator=generator)
            yield x.roll((down, right), (2, 3)) + 0.1 * noise, y

    it.batches = augmented()


@_report(
    "Transformers 34204",
    "the processor of images and text returns one example per batch instead of all",
    "vit", "too_fast", "not_finite", "dead_units", "at_chance",
)  # fmt: skip
def _one_example(it: Scene, faulty: bool) -> None:
    batches = it.batches
    if faulty:
        it.batches = ((x[:1], y[:1]) for x, y in batches)


@_report("Transformers 33455", "the number of steps is computed wrongly, and the training ends early", "transformer")
def _ends_early(it: Scene, faulty: bool) -> None:
    steps = it.network.steps
    it.scale_rate(lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    if faulty:
        it.network = replace(it.network, steps=steps // 3)


@_report(
    "MMPretrain 702",
    "stages that were to be frozen are trained, because freezing happens in train(), which is not called",
    "cnn",
)  # fmt: skip
def _not_frozen(it: Scene, faulty: bool) -> None:
    assert isinstance(it.model, nn.Sequential)
    if not faulty:
        it.model[:6].eval().requires_grad_(False)


@_report("Lightning Thunder 725", "autocast is not applied to linear layers, which compute in float32", "transformer")
def _not_cast(it: Scene, faulty: bool) -> None:
    bare = it.model
    if faulty:
        for module in bare.modules():
            if isinstance(module, nn.Linear):
                module.forward = _in_float32(module)  # type: ignore[assignment, method-assign]

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = bare(x)
        return out.float()

    it.forward = forward


def _in_float32(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), module.weight, module.bias)

    return forward


# Before the training, or around it


@_report(
    "PyTorch 51800",
    "a network with spectral normalization is evaluated before its first forward pass in training mode",
    "mlp-4", inside=False,
)  # fmt: skip
def _evaluated_first(it: Scene, faulty: bool) -> None:
    for module in it.model.modules():
        if isinstance(module, nn.Linear):
            nn.utils.spectral_norm(module)
    it.names = [layer.name for layer in gyroscope.layers(it.model)]
    x, _ = it.network.tested()
    with torch.no_grad():
        if not faulty:
            it.model(x)
        it.model.eval()(x)
    it.model.train()


@_report("Transformers 33844", "dropout of attention stays on in evaluation mode", "transformer", inside=False)
def _always_drops(it: Scene, faulty: bool) -> None:
    def drop(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (F.dropout(inputs[0], 0.1, training=faulty or module.training),)

    for module in it.model.modules():
        if isinstance(module, Attention):
            module.out.register_forward_pre_hook(drop)


@_report("Transformers 17877", "weights are initialized again and again, which takes time", "transformer", inside=False)
def _initialized_again(it: Scene, faulty: bool) -> None:
    generator = torch.Generator().manual_seed(it.seed)
    blocks = sum(isinstance(m, Attention) for m in it.model.modules())
    for _ in range(4 if faulty else 1):
        for name, module in it.model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                last = name.endswith((".out", ".down"))  # of a residual branch
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * blocks) if last else 0.02, generator=generator)


# Diagnosis


@dataclass(frozen=True)
class Verdict:
    """The diagnosis of one training.

    Attributes:
        report: the name of the report.
        faulty: whether the bug was in it; False for its twin.
        seed: the seed of weights and batches.
        accuracy: the share of right answers on examples that were not trained on.
        alarms: the alarms from a run with its loss.
        alarms_default: the same, without the loss.
        notes: the kinds of the notes.
        refused: the error of `watch`, if it refused the objects. One that says that no optimizer holds a layer counts
            as an alarm of the kind "replaced", as in the benchmark.
    """

    report: str
    faulty: bool
    seed: int
    accuracy: float
    alarms: Alarms = ()
    alarms_default: Alarms = ()
    notes: tuple[str, ...] = ()
    refused: str | None = None


def verdict(name: str, seed: int, *, faulty: bool, steps: int | None = None) -> Verdict:
    """Train a report or its twin under `watch`, and diagnose the run.

    Args:
        name: the name of the report.
        seed: the seed of weights and batches.
        faulty: whether the bug is in it.
        steps: how long to train; by default as long as the network's recipe says.
    """
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = (name, seed, faulty, steps, place)
        if REPORTS[name].ranks == 1:
            _train(0, *args)
        else:
            torch.multiprocessing.spawn(_train, args=args, nprocs=REPORTS[name].ranks)  # type: ignore[attr-defined, no-untyped-call]
        right, refused, replaced = json.loads((Path(place) / "told").read_text())
        if refused is not None:
            alarms: Alarms = (("replaced", (), None),) if replaced else ()
            return Verdict(name, faulty, seed, right, alarms, alarms, refused=refused)
        return Verdict(name, faulty, seed, right, *diagnosed(Path(place) / "run"))


def _train(rank: int, name: str, seed: int, faulty: bool, steps: int | None, place: str) -> None:
    """Train on one rank, and leave its accuracy and what `watch` refused in a file."""
    torch.set_num_threads(1)
    report = REPORTS[name]
    if report.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{place}/group", rank=rank, world_size=report.ranks)
    it = prepared(name, seed, faulty=faulty, steps=steps, rank=rank)
    refused, replaced = None, False
    try:
        monitor = gyroscope.watch(it.model, it.optimizers, Path(place) / "run")
    except GyroscopeError as error:
        refused, replaced = str(error), isinstance(error, MonitorError)
        train(it)
    else:
        with monitor:
            train(it, each=lambda step, value: monitor.log(loss=value))
    right = accuracy(it)
    if rank == 0:
        (Path(place) / "told").write_text(json.dumps([right, refused, replaced]))
    if report.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def prepared(name: str, seed: int, *, faulty: bool, steps: int | None = None, rank: int = 0) -> Scene:
    """Return the scene of a report, with its optimizers; one on several ranks needs a process group."""
    report = REPORTS[name]
    network = NETWORKS[report.network]
    it = scene(network if steps is None else replace(network, steps=steps), seed)
    it.batches = it.network.batches(seed + 1000 * rank)
    report.prepare(it, faulty)
    it.begin()
    torch.manual_seed(seed)
    return it


def to_json(one: Verdict) -> str:
    """Return a verdict as a line of JSON."""
    return json.dumps(asdict(one), ensure_ascii=False) + "\n"
