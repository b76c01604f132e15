"""Trials that share a GPU give the results of each alone. Needs a GPU, except for the error without one."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import gyroscope
from gyroscope.vectors.launch import Kept
from gyroscope_lab import models
from gyroscope_lab.engine.captured import compile_blocks, many_kinds
from gyroscope_lab.engine.engine import run_trials
from gyroscope_lab.engine.population import _Seat, run_population
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.beyond.problems import GPT, adamw, steered
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.last_layer import followed
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.training import train
from gyroscope_lab.training.trial import Trial
from lab.trainings import present

DIGITS = task("digits").lasting(6)
SPLIT = DIGITS.source.load()
RMSPROP = Recipe("RMSprop", 3.0**-6, optimizer="rmsprop", records=True)
RECIPES = (
    Recipe("Layca", 3.0**-3, control="layca"),
    Recipe("SGD", 3.0**-1),
    Recipe("SGD + L2", 3.0**-1, weight_decay=5e-3),
    Recipe("Adam-Layca", 3.0**-5, optimizer="adam", control="layca"),
    Recipe("LARS", 3.0**-3, control="lars", scale=0.25),
    Recipe("Adagrad", 3.0**-4, optimizer="adagrad"),
    RMSPROP,
    Recipe("AdaptCopy", 1.0, control="layca", copies=RMSPROP),
)
TRIALS = [Trial(DIGITS, recipe, seed) for recipe in RECIPES for seed in (0, 1)]


def population(trials, folder, **options):
    archive = Archive(folder)
    run_population(trials, lambda trial: SPLIT, archive, **options)
    return archive, [archive.result(trial) for trial in trials]


@pytest.fixture
def exact():
    """Use deterministic algorithms, so that equal trainings are bitwise equal."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


def close(a, b):
    """Check that two results of one trial differ by no more than the noise of a GPU, which grows with every step.

    Where an image is blank, units of the first layer may be above zero in one run and below in another: rounding
        decides for all blank patches together. Late in training, accuracies differ by chance too, so they only have to
        be those of trained networks.
    """
    assert np.array(a.rotation[1]) == pytest.approx(np.array(b.rotation[1]), rel=0.25, abs=1e-5)
    assert a.loss[0] == pytest.approx(b.loss[0], rel=0.05)
    assert a.loss[1] == pytest.approx(b.loss[1], rel=0.3)
    assert a.test_accuracy == pytest.approx(b.test_accuracy, abs=0.2)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_population_gives_what_each_trial_gives_alone_step_by_step(tmp_path, exact, compiled):
    trials = TRIALS if compiled else TRIALS[::2]
    archive, results = population(trials, tmp_path, at_once=5, compiled=compiled)
    for trial, result in zip(trials, results, strict=True):
        print(trial.title)  # shown where the comparison fails
        close(result, train(trial, SPLIT, device="cuda", rates=archive.rates(trial)))
    close(results[0], train(trials[0], SPLIT, device="cpu"))


@pytest.mark.gpu
def test_residual_blocks_compiled_one_by_one_give_what_the_network_gives(tmp_path, exact):
    deep = replace(task("digits-deep").lasting(3), model="resnet-20")
    trials = [Trial(deep, Recipe("SGD", 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4), seed) for seed in (0, 1)]
    trials.append(replace(trials[0], follows=True))
    archive, results = population(trials, tmp_path, at_once=3)
    for trial, result in zip(trials, results, strict=True):
        alone = train(replace(trial, follows=False), SPLIT, device="cuda")
        assert result.loss[0] == pytest.approx(alone.loss[0], rel=0.02)
        assert result.loss == pytest.approx(alone.loss, rel=0.3, abs=0.05)
    course = followed(archive.folder(trials[2]))
    steps = deep.schedule.steps(len(SPLIT.y_train))
    assert course.loss.reshape(3, steps).mean(axis=1) == pytest.approx(results[2].loss)
    assert (course.lambda_m > 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe",
    [
        *map(steered, ("adamw", "sgd", "muon")),
        adamw(GPT.smoke, 1e-3, 0.1),
        Recipe("NadamW", 1e-3, optimizer="nadamw", weight_decay=0.1),
        # Of these only the gradients are captured.
        Recipe("Muon", 0.02, optimizer="muon"),
        Recipe("Prodigy", 1.0, optimizer="prodigy"),
        Recipe("Schedule-Free AdamW", 0.0025, optimizer="schedule-free", options=(("warmup_steps", 5),)),
    ],
    ids=lambda recipe: recipe.name,
)
def test_captured_steps_of_transformers_are_those_taken_one_by_one(tmp_path, exact, recipe):
    present(recipe)
    trials = [
        Trial(replace(GPT.smoke, schedule=replace(GPT.smoke.schedule, epochs=3)), recipe, seed) for seed in (0, 1)
    ]
    split, archive = GPT.smoke.source.load(), Archive(tmp_path)
    run_population(trials, lambda trial: split, archive)
    for trial in trials:
        together, alone = archive.result(trial), train(trial, split, device="cuda")
        assert together.loss == pytest.approx(alone.loss, rel=1e-2)
        assert together.rotation[-1] == pytest.approx(alone.rotation[-1], rel=0.05)


