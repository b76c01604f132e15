"""All studies, by name.

`index.json` holds the module, the title and the cost of each, so that one study is loaded without the others, and all
are listed without loading any. `python -m gyroscope_lab.papers.catalogue` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gyroscope.errors import GyroscopeError
from gyroscope_lab.errors import LabError

if TYPE_CHECKING:
    from gyroscope_lab.engine.laboratory import Lab
    from gyroscope_lab.papers.study import Study
    from gyroscope_lab.training.trial import Trial

INDEX = Path(__file__).with_name("index.json")

# One module per idea; figures that share their trials share a module.
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
    "conditioning.exact",
    "conditioning.proximal",
    "conditioning.alternatives",
    "conditioning.trained_perceptrons",
    "conditioning.weight_domination",
    "conditioning.gradient_explosion",
    "conditioning.trained_convolutions",
    "conditioning.very_deep",
    "conditioning.depth_table",
    "conditioning.crops",
    "conditioning.imagenet_lastbn",
    "dynamics.adagrad",
    "dynamics.fisher_in_training",
    "dynamics.ics",
    "dynamics.knockout",
    "dynamics.layer_norm",
    "dynamics.placement",
    "dynamics.ghost_batches",
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
    "beyond.diagnosis",
    "beyond.no_tuning",
    "beyond.transfer",
    "beyond.warmup",
    "beyond.projection",
)


@cache
def studies() -> dict[str, Study]:
    """Return all studies by name: paper by paper, in the order of their figures and tables.

    >>> "rotation/fig1" in studies()
    True
    """
    found: list[Study] = []
    for module in _MODULES:
        found += import_module(f"gyroscope_lab.papers.{module}").STUDIES
    return {study.name: study for study in sorted(found, key=_place)}


class Listed(NamedTuple):
    """The entry of a study in the index: its module, its title, and by scale its trainings and how long they take."""

    module: str
    title: str
    costs: dict[str, str]


@cache
def index() -> dict[str, Listed]:
    """Return the entries of all studies by name, in the order of `studies`.

    The entry "all" is the sum over all studies; its title names the tasks whose times are estimates.

    >>> index()["rotation/fig1"].title[:8]
    'Figure 1'
    """
    return {name: Listed(*values) for name, values in json.loads(INDEX.read_text()).items()}


def study(name: str) -> Study:
    """Return the study called `name`, for which its module alone is loaded.

    >>> study("rotation/fig1").title[:8]
    'Figure 1'
    """
    known = index()
    if name not in known or name == "all":
        accepted = ", ".join(one for one in known if one != "all")
        raise LabError(f"`name` must be the name of a study, got {name!r}. The studies are: {accepted}.")
    found: list[Study] = import_module(f"gyroscope_lab.papers.{known[name].module}").STUDIES
    return next(one for one in found if one.name == name)


def _place(study: Study) -> tuple[str, int, int, str]:
    paper, _, figure = study.name.partition("/")
    kind = ("fig", "a", "table").index(next((k for k in ("fig", "table", "a") if figure.startswith(k)), "table"))
    digits = "".join(filter(str.isdigit, figure))
    return (paper, kind, int(digits) if digits else 99, figure)


def made_index() -> dict[str, Listed]:
    """Return the index, computed from the studies themselves."""
    from gyroscope_lab.engine.cost import PACES
    from gyroscope_lab.engine.laboratory import Lab
    from gyroscope_lab.training.archive import Archive

    where = {one.name: module for module in _MODULES for one in import_module(f"gyroscope_lab.papers.{module}").STUDIES}
    each, all_of_them = costs(list(studies().values()), Lab(Archive("runs")))
    found = {one.name: Listed(where[one.name], one.title, each[one.name]) for one in studies().values()}
    guessed = ", ".join(name for name, pace in PACES.items() if not pace.measured)
    return found | {"all": Listed("", guessed, all_of_them)}


def costs(studies: Sequence[Study], lab: Lab) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return the cost of each study by scale, in words, and of all of them together; – where no task is left."""
    from gyroscope_lab.engine.laboratory import SCALES

    labs: dict[str, Lab] = {scale: replace(lab, scale=scale, known=False) for scale in SCALES}
    needed = {study.name: {scale: _needs(study, one) for scale, one in labs.items()} for study in studies}
    each = {
        name: {scale: "–" if one is None else _cost([one]) for scale, one in needs.items()}
        for name, needs in needed.items()
    }
    sums = {scale: _cost([one for needs in needed.values() if (one := needs[scale]) is not None]) for scale in labs}
    return each, sums


def _needs(study: Study, lab: Lab) -> tuple[Sequence[Trial], float] | None:
    """The trainings of a study and its other seconds; None if it has none of the requested tasks."""
    try:
        return study.trials(lab), study.beside.get(lab.scale, 0.0)
    except GyroscopeError:
        return None


def _cost(needs: Sequence[tuple[Sequence[Trial], float]]) -> str:
    from gyroscope_lab.engine.cost import cost

    beside = sum(seconds for _, seconds in needs)
    whole = cost([trial for trials, _ in needs for trial in trials], beside=beside)
    return f"{whole.trials or 'none'}: {whole.words}" if whole.trials or beside else "none"


if __name__ == "__main__":
    INDEX.write_text(json.dumps(made_index(), indent=1, ensure_ascii=False) + "\n")
