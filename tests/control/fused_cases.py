"""The fused kernels against the literal procedure; run by test_fused_interpreted, in Triton's interpreter.

On a machine with a GPU the same claims are checked on it: `make gpu`.
"""

import math
import os

import pytest
import torch
from torch import nn

import gyroscope
from gyroscope.control import block_normalized, hyperball, lars, relative_update
from gyroscope.control.fast import Fast
from interpreted import hasten_interpreter
from oracles.control import LiteralAMom, LiteralLayca, angle, distance

optim = torch.optim
hasten_interpreter()
DEVICE = torch.device(os.environ.get("GYROSCOPE_TEST_DEVICE", "cpu"))
# The interpreter computes with numpy, which warns where a GPU quietly gives inf or nan.
pytestmark = [pytest.mark.any_device, pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]
# It also cuts to bfloat16 where a GPU rounds: a loss of half a unit in the last place, in every element.
BFLOAT16 = 1e-3 if DEVICE.type == "cuda" else 2.0**-8
LR = 0.05
SHAPES = ((5, 7), (3,), (4, 3, 2, 2))

RULES = {
    "sgd": (optim.SGD, {}),
    "sgd, decay": (optim.SGD, {"weight_decay": 0.3}),
    "sgd, maximize, decay": (optim.SGD, {"maximize": True, "weight_decay": 0.3}),
    "momentum": (optim.SGD, {"momentum": 0.9}),
    "momentum, nesterov, decay": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.2}),
    "momentum, dampening": (optim.SGD, {"momentum": 0.8, "dampening": 0.4}),
    "momentum, maximize, decay": (optim.SGD, {"momentum": 0.9, "maximize": True, "weight_decay": 0.3}),
    "sgd_amom": (gyroscope.SGD_AMom, {"weight_decay": 0.2}),
    "sgd_amom, maximize": (gyroscope.SGD_AMom, {"momentum": 0.5, "maximize": True}),
    "adam": (optim.Adam, {}),
    "adam, decay, large eps": (optim.Adam, {"weight_decay": 0.2, "eps": 0.1, "betas": (0.8, 0.95)}),
    "adam, maximize": (optim.Adam, {"maximize": True, "weight_decay": 0.3}),
    "adamw": (optim.AdamW, {"weight_decay": 0.5, "eps": 0.1}),
    "nadam": (optim.NAdam, {"weight_decay": 0.2, "momentum_decay": 0.3}),
    "nadam, maximize": (optim.NAdam, {"maximize": True, "betas": (0.7, 0.95), "eps": 0.1}),
    "nadam, decoupled": (optim.NAdam, {"weight_decay": 0.5, "decoupled_weight_decay": True}),
    "radam": (optim.RAdam, {"betas": (0.9, 0.99), "weight_decay": 0.2}),
    "radam, maximize": (optim.RAdam, {"maximize": True, "eps": 0.1}),
    "radam, decoupled": (optim.RAdam, {"weight_decay": 0.3, "decoupled_weight_decay": True}),
    "adamax": (optim.Adamax, {"weight_decay": 0.2}),
    "adamax, maximize, large eps": (optim.Adamax, {"maximize": True, "eps": 0.5, "betas": (0.8, 0.5)}),
    "rmsprop": (optim.RMSprop, {"weight_decay": 0.2, "eps": 0.1}),
    "adagrad": (optim.Adagrad, {"weight_decay": 0.2, "initial_accumulator_value": 0.5, "eps": 0.1}),
}
# These have no kernel of their own: torch's step writes a displacement, and the kernel takes it from there.
GIVEN = {
    "adadelta": (optim.Adadelta, {"weight_decay": 0.2}),
    "adam, amsgrad": (optim.Adam, {"amsgrad": True}),
    "adamw, amsgrad": (optim.AdamW, {"amsgrad": True, "weight_decay": 0.3}),
    "rmsprop, momentum": (optim.RMSprop, {"momentum": 0.9}),
    "adafactor": (optim.Adafactor, {"weight_decay": 0.2}),
}


