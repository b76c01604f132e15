from dataclasses import replace
from math import inf, nan

import pytest
import torch
from torch import nn

from gyroscope.control import Layca
from gyroscope.control.rates import alpha_multipliers
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.recipe import CONTROLS, OPTIMIZERS, Recipe, register, with_options_of
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.trial import Trial
from lab.trainings import stepped

RECORDED = Recipe("RMSprop", 0.01, optimizer="rmsprop", records=True)
DIGITS = replace(task("digits-mlp").lasting(1), model="mlp-3x16")
SPLIT = DIGITS.source.load()
# Two convolutions with batch normalization, a linear layer with a bias.
MIXED = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 2, 3), nn.Flatten(), nn.Linear(128, 10)
)


def literal(name, w, gradients, rate, decay):
    """The weights after steps with these gradients, each rule written out with the papers' constants."""
    w, m, v, total, buffer = w.clone(), 0.0, 0.0, 0.0, None
    for t, gradient in enumerate(gradients, start=1):
        if name == "adamw":
            w = w * (1 - rate * decay)
        g = gradient if name == "adamw" else gradient + decay * w
        if name == "sgd":
            w = w - rate * g
        elif name == "nesterov":
            buffer = g if buffer is None else 0.9 * buffer + g
            w = w - rate * (g + 0.9 * buffer)
        elif name == "sgd-amom":
            m = 0.9 * m + 0.1 * g
            w = w - rate * m
        elif name in ("adam", "adamw"):
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            w = w - rate * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-7)
        elif name == "rmsprop":
            v = 0.9 * v + 0.1 * g**2
            w = w - rate * g / (v.sqrt() + 1e-7)
        elif name == "adagrad":
            total = total + g**2
            w = w - rate * g / (total.sqrt() + 1e-7)
    return w


