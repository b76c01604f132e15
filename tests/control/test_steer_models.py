"""Which rule `steer` gives to the parameters of many kinds of models; weights that begin at zero; learned norms."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from contract_models import assert_same_state, snapshot, tangent
from torch import Tensor, nn
from torch.optim import Optimizer

from gyroscope import steer
from gyroscope.control import Steered
from gyroscope.control.joint import main
from gyroscope.control.routing import routes
from gyroscope.errors import LayerError


def rules(optimizer: Steered) -> dict[str, tuple[str, str]]:
    return {name: (group["role"], group["rule"]) for group in optimizer.param_groups for name in group["param_names"]}


def step(model: nn.Module, optimizer: Optimizer, *inputs: Tensor) -> None:
    optimizer.zero_grad()
    out = model(*inputs)
    (out[0] if isinstance(out, tuple) else out).square().mean().backward()
    optimizer.step()


def angles(before: dict[str, Tensor], model: nn.Module) -> dict[str, float]:
    return {name: tangent(before[name], p) for name, p in model.named_parameters() if p.dim() > 1}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_convolutional_network_turns_up_to_its_head() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).double()
    optimizer = steer(net, rate=0.05)
    assert rules(optimizer) == {
        "0.weight": ("matrix", "turn"),
        "4.weight": ("head", "plain"),
        "0.bias": ("other", "plain"),
        "1.weight": ("other", "plain"),
        "1.bias": ("other", "plain"),
        "4.bias": ("other", "plain"),
    }
    before = weights(net)
    step(net, optimizer, torch.randn(5, 1, 4, 4, dtype=torch.float64))
    assert angles(before, net)["0.weight"] == pytest.approx(0.05, rel=1e-9)


def test_a_head_that_is_registered_first_is_named_by_plain() -> None:
    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 4), nn.Linear(4, 4)

    named = rules(steer(HeadFirst(), heads="turn", plain="out.weight"))
    assert {name: rule for name, (_, rule) in named.items() if "weight" in name} == {
        "a.weight": "turn",
        "b.weight": "turn",
        "out.weight": "plain",
    }


def test_matrices_that_are_bare_parameters_are_stepped_plainly() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    net.U, net.w1 = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    named = rules(steer(net, heads="turn"))
    assert named["U"] == ("other", "plain")
    assert named["w1"][1] == "turn"


def test_only_the_direction_is_used_of_an_inner_that_normalizes_under_another_name() -> None:
    class Scaled(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad * p.norm() / p.grad.norm())

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    twin, x = copy.deepcopy(net), torch.randn(5, 4, dtype=torch.float64)
    step(net, steer(net, Scaled, rate=0.05), x)
    step(twin, steer(twin, "sgd", rate=0.05), x)
    torch.testing.assert_close(net[0].weight, twin[0].weight)


def stemmed(*blocks: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 4, stride=4), nn.Flatten(), *blocks, nn.Linear(4, 3))


CHOICES = {
    "convolutions and a head": (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3)),
        torch.optim.SGD,
        3.0**-3,
    ),
    "a convolution that embeds patches": (stemmed(nn.Linear(4, 96), nn.Linear(96, 4)), torch.optim.Muon, 0.04),
    "a convolution with half of the weights": (stemmed(nn.Linear(4, 4), nn.Linear(4, 4)), torch.optim.AdamW, 0.028),
    "as many convolutions as others": (stemmed(), torch.optim.AdamW, 0.028),
    "frozen convolutions": (
        nn.Sequential(*(nn.Conv2d(4, 4, 1).requires_grad_(False) for _ in range(3)), nn.Linear(4, 4), nn.Linear(4, 3)),
        torch.optim.Muon,
        0.04,
    ),
    "linear layers": (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), torch.optim.Muon, 0.04),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_preset_is_that_of_sgd_for_convolutions_of_muon_for_matrices_and_of_adamw_for_a_mixture(name: str) -> None:
    net, kind, rate = CHOICES[name]
    optimizer = steer(net, heads="turn")
    assert type(main(optimizer.inner)) is kind
    assert optimizer.param_groups[0]["lr"] == rate
    assert type(main(steer(net, "sgd", heads="turn").inner)) is torch.optim.SGD


def test_by_default_what_muon_cannot_step_is_stepped_plainly_if_it_is_a_tenth_of_the_weights() -> None:
    # A kernel of 64 weights before matrices of n × 4, 4 × n and 4 × 4: a tenth is reached at 8 n + 16 = 576.
    for n, role in ((70, ("matrix", "plain")), (69, ("matrix", "turn"))):
        net = stemmed(nn.Linear(4, n, bias=False), nn.Linear(n, 4, bias=False), nn.Linear(4, 4, bias=False))
        optimizer = steer(net, rate=0.05)
        assert rules(optimizer)["0.weight"] == role
        assert rules(optimizer)["2.weight"] == ("matrix", "turn")
        before = weights(net)
        step(net, optimizer, torch.randn(5, 1, 4, 4))
        assert angles(before, net)["2.weight"] == pytest.approx(0.05, rel=1e-4)
    assert rules(steer(net, "adamw"))["0.weight"] == ("matrix", "turn")


def test_a_head_that_is_to_turn_turns_though_muon_cannot_step_it() -> None:
    net = nn.Sequential(nn.Linear(4, 96), nn.Linear(96, 4), nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 3, 1))
    for heads, kind in (("plain", torch.optim.Muon), ("turn", torch.optim.AdamW)):
        optimizer = steer(net, heads=heads)
        assert rules(optimizer)["3.weight"] == ("head", heads)
        assert type(main(optimizer.inner)) is kind


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.out = nn.Embedding(9, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 9)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.lstm(self.words(x))[0])
        return out


def test_a_recurrent_network_turns_its_input_and_hidden_matrices() -> None:
    net = Recurrent().double()
    optimizer = steer(net, rate=0.05, embeddings="turn")
    found = rules(optimizer)
    assert found["words.weight"] == ("embedding", "turn")
    assert found["lstm.weight_ih_l0"] == found["lstm.weight_hh_l0"] == ("matrix", "turn")
    assert found["out.weight"] == ("head", "plain")
    before = weights(net)
    step(net, optimizer, torch.randint(9, (2, 6)))
    turned = {name: angle for name, angle in angles(before, net).items() if name != "out.weight"}
    assert all(angle == pytest.approx(0.05, rel=1e-9) for angle in turned.values())


class Mixture(nn.Module):
    """Experts in one tensor, chosen by a gate; an ordinary gate of the same name has no experts next to it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.experts_weight = nn.Parameter(torch.randn(3, 4, 4) * torch.tensor([1.0, 10.0, 100.0])[:, None, None])
        self.glu = nn.ModuleDict({"gate": nn.Linear(4, 4, bias=False)})
        self.router = nn.ModuleDict({"classifier": nn.Linear(4, 3, bias=False)})
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (self.gate(x) + self.router["classifier"](x)).softmax(-1)
        h = torch.einsum("ne,eij,nj->ni", chosen, self.experts_weight, x)
        return self.head(h * torch.sigmoid(self.glu["gate"](x)))


