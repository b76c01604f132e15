import csv
import io
import json
import os
import sys
import threading

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest
from runs_for_tests import LAYERS, rows, write

from gyroscope.errors import MissingExtraError, StoreError
from gyroscope.store import Event, LayerInfo, QuantityInfo, Rows, Scalars, Writer, export, load

ROTATION = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
ROTATION[0] = [0, np.nan, 1e-30]
RATE = np.float32([[0.1, 0.2, np.inf]])
NAMES = [layer.name for layer in LAYERS]


@pytest.fixture(params=["whole", "in pieces"])
def run(tmp_path, request, monkeypatch):
    if request.param == "in pieces":
        monkeypatch.setattr(export, "_PIECE", 6)
    path = write(
        tmp_path / "run",
        Rows(0, np.array([0, 1, 2, 5]), {"rotation": ROTATION}),
        rows(5, rate=RATE),
        *(Scalars(step, {"loss": value}) for step, value in ((1, 0.1), (3, float("nan")), (5, float("inf")))),
        Event(2, "note", 'said "hello",\nthen left', time=1.5),
        meta={"lr": 0.1},
    )
    with load(path) as found:
        yield found


def long_table():
    return {
        "step": np.repeat([0, 1, 2, 5], 3),
        "layer": NAMES * 4,
        "rotation": ROTATION.ravel(),
        "rate": np.concatenate([np.full(9, np.nan, np.float32), RATE[0]]),
    }


def assert_long(frame):
    assert list(frame.columns) == ["step", "layer", "rotation", "rate"]
    for column, expected in long_table().items():
        np.testing.assert_array_equal(frame[column].to_numpy(), expected)


def assert_wide(frame):
    assert list(frame.columns) == NAMES
    np.testing.assert_array_equal(frame.index, [0, 1, 2, 5])
    np.testing.assert_array_equal(frame.to_numpy(), ROTATION)


def test_pandas_long_wide_and_scalar(run):
    assert_long(run.to_pandas())
    assert_wide(run.to_pandas("rotation"))
    assert run.to_pandas("rotation").index.name == "step"
    assert list(run.to_pandas(["rate"]).columns) == ["step", "layer", "rate"]
    assert run.to_pandas()["layer"].cat.categories.tolist() == NAMES
    loss = run.to_pandas("loss")
    assert loss.index.tolist() == [1, 3, 5]
    np.testing.assert_array_equal(loss["loss"], [0.1, np.nan, np.inf])


def test_parquet_long_wide_and_scalar(run, tmp_path):
    assert_long(pd.read_parquet(run.to_parquet(tmp_path / "long.parquet")))
    assert_wide(pd.read_parquet(run.to_parquet(tmp_path / "wide.parquet", "rotation")).set_index("step"))
    loss = pd.read_parquet(run.to_parquet(tmp_path / "loss.parquet", "loss"))
    np.testing.assert_array_equal(loss["loss"], [0.1, np.nan, np.inf])


def test_parquet_keeps_float32_and_says_what_the_quantities_are(run, tmp_path):
    schema = pyarrow.parquet.read_schema(run.to_parquet(tmp_path / "run.parquet"))
    assert str(schema.field("rotation").type) == "float"
    about = json.loads(schema.metadata[b"gyroscope"])
    assert about["run"] == "run"
    assert about["meta"] == {"lr": 0.1}
    assert about["quantities"]["rate"] == ["rad", "angle since the last measured step"]


def test_csv_long_wide_and_scalar(run, tmp_path):
    def read(path):
        return pd.read_csv(path, dtype=dict.fromkeys(["rotation", "rate", *NAMES], np.float32))

    assert_long(read(run.to_csv(tmp_path / "long.csv")))
    assert_wide(read(run.to_csv(tmp_path / "wide.csv", "rotation")).set_index("step"))
    loss = read(run.to_csv(tmp_path / "loss.csv", "loss"))
    np.testing.assert_array_equal(loss["loss"], [0.1, np.nan, np.inf])


def test_csv_is_short_and_plain(run, tmp_path):
    lines = run.to_csv(tmp_path / "run.csv").read_bytes().decode().split("\n")
    assert lines[0] == "step,layer,rotation,rate"
    assert lines[1] == "0,conv1.weight,0.0,"
    assert lines[2] == "0,conv2.weight,,"
    assert lines[-2].endswith(",inf")


def test_csv_quotes_a_layer_that_needs_it(tmp_path):
    from gyroscope.store import LayerInfo

    odd = LayerInfo('a,"b"\nc', "linear", (2, 2))
    run = load(write(tmp_path / "run", rows(0, layers=1), layers=[odd]))
    text = run.to_csv(tmp_path / "run.csv").read_text()
    assert list(csv.reader(io.StringIO(text)))[1] == ["0", odd.name, "0.0"]


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_json_is_strict_and_holds_everything(run, tmp_path):
    read = json.loads(run.to_json(tmp_path / "run.json").read_text(), parse_constant=refuse)
    assert read["name"] == "run"
    assert read["meta"] == {"lr": 0.1}
    assert read["layers"][0] == {"name": "conv1.weight", "kind": "conv", "shape": [8, 3, 3, 3], "part": 0}
    assert read["quantities"]["rate"]["unit"] == "rad"
    assert read["steps"] == [0, 1, 2, 5]
    rotation = np.array(read["series"]["rotation"], dtype=np.float32)
    np.testing.assert_array_equal(rotation, ROTATION)
    assert read["series"]["rotation"][0][1] is None
    assert read["series"]["rate"][3] == [0.1, 0.2, None]
    assert read["scalars"] == {"loss": {"steps": [1, 3, 5], "values": [0.1, None, None]}}
    assert read["events"] == [{"step": 2, "kind": "note", "text": 'said "hello",\nthen left', "time": 1.5}]
    assert read["attempts"][0]["start_step"] == 0


