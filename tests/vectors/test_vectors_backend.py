"""Who computes, and how to say otherwise."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from gyroscope import vectors
from gyroscope.errors import VectorError
from gyroscope.vectors import backend, eager, interface


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GYROSCOPE_BACKEND", raising=False)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stands for the Triton backend, which only loads where Triton is installed."""
    module = ModuleType("gyroscope.vectors.triton")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(vectors, "triton", module, raising=False)
    return module


@pytest.mark.parametrize("device", ["cpu", "meta", "mps", "xpu", torch.device("cpu"), torch.device("mps", 0)])
def test_any_device_but_cuda_is_served_by_eager(device: str | torch.device) -> None:
    assert backend(device) is eager


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_cuda_is_served_by_triton_where_it_is_installed(
    device: str | torch.device, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "_has_triton", lambda: True)
    assert backend(device) is kernels
    monkeypatch.setattr(interface, "_has_triton", lambda: False)
    assert backend(device) is eager


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_environment_overrides_the_device(
    device: str, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "_has_triton", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("GYROSCOPE_BACKEND", "eager")
    assert backend(device) is eager
    monkeypatch.setenv("GYROSCOPE_BACKEND", "triton")
    assert backend(device) is kernels
    monkeypatch.setenv("GYROSCOPE_BACKEND", "")
    assert backend(device) is (kernels if device == "cuda" else eager)


def test_triton_where_it_cannot_run_is_refused(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYROSCOPE_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(interface, "_has_triton", lambda: True)
    with pytest.raises(VectorError, match=r"a layer is on the CPU, where Triton needs its interpreter.*Unset"):
        backend("cpu")
    assert backend("cuda") is kernels
    monkeypatch.setattr(interface, "_has_triton", lambda: False)
    with pytest.raises(VectorError, match="GYROSCOPE_BACKEND is 'triton', which is not installed"):
        backend("cuda")


@pytest.mark.parametrize("device", [None, "gpu", [], 1.5])
def test_what_is_no_device_is_refused(device: object) -> None:
    with pytest.raises(VectorError, match=r"`device` must be a device that torch knows, got .*Try 'cpu'"):
        backend(device)


@pytest.mark.parametrize("name", ["Triton", "cuda", "sharded", " eager"])
def test_an_unknown_backend_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYROSCOPE_BACKEND", name)
    with pytest.raises(VectorError, match=f"GYROSCOPE_BACKEND must be 'eager', 'native' or 'triton', got '{name}'"):
        backend("cpu")
    with pytest.raises(VectorError, match="GYROSCOPE_BACKEND"):
        vectors.dots({"xx": ([torch.ones(1)], [torch.ones(1)])})
