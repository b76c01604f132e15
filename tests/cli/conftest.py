import pytest
import typer.rich_utils

from gyroscope.figures.save import save


@pytest.fixture(autouse=True)
def _a_wide_terminal_without_colors(monkeypatch):
    """What is printed depends on the environment, where words may be broken and colors stand between them."""
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(typer.rich_utils, "FORCE_TERMINAL", None)  # from the environment, as it was imported


@pytest.fixture(autouse=True)
def _coarse_pictures(monkeypatch):
    """Draw figures with fewer pixels."""
    monkeypatch.setitem(save.__kwdefaults__, "dpi", 50)
