"""Steps of SGD, RMSprop and Adam by batch size while the weights are held: what the batch does, and nothing else.

In a training, larger batches also lead elsewhere, so that steps differ for that too. Here gradients are those of
batches drawn at one point. Of a step Δ two things are told: its length E‖Δ‖, and how far it goes down the whole loss,
E⟨Δ, −∇J⟩/‖∇J‖. Gradients of small batches are mostly noise, which makes steps of SGD long and not far; RMSprop divides
by what noise and signal are together, so that the length hardly depends on the batch, but the way does. Adam's steps
grow in length too, for it averages noise out of what it divides, and not out of what it divides by.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from gyroscope.theory import batch_law, per_example_gradients, step_gain
from gyroscope.theory.adaptive import Moments, adam, rmsprop
from gyroscope.theory.decay import Rule, sgd
from gyroscope_lab import models
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.dynamics.loop import kept, split_of

RULES: dict[str, Rule[Any]] = {
    "sgd": partial(sgd, lr=0.1),
    "rmsprop": partial(rmsprop, lr=1e-3),
    "adam": partial(adam, lr=1e-3),
}


@dataclass(frozen=True)
class Setting:
    """All that a measurement depends on.

    Attributes:
        source: the data.
        model: the network.
        options: of the network.
        sizes: |B|, from small to large.
        trained: how many steps of Adam, with batches of 64, come before.
        steps: how many batches of each size are drawn.
        warm: so many of the steps are left out, until averages are filled.
        elements: the law is measured on so many elements of the gradient, chosen at random.
        examples: at most so many are drawn from.
        seed: of everything.
    """

    source: Source
    model: str
    options: tuple[tuple[str, Any], ...]
    sizes: tuple[int, ...]
    trained: int
    steps: int
    warm: int
    elements: int = 256
    examples: int = 2000
    seed: int = 0


def held(lab: Lab, setting: Setting) -> dict[str, Any]:
    """The law of the second moment, gains and steps at one point: what JSON can hold.

    Returns:
        "exponent" of |B|; by size "measured" and "predicted" traces and the share of "noise" in them; "gain", from the
        smallest size to each, of 1/√s as "measured" in Adam and as "predicted"; and of each rule "length" and "along".
    """

    def measured() -> dict[str, Any]:
        model, x, y = _point(lab, setting)
        g = per_example_gradients(model, lambda z, t: F.cross_entropy(z, t), x, y, chunk=256)
        order = torch.Generator().manual_seed(setting.seed)
        some = torch.randperm(g.shape[1], generator=order)[: setting.elements].to(g.device)
        law = batch_law(g[:, some], setting.sizes, draws=setting.steps, seed=setting.seed)
        drawn = [_batches(g, size, setting.steps, order) for size in setting.sizes]
        found = {name: [steps_of(rule, one, g.mean(0), setting.warm) for one in drawn] for name, rule in RULES.items()}
        squares = [_square(one) for one in drawn]
        small = setting.sizes[0]
        return {
            "law": {"exponent": law.exponent, "measured": law.measured.tolist(), "predicted": law.predicted.tolist(),
                    "noise": law.noise.tolist()},
            "gain": {
                "measured": [float((squares[0] / one).sqrt().nanmedian()) for one in squares],
                "predicted": [step_gain(g, small, size).median for size in setting.sizes],
                "most": [step_gain(g, small, size).most for size in setting.sizes],
            },
            "steps": {name: {"length": [a for a, _ in its], "along": [b for _, b in its]}
                      for name, its in found.items()},
        }  # fmt: skip

    return kept(lab, "batch-size", setting, measured)


def steps_of(rule: Rule[Any], gradients: Tensor, whole: Tensor, warm: int) -> tuple[float, float]:
    """E‖Δ‖ and E⟨Δ, −∇J⟩/‖∇J‖ of a rule that is given gradients [K, P] one after the other, weights held.

    >>> g = torch.tensor([[3.0, 4.0], [3.0, -4.0]])
    >>> steps_of(partial(sgd, lr=0.1), g, g.mean(0), 0)
    (0.5, 0.30000001192092896)
    """
    state, there = None, torch.zeros_like(whole)
    lengths, ways = [], []
    for step, g in enumerate(gradients):
        move, state = rule(there, g, state)
        if step >= warm:
            lengths.append(float(move.norm()))
            ways.append(float(-(move @ whole) / whole.norm()))
    return sum(lengths) / len(lengths), sum(ways) / len(ways)


def _square(gradients: Tensor) -> Tensor:
    """Adam's ŝ in the end."""
    state: Moments | None = None
    there = torch.zeros_like(gradients[0])
    for g in gradients:
        _, state = adam(there, g, state, lr=0.0)
    assert state is not None
    return state.square / (1 - 0.999**state.step)


def _batches(g: Tensor, size: int, count: int, order: torch.Generator) -> Tensor:
    """The gradients of `count` batches drawn with replacement, [count, P]: one product instead of many sums."""
    drawn = torch.randint(0, len(g), (count, size), generator=order)
    shares = torch.zeros(count, len(g)).scatter_add_(1, drawn, torch.full(drawn.shape, 1 / size))
    return shares.to(g) @ g


def _point(lab: Lab, setting: Setting) -> tuple[nn.Module, Tensor, Tensor]:
    """The network after its first steps of training, and the examples to draw from."""
    split = split_of(lab, setting.source)
    order = torch.Generator().manual_seed(setting.seed)
    chosen = torch.randperm(len(split.y_train), generator=order)[: setting.examples].to(split.y_train.device)
    x, y = split.inputs(split.x_train[chosen.to(split.x_train.device)]).to(split.y_train.device), split.y_train[chosen]
    x = x.double()
    model = models.make(setting.model, seed=setting.seed, **dict(setting.options)).to(x)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(setting.trained):
        some = torch.randint(0, len(y), (64,), generator=order).to(y.device)
        optimizer.zero_grad()
        F.cross_entropy(model(x[some]), y[some]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model, x, y
