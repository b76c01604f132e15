"""Detail of sampled steps: activations, second moments, the rotation of neurons, and layers that were exchanged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gyroscope.base.hooks import is_capturing, listens
from gyroscope.base.transfer import to_host
from gyroscope.errors import LayerError, MonitorError
from gyroscope.layers.layer import Layer, split
from gyroscope.layers.layer import layers as find_layers
from gyroscope.monitor.reference import Reference
from gyroscope.monitor.track import Track
from gyroscope.passes import activations as acts
from gyroscope.passes import outputs as outs
from gyroscope.passes.activations import spread
from gyroscope.store.record import QuantityInfo
from gyroscope.theory.moment_variance import KEYS
from gyroscope.vectors import dots
from gyroscope.vectors.layout import is_dense, is_sharded, memory_view

if TYPE_CHECKING:
    from gyroscope.conditioning.schedule import Schedule
    from gyroscope.monitor.conditioning_probe import Conditioned

MOMENT_NAMES = ("moment_p10", "moment_p50", "moment_p90")
MOMENT_INFO = {
    name: QuantityInfo(name, "gradient²", f"{which} of the second moments v that the optimizer keeps for the layer")
    for name, which in zip(MOMENT_NAMES, ("10th percentile", "median", "90th percentile"), strict=True)
}
_AT_ONCE = 2**24  # elements sorted together


def moment_percentiles(
    optimizer: Optimizer, parameters: Sequence[Tensor], percents: Sequence[float] = (10, 50, 90), most: int = 65536
) -> Tensor | None:
    """Percentiles of the second moments that Adam-like optimizers keep (figure 5 of the rotation paper).

    Adam divides each element's step by √v, where v is the running mean of that element's squared gradient. Comparing
    the spread of v within a layer with its differences between layers shows what this amounts to: "the estimates vary
    much more across layers than inside layers". The values are those of v as the optimizer keeps it, as in the paper:
    no square root is taken and no bias is corrected. Percentiles are interpolated as NumPy does.

    They are exact up to `most` elements per parameter. Of larger parameters, `most` elements are used, always the same
    ones and evenly spaced. Nothing waits for the device, and the optimizer's state is not changed. If state is sharded
    (FSDP2), the result is that of the whole tensors, and all ranks must call together, as for `dots`.

    Args:
        optimizer: any optimizer; a `Layca` keeps the state of its inner one.
        parameters: the layers' parameters.
        percents: the percentiles, from 0 to 100.
        most: the largest number of elements of a parameter to use.

    Returns:
        [parameters, percents] in float32 on the first parameter's device. NaN for a parameter whose second moments do
        not exist (before its first step) or are not kept as one number per element (factored, quantized). None if no
        parameter has any.

    >>> p = torch.nn.Parameter(torch.zeros(5))
    >>> optimizer = torch.optim.Adam([p], betas=(0.9, 0.0))         # so that v is the last gradient squared
    >>> p.grad = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]); optimizer.step()
    >>> moment_percentiles(optimizer, [p], percents=(0, 50, 100))
    tensor([[ 1.,  9., 25.]])
    """
    if not all(0 <= q <= 100 for q in percents):
        raise MonitorError(f"`percents` must be numbers from 0 to 100, got {tuple(percents)}. Try (10, 50, 90).")
    if most < 1:
        raise MonitorError(f"`most` must be a number ≥ 1, got {most}. Try 65536.")
    found = [(i, v) for i, p in enumerate(parameters) if (v := _second_moment(optimizer, p)) is not None]
    if not found:
        return None
    samples: defaultdict[tuple[int, torch.device], list[tuple[int, Tensor]]] = defaultdict(list)
    for i, values in _samples(found, most):
        samples[len(values), values.device].append((i, values))
    device = found[0][1].device
    rows: list[Tensor] = [torch.full((len(percents),), torch.nan, device=device)] * len(parameters)
    for (n, _), group in samples.items():
        at_once = max(1, _AT_ONCE // n)
        for start in range(0, len(group), at_once):
            some = group[start : start + at_once]
            ordered = torch.stack([values for _, values in some]).sort(dim=1).values
            table = torch.stack([_at(ordered, q / 100 * (n - 1)) for q in percents], dim=1)
            for (i, _), row in zip(some, table.to(device, non_blocking=True), strict=True):
                rows[i] = row
    return torch.stack(rows)


def _at(ordered: Tensor, position: float) -> Tensor:
    """Interpolate between the two columns next to a position."""
    low = int(position)
    high = min(low + 1, ordered.shape[1] - 1)
    return torch.lerp(ordered[:, low], ordered[:, high], position - low)


def _second_moment(optimizer: Optimizer, parameter: Tensor) -> Tensor | None:
    # Not `state[parameter]`: a defaultdict would add an entry, which optimizers take for a step.
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    for key in KEYS:
        value = state.get(key)
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.numel() and value.is_floating_point():
            plain = type(value) in (Tensor, torch.nn.Parameter)
            return value.detach() if plain or is_sharded(value) else None
    return None


def _samples(found: Sequence[tuple[int, Tensor]], most: int) -> list[tuple[int, Tensor]]:
    """Return the elements to use, in float32."""
    samples: list[tuple[int, Tensor]] = []
    shared: defaultdict[tuple[Any, ...], list[tuple[int, Tensor]]] = defaultdict(list)
    positions: dict[tuple[int, torch.device], Tensor] = {}
    for i, value in found:
        if is_sharded(value):
            groups, part = _own_part(value, most)
            if part is not None:
                shared[groups].append((i, part))
        else:
            n = value.numel()
            flat = memory_view(value, 1)[0] if is_dense(value) else value.reshape(-1)
            if n > most:
                if (n, value.device) not in positions:
                    positions[n, value.device] = spread(n, most, value.device)
                flat = flat.index_select(0, positions[n, value.device])
            samples.append((i, flat.float()))
    for groups, parts in shared.items():
        whole = torch.cat([part for _, part in parts])
        for group in groups:
            dist.all_reduce(whole, group=group)
        end = 0
        for i, part in parts:
            start, end = end, end + len(part)
            samples.append((i, whole[start:end]))
    return samples


def _own_part(value: Any, most: int) -> tuple[tuple[Any, ...], Tensor | None]:
    """Return those of the elements to use that this rank holds, and zeros for the others, to be summed over ranks."""
    from torch.distributed.tensor import Shard

    mesh, local = value.device_mesh, value.to_local()
    start, size = [0] * value.dim(), list(value.shape)
    groups = []
    for axis, placement in enumerate(value.placements):
        if placement.is_replicate() or mesh.size(axis) == 1:
            continue
        if type(placement) is not Shard:
            return (), None  # the same on every rank
        # As in `torch.chunk`: equal parts, the last ones smaller or empty.
        dim = placement.dim
        chunk = -(-size[dim] // mesh.size(axis))
        skipped = min(chunk * mesh.get_local_rank(axis), size[dim])
        start[dim] += skipped
        size[dim] = min(chunk, size[dim] - skipped)
        groups.append(mesh.get_group(axis))
    rest = spread(value.numel(), most, local.device)
    if tuple(size) != tuple(local.shape) or local.numel() == 0:
        # The other ranks, which sum, do not know of an unusual layout here: NaN tells them.
        return tuple(groups), torch.full((len(rest),), 0.0 if local.numel() == 0 else torch.nan, device=local.device)
    held = torch.ones_like(rest, dtype=torch.bool)
    where = torch.zeros_like(rest)
    step = 1
    for dim in reversed(range(value.dim())):
        coordinate = rest % value.shape[dim] - start[dim]
        rest = rest // value.shape[dim]
        held &= (coordinate >= 0) & (coordinate < size[dim])
        where += coordinate.clamp(0, size[dim] - 1) * step
        step *= size[dim]
    values = local.reshape(-1).index_select(0, where).float()
    return tuple(groups), torch.where(held, values, 0.0)


_NAMED = 3


class Exchanged:
    """Finds watched layers whose module is no longer part of the model.

    A parameter that is exchanged within its module is followed, and so is a module inside a new wrapper. A weight that
    has moved to another module still counts as part of the model.

    >>> from gyroscope.layers.layer import layers
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> exchanged = Exchanged(net, layers(net))
    >>> exchanged.said()
    >>> net[1] = nn.Linear(2, 3)
    >>> exchanged.said()
    '1.weight is no longer part of the model; the old weights are still measured. Call watch again for the changed
    model.'
    >>> exchanged.said()
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        modules = set(map(id, model.modules()))
        self._model = model
        self._there = [
            layer for layer in layers if id(layer.module) in modules
        ]  # layers of other modules are not checked

    def said(self, *, ended: bool = False) -> str | None:
        """Return a message about layers that are gone since the last call; `ended` if training may be over."""
        modules = set(map(id, self._model.modules()))
        if all(id(layer.module) in modules for layer in self._there):
            return None
        kept = modules | set(map(id, self._model.parameters()))
        before = self._there
        self._there = [layer for layer in before if {id(layer.module), id(layer.parameter)} & kept]
        gone = [layer.name for layer in before if layer not in self._there]
        if not gone:
            return None
        names = ", ".join(gone[:_NAMED]) + (f" and {len(gone) - _NAMED} more" if len(gone) > _NAMED else "")
        if ended:
            return f"At the end the model no longer has {names}; the old weights were measured."
        verb = "is" if len(gone) == 1 else "are"
        follows = "the old weights are still measured. Call watch again for the changed model."
        return f"{names} {verb} no longer part of the model; {follows}"


