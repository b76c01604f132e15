"""The papers' networks: their layers, order, weights and functions, written out."""

from math import ceil, sqrt

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import gyroscope
from gyroscope_lab import models
from gyroscope_lab.errors import LabError
from gyroscope_lab.models.residual import BasicBlock, PaddedShortcut, PreactBlock, SamePad

KERAS = {"keras": True}
# name, options, layers, parameters: the papers' own counts
PAPERS = [
    ("c10-cnn1", {}, 25, 4_307_296),
    ("c10-cnn1-light", {}, 13, 490_160),
    ("resnet-32", {"classes": 100, **KERAS}, 34, 470_192),
    ("tiny-cnn", {"classes": 200}, 11, 4_812_640),
    ("c10-cnn2", {}, 15, 14_977_728),
    ("wrn-28-10", {"classes": 100}, 29, 36_518_832),
    ("resnet-110", KERAS, 112, 1_722_416),
]


def _id(value):
    return value if isinstance(value, str) else "-".join(value) if isinstance(value, dict) else None


def _images(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "options", "kernels", "parameters"), PAPERS, ids=_id)
def test_the_papers_networks_have_their_layers_and_nothing_else_to_train(name, options, kernels, parameters):
    model = models.make(name, seed=0, **options)
    layers = gyroscope.layers(model)
    assert len(layers) == kernels
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert [name for name, _ in model.named_parameters()] == [layer.name for layer in layers]


@pytest.mark.parametrize(("name", "options", "kernels", "parameters"), PAPERS, ids=_id)
def test_their_batch_normalization_is_kerass_without_gain_and_bias(name, options, kernels, parameters):
    norms = [
        m for m in models.make(name, seed=0, **options).modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
    ]
    assert len(norms) >= 10
    assert {norm.affine for norm in norms} == {False}
    assert {norm.eps for norm in norms} == {1e-3}
    assert {norm.momentum for norm in norms} == {0.1 if name == "tiny-cnn" else 0.01}


def test_the_shortcuts_of_resnet_32_are_layers_13_and_24():
    layers = gyroscope.layers(models.make("resnet-32", seed=0, classes=100, keras=True))
    ones = [layer for layer in layers if layer.parameter.shape[2:] == (1, 1)]
    assert [layer.index for layer in ones] == [13, 24]
    assert [layer.name for layer in ones] == ["stage2_block1.shortcut.weight", "stage3_block1.shortcut.weight"]


