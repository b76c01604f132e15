"""All studies, by name."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from gyroscope_lab.errors import LabError
from gyroscope_lab.studies.study import Study

# One module an idea; what two figures show with the same trials is in one module.
_MODULES = (
    "rotation.alpha_and_rate",
    "rotation.sgd_rates",
    "rotation.weight_decay",
    "rotation.warmup",
    "rotation.second_moments",
    "rotation.adaptive",
    "rotation.adam_rates",
    "rotation.features",
    "rotation.plateaus",
    "rotation.lars",
    "rotation.multipliers",
    "rotation.rule",
    "rotation.one_layer",
    "rotation.tuned_rates",
    "rotation.rescaled",
    "conditioning.exact_studies",
    "conditioning.trained_perceptrons",
    "conditioning.weight_domination",
    "conditioning.gradient_explosion",
    "conditioning.trained_convolutions",
    "conditioning.very_deep",
    "conditioning.depth_table",
    "conditioning.imagenet_lastbn",
    "dynamics.ics",
    "dynamics.knockout",
    "dynamics.mechanism1",
    "dynamics.mechanism2",
    "dynamics.mechanism3",
    "dynamics.least_squares",
    "dynamics.schedules",
    "dynamics.implicit_decay",
    "dynamics.exponential",
    "dynamics.decoupled",
    "dynamics.grafting",
    "dynamics.batch_size",
)


@cache
def studies() -> dict[str, Study]:
    """All studies, by name: paper by paper, in the order of their figures and tables.

    >>> "rotation/fig1" in studies()
    True
    """
    found: list[Study] = []
    for module in _MODULES:
        found += import_module(f"gyroscope_lab.studies.{module}").STUDIES
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
