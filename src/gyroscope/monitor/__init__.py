"""Measuring: `watch` attaches a monitor to a training loop; quantities are functions of inner products."""

from typing import TYPE_CHECKING

from gyroscope.base.lazy import lazy

if TYPE_CHECKING:
    from gyroscope.monitor.clock import Cost
    from gyroscope.monitor.monitor import Monitor
    from gyroscope.monitor.quantities import Products, forget, known, quantity
    from gyroscope.monitor.watch import watch

__all__ = [
    "Cost",
    "Monitor",
    "Products",
    "forget",
    "known",
    "quantity",
    "watch",
]

if not TYPE_CHECKING:  # to a type checker, what is not listed above is a mistake
    __getattr__ = lazy(
        __name__,
        {
            "clock": "Cost",
            "monitor": "Monitor",
            "quantities": "Products forget known quantity",
            "watch": "watch",
        },
    )
