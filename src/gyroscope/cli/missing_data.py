"""Data that is not here, noticed before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gyroscope.cli.fail import FAILED, fail
from gyroscope.errors import GyroscopeError

if TYPE_CHECKING:
    from gyroscope.lab.data.source import Source
    from gyroscope.lab.trial import Trial


def require_data(trials: Sequence[Trial], folder: Path, *, what: str) -> None:
    """Give up, and say how to get it, if a dataset that trials need is not in `folder`.

    >>> from gyroscope.lab.recipe import Recipe
    >>> from gyroscope.lab.tasks import task
    >>> from gyroscope.lab.trial import Trial
    >>> require_data([Trial(task("digits"), Recipe("SGD", 0.1))], Path("nowhere"), what="the task digits")
    """
    from gyroscope.lab.data.catalogue import DATASETS

    sources = {trial.task.source.name: trial.task.source for trial in trials}
    lacking = {name: why for name, source in sources.items() if (why := _problem(source, folder)) is not None}
    if not lacking:
        return
    by_hand = {known.name: known.by_hand for known in DATASETS if known.by_hand}
    fetched = [name for name in lacking if name not in by_hand]
    lines = [f"{what} cannot be trained without {', '.join(lacking)}: {'; '.join(lacking.values())}."]
    if fetched:
        lines.append(f"Looked in {folder.expanduser().absolute()}.")
        lines.append(f"To fetch what is missing: gyroscope data get {' '.join(fetched)} --to {folder}")
    lines += [f"For {name}, {by_hand[name]}." for name in lacking if name in by_hand]
    fail(" ".join(lines), code=FAILED)


def _problem(source: Source, folder: Path) -> str | None:
    """Why a source cannot be read from a folder, None if it can, as far as a glance tells."""
    from gyroscope.lab.data.catalogue import DATASETS, missing
    from gyroscope.lab.run_one import loaded

    place = folder.expanduser()
    forms = [known for known in DATASETS if known.source == source.name]
    if any(not missing(known, place) for known in forms):
        return None
    # Its files are not where they are published; whoever reads them has the last word, and says what is wrong.
    try:
        loaded(source, folder)
    except GyroscopeError as error:
        return str(error).rstrip(".")
    return None
