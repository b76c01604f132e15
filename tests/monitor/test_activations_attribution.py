"""Which activations count as those of which layer."""

from __future__ import annotations

import pytest
import torch
from activation_models import Functional, close, seeded, unseen, watched
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import gyroscope
from gyroscope.passes import activations
from gyroscope.passes.activations import COLUMNS, ActivationProbe, look
from oracles.activations import statistics


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_one_module_used_again_and_again_counts_for_the_layer_before_each_use():
    net = Functional(
        lambda m, x: m.relu(m.b(m.relu(m.a(x)))),
        a=nn.Linear(3, 6), b=nn.Linear(6, 8), relu=nn.ReLU(),
    )  # fmt: skip
    x, m = seeded((5, 3)), net.parts
    got = watched(net, lambda: net(x))
    assert close(got["parts.a.weight"], statistics([F.relu(m.a(x))]))
    assert close(got["parts.b.weight"], statistics([F.relu(m.b(F.relu(m.a(x))))]))


def test_a_nonlinearity_after_a_normalizer_counts_for_the_layer_before_it():
    conv, norm = nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5)
    net = nn.Sequential(conv, norm, nn.Dropout(0.0), nn.ReLU(), nn.Flatten(), nn.Linear(5, 2))
    x = seeded((4, 2, 3, 3))
    got = watched(net, lambda: net(x))
    assert close(got["0.weight"], statistics([F.relu(norm(conv(x)))], images=True))


def test_a_functional_nonlinearity_after_a_normalizer_is_seen_through_the_normalizer():
    net = Functional(
        lambda m, x: m.fc(F.relu(m.norm(m.conv(x)), inplace=True).flatten(1)),
        conv=nn.Conv2d(2, 5, 3), norm=nn.BatchNorm2d(5), fc=nn.Linear(45, 2),
    )  # fmt: skip
    x, m = seeded((4, 2, 5, 5)), net.parts
    got = watched(net, lambda: net(x))
    assert close(got["parts.conv.weight"], statistics([m.norm(m.conv(x))], images=True))


def test_a_normalizer_of_something_else_leaves_the_layer_alone():
    # x + f(x) is normalized, as in a transformer: not what the layer put out.
    net = Functional(lambda m, x: m.norm(x + m.a(x)), a=nn.Linear(4, 4), norm=nn.LayerNorm(4))
    x = seeded((6, 4))
    got = watched(net, lambda: net(x))["parts.a.weight"]
    assert close(got, statistics([net.parts.a(x)]))


def test_an_output_that_is_overwritten_later_counts_as_it_was():
    net = Functional(lambda m, x: m.b(F.relu_(m.a(x))), a=nn.Linear(3, 6), b=nn.Linear(6, 2))
    x, m = seeded((5, 3)), net.parts
    got = watched(net, lambda: net(x))
    assert close(got["parts.a.weight"], statistics([m.a(x)]))


def test_of_several_nonlinearities_after_a_layer_the_first_is_its_own():
    net = Functional(lambda m, x: m.two(m.one(m.a(x)) - 0.3), a=nn.Linear(3, 6), one=nn.ReLU(), two=nn.ReLU())
    x, m = seeded((5, 3)), net.parts
    got = watched(net, lambda: net(x))
    assert close(got["parts.a.weight"], statistics([F.relu(m.a(x))]))


def test_a_nonlinearity_before_all_layers_counts_for_none():
    net = nn.Sequential(nn.ReLU(), nn.Linear(3, 6))
    x = seeded((5, 3))
    assert close(watched(net, lambda: net(x))["1.weight"], statistics([net(x)]))


def test_weights_used_twice_are_seen_twice():
    net = Functional(lambda m, x: m.relu(m.a(m.relu(m.a(x)))), a=nn.Linear(4, 4), relu=nn.ReLU())
    x, a = seeded((5, 4)), net.parts.a
    once = F.relu(a(x))
    assert close(watched(net, lambda: net(x))["parts.a.weight"], statistics([once, F.relu(a(once))]))


def test_a_second_look_sees_what_the_first_did_and_looks_at_each_layer_once(monkeypatch):
    net = Functional(
        lambda m, x: m.d(F.relu(m.two(m.c(m.relu(m.one(m.b(m.relu(m.a(x))))))))),
        a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4), d=nn.Linear(4, 4),
        one=nn.LayerNorm(4), two=nn.LayerNorm(4), relu=nn.ReLU(),
    )  # fmt: skip
    probe = ActivationProbe(net, gyroscope.layers(net))
    looks = []
    monkeypatch.setattr(activations, "look", lambda *args, **kwargs: looks.append(1) or look(*args, **kwargs))
    x, found = seeded((6, 4)), []
    for _ in range(2):
        looks.clear()
        probe.reset()
        probe.attach()
        net(x)
        probe.detach()
        found.append(probe.collect())
    assert found[0].equal(found[1])
    assert len(looks) == 4


def test_a_model_that_changes_its_course_is_seen_again_after_one_look():
    net = Functional(lambda m, x: m.b(m.relu(m.a(x)) if m.training else m.a(x)),
                     a=nn.Linear(3, 6), b=nn.Linear(6, 2), relu=nn.ReLU())  # fmt: skip
    probe = ActivationProbe(net, gyroscope.layers(net))
    x, found = seeded((5, 3)), []
    for training in (True, True, False, False, True, True):
        net.train(training)
        probe.reset()
        probe.attach()
        net(x)
        probe.detach()
        found.append(dict(zip(COLUMNS, probe.collect()[0].tolist(), strict=True)))
    a = net.parts.a
    assert all(close(found[i], statistics([F.relu(a(x))])) for i in (0, 1, 4, 5))
    assert unseen(found[2])
    assert close(found[3], statistics([a(x)]))


