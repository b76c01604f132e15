"""Measuring: `watch` attaches a monitor to a training loop; quantities are functions of inner products."""

from gyroscope.monitor.clock import Cost
from gyroscope.monitor.domination import Domination, dominated
from gyroscope.monitor.monitor import Monitor
from gyroscope.monitor.products import Products
from gyroscope.monitor.quantities import forget, known, quantity
from gyroscope.monitor.stall import Stall
from gyroscope.monitor.stall_of_run import stalled
from gyroscope.monitor.watch import watch

__all__ = [
    "Cost",
    "Domination",
    "Monitor",
    "Products",
    "Stall",
    "dominated",
    "forget",
    "known",
    "quantity",
    "stalled",
    "watch",
]