STATE_INFO = {
    "gradient_carried": QuantityInfo(
        "gradient_carried", "1",
        "share of the gradient whose sign is not that of the step's own backward passes: 0 unless it was not cleared",
    ),
    "norm_evaluates": QuantityInfo(
        "norm_evaluates", "1", "1 if the normalizer after the layer uses stored statistics, 0 if those of the batch"
    ),
}  # fmt: skip


class Fresh:
    """Compares the gradient of a step with that of its own backward passes, for the smallest of the layers.

    A step's gradient is either the sum of all its backward passes, perhaps formed by hand, or of those since it was
    last cleared: a GAN clears the gradient that the generator's pass leaves in the discriminator. It is compared with
    both sums, and the smaller share counts. Clipping and loss scaling change the size of a gradient's elements, not
    their signs. What was carried over from earlier steps changes many signs. Ranks that average gradients, and sharded
    layers, are not compared.
    """

    def __init__(self, layers: Sequence[Layer], optimizer: Optimizer) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}  # it clears these only
        sizes = {
            i: layer.parameter.numel()
            for i, layer in enumerate(layers)
            if layer.parameter.requires_grad and id(layer.parameter) in held and not is_sharded(layer.parameter)
        }
        self._layers, self._index = layers, min(sizes, key=lambda i: sizes[i], default=None)
        self._own: list[Tensor] = []  # the sums of all passes, and of those since the gradient was cleared
        self._handle: Any = None

    def attach(self) -> None:
        """Listen to the backward passes of one step."""
        self.detach()
        alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        if self._index is not None and alone:
            parameter = self._layers[self._index].parameter
            if parameter.requires_grad:
                self._handle = parameter.register_hook(self._add)  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Stop listening."""
        if self._handle is not None:
            self._handle.remove()
        self._handle, self._own = None, []

    def _add(self, gradient: Tensor) -> None:
        if is_capturing() or not listens(self):
            return
        if gradient.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(gradient):
            assert self._index is not None
            fresh, before = gradient.detach(), self._layers[self._index].parameter.grad
            if not self._own:
                self._own = [fresh.clone(), fresh.clone()]
                return
            every, since = self._own
            if before is None or before.layout is not torch.strided:
                since = torch.zeros_like(fresh)
            else:  # nothing waits to find out if it was set to zero
                since = torch.where(before.detach().any(), since, 0.0)
            self._own = [every + fresh, since + fresh]

    def take(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Return the share of `gradients` that was carried over, [layers] on the device; NaN where not compared."""
        own, self._own = self._own, []
        if not own or self._index is None:
            return None
        gradient = gradients[self._index]
        if gradient is None or gradient.shape != own[0].shape or gradient.layout is not torch.strided:
            return None
        a, b = gradient.detach().float(), torch.stack(own).float()
        carried = ((a.abs() * (a * b <= 0)).flatten(1).sum(1) / a.abs().sum()).amin()  # NaN without a gradient
        found = torch.full((len(self._layers),), torch.nan, device=a.device)
        found[self._index] = carried
        return found


