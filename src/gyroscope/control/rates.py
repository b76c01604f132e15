"""Rates over layers and over time: α multipliers, conversions, schedules, and rates that are recorded and replayed."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gyroscope.base.accepted import real, whole
from gyroscope.base.hooks import register_outermost
from gyroscope.base.whole_file import read_whole, whole_file
from gyroscope.control.roster import check_weight, chosen_layers, few, unlike
from gyroscope.control.torch_contract import controller_of
from gyroscope.errors import ControlError
from gyroscope.layers.layer import Layer
from gyroscope.vectors import dots

if TYPE_CHECKING:
    from gyroscope.control.layca import Layca


__all__ = [
    "Rates",
    "Recorder",
    "Replay",
    "alpha_multipliers",
    "checked_multipliers",
    "cosine",
    "from_decay",
    "record",
    "replay",
    "tangent",
    "warmup",
    "with_momentum",
    "wsd",
]


def alpha_multipliers(alpha: float, n_layers: int) -> list[float]:
    """Return the layer-wise multipliers of equation 1 of the layer-rotation paper, first layer first.

        α > 0:  (1 − α)^(5 (L−1−l)/(L−1))        α ≤ 0:  (1 + α)^(5 l/(L−1))

    The factor 5 in the exponent is in the authors' code, and in the paper's first version. α = 0 is uniform; for
    |α| = 0.6 the slowest layer turns at 0.01 of the rate; at the limits α = ±1 only the last (first) layer turns. A
    single layer always has multiplier 1.

    >>> [round(m, 4) for m in alpha_multipliers(-0.6, 3)]
    [1.0, 0.1012, 0.0102]
    """
    given, alpha = alpha, real(alpha)
    if not -1.0 <= alpha <= 1.0:
        raise ControlError(
            "`alpha` must be a number from -1 (only the first layer turns) to 1 (only the last), got "
            f"{given!r}. Try -0.6."
        )
    if whole(n_layers, 1) is None:
        raise ControlError(f"`n_layers` must be an integer ≥ 1, got {n_layers!r}. Try len(gyroscope.layers(model)).")
    if n_layers == 1:
        return [1.0]
    last = n_layers - 1
    if alpha > 0:
        return [(1.0 - alpha) ** (5 * (last - l) / last) for l in range(n_layers)]  # noqa: E741
    return [(1.0 + alpha) ** (5 * l / last) for l in range(n_layers)]  # noqa: E741


def checked_multipliers(given: Sequence[float] | Tensor | None, alpha: float, n_layers: int) -> Tensor:
    """Return the multipliers as a float64 tensor, from `given` or from α.

    >>> checked_multipliers([1, 0.5], 0.0, 2)
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    if given is None:
        values = alpha_multipliers(alpha, n_layers)
    else:
        values = _numbers(given, n_layers)
        if alpha != 0.0:
            raise ControlError(
                "`alpha` must be 0 where `multipliers` are given: α is one choice of multipliers. Give one."
            )
        if len(values) != n_layers:
            raise ControlError(
                f"`multipliers` must have one number per layer, got {len(values)} for {n_layers} layers."
            )
        if not all(0.0 <= m < math.inf for m in values):
            raise ControlError(f"`multipliers` must be finite numbers ≥ 0, got [{few(values)}].")
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _numbers(given: Any, n_layers: int) -> list[float]:
    try:
        if isinstance(given, str | bytes | Mapping | Set):
            raise TypeError
        return [float(m) for m in (given.tolist() if isinstance(given, Tensor) else given)]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last for tensors without values
        raise ControlError(
            f"`multipliers` must be a sequence of {n_layers} numbers, one per layer in forward order, got {given!r}. "
            f"Try {[1.0] * min(n_layers, 3)} for {min(n_layers, 3)} layers."
        ) from None


