"""Runs that are watched, broken in a known way and diagnosed: live, from disk and at the command line."""

from __future__ import annotations

import json
import logging
import math
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gyroscope
from gyroscope.cli import app
from gyroscope.diagnosis import Diagnosis, Finding
from gyroscope.diagnosis.course import MOST
from gyroscope.diagnosis.finding import FindingError
from gyroscope.diagnosis.live import Live
from gyroscope.errors import MonitorError
from gyroscope.store import LayerInfo

STEPS = 40


def net(*, norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]
    if norm:
        layers.insert(3, nn.BatchNorm1d(16))
    return nn.Sequential(*layers)


def train(path, *, model=None, lr=0.1, steps=STEPS, clears=True, batches=None, before=None, optimizer=None, **options):
    """Train on a task that can be learned, and return the monitor, closed."""
    model = net() if model is None else model
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 8, generator=generator)
    y = x[:, :4].argmax(1)
    with gyroscope.watch(model, optimizer, path, budget=None, detail_every=10, **options) as monitor:
        for step in range(steps):
            if before is not None:
                before(step, model)
            chosen = torch.randint(256, (64,), generator=generator) if batches is None else batches
            loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
            if clears:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)
    assert monitor.error is None
    return monitor


def kinds(path, **options):
    return [one.kind for one in gyroscope.diagnose(path, **options) if one.is_alarm]


def test_a_healthy_run_has_no_alarm_and_says_so(tmp_path):
    monitor = train(tmp_path / "run")
    found = gyroscope.diagnose(tmp_path / "run")
    assert found.alarms == ()
    assert found.decided
    assert not found.serious
    assert not [event for event in gyroscope.load(monitor.path).events if event.kind == "finding"]


def test_runs_folders_and_monitors_give_the_same_diagnosis(tmp_path):
    monitor = train(tmp_path / "run", lr=100.0)
    with gyroscope.load(tmp_path / "run") as run:
        assert gyroscope.diagnose(run) == gyroscope.diagnose(tmp_path / "run") == gyroscope.diagnose(monitor)


@pytest.mark.parametrize("run", [3, None, object()])
def test_what_is_no_run_is_rejected(run):
    with pytest.raises(MonitorError, match="`run` must be a run, its folder or a monitor"):
        gyroscope.diagnose(run)


def test_an_unknown_kind_is_rejected_everywhere(tmp_path):
    train(tmp_path / "run", steps=2)
    with pytest.raises(MonitorError, match="`mute` must name kinds of finding"):
        gyroscope.diagnose(tmp_path / "run", mute="everything")
    with pytest.raises(MonitorError, match="`mute` must name kinds of finding"):
        gyroscope.watch(net(), torch.optim.SGD(net().parameters(), lr=0.1), tmp_path / "other", mute=["everything"])
    assert not (tmp_path / "other").exists()
    assert CliRunner().invoke(app, ["diagnose", str(tmp_path / "run"), "--mute", "everything"]).exit_code == 2


def test_a_layer_that_no_optimizer_holds(tmp_path):
    model = net()
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if name != "2.weight"], lr=0.1)
    train(tmp_path / "run", model=model, optimizer=optimizer)
    (found,) = gyroscope.diagnose(tmp_path / "run").alarms
    assert (found.kind, found.layers, found.severity) == ("not_in_optimizer", ("2.weight",), "serious")


def test_a_frozen_layer_between_trained_ones(tmp_path):
    model = net()
    model[2].weight.requires_grad_(False)
    train(tmp_path / "run", model=model)
    assert kinds(tmp_path / "run") == ["frozen"]


@pytest.mark.parametrize("how", ["unfrozen", "added to the optimizer"])
def test_a_layer_that_begins_to_train_during_the_run(tmp_path, how):
    model = net()
    late = [*model[2].parameters()]
    if how == "unfrozen":
        model[2].requires_grad_(False)
    held = model.parameters() if how == "unfrozen" else [*model[0].parameters(), *model[4].parameters()]
    optimizer = torch.optim.SGD(held, lr=0.1)

    def begin(step, model):
        if step == 20 and how == "unfrozen":
            model[2].requires_grad_(True)
        elif step == 20:
            optimizer.add_param_group({"params": late})

    train(tmp_path / "run", model=model, optimizer=optimizer, before=begin)
    assert kinds(tmp_path / "run") == []