class SignOfMomentum(optim.Optimizer):
    """Lion, as a package might have it: no class of torch's, so its step is taken on a copy of the weights."""

    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(m.lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
                    m.lerp_(p.grad, 0.01)


GIVEN["lion"] = (SignOfMomentum, {"weight_decay": 0.3})
STATEFUL = [
    "momentum",
    "momentum, nesterov, decay",
    "sgd_amom",
    "adam, decay, large eps",
    "adamw",
    "nadam",
    "radam",
    "radam, decoupled",
    "adamax",
    "rmsprop",
    "adagrad",
]


def maker(name, **extra):
    cls, options = (RULES | GIVEN)[name]
    return lambda ps: cls(ps, lr=LR, **options, **extra)


def literal_maker(name):
    cls, options = (RULES | GIVEN)[name]
    return lambda ps: (LiteralAMom if cls is gyroscope.SGD_AMom else cls)(ps, lr=LR, **options)


def parameters(shapes=SHAPES, dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(DEVICE, dtype)) for shape in shapes]


def gradients(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in params]


def give(params, grads):
    for p, g in zip(params, grads, strict=True):
        p.grad = None if g is None else g.clone(memory_format=torch.preserve_format)


def fused_groups(optimizer):
    """The groups that have gone through a kernel with the inner rule in it."""
    return [i for i, driver in optimizer._steering._drivers.items() if isinstance(driver, Fast)]


def given_groups(optimizer):
    return [i for i in optimizer._steering._drivers if isinstance(i, tuple)]


def assert_same_state(optimizer, inner, params, copies, bound):
    for p, q in zip(params, copies, strict=True):
        own = {k: v for k, v in optimizer.state[p].items() if k != "radius"}
        assert set(own) == set(inner.state[q])
        for key, value in own.items():
            other = inner.state[q][key]
            assert float((value.double() - other.double()).norm()) <= bound * float(other.double().norm()), key


def follow(optimizer, literal, params, steps, bound, start=0):
    for t in range(start, start + steps):
        grads = gradients(params, t)
        give(params, grads)
        optimizer.step()
        literal.step(grads)
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True)), "a gradient was changed"
        assert max(distance(p, w) for p, w in zip(params, literal.params, strict=True)) < bound


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.float64, 1e-12)])
def test_the_kernels_rule_equals_the_literal_procedure(name, dtype, bound):
    params = parameters(dtype=dtype)
    literal = LiteralLayca(literal_maker(name), params)
    optimizer = gyroscope.Layca(maker(name)(params))
    # RAdam rectifies from its sixth step on.
    follow(optimizer, literal, params, 8 if name.startswith("radam") else 3, bound)
    assert fused_groups(optimizer) == [0]
    assert_same_state(optimizer, literal.inner, params, literal.params, bound)


@pytest.mark.parametrize("name", ["adam", "nadam", "radam", "adamax"])
def test_a_capturable_optimizer_takes_the_same_steps(name):
    params = parameters(((5, 7), (4, 6)), torch.float64)
    literal = LiteralLayca(literal_maker(name), params)
    optimizer = gyroscope.Layca(maker(name, capturable=True)(params))
    follow(optimizer, literal, params, 8, 1e-12)
    assert fused_groups(optimizer) == [0]
    counts = [optimizer.state[p][key] for p in params for key in ("step", "mu_product") if key in optimizer.state[p]]
    assert all(count.device.type == DEVICE.type for count in counts)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_checkpoint_is_continued_by_the_kernel_and_by_torch(name):
    params = parameters(dtype=torch.float64)
    literal = LiteralLayca(literal_maker(name), params)
    optimizer = gyroscope.Layca(maker(name)(params))
    follow(optimizer, literal, params, 3, 1e-12)
    for hooked in (False, True, False):
        inner = maker(name)(params)
        resumed = gyroscope.Layca(inner)
        resumed.load_state_dict(optimizer.state_dict())
        hook = inner.register_step_post_hook(lambda *_: None) if hooked else None
        follow(resumed, literal, params, 2, 1e-12, start=3)
        assert bool(fused_groups(resumed)) != hooked
        if hook is not None:
            hook.remove()
        optimizer = resumed


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_the_kernel_on_a_given_displacement_equals_the_literal_procedure(name, dtype, bound):
    params = parameters(dtype=dtype)
    literal = LiteralLayca(literal_maker(name), params)
    optimizer = gyroscope.Layca(maker(name)(params))
    follow(optimizer, literal, params, 3, bound)
    assert not fused_groups(optimizer)
    assert given_groups(optimizer)


