"""Dominated layers named while a run is written: on the writer's thread, each once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gyroscope.errors import GyroscopeError
from gyroscope.monitor.domination import Episodes, known_steps, norms_ratio, seen
from gyroscope.monitor.products import Products
from gyroscope.store import Run
from gyroscope.store.record import Event, LayerInfo

# How many measurements of a run that is gone on with say what state its layers are in.
_LATEST = 64


class Naming:
    """Names dominated layers while a run is written, on the writer's thread, each once.

    Args:
        path: the run's folder.
        layers: its layers.
        spectral: of each part, whether its conditioning is analysed. Then only these measurements count.
        resumes: whether the run goes on with an earlier one, so that what was named there is not named again.
    """

    def __init__(self, path: Path, layers: Sequence[LayerInfo], spectral: Sequence[bool], *, resumes: bool) -> None:
        self._path, self._resumes = path, resumes
        self._parts = [
            Episodes([layer for layer in layers if layer.part == part], spectral=one)
            for part, one in enumerate(spectral)
        ]

    def events(
        self, part: int, steps: Sequence[int], products: Products, analysed: Mapping[int, npt.NDArray[np.float32]]
    ) -> Iterator[Event]:
        """What the measurements of a part at some steps say.

        Args:
            part: whose they are.
            steps: when they were made [S].
            products: the inner products [S, L].
            analysed: by their place among the steps, σmax(∂L/∂W)/σmax(W) [L].
        """
        if self._resumes:
            self._resumes = False
            self._recall()
        episodes = self._parts[part]
        d = products
        with np.errstate(all="ignore"):
            update = np.where(d.bb > 0, np.sqrt(d.uu / d.bb), np.nan).astype(np.float32)
            ratio = norms_ratio(np.sqrt(d.gg), np.sqrt(d.ww))
        if episodes.spectral:
            rows = list(analysed)
            steps, update = [steps[i] for i in rows], update[rows]
            ratio = np.array([analysed[i] for i in rows], dtype=np.float64).reshape(update.shape)
        begun = episodes.see(steps, ratio, update)
        for step, one in begun:
            yield Event(step, "finding", str(one))

    def _recall(self) -> None:
        """What the last measurements of the earlier run leave the layers in."""
        with suppress(GyroscopeError), Run(self._path) as run:
            for mine, known in zip(self._parts, seen(run, known_steps(run)[-_LATEST:]), strict=True):
                mine.go_on(known)