def test_a_parameter_that_was_replaced(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    train(tmp_path / "run", model=model, optimizer=optimizer)
    (found,) = gyroscope.diagnose(tmp_path / "run").alarms
    assert (found.kind, found.layers) == ("replaced", ("2.weight",))


def test_gradients_that_are_not_cleared(tmp_path):
    train(tmp_path / "run", lr=1e-3, clears=False)
    assert kinds(tmp_path / "run")[0] == "gradients_accumulate"


def test_noise_on_gradients_is_not_left_over(tmp_path):
    """It is there in the first step already."""
    model, x = net(), torch.randn(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None, detail_every=10):
        for _ in range(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            for parameter in model.parameters():
                parameter.grad += parameter.grad.std() * torch.randn_like(parameter)
            optimizer.step()
    carried = gyroscope.load(tmp_path / "run").series("gradient_carried")
    assert np.nanmin(carried[np.isfinite(carried).any(1)], axis=None) > 0.05
    assert "gradients_accumulate" not in kinds(tmp_path / "run")


def test_accumulated_clipped_and_unscaled_gradients_are_the_steps_own(tmp_path):
    """The share that was carried over is exactly zero."""
    model, x = net(), torch.randn(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None, detail_every=1):
        for _ in range(5):
            optimizer.zero_grad()
            for half in (x[:32], x[32:]):
                (1024 * nn.functional.cross_entropy(model(half), torch.zeros(32, dtype=torch.long))).backward()
            for parameter in model.parameters():
                parameter.grad /= 1024
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
    carried = gyroscope.load(tmp_path / "run").series("gradient_carried")
    assert (carried[np.isfinite(carried)] == 0).all()
    assert np.isfinite(carried).any()


def test_gradients_that_are_summed_by_hand_are_the_steps_own(tmp_path):
    """As of batches that are clipped one by one: `.grad` is cleared after each."""
    model, x = net(), torch.randn(64, 8)
    optimizer, parameters = torch.optim.SGD(model.parameters(), lr=0.1), list(model.parameters())
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None, detail_every=1):
        for _ in range(5):
            sums = [torch.zeros_like(parameter) for parameter in parameters]
            for part in x.split(8):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(part), part.argmax(1) % 4).backward()
                for total, parameter in zip(sums, parameters, strict=True):
                    total += parameter.grad
            for total, parameter in zip(sums, parameters, strict=True):
                parameter.grad = total
            optimizer.step()
    carried = gyroscope.load(tmp_path / "run").series("gradient_carried")
    assert (carried[np.isfinite(carried)] == 0).all()
    assert np.isfinite(carried).any()


@pytest.mark.parametrize("to_none", [True, False])
def test_the_networks_of_a_healthy_gan_raise_no_alarm(tmp_path, to_none):
    """The generator's loss has a gradient at the discriminator, which is thrown away."""
    torch.manual_seed(0)
    model = nn.ModuleDict({
        "g": nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)),
        "d": nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)),
    })  # fmt: skip
    both = {name: torch.optim.Adam(one.parameters(), 2e-3, betas=(0.5, 0.999)) for name, one in model.items()}
    mixed, judged = torch.randn(16, 16), nn.functional.binary_cross_entropy_with_logits
    with gyroscope.watch(model, list(both.values()), tmp_path / "run", budget=None, detail_every=10):
        for _ in range(100):
            both["d"].zero_grad(set_to_none=to_none)
            fake = model["g"](torch.randn(32, 8))
            for samples, label in ((torch.randn(32, 16) @ mixed, 1.0), (fake.detach(), 0.0)):
                judged(model["d"](samples), torch.full((32, 1), label)).backward()
            both["d"].step()
            both["g"].zero_grad(set_to_none=to_none)
            judged(model["d"](fake), torch.ones(32, 1)).backward()
            both["g"].step()
    carried = gyroscope.load(tmp_path / "run").series("gradient_carried")
    assert np.isfinite(carried).any(0).sum() == 2  # of one layer each
    assert (carried[np.isfinite(carried)] == 0).all()
    assert kinds(tmp_path / "run") == []


def test_a_head_behind_a_frozen_backbone_in_eval_mode(tmp_path):
    backbone, head = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)).eval(), nn.Linear(16, 4)
    model = nn.Sequential(backbone.requires_grad_(False), head)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    train(tmp_path / "run", model=model, optimizer=optimizer, layers="1.weight")
    assert kinds(tmp_path / "run") == []


def test_normalizers_in_eval_mode(tmp_path):
    train(tmp_path / "run", model=net(norm=True), before=lambda step, model: model[3].eval())
    (found,) = gyroscope.diagnose(tmp_path / "run").alarms
    assert found.kind == "eval_mode"
    train(tmp_path / "other", model=net(norm=True))
    assert kinds(tmp_path / "other") == []