@pytest.mark.parametrize("name", ["sgd, decay", "momentum", "adamw"])
def test_a_hook_on_the_inner_optimizer_is_called_and_the_result_is_the_same(name):
    params = parameters()
    literal = LiteralLayca(literal_maker(name), params)
    inner = maker(name)(params)
    calls = []
    inner.register_step_post_hook(lambda *_: calls.append(1))
    optimizer = gyroscope.Layca(inner)
    follow(optimizer, literal, params, 3, 3e-6)
    assert len(calls) == 3
    assert not fused_groups(optimizer)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("law", [{}, {"project": False}])
def test_going_back_and_forth_between_the_paths_continues_one_trajectory(name, law):
    params = parameters(dtype=torch.float64)
    literal = LiteralLayca(literal_maker(name), params, **law)
    inner = maker(name)(params)
    optimizer = gyroscope.Layca(inner, **law)
    follow(optimizer, literal, params, 2, 1e-12)
    assert fused_groups(optimizer) == [0]
    for start, steps in ((2, 2), (5, 1)):
        hook = inner.register_step_pre_hook(lambda *_: None)
        follow(optimizer, literal, params, steps, 1e-12, start)
        hook.remove()
        follow(optimizer, literal, params, 1, 1e-12, start + steps)
    assert_same_state(optimizer, literal.inner, params, literal.params, 1e-12)


@pytest.mark.parametrize("member", [hyperball, relative_update, lars, block_normalized], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "name", ["sgd, decay", "adamw", "nadam, decoupled", "radam, decoupled", "adamw, amsgrad", "lion"]
)
def test_the_relatives_equal_the_literal_procedure(member, name):
    laws = {
        hyperball: {"project": False},
        relative_update: {"project": False, "reproject": False},
        lars: {"project": False, "reproject": False, "growth": 1e-4},
        block_normalized: {"project": False, "reproject": False, "scale": "unit"},
    }
    params = parameters(dtype=torch.float64)
    literal = LiteralLayca(literal_maker(name), params, **laws[member])
    follow(member(maker(name)(params)), literal, params, 4, 1e-12)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "nadam", "adadelta"])
def test_layers_of_one_element_and_of_several_chunks(name):
    params = parameters(((1, 1), (130, 70), (1, 2), (8192, 1)))
    single = params[0].detach().clone()
    literal = LiteralLayca(literal_maker(name), params)
    optimizer = gyroscope.Layca(maker(name)(params))
    follow(optimizer, literal, params, 2, 3e-6)
    assert torch.equal(params[0].detach(), single), "one number has nowhere to turn to"


@pytest.mark.parametrize("name", ["sgd, decay", "momentum, nesterov, decay", "adamw", "nadam", "adadelta"])
@pytest.mark.parametrize(
    ("gradient_format", "granularity"),
    [(torch.channels_last, "tensor"), (torch.contiguous_format, "tensor"), (torch.contiguous_format, "row")],
)
def test_channels_last_weights(name, gradient_format, granularity):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 2, 3, bias=False))
    model = model.to(DEVICE, memory_format=torch.channels_last)
    params = list(model.parameters())
    segments = [(p.shape[0], 0) if granularity == "row" else (1, 0) for p in params]
    literal = LiteralLayca(literal_maker(name), params, segments=segments)
    optimizer = gyroscope.Layca(maker(name)(params), gyroscope.layers(model, granularity=granularity))
    for t in range(3):
        grads = gradients(params, t)
        for p in params:
            p.grad = None
        for p, g in zip(params, grads, strict=True):
            p.grad = g.contiguous(memory_format=gradient_format).clone(memory_format=torch.preserve_format)
        optimizer.step()
        literal.step(grads)
        assert max(distance(p, w) for p, w in zip(params, literal.params, strict=True)) < 3e-6
        assert all(p.is_contiguous(memory_format=torch.channels_last) for p in params)


@pytest.mark.parametrize("name", ["sgd", "adamw", "nadam", "adadelta", "lion"])
@pytest.mark.parametrize("offset", [1, 3])
def test_unaligned_views(name, offset):
    torch.manual_seed(0)
    storage = torch.randn(offset + 40 * 30, device=DEVICE)
    p = nn.Parameter(storage[offset:].view(40, 30))
    assert p.data_ptr() % 16
    literal = LiteralLayca(literal_maker(name), [p])
    follow(gyroscope.Layca(maker(name)([p])), literal, [p], 3, 3e-6)


