"""Measuring: `watch` attaches a monitor to a training loop; quantities are functions of inner products."""

from gyroscope.monitor.clock import Cost
from gyroscope.monitor.monitor import Monitor
from gyroscope.monitor.products import Products
from gyroscope.monitor.quantities import forget, known, quantity
from gyroscope.monitor.watch import watch

__all__ = ["Cost", "Monitor", "Products", "forget", "known", "quantity", "watch"]
