"""Steering: optimizers whose rates have a meaning that does not depend on the network."""

from gyroscope.control.family import block_normalized, hyperball, lars, relative_update
from gyroscope.control.graft import Graft
from gyroscope.control.layca import Layca
from gyroscope.control.sgd_amom import SGD_AMom

__all__ = ["Graft", "Layca", "SGD_AMom", "block_normalized", "hyperball", "lars", "relative_update"]
