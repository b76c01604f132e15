"""What a run did, in words with the evidence behind them: explanations, dominated layers, stalled networks."""

from typing import TYPE_CHECKING

from gyroscope.base.lazy import lazy

if TYPE_CHECKING:
    from gyroscope.diagnose import stall_of_run
    from gyroscope.diagnose.domination import Domination, dominated
    from gyroscope.diagnose.explain import explain
    from gyroscope.diagnose.explain_result import Explanation
    from gyroscope.diagnose.stall import MARGIN, Stall, stall
    from gyroscope.diagnose.stall_of_run import stalled

__all__ = ["MARGIN", "Domination", "Explanation", "Stall", "dominated", "explain", "stall", "stall_of_run", "stalled"]

if not TYPE_CHECKING:  # to a type checker, what is not listed above is a mistake
    __getattr__ = lazy(
        __name__,
        {
            "domination": "Domination dominated",
            "explain": "explain",
            "explain_result": "Explanation",
            "stall": "MARGIN Stall stall",
            "stall_of_run": "stalled",
        },
    )
