"""Datasets, as tensors that fit in memory."""

from gyroscope.lab.data.digits import digits
from gyroscope.lab.data.mnist import mnist
from gyroscope.lab.data.split import Split

__all__ = ["Split", "digits", "mnist"]
