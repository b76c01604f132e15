"""The knock-out: what it does to statistics, to networks that normalize again, and to the model it is put into."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from gyroscope.errors import DynamicsError
from gyroscope.theory.batch_norm import batch_norm
from gyroscope.theory.knockout import Knockout, knock_out, restore


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", [(9, 4), (6, 4, 3, 2)])
def test_every_unit_is_moved_and_stretched_as_a_whole_by_numbers_within_their_ranges(shape):
    a = drawn(*shape)
    moved = Knockout(shift=0.5, gain=(1.0, 1.25), generator=seeded())(a)
    for j in range(4):
        x, y = a[:, j].flatten(), moved[:, j].flatten()
        gain = (y[0] - y[1]) / (x[0] - x[1])
        shift = y[0] - gain * x[0]
        torch.testing.assert_close(y, gain * x + shift, rtol=1e-10, atol=1e-10)
        assert 1.0 <= gain <= 1.25
        assert -0.5 <= shift <= 0.5


def test_after_batch_norm_the_means_and_deviations_are_the_numbers_drawn():
    layer = Knockout(shift=2.0, gain=(0.5, 3.0), generator=seeded())
    moved = layer(batch_norm(7 + drawn(50, 5)))
    numbers = seeded()
    shifts, gains = (torch.empty(5, dtype=torch.float64).uniform_(-1, 1, generator=numbers) for _ in range(2))
    torch.testing.assert_close(moved.mean(0), 2 * shifts)
    torch.testing.assert_close(moved.std(0, correction=0), 1.75 + 1.25 * gains)


def test_the_numbers_are_others_at_every_step():
    layer, a = Knockout(), drawn(8, 3)
    torch.manual_seed(0)
    first, second = layer(a), layer(a)
    assert not torch.allclose(first.mean(0), second.mean(0))
    torch.manual_seed(0)
    assert torch.equal(layer(a), first)


def test_with_a_spread_examples_of_a_batch_differ_by_about_as_much():
    a = torch.ones(4000, 2, dtype=torch.float64)
    assert Knockout()(a).std(0).max() == 0
    moved = Knockout(spread=0.2, generator=seeded())(a)
    expected = (0.2**2 + 0.2**2 / 3) ** 0.5  # a normal gain and a uniform shift
    torch.testing.assert_close(moved.std(0), torch.full((2,), expected, dtype=torch.float64), rtol=0.05, atol=0)


def test_in_evaluation_units_are_transformed_by_the_means_of_the_distributions():
    layer = Knockout(shift=3.0, gain=(1.0, 2.0), spread=0.5).eval()
    a = drawn(4, 3)
    torch.testing.assert_close(layer(a), 1.5 * a)


@pytest.mark.parametrize(("gain", "same"), [((2.0, 2.0), True), ((0.5, 2.0), False)])
def test_a_batch_norm_in_the_next_layer_undoes_shifts_and_a_common_gain_but_not_gains_of_single_units(gain, same):
    a, w = drawn(12, 5), drawn(3, 5, seed=1).requires_grad_(True)
    moved = Knockout(shift=10.0, gain=gain, generator=seeded())(a)
    plain, there = (batch_norm(x @ w.T) for x in (a, moved))
    assert torch.allclose(there, plain, rtol=1e-9, atol=1e-10) == same
    before, after = (torch.autograd.grad(torch.tanh(s).pow(3).sum(), w)[0] for s in (plain, there))
    assert torch.allclose(before, after, rtol=1e-8, atol=1e-9) == same


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.head(self.block(x).mean(2)))


def test_it_is_put_behind_every_batch_norm_and_nothing_is_renamed():
    torch.manual_seed(0)
    model = Small().double()
    plain, names, x = copy.deepcopy(model), list(model.state_dict()), drawn(6, 2, 8)
    put = knock_out(model, generator=seeded())
    assert list(put) == ["block.1", "norm"]
    assert list(model.state_dict()) == names
    assert isinstance(model.norm, nn.BatchNorm1d)
    # By hand, with the same numbers: those of the first normalization are drawn first.
    by_hand = Knockout(generator=seeded())
    expected = by_hand(plain.norm(plain.head(torch.relu(by_hand(plain.block[:2](x))).mean(2))))
    torch.testing.assert_close(model(x), expected)


def test_it_follows_the_mode_the_copies_and_the_files_of_a_model():
    model, x = Small().double(), drawn(6, 2, 8)
    knock_out(model)
    assert torch.equal(model.eval()(x), model(x))
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        assert torch.equal(other(x), model(x))
        other.train()
        assert not model.norm.knockout.training  # a copy has knock-outs of its own
        assert not torch.equal(other(x), other(x))


def test_a_restored_model_computes_what_it_did():
    model, x = Small().double(), drawn(6, 2, 8)
    before = model(x)
    knock_out(model)
    assert restore(model) == 2
    assert torch.equal(model(x), before)
    assert [name for name, _ in model.named_modules() if "knockout" in name] == []
    knock_out(model, include="nor*")
    assert restore(model) == 1


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (lambda: knock_out(nn.Linear(2, 2)), "it has no batch normalization"),
        (lambda: knock_out(Small(), include="first"), "are block.1, norm"),
        (lambda: knock_out(Small(), include=5), "`include` must be a glob pattern"),
        (lambda: knock_out(None), "`model` must be a torch.nn.Module, got a NoneType"),
        (lambda: restore(None), "`model` must be a torch.nn.Module, got a NoneType"),
        (lambda: Knockout(gain=(0.0, 1.0)), "0 < smallest"),
        (lambda: Knockout(shift=-1.0), "`shift` must be a finite number ≥ 0"),
        (lambda: Knockout()(torch.ones(3)), r"\[B, D, ...\]"),
    ],
)
def test_what_cannot_be_knocked_out_is_refused(asked, says):
    with pytest.raises(DynamicsError, match=says):
        asked()


def test_nothing_is_knocked_out_twice():
    model = Small()
    knock_out(model, include="norm")
    with pytest.raises(DynamicsError, match="norm already has a knock-out"):
        knock_out(model)
    assert restore(model) == 1
