"""A laboratory that all tests of studies share, across worker processes, so that no trial is run twice."""

import os
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

import forked
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.training.archive import Archive


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    base = Path(tmp_path_factory.getbasetemp())
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return Lab(Archive(shared / "archive"), "smoke", engine="serial")


@pytest.fixture(autouse=True)
def few_pixels(monkeypatch):
    """Save figures of studies with few pixels, which take most of the time; lines and texts are the same."""
    module = import_module("gyroscope.figures.save")  # by its name, `save` is the function
    monkeypatch.setattr(module, "save", partial(module.save, dpi=50))


@pytest.fixture
def forked_workers(monkeypatch):
    """Fork worker processes instead of spawning them, which takes seconds each."""
    context = forked.context()
    monkeypatch.setattr("multiprocessing.get_context", lambda method: context)
    monkeypatch.setattr(
        "torch.multiprocessing.spawn", lambda act, args, nprocs: forked.start(act, *args, processes=nprocs)
    )
