"""Worker processes that do not outlive their parent."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """End this worker when its parent ends, even if the parent is killed."""
    threading.Thread(target=_wait_and_end, daemon=True).start()


def _wait_and_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
