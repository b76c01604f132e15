"""Layers that are taken out of a model, and optimizers that are exchanged, while they are watched."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn
from watched import backward, inputs, mlp, train

import gyroscope


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def told(run, caplog):
    """The errors that a run tells of, each of which has been logged, with its step."""
    found = [(event.step, event.text) for event in run.events if event.kind == "error"]
    assert [record.message for record in caplog.records] == [f"{run.path}: {text}" for _, text in found]
    return found


def test_modules_that_are_exchanged_are_told_of_once_and_nothing_else_changes(tmp_path, caplog):
    model = mlp()
    optimizer = sgd(model)

    def exchange(i):
        if i == 2:
            model[4] = nn.Linear(30, 3)

    with (
        caplog.at_level(logging.WARNING, logger="gyroscope"),
        gyroscope.watch(model, optimizer, tmp_path / "run", budget=None, detail_every=2) as monitor,
    ):
        train(model, optimizer, inputs(8), each=exchange)
    with monitor.run as run:
        [(step, text)] = told(run, caplog)
        assert step == 3
        assert text.startswith("4.weight is no longer part of the model; the old weights are still measured. ")
        assert run.steps.tolist() == list(range(9))


def test_of_many_the_first_are_named(tmp_path, caplog):
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))
    optimizer = sgd(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
        for i in range(1, 6):
            model[i] = nn.Linear(6, 6)
        train(model, optimizer, inputs(1))
    with monitor.run as run:
        [(step, text)] = told(run, caplog)
    assert step == 1
    assert text.startswith("1.weight, 2.weight, 3.weight and 2 more are no longer part of the model; the old")


def test_what_is_wrapped_or_gets_another_parameter_is_still_there(tmp_path, caplog):
    model = mlp()
    optimizer = sgd(model)

    def wrap(i):
        if i == 1:
            model[0] = nn.Sequential(model[0])
            with torch.no_grad():
                model[2].weight = nn.Parameter(model[2].weight.clone())

    with gyroscope.watch(model, optimizer, tmp_path / "run", detail_every=1) as monitor:
        train(model, optimizer, inputs(3), each=wrap)
    with monitor.run as run:
        assert told(run, caplog) == []


def test_what_is_exchanged_shortly_before_the_end_or_after_training_is_noted_at_the_end(tmp_path, caplog):
    model = mlp()
    optimizer = sgd(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run") as monitor:
        train(model, optimizer, inputs(3))
        del model[4]
    with monitor.run as run:
        assert told(run, caplog) == []
        [note] = [event.text for event in run.events if event.kind == "note"]
    assert note == "At the end the model no longer has 4.weight; the old weights were measured."


def test_a_weight_that_another_module_has_is_still_there(tmp_path, caplog):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[2].weight = model[0].weight  # tied
    optimizer = sgd(model)
    with gyroscope.watch(model, optimizer, tmp_path / "run", detail_every=1) as monitor:
        kept = model[1].weight
        model[0], model[1] = nn.Linear(6, 6), nn.Linear(6, 6)
        model[1].weight = kept
        train(model, optimizer, inputs(2))
    with monitor.run as run:
        assert told(run, caplog) == []


def test_layers_beside_the_model_are_watched_without_a_word(tmp_path, caplog):
    model, beside = mlp(), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *beside.parameters()], lr=0.1)
    layers = [*gyroscope.layers(model), *(replace(layer, name="beside") for layer in gyroscope.layers(beside))]
    with gyroscope.watch(model, optimizer, tmp_path / "run", layers=layers, detail_every=1) as monitor:
        train(model, optimizer, inputs(2))
    with monitor.run as run:
        assert told(run, caplog) == []


@pytest.mark.parametrize("logs", ["always", "once"])
def test_an_optimizer_that_is_exchanged_is_reported_once(tmp_path, caplog, logs):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None) as monitor:
        for i, x in enumerate(inputs(60)):
            if i == 10:
                optimizer = sgd(model)
            loss = backward(model, x)
            optimizer.step()
            if logs == "always" or i == 9:
                monitor.log(loss=loss)
    with monitor.run as run:
        [(step, text)] = told(run, caplog)
    assert step == 10
    assert text.startswith("The weights have changed many times after step 10 without a step of the optimizer")


def test_weights_that_are_written_by_steps_or_now_and_then_are_not_taken_for_another_optimizer(tmp_path, caplog):
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=30, line_search_fn="strong_wolfe")
    best = {name: value.clone() for name, value in model.state_dict().items()}
    with gyroscope.watch(model, optimizer, tmp_path / "run", every=2, budget=None) as monitor:

        def closure(x):
            loss = backward(model, x)
            monitor.log(loss=loss)
            return loss

        for x in inputs(5):
            optimizer.step(lambda x=x: closure(x))
            for _ in range(10):
                model.load_state_dict(best)
                monitor.log(accuracy=0.5)
            for _ in range(40):
                monitor.log(accuracy=0.5)
    with monitor.run as run:
        assert told(run, caplog) == []
