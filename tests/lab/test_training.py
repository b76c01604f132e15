import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import gyroscope
from gyroscope.lab import data, models
from gyroscope.lab.errors import LabError
from gyroscope.lab.recipe import Recipe
from gyroscope.lab.training import Schedule, accuracy, train
from gyroscope.lab.trial import Trial

SGD = Recipe("SGD", rate=3.0**-1, weight_decay=5e-3)
LAYCA = Recipe("Layca", rate=3.0**-3, alpha=-0.6)


@pytest.fixture(scope="module")
def split():
    return data.digits()


@pytest.mark.parametrize("recipe", [SGD, LAYCA], ids=lambda recipe: recipe.name)
def test_training_is_the_same_bit_for_bit_whatever_the_random_state(split, recipe):
    trial = Trial(recipe, seed=1, schedule=Schedule(epochs=3))
    torch.manual_seed(1)
    first = trial.run(split)
    torch.manual_seed(2)
    assert trial.run(split) == first


def test_another_seed_gives_another_training(split):
    one, other = (Trial(SGD, seed=seed, schedule=Schedule(epochs=1)).run(split) for seed in (1, 2))
    assert one.loss != other.loss


def test_the_seed_changes_the_order_even_from_equal_weights(split):
    losses = []
    for seed in (1, 2):
        model = models.make("digits-cnn", seed=0)
        result = train(model, split, SGD.optimizer(model), seed=seed, schedule=Schedule(epochs=1))
        losses.append(result.loss)
    assert losses[0] != losses[1]


def test_training_equals_a_plain_loop(split):
    """The loop, the batches, the cuts of the rate and the rotations, written out once more."""
    schedule, seed, recipe = Schedule(epochs=10), 3, SGD
    result = Trial(recipe, seed=seed, schedule=schedule).run(split)

    model = models.make("digits-cnn", seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.rate, weight_decay=recipe.weight_decay)
    initial = [parameter.detach().double().flatten() for parameter in model.parameters()]
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for epoch, divisor in enumerate([1] * 8 + [5, 25]):
        optimizer.param_groups[0]["lr"] = recipe.rate / divisor
        order = torch.randperm(200, generator=generator)
        batches = [order[start : start + 32] for start in range(0, 200, 32)]
        assert [len(batch) for batch in batches] == [32] * 6 + [8]
        for batch in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(split.x_train[batch]), split.y_train[batch]).backward()
            optimizer.step()
        for layer, (parameter, w0) in enumerate(zip(model.parameters(), initial, strict=True)):
            w = parameter.detach().double().flatten()
            cosine = (w @ w0 / (w.norm() * w0.norm())).item()
            assert result.rotation[epoch + 1][layer] == pytest.approx(1 - cosine, abs=1e-9)
    model.eval()
    correct = (model(split.x_test).argmax(1) == split.y_test).sum().item()
    assert result.test_accuracy == pytest.approx(correct / 1597)


def test_rotation_is_recorded_at_the_start_and_after_every_epoch(split):
    result = Trial(LAYCA, seed=0, schedule=Schedule(epochs=3)).run(split)
    assert result.rotation[0] == [0.0] * 7
    assert len(result.rotation) == 4
    assert all(rotation > 0 for row in result.rotation[1:] for rotation in row)
    assert result.final_rotation == result.rotation[3]
    assert result.layers[-1] == "classifier.weight"


def test_layca_with_negative_alpha_rotates_the_first_layer_most(split):
    result = Trial(LAYCA, seed=0, schedule=Schedule(epochs=2)).run(split)
    assert max(result.final_rotation) == max(result.final_rotation[:3])
    assert min(result.final_rotation) == result.final_rotation[-1]


def test_layca_keeps_the_norm_of_every_layer_and_sgd_does_not(split):
    for recipe, kept in ((LAYCA, True), (SGD, False)):
        model = models.make("digits-cnn", seed=0)
        before = [parameter.norm().item() for parameter in model.parameters()]
        train(model, split, recipe.optimizer(model), seed=0, schedule=Schedule(epochs=1))
        after = [parameter.norm().item() for parameter in model.parameters()]
        assert (after == pytest.approx(before, rel=1e-5)) is kept


def test_the_network_learns(split):
    result = Trial(Recipe("Layca", rate=3.0**-3, alpha=0.0), seed=0, schedule=Schedule(epochs=10)).run(split)
    assert result.train_accuracy == 1.0
    assert result.test_accuracy > 0.85
    assert result.loss[-1] < 0.1 < result.loss[0]


def test_accuracy_is_measured_in_evaluation_mode():
    model = torch.nn.Sequential(torch.nn.Dropout(1.0))
    assert accuracy(model, torch.eye(3), torch.tensor([0, 1, 2])) == 1.0


def test_a_trial_that_diverges_says_which_and_what_to_do(split):
    broken = Recipe("SGD", rate=float("inf"))
    with pytest.raises(LabError, match=r"^SGD, seed 4: training diverged: the loss is nan in epoch 1; lower"):
        Trial(broken, seed=4, schedule=Schedule(epochs=2)).run(split)


@pytest.mark.parametrize("recipe", [SGD, LAYCA], ids=lambda recipe: recipe.name)
def test_a_recorded_training_is_the_same_and_its_run_holds_the_result(split, recipe, tmp_path):
    schedule = Schedule(epochs=3)
    plain = Trial(recipe, seed=1, schedule=schedule).run(split)
    trial = Trial(recipe, seed=1, schedule=schedule, record=tmp_path)
    assert trial.run(split) == plain
    with gyroscope.load(tmp_path / trial.slug) as run:
        assert run.steps.tolist() == [0, 7, 14, 21]
        assert list(run.layers) == plain.layers
        assert run.series("rotation") == pytest.approx(np.array(plain.rotation), rel=1e-4, abs=1e-9)
        assert run.scalars["loss"].values.tolist() == plain.loss
        assert run.scalars["test_accuracy"].values.tolist() == [plain.test_accuracy]
