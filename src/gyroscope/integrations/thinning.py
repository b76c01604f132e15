"""Which of the measured steps are mirrored."""

from __future__ import annotations

import numpy as np

from gyroscope.store.record import Rows, Values

# What a tool can be asked for at every step without being felt; above it, steps are left out.
AT_EACH_STEP = 100


class Thinning:
    """Lets through measured steps that are `every` steps apart, and keeps the last of those left out.

    A quantity that is measured more seldom passes whenever it is `every` steps after its last.

    >>> rows = Rows(0, np.arange(6), {"rotation": np.zeros((6, 2), np.float32)})
    >>> thinning = Thinning(2)
    >>> [(step, sorted(values)) for step, values in thinning.passed(rows)]
    [(0, ['rotation']), (2, ['rotation']), (4, ['rotation'])]
    >>> [(part, step) for part, step, _ in thinning.left()]
    [(0, 5)]
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._opened: dict[int, int] = {}
        self._passed: dict[tuple[int, str], int] = {}
        self._left: dict[tuple[int, str], tuple[int, Values]] = {}

    def passed(self, rows: Rows) -> list[tuple[int, dict[str, Values]]]:
        """Return the steps of `rows` to mirror, each with its values by quantity: those of the layers of the part."""
        return [(int(step), found) for i, step in enumerate(rows.steps) if (found := self._at(rows, i, int(step)))]

    def left(self) -> list[tuple[int, int, dict[str, Values]]]:
        """Return, and forget, the part, step and values of what was measured after the last step let through."""
        ends: dict[tuple[int, int], dict[str, Values]] = {}
        for (part, quantity), (step, values) in self._left.items():
            ends.setdefault((part, step), {})[quantity] = values
        self._left = {}
        return [(part, step, values) for (part, step), values in sorted(ends.items(), key=lambda end: end[0])]

    def _at(self, rows: Rows, i: int, step: int) -> dict[str, Values]:
        is_open = self._far(step, self._opened.get(rows.part)) or step == self._opened[rows.part]
        found: dict[str, Values] = {}
        for quantity, values in rows.values.items():
            if np.isnan(values[i]).all():
                continue
            key = rows.part, quantity
            if is_open or self._far(step, self._passed.get(key)):
                found[quantity] = values[i]
                self._passed[key] = step
                self._left.pop(key, None)
            else:
                self._left[key] = step, values[i].copy()
        if is_open and found:
            self._opened[rows.part] = step
        return found

    def _far(self, step: int, last: int | None) -> bool:
        return last is None or step < last or step - last >= self.every
