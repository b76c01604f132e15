"""Layers that are dominated by their weights are named, once, while a run is written and from what it holds."""

from __future__ import annotations

import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from torch import nn

import gyroscope
from diagnosis.predict_runs import clusters
from gyroscope.diagnosis.domination import Domination, Episodes, dominated
from gyroscope.diagnosis.live import Live
from gyroscope.diagnosis.standing_out import in_words
from gyroscope.errors import MonitorError
from gyroscope.store import LayerInfo, QuantityInfo, Rows, Writer
from gyroscope_lab import models

STEPS = 8


def normalized(depth: int = 4, *, width: int = 16, scaled: int | None = None, by: float = 300.0) -> nn.Sequential:
    """x_k = ReLU(BN(W_k x_{k−1})), and a linear layer; one of the weights scaled."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for k in range(depth - 1):
        parts += [nn.Linear(16 if k == 0 else width, width, bias=False), nn.BatchNorm1d(width, eps=1e-12), nn.ReLU()]
    model = nn.Sequential(*parts, nn.Linear(width, 10)).double()
    if scaled is not None:
        gyroscope.layers(model)[scaled].parameter.data.mul_(by)
    return model


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def layca(model):
    return gyroscope.Layca(sgd(model), model)


def train(model, path, make=sgd, *, steps=STEPS, each=None, seen=None, **options):
    """Steps with a monitor; `each(i)` is called before the i-th, `seen` gets weights and gradients of each."""
    x, y = clusters(64, (16,))
    optimizer = make(model)
    with gyroscope.watch(model, optimizer, path, **options) as monitor:
        for i in range(steps):
            if each is not None:
                each(i)
            loss = nn.functional.cross_entropy(model(x.double()), y)
            optimizer.zero_grad()
            loss.backward()
            if seen is not None:
                layers = gyroscope.layers(model)
                seen.append([(one.parameter.detach().clone(), one.parameter.grad.clone()) for one in layers])
            optimizer.step()
            monitor.log(loss=loss)
    return gyroscope.load(path)


def findings(run):
    """What the diagnosis says about domination: one finding, or none."""
    return [one for one in gyroscope.diagnose(run) if one.kind == "dominated"]


@pytest.mark.parametrize("make", [sgd, adam])
def test_a_layer_scaled_under_batch_normalization_is_named(tmp_path, make):
    seen: list = []
    with train(normalized(scaled=1), tmp_path, make, seen=seen) as run:
        (found,) = dominated(run)
    assert (found.layer, found.since, found.until, found.spectral) == ("3.weight", 1, None, False)
    (weight, gradient), (before, sound) = seen[2][1], seen[2][0]
    assert found.ratio == pytest.approx((gradient.norm() / weight.norm()).item(), rel=1e-3)
    assert found.ratio < 1e-4 * (sound.norm() / before.norm()).item()


def test_its_gradient_is_that_of_theorem_2():
    gradients = []
    for model in (normalized(), normalized(scaled=1)):
        x, y = clusters(64, (16,))
        nn.functional.cross_entropy(model(x.double()), y).backward()
        gradients.append([layer.parameter.grad for layer in gyroscope.layers(model)])
    for k, (plain, scaled) in enumerate(zip(*gradients, strict=True)):
        torch.testing.assert_close(scaled * (300.0 if k == 1 else 1.0), plain, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("options", [{}, {"conditioning": 1}], ids=["norms", "spectral"])
def test_no_layer_of_a_sound_training_is_named(tmp_path, make, options):
    with train(normalized(), tmp_path, make, steps=40 if not options else STEPS, **options) as run:
        assert dominated(run) == []
        assert findings(run) == []


def test_with_conditioning_the_ratio_is_of_spectral_norms(tmp_path):
    seen: list = []
    with train(normalized(scaled=2), tmp_path, conditioning=1, seen=seen) as run:
        (found,) = dominated(run)
        (said,) = findings(run)
    ratios = [[(torch.linalg.matrix_norm(g, 2) / torch.linalg.matrix_norm(w, 2)).item() for w, g in at] for at in seen]
    assert (found.layer, found.since, found.spectral) == ("6.weight", 1, True)
    assert found.ratio == pytest.approx(ratios[2][2], rel=1e-5)
    assert found.typical == pytest.approx(sorted(ratios[2])[-2], rel=1e-5)  # one of four layers has more
    assert "spectral norm" in str(found)
    assert (said.layers, said.evidence["ratio"]) == (("6.weight",), pytest.approx(found.ratio, rel=1e-3))


def test_only_analysed_steps_count_where_the_conditioning_is_analysed(tmp_path):
    with train(normalized(scaled=0), tmp_path, steps=9, conditioning=3) as run:
        steps = run.where("domination").tolist()
        (found,) = dominated(run)
        (said,) = findings(run)
    assert found.since == said.since == steps[0]


def test_it_is_an_event_of_the_run_once_and_in_words(tmp_path):
    with train(normalized(scaled=1, by=30.0), tmp_path, steps=30) as run:
        (event,) = [event for event in run.events if event.kind == "finding"]
        (found,) = dominated(run)
        (said,) = gyroscope.diagnose(run, mute=["slow_layer"]).alarms
        assert (event.step, event.text) == (1, f"warning: {said.sentence}")
        assert said.sentence.startswith("3.weight is dominated by weights that are large for their gradients since ")
        assert str(found).startswith("3.weight has been dominated by its weight since step 1: its gradient's norm is ")
        assert str(found) in in_words(run)


def test_under_layca_a_large_weight_does_no_harm_and_is_not_named(tmp_path):
    with train(normalized(scaled=1), tmp_path, layca) as run:
        ratio = run.series("gradient_norm")[1:STEPS] / run.series("weight_norm")[1:STEPS]
        assert (ratio[:, 1] < 1e-4 * np.sort(ratio, axis=1)[:, -2]).all()  # Definition 1 holds
        assert dominated(run) == []
        assert findings(run) == []


def test_lower_layers_of_a_hundred_normalized_ones_are_named_after_the_first_step(tmp_path):
    # Figure A10: gradients explode downwards, and after one step the weights do too.
    with train(normalized(100), tmp_path, steps=7) as run:
        places = [run.layers.index(one.layer) for one in dominated(run)]
        assert {one.since for one in dominated(run)} <= {2, 3, 4, 5}
        assert set(range(30)) <= set(places)
        assert max(places) < 60
        assert len(findings(run)[0].layers) == len(places)
        assert "are dominated by their weights, the first one since step 2" in in_words(run)


def test_where_most_of_two_hundred_layers_are_dominated_they_are_all_named(tmp_path):
    seen: list = []
    with train(normalized(200), tmp_path, steps=5, seen=seen) as run:
        found = dominated(run)
        assert set(findings(run)[0].layers) == {one.layer for one in found}
    # By what autograd says; a layer may pass the bound between the steps that are counted and be named earlier.
    ratios = np.array([[(g.norm() / w.norm()).item() for w, g in at] for at in seen[-3:]])
    places = {run.layers.index(one.layer) for one in found}
    below = np.flatnonzero((ratios < 0.01).all(axis=0))
    assert len(below) > 150
    assert set(below.tolist()) <= places <= set(np.flatnonzero((ratios < 0.03).all(axis=0)).tolist())
    assert min(one.typical for one in found) > 0.1


def test_layers_of_which_most_are_scaled_are_all_named(tmp_path):
    model = normalized(8)
    for k in range(5):
        gyroscope.layers(model)[k].parameter.data.mul_(300.0)
    with train(model, tmp_path) as run:
        assert [run.layers.index(one.layer) for one in dominated(run)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("make", [sgd, adam])
def test_a_layer_that_starts_at_zero_makes_the_others_no_dominated_ones(tmp_path, make):
    model = normalized()
    nn.init.zeros_(model[-1].weight)  # its gradient is many times its weight after one step, and so is its update
    with train(model, tmp_path, make, steps=30) as run:
        ratio = run.series("gradient_norm")[2:6] / run.series("weight_norm")[2:6]
        assert (ratio[:, :3].max(axis=1) < 0.03 * ratio[:, 3]).all()
        assert dominated(run) == []


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("name", ["resnet-20", "resnet-lastbn-20", "preresnet-20"])
def test_no_layer_of_a_residual_network_is_named(tmp_path, name, make):
    x, y = clusters(32, (3, 8, 8))
    model = models.make(name, seed=0)
    optimizer = make(model)
    with gyroscope.watch(model, optimizer, tmp_path, activations=False, budget=None):
        for _ in range(6):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    with gyroscope.load(tmp_path) as run:
        assert dominated(run) == []


@pytest.mark.parametrize("slow", [1e-6, 1e-3])
def test_layers_with_a_smaller_rate_of_their_own_are_not_named(tmp_path, slow):
    def rates(model):
        *lower, last = (part for part in model if isinstance(part, nn.Linear))
        groups = [{"params": [one.weight for one in lower], "lr": slow}, {"params": last.parameters()}]
        return torch.optim.SGD(groups, lr=0.1)

    with train(normalized(6), tmp_path, rates, steps=30) as run:
        assert dominated(run) == []


class Branched(nn.Module):
    """A branch whose ReLUs are all off, and experts of which one gets the input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.dead = nn.Linear(16, 16), nn.Linear(16, 16)
        self.experts, self.last = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 10)
        nn.init.constant_(self.dead.bias, -1000.0)

    def forward(self, x):
        h = torch.relu(self.first(x)) + torch.relu(self.dead(x))
        return self.last(torch.relu(h + sum(expert(h) * float(k == 0) for k, expert in enumerate(self.experts))))


