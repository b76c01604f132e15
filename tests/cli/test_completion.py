"""What the shell completes, asked the way its script asks."""

import json
import subprocess
import sys

import pytest

from gyroscope.cli.options import run_paths
from gyroscope.store import Event, LayerInfo, QuantityInfo, Scalars, Writer
from gyroscope.store.example import write_example

ASK = """
import io, json, os, sys
from contextlib import redirect_stdout, suppress
from gyroscope.cli import app
answers = {}
for asked in sys.argv[1:]:
    words = f"gyroscope {asked}"
    os.environ |= {"_GYROSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    with redirect_stdout(io.StringIO()) as said, suppress(SystemExit):
        app(prog_name="gyroscope")
    answers[asked] = said.getvalue().split()
json.dump([answers, "torch" in sys.modules], sys.stdout)
"""
FOUND = {
    "show runs/f": ["runs/first"],
    "compare runs/first runs/sweep/": ["runs/sweep/0", "runs/sweep/1"],
    "show runs/first --quantity ro": ["rotation"],
    "show runs/first --layers conv": ["conv1.weight", "conv2.weight"],
    "export runs/first --quantity ": ["rotation", "rate", "loss"],
    "plot runs/first --figure rotation_c": ["rotation_curves"],
    "compare runs --accuracy ": ["loss"],
    "events runs/first --kind ": ["note"],
    "show nowhere --quantity ": [],
    "show --quantity ": [],
}
# Of a run whose names a shell would act on.
HOSTILE = {
    "show hostile --layers ": ["a.weight"],
    "events hostile --kind ": [],
    "export hostile --quantity ": [],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("here")
    for path in ("runs/first", "runs/sweep/0", "runs/sweep/1", "elsewhere/a"):
        write_example(folder / path).close()
    layers = [
        LayerInfo(name, "linear", (2, 2)) for name in ("a.weight", "$(touch b).weight", "c d.weight", "e;f.weight")
    ]
    rotation = QuantityInfo("rotation", "1", "cosine distance to initialization")
    with Writer(folder / "hostile", layers, {"rotation": rotation}) as writer:
        writer.put(Event(0, "`ls`", "text"))
        writer.put(Scalars(0, {"loss'": 1.0}))
    return folder


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def answers(folder):
    """The lines that bash gets for the last of the words, by the words, and whether torch was loaded."""
    asked = [sys.executable, "-c", ASK, *FOUND, *HOSTILE]
    return json.loads(subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=True).stdout)


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


@pytest.mark.parametrize("words", FOUND)
def test_names_in_runs_are_completed(words, answers):
    assert answers[0][words] == FOUND[words]


@pytest.mark.parametrize("words", HOSTILE)
def test_names_that_a_shell_would_act_on_are_left_out(words, answers):
    assert answers[0][words] == HOSTILE[words]


def test_names_are_completed_without_torch(answers):
    assert answers[1] is False


def test_the_command_offers_to_install_completion():
    done = subprocess.run([sys.executable, "-m", "gyroscope", "--help"], capture_output=True, text=True)
    assert "--install-completion" in done.stdout
