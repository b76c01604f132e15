"""Inner products of a measured step, and the quantities on the weight side, each a pure function of them.

There are five vectors per layer: the weights w after the step, the gradient g that the step was taken with, the update
u = w − b of this one step from the weights b before it, the displacement v = w − w_last since the last measured step,
and e = w − w₀. The displacement before v is p. Where every step is measured, v = u.

You can register a quantity of your own with `quantity` and ask for it by name: `gyroscope.watch(..., quantities=...)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches

import numpy as np
import numpy.typing as npt

from gyroscope.base.accepted import listed
from gyroscope.errors import MonitorError
from gyroscope.store.record import QuantityInfo

Array = npt.NDArray[np.float64]

#: The inner products that are measured, in the order of their columns.
COLUMNS = ("ww", "we", "ee", "gg", "wg", "uu", "wu", "gu", "vv", "wv", "pp", "vp", "bb")

# If the weights were a million times shorter before than they are now, ⟨w,w⟩ − 2⟨w,d⟩ + ⟨d,d⟩ has three digits left.
_LEAST = 1e-12

# Where weights grew by more than `_LONGER`, ⟨w,w⟩⟨d,d⟩ − ⟨w,d⟩² below the share `_ROUNDING` of ⟨w,w⟩⟨d,d⟩ is rounding.
_LONGER, _ROUNDING = 10.0, 1e-15


@dataclass(frozen=True)
class Products:
    """Inputs of a quantity: arrays with one number per layer, after any number of dimensions for steps.

    Attributes:
        ww, we, ee, gg, wg, uu, wu, gu, vv, wv, pp, vp, bb: inner products of w, e, g, u, v, p, b (see the module); NaN
            if a vector does not exist, such as the gradient of a layer that has none.
        rr: ⟨w₀,w₀⟩.
        exact: 1 if w₀ is held in the weights' own precision; else ⟨w₀,w₀⟩/⟨w₀,w̃₀⟩ for the rounded w̃₀ that is held.
        lr, decay: the learning rate and weight decay of the layer's parameter group.
        eta: the learning rate η if it multiplies a gradient; NaN under a controller, whose rate is an angle.
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
    bb: Array
    rr: Array
    exact: Array
    lr: Array
    eta: Array
    decay: Array
    steps: Array

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> Products:
        """Return products that are all zero, to fill in.

        >>> Products.zeros((3,)).ww
        array([0., 0., 0.])
        """
        return cls(**{field.name: np.zeros(shape) for field in fields(cls)})

    def with_(self, **some: Array) -> Products:
        """Return a copy with some arrays replaced."""
        return Products(**{field.name: some.get(field.name, getattr(self, field.name)) for field in fields(self)})

    def at(self, steps: slice) -> Products:
        """Return the products of some of the steps."""
        return Products(**{field.name: getattr(self, field.name)[steps] for field in fields(self)})

    @property
    def wr(self) -> Array:
        """⟨w,w₀⟩."""
        return self.exact * (self.ww - self.we)

    @property
    def bg(self) -> Array:
        """⟨b,g⟩ of the weights before the step, where the gradient was taken; NaN if only rounding is left of it."""
        result: Array = np.where(self.bb > _LEAST * self.ww, self.wg - self.gu, np.nan)
        return result


def _square_before(ww: Array, wd: Array, dd: Array) -> Array:
    """⟨w−d,w−d⟩; NaN if only rounding is left of it."""
    square = ww - 2 * wd + dd
    result: Array = np.where((square > _LEAST * ww) | (ww == 0), square, np.nan)
    return result


