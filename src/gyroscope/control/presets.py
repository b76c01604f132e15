"""The defaults of `gyroscope.steer`, one row per name, with the evidence for each number next to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from gyroscope.control.joint import Rule
from gyroscope.errors import ControlError

Norms = Literal["learned", "held"]


@dataclass(frozen=True)
class Preset:
    """The defaults of `steer` under one name.

    Attributes:
        inner: the class of the inner optimizer, in `torch.optim`.
        rate: ρ.
        options: options of the inner optimizer.
        project: whether operation 1 is performed; without it, this is Hyperball.
        others_lr: the learning rate of parameters that are stepped plainly, by AdamW.
        embeddings: the rule of embeddings.
        heads: the rule of the output head.
        norms: "learned" or "held".
    """

    inner: str
    rate: float
    options: Mapping[str, Any] = field(default_factory=dict)
    project: bool = True
    others_lr: float = 1e-2
    embeddings: Rule = "plain"
    heads: Rule = "plain"
    norms: Norms = "learned"


PRESETS: dict[str, Preset] = {
    "adamw": Preset("AdamW", 0.028, {"betas": (0.9, 0.95)}),
    "sgd": Preset("SGD", 3.0**-3),
    "muon": Preset("Muon", 0.028),
    "adamh": Preset("AdamW", 0.018, {"betas": (0.9, 0.95)}, project=False, norms="held"),
    "muonh": Preset("Muon", 0.018, project=False, norms="held"),
}


#: Options of the AdamW that steps the other parameters; it has no weight decay.
OTHERS: Mapping[str, Any] = {"betas": (0.9, 0.95)}


def preset(name: Any) -> Preset:
    """Return the preset of a name.

    >>> preset("sgd").rate == 3**-3
    True
    """
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    hint = 'Try "adamw".'
    if isinstance(name, str) and name.lower() == "hyperball":
        hint = 'Hyperball goes around an optimizer: use "adamh" or "muonh", or project=False with another `inner`.'
    raise ControlError(
        f"`inner` must be one of {', '.join(map(repr, PRESETS))}, or a function of parameter groups that returns an "
        f"optimizer, got {name!r:.80}. {hint}"
    )


def maker(chosen: Preset) -> Callable[..., Optimizer]:
    """Return the class of a preset's inner optimizer; torch has Muon from version 2.9 on.

    >>> maker(preset("adamw")) is torch.optim.AdamW
    True
    """
    found: Callable[..., Optimizer] | None = getattr(torch.optim, chosen.inner, None)
    if found is None:
        raise ControlError(
            f"torch.optim.{chosen.inner} is not in torch {torch.__version__}; torch 2.9 and later have Muon. Install "
            'one of them, or try inner="adamw".'
        )
    return found
