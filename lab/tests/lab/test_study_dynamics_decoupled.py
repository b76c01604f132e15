import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from gyroscope_lab import models
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.cells import cells
from gyroscope_lab.papers.dynamics.decoupled import PLANS, RULES, STUDIES, Setting, _better, again, apart, best, trials
from gyroscope_lab.training.archive import Archive
from lab.made_lab import MadeLab, made, percent, raw

[DECOUPLED] = STUDIES
# torch's own optimizers: L2, the same without, and decay.
OPTIMIZERS = {
    "Adam": (torch.optim.Adam, torch.optim.AdamW, {"lr": 3e-3}),
    "SGD with momentum 0.9": (torch.optim.SGD, None, {"lr": 0.02, "momentum": 0.9}),
}


@pytest.fixture(scope="module")
def report(lab):
    return DECOUPLED.run(lab)


def end(kind, options, weight_decay, steps, decayed=0.0):
    """The weights after steps of one of torch's optimizers, with decay applied by hand."""
    split = Source("digits").load()
    x, y = split.x_train.double(), split.y_train
    model = models.make("mlp-2x32", seed=0, inputs=64, biases=True, init="glorot_uniform").double()
    optimizer = kind(model.parameters(), weight_decay=weight_decay, **options)
    batches = torch.randint(0, len(y), (steps, 50), generator=torch.Generator().manual_seed(0))
    for some in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x[some]), y[some]).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 - options["lr"] * decayed)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_trajectories_are_those_of_torchs_optimizers(lab, rule):
    kind, decoupled, options = OPTIMIZERS[rule]
    found = apart(lab, Setting(rule, Source("digits"), multiples=(1.0, 10.0), steps=8))
    l2, neither = end(kind, options, 0.03, 8), end(kind, options, 0.0, 8)
    for multiple, share in zip(found.multiples, found.shares[:, -1], strict=True):
        λ = 0.03 * multiple
        decay = end(decoupled, options, λ, 8) if decoupled else end(kind, options, 0.0, 8, decayed=λ)
        assert share == pytest.approx(((l2 - decay).norm() / (l2 - neither).norm()).item(), rel=1e-4)


def test_decay_is_l2_for_sgd_and_for_no_other(report):
    same, *others, _ = report.verdicts
    assert same.holds is True
    assert [one.holds for one in others] == [True] * (len(RULES) - 1)
    rows = {row[0]: row[1:] for row in report.tables[0].rows}
    assert float(rows["SGD"][0]) < 1e-12
    # λ goes through momentum, which multiplies it by 1/(1 − β) in the end.
    assert rows["SGD with momentum 0.9"][1] == 10.0


def test_the_closest_decay_is_the_least_of_those_tried(report):
    for name, its in report.numbers["trajectories"].items():
        shown = next(row for row in report.tables[0].rows if row[0] == name)
        assert float(shown[3]) == pytest.approx(min(its["end"]), rel=1e-2)
        assert its["closest"][-1] == min(its["end"])


def test_accuracies_are_those_of_the_archive_and_one_seed_tells_nothing(lab, report):
    rows = report.tables[1].rows
    for row, trial in zip(rows, trials(lab), strict=True):
        assert (row[3], row[5]) == pytest.approx(percent(raw(lab, trial)))
        assert row[2] == (trial.recipe.weight_decay or None)
        assert row[1] == ("neither" if not row[2] else {"adam": "L2", "adamw": "decay"}[trial.recipe.optimizer])
    assert report.verdicts[-1].holds is None
    for row in report.tables[2].rows:
        [trial] = [one for one in trials(lab) if (one.recipe.weight_decay or None, one.recipe.rate) == (row[2], row[0])]
        assert row[3] == pytest.approx(percent(raw(lab, replace(trial, seed=1)))[0])


def pretend(tmp_path, l2, decay):
    """A small scale where one λ of each is best: by a point in the seeds of the choice, by `l2` and `decay` in others.

    In every second seed decay has half a point more, in the others half a point less.
    """

    def make(trial):
        at = trial.recipe.weight_decay in (1e-2, 1.0) and trial.recipe.rate == 1e-3
        if trial.seed < 5:
            return made(trial, test=0.9 if at else 0.8)
        is_decay = trial.recipe.optimizer == "adamw"
        return made(trial, test=(decay + 0.005 * (-1) ** trial.seed) if is_decay else l2)

    return MadeLab(Archive(tmp_path), "small", make=make)


@pytest.mark.parametrize(
    ("l2", "decay", "holds"),
    [(0.9, 0.95, True), (0.95, 0.9, False), (0.9, 0.903, None)],
    ids=["better", "worse", "near"],
)
def test_better_is_what_is_beyond_chance_in_seeds_that_were_not_chosen_by(tmp_path, l2, decay, holds):
    lab = pretend(tmp_path, l2, decay)
    found = cells(lab, trials(lab))
    first, second = (again(lab, best(found, kind)) for kind in ("adam", "adamw"))
    assert (first.recipe.weight_decay, second.recipe.weight_decay) == (1e-2, 1.0)
    verdict = _better(first, second, first)
    assert verdict.holds is holds
    # Ten differences of ± 0.5 points around their mean: a variance of 10 · 0.25/9.
    assert f"{100 * (decay - l2):+.2f} ± {np.sqrt(2.5 / 9 / 10):.2f} points, 10 seeds" in verdict.here


@pytest.mark.parametrize("scale", PLANS)
def test_both_have_the_same_rates_seeds_and_network_and_no_normalization(scale):
    its = DECOUPLED.trials(Lab(Archive("nowhere"), scale))
    plan = PLANS[scale]
    for kind, grid in (("adam", (0.0, *plan.l2)), ("adamw", plan.decay)):
        mine = [trial for trial in its if trial.recipe.optimizer == kind]
        assert {(t.recipe.rate, t.recipe.weight_decay, t.seed) for t in mine} == {
            (rate, λ, seed) for rate in plan.rates for λ in grid for seed in range(plan.seeds)
        }
        assert {trial.task.model for trial in mine} == {plan.model}
        assert all("batch_norm" not in dict(trial.task.options) for trial in mine)
    assert max(plan.rates) * max(plan.decay) < 1


def test_trajectories_that_are_not_known_are_not_made_up(tmp_path, lab):
    with pytest.raises(LabError, match="--known"):
        apart(Lab(Archive(tmp_path), "smoke", known=True), Setting("SGD", Source("digits")))


def test_saving_writes_figure_page_and_numbers(lab, report, tmp_path):
    names = {path.name for path in DECOUPLED.save(lab, report, tmp_path)}
    assert names == {"figure.png", "figure.svg", "README.md", "result.json"}
    kept = json.loads((tmp_path / "dynamics" / "adamw-vs-l2" / "result.json").read_text())
    assert len(kept["numbers"]["accuracies"]) == len(trials(lab))
