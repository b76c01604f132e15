"""Reports: one file with everything in it, and bad input in words."""

import json
import logging
import os
import re
import shutil
import sqlite3
import sys
from base64 import b64decode

import numpy as np
import pytest
import torch

import gyroscope
from gyroscope.errors import PageError, StoreError
from gyroscope.page.data import head, summary
from gyroscope.page.frames import frame
from gyroscope.store import LayerInfo, QuantityInfo, Writer, load
from gyroscope.store.example import write_example
from oracles.page import decode
from page.made import HOSTILE, written
from page.test_document import Read

pytestmark = pytest.mark.usefixtures("small_bundle")


def read(path):
    """The configuration of a report, the heads of its runs, and their frames by id."""
    found = Read(path.read_text(encoding="utf-8"))
    config = json.loads(found.data.pop("gyroscope")[1])
    heads = {id: json.loads(text) for id, (kind, text) in found.data.items() if kind == "application/json"}
    frames = {id: b64decode(text, validate=True) for id, (kind, text) in found.data.items() if id not in heads}
    return config, heads, frames


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    for name in ("a", "b", "c"):
        write_example(folder / name).close()
    return folder


def test_a_report_holds_the_summary_the_head_and_every_series(three, tmp_path):
    config, heads, frames = read(gyroscope.report(three / "a", tmp_path / "report.html"))
    with load(three / "a") as run:
        assert config["runs"] == [summary(run, id="0")]
        assert heads == {"run-0": head(run, id="0")}
        assert frames == {f"run-0-{i}": frame(run, name) for i, name in enumerate(run.quantities)}
    assert (config["mode"], config["version"], config["title"]) == ("report", gyroscope.__version__, "a")
    assert (config["about"], config["docs"]) == ([], "")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", config["made"])


def test_frames_are_found_by_the_place_of_their_quantity_in_the_head(tmp_path):
    nothing = np.full((3, 2), np.nan)
    series = {"rate": nothing, "rotation": np.ones((3, 2)), "lr": nothing, "weight_norm": np.ones((3, 2))}
    with written(tmp_path / "run", series) as run:
        _, heads, frames = read(gyroscope.report(run, tmp_path / "report.html"))
    assert [one["name"] for one in heads["run-0"]["quantities"]] == ["rotation", "weight_norm"]
    assert {id: decode(data)[0]["quantity"] for id, data in frames.items()} == {
        "run-0-0": "rotation", "run-0-1": "weight_norm",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["run", "path", "text", "file", "list", "folder"])
def test_runs_are_given_in_many_ways(three, tmp_path, kind):
    given = {
        "run": load(three / "a"),
        "path": three / "a",
        "text": str(three / "a"),
        "file": three / "a" / "run.sqlite",
        "list": [three / "a", load(three / "a"), str(three / "b")],
        "folder": three,
    }[kind]
    config, _, _ = read(gyroscope.report(given, tmp_path / "report.html"))
    assert [one["name"] for one in config["runs"]] == {"list": ["a", "b"], "folder": ["a", "b", "c"]}.get(kind, ["a"])
    assert [one["id"] for one in config["runs"]] == list("012"[: len(config["runs"])])
    assert config["title"] == {"list": "2 runs", "folder": "3 runs"}.get(kind, "a")


