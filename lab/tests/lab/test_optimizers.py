"""Optimizers beyond the papers': each steps as it should in the one training loop, and resumes."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import gyroscope
from gyroscope.control import presets
from gyroscope.errors import MissingExtraError
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.beyond.problems import LSTM
from gyroscope_lab.training import optimizers
from gyroscope_lab.training.recipe import Recipe, register
from gyroscope_lab.training.training import train
from gyroscope_lab.training.trial import Trial
from lab.trainings import HELD, PACKAGES, interrupted, present, stepped

COSINE = replace(
    HELD,
    name="cosine",
    model="mlp-3x16",
    options=(("batch_norm", True), ("affine", True), ("biases", True), ("inputs", 64)),
    schedule=replace(HELD.schedule, epochs=4, cuts=(), cosine=True),
    tests="last",
    test_loss=True,
)
SPLIT = HELD.source.load()
RECIPES = [
    Recipe("steer sgd", 3.0**-3, optimizer="steer", options=(("inner", "sgd"),)),
    Recipe("steer adamw", 0.028, optimizer="steer", options=(("inner", "adamw"), ("norms", "held"))),
    Recipe("Muon", 0.02, optimizer="muon", weight_decay=0.1),
    Recipe("AdamW", 1e-3, optimizer="adamw-text", weight_decay=0.1),
    Recipe("NadamW", 1e-3, optimizer="nadamw", weight_decay=0.1, options=(("betas", (0.9, 0.99)),)),
    Recipe("Schedule-Free", 0.0025, optimizer="schedule-free", options=(("warmup_steps", 3),)),
    Recipe("Prodigy", 1.0, optimizer="prodigy"),
]


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


class Averaging(torch.optim.SGD):
    """Steps weights, and evaluates their mean: `eval` puts it in place, `train` takes it out again."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.asked = []
        for group in self.param_groups:
            group |= {"training": False, "count": 0}

    def step(self, closure=None):
        assert all(group["training"] for group in self.param_groups)
        loss = super().step(closure)
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean += (p.detach() - mean) / group["count"]
        return loss

    def _swap(self, training):
        self.asked.append("train" if training else "eval")
        for group in self.param_groups:
            if group["training"] != training and group["count"]:
                for p in group["params"]:
                    kept = p.detach().clone()
                    p.data.copy_(self.state[p]["mean"])
                    self.state[p]["mean"] = kept
            group["training"] = training

    def train(self):
        self._swap(True)

    def eval(self):
        self._swap(False)


@cache
def averaging():
    register("test-averaging", lambda recipe, model: Averaging(model.parameters(), lr=recipe.rate), own_rates=True)
    return Recipe("averaging", 0.1, optimizer="test-averaging")


def test_steering_is_that_of_the_library():
    one, other = net(), net()
    other.load_state_dict(one.state_dict())
    optimizer = RECIPES[0].make(one)
    reference = gyroscope.steer(other, "sgd")
    x = torch.randn(6, 4)
    for model, its in ((one, optimizer), (other, reference)):
        for _ in range(3):
            its.zero_grad()
            model(x).logsumexp(1).sum().backward()
            its.step()
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert repr(optimizer) == repr(reference)


def test_muon_steps_hidden_matrices_and_adamw_all_else_at_its_own_rate():
    model = net()
    optimizer = Recipe("Muon", 0.02, optimizer="muon", options=(("others_lr", 1e-3),)).make(model)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(6, 4)).logsumexp(1).sum().backward()
    reference = torch.optim.Muon([model[2].weight], lr=0.02, weight_decay=0.0)
    expected = model[2].weight.detach().clone()
    reference.step()
    expected, model[2].weight.data = model[2].weight.detach().clone(), expected
    optimizer.step()
    assert torch.equal(model[2].weight, expected)
    # The first step of AdamW has the size of its learning rate.
    moved = (model[4].weight.detach() - before[4]).abs()
    assert moved.max().item() == pytest.approx(1e-3, rel=1e-3)


def test_adamw_for_texts_decays_layers_alone():
    model = net()
    groups = RECIPES[3].make(model).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert {id(p) for p in groups[0]["params"]} == {id(p) for p in model.parameters() if p.dim() == 2}
    assert groups[0]["betas"] == (0.9, 0.95)


def test_a_schedule_moves_every_rate_of_a_steered_model():
    recipe = RECIPES[0]
    optimizer = recipe.make(net())
    recipe.set_rate(optimizer, 0.5)
    assert {group["lr"] for group in optimizer.param_groups} == {recipe.rate / 2}


@pytest.mark.parametrize("recipe", [RECIPES[0], RECIPES[1], RECIPES[3], RECIPES[4]], ids=lambda recipe: recipe.name)
def test_captured_steps_read_every_rate_where_a_schedule_writes_it(recipe):
    assert recipe.capturable
    optimizer = recipe.make(net(), captured=True)
    rates = [group["lr"] for group in optimizer.param_groups]
    recipe.set_rate(optimizer, 0.5)
    assert [float(rate) for rate in rates] == pytest.approx([recipe.rate / 2] * len(rates))
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))


