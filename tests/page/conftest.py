import pytest

from gyroscope.page import document
from page.made import write_bundle


@pytest.fixture
def small_bundle(tmp_path_factory, monkeypatch):
    """A bundle that is small enough to look through, in place of the page's own."""
    folder = write_bundle(tmp_path_factory.mktemp("bundle") / "bundle")
    monkeypatch.setattr(document, "BUNDLE", folder)
    return folder
