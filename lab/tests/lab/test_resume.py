"""Interrupted and resumed trainings equal uninterrupted ones, bit for bit."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import torch

import forked
import gyroscope
from gyroscope.base import whole_file
from gyroscope.control.rates import Rates
from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.errors import LabError
from gyroscope_lab.training import checkpoint
from gyroscope_lab.training.recipe import CONTROLS, OPTIMIZERS, Recipe
from gyroscope_lab.training.training import RATES, WEIGHTS, Training, train
from gyroscope_lab.training.trial import Trial
from lab.killed import begin
from lab.trainings import (
    DROPOUT,
    HELD,
    TEXT,
    WRITES,
    StoppedError,
    equal_curves,
    equal_tensors,
    interrupted,
    recorded,
    stopping,
)

SPLIT = HELD.source.load()
# Small, with biases and batch normalization.
MLP = replace(
    HELD,
    name="mlp",
    model="mlp-3x16",
    options=(("batch_norm", True), ("affine", True), ("biases", True), ("inputs", 64)),
)
SGD = Recipe("SGD", 0.1)
RECORDED = Recipe("RMSprop", 3.0**-5, optimizer="rmsprop", records=True)
COPY = Recipe("AdaptCopy", 1.0, control="layca", copies=RECORDED)
# What depends on more than the present: the step before, and how long ago somebody looked more closely.
DETAILS = {"alignment", "dying", "full", "dying_channels", "full_channels", "activation_mean", "nu", "activation_rank"}
DETAILS |= {"moment_p10", "moment_p50", "moment_p90", "gradient_carried", "norm_evaluates"}
DETAILS |= {"input_mean", "input_rms", "input_low", "input_high", "softmax_twice", "output_information"}


def assert_same_folders(one, other):
    """Results, weights, recorded angles and runs are equal, bit for bit."""
    results = [json.loads((folder / "result.json").read_text()) for folder in (one, other)]
    for result in results:
        result["result"].pop("seconds")
    assert results[0] == results[1]
    for name in (WEIGHTS, RATES):
        assert (one / name).exists() == (other / name).exists()
        if (one / name).exists():
            assert equal_tensors(torch.load(one / name), torch.load(other / name))
    (steps, curves, numbers), (others_steps, others_curves, others_numbers) = recorded(one), recorded(other)
    assert steps == others_steps
    assert numbers == others_numbers
    for name in curves:
        if name not in DETAILS:
            assert equal_curves(curves[name], others_curves[name]), name
        elif name in others_curves:
            both = np.isfinite(curves[name]) & np.isfinite(others_curves[name])
            assert np.array_equal(curves[name][both], others_curves[name][both]), name
    left = {path.name for path in other.iterdir()}
    assert checkpoint.FILE not in left
    assert [name for name in left if name.endswith((".new", "-wal", "-shm"))] == []


def recipes():
    for optimizer, control in itertools.product(OPTIMIZERS, [None, *CONTROLS]):
        momentum = {"sgd": 0.9, "rmsprop": 0.5}.get(optimizer, 0.0)
        yield Recipe(
            f"{optimizer} under {control}", 0.01, optimizer=optimizer, control=control, weight_decay=1e-3,
            momentum=momentum, nesterov=optimizer == "sgd", others="inner", records=True,
            alpha=0.0 if control is None else 0.3,
        )  # fmt: skip


@pytest.mark.parametrize("recipe", list(recipes()), ids=lambda recipe: recipe.name)
def test_an_interrupted_training_ends_as_one_in_one_go(recipe, tmp_path):
    trial = Trial(MLP.lasting(2), recipe, seed=3, keeps=True)
    whole = train(trial, SPLIT, folder=tmp_path / "whole")
    assert interrupted(trial, SPLIT, tmp_path / "parts", at=1) == whole
    assert_same_folders(tmp_path / "whole", tmp_path / "parts")


MOVED = replace(DROPOUT, augmentation=Augmentation(shift=1))
KINDS = {
    "digits": Trial(HELD, Recipe("Layca", 3.0**-3, control="layca", alpha=-0.6)),
    "dropout and augmentation": Trial(MOVED, SGD),
    "half precision": Trial(MLP, SGD, precision="bf16"),
    "warm-up": Trial(replace(MLP, schedule=replace(HELD.schedule, warmup=2.5)), SGD),
    "one layer": Trial(MLP, replace(SGD, only=1), every=1),
    "scaled, LARS": Trial(MLP, Recipe("LARS", 3.0**-3, control="lars", scale=0.25)),
    "the last weights": Trial(replace(MLP, tests="last"), SGD),
}


@pytest.mark.parametrize("name", KINDS)
def test_it_does_not_matter_after_which_epoch_or_how_often_it_is_interrupted(name, tmp_path):
    trial = replace(KINDS[name], keeps=True, seed=5)
    whole = train(trial, SPLIT, folder=tmp_path / "whole")
    assert interrupted(trial, SPLIT, tmp_path / "at the end", at=3) == whole
    assert_same_folders(tmp_path / "whole", tmp_path / "at the end")
    with pytest.raises(StoppedError):
        train(trial, SPLIT, folder=tmp_path / "twice", save_every=0.0, on_epoch=stopping(1))
    assert interrupted(trial, SPLIT, tmp_path / "twice", at=2) == whole
    assert_same_folders(tmp_path / "whole", tmp_path / "twice")


def test_a_training_on_text_goes_on(tmp_path):
    split = TEXT.split(context=10, validation=0.1)
    trial = Trial(replace(WRITES, tests="best"), Recipe("Adam", 0.01, optimizer="adam"), keeps=True)
    whole = train(trial, split, folder=tmp_path / "whole")
    assert interrupted(trial, split, tmp_path / "parts", at=1) == whole
    assert_same_folders(tmp_path / "whole", tmp_path / "parts")


def test_a_training_that_copies_goes_on_with_the_rates_of_its_step(tmp_path):
    train(Trial(MLP, RECORDED), SPLIT, folder=tmp_path / "source")
    rates = Rates.load(tmp_path / "source" / RATES)
    trial = Trial(MLP, COPY, keeps=True, every=1)
    whole = train(trial, SPLIT, folder=tmp_path / "whole", rates=rates)
    assert interrupted(trial, SPLIT, tmp_path / "parts", at=2, rates=rates) == whole
    assert_same_folders(tmp_path / "whole", tmp_path / "parts")


def test_the_state_of_the_optimizer_is_that_of_one_go(tmp_path):
    """Also for state that no result shows: buffers, step counts, and the radii of Layca."""
    for recipe in (
        Recipe("momentum", 0.05, momentum=0.9),
        Recipe("Adam-Layca", 0.01, optimizer="adam", control="layca", others="inner"),
    ):
        trial = Trial(MLP, recipe)
        whole = Training(trial, SPLIT, folder=tmp_path / f"{recipe.name}-a")
        with pytest.raises(StoppedError):
            train(trial, SPLIT, folder=tmp_path / f"{recipe.name}-b", save_every=0.0, on_epoch=stopping(2))
        part = Training(trial, SPLIT, folder=tmp_path / f"{recipe.name}-b")
        assert part.epoch == 2
        for training in (whole, part):
            for _ in training.proceed():
                pass
            training.close()
        state = whole.optimizer.state_dict()
        assert state["state"]
        assert equal_tensors(part.optimizer.state_dict(), state)
        assert equal_tensors(part.model.state_dict(), whole.model.state_dict())
        assert equal_tensors(part.gauge.initial, whole.gauge.initial)
        assert torch.equal(part.feed.generator.get_state(), whole.feed.generator.get_state())


def test_what_ended_early_is_not_trained_on(tmp_path):
    stops = replace(HELD, stop_at=100.0)
    whole = train(Trial(stops, SGD), SPLIT)
    epochs = []
    with pytest.raises(StoppedError):
        train(Trial(stops, SGD), SPLIT, folder=tmp_path, save_every=0.0, on_epoch=stopping(1))
    again = train(Trial(stops, SGD), SPLIT, folder=tmp_path, on_epoch=lambda training: epochs.append(training.epoch))
    assert again == whole
    assert epochs == []
    with gyroscope.load(tmp_path) as run:
        assert whole.ended in [event.text for event in run.events]


def test_without_a_checkpoint_a_training_begins_again_and_its_run_is_whole(tmp_path):
    trial = Trial(HELD, SGD, keeps=True)
    train(trial, SPLIT, folder=tmp_path / "whole")
    with pytest.raises(StoppedError):
        train(trial, SPLIT, folder=tmp_path / "parts", on_epoch=stopping(2))
    assert not (tmp_path / "parts" / checkpoint.FILE).exists()
    train(trial, SPLIT, folder=tmp_path / "parts")
    assert_same_folders(tmp_path / "whole", tmp_path / "parts")


def test_a_checkpoint_is_written_as_often_as_asked(tmp_path):
    seen = []

    def look(training):
        path = tmp_path / checkpoint.FILE
        seen.append(checkpoint.load(tmp_path, key=training.trial.key)["epoch"] if path.exists() else None)

    train(Trial(HELD, SGD), SPLIT, folder=tmp_path, save_every=0.0, on_epoch=look)
    train(Trial(HELD, SGD), SPLIT, folder=tmp_path, save_every=1e9, on_epoch=look)
    assert seen == [1, 2, 3, None, None, None]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Trainings that were killed repeatedly at random moments, and one that was not."""
    root = tmp_path_factory.mktemp("killed")
    forked.start(begin, str(root))
    count, kills = map(int, (root / "counts").read_text().split())
    return root, count, kills


