"""Summaries and heads: what they say is what the run holds, and nothing in them acts on a page."""

import json
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

import gyroscope
from gyroscope.diagnosis.compare import compared
from gyroscope.diagnosis.predict import predictions
from gyroscope.page.data import group_of, head, summary, unreadable
from gyroscope.page.document import json_text
from gyroscope.store import Event, LayerInfo, QuantityInfo, Rows, Scalars, Writer, load
from gyroscope.store.example import write_example
from page.made import HOSTILE, written

#: Names that a page, a template or a terminal would act on, and how they are shown.
NAMES = {
    HOSTILE: HOSTILE,
    "${alert(1)}": "${alert(1)}",
    "{{7*7}}": "{{7*7}}",
    "a\x00b\x1b[2J": "a\\u0000b\\u001b[2J",
    "\u202eevil\u2066": "\\u202eevil\\u2066",
    "<!--": "<!--",
}


def in_json(data):
    """The data as they arrive on the page."""
    return json.loads(json_text(data))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a small network under SGD, with a learning rate that is divided by five after 60 of 100 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [60], gamma=0.2)
    x, y = torch.randn(64, 6), torch.randint(3, (64,))
    folder, meta = tmp_path_factory.mktemp("runs") / "trained", {"batch": 64, "data": {"name": "made"}}
    with gyroscope.watch(model, optimizer, folder, every=1, budget=None, meta=meta) as m:
        for _ in range(100):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            m.log({"loss": loss.item()})
        m.log({"test_accuracy": 0.5})
    return load(folder)


def test_a_summary_says_what_compare_says(trained):
    shown, [row] = summary(trained, id="7"), compared([trained])
    assert (shown["id"], shown["name"], shown["state"], shown["error"]) == ("7", "trained", "ended", None)
    for name in ("optimizer", "rate", "momentum", "loss", "accuracies", "steps"):
        assert shown[name] == getattr(row, name)
    assert shown["weight_decay"] == list(row.weight_decay)
    assert shown["rotation"] == list(row.rotation)
    assert (shown["model"], shown["layers"], shown["measured"]) == ("Sequential", 2, len(trained.steps))
    assert shown["started"] == trained.attempts[0].time
    found = gyroscope.diagnose(trained)
    assert shown["findings"] == {
        severity: sum(one.severity == severity for one in found) for severity in ("serious", "warning", "note")
    }
    assert summary(trained, id="7", name="mine", diagnosis=found) == shown | {"name": "mine"}


def test_hyperparameters_are_flat_and_what_the_monitor_adds_is_apart(trained):
    shown = head(trained, id="0")
    assert shown["options"].items() >= {
        "optimizer.class": "SGD", "optimizer.lr": 0.5, "optimizer.momentum": 0.9, "batch": 64, "data.name": "made",
    }.items()  # fmt: skip
    assert shown["meta"].items() >= {"model": "Sequential", "torch": torch.__version__, "every": "1"}.items()
    assert not shown["options"].keys() & shown["meta"].keys()
    assert summary(trained, id="0")["options"] == shown["options"]


def test_the_sparkline_is_the_mean_rotation_at_forty_steps(trained):
    line = summary(trained, id="0")["sparkline"]
    mean = trained.series("rotation").mean(axis=1)
    assert len(mean) == 101
    assert line == [pytest.approx(float(mean[round(i * 100 / 39)]), rel=1e-3) for i in range(40)]


def test_a_head_has_the_layers_the_quantities_and_their_counts(trained):
    shown = head(trained, id="0")
    assert [(one["name"], tuple(one["shape"]), one["kind"]) for one in shown["layers"]] == [
        (one.name, one.shape, one.kind) for one in trained.layer_table
    ]
    assert {one["name"]: one["count"] for one in shown["quantities"]} == {
        name: len(trained.where(name)) for name in trained.quantities if len(trained.where(name))
    }
    rotation = next(one for one in shown["quantities"] if one["name"] == "rotation")
    assert rotation.pop("last") == pytest.approx(trained.series("rotation")[-1].tolist(), rel=1e-3)
    assert rotation == {
        "name": "rotation", "label": "rotation (cosine distance)", "unit": "1", "scale": "fraction", "noisy": False,
        "group": "rotation", "count": len(trained.where("rotation")), "meaning": trained.quantities["rotation"].meaning,
    }  # fmt: skip
    first, last = int(trained.steps[0]), int(trained.steps[-1])
    assert shown["steps"] == {"count": len(trained.steps), "first": first, "last": last}
    [attempt] = trained.attempts
    assert shown["attempts"] == [{"start_step": 0, "time": attempt.time, "ended": attempt.ended}]
    assert (shown["started"], shown["ended"]) == (attempt.time, attempt.ended)


