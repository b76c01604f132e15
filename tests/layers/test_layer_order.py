"""The order of first use, and that finding it leaves no trace."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from layer_models import REGISTERED, USED, Conv1D, ResNet, tied
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations

from gyroscope.errors import LayerError
from gyroscope.layers.layer import layers

X = torch.zeros(2, 3, 8, 8)


def names(model: nn.Module, sample: object, **options: object) -> list[str]:
    return [layer.name for layer in layers(model, sample=sample, **options)]


def backwards(*modules: nn.Module) -> nn.Module:
    """Modules registered as 0, 1, ... and applied from the last to the first."""

    class Backwards(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for module in reversed(self):
                x = module(x)
                x = x[0] if isinstance(x, tuple) else x
            return x

    return Backwards(modules)


def test_shortcuts_move_to_where_they_are_used() -> None:
    found = layers(ResNet(), sample=X)
    assert [layer.name for layer in found] == USED != REGISTERED
    assert [layer.index for layer in found] == list(range(len(USED)))


@pytest.mark.parametrize("sample", [X, (X,), {"x": X}], ids=["tensor", "tuple", "dict"])
def test_a_sample_is_a_tensor_a_tuple_or_a_dict(sample: object) -> None:
    assert names(ResNet(), sample) == USED


def test_a_list_is_one_argument() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b, self.a = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, xs: list[Tensor]) -> Tensor:
            return self.a(xs[0]) + self.b(xs[1])

    assert names(Sum(), [torch.zeros(2), torch.zeros(2)]) == ["a.weight", "b.weight"]


def test_order_is_found_before_patterns_choose() -> None:
    assert names(ResNet(), X, include="block2.*") == USED[4:7]
    assert names(ResNet(), X, exclude="*conv*") == [name for name in USED if "conv" not in name]


def test_an_included_extra_parameter_is_ordered_too() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.zeros(3, 2))
            self.embed = nn.Embedding(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.embed(x) + self.position

    sample = torch.zeros(3, dtype=torch.long)
    assert names(Positions(), sample, include=["position", "*"]) == ["embed.weight", "position"]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.LSTM(4, 4), ["weight_ih_l0", "weight_hh_l0"]),
        (nn.GRU(4, 4), ["weight_ih_l0", "weight_hh_l0"]),
        (nn.RNNCell(4, 4), ["weight_ih", "weight_hh"]),
        (nn.TransformerEncoderLayer(4, 2, 8), ["self_attn.in_proj_weight", "self_attn.out_proj.weight"]),
        (Conv1D(4, 4), ["weight"]),
        (parametrizations.weight_norm(nn.Linear(4, 4)), ["weight"]),
        (parametrizations.spectral_norm(nn.Linear(4, 4)), ["weight"]),
        (parametrizations.orthogonal(nn.Linear(4, 4)), ["weight"]),
    ],
    ids=["lstm", "gru", "cell", "encoder", "conv1d", "weight_norm", "spectral_norm", "orthogonal"],
)
def test_use_is_seen_in_fused_kernels_and_parametrizations(module: nn.Module, expected: list[str]) -> None:
    model = backwards(nn.Linear(4, 4), module, nn.Linear(4, 4))
    found = names(model, torch.zeros(3, 4))
    assert (found[0], found[-1]) == ("2.weight", "0.weight")
    assert found[1 : 1 + len(expected)] == [f"1.{name}" for name in expected]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("wrap", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
def test_use_is_seen_through_the_old_parametrizations(wrap: object) -> None:
    model = backwards(wrap(nn.Linear(4, 4)), nn.Linear(4, 4))
    before = model[0].weight
    assert names(model, torch.zeros(3, 4)) == ["1.weight", "0.weight"]
    assert model[0].weight is before


@pytest.mark.parametrize("sizes", [{}, {"kdim": 3, "vdim": 5}], ids=["fused", "separate"])
def test_attention_uses_its_output_projection_last(sizes: dict[str, int]) -> None:
    model = nn.MultiheadAttention(4, 2, **sizes)
    sample = (torch.zeros(2, 4), torch.zeros(2, sizes.get("kdim", 4)), torch.zeros(2, sizes.get("vdim", 4)))
    assert names(model, sample) == [layer.name for layer in layers(model)]
    assert names(model, sample)[-1] == "out_proj.weight"


def test_an_encoder_stack_is_in_order() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)
    assert names(model, torch.zeros(1, 3, 4)) == [
        f"layers.{i}.{name}"
        for i in range(2)
        for name in (
            "self_attn.in_proj_weight",
            "self_attn.out_proj.weight",
            "linear1.weight",
            "linear2.weight",
        )
    ]


class Functional(nn.Module):
    """Uses weights without calling the modules that own them, and looks at the last one first."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.d, self.c, self.b, self.a = (nn.Linear(2, 2, bias=False) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.e.weight.dtype).to(self.e.weight.device)
        assert self.e.weight.shape == (2, 2)
        assert self.e.weight.dim() == len(self.e.weight) == 2
        x = F.linear(x, weight=self.a.weight)
        x = x @ self.b.weight.T
        x = x + torch.stack([self.c.weight, torch.zeros(2, 2)]).sum()
        y = torch.zeros(2, 2)
        y[:] = self.d.weight
        return F.linear(x + y, self.e.weight)


