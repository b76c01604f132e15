import importlib
import sys

import pytest

from gyroscope.errors import MissingExtraError


@pytest.mark.parametrize(
    ("room", "library"), [("cli", "typer"), ("cli", "rich"), ("figures", "matplotlib"), ("lab", "sklearn")]
)
def test_a_room_without_its_library_names_the_extra(monkeypatch, room, library):
    for name in list(sys.modules):
        if name.startswith(f"gyroscope.{room}"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'gyroscope\[lab\]'"):
        importlib.import_module(f"gyroscope.{room}")
