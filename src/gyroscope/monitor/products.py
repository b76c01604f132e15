"""The inner products of a measured step, from which every quantity on the weight side follows.

Five vectors a layer: the weights w after the step, the gradient g the step was taken with, the update u = w − w_before
of this one step, the displacement v = w − w_last since the last measured step, and e = w − w₀. The displacement before
v is p. Where every step is measured, v = u.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

#: The inner products that are measured, in the order of their columns.
COLUMNS = ("ww", "we", "ee", "gg", "wg", "uu", "wu", "gu", "vv", "wv", "pp", "vp")

# Of weights a million times as short as those they have become, ⟨w,w⟩ − 2⟨w,d⟩ + ⟨d,d⟩ has three digits left.
_LEAST = 1e-12


@dataclass(frozen=True)
class Products:
    """What a quantity is computed from: one number a layer each, with any number of steps in front.

    Attributes:
        ww, we, ee, gg, wg, uu, wu, gu, vv, wv, pp, vp: inner products of w, e, g, u, v, p (see the module); NaN where a
            vector is not there, such as the gradient of a layer that has none.
        rr: ⟨w₀,w₀⟩.
        exact: 1 where w₀ is held in the weights' own precision; else ⟨w₀,w₀⟩/⟨w₀,w̃₀⟩ for the rounded w̃₀ that is held.
        lr, decay: the learning rate and weight decay of the layer's parameter group.
        eta: the learning rate where it multiplies a gradient; NaN under a controller, whose rate is an angle.
        steps: the number of steps since the last measured one.

    >>> ones = np.ones((1, 2))
    >>> Products.zeros((1, 2)).with_(ww=4 * ones, we=ones, exact=ones).wr
    array([[3., 3.]])
    """

    ww: Array
    we: Array
    ee: Array
    gg: Array
    wg: Array
    uu: Array
    wu: Array
    gu: Array
    vv: Array
    wv: Array
    pp: Array
    vp: Array
    rr: Array
    exact: Array
    lr: Array
    eta: Array
    decay: Array
    steps: Array

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> Products:
        """Products that are all zero, to fill in.

        >>> Products.zeros((3,)).ww
        array([0., 0., 0.])
        """
        return cls(**{field.name: np.zeros(shape) for field in fields(cls)})

    def with_(self, **some: Array) -> Products:
        """The same with some of them exchanged."""
        return Products(**{field.name: some.get(field.name, getattr(self, field.name)) for field in fields(self)})

    def at(self, steps: slice) -> Products:
        """Some of the steps."""
        return Products(**{field.name: getattr(self, field.name)[steps] for field in fields(self)})

    @property
    def wr(self) -> Array:
        """⟨w,w₀⟩."""
        return self.exact * (self.ww - self.we)

    @property
    def bb(self) -> Array:
        """⟨b,b⟩ of the weights b = w − u before the step; NaN where none of its digits are left beside w."""
        return _square_before(self.ww, self.wu, self.uu)

    @property
    def bg(self) -> Array:
        """⟨b,g⟩ of the weights before the step, where the gradient was taken."""
        return self.wg - self.gu


def _square_before(ww: Array, wd: Array, dd: Array) -> Array:
    """⟨w−d,w−d⟩; NaN where nothing but rounding is left of it."""
    square = ww - 2 * wd + dd
    result: Array = np.where((square > _LEAST * ww) | (ww == 0), square, np.nan)
    return result


def angle(ww: Array, wd: Array, dd: Array) -> Array:
    """The angle between w and w − d from ⟨w,w⟩, ⟨w,d⟩ and ⟨d,d⟩: exact for small angles, unlike an arc cosine.

    NaN where one of the two is zero, or w − d more than a million times as short as w.

    >>> angle(np.array([1.0]), np.array([1.0]), np.array([2.0]))           # w = (1, 0), d = (1, 1)
    array([1.57079633])
    >>> angle(np.array([1.0]), np.array([0.0]), np.array([1e-16]))         # its cosine is 1 − 5e-17
    array([1.e-08])
    """
    across: Array = np.sqrt(np.maximum(ww * dd - wd * wd, 0.0))
    result: Array = np.where((ww > 0) & (_square_before(ww, wd, dd) > 0), np.arctan2(across, ww - wd), np.nan)
    return result