def test_a_head_has_the_findings_of_diagnose(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e4)
    with gyroscope.watch(model, optimizer, tmp_path / "run", every=1, budget=None) as m:
        for _ in range(30):
            loss = model(torch.ones(2, 4)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            m.log({"loss": loss.item()})
    with load(tmp_path / "run") as run:
        found, shown = gyroscope.diagnose(run), in_json(head(run, id="0", name="mine"))["diagnosis"]
    assert found.serious
    assert (shown["headline"], shown["decided"]) == (found.headline().replace("run:", "mine:"), found.decided)
    assert [(one["kind"], one["severity"], one["sentence"], one["since"]) for one in shown["findings"]] == [
        (one.kind, one.severity, one.sentence, one.since) for one in found
    ]
    assert [tuple(one["layers"]) for one in shown["findings"]] == [one.layers for one in found]


def test_a_learning_rate_that_is_divided_once_is_one_change(trained):
    at = int(trained.where("lr")[np.flatnonzero(np.diff(trained.series("lr", steps=trained.where("lr"))[:, 0]))[0] + 1])
    assert head(trained, id="0")["schedule"] == [{"step": at, "text": "learning rate × 0.2"}]


def schedule_of(folder, lr):
    with written(folder, {"lr": np.asarray(lr)}) as run:
        return [(one["step"], one["text"]) for one in head(run, id="0")["schedule"]]


def test_a_learning_rate_that_keeps_changing_is_one_stretch(tmp_path):
    k = np.arange(50)[:, None]
    lr = np.where(k < 10, 0.1 * k / 10, 0.05 * (1 + np.cos(np.pi * (k - 10) / 39))) * np.ones((1, 2))
    assert schedule_of(tmp_path / "run", lr) == [
        (0, "learning rate rises from 0 to 0.1, until step 10"),
        (10, "learning rate falls from 0.1 to 0, until step 49"),
    ]


def test_changes_say_which_layers_they_are_about(tmp_path):
    lr = np.full((30, 3), 0.1)
    lr[10:, 0] *= 0.5
    lr[20:] *= np.array([0.1, 0.1, 0.2])
    lr[25:, 1:] = 0
    assert schedule_of(tmp_path / "run", lr) == [
        (10, "learning rate of 1 of 3 layers × 0.5"),
        (20, "learning rate × 0.1–0.2 (3 groups of layers)"),
        (25, "learning rate of 2 of 3 layers × 0 (2 groups of layers)"),
    ]
    assert schedule_of(tmp_path / "zero", [[0.0], [0.0], [0.5]]) == [(2, "learning rate from 0 to 0.5")]
    assert schedule_of(tmp_path / "constant", np.full((30, 3), np.float32(0.1))) == []


def test_a_schedule_of_hundreds_of_changes_is_cut(tmp_path):
    assert len(schedule_of(tmp_path / "run", (0.1 + 0.05 * (np.arange(400) % 2))[:, None])) == 60


def test_predictions_are_those_of_the_theory_at_some_steps(trained):
    shown = head(trained, id="0")["predicted"]
    found = {one.layer: one for one in predictions(trained)}
    normalized = trained.layers[0]
    assert found[normalized].scale_invariant
    law = shown["effective_lr"]
    assert law["layers"] == [0]
    places = np.searchsorted(trained.steps, law["steps"])
    np.testing.assert_allclose(law["values"][0], found[normalized].law[places], rtol=1e-3)
    rate = shown["rate_per_step"]
    assert rate["steps"] == [int(trained.steps[0]), int(trained.steps[-1])]
    assert rate["values"] == [[pytest.approx(found[normalized].equilibrium_rate, rel=1e-3)] * 2]
    measured = shown["effective_lr_measured"]
    assert measured["layers"] == [0, 1]
    at = np.searchsorted(trained.steps, measured["steps"])
    expected = [[None if math.isnan(v) else v for v in found[name].effective_lr[at]] for name in trained.layers]
    for values, wanted in zip(measured["values"], expected, strict=True):
        assert values == [None if one is None else pytest.approx(one, rel=1e-3) for one in wanted]


def test_there_is_no_prediction_without_norms(tmp_path):
    with write_example(tmp_path / "run") as run:
        assert head(run, id="0")["predicted"] == {}


def test_scalars_are_exact_if_they_are_few_and_else_binned(tmp_path):
    values = np.exp(-np.arange(50) / 9) + 0.1 * np.random.default_rng(0).random(50)
    values[17] = values[40:50] = np.nan
    records = [Scalars(3 * i, {"loss": value, "perplexity": math.exp(value)}) for i, value in enumerate(values)]
    records += [Scalars(3 * i, {"accuracy": 0.5}) for i in range(4)]
    with written(tmp_path / "run", {"rotation": [[0.0]]}, records=records) as run:
        few, binned = (in_json(head(run, id="0", bins=bins))["scalars"] for bins in (50, 5))
        assert in_json(head(run, id="0", bins=None))["scalars"] == few
        assert "3 logged numbers" not in " ".join(head(run, id="0", bins=50)["notes"])
        assert any("2 logged numbers (loss, perplexity), 5 bins" in note for note in head(run, id="0", bins=5)["notes"])
    assert [one["name"] for one in few] == ["loss", "accuracy", "perplexity"]
    assert few[0] == {
        "name": "loss",
        "steps": [3 * i for i in range(50)],
        "values": [None if math.isnan(one) else pytest.approx(one, rel=1e-8) for one in values],
        "thinned": False,
    }
    assert binned[1] == few[1]
    assert (binned[0]["steps"], binned[0]["thinned"]) == ([27, 57, 87, 117, 147], True)
    for key, of in (("values", np.nanmean), ("min", np.nanmin), ("max", np.nanmax)):
        wanted = [pytest.approx(of(values[i : i + 10]), rel=1e-6) for i in range(0, 40, 10)]
        assert binned[0][key] == [*wanted, None]


def test_of_many_events_and_scalars_some_are_left_out_and_a_note_says_so(tmp_path):
    records = [Event(i, "note", f"event {i}", time=i) for i in range(700)]
    records += [Scalars(0, {f"mine {i}": 1.0 for i in range(150)} | {"loss": 2.0})]
    with written(tmp_path / "run", {"rotation": [[0.0]]}, records=records) as run:
        shown = head(run, id="0")
    assert shown["events_left_out"] == 200
    assert [one["text"] for one in shown["events"]] == [f"event {i}" for i in range(200, 700)]
    assert shown["events"][0] == {"step": 200, "kind": "note", "text": "event 200", "time": 200.0}
    assert len(shown["scalars"]) == 100
    assert shown["scalars"][0]["name"] == "loss"
    assert shown["notes"] == ["Of 151 logged numbers, 100 are shown.", "Of 700 events, the last 500 are shown."]


def test_a_note_says_what_is_binned(tmp_path):
    with written(tmp_path / "run", {"rotation": np.zeros((25, 2))}) as run:
        assert head(run, id="0", bins=25)["notes"] == head(run, id="0", bins=None)["notes"] == []
        [note] = head(run, id="0", bins=10)["notes"]
    assert note.startswith("Series of more than 10 measured steps are shown in 10 bins of up to 3 steps: ")


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([0, 1, 2], "1 quantity of 2 layers at 3 steps from 0 to 2, every step."),
        ([0, 10, 20, 35], "1 quantity of 2 layers at 4 steps from 0 to 35, mostly every 10 steps."),
        ([5], "1 quantity of 2 layers at 1 step."),
    ],
)
def test_what_was_recorded_is_a_sentence(tmp_path, steps, says):
    with written(tmp_path / "run", {"rotation": np.zeros((len(steps), 2))}, steps=steps) as run:
        assert head(run, id="0")["recorded"] == says