@pytest.mark.parametrize("options", [{}, {"conditioning": 1}], ids=["norms", "spectral"])
def test_layers_whose_gradient_is_zero_have_none_and_are_not_dominated(tmp_path, options):
    with train(Branched().double(), tmp_path, **options) as run:
        assert (run.series("gradient_norm")[1:STEPS, [run.layers.index("dead.weight")]] == 0).all()
        assert dominated(run) == []
        assert findings(run) == []
        assert "3 layers (dead.weight, experts.1.weight, experts.2.weight) have no gradient" in in_words(run)


def test_a_layer_that_grows_and_shrinks_is_dominated_meanwhile(tmp_path):
    model = normalized()
    weight = model[3].weight

    def scale(i):
        if i in (5, 12):
            weight.data.mul_(300.0 if i == 5 else 1 / 300.0)

    with train(model, tmp_path, steps=20, each=scale) as run:
        (found,) = dominated(run)
        assert (found.layer, found.since, found.until) == ("3.weight", 6, 13)
        assert str(found).startswith("3.weight was dominated by its weight from step 6 to 13: its gradient's norm was ")
        assert findings(run) == []
        assert "dominated" not in in_words(run)


def test_training_is_the_same_to_the_last_bit(tmp_path):
    x, y = clusters(64, (16,))
    watched, alone = normalized(scaled=1), normalized(scaled=1)
    with train(watched, tmp_path) as run:
        assert findings(run)
    optimizer = sgd(alone)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(alone(x.double()), y).backward()
        optimizer.step()
    for one, other in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)


