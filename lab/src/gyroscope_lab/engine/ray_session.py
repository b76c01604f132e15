"""Being connected to a Ray cluster, for a while."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from gyroscope.errors import MissingExtraError
from gyroscope_lab.errors import LabError

# Seconds for a cluster to accept a connection.
_KNOCK_WITHIN = 10.0


def imported() -> Any:
    """Ray, or an error that says how to install it.

    >>> imported().__name__
    'ray'
    """
    try:
        return import_module("ray")
    except ImportError:
        raise MissingExtraError(
            "the engine 'ray' needs Ray, which is not installed: pip install 'gyroscope-lab[ray]'"
        ) from None


@contextmanager
def connected(ray: Any) -> Iterator[None]:
    """A cluster to work on; one that is started here is stopped at the end."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS", "")
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "include_dashboard": False}
    try:
        try:
            _knock(address or _noted())
            ray.init(**quiet)
        except OSError as error:
            if address:
                raise LabError(
                    f"no Ray cluster answers at RAY_ADDRESS={address} ({error}); start it, set RAY_AUTH_MODE=token if "
                    "it asks for one, or unset RAY_ADDRESS to use this machine alone"
                ) from error
            ray.init(address="local", **quiet)  # one that `ray start` started here is gone without a word
        yield
    finally:
        ray.shutdown()
        if in_main:  # Ray has set its own
            signal.signal(signal.SIGTERM, handler)


def _noted() -> str:
    """The address of the cluster that `ray start` last started on this machine; it may be gone."""
    place = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        return Path(place, "ray", "ray_current_cluster").read_text().strip()
    except OSError:
        return ""


def _knock(address: str) -> None:
    """Raise an OSError where nobody listens, which Ray would find out after minutes."""
    host, found, port = address.removeprefix("ray://").rpartition(":")
    if found and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_WITHIN).close()
