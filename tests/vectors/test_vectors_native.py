"""The compiled backend: how it is made and kept, and the products of a monitor. `cpu_backend` runs the other claims."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gyroscope.errors import VectorError
from gyroscope.monitor.bundle import COLUMNS, Layout, Native, Remembered, Staged
from gyroscope.vectors import backend, dots, eager, native

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

SIZES = (1, 700, 8192, 20_000)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.fixture
def uncompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a process that has compiled nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.compiled.cache_clear()
    yield tmp_path / "gyroscope"
    native.compiled.cache_clear()


def test_it_is_chosen_by_name_and_for_cpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYROSCOPE_BACKEND", "native")
    assert backend("cpu") is native
    assert backend("meta") is eager


def test_it_is_compiled_once_and_found_in_the_cache_after_that(
    uncompiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.compiled()
    (made,) = uncompiled.iterdir()
    native.compiled.cache_clear()
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    native.compiled()
    assert list(uncompiled.iterdir()) == [made]


def test_without_a_compiler_the_error_says_what_to_do(uncompiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(VectorError, match=r"needs a C compiler.*Install gcc or clang.*or unset the variable"):
        native.compiled()
    assert not uncompiled.exists()


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    uncompiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'no space left' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(VectorError, match=r"could not compile native\.c: no space left\. Unset GYROSCOPE_BACKEND"):
        native.compiled()
    assert list(uncompiled.iterdir()) == []


def test_sums_have_the_same_digits_whatever_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYROSCOPE_BACKEND", "native")
    x = [torch.randn(100_003, generator=torch.Generator().manual_seed(1))]
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(dots({"xx": (x, x)}))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def random(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator).to(dtype) for n in SIZES]


def flat(layout: Layout, parts: list[Tensor]) -> Tensor:
    buffer = torch.zeros(layout.total, dtype=parts[0].dtype)
    for view, part in zip(layout.views(buffer), parts, strict=True):
        view.copy_(part)
    return buffer


@pytest.mark.parametrize(
    "known", ["", "before", "anchor", "before anchor", "before previous", "before anchor previous"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_a_monitor_are_the_literal_sums(known: str, dtype: torch.dtype) -> None:
    layout = Layout.of(list(SIZES))
    w, g, w0 = random(0, dtype), random(1, dtype), random(2, dtype)
    parts = {name: random(3 + i, dtype) for i, name in enumerate(("before", "anchor", "previous")) if name in known}
    buffers = {name: flat(layout, part) for name, part in parts.items()}
    given = Remembered(
        flat(layout, w0), buffers.get("before"), buffers.get("anchor"), buffers.get("previous"), "previous" in known
    )
    found = Native(layout, torch.device("cpu"), dtype).products(w, g, given)
    for i in range(len(SIZES)):
        x = {"w": w[i].double(), "g": g[i].double(), "e": w[i].double() - w0[i].double()}
        since = parts.get("before", parts.get("anchor", w))[i].double()
        last = parts.get("anchor", parts.get("before", w))[i].double()
        zero = torch.zeros_like(x["w"])
        x |= {"u": x["w"] - since, "v": x["w"] - last, "p": parts["previous"][i].double() if given.moved else zero}
        x["b"] = parts["before"][i].double() if "before" in parts else zero
        for value, (one, other) in zip(found[i], COLUMNS, strict=True):
            size = x[one].norm() * x[other].norm()
            assert abs(value - x[one] @ x[other]) <= 1e-13 * size
        if given.previous is not None:
            assert torch.equal(layout.views(given.previous)[i], x["v"].to(dtype))


@pytest.mark.parametrize("way", [Native, Staged])
def test_a_skipped_step_keeps_the_last_displacement_and_its_square(way: type[Staged]) -> None:
    layout = Layout.of(list(SIZES))
    w, g, before, w0 = (random(i, torch.float32) for i in range(4))
    moves, previous = way(layout, torch.device("cpu"), torch.float32), torch.zeros(layout.total)
    given = Remembered(flat(layout, w0), flat(layout, before), None, previous, False)
    moves.products(w, g, given)
    displacement = previous.clone()
    moves.products(before, g, replace(given, moved=True, skip=torch.ones(())))
    assert torch.equal(previous, displacement)
    squares = moves.products(w, g, replace(given, moved=True))[:, COLUMNS.index("pp")]
    expected = torch.stack([view.double().square().sum() for view in layout.views(displacement)])
    torch.testing.assert_close(squares, expected, rtol=1e-6, atol=0)
