"""A sink that mirrors a run to TensorBoard's event files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gyroscope.integrations.mirror import QUANTITIES, Mirror, Pixels, as_it_is, imported
from gyroscope.store.record import Event, Record, Rows


class TensorBoard(Mirror):
    """Mirror a run to event files in a folder, or to an existing `SummaryWriter`.

    A run that is resumed from an earlier step replaces, in the same folder, what came after that step.

    Args:
        log_dir: folder for the event files.
        writer: an open writer to use instead; it is flushed, and stays open.
        every: smallest distance of mirrored steps; by default chosen to send at most 100 numbers per step.
        quantities: the series to mirror; None for all.
        layers: glob pattern or patterns on the layers to mirror.

    >>> import numpy as np, tempfile
    >>> from pathlib import Path
    >>> from gyroscope.store import LayerInfo, Writer
    >>> folder = tempfile.TemporaryDirectory()
    >>> sink = TensorBoard(f"{folder.name}/board")
    >>> writer = Writer(f"{folder.name}/run", [LayerInfo("fc.weight", "linear", (2, 2))], {}, sinks=[sink])
    >>> writer.put(Rows(0, np.array([1]), {"rotation": np.array([[0.1]], np.float32)}))
    True
    >>> writer.close()
    >>> [path.name.split(".")[0] for path in Path(f"{folder.name}/board").iterdir()]
    ['events']
    >>> folder.cleanup()
    """

    layer_name = scalar_name = staticmethod(as_it_is)

    def __init__(
        self,
        log_dir: str | Path = "runs/tensorboard",
        *,
        writer: Any = None,
        every: int | None = None,
        quantities: Iterable[str] | None = QUANTITIES,
        layers: str | Iterable[str] | None = None,
    ) -> None:
        super().__init__(every=every, quantities=quantities, layers=layers)
        needed = {"sink": "TensorBoard", "extra": "tensorboard"}
        self._make = imported("torch.utils.tensorboard", **needed).SummaryWriter
        self._summary = imported("tensorboard.compat.proto.summary_pb2", **needed).Summary
        self._folder = log_dir
        self._given = writer
        self._writer: Any = writer
        self._meta = ""

    def begin(self, meta: Mapping[str, Any]) -> None:
        """Remember the run's description; its files are created when the first step is known."""
        self._writer = self._given
        self._meta = json.dumps(dict(meta), indent=1, default=str)

    def write(self, record: Record) -> None:
        """Mirror one record."""
        if self._writer is None:
            first = min(map(int, record.steps), default=0) if isinstance(record, Rows) else record.step
            self._writer = self._make(str(self._folder), purge_step=first)
            self._writer.add_text("gyroscope/meta", f"```\n{self._meta}\n```", first)
        super().write(record)

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Write all numbers of a step as one event, which takes a tenth of the time of one event each."""
        files = getattr(self._writer, "file_writer", None)
        if files is None or not isinstance(self._writer, self._make):
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, step)
            return
        value_of = self._summary.Value
        files.add_summary(self._summary(value=[value_of(tag=t, simple_value=v) for t, v in values.items()]), step)

    def event(self, event: Event) -> None:
        """Write the event's text under its kind."""
        self._writer.add_text(f"gyroscope/{event.kind}", event.text, event.step)

    def end(self, run: Any, step: int, picture: Pixels | None) -> None:
        """Write the picture, and close the files if this sink created them."""
        if self._writer is None:
            return
        if picture is not None:
            self._writer.add_image("gyroscope/rotation", picture, step, dataformats="HWC")
        self._writer.flush()
        if self._given is None:
            self._writer.close()
            self._writer = None
