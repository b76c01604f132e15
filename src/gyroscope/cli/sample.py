"""`gyroscope sample`: ask a running job for detailed measurements."""

from __future__ import annotations

from typing import Annotated

import typer

from gyroscope.cli.fail import BAD_ARGUMENT, FAILED, fail, reported
from gyroscope.cli.options import RunPath
from gyroscope.cli.printed import echo


def sample(
    run: RunPath,
    steps: Annotated[int, typer.Option(help="Number of steps to measure.")] = 5,
) -> None:
    """Ask a running job to measure each of its next steps in detail.

    A monitor that skips steps to stay within its budget then measures every one of the next steps, activations
    included. It checks for requests a few times per second. A run that has ended never does.

    For example: gyroscope sample runs/first --steps 20
    """
    from gyroscope.store import load
    from gyroscope.store.folder import request

    if steps < 1:
        fail(f"`--steps` must be a whole number ≥ 1, got {steps}. Try 5.", code=BAD_ARGUMENT)
    with reported(writes=run), load(run) as opened:
        state = opened.state
        if state != "running":
            fail(f"{run} is not running ({state}). Only a running job can be sampled.", code=FAILED)
        request(opened.path, steps)
    echo(f"{run}: the next {steps} steps will be measured in detail")