def with_momentum(rate: float, beta: float, *, given_for: float = 0.0) -> float:
    """Return the rate that rotates layers as far with momentum β as `rate` does without momentum.

        ρ √((1 − β)/(1 + β))

    Layca makes every step equally long, but steps with momentum resemble each other: the cosine of two steps that are
    k apart is βᵏ, if gradients are independent. The square of the distance after many steps is then larger by
    1 + 2Σβᵏ = (1 + β)/(1 − β), and so is the rotation.

    This assumes nearly independent gradients, many more steps than 1/(1 − β), ρ/(1 − β) well below 1, and a plain
    moving average or sum: SGD, SGD_AMom, and the first moment of Adam if the second changes slowly. Nesterov momentum
    gives other weights to the gradients. It converts a rate between momentum settings of one task; it does not say
    which rate suits a task.

    Args:
        rate: ρ.
        beta: β, or β₁ of Adam.
        given_for: the momentum that `rate` is for.

    >>> round(with_momentum(3**-3, 0.9), 5), round(3**-4.34, 5)
    (0.0085, 0.0085)
    """
    if not 0 <= real(rate) < math.inf:
        raise ControlError(f"`rate` must be a finite number ≥ 0, got {rate!r}. Try 3**-3.")
    for name, one in (("beta", beta), ("given_for", given_for)):
        if not 0 <= real(one) < 1:
            raise ControlError(f"`{name}` must be a number ≥ 0 and below 1, a momentum, got {one!r}. Try 0.9.")
    new, old = real(beta), real(given_for)
    return real(rate) * math.sqrt((1 - new) * (1 + old) / ((1 + new) * (1 - old)))


def from_decay(lr: float, weight_decay: float, *, beta: float = 0.0) -> float:
    """Return the rate at which AdamW turns layers once weight decay and its steps are in equilibrium.

        ρ = √(2ηλ)              with momentum:  ρ = √(2ηλ (1 − β)/(1 + β))

    η²n is what a step adds to ‖w‖² and 2ηλ‖w‖² what decay removes, so that ‖w‖² = ηn/(2λ) and ‖Δw‖/‖w‖ = √(2ηλ).
    `gyroscope.theory.equilibrium` has the derivation and its assumptions; the equilibrium is reached after some
    1/(2ηλ) steps, often more than a training has. Give the `beta` of the inner optimizer under Layca: layers then
    rotate as they do under AdamW with that momentum.

    Args:
        lr: η of AdamW.
        weight_decay: λ of AdamW.
        beta: the momentum of the inner optimizer, β₁ of Adam.

    >>> round(from_decay(1e-3, 0.1), 4), round(from_decay(1e-3, 0.1, beta=0.9), 4)
    (0.0141, 0.0032)
    """
    for name, one, fine in (("lr", lr, 1e-3), ("weight_decay", weight_decay, 0.1)):
        if not 0 < real(one) < math.inf:
            hint = " Without decay there is no equilibrium; use a preset of gyroscope.steer." if real(one) == 0 else ""
            raise ControlError(f"`{name}` must be a finite number > 0, got {one!r}. Try {fine}.{hint}")
    return with_momentum(math.sqrt(2 * real(lr) * real(weight_decay)), beta)


def warmup(optimizer: Optimizer, steps: int, *, start: float = 0.1) -> LambdaLR:
    """Return a scheduler for the papers' warm-up: linear from a tenth of the rate to the rate over `steps` steps.

    lr_t = lr (f + start (1 − f)) with f = t/steps for t < steps, and lr afterwards. Call its `step()` after each
    `optimizer.step()`. `cosine` and `wsd` have a `warmup` of their own; put others after it with
    `torch.optim.lr_scheduler.SequentialLR`.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    >>> schedule = warmup(optimizer, 2)
    >>> rates = [schedule.get_last_lr()[0]]
    >>> for _ in range(3):
    ...     optimizer.step(); schedule.step(); rates += schedule.get_last_lr()
    >>> [round(r, 3) for r in rates]
    [0.1, 0.55, 1.0, 1.0]
    """
    _check_optimizer(optimizer)
    if not 0 <= real(steps) < math.inf:
        raise ControlError(f"`steps` must be a finite number ≥ 0, got {steps!r}. Try 0 for no warm-up.")
    if not 0.0 <= real(start) <= 1.0:
        raise ControlError(f"`start` must be a share of the rate, a number from 0 to 1, got {start!r}. Try 0.1.")

    last, begin = real(steps), real(start)

    def factor(t: int) -> float:
        return 1.0 if t >= last else t / last + begin * (1.0 - t / last)

    return LambdaLR(optimizer, factor)


