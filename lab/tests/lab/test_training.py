import random
import shutil
from dataclasses import replace
from itertools import zip_longest

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import gyroscope
from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.data.source import Source
from gyroscope_lab.data.split import Split
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.training import WEIGHTS, Training, train, why_end
from gyroscope_lab.training.trial import Trial
from lab.trainings import DROPOUT, HELD, TEXT, WRITES, StoppedError, equal_tensors, recorded, stepped, stopping

DIGITS = task("digits")
SPLIT = DIGITS.source.load()
FEW = HELD.source.load()
SGD = Recipe("SGD", 3.0**-1, weight_decay=5e-3)
LAYCA = Recipe("Layca", 3.0**-3, control="layca", alpha=-0.6)
# Without batch normalization, which bears any rate.
BARE = replace(HELD, model="mlp-3x16", options=(("inputs", 64),))
MOVED = replace(DROPOUT, augmentation=Augmentation(shift=1))


@pytest.mark.parametrize(
    ("its", "recipe"), [(HELD, SGD), (HELD, LAYCA), (MOVED, SGD)], ids=["SGD", "Layca", "dropout and augmentation"]
)
def test_training_is_the_same_bit_for_bit_whatever_the_random_state(its, recipe):
    trial = Trial(its.lasting(2), recipe, seed=1)
    torch.manual_seed(1)
    first = stepped(trial, FEW)
    torch.manual_seed(2)
    again = stepped(trial, FEW)
    assert again.finish() == first.finish()
    assert equal_tensors(again.model.state_dict(), first.model.state_dict())


def test_another_seed_gives_another_training():
    one, other = (train(Trial(HELD.lasting(1), SGD, seed=seed), FEW) for seed in (1, 2))
    assert one.loss != other.loss


def test_the_seed_changes_the_order_and_what_is_dropped_even_from_equal_weights():
    weights = []
    for its in (HELD, DROPOUT):
        start = its.network(0).state_dict()
        for seed in (1, 2):
            training = Training(Trial(its.lasting(1), SGD, seed=seed), FEW)
            training.model.load_state_dict(start)
            training.feed.generator.manual_seed(7 if its is DROPOUT else seed)
            next(training.proceed())
            weights.append(next(iter(training.model.parameters())).detach())
    assert not torch.equal(weights[0], weights[1])  # of the order
    assert not torch.equal(weights[2], weights[3])  # of dropout, in the same order


@pytest.mark.parametrize("folder", [None, "run"])
def test_training_leaves_random_numbers_and_threads_as_they_were(tmp_path, folder):
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002  (the one that others may share)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    threads = torch.get_num_threads()
    where = None if folder is None else tmp_path / folder
    with pytest.raises(StoppedError):
        train(Trial(MOVED.lasting(2), SGD), FEW, folder=where, save_every=0.0, on_epoch=stopping(1))
    train(Trial(MOVED.lasting(2), SGD), FEW, folder=where)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()


def test_trainings_that_take_turns_do_not_disturb_each_other():
    trials = [Trial(MOVED.lasting(2), SGD, seed=seed) for seed in (0, 1)] + [Trial(HELD.lasting(2), LAYCA)]
    together = [Training(trial, FEW) for trial in trials]
    for _ in zip_longest(*[training.proceed() for training in together]):
        torch.rand(3)
    alone = [stepped(trial, FEW) for trial in trials]
    assert [one.finish() for one in together] == [one.finish() for one in alone]
    for one, other in zip(together, alone, strict=True):
        assert equal_tensors(one.model.state_dict(), other.model.state_dict())


