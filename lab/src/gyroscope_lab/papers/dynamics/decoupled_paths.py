"""Trajectories under L2 and under weight decay, of the same rule from the same weights on the same batches.

Decay with λ' beside L2 with λ. How far apart the two are is told as a share of what L2 does at all,

    d_k(λ') = ‖w_k(L2 λ) − w_k(decay λ')‖ / ‖w_k(L2 λ) − w_k(neither)‖,

0 where they are one, 1 where decay comes no closer to L2 than doing nothing. λ' is tried over a range, so that it is
not for its strength if they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from gyroscope.theory.adaptive import adam, rmsprop
from gyroscope.theory.decay import Rule, sgd, with_decay, with_l2
from gyroscope_lab import models
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.dynamics.loop import kept, split_of

#: The rules by name, and the rate each is bound to.
RULES: dict[str, tuple[Rule[Any], float]] = {
    "SGD": (partial(sgd, lr=0.1), 0.1),
    "SGD with momentum 0.9": (partial(sgd, lr=0.02, momentum=0.9), 0.02),
    "RMSprop": (partial(rmsprop, lr=1e-3), 1e-3),
    "Adam": (partial(adam, lr=3e-3), 3e-3),
}


@dataclass(frozen=True)
class Setting:
    """All that the trajectories of a rule depend on.

    Attributes:
        rule: one of `RULES`.
        source: the data.
        decay: λ of L2.
        multiples: λ'/λ of decay.
        steps: how many.
        batch: examples a step, drawn with replacement.
        seed: of the weights and of the batches.
        model: the network.
    """

    rule: str
    source: Source
    decay: float = 0.03
    multiples: tuple[float, ...] = (1.0, 10.0)
    steps: int = 100
    batch: int = 50
    seed: int = 0
    model: str = "mlp-2x32"


@dataclass(frozen=True, eq=False)
class Apart:
    """How far decay is from L2.

    Attributes:
        multiples: λ'/λ [M].
        shares: d_k(λ') [M, K], for k = 1 … K.
    """

    multiples: npt.NDArray[np.float64]
    shares: npt.NDArray[np.float64]

    @property
    def closest(self) -> int:
        """Which λ' ends closest to L2."""
        return int(np.argmin(self.shares[:, -1]))


def apart(lab: Lab, setting: Setting) -> Apart:
    """How far decay is from L2 over the steps of one rule."""

    def measured() -> dict[str, Any]:
        model, gradient = _problem(lab, setting)
        rule, lr = RULES[setting.rule]
        start = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
        penalized = path(with_l2(rule, decay=setting.decay), gradient, start, setting.steps)
        plain = path(rule, gradient, start, setting.steps)
        effect = (penalized - plain).norm(dim=1)
        decayed = [
            path(with_decay(rule, lr=lr, decay=multiple * setting.decay), gradient, start, setting.steps)
            for multiple in setting.multiples
        ]
        return {"shares": [((penalized - one).norm(dim=1) / effect).tolist() for one in decayed]}

    found = kept(lab, "adamw-vs-l2", setting, measured)
    return Apart(np.array(setting.multiples), np.array(found["shares"], dtype=np.float64))


def path(rule: Rule[Any], gradient: Callable[[Tensor, int], Tensor], start: Tensor, steps: int) -> Tensor:
    """Where a rule goes: the weights after each step [steps, P].

    Args:
        rule: (w, g, state) → (w, state).
        gradient: of the weights and the number of the step, from 0.
        start: the weights to begin with [P].
        steps: how many.

    >>> path(partial(sgd, lr=0.5), lambda w, k: w, torch.tensor([1.0]), 2)
    tensor([[0.5000],
            [0.2500]])
    """
    w, state, found = start, None, []
    for step in range(steps):
        w, state = rule(w, gradient(w, step), state)
        found.append(w)
    return torch.stack(found)


def _problem(lab: Lab, setting: Setting) -> tuple[nn.Module, Callable[[Tensor, int], Tensor]]:
    """The network, and the gradient of its loss on the batch of a step by all weights in one row."""
    split = split_of(lab, setting.source)
    # In double precision at every scale, so that what is one is one.
    x, y = split.inputs(split.x_train).double(), split.y_train
    inputs = x[0].numel()
    model = models.make(setting.model, seed=setting.seed, inputs=inputs, biases=True, init="glorot_uniform").to(x)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    order = torch.Generator().manual_seed(setting.seed)
    batches = torch.randint(0, len(y), (setting.steps, setting.batch), generator=order).to(y.device)

    def loss(w: Tensor, some: Tensor) -> Tensor:
        parts = torch.split(w, [shape.numel() for shape in shapes.values()])
        weights = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return F.cross_entropy(functional_call(model, weights, (x[some],)), y[some])

    of = grad(loss)
    return model, lambda w, step: of(w, batches[step])
