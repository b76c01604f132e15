"""What `steer` refuses or warns about, before anything is changed."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract_models import assert_same_state, snapshot
from torch import nn
from torch.optim import Optimizer

from gyroscope import Layca, layers, steer
from gyroscope.control import lars, layca, presets
from gyroscope.errors import ControlError, LayerError


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def convolutional() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(2, 4), nn.Linear(4, 2))


class LARS(torch.optim.SGD):
    """Has the name of an optimizer that normalizes its steps layer by layer."""


class Strange(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mine": 1}


class Gains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.U, self.V = (nn.Parameter(torch.randn(3, 3)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.U @ self.V


class Short(torch.optim.SGD):
    """Begins as Prodigy does: with steps of a few roundings of the weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 + 3e-7)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: steer(net(), lr=1e-3), r"`lr` is not an argument of steer, got 0\.001\. Give `rate` .*`others_lr`"),
        (
            lambda: steer(net(), weight_decay=0.1),
            r"`weight_decay` is not an argument .*rates\.from_decay\(lr, weight_d",
        ),
        (lambda: steer(net(), learning_rate=1), r"`learning_rate` is not an argument of steer, got 1\. Give `rate` .*"),
        (lambda: steer(net(), wd=0.1), r"`wd` is not an argument of steer, got 0\.1\. Give nothing: .*rates\.from_dec"),
        (lambda: steer(net(), inner_options={"lr": 1}), r"`inner_options` must not have 'lr', got 1\. Give `rate`"),
        (lambda: steer(net(), others_options={"weight_decay": 1}), r"`others_options` must not have 'weight_decay'"),
        (lambda: steer(net(), inner_options=[1]), r"`inner_options` must be a dict, got a list"),
        (lambda: steer(net(), inner_options={"moment": 1}), r"Muon could not be made .*Give options that it"),
        (lambda: steer(net(), rate=0.0), r"`rate` must be a finite number > 0, got 0\.0\. Try 0\.04\."),
        (lambda: steer(net(), rate=math.nan), r"`rate` must be a finite number > 0, got nan\."),
        (lambda: steer(net(), rate="fast"), r"`rate` must be a finite number > 0, got 'fast'"),
        (lambda: steer(net(), others_lr=-1), r"`others_lr` must be a finite number > 0, got -1"),
        (
            lambda: steer(net(), others_lr={"bias": 1}),
            r"`others_lr` must have roles .* \(here 'head', .*\), got 'bias'\.",
        ),
        (lambda: steer(net(), others_lr={"router": 1}), r"\(here 'head', 'matrix', 'other'\), got 'router'\."),
        (lambda: steer(net(), others_lr={"head": 0}), r"`others_lr\['head'\]` must be a finite number > 0, got 0\."),
        (lambda: steer(net(), "lion"), r"`inner` must be one of 'adamw', 'sgd', .*got 'lion'\. Try \"adamw\""),
        (lambda: steer(net(), "hyperball"), r"Hyperball goes around an optimizer: use \"adamh\" or \"muonh\""),
        (lambda: steer(net(), 3), r"`inner` must be one of .*, or a function of parameter groups .*got 3"),
        (
            lambda: steer(net(), torch.optim.SGD(net().parameters())),
            r"`inner` must be one of .*got an optimizer, SGD\. steer builds it: give the class SGD and its options in",
        ),
        (lambda: steer(net(), "AdamW"), r"got 'AdamW'\. Try \"adamw\"\."),
        (lambda: steer(net(), "Muon"), r"got 'Muon'\. Try \"muon\"\."),
        (lambda: steer(net(), nn.Linear), r"such as torch\.optim\.NAdam; Linear failed on them \(.*missing 1 required"),
        (lambda: steer(net(), 0.03), r"got 0\.03\. Try rate=0\.03\."),
        (lambda: steer(net(), embeddings=False), r"`embeddings` must be one of .*got False"),
        (lambda: steer(net(), heads=""), r"`heads` must be one of .*got ''"),
        (lambda: steer(net(), norms=False), r"`norms` must be one of .*got False"),
        (lambda: steer(net(), granularity="layer"), r"`granularity` must be one of .*got 'layer'"),
        (
            lambda: steer(nn.Sequential(nn.Embedding(5, 4, sparse=True), *net()[2:])),
            r"sparse gradients, which AdamW does not step: 0\.weight\. Build them with sparse=False",
        ),
        (lambda: steer(net(), heads="free"), r"`heads` must be one of 'turn', 'plain', 'frozen', got 'free'"),
        (lambda: steer(net(), embeddings="no"), r"`embeddings` must be one of 'turn', 'plain', 'frozen', got 'no'"),
        (lambda: steer(net(), norms="fixed"), r"`norms` must be one of 'learned', 'held', got 'fixed'"),
        (lambda: steer(net(), project="yes"), r"`project`"),
        (lambda: steer(Gains()), r"Gains has no layers|no matrix to turn"),
        (lambda: steer(net().requires_grad_(False)), r"The model has no matrix to turn: none needs a gradient\."),
        (lambda: steer(nn.Linear(3, 2)), r"No matrix of the model turns; .*weight \(head\)\. .*heads=\"turn\""),
        (lambda: steer(net(), plain="*"), r"because `plain` names all that would: 0\.weight, 2\.weight\. Name fewer"),
        (lambda: steer(nn.Linear(3, 2), plain="weight"), r"No matrix of the model turns; .*weight \(head\)\."),
        (lambda: steer(nn.Linear(3, 2), heads="turn", plain="weight"), r"because `plain` names all that would: weight"),
        (
            lambda: steer(Bare()),
            r"Bare has no layers\. .*layers\(model, include=\['U', 'V'\]\)\. gyroscope\.Layca takes",
        ),
        (lambda: steer(net().parameters()), r"got generator\. Pass the model itself, not its parameters or an optim"),
        (lambda: steer(torch.optim.SGD(net().parameters())), r"got SGD\. Pass the model itself, not its parameters"),
        (
            lambda: steer(net(), torch.optim.SparseAdam),
            r"must step dense gradients, got SparseAdam, .*torch\.optim\.Ada",
        ),
        (lambda: steer(net(), lambda groups: None), r"`inner` must return a torch\.optim\.Optimizer, got a NoneType"),
        (lambda: steer(net(), lambda groups: Layca(torch.optim.SGD(groups))), r"got Layca, which normalizes them"),
        (lambda: steer(net(), lambda groups: lars(torch.optim.SGD(groups))), r"got Layca, which normalizes them"),
        (lambda: steer(net(), LARS), r"leave their length to Layca, got LARS, which normalizes them\. Give .*\"sgd\""),
        (lambda: steer(net(), torch.optim.LBFGS), r"one gradient and keep its state as torch's .*LBFGS does not"),
        (lambda: steer(net(), Strange), r"keep its state as torch's optimizers do; Strange does not"),
        (
            lambda: steer(net(), lambda groups: torch.optim.SGD([p for g in groups for _, p in g["params"]][:1])),
            r"`inner` must return an optimizer over the groups that it is given, got SGD over others",
        ),
    ],
)
def test_bad_input_is_refused(call: Callable[[], Any], said: str) -> None:
    with pytest.raises((ControlError, LayerError), match=said):
        call()


