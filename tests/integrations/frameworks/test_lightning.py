"""What a fit of Lightning's trainer records, and that the training is the same (needs lightning)."""

from __future__ import annotations

import logging
import os
import pickle
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import gyroscope
import two_ranks
from gyroscope.diagnosis.finding import FindingError
from gyroscope.errors import LayerError, MissingExtraError, MonitorError
from gyroscope.integrations import lightning as integration
from oracles.monitor import COSINES, WEIGHT_SIDE, Copies, measured

L = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to fix

GyroscopeCallback = integration.GyroscopeCallback
PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
BATCHES = 6


def mlp(width: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count: int = BATCHES, *, first: int = 0) -> torch.utils.data.DataLoader[Any]:
    def batch(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(8, 5, generator=generator), torch.randint(3, (8,), generator=generator)

    return torch.utils.data.DataLoader([batch(first + seed) for seed in range(count)], batch_size=None)


def followed(optimizer: torch.optim.Optimizer, net: nn.Module) -> Copies:
    """Copies of the layers at every step of an optimizer, by a hook of its own."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = [layer.parameter for layer in gyroscope.layers(net) if id(layer.parameter) in held]
    copies = Copies(lambda: parameters)

    def stepped(*_: Any) -> None:
        copies.keep_gradients()
        copies.keep_step(optimizer)

    optimizer.register_step_post_hook(stepped)
    return copies


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def classifier(package: Any = L, make: Any = sgd, *, net: nn.Module | None = None, **hooks: Any) -> Any:
    """A module that classifies; `make` gets its parameters, and `hooks` are further methods."""

    class Classifier(package.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp() if net is None else net
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            made = make(self.parameters())
            self.copies = followed(made, self) if isinstance(made, torch.optim.Optimizer) else None
            return made

    for name, hook in hooks.items():
        setattr(Classifier, name, hook)
    return Classifier()


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    def make(*callbacks: Any, package: Any = L, **options: Any) -> Any:
        plain = {
            "accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_progress_bar": False,
            "enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": tmp_path,
        }  # fmt: skip
        return package.Trainer(callbacks=list(callbacks), **plain | options)

    return make


def assert_measured(path: Path, copies: Copies, *, columns: slice = slice(None), leave_out: str = "") -> None:
    """Every step and quantity of these layers is that of the oracle."""
    expected = measured(copies, range(copies.steps + 1))
    with gyroscope.load(path) as run:
        rows = np.flatnonzero(np.isfinite(run.series("weight_norm")[:, columns]).all(1))
        assert run.steps[rows].tolist() == list(range(copies.steps + 1))
        for name in [name for name in WEIGHT_SIDE if name != leave_out]:
            got, want = run.series(name)[rows][:, columns], expected[name]
            first = 1 if "lr" in name or name == "weight_decay" else 0
            small = 3e-7 if name in COSINES and name != "rotation" else 0.0
            np.testing.assert_allclose(got[first:], want[first:], rtol=1e-5, atol=small, err_msg=name)


def turned(start: nn.Module, now: nn.Module) -> list[float]:
    """The rotation of every layer, in float64."""
    pairs = [[one.parameter.detach().double().flatten() for one in gyroscope.layers(net)] for net in (start, now)]
    return [1 - float(a @ b / a.norm() / b.norm()) for a, b in zip(*pairs, strict=True)]


def weights(module: Any) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def assert_same(one: Any, other: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", PACKAGES)
def test_the_callback_is_one_of_the_trainers_own_package(name: str, trainer: Any, tmp_path: Path) -> None:
    package = import_module(name)
    callback = GyroscopeCallback(tmp_path / "run")
    assert isinstance(callback, package.Callback)
    alone = package.Trainer(callbacks=callback, accelerator="cpu", logger=False, default_root_dir=tmp_path)
    assert callback in alone.callbacks
    copied = pickle.loads(pickle.dumps(callback))  # as Lightning does to start other processes
    assert type(copied) is GyroscopeCallback
    module = classifier(package)
    trainer(copied, package=package).fit(module, batches())
    assert copied.path == tmp_path / "run"
    assert_measured(tmp_path / "run", module.copies)


@pytest.mark.parametrize("name", PACKAGES)
def test_the_training_is_the_same_to_the_bit(name: str, trainer: Any, tmp_path: Path) -> None:
    package = import_module(name)
    plain, watched = (classifier(package, validation_step=validates) for _ in range(2))
    trainer(package=package, max_epochs=2).fit(plain, batches(), batches(2, first=50))
    callback = GyroscopeCallback(tmp_path / "run", neurons=True, conditioning=2, detail_every=2)
    trainer(callback, package=package, max_epochs=2).fit(watched, batches(), batches(2, first=50))
    assert_same(weights(plain), weights(watched))
    assert plain.losses == watched.losses


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (sgd, {}),
        (partial(sgd, nesterov=True, weight_decay=0.01), {}),
        (partial(torch.optim.Adam, lr=0.01), {"accumulate_grad_batches": 2}),
        (sgd, {"accumulate_grad_batches": 4}),  # the last step of an epoch takes the two batches that are left
        (sgd, {"gradient_clip_val": 0.05}),
        (sgd, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (sgd, {"precision": "bf16-mixed"}),
        (sgd, {"max_epochs": -1, "max_steps": 8}),
    ],
)
def test_numbers_equal_the_oracle(make: Any, options: dict[str, Any], trainer: Any, tmp_path: Path) -> None:
    module = classifier(make=make)
    trainer(GyroscopeCallback(tmp_path / "run"), **{"max_epochs": 2, **options}).fit(module, batches())
    assert module.copies.steps > 3
    assert_measured(tmp_path / "run", module.copies)
    with gyroscope.load(tmp_path / "run") as run:
        assert run.layers == ("net.0.weight", "net.2.weight", "net.4.weight")
        assert run.state == "ended"
        assert run.scalars["loss"].steps.tolist() == list(range(1, module.copies.steps + 1))
        # The loss of a step is the mean over its batches.
        parts = options.get("accumulate_grad_batches", 1)
        epochs = [module.losses[i : i + BATCHES] for i in range(0, len(module.losses), BATCHES)]
        expected = [np.mean(epoch[i : i + parts]) for epoch in epochs for i in range(0, len(epoch), parts)]
        np.testing.assert_allclose(run.scalars["loss"].values, expected, rtol=1e-6)


def test_conditioning_is_that_of_the_batch_of_the_step(trainer: Any, tmp_path: Path) -> None:
    module = classifier()
    expected = gyroscope.condition(mlp(), F.cross_entropy, next(iter(batches())))
    trainer(GyroscopeCallback(tmp_path / "run", conditioning=3, budget=None)).fit(module, batches())
    with gyroscope.load(tmp_path / "run") as run:
        assert run.where("lambda_f").tolist() == [1, 3, 6]
        np.testing.assert_allclose(run.series("lambda_f")[1], [row["lambda_f"] for row in expected.rows()], rtol=2e-5)


class Gan(L.LightningModule):  # type: ignore[misc,name-defined]
    """Two networks under manual optimization; the second takes two steps for each of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.g = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))
        self.d = nn.Linear(5, 1)
        self.temperature = nn.Parameter(torch.ones(()))

    def configure_optimizers(self) -> Any:
        made = [torch.optim.Adam(self.g.parameters(), 0.01), torch.optim.SGD([self.temperature], 0.1)]
        made.append(torch.optim.SGD(self.d.parameters(), 0.1, momentum=0.5, nesterov=True))
        self.copies = {"g": followed(made[0], self.g), "d": followed(made[2], self.d)}
        return made

    def training_step(self, batch: Any, index: int) -> None:
        g, temperature, d = self.optimizers()
        x, _ = batch
        for _ in range(2):
            d.zero_grad()
            self.manual_backward(self.d(self.g(x[:, :4]).detach()).mean() - self.d(x).mean())
            d.step()
        g.zero_grad()
        temperature.zero_grad()
        loss = -self.temperature * self.d(self.g(x[:, :4])).mean()
        self.manual_backward(loss)
        g.step()
        temperature.step()
        self.log("g_loss", loss)