def test_an_lstm_with_dropout_is_not_captured():
    with_dropout = Trial(LSTM.full, RECIPES[1])
    assert not with_dropout.capturable
    assert Trial(LSTM.small, RECIPES[1]).capturable


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_named_with_what_to_install(monkeypatch, name):
    monkeypatch.setitem(__import__("sys").modules, PACKAGES[name], None)
    says = rf"needs {PACKAGES[name]}, which is not installed: pip install 'gyroscope-lab\[untuned\]'"
    with pytest.raises(MissingExtraError, match=says):
        Recipe("one", 1.0, optimizer=name).make(net())


@pytest.mark.parametrize("name", optimizers.FACTORIES)
def test_the_names_are_taken(name):
    with pytest.raises(LabError, match=rf"`name` must not be one of .*{name}.*, got '{name}'"):
        register(name, lambda recipe, model: torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_each_learns_in_the_training_loop(recipe):
    present(recipe)
    training = stepped(Trial(COSINE, recipe), SPLIT)
    result = training.finish()
    assert result.ended is None
    assert result.test_losses[-1] < result.test_losses[0] * 1.02
    assert result.best_test_loss == min(result.test_losses)


@pytest.mark.parametrize("recipe", [*RECIPES, None], ids=lambda recipe: "averaging" if recipe is None else recipe.name)
def test_a_resumed_training_is_the_same_training(tmp_path, recipe):
    """Also of optimizers that count steps, or estimate their rate, in their groups."""
    recipe = averaging() if recipe is None else recipe
    present(recipe)
    trial = Trial(COSINE, recipe, keeps=True)
    whole = train(trial, SPLIT, folder=tmp_path / "whole")
    parts = interrupted(trial, SPLIT, tmp_path / "parts", at=2)
    assert whole == parts
    weights = [torch.load(tmp_path / name / "weights.pt")["tested"] for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert len(json.loads((tmp_path / "parts" / "result.json").read_text())["result"]["test_losses"]) == 4


def test_an_optimizer_with_modes_is_in_train_mode_for_steps_and_in_eval_mode_for_evaluations():
    training = stepped(Trial(COSINE, averaging()), SPLIT)
    asked = training.optimizer.asked
    assert [mode for mode, before in zip(asked, ["", *asked], strict=False) if mode != before] == ["train", "eval"] * 4
    # The weights at the end are the mean of those that were stepped, and these the optimizer has kept.
    evaluated = {name: value.clone() for name, value in training.model.state_dict().items()}
    result = training.finish()
    assert all(torch.equal(evaluated[name], value) for name, value in training.model.state_dict().items())
    with torch.no_grad():
        guesses = training.model.eval()(SPLIT.x_test).argmax(1)
    assert result.test_accuracy == pytest.approx((guesses == SPLIT.y_test).double().mean().item())
    stepped_alone = stepped(
        Trial(replace(COSINE, schedule=replace(COSINE.schedule, cosine=False)), Recipe("SGD", 0.1)), SPLIT
    )
    kept = training.optimizer.state[next(training.model.parameters())]["mean"]
    torch.testing.assert_close(kept, next(stepped_alone.model.parameters()).detach(), rtol=1e-3, atol=1e-4)


def test_the_test_loss_is_that_of_the_weights_after_each_epoch():
    training = stepped(Trial(COSINE, RECIPES[0]), SPLIT)
    training.model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(training.model(SPLIT.x_test), SPLIT.y_test)
    assert training.test_losses[-1] == pytest.approx(loss.item(), rel=1e-5)
    assert len(training.test_losses) == 4
    assert stepped(Trial(replace(COSINE, test_loss=False), RECIPES[0]), SPLIT).test_losses == []


@pytest.mark.parametrize("test_loss", [False, True])
def test_the_test_curve_ends_with_the_test_accuracy_and_changes_nothing_else(test_loss):
    task = replace(COSINE, test_loss=test_loss)
    with_curve = stepped(Trial(replace(task, test_curve=True), RECIPES[0]), SPLIT).finish()
    without = stepped(Trial(task, RECIPES[0]), SPLIT).finish()
    assert len(with_curve.test_accuracies) == 4
    assert with_curve.test_accuracies[-1] == pytest.approx(with_curve.test_accuracy)
    assert replace(with_curve, test_accuracies=[]) == without


def test_the_loop_follows_the_cosine_step_by_step():
    seen = []

    class Noting(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(self.param_groups[0]["lr"])
            return super().step(closure)

    register("test-noting", lambda recipe, model: Noting(model.parameters(), lr=recipe.rate))
    stepped(Trial(COSINE, Recipe("noting", 0.5, optimizer="test-noting")), SPLIT)
    steps = torch.arange(12) / 12
    assert seen == pytest.approx((0.25 * (1 + torch.cos(torch.pi * steps))).tolist(), rel=1e-5)


def test_the_rates_of_the_studies_are_those_of_the_presets():
    from gyroscope_lab.papers.beyond.problems import RATES

    assert {name: presets.PRESETS[name].rate for name in RATES} == RATES
