"""A normalization stands before the last linear layer, or nothing was touched and the error says why."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from layer_models import Conv1D, ResNet
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F  # noqa: N812

import gyroscope
from gyroscope.errors import LayerError
from gyroscope_lab import models

IMAGES = torch.zeros(2, 3, 8, 8)


class Does(nn.Module):
    """Some modules, and what is done with them."""

    def __init__(self, forward: Callable[..., object], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: object) -> object:
        return self._forward(self, x)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()


# What it does


def test_the_last_layer_multiplies_the_normalized_input() -> None:
    model, x = mlp(), random(20, 5)
    features = model[:-1](x).detach()
    done = gyroscope.last_norm(model, seed=3)
    gain = torch.rand(8, generator=torch.Generator().manual_seed(3)).double()
    rows = (features - features.mean(0)) / (features.var(0, correction=0) + 1e-5).sqrt() * gain
    torch.testing.assert_close(model(x), rows @ model[-1].weight.T + model[-1].bias, rtol=1e-12, atol=1e-12)
    assert torch.equal(done.module.weight, gain)
    assert done.module.bias.tolist() == [0.0] * 8


def test_gains_of_one_divide_by_the_deviation_alone() -> None:
    model, x = mlp(), random(20, 5)
    features = model[:-1](x).detach()
    gyroscope.last_norm(model, gain="ones")
    rows = (features - features.mean(0)) / (features.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(model(x), rows @ model[-1].weight.T + model[-1].bias, rtol=1e-12, atol=1e-12)


def test_layer_normalization_looks_at_one_token_alone() -> None:
    model, x = mlp(), random(4, 7, 5)
    features = model[:-1](x).detach()
    done = gyroscope.last_norm(model, kind="layer", gain="ones")
    assert isinstance(done.module, nn.LayerNorm)
    rows = (features - features.mean(-1, keepdim=True)) / (features.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(model(x), rows @ model[-1].weight.T + model[-1].bias, rtol=1e-12, atol=1e-12)


def test_batch_normalization_of_sequences_takes_every_token_for_an_example() -> None:
    model = mlp()
    gyroscope.last_norm(model)
    flat, x = copy.deepcopy(model), random(4, 7, 5)
    torch.testing.assert_close(model(x), flat(x.reshape(28, 5)).reshape(4, 7, 3), rtol=1e-12, atol=1e-12)
    assert torch.equal(model[-1].last_norm.running_var, flat[-1].last_norm.running_var)


def test_an_input_given_by_name_is_normalized_too() -> None:
    model = Does(lambda m, x: m.fc(input=x), fc=nn.Linear(4, 2).double())
    gyroscope.last_norm(model)
    x = random(6, 4)
    assert torch.equal(model(x), F.linear(model.fc.last_norm(x), model.fc.weight, model.fc.bias))


def test_every_name_stays_and_an_old_checkpoint_is_loaded() -> None:
    old = ResNet().state_dict()
    model = ResNet()
    gyroscope.last_norm(model)
    added = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert [name for name in model.state_dict() if name not in old] == [f"fc.last_norm.{name}" for name in added]
    loaded = model.load_state_dict(old, strict=False)
    assert loaded.missing_keys
    assert all(name.startswith("fc.last_norm.") for name in loaded.missing_keys)
    assert not loaded.unexpected_keys
    assert torch.equal(model.fc.weight, old["fc.weight"])


def test_the_layers_of_the_model_are_those_it_had() -> None:
    model = ResNet()
    before = [(layer.name, layer.parameter) for layer in gyroscope.layers(model)]
    gyroscope.last_norm(model)
    after = [(layer.name, layer.parameter) for layer in gyroscope.layers(model)]
    assert all(a[0] == b[0] and a[1] is b[1] for a, b in zip(before, after, strict=True))


def test_what_was_done_is_told() -> None:
    model = ResNet()
    done = gyroscope.last_norm(model, IMAGES)
    assert done.layer == gyroscope.layers(model)[-1]
    assert done.layer.module is model.fc
    assert (done.features, done.name, done.parameters, done.gain) == (8, "fc.last_norm", 16, "uniform")
    assert done.module is model.get_submodule(done.name)
    assert str(done) == (
        "Batch normalization of 8 features now precedes 'fc.weight'. It is 'fc.last_norm' and adds 16 parameters "
        "(γ from U(0, 1), β 0). Create the optimizer after this. No other name has changed."
    )
    other = gyroscope.last_norm(nn.Linear(5, 2), kind="layer", gain="ones")
    assert str(other).startswith(
        "Layer normalization of 5 features now precedes 'weight'. It is 'last_norm' and adds 10 parameters (γ 1, β 0)."
    )


def test_the_laboratorys_resnet_becomes_its_resnet_with_the_last_normalization() -> None:
    ours, papers = models.make("resnet-8", seed=1).double(), models.make("resnet-lastbn-8", seed=1).double()
    gyroscope.last_norm(ours, IMAGES.double()).module.weight.data.copy_(papers.last_norm.weight)
    x = random(6, 3, 8, 8)
    for _ in range(2):
        assert torch.equal(ours(x), papers(x))
    assert torch.equal(ours.eval()(x), papers.eval()(x))


def test_the_analysis_of_the_layer_sees_what_it_multiplies() -> None:
    model, x, y = mlp(), random(30, 5), torch.arange(30) % 3
    done = gyroscope.last_norm(model, gain="ones")
    inputs = done.module(model[:-1](x)).detach()
    found = gyroscope.condition(model, F.cross_entropy, (x, y)).rows()[-1]
    assert found["layer"] == "4.weight"
    assert found["lambda_x"] == pytest.approx(torch.linalg.eigvalsh(inputs.T @ inputs / 30)[-1].item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_device_and_dtype_are_those_of_the_layer(dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    done = gyroscope.last_norm(model)
    assert {t.dtype for t in (*done.module.parameters(), done.module.running_mean)} == {dtype}
    assert {t.device for t in (*done.module.parameters(), done.module.running_mean)} == {model[-1].weight.device}
    assert model(random(9, 5).to(dtype)).dtype == dtype


def test_the_mode_is_that_of_the_layer() -> None:
    assert not gyroscope.last_norm(mlp().eval()).module.training
    assert gyroscope.last_norm(mlp()).module.training


def test_gains_depend_on_the_seed_alone_and_the_random_state_is_left_alone() -> None:
    made = [mlp() for _ in range(3)]
    before = torch.get_rng_state()
    first, again, other = (
        gyroscope.last_norm(model, seed=seed).module.weight for model, seed in zip(made, (0, 0, 1), strict=True)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0 <= first.min() < first.max() <= 1


def test_copies_and_saved_models_are_normalized_by_their_own() -> None:
    model, x = ResNet().double(), random(4, 3, 8, 8)
    gyroscope.last_norm(model)
    model.drop.p = 0.0
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other.train()(x), copy.deepcopy(model).train()(x))
        assert other.fc.last_norm.num_batches_tracked == 1
    assert model.fc.last_norm.num_batches_tracked == 0


def test_a_model_compiled_afterwards_is_one_graph_and_the_same() -> None:
    model, x = mlp(), random(6, 5)
    gyroscope.last_norm(model)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    assert torch.equal(compiled._orig_mod[-1].last_norm.running_mean, model[-1].last_norm.running_mean)


def test_data_parallel_wrappers_and_weight_norm_are_gone_through() -> None:
    model = nn.DataParallel(mlp())
    nn.utils.parametrizations.weight_norm(model.module[-1])
    assert gyroscope.last_norm(model, random(2, 5)).name == "4.last_norm"
    assert model.module[-1].last_norm.num_features == 8


# Which layer it finds


def test_a_linear_layer_that_is_the_whole_model() -> None:
    model = nn.Linear(3, 2)
    assert gyroscope.last_norm(model).name == "last_norm"
    assert list(model.state_dict())[:4] == ["weight", "bias", "last_norm.weight", "last_norm.bias"]


def test_a_linear_layer_with_its_weight_the_other_way_round() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), Conv1D(2, 6))
    assert gyroscope.last_norm(model, torch.zeros(2, 4)).features == 6
    assert model(torch.randn(5, 4)).shape == (5, 2)


def head_first() -> nn.Module:
    return Does(
        lambda m, x: m.head(torch.relu(m.body(x))), head=nn.Linear(4, 2), body=nn.Linear(4, 4), steps=nn.Embedding(9, 4)
    )


def test_a_sample_tells_the_last_layer_where_registration_misleads() -> None:
    assert "'body.weight' is registered last, but 'head.weight' before it has 2 outputs" in refused(head_first())
    assert gyroscope.last_norm(head_first(), torch.zeros(2, 4)).layer.name == "head.weight"
    assert gyroscope.last_norm(head_first(), (torch.zeros(2, 4),)).layer.name == "head.weight"
    assert gyroscope.last_norm(head_first(), {"x": torch.zeros(2, 4)}).layer.name == "head.weight"


@pytest.mark.parametrize("name", ["head", "head.weight"])
def test_a_layer_is_taken_by_its_name(name: str) -> None:
    assert gyroscope.last_norm(head_first(), layer=name).layer.name == "head.weight"
    assert gyroscope.last_norm(head_first(), torch.zeros(2, 4), layer=name).layer.name == "head.weight"


def test_features_given_along_with_outputs_do_not_make_another_end() -> None:
    def both(m: nn.Module, x: Tensor) -> dict[str, Tensor]:
        features = torch.relu(m.body(x)) + x
        return {"features": features, "outputs": m.head(features)}

    model = Does(both, head=nn.Linear(4, 2), body=nn.Linear(4, 4))
    assert gyroscope.last_norm(model, torch.zeros(2, 4)).layer.name == "head.weight"


def test_weights_that_are_cast_or_transposed_first_are_followed() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.empty(len(x), 4)
        hidden[:] = x @ m.body.weight.float().T
        hidden.relu_()
        return m.head(hidden)

    model = Does(forward, head=nn.Linear(4, 2), body=nn.Linear(4, 4))
    assert gyroscope.last_norm(model, torch.zeros(2, 4)).layer.name == "head.weight"


@pytest.mark.parametrize("sample", [None, torch.zeros(2, 4)], ids=["registered", "used"])
def test_a_relu_between_them_makes_a_normalization_another_matter(sample: Tensor | None) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 2))
    assert gyroscope.last_norm(model, sample).name == "3.last_norm"


def test_the_sample_leaves_the_model_as_it_was() -> None:
    model = ResNet()
    state = copy.deepcopy(model.state_dict())
    before = torch.get_rng_state()
    gyroscope.last_norm(model, torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert model.training
    assert model.block1.bn1.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules() if m is not model.fc]
    assert set(hooks) == {0}


# Rejected models


def refused(model: nn.Module, *args: object, **options: object) -> str:
    """Return the error's message; the model must be as before."""
    names = [name for name, _ in model.named_modules()]
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    with pytest.raises(LayerError) as error:
        gyroscope.last_norm(model, *args, **options)
    assert [name for name, _ in model.named_modules()] == names
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    return str(error.value)


