"""Checks for missing data before anything is trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gyroscope.cli.fail import FAILED, fail
from gyroscope.errors import GyroscopeError

if TYPE_CHECKING:
    from gyroscope_lab.data.source import Source
    from gyroscope_lab.training.trial import Trial


def require_data(trials: Sequence[Trial], folder: Path, *, what: str) -> None:
    """Exit and say how to get the data if a dataset that trials need is not in `folder`.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.tasks import task
    >>> from gyroscope_lab.training.trial import Trial
    >>> require_data([Trial(task("digits"), Recipe("SGD", 0.1))], Path("nowhere"), what="the task digits")
    """
    missing = lacking(trials, folder)
    if not missing:
        return
    place = folder.expanduser().absolute()
    found = "; ".join(missing.values()) if place.is_dir() else "there is no such folder"
    needs = f"{what} cannot be trained without {', '.join(missing)}"
    fail(f"{needs}. Looked in {place}: {found}. {to_get(list(missing), folder)}", code=FAILED)


def lacking(trials: Sequence[Trial], folder: Path) -> dict[str, str]:
    """Return the datasets that trials need and `folder` lacks, with the reason for each.

    >>> from gyroscope_lab.training.recipe import Recipe
    >>> from gyroscope_lab.training.tasks import task
    >>> from gyroscope_lab.training.trial import Trial
    >>> list(lacking([Trial(task(name), Recipe("SGD", 0.1)) for name in ("digits", "c10-cnn1")], Path("nowhere")))
    ['cifar-10']
    """
    sources = {trial.task.source.name: trial.task.source for trial in trials}
    return {name: why for name, source in sources.items() if (why := _problem(source, folder)) is not None}


def to_get(names: Sequence[str], folder: Path) -> str:
    """Return instructions to get datasets.

    >>> to_get(["mnist", "cifar-10"], Path("data"))
    'To fetch what is missing: gyroscope data get mnist cifar-10 --to data'
    """
    from gyroscope_lab.data.catalogue import DATASETS

    by_hand = {known.name: known.by_hand for known in DATASETS if known.by_hand}
    fetched = [name for name in names if name not in by_hand]
    said = [f"To fetch what is missing: gyroscope data get {' '.join(fetched)} --to {folder}"] if fetched else []
    return ". ".join([*said, *(f"For {name}, {by_hand[name]}" for name in names if name in by_hand)])


def named_in(message: str) -> list[str]:
    """Return the datasets that an error mentions.

    >>> named_in("There is no folder data to look for CIFAR-100 in"), named_in("the loss is nan")
    (['cifar-100'], [])
    """
    from gyroscope_lab.data.catalogue import DATASETS

    titles = {known.title: known.name for known in DATASETS} | {"CIFAR-10": "cifar-10", "CIFAR-100": "cifar-100"}
    pattern = "|".join(re.escape(title) for title in sorted(titles, key=len, reverse=True))
    return list(dict.fromkeys(titles[found] for found in re.findall(rf"\b({pattern})\b", message)))


def _problem(source: Source, folder: Path) -> str | None:
    """The reason why a source cannot be read from a folder, or None; a quick check."""
    from gyroscope_lab.data.catalogue import DATASETS, missing
    from gyroscope_lab.engine.run_one import loaded

    place = folder.expanduser()
    forms = [known for known in DATASETS if known.source == source.name]
    if any(not missing(known, place) for known in forms):
        return None
    # Its files are not in their published places; the reader decides, and says what is wrong.
    try:
        loaded(source, folder)
    except GyroscopeError as error:
        return str(error).rstrip(".")
    return None
