"""The command line in the reference: a page made of the help of each command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

PAGE = Path(__file__).parent / "command_line.md"
_INTRODUCTION = """\
# Command line

`pip install 'gyroscope[cli]'` puts `gyroscope` on your PATH. `gyroscope COMMAND --help` prints what this page says. The
commands `demo`, `reproduce`, `train`, `data` and `benchmark` come with the laboratory, `gyroscope-lab`.
"""


def commands() -> Iterator[tuple[str, Any, Any]]:
    """Yield the path, the command and its context for each command that does something, in the order of the help.

    >>> next(path for path, _, _ in commands() if "show" in path)
    'gyroscope show'
    """
    from gyroscope.cli import app

    def below(command: Any, context: Any) -> Iterator[tuple[str, Any, Any]]:
        if not hasattr(command, "list_commands"):
            yield context.command_path, command, context
            return
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            yield from below(found, found.context_class(found, info_name=name, parent=context))

    top = typer.main.get_command(app)
    yield from below(top, top.context_class(top, info_name="gyroscope"))


def _plain(text: str) -> str:
    """Return text in which the names of options are code."""
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", text)


def _cell(text: str) -> str:
    return _plain(re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "\\<").strip())


def section(path: str, command: Any, context: Any) -> str:
    """Return the section of a command: its usage, its help, its arguments and options."""
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    text = re.sub(r"^[ \t]+", "", command.help or "", flags=re.MULTILINE)
    text, *examples = re.split(r"^For example: ", text, flags=re.MULTILINE)
    text = _plain(text) + "".join(f"For example:\n\n```\n{one.strip()}\n```\n\n" for one in examples)
    rows = [one.get_help_record(context) for one in command.params]
    cells = [(given.replace("|", "\\|"), _cell(said)) for given, said in filter(None, rows)]
    table = ["| | |", "|---|---|", *(f"| `{given}` | {said} |" for given, said in cells)]
    return "\n".join([f"## {path}", "", "```", usage, "```", "", text, "", *(table if len(table) > 2 else [])])


def write_page(app: Any = None) -> None:
    """Write the page, if it changed."""
    text = "\n\n".join([_INTRODUCTION, *(section(*one) for one in commands())]) + "\n"
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        PAGE.write_text(text, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("builder-inited", write_page, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
