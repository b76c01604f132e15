"""Fixtures that the tests of several subpackages share."""

import shutil

import pytest


@pytest.fixture(params=["eager", "native"])
def cpu_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute on the CPU with each of its backends; for modules whose claims hold for both."""
    if request.param == "native" and shutil.which("cc") is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("GYROSCOPE_BACKEND", request.param)
    return str(request.param)