def test_other_unknown_arguments_are_type_errors_as_python_s_own() -> None:
    with pytest.raises(TypeError, match=re.escape("steer() got an unexpected keyword argument 'speed'.")):
        steer(net(), speed=0.9)
    with pytest.raises(
        TypeError, match=r"argument 'momentum'\. Options of the inner optimizer go into `inner_options`"
    ):
        steer(net(), momentum=0.9)


def test_embeddings_with_sparse_gradients_may_be_frozen() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), *net()[2:])
    before = model[0].weight.detach().clone()
    optimizer = steer(model, embeddings="frozen")
    model(torch.tensor([1, 2])).square().mean().backward()
    optimizer.step()
    assert torch.equal(before, model[0].weight)


def test_a_gradient_that_is_not_finite_is_reported_by_the_name_of_its_parameter() -> None:
    model = net()
    optimizer = steer(model, nonfinite="raise")
    model(torch.randn(2, 3)).square().mean().backward()
    model[4].bias.grad[0] = math.nan
    with pytest.raises(ControlError, match=r"The gradients of 4\.bias are not finite; nothing was changed"):
        optimizer.step()


def test_what_is_not_a_model_is_refused() -> None:
    with pytest.raises(LayerError, match=r"`model` must be a torch\.nn\.Module, got list"):
        steer(list(net().parameters()))  # type: ignore[arg-type]


