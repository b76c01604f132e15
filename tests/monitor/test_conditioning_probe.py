"""What a watched training records of conditioning is what an analysis finds, and the training does not notice."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import logging
import math
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import gyroscope
from gyroscope.conditioning import Conditioning, Schedule
from gyroscope.errors import ConditioningError
from gyroscope.monitor.clock import Clock, Pace

P = (0.1, 0.25, 0.5, 0.75, 1.0)
PLAIN = ["lambda_x", "lambda_g", "lambda_f", "rank_x", "rank_g", "weight_spectral", "gradient_spectral", "domination"]
KAPPAS = [f"kappa_{f}_p{p}" for f in "xgf" for p in ("10", "25", "50", "75", "100")]
ALWAYS: dict[str, Any] = {"budget": None}
N = 16


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(seed: int, n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 5, generator=generator), torch.randint(3, (n,), generator=generator)


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def analyzed(model: nn.Module, x: Any, y: Tensor, **options: Any) -> Conditioning:
    return gyroscope.condition(model, F.cross_entropy, (x, y), **options)


def assert_recorded(run: gyroscope.Run, at: int, expected: Conditioning, *, without: Sequence[str] = ()) -> None:
    """At this step, what an analysis found, to the precision of float32."""
    row = run.steps.tolist().index(at)
    columns = [run.layers.index(name) for name in expected.layers]
    frame = expected.to_pandas()
    kappas = [name for name in frame.columns if name.startswith("kappa")]
    for name in [one for one in (*PLAIN, *kappas) if one not in without]:
        got, want = run.series(name)[row, columns], frame[name].to_numpy(np.float64)
        np.testing.assert_allclose(got, want, rtol=2e-5, err_msg=f"{name} at step {at}")


def watched(
    folder: Path, conditioning: Any, steps: int, *, model: nn.Module | None = None, **options: Any
) -> tuple[gyroscope.Run, dict[int, Conditioning]]:
    """A training, and by step what an analysis of its batch finds at the weights before it."""
    model = mlp() if model is None else model
    optimizer = sgd(model, momentum=0.9)
    expected = {}
    with gyroscope.watch(model, optimizer, folder / "run", conditioning=conditioning, **ALWAYS | options) as monitor:
        for i in range(1, steps + 1):
            expected[i] = analyzed(model, *batch(i))
            step(model, optimizer, *batch(i))
        assert monitor.error is None
    return gyroscope.load(folder / "run"), expected


def test_recorded_values_are_those_of_an_analysis_at_the_weights_before_the_step(tmp_path: Path) -> None:
    run, expected = watched(tmp_path, 3, 9)
    assert run.where("lambda_f").tolist() == [1, 3, 6, 9]
    for at in (1, 3, 6, 9):
        assert_recorded(run, at, expected[at])
    assert expected[1].rows() != expected[3].rows()


@pytest.mark.parametrize(
    ("n", "options", "steps"),
    [
        (1, {}, [1, 2, 3, 4, 5, 6, 7]),
        (2, {}, [1, 2, 4, 6]),
        (5, {}, [1, 5]),
        (100, {}, [1]),
        (2, {"every": 3}, [3, 6]),
        (4, {"every": 2}, [2, 4]),
        (np.int64(4), {}, [1, 4]),
        (Schedule(every=3), {"detail_every": 1}, [1, 3, 6]),
    ],
)
def test_analyses_are_at_multiples_of_n_and_at_the_first_measured_step(
    tmp_path: Path, n: Any, options: dict[str, Any], steps: list[int]
) -> None:
    run, expected = watched(tmp_path, n, 7, **options)
    assert run.where("lambda_f").tolist() == steps
    for at in steps:
        assert_recorded(run, at, expected[at])


@pytest.mark.parametrize("kind", ["sgd", "layca", "lbfgs"])
def test_passes_within_a_closure_are_analyzed_at_the_weights_before_the_step(tmp_path: Path, kind: str) -> None:
    model = mlp()
    optimizer: torch.optim.Optimizer = sgd(model, momentum=0.9)
    if kind == "layca":
        optimizer = gyroscope.Layca(optimizer, model)
    elif kind == "lbfgs":  # evaluates several times: the first is at the weights before the step
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    expected = {}
    with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=2, **ALWAYS):
        for i in range(1, 5):
            x, y = batch(i)
            expected[i] = analyzed(model, x, y)

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
    run = gyroscope.load(tmp_path / "run")
    assert run.where("lambda_f").tolist() == [1, 2, 4]
    for at in (1, 2, 4):
        assert_recorded(run, at, expected[at])


def test_steps_asked_for_are_analyzed_as_well(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    expected = {}
    with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=100, every=4, **ALWAYS) as monitor:
        for i in range(1, 11):
            if i == 6:
                monitor.sample(2)
            expected[i] = analyzed(model, *batch(i))
            step(model, optimizer, *batch(i))
    run = gyroscope.load(tmp_path / "run")
    assert run.where("lambda_f").tolist() == [4, 6, 7]
    for at in (4, 6, 7):
        assert_recorded(run, at, expected[at])


def test_quantities_have_units_and_meanings(tmp_path: Path) -> None:
    run, _ = watched(tmp_path, Schedule(every=1, p=(0.125, 1.0)), 1)
    names = [*PLAIN, *(f"kappa_{f}_p{p}" for f in "xgf" for p in ("12.5", "100"))]
    assert set(names) <= run.quantities.keys()
    assert not {name for name in run.quantities if name.startswith("kappa")} - set(names)
    for name in names:
        assert run.quantities[name].unit
        assert len(run.quantities[name].meaning) > 15
    assert "12.5 %" in run.quantities["kappa_g_p12.5"].meaning
    assert {"dying", "full", "weight_norm"} <= run.quantities.keys()


def test_no_p_records_the_largest_eigenvalues_alone(tmp_path: Path) -> None:
    run, expected = watched(tmp_path, Schedule(every=1, p=()), 2)
    assert not [name for name in run.quantities if name.startswith("kappa")]
    assert "rank_x" not in run.quantities or np.isnan(run.series("rank_x")).all()
    for at in (1, 2):
        reduced = Conditioning(expected[at].entries, (), {}, (), 0.0, 1)
        row = run.steps.tolist().index(at)
        np.testing.assert_allclose(run.series("lambda_f")[row], [e.lambda_f for e in reduced.entries], rtol=2e-5)


def test_nothing_is_recorded_unless_asked_for(tmp_path: Path) -> None:
    run, _ = watched(tmp_path, None, 2)
    assert not {*PLAIN, *KAPPAS} & run.quantities.keys()


def test_what_is_undefined_is_missing_and_what_is_infinite_is_recorded(tmp_path: Path) -> None:
    model = mlp()
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.zero_()  # tanh(0) is 0: the last layer sees nothing, and what is before has no gradient
    run, expected = watched(tmp_path, 1, 1, model=model)
    assert expected[1]["4.weight"].kappa_x[0.5] is None
    assert expected[1]["2.weight"].kappa_g[1.0] == math.inf
    row, first, middle, last = 1, *range(3)
    assert np.isnan(run.series("kappa_x_p50")[row, last])
    assert run.series("lambda_x")[row, last] == 0
    assert np.isinf(run.series("kappa_g_p100")[row, middle])
    assert run.series("lambda_g")[row, first] == 0
    assert np.isnan(run.series("domination")[row, middle])  # of a weight of zero


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_parts_are_one_batch(tmp_path: Path, parts: int) -> None:
    model = mlp()
    optimizer = sgd(model)
    expected = []
    with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=1, **ALWAYS):
        for i in range(3):
            x, y = batch(i)
            expected.append(analyzed(model, x, y))
            optimizer.zero_grad(set_to_none=i % 2 == 0)
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(model(a), b) / parts).backward()
            optimizer.step()
    run = gyroscope.load(tmp_path / "run")
    for at, found in enumerate(expected, start=1):
        assert_recorded(run, at, found)


def scaled(model: nn.Module, optimizer: Any, scaler: Any, x: Tensor, y: Tensor, *, spoil: bool = False) -> None:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    scaler.scale(loss * math.inf if spoil else loss).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaled_loss_has_the_numbers_of_the_loss(tmp_path: Path, fused: bool, unscale: bool) -> None:
    """A fused optimizer is given gradients that are still scaled, and divides by the scale within the step."""
    model = mlp()
    optimizer, scaler = sgd(model, fused=fused), torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
    schedule = Schedule(every=1, scale=scaler.get_scale)
    expected, scales = [], []
    with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=schedule, **ALWAYS) as monitor:
        for i in range(4):
            expected.append(analyzed(model, *batch(i)))
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(batch(i)[0]), batch(i)[1])).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert monitor.error is None
    run = gyroscope.load(tmp_path / "run")
    assert len(set(scales)) > 1
    for at, found in enumerate(expected, start=1):
        assert_recorded(run, at, found)


@pytest.mark.parametrize("fused", [False, True])
def test_samples_of_a_skipped_step_do_not_count(tmp_path: Path, fused: bool) -> None:
    """A scaler that begins too high skips steps: the first that is taken is the first that is analyzed."""
    model = mlp()
    optimizer, scaler = sgd(model, fused=fused), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    schedule = Schedule(every=1, scale=scaler.get_scale)
    expected = []
    with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=schedule, **ALWAYS) as monitor:
        for i in range(5):
            spoil = i in (0, 2)
            if not spoil:
                expected.append(analyzed(model, *batch(i)))
            scaled(model, optimizer, scaler, *batch(i), spoil=spoil)
        assert monitor.error is None
    run = gyroscope.load(tmp_path / "run")
    assert run.where("lambda_f").tolist() == [1, 2, 3]
    for at, found in enumerate(expected, start=1):
        assert_recorded(run, at, found)


def test_several_optimizers_are_analyzed_each_with_its_layers(tmp_path: Path) -> None:
    model = mlp()
    ends, middle = [*model[0].parameters(), *model[4].parameters()], list(model[2].parameters())
    optimizers = [torch.optim.SGD(ends, 0.1), torch.optim.Adam(middle, 0.01)]
    expected = []
    with gyroscope.watch(model, optimizers, tmp_path / "run", conditioning=2, **ALWAYS) as monitor:
        for i in range(4):
            x, y = batch(i)
            expected.append(analyzed(model, x, y))
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert monitor.error is None
    run = gyroscope.load(tmp_path / "run")
    assert run.where("lambda_f").tolist() == [1, 2, 4]
    for at in (1, 2, 4):
        assert_recorded(run, at, expected[at - 1])


def test_a_network_that_another_is_trained_through_is_analyzed_on_its_own_steps(tmp_path: Path) -> None:
    """In a GAN gradients of the generator's loss reach the discriminator, and are thrown away."""
    torch.manual_seed(0)
    nets = nn.ModuleDict({"g": nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)), "d": nn.Linear(5, 3)})
    d, g = sgd(nets["d"], 0.1), sgd(nets["g"], 0.1)
    expected = []
    with gyroscope.watch(nets, [g, d], tmp_path / "run", conditioning=1, **ALWAYS) as monitor:
        for i in range(3):
            x, y = batch(i)
            noise = torch.randn(N, 4, generator=torch.Generator().manual_seed(i))
            d.zero_grad()
            on_d = analyzed(nets["d"], x, y)
            F.cross_entropy(nets["d"](x), y).backward()
            d.step()
            g.zero_grad()
            whole = nn.Sequential(nets["g"], nets["d"])
            on_g = analyzed(whole, noise, y)
            F.cross_entropy(nets["d"](nets["g"](noise)), y).backward()
            g.step()
            expected.append((on_g.entries[:2], on_d.entries[0]))
        assert monitor.error is None
    run = gyroscope.load(tmp_path / "run")
    assert run.layers == ("g.0.weight", "g.2.weight", "d.weight")
    for at, (generator, discriminator) in enumerate(expected, start=1):
        row = run.steps.tolist().index(at)
        for name in ("lambda_x", "lambda_g", "domination"):
            want = [*(getattr(one, name) for one in generator), getattr(discriminator, name)]
            np.testing.assert_allclose(run.series(name)[row], want, rtol=2e-5, err_msg=f"{name} at {at}")


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 7, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x.mean(1))


