"""All studies, by name."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from gyroscope.lab.errors import LabError
from gyroscope.lab.studies.study import Study

# One module an idea; what two figures show with the same trials is in one module.
_MODULES = (
    "alpha_and_rate",
    "sgd_rates",
    "weight_decay",
    "warmup",
    "second_moments",
    "adaptive",
    "features",
    "plateaus",
    "lars",
    "multipliers",
    "rule",
    "one_layer",
    "tuned_rates",
    "rescaled",
    "conditioning_figures",
    "trained_perceptrons",
    "weight_domination",
    "gradient_explosion",
    "trained_convolutions",
    "very_deep",
    "depth_table",
    "imagenet_lastbn",
    "dynamics_ics",
    "dynamics_knockout",
    "dynamics_mechanism1",
    "dynamics_mechanism2",
    "dynamics_mechanism3",
    "dynamics_least_squares",
    "dynamics_schedules",
    "dynamics_implicit_decay",
    "dynamics_exponential",
    "dynamics_decoupled",
    "dynamics_grafting",
    "dynamics_batch_size",
)


@cache
def studies() -> dict[str, Study]:
    """All studies, by name: paper by paper, in the order of their figures and tables.

    >>> "rotation/fig1" in studies()
    True
    """
    found: list[Study] = []
    for module in _MODULES:
        found += import_module(f"gyroscope.lab.studies.{module}").STUDIES
    return {study.name: study for study in sorted(found, key=_place)}


def study(name: str) -> Study:
    """Return the study called `name`.

    >>> study("rotation/fig1").title[:8]
    'Figure 1'
    """
    known = studies()
    if name not in known:
        raise LabError(f"no study is called {name!r}; there are: {', '.join(known)}")
    return known[name]


def _place(study: Study) -> tuple[str, int, int, str]:
    paper, _, figure = study.name.partition("/")
    kind = ("fig", "a", "table").index(next((k for k in ("fig", "table", "a") if figure.startswith(k)), "table"))
    digits = "".join(filter(str.isdigit, figure))
    return (paper, kind, int(digits) if digits else 99, figure)
