import pytest
import typer.rich_utils


@pytest.fixture(autouse=True)
def _a_wide_terminal_without_colors(monkeypatch):
    """Printed text depends on the environment: a narrow terminal breaks words, and colors add escape codes."""
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(typer.rich_utils, "FORCE_TERMINAL", None)  # from the environment, as it was imported