def test_layers_that_are_used_without_being_called_are_recorded(tmp_path: Path) -> None:
    model = Attends()
    optimizer = sgd(model)
    expected = []
    with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=1, **ALWAYS) as monitor:
        for i in range(3):
            words = torch.randint(7, (N, 4), generator=torch.Generator().manual_seed(i))
            expected.append(analyzed(model, words, words[:, 0]))
            step(model, optimizer, words, words[:, 0])
        assert monitor.error is None
    run = gyroscope.load(tmp_path / "run")
    treated = {"embed.weight", "attention.in_proj_weight", "attention.out_proj.weight", "head.weight"}
    assert set(expected[0].layers) == treated
    unused = [i for i, name in enumerate(run.layers) if name not in treated]
    assert len(unused) == 2
    for at, found in enumerate(expected, start=1):
        assert_recorded(run, at, found)
        assert np.isnan(run.series("lambda_f")[at, unused]).all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_recorded_once(tmp_path: Path, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            h = self.body[0](x)
            return self.body[4](checkpoint(self.body[1:4], h, use_reentrant=reentrant))

    model = Checkpointed()
    optimizer = sgd(model)
    expected = []
    with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=1, **ALWAYS) as monitor:
        for i in range(2):
            expected.append(analyzed(model.body, *batch(i)))
            step(model, optimizer, *batch(i))
        assert monitor.error is None
    run = gyroscope.load(tmp_path / "run")
    for at, found in enumerate(expected, start=1):
        frame = found.to_pandas()
        for name in (*PLAIN, *KAPPAS):
            np.testing.assert_allclose(run.series(name)[at], frame[name], rtol=2e-5, err_msg=name)


