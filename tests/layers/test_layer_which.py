"""The parameters that are layers, their names and their kinds."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from layer_models import REGISTERED, Conv1D, Holder, ResNet, tied
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from gyroscope.errors import LayerError
from gyroscope.layers.layer import Layer, layers, zero_norm


def names(model: nn.Module, **options: object) -> list[str]:
    return [layer.name for layer in layers(model, **options)]


@pytest.mark.parametrize(
    ("module", "kind", "expected"),
    [
        (nn.Linear(3, 2), "linear", ["weight"]),
        (nn.Linear(1, 1), "linear", ["weight"]),
        (nn.Bilinear(3, 4, 2), "linear", ["weight"]),
        (nn.Conv1d(3, 2, 1), "conv", ["weight"]),
        (nn.Conv2d(4, 2, 3, groups=2), "conv", ["weight"]),
        (nn.Conv3d(3, 2, 1), "conv", ["weight"]),
        (nn.ConvTranspose1d(3, 2, 1), "conv_transpose", ["weight"]),
        (nn.ConvTranspose2d(3, 2, 1), "conv_transpose", ["weight"]),
        (nn.ConvTranspose3d(3, 2, 1), "conv_transpose", ["weight"]),
        (nn.Embedding(5, 2), "embedding", ["weight"]),
        (nn.EmbeddingBag(5, 2), "embedding", ["weight"]),
        (nn.RNN(3, 2), "recurrent", ["weight_ih_l0", "weight_hh_l0"]),
        (nn.GRU(3, 2, bias=False), "recurrent", ["weight_ih_l0", "weight_hh_l0"]),
        (nn.LSTM(3, 4, proj_size=2), "recurrent", ["weight_ih_l0", "weight_hh_l0", "weight_hr_l0"]),
        (
            nn.LSTM(3, 2, bidirectional=True),
            "recurrent",
            ["weight_ih_l0", "weight_hh_l0", "weight_ih_l0_reverse", "weight_hh_l0_reverse"],
        ),
        (nn.RNNCell(3, 2), "recurrent", ["weight_ih", "weight_hh"]),
        (nn.LSTMCell(3, 2), "recurrent", ["weight_ih", "weight_hh"]),
        (nn.GRUCell(3, 2), "recurrent", ["weight_ih", "weight_hh"]),
        (nn.MultiheadAttention(4, 2), "attention", ["in_proj_weight", "out_proj.weight"]),
        (nn.MultiheadAttention(4, 2, add_bias_kv=True), "attention", ["in_proj_weight", "out_proj.weight"]),
        (
            nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
            "attention",
            ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"],
        ),
        (Conv1D(6, 4), "linear", ["weight"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_the_weights_of_known_modules_are_layers(module: nn.Module, kind: str, expected: list[str]) -> None:
    found = layers(module)
    assert [layer.name for layer in found] == expected
    assert {layer.kind for layer in found} == {kind}
    assert [layer.index for layer in found] == list(range(len(expected)))
    assert all(layer.parameter is module.get_parameter(layer.name) for layer in found)


def test_subclasses_of_known_modules_are_known() -> None:
    class Mine(nn.Linear):
        pass

    assert [(layer.name, layer.kind) for layer in layers(Mine(3, 2))] == [("weight", "linear")]


class ChannelNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize(
    "gain",
    [
        nn.BatchNorm2d(4),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm1d(4, affine=True),
        nn.GroupNorm(2, 4),
        nn.LayerNorm([4, 4]),
        nn.RMSNorm([4, 4]),
        ChannelNorm(),
        type("FusedBatchNorm2d", (ChannelNorm,), {})(),
        type("Renamed", (ChannelNorm,), {})(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_gains_of_normalization_are_no_layers(gain: nn.Module) -> None:
    assert names(nn.Sequential(nn.Linear(4, 4), gain)) == ["0.weight"]


def test_what_a_norm_wraps_is_still_found() -> None:
    class PreNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.fn = nn.Linear(4, 4)

    assert names(PreNorm()) == ["fn.weight"]


@pytest.mark.parametrize(
    ("name", "shape", "is_layer"),
    [
        ("weight", (3, 2), True),
        ("mixing_weights", (3, 2), True),
        ("kernel", (3, 3, 1, 1), True),
        ("gate_up_proj", (4, 3, 2), True),
        ("weight", (6,), False),
        ("weight", (6, 1), False),
        ("weight", (0, 3), False),
        ("gate_up_proj_bias", (4, 6), False),
        ("norm_weight", (4, 6), False),
        ("pos_embed", (1, 9, 4), False),
        ("cls_token", (1, 1, 4), False),
    ],
)
def test_an_unknown_module_gives_its_matrices_that_are_named_as_weights(
    name: str, shape: tuple[int, ...], is_layer: bool
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Holder(**{name: shape}))
    assert names(model) == ["0.weight", *([f"1.{name}"] if is_layer else [])]


@pytest.mark.parametrize("name", ["w", "w1", "w2", "v1", "u2", "W_in", "w_gate", "fn", "hc_fn"])
def test_matrices_named_as_in_formulas_are_layers(name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Holder(**{name: (6, 4)}))
    assert names(model) == ["0.weight", f"1.{name}"]
    assert layers(model)[1].kind == "other"


@pytest.mark.parametrize("name", ["v", "q", "wide", "b1", "w_bias", "W_pos", "h1", "D", "A_log", "fns"])
def test_other_matrices_of_a_module_are_no_layers(name: str) -> None:
    assert names(nn.Sequential(nn.Linear(2, 2), Holder(**{name: (6, 4)}))) == ["0.weight"]


@pytest.mark.parametrize("prefix", ["", "w", "W_"])
def test_a_module_with_a_query_a_key_and_a_value_has_attention_layers(prefix: str) -> None:
    found = {f"{prefix}{letter}": (8, 2, 4) for letter in "qkvor"}
    attention = Holder(**found, r_w_bias=(2, 4), r_r_bias=(2, 4), seg_embed=(2, 2, 4))
    assert [(layer.name, layer.kind) for layer in layers(attention)] == [(name, "attention") for name in found]
    assert {layer.segments for layer in layers(attention, granularity="expert")} == {1}


def holding(name: str, module: nn.Module) -> nn.Module:
    model = nn.Module()
    model.body = nn.Linear(2, 2)
    model.add_module(name, module)
    return model


def listed(*shapes: tuple[int, ...]) -> nn.Module:
    module = nn.Module()
    module.weights = nn.ParameterList([torch.ones(shape) for shape in shapes])
    return module


@pytest.mark.parametrize(
    "model",
    [
        holding("relative_attention_bias", nn.Embedding(32, 8)),
        holding("relative_position_bias", Holder(relative_position_bias_table=(32, 8))),
        holding("relative_position_bias", Holder(weight=(32, 8))),
        holding("attention", Holder(relative_attention_bias=(32, 8))),
        holding("item_bias", nn.EmbeddingBag(32, 8)),
        holding("position_embeddings", listed((4, 1, 3), (1, 5, 3))),
        holding("position_embeddings", Holder(weight=(9, 4))),
        holding("pos", Holder(weight=(9, 4))),
        holding("encoder", Holder(pos_weight=(9, 4), weights_of_positions=(9, 4))),
    ],
)
def test_tables_of_biases_and_bare_tables_of_positions_are_no_layers(model: nn.Module) -> None:
    assert names(model) == ["body.weight"]


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (holding("position_embeddings", nn.Embedding(9, 4)), "embedding"),
        (holding("positionwise", Holder(weight=(9, 4))), "other"),
        (holding("post", Holder(weight=(9, 4))), "other"),
        (holding("position_bias_mlp", nn.Linear(9, 4)), "linear"),
    ],
)
def test_looked_up_positions_and_products_with_positions_are_layers(model: nn.Module, kind: str) -> None:
    assert [layer.kind for layer in layers(model)] == ["linear", kind]


class QuantLinear(nn.Module):
    """Built like torch's, as modules for training with quantization are, but no subclass of it."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        self.register_buffer("weight_integer", torch.zeros(out_features, in_features))