def cosine(optimizer: Optimizer, steps: int, *, floor: float = 0.0, warmup: int = 0) -> LambdaLR:
    """Return a scheduler that multiplies every group's own rate by half a cosine, from 1 to `floor` in `steps` steps.

    lr_t = lr (floor + (1 − floor)(1 + cos πu)/2) with u = (t − warmup)/(steps − warmup), and lr·floor from `steps` on.
    Groups keep the ratio of their rates, unlike under torch's CosineAnnealingLR, whose `eta_min` is one number for
    all groups. There is no warm-up unless asked for: Layca limits the first steps as it limits all others.

    Args:
        optimizer: any torch optimizer.
        steps: the number of steps of the training.
        floor: the last rate, as a share of the first.
        warmup: the number of steps in which the rate first rises, linearly: lr_t = lr (t + 1)/(warmup + 1).

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    >>> schedule = cosine(optimizer, 4)
    >>> rates = [schedule.get_last_lr()[0]]
    >>> for _ in range(4):
    ...     optimizer.step(); schedule.step(); rates += schedule.get_last_lr()
    >>> [round(r, 3) for r in rates]
    [1.0, 0.854, 0.5, 0.146, 0.0]
    """
    first, last, low = _checked_schedule(optimizer, steps, floor, warmup)

    def factor(t: int) -> float:
        if t < first:
            return (t + 1) / (first + 1)
        return low if t >= last else low + (1 - low) * (1 + math.cos(math.pi * (t - first) / (last - first))) / 2

    return LambdaLR(optimizer, factor)


def wsd(optimizer: Optimizer, steps: int, *, decay: float = 0.2, floor: float = 0.0, warmup: int = 0) -> LambdaLR:
    """Return a scheduler that holds every group's own rate, and lowers it linearly in the last steps.

    "Warm-up, stable, decay", without the warm-up by default. The rate is lr up to step (1 − decay)·steps, and then
    falls linearly to lr·floor at `steps`. A training can be continued from any step before the decay, because the rate
    up to there does not depend on `steps`.

    Args:
        optimizer: any torch optimizer.
        steps: the number of steps of the training.
        decay: the share of the steps in which the rate falls.
        floor: the last rate, as a share of the first.
        warmup: the number of steps in which the rate first rises, linearly: lr_t = lr (t + 1)/(warmup + 1).

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    >>> schedule = wsd(optimizer, 4, decay=0.5)
    >>> rates = [schedule.get_last_lr()[0]]
    >>> for _ in range(4):
    ...     optimizer.step(); schedule.step(); rates += schedule.get_last_lr()
    >>> [round(r, 3) for r in rates]
    [1.0, 1.0, 1.0, 0.5, 0.0]
    """
    first, last, low = _checked_schedule(optimizer, steps, floor, warmup)
    if not 0.0 <= real(decay) <= 1.0:
        raise ControlError(f"`decay` must be a share of the steps, a number from 0 to 1, got {decay!r}. Try 0.2.")
    begin = last - real(decay) * last
    if first > begin:
        raise ControlError(
            f"`warmup` must be at most the {begin:g} steps before the rate falls, got {first}. Lower it, or `decay`."
        )

    def factor(t: int) -> float:
        if t < first:
            return (t + 1) / (first + 1)
        if t >= last:
            return low
        return 1.0 if t <= begin else low + (1 - low) * (last - t) / (last - begin)

    return LambdaLR(optimizer, factor)


def _checked_schedule(optimizer: Optimizer, steps: int, floor: float, warmup: int) -> tuple[int, int, float]:
    """Return the numbers of steps of the warm-up and of the training, and the floor."""
    _check_optimizer(optimizer)
    if whole(steps, 1) is None:
        raise ControlError(f"`steps` must be an integer ≥ 1, the steps of the training, got {steps!r}. Try 1000.")
    if whole(warmup, 0) is None or warmup >= steps:
        raise ControlError(
            f"`warmup` must be an integer ≥ 0 and below the {steps} steps, got {warmup!r}. Try 0 for no warm-up."
        )
    if not 0.0 <= real(floor) <= 1.0:
        raise ControlError(f"`floor` must be a share of the rate, a number from 0 to 1, got {floor!r}. Try 0.1.")
    return warmup, steps, real(floor)


