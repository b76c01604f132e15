"""`gyroscope reproduce` with --queue, --minutes and --collect, on the CPU and on studies of a few seconds."""

import json
import os
import signal
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commands.pretended_studies import pretend
from gyroscope.cli import app
from gyroscope_lab.cli import box
from gyroscope_lab.papers.study import Report, Study
from gyroscope_lab.training import checkpoint
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.training import RATES
from gyroscope_lab.training.trial import Trial

DIGITS = replace(task("digits"), model="mlp-2x8", options=(("inputs", 64),)).lasting(2)
ADAM = Recipe("Adam", 3.0**-6, optimizer="adam", records=True)
COPY = Recipe("AdaptCopy", 1.0, control="layca", copies=ADAM)
SGD = Recipe("SGD", 0.1)


def kept_as(*recipes, of=DIGITS):
    """The trials of recipes in the precision in which they are kept."""
    return [Trial(of, recipe, precision="bf16") for recipe in recipes]


def study(name, *recipes, of=DIGITS):
    return Study(name, "A figure", lambda lab: [Trial(of, one) for one in recipes], lambda lab: Report())


STUDIES = {
    one.name: one
    for one in (
        study("one/fig1", SGD),
        study("one/fig2", COPY),
        study("two/fig1", SGD, of=task("c10-cnn1")),
    )
}


def run(*arguments):
    return CliRunner().invoke(app, ["reproduce", *map(str, arguments)])


def minutes(*arguments):
    Path("box.tar").unlink(missing_ok=True)
    return run("--minutes", 5, "--archive", "box.tar", *arguments)


def in_box(path="box.tar"):
    with tarfile.open(path) as tar:
        about = json.load(tar.extractfile("box.json"))
    return {one["name"]: one["status"] for one in about["trials"]}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder, three studies, and a CPU instead of a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GYROSCOPE_DATA", raising=False)
    pretend(monkeypatch, STUDIES)
    monkeypatch.setattr("gyroscope_lab.papers.queue.studies", lambda: STUDIES)
    monkeypatch.setattr(box, "_device", lambda: "cpu")
    return tmp_path


def test_the_queue_is_trained_collected_and_then_empty_but_for_missing_data(here):
    result = run("--queue")
    assert result.exit_code == 0, result.output
    assert result.stdout == "Wrote results/queue.md: 4 trainings\n"

    result = minutes()
    assert result.exit_code == 0, result.output
    skipped = "Skipped 1 trainings whose data is not in data: cifar-10 (1). To fetch what is missing: gyroscope data"
    assert skipped in result.stderr
    assert "3 finished in 0." in result.stdout
    assert "To merge it: gyroscope reproduce --collect box.tar" in result.stdout
    assert in_box() == dict.fromkeys(["SGD, seed 0", "Adam, seed 0", "AdaptCopy, seed 0"], "finished")

    result = run("--collect", "box.tar", "--runs", "elsewhere")
    assert result.exit_code == 0, result.output
    assert "3 finished; 3 new results in results/runs" in result.stdout
    kept = Archive("results/runs")
    for trial in kept_as(SGD, ADAM, COPY):
        assert f"{100 * kept.result(trial).test_accuracy:.2f}" in result.stdout
        assert (Archive("elsewhere").folder(trial) / "run.sqlite").exists()

    assert run("--queue").stdout == "Wrote results/queue.md: 1 trainings\n"
    result = minutes()
    assert (result.exit_code, "Nothing to train" in result.stderr) == (0, True)


def test_names_and_tasks_choose_from_the_queue(here):
    run("--queue")
    assert minutes("one/fig1").exit_code == 0
    assert in_box() == {"SGD, seed 0": "finished"}
    assert "Nothing to train" in minutes("--task", "c10-cnn1").stderr


def test_what_is_kept_is_trained_again_only_for_rates_that_others_copy(here):
    run("--queue")
    minutes()
    run("--collect", "box.tar")
    [copy] = kept_as(COPY)
    for archive in (Archive("results/runs"), Archive("runs/lab")):
        (archive.folder(copy) / "result.json").unlink()
    minutes()
    assert in_box() == {"AdaptCopy, seed 0": "finished"}
    assert minutes("--runs", "empty").exit_code == 0
    assert in_box() == {"Adam, seed 0": "finished", "AdaptCopy, seed 0": "finished"}
    [source] = kept_as(ADAM)
    assert (Archive("empty").folder(source) / RATES).exists()


