import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from typer.testing import CliRunner

import gyroscope
from figures.made import run_of, written
from gyroscope import figures
from gyroscope.cli import app
from gyroscope.diagnosis.compare import compared
from gyroscope.errors import StoreError
from gyroscope_lab.engine.run_one import run_one
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.trial import Trial

ACCURACIES, ROTATIONS = (0.7, 0.9, 0.8, 0.95), (0.2, 0.5, 0.6, 0.9)


def run(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def rows(result):
    """The cells of the table by the run's name."""
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    return {cells[0]: cells[1:] for cells in lines}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    for i, (accuracy, r) in enumerate(zip(ACCURACIES, ROTATIONS, strict=True)):
        scalars = {"test_accuracy": [0.1, accuracy], "loss": [3.0, 2.0 - r]}
        made = run_of(f"run{i}", rotation=[[0, 0, 0], [0.5 * r, r, 1.5 * r]], scalars=scalars)
        written(folder / made.name, made).close()
    return folder


def test_a_row_has_the_rotation_of_the_layers_and_the_last_numbers(four):
    found = rows(run(four))
    assert list(found) == ["run0", "run1", "run2", "run3"]
    for i, (accuracy, r) in enumerate(zip(ACCURACIES, ROTATIONS, strict=True)):
        turned = [f"{value:.3f}" for value in (0.5 * r, r, 1.5 * r)]
        assert found[f"run{i}"][5:] == [*turned, f"{2.0 - r:.4g}", f"{100 * accuracy:.2f}"]


def test_a_layer_that_was_not_measured_at_the_end_counts_with_its_last_value(here):
    rotation = np.outer(np.arange(160) / 160, [1.0, 0.5, 0.25])
    rotation[7:, 0] = np.nan
    rotation[100:, 1] = np.inf
    with written(here / "a", run_of("a", rotation=rotation)) as made:
        [row] = compared([made])
    final = [6 / 160, 0.5 * 99 / 160, 0.25 * 159 / 160]
    assert row.rotation == pytest.approx((min(final), np.mean(final), max(final)), rel=1e-6)


def test_the_rank_correlation_is_spearmans(four):
    expected = spearmanr(ROTATIONS, ACCURACIES).statistic
    said = f"Mean rotation and test accuracy have a rank correlation of {expected:+.2f} over these 4 runs."
    assert said in run(four).stdout
    assert "rank correlation" not in run(four / "run0", four / "run1").stdout


def test_a_training_of_the_laboratory_goes_by_its_recipe(here):
    trial = Trial(task("digits").lasting(1), Recipe("Layca 3^-3, alpha +0.6", 3.0**-3, control="layca", alpha=0.6))
    result = run_one(trial, Archive(here))
    [cells] = rows(run(here)).values()
    final = result.rotation[-1]
    turned = [f"{value:.3f}" for value in (min(final), np.mean(final), max(final))]
    accuracies = [f"{100 * result.train_accuracy:.2f}", f"{100 * result.test_accuracy:.2f}"]
    assert cells == ["Layca 3^-3, alpha +0.6", "0.03704", "0", "0", "7", *turned, f"{result.loss[0]:.4g}", *accuracies]


def watched(folder, optimizer_of, meta=None):
    model = torch.nn.Linear(3, 2)
    optimizer = optimizer_of(model)
    with gyroscope.watch(model, optimizer, folder, every=1, meta=meta):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()


def test_any_other_run_goes_by_the_classes_of_its_optimizer(here):
    for name, optimizer_of in (
        ("adam", lambda model: torch.optim.Adam(model.parameters(), lr=0.25)),
        ("layca", lambda model: gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.5), model)),
    ):
        watched(here / name, optimizer_of)
    found = rows(run("adam", "layca"))
    assert [cells[:2] for cells in found.values()] == [["Adam", "0.25"], ["Layca(SGD)", "0.5"]]


