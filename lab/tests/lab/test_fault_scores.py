"""Scores of diagnoses are counted right, kept, and printed by the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyroscope_lab.cli.commands import app
from gyroscope_lab.errors import LabError
from gyroscope_lab.faults.benchmark import Case, Outcome, cases, read, to_json
from gyroscope_lab.faults.score import Rate, markdown, parts, score, showing


def outcome(fault=None, variant=None, *, alarms=(), right=0.9, seed=1, layers=(), since=None, network="mlp-4"):
    told = tuple((kind, tuple(names), at) for kind, names, at in alarms)
    return Outcome(Case(network, seed, fault, variant), right, tuple(layers), since, told, told[:1], ())


def test_scores_are_counted():
    some = [
        outcome(variant="as it is", right=0.95),
        outcome(variant="warm-up", alarms=[("at_chance", (), None)]),
        outcome("absent", right=0.5, layers=["b"], alarms=[("not_in_optimizer", ["b"], None), ("too_slow", (), None)]),
        outcome("frozen", right=0.5, layers=["b"], alarms=[("frozen", ["a", "b"], None)]),
        outcome("bit flip", right=0.1, layers=["b"], since=100, alarms=[("jump", ["b"], 110)]),
        outcome("NaN gradient", right=0.1, layers=["b"], since=100, alarms=[("not_finite", ["c"], 130)]),
        outcome("labels shuffled", right=0.1),
        outcome("normalizer removed", right=0.96),
    ]
    found = score(some, showing(some))
    assert (found.recall, found.latent) == (Rate(4, 5), Rate(0, 1))
    assert found.precision == Rate(4, 6)
    assert found.false_alarms == Rate(1, 2)
    assert (found.layer_first, found.layer_among_three) == (Rate(2, 4), Rate(3, 4))
    assert found.step == Rate(1, 2)


def test_a_fault_shows_if_every_seed_is_worse():
    some = [outcome(variant="as it is", right=r, seed=i) for i, r in enumerate((0.9, 0.92))]
    some += [outcome("frozen", right=r, seed=i) for i, r in enumerate((0.85, 0.89))]
    some += [outcome("absent", right=r, seed=i) for i, r in enumerate((0.5, 0.91))]
    shows = showing(some)
    assert shows(Case("mlp-4", 0, "frozen"))
    assert not shows(Case("mlp-4", 0, "absent"))


def test_intervals_are_exact():
    assert Rate(0, 300).interval == pytest.approx((0.0, 0.01222), abs=1e-4)
    assert Rate(9, 10).interval == pytest.approx((0.5550, 0.9975), abs=1e-4)


def test_verdicts_are_read_as_they_were_written(tmp_path):
    some = [outcome("absent", layers=["b"], alarms=[("not_in_optimizer", ["b"], None)]), outcome(variant="warm-up")]
    (tmp_path / "verdicts.jsonl").write_text(to_json(some))
    assert read(tmp_path / "verdicts.jsonl") == some
    assert "not_in_optimizer" not in markdown(some)
    assert list(parts(some).values())[1] == some
    (tmp_path / "other.jsonl").write_text("{}\n")
    with pytest.raises(LabError, match="is not a file of verdicts"):
        read(tmp_path / "other.jsonl")


def test_the_command_keeps_what_it_knows_and_prints_the_scores(tmp_path):
    file = tmp_path / "verdicts.jsonl"
    known = [outcome(one.fault, one.variant, seed=0) for one in cases(networks=["mlp-4"], seeds=[0])]
    file.write_text(to_json(known))
    shown = CliRunner().invoke(app, ["benchmark", "diagnosis", "--network", "mlp-4", "--seed", "0", "--out", str(file)])
    assert shown.exit_code == 0, shown.output
    assert f"0 cases to train, {len(known)} known" in shown.output
    assert "| absent |" not in shown.output  # the first seed of a seen network is not held out
    assert CliRunner().invoke(app, ["benchmark", "diagnosis", "--network", "vgg"]).exit_code == 2
    assert CliRunner().invoke(app, ["benchmark", "diagnosis", "--subset", "--seed", "1"]).exit_code == 2


def test_the_published_scores_are_those_of_the_published_verdicts():
    folder = Path(__file__).parents[3] / "results" / "diagnosis"
    assert markdown(read(folder / "verdicts.jsonl")) in (folder / "README.md").read_text()
