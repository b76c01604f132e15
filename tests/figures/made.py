"""Runs for the tests: made up in memory, and the same written to disk."""

import numpy as np

from gyroscope.figures import Example, example_run
from gyroscope.figures.example_run import Curve
from gyroscope.store import LayerInfo, Rows, Scalars, Writer, load


def run_of(name="made", steps=None, scalars=None, **quantities):
    """A run in memory from arrays [steps, layers]."""
    data = {key: np.asarray(values, dtype=np.float32) for key, values in quantities.items()}
    times, layers = next(iter(data.values())).shape
    at = np.arange(times) if steps is None else np.asarray(steps)
    curves = {key: Curve(np.arange(len(v)), np.asarray(v, dtype=float)) for key, v in (scalars or {}).items()}
    return Example(name, tuple(f"layer{i}.weight" for i in range(layers)), at, data, curves)


def written(folder, run):
    """The same run on disk."""
    layers = [LayerInfo(name, "conv", (4, 4, 3, 3)) for name in run.layers]
    with Writer(folder, layers, run.quantities) as writer:
        writer.put(Rows(0, run.steps, run.data))
        for name, curve in run.scalars.items():
            for step, value in zip(curve.steps, curve.values, strict=True):
                writer.put(Scalars(int(step), {name: float(value)}))
    return load(folder)


def texts(legend):
    return [text.get_text() for text in legend.get_texts()]


__all__ = ["Curve", "example_run", "run_of", "texts", "written"]
