"""A torch optimizer that gives its inner optimizer preconditioned gradients, C⁻¹ ∇J instead of ∇J, layer by layer.

Momentum and adaptive steps of the inner optimizer are those of preconditioned gradients; weight decay is not
preconditioned (equation 27 of Grosse's chapter 5). The gradients are restored after the step.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gyroscope.base import accepted
from gyroscope.base.hooks import is_capturing
from gyroscope.control.preconditioners.affine_layers import Parts, Place, places
from gyroscope.control.preconditioners.observer import Labels, Observer, Statistics
from gyroscope.control.roster import few
from gyroscope.control.torch_contract import Wrapper, check_state, load_uncast
from gyroscope.errors import DynamicsError
from gyroscope.passes.likelihood import Loss
from gyroscope.theory.domains import count


class Running(Statistics, Protocol):
    """Statistics with running averages."""

    def fold(self) -> None:
        """Update the averages with everything added since the last call."""

    def known(self, index: int) -> bool:
        """Return whether there are statistics of a layer."""

    def state(self, index: int) -> dict[str, Any]:
        """Return the statistics of a layer, by name."""

    def load(self, index: int, state: dict[str, Any]) -> None:
        """Load the statistics of a layer; an empty state deletes them."""

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors in the state of a layer, by name."""


R = TypeVar("R", bound=Running)
Exchange = tuple[list[Tensor], list[Tensor]]


