"""The fused step of CPUs, compiled from C: every claim of the kernels, and its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gyroscope
from gyroscope.control.fast import Fast
from gyroscope.errors import ControlError
from interpreted import assert_cases_hold, needs_triton

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
RULES = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05, weight_decay=0.1),
}


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYROSCOPE_BACKEND", "native")


@needs_triton  # the process that runs the cases has its interpreter on
def test_the_compiled_step_keeps_every_claim_of_fused_cases() -> None:
    assert_cases_hold(Path(__file__).with_name("fused_cases.py"), more_than=100, backend="native")


def stepped(name: str, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], bool]:
    """Return the weights after three steps, and whether the compiled step took them."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    optimizer = gyroscope.Layca(RULES[name](params))
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        optimizer.step()
    drivers = optimizer._steering._drivers.values()
    return [p.detach() for p in params], any(isinstance(driver, Fast) for driver in drivers)


@pytest.mark.parametrize("name", RULES)
def test_a_step_has_the_same_digits_whatever_the_number_of_threads(name: str) -> None:
    shapes = [(700, 1_001), (3, 5), (2_000, 1_500)]  # more than one part
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            weights, fused = stepped(name, shapes)
            assert fused
            found.append(weights)
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", RULES)
def test_float16_which_it_does_not_know_takes_the_general_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,), fused = stepped(name, [(30, 20)], torch.float16)
    monkeypatch.setenv("GYROSCOPE_BACKEND", "eager")
    (expected,), _ = stepped(name, [(30, 20)], torch.float16)
    assert not fused
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)


def test_a_gradient_of_another_shape_is_rejected() -> None:
    (p,) = params = [nn.Parameter(torch.randn(6, 4))]
    optimizer = gyroscope.Layca(RULES["adamw"](params))
    p.grad = torch.randn(6, 4)
    optimizer.step()
    p.data = torch.randn(9, 4)
    with pytest.raises(ControlError, match=r"must have the shape \(9, 4\) of its weights, got \(6, 4\)"):
        optimizer.step()


def test_a_backward_pass_over_weights_that_have_been_stepped_is_an_error_of_torch() -> None:
    layer = nn.Linear(5, 5, bias=False)
    optimizer = gyroscope.Layca(RULES["momentum"](layer.parameters()))
    x = torch.randn(3, 5, requires_grad=True)
    loss = layer(x).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_momentum_that_older_versions_of_torch_saved_as_none_begins_anew() -> None:
    def trained(state: dict[str, object]) -> Tensor:
        weight = nn.Parameter(torch.eye(3))
        optimizer = gyroscope.Layca(torch.optim.SGD([weight], lr=0.1, momentum=0.9))
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        weight.grad = torch.arange(9.0).view(3, 3)
        optimizer.step()
        return weight.detach()

    assert torch.equal(trained({0: {"momentum_buffer": None}}), trained({}))
