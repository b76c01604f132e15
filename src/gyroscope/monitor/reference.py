"""Reference weights w₀ that rotation is measured from: where they come from and how they are held."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gyroscope.base.transfer import pinned
from gyroscope.base.whole_file import read_whole
from gyroscope.errors import MissingExtraError, MonitorError
from gyroscope.layers.layer import Layer
from gyroscope.layers.layer import layers as find_layers
from gyroscope.monitor.bundle import Bundle, flat
from gyroscope.store import load
from gyroscope.store.folder import run_file
from gyroscope.vectors import dots
from gyroscope.vectors.layout import is_dense, is_sharded, local, memory_view, plan

Precision = Literal["auto", "float32", "bfloat16"]
Place = Literal["auto", "device", "cpu"]
Source = nn.Module | Mapping[str, Any] | str | Path

# Rounding w₀ to bfloat16 causes an error of 1e-3/√n in the cosine of a layer of n elements: 1e-6 from this size on.
_LARGE = 1 << 20
# Below this size everything is held exactly, because rounding would save little.
_WORTH_ROUNDING = 64 << 20
# If w₀ takes a larger share of a GPU's free memory, it is held in pinned memory.
_FREE_SHARE = 0.25
# Bytes that are streamed from pinned memory at once.
_STREAMED = 256 << 20

FILE = "reference.pt"

# The dtypes that can be measured, and measured from.
DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}

_WRAPPERS = re.compile(r"(^|\.)(?:(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.)+")


@dataclass(frozen=True)
class Reference:
    """w₀ of all layers that one optimizer steps.

    Attributes:
        bundles: the layers that are measured together, each with its part of w₀.
        rr: ⟨w₀,w₀⟩ per layer.
        exact: 1 if w₀ is held exactly, else ⟨w₀,w₀⟩/⟨w₀,w̃₀⟩ for the rounded w̃₀.
        held: precision, place and size, in words.
    """

    bundles: list[Bundle]
    rr: npt.NDArray[np.float64]
    exact: npt.NDArray[np.float64]
    held: str

    @classmethod
    def take(
        cls,
        weights: Sequence[Tensor],
        values: Sequence[Tensor] | None = None,
        *,
        precision: Precision = "auto",
        place: Place = "auto",
    ) -> Reference:
        """Hold `values`, by default the weights themselves, as the reference of `weights`."""
        source = [w.detach() for w in (weights if values is None else values)]
        mine, theirs = local(weights), local(source)
        held_in = _precisions(weights, [t.dtype for t in theirs], precision)
        bundles, on_host = _bundle(mine, held_in, place)
        held: list[Tensor] = [torch.empty(0)] * len(mine)
        for bundle in bundles:
            parts = bundle.layout.views(bundle.reference)
            torch._foreach_copy_(parts, [flat(theirs[i].to(mine[i].device), mine[i]) for i in bundle.members])
            for i, part in zip(bundle.members, parts, strict=True):
                held[i] = part
        originals = [flat(t.to(w.device), w) for t, w in zip(theirs, mine, strict=True)]
        products = dots({"rr": (originals, originals), "rq": (originals, held)}) if mine else torch.zeros(0, 2)
        over_ranks = plan([list(weights)], [1] * len(weights))
        if over_ranks is not None:
            products = over_ranks.reduce(products)
        rr, rq = products.cpu().numpy().T
        rounded = np.array([torch.promote_types(h, t.dtype) != h for h, t in zip(held_in, theirs, strict=True)])
        with np.errstate(all="ignore"):
            exact = np.where(rounded & (rq != 0), rr / rq, 1.0)
        if on_host:
            for bundle in bundles:
                bundle.reference = pinned(bundle.reference.cpu())
        return cls(bundles, rr, exact, _in_words(bundles))

    def moved(self, before: Sequence[Tensor], weights: Sequence[Tensor]) -> Reference:
        """Return the same for weights with another memory layout, device or precision than `before`."""
        tensors = self.tensors(before)
        bundles, on_host = _bundle(weights, [t.dtype for t in tensors], "cpu" if self._on_host else "device")
        for bundle in bundles:
            parts = bundle.layout.views(bundle.reference)
            torch._foreach_copy_(parts, [flat(tensors[i].to(bundle.device), weights[i]) for i in bundle.members])
            if on_host:
                bundle.reference = pinned(bundle.reference.cpu())
        return Reference(bundles, self.rr, self.exact, _in_words(bundles))

    @property
    def _on_host(self) -> bool:
        return any(bundle.reference.device != bundle.device for bundle in self.bundles)

    def tensors(self, weights: Sequence[Tensor], *, on_host: bool = False) -> list[Tensor]:
        """Return w₀ as whole tensors of the layers' shapes; all ranks of a sharded model must call together."""
        found: list[Tensor] = [torch.empty(0)] * len(weights)
        mine = local(weights)
        for bundle in self.bundles:
            for i, part in zip(bundle.members, bundle.layout.views(bundle.reference), strict=True):
                like = mine[i].detach()
                if is_dense(like) and not like.is_contiguous():
                    whole = torch.empty_like(like, dtype=part.dtype, device=part.device)
                    memory_view(whole, 1)[0].copy_(part)
                else:
                    whole = part.clone().view(like.shape)
                if is_sharded(weights[i]):
                    from gyroscope.vectors.layout import as_sharded

                    whole = as_sharded(whole.to(like.device), weights[i]).full_tensor()  # type: ignore[attr-defined]
                # One at a time to host memory: together they may not fit on the device.
                found[i] = whole.cpu() if on_host else whole
        return found