def test_training_equals_a_plain_loop():
    """The loop, the batches, the cuts of the rate, and all numbers of the result are written out again."""
    split = Source("digits", validation=0.1).load()
    recipe, seed = SGD, 3
    result = train(Trial(DIGITS.lasting(10), recipe, seed=seed), split)

    model = DIGITS.network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.rate, weight_decay=recipe.weight_decay)
    initial = [parameter.detach().double().flatten() for parameter in model.parameters()]
    generator = torch.Generator().manual_seed(seed)
    for epoch, divisor in enumerate([1] * 8 + [5, 25]):
        optimizer.param_groups[0]["lr"] = recipe.rate / divisor
        order = torch.randperm(180, generator=generator)
        batches = [order[start : start + 32] for start in range(0, 180, 32)]
        assert [len(batch) for batch in batches] == [32] * 5 + [20]
        loss, right = 0.0, 0
        model.train()
        for batch in batches:
            outputs = model(split.x_train[batch])
            now = F.cross_entropy(outputs, split.y_train[batch])
            optimizer.zero_grad()
            now.backward()
            optimizer.step()
            loss += len(batch) * now.item()
            right += (outputs.argmax(1) == split.y_train[batch]).sum().item()
        model.eval()
        validated = (model(split.x_val).argmax(1) == split.y_val).sum().item()
        assert result.loss[epoch] == pytest.approx(loss / 180, rel=1e-6)
        assert result.accuracy[epoch] == pytest.approx(right / 180)
        assert result.validation[epoch] == pytest.approx(validated / 20)
        for layer, (parameter, w0) in enumerate(zip(model.parameters(), initial, strict=True)):
            w = parameter.detach().double().flatten()
            cosine = (w @ w0 / (w.norm() * w0.norm())).item()
            assert result.rotation[epoch + 1][layer] == pytest.approx(1 - cosine, abs=1e-9)
    for x, y, accuracy in (
        (split.x_test, split.y_test, result.test_accuracy),
        (split.x_train, split.y_train, result.train_accuracy),
    ):
        assert accuracy == pytest.approx((model(x).argmax(1) == y).double().mean().item())
    norms = [parameter.detach().norm().item() for parameter in model.parameters()]
    assert result.norms[0] == pytest.approx([w0.norm().item() for w0 in initial])
    assert result.norms[1] == pytest.approx(norms)
    assert len(result.norms) == 2
    assert result.tested == 10
    assert result.ended is None


def test_rotation_is_recorded_at_the_start_and_after_every_epoch():
    result = train(Trial(HELD, LAYCA), FEW)
    assert result.rotation[0] == [0.0] * 7
    assert len(result.rotation) == 4
    assert all(rotation > 0 for row in result.rotation[1:] for rotation in row)
    assert result.final_rotation == result.rotation[3]
    assert result.layers[-1] == "classifier.weight"


def test_layca_with_negative_alpha_rotates_the_first_layer_most():
    result = train(Trial(DIGITS.lasting(2), LAYCA), SPLIT)
    assert max(result.final_rotation) == max(result.final_rotation[:3])
    assert min(result.final_rotation) == result.final_rotation[-1]


def test_layca_keeps_the_norm_of_every_layer_and_sgd_does_not():
    for recipe, kept in ((LAYCA, True), (SGD, False)):
        before, after = train(Trial(DIGITS.lasting(1), recipe), SPLIT).norms
        assert (after == pytest.approx(before, rel=1e-5)) is kept


def test_the_network_learns():
    result = train(Trial(DIGITS.lasting(10), Recipe("Layca", 3.0**-3, control="layca")), SPLIT)
    assert result.train_accuracy == 1.0
    assert result.test_accuracy > 0.85
    assert result.loss[-1] < 0.1 < result.loss[0]


def test_accuracies_are_measured_without_dropout():
    training = stepped(Trial(replace(DROPOUT, tests="last").lasting(1), SGD), FEW)
    result = training.finish()
    training.model.eval()
    guesses = training.model(FEW.x_test).argmax(1)
    assert result.test_accuracy == pytest.approx((guesses == FEW.y_test).double().mean().item())
    training.model.train()
    assert not torch.equal(training.model(FEW.x_test).argmax(1), guesses)


def test_warm_up_and_cuts_are_the_rates_that_layers_turn_at(tmp_path):
    warm = replace(HELD, schedule=replace(HELD.schedule, epochs=4, warmup=1.5, cuts=(0.5, 0.75)))
    train(Trial(warm, replace(LAYCA, alpha=0.0), every=1), FEW, folder=tmp_path)
    rates = [warm.schedule.multiplier(epoch, step / 3) for epoch in range(4) for step in range(3)]
    assert rates[:6] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
    assert rates[6:] == pytest.approx([0.2] * 3 + [0.04] * 3)
    with gyroscope.load(tmp_path) as run:
        assert np.tan(run.series("rate")[1:, 0]) == pytest.approx(3.0**-3 * np.array(rates), rel=2e-3)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"follows": True}, "The trial has follows=True,"),
        ({"conditions": 2}, "The trial has conditions=2,"),
        ({"keeps": True, "follows": True}, "The trial has keeps=True and follows=True,"),
    ],
    ids=["follows", "conditions", "both"],
)
def test_measurements_without_a_folder_to_keep_them_in_are_refused(asked, said, tmp_path):
    trial = Trial(BARE.lasting(1), SGD, every=2, **asked)
    with pytest.raises(LabError, match=rf"{said} .* give one, train\(\.\.\., folder=\.\.\.\), or leave it out"):
        train(trial, FEW)
    assert train(trial, FEW, folder=tmp_path).loss == train(Trial(BARE.lasting(1), SGD), FEW).loss