def test_a_normalizer_in_eval_mode_behind_a_parameter_that_is_no_layer(tmp_path):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(1, 16))

        def forward(self, x):
            return self.gamma * x

    model = nn.Sequential(nn.Linear(8, 16), Scale(), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    train(tmp_path / "run", model=model, before=lambda step, model: model[2].eval())
    assert kinds(tmp_path / "run") == ["eval_mode"]


def test_a_repeated_batch(tmp_path):
    train(tmp_path / "run", batches=torch.arange(64))
    assert "repeated_batch" in kinds(tmp_path / "run")


def test_a_weight_that_something_else_changes_is_named_with_its_step(tmp_path):
    def spoil(step, model):
        if step == 30:
            with torch.no_grad():
                model[2].weight[0, 0] = 1e30

    train(tmp_path / "run", before=spoil, on_finding=None)
    found = gyroscope.diagnose(tmp_path / "run").alarms[0]
    assert found.layers[0] == "2.weight"
    assert abs(found.since - 31) <= 1


def test_a_nan_gradient_names_its_layer_and_its_step(tmp_path):
    def poison(step, model):
        if step == 25:
            model[2].weight.register_hook(lambda gradient: gradient * float("nan"))

    train(tmp_path / "run", before=poison)
    found = gyroscope.diagnose(tmp_path / "run").alarms[0]
    assert (found.kind, found.layers[0], found.since) == ("not_finite", "2.weight", 26)


def test_a_regression_with_several_outputs_is_not_compared_with_chance(tmp_path):
    """Its loss may end where guessing would be, were it a cross-entropy."""
    torch.manual_seed(0)
    model, targets = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), torch.randn(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None, detail_every=20) as monitor:
        for _ in range(300):
            x = torch.randn(64, 8)
            loss = nn.functional.mse_loss(model(x), x @ targets + 1.6 * torch.randn(64, 8))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)
    loss = gyroscope.load(tmp_path / "run").scalars["loss"].values
    assert np.log(8) < np.median(loss[150:]) < loss[0] / 2
    assert kinds(tmp_path / "run") == []


LONG_FIRST_STEPS = [(16, 1.0, 0.05, 0), *((64, 5.0, 0.005, seed) for seed in (0, 2, 5))]


@pytest.mark.parametrize(("size", "far", "lr", "seed"), LONG_FIRST_STEPS)
def test_a_long_first_step_of_a_training_that_converges_is_no_alarm(tmp_path, size, far, lr, seed):
    """Also while it is written, and its loss has not come down yet, or is above that of the first batch by chance."""
    torch.manual_seed(seed)
    model, targets = nn.Linear(size, 1), far * torch.randn(size, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None) as monitor:
        for _ in range(60):
            x = torch.randn(64, size)
            loss = nn.functional.mse_loss(model(x), x @ targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)
            monitor.flush()
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None):  # and when it is resumed
        for _ in range(20):
            x = torch.randn(64, size)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x @ targets).backward()
            optimizer.step()
    with gyroscope.load(tmp_path / "run") as run:
        assert run.series("update_ratio")[1] > 0.5
        assert not any(event.kind == "finding" for event in run.events)
    assert kinds(tmp_path / "run") == []


# Live.


def lively(live: Live, step: int, loss: float, **values: float) -> None:
    live.heard(step, {"loss": loss})
    its = {"weight_norm": 1.0, "update_ratio": 0.01, "rotation": 1e-4 * step, "lr": 0.1, **values}
    live.measured(0, [step], {name: np.full((1, 1), value, dtype=np.float32) for name, value in its.items()})


def test_a_long_first_step_waits_for_the_loss_to_halve_as_long_as_the_training_takes():
    live = Live([LayerInfo("w", "linear", (8, 8))], {})
    found = []
    for step in range(2001):  # the loss halves at step 1,040
        lively(live, step, 4.2 * math.exp(-step / 1500), update_ratio=0.9 if step == 1 else 0.01)
        found += live.stated(ends=step == 2000)
    assert found == []


def test_what_a_long_first_step_may_have_caused_is_no_alarm_while_it_waits():
    live = Live([LayerInfo("w", "linear", (8, 8))], {})
    found = []
    for step in range(801):
        lively(live, step, 2.0, update_ratio=0.9 if step == 1 else 0.01, dying_channels=0.99)
        found += live.stated()
    assert found == []
    assert [one.kind for one in live.stated(ends=True)] == ["too_fast"]


