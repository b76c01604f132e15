"""Running a user's model without leaving a trace: batches, losses, labels, activations, patches of convolutions."""

from typing import TYPE_CHECKING

from gyroscope.base.lazy import lazy

if TYPE_CHECKING:
    from gyroscope.passes.batches import Batch
    from gyroscope.passes.network import borrowed, first_output, network

__all__ = [
    "Batch",
    "borrowed",
    "first_output",
    "network",
]

if not TYPE_CHECKING:  # to a type checker, what is not listed above is a mistake
    __getattr__ = lazy(
        __name__,
        {
            "batches": "Batch",
            "network": "borrowed first_output network",
        },
    )
