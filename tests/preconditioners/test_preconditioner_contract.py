"""Preconditioners as torch optimizers: state, gradients, control around them, and what they pass through."""

import copy
import gc
import math
import weakref
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gyroscope import Layca
from gyroscope.control.preconditioners import kfac, quasi_diagonal
from gyroscope.control.preconditioners.kfac import KFAC
from gyroscope.control.preconditioners.quasi_diagonal import QuasiDiagonal
from gyroscope.errors import DynamicsError

KINDS = {
    "kfac": lambda inner, net: KFAC(inner, net, F.cross_entropy, damping=0.1, decompose_every=2, every=2),
    "kfac true": lambda inner, net: KFAC(inner, net, labels="true", damping=0.1, decompose_every=3),
    "quasi-diagonal": lambda inner, net: QuasiDiagonal(inner, net),
    "quasi-diagonal sampled": lambda inner, net: QuasiDiagonal(inner, net, F.cross_entropy, labels="sampled"),
}
INNER = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.01),
}


def make_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 3))


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 1, 3, 3, generator=generator), torch.randint(3, (8,), generator=generator)


def train(net, optimizer, steps):
    for step in steps:
        x, y = data(step)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def weights(net):
    return torch.cat([p.detach().flatten().clone() for p in net.parameters()])


@pytest.mark.parametrize("controlled", [False, True])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_goes_on_as_if_never_interrupted(kind, inner, controlled, tmp_path):
    def build(net):
        optimizer = KINDS[kind](INNER[inner](net), net)
        return Layca(optimizer, net) if controlled else optimizer

    net = make_net()
    optimizer = build(net)
    train(net, optimizer, range(3))
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    train(net, optimizer, range(3, 7))
    again = make_net(seed=1)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = build(again)
    again.load_state_dict(saved["net"])
    resumed.load_state_dict(saved["optimizer"])
    train(again, resumed, range(3, 7))
    assert torch.equal(weights(again), weights(net))


def test_a_state_that_was_loaded_onto_another_device_draws_the_same_labels():
    """With torch.load(file, map_location="cuda"); generators take their state from the host."""

    class Elsewhere:
        def __init__(self, here):
            self.cpu = lambda: here

    def build(net):
        return KFAC(torch.optim.SGD(net.parameters(), lr=0.1), net, F.cross_entropy)

    net = make_net()
    optimizer = build(net)
    train(net, optimizer, range(2))
    again = copy.deepcopy(net)
    resumed, saved = build(again), copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        if "kfac_generator" in state:
            state["kfac_generator"] = Elsewhere(state["kfac_generator"])
    resumed.load_state_dict(saved)
    for one, own in ((net, optimizer), (again, resumed)):
        train(one, own, range(2, 4))
    assert torch.equal(weights(again), weights(net))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_model_and_optimizer_train_on_alike_and_apart(kind):
    net = make_net()
    optimizer = KINDS[kind](INNER["sgd"](net), net)
    train(net, optimizer, range(2))
    twin, its = copy.deepcopy((net, optimizer))
    train(net, optimizer, range(2, 5))
    train(twin, its, range(2, 5))
    assert torch.equal(weights(net), weights(twin))


def test_a_copy_of_the_model_alone_is_not_watched_and_does_not_keep_the_optimizer():
    net = make_net()
    optimizer = QuasiDiagonal(INNER["sgd"](net), net)
    train(net, optimizer, range(1))
    twin = copy.deepcopy(net)
    F.cross_entropy(twin(1000 + data(0)[0]), data(0)[1]).backward()
    before = optimizer._statistics.state(0)["mean"].clone()
    optimizer._statistics.fold()
    assert torch.equal(optimizer._statistics.state(0)["mean"], before)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    net(data(0)[0]).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_loops_own_after_a_step(kind):
    net = make_net()
    optimizer = KINDS[kind](INNER["sgd"](net), net)
    x, y = data(0)
    F.cross_entropy(net(x), y).backward()
    before = [(p.grad, p.grad.clone()) for p in net.parameters()]
    optimizer.step()
    for p, (grad, value) in zip(net.parameters(), before, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, value)


