import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from typer.testing import CliRunner

import gyroscope
from gyroscope.cli import app
from gyroscope_lab import data, models
from gyroscope_lab.cli.train import named, parse_rate
from gyroscope_lab.training.recipe import CONTROLS, OPTIMIZERS
from gyroscope_lab.training.tasks import TASKS
from lab.made import write


def run(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GYROSCOPE_DATA", raising=False)
    return tmp_path


def folder_of(result):
    return Path(result.stdout.split("The run is ")[1].split(":")[0])


def result_of(folder):
    return json.loads((folder / "result.json").read_text())["result"]


def test_a_training_equals_a_plain_loop(here):
    options = ["--optimizer", "adam", "--control", "none", "--rate", "1e-3", "--weight-decay", "0.01"]
    result = run("digits", *options, "--epochs", "5", "--batch", "50", "--seed", "3", "--run", "mine", "--every", "2")
    assert result.exit_code == 0, result.output
    kept = result_of(here / "mine")

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    split, model = data.digits(), models.make("digits-cnn", seed=3)
    initial = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.01, eps=1e-7)
    generator, losses = torch.Generator().manual_seed(3), []
    for divisor in (1, 1, 1, 1, 25):  # cuts at 0.8 and 0.9 of five epochs are both after the fourth
        optimizer.param_groups[0]["lr"] = 1e-3 / divisor
        order, total = torch.randperm(200, generator=generator), 0.0
        for batch in order.split(50):
            loss = F.cross_entropy(model(split.x_train[batch]), split.y_train[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += 50 * loss.item()
        losses.append(total / 200)
    torch.set_num_threads(threads)
    pairs = zip(model.parameters(), initial, strict=True)
    rotation = [1 - F.cosine_similarity(w.flatten(), start.flatten(), dim=0).item() for w, start in pairs]
    np.testing.assert_allclose(kept["loss"], losses, rtol=1e-4)
    np.testing.assert_allclose(kept["rotation"][-1], rotation, atol=1e-5)
    with gyroscope.load(here / "mine") as recorded:
        assert recorded.steps.tolist() == list(range(0, 21, 2))


def test_the_result_is_printed_and_the_run_is_where_it_says(here):
    result = run("digits", "--epochs", "2", "--alpha", "-0.6")
    folder = folder_of(result)
    kept = result_of(here / folder)
    final = kept["rotation"][-1]
    first, numbers, rotated, took, _ = result.stdout.splitlines()
    assert first == "digits: Layca 3^-3, alpha -0.6, seed 0"
    accuracies = f"train {100 * kept['train_accuracy']:.2f} %, test {100 * kept['test_accuracy']:.2f} %"
    assert numbers == f"{accuracies}; loss {kept['loss'][-1]:.4g} in epoch 2"
    assert f"by {min(final):.3f} (classifier.weight) to {max(final):.3f} (" in rotated
    assert f"{np.mean(final):.3f} on average" in rotated
    assert took == f"Trained in {kept['seconds']:.1f} s."
    assert folder.parts[:3] == ("runs", "lab", "digits")
    with gyroscope.load(folder) as recorded:
        assert recorded.series("rotation")[-1] == pytest.approx(final, rel=1e-4)


def test_the_same_command_shows_what_has_ended_and_trains_again_if_asked_to(here):
    first, second = run("digits", "--epochs", "1"), run("digits", "--epochs", "1")
    assert "The result was already known" in second.stdout
    assert first.stdout.splitlines()[:3] == second.stdout.splitlines()[:3]
    assert second.stderr == ""
    again = run("digits", "--epochs", "1", "--again")
    assert "Trained in" in again.stdout
    assert again.stdout.splitlines()[:3] == first.stdout.splitlines()[:3]


def test_the_same_command_goes_on_where_it_was_interrupted(here, monkeypatch):
    whole = run("digits", "--epochs", "6", "--run", "whole")
    assert whole.exit_code == 0
    seen = []

    def interrupt(self, note):
        seen.append(note.epoch)
        if note.epoch == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("gyroscope_lab.training.training.Training._save_in_time", lambda training: training.save())
    monkeypatch.setattr("gyroscope_lab.cli.lab_progress.LabProgress.on_note", interrupt)
    stopped = run("digits", "--epochs", "6", "--run", "mine")
    assert stopped.exit_code == 130
    assert stopped.stderr.startswith("gyroscope: Interrupted. The same command resumes from the last checkpoint, if ")
    assert gyroscope.load("mine").state == "interrupted"
    assert "Traceback" not in stopped.output
    resumed = run("digits", "--epochs", "6", "--run", "mine")
    assert resumed.exit_code == 0, resumed.output
    assert gyroscope.load("mine").state == "ended"
    assert seen == [1, 2, 3, 4, 5, 6]
    mine, other = result_of(here / "mine"), result_of(here / "whole")
    assert {**mine, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "interrupted"])
def test_a_folder_that_holds_another_training_is_left_alone(here, monkeypatch, ended):
    if not ended:
        monkeypatch.setattr("gyroscope_lab.training.result.Result.write", lambda *_: None)
    run("digits", "--epochs", "1", "--run", "mine")
    before = (here / "mine" / "run.sqlite").read_bytes()
    result = run("digits", "--epochs", "1", "--run", "mine", "--rate", "3^-2")
    assert result.exit_code == 2
    said = "mine holds another training (digits: Layca 3^-3, seed 0, rate 0.037037). Give another folder."
    assert result.stderr == f"gyroscope: {said}\n"
    assert (here / "mine" / "run.sqlite").read_bytes() == before


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        (None, "mine cannot be resumed: it holds no training of the laboratory"),
        ({"trial": 7}, "mine cannot be resumed: it holds no training of the laboratory"),
        ({"trial": {"number": 7}}, "mine holds another training (of something else than the laboratory)"),
    ],
    ids=["nothing", "a number", "a table"],
)
def test_a_run_of_something_else_is_left_alone(here, meta, says):
    model = torch.nn.Linear(2, 2)
    gyroscope.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), here / "mine", meta=meta).close()
    result = run("digits", "--run", "mine")
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_training_that_diverges_says_so_and_fails():
    result = run("digits-one-layer", "--control", "none", "--rate", "1e20", "--epochs", "3")
    assert result.exit_code == 1
    assert "Training ended early: diverged: the loss is nan" in result.stdout
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["digit"], "The task must be one of c10-cnn1, "),
        (["digits", "--optimizer", "sdg"], "`optimizer` must be one of sgd, "),
        (["digits", "--control", "leica"], "`control` must be None or one of layca, "),
        (["digits", "--rate", "fast"], "`--rate` must be a number > 0, such as 0.1, 1e-3 or 3^-3, got fast."),
        (["digits", "--rate", "0"], "or 3^-3, got 0."),
        (["digits", "--rate", "inf"], "or 3^-3, got inf."),
        (["digits", "--rate", "9^999"], "or 3^-3, got 9^999."),
        (["digits", "--rate", "0^-1"], "or 3^-3, got 0^-1."),
        (["digits", "--control", "none", "--alpha", "0.6"], "`alpha` must be 0 without a control, got 0.6"),
        (["digits", "--alpha", "nan"], "`--alpha` must be a number, such as -0.6 or 0.6, got nan."),
        (["digits", "--weight-decay", "-1"], "`--weight-decay` must be a number ≥ 0, got -1.0."),
        (["digits", "--momentum", "1"], "`--momentum` must be a number ≥ 0 and < 1, got 1.0."),
        (["digits", "--optimizer", "adam", "--momentum", "0.9"], "`momentum` must be 0 for adam, got 0.9"),
        (["digits", "--nesterov"], "`--nesterov` needs a momentum, got 0. Try --momentum 0.9."),
        (["digits", "--epochs", "0"], "`--epochs` must be a whole number ≥ 1, got 0."),
        (["digits", "--batch", "-2"], "`--batch` must be a whole number ≥ 1, got -2."),
        (["digits", "--every", "0"], "`--every` must be a whole number ≥ 1, got 0."),
        (["digits", "--seed", "-1"], "`seed` must be a whole number from 0 to "),
        (["digits", "--precision", "fp8"], "Invalid value for '--precision'"),
        (["digits", "--device", "tpu"], "Invalid value for '--device'"),
        (["digits", "--run", "file"], "`--run` must be a folder, got the file file."),
    ],
)
def test_what_cannot_be_trained_exits_with_two_and_says_why(here, arguments, says):
    (here / "file").write_text("mine")
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output
    assert not list(here.glob("**/*.sqlite"))


