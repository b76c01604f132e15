"""Both journals that a run can be written with, for the modules whose claims hold whichever it is."""

import pytest


@pytest.fixture(params=["wal", "rollback"])
def journal(request, monkeypatch):
    """The journal of all runs that the test writes, in other processes too."""
    monkeypatch.setenv("GYROSCOPE_JOURNAL", request.param)
    return request.param
