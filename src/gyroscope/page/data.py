"""Data of a run that the page shows: `summary` for the list of runs, `head` for one, `frame` for a series.

All three are functions of a `gyroscope.store.Run` and hold nothing that JSON cannot: numbers that are not finite are
None. Names and notes come from anywhere; characters that a page would act on are written as escapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from itertools import chain
from math import isfinite, nan
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope.base.markup import plain
from gyroscope.diagnosis.compare import ACCURACIES, compared, final_values
from gyroscope.diagnosis.diagnose import diagnose
from gyroscope.diagnosis.finding import SEVERITIES, Diagnosis
from gyroscope.diagnosis.predict import predictions
from gyroscope.errors import DynamicsError, MonitorError
from gyroscope.page.frames import BINS, edges_of, reduce
from gyroscope.page.frames import frame as frame
from gyroscope.store import LayerInfo, QuantityInfo, Run, Scalar
from gyroscope.store.labels import look_of, settle
from gyroscope.store.record import Steps

#: Groups of quantities, by patterns on their names; the first that matches counts.
GROUPS = {
    "rotation": "rotation merged_rotation",
    "rates": "rate rate_per_step update_ratio effective_lr effective_lr_measured lr weight_decay alignment",
    "conditioning": "lambda_? kappa_* rank_? weight_spectral gradient_spectral domination",
    "gradients": "gradient_* invariance",
    "norms": "*_norm weight_norm_before",
    "moments": "moment_*",
    "neurons": "neuron_* dying* full* activation_* nu",
    "other": "*",
}
#: Values of the curve in the list of runs, rows that a quantity's scale is chosen by, and rows of a prediction.
_SPARKS, _SAMPLE, _ROWS = 40, 24, 512
#: Layers and points of a prediction, logged numbers, events and changes of the learning rate that are shown at most.
_PREDICTED, _POINTS, _SCALARS, _EVENTS, _CHANGES = 24, 64, 100, 500, 60
#: The longest text, and the most hyperparameters.
_LONGEST, _OPTIONS = 2000, 300
#: What `watch` records of a training, besides the optimizers; everything else is the user's.
_OWN = ("model", "torch", "every", "budget", "facts", "reference_file", "reference_sample", "journal")
#: A learning rate that changes by less than this share stays: it is recorded in float32.
_SAME = 1e-5

Json = dict[str, Any]


def summary(run: Run, *, id: str, name: str | None = None, diagnosis: Diagnosis | None = None) -> Json:
    """Return a run as the list of runs shows it.

    Args:
        run: the run.
        id: the id under which the page asks for it.
        name: its name in the list; that of its folder if None.
        diagnosis: the findings, if they are known; else they are looked for.

    Raises:
        StoreError: the run cannot be read.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(f"{folder}/first") as run:
    ...     shown = summary(run, id="0")
    >>> shown["name"], shown["state"], shown["layers"], shown["steps"], shown["measured"], shown["loss"]
    ('first', 'ended', 3, 40, 5, 0.25)
    """
    [row] = compared([run], labels=[run.name if name is None else name])
    found = diagnose(run) if diagnosis is None else diagnosis
    options, _ = _options(run.meta)
    return _json({
        "id": id,
        "name": row.name,
        "state": row.state,
        "error": None,
        "model": run.meta.get("model"),
        "layers": len(run.layers),
        "steps": row.steps,
        "measured": len(run.steps),
        "started": run.attempts[0].time if run.attempts else None,
        "optimizer": row.optimizer,
        "rate": row.rate,
        "weight_decay": row.weight_decay,
        "momentum": row.momentum,
        "loss": row.loss,
        "accuracies": row.accuracies,
        "rotation": row.rotation,
        "sparkline": _sparkline(run),
        "findings": {severity: sum(one.severity == severity for one in found) for severity in SEVERITIES},
        "options": options,
    })  # fmt: skip


def unreadable(error: Exception, *, id: str, name: str) -> Json:
    """Return the summary of a run that cannot be read, with the sentence that says why.

    >>> unreadable(RuntimeError("run.sqlite is damaged."), id="1", name="second")["error"]
    'run.sqlite is damaged.'
    """
    nothing = dict.fromkeys(("model", "steps", "started", "optimizer", "rate", "weight_decay", "momentum", "loss"))
    return _json({
        "id": id,
        "name": name,
        "state": "unreadable",
        "error": str(error),
        **nothing,
        "layers": 0,
        "measured": 0,
        "accuracies": {},
        "rotation": None,
        "sparkline": [],
        "findings": dict.fromkeys(SEVERITIES, 0),
        "options": {},
    })  # fmt: skip


def head(
    run: Run, *, id: str, name: str | None = None, diagnosis: Diagnosis | None = None, bins: int | None = BINS
) -> Json:
    """Return everything that the page shows of a run, except its series.

    Args:
        run: the run.
        id: the id under which the page asks for it.
        name: its name; that of its folder if None.
        diagnosis: the findings, if they are known; else they are looked for.
        bins: the most points of a curve; None for all.

    Raises:
        StoreError: the run cannot be read.

    >>> import tempfile
    >>> from gyroscope.store.example import write_example
    >>> with tempfile.TemporaryDirectory() as folder, write_example(f"{folder}/first") as run:
    ...     shown = head(run, id="0")
    >>> [one["label"] for one in shown["quantities"]], shown["recorded"]
    (['rotation (cosine distance)', 'rotation since the last measurement (rad)'],
    '2 quantities of 3 layers at 5 steps from 0 to 40, every 10 steps.')
    """
    steps, layers, events = run.steps, run.layer_table, run.events
    found, called = diagnose(run) if diagnosis is None else diagnosis, run.name if name is None else name
    where = {name: at for name in run.quantities if len(at := run.where(name))}
    counts = {name: len(at) for name, at in where.items()}
    options, meta = _options(run.meta)
    facts = run.meta.get("facts")
    still = {one for fact in ("frozen", "unheld") for one in _listed(facts, fact)}
    scalars = dict(sorted(run.scalars.items(), key=lambda item: _rank(item[0])))
    shown = [_scalar(name, scalar, bins) for name, scalar in list(scalars.items())[:_SCALARS]]
    left_out = max(len(events) - _EVENTS, 0)
    return _json({
        "id": id,
        "name": called,
        "state": run.state,
        "model": run.meta.get("model"),
        "started": run.attempts[0].time if run.attempts else None,
        "ended": run.attempts[-1].ended if run.attempts else None,
        "attempts": [{"start_step": one.start_step, "time": one.time, "ended": one.ended} for one in run.attempts],
        "steps": {"count": len(steps), "first": _end(steps, 0), "last": _end(steps, -1)},
        "layers": [
            {"name": one.name, "kind": one.kind, "shape": one.shape, "part": one.part, "frozen": one.name in still}
            for one in layers
        ],
        "quantities": [_quantity(run, name, at) for name, at in where.items()],
        "scalars": shown,
        "events": [asdict(one) for one in events[left_out:]],
        "events_left_out": left_out,
        "schedule": _schedule(run),
        "diagnosis": {
            "headline": replace(found, run=called).headline(),
            "decided": found.decided,
            "missing": found.missing,
            "findings": [asdict(one) for one in found],
        },
        "predicted": _predicted(run),
        "options": options,
        "meta": meta,
        "recorded": _recorded(run, counts),
        "notes": list(_notes(counts, scalars, left_out, bins)),
    })  # fmt: skip


def _json(shown: Mapping[str, Any]) -> Json:
    return {key: cleaned(value) for key, value in shown.items()}


def cleaned(value: Any) -> Any:
    r"""Return data that JSON can hold, and text that a page does not act on.

    >>> cleaned({"loss": float("nan"), "shape": (3, 2), "note": "\u202eevil"})
    {'loss': None, 'shape': [3, 2], 'note': '\\u202eevil'}
    """
    match value:
        case str():
            return plain(value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…")
        case Mapping():
            return {cleaned(str(key)): cleaned(one) for key, one in value.items()}
        case bool() | np.bool_():
            return bool(value)
        case int() | np.integer():
            return int(value)
        case float() | np.floating():
            return float(value) if isfinite(value) else None
        case None:
            return None
        case Sequence() | np.ndarray() | set() | frozenset():
            return [cleaned(one) for one in value]
        case _:
            return cleaned(str(value))


def _sparkline(run: Run) -> list[float]:
    """Return the mean rotation of the layers over the steps, at a few of them."""
    if "rotation" not in run.quantities:
        return []
    values = run.series("rotation", steps=_some(run.where("rotation"), _SPARKS))
    known = np.isfinite(values)
    rows = known.any(axis=1)
    means = np.where(known, values, 0.0)[rows].sum(axis=1) / known[rows].sum(axis=1)
    return _rounded(means, 4)


def _quantity(run: Run, name: str, where: Steps) -> Json:
    about = run.quantities[name]
    look = look_of(name, about)
    values = run.series(name, steps=_some(where, _SAMPLE))
    return {
        "name": name,
        "label": look.label,
        "unit": about.unit,
        "meaning": about.meaning,
        "scale": settle(look, values).scale,
        "noisy": look.noisy,
        "group": group_of(name),
        "count": len(where),
        "last": _rounded(final_values(run, name), 4),
    }


def group_of(quantity: str) -> str:
    """Return the group of panels that shows a quantity.

    >>> group_of("update_norm"), group_of("gradient_norm"), group_of("kappa_f_p50"), group_of("sharpness")
    ('norms', 'gradients', 'conditioning', 'other')
    """
    return next(group for group, names in GROUPS.items() if any(fnmatchcase(quantity, one) for one in names.split()))


def _rank(scalar: str) -> int:
    """Return the place of a logged number: losses, then accuracies, then what the user logged."""
    known = ["loss", "batch_loss", *chain.from_iterable(ACCURACIES.values())]
    return known.index(scalar) if scalar in known else len(known)


def _scalar(name: str, scalar: Scalar, bins: int | None) -> Json:
    steps, values = scalar
    if bins is None or len(steps) <= bins:
        return {"name": name, "steps": steps, "values": _rounded(values, 9), "thinned": False}
    edges = edges_of(len(steps), bins)
    thinned = zip(("values", "min", "max"), reduce(values, edges), strict=True)
    curves = {key: _rounded(curve, 7) for key, curve in thinned}
    return {"name": name, "steps": steps[edges[1:] - 1], **curves, "thinned": True}


def _schedule(run: Run) -> list[Json]:
    """Return the changes of the learning rate: each by itself, or where it keeps changing, one stretch at a time."""
    steps = run.where("lr") if "lr" in run.quantities else run.steps[:0]
    if len(steps) < 2:
        return []
    groups = Counter(column.tobytes() for column in run.series("lr", steps=steps).T)  # of layers that share a schedule
    rates, sizes = np.stack([np.frombuffer(one, np.float32) for one in groups], axis=1), np.array([*groups.values()])
    before, after = rates[:-1], rates[1:]
    with np.errstate(invalid="ignore", divide="ignore"):
        moved = np.abs(after - before) > _SAME * np.abs(before)
        factors = after / before
        up = np.where(moved, np.sign(after - before), 0).sum(axis=1)  # its sign says where most of the groups go
    changes: list[int] = np.flatnonzero(moved.any(axis=1)).tolist()
    said: list[Json] = []
    while changes and len(said) < _CHANGES:
        i = end = changes.pop(0)
        while changes and changes[0] == end + 1 and up[end + 1] * up[i] > 0:
            end = changes.pop(0)
        some = moved[i]
        if end - i < 2:
            changes = [*range(i + 1, end + 1), *changes]  # each by itself
            by, count = factors[i][some], int(some.sum())
            text = (
                f"× {_told(by)}"
                if np.isfinite(by).all()
                else f"from {_told(before[i][some])} to {_told(after[i][some])}"
            )
            text += f" ({count} groups of layers)" if count > 1 else ""
            at = steps[i + 1]
        else:
            verb, ends = "rises" if up[i] > 0 else "falls", (_told(before[i][some]), _told(after[end][some]))
            text, at = f"{verb} from {ends[0]} to {ends[1]}, until step {steps[end + 1]:,}", steps[i]
        whose = "" if some.all() else f" of {int(sizes[some].sum()):,} of {int(sizes.sum()):,} layers"
        said.append({"step": at, "text": f"learning rate{whose} {text}"})
    return said


def _told(values: npt.NDArray[Any]) -> str:
    """Return a number, or the range of several."""
    known = values[np.isfinite(values)]
    return "–".join(dict.fromkeys(f"{end:.3g}" for end in (known.min(), known.max()))) if len(known) else "unknown"


class _Thinned:
    """A run at some of its steps, for predictions: those of all steps of a long run take seconds."""

    def __init__(self, run: Run) -> None:
        self.layers: Sequence[str] = run.layers
        self.layer_table: Sequence[LayerInfo] = run.layer_table
        self.steps = _some(run.steps, _ROWS)
        self.quantities: Mapping[str, QuantityInfo] = run.quantities
        self.meta: Mapping[str, Any] = run.meta
        self._run = run

    def series(self, name: str) -> npt.NDArray[np.float32]:
        return self._run.series(name, steps=self.steps)


def _predicted(run: Run) -> Json:
    """Return what theory expects of some layers, by the quantity that it is to be compared with."""
    thinned = _Thinned(run)
    if not len(thinned.steps) or not {"lr", "weight_norm"} <= run.quantities.keys():
        return {}
    tried = _some(np.arange(len(run.layers)), 4 * _PREDICTED)
    try:
        found = dict(zip(tried.tolist(), predictions(thinned, [run.layers[i] for i in tried]), strict=True))
    except (DynamicsError, MonitorError):  # numbers that theory does not cover
        return {}
    points = _some(np.arange(len(thinned.steps)), _POINTS)
    ends = points[[0, -1]]
    curves = {
        "effective_lr": ("fitted decay law", points, {i: one.law[points] for i, one in found.items()}),
        "effective_lr_measured": (
            "η/‖w‖², predicted", points, {i: one.effective_lr[points] for i, one in found.items()},
        ),
        "rate_per_step": (
            "predicted equilibrium", ends, {i: np.full(2, one.equilibrium_rate or nan) for i, one in found.items()},
        ),
    }  # fmt: skip
    if any(one.kind == "adamw" for one in found.values()):  # its steps do not follow η/‖w‖²
        del curves["effective_lr_measured"]
    shown = {}
    for quantity, (label, at, values) in curves.items():
        known = np.array([i for i, one in values.items() if np.isfinite(one).any()], dtype=np.int64)
        if quantity in run.quantities and len(known):
            layers = _some(known, _PREDICTED).tolist()
            shown[quantity] = {
                "steps": thinned.steps[at],
                "layers": layers,
                "values": [_rounded(values[i], 4) for i in layers],
                "label": label,
            }
    return shown


def _options(meta: Mapping[str, Any]) -> tuple[Json, Json]:
    """Return the hyperparameters of a run by dotted names, and the rest of its meta as text."""
    given = meta.get("optimizers")
    optimizers = given if isinstance(given, list) else []
    named = {"optimizer" if len(optimizers) == 1 else f"optimizer{i}": one for i, one in enumerate(optimizers, 1)}
    theirs = {key: value for key, value in meta.items() if key not in ("optimizers", *_OWN)}
    options = dict(_flat({**named, **theirs}))
    own = {key: str(value) for key, value in _flat({key: meta[key] for key in _OWN if key in meta})}
    return dict(list(options.items())[:_OPTIONS]), dict(list(own.items())[:_OPTIONS])


def _flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, one in value.items():
        if isinstance(one, Mapping):
            yield from _flat(one, f"{before}{key}.")
        elif isinstance(one, list):
            short = len(one) <= 8 and not any(isinstance(inner, list | Mapping) for inner in one)
            if one:
                yield f"{before}{key}", ", ".join(map(str, one)) if short else f"{len(one):,} entries"
        elif one is not None:
            yield f"{before}{key}", one


def _recorded(run: Run, counts: Mapping[str, int]) -> str:
    """Return what was recorded and how often, in a sentence."""
    steps, layers = run.steps, len(run.layers)
    of = f"{len(counts):,} {'quantity' if len(counts) == 1 else 'quantities'} of {_counted(layers, 'layer')}"
    if not len(steps):
        return f"Nothing has been measured yet; the run has {_counted(layers, 'layer')}."
    said = f"{of} at {_counted(len(steps), 'step')}"
    if len(steps) > 1:
        said += f" from {steps[0]:,} to {steps[-1]:,}"
        gap = int(np.median(np.diff(steps)))
        same = bool((np.diff(steps) == gap).all())
        said += f", {'' if same else 'mostly '}every {'step' if gap == 1 else f'{gap:,} steps'}"
    seldom = [count for count in counts.values() if count < len(steps) / 2]
    if seldom:
        said += f"; {len(seldom):,} of them on sampled steps only ({_counted(max(seldom), 'step')})"
    return f"{said}."


def _notes(counts: Mapping[str, int], scalars: Mapping[str, Scalar], events: int, bins: int | None) -> Iterator[str]:
    """Yield what was downsampled or left out."""
    most = max(counts.values(), default=0)
    if bins is not None and most > bins:
        yield (
            f"Series of more than {bins:,} measured steps are shown in {bins:,} bins of up to {-(-most // bins):,} "
            "steps: the mean of each bin, its minimum and its maximum. Nothing was left out of these."
        )
    long = [name for name, scalar in scalars.items() if bins is not None and len(scalar.steps) > bins]
    if long:
        names = ", ".join(long[:3]) + (", …" if len(long) > 3 else "")
        yield f"Of {_counted(len(long), 'logged number')} ({names}), {bins:,} bins are shown in the same way."
    if len(scalars) > _SCALARS:
        yield f"Of {len(scalars):,} logged numbers, {_SCALARS:,} are shown."
    if events:
        yield f"Of {events + _EVENTS:,} events, the last {_EVENTS:,} are shown."


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _listed(facts: Any, name: str) -> list[str]:
    named = facts.get(name) if isinstance(facts, Mapping) else None
    return [one for one in named if isinstance(one, str)] if isinstance(named, list) else []


def _end(steps: Steps, which: int) -> int | None:
    return int(steps[which]) if len(steps) else None


def _some(values: npt.NDArray[Any], most: int) -> npt.NDArray[Any]:
    """Return at most `most` of `values`, evenly spread, with the first and the last."""
    if len(values) <= most:
        return values
    return values[np.linspace(0, len(values) - 1, most).round().astype(np.int64)]


def _rounded(values: npt.ArrayLike, digits: int) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in np.asarray(values, dtype=np.float64).tolist()]
