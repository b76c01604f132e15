import os
import shutil
import sys
from typing import get_args

import pytest
import typer
from typer.testing import CliRunner

from figures.made import example_run, written
from gyroscope import figures
from gyroscope.cli.plot import Name, plot

app = typer.Typer(rich_markup_mode="markdown")
app.command()(plot)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        written(folder / f"seed{seed}", example_run(steps=21, seed=seed)).close()
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("figure", get_args(Name))
def test_every_figure_is_written_where_it_says(figure, runs, here):
    result = run(runs if figure == "compare" else runs / "seed0", "--figure", figure)
    assert result.exit_code == 0, result.output
    name = "compare.png" if figure == "compare" else f"seed0_{figure}.png"
    assert result.stdout == f"Wrote {name}\n"
    assert (here / name).read_bytes().startswith(b"\x89PNG")
    assert files(here) == [name]


def test_the_names_are_those_of_functions():
    assert all(callable(getattr(figures, figure)) for figure in get_args(Name))


def test_the_dashboard_is_what_one_gets_without_asking(runs, here):
    run(runs / "seed0")
    assert files(here) == ["seed0_dashboard.png"]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (["--out", "new/curves.pdf"], "new/curves.pdf"),
        (["--out", "curves.SVG", "--format", "svg"], "curves.SVG"),
        (["--out", "lr0.1"], "lr0.1.png"),
        (["--out", "lr0.1", "--format", "pdf"], "lr0.1.pdf"),
        (["--out", ".", "--format", "svg"], "seed0_rates.svg"),
        (["--out", "new/"], "new/seed0_rates.png"),
        (["--format", "pdf"], "seed0_rates.pdf"),
    ],
)
def test_the_file_and_its_format_can_be_chosen(runs, here, given, name):
    result = run(runs / "seed0", "--figure", "rates", *given)
    assert result.stdout == f"Wrote {name}\n"
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[name[-3:].lower()]
    assert (here / name).read_bytes().startswith(begins)


@pytest.fixture
def drawn(monkeypatch):
    """The axes that would have been saved."""
    kept = []
    monkeypatch.setattr(figures, "save", lambda figure, path: kept.append(figure) or [path])
    return kept


def test_layers_and_quantities_can_be_chosen(runs, drawn):
    run(runs / "seed0", "--figure", "curves", "--quantity", "gradient_norm", "--layers", "block1.*")
    [ax] = drawn
    assert (len(ax.lines), ax.get_ylabel(), ax.get_title()) == (2, "gradient norm ‖g‖", "seed0")


def test_conditioning_shows_what_says_the_most_or_a_quantity(runs, drawn):
    run(runs / "seed0", "--figure", "conditioning_over_time")
    run(runs / "seed0", "--figure", "conditioning_over_time", "--quantity", "kappa_x_p50")
    six, one = drawn
    assert (len(six.axes), len(one.axes)) == (6, 1)
    assert (one.axes[0].get_ylabel(), one.get_suptitle()) == (r"$\kappa_{50\%}(\Sigma_x)$", "seed0")


def test_runs_are_compared_one_by_one_or_from_their_folder(runs, drawn):
    run(runs / "seed0", runs / "seed2", "--figure", "compare")
    run(runs, "--figure", "compare", "--accuracy", "loss")
    two, three = drawn
    assert len(two.collections[1].get_offsets()) == 2
    assert len(three.collections[1].get_offsets()) == 3
    assert three.get_ylabel() == "loss"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["seed0", "--out", "a.jpg"], "`--out` must end in .png, .svg, .pdf, got a.jpg."),
        (
            ["seed0", "--out", "a.png", "--format", "pdf"],
            "`--out` and `--format` must agree, got a.png and pdf. Leave one out.",
        ),
        (["seed0", "seed1"], "`RUN` must be one run for dashboard, got 2. Try --figure compare, which shows several."),
        (
            ["seed0", "--quantity", "lr"],
            "`--quantity` must be used with --figure curves, rotation_heatmap or conditioning_over_time, got "
            "dashboard.",
        ),
        (["seed0", "--accuracy", "loss"], "`--accuracy` must be used with --figure compare, got dashboard."),
        (
            ["seed0", "--figure", "scalars", "--layers", "block*"],
            "`--layers` cannot be used with --figure scalars, which shows the whole network. Leave it out.",
        ),
    ],
)
def test_arguments_that_do_not_fit_exit_with_two_and_write_nothing(runs, here, arguments, says):
    result = run(*(runs / argument if argument.startswith("seed") else argument for argument in arguments))
    assert (result.exit_code, result.stderr) == (2, f"gyroscope: {says}\n")
    assert files(here) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "no run at"),
        (["x" * 300], "x" * 300),
        (["seed0", "--figure", "rates", "--layers", "zz*"], "match at least one of the 3 layers"),
        (["seed0", "--figure", "curves", "--quantity", "rotatoin"], "Did you mean rotation?"),
        (["seed0", "--figure", "compare", "--accuracy", "top5"], "has no scalar 'top5'; its scalars are: "),
        (["seed0", "--figure", "compare", "--accuracy", "top5"], "Name another with --accuracy."),
    ],
)
def test_what_a_run_does_not_hold_exits_with_one_in_one_line(runs, here, arguments, says):
    result = run(runs / arguments[0], *arguments[1:])
    assert result.exit_code == 1
    assert result.stderr.startswith("gyroscope: ")
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert files(here) == []


def test_a_file_that_cannot_be_written_is_one_line(runs, here):
    (here / "file").write_text("")
    result = run(runs / "seed0", "--figure", "rates", "--out", "file/a.png")
    assert (result.exit_code, result.stderr) == (1, "gyroscope: file/a.png cannot be written: File exists.\n")


def test_a_missing_matplotlib_names_the_extra(runs, monkeypatch):
    for name in list(sys.modules):
        if name.startswith("gyroscope.figures"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("gyroscope.figures")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(runs / "seed0")
    assert result.exit_code == 1
    assert result.stderr.startswith("gyroscope: gyroscope.figures needs matplotlib")
    assert "pip install 'gyroscope[figures]'" in result.stderr


def test_the_help_explains_every_figure():
    text = run("--help").stdout
    assert all(f"{figure}:" in text for figure in get_args(Name) if figure != "dashboard")
    assert "For example: gyroscope plot" in text


@pytest.mark.parametrize("name", ["$\\frac{$", os.fsdecode(b"caf\xe9")])
def test_the_name_of_a_folder_is_drawn_as_it_is(name, runs, here):
    shutil.copytree(runs / "seed0", here / name)
    result = run(here / name, "--figure", "rotation_curves", "--out", "curves.png")
    assert result.exit_code == 0, result.output
