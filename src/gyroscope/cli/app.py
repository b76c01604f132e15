"""The `gyroscope` command; each subcommand is a module of this subpackage, or of another package.

Other packages add commands through the entry-point group `gyroscope.commands`: the name of a command and its
`typer.Typer`. They are loaded on demand.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import gyroscope
from gyroscope.cli.compare import compare
from gyroscope.cli.diagnose import diagnose
from gyroscope.cli.events import events
from gyroscope.cli.explain import explain
from gyroscope.cli.export import export
from gyroscope.cli.fail import FAILED, fail
from gyroscope.cli.live import live
from gyroscope.cli.plot import plot
from gyroscope.cli.report import report
from gyroscope.cli.runs import runs
from gyroscope.cli.sample import sample
from gyroscope.cli.show import show

_PURPOSE = "Measure, explain and steer how each layer of a neural network trains."
# Commands of the laboratory, which is a separate package.
_LABORATORY = ("demo", "reproduce", "train", "data", "benchmark")


def _added() -> dict[str, EntryPoint]:
    """Return the commands of other packages by name, the laboratory's first."""
    found = {entry.name: entry for entry in entry_points(group="gyroscope.commands")}
    return {name: found[name] for name in (*_LABORATORY, *sorted(found)) if name in found}


class Commands(TyperGroup):
    """The commands of this package and those that other packages add."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the help."""
        return [*_added(), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; one of another package is loaded now."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        if (entry := _added().get(cmd_name)) is not None:
            return typer.main.get_command(entry.load())
        if cmd_name in _LABORATORY:
            fail(f"`gyroscope {cmd_name}` needs the laboratory: pip install gyroscope-lab", code=FAILED)
        return None


app = typer.Typer(
    name="gyroscope",
    cls=Commands,
    help=f"{_PURPOSE}\n\nNew here? Run: gyroscope demo",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for command in (compare, runs, show, diagnose, events, explain, plot, report, live, export, sample):
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
