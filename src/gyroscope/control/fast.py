"""The driver of the fused kernel: tables made once for the same tensors, checked every step, nothing waited for."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gyroscope.control.coefficients import Law
from gyroscope.control.fused import Hyper, Launch
from gyroscope.control.ledger import Ledger
from gyroscope.control.rules import Rule, decay_of
from gyroscope.vectors.layout import is_dense, splits_in_memory

_address = Tensor.data_ptr
_strides = Tensor.stride


class Fast:
    """Steps one group's layers with one launch for each dtype among them.

    The launch's table holds addresses, so every step asks each tensor for its own: parameters may be swapped in
    place, gradients are allocated anew, and state may be loaded or thrown away. Only where all are as they were is
    the table used again.
    """

    def __init__(self) -> None:
        self._known: tuple[Any, ...] = ()
        self._launches: list[tuple[Launch, list[int]]] = []
        self._state: list[dict[str, Any]] = []
        self._kept: list[list[Tensor]] = []
        self._steps: Tensor | None = None

    def step(
        self,
        optimizer: Optimizer,
        rule: Rule,
        kernel: str,
        group: dict[str, Any],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        rows: Sequence[int],
        counts: Sequence[int],
        ledger: Ledger,
        law: Law,
    ) -> None:
        """One step of the layers with gradients."""
        grads = self._laid_out(params, grads)
        keys = _state_keys(rule, kernel)
        seen = (kernel, list(map(_address, params)), list(map(_address, grads)), _betas(group, kernel))
        if seen != self._known or not self._state_is_ours(optimizer, params, keys):
            self._prepare(optimizer, kernel, group, params, grads, keys, rows, counts, ledger)
            self._known = seen
        if self._steps is not None:
            self._steps.add_(1)
        hyper = hyper_of(rule, kernel, group)
        for launch, _ in self._launches:
            launch(kernel, hyper, ledger, law)

    def _laid_out(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradients in the parameters' memory layout; they almost always are."""
        if list(map(_strides, params)) == list(map(_strides, grads)):
            return grads
        return [
            g if g.stride() == p.stride() else torch.empty_like(p, dtype=g.dtype).copy_(g)
            for p, g in zip(params, grads, strict=True)
        ]

    def _state_is_ours(self, optimizer: Optimizer, params: Sequence[Tensor], keys: Sequence[str]) -> bool:
        if not keys:
            return True
        state = optimizer.state
        now = [state[p] for p in params]
        if len(now) != len(self._state) or not all(map(is_, now, self._state)):
            return False
        return all(
            one.get(key) is tensor
            for key, tensors in zip(keys, self._kept, strict=True)
            for one, tensor in zip(now, tensors, strict=True)
        )

    def _prepare(
        self,
        optimizer: Optimizer,
        kernel: str,
        group: dict[str, Any],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        keys: Sequence[str],
        rows: Sequence[int],
        counts: Sequence[int],
        ledger: Ledger,
    ) -> None:
        self._state = [optimizer.state[p] for p in params] if keys else []
        self._steps = None
        if keys:
            self._set_up_state(kernel, group, params, keys, rows, counts, ledger)
        self._kept = [[one[key] for one in self._state] for key in keys]
        tensors = {key: kept for key, kept in zip(keys, self._kept, strict=True) if key != "step"}
        first, second = _slots(kernel, list(tensors))
        kinds: dict[tuple[torch.dtype, ...], list[int]] = {}
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            kind = (p.dtype, g.dtype, *(kept[i].dtype for kept in tensors.values()))
            kinds.setdefault(kind, []).append(i)
        starts = [sum(counts[:i]) for i in range(len(counts))]
        self._launches = []
        for members in kinds.values():
            w = [params[i].detach() for i in members]
            g = [grads[i] for i in members]
            m = [tensors[first][i] for i in members] if first else g
            v = [tensors[second][i] for i in members] if second else g
            its_rows = [rows[starts[i] + k] for i in members for k in range(counts[i])]
            self._launches.append((Launch([w, g, m, v], its_rows, [counts[i] for i in members]), members))

    def _set_up_state(
        self,
        kernel: str,
        group: dict[str, Any],
        params: Sequence[Tensor],
        keys: Sequence[str],
        rows: Sequence[int],
        counts: Sequence[int],
        ledger: Ledger,
    ) -> None:
        """State as torch's own optimizer would have made it, so that either can go on with the other's."""
        ages = []
        for p, state in zip(params, self._state, strict=True):
            fresh = any(key not in state for key in keys)
            for key in keys:
                if key == "step":
                    continue
                if fresh:
                    start = group.get("initial_accumulator_value", 0.0) if kernel == "adagrad" else 0.0
                    state[key] = torch.full_like(p, start, memory_format=torch.preserve_format).detach()
                elif state[key].stride() != p.stride():
                    state[key] = torch.empty_like(p, dtype=state[key].dtype).copy_(state[key]).detach()
            # The one place where a step count may have to be fetched from the device: after loading a state.
            ages.append(0.0 if fresh else float(state["step"]) if "step" in keys else 1.0)
        if "step" in keys:
            # One vector for all layers, so that counting a step is one operation; the states hold views of it.
            on_device = group.get("capturable") or group.get("fused")
            self._steps = torch.tensor(ages, dtype=torch.float32)
            if on_device:
                self._steps = self._steps.to(params[0].device)
            for state, view in zip(self._state, self._steps.unbind(), strict=True):
                state["step"] = view
        beta1, beta2 = _betas(group, kernel)
        where = torch.tensor(list(rows), device=ledger.power1.device)
        age = torch.tensor([t for t, n in zip(ages, counts, strict=True) for _ in range(n)], dtype=torch.float64)
        ledger.power1[where] = (beta1**age).to(ledger.power1)
        ledger.power2[where] = (beta2**age).to(ledger.power2)


