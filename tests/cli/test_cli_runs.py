import json
import re

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from gyroscope.cli.export import export
from gyroscope.cli.runs import runs
from gyroscope.store import LayerInfo, Rows, Scalars, Writer
from gyroscope.store.example import write_example

# As in the application, but with these two commands alone.
app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="markdown")
app.command()(runs)
app.command()(export)


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)))


def cells(output, name):
    """The row of a run in the table that was printed."""
    (line,) = [line for line in output.splitlines() if re.search(rf"│ {re.escape(name)} +│", line)]
    return [cell.strip() for cell in line.split("│")[1:-1]]


def test_runs_lists_what_each_run_holds(run, tmp_path):
    write_example(tmp_path / "runs" / "first").close()
    write_example(tmp_path / "runs" / "sweep" / "second").close()
    result = run("runs")
    assert result.exit_code == 0
    assert cells(result.stdout, "first")[:6] == ["first", "3", "5", "40", "0.600", "ended"]
    assert cells(result.stdout, "sweep/second")[0] == "sweep/second"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", cells(result.stdout, "first")[6])
    assert result.stdout.index("first") < result.stdout.index("sweep/second")


def test_runs_tells_running_from_ended_and_the_empty_from_the_measured(run, tmp_path):
    with Writer(tmp_path / "runs" / "new", [LayerInfo("a", "linear", (2, 2))], {}):
        result = run("runs")
        assert cells(result.stdout, "new")[:6] == ["new", "1", "0", "–", "–", "running"]
    assert cells(run("runs").stdout, "new")[5] == "ended"


def test_runs_of_one_run_shows_it(run, tmp_path):
    write_example(tmp_path / "first").close()
    assert cells(run("runs", "first").stdout, "first")[5] == "ended"


def test_runs_of_an_empty_folder_says_how_to_make_one(run, tmp_path):
    (tmp_path / "runs").mkdir()
    result = run("runs")
    assert result.exit_code == 0
    assert result.stdout.startswith("There are no runs in runs. gyroscope.watch(")


def test_runs_of_no_folder_is_refused(run):
    result = run("runs", "nowhere")
    assert result.exit_code == 1
    assert result.stderr.startswith("gyroscope: There is no folder nowhere. Pass one that runs have been written to")


def test_runs_shows_the_good_ones_and_names_the_broken(run, tmp_path):
    write_example(tmp_path / "runs" / "good").close()
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "run.sqlite").write_text("scribble" * 1000)
    result = run("runs")
    assert result.exit_code == 1
    assert cells(result.stdout, "good")[5] == "ended"
    assert "bad/run.sqlite is not a run" in result.stderr
    assert "Traceback" not in result.output


def test_a_name_is_not_taken_for_markup(run, tmp_path):
    write_example(tmp_path / "runs" / "[red]x[/red]").close()
    assert cells(run("runs").stdout, "[red]x[/red]")[5] == "ended"


def test_export_writes_beside_and_says_where(run, tmp_path):
    write_example(tmp_path / "runs" / "first").close()
    result = run("export", "runs/first")
    assert (result.exit_code, result.stdout) == (0, "Wrote first.csv\n")
    assert (tmp_path / "first.csv").read_text().startswith("step,layer,rotation,rate\n")


@pytest.mark.parametrize(
    ("arguments", "name", "starts"),
    [
        (["--quantity", "rotation"], "first_rotation.csv", b"step,conv1.weight,conv2.weight,head.weight\n"),
        (["--quantity", "loss"], "first_loss.csv", b"step,loss\n10,2.0\n"),
        (["--quantity", "rate", "--quantity", "rotation"], "first.csv", b"step,layer,rate,rotation\n"),
        (["--to", "json"], "first.json", b"{\n"),
        (["--to", "json", "--quantity", "loss"], "first_loss.json", b"{\n"),
        (["--to", "parquet"], "first.parquet", b"PAR1"),
        (["--out", "x.JSON"], "x.JSON", b"{\n"),
        (["--out", "x.dat", "--to", "csv"], "x.dat", b"step,layer"),
        (["--out", "folder", "--to", "json"], "folder/first.json", b"{\n"),
        (["--out", "new/one/", "--to", "json"], "new/one/first.json", b"{\n"),
        (["--out", "new/x.csv"], "new/x.csv", b"step,layer"),
    ],
)
def test_export_as_asked(run, tmp_path, arguments, name, starts):
    (tmp_path / "folder").mkdir()
    write_example(tmp_path / "first").close()
    result = run("export", "first", *arguments)
    assert (result.exit_code, result.stdout) == (0, f"Wrote {name}\n")
    assert (tmp_path / name).read_bytes().startswith(starts)


def test_a_number_with_a_slash_in_its_name_is_exported_beside(run, tmp_path):
    with Writer(tmp_path / "first", [LayerInfo("a", "linear", (2, 2))], {}) as writer:
        writer.put(Scalars(3, {"val/loss": 0.5}))
    result = run("export", "first", "--quantity", "val/loss")
    assert (result.exit_code, result.stdout) == (0, "Wrote first_val_loss.csv\n")
    assert (tmp_path / "first_val_loss.csv").read_text() == "step,val/loss\n3,0.5\n"


def test_exported_json_is_read_back(run, tmp_path):
    layers = [LayerInfo("a", "linear", (2, 2))]
    with Writer(tmp_path / "first", layers, {}) as writer:
        writer.put(Rows(0, np.array([0]), {}))
        writer.put(Scalars(3, {"loss": 0.5}))
    assert run("export", "first", "--to", "json").exit_code == 0
    assert json.loads((tmp_path / "first.json").read_text())["scalars"]["loss"]["values"] == [0.5]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nowhere"], 1, "There is no run at"),
        (["first", "--quantity", "angle"], 1, "has no 'angle'. It has rotation, rate, loss"),
        (["first", "--quantity", "rate", "--quantity", "loss"], 1, "'loss' is a number of the whole network"),
        (["first", "--out", "x.txt"], 2, "must end in .csv, .json, .parquet"),
        (["first", "--out", "x.csv", "--to", "json"], 2, "must agree"),
        (["first", "--to", "xlsx"], 2, "xlsx"),
        (["first", "--out", "nowhere/x.csv", "--quantity", "angle"], 1, "has no 'angle'"),
        (["first", "--out", "first/run.sqlite/"], 1, "first/run.sqlite/first.csv cannot be written"),
        (["first", "--out", "new/", "--quantity", "angle"], 1, "has no 'angle'"),
        (["first", "--out", "first/run.sqlite/new/"], 1, "first/run.sqlite/new cannot be written"),
        (["first", "--out", 300 * "n"], 2, "must end in"),
    ],
)
def test_export_refuses_in_words(run, tmp_path, arguments, code, says):
    write_example(tmp_path / "first").close()
    result = run("export", *arguments)
    assert result.exit_code == code
    assert says in result.stderr
    assert "Traceback" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


@pytest.mark.parametrize(
    ("command", "words"), [("runs", ["FOLDER", "interrupted"]), ("export", ["--to", "--out", "--quantity", "null"])]
)
def test_help_names_what_there_is(run, command, words):
    result = run(command, "--help")
    assert result.exit_code == 0
    for word in words:
        assert word in result.stdout