class QuantEmbedding(nn.Module):
    """The same of an embedding."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.padding_idx = None
        self.weight = nn.Parameter(torch.randn(tokens, width))


def test_modules_built_like_linear_and_embedding_are_of_their_kind() -> None:
    model = nn.Sequential(QuantEmbedding(7, 4), QuantLinear(4, 3), QuantLinear(3, 1))
    assert [(layer.name, layer.kind) for layer in layers(model)] == [
        ("0.weight", "embedding"),
        ("1.weight", "linear"),
        ("2.weight", "linear"),
    ]


def test_a_weight_of_other_sizes_than_its_features_is_no_linear_layer() -> None:
    module = QuantLinear(4, 3)
    module.weight = nn.Parameter(torch.randn(4, 3))
    assert [layer.kind for layer in layers(module)] == ["other"]


def test_parameters_in_a_list_go_by_the_name_of_the_list() -> None:
    model = nn.Module()
    model.weights = nn.ParameterList([torch.randn(2, 2), torch.randn(2, 2)])
    model.prompts = nn.ParameterList([torch.randn(2, 2)])
    model.table = nn.ParameterDict({"kernel": torch.randn(2, 2)})
    assert names(model) == ["weights.0", "weights.1", "table.kernel"]
    assert layers(model)[1].parameter is model.weights[1]


def test_frozen_parameters_are_layers_and_integers_are_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    assert names(model) == ["0.weight"]


def test_shortcuts_of_a_resnet_are_layers_in_registration_order() -> None:
    assert names(ResNet()) == REGISTERED


def test_a_transformer_encoder_layer_has_four_layers() -> None:
    found = layers(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True))
    assert [(layer.name, layer.kind) for layer in found] == [
        ("self_attn.in_proj_weight", "attention"),
        ("self_attn.out_proj.weight", "attention"),
        ("linear1.weight", "linear"),
        ("linear2.weight", "linear"),
    ]


def test_tied_weights_appear_once_under_their_first_name() -> None:
    assert [(layer.name, layer.kind) for layer in layers(tied())] == [
        ("embed.weight", "embedding"),
        ("body.weight", "linear"),
    ]


def test_a_weight_that_is_first_registered_as_no_layer_is_the_layer_of_the_module_that_has_it() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 4))
            self.fc = nn.Linear(4, 4)
            self.head = nn.Linear(4, 4)
            self.fc.weight = self.head.weight = self.table

    model = Shared()
    (layer,) = layers(model)
    assert (layer.name, layer.kind, layer.module) == ("fc.weight", "linear", model.fc)
    assert layer.parameter is model.table
    for other in ("table", "head.weight"):
        with pytest.raises(LayerError, match=rf"'{other}' is tied to 'fc\.weight'"):
            layers(model, include=other)


def test_a_module_registered_twice_appears_once() -> None:
    shared = nn.Linear(2, 2)
    assert names(nn.Sequential(shared, nn.ReLU(), shared)) == ["0.weight"]


def test_the_parameter_is_read_from_its_owner_each_time() -> None:
    model = nn.Linear(3, 2)
    layer = layers(model)[0]
    model.weight = nn.Parameter(torch.zeros(2, 3))
    assert layer.parameter is model.weight


def test_a_layer_is_immutable_comparable_and_copies_with_its_module() -> None:
    layer = layers(nn.Linear(3, 2))[0]
    assert layer == layers(nn.Linear(3, 2))[0]
    assert hash(layer) == hash(layers(nn.Linear(3, 2))[0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer.name = "other"  # type: ignore[misc]
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin == layer
        assert twin.module is not layer.module
        assert torch.equal(twin.parameter, layer.parameter)


# Parametrizations


@pytest.mark.parametrize(
    ("wrap", "attribute", "how"),
    [
        (parametrizations.weight_norm, "parametrizations.weight.original1", "weight_norm"),
        (parametrizations.spectral_norm, "parametrizations.weight.original", "spectral_norm"),
        (parametrizations.orthogonal, "parametrizations.weight.original", "orthogonal"),
        (torch.nn.utils.weight_norm, "weight_v", "weight_norm"),
        (torch.nn.utils.spectral_norm, "weight_orig", "spectral_norm"),
        (lambda module: prune.random_unstructured(module, "weight", 0.5), "weight_orig", "prune"),
    ],
    ids=["weight_norm", "spectral_norm", "orthogonal", "old weight_norm", "old spectral_norm", "prune"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("module", [nn.Linear(3, 3), nn.Conv2d(3, 3, 1)], ids=["linear", "conv"])
def test_a_parametrized_weight_is_the_tensor_the_optimizer_moves(
    module: nn.Module, wrap: object, attribute: str, how: str
) -> None:
    model = nn.Sequential()
    model.add_module("fc", wrap(copy.deepcopy(module)))
    (layer,) = layers(model)
    assert (layer.name, layer.attribute, layer.parametrization) == ("fc.weight", attribute, how)
    assert layer.kind == layers(module)[0].kind
    assert layer.parameter is model.get_parameter(f"fc.{attribute}")
    assert layer.parameter.shape == module.weight.shape
    assert any(layer.parameter is parameter for parameter in model.parameters())


def test_a_value_and_a_gate_are_no_direction_and_gain() -> None:
    gated = Holder(proj_q=(4, 4), proj_v=(4, 4), proj_g=(4, 4))
    found = [(layer.name, layer.parametrization) for layer in layers(gated)]
    assert found == [("proj_q", None), ("proj_v", None), ("proj_g", None)]


def test_parametrizations_reach_attention_and_recurrence() -> None:
    attention = nn.MultiheadAttention(4, 2)
    parametrizations.weight_norm(attention.out_proj)
    parametrizations.orthogonal(attention, "in_proj_weight")
    assert [(layer.name, layer.kind, layer.parametrization) for layer in layers(attention)] == [
        ("in_proj_weight", "attention", "orthogonal"),
        ("out_proj.weight", "attention", "weight_norm"),
    ]
    cell = parametrizations.spectral_norm(nn.GRUCell(3, 2), "weight_hh")
    assert {layer.name: layer.parametrization for layer in layers(cell)} == {
        "weight_ih": None,
        "weight_hh": "spectral_norm",
    }


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, torch.nn.utils.weight_norm])
def test_the_gain_of_a_recurrent_direction_is_no_layer(wrap: object) -> None:
    model = wrap(nn.LSTM(3, 2), "weight_hh_l0")
    assert {layer.name: layer.parametrization for layer in layers(model)} == {
        "weight_ih_l0": None,
        "weight_hh_l0": "weight_norm",
    }


class LowRank(nn.Module):
    def forward(self, u: torch.Tensor, v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return scale * (u @ v)

    def right_inverse(self, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.randn(len(w), 2), torch.randn(2, w.shape[1]), torch.ones(1, 1)


class Triangular(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu()


def test_each_matrix_factor_of_a_weight_is_a_layer() -> None:
    model = nn.Sequential(nn.Linear(5, 4))
    parametrize.register_parametrization(model[0], "weight", LowRank(), unsafe=True)
    found = layers(model, granularity="row")
    assert [(layer.name, layer.kind, layer.segments) for layer in found] == [
        ("0.parametrizations.weight.original0", "other", 4),
        ("0.parametrizations.weight.original1", "other", 2),
    ]
    assert {layer.parametrization for layer in found} == {"low_rank"}
    assert [tuple(layer.parameter.shape) for layer in found] == [(4, 2), (2, 5)]


def test_chained_parametrizations_are_named_in_order() -> None:
    linear = parametrizations.spectral_norm(nn.Linear(3, 3))
    parametrize.register_parametrization(linear, "weight", Triangular())
    assert layers(linear)[0].parametrization == "spectral_norm+triangular"


def test_a_parametrization_of_a_bias_brings_no_layer() -> None:
    linear = nn.Linear(3, 3)
    parametrize.register_parametrization(linear, "bias", nn.Identity())
    assert names(linear) == ["weight"]


# Patterns


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"include": "fc.weight"}, ["fc.weight"]),
        ({"include": "block1.*"}, REGISTERED[1:4]),
        ({"include": ["stem.*", "fc.*"]}, ["stem.weight", "fc.weight"]),
        ({"include": ("fc.*", "stem.*")}, ["stem.weight", "fc.weight"]),
        ({"exclude": "block?.*"}, ["stem.weight", "fc.weight"]),
        ({"exclude": ["block*", "stem*"]}, ["fc.weight"]),
        ({"include": "block1*", "exclude": "*.shortcut.*"}, ["block1.conv1.weight", "block1.conv2.weight"]),
    ],
)
def test_patterns_choose_layers_and_keep_their_order(options: dict[str, object], expected: list[str]) -> None:
    found = layers(ResNet(), **options)
    assert [layer.name for layer in found] == expected
    assert [layer.index for layer in found] == list(range(len(expected)))


def test_an_exact_name_brings_in_a_parameter_that_is_no_layer_by_default() -> None:
    model = nn.Sequential(Holder(pos_embed=(1, 9, 4)), nn.Linear(4, 2))
    (layer,) = layers(model, include="0.pos_embed")
    assert (layer.name, layer.kind) == ("0.pos_embed", "other")
    assert names(model, include=["0.pos_embed", "*.weight"]) == ["0.pos_embed", "1.weight"]
    with pytest.raises(LayerError, match=r"matches no layer.*'1\.weight'"):
        layers(model, include="*.pos_embed")


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("fc.wieght", r"pattern 'fc\.wieght' matches no layer. Close names are 'fc\.weight'"),
        ("FC.*", r"pattern 'FC\.\*' matches no layer"),
        ("zzz", r"Close names are 'stem\.weight'"),
        ("fc.bias", r"'fc\.bias' with shape \(10,\)"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(option: str, pattern: str, message: str) -> None:
    with pytest.raises(LayerError, match=message):
        layers(ResNet(), **{option: [pattern]})


def test_one_idle_pattern_among_good_ones_is_refused() -> None:
    with pytest.raises(LayerError, match="'head'"):
        layers(ResNet(), include=["fc.weight", "head"])


def test_the_second_name_of_a_tied_weight_is_refused_with_the_first() -> None:
    with pytest.raises(LayerError, match=r"'head\.weight' is tied to 'embed\.weight'"):
        layers(tied(), exclude="head.weight")


@pytest.mark.parametrize("options", [{"include": []}, {"exclude": "*"}, {"include": "fc*", "exclude": "fc*"}])
def test_patterns_that_leave_nothing_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(LayerError, match="leave none of the 8 layers"):
        layers(ResNet(), **options)


def test_a_name_with_wildcards_in_it_stands_for_itself() -> None:
    model = nn.ModuleDict({"gate[0]": nn.Linear(2, 2), "gate[1]": nn.Linear(2, 2), "last": nn.Linear(2, 2)})
    assert names(model, include="gate[0].weight") == ["gate[0].weight"]
    assert names(model, exclude="gate[1].weight") == ["gate[0].weight", "last.weight"]


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize("given", [5, [5], [None], ["fc.*", b"stem"]])
def test_a_pattern_that_is_no_string_is_refused(option: str, given: object) -> None:
    with pytest.raises(LayerError, match=f"`{option}` must be one or more layer names or glob patterns"):
        layers(ResNet(), **{option: given})


# Refusals


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Sequential(), nn.BatchNorm1d(3)], ids=["relu", "void", "bn"])
def test_a_model_without_layers_is_refused_and_told_what_one_is(model: nn.Module) -> None:
    with pytest.raises(LayerError, match=r"has no layers\. A layer is the weight of"):
        layers(model)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(LayerError, match=r"`model` must be a torch\.nn\.Module, got list"):
        layers([nn.Linear(2, 2)])  # type: ignore[arg-type]


@pytest.mark.parametrize("lazy", [nn.LazyLinear(2), nn.LazyConv2d(2, 1), nn.LazyBatchNorm1d()])
def test_lazy_modules_are_refused_until_they_have_shapes(lazy: nn.Module) -> None:
    with pytest.raises(LayerError, match=r"'1\.weight' is lazy and has no shape.*forward pass"):
        layers(nn.Sequential(nn.Linear(2, 2), lazy))


def test_a_materialised_lazy_module_is_accepted() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    model(torch.zeros(1, 3))
    assert names(model) == ["0.weight"]


class FlatParameter(nn.Parameter):
    pass


def flagged(shape: tuple[int, ...], **flags: object) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape))
    for name, value in flags.items():
        setattr(parameter, name, value)
    return parameter


@pytest.mark.parametrize(
    "parameter",
    [
        FlatParameter(torch.zeros(6)),
        flagged((6,), _is_flat_param=True),
        flagged((0,), ds_id=3),
        flagged((4,)),  # a shard of the original, as FSDP1 leaves it with use_orig_params=True
    ],
    ids=["FlatParameter", "_is_flat_param", "ds_id", "one-dimensional"],
)
def test_flattened_parameters_are_refused(parameter: nn.Parameter) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].weight = parameter
    with pytest.raises(LayerError, match=r"'0\.weight' is flattened.*fully_shard.*DistributedDataParallel"):
        layers(model)


def test_zero_3_parameters_gathered_to_their_shape_are_accepted() -> None:
    model = nn.Linear(3, 2)
    model.weight = flagged((2, 3), ds_id=3)
    assert names(model) == ["weight"]


# Zero norms


def test_zero_norm_reports_exactly_zero_weights_in_order() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    for i, value in enumerate([0.0, 1e-30, 0.0, torch.nan]):
        nn.init.constant_(model[i].weight, value)
    found = layers(model)
    assert zero_norm(found) == zero_norm(layer for layer in found) == [found[0], found[2]]


def test_zero_norm_reads_all_dtypes_together() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3).double())
    nn.init.zeros_(model[1].weight)
    assert [layer.name for layer in zero_norm(layers(model))] == ["1.weight"]


@pytest.mark.parametrize(
    "given", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), None, [1]], ids=["one", "model", "none", "numbers"]
)
def test_zero_norm_of_what_are_no_layers_is_refused(given: object) -> None:
    with pytest.raises(LayerError, match="`layers` must be a list of layers"):
        zero_norm(given)


def test_zero_norm_of_nothing_is_nothing() -> None:
    assert zero_norm([]) == []


def test_zero_norm_skips_meta_tensors() -> None:
    model = nn.Sequential(nn.Linear(3, 3, device="meta"), nn.Linear(3, 3))
    nn.init.zeros_(model[1].weight)
    found: list[Layer] = layers(model)
    assert zero_norm(found[:1]) == []
    assert zero_norm(found) == found[1:]