def layer_modules(model: nn.Module) -> set[int]:
    """Return the ids of the modules that have layers."""
    with suppress(LayerError):  # it has none, unless they are named
        return {id(layer.module) for layer in find_layers(model)}
    return set()


def _normalizers(model: nn.Module, layers: Sequence[Layer], modules: set[int]) -> list[tuple[int, nn.Module]]:
    """Return the normalizers that keep statistics of the data, each with the position of the layer before it.

    Those after other layers of the model, such as a frozen backbone or the other network of a GAN, are left out; those
    before all layers count with the first one. `modules` are the ids of all modules that have layers.

    >>> from gyroscope.layers.layer import layers
    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3))
    >>> [(i, type(module).__name__) for i, module in _normalizers(net, layers(net), layer_modules(net))]
    [(0, 'BatchNorm2d')]
    >>> _normalizers(net, layers(net)[1:], layer_modules(net))
    []
    """
    own = {id(layer.module): i for i, layer in enumerate(layers)}
    others = modules - set(own)
    found: list[tuple[int, nn.Module]] = []
    last: int | None = 0
    for module in model.modules():
        if id(module) in own:
            last = own[id(module)]
        elif id(module) in others:
            last = None
        statistics = getattr(module, "running_mean", None) is not None
        if last is not None and statistics and isinstance(module, nn.modules.batchnorm._NormBase):
            found.append((last, module))
    return found


