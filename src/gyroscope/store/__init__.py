"""Runs on disk: written safely during training, read at any time, exported.

Write one with `Writer`, open one with `load`, list those of a folder with `runs`.
"""

from gyroscope.store import lock, schema
from gyroscope.store.connect import connect
from gyroscope.store.find import load, runs
from gyroscope.store.reader import Run, Scalar
from gyroscope.store.record import Deferred, Event, LayerInfo, QuantityInfo, Rows, Scalars, Sink
from gyroscope.store.writer import Writer

__all__ = [
    "Deferred",
    "Event",
    "LayerInfo",
    "QuantityInfo",
    "Rows",
    "Run",
    "Scalar",
    "Scalars",
    "Sink",
    "Writer",
    "connect",
    "load",
    "lock",
    "runs",
    "schema",
]