def test_muon_is_refused_on_weights_that_are_not_matrices() -> None:
    with pytest.raises(
        ControlError, match=r"Muon orthogonalizes weights of .*got 0\.weight \(3 dimensions\)\. .*plain="
    ):
        steer(convolutional(), "muon")
    assert steer(convolutional(), "muon", plain="0.weight").layers == ("2.weight",)
    optimizer = steer(net(), "muon")
    with pytest.raises(ControlError, match=r"Muon orthogonalizes weights of .*\(3 dimensions\)"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2, 2))]})
    assert len(optimizer.param_groups) == 3


def test_weights_of_one_dimension_never_reach_muon() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = steer(model, "muon")
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5, 5))]})
    rules = {(p.dim(), group["rule"]) for group in optimizer.param_groups for p in group["params"]}
    assert rules == {(2, "turn"), (2, "plain"), (1, "plain")}
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()  # AdamW moves vectors by its learning rate
    assert model[1].weight.detach().tolist() == pytest.approx([1 - presets.PRESETS["muon"].others_lr] * 4, rel=1e-5)


def test_a_schedule_free_optimizer_keeps_weights_of_its_own() -> None:
    class ScheduleFree(torch.optim.SGD):
        def train(self) -> None: ...
        def eval(self) -> None: ...

    with pytest.raises(ControlError, match="keeps weights of its own"):
        steer(net(), ScheduleFree)


@pytest.mark.parametrize(
    ("inner", "fine", "beyond", "most"),
    [("adamw", 0.09, 0.2, "0.1"), ("sgd", 0.4, 0.5, "0.45"), ("muon", 0.07, 0.1, "0.072")],
)
def test_a_rate_beyond_the_stable_range_is_warned_about(inner: str, fine: float, beyond: float, most: str) -> None:
    steer(net(), inner, rate=fine)  # warnings are errors here
    with pytest.warns(UserWarning, match=rf"beyond the stable range: .* Stay below {re.escape(most)};"):
        steer(net(), inner, rate=beyond)


def test_nothing_is_changed_by_a_refusal() -> None:
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ControlError):
        steer(model, LARS)
    assert all(map(torch.equal, before, model.parameters()))
    assert isinstance(steer(model), Optimizer)


def test_matrices_that_are_bare_parameters_turn_as_the_error_says() -> None:
    model = Bare()
    before = model.U.detach().clone()
    optimizer = Layca(torch.optim.AdamW(model.parameters(), lr=0.1), layers(model, include=["U", "V"]))
    train(model, optimizer, 1)
    assert optimizer.layers == ("U", "V")
    assert torch.cosine_similarity(before.flatten(), model.U.flatten(), 0).arccos().tan().item() == pytest.approx(
        0.1, 1e-3
    )


