"""Where datasets are looked for."""

from __future__ import annotations

import os
from pathlib import Path

from gyroscope_lab.errors import LabError

#: The environment variable that names the folder of the datasets.
DATA = "GYROSCOPE_DATA"


def data_folder(folder: Path | str | None, name: str) -> Path:
    """Return the folder to look for a dataset in: the one given, else the one that GYROSCOPE_DATA names.

    Args:
        folder: the one given, or None.
        name: of the dataset, as people write it.

    >>> data_folder("no/such/folder", "MNIST")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: there is no folder no/such/folder to look for MNIST in; give one that exists
    """
    given = os.environ.get(DATA) if folder is None else folder
    if not given:
        raise LabError(f"where {name} is was not said; give its folder, or set {DATA} to the folder of your datasets")
    root = Path(given).expanduser()
    if not root.is_dir():
        named = f" ({DATA} names it)" if folder is None else ""
        raise LabError(f"there is no folder {root}{named} to look for {name} in; give one that exists")
    return root