class Preconditioner(Wrapper, Generic[R]):
    """Base of the preconditioners: observes the model, and steps the inner optimizer on preconditioned gradients.

    Args:
        optimizer: the inner optimizer.
        model: the model that is trained, which is called as a whole.
        statistics: a function that makes the running averages for its layers.
        loss, labels, seed: the source of gradients at the layers' outputs.
        biases: whether biases are preconditioned, together with the weights; otherwise their gradients stay as they
            are.
        every: the number of steps between two observations of the model.
        inputs: whether the statistics are of the layers' inputs only, and not of gradients at their outputs.
        capturable: whether a step can be part of a CUDA graph, if no labels are drawn.
    """

    #: The prefix of the names of its state, in a saved state.
    prefix = ""

    sets_lengths = False

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        statistics: Callable[[Sequence[Place]], R],
        *,
        loss: Loss | None,
        labels: Labels,
        biases: bool,
        every: int,
        seed: int,
        inputs: bool = False,
        capturable: bool = False,
    ) -> None:
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LBFGS):
            raise DynamicsError(
                "`optimizer` must be a torch.optim.Optimizer that steps from one gradient, got a "
                f"{type(optimizer).__name__}. Try torch.optim.SGD(model.parameters(), lr=0.1)."
            )
        self.every, seed = count("every", every, least=1), accepted.seed(seed, DynamicsError)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            ranks = torch.distributed.get_world_size()
            if ranks > 1:
                raise DynamicsError(
                    f"Preconditioners work in one process, since ranks do not share statistics; got {ranks}."
                )
        found, self.unsupported = places(model)
        if not accepted.flag(biases, "biases", DynamicsError):
            found = tuple(replace(place, biased=False) for place in found)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for place in found:
            if not all(id(p) in held for p in place.parameters()):
                self.unsupported[place.name] = "the optimizer does not hold its parameters"
            elif (why := self._refuses(place)) is not None:
                self.unsupported[place.name] = why
        self._places = tuple(place for place in found if place.name not in self.unsupported)
        if not self._places:
            raise DynamicsError(
                f"The model has no layers to precondition: {self.unsupported or 'nothing in it is trained'}. It needs "
                "an nn.Linear, or an nn.Conv2d without groups, whose parameters the optimizer holds."
            )
        super().__init__(optimizer)
        self._statistics: R = statistics(self._places)
        self._observer = Observer(
            model, self._places, self._statistics,
            loss=loss, labels=labels, seed=seed, inputs=inputs, capturable=capturable,
        )  # fmt: skip
        self._steps = 0
        self._missed: set[int] = set()

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the modules whose gradients are preconditioned; `unsupported` has the others, with reasons."""
        return tuple(place.name for place in self._places)

    def _shown(self) -> tuple[list[str], list[str], list[list[str]]]:
        said = [f"Preconditions the gradients of {few(self.layers)}."]
        if self.unsupported:
            said.append(f"Passes those of other layers on as they are: {few(list(self.unsupported))}.")
        _, heads, rows = super()._shown()
        return said, heads, rows

    def close(self) -> None:
        """Stop observing the model. The statistics so far are used in later steps."""
        self._observer.detach()

    def _refuses(self, place: Place) -> str | None:
        """Return why a layer is passed through, or None."""
        return None

    @abstractmethod
    def _directions(self, gradients: dict[int, Parts]) -> dict[int, Parts]:
        """Return C⁻¹ ∇J of the layers."""

    def _take(self, closure: Callable[[], Any] | None) -> None:
        """Step the inner optimizer on preconditioned gradients."""
        if is_capturing() and not self._observer.capturable:
            raise DynamicsError(
                f"A step of {type(self).__name__} with these options cannot be captured in a CUDA graph, because its "
                "steps differ, or labels are drawn. Take it outside of one, or use QuasiDiagonal with every=1 and "
                "labels None or 'true'."
            )
        self._statistics.fold()
        parameters, directions = self._at_once() or self._one_by_one()
        own = [p.grad for p in parameters]
        try:
            for p, direction in zip(parameters, directions, strict=True):
                p.grad = direction
            self.inner.step()
        finally:
            for p, grad in zip(parameters, own, strict=True):
                p.grad = grad
        self._steps += 1
        self._observer.looks = self._steps % self.every == 0

    def _at_once(self) -> Exchange | None:
        """Return parameters and their directions, where there is a quick way for all layers, else None."""
        return None

    def _one_by_one(self) -> Exchange:
        gradients = {i: g for i, place in enumerate(self._places) if (g := place.gradient()) is not None}
        self._warn([i for i in gradients if not self._statistics.known(i)])
        directions = self._directions({i: g for i, g in gradients.items() if self._statistics.known(i)})
        pairs = [pair for i, direction in directions.items() for pair in self._places[i].exchanged(direction)]
        return [p for p, _ in pairs], [new for _, new in pairs]

    def _warn(self, unknown: list[int]) -> None:
        if not unknown:
            return
        self._observer.inputs = False  # perhaps the loss is not a function of the model's output
        names = [self._places[i].name for i in unknown if i not in self._missed]
        self._missed.update(unknown)
        if names:
            warnings.warn(
                f"There are no statistics of the layers {', '.join(names)}, so their gradients are used as they are: "
                "no observed pass of the model called them. Call the model as a whole, not compiled, and the layers as "
                "modules.",
                stacklevel=8,
            )

    def _save(self) -> dict[str, Any]:
        saved = super()._save()
        state = dict(saved["state"])
        for i, key in self._keys(saved).items():
            # In a copy: torch's optimizers take a state that is not empty for one that they have set up.
            if self._statistics.known(i):
                own = {**self._statistics.state(i), "steps": self._steps, "generator": self._observer.state()}
                state[key] = {**state.get(key, {}), **{self.prefix + name: value for name, value in own.items()}}
        return {**saved, "state": state}

    def _load(self, state_dict: dict[str, Any]) -> None:
        check_state(self.inner, state_dict)
        mine: dict[int, dict[str, Any]] = {}
        for i, key in self._keys(state_dict).items():
            given = state_dict["state"].get(key, {})
            mine[i] = {k.removeprefix(self.prefix): v for k, v in given.items() if k.startswith(self.prefix)}
            for name, shape in self._statistics.shapes(i).items():
                if mine[i] and (name not in mine[i] or tuple(mine[i][name].shape) != shape):
                    found = list(mine[i][name].shape) if name in mine[i] else "none"
                    raise DynamicsError(
                        f"The state's {self.prefix + name!r} of {self._places[i].name!r} must have shape "
                        f"{list(shape)}, got {found}: the state belongs to another model or another preconditioner."
                    )
        rest = {
            # What an optimizer keeps under a key of its own belongs to no parameter, and need not be a dictionary.
            key: {k: v for k, v in own.items() if not k.startswith(self.prefix)} if isinstance(own, dict) else own
            for key, own in state_dict["state"].items()
        }
        load_uncast(self.inner, {**state_dict, "state": rest})
        for i, own in mine.items():
            steps, drawn = own.pop("steps", 0), own.pop("generator", None)
            self._statistics.load(i, own)
            if own:
                self._steps = int(steps)
                self._observer.load(drawn)
        self._observer.looks = self._steps % self.every == 0

    def _keys(self, state_dict: dict[str, Any]) -> dict[int, Any]:
        """Return the key of the weight of each layer in a state."""
        of = {
            id(p): key
            for mine, saved in zip(self.inner.param_groups, state_dict["param_groups"], strict=True)
            for p, key in zip(mine["params"], saved["params"], strict=True)
        }
        return {i: of[id(place.module.weight)] for i, place in enumerate(self._places)}