def test_quantities_of_sampled_steps_are_counted(tmp_path):
    dying = np.full((20, 2), np.nan)
    dying[::10] = 0.5
    with written(tmp_path / "run", {"rotation": np.zeros((20, 2)), "dying": dying}) as run:
        said = head(run, id="0")["recorded"]
    assert said.endswith("every step; 1 of them on sampled steps only (2 steps).")


def test_a_run_of_no_steps_is_shown_and_says_so(tmp_path):
    about = {"rotation": QuantityInfo("rotation", "1", "cosine distance")}
    Writer(tmp_path / "run", [LayerInfo("fc.weight", "linear", (3, 2))], about).close()
    with load(tmp_path / "run") as run:
        shown, short = in_json(head(run, id="0")), in_json(summary(run, id="0"))
    assert shown["recorded"] == "Nothing has been measured yet; the run has 1 layer."
    assert shown["steps"] == {"count": 0, "first": None, "last": None}
    assert (shown["quantities"], shown["scalars"], shown["schedule"], shown["predicted"]) == ([], [], [], {})
    assert not shown["diagnosis"]["decided"]
    assert (short["steps"], short["measured"], short["rotation"], short["sparkline"]) == (None, 0, None, [])


def test_numbers_that_json_has_not_are_null(tmp_path):
    records = [Scalars(i, {"loss": value}) for i, value in enumerate((1.0, math.inf, math.nan))]
    with written(tmp_path / "run", {"rotation": np.full((3, 2), np.nan)}, records=records) as run:
        assert in_json(head(run, id="0"))["scalars"][0]["values"] == [1.0, None, None]
        assert in_json(summary(run, id="0"))["loss"] is None


