"""Imports between the parts of the laboratory point downward, lazy ones included."""

from pathlib import Path

from test_layering import imported, modules, part

SOURCES = Path(__file__).parents[1] / "src"
#: Lowest first.
ORDER = ("errors", "kinds", "orphans", "data", "models", "training", "engine", "faults", "papers", "cli")


def test_imports_point_downward():
    known = modules(SOURCES)
    upward = {
        f"{module} imports {other}"
        for module, path in known.items()
        for other in imported(path, known)
        if other.startswith("gyroscope_lab")
        and (own := part(module)) is not None
        and (theirs := part(other)) is not None
        and ORDER.index(theirs) > ORDER.index(own)
    }
    assert upward == set()