@pytest.mark.parametrize("name", ["sgd, decay", "momentum", "adamw", "rmsprop", "nadam", "adadelta", "lion"])
def test_rows_turn_on_their_own(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 5, bias=False), nn.ConvTranspose2d(3, 4, 2, bias=False)).double().to(DEVICE)
    params = list(model.parameters())
    literal = LiteralLayca(literal_maker(name), params, segments=[(5, 0), (4, 1)])
    optimizer = gyroscope.Layca(maker(name)(params), gyroscope.layers(model, granularity="row"))
    follow(optimizer, literal, params, 3, 1e-12)
    alone = nn.Linear(9, 5, bias=False).double().to(DEVICE)
    rows = gyroscope.Layca(maker(name)(alone.parameters()), gyroscope.layers(alone, granularity="row"))
    follow(rows, LiteralLayca(literal_maker(name), [alone.weight], segments=[(5, 0)]), [alone.weight], 3, 1e-12)
    assert bool(fused_groups(rows)) == (name not in ("adadelta", "lion"))


@pytest.mark.parametrize("name", ["sgd, decay", "momentum", "adam", "nadam", "adadelta", "lion"])
def test_bfloat16_turns_by_arctan_rho_within_its_rounding(name):
    params = parameters(((60, 50), (300, 40)), torch.bfloat16)
    cls, options = (RULES | GIVEN)[name]
    optimizer = gyroscope.Layca(cls(params, lr=0.3, **options))
    norms = [float(p.detach().double().norm()) for p in params]
    for t in range(3):
        before = [p.detach().clone() for p in params]
        give(params, gradients(params, t))
        optimizer.step()
        for p, w, norm in zip(params, before, norms, strict=True):
            assert angle(w, p) == pytest.approx(math.atan(0.3), rel=1e-3)
            assert float(p.detach().double().norm()) == pytest.approx(norm, rel=BFLOAT16)


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_a_bfloat16_step_is_the_exact_one_rounded_once(name):
    (p,) = parameters(((40, 30),), torch.bfloat16)
    literal = LiteralLayca(literal_maker(name), [p])
    follow(gyroscope.Layca(maker(name)([p])), literal, [p], 1, 2.0**-8)


def test_layers_of_several_dtypes_in_one_group():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(6, 5, device=DEVICE).to(d)) for d in (torch.float32, torch.float64)]
    literal = LiteralLayca(literal_maker("adamw"), params)
    follow(gyroscope.Layca(maker("adamw", foreach=False)(params)), literal, params, 3, 3e-6)


@pytest.mark.parametrize("name", ["sgd, decay", *STATEFUL, "adadelta"])
def test_layers_that_miss_gradients_for_some_steps(name):
    params = parameters(((5, 7), (4, 6), (3,)), torch.float64)
    literal = LiteralLayca(literal_maker(name), params)
    optimizer = gyroscope.Layca(maker(name)(params))
    for t, missing in enumerate([None, 0, None, 1, 0, None, None]):
        grads = gradients(params, t)
        if missing is not None:
            grads[missing] = None
        give(params, grads)
        optimizer.step()
        literal.step(grads)
        assert max(distance(p, w) for p, w in zip(params, literal.params, strict=True)) < 1e-12


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_gradients_that_lie_elsewhere_every_step_are_found(name):
    params = parameters(dtype=torch.float64)
    literal = LiteralLayca(literal_maker(name), params)
    optimizer = gyroscope.Layca(maker(name)(params))
    kept = []
    for t in range(4):
        grads = gradients(params, t)
        give(params, grads)
        kept.append([p.grad for p in params])  # so that no address comes back
        optimizer.step()
        literal.step(grads)
        assert max(distance(p, w) for p, w in zip(params, literal.params, strict=True)) < 1e-12


@pytest.mark.parametrize("name", ["sgd", "adamw", "adadelta", "rmsprop, momentum"])
def test_weights_that_are_moved_between_steps_are_found(name):
    params = parameters(dtype=torch.float64)
    literal = LiteralLayca(literal_maker(name), params)
    optimizer = gyroscope.Layca(maker(name)(params))
    kept = []
    for t in range(6):
        if t in (2, 3, 5):
            kept.append(params[t % 3].data)  # so that no address comes back
            params[t % 3].data = params[t % 3].data.clone()
        follow(optimizer, literal, params, 1, 1e-12, start=t)