_PERCENTS = (0, 10, 50, 90, 100)

_NEURON_NAMES = tuple(f"neuron_p{p}" for p in _PERCENTS)

_NEURON_INFO = {
    name: QuantityInfo(name, "1", f"{p} % of the layer's output units have rotated by at most this much")
    for name, p in zip(_NEURON_NAMES, _PERCENTS, strict=True)
}


class Neurons:
    """Measures the rotation of every output unit, as quantiles within each layer."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.rows = [split(layer, "row") for layer in layers]
        self.counts = [row.segments for row in self.rows]

    def measure(self, weights: Sequence[Tensor], reference: Reference) -> Tensor:
        """Return ⟨w,w⟩, ⟨w,w₀⟩ and ⟨w₀,w₀⟩ of every output unit, on the weights' device."""
        held = reference.tensors(weights)
        now = [row.view(w.detach()) for row, w in zip(self.rows, weights, strict=True)]
        first = [row.view(r.to(w.device)) for row, r, w in zip(self.rows, held, weights, strict=True)]
        return dots({"ww": (now, now), "wr": (now, first), "rr": (first, first)}, segments=self.counts)

    def quantiles(self, products: Tensor) -> npt.NDArray[np.float64]:
        """Return [quantiles, layers] from the products of `measure`, in host memory; zero units are left out.

        >>> import torch
        >>> from gyroscope.layers.layer import layers
        >>> net = torch.nn.Linear(2, 2, bias=False)
        >>> neurons = Neurons(layers(net))
        >>> turned = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])      # one unit as it was, one at a right angle
        >>> neurons.quantiles(turned)[:, 0].tolist()
        [0.0, 0.1, 0.5, 0.9, 1.0]
        """
        ww, wr, rr = products.numpy().astype(np.float64).T
        with np.errstate(all="ignore"):
            rotation = np.clip(1.0 - wr / np.sqrt(ww * rr), 0.0, 2.0)
        out = np.full((len(_PERCENTS), len(self.counts)), np.nan)
        start = 0
        for i, count in enumerate(self.counts):
            own = rotation[start : start + count]
            own = own[np.isfinite(own)]
            if own.size:
                out[:, i] = np.percentile(own, _PERCENTS)
            start += count
        return out


