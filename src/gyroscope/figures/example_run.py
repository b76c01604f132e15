"""A run of made-up numbers in memory, to try the figures on: no training, no files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gyroscope.base.accepted import listed
from gyroscope.base.accepted import seed as seed_of
from gyroscope.errors import FigureError
from gyroscope.figures.run_data import at_least_one
from gyroscope.store.record import QuantityInfo

Values = npt.NDArray[np.float64]

_SAMPLED = (
    *("lambda_x", "lambda_g", "lambda_f", "kappa_x_p50", "kappa_g_p50", "kappa_f_p50"),
    *("weight_spectral", "gradient_spectral", "domination"),
)


class Curve(NamedTuple):
    """A scalar over steps."""

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Example:
    """The part of a run that figures read, held in memory: `data[quantity]` is [steps, layers].

    >>> run = Example("mine", ("a", "b"), np.arange(3), {"rotation": np.zeros((3, 2), np.float32)})
    >>> run.series("rotation").shape
    (3, 2)
    """

    name: str
    layers: tuple[str, ...]
    steps: npt.NDArray[np.int64]
    data: Mapping[str, npt.NDArray[np.float32]]
    scalars: Mapping[str, Curve] = field(default_factory=dict)

    @property
    def quantities(self) -> dict[str, QuantityInfo]:
        """The quantities that it holds."""
        return {name: QuantityInfo(name, "", "made up") for name in self.data}

    def series(self, name: str) -> npt.NDArray[np.float32]:
        """Return a quantity at all steps for all layers."""
        return self.data[name]


def example_run(
    layers: int = 3, steps: int = 101, *, quantities: Iterable[str] | None = None, seed: int = 0
) -> Example:
    """Return a run of made-up numbers that behave like a small network under Adam with weight decay.

    >>> run = example_run(layers=4)
    >>> run.layers
    ('block1.conv1.weight', 'block1.conv2.weight', 'block2.conv1.weight', 'block2.conv2.weight')
    >>> float(run.series("rotation")[0].max()), run.series("rotation").shape
    (0.0, (101, 4))
    """
    layers, steps = at_least_one(layers, "layers"), at_least_one(steps, "steps")
    draw = np.random.default_rng(seed_of(seed, FigureError))
    time, depth = np.linspace(0, 1, steps)[:, None], np.linspace(0, 1, layers)[None, :]

    def noise(size: float) -> npt.NDArray[np.float64]:
        return np.exp(size * draw.standard_normal((steps, layers)))

    lr = 0.1 * np.where(time < 0.6, 1.0, np.where(time < 0.85, 0.2, 0.04)) * np.ones_like(depth)
    weight = 3.0 * (1 + 2 * depth) * (1 + 0.5 * np.sqrt(time))
    gradient = 0.3 * (1 - 0.6 * depth) * np.exp(-2 * time) * noise(0.15) + 1e-4
    effective = lr / weight**2
    rate = effective * weight * gradient * noise(0.05) * 100 / np.sqrt(steps)
    angle = np.sqrt(np.cumsum((6 * rate) ** 2, axis=0)) * (0.4 + 0.6 * depth)
    rotation = 1 - np.cos(np.minimum(angle - angle[:1], np.pi / 2))
    spread = 0.6 + 0.2 * depth
    moment = 1e-4 * 10 ** (-2 * depth - time) * noise(0.02)
    dying = np.clip(0.02 + 0.3 * (1 - depth) * time, 0, 1) * noise(0.1)
    data = {
        "rotation": rotation,
        "rate": rate,
        "rate_per_step": rate,
        "weight_norm": weight,
        "gradient_norm": gradient,
        "update_norm": rate * weight,
        "update_ratio": rate,
        "effective_lr": effective,
        "effective_lr_measured": effective * noise(0.1),
        "alignment": np.tanh(0.3 * draw.standard_normal((steps, layers)) + 0.2),
        "lr": lr,
        "moment_p10": moment / 6,
        "moment_p50": moment,
        "moment_p90": moment * 4,
        "neuron_p0": rotation * spread**2,
        "neuron_p10": rotation * spread,
        "neuron_p50": rotation,
        "neuron_p90": np.minimum(rotation * 1.3, 1),
        "neuron_p100": np.minimum(rotation * 1.6, 1.1),
        "dying": np.clip(dying, 0, 1),
        "full": np.clip(dying / 8, 0, 1),
    }
    data |= _conditioning(time, depth, weight, noise)
    given = data if quantities is None else quantities
    wanted = listed(given)
    if unknown := [name for name in wanted if not isinstance(name, str) or name not in data]:
        raise FigureError(
            f"`quantities` must be names of quantities of an example, got {unknown[0]!r:.80}. It has {', '.join(data)}."
        )
    series = {name: data[name].astype(np.float32) for name in wanted}
    for name in {"rate", "rate_per_step", "update_norm", "update_ratio", "effective_lr_measured"} & set(wanted):
        series[name][0] = np.nan  # nothing has moved yet
    for name in {"dying", "full", *_SAMPLED} & set(wanted):
        series[name][np.arange(steps) % 10 != 0] = np.nan  # sampled
    at = np.arange(steps, dtype=np.int64)
    scalars = {"loss": Curve(at, 2.3 * np.exp(-4 * time[:, 0])), "test_accuracy": Curve(at[-1:], np.array([0.9]))}
    return Example("example", tuple(_names(layers)), at, series, scalars)


def _conditioning(time: Values, depth: Values, weight: Values, noise: Callable[[float], Values]) -> dict[str, Values]:
    """Return inputs that grow, output gradients that vanish toward the first layers, condition numbers that settle."""
    inputs = 20 * (1 + 3 * time) * (1 + depth) * noise(0.05)
    outputs = 0.05 * 10 ** (-2 * (1 - depth) - time) * noise(0.2)
    kappa = 30 * (1 + 4 * np.exp(-6 * time)) * (1 + depth) * noise(0.1)
    spectral, gradient = weight / 4, 0.1 * np.sqrt(inputs * outputs)
    found = (inputs, outputs, inputs * outputs, kappa, kappa / 3, kappa**2, spectral, gradient, gradient / spectral)
    return dict(zip(_SAMPLED, found, strict=True))


def _names(count: int) -> list[str]:
    return [f"block{i // 2 + 1}.conv{i % 2 + 1}.weight" for i in range(count)]
