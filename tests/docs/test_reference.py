"""The reference: every public function and class of both packages has an example that the tests run."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "api"))

import command_line  # noqa: E402
import reference  # noqa: E402

ADAPTERS = reference.SECTIONS["gyroscope.integrations"]
MODULES = [
    module
    for page in reference.PAGES
    for module in (page, *(one for one in reference.sections(page) if one not in ADAPTERS))
]


#: Sinks whose tools are installed for `tests/integrations/test_optional_*.py` alone.
APART = {"MLflow", "Trackio", "Wandb"}


def has_example(docstring):
    """True if a docstring has a line of code that is run."""
    return any(">>>" in line and "+SKIP" not in line for line in (docstring or "").splitlines())


@pytest.mark.parametrize("module", MODULES)
def test_every_public_function_and_class_has_an_example(module):
    described = [name for name in reference.names(module) if name.sort != "data" and name.name not in APART]
    assert [name.name for name in described if not has_example(name.value.__doc__)] == []


@pytest.mark.parametrize("module", ADAPTERS)
def test_every_adapter_has_an_example(module):
    """Read, not imported: their frameworks are not installed here."""
    file = Path(ROOT / "src", *module.split(".")).with_suffix(".py")
    made = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    public = [node for node in made if not node.name.startswith("_") or node.name == "_Watching"]
    assert public
    assert [node.name for node in public if not has_example(ast.get_docstring(node))] == []


def test_every_constant_is_described():
    constants = [name for module in MODULES for name in reference.names(module) if name.sort == "data"]
    assert len(constants) > 5
    assert all(name.text for name in constants)


def test_every_package_that_lists_names_is_in_the_reference():
    inside = {"gyroscope.base", "gyroscope.passes", "gyroscope.cli"}  # not for users
    homes = ((ROOT / "src", "gyroscope"), (ROOT / "lab" / "src", "gyroscope_lab"))
    listing = {
        ".".join((package, folder.parent.name))
        for home, package in homes
        for folder in (home / package).glob("*/__init__.py")
        if "__all__" in folder.read_text()
    }
    assert listing - inside - {*MODULES} == set()


def test_the_page_of_commands_has_every_command_and_all_its_options():
    pages = {path: command_line.section(path, command, context) for path, command, context in command_line.commands()}
    assert {"gyroscope show", "gyroscope live", "gyroscope train", "gyroscope data get"} <= {*pages}
    for path, command, _ in command_line.commands():
        options = [option for one in command.params for option in one.opts if option.startswith("--")]
        assert [option for option in options if option not in pages[path]] == []
        rows = [line for line in pages[path].splitlines() if line.startswith("| ")]
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} <= {3}
