"""`gyroscope live`: the page of a folder of runs, which follows those that are being written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gyroscope.cli.fail import BAD_ARGUMENT, fail, reported
from gyroscope.cli.printed import echo

_PORT = 8421


def live(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run, or a folder with runs, up to three levels deep.")
    ] = Path("runs"),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any that is free.")] = _PORT,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than this machine can connect only if you change it.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Further name under which the page may be reached, such as that of a proxy."),
    ] = None,
) -> None:
    """Show the runs in a folder in a browser, and follow those that are being written.

    Prints the address of the page, which holds a secret token: whoever has it can read these runs. The server only
    reads, except that a button on the page asks a running job for detail. Ctrl-C ends it.

    On another machine: ssh -L 8421:localhost:8421 HOST, then gyroscope live there, and open the address here.

    For example: gyroscope live experiments --open
    """
    if not 0 <= port <= 65535:
        fail(f"`--port` must be a whole number from 0 to 65535, got {port}. Try {_PORT}.", code=BAD_ARGUMENT)
    with reported():
        from gyroscope.page.server import live

        live(folder, host=host, port=port, allow_hosts=allow_host or (), browser=browser, say=echo)