def test_a_training_that_is_killed_at_any_moment_ends_as_one_in_one_go(killed):
    root, count, kills = killed
    assert kills >= 6
    for number in range(count):
        assert_same_folders(root / "whole", root / f"killed-{number}")


def test_rates_that_a_killed_process_left_half_written_are_gone_when_the_training_ends(tmp_path):
    trial = Trial(MLP.lasting(2), RECORDED)
    train(trial, SPLIT, folder=tmp_path / "whole")
    with pytest.raises(StoppedError):
        train(trial, SPLIT, folder=tmp_path / "killed", save_every=0.0, on_epoch=stopping(1))
    writing = whole_file(tmp_path / "killed" / RATES)
    new = writing.__enter__()  # never left, as by a process that is killed
    assert new.exists()
    train(trial, SPLIT, folder=tmp_path / "killed")
    assert_same_folders(tmp_path / "whole", tmp_path / "killed")


# Checkpoints that cannot be resumed.


def half_trained(folder, trial=None):
    with pytest.raises(StoppedError):
        train(trial or Trial(MLP, SGD), SPLIT, folder=folder, save_every=0.0, on_epoch=stopping(2))
    return folder / checkpoint.FILE


def truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path):
    path.write_bytes(b"")


def made_of_noise(path):
    path.write_bytes(b"no checkpoint" * 100)


