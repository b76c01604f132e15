"""A sink that mirrors a run to Trackio."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gyroscope.errors import MonitorError
from gyroscope.integrations.mirror import QUANTITIES, Mirror, Pixels, grouped, imported

_TAKEN = {"project", "run", "timestamp", "step", "time", "metrics"}  # Trackio's own columns


def _scalar_name(name: str) -> str:
    safe = grouped(name)
    return f"scalar_{safe}" if safe in _TAKEN or safe.startswith("__") else safe


class Trackio(Mirror):
    """Mirror a run to a new run in a Trackio project, or to an existing one.

    Args:
        project: project of a new run.
        run: a run that `trackio.init` returned, to use instead; it stays open.
        every: smallest distance of mirrored steps; by default chosen to send at most 100 numbers per step.
        quantities: the series to mirror; None for all.
        layers: glob pattern or patterns on the layers to mirror.
        init: further arguments of `trackio.init` for a new run, such as `name` and `resume`.

    >>> sink = Trackio("digits")  # doctest: +SKIP
    >>> monitor = gyroscope.watch(model, optimizer, sinks=[sink])  # doctest: +SKIP
    """

    scalar_name = staticmethod(_scalar_name)

    def __init__(
        self,
        project: str | None = None,
        *,
        run: Any = None,
        every: int | None = None,
        quantities: Iterable[str] | None = QUANTITIES,
        layers: str | Iterable[str] | None = None,
        **init: Any,
    ) -> None:
        super().__init__(every=every, quantities=quantities, layers=layers)
        if (run is None) == (project is None):
            raise MonitorError("Either `project` or an open `run` must be given to Trackio, got both or none.")
        if run is not None and init:
            raise MonitorError(
                f"`run` is an existing run, so arguments of trackio.init must be left out, got {', '.join(init)}."
            )
        self._trackio = imported("trackio", sink="Trackio", extra="trackio")
        self._given = self._run = run
        self._init = {"project": project, **init}

    def begin(self, meta: Mapping[str, Any]) -> None:
        """Create the run."""
        if self._given is None:
            config = {**meta, **(self._init.get("config") or {})}
            self._run = self._trackio.init(**{"embed": False, **self._init, "config": config})

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Log one row."""
        self._run.log(values, step=step)

    def event(self, event: Any) -> None:
        """Log the event's text under its kind."""
        self._run.log({f"gyroscope/{event.kind}": self._trackio.Markdown(event.text)}, step=event.step)

    def end(self, run: Any, step: int, picture: Pixels | None) -> None:
        """Log the picture, and finish the run if this sink created it."""
        if picture is not None:
            self._run.log({"gyroscope/rotation": self._trackio.Image(picture)}, step=step)
        if self._given is None:
            self._run.finish()