def test_each_of_several_optimizers_counts_its_steps_under_manual_optimization(trainer: Any, tmp_path: Path) -> None:
    module = Gan()
    trainer(GyroscopeCallback(tmp_path / "run")).fit(module, batches(4))
    with gyroscope.load(tmp_path / "run") as run:
        assert run.layers == ("g.0.weight", "g.2.weight", "d.weight")
        assert [layer.part for layer in run.layer_table] == [0, 0, 1]  # the temperature has no layer to measure
        assert run.scalars["g_loss"].steps.tolist() == [2, 4, 6, 8]
    assert (module.copies["g"].steps, module.copies["d"].steps) == (4, 8)
    assert_measured(tmp_path / "run", module.copies["g"], columns=slice(0, 2))
    assert_measured(tmp_path / "run", module.copies["d"], columns=slice(2, 3))


def test_patterns_choose_among_the_layers_of_several_optimizers(trainer: Any, tmp_path: Path) -> None:
    module = Gan()
    trainer(GyroscopeCallback(tmp_path / "run", layers="d.*")).fit(module, batches(3))
    with gyroscope.load(tmp_path / "run") as run:
        assert run.layers == ("d.weight",)
    assert_measured(tmp_path / "run", module.copies["d"])


def test_a_gan_is_resumed_with_the_steps_of_each_optimizer(trainer: Any, tmp_path: Path) -> None:
    whole, first, second = Gan(), Gan(), Gan()
    trainer(GyroscopeCallback(tmp_path / "whole"), max_epochs=2).fit(whole, batches(3))
    one = trainer(GyroscopeCallback(tmp_path / "run"))
    one.fit(first, batches(3))
    one.save_checkpoint(tmp_path / "one.ckpt")
    trainer(GyroscopeCallback(tmp_path / "run"), max_epochs=2).fit(second, batches(3), ckpt_path=tmp_path / "one.ckpt")
    assert_same(weights(whole), weights(second))
    assert_measured(tmp_path / "run", whole.copies["g"], columns=slice(0, 2), leave_out="alignment")
    assert_measured(tmp_path / "run", whole.copies["d"], columns=slice(2, 3), leave_out="alignment")


