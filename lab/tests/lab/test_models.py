from math import sqrt

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import gyroscope
from gyroscope_lab import models
from gyroscope_lab.errors import LabError


def test_digits_cnn_has_seven_layers_and_no_other_parameter():
    model = models.make("digits-cnn", seed=0)
    layers = gyroscope.layers(model)
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


def test_its_averages_follow_a_tenth_of_the_way_at_each_step():
    norms = [module for module in models.make("digits-cnn", seed=0) if isinstance(module, nn.BatchNorm2d)]
    assert {(norm.eps, norm.momentum, norm.affine) for norm in norms} == {(1e-5, 0.1, False)}


def test_features_are_8_then_4_then_2_pixels_wide():
    model, sizes = models.make("digits-cnn", seed=0), []
    for module in model:
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[-1]))
    model(torch.zeros(2, 1, 8, 8))
    assert sizes == [8, 8, 4, 4, 2, 2]


def test_every_kernel_of_the_model_starts_he_uniform():
    for parameter in models.make("digits-cnn", seed=0).parameters():
        bound = sqrt(6 / parameter[0].numel())
        assert 0.97 * bound < parameter.abs().max() <= bound


@pytest.mark.parametrize(("name", "square"), [("digits-cnn", 6), ("mlp-8x24", 1)])
def test_kernels_are_drawn_one_after_another_from_the_seed_alone(name, square):
    generator = torch.Generator().manual_seed(3)
    for parameter in models.make(name, seed=3).parameters():
        bound = sqrt(square / parameter[0].numel())
        assert torch.equal(parameter, torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))


# One of each name, small where the name leaves a choice.
EXAMPLES = {
    "digits-cnn": "digits-cnn",
    "mlp-{depth}x{width}": "mlp-3x8",
    "c10-cnn1": "c10-cnn1",
    "c10-cnn1-light": "c10-cnn1-light",
    "c10-cnn2": "c10-cnn2",
    "tiny-cnn": "tiny-cnn",
    "vgg-{depth}": "vgg-5",
    "resnet-{depth}": "resnet-8",
    "resnet-lastbn-{depth}": "resnet-lastbn-8",
    "preresnet-{depth}": "preresnet-8",
    "preresnet-v1-{depth}": "preresnet-v1-8",
    "imagenet-resnet-{depth}": "imagenet-resnet-18",
    "imagenet-resnet-lastbn-{depth}": "imagenet-resnet-lastbn-18",
    "wrn-{depth}-{width}": "wrn-10-1",
    "gpt-small": "gpt-small",
    "vit-small": "vit-small",
    "lstm-small": "lstm-small",
}


def test_every_model_has_an_example_here():
    assert list(EXAMPLES) == list(models.MODELS)


@pytest.mark.parametrize("name", EXAMPLES.values())
def test_equal_seeds_give_equal_weights_and_others_do_not(name):
    first, again, other = (models.make(name, seed=seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(first[key], again[key]) for key in first)
    kernels = [key for key in first if first[key].dim() > 1]
    assert not any(torch.equal(first[key], other[key]) for key in kernels)
    assert all(first[key].dtype == torch.float32 for key in kernels)


@pytest.mark.parametrize("name", EXAMPLES.values())
def test_making_a_model_leaves_the_random_state_alone(name):
    before = torch.get_rng_state()
    models.make(name, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", EXAMPLES.values())
def test_weights_do_not_depend_on_the_random_state(name):
    torch.manual_seed(1)
    first = models.make(name, seed=0).state_dict()
    torch.manual_seed(2)
    again = models.make(name, seed=0).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_the_registry_describes_each_model_in_one_line():
    for _, description in models.MODELS.values():
        assert 0 < len(description.splitlines()) <= 1


def test_an_unknown_name_is_refused_with_every_name_there_is():
    with pytest.raises(LabError, match=r"The model must be one of digits-cnn, .*lstm-small, got 'resnet'") as refused:
        models.make("resnet", seed=0)
    assert str(refused.value).startswith(f"The model must be one of {', '.join(models.MODELS)}, got")


@pytest.mark.parametrize("name", EXAMPLES.values())
def test_an_unknown_option_is_refused(name):
    with pytest.raises(LabError, match=f"model '{name}' has no option color. It"):
        models.make(name, seed=0, color="red")


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("resnet-8", {"checkpointed": "no"}, "`checkpointed` of resnet-8 must be True or False, got 'no'."),
        ("resnet-8", {"batch_norm": None}, "`batch_norm` of resnet-8 must be True or False, got None."),
        ("resnet-8", {"classes": "10"}, "`classes` of resnet-8 must be a whole number, got '10'."),
        ("mlp-2x3", {"classes": 1.5}, "`classes` of mlp-2x3 must be a whole number, got 1.5."),
        ("vgg-8", {"channels": True}, "`channels` of vgg-8 must be a whole number, got True."),
        ("wrn-10-1", {"dropout": "0.3"}, "`dropout` of wrn-10-1 must be a number, got '0.3'."),
        ("digits-cnn", {"seed": "a"}, "`seed` of digits-cnn must be a whole number, got 'a'."),
        ("gpt-small", {"seed": 0.0}, "`seed` of gpt-small must be a whole number, got 0.0."),
        ("digits-cnn", {"seed": -1}, "`seed` of digits-cnn must be a whole number from 0 to 2³² − 1, got -1."),
    ],
    ids=["text", "none", "digits", "part", "truth", "share", "seed", "float seed", "negative seed"],
)
def test_what_is_not_of_the_kind_of_an_option_is_refused(name, given, says):
    with pytest.raises(LabError) as refused:
        models.make(name, **({"seed": 0} | given))
    assert str(refused.value) == says


