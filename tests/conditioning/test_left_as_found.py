"""An analyzed model is left as it was, whatever its modules and wherever the analysis ended."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import gyroscope
from gyroscope.errors import ConditioningError, GyroscopeError


class Everything(nn.Module):
    """Statistics, power iterations, rows that are rescaled, dropout, frozen, shared, eval and unused parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 8, max_norm=0.5)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.old = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.quiet = nn.BatchNorm1d(8).eval()
        self.drop = nn.Dropout(0.5)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.zeros(8), persistent=False)
        self.register_buffer("nothing", None)
        self.calls = 0
        self.last: Tensor | None = None

    def forward(self, words: Tensor) -> Tensor:
        self.calls += 1
        x = self.conv(self.embedding(words).transpose(1, 2))
        x = self.quiet(F.relu(self.norm(x), inplace=True)).transpose(1, 2)
        x = self.drop(self.old(self.spectral(self.frozen(x) + random.random() + float(np.random.rand()))))  # noqa: NPY002
        x = x + self.attention(x, x, x)[0] + self.recurrent(x)[0]
        self.shift += x.detach().mean((0, 1))
        self.last = x
        return self.head(x[:, -1])


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(9, (12, 4), generator=generator), torch.arange(12) % 9


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def pair(n: int = 16, seed: int = 1) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(seed)), torch.arange(n) % 3


