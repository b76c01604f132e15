"""A run as a monitor records it: two optimizers, NaN at step 0, a layer with an odd name, scalars and events."""

import numpy as np

from gyroscope.store import Event, LayerInfo, QuantityInfo, Rows, Scalars, Writer, load

LAYERS = [
    LayerInfo("conv1.weight", "conv", (8, 3, 3, 3)),
    LayerInfo("blocks/1:attn.weight", "linear", (4, 4)),
    LayerInfo("critic.weight", "linear", (4, 4), part=1),
]
QUANTITIES = {
    name: QuantityInfo(name, "1", "a quantity") for name in ("rotation", "rate_per_step", "weight_norm", "alignment")
}
NAN = float("nan")


def rotation(step, position):
    return np.float32(0.1 * position + 0.01 * step)


def rows(first, last, part=0, quantities=("rotation", "rate_per_step", "weight_norm", "alignment")):
    positions = [i for i, layer in enumerate(LAYERS) if layer.part == part]
    steps = np.arange(first, last)
    table = np.array([[rotation(s, i) for i in positions] for s in steps], np.float32)
    values = {name: table.copy() for name in quantities}
    if "rate_per_step" in values:
        values["rate_per_step"][steps == 0] = NAN
    return Rows(part, steps, values)


def record(folder, sink, first=0, last=5, meta=None):
    """Record and mirror steps `first` to `last - 1`."""
    writer = Writer(folder, LAYERS, QUANTITIES, meta=meta or {"model": "small"}, step=first, sinks=[sink])
    for part in (0, 1):
        assert writer.put(rows(first, last, part))
    writer.put(Scalars(last - 1, {"loss": 0.5, "train/accuracy": 0.75, "gap": NAN}))
    writer.put(Event(2, "note", "the rate was lowered"))
    writer.close()
    with load(folder) as run:
        assert [event.text for event in run.events if event.kind == "error"] == []
