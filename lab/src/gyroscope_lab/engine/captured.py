"""Training steps as CUDA graphs: the host launches a step with one call, however many kernels it has.

Optimizers that a graph cannot capture, because they wait for the device or count steps on the host, step after a graph
that computes the gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gyroscope_lab.data.split import Split
from gyroscope_lab.errors import LabError
from gyroscope_lab.models.residual import BasicBlock, PreactBlock
from gyroscope_lab.training import checkpoint
from gyroscope_lab.training.training import Training
from gyroscope_lab.training.trial import Trial

# Eager steps of each batch size before its graph is captured: libraries choose their algorithms and optimizers create
# their state in the first ones.
_BEFORE = 3
# The most kinds of block to compile: five for every architecture and precision, and a population has many of these.
# torch's default is eight per process, and further blocks would run uncompiled.
_KINDS = 256


def compile_blocks(model: nn.Module) -> bool:
    """Compile the residual blocks of a model in place; return whether it has any.

    Blocks of the same kind share their compiled code, so a network of 1202 layers compiles as fast as one of 20.

    >>> from gyroscope_lab import models
    >>> compile_blocks(models.make("digits-cnn", seed=0))
    False
    """
    blocks = [module for module in model.modules() if isinstance(module, BasicBlock | PreactBlock)]
    for block in blocks:
        block.compile(dynamic=False)
    return bool(blocks)


def many_kinds() -> AbstractContextManager[Any]:
    """Allow many kinds of block to be compiled within this context."""
    # The names of torch 2.6, which later versions accept too.
    limits: AbstractContextManager[Any] = torch._dynamo.config.patch(
        cache_size_limit=_KINDS, accumulated_cache_size_limit=_KINDS
    )
    return limits


@contextmanager
def _compiling() -> Iterator[None]:
    """Allow many kinds of block to be compiled; show warnings of the compiler even where warnings are errors."""
    with many_kinds(), warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


class Captured(Training):
    """A training on a GPU whose steps, or at least their gradients, are CUDA graphs, one per batch size.

    The eager steps before a capture are ordinary steps of the training, and the capture itself takes no step. Each
    training captures and replays on its own stream. cuBLAS has one workspace per stream, and graphs that were captured
    on the same stream would overwrite each other's workspace when replayed side by side.

    Args:
        compiled: True to compile the network, which fuses the kernels between its convolutions. Residual networks are
            compiled block by block (five kinds at any depth), and others as a whole, which takes most of a minute. None
            to compile residual blocks only. In both cases batches are taken and augmented in one kernel, and in bf16
            convolutions with few channels use `narrow.py`. False for none of this.
    """

    def __init__(
        self, trial: Trial, split: Split, *, device: str = "cuda", compiled: bool | None = False, **options: Any
    ) -> None:
        if torch.device(device).type != "cuda":
            raise LabError(f"Steps are captured on CUDA devices, got a training on {device}.")
        if not trial.capturable:
            raise LabError(f"{trial.title} cannot be captured. Train it step by step.")
        self.stream = torch.cuda.current_stream(device)
        if self.stream == torch.cuda.default_stream(device):
            raise LabError("A captured training needs a stream of its own. Make it within torch.cuda.stream(...).")
        self._entire = trial.recipe.capturable
        super().__init__(trial, split, device=device, captured=self._entire, **options)
        self._whole = trial.schedule.batch
        self._compiles = compiled is not False
        if self._compiles:
            self.take = torch.compile(self.feed.take, dynamic=False)
            if trial.precision == "bf16":
                from gyroscope_lab.engine.narrow import narrow  # needs Triton

                narrow(self.model)
            if not compile_blocks(self.model) and compiled:
                self._compile()
        self._taken: dict[int, int] = {}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[Tensor | None]]] = {}
        self._parameters = list(self.model.parameters())
        self._last: int | None = None

    def _compile(self) -> None:
        """Compile for full batches only: the smaller batch at the end of an epoch would need a second compilation."""
        compiled = torch.compile(self.model, dynamic=False)

        def forward(x: Tensor) -> Tensor:
            outputs: Tensor = compiled(x) if len(x) == self._whole else self.model(x)
            return outputs

        self.forward = forward

    def differentiate(self, count: int) -> None:
        """Compute the gradients; smaller batches run uncompiled."""
        if count != self._whole:
            context: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        else:
            context = _compiling() if self._compiles else nullcontext()
        with context:
            super().differentiate(count)

    def _evaluated(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.compiler.set_stance("force_eager"):
            return super()._evaluated(x, y)

    def _test_loss(self) -> Tensor:
        with torch.compiler.set_stance("force_eager"):
            return super()._test_loss()

    def close(self) -> None:
        """Finish the run at any point of the training, and free the memory of its graphs."""
        super().close()
        torch.cuda.synchronize(self.device)
        self._graphs.clear()
        self._last = None
        self.forward = self.model

    def step(self, count: int) -> None:
        """One step: replayed, unless it is one of the first steps or the monitor measures it with hooks."""
        if count not in self._graphs or self._is_looked_into:
            self._last = None
            self.advance(count)
            self._taken[count] = self._taken.get(count, 0) + 1
            # At once: the tables of addresses for its kernels are set by this step, until another training needs its
            # own.
            if self._can_capture(count):
                self._capture(count)
            return
        graph, gradients = self._graphs[count]
        if self._last != count:  # a monitor reads the last step's gradients from .grad
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            self._last = count
        graph.replay()
        if not self._entire:
            self.update()  # which the monitor notices by itself
        elif self.monitor is not None:
            self.monitor.measure()

    @property
    def _is_looked_into(self) -> bool:
        """True if hooks measure the next step, which then cannot be a graph."""
        return self.monitor is not None and self.monitor.looks_inside

    def _can_capture(self, count: int) -> bool:
        enough = self._taken[count] >= (1 if self._graphs else _BEFORE)
        return enough and count not in self._graphs and self.feed.resident and not self._is_looked_into

    def _capture(self, count: int) -> None:
        if self.monitor is not None:
            # Its thread must not free page-locked memory during a capture: torch marks such memory with an event of the
            # stream, which would become part of the graph, and CUDA then refuses page-locked memory.
            checkpoint.recorded(self.monitor)
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other, _ in self._graphs.values()), None)
        # The monitors' threads keep asking the device whether their copies have arrived.
        with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
            (self.advance if self._entire else self.differentiate)(count)
        self._graphs[count] = graph, [parameter.grad for parameter in self._parameters]
