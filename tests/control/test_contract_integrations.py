"""A trainer that is installed beside torch wraps and swaps, and the steps stay the same."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_models import DEVICE, adamw, assert_close, batch, loss_of, mlp, train
from torch import Tensor

from gyroscope import Layca

pytestmark = [
    pytest.mark.any_device,
    pytest.mark.filterwarnings("default"),  # theirs are not ours to fix
    pytest.mark.skipif(DEVICE.type != "cpu", reason="these are told to stay on the CPU"),
]


def _expected(seeds: range) -> torch.nn.Module:
    model = mlp()
    train(model, Layca(adamw(model.parameters()), model), seeds)
    return model


def test_lightning_trains_as_plain_torch_does(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning" if find_spec("lightning") else "pytorch_lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, x: Tensor, _: int) -> Tensor:
            return loss_of(self.net, x)

        def configure_optimizers(self) -> Any:
            return Layca(adamw(self.net.parameters()), self.net)

    module = Module()
    data = torch.utils.data.DataLoader([batch(seed) for seed in range(4)], batch_size=None)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path
    )
    trainer.fit(module, data)
    assert_close(module.net, _expected(range(4)), 1e-6)