def test_layca_turns_by_its_angle_toward_the_preconditioned_gradient():
    rho = 0.1
    net, plain = make_net().double(), make_net().double()
    x, y = data(0)[0].double(), data(0)[1]
    given = {"labels": "true", "damping": 0.1, "biases": False}
    control = Layca(KFAC(torch.optim.SGD(net.parameters(), lr=rho), net, **given), net, others_lr=0.3)
    free = KFAC(torch.optim.SGD(plain.parameters(), lr=1.0), plain, **given)
    bias = net[4].bias.detach().clone()
    w = {i: net[i].weight.detach().clone() for i in (0, 4)}
    for one, optimizer in ((net, control), (plain, free)):
        F.cross_entropy(one(x), y).backward()
        optimizer.step()
    for i in (0, 4):
        s = plain[i].weight.detach() - w[i]
        tangent = s - (s * w[i]).sum() / w[i].square().sum() * w[i]
        turned = w[i] + rho * w[i].norm() * tangent / tangent.norm()
        torch.testing.assert_close(net[i].weight.detach(), turned * w[i].norm() / turned.norm())
        cosine = torch.cosine_similarity(net[i].weight.detach().flatten(), w[i].flatten(), dim=0)
        assert math.tan(math.acos(cosine)) == pytest.approx(rho, rel=1e-6)
    torch.testing.assert_close(net[4].bias.detach(), bias - 0.3 * net[4].bias.grad)


@pytest.mark.parametrize("kind", ["kfac", "quasi-diagonal"])
def test_weights_alone_are_preconditioned_as_if_the_bias_were_frozen_and_the_bias_steps_on_its_gradient(kind):
    x = 2 + torch.randn(20, 3, dtype=torch.float64)
    found = []
    for frozen in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(3, 2).double()
        net.bias.requires_grad_(not frozen)
        inner = torch.optim.SGD(net.parameters(), lr=0.5)
        given = {"labels": "true", "biases": frozen}
        optimizer = KFAC(inner, net, **given) if kind == "kfac" else QuasiDiagonal(inner, net, **given)
        before = net.bias.detach().clone()
        net(x).square().mean().backward()
        optimizer.step()
        found.append(net.weight.detach())
        if not frozen:
            torch.testing.assert_close(net.bias.detach(), before - 0.5 * net.bias.grad)
    torch.testing.assert_close(*found)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.grouped = nn.Conv2d(2, 2, 1, groups=2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.frozen(self.normed(self.norm(self.first(self.embedding(x))))))


def test_what_is_not_supported_is_listed_and_stepped_by_the_inner_optimizer():
    torch.manual_seed(0)
    net = Odd()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = KFAC(inner, net, labels="true")
    assert optimizer.layers == ("first",)
    assert optimizer.unsupported["embedding"] == "Embedding is neither a linear layer nor a convolution"
    assert optimizer.unsupported["grouped"] == "a convolution with 2 groups is as many layers"
    assert optimizer.unsupported["head"] == "it shares parameters with embedding"
    assert set(optimizer.unsupported) >= {"norm"}
    assert any(name.startswith("normed") for name in optimizer.unsupported)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    F.cross_entropy(net(torch.arange(5)), torch.arange(5)).backward()
    optimizer.step()
    for name, p in net.named_parameters():
        if not name.startswith("first"):
            plain = before[name] if p.grad is None else before[name] - 0.1 * p.grad
            torch.testing.assert_close(p.detach(), plain)
    assert not torch.allclose(net.first.weight, before["first.weight"] - 0.1 * net.first.weight.grad)


