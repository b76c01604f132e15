"""`import gyroscope` needs torch and numpy alone, and loads nothing that is not used."""

import json
import subprocess
import sys

import pytest

HEAVY = {"torch._dynamo", "torch.distributed.tensor", "triton", "matplotlib", "sklearn", "scipy", "typer", "rich"}
THEORY = {f"gyroscope.dynamics.{name}" for name in ("explain", "invariance", "kfac", "normalizers", "outliers")}
PROGRAM = """
import importlib, json, sys
loaded = {}
for name in ("torch", "gyroscope", "gyroscope.store", "gyroscope.cli.data"):
    importlib.import_module(name)
    loaded[name] = sorted(sys.modules)
json.dump(loaded, sys.stdout)
"""


@pytest.fixture(scope="module")
def loaded():
    """All that is loaded once a module is imported, one after the other, in a fresh process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    return {name: set(modules) for name, modules in json.loads(done.stdout).items()}


def test_importing_loads_nothing_heavy(loaded):
    new = loaded["gyroscope"] - loaded["torch"]
    assert "gyroscope.control.layca" in new
    assert sorted(new & HEAVY) == []
    assert sorted(new & THEORY) == []


def test_the_core_does_not_import_what_only_the_extras_need(loaded):
    assert sorted(loaded["gyroscope"] & {"matplotlib", "rich", "typer", "sklearn"}) == []


def test_importing_the_store_loads_neither_pandas_nor_pyarrow(loaded):
    assert "gyroscope.store" in loaded["gyroscope.store"]
    assert sorted(loaded["gyroscope.store"] & {"pandas", "pyarrow"}) == []


def test_the_laboratory_is_not_loaded_until_the_command_needs_it(loaded):
    assert "gyroscope.cli.data" in loaded["gyroscope.cli.data"]
    assert "gyroscope.lab" not in loaded["gyroscope.cli.data"]
