"""The fused step on a CPU (`native_step.c`): one call for all layers of a group, as the kernel of `fused` on CUDA.

It is used where `GYROSCOPE_BACKEND` is `native`; see `gyroscope.vectors.native`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gyroscope.control.proposal import RULES, Hyper
from gyroscope.control.steering import TANGENT_FLOOR, Law, Ledger
from gyroscope.vectors.launch import cut
from gyroscope.vectors.native import CHUNK, KINDS, library, reads

_NUMBER = {rule: number for number, rule in enumerate(RULES)}


def _structure(**types: str) -> type[ctypes.Structure]:
    """Return a structure whose fields, of 8 bytes each, are named as in the source."""
    fields = [(name, kind) for kind, names in types.items() for name in names.split()]
    kinds: dict[str, Any] = {"numbers": ctypes.c_double, "whole": ctypes.c_int64, "pointers": ctypes.c_void_p}
    return type("Structure", (ctypes.Structure,), {"_fields_": [(name, kinds[kind]) for name, kind in fields]})


_Options = _structure(
    numbers="decay mu undamped beta1 beta2 eps growth along shrink noise lr floor",
    whole="rule maximize decoupled project relative reproject capped zero",
)
_Ledger = _structure(pointers="multiplier radius power1 power2 age skipped bad")
_Layers = _structure(whole="chunks segments", pointers="segment place first length row address kind partial radius bad")


@cache
def _compiled() -> Any:
    step = library(Path(__file__).with_suffix(".c")).step_layers
    step.argtypes, step.restype = [ctypes.c_void_p] * 3, None
    return step


class Launch:
    """The table for one set of layers: their addresses, and scratch space.

    Args:
        lists: weights, gradients, first and second moments; one tensor per layer each.
        rows: the layers' rows in the ledger.
        counts: the number of segments of each layer.
    """

    def __init__(self, lists: Sequence[Sequence[Tensor]], rows: Sequence[int], counts: Sequence[int]) -> None:
        self._rows, self._counts = np.array(rows, dtype=np.int64), np.array(counts, dtype=np.int64)
        lengths = np.repeat(np.array([t.numel() for t in lists[0]], dtype=np.int64) // self._counts, self._counts)
        within = np.arange(lengths.size) - np.repeat(np.cumsum(self._counts) - self._counts, self._counts)
        self._offsets = within * lengths
        self._sizes = [one[0].element_size() for one in lists]
        self._first = lists[0]
        self._stepped = [t for t in lists[0] if not t.is_inference()]
        segment, place, first = cut(lengths, CHUNK)
        self._arrays: dict[str, np.ndarray[Any, Any]] = {
            "segment": segment,
            "place": place,
            "first": first,
            "length": lengths,
            "row": self._rows,
            "address": np.stack([self._spread(k, list(map(Tensor.data_ptr, one))) for k, one in enumerate(lists)]),
            "kind": np.array([KINDS[one[0].dtype] for one in lists], dtype=np.int64),
            "partial": np.empty((len(segment), 3)),
            "radius": np.empty(lengths.size),
            "bad": np.empty(lengths.size, dtype=np.int64),
        }
        self._layers = _Layers(len(segment), lengths.size)
        for name, array in self._arrays.items():
            setattr(self._layers, name, array.ctypes.data)

    @staticmethod
    def takes(*tensors: Tensor) -> bool:
        """Return whether the compiled step knows the types of these tensors."""
        return reads(*tensors)

    def move_gradients(self, addresses: Sequence[int]) -> None:
        """Update the addresses of the second list; everything else is unchanged."""
        self._arrays["address"][1] = self._spread(1, addresses)

    def _spread(self, k: int, addresses: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return the addresses of the segments of list k."""
        return np.repeat(np.array(addresses, dtype=np.int64), self._counts) + self._offsets * self._sizes[k]

    def __call__(
        self, rule: str, hyper: Hyper, lr: float | Tensor, ledger: Ledger, law: Law, *, zero: bool = False
    ) -> None:
        """Take one step; with `zero`, set the second list (a buffer of displacements) to 0."""
        options = _Options(
            hyper.decay, hyper.momentum, 1.0 - hyper.dampening, hyper.beta1, hyper.beta2, hyper.eps,
            law.growth or 0.0, hyper.along, hyper.momentum_decay * math.log2(0.96), hyper.noise, float(lr),
            TANGENT_FLOOR,
            _NUMBER[rule], hyper.maximize, hyper.decoupled, law.project, law.scale == "relative", law.reproject,
            law.growth is not None, zero,
        )  # fmt: skip
        columns = (
            ledger.multiplier, ledger.radius, ledger.power1, ledger.power2, ledger.age, ledger.skipped, ledger.bad,
        )  # fmt: skip
        book = _Ledger(*map(Tensor.data_ptr, columns))
        _compiled()(ctypes.byref(self._layers), ctypes.byref(options), ctypes.byref(book))
        torch.autograd.graph.increment_version(self._stepped)

    def clear(self, ledger: Ledger) -> None:
        """Set what is not finite to 0 in the first list, where the last step of a layer was skipped."""
        bad = ledger.bad.numpy()[self._rows]
        if bad.any():
            for tensor, one in zip(self._first, np.split(bad, np.cumsum(self._counts)[:-1]), strict=True):
                if one.any():
                    tensor[~torch.isfinite(tensor)] = 0
