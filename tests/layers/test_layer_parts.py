"""Granularity: the equal parts of a layer."""

from __future__ import annotations

import pytest
import torch
from layer_models import Conv1D, Holder, ResNet
from torch import nn

from gyroscope.errors import LayerError
from gyroscope.layers.layer import layers


def attention_block(width: int, out: int) -> nn.Module:
    model = nn.Module()
    model.c_attn = Conv1D(out, width)
    return model


@pytest.mark.parametrize(
    ("model", "granularity", "expected"),
    [
        (nn.Linear(3, 2), "row", [(2, 0)]),
        (nn.Bilinear(3, 4, 2), "row", [(2, 0)]),
        (nn.Conv2d(4, 6, 3, groups=2), "row", [(6, 0)]),
        (nn.ConvTranspose2d(4, 6, 3), "row", [(6, 1)]),
        (nn.Embedding(5, 2), "row", [(5, 0)]),
        (nn.LSTM(3, 2), "row", [(8, 0), (8, 0)]),
        (nn.MultiheadAttention(4, 2), "row", [(12, 0), (4, 0)]),
        (Conv1D(6, 4), "row", [(6, 1)]),
        (Holder(kernel=(5, 3, 2)), "row", [(5, 0)]),
        (nn.MultiheadAttention(4, 2), "block", [(3, 0), (1, 0)]),
        (nn.MultiheadAttention(4, 2, kdim=3), "block", [(1, 0)] * 4),
        (nn.LSTM(3, 4, proj_size=2), "block", [(4, 0), (4, 0), (1, 0)]),
        (nn.LSTMCell(3, 2), "block", [(4, 0), (4, 0)]),
        (nn.GRU(3, 2), "block", [(3, 0), (3, 0)]),
        (nn.GRUCell(3, 2), "block", [(3, 0), (3, 0)]),
        (nn.RNN(3, 2), "block", [(1, 0), (1, 0)]),
        (nn.Linear(3, 3), "block", [(1, 0)]),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), "block", [(1, 0)]),
        (Conv1D(12, 4), "block", [(1, 0)]),
        (attention_block(4, 12), "block", [(3, 1)]),
        (attention_block(6, 12), "block", [(2, 1)]),
        (attention_block(5, 12), "block", [(1, 0)]),
        (Holder(gate_up_proj=(5, 3, 2), weight=(3, 2)), "expert", [(5, 0), (1, 0)]),
        (nn.Conv1d(3, 2, 1), "expert", [(1, 0)]),
        (nn.Bilinear(3, 4, 2), "expert", [(1, 0)]),
        (nn.ConvTranspose2d(4, 6, 3), "tensor", [(1, 0)]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_segments_and_their_dim(model: nn.Module, granularity: str, expected: list[tuple[int, int]]) -> None:
    found = layers(model, granularity=granularity)
    assert [(layer.segments, layer.dim) for layer in found] == expected
    assert all(layer.view().shape[0] % layer.segments == 0 for layer in found)


def test_the_default_is_one_segment_a_layer() -> None:
    assert {(layer.segments, layer.dim) for layer in layers(ResNet())} == {(1, 0)}


@pytest.mark.parametrize("module", [nn.ConvTranspose1d(3, 5, 2, bias=False), Conv1D(5, 3)])
def test_a_row_is_what_makes_one_output_unit(module: nn.Module) -> None:
    (layer,) = layers(module, granularity="row")
    sample = torch.randn(1, 3, 4) if isinstance(module, nn.ConvTranspose1d) else torch.randn(4, 3)
    with torch.no_grad():
        before = module(sample)
        layer.view()[2] += 1
        changed = (module(sample) != before).movedim(1, 0).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [2]


def test_a_view_shares_memory_and_takes_any_tensor_of_that_shape() -> None:
    (layer,) = layers(nn.ConvTranspose2d(3, 8, 5), granularity="row")
    assert layer.view().data_ptr() == layer.parameter.data_ptr()
    other = torch.randn_like(layer.parameter)
    assert torch.equal(layer.view(other)[6], other[:, 6])
    (plain,) = layers(nn.Linear(3, 2))
    assert plain.view(other) is other


def test_rows_of_a_grouped_transposed_convolution_are_refused_unless_it_is_excluded() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Conv2d(6, 2, 1))
    with pytest.raises(LayerError, match=r"cannot split '0\.weight': a transposed convolution with 2 groups"):
        layers(model, granularity="row")
    assert [layer.name for layer in layers(model, granularity="row", exclude="0.*")] == ["1.weight"]


def test_an_unknown_granularity_is_refused_with_those_known() -> None:
    with pytest.raises(LayerError, match="one of 'tensor', 'row', 'block', 'expert', got 'neuron'"):
        layers(nn.Linear(2, 2), granularity="neuron")  # type: ignore[arg-type]
