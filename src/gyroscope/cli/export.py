"""`gyroscope export`: a run as a table for other programs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from gyroscope.cli.fail import BAD_ARGUMENT, fail, reported
from gyroscope.cli.options import RunPath, Target, out_option, quantities_and_scalars
from gyroscope.cli.printed import echo

Format = Literal["csv", "json", "parquet"]


def export(
    run: RunPath,
    to: Annotated[
        Format | None, typer.Option("--to", help="File format.", show_default="by the ending of --out, or csv")
    ] = None,
    out: Annotated[
        Target | None,
        out_option("File to write", "RUN.csv, in this folder"),
    ] = None,
    quantity: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Quantity to export, such as rotation or loss; may be repeated.",
            show_default="all series",
            autocompletion=quantities_and_scalars,
        ),
    ] = None,
) -> None:
    """Write a run as CSV, JSON or Parquet, and print the name of the file.

    For **one** quantity, the table has one row per step and one column per layer. For **several or all**, it has one
    row per step and layer and one column per quantity. The name of a logged number, such as loss, gives its steps and
    values. **JSON** also holds everything else about the run: layers, units, logged numbers and events.

    Values that were not measured are empty, or null in JSON.

    For example: gyroscope export runs/first --quantity rotation --out rotation.csv
    """
    from gyroscope.store import load

    with reported(writes=out or Path()), load(run) as opened:
        wanted = quantity[0] if quantity and len(quantity) == 1 else quantity or None
        name = f"{opened.name}_{_plain(wanted)}" if isinstance(wanted, str) else opened.name
        file, kind = _file(out, to, default=name)
        ways = {"csv": opened.to_csv, "json": opened.to_json, "parquet": opened.to_parquet}
        with nullcontext() if out is None else out.made():
            written = ways[kind](file, wanted)
    echo(f"Wrote {written}")


def _plain(name: str) -> str:
    # Names such as val/loss are common; in a file name the slash would make folders.
    return name.replace("/", "_").replace("\\", "_")


def _file(out: Target | None, to: Format | None, *, default: str) -> tuple[Path, Format]:
    endings: dict[str, Format] = {f".{known}": known for known in get_args(Format)}
    if out is None or out.folder:
        kind = to or "csv"
        return (out.path if out else Path()) / f"{default}.{kind}", kind
    known = endings.get(out.path.suffix.lower())
    if known is None and to is None:
        fail(f"`--out` must end in {', '.join(endings)}, got {out}. Or give the format with --to.", code=BAD_ARGUMENT)
    if known is not None and to is not None and known != to:
        fail(f"`--out` and `--to` must agree, got {out} and {to}. Leave one out.", code=BAD_ARGUMENT)
    return out.path, to or known or "csv"
