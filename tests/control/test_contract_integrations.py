"""Trainers that are installed beside torch: they wrap, swap and schedule, and the steps stay the same."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_models import DEVICE, RHO, adamw, assert_close, batch, loss_of, mlp, tangent, train, weights
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


def test_accelerate_trains_as_plain_torch_does() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = mlp()
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, Layca(adamw(model.parameters()), model))
    for seed in range(4):
        optimizer.zero_grad()
        accelerator.backward(loss_of(prepared, batch(seed)))
        optimizer.step()
    assert_close(accelerator.unwrap_model(prepared), _expected(range(4)), 1e-6)


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


def test_the_hugging_face_trainer_turns_by_the_scheduled_rate(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": loss_of(self.net, x)}

    model = Model()
    before = weights(model)
    optimizer = Layca(adamw(model.parameters()), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=1, per_device_train_batch_size=8, use_cpu=True, report_to=[], save_strategy="no"
    )
    data = [{"x": x} for x in batch(0)]
    transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, scheduler)).train()
    assert tangent(before[0], model.net[0].weight) == pytest.approx(RHO, rel=1e-4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(RHO / 10)
