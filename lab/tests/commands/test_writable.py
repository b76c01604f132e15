"""Folders to write to are tried first, and what cannot be one is refused in a line."""

from pathlib import Path

import pytest
import typer

from gyroscope_lab.cli.writable import make_folder


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\ud83d"])
def test_a_folder_that_no_disk_can_name_is_refused_in_a_line(tmp_path, capsys, name):
    with pytest.raises(typer.Exit) as end:
        make_folder(Path(tmp_path, name), "--out")
    assert end.value.exit_code == 2
    said = capsys.readouterr().err
    assert said.startswith("gyroscope: --out ")
    assert "cannot be written" in said
    assert not list(tmp_path.iterdir())