@pytest.mark.parametrize(
    ("name", "stages", "each"),
    [
        ("c10-cnn1", (32, 64, 128, 256), 6),
        ("c10-cnn1-light", (16, 32, 64, 128), 3),
        ("tiny-cnn", (32, 64, 128, 256, 512), 2),
    ],
)
def test_stages_have_their_widths_and_pooling_between_them_alone(name, stages, each):
    kinds = [type(module) for module in models.make(name, seed=0)]
    block = [nn.Conv2d, nn.ReLU, nn.BatchNorm2d] * each
    between = [*block, nn.MaxPool2d] * (len(stages) - 1)
    assert kinds == [*between, *block, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear]
    convolutions = [m for m in models.make(name, seed=0) if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [width for width in stages for _ in range(each)]


def test_c10_cnn2_normalizes_before_the_relu_and_pools_after_every_stage():
    block = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]
    stages = [kind for count in (2, 2, 3, 3, 3) for kind in [*block * count, nn.MaxPool2d]]
    head = [nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert [type(module) for module in models.make("c10-cnn2", seed=0)] == stages + head


def test_c10_cnn2_drops_out_where_the_network_it_was_made_from_does():
    dropped = [m.p for m in models.make("c10-cnn2", seed=0, dropout=True).modules() if isinstance(m, nn.Dropout)]
    assert dropped == [0.3, 0.4, *[0.4] * 6, 0.5, 0.5]
    plain, other = (models.make("c10-cnn2", seed=1, dropout=dropout).state_dict() for dropout in (False, True))
    assert all(torch.equal(plain[key], other[key]) for key in plain)


@pytest.mark.parametrize("seed", [0, 1])
def test_initial_norms_are_those_the_papers_recorded(seed):
    norms = [layer.parameter.norm().item() for layer in gyroscope.layers(models.make("c10-cnn1", seed=seed))]
    assert [norms[0], norms[-2], norms[-1]] == pytest.approx([8.05, 22.63, 4.46], rel=0.03)
    resnet = models.make("resnet-32", seed=seed, classes=100, keras=True)
    assert resnet.conv.weight.norm().item() == pytest.approx(4.97, rel=0.06)
    same = [
        layer.parameter.norm().item() for layer in gyroscope.layers(resnet) if layer.parameter.shape[:2] == (16, 16)
    ]
    assert len(same) == 10
    assert sum(same) / 10 == pytest.approx(4.97, rel=0.02)


def test_resnets_start_as_their_papers_do():
    ours = models.make("resnet-20", seed=0)
    kernel = ours.stage3_block2.conv1.weight
    assert kernel.std().item() == pytest.approx(sqrt(2 / (9 * 64)), rel=0.02)
    # From 32 to 64 channels, fan-in and fan-out differ.
    assert ours.stage3_block1.conv1.weight.std().item() == pytest.approx(sqrt(2 / (9 * 64)), rel=0.02)
    assert 0.97 / 8 < ours.classifier.weight.abs().max() <= 1 / 8
    assert ours.classifier.bias.tolist() == [0.0] * 10
    norms = [m for m in ours.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 19
    assert all(bool((norm.weight == 1).all() and (norm.bias == 0).all()) for norm in norms)
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-5, 0.1)}
    wide = models.make("wrn-10-4", seed=0).stage2_block1.conv1.weight
    bound = sqrt(6 / (9 * (64 + 128)))
    assert 0.999 * bound < wide.abs().max() <= bound


def test_the_last_normalization_starts_uniform_and_changes_no_kernel():
    plain = models.make("resnet-20", seed=4).state_dict()
    last = models.make("resnet-lastbn-20", seed=4)
    assert all(torch.equal(plain[key], value) for key, value in last.state_dict().items() if "last_norm" not in key)
    gain = last.last_norm.weight
    assert 0 <= gain.min() < 0.1 < 0.9 < gain.max() <= 1
    assert last.last_norm.bias.tolist() == [0.0] * 64
    features = last[:-2](_images(16, 3, 16, 16)).detach()
    expected = (features - features.mean(0)) / (features.var(0, correction=0) + 1e-5).sqrt() * gain
    torch.testing.assert_close(last.last_norm(features), expected)


@pytest.mark.parametrize(
    ("name", "size"), [("c10-cnn1-light", 32), ("resnet-8", 32), ("tiny-cnn", 64), ("wrn-10-1", 32), ("c10-cnn2", 32)]
)
def test_color_images_of_the_papers_sizes_give_as_many_outputs_as_classes(name, size):
    model = models.make(name, seed=0, classes=100).eval()
    with torch.no_grad():
        assert model(_images(2, 3, size, size)).shape == (2, 100)


# What blocks compute, written out


def _normalized(h, eps):
    mean, variance = h.mean((0, 2, 3), keepdim=True), h.var((0, 2, 3), correction=0, keepdim=True)
    return (h - mean) / (variance + eps).sqrt()


