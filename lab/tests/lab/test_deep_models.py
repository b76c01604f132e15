"""Very deep networks: recomputation in the backward pass changes no number; ImageNet's ResNets are the known ones."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import gyroscope
from gyroscope_lab import models
from gyroscope_lab.errors import LabError
from gyroscope_lab.models.imagenet_resnet import Bottleneck
from gyroscope_lab.models.residual import Block, PreactBlock, recomputed

DEEP = {
    "resnet-14": {},
    "resnet-8": {"keras": True},
    "resnet-lastbn-8": {},
    "preresnet-8": {},
    "preresnet-v1-8": {},
}


def images(count: int, size: int = 8, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn((count, 3, size, size), dtype=dtype, generator=torch.Generator().manual_seed(seed))


def both(name: str, **options: object) -> tuple[nn.Module, nn.Module]:
    """The network without and with recomputation."""
    plain, again = (models.make(name, seed=1, checkpointed=checkpointed, **options) for checkpointed in (False, True))
    return plain, again


def step(model: nn.Module, x: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), torch.arange(len(x)) % 5)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * parameter.grad
    return loss


def same(a: nn.Module, b: nn.Module) -> bool:
    """Return whether parameters, running averages, counts and gradients are equal, bit for bit."""
    states = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    gradients = zip(a.parameters(), b.parameters(), strict=True)
    return all(k == m and torch.equal(u, v) for (k, u), (m, v) in states) and all(
        (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad) for p, q in gradients
    )


@pytest.mark.parametrize("name", DEEP)
def test_recomputation_changes_no_loss_gradient_weight_or_running_average(name: str) -> None:
    plain, again = both(name, **DEEP[name])
    assert same(plain, again)
    for seed in range(2):
        x = images(3, seed=seed)
        for model in (plain, again):
            model.zero_grad()
        assert torch.equal(step(plain, x), step(again, x))
        assert same(plain, again)
    counted = {int(value) for key, value in again.state_dict().items() if key.endswith("num_batches_tracked")}
    assert counted == {2}
    assert torch.equal(plain.eval()(images(2)), again.eval()(images(2)))


def test_a_bottleneck_that_is_recomputed_is_the_same() -> None:
    plain = Bottleneck(3, 2, stride=2)
    again = copy.deepcopy(plain)
    again.checkpointed = True
    for block in (plain, again):
        block(images(3)).square().sum().backward()
    assert same(plain, again)


def test_what_is_inside_a_block_is_let_go_of_and_computed_again() -> None:
    for model, alive, calls in zip(both("resnet-8"), (True, False), (1, 2), strict=True):
        held: list[weakref.ref[Tensor]] = []
        model.stage2_block1.relu1.register_forward_hook(lambda m, i, y, held=held: held.append(weakref.ref(y)))
        outputs = model(images(2))
        assert (held[0]() is not None) == alive
        outputs.sum().backward()
        assert len(held) == calls


def test_a_mode_that_changes_before_the_backward_pass_changes_nothing() -> None:
    plain, again = both("resnet-8")
    losses = [model(images(3)).square().sum() for model in (plain, again)]
    for model, loss in zip((plain, again), losses, strict=True):
        model.eval()
        loss.backward()
        assert not any(module.training for module in model.modules())
    assert same(plain, again)


def test_a_backward_pass_taken_twice_counts_a_batch_once() -> None:
    plain, again = both("preresnet-8")
    for model in (plain, again):
        loss = model(images(3)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert same(plain, again)


def test_gradients_of_gradients_are_the_same() -> None:
    products = []
    for model in both("resnet-8"):
        weights = [layer.parameter for layer in gyroscope.layers(model.double())]
        loss = F.cross_entropy(model(images(3, dtype=torch.float64)), torch.arange(3))
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        products.append(torch.autograd.grad(sum(g.square().sum() for g in gradients), weights))
    for one, other in zip(*products, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_evaluation_with_gradients_leaves_the_averages_alone() -> None:
    plain, again = both("resnet-8")
    before = copy.deepcopy(again.state_dict())
    for model in (plain.eval(), again.eval()):
        model(images(2)).sum().backward()
    assert same(plain, again)
    assert all(torch.equal(before[key], value) for key, value in again.state_dict().items())


def test_a_failing_backward_pass_leaves_modules_as_they_were() -> None:
    _, model = both("resnet-8")
    loss = model(images(2)).sum()
    state = copy.deepcopy(model.state_dict())

    def fails(module: nn.Module, inputs: object) -> None:
        raise RuntimeError("no more")

    model.stage1_block1.conv2.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="no more"):
        loss.backward()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert len(state) == len(model.state_dict())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_units_are_dropped_out_the_same_both_times(dropout: float) -> None:
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        block = PreactBlock(3, 6, stride=2, norm=nn.BatchNorm2d, dropout=dropout)
        block.checkpointed = checkpointed
        block(images(4)).square().sum().backward()
        torch.rand(1)
        gradients.append([parameter.grad for parameter in block.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_random_state_is_read_for_blocks_that_drop_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it cannot be captured in a CUDA graph."""
    _, model = both("resnet-8")
    monkeypatch.setattr(torch, "get_rng_state", lambda: pytest.fail("read"))
    model(images(2)).sum().backward()
    block = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    recomputed(block.eval(), block, torch.ones(3, 2)).sum().backward()
    with pytest.raises(pytest.fail.Exception, match="read"):
        recomputed(block.train(), block, torch.ones(3, 2))


