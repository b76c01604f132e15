"""Datasets, as tensors: read from the published files, divided into splits, and normalized when they are used."""

from gyroscope_lab.data.digits import digits
from gyroscope_lab.data.mnist import mnist
from gyroscope_lab.data.source import Source
from gyroscope_lab.data.split import Split

__all__ = ["Source", "Split", "digits", "mnist"]
