"""Optimizers for recipes beyond those of the papers: steering, and what else claims to need little tuning.

Each is a function of a recipe and a model. Two come from packages of their own, which are imported when a training
needs them: `pip install 'gyroscope-lab[untuned]'`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from gyroscope.base import required
from gyroscope.control import Joint, steer
from gyroscope.layers import layers

if TYPE_CHECKING:
    from gyroscope_lab.training.recipe import Recipe

_EXTRA = "gyroscope-lab[untuned]"


@dataclass(frozen=True)
class Factory:
    """How an optimizer is made for a recipe.

    Attributes:
        make: a function of a recipe and a model, which returns the optimizer. It reads `rate`, `weight_decay`,
            `momentum` and `options` from the recipe.
        own_rates: True if the optimizer has its own schedule of learning rates, in place of the task's.
        capturable: True if a CUDA graph can capture its steps, once `on_device` has prepared it.
    """

    make: Callable[[Recipe, nn.Module], Optimizer]
    own_rates: bool = False
    capturable: bool = False


def steered(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Return `gyroscope.steer` at the recipe's rate; its options are those of `steer`, by default of the preset.

    Learning rates by role are given as pairs, as all of a recipe must be hashable.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> recipe = Recipe("steer sgd", rate=3**-3, optimizer="steer", options=(("inner", "sgd"),))
    >>> recipe.make(net).layers
    ('0.weight',)
    """
    return steer(model, rate=recipe.rate, **_options(recipe))


def _options(recipe: Recipe) -> dict[str, Any]:
    options: dict[str, Any] = dict(recipe.options)
    if isinstance(options.get("others_lr"), tuple):
        options["others_lr"] = dict(options["others_lr"])
    return options


def muon(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Return Muon for the matrices that `steer` would turn, and AdamW for all else, at the learning rates of `steer`.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> [group["rule"] for group in Recipe("Muon", rate=0.02, optimizer="muon").make(net).param_groups]
    ['turn', 'plain', 'plain']
    """
    options = {"weight_decay": recipe.weight_decay, **_options(recipe)}
    groups: list[dict[str, Any]] = [
        {
            "params": group["params"],
            "lr": recipe.rate,
            "rule": group["rule"],
            "relative_lr": group["lr"] * group.get("relative_lr", 1.0) / recipe.rate,
        }
        for group in steer(model, "muon", others_lr=options.pop("others_lr", None)).param_groups
    ]
    inner = torch.optim.Muon([group for group in groups if group["rule"] == "turn"], **options)
    plain = [group for group in groups if group["rule"] == "plain"]
    others = torch.optim.AdamW(plain or [{"params": []}], weight_decay=0.0, betas=(0.9, 0.95))
    return Joint(inner, others, [*inner.param_groups, *plain])


def adamw(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Return AdamW as language models are trained: β₂ = 0.95 unless said, and decay of layers alone.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> recipe = Recipe("AdamW", rate=1e-3, optimizer="adamw-text", weight_decay=0.1)
    >>> [group["weight_decay"] for group in recipe.make(nn.Linear(2, 2)).param_groups]
    [0.1, 0.0]
    """
    options = {"betas": (0.9, 0.95), **dict(recipe.options)}
    return torch.optim.AdamW(_decayed(recipe, model), lr=recipe.rate, **options)


def nadamw(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Return NAdam with decoupled weight decay.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> Recipe("NadamW", rate=1e-3, optimizer="nadamw").make(nn.Linear(2, 2)).defaults["decoupled_weight_decay"]
    True
    """
    options: dict[str, Any] = dict(recipe.options)
    return torch.optim.NAdam(
        model.parameters(),
        lr=recipe.rate,
        weight_decay=recipe.weight_decay,
        decoupled_weight_decay=True,
        **options,
    )


def schedule_free(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Return Schedule-Free AdamW, which keeps its rate and averages weights instead; it swaps them to evaluate."""
    kind = required("schedulefree", "This recipe", _EXTRA).AdamWScheduleFree
    return _made(kind, model, lr=recipe.rate, weight_decay=recipe.weight_decay, **dict(recipe.options))


def prodigy(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Return Prodigy, which estimates its rate; the recipe's rate, usually 1, is a factor of that."""
    kind = required("prodigyopt", "This recipe", _EXTRA).Prodigy
    return _made(kind, model, lr=recipe.rate, weight_decay=recipe.weight_decay, **dict(recipe.options))


#: The optimizers by name.
FACTORIES: dict[str, Factory] = {
    "steer": Factory(steered, capturable=True),
    "muon": Factory(muon),
    "adamw-text": Factory(adamw, capturable=True),
    "nadamw": Factory(nadamw, capturable=True),
    "schedule-free": Factory(schedule_free, own_rates=True),
    "prodigy": Factory(prodigy),
}


def on_device(optimizer: Optimizer) -> Optimizer:
    """Prepare an optimizer for captured steps, which read rates and count steps on the device.

    >>> optimizer = on_device(torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.5))
    >>> optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["capturable"]
    (tensor(0.5000), True)
    """
    for group in optimizer.param_groups:
        if group["params"]:
            group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
        if "capturable" in group:
            group["capturable"] = True
    return optimizer


def _decayed(recipe: Recipe, model: nn.Module) -> list[dict[str, Any]]:
    weights = {id(layer.parameter) for layer in layers(model)}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) in weights], "weight_decay": recipe.weight_decay},
        {"params": [p for p in trained if id(p) not in weights], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _made(kind: Callable[..., Optimizer], model: nn.Module, **options: Any) -> Optimizer:
    return kind([p for p in model.parameters() if p.requires_grad], **options)
