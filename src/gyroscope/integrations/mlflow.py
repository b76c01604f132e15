"""A sink that mirrors a run to MLflow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import monotonic, time
from typing import Any

from gyroscope.errors import MonitorError
from gyroscope.integrations.mirror import QUANTITIES, Mirror, Pixels, imported
from gyroscope.store.record import Event

# Metrics that MLflow takes in one call, and how long numbers wait for a call to fill.
_METRICS_PER_CALL = 1000
_SECONDS = 2.0


class MLflow(Mirror):
    """Mirror a run to a new run in MLflow's tracking store, or to an existing one.

    Args:
        experiment: name of the experiment that a new run belongs to; created if it does not exist.
        run: an existing run to use instead, such as `mlflow.active_run()`, or its id; it stays open.
        run_name: name of a new run.
        tracking_uri: the store; MLflow's current one by default.
        every: smallest distance of mirrored steps; by default chosen to send at most 100 numbers per step.
        quantities: the series to mirror; None for all.
        layers: glob pattern or patterns on the layers to mirror.

    >>> sink = MLflow("digits", tracking_uri="sqlite:///mlflow.db")  # doctest: +SKIP
    >>> monitor = gyroscope.watch(model, optimizer, sinks=[sink])  # doctest: +SKIP
    """

    def __init__(
        self,
        experiment: str | None = None,
        *,
        run: Any = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        every: int | None = None,
        quantities: Iterable[str] | None = QUANTITIES,
        layers: str | Iterable[str] | None = None,
    ) -> None:
        super().__init__(every=every, quantities=quantities, layers=layers)
        if run is not None and (experiment is not None or run_name is not None):
            raise MonitorError("Only one of `run` and `experiment` or `run_name` may be given to MLflow, got both.")
        mlflow = imported("mlflow", sink="MLflow", extra="mlflow")
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient(tracking_uri=tracking_uri or mlflow.get_tracking_uri())
        self._experiment, self._run_name = experiment or "Default", run_name
        self._own = run is None
        self.run_id: str | None = run if run is None or isinstance(run, str) else run.info.run_id
        self._waiting: list[Any] = []
        self._since, self._found = 0.0, 0

    def begin(self, meta: Mapping[str, Any]) -> None:
        """Create the run."""
        if self._own:
            found = self._client.get_experiment_by_name(self._experiment)
            number = found.experiment_id if found else self._client.create_experiment(self._experiment)
            tags = {f"gyroscope.{key}": str(value)[:500] for key, value in meta.items()}
            self.run_id = self._client.create_run(number, run_name=self._run_name, tags=tags).info.run_id
        self._waiting, self._found = [], 0

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Keep the numbers until there are enough for a call."""
        if not self._waiting:
            self._since = monotonic()
        now = int(1000 * time())
        self._waiting += [self._metric(name, value, now, step) for name, value in values.items()]
        if len(self._waiting) >= _METRICS_PER_CALL or monotonic() - self._since > _SECONDS:
            self._send()

    def event(self, event: Event) -> None:
        """Tag the run with a finding; all events are sent at the end."""
        if event.kind == "finding":
            self._found += 1
            self._client.set_tag(self.run_id, f"gyroscope.finding.{self._found}", f"{event.step}: {event.text}"[:500])

    def end(self, run: Any, step: int, picture: Pixels | None) -> None:
        """Send the waiting numbers, the picture and the events, and end the run if this sink created it."""
        self._send()
        if picture is not None:
            self._client.log_image(self.run_id, picture, artifact_file="gyroscope/rotation.png")
        events = "".join(f"{event.step}\t{event.kind}\t{event.text}\n" for event in run.events)
        if events:
            self._client.log_text(self.run_id, events, "gyroscope/events.txt")
        if self._own:
            self._client.set_terminated(self.run_id)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), _METRICS_PER_CALL):
            self._client.log_batch(self.run_id, metrics=waiting[start : start + _METRICS_PER_CALL])
