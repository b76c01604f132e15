"""Watching changes nothing about training, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from watched import backward, check, copies_of, inputs, mlp, train

import gyroscope
from gyroscope.store.lock import is_held


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Conv2d(4, 3, 3), nn.GELU(),
        nn.Flatten(), nn.Linear(27, 5), nn.Dropout(0.1), nn.Linear(5, 2),
    )  # fmt: skip


MAKE = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda ps: torch.optim.Adam(ps, 0.01),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, 0.1, max_iter=2),
}


def everything(make, watched=None, amp=False) -> list[object]:
    """All that a training run leaves: losses, gradients, weights, buffers, optimizer state and random states."""
    model = net()
    optimizer = make(model.parameters())
    monitor = None if watched is None else watched(model, optimizer)
    torch.manual_seed(3), np.random.seed(3), random.seed(3)  # noqa: NPY002 - the global state is what matters
    seen: list[object] = []
    for i in range(7):
        x = torch.randn(4, 2, 7, 7) + float(np.random.rand()) + random.random()  # noqa: NPY002

        def closure(x=x) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                out = model(x)
            return closure_backward(model, out)

        if i == 4 and monitor is not None:
            monitor.sample(2)
        loss = optimizer.step(closure)
        if monitor is not None:
            monitor.log(loss=loss)
        seen += [loss.detach().clone(), *[p.grad.clone() for p in model.parameters()]]
    if monitor is not None:
        assert monitor.error is None
        monitor.close()
    state = optimizer.state_dict()
    numpy_state = np.random.get_state()  # noqa: NPY002
    return [
        *seen, *leaves(dict(model.state_dict())), *leaves(state),
        torch.get_rng_state(), torch.from_numpy(numpy_state[1]), numpy_state[2], random.getstate(),
    ]  # fmt: skip


def closure_backward(model: nn.Module, out: Tensor) -> Tensor:
    model.zero_grad()
    loss = out.float().square().mean()
    loss.backward()
    return loss


def leaves(value: object) -> list[object]:
    if isinstance(value, dict):
        return [leaf for key in value for leaf in [key, *leaves(value[key])]]
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in leaves(one)]
    return [value]


OPTIONS = {
    "as it comes": {},
    "in full detail": {"neurons": True, "detail_every": 1, "budget": None},
    "now and then": {"every": 3, "detail_every": 2},
}


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())
def test_training_is_the_same_to_the_bit(tmp_path, make, options, amp):
    bare = everything(make, amp=amp)
    watched = everything(make, lambda m, o: gyroscope.watch(m, o, tmp_path / "run", **options), amp=amp)
    assert len(bare) == len(watched)
    for a, b in zip(bare, watched, strict=True):
        if isinstance(a, Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        else:
            assert a == b


def hooks_of(model: nn.Module, *others: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = [*model.modules(), *others]
    tensors = sum(len(p._backward_hooks or {}) for p in model.parameters())
    return tensors + sum(len(getattr(module, kind)) for module in modules for kind in kinds)


def hooks_of_optimizer(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_all_hooks_are_gone_after_close_and_closing_again_does_nothing(tmp_path, steps):
    model, loss = mlp(), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters())
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run", loss=loss, detail_every=1)
    assert hooks_of(model, loss) > 0
    assert hooks_of_optimizer(optimizer) == 2
    train(model, optimizer, inputs(steps))
    monitor.close()
    assert hooks_of(model, loss) == hooks_of_optimizer(optimizer) == 0
    monitor.close()
    train(model, optimizer, inputs(2))
    monitor.sample(3)
    monitor.every = 2
    monitor.log(loss=1.0)
    assert hooks_of(model, loss) == 0
    with gyroscope.load(monitor.path) as run:
        assert run.steps.tolist() == list(range(steps + 1))
        assert not run.scalars


def test_forward_hooks_are_there_for_sampled_steps_alone(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    counts, compared = [], []

    def each(_):
        compared.append(sum(len(p._backward_hooks or {}) for p in model.parameters()))
        counts.append(hooks_of(model) - compared[-1] > 0)

    with gyroscope.watch(model, optimizer, tmp_path / "run", detail_every=3, budget=None) as monitor:
        train(model, optimizer, inputs(6), each=each)
        monitor.sample(1)
        assert hooks_of(model) > 0
    assert counts == [True, False, False, True, False, False]
    assert compared == [1, 0, 1, 0, 0, 0]  # one gradient, as often, at steps of its own


def test_models_and_optimizers_are_copied_and_pickled_while_watched(tmp_path):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with gyroscope.watch(model, optimizer, tmp_path / "run", detail_every=1) as monitor:
        train(model, optimizer, inputs(2))
        twin_model, twin_optimizer = copy.deepcopy((model, optimizer))
        pickle.loads(pickle.dumps(optimizer))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        train(twin_model, twin_optimizer, inputs(3))
        backward(loaded, inputs(1)[0])
        assert monitor.steps == 2
    assert monitor.error is None
    with gyroscope.load(monitor.path) as run:
        assert run.steps.tolist() == [0, 1, 2]


def test_two_monitors_at_once_are_both_right(tmp_path):
    model = mlp()
    optimizer, copies = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), copies_of(model)
    one = gyroscope.watch(model, optimizer, tmp_path / "one", budget=None, detail_every=1)
    two = gyroscope.watch(model, optimizer, tmp_path / "two", budget=None, every=3, layers="[02]*")
    train(model, optimizer, inputs(6), copies=copies)
    one.close()
    train(model, optimizer, inputs(3, seed=5), copies=copies)
    two.close()
    check(tmp_path / "one", copies, range(7))
    both = copies_of(model, ["0.weight", "2.weight"])
    both.weights = [weights[:2] for weights in copies.weights]
    both.gradients = [gradients[:2] for gradients in copies.gradients]
    both.lr, both.decay = [row[:2] for row in copies.lr], [row[:2] for row in copies.decay]
    check(tmp_path / "two", both, [0, 3, 6, 9])
    assert hooks_of(model) == hooks_of_optimizer(optimizer) == 0


def test_nothing_keeps_the_model_alive_after_close(tmp_path):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run", neurons=True, loss=nn.MSELoss())
    train(model, optimizer, inputs(3))
    monitor.close()
    alive = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)
    del model, optimizer, monitor
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_compiled_models_have_no_graph_breaks_and_are_compiled_once(tmp_path):
    model = mlp()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer, copies = torch.optim.SGD(model.parameters(), 0.1), copies_of(model)
    torch._dynamo.reset()
    counters.clear()
    with gyroscope.watch(compiled, optimizer, tmp_path / "run", detail_every=2, budget=None, neurons=True) as monitor:
        train(compiled, optimizer, inputs(6), copies=copies)
    assert monitor.error is None
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    check(monitor.path, copies, range(7))
    with gyroscope.load(monitor.path) as run:
        assert any("compiled" in event.text for event in run.events)


def test_evaluation_between_steps_is_not_looked_at(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = inputs(1)[0]
    expected = float(torch.relu(model[0](x)).mean().detach())
    with gyroscope.watch(model, optimizer, tmp_path / "run", detail_every=1) as monitor:
        with torch.no_grad():
            model(x + 100)
        train(model, optimizer, [x])
    with gyroscope.load(monitor.path) as run:
        assert run.series("activation_mean")[1, 0] == pytest.approx(expected, rel=1e-5)


def test_losses_of_a_module_are_recorded_where_they_have_gradients(tmp_path):
    model, loss = mlp(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    said = []
    with gyroscope.watch(model, optimizer, tmp_path / "run", loss=loss) as monitor:
        for x in inputs(3):
            optimizer.zero_grad()
            value = loss(model(x), torch.ones(8, 3))
            value.backward()
            optimizer.step()
            said.append(value.item())
            with torch.no_grad():
                loss(model(x), torch.ones(8, 3))
    with gyroscope.load(monitor.path) as run:
        assert run.scalars["loss"].values.tolist() == pytest.approx(said)


def test_losses_of_a_function_are_recorded_after_measured_steps(tmp_path):
    model, said = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gyroscope.watch(model, optimizer, tmp_path / "run", every=2, loss=lambda: said[-1]) as monitor:
        train(model, optimizer, inputs(4), step=lambda m, x: said.append(backward(m, x)))
    with gyroscope.load(monitor.path) as run:
        assert run.scalars["loss"].steps.tolist() == [2, 4]
        assert run.scalars["loss"].values.tolist() == pytest.approx([float(said[1]), float(said[3])])


def test_a_monitor_that_is_dropped_with_its_model_is_collected_and_its_run_is_finished(tmp_path):
    def watched(steps):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        gyroscope.watch(model, optimizer, tmp_path / "run", budget=None)  # kept alive by the optimizer alone
        gc.collect()
        train(model, optimizer, inputs(steps))
        return weakref.ref(model)

    before = set(threading.enumerate())
    for steps in (3, 0):  # the second resumes the run, and is dropped before it has begun
        model = watched(steps)
        deadline = time.monotonic() + 30
        while model() is not None or set(threading.enumerate()) - before:
            assert time.monotonic() < deadline
            time.sleep(0.02)
            gc.collect()
        assert not is_held(tmp_path / "run")
    with gyroscope.load(tmp_path / "run") as run:
        assert run.state == "ended"
        assert run.steps.tolist() == [0, 1, 2, 3]