def test_each_expert_turns_on_its_own_and_routers_are_stepped_plainly() -> None:
    net = Mixture().double()
    optimizer = steer(net, rate=0.05)
    assert rules(optimizer) == {
        "experts_weight": ("matrix", "turn"),
        "glu.gate.weight": ("matrix", "turn"),
        "gate.weight": ("router", "plain"),
        "router.classifier.weight": ("router", "plain"),
        "head.weight": ("head", "plain"),
    }
    before = net.experts_weight.detach().clone()
    step(net, optimizer, torch.randn(8, 4, dtype=torch.float64))
    for expert in range(3):
        assert tangent(before[expert], net.experts_weight[expert]) == pytest.approx(0.05, rel=1e-9)
        assert net.experts_weight[expert].norm().item() == pytest.approx(before[expert].norm().item(), rel=1e-12)


def test_the_table_says_into_how_many_parts_a_layer_is_split() -> None:
    shown = {line.split()[0]: line for line in str(steer(Mixture())).splitlines()}
    assert "turn, 3 parts" in shown["experts_weight"]
    assert "parts" not in shown["glu.gate.weight"]
    assert "turn, 4 parts" in str(steer(Mixture(), granularity="row"))


def test_the_whole_of_a_mixture_turns_by_granularity_tensor() -> None:
    net = Mixture().double()
    before = net.experts_weight.detach().clone()
    step(net, steer(net, rate=0.05, granularity="tensor"), torch.randn(8, 4, dtype=torch.float64))
    assert tangent(before, net.experts_weight) == pytest.approx(0.05, rel=1e-9)


