"""The three properties of normalizers, against what section 4.4 says of them and against literal changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from gyroscope.errors import DynamicsError
from gyroscope.theory.batch_norm import BatchCenter
from gyroscope.theory.invariance import invariance
from gyroscope.theory.normalizers import NORMALIZERS, TOLERANCE, comparison, properties


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def flags(rows: list[dict]) -> dict[str, tuple]:
    return {row["layer"]: (row["scale_invariant"], row["centering"], row["stochastic"]) for row in rows}


def test_the_comparison_is_that_of_the_chapter():
    rows = {row["normalizer"]: row for row in comparison()}
    # "The WN and LN operations are independent of the rest of the batch": of the three, BN alone is stochastic.
    assert [name for name in ("batch norm", "weight norm", "layer norm") if rows[name]["stochastic"]] == ["batch norm"]
    # "WN only includes rescaling, not centering"; LN's centering "doesn't eliminate the outlier eigenvalues".
    assert [name for name in ("batch norm", "weight norm", "layer norm") if rows[name]["centering"]] == ["batch norm"]
    # "In the case of LN, scale invariance holds only at the level of the entire weight matrix."
    scales = {name: rows[name]["scale_invariant"] for name in ("batch norm", "weight norm", "layer norm")}
    assert scales == {"batch norm": "unit", "weight norm": "unit", "layer norm": "tensor"}
    # "combining WN with ... batch centering": all that batch norm has.
    assert flags([rows["weight norm, batch centering"]]) == flags([rows["batch norm"]])


def test_what_is_no_change_is_far_below_the_tolerance_and_what_is_one_far_above():
    for row in comparison():
        for name in ("change_unit", "change_tensor", "change_shift", "change_others"):
            assert not TOLERANCE / 10 < row[name] < 10 * TOLERANCE, (row["normalizer"], name, row[name])


@pytest.mark.parametrize("name", NORMALIZERS)
def test_the_detector_by_gradients_agrees_with_finite_changes(name):
    module = NORMALIZERS[name]()
    x = torch.randn(10, 5, 9) if isinstance(module[0], nn.Conv1d) else torch.randn(10, 5)
    (row,) = properties(module, x)
    found = invariance(module, lambda out, target: out.flatten(1)[:, :3].pow(3).mean(), (x, None))
    assert found.entries[0].scale_invariant == row["scale_invariant"]


def test_the_changes_are_those_of_a_literal_computation():
    net, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh()).double(), torch.randn(6, 4, dtype=torch.float64)
    (row,) = properties(net, x)
    out, scaled = net(x), copy.deepcopy(net)
    scaled[0].weight.data *= 4
    expected = (scaled(x) - out).norm() / out.norm()
    assert row["change_tensor"] == pytest.approx(float(expected.detach()), rel=1e-12)
    assert row["change_others"] == 0


ALONE = {
    "batch norm": (nn.BatchNorm1d(6), (8, 6), ("unit", True, True)),
    "batch norm of images": (nn.BatchNorm2d(3), (8, 3, 4, 4), ("unit", True, True)),
    "batch norm in evaluation": (nn.BatchNorm1d(6).eval(), (8, 6), ("no", False, False)),
    "batch centering": (BatchCenter(6), (8, 6), ("no", True, True)),
    "layer norm of tokens": (nn.LayerNorm(6), (4, 5, 6), ("tensor", False, False)),
    "group norm": (nn.GroupNorm(3, 6), (4, 6, 5), ("tensor", False, False)),
    "group norm with a group a unit": (nn.GroupNorm(6, 6), (4, 6, 25), ("unit", True, False)),
    "instance norm": (nn.InstanceNorm2d(3), (4, 3, 8, 8), ("unit", True, False)),
    "none": (nn.Identity(), (8, 6), ("no", False, False)),
}


@pytest.mark.parametrize(("module", "shape", "expected"), ALONE.values(), ids=ALONE)
def test_a_normalizer_alone_is_measured_behind_a_layer_of_its_own(module, shape, expected):
    x = torch.randn(shape)
    state = torch.get_rng_state()
    assert flags(properties(module, x)) == {"0.linear.weight": expected}
    assert torch.equal(torch.get_rng_state(), state)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.second, self.layer_norm = nn.Linear(6, 6, bias=False), nn.LayerNorm(6)
        self.recurrent = nn.GRU(6, 5, batch_first=True)
        self.unused, self.last = nn.Linear(6, 6), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.layer_norm(self.second(torch.tanh(self.norm(self.first(x))))))
        return {"logits": self.last(self.recurrent(x[:, None])[0][:, 0])}


def test_every_layer_of_a_network_is_measured_for_what_follows_it():
    net, x = Mixed(), torch.randn(10, 4)
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    rows = flags(properties(net, x))
    assert rows["first.weight"] == ("unit", True, True)
    assert rows["second.weight"] == ("tensor", False, False)
    assert rows["last.weight"] == ("no", False, False)
    assert rows["recurrent.weight_ih_l0"] == ("no", None, None)  # its output is not that of units of one layer
    assert rows["unused.weight"] == ("undecided: no effect", None, None)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not any(module._forward_hooks for module in net.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_are_chosen_by_name():
    assert list(flags(properties(Mixed(), {"x": torch.randn(10, 4)}, layers="sec*"))) == ["second.weight"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (lambda: properties(nn.BatchNorm1d(4), torch.randn(4)), r"\[B, D, ...\]"),
        (lambda: properties(nn.Linear(4, 2), torch.randn(1, 4)), "two or more examples"),
        (
            lambda: properties(nn.Linear(4, 2), torch.randn(3, 4), tolerance=0.0),
            "`tolerance` must be a finite number > 0",
        ),
        (lambda: properties(F.relu, torch.randn(3, 4)), "a torch.nn.Module"),
    ],
)
def test_what_has_no_properties_is_refused(asked, says):
    with pytest.raises(DynamicsError, match=says):
        asked()
