"""The command `gyroscope` itself; each of its commands is a module beside this one."""

from __future__ import annotations

from typing import Annotated

import typer

import gyroscope
from gyroscope.cli.compare import compare
from gyroscope.cli.data import data_app
from gyroscope.cli.demo import demo
from gyroscope.cli.events import events
from gyroscope.cli.explain import explain
from gyroscope.cli.export import export
from gyroscope.cli.plot import plot
from gyroscope.cli.reproduce import reproduce
from gyroscope.cli.runs import runs
from gyroscope.cli.sample import sample
from gyroscope.cli.show import show
from gyroscope.cli.train import TrainCommand, train

_PURPOSE = "Measure, explain and steer how each layer of a neural network trains."

app = typer.Typer(
    name="gyroscope",
    help=f"{_PURPOSE}\n\nNew here? Run: gyroscope demo",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(reproduce)
app.command(cls=TrainCommand)(train)
app.add_typer(data_app)
for command in (compare, runs, show, events, explain, plot, export, sample):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gyroscope {gyroscope.__version__}")
        raise typer.Exit


@app.callback()
def _gyroscope(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...