def test_evaluation_between_steps_does_not_count(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    expected = []
    with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=1, **ALWAYS):
        for i in range(3):
            expected.append(analyzed(model, *batch(i)))
            with torch.no_grad():
                model(100 * batch(50)[0])
            with torch.inference_mode():
                model(100 * batch(51)[0])
            model(100 * batch(52)[0])  # with gradients on, but none of it is differentiated
            optimizer.zero_grad()
            F.cross_entropy(model(batch(i)[0]), batch(i)[1]).backward()
            with torch.no_grad():
                model(100 * batch(53)[0])
            optimizer.step()
    run = gyroscope.load(tmp_path / "run")
    for at, found in enumerate(expected, start=1):
        assert_recorded(run, at, found)


def penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss with a penalty on the slope of the output, itself a gradient through all layers."""
    x = x.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    return F.cross_entropy(output, y) + slope.square().sum(1).mean()


def gradients_at(model: nn.Sequential, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The gradients of that loss at the output and at the weight of each layer, in float64."""
    twin, outputs = copy.deepcopy(model).double(), []
    for layer in twin[::2]:
        layer._forward_hooks.clear(), layer._forward_pre_hooks.clear()
        layer.register_forward_hook(lambda m, args, h: outputs.append(h))
    loss = penalised(twin, x.double(), y)
    weights = [layer.weight for layer in twin[::2]]
    found = torch.autograd.grad(loss, [*outputs, *weights])
    return list(zip(found[: len(weights)], found[len(weights) :], strict=True))