# When training stops early.


def test_a_loss_that_is_no_number_stops_the_training_and_is_told(tmp_path):
    broken = Trial(BARE, Recipe("SGD", 1e20), keeps=True)
    result = train(broken, FEW, folder=tmp_path)
    assert result.diverged
    assert result.ended == f"diverged: the loss is {result.loss[-1]} in epoch 1; lower the rate"
    assert len(result.loss) == 1
    with gyroscope.load(tmp_path) as run:
        assert run.steps.tolist() == [0, 2, 3]  # the first step whose gradients are huge is measured too
        assert [event.text for event in run.events if event.kind == "note"] == [result.ended]
    assert Result.from_json(result.as_json()).diverged


def test_a_loss_that_is_reached_or_an_accuracy_that_is_not_stops_the_training(tmp_path):
    full = train(Trial(HELD, SGD), FEW)
    reached = train(Trial(replace(HELD, stop_at=full.loss[1]), SGD), FEW, folder=tmp_path)
    assert reached.loss == full.loss[:2]
    assert reached.ended == f"the loss has reached {full.loss[1]:g} in epoch 2"
    with gyroscope.load(tmp_path) as run:
        assert reached.ended in [event.text for event in run.events]
    failed = train(Trial(replace(HELD, fails=(0, full.accuracy[0])), SGD), FEW)
    assert failed.ended == f"does not learn: the training accuracy is {full.accuracy[0]:.3f} in epoch 1"
    assert not failed.diverged
    passed = train(Trial(replace(HELD, fails=(0, full.accuracy[0] - 0.01)), SGD), FEW)
    assert passed.ended is None


def test_a_loss_that_does_not_change_stops_a_training_that_may_stop():
    one = Split(FEW.x_train[:1], FEW.y_train[:1], FEW.x_test[:9], FEW.y_test[:9])
    plain = replace(HELD, tests="last").lasting(5)
    for stop_at, epochs in ((1e-9, 4), (None, 5)):
        result = train(Trial(replace(plain, stop_at=stop_at), Recipe("still", 0.0)), one)
        assert len(set(result.loss)) == 1
        assert len(result.loss) == epochs


def test_the_rules_for_stopping_are_the_protocols():
    """A loss at or below a bound, four equal losses, or an accuracy at or below a bound in one epoch."""
    cnn1 = task("c10-cnn1")

    def ends(loss, accuracy=None, its=cnn1, copied=None):
        accuracy = [1.0] * len(loss) if accuracy is None else accuracy
        return why_end(its, loss=loss, accuracy=accuracy, copied=copied) is not None

    assert ends([1e-4])
    assert not ends([1.01e-4])
    assert ends([2.0, 1.0, 1.0, 1.0, 1.0])
    assert not ends([2.0, 1.0, 1.0, 1.0])
    assert not ends([1.0, 1.0, 1.0, 1.0 + 1e-9])
    assert ends(list(range(8, 0, -1)), [0.9] * 7 + [0.2])  # epoch 7, counted from 0
    assert not ends(list(range(8, 0, -1)), [0.1] * 7 + [0.21])
    assert not ends(list(range(9, 0, -1)), [0.1] * 9)
    assert not ends(list(range(7, 0, -1)), [0.1] * 7)
    assert ends([float("inf")], its=task("c10-cnn2"))
    assert ends([float("nan")], its=task("c10-cnn2"))
    assert not ends([0.0, 0.0, 0.0, 0.0], its=task("c10-cnn2"))
    assert ends([1.0, 0.5], copied=2)
    assert not ends([1.0], copied=2)
    assert not ends([1.0, 0.5], copied=2, its=task("c10-cnn2").lasting(2))


# Which weights are tested.