def test_layers_are_named_by_the_writers_thread(tmp_path, monkeypatch):
    threads = set()
    stated = Live.stated

    def noting(self, **options):
        threads.add(threading.current_thread())
        return stated(self, **options)

    monkeypatch.setattr(Live, "stated", noting)
    train(normalized(), tmp_path).close()
    assert threads
    assert threading.main_thread() not in threads


def test_a_run_that_is_gone_on_with_does_not_name_again(tmp_path):
    model = normalized(scaled=1, by=30.0)
    train(model, tmp_path, steps=10).close()
    with train(model, tmp_path, steps=10) as run:
        assert len(run.attempts) == 2
        assert run.steps[-1] == 20
        assert sum(event.kind == "finding" for event in run.events) == 1
        (found,) = dominated(run)
        assert (found.since, found.until) == (1, None)


def test_layers_of_two_optimizers_are_compared_with_their_own(tmp_path):
    one, other = normalized(scaled=1), normalized()
    for weight in other.parameters():  # a smaller network altogether: all its gradients are a 10⁻⁶ of the other's
        weight.register_hook(lambda g: 1e-6 * g)
    model = nn.ModuleList([one, other])
    optimizers = [sgd(one), sgd(other)]
    x, y = clusters(64, (16,))
    with gyroscope.watch(model, optimizers, tmp_path):
        for _ in range(STEPS):
            for part, optimizer in zip(model, optimizers, strict=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(part(x.double()), y).backward()
                optimizer.step()
    with gyroscope.load(tmp_path) as run:
        assert [found.layer for found in dominated(run)] == ["0.3.weight"]
        assert len(findings(run)) == 1


def of_moving(values):
    """The largest value that a tenth of all exceed, one at least; in networks of two layers the mean."""
    ordered = sorted(values, reverse=True)
    exceeding = max(1, len(ordered) // 10)
    return ordered[exceeding] if len(ordered) > 2 else float(np.mean(ordered))


def literal(ratio, update, *, threshold, share, patience):
    """Layer by layer and measurement by measurement: (layer, since, until) of each time."""
    found = []
    known = ~np.isnan(ratio)
    starts = ratio[known.argmax(axis=0), np.arange(ratio.shape[1])] == 0  # behind a gain that starts at zero
    ratio = np.where(starts, np.nan, ratio)
    for layer in range(ratio.shape[1]):
        inside, count, first, since = False, 0, None, None
        for step in range(len(ratio)):
            r, u = ratio[step, layer], update[step, layer]
            if np.isnan(r) or r == 0:
                continue
            known = ratio[step] > 0
            moving, pace = of_moving(ratio[step][known]), of_moving(update[step][known])
            k = 3.0 if inside else 1.0
            low = r < k * threshold and r < k * share * moving and u < k * share * pace
            if low == inside:
                count = 0
                continue
            first = step if count == 0 else first
            count += 1
            if count == patience:
                if inside:
                    found.append((layer, since, first))
                else:
                    since = first
                inside, count = not inside, 0
        if inside:
            found.append((layer, since, None))
    return sorted(found, key=str)


@pytest.mark.parametrize("seed", range(6))
def test_episodes_are_those_of_a_literal_loop_however_measurements_come_in(seed):
    random = np.random.default_rng(seed)
    count = 5 if seed % 2 else 23
    walk = np.cumsum(random.normal(0, 1.0, (200, count)), axis=0)
    ratio = 10 ** np.clip(walk - 2.0, -9, 1)
    ratio[random.random(ratio.shape) < 0.05] = 0.0
    ratio[random.random(ratio.shape) < 0.05] = np.nan
    ratio[random.integers(200, size=5)] = np.nan
    update = 10 ** np.clip(walk + random.normal(0, 0.5, walk.shape) - 3.0, -9, 0)
    bounds = {"threshold": 0.01, "share": 0.1, "patience": 3}
    layers = [LayerInfo(str(i), "linear", (2, 2)) for i in range(count)]
    episodes = Episodes(layers, spectral=False, **bounds)
    begun, at = [], 0
    while at < 200:
        to = min(200, at + int(random.integers(1, 9)))
        begun += episodes.see(range(at, to), ratio[at:to], update[at:to])
        at = to
    expected = literal(ratio, update, **bounds)
    assert sorted(((int(one.layer), one.since, one.until) for one in episodes.found), key=str) == expected
    assert [one.layer for _, one in begun] == [one.layer for one in episodes.found]
    assert len(expected) > 1


def series(path, ratio, *, kinds=None, **motions):
    """A run with these ratios of gradient to weight."""
    ratio = np.asarray(ratio, dtype=np.float32)
    kinds = kinds or ["linear"] * ratio.shape[1]
    values = {"gradient_norm": ratio, "weight_norm": np.ones_like(ratio)}
    values |= {name: np.asarray(motion, dtype=np.float32) for name, motion in motions.items()}
    infos = {name: QuantityInfo(name, "1", name) for name in values}
    layers = [LayerInfo(f"l{i}", kind, (4, 4)) for i, kind in enumerate(kinds)]
    with Writer(path, layers, infos) as writer:
        writer.put(Rows(0, np.arange(len(ratio)), values))
    return closing(gyroscope.load(path))


def test_a_ratio_that_hovers_about_the_bound_is_named_once(tmp_path):
    low = np.array([0.001, 0.002] * 20) * 2.0  # a fiftieth, then a twenty-fifth of the others
    with series(tmp_path, np.stack([low, 0 * low + 0.1, 0 * low + 0.1], axis=1)) as run:
        assert dominated(run) == []  # never below the bound three times in a row
        (found,) = dominated(run, patience=1)
        assert (found.since, found.until) == (0, None)


def test_where_updates_were_not_measured_a_layer_that_rotates_as_fast_as_others_is_not_named(tmp_path):
    """As in captured steps, of which only the weights at the measured ones are known."""
    ratio, unknown = np.tile([1e-6, 0.1, 0.1, 0.1], (9, 1)), np.full((9, 4), np.nan)
    with series(tmp_path / "turns", ratio, update_ratio=unknown, rate_per_step=np.full((9, 4), 0.028)) as run:
        assert dominated(run) == []
        assert findings(run) == []
    still = np.tile([1e-6, 0.028, 0.028, 0.028], (9, 1))
    with series(tmp_path / "stands", ratio, update_ratio=unknown, rate_per_step=still) as run:
        assert [one.layer for one in dominated(run)] == ["l0"]
        assert [one.layers for one in findings(run)] == [("l0",)]


def test_small_ratios_everywhere_are_the_end_of_a_training_and_no_domination(tmp_path):
    falling = np.geomspace(1.0, 1e-9, 50)[:, None] * [1.0, 0.2, 3.0]
    with series(tmp_path, falling) as run:
        assert dominated(run) == []


def test_a_layer_far_below_others_whose_gradient_is_as_large_as_its_weight_is_not_dominated(tmp_path):
    with series(tmp_path, np.tile([0.5, 100.0, 100.0], (9, 1))) as run:
        assert dominated(run) == []
        assert [one.layer for one in dominated(run, threshold=1.0)] == ["l0"]


def test_embeddings_and_layers_without_gradient_are_left_out(tmp_path):
    ratio = np.tile([1e-6, np.nan, 0.1, 0.1], (9, 1))
    with series(tmp_path, ratio, kinds=["embedding", "linear", "linear", "linear"]) as run:
        assert dominated(run) == []
    with series(tmp_path / "linear", ratio) as run:
        assert [one.layer for one in dominated(run)] == ["l0"]


def test_one_layer_alone_is_compared_with_nothing(tmp_path):
    with series(tmp_path, np.full((9, 1), 1e-9)) as run:
        assert dominated(run) == []


def test_a_run_without_the_quantities_says_what_to_record(tmp_path):
    with train(normalized(scaled=1), tmp_path, quantities=["rotation"]) as run:
        with pytest.raises(MonitorError, match=r"no gradient_norm and no weight_norm.*watch\(conditioning=...\)"):
            dominated(run)
        assert "dominated" not in in_words(run)


@pytest.mark.parametrize(
    "given",
    [
        {"threshold": 0.0}, {"share": 1.0}, {"patience": 0}, {"threshold": "x"}, {"share": None}, {"patience": 2.5},
        {"patience": np.nan},
    ],
    ids=str,
)  # fmt: skip
def test_bounds_that_mean_nothing_are_refused(tmp_path, given):
    with series(tmp_path, np.ones((3, 2))) as run, pytest.raises(MonitorError, match=next(iter(given))):
        dominated(run, **given)


def test_words_say_which_norm():
    assert "its gradient's spectral norm" in str(Domination("a", 1, None, 1e-5, 0.1, spectral=True))
    assert "its gradient's norm" in str(Domination("a", 1, None, 1e-5, 0.1))


class Branch(nn.Module):
    """A residual branch whose last gain starts at zero, as in many image networks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16)
        )
        nn.init.zeros_(self.inner[-1].weight)

    def forward(self, x):
        return x + self.inner(x)


def test_branches_behind_a_gain_that_starts_at_zero_are_not_dominated(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), *(Branch() for _ in range(4)), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x, y = torch.randn(64, 8), torch.randint(4, (64,))
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None) as monitor:
        for _ in range(8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    with gyroscope.load(monitor.path) as run:
        ratio = run.series("gradient_norm")[2:8] / run.series("weight_norm")[2:8]
        assert (ratio[:, 1:-1] < 0.03 * ratio[:, [-1]]).all()  # what would be called dominated otherwise
        assert dominated(run) == []
        assert [event.text for event in run.events if event.kind == "finding"] == []


def test_a_layer_whose_gradient_vanishes_is_not_said_to_need_a_smaller_weight(tmp_path):
    torch.manual_seed(0)
    parts = [part for _ in range(9) for part in (nn.Linear(16, 16), nn.Sigmoid())]
    run = train(nn.Sequential(*parts, nn.Linear(16, 10)).double(), tmp_path / "run")
    found = dominated(run)
    assert found
    for one in found:
        assert "smaller weight" not in str(one)
        assert "Its weight is too large, or its gradient vanishes." in str(one)
