"""The gradient of the outputs shows which loss it is; the outputs say how much they know about the input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import gyroscope
from gyroscope.passes.outputs import OUTPUTS, OutputProbe

CLASSES, ROWS = 5, 64


def network(seed=0, scale=3.0):
    torch.manual_seed(seed)
    net = nn.Linear(8, CLASSES)
    with torch.no_grad():
        net.weight.mul_(scale)  # away from equal probabilities, as after some training
    return net


def found(net, loss, x=None, **options):
    """What the probe found in one step."""
    probe = OutputProbe(net)
    probe.attach()
    torch.manual_seed(1)
    x = torch.randn(ROWS, 8) if x is None else x
    loss(net(x), **options).backward()
    probe.detach()
    values = probe.take()
    assert probe.error is None
    return None if values is None else dict(zip(OUTPUTS, values.tolist(), strict=True))


def labels(shape=(ROWS,)):
    return torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(2))


def likelihood(z):
    return F.nll_loss(F.log_softmax(z, 1), labels())


ONCE = {
    "cross-entropy": lambda z: F.cross_entropy(z, labels()),
    "its sum, scaled": lambda z: 65536 * F.cross_entropy(z, labels(), reduction="sum"),
    "with labels to ignore": lambda z: F.cross_entropy(z, torch.where(labels() == 0, -100, labels())),
    "log-softmax outside of the model": likelihood,
}
TWICE = {
    "softmax in the loss": lambda z: F.cross_entropy(z.softmax(1), labels()),
    "its sum, scaled": lambda z: 65536 * F.cross_entropy(z.softmax(1), labels(), reduction="sum"),
    "with labels to ignore": lambda z: F.cross_entropy(z.softmax(1), torch.where(labels() == 0, -100, labels())),
}
OTHERS = {
    "squares": lambda z: F.mse_loss(z, F.one_hot(labels(), CLASSES).float()),
    "label smoothing": lambda z: F.cross_entropy(z, labels(), label_smoothing=0.1),
    "class weights": lambda z: F.cross_entropy(z, labels(), weight=torch.arange(1.0, 6.0)),
    "binary": lambda z: F.binary_cross_entropy_with_logits(z, F.one_hot(labels(), CLASSES).float()),
    "focal": lambda z: ((1 - z.softmax(1)).square() * -z.log_softmax(1)).gather(1, labels()[:, None]).mean(),
    "probabilities and their logarithm": lambda z: F.nll_loss(torch.log(z.softmax(1).square() + 1e-6), labels()),
    "distillation": lambda z: F.kl_div(z.log_softmax(1), torch.randn(ROWS, CLASSES).softmax(1), reduction="batchmean"),
    "hinge": lambda z: F.multi_margin_loss(z, labels()),
}


@pytest.mark.parametrize("scale", [0.01, 3.0], ids=["at the start", "later"])
@pytest.mark.parametrize("loss", ONCE.values(), ids=ONCE)
def test_a_loss_of_logits_applies_the_softmax_once(loss, scale):
    assert found(network(scale=scale), loss)["softmax_twice"] == 0.0


@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0], ids=["at the start", "later", "saturated"])
@pytest.mark.parametrize("loss", TWICE.values(), ids=TWICE)
def test_a_softmax_before_the_loss_is_seen_in_the_gradient(loss, scale):
    assert found(network(scale=scale), loss)["softmax_twice"] == 1.0


@pytest.mark.parametrize("scale", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("loss", OTHERS.values(), ids=OTHERS)
def test_other_losses_are_never_taken_for_it(loss, scale):
    assert found(network(scale=scale), loss)["softmax_twice"] != 1.0


def test_a_model_that_ends_with_a_softmax_and_one_that_ends_with_its_logarithm():
    assert found(nn.Sequential(network(), nn.Softmax(1)), ONCE["cross-entropy"])["softmax_twice"] == 1.0
    both = nn.Sequential(network(), nn.LogSoftmax(1))
    assert found(both, lambda z: F.nll_loss(z, labels()))["softmax_twice"] == 0.0


@pytest.mark.parametrize("twice", [False, True])
def test_two_classes(twice):
    torch.manual_seed(0)
    net = nn.Linear(8, 2)
    y = labels() % 2
    assert found(net, lambda z: F.cross_entropy(z.softmax(1) if twice else z, y))["softmax_twice"] == twice


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(twice, dtype):
    net = network().to(dtype)
    x = torch.randn(ROWS, 8, dtype=dtype)
    seen = found(net, lambda z: F.cross_entropy(z.softmax(1) if twice else z, labels()), x)
    assert seen["softmax_twice"] == twice


@pytest.mark.parametrize("twice", [False, True])
def test_classes_along_the_second_axis_and_tokens_of_sequences(twice):
    torch.manual_seed(0)
    pictures = nn.Conv2d(3, CLASSES, 1)
    with torch.no_grad():
        pictures.weight.mul_(3)
    y = labels((4, 6, 6))
    x = torch.randn(4, 3, 6, 6)
    seen = found(pictures, lambda z: F.cross_entropy(z.softmax(1) if twice else z, y), x)
    assert seen["softmax_twice"] == twice
    tokens, y = torch.randn(4, 10, 8), labels((4, 10))
    seen = found(
        network(), lambda z: F.cross_entropy((z.softmax(-1) if twice else z).flatten(0, 1), y.flatten()), tokens
    )
    assert seen["softmax_twice"] == twice


def test_outputs_in_a_dictionary_and_losses_inside_the_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = network()

        def forward(self, x):
            logits = self.head(x)
            return {"loss": F.cross_entropy(logits, labels()), "logits": logits}

    assert found(Model(), lambda output: output["loss"])["softmax_twice"] == 0.0


def test_information_is_the_entropy_of_the_mean_minus_the_mean_entropy():
    net, x = network(), torch.randn(ROWS, 8)
    p = net(x).double().softmax(1).tolist()

    def entropy(q):
        return -sum(one * math.log(one) for one in q)

    mean = [sum(row[c] for row in p) / ROWS for c in range(CLASSES)]
    expected = entropy(mean) - sum(map(entropy, p)) / ROWS
    assert found(net, ONCE["cross-entropy"], x)["output_information"] == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        net.weight.zero_()
    assert found(net, ONCE["cross-entropy"], x)["output_information"] == pytest.approx(0.0, abs=1e-12)
    assert math.isnan(found(network(), OTHERS["squares"], x)["output_information"])


def test_of_many_classes_few_rows_are_looked_at():
    torch.manual_seed(0)
    net = nn.Linear(8, 70_000)
    y = torch.randint(70_000, (40,))
    assert found(net, lambda z: F.cross_entropy(z, y), torch.randn(40, 8))["softmax_twice"] == 0.0


def test_without_a_gradient_nothing_is_found():
    net = network()
    probe = OutputProbe(net)
    probe.attach()
    with torch.no_grad():
        net(torch.randn(4, 8))
    net(torch.randn(4, 8))
    probe.detach()
    assert probe.take() is None
    assert not net._forward_hooks


@pytest.mark.parametrize("twice", [False, True])
def test_watch_records_it_and_the_diagnosis_says_so_without_the_loss(tmp_path, twice):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gyroscope.watch(net, optimizer, tmp_path / "run", budget=None):
        for _ in range(30):
            x = torch.randn(ROWS, 8)
            z = net(x)
            optimizer.zero_grad()
            F.cross_entropy(z.softmax(1) if twice else z, x[:, :CLASSES].argmax(1)).backward()
            optimizer.step()
    alarms = [(one.kind, one.layers) for one in gyroscope.diagnose(tmp_path / "run").alarms]
    assert alarms == ([("double_softmax", ("2.weight",))] if twice else [])
