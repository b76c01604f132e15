import json
import re
import shlex
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from typer.testing import CliRunner

import gyroscope
import gyroscope_lab.papers.demo as lab
from gyroscope.cli import app
from gyroscope_lab import data, models
from gyroscope_lab.engine.run_one import run_one
from gyroscope_lab.errors import LabError
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.trial import Trial

run = CliRunner().invoke
WRITTEN = ["demo.json", "index.html", "rotation.png", "rotation.svg"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    return run(app, ["demo", "--quick", "--jobs", "1", "--out", str(out)]), out


@pytest.fixture(scope="module")
def numbers(demo):
    return json.loads((demo[1] / "demo.json").read_text())


@pytest.fixture
def no_training(monkeypatch):
    def run(*given, **settings):
        pytest.fail("training started")

    monkeypatch.setattr(lab, "run", run)


@pytest.fixture
def short(monkeypatch):
    """One configuration of one epoch."""
    monkeypatch.setattr(lab, "QUICK_RECIPES", lab.QUICK_RECIPES[:1])
    monkeypatch.setattr(lab, "QUICK_TASK", lab.TASK.lasting(1))


def test_the_demo_writes_a_page_the_figure_and_the_numbers(demo):
    result, out = demo
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == [*WRITTEN, "runs"]
    assert (out / "rotation.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "rotation.svg").read_text()
    assert (out / "index.html").read_text().startswith("<!doctype html>")
    for name in WRITTEN:
        assert str(out / name) in result.stdout


def config(out):
    """What the page is told."""
    return json.loads(re.search(r'id="gyroscope">(.*?)</script>', (out / "index.html").read_text()).group(1))


def test_the_page_shows_one_run_of_each_configuration_and_says_what_it_is(demo, numbers):
    shown = config(demo[1])
    assert [one["name"] for one in shown["runs"]] == ["Layca 3^-5", "Layca 3^-3", "SGD"]
    for run, configuration in zip(shown["runs"], numbers["configurations"], strict=True):
        final = configuration["final_rotation"]
        assert run["rotation"] == pytest.approx([min(final), np.mean(final), max(final)], rel=1e-4)
        assert run["accuracies"]["test"] == pytest.approx(configuration["test_accuracy"])
    assert shown["about"][0] == numbers["in_words"]
    assert shown["about"][-1].startswith(f"Run it again with: gyroscope demo --out {demo[1]} --quick --again.")


def test_the_table_shows_what_the_json_holds(demo, numbers):
    table = demo[0].stdout
    rows = [[cell.strip() for cell in line.split("│")] for line in table.splitlines()]
    for configuration in numbers["configurations"]:
        final = configuration["final_rotation"]
        [cells] = [row for row in rows if configuration["recipe"]["name"] in row]
        assert cells[2:-1] == [
            f"{100 * configuration['train_accuracy']:.1f}",
            f"{100 * configuration['test_accuracy']:.1f}",
            *(f"{value:.3f}" for value in (min(final), np.mean(final), max(final))),
        ]
    assert " ".join(numbers["in_words"].split()) in " ".join(table.split())


def test_the_json_holds_every_setting(demo, numbers):
    assert numbers["torch"] == torch.__version__
    assert numbers["seeds"] == [0]
    schedule = {"epochs": 15, "batch": 32, "cuts": [0.8, 0.9], "factor": 5.0}
    assert numbers["schedule"].items() >= schedule.items()
    assert numbers["seconds"] > 0
    assert numbers["trained"] == 3
    assert len(numbers["layers"]) == 7
    recipes = [configuration["recipe"] for configuration in numbers["configurations"]]
    assert [recipe["name"] for recipe in recipes] == ["Layca 3^-5", "Layca 3^-3", "SGD"]
    settings = {"rate": 3.0**-3, "optimizer": "sgd", "control": "layca", "alpha": 0.0, "weight_decay": 0.0}
    assert recipes[1].items() >= settings.items()
    assert numbers["command"] == f"gyroscope demo --out {demo[1]} --quick"


@pytest.mark.parametrize("index", [1, 2], ids=["Layca", "SGD"])
def test_the_rotations_equal_an_independent_recomputation(numbers, index):
    configuration = numbers["configurations"][index]
    [trial] = configuration["trials"]
    curves, correct = recompute(Recipe(**configuration["recipe"]), seed=0)
    np.testing.assert_allclose(trial["rotation"], curves, rtol=0, atol=1e-6)
    assert trial["test_accuracy"] == pytest.approx(correct / 1597, abs=2 / 1597)


def recompute(recipe, seed):
    """Train by a plain loop and measure with NumPy: 1 - <w, w0> / (|w| |w0|)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    split, model = data.digits(), models.make("digits-cnn", seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.rate)
    if recipe.control == "layca":
        optimizer = gyroscope.Layca(optimizer, model)
    generator = torch.Generator().manual_seed(seed)
    snapshots = [weights(model)]
    for epoch in range(15):
        optimizer.param_groups[0]["lr"] = recipe.rate / (1 if epoch < 12 else 5 if epoch < 14 else 25)
        model.train()
        order = torch.randperm(200, generator=generator)
        for start in range(0, 200, 32):
            batch = order[start : start + 32]
            optimizer.zero_grad()
            F.cross_entropy(model(split.x_train[batch]), split.y_train[batch]).backward()
            optimizer.step()
        snapshots.append(weights(model))
    model.eval()
    correct = (model(split.x_test).argmax(1) == split.y_test).sum().item()
    torch.set_num_threads(threads)

    def distance(w, w0):
        return 1 - w @ w0 / (np.linalg.norm(w) * np.linalg.norm(w0))

    curves = [[distance(w, w0) for w, w0 in zip(now, snapshots[0], strict=True)] for now in snapshots]
    return curves, correct


def weights(model):
    return [p.detach().numpy().astype(np.float64).ravel() for p in model.parameters()]


def test_every_training_is_a_run_that_can_be_shown(demo, numbers):
    result, out = demo
    last = result.stdout.split("gyroscope show ")[1].strip()
    with gyroscope.load(last) as recorded:
        final = recorded.series("rotation")[-1]
    assert final == pytest.approx(numbers["configurations"][-1]["final_rotation"], rel=1e-4)
    assert len(gyroscope.store.runs(out / "runs")) == 3


@pytest.mark.usefixtures("short")
def test_what_is_known_is_shown_again_and_trained_again_only_if_asked_to(tmp_path):
    arguments = ["demo", "--quick", "--jobs", "1", "--out", str(tmp_path)]
    first, second, again = run(app, arguments), run(app, arguments), run(app, [*arguments, "--again"])
    assert "results are kept" not in first.stdout
    assert "Trained in" in first.stdout
    assert "All 1 trainings were known: results are kept." in second.stdout
    assert f"gyroscope demo --out {tmp_path} --quick --again" in second.stdout
    assert "Trained in" not in second.stdout
    assert second.stderr == ""
    assert "results are kept" not in again.stdout
    assert again.stderr.startswith("1/1 digits: Layca 3^-5, seed 0: train ")


@pytest.mark.usefixtures("short")
def test_commands_for_the_runs_can_be_pasted_where_a_folder_has_a_space(tmp_path):
    said = run(app, ["demo", "--quick", "--jobs", "1", "--out", str(tmp_path / "my demo")]).stdout.splitlines()[-1]
    listing, showing = said.removeprefix("Each training is a run: ").split("; ")
    assert shlex.split(listing) == ["gyroscope", "runs", str(tmp_path / "my demo" / "runs")]
    assert run(app, shlex.split(showing)[1:]).exit_code == 0


@pytest.mark.usefixtures("short")
def test_only_what_is_missing_is_trained(tmp_path):
    arguments = ["demo", "--quick", "--jobs", "1", "--out", str(tmp_path)]
    run(app, arguments)
    more = run(app, [*arguments, "--seeds", "2"])
    assert "1 of 2 trainings were known: results are kept." in more.stdout
    [line] = more.stderr.splitlines()
    assert line.startswith("1/1 digits: Layca 3^-5, seed 1: train ")


def test_jobs_are_worker_processes_whose_results_are_shown(tmp_path, monkeypatch, numbers):
    """test_engine checks that worker processes give the numbers of one process, also for convolutions."""
    asked = []

    def one_by_one(trials, archive, *, jobs, data, on_note, on_done):
        asked.append((len(trials), jobs))
        for trial in trials:
            on_done(trial, run_one(trial, archive, data, on_note))

    monkeypatch.setattr("gyroscope_lab.engine.engine.run_in_workers", one_by_one)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(lab, "QUICK_RECIPES", lab.QUICK_RECIPES[:2])
    result = run(app, ["demo", "--quick", "--jobs", "2", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert asked == [(2, 2)]
    parallel = json.loads((tmp_path / "demo.json").read_text())
    for mine, theirs in zip(parallel["configurations"], numbers["configurations"], strict=False):
        assert mine["trials"][0]["rotation"] == theirs["trials"][0]["rotation"]


@pytest.mark.parametrize("argument", ["--seeds", "--jobs"])
@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.usefixtures("no_training")
def test_numbers_below_one_are_refused(tmp_path, argument, value):
    result = run(app, ["demo", argument, value, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert result.stderr == f"gyroscope: `{argument}` must be a whole number ≥ 1, got {value}.\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_training")
def test_a_file_is_no_folder(tmp_path):
    file = tmp_path / "demo"
    file.write_text("mine")
    result = run(app, ["demo", "--out", str(file)])
    assert result.exit_code == 2
    assert result.stderr == f"gyroscope: `--out` must be a folder, got the file {file}.\n"
    assert file.read_text() == "mine"


@pytest.mark.usefixtures("no_training")
def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "demo"
    result = run(app, ["demo", "--out", str(out)])
    assert result.exit_code == 2
    assert result.stderr == f"gyroscope: --out {out} cannot be written: Not a directory.\n"


@pytest.mark.usefixtures("no_training")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    # Raised rather than set by chmod: a test run as root may write anywhere.
    def refuse(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    result = run(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr == f"gyroscope: --out {tmp_path} cannot be written: Permission denied.\n"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "gyroscope: Interrupted. To resume: gyroscope demo --out {}\n"),
        (LabError("a worker process died"), 1, "gyroscope: a worker process died\n"),
    ],
)
def test_what_stops_the_training_is_one_line(tmp_path, monkeypatch, error, code, says):
    def run_and_stop(*given, **settings):
        raise error

    monkeypatch.setattr(lab, "run", run_and_stop)
    result = run(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == code
    assert result.stderr.endswith(says.format(tmp_path))
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_training")
def test_a_missing_library_is_noticed_before_the_training(tmp_path, monkeypatch):
    for name in list(sys.modules):
        if name.startswith("gyroscope.figures"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr.startswith("gyroscope: gyroscope.figures needs matplotlib")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.usefixtures("short")
def test_a_result_that_is_damaged_is_told_of(tmp_path):
    arguments = ["demo", "--quick", "--jobs", "1", "--out", str(tmp_path)]
    run(app, arguments)
    kept = Archive(tmp_path / "runs").folder(Trial(lab.QUICK_TASK, lab.QUICK_RECIPES[0], 0)) / "result.json"
    kept.write_text("{")
    result = run(app, arguments)
    assert result.exit_code == 1
    assert f"{kept} cannot be read" in result.stderr
    assert "Delete it to run the trial again" in result.stderr
    assert run(app, [*arguments, "--again"]).exit_code == 0


@pytest.mark.usefixtures("short")
def test_a_disk_that_fills_up_is_one_line(tmp_path):
    (tmp_path / "demo.json").mkdir()
    result = run(app, ["demo", "--quick", "--jobs", "1", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "demo.json" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.output


def test_the_figure_shows_the_mean_over_seeds_under_readable_titles(tmp_path, monkeypatch):
    figures = []

    def keep(figure, stem):
        figures.append(figure)
        (tmp_path / "rotation.svg").write_text("<svg/>")
        return []

    monkeypatch.setattr("gyroscope.figures.save", keep)
    monkeypatch.setattr(lab, "QUICK_RECIPES", lab.RECIPES[6:8])
    monkeypatch.setattr(lab, "QUICK_TASK", lab.TASK.lasting(1))
    run(app, ["demo", "--quick", "--seeds", "2", "--jobs", "1", "--out", str(tmp_path)])
    numbers = json.loads((tmp_path / "demo.json").read_text())
    [figure] = figures
    axes = [ax for ax in figure.axes if ax.lines]
    assert [ax.get_title() for ax in axes] == [
        r"Layca $3^{-3}$, $\alpha = -0.6$",
        r"Layca $3^{-3}$, $\alpha = +0.6$",
    ]
    for ax, configuration in zip(axes, numbers["configurations"], strict=True):
        first, second = (np.array(trial["rotation"]) for trial in configuration["trials"])
        assert not np.array_equal(first, second)
        drawn = np.transpose([line.get_ydata() for line in ax.lines])
        np.testing.assert_allclose(drawn, (first + second) / 2)
        tests = [100 * trial["test_accuracy"] for trial in configuration["trials"]]
        [note] = ax.texts
        assert note.get_text() == f"test {np.mean(tests):.1f} ± {np.std(tests, ddof=1):.1f} %"


def test_the_full_demo_is_the_papers_grid():
    assert [recipe.name for recipe in lab.RECIPES] == [
        *(f"Layca 3^{power}" for power in range(-7, -1)),
        "Layca 3^-3, alpha -0.6",
        "Layca 3^-3, alpha +0.6",
        "SGD",
        "SGD + weight decay",
    ]
    assert [recipe.rate for recipe in lab.RECIPES[:6]] == [3.0**power for power in range(-7, -1)]
    assert [recipe.control for recipe in lab.RECIPES] == ["layca"] * 8 + [None, None]
    assert [recipe.alpha for recipe in lab.RECIPES[:8]] == [0.0] * 6 + [-0.6, 0.6]
    assert [recipe.weight_decay > 0 for recipe in lab.RECIPES] == [False] * 9 + [True]
    assert lab.TASK.schedule.epochs == 60


def test_a_training_of_the_full_demo_gives_the_published_numbers(request, tmp_path):
    published = json.loads((request.config.rootpath / "benchmarks" / "results" / "demo_cpu.json").read_text())
    configuration = published["configurations"][5]
    assert configuration["recipe"]["name"] == "Layca 3^-2"
    theirs = configuration["trials"][0]
    laboratory = lab.Lab(Archive(tmp_path), engine="serial", precision="float32")
    [[mine]] = lab.run(laboratory, seeds=[0], recipes=lab.RECIPES[5:6]).results
    # Another processor may round a product otherwise, and training carries that on.
    np.testing.assert_allclose(mine.final_rotation, theirs["final_rotation"], rtol=0, atol=0.02)
    assert mine.test_accuracy == pytest.approx(theirs["test_accuracy"], abs=0.01)
