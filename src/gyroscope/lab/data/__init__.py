"""Datasets, as tensors that fit in memory."""

from gyroscope.lab.data.digits import digits
from gyroscope.lab.data.mnist import mnist
from gyroscope.lab.data.source import Source
from gyroscope.lab.data.split import Split

__all__ = ["Source", "Split", "digits", "mnist"]