def weights_of(training):
    return {name: value.clone() for name, value in training.model.state_dict().items()}


def test_the_weights_of_the_best_validation_accuracy_are_tested(tmp_path):
    """The first of them, if several epochs are equally good; the run and the rotations are of the last weights."""
    trial = Trial(replace(HELD, tests="best").lasting(6), Recipe("SGD", 0.5), keeps=True, every=4, seed=2)
    after = []
    result = train(trial, FEW, folder=tmp_path, on_epoch=lambda training: after.append(weights_of(training)))
    best = result.validation.index(max(result.validation)) + 1
    assert result.tested == best < 6
    kept = torch.load(tmp_path / WEIGHTS, weights_only=True)
    assert equal_tensors(kept["tested"], after[best - 1])
    model = HELD.network(0)
    model.load_state_dict(after[best - 1])
    model.eval()
    guesses = model(FEW.x_test).argmax(1)
    assert result.test_accuracy == pytest.approx((guesses == FEW.y_test).double().mean().item())
    last = replace(trial, task=replace(trial.task, tests="last"), keeps=False)
    assert result.test_accuracy != train(last, FEW).test_accuracy
    steps, curves, _ = recorded(tmp_path)
    assert steps[-2:] == [16, 18]  # the last is not one of every four, and measured at the end
    assert curves["rotation"][-1] == pytest.approx(result.rotation[-1], rel=1e-4)


def test_the_best_weights_of_a_training_that_diverged_are_those_before(tmp_path):
    wild = replace(BARE, schedule=replace(HELD.schedule, cuts=(0.5,), factor=1e-30)).lasting(4)
    after = []
    trial = Trial(wild, SGD, keeps=True)
    result = train(trial, FEW, folder=tmp_path, on_epoch=lambda training: after.append(weights_of(training)))
    assert result.diverged
    assert len(result.loss) == 3
    assert result.tested == result.validation.index(max(result.validation)) + 1 < 3
    kept = torch.load(tmp_path / WEIGHTS, weights_only=True)["tested"]
    assert equal_tensors(kept, after[result.tested - 1])
    assert all(value.isfinite().all() for value in kept.values())
    assert not any(value.isfinite().all() for value in after[2].values())


def test_kept_weights_are_those_at_the_start_and_those_tested(tmp_path):
    trial = Trial(replace(HELD, tests="last").lasting(1), LAYCA, keeps=True, seed=2)
    after = []
    train(trial, FEW, folder=tmp_path, on_epoch=lambda training: after.append(weights_of(training)))
    kept = torch.load(tmp_path / WEIGHTS, weights_only=True)
    assert equal_tensors(kept["tested"], after[0])
    assert equal_tensors(kept["initial"], {name: p.detach() for name, p in trial.network().named_parameters()})


# What is recorded.


@pytest.mark.parametrize("recipe", [SGD, LAYCA], ids=lambda recipe: recipe.name)
def test_a_recorded_training_is_the_same_and_its_run_holds_the_result(recipe, tmp_path):
    trial = Trial(DIGITS.lasting(3), recipe, seed=1)
    plain = train(trial, SPLIT)
    assert train(trial, SPLIT, folder=str(tmp_path / "run")) == plain
    with gyroscope.load(tmp_path / "run") as run:
        assert run.steps.tolist() == [0, 7, 14, 21]
        assert list(run.layers) == plain.layers
        assert run.series("rotation") == pytest.approx(np.array(plain.rotation), rel=1e-4, abs=1e-9)
        assert run.scalars["loss"].values.tolist() == plain.loss
        assert run.scalars["accuracy"].values.tolist() == plain.accuracy
        assert run.scalars["test_accuracy"].values.tolist() == [plain.test_accuracy]
        assert run.meta["trial"] == trial.description
        assert run.state == "ended"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "reference.pt",
        "result.json",
        "run.lock",
        "run.sqlite",
    ]


def test_a_training_that_fails_leaves_a_run_that_can_be_read(tmp_path):
    with pytest.raises(StoppedError):
        train(Trial(HELD, SGD), FEW, folder=tmp_path, on_epoch=stopping(2))
    steps, _, numbers = recorded(tmp_path)
    assert steps == [0, 3, 6]
    assert numbers["loss"][0] == [3, 6]