def stack(tied: bool) -> nn.Module:
    net = nn.ModuleDict({"words": nn.Embedding(9, 4), "body": nn.Linear(4, 4), "logits": nn.Linear(4, 9, bias=False)})
    if tied:
        net["logits"].weight = net["words"].weight
    return net


@pytest.mark.parametrize("heads", ["turn", "plain", "frozen"])
def test_a_tied_head_is_one_parameter_and_follows_the_rule_of_heads(heads: Any) -> None:
    opposite = "plain" if heads == "turn" else "turn"
    found = rules(steer(stack(tied=True), heads=heads, embeddings=opposite))
    assert found == {
        "words.weight": ("tied head", heads),
        "body.weight": ("matrix", "turn"),
        "body.bias": ("other", "plain"),
    }
    assert rules(steer(stack(tied=False), heads=heads, embeddings=opposite))["words.weight"] == ("embedding", opposite)


def test_transformers_say_which_module_is_the_head() -> None:
    net = stack(tied=False)
    net.get_output_embeddings = lambda: net["body"]
    found = rules(steer(net))
    assert found["body.weight"] == ("head", "plain")
    assert found["logits.weight"] == ("matrix", "turn")


def test_a_stack_of_equal_blocks_has_no_head() -> None:
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    found = rules(steer(nn.TransformerEncoder(block, 2, enable_nested_tensor=False)))
    assert {role for role, _ in found.values()} == {"matrix", "other"}


class Listed(nn.Module):
    """Linear maps in a list, and others in a dict."""

    def __init__(self, maps: list[nn.Linear], tasks: dict[str, nn.Linear]) -> None:
        super().__init__()
        self.maps = nn.ModuleList(maps)
        if tasks:
            self.tasks = nn.ModuleDict(tasks)


@pytest.mark.parametrize(
    ("net", "heads"),
    [
        (Listed([nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)], {}), {0, 1, 2}),  # cannot be a chain
        (Listed([nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 2)], {}), {2}),
        (Listed([nn.Linear(6, 4), nn.Linear(10, 4), nn.Linear(4, 2)], {}), {2}),  # with a connection past the first
        (Listed([nn.Linear(4, 4), nn.Linear(4, 4)], {}), set()),  # equal blocks
        (Listed([nn.Linear(6, 4), nn.Linear(4, 4)], {"mask": nn.Linear(4, 2), "box": nn.Linear(4, 3)}), {2, 3}),
        (Listed([nn.Linear(6, 4), nn.Linear(4, 4)], {"body": nn.Linear(4, 4), "logits": nn.Linear(4, 3)}), {3}),
    ],
    ids=["heads in a list", "a chain", "a chain with a skip", "equal blocks", "heads in a dict", "a chain in a dict"],
)
def test_all_heads_of_a_list_are_found(net: nn.Module, heads: set[int]) -> None:
    found = [route.role for route in routes(net, embeddings="plain", heads="plain") if route.layer is not None]
    assert {i for i, role in enumerate(found) if role == "head"} == heads


def test_a_model_may_have_no_output_embeddings() -> None:
    class Encoder(nn.Sequential):
        def get_output_embeddings(self) -> None:
            raise NotImplementedError

    assert rules(steer(Encoder(nn.Linear(3, 4), nn.Linear(4, 2))))["1.weight"] == ("head", "plain")


def test_layers_can_be_named_that_are_stepped_plainly() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    assert rules(steer(net, plain="0.*"))["0.weight"] == ("matrix", "plain")
    with pytest.raises(LayerError, match=r"The pattern 'encoder\.\*' matches no layer"):
        steer(net, plain="encoder.*")


# Low-rank adapters, and other weights that begin at zero


class Adapted(nn.Module):
    """W x + 2 B A x, with W frozen and B = 0, as the `peft` library builds it."""

    def __init__(self, n: int = 12, rank: int = 3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base_layer = nn.Linear(n, n).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(n, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, n, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))
        return out


A, B = "lora_A.default.weight", "lora_B.default.weight"


def test_frozen_bases_are_left_out_and_adapters_turn() -> None:
    net = Adapted().double()
    optimizer = steer(net, rate=0.05)
    assert rules(optimizer) == {A: ("matrix", "turn"), B: ("matrix", "turn")}


def noise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p) if p.requires_grad else None


