from math import sqrt

import pytest
import torch
from torch import nn

import gyroscope.layer
from gyroscope.lab import models
from gyroscope.lab.errors import LabError
from gyroscope.lab.models.initialization import he_uniform_


def test_digits_cnn_has_seven_layers_and_no_other_parameter():
    model = models.make("digits-cnn", seed=0)
    layers = gyroscope.layer.layers(model)
    names = [*(f"conv{number}.weight" for number in range(1, 7)), "classifier.weight"]
    assert [layer.name for layer in layers] == names
    assert [name for name, _ in model.named_parameters()] == names
    kernels = [(16, 1), (16, 16), (32, 16), (32, 32), (64, 32), (64, 64)]
    expected = [(*kernel, 3, 3) for kernel in kernels] + [(10, 64)]
    assert [tuple(layer.parameter.shape) for layer in layers] == expected
    assert sum(parameter.numel() for parameter in model.parameters()) == 72_208


def test_each_convolution_is_followed_by_relu_then_plain_batch_normalization():
    kinds = [type(module) for module in models.make("digits-cnn", seed=0)]
    block = [nn.Conv2d, nn.ReLU, nn.BatchNorm2d]
    head = [nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear]
    pool = [nn.MaxPool2d]
    assert kinds == block * 2 + pool + block * 2 + pool + block * 2 + head


def test_features_are_8_then_4_then_2_pixels_wide():
    model, sizes = models.make("digits-cnn", seed=0), []
    for module in model:
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[-1]))
    model(torch.zeros(2, 1, 8, 8))
    assert sizes == [8, 8, 4, 4, 2, 2]


@pytest.mark.parametrize("shape", [(64, 32, 3, 3), (500, 64)])
def test_he_uniform_fills_its_interval_and_no_more(shape):
    generator = torch.Generator().manual_seed(3)
    weight = he_uniform_(torch.full(shape, torch.nan), generator=generator)
    bound = sqrt(6 / weight[0].numel())
    assert weight.abs().max() <= bound
    assert weight.max() > 0.99 * bound
    assert weight.min() < -0.99 * bound
    assert weight.var().item() == pytest.approx(bound**2 / 3, rel=0.03)


def test_every_kernel_of_the_model_starts_he_uniform():
    for parameter in models.make("digits-cnn", seed=0).parameters():
        bound = sqrt(6 / parameter[0].numel())
        assert 0.97 * bound < parameter.abs().max() <= bound


def test_equal_seeds_give_equal_weights_and_others_do_not():
    first, again, other = (models.make("digits-cnn", seed=seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])


def test_making_a_model_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    models.make("digits-cnn", seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_registry_describes_each_model_in_one_line():
    for _, description in models.MODELS.values():
        assert 0 < len(description.splitlines()) <= 1
    with pytest.raises(LabError, match="no model is called 'resnet'; there are: digits-cnn"):
        models.make("resnet", seed=0)