def test_a_model_without_a_linear_layer() -> None:
    said = refused(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 10, 1)))
    assert said == "The model has no linear layer. Its 2 layers are of these kinds: conv."
    assert "has no layers" in refused(nn.ReLU())


def test_a_model_that_ends_with_another_kind_of_layer() -> None:
    coder = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (6, 1)), nn.ConvTranspose1d(6, 3, 4))
    said = refused(coder)
    assert "the layer registered last, '2.weight', is of kind 'conv_transpose'" in said
    assert said.endswith("pass a `sample` or the name: layer='0.weight'.")
    said = refused(coder, torch.zeros(2, 4))
    assert "the layer that the outputs come from, '2.weight', is of kind 'conv_transpose'" in said
    assert said.endswith("pass the name: layer='0.weight'.")
    assert gyroscope.last_norm(coder, layer="0.weight").features == 4


def test_outputs_that_no_layer_could_be_followed_to() -> None:
    model = Does(lambda m, x: torch.zeros(2), head=nn.Linear(4, 2))
    assert "linear layer: no layer reaches the outputs" in refused(model, torch.zeros(2, 4))


def heads() -> nn.Module:
    return Does(
        lambda m, x: [head(m.body(x)) for head in m.heads.values()],
        body=nn.Linear(4, 4),
        heads=nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)}),
    )