def angle(ww: Array, wd: Array, dd: Array) -> Array:
    """Angle between w and w − d from ⟨w,w⟩, ⟨w,d⟩ and ⟨d,d⟩, exact for small angles, unlike an arc cosine.

    It is NaN if w or w − d is zero, if w − d is more than a million times shorter than w, or if it is more than ten
    times shorter and the angle is below the rounding error.

    >>> angle(np.array([1.0]), np.array([1.0]), np.array([2.0]))           # w = (1, 0), d = (1, 1)
    array([1.57079633])
    >>> angle(np.array([1.0]), np.array([0.0]), np.array([1e-16]))         # its cosine is 1 − 5e-17
    array([1.e-08])
    """
    across, before = ww * dd - wd * wd, _square_before(ww, wd, dd)
    lost = (dd > _LONGER**2 * before) & (across < _ROUNDING * ww * dd)
    turned = np.arctan2(np.sqrt(np.maximum(across, 0.0)), ww - wd)
    result: Array = np.where((ww > 0) & (before > 0) & ~lost, turned, np.nan)
    return result


Function = Callable[[Products], Array]


@dataclass(frozen=True)
class Quantity:
    """A function of the inner products, and its meaning.

    Attributes:
        info: name, unit and meaning, as a run shows them.
        function: maps `Products` of shape [steps, layers] to an array of that shape.
        needs: the inner products that it reads; others need not be measured.
    """

    info: QuantityInfo
    function: Function
    needs: frozenset[str]


_registry: dict[str, Quantity] = {}

# Below this, rotation from a rounded w₀ is only rounding.
_INVISIBLE = 1e-7

# The share of a gradient's square across the weights below which it is only rounding: an angle of 0.001.
_ACROSS = 1e-6

# If w₀ is this many times shorter than w, ⟨w,w₀⟩ = ⟨w,w⟩ − ⟨w,e⟩ has an error of 1e-6 ‖w‖‖w₀‖; beyond, a larger one.
_OUTGROWN = 1e10