def flipped(path):
    """Flip one bit of a weight, which torch.load alone does not notice."""
    with ZipFile(path) as file:
        place = max((one for one in file.infolist() if "/data/" in one.filename), key=lambda one: one.file_size)
        content = file.read(place)
    bytes_ = bytearray(path.read_bytes())
    at = bytes_.find(content)
    assert at > 0
    bytes_[at + len(content) // 2] ^= 64
    path.write_bytes(bytes_)


def changed(change):
    def save(path):
        state = torch.load(path)
        checkpoint.save(path.parent, change(state))

    return save


DAMAGES = {
    "truncated": (truncated, "cannot be read"),
    "empty": (emptied, "cannot be read"),
    "noise": (made_of_noise, "cannot be read"),
    "a flipped bit": (flipped, r"cannot be read \(ValueError: .* in it is damaged\)"),
    "of another trial": (changed(lambda state: state | {"key": "abc"}), "belongs to another trial"),
    "a list": (changed(lambda state: [state]), "cannot be read"),
    "without its epoch": (changed(lambda s: {k: v for k, v in s.items() if k != "epoch"}), "cannot be resumed"),
    "without weights": (changed(lambda state: state | {"model": {}}), "cannot be resumed"),
    "of other layers": (changed(lambda state: state | {"initial": state["initial"][1:]}), "cannot be resumed"),
    "without its run": (changed(lambda state: state | {"monitor": None}), "cannot be resumed"),
    "without random numbers": (
        changed(lambda state: state | {"random": torch.zeros(3, dtype=torch.uint8)}),
        "cannot be resumed",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_cannot_be_gone_on_from_is_refused_by_name_and_nothing_is_lost(damage, tmp_path):
    act, says = DAMAGES[damage]
    path = half_trained(tmp_path / "run")
    act(path)
    content, before = path.read_bytes(), recorded(path.parent)
    with pytest.raises(LabError, match=rf"(?s)^{path} {says}.*\. Delete it to train from the start"):
        train(Trial(MLP, SGD), SPLIT, folder=path.parent)
    assert path.read_bytes() == content
    steps, curves, numbers = recorded(path.parent)
    assert steps == before[0] == [0, 3, 6]
    assert numbers == before[2]
    assert all(equal_curves(curves[name], before[1][name]) for name in curves)
    path.unlink()
    assert train(Trial(MLP, SGD), SPLIT, folder=path.parent) == train(Trial(MLP, SGD), SPLIT)


def test_a_full_disk_stops_the_training_and_keeps_the_checkpoint_before(tmp_path):
    trial = Trial(MLP, SGD)
    path = half_trained(tmp_path)
    (tmp_path / f"{checkpoint.FILE}.new").symlink_to("/dev/full")
    with pytest.raises(LabError, match=rf"^{path}.new cannot be written .*\. The previous checkpoint, if any, is kept"):
        train(trial, SPLIT, folder=tmp_path, save_every=0.0)
    assert checkpoint.load(tmp_path, key=trial.key)["epoch"] == 2
    (tmp_path / f"{checkpoint.FILE}.new").unlink()
    assert train(trial, SPLIT, folder=tmp_path, save_every=0.0) == train(trial, SPLIT)


def test_what_a_checkpoint_holds_is_not_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    torch.save({"key": Trial(MLP, SGD).key, "epoch": Trap()}, tmp_path / checkpoint.FILE)
    with pytest.raises(LabError, match="cannot be read"):
        checkpoint.load(tmp_path, key=Trial(MLP, SGD).key)
    assert not (tmp_path / "sprung").exists()


def test_a_checkpoint_of_captured_steps_is_gone_on_from_step_by_step(tmp_path):
    """The rates on the device are not loaded: here they are numbers that follow the schedule."""
    recipe = Recipe("Layca", 3.0**-3, control="layca")
    its = replace(MLP, schedule=replace(MLP.schedule, cuts=(0.7,)))
    captured = Training(Trial(its, recipe), SPLIT, folder=tmp_path, captured=True, save_every=0.0)
    for _ in captured.proceed():
        if captured.epoch == 1:
            break
    assert isinstance(captured.optimizer.param_groups[0]["lr"], torch.Tensor)
    captured.close()
    alone = Training(Trial(its, recipe), SPLIT, folder=tmp_path)
    assert alone.epoch == 1
    assert type(alone.optimizer.param_groups[0]["lr"]) is float
    for _ in alone.proceed():
        assert alone.optimizer.param_groups[0]["lr"] == pytest.approx(3.0**-3 / (5 if alone.epoch == 2 else 1))
    assert alone.finish().loss == pytest.approx(train(Trial(its, recipe), SPLIT).loss, rel=1e-5)
