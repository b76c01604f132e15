"""A run mirrored into MLflow's local store (optional: needs mlflow, or mlflow-skinny with SQLAlchemy and Alembic)."""

import numpy as np
import pytest
from sink_runs import LAYERS, QUANTITIES, record, rotation

from gyroscope.integrations import MLflow
from gyroscope.store import LayerInfo, Rows

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")
pytest.importorskip("alembic")

pytestmark = [  # MLflow's own use of its dependencies, and databases that it leaves to the garbage collector
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def client(store, tmp_path):
    client = mlflow.MlflowClient(tracking_uri=store)
    client.create_experiment("digits", artifact_location=(tmp_path / "artifacts").as_uri())
    return client


def history(client, run_id, name):
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]


def test_a_run_of_its_own_holds_series_scalars_events_and_the_heatmap(tmp_path, store, client):
    sink = MLflow("digits", run_name="first", tracking_uri=store, every=1)
    record(tmp_path / "run", sink)
    series = history(client, sink.run_id, "rotation/blocks_1_attn.weight")
    assert series == [(step, rotation(step, 1)) for step in range(5)]
    assert [step for step, _ in history(client, sink.run_id, "rate_per_step/conv1.weight")] == [1, 2, 3, 4]
    assert history(client, sink.run_id, "train/accuracy") == [(4, 0.75)]
    assert history(client, sink.run_id, "gap") == []
    run = client.get_run(sink.run_id)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.tags["gyroscope.model"] == "small"
    (picture,) = tmp_path.glob("artifacts/**/rotation.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    (events,) = tmp_path.glob("artifacts/**/events.txt")
    assert "2\tnote\tthe rate was lowered\n" in events.read_text()


def test_a_run_of_yours_stays_open(tmp_path, store, client):
    mine = client.create_run(client.get_experiment_by_name("digits").experiment_id)
    record(tmp_path / "run", MLflow(run=mine, tracking_uri=store, every=1))
    assert len(history(client, mine.info.run_id, "rotation/critic.weight")) == 5
    assert client.get_run(mine.info.run_id).info.status == "RUNNING"


def test_an_experiment_that_does_not_exist_is_made(tmp_path, store, client):
    sink = MLflow("new", tracking_uri=store)
    record(tmp_path / "run", sink)
    number = client.get_experiment_by_name("new").experiment_id
    assert client.get_run(sink.run_id).info.experiment_id == number


def test_more_numbers_than_a_call_takes_and_any_name_are_accepted(store, client):
    odd = ["..", "a//b", "ä β", 300 * "x", "a b#c", "-", "tab\there"]
    layers = [LayerInfo(name, "conv", (1,)) for name in [*odd, *(f"layer{i}" for i in range(1200))]]
    sink = MLflow("digits", tracking_uri=store, quantities=["rotation"], every=1)
    sink.open(layers, QUANTITIES, {})
    values = np.arange(2 * len(layers), dtype=np.float32).reshape(2, -1)
    sink.write(Rows(0, np.array([0, 1]), {"rotation": values}))
    sink._send()
    found = client.get_run(sink.run_id).data.metrics
    assert sorted(found.values()) == values[1].tolist()
    assert len(LAYERS) < len(found) == len(layers)


def test_infinity_is_accepted(store, client):
    sink = MLflow("digits", tracking_uri=store)
    sink.open(LAYERS, QUANTITIES, {})
    sink.numbers(0, {"loss": float("inf")})
    sink._send()
    assert history(client, sink.run_id, "loss")[0][1] > 1e300