class Detail:
    """Detail of the layers of one optimizer.

    Attributes:
        listens: True while anything is attached for a sampled step.
        attached: True while forward hooks are attached.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        optimizer: Optimizer,
        *,
        modules: set[int],
        activations: bool,
        spread: bool,
        threshold: float,
        conditioning: Schedule | None = None,
        shared: bool = False,
        ends: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.exchanged = Exchanged(model, layers)
        self.neurons = Neurons(layers) if spread else None
        hidden = acts.unavailable(model) if activations or conditioning else None
        self.why_not = hidden
        self.conditioned: Conditioned | None = None
        if conditioning is not None and not hidden:
            from gyroscope.monitor.conditioning_probe import Conditioned  # loads all of conditioning

            self.conditioned = Conditioned(model, layers, conditioning, shared=shared)
        self.probe = acts.ActivationProbe(model, layers, threshold=threshold) if activations and not hidden else None
        # Outputs are those of the whole model: the optimizer of its last layer looks at them.
        self.outputs = outs.OutputProbe(model) if self.probe is not None and ends else None
        self.fresh = Fresh(layers, optimizer)
        self.normalizers = _normalizers(model, layers, modules) if layers else []
        self._count = len(layers)
        self.listens = self.attached = False

    @property
    def infos(self) -> dict[str, QuantityInfo]:
        """Names, units and meanings of the quantities that may be found."""
        found = MOMENT_INFO | STATE_INFO
        if self.neurons is not None:
            found |= _NEURON_INFO
        if self.probe is not None:
            found |= acts.INFO
        if self.outputs is not None:
            found |= outs.INFO
        if self.conditioned is not None:
            found |= self.conditioned.infos
        return found

    @property
    def looks_inside(self) -> bool:
        """True if hooks are attached, of this or of the analysis of conditioning."""
        return self.attached or (self.conditioned is not None and self.conditioned.attached)

    def attach(self) -> None:
        """Attach forward hooks for one step."""
        self.listens = True
        if self.probe is not None:
            self.probe.reset()
            if not self.attached:
                self.probe.attach()
            self.attached = True
        if self.outputs is not None:
            self.outputs.attach()

    def detach(self) -> None:
        """Remove all hooks."""
        self.fresh.detach()
        self.listens = False
        if self.probe is not None and self.attached:
            self.probe.detach()
            self.attached = False
        if self.outputs is not None:
            self.outputs.detach()

    def collect(self, track: Track) -> dict[str, Tensor]:
        """Return what was found in this step, on its way to host memory."""
        found = self._sampled(track) if track.sampling else {}
        if track.comparing:
            found["gradient_carried"] = self.fresh.take(track.gradients())
        coming = {name: to_host(value) for name, value in found.items() if value is not None}
        return coming | self._analyzed()

    def _sampled(self, track: Track) -> dict[str, Tensor | None]:
        parameters = track.parameters()
        found: dict[str, Tensor | None] = {"moments": moment_percentiles(self.optimizer, parameters)}
        if self.probe is not None and self.attached:
            found["activations"], found["inputs"] = self.probe.collect(), self.probe.inputs()
        if self.outputs is not None and (seen := self.outputs.take()) is not None:
            unknown = torch.full((self._count - 1, len(outs.OUTPUTS)), torch.nan, dtype=seen.dtype, device=seen.device)
            found["outputs"] = torch.cat([unknown, seen[None]])
        if self.neurons is not None:
            found["neurons"] = self.neurons.measure(parameters, track.reference)
        if self.normalizers:
            modes = torch.full((self._count,), torch.nan)
            for i, module in self.normalizers:
                modes[i] = float(not module.training)
            found["norm_evaluates"] = modes
        return found

    def _analyzed(self) -> dict[str, Tensor]:
        found = None if self.conditioned is None else self.conditioned.take()
        return {} if found is None else {"conditioning": found}

    def resolve(self, found: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
        """Return what `collect` found, once it has arrived, as one value per layer by quantity."""
        values: dict[str, npt.NDArray[np.float32]] = {}
        tables = {
            "moments": MOMENT_NAMES, "activations": acts.COLUMNS, "inputs": acts.INPUTS, "outputs": outs.OUTPUTS,
        }  # fmt: skip
        for key, names in tables.items():
            if key in found:
                columns = found[key].float().numpy().astype(np.float32).T
                values |= dict(zip(names, columns, strict=True))
        if "neurons" in found and self.neurons is not None:
            rows = self.neurons.quantiles(found["neurons"]).astype(np.float32)
            values |= dict(zip(_NEURON_NAMES, rows, strict=True))
        values |= {name: found[name].float().numpy().astype(np.float32) for name in STATE_INFO if name in found}
        kept = {name: value for name, value in values.items() if np.isfinite(value).any()}
        if "conditioning" in found and self.conditioned is not None:
            with np.errstate(over="ignore"):
                columns = found["conditioning"].numpy().astype(np.float32).T
            kept |= {n: v for n, v in zip(self.conditioned.names, columns, strict=True) if not np.isnan(v).all()}
        return kept
