"""The study of the diagnosis: its scores are those of the verdicts in the archive."""

from __future__ import annotations

import pytest

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.faults.benchmark import Case, Outcome, to_json
from gyroscope_lab.papers.catalogue import study
from gyroscope_lab.training.archive import Archive

STUDY = "beyond/diagnosis"


def outcome(case: Case, *alarms, accuracy: float = 0.9, layers=("a",)) -> Outcome:
    return Outcome(case, accuracy, layers, None, alarms, (), ())


def made(right: int, wrong: int, healthy: int = 50) -> list[Outcome]:
    """Runs with an absent layer that are found or not, and healthy ones, all of held-out seeds."""
    found = [outcome(Case("mlp-4", 1 + i, variant="as it is"), layers=()) for i in range(healthy)]
    found += [
        outcome(Case("mlp-4", 1 + i, fault="absent"), ("not_in_optimizer", ("a",), None), accuracy=0.1)
        for i in range(right)
    ]
    return found + [outcome(Case("mlp-4", 100 + i, fault="absent"), accuracy=0.1) for i in range(wrong)]


@pytest.mark.parametrize(("wrong", "shown"), [(0, True), (1, True), (5, False)])
def test_verdicts_turn_with_the_numbers(tmp_path, wrong, shown):
    known = Lab(Archive(tmp_path), "small", known=True)
    (known.archive.root / "diagnosis-small.jsonl").write_text(to_json(made(20 - wrong, wrong)))
    report = study(STUDY).run(known)
    said = {one.says: one.holds for one in report.verdicts}
    assert said["faults that cost accuracy are found"] is shown
    assert said["healthy trainings raise no alarm"] is True
    assert said["the step of a dated fault is at most 20 off"] is None  # there is none
    assert report.tables[0].rows[0][1].startswith(f"{(20 - wrong) / 20:.2f} ({20 - wrong} of 20;")
    assert report.tables[0].rows[0][2].startswith("0.00 (0 of 20;")
    assert report.numbers == {"cases": 70, "held_out": 70}


def test_without_verdicts_nothing_is_concluded(tmp_path):
    with pytest.raises(LabError, match="Train the cases first"):
        study(STUDY).run(Lab(Archive(tmp_path), "smoke", known=True))


@pytest.mark.usefixtures("forked_workers")
def test_the_smoke_scale_trains_five_cases_and_keeps_their_verdicts(lab, tmp_path):
    report = study(STUDY).run(lab)
    assert report.numbers == {"cases": 5, "held_out": 5}
    assert {one.word for one in report.verdicts} == {"undecided"}
    kept = lab.archive.root / "diagnosis-smoke.jsonl"
    before = kept.read_text()
    assert len(before.splitlines()) == 5
    assert study(STUDY).run(lab).numbers == report.numbers
    assert kept.read_text() == before
    assert (tmp_path / STUDY / "figure.png") in study(STUDY).save(lab, report, tmp_path)
