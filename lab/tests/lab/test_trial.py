from dataclasses import asdict, fields, replace
from math import inf

import numpy as np
import pytest
import torch

from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.data.source import Source
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.recipe import Recipe, register
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.trial import Trial, describes, file_name

RECORDED = Recipe("RMSprop", 0.01, optimizer="rmsprop", records=True)
COPY = Recipe("copy", 1.0, control="layca", copies=RECORDED)
SGD = Trial(task("digits"), Recipe("SGD", 0.1))

# Another value for every field of what a trial is made of, and what else has to be given for it to make sense.
register("made", lambda recipe, model: torch.optim.SGD(model.parameters(), lr=recipe.rate))
OTHERS = {
    Trial: {
        "task": {"task": task("digits-mlp")},
        "recipe": {"recipe": Recipe("SGD", 0.2)},
        "seed": {"seed": 1},
        "precision": {"precision": "bf16"},
        "every": {"every": 1},
        "keeps": {"keeps": True},
        "conditions": {"conditions": 5},
        "follows": {"follows": True},
    },
    Task: {
        "source": {"source": Source("digits", seed=1)},
        "model": {"model": "mlp-2x8"},
        "options": {"options": (("width", 2),)},
        "schedule": {"schedule": Schedule(epochs=1)},
        "augmentation": {"augmentation": Augmentation()},
        "decayed": {"decayed": "convolutions"},
        "tests": {"tests": "best"},
        "stop_at": {"stop_at": 1e-4},
        "fails": {"fails": (7, 0.2)},
        "test_loss": {"test_loss": True},
    },
    Recipe: {
        "rate": {"rate": 0.2},
        "optimizer": {"optimizer": "adam"},
        "control": {"control": "layca"},
        "alpha": {"alpha": 0.3, "control": "layca"},
        "weight_decay": {"weight_decay": 1e-3},
        "momentum": {"momentum": 0.9},
        "nesterov": {"nesterov": True, "momentum": 0.9},
        "eps": {"eps": 1e-8, "optimizer": "adam"},
        "others": {"others": "inner", "control": "layca"},
        "scale": {"scale": 0.25},
        "only": {"only": 0},
        "frozen": {"frozen": (1,)},
        "records": {"records": True},
        "copies": {"copies": RECORDED, "control": "layca"},
        "options": {"options": (("damping", 0.1),), "optimizer": "made"},
    },
    Schedule: {
        "epochs": {"epochs": 61},
        "batch": {"batch": 31},
        "cuts": {"cuts": (0.5,)},
        "factor": {"factor": 2.0},
        "warmup": {"warmup": 1.0},
        "drop_last": {"drop_last": True},
        "passes": {"passes": 2},
        "restarts": {"restarts": True},
        "drawn": {"drawn": 3},
        "cosine": {"cosine": True, "cuts": ()},
    },
    Source: {
        "name": {"name": "mnist"},
        "validation": {"validation": 0.1},
        "normalization": {"normalization": "channel"},
        "per_class": {"per_class": 10},
        "seed": {"seed": 2},
        "side": {"name": "imagenet", "side": 32},
        "context": {"name": "shakespeare", "context": 64},
        "characters": {"name": "shakespeare", "characters": 100_000},
    },
    Augmentation: {
        "shift": {"shift": 2},
        "flip": {"flip": False},
        "per": {"per": "batch"},
        "fill": {"fill": "reflect"},
        "rounding": {"rounding": "uniform"},
        "half": {"half": True},
    },
}


def with_others(kind, changes, trial=SGD):
    """The trial with some fields of one of its parts changed."""
    if kind is Trial:
        return replace(trial, **changes)
    if kind is Recipe:
        return replace(trial, recipe=replace(trial.recipe, **changes))
    if kind is Task:
        return replace(trial, task=replace(trial.task, **changes))
    part = {Schedule: "schedule", Source: "source", Augmentation: "augmentation"}[kind]
    before = getattr(trial.task, part) or Augmentation()
    return replace(trial, task=replace(trial.task, **{part: replace(before, **changes)}))