def test_a_state_of_muon_is_not_called_damaged_by_adamw() -> None:
    model, theirs = net(), net()
    optimizer, other = steer(model, "adamw"), steer(theirs, "muon")
    for one, its in ((model, optimizer), (theirs, other)):
        train(one, its, 1)
    before = snapshot(optimizer)
    with pytest.raises(ControlError, match=r"is that of another inner optimizer: it has no 'step' of parameter 0, "):
        optimizer.load_state_dict(other.state_dict())
    damaged = optimizer.state_dict()
    del damaged["state"][0]["step"]
    with pytest.raises(ControlError, match=r"The state is damaged: it has no 'step' of parameter 0, "):
        optimizer.load_state_dict(damaged)
    assert_same_state(before, snapshot(optimizer))


@pytest.mark.parametrize(
    ("saved", "loaded", "was"),
    [
        ({"norms": "held"}, {}, "held"),
        ({}, {"norms": "held"}, "learned"),
        ({"inner": "muonh"}, {"inner": "muon"}, "held"),
        ({"inner": "adamw"}, {"inner": "adamh"}, "learned"),
    ],
)
def test_learned_and_held_norms_are_not_exchanged(saved: Any, loaded: Any, was: str) -> None:
    model, theirs = net(), net()
    optimizer, other = steer(model, **loaded), steer(theirs, **saved)
    optimizer.load_state_dict(other.state_dict())  # no layer has stepped, so there is nothing to exchange
    for one, its in ((model, optimizer), (theirs, other)):
        train(one, its, 1)
    before = snapshot(optimizer)
    with pytest.raises(ControlError, match=rf"The norms of the state are {was}, .*`inner`, and norms='{was}'"):
        optimizer.load_state_dict(other.state_dict())
    assert_same_state(before, snapshot(optimizer))


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3, dtype=next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: steer(net(), Short),
            r"Short proposed was not finite, or too short to .*; try reads_weights=False\. C",
        ),
        (lambda: steer(net().half(), "adamw"), r"AdamW proposed was not finite\. Check .*keep weights in float32"),
        (lambda: Layca(Short(net().parameters())), r"turn: group0\.0 \(10 so far\), .*\. What Short proposed was"),
    ],
)
def test_layers_that_skip_most_of_the_first_steps_are_warned_about_once(make: Callable[[], Any], said: str) -> None:
    optimizer = make()
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)  # AdamW divides by ε, which is zero in float16
    for _ in range(9):
        optimizer.step()  # warnings are errors here
    with pytest.warns(UserWarning, match=said) as heard:
        optimizer.step()
    assert [one.filename for one in heard] == [__file__]
    for _ in range(70):
        optimizer.step()


def test_few_skipped_steps_and_layers_that_stay_are_not_warned_about() -> None:
    model = net()
    nn.init.zeros_(model[2].weight)
    optimizer = steer(model, "adamw", heads="turn")
    for t in range(40):
        model(torch.randn(2, 3)).square().mean().backward()
        model[4].weight.grad = None
        if t < 5:
            model[0].weight.grad[0] = math.nan
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.skipped() == {"0.weight": 5}


def test_the_host_looks_for_skipped_layers_once_and_never_in_a_captured_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(Layca, "skipped", lambda self: looked.append(1) or {})
    optimizer, captured = steer(net()), steer(net())
    for t in range(80):
        optimizer.step()
        with monkeypatch.context() as patch:
            patch.setattr(layca, "is_capturing", lambda t=t: t == 9)
            captured.step()
    assert len(looked) == 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_warns_as_the_original_would_and_the_state_has_no_more_keys(duplicate: Callable[[Any], Any]) -> None:
    model = net()
    optimizer = steer(model, Short)
    train(model, optimizer, 9)
    model, optimizer = duplicate((model, optimizer))
    with pytest.warns(UserWarning, match=r"skip steps, .* \(10 so far\)"):
        train(model, optimizer, 1)
    state = optimizer.state_dict()
    assert set(state) == {"state", "param_groups", "dtypes", "layers", "shapes", "multipliers"}
    assert set(state["state"][0]) == {"radius", "norm_moments"}
    again = steer(model, Short)
    again.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"skip steps, .* \(10 so far\)"):
        train(model, again, 10)
