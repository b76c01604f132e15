"""Nothing is loaded that is not used: the core needs torch and numpy alone, and runs are read without torch."""

import json
import pickle
import subprocess
import sys
from importlib import import_module

import pytest

import forked
import gyroscope
from gyroscope.store.example import write_example

HEAVY = {"torch._dynamo", "torch.distributed.tensor", "triton", "matplotlib", "sklearn", "scipy", "typer", "rich"}
UNUSED = ("gyroscope.theory.invariance", "gyroscope.conditioning", "gyroscope.control.preconditioners.")
PROGRAM = """
import importlib, json, sys
loaded = {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded[name] = sorted(sys.modules)
json.dump(loaded, sys.stdout)
"""


def loaded(*names):
    """All that is loaded once a module is imported, one after the other, in a fresh process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, check=True)
    return {name: set(modules) for name, modules in json.loads(done.stdout).items()}


@pytest.fixture(scope="module")
def core():
    return loaded("torch", "gyroscope", "gyroscope.control", "gyroscope.control.layca", "gyroscope.monitor.watch")


@pytest.fixture(scope="module")
def readers():
    """What reads runs, each beside those before it."""
    return loaded(
        "gyroscope", "gyroscope.store", "gyroscope.cli.app", "gyroscope.diagnosis.standing_out",
        "gyroscope.store.folder", "gyroscope.diagnosis.explain", "gyroscope.diagnosis.compare", "gyroscope.page.report",
        "gyroscope.figures",
    )  # fmt: skip


def test_importing_loads_nothing_heavy(core):
    new = core["gyroscope.monitor.watch"] - core["torch"]
    assert "gyroscope.control.layca" in new
    assert sorted(new & HEAVY) == []
    assert sorted(name for name in new if name.startswith(UNUSED)) == []


def test_the_core_does_not_import_what_only_the_extras_need(core):
    assert sorted(core["gyroscope.monitor.watch"] & {"matplotlib", "rich", "typer", "sklearn"}) == []


def test_importing_gyroscope_loads_no_room(core):
    rooms = {f"gyroscope.{room}" for room in ("conditioning", "control", "monitor", "store", "theory", "vectors")}
    assert sorted(core["gyroscope"] & rooms) == []
    assert "gyroscope.control" in core["gyroscope.control"]


def test_runs_are_read_compared_drawn_and_explained_without_torch(readers):
    everything = readers["gyroscope.figures"]
    assert {"gyroscope.figures.dashboard", "gyroscope.diagnosis.explain", "gyroscope.diagnosis.compare"} <= everything
    assert "torch" not in everything


def test_reports_are_written_without_torch_and_matplotlib(readers):
    loaded = readers["gyroscope.page.report"]
    assert "jinja2" in loaded
    assert sorted(loaded & {"torch", "matplotlib", "starlette"}) == []


def test_importing_the_store_loads_neither_pandas_nor_pyarrow(readers):
    assert "gyroscope.store" in readers["gyroscope.store"]
    assert sorted(readers["gyroscope.store"] & {"pandas", "pyarrow"}) == []


ROOMS = [
    import_module(f"gyroscope{room}")
    for room in ("", ".base", ".conditioning", ".control", ".diagnosis", ".monitor", ".page", ".passes", ".theory")
]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_every_public_name_is_there_and_listed(room):
    assert [name for name in room.__all__ if getattr(room, name) is None] == []
    assert set(room.__all__) <= set(dir(room))


FIRST_LOADED = """
import sys, importlib
import gyroscope, gyroscope.layers.last_norm, gyroscope.monitor.watch, gyroscope.conditioning.condition
import gyroscope.theory.invariance
functions = gyroscope.last_norm, gyroscope.layers, gyroscope.watch, gyroscope.monitor.watch, gyroscope.condition
functions += gyroscope.conditioning.condition, gyroscope.theory.invariance, gyroscope.invariance
assert {type(one).__name__ for one in functions} == {"function"}
before = gyroscope.watch
for name in ("gyroscope.monitor.watch", "gyroscope.monitor", "gyroscope"):
    importlib.reload(sys.modules[name])
assert gyroscope.watch is not before
assert gyroscope.watch is sys.modules["gyroscope.monitor.watch"].watch
"""


def test_a_function_in_a_file_of_its_name_stays_the_function_also_if_both_are_loaded_again():
    forked.execute(FIRST_LOADED)


def test_what_is_not_there_is_said_as_by_any_module():
    with pytest.raises(AttributeError, match=r"^module 'gyroscope' has no attribute 'wacth'$"):
        _ = gyroscope.wacth
    with pytest.raises(ImportError, match=r"cannot import name 'wacth' from 'gyroscope'"):
        from gyroscope import wacth  # noqa: F401
    assert not hasattr(gyroscope, "_wacth")
    assert not hasattr(gyroscope, "monitor.wacth")


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_rooms_are_sent_to_other_processes_by_name(room):
    assert pickle.loads(pickle.dumps(room)) is room


READS = """
import sys
sys.modules["torch"] = None  # whoever asks for it fails
from typer.testing import CliRunner
from gyroscope.cli import app
for command in sys.argv[1:]:
    done = CliRunner().invoke(app, command.split())
    print(command, done.exit_code, done.exception or "", file=sys.stderr if done.exit_code else sys.stdout)
"""


def test_the_commands_that_read_runs_do_so_without_torch(tmp_path):
    write_example(tmp_path / "runs" / "first").close()
    commands = [
        "runs runs", "show runs/first", "explain runs/first", "compare runs", "export runs/first --to json",
        "plot runs/first", "plot runs/first --figure rotation_curves", "plot runs/first --figure rotation_heatmap",
    ]  # fmt: skip
    program = [sys.executable, "-c", READS, *commands]
    done = subprocess.run(program, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout.split("\n")[:-1] == [f"{command} 0 " for command in commands]
