"""`gyroscope benchmark`: measure how often a diagnosis is right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gyroscope.cli import fail as failing
from gyroscope.cli.printed import echo
from gyroscope_lab.errors import LabError

benchmark_app = typer.Typer(
    name="benchmark", help="Measure how often Gyroscope is right.", no_args_is_help=True, rich_markup_mode="markdown"
)


@benchmark_app.callback()
def _benchmark() -> None:
    """Measure how often Gyroscope is right."""


@benchmark_app.command("diagnosis")
def diagnosis(
    network: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this network; repeatable.")] = None,
    seed: Annotated[list[int] | None, typer.Option(metavar="N", help="Only this seed (0, 1 or 2); repeatable.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that train side by side.")] = 2,
    out: Annotated[Path, typer.Option(help="File to add the verdicts to, one per line.")] = Path("verdicts.jsonl"),
) -> None:
    """Put faults into small networks, train them beside healthy ones, and score the diagnosis of each run.

    Cases that the file OUT already holds are not trained again. --network mlp-4 takes a second or two per case; all
    networks and seeds take hours.

    For example: gyroscope benchmark diagnosis --network mlp-4 --seed 0
    """
    from gyroscope_lab.faults.benchmark import cases, run_all, to_json
    from gyroscope_lab.faults.networks import NETWORKS
    from gyroscope_lab.faults.score import markdown, read

    unknown = [name for name in network or () if name not in NETWORKS]
    if unknown:
        failing.fail(f"`--network` must be one of {', '.join(NETWORKS)}, got {unknown[0]}.", code=failing.BAD_ARGUMENT)
    try:
        known = read(out) if out.exists() else []
    except LabError as error:
        failing.fail(str(error), code=failing.BAD_ARGUMENT)
    there = {one.case for one in known}
    wanted = [one for one in cases(networks=network, seeds=tuple(seed or (0, 1, 2))) if one not in there]
    echo(f"{len(wanted):,} cases to train, {len(known):,} known")
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:

        def keep(outcome: object) -> None:
            file.write(to_json([outcome]))  # type: ignore[list-item]
            file.flush()

        known += run_all(wanted, jobs=jobs, done=keep)
    echo(markdown(known))