def _precisions(
    weights: Sequence[Tensor], given: Sequence[torch.dtype], precision: Precision
) -> list[torch.dtype]:  # fmt: skip
    """Return the dtype of each layer's w₀, by the size of whole layers, so that all ranks decide the same."""
    wide = [torch.promote_types(w.dtype, dtype) for w, dtype in zip(weights, given, strict=True)]
    size = sum(w.numel() * dtype.itemsize for w, dtype in zip(weights, wide, strict=True))
    round_off = precision == "bfloat16" or (precision == "auto" and size > _WORTH_ROUNDING)
    return [
        torch.bfloat16 if round_off and dtype.itemsize > 2 and (precision != "auto" or w.numel() >= _LARGE) else dtype
        for w, dtype in zip(weights, wide, strict=True)
    ]


def _bundle(weights: Sequence[Tensor], held: Sequence[torch.dtype], place: Place) -> tuple[list[Bundle], bool]:
    """Return the layers that can be measured together, and whether w₀ goes to pinned memory."""
    groups: dict[Any, list[int]] = {}
    for i, w in enumerate(weights):
        groups.setdefault((w.device, w.dtype, held[i]), []).append(i)
    on_host = place == "cpu"
    if place == "auto" and weights and weights[0].device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(weights[0].device)
        needed = sum(w.numel() * dtype.itemsize for w, dtype in zip(weights, held, strict=True))
        on_host = needed > _FREE_SHARE * free
    on_host = on_host and bool(weights) and weights[0].device.type == "cuda"
    bundles = []
    for (_, _, dtype), members in groups.items():
        for some in _at_most(_STREAMED // dtype.itemsize if on_host else None, members, weights):
            bundles.append(Bundle(some, [weights[i] for i in some], dtype))
    return bundles, on_host


def _at_most(most: int | None, members: list[int], weights: Sequence[Tensor]) -> list[list[int]]:
    """Split a list of layers into parts of at most so many elements."""
    if most is None:
        return [members]
    parts: list[list[int]] = [[]]
    for i in members:
        if parts[-1] and sum(weights[j].numel() for j in parts[-1]) + weights[i].numel() > most:
            parts.append([])
        parts[-1].append(i)
    return parts


def _in_words(bundles: Sequence[Bundle]) -> str:
    places: dict[str, int] = {}
    for bundle in bundles:
        r = bundle.reference
        where = "pinned memory, streamed" if r.device.type == "cpu" != bundle.device.type else str(r.device)
        kind = str(r.dtype).removeprefix("torch.")
        key = f"{kind} on {where}" if "pinned" not in where else f"{kind} in {where}"
        places[key] = places.get(key, 0) + r.numel() * r.element_size()
    return ", ".join(f"{key} ({size / 1e6:.1f} MB)" for key, size in places.items()) or "nothing"


def from_source(source: Source, layers: Sequence[Layer], what: str = "`reference`") -> list[Tensor]:
    """Return the weights of `layers` from another model, a state dict or a checkpoint file, by their names.

    >>> net, other = nn.Linear(3, 2), nn.Linear(3, 2)
    >>> bool((from_source(other, find_layers(net))[0] == other.weight).all())
    True
    """
    if isinstance(source, nn.Module):
        named: Mapping[str, Any] = {layer.name: layer.parameter for layer in find_layers(source)}
    elif isinstance(source, str | Path):
        named = read_tensors(Path(source))
    elif isinstance(source, Mapping):
        named = source
    else:
        raise MonitorError(
            f"{what} must be a model, a state dict, the path of a checkpoint, or the folder of a run, got a "
            f"{type(source).__name__}."
        )
    if not all(isinstance(key, str) for key in named):
        raise MonitorError(f"{what} must be a state dict, whose keys are names, got the keys {list(named)[:3]}.")
    named = _without_prefixes(named)
    found = []
    for layer in layers:
        weight = next((named[key] for key in _keys(layer) if key in named), None)
        if weight is None or not isinstance(weight, Tensor):
            have = (", ".join(list(named)[:4]) or "none") + (" and more" if len(named) > 4 else "")
            raise MonitorError(
                f"{what} must have the weight {layer.name!r}, got {have}. "
                "Pass one of the same model, or choose layers that it has (layers=...)."
            )
        if weight.shape != layer.parameter.shape:
            raise MonitorError(
                f"{what} must have {layer.name!r} of shape {tuple(layer.parameter.shape)}, as the model has, got "
                f"{tuple(weight.shape)}. Pass one of the same model."
            )
        if weight.is_meta or weight.layout != torch.strided or weight.dtype not in DTYPES:
            kind = "on the meta device, without values" if weight.is_meta else f"{weight.dtype}, {weight.layout}"
            raise MonitorError(
                f"{what} must hold dense tensors of float32, float64, bfloat16 or float16, got {layer.name!r}, which "
                f"is {kind}. Convert it with .to_dense() or .float(), or load it to a CPU."
            )
        found.append(weight.detach())
    return [_laid_out(w, layer.parameter) for w, layer in zip(found, layers, strict=True)]


def _laid_out(weight: Tensor, parameter: Tensor) -> Tensor:
    """Distribute a whole weight over the ranks as the parameter is."""
    if not is_sharded(parameter) or is_sharded(weight):
        return weight
    from torch.distributed.tensor import distribute_tensor

    like: Any = parameter
    return distribute_tensor(weight.to(like.device), like.device_mesh, like.placements)


def _keys(layer: Layer) -> list[str]:
    """Return the names that a layer's weight may have in a state dict."""
    stem = layer.name.removesuffix(layer.name.split(".")[-1])
    return [layer.name, stem + layer.attribute]


def _without_prefixes(named: Mapping[str, Any]) -> dict[str, Any]:
    for key in ("state_dict", "model_state_dict", "model"):
        inner = named.get(key)
        if isinstance(inner, Mapping):
            named = inner
            break
    plain = {_WRAPPERS.sub(r"\1", k): v for k, v in named.items()}
    if plain and all(key.startswith("module.") for key in plain):
        plain = {key.removeprefix("module."): value for key, value in plain.items()}
    return plain


def _reference_file(folder: Path) -> str:
    """Return the name of the file with the last reference of a run."""
    if not run_file(folder).exists():
        return FILE
    with load(folder) as run:
        return str(run.meta.get("reference_file", FILE))


def read_tensors(path: Path) -> Mapping[str, Any]:
    """Return the tensors of a checkpoint file, or of a run's reference; nothing in it is executed."""
    file = path / _reference_file(path) if os.path.isdir(path) else path
    if not os.path.isfile(file):
        raise MonitorError(f"There is no file {file}. Pass the path of a checkpoint, or of a run that has a {FILE}.")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            loaded: Any = load_file(str(file))
        else:
            # A user's checkpoint may be in another format of torch.
            loaded = read_whole(file) if path.is_dir() else torch.load(file, map_location="cpu", weights_only=True)
    except ImportError:
        raise MissingExtraError(
            f"Reading {file} needs safetensors, which is not installed: pip install safetensors"
        ) from None
    except Exception as error:
        raise MonitorError(
            f"{file} cannot be read as a checkpoint of tensors: {error}. Save a state dict with torch.save."
        ) from error
    if not isinstance(loaded, Mapping):
        raise MonitorError(f"{file} must hold a state dict, got a {type(loaded).__name__}.")
    tensors = loaded.get("tensors")
    return tensors if isinstance(tensors, Mapping) else loaded
