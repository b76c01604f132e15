"""Layers, quantities and records that the tests of the store write."""

import numpy as np

from gyroscope.store import LayerInfo, QuantityInfo, Rows, Writer

LAYERS = [
    LayerInfo("conv1.weight", "conv", (8, 3, 3, 3)),
    LayerInfo("conv2.weight", "conv", (16, 8, 3, 3)),
    LayerInfo("head.weight", "linear", (10, 16)),
]
QUANTITIES = {
    "rotation": QuantityInfo("rotation", "1", "cosine distance to initialization"),
    "rate": QuantityInfo("rate", "rad", "angle since the last measured step"),
}


def writer(path, layers=LAYERS, quantities=QUANTITIES, **options):
    return Writer(path, layers, quantities, **options)


def rows(*steps, scale=1.0, layers=3, **values):
    """Rows in which layer l at step s has (s + l) `scale`, unless given."""
    made = scale * (np.array(steps)[:, None] + np.arange(layers)).astype(np.float32)
    return Rows(0, np.array(steps), values or {"rotation": made})


def write(path, *records, **options):
    with writer(path, **options) as w:
        for record in records:
            assert w.put(record)
    assert w.error is None
    return w.path
