"""`watch`: one line in a training loop that measures and records every layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.optim import Optimizer

from gyroscope.layers.layer import Layer
from gyroscope.monitor.monitor import Monitor
from gyroscope.monitor.reference import Place, Precision, Source
from gyroscope.store import Sink

if TYPE_CHECKING:
    from gyroscope.conditioning.schedule import Schedule


def watch(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    run: str | Path | None = None,
    every: int = 1,
    budget: float | None = 0.01,
    layers: Sequence[Layer] | str | Iterable[str] | None = None,
    quantities: Sequence[str] | None = None,
    neurons: bool = False,
    loss: Any = None,
    *,
    activations: bool = True,
    detail_every: int = 100,
    threshold: float = 0.0,
    reference: Source | None = None,
    reference_dtype: Precision = "auto",
    reference_device: Place = "auto",
    step: int | None = None,
    meta: Mapping[str, Any] | None = None,
    sinks: Sequence[Sink] = (),
    conditioning: int | Literal["budget"] | Schedule | None = None,
) -> Monitor:
    """Measure and record what every layer of `model` does at each step of `optimizer`.

    Nothing about training changes: losses, gradients, weights, random numbers and state dicts are the same to the last
    bit. The weights are w₀ as they are now, unless a `reference` is given.

    Args:
        model: any module; compiled, data-parallel or sharded with FSDP2 too.
        optimizer: whose steps are measured; several for a model that is stepped in parts, as in a GAN.
        run: the folder to record in; a new one under `runs/` unless given. A folder that holds a run of the same model
            is gone on with: where the weights are those of a recorded step, from there; else, until a state is loaded
            with `load_state_dict`, as a new attempt from the beginning. What was recorded before is kept.
        every: measure every so many steps. Step 0 and the last one are always recorded.
        budget: the share of the training time that measuring may take, hooks and the writer's thread included; the
            interval is stretched to keep to it, after the first 50 measured steps, from which the price is learned, and
            not before 5 seconds of training or 1,000 measured steps have passed. None: never.
        layers: which layers, from `gyroscope.layers`; or glob patterns on their names.
        quantities: which quantities on the weight side; all that are known by default (`gyroscope.monitor.known`).
        neurons: also how rotation is spread over the output units of each layer.
        loss: a loss module whose value is recorded whenever it is computed, or a function without arguments that gives
            it after a measured step.
        activations: on sampled steps, also dying and full units, activation means and ranks, by forward hooks that are
            there for these steps alone.
        detail_every: sampled steps are every so many; what needs more than inner products is measured there.
        threshold: what counts as active in the output of a layer that no activation module follows.
        reference: measure rotation from here: a model, a state dict, the path of a checkpoint, or the folder of a run.
        reference_dtype: "float32", "bfloat16" or "auto", which rounds the large layers of large models.
        reference_device: "device", "cpu" (pinned memory, streamed) or "auto", by the memory that is free.
        step: the step that training is at, to go on with a run whose checkpoint has no monitor state.
        meta: what else to remember about the run: anything JSON can hold, under keys that Gyroscope does not use.
        sinks: further places to mirror the run to, from `gyroscope.integrations`.
        conditioning: every so many steps, also how well each layer is conditioned (`gyroscope.condition`), from the
            forward and backward passes of training itself; "budget" spaces these analyses to keep to the budget. The
            loss is taken for a mean over the batch; a `gyroscope.conditioning.Schedule` says more.

    Returns:
        The monitor: `log`, `note`, `flush`, `sample`, `cost`, `close`. Also a context manager.

    Example:
        >>> import tempfile, torch, gyroscope
        >>> folder = tempfile.TemporaryDirectory()
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with gyroscope.watch(model, optimizer, f"{folder.name}/first") as monitor:
        ...     for _ in range(3):
        ...         loss = model(torch.ones(16, 4)).square().mean()
        ...         optimizer.zero_grad(); loss.backward(); optimizer.step()
        ...         monitor.log(loss=loss)
        >>> run = gyroscope.load(f"{folder.name}/first")
        >>> run.layers, run.steps.tolist(), run.series("rotation").shape
        (('0.weight', '2.weight'), [0, 1, 2, 3], (4, 2))
        >>> run.close(); folder.cleanup()
    """
    return Monitor(
        model, optimizer, run, every=every, budget=budget, layers=layers, quantities=quantities, neurons=neurons,
        loss=loss, activations=activations, detail_every=detail_every, threshold=threshold, reference=reference,
        reference_dtype=reference_dtype, reference_device=reference_device, step=step, meta=meta, sinks=sinks,
        conditioning=conditioning,
    )  # fmt: skip
