"""What `steer` does to each parameter of a model, step by step, against literal versions in float64."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from contract_models import assert_same_state, snapshot, tangent
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import Optimizer

import gyroscope
from gyroscope import steer
from gyroscope.control import Steered
from gyroscope.control.presets import PRESETS
from gyroscope.errors import ControlError

RATE, OTHERS = 0.05, 0.004


class Tiny(nn.Module):
    """Embeddings, two blocks of one linear map, and a head that may be tied."""

    def __init__(self, tied: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words, self.places = nn.Embedding(7, 6), nn.Embedding(5, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places.weight[: x.shape[-1]]
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.head(self.norm(h))


def backward(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(7, (4, 6), generator=generator)
    model.zero_grad()
    F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()


def train(model: nn.Module, optimizer: Optimizer, seeds: Iterable[int]) -> None:
    for seed in seeds:
        backward(model, seed)
        optimizer.step()


def by_rule(optimizer: Steered, rule: str) -> list[Tensor]:
    return [p for group in optimizer.param_groups if group["rule"] == rule for p in group["params"]]


def names(optimizer: Steered, rule: str) -> list[str]:
    return [name for group in optimizer.param_groups if group["rule"] == rule for name in group["param_names"]]


MADE: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1.0, weight_decay=0.0, betas=(0.9, 0.95)),
    "sgd": lambda params: torch.optim.SGD(params, lr=1.0),
    "muon": lambda params: torch.optim.Muon(params, lr=1.0, weight_decay=0.0),
    "adamh": lambda params: torch.optim.AdamW(params, lr=1.0, weight_decay=0.0, betas=(0.9, 0.95)),
    "muonh": lambda params: torch.optim.Muon(params, lr=1.0, weight_decay=0.0),
}


class LearnedNorm:
    """Adam on ln‖w‖ literally, without its first step, before which there is no norm to go on from."""

    def __init__(self, w: Tensor) -> None:
        self.norm, self.m, self.v, self.t = w.detach().norm().item(), 0.0, 0.0, -1

    def step(self, w: Tensor, gradient: Tensor, rate: float) -> float:
        self.t += 1
        if self.t:
            d = (w * gradient).sum().item()
            self.m, self.v = 0.9 * self.m + 0.1 * d, 0.95 * self.v + 0.05 * d * d
            m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.95**self.t)
            self.norm *= math.exp(-rate * m / (math.sqrt(v) + 1e-4 * w.norm().item() * gradient.norm().item()))
        return self.norm


@pytest.mark.parametrize("norms", ["learned", "held"])
@pytest.mark.parametrize("inner", MADE)
def test_matrices_take_the_literal_step_and_all_else_that_of_adamw(inner: str, norms: Any) -> None:
    model = Tiny().double()
    optimizer = steer(model, inner, rate=RATE, others_lr=OTHERS, norms=norms, heads="plain")
    oracle = copy.deepcopy(model)
    weights = dict(oracle.named_parameters())
    turning = [weights[name] for name in names(optimizer, "turn")]
    assert names(optimizer, "turn") == ["blocks.0.weight", "blocks.1.weight"]
    rest = [weights[name] for name in names(optimizer, "plain")]
    rule = MADE[inner](turning)
    plain = torch.optim.AdamW(rest, lr=OTHERS, weight_decay=0.0, betas=(0.9, 0.95))
    radii, learned = [p.detach().norm() for p in turning], [LearnedNorm(p) for p in turning]
    for seed in range(4):
        backward(model, seed)
        backward(oracle, seed)
        optimizer.step()
        before = [p.detach().clone() for p in turning]
        rule.step()
        plain.step()
        with torch.no_grad():
            for p, w, radius, norm in zip(turning, before, radii, learned, strict=True):
                s = p - w
                assert p.grad is not None
                radius = norm.step(w, p.grad, RATE) if norms == "learned" else radius
                if PRESETS[inner].project:
                    s = s - (s * w).sum() / (w * w).sum() * w
                new = w + RATE * s * w.norm() / s.norm()
                p.copy_(new * radius / new.norm())
    for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-12), name


def test_rotation_angle_equals_arctan_rho() -> None:
    model = Tiny().double()
    optimizer = steer(model, rate=RATE)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, [0])
    for name in optimizer.layers:
        assert tangent(before[name], dict(model.named_parameters())[name]) == pytest.approx(RATE, rel=1e-9)


@pytest.mark.parametrize("inner", ["adamw", "sgd", "muon"])
def test_a_rate_that_is_a_tensor_is_read_in_every_step(inner: str) -> None:
    model, rate = Tiny().double(), torch.tensor(RATE, dtype=torch.float64)
    optimizer = steer(model, inner, rate=rate, others_lr=OTHERS)
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    for seed, value in enumerate((RATE, 2 * RATE)):
        rate.fill_(value)
        before = model.blocks[0].weight.detach().clone()
        train(model, optimizer, [seed])
        assert tangent(before, model.blocks[0].weight) == pytest.approx(value, rel=1e-6)
    assert "ρ = 0.1 (5.7°)" in repr(optimizer)
    assert "lr = 0.008" in repr(optimizer)


def test_an_optimizer_of_ones_own_is_made_over_the_groups_that_turn() -> None:
    model, other = Tiny(), Tiny()
    optimizer = steer(model, torch.optim.NAdam, rate=RATE, others_lr=OTHERS, inner_options={"betas": (0.8, 0.9)})
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (RATE, (0.8, 0.9), 0.0)
    literal = steer(other, lambda groups: torch.optim.NAdam(groups, betas=(0.8, 0.9)), rate=RATE, others_lr=OTHERS)
    train(model, optimizer, range(3))
    train(other, literal, range(3))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_weight_decay_of_an_optimizer_of_ones_own_is_taken_out() -> None:
    optimizer = steer(Tiny(), torch.optim.AdamW)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0] * len(optimizer.param_groups)


def test_the_defaults_are_those_of_the_preset() -> None:
    for name, preset in PRESETS.items():
        optimizer = steer(Tiny(), name)
        plain = next(group for group in optimizer.param_groups if group["rule"] == "plain")
        assert {group["lr"] for group in optimizer.param_groups} == {preset.rate}
        assert plain["lr"] * plain["relative_lr"] == pytest.approx(preset.others_lr)
        assert optimizer.law.project == preset.project


# Schedulers


def constant_gradients(model: nn.Module) -> None:
    """AdamW then steps by its learning rate exactly, up to ε."""
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)


def learning_rates(make: Callable[[Optimizer], Any], steps: int) -> list[tuple[float, float]]:
    """Return ρ and η at each step, as measured from what the step did."""
    model = Tiny().double()
    optimizer = steer(model, "sgd", rate=RATE, others_lr=OTHERS)
    schedule, measured = make(optimizer), []
    for _ in range(steps):
        w, b = model.blocks[0].weight.detach().clone(), model.blocks[0].bias.detach().clone()
        constant_gradients(model)
        optimizer.step()
        measured.append((tangent(w, model.blocks[0].weight), (b - model.blocks[0].bias).mean().item()))
        schedule.step()
    return measured


def wide(width: int, *, tied: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Embedding(7, width), nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 7))
    if tied:
        model[3].weight = model[0].weight
    return model


def plain_rates(optimizer: gyroscope.control.Steered) -> dict[str, float]:
    return {g["role"]: g["lr"] * g["relative_lr"] for g in optimizer.param_groups if g["rule"] == "plain"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("width", "expected"), [(8, 0.01), (128, 0.01), (256, 0.005), (1024, 0.00125)])
def test_the_default_others_lr_falls_with_the_inputs_of_the_head(width: int, expected: float, tied: bool) -> None:
    found = plain_rates(steer(wide(width, tied=tied)))
    assert set(found) == ({"tied head", "other"} if tied else {"embedding", "head", "other"})
    assert list(found.values()) == pytest.approx([expected] * len(found))
    turned = plain_rates(steer(wide(width, tied=tied), heads="turn"))
    assert list(turned.values()) == pytest.approx([expected] * len(turned))  # the network is as wide as before


@pytest.mark.parametrize(("width", "expected"), [(8, 0.028), (128, 0.028), (512, 0.028 / 4**0.75), (2048, 0.0035)])
def test_the_default_rate_over_adamw_falls_with_the_inputs_of_the_head(width: int, expected: float) -> None:
    for inner in ("adamw", torch.optim.NAdam):
        assert steer(wide(width), inner).param_groups[0]["lr"] == pytest.approx(expected)
    assert steer(wide(width), "adamw", rate=0.05).param_groups[0]["lr"] == 0.05
    rates = [steer(wide(width), inner).param_groups[0]["lr"] for inner in ("muon", "sgd", "adamh")]
    assert rates == [0.04, 3.0**-3, 0.018]


@pytest.mark.parametrize("width", [8, 2048])
def test_the_optimizer_of_a_preset_given_as_a_function_has_its_rates_and_any_other_those_of_adamw(width: int) -> None:
    def own(groups: Any) -> Optimizer:
        return torch.optim.SGD(groups, lr=1.0)

    alike: dict[Callable[..., Optimizer], str] = {torch.optim.SGD: "sgd", torch.optim.Muon: "muon", own: "adamw"}
    for make, name in alike.items():
        given, named = steer(wide(width), make), steer(wide(width), name)
        assert given.param_groups[0]["lr"] == named.param_groups[0]["lr"]
        assert plain_rates(given) == plain_rates(named)


def test_others_lr_by_role_leaves_other_roles_as_they_are() -> None:
    found = plain_rates(steer(wide(256), others_lr={"embedding": 0.1, "head": 0.002}))
    assert found == pytest.approx({"embedding": 0.1, "head": 0.002, "other": 0.005})
    for name in ("head", "tied head"):
        tied = plain_rates(steer(wide(256, tied=True), others_lr={name: 0.002}))
        assert tied == pytest.approx({"tied head": 0.002, "other": 0.005})
    assert list(plain_rates(steer(wide(256), others_lr=0.03)).values()) == pytest.approx([0.03] * 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4, eta_min=RATE / 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=RATE, total_steps=8, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, RATE / 5, RATE, step_size_up=3, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=4),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, 3, eta_min=RATE / 5),
            ],
            [2],
        ),
        lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=RATE / 5, anneal_epochs=3),
    ],
    ids=["cosine with eta_min", "one cycle", "cyclic", "lambda", "linear", "sequential", "averaging"],
)
def test_schedulers_with_floors_and_peaks_move_all_rates_in_proportion(make: Callable[[Optimizer], Any]) -> None:
    measured = learning_rates(make, 6)
    assert len({round(rho, 6) for rho, _ in measured}) > 2
    for rho, eta in measured:
        assert eta / rho == pytest.approx(OTHERS / RATE, rel=1e-6)


def test_a_plateau_lowers_all_rates_to_its_floor() -> None:
    class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self) -> None:  # type: ignore[override]
            super().step(1.0)

    measured = learning_rates(lambda o: Plateau(o, factor=0.5, patience=0, min_lr=RATE / 3), 4)
    assert [rho for rho, _ in measured] == pytest.approx([RATE, RATE, RATE / 2, RATE / 3], rel=1e-6)
    assert [eta for _, eta in measured] == pytest.approx([OTHERS, OTHERS, OTHERS / 2, OTHERS / 3], rel=1e-6)


def test_the_floor_of_a_cosine_is_reached_by_matrices_and_by_biases() -> None:
    measured = learning_rates(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4, eta_min=RATE / 10), 5)
    assert measured[-1] == (pytest.approx(RATE / 10, rel=1e-6), pytest.approx(OTHERS / 10, rel=1e-6))


def test_a_loop_may_write_one_rate_into_all_groups() -> None:
    model = Tiny().double()
    optimizer = steer(model, rate=RATE, others_lr=OTHERS)
    for group in optimizer.param_groups:
        group["lr"] = RATE / 4
    w, b = model.blocks[0].weight.detach().clone(), model.blocks[0].bias.detach().clone()
    constant_gradients(model)
    optimizer.step()
    assert tangent(w, model.blocks[0].weight) == pytest.approx(RATE / 4, rel=1e-6)
    assert (b - model.blocks[0].bias).mean().item() == pytest.approx(OTHERS / 4, rel=1e-6)


# The contract with torch.optim


@pytest.mark.parametrize("inner", ["adamw", "sgd", "muon", torch.optim.NAdam])
def test_a_resumed_training_is_the_same_training(inner: Any) -> None:
    model = Tiny(tied=True)
    optimizer = steer(model, inner, rate=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    train(model, optimizer, range(3))
    schedule.step()
    kept = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], kept)
    train(model, optimizer, range(3, 6))

    kept.seek(0)
    weights, state = torch.load(kept)
    resumed = Tiny(tied=True, seed=1)
    resumed.load_state_dict(weights)
    again = steer(resumed, inner, rate=RATE)
    again.load_state_dict(state)
    train(resumed, again, range(3, 6))
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))
    assert_same_state(snapshot(optimizer), snapshot(again))


@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_a_checkpoint_continues_in_a_model_of_another_dtype(inner: str) -> None:
    model, other = Tiny(), Tiny(seed=1).double()
    optimizer, again = steer(model, inner, rate=RATE), steer(other, inner, rate=RATE)
    train(model, optimizer, range(3))
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    norms = [w.detach().norm() for w in by_rule(again, "turn")]
    train(model, optimizer, [3])
    train(other, again, [3])
    assert all(p.dtype == torch.float64 for p in other.parameters())
    for norm, w in zip(norms, by_rule(again, "turn"), strict=True):
        assert w.norm().item() != norm.item()  # still learned
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        # Muon computes in bfloat16, whatever the dtype.
        assert torch.allclose(p.double(), q, rtol=0, atol=1e-5 if inner == "adamw" else 1e-3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_copies_continue_as_the_original(inner: str, copied: Callable[[Any], Any]) -> None:
    model = Tiny()
    optimizer = steer(model, inner)
    train(model, optimizer, range(2))
    twin, its = copied((model, optimizer))
    train(model, optimizer, range(2, 5))
    train(twin, its, range(2, 5))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert by_rule(its, "turn")[0] is dict(twin.named_parameters())[its.layers[0]]


def test_step_hooks_are_called_once() -> None:
    model = Tiny()
    optimizer = steer(model)
    heard: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    train(model, optimizer, range(2))
    assert heard == ["before", "after"] * 2


def test_a_closure_gives_the_loss_and_the_same_step() -> None:
    model, other = Tiny(), Tiny()
    optimizer, twin = steer(model), steer(other)

    def closure() -> Tensor:
        backward(other)
        return torch.tensor(3.0)

    train(model, optimizer, [0])
    assert twin.step(closure) == 3.0
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_step_that_the_scaler_skips_changes_nothing_and_others_are_unscaled() -> None:
    model, other = Tiny(), Tiny()
    optimizer, twin = steer(model), steer(other, others_options={"fused": True})
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    train(model, optimizer, [0])
    backward(other)
    for p in other.parameters():
        p.grad *= 1024.0
    scaler.scale(torch.ones(()))
    scaler.step(twin)
    scaler.update()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)
    backward(other, 1)
    other.head.weight.grad[0, 0] = math.inf
    before = [p.detach().clone() for p in other.parameters()]
    scaler.step(twin)
    assert all(map(torch.equal, before, other.parameters()))


def test_a_compiled_step_is_the_step() -> None:
    model, other = Tiny(), Tiny()
    optimizer, twin = steer(model), steer(other)
    backward(model)
    backward(other)
    optimizer.step()
    torch.compile(twin.step, backend="eager")()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_compiled_model_is_steered_under_its_own_names() -> None:
    compiled = torch.compile(Tiny(), backend="eager")
    shown = [group["param_names"] for group in steer(compiled).param_groups]
    assert shown == [group["param_names"] for group in steer(Tiny()).param_groups]


def test_added_parameters_turn_or_are_stepped_plainly() -> None:
    model, more = Tiny().double(), nn.Linear(3, 2).double()
    optimizer = steer(model, rate=RATE, others_lr=OTHERS)
    optimizer.add_param_group({"params": more.parameters()})
    w, b = more.weight.detach().clone(), more.bias.detach().clone()
    constant_gradients(more)
    optimizer.step()
    assert tangent(w, more.weight) == pytest.approx(RATE, rel=1e-9)
    assert (b - more.bias).mean().item() == pytest.approx(OTHERS, rel=1e-6)
    with pytest.raises(ControlError, match="another group has already"):
        optimizer.add_param_group({"params": [more.bias]})


def test_frozen_embeddings_stay_and_their_gradients_are_reset() -> None:
    model = Tiny()
    optimizer = steer(model, embeddings="frozen")
    before = model.words.weight.detach().clone()
    train(model, optimizer, range(2))
    assert torch.equal(before, model.words.weight)
    optimizer.zero_grad()
    assert model.words.weight.grad is None
    assert names(optimizer, "frozen") == ["words.weight", "places.weight"]


def test_a_state_of_other_rules_is_refused_before_anything_changes() -> None:
    model = Tiny()
    optimizer, other = steer(model), steer(Tiny(), heads="turn", embeddings="turn")
    train(model, optimizer, [0])
    before = snapshot(optimizer)
    with pytest.raises(ControlError, match="with the same `inner`, `embeddings`, `heads` and `plain`"):
        optimizer.load_state_dict(other.state_dict())
    assert_same_state(before, snapshot(optimizer))


@pytest.mark.parametrize("inner", ["SGD", "Muon"])
def test_a_state_of_another_inner_optimizer_is_refused_before_anything_changes(inner: str) -> None:
    model = Tiny()
    optimizer, other = steer(model, inner.lower()), steer(Tiny(), "adamw")
    train(model, optimizer, [0])
    before = snapshot(optimizer)
    with pytest.raises(
        ControlError, match=rf"could not be loaded into the {inner} \(.*lack '\w+'\); nothing was changed"
    ):
        optimizer.load_state_dict(other.state_dict())
    assert_same_state(before, snapshot(optimizer))


def test_a_run_records_the_learning_rates_of_what_is_stepped_plainly(tmp_path: Any) -> None:
    model = Tiny()
    optimizer = steer(model, rate=RATE, others_lr=OTHERS)
    with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, range(3))
    run = gyroscope.load(monitor.path)
    lr = dict(zip(run.layers, run.series("lr")[-1], strict=True))
    assert lr["blocks.0.weight"] == pytest.approx(RATE)
    assert lr["head.weight"] == pytest.approx(OTHERS)
    assert run.meta["optimizers"][0]["class"] == "Steered"


def test_print_says_which_parameters_which_rule_and_which_rate() -> None:
    optimizer = steer(Tiny(tied=True), "sgd", rate=0.05, others_lr=0.004, embeddings="frozen")
    assert str(optimizer).splitlines() == [
        "Steered: Layca over SGD turns 2 matrices; AdamW steps 5 other parameters; 1 stays as it is.",
        "Each step turns a layer by arctan ρ; its norm is learned.",
        "parameters           shape  role       rule    rate",
        "blocks.*.weight (2)  6 × 6  matrix     turn    ρ = 0.05 (2.9°)",
        "words.weight         7 × 6  tied head  plain   lr = 0.004",
        "blocks.*.bias (2)    6      other      plain   lr = 0.004",
        "norm.weight          6      other      plain   lr = 0.004",
        "norm.bias            6      other      plain   lr = 0.004",
        "places.weight        5 × 6  embedding  frozen  –",
    ]


def test_a_long_table_shows_its_first_and_last_rows() -> None:
    shown = str(steer(nn.Sequential(*[nn.Linear(i + 2, i + 3) for i in range(40)]))).splitlines()
    assert len(shown) == 3 + 30 + 1
    assert shown[23] == "… 50 more …"


def test_notebooks_show_the_same_table() -> None:
    html = steer(Tiny())._repr_html_()
    assert html.startswith("<p><b>Steered over Muon</b></p><p>Layca over Muon turns 2 matrices;")
    assert re.search(r"<td style=\"text-align:left\">head.weight</td><td>7 × 6</td><td>head</td><td>plain</td>", html)
