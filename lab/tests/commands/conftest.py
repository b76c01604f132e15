import pytest
import typer.rich_utils


@pytest.fixture(autouse=True)
def _a_wide_terminal_without_colours(monkeypatch):
    """What is printed depends on the environment, where words may be broken and colours stand between them."""
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(typer.rich_utils, "FORCE_TERMINAL", None)  # from the environment, as it was imported