def test_a_layer_that_no_pass_was_seen_to_call_is_told_of_once_and_passed_through():
    net = nn.Linear(2, 2)
    optimizer = QuasiDiagonal(torch.optim.SGD(net.parameters(), lr=1.0), net)
    before = net.weight.detach().clone()
    F.linear(torch.randn(4, 2), net.weight, net.bias).sum().backward()
    with pytest.warns(UserWarning, match="There are no statistics"):
        optimizer.step()
    torch.testing.assert_close(net.weight.detach(), before - net.weight.grad)
    optimizer.step()


def test_passes_without_gradients_are_not_looked_at_and_those_without_a_backward_pass_leave_nothing():
    net = make_net()
    optimizer = KFAC(INNER["sgd"](net), net, labels="true")
    train(net, optimizer, range(1))
    before = optimizer._statistics.state(0)["A"].clone()
    with torch.no_grad():
        net(1000 + data(1)[0])
    net(1000 + data(1)[0])
    optimizer._statistics.fold()
    assert torch.equal(optimizer._statistics.state(0)["A"], before)


@pytest.mark.parametrize("kind", ["kfac true", "quasi-diagonal sampled"])
def test_statistics_survive_a_batch_that_is_not_finite(kind):
    net = make_net()
    net[1].eval()
    optimizer = KINDS[kind](torch.optim.SGD(net.parameters(), lr=0.0), net)
    train(net, optimizer, range(2))
    known = {name: value.clone() for name, value in optimizer._statistics.state(0).items() if name in ("A", "mean")}
    F.cross_entropy(net(torch.full((8, 1, 3, 3), math.inf)), torch.zeros(8, dtype=torch.int64)).backward()
    optimizer._statistics.fold()
    after = optimizer._statistics.state(0)
    for name, value in known.items():
        torch.testing.assert_close(after[name], value)


@pytest.mark.parametrize("labels", ["true", "sampled"])
def test_checkpointed_passes_give_the_same_factors(labels):
    class Net(nn.Module):
        def __init__(self, saves):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head, self.saves = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 2), saves

        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant=False) if self.saves else self.body(x))

    found = []
    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    for saves in (False, True):
        net = Net(saves)
        optimizer = KFAC(torch.optim.SGD(net.parameters(), lr=1.0), net, F.cross_entropy, labels=labels)
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        found.append(weights(net))
    torch.testing.assert_close(found[0], found[1])


def test_closures_are_evaluated_with_gradients_and_their_loss_is_returned():
    net = nn.Linear(3, 2).double()
    x = torch.randn(8, 3, dtype=torch.float64)
    optimizer = QuasiDiagonal(torch.optim.SGD(net.parameters(), lr=0.1), net)

    def closure():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    first = float(optimizer.step(closure).detach())
    assert float(optimizer.step(closure).detach()) < first


def test_what_it_cannot_work_with_is_refused():
    net = nn.Linear(2, 2)
    with pytest.raises(DynamicsError, match=r"`optimizer` must be .*got a list"):
        KFAC([], net, labels="true")
    with pytest.raises(DynamicsError, match="LBFGS"):
        KFAC(torch.optim.LBFGS(net.parameters()), net, labels="true")
    with pytest.raises(DynamicsError, match=r"no layers to precondition.*the optimizer does not hold"):
        KFAC(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0), net, labels="true")
    with pytest.raises(DynamicsError, match=r"`model` must be a torch\.nn\.Module, got a list"):
        QuasiDiagonal(torch.optim.SGD(net.parameters(), lr=1.0), [])


def test_a_state_of_another_preconditioner_is_refused_before_anything_changes():
    nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
    x = torch.randn(8, 2)
    given = {"labels": "true", "decay": 0.5}
    one, two = (QuasiDiagonal(torch.optim.SGD(net.parameters(), lr=1.0), net, **given) for net in nets)
    nets[0](x).sum().backward()
    one.step()
    state = one.state_dict()
    del state["state"][0]["quasi_diagonal_slopes"]
    with pytest.raises(DynamicsError, match=r"'quasi_diagonal_slopes' of '' must have shape \[2\], got none"):
        two.load_state_dict(state)
    assert not two._statistics.known(0)