def test_the_analysis_of_a_recomputed_network_is_the_same() -> None:
    x, y = images(6, dtype=torch.float64), torch.arange(6) % 5
    one, other = (gyroscope.condition(m.double(), F.cross_entropy, (x, y)).rows() for m in both("resnet-8"))
    assert [row["layer"] for row in one] == [row["layer"] for row in other]
    for quantity in ("lambda_x", "lambda_g", "dying"):
        assert [row[quantity] for row in one] == pytest.approx([row[quantity] for row in other], rel=1e-9)


def test_names_and_order_of_layers_are_the_same() -> None:
    plain, again = both("preresnet-14")
    names = [layer.name for layer in gyroscope.layers(plain)]
    assert [layer.name for layer in gyroscope.layers(again, sample=images(2))] == names


def test_a_compiled_network_is_one_graph_and_gives_the_same() -> None:
    plain, again = both("resnet-8")
    torch._dynamo.reset()
    compiled = torch.compile(again, backend="eager", fullgraph=True)
    for model in (plain, compiled):
        model(images(3)).square().sum().backward()
    assert same(plain, again)


@pytest.mark.gpu
def test_a_recomputed_step_is_captured_in_a_cuda_graph() -> None:
    results = []
    for model in both("resnet-lastbn-14"):
        model, x, y = model.cuda(), images(4).cuda(), torch.arange(4, device="cuda")

        def work(model: nn.Module = model, x: Tensor = x, y: Tensor = y) -> None:
            model.zero_grad(set_to_none=False)
            F.cross_entropy(model(x), y).backward()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        x.copy_(images(4, seed=1))
        graph.replay()
        results.append((model, [parameter.grad.clone() for parameter in model.parameters()]))
    (plain, expected), (again, found) = results
    assert int(again.last_norm.num_batches_tracked) == int(plain.last_norm.num_batches_tracked) == 2
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(again.state_dict(), plain.state_dict())


def test_1202_layers_take_a_step_with_recomputation_and_without() -> None:
    made = models.make("resnet-1202", seed=0)
    assert len(gyroscope.layers(made)) == 1202
    assert sum(p.numel() for p in made.parameters()) == _cifar_parameters(200)
    losses, gradients = [], []
    for checkpointed in (False, True):
        for module in made.modules():
            if isinstance(module, Block):
                module.checkpointed = checkpointed
        made.zero_grad()
        loss = F.cross_entropy(made(images(2)[..., :8, :8]), torch.tensor([1, 7]))
        loss.backward()
        losses.append(loss.item())
        gradients.append([parameter.grad for parameter in made.parameters()])
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert int(made.stage2_block77.norm2.num_batches_tracked) == 2


