"""What a run holds is printed, and never acts on the terminal."""

import json
import sqlite3

import pytest
from typer.testing import CliRunner

from gyroscope.cli.app import app
from gyroscope.store.example import write_example


@pytest.mark.parametrize("command", ["show", "explain", "compare", "runs"])
def test_escape_sequences_in_a_run_do_not_reach_the_terminal(tmp_path, command):
    with write_example(tmp_path / "run"):
        pass
    with sqlite3.connect(tmp_path / "run" / "run.sqlite") as file:
        file.execute("UPDATE layers SET name = name || ?", ("\x1b]0;TITLE\x07\x1b[2J\x9b2J",))
        file.execute("INSERT INTO events VALUES (1, 1, 1.0, 'note', ?)", ("hi \x1b]52;c;cHduZWQ=\x07",))
        file.execute(
            "INSERT OR REPLACE INTO meta VALUES ('optimizers', ?)", (json.dumps([{"class": "SGD\x1b]0;T\x07"}]),)
        )
    file.close()
    said = CliRunner().invoke(app, [command, str(tmp_path if command == "runs" else tmp_path / "run")])
    assert said.exit_code == 0, said.output
    assert not {"\x1b", "\x07", "\x9b"} & set(said.output)
    if command != "runs":
        assert "\\u001b]" in said.output
