"""`gyroscope export`: a run as a table for other programs."""

from __future__ import annotations

from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gyroscope.cli.fail import BAD_ARGUMENT, FAILED, INTERRUPTED, fail
from gyroscope.cli.options import RunPath, Target, out_option, quantities_and_scalars
from gyroscope.cli.printed import echo
from gyroscope.errors import GyroscopeError


class Format(StrEnum):
    """The kinds of files."""

    csv = "csv"
    json = "json"
    parquet = "parquet"


def export(
    run: RunPath,
    to: Annotated[
        Format | None, typer.Option("--to", help="Kind of file.", show_default="by the ending of --out, or csv")
    ] = None,
    out: Annotated[
        Target | None,
        out_option("File to write", "RUN.csv, in this folder"),
    ] = None,
    quantity: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What to export, such as rotation or loss; may be repeated.",
            show_default="all series",
            autocompletion=quantities_and_scalars,
        ),
    ] = None,
) -> None:
    """Write a run as CSV, JSON or Parquet, and say which file it is in.

    Of **one** quantity, the table has a row for each step and a column for each layer. Of **several or all**, it has a
    row for each step and layer and a column for each quantity. The name of a logged number, such as loss, gives its
    steps and values. **JSON** holds everything else about the run too: layers, units, logged numbers and events.

    What was not measured is empty, in JSON null.

    For example: gyroscope export runs/first --quantity rotation --out rotation.csv
    """
    from gyroscope.store import load

    try:
        with load(run) as opened:
            wanted = quantity[0] if quantity and len(quantity) == 1 else quantity or None
            name = f"{opened.name}_{_plain(wanted)}" if isinstance(wanted, str) else opened.name
            file, kind = _file(out, to, default=name)
            ways = {Format.csv: opened.to_csv, Format.json: opened.to_json, Format.parquet: opened.to_parquet}
            with nullcontext() if out is None else out.made():
                written = ways[kind](file, wanted)
    except KeyboardInterrupt:
        fail("interrupted", code=INTERRUPTED)
    except GyroscopeError as error:
        fail(str(error), code=FAILED)
    except OSError as error:
        fail(f"{out or Path()} cannot be written: {error.strerror or error}", code=FAILED)
    echo(f"Wrote {written}")


def _plain(name: str) -> str:
    # Names such as val/loss are common; in the name of a file they would be folders.
    return name.replace("/", "_").replace("\\", "_")


def _file(out: Target | None, to: Format | None, *, default: str) -> tuple[Path, Format]:
    endings = {f".{known.value}": known for known in Format}
    if out is None or out.folder:
        kind = to or Format.csv
        return (out.path if out else Path()) / f"{default}.{kind.value}", kind
    known = endings.get(out.path.suffix.lower())
    if known is None and to is None:
        fail(f"--out {out} ends in none of {', '.join(endings)}; say which with --to", code=BAD_ARGUMENT)
    if known is not None and to is not None and known is not to:
        fail(f"--out {out} and --to {to.value} disagree; leave one out", code=BAD_ARGUMENT)
    return out.path, to or known or Format.csv
