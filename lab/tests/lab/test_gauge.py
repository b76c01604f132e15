"""The readings of a training at the end of an epoch; test_rotation covers the rotation."""

import pytest
import torch
from torch import nn

from gyroscope_lab.data.split import Split
from gyroscope_lab.training import gauge as module
from gyroscope_lab.training.gauge import Gauge, Reading, correct

# Guesses that are right for 0, 1, 2, 4, 5, 6, 8, 9, 10, of twelve.
X = torch.eye(12)
Y = torch.arange(12)
WRONG = torch.tensor([3, 7, 11])


class Guesser(nn.Module):
    """Predicts n for x_n = e_n, except for three of them."""

    def __init__(self):
        super().__init__()
        self.sizes = []
        self.dropout = nn.Dropout(1.0)

    def forward(self, x):
        self.sizes.append(len(x))
        guesses = x.clone()
        guesses[:, WRONG] = 0
        return self.dropout(guesses)


def split():
    return Split(X, Y, X, Y)


@pytest.mark.parametrize("at_once", [1, 5, 12, 100])
def test_examples_are_counted_right_however_many_are_looked_at_at_once(monkeypatch, at_once):
    monkeypatch.setitem(module._AT_ONCE, "cpu", at_once)
    model = Guesser().eval()
    assert correct(model, split(), X, Y).item() == 9
    assert sum(model.sizes) == 12
    assert max(model.sizes) == min(at_once, 12)


def test_counting_leaves_no_gradients_to_follow():
    layer = nn.Linear(12, 12)
    assert not correct(layer, split(), X, Y).requires_grad


def test_of_a_text_every_character_counts():
    text = torch.randint(0, 5, (4, 6), generator=torch.Generator().manual_seed(0))
    labels = text.clone()
    labels[0, 0] = (labels[0, 0] + 1) % 5
    guess = nn.Embedding.from_pretrained(torch.eye(5))
    assert correct(guess, Split(text, labels, text, labels), text, labels).item() == 23


def test_what_is_evaluated_is_normalized_first():
    x = torch.tensor([[0], [100], [200]], dtype=torch.uint8)
    y = torch.tensor([0, 1, 1])
    data = Split(x, y, x, y, mean=torch.tensor(50.0), std=torch.tensor(10.0))
    seen = []

    def forward(inputs):
        seen.append(inputs)
        return torch.cat([-inputs, inputs], dim=1)

    assert correct(forward, data, x, y).item() == 3
    assert seen[0].flatten().tolist() == [-5.0, 5.0, 15.0]


def test_of_no_examples_none_are_right():
    assert correct(Guesser().eval(), split(), X[:0], Y[:0]).item() == 0


def test_a_gauge_reads_every_layer_in_forward_order():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1, bias=False))
    model[0].weight.data.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    model[2].weight.data.copy_(torch.tensor([[1.0, 0.0]]))
    gauge = Gauge(model)
    assert gauge.names == ["0.weight", "2.weight"]
    assert gauge.read().tolist() == [[0.0, 5.0], [0.0, 1.0]]
    model[2].weight.data.copy_(torch.tensor([[0.0, -2.0]]))
    assert gauge.read().tolist() == [[0.0, 5.0], [1.0, 2.0]]


def test_a_layer_that_only_grows_does_not_turn():
    layer = nn.Linear(50, 40)
    gauge = Gauge(layer)
    for factor in (0.5, 2.0, 4.0):
        layer.weight.data.mul_(factor)
        assert gauge.read()[0, 0].item() == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-6, 1e-3, 1.0, 1e6, 1e30])
def test_the_angle_does_not_depend_on_lengths(scale):
    layer = nn.Linear(50, 40, bias=False)
    now = layer.weight.detach().clone()
    start = scale * (now + 0.5 * torch.randn(40, 50, generator=torch.Generator().manual_seed(0)))
    layer.weight.data.copy_(start)
    gauge = Gauge(layer)
    layer.weight.data.copy_(now)
    a, b = (w.double().flatten() / w.double().norm() for w in (now, start))
    assert gauge.read()[0, 0].item() == pytest.approx(float((a - b).square().sum() / 2), rel=1e-10)


def test_what_is_no_number_reads_as_none():
    layer = nn.Linear(2, 2)
    gauge = Gauge(layer)
    layer.weight.data[0, 0] = torch.inf
    assert torch.isnan(gauge.read()[0, 0])


def test_a_gauge_keeps_the_start_whatever_becomes_of_the_weights():
    layer = nn.Linear(3, 3)
    start = layer.weight.detach().clone()
    gauge = Gauge(layer)
    layer.weight.data.zero_()
    assert torch.equal(gauge.initial[0], start)


def test_numbers_of_a_cpu_are_ready_at_once_and_exact():
    values = torch.tensor([1 / 3, float("nan"), 1e300], dtype=torch.float64)
    reading = Reading(values)
    assert reading.ready
    numbers = reading.numbers()
    assert (numbers[0], numbers[2]) == (1 / 3, 1e300)
    assert numbers[1] != numbers[1]