def test_a_monitor_is_reported_while_it_records(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gyroscope.watch(model, optimizer, tmp_path / "run", every=1, budget=None) as monitor:
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        config, heads, _ = read(gyroscope.report(monitor, tmp_path / "report.html"))
    [shown] = config["runs"]
    assert (shown["state"], shown["steps"]) == ("running", 3)
    assert heads["run-0"]["state"] == "running"


def test_labels_name_the_runs_and_come_before_the_names_in_a_folder(three, tmp_path):
    given, labels = [three / "a", three / "b", three], ["plain", None, "all"]
    config, heads, _ = read(gyroscope.report(given, tmp_path / "report.html", labels=labels, title="Mine"))
    assert [one["name"] for one in config["runs"]] == ["plain", "b", "all/c"]
    assert [heads[f"run-{i}"]["name"] for i in range(3)] == ["plain", "b", "all/c"]
    assert config["title"] == "Mine"


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    for parent in ("one", "two"):
        write_example(tmp_path / parent / "seed0").close()
    config, _, _ = read(gyroscope.report([tmp_path / "one", tmp_path / "two"], tmp_path / "report.html"))
    assert [one["name"] for one in config["runs"]] == ["one/seed0", "two/seed0"]


def test_about_is_given_as_text_or_as_paragraphs(three, tmp_path):
    for about in ("What is shown:\nthree runs.\n\n \nAnd more.", ["What is shown: three runs.", "And more."]):
        config, _, _ = read(gyroscope.report(three, tmp_path / "report.html", about=about))
        assert config["about"] == ["What is shown: three runs.", "And more."]


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    draw = np.random.default_rng(0)
    rotation = np.cumsum(draw.random((1000, 40)), axis=0) / 1000
    return written(tmp_path_factory.mktemp("long") / "run", {"rotation": rotation, "gradient_norm": np.exp(rotation)})


def test_long_series_are_binned_unless_all_is_kept(long, tmp_path):
    headers = {}
    for name, options in {"default": {}, "few": {"bins": 100}, "full": {"full": True}}.items():
        _, heads, frames = read(gyroscope.report(long, tmp_path / "report.html", **options))
        headers[name] = decode(frames["run-0-0"])[0]
        assert bool(heads["run-0"]["notes"]) == (name != "full")
    assert [(one["bins"], one["exact"]) for one in headers.values()] == [(512, False), (100, False), (1000, True)]


def test_values_of_one_small_run_are_exact_and_those_of_several_are_codes(three, tmp_path):
    for given, encoding in ((three / "a", "float32"), (three, "codes")):
        _, _, frames = read(gyroscope.report(given, tmp_path / "report.html"))
        assert {decode(data)[0]["encoding"] for data in frames.values()} == {encoding}


def test_hostile_names_become_text(tmp_path):
    layers = [HOSTILE, "{{7*7}}", "\u202eb\x1b"]
    path = written(tmp_path / "run", {"rotation": np.zeros((2, 3))}, layers=layers).path
    out = gyroscope.report(path, tmp_path / "report.html", labels=[HOSTILE], about=HOSTILE, title=HOSTILE)
    config, heads, _ = read(out)
    assert (config["title"], config["about"], config["runs"][0]["name"]) == (HOSTILE, [HOSTILE], HOSTILE)
    assert [one["name"] for one in heads["run-0"]["layers"]] == [HOSTILE, "{{7*7}}", "\\u202eb\\u001b"]
    assert "alert(1)" not in "".join(Read(out.read_text()).scripts)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", out.read_text())


def test_a_report_is_written_whole_or_not_at_all(three, tmp_path, monkeypatch):
    target = tmp_path / "report.html"
    target.write_text("before")

    def stop(config, data):
        yield "<!doctype"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["gyroscope.page.report"], "document", stop)
    with pytest.raises(PageError, match=r"report.html cannot be written: No space left on device\. Check its folder"):
        gyroscope.report(three / "a", target)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert target.read_text() == "before"


def test_the_folder_of_the_report_is_made(three, tmp_path):
    assert gyroscope.report(three / "a", tmp_path / "new" / "er" / "report.html").is_file()


def test_a_run_of_no_steps_makes_a_page(tmp_path):
    about = {"rotation": QuantityInfo("rotation", "1", "cosine distance")}
    Writer(tmp_path / "run", [LayerInfo("fc.weight", "linear", (3, 2))], about).close()
    config, heads, frames = read(gyroscope.report(tmp_path / "run", tmp_path / "report.html"))
    assert (config["runs"][0]["measured"], frames) == (0, {})
    assert heads["run-0"]["recorded"].startswith("Nothing has been measured yet")


def newer(run):
    with sqlite3.connect(run / "run.sqlite") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def truncated(run):
    os.truncate(run / "run.sqlite", 5000)


def no_database(run):
    (run / "run.sqlite").write_bytes(b"not a database at all" * 100)


def changed(run):
    with sqlite3.connect(run / "run.sqlite") as connection:
        connection.execute("UPDATE series SET data = x'00000000', crc = 7 WHERE step = 30")
    connection.close()


def deleted(run):
    shutil.rmtree(run)


DAMAGES = {
    newer: "was written by a newer Gyroscope",
    truncated: "is damaged",
    no_database: "is not a run",
    changed: "is damaged: the values of",
    deleted: "There is no run at",
}