def _cifar_parameters(n: int) -> int:
    """3×3 kernels and two numbers for each of their channels, counted stage by stage, and the classifier."""
    total = 9 * 3 * 16 + 2 * 16
    for before, width in ((16, 16), (16, 32), (32, 64)):
        total += 9 * before * width + 9 * width * width * (2 * n - 1) + 2 * width * 2 * n
    return total + 64 * 10 + 10


# Classifiers without a bias


@pytest.mark.parametrize(
    "name", ["resnet-8", "resnet-lastbn-8", "preresnet-8", "preresnet-v1-8", "vgg-8", "imagenet-resnet-18"]
)
def test_a_classifier_without_bias_changes_nothing_else(name: str) -> None:
    with_one, without = (models.make(name, seed=3, classes=10, classifier_bias=bias) for bias in (True, False))
    assert with_one.classifier.bias.tolist() == [0.0] * 10
    assert without.classifier.bias is None
    state = without.state_dict()
    assert list(state) == [key for key in with_one.state_dict() if key != "classifier.bias"]
    assert all(torch.equal(with_one.state_dict()[key], value) for key, value in state.items())


# ImageNet


@pytest.mark.parametrize(("depth", "parameters"), [(18, 11_689_512), (50, 25_557_032)])
def test_imagenets_networks_have_the_published_numbers_of_parameters(depth: int, parameters: int) -> None:
    model = models.make(f"imagenet-resnet-{depth}", seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    layers = gyroscope.layers(model)
    assert not any(block.checkpointed for block in model if isinstance(block, Block))
    shortcuts = [layer for layer in layers if "shortcut" in layer.name]
    assert len(layers) - len(shortcuts) == depth
    assert len(shortcuts) == (3 if depth == 18 else 4)
    if depth == 50:
        used = gyroscope.layers(model, sample=images(1, 32))
        assert [layer.name for layer in used] == [layer.name for layer in layers]
        sizes = []
        for block in ("stage1_block1", "stage2_block1", "stage3_block1", "stage4_block3"):
            model.get_submodule(block).register_forward_hook(lambda m, i, output: sizes.append(tuple(output.shape[1:])))
        with torch.no_grad():
            assert model.eval()(images(1, 64)).shape == (1, 1000)
        assert sizes == [(256, 16, 16), (512, 8, 8), (1024, 4, 4), (2048, 2, 2)]
    kernel = model.stage4_block2.conv2.weight
    assert kernel.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.01)
    bound = model.classifier.in_features**-0.5
    assert 0.99 * bound < model.classifier.weight.abs().max() <= bound


def test_the_last_normalization_and_dropout_stand_before_imagenets_classifier_and_change_no_kernel() -> None:
    plain = models.make("imagenet-resnet-18", seed=2, classes=4).state_dict()
    last = models.make("imagenet-resnet-lastbn-18", seed=2, classes=4, dropout=0.3, checkpointed=True)
    assert [name for name, _ in last.named_children()][-5:] == [
        "average",
        "flatten",
        "last_norm",
        "dropout",
        "classifier",
    ]
    assert last.dropout.p == 0.3
    assert [block.checkpointed for block in last if isinstance(block, Block)] == [True] * 8
    assert all(torch.equal(plain[key], value) for key, value in last.state_dict().items() if "last_norm" not in key)
    gain = last.last_norm.weight
    assert 0 <= gain.min() < 0.02 < 0.98 < gain.max() <= 1
    assert last.last_norm.bias.tolist() == [0.0] * 512


