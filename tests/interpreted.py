"""Kernels on the CPU: a file of cases under Triton's interpreter, in a process of its own.

Triton decides how to run kernels when it is imported, so the interpreter cannot be switched on in this process.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(
    sys.platform != "linux" or find_spec("triton") is None, reason="Triton runs on Linux alone"
)


def assert_cases_hold(cases: Path, *, more_than: int) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "GYROSCOPE_BACKEND": "triton"}
    command = [sys.executable, "-m", "pytest", str(cases), "-p", "no:cacheprovider", "--tb=short", "-rA"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=cases.parents[2], timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED ") > more_than, "few cases ran, or none:\n" + done.stdout
