"""The laboratory's commands: for `gyroscope`, which loads them, and together as `gyroscope-lab`."""

from __future__ import annotations

import typer

from gyroscope_lab.cli.benchmark import benchmark_app
from gyroscope_lab.cli.data import data_app
from gyroscope_lab.cli.demo import demo
from gyroscope_lab.cli.reproduce import reproduce
from gyroscope_lab.cli.train import TrainCommand, train


def _alone() -> typer.Typer:
    return typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False)


demo_app, reproduce_app, train_app = _alone(), _alone(), _alone()
demo_app.command()(demo)
reproduce_app.command()(reproduce)
train_app.command(cls=TrainCommand)(train)

app = typer.Typer(
    name="gyroscope-lab",
    help="Train the tasks of the papers, and make their figures and tables again.\n\nNew here? Run: gyroscope-lab demo",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(reproduce)
app.command(cls=TrainCommand)(train)
app.add_typer(data_app)
app.add_typer(benchmark_app)
