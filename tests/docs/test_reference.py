"""The reference: every public function and class of both packages has an example that the tests run."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "api"))

import commands  # noqa: E402
import reference  # noqa: E402

ADAPTERS = reference.SECTIONS["gyroscope.integrations"]
MODULES = [
    module
    for page in reference.PAGES
    for module in (page, *(one for one in reference.sections(page) if one not in ADAPTERS))
]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_function_and_class_has_an_example(module):
    described = [name for name in reference.names(module) if name.sort != "data"]
    assert [name.name for name in described if ">>>" not in (name.value.__doc__ or "")] == []


@pytest.mark.parametrize("module", ADAPTERS)
def test_every_adapter_has_an_example(module):
    """Read, not imported: their frameworks are not installed here."""
    file = Path(ROOT / "src", *module.split(".")).with_suffix(".py")
    made = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    public = [node for node in made if not node.name.startswith("_") or node.name == "_Watching"]
    assert public
    assert [node.name for node in public if ">>>" not in (ast.get_docstring(node) or "")] == []


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


def test_a_name_is_described_once():
    at = [reference.home(name) for module in MODULES for name in reference.names(module)]
    assert reference.home(next(n for n in reference.names("gyroscope.control") if n.name == "Layca")).path == (
        "gyroscope.Layca"
    )
    assert {name.path for name in at} <= {name.path for module in MODULES for name in reference.names(module)}


def test_the_page_of_commands_has_every_command_and_all_its_options():
    pages = {path: commands.section(path, command, context) for path, command, context in commands.commands()}
    assert {"gyroscope show", "gyroscope live", "gyroscope train", "gyroscope data get"} <= {*pages}
    for path, command, _ in commands.commands():
        options = [option for one in command.params for option in one.opts if option.startswith("--")]
        assert [option for option in options if option not in pages[path]] == []
