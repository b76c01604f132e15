from dataclasses import replace

import numpy as np
import pytest
import torch

from gyroscope_lab.data.augment import Augmentation, augment
from gyroscope_lab.data.split import Split
from gyroscope_lab.training.feed import Feed
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.trial import Trial
from lab.trainings import stepped

CPU = torch.device("cpu")


def images(count=10, side=6):
    """Images as bytes, like CIFAR; the network takes them normalized."""
    x = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    y = torch.arange(count) % 10
    return Split(x, y, x, y, mean=torch.tensor([100.0, 110.0, 120.0]), std=torch.tensor([50.0, 60.0, 70.0]))


def feed(split, *, seed=3, batch=4, augmentation=None):
    return Feed(split, batch=batch, augmentation=augmentation, seed=seed, device=CPU)


@pytest.mark.parametrize("augmentation", [None, Augmentation(shift=2), Augmentation(shift=1, per="batch", half=True)])
def test_batches_are_the_examples_in_a_new_random_order_every_epoch(augmentation):
    split, generator = images(), torch.Generator().manual_seed(3)
    fed = feed(split, augmentation=augmentation)
    for _ in range(3):
        fed.shuffle()
        order = torch.randperm(10, generator=generator)
        moves = None if augmentation is None else augmentation.draw(10, 4, generator)
        for begin, count in ((0, 4), (4, 4), (8, 2)):
            x, y = fed.take(count)
            chosen = order[begin : begin + count]
            raw = split.x_train[chosen]
            if moves is not None:
                raw = augment(raw, moves[begin : begin + count], fill=augmentation.fill)
            mean, std = split.mean[:, None, None], split.std[:, None, None]
            assert torch.equal(x, (raw.float() - mean) / std)
            assert torch.equal(y, split.y_train[chosen])


def test_zeros_at_the_edges_are_those_of_normalized_images():
    split, generator = images(), torch.Generator().manual_seed(3)
    augmentation = Augmentation(shift=2, fill="zero", rounding="uniform")
    fed = feed(split, augmentation=augmentation)
    fed.shuffle()
    order, moves = torch.randperm(10, generator=generator), augmentation.draw(10, 4, generator)
    x, _ = fed.take(4)
    assert torch.equal(x, augment(split.inputs(split.x_train[order[:4]]), moves[:4], fill="zero"))
    shifted = moves[:4, :2].abs().sum(1) > 0
    assert ((x == 0).all(1).sum((1, 2)) > 0).equal(shifted)


def test_drawn_batches_are_random_examples_one_batch_after_the_other():
    split, generator = images(), torch.Generator().manual_seed(3)
    fed = Feed(split, batch=4, augmentation=None, seed=3, device=CPU, drawn=5)
    for _ in range(2):
        fed.shuffle()
        for _ in range(5):
            _, y = fed.take(4)
            assert torch.equal(y, split.y_train[torch.randint(0, 10, (4,), generator=generator)])


def test_what_a_left_out_batch_would_have_held_comes_in_other_epochs():
    fed = feed(images(), batch=4)
    seen = set()
    for _ in range(20):
        fed.shuffle()
        for _ in range(2):
            seen |= set(fed.take(4)[1].tolist())
        assert fed._at.item() == 8
    assert seen == set(range(10))


def test_from_the_generators_state_the_same_batches_come_again():
    augmentation = Augmentation(shift=2)
    fed, again = feed(images(), augmentation=augmentation), feed(images(), seed=99, augmentation=augmentation)
    fed.shuffle()
    again.generator.set_state(fed.generator.get_state())
    fed.shuffle()
    again.shuffle()
    for count in (4, 4, 2):
        for one, other in zip(fed.take(count), again.take(count), strict=True):
            assert torch.equal(one, other)


def test_other_random_numbers_change_nothing():
    fed, again = feed(images()), feed(images())
    torch.manual_seed(0)
    fed.shuffle()
    torch.manual_seed(1)
    torch.rand(5)
    again.shuffle()
    assert torch.equal(fed.take(4)[0], again.take(4)[0])


def test_a_text_is_fed_as_it_is_with_a_label_for_every_character():
    x = torch.randint(0, 9, (10, 5), generator=torch.Generator().manual_seed(0))
    fed = feed(Split(x, x + 1, x, x + 1))
    fed.shuffle()
    taken, labels = fed.take(4)
    assert taken.dtype == torch.int64
    assert torch.equal(labels, taken + 1)


def test_examples_in_a_file_train_as_those_in_memory(tmp_path):
    """As for ImageNet: a read-only map of a file."""
    its = Task("images", task("digits").source, "c10-cnn1-light", options=(("classes", 10),)).lasting(1)
    its = replace(its, augmentation=Augmentation(shift=2))
    split = images(count=24, side=16)
    file = tmp_path / "images.bin"
    file.write_bytes(split.x_train.numpy().tobytes())
    mapped = torch.from_file(str(file), shared=False, size=split.x_train.numel(), dtype=torch.uint8)
    there = replace(split, x_train=mapped.reshape(split.x_train.shape))
    before = file.read_bytes()
    trial = Trial(its, Recipe("", 0.01))
    one, other = stepped(trial, split), stepped(trial, there)
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert file.read_bytes() == before


class Elsewhere(torch.Tensor):
    """Examples that claim to be on another device, and accept only indices of that device."""

    @property
    def device(self):
        return torch.device("meta")

    def __getitem__(self, index):
        assert index.arrived_at == self.device
        return self.as_subclass(torch.Tensor)[index.as_subclass(torch.Tensor)]


class Index(torch.Tensor):
    arrived_at = None

    def to(self, device):
        moved = self.as_subclass(torch.Tensor).as_subclass(Index)
        moved.arrived_at = torch.device(device)
        return moved


def test_examples_that_lie_elsewhere_are_looked_up_there_and_moved():
    split = images()
    here, there = feed(split), feed(replace(split, x_train=split.x_train.as_subclass(Elsewhere)))
    assert here.resident
    assert not there.resident
    here.shuffle()
    there.shuffle()
    there._order = there._order.as_subclass(Index)
    x, y = there.take(4)
    expected = here.take(4)
    assert np.array_equal(x.as_subclass(torch.Tensor), expected[0])
    assert np.array_equal(y.as_subclass(torch.Tensor), expected[1])


def test_passes_follow_each_other_each_in_an_order_of_its_own():
    split = Split(torch.arange(6.0), torch.arange(6), torch.zeros(1), torch.zeros(1))
    feed = Feed(split, batch=4, augmentation=None, seed=3, device=CPU, passes=2)
    feed.shuffle()
    taken = torch.cat([feed.take(4)[1] for _ in range(3)])
    generator = torch.Generator().manual_seed(3)
    assert taken.tolist() == [*torch.randperm(6, generator=generator), *torch.randperm(6, generator=generator)]
