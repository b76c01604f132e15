"""The tasks compared with the settings of the papers' authors."""

from dataclasses import replace

import pytest
import torch

from gyroscope.layers.layer import layers
from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.data.source import Source
from gyroscope_lab.data.split import Split
from gyroscope_lab.data.text import Text
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.tasks import TASKS, task

# epochs, the epochs at which the rate is cut, by how much, batch, steps an epoch, examples to train on
SCHEDULES = {
    "c10-cnn1": (100, [80, 90, 97], 5.0, 128, 352, 45_000),
    "c10-cnn1-light": (100, [80, 90, 97], 5.0, 128, 352, 45_000),
    "c100-resnet": (100, [70, 90, 97], 10.0, 128, 352, 45_000),
    "tiny-cnn": (80, [70], 5.0, 128, 704, 90_000),
    "c10-cnn2": (250, [100, 170, 220], 5.0, 128, 351, 45_000),
    "c100-wrn": (250, [100, 170, 220], 5.0, 128, 351, 45_000),
    "c10-resnet110": (200, [60, 120, 160], 5.0, 128, 351, 45_000),
    "c10-deep": (160, [79, 119], 10.0, 128, 390, 50_000),
    "c100-deep": (160, [79, 119], 10.0, 128, 390, 50_000),
    "mnist-mlp": (100, [95], 5.0, 2048, 5, 10_000),
    "mnist-one-layer": (4000, [], 5.0, 128, 1, 100),
}
# layers, weights
NETWORKS = {
    "c10-cnn1": (25, 4_307_296),
    "c10-cnn1-light": (13, 490_160),
    "c100-resnet": (34, 470_192),
    "tiny-cnn": (11, 4_812_640),
    "c10-cnn2": (15, 14_977_728),
    "c10-resnet110": (112, 1_722_416),
    "c10-deep": (56, 853_018),
    "mnist-mlp": (2, 784 * 784 + 784 + 2 * 784 + 784 * 10 + 10),
    "mnist-one-layer": (11, 10 * (784 * 784 + 784) + 784 * 10 + 10),
}
PAPERS = [name for name in TASKS if not name.startswith("digits")]


@pytest.mark.parametrize("name", PAPERS)
def test_schedules_are_the_authors(name):
    epochs, milestones, factor, batch, steps, examples = SCHEDULES[name]
    schedule = task(name).schedule
    assert (schedule.epochs, schedule.milestones, schedule.batch) == (epochs, milestones, batch)
    assert schedule.factor == factor
    assert schedule.steps(examples) == steps
    assert schedule.warmup == 0.0


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_the_layers_and_weights_that_the_authors_had(name):
    model = task(name).network(seed=0)
    assert (len(layers(model)), sum(parameter.numel() for parameter in model.parameters())) == NETWORKS[name]


def test_a_tenth_is_held_out_in_the_rotation_papers_but_for_mnist():
    for name in PAPERS:
        source = task(name).source
        deep = name in ("c10-deep", "c100-deep")  # the conditioning paper's
        assert source.validation == (0.0 if name.startswith("mnist") or deep else 0.1)
        assert source.normalization == ("channel" if deep else "scalar")
    assert task("mnist-mlp").source.per_class == 1000
    assert task("mnist-one-layer").source.per_class == 10


def test_images_are_augmented_where_the_authors_did():
    augmented = {name for name in TASKS if task(name).augmentation is not None}
    assert augmented == {"c10-cnn2", "c100-wrn", "c10-resnet110", "c10-deep", "c100-deep"}
    # Continuous shifts of up to an eighth of 32 pixels, to the nearest pixel, mirrored at the edge as Keras calls it.
    assert task("c10-cnn2").augmentation == Augmentation(4, True, "image", "symmetric", "nearest", False)


def test_one_offset_a_batch_and_half_of_it_mirrored_in_the_conditioning_paper():
    assert task("c10-deep").augmentation == Augmentation(4, True, "batch", "reflect", "uniform", True)
    assert task("c10-deep").schedule.restarts


def test_decay_spares_the_last_layer_of_residual_networks_alone():
    assert {name for name in TASKS if task(name).decayed == "convolutions"} == {"c100-resnet", "c10-resnet110"}


def test_the_best_validated_weights_are_tested_where_the_authors_did():
    assert {name for name in TASKS if task(name).tests == "best"} == {"c100-resnet", "tiny-cnn"}


def test_trainings_stop_early_where_the_authors_stopped_them():
    stops = {name: (task(name).stop_at, task(name).fails) for name in PAPERS}
    assert stops == {
        "c10-cnn1": (1e-4, (7, 0.2)),
        "c10-cnn1-light": (1e-4, (7, 0.2)),
        "c100-resnet": (1e-3, (7, 0.1)),
        "tiny-cnn": (1e-3, (10, 0.2)),
        "c10-cnn2": (None, None),
        "c100-wrn": (None, None),
        "c10-resnet110": (None, (60, 0.2)),
        "c10-deep": (None, None),
        "c100-deep": (None, None),
        "mnist-mlp": (None, None),
        "mnist-one-layer": (None, None),
    }


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("digits")])
def test_what_stands_in_for_a_task_takes_its_own_data(name):
    its = task(name)
    split = its.source.load()
    model = its.network(seed=0).eval()
    assert model(split.inputs(split.x_test[:3])).shape == (3, split.classes)


def test_tasks_are_called_by_their_names():
    assert all(its.name == name for name, its in TASKS.items())


def test_an_unknown_task_is_refused_with_those_there_are():
    with pytest.raises(LabError, match=r"The task must be one of c10-cnn1, c10-cnn1-light, .*, got 'cifar'"):
        task("cifar")


def test_another_length_changes_the_schedule_alone():
    longer = task("tiny-cnn").lasting(160)
    assert longer.schedule.milestones == [140]
    assert replace(longer, schedule=task("tiny-cnn").schedule) == task("tiny-cnn")


def test_a_task_without_examples_is_refused():
    its = Task("nothing", Source("digits"), "digits-cnn")
    x, y = torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64)
    with pytest.raises(LabError, match="nothing has no examples to train on"):
        its.check(Split(x, y, x, y))


def test_the_best_validated_weights_cannot_be_tested_where_nothing_is_held_out():
    with pytest.raises(LabError, match="c100-resnet tests the weights of the best validation accuracy, but no"):
        task("c100-resnet").check(Source("digits").load())
    task("c100-resnet").check(Source("digits", validation=0.1).load())


@pytest.mark.parametrize("part", ["y_train", "y_test", "y_val"])
def test_labels_that_a_network_has_no_output_for_are_refused_before_training(part):
    split = Source("digits", validation=0.1).load()
    labels = getattr(split, part).clone()
    labels[-1] = 10
    with pytest.raises(LabError, match=r"labels up to 10, and resnet-20 is made for 10 classes\. Give .*11"):
        task("digits-deep").check(replace(split, **{part: labels}))
    more = replace(task("digits-deep"), options=(("channels", 1), ("classes", 11)))
    more.check(replace(split, **{part: labels}))


def test_characters_that_a_network_does_not_know_are_refused_before_training():
    text = Text("made", "abc", torch.arange(60) % 3).split(context=2)
    known = Task("text", Source("shakespeare"), "gpt-small", options=(("vocab", 2),))
    with pytest.raises(LabError, match="labels up to 2, and gpt-small is made for 2 vocab"):
        known.check(text)