@pytest.mark.parametrize("killed", [True, False])
def test_an_alarm_that_waits_for_the_end_of_a_run_is_stated_once_also_if_the_run_is_killed(tmp_path, killed):
    """Of a long first step, after which the loss, that of noise, cannot fall."""
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)

    def go(monitor, *, first=False):
        for step in range(40):
            loss = nn.functional.mse_loss(model(torch.randn(64, 16)), 2 * torch.randn(64, 1))
            optimizer.zero_grad()
            loss.backward()
            if first and step == 0:
                model.weight.grad.mul_(0.9 * model.weight.norm() / model.weight.grad.norm() / 0.005)
            optimizer.step()
            monitor.log(loss=loss)
        monitor.flush()

    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None) as monitor:
        go(monitor, first=True)
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
    path = tmp_path / ("killed" if killed else "run")
    with gyroscope.load(path) as run:
        before = [event.step for event in run.events if event.kind == "finding"]
    with gyroscope.watch(model, optimizer, path, budget=None) as monitor:
        go(monitor)
    with gyroscope.load(path) as run:
        after = [event.step for event in run.all_events if event.kind == "finding"]
    assert (before, after) == (([], [80]) if killed else ([40], [40]))
    assert kinds(path) == ["too_fast"]


def test_a_resumed_run_has_every_loss_once_and_in_order(tmp_path):
    train(tmp_path / "run", lr=0.01, steps=30)
    with gyroscope.load(tmp_path / "run") as run:
        layers = [LayerInfo(name, "linear", (8, 8)) for name in run.layers]
        steps = run.scalars["loss"].steps.tolist()
    live = Live(layers, {}, resumes=tmp_path / "run")
    for step in range(21, 41):  # the first measured row of this attempt is that of step 25
        live.heard(step, {"loss": 1.0})
        if step % 5 == 0:
            live.measured(0, [step], {"weight_norm": np.ones((1, len(layers)), dtype=np.float32)})
    live.stated(ends=True)
    assert steps == list(range(1, 31))
    assert live._course().loss_steps.tolist() == list(range(1, 41))
    assert live._course().steps.tolist() == [*range(25), 25, 30, 35, 40]


def test_an_alarm_is_an_event_is_logged_and_handed_over_once(tmp_path, caplog):
    heard: list[Finding] = []
    with caplog.at_level(logging.WARNING, logger="gyroscope"):
        train(tmp_path / "run", lr=100.0, steps=60, on_finding=heard.append)
    assert [one.kind for one in heard].count("too_fast") == 1
    events = [event for event in gyroscope.load(tmp_path / "run").events if event.kind == "finding"]
    assert [event.text for event in events] == [f"{one.severity}: {one.sentence}" for one in heard]
    assert sum(heard[0].sentence in record.getMessage() for record in caplog.records) == 1


def test_without_diagnosis_and_muted_nothing_is_said(tmp_path):
    heard: list[Finding] = []
    train(tmp_path / "run", lr=100.0, on_finding=heard.append, diagnose=False)
    train(tmp_path / "other", lr=100.0, on_finding=heard.append, mute=("too_fast", "not_finite", "jump"))
    assert [one.kind for one in heard if one.kind in ("too_fast", "not_finite", "jump")] == []
    assert kinds(tmp_path / "run")[0] == "too_fast"
    assert "too_fast" not in kinds(tmp_path / "run", mute="too_fast")


def test_a_serious_finding_is_raised_in_the_loop_where_it_was_asked_for(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    x, y = torch.randn(64, 8), torch.zeros(64, dtype=torch.long)
    with (  # noqa: PT012
        pytest.raises(FindingError, match="Lower the learning rate") as caught,
        gyroscope.watch(model, optimizer, tmp_path / "run", budget=None, on_finding="raise") as monitor,
    ):
        for _ in range(200):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            monitor.flush()
    assert caught.value.finding.severity == "serious"
    with gyroscope.load(tmp_path / "run") as run:
        assert run.state == "interrupted"
        assert len(run.steps) > 5


@pytest.mark.parametrize("given", [3, "ignore", ["raise"]])
def test_what_cannot_be_called_is_rejected(tmp_path, given):
    model = net()
    with pytest.raises(MonitorError, match="`on_finding` must be a function of a finding"):
        gyroscope.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "run", on_finding=given)
    assert not (tmp_path / "run").exists()


