"""A torch optimizer around another, as schedulers, scalers, trainers and checkpointing expect it.

`param_groups`, `state` and `defaults` are the inner optimizer's own objects. Nothing else is passed through: a wrapper
that also proxied `_step_supports_amp_scaling` would make GradScaler leave the unscaling to a fused inner optimizer that
is never asked to do it, and steps would be too long by the scale.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks as _post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as _pre_hooks

from gyroscope.base import markup
from gyroscope.base.accepted import real
from gyroscope.control.joint import main
from gyroscope.errors import ControlError
from gyroscope.layers.class_names import ancestry

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


#: What Layca keeps of a layer next to the inner optimizer's state: ‖w₀‖, and the moments of a norm that is learned.
OWN = ("radius", "norm_moments")

# The wrapper that decides the length of an optimizer's steps, by the optimizer inside.
_controllers: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Wrapper]] = weakref.WeakKeyDictionary()


def controller_of(optimizer: Optimizer) -> Wrapper | None:
    """Return the controller around an optimizer, or None; preconditioners may be in between.

    While an optimizer inside a controller steps, the weights are not in their place.

    >>> import gyroscope
    >>> inner = torch.optim.SGD([torch.ones(2, 2)], lr=0.1)
    >>> outer = gyroscope.Layca(inner)
    >>> controller_of(inner) is outer, controller_of(outer)
    (True, None)
    """
    known = _controllers.get(optimizer)
    return None if known is None else known()


def bare(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper that only passes calls on, such as Accelerate's AcceleratedOptimizer.

    Such a wrapper has an attribute `optimizer`, a property `param_groups`, and no hooks of its own, because it does not
    call Optimizer.__init__. Wrappers that change the steps keep groups and hooks of their own, and are returned as
    they are, like everything else.

    >>> sgd = torch.optim.SGD([torch.ones(2, 2)], lr=0.1)
    >>> bare(sgd) is sgd
    True
    """
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, Optimizer):
        return optimizer
    passes_on = isinstance(getattr(type(optimizer), "param_groups", None), property)
    has_hooks = _HOOKS[0] in getattr(optimizer, "__dict__", {})
    if isinstance(optimizer, Optimizer) and (has_hooks or not passes_on):
        return optimizer
    return bare(inner)


def check_holds_parameters(optimizer: Any, error: type[Exception]) -> None:
    """Raise the caller's `error` for optimizers of DeepSpeed, which step flattened copies of the parameters.

    DeepSpeed also returns torch's optimizers, where it neither shards nor keeps copies in another precision.

    >>> class DeepSpeedOptimizer:
    ...     "Has the name of the base class of DeepSpeed's optimizers."
    >>> check_holds_parameters(DeepSpeedOptimizer(), ValueError)
    Traceback (most recent call last):
    ValueError: `optimizer` must step the parameters of the model, got DeepSpeed's DeepSpeedOptimizer, ...
    """
    inside = optimizer
    while inside is not None:
        if "DeepSpeedOptimizer" in ancestry(inside):
            raise error(
                f"`optimizer` must step the parameters of the model, got DeepSpeed's {type(inside).__name__}, which "
                "steps flattened copies of them (ZeRO), so there are no layers. Use FSDP2 (fully_shard) or DDP."
            )
        within = getattr(inside, "optimizer", None)
        inside = None if within is inside else within


