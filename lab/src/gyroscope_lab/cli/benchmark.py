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
    subset: Annotated[bool, typer.Option("--subset", help="One seed of every network: a third of the cases.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that train side by side.")] = 2,
    out: Annotated[Path, typer.Option(help="File to add the verdicts to, one per line.")] = Path("verdicts.jsonl"),
) -> None:
    """Train small networks with faults and without, and score the diagnosis of each run.

    Cases that the file OUT already holds are not trained again. A case takes 2 to 8 seconds of one core: --subset takes
    half an hour on two, everything two hours.

    For example: gyroscope benchmark diagnosis --network mlp-4 --seed 0
    """
    from gyroscope_lab.faults.benchmark import SUBSET, cases, continued
    from gyroscope_lab.faults.networks import NETWORKS
    from gyroscope_lab.faults.score import markdown

    unknown = [name for name in network or () if name not in NETWORKS]
    if unknown:
        failing.fail(f"`--network` must be one of {', '.join(NETWORKS)}, got {unknown[0]}.", code=failing.BAD_ARGUMENT)
    if subset and seed:
        failing.fail("`--subset` has a seed of its own. Leave `--seed` out.", code=failing.BAD_ARGUMENT)
    seeds = SUBSET if subset else tuple(seed or (0, 1, 2))

    def begin(new: int, known: int) -> None:
        echo(f"{new:,} cases to train, {known:,} known")

    try:
        echo(markdown(continued(out, cases(networks=network, seeds=seeds), jobs=jobs, on_begin=begin)))
    except LabError as error:
        failing.fail(str(error), code=failing.BAD_ARGUMENT)
