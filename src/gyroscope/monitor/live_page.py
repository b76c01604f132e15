"""The process that shows the page of a run while it is recorded, for `watch(live=True)`.

One process serves all runs that a training process records with the same port, under one address, so that a notebook
whose cells are run again keeps its page. It ends with the training process, not with a monitor: people look at a page
after training.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import Any

_LOG = logging.getLogger("gyroscope")
# The child is found where this process has found this package, which need not be on the path of a new interpreter.
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from gyroscope.page.child import main; main()"
# Seconds that it may take to start and to end.
_START, _END = 30.0, 3.0


class _Child:
    """A server in a process of its own.

    Raises:
        RuntimeError: it does not start; the message says why.
    """

    def __init__(self, path: Path, port: int) -> None:
        self._parent = os.getpid()
        # A session of its own: Ctrl-C in the terminal is for the training.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *map(str, sys.path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        answered: dict[str, Any] = {}
        try:
            with suppress(BrokenPipeError):  # it has ended already, which the reader finds out
                self._send({"folder": str(path), "port": port})
            reader = Thread(target=self._read, args=(answered,), daemon=True)
            reader.start()
            reader.join(_START)
            if "address" not in answered:
                raise RuntimeError(answered.get("error", f"it has not answered within {_START:.0f} s."))
        except BaseException:
            self.end()
            raise
        self.address = str(answered["address"])

    @property
    def serves(self) -> bool:
        """True if it runs, and belongs to this process rather than to the one that this process was forked from."""
        return self._parent == os.getpid() and self._process.poll() is None

    def add(self, path: Path) -> None:
        """Show one more run."""
        self._send({"folder": str(path)})

    def end(self) -> None:
        """End the process."""
        if self._parent != os.getpid():
            return
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _read(self, answered: dict[str, Any]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answer:
            line = answer.readline()
        answered |= json.loads(line) if line else {"error": "its process has ended at once."}


_children: dict[int, _Child] = {}
_lock = Lock()


def show(path: Path, port: int) -> str | None:
    """Show the page of a run, print its address, and return it; None if that fails, which is logged.

    Args:
        path: the run's folder.
        port: the port; 0 for any that is free.
    """
    with _lock:
        try:
            child = _children.get(port)
            if child is not None and child.serves:
                child.add(path)
                return child.address
            child = _children[port] = _Child(path, port)
        except Exception as error:  # a page is never worth a training
            _LOG.warning("The live page was not started, and training continues: %s", error)
            return None
        atexit.register(child.end)
    print(f"gyroscope: the live page of this training is at\n{child.address}", file=sys.stderr, flush=True)
    return child.address
