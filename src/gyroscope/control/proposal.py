"""The displacement that an optimizer would take, without taking it.

The displacement is never computed as p_new − p_old in low precision: in bfloat16 at a small learning rate that is
noise. While the optimizer steps, its parameters are elsewhere:

- in a buffer of zeros, where the rule does not read the weights: the buffer then *is* the displacement. Weight decay is
  taken out of the group and added by hand: coupled, to the gradient; decoupled, as the multiple `along` of the weights.
  torch's own optimizers are given other tensors to step (`StandIns`), unless hooks would see them. Otherwise the
  parameters themselves point there, which costs the host several times as much;
- in a copy of the weights in float32 or better, where the rule reads them, or may (unknown optimizers). The change of
  the copy is the displacement. A change of a few roundings of the weights has no direction: it becomes NaN, and the
  step is skipped. (Not for sharded weights, of which a rank sees a part.)

Gradients and weights are restored, bit for bit, before this returns, also when the optimizer raises.

Three facts about torch's optimizers decide how (`Rule`): how weight decay enters (`"coupled"` adds λw to the gradient,
`"decoupled"` subtracts ηλw from the weights), whether the rule reads the weights otherwise, and whether the fused
kernel does the same arithmetic, so that the rule runs inside the pass that computes the inner products.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import is_
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from gyroscope.control.joint import Joint, main
from gyroscope.control.sgd_amom import SGD_AMom
from gyroscope.errors import ControlError
from gyroscope.vectors.layout import any_sharded, as_sharded, is_sharded, local

Group = dict[str, Any]
Decay = Literal["none", "coupled", "decoupled", "unknown"]


@dataclass(frozen=True)
class Rule:
    """The rule by which an optimizer class turns a gradient into a displacement.

    Attributes:
        decay: how weight decay enters, unless the group sets `decoupled_weight_decay`.
        reads_weights: whether the rule needs the values of the weights for more than weight decay.
        kernel: the name of the rule in the fused kernel, if it has one.
        first: the name of the state that holds the running mean of gradients, if there is one.
        second: the name of the state that holds the running mean (or sum, or maximum) of squares, if there is one.
    """

    decay: Decay = "coupled"
    reads_weights: bool = False
    kernel: str | None = None
    first: str | None = None
    second: str | None = None


_RULES: dict[type[Optimizer], Rule] = {
    torch.optim.SGD: Rule(kernel="sgd", first="momentum_buffer"),
    SGD_AMom: Rule(kernel="sgd_amom", first="momentum_buffer"),
    torch.optim.Adam: Rule(kernel="adam", first="exp_avg", second="exp_avg_sq"),
    torch.optim.AdamW: Rule(decay="decoupled", kernel="adam", first="exp_avg", second="exp_avg_sq"),
    torch.optim.RMSprop: Rule(kernel="rmsprop", second="square_avg"),
    torch.optim.Adagrad: Rule(kernel="adagrad", second="sum"),
    torch.optim.NAdam: Rule(kernel="nadam", first="exp_avg", second="exp_avg_sq"),
    torch.optim.RAdam: Rule(kernel="radam", first="exp_avg", second="exp_avg_sq"),
    torch.optim.Adamax: Rule(kernel="adamax", first="exp_avg", second="exp_inf"),
    torch.optim.Adadelta: Rule(),
    torch.optim.Rprop: Rule(decay="none"),
    torch.optim.Muon: Rule(decay="decoupled"),
}

_UNKNOWN = Rule(decay="unknown", reads_weights=True)


def rule_of(optimizer: Optimizer) -> Rule:
    """Return the rule of the optimizer's class; a subclass may do anything, so of it only the decay is taken as known.

    >>> rule_of(torch.optim.NAdam([torch.zeros(2, 2)])).reads_weights
    False
    """
    kind = type(main(optimizer))
    base = next((_RULES[one] for one in kind.__mro__ if one in _RULES), _UNKNOWN)
    return base if kind in _RULES else replace(_UNKNOWN, decay=base.decay)


def decay_of(rule: Rule, group: Group) -> tuple[Decay, float]:
    """Return how weight decay enters in a group, and its amount."""
    amount = float(group.get("weight_decay", 0.0) or 0.0)
    if amount == 0.0 or rule.decay == "none":
        return "none", 0.0
    return ("decoupled" if group.get("decoupled_weight_decay", False) else rule.decay), amount


def kernel_of(rule: Rule, group: Group) -> str | None:
    """Return the kernel's rule for the options of a group, or None where the optimizer's own step is taken."""
    if rule.kernel is None or group.get("differentiable") or group.get("amsgrad") or group.get("centered"):
        return None
    if isinstance(group.get("weight_decay"), torch.Tensor):
        return None
    if rule.kernel == "rmsprop" and group.get("momentum", 0.0) > 0:
        return None
    if rule.kernel == "sgd":
        momentum = group["momentum"]
        if isinstance(momentum, torch.Tensor):
            return None
        return "sgd" if momentum == 0 else "nesterov" if group["nesterov"] else "momentum"
    if any(isinstance(beta, torch.Tensor) for beta in group.get("betas", ())):
        return None
    return rule.kernel


class Needs(NamedTuple):
    """The tensors that a rule needs apart from weights and gradients.

    Attributes:
        first: a first moment m.
        second: a second moment v.
        again: the gradient a second time, for the update.
    """

    first: bool = False
    second: bool = False
    again: bool = False


RULES = {
    "given": Needs(again=True),
    "stepped": Needs(again=True),
    "sgd": Needs(again=True),
    "momentum": Needs(first=True),
    "nesterov": Needs(first=True, again=True),
    "sgd_amom": Needs(first=True),
    "adam": Needs(first=True, second=True),
    "nadam": Needs(first=True, second=True, again=True),
    "radam": Needs(first=True, second=True),
    "adamax": Needs(first=True, second=True),
    "rmsprop": Needs(second=True, again=True),
    "adagrad": Needs(second=True, again=True),
}


@dataclass(frozen=True)
class Hyper:
    """The hyperparameters of the inner rule, except the rate; unused ones keep their defaults."""

    decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    along: float = 0.0
    momentum_decay: float = 0.0
    noise: float = 0.0
    maximize: bool = False
    decoupled: bool = False


_LOW = (torch.bfloat16, torch.float16)
_PLAIN = {Tensor, torch.nn.Parameter}

# Displacements up to this many machine epsilons of the weights' norm are skipped: rounding, which adds about 0.2,
# would turn shorter ones by more than 1.5 degrees.
_ROUNDINGS = 8.0


@dataclass
class Proposal:
    """The displacements s = `displacements` + `along` · w of the parameters of one group.

    If `stepped`, `displacements` holds copies of the weights that the optimizer has stepped, and s = copy − w. If they
    are those of `stand_ins`, which are the same object for as long as all tensors lie where they did, nothing about
    either has to be looked up again.
    """

    params: list[Tensor] = field(default_factory=list)
    positions: Sequence[int] = ()
    displacements: list[Tensor] = field(default_factory=list)
    along: float = 0.0
    stepped: bool = False
    stand_ins: StandIns | None = None


class StandIns:
    """Tensors of zeros that an optimizer steps in the place of parameters."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.zeros = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in params]
        for zero, p in zip(self.zeros, params, strict=True):
            if (dtype := getattr(p, "grad_dtype", p.dtype)) != p.dtype:
                zero.grad_dtype = dtype
        self._params = list(params)
        self._at = list(map(Tensor.data_ptr, params))
        self._strides = _unusual_strides(params)

    def fit(self, params: Sequence[Tensor]) -> bool:
        """Return whether these are the parameters, and their memory is where and how it was.

        Their shapes and dtypes are checked by `take`, together with those of the gradients.
        """
        if len(params) != len(self._params) or not all(map(is_, params, self._params)):
            return False
        return list(map(Tensor.data_ptr, params)) == self._at and _unusual_strides(params) == self._strides

    def take(self, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of the parameters; raise RuntimeError if they have other shapes or dtypes now."""
        for zero, grad in zip(self.zeros, grads, strict=True):
            zero.grad = grad

    def give_back(self) -> None:
        """Let go of the gradients."""
        for zero in self.zeros:
            zero.grad = None


def _no_states() -> tuple[list[Any], defaultdict[Any, Any]]:
    return [], defaultdict(dict)


def _unusual_strides(tensors: Sequence[Tensor]) -> list[tuple[int, ...]] | None:
    """Return the strides of the tensors, or None if all are contiguous, which costs half as much to know."""
    return None if all(map(Tensor.is_contiguous, tensors)) else list(map(Tensor.stride, tensors))


class Proposer:
    """Returns the displacements of one optimizer, step after step.

    A caller that raises while it uses them calls `forget`.

    Args:
        optimizer: any torch optimizer.
        reads_weights: whether its rule depends on the values of the weights beyond weight decay. By default known for
            torch's own classes and assumed for others.
        keep_lr: step at the learning rates of the groups. Otherwise the learning rate is 1 where the rule is linear in
            it, so that a half-precision displacement does not underflow at a small rate.
    """

    def __init__(self, optimizer: Optimizer, reads_weights: bool | None = None, *, keep_lr: bool = False) -> None:
        self.optimizer = optimizer
        known = rule_of(optimizer)
        self.rule: Rule = known
        self.reads_weights = known.reads_weights if reads_weights is None else reads_weights
        self.only_direction = not keep_lr
        self.keep_lr = keep_lr or self.reads_weights or isinstance(main(optimizer), torch.optim.Rprop)
        self._buffers: dict[int, tuple[list[Any], list[Tensor]]] = {}
        self._stand_ins: dict[int, StandIns] = {}
        self._states: tuple[list[Any], defaultdict[Any, Any]] = _no_states()  # as known, and with stand-ins for keys

    def propose(
        self,
        positions: Sequence[Sequence[int]],
        *,
        hidden: Collection[int] = (),
        frozen: Sequence[int] = (),
        closure: Callable[[], Any] | None = None,
        subtract: bool = True,
        grads: Mapping[int, Sequence[Tensor]] = MappingProxyType({}),
    ) -> tuple[list[Proposal], Any]:
        """Let the optimizer step, and catch what it does to the parameters at `positions` of each group.

        Args:
            positions: for each group, the parameters that are caught; the others are really stepped.
            hidden: groups that the optimizer does not see.
            frozen: groups whose other parameters are restored.
            closure: passed on to an optimizer that reads the weights, which may call it several times; otherwise the
                caller has evaluated it.
            subtract: return no proposal that is `stepped`.
            grads: the gradients of some groups, if the caller has looked them up: all are there, and none is sparse.
        """
        groups = self.optimizer.param_groups
        proposals = [Proposal() for _ in groups]
        late = closure is not None
        for i, group in enumerate(groups):
            if i in hidden:
                continue
            every, chosen = group["params"], positions[i]
            if i not in grads and (len(chosen) < len(every) or late or any(p.grad is None for p in every)):
                chosen = [j for j in chosen if (p := every[j]).grad is not None or (late and p.requires_grad)]
                every = [every[j] for j in chosen]
            proposals[i] = Proposal(list(every), chosen)
        undo: list[Callable[[], None]] = []
        with self._hide(hidden), self._hold(groups, positions, frozen):
            try:
                harvest = [
                    self._redirect(i, group, proposal, grads.get(i), undo, late=late)
                    for i, (group, proposal) in enumerate(zip(groups, proposals, strict=True))
                    if proposal.params
                ]
                with self._lend_states(proposals):
                    loss = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
                for take in harvest:
                    take()
            finally:
                for action in reversed(undo):
                    action()
        for proposal in proposals if subtract else ():
            self.subtract(proposal)
        return proposals, loss

    def _redirect(
        self,
        i: int,
        group: dict[str, Any],
        proposal: Proposal,
        grads: Sequence[Any] | None,
        undo: list[Callable[[], None]],
        *,
        late: bool,
    ) -> Callable[[], None]:
        """Point a group's parameters elsewhere; return a function that reads the displacements after the step."""
        params = proposal.params
        if grads is None:
            grads = [p.grad for p in params]
            if any(g is not None and g.is_sparse for g in grads):
                raise ControlError(
                    f"A parameter of group {i} has a sparse gradient; nothing was changed. Use "
                    "sparse=False in the embedding, or step it with an optimizer of its own."
                )
        if self._unseen() and _PLAIN.issuperset(map(type, params)):
            return self._stand_in(i, group, proposal, grads, undo)
        if not late:  # gradients that a closure computes stay for the caller
            undo.append(_restore_grads(params))
        if not self.reads_weights:
            decayed = self._take_decay_out(group, proposal, grads, undo)
            for p, g in zip(params, decayed, strict=True) if decayed is not grads else ():
                p.grad = g
        if any_sharded(params):
            return self._redirect_shards(proposal, undo)
        weights = [p.data for p in params]
        if self.reads_weights:
            buffers = [_at_least_float32(w) for w in weights]
            if late and any(b.dtype != w.dtype for b, w in zip(buffers, weights, strict=True)):
                raise ControlError(
                    f"{type(self.optimizer).__name__} evaluates a closure while the weights are held in float32, which "
                    "a model in half precision does not allow. Keep the parameters in float32 and use autocast."
                )
        else:
            buffers = self._zeros(i, weights)

        def put_back() -> None:
            for p, w in zip(params, weights, strict=True):
                if p.dtype != w.dtype:
                    p.grad = None
                p.data = w

        undo.append(put_back)
        for p, buffer in zip(params, buffers, strict=True):
            if p.dtype != buffer.dtype:
                grad, p.grad = p.grad, None
                p.data = buffer
                p.grad = None if grad is None else grad.to(buffer.dtype)
            else:
                p.data = buffer

        def take() -> None:
            for p, buffer in zip(params, buffers, strict=True):
                # An optimizer may have assigned `p.data`, even a tensor of its own that it keeps (SAM does).
                if p.data_ptr() != buffer.data_ptr():
                    buffer.copy_(p.data)
            proposal.displacements = buffers
            proposal.stepped = self.reads_weights

        return take

    def subtract(self, proposal: Proposal) -> None:
        """Turn stepped copies of the weights into displacements."""
        if not proposal.stepped:
            return
        weights = [p.detach() for p in proposal.params]
        for copy, w in zip(proposal.displacements, weights, strict=True):
            copy.sub_(w.to(copy.dtype))
        if self.only_direction:
            _leave_out_roundings(proposal.displacements, weights)
        proposal.stepped = False

    def _take_decay_out(
        self,
        group: dict[str, Any],
        proposal: Proposal,
        grads: Sequence[Any],
        undo: list[Callable[[], None]],
    ) -> Sequence[Tensor]:
        """Take weight decay and the rate out of a group; return the gradients, with coupled decay added."""
        how, decay = self.decay_in(group)
        if how == "coupled":
            sign = -decay if group.get("maximize", False) else decay
            grads = torch._foreach_add(list(grads), proposal.params, alpha=sign)
        if how != "none":
            undo.append(_restore_key(group, "weight_decay"))
            group["weight_decay"] = 0.0
        if not self.keep_lr:
            undo.append(_restore_key(group, "lr"))
            group["lr"] = 1.0
        if how == "decoupled":
            proposal.along = -decay * float(group["lr"])
        return grads

    def decay_in(self, group: Group) -> tuple[Decay, float]:
        """Return how weight decay enters in a group; reject a decay of which that is not known."""
        how, amount = decay_of(self.rule, group)
        if how == "unknown":
            raise ControlError(
                f"`weight_decay` must be 0 with reads_weights=False, got {amount:g}: it is not known whether "
                f"{type(main(self.optimizer)).__name__} adds its decay to the gradients. Set weight_decay=0 (decoupled "
                "decay does not turn a layer anyway), or leave reads_weights out."
            )
        return how, amount

    def _unseen(self) -> bool:
        """Return whether nobody sees what the optimizer steps: it is torch's own or ours, and has no hooks."""
        if self.reads_weights or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
            return False
        whole = self.optimizer
        parts = (whole.inner, whole.others) if isinstance(whole, Joint) else (whole,)
        return all(type(one) in _RULES and not one.defaults.get("differentiable") for one in parts) and not any(
            one._optimizer_step_pre_hooks
            or one._optimizer_step_post_hooks
            or ("step" in vars(one) and not hasattr(one.step, "_wrapped_by_lr_sched"))
            for one in {whole, *parts}
        )

    def _stand_in(
        self,
        i: int,
        group: dict[str, Any],
        proposal: Proposal,
        grads: Sequence[Any],
        undo: list[Callable[[], None]],
    ) -> Callable[[], None]:
        """Give the optimizer other tensors to step than a group's parameters."""
        params, known = proposal.params, self._stand_ins.get(i)
        grads = self._take_decay_out(group, proposal, grads, undo)
        if known is not None and not known.fit(params):
            known = None
        if known is not None:
            try:
                known.take(grads)
            except RuntimeError:
                known.give_back()
                known = None
        if known is None:
            self._buffers.pop(i, None)
            self._states = _no_states()
            known = self._stand_ins[i] = StandIns(params)
            known.take(grads)
        undo.append(known.give_back)
        undo.append(_restore_key(group, "params"))
        every = list(group["params"])
        for j, zero in zip(proposal.positions, known.zeros, strict=True):
            every[j] = zero
        group["params"] = every
        proposal.stand_ins, proposal.displacements = known, known.zeros
        return lambda: None

    @contextmanager
    def _lend_states(self, proposals: Sequence[Proposal]) -> Iterator[None]:
        """Let the optimizer find the state of parameters under their stand-ins, and keep what it adds."""
        lent = [one for one in proposals if one.stand_ins is not None]
        if not lent:
            yield
            return
        own = self.optimizer.state
        now = [*(one.stand_ins for one in lent), *own, *own.values()]
        known, theirs = self._states
        if len(now) != len(known) or not all(map(is_, now, known)):  # state may be loaded or deleted at any time
            instead = {p: zero for one in lent for p, zero in zip(one.params, one.displacements, strict=True)}
            theirs = defaultdict(dict, {instead.get(key, key): state for key, state in own.items()})
            self._states = now, theirs
        self.optimizer.state = theirs
        try:
            yield
        finally:
            self.optimizer.state = own
            if isinstance(self.optimizer, Joint):
                self.optimizer.share()
            if len(theirs) > len(own):
                of = {zero: p for one in lent for p, zero in zip(one.params, one.displacements, strict=True)}
                for key, state in theirs.items():
                    own.setdefault(of.get(key, key), state)

    def _redirect_shards(self, proposal: Proposal, undo: list[Callable[[], None]]) -> Callable[[], None]:
        """Redirect DTensors, whose storage cannot be exchanged: their weights are copied and restored instead."""
        params: list[Any] = proposal.params
        parts = local(params)
        if self.reads_weights and any(p.dtype in _LOW for p in params):
            raise ControlError(
                f"{type(self.optimizer).__name__} may read the weights, which are sharded in half precision, so that "
                "its displacements would be rounding noise. Keep the sharded parameters in float32 (FSDP2's mixed "
                "precision does), or pass reads_weights=False if it only reads gradients."
            )
        aside = [part.clone() for part in parts]
        if not self.reads_weights:
            torch._foreach_zero_(parts)

        def put_back() -> None:
            for part, w in zip(parts, aside, strict=True):
                part.copy_(w)

        def take() -> None:
            moved = [part - w if self.reads_weights else part.clone() for part, w in zip(parts, aside, strict=True)]
            proposal.displacements = [
                as_sharded(m, p) if is_sharded(p) else m for m, p in zip(moved, params, strict=True)
            ]

        undo.append(put_back)
        return take

    def _zeros(self, i: int, weights: list[Tensor]) -> list[Tensor]:
        """Return a buffer of zeros for each weight; kept between steps and zeroed after each (`release`)."""
        self._stand_ins.pop(i, None)
        layout = [(w.shape, w.stride(), w.dtype, w.device) for w in weights]
        if i not in self._buffers or self._buffers[i][0] != layout:
            fresh = [torch.zeros_like(w, memory_format=torch.preserve_format) for w in weights]
            self._buffers[i] = (layout, fresh)
        return self._buffers[i][1]

    def forget(self) -> None:
        """Drop the buffers, which may hold half a step after an interruption; the next step makes new ones."""
        self._buffers.clear()
        self._stand_ins.clear()
        self.forget_states()

    def forget_states(self) -> None:
        """Let go of the optimizer's state, because another was loaded."""
        self._states = _no_states()

    def release(self, proposal: Proposal) -> None:
        """Zero the buffers, once their displacements have been used."""
        if not self.reads_weights and proposal.displacements:
            torch._foreach_zero_(proposal.displacements)

    @contextmanager
    def _hide(self, hidden: Collection[int]) -> Iterator[None]:
        groups = self.optimizer.param_groups
        kept = {i: groups[i]["params"] for i in hidden}
        try:
            for i in hidden:
                groups[i]["params"] = []
            yield
        finally:
            for i, params in kept.items():
                groups[i]["params"] = params

    @contextmanager
    def _hold(
        self, groups: list[dict[str, Any]], positions: Sequence[Sequence[int]], frozen: Sequence[int]
    ) -> Iterator[None]:
        caught = {i: set(positions[i]) for i in frozen}
        others = [p for i in frozen for j, p in enumerate(groups[i]["params"]) if j not in caught[i]]
        aside = [p.detach().clone() for p in others]
        try:
            yield
        finally:
            for p, value in zip(others, aside, strict=True):
                p.detach().copy_(value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_buffers": {}, "_stand_ins": {}, "_states": _no_states()}


def _at_least_float32(w: Tensor) -> Tensor:
    return w.to(torch.float32 if w.dtype in _LOW else w.dtype, copy=True)


def roundings(dtype: torch.dtype) -> float:
    """Return the length of a displacement, as a share of the weights, up to which it has no direction."""
    return _ROUNDINGS * torch.finfo(dtype).eps


def _leave_out_roundings(moves: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Set displacements to NaN that are not zero, but too short compared with the weights to have a direction."""
    for move, w in zip(moves, weights, strict=True):
        length = torch.linalg.vector_norm(move)
        shortest = torch.linalg.vector_norm(w, dtype=move.dtype) * roundings(move.dtype)
        move.masked_fill_((length > 0) & (length <= shortest), torch.nan)


def _restore_key(group: dict[str, Any], key: str) -> Callable[[], None]:
    value = group[key]
    return lambda: group.__setitem__(key, value)


def _restore_grads(params: Sequence[Tensor]) -> Callable[[], None]:
    grads = [p.grad for p in params]

    def undo() -> None:
        for p, g in zip(params, grads, strict=True):
            if g is not None:
                p.grad = g

    return undo
