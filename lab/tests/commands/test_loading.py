"""Somebody who waits for a command is told that it is getting ready."""

from io import StringIO

import pytest
from rich.console import Console

from gyroscope_lab.cli.loading import loading


def test_a_terminal_says_so_for_as_long_as_it_takes():
    terminal = Console(file=StringIO(), force_terminal=True)
    with loading(terminal):
        pass
    assert "Getting ready" in terminal.file.getvalue()
    assert terminal.file.getvalue().endswith("\x1b[2K")  # the line is gone


def test_a_file_is_left_alone():
    file = Console(file=StringIO())
    with loading(file):
        pass
    assert file.file.getvalue() == ""


def test_what_goes_wrong_is_passed_on():
    with pytest.raises(ImportError), loading(Console(file=StringIO(), force_terminal=True)):
        raise ImportError
