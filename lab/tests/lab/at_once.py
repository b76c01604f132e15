"""Processes that run the same trial, for test_archive; they are forked, because that is fast.

The output is JSON: the epochs and the result of each of two processes that begin at once, and the outcome of a claim
while another process lives and after it was killed.
"""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import torch

from gyroscope_lab.engine.run_one import loaded, run_one
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.trial import Trial
from lab.trainings import HELD

TRIAL = Trial(replace(HELD, model="mlp-2x8", options=(("inputs", 64),)).lasting(30), Recipe("SGD", 0.1))


def forked(act, *given):
    """Run a function in a separate process; return its id, and a file of its output."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writing, "w") as to:
            act(to, *given)
        os._exit(0)
    os.close(writing)
    return child, os.fdopen(reading)


def trains(to, archive, name):
    epochs = []
    trial = replace(TRIAL, recipe=replace(TRIAL.recipe, name=name))
    result = run_one(trial, archive, tell=lambda note: epochs.append(note.epoch))
    json.dump({"epochs": epochs, "result": result.loss}, to)


def claims(to, archive):
    with archive.claimed(TRIAL):
        to.write("claimed\n")
        to.flush()
        signal.pause()


def is_free(archive):
    with archive.claimed_if_free(TRIAL) as folder:
        return folder is not None


def begin(_, folder):
    torch.set_num_threads(1)
    root = Path(folder)
    loaded(TRIAL.task.source, None)
    run_one(replace(TRIAL, task=TRIAL.task.lasting(1)), Archive(root / "first"))  # which imports what is needed
    pair = [forked(trains, Archive(root / "shared"), name) for name in ("one name", "another")]
    told = [json.load(file) for _, file in pair]
    for child, _ in pair:
        os.waitpid(child, 0)
    archive = Archive(root / "claimed")
    holder, file = forked(claims, archive)
    assert file.readline() == "claimed\n"
    during = is_free(archive)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    (root / "told.json").write_text(json.dumps({"pair": told, "during": during, "after": is_free(archive)}))