def test_weights_used_once_with_and_once_without_a_nonlinearity_are_seen_in_both_every_time():
    net = Functional(lambda m, x: m.a(m.relu(m.a(x))), a=nn.Linear(4, 4), relu=nn.ReLU())
    probe = ActivationProbe(net, gyroscope.layers(net))
    x, a = seeded((5, 4)), net.parts.a
    for _ in range(3):
        probe.reset()
        probe.attach()
        net(x)
        probe.detach()
        found = dict(zip(COLUMNS, probe.collect()[0].tolist(), strict=True))
        assert close(found, statistics([F.relu(a(x)), a(F.relu(a(x)))]))


def test_a_layer_that_was_not_used_is_not_known():
    net = Functional(lambda m, x: m.a(x), a=nn.Linear(3, 6), b=nn.Linear(3, 6))
    got = watched(net, lambda: net(seeded((5, 3))))
    assert unseen(got["parts.b.weight"])
    assert not unseen(got["parts.a.weight"])


def test_passes_without_gradients_do_not_count():
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU())
    x, other = seeded((5, 3)), seeded((50, 3), 1)

    def run():
        with torch.no_grad():
            net(other)
        net(x)
        with torch.inference_mode():
            net(other)

    assert watched(net, run) == watched(net, lambda: net(x))


def test_classes_of_ones_own_count_by_their_names():
    class NewGELUActivation(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(1.7 * x)

    net, x = nn.Sequential(nn.Linear(3, 6), NewGELUActivation()), seeded((5, 3))
    got = watched(net, lambda: net(x))["0.weight"]
    assert close(got, statistics([net(x)]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_that_are_recomputed_in_the_backward_pass_count_once(reentrant):
    first, second = nn.Sequential(nn.Linear(3, 6), nn.ReLU()), nn.Sequential(nn.Linear(6, 5), nn.ReLU())
    net = nn.Sequential(first, second, nn.Linear(5, 2))
    x = seeded((8, 3)).requires_grad_()

    def run():
        h = checkpoint(first, x, use_reentrant=reentrant)
        h = checkpoint(second, h, use_reentrant=reentrant)
        return net[2](h)

    plain = watched(net, lambda: net(x))
    assert watched(net, run, train=True) == plain
    both = watched(net, lambda: torch.cat([run(), run()]), train=True)
    assert both == {name: pytest.approx(values) for name, values in plain.items()}


def test_a_checkpoint_that_starts_with_a_nonlinearity_does_not_give_it_to_a_later_layer():
    first, rest = nn.Linear(3, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 5))
    net = nn.Sequential(first, rest, nn.Linear(5, 2))
    x = seeded((8, 3))
    got = watched(net, lambda: net[2](checkpoint(rest, first(x), use_reentrant=False)), train=True)
    assert got == watched(net, lambda: net(x))


def test_attention_is_seen_through_what_it_puts_out():
    net = nn.MultiheadAttention(4, 2, batch_first=True)
    x = seeded((3, 5, 4))
    got = watched(net, lambda: net(x, x, x)[0])
    assert unseen(got["in_proj_weight"])
    assert close(got["out_proj.weight"], statistics([net(x, x, x)[0]]))


def test_a_transformer_layer_is_seen_in_all_its_layers_but_the_input_projection():
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = seeded((3, 5, 8))
    got = watched(net, lambda: net(x))
    assert [name for name, values in got.items() if unseen(values)] == ["self_attn.in_proj_weight"]


def test_a_recurrent_network_is_seen_through_its_last_weight():
    net = nn.LSTM(3, 4, num_layers=2, batch_first=True)
    x = seeded((2, 6, 3))
    got = watched(net, lambda: net(x)[0])
    assert [name for name, values in got.items() if not unseen(values)] == ["weight_hh_l1"]
    assert close(got["weight_hh_l1"], statistics([net(x)[0]]))


def test_packed_sequences_are_seen_without_their_padding():
    net = nn.GRU(3, 4)
    packed = nn.utils.rnn.pack_sequence([seeded((4, 3)), seeded((2, 3), 1)])
    got = watched(net, lambda: net(packed)[0].data)
    assert close(got["weight_hh_l0"], statistics([net(packed)[0].data]))


def test_an_embedding_is_seen():
    net = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    got = watched(net, lambda: net(tokens))
    assert close(got["0.weight"], statistics([net[0](tokens)]))


def test_a_weight_of_a_module_that_holds_other_layers_is_not_seen():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.own_weight = nn.Parameter(torch.randn(4, 4))
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(x @ self.own_weight)

    net = Head()
    got = watched(net, lambda: net(seeded((3, 4))))
    assert unseen(got["own_weight"])
    assert not unseen(got["inner.weight"])


def test_per_sample_gradients_go_unseen_and_unharmed():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    x = seeded((5, 3))
    parameters = dict(net.named_parameters())

    def loss(p, one):
        return torch.func.functional_call(net, p, (one[None],)).sum()

    run = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    expected = run(parameters, x)
    found = {}
    got = watched(net, lambda: found.update(run(parameters, x)))
    assert all(unseen(values) for values in got.values())
    assert all(found[name].equal(expected[name]) for name in expected)