class Break(torch.autograd.Function):
    """The identity, until the gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise KeyError("in the middle of the backward pass")


def exact(value: Any) -> Any:
    """A value that compares equal only to what is the same to the bit; objects by identity."""
    if isinstance(value, Tensor):
        data = value.detach().reshape(-1).contiguous().view(torch.uint8).tolist()
        return id(value), value._version, value.requires_grad, value.grad_fn is None, value.dtype, value.shape, data
    if isinstance(value, dict):
        return [(key, exact(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return [exact(one) for one in value]
    return id(value) if isinstance(value, nn.Module) or callable(value) else value


def everything(model: nn.Module) -> dict[str, Any]:
    """All that could be other than before: of every module all it holds, and of the world what a pass may touch."""
    numpy_state = np.random.get_state()  # noqa: NPY002
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return {
        "modules": [(id(m), exact(vars(m))) for m in model.modules()],
        "gradients": [exact(p.grad) for p in model.parameters()],
        "hooks": [exact(dict(getattr(p, kind) or {})) for p in model.parameters() for kind in hooks],
        "torch": torch.get_rng_state().tolist(),
        "numpy": [numpy_state[1].tolist(), *numpy_state[2:]],
        "python": random.getstate(),
        "modes": [
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"), torch._C._get_mkldnn_enabled(), torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
        ],
    }  # fmt: skip


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for what, value in before.items():
        assert after[what] == value, what


def with_gradients(model: nn.Module) -> nn.Module:
    """Every other parameter has a gradient of its own."""
    for i, p in enumerate(model.parameters()):
        p.grad = torch.randn_like(p) if i % 2 and p.requires_grad else None
    return model


FAILURES: dict[str, tuple[Callable[..., Any], Any]] = {
    "nowhere": (loss, batch()),
    "in the forward pass": (loss, (torch.full((12, 4), 99), batch()[1])),
    "in the loss": (lambda o, t: F.cross_entropy(o, t[:3]), batch()),
    "in the backward pass": (lambda o, t: loss(Break.apply(o), t), batch()),
    "in the second batch": (loss, [batch(), (batch()[0], batch()[1][:2])]),
    "in the batches": (loss, [batch(), "no batch"]),
    "by an interrupt": (lambda o, t: interrupted(), batch()),
}


def interrupted() -> Tensor:
    raise KeyboardInterrupt


def analyse(model: nn.Module, its_loss: Callable[..., Any], given: Any, **options: Any) -> BaseException | None:
    try:
        gyroscope.condition(model, its_loss, given, **options)
    except (Exception, KeyboardInterrupt) as error:
        return error
    return None


OPTIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "largest alone": {"p": ()},
    "sampled labels": {"labels": "sampled", "layers": "*conv*"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("where", FAILURES)
def test_everything_is_as_it_was_also_if_it_fails(where: str, options: dict[str, Any]) -> None:
    model = with_gradients(Everything())
    its_loss, given = FAILURES[where]
    if "labels" in options and where != "in the loss":
        its_loss = F.cross_entropy if where in ("nowhere", "in the forward pass", "in the second batch") else its_loss
    model(batch()[0])  # the norms that are set as attributes have been computed
    before = everything(model)
    error = analyse(model, its_loss, given, **options)
    assert (error is None) == (where == "nowhere")
    assert_same(before, everything(model))


@pytest.mark.parametrize("train", [True, False])
def test_modes_are_used_as_they_are(train: bool) -> None:
    model = Everything().train(train)
    model.norm.train(not train)
    before = everything(model)
    seen: list[bool] = []
    model.norm.register_forward_hook(lambda m, *_: seen.append(m.training))
    gyroscope.condition(model, loss, batch())
    assert seen == [not train]
    model.norm._forward_hooks.clear()
    assert_same(before, everything(model))


def test_a_second_analysis_has_the_same_numbers_to_the_bit() -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)  # noqa: NPY002
    model = Everything()
    one, two = (gyroscope.condition(model, F.cross_entropy, batch(), labels=how) for how in ("sampled", "sampled"))
    assert one.rows() == two.rows()
    assert one.loss == two.loss
    large = nn.Sequential(nn.Linear(400, 500), nn.ReLU(), nn.Linear(500, 400))  # λmax by iteration
    x = torch.randn(600, 400)
    one, two = (gyroscope.condition(large, F.mse_loss, (x, x), p=()) for _ in range(2))
    assert one.rows() == two.rows()


def test_seeds_of_labels_make_other_labels_and_the_same_ones() -> None:
    model, given = mlp(), pair()
    one, same, other = (
        gyroscope.condition(model, F.cross_entropy, given, labels="sampled", seed=s).rows() for s in (0, 0, 1)
    )
    assert one == same != other


def test_hooks_on_the_accumulation_of_gradients_do_not_run() -> None:
    """An optimizer within the backward pass would train the model."""
    model = mlp()
    ran: list[Tensor] = []
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def step(p: Tensor) -> None:
        ran.append(p)
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    before = everything(model)
    gyroscope.condition(model, F.cross_entropy, pair())
    assert not ran
    assert_same(before, everything(model))
    F.cross_entropy(model(pair()[0]), pair()[1]).backward()
    assert len(ran) == 4


def test_hooks_of_modules_stay_where_they_are_and_in_order() -> None:
    model, order = mlp(), []
    model[0].register_forward_pre_hook(lambda *_: order.append("pre"))
    model[0].register_forward_hook(lambda *_: order.append("forward"))
    model[0].register_full_backward_pre_hook(lambda *_: order.append("backward pre"))
    model[0].register_full_backward_hook(lambda *_: order.append("backward"))
    x, y = pair()
    before = everything(model)
    gyroscope.condition(model, F.cross_entropy, (x.requires_grad_(), y))
    assert_same(before, everything(model))
    order.clear()
    F.cross_entropy(model(x), y).backward()
    assert order == ["pre", "forward", "backward pre", "backward"]


def test_a_hook_that_changes_gradients_is_part_of_the_model() -> None:
    model = mlp()
    plain = gyroscope.condition(model, F.cross_entropy, pair())
    model[0].weight.register_hook(lambda g: 3 * g)
    tripled = gyroscope.condition(model, F.cross_entropy, pair())
    assert tripled["0.weight"].domination == pytest.approx(3 * plain["0.weight"].domination)
    assert tripled["2.weight"] == plain["2.weight"]


@pytest.mark.parametrize("make", [mlp, Everything])
def test_graphs_that_are_alive_outside_can_still_be_differentiated(make: Callable[[], nn.Module]) -> None:
    """Between the user's forward and backward pass; an embedding with `max_norm` is rewritten in place meanwhile."""
    given = pair() if make is mlp else batch()
    gradients = []
    for between in (False, True):
        torch.manual_seed(3), np.random.seed(3), random.seed(3)  # noqa: NPY002
        model = make()
        value = F.cross_entropy(model(given[0]), given[1])
        if between:
            gyroscope.condition(model, F.cross_entropy, given)
        value.backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_the_batch_is_not_written_to() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mul_(0.1).requires_grad_())

    def writes(output: Tensor, target: Tensor) -> Tensor:
        return output.sub_(target.mul_(2.0)).square().mean()

    x, y = pair()[0], torch.randn(16, 3)
    given = x.clone(), y.clone()
    one, two = (gyroscope.condition(Scales(), writes, given) for _ in range(2))
    assert torch.equal(given[0], x)
    assert torch.equal(given[1], y)
    assert not given[0].requires_grad
    assert one["linear.weight"].lambda_x == two["linear.weight"].lambda_x
    leaf = x.clone().requires_grad_()
    gyroscope.condition(mlp(), F.cross_entropy, (leaf, pair()[1]))
    assert leaf.grad is None
    assert leaf.requires_grad


