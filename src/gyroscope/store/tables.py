"""A run as tables: what to export, in pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gyroscope.errors import StoreError
from gyroscope.store.given import names_of
from gyroscope.store.record import Steps, Values

if TYPE_CHECKING:
    from gyroscope.store.reader import Run

#: Numbers of one quantity that are held at a time.
_PIECE = 1 << 20

#: One name gives a wide table (a column a layer), several or None (all of them) a long one (a column a quantity).
Wanted = str | Sequence[str] | None


@dataclass(frozen=True)
class Table:
    """A table of a run: wide (`step`, a column a layer), long (`step`, `layer`, a column a quantity), or of a scalar.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(folder) as run:
    ...     Table.of(run, "rotation").columns, Table.of(run, None).columns, Table.of(run, "loss").columns
    (('conv1.weight', 'conv2.weight', 'head.weight'), ('rotation', 'rate'), ('loss',))
    """

    run: Run
    form: str
    columns: tuple[str, ...]
    name: str | None = None

    @classmethod
    def of(cls, run: Run, wanted: Wanted) -> Table:
        """The table that a user asks for.

        Raises:
            StoreError: the run has none of a name.
        """
        known = [*run.quantities, *(name for name in run.scalars if name not in run.quantities)]
        names = list(run.quantities) if wanted is None else names_of(wanted)
        for name in names:
            if name not in known:
                raise StoreError(
                    f"{run.path} has no {name!r}; it has {', '.join(known) or 'no series and no scalars'}."
                )
            if name not in run.quantities and not isinstance(wanted, str):
                raise StoreError(f"{name!r} is a number of the whole network, not of its layers; ask for it alone.")
        if not isinstance(wanted, str):
            return cls(run, "long", tuple(names))
        if wanted in run.quantities:
            return cls(run, "wide", run.layers, wanted)
        return cls(run, "scalar", (wanted,), wanted)

    def pieces(self) -> Iterator[tuple[Steps, Mapping[str, Values]]]:
        """Steps, and by column its values: `[steps]`, in a long table `[steps, layers]`."""
        if self.form == "scalar":
            scalar = self.run.scalars[self.columns[0]]
            yield scalar.steps, {self.columns[0]: scalar.values}  # type: ignore[dict-item]  # float64, as logged
            return
        size = max(1, _PIECE // len(self.run.layers))
        for i in range(0, len(self.run.steps), size):
            steps = self.run.steps[i : i + size]
            if self.form == "wide":
                values = self.run.series(str(self.name), steps=steps)
                yield steps, dict(zip(self.columns, values.T, strict=True))
            else:
                yield steps, {name: self.run.series(name, steps=steps) for name in self.columns}


def text(values: Values, unknown: str) -> list[str]:
    """Numbers as the shortest text that reads back as the same, with `unknown` for NaN.

    >>> import numpy as np
    >>> text(np.array([0.1, np.nan, 1e-8], dtype=np.float32), "")
    ['0.1', '', '1e-08']
    """
    return [unknown if word == "nan" else word for word in values.astype("U").tolist()]
