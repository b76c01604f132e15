"""The names of `gyroscope` as people and type checkers see them, whatever is installed."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_origin, get_type_hints

import pytest

import forked
import gyroscope

WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None  # as if it were not installed
"""


def without(library, program):
    return subprocess.run([sys.executable, "-c", WITHOUT + program, library], capture_output=True, text=True)


def test_names_that_are_loaded_when_used_are_seen_before():
    assert set(gyroscope.__all__) <= set(dir(gyroscope))


@pytest.mark.parametrize("name", ["Conditioning", "Graft", "Layca", "Layer", "Monitor", "Run"])
def test_attributes_can_be_completed_in_a_notebook(name):
    """Jedi, which IPython asks, finds no attribute of an object that has a property returning a Literal."""
    for attribute in vars(found := getattr(gyroscope, name)).values():
        if isinstance(attribute, property):
            returned = get_type_hints(attribute.fget)["return"]
            assert get_origin(returned) is not Literal, f"{found}.{attribute.fget.__name__}"


def test_all_names_can_be_taken_with_a_star_where_matplotlib_is_missing():
    forked.execute("""
import sys
del sys.modules["gyroscope"]
sys.modules["matplotlib"] = None
from gyroscope import *
assert Layca.__name__ == "Layca"
assert "figures" not in dir()
""")


def test_figures_are_among_the_names_where_matplotlib_is_installed():
    assert "figures" in gyroscope.__all__


def test_a_type_checker_sees_every_name_and_takes_no_other():
    """Type checkers believe a `__getattr__` they can see, and would then accept any misspelt name."""
    tree = ast.parse(Path(gyroscope.__file__).read_text())
    seen = {}
    for node in tree.body:
        hidden = isinstance(node, ast.If) and ast.unparse(node.test) == "not TYPE_CHECKING"
        for inner in () if hidden else ast.walk(node):
            if isinstance(inner, ast.ImportFrom):
                seen |= {alias.asname or alias.name: inner for alias in inner.names}
            elif isinstance(inner, ast.FunctionDef):
                seen[inner.name] = inner
    assert set(gyroscope.__all__) <= set(seen)
    assert "__getattr__" not in seen


def test_the_command_says_in_one_line_what_to_install():
    done = without("typer", "from gyroscope.__main__ import main\nmain()")
    assert done.returncode == 1
    assert done.stderr == (
        "gyroscope: The gyroscope command needs typer and rich, which are not installed: pip install 'gyroscope[cli]'\n"
    )


def test_the_package_can_be_run_as_the_command():
    done = subprocess.run([sys.executable, "-m", "gyroscope", "--version"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"gyroscope {gyroscope.__version__}\n", "")