@pytest.mark.parametrize("stride", [1, 2])
def test_a_bottleneck_is_its_formula(stride: int) -> None:
    block = Bottleneck(6, 2, stride=stride).double()
    x = torch.randn((5, 6, 4, 4), dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def normalized(h: Tensor) -> Tensor:
        mean, variance = h.mean((0, 2, 3), keepdim=True), h.var((0, 2, 3), correction=0, keepdim=True)
        return (h - mean) / (variance + 1e-5).sqrt()

    h = torch.einsum("oi,nihw->nohw", block.conv1.weight[:, :, 0, 0], x)
    h = F.conv2d(normalized(h).relu(), block.conv2.weight, stride=stride, padding=1)
    h = torch.einsum("oi,nihw->nohw", block.conv3.weight[:, :, 0, 0], normalized(h).relu())
    s = torch.einsum("oi,nihw->nohw", block.shortcut[0].weight[:, :, 0, 0], x[:, :, ::stride, ::stride])
    torch.testing.assert_close(block(x), (normalized(h) + normalized(s)).relu(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"depth": 20}, "`depth` must be one of 18, 34, 50, 101, 152, got 20"),
        ({"depth": 18, "dropout": 1.0}, r"`dropout` must be a share ≥ 0 and < 1, got 1\.0"),
        ({"depth": 18, "classes": 0}, "`channels` and `classes` must be whole numbers ≥ 1, got 3 and 0"),
    ],
    ids=["depth", "dropout", "classes"],
)
def test_networks_for_imagenet_that_do_not_exist_are_refused(options: dict[str, float], says: str) -> None:
    depth = options.pop("depth")
    with pytest.raises(LabError, match=says):
        models.make(f"imagenet-resnet-{depth}", seed=0, **options)


# Deep perceptrons


def perceptron(depth: int, normalized: bool) -> nn.Module:
    options = {"batch_norm": True, "affine": True, "gain": "uniform"} if normalized else {}
    return models.make(f"mlp-{depth}x16", seed=0, inputs=9, **options).double()


def examples() -> tuple[Tensor, Tensor]:
    return torch.randn((12, 9), dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 10


@pytest.mark.parametrize("normalized", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("depth", [5, 20, 100])
def test_perceptrons_of_any_depth_are_their_formula(depth: int, normalized: bool) -> None:
    model, (x, y) = perceptron(depth, normalized), examples()
    assert len(gyroscope.layers(model)) == depth
    outputs: list[Tensor] = []
    for module in model:
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, inputs, output: outputs.append(output.detach()))
    F.cross_entropy(model(x), y).backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    # Layer by layer, from what the network itself had there: deep ones make much of the last digit.
    for k, h in enumerate(outputs[:-1], start=1):
        if normalized:
            gain = model.get_submodule(f"norm{k}").weight
            h = (h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt() * gain
        expected = h.relu() @ model.get_submodule(f"linear{k + 1}").weight.T
        torch.testing.assert_close(outputs[k], expected, rtol=1e-10, atol=1e-14 if normalized else 0)


@pytest.mark.parametrize("normalized", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("depth", [5, 20])
def test_perceptrons_learn_from_a_step(depth: int, normalized: bool) -> None:
    model, (x, y) = perceptron(depth, normalized), examples()
    before = F.cross_entropy(model(x), y)
    before.backward()
    with torch.no_grad():
        square = sum(parameter.grad.square().sum() for parameter in model.parameters())
        for parameter in model.parameters():
            parameter -= 1e-5 * parameter.grad / square.sqrt()
        assert F.cross_entropy(model(x), y) < before


def test_the_signal_does_not_come_through_100_layers_that_are_not_normalized() -> None:
    (x, _), plain, normalized = examples(), perceptron(100, False), perceptron(100, True)
    assert 0 < plain(x).abs().max() < 1e-35
    assert normalized(x).abs().max() > 1e-2


@pytest.mark.parametrize("kind", [nn.Dropout, nn.AlphaDropout, nn.Dropout1d])
def test_what_was_dropped_is_dropped_again(kind: type[nn.Module]) -> None:
    block = nn.Sequential(nn.Linear(4, 4), kind(0.5), nn.Tanh())
    gradients = []
    for through in (lambda x: recomputed(block, block, x), block):
        x = torch.arange(8.0).view(2, 4).requires_grad_()
        torch.manual_seed(3)
        through(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[1])
