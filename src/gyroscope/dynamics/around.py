"""A torch optimizer around another, which a controller may be put around in turn.

`param_groups`, `state` and `defaults` are the inner optimizer's own objects, as with the controllers' `Wrapper`. It is
none of these: controllers take no other for their inner optimizer, since both would decide how far a step goes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch.optim import Optimizer

from gyroscope.control.torch_contract import load_uncast

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class Around(Optimizer):
    """Base of what steps an inner optimizer on other gradients; subclasses give `step`.

    >>> import torch
    >>> inner = torch.optim.SGD([torch.zeros(2)], lr=0.5)
    >>> Around(inner).param_groups is inner.param_groups
    True
    """

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self._attach()

    def _attach(self) -> None:
        """What Optimizer.__init__ sets up besides parameters."""
        for name in _HOOKS:
            self.__dict__.setdefault(name, OrderedDict())
        self._warned_capturable_if_run_uncaptured = True
        self._patch_step_function()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.inner.param_groups = value

    @property
    def state(self) -> Any:
        """The inner optimizer's state."""
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self.inner.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.inner.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer, which steps its parameters on their gradients as they are."""
        self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state with what is known of layers."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state = self._save()
        for post in self._optimizer_state_dict_post_hooks.values():
            changed = post(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; a state of another model is refused before anything is changed."""
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._load(state_dict)
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

    def _save(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def _load(self, state_dict: dict[str, Any]) -> None:
        load_uncast(self.inner, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        # Schedulers and trainers put a `step` on the instance that calls this very object: a copy must not have it.
        return {k: v for k, v in self.__dict__.items() if k not in (*_HOOKS, "step")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()

    def __repr__(self) -> str:
        return f"{type(self).__name__} over {self.inner!r}"