@dataclass(frozen=True)
class Rates:
    """Recorded rotation rates: tan θ of every layer at every step.

    Attributes:
        layers: the layers' names, in forward order.
        tangents: `[steps, layers]`, float64.

    >>> import tempfile
    >>> rates = Rates(("weight",), torch.tensor([[0.25], [0.125]], dtype=torch.float64))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rates.save(f"{folder}/rates.pt")
    ...     Rates.load(f"{folder}/rates.pt").tangents.flatten().tolist()
    [0.25, 0.125]
    """

    layers: tuple[str, ...]
    tangents: Tensor

    def __post_init__(self) -> None:
        names, given = self.layers, self.tangents
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise ControlError(
                f"`layers` must be a tuple of names, got {names!r:.80}. Try optimizer.layers of a Layca."
            )
        fine = isinstance(given, Tensor) and not (given.is_complex() or given.is_meta) and given.layout == torch.strided
        if not fine or given.dim() != 2 or given.shape[1] != len(names):
            raise ControlError(
                f"`tangents` must be a tensor of real numbers of shape [steps, {len(names)}], one column per layer, "
                f"got {_described(given)}. Try `recorder.rates`, or Rates.load(path)."
            )

    def save(self, path: str | os.PathLike[str] | IO[bytes]) -> None:
        """Write to a file that `load` reads; nothing in it is executed on loading.

        A file that was there is replaced once the new one is complete. An open file is written to as it is.
        """
        data = {"layers": list(self.layers), "tangents": self.tangents.cpu()}
        if not isinstance(path, str | os.PathLike) and not callable(getattr(path, "write", None)):
            raise ControlError(f"`path` must be a path or an open file, got {path!r}. Try 'rates.pt'.")
        try:
            if isinstance(path, str | os.PathLike):
                # Opened here: torch would write the name of the new file into it.
                with whole_file(Path(path)) as new, new.open("wb") as file:
                    torch.save(data, file)
            else:
                torch.save(data, path)
        except (OSError, RuntimeError, TypeError, ValueError) as error:  # as torch, paths and files say it
            raise ControlError(
                f"The rates could not be written to {path} ({error}). Give a file in a folder that exists, is writable "
                "and has space; the rates can still be saved."
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str] | IO[bytes]) -> Rates:
        """Read what `save` wrote."""
        try:
            data = read_whole(path)
            return cls(tuple(data["layers"]), data["tangents"].to(torch.float64))
        except FileNotFoundError:
            raise ControlError(f"There is no file {path}. `Rates.save` writes one.") from None
        except Exception as error:
            raise ControlError(
                f"{path} does not hold recorded rates: {error}. `Rates.save` writes such a file."
            ) from error


def _described(given: Any) -> str:
    """Describe a tensor for a message by shape, dtype, device and layout; anything else by its type."""
    if not isinstance(given, Tensor):
        return f"a {type(given).__name__}"
    layout = "" if given.layout == torch.strided else f", {given.layout}"
    return f"a tensor of shape {tuple(given.shape)}, {given.dtype} on {given.device}{layout}"


