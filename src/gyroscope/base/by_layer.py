"""Results with one entry per layer: by name, in order, as rows, as a data frame."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from gyroscope.base.lazy import required
from gyroscope.errors import GyroscopeError


def data_frame(rows: Any, columns: Any = None) -> Any:
    """Return rows as a data frame, or say what to install.

    >>> data_frame([{"layer": "fc1", "norm": 2.0}])
      layer  norm
    0   fc1   2.0
    """
    return required("pandas", "`to_pandas`", "gyroscope[export]").DataFrame(rows, columns=columns)


class Entry(Protocol):
    """The result for one layer."""

    @property
    def layer(self) -> str:
        """Name of the layer."""


E = TypeVar("E", bound=Entry)


class ByLayer(Generic[E]):
    """Base class of the dataclasses that hold such results in `entries`.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Norm:
    ...     layer: str
    ...     value: float
    >>> @dataclass(frozen=True)
    ... class Norms(ByLayer[Norm]):
    ...     entries: tuple[Norm, ...]
    >>> norms = Norms((Norm("fc1", 2.0), Norm("fc2", 3.0)))
    >>> norms["fc2"].value, list(norms), "fc3" in norms, norms.rows()[0]
    (3.0, ['fc1', 'fc2'], False, {'layer': 'fc1', 'value': 2.0})
    """

    entries: tuple[E, ...]
    _error: ClassVar[type[GyroscopeError]] = GyroscopeError

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(entry.layer for entry in self.entries)

    def __getitem__(self, layer: str) -> E:
        for entry in self.entries:
            if entry.layer == layer:
                return entry
        raise self._error(self._missing(layer))

    def _missing(self, layer: str) -> str:
        return f"There is no layer {layer!r}; the layers are {', '.join(self.layers)}."

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, as a mapping does."""
        return iter(self.layers)

    def __contains__(self, layer: object) -> bool:
        return layer in self.layers

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per layer."""
        return [asdict(entry) for entry in self.entries]  # type: ignore[call-overload]

    def to_pandas(self) -> Any:
        """Return a data frame with one row per layer."""
        return data_frame(self._flat_rows()).set_index("layer")

    def _flat_rows(self) -> list[dict[str, Any]]:
        return self.rows()