def quantity(name: str, unit: str, meaning: str) -> Callable[[Function], Function]:
    """Register a quantity: a pure function of the inner products of one layer's w, g, u, v, e and p.

    The function is called once with made-up numbers, to find out which products it reads and to check that it returns
    one number per layer.

    Args:
        name: its name, of letters, digits and underscores.
        unit: such as "rad", or "1" for a ratio.
        meaning: its meaning in one line.

    Example:
        >>> @quantity("my_share", "1", "share of the update that changes the norm")
        ... def my_share(d):
        ...     return d.wu**2 / (d.ww * d.uu)
        >>> sorted(find(["my_share"])[0].needs)
        ['uu', 'wu', 'ww']
        >>> forget("my_share")
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*", name):
        raise MonitorError(f"`name` must be letters, digits and underscores, got {name!r:.80}. Try 'my_ratio'.")
    if name in _registry and _registry[name].function.__module__ == __name__:
        raise MonitorError(f"`name` must be new, got {name!r}, which is built in. Try {'my_' + name!r}.")
    for argument, words in (("unit", unit), ("meaning", meaning)):
        if not isinstance(words, str) or not words or (argument == "meaning" and "\n" in words):
            raise MonitorError(
                f"`{argument}` of {name!r} must be one line of text, got {words!r:.80}. Try '1' as the unit of a ratio."
            )

    def register(function: Function) -> Function:
        known = _registry.get(name)
        if known is not None and _home(known.function) != _home(
            function
        ):  # the same function again: a cell that runs twice
            raise MonitorError(
                f"`name` must be new, got {name!r}, which is registered. Choose another, or `forget` it first."
            )
        _registry[name] = Quantity(QuantityInfo(name, unit, meaning), function, _probe(name, function))
        return function

    return register


def _home(function: Function) -> tuple[object, object]:
    return getattr(function, "__module__", None), getattr(function, "__qualname__", function)


def forget(name: str) -> None:
    """Remove a quantity from the registry.

    >>> @quantity("cube", "1", "the cube of the norm")
    ... def cube(d):
    ...     return d.ww**1.5
    >>> forget("cube")
    >>> "cube" in known()
    False
    """
    if not isinstance(name, str) or name not in _registry:
        raise MonitorError(_unknown("name", name))
    if name in DEFAULT:
        raise MonitorError(
            f"`name` must be a quantity of your own, got {name!r}, which is built in. Choose which ones are recorded "
            "with watch(quantities=...)."
        )
    del _registry[name]


def find(names: Iterable[str] | None = None) -> list[Quantity]:
    """Return the quantities of the given names; without names, those that are recorded by default.

    >>> [q.info.name for q in find(["rotation", "rate"])]
    ['rotation', 'rate']
    """
    if names is None:
        return [_registry[name] for name in DEFAULT]
    given = listed(names)
    if not all(isinstance(name, str) for name in given):
        raise MonitorError(f"`quantities` must be a list of names, got {names!r:.80}. Try ['rotation', 'rate'].")
    wanted = list(dict.fromkeys(map(str, given)))
    for name in wanted:
        if name not in _registry:
            raise MonitorError(_unknown("quantities", name))
    if not wanted:
        raise MonitorError("`quantities` must name at least one quantity, got none. Try ['rotation'].")
    return [_registry[name] for name in wanted]


def known() -> dict[str, QuantityInfo]:
    """Return all registered quantities by name, with their units and meanings.

    >>> known()["rate"].unit
    'rad'
    """
    return {name: one.info for name, one in _registry.items()}


def compute(quantities: Sequence[Quantity], products: Products) -> dict[str, Array]:
    """Return the values of some quantities, [steps, layers] each; NaN if an input is missing or zero.

    >>> d = Products.zeros((1, 1)).with_(ww=np.full((1, 1), 9.0))
    >>> compute(find(["weight_norm", "update_ratio"]), d)["weight_norm"]
    array([[3.]])
    """
    values = {}
    for one in quantities:
        with np.errstate(all="ignore"):
            value = np.asarray(one.function(products), dtype=np.float64)
        if value.shape != products.ww.shape:
            raise MonitorError(
                f"The quantity {one.info.name!r} must return shape {products.ww.shape}, the shape of the products, got "
                f"{value.shape}."
            )
        values[one.info.name] = value
    return values


def _unknown(argument: str, name: object) -> str:
    near = get_close_matches(str(name), _registry, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else " Register your own with `quantity`."
    return f"`{argument}` must be one of {', '.join(_registry)}, got {name!r:.80}.{hint}"


class _Noting:
    """Stand-in for `Products` that notes which products are read."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        shape = (2, 3)
        self._values = {field.name: random.uniform(0.5, 1.0, shape) for field in fields(Products)}
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Array:
        if name in self._values:
            self.read.add(name)
            return self._values[name]
        found: property | None = getattr(Products, name, None)
        if not isinstance(found, property) or found.fget is None:
            raise AttributeError(f"there is no product {name!r}; there are {', '.join(self._values)}, wr, bg")
        result: Array = found.fget(self)
        return result


def _probe(name: str, function: Function) -> frozenset[str]:
    """Return the columns that a function reads, after checking that it works."""
    noting = _Noting()
    try:
        with np.errstate(all="ignore"):
            value = np.asarray(function(noting))  # type: ignore[arg-type]
    except Exception as error:
        raise MonitorError(
            f"The quantity {name!r} must be a function of the inner products, got one that fails: "
            f"{type(error).__name__}: {error}. Try `lambda d: d.gu / (d.gg * d.uu) ** 0.5`."
        ) from error
    if value.shape != (2, 3) or value.dtype.kind not in "fiub":
        raise MonitorError(
            f"The quantity {name!r} must return one number per layer, got {value.dtype} of shape {value.shape} for "
            "products of shape (2, 3)."
        )
    return frozenset(noting.read) & frozenset(COLUMNS)


