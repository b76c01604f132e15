"""The laboratory uses only public names of the library: those that a subpackage lists in `__all__`."""

import ast
from importlib import import_module
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"


def is_public(module: str, name: str) -> bool:
    """Return whether `from module import name` imports a listed name: of a subpackage, or of a module it lists."""
    package, *inside = module.split(".")[1:] or [""]
    if package == "errors":
        return True
    listed = import_module(f"gyroscope.{package}".rstrip(".")).__all__
    return name in listed if not inside else inside[0] in listed


def test_the_laboratory_uses_public_names():
    inside = {
        f"{path.relative_to(SOURCES)}: from {node.module} import {alias.name}"
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "gyroscope"
        for alias in node.names
        if not is_public(node.module, alias.name)
    }
    assert inside == set()