def test_use_is_seen_in_functional_calls_and_metadata_is_no_use() -> None:
    assert names(Functional(), torch.zeros(2, 2)) == [f"{name}.weight" for name in "abcde"]


def test_a_tied_weight_stands_at_its_first_use() -> None:
    model = tied()
    assert names(model, torch.zeros(2, dtype=torch.long)) == ["embed.weight", "body.weight"]
    swapped = backwards(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    swapped[2].weight = swapped[0].weight
    assert names(swapped, torch.zeros(2)) == ["0.weight", "1.weight"]


def test_unused_layers_follow_the_one_registered_before_them() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("idle0", "last", "idle1", "idle2", "first"):
                self.add_module(name, nn.Linear(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    expected = [f"{name}.weight" for name in ("idle0", "first", "last", "idle1", "idle2")]
    assert names(Partly(), torch.zeros(2)) == expected


class Restless(nn.Module):
    """Changes in evaluation mode all that a forward pass can change, and may then fail."""

    def __init__(self, fail: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.bn = nn.BatchNorm1d(3).eval()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("replaced", torch.full((2,), torch.nan))
        self.fail = fail
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert not any(module.training for module in self.modules())
        assert not torch.is_grad_enabled()
        assert not torch.backends.mha.get_fastpath_enabled()
        self.count += 1
        self.replaced = torch.rand(2)
        self.register_buffer("new", torch.zeros(1))
        self.cache = x
        x = self.drop(self.bn(self.fc(x)))
        if self.fail:
            raise ZeroDivisionError("on purpose")
        return x


@pytest.mark.parametrize("fastpath", [True, False])
@pytest.mark.parametrize("fail", [False, True])
def test_a_pass_leaves_no_trace_even_if_it_fails(fail: bool, fastpath: bool) -> None:
    model = Restless(fail)
    flags = [module.training for module in model.modules()]
    assert True in flags
    assert False in flags
    state = copy.deepcopy(model.state_dict())
    buffers = dict(model.named_buffers())
    random = torch.get_rng_state()
    torch.backends.mha.set_fastpath_enabled(fastpath)
    try:
        if fail:
            with pytest.raises(LayerError, match="`sample` failed with ZeroDivisionError") as error:
                layers(model, sample=torch.randn(2, 3, generator=torch.Generator()))
            assert isinstance(error.value.__cause__, ZeroDivisionError)
        else:
            layers(model, sample=torch.zeros(2, 3))
        assert torch.backends.mha.get_fastpath_enabled() is fastpath
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), random)
    assert model.cache is None
    after = dict(model.named_buffers())
    assert list(after) == list(buffers)
    assert all(after[name] is buffer for name, buffer in buffers.items())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0, equal_nan=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


class Drawing(nn.Linear):
    """Draws from the generators of Python and NumPy, as layers that are dropped at random do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random() + np.random.rand())  # noqa: NPY002


def test_random_numbers_of_python_and_numpy_are_left_as_found() -> None:
    before = random.getstate(), np.random.get_state()  # noqa: NPY002
    layers(Drawing(3, 2), sample=torch.zeros(1, 3))
    assert random.getstate() == before[0]
    np.testing.assert_equal(np.random.get_state(), before[1])  # noqa: NPY002


@pytest.mark.parametrize("lookup", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_limits_its_norms_keeps_its_weights(lookup: type[nn.Embedding]) -> None:
    model = nn.Sequential(lookup(6, 4, max_norm=0.1), nn.Linear(4, 2))
    before, version = model[0].weight.detach().clone(), model[0].weight._version
    layers(model, sample=torch.arange(6).view(2, 3))
    assert torch.equal(model[0].weight, before)
    assert model[0].weight._version == version


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_buffer_does_not_stand_in_the_way(layout: torch.layout) -> None:
    class Graph(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.neighbours @ x)

    model = Graph(3, 2)
    model.register_buffer("neighbours", torch.eye(4).to_sparse(layout=layout))
    assert names(model, torch.zeros(4, 3)) == ["weight"]
    assert torch.equal(model.neighbours.to_dense(), torch.eye(4))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_a_buffer_that_a_model_also_holds_in_a_list_is_left_as_found() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("cache", torch.ones(4))
            self.caches = [self.cache]

        def forward(self, x: Tensor) -> Tensor:
            self.caches[0].add_(1)
            return self.linear(x) + self.caches[0]

    model = Caching()
    assert len(layers(model, sample=torch.ones(2, 4))) == 1
    assert model.caches[0] is model.cache
    assert torch.equal(model.cache, torch.ones(4))


def test_a_buffer_of_one_byte_numbers_does_not_stand_in_the_way() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("quantized", torch.ones(4).to(torch.float8_e4m3fn))
    assert len(layers(model, sample=torch.ones(2, 4))) == 1


def test_a_scripted_part_is_left_as_found() -> None:
    part = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    model = backwards(nn.Linear(3, 2), part, nn.Linear(3, 3))
    # What happens inside is not seen: its layer follows the one registered before.
    assert names(model, torch.ones(4, 3)) == ["2.weight", "0.weight", "1.0.weight"]
    assert all(module.training for module in model.modules())
    assert int(part.state_dict()["1.num_batches_tracked"]) == 0


def test_training_goes_on_as_if_the_order_had_not_been_asked() -> None:
    def losses(ask: bool) -> list[float]:
        torch.manual_seed(0)
        model = ResNet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = []
        for _ in range(3):
            x = torch.randn(4, 3, 8, 8)
            if ask:
                layers(model, sample=x)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out

    assert losses(ask=True) == losses(ask=False)


@pytest.mark.gpu
def test_random_numbers_on_the_gpu_are_left_as_found() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.rand_like(x))

    model = Noisy(2, 2).cuda()
    random = torch.cuda.get_rng_state()
    layers(model, sample=torch.zeros(2, device="cuda"))
    assert torch.equal(torch.cuda.get_rng_state(), random)


def test_an_overridden_train_is_not_called() -> None:
    class Merging(nn.Linear):
        def train(self, mode: bool = True) -> Merging:
            raise AssertionError("merged")

    assert names(Merging(2, 2), torch.zeros(2)) == ["weight"]


def test_a_meta_model_takes_a_meta_sample() -> None:
    with torch.device("meta"):
        model = ResNet()
    assert names(model, X.to("meta")) == USED


def test_a_sample_of_the_wrong_shape_is_refused_with_its_cause() -> None:
    with pytest.raises(LayerError, match="a tuple of positional arguments or a dict") as error:
        layers(ResNet(), sample=torch.zeros(2, 5))
    assert isinstance(error.value.__cause__, RuntimeError)
    assert str(error.value).endswith("Without `sample`, layers are in registration order.")


def test_a_pass_that_uses_no_layer_is_refused() -> None:
    class Detached(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(LayerError, match="Detached used none of its 1 layers"):
        layers(Detached(2, 2), sample=torch.zeros(2))