@pytest.mark.parametrize(
    ("model", "sample", "what"),
    [
        (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.BatchNorm1d(3)), torch.zeros(2, 4), "a norm"),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.zeros(2, 3, 8), "a normalization"),
        (nn.TransformerEncoderLayer(8, 2, 16, norm_first=True), torch.zeros(2, 3, 8), "a sum with earlier layers"),
    ],
    ids=["norm after it", "transformer", "residual stream"],
)
def test_a_network_that_goes_on_after_its_last_linear_layer(model: nn.Module, sample: Tensor, what: str) -> None:
    before = [name for name, _ in model.named_modules()]
    with pytest.raises(LayerError, match=f"does not end with a linear layer: between .* is {what}"):
        gyroscope.last_norm(model, sample)
    assert [name for name, _ in model.named_modules()] == before


@pytest.mark.parametrize(
    ("forward", "shape"),
    [
        (lambda m, x: torch.relu(m.body(x)) @ m.table.t(), (3, 4)),
        (lambda m, x: F.linear(m.body(x), m.table), (4, 4)),
        (lambda m, x: F.linear(m.body(x), m.table), (1, 4)),
        (lambda m, x: -torch.cdist(m.body(x), m.table).softmax(-1), (3, 4)),
        (lambda m, x: (m.body(x)[:, None] - m.table).square().sum(-1), (3, 4)),
        (lambda m, x: torch.einsum("nd,kd->nk", m.body(x), m.table / m.table.norm()), (3, 4)),
    ],
    ids=["product", "square", "one output", "prototypes", "distances", "normalized"],
)
def test_a_last_matrix_that_is_no_layer_is_named(forward: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    model = Does(forward, body=nn.Linear(5, 4), table=nn.Parameter(torch.ones(shape)))
    assert refused(model, torch.zeros(2, 5)) == (
        "The model does not end with a linear layer: between 'body.weight' and the outputs is a product with "
        "'table'. If this layer is meant, pass its name: layer='body.weight'."
    )


def test_parameters_that_scale_and_shift_outputs_or_come_before_the_layer_are_no_last_matrix() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.head(torch.relu(x @ m.first + m.places)) * m.scale + m.bias.type_as(m.first)

    model = Does(
        forward,
        first=nn.Parameter(torch.ones(5, 4)),
        places=nn.Parameter(torch.ones(2, 4)),
        head=nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        scale=nn.Parameter(torch.ones(1, 1)),
        bias=nn.Parameter(torch.ones(1, 3)),
    )
    assert gyroscope.last_norm(model, torch.zeros(2, 5)).layer.name == "head.weight"


def test_several_heads() -> None:
    assert refused(heads(), torch.zeros(2, 4)) == (
        "The outputs come from 2 parallel layers: 'heads.a.weight', 'heads.b.weight'. Pass the name of one: layer=..."
    )
    said = refused(heads())
    assert said.startswith("'heads.b.weight' is one of 2 linear layers of 4 inputs in a ModuleDict: they may follow")
    assert "Pass a `sample`" in said
    assert gyroscope.last_norm(heads(), layer="heads.a").name == "heads.a.last_norm"


def in_turn(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            {"a": nn.Linear(5, 2), "b": nn.Linear(5, 3)},
            "last, but 'a.weight' before it has 2 outputs and 'b.weight'",
        ),
        (
            {"fc": nn.Linear(5, 2), "aux": nn.Linear(5, 2)},
            "'fc.weight' before it has 2 outputs and 'aux.weight'",
        ),
        (
            {"a": in_turn(5, 4, 2), "b": in_turn(5, 4, 3)},
            "'a.1.weight' before it has 2 outputs and 'b.0.weight'",
        ),
        ({"table": nn.Parameter(torch.ones(3, 5))}, "'table', 3 × 5, may multiply the output of 'body.weight'"),
        ({"w": nn.Parameter(torch.ones(3, 5))}, "'w', 3 × 5, may multiply the output of 'body.weight'"),
    ],
    ids=["heads", "auxiliary", "heads of two layers", "matrix", "layer of the model's own"],
)
def test_layers_that_do_not_fit_together_leave_a_choice(parts: dict[str, nn.Module], said: str) -> None:
    model = Does(lambda m, x: m.body(x), body=nn.Linear(4, 5), **parts)
    told = refused(model)
    assert said in told
    assert told.endswith("Pass a `sample` to find out, or the name: layer=...")


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), nn.Linear(3, 2)),
        nn.Sequential(in_turn(4, 6), nn.Unflatten(1, (2, 3)), in_turn(3, 2)),
        Does(lambda m, x: m.head(m.body(x)), body=in_turn(4, 2, 5), head=in_turn(5, 5, 3)),
        Does(lambda m, x: m.head(m.body(x)), body=nn.Conv1d(4, 2, 1), head=nn.Linear(5, 3)),
    ],
    ids=["sequence", "nested", "bottleneck", "convolution"],
)
def test_layers_in_sequence_and_layers_that_fit_leave_none(model: nn.Module) -> None:
    assert gyroscope.last_norm(model).layer == gyroscope.layers(model)[-1]


