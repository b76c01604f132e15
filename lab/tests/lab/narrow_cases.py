"""The convolutions of few channels against torch's own, in float64; run in Triton's interpreter.

`test_narrow` starts these in a separate process. On a GPU (`make gpu`) products are in bf16, as in training; the
interpreter has no bf16.
"""

import copy
import os
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from gyroscope_lab import models
from gyroscope_lab.engine.narrow import convolve, gradient_sums, narrow, normalize, statistics
from gyroscope_lab.models.convolutional import stages
from interpreted import hasten_interpreter

hasten_interpreter()
pytestmark = pytest.mark.any_device
DEVICE = torch.device(os.environ.get("GYROSCOPE_TEST_DEVICE", "cpu"))
ON_GPU = DEVICE.type == "cuda"
if not ON_GPU:  # the interpreter takes as long for a block of any size
    import_module("gyroscope_lab.engine.narrow")._COLUMNS = 1024
# Products of float32 are in TF32 on a GPU; outputs in bf16 have 8 bits.
WITHIN = {torch.float32: 2e-3 if ON_GPU else 1e-6, torch.bfloat16: 6e-3}
KINDS = [torch.bfloat16] if ON_GPU else [torch.float32]
# Channels, outputs, height, width, images: sizes that fill blocks, and some that do not.
SHAPES = [
    (3, 16, 8, 8, 3),
    (16, 16, 8, 8, 5),
    (16, 32, 6, 10, 3),
    (32, 32, 8, 8, 2),
    (32, 64, 4, 4, 9),
    (64, 64, 4, 4, 20),
]


