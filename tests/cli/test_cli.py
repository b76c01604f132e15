import io

import pytest
from typer.testing import CliRunner

import gyroscope
from gyroscope.cli import app, main

run = CliRunner().invoke


def test_version():
    result = run(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"gyroscope {gyroscope.__version__}\n")


def test_help_says_what_it_is_and_where_to_start():
    result = run(app, ["--help"])
    assert result.exit_code == 0
    assert "how each layer of a neural network trains" in result.stdout
    assert "gyroscope demo" in result.stdout


def test_no_command_shows_the_help():
    assert "Usage: gyroscope" in run(app, []).output


def test_help_of_the_demo_names_what_it_writes():
    result = run(app, ["demo", "--help"])
    for word in ("--out", "--seeds", "--quick", "--jobs", "rotation.png", "demo.json"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (["dmo"], "No such command 'dmo'"),
        (["demo", "--sedes", "3"], "No such option: --sedes"),
        (["demo", "--seeds", "many"], "Invalid value for '--seeds'"),
    ],
)
def test_what_is_not_understood_exits_with_two(argument, says):
    result = run(app, argument)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_what_an_encoding_has_no_letter_for_is_a_question_mark(monkeypatch, encoding):
    printed = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", printed)
    monkeypatch.setattr("sys.argv", ["gyroscope", "train", "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    printed.flush()
    assert end.value.code == 0
    said = "or ρ under a control" if encoding == "utf-8" else "or ? under a control"
    assert said in " ".join(printed.buffer.getvalue().decode(encoding).replace("|", " ").replace("│", " ").split())