@pytest.mark.parametrize("name", [name for name in STATEFUL if name != "adagrad"])
def test_a_state_thrown_away_midway_starts_anew(name):
    params = parameters(dtype=torch.float64)
    literal = LiteralLayca(literal_maker(name), params)
    optimizer = gyroscope.Layca(maker(name)(params))
    follow(optimizer, literal, params, 3, 1e-12)
    optimizer.state.clear()
    literal.inner.state.clear()
    follow(optimizer, literal, params, 3, 1e-12, start=3)


@pytest.mark.parametrize("name", STATEFUL)
def test_options_changed_midway_are_heard(name):
    params = parameters(dtype=torch.float64)
    literal = LiteralLayca(literal_maker(name), params)
    optimizer = gyroscope.Layca(maker(name)(params))
    follow(optimizer, literal, params, 2, 1e-12)
    for one in (optimizer, literal.inner):
        for group in one.param_groups:
            group["lr"] = 0.2
            group["decay" if one is literal.inner and "amom" in name else "weight_decay"] = 1.5
    follow(optimizer, literal, params, 2, 1e-12, start=2)


@pytest.mark.parametrize(
    ("name", "bad"),
    [*((name, math.nan) for name in (*RULES, "adadelta", "adafactor")), ("momentum", math.inf), ("adamw", -math.inf)],
)
def test_a_layer_with_a_non_finite_gradient_sits_the_step_out(name, bad):
    params = parameters(((5, 7), (4, 6)), torch.float32)
    optimizer = gyroscope.Layca(maker(name)(params))
    for t in range(2):
        give(params, gradients(params, t))
        optimizer.step()
    before = [p.detach().clone() for p in params]
    grads = gradients(params, 2)
    grads[0][2, 3] = bad
    give(params, grads)
    optimizer.step()
    assert torch.equal(params[0].detach(), before[0])
    assert angle(before[1], params[1]) == pytest.approx(math.atan(LR), rel=1e-3)
    assert optimizer.skipped() == {"group0.0": 1}
    assert all(bool(torch.isfinite(v).all()) for v in optimizer.state[params[0]].values())
    give(params, gradients(params, 3))
    optimizer.step()
    assert angle(before[0], params[0]) == pytest.approx(math.atan(LR), rel=1e-3)
    assert optimizer.skipped() == {"group0.0": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("roundings", "moves"), [(0.0, False), (4.0, False), (20.0, True)])
def test_a_stepped_copy_that_differs_by_a_few_roundings_has_no_direction(dtype, roundings, moves):
    """The optimizer reads its weights, so nothing but the change of the copy tells its direction."""

    class Nudge(optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p[0, 0] += roundings * torch.finfo(dtype).eps * p.norm()

    (p,) = parameters(((5, 7),), dtype)
    p.data[0, 0] = 0.0
    before = p.detach().clone()
    optimizer = gyroscope.Layca(Nudge([p], {"lr": LR}))
    give([p], gradients([p], 0))
    optimizer.step()
    assert given_groups(optimizer)
    assert torch.equal(p.detach(), before) != moves
    assert optimizer.skipped() == ({"group0.0": 1} if 0 < roundings < 8 else {})


def test_states_of_layers_that_were_missing_at_first_are_cleared_too():
    """Their states are there, loaded, before they have a gradient for the first time."""
    params = parameters(((5, 7), (4, 6)))
    optimizer = gyroscope.Layca(maker("adadelta")(params))
    give(params, gradients(params, 0))
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    give(params, [gradients(params, 1)[0], None])
    optimizer.step()
    grads = gradients(params, 2)
    grads[1][0, 0] = float("nan")
    give(params, grads)
    optimizer.step()
    assert all(bool(torch.isfinite(v).all()) for v in optimizer.state[params[1]].values())


@pytest.mark.parametrize("name", [name for name in RULES if "decay" not in name and not name.startswith("rmsprop")])
def test_a_zero_gradient_moves_nothing(name):
    cls, options = RULES[name]
    options = {**options, "weight_decay": 0.0}
    params = parameters()[:1]
    before = params[0].detach().clone()
    optimizer = gyroscope.Layca(cls(params, lr=LR, **options))
    for _ in range(2):
        params[0].grad = torch.zeros_like(params[0])
        optimizer.step()
    assert torch.equal(params[0].detach(), before)
    assert optimizer.skipped() == {}


@pytest.mark.parametrize("name", ["sgd", *STATEFUL, "adadelta"])
def test_a_rate_of_zero_moves_nothing(name):
    cls, options = (RULES | GIVEN)[name]
    params = parameters()[:1]
    before = params[0].detach().clone()
    optimizer = gyroscope.Layca(cls(params, lr=0.0, **options))
    give(params, gradients(params, 0))
    optimizer.step()
    assert torch.equal(params[0].detach(), before)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "nadam", "adadelta"])