def test_two_layers_whose_outputs_are_added() -> None:
    wide = Does(lambda m, x: m.wide(x) + m.deep(x), wide=nn.Linear(4, 2), deep=nn.Linear(4, 2))
    assert "2 parallel layers: 'wide.weight', 'deep.weight'" in refused(wide, torch.zeros(2, 4))


def test_a_list_of_layers_is_followed_with_a_sample() -> None:
    def chain(m: nn.Module, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = layer(x)
        return x

    model = Does(chain, layers=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    assert "in a ModuleList" in refused(model)
    assert gyroscope.last_norm(model, torch.zeros(2, 4)).layer.name == "layers.1.weight"


NORMS = {"batch": lambda: nn.BatchNorm1d(6), "layer": lambda: nn.LayerNorm(6), "rms": lambda: nn.RMSNorm(6)}


@pytest.mark.parametrize("norm", NORMS)
def test_an_input_that_is_normalized_already(norm: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), NORMS[norm](), nn.Dropout(0.5), nn.Flatten(), nn.Linear(6, 2))
    assert refused(model, torch.zeros(2, 4)) == "The input of '4.weight' is already normalized by '1'."
    assert "'1', registered just before '4.weight', may already normalize its input" in refused(model)


FUNCTIONS = {
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "rms_norm": lambda x: F.rms_norm(x, (6,)),
    "normalize": F.normalize,
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_input_that_a_function_normalized(function: str) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.head((2 * FUNCTIONS[function](torch.relu(m.body(x))) + m.shift).double().float()[:, :6])

    model = Does(forward, body=nn.Linear(4, 6), shift=nn.Parameter(torch.ones(6)), head=nn.Linear(6, 2))
    said = refused(model, torch.zeros(2, 4))
    assert said == f"The input of 'head.weight' is already normalized by a call of {function}."


def halved(x: Tensor) -> Tensor:
    x *= 0.5
    return x


KEEPS = {
    "in place": halved,
    "added in place": lambda x: x.add_(1),
    "reshaped in place": lambda x: x.unsqueeze_(0).squeeze_(0),
    "taken from one": lambda x: 1 - x,
    "divided": lambda x: torch.true_divide(x, 3),
}


@pytest.mark.parametrize("then", KEEPS)
def test_constants_in_place_and_out_of_it_leave_an_input_normalized(then: str) -> None:
    model = Does(lambda m, x: m.head(KEEPS[then](m.norm(x))), norm=nn.LayerNorm(6), head=nn.Linear(6, 2))
    assert "already normalized by 'norm'" in refused(model, torch.zeros(2, 6))


def test_a_relu_in_place_does_not() -> None:
    model = Does(lambda m, x: m.head(m.norm(x).relu_()), norm=nn.LayerNorm(6), head=nn.Linear(6, 2))
    assert gyroscope.last_norm(model, torch.zeros(2, 6)).layer.name == "head.weight"


def root_mean_square(m: nn.Module, x: Tensor) -> Tensor:
    return m.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def standardized(m: nn.Module, x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std(0) + 1e-5)


@pytest.mark.parametrize("by", [root_mean_square, standardized])
def test_an_input_that_a_module_of_ones_own_normalized_is_measured(by: Callable[..., object]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), Does(by, gain=nn.Parameter(torch.rand(6))), nn.Linear(6, 2))
    said = refused(model, torch.zeros(3, 4))
    assert said == "The input of '2.weight' is already normalized by '1'."


@pytest.mark.parametrize(
    "does",
    [lambda m, x: x.relu(), lambda m, x: x.tanh(), lambda m, x: torch.ones_like(x), lambda m, x: x.view(3, 6)],
    ids=["relu", "tanh", "constant", "particular"],
)
def test_a_module_of_ones_own_that_does_something_else_is_none(does: Callable[..., object]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), Does(does), nn.Linear(6, 2))
    assert gyroscope.last_norm(model, torch.full((3, 4), 1e3)).name == "2.last_norm"


