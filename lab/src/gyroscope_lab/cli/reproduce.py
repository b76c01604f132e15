"""`gyroscope reproduce`: reproduce the papers' figures and tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gyroscope.cli.fail import BAD_ARGUMENT, FAILED, INTERRUPTED, fail
from gyroscope.errors import GyroscopeError
from gyroscope_lab.cli.shared import Engine, Precision, Scale, at_least_one, load_laboratory, make_folder

if TYPE_CHECKING:
    from gyroscope_lab.engine.laboratory import Lab
    from gyroscope_lab.papers.study import Study


# The heading of the options for a GPU that is available for some minutes.
_BOX = "Time-limited GPUs"


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[list|NAME...]",
            help="Studies, by name or pattern, such as 'rotation/*', or all.",
            show_default="list",
        ),
    ] = None,
    scale: Annotated[
        Scale, typer.Option(help="smoke: seconds, small: minutes on a CPU; full: the paper's protocol, on a GPU.")
    ] = "small",
    data: Annotated[Path, typer.Option(envvar="GYROSCOPE_DATA", help="Folder of the datasets.")] = Path("data"),
    out: Annotated[Path, typer.Option(help="Folder for figures, tables and numbers.")] = Path("results"),
    runs: Annotated[Path, typer.Option(help="Folder where trainings are kept, for all studies.")] = Path("runs/lab"),
    engine: Annotated[Engine, typer.Option(help="The engine that trains; see below.")] = "auto",
    jobs: Annotated[
        int | None, typer.Option(help="Trainings at a time.", show_default="one per CPU, at most 8")
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this task of the papers; may be repeated.", show_default="all"),
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(help="Precision of products.", show_default="bf16 on a GPU and for --known at full scale"),
    ] = None,
    known: Annotated[bool, typer.Option("--known", help="Train nothing: use the kept trainings only.")] = False,
    minutes: Annotated[
        float | None,
        typer.Option(metavar="M", help="Train what is missing for M minutes, on a GPU.", rich_help_panel=_BOX),
    ] = None,
    archive: Annotated[
        Path | None,
        typer.Option(help="Archive that --minutes writes.", show_default="box-<time>.tar", rich_help_panel=_BOX),
    ] = None,
    archive_mib: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Largest archive, in MiB; the least advanced trainings are left out, then databases.",
            show_default="no limit",
            rich_help_panel=_BOX,
        ),
    ] = None,
    collect: Annotated[
        Path | None,
        typer.Option(metavar="ARCHIVE", help="Merge an archive into --runs and OUT/runs.", rich_help_panel=_BOX),
    ] = None,
    queue: Annotated[
        bool, typer.Option("--queue", help="Write OUT/queue.md, the list of missing trainings.", rich_help_panel=_BOX)
    ] = False,
) -> None:
    """Reproduce figures and tables of the papers, and compare their numbers with ours.

    Without a name, or with **list**, list the studies: what the paper shows, the number of trainings, their time, and
    whether there are results.

    At the scales **smoke** and **small**, the embedded digits replace the papers' data. At **full**, everything is as
    the authors ran it; see gyroscope data for the datasets.

    Trainings are kept: studies share them, interrupted ones resume where they stopped, and known ones are not run
    again. They run one after another (**serial**), in processes (**workers**), side by side on a GPU
    (**population**) or on a cluster (**ray**); **auto** uses a GPU if there is one.

    With **--minutes**, train the missing full-scale trainings in the order of OUT/queue.md for M minutes on a GPU, then
    write one archive of results and checkpoints. Names limit it to those studies. **--collect** merges the archive.

    For example: gyroscope reproduce rotation/fig1 --scale small
    """
    began = time.monotonic()
    at_least_one(jobs, "--jobs")
    at_least_one(archive_mib, "--archive-mib")
    _refuse_mixtures(minutes, archive, archive_mib, collect, queue, names, engine)
    lists = (not names or names == ["list"]) and minutes is None and collect is None and not queue
    if lists and not task:
        from gyroscope_lab.cli.study_tables import print_list

        print_list(out)
        return
    try:
        load_laboratory()
        from gyroscope_lab.cli import box
        from gyroscope_lab.engine.laboratory import Lab
        from gyroscope_lab.training.archive import Archive

        laboratory = Lab(
            Archive(runs), scale, data=data, engine=engine, jobs=jobs, only=tuple(task or ()), known=known,
            precision=precision,
        )  # fmt: skip
        if collect is not None:
            box.collect_archive(collect, runs=runs, out=out)
            return
        if queue:
            box.write_queue(out)
            return
        if minutes is not None:
            studies = [study.name for study in choose(names)] if names else []
            full = replace(laboratory, scale="full", engine="population", known=False)
            box.run_minutes(
                full, studies, minutes=minutes, out=out, data=data, archive=archive, limit=archive_mib, began=began
            )
            return
        if lists:
            _list(laboratory, out)
            return
        chosen = _with_tasks(laboratory, choose(names or []))
        for study in chosen:  # before anything is trained
            study.refuse_to_replace(laboratory, out)
    except GyroscopeError as error:
        fail(str(error), code=BAD_ARGUMENT)
    make_folder(out, "--out")
    if not known:
        make_folder(runs, "--runs")
        _require_data(laboratory, chosen, data)
    failed = [study.name for study in chosen if not _run(laboratory, study, out)]
    if failed:
        fail(f"{len(failed)} of {len(chosen)} studies failed: {', '.join(failed)}.", code=FAILED)


def choose(names: Sequence[str]) -> list[Study]:
    """Return the studies whose names are given or match a pattern, each once; all of them for "all".

    >>> [study.name for study in choose(["rotation/fig1", "rotation/fig[1]"])]
    ['rotation/fig1']
    """
    from gyroscope_lab.errors import LabError
    from gyroscope_lab.papers.catalogue import index, study

    known = [name for name in index() if name != "all"]
    found: set[str] = set()
    for given in names:
        matching = [name for name in known if given in ("all", name) or fnmatchcase(name, given)]
        if not matching:
            close = get_close_matches(given, known, n=1)
            hint = f"Did you mean {close[0]}? " if close else ""
            raise LabError(f"There is no study {given!r}. {hint}To list them: gyroscope reproduce list")
        found |= set(matching)
    return [study(name) for name in known if name in found]


def _refuse_mixtures(
    minutes: float | None,
    archive: Path | None,
    archive_mib: int | None,
    collect: Path | None,
    queue: bool,
    names: Sequence[str] | None,
    engine: Engine,
) -> None:
    """Exit if options exclude each other."""
    given = [
        option
        for option, is_given in (
            ("--minutes", minutes is not None),
            ("--collect", collect is not None),
            ("--queue", queue),
        )
        if is_given
    ]
    if len(given) > 1:
        fail(f"{' and '.join(given)} exclude each other. Give one of them.", code=BAD_ARGUMENT)
    if names and given and minutes is None:
        fail(f"{given[0]} takes no studies, got {' '.join(names)}. Leave them out.", code=BAD_ARGUMENT)
    if minutes is None and (archive is not None or archive_mib is not None):
        option = "--archive" if archive is not None else "--archive-mib"
        fail(f"`{option}` needs `--minutes`.", code=BAD_ARGUMENT)
    if minutes is not None and not 0 < minutes < inf:
        fail(f"`--minutes` must be a finite number > 0, got {minutes:g}. Try 30.", code=BAD_ARGUMENT)
    if minutes is not None and engine not in ("auto", "population"):
        fail(f"`--minutes` needs the engine population, got {engine}. Leave --engine out.", code=BAD_ARGUMENT)


def _list(lab: Lab, out: Path) -> None:
    """List the studies and their costs for the requested tasks."""
    from gyroscope_lab.cli.study_tables import print_list
    from gyroscope_lab.papers.catalogue import costs, studies

    each, all_of_them = costs(list(studies().values()), lab)
    print_list(out, each | {"all": all_of_them})


def _with_tasks(lab: Lab, chosen: list[Study]) -> list[Study]:
    """The studies that have one of the requested tasks."""
    from gyroscope_lab.errors import LabError

    kept = []
    for study in chosen:
        try:
            study.trials(lab)
            kept.append(study)
        except LabError as error:
            if not lab.only:
                raise
            problem = error
    if not kept:
        raise problem
    left_out = [study.name for study in chosen if study not in kept]
    if left_out:
        typer.echo(f"Left out, because they have no task {' or '.join(lab.only)}: {', '.join(left_out)}", err=True)
    return kept


def _require_data(lab: Lab, chosen: list[Study], data: Path) -> None:
    from gyroscope_lab.cli.missing_data import require_data

    trials = lab.archive.missing([lab.trial(trial) for study in chosen for trial in study.trials(lab)])
    several = f"{len(chosen)} studies" if len(chosen) > 1 else chosen[0].name
    require_data(trials, data, what=f"{several} at scale {lab.scale}")


def _run(lab: Lab, study: Study, out: Path) -> bool:
    """Run a study, print its report and write it to files; return whether it succeeded."""
    from gyroscope_lab.cli.lab_progress import LabProgress
    from gyroscope_lab.cli.missing_data import named_in, to_get
    from gyroscope_lab.cli.study_tables import print_report

    try:
        with LabProgress(study=study.name) as progress:
            report = study.run(replace(lab, **progress.hooks))
            written = study.save(lab, report, out)
    except KeyboardInterrupt:
        fail("Interrupted. The same command resumes where it stopped.", code=INTERRUPTED)
    except (GyroscopeError, OSError) as error:
        lacking = named_in(str(error))
        said = f"{str(error).rstrip('.')}. {to_get(lacking, Path(lab.data or 'data'))}" if lacking else error
        typer.echo(f"gyroscope: {study.name}: {said}", err=True)
        return False
    print_report(study, report, lab)
    typer.echo(f"Wrote {', '.join(map(str, written))}\n")
    return True