class Wrapper(Optimizer):
    """Base of controllers and preconditioners: a torch optimizer whose groups, state and defaults are those of `inner`.

    Attributes:
        sets_lengths: whether it decides the length of a step, and not only its direction. Of two such wrappers around
            each other, the outer one would undo what the inner one decides.
    """

    sets_lengths = True

    def __init__(self, inner: Optimizer) -> None:
        check_holds_parameters(inner, ControlError)
        self._prepared: Any = None
        # Only this one: other wrappers may change the step, and then their step is wanted.
        while isinstance(inner, Optimizer) and "AcceleratedOptimizer" in ancestry(inner):
            if getattr(inner, "scaler", None) is not None:
                raise ControlError(
                    "`optimizer` must not be prepared yet where Accelerate scales the loss (fp16), because its "
                    f"optimizer also unscales gradients. Try accelerator.prepare({type(self).__name__}(optimizer, "
                    "...)), with the optimizer as it was before."
                )
            self._prepared, inner = inner, inner.optimizer  # type: ignore[attr-defined]
        if not isinstance(inner, Optimizer):
            raise ControlError(
                f"`optimizer` must be a torch.optim.Optimizer, got a {type(inner).__name__}. Try "
                "torch.optim.SGD(model.parameters(), lr=3**-3)."
            )
        for name in _HOOKS:  # wrappers of others may not have called Optimizer.__init__
            if not hasattr(inner, name):
                setattr(inner, name, OrderedDict())
        if not hasattr(inner, "defaults"):
            inner.defaults = {}
        others_form = type(inner).state_dict is not Optimizer.state_dict
        if others_form and not {"state", "param_groups"} <= set(inner.state_dict()):
            raise ControlError(
                f"The state_dict of `optimizer` must have 'state' and 'param_groups', as that of torch's optimizers "
                f"has; that of {type(inner).__name__} does not, so it cannot be saved. Try torch.optim.AdamW."
            )
        self.inner = inner
        self._attach()

    @staticmethod
    def profile_hook_step(func: Any) -> Any:
        """Wrap `step` as torch does for hooks and profilers, where there are any: it costs as much as a launch.

        Observers that are not profilers, such as execution traces, only see the inner optimizer's step.
        """
        around = Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self._accumulating:
                return None
            heard = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or _pre_hooks or _post_hooks
            if heard or torch.compiler.is_compiling() or torch._C._autograd._profiler_enabled():
                return around(self, *args, **kwargs)
            return func(self, *args, **kwargs)

        return step

    def _attach(self) -> None:
        """Set up what Optimizer.__init__ does besides parameters."""
        for name in _HOOKS:
            if name not in self.__dict__:
                self.__dict__[name] = OrderedDict()
        self._warned_capturable_if_run_uncaptured = True
        self._patch_step_function()
        for one in self._controlled():
            _controllers[one] = weakref.ref(self)
            while isinstance(one, Wrapper) and not one.sets_lengths:  # a preconditioner, whose inner takes its steps
                one = one.inner
                _controllers[one] = weakref.ref(self)

    def _controlled(self) -> list[Optimizer]:
        """Return the optimizers inside whose own steps are replaced."""
        return [self.inner] if self.sets_lengths else []

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
        """Add a group to the inner optimizer."""
        add_group(self.inner, as_group(param_group))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        if not self._accumulating:
            self.inner.zero_grad(set_to_none)

    @property
    def _accumulating(self) -> bool:
        """True while Accelerate, which prepared the optimizer inside, is between the batches of one step."""
        if self._prepared is None:
            return False
        state = getattr(self._prepared, "gradient_state", None)
        return state is not None and not state.sync_gradients

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        return self._uncompiled(closure) if torch.compiler.is_compiling() else self._step(closure)

    @_disable_dynamo  # addresses or gradients are exchanged; unlike torch.compiler.disable, this loads it when used
    def _uncompiled(self, closure: Callable[[], Any] | None) -> Any:
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if closure is not None and not callable(closure):
            raise ControlError(
                "`closure` must be a function without arguments that returns the loss, got a "
                f"{type(closure).__name__}. Call step() without one where the loss has been computed already."
            )
        self._check()
        if closure is None:
            self._take(None)
            return None
        evaluate = torch.enable_grad()(closure)
        if self._needs_closure():
            return self._take(evaluate)
        loss = evaluate()
        self._take(None)
        return loss

    def _check(self) -> None:
        """Reject a step before the closure is evaluated and anything is changed."""

    def _needs_closure(self) -> bool:
        """Return whether `_take` evaluates the closure itself, perhaps several times."""
        return False

    def _take(self, closure: Callable[[], Any] | None) -> Any:
        """Step from the gradients as they are, or from those that the closure computes; return the closure's loss."""
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, after this wrapper's own hooks."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state = self._save()
        for post in self._optimizer_state_dict_post_hooks.values():
            changed = post(self, state)
            if changed is not None:
                state = changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; a state of another model is rejected before anything is changed."""
        if isinstance(state_dict, Mapping):
            state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        self._load(state_dict)
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

    def _save(self) -> dict[str, Any]:
        return with_dtypes(self.inner.state_dict(), self.inner)

    def _load(self, state_dict: dict[str, Any]) -> None:
        load_uncast(self.inner, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        # Schedulers and trainers put a `step` on the instance that calls this very object: a copy must not have it.
        # Nor is it Accelerate's any more.
        return {k: v for k, v in self.__dict__.items() if k not in (*_HOOKS, "step", "_prepared")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepared = None
        self._attach()

    def __repr__(self) -> str:
        return f"{type(self).__name__} over {self.inner!r}"

    def _repr_html_(self) -> str:
        said, heads, rows = self._shown()
        names, inside = [type(self).__name__], self.inner
        while isinstance(inside, Wrapper):
            names, inside = [*names, type(inside).__name__], inside.inner
        title = f"<p><b>{markup.text(' over '.join([*names, type(main(inside)).__name__]))}</b></p>"
        return "".join([title, *map(markup.paragraph, said), markup.table(heads, rows)])

    def _shown(self) -> tuple[list[str], list[str], list[list[str]]]:
        """Return what a notebook shows: sentences, the heads of a table, and its rows (may wait for the device)."""
        rows = [
            [f"{i}", f"{len(group['params']):,}", markup.number(float(group.get("lr", math.nan)))]
            for i, group in enumerate(self.param_groups)
        ]
        return [], ["group", "parameters", "lr"], rows


def as_group(given: Any) -> dict[str, Any]:
    """Return a copy of a group that is to be added, with its parameters as a list; reject what is not a group.

    The parameters are tensors, or pairs of names and tensors. Entries that are neither are left for the optimizer to
    reject (`add_group`). An iterator is consumed.

    >>> import torch
    >>> len(as_group({"params": torch.nn.Linear(3, 2).parameters()})["params"])
    2
    """
    if not isinstance(given, Mapping) or "params" not in given:
        what = f"a dict with the keys {sorted(map(str, given))}" if isinstance(given, Mapping) else repr(given)
        raise ControlError(
            f"`param_group` must be a dict with 'params', got {what}. Try {{'params': layer.parameters()}}."
        )
    params = given["params"]
    if isinstance(params, Set):
        raise ControlError("`params` of the group must be a list, got a set, which has no order.")
    if isinstance(params, Tensor):
        params = [params]
    if not isinstance(params, Iterable) or isinstance(params, str | bytes):
        raise ControlError(
            f"`params` of the group must be a tensor or a list of tensors, got {params!r}. Try layer.parameters()."
        )
    return {**given, "params": list(params)}


def add_group(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Add a group to an optimizer; a group that the optimizer rejects is not there afterwards.

    >>> sgd = torch.optim.SGD([torch.ones(2, 2)], lr=0.1)
    >>> add_group(sgd, {"params": [torch.ones(3)]})
    >>> len(sgd.param_groups)
    2
    """
    before = len(optimizer.param_groups)
    try:
        optimizer.add_param_group(group)
    except Exception as error:
        del optimizer.param_groups[before:]
        if isinstance(error, ControlError):
            raise
        raise ControlError(
            f"{type(optimizer).__name__} rejected the group ({error}); nothing was changed. Give parameters that it "
            "does not have yet, and options that it knows."
        ) from error


