"""Layca, an optimizer wrapper whose learning rate is the angle by which each layer turns, and its relatives."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from gyroscope.base.accepted import choice, flag, real, whole
from gyroscope.base.hooks import is_capturing
from gyroscope.control.joint import main
from gyroscope.control.rates import checked_multipliers
from gyroscope.control.roster import Entry, Roster, check_saved, check_weight, few, own_in
from gyroscope.control.steering import Law, Members, Others, Steering, Work
from gyroscope.control.torch_contract import OWN, Wrapper, add_group, as_group, is_rate, load_uncast, with_dtypes
from gyroscope.errors import ControlError
from gyroscope.layers.layer import Layer

#: The steps after which the host looks for layers that do not turn.
_FIRST_STEPS = 10


class Layca(Wrapper):
    """Layer-level controlled amount of weight rotation, over any torch optimizer.

    Each step turns the weights w of every layer by exactly arctan ρ, in the direction s that the inner optimizer
    proposes, and keeps their norm at ‖w₀‖ (Algorithm 1 of the layer-rotation paper):

        w' = k [(1 − ρ⟨w,s⟩/(‖w‖t)) w + (ρ‖w‖/t) s],   t² = ⟨s,s⟩ − ⟨w,s⟩²/⟨w,w⟩,   k = ‖w₀‖/(‖w‖√(1+ρ²))

    The `lr` of a parameter group is ρ: schedulers change it, and what the inner optimizer writes there is undone. The
    inner optimizer's own learning rate, weight decay along w, and gradient scale no longer matter. w₀ are the weights
    at the first step; their norm is saved with the state.

    Args:
        optimizer: the inner optimizer. A group that holds both layers and other parameters becomes two groups.
        model_or_layers: the model, or a list from `gyroscope.layers`, in forward order. By default every parameter of
            two or more dimensions is a layer, in group order.
        others: `"inner"` to step the parameters that are not layers with the inner optimizer, `"frozen"` to leave them
            as they are (the papers' runs).
        others_lr: the learning rate of parameters that are not layers; by default that of their group.
        alpha: α of equation 1 in [−1, 1]: negative turns the first layers faster, positive the last.
        multipliers: one factor on ρ per layer, instead of α.
        project: whether to perform operation 1, the projection onto the tangent space.
        reproject: whether to perform operation 4, the projection back to the sphere.
        scale: `"relative"` for steps of length ρ‖w‖, `"unit"` for steps of length ρ.
        growth: without operation 4, the largest growth of a norm in a step, as a share of ‖w₀‖.
        nonfinite: `"skip"` leaves a layer as it is in a step where its gradient is not finite, and sets what is not
            finite in the inner state to 0; `"raise"` rejects the step (this waits for the device every step).
            Parameters that are not layers are protected by `"raise"` only.
        zero_norm: `"raise"` rejects a layer whose weights are all zero, `"skip"` leaves it as it is.
        reads_weights: whether an inner optimizer that is not torch's own depends on the values of the weights.

    Example:
        >>> import torch, gyroscope
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=3**-3), model)
        >>> before = model[0].weight.detach().clone()
        >>> model(torch.randn(16, 4)).square().sum().backward(); optimizer.step()
        >>> cosine = torch.cosine_similarity(before.flatten(), model[0].weight.flatten(), dim=0)
        >>> bool((torch.tan(torch.arccos(cosine)) - 3**-3).abs() < 1e-3)
        True

    Reference:
        Carbonnelle and De Vleeschouwer, Layer rotation: a surprisingly powerful indicator of generalization in
        deep networks?, Algorithm 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model_or_layers: nn.Module | Sequence[Layer] | None = None,
        *,
        others: Others = "inner",
        others_lr: float | None = None,
        alpha: float = 0.0,
        multipliers: Sequence[float] | None = None,
        project: bool = True,
        reproject: bool = True,
        scale: Literal["relative", "unit"] = "relative",
        growth: float | None = None,
        nonfinite: Literal["skip", "raise"] = "skip",
        zero_norm: Literal["raise", "skip"] = "raise",
        reads_weights: bool | None = None,
    ) -> None:
        _check_steps(optimizer)
        super().__init__(optimizer)
        optimizer = self.inner
        choice(others, "others", ("inner", "frozen"), ControlError)
        choice(nonfinite, "nonfinite", ("skip", "raise"), ControlError)
        choice(zero_norm, "zero_norm", ("raise", "skip"), ControlError)
        choice(scale, "scale", ("relative", "unit"), ControlError)
        project, reproject = flag(project, "project", ControlError), flag(reproject, "reproject", ControlError)
        reads_weights = None if reads_weights is None else flag(reads_weights, "reads_weights", ControlError)
        if growth is not None and (reproject or not real(growth) >= 0):
            raise ControlError(
                f"`growth` must be a number ≥ 0 with reproject=False, or None, got {growth!r}. Try 1e-4."
            )
        if others_lr is not None and not 0 <= real(others_lr) < math.inf:
            raise ControlError(f"`others_lr` must be a finite number ≥ 0, got {others_lr!r}. Try 0.01.")
        growth, others_lr = (None if given is None else real(given) for given in (growth, others_lr))
        for i, group in enumerate(optimizer.param_groups):
            _check_rate(group.get("lr"), f"group {i}")
        roster = Roster.of(optimizer, model_or_layers)
        factors = checked_multipliers(multipliers, alpha, roster.layers)
        # Everything has been checked; nothing was changed before this line.
        roster.split(optimizer, others_lr, unsplittable=isinstance(optimizer, LBFGS))
        self.nonfinite = nonfinite
        self.zero_norm = zero_norm
        self._alpha = alpha if multipliers is None else None
        self._others_lr = others_lr
        self._roster = roster
        self._steering = Steering(optimizer, roster, Law(project, scale, reproject, growth), others, reads_weights)
        self._steering.multipliers = factors
        self._met: set[int] = set()
        self._until_looked = _FIRST_STEPS
        self._loaded: dict[int, dict[str, Tensor]] = {}
        self._listen()

    @property
    def law(self) -> Law:
        """The operations that are performed, of the four."""
        return self._steering.law

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the controlled layers, in forward order."""
        return tuple(e.name for e in self._roster.in_order())

    @property
    def multipliers(self) -> Tensor:
        """A copy of the factors on ρ, one per layer in forward order. To change them, set them all.

        The values of a tensor on an accelerator are not checked, which would wait for the device.
        """
        return self._steering.multipliers.clone()

    @multipliers.setter
    def multipliers(self, value: Sequence[float] | Tensor) -> None:
        n = self._roster.layers
        if isinstance(value, Tensor) and value.shape != (n,):
            raise ControlError(f"`multipliers` must have shape ({n},), one per layer, got {tuple(value.shape)}.")
        if isinstance(value, Tensor) and value.device.type not in ("cpu", "meta") and not value.is_complex():
            self._steering.multipliers = value.detach().clone()
        else:
            self._steering.multipliers = checked_multipliers(value, 0.0, n)
        self._alpha = None
        self._steering.write_multipliers()

    def controls(self, group: int) -> bool:
        """Return whether a parameter group holds layers, so that its `lr` is ρ."""
        if whole(group, 0) is None:
            raise ControlError(f"`group` must be the index of a parameter group, an integer ≥ 0, got {group!r}. Try 0.")
        return group < len(self._roster.groups) and bool(self._roster.groups[group])

    def rates(self) -> dict[str, float]:
        """Return the current rate ρ_l of each layer, by name (waits for the device)."""
        factors = self.multipliers.tolist()
        rate = {
            e.index: float(self.param_groups[g]["lr"]) * factors[e.index]
            for g, entries in enumerate(self._roster.groups)
            for e in entries.values()
        }
        return {e.name: rate[e.index] for e in self._roster.in_order()}

    def skipped(self) -> dict[str, int]:
        """Return the number of skipped steps per layer, by name, where there are any (waits for the device).

        A step is skipped where something is not finite, or where an optimizer that is not torch's own moves the layer
        by rounding only.
        """
        ledgers = [ledger.skipped.tolist() for ledger in self._steering.ledgers.values()]
        counts = {
            e.name: max((max(one[r] for r in e.rows) for one in ledgers), default=0) for e in self._roster.in_order()
        }
        return {name: n for name, n in counts.items() if n}

    def _shown(self) -> tuple[list[str], list[str], list[list[str]]]:
        rates, turns = self.rates(), self.law == Law()
        rows: dict[int, list[str]] = {}
        for g, j, e in self._roster.places():
            p, rate = self.param_groups[g]["params"][j], rates[e.name]
            own = self._own(p, e) if e.index in self._met else self._loaded.get(e.index, {})
            radius = own.get("radius")
            norm = (
                "–"
                if radius is None
                else few([f"{r:.3g}" if r > 0 else "–" for r in radius.reshape(-1).tolist()], most=3)
            )
            angle = [f"{math.degrees(math.atan(rate)):.3g}°"] if turns else []
            rows[e.index] = [e.name, " × ".join(map(str, p.shape)), f"{rate:.3g}", *angle, norm]
        heads = ["layer", "shape", "ρ", *(["turns per step"] if turns else []), "‖w₀‖"]
        return [self.law.said(), *self._said_of_others()], heads, [rows[i] for i in sorted(rows)]

    def _said_of_others(self) -> list[str]:
        n, rates = 0, []
        for i, group in enumerate(self.param_groups):
            others = len(group["params"]) - (len(self._roster.groups[i]) if self.controls(i) else 0)
            n += others
            rates += [f"{float(group['lr']):.3g}"] if others else []
        if not n:
            return []
        said = f"{n:,} other parameter{' is' if n == 1 else 's are'} "
        if self._steering.others == "frozen":
            return [f"{said}left as they are." if n > 1 else f"{said}left as it is."]
        return [f"{said}stepped by {type(self.inner).__name__} at lr {' and '.join(dict.fromkeys(rates))}."]

    def _check(self) -> None:
        self._roster.refuse_changes(self.param_groups, begun=bool(self._met))
        for i in self._roster.controlled():
            lr = self.param_groups[i].get("lr")
            if type(lr) is not float or not 0.0 <= lr < math.inf:
                _check_rate(lr, f"group {i}")

    def _needs_closure(self) -> bool:
        return self._steering.proposer.reads_weights

    def _take(self, closure: Callable[[], Any] | None) -> Any:
        """Turn every layer that has a gradient by arctan ρ, and step the other parameters."""
        ready = self._steering.ready()
        work = self._steering.work(but=set(ready), late=closure is not None)
        if self.nonfinite == "raise" and closure is None and (names := self._steering.nonfinite()):
            raise ControlError(
                f"The gradients of {few(names)} are not finite; nothing was changed. Lower the rate, clip, or "
                'use nonfinite="skip" to skip the step of such layers.'
            )
        self._meet(work)
        if self._steering.learns:
            self._steering.learn_norms()
        loss = self._steering.step(work, ready, closure)
        # A scheduler built on the inner optimizer asks whether that has stepped; the kernels step in its place.
        self.inner.__dict__["_opt_called"] = True
        self._publish(work)
        if self._until_looked:
            self._look_for_skipped()
        return loss

    def _meet(self, work: dict[int, Work]) -> None:
        """Check layers that step for the first time: reject a zero norm, and take a loaded radius."""
        if len(self._met) == self._roster.layers:
            return
        new = {}
        for i, w in work.items():
            fresh = [k for k, e in enumerate(w.entries) if e.index not in self._met]
            if fresh:
                new[i] = Work(w.group, [w.params[k] for k in fresh], [], Members(w.entries[k] for k in fresh))
        grows = self._steering.grows > 0
        zeros: list[tuple[Tensor, Entry, list[int]]] = []
        if new and (grows or self.zero_norm == "raise") and not is_capturing():
            zeros = self._steering.zero_layers(new)
        if zeros and not grows:
            names = [
                e.name if e.segments == 1 else f"{e.name} ({len(which)} of its {e.segments} segments)"
                for _, e, which in zeros
            ]
            raise ControlError(
                f"These layers have zero norm, so no direction to turn from: {few(names)}; nothing was changed. "
                "Initialize them, exclude them (gyroscope.layers(model, exclude=...)) so that the inner optimizer "
                'steps them, or use zero_norm="skip" to leave them as they are.'
            )
        for p, e, which in zeros:
            self._steering.grow_from_zero(p, e, which)
        for w in new.values():
            for p, e in zip(w.params, w.entries, strict=True):
                ledger = self._steering.ledger(p.device)
                columns = {"radius": ledger.radius, "norm_moments": ledger.moments}
                for name, value in self._loaded.pop(e.index, {}).items():
                    rows = columns[name][e.row : e.row + e.segments]
                    rows.copy_(value.reshape(rows.shape))

    def _publish(self, work: dict[int, Work]) -> None:
        """Put the radii of layers that have now stepped into the state, where checkpoints find them.

        Not before the first step: torch's optimizers take a state that is not empty for one that they have set up.
        """
        if len(self._met) == self._roster.layers:
            return
        for w in work.values():
            for p, e in zip(w.params, w.entries, strict=True):
                if e.index not in self._met:
                    self._met.add(e.index)
                    self._show(p, e)

    def _look_for_skipped(self) -> None:
        """Warn after the first steps about layers that skipped most of them (then, and only then, waits)."""
        self._until_looked -= 1
        if self._until_looked or is_capturing():
            return
        skipped = [f"{name} ({n} so far)" for name, n in self.skipped().items() if 2 * n > _FIRST_STEPS]
        if skipped:
            reads = self._steering.proposer.reads_weights
            short = ", or too short to be more than rounding; try reads_weights=False" if reads else ""
            warnings.warn(
                f"These layers skip steps, in which they do not turn: {few(skipped)}. What "
                f"{type(main(self.inner)).__name__} proposed was not finite{short}. Check the gradients, and keep "
                "weights in float32 (autocast computes in lower precision).",
                stacklevel=7,
            )

    def _own(self, p: Tensor, e: Entry) -> dict[str, Tensor]:
        """Return views of the layer's numbers in the ledger that belong into a checkpoint."""
        ledger, rows = self._steering.ledger(p.device), slice(e.row, e.row + e.segments)
        own = {"radius": ledger.radius[e.row] if e.segments == 1 else ledger.radius[rows]}
        return {**own, "norm_moments": ledger.moments[rows]} if self._steering.learns else own

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters of two or more dimensions become the last layers.

        Its other parameters have the learning rate `others_lr`, if that was given; a group without layers may have its
        own.
        """
        self._roster.refuse_changes(self.param_groups, begun=bool(self._met))
        group = as_group(param_group)
        check_group(group["params"], group.get("lr", self.inner.defaults.get("lr")))
        add_group(self.inner, group)
        old, ledgers = self._steering.multipliers, self._steering.ledgers
        self._roster.extend(self.inner.param_groups[-1])
        others_lr = self._others_lr if self._roster.groups[-1] or "lr" not in param_group else None
        self._roster.split(self.inner, others_lr, unsplittable=isinstance(self.inner, LBFGS), added=True)
        n = self._roster.layers
        if self._alpha is not None:
            self._steering.multipliers = checked_multipliers(None, self._alpha, n)
        else:
            self._steering.multipliers = torch.cat([old, old.new_ones(n - len(old))])
        self._steering.grow(ledgers)
        self._show_own()

    def _save(self) -> dict[str, Any]:
        self._roster.refuse_changes(self.param_groups, begun=bool(self._met))
        saved = with_dtypes(self.inner.state_dict(), self.inner)
        state = dict(saved["state"])
        for g, j, e in self._roster.places():
            own = self._loaded.get(e.index, {})
            if not own and e.index in self._met:
                own = self._own(self.param_groups[g]["params"][j], e)
            if own:
                # In a copy: a state that was deleted must stay empty, or the inner takes it for one that it has set up.
                key = saved["param_groups"][g]["params"][j]
                state[key] = {**state.get(key, {}), **own}
        if state:
            # torch's distributed checkpoints expect an entry for every parameter as soon as there is one for any.
            state = {**{key: {} for group in saved["param_groups"] for key in group["params"]}, **state}
        shapes = self._roster.shapes(self.param_groups)
        about = {"layers": list(self.layers), "shapes": shapes, "multipliers": self.multipliers}
        return {**saved, "state": state, **about}

    def _load(self, state_dict: dict[str, Any]) -> None:
        check_saved(state_dict, self.inner, self._roster)
        factors = state_dict.get("multipliers")
        if factors is not None:
            factors = checked_multipliers(factors, 0.0, self._roster.layers)
        # For the inner optimizer a radius alone is not a state: it would look for the rest of it.
        alone = [k for k, own in state_dict["state"].items() if isinstance(own, Mapping) and set(own) <= set(OWN)]
        state = {**state_dict["state"], **{k: {} for k in alone}}
        own = own_in(state_dict, self._roster)
        load_uncast(self.inner, {**state_dict, "state": state})
        self._take_own(own)
        if factors is not None and factors.tolist() != self.multipliers.tolist():
            self.multipliers = factors

    def _take_own(self, loaded: dict[int, dict[str, Tensor]]) -> None:
        """Keep loaded radii, in their saved precision, until the layers' next steps: they win over new ones.

        A layer without a loaded radius had not stepped when the state was saved: its next step sets the radius.
        """
        self._met.clear()
        self._loaded = dict(loaded)
        self._steering.forget()
        for _, _, e in self._roster.places():
            if e.index not in loaded:
                for ledger in self._steering.ledgers.values():
                    ledger.radius[e.row : e.row + e.segments] = -1
                    ledger.moments[e.row : e.row + e.segments] = 0

    def _listen(self) -> None:
        """Register hooks for states that are loaded into the inner optimizer directly.

        Radii are read before torch casts them to the parameters' dtype.
        """
        me = weakref.ref(self)
        given: list[dict[int, dict[str, Tensor]]] = []

        def loading(_: Optimizer, state_dict: dict[str, Any]) -> None:
            given.clear()
            with suppress(KeyError, IndexError):  # a state of another model, which torch is about to reject
                if (wrapper := me()) is not None:
                    given.append(own_in(state_dict, wrapper._roster))

        def loaded(_: Optimizer) -> None:
            if given and (wrapper := me()) is not None:
                wrapper._take_own(given.pop())

        self.inner.register_load_state_dict_pre_hook(loading)
        self.inner.register_load_state_dict_post_hook(loaded)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._roster.hold(self.param_groups)
        self._listen()
        self._show_own()

    def _show_own(self) -> None:
        """Put views of the ledgers into the state again, once there are new ledgers or a new state."""
        for g, j, e in self._roster.places():
            if e.index in self._met:
                self._show(self.param_groups[g]["params"][j], e)

    def _show(self, p: Tensor, e: Entry) -> None:
        """Put a view of a layer's ledger into its state, unless the inner optimizer has not set that state up."""
        if self.state.get(p) or self._steering.proposer.rule.kernel == "sgd":  # which may keep none
            self.state[p].update(self._own(p, e))


