"""What the shell completes, asked the way its script asks."""

import json
import os
import subprocess
import sys

import pytest

from gyroscope.cli.options import run_paths
from gyroscope.store import Event, LayerInfo, QuantityInfo, Scalars, Writer
from gyroscope.store.example import write_example

ASK = """
import json, sys
from gyroscope.cli import app
try:
    app(prog_name="gyroscope")
finally:
    json.dump("torch" in sys.modules, sys.stderr)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("runs/first", "runs/sweep/0", "runs/sweep/1", "elsewhere/a"):
        write_example(path).close()
    return tmp_path


def completed(*words):
    """The lines that bash gets for the last of the words."""
    asked = {"_GYROSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run([sys.executable, "-c", ASK], env=os.environ | asked, capture_output=True, text=True)
    assert json.loads(done.stderr) is False, "torch was loaded"
    return done.stdout.split()


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("", ["runs/first", "runs/sweep/0", "runs/sweep/1"]),
        ("runs/f", ["runs/first"]),
        ("runs/sweep/", ["runs/sweep/0", "runs/sweep/1"]),
        ("./runs/fi", ["./runs/first"]),
        ("else", ["elsewhere/a"]),
        ("nothing", []),
        ("no/where", []),
    ],
)
def test_runs_are_completed_by_their_paths(typed, found):
    assert run_paths(typed) == found


def test_absolute_paths_of_runs_are_completed(here):
    assert run_paths(f"{here}/runs/fi") == [f"{here}/runs/first"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["show", "runs/f"], ["runs/first"]),
        (["compare", "runs/first", "runs/sweep/"], ["runs/sweep/0", "runs/sweep/1"]),
        (["show", "runs/first", "--quantity", "ro"], ["rotation"]),
        (["show", "runs/first", "--layers", "conv"], ["conv1.weight", "conv2.weight"]),
        (["export", "runs/first", "--quantity", ""], ["rotation", "rate", "loss"]),
        (["plot", "runs/first", "--figure", "rotation_c"], ["rotation_curves"]),
        (["compare", "runs", "--accuracy", ""], ["loss"]),
        (["events", "runs/first", "--kind", ""], ["note"]),
        (["show", "nowhere", "--quantity", ""], []),
        (["show", "--quantity", ""], []),
    ],
    ids=" ".join,
)
def test_names_in_runs_are_completed_without_torch(words, found):
    assert completed("gyroscope", *words) == found


def test_names_that_a_shell_would_act_on_are_left_out(here):
    layers = [
        LayerInfo(name, "linear", (2, 2)) for name in ("a.weight", "$(touch b).weight", "c d.weight", "e;f.weight")
    ]
    rotation = QuantityInfo("rotation", "1", "cosine distance to initialization")
    with Writer("runs/hostile", layers, {"rotation": rotation}) as writer:
        writer.put(Event(0, "`ls`", "text"))
        writer.put(Scalars(0, {"loss'": 1.0}))
    assert completed("gyroscope", "show", "runs/hostile", "--layers", "") == ["a.weight"]
    assert completed("gyroscope", "events", "runs/hostile", "--kind", "") == []
    assert completed("gyroscope", "export", "runs/hostile", "--quantity", "") == []


def test_the_command_offers_to_install_completion():
    done = subprocess.run([sys.executable, "-m", "gyroscope", "--help"], capture_output=True, text=True)
    assert "--install-completion" in done.stdout
