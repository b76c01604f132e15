"""A deep network that guesses because its last layer cannot move is known by its loss and that layer's series."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
import torch
from torch import nn

import gyroscope
from diagnosis.predict_runs import clusters
from gyroscope.diagnosis import dominated
from gyroscope.diagnosis.stall import LAST_LAYER_FILE, stall, stalled
from gyroscope.diagnosis.standing_out import in_words
from gyroscope.errors import MonitorError
from gyroscope.store import LayerInfo, QuantityInfo, Rows, Scalars, Writer
from gyroscope.store.example import write_example

LN10 = log(10)

# Figure 6: a large input at first, a loss that rises, a weight that grows; then a small input, and guessing.
LOSS = np.array([3.0, 6.0, 40.0, 30.0, 9.0, 4.0] + 20 * [LN10] + 10 * [1.5])
INPUT = np.array([500.0, 800.0, 1000.0, 600.0, 90.0, 5.0] + 20 * [0.01] + 10 * [200.0])
NORM = np.array([2.0, 3.0, 5.0, 7.0, 8.0, 9.0] + 20 * [10.0] + 10 * [10.0])


def test_a_stall_is_found_with_all_its_numbers():
    found = stall(LOSS[:26], INPUT[:26], NORM[:26], classes=10, steps=100 + 10 * np.arange(26))
    assert found is not None
    assert (found.since, found.until) == (160, None)
    assert (found.loss, found.guessing) == (LN10, LN10)
    assert (found.lambda_x, found.weight_norm) == ((1000.0, 0.01), (2.0, 10.0))
    assert str(found).startswith(
        "The network has been guessing since step 160: its loss is 2.3, and guessing has 2.3. "
    )
    assert "fell from 1e+03 to 0.01 while the norm of its weight grew from 2 to 10" in str(found)
    assert "gyroscope.layers.last_norm" in str(found)


def test_a_network_that_escapes_has_stalled_until_then():
    found = stall(LOSS, INPUT, NORM, classes=10)
    assert found is not None
    assert (found.since, found.until) == (6, 26)
    assert str(found).startswith("The network guessed from step 6 to 26: its loss was 2.3")


@pytest.mark.parametrize(
    ("loss", "inputs", "norm"),
    [
        (LOSS, np.full(36, 500.0), NORM),
        (LOSS, INPUT, np.full(36, 2.0)),
        (0.9 * LOSS, INPUT, NORM),
        (1.1 * LOSS, INPUT, NORM),
        (LOSS, np.sort(INPUT), NORM),
    ],
    ids=["input as before", "weight as before", "it learns", "worse than guessing", "an input that only grows"],
)
def test_none_of_the_three_signs_may_be_missing(loss, inputs, norm):
    assert stall(loss, inputs, norm, classes=10) is None


def test_a_network_that_has_not_begun_to_learn_has_not_stalled():
    assert stall(np.full(50, LN10), np.full(50, 7.0), np.full(50, 2.0), classes=10) is None


def test_the_number_of_classes_says_what_guessing_is():
    assert stall(LOSS[:26], INPUT[:26], NORM[:26], classes=100) is None
    found = stall(LOSS[:26] + log(10), INPUT[:26], NORM[:26], classes=100)
    assert found is not None
    assert found.guessing == log(100)


def test_spikes_are_no_escape_and_passing_by_is_no_stall():
    spiky = LOSS[:26].copy()
    spiky[[13, 14, 15, 16, 22]] = 50.0  # more than a median of five removes, and less
    found = stall(spiky, INPUT[:26], NORM[:26], classes=10)
    assert found is not None
    assert (found.since, found.until) == (6, None)
    brief = np.concatenate([LOSS[:9], np.full(17, 1.0)])
    assert stall(brief, INPUT[:26], NORM[:26], classes=10) is None


def test_what_is_measured_seldom_counts_until_it_is_measured_again():
    seldom = np.arange(36) % 6 != 0
    found = stall(LOSS, np.where(seldom, np.nan, INPUT), np.where(seldom, np.nan, NORM), classes=10)
    assert found is not None
    assert (found.since, found.until) == (6, 26)
    assert found.lambda_x == (500.0, 0.01)


def test_losses_that_are_not_known_are_left_out():
    unknown = np.arange(36) % 2 == 1
    found = stall(np.where(unknown, np.nan, LOSS), INPUT, NORM, classes=10)
    assert found is not None
    assert (found.since, found.until) == (6, 26)


def test_nothing_known_is_no_stall():
    nan = np.full(9, np.nan)
    assert stall(nan, nan, nan, classes=10) is None
    assert stall(np.full(9, LN10), nan, nan, classes=10) is None
    assert stall([], [], [], classes=10) is None


def test_a_stall_ends_where_losses_stop_being_finite():
    for after in (np.full(30, np.nan), np.full(30, np.inf), np.full(2, np.nan)):
        x, w = (np.concatenate([series[:26], np.full(len(after), series[25])]) for series in (INPUT, NORM))
        found = stall(np.concatenate([LOSS[:26], after]), x, w, classes=10)
        assert found is not None
        assert (found.since, found.until, found.diverged, found.loss) == (6, 26, True, LN10)
        assert str(found).startswith("The network guessed from step 6 to 26, after which its loss is not finite: ")


def test_last_steps_without_a_loss_of_their_own_end_nothing():
    seldom = np.where(np.arange(24) % 4 == 0, LOSS[:24], np.nan)  # three that are not known between, and at the end
    found = stall(seldom, INPUT[:24], NORM[:24], classes=10, patience=3)
    assert found is not None
    assert (found.until, found.diverged) == (None, False)


@pytest.mark.parametrize(
    "given",
    [
        {"patience": 0},
        {"patience": -3},
        {"patience": 1.5},
        {"patience": None},
        {"margin": -1},
        {"margin": np.nan},
        {"fallen": 2.0},
        {"grown": np.inf},
    ],
    ids=str,
)
def test_bounds_of_a_stall_that_mean_nothing_are_refused(given):
    with pytest.raises(MonitorError, match=rf"{next(iter(given))}={next(iter(given.values()))}.*Try the defaults"):
        stall(LOSS, INPUT, NORM, classes=10, **given)


@pytest.mark.parametrize("classes", [1, 0, 2.5, None, "10", np.nan, np.inf])
def test_classes_are_counted(classes):
    with pytest.raises(MonitorError, match="must be a whole number ≥ 2"):
        stall(LOSS, INPUT, NORM, classes=classes)


def test_series_of_different_lengths_are_refused():
    with pytest.raises(MonitorError, match=r"\(36,\), \(35,\), \(36,\) and \(36,\)"):
        stall(LOSS, INPUT[1:], NORM, classes=10)


class Block(nn.Module):
    """x ← ReLU(x + BN(V ReLU(BN(W x))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        parts = [nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
        self.branch = nn.Sequential(*parts, nn.Linear(width, width, bias=False), nn.BatchNorm1d(width))

    def forward(self, x):
        return nn.functional.relu(x + self.branch(x))


def residual(*, last_norm: bool = False, width: int = 16, blocks: int = 10, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    last = [nn.BatchNorm1d(width)] if last_norm else []
    first = [nn.Linear(32, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*first, *(Block(width) for _ in range(blocks)), *last, nn.Linear(width, 10))


def kicked(model: nn.Sequential, path, *, steps: int = 60, kicks: int = 3, **options):
    """Train with some steps that are far too long, then with sensible ones."""
    x, y = clusters(1024, (32,))
    draw = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0, momentum=0.9)
    options = {"conditioning": 2, "layers": f"{len(model) - 1}.weight", "activations": False} | options
    with gyroscope.watch(model, optimizer, path, **options) as monitor:
        for i in range(steps):
            optimizer.param_groups[0]["lr"] = 3.0 if i < kicks else 0.05
            pick = torch.randint(len(x), (128,), generator=draw)
            loss = nn.functional.cross_entropy(model(x[pick]), y[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)
    return gyroscope.load(path)


def test_a_residual_network_kicked_by_long_steps_stalls_and_says_so(tmp_path):
    model = residual()
    before = model[-1].weight.norm().item()
    with kicked(model, tmp_path) as run:
        found = stalled(run)
        assert found is not None
        assert (found.layer, found.until) == ("13.weight", None)
        assert found.loss == pytest.approx(LN10, rel=0.05)
        assert run.scalars["loss"].values[:10].max() > 2 * LN10  # it has been elsewhere
        largest, small = found.lambda_x
        assert largest == np.nanmax(run.series("lambda_x"))
        assert small < 0.01 * largest
        assert found.weight_norm == pytest.approx((before, model[-1].weight.norm().item()), rel=1e-5)
        assert str(found) in in_words(run)


def findings(run):
    return [event for event in run.events if event.kind == "finding" and "guessing" in event.text]


@pytest.mark.parametrize("every", [1, 3])
def test_a_stall_is_domination_of_the_last_layer_and_named_while_the_run_is_written(tmp_path, every):
    with kicked(residual(), tmp_path, every=every, conditioning=every, mute=["too_fast"]) as run:
        found, (one,), (event,) = stalled(run), dominated(run), findings(run)
        (stated,) = gyroscope.diagnose(run, mute=["too_fast"]).alarms
    assert found is not None
    assert (one.layer, one.since, one.until, one.stall) == ("13.weight", found.since, None, found)
    said = f"13.weight has been dominated by its weight since step {found.since}, and the network guesses: λmax of its "
    assert str(one).startswith(said)
    assert event.step == found.since
    assert event.text.startswith(f"serious: The network has been guessing since step {found.since}: its loss is ")
    assert (stated.layers, stated.severity) == (("13.weight",), "serious")


def test_ratios_of_a_stalled_layer_are_those_of_the_last_measurement(tmp_path):
    with kicked(residual(), tmp_path, layers=["*.branch.3.weight", "13.weight"], steps=40) as run:
        (one,) = [found for found in dominated(run) if found.layer == "13.weight"]
        ratios = run.series("domination", steps=run.where("domination")[-1:])[0]
    assert one.spectral
    assert one.ratio == pytest.approx(ratios[-1])
    assert one.typical == pytest.approx(np.sort(ratios)[-2])


def test_a_run_that_is_gone_on_with_does_not_name_its_stall_again(tmp_path):
    model = residual()
    kicked(model, tmp_path, steps=40, mute=["too_fast"]).close()
    with kicked(model, tmp_path, steps=40, kicks=0, mute=["too_fast"]) as run:
        assert len(run.attempts) == 2
        assert run.scalars["loss"].steps[-1] == 80
        assert len(findings(run)) == len(dominated(run)) == 1
        found = stalled(run)
        assert found is not None
        assert found.until is None


def test_the_same_network_with_its_last_input_normalized_does_not_stall(tmp_path):
    with kicked(residual(last_norm=True), tmp_path) as run:
        assert stalled(run) is None
        assert dominated(run) == []
        assert findings(run) == []
        assert "guesses" not in in_words(run)


def recorded(path, *names: str, losses=LOSS):
    """A run of three layers with figure 6 in the second, and the loss under names: at every step, at every ninth."""
    rotation = np.linspace(0, 0.5, 36)
    series = {"lambda_x": INPUT, "weight_norm": NORM, "gradient_norm": 0.01 * NORM, "rotation": rotation}
    infos = {name: QuantityInfo(name, "1", name) for name in series}
    layers = [
        LayerInfo("conv", "conv", (8, 3, 3, 3)),
        LayerInfo("fc", "linear", (10, 8)),
        LayerInfo("x", "other", (2, 2)),
    ]
    nan = np.full(36, np.nan)
    with Writer(path, layers, infos) as writer:
        for name, column in series.items():
            writer.put(
                Rows(0, np.arange(36), {name: np.stack([1 + 0 * column, column, nan], axis=1).astype(np.float32)})
            )
        for i, name in enumerate(names):
            for step in range(0, 36, 1 + 8 * i):
                writer.put(Scalars(step, {name: float(losses[step])}))
    return gyroscope.load(path)


def test_layer_classes_and_loss_are_found_unless_given(tmp_path):
    with recorded(tmp_path, "batch_loss", "loss") as run:
        found = stalled(run)
        assert found is not None
        assert (found.layer, found.since, found.until, found.guessing) == ("fc", 6, 26, LN10)
        assert found == stalled(run, loss="batch_loss", layer="fc", classes=10)
        assert stalled(run, loss="loss") is None  # four losses, and one of them of guessing
        assert stalled(run, layer="conv", classes=10) is None
        assert stalled(run, classes=1000) is None


def test_a_stall_that_is_over_is_told_too(tmp_path):
    with recorded(tmp_path, "loss") as run:
        assert str(stalled(run)) in in_words(run)
        assert "The network guessed from step 6 to 26: its loss was 2.3" in in_words(run)
        (one,) = dominated(run)
        assert (one.layer, one.since, one.until) == ("fc", 6, 26)
        assert str(one).startswith("fc was dominated by its weight from step 6 to 26, and the network guessed: λmax ")


def test_losses_of_a_run_that_are_not_finite_end_its_stall(tmp_path):
    with recorded(tmp_path, "loss", losses=np.where(np.arange(36) < 24, LOSS, np.nan)) as run:
        found = stalled(run)
    assert found is not None
    assert (found.since, found.until, found.diverged) == (6, 24, True)


def test_what_a_file_beside_the_run_holds_of_every_step_is_read_first(tmp_path):
    with recorded(tmp_path) as run:
        with pytest.raises(MonitorError, match="does not hold loss"):
            stalled(run)
        np.savez(
            tmp_path / LAST_LAYER_FILE, loss=LOSS[:26], lambda_x=INPUT[:26], weight_norm=NORM[:26], accuracy=NORM[:26]
        )
        found = stalled(run)
        assert found is not None
        assert (found.layer, found.since, found.until, found.guessing) == ("fc", 7, None, LN10)
        assert str(found) in in_words(run)
        assert [one.layer for one in dominated(run)] == ["fc"]
        with pytest.raises(MonitorError, match="does not hold loss"):
            stalled(run, layer="conv")
        (tmp_path / LAST_LAYER_FILE).write_bytes(b"PK\x03\x04 no archive")
        with pytest.raises(MonitorError, match=r"last_layer.npz cannot be read .* must hold loss, lambda_x"):
            stalled(run)
        assert dominated(run) == []


def test_what_is_missing_is_said_with_how_to_record_it(tmp_path):
    model = residual(blocks=1)
    quantities = ["rotation"]
    with kicked(model, tmp_path, steps=2, conditioning=None, quantities=quantities) as run:
        run.scalars.clear()
        with pytest.raises(MonitorError) as caught:
            stalled(run)
        assert "stall" not in in_words(run)
    for said in ("lambda_x (use watch(conditioning=10))", "weight_norm (watch records it", "loss (use monitor.log("):
        assert said in str(caught.value)


def test_a_layer_or_loss_that_is_not_there_is_named(tmp_path):
    with kicked(residual(blocks=1), tmp_path, steps=2) as run:
        with pytest.raises(MonitorError, match=r"got 'head'. Its last layers are 4\.weight"):
            stalled(run, layer="head")
        with pytest.raises(MonitorError, match=r"does not hold error \(use monitor\.log"):
            stalled(run, loss="error")


def test_a_network_without_any_input_to_its_last_layer_is_told_from_one_with_little():
    loss, norm = [2.4, 9.0, 30.0, 8.0] + 12 * [2.3], [2.0, 4.0, 6.0] + 13 * [9.0]
    little, none = ([50.0, 100.0, 900.0, 40.0] + 12 * [x] for x in (0.01, 0.0))
    assert "carry no information and it hardly moves." in str(stall(loss, little, norm, classes=10))
    assert "carry no information and its gradient is zero, as in a dead network." in str(
        stall(loss, none, norm, classes=10)
    )


def test_a_file_of_the_last_layer_with_columns_of_several_lengths_is_refused(tmp_path):
    with write_example(tmp_path / "run") as run:
        np.savez(run.path / LAST_LAYER_FILE, loss=np.ones(1), lambda_x=np.ones(3), weight_norm=np.ones(6))
        with pytest.raises(MonitorError, match="their lengths are"):
            stalled(run)
