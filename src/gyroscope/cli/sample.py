"""`gyroscope sample`: ask a running job for detail."""

from __future__ import annotations

from typing import Annotated

import typer

from gyroscope.cli.fail import BAD_ARGUMENT, FAILED, fail
from gyroscope.cli.options import RunPath
from gyroscope.cli.printed import echo
from gyroscope.errors import GyroscopeError


def sample(
    run: RunPath,
    steps: Annotated[int, typer.Option(help="How many steps to look at.")] = 5,
) -> None:
    """Make a running job measure its next steps, every one and in detail.

    A monitor that measures now and then, to stay within its budget, is asked to look at every one of the next steps,
    activations included. It looks for the request a few times a second; a run that has ended never will.

    For example: gyroscope sample runs/first --steps 20
    """
    from gyroscope.monitor.request import ask
    from gyroscope.store import load

    if steps < 1:
        fail(f"--steps is {steps}; it must be 1 or more", code=BAD_ARGUMENT)
    try:
        with load(run) as opened:
            state = opened.state
            if state != "running":
                fail(f"{run} is not running ({state}); there is nobody to ask", code=FAILED)
            ask(opened.path, steps)
    except GyroscopeError as error:
        fail(str(error), code=FAILED)
    except OSError as error:
        fail(f"{run} cannot be written: {error.strerror}", code=FAILED)
    echo(f"{run}: asked for the next {steps} steps in detail")
