"""The numbers are right whichever optimizer steps the model, however it is called, and however many there are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from watched import backward, check, copies_of, inputs, mlp, train

import gyroscope
from gyroscope.diagnosis.finding import FindingError
from oracles.monitor import measured


def watch(model, optimizer, path, **options) -> gyroscope.Monitor:
    return gyroscope.watch(model, optimizer, path, **{"budget": None, "activations": False, **options})


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1),
    "decayed": lambda ps: torch.optim.SGD(ps, 0.1, weight_decay=0.01),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "nesterov": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True),
    "foreach": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, foreach=True),
    "fused": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, fused=True),
    "maximize": lambda ps: torch.optim.SGD(ps, 0.1, maximize=True),
    "adam": lambda ps: torch.optim.Adam(ps, 0.01),
    "adam with a tensor as rate": lambda ps: torch.optim.Adam(ps, torch.tensor(0.01)),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.01, weight_decay=0.1),
    "amsgrad": lambda ps: torch.optim.Adam(ps, 0.01, amsgrad=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.01),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.05),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, 0.5),
    "nadam": lambda ps: torch.optim.NAdam(ps, 0.01),
    "amom": lambda ps: gyroscope.SGD_AMom(ps, 0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("every", [1, 3])
def test_numbers_equal_the_oracle_under(tmp_path, make, every):
    model = mlp()
    optimizer, copies = make(model.parameters()), copies_of(model)
    with watch(model, optimizer, tmp_path / "run", every=every) as monitor:
        train(model, optimizer, inputs(6), copies=copies)
    assert monitor.error is None
    check(monitor.path, copies, range(0, 7, every), rtol=1e-5)


INNER = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.05),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, 0.05),
}


@pytest.mark.parametrize("make", INNER.values(), ids=INNER.keys())
@pytest.mark.parametrize("every", [1, 3])
def test_under_layca_the_rate_is_the_one_asked_for(tmp_path, make, every):
    model = mlp()
    optimizer, copies = gyroscope.Layca(make(model.parameters()), model), copies_of(model)
    with watch(model, optimizer, tmp_path / "run", every=every) as monitor:
        train(model, optimizer, inputs(6), copies=copies)
    check(monitor.path, copies, range(0, 7, every), rtol=1e-5, leave_out=["effective_lr", "weight_decay"])
    with gyroscope.load(monitor.path) as run:
        assert np.isnan(run.series("effective_lr")).all()  # ρ is an angle, and multiplies no gradient
        if every == 1:
            np.testing.assert_allclose(run.series("rate")[1:], np.arctan(0.05), rtol=1e-4)


def test_under_graft_numbers_equal_the_oracle(tmp_path):
    model = mlp()
    magnitude, direction = torch.optim.SGD(model.parameters(), 0.05), torch.optim.Adam(model.parameters(), 0.01)
    optimizer, copies = gyroscope.Graft(magnitude, direction), copies_of(model)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(5), copies=copies)
    assert monitor.error is None
    check(monitor.path, copies, range(6), rtol=1e-5, leave_out=["effective_lr", "weight_decay", "lr"])


@pytest.mark.parametrize("kind", ["lbfgs", "sgd"])
def test_steps_with_a_closure_are_counted_once_and_measured(tmp_path, kind):
    model = mlp()
    ps, copies = model.parameters(), copies_of(model)
    optimizer = torch.optim.LBFGS(ps, 0.1, max_iter=3) if kind == "lbfgs" else torch.optim.SGD(ps, 0.1)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        for x in inputs(4):
            optimizer.step(lambda x=x: backward(model, x))
            copies.keep_gradients()  # that of the last evaluation
            copies.keep_step(optimizer)
    assert monitor.steps == 4
    check(monitor.path, copies, range(5), rtol=2e-5)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
def test_gradients_that_a_closure_computes_are_those_of_the_step_under_nesterov(tmp_path, foreach, named):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, foreach=foreach)
    copies = copies_of(model)

    def closure(x):
        loss = backward(model, x)
        copies.keep_gradients()  # a foreach step overwrites them
        return loss

    with watch(model, optimizer, tmp_path / "run") as monitor:
        for x in inputs(4):
            given = lambda x=x: closure(x)  # noqa: E731
            loss = optimizer.step(closure=given) if named else optimizer.step(given)
            assert loss is not None
            copies.keep_step(optimizer)
    check(monitor.path, copies, range(5))


def test_sparse_adam_is_measured(tmp_path):
    torch.manual_seed(0)
    model = nn.Embedding(20, 5, sparse=True)
    optimizer, copies = torch.optim.SparseAdam(model.parameters(), 0.1), copies_of(model)
    xs = [torch.randint(20, (6,), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    with watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, xs, copies=copies)
    check(monitor.path, copies, range(5), rtol=1e-5)


def test_learning_rates_are_those_of_the_step_and_of_the_group(tmp_path):
    model = mlp()
    groups = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": model[2].parameters(), "weight_decay": 0.02},
        {"params": model[4].parameters(), "lr": torch.tensor(0.3)},
    ]
    optimizer, copies = torch.optim.SGD(groups, 0.2, weight_decay=0.01), copies_of(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        for x in inputs(3):
            train(model, optimizer, [x], copies=copies)
            schedule.step()
    check(monitor.path, copies, range(4), rtol=1e-5)
    with gyroscope.load(monitor.path) as run:
        np.testing.assert_allclose(run.series("lr")[1:], np.outer([1, 0.5, 0.25], [0.1, 0.2, 0.3]), rtol=1e-6)
        np.testing.assert_allclose(run.series("weight_decay")[1], [0.01, 0.02, 0.01], rtol=1e-6)


@pytest.mark.parametrize("order", ["generator first", "discriminator first"])
def test_the_two_optimizers_of_a_gan_are_counted_each_by_itself(tmp_path, order):
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(6, 5), "d": nn.Linear(6, 7)})
    names = ["g", "d"] if order == "generator first" else ["d", "g"]
    by_name = {name: torch.optim.SGD(model[name].parameters(), 0.1, momentum=0.5) for name in names}
    copies = {name: copies_of(model, [f"{name}.weight"]) for name in names}
    with watch(model, [by_name[name] for name in names], tmp_path / "run") as monitor:
        for i in range(4):
            train(model["d"], by_name["d"], inputs(3, seed=i), copies=copies["d"])
            train(model["g"], by_name["g"], inputs(1, seed=10 + i), copies=copies["g"])
    assert monitor.steps == 12
    check(monitor.path, copies["d"], range(13), layers=[monitor.layers.index("d.weight")])
    check(monitor.path, copies["g"], range(5), layers=[monitor.layers.index("g.weight")])


def test_second_moments_are_recorded_on_sampled_steps_alone(tmp_path):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with watch(model, optimizer, tmp_path / "run", detail_every=3) as monitor:
        train(model, optimizer, inputs(7))
    with gyroscope.load(monitor.path) as run:
        assert run.where("moment_p50").tolist() == [1, 4, 7]
        v = optimizer.state[model[2].weight]["exp_avg_sq"].double().numpy()
        for p in (10, 50, 90):
            assert run.series(f"moment_p{p}")[7, 1] == pytest.approx(np.percentile(v, p), rel=1e-5)


def test_a_scaler_that_skips_a_step_makes_no_step(tmp_path):
    model = mlp()
    optimizer, copies = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), copies_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        for i, x in enumerate(inputs(6)):
            optimizer.zero_grad()
            scaler.scale((model(x if i != 2 else x * float("inf")) - 1).square().mean()).backward()
            scaler.unscale_(optimizer)
            copies.keep_gradients()
            scaler.step(optimizer)
            scaler.update()
            if i != 2:
                copies.keep_step(optimizer)
    assert monitor.steps == 5
    check(monitor.path, copies, range(6))


def test_an_optimizer_that_skips_by_itself_has_no_row_for_it_and_unscaled_gradients(tmp_path):
    model = mlp()
    optimizer, copies = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True), copies_of(model)
    assert optimizer._step_supports_amp_scaling
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        for i, x in enumerate(inputs(6)):
            optimizer.zero_grad()
            scaler.scale((model(x if i != 2 else x * float("inf")) - 1).square().mean()).backward()
            copies.keep_gradients()
            copies._held = [g / scaler.get_scale() for g in copies._held]
            scaler.step(optimizer)
            scaler.update()
            if i != 2:
                copies.keep_step(optimizer)
    check(monitor.path, copies, range(6), leave_out=["alignment"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_a_compiled_step_is_measured(tmp_path):
    model = mlp()
    optimizer, copies = torch.optim.SGD(model.parameters(), 0.1), copies_of(model)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    with watch(model, optimizer, tmp_path / "run") as monitor:
        for x in inputs(3):
            backward(model, x)
            copies.keep_gradients()
            step()
            copies.keep_step(optimizer)
    assert monitor.error is None
    check(monitor.path, copies, range(4))


def test_steps_without_hooks_are_measured_by_hand(tmp_path):
    model = mlp()
    optimizer, copies = torch.optim.SGD(model.parameters(), 0.1), copies_of(model)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        for x in inputs(4):
            backward(model, x)
            copies.keep_gradients()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            copies.keep_step(optimizer)
            monitor.measure()
    expected = measured(copies, range(5))
    with gyroscope.load(monitor.path) as run:
        assert run.steps.tolist() == [0, 1, 2, 3, 4]
        for name in ("rotation", "weight_norm", "gradient_norm"):
            np.testing.assert_allclose(run.series(name)[1:], expected[name][1:], rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(run.series("rate")[2:], expected["rate"][2:], rtol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
@pytest.mark.parametrize("how", ["hooks", "by hand", "compiled"])
def test_a_serious_finding_is_raised_however_a_step_is_taken(tmp_path, how):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = torch.compile(lambda: optimizer.step(), backend="eager") if how == "compiled" else optimizer.step
    taken = 0
    with (  # noqa: PT012
        pytest.raises(FindingError),
        watch(model, optimizer, tmp_path / "run", on_finding="raise") as monitor,
    ):
        for x in inputs(60):
            backward(model, x * float("nan") if taken == 5 else x)
            if how == "by hand":
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
                monitor.measure()
            else:
                step()
            taken += 1
            monitor.flush()
    assert 5 <= taken < 60


@pytest.mark.parametrize("seen", [{1, 2, 3}, {1, 6, 7, 8, 12, 14, 18}, {3, 9, 15, 21}])
def test_steps_that_hooks_see_may_come_between_steps_measured_by_hand(tmp_path, seen):
    """As where CUDA graphs are replayed but for the steps that the monitor looks into."""
    model = mlp()
    optimizer, copies = torch.optim.SGD(model.parameters(), 0.1), copies_of(model)
    with watch(model, optimizer, tmp_path / "run", every=3) as monitor:
        for step, x in enumerate(inputs(24), 1):
            backward(model, x)
            copies.keep_gradients()
            if step in seen:
                optimizer.step()
            else:
                for p in model.parameters():
                    p.data -= 0.1 * p.grad  # not counted as a change of the tensor, as in a replayed graph
                monitor.measure()
            copies.keep_step(optimizer)
    steps = list(range(0, 25, 3))
    expected = measured(copies, steps)
    with gyroscope.load(monitor.path) as run:
        assert run.steps.tolist() == steps
        rates = run.series("rate")
        known = np.isfinite(rates)
        assert known[3:].all()
        np.testing.assert_allclose(rates[known], expected["rate"][known], rtol=1e-5)


def test_a_loop_is_told_which_steps_are_looked_into(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, optimizer, tmp_path / "run", activations=True, conditioning=4, detail_every=6) as monitor:
        inside = []
        for step, x in enumerate(inputs(14), 1):
            if monitor.looks_inside:
                inside.append(step)
                backward(model, x)
                optimizer.step()
            else:
                monitor.measure()
    with gyroscope.load(monitor.path) as run:
        activations, analyses = run.series("activation_mean"), run.series("lambda_x")
    assert inside == [1, 4, 7, 8, 12, 13]
    assert np.isfinite(activations).any(axis=1).nonzero()[0].tolist() == [1, 7, 13]
    assert np.isfinite(analyses).any(axis=1).nonzero()[0].tolist() == [1, 4, 8, 12]


class CallsItsBase(torch.optim.AdamW):
    """torch runs the hooks of both classes around this step."""

    def step(self, closure=None):
        return super().step(closure)


def test_an_optimizer_that_calls_its_base_class_is_counted_once_per_step(tmp_path):
    model = mlp()
    torch.optim.AdamW(model.parameters())  # from now on, hooks run around AdamW's own step too
    optimizer = CallsItsBase(model.parameters(), lr=0.01)
    with watch(model, optimizer, tmp_path / "run"):
        for x in inputs(5):
            backward(model, x)
            optimizer.step()
    run = gyroscope.load(tmp_path / "run")
    assert run.steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert (run.series("rate")[1:] > 0).all()
    run.close()


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Has the name and the shape of Accelerate's, which does not call Optimizer.__init__."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        self.optimizer.step(closure)


def test_numbers_equal_the_oracle_under_accelerates_wrapper(tmp_path):
    model = mlp()
    optimizer, copies = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), 0.1)), copies_of(model)
    with watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(4), copies=copies)
    assert monitor.error is None
    check(monitor.path, copies, range(5), rtol=1e-5)
    assert gyroscope.load(monitor.path).meta["optimizers"][0]["class"] == "SGD"


def test_layca_unwraps_accelerates_wrapper():
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), 0.05)
    layca = gyroscope.Layca(AcceleratedOptimizer(sgd), model)
    assert layca.inner is sgd
    before = model[0].weight.detach().clone()
    train(model, layca, inputs(1))
    cosine = torch.cosine_similarity(before.flatten(), model[0].weight.flatten(), dim=0)
    assert torch.tan(torch.arccos(cosine)).item() == pytest.approx(0.05, rel=1e-2)


def test_a_wrapper_without_hooks_that_is_no_pass_through_is_refused(tmp_path):
    class Slow(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    model = mlp()
    with pytest.raises(gyroscope.errors.MonitorError, match=r"does not call torch\.optim\.Optimizer\.__init__"):
        watch(model, Slow(torch.optim.SGD(model.parameters(), 0.1)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("there", [True, False])
def test_a_failed_watch_leaves_nothing_behind(tmp_path, there, monkeypatch):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    folder = tmp_path / "new" / "run"
    if there:
        folder.mkdir(parents=True)

    def fail(*_):
        raise RuntimeError("no hooks")

    monkeypatch.setattr(optimizer, "register_step_post_hook", fail)
    with pytest.raises(RuntimeError, match="no hooks"):
        watch(model, optimizer, folder)
    assert list(tmp_path.rglob("*")) == ([tmp_path / "new", folder] if there else [])
    assert not optimizer._optimizer_step_pre_hooks
    monkeypatch.undo()
    watch(model, optimizer, folder).close()


@pytest.mark.parametrize("warms_up", [False, True])
def test_a_step_that_only_creates_state_for_a_checkpoint_is_not_counted(tmp_path, warms_up):
    """For an optimizer without state, torch takes one for every checkpoint, with rates and gradients of zero."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = mlp()
    optimizer, copies = torch.optim.SGD(model.parameters(), 0.0 if warms_up else 0.1), copies_of(model)
    taken = []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))
    with watch(model, optimizer, tmp_path / "run") as monitor:
        for xs in (inputs(2), inputs(3, seed=2)):
            train(model, optimizer, xs, copies=copies)
            optimizer.zero_grad()
            get_optimizer_state_dict(model, optimizer)
            optimizer.param_groups[0]["lr"] = 0.1
    assert len(taken) == 7
    assert monitor.steps == 5
    check(monitor.path, copies, range(6), rtol=1e-5)
