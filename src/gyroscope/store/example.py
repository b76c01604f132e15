"""A small example run."""

from __future__ import annotations

import os

import numpy as np

from gyroscope.store.reader import Run
from gyroscope.store.record import Event, LayerInfo, QuantityInfo, Rows, Scalars
from gyroscope.store.writer import Writer


def write_example(path: str | os.PathLike[str]) -> Run:
    """Write a run of three layers and five steps, and open it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     run.steps.tolist(), list(run.quantities), list(run.scalars), [event.text for event in run.events]
    ([0, 10, 20, 30, 40], ['rotation', 'rate'], ['loss'], ['an example'])
    """
    layers = [
        LayerInfo("conv1.weight", "conv", (8, 3, 3, 3)),
        LayerInfo("conv2.weight", "conv", (16, 8, 3, 3)),
        LayerInfo("head.weight", "linear", (10, 16)),
    ]
    quantities = {
        "rotation": QuantityInfo("rotation", "1", "cosine distance of the weights to their initialization"),
        "rate": QuantityInfo("rate", "rad", "angle since the last measured step"),
    }
    steps = np.arange(0, 50, 10)
    rotation = np.outer(steps / 40, [0.4, 0.6, 0.8]).astype(np.float32)
    rate = np.full_like(rotation, np.nan)
    rate[1:] = np.diff(np.arccos(1 - rotation), axis=0)
    with Writer(path, layers, quantities, meta={"task": "example"}) as writer:
        writer.put(Event(0, "note", "an example"))
        writer.put(Rows(0, steps, {"rotation": rotation, "rate": rate}))
        for step in steps[1:]:
            writer.put(Scalars(int(step), {"loss": 2.0 ** (2 - step / 10)}))
    return Run(writer.path)
