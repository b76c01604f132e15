"""Layca over any optimizer equals the literal procedure: let a float64 copy step, and operate on what it did."""

import pytest
import torch
from torch.optim import Optimizer

import gyroscope
from gyroscope.errors import ControlError
from oracles.control import LiteralAMom, LiteralLayca, distance

pytestmark = pytest.mark.usefixtures("cpu_backend")

optim = torch.optim


class ReadsWeights(Optimizer):
    """A rule that depends on the weights: decay by their squares, steps by their norm."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * (p.grad * p.norm() / p.grad.norm() + 0.3 * p.abs() * p)


class KeepsGlobalState(Optimizer):
    """A rule whose step depends on all parameters of all groups together, and on how often it was called."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.calls = 0
        self.norm = 0.0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(float(p.grad.double().square().sum()) for p in every) ** 0.5
        self.norm = 0.5 * self.norm + 0.5 * total
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    old = self.state[p].get("last", torch.zeros_like(p))
                    self.state[p]["last"] = p.grad.clone()
                    p -= group["lr"] * (p.grad / self.norm + old / self.calls)


LR = 0.05
CASES = {
    "SGD": (optim.SGD, {}),
    "SGD, weight decay": (optim.SGD, {"weight_decay": 0.3}),
    "SGD, maximize": (optim.SGD, {"maximize": True, "weight_decay": 0.3}),
    "SGD, momentum": (optim.SGD, {"momentum": 0.9}),
    "SGD, Nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD, dampening": (optim.SGD, {"momentum": 0.8, "dampening": 0.4}),
    "SGD, momentum, maximize, decay": (optim.SGD, {"momentum": 0.9, "maximize": True, "weight_decay": 0.3}),
    "Adam": (optim.Adam, {}),
    "Adam, amsgrad": (optim.Adam, {"amsgrad": True}),
    "Adam, weight decay": (optim.Adam, {"weight_decay": 0.3}),
    "Adam, maximize": (optim.Adam, {"maximize": True, "weight_decay": 0.3}),
    "Adam, decoupled": (optim.Adam, {"weight_decay": 0.3, "decoupled_weight_decay": True}),
    "AdamW": (optim.AdamW, {"weight_decay": 0.3}),
    "AdamW, amsgrad": (optim.AdamW, {"weight_decay": 0.3, "amsgrad": True}),
    "NAdam": (optim.NAdam, {"weight_decay": 0.1}),
    "NAdam, maximize": (optim.NAdam, {"maximize": True, "weight_decay": 0.1, "momentum_decay": 0.3}),
    "NAdam, decoupled": (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (optim.RAdam, {"weight_decay": 0.1}),
    "RAdam, maximize": (optim.RAdam, {"maximize": True, "weight_decay": 0.1}),
    "RAdam, decoupled": (optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RMSprop": (optim.RMSprop, {"weight_decay": 0.1}),
    "RMSprop, centered": (optim.RMSprop, {"centered": True}),
    "RMSprop, momentum": (optim.RMSprop, {"momentum": 0.9}),
    "Adagrad": (optim.Adagrad, {"weight_decay": 0.1}),
    "Adagrad, lr decay": (optim.Adagrad, {"lr_decay": 0.5}),
    "Adagrad, initial value": (optim.Adagrad, {"initial_accumulator_value": 0.5, "eps": 1e-2}),
    "Adadelta": (optim.Adadelta, {"weight_decay": 0.1}),
    "Adamax": (optim.Adamax, {"weight_decay": 0.1}),
    "Adamax, maximize": (optim.Adamax, {"maximize": True, "weight_decay": 0.1, "eps": 0.1}),
    "Rprop": (optim.Rprop, {}),
    "ASGD": (optim.ASGD, {"lambd": 0.1, "t0": 1, "weight_decay": 0.1}),
    "Adafactor": (optim.Adafactor, {"weight_decay": 0.1}),
    "SGD_AMom": (gyroscope.SGD_AMom, {"weight_decay": 0.1}),
    "SGD_AMom, maximize": (gyroscope.SGD_AMom, {"momentum": 0.5, "maximize": True}),
    "reads weights": (ReadsWeights, {}),
    "keeps global state": (KeepsGlobalState, {}),
}
WAYS = [
    (name, foreach)
    for name, (cls, _) in CASES.items()
    for foreach in ((None, False, True) if cls.__module__.startswith("torch") and name != "Adafactor" else (None,))
]


def parameters(dtype, shapes=((6, 5), (5,), (4, 3, 2, 2), (3, 7))):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def gradients(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]


def run(make, params, make_literal=None, steps=6, **options):
    """Both side by side; returns the wrapped optimizer and the literal one after every step's comparison data."""
    literal = LiteralLayca(make_literal or make, params)
    optimizer = gyroscope.Layca(make(params), **options)
    worst = 0.0
    for t in range(steps):
        grads = gradients(params, t)
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
        literal.step(grads)
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True)), "a gradient was changed"
        worst = max(worst, *(distance(p, w) for p, w in zip(params, literal.params, strict=True)))
    return optimizer, literal, worst


