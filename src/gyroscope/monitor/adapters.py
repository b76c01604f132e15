"""Low-rank adapters (LoRA) next to frozen weights: how far the merged weight W + sBA has rotated from W.

Adapters are recognized by their structure, which is that of the `peft` library: a module with a `base_layer`, with the
factors A and B by name in `lora_A` and `lora_B` (or `lora_embedding_A` and `lora_embedding_B`), and with `scaling`. The
merged weight is never formed. With D = sBA,

    ⟨W,D⟩ = s⟨BᵀW, A⟩        ‖D‖² = s²⟨BᵀB, AAᵀ⟩,

so a layer takes one pass over W and r × n_in numbers, for a rank of r.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gyroscope.base.transfer import to_host
from gyroscope.layers.layer import Layer
from gyroscope.monitor.detail import Detail
from gyroscope.monitor.quantities import Products, compute, find
from gyroscope.monitor.reference import DTYPES
from gyroscope.monitor.track import Track
from gyroscope.store.record import QuantityInfo
from gyroscope.vectors.eager import accumulator
from gyroscope.vectors.layout import any_sharded

NAME = "merged_rotation"
INFO = {
    NAME: QuantityInfo(
        NAME, "1", "cosine distance of a weight with its adapters merged, W + sBA, to the weight W itself"
    )
}
# Elements of W that are converted at once.
_AT_ONCE = 1 << 22

_FACTORS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))


class Adapters:
    """Low-rank adapters of a model, by the layers that they adapt.

    >>> class Adapted(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.base_layer, self.scaling, self.active_adapters = nn.Linear(3, 2, bias=False), {"a": 2.0}, ["a"]
    ...         self.lora_A = nn.ModuleDict({"a": nn.Linear(3, 1, bias=False)})
    ...         self.lora_B = nn.ModuleDict({"a": nn.Linear(1, 2, bias=False)})
    >>> from gyroscope.layers.layer import layers
    >>> net = Adapted()
    >>> adapters = Adapters(net, layers(net))
    >>> _ = net.base_layer.weight.data.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    >>> _ = net.lora_A["a"].weight.data.copy_(torch.tensor([[0.0, 1.0, 0.0]])), net.lora_B["a"].weight.data.fill_(0.0)
    >>> net.lora_B["a"].weight.data[0] = 0.5                         # W = (1, 0, …), sBA = 2·(0, 0.5, …)
    >>> rotation(adapters.measure()).round(4)[0]                     # 1 − cos 45°
    np.float64(0.2929)
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        places = {id(layer.module): i for i, layer in enumerate(layers) if layer.attribute == "weight"}
        adapted: list[Any] = [module for module in model.modules() if _is_adapted(module)]
        self._modules: list[tuple[int, Any]] = [
            (places[id(m.base_layer)], m) for m in adapted if id(m.base_layer) in places
        ]
        self._count = len(layers)

    def __len__(self) -> int:
        return len(self._modules)

    def measure(self) -> Tensor:
        """Return ⟨W,W⟩, ⟨W,D⟩ and ⟨D,D⟩ [layers, 3] on the device; NaN for layers without active adapters."""
        home = self._modules[0][1].base_layer.weight.device
        found = torch.full((self._count, 3), torch.nan, dtype=accumulator(home), device=home)
        for i, module in self._modules:
            factors = _factors(module)
            if factors is not None:
                found[i] = _products(*factors).to(home)
        return found


def rotation(products: Tensor) -> npt.NDArray[np.float64]:
    """Return the rotation of the merged weights from what `Adapters.measure` found, in host memory."""
    rr, wd, ee = products.numpy().astype(np.float64).T
    # w = W + D is measured from w₀ = W: e = w − w₀ = D.
    d = Products.zeros(rr.shape).with_(ww=rr + 2 * wd + ee, we=wd + ee, ee=ee, rr=rr, exact=np.ones_like(rr))
    return compute(find(["rotation"]), d)["rotation"]


def _is_adapted(module: Any) -> bool:
    base = getattr(module, "base_layer", None)
    weight = getattr(base, "weight", None) if isinstance(base, nn.Module) else None
    if not isinstance(weight, Tensor) or not isinstance(getattr(module, "scaling", None), Mapping):
        return False
    return any(hasattr(module, a) and hasattr(module, b) for a, b in _FACTORS)


def _factors(module: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return W as a matrix, s·B and A of all active adapters together; None if W is not W + sBA in the forward pass."""
    weight: Tensor = module.base_layer.weight.detach()
    if getattr(module, "disable_adapters", False) or getattr(module, "merged", False):
        return None
    if weight.dtype not in DTYPES or getattr(module.base_layer, "groups", 1) != 1:
        return None
    listed = getattr(module, "active_adapters", ())
    active = [listed] if isinstance(listed, str) else list(listed)
    scaled, firsts, turned = [], [], bool(getattr(module, "fan_in_fan_out", False))
    for one in active:
        if one in getattr(module, "lora_variant", ()) or one in getattr(module, "lora_magnitude_vector", ()):
            return None  # such as DoRA, which also rescales
        for key_a, key_b in _FACTORS:
            a, b = (_weight(getattr(module, key, {}), one) for key in (key_a, key_b))
            if a is not None and b is not None:
                firsts.append(a.flatten(1))
                scaled.append(float(module.scaling[one]) * b.flatten(1))
                turned = turned or key_a.startswith("lora_embedding")
    if not firsts or any_sharded([weight, *firsts, *scaled]):
        return None
    matrix = weight.T if turned else weight.flatten(1)
    a, b = torch.cat(firsts), torch.cat(scaled, 1)
    return (matrix, b, a) if matrix.shape == (len(b), a.shape[1]) else None


def _weight(factors: Any, adapter: str) -> Tensor | None:
    found: Any = dict(factors.items()).get(adapter)  # a ModuleDict has no `get`
    weight = getattr(found, "weight", found)
    return weight.detach() if isinstance(weight, Tensor) else None


def _products(weight: Tensor, b: Tensor, a: Tensor) -> Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    exact = accumulator(weight.device)
    rows = max(1, _AT_ONCE // max(1, weight.shape[1]))
    across = torch.zeros(b.shape[1], weight.shape[1], dtype=wide, device=weight.device)
    square = torch.zeros((), dtype=exact, device=weight.device)
    for start in range(0, len(weight), rows):
        part = weight[start : start + rows].to(wide)
        across.addmm_(b[start : start + rows].to(wide).T, part)
        square += part.square().sum(dtype=exact)
    a, b = a.to(exact), b.to(exact)
    return torch.stack([square, (across.to(exact) * a).sum(), ((b.T @ b) * (a @ a.T)).sum()])


class AdaptedDetail(Detail):
    """Detail of the layers of one optimizer, with the rotation of merged weights."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer], *arguments: Any, **options: Any) -> None:
        super().__init__(model, layers, *arguments, **options)
        self.adapters = Adapters(model, layers)

    @property
    def infos(self) -> dict[str, QuantityInfo]:
        """Names, units and meanings of the quantities that may be found."""
        return super().infos | (INFO if len(self.adapters) else {})

    def collect(self, track: Track) -> dict[str, Tensor]:
        """Return what was found in this step, on its way to host memory."""
        found = super().collect(track)
        if track.sampling and len(self.adapters):
            found["adapters"] = to_host(self.adapters.measure())
        return found

    def resolve(self, found: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
        """Return what `collect` found, once it has arrived, as one value per layer by quantity."""
        values = super().resolve(found)
        if "adapters" in found and np.isfinite(turned := rotation(found["adapters"])).any():
            values[NAME] = turned.astype(np.float32)
        return values