class Recorder:
    """Records the angle by which each layer turns in each step of any optimizer; made by `record`.

    >>> model = nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> recorder = Recorder(model, optimizer)
    >>> model(torch.ones(1, 3)).sum().backward(); optimizer.step()
    >>> rates = recorder.close()
    >>> rates.layers, tuple(rates.tangents.shape)
    (('weight',), (1, 1))
    """

    def __init__(self, model_or_layers: nn.Module | Sequence[Layer], optimizer: Optimizer) -> None:
        _check_optimizer(optimizer)
        self._layers = chosen_layers(model_or_layers)
        for layer in self._layers:
            check_weight(f"Layer {layer.name}", layer.parameter, "Exclude it: gyroscope.layers(model, exclude=...).")
        split = [layer.name for layer in self._layers if layer.segments > 1]
        if split:
            raise ControlError(
                f"These layers are split into segments: {few(split)}, but a record has one angle per layer and step. "
                'Use granularity "tensor": gyroscope.layers(model), or the model itself.'
            )
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [x.name for x in self._layers if x.parameter.requires_grad and id(x.parameter) not in held]
        if missing:
            raise ControlError(
                f"The optimizer does not hold these layers of the model: {few(missing)}, so it does not turn them. "
                "Record the model it steps, or the layers it holds: record(gyroscope.layers(model, include=...), "
                "optimizer)."
            )
        self._optimizer = weakref.ref(optimizer)
        self._refuse_inside()
        self._before: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._handles = register_outermost(optimizer, self._remember, self._measure)

    def _refuse_inside(self) -> None:
        """Reject an optimizer whose steps are replaced by a controller; it may have been wrapped since."""
        optimizer = self._optimizer()
        outer = None if optimizer is None else controller_of(optimizer)
        if outer is not None:
            name = type(outer).__name__
            raise ControlError(
                f"The {type(optimizer).__name__} is inside a {name}, which changes its steps. Record "
                f"the {name}: record(model, optimizer) with the optimizer that is stepped."
            )

    @torch.no_grad()
    def _remember(self, *_: Any) -> None:
        self._refuse_inside()
        self._before = [layer.parameter.detach().clone() for layer in self._layers]

    @torch.no_grad()
    def _measure(self, *_: Any) -> None:
        before, after = self._before, [layer.parameter.detach() for layer in self._layers]
        # From the displacement: differences of nearby numbers are exact, while 1 − cos θ of a small angle is not.
        moved = list(torch._foreach_sub(after, before))
        products = dots({"ww": (before, before), "wd": (before, moved), "dd": (moved, moved)})
        self._rows.append(tangent(products))
        self._before = []

    @property
    def rates(self) -> Rates:
        """The rates recorded so far."""
        rows = self._rows or [torch.zeros(len(self._layers), dtype=torch.float64, device="cpu")]
        tangents = torch.stack(rows)[: len(self._rows)]
        return Rates(tuple(layer.name for layer in self._layers), tangents)

    def close(self) -> Rates:
        """Stop recording, remove the hooks, and return the rates."""
        for handle in self._handles:
            handle.remove()
        return self.rates

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tangent(products: Tensor) -> Tensor:
    """Return |tan θ| between w and w + d from [⟨w,w⟩, ⟨w,d⟩, ⟨d,d⟩] per row; 0 where w is zero or did not move.

    For angles beyond 90° it is the absolute value, as in the authors' √(1/cos²θ − 1).

    >>> tangent(torch.tensor([[4.0, 0.0, 1.0]], dtype=torch.float64))      # w = (2, 0), d = (0, 1)
    tensor([0.5000], dtype=torch.float64)
    """
    ww, wd, dd = products.unbind(1)
    across = (dd - wd * (wd / ww)).clamp(min=0.0)
    result = (across * ww).sqrt() / (ww + wd).abs()
    return torch.where((ww > 0) & (dd > 0), result, torch.zeros_like(result))


def record(model_or_layers: nn.Module | Sequence[Layer], optimizer: Optimizer) -> Recorder:
    """Record tan θ of every layer at every step of `optimizer`, for `replay`; layers must have granularity "tensor".

    >>> model = nn.Linear(3, 2)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> with record(model, optimizer) as recorder:
    ...     model(torch.ones(1, 3)).sum().backward(); optimizer.step()
    >>> tuple(recorder.rates.tangents.shape)
    (1, 1)
    """
    return Recorder(model_or_layers, optimizer)


