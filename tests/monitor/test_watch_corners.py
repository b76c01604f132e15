"""Corners of watching that have cut somebody: each claim was once false."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
import pickle
import shutil
import warnings
import weakref
from operator import attrgetter

import numpy as np
import pytest
import torch
from test_watch_failures import After, full_disk
from torch import nn
from watched import backward, check, copies_of, inputs, mlp, train

import forked
import gyroscope
from gyroscope.errors import GyroscopeError, MonitorError, StoreError
from gyroscope.monitor import quantities
from gyroscope.monitor.recorder import Recorder
from gyroscope.monitor.track import Track
from gyroscope.store import Deferred, Writer
from oracles.monitor import angle, cosine_distance, flat, measured


def sgd(model: nn.Module, **options) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


# Training is stopped.


@pytest.mark.parametrize(("owner", "method"), [(Recorder, "event"), (Writer, "put")])
def test_a_failure_while_the_failure_is_recorded_does_not_stop_training(tmp_path, monkeypatch, owner, method):
    model = mlp()
    optimizer = sgd(model)
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run")
    train(model, optimizer, inputs(2))
    monkeypatch.setattr(Track, "measure", After(Track.measure, 0, ValueError("made up")))
    monkeypatch.setattr(owner, method, After(getattr(owner, method), 0, OSError("made up too")))
    train(model, optimizer, inputs(2))
    monitor.close()
    assert monitor.error is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_watched_loss_module_is_compiled_without_a_graph_break(tmp_path):
    model, loss = mlp(), nn.MSELoss()
    optimizer = sgd(model)
    torch._dynamo.reset()
    with gyroscope.watch(model, optimizer, tmp_path / "run", loss=loss, activations=False) as monitor:
        step = torch.compile(lambda x: loss(model(x), torch.ones(8, 3)), backend="eager", fullgraph=True)
        for x in inputs(3):
            optimizer.zero_grad()
            step(x).backward()
            optimizer.step()
    assert monitor.error is None


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_watched_loss_module_can_be_copied(tmp_path, how):
    model = nn.ModuleDict({"body": mlp(), "loss": nn.MSELoss()})
    with gyroscope.watch(model, sgd(model), tmp_path / "run", loss=model["loss"]):
        how(model)


# Recording is stopped, or rows are lost.


def test_a_value_logged_in_inference_mode_before_the_first_step_does_no_harm(tmp_path):
    model = mlp()
    optimizer, copies = sgd(model), copies_of(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
        with torch.inference_mode():
            monitor.log(loss=model(inputs(1)[0]).mean())
        train(model, optimizer, inputs(3), copies=copies)
    assert monitor.error is None
    check(monitor.path, copies, range(4))


def test_the_last_row_of_a_part_that_was_measured_is_not_replaced_at_close(tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(6, 5), "d": nn.Linear(6, 7)})
    generator, discriminator = (torch.optim.SGD(model[name].parameters(), 0.1) for name in "gd")
    copies = copies_of(model, ["g.weight"])
    with gyroscope.watch(model, [generator, discriminator], tmp_path / "run", every=4, budget=None) as monitor:
        for i in range(4):
            train(model["d"], discriminator, inputs(3, seed=i))
            train(model["g"], generator, inputs(1, seed=10 + i), copies=copies)
        train(model["d"], discriminator, inputs(1))
    check(monitor.path, copies, [0, 4], layers=[0])


@pytest.fixture
def own_registry(monkeypatch):
    monkeypatch.setattr(quantities, "_registry", dict(quantities._registry))


def test_a_quantity_that_fails_costs_no_row_of_the_others(tmp_path, own_registry):
    @quantities.quantity("mine", "1", "fails once the weights have moved far")
    def mine(d):
        if (d.ww > 1e6).any():
            raise ValueError("made up")
        return d.ww

    model = mlp()
    optimizer = sgd(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run", quantities=["rotation", "mine"]) as monitor:
        for i, x in enumerate(inputs(6)):
            backward(model, x)
            if i == 4:
                model[0].weight.grad.fill_(1e8)
            optimizer.step()
    with gyroscope.load(monitor.path) as run:
        assert run.where("rotation").tolist()[:5] == [0, 1, 2, 3, 4]
        assert run.where("mine").tolist()[:5] == [0, 1, 2, 3, 4]


def test_a_quantity_that_gives_another_shape_costs_no_row_of_the_others(tmp_path, own_registry):
    quantities.quantity("mine", "1", "of the shape that it was tried with")(lambda d: np.ones((2, 3)))
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    optimizer = sgd(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run", quantities=["rotation", "mine"]) as monitor:
        for x in inputs(4):
            train(model, optimizer, [x])
            monitor.flush()
    with gyroscope.load(monitor.path) as run:
        assert run.where("rotation").tolist() == [0, 1, 2, 3, 4]


def test_numbers_beyond_float32_are_recorded_without_a_warning(tmp_path):
    model = mlp(dtype=torch.float64)
    optimizer = sgd(model, lr=1e-60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
            for p in model.parameters():
                p.grad = torch.full_like(p, 1e60)
            optimizer.step()
    with gyroscope.load(monitor.path) as run:
        assert run.steps.tolist() == [0, 1]
        assert np.isinf(run.series("gradient_norm")[1]).all()


@pytest.mark.parametrize("value", [np.ones(1), np.ones((1, 1)), 10**400], ids=["[1]", "[[1]]", "huge"])
def test_a_value_that_log_takes_is_recorded(tmp_path, value):
    model = mlp()
    optimizer = sgd(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
        with contextlib.suppress(MonitorError):
            monitor.log(loss=value)
        train(model, optimizer, inputs(2))
    assert monitor.error is None
    with gyroscope.load(monitor.path) as run:
        assert run.steps.tolist() == [0, 1, 2]


def test_words_in_an_array_are_no_number(tmp_path):
    model = mlp()
    monitor = gyroscope.watch(model, sgd(model), tmp_path / "run")
    with monitor, pytest.raises(MonitorError, match="`loss` must be a number"):
        monitor.log(loss=np.array("words"))


def test_a_failed_disk_is_told_once(tmp_path, monkeypatch, caplog):
    model = mlp()
    optimizer = sgd(model)
    with caplog.at_level(logging.WARNING, "gyroscope"):
        monitor = gyroscope.watch(model, optimizer, tmp_path / "run")
        train(model, optimizer, inputs(1))
        monitor.flush()
        monkeypatch.setattr(monitor._recorder.writer._scribe, "_commit", full_disk)
        train(model, optimizer, inputs(1))
        with pytest.raises(StoreError):
            monitor.flush()
        train(model, optimizer, inputs(2))
        monitor.close()
    assert len([r for r in caplog.records if "the disk is full" in r.getMessage()]) == 1


def test_a_folder_that_was_removed_is_told_by_flush(tmp_path):
    model = mlp()
    optimizer = sgd(model)
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run")
    train(model, optimizer, inputs(1))
    monitor.flush()
    shutil.rmtree(monitor.path)
    train(model, optimizer, inputs(1))
    with pytest.raises(StoreError):
        monitor.flush()
    monitor.close()


# Numbers that are wrong.


@pytest.mark.parametrize("moved_at", [5, 6, 7])
def test_a_rate_is_not_of_fewer_steps_than_it_says_when_the_layout_changes(tmp_path, moved_at):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3))
    optimizer, copies = sgd(model), copies_of(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run", every=4, budget=None) as monitor:
        move = lambda i: model.to(memory_format=torch.channels_last) if i == moved_at else None  # noqa: E731
        train(model, optimizer, inputs(12, shape=(2, 3, 7, 7)), copies=copies, each=move)
    with gyroscope.load(monitor.path) as run:
        for layer in range(2):
            got = run.series("rate")[run.steps.tolist().index(8), layer]
            expected = angle(copies.weights[8][layer], copies.weights[4][layer])
            assert math.isnan(got) or got == pytest.approx(expected, rel=1e-5)


def test_a_skipped_step_that_was_due_leaves_rates_right(tmp_path):
    model = mlp()
    optimizer, copies = sgd(model, fused=True), copies_of(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run", every=4, budget=None) as monitor:
        for i, x in enumerate(inputs(12)):
            optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(float(i == 3))
            backward(model, x)
            copies.keep_gradients()
            optimizer.step()
            if i != 3:
                copies.keep_step(optimizer)
            del optimizer.grad_scale, optimizer.found_inf
    with gyroscope.load(monitor.path) as run:
        steps, per_step = run.steps.tolist(), run.series("rate_per_step")
        for row in range(1, len(steps)):
            now, last = copies.weights[steps[row]][0], copies.weights[steps[row - 1]][0]
            assert run.series("rate")[row, 0] == pytest.approx(angle(now, last), rel=1e-5)
            assert per_step[row, 0] == pytest.approx(angle(now, last) / (steps[row] - steps[row - 1]), rel=1e-5)


def test_steps_skipped_by_the_optimizer_itself_are_not_counted(tmp_path):
    model = mlp()
    optimizer, copies = sgd(model, fused=True, momentum=0.9), copies_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None) as monitor:
        for i, x in enumerate(inputs(5)):
            optimizer.zero_grad()
            scaler.scale((model(x if i != 2 else x * float("inf")) - 1).square().mean()).backward()
            copies.keep_gradients()
            copies._held = [g / scaler.get_scale() for g in copies._held]
            scaler.step(optimizer)
            scaler.update()
            if i != 2:
                copies.keep_step(optimizer)
                monitor.log(number=float(copies.steps))
    assert monitor.steps == 4
    with gyroscope.load(monitor.path) as run:
        assert run.scalars["number"].steps.tolist() == run.scalars["number"].values.tolist()
    check(monitor.path, copies, range(5))  # alignment too: consecutive displacements are of steps that were taken


def test_a_measurement_that_was_dropped_leaves_rates_right(tmp_path, monkeypatch):
    model = mlp()
    optimizer, copies = sgd(model), copies_of(model)
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run", budget=None)
    train(model, optimizer, inputs(3), copies=copies)
    real = Writer.put
    monkeypatch.setattr(Writer, "put", lambda self, r: False if isinstance(r, Deferred) else real(self, r))
    train(model, optimizer, inputs(1), copies=copies)
    monkeypatch.setattr(Writer, "put", real)
    train(model, optimizer, inputs(4), copies=copies)
    monitor.close()
    with gyroscope.load(monitor.path) as run:
        steps = run.steps.tolist()
        for row in range(1, len(steps)):
            now, last = copies.weights[steps[row]][0], copies.weights[steps[row - 1]][0]
            rate = angle(now, last) / (steps[row] - steps[row - 1])
            assert run.series("rate_per_step")[row, 0] == pytest.approx(rate, rel=1e-5)


def test_activations_of_consecutive_sampled_steps_are_each_of_one_step(tmp_path):
    model = mlp()
    optimizer = sgd(model, lr=0.0)
    with gyroscope.watch(model, optimizer, tmp_path / "run", detail_every=1, budget=None) as monitor:
        xs = [torch.full((8, 6), float(i)) for i in range(4)]
        train(model, optimizer, xs)
    expected = [float(torch.relu(model[0](x)).mean().detach()) for x in xs]
    with gyroscope.load(monitor.path) as run:
        np.testing.assert_allclose(run.series("activation_mean")[1:, 0], expected, rtol=1e-5)


def test_gradients_are_those_of_the_step_under_a_nesterov_that_overwrites_them(tmp_path):
    model = mlp()
    optimizer, copies = sgd(model, momentum=0.9, nesterov=True, foreach=True), copies_of(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(3), copies=copies)
    check(monitor.path, copies, range(4))


def nesterov(parameters) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, 0.01, momentum=0.9, nesterov=True, foreach=True)


WRAPPED = {
    "bare": lambda model: nesterov(model.parameters()),
    "layca": lambda model: gyroscope.Layca(nesterov(model.parameters()), model),
    "graft": lambda model: gyroscope.Graft(sgd(model), nesterov(model.parameters())),
    "steer": lambda model: gyroscope.steer(model, nesterov),
}


@pytest.mark.parametrize("make", WRAPPED.values(), ids=WRAPPED.keys())
def test_an_overwritten_gradient_is_neither_carried_over_nor_recorded(tmp_path, make):
    model = mlp()
    optimizer, copies = make(model), copies_of(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None, detail_every=1) as monitor:
        train(model, optimizer, inputs(5), copies=copies)
    with gyroscope.load(monitor.path) as run:
        carried, norms = run.series("gradient_carried")[1:], run.series("gradient_norm")[1:]
    assert np.nanmax(carried, axis=1).tolist() == [0.0] * 5
    np.testing.assert_allclose(norms, measured(copies, range(6))["gradient_norm"][1:], rtol=1e-5)


@pytest.mark.parametrize("period", [2, 5, 10, 20])
def test_gradients_cleared_at_every_sampled_step_only_are_found_to_be_carried_over(tmp_path, period):
    model = mlp()
    optimizer = sgd(model, lr=1e-3)
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None, detail_every=20) as monitor:
        for i, x in enumerate(inputs(200)):
            if i % period == 0:
                optimizer.zero_grad()
            (model(x) - x[:, :3]).square().mean().backward()
            optimizer.step()
    with gyroscope.load(monitor.path) as run:
        assert np.flatnonzero(np.isfinite(run.series("activation_mean")[:, 0])).tolist() == list(range(1, 201, 20))
        carried = run.series("gradient_carried", steps=run.where("gradient_carried"))
        assert 10 <= len(carried) <= 11  # as often as anything else is sampled
        assert (np.nanmax(carried, axis=1) > 0.05).sum() >= 2
        assert "gradients_accumulate" in [one.kind for one in gyroscope.diagnose(run).alarms]


@pytest.mark.parametrize("growth", [10, 100, 1000, 1e4])
def test_rotation_keeps_its_digits_when_weights_outgrow_their_start(tmp_path, growth):
    torch.manual_seed(0)
    model = nn.Linear(20, 30, bias=False)
    optimizer, start = sgd(model, lr=1.0), flat(model.weight)
    with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
        direction = torch.randn(30, 20)
        model.weight.grad = growth * direction / direction.norm() * start.norm().float()
        optimizer.step()
    with gyroscope.load(monitor.path) as run:
        assert run.series("rotation")[1, 0] == pytest.approx(cosine_distance(flat(model.weight), start), rel=1e-6)


def test_weight_decay_alone_does_not_turn_a_layer(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(100, 100, bias=False)
    optimizer = sgd(model, weight_decay=0.5)
    with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
        model.weight.grad = torch.zeros(100, 100)
        optimizer.step()
    with gyroscope.load(monitor.path) as run:
        assert run.series("rate")[1, 0] < 1e-6  # 3e-8, the rounding of the weights


def test_displacements_of_half_precision_models_are_kept_in_more(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).bfloat16()
    optimizer, copies = sgd(model, lr=0.3, momentum=0.5), copies_of(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(12, torch.bfloat16), copies=copies)
    check(monitor.path, copies, range(13), atol=1e-6)


def test_a_group_that_is_added_has_a_learning_rate(tmp_path):
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2:].parameters(), 0.1)
    with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(2))
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.5})
        train(model, optimizer, inputs(2))
    with gyroscope.load(monitor.path) as run:
        assert run.series("lr")[3:, 0].tolist() == [0.5, 0.5]


def test_step_zero_of_a_loop_measured_by_hand_is_the_start(tmp_path):
    model = mlp()
    with gyroscope.watch(model, sgd(model), tmp_path / "run") as monitor:
        with torch.no_grad():
            model[0].weight.add_(torch.randn(40, 6))
        monitor.measure()
    with gyroscope.load(monitor.path) as run:
        assert run.series("rotation")[0].tolist() == [0.0, 0.0, 0.0]


# When is measured, and what it costs.


def test_multiples_of_every_are_measured_after_a_sample_too(tmp_path):
    model = mlp()
    optimizer = sgd(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run", every=4, budget=None) as monitor:
        train(model, optimizer, inputs(24), each=lambda i: monitor.sample(5) if i == 8 else None)
    with gyroscope.load(monitor.path) as run:
        assert {0, 4, 8, 12, 16, 20, 24} <= set(run.steps.tolist())


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_monitor_is_not_copied_and_says_so(tmp_path, act):
    model = mlp()
    refused = pytest.raises(MonitorError, match="cannot be copied or pickled")
    with gyroscope.watch(model, sgd(model), tmp_path / "run") as monitor, refused:
        act(monitor)


def test_cost_counts_every_measured_step(tmp_path):
    model = mlp()
    optimizer = sgd(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run", detail_every=2, budget=None) as monitor:
        train(model, optimizer, inputs(6))
        assert monitor.cost().measured == monitor.cost().steps == 6


def test_no_cycle_keeps_the_model_alive_after_close(tmp_path):
    model = mlp()
    optimizer = sgd(model)
    gc.collect()
    gc.disable()
    try:
        with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
            train(model, optimizer, inputs(2))
        alive = weakref.ref(model[0].weight)
        del model, optimizer, monitor
        assert alive() is None
    finally:
        gc.enable()


# What is given.


@pytest.mark.parametrize(
    "options",
    [
        {"run": 3}, {"quantities": 3}, {"quantities": [["rotation"]]}, {"layers": 3}, {"sinks": 3}, {"sinks": [3]},
        {"reference": {1: 2}}, {"meta": {"a": math.nan}}, {"neurons": "no"}, {"activations": "no"},
        {"loss": nn.functional.cross_entropy},
    ],
    ids=lambda value: str(value).split(" at 0x")[0],
)  # fmt: skip
def test_bad_options_are_refused_in_words(tmp_path, options):
    model = mlp()
    optimizer = sgd(model)
    with pytest.raises(MonitorError, match=next(iter(options))):
        gyroscope.watch(model, optimizer, **{"run": tmp_path / "run", **options}).close()
    assert not optimizer._optimizer_step_post_hooks
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", [3, "words", [1.0]])
def test_log_refuses_what_is_no_mapping_in_words(tmp_path, given):
    model = mlp()
    monitor = gyroscope.watch(model, sgd(model), tmp_path / "run")
    with monitor, pytest.raises(MonitorError, match="`values` must be a dict of numbers by name, got"):
        monitor.log(given)


@pytest.mark.parametrize(
    "options",
    [{"every": np.int64(2)}, {"budget": np.float32(0.1)}, {"step": np.int64(1)}, {"threshold": np.float32(0.5)}],
    ids=str,
)
def test_numbers_of_numpy_are_numbers(tmp_path, options):
    model = mlp()
    optimizer = sgd(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run", **options) as monitor:
        train(model, optimizer, inputs(2))
    assert monitor.error is None
    with gyroscope.load(monitor.path) as run:
        assert run.steps.tolist()[-1] == 2 + int(options.get("step", 0))


def test_an_optimizer_with_an_infinite_setting_can_be_watched(tmp_path):
    model = mlp()
    optimizer = sgd(model)
    optimizer.param_groups[0]["max_trust"] = math.inf
    gyroscope.watch(model, optimizer, tmp_path / "run").close()


def test_a_folder_that_another_monitor_writes_is_refused_at_once(tmp_path):
    model = mlp()
    optimizer = sgd(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(1))
        monitor.flush()
        with pytest.raises(GyroscopeError, match="another writer"):
            gyroscope.watch(model, optimizer, tmp_path / "run")


def test_an_unknown_name_of_a_quantity_is_told_in_whole_sentences():
    with pytest.raises(MonitorError, match=r"`quantities` must be one of rotation, .*, got 'zzz'\. Register"):
        quantities.find(["zzz"])


def test_an_optimizer_that_steps_more_often_is_sampled_as_often_as_asked(tmp_path):
    model = nn.ModuleDict({"g": nn.Linear(6, 5), "d": nn.Linear(6, 7)})
    generator, discriminator = (torch.optim.Adam(model[name].parameters(), 0.1) for name in "gd")
    with gyroscope.watch(model, [generator, discriminator], tmp_path / "run", budget=None) as monitor:
        train(model["d"], discriminator, inputs(9))  # a discriminator that is trained first
        train(model["g"], generator, inputs(1))
        train(model["d"], discriminator, inputs(3))
    with gyroscope.load(monitor.path) as run:
        d = run.series("moment_p50")[:, 1]
        assert run.steps[np.isfinite(d)].tolist() == [1]  # detail_every is 100


def test_a_rate_counts_what_happens_to_the_weights_between_steps(tmp_path):
    model = mlp()
    optimizer, copies = sgd(model), copies_of(model)

    def clip(_):
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)

    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None) as monitor:
        train(model, optimizer, inputs(3), copies=copies, each=clip)
    with gyroscope.load(monitor.path) as run:
        for step in range(2, 4):
            expected = angle(copies.weights[step][0], copies.weights[step - 1][0])
            assert run.series("rate")[step, 0] == pytest.approx(expected, rel=1e-5)


SETTINGS = ["backends.cuda.matmul", "backends.mkldnn.matmul", "backends"]


def recorded_in_tf32(_, setting, folder):
    """Record a run where torch has been told to multiply coarsely."""
    attrgetter(setting)(torch).fp32_precision = "tf32"
    model = nn.Linear(50, 40)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gyroscope.watch(model, optimizer, f"{folder}/run") as monitor:
        for _ in range(2):
            model(torch.ones(3, 50)).square().mean().backward()
            optimizer.step()
    assert monitor.error is None, monitor.error
    with gyroscope.load(monitor.path) as run:
        norm = float(model.weight.detach().double().norm())
        assert abs(run.series("weight_norm")[2, 0] / norm - 1) < 1e-6


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_precision_set_for_one_backend_does_not_stop_the_recording(tmp_path, setting):
    # In a process of its own: torch cannot take such a setting back.
    forked.start(recorded_in_tf32, setting, str(tmp_path))
    assert (tmp_path / "run").exists()


@pytest.mark.parametrize("by_name", [True, False])
def test_a_model_all_of_whose_layers_are_named_is_watched_with_its_normalizers(tmp_path, by_name):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix, self.norm = nn.Parameter(torch.randn(4, 4)), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(x @ self.matrix)

    model = Bare()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layers = ["matrix"] if by_name else gyroscope.layers(model, include="matrix")
    with gyroscope.watch(model, optimizer, tmp_path / "run", layers=layers, budget=None, detail_every=1) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    assert monitor.error is None
    assert gyroscope.load(tmp_path / "run").steps.tolist() == [0, 1, 2, 3]
