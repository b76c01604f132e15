"""Engines that run trials: serial, in processes, together on a GPU, on a cluster, for a number of minutes."""

from typing import TYPE_CHECKING

from gyroscope.base import lazy

if TYPE_CHECKING:
    from gyroscope_lab.engine.box import collect, run_box
    from gyroscope_lab.engine.engine import run_trials
    from gyroscope_lab.engine.laboratory import Lab
    from gyroscope_lab.engine.population import run_population

__all__ = ["Lab", "collect", "run_box", "run_population", "run_trials"]

if not TYPE_CHECKING:  # type checkers reject names that are not listed above
    __getattr__ = lazy(
        __name__,
        {
            "box": "collect run_box",
            "engine": "run_trials",
            "laboratory": "Lab",
            "population": "run_population",
        },
    )
