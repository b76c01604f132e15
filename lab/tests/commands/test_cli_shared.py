"""Folders are tested before they are written to, and a terminal shows that a command loads."""

from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console

from gyroscope_lab.cli.shared import loading, make_folder


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\ud83d"])
def test_a_folder_that_no_disk_can_name_is_refused_in_a_line(tmp_path, capsys, name):
    with pytest.raises(typer.Exit) as end:
        make_folder(Path(tmp_path, name), "--out")
    assert end.value.exit_code == 2
    said = capsys.readouterr().err
    assert said.startswith("gyroscope: --out ")
    assert "cannot be written" in said
    assert not list(tmp_path.iterdir())


def test_a_terminal_shows_that_a_command_loads_for_as_long_as_it_takes():
    terminal = Console(file=StringIO(), force_terminal=True)
    with loading(terminal):
        pass
    assert "Getting ready" in terminal.file.getvalue()
    assert terminal.file.getvalue().endswith("\x1b[2K")  # the line is gone


def test_a_file_gets_no_message_of_loading():
    file = Console(file=StringIO())
    with loading(file):
        pass
    assert file.file.getvalue() == ""


def test_an_error_while_loading_is_passed_on():
    with pytest.raises(ImportError), loading(Console(file=StringIO(), force_terminal=True)):
        raise ImportError
