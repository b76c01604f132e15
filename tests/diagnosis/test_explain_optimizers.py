"""The statements about layers under optimizers around optimizers agree with the measured steps."""

import numpy as np
import pytest
import torch
from torch import nn

import gyroscope
from diagnosis.explain_runs import clusters, normalized, train
from gyroscope.control import KFAC, QuasiDiagonal
from gyroscope.control.layca import block_normalized, hyperball, relative_update
from gyroscope.diagnosis.explain import TOPICS, explain
from gyroscope.monitor.watch import meta_of
from gyroscope.theory.recurrence import optimizer_of

CE = nn.functional.cross_entropy
AFTER = TOPICS[1:4]


def sgd(net, **options):
    return torch.optim.SGD(net.parameters(), **{"lr": 0.05, "weight_decay": 0.02} | options)


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=0.02)


class Convolved(nn.Module):
    """A convolution of a kind that preconditioners pass through."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.last = nn.Conv1d(1, 6, 3, bias=False), nn.BatchNorm1d(6), nn.Linear(48, 4)

    def forward(self, x):
        return self.last(self.norm(self.conv(x[:, None])).relu().flatten(1))


def normalized_step(make, build, factor):
    """‖Δw‖/‖w‖ of a first step from weights that are `factor` times as large, where nothing but that differs."""
    net = build().double()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eps = 1e-12
    w = next(net.parameters())
    with torch.no_grad():
        w.mul_(factor)
    optimizer = make(net)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    before, (x, y) = w.detach().clone(), clusters()
    CE(net(x.double()), y).backward()
    optimizer.step()
    return float((w.detach() - before).norm() / before.norm())


PRECONDITIONED = {
    "K-FAC": (lambda net: KFAC(sgd(net), net, CE, damping=1e-12), normalized, 1.0),
    "K-FAC, momentum": (lambda net: KFAC(sgd(net, momentum=0.9), net, CE, damping=1e-12), normalized, 1.0),
    "K-FAC, Adam": (lambda net: KFAC(adam(net), net, CE, damping=1e-12), normalized, 0.1),
    "K-FAC, passed through": (lambda net: KFAC(sgd(net), net, CE), Convolved, 0.01),
    "quasi-diagonal": (lambda net: QuasiDiagonal(sgd(net), net), normalized, 0.01),
    "quasi-diagonal, labels": (lambda net: QuasiDiagonal(sgd(net), net, labels="true"), normalized, 1.0),
}
SAYS = {1.0: "does not apply", 0.1: "undecided", 0.01: "yes"}


@pytest.mark.parametrize(("make", "build", "ratio"), PRECONDITIONED.values(), ids=PRECONDITIONED)
def test_an_effective_rate_is_ruled_out_only_where_steps_grow_with_the_weights(tmp_path, make, build, ratio):
    measured = normalized_step(make, build, 10.0) / normalized_step(make, build, 1.0)
    assert measured == pytest.approx(ratio, rel=1e-3)
    entry = explain(train(tmp_path / "a", build(), make, 30)).entries[0]
    said = entry.about("effective learning rate")
    assert said.verdict == SAYS[ratio]
    assert ("undoes a rescaling" in said.words) == (ratio == 1.0)


def test_decay_acts_by_a_damping_that_stays_and_not_by_one_that_falls_with_the_curvature(tmp_path):
    def said(name, make, build=normalized):
        return explain(train(tmp_path / name, build(), make, 30)).entries[0]

    assert said("a", lambda net: KFAC(sgd(net), net, CE)).mechanisms == ("damping",)
    share = said("b", lambda net: QuasiDiagonal(sgd(net), net, labels="true"))
    assert (share.about("weight decay").verdict, share.mechanisms) == ("no", ())
    passed = said("c", lambda net: KFAC(sgd(net), net, CE), Convolved)
    assert passed.mechanisms == ("effective learning rate",)
    assert passed.optimizer == "SGD (whose gradient KFAC passes through)"
    assert said("d", lambda net: KFAC(adam(net), net, CE)).about("weight decay").verdict == "undecided"
    inputs = said("e", lambda net: QuasiDiagonal(sgd(net), net))
    assert inputs.mechanisms == ("effective learning rate",)
    for topic in ("implicit decay", "equilibrium"):
        assert inputs.about(topic).verdict == "undecided"
        assert "not orthogonal to the weights" in inputs.about(topic).words


def test_of_a_preconditioner_that_was_recorded_without_its_layers_nothing_is_said():
    known = optimizer_of({"class": "KFAC", "inner": "SGD"}, layer="0.weight")
    assert (known.family, "was not recorded" in known.why) == ("unknown", True)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda ps: torch.optim.AdamW(ps, 1e-2, amsgrad=True), "amsgrad"),
        (lambda ps: torch.optim.RMSprop(ps, 1e-2, centered=True), "centered"),
    ],
    ids=["amsgrad", "centered"],
)
def test_an_option_without_a_theory_is_named(tmp_path, make, option):
    found = explain(train(tmp_path / "run", normalized(), lambda net: make(net.parameters()), 30))
    assert f"only without {option}." in found["0.weight"].about("equilibrium").words


def test_a_run_remembers_what_wrappers_do_also_within_each_other():
    net = Convolved()
    (given,) = meta_of(None, net, [gyroscope.Layca(KFAC(sgd(net), net, CE, biases=False), net)])["optimizers"]
    assert (given["class"], given["inner"], given["law"]["scale"]) == ("Layca", "KFAC", "relative")
    assert given["within"]["layers"] == ["last"]
    assert "Conv1d" in given["within"]["unsupported"]["conv"]
    assert optimizer_of(given, steered=False, layer="last.weight").family == "second order"
    assert optimizer_of(given, steered=False, layer="conv.weight").kind == "sgd"
    net = normalized()
    (given,) = meta_of(None, net, [gyroscope.Graft(sgd(net, weight_decay=0.0), adam(net))])["optimizers"]
    assert (given["inner"], given["direction"], given["granularity"], given["decays"]) == (
        "SGD",
        "Adam",
        "tensor",
        True,
    )
    (given,) = meta_of(None, net, [QuasiDiagonal(sgd(net, weight_decay=0.0), net)])["optimizers"]
    assert (given["labels"], given["damping"], given["decays"]) == (False, 0.1, False)


# Controllers.


def course(folder):
    with gyroscope.load(folder) as run:
        return [run.series(name)[2:, 0].astype(float) for name in ("rate", "weight_norm")]


def test_a_controller_that_leaves_the_norm_free_is_not_said_to_turn_whatever_the_norm(tmp_path):
    unit = train(tmp_path / "a", normalized(), lambda net: block_normalized(sgd(net, lr=0.3, weight_decay=0), net), 60)
    rates, norms = course(unit)
    assert rates[-1] < 0.7 * rates[0]
    assert norms[-1] > 1.4 * norms[0]
    decays = train(
        tmp_path / "b", normalized(), lambda net: relative_update(sgd(net, lr=0.05, weight_decay=0.5), net), 60
    )
    rates, norms = course(decays)
    assert norms[-1] < 0.7 * norms[0]
    for folder, decay in ((unit, "does not apply"), (decays, "undecided")):
        entry = explain(folder)["0.weight"]
        for topic in AFTER:
            assert entry.about(topic).verdict == "undecided"
            assert "whatever its norm" not in entry.about(topic).words
            assert "leaves the norm free" in entry.about(topic).words
        assert entry.about("weight decay").verdict == decay
        assert "does not decay" not in entry.about("weight decay").words


def test_where_the_angle_stays_while_the_norm_grows_it_is_said(tmp_path):
    folder = train(
        tmp_path / "a", normalized(), lambda net: relative_update(sgd(net, lr=0.1, weight_decay=0.0), net), 60
    )
    rates, norms = course(folder)
    assert np.ptp(rates) < 0.01 * rates.mean()
    assert norms[-1] > 1.2 * norms[0]
    entry = explain(folder)["0.weight"]
    assert entry.about("equilibrium").verdict == "does not apply"
    assert "whatever its norm, which went from" in entry.about("equilibrium").words
    assert entry.about("weight decay").words == "because weight decay is zero."


def test_a_controller_that_holds_the_norm_leaves_nothing_to_decay(tmp_path):
    entry = explain(train(tmp_path / "a", normalized(), lambda net: hyperball(sgd(net, lr=0.1), net), 20))["0.weight"]
    assert "its norm is held at" in entry.about("equilibrium").words
    assert "the norm does not decay" in entry.about("weight decay").words


def test_a_graft_has_the_effective_rate_of_its_lengths_and_no_theory_of_decay(tmp_path):
    def made(**options):
        def make(net):
            return gyroscope.Graft(sgd(net, lr=0.3, weight_decay=0.0), torch.optim.Adam(net.parameters()), **options)

        return make

    folder = train(tmp_path / "a", normalized(), made(), 60)
    rates, _ = course(folder)
    entry = explain(folder)["0.weight"]
    assert entry.about("effective learning rate").verdict == "yes"
    assert rates[-10:].mean() < 0.5 * rates[:10].mean()  # as the norm grows
    assert entry.implicit_factor < 0.5
    assert entry.about("weight decay").words == "because weight decay is zero."
    whole = explain(train(tmp_path / "b", normalized(), made(granularity="global"), 20))["0.weight"]
    assert whole.about("effective learning rate").verdict == "undecided"

    def decaying(net):
        return gyroscope.Graft(sgd(net, weight_decay=0.0), adam(net))  # the direction's, of which there is no series

    entry = explain(train(tmp_path / "c", normalized(), decaying, 20))["0.weight"]
    for topic in ("implicit decay", "equilibrium", "weight decay"):
        assert entry.about(topic).verdict == "undecided"
        assert "no theory for weight decay under Graft" in entry.about(topic).words
