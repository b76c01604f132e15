from dataclasses import replace

import numpy as np
import pytest

from gyroscope_lab.data.source import Source
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.tasks import TASKS, task
from gyroscope_lab.training.trial import Trial

MADE = {"Recipe": Recipe("SGD", 0.1), "Schedule": Schedule(), "Source": Source("digits"), "Task": task("digits")}


@pytest.mark.parametrize(
    ("what", "name", "given", "accepted"),
    [
        ("Recipe", "rate", "0.1", "a number"),
        ("Recipe", "rate", True, "a number"),
        ("Recipe", "weight_decay", None, "a number"),
        ("Recipe", "optimizer", ["sgd"], "text"),
        ("Recipe", "frozen", (0, 1.0), "a tuple"),
        ("Recipe", "frozen", 0, "a tuple"),
        ("Recipe", "only", 1.0, "a whole number"),
        ("Recipe", "records", "no", "True or False"),
        ("Recipe", "name", None, "text"),
        ("Schedule", "cuts", 0.5, "a tuple"),
        ("Schedule", "epochs", np.int64(3), "a whole number"),
        ("Schedule", "drop_last", 1, "True or False"),
        ("Source", "validation", "0.1", "a number"),
        ("Source", "per_class", 2.5, "a whole number"),
        ("Source", "seed", 1.5, "a whole number"),
        ("Task", "tests", "bset", "'last' or 'best'"),
        ("Task", "decayed", "convolution", "'all' or 'convolutions'"),
        ("Task", "fails", 7, "a tuple of 2"),
        ("Task", "fails", (7,), "a tuple of 2"),
        ("Task", "options", {"classes": 10}, "a tuple"),
        ("Task", "precision", "fp16", "'float32' or 'tf32' or 'bf16'"),
        ("Task", "source", "digits", "a Source"),
        ("Task", "schedule", None, "a Schedule"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalnum() else "",
)
def test_what_is_of_the_wrong_kind_is_refused_by_name_where_it_enters(what, name, given, accepted):
    with pytest.raises(LabError) as refused:
        replace(MADE[what], **{name: given})
    assert str(refused.value).startswith(f"`{what}.{name}` must be {accepted}")


def test_what_was_read_from_json_is_what_was_written():
    for known in TASKS.values():
        trial = Trial(known, Recipe("SGD", 0.1, frozen=(0, 1)))
        told = trial.description
        schedule, source = Schedule(**told["task"]["schedule"]), Source(**told["task"]["source"])
        assert (schedule, source) == (known.schedule, known.source)
        assert replace(known, **{name: told["task"][name] for name in ("options", "fails")}) == known
        recipe = Recipe(**told["recipe"])
        assert recipe == trial.recipe
        assert hash(recipe) == hash(trial.recipe)


def test_whole_numbers_are_numbers_and_so_are_floats_of_numpy():
    recipe = Recipe("SGD", 1, weight_decay=np.float64(0.5))
    assert Trial(task("digits"), recipe).key == Trial(task("digits"), Recipe("SGD", 1.0, weight_decay=0.5)).key


def test_every_task_of_the_papers_can_be_made_again_field_by_field():
    for known in TASKS.values():
        assert replace(known) == known