def test_gradients_on_the_way_to_a_penalty_are_not_those_of_the_loss(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model, 0.01)
    expected = []
    with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=1, **ALWAYS) as monitor:
        for i in range(3):
            expected.append(gradients_at(model, *batch(i)))
            optimizer.zero_grad()
            penalised(model, *batch(i)).backward()
            optimizer.step()
        assert monitor.error is None
    run = gyroscope.load(tmp_path / "run")
    assert run.where("lambda_g").tolist() == [1, 2, 3]
    for at, found in enumerate(expected, start=1):
        lambdas = [float(torch.linalg.eigvalsh(N * g.T @ g)[-1]) for g, _ in found]
        np.testing.assert_allclose(run.series("lambda_g")[at], lambdas, rtol=2e-5, err_msg=f"at step {at}")
        spectral = [float(torch.linalg.matrix_norm(w, 2)) for _, w in found]
        np.testing.assert_allclose(run.series("gradient_spectral")[at], spectral, rtol=2e-5, err_msg=f"at step {at}")


def test_an_input_that_is_overwritten_before_the_step_was_seen_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 3)  # more dimensions than samples: the samples themselves are kept
    optimizer, buffer, y = sgd(model), torch.randn(N, 40), batch(0)[1]
    expected = analyzed(model, buffer.clone(), y)
    with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=1, **ALWAYS):
        F.cross_entropy(model(buffer), y).backward()
        buffer.fill_(7.0)
        optimizer.step()
    assert_recorded(gyroscope.load(tmp_path / "run"), 1, expected)


