"""`gyroscope demo`: train a small network under ten configurations and show how its layers rotate."""

from __future__ import annotations

import json
import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gyroscope.cli.fail import FAILED, INTERRUPTED, fail
from gyroscope.errors import GyroscopeError
from gyroscope_lab.cli.shared import at_least_one, loading, make_folder

if TYPE_CHECKING:
    from gyroscope_lab.papers.demo import Demo
    from gyroscope_lab.training.trial import Trial

_OUT = Path("demo")


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page, the figure, the numbers and the runs.")] = _OUT,
    seeds: Annotated[
        int | None, typer.Option(help="Runs per configuration.", show_default="3, or 1 with --quick")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Three configurations, a few seconds.")] = False,
    jobs: Annotated[int | None, typer.Option(help="Worker processes.", show_default="one per CPU, at most 8")] = None,
    again: Annotated[bool, typer.Option("--again", help="Train again, even if results are known.")] = False,
) -> None:
    """Train a small network in ten ways and see how far its layers rotate.

    Trains a seven-layer network on 200 digits under Layca at several rates and under plain SGD,
    prints a table, and writes index.html, rotation.png, rotation.svg and demo.json. Every training is recorded as a
    run. It takes about a minute on two cores.

    An interrupted demo resumes where it stopped, and known trainings are not run again.
    """
    at_least_one(seeds, "--seeds")
    at_least_one(jobs, "--jobs")
    count = seeds or (1 if quick else 3)
    make_folder(out, "--out")
    asked = [f"--out {quote(str(out))}"] if out != _OUT else []
    asked += ["--quick"] if quick else []
    asked += [f"--seeds {seeds}"] if seeds is not None else []
    command = " ".join(["gyroscope demo", *asked])
    try:
        _load()
        measured, trials = _train(out / "runs", count, quick, jobs or min(os.cpu_count() or 1, 8), again)
        with loading(what="Drawing"):
            written = _write(measured, out, command, trials[::count])
    except KeyboardInterrupt:
        fail(f"Interrupted. To resume: {command}", code=INTERRUPTED)
    except (GyroscopeError, OSError) as error:
        fail(str(error), code=FAILED)
    _report(measured, written, out, command, trials)


def _load() -> None:
    # Not at the top, so that --help does not wait for scikit-learn and matplotlib. All at once, so that a missing
    # package is noticed before the training.
    with loading():
        import gyroscope.figures  # noqa: F401
        import gyroscope_lab.papers.demo  # noqa: F401


def _train(runs: Path, seeds: int, quick: bool, jobs: int, again: bool) -> tuple[Demo, list[Trial]]:
    from gyroscope_lab.cli.lab_progress import LabProgress
    from gyroscope_lab.engine.laboratory import Lab
    from gyroscope_lab.papers import demo as lab
    from gyroscope_lab.training.archive import Archive, forget

    recipes, task = (lab.QUICK_RECIPES, lab.QUICK_TASK) if quick else (lab.RECIPES, lab.TASK)
    with LabProgress() as progress:
        # Always on a CPU, so that everybody sees the same numbers.
        laboratory = Lab(
            Archive(runs),
            engine="workers" if jobs > 1 else "serial",
            jobs=jobs,
            precision="float32",
            **progress.hooks,
        )
        trials = lab.trials(laboratory, seeds=range(seeds), recipes=recipes, task=task)
        if again:
            forget(laboratory.archive, trials)
        return lab.run(laboratory, seeds=range(seeds), recipes=recipes, task=task), trials


def _write(measured: Demo, out: Path, command: str, shown: list[Trial]) -> list[Path]:
    from gyroscope import report
    from gyroscope.figures import Panel, rotation_panels, save
    from gyroscope_lab.papers.demo import about, accuracy_text
    from gyroscope_lab.papers.rotation.panels import title
    from gyroscope_lab.training.archive import Archive

    panels = [
        Panel(title=title(cell.recipe), curves=cell.rotation, note=f"test {accuracy_text(cell)} %")
        for cell in measured.cells
    ]
    runs = "1 seed" if len(measured.seeds) == 1 else f"mean of {len(measured.seeds)} seeds"
    heading = f"How far each layer rotates from its initialization ({runs})"
    figures = save(rotation_panels(panels, title=heading), out / "rotation")
    numbers = out / "demo.json"
    numbers.write_text(json.dumps({**measured.as_json(), "command": command}, indent=1, allow_nan=False) + "\n")
    index = report(
        [Archive(out / "runs").folder(trial) for trial in shown],
        out / "index.html",
        labels=[trial.recipe.name for trial in shown],
        title="How far layers rotate, and how well a network generalizes",
        about=about(measured, command=command),
    )
    return [index, *figures, numbers]


def _report(measured: Demo, written: list[Path], out: Path, command: str, trials: list[Trial]) -> None:
    from gyroscope_lab.papers.demo import accuracy_text, in_words
    from gyroscope_lab.training.archive import Archive

    table = Table(title="Seven layers, 200 training digits, 1,597 test digits")
    table.add_column("configuration", no_wrap=True)
    table.add_column("train %", justify="right")
    table.add_column("test %", justify="right")
    for column in ("rotation\nmin", "\nmean", "\nmax"):
        table.add_column(column, justify="right")
    for cell in measured.cells:
        final = cell.final_rotation
        texts = (
            cell.recipe.name,
            f"{cell.train:.1f}",
            accuracy_text(cell),
            *(f"{rotation:.3f}" for rotation in (min(final), cell.mean_rotation, max(final))),
        )
        table.add_row(*map(Text, texts))
    console = Console()
    console.print(table)
    console.print(in_words(measured.cells), highlight=False)
    kept = len(trials) - measured.trained
    if kept:
        known = "All" if kept == len(trials) else f"{kept} of"
        typer.echo(f"{known} {len(trials)} trainings were known: results are kept. To train again: {command} --again")
    took = f"Trained in {measured.seconds:.0f} s. " if measured.trained else ""
    typer.echo(f"{took}Wrote {', '.join(map(str, written))}. Open {written[0]} in a browser.")
    runs, last = quote(str(out / "runs")), quote(str(Archive(out / "runs").folder(trials[-1])))
    typer.echo(f"Each training is a run: gyroscope runs {runs}; gyroscope show {last}")