class Replay:
    """Sets the rate of each layer of a `Layca` to the recorded one, step by step; made by `replay`.

    >>> import gyroscope
    >>> model = nn.Linear(3, 2)
    >>> optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=1.0), model, others="frozen")
    >>> player = Replay(optimizer, Rates(("weight",), torch.tensor([[0.25], [0.5]], dtype=torch.float64)))
    >>> for _ in range(2):
    ...     model(torch.ones(1, 3)).sum().backward(); optimizer.step()
    >>> player.taken, optimizer.rates()
    (2, {'weight': 0.5})
    """

    def __init__(self, optimizer: Layca, recorded: Rates) -> None:
        _require_record(optimizer, recorded)
        self.optimizer = optimizer
        self.taken = 0
        if tuple(recorded.layers) != optimizer.layers:
            raise ControlError(
                "The rates were recorded on other layers than this optimizer controls: "
                f"{unlike(recorded.layers, optimizer.layers)}. Replay them on a model with the same layers."
            )
        for i, group in enumerate(optimizer.param_groups):
            if optimizer.controls(i) and float(group["lr"]) != 1.0:
                raise ControlError(
                    f"`lr` of group {i} must be 1, because a replayed run takes its rates from the record, got "
                    f"{float(group['lr'])}. Build the inner optimizer with lr=1; other values, set later, scale the "
                    "record."
                )
        if optimizer._steering.others == "inner":
            for i, group in enumerate(optimizer.param_groups):
                steps = any(p.requires_grad for p in group["params"])
                if steps and not optimizer.controls(i) and float(group["lr"]) == 1.0:
                    raise ControlError(
                        f"Group {i} holds parameters that are not layers (biases, gains), which the inner optimizer "
                        'would step at the learning rate 1 meant for the record. Build the Layca with others="frozen", '
                        "as in the papers, or give them a learning rate of their own: others_lr=..."
                    )
        if not bool(torch.isfinite(recorded.tangents).all()):
            raise ControlError("`recorded` holds rates that are not finite: the recorded run diverged. Record another.")
        if bool((recorded.tangents < 0).any()):
            raise ControlError("`recorded` holds negative rates. A rate is |tan θ| of a step, as `record` measures it.")
        device = optimizer.param_groups[0]["params"][0].device
        self._tangents = recorded.tangents.to(device)
        self._handles = register_outermost(optimizer, self._set, self._count)

    def _set(self, *_: Any) -> None:
        if self.taken >= len(self._tangents):
            raise ControlError(
                f"All {len(self._tangents)} steps of the record are replayed. Stop here, or record a longer run."
            )
        self.optimizer.multipliers = self._tangents[self.taken]

    def _count(self, *_: Any) -> None:
        # After the step: one that was rejected has not been taken.
        self.taken += 1

    def close(self) -> None:
        """Stop replaying; the optimizer keeps the last rates."""
        for handle in self._handles:
            handle.remove()


def _require_record(optimizer: Any, recorded: Any) -> None:
    from gyroscope.control.layca import (
        Layca,  # which takes its multipliers from rates.py, and that the names of this module
    )

    if not isinstance(optimizer, Layca):
        raise ControlError(
            f"`optimizer` must be a Layca, got a {type(optimizer).__name__}. Try "
            "gyroscope.Layca(gyroscope.SGD_AMom(model.parameters(), lr=1.0), model)."
        )
    if not isinstance(recorded, Rates):
        raise ControlError(
            f"`recorded` must be a Rates, got a {type(recorded).__name__}. Try `recorder.rates`, or Rates.load(path)."
        )


def replay(optimizer: Layca, recorded: Rates) -> Replay:
    """Make `optimizer` turn each layer by the recorded tan θ at each step: the papers' AdaptCopy.

    The groups of layers have lr 1; other values scale the record. Parameters that are not layers are frozen, as in the
    papers, or have a learning rate of their own.

    >>> import gyroscope
    >>> model = nn.Linear(3, 2)
    >>> optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=1.0), model, others="frozen")
    >>> player = replay(optimizer, Rates(("weight",), torch.tensor([[0.25]], dtype=torch.float64)))
    >>> model(torch.ones(1, 3)).sum().backward(); optimizer.step()
    >>> optimizer.rates()
    {'weight': 0.25}
    """
    return Replay(optimizer, recorded)


def _check_optimizer(given: Any) -> None:
    """Reject what is not a torch optimizer."""
    if not isinstance(given, Optimizer):
        raise ControlError(
            f"`optimizer` must be a torch.optim.Optimizer, the one that is stepped, got a {type(given).__name__}."
        )