OPTIMIZERS = {
    "SGD": (
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4),
        "0.0005",
        "0.9",
    ),
    "AdamW": (lambda model: torch.optim.AdamW(model.parameters(), betas=(0.8, 0.99)), "0.01", "0.8"),
    "Adagrad": (lambda model: torch.optim.Adagrad(model.parameters()), "0", "–"),
    "Layca(SGD)": (
        lambda model: gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model),
        "0",
        "0.5",
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_and_momentum_stand_next_to_the_rate(here, name):
    optimizer_of, decay, momentum = OPTIMIZERS[name]
    watched(here / "a", optimizer_of)
    cells = rows(run("a"))["a"]
    assert (cells[0], *cells[2:4]) == (name, decay, momentum)


def test_weight_decay_and_momentum_that_differ_between_groups_are_not_told_as_one(here):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    groups = [
        {"params": model[0].parameters(), "weight_decay": 0.0, "momentum": 0.9},
        {"params": model[1].parameters(), "weight_decay": 0.1, "momentum": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with gyroscope.watch(model, optimizer, here / "a"):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert rows(run("a"))["a"][2:4] == ["0–0.1", "–"]


@pytest.mark.parametrize("trial", [7, {"number": 7}, {"recipe": "mine"}, {"recipe": {"name": "mine"}}], ids=str)
def test_what_others_call_a_trial_is_not_taken_for_the_laboratorys(here, trial):
    watched(here / "a", lambda model: torch.optim.SGD(model.parameters(), lr=0.25), meta={"trial": trial})
    assert rows(run("a"))["a"][:2] == ["SGD", "0.25"]


def test_accuracies_in_percent_stay_so_and_what_a_run_lacks_is_a_dash(here):
    for name, scalars in (("a", {"val_acc": [93.25]}), ("b", {"val_acc": [0.5]}), ("c", {"loss": [1.0]})):
        written(here / name, run_of(name, rotation=[[0.0], [0.5]], scalars=scalars)).close()
    found = rows(run("a", "b", "c"))
    assert [cells[-1] for cells in found.values()] == ["93.25", "0.50", "–"]


def test_a_loss_that_is_no_number_any_more_is_shown_as_it_is(here):
    written(here / "a", run_of("a", rotation=[[0.0], [0.5]], scalars={"loss": [1.0, np.nan]})).close()
    assert rows(run("a"))["a"][-1] == "nan"


def test_runs_of_the_same_name_are_told_apart(here):
    for parent in ("first", "second"):
        written(here / parent / "seed0", run_of("seed0", rotation=[[0.0], [0.5]], scalars={})).close()
    assert list(rows(run("first", "second"))) == ["first/seed0", "second/seed0"]


def test_runs_go_by_the_labels_that_are_given(four, here, monkeypatch):
    kept = []
    monkeypatch.setattr(figures, "save", lambda figure, path: kept.append(figure) or [path])
    result = run(f"plain={four}/run0", four / "run1", f"with decay={four}/run2", "--out", "a.png")
    assert list(rows(result)) == ["plain", "run1", "with decay"]
    assert [text.get_text() for text in kept[0].texts] == ["plain", "run1", "with decay"]


def test_a_label_of_a_folder_comes_before_the_names_in_it(four):
    assert list(rows(run(f"sweep={four}"))) == ["sweep/run0", "sweep/run1", "sweep/run2", "sweep/run3"]


def test_a_folder_may_have_an_equals_sign_in_its_name(here):
    for name in ("lr=0.1", "runs/lr=0.2"):
        written(here / name, run_of("any", rotation=[[0.0], [0.5]], scalars={})).close()
    assert list(rows(run("lr=0.1", "runs/lr=0.2"))) == ["lr=0.1", "lr=0.2"]
    assert "runs/lr=0.3" in run("runs/lr=0.3").stderr


def test_there_is_one_label_per_run(four):
    with gyroscope.load(four / "run0") as one, pytest.raises(StoreError, match="one label per run, got 2 for 1 runs"):
        compared([one], labels=["a", "b"])


def test_a_narrow_terminal_goes_without_columns_rather_than_without_digits(four, monkeypatch):
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("COLUMNS", "80")
    result = run(four)
    assert "A wider terminal also shows rotation min, rotation max" in result.stdout
    assert {"0.500", "90.00"} < set(rows(result)["run1"])
    assert "…" not in result.stdout


def test_a_run_that_is_given_twice_is_shown_once(four):
    assert len(rows(run(four / "run0", four))) == 4


@pytest.mark.parametrize(
    ("out", "names"),
    [
        ("new/a.pdf", ["new/a.pdf"]),
        ("b", ["b.png", "b.svg"]),
        (".", ["compare.png", "compare.svg"]),
        ("new/", ["new/compare.png", "new/compare.svg"]),
    ],
)
def test_the_figure_is_written_where_it_says(four, here, out, names):
    result = run(four, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith(f"Wrote {', '.join(names)}\n")
    assert all((here / name).stat().st_size > 1000 for name in names)


def test_the_figure_shows_what_all_runs_have_logged(four, monkeypatch):
    kept = []
    monkeypatch.setattr(figures, "save", lambda figure, path: kept.append(figure) or [path])
    run(four, "--out", "a.png")
    run(four, "--out", "a.png", "--accuracy", "loss")
    first, second = kept
    assert [ax.get_ylabel() for ax in kept] == ["test accuracy (%)", "loss"]
    np.testing.assert_allclose(first.collections[1].get_offsets()[:, 1], [100 * value for value in ACCURACIES])
    np.testing.assert_allclose(second.collections[1].get_offsets()[:, 0], ROTATIONS, rtol=1e-6)


def test_a_format_there_is_not_is_refused_before_anything_is_read(here):
    result = run("nowhere", "--out", "a.jpg")
    assert result.exit_code == 2
    assert result.stderr.startswith("gyroscope: `--out` must end in .png, .svg, .pdf, or have no ending for both")
    assert "a.jpg, which ends in .jpg" in result.stderr


def test_a_number_for_a_figure_that_is_not_asked_for_is_refused(four):
    result = run(four, "--accuracy", "loss")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "`--accuracy` must be used with `--out`, the file of the figure. Add --out FILE." in result.stderr


def test_a_number_that_was_not_logged_is_named(four, here):
    result = run(four, "--out", "a.png", "--accuracy", "top5")
    assert result.exit_code == 1
    assert "has no scalar 'top5'; its scalars are: loss, test_accuracy. Name another with --accuracy." in result.stderr
    assert not (here / "a.png").exists()


def test_what_is_missing_or_damaged_is_told_of_and_the_rest_is_shown(four, here):
    (here / "broken").mkdir()
    (here / "broken" / "run.sqlite").write_bytes(b"not a database at all" * 100)
    (here / "empty").mkdir()
    result = run(four / "run0", "nowhere", "broken", "empty")
    assert result.exit_code == 1
    assert list(rows(result)) == ["run0"]
    missing, broken, empty = result.stderr.splitlines()
    assert "nowhere" in missing
    assert "broken/run.sqlite" in broken
    assert empty == "gyroscope: There are no runs in empty; `gyroscope runs .` searches deeper."
    assert "Traceback" not in result.output


def test_no_run_at_all_is_an_error(here):
    result = run("nowhere")
    assert (result.exit_code, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1


def test_runs_that_have_not_ended_are_named(four, here):
    running = gyroscope.watch(
        model := torch.nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=0.1), here / "going"
    )
    try:
        result = run(four / "run0", "going")
    finally:
        running.close()
    assert "Not finished: going" in result.stdout


def test_a_name_that_is_too_long_for_a_folder_is_said_to_be(four):
    result = run("x" * 300)
    assert result.exit_code == 1
    assert "x" * 300 in result.output.replace("\n", "")