def test_a_box_that_is_told_to_end_is_collected_and_resumed(here, monkeypatch):
    long = replace(DIGITS, name="long").lasting(40)
    only = {"one/fig1": study("one/fig1", SGD, of=long)}
    for place in ("gyroscope_lab.papers.catalogue.studies", "gyroscope_lab.papers.queue.studies"):
        monkeypatch.setattr(place, lambda: only)
    run("--queue")

    def terminate(self, note):
        if note.epoch == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(box._Lines, "on_note", terminate)
        result = minutes()
    assert result.exit_code == 0, result.output
    assert "1 resumable in 0." in result.stdout
    assert "ended by SIGTERM" in result.stdout
    assert "1 resumable; 0 new results" in run("--collect", "box.tar", "--runs", "other").stdout
    [trial] = kept_as(SGD, of=long)
    assert checkpoint.epoch(Archive("other").folder(trial)) >= 3
    assert "1 finished in 0." in minutes("--runs", "other").stdout
    assert "1 finished; 1 new results" in run("--collect", "box.tar", "--runs", "other").stdout
    assert not (Archive("other").folder(trial) / checkpoint.FILE).exists()


def test_a_training_that_fails_is_named_and_the_others_are_finished(here, monkeypatch):
    broken = {**STUDIES, "one/fig2": study("one/fig2", Recipe("nowhere", 0.1, only=99))}
    for place in ("gyroscope_lab.papers.catalogue.studies", "gyroscope_lab.papers.queue.studies"):
        monkeypatch.setattr(place, lambda: broken)
    run("--queue")
    result = minutes()
    assert (result.exit_code, "1 finished, 1 failed" in result.stdout) == (0, True)
    assert "digits: nowhere, seed 0 failed: LabError: `only` must be one of the" in result.stderr
    assert "failed: LabError: `only` must be one of the" in run("--collect", "box.tar").stdout
    assert minutes("one/fig2").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--minutes", "5", "--queue"], 2, "--minutes and --queue exclude each other"),
        (["--minutes", "5", "--collect", "a.tar"], 2, "--minutes and --collect exclude each other"),
        (["one/fig1", "--queue"], 2, "--queue takes no studies, got one/fig1"),
        (["one/fig1", "--archive", "a.tar"], 2, "`--archive` needs `--minutes`."),
        (["--minutes", "0"], 2, "`--minutes` must be a finite number > 0, got 0. Try 30."),
        (["--minutes", "nan"], 2, "`--minutes` must be a finite number > 0, got nan"),
        (["--minutes", "5", "--engine", "serial"], 2, "`--minutes` needs the engine population, got serial"),
        (["one/fig9", "--minutes", "5"], 2, "There is no study 'one/fig9'"),
        (["--minutes", "5"], 1, "The queue results/queue.md cannot be read"),
        (["--collect", "nowhere.tar"], 1, "nowhere.tar cannot be read as the archive of a box"),
    ],
)
def test_what_is_not_understood_is_said_in_one_line(arguments, code, says):
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_without_a_gpu_no_box_begins(monkeypatch):
    monkeypatch.undo()
    result = run("--minutes", "5")
    assert result.exit_code == 2
    assert "on a GPU, and no CUDA device was found. Try" in result.stderr


def test_an_archive_that_exists_is_not_replaced(here):
    run("--queue")
    minutes()
    before = Path("box.tar").read_bytes()
    (Archive("results/runs").root / "nothing").mkdir(parents=True)
    for folder in (*Path("runs/lab").glob("*/*"), *Path("results/runs").glob("*/*")):
        (folder / "result.json").unlink(missing_ok=True)
    again = run("--minutes", 5, "--archive", "box.tar")
    assert again.exit_code == 1
    assert "box.tar exists. Collect it and delete it" in again.stderr
    assert Path("box.tar").read_bytes() == before
