"""A run mirrored into Trackio's local database (optional: needs trackio)."""

import os
import tempfile

import pytest
from sink_runs import LAYERS, QUANTITIES, record, rotation

from gyroscope.integrations import Trackio
from gyroscope.store import Scalars

# Trackio decides where its databases are when it is imported.
os.environ.setdefault("TRACKIO_DIR", tempfile.mkdtemp(prefix="trackio-"))
trackio = pytest.importorskip("trackio")
storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage

QUIET = {"auto_log_gpu": False, "auto_log_cpu": False}


@pytest.fixture
def project(tmp_path):
    return f"gyroscope-{tmp_path.name}"


def logs(project, name):
    return storage.get_logs(project, name)


def series(project, name, tag):
    return [(row["step"], row[tag]) for row in logs(project, name) if tag in row]


def test_a_run_of_its_own_holds_series_scalars_events_and_the_heatmap(tmp_path, project):
    record(tmp_path / "run", Trackio(project, name="first", every=1, **QUIET))
    expected = [(step, pytest.approx(rotation(step, 1))) for step in range(5)]
    assert series(project, "first", "rotation/blocks_1_attn.weight") == expected
    assert [step for step, _ in series(project, "first", "rate_per_step/conv1.weight")] == [1, 2, 3, 4]
    assert series(project, "first", "loss") == [(4, 0.5)]
    assert series(project, "first", "gap") == []
    ((step, note),) = series(project, "first", "gyroscope/note")
    assert (step, note["_value"]) == (2, "the rate was lowered")
    ((step, picture),) = series(project, "first", "gyroscope/rotation")
    assert (step, picture["_type"]) == (4, "trackio.image")
    assert storage.get_run_config(project, "first")["model"] == "small"


def test_a_run_of_yours_stays_open(tmp_path, project):
    run = trackio.init(project=project, name="mine", embed=False, **QUIET)
    record(tmp_path / "run", Trackio(run=run, every=1))
    run.log({"mine": 1.0}, step=9)
    run.finish()
    assert len(series(project, "mine", "rotation/critic.weight")) == 5
    assert series(project, "mine", "mine") == [(9, 1.0)]


def test_scalars_with_names_that_trackio_keeps_for_itself_are_renamed(project):
    run = trackio.init(project=project, name="mine", embed=False, **QUIET)
    sink = Trackio(run=run)
    sink.open(LAYERS, QUANTITIES, {})
    sink.write(Scalars(3, {"step": 1.0, "__private": 2.0}))
    run.finish()
    assert series(project, "mine", "scalar_step") == [(3, 1.0)]
    assert series(project, "mine", "scalar___private") == [(3, 2.0)]