def test_a_rate_in_a_tensor_is_read_anew_every_step(name):
    cls, options = (RULES | GIVEN)[name]
    params = parameters(((5, 7),), torch.float64)
    lr = torch.tensor(LR, dtype=torch.float64, device=DEVICE)
    optimizer = gyroscope.Layca(cls(params, lr=lr, **options))
    for t, rate in enumerate([0.05, 0.2, 0.01]):
        lr.fill_(rate)
        before = params[0].detach().clone()
        give(params, gradients(params, t))
        optimizer.step()
        assert math.tan(angle(before, params[0])) == pytest.approx(rate, rel=1e-9)


def test_multipliers_belong_to_their_layers():
    params = parameters(((5, 7), (4, 6), (3, 3)), torch.float64)
    literal = LiteralLayca(literal_maker("adamw"), params, controlled=[0.5, 0.0, 2.0])
    follow(gyroscope.Layca(maker("adamw")(params), multipliers=[0.5, 0.0, 2.0]), literal, params, 3, 1e-12)


@pytest.mark.parametrize("magnitude", [1e-20, 1e20])
@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_weights_and_gradients_of_any_magnitude(magnitude, scale):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(20, 10, device=DEVICE) * magnitude)
    before = p.detach().clone()
    p.grad = torch.randn(20, 10, device=DEVICE) * scale
    gyroscope.Layca(optim.SGD([p], lr=LR)).step()
    assert angle(before, p) == pytest.approx(math.atan(LR), rel=1e-3)
    assert float(p.detach().double().norm()) == pytest.approx(float(before.double().norm()), rel=1e-6)


def test_a_step_that_ends_at_zero_before_the_norm_is_put_back_moves_nothing():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(20, 10, device=DEVICE))
    before = p.detach().clone()
    p.grad = p.detach().clone()  # so w + ρ‖w‖ s/‖s‖ = w − w at ρ = 1
    hyperball(optim.SGD([p], lr=1.0)).step()
    assert torch.equal(p.detach(), before)


