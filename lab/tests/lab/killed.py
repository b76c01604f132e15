"""Trainings that are killed at random moments and started again until they end, for test_resume.

Each is a forked process, which starts fast. The system kills it after a random amount of processor time, at any point:
no handler runs, and nothing is closed.
"""

import os
import random
import resource
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch

from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.training import train
from gyroscope_lab.training.trial import Trial
from lab.trainings import DROPOUT

ADAM = Recipe("Adam-Layca", 0.01, optimizer="adam", control="layca", records=True)
MOVED = replace(DROPOUT, augmentation=Augmentation(shift=1))
TRIAL = Trial(MOVED.lasting(4), ADAM, seed=3, keeps=True, every=1)
KILLS = 6


def attempt(split, folder, seconds):
    """Train in a separate process with a limit of processor time in seconds; return whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the process with SIGPROF
            train(TRIAL, split, folder=folder, save_every=0.0)
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(3)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGPROF
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def used():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def begin(_, root):
    torch.set_num_threads(1)
    split = MOVED.source.load()
    root, kills = Path(root), 0
    train(TRIAL, split, folder=root / "whole")
    attempt(split, root / "timed", 1000.0)
    whole = used()
    chance = random.Random(0)
    for number in range(100):
        folder = root / f"killed-{number}"
        # Long enough to get on by an epoch now and then; the last is left in peace where chance never is.
        for again in range(50):
            if not attempt(split, folder, 1000.0 if again == 49 else chance.uniform(0.01, 0.7) * whole):
                break
            kills += 1
        if kills >= KILLS:
            break
    (root / "counts").write_text(f"{number + 1} {kills}")
