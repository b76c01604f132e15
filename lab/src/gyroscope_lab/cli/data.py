"""`gyroscope data`: the datasets of the laboratory, fetched from their publishers and checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from gyroscope.cli.fail import BAD_ARGUMENT, FAILED, INTERRUPTED, fail
from gyroscope.cli.printed import console
from gyroscope.errors import GyroscopeError

if TYPE_CHECKING:
    from gyroscope_lab.data.catalogue import Dataset

# A pipe or a file has no width; every column fits into this one.
_UNBOUNDED = 150
_COMPARED = {
    "md5": "right by its MD5",
    "sha256": "right by its SHA-256",
    "size": "right by its size; no checksum is published",
    "count": "as many as were published",
    "name": "there; nothing is published to compare it with",
}

_Names = Annotated[list[str], typer.Argument(metavar="NAME", help="Names that gyroscope data list gives.")]
_Folder = Annotated[Path, typer.Option("--data", envvar="GYROSCOPE_DATA", help="Folder of the datasets.")]
_Target = Annotated[Path, typer.Option("--to", "--data", envvar="GYROSCOPE_DATA", help="Folder to put them into.")]

data_app = typer.Typer(
    name="data",
    help="List, fetch and check the datasets that studies train on.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@data_app.command("list")
def list_(data: _Folder = Path("data")) -> None:
    """List the datasets, and whether they are here.

    The column **here** says whether all files of a dataset were found, some of them, or only its archive. To compare
    the files with the published ones, use gyroscope data check. Scikit-learn's digits need no files.

    For example: gyroscope data list --data ~/datasets
    """
    from gyroscope_lab.data.catalogue import DATASETS

    folder = data.expanduser()
    table = Table()
    for column in ("name", "dataset", "files", "size", "here", "where"):
        right = column in ("files", "size")
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=right)
    for known in DATASETS:
        table.add_row(*map(Text, _row(known, folder)))
    console(_UNBOUNDED).print(table)
    there = "" if folder.is_dir() else ", which does not exist yet"
    typer.echo(f"Looked in {folder.absolute()}{there}. To fetch one, or to see how: gyroscope data get NAME")


@data_app.command()
def get(
    names: _Names,
    to: _Target = Path("data"),
    again: Annotated[bool, typer.Option("--again", help="Replace wrong files.")] = False,
) -> None:
    """Fetch datasets from their publishers, check them, and unpack them.

    Files that are here and right are kept. An interrupted download continues where it stopped.

    For example: gyroscope data get mnist cifar-10
    """
    from gyroscope_lab.data.download import fetch

    folder, failed = to.expanduser(), False
    for known in _known(names):
        try:
            with _Bars() as bars:
                fetched = fetch(known, folder, again=again, watcher=bars.watcher)
        except KeyboardInterrupt:
            fail("Interrupted. The same command resumes the download.", code=INTERRUPTED)
        except GyroscopeError as error:
            typer.echo(f"gyroscope: {error}", err=True)
            failed = True
            continue
        typer.echo(f"{known.name} is {'now' if fetched else 'already'} in {folder}, and right. {known.note}.")
    if failed:
        raise typer.Exit(FAILED)


@data_app.command()
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Datasets to check.", show_default="all that are here"),
    ] = None,
    data: _Folder = Path("data"),
) -> None:
    """Compare the files that are here with the published ones.

    Exits with 1 if one of them is wrong or missing.

    For example: gyroscope data check cifar-10
    """
    from gyroscope_lab.data import catalogue

    folder, wrong, looked = data.expanduser(), False, False
    for known in _known(names) if names else catalogue.DATASETS:
        found, packed = False, _is_packed(known, folder)
        for verdict in catalogue.check(known, folder):
            found = True
            said = verdict.problem or _COMPARED[verdict.by]
            typer.echo(f"{'wrong' if verdict.problem else 'right'}  {known.name}  {verdict.path}: {said}")
            wrong |= verdict.problem is not None
        missing = catalogue.missing(known, folder)
        if missing and not packed and (found or names):
            lacks = f"lacks {', '.join(missing)}" if found else f"is not in {folder}"
            typer.echo(f"wrong  {known.name} {lacks}; to fetch it: gyroscope data get {known.name}")
            wrong = True
        looked |= found
    if not looked and not names:
        typer.echo(f"There are no datasets in {folder}. To list those that can be fetched: gyroscope data list")
    if wrong:
        raise typer.Exit(FAILED)


def _known(names: list[str]) -> list[Dataset]:
    from gyroscope_lab.data.catalogue import dataset

    try:
        return [dataset(name) for name in dict.fromkeys(names)]
    except GyroscopeError as error:
        fail(str(error), code=BAD_ARGUMENT)


def _row(known: Dataset, folder: Path) -> list[str]:
    from gyroscope_lab.data.catalogue import find

    parts = [found for piece in known.pieces for found in find(known, piece, folder)]
    here = [found for found in parts if found]
    if len(here) == len(parts):
        state = "yes"
    elif _is_packed(known, folder):
        state = "packed"
    elif here:
        state = f"{len(here)} of {len(parts)} files"
    else:
        state = "by hand" if known.by_hand else "no"
    downloads = [piece.download for piece in known.pieces if piece.download]
    size = sum(file.size or 0 for file in downloads)
    where = here[0][0].parent if here else folder / downloads[0].name if state == "packed" else None
    return [
        known.name,
        known.title,
        str(len(downloads)) if downloads else "–",
        f"{size / 1e6:,.1f} MB" if downloads else "–",
        state,
        str(where) if where else "–",
    ]


def _is_packed(known: Dataset, folder: Path) -> bool:
    """Return whether all archives are on disk."""
    archives = [piece.archive for piece in known.pieces]
    return all(archive is not None and (folder / archive.name).is_file() for archive in archives)


class _Bars:
    """One bar per file in download, on standard error."""

    def __init__(self) -> None:
        from gyroscope_lab.data.download import Watcher

        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True))
        self._tasks: dict[str, TaskID] = {}
        self.watcher = Watcher(on_bytes=self._bytes, on_news=self._news)

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *_: object) -> None:
        # Stopping a display that never started would print an empty line.
        if self._progress.live.is_started:
            self._progress.stop()

    def _bytes(self, name: str, here: int, total: int | None) -> None:
        self._progress.start()
        if name not in self._tasks:
            # Bytes that were here before do not count for the speed.
            self._tasks[name] = self._progress.add_task(name, total=total, completed=here)
        self._progress.update(self._tasks[name], completed=here, total=total)

    def _news(self, sentence: str) -> None:
        self._progress.console.print(sentence, highlight=False, markup=False)