def assert_same_state(mine, theirs, params, copies, tolerance):
    compared = 0
    for p, q in zip(params, copies, strict=True):
        own = {k: v for k, v in mine.state[p].items() if k != "radius"}
        assert set(own) == set(theirs.state[q])
        for key, value in own.items():
            if isinstance(value, torch.Tensor):
                other = theirs.state[q][key].double()
                assert float((value.double() - other).norm()) <= tolerance * (float(other.norm()) + 1e-3), key
            elif isinstance(value, float | int):
                assert value == pytest.approx(theirs.state[q][key])
            compared += 1
    return compared


@pytest.mark.parametrize(("name", "foreach"), WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_layca_over_an_optimizer_equals_the_literal_procedure(name, foreach, dtype):
    cls, options = CASES[name]
    if foreach is not None:
        options = {**options, "foreach": foreach}
    params = parameters(dtype)
    literal_cls = LiteralAMom if cls is gyroscope.SGD_AMom else cls
    optimizer, literal, worst = run(
        lambda ps: cls(ps, lr=LR, **options), params, lambda ps: literal_cls(ps, lr=LR, **options)
    )
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert worst < tolerance
    compared = assert_same_state(optimizer, literal.inner, params, literal.params, tolerance)
    assert compared or name in ("SGD", "SGD, weight decay", "SGD, maximize", "reads weights")


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_layca_over_muon_equals_the_literal_procedure(decay):
    params = parameters(torch.float64, [(6, 5), (3, 8)])
    # The two proposals have the same momentum to the last bit but one, and Muon then works in bfloat16.
    _, _, worst = run(lambda ps: optim.Muon(ps, lr=LR, weight_decay=decay), params)
    assert worst < 1e-10


@pytest.mark.parametrize("name", ["SGD, momentum", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop, momentum", "Adamax"])
def test_inner_state_is_bitwise_what_torch_has_after_the_same_gradients(name):
    cls, options = CASES[name]
    options = {k: v for k, v in options.items() if k != "weight_decay" or cls is optim.AdamW}
    params, plain = parameters(torch.float32), parameters(torch.float32)
    optimizer = gyroscope.Layca(cls(params, lr=LR, **options))
    reference = cls(plain, lr=LR, **options)
    for t in range(4):
        for p, q, g in zip(params, plain, gradients(params, t), strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        optimizer.step()
        reference.step()
    for p, q in zip(params, plain, strict=True):
        own = {k: v for k, v in optimizer.state[p].items() if k != "radius"}
        assert set(own) == set(reference.state[q])
        assert own
        for key, value in own.items():
            assert torch.equal(value, reference.state[q][key]), key


def test_the_inner_learning_rate_is_the_groups_own_after_the_step():
    params = parameters(torch.float32)
    inner = optim.AdamW(params, lr=LR, weight_decay=0.3)
    optimizer = gyroscope.Layca(inner)
    for p, g in zip(params, gradients(params, 0), strict=True):
        p.grad = g
    optimizer.step()
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(LR, 0.3), (LR, 0.3)]


def test_an_optimizer_that_raises_leaves_everything_in_place():
    class Raises(optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.mul_(7)
            raise RuntimeError("no")

    params = parameters(torch.float32)
    before = [p.detach().clone() for p in params]
    places = [p.data_ptr() for p in params]
    optimizer = gyroscope.Layca(Raises(params, lr=LR), others="frozen")
    for p, g in zip(params, gradients(params, 0), strict=True):
        p.grad = g
    with pytest.raises(RuntimeError, match="no"):
        optimizer.step()
    assert [p.data_ptr() for p in params] == places
    assert all(torch.equal(p.detach(), w) for p, w in zip(params, before, strict=True))


@pytest.mark.parametrize("claims_to_read", [True, False, None])
def test_reads_weights_may_be_said_of_a_third_party_optimizer(claims_to_read):
    """A rule that reads gradients alone gives the same either way."""

    class Lion(Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        m = self.state[p].setdefault("m", torch.zeros_like(p))
                        p -= group["lr"] * (0.9 * m + 0.1 * p.grad).sign()
                        m.mul_(0.99).add_(p.grad, alpha=0.01)

    params = parameters(torch.float64)
    _, _, worst = run(lambda ps: Lion(ps, lr=LR), params, reads_weights=claims_to_read)
    assert worst < 1e-10


@pytest.mark.parametrize("name", ["Lion", "AdaBelief"])
def test_layca_over_a_third_party_optimizer_equals_the_literal_procedure(name):
    package = pytest.importorskip("pytorch_optimizer")
    params = parameters(torch.float64)
    _, _, worst = run(lambda ps: getattr(package, name)(ps, lr=LR), params)
    assert worst < 1e-10


def quadratic(params):
    """A convex loss with a minimum away from zero, and gradients that are none of them parallel to the weights."""
    loss = torch.zeros((), dtype=params[0].dtype)
    for i, p in enumerate(params):
        target = torch.linspace(-1, 2 + i, p.numel(), dtype=p.dtype).reshape(p.shape)
        scale = torch.linspace(0.5, 3, p.numel(), dtype=p.dtype).reshape(p.shape)
        loss = loss + (scale * (p - target).square()).sum()
    return loss


def closure_over(params):
    def closure():
        for p in params:
            p.grad = None
        loss = quadratic(params)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("options", [{}, {"max_iter": 3}, {"line_search_fn": "strong_wolfe"}])
@pytest.mark.parametrize("shapes", [((6, 5), (3, 4)), ((6, 5), (5,), (3, 4))])
@pytest.mark.parametrize("frozen", [False, True])
def test_layca_over_lbfgs_equals_the_literal_procedure(options, shapes, frozen):
    params = parameters(torch.float64, shapes)

    def make(ps):
        return optim.LBFGS(ps, lr=LR, **options)

    literal = LiteralLayca(make, params, frozen=frozen)
    optimizer = gyroscope.Layca(make(params), others="frozen" if frozen else "inner")
    for _ in range(4):
        expected = float(quadratic(params).detach())
        loss = optimizer.step(closure_over(params))
        literal.step(closure=lambda ps: closure_over(ps)())
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)
        for p, w in zip(params, literal.params, strict=True):
            assert distance(p, w) < 1e-9


def test_a_closure_is_evaluated_once_for_a_rule_that_needs_no_loss():
    params = parameters(torch.float64, [(4, 3)])
    calls = []

    def closure():
        calls.append(1)
        return closure_over(params)()

    optimizer = gyroscope.Layca(optim.Adam(params, lr=LR))
    expected = float(quadratic(params).detach())
    assert float(optimizer.step(closure).detach()) == pytest.approx(expected)
    assert len(calls) == 1


def test_layers_are_met_before_a_closure_makes_their_first_gradients():
    """A zero norm is refused and a loaded radius taken although there is no gradient yet when the step begins."""
    params = parameters(torch.float64, [(4, 3), (2, 3)])
    params[1].data.zero_()
    before = [p.detach().clone() for p in params]
    optimizer = gyroscope.Layca(optim.LBFGS(params, lr=LR))
    with pytest.raises(ControlError, match=r"zero norm.*group0\.1"):
        optimizer.step(closure_over(params))
    assert all(torch.equal(p.detach(), w) for p, w in zip(params, before, strict=True))

    params = parameters(torch.float64, [(4, 3)])
    radius = float(params[0].detach().norm())
    optimizer = gyroscope.Layca(optim.LBFGS(params, lr=LR))
    optimizer.step(closure_over(params))
    assert float(optimizer.state[params[0]]["radius"]) == pytest.approx(radius)
    longer = [torch.nn.Parameter(3 * params[0].detach())]
    resumed = gyroscope.Layca(optim.LBFGS(longer, lr=LR))
    resumed.load_state_dict(optimizer.state_dict())
    resumed.step(closure_over(longer))
    assert float(longer[0].detach().norm()) == pytest.approx(radius, rel=1e-12)