def test_a_callback_that_fails_is_recorded_and_training_goes_on(tmp_path):
    def fails(finding):
        raise RuntimeError("no network")

    monitor = train(tmp_path / "run", lr=100.0, on_finding=fails)
    events = gyroscope.load(monitor.path).events
    assert any(
        event.kind == "error" and "on_finding failed: RuntimeError: no network" in event.text for event in events
    )


def test_a_resumed_run_does_not_state_its_findings_again(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    train(tmp_path / "run", model=model, optimizer=optimizer)
    before = [event.text for event in gyroscope.load(tmp_path / "run").events if event.kind == "finding"]
    train(tmp_path / "run", model=model, optimizer=optimizer, step=STEPS)
    after = [event.text for event in gyroscope.load(tmp_path / "run").all_events if event.kind == "finding"]
    assert len(before) >= 1
    assert after == before


# As a result and at the command line.


def test_a_diagnosis_is_a_sequence_a_table_and_json(tmp_path):
    train(tmp_path / "run", lr=100.0)
    found = gyroscope.diagnose(tmp_path / "run")
    assert isinstance(found, Diagnosis)
    assert list(found) == [found[i] for i in range(len(found))]
    frame = found.to_pandas()
    assert frame["kind"].tolist() == [one.kind for one in found]
    told = json.loads(found.to_json())
    assert told["findings"][0]["kind"] == "too_fast"
    assert "too_fast" not in found._repr_html_()
    assert "<table>" in found._repr_html_()


def test_names_with_markup_stay_inert(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("[red]<b>x", nn.Linear(8, 16))
            self.add_module("mid\x1b[2J", nn.Linear(16, 16))
            self.out = nn.Linear(16, 4)

        def forward(self, x):
            first, second = self._modules["[red]<b>x"], self._modules["mid\x1b[2J"]
            return self.out(second(first(x).relu()).relu())

    torch.manual_seed(0)
    model = Odd()
    model.get_submodule("mid\x1b[2J").weight.requires_grad_(False)
    train(tmp_path / "run", model=model)
    shown = CliRunner().invoke(app, ["diagnose", str(tmp_path / "run")])
    assert "\x1b[2J" not in shown.output
    assert "mid\\u001b[2J.weight" in shown.output
    assert "<b>" not in gyroscope.diagnose(tmp_path / "run")._repr_html_()


@pytest.mark.parametrize(("lr", "steps", "code"), [(0.1, STEPS, 0), (100.0, STEPS, 3), (0.1, 3, 4)])
def test_the_exit_status_says_what_was_found(tmp_path, lr, steps, code):
    train(tmp_path / "run", lr=lr, steps=steps)
    shown = CliRunner().invoke(app, ["diagnose", str(tmp_path / "run")])
    assert shown.exit_code == code, shown.output
    assert json.loads(CliRunner().invoke(app, ["diagnose", str(tmp_path / "run"), "--json"]).output)["run"] == "run"


def test_a_run_that_is_not_there_fails_in_words(tmp_path):
    shown = CliRunner().invoke(app, ["diagnose", str(tmp_path / "none")])
    assert shown.exit_code == 1


def test_a_run_without_the_needed_series_says_what_to_record(tmp_path):
    train(tmp_path / "run", quantities=["rotation"])
    found = gyroscope.diagnose(tmp_path / "run")
    assert not found.decided
    assert "gradient_norm" in found.missing[0]
    assert found.alarms == ()


def test_of_a_long_run_few_rows_are_kept_in_memory():
    layers = [LayerInfo("a", "linear", (2, 2)), LayerInfo("b", "linear", (2, 2))]
    live = Live(layers, {})
    for step in range(20_000):
        live.measured(0, [step], {"weight_norm": np.ones((1, 2), dtype=np.float32)})
        if step % 5 == 0:
            live.measured(0, [step], {"input_rms": np.ones((1, 2), dtype=np.float32)})
    assert len(live._rows) <= 4 * MOST + 1
    assert {0, 1, 19_998, 19_999} <= set(live._rows)


def test_of_a_long_run_losses_are_kept_evenly_whatever_is_logged_between_them():
    live = Live([LayerInfo("a", "linear", (2, 2))], {})
    live.measured(0, [0], {"weight_norm": np.ones((1, 1), dtype=np.float32)})
    for step in range(20_000):
        live.heard(step, {"accuracy": 0.5})
        live.heard(step, {"loss": 1.0})
    steps = live._course().loss_steps
    assert (steps[0], steps[-1]) == (0, 19_999)
    assert np.diff(steps).max() < 20_000 / MOST
    assert len(steps) < 20_000 / 2
