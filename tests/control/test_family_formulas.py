"""Hyperball, relative updates, LARS and block-normalised steps equal their formulas, written out in float64."""

import pytest
import torch
from torch import nn

from gyroscope.control import block_normalized, hyperball, lars, relative_update
from oracles.control import distance

RHO = 0.05


def plain(ps):
    return torch.optim.SGD(ps, lr=RHO)


def decayed(ps):
    return torch.optim.SGD(ps, lr=RHO, weight_decay=2.0)


def adamw(ps):
    return torch.optim.AdamW(ps, lr=RHO, weight_decay=3.0)


def nadam(ps):
    return torch.optim.NAdam(ps, lr=RHO, weight_decay=3.0, decoupled_weight_decay=True)


def adafactor(ps):
    return torch.optim.Adafactor(ps, lr=RHO, weight_decay=3.0)


def hyperball_formula(w, s, w0):
    moved = w + RHO * w.norm() * s / s.norm()
    return w0.norm() * moved / moved.norm()


def relative_formula(w, s, w0):
    return w + RHO * w.norm() * s / s.norm()


def lars_formula(w, s, w0):
    moved = w + RHO * w.norm() * s / s.norm()
    most = w.norm() + 1e-4 * w0.norm()
    return moved * min(1.0, float(most / moved.norm()))


def block_formula(w, s, w0):
    return w + RHO * s / s.norm()


FAMILY = {
    hyperball: hyperball_formula,
    relative_update: relative_formula,
    lars: lars_formula,
    block_normalized: block_formula,
}
every_member = pytest.mark.parametrize("member", FAMILY, ids=lambda f: f.__name__)


@every_member
@pytest.mark.parametrize("make", [plain, decayed, adamw, nadam, adafactor], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_a_member_equals_its_formula_on_what_the_inner_optimizer_proposes(member, make, dtype, bound):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(7, 6).to(dtype))
    start = p.detach().double().clone()
    literal = nn.Parameter(start.clone())
    inner = make([literal])
    optimizer = member(make([p]))
    for _ in range(6):
        p.grad = torch.randn(7, 6).to(dtype)
        literal.grad = p.grad.double()
        w = literal.detach().clone()
        inner.step()
        literal.data = FAMILY[member](w, literal.detach() - w, start)
        optimizer.step()
        assert distance(p, literal) < bound


def test_decoupled_decay_counts_where_nothing_is_projected_out():
    """So the test above would notice its absence: it shortens the weights, by a lot."""
    norms = []
    for decay in (0.0, 3.0):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(7, 6))
        optimizer = relative_update(torch.optim.AdamW([p], lr=RHO, weight_decay=decay))
        for _ in range(5):
            p.grad = torch.randn(7, 6)
            optimizer.step()
        norms.append(float(p.detach().norm()))
    assert norms[1] < 0.9 * norms[0]


def test_lars_growth_is_limited_exactly_where_it_would_exceed_the_limit():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
    norm0 = float(p.detach().norm())
    optimizer = lars(torch.optim.SGD([p], lr=RHO))
    limited = free = 0
    for t in range(40):
        w = p.detach().clone()
        p.grad = torch.randn(8, 8, dtype=torch.float64) + (0.5 * w if t % 2 else 0)
        unlimited = w - RHO * w.norm() * p.grad / p.grad.norm()
        optimizer.step()
        most = float(w.norm()) + 1e-4 * norm0
        if float(unlimited.norm()) > most:
            limited += 1
            assert float(p.detach().norm()) == pytest.approx(most, rel=1e-14)
        else:
            free += 1
            assert distance(p, unlimited) < 1e-14
    assert limited > 5
    assert free > 5


def test_lars_without_a_limit_is_the_relative_update():
    results = []
    for member in (lambda o: lars(o, growth=None), relative_update):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(5, 4))
        optimizer = member(torch.optim.SGD([p], lr=RHO))
        for _ in range(5):
            p.grad = torch.randn(5, 4)
            optimizer.step()
        results.append(p.detach())
    assert torch.equal(*results)


@every_member
def test_a_member_leaves_the_other_parameters_to_the_inner_optimizer(member):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    bias = model.bias.detach().clone()
    optimizer = member(torch.optim.SGD(model.parameters(), lr=RHO), model)
    model(torch.randn(2, 4)).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.bias.detach(), bias - RHO * model.bias.grad, rtol=1e-6, atol=1e-7)


@every_member
def test_a_member_does_not_move_on_a_zero_displacement(member):
    p = nn.Parameter(torch.ones(3, 2))
    p.grad = torch.zeros(3, 2)
    member(torch.optim.SGD([p], lr=RHO)).step()
    assert torch.equal(p.detach(), torch.ones(3, 2))


@pytest.mark.parametrize("member", [hyperball, relative_update, lars, block_normalized], ids=lambda f: f.__name__)
def test_a_displacement_along_the_weights_is_one_where_nothing_is_projected(member):
    p = nn.Parameter(torch.full((2, 2), 2.0, dtype=torch.float64))
    p.grad = torch.ones(2, 2, dtype=torch.float64)
    member(torch.optim.SGD([p], lr=RHO)).step()
    expected = {hyperball: 2.0, relative_update: 2 * (1 - RHO), lars: 2 * (1 - RHO), block_normalized: 2 - RHO / 2}
    torch.testing.assert_close(p.detach(), torch.full((2, 2), expected[member], dtype=torch.float64))
