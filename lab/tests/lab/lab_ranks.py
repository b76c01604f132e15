"""Tests of one training on two ranks; test_ranks starts them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import gyroscope
import two_ranks
from gyroscope.control.rates import Rates
from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.data.split import Split
from gyroscope_lab.engine.ranks import run_on_ranks
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.checkpoint import FILE
from gyroscope_lab.training.feed import Feed
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.spread import Spread, from_first
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.training import Parallel, Training, train
from gyroscope_lab.training.trial import Trial

# No batch statistics; 200 examples by 67, so that shares are of 33 and 34; a validation set of odd size.
PLAIN = (("biases", True), ("init", "glorot_uniform"), ("inputs", 64))
MLP: Task = replace(task("digits-mlp"), options=PLAIN).lasting(4)
MLP = replace(MLP, schedule=replace(MLP.schedule, batch=67))
HELD = replace(MLP, source=replace(MLP.source, validation=0.095), tests="best")
SGD = Recipe("SGD", 3.0**-2, momentum=0.9, weight_decay=1e-3)
LAYCA = Recipe("Layca", 3.0**-4, control="layca", alpha=-0.3, momentum=0.9)
ADAM = Recipe("Adam-Layca", 3.0**-5, optimizer="adam", control="layca", others="inner")
RECORDED = Recipe("RMSprop", 3.0**-6, optimizer="rmsprop", records=True)
KINDS: tuple[Parallel, ...] = ("ddp", "fsdp")


def alone(trial: Trial, split: Split, **options: Any) -> Result:
    """The training of one process: a `Training` without ranks."""
    training = Training(trial, split, **options)
    for _ in training.proceed():
        pass
    return training.finish()


def numbers(result: Result) -> list[float]:
    rows = [*result.rotation, *result.norms, result.loss, result.accuracy, result.validation]
    return [number for row in rows for number in row] + [result.train_accuracy, result.test_accuracy, result.tested]


def assert_same(result: Result, other: Result) -> None:
    assert numbers(result) == pytest.approx(numbers(other), rel=2e-4, abs=2e-6)


def shares_of_ranks_are_the_batches_of_one_process(_: Path) -> None:
    split = MLP.source.load()
    images = replace(split, x_train=split.x_train.reshape(-1, 1, 8, 8))
    for augmentation in (None, Augmentation()):
        options = {"batch": 25, "augmentation": augmentation, "seed": 3, "device": torch.device("cpu")}
        whole = Feed(images, **options)
        parts = [Feed(images, share=(part, 3), **options) for part in range(3)]
        for feed in (whole, *parts):
            feed.shuffle()
        for count in (25, 25, 7):
            x, y = whole.take(count)
            taken = [part.take(count) for part in parts]
            assert torch.equal(torch.cat([x for x, _ in taken]), x)
            assert torch.equal(torch.cat([y for _, y in taken]), y)
            assert max(len(y) for _, y in taken) - min(len(y) for _, y in taken) <= 1


def two_ranks_train_as_one_process(_: Path) -> None:
    for its, recipe in ((MLP, SGD), (HELD, LAYCA), (HELD, ADAM)):
        split = its.source.load()
        expected = alone(Trial(its, recipe, seed=1), split)
        assert len(expected.validation) == (4 if its is HELD else 0)
        for parallel in KINDS:
            assert_same(train(Trial(its, recipe, seed=1), split, parallel=parallel), expected)


def a_trained_network_of_shards_has_the_weights_of_one_process(folder: Path) -> None:
    split = MLP.source.load()
    trial = Trial(MLP, LAYCA, keeps=True)
    archive = Archive(folder / f"alone-{dist.get_rank()}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gyroscope.monitor.resume.rank", lambda: 0)
        alone(trial, split, folder=archive.folder(trial))
    expected = archive.weights(trial)
    for parallel in KINDS:
        shared = Archive(folder / parallel)
        train(trial, split, folder=shared.folder(trial), parallel=parallel)
        found = shared.weights(trial)
        for kind in ("initial", "tested"):
            assert found[kind].keys() == expected[kind].keys()
            for name, value in found[kind].items():
                assert type(value) is torch.Tensor
                torch.testing.assert_close(value, expected[kind][name], rtol=1e-4, atol=1e-6)


def ranks_write_one_run(folder: Path) -> None:
    split = HELD.source.load()
    trial = Trial(HELD, LAYCA)
    for parallel in KINDS:
        place = folder / f"{parallel}-{dist.get_rank()}"  # what rank 1 writes, if it does, cannot be missed
        result = train(trial, split, folder=place, parallel=parallel, save_every=0.0)
        if dist.get_rank() == 1:
            assert not place.exists()
            continue
        assert not (place / FILE).exists()
        kept = json.loads((place / "result.json").read_text())["result"]
        assert kept["test_accuracy"] == result.test_accuracy
        with gyroscope.load(place) as run:
            assert run.steps.tolist() == [0, 3, 6, 9, 12]
            assert run.series("rotation")[-1] == pytest.approx(result.rotation[-1], rel=1e-3)
            assert run.scalars["loss"].values.tolist() == pytest.approx(result.loss)
            assert f"divided among 2 processes ({parallel})" in [event.text for event in run.events]


def an_interrupted_training_goes_on_however_it_is_divided(folder: Path) -> None:
    """Half by ranks, half by ranks of the other kind or by one process, equals one process without interruption."""
    split = HELD.source.load()

    def interrupt(training: Training) -> None:
        if training.epoch == 2:
            training.save()
            raise KeyboardInterrupt

    for recipe, first, then in ((SGD, "ddp", "ddp"), (SGD, "fsdp", "fsdp"), (ADAM, "ddp", "fsdp"), (ADAM, "fsdp", "")):
        trial = Trial(HELD, recipe, seed=2)
        place = folder / f"{recipe.name}-{first}-{then}"
        with pytest.raises(KeyboardInterrupt):
            train(trial, split, folder=place, parallel=first, on_epoch=interrupt)
        dist.barrier()
        assert (place / FILE).exists()
        expected = alone(trial, split)
        epochs: list[int] = []
        if then:
            note = {"on_epoch": lambda training, to=epochs: to.append(training.epoch)}
            assert_same(train(trial, split, folder=place, parallel=then, **note), expected)
            assert epochs == [3, 4]
        elif dist.get_rank() == 0:
            assert_same(alone(trial, split, folder=place), expected)
        dist.barrier()
        with gyroscope.load(place) as run:
            np.testing.assert_allclose(run.series("rotation"), expected.rotation, rtol=1e-3, atol=1e-6)


def rates_are_recorded_and_copied(folder: Path) -> None:
    split = MLP.source.load()
    copy = Trial(MLP, Recipe("copy", 1.0, control="layca", copies=RECORDED))
    assert copy.source is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gyroscope.monitor.resume.rank", lambda: 0)
        alone(copy.source, split, folder=folder / f"alone-{dist.get_rank()}")
    rates = Rates.load(folder / f"alone-{dist.get_rank()}" / "rates.pt")
    expected = alone(copy, split, rates=rates)
    for parallel in KINDS:
        train(copy.source, split, folder=folder / parallel, parallel=parallel)
        found = Rates.load(folder / parallel / "rates.pt")
        assert found.layers == rates.layers
        torch.testing.assert_close(found.tangents, rates.tangents, rtol=5e-3, atol=1e-6)
        assert_same(train(copy, split, rates=rates, parallel=parallel), expected)


def every_rank_of_a_sharded_training_has_its_part(_: Path) -> None:
    training = Spread(Trial(MLP, SGD), MLP.source.load(), parallel="fsdp")
    next(training.proceed())
    for parameter in training.model.parameters():
        assert isinstance(parameter, DTensor)
        assert len(parameter.to_local()) <= -(-len(parameter) // 2)
        assert isinstance(training.optimizer.state[parameter]["momentum_buffer"], DTensor)


def blocks_of_a_chain_are_sharded_one_by_one(_: Path) -> None:
    """The network has batch statistics; all ranks use those of rank 0."""
    digits = task("digits-resnet").lasting(1)
    training = Spread(Trial(digits, SGD), digits.source.load(), parallel="fsdp")
    assert sum(type(module).__name__.startswith("FSDP") for module in training.model.modules()) == 10
    for _ in training.proceed():
        pass
    result = training.finish()
    said = [None, None]
    dist.all_gather_object(said, [result.test_accuracy, [b.double().sum().item() for b in training.model.buffers()]])
    assert said[0] == said[1]


def what_a_training_of_ranks_ends_with_is_the_same_on_all(_: Path) -> None:
    stopped = replace(MLP, stop_at=0.7)
    digits = task("digits").lasting(2)
    for trial in (Trial(stopped, SGD), Trial(digits, LAYCA)):
        for parallel in KINDS:
            said: list[Any] = [None, None]
            result = train(trial, trial.task.source.load(), parallel=parallel)
            dist.all_gather_object(said, replace(result, seconds=0.0))
            assert said[0] == said[1]
        if trial.task is stopped:
            assert result.ended is not None
            assert len(result.loss) < 4


def activations_are_dropped_differently_on_every_rank(_: Path) -> None:
    """The same holds after resuming from a checkpoint, which is that of rank 0."""
    torch.manual_seed(0)  # as every process begins with the same
    training = Spread(Trial(MLP, SGD, seed=5), MLP.source.load())
    drawn: list[float] = []
    training.model.register_forward_hook(lambda *_: drawn.append(torch.rand(1).item()))
    for _ in range(2):
        next(training.proceed())
        training._load(from_first(lambda: training._state() | {"epoch": 1}))
    said: list[Any] = [None, None]
    dist.all_gather_object(said, drawn)
    assert len(set(said[0] + said[1])) == 4


def batches_that_are_too_small_to_share_are_refused(folder: Path) -> None:
    odd = replace(MLP, schedule=replace(MLP.schedule, batch=199))
    place = folder / "run"
    with pytest.raises(LabError, match=r"^2 processes cannot share a batch of 1, the smallest of an epoch of 200"):
        train(Trial(odd, SGD), odd.source.load(), folder=place)
    assert not place.exists()
    whole = replace(odd, schedule=replace(odd.schedule, drop_last=True))
    assert_same(train(Trial(whole, SGD), MLP.source.load()), alone(Trial(whole, SGD), MLP.source.load()))
    with pytest.raises(LabError, match="`parallel` must be 'ddp' or 'fsdp', got 'dpp'"):
        train(Trial(MLP, SGD), MLP.source.load(), parallel="dpp")


def an_archive_is_asked_and_written_by_rank_0(folder: Path) -> None:
    trial = Trial(MLP, LAYCA, seed=4)
    own = Archive(folder / f"archive-{dist.get_rank()}")
    notes: list[int] = []
    result = run_on_ranks(trial, own, tell=lambda note: notes.append(note.epoch))
    assert_same(result, alone(trial, MLP.source.load()))
    assert notes == ([1, 2, 3, 4] if dist.get_rank() == 0 else [])
    assert own.root.exists() == (dist.get_rank() == 0)
    again = run_on_ranks(trial, own, tell=lambda note: notes.append(note.epoch))
    assert again == result
    assert len(notes) in (0, 4)


def rates_to_copy_come_from_the_archive_of_rank_0(folder: Path) -> None:
    copy = Trial(MLP, Recipe("copy", 1.0, control="layca", copies=RECORDED), seed=6)
    own = Archive(folder / f"archive-{dist.get_rank()}")
    result = run_on_ranks(copy, own, parallel="fsdp")
    assert len(result.loss) == 4
    if dist.get_rank() == 0:
        assert copy.source is not None
        assert own.result(copy.source) is not None
        assert own.result(copy) == result


def what_fails_on_rank_0_is_said_on_all(folder: Path) -> None:
    trial = Trial(MLP, SGD, seed=7)
    own = Archive(folder / f"archive-{dist.get_rank()}")
    if dist.get_rank() == 0:
        place = own.folder(trial)
        place.mkdir(parents=True)
        (place / FILE).write_bytes(b"no checkpoint")
    with pytest.raises(LabError, match=r"^SGD, seed 7: .*checkpoint.pt cannot be read"):
        run_on_ranks(trial, own)


Claim = Callable[[Path], None]
CLAIMS: list[Claim] = [
    shares_of_ranks_are_the_batches_of_one_process,
    two_ranks_train_as_one_process,
    a_trained_network_of_shards_has_the_weights_of_one_process,
    ranks_write_one_run,
    an_interrupted_training_goes_on_however_it_is_divided,
    rates_are_recorded_and_copied,
    every_rank_of_a_sharded_training_has_its_part,
    blocks_of_a_chain_are_sharded_one_by_one,
    what_a_training_of_ranks_ends_with_is_the_same_on_all,
    activations_are_dropped_differently_on_every_rank,
    batches_that_are_too_small_to_share_are_refused,
    an_archive_is_asked_and_written_by_rank_0,
    rates_to_copy_come_from_the_archive_of_rank_0,
    what_fails_on_rank_0_is_said_on_all,
]


def rank(rank: int, folder: str) -> None:
    two_ranks.run(CLAIMS, rank, folder)