def test_the_sum_of_something_normalized_and_something_else_is_not_normalized() -> None:
    model = Does(lambda m, x: m.head(F.layer_norm(m.body(x), (4,)) + x), body=nn.Linear(4, 4), head=nn.Linear(4, 2))
    assert gyroscope.last_norm(model, torch.zeros(2, 4)).layer.name == "head.weight"


def test_a_token_of_normalized_ones_is_normalized() -> None:
    model = Does(lambda m, x: m.head(m.norm(x)[:, 0]), norm=nn.LayerNorm(6), head=nn.Linear(6, 2))
    assert "already normalized by 'norm'" in refused(model, torch.zeros(2, 3, 6))


def test_a_model_that_runs_in_inference_mode_is_followed() -> None:
    forward = torch.inference_mode()(lambda m, x: m.head(m.norm(x)))
    model = Does(forward, norm=nn.LayerNorm(6), head=nn.Linear(6, 2))
    assert "already normalized by 'norm'" in refused(model, torch.zeros(2, 6))


def test_a_normalization_of_other_features_is_not_this_layers() -> None:
    assert gyroscope.last_norm(nn.Sequential(nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(12, 2))).features == 12


def test_a_normalization_of_images_is_not_this_layers_though_no_module_pools_between() -> None:
    assert [name for name, _ in ResNet().named_modules()][-3:] == ["block2.bn2", "drop", "fc"]
    assert gyroscope.last_norm(ResNet()).name == "fc.last_norm"


