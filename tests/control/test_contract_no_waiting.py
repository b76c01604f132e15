"""On a GPU, nothing on the step path waits for the device. (Needs one; the interpreter has nothing to wait for.)"""

import pytest
import torch
from torch import nn

import gyroscope
from gyroscope.control import lars
from gyroscope.vectors import combine_, dots

optim = torch.optim
pytestmark = pytest.mark.gpu

MAKE = {
    "sgd": lambda ps: gyroscope.Layca(optim.SGD(ps, lr=0.03)),
    "momentum": lambda ps: gyroscope.Layca(optim.SGD(ps, lr=0.03, momentum=0.9)),
    "adam": lambda ps: gyroscope.Layca(optim.Adam(ps, lr=0.03)),
    "adam fused": lambda ps: gyroscope.Layca(optim.Adam(ps, lr=0.03, fused=True)),
    "adamw tensor rate": lambda ps: gyroscope.Layca(
        optim.AdamW(ps, lr=torch.tensor(0.03, device="cuda"), capturable=True)
    ),
    "nadam": lambda ps: gyroscope.Layca(optim.NAdam(ps, lr=0.03, foreach=True)),
    "nadam capturable": lambda ps: gyroscope.Layca(optim.NAdam(ps, lr=0.03, foreach=True, capturable=True)),
    "radam": lambda ps: gyroscope.Layca(optim.RAdam(ps, lr=0.03, foreach=True)),
    "adamax": lambda ps: gyroscope.Layca(optim.Adamax(ps, lr=0.03, foreach=True)),
    "adadelta": lambda ps: gyroscope.Layca(optim.Adadelta(ps, lr=0.03, foreach=True)),
    "lars": lambda ps: lars(optim.SGD(ps, lr=0.03, momentum=0.9)),
    "graft": lambda ps: gyroscope.Graft(optim.SGD(ps, lr=0.03), optim.Adam(ps, lr=0.03, foreach=True)),
}


@pytest.fixture
def not_waiting():
    """Raise where torch knows that the host would wait."""

    def start():
        torch.cuda.set_sync_debug_mode("error")

    yield start
    torch.cuda.set_sync_debug_mode("default")


def parameters():
    torch.manual_seed(0)
    shapes = [(64, 32), (64,), (16, 64, 3, 3), (16,)]
    params = [nn.Parameter(torch.randn(s, device="cuda")) for s in shapes]
    return [*params, nn.Parameter(torch.randn(8, 8, device="cuda"), requires_grad=False)]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", MAKE)
def test_a_step_does_not_wait(name, not_waiting):
    params = parameters()
    optimizer = MAKE[name](params)
    grads = [[torch.randn_like(p) for p in params] for _ in range(3)]
    for t in range(6):
        for p, g in zip(params, grads[t % 3], strict=True):
            if p.requires_grad:
                p.grad = g  # other addresses every time
        if t == 2:
            not_waiting()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_moving_momentum_does_not_make_a_step_wait(not_waiting):
    params = parameters()
    optimizer = gyroscope.Layca(optim.Adam(params, lr=0.03))
    for t in range(6):
        for p in params:
            p.grad = torch.randn_like(p) if p.requires_grad else None
        for group in optimizer.param_groups:
            group["betas"] = (0.9 - 0.01 * t, 0.999)
        if t == 2:
            not_waiting()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_primitives_do_not_wait(not_waiting):
    x = [torch.randn(9, 5, device="cuda"), torch.randn(7, device="cuda", dtype=torch.bfloat16)]
    y = [torch.randn_like(t) for t in x]
    a = torch.rand(2, device="cuda")
    not_waiting()
    for _ in range(2):
        dots({"yy": (y, y), "xx": (x, x), "xy": (x, y)})
        combine_(x, y, a, a)