def test_frozen_layers_are_analyzed_with_the_others(tmp_path: Path) -> None:
    model = mlp()
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = analyzed(model, *batch(1))
    with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=1, **ALWAYS) as monitor:
        step(model, optimizer, *batch(1))
        assert monitor.error is None
    run = gyroscope.load(tmp_path / "run")
    assert_recorded(run, 1, expected, without=("gradient_spectral", "domination"))
    assert np.isnan(run.series("domination")[1]).tolist() == [False, True, False]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Conv2d(4, 3, 3), nn.GELU(),
        nn.Flatten(), nn.Linear(27, 5), nn.Dropout(0.1), nn.Linear(5, 2),
    )  # fmt: skip


def trained(conditioning: Any, folder: Path, *, amp: bool, seen: list[Any]) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    torch.manual_seed(3)
    monitor = gyroscope.watch(model, optimizer, folder, conditioning=conditioning, **ALWAYS)
    for _ in range(4):
        x = torch.randn(4, 2, 7, 7)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            output = model(x)
        loss = output.float().square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    monitor.close()
    seen += [*model.state_dict().values(), torch.get_rng_state()]
    assert monitor.error is None


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
def test_training_is_the_same_to_the_bit(tmp_path: Path, amp: bool) -> None:
    runs: dict[str, list[Any]] = {"without": [], "with": [], "patches": []}
    for name, conditioning in (("without", None), ("with", 1), ("patches", Schedule(every=2, patches=True))):
        trained(conditioning, tmp_path / name, amp=amp, seen=runs[name])
    for other in ("with", "patches"):
        assert len(runs["without"]) == len(runs[other])
        for a, b in zip(runs["without"], runs[other], strict=True):
            assert torch.equal(a, b)
    assert gyroscope.load(tmp_path / "with").where("lambda_f").tolist() == [1, 2, 3, 4]


