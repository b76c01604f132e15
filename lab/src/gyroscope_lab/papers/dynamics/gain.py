"""The difference of two kinds of runs from the same seeds, and whether it is more than chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np


@dataclass(frozen=True)
class Gain:
    """A mean difference, and its standard error over seeds; None of one seed.

    >>> Gain(1.0, 0.25).told, Gain(1.0, 0.25).above, Gain(-1.0, 0.25).above, Gain(0.4, 0.25).above
    ('+1.00 ± 0.25', True, False, None)
    """

    mean: float
    error: float | None

    @property
    def told(self) -> str:
        """In words."""
        return f"{self.mean:+.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")

    @property
    def above(self) -> bool | None:
        """Whether it is above zero; None within two standard errors, and of one seed."""
        if self.error is None or abs(self.mean) <= 2 * self.error:
            return None
        return self.mean > 0

    @property
    def none(self) -> bool | None:
        """Whether it is zero within two standard errors; None of one seed."""
        return None if self.error is None else abs(self.mean) <= 2 * self.error


def gain(these: Sequence[float], those: Sequence[float]) -> Gain:
    """By how much these are above those, seed by seed.

    >>> gain([2.0, 4.0], [1.0, 1.0])
    Gain(mean=2.0, error=1.0)
    """
    differences = np.array(these) - np.array(those)
    error = float(differences.std(ddof=1) / sqrt(len(differences))) if len(differences) > 1 else None
    return Gain(float(differences.mean()), error)


def reproduced(whole: Gain, part: Gain, *, share: float) -> bool | None:
    """Whether a share of a gain comes by another way too; None where either may be chance.

    >>> reproduced(Gain(1.0, 0.1), Gain(0.9, 0.1), share=0.5), reproduced(Gain(1.0, 0.1), Gain(0.1, 0.1), share=0.5)
    (True, False)
    >>> reproduced(Gain(1.0, 0.1), Gain(0.9, 0.5), share=0.5) is None
    True
    """
    if not whole.above or part.error is None:
        return None
    if part.above and part.mean >= share * whole.mean:
        return True
    return False if part.mean + 2 * part.error < share * whole.mean else None