def rand(*shape, seed, kind=torch.float32):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, kind).contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def apart(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inputs", "outputs", "height", "width", "images"), SHAPES)
def test_a_convolution_and_its_gradients_are_those_of_torch_in_float64(
    inputs, outputs, height, width, images, kind, relu
):
    x = rand(images, inputs, height, width, seed=1, kind=kind).requires_grad_(inputs > 3)  # images need no gradient
    w = (rand(outputs, inputs, 3, 3, seed=2) / 6).requires_grad_()
    y, parts = convolve(x, w, relu)
    exact_x = x.detach().double().requires_grad_()
    exact_w = w.detach().to(kind).double().requires_grad_()
    exact = F.conv2d(exact_x, exact_w, padding=1)
    exact = exact.relu() if relu else exact
    assert apart(y, exact) < WITHIN[kind]
    sums = torch.stack([y.double().sum((0, 2, 3)), y.double().square().sum((0, 2, 3))])
    assert apart(parts.double().sum(0), sums) < 1e-6
    g = rand(*y.shape, seed=3, kind=kind)
    y.backward(g)
    exact.backward(g.double())
    assert x.grad is None or apart(x.grad, exact_x.grad) < WITHIN[kind]
    assert apart(w.grad, exact_w.grad) < WITHIN[kind]
    assert w.grad.dtype == torch.float32


def test_statistics_are_those_of_batch_normalization_and_move_the_running_averages_as_it_does():
    y = rand(5, 16, 8, 8, seed=4) + 3.0
    norm = nn.BatchNorm2d(16, eps=1e-3, momentum=0.1).to(DEVICE)
    norm(y)
    mean, variance = torch.zeros(16, device=DEVICE), torch.ones(16, device=DEVICE)
    parts = torch.stack([torch.stack([half.sum((0, 2, 3)), half.square().sum((0, 2, 3))]) for half in y.split([2, 3])])
    center, scale = statistics(parts, mean, variance, y.numel() // 16, 0.1, 1e-3)
    exact = y.double()
    assert apart(center, exact.mean((0, 2, 3))) < 1e-6
    assert apart(scale, (exact.var((0, 2, 3), correction=0) + 1e-3).rsqrt()) < 1e-5
    assert apart(mean, norm.running_mean) < 1e-6
    assert apart(variance, norm.running_var) < 1e-5


def test_a_constant_channel_has_no_variance_rather_than_a_negative_one():
    parts = torch.tensor([[[3e4 * 7, 0.0], [9e8 * 7 * (1 - 1e-7), 0.0]]], device=DEVICE)
    running = torch.zeros(2, device=DEVICE), torch.ones(2, device=DEVICE)
    _, scale = statistics(parts, *running, 7, 0.1, 1e-5)
    assert scale.tolist() == pytest.approx([1e-5**-0.5] * 2, rel=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_sums_of_a_gradient_are_over_the_pixels_that_its_relu_lets_pass(masked):
    g, y, z = (rand(3, 32, 6, 10, seed=seed) for seed in (5, 6, 7))
    mean, scale = rand(32, 1, 1, 1, seed=8).flatten(), rand(32, 1, 1, 1, seed=9).flatten().abs()
    found = gradient_sums(g, y, z if masked else None, mean, scale)
    passed = g.double() * (z > 0) if masked else g.double()
    hat = (y.double() - mean.double()[:, None, None]) * scale.double()[:, None, None]
    assert apart(found, torch.stack([passed.sum((0, 2, 3)), (passed * hat).sum((0, 2, 3))])) < 1e-6


NETWORKS = ["stages", "resnet-8", "resnet-8 of Keras", "resnet-lastbn-8"]
# The interpreter takes seconds for each; without autograd's tracer one is enough.
CPU = [("stages", "eager"), *((name, "aot_eager") for name in NETWORKS)]
GPU = [(name, backend) for name in NETWORKS for backend in ("aot_eager", "inductor")]


@pytest.mark.parametrize(("name", "backend"), GPU if ON_GPU else CPU)
def test_a_network_of_them_trains_as_it_does_without(name, backend):
    if name == "stages":
        model = stages(0, widths=[16, 32], convolutions=2, channels=3, classes=10)
    else:
        model = models.make(name.split()[0], seed=0, **({"keras": True} if "Keras" in name else {}))
    model.to(DEVICE, memory_format=torch.channels_last)
    x, y = rand(4, 3, 8, 8, seed=10), torch.tensor([0, 1, 2, 3], device=DEVICE)
    ours = copy.deepcopy(model)
    narrow(ours)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in model.named_parameters()]
    step = torch.compile(ours, dynamic=False, backend=backend)
    losses = []
    # Gradients in bf16, as on a GPU, are a tenth or two apart however they are computed; wrong ones are farther.
    near, gradients_near = (0.02, 0.4) if ON_GPU else (1e-6, 1e-5)
    for network, forward in ((model, model), (ours, step)):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=ON_GPU):
            loss = F.cross_entropy(forward(x).float(), y)
        loss.backward()
        losses.append(loss.item())
        assert network.training
    assert losses[1] == pytest.approx(losses[0], rel=near)
    for (name, there), (_, here) in zip(model.named_parameters(), ours.named_parameters(), strict=True):
        assert apart(here.grad, there.grad) < gradients_near, name
    for (name, there), (_, here) in zip(model.named_buffers(), ours.named_buffers(), strict=True):
        if name.endswith(("running_mean", "running_var")):
            assert apart(here, there) < near, name
    model.load_state_dict(ours.state_dict())
    with torch.no_grad():  # tested as any other network
        assert torch.equal(ours.eval()(x), model.eval()(x))


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_a_normalization_that_is_compiled_by_itself_has_the_gradients_of_torch_in_float64(affine, adds, relu):
    leaves = [rand(3, 16, 6, 10, seed=11), rand(3, 16, 6, 10, seed=12)]
    leaves += [rand(16, 1, 1, 1, seed=13).flatten() + 2.0, rand(16, 1, 1, 1, seed=14).flatten()]
    y, r, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    exact_y, exact_r, exact_weight, exact_bias = (leaf.detach().double().requires_grad_() for leaf in leaves)
    mean = y.detach().mean((0, 2, 3))
    scale = (y.detach().var((0, 2, 3), correction=0) + 1e-3).rsqrt()
    compiled = torch.compile(normalize, dynamic=False, backend="aot_eager")
    z = compiled(y, mean, scale, weight if affine else None, bias if affine else None, r if adds else None, relu)
    gains = (exact_weight, exact_bias) if affine else (None, None)
    exact = F.batch_norm(exact_y, None, None, *gains, training=True, eps=1e-3) + (exact_r if adds else 0.0)
    exact = exact.relu() if relu else exact
    assert apart(z, exact) < 1e-6
    g = rand(3, 16, 6, 10, seed=15)
    z.backward(g)
    exact.backward(g.double())
    pairs = [(y, exact_y), *([(r, exact_r)] if adds else []), *([(weight, exact_weight), (bias, exact_bias)] * affine)]
    for here, there in pairs:
        assert apart(here.grad, there.grad) < 1e-5