CHANGES = [(kind, name) for kind, known in OTHERS.items() for name in known]


def test_every_field_that_a_trial_has_is_looked_at_here():
    for kind, known in OTHERS.items():
        unheeded = {Task: {"name", "precision", "test_curve"}, Recipe: {"name"}}.get(kind, set())
        assert set(known) == {field.name for field in fields(kind)} - unheeded, kind


def test_what_a_task_would_be_computed_in_is_not_what_its_trial_is():
    asked = replace(SGD, task=replace(SGD.task, precision="bf16"))
    assert asked.key == SGD.key
    assert describes(asked.description, SGD)
    assert replace(asked, precision="bf16").key != SGD.key
    assert not describes(replace(asked, precision="bf16").description, SGD)


def test_a_curve_that_is_measured_in_addition_is_no_other_trial():
    asked = replace(SGD, task=replace(SGD.task, test_curve=True))
    assert asked.key == SGD.key
    assert describes(asked.description, SGD)


@pytest.mark.parametrize(("kind", "name"), CHANGES, ids=lambda value: getattr(value, "__name__", value))
def test_the_key_changes_with_everything_that_a_result_depends_on(kind, name):
    changes = OTHERS[kind][name]
    # All that has to be given with it is there in both.
    along = {other: value for other, value in changes.items() if other != name}
    base = with_others(kind, along)
    if kind is Augmentation:
        base = replace(base, task=replace(base.task, augmentation=replace(Augmentation(), **along)))
    changed = with_others(kind, changes, base)
    assert asdict(changed) != asdict(base)
    assert changed.key != base.key
    assert changed.slug != base.slug
    assert not describes(changed.description, base)


def test_the_key_does_not_change_with_what_something_is_called():
    copy = Trial(task("digits"), COPY)
    renamed = replace(
        copy,
        task=replace(copy.task, name="figures"),
        recipe=replace(COPY, name="echo", copies=replace(RECORDED, name="voice")),
    )
    assert renamed.key == copy.key
    assert describes(renamed.description, copy)
    assert renamed.description != copy.description


def test_the_name_of_the_data_is_no_name_of_a_task():
    """It is the only name that a result depends on."""
    digits = Trial(replace(task("digits"), source=Source("mnist", per_class=20)), SGD.recipe)
    assert digits.key != replace(digits, task=replace(digits.task, source=Source("cifar-10", per_class=20))).key


def test_whole_numbers_that_are_equal_give_equal_keys():
    """Otherwise a training at a rate of 1 would differ from one at a rate of 1.0."""
    schedule = Schedule(epochs=4, cuts=(1,), factor=10, warmup=2)
    whole = Trial(Task("", Source("digits"), "digits-cnn", schedule=schedule, stop_at=1), Recipe("", 1, scale=2))
    schedule = Schedule(epochs=4, cuts=(1.0,), factor=10.0, warmup=2.0)
    exact = Trial(Task("", Source("digits"), "digits-cnn", schedule=schedule, stop_at=1.0), Recipe("", 1.0, scale=2.0))
    assert whole == exact
    assert whole.key == exact.key
    assert describes(whole.description, exact)


def test_what_was_described_before_an_option_was_there_is_the_same_trial():
    before = SGD.description
    del before["keeps"], before["recipe"]["scale"], before["task"]["source"]["side"]
    assert describes(before, SGD)
    assert not describes({}, SGD)
    assert not describes(["trial"], SGD)


