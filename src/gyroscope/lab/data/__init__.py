"""Datasets, as tensors: read from the files they are published as, divided, and normalized as they are used."""

from gyroscope.lab.data.digits import digits
from gyroscope.lab.data.mnist import mnist
from gyroscope.lab.data.source import Source
from gyroscope.lab.data.split import Split

__all__ = ["Source", "Split", "digits", "mnist"]
