"""The Triton kernels give the same results as the reference, shown on a CPU by Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "triton_cases.py"


@pytest.mark.skipif(sys.platform != "linux" or find_spec("triton") is None, reason="Triton is not installed")
def test_all_cases_hold_for_the_triton_backend() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "GYROSCOPE_BACKEND": "triton"}
    command = [sys.executable, "-m", "pytest", str(CASES), "-p", "no:cacheprovider", "-p", "no:xdist", "--color=no"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=CASES.parents[2], timeout=300)
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    passed = re.search(r"^(\d+) passed in", output, re.MULTILINE)  # and none skipped
    assert passed is not None, output
    assert int(passed[1]) > 100, output