def test_patches_are_those_of_an_analysis(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(100, 3))
    optimizer, x = sgd(model), torch.randn(N, 2, 7, 7)
    expected = analyzed(model, x, batch(0)[1], patches=True)
    with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=Schedule(every=1, patches=True), **ALWAYS):
        step(model, optimizer, x, batch(0)[1])
    assert expected["0.weight"].dimension_x == 18
    assert_recorded(gyroscope.load(tmp_path / "run"), 1, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_of_a_compiled_model_the_run_says_why_nothing_is_analyzed(tmp_path: Path) -> None:
    model = torch.compile(mlp(), backend="eager")
    optimizer = sgd(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=1, **ALWAYS) as monitor:
        for i in range(2):
            step(model, optimizer, *batch(i))
        assert monitor.error is None
    run = gyroscope.load(tmp_path / "run")
    assert not {*PLAIN, *KAPPAS} & run.quantities.keys()
    assert any("compiled" in event.text for event in run.events)
    assert run.steps.tolist() == [0, 1, 2]


class Fails:
    """A scale that cannot be had the second time."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        if self.asked > 1:
            raise ValueError("no scale")
        return 1.0


def test_an_error_ends_the_analyses_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, plain = mlp(), mlp()
    optimizers = [sgd(model), sgd(plain)]
    fails = Fails()
    with caplog.at_level(logging.WARNING, logger="gyroscope"):
        schedule = Schedule(every=1, scale=fails)
        with gyroscope.watch(model, optimizers[0], tmp_path / "run", conditioning=schedule, **ALWAYS) as monitor:
            for i in range(5):
                step(model, optimizers[0], *batch(i))
                step(plain, optimizers[1], *batch(i))
                if i > 2:
                    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
            assert monitor.error is None
    assert fails.asked == 2
    assert [record.message for record in caplog.records if "conditioning" in record.message] == [
        "The conditioning of layers is no longer measured: ValueError: no scale"
    ]
    run = gyroscope.load(tmp_path / "run")
    assert [event.text for event in run.events if event.kind == "error"] == [
        "the conditioning of layers is no longer measured: ValueError: no scale"
    ]
    assert run.steps.tolist() == list(range(6))
    assert run.where("lambda_f").tolist() == [1]
    assert np.isfinite(run.series("rotation")).all()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_an_error_while_looking_ends_the_analyses_and_nothing_else(tmp_path: Path) -> None:
    """Activations that no sample can be read from, in the middle of training."""
    model = mlp()
    optimizer = sgd(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=1, **ALWAYS) as monitor:
        step(model, optimizer, *batch(0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gyroscope.conditioning.factors.Factor.add", lambda *_, **__: 1 / 0)
            step(model, optimizer, *batch(1))
        for i in (2, 3):
            step(model, optimizer, *batch(i))
        assert monitor.error is None
    run = gyroscope.load(tmp_path / "run")
    assert run.where("lambda_f").tolist() == [1]
    assert run.steps.tolist() == [0, 1, 2, 3, 4]


def test_a_resumed_run_goes_on_with_its_analyses(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    expected = {}
    state: dict[str, Any] = {}
    for steps in (range(1, 6), range(6, 11)):
        with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=4, **ALWAYS) as monitor:
            if state:
                monitor.load_state_dict(state)
            for i in steps:
                expected[i] = analyzed(model, *batch(i))
                step(model, optimizer, *batch(i))
            state = monitor.state_dict()
            assert monitor.error is None
    run = gyroscope.load(tmp_path / "run")
    assert run.steps.tolist() == list(range(11))
    assert run.where("lambda_f").tolist() == [1, 4, 6, 8]
    for at in (1, 4, 6, 8):
        assert_recorded(run, at, expected[at])


def test_a_run_without_analyses_can_be_gone_on_with_and_have_some(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    for conditioning, steps in ((None, range(3)), (1, range(3, 5))):
        with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=conditioning, **ALWAYS) as monitor:
            for i in steps:
                step(model, optimizer, *batch(i))
            assert monitor.error is None
    run = gyroscope.load(tmp_path / "run")
    assert run.steps.tolist() == list(range(6))
    assert run.where("lambda_f").tolist() == [4, 5]


def hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def test_hooks_are_there_for_analyzed_steps_alone(tmp_path: Path) -> None:
    model, counts = mlp(), []
    optimizer = sgd(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=3, activations=False, **ALWAYS) as monitor:
        for i in range(6):
            counts.append(hooks_of(model) > 0)
            step(model, optimizer, *batch(i))
        monitor.sample(1)
        assert hooks_of(model) > 0
    assert counts == [True, False, True, False, False, True]
    assert hooks_of(model) == 0


@pytest.mark.parametrize("when", ["at once", "within a step", "after a step"])
@pytest.mark.parametrize("make", [mlp, Attends])
def test_copies_of_a_watched_model_are_not_watched(tmp_path: Path, make: Callable[[], nn.Module], when: str) -> None:
    """Such as the average of the weights over time, which may be copied at any moment."""
    model = make()
    given = batch(0) if make is mlp else (torch.arange(64).reshape(N, 4) % 7, torch.arange(N) % 7)
    optimizer = sgd(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=1, **ALWAYS) as monitor:
        expected = analyzed(model, *given)
        if when == "after a step":
            step(model, optimizer, *given)
        elif when == "within a step":
            F.cross_entropy(model(given[0]), given[1]).backward()
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        loaded = pickle.loads(pickle.dumps(model))
        for other in (twin, loaded):
            for _ in range(2):
                F.cross_entropy(other(100 * given[0] if make is mlp else given[0]), given[1]).backward()
            assert not reachable(other, "Conditioned")
        if when == "within a step":
            optimizer.step()
        elif when == "at once":
            step(model, optimizer, *given)
        assert monitor.error is None
    assert file.tell() < 2**16
    assert_recorded(gyroscope.load(tmp_path / "run"), 1, expected)


def reachable(model: nn.Module, name: str) -> bool:
    """Whether a hook of the model leads to an object of that class."""
    hooks = itertools.chain.from_iterable(
        (*m._forward_hooks.values(), *m._forward_pre_hooks.values()) for m in model.modules()
    )
    seen: set[int] = set()
    todo: list[Any] = list(hooks)
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | Tensor):
            continue
        seen.add(id(one))
        if type(one).__name__ == name:
            return True
        todo += gc.get_referents(one) if type(one).__module__.startswith("gyroscope") or callable(one) else []
    return False


@pytest.mark.parametrize("make", [mlp, Attends])
def test_nothing_keeps_the_model_alive_after_close(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    model = make()
    optimizer = sgd(model)
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=1, **ALWAYS)
    for i in range(2):
        x, y = batch(i)
        step(model, optimizer, x if make is mlp else y[:, None].expand(-1, 4), y)
    monitor.close()
    alive = weakref.ref(model), weakref.ref(optimizer), weakref.ref(next(model.parameters()))
    del model, optimizer, monitor
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]


def test_two_monitors_at_once_are_both_right(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    expected = {}
    one = gyroscope.watch(model, optimizer, tmp_path / "one", conditioning=1, **ALWAYS)
    two = gyroscope.watch(model, optimizer, tmp_path / "two", conditioning=2, layers="[02]*", **ALWAYS)
    for i in range(1, 5):
        expected[i] = analyzed(model, *batch(i))
        step(model, optimizer, *batch(i))
    one.close(), two.close()
    for at in (1, 2, 4):
        assert_recorded(gyroscope.load(tmp_path / "one"), at, expected[at])
        chosen = Conditioning(expected[at].entries[:2], P, {}, (), 0.0, 1)
        assert_recorded(gyroscope.load(tmp_path / "two"), at, chosen)


def test_a_closed_monitor_looks_at_nothing(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    monitor = gyroscope.watch(model, optimizer, tmp_path / "run", conditioning=1, **ALWAYS)
    step(model, optimizer, *batch(0))
    F.cross_entropy(model(batch(1)[0]), batch(1)[1]).backward()
    monitor.close()
    optimizer.step()
    step(model, optimizer, *batch(2))
    assert gyroscope.load(tmp_path / "run").where("lambda_f").tolist() == [1]


@pytest.mark.parametrize("given", [0, -1, True, False, 2.5, "auto", "", [2], np.float64(2), None])
def test_schedules_that_are_none_are_refused(tmp_path: Path, given: Any) -> None:
    if given is not None:
        model = mlp()
        with pytest.raises(ConditioningError, match='must be a whole number of steps ≥ 1 or "budget"'):
            gyroscope.watch(model, sgd(model), tmp_path / "run", conditioning=given)
        assert not (tmp_path / "run").exists()
        assert hooks_of(model) == 0
    with pytest.raises(ConditioningError, match="`conditioning` must be"):
        Schedule(every=given)


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, "2", None, [1.0], torch.tensor(2.0)])
def test_scales_that_are_none_are_refused(scale: Any) -> None:
    with pytest.raises(ConditioningError, match="finite number > 0 or a function"):
        Schedule(every=1, scale=scale)


def test_schedules_are_plain_numbers_inside() -> None:
    schedule = Schedule(every=np.int64(3), p=np.array([0.5]), scale=np.float32(2.0))
    assert type(schedule.every) is int
    assert schedule.p == (0.5,)
    assert Schedule(every=np.int32(4)).every == 4
    with pytest.raises(ConditioningError, match=r"`p` must be shares .* got 2"):
        Schedule(every=1, p=(2,))


@pytest.mark.parametrize("given", ["budget", Schedule(), Schedule(every="budget", p=())])
def test_a_budget_that_there_is_not_cannot_be_kept(tmp_path: Path, given: Any) -> None:
    model = mlp()
    with pytest.raises(ConditioningError, match="budget=None"):
        gyroscope.watch(model, sgd(model), tmp_path / "run", budget=None, conditioning=given)
    assert not (tmp_path / "run").exists()


def simulated(pace: Pace, steps: int, *, train: float, price: float, first: float = 0.0) -> Iterator[int]:
    """The steps that are analyzed, if a step takes `train` seconds and an analysis `price` more; the first step takes
    `first` on top."""
    following, last = 1, None
    for at in range(1, steps + 1):
        due = at >= following
        outside = train + (price if due else 0.0) + (first if at == 1 else 0.0)
        pace.account(outside=outside, own=0.0, measured=True, sampled=False, exposed=True, analyzed=due)
        if due:
            yield at
            last = at
        if last is not None:
            following = pace.next_conditioning(last)


@pytest.mark.parametrize("first", [0.0, 60.0], ids=["as always", "a slow first step"])
@pytest.mark.parametrize(("train", "price", "apart"), [(0.01, 0.05, 1667), (0.1, 0.05, 167), (0.01, 1e-5, 1)])
def test_analyses_by_budget_take_their_share_of_it(train: float, price: float, apart: int, first: float) -> None:
    """0.3 of a budget of 1 %: the time of 0.003 steps a step."""
    pace = Pace(every=1, budget=0.01, detail_every=100, conditioning="budget")
    found = list(simulated(pace, 12_000, train=train, price=price, first=first))
    assert found[:2] == [1, 33]  # the second is as soon as the price of the first is no longer that of a beginning
    assert np.diff(found[1:]).tolist() == pytest.approx([apart] * (len(found) - 2), abs=1)
    assert len(found) >= 7
    assert price * (len(found) - 2) <= 0.003 * train * 12_000 * 1.01 + price
    assert pace.analysis_interval == pytest.approx(apart, abs=1)


def test_the_interval_follows_the_price() -> None:
    pace = Pace(every=1, budget=0.01, detail_every=100, conditioning="budget")
    list(simulated(pace, 5000, train=0.1, price=0.05))
    dear = list(simulated(pace, 5000, train=0.1, price=0.2))
    assert pace.analysis_interval > 400
    assert len(dear) < 20


def test_before_anything_is_known_no_analysis_but_the_first_is_due() -> None:
    pace = Pace(every=1, budget=0.01, detail_every=100, conditioning="budget")
    assert pace.analysis_interval == 0
    assert pace.next_conditioning(1) > 10**12
    for _ in range(5):
        pace.account(outside=0.01, own=0.0, measured=True, sampled=False, exposed=True)
    assert pace.analysis_interval == 0


def test_steps_between_analyses_are_as_asked_whatever_they_cost() -> None:
    pace = Pace(every=1, budget=0.01, detail_every=100, conditioning=7)
    assert list(simulated(pace, 40, train=0.01, price=10.0)) == [1, 7, 14, 21, 28, 35]
    none = Pace(every=1, budget=0.01, detail_every=100)
    assert none.analysis_interval == 0


def clock_after(*, analyses: bool, **seconds: float) -> Clock:
    clock = Clock(budget=0.01, analyses=analyses)
    for _ in range(100):
        clock.step(seconds["train"])
        clock.measured(seconds["measured"])
    return clock


def test_measuring_leaves_the_analyses_their_share(monkeypatch) -> None:
    """2 ms of 10 ms is 20 %: every 20 steps for 1 %, every 29 for 0.7 %."""
    monkeypatch.setattr("gyroscope.monitor.clock.SECONDS", 0.0)
    assert clock_after(analyses=False, train=0.01, measured=0.002).stretched(every=1) == 20
    assert clock_after(analyses=True, train=0.01, measured=0.002).stretched(every=1) == 29


def test_the_price_of_an_analysis_is_what_its_step_takes_beyond_others() -> None:
    clock = clock_after(analyses=True, train=0.01, measured=0.002)
    assert clock.analysis_price == 0
    clock.analyzed(9.0)  # the first says little
    clock.analyzed(0.042)
    assert clock.analysis_price == pytest.approx(0.030)
    assert clock.analyses_stretched() == 1000
    clock.analyzed(0.072)
    assert clock.analysis_price == pytest.approx(0.045)
    before = clock.total
    clock.analyzed(0.001)  # cheaper than a step: noise
    assert clock.total == before
    assert clock.analysis_price >= 0


def test_costs_say_what_analyses_take() -> None:
    clock = clock_after(analyses=True, train=0.01, measured=0.002)
    clock.analyzed(0.042), clock.analyzed(0.042)
    given = {"interval": 20, "details": 100, "steps": 100, "measured": 100, "held": ""}
    without, with_them = clock.cost(**given), clock.cost(**given, analyses=1000)
    assert without.share == pytest.approx(0.01)
    assert with_them.share == pytest.approx(0.013)
    assert with_them.total_seconds == pytest.approx(0.2 + 2 * 0.032)