@pytest.mark.parametrize(("damage", "says"), DAMAGES.items(), ids=lambda given: getattr(given, "__name__", ""))
def test_one_unreadable_run_is_listed_and_the_rest_is_shown(three, tmp_path, caplog, damage, says):
    shutil.copytree(three, tmp_path / "runs")
    damage(tmp_path / "runs" / "b")
    given = [tmp_path / "runs" / name for name in "abc"]
    with caplog.at_level(logging.WARNING, "gyroscope"):
        config, heads, _ = read(gyroscope.report(given, tmp_path / "report.html"))
    assert [one["state"] for one in config["runs"]] == ["ended", "unreadable", "ended"]
    assert [one["name"] for one in config["runs"]] == ["a", "b", "c"]
    assert says in config["runs"][1]["error"]
    assert list(heads) == ["run-0", "run-2"]
    [record] = caplog.records
    assert record.getMessage() == config["runs"][1]["error"]


@pytest.mark.parametrize(("damage", "says"), DAMAGES.items(), ids=lambda given: getattr(given, "__name__", ""))
def test_an_unreadable_run_alone_is_an_error(three, tmp_path, damage, says):
    shutil.copytree(three / "a", tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(StoreError, match=says):
        gyroscope.report(tmp_path / "a", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_unreadable_runs_in_a_folder_come_last_and_are_collected(three, tmp_path):
    shutil.copytree(three, tmp_path / "runs")
    no_database(tmp_path / "runs" / "a")
    broken = []
    config, _, _ = read(gyroscope.report(tmp_path / "runs", tmp_path / "report.html", broken=broken))
    assert [one["name"] for one in config["runs"]] == ["b", "c", "a"]
    assert [one["state"] for one in config["runs"]] == ["ended", "ended", "unreadable"]
    assert [str(error) for error in broken] == [config["runs"][2]["error"]]


def test_several_unreadable_runs_are_one_error(tmp_path):
    with pytest.raises(PageError, match=r"^None of 2 runs can be shown\. There is no run at .*x: "):
        gyroscope.report([tmp_path / "x", tmp_path / "y"], tmp_path / "report.html")


def test_an_empty_folder_is_an_error_alone_and_told_of_beside_others(three, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(PageError, match=r"There are no runs in .*empty; `gyroscope runs "):
        gyroscope.report(tmp_path / "empty", tmp_path / "report.html")
    broken = []
    config, _, _ = read(gyroscope.report([tmp_path / "empty", three / "a"], tmp_path / "report.html", broken=broken))
    assert [one["name"] for one in config["runs"]] == ["a"]
    assert [type(error) for error in broken] == [PageError]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": 5}, "`path` must be the file to write, got 5. Try 'report.html'."),
        ({"path": ""}, "`path` must be the file to write, got ''. Try 'report.html'."),
        ({"path": "a\0b"}, "`path` must be the file to write, got 'a\\x00b'. Try 'report.html'."),
        ({"bins": 0}, "`bins` must be a whole number ≥ 1, got 0. Try 512."),
        ({"bins": 1.5}, "`bins` must be a whole number ≥ 1, got 1.5. Try 512."),
        ({"full": "no"}, "`full` must be True or False, got 'no'."),
        ({"title": 5}, "`title` must be text, got 5. Try 'My runs'."),
        ({"about": [5]}, "`about` must be text, or a list of paragraphs, got [5]. Try 'What is shown.'."),
        ({"labels": "ab"}, "`labels` must have a text, or None, for each of 2 runs, got 'ab'. Try labels=None."),
        ({"labels": [5, ""]}, "`labels` must have a text, or None, for each of 2 runs, got [5, '']. Try labels=None."),
        ({"runs": 5}, "`runs` must be runs, their folders or monitors, got 5. Try 'runs/first', or a list of these."),
        ({"runs": []}, "`runs` must be at least one run, got none. Try 'runs/first'."),
    ],
)
def test_options_that_are_invalid_are_rejected(three, tmp_path, options, says):
    with pytest.raises(PageError) as error:
        gyroscope.report(**{"runs": [three / "a", three / "b"], "path": tmp_path / "report.html"} | options)
    assert str(error.value) == says
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_file_to_write(three, tmp_path):
    with pytest.raises(PageError) as error:
        gyroscope.report(three / "a", tmp_path)
    says = f"`path` must be the file to write, got the folder {tmp_path}. Try {tmp_path}/report.html."
    assert str(error.value) == says


def test_a_folder_that_cannot_be_made_is_said_in_words(three, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PageError, match=r"report\.html cannot be written: .*file is a file\. Check"):
        gyroscope.report(three / "a", tmp_path / "file" / "report.html")


def test_reading_for_a_report_leaves_a_run_as_it_was(three, tmp_path):
    shutil.copytree(three / "a", tmp_path / "a")
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    gyroscope.report(tmp_path / "a", tmp_path / "report.html")
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
