"""`import gyroscope` needs torch and numpy alone, and loads nothing that is not used."""

import subprocess
import sys

HEAVY = {"torch._dynamo", "torch.distributed.tensor", "triton", "matplotlib", "sklearn", "scipy", "typer", "rich"}
THEORY = {f"gyroscope.dynamics.{name}" for name in ("explain", "invariance", "kfac", "normalizers", "outliers")}


def test_importing_loads_nothing_heavy():
    program = "import sys, torch; before = set(sys.modules); import gyroscope; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "gyroscope.control.layca" in loaded
    assert sorted(loaded & HEAVY) == []
    assert sorted(loaded & THEORY) == []
