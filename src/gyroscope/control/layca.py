"""Layca: an optimizer wrapper whose learning rate is the angle by which each layer turns in a step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gyroscope.base.accepted import flag, real, whole
from gyroscope.control.rates import checked_multipliers
from gyroscope.control.roster import Entry, Roster, check_saved, check_weight, few, radii_in
from gyroscope.control.steering import Law, Others, Steering, Work
from gyroscope.control.torch_contract import Wrapper, add_group, as_group, check_choice, is_rate, load_uncast
from gyroscope.errors import ControlError
from gyroscope.layers.layer import Layer
from gyroscope.vectors.launch import is_capturing


class Layca(Wrapper):
    """Layer-level controlled amount of weight rotation, over any torch optimizer.

    Each step turns the weights w of every layer by exactly arctan ρ, in the direction s the inner optimizer
    proposes, and keeps their norm at ‖w₀‖ (Algorithm 1 of the layer-rotation paper):

        w' = k [(1 − ρ⟨w,s⟩/(‖w‖t)) w + (ρ‖w‖/t) s],   t² = ⟨s,s⟩ − ⟨w,s⟩²/⟨w,w⟩,   k = ‖w₀‖/(‖w‖√(1+ρ²))

    The `lr` of a parameter group is ρ: schedulers move it, and what the inner optimizer writes there is undone. The
    inner optimizer's own learning rate, weight decay along w, and gradient scale no longer matter. w₀ is what the
    weights are at the first step; its norm is saved with the state.

    Args:
        optimizer: the inner optimizer. A group that holds both layers and other parameters becomes two groups.
        model_or_layers: the model, or a list from `gyroscope.layers`, in forward order. Without it every parameter
            of two or more dimensions is a layer, in group order.
        others: what happens to parameters that are not layers: `"inner"` steps them with the inner optimizer,
            `"frozen"` leaves them as they are (the papers' runs).
        others_lr: their learning rate; by default their group's own.
        alpha: α of equation 1 in [−1, 1]: negative turns the first layers faster, positive the last.
        multipliers: one factor on ρ a layer, instead of α.
        project: operation 1, the projection onto the tangent space.
        reproject: operation 4, the projection back to the sphere.
        scale: `"relative"` for steps of length ρ‖w‖, `"unit"` for steps of length ρ.
        growth: without operation 4, the most a norm may grow in a step, as a share of ‖w₀‖.
        nonfinite: `"skip"` leaves a layer as it is in a step where its gradient is not finite, and clears what is
            not finite from the inner state; `"raise"` refuses the step (this waits for the device every step).
            Parameters that are not layers are protected by `"raise"` alone.
        zero_norm: `"raise"` refuses to control a layer whose weights are all zero, `"skip"` leaves it as it is.
        reads_weights: whether an inner optimizer that is not torch's own depends on the weights' values.

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
        check_weights_are_its(optimizer)
        super().__init__(optimizer)
        optimizer = self.inner
        check_choice("others", others, ("inner", "frozen"))
        check_choice("nonfinite", nonfinite, ("skip", "raise"))
        check_choice("zero_norm", zero_norm, ("raise", "skip"))
        check_choice("scale", scale, ("relative", "unit"))
        project, reproject = flag(project, "project", ControlError), flag(reproject, "reproject", ControlError)
        reads_weights = None if reads_weights is None else flag(reads_weights, "reads_weights", ControlError)
        if growth is not None and (reproject or not real(growth) >= 0):
            raise ControlError(f"growth is {growth!r}; it needs reproject=False and a value from 0.")
        if others_lr is not None and not 0 <= real(others_lr) < math.inf:
            raise ControlError(f"others_lr is {others_lr!r}; accepted are finite numbers from 0.")
        growth, others_lr = (None if given is None else real(given) for given in (growth, others_lr))
        for i, group in enumerate(optimizer.param_groups):
            check_rate(group, i)
        roster = Roster.of(optimizer, model_or_layers)
        factors = checked_multipliers(multipliers, alpha, roster.layers)
        # Everything has been checked; only now is anything changed.
        roster.split(optimizer, others_lr, unsplittable=isinstance(optimizer, LBFGS))
        self.nonfinite = nonfinite
        self.zero_norm = zero_norm
        self._alpha = alpha if multipliers is None else None
        self._others_lr = others_lr
        self._roster = roster
        self._steering = Steering(optimizer, roster, Law(project, scale, reproject, growth), others, reads_weights)
        self._steering.multipliers = factors
        self._met: set[int] = set()
        self._radii: dict[int, Tensor] = {}
        self._listen()

    @property
    def law(self) -> Law:
        """Which of the four operations are performed."""
        return self._steering.law

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the controlled layers, in forward order."""
        return tuple(e.name for e in self._roster.in_order())

    @property
    def multipliers(self) -> Tensor:
        """One factor on ρ a layer, in forward order: a copy. To change them, set them all.

        A tensor on an accelerator is taken as it is, without looking at its values, which would wait for the device.
        """
        return self._steering.multipliers.clone()

    @multipliers.setter
    def multipliers(self, value: Sequence[float] | Tensor) -> None:
        n = self._roster.layers
        if isinstance(value, Tensor) and value.shape != (n,):
            raise ControlError(f"multipliers has shape {tuple(value.shape)}; this optimizer controls {n} layers.")
        if isinstance(value, Tensor) and value.device.type not in ("cpu", "meta") and not value.is_complex():
            self._steering.multipliers = value.detach().clone()
        else:
            self._steering.multipliers = checked_multipliers(value, 0.0, n)
        self._alpha = None
        self._steering.write_multipliers()

    def controls(self, group: int) -> bool:
        """Whether a parameter group holds layers, so that its `lr` is ρ."""
        if whole(group, 0) is None:
            raise ControlError(f"`group` must be the number of a parameter group, from 0, got {group!r}. Try 0.")
        return group < len(self._roster.groups) and bool(self._roster.groups[group])

    def rates(self) -> dict[str, float]:
        """The rate ρ_l at which each layer turns now, by name (waits for the device)."""
        factors = self.multipliers.tolist()
        rate = {
            e.index: float(self.param_groups[g]["lr"]) * factors[e.index]
            for g, entries in enumerate(self._roster.groups)
            for e in entries.values()
        }
        return {e.name: rate[e.index] for e in self._roster.in_order()}

    def skipped(self) -> dict[str, int]:
        """How many steps layers sat out, by name (waits for the device).

        Something was not finite, or an optimizer that is not torch's own moved the layer by rounding alone.
        """
        ledgers = [ledger.skipped.tolist() for ledger in self._steering.ledgers.values()]
        counts = {
            e.name: max((max(one[r] for r in e.rows) for one in ledgers), default=0) for e in self._roster.in_order()
        }
        return {name: n for name, n in counts.items() if n}

    def _check(self) -> None:
        self._roster.refuse_changes(self.param_groups, begun=bool(self._met))
        for i in self._roster.controlled():
            lr = self.param_groups[i].get("lr")
            if type(lr) is not float or not 0.0 <= lr < math.inf:
                check_rate(self.param_groups[i], i)

    def _needs_closure(self) -> bool:
        return self._steering.proposer.reads_weights

    def _take(self, closure: Callable[[], Any] | None) -> Any:
        """Turn every layer that has a gradient by arctan ρ, and step the other parameters."""
        ready = self._steering.ready()
        work = self._steering.work(but=set(ready), late=closure is not None)
        if self.nonfinite == "raise" and closure is None and (names := self._steering.nonfinite()):
            raise ControlError(
                f"The gradients of {few(names)} are not finite; nothing was changed. Lower the rate, clip, or "
                'use nonfinite="skip" to leave such layers out.'
            )
        self._meet(work)
        loss = self._steering.step(work, ready, closure)
        # A scheduler built on the inner optimizer asks whether that has stepped; the kernels do it in its place.
        self.inner.__dict__["_opt_called"] = True
        self._publish(work)
        return loss

    def _meet(self, work: dict[int, Work]) -> None:
        """Look at layers that step for the first time: a zero norm is refused, a loaded radius is theirs."""
        if len(self._met) == self._roster.layers:
            return
        new = {}
        for i, w in work.items():
            fresh = [k for k, e in enumerate(w.entries) if e.index not in self._met]
            if fresh:
                new[i] = Work(w.group, [w.params[k] for k in fresh], [], [w.entries[k] for k in fresh])
        if new and self.zero_norm == "raise" and not is_capturing() and (names := self._steering.zero_layers(new)):
            raise ControlError(
                f"These layers have zero norm, so no direction to turn from: {few(names)}; nothing was changed. "
                "Initialise them, exclude them (gyroscope.layers(model, exclude=...)) so that the inner optimizer "
                'steps them, or use zero_norm="skip" to leave them as they are.'
            )
        for w in new.values():
            for p, e in zip(w.params, w.entries, strict=True):
                radius = self._radii.pop(e.index, None)
                if radius is not None:
                    ledger = self._steering.ledger(p.device)
                    ledger.radius[e.row : e.row + e.segments] = radius.to(ledger.radius).reshape(-1)

    def _publish(self, work: dict[int, Work]) -> None:
        """Show the radii of layers that have now stepped in the state, where checkpoints find them.

        Not before the first step: torch's optimizers take a state that is not empty for one they have set up.
        """
        if len(self._met) == self._roster.layers:
            return
        for w in work.values():
            for p, e in zip(w.params, w.entries, strict=True):
                if e.index not in self._met:
                    self._met.add(e.index)
                    self._show_radius(p, e)

    def _show_radius(self, p: Tensor, e: Entry) -> None:
        self.state[p]["radius"] = self._radius(p, e)

    def _radius(self, p: Tensor, e: Entry) -> Tensor:
        """A view of the layer's radii in the ledger."""
        radius = self._steering.ledger(p.device).radius
        return radius[e.row] if e.segments == 1 else radius[e.row : e.row + e.segments]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters of two or more dimensions become layers, after those there are.

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
        for g, j, e in self._roster.places():
            if e.index in self._met:
                self._show_radius(self.param_groups[g]["params"][j], e)

    def _save(self) -> dict[str, Any]:
        self._roster.refuse_changes(self.param_groups, begun=bool(self._met))
        saved = self.inner.state_dict()
        state = dict(saved["state"])
        for g, j, e in self._roster.places():
            radius = self._radii.get(e.index)
            if radius is None and e.index in self._met:
                radius = self._radius(self.param_groups[g]["params"][j], e)
            if radius is not None:
                # In a copy: a state that was thrown away must stay empty, or the inner takes it for one it has set up.
                key = saved["param_groups"][g]["params"][j]
                state[key] = {**state.get(key, {}), "radius": radius}
        if state:
            # torch's distributed checkpoints want an entry for every parameter as soon as there is one for any.
            state = {**{key: {} for group in saved["param_groups"] for key in group["params"]}, **state}
        shapes = self._roster.shapes(self.param_groups)
        about = {"layers": list(self.layers), "shapes": shapes, "multipliers": self.multipliers}
        return {**saved, "state": state, **about}

    def _load(self, state_dict: dict[str, Any]) -> None:
        check_saved(state_dict, self.inner, self._roster)
        factors = state_dict.get("multipliers")
        if factors is not None:
            factors = checked_multipliers(factors, 0.0, self._roster.layers)
        # To the inner optimizer a radius alone is no state: it would look for the rest of it.
        alone = [k for k, own in state_dict["state"].items() if isinstance(own, Mapping) and set(own) == {"radius"}]
        state = {**state_dict["state"], **{k: {} for k in alone}}
        radii = radii_in(state_dict, self._roster)
        load_uncast(self.inner, {**state_dict, "state": state})
        self._take_radii(radii)
        if factors is not None and factors.tolist() != self.multipliers.tolist():
            self.multipliers = factors

    def _take_radii(self, radii: dict[int, Tensor]) -> None:
        """A loaded radius wins over a fresh one, in the digits it was saved in: keep it until the layer's next step.

        A layer that comes without one had not stepped when the state was saved: its next step finds the radius.
        """
        self._met.clear()
        self._radii = dict(radii)
        self._steering.forget()
        for _, _, e in self._roster.places():
            if e.index not in radii:
                for ledger in self._steering.ledgers.values():
                    ledger.radius[e.row : e.row + e.segments] = -1

    def _listen(self) -> None:
        """Hear of a state that is loaded into the inner optimizer behind this one's back.

        It is looked at before torch casts it to the parameters' dtype.
        """
        me = weakref.ref(self)
        given: list[dict[int, Tensor]] = []

        def loading(_: Optimizer, state_dict: dict[str, Any]) -> None:
            given.clear()
            with suppress(KeyError, IndexError):  # a state of another model, which torch is about to refuse
                if (wrapper := me()) is not None:
                    given.append(radii_in(state_dict, wrapper._roster))

        def loaded(_: Optimizer) -> None:
            if given and (wrapper := me()) is not None:
                wrapper._take_radii(given.pop())

        self.inner.register_load_state_dict_pre_hook(loading)
        self.inner.register_load_state_dict_post_hook(loaded)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._roster.hold(self.param_groups)
        self._listen()
        for g, j, e in self._roster.places():
            if e.index in self._met:
                self._show_radius(self.param_groups[g]["params"][j], e)


def check_rate(group: dict[str, Any], i: int) -> None:
    """Refuse a rate that is no angle. Where a tensor on an accelerator holds one, layers are left as they are."""
    lr = group.get("lr")
    if lr is None:
        raise ControlError(f"Group {i} has no 'lr', which Layca takes for the rate; give the inner optimizer one.")
    if not is_rate(lr):
        raise ControlError(
            f"Group {i} has lr {lr!r}; Layca's rate is tan θ of a step, a finite value from 0 (try 3**-3)."
        )


def check_group(params: Sequence[Any], lr: Any) -> None:
    """Refuse a group that is to be added, before it is, if its matrices cannot be layers or its rate is no angle.

    Args:
        params: what `as_group` has under "params".
        lr: the group's rate; the value of a tensor on an accelerator is not looked at, which would wait.

    >>> import torch
    >>> check_group(list(torch.nn.Linear(3, 2).parameters()), 0.1)
    """
    for j, one in enumerate(params):
        named = isinstance(one, tuple) and len(one) == 2
        p = one[1] if named else one
        if isinstance(p, Tensor) and p.dim() >= 2:
            name = f"Parameter {one[0] if named else j} of the group"
            check_weight(name, p, "Leave it out, and step it with an optimizer of its own.")
    if not is_rate(lr):
        raise ControlError(
            f"The group has lr {lr!r}; Layca's rate is tan θ of a step, a finite value from 0 (try 3**-3)."
        )


def check_weights_are_its(optimizer: Optimizer) -> None:
    """Refuse an optimizer that keeps weights of its own and exchanges the model's for them.

    Schedule-free optimizers do with `train()` and `eval()`, Lookahead every few steps, TRAC in every step. Layca turns
    the weights it finds in the model, and what the optimizer then puts there is another point.
    """
    inside: Any = optimizer
    while isinstance(inside, Optimizer):
        names = {kind.__name__ for kind in type(inside).__mro__}
        switches = all(callable(getattr(inside, name, None)) for name in ("train", "eval"))
        if names & {"Lookahead", "TRAC"} or (switches and "AcceleratedOptimizer" not in names):  # which passes them on
            raise ControlError(
                f"The inner optimizer is a {type(inside).__name__}, which keeps weights of its own and puts them into "
                "the model, so that a layer would not stay where it was turned to. Use an optimizer that steps the "
                "model's weights alone, such as torch.optim.AdamW."
            )
        its = (getattr(inside, name, None) for name in ("optimizer", "inner", "base_optimizer"))
        inside = next((one for one in its if isinstance(one, Optimizer) and one is not inside), None)


Layers = nn.Module | Sequence[Layer] | None


def hyperball(optimizer: Optimizer, model_or_layers: Layers = None, **options: Any) -> Layca:
    """Layca without operation 1: the relative step is taken as proposed, then the norm is put back.

        w' = ‖w₀‖ (w + ρ‖w‖ s/‖s‖) / ‖w + ρ‖w‖ s/‖s‖‖

    A layer turns by less than arctan ρ where its displacement has a part along w.

    >>> import torch
    >>> hyperball(torch.optim.SGD([torch.ones(2, 2)], lr=0.1)).law.project
    False
    """
    return Layca(optimizer, model_or_layers, project=False, **options)


def relative_update(optimizer: Optimizer, model_or_layers: Layers = None, **options: Any) -> Layca:
    """Operation 2 alone: every step is ρ times as long as the layer's weights, and norms are free.

        w' = w + ρ‖w‖ s/‖s‖

    >>> import torch
    >>> relative_update(torch.optim.SGD([torch.ones(2, 2)], lr=0.1)).law.reproject
    False
    """
    return Layca(optimizer, model_or_layers, project=False, reproject=False, **options)


def lars(optimizer: Optimizer, model_or_layers: Layers = None, *, growth: float | None = 1e-4, **options: Any) -> Layca:
    """LARS, or equivalently NG_adap, as the papers ran it: relative updates with the growth of norms limited.

        w' = w + ρ‖w‖ s/‖s‖, shrunk so that ‖w'‖ ≤ ‖w‖ + growth ‖w₀‖

    The papers limit the growth to 1e-4 ‖w₀‖ a step, to prevent numerical errors; `growth=None` does not.

    >>> import torch
    >>> lars(torch.optim.SGD([torch.ones(2, 2)], lr=0.1)).law.growth
    0.0001

    Reference:
        Ginsburg, Gitman and You, Large batch training of convolutional networks with layer-wise adaptive rate
        scaling; Yu et al., Normalized gradient with adaptive stepsize method for deep neural network training.
    """
    return Layca(optimizer, model_or_layers, project=False, reproject=False, growth=growth, **options)


def block_normalized(optimizer: Optimizer, model_or_layers: Layers = None, **options: Any) -> Layca:
    """Block-normalised updates: every layer's step has length ρ, whatever its weights.

        w' = w + ρ s/‖s‖

    >>> import torch
    >>> block_normalized(torch.optim.SGD([torch.ones(2, 2)], lr=0.1)).law.scale
    'unit'
    """
    return Layca(optimizer, model_or_layers, project=False, reproject=False, scale="unit", **options)
