"""`gyroscope demo`: train a small network under ten configurations and look at how its layers rotate."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gyroscope.cli.fail import BAD_ARGUMENT, FAILED, INTERRUPTED, fail
from gyroscope.errors import GyroscopeError

if TYPE_CHECKING:
    from gyroscope.lab.demo import Demo
    from gyroscope.lab.recipe import Recipe
    from gyroscope.lab.summary import Summary


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the figure and the numbers.")] = Path("demo"),
    seeds: Annotated[
        int | None, typer.Option(help="Runs of each configuration.", show_default="3, or 1 with --quick")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Three configurations, a few seconds.")] = False,
    jobs: Annotated[
        int | None, typer.Option(help="Worker processes.", show_default="one for each CPU, at most 8")
    ] = None,
) -> None:
    """Train a small network in ten ways and see how far its layers rotate.

    Trains a seven-layer network on 200 digits under Layca at several rates and under plain SGD,
    prints a table, and writes rotation.png, rotation.svg and demo.json. Every training is recorded as a run of
    its own. Takes about a minute on two cores.
    """
    if seeds is None:
        seeds = 1 if quick else 3
    if seeds < 1:
        fail(f"--seeds is {seeds}; it must be 1 or more", code=BAD_ARGUMENT)
    if jobs is None:
        jobs = min(os.cpu_count() or 1, 8)
    if jobs < 1:
        fail(f"--jobs is {jobs}; it must be 1 or more", code=BAD_ARGUMENT)
    _prepare(out)
    try:
        _load()
        measured = _train(seeds, quick, jobs, out / "runs")
        (out / "demo.json").write_text(json.dumps(measured.as_json(), indent=1) + "\n")
        written = _draw(measured, out)
    except KeyboardInterrupt:
        fail("interrupted", code=INTERRUPTED)
    except (GyroscopeError, OSError) as error:
        fail(str(error), code=FAILED)
    _report(measured, [*written, out / "demo.json"])
    runs = out / "runs"
    typer.echo(f"Each training is a run: gyroscope runs {runs}; gyroscope show {runs / 'sgd-seed-0'}")


def _prepare(out: Path) -> None:
    # Writing a file is the only test that holds for every file system and user; done before training.
    if out.exists() and not out.is_dir():
        fail(f"--out {out} is a file; give a folder", code=BAD_ARGUMENT)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        fail(f"--out {out} cannot be written: {error.strerror}", code=BAD_ARGUMENT)


def _load() -> None:
    # Not at the top, so that --help does not wait for scikit-learn and matplotlib; all at once, so that
    # one that is missing is noticed before the training and not after.
    import gyroscope.figures
    import gyroscope.lab.demo  # noqa: F401


def _train(seeds: int, quick: bool, jobs: int, record: Path) -> Demo:
    from gyroscope.lab import demo as lab

    recipes = lab.QUICK_RECIPES if quick else lab.RECIPES
    schedule = lab.QUICK_SCHEDULE if quick else lab.SCHEDULE
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("training", total=len(recipes) * seeds)
        return lab.run(
            seeds=range(seeds),
            recipes=recipes,
            schedule=schedule,
            jobs=jobs,
            record=record,
            on_done=lambda trial: progress.advance(task),
        )


def _draw(measured: Demo, out: Path) -> list[Path]:
    from gyroscope.figures import Panel, rotation_panels, save

    panels = [
        Panel(
            title=_figure_title(summary.recipe),
            curves=np.mean([result.rotation for result in results], axis=0),
            note=f"test {_accuracy(summary)}",
        )
        for summary, results in zip(measured.summaries, measured.results, strict=True)
    ]
    runs = "1 seed" if len(measured.seeds) == 1 else f"mean of {len(measured.seeds)} seeds"
    title = f"How far each layer rotates from its initialization ({runs})"
    return save(rotation_panels(panels, title=title), out / "rotation")


def _figure_title(recipe: Recipe) -> str:
    title = re.sub(r"(\d)\^(-?\d)", r"$\1^{\2}$", recipe.name)
    return re.sub(r"alpha (\S+)", r"$\\alpha = \1$", title)


def _report(measured: Demo, written: list[Path]) -> None:
    from gyroscope.lab.summary import in_words

    table = Table(title="Seven layers, 200 training digits, 1,597 test digits")
    table.add_column("configuration", no_wrap=True)
    table.add_column("train %", justify="right")
    table.add_column("test %", justify="right")
    for column in ("rotation\nmin", "\nmean", "\nmax"):
        table.add_column(column, justify="right")
    for summary in measured.summaries:
        final = summary.final_rotation
        table.add_row(
            summary.recipe.name,
            f"{100 * summary.train_accuracy:.1f}",
            _accuracy(summary).removesuffix(" %"),
            *(f"{rotation:.3f}" for rotation in (min(final), summary.mean_rotation, max(final))),
        )
    console = Console()
    console.print(table)
    console.print(in_words(measured.summaries), highlight=False)
    paths = ", ".join(map(str, written))
    console.print(f"Trained in {measured.seconds:.0f} s. Wrote {paths}", highlight=False, soft_wrap=True)


def _accuracy(summary: Summary) -> str:
    spread = "" if summary.test_std is None else f" ± {100 * summary.test_std:.1f}"
    return f"{100 * summary.test_accuracy:.1f}{spread} %"
