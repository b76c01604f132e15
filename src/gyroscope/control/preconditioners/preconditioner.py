"""A torch optimizer around another that gives it preconditioned gradients, C⁻¹ ∇J for ∇J, layer by layer.

The inner optimizer's rule is then that of the new coordinates up to C: momentum and adaptive steps are of
preconditioned gradients, weight decay is not preconditioned (equation 27 of Grosse's chapter 5). Gradients are the
training loop's own again after the step.
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
from gyroscope.base.accepted import real
from gyroscope.control.preconditioners.observer import Labels, Observer, Statistics
from gyroscope.control.preconditioners.places import Parts, Place, places
from gyroscope.control.torch_contract import Wrapper, check_state, load_uncast
from gyroscope.errors import DynamicsError
from gyroscope.passes.likelihood import Loss
from gyroscope.theory.given import count
from gyroscope.vectors.chunks import is_capturing


class Running(Statistics, Protocol):
    """Statistics with running averages."""

    def fold(self) -> None:
        """Take what was told since the last time into the averages."""

    def known(self, index: int) -> bool:
        """Whether there is any of this layer."""

    def state(self, index: int) -> dict[str, Any]:
        """What is known of a layer, by name."""

    def load(self, index: int, state: dict[str, Any]) -> None:
        """Go on from that; an empty state forgets the layer."""

    def shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """The shapes that the tensors of a layer's state have, by name."""


R = TypeVar("R", bound=Running)
Exchange = tuple[list[Tensor], list[Tensor]]


class Preconditioner(Wrapper, Generic[R]):
    """Base of the preconditioners: watches the model, and steps the inner optimizer on preconditioned gradients.

    Args:
        optimizer: the inner optimizer.
        model: the model that is trained, which is called as a whole.
        statistics: makes the running averages for its layers.
        loss, labels, seed: where gradients at the layers' outputs come from.
        biases: whether biases are preconditioned, together with the weights; otherwise their gradients stay.
        every: steps between two looks at the model.
        inputs: whether the statistics are of the layers' inputs alone, and not of gradients at their outputs.
        capturable: whether a step may be part of a CUDA graph, where no labels are drawn.
    """

    #: What the names of its states begin with, in a saved state.
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
                f"The optimizer is a {type(optimizer).__name__}; accepted is a torch.optim.Optimizer that steps from "
                "one gradient, such as torch.optim.SGD(model.parameters(), lr=0.1)."
            )
        self.every, seed = count("every", every, least=1), accepted.seed(seed, DynamicsError)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            ranks = torch.distributed.get_world_size()
            if ranks > 1:
                raise DynamicsError(
                    f"Statistics are of one process, and {ranks} ranks would drift apart: train in one."
                )
        found, self.unsupported = places(model)
        if not biases:
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
                f"The model has no layers to precondition: {self.unsupported or 'nothing in it is trained'}. Accepted "
                "are nn.Linear and nn.Conv2d without groups whose parameters the optimizer holds."
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

    def close(self) -> None:
        """Stop watching the model. What is known so far goes on to precondition."""
        self._observer.detach()

    def _refuses(self, place: Place) -> str | None:
        """Why a layer is passed through, if so."""
        return None

    @abstractmethod
    def _directions(self, gradients: dict[int, Parts]) -> dict[int, Parts]:
        """C⁻¹ ∇J of layers."""

    def _take(self) -> None:
        """Step the inner optimizer on preconditioned gradients."""
        if is_capturing() and not self._observer.capturable:
            raise DynamicsError(
                f"A step of {type(self).__name__} as it is set up cannot be captured in a CUDA graph, since not all of "
                "its steps are alike, or labels are drawn: take it outside of one. One that can be captured is that of "
                "QuasiDiagonal with every=1 and labels None or 'true'."
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
        """Parameters and what they get for their gradients, where there is a quick way for all layers."""
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
        self._observer.inputs = False  # perhaps the loss is of something other than the model's output
        names = [self._places[i].name for i in unknown if i not in self._missed]
        self._missed.update(unknown)
        if names:
            warnings.warn(
                f"Nothing is known of the layers {', '.join(names)}, so their gradients are taken as they are: no "
                "pass of the model was seen to call them. Call the model as a whole, not compiled, and the layers as "
                "modules.",
                stacklevel=5,
            )

    def _save(self) -> dict[str, Any]:
        saved = self.inner.state_dict()
        state = dict(saved["state"])
        for i, key in self._keys(saved).items():
            # In a copy: a state that is not empty is taken by torch's optimizers for one they have set up.
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
                    found = list(mine[i][name].shape) if name in mine[i] else "missing"
                    raise DynamicsError(
                        f"The state's {self.prefix + name!r} of {self._places[i].name!r} is {found}, and {list(shape)} "
                        "here: it belongs to another model, or to another preconditioner."
                    )
        rest = {
            # What an optimizer keeps under a key of its own is no parameter's, and need not be a dictionary.
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
        """What the weight of each layer is called in a state."""
        of = {
            id(p): key
            for mine, saved in zip(self.inner.param_groups, state_dict["param_groups"], strict=True)
            for p, key in zip(mine["params"], saved["params"], strict=True)
        }
        return {i: of[id(place.module.weight)] for i, place in enumerate(self._places)}


def check_number(name: str, given: Any, *, below: float) -> None:
    """Refuse what is no number from 0."""
    if not 0 <= real(given) < below:
        raise DynamicsError(f"{name} is {given!r}; accepted is a finite number from 0, below {below:g}.")
