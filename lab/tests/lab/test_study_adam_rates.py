import json
from dataclasses import replace

import numpy as np
import pytest

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.rotation.adam_rates import EQUIVALENT, POWERS, ROTATION, STUDIES, adam_layca
from gyroscope_lab.papers.rotation.recipes import adaptive_layca
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.tasks import task
from lab.made_lab import MadeLab, knowing, made, printed, raw

[STUDY] = STUDIES
RATES = {adam_layca(power).name: power for power in POWERS}


@pytest.fixture
def full(tmp_path):
    return Lab(Archive(tmp_path), "full")


def test_the_first_rate_is_the_trial_of_figure_6(full):
    [first, *others] = STUDY.trials(full)
    assert first.recipe == adaptive_layca(task("c100-resnet"))
    assert [trial.recipe.rate for trial in others[:3]] == pytest.approx([3**-4.5, 3**-4.3, 3**-4])
    assert {trial.task for trial in (first, *others)} == {task("c100-resnet")}


def test_the_rate_that_theory_gives_rotates_as_far_as_one_without_momentum():
    # A random walk whose steps are averages g₁ + β g₂ + ... of independent ones, scaled to the length 1.
    rng, beta, steps = np.random.default_rng(0), 0.9, 2_000
    velocity, place = np.zeros(1_000), np.zeros(1_000)
    for _ in range(steps):
        velocity = beta * velocity + rng.normal(size=1_000)
        place += velocity / np.linalg.norm(velocity)
    further = np.linalg.norm(place) / np.sqrt(steps)
    assert further == pytest.approx(3**-3 / 3**EQUIVALENT, rel=0.05)


def curve(power, epochs=100):
    """A rotation that passes through the authors' points at 3^-4.3, and is faster or slower at other rates."""
    speed = 3.0 ** (2 * (power + 4.3))
    return np.interp(speed * np.arange(epochs + 1), [0, *ROTATION], [0, *ROTATION.values()]).tolist()


def full_scale(folder, *, tests):
    def make(trial):
        power = RATES.get(trial.recipe.name, -4.3)  # Layca around SGD rotates as theory says
        return made(trial, test=tests.get(power, 0.59), rotation=curve(power))

    return MadeLab(Archive(folder), "full", make=make, many=3)


BY_RATE = {-5.0: 0.49, -4.5: 0.56, -4.3: 0.58, -4.0: 0.57}


def test_results_as_the_caution_expects_them_explain_the_discrepancy(tmp_path):
    report = STUDY.run(full_scale(tmp_path, tests=BY_RATE))
    assert [verdict.holds for verdict in report.verdicts] == [True] * 4
    assert report.verdicts[0].here.startswith("closest is 3^-4.3, 0.000 apart, 3^-5 0.")
    [table] = report.tables
    assert [row[0] for row in table.rows] == ["3^-5", "3^-4.5", "3^-4.3", "3^-4"]
    assert [row[2] for row in table.rows] == pytest.approx([58.16] * 4)
    assert [row[3] for row in table.rows] == pytest.approx([-9.16, -2.16, -0.16, -1.16])


def test_another_accuracy_and_another_best_rate_do_not(tmp_path):
    report = STUDY.run(full_scale(tmp_path, tests=BY_RATE | {-4.3: 0.50, -4.0: 0.60}))
    rotates, reaches, is_best, _ = report.verdicts
    assert (rotates.holds, reaches.holds, is_best.holds) == (True, False, False)
    assert "3^-4 with 60.00 %" in is_best.here


def test_the_rate_of_the_authors_code_is_shown_to_be_theirs_if_it_rotates_as_they_plot(tmp_path):
    def make(trial):
        return made(trial, rotation=curve(RATES.get(trial.recipe.name, -3.0) + 0.7))

    rotates, *_, theory = STUDY.run(MadeLab(Archive(tmp_path), "full", make=make)).verdicts
    assert rotates.here.startswith("closest is 3^-5, 0.000 apart")
    assert (rotates.holds, theory.holds) == (False, False)


def test_the_table_has_the_numbers_of_the_archive(lab):
    report = STUDY.run(lab)
    its = [raw(lab, trial) for trial in STUDY.trials(lab)]
    rows = report.tables[0].rows
    assert [row[1] for row in rows] == [printed(one) for one in its[:2]]
    assert [row[6] for row in rows] == pytest.approx([np.mean(one["rotation"][-1]) for one in its[:2]])
    assert [row[2] for row in rows] == [None, None]
    slow, fast, plain = (np.mean(one["rotation"], axis=1) for one in its)
    assert slow[-1] < plain[-1] / 2 < fast[-1]  # the rate of the authors' code is too low here too
    rising = 1 + np.flatnonzero(plain > 2 / 3 * plain[-1])[0]
    share = np.abs(fast - plain)[:rising].sum() / plain[:rising].sum()
    [theory] = report.verdicts
    assert theory.holds == (share <= 0.2)
    assert f"{100 * share:.0f} % apart" in theory.here


def test_while_rates_are_missing_the_paper_is_undecided(tmp_path):
    whole = full_scale(tmp_path / "made", tests=BY_RATE)
    first = STUDY.trials(whole)[0]
    known = Lab(Archive(tmp_path / "kept"), "full", known=True)
    folder = known.archive.folder(known.trial(first))
    folder.mkdir(parents=True)
    whole.make(first).write(folder / "result.json", known.trial(first).description)
    report = STUDY.run(known)
    assert [verdict.holds for verdict in report.verdicts] == [None] * 3
    assert len(STUDY.not_trained(known)) == 4


def test_what_is_known_is_shown_and_saved(lab, tmp_path):
    known = knowing(lab, tmp_path / "known", STUDY.trials(lab)[:1])
    report = STUDY.run(known)
    assert report.verdicts == ()
    names = {path.name for path in STUDY.save(known, report, tmp_path)}
    assert names == {"README.md", "result.json", "figure.png", "figure.svg"}
    kept = json.loads((tmp_path / STUDY.name / "result.json").read_text())
    assert [cell["recipe"] for cell in kept["numbers"]["cells"]] == ["Adam-Layca 3^-5"]


def test_one_seed_does_not_decide_which_of_two_near_rates_is_best_by_validation(tmp_path):
    """58 and 57 % of 5,000 images differ by 1.0 ± 1.0 points."""
    lab = full_scale(tmp_path, tests=BY_RATE)
    assert [STUDY.run(replace(lab, many=many)).verdicts[2].holds for many in (3, 1)] == [True, None]