def _check_rate(lr: Any, group: str) -> None:
    """Reject an invalid rate. Where a tensor on an accelerator holds one, layers stay as they are."""
    if not is_rate(lr):
        raise ControlError(
            f"`lr` of {group} must be a finite number ≥ 0, the rate ρ = tan θ of a step, got {lr!r}. Try 3**-3."
        )


def check_group(params: Sequence[Any], lr: Any) -> None:
    """Reject a group before it is added, if its matrices cannot be layers or its rate is invalid.

    Args:
        params: the parameters, from `as_group`.
        lr: the rate of the group; the value of a tensor on an accelerator is not read, which would wait.

    >>> import torch
    >>> check_group(list(torch.nn.Linear(3, 2).parameters()), 0.1)
    """
    for j, one in enumerate(params):
        named = isinstance(one, tuple) and len(one) == 2
        p = one[1] if named else one
        if isinstance(p, Tensor) and p.dim() >= 2:
            name = f"Parameter {one[0] if named else j} of the group"
            check_weight(name, p, "Leave it out, and step it with an optimizer of its own.")
    _check_rate(lr, "the group")


def _check_steps(optimizer: Optimizer) -> None:
    """Reject an optimizer that takes sparse gradients only, or puts weights of its own into the model.

    Schedule-free optimizers do so with `train()` and `eval()`, Lookahead every few steps, TRAC in every step. Layca
    turns the weights that it finds in the model, and the optimizer would then replace them.
    """
    inside: Any = optimizer
    while isinstance(inside, Optimizer):
        if isinstance(inside, SparseAdam):
            raise ControlError(
                "`optimizer` must step dense gradients, got SparseAdam, which takes sparse ones only. Try "
                "torch.optim.Adam."
            )
        names = {kind.__name__ for kind in type(inside).__mro__}
        # Accelerate's wrapper only passes `train` and `eval` on.
        switches = "AcceleratedOptimizer" not in names and all(
            callable(getattr(inside, name, None)) for name in ("train", "eval")
        )
        if switches or names & {"Lookahead", "TRAC"} or any("ScheduleFree" in name for name in names):
            raise ControlError(
                f"`optimizer` must step the model's weights only, got a {type(inside).__name__}, which keeps weights "
                "of its own and puts them into the model, so that a layer would not stay where it was turned to. Try "
                "torch.optim.AdamW."
            )
        its = (getattr(inside, name, None) for name in ("optimizer", "inner", "base_optimizer"))
        inside = next((one for one in its if isinstance(one, Optimizer) and one is not inside), None)