@pytest.mark.parametrize("inner", ["adamw", "sgd", "muon"])
def test_weights_of_zero_take_one_plain_step_and_turn_from_then_on(inner: str) -> None:
    net = Adapted().double()
    optimizer = steer(net, inner, rate=0.05, others_lr=0.004, norms="held")
    b = net.lora_B["default"].weight
    noise(net, 0)
    optimizer.step()
    assert b.norm().item() == pytest.approx(0.004 * math.sqrt(b.numel()), rel=1e-9)
    for seed in (1, 2):
        before = weights(net)
        noise(net, seed)
        optimizer.step()
        assert angles(before, net)[B] == pytest.approx(0.05, rel=1e-9)
        assert b.norm().item() == pytest.approx(before[B].norm().item(), rel=1e-9)


def test_weights_of_zero_without_a_gradient_stay_zero() -> None:
    net = Adapted().double()
    optimizer = steer(net, rate=0.05)
    for _ in range(3):
        noise(net, 0)
        net.lora_B["default"].weight.grad = torch.zeros(12, 3, dtype=torch.float64)
        optimizer.step()
    assert not net.lora_B["default"].weight.any()
    noise(net, 1)
    optimizer.step()
    assert net.lora_B["default"].weight.any()


def test_adapters_learn_a_map_of_low_rank_and_its_size() -> None:
    torch.manual_seed(3)
    net = Adapted()
    x, shift = torch.randn(64, 12), torch.randn(12, 3) @ torch.randn(3, 12)
    with torch.no_grad():
        y = net.base_layer(x) + x @ shift
    optimizer = steer(net, rate=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert losses[-1] < 0.01 * losses[0]


def test_a_checkpoint_of_adapters_continues_before_and_after_they_leave_zero() -> None:
    for taken in (0, 1, 4):
        net = Adapted()
        optimizer = steer(net)
        for seed in range(taken):
            noise(net, seed)
            optimizer.step()
        resumed = Adapted(seed=9)
        resumed.load_state_dict(copy.deepcopy(net.state_dict()))
        again = steer(resumed)
        again.load_state_dict(snapshot(optimizer))
        for seed in range(taken, taken + 3):
            for model, one in ((net, optimizer), (resumed, again)):
                noise(model, seed)
                one.step()
        assert all(map(torch.equal, net.parameters(), resumed.parameters()))
        assert_same_state(snapshot(optimizer), snapshot(again))


def test_an_expert_of_zeros_begins_alone() -> None:
    net = Mixture().double()
    with torch.no_grad():
        net.experts_weight[1] = 0
    optimizer = steer(net, rate=0.05, others_lr=0.004)
    before = net.experts_weight.detach().clone()
    noise(net, 0)
    optimizer.step()
    assert tangent(before[0], net.experts_weight[0]) == pytest.approx(0.05, rel=1e-9)
    assert net.experts_weight[1].norm().item() == pytest.approx(0.004 * 4, rel=1e-9)


# Learned norms


def test_a_norm_that_is_too_small_is_learned() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    target = torch.linalg.qr(torch.randn(8, 8))[0] * 3

    def loss_after(norms: Any) -> float:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(8, 8, bias=False))
        nn.init.normal_(net[0].weight, std=0.01)
        optimizer = steer(net, "sgd", rate=0.1, heads="turn", norms=norms)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        for _ in range(200):
            optimizer.zero_grad()
            loss = (net(x) - x @ target.T).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
        return loss.item()

    assert loss_after("learned") < 0.01
    assert loss_after("held") > 8.0


def test_the_norm_of_a_scale_invariant_layer_stays() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, eps=1e-12), nn.ReLU(), nn.Linear(8, 3))
    optimizer = steer(net, rate=0.05)
    before = net[0].weight.detach().norm().item()
    for _ in range(100):
        step(net, optimizer, torch.randn(32, 6))
    assert net[0].weight.detach().norm().item() == pytest.approx(before, rel=0.02)


def test_a_learned_norm_changes_by_no_more_than_the_rate_allows() -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()
    optimizer = steer(net, rate=0.05)
    for seed in range(10):
        before = net[0].weight.detach().norm().item()
        noise(net, seed)
        optimizer.step()
        # |m̂|/√v̂ of Adam is at most √(Σ c²/b), with c and b the weights in its two means: 1.17 with these.
        assert abs(math.log(net[0].weight.detach().norm().item() / before)) < 1.17 * 0.05
