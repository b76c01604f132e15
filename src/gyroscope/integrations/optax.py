"""Gradient transformations for optax, and so for Flax, Equinox and plain JAX: Layca, and a measurement of every layer.

A layer is a leaf of the parameters. Everything is a function of a few inner products per layer, as in torch, and works
under `jit`, `vmap`, `scan` and `shard_map`; there, one `psum` adds up those of all layers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gyroscope.base.accepted import flag, listed, real, whole
from gyroscope.control.rates import alpha_multipliers
from gyroscope.control.steering import Law, coefficients
from gyroscope.errors import ControlError, GyroscopeError, MonitorError
from gyroscope.integrations.mirror import imported
from gyroscope.integrations.recording import Recording, is_layer, layer_of
from gyroscope.monitor.quantities import Products, Quantity, find
from gyroscope.store import LayerInfo, Run

_optax = imported("optax", sink="layca", extra="optax")
_jax = imported("jax", sink="layca", extra="optax")
_callback = imported("jax.experimental", sink="record", extra="optax").io_callback
_lax, jnp = _jax.lax, imported("jax.numpy", sink="layca", extra="optax")

Rate = float | Callable[[Any], Any]
Mask = Any  # a tree of booleans, or a function from the parameters to one
AxisName = str | tuple[str, ...] | None

#: The quantities that `rotation` measures by default; those of the gradient are NaN where it is not passed.
QUANTITIES = (
    "rotation", "rate", "rate_per_step", "weight_norm", "weight_norm_before", "gradient_norm", "update_norm",
    "update_ratio", "effective_lr_measured", "invariance",
)  # fmt: skip


class LaycaState(NamedTuple):
    """State of `layca`: the number of steps, ‖w₀‖ per layer (−1 before the first step), the inner state.

    >>> import jax.numpy as jnp, optax
    >>> state = layca(optax.sgd(0.1), rate=3**-3).init({"w": jnp.ones((2, 2))})
    >>> int(state.count), state.radius.tolist()
    (0, [-1.0])
    """

    count: Any
    radius: Any
    inner: Any


def layca(
    inner: Any,
    rate: Rate,
    *,
    project: bool = True,
    reproject: bool = True,
    mask: Mask = None,
    alpha: float = 0.0,
    axis_name: AxisName = None,
) -> Any:
    """Return Layca over `inner`: each update turns every layer by arctan ρ and keeps its norm at ‖w₀‖.

        w' = k [(1 − ρ⟨w,s⟩/(‖w‖t)) w + (ρ‖w‖/t) s],   t² = ⟨s,s⟩ − ⟨w,s⟩²/⟨w,w⟩,   k = ‖w₀‖/(‖w‖√(1+ρ²))

    with s the update of `inner`; the result is w' − w, so it goes last. w₀ are the weights at the first step. An update
    of zero, zero weights, ρ = 0 and numbers that are not finite leave a layer exactly as it is. Without
    `jax_enable_x64` inner products are float32: an s within 0.003 rad of w counts as parallel to it.

    Args:
        inner: the transformation that proposes updates, such as `optax.adam(1e-3)`. Its learning rate and scale matter
            only for the leaves that are not layers.
        rate: ρ, or a schedule: a function of the number of steps.
        project: whether to perform operation 1, the projection onto the tangent space.
        reproject: whether to perform operation 4, the projection back to the sphere.
        mask: which leaves are layers: a tree of booleans, a prefix of one, or a function from the parameters to one. By
            default those of two or more dimensions that are not called `bias`. The others get the update of `inner`
            unchanged.
        alpha: α of equation 1 in [−1, 1]: negative turns the first layers faster, positive the last. Layers are in the
            order of the leaves: JAX sorts the keys of a dict.
        axis_name: the mesh axis, or axes, that layers are sharded over, inside `shard_map`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> params = {"w": jnp.array([[2.0, 0.0]]), "b": jnp.zeros(2)}
        >>> tx = layca(optax.sgd(0.1), rate=1.0)
        >>> gradients = {"w": jnp.array([[0.0, -5.0]]), "b": jnp.ones(2)}
        >>> updates, state = tx.update(gradients, tx.init(params), params)
        >>> optax.apply_updates(params, updates)["w"]             # turned by 45°
        Array([[1.4142135, 1.4142135]], dtype=float32)

    Reference:
        Carbonnelle and De Vleeschouwer, Layer rotation: a surprisingly powerful indicator of generalization in
        deep networks?, Algorithm 1.
    """
    _check_transformation(inner)
    _check_rate(rate, "rate", ControlError)
    law = Law(flag(project, "project", ControlError), "relative", flag(reproject, "reproject", ControlError))
    if isinstance(alpha, _jax.core.Tracer):
        raise ControlError(
            "`alpha` must be a number from -1 to 1, got one that is traced. Under inject_hyperparams, try "
            "static_args=('alpha',)."
        )
    alpha_multipliers(alpha, 1)
    inner = _optax.with_extra_args_support(inner)

    def init(params: Any) -> LaycaState:
        count = len(_layers(params, mask, ControlError).names)
        return LaycaState(jnp.zeros([], jnp.int32), jnp.full(count, -1.0, _wide()), inner.init(params))

    def update(updates: Any, state: LaycaState, params: Any = None, **extra: Any) -> tuple[Any, LaycaState]:
        found = _layers(params, mask, ControlError)
        proposed, inside = inner.update(updates, state.inner, params, **extra)
        steps = _like(proposed, params, ControlError)
        w, s = found.weights, _in_range([steps[i] for i in found.where], axis_name)
        products = _inner_products([{"ww": (x, x), "ws": (x, y), "ss": (y, y)} for x, y in zip(w, s, strict=True)])
        products = _summed(products, w, axis_name)
        ww, radius = products[:, 0], state.radius
        radius = jnp.where((radius <= 0) & jnp.isfinite(ww), jnp.sqrt(ww), radius)
        rho = jnp.asarray(alpha_multipliers(alpha, len(w)), _wide()) * (rate(state.count) if callable(rate) else rate)
        a, b, moved = coefficients(products, rho, radius, law, xp=jnp)
        for k, i in enumerate(found.where):
            moves = (a[k] - 1) * w[k] + b[k] * s[k]
            steps[i] = jnp.where(moved[k], moves, 0).astype(jnp.promote_types(w[k].dtype, jnp.float32))
        count = _optax.safe_increment(state.count)
        return _jax.tree.unflatten(_jax.tree.structure(params), steps), LaycaState(count, radius, inside)

    return _optax.GradientTransformationExtraArgs(init, update)


class RotationState(NamedTuple):
    """State of `rotation`.

    Attributes:
        count: the number of steps.
        reference: w₀ of each layer, in its own dtype.
        last: the weights at the last measured step; empty if every step is measured.
        radius: ‖w₀‖ per layer; NaN before the first measured step.
        values: the quantities of the last measured step by name, one number per layer; NaN where unknown.

    >>> import jax.numpy as jnp
    >>> state = rotation(quantities=["rotation", "rate"]).init({"w": jnp.ones((2, 2))})
    >>> int(state.count), sorted(state.values), state.reference[0].shape
    (0, ['rate', 'rotation'], (2, 2))
    """

    count: Any
    reference: tuple[Any, ...]
    last: tuple[Any, ...]
    radius: Any
    values: dict[str, Any]


def rotation(
    every: int = 1,
    *,
    lr: Rate | None = None,
    quantities: Iterable[str] | None = None,
    mask: Mask = None,
    axis_name: AxisName = None,
) -> Any:
    """Return a transformation that measures every layer and leaves updates unchanged; it goes last.

    The numbers are in `RotationState.values`, by the formulas of `gyroscope.monitor.quantities`, as if the updates were
    applied: w = (w_before + update), rounded to its dtype. w₀ are the weights at `init`. If `update` is called with
    `grad=`, the gradients, as optax's line searches are, quantities of the gradient are known as well.

    Args:
        every: measure each step whose number is a multiple of it. Above 1, the weights of the last measured step are
            kept as well.
        lr: the learning rate of the steps, or ρ, as a number or a schedule: recorded as the quantity `lr`.
        quantities: the names of the quantities, also of your own; by default `QUANTITIES`, and `lr` if it is given.
        mask: which leaves are layers, as for `layca`.
        axis_name: the mesh axis, or axes, that layers are sharded over, inside `shard_map`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> params = {"w": jnp.array([[2.0, 0.0]])}
        >>> tx = optax.chain(optax.sgd(0.1), rotation())
        >>> updates, state = tx.update({"w": jnp.array([[0.0, -20.0]])}, tx.init(params), params)
        >>> optax.tree_utils.tree_get(state, "values")["rate"]          # 45°
        Array([0.7853982], dtype=float32)
    """
    count_of = whole(every, 1)
    if count_of is None:
        raise MonitorError(f"`every` must be a whole number of steps ≥ 1, got {every!r:.80}. Try 10.")
    if lr is not None:
        _check_rate(lr, "lr", MonitorError)
    chosen = _quantities(quantities, lr)

    def init(params: Any) -> RotationState:
        weights = _layers(params, mask, MonitorError).weights

        def copies() -> tuple[Any, ...]:  # each array is one of its own, so that a step may donate the state
            return tuple(jnp.array(x, copy=True) for x in weights)

        radius, *numbers = (jnp.full(len(weights), jnp.nan, _wide()) for _ in range(1 + len(chosen)))
        values = {one.info.name: number for one, number in zip(chosen, numbers, strict=True)}
        last = copies() if count_of > 1 else ()
        return RotationState(jnp.zeros([], jnp.int32), copies(), last, radius, values)

    def measured(w: Any, steps: Any, gradients: Any, state: RotationState) -> tuple[Any, Any, Any]:
        new = [(x + u).astype(x.dtype) for x, u in zip(w, steps, strict=True)]
        last = state.last or tuple(w)
        rows = [
            _pairs(*(x if x is None else x.astype(_wide()) for x in one))
            for one in zip(new, w, last, state.reference, gradients, strict=True)
        ]
        table = _summed(_inner_products(rows), w, axis_name)
        unknown = jnp.full(len(w), jnp.nan, _wide())
        known = {name: table[:, k] for k, name in enumerate(rows[0])}
        known |= {"exact": jnp.ones_like(unknown), "steps": jnp.full_like(unknown, count_of)}
        if lr is not None:
            known["lr"] = jnp.full_like(unknown, lr(state.count) if callable(lr) else lr)
        d = Products(**{one.name: _OnDevice(known.get(one.name, unknown)) for one in fields(Products)})  # type: ignore[arg-type]
        values = {one.info.name: _bare(one.function(d)).astype(_wide()) for one in chosen}
        return tuple(new) if count_of > 1 else (), jnp.sqrt(known["rr"]), values

    def update(
        updates: Any, state: RotationState, params: Any = None, *, grad: Any = None, **_: Any
    ) -> tuple[Any, RotationState]:
        found = _layers(params, mask, MonitorError)
        steps = _like(updates, params, MonitorError)
        gradients = [None] * len(steps) if grad is None else _like(grad, params, MonitorError)
        moves, pulls = [steps[i] for i in found.where], [gradients[i] for i in found.where]
        count = _optax.safe_increment(state.count)

        def measure() -> tuple[Any, Any, Any]:
            return measured(found.weights, moves, pulls, state)

        def keep() -> tuple[Any, Any, Any]:
            return state.last, state.radius, state.values

        held = measure() if count_of == 1 else _lax.cond(count % count_of == 0, measure, keep)
        return updates, RotationState(count, state.reference, *held)

    return _optax.GradientTransformationExtraArgs(init, update)


class RecordedRotation(_optax.GradientTransformationExtraArgs):  # type: ignore[misc, name-defined]
    """`rotation` whose numbers go to a run on disk; made by `record`. Use it in `with`, or call `close`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, record(f"{folder}/first") as recording:
    ...     type(recording).__name__
    'RecordedRotation'
    """

    _book: Recording

    @property
    def run(self) -> Run:
        """The run, to read; everything that was measured is in it."""
        self.flush()
        return self._book.run

    def flush(self) -> None:
        """Return when everything that was measured is on disk.

        Raises:
            StoreError: the run could not be opened or written; training went on.
        """
        _jax.effects_barrier()
        self._book.flush()

    def close(self, *, interrupted: bool = False) -> None:
        """Finish the run; later steps are not recorded."""
        _jax.effects_barrier()
        self._book.close(interrupted=interrupted)

    def __enter__(self) -> RecordedRotation:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(interrupted=kind is not None)


def record(
    run: str | os.PathLike[str] | None = None,
    every: int = 1,
    *,
    lr: Rate | None = None,
    quantities: Iterable[str] | None = None,
    mask: Mask = None,
    axis_name: AxisName = None,
    meta: Mapping[str, Any] | None = None,
) -> RecordedRotation:
    """Return `rotation` whose numbers are written to a run, for `gyroscope.load`, the command line and figures.

    Numbers leave the device through an ordered host callback, also from within `jit` and `scan`. If `update` is called
    with `value=`, the loss, as optax's line searches are, it is recorded, too. A training that is resumed with its
    optimizer state continues the run in its folder.

    Args:
        run: the folder to record in; by default a new one under `runs/`.
        every, lr, quantities, mask, axis_name: as for `rotation`.
        meta: anything about the run that JSON can hold.

    Example:
        >>> import tempfile, jax.numpy as jnp, optax
        >>> params, gradients = {"w": jnp.array([[2.0, 0.0]])}, {"w": jnp.array([[0.0, -20.0]])}
        >>> with tempfile.TemporaryDirectory() as folder, record(f"{folder}/first") as recording:
        ...     tx = optax.chain(optax.sgd(0.1), recording)
        ...     updates, state = tx.update(gradients, tx.init(params), params, value=jnp.array(2.5), grad=gradients)
        ...     recording.run.series("rate")[-1], recording.run.scalars["loss"].values
        (array([0.7853982], dtype=float32), array([2.5]))
    """
    inner = rotation(every, lr=lr, quantities=quantities, mask=mask, axis_name=axis_name)
    chosen = _quantities(quantities, lr)
    about = {"framework": "optax", "jax": _jax.__version__, "optax": _optax.__version__}
    book = Recording(run, chosen, meta)
    book.meta = {**about, **book.meta}
    whole_shapes: dict[str, tuple[int, ...]] = {}  # within `shard_map` leaves have the shapes of their shards

    def arrived(layers: Sequence[LayerInfo], index: Any, step: Any, radius: Any, values: Any, loss: Any) -> None:
        at = int(step)
        if index != 0:
            return
        if not book.begun:
            start = 0 if at <= every else at - 1  # later, the state came from a checkpoint
            book.begin(layers, start)
            if start == 0:
                first = {"rotation": np.where(radius > 0, 0.0, np.nan), "weight_norm": radius}
                book.row(0, {name: value for name, value in first.items() if name in values})
        book.row(at, values)
        if loss is not None:
            book.log(at, {"loss": loss})

    def init(params: Any) -> RotationState:
        found = _layers(params, mask, MonitorError)
        whole_shapes.update((name, x.shape) for name, x in zip(found.names, found.weights, strict=True))
        return inner.init(params)  # type: ignore[no-any-return]

    def update(
        updates: Any, state: RotationState, params: Any = None, *, value: Any = None, **extra: Any
    ) -> tuple[Any, RotationState]:
        if value is not None and jnp.ndim(value):
            raise MonitorError(f"`value` must be one number, the loss, got the shape {jnp.shape(value)}. Try its mean.")
        updates, new = inner.update(updates, state, params, **extra)
        blind = {one.info.name for one in chosen if one.needs & {"gg", "wg", "gu"}} if extra.get("grad") is None else ()
        known = {name: values for name, values in new.values.items() if name not in blind}
        found = _layers(params, mask, MonitorError)
        layers = [layer_of(n, whole_shapes.get(n, x.shape)) for n, x in zip(found.names, found.weights, strict=True)]
        index = sum(_lax.axis_index(axis) for axis in _axes(axis_name))

        def send() -> None:
            _callback(partial(arrived, layers), None, index, new.count, new.radius, known, value, ordered=True)

        _lax.cond(new.count % every == 0, send, lambda: None)
        return updates, new

    made = RecordedRotation(init, update)
    made._book = book
    return made


class _Layers(NamedTuple):
    """Leaves that are layers: their names, their positions among all leaves, and their weights."""

    names: list[str]
    where: list[int]
    weights: list[Any]


def _layers(params: Any, mask: Mask, error: type[GyroscopeError]) -> _Layers:
    if params is None:
        raise error("`params` must be the parameters, got None. Try tx.update(gradients, state, params).")
    leaves = _jax.tree_util.tree_leaves_with_path(params)
    if mask is None:
        turns = [is_layer(_name(path), jnp.ndim(x)) and _is_real(x) for path, x in leaves]
    else:
        given = mask(params) if callable(mask) else mask
        try:
            turns = _jax.tree.leaves(_jax.tree.broadcast(given, params))
        except ValueError as problem:
            raise error(f"`mask` must have the structure of the parameters, or begin it, got {problem}") from None
        odd = [x for x in turns if not isinstance(x, bool | np.bool_)]
        if odd:
            raise error(f"`mask` must have True or False for each leaf, got {odd[0]!r:.80}.")
    found = _Layers([], [], [])
    for i, ((path, x), turns_it) in enumerate(zip(leaves, turns, strict=True)):
        if not turns_it:
            continue
        name = _name(path)
        if not _is_real(x):
            raise error(f"`mask` must choose leaves of real numbers, got {name!r} of {jnp.result_type(x)}. Exclude it.")
        found.names.append(name)
        found.where.append(i)
        found.weights.append(x)
    if not found.names:
        raise error(
            f"`params` must have at least one layer, got {len(leaves)} leaves that are none. By default, leaves of two "
            "or more dimensions are layers, unless they are called `bias`. Choose others: mask=..."
        )
    return found


def _name(path: Any) -> str:
    # nnx keeps arrays in variables, whose attribute `value` says nothing.
    return str(_jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")) or "weight"


def _is_real(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def _like(tree: Any, params: Any, error: type[GyroscopeError]) -> list[Any]:
    """Return the leaves of a tree that must have the structure of the parameters."""
    here, there = _jax.tree.structure(params), _jax.tree.structure(tree)
    if here != there:
        raise error(
            f"`params` must have the structure of the gradients, got {here.num_leaves} leaves for {there.num_leaves}: "
            f"{here!s:.80}. With Equinox, try eqx.filter(model, eqx.is_inexact_array)."
        )
    return _jax.tree.leaves(tree)  # type: ignore[no-any-return]


def _wide() -> Any:
    """Return the dtype of inner products: float64 with `jax_enable_x64`, else float32.

    XLA adds in the order of a tree: the square of 10⁸ float32 numbers was seen 4e-9 off.
    """
    return jnp.result_type(float)


def _inner_products(rows: Sequence[Mapping[str, tuple[Any, Any]]]) -> Any:
    """Return the inner products [layers, pairs] of pairs of arrays."""
    wide = _wide()
    return jnp.stack([jnp.stack([jnp.sum(x.astype(wide) * y.astype(wide)) for x, y in r.values()]) for r in rows])


def _in_range(steps: Sequence[Any], axis_name: AxisName) -> list[Any]:
    """Return updates over powers of two, by which their elements are about 1 at most, so that squares stay in range."""
    wide, axes = _wide(), _axes(axis_name)
    largest = jnp.stack([jnp.max(jnp.abs(s), initial=0).astype(wide) for s in steps])
    if axes:  # the index makes it vary over the axes also where no layer does
        largest = _lax.pmax(largest + 0 * sum(_lax.axis_index(axis) for axis in axes), tuple(axes))
    known = jnp.isfinite(largest) & (largest > 0)
    _, exponents = jnp.frexp(jnp.where(known, largest, 1))
    factors = jnp.ldexp(jnp.ones_like(largest), jnp.clip(1 - exponents, -126, 127))  # normal numbers
    return [s.astype(wide) * factors[k] for k, s in enumerate(steps)]


def _pairs(w: Any, b: Any, last: Any, start: Any, g: Any) -> dict[str, tuple[Any, Any]]:
    """Return the pairs of vectors whose inner products are measured, by the names of `Products`."""
    u, v, e = w - b, w - last, w - start
    known = {
        "ww": (w, w), "we": (w, e), "ee": (e, e), "uu": (u, u), "wu": (w, u), "vv": (v, v), "wv": (w, v), "bb": (b, b),
        "rr": (start, start),
    }  # fmt: skip
    return known if g is None else known | {"gg": (g, g), "wg": (w, g), "gu": (g, u)}


def _axes(axis_name: AxisName) -> list[str]:
    return [] if axis_name is None else listed(axis_name)


def _summed(table: Any, weights: Sequence[Any], axis_name: AxisName) -> Any:
    """Return products [layers, pairs] added up over shards, by one `psum`; layers that are not sharded count once."""
    axes = _axes(axis_name)
    if not axes:
        return table
    index = {axis: _lax.axis_index(axis) for axis in axes}
    # Without `check_vma`, JAX does not know what varies, not even the index. Then all layers are sharded.
    replicas = [[axis for axis in axes if axis in _varying(index[axis]) - _varying(w)] for w in weights]
    if any(replicas):
        first = [sum(index[axis] for axis in some) == 0 if some else jnp.array(True) for some in replicas]
        table = jnp.where(jnp.stack(first)[:, None], table, 0)
    return _lax.psum(table, tuple(axes))


def _varying(x: Any) -> frozenset[str]:
    """Return the mesh axes that an array is known to vary over."""
    kind = _jax.typeof(x)
    kind = getattr(kind, "manual_axis_type", kind)  # since JAX 0.10
    return frozenset(getattr(kind, "varying", ()) or getattr(kind, "vma", ()))


class _OnDevice(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of JAX that takes part in NumPy's functions, so that formulas written with them run on the device."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __array_ufunc__(self, function: Any, _: str, *given: Any, **__: Any) -> _OnDevice:
        return _OnDevice(getattr(jnp, function.__name__)(*map(_bare, given)))

    def __array_function__(self, function: Any, _: Any, given: Any, named: Any) -> _OnDevice:
        return _OnDevice(getattr(jnp, function.__name__)(*map(_bare, given), **named))


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, _OnDevice) else value


def _check_transformation(inner: Any) -> None:
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise ControlError(
            f"`inner` must be an optax.GradientTransformation, got a {type(inner).__name__}. Try optax.sgd(0.1)."
        )


def _check_rate(given: Any, name: str, error: type[GyroscopeError]) -> None:
    """Reject an invalid rate; the value of one that is traced is not known, and an invalid one turns nothing."""
    if not callable(given) and not isinstance(given, _jax.core.Tracer) and not 0.0 <= real(given) < math.inf:
        raise error(f"`{name}` must be a finite number ≥ 0, or a schedule, got {given!r:.80}. Try 3**-3.")


def _quantities(names: Iterable[str] | None, lr: Rate | None) -> list[Quantity]:
    default = QUANTITIES if lr is None else (*QUANTITIES, "lr")
    return find(default if names is None else names)
