"""Other tools that measure training, each attached the way its own documentation does it.

    pip install wandb tensorboard cockpit-for-pytorch 'setuptools<81' monitorch torchmortem
    python benchmarks/peers.py

An adapter takes a model, its optimizer, its loss module and a folder, and gives back whole training steps, since some
tools need to be inside them. A tool is imported by its adapter, which raises ImportError where it is missing. Run as a
program, this file says which tools are here and what a step of each costs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import networks


@dataclass(frozen=True)
class Attached:
    """Training with a tool in it.

    Attributes:
        step: one training step on inputs and labels, with everything the tool does in it.
        flush: wait until what the tool left to its own threads is done, as far as the tool lets one wait.
        close: end, and write what the tool writes at the end.
    """

    step: Callable[[Tensor, Tensor], None]
    flush: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None


Adapter = Callable[[nn.Module, Optimizer, nn.Module, Path], Attached]
After = Callable[[Tensor], None]


def training_step(model: nn.Module, optimizer: Optimizer, loss: nn.Module, after: After | None = None) -> Attached:
    """The loop without any tool; `after` is called with the loss when the optimizer has stepped."""

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        if after is not None:
            after(value)

    return Attached(step)


def bare(model: nn.Module, optimizer: Optimizer, loss: nn.Module, folder: Path) -> Attached:
    return training_step(model, optimizer, loss)


def wandb_watch(model: nn.Module, optimizer: Optimizer, loss: nn.Module, folder: Path) -> Attached:
    """Histograms of all weights and gradients at every step, offline; a row is complete when the loss is logged.

    `watch` writes to the one run that is open in the process, so there can be one of these at a time.
    """
    from wandb import init  # not `import wandb`, which a folder of runs called wandb would satisfy

    os.environ["WANDB_SILENT"] = "true"
    run = init(project="peers", mode="offline", dir=str(folder), reinit="finish_previous")
    run.watch(model, log="all", log_freq=1)
    loop = training_step(model, optimizer, loss, lambda value: run.log({"loss": value.item()}))
    return Attached(loop.step, close=run.finish)


def tensorboard_histograms(model: nn.Module, optimizer: Optimizer, loss: nn.Module, folder: Path) -> Attached:
    """Histograms of all weights and gradients at every step, as tutorials write them."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    count = 0

    def after(value: Tensor) -> None:
        nonlocal count
        count += 1
        writer.add_scalar("loss", value.item(), count)
        for name, p in model.named_parameters():
            writer.add_histogram(f"weights/{name}", p, count)
            writer.add_histogram(f"gradients/{name}", p.grad, count)

    return Attached(training_step(model, optimizer, loss, after).step, writer.flush, writer.close)


def cockpit_economy(
    model: nn.Module, optimizer: Optimizer, loss: nn.Module, folder: Path, *, alpha: bool = True
) -> Attached:
    """Cockpit's cheapest set, tracked at every step.

    Alpha, distance, gradient histogram and norm, update size, and the norm, inner-product and orthogonality tests.
    These need individual gradients, which BackPACK computes; it warns that under BatchNorm they mean little. For any
    optimizer but SGD without momentum Alpha keeps copies of them from one step to the next, which is most of the price:
    so there is a line without it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pkg_resources, which Cockpit imports, announces its own end
        from backpack import extend
        from cockpit import Cockpit
        from cockpit.quantities import Alpha
        from cockpit.utils.configuration import configuration
    model, mean_loss = extend(model), extend(loss)
    losses = nn.CrossEntropyLoss(reduction="none")
    quantities = [q for q in configuration("economy") if alpha or not isinstance(q, Alpha)]
    cockpit = Cockpit(model.parameters(), quantities=quantities)
    count = 0

    def step(x: Tensor, y: Tensor) -> None:
        nonlocal count
        optimizer.zero_grad()
        outputs = model(x)
        value = mean_loss(outputs, y)
        each = losses(outputs, y)
        info = {"batch_size": len(x), "individual_losses": each, "loss": value, "optimizer": optimizer}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # BackPACK, at each backward pass under BatchNorm
            with cockpit(count, info=info):
                value.backward(create_graph=cockpit.create_graph(count))
        optimizer.step()
        count += 1

    def close() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            cockpit.write(str(folder / "cockpit"))

    return Attached(step, close=close)


def monitorch_parameters(
    model: nn.Module, optimizer: Optimizer, loss: nn.Module, folder: Path, *, tick: int = 100
) -> Attached:
    """Its three lenses on parameters (norms, gradients, updates) and the loss, into TensorBoard.

    It measures at each step and is ticked at the end of an epoch, here of 100 steps, when it writes their mean and
    range; ticked at every step it writes every step.
    """
    from monitorch.inspector import PyTorchInspector
    from monitorch.lens import LossMetrics, ParameterGradientGeometry, ParameterNorm, ParameterUpdateGeometry
    from monitorch.visualizer import TensorBoardVisualizer

    on_parameters = [ParameterNorm(), ParameterGradientGeometry(), ParameterUpdateGeometry(optimizer)]
    visualizer = TensorBoardVisualizer(log_dir=str(folder))
    inspector = PyTorchInspector([LossMetrics(loss_fn=loss), *on_parameters], module=model, visualizer=visualizer)
    count = 0

    def after(value: Tensor) -> None:
        nonlocal count
        count += 1
        if count % tick == 0:
            inspector.tick_epoch()

    def close() -> None:
        inspector.detach()
        visualizer.writer.close()

    return Attached(training_step(model, optimizer, loss, after).step, visualizer.writer.flush, close)


def torchmortem_balanced(model: nn.Module, optimizer: Optimizer, loss: nn.Module, folder: Path) -> Attached:
    """Its default: gradients, weights, activations and the loss at each step, ranks and curvature at every 50th.

    The singular values for the ranks are computed at each step, though they are kept at every 50th only.
    """
    from torchmortem import Autopsy

    autopsy = Autopsy(model, optimizer=optimizer, sampling="balanced")
    autopsy.attach()
    loop = training_step(model, optimizer, loss, lambda value: autopsy.step(loss=value.item()))

    def close() -> None:
        autopsy.detach()
        autopsy.report(folder / "torchmortem.json")

    return Attached(loop.step, close=close)


def torchmortem_weights(model: nn.Module, optimizer: Optimizer, loss: nn.Module, folder: Path) -> Attached:
    """Its collectors of gradients, weights and the loss alone, at every step; nothing is written."""
    from torchmortem import SamplingConfig
    from torchmortem.collectors import GradientCollector, LossCollector, WeightCollector

    collectors = [GradientCollector(), WeightCollector(), LossCollector()]
    for collector in collectors:
        collector.attach(model, optimizer, SamplingConfig(default_interval=1))
    count = 0

    def after(value: Tensor) -> None:
        nonlocal count
        for collector in collectors:
            collector.on_step(count, loss=value.item())
        count += 1

    def close() -> None:
        for collector in collectors:
            collector.detach()

    return Attached(training_step(model, optimizer, loss, after).step, close=close)


_COCKPIT = ("cockpit-for-pytorch", "backpack-for-pytorch", "setuptools")

#: The adapters, and the distributions each needs.
PEERS: dict[str, tuple[Adapter, tuple[str, ...]]] = {
    "wandb.watch": (wandb_watch, ("wandb",)),
    "TensorBoard histograms": (tensorboard_histograms, ("tensorboard",)),
    "Cockpit economy": (cockpit_economy, _COCKPIT),
    "Cockpit economy, no alpha": (partial(cockpit_economy, alpha=False), _COCKPIT),
    "monitorch": (monitorch_parameters, ("monitorch", "tensorboard")),
    "monitorch, every step": (partial(monitorch_parameters, tick=1), ("monitorch", "tensorboard")),
    "torchmortem": (torchmortem_balanced, ("torchmortem",)),
    "torchmortem, weights": (torchmortem_weights, ("torchmortem",)),
}


def versions() -> dict[str, str | None]:
    """The versions of what the peers need; None for what is not installed."""
    found: dict[str, str | None] = {}
    for _, distributions in PEERS.values():
        for name in distributions:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = None
    return found


class Task(Protocol):
    """What a benchmark trains: a model on one batch. A tool that is attached to it takes the place of `step`."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    x: Tensor
    y: Tensor
    step: Callable[[], None]


