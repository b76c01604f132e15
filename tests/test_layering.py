"""Imports between subpackages point downward, lazy ones and those for type checkers included."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src"
#: Lowest first: a subpackage may import those above it in this list.
ORDER = (
    "errors",
    "base",
    "store",
    "vectors",
    "layers",
    "passes",
    "theory",
    "diagnosis",
    "control",
    "conditioning",
    "monitor",
    "figures",
    "integrations",
    "page",
    "cli",
)


def modules(root: Path) -> dict[str, Path]:
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of ours that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
    return {name for name in found if name.split(".")[0] in ("gyroscope", "gyroscope_lab")}


def part(module: str) -> str | None:
    """The subpackage of a module; None of the package itself, which only names what is public."""
    names = module.split(".")
    return names[1] if len(names) > 1 and names[1] != "__main__" else None


def test_imports_point_downward():
    known = modules(ROOT)
    upward = {
        f"{module} imports {other}"
        for module, path in known.items()
        for other in imported(path, known)
        if (own := part(module)) is not None
        and (theirs := part(other)) is not None
        and ORDER.index(theirs) > ORDER.index(own)
    }
    assert upward == set()
