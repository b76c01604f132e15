"""Findings about a run, in words and with their evidence: explanations, dominated layers, stalled networks."""

from typing import TYPE_CHECKING

from gyroscope.base.lazy import lazy

if TYPE_CHECKING:
    from gyroscope.diagnose.domination import Domination, dominated
    from gyroscope.diagnose.explain import Explanation, explain
    from gyroscope.diagnose.stall import LAST_LAYER_FILE, MARGIN, Stall, read_last_layer, stall, stalled

__all__ = [
    "LAST_LAYER_FILE",
    "MARGIN",
    "Domination",
    "Explanation",
    "Stall",
    "dominated",
    "explain",
    "read_last_layer",
    "stall",
    "stalled",
]

if not TYPE_CHECKING:  # to a type checker, what is not listed above is a mistake
    __getattr__ = lazy(
        __name__,
        {
            "domination": "Domination dominated",
            "explain": "Explanation explain",
            "stall": "LAST_LAYER_FILE MARGIN Stall read_last_layer stall stalled",
        },
    )