def hyper_of(rule: Rule, kernel: str, group: dict[str, Any]) -> Hyper:
    """The kernel's numbers from the group's options."""
    how, decay = decay_of(rule, group)
    beta1, beta2 = _betas(group, kernel)
    momentum = float(group["momentum"]) if kernel in ("momentum", "sgd_amom") else 0.0
    return Hyper(
        lr=group["lr"],
        decay=decay,
        momentum=momentum,
        dampening=momentum if kernel == "sgd_amom" else float(group.get("dampening", 0.0)),
        beta1=beta1,
        beta2=beta2,
        eps=float(group.get("eps", 0.0)),
        nesterov=bool(group.get("nesterov", False)) and kernel == "momentum",
        maximize=bool(group.get("maximize", False)),
        decoupled=how == "decoupled",
    )


def fits(params: Sequence[Tensor], counts: Sequence[int]) -> bool:
    """Whether the kernel can walk through these tensors: gapless in memory, segments one after another."""
    return all(is_dense(p) and splits_in_memory(p, n) for p, n in zip(params, counts, strict=True))


def _betas(group: dict[str, Any], kernel: str) -> tuple[float, float]:
    if kernel == "adam":
        return float(group["betas"][0]), float(group["betas"][1])
    if kernel == "rmsprop":
        return 0.0, float(group["alpha"])
    return 0.0, 0.0


def _state_keys(rule: Rule, kernel: str) -> list[str]:
    if kernel == "sgd":
        return []
    keys = [key for key in (rule.first, rule.second) if key is not None]
    return keys + (["step"] if kernel in ("adam", "rmsprop", "adagrad") else [])


def _slots(kernel: str, keys: Sequence[str]) -> tuple[str | None, str | None]:
    """Which state is the kernel's first moment and which its second."""
    if kernel in ("momentum", "sgd_amom"):
        return keys[0], None
    if kernel == "adam":
        return keys[0], keys[1]
    return (None, keys[0]) if keys else (None, None)