def test_batches_in_one_buffer_are_told_apart() -> None:
    """A stream may write every batch to the same memory."""
    model, (x, y) = nn.Linear(40, 3), (torch.randn(8, 40), torch.arange(8) % 3)

    def stream() -> Any:
        buffer = torch.empty(4, 40)
        for part in range(2):
            buffer.copy_(x[4 * part : 4 * part + 4])
            yield buffer, y[4 * part : 4 * part + 4]

    streamed, listed = (
        gyroscope.condition(model, F.cross_entropy, b).rows()[0] for b in (stream(), [(x[:4], y[:4]), (x[4:], y[4:])])
    )
    assert streamed == listed


def test_no_grad_outside_changes_nothing() -> None:
    model = mlp()
    expected = gyroscope.condition(model, F.cross_entropy, pair()).rows()
    with torch.no_grad():
        assert gyroscope.condition(model, F.cross_entropy, pair()).rows() == expected
        assert not torch.is_grad_enabled()


def test_the_default_dtype_changes_nothing_and_is_kept() -> None:
    model, given = mlp(), pair()
    expected = gyroscope.condition(model, F.cross_entropy, given).rows()
    torch.set_default_dtype(torch.float64)
    try:
        assert gyroscope.condition(model, F.cross_entropy, given).rows() == expected
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_weights_are_measured_in_full_precision_under_autocast() -> None:
    model = mlp()
    plain = gyroscope.condition(model, F.cross_entropy, pair())
    with torch.autocast("cpu", torch.bfloat16):
        cast = gyroscope.condition(model, F.cross_entropy, pair())
        assert torch.is_autocast_enabled("cpu")
    for one, other in zip(cast.entries, plain.entries, strict=True):
        assert (one.weight_norm, one.weight_spectral) == (other.weight_norm, other.weight_spectral)
        assert one.lambda_f != other.lambda_f
        assert one.lambda_f == pytest.approx(other.lambda_f, rel=0.1)


@pytest.mark.filterwarnings("ignore:.*TF32.*")  # of torch's own switch for mkldnn
@pytest.mark.parametrize("enabled", [True, False])
def test_backends_are_switched_back(enabled: bool) -> None:
    model = nn.LSTM(5, 4, batch_first=True)
    x = torch.randn(6, 7, 5)
    with torch.backends.mkldnn.flags(enabled=enabled):
        for its_loss in (lambda o, _: o[0].square().mean(), lambda o, _: 1 / 0):
            analyse(model, its_loss, (x, None))
            assert torch._C._get_mkldnn_enabled() is enabled


def test_frozen_models_stay_frozen_and_are_analysed() -> None:
    model = mlp()
    expected = gyroscope.condition(model, F.cross_entropy, pair()).rows()
    model.requires_grad_(False)
    before = everything(model)
    assert gyroscope.condition(model, F.cross_entropy, pair()).rows() == expected
    assert_same(before, everything(model))


@pytest.mark.parametrize("make", [mlp, Everything])
def test_nothing_is_kept_alive(make: Callable[[], nn.Module]) -> None:
    model, given = make(), pair() if make is mlp else batch()
    found = gyroscope.condition(model, loss, given, spectra=True)
    alive = weakref.ref(model), weakref.ref(next(model.parameters())), weakref.ref(given[0])
    del model, given
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]
    assert found.spectra is not None