def attachments(folder: str | Path) -> dict[str, Callable[[Task], Callable[[], None]]]:
    """Functions, one a peer, that attach it to a task and return how to close it."""

    def attach(peer: str, task: Task) -> Callable[[], None]:
        adapter, _ = PEERS[peer]
        own = Path(folder) / f"{task.name}-{peer.replace(' ', '-')}"
        own.mkdir(parents=True, exist_ok=True)
        attached = adapter(task.model, task.optimizer, nn.CrossEntropyLoss(), own)
        task.step = lambda: attached.step(task.x, task.y)
        return attached.close

    return {peer: partial(attach, peer) for peer in PEERS}


def show(name: str, make: Callable[[], nn.Module], x: Tensor, folder: Path, blocks: int, steps: int) -> None:
    """Print what a step costs alone and with each peer: blocks of steps taken in turn.

    What a tool leaves to its own threads and processes is waited for as far as it lets one, and counted; a pause
    between blocks keeps the rest from those who come next. CPU time is that of this process, all threads.
    """
    y = torch.randint(10, x.shape[:1])
    loops: dict[str, Attached] = {}
    for peer, (adapter, _) in {"bare": (bare, ()), **PEERS}.items():
        own = folder / peer.replace(" ", "-")
        own.mkdir(parents=True)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        try:
            loops[peer] = adapter(model, optimizer, nn.CrossEntropyLoss(), own)
        except ImportError as error:
            print(f"{name:4} {peer:26} missing: {error}")
    times: dict[str, list[float]] = {peer: [] for peer in loops}
    cpu: dict[str, list[float]] = {peer: [] for peer in loops}
    for block in range(blocks + 1):  # the first is a warm-up
        for peer, loop in loops.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                loop.step(x, y)
            loop.flush()
            if block:
                times[peer].append(1e3 * (time.perf_counter() - start) / steps)
                cpu[peer].append(1e3 * (time.process_time() - start_cpu) / steps)
            time.sleep(0.5)
    for loop in loops.values():
        loop.close()
    for peer in loops:
        over = statistics.median(times[peer]) / statistics.median(times["bare"])
        over_cpu = statistics.median(cpu[peer]) / statistics.median(cpu["bare"])
        print(
            f"{name:4} {peer:26} {statistics.median(times[peer]):9.2f} ms "
            f"[{min(times[peer]):.2f}, {max(times[peer]):.2f}], {over:.2f} × bare; "
            f"CPU {statistics.median(cpu[peer]):9.2f} ms, {over_cpu:.2f} ×",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="in a block")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tasks", nargs="*", default=["mlp", "cnn"], choices=["mlp", "cnn"])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    print(", ".join(f"{k} {v or 'missing'}" for k, v in {"torch": torch.__version__, **versions()}.items()))
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as folder:
        for name, make, shape in (("mlp", networks.mlp, (128, 784)), ("cnn", networks.cnn, (64, 3, 32, 32))):
            if name in given.tasks:
                show(name, make, torch.randn(shape), Path(folder) / name, given.blocks, given.steps)


if __name__ == "__main__":
    main()
