import json
import sqlite3

import pytest
from typer.testing import CliRunner

from diagnosis.explain_runs import walk, written
from gyroscope.cli import app
from gyroscope.diagnosis.explain import explain
from gyroscope.store.example import write_example


def run(*arguments):
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


def flat(text):
    return " ".join(text.split())


@pytest.fixture(scope="module")
def resting(tmp_path_factory):
    return written(tmp_path_factory.mktemp("runs") / "resting", walk(200, decay=0.05), name="conv1.weight")


def test_a_row_a_layer_and_every_statement_with_its_equation(resting):
    result = run(resting)
    assert result.exit_code == 0, result.output
    entry = explain(resting)["conv1.weight"]
    (row,) = [line.split() for line in result.stdout.splitlines() if line.startswith(" conv1.weight")]
    assert row[-3:] == [f"{entry.measured_rate:.3g}", f"{entry.predicted_rate:.3g}", "yes"]
    words = flat(result.stdout)
    for statement in entry.statements:
        assert flat(str(statement)) in words


def test_layers_alike_are_explained_once(tmp_path):
    write_example(tmp_path / "first").close()
    result = run(tmp_path / "first")
    assert result.stdout.count("scale invariance: undecided") == 1
    assert "conv1.weight (the same holds for conv2.weight, head.weight)" in result.stdout


def test_json_holds_the_rows_and_the_statements(resting):
    told = json.loads(run(resting, "--json").stdout)
    found = explain(resting)
    assert told["run"] == "resting"
    assert told["rows"] == json.loads(json.dumps(found.rows()))
    assert [one["words"] for one in told["statements"]] == [one.words for one in found.statements]


def test_layers_are_chosen_by_pattern(tmp_path):
    write_example(tmp_path / "first").close()
    told = json.loads(run(tmp_path / "first", "--layer", "conv*", "--json").stdout)
    assert [row["layer"] for row in told["rows"]] == ["conv1.weight", "conv2.weight"]
    result = run(tmp_path / "first", "--layer", "fc*")
    assert result.exit_code == 2
    assert (
        result.stderr
        == "gyroscope: `--layer` must match at least one of the 3 layers, got fc*. One of them is conv1.weight.\n"
    )


def test_a_narrow_terminal_goes_without_columns_that_the_words_have(resting, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("FORCE_COLOR", "1")
    lines = run(resting).stdout.splitlines()
    assert "norm factor" not in "".join(lines)
    assert any("equilibrium" in line and "scale-invariant" in line for line in lines)


def test_a_missing_run_and_a_foreign_file_are_told_in_one_line(tmp_path):
    missing = run(tmp_path / "none")
    assert missing.exit_code == 1
    assert f"There is no run at {tmp_path / 'none'}" in missing.stderr
    (tmp_path / "other").mkdir()
    with sqlite3.connect(tmp_path / "other" / "run.sqlite") as other:
        other.execute("CREATE TABLE songs (title)")
    other.close()
    foreign = run(tmp_path / "other")
    assert foreign.exit_code == 1
    for result in (missing, foreign):
        assert result.stderr.startswith("gyroscope: ")
        assert len(result.stderr.splitlines()) == 1
        assert "Traceback" not in result.output