Layers = nn.Module | Sequence[Layer] | None


def hyperball(optimizer: Optimizer, model_or_layers: Layers = None, **options: Any) -> Layca:
    """Return Layca without operation 1: the relative step is taken as proposed, then the norm is restored.

        w' = ‖w₀‖ (w + ρ‖w‖ s/‖s‖) / ‖w + ρ‖w‖ s/‖s‖‖

    A layer turns by less than arctan ρ where its displacement has a part along w.

    >>> import torch
    >>> hyperball(torch.optim.SGD([torch.ones(2, 2)], lr=0.1)).law.project
    False
    """
    return Layca(optimizer, model_or_layers, project=False, **options)


def relative_update(optimizer: Optimizer, model_or_layers: Layers = None, **options: Any) -> Layca:
    """Return Layca with operation 2 only: every step is ρ times as long as the weights, and norms are free.

        w' = w + ρ‖w‖ s/‖s‖

    >>> import torch
    >>> relative_update(torch.optim.SGD([torch.ones(2, 2)], lr=0.1)).law.reproject
    False
    """
    return Layca(optimizer, model_or_layers, project=False, reproject=False, **options)


def lars(optimizer: Optimizer, model_or_layers: Layers = None, *, growth: float | None = 1e-4, **options: Any) -> Layca:
    """Return LARS, or equivalently NG_adap, as the papers ran it: relative updates with limited growth of norms.

        w' = w + ρ‖w‖ s/‖s‖, shrunk so that ‖w'‖ ≤ ‖w‖ + growth ‖w₀‖

    The papers limit the growth to 1e-4 ‖w₀‖ per step, to prevent numerical errors; `growth=None` does not.

    >>> import torch
    >>> lars(torch.optim.SGD([torch.ones(2, 2)], lr=0.1)).law.growth
    0.0001

    Reference:
        Ginsburg, Gitman and You, Large batch training of convolutional networks with layer-wise adaptive rate
        scaling; Yu et al., Normalized gradient with adaptive stepsize method for deep neural network training.
    """
    return Layca(optimizer, model_or_layers, project=False, reproject=False, growth=growth, **options)


def block_normalized(optimizer: Optimizer, model_or_layers: Layers = None, **options: Any) -> Layca:
    """Return block-normalized updates: the step of every layer has length ρ, whatever its weights.

        w' = w + ρ s/‖s‖

    >>> import torch
    >>> block_normalized(torch.optim.SGD([torch.ones(2, 2)], lr=0.1)).law.scale
    'unit'
    """
    return Layca(optimizer, model_or_layers, project=False, reproject=False, scale="unit", **options)