@pytest.mark.parametrize("name", [*OPTIMIZERS, "nesterov"])
def test_an_optimizer_takes_the_steps_of_its_rule_with_the_papers_constants(name):
    layer = nn.Linear(5, 3, bias=False, dtype=torch.float64)
    momentum = {"optimizer": "sgd", "momentum": 0.9, "nesterov": True} if name == "nesterov" else {"optimizer": name}
    optimizer = Recipe("", 0.03, weight_decay=0.02, **momentum).make(layer)
    gradients = list(torch.randn(4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-3)
    expected = literal(name, layer.weight.detach(), gradients, 0.03, 0.02)
    for gradient in gradients:
        layer.weight.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("decayed", ["all", "convolutions"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "sgd-amom"])
def test_weight_decay_is_for_all_weights_or_for_convolutions_alone(decayed, optimizer):
    recipe = Recipe("", 0.5, optimizer=optimizer, weight_decay=0.1)
    made = recipe.make(MIXED, decayed=decayed)
    before = {name: parameter.detach().clone() for name, parameter in MIXED.named_parameters()}
    for parameter in MIXED.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    shrunk = {name for name, parameter in MIXED.named_parameters() if not torch.equal(parameter, before[name])}
    MIXED.load_state_dict(before, strict=False)
    everything = {name for name, value in before.items() if value.any()}
    assert shrunk == (everything if decayed == "all" else {"0.weight", "2.weight"})


def test_no_parameter_is_stepped_twice_or_left_out_where_convolutions_alone_are_decayed():
    for control in (None, "layca"):
        recipe = Recipe("", 0.1, control=control, weight_decay=0.1, others="inner")
        groups = recipe.make(MIXED, decayed="convolutions").param_groups
        stepped_ones = [id(parameter) for group in groups for parameter in group["params"]]
        assert sorted(stepped_ones) == sorted(map(id, MIXED.parameters()))


@pytest.mark.parametrize("alpha", [-0.6, 0.0, 0.3])
def test_under_layca_every_layer_turns_by_the_rate_times_its_multiplier(alpha):
    trial = Trial(DIGITS, Recipe("", 3.0**-3, control="layca", alpha=alpha))
    training = stepped(trial, SPLIT)  # one batch of 200: one step
    multipliers = alpha_multipliers(alpha, len(training.gauge.names))
    for turned, multiplier in zip(training.rotation[-1], multipliers, strict=True):
        cosine = (1 + (3.0**-3 * multiplier) ** 2) ** -0.5
        assert turned == pytest.approx(1 - cosine, rel=1e-3)


def test_controls_by_name_perform_the_operations_they_are_known_for():
    found = {name: Recipe("", 0.1, control=name).make(nn.Linear(3, 2)).law for name in CONTROLS}
    told = {name: (law.project, law.scale, law.reproject, law.growth) for name, law in found.items()}
    assert told == {
        "layca": (True, "relative", True, None),
        "lars": (False, "relative", False, 1e-4),
        "hyperball": (False, "relative", True, None),
        "relative": (False, "relative", False, None),
        "block": (False, "unit", False, None),
    }


@pytest.mark.parametrize("control", [None, "layca"])
@pytest.mark.parametrize("only", [0, 1, 2, -1])
def test_one_layer_alone_is_trained_kernel_and_bias_and_nothing_else(only, control):
    trial = Trial(DIGITS, Recipe("", 0.05, control=control, others="inner", only=only))
    names = [name for name, _ in trial.network().named_parameters() if "norm" not in name]
    kernels = [name for name in names if name.endswith("weight")]
    assert len(kernels) == 3
    before = dict(trial.network().named_parameters())
    after = dict(stepped(trial, SPLIT).model.named_parameters())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    layer = kernels[only].removesuffix("weight")
    assert moved == {f"{layer}weight", f"{layer}bias"}


def test_a_layer_that_is_not_there_cannot_be_trained():
    for only in (3, -4):
        with pytest.raises(LabError, match=rf"^`only` must be one of the 3 layers of mlp-3x16, got {only}\.$"):
            Trial(DIGITS, Recipe("", 0.1, only=only)).network()


@pytest.mark.parametrize("given", [{"frozen": (0, 1, 2)}, {"only": 1, "frozen": (1,)}], ids=["all", "the one"])
def test_a_network_without_a_layer_that_is_trained_is_refused(given):
    with pytest.raises(LabError, match="`frozen` must leave a layer of mlp-3x16 to train, got"):
        Trial(DIGITS, Recipe("", 0.1, **given)).network()


def test_initial_weights_are_scaled_and_nothing_else_is():
    plain = dict(Trial(DIGITS, Recipe("", 0.1)).network().named_parameters())
    scaled = dict(Trial(DIGITS, Recipe("", 0.1, scale=0.25)).network().named_parameters())
    for name, parameter in plain.items():
        times = 0.25 if parameter.dim() == 2 else 1.0
        assert torch.equal(scaled[name], times * parameter)
    assert any(parameter.dim() == 1 and parameter.any() for parameter in plain.values())


def test_a_captured_rate_is_changed_where_it_lies():
    recipe = Recipe("", 0.5, control="layca")
    optimizer = recipe.make(nn.Linear(3, 2), captured=True)
    rates = [group["lr"] for group in optimizer.param_groups]
    recipe.set_rate(optimizer, 0.1)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        assert group["lr"] is rate
        assert rate.item() == pytest.approx(0.05)


def test_a_recipe_that_copies_keeps_its_rate_of_one():
    recipe = Recipe("", 0.5, control="layca", copies=RECORDED)
    optimizer = recipe.make(nn.Linear(3, 2))
    recipe.set_rate(optimizer, 0.1)
    assert {group["lr"] for group in optimizer.param_groups} == {1.0}


@pytest.mark.parametrize("captured", [False, True])
def test_a_state_is_loaded_with_the_options_of_who_loads_it(captured):
    """A captured optimizer has its rate and step count on the device; others do not."""
    recipe, layer = Recipe("", 0.25, optimizer="adam", momentum=0.0), nn.Linear(3, 2)
    saver, loader = recipe.make(layer, captured=not captured), recipe.make(layer, captured=captured)
    layer.weight.grad, layer.bias.grad = torch.ones(2, 3), torch.ones(2)
    saver.param_groups[0]["capturable"] = False  # for a CPU
    saver.step()
    loader.load_state_dict(with_options_of(loader, saver.state_dict()))
    assert isinstance(loader.param_groups[0]["lr"], torch.Tensor) is captured
    assert loader.param_groups[0]["capturable"] is captured
    assert torch.equal(loader.state[layer.weight]["exp_avg"], torch.full((2, 3), 0.1))


def test_steps_can_be_captured_of_all_but_adagrad_and_sgd_amom_alone():
    kinds = [(optimizer, control) for optimizer in OPTIMIZERS for control in (None, "layca")]
    cannot = {kind for kind in kinds if not Recipe("", 0.1, optimizer=kind[0], control=kind[1]).capturable}
    assert cannot == {("adagrad", None), ("adagrad", "layca"), ("sgd-amom", None)}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"optimizer": "sdg"},
            r"`optimizer` must be one of sgd, sgd-amom, adam, .*, got 'sdg'",
        ),
        ({"control": "lacya"}, "`control` must be None or one of layca, lars, hyperball, relative, block, got 'lacya'"),
        ({"rate": -0.1}, r"`rate` must be a finite number ≥ 0, got -0\.1"),
        ({"rate": inf}, "`rate` must be a finite number ≥ 0, got inf"),
        ({"rate": nan}, "`rate` must be a finite number ≥ 0, got nan"),
        ({"weight_decay": -1e-3}, r"`weight_decay` must be a finite number ≥ 0, got -0\.001"),
        ({"scale": 0.0}, r"`scale` must be a finite number > 0, got 0\.0"),
        ({"scale": nan}, "`scale` must be a finite number > 0, got nan"),
        ({"alpha": 0.5}, r"`alpha` must be 0 without a control, got 0\.5\. Try control='layca'"),
        (
            {"alpha": 1.5, "control": "layca"},
            r"`alpha` must be from -1 \(only the first layer turns\) to 1 \(only the last\), got 1\.5",
        ),
        (
            {"momentum": 0.9, "optimizer": "adam"},
            r"`momentum` must be 0 for adam, got 0\.9: only sgd, sgd-amom, rmsprop take one",
        ),
        ({"momentum": 1.0}, r"`momentum` must be a number ≥ 0 and < 1, got 1\.0"),
        (
            {"nesterov": True},
            r"`nesterov` must be False without the momentum of sgd\. Try optimizer='sgd', momentum=0\.9",
        ),
        (
            {"nesterov": True, "momentum": 0.9, "optimizer": "rmsprop"},
            r"`nesterov` must be False without the momentum of sgd\. Try optimizer='sgd', momentum=0\.9",
        ),
        ({"others": "thawed", "control": "layca"}, r"`Recipe\.others` must be 'frozen' or 'inner', got 'thawed'"),
        ({"copies": RECORDED}, "`copies` needs control='layca'"),
        ({"copies": replace(RECORDED, records=False), "control": "layca"}, "and a recipe with records=True"),
        (
            {"copies": RECORDED, "control": "layca", "others": "inner"},
            "`alpha` and `others` must be left out with `copies`",
        ),
        ({"copies": RECORDED, "control": "layca", "alpha": 0.3}, "`alpha` and `others` must be left out with `copies`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_recipe_that_cannot_be_followed_is_refused(given, says):
    with pytest.raises(LabError, match=says):
        Recipe(**({"name": "", "rate": 0.1} | given))


@pytest.mark.parametrize("control", [None, *CONTROLS])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_works_under_every_control(optimizer, control):
    recipe = Recipe("", 0.01, optimizer=optimizer, control=control, weight_decay=1e-3)
    training = stepped(Trial(DIGITS, recipe), SPLIT)
    assert isinstance(training.optimizer, Layca) == (control is not None)
    assert all(turned > 0 for turned in training.rotation[-1])


@pytest.mark.parametrize("own_rates", [False, True])
def test_a_registered_optimizer_is_made_by_its_factory_and_follows_the_schedule_unless_it_has_its_own(own_rates):
    def factory(recipe, model):
        return torch.optim.Rprop(model.parameters(), lr=recipe.rate, **dict(recipe.options))

    register("made-rprop", factory, own_rates=own_rates)
    recipe = Recipe("Rprop", 0.5, "made-rprop", options=(("etas", (0.4, 1.3)),))
    optimizer = recipe.make(nn.Linear(2, 2))
    assert isinstance(optimizer, torch.optim.Rprop)
    assert optimizer.param_groups[0]["etas"] == (0.4, 1.3)
    recipe.set_rate(optimizer, 0.1)
    assert optimizer.param_groups[0]["lr"] == (0.5 if own_rates else 0.05)
    assert not recipe.capturable
    with pytest.raises(LabError, match="`control` must be None for the optimizer of a study, made-rprop, got 'layca'"):
        replace(recipe, control="layca")


def test_known_optimizers_are_not_replaced_and_take_no_options():
    with pytest.raises(LabError, match="`name` must not be one of sgd,"):
        register("sgd", lambda recipe, model: None)
    with pytest.raises(
        LabError, match="`options` must be empty for sgd: they are for optimizers that a study registers"
    ):
        Recipe("SGD", 0.1, options=(("damping", 0.1),))
