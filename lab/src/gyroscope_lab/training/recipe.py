"""Recipes of trials: an optimizer and its control."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from gyroscope.control import Layca, SGD_AMom, block_normalized, hyperball, lars, relative_update
from gyroscope.layers import layers
from gyroscope_lab.errors import LabError
from gyroscope_lab.kinds import require_kinds
from gyroscope_lab.training.optimizers import FACTORIES, Factory, on_device

#: The optimizers by name, with the papers' constants.
OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "sgd-amom": (SGD_AMom, {}),
    "adam": (torch.optim.Adam, {"betas": (0.9, 0.999), "eps": 1e-7}),
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.999), "eps": 1e-7}),
    "rmsprop": (torch.optim.RMSprop, {"alpha": 0.9, "eps": 1e-7}),
    "adagrad": (torch.optim.Adagrad, {"eps": 1e-7}),
}
#: The controls of layer rotation by name.
CONTROLS: dict[str, Callable[..., Layca]] = {
    "layca": Layca,
    "lars": lars,
    "hyperball": hyperball,
    "relative": relative_update,
    "block": block_normalized,
}
#: Optimizers that a CUDA graph can capture, with the options that this needs: a rate that is read from the device.
_CAPTURED: dict[str, dict[str, Any]] = {
    "sgd": {"fused": True},
    "adam": {"capturable": True},
    "adamw": {"capturable": True},
    "rmsprop": {"capturable": True},
}
_MOMENTUM = ("sgd", "sgd-amom", "rmsprop")
# Further optimizers, also those that studies register.
_REGISTERED = dict(FACTORIES)

Decayed = Literal["all", "convolutions"]
Others = Literal["frozen", "inner"]


@dataclass(frozen=True)
class Recipe:
    """An optimizer and its control, by name.

    Attributes:
        name: the name in figures and tables.
        rate: the learning rate; under a control, ρ.
        optimizer: one of `OPTIMIZERS`, one of `gyroscope_lab.training.optimizers`, or one that a study registered
            (`register`).
        control: one of `CONTROLS`, or None.
        alpha: α of equation 1: the first layers (negative) or the last layers (positive) turn faster.
        weight_decay: λ of the term λw in the gradient, or of AdamW's decay; twice Keras's `l2`.
        momentum: the momentum of SGD, or of SGD_AMom, where 0 means the default of 0.9.
        nesterov: whether that momentum is Nesterov's.
        eps: ε of an adaptive method; None for Keras's 1e-7, which the papers on layer rotation used.
        others: how a control treats biases and gains: "frozen", as in the papers, or an "inner" step.
        scale: the factor that multiplies the initial weights of every layer.
        only: the only layer to train, kernel and bias; an index from 0 in forward order.
        frozen: layers whose weights are not trained; indices from 0 in forward order.
        records: record the tangent of every layer's rotation angle at every step, for other recipes to copy.
        copies: the recipe whose recorded rotation angles this one repeats (the papers' AdaptCopy).
        options: further arguments of a registered optimizer, as pairs.

    >>> from gyroscope_lab import models
    >>> model = models.make("digits-cnn", seed=0)
    >>> Recipe("SGD", rate=0.1).make(model).param_groups[0]["lr"]
    0.1
    >>> Recipe("Adam-Layca", rate=3**-4.3, optimizer="adam", control="layca").make(model).layers[0]
    'conv1.weight'
    """

    name: str
    rate: float
    optimizer: str = "sgd"
    control: str | None = None
    alpha: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    eps: float | None = None
    others: Others = "frozen"
    scale: float = 1.0
    only: int | None = None
    frozen: tuple[int, ...] = ()
    records: bool = False
    copies: Recipe | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        require_kinds(self)
        registered = self.optimizer in _REGISTERED
        if self.optimizer not in OPTIMIZERS and not registered:
            known = ", ".join([*OPTIMIZERS, *_REGISTERED])
            raise LabError(f"`optimizer` must be one of {known}, got {self.optimizer!r}.")
        if registered and self.control is not None:
            raise LabError(
                f"`control` must be None for the optimizer of a study, {self.optimizer}, got {self.control!r}."
            )
        if self.options and not registered:
            raise LabError(
                f"`options` must be empty for {self.optimizer}: they are for optimizers that a study registers."
            )
        if self.control is not None and self.control not in CONTROLS:
            raise LabError(f"`control` must be None or one of {', '.join(CONTROLS)}, got {self.control!r}.")
        for name in ("rate", "weight_decay"):
            if not 0 <= getattr(self, name) < inf:
                raise LabError(f"`{name}` must be a finite number ≥ 0, got {getattr(self, name)}.")
        if not 0 < self.scale < inf:
            raise LabError(f"`scale` must be a finite number > 0, got {self.scale}.")
        if not -1 <= self.alpha <= 1:
            raise LabError(
                f"`alpha` must be from -1 (only the first layer turns) to 1 (only the last), got {self.alpha}."
            )
        if self.alpha != 0.0 and self.control is None:
            raise LabError(f"`alpha` must be 0 without a control, got {self.alpha}. Try control='layca'.")
        self._check_momentum()
        if self.eps is not None and (
            not 0 <= self.eps < inf or registered or "eps" not in OPTIMIZERS[self.optimizer][1]
        ):
            those = ", ".join(name for name, (_, constants) in OPTIMIZERS.items() if "eps" in constants)
            raise LabError(f"`eps` must be a number ≥ 0, for {those}, got {self.eps} for {self.optimizer}.")
        if self.copies is not None and (self.control != "layca" or not self.copies.records):
            raise LabError("`copies` needs control='layca', and a recipe with records=True.")
        if self.copies is not None and (self.alpha != 0.0 or self.others != "frozen"):
            # The rate is then 1, which does not suit biases; and the copied rates replace those of alpha.
            raise LabError("`alpha` and `others` must be left out with `copies`, which repeats the recorded rotations.")

    def _check_momentum(self) -> None:
        if not 0 <= self.momentum < 1:
            raise LabError(f"`momentum` must be a number ≥ 0 and < 1, got {self.momentum}.")
        if self.momentum and self.optimizer not in _MOMENTUM and self.optimizer not in _REGISTERED:
            raise LabError(
                f"`momentum` must be 0 for {self.optimizer}, got {self.momentum}: only {', '.join(_MOMENTUM)} take one."
            )
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise LabError("`nesterov` must be False without the momentum of sgd. Try optimizer='sgd', momentum=0.9.")

    def make(self, model: nn.Module, *, decayed: Decayed = "all", captured: bool = False) -> Optimizer:
        """Return the optimizer for `model`.

        Args:
            model: the model whose parameters it updates.
            decayed: the layers with weight decay: all, or convolutions but not linear layers.
            captured: True if the steps will be captured in a CUDA graph; the rate is then on the device.
        """
        if self.optimizer in _REGISTERED:
            made = _REGISTERED[self.optimizer].make(self, model)
            return on_device(made) if captured else made
        kind, constants = OPTIMIZERS[self.optimizer]
        options: dict[str, Any] = dict(constants)
        rate: float | torch.Tensor = 1.0 if self.copies is not None else self.rate
        if captured:
            options |= _CAPTURED.get(self.optimizer, {}) if self.control is None else _inside(self.optimizer)
            rate = torch.tensor(float(rate), device=next(model.parameters()).device)
        if self.momentum:
            options["momentum"] = self.momentum
        if self.nesterov:
            options["nesterov"] = True
        if self.eps is not None:
            options["eps"] = self.eps
        optimizer = kind(self._groups(model, decayed), lr=rate, **options)
        if self.control is None:
            return optimizer
        its = [layer for layer in layers(model) if layer.parameter.requires_grad]
        return CONTROLS[self.control](optimizer, its, alpha=self.alpha, others=self.others)

    def set_rate(self, optimizer: Optimizer, multiplier: float) -> None:
        """Set the rate of an optimizer of `make` to this recipe's rate times `multiplier`.

        Copied rates already include the schedule, and registered optimizers may have their own. Both are left
        unchanged.

        >>> optimizer = Recipe("SGD", rate=0.5).make(nn.Linear(2, 2))
        >>> Recipe("SGD", rate=0.5).set_rate(optimizer, 0.1)
        >>> optimizer.param_groups[0]["lr"]
        0.05
        """
        registered = _REGISTERED.get(self.optimizer)
        if self.copies is not None or (registered is not None and registered.own_rates):
            return
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(self.rate * multiplier)
            else:
                group["lr"] = self.rate * multiplier

    @staticmethod
    def forget_momentum(optimizer: Optimizer) -> None:
        """Set the momentum of an optimizer of `make` to zero, as before the first step; rates are kept.

        >>> weight = nn.Parameter(torch.ones(1))
        >>> recipe = Recipe("SGD", rate=0.1, momentum=0.9)
        >>> optimizer = recipe.make(nn.ParameterList([weight]))
        >>> weight.sum().backward(); optimizer.step()
        >>> recipe.forget_momentum(optimizer); optimizer.state[weight]["momentum_buffer"]
        tensor([0.])
        """
        for state in optimizer.state.values():
            for name in ("momentum_buffer", "exp_avg"):
                if state.get(name) is not None:
                    state[name].zero_()

    @property
    def capturable(self) -> bool:
        """True if a CUDA graph can capture its steps."""
        registered = _REGISTERED.get(self.optimizer)
        if registered is not None:
            return registered.capturable
        return self.optimizer in _CAPTURED or (self.control is not None and self.optimizer == "sgd-amom")

    def _groups(self, model: nn.Module, decayed: Decayed) -> list[dict[str, Any]]:
        trained = [p for p in model.parameters() if p.requires_grad]
        if decayed == "all" or not self.weight_decay:
            return [{"params": trained, "weight_decay": self.weight_decay}]
        convolutions = {id(layer.parameter) for layer in layers(model) if layer.kind.startswith("conv")}
        chosen = [p for p in trained if id(p) in convolutions]
        rest = [p for p in trained if id(p) not in convolutions]
        groups = [{"params": chosen, "weight_decay": self.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]


def register(name: str, factory: Callable[[Recipe, nn.Module], Optimizer], *, own_rates: bool = False) -> None:
    """Register an optimizer of a study under a name for recipes, to train it in the laboratory's loop.

    Steps of registered optimizers are not captured as CUDA graphs. The description of a trial with such an optimizer
    can be read once the module that registers it is loaded.

    Args:
        name: the value of `Recipe.optimizer`; not one of `OPTIMIZERS` or `FACTORIES`.
        factory, own_rates: as in `gyroscope_lab.training.optimizers.Factory`.

    >>> register("rprop", lambda recipe, model: torch.optim.Rprop(model.parameters(), lr=recipe.rate))
    >>> type(Recipe("Rprop", rate=0.1, optimizer="rprop").make(nn.Linear(2, 2))).__name__
    'Rprop'
    """
    if name in (taken := [*OPTIMIZERS, *FACTORIES]):
        raise LabError(f"`name` must not be one of {', '.join(taken)}, got {name!r}. Try another name.")
    _REGISTERED[name] = Factory(factory, own_rates)


def _inside(optimizer: str) -> dict[str, Any]:
    """Return the options of an optimizer inside a control, whose kernel reads the rate."""
    return {"capturable": True} if "capturable" in _CAPTURED.get(optimizer, {}) else {}


def with_options_of(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state with the rate, and where steps read it, of `optimizer`.

    Both come from the same recipe, and differ only in where the rate is: captured steps read it from the device. Other
    entries of a group may count steps, as those of Prodigy do, and are kept.

    >>> saved = Recipe("SGD", rate=0.5).make(nn.Linear(2, 2)).state_dict()
    >>> with_options_of(Recipe("SGD", rate=0.1).make(nn.Linear(2, 2)), saved)["param_groups"][0]["lr"]
    0.1
    """
    pairs = zip(state["param_groups"], optimizer.param_groups, strict=True)
    return state | {
        "param_groups": [
            own | group | {name: own[name] for name in ("lr", "capturable", "fused") if name in own}
            for group, own in pairs
        ]
    }