def test_nothing_is_kept_alive_by_an_analysis_that_fails() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise RuntimeError("in the backward pass")

    model = nn.MultiheadAttention(4, 2)
    x = torch.randn(3, 2, 4)
    with pytest.raises(ConditioningError, match="in the backward pass"):
        gyroscope.condition(model, lambda o, _: Fails.apply(o[0]).mean(), ((x, x, x), None), reduction="mean")
    alive = weakref.ref(model), weakref.ref(model.in_proj_weight)
    del model
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_gradients_are_let_go_of_without_the_collector() -> None:
    model, given = mlp(), pair()
    gyroscope.condition(model, loss, given)
    alive = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        gyroscope.condition(model, loss, given)
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_shared_buffers_stay_shared_within_the_pass() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.one, self.two = nn.Linear(5, 3), nn.Module(), nn.Module()
            self.one.register_buffer("count", torch.zeros(()))
            self.two.register_buffer("count", self.one.count)

        def forward(self, x: Tensor) -> Tensor:
            self.one.count.add_(1.0)
            return self.linear(x) * self.two.count

    model = Shared()
    before = everything(model)
    found = gyroscope.condition(model, F.cross_entropy, pair())
    assert found.rows()[0]["gradient_spectral"] > 0
    assert_same(before, everything(model))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
@pytest.mark.parametrize("inside", [False, True], ids=["wrapped", "in place"])
def test_compiled_models_stay_compiled_and_have_the_same_numbers(inside: bool) -> None:
    plain, model = mlp(), mlp()
    compiled: Any = torch.compile(model, backend="eager")
    if inside:
        model.compile(backend="eager")
        compiled = model
    before, stance = everything(model), eval_frame._stance.stance
    rows = gyroscope.condition(compiled, F.cross_entropy, pair()).rows()
    assert_same(before, everything(model))
    assert eval_frame._stance.stance == stance
    expected = gyroscope.condition(plain, F.cross_entropy, pair()).rows()
    for one, other in zip(rows, expected, strict=True):
        assert one["lambda_f"] == other["lambda_f"]
        assert one["kappa_f"] == other["kappa_f"]
        assert one["domination"] == other["domination"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_models_have_the_same_numbers(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, body: nn.Sequential) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body[1:], self.body[0](x), use_reentrant=reentrant)

    plain = mlp()
    model = with_gradients(Checkpointed(copy.deepcopy(plain)))
    before = everything(model)
    rows = gyroscope.condition(model, F.cross_entropy, pair()).rows()
    assert_same(before, everything(model))
    expected = gyroscope.condition(plain, F.cross_entropy, pair()).rows()
    for one, other in zip(rows, expected, strict=True):
        assert one["layer"] == f"body.{other['layer']}"
        assert one["lambda_f"] == pytest.approx(other["lambda_f"], rel=1e-6)
        assert one["samples"] == other["samples"]
        assert (one["dying"], one["full"]) == (other["dying"], other["full"])
        assert one["domination"] == pytest.approx(other["domination"], rel=1e-6)


def trained(folder: Any, between: bool) -> gyroscope.Run:
    """A watched training, analyzed by hand between its steps and within one."""
    torch.manual_seed(3), np.random.seed(3), random.seed(3)  # noqa: NPY002
    model, its_loss = Everything(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.05)
    with gyroscope.watch(model, optimizer, folder, detail_every=1, budget=None, loss=its_loss, conditioning=1):
        for step in range(4):
            words, targets = batch(step)
            optimizer.zero_grad()
            output = model(words)
            if between:
                gyroscope.condition(model, its_loss, batch(99))
            its_loss(output, targets).backward()
            if between:
                gyroscope.condition(model, its_loss, [batch(98), batch(97)])
                with pytest.raises(GyroscopeError):
                    gyroscope.condition(model, its_loss, (words, targets[:2]))
            optimizer.step()
    return gyroscope.load(folder)


def test_an_analysis_in_the_middle_of_a_watched_training_disturbs_nothing_that_is_recorded(tmp_path: Any) -> None:
    plain, disturbed = trained(tmp_path / "plain", False), trained(tmp_path / "disturbed", True)
    assert plain.steps.tolist() == disturbed.steps.tolist()
    assert plain.quantities.keys() == disturbed.quantities.keys()
    assert {"lambda_f", "dying", "rotation"} <= plain.quantities.keys()
    for name in plain.quantities:
        np.testing.assert_array_equal(plain.series(name), disturbed.series(name), err_msg=name)
    assert plain.scalars["loss"].values.tolist() == disturbed.scalars["loss"].values.tolist()
    assert len(plain.scalars["loss"].values) == 4


def test_errors_are_of_our_own_type_and_say_where() -> None:
    said_where = {"in the forward pass": "forward pass", "in the loss": "loss", "in the backward pass": "backward pass"}
    for where, said in said_where.items():
        with pytest.raises(ConditioningError, match=said):
            gyroscope.condition(Everything(), *FAILURES[where])
