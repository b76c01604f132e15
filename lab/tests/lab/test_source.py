import numpy as np
import pytest
import torch

from gyroscope_lab.data import Source, digits, official
from gyroscope_lab.errors import LabError
from lab.made import NAMES, idx, write

PARTS = ("x_train", "y_train", "x_test", "y_test", "x_val", "y_val")


@pytest.fixture
def folder(tmp_path):
    """200 training images, 10 to 29 per class, and 20 test images; each has its number in its first pixels."""
    y = np.repeat(np.arange(10, dtype=np.uint8), [10, 12, 14, 29, 18, 20, 22, 24, 25, 26])
    y = y[np.random.default_rng(0).permutation(200)]
    x = np.random.default_rng(1).integers(0, 256, (220, 28, 28), dtype=np.uint8)
    x[:, 0, 0] = np.arange(220)
    contents = [idx(x[:200]), idx(y), idx(x[200:]), idx(np.arange(20, dtype=np.uint8) % 10)]
    return write(tmp_path, **dict(zip(NAMES, contents, strict=True)))


def same(one, other):
    return all(
        (a is None and b is None) or torch.equal(a, b)
        for a, b in ((getattr(one, part), getattr(other, part)) for part in (*PARTS, "mean", "std"))
    )


def numbers(x):
    return x[:, 0, 0, 0].tolist()


def test_all_examples_come_as_the_bytes_they_were(folder):
    split = Source("mnist").load(folder)
    assert numbers(split.x_train) == list(range(200))
    assert numbers(split.x_test) == list(range(200, 220))
    assert split.x_train.dtype == torch.uint8
    assert split.x_train.shape == (200, 1, 28, 28)
    assert split.x_val is None
    assert split.y_val is None
    assert split.classes == 10


def test_the_environment_names_the_folder(folder, monkeypatch):
    monkeypatch.setenv("GYROSCOPE_DATA", str(folder))
    assert same(Source("mnist").load(), Source("mnist").load(str(folder)))


@pytest.mark.parametrize("normalization", ["scalar", "channel"])
@pytest.mark.parametrize("choice", [{}, {"validation": 0.1}, {"per_class": 3}], ids=["all", "held out", "few"])
def test_the_moments_are_those_of_all_training_pixels_whatever_is_left_out(folder, normalization, choice):
    split = Source("mnist", normalization=normalization, **choice).load(folder)
    x = Source("mnist").load(folder).x_train.numpy()
    assert split.mean.shape == split.std.shape == ((1,) if normalization == "channel" else ())
    assert split.mean.item() == np.float32(x.mean(dtype=np.float64))
    assert split.std.item() == np.float32(x.std(dtype=np.float64))


def test_without_normalization_pixels_are_from_0_to_1(folder):
    split = Source("mnist", normalization="none").load(folder)
    assert torch.equal(split.inputs(split.x_test), split.x_test.float() / 255)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_held_out_and_the_others_are_all_training_examples_once(folder, seed):
    split = Source("mnist", validation=0.1, seed=seed).load(folder)
    whole = Source("mnist").load(folder)
    assert len(split.x_val) == len(split.y_val) == 20
    assert sorted(numbers(split.x_train) + numbers(split.x_val)) == list(range(200))
    for x, y in ((split.x_train, split.y_train), (split.x_val, split.y_val)):
        assert numbers(x) == sorted(numbers(x))
        assert y.tolist() == whole.y_train[numbers(x)].tolist()
    assert torch.equal(split.x_test, whole.x_test)


@pytest.mark.parametrize("validation", [0.0, 0.1])
@pytest.mark.parametrize("per_class", [1, 3, 7])
def test_few_of_each_class_are_equally_many_with_their_own_labels_and_none_held_out(folder, validation, per_class):
    split = Source("mnist", per_class=per_class, validation=validation).load(folder)
    whole = Source("mnist").load(folder)
    assert torch.bincount(split.y_train).tolist() == [per_class] * 10
    assert split.y_train.tolist() == whole.y_train[numbers(split.x_train)].tolist()
    assert len(set(numbers(split.x_train))) == 10 * per_class
    assert torch.equal(split.x_test, whole.x_test)
    if validation:
        assert len(split.x_val) == 20
        assert not set(numbers(split.x_val)) & set(numbers(split.x_train))


@pytest.mark.parametrize("choice", [{"validation": 0.1}, {"per_class": 3}, {"per_class": 3, "validation": 0.2}])
def test_the_choice_depends_on_the_seed_alone(folder, choice):
    loaded = {}
    for seed in (0, 1, 2):
        torch.manual_seed(seed + 7)
        first = Source("mnist", seed=seed, **choice).load(folder)
        torch.manual_seed(seed + 8)
        state = torch.get_rng_state()
        assert same(first, Source("mnist", seed=seed, **choice).load(folder))
        assert torch.equal(torch.get_rng_state(), state)
        loaded[seed] = numbers(first.x_train)
    assert loaded[0] != loaded[1] != loaded[2] != loaded[0]


