"""Made-up results, for reports at full scale."""

import json
from math import sqrt

import numpy as np

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result

LAYERS = 5


def full_lab(folder, trials):
    """A laboratory at full scale whose archive holds a made-up result of each of `trials(lab)`; return both."""
    lab = Lab(Archive(folder), "full", engine="serial", precision="float32")
    made = {}
    for number, trial in enumerate(trials(lab)):
        trial = lab.trial(trial)
        made[trial.key] = pretend(lab.archive, trial, number)
    return lab, made


def pretend(archive, trial, number):
    """Put a result into the archive that differs for every `number`."""
    rng = np.random.default_rng(number)
    epochs = round(sqrt(trial.schedule.epochs))  # enough to tell lengths apart
    climb = 1 - np.exp(-np.arange(epochs + 1) / (5 + number % 7))
    rotation = climb[:, None] * rng.uniform(0.1, 0.9, size=LAYERS)
    result = Result(
        train_accuracy=float(rng.uniform(0.95, 1.0)),
        test_accuracy=float(rng.uniform(0.4, 0.9)),
        loss=(2.3 * (1 - climb[1:])).tolist(),
        layers=[f"layer{place}" for place in range(LAYERS)],
        rotation=rotation.tolist(),
        accuracy=climb[1:].tolist(),
        validation=(0.9 * climb[1:]).tolist() if trial.task.source.validation else [],
        tested=epochs,
    )
    folder = archive.folder(trial)
    folder.mkdir(parents=True, exist_ok=True)
    result.write(folder / "result.json", trial.description)
    return result


def raw(lab, trial):
    """A trial's numbers as in the archive's file."""
    return json.loads((lab.archive.folder(lab.trial(trial)) / "result.json").read_text())["result"]
