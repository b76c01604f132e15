"""Data whose test set is looked at after every epoch, for figures that show test errors by epoch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from gyroscope_lab.data.image_cache import Progress
from gyroscope_lab.data.source import Source
from gyroscope_lab.data.split import Split
from gyroscope_lab.errors import LabError


@dataclass(frozen=True)
class ByEpoch(Source):
    """A source whose test set stands in for what is held out, so that a result has a test accuracy for each epoch.

    All examples are trained on, as in the paper, and no weights and no rates are chosen by these accuracies; with the
    last weights tested, the last of them is the test accuracy.

    Attributes:
        tested: after each "epoch". It has no default, and so sets a trial apart from one that is tested but once.

    >>> split = ByEpoch("digits", tested="epoch").load()
    >>> split.x_val is split.x_test, len(split.x_train)
    (True, 200)
    >>> ByEpoch("digits", validation=0.1, tested="epoch")
    Traceback (most recent call last):
    gyroscope_lab.errors.LabError: a share of 0.1 is held out, and the test set is to stand in for it; hold none out ...
    """

    tested: Literal["epoch"] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation:
            raise LabError(
                f"a share of {self.validation} is held out, and the test set is to stand in for it; hold none out "
                "(validation=0.0), or take a Source"
            )

    def load(self, folder: Path | str | None = None, *, on_progress: Progress | None = None) -> Split:
        """Return the examples of the source, those to test on twice."""
        split = super().load(folder, on_progress=on_progress)
        return replace(split, x_val=split.x_test, y_val=split.y_test)