def test_a_gpu_that_is_not_there_is_told_of():
    result = run("digits", "--device", "cuda")
    assert (result.exit_code, "needs a GPU, and torch sees none" in result.stderr) == (2, True)


def test_missing_data_says_what_where_and_how_to_get_it(here):
    result = run("c10-cnn1", "--data", "datasets")
    assert result.exit_code == 1
    assert "the task c10-cnn1 cannot be trained without cifar-10" in result.stderr
    assert f"Looked in {here / 'datasets'}: there is no such folder." in result.stderr
    assert "gyroscope data get cifar-10 --to datasets" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_data_that_is_damaged_is_told_of_by_its_reader(here):
    write(here / "datasets")
    (here / "datasets" / "train-labels-idx1-ubyte").unlink()
    result = run("mnist-mlp", "--data", "datasets")
    assert result.exit_code == 1
    assert "train-labels-idx1-ubyte" in result.stderr


def test_the_folder_of_datasets_can_be_an_environment_variable(here, monkeypatch):
    monkeypatch.setenv("GYROSCOPE_DATA", str(here / "elsewhere"))
    result = run("mnist-mlp")
    assert f"Looked in {here / 'elsewhere'}: " in result.stderr


@pytest.mark.parametrize(
    ("text", "value"), [("3^-3", 3.0**-3), ("3**-3", 3.0**-3), ("0.1", 0.1), ("1e-3", 1e-3), (" 2^0.5 ", 2**0.5)]
)
def test_rates_are_read_as_people_write_them(text, value):
    assert parse_rate(text) == pytest.approx(value)


def test_trainings_have_the_names_that_studies_give_them():
    nothing = {"alpha": 0.0, "weight_decay": 0.0, "momentum": 0.0}
    assert named("sgd", "layca", "3^-3", **nothing) == "Layca 3^-3"
    assert named("sgd", "none", "3^-1", **nothing) == "SGD 3^-1"
    assert named("rmsprop", "layca", "3**-3", **nothing) == "RMSprop-Layca 3^-3"
    assert named("sgd", "lars", "3^-3", **nothing) == "LARS 3^-3"


def test_the_help_names_every_task_optimizer_and_control():
    text = " ".join(run("--help").stdout.split())
    for names in (TASKS, OPTIMIZERS, [*CONTROLS, "none"]):
        assert f"{', '.join(names)}." in text


def test_one_process_is_told_how_to_start_several():
    shown = run("digits", "--parallel", "fsdp")
    assert shown.exit_code == 2
    assert "torchrun --nproc-per-node 2 -m gyroscope_lab train digits --parallel fsdp" in " ".join(shown.output.split())