def with_layca(parameters: Any) -> gyroscope.Layca:
    return gyroscope.Layca(torch.optim.Adam(parameters, lr=0.05))


def test_layca_turns_every_layer_by_the_scheduled_rate(trainer: Any, tmp_path: Path) -> None:
    def configure(self: Any) -> Any:
        optimizer = gyroscope.Layca(sgd(self.parameters(), lr=0.05), self)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module = classifier(configure_optimizers=configure)
    trainer(GyroscopeCallback(tmp_path / "run"), max_epochs=2).fit(module, batches())
    with gyroscope.load(tmp_path / "run") as run:
        expected = np.arctan(0.05 * 0.8 ** np.arange(2 * BATCHES))
        np.testing.assert_allclose(run.series("rate")[1:], np.repeat(expected[:, None], 3, axis=1), rtol=1e-4)
        norms = run.series("weight_norm")
        np.testing.assert_allclose(norms, np.broadcast_to(norms[0], norms.shape), rtol=1e-6)


@pytest.mark.parametrize("make", [sgd, partial(torch.optim.Adam, lr=0.01), with_layca])
def test_a_resumed_fit_continues_the_curves_from_the_same_start(make: Any, trainer: Any, tmp_path: Path) -> None:
    whole, first, second = classifier(make=make), classifier(make=make), classifier(make=make)
    trainer(GyroscopeCallback(tmp_path / "whole"), max_epochs=3).fit(whole, batches())
    saves = L.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    trainer(GyroscopeCallback(tmp_path / "run"), saves, enable_checkpointing=True).fit(first, batches())
    with torch.no_grad():
        second.net[0].weight.fill_(7.0)  # the checkpoint has the weights, and the start
    resumed = trainer(GyroscopeCallback(tmp_path / "run"), max_epochs=3)
    resumed.fit(second, batches(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert_same(weights(whole), weights(second))
    with gyroscope.load(tmp_path / "whole") as one, gyroscope.load(tmp_path / "run") as two:
        assert two.steps.tolist() == one.steps.tolist() == list(range(3 * BATCHES + 1))
        for name in ("rotation", "rate", "weight_norm", "gradient_norm", "update_norm"):
            np.testing.assert_array_equal(one.series(name), two.series(name), err_msg=name)
        assert [event.step for event in two.events if event.kind == "resume"] == [BATCHES]
        np.testing.assert_array_equal(one.scalars["loss"].values, two.scalars["loss"].values)


def test_a_fit_from_an_earlier_checkpoint_replaces_what_came_after_it(trainer: Any, tmp_path: Path) -> None:
    first, second = classifier(), classifier()
    saves = L.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    trainer(GyroscopeCallback(tmp_path / "run"), saves, enable_checkpointing=True, max_epochs=3).fit(first, batches())
    again = trainer(GyroscopeCallback(tmp_path / "run"), max_epochs=2)
    again.fit(second, batches(), ckpt_path=tmp_path / "epoch=0.ckpt")
    with gyroscope.load(tmp_path / "run") as run:
        assert run.steps.tolist() == list(range(2 * BATCHES + 1))
        assert len(run.attempts) == 2


def test_a_checkpoint_may_go_on_in_another_folder(trainer: Any, tmp_path: Path) -> None:
    first, second = classifier(), classifier()
    one = trainer(GyroscopeCallback(tmp_path / "run"))
    one.fit(first, batches())
    one.save_checkpoint(tmp_path / "one.ckpt")
    assert torch.load(tmp_path / "one.ckpt", weights_only=True)["callbacks"]["GyroscopeCallback"]["steps"] == [BATCHES]
    trainer(GyroscopeCallback(tmp_path / "other"), max_epochs=2).fit(second, batches(), ckpt_path=tmp_path / "one.ckpt")
    with gyroscope.load(tmp_path / "other") as run:
        assert run.steps.tolist() == list(range(BATCHES + 1, 2 * BATCHES + 1))
        np.testing.assert_allclose(run.series("rotation")[-1], turned(mlp(), second), rtol=1e-5)


def test_a_checkpoint_without_a_state_is_measured_from_its_weights(trainer: Any, tmp_path: Path) -> None:
    one = trainer()
    one.fit(classifier(), batches())
    one.save_checkpoint(tmp_path / "one.ckpt")
    callback = GyroscopeCallback(tmp_path / "run")
    trainer(callback, max_epochs=2).fit(classifier(), batches(), ckpt_path=tmp_path / "one.ckpt")
    with gyroscope.load(tmp_path / "run") as run:
        assert run.steps.tolist() == list(range(BATCHES + 1))
        assert run.series("rotation")[0].tolist() == [0, 0, 0]


def logs(self: Any, batch: Any, index: int) -> Tensor:
    x, y = batch
    loss = F.cross_entropy(self.net(x), y)
    self.losses.append(float(loss.detach()))
    self.log("train", loss, on_step=True, on_epoch=True, prog_bar=True)
    self.log("hidden", loss, logger=False)
    if index % 3 == 0:
        self.log("seldom", loss.detach() * 0 + index, on_step=True, on_epoch=False)
    return loss


def validates(self: Any, batch: Any, index: int) -> None:
    x, y = batch
    self.log("val", F.cross_entropy(self.net(x), y), batch_size=1)


def test_logged_metrics_are_recorded_once_each_under_the_names_of_loggers(trainer: Any, tmp_path: Path) -> None:
    found: list[float] = []
    module = classifier(
        training_step=logs,
        validation_step=validates,
        on_train_batch_end=lambda self, *_: self.log("late", float(self.global_step)),
        on_train_epoch_end=lambda self: self.log("epoch_end", float(self.current_epoch)),
        on_validation_end=lambda self: found.append(float(self.trainer.callback_metrics["val"])),
    )
    fits = trainer(GyroscopeCallback(tmp_path / "run"), max_epochs=2, val_check_interval=3)
    fits.fit(module, batches(), batches(2, first=50))
    with gyroscope.load(tmp_path / "run") as run:
        scalars = {name: (s.steps.tolist(), s.values.tolist()) for name, s in run.scalars.items()}
    each = list(range(1, 2 * BATCHES + 1))
    epochs = np.array(module.losses).reshape(2, BATCHES).mean(1)
    assert sorted(scalars) == ["epoch_end", "late", "loss", "seldom", "train_epoch", "train_step", "val"]
    assert scalars["loss"][0] == scalars["train_step"][0] == scalars["late"][0] == each
    np.testing.assert_allclose(scalars["train_step"][1], module.losses, rtol=1e-6)
    np.testing.assert_allclose(scalars["train_epoch"][1], epochs, rtol=1e-6)
    assert scalars["train_epoch"][0] == scalars["epoch_end"][0] == [6, 12]
    assert scalars["late"][1] == each
    assert scalars["epoch_end"][1] == [0.0, 1.0]
    assert scalars["seldom"] == ([1, 4, 7, 10], [0.0, 3.0, 0.0, 3.0])
    assert scalars["val"] == ([3, 6, 9, 12], found[-4:])  # the sanity check is not among them


def test_validation_is_not_measured(trainer: Any, tmp_path: Path) -> None:
    plain, checked = classifier(), classifier(validation_step=validates)
    trainer(GyroscopeCallback(tmp_path / "plain", detail_every=1, budget=None)).fit(plain, batches())
    fits = trainer(GyroscopeCallback(tmp_path / "run", detail_every=1, budget=None), val_check_interval=2)
    fits.fit(checked, batches(), batches(3, first=50))  # with two steps of sanity check before
    with gyroscope.load(tmp_path / "plain") as one, gyroscope.load(tmp_path / "run") as two:
        assert {"dying", "input_mean", "gradient_carried"} <= set(one.quantities)
        assert two.steps.tolist() == list(range(BATCHES + 1))
        for name in one.quantities:
            np.testing.assert_array_equal(one.series(name), two.series(name), err_msg=name)


def test_a_second_fit_continues_the_run_from_the_same_start(trainer: Any, tmp_path: Path) -> None:
    module = classifier()
    fits = trainer(GyroscopeCallback(tmp_path / "run"))
    fits.fit(module, batches())
    fits.fit(module, batches())  # max_epochs is reached: Lightning takes no step
    fits.fit_loop.max_epochs = 2
    fits.fit(module, batches())
    with gyroscope.load(tmp_path / "run") as run:
        assert run.steps.tolist() == list(range(2 * BATCHES + 1))
        np.testing.assert_allclose(run.series("rotation")[-1], turned(mlp(), module), rtol=1e-5)


def test_without_a_folder_all_fits_of_a_callback_share_a_new_one(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module, callback = classifier(), GyroscopeCallback()
    for _ in range(2):
        trainer(callback).fit(module, batches())
    (folder,) = (tmp_path / "runs").iterdir()
    assert callback.path == folder
    with gyroscope.load(folder) as run:
        assert run.steps.tolist() == list(range(2 * BATCHES + 1))


def test_a_model_that_was_changed_between_fits_is_refused_before_a_step(trainer: Any, tmp_path: Path) -> None:
    callback = GyroscopeCallback(tmp_path / "run")
    trainer(callback).fit(classifier(), batches())
    changed = classifier(net=mlp(width=20))
    before = weights(changed)
    with pytest.raises(MonitorError, match=r"another model.*\(12, 5\).*\(20, 5\).*Pass another folder"):
        trainer(callback).fit(changed, batches())
    assert_same(before, weights(changed))
    assert callback.monitor is None
    with gyroscope.load(tmp_path / "run") as run:
        assert (run.state, run.steps.tolist()) == ("ended", list(range(BATCHES + 1)))


@pytest.mark.parametrize("folder", ["run", "other"])
def test_a_state_of_other_layers_is_refused_before_anything_is_made(folder: str, trainer: Any, tmp_path: Path) -> None:
    one = trainer(GyroscopeCallback(tmp_path / "run"))
    one.fit(classifier(), batches())
    one.save_checkpoint(tmp_path / "one.ckpt")
    callback, module = GyroscopeCallback(tmp_path / folder, layers="net.[24].*"), classifier()
    with pytest.raises(MonitorError, match=r"this choice of layers, got the layer 'net.0.weight'"):
        trainer(callback, max_epochs=2).fit(module, batches(), ckpt_path=tmp_path / "one.ckpt")
    assert module.copies.steps == 0
    assert not (tmp_path / "other").exists()


def test_evaluating_a_checkpoint_does_not_decide_where_the_next_fit_begins(trainer: Any, tmp_path: Path) -> None:
    callback, module = GyroscopeCallback(tmp_path / "run"), classifier(validation_step=validates)
    fits = trainer(callback)
    fits.fit(module, batches())
    fits.save_checkpoint(tmp_path / "one.ckpt")
    fits.validate(module, batches(1), ckpt_path=tmp_path / "one.ckpt", verbose=False)
    with torch.no_grad():
        module.net[0].weight += torch.randn_like(module.net[0].weight)
    fits.fit_loop.max_epochs = 2
    fits.fit(module, batches())
    with gyroscope.load(tmp_path / "run") as run:  # other weights: another attempt, from step 0
        assert run.steps.tolist() == list(range(BATCHES + 1))
        assert len(run.attempts) == 2


def test_a_fit_that_raises_leaves_a_run_that_can_be_read_and_resumed(trainer: Any, tmp_path: Path) -> None:
    def fails(self: Any, trained: Any) -> None:
        if self.global_step == 4 and not tmp_path.joinpath("on.ckpt").exists():
            raise RuntimeError("no more data")

    first, second = classifier(on_before_zero_grad=fails), classifier(on_before_zero_grad=fails)
    saves = L.callbacks.OnExceptionCheckpoint(tmp_path, "on")
    callback = GyroscopeCallback(tmp_path / "run")
    with pytest.raises(RuntimeError, match="no more data"):
        trainer(callback, saves, enable_checkpointing=True).fit(first, batches())
    assert callback.monitor is None
    with gyroscope.load(tmp_path / "run") as run:
        assert (run.state, run.steps.tolist()) == ("interrupted", [0, 1, 2, 3, 4])
        assert run.events[-1].text == "stopped by RuntimeError: no more data"
        assert run.scalars["loss"].steps.tolist() == [1, 2, 3, 4]
    assert torch.load(tmp_path / "on.ckpt", weights_only=True)["callbacks"]["GyroscopeCallback"]["steps"] == [4]
    again = trainer(callback, max_epochs=2)
    again.fit(second, batches(), ckpt_path=tmp_path / "on.ckpt")
    assert again.global_step > BATCHES
    with gyroscope.load(tmp_path / "run") as run:
        assert (run.state, run.steps.tolist()) == ("ended", list(range(again.global_step + 1)))
        np.testing.assert_allclose(run.series("rotation")[-1], turned(mlp(), second), rtol=1e-5)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_before_zero_grad"])
def test_a_fit_that_raises_records_what_was_logged_at_its_last_step(hook: str, trainer: Any, tmp_path: Path) -> None:
    class Stops(L.Callback):
        pass

    def stops(self: Any, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            raise RuntimeError("no more data")

    setattr(Stops, hook, stops)
    module = classifier(training_step=logs)
    with pytest.raises(RuntimeError, match="no more data"):
        trainer(GyroscopeCallback(tmp_path / "run"), Stops()).fit(module, batches())
    with gyroscope.load(tmp_path / "run") as run:
        assert run.state == "interrupted"
        assert run.scalars["train_step"].steps.tolist() == [1, 2, 3, 4]
        np.testing.assert_allclose(run.scalars["train_step"].values, module.losses[:4], rtol=1e-6)


def diverging(self: Any) -> Any:
    return torch.optim.SGD(self.parameters(), 1e4)


def test_findings_go_to_the_log_and_to_the_function(
    trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[Any] = []
    module = classifier(configure_optimizers=diverging)
    with caplog.at_level(logging.WARNING, "gyroscope"):
        callback = GyroscopeCallback(tmp_path / "run", on_finding=found.append)
        trainer(callback, max_epochs=10).fit(module, batches())
    assert found
    assert all(any(one.sentence in record.getMessage() for record in caplog.records) for one in found)
    with gyroscope.load(tmp_path / "run") as run:
        assert {event.text for event in run.events if event.kind == "finding"} == {
            f"{one.severity}: {one.sentence}" for one in found
        }


def test_a_serious_finding_can_end_the_fit(trainer: Any, tmp_path: Path) -> None:
    module = classifier(configure_optimizers=diverging)
    # The rules are evaluated on another thread, which a fit of microseconds would outrun.
    module.on_train_batch_end = lambda *_: callback.monitor.flush()
    callback = GyroscopeCallback(tmp_path / "run", on_finding="raise")
    with pytest.raises(FindingError):
        trainer(callback, max_epochs=10).fit(module, batches())
    with gyroscope.load(tmp_path / "run") as run:
        assert run.state == "interrupted"
        assert run.steps[-1] < 10 * BATCHES


def test_trials_of_a_learning_rate_finder_are_not_measured(trainer: Any, tmp_path: Path) -> None:
    def configure(self: Any) -> Any:
        self.copies = followed(made := sgd(self.parameters(), lr=self.lr), self)
        return made

    module = classifier(configure_optimizers=configure, lr=0.1)
    finder = L.callbacks.LearningRateFinder(num_training_steps=8, update_attr=False)
    trainer(GyroscopeCallback(tmp_path / "run"), finder).fit(module, batches(20))
    with gyroscope.load(tmp_path / "run") as run:
        assert run.steps.tolist() == list(range(21))
        np.testing.assert_allclose(run.series("rotation")[-1], turned(mlp(), module), rtol=1e-5)


def test_a_fast_run_for_development_measures_and_leaves_nothing(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    steps: list[Any] = []
    module = classifier()
    callback = GyroscopeCallback(tmp_path / "run")
    module.on_train_batch_end = lambda *_: steps.append((callback.monitor.run.steps.tolist(), callback.monitor.path))
    trainer(callback, fast_dev_run=3).fit(module, batches())
    assert [taken for taken, _ in steps] == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert steps[0][1].is_relative_to(tmp_path / "temporary")
    assert not (tmp_path / "run").exists()
    assert list((tmp_path / "temporary").iterdir()) == []
    assert callback.path is None


@pytest.mark.parametrize("what", ["module", "network"])
def test_a_compiled_module_is_measured_and_not_compiled_again(what: str, trainer: Any, tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if what == "module":
        module = classifier(training_step=lambda self, batch, _: F.cross_entropy(self.net(batch[0]), batch[1]))
        trainer(GyroscopeCallback(tmp_path / "run")).fit(torch.compile(module, backend="eager"), batches())
    else:
        module = classifier(net=torch.compile(mlp(), backend="eager"))
        trainer(GyroscopeCallback(tmp_path / "run")).fit(module, batches())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert_measured(tmp_path / "run", module.copies)
    with gyroscope.load(tmp_path / "run") as run:
        (note,) = [event.text for event in run.events if event.kind == "note"]
        assert "is compiled, so temporary hooks do not see its activations" in note


class Odd:
    """Looks like an optimizer to Lightning."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups: list[Any] = [{"params": list(parameters)}]
        self.defaults: dict[str, Any] = {}
        self.state: dict[Any, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...

    def zero_grad(self) -> None: ...

    def step(self, closure: Any = None) -> Any:
        raise AssertionError("a step was taken")


@pytest.mark.parametrize(
    ("make", "options", "error", "match"),
    [
        (Odd, {}, MonitorError, "must be a torch.optim.Optimizer or a list of them, got a Odd"),
        (lambda _: None, {}, MonitorError, "`configure_optimizers` must return an optimizer, got none"),
        (lambda _: sgd([nn.Parameter(torch.ones(2, 2))]), {}, MonitorError, "must step layers of the model, got one"),
        (sgd, {"layers": "conv*"}, LayerError, "conv"),
        (sgd, {"every": 0}, MonitorError, "`every` must be a whole number ≥ 1, got 0"),
        (sgd, {"quantities": ["rotations"]}, MonitorError, "rotations"),
    ],
)
def test_what_cannot_be_watched_is_refused_before_a_step(
    make: Any, options: dict[str, Any], error: type[Exception], match: str, trainer: Any, tmp_path: Path
) -> None:
    module = classifier(make=make)
    before = weights(module)
    with pytest.raises(error, match=match):
        trainer(GyroscopeCallback(tmp_path / "run", **options)).fit(module, batches())
    assert_same(before, weights(module))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("name", "by"), [("DeepSpeedStrategy", "ZeRO"), ("FSDPStrategy", "FSDP1")])
def test_strategies_that_flatten_parameters_are_refused(name: str, by: str, package: str) -> None:
    strategy = getattr(import_module(f"{package}.strategies"), name)
    trainer = SimpleNamespace(strategy=strategy.__new__(strategy), callbacks=[])  # these need a GPU to begin a fit
    with pytest.raises(MonitorError, match=rf"got {name}, which flattens them \({by}\).*ModelParallelStrategy"):
        GyroscopeCallback("run").setup(trainer, None, "fit")
    GyroscopeCallback("run").setup(trainer, None, "test")  # nothing is watched then


def test_two_callbacks_in_one_trainer_are_refused(trainer: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `GyroscopeCallback`"):
        trainer(GyroscopeCallback(tmp_path / "a"), GyroscopeCallback(tmp_path / "b"))
    fits = trainer(GyroscopeCallback(tmp_path / "a"))
    fits.callbacks.append(GyroscopeCallback(tmp_path / "b"))
    with pytest.raises(MonitorError, match="one GyroscopeCallback, got several"):
        fits.fit(classifier(), batches())
    assert not (tmp_path / "a").exists()


def test_a_callback_that_watches_is_refused_by_another_trainer_and_goes_on(trainer: Any, tmp_path: Path) -> None:
    def fits_another(self: Any, *_: Any) -> None:
        if self.global_step == 2:
            with pytest.raises(MonitorError, match="watches another fit, which has not ended"):
                trainer(callback).fit(classifier(), batches(2))

    callback, module = GyroscopeCallback(tmp_path / "run"), classifier(on_train_batch_end=fits_another)
    trainer(callback).fit(module, batches())
    assert_measured(tmp_path / "run", module.copies)


@pytest.mark.parametrize(
    ("option", "hint"), [("optimizer", "the trainer's to give"), ("evry", "Try one of activations")]
)
def test_options_are_those_of_watch(option: str, hint: str) -> None:
    with pytest.raises(MonitorError, match=f"got '{option}'. .*{hint}"):
        GyroscopeCallback("run", **{option: 1})


def test_without_lightning_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(integration, "import_module", missing)
    integration._made.cache_clear()
    try:
        with pytest.raises(MissingExtraError, match=r"pip install 'gyroscope\[lightning\]'"):
            integration.GyroscopeCallback  # noqa: B018
        assert not hasattr(integration, "GyroscopeCallbak")
        found = L.Callback
        monkeypatch.setattr(
            integration, "import_module", lambda name: L if name == "lightning.pytorch" else missing(name)
        )
        assert integration.GyroscopeCallback.__bases__[1:] == (found,)
    finally:
        integration._made.cache_clear()


# What two ranks agree on, each in a process of its own, as torchrun starts them.


def optimizer_of(net: nn.Module, shards: bool) -> torch.optim.Optimizer:
    return gyroscope.Layca(sgd(net.parameters(), lr=0.05)) if shards else sgd(net.parameters())


class Halves(L.LightningModule):  # type: ignore[misc,name-defined]
    """Every rank trains on its part of a batch."""

    def __init__(self, shards: bool = False) -> None:
        super().__init__()
        self.shards, self.net = shards, mlp()

    def configure_model(self) -> None:
        if self.shards:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = (part[self.global_rank :: self.trainer.world_size] for part in batch)
        loss = F.cross_entropy(self.net(x), y)
        self.log("mean", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return optimizer_of(self, self.shards)


def fit(folder: Path, module: Halves, *, max_epochs: int = 1, ckpt_path: Path | None = None) -> Any:
    sharding = L.strategies.ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)
    trains = L.Trainer(
        accelerator="cpu", devices=2, strategy=sharding if module.shards else "ddp", use_distributed_sampler=False,
        max_epochs=max_epochs, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=folder,
        callbacks=[GyroscopeCallback(folder / "run", budget=None)],
    )  # fmt: skip
    trains.fit(module, batches(), ckpt_path=ckpt_path)
    return trains


def assert_as_one(folder: Path, *, epochs: int, shards: bool) -> None:
    """The run of the two ranks is that of a plain loop over whole batches."""
    if dist.get_rank() != 0:
        return
    net, losses = mlp(), []
    optimizer = optimizer_of(net, shards)
    copies = followed(optimizer, net)
    for x, y in [*batches()] * epochs:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    expected = measured(copies, range(copies.steps + 1))
    with gyroscope.load(folder / "run") as run:
        assert (run.state, run.steps.tolist()) == ("ended", list(range(epochs * BATCHES + 1)))
        for name in ("rotation", "rate", "weight_norm", "gradient_norm"):
            np.testing.assert_allclose(run.series(name), expected[name], rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(run.scalars["mean"].values, losses, rtol=1e-5)


def data_parallel_ranks_record_what_one_process_does(folder: Path) -> None:
    fit(folder, Halves())
    assert_as_one(folder, epochs=1, shards=False)


def resumed_data_parallel_ranks_continue_the_run(folder: Path) -> None:
    fit(folder, Halves()).save_checkpoint(folder / "one.ckpt")
    fit(folder, Halves(), max_epochs=2, ckpt_path=folder / "one.ckpt")
    assert_as_one(folder, epochs=2, shards=False)


def sharded_ranks_record_and_resume_what_one_process_does(folder: Path) -> None:
    fit(folder, Halves(shards=True)).save_checkpoint(folder / "one.ckpt")
    fit(folder, Halves(shards=True), max_epochs=2, ckpt_path=folder / "one.ckpt")
    assert_as_one(folder, epochs=2, shards=True)


def a_folder_of_another_model_is_refused_on_both_ranks(folder: Path) -> None:
    fit(folder, Halves())
    other = Halves()
    other.net = mlp(width=20)
    with pytest.raises(MonitorError, match="another model"):
        fit(folder, other)


CLAIMS = [
    data_parallel_ranks_record_what_one_process_does,
    resumed_data_parallel_ranks_continue_the_run,
    sharded_ranks_record_and_resume_what_one_process_does,
    a_folder_of_another_model_is_refused_on_both_ranks,
]


def rank(number: int, folder: str) -> None:
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    os.environ |= dict(zip(names, map(str, (number, number, 0, 2, 2, "none")), strict=True))
    two_ranks.run(CLAIMS, number, folder)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    return two_ranks.outcome(rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("claim", [claim.__name__ for claim in CLAIMS])
def test_two_ranks_agree_that(claim: str, outcome: tuple[list[str], str]) -> None:
    two_ranks.assert_held(claim, CLAIMS, outcome)