def floats_in(held: Any) -> Iterator[Tensor]:
    """Yield the tensors of floating-point numbers in what an optimizer holds under one name of a parameter's state.

    >>> list(floats_in([torch.ones(1), {"count": torch.tensor(3), "mean": torch.zeros(1)}, "adam"]))
    [tensor([1.]), tensor([0.])]
    """
    if isinstance(held, Tensor):
        if held.is_floating_point():
            yield held
    elif isinstance(held, Mapping | list | tuple):
        for part in held.values() if isinstance(held, Mapping) else held:
            yield from floats_in(part)


def is_rate(given: Any) -> bool:
    """Return whether this can be a rate: a finite number ≥ 0.

    Of a tensor on an accelerator only the size is checked, because reading its value would wait for the device.

    >>> import torch
    >>> is_rate(0.1), is_rate(torch.tensor([0.1])), is_rate(torch.tensor(-0.1)), is_rate("0.1")
    (True, True, False, False)
    """
    if isinstance(given, Tensor) and given.device.type != "cpu":
        return given.numel() == 1
    return 0.0 <= real(given) < math.inf


def check_whole(state_dict: dict[str, Any]) -> None:
    """Reject what is not a state, or a damaged one."""
    given: Any = state_dict
    if not isinstance(given, Mapping):
        raise ControlError(
            f"`state_dict` must be a dict, got a {type(given).__name__}. Pass what state_dict() returned."
        )
    if "param_groups" not in state_dict or "state" not in state_dict:
        raise ControlError(
            "`state_dict` must have the keys 'state' and 'param_groups', got "
            f"{sorted(map(str, state_dict))}. Pass what state_dict() returned."
        )
    state, groups = state_dict["state"], state_dict["param_groups"]
    whole = isinstance(state, Mapping) and isinstance(groups, list | tuple) and all(map(_is_group, groups))
    # What an optimizer keeps under other keys is copied by torch.
    if not whole or not all(isinstance(state.get(key, {}), Mapping) for group in groups for key in group["params"]):
        raise ControlError(
            "The state is damaged: its 'state' must hold a dict for each parameter, and its 'param_groups' a dict with "
            "'params' for each group. Pass what state_dict() returned, or load another checkpoint."
        )