def test_a_layer_in_a_loop_is_called_too_often() -> None:
    def loop(m: nn.Module, x: Tensor) -> Tensor:
        for _ in range(3):
            x = m.b(torch.relu(m.a(x)))
        return x

    model = Does(loop, b=nn.Linear(4, 4), a=nn.Linear(4, 4))
    assert "The module of 'b.weight' is called 3 times on `sample`" in refused(model, torch.zeros(2, 4))


def test_a_second_time() -> None:
    model = mlp()
    gyroscope.last_norm(model)
    model(random(2, 5))
    for sample in (None, random(2, 5)):
        assert refused(model, sample) == "The input of '4.weight' is already normalized by '4.last_norm'."
    assert refused(model, layer="4") == "The input of '4.weight' is already normalized by '4.last_norm'."


def test_weights_and_modules_that_are_shared() -> None:
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    tied[2].weight = tied[0].weight
    for sample in (None, torch.zeros(2, 4)):
        assert refused(tied, sample) == "'2.weight' is shared with '0.weight', so it is not used only at the end."
    layer = nn.Linear(4, 4)
    assert "under the names '0', '1'" in refused(nn.Sequential(layer, layer), torch.zeros(2, 4))


@pytest.mark.parametrize("body", [{}, {"body": nn.Linear(4, 4)}], ids=["alone", "after another"])
def test_a_layer_that_is_tied_to_an_embedding(body: dict[str, nn.Module]) -> None:
    def forward(m: nn.Module, tokens: Tensor) -> Tensor:
        return m.head(m.body(m.tokens(tokens)) if body else m.tokens(tokens))

    model = Does(forward, tokens=nn.Embedding(7, 4), **body, head=nn.Linear(4, 7, bias=False))
    model.head.weight = model.tokens.weight
    said = "'head.weight' is shared with 'tokens.weight', so it is not used only at the end."
    assert refused(model) == refused(model, torch.zeros(2, 3, dtype=torch.long)) == said
    assert refused(model, layer="head") == refused(model, layer="head.weight") == said