@pytest.mark.gpu
def test_trials_do_not_disturb_each_other(tmp_path, exact):
    """Graphs captured on one stream and replayed side by side race; each has its own stream, so results agree."""
    _, together = population(TRIALS[:12], tmp_path / "together", at_once=12, compiled=False)
    _, alone = population(TRIALS[:12], tmp_path / "alone", at_once=1, compiled=False)
    for a, b in zip(together, alone, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-3, abs=1e-5)


@pytest.mark.gpu
def test_the_run_of_a_captured_training_holds_every_epoch(tmp_path):
    archive, [result] = population(TRIALS[:1], tmp_path)
    with gyroscope.load(archive.folder(TRIALS[0])) as run:
        assert run.steps.tolist() == [0, *range(7, 43, 7)]
        assert run.series("rotation") == pytest.approx(np.array(result.rotation), rel=1e-3, abs=1e-7)
        assert run.scalars["loss"].values.tolist() == pytest.approx(result.loss)
        rate = run.series("rate")[-1]
        assert np.isfinite(rate).all()


@pytest.mark.gpu
def test_gradients_of_replayed_steps_are_those_the_monitor_records(tmp_path, exact):
    trial = Trial(DIGITS, RECIPES[1], seed=3, every=1)
    archive, _ = population([trial], tmp_path / "a", compiled=False)
    train(trial, SPLIT, device="cuda", folder=tmp_path / "b")
    with gyroscope.load(archive.folder(trial)) as graph, gyroscope.load(tmp_path / "b") as eager:
        ours, theirs = graph.series("gradient_norm"), eager.series("gradient_norm")
        assert ours.shape == theirs.shape
        assert ours[1:20] == pytest.approx(theirs[1:20], rel=0.05)


@pytest.mark.gpu
def test_trials_that_record_rates_are_captured_among_others_that_need_many_tables(tmp_path, monkeypatch):
    monkeypatch.setattr("gyroscope.vectors.triton._works", Kept(2))
    trials = [Trial(DIGITS, RMSPROP, seed) for seed in range(4)]
    archive, _ = population(trials, tmp_path, at_once=4, compiled=False)
    assert all(len(archive.rates(Trial(DIGITS, RECIPES[-1], seed)).tangents) == 42 for seed in range(4))


@pytest.mark.gpu
def test_analyses_between_replayed_steps_are_those_of_single_steps(tmp_path, exact):
    trial = Trial(DIGITS, RECIPES[1], seed=3, every=1, conditions=5)
    archive, _ = population([trial], tmp_path / "a")
    train(trial, SPLIT, device="cuda", folder=tmp_path / "b")
    with gyroscope.load(archive.folder(trial)) as graph, gyroscope.load(tmp_path / "b") as eager:
        assert graph.steps.tolist() == eager.steps.tolist()
        for name in ("lambda_x", "lambda_f", "activation_mean"):
            ours, theirs = graph.series(name), eager.series(name)
            assert np.isfinite(ours).any(axis=1).tolist() == np.isfinite(theirs).any(axis=1).tolist()
            assert ours[:20] == pytest.approx(theirs[:20], rel=0.05, nan_ok=True)
        rates = graph.series("rate")
        assert np.isfinite(rates[6:]).all()
        assert rates[6:20] == pytest.approx(eager.series("rate")[6:20], rel=0.05)


@pytest.mark.gpu
def test_warm_up_and_cuts_reach_captured_steps(tmp_path):
    warm = replace(DIGITS, schedule=replace(DIGITS.schedule, warmup=2.0))
    trial = Trial(warm, RECIPES[0], every=1)
    archive, _ = population([trial], tmp_path, compiled=False)
    with gyroscope.load(archive.folder(trial)) as run:
        turned = np.tan(run.series("rate")[1:, 0])
    steps = [warm.schedule.multiplier(epoch, step / 7) for epoch in range(6) for step in range(7)]
    known = np.isfinite(turned)
    assert turned[known] == pytest.approx(3.0**-3 * np.array(steps)[known], rel=1e-3)