def check_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Reject a state that cannot belong to the optimizer's parameters."""
    check_whole(state_dict)
    saved, own = state_dict["param_groups"], optimizer.param_groups
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in own]:
        raise ControlError(
            f"The state has groups of {[len(g['params']) for g in saved]} parameters, but this optimizer has groups of "
            f"{[len(g['params']) for g in own]}: the state belongs to another model or another grouping. Build the "
            "optimizer as it was when the state was saved."
        )
    for group, mine in zip(saved, own, strict=True):
        # Other optimizers keep scalars or rows under the same names (NovoGrad, Nero).
        kind = _innermost(optimizer, mine).__name__
        needed, shaped = (_NEEDED.get(kind, ()), _SHAPED) if _is_known(optimizer, mine) else ((), set())
        for key, p in zip(group["params"], mine["params"], strict=True):
            kept = state_dict["state"].get(key, {})
            # These alone are what Layca keeps of a layer whose state was deleted.
            lost = [] if set(kept) <= set(OWN) else [name for name in needed if kept.get(name) is None]
            if lost:
                foreign = set(needed).isdisjoint(kept)
                raise ControlError(
                    f"The state is {'that of another inner optimizer' if foreign else 'damaged'}: it has no "
                    f"{lost[0]!r} of parameter {key}, without which {kind} cannot step. Build the optimizer as it was "
                    "when the state was saved, or load another checkpoint."
                )
            for name, value in kept.items():
                if isinstance(value, Tensor) and value.is_meta:
                    raise ControlError(
                        f"The state's {name!r} is on the meta device and has no values. Load the checkpoint "
                        "with torch.load(file, map_location='cpu')."
                    )
                if name in shaped and value is not None and getattr(value, "shape", None) != p.shape:
                    what = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is {value!r:.80}"
                    raise ControlError(
                        f"The state's {name!r} {what} for a parameter of shape {tuple(p.shape)}: the state belongs to "
                        "another model."
                    )


def _innermost(optimizer: Optimizer, group: dict[str, Any] | None = None) -> type[Optimizer]:
    while isinstance(optimizer, Wrapper):
        optimizer = optimizer.inner
    return type(main(optimizer, group))


