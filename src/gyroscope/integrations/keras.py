"""Keras 3: a callback that measures the rotation of every layer, and Layca over any of its optimizers.

Both are written with `keras.ops`, and tested with the backends JAX and torch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from fnmatch import fnmatchcase
from math import inf, nan
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gyroscope.base.accepted import choice, flag, listed, real, whole
from gyroscope.control.rates import alpha_multipliers
from gyroscope.control.steering import Law, coefficients
from gyroscope.errors import ControlError, GyroscopeError, LayerError, MissingExtraError, MonitorError
from gyroscope.integrations.mirror import imported
from gyroscope.integrations.recording import Recording, is_layer, layer_of
from gyroscope.monitor.quantities import Products, compute, find
from gyroscope.store import Run

try:
    _keras = imported("keras", sink="LayerRotation", extra="keras")
except MissingExtraError as problem:
    _backend = (getattr(problem.__cause__, "name", None) or "keras").partition(".")[0]
    if _backend == "keras":
        raise
    raise MissingExtraError(
        f"LayerRotation cannot import keras, because its backend {_backend} is not installed. Try the environment "
        "variable KERAS_BACKEND=torch."
    ) from problem
_ops = _keras.ops

Weights = list[npt.NDArray[Any]]
Others = Literal["inner", "frozen"]

#: The quantities that `LayerRotation` records; those of a single step are NaN where the batch before was not read.
QUANTITIES = (
    "rotation", "rate", "rate_per_step", "weight_norm", "weight_norm_before", "update_norm", "update_ratio",
    "effective_lr", "lr", "weight_decay",
)  # fmt: skip

# The file with w₀ in the run's folder, for trainings that are resumed.
_REFERENCE = "reference.npz"


class LayerRotation(_keras.callbacks.Callback):  # type: ignore[misc, name-defined]
    """Record the rotation 1 − cos∠(w, w₀) of every kernel while `fit` trains, with its rate and norms.

    w₀ are the weights before the first batch. Steps are batches. A further `fit`, or one that is resumed with its
    optimizer, continues the run; w₀ is kept in its folder. What Keras logs is recorded, too: at measured batches the
    mean over the epoch so far, as Keras reports it.

    Args:
        run: the folder to record in; by default a new one under `runs/`.
        every: also read the weights after this many batches. By default they are read at the end of each epoch only:
            reading copies them to the host, and makes JAX wait for the batch.
        layers: glob pattern or patterns on the names of the layers; by default the weights of two or more dimensions
            that are not called `bias`.
        meta: anything about the run that JSON can hold.

    Attributes:
        path: the run's folder; None on ranks other than the first.

    >>> import keras, tempfile
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rotation = LayerRotation(f"{folder}/first", every=1)
    ...     _ = model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0, callbacks=[rotation])
    ...     rotation.run.steps.tolist()
    [0, 1, 2]
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | None = None,
        every: int | None = None,
        *,
        layers: str | Iterable[str] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if every is not None and whole(every, 1) is None:
            raise MonitorError(f"`every` must be a whole number of batches ≥ 1, or None, got {every!r:.80}. Try 100.")
        self._every = every
        self._patterns = _patterns(layers, MonitorError)
        self._quantities = find(QUANTITIES)
        self._book = Recording(run, self._quantities, meta)
        self.path, self._meta = self._book.path, self._book.meta
        self._of: Any = None  # the model of the last fit
        self._first: Weights = []
        self._last: Weights = []
        self._step = self._measured = self._epoch_start = 0
        self._earlier = 0  # batches before those of the present optimizer
        self._open = False

    @property
    def run(self) -> Run:
        """The run, to read; everything that was measured is in it."""
        self._book.flush()
        return self._book.run

    def on_train_begin(self, logs: Any = None) -> None:
        """Finish what a `fit` that raised has left open."""
        if self._open:
            self._book.close(interrupted=True)
            self._open = False

    # Not when training begins: by now, the other callbacks have restored what they restore.
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin, or continue, the run before the first batch."""
        if not self._open:
            self._begin(self.model)
        self._epoch_start = self._step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Measure every few batches. The model is not touched in between: reading it makes JAX wait."""
        before, self._step = self._step, self._epoch_start + int(batch) + 1
        if self._every is not None and before // self._every < self._step // self._every:
            self._measure(self.model)
            self._log(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Measure at the end of each epoch, and record what Keras has logged."""
        self._measure(self.model)
        self._log(logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Finish the run."""
        self._book.close()
        self._open = False

    def _begin(self, model: Any) -> None:
        layers, optimizer = _layers_of(model, self._patterns), _inside(model.optimizer)
        now = _read(layers)
        about = {
            "framework": "keras", "keras": _keras.__version__, "backend": _keras.backend.backend(),
            "model": type(model).__name__, "optimizers": [_described(optimizer)],
        }  # fmt: skip
        self._book = Recording(self.path, self._quantities, {**about, **self._meta})
        taken = _taken(optimizer)
        continued = bool(self._first) and self._of is model
        self._of = model
        if not continued:
            self._step = self._measured = taken
        self._earlier = self._step - taken
        self._book.begin([layer_of(name, v.shape) for name, v in layers.items()], self._step)
        self._open = True
        if not continued and self._book.begun:
            self._first, self._last = self._reference(now), now
            self._record(model, now)

    def _reference(self, now: Weights) -> Weights:
        """Return w₀ of the run if this training resumes it; else the current weights, which are saved."""
        assert self.path is not None
        file = self.path / _REFERENCE
        if self._step > 0 and file.exists():  # the run has these layers, which the store has checked
            with np.load(file, allow_pickle=False) as saved:
                return [saved[name] for name in saved.files]
        np.savez(file, *now)
        return now

    def _measure(self, model: Any) -> None:
        if not self._book.begun or self._step <= self._measured:
            return
        layers = _layers_of(model, self._patterns)
        # The last batches of an epoch may be fewer than `steps_per_execution`; JAX counts them as so many.
        if model.steps_per_execution > 1:
            self._step = max(self._measured, min(self._step, self._earlier + _taken(_inside(model.optimizer))))
        if self._step > self._measured:
            now = _read(layers)
            self._record(model, now)
            self._last, self._measured = now, self._step

    def _record(self, model: Any, now: Weights) -> None:
        """Write the quantities of the current weights, computed in float64 on the host."""
        since = self._step - self._measured
        optimizer = _inside(model.optimizer)
        steered = isinstance(optimizer, Layca)
        lr = _number(optimizer.learning_rate)
        decay = float((optimizer.inner if steered else optimizer).weight_decay or 0.0)
        rows = [_products(*one, since) for one in zip(now, self._last, self._first, strict=True)]
        same = {"exact": 1.0, "lr": lr, "eta": nan if steered else lr, "decay": decay, "steps": float(since)}
        found = {
            one.name: np.array([[row.get(one.name, same.get(one.name, nan)) for row in rows]])
            for one in fields(Products)
        }
        values = compute(self._quantities, Products(**found))
        self._book.row(self._step, {name: value[0] for name, value in values.items()})

    def _log(self, logs: Any) -> None:
        self._book.log(self._step, {str(name): real(value) for name, value in (logs or {}).items()})


def _largest(move: Any) -> Any:
    """Return the largest size of an element, or 1 if that is 0 or not finite."""
    size = _ops.max(_ops.abs(move))
    return _ops.where(_ops.logical_and(_ops.isfinite(size), size > 0), size, _ops.ones_like(size))


def _inside(optimizer: Any) -> Any:
    """Return the optimizer in Keras' wrapper for mixed precision."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _number(value: Any) -> float:
    return float(_ops.convert_to_numpy(_ops.convert_to_tensor(value)))


def _taken(optimizer: Any) -> int:
    """Return the number of batches that an optimizer has stepped with."""
    return int(_number(optimizer.iterations)) * (optimizer.gradient_accumulation_steps or 1)


def _products(w: Any, last: Any, first: Any, since: int) -> dict[str, float]:
    """Return the inner products of one layer, by the names of `Products`, as far as they are known."""
    w, last, first = (x.astype(np.float64).reshape(-1) for x in (w, last, first))
    e, v = w - first, w - last
    known = {"ww": w @ w, "we": w @ e, "ee": e @ e, "rr": first @ first}
    if since:
        known |= {"vv": v @ v, "wv": w @ v}
    if since == 1:
        known |= {"uu": v @ v, "wu": w @ v, "bb": last @ last}
    return known


def _read(layers: Mapping[str, Any]) -> Weights:
    """Return copies of the weights on the host, in their own precision, and bfloat16 as float32."""
    found = [np.array(_ops.convert_to_numpy(v.value)) for v in layers.values()]
    return [w if w.dtype.kind == "f" else w.astype(np.float32) for w in found]


def _layers_of(model: Any, patterns: Sequence[str] | None) -> dict[str, Any]:
    """Return the variables of a model that are layers, by name: their path, without that of the model."""
    variables = model.trainable_variables
    chosen = [variables[i] for i in _chosen(variables, patterns)]
    names = [v.path.removeprefix(f"{model.name}/") for v in chosen]
    often, seen = Counter(names), Counter[str]()
    result = {}
    for name, v in zip(names, chosen, strict=True):
        seen[name] += 1
        result[f"{name}_{seen[name]}" if often[name] > 1 else name] = v
    return result


def _chosen(variables: Sequence[Any], patterns: Sequence[str] | None) -> list[int]:
    """Return the positions of the variables that are layers; patterns are on their path, with or without the model."""
    paths = [v.path for v in variables]
    if patterns is None:
        return [i for i, v in enumerate(variables) if is_layer(v.path, len(v.shape))]
    short = [path.partition("/")[2] for path in paths]
    for one in patterns:
        if not any(fnmatchcase(path, one) for path in (*paths, *short)):
            raise LayerError(
                f"`layers` must match at least one weight, got {one!r}. Try one of {', '.join(paths[:3])}."
            )
    return [
        i for i, both in enumerate(zip(paths, short, strict=True))
        if any(fnmatchcase(path, one) for path in both for one in patterns)
    ]  # fmt: skip


def _patterns(given: Any, error: type[GyroscopeError]) -> list[str] | None:
    if given is None:
        return None
    patterns = listed(given)
    if not patterns or not all(isinstance(one, str) for one in patterns):
        raise error(f"`layers` must be a pattern or a list of patterns, got {given!r:.80}. Try '*/kernel'.")
    return patterns


def _described(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer as runs describe it, in torch's words. Weight decay of Keras does not pass the momentum."""
    if isinstance(optimizer, Layca):
        inside = {"inner": type(optimizer.inner).__name__, "decays": bool(optimizer.inner.weight_decay)}
        return {"class": "Layca", "law": asdict(optimizer.law), **inside}
    decays = bool(optimizer.weight_decay) and not type(optimizer).__name__.endswith("W")
    about: dict[str, Any] = {"class": type(optimizer).__name__ + ("W" if decays else "")}
    names = {"momentum": "momentum", "nesterov": "nesterov", "amsgrad": "amsgrad", "centered": "centered"}
    options = names | {"rho": "alpha"} if about["class"].startswith("RMSprop") else names
    about |= {theirs: getattr(optimizer, ours) for ours, theirs in options.items() if hasattr(optimizer, ours)}
    if hasattr(optimizer, "beta_1"):
        about["betas"] = [optimizer.beta_1, optimizer.beta_2]
    return about


# Optimizers that do not read the weights, apart from weight decay, which is along them, and a factor on the step.
_BLIND = {"Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Lion", "Muon", "Nadam", "RMSprop", "SGD"}


@_keras.saving.register_keras_serializable(package="gyroscope")
class Layca(_keras.optimizers.Optimizer):  # type: ignore[misc, name-defined]
    """Layca over any Keras optimizer: each step turns every layer by arctan ρ and keeps its norm at ‖w₀‖.

        w' = k [(1 − ρ⟨w,s⟩/(‖w‖t)) w + (ρ‖w‖/t) s],   t² = ⟨s,s⟩ − ⟨w,s⟩²/⟨w,w⟩,   k = ‖w₀‖/(‖w‖√(1+ρ²))

    with s the displacement that the inner optimizer proposes. `learning_rate` is ρ; schedules and callbacks change it.
    w₀ are the weights at the first step; their norms are saved with the model. A displacement of zero, zero weights,
    ρ = 0 and numbers that are not finite leave a layer exactly as it is.

    Args:
        optimizer: the inner optimizer. Its own learning rate steps the weights that are not layers. Clipping and
            gradient accumulation are its arguments.
        learning_rate: ρ, or a schedule; by default that of the inner optimizer.
        others: `"inner"` to step the weights that are not layers with the inner optimizer, `"frozen"` to leave them as
            they are (the papers' runs).
        layers: glob pattern or patterns on the paths of the weights that are layers; by default those of two or more
            dimensions that are not called `bias`.
        alpha: α of equation 1 in [−1, 1]: negative turns the first layers faster, positive the last.
        project: whether to perform operation 1, the projection onto the tangent space.
        reproject: whether to perform operation 4, the projection back to the sphere.
        name: the name of the optimizer.

    Attributes:
        inner: the inner optimizer.
        law: the operations that are performed.
        radius: ‖w₀‖ of each layer, −1 before the first step; once the optimizer is built.

    >>> import keras
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(Layca(keras.optimizers.Adam(1e-3), 3**-3), "mse")
    >>> before = np.linalg.norm(model.get_weights()[0])
    >>> _ = model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
    >>> bool(np.isclose(np.linalg.norm(model.get_weights()[0]), before))
    True

    Reference:
        Carbonnelle and De Vleeschouwer, Layer rotation: a surprisingly powerful indicator of generalization in
        deep networks?, Algorithm 1.
    """

    def __init__(
        self,
        optimizer: Any,
        learning_rate: Any = None,
        *,
        others: Others = "inner",
        layers: str | Iterable[str] | None = None,
        alpha: float = 0.0,
        project: bool = True,
        reproject: bool = True,
        name: str | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise ControlError(
                f"`{next(iter(unknown))}` must be given to the inner optimizer, not to Layca. Try "
                f"Layca(keras.optimizers.SGD(0.1, {next(iter(unknown))}=...))."
            )
        _check_inner(optimizer)
        if learning_rate is None:
            given = optimizer._learning_rate
            learning_rate = given if callable(given) else _number(given)
        if not callable(learning_rate) and not 0.0 <= real(learning_rate) < inf:
            raise ControlError(
                f"`learning_rate` must be a finite number ≥ 0, ρ = tan θ of a step, or a schedule, got "
                f"{learning_rate!r:.80}. Try 3**-3."
            )
        choice(others, "others", ("inner", "frozen"), ControlError)
        alpha_multipliers(alpha, 1)
        law = Law(flag(project, "project", ControlError), "relative", flag(reproject, "reproject", ControlError))
        super().__init__(learning_rate if callable(learning_rate) else real(learning_rate), name=name)
        self.inner, self.law, self.others, self.alpha = optimizer, law, others, float(alpha)
        self._patterns = _patterns(layers, ControlError)
        # Into a zeroed variable the inner optimizer writes its displacement, exactly; else it is a difference.
        decays = any(getattr(optimizer, option, None) for option in ("weight_decay", "adam_weight_decay"))
        self._writes = _is_blind(optimizer) and (law.project or not decays)

    def build(self, variables: Any) -> None:
        """Create the variables: those of the inner optimizer, and the norms of the layers."""
        if self.built:
            return
        self._where = tuple(_chosen(variables, self._patterns))
        layers = [variables[i] for i in self._where]
        if not layers:
            raise ControlError(
                f"`variables` must have at least one layer, got {len(variables)} weights that are none. By default, "
                "weights of two or more dimensions are layers, unless they are called `bias`. Choose others: layers=..."
            )
        bound = [v.path for v in layers if v.constraint is not None]
        if bound:
            raise ControlError(f"Layers must have no constraint, because Layca sets their norms, got {bound[0]}.")
        self.inner.build(layers if self.others == "frozen" else variables)
        super().build(variables)
        shape, start = (len(layers),), _keras.initializers.Constant(-1.0)
        self.radius = self.add_variable(shape, start, dtype=self._wide(), name="radius")

    @property
    def variables(self) -> list[Any]:
        """All variables, with those of the inner optimizer, as `fit` and checkpoints keep them."""
        return [*self._variables, *self.inner.variables]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Turn the layers by arctan ρ, and let the inner optimizer step the other weights."""
        grads = list(grads)
        if trainable_variables is None and not self.built:
            raise ControlError("`trainable_variables` must be given at the first step. Try optimizer.build(variables).")
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if not self.built:
            with _keras.name_scope(self.name, caller=self):
                self.build(variables)
        self._check_variables_are_known(variables)
        layers = [self._trainable_variables[i] for i in self._where]
        keys = set(map(id, layers))
        steps = [(g, v) for g, v in zip(grads, variables, strict=True) if self.others == "inner" or id(v) in keys]
        before = [_ops.copy(_ops.stop_gradient(v.value)) for v in layers]
        if self._writes:
            for v in layers:
                v.assign(_ops.zeros(v.shape, v.dtype))
        try:
            self.inner.apply([g for g, _ in steps], [v for _, v in steps])
        except BaseException:
            for v, w in zip(layers, before, strict=True):
                v.assign(w)
            raise
        after = [_ops.copy(_ops.stop_gradient(v.value)) for v in layers]
        moves = after if self._writes else [x - w for x, w in zip(after, before, strict=True)]
        for v, w in zip(layers, self._turned(before, moves), strict=True):
            v.assign(w)
        self._iterations.assign_add(1)

    def _turned(self, weights: Sequence[Any], moves: Sequence[Any]) -> list[Any]:
        """Return the layers after the step, and keep their norms before the first."""
        wide = self._wide()
        w, s = ([_ops.cast(x, wide) for x in several] for several in (weights, moves))
        s = [y / _largest(y) for y in s]  # so that squares stay in the range of the dtype
        rows = [[_ops.sum(x * x), _ops.sum(x * y), _ops.sum(y * y)] for x, y in zip(w, s, strict=True)]
        products = _ops.stack([_ops.stack(row) for row in rows])
        ww, radius = products[:, 0], _ops.convert_to_tensor(self.radius)
        radius = _ops.where(_ops.logical_and(radius <= 0, _ops.isfinite(ww)), _ops.sqrt(ww), radius)
        self.radius.assign(radius)
        factors = _ops.convert_to_tensor(alpha_multipliers(self.alpha, len(w)), wide)
        rho = factors * _ops.cast(self.learning_rate, wide)
        a, b, moved = coefficients(products, rho, radius, self.law, xp=_ops)
        new = [_ops.where(moved[k], a[k] * x + b[k] * y, x) for k, (x, y) in enumerate(zip(w, s, strict=True))]
        return [_ops.cast(x, old.dtype) for x, old in zip(new, weights, strict=True)]

    def _wide(self) -> str:
        """Return the dtype of inner products."""
        its = {str(self._trainable_variables[i].dtype) for i in self._where}
        return "float64" if "float64" in its else "float32"

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss as the inner optimizer does, which divides the gradients by the same factor."""
        return self.inner.scale_loss(loss)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, with those of the inner optimizer."""
        return {
            "optimizer": _keras.saving.serialize_keras_object(self.inner),
            "learning_rate": super().get_config()["learning_rate"],
            "others": self.others,
            "layers": None if self._patterns is None else list(self._patterns),
            "alpha": self.alpha,
            "project": self.law.project,
            "reproject": self.law.reproject,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Layca:
        """Return the optimizer that `get_config` described."""
        inner = _keras.saving.deserialize_keras_object(config["optimizer"], custom_objects=custom_objects)
        return super().from_config({**config, "optimizer": inner}, custom_objects)  # type: ignore[no-any-return]


def _is_blind(optimizer: Any) -> bool:
    kind = type(optimizer)
    return kind.__module__.startswith("keras.") and any(base.__name__ in _BLIND for base in kind.__mro__)


def _check_inner(optimizer: Any) -> None:
    if not isinstance(optimizer, _keras.optimizers.Optimizer):
        raise ControlError(
            f"`optimizer` must be a keras.optimizers.Optimizer, got a {type(optimizer).__name__}. Try "
            "keras.optimizers.SGD(3**-3)."
        )
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    if found := kinds & {"Layca", "LossScaleOptimizer", "MultiOptimizer", "ScheduleFreeAdamW"}:
        why = {
            "Layca": "it steers already",
            "LossScaleOptimizer": "it goes around Layca: LossScaleOptimizer(Layca(...))",
            "MultiOptimizer": "Layca chooses layers itself: layers=...",
            "ScheduleFreeAdamW": "it keeps weights of its own and puts them into the model",
        }[found.pop()]
        raise ControlError(f"`optimizer` must propose steps, got a {type(optimizer).__name__}: {why}.")
    if optimizer.use_ema:
        raise ControlError(
            "`use_ema` of the inner optimizer must be False, because it would average displacements, got True. Average "
            "the weights in a callback."
        )
    if optimizer.built:
        raise ControlError("`optimizer` must be new, got one that has been built for a model. Make another.")
