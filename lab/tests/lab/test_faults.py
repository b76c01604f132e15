"""The benchmark of diagnoses: its injections do what they say, and its scores are counted right."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gyroscope
from gyroscope.diagnosis import KINDS
from gyroscope_lab.cli.commands import app
from gyroscope_lab.errors import LabError
from gyroscope_lab.faults.benchmark import Case, Outcome, cases, evaluate, to_json
from gyroscope_lab.faults.healthy import HEALTHY
from gyroscope_lab.faults.injections import FAULTS, Scene, accuracy, scene, train
from gyroscope_lab.faults.networks import NETWORKS
from gyroscope_lab.faults.score import Rate, markdown, parts, read, score, showing

SHORT = 40


def short(name: str, seed: int = 0) -> Scene:
    return scene(replace(NETWORKS[name], steps=SHORT), seed)


def built(it: Scene) -> Scene:
    made = it.build(it.model)
    it.optimizers = made if isinstance(made, list) else [made]
    for act in it.after_build:
        act()
    return it


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_learns(name):
    it = built(short(name))
    losses: list[float] = []
    train(it, each=lambda step, value: losses.append(float(value)))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert 0 <= accuracy(it) <= 1


@pytest.mark.parametrize("name", ["mlp-4", "cnn", "transformer"])
def test_a_network_is_the_same_for_the_same_seed_and_another_for_another(name):
    one, same, other = (NETWORKS[name].make(seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not all(torch.equal(one[key], other[key]) for key in one)
    first, again = (next(NETWORKS[name].batches(3)) for _ in range(2))
    assert torch.equal(first[0], again[0])


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_fits_a_network_and_names_its_layers(fault):
    kinds = FAULTS[fault].accepted
    assert kinds <= set(KINDS)
    found = 0
    for name in ("mlp-4", "cnn", "resnet-20", "transformer"):
        it = short(name)
        injected = FAULTS[fault].inject(it)
        if injected is not None:
            found += 1
            built(it)
            assert set(injected.layers) <= {layer.name for layer in gyroscope.layers(it.model)}
            assert injected.since is None or 0 <= injected.since < SHORT
    assert found


@pytest.mark.parametrize("variant", HEALTHY)
def test_every_healthy_variant_fits_a_network_and_takes_steps(variant):
    fits = [name for name in ("mlp-4", "transformer", "cnn") if HEALTHY[variant].prepare(short(name))]
    assert fits
    it = short(fits[0])
    it.network = replace(it.network, steps=3)
    HEALTHY[variant].prepare(it)
    train(built(it))


def test_injections_change_what_they_say():
    it = short("mlp-4")
    (layer,) = FAULTS["weights x 100"].inject(it).layers
    assert it.layer(layer).norm() > 50 * short("mlp-4").layer(layer).norm()
    it = short("mlp-4")
    FAULTS["replaced"].inject(it)
    before = dict(it.model.named_parameters())
    built(it)
    assert not {id(p) for p in before.values()} & {id(p) for p in it.model.parameters()}
    it = short("cnn")
    FAULTS["normalizer removed"].inject(it)
    assert sum(isinstance(m, nn.BatchNorm2d) for m in it.model) == 3


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (Case("mlp-4", 0, fault="absent"), "not_in_optimizer"),
        (Case("mlp-4", 0, fault="no zero_grad"), "gradients_accumulate"),
        (Case("mlp-4", 0, fault="weights x 100"), "large_weights"),
        (Case("mlp-4", 0, fault="one batch repeated"), "repeated_batch"),
        (Case("mlp-4", 0, fault="replaced"), "replaced"),
        (Case("mlp-4", 0, variant="as it is"), None),
        (Case("mlp-4", 0, variant="frozen backbone"), None),
        (Case("mlp-4", 0, variant="an idle expert"), None),
    ],
    ids=str,
)
def test_cases_of_the_benchmark_are_diagnosed(case, kind):
    found = evaluate(case)
    assert [one[0] for one in found.alarms[:1]] == ([] if kind is None else [kind])
    if kind not in (None, "replaced"):
        assert not found.layers or found.alarms[0][1][0] in found.layers
    assert json.loads(to_json([found]))["case"]["network"] == "mlp-4"


def test_a_fault_without_a_place_gives_nothing():
    assert evaluate(Case("mlp-4", 0, fault="branch x 10")) is None


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