@pytest.mark.gpu
def test_a_failing_trial_does_not_take_the_others_along(tmp_path):
    bad = Trial(DIGITS, Recipe("nowhere", 0.1, only=99))
    with pytest.raises(LabError, match=r"1 of 3 trials failed: nowhere, seed 0: LabError: `only` must be one of the"):
        run_population([TRIALS[0], bad, TRIALS[1]], lambda trial: SPLIT, Archive(tmp_path), compiled=False)
    assert Archive(tmp_path).result(TRIALS[0]) is not None
    assert Archive(tmp_path).result(TRIALS[1]) is not None


@pytest.mark.gpu
def test_an_interrupted_population_goes_on(tmp_path):
    seen = []

    def interrupt(training):
        training.save()
        seen.append(training.epoch)
        if training.epoch == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_population(TRIALS[:1], lambda trial: SPLIT, Archive(tmp_path), compiled=False, on_epoch=interrupt)
    epochs = []
    run_population(
        TRIALS[:1], lambda trial: SPLIT, Archive(tmp_path), compiled=False, on_epoch=lambda t: epochs.append(t.epoch)
    )
    assert epochs == [4, 5, 6]
    result = Archive(tmp_path).result(TRIALS[0])
    assert len(result.rotation) == 7
    close(result, train(TRIALS[0], SPLIT, device="cuda"))


def test_without_a_gpu_a_population_says_what_to_use(tmp_path):
    with pytest.raises(LabError, match=r"there is none\. Use the engine 'workers'"):
        run_trials(TRIALS[:1], Archive(tmp_path), engine="population")


class Asked:
    """A step of the device that ends when the test says so."""

    def __init__(self):
        self.done = False

    def query(self):
        return self.done


def test_long_steps_are_asked_for_one_by_one_and_short_ones_ahead(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("gyroscope_lab.engine.population.time.monotonic", lambda: now[0])
    for lasts, ahead in ((0.001, 3), (0.1, 1)):
        seat = _Seat(TRIALS[0], None, iter(()), None, None, looked=now[0])
        for _ in range(5):  # steps are asked for until it is busy, and the device does one
            while not seat.busy:
                seat.asked.append(Asked())
            now[0] += lasts
            seat.asked[0].done = True
        assert len(seat.asked) == ahead


def test_every_residual_block_is_compiled_and_nothing_else(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: compiled.append((module, options)))
    for name, blocks in (("resnet-14", 6), ("preresnet-8", 3), ("digits-cnn", 0)):
        compiled.clear()
        assert compile_blocks(models.make(name, seed=0)) == (blocks > 0)
        assert len(compiled) == blocks
        assert all(options == {"dynamic": False} for _, options in compiled)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by torch, of its own doing
def test_blocks_of_every_architecture_and_precision_are_compiled_in_one_process(monkeypatch):
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    own = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: own(module, backend=backend, **options))
    torch._dynamo.reset()
    limit = torch._dynamo.config.cache_size_limit
    x = torch.randn(2, 3, 8, 8)
    for depth in (14, 20):
        model = models.make(f"resnet-{depth}", seed=0)
        compile_blocks(model)
        for kind in (torch.float32, torch.bfloat16):
            with many_kinds(), torch.autocast("cpu", dtype=kind, enabled=kind is not torch.float32):
                model(x).sum().backward()
    torch._dynamo.reset()
    # The first block of a stage, for its shortcut, and all others, in three stages, of which the first needs none.
    assert len(seen) == 10
    assert torch._dynamo.config.cache_size_limit == limit


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [None, True])
@pytest.mark.parametrize("name", ["digits-resnet", "digits-deep"])
def test_narrow_residual_networks_turn_as_they_do_step_by_step(tmp_path, name, compiled):
    short = task(name).lasting(2)
    recipes = (
        Recipe("Layca", 3.0**-3, control="layca"),
        Recipe("Adam-Layca", 3.0**-4.5, optimizer="adam", control="layca"),
    )
    for recipe in recipes:
        trial = Trial(short, recipe, precision="bf16")
        alone = train(trial, SPLIT, device="cuda")
        _, [ours] = population([trial], tmp_path / recipe.name, compiled=compiled)
        assert ours.loss[0] == pytest.approx(alone.loss[0], rel=0.1)
        # Every layer turns; of those with gradients of zero some would not.
        assert np.array(ours.rotation[1]) == pytest.approx(np.array(alone.rotation[1]), rel=0.5)
