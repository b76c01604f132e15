"""Wrapped, compiled and sharded models have the layers of the bare model, under the same names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layer_models import REGISTERED, USED, ResNet, tied
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from gyroscope.errors import LayerError
from gyroscope.layers.layer import layers, zero_norm

X = torch.zeros(2, 3, 8, 8)


def names(model: nn.Module, **options: object) -> list[str]:
    return [layer.name for layer in layers(model, **options)]


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module) -> nn.Module:
    # The default backend is never asked to compile here, and importing it warns about torch's own code.
    return torch.compile(model, backend="eager")


def inner_wraps(model: ResNet) -> nn.Module:
    model.block1 = compiled(checkpoint_wrapper(model.block1))
    model.block2 = nn.DataParallel(model.block2)
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        compiled,
        nn.DataParallel,
        checkpoint_wrapper,
        inner_wraps,
        lambda m: compiled(nn.DataParallel(m)),
    ],
    ids=["compile", "data parallel", "checkpoint", "inside", "nested"],
)
def test_wrappers_change_neither_names_nor_order(wrap: object) -> None:
    model = ResNet()
    parameters = [layer.parameter for layer in layers(model)]
    wrapped = wrap(model)
    assert names(wrapped) == REGISTERED
    assert all(a is b.parameter for a, b in zip(parameters, layers(wrapped), strict=True))
    assert names(wrapped, sample=X) == USED


def test_a_model_compiled_in_place_is_traced_without_compiling() -> None:
    model = ResNet()
    model.compile(backend=lambda graph, inputs: pytest.fail("compiled"))
    assert names(model, sample=X) == USED


def test_a_users_own_submodule_called_module_keeps_its_name() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)
            self._orig_mod = nn.Linear(2, 2)

    assert names(Mine()) == ["module.weight", "_orig_mod.weight"]
    assert names(nn.DataParallel(Mine())) == ["module.weight", "_orig_mod.weight"]


class FullyShardedDataParallel(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = model


def test_the_prefix_of_an_fsdp_wrapper_is_stripped() -> None:
    assert names(FullyShardedDataParallel(ResNet())) == REGISTERED


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel_has_the_names_of_the_bare_model() -> None:
    model = nn.parallel.DistributedDataParallel(ResNet())
    assert names(model) == REGISTERED
    assert names(model, sample=X) == USED


@pytest.mark.usefixtures("process_group")
def test_finding_the_order_under_ddp_does_not_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.parallel.DistributedDataParallel(ResNet())
    monkeypatch.setattr(model, "_pre_forward", lambda *_, **__: pytest.fail("communicated"))
    assert names(model, sample=X) == USED


@pytest.mark.usefixtures("process_group")
def test_fsdp2_swaps_parameters_under_layers_that_stay_valid() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = dist.init_device_mesh("cpu", (1,))
    model = ResNet()
    nn.init.zeros_(model.fc.weight)
    before = layers(model, granularity="row")
    for block in (model.block1, model.block2, model.fc):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    after = layers(model, granularity="row")
    assert after == before
    assert [layer.name for layer in after] == REGISTERED
    assert all(isinstance(layer.parameter, DTensor) for layer in before)
    assert [layer.name for layer in zero_norm(before)] == ["fc.weight"]
    model(X).sum().backward()
    assert [layer.name for layer in zero_norm(after)] == ["fc.weight"]


@pytest.mark.usefixtures("process_group")
def test_fsdp2_keeps_tied_weights_tied() -> None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(tied(), mesh=dist.init_device_mesh("cpu", (1,)))
    assert names(model) == ["embed.weight", "body.weight"]


@pytest.mark.usefixtures("process_group")
def test_a_sample_for_a_sharded_model_is_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(ResNet(), mesh=dist.init_device_mesh("cpu", (1,)))
    with pytest.raises(LayerError, match="before sharding, or leave `sample` out"):
        layers(model, sample=X)


def test_transformers_gpt2_has_four_layers_a_block_in_order() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    tokens: Tensor = torch.zeros(1, 3, dtype=torch.long)
    blocks = [
        f"transformer.h.{i}.{name}.weight"
        for i in range(2)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    found = layers(model, sample={"input_ids": tokens}, granularity="block")
    assert [layer.name for layer in found] == ["transformer.wte.weight", "transformer.wpe.weight", *blocks]
    assert [layer.segments for layer in found] == [1, 1, 3, 1, 1, 1, 3, 1, 1, 1]