def test_json_of_some_series(run, tmp_path):
    read = json.loads(run.to_json(tmp_path / "run.json", "rate").read_text())
    assert list(read["series"]) == list(read["quantities"]) == ["rate"]
    assert "loss" in read["scalars"]
    read = json.loads(run.to_json(tmp_path / "run.json", ["loss"]).read_text())
    assert read["series"] == {}


def test_an_empty_run_is_exported_too(tmp_path):
    run = load(write(tmp_path / "run"))
    assert run.to_csv(tmp_path / "run.csv").read_text() == "step,layer\n"
    assert json.loads(run.to_json(tmp_path / "run.json").read_text())["series"] == {}
    assert len(run.to_pandas()) == 0
    assert len(pd.read_parquet(run.to_parquet(tmp_path / "run.parquet"))) == 0


@pytest.mark.parametrize("way", ["to_pandas", "to_parquet", "to_csv", "to_json"])
def test_what_the_run_does_not_have_is_refused_and_nothing_is_written(run, tmp_path, way):
    path = [] if way == "to_pandas" else [tmp_path / "out"]
    for wanted in ("angle", ["rotation", "angle"]):
        with pytest.raises(StoreError, match=r"has no 'angle'. It has rotation, rate, loss"):
            getattr(run, way)(*path, wanted)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", ["to_parquet", "to_csv", "to_json"])
def test_a_path_that_cannot_be_written_is_refused_in_words(run, tmp_path, way):
    with pytest.raises(StoreError, match=r"nowhere.out cannot be written: .*Use another path"):
        getattr(run, way)(tmp_path / "nowhere" / "out")


@pytest.mark.parametrize("way", ["to_parquet", "to_csv", "to_json"])
def test_an_export_that_fails_leaves_what_was_there(run, tmp_path, way, monkeypatch):
    (tmp_path / "out").write_text("the last export")

    def series(*_, **__):
        raise StoreError("the file is damaged")

    monkeypatch.setattr(type(run), "series", series)
    with pytest.raises(StoreError, match="damaged"):
        getattr(run, way)(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "the last export"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.parametrize(("way", "library"), [("to_pandas", "pandas"), ("to_parquet", "pyarrow")])
def test_without_its_library_the_extra_is_named(run, tmp_path, way, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=rf"needs {library}.*pip install 'gyroscope\[export\]'"):
        getattr(run, way)(*([] if way == "to_pandas" else [tmp_path / "out"]))


@pytest.mark.parametrize("way", ["to_csv", "to_json", "to_parquet"])
def test_a_name_that_is_too_long_is_refused_in_words(run, tmp_path, way):
    with pytest.raises(StoreError, match="File name too long"):
        getattr(run, way)(tmp_path / ("x" * 5000))


@pytest.mark.parametrize("way", ["to_csv", "to_json", "to_parquet"])
def test_a_quantity_that_is_named_twice_is_one_column(run, tmp_path, way):
    names = list(run.quantities)[:1]
    once = getattr(run, way)(tmp_path / "once", names).read_bytes()
    assert getattr(run, way)(tmp_path / "twice", names * 2).read_bytes() == once


@pytest.mark.parametrize("way", ["to_csv", "to_json", "to_parquet"])
@pytest.mark.parametrize(("path", "wanted"), [(None, None), ("", None), ("a\0b", None), ("file", 3), ("file", [["a"]])])
def test_a_path_or_a_name_that_is_none_is_refused(run, tmp_path, monkeypatch, way, path, wanted):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StoreError, match=r"The file to write must|`quantity` must be"):
        getattr(run, way)(path, wanted)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("way", ["to_csv", "to_json"])
def test_what_is_no_file_is_written_to_and_stays_what_it_is(run, tmp_path, way):
    wanted = getattr(run, way)(tmp_path / "file").read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    getattr(run, way)(pipe)
    reader.join(30)
    assert got == [wanted]
    assert pipe.is_fifo()


@pytest.mark.parametrize("way", ["to_csv", "to_json", "to_parquet"])
def test_a_link_stays_one_and_what_it_leads_to_is_written(run, tmp_path, way):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "target")
    for _ in range(2):  # it leads to nothing yet, and then to a file
        getattr(run, way)(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "folder" / "target").stat().st_size > 0
    assert sorted(file.name for file in (tmp_path / "folder").iterdir()) == ["target"]


@pytest.mark.parametrize("wanted", [None, "rotation"])
def test_no_name_in_a_csv_is_a_formula(tmp_path, wanted):
    names = ("=1+1", "+1", "-1", "@SUM(A1)", "plain")
    about = {"rotation": QuantityInfo("rotation", "1", "")}
    with Writer(tmp_path / "run", [LayerInfo(name, "linear", (2, 2)) for name in names], about) as writer:
        writer.put(Rows(0, np.array([0]), {"rotation": np.zeros((1, len(names)))}))
    with load(tmp_path / "run") as run:
        table = list(csv.reader(io.StringIO(run.to_csv(tmp_path / "run.csv", wanted).read_text())))
    written = table[0][1:] if wanted else [row[1] for row in table[1:]]
    assert written == ["'=1+1", "'+1", "'-1", "'@SUM(A1)", "plain"]