def test_whole_numbers_of_numpy_and_shares_without_a_point_are_taken():
    model = models.make("wrn-10-1", seed=np.int64(0), classes=np.int32(7), dropout=0)
    assert model(torch.zeros(1, 3, 8, 8)).shape == (1, 7)


# Networks that take images, with all that changes their course.
SMALL = [
    ("digits-cnn", {}),
    ("c10-cnn1-light", {"channels": 1}),
    ("c10-cnn2", {"channels": 1, "dropout": True}),
    ("tiny-cnn", {"channels": 1}),
    ("vgg-6", {"channels": 1}),
    ("vgg-8", {"channels": 1, "batch_norm": True}),
    ("resnet-8", {"channels": 1}),
    ("resnet-8", {"channels": 1, "batch_norm": False}),
    ("resnet-8", {"channels": 1, "keras": True}),
    ("resnet-lastbn-8", {"channels": 1}),
    ("preresnet-8", {"channels": 1}),
    ("preresnet-v1-8", {"channels": 1}),
    ("wrn-10-2", {"channels": 1}),
]


def _id(value):
    return value if isinstance(value, str) else "-".join(value) if isinstance(value, dict) else None


def _images(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "options"), SMALL, ids=_id)
def test_layers_are_registered_in_the_order_of_their_first_use(name, options):
    model = models.make(name, seed=0, **options)
    used = gyroscope.layers(model, sample=torch.zeros(2, 1, 8, 8))
    assert [layer.name for layer in gyroscope.layers(model)] == [layer.name for layer in used]


@pytest.mark.parametrize(("name", "options"), SMALL, ids=_id)
@pytest.mark.parametrize("size", [8, 11])
def test_two_small_gray_images_train_and_are_classified(name, options, size):
    model = models.make(name, seed=0, **options)
    images = _images(2, 1, size, size)
    trained = model(images)
    assert trained.shape == (2, 10)
    F.cross_entropy(trained, torch.tensor([1, 7])).backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    with torch.no_grad():
        both, alone = model.eval()(images), model(images[:1])
    torch.testing.assert_close(both[:1], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "options"), SMALL, ids=_id)
def test_channels_last_images_give_the_same(name, options):
    model = models.make(name, seed=0, **options).double().eval()
    images = _images(3, 1, 8, 8, dtype=torch.float64)
    expected = model(images)
    model = model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(images.to(memory_format=torch.channels_last)), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "options"), SMALL, ids=_id)
def test_a_forward_pass_is_one_graph_without_breaks(name, options):
    model = models.make(name, seed=0, **options).eval()
    images = _images(2, 1, 8, 8)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), model(images))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "options"), SMALL, ids=_id)
def test_a_cuda_graph_of_a_step_takes_new_images(name, options):
    model = models.make(name, seed=0, **options).cuda()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    labels = torch.tensor([1, 7], device="cuda")
    images = _images(2, 1, 8, 8).cuda()

    def step():
        model.zero_grad(set_to_none=False)
        F.cross_entropy(model(images), labels).backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    images.copy_(_images(2, 1, 8, 8, seed=1))
    graph.replay()
    replayed = [parameter.grad.clone() for parameter in model.parameters()]
    step()
    for parameter, grad in zip(model.parameters(), replayed, strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-3, atol=1e-5)


MLP = {"inputs": 784, "biases": True, "init": "glorot_uniform"}


def test_the_mnist_network_of_the_rotation_paper():
    options = {"batch_norm": True, "affine": True, "eps": 1e-3, "momentum": 0.01}
    model = models.make("mlp-2x784", seed=0, **MLP, **options)
    assert len(gyroscope.layers(model)) == 2
    assert model.norm1.momentum == 0.01
    assert sum(parameter.numel() for parameter in model.parameters()) == 784 * 784 + 3 * 784 + 7850
    for linear in (model.linear1, model.linear2):
        bound = sqrt(6 / sum(linear.weight.shape))
        assert 0.99 * bound < linear.weight.abs().max() <= bound
        assert not linear.bias.any()
    x = _images(20, 1, 28, 28)
    h = x.flatten(1) @ model.linear1.weight.T + model.linear1.bias
    h = F.relu((h - h.mean(0)) / (h.var(0, correction=0) + 1e-3).sqrt())
    torch.testing.assert_close(model(x), h @ model.linear2.weight.T, rtol=1e-4, atol=1e-4)


def test_the_mlp_of_the_speed_paper_starts_glorot_or_orthogonal():
    model = models.make("mlp-11x784", seed=0, **MLP)
    assert [type(module) for module in model][1:5] == [nn.Linear, nn.ReLU] * 2
    assert len(gyroscope.layers(model)) == 11
    weight = models.make("mlp-3x64", seed=0, **(MLP | {"init": "orthogonal"})).linear2.weight.double()
    torch.testing.assert_close(weight @ weight.T, torch.eye(64, dtype=torch.float64), rtol=0, atol=1e-5)


def test_a_linear_network_is_the_product_of_its_matrices():
    model = models.make("mlp-4x12", seed=0, inputs=9, activation="linear", biases=True).double()
    with torch.no_grad():
        for linear in (module for module in model if isinstance(module, nn.Linear)):
            linear.bias.normal_(generator=torch.Generator().manual_seed(1))
    x = _images(6, 1, 3, 3, dtype=torch.float64)
    h = x.flatten(1)
    for k in range(1, 5):
        linear = model.get_submodule(f"linear{k}")
        h = h @ linear.weight.T + linear.bias
    torch.testing.assert_close(model(x), h, rtol=1e-12, atol=1e-12)
