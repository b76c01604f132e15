"""Rows and blocks of a weight are layers of their own: each turns by arctan ρ and keeps its norm."""

import math

import pytest
import torch
from torch import nn

import gyroscope
from oracles.control import LiteralLayca, angle, distance

RHO = 0.07


def channels_last():
    return nn.Conv2d(3, 6, 3, bias=False).to(memory_format=torch.channels_last)


CASES = {
    "linear rows": (lambda: nn.Linear(7, 5, bias=False), "row", {"weight": (5, 0)}),
    "conv rows": (lambda: nn.Conv2d(3, 6, 3, bias=False), "row", {"weight": (6, 0)}),
    "channels-last conv rows": (channels_last, "row", {"weight": (6, 0)}),
    "transposed conv rows": (lambda: nn.ConvTranspose2d(3, 6, 3, bias=False), "row", {"weight": (6, 1)}),
    "embedding rows": (lambda: nn.Embedding(9, 4), "row", {"weight": (9, 0)}),
    "LSTM blocks": (
        lambda: nn.LSTM(5, 3, bias=False),
        "block",
        {"weight_ih_l0": (4, 0), "weight_hh_l0": (4, 0)},
    ),
    "attention blocks": (
        lambda: nn.MultiheadAttention(6, 2, bias=False),
        "block",
        {"in_proj_weight": (3, 0), "out_proj.weight": (1, 0)},
    ),
}
INNER = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=RHO),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=RHO, weight_decay=0.1),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=RHO),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("inner", INNER)
def test_every_part_turns_by_arctan_rho_and_keeps_its_own_norm(case, inner):
    torch.manual_seed(0)
    make, granularity, parts = CASES[case]
    model = make()
    params = dict(model.named_parameters())
    assert set(params) == set(parts)
    start = {name: p.detach().clone() for name, p in params.items()}
    layers = gyroscope.layers(model, granularity=granularity)
    optimizer = gyroscope.Layca(INNER[inner](list(params.values())), layers)
    for _ in range(3):
        before = {name: p.detach().clone() for name, p in params.items()}
        for p in params.values():
            p.grad = torch.randn_like(p)
        optimizer.step()
        for name, (n, dim) in parts.items():
            now = params[name].detach().chunk(n, dim)
            assert len(now) == n
            for w0, w, new in zip(start[name].chunk(n, dim), before[name].chunk(n, dim), now, strict=True):
                assert angle(w, new) == pytest.approx(math.atan(RHO), rel=1e-3)
                assert float(new.double().norm()) == pytest.approx(float(w0.double().norm()), rel=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("inner", INNER)
def test_parts_follow_the_literal_operations(case, inner):
    torch.manual_seed(0)
    make, granularity, parts = CASES[case]
    model = make().double()
    params = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    oracle = LiteralLayca(INNER[inner], params, segments=[parts[name] for name in names])
    optimizer = gyroscope.Layca(INNER[inner](params), gyroscope.layers(model, granularity=granularity))
    for _ in range(4):
        grads = [torch.randn_like(p) for p in params]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
        oracle.step(grads)
        for p, w in zip(params, oracle.params, strict=True):
            assert distance(p, w) < 1e-10


def test_a_row_without_gradient_stays_while_the_others_turn():
    torch.manual_seed(0)
    embedding = nn.Embedding(6, 4)
    before = embedding.weight.detach().clone()
    optimizer = gyroscope.Layca(
        torch.optim.SGD(embedding.parameters(), lr=RHO), gyroscope.layers(embedding, granularity="row")
    )
    (embedding(torch.tensor([1, 4])) * torch.randn(2, 4)).sum().backward()
    optimizer.step()
    moved = [not torch.equal(w, new) for w, new in zip(before, embedding.weight.detach(), strict=True)]
    assert moved == [False, True, False, False, True, False]


def test_multipliers_act_on_layers_in_forward_order_also_where_the_optimizer_holds_them_in_another():
    """The order is that of use, not of the optimizer's list; rates, radii and names must not be exchanged."""

    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 2, bias=False)
            self.middle = nn.Linear(4, 4, bias=False)
            self.first = nn.Linear(3, 4, bias=False)

        def forward(self, x):
            return self.last(self.middle(self.first(x)))

    for inner in INNER:
        torch.manual_seed(0)
        model = Backwards()
        x = torch.randn(8, 3)
        layers = gyroscope.layers(model, sample=x)
        assert [layer.name for layer in layers] == ["first.weight", "middle.weight", "last.weight"]
        optimizer = gyroscope.Layca(INNER[inner](list(model.parameters())), layers, multipliers=[1.0, 0.1, 0.01])
        norms = [float(layer.parameter.detach().double().norm()) for layer in layers]
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            before = [layer.parameter.detach().clone() for layer in layers]
            optimizer.step()
            turned = [math.tan(angle(w, layer.parameter)) for w, layer in zip(before, layers, strict=True)]
            assert turned == pytest.approx([RHO, 0.1 * RHO, 0.01 * RHO], rel=2e-3)
        optimizer.state_dict()
        radii = [float(optimizer.state[layer.parameter]["radius"]) for layer in layers]
        assert radii == pytest.approx(norms, rel=1e-6)
