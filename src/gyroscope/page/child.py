"""The live page of a training, as a child process of it: what `gyroscope.watch(live=True)` starts.

It is a process of its own because a server in the training process would compete for the interpreter lock, and would be
copied by forked data loaders. It reads lines of JSON: the first says which run to show and on which port; each later
one adds a run. It answers with one line, the address or an error. It ends when its parent does, however that ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from threading import Thread
from typing import TextIO

from gyroscope.errors import GyroscopeError

# Seconds between two looks at who the parent is, and those that open connections have to end.
_LOOK, _PATIENCE = 1.0, 3.0


def main(lines: TextIO = sys.stdin) -> None:
    """Run the server."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training
    asked = json.loads(lines.readline())
    try:
        from gyroscope.page.server import Server

        server = Server([Path(asked["folder"])], port=asked["port"])
    except GyroscopeError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return

    def end() -> None:
        server.stop()
        time.sleep(_PATIENCE)
        os._exit(0)  # something does not end

    def listen() -> None:
        for line in lines:
            server.runs.add(Path(json.loads(line)["folder"]))
        end()

    def look() -> None:
        # Forked data loaders inherit the other end of the pipe. If they outlive the training, it stays open.
        while os.name != "posix" or os.getppid() == parent:
            time.sleep(_LOOK)
        end()

    for act in (listen, look):
        Thread(target=act, daemon=True).start()
    print(json.dumps({"address": server.address}), flush=True)
    server.run()
