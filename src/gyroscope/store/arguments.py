"""Validation of arguments to the store, before anything is written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any

import numpy as np

from gyroscope.base.accepted import listed, real, whole
from gyroscope.errors import StoreError
from gyroscope.store.journal import META
from gyroscope.store.record import LayerInfo, QuantityInfo, Steps

_MOST = 2**63


def path_of(given: Any, what: str = "the folder of a run") -> Path:
    """Return a path; `what` names it in errors.

    >>> path_of("runs/first").name
    'first'
    """
    if not isinstance(given, str | os.PathLike) or not isinstance(os.fspath(given), str):
        raise StoreError(f"{what[0].upper()}{what[1:]} must be a path, got {given!r}. Try 'runs/first'.")
    if not can_be_named(os.fspath(given)):
        raise StoreError(f"{what[0].upper()}{what[1:]} must be a valid path, got {given!r}. Try 'runs/first'.")
    return Path(given)


def can_be_named(path: str | bytes) -> bool:
    """Return True if a file can have this name: text without a zero byte or half a surrogate pair."""
    try:
        return isinstance(path, str) and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def step_of(given: Any) -> int:
    """Return a step, a whole number of 64 bits.

    >>> step_of(np.int32(7))
    7
    """
    step = whole(given)
    if step is None:
        raise StoreError(f"A step must be a whole number, got {given!r}. Try 0.")
    if not -_MOST <= step < _MOST:
        raise StoreError(f"A step must be an integer of 64 bits, got {step}. Try 0.")
    return step


def steps_of(given: Any) -> Steps:
    """Return the steps that are asked for: whole numbers, not a mask.

    >>> steps_of([0, 10]).dtype
    dtype('int64')
    """
    try:
        steps = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):  # ragged lists, or a tensor without values
        steps = np.array(given if isinstance(given, list | tuple) else [None], dtype=object)
    match steps.dtype.kind:
        case "f":
            fine = bool((steps == np.floor(steps)).all() and (np.abs(steps) < _MOST).all())
        case "O":
            fine = all((step := whole(one, -_MOST)) is not None and step < _MOST for one in steps.flat)
        case kind:
            fine = kind == "i" or (kind == "u" and bool((steps < _MOST).all()))
    if not fine:
        raise StoreError(
            f"`steps` must be some of the run's steps, as whole numbers, got {given!r:.80}. Try steps=[0, 100], or "
            "steps=run.steps[mask]."
        )
    return steps.astype(np.int64)


def names_of(given: Any) -> list[str]:
    """Return the names of quantities, each once, from one name or several.

    >>> names_of("rotation"), names_of(["rate", "rate"])
    (['rotation'], ['rate'])
    """
    names = listed(given)
    if not all(isinstance(name, str) for name in names):
        raise StoreError(f"`quantity` must be one name or several, got {given!r:.80}. Try 'rotation'.")
    return list(dict.fromkeys(names))


def check_run(layers: Any, quantities: Any, meta: Any, queue: Any, tick: Any) -> None:
    """Reject layers, quantities and options that no run can have."""
    given = listed(layers)
    for layer in given:
        if not isinstance(layer, LayerInfo):
            raise StoreError(f"`layers` must be a list of gyroscope.store.LayerInfo, got {layer!r} in it.")
        if not _is_well_formed(layer):
            raise StoreError(
                f"A layer must have a name and a kind that are text, a shape of whole numbers and a part ≥ 0, got "
                f"{layer!r}. Try LayerInfo('conv1.weight', 'conv', (8, 3, 3, 3))."
            )
    names = [layer.name for layer in given]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if not names or twice:
        said = f"the layer {twice[0]!r} twice" if twice else "no layers"
        raise StoreError(f"`layers` must have at least one layer, and each a name of its own, got {said}.")
    check_quantities(quantities)
    _check_meta(meta)
    if not real(queue) >= 1:
        raise StoreError(f"`queue` must be a number ≥ 1, got {queue!r}. Try 256.")
    if not 0 < real(tick) <= TIMEOUT_MAX:  # the longest that a thread can wait
        raise StoreError(f"`tick` must be a finite number of seconds > 0, got {tick!r}. Try 0.25.")


def _is_well_formed(layer: LayerInfo) -> bool:
    """Return True if a layer reads back as it was written."""
    numbers = (*layer.shape, layer.part) if isinstance(layer.shape, list | tuple) else (None,)
    return (
        isinstance(layer.name, str)
        and isinstance(layer.kind, str)
        and all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in numbers)
    )


def check_quantities(given: Any) -> None:
    """Reject quantities that are not a dict of `QuantityInfo` by name."""
    if not isinstance(given, Mapping):
        raise StoreError(f"`quantities` must be a dict of QuantityInfo by name, got {given!r:.80}.")
    for name, about in given.items():
        if not isinstance(name, str) or not isinstance(about, QuantityInfo):
            raise StoreError(
                f"`quantities` must be a dict of gyroscope.store.QuantityInfo by name, got {about!r:.80} for {name!r}."
            )


def _check_meta(meta: Any) -> None:
    try:
        json.dumps(dict(meta), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StoreError(f"`meta` must be a dict that JSON can hold, got {meta!r:.80}: {error}.") from error
    if META in dict(meta):
        raise StoreError(f"`meta` must not have the key {META!r}, which Gyroscope uses. Use another name.")