@pytest.mark.parametrize("kind", [KFAC, QuasiDiagonal])
def test_what_an_optimizer_keeps_under_a_key_of_its_own_is_saved_and_loaded(kind):
    net = nn.Linear(2, 2)
    optimizer = kind(torch.optim.SGD(net.parameters(), lr=1.0), net, labels="true")
    optimizer.inner.state["calls"] = 3
    net(torch.randn(8, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.inner.state["calls"] = 4
    optimizer.load_state_dict(state)
    assert optimizer.inner.state["calls"] == 3


def test_closing_stops_watching():
    net = make_net()
    optimizer = QuasiDiagonal(INNER["sgd"](net), net)
    train(net, optimizer, range(1))
    optimizer.close()
    before = optimizer._statistics.state(0)["count"]
    train(net, optimizer, range(1, 3))
    assert optimizer._statistics.state(0)["count"] == before
    assert not net[0]._forward_hooks


@pytest.mark.parametrize("kind", KINDS)
def test_passes_that_are_not_trained_on_change_nothing(kind):
    found = []
    for looks in (False, True):
        net = make_net()
        optimizer = KINDS[kind](INNER["sgd"](net), net)
        for step in range(5):
            train(net, optimizer, [step])
            for _ in range(3 if looks else 0):  # as in a validation that forgets no_grad
                net.eval()(10 * torch.ones(4, 1, 3, 3))
            net.train()
        found.append(weights(net))
    assert torch.equal(*found)


def test_a_profiler_and_hooks_see_the_step():
    net = make_net()
    optimizer = QuasiDiagonal(INNER["sgd"](net), net)
    train(net, optimizer, range(1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        train(net, optimizer, range(1, 2))
    assert "Optimizer.step#QuasiDiagonal.step" in {event.key for event in profiled.key_averages()}
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(net, optimizer, range(2, 3))
    everywhere = register_optimizer_step_post_hook(lambda one, *_: calls.append(type(one).__name__))
    try:
        train(net, optimizer, range(3, 4))
    finally:
        everywhere.remove()
    assert calls == ["before", "after", "before", "SGD", "after", "QuasiDiagonal"]


class Written(TorchDispatchMode):
    """Counts the tensors that operations give, and the numbers in those that are no views."""

    def __init__(self):
        super().__init__()
        self.tensors = self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = [one for one in (found if isinstance(found, (tuple, list)) else [found]) if torch.is_tensor(one)]
        self.tensors += len(given)
        self.numbers += 0 if func.is_view else sum(one.numel() for one in given)
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_loading_take_work_in_proportion_to_the_layers(kind):
    def work(layers):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        optimizer = KINDS[kind](torch.optim.SGD(net.parameters(), lr=0.1), net)
        F.cross_entropy(net(torch.randn(4, 3)), torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
        with Written() as saving:
            state = optimizer.state_dict()
        with Written() as loading:
            optimizer.load_state_dict(state)
        return [saving.tensors, saving.numbers, loading.tensors, loading.numbers]

    assert all(more <= 6 * few for few, more in zip(work(8), work(32), strict=True))


@pytest.mark.parametrize(
    ("kind", "module", "name"),
    [("kfac", kfac, "Factors"), ("quasi-diagonal", quasi_diagonal, "Moments")],
    ids=["kfac", "quasi-diagonal"],
)
def test_states_are_saved_and_loaded_where_python_leaves_assertions_out(kind, module, name, monkeypatch):
    bare = ModuleType(module.__name__)
    exec(compile(Path(module.__file__).read_text(), module.__file__, "exec", optimize=1), vars(bare))
    monkeypatch.setattr(module, name, getattr(bare, name))
    net, other = make_net(), make_net()
    optimizer, fresh = (KINDS[kind](INNER["sgd"](one), one) for one in (net, other))
    train(net, optimizer, range(2))
    other.load_state_dict(net.state_dict())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(net, optimizer, range(2, 4))
    train(other, fresh, range(2, 4))
    assert torch.equal(weights(net), weights(other))