def _convolved(x, weight, stride, before, after):
    """Computed pixel by pixel: y[i, j] = Σ w[k, l] x[stride i + k − before, stride j + l − before]."""
    n, _, height, width = x.shape
    size = weight.shape[-1]
    padded = torch.zeros(n, x.shape[1], before + height + after, before + width + after, dtype=x.dtype)
    padded[:, :, before : before + height, before : before + width] = x
    rows, columns = ((length + before + after - size) // stride + 1 for length in (height, width))
    out = torch.empty(n, weight.shape[0], rows, columns, dtype=x.dtype)
    for i in range(rows):
        for j in range(columns):
            patch = padded[:, :, stride * i : stride * i + size, stride * j : stride * j + size]
            out[:, :, i, j] = torch.einsum("nckl,ockl->no", patch, weight)
    return out


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_tensorflows_same_padding_is_counted_out(size):
    images, conv = _images(2, 3, size, size, dtype=torch.float64), nn.Conv2d(3, 4, 3, stride=2, bias=False).double()
    rows = ceil(size / 2)
    total = max((rows - 1) * 2 + 3 - size, 0)
    expected = _convolved(images, conv.weight, 2, total // 2, total - total // 2)
    assert expected.shape[-1] == rows
    torch.testing.assert_close(conv(SamePad()(images)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_basic_block_is_its_formula_with_shortcut_a(stride):
    block = BasicBlock(4, 4 * stride, stride=stride, norm=lambda width: nn.BatchNorm2d(width, affine=False)).double()
    x = _images(5, 4, 8, 8, dtype=torch.float64)
    h = F.relu(_normalized(_convolved(x, block.conv1.weight, stride, 1, 1), 1e-5))
    h = _normalized(_convolved(h, block.conv2.weight, 1, 1, 1), 1e-5)
    s = x
    if stride == 2:
        s = torch.zeros(5, 8, 4, 4, dtype=torch.float64)
        for i in range(4):
            for j in range(4):
                s[:, :4, i, j] = x[:, :, 2 * i, 2 * j]
    torch.testing.assert_close(block(x), F.relu(h + s), rtol=1e-10, atol=1e-10)


def test_a_block_of_kerass_variant_is_its_formula_with_a_1x1_convolution():
    block = models.make("resnet-8", seed=0, keras=True).stage2_block1.double()
    x = _images(3, 16, 8, 8, dtype=torch.float64)
    h = F.relu(_normalized(_convolved(x, block.conv1.weight, 2, 0, 1), 1e-3))
    h = _normalized(_convolved(h, block.conv2.weight, 1, 1, 1), 1e-3)
    s = _convolved(x, block.shortcut.weight, 2, 0, 0)
    torch.testing.assert_close(block(x), F.relu(h + s), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shared", [False, True])
def test_a_preactivated_block_is_its_formula(shared):
    norm = nn.BatchNorm2d
    block = PreactBlock(4, 6, stride=2, norm=norm, projection=True, shared=shared, dropout=0.5).double().train()
    block.dropout.eval()
    x = _images(5, 4, 8, 8, dtype=torch.float64)
    p = F.relu(_normalized(x, 1e-5))
    h = F.relu(_normalized(_convolved(p, block.conv1.weight, 2, 1, 1), 1e-5))
    h = _convolved(h, block.conv2.weight, 1, 1, 1)
    s = _convolved(p if shared else x, block.shortcut.weight, 2, 0, 0)
    torch.testing.assert_close(block(x), h + s, rtol=1e-10, atol=1e-10)


def test_dropout_stands_before_the_second_convolution_and_in_training_alone():
    block = models.make("wrn-10-1", seed=0, dropout=0.4).stage1_block1
    seen = []
    block.conv2.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    block.relu2.register_forward_hook(lambda module, inputs, output: seen.append(output))
    block.train()(_images(8, 16, 8, 8))
    active, kept = seen
    share = (kept[active > 0] == 0).double().mean().item()
    assert share == pytest.approx(0.4, abs=0.02)
    torch.testing.assert_close(kept[kept > 0], active[kept > 0] / 0.6)
    seen.clear()
    block.eval()(_images(8, 16, 8, 8))
    assert torch.equal(*seen)


def test_shortcut_a_passes_gradients_back_to_the_pixels_it_took():
    x = torch.zeros(1, 2, 4, 4, requires_grad=True)
    PaddedShortcut(2, 5, stride=2)(x).sum().backward()
    taken = torch.zeros(4, 4)
    taken[::2, ::2] = 1
    assert torch.equal(x.grad[0], torch.stack([taken, taken]))


@pytest.mark.parametrize("depth", [20, 110])
def test_vgg_is_a_resnet_without_shortcuts(depth):
    resnet, plain = (gyroscope.layers(models.make(f"{name}-{depth}", seed=2)) for name in ("resnet", "vgg"))
    assert len(plain) == depth
    assert all(torch.equal(a.parameter, b.parameter) for a, b in zip(resnet, plain, strict=True))
    strides = [layer.module.stride for layer in plain[:-1]]
    assert strides == [layer.module.stride for layer in resnet[:-1]]


@pytest.mark.parametrize("depth", [5, 6, 7, 8, 16])
def test_vgg_has_any_number_of_layers_in_stages_as_equal_as_can_be(depth):
    layers = gyroscope.layers(models.make(f"vgg-{depth}", seed=0, batch_norm=True))
    widths = [layer.parameter.shape[0] for layer in layers[:-1]]
    assert len(layers) == depth
    counts = [widths.count(16) - 1, widths.count(32), widths.count(64)]
    assert widths == sorted(widths)
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1


def test_vgg_is_convolutions_normalizations_and_relus():
    plain = [type(module) for module in models.make("vgg-5", seed=0)]
    head = [nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear]
    assert plain == [nn.Conv2d, nn.ReLU] * 4 + head
    normalized = models.make("vgg-5", seed=0, batch_norm=True, affine=False)
    assert [type(module) for module in normalized] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU] * 4 + head
    assert normalized.norm1.weight is None


def test_a_resnet_without_normalization_has_the_same_kernels_and_no_other_module_with_a_state():
    bare = models.make("resnet-14", seed=1, batch_norm=False)
    kernels = [*(layer.name for layer in gyroscope.layers(bare)), "classifier.bias"]
    assert list(bare.state_dict()) == kernels
    normalized = models.make("resnet-14", seed=1).state_dict()
    assert all(torch.equal(value, normalized[key]) for key, value in bare.state_dict().items())


def test_preresnet_v1_lacks_the_last_normalization_alone():
    whole, lacking = (
        list(models.make(f"{name}-14", seed=0).named_children()) for name in ("preresnet", "preresnet-v1")
    )
    assert [name for name, _ in whole] == [*[n for n, _ in lacking[:-4]], "norm", *[n for n, _ in lacking[-4:]]]
    shared = [module.shared for _, module in whole if isinstance(module, PreactBlock)]
    assert shared == [True, False] * 3


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("resnet-9", {}, r"`depth` must be 6n \+ 2: 8, 14, 20, …, got 9\. Try 8"),
        ("resnet-2", {}, r"`depth` must be 6n \+ 2: 8, 14, 20, …, got 2\. Try 8"),
        (
            "resnet-110",
            {"keras": True, "last_norm": True},
            "`keras` must be False with batch_norm=False, last_norm=True, pool_norm=True or a divisor: it is one",
        ),
        (
            "resnet-8",
            {"keras": True, "batch_norm": False},
            "`keras` must be False with batch_norm=False, last_norm=True, pool_norm=True or a divisor: it is one",
        ),
        ("resnet-8", {"keras": True, "divisor": 2.0}, "`keras` must be False with"),
        ("preresnet-112", {}, r"`depth` must be 6n \+ 2: 8, 14, 20, …, got 112\. Try 110"),
        ("resnet-8", {"classes": 0}, "`channels` and `classes` must be whole numbers ≥ 1, got 3 and 0"),
        ("c10-cnn1", {"channels": 0}, "`channels` and `classes` must be whole numbers ≥ 1, got 0 and 10"),
        ("wrn-20-4", {}, r"`depth` must be 6n \+ 4: 10, 16, 22, …, got 20\. Try 22"),
        ("c10-cnn2", {"dropout": 0.3}, r"`dropout` of c10-cnn2 must be True or False, got 0\.3"),
        ("wrn-28-2", {"dropout": 1.0}, r"`dropout` must be a share ≥ 0 and < 1, got 1\.0"),
        ("vgg-4", {}, r"`depth` must be a whole number ≥ 5 \(one, one per stage, a classifier\), got 4"),
        ("mlp-2x3", {"init": "he"}, "`init` must be one of glorot_uniform, he_norm.*onal, uniform, got 'he'"),
        ("mlp-2x3", {"activation": "tanh"}, "`activation` must be 'relu' or 'linear', got 'tanh'"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith(("r", "p", "c", "w", "v", "m")) else "",
)
def test_networks_that_do_not_exist_are_refused(name, options, says):
    with pytest.raises(LabError, match=says):
        models.make(name, seed=0, **options)
