from math import sqrt

import pytest
import torch
from torch import nn

import gyroscope.layers.layer
from gyroscope_lab import models
from gyroscope_lab.errors import LabError
from gyroscope_lab.models.mlp import mlp


@pytest.mark.parametrize(
    ("name", "weights", "depth"), [("mlp-8x24", 7152, 8), ("mlp-4x24", 4848, 4), ("mlp-4x36", 8136, 4)]
)
def test_the_papers_networks_have_the_weights_that_counting_gives(name, weights, depth):
    model = models.make(name, seed=0)
    layers = gyroscope.layers(model)
    assert [layer.name for layer in layers] == [f"linear{k}.weight" for k in range(1, depth + 1)]
    assert sum(parameter.numel() for parameter in model.parameters()) == weights
    assert model(torch.zeros(3, 1, 12, 12)).shape == (3, 10)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_forward_pass_is_equation_3_written_out(batch_norm):
    model = models.make("mlp-4x24", seed=1, batch_norm=batch_norm).double()
    images = torch.rand(50, 1, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = images.reshape(50, 144)
    for k in range(1, 4):
        h = x @ model.get_submodule(f"linear{k}").weight.T
        if batch_norm:
            h = (h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt()
        x = h.clamp(min=0)
    torch.testing.assert_close(model(images), x @ model.linear4.weight.T, rtol=1e-12, atol=1e-14)


def test_normalization_stands_before_each_relu_and_not_after_the_last_layer():
    kinds = [type(module) for module in models.make("mlp-3x24", seed=0, batch_norm=True)]
    assert kinds == [nn.Flatten, *[nn.Linear, nn.BatchNorm1d, nn.ReLU] * 2, nn.Linear]


def test_weights_fill_the_interval_of_random_initialization_and_no_more():
    for weight in mlp(3, depth=4, width=100).parameters():
        bound = 1 / sqrt(weight.shape[1])
        assert weight.abs().max() <= bound
        assert weight.max() > 0.97 * bound
        assert weight.min() < -0.97 * bound
        assert weight.var().item() == pytest.approx(1 / (3 * weight.shape[1]), rel=0.1)


def test_a_relu_layer_passes_on_a_sixth_of_the_mean_square():
    images = torch.randn(500, 2000, generator=torch.Generator().manual_seed(0))
    model = mlp(0, depth=3, width=2000, inputs=2000)
    first = model.relu1(model.linear1(images))
    second = model.relu2(model.linear2(first))
    assert (first.square().mean() / images.square().mean()).item() == pytest.approx(1 / 6, rel=0.02)
    assert (second.square().mean() / first.square().mean()).item() == pytest.approx(1 / 6, rel=0.02)


def test_plain_and_normalized_networks_of_a_seed_have_the_same_weights():
    options = [{}, {"batch_norm": True}, {"batch_norm": True, "affine": True, "gain": "uniform"}]
    made = [models.make("mlp-4x24", seed=7, **option) for option in options]
    for k in range(1, 5):
        first, *others = (model.get_submodule(f"linear{k}").weight for model in made)
        assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(first, models.make("mlp-4x24", seed=8).linear4.weight)


def test_the_gain_is_absent_one_or_uniform():
    assert models.make("mlp-2x400", seed=0, batch_norm=True).norm1.weight is None
    ones = models.make("mlp-2x400", seed=0, batch_norm=True, affine=True).norm1
    assert ones.weight.tolist() == [1.0] * 400
    drawn = models.make("mlp-2x400", seed=0, batch_norm=True, affine=True, gain="uniform").norm1
    assert drawn.bias.tolist() == [0.0] * 400
    assert 0 <= drawn.weight.min() < 0.02 < 0.98 < drawn.weight.max() <= 1
    assert drawn.weight.mean().item() == pytest.approx(0.5, abs=0.05)


def test_making_one_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    models.make("mlp-4x24", seed=0, batch_norm=True, affine=True, gain="uniform")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["mlp-8", "mlp-0x24", "mlp-8x024", "mlp-8x24-bn", "xmlp-8x24", "mlp-{depth}x{width}"])
def test_a_name_that_is_not_of_the_form_is_refused_with_the_form(name):
    with pytest.raises(LabError, match=r"The model must be one of digits-cnn, mlp-\{depth\}x\{width\}, .*, got"):
        models.make(name, seed=0)


def test_an_option_the_model_has_not_is_refused_with_those_it_has():
    with pytest.raises(
        LabError, match=r"'mlp-2x3' has no option bn\. Its options are inputs, classes, batch_norm, aff"
    ):
        models.make("mlp-2x3", seed=0, bn=True)
    with pytest.raises(LabError, match=r"no option depth\. Its options are inputs"):
        models.make("mlp-2x3", seed=0, depth=3)
    with pytest.raises(LabError, match=r"'digits-cnn' has no option batch_norm\. It has none"):
        models.make("digits-cnn", seed=0, batch_norm=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"affine": True}, "affine=True needs batch_norm=True"),
        ({"batch_norm": True, "gain": "uniform"}, "gain='uniform' needs affine=True"),
        ({"batch_norm": True, "gain": "zeros"}, "`gain` must be 'ones' or 'uniform', got 'zeros'"),
        ({"classes": 0}, "All sizes of an MLP must be whole numbers ≥ 1, got depth 2, width 3, 144 inputs, 0 classes"),
    ],
    ids=["affine", "gain", "zeros", "classes"],
)
def test_options_that_contradict_each_other_are_refused(options, says):
    with pytest.raises(LabError, match=says):
        models.make("mlp-2x3", seed=0, **options)