@pytest.mark.parametrize("save_every", [0.0, 1e9])
def test_a_run_that_cannot_be_recorded_is_no_result(tmp_path, save_every):
    """Otherwise there would be a result without its curves."""

    def remove(training):
        if training.epoch == 2:
            training.monitor.flush()
            shutil.rmtree(training.folder)
            training.folder.mkdir()

    with pytest.raises(LabError, match=rf"The run in {tmp_path}/run cannot be recorded"):
        train(Trial(HELD, SGD), FEW, folder=tmp_path / "run", save_every=save_every, on_epoch=remove)
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_result_that_cannot_be_written_leaves_the_checkpoint(tmp_path):
    trial = Trial(HELD, SGD)
    with pytest.raises(StoppedError):
        train(trial, FEW, folder=tmp_path, save_every=0.0, on_epoch=stopping(2))
    (tmp_path / "result.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        train(trial, FEW, folder=tmp_path)
    assert not (tmp_path / "result.json").exists()
    assert (tmp_path / "checkpoint.pt").exists()
    (tmp_path / "result.new").unlink()
    epochs = []
    assert train(trial, FEW, folder=tmp_path, on_epoch=lambda t: epochs.append(t.epoch)) == train(trial, FEW)
    assert epochs == [3]


# Other data and other precisions.


def test_a_text_is_learned_character_by_character():
    split = TEXT.split(context=10, validation=0.1)
    trial = Trial(replace(WRITES, tests="best"), Recipe("Adam", 0.01, optimizer="adam"))
    training = stepped(trial, split)
    result = training.finish()
    assert result.loss[1] < result.loss[0]
    model = WRITES.network(0)
    _, _, best = training.best
    model.load_state_dict(best)
    model.eval()
    guesses = model(split.x_test).argmax(-1)
    assert guesses.shape == split.y_test.shape == (6, 10)
    assert result.test_accuracy == pytest.approx((guesses == split.y_test).double().mean().item())


def test_the_loss_of_a_text_is_the_mean_over_characters():
    split, still = TEXT.split(context=10), Recipe("still", 0.0)
    plain = replace(WRITES, options=(*WRITES.options[:-1], ("dropout", 0.0))).lasting(1)
    result = train(Trial(plain, still), split)
    logits = plain.network(0)(split.x_train)
    expected = -logits.log_softmax(-1).gather(-1, split.y_train[..., None]).mean().item()
    assert result.loss[0] == pytest.approx(expected, rel=1e-5)
    assert result.accuracy[0] == pytest.approx((logits.argmax(-1) == split.y_train).double().mean().item())


def test_half_precision_is_that_of_autocast():
    trial = Trial(HELD.lasting(1), replace(SGD, rate=0.1), precision="bf16")
    result = train(trial, FEW)
    model = HELD.network(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=5e-3)
    total = 0.0
    for batch in torch.randperm(90, generator=torch.Generator().manual_seed(0)).split(32):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(FEW.x_train[batch])
        assert outputs.dtype == torch.bfloat16
        loss = F.cross_entropy(outputs.float(), FEW.y_train[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += len(batch) * loss.item()
    assert result.loss[0] == pytest.approx(total / 90, rel=1e-6)
    assert result.loss != train(replace(trial, precision="float32"), FEW).loss
    assert not torch.is_autocast_enabled("cpu")


def test_data_that_cannot_be_learned_from_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(LabError, match="no examples are held out"):
        train(Trial(HELD, SGD), SPLIT, folder=tmp_path / "run")
    nothing = replace(FEW, x_train=FEW.x_train[:0], y_train=FEW.y_train[:0])
    with pytest.raises(LabError, match="digits has no examples to train on"):
        train(Trial(HELD, SGD), nothing, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_network_of_ones_own_is_trained_in_its_precision_and_keeps_no_run(tmp_path):
    digits = task("digits-mlp").lasting(2)
    trial, split = Trial(digits, Recipe("SGD", 0.1)), digits.source.load()
    training = Training(trial, split.converted(torch.float64), network=digits.network(0).double())
    for _ in training.proceed():
        pass
    assert {weight.dtype for weight in training.model.parameters()} == {torch.float64}
    assert training.loss == pytest.approx(train(trial, split).loss, rel=1e-4)
    assert training.loss != train(trial, split).loss
    with pytest.raises(LabError, match="`folder` must be None with a `network`"):
        Training(trial, split, folder=tmp_path, network=digits.network(0))