def test_a_description_holds_all_fields_as_json_does():
    copy = replace(SGD, recipe=COPY, task=task("c10-cnn2"))
    assert copy.description["recipe"]["copies"]["optimizer"] == "rmsprop"
    assert copy.description["task"]["schedule"]["cuts"] == [0.4, 0.68, 0.88]
    assert copy.description["task"]["augmentation"]["shift"] == 4


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../..", "/etc/passwd", "a/b\\c:d*e?f", "\x00\n\t", "x" * 1000, "𝔸" * 300, "-rf", "ρ = 3⁻³ (α)"],
    ids=["empty", "dot", "dots", "up", "root", "symbols", "control", "long", "wide", "dash", "Greek"],
)
def test_whatever_something_is_called_its_folder_is_within_the_archive(name, tmp_path):
    trial = Trial(replace(task("digits"), name=name), Recipe(name, 0.1), seed=2**32 - 1)
    folder = Archive(tmp_path / "archive").folder(trial)
    assert folder.parent.parent == tmp_path / "archive"
    assert not {".", "..", ""} & {folder.name, folder.parent.name}
    folder.mkdir(parents=True)  # which systems refuse if a name is too long
    assert Archive(tmp_path / "archive").folder(replace(trial, recipe=SGD.recipe)) == folder


def test_a_name_that_can_be_that_of_a_file_is_kept():
    assert file_name("digits_2.v1") == "digits_2.v1"
    assert Trial(task("digits"), Recipe("SGD + L2", 0.1)).slug.startswith("sgd-l2-seed-0-")


def test_a_trial_comes_after_all_that_it_copies():
    echo = Recipe("echo", 1.0, control="layca", copies=replace(COPY, records=True))
    names = [trial.recipe.name for trial in Trial(task("digits"), echo, seed=3).lineage]
    assert names == ["RMSprop", "copy", "echo"]
    assert [trial.seed for trial in Trial(task("digits"), echo, seed=3).lineage] == [3, 3, 3]
    assert SGD.lineage == [SGD]


def test_a_network_depends_on_its_seed_alone():
    torch.manual_seed(1)
    first = SGD.network().state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second, other = SGD.network().state_dict(), replace(SGD, seed=1).network().state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not any(torch.equal(value, other[name]) for name, value in first.items() if value.dim() > 1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"seed": -1}, "`seed` must be a whole number from 0 to 2³² − 1, got -1"),
        ({"seed": 2**32}, "`seed` must be a whole number from 0 to 2³² − 1, got 4294967296"),
        ({"seed": 1.0}, r"`seed` must be a whole number from 0 to 2³² − 1, got 1\.0"),
        ({"seed": np.int64(1)}, r"`seed` must be a whole number from 0 to 2³² − 1, got np\.int64\(1\)"),
        ({"every": 0}, "`every` must be a whole number of steps ≥ 1, or None for once per epoch, got 0"),
        ({"every": "2"}, "`every` must be a whole number of steps ≥ 1, or None for once per epoch, got '2'"),
        ({"conditions": "3"}, "`conditions` must be a whole number of steps ≥ 1, or None for never, got '3'"),
        ({"conditions": 2.5}, r"`conditions` must be a whole number of steps ≥ 1, or None for never, got 2\.5"),
        ({"conditions": True}, "`conditions` must be a whole number of steps ≥ 1, or None for never, got True"),
        ({"follows": "yes"}, "`follows` must be True or False, got 'yes'"),
        ({"follows": None}, "`follows` must be True or False, got None"),
        ({"keeps": 1}, "`keeps` must be True or False, got 1"),
        ({"precision": "fp16"}, "`precision` must be one of 'float32', 'tf32', 'bf16', got 'fp16'"),
        ({"task": replace(task("digits"), stop_at=inf)}, "SGD on digits cannot be kept as JSON"),
        ({"task": replace(task("digits"), options=(("like", torch.ones(1)),))}, "SGD on digits cannot be kept as JSON"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_trial_that_cannot_be_run_or_kept_is_refused(given, says):
    with pytest.raises(LabError, match=says):
        replace(SGD, **given)


def test_seeds_beyond_32_bits_would_repeat_others():
    """This is why they are rejected."""
    draws = [torch.rand(8, generator=torch.Generator().manual_seed(seed)) for seed in (5, 2**32 + 5)]
    assert torch.equal(*draws)


def test_the_key_does_not_know_the_sign_of_zero():
    one, other = (Trial(task("digits"), Recipe("Layca", 0.1, control="layca", alpha=alpha)) for alpha in (0.0, -0.0))
    assert one.key == other.key
