"""A recorded training and its copy, compared with `record` and `replay` in a plain loop."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import gyroscope
from gyroscope.control.rates import Rates, record, replay
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.tangents import Tangents
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.training import RATES, train
from gyroscope_lab.training.trial import Trial
from lab.trainings import stepped

DIGITS = task("digits").lasting(2)
SPLIT = DIGITS.source.load()
RECORDED = Recipe("RMSprop", 3.0**-6, optimizer="rmsprop", records=True)
COPY = Recipe("AdaptCopy", 1.0, control="layca", copies=RECORDED)


def batches(seed, epochs=2):
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        for batch in torch.randperm(200, generator=generator).split(32):
            yield epoch, SPLIT.x_train[batch], SPLIT.y_train[batch]


def loop(model, optimizer, *, seed, cut=True):
    """Two epochs, the rate cut by five for the second."""
    rate = optimizer.param_groups[0]["lr"]
    for epoch, x, y in batches(seed):
        if cut:
            optimizer.param_groups[0]["lr"] = rate / 5**epoch
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.fixture(scope="module")
def rates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    train(Trial(replace_cut(DIGITS), RECORDED, seed=4), SPLIT, folder=folder)
    return Rates.load(folder / RATES)


def replace_cut(its):
    return replace(its, schedule=replace(its.schedule, cuts=(0.5,)))


def test_the_angles_of_a_recorded_training_are_those_of_a_loop_with_record(rates):
    model = DIGITS.network(4)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3.0**-6, alpha=0.9, eps=1e-7)
    with record(model, optimizer) as recorder:
        loop(model, optimizer, seed=4)
    assert rates.layers == recorder.rates.layers
    assert rates.tangents.shape == (14, 7)
    assert torch.equal(rates.tangents, recorder.rates.tangents)


def test_recording_does_not_change_the_training():
    plain, recorded = (stepped(Trial(DIGITS, replace(RECORDED, records=one)), SPLIT) for one in (False, True))
    for a, b in zip(plain.model.parameters(), recorded.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_training_that_copies_is_a_loop_with_replay(rates):
    model = DIGITS.network(4)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = gyroscope.Layca(inner, model, others="frozen")
    replay(optimizer, rates)
    loop(model, optimizer, seed=4, cut=False)
    copied = stepped(Trial(replace_cut(DIGITS), COPY, seed=4), SPLIT, rates=rates)
    for a, b in zip(model.parameters(), copied.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_every_layer_of_a_training_that_copies_turns_as_recorded(rates, tmp_path):
    train(Trial(DIGITS, COPY, seed=4, every=1), SPLIT, rates=rates, folder=tmp_path)
    with gyroscope.load(tmp_path) as run:
        turned = np.tan(run.series("rate")[1:])
    assert turned == pytest.approx(rates.tangents.numpy(), rel=2e-3)


def test_a_training_that_copies_ends_where_what_it_copies_ended(rates, tmp_path):
    short = Rates(rates.layers, rates.tangents[:7])
    result = train(Trial(DIGITS, COPY), SPLIT, rates=short, folder=tmp_path)
    assert len(result.loss) == 1
    assert result.ended == "the training that is copied ended in epoch 1"
    whole = train(Trial(DIGITS.lasting(1), COPY), SPLIT, rates=rates)
    assert whole.ended is None
    assert whole.loss == result.loss


def test_what_a_copy_records_is_what_it_was_given(rates, tmp_path):
    """A copy can be copied in turn."""
    train(Trial(DIGITS, replace(COPY, records=True)), SPLIT, rates=rates, folder=tmp_path)
    assert torch.equal(Rates.load(tmp_path / RATES).tangents, rates.tangents)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: None, "`rates` must be those of RMSprop, which AdaptCopy copies, got None"),
        (lambda r: Rates(r.layers, r.tangents[:10]), "`rates` must be those of whole epochs of 7 steps, got 10 steps"),
        (lambda r: Rates(r.layers, r.tangents[:0]), "`rates` must be those of whole epochs of 7 steps, got 0 steps"),
        (
            lambda r: Rates(r.layers, r.tangents * torch.nan),
            "`rates` must be finite: the training in which they were recorded diverged",
        ),
        (
            lambda r: Rates(r.layers[1:], r.tangents[:, 1:]),
            r"`rates` must be those of the layers \['conv1\.w.*', 'classifier\.weight'\]",
        ),
    ],
    ids=["none", "part of an epoch", "empty", "not finite", "other layers"],
)
def test_rates_that_cannot_be_copied_are_refused_before_anything_is_written(rates, tmp_path, change, says):
    with pytest.raises(LabError, match=says):
        train(Trial(DIGITS, COPY), SPLIT, rates=change(rates), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_was_recorded_so_far_takes_no_more_room_than_that(tmp_path):
    model = DIGITS.network(0)
    tangents = Tangents.blank(model, 10_000, torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    tangents.step(optimizer)
    tangents.rates.save(tmp_path / RATES)
    assert Rates.load(tmp_path / RATES).tangents.shape == (1, 7)
    assert (tmp_path / RATES).stat().st_size < 10_000