def _is_known(optimizer: Optimizer, group: dict[str, Any] | None = None) -> bool:
    # Muon's module is torch.optim itself.
    return f"{_innermost(optimizer, group).__module__}.".startswith(("torch.optim.", "gyroscope."))


def _is_group(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple)


# State that torch's optimizers keep in the shape of the parameter.
_SHAPED = {
    "momentum_buffer",
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "square_avg",
    "grad_avg",
    "sum",
    "prev",
    "acc_delta",
    "exp_inf",
    "step_size",
}


# State without which torch's optimizers cannot step, once they have any for a parameter.
_NEEDED = {
    "Adam": ("step", "exp_avg", "exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "NAdam": ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    "RAdam": ("step", "exp_avg", "exp_avg_sq"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "Adagrad": ("step", "sum"),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "RMSprop": ("step", "square_avg"),
    "Rprop": ("step", "prev", "step_size"),
    "ASGD": ("step", "eta", "mu", "ax"),
}


def load_uncast(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a state into an optimizer, where every tensor keeps the dtype that it was saved in.

    `load_state_dict` casts floating-point state to the parameter's dtype: a float32 norm would come back from a
    bfloat16 model with three digits. State that had the dtype of its parameter has that of the new one, as in torch,
    since most optimizers cannot step with two.
    """
    check_state(optimizer, state_dict)
    dtypes = state_dict.get("dtypes")
    dtypes = dtypes if isinstance(dtypes, Mapping) else {}
    before: dict[str, Any] = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    heard: Any = getattr(optimizer, "_optimizer_load_state_dict_post_hooks", OrderedDict())
    try:
        # The hooks are called once the state has been found complete.
        optimizer._optimizer_load_state_dict_post_hooks = OrderedDict()
        also = {"dtypes": dtypes} if isinstance(optimizer, Wrapper) else {}
        optimizer.load_state_dict({k: state_dict[k] for k in before} | also)
        # Older states lack newer options, which torch fills in; the first step would fail on what is still missing.
        pairs = list(zip(before["param_groups"], optimizer.param_groups, strict=True))
        lost = [name for name in optimizer.defaults for old, new in pairs if name in old and name not in new]
        if lost and _is_known(optimizer):
            raise ValueError(f"its groups lack {lost[0]!r}")
        for hook in heard.values():
            hook(optimizer)
    except Exception as error:
        # torch's optimizers check a state after they have taken it.
        for name, value in before.items():
            if getattr(optimizer, name) is not value:
                setattr(optimizer, name, value)
        name = type(main(optimizer)).__name__
        raise ControlError(
            f"The state could not be loaded into the {name} ({type(error).__name__}: {error}); "
            "nothing was changed. Pass what state_dict() returned, or load another checkpoint."
        ) from error
    finally:
        optimizer._optimizer_load_state_dict_post_hooks = heard
    saved = state_dict["param_groups"]
    for group, mine in zip(saved, optimizer.param_groups, strict=True):
        for key, p in zip(group["params"], mine["params"], strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                loaded = optimizer.state[p].get(name)
                if not isinstance(value, Tensor) or not isinstance(loaded, Tensor) or loaded.dtype == value.dtype:
                    continue
                follows = dtypes.get(key) == str(value.dtype) != str(p.dtype)
                if name in OWN or not follows:
                    optimizer.state[p][name] = value.detach().to(loaded.device, copy=True)


def with_dtypes(saved: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return a state of an optimizer, with the dtypes of the parameters by their keys, for `load_uncast`.

    >>> sgd = torch.optim.SGD([torch.zeros(2)])
    >>> with_dtypes(sgd.state_dict(), sgd)["dtypes"]
    {0: 'torch.float32'}
    """
    pairs = zip(saved["param_groups"], optimizer.param_groups, strict=True)
    keyed = (pair for group, mine in pairs for pair in zip(group["params"], mine["params"], strict=True))
    return {**saved, "dtypes": {key: str(p.dtype) for key, p in keyed}}