def test_names_and_notes_reach_the_page_as_they_are_and_cannot_act_on_it(tmp_path):
    names = list(NAMES)
    series = {name: np.zeros((2, len(names))) for name in ["rotation", *names]}
    records = [Event(0, name, name) for name in names] + [Scalars(0, dict.fromkeys(names, 1.0))]
    meta = {"facts": {"frozen": names[:1]}, "model": HOSTILE, "mine": {name: name for name in names}}
    with written(tmp_path / "run", series, layers=names, records=records, meta=meta) as run:
        shown, short = head(run, id="0", name=names[4]), summary(run, id="0", name=names[4])
    for data in (shown, short):
        text = json_text(data)
        assert "<" not in text
        assert not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
        assert json.loads(text) == data
    said = list(NAMES.values())
    assert [one["name"] for one in shown["layers"]] == said
    assert [one["frozen"] for one in shown["layers"]] == [True] + [False] * 5
    assert [one["name"] for one in shown["quantities"]] == ["rotation", *said]
    assert [(one["kind"], one["text"]) for one in shown["events"]] == [(one, one) for one in said]
    assert {one["name"] for one in shown["scalars"]} == set(said)
    assert {shown["options"][f"mine.{name}"] for name in said} == set(said)
    assert (shown["name"], short["name"], short["model"]) == (said[4], said[4], HOSTILE)


def test_a_text_without_end_is_cut(tmp_path):
    with written(tmp_path / "run", {"rotation": [[0.0]]}, records=[Event(0, "note", "x" * 10**6)]) as run:
        [event] = head(run, id="0")["events"]
    assert event["text"] == "x" * 2000 + "…"


def test_whatever_a_user_keeps_with_a_run_becomes_options(tmp_path):
    meta = {"betas": [0.9, 0.99], "long": list(range(99)), "deep": {"er": [[1], [2]]}, "none": None, "empty": []}
    meta |= {"on": True, "optimizers": [{"class": "SGD", "lr": 0.1}, {"class": "Adam"}]}
    with written(tmp_path / "run", {"rotation": [[0.0]]}, meta=meta) as run:
        assert head(run, id="0")["options"] == {
            "optimizer1.class": "SGD", "optimizer1.lr": 0.1, "optimizer2.class": "Adam", "betas": "0.9, 0.99",
            "long": "99 entries", "deep.er": "2 entries", "on": True,
        }  # fmt: skip


@pytest.mark.parametrize(
    "meta",
    [{"optimizers": 5}, {"facts": 5}, {"facts": {"frozen": 5}}, {"facts": {"frozen": [[5]]}}, {"model": [1]}],
    ids=str,
)
def test_what_others_keep_under_our_names_does_no_harm(tmp_path, meta):
    with written(tmp_path / "run", {"rotation": [[0.0]]}, meta=meta) as run:
        in_json([head(run, id="0"), summary(run, id="0")])


def test_an_unreadable_run_has_all_the_fields_of_a_summary(trained):
    shown = unreadable(ValueError("run.sqlite is\x00 damaged."), id="3", name=HOSTILE)
    assert shown.keys() == summary(trained, id="3").keys()
    assert (shown["state"], shown["error"], shown["name"]) == ("unreadable", "run.sqlite is\\u0000 damaged.", HOSTILE)


def test_every_quantity_has_a_group():
    from gyroscope.monitor.quantities import DEFAULT

    groups = {name: group_of(name) for name in (*DEFAULT, "dying", "moment_p50", "neuron_p10", "lambda_x", "rank_g")}
    assert "other" not in groups.values()
    assert (groups["gradient_norm"], groups["weight_norm_before"]) == ("gradients", "norms")


def test_a_resumed_run_tells_its_attempts_and_shows_what_counts(tmp_path):
    written(tmp_path / "run", {"rotation": np.zeros((6, 1))}, records=[Event(5, "note", "gone")]).close()
    with written(tmp_path / "run", {"rotation": np.ones((3, 1))}, steps=[4, 5, 6], step=3) as run:
        shown = head(run, id="0")
    assert [one["start_step"] for one in shown["attempts"]] == [0, 3]
    assert shown["steps"] == {"count": 7, "first": 0, "last": 6}
    assert shown["events"] == []


def test_a_run_that_is_being_written_is_running(tmp_path):
    about = {"rotation": QuantityInfo("rotation", "1", "cosine distance")}
    with Writer(tmp_path / "run", [LayerInfo("fc.weight", "linear", (3, 2))], about) as writer:
        writer.put(Rows(0, np.array([1]), {"rotation": np.array([[0.5]])}))
        writer.flush()
        with load(tmp_path / "run") as run:
            assert (head(run, id="0")["state"], head(run, id="0")["ended"]) == ("running", None)
            assert summary(run, id="0")["state"] == "running"
