import importlib
import sys

import pytest

from gyroscope.errors import MissingExtraError


@pytest.mark.parametrize(("room", "library"), [("cli", "typer"), ("cli", "rich"), ("figures", "matplotlib")])
def test_a_subpackage_without_its_library_names_the_extra(monkeypatch, room, library):
    for name in list(sys.modules):
        if name.startswith(f"gyroscope.{room}"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'gyroscope\[{room}\]'"):
        importlib.import_module(f"gyroscope.{room}")


def test_without_the_laboratory_its_commands_say_what_to_install(monkeypatch):
    from typer.testing import CliRunner

    from gyroscope.cli import app

    monkeypatch.setattr(sys.modules["gyroscope.cli.app"], "_added", dict)
    done = CliRunner().invoke(app, ["reproduce", "list"])
    assert (done.exit_code, done.stderr) == (
        1,
        "gyroscope: `gyroscope reproduce` needs the laboratory: pip install gyroscope-lab\n",
    )
    assert "reproduce" not in CliRunner().invoke(app, ["--help"]).stdout