@pytest.mark.parametrize(
    ("forward", "how"),
    [
        (lambda m, x: m.fc(m.fc(x)), "called 2 times"),
        (lambda m, x: F.linear(x, m.fc.weight), r"never called \(a function may use its weight\)"),
    ],
    ids=["twice", "never"],
)
def test_a_module_that_is_not_called_once(forward: Callable[..., Tensor], how: str) -> None:
    with pytest.raises(LayerError, match=f"The module of 'fc.weight' is {how} on `sample`"):
        gyroscope.last_norm(Does(forward, fc=nn.Linear(4, 4)), torch.zeros(2, 4))


def test_a_sample_of_the_wrong_shape_is_refused_without_a_word_on_the_order_of_layers() -> None:
    said = refused(mlp(), random(2, 6))
    assert "The forward pass of Sequential on `sample` failed with RuntimeError" in said
    assert said.endswith(
        "Pass a tensor, a tuple of positional arguments or a dict of keyword arguments, on the model's device."
    )


def test_layers_of_other_kinds_that_are_named() -> None:
    said = refused(ResNet(), layer="stem")
    assert said == "'stem.weight' is the weight of a Conv2d, of kind 'conv'. Linear layers are: fc.weight."
    said = refused(ResNet(), layer="head")
    assert said == "`layer` must be the name of a layer, got 'head'. Linear layers are: fc.weight."
    # A number is the name of nothing, though modules of a Sequential are named by numbers.
    numbered = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    said = refused(numbered, layer=2)
    assert said == "`layer` must be the name of a layer, got 2. Linear layers are: 0.weight, 2.weight."
    assert refused(nn.Bilinear(2, 3, 4)) == "'weight' is the weight of a Bilinear. Linear layers are: none."
    said = refused(nn.Sequential(nn.Linear(3, 3), nn.Bilinear(3, 3, 2)))
    assert said == "'1.weight' is the weight of a Bilinear. Linear layers are: 0.weight."
    attention = nn.MultiheadAttention(4, 2)
    assert "of kind 'attention'" in refused(attention, layer="out_proj")


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_lazy_layers_and_layers_without_memory() -> None:
    assert "is lazy and has no shape yet. Run one forward pass" in refused(nn.Sequential(nn.LazyLinear(3)))
    with torch.device("meta"):
        assert "'4.weight' is on the meta device" in refused(mlp())
    assert "got torch.complex64" in refused(nn.Linear(3, 2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("forward", "how"),
    [(lambda m, x: F.linear(x, m.fc.weight), "did not run"), (lambda m, x: m.fc(torch.relu(m.fc(x))), "ran 2 times")],
    ids=["never", "twice"],
)
@pytest.mark.parametrize("copied", [False, True])
def test_without_a_sample_the_first_pass_warns_that_the_module_is_not_called_once(
    forward: Callable[..., Tensor], how: str, copied: bool
) -> None:
    model = Does(forward, fc=nn.Linear(4, 4))
    gyroscope.last_norm(model)
    model = copy.deepcopy(model) if copied else model
    with pytest.warns(UserWarning, match=f"'fc.last_norm' {how} in the first forward pass of Does"):
        model(torch.ones(3, 4))
    model(torch.ones(3, 4))


@pytest.mark.parametrize("sample", [None, random(2, 5)], ids=["registered", "used"])
def test_after_the_first_pass_there_is_nothing_but_the_normalization(sample: Tensor | None) -> None:
    model = nn.DataParallel(mlp())
    gyroscope.last_norm(model, sample)
    for _ in range(2):
        model(random(3, 5))
    hooks = [(m._forward_pre_hooks, m._forward_hooks) for m in model.modules()]
    assert [sum(map(len, of)) for of in zip(*hooks, strict=True)] == [1, 0]


def test_a_graph_of_the_model_is_no_first_pass() -> None:
    inner = mlp().eval()
    gyroscope.last_norm(inner)
    model, x = nn.Sequential(inner), random(3, 5)
    graph = torch.fx.symbolic_trace(model)
    exported = torch.export.export(model, (x,)).module()
    assert torch.equal(graph(x), model(x))
    torch.testing.assert_close(exported(x), model(x))


def test_a_pass_that_failed_is_no_first_pass() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = m.fc(x)
        return y if len(x) > 2 else y.no_such_thing

    model = Does(forward, fc=nn.Linear(4, 4))
    gyroscope.last_norm(model)
    with pytest.raises(AttributeError, match="no_such_thing"):
        model(torch.ones(2, 4))
    assert model(torch.ones(3, 4)).shape == (3, 4)


def test_a_whole_number_of_numpy_is_a_seed() -> None:
    numpys, pythons = (gyroscope.last_norm(nn.Linear(8, 2), seed=seed).module for seed in (np.int64(3), 3))
    assert torch.equal(numpys.weight, pythons.weight)


@pytest.mark.parametrize("seed", ["x", 1.5, True, -1, 2**32])
def test_a_seed_that_is_none(seed: object) -> None:
    assert refused(mlp(), seed=seed) == f"`seed` must be a whole number from 0 to 2³² − 1, got {seed!r}. Try 0."


@pytest.mark.parametrize("options", [{"kind": "group"}, {"gain": "zeros"}], ids=["kind", "gain"])
def test_unknown_choices_are_answered_with_those_there_are(options: dict[str, str]) -> None:
    (name, given), *_ = options.items()
    said = refused(mlp(), **options)
    accepted = {"kind": "one of 'batch', 'layer'", "gain": "one of 'uniform', 'ones'"}[name]
    assert said == f"`{name}` must be {accepted}, got {given!r}."


def test_what_is_no_model_or_no_sample() -> None:
    with pytest.raises(LayerError, match=r"must be a torch\.nn\.Module, got list"):
        gyroscope.last_norm([nn.Linear(2, 2)])
    assert "failed with RuntimeError" in refused(mlp(), torch.zeros(2, 4))


def compiled_inside(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(torch.compile(model, backend="eager"))


def compiled_in_place(model: nn.Sequential) -> nn.Module:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("wrap", [compiled_inside, compiled_in_place])
def test_a_model_that_is_compiled(wrap: Callable[[nn.Module], nn.Module]) -> None:
    assert "Compile it afterwards" in refused(wrap(mlp()))
    assert "Compile it afterwards" in refused(wrap(mlp()), random(2, 5))


def test_a_layer_that_is_run_again_in_the_backward_pass() -> None:
    model = nn.Sequential(checkpoint_wrapper(mlp()))
    assert "count every batch twice" in refused(model)
    assert gyroscope.last_norm(model, kind="layer").name == "0.4.last_norm"
    beside = nn.Sequential(checkpoint_wrapper(nn.Linear(3, 3)), nn.Linear(3, 2))
    assert gyroscope.last_norm(beside).name == "1.last_norm"


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_model_that_is_distributed() -> None:
    from torch.distributed.fsdp import fully_shard

    parallel = nn.parallel.DistributedDataParallel(mlp())
    for sample in (None, random(2, 5)):
        said = refused(parallel, sample)
        assert "Wrap the model afterwards" in said
    sharded = mlp()
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (1,)))
    assert "Shard it afterwards" in refused(sharded)


@pytest.mark.usefixtures("process_group")
def test_a_model_that_is_distributed_afterwards_trains() -> None:
    plain = mlp()
    gyroscope.last_norm(plain)
    parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    x = random(6, 5)
    for model in (plain, parallel):
        model(x).square().sum().backward()
    assert torch.equal(parallel.module[-1].last_norm.weight.grad, plain[-1].last_norm.weight.grad)
