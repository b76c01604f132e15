"""What options of several commands can be."""

from __future__ import annotations

from enum import StrEnum


class Scale(StrEnum):
    """How large."""

    smoke = "smoke"
    small = "small"
    full = "full"


class Engine(StrEnum):
    """Who trains."""

    auto = "auto"
    serial = "serial"
    workers = "workers"
    population = "population"
    ray = "ray"


class Precision(StrEnum):
    """What products are computed in."""

    float32 = "float32"
    tf32 = "tf32"
    bf16 = "bf16"


class Parallel(StrEnum):
    """How processes share a training."""

    ddp = "ddp"
    fsdp = "fsdp"


class Device(StrEnum):
    """What to train on."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