@pytest.mark.parametrize("tiny", [1e-158, 1e-150])
def test_gradients_whose_squares_all_but_vanish_in_float64_keep_the_norm(tiny):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(20, 10, dtype=torch.float64, device=DEVICE))
    before = p.detach().clone()
    p.grad = torch.randn(20, 10, dtype=torch.float64, device=DEVICE) * tiny
    gyroscope.Layca(optim.SGD([p], lr=0.1)).step()
    assert angle(before, p) == pytest.approx(math.atan(0.1), rel=1e-6)
    assert float(p.detach().norm()) == pytest.approx(float(before.norm()), rel=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_layer_of_zeros_stays_and_turns_once_it_is_initialised(name):
    params = parameters(((5, 7), (4, 6)))
    params[1].data.zero_()
    optimizer = gyroscope.Layca(maker(name)(params), zero_norm="skip")
    give(params, gradients(params, 0))
    optimizer.step()
    assert not params[1].detach().any()
    params[1].data.normal_()
    before = params[1].detach().clone()
    give(params, gradients(params, 1))
    optimizer.step()
    assert angle(before, params[1]) == pytest.approx(math.atan(LR), rel=1e-3)
    assert float(params[1].detach().norm()) == pytest.approx(float(before.norm()), rel=1e-6)


def test_a_gradient_of_another_layout_at_the_same_address_is_read_in_its_own():
    # torch.autograd.grad and hand-made gradients need not be laid out as their parameter.
    (p,) = parameters(((4, 4),))
    optimizer = gyroscope.Layca(optim.SGD([p], lr=LR))
    literal = LiteralLayca(lambda ps: optim.SGD(ps, lr=LR), [p])
    buffer = torch.randn(16, device=DEVICE)
    for layout in (buffer.view(4, 4), buffer.view(4, 4).t(), buffer.view(4, 4)):
        p.grad = layout
        literal.step([layout])
        optimizer.step()
        assert distance(p, literal.params[0]) < 1e-6


def test_state_that_appears_later_is_cleared_too():
    (p,) = parameters(((4, 4),))
    optimizer = gyroscope.Layca(optim.SGD([p], lr=LR, momentum=0.0))
    optimizer.inner.register_step_post_hook(lambda *_: None)  # keeps the fused rule away
    p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    for bad in (False, True):
        p.grad = torch.full_like(p, math.nan) if bad else torch.randn_like(p)
        optimizer.step()
    before = p.detach().clone()
    p.grad = torch.randn_like(p)
    optimizer.step()
    assert not torch.equal(p, before)
    assert optimizer.skipped() == {"group0.0": 1}


def counting_prepare(monkeypatch):
    calls = []
    real = Fast.prepare
    monkeypatch.setattr(Fast, "prepare", lambda self, *args: (calls.append(1), real(self, *args))[1])
    return calls


def test_a_frozen_layer_does_not_cost_the_tables(monkeypatch):
    params = parameters(((4, 4), (3, 4)))
    params[1].requires_grad_(False)
    optimizer = gyroscope.Layca(optim.Adam(params, lr=LR))
    calls = counting_prepare(monkeypatch)
    for _ in range(4):
        params[0].grad = torch.randn_like(params[0])
        optimizer.step()
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["momentum", "adam, decay, large eps", "nadam", "radam", "adamax"])
def test_a_scheduler_that_moves_momentum_needs_no_new_tables_and_stays_literal(name, monkeypatch):
    params = parameters(((4, 4), (3, 4)))
    optimizer = gyroscope.Layca(maker(name)(params))
    literal = LiteralLayca(literal_maker(name), params)
    calls = counting_prepare(monkeypatch)
    for t in range(4):
        for options in (optimizer.param_groups[0], literal.inner.param_groups[0]):
            if "betas" in options:
                options["betas"] = (0.8 - 0.1 * t, 0.95)
                options["momentum_decay"] = 0.1 * t
            else:
                options["momentum"] = 0.9 - 0.1 * t
        grads = [torch.randn_like(p) for p in params]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        literal.step(grads)
        optimizer.step()
    assert max(distance(p, w) for p, w in zip(params, literal.params, strict=True)) < 1e-5
    assert len(calls) == 1


def test_the_arguments_that_change_stand_where_they_are_exchanged():
    from gyroscope.control import fused as module
    from gyroscope.control.steering import Law, Ledger

    w = parameters(((4, 4),))
    launch = module.Launch([w, w, w, w], [0], [1])
    ledger, hyper = Ledger.blank(1, DEVICE), module.Hyper(momentum=0.5)
    arguments = launch._arguments("sgd", hyper, 1 / 3, ledger, Law(), False)
    assert arguments[module._POINTERS] is launch.pointers
    assert arguments[module._NUMBERS] is launch._numbers(hyper, Law())
    assert sum(arguments[module._LR : module._LR + 2]) == 1 / 3


@pytest.mark.parametrize("inner", ["adamw", "sgd", "muon"])
def test_a_steered_model_takes_the_same_steps_with_and_without_kernels(inner):
    def made():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3)).to(DEVICE, torch.float64)
        nn.init.zeros_(net[1].weight)
        return net, gyroscope.steer(net, inner, rate=LR)

    (net, optimizer), (other, eager) = made(), made()
    eager._steering._kernel_runs = lambda work, **_: False
    for t in range(4):
        for model, one in ((net, optimizer), (other, eager)):
            give(list(model.parameters()), gradients(list(model.parameters()), t))
            one.step()
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            assert distance(p, q) < 1e-7
        # A group with a layer of zeros is stepped without kernels until it is known to have a direction.
        kernels = fused_groups(optimizer) + given_groups(optimizer)
        assert bool(kernels) == (t == 3)
        optimizer._steering._until_checked = 0 if t == 1 else 1
    assert optimizer.state[net[0].weight]["norm_moments"][0, 2] == 3
