"""A sink that mirrors a run to Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gyroscope.errors import MonitorError
from gyroscope.integrations.mirror import QUANTITIES, Mirror, Pixels, imported
from gyroscope.store.record import Event

STEP = "gyroscope/step"


class Wandb(Mirror):
    """Mirror a run to a new run in Weights & Biases, or to an existing one.

    wandb's own steps must increase, and late values are dropped. So numbers are drawn against `gyroscope/step`, which
    is logged with them, and wandb's steps remain those of the run's owner. In an existing run numbers are added to the
    row you log next; of several steps measured between two of your rows only the last is kept.

    Args:
        project: project of a new run.
        run: an open run to use instead; it stays open.
        commit: give each step a row of its own. By default only in a new run; in an existing run it advances wandb's
            steps, which does no harm if you never pass `step=` yourself.
        every: smallest distance of mirrored steps; by default chosen to send at most 100 numbers per step.
        quantities: the series to mirror; None for all.
        layers: glob pattern or patterns on the layers to mirror.
        init: further arguments of `wandb.init` for a new run, such as `mode="offline"`, or `id` and `resume`.

    >>> sink = Wandb("digits", mode="offline")  # doctest: +SKIP
    >>> monitor = gyroscope.watch(model, optimizer, sinks=[sink])  # doctest: +SKIP
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        run: Any = None,
        commit: bool | None = None,
        every: int | None = None,
        quantities: Iterable[str] | None = QUANTITIES,
        layers: str | Iterable[str] | None = None,
        **init: Any,
    ) -> None:
        super().__init__(every=every, quantities=quantities, layers=layers)
        if run is not None and (project is not None or init):
            raise MonitorError(
                "Only one of `run` and `project` or arguments of wandb.init may be given to Wandb, got both."
            )
        self._wandb = imported("wandb", sink="Wandb", extra="wandb")
        self._given = self._run = run
        self._commit = run is None if commit is None else commit
        self._init = {"project": project, **init}
        self._defined: set[str] = set()

    def begin(self, meta: Mapping[str, Any]) -> None:
        """Create the run, next to any that is open."""
        if self._given is None:
            config = {**meta, **(self._init.get("config") or {})}
            self._run = self._wandb.init(**{"reinit": "create_new", **self._init, "config": config})
        self._defined = set()
        self._run.define_metric(STEP)

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Log one row."""
        for name in values:
            self._define(name)
        self._run.log({**values, STEP: step}, commit=self._commit)

    def event(self, event: Event) -> None:
        """Send a finding as an alert; all events are logged at the end."""
        if event.kind == "finding":
            level = "ERROR" if event.text.startswith("serious") else "WARN"
            self._run.alert(title=f"Gyroscope, step {event.step:,}", text=event.text, level=level)

    def end(self, run: Any, step: int, picture: Pixels | None) -> None:
        """Log the picture and the events, and finish the run if this sink created it."""
        events = [[event.step, event.kind, event.text] for event in run.events]
        row: dict[str, Any] = {STEP: step}
        if picture is not None:
            row["gyroscope/rotation"] = self._wandb.Image(picture)
        if events:
            row["gyroscope/events"] = self._wandb.Table(columns=["step", "kind", "text"], data=events)
        self._run.log(row, commit=self._commit)
        if self._given is None:
            self._run.finish()

    def _define(self, name: str) -> None:
        group = name.partition("/")[0]
        pattern = f"{group}/*" if group in self.groups else name
        # In an existing run the user may log a scalar of the same name against their own steps.
        if pattern not in self._defined and (group in self.groups or self._given is None):
            self._run.define_metric(pattern, step_metric=STEP)
        self._defined.add(pattern)
