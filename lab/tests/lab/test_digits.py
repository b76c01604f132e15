import pytest
import torch
from sklearn.datasets import load_digits

from gyroscope_lab.data import digits


def rows(x):
    return [tuple(row.tolist()) for row in x.flatten(1)]


def test_the_training_set_has_twenty_of_each_class():
    split = digits()
    assert torch.bincount(split.y_train).tolist() == [20] * 10


def test_the_two_sets_are_disjoint_and_together_are_all_digits():
    split = digits()
    mean, std = training_moments(split)
    pixels = torch.cat([split.x_train, split.x_test]) * std + mean
    labels = torch.cat([split.y_train, split.y_test])
    given = zip(*load_digits(return_X_y=True), strict=True)
    expected = sorted((tuple(row.tolist()), int(label)) for row, label in given)
    # All 1,797 images differ, so equal sorted lists leave no room for an image in both sets.
    assert len({row for row, _ in expected}) == len(expected) == 1797
    found = zip(rows(pixels.round()), labels.tolist(), strict=True)
    assert sorted(found) == expected


def training_moments(split):
    """Undo the scaling: pixels are whole numbers from 0 to 16, so extremes give scale and shift."""
    low, high = split.x_train.min(), split.x_train.max()
    std = 16 / (high - low)
    return -low * std, std


def test_one_shift_and_one_scale_come_from_the_training_set_alone():
    split = digits()
    assert split.x_train.mean().item() == pytest.approx(0, abs=1e-6)
    assert split.x_train.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert abs(split.x_test.mean().item()) > 1e-4


def test_the_split_is_the_same_whatever_the_random_state():
    torch.manual_seed(1)
    first = digits()
    torch.manual_seed(2)
    second = digits()
    assert torch.equal(first.x_train, second.x_train)
    assert torch.equal(first.y_test, second.y_test)


def test_the_split_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    digits()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("per_class", [0, -1, 174])
def test_a_class_too_small_is_refused_with_what_is_accepted(per_class):
    with pytest.raises(ValueError, match=f"`per_class` must be from 1 to 173 for the digits, got {per_class}"):
        digits(per_class=per_class)
