from dataclasses import replace

import pytest

from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.cost import PACES, cost, expected, pace
from gyroscope_lab.papers.rotation.recipes import adapt_copy
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.tasks import TASKS, task
from gyroscope_lab.training.trial import Trial

SGD = Recipe("SGD", 0.1)


def test_every_task_has_a_pace():
    assert [name for name, known in TASKS.items() if pace(known) is None] == []


def test_the_paces_that_were_not_measured_follow_from_two_that_were():
    # Operations a training epoch in 10¹², layers, and steps an epoch.
    sizes = {
        "c10-cnn1": (55.0, 25, 352),
        "c100-resnet": (18.7, 34, 352),
        "c10-cnn1-light": (6.17, 13, 352),
        "tiny-cnn": (144.7, 11, 704),
        "c10-cnn2": (84.6, 15, 351),
        "c100-wrn": (1416.0, 29, 351),
        "c10-resnet110": (68.4, 112, 351),
    }
    for name, (operations, layers, steps) in sizes.items():
        assert PACES[name].seconds == pytest.approx(22.7e-6 * layers * steps + 3.6e-3 * operations, rel=0.05), name


def test_a_cost_is_the_sum_over_epochs_of_all_tasks():
    both = [Trial(task("c10-cnn1"), SGD), Trial(task("c100-resnet").lasting(10), SGD)]
    assert cost(both) == (2, pytest.approx(100 * 0.40 + 10 * 0.34), True)


def test_what_a_trial_copies_is_paid_for_once():
    longer, copying = adapt_copy(task("c10-cnn1"))
    copied = Trial(longer, copying.copies)
    assert cost([Trial(longer, copying), copied]).trials == 2


def test_one_task_that_was_not_measured_makes_an_estimate_of_the_sum():
    assert cost([Trial(task("c10-cnn1"), SGD), Trial(task("tiny-cnn"), SGD)]).words.startswith("≈ ")


def test_a_task_like_none_that_is_known_costs_what_its_layers_and_steps_do():
    new = replace(task("digits").lasting(10), name="new", model="mlp-3x64")
    products = 1.25e-11 * 6 * 64**2 * 200
    assert cost([Trial(new, SGD)]) == (1, pytest.approx(10 * 3 * (7 * 8e-4 + products)), False)


def test_every_analysis_of_a_layer_is_paid_for():
    for model, each in (("mlp-3x256", 1.2e-3 + 7e-10 * 256**3), ("vgg-3", 1.2e-3)):
        new = replace(task("digits").lasting(10), name="new", model=model)  # 70 steps
        analysed, plain = (expected(Trial(new, SGD, conditions=every)) for every in (30, None))
        steps = [step for step in range(70) if step % 30 == 0]
        assert analysed.seconds - plain.seconds == pytest.approx(len(steps) * 3 * each)


def test_analyses_of_a_network_whose_size_its_name_does_not_say_have_no_cost():
    assert cost([Trial(task("digits"), SGD)]).seconds is not None
    assert cost([Trial(task("digits"), SGD, conditions=10)]).seconds is None


def test_larger_batches_of_a_perceptron_take_longer_steps():
    new = replace(task("digits"), name="new", model="mlp-20x256", schedule=replace(task("digits").schedule, batch=500))
    paces = [pace(replace(new, source=Source("digits", per_class=count))) for count in (5, 50)]
    # One step each; with 50 examples a core took 1.5 ms a layer, with 500 it took 3.0.
    assert paces[0].seconds / 20 == pytest.approx(1.5e-3, rel=0.5)
    assert paces[1].seconds / 20 == pytest.approx(3.0e-3, rel=0.5)


def test_what_is_done_beside_trials_is_added():
    its = [Trial(task("c10-cnn1"), SGD)]
    assert cost(its, beside=30.0).seconds == cost(its).seconds + 30.0
    assert cost([], beside=30.0) == (0, 30.0, True)


def test_one_whose_size_its_name_does_not_say_has_no_cost():
    new = replace(task("tiny-cnn"), name="new", model="c10-cnn2")
    assert cost([Trial(new, SGD)]) == (1, None, True)
    assert cost([Trial(new, SGD)]).words == "?"


def test_analyses_cost_what_they_take_and_optimizers_that_cannot_be_captured_pay_for_eager_steps():
    deep = TASKS["c10-deep"].lasting(10)
    captured, analysed, eager = (
        expected(one).seconds
        for one in (
            Trial(deep, SGD),
            Trial(deep, SGD, conditions=10**9),
            Trial(deep, Recipe("Adagrad", 0.1, optimizer="adagrad")),
        )
    )
    assert analysed == pytest.approx(captured + 56 * 1.7e-3)
    assert eager == pytest.approx(captured + 10 * 390 * 56 * (5e-4 - 2.8e-5))
    assert eager == pytest.approx(10 * 390 * 0.0287, rel=0.1)  # as measured: 28.7 ms for a step of a ResNet-56


def test_an_epoch_of_many_passes_costs_what_its_steps_do():
    one_layer = TASKS["mnist-one-layer"]
    longer = replace(one_layer, schedule=replace(one_layer.schedule, epochs=80, batch=100, passes=50))
    # The kept trainings of 4,000 steps took 1.0 s each of an H200 that eight shared.
    assert expected(Trial(longer, SGD)).seconds == pytest.approx(1.0, rel=0.5)
    small = replace(TASKS["c10-cnn1"], schedule=replace(TASKS["c10-cnn1"].schedule, passes=10))
    assert pace(small) == (pytest.approx(4.0, rel=0.01), False)


def test_no_trial_on_a_gpu_is_shorter_than_its_start_and_end():
    assert expected(Trial(TASKS["mnist-mlp"].lasting(1), SGD)).seconds == 1.0
    assert expected(Trial(TASKS["digits"].lasting(1), SGD)).seconds == 0.045