def test_the_choice_is_a_shuffle_whose_first_are_held_out_and_next_are_taken(folder):
    """Compared with a list that is dealt one by one."""
    split = Source("mnist", per_class=2, validation=0.05, seed=3).load(folder)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(3)).tolist()
    labels = Source("mnist").load(folder).y_train.tolist()
    hand = {c: [] for c in range(10)}
    for number in order[10:]:
        if len(hand[labels[number]]) < 2:
            hand[labels[number]].append(number)
    assert numbers(split.x_val) == sorted(order[:10])
    assert numbers(split.x_train) == sorted(number for cards in hand.values() for number in cards)


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"per_class": 11}, "`per_class` must be from 1 to 10 for MNIST without its held-out examples, got 11"),
        ({"validation": 0.001}, r"`validation` must hold out at least one of th.*\.001, which holds out 0"),
        ({"validation": 0.999}, "`validation` must hold out at least one of th.*99, which holds out 200"),
    ],
    ids=["few", "none", "all"],
)
def test_more_than_there_is_is_refused(folder, choice, says):
    with pytest.raises(LabError, match=says):
        Source("mnist", **choice).load(folder)


def test_examples_that_would_not_fit_in_memory_are_not_copied(folder, monkeypatch):
    monkeypatch.setattr(official, "fits", lambda size, device: size < 28 * 28 * 200)
    assert len(Source("mnist").load(folder).x_train) == 200
    assert len(Source("mnist", per_class=2).load(folder).x_train) == 20
    with pytest.raises(LabError, match="Choosing examples of MNIST copies 0 GB, more than half of the free memory"):
        Source("mnist", validation=0.1).load(folder)


@pytest.mark.parametrize("per_class", [None, 20, 5])
def test_digits_are_split_as_they_always_were(per_class):
    assert same(Source("digits", per_class=per_class).load(), digits(per_class=per_class or 20))


def test_digits_of_another_seed_are_others_and_equally_many():
    one, other = Source("digits").load(), Source("digits", seed=1).load()
    assert torch.bincount(other.y_train).tolist() == [20] * 10
    assert len(other.x_test) == 1597
    assert not torch.equal(one.y_test, other.y_test)
    assert same(other, Source("digits", seed=1).load())
    assert other.x_train.mean().item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_digits_are_held_out_of_the_training_set_and_the_test_set_stays(seed):
    whole, split = Source("digits", seed=seed).load(), Source("digits", seed=seed, validation=0.1).load()
    assert len(split.x_val) == 20
    assert torch.equal(split.x_test, whole.x_test)
    rows = [tuple(row.tolist()) for row in torch.cat([split.x_train, split.x_val]).flatten(1)]
    assert sorted(rows) == sorted(tuple(row.tolist()) for row in whole.x_train.flatten(1))


def test_digits_without_normalization_are_from_0_to_1():
    split = Source("digits", normalization="none").load()
    assert split.x_train.min() == 0
    assert split.x_train.max() == 1
    assert torch.equal(split.x_train * 16, (split.x_train * 16).round())
    assert torch.equal(split.y_test, digits().y_test)


def test_too_many_digits_are_an_error_of_ours():
    with pytest.raises(LabError, match="`per_class` must be from 1 to 173 for the digits, got 174"):
        Source("digits", per_class=174).load()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"name": "cifar10"}, "The dataset must be one of digits, mnist, cif.*kespeare, got 'cifar10'"),
        ({"validation": 1.0}, r"`validation` must be a share ≥ 0 and < 1, got 1\.0"),
        ({"validation": -0.1}, r"`validation` must be a share ≥ 0 and < 1, got -0\.1"),
        ({"validation": float("nan")}, "`validation` must be a share ≥ 0 and < 1, got nan"),
        ({"normalization": "unit"}, r"`Source\.normalization` must be 'scalar' or 'channel' or 'none', got 'unit'"),
        ({"per_class": 0}, "`per_class` must be a whole number ≥ 1, or None for all, got 0"),
        ({"seed": -1}, "`seed` must be a whole number from 0 to 2⁶³ − 1, got -1"),
        ({"seed": 2**63}, "`seed` must be a whole number from 0 to 2⁶³ − 1, got 9223372036854775808"),
    ],
    ids=str,
)
def test_a_source_of_nothing_there_is_is_refused_when_it_is_made(wrong, says):
    with pytest.raises(LabError, match=says):
        Source(**{"name": "mnist"} | wrong)


def test_equal_sources_are_equal_and_can_be_keys():
    assert Source("mnist", per_class=10) == Source("mnist", per_class=10)
    assert len({Source("mnist"), Source("mnist"), Source("mnist", seed=1)}) == 2
