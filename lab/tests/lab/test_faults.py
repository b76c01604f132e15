"""The benchmark of diagnoses: networks learn, injections do what they say, and faults are found."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import gyroscope
from gyroscope.diagnosis import KINDS
from gyroscope_lab.faults.benchmark import Case, evaluate, to_json
from gyroscope_lab.faults.healthy import HEALTHY
from gyroscope_lab.faults.injections import FAULTS, Scene, accuracy, scene, train
from gyroscope_lab.faults.networks import NETWORKS

SHORT = 40


def short(name: str, seed: int = 0) -> Scene:
    return scene(replace(NETWORKS[name], steps=SHORT), seed)


def built(it: Scene) -> Scene:
    it.begin()
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
