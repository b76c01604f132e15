"""Going on with a run that is there already: at which step, and against which reference."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gyroscope.errors import MonitorError
from gyroscope.monitor.quantities import compute, find
from gyroscope.monitor.reference import FILE, Place, Precision, Reference, from_source
from gyroscope.monitor.track import Track
from gyroscope.store import LayerInfo, Run, load
from gyroscope.store.folder import run_file

# How far recorded rotations, which are kept in float32, may be from those of the weights at hand.
_CLOSE = 2e-6


@dataclass(frozen=True)
class Saved:
    """A reference as a checkpoint or a run keeps it: tensors by layer, and for each ⟨w₀,w₀⟩ and its correction."""

    tensors: Mapping[str, Tensor]
    squares: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, tracks: Sequence[Track]) -> Saved:
        """The reference of some tracks; all ranks of a sharded model ask together."""
        tensors: dict[str, Tensor] = {}
        squares: dict[str, list[float]] = {}
        for track in tracks:
            held = track.reference
            names = [layer.name for layer in track.layers]
            tensors |= dict(zip(names, held.tensors(track.parameters()), strict=True))
            squares |= {
                name: [float(a), float(b)] for name, a, b in zip(names, held.rr, held.exact, strict=True)
            }  # fmt: skip
        return cls(tensors, squares)

    def hold(self, track: Track, precision: Precision, place: Place) -> Reference:
        """It again, as the reference of a track."""
        values = from_source(self.tensors, track.layers, "saved reference")
        held = Reference.take(track.parameters(), values, precision=precision, place=place)
        numbers = np.array([self.squares[layer.name] for layer in track.layers]).reshape(-1, 2)
        return Reference(held.bundles, numbers[:, 0].copy(), held.exact * numbers[:, 1], held.held)

    def write(self, file: Path) -> None:
        """To a file that is there whole or not at all."""
        new = file.with_suffix(".new")
        tensors = {name: t.cpu() for name, t in self.tensors.items()}
        torch.save({"tensors": tensors, "squares": dict(self.squares)}, new)
        os.replace(new, file)

    @classmethod
    def read(cls, file: Path) -> Saved:
        """From such a file; nothing in it is executed."""
        try:
            data = torch.load(file, map_location="cpu", weights_only=True)
            return cls(data["tensors"], data["squares"])
        except FileNotFoundError:
            raise MonitorError(
                f"{file} is not there, so what the run was measured against is not known; give it: reference=..."
            ) from None
        except Exception as error:
            raise MonitorError(
                f"{file} cannot be read ({type(error).__name__}: {error}); give what the run was measured against: "
                "reference=..."
            ) from error


def write_all(payloads: Sequence[tuple[Saved, Path]]) -> Iterator[Any]:
    """Write references from the writer's thread."""
    for saved, file in payloads:
        saved.write(file)
    return iter(())


def file_of(attempt: int) -> str:
    """The file of the reference that an attempt began with.

    >>> file_of(1), file_of(3)
    ('reference.pt', 'reference-3.pt')
    """
    return FILE if attempt == 1 else FILE.replace(".pt", f"-{attempt}.pt")


class Existing:
    """A run that is there already, of the same layers."""

    def __init__(self, run: Run) -> None:
        self.path = run.path
        self.meta = run.meta
        self.attempts = len(run.attempts)
        steps = run.steps
        self.last = int(steps[-1]) if len(steps) else 0
        self._steps = steps
        self._rotation = run.series("rotation") if "rotation" in run.quantities else None
        self._norms = run.series("weight_norm") if "weight_norm" in run.quantities else None

    @classmethod
    def at(cls, path: Path, table: Sequence[LayerInfo]) -> Existing | None:
        """The run in a folder, or None. A run of other layers is refused, before anything is changed."""
        if not run_file(path).exists():
            return None
        with load(path) as run:
            for theirs, own in zip(run.layer_table, table, strict=False):
                if (theirs.name, tuple(theirs.shape), theirs.part) != (own.name, tuple(own.shape), own.part):
                    raise MonitorError(
                        f"{path} holds a run of another model: it has {theirs.name!r} of shape {tuple(theirs.shape)} "
                        f"where this one has {own.name!r} of shape {tuple(own.shape)}. Give another folder."
                    )
            if len(run.layer_table) != len(table):
                raise MonitorError(
                    f"{path} holds a run of another model or another choice of layers: it has {len(run.layer_table)}, "
                    f"this one {len(table)}. Give another folder."
                )
            return cls(run)

    def reference(self) -> Saved:
        """What it was measured against."""
        return Saved.read(self.path / self.meta.get("reference_file", FILE))

    def step_of(self, tracks: Sequence[Track], members: Sequence[Sequence[int]]) -> int | None:
        """The last recorded step at which the weights were those at hand, told by their rotation and norm."""
        if self._rotation is None or self._norms is None or not len(self._steps):
            return None
        try:
            saved = self.reference()
        except MonitorError:
            return None
        rotation, norms = np.full((2, self._rotation.shape[1]), np.nan)
        for track, positions in zip(tracks, members, strict=True):
            probe = Track(track.layers, track.optimizer, saved.hold(track, "auto", "auto"), moves=False)
            measured = probe.measure(gradients=False)
            measured.wait()
            values = compute(find(["rotation", "weight_norm"]), probe.products([measured]))
            rotation[list(positions)], norms[list(positions)] = values["rotation"][0], values["weight_norm"][0]
        with np.errstate(all="ignore"):
            near = (abs(self._rotation - rotation) <= _CLOSE) | (np.isnan(self._rotation) & np.isnan(rotation))
            near &= (abs(self._norms - norms) <= _CLOSE * norms) | (norms == 0)
        found = np.flatnonzero(near.all(1))
        return int(self._steps[found[-1]]) if len(found) else None
