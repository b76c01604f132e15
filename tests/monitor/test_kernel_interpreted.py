"""The monitor's kernel, run on the CPU by Triton's interpreter in a process of its own.

Triton decides how to run kernels when it is imported, so the interpreter cannot be switched on in this process.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("kernel_cases.py")


@pytest.mark.skipif(sys.platform != "linux" or find_spec("triton") is None, reason="Triton runs on Linux alone")
def test_the_kernel_keeps_every_claim_of_kernel_cases():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "GYROSCOPE_BACKEND": "triton"}
    command = [sys.executable, "-m", "pytest", str(CASES), "-p", "no:cacheprovider", "--tb=short", "-rA"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=CASES.parents[2], timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED ") > 80, "few cases ran, or none:\n" + done.stdout
