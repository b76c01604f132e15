"""On a GPU: nothing waits, nothing changes, and ranks are those of the singular values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gyroscope
from gyroscope.monitor.detail import moment_percentiles
from gyroscope.passes.activations import ActivationProbe, numerical_rank
from oracles.activations import rank

pytestmark = pytest.mark.gpu


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 16, 3), nn.ReLU(),
        nn.Flatten(2), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Flatten(), nn.Linear(256, 10),
    ).cuda()  # fmt: skip


def train(model: nn.Module, *, looking: bool) -> tuple[list[Tensor], Tensor, Tensor | None]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    layers = gyroscope.layers(model)
    probe = ActivationProbe(model, layers)
    x = torch.randn(32, 1, 8, 8, device="cuda")
    losses, found, moments = [], torch.empty(0), None
    for step in range(4):
        if looking:
            probe.reset()
            probe.attach()
        if step:  # the first step loads libraries
            torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).logsumexp(1).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if looking:
                probe.detach()
                found = probe.collect()
                moments = moment_percentiles(optimizer, [layer.parameter for layer in layers], most=200)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses.append(loss.detach().clone())
    assert probe.error is None
    return [*losses, *[v.clone() for v in model.state_dict().values()], torch.cuda.get_rng_state()], found, moments


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_and_training_is_the_same_to_the_bit():
    bare, _, _ = train(net(), looking=False)
    looked_at, found, moments = train(net(), looking=True)
    assert all(a.equal(b) for a, b in zip(bare, looked_at, strict=True))
    assert found.is_cuda
    assert found.isnan().any(1).sum() == 1  # the attention's input projection
    assert moments is not None
    assert moments.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(512, 200), (100, 300), (64, 64), (1, 7)])
@pytest.mark.parametrize("true", [1, 40, 1000])
def test_the_rank_found_without_pivots_is_that_of_the_singular_values(shape, true, dtype):
    torch.manual_seed(0)
    rows = (torch.randn(shape[0], true) @ torch.randn(true, shape[1]) + 2.0).relu().to(dtype)
    rows[:, ::5] = 0.0
    assert numerical_rank(rows.cuda()).item() == rank(rows.double().numpy(), str(dtype))


def test_the_rank_of_nothing_is_zero():
    assert numerical_rank(torch.zeros(5, 3, device="cuda")).item() == 0