@quantity("rotation", "1", "cosine distance of the weights to their reference: 0 as it was, 1 at a right angle")
def _rotation(d: Products) -> Array:
    # 1 − cos from the difference e: the difference of the norms follows from 2⟨w,e⟩ − ⟨e,e⟩ = ⟨w,w⟩ − ⟨w₀,w₀⟩, so
    # nothing cancels however small the angle is. If e is long, because w is far shorter than w₀, the cosine has more
    # digits. With a rounded w₀ the difference is no better than the cosine.
    length, first = np.sqrt(d.ww), np.sqrt(d.rr)
    norms = length * first
    growth = (2 * d.we - d.ee) / (length + first)
    small = np.maximum(d.ee - growth**2, 0.0) / (2 * norms)
    coarse = 1.0 - d.wr / norms
    exact = np.where((d.ee <= 2 * norms) | (length > first), small, coarse)
    rotated: Array = np.where(d.exact == 1.0, exact, np.where(coarse < _INVISIBLE, 0.0, coarse))
    return np.where((norms > 0) & (length <= _OUTGROWN * first), np.clip(rotated, 0.0, 2.0), np.nan)


@quantity("rate", "rad", "angle by which the weights have turned since the last measured step")
def _rate(d: Products) -> Array:
    return angle(d.ww, d.wv, d.vv)


@quantity("rate_per_step", "rad", "the same angle divided by the number of steps it took")
def _rate_per_step(d: Products) -> Array:
    return angle(d.ww, d.wv, d.vv) / d.steps


@quantity("weight_norm", "1", "Euclidean norm of the weights")
def _weight_norm(d: Products) -> Array:
    return np.sqrt(d.ww)


@quantity("weight_norm_before", "1", "Euclidean norm of the weights before the step")
def _weight_norm_before(d: Products) -> Array:
    return np.sqrt(d.bb)


@quantity("gradient_norm", "1", "norm of the gradient the step was taken with, after clipping and unscaling")
def _gradient_norm(d: Products) -> Array:
    return np.sqrt(d.gg)


@quantity("update_norm", "1", "norm of the change of the weights in this one step")
def _update_norm(d: Products) -> Array:
    return np.sqrt(d.uu)


@quantity("update_ratio", "1", "norm of the update as a share of that of the weights it changed")
def _update_ratio(d: Products) -> Array:
    return np.where(d.bb > 0, np.sqrt(d.uu / d.bb), np.nan)


@quantity(
    "effective_lr",
    "1",
    "learning rate over the squared norm of the weights, η/‖w‖²: what a normalized layer feels under SGD",
)
def _effective_lr(d: Products) -> Array:
    return np.where(d.ww > 0, d.eta / d.ww, np.nan)


@quantity("effective_lr_measured", "1", "angle of this step over ‖w‖ times the gradient's norm across w")
def _effective_lr_measured(d: Products) -> Array:
    square = d.bb * d.gg - d.bg**2  # (‖w‖‖g⊥‖)²; only rounding if the gradient is along the weights
    return np.where(square > _ACROSS * d.bb * d.gg, angle(d.ww, d.wu, d.uu) / np.sqrt(square), np.nan)


@quantity("alignment", "1", "cosine between this displacement and the one before")
def _alignment(d: Products) -> Array:
    norms = np.sqrt(d.vv * d.pp)
    return np.where(norms > 0, d.vp / norms, np.nan)


@quantity("invariance", "1", "cosine between weights and gradient: 0 where the loss ignores the weights' scale")
def _invariance(d: Products) -> Array:
    norms = np.sqrt(d.bb * d.gg)
    return np.where(norms > 0, d.bg / norms, np.nan)


@quantity("lr", "1", "learning rate of the layer's parameter group")
def _lr(d: Products) -> Array:
    return d.lr


@quantity("weight_decay", "1", "weight decay of the layer's parameter group")
def _weight_decay(d: Products) -> Array:
    return d.decay


#: The quantities that are recorded by default.
DEFAULT = tuple(_registry)
