"""A run mirrored into Weights & Biases without a connection (optional: needs wandb)."""

import json
import struct
from pathlib import Path
from time import sleep

import pytest
from sink_runs import LAYERS, QUANTITIES, record, rotation, rows

from gyroscope.integrations import Wandb
from gyroscope.store import Scalars

wandb = pytest.importorskip("wandb")
Record = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record

_BLOCK, _FULL, _LAST = 32768, 1, 4


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    return {"mode": "offline", "dir": str(tmp_path)}


def records(folder):
    """Return the messages of the one run in `folder`, whose file is complete some time after `finish` has returned."""
    (file,) = Path(folder).glob("wandb/offline-run-*/*.wandb")
    for _ in range(300):
        found = messages(file.read_bytes())
        if found and found[-1].HasField("exit"):
            return found
        sleep(0.1)
    pytest.fail(f"{file} was never completed")


def messages(data):
    """Return the messages in a run's file: LevelDB's log format after seven bytes that say what it is."""
    found, position, whole = [], 7, b""
    while position + 7 <= len(data):
        if (left := _BLOCK - position % _BLOCK) < 7:
            position += left  # a header never crosses blocks
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if position > len(data):
            break  # written in part
        if kind in (_FULL, _LAST):
            found.append(Record.FromString(whole))
            whole = b""
    return found


def history(folder):
    """Return the rows of the one run in `folder`."""
    found = [record.history.item for record in records(folder) if record.HasField("history")]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items} for items in found]


def test_a_run_of_its_own_holds_series_scalars_events_and_the_heatmap(tmp_path, offline):
    record(tmp_path / "run", Wandb("digits", every=1, **offline))
    rows = history(tmp_path)
    series = [(row["gyroscope/step"], row[tag]) for row in rows if (tag := "rotation/blocks_1_attn.weight") in row]
    assert series == [(step, pytest.approx(rotation(step, 1))) for step in range(5)]
    assert [row["gyroscope/step"] for row in rows if "rate_per_step/conv1.weight" in row] == [1, 2, 3, 4]
    assert [(row["gyroscope/step"], row["loss"], row["train/accuracy"]) for row in rows if "loss" in row] == [
        (4, 0.5, 0.75)
    ]
    assert not [row for row in rows if "gap" in row]
    (media,) = tmp_path.glob("wandb/offline-run-*/files/media")
    (picture,) = media.glob("images/**/*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    (table,) = media.glob("table/**/*.json")
    assert [2, "note", "the rate was lowered"] in json.loads(table.read_text())["data"]


def test_series_are_drawn_against_the_step_they_were_measured_at(tmp_path, offline):
    record(tmp_path / "run", Wandb("digits", **offline))
    axes = {
        r.metric.glob_name or r.metric.name: r.metric.step_metric for r in records(tmp_path) if r.HasField("metric")
    }
    assert axes["rotation/*"] == axes["loss"] == "gyroscope/step"


def test_a_run_of_its_own_is_finished_and_remembers_what_the_run_is(tmp_path, offline):
    sink = Wandb("digits", **offline, config={"seed": 3})
    record(tmp_path / "run", sink)
    assert dict(sink._run.config) == {"model": "small", "seed": 3}
    with pytest.raises(wandb.errors.UsageError):
        sink._run.log({"loss": 1.0})


def test_a_run_of_yours_stays_open_and_keeps_its_own_steps(tmp_path, offline):
    with wandb.init(project="mine", **offline) as run:
        run.log({"mine": 1.0}, step=7)
        record(tmp_path / "run", Wandb(run=run, every=1))
        run.log({"mine": 2.0}, step=8)
    first, second = history(tmp_path)
    assert (first["_step"], first["mine"], second["_step"], second["mine"]) == (7, 1.0, 8, 2.0)
    assert (first["gyroscope/step"], first["rotation/conv1.weight"]) == (4, pytest.approx(rotation(4, 0)))


def test_a_run_that_is_open_elsewhere_is_left_alone(tmp_path, offline):
    with wandb.init(project="mine", **offline) as run:
        record(tmp_path / "run", Wandb("digits", every=1, **offline))
        assert wandb.run is run
        run.log({"mine": 1.0})
        assert run.summary["_step"] == 0
        assert "loss" not in run.summary.keys()  # noqa: SIM118


def test_axes_of_scalars_in_a_run_of_yours_are_left_as_they_are(monkeypatch):
    class Run:
        def __init__(self):
            self.defined = []

        def define_metric(self, name, step_metric=None):
            self.defined.append((name, step_metric))

        def log(self, data, commit):
            pass

    run = Run()
    sink = Wandb(run=run, quantities=["rotation"])
    sink.open(LAYERS, QUANTITIES, {})
    sink.write(rows(0, 1))
    sink.write(Scalars(0, {"loss": 1.0, "train/loss": 1.0}))
    assert run.defined == [("gyroscope/step", None), ("rotation/*", "gyroscope/step")]
