import json
import re
from base64 import b64decode

import pytest
from typer.testing import CliRunner

from gyroscope.cli import app
from gyroscope.page import document
from gyroscope.store.example import write_example
from oracles.page import decode
from page.made import write_bundle


@pytest.fixture(autouse=True)
def here(tmp_path, tmp_path_factory, monkeypatch):
    """An empty folder next to three runs, and a small bundle."""
    for name in ("a", "b", "c"):
        write_example(tmp_path / "runs" / name).close()
    monkeypatch.setattr(document, "BUNDLE", write_bundle(tmp_path_factory.mktemp("bundle") / "bundle"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def config(path):
    return json.loads(re.search(r'id="gyroscope">(.*?)</script>', path.read_text()).group(1))


def names(path):
    return [one["name"] for one in config(path)["runs"]]


def test_a_run_becomes_a_file_that_is_named(here):
    result = run("runs/a")
    assert (result.exit_code, result.stderr) == (0, "")
    size = (here / "report.html").stat().st_size
    assert result.stdout == f"Wrote report.html ({size / 1000:.0f} kB)\n"
    assert names(here / "report.html") == ["a"]


@pytest.mark.parametrize(
    ("out", "file"), [("new/x.html", "new/x.html"), ("new/", "new/report.html"), (".", "report.html"), ("x", "x")]
)
def test_the_report_is_written_where_it_says(here, out, file):
    result = run("runs/a", "-o", out)
    assert result.stdout.startswith(f"Wrote {file} (")
    assert names(here / file) == ["a"]


def test_folders_hold_runs_and_labels_name_them(here):
    run("plain=runs/a", "runs/b", "sweep=runs", "--title", "Mine")
    assert names(here / "report.html") == ["plain", "b", "sweep/c"]
    assert config(here / "report.html")["title"] == "Mine"


@pytest.mark.parametrize(("options", "bins"), [(["--bins", "2"], 2), (["--bins", "2", "--full"], 5), ([], 5)])
def test_bins_and_full_reach_the_page(here, options, bins):
    assert run("runs/a", *options).exit_code == 0
    packed = re.search(r'id="run-0-0">([^<]*)<', (here / "report.html").read_text()).group(1)
    assert decode(b64decode(packed))[0]["bins"] == bins


def test_what_cannot_be_read_is_told_of_and_listed_and_the_rest_is_shown(here):
    (here / "runs" / "b" / "run.sqlite").write_bytes(b"not a database at all" * 100)
    (here / "empty").mkdir()
    result = run("runs/a", "runs/b", "nowhere", "empty")
    assert result.exit_code == 1
    shown = config(here / "report.html")["runs"]
    assert [(one["name"], one["state"]) for one in shown] == [
        ("a", "ended"), ("b", "unreadable"), ("nowhere", "unreadable"),
    ]  # fmt: skip
    empty, broken, missing = result.stderr.splitlines()
    assert empty.startswith(f"gyroscope: There are no runs in {here / 'empty'}; ")
    assert broken == f"gyroscope: {shown[1]['error']}"
    assert missing == f"gyroscope: {shown[2]['error']}"
    assert result.stdout.startswith("Wrote report.html")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nowhere"], 1, "gyroscope: There is no run at "),
        (["empty"], 1, "gyroscope: There are no runs in "),
        (["runs/a", "--bins", "0"], 2, "gyroscope: `--bins` must be a whole number ≥ 1, got 0. Try 512."),
        (
            ["runs/a", "-o", "runs/a/run.sqlite/x"],
            1,
            "gyroscope: runs/a/run.sqlite/x cannot be written: runs/a/run.sqlite is a file. ",
        ),
        (["x" * 300], 1, "gyroscope: /"),
    ],
)
def test_what_is_wrong_is_one_line(here, arguments, code, says):
    (here / "empty").mkdir()
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith(says)
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.output
    assert not (here / "report.html").exists()


def test_an_interrupted_report_leaves_nothing(here, monkeypatch):
    def stop(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("gyroscope.page.data.head", stop)
    monkeypatch.setattr("gyroscope.page.frames.packed", stop)
    result = run("runs/a")
    assert (result.exit_code, result.stderr) == (130, "gyroscope: Interrupted.\n")
    assert sorted(path.name for path in here.iterdir()) == ["runs"]
