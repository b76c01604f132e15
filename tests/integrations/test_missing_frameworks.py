"""An adapter whose framework is not installed says which extra to install, and the other integrations work."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules[sys.argv[1]] = None  # as if it were not installed
import gyroscope.integrations
theirs = {"transformers", "accelerate", "keras", "lightning", "jax", "optax"}
assert not theirs & {name for name, module in sys.modules.items() if module}
try:
    __import__(f"gyroscope.integrations.{sys.argv[1]}")
except ImportError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("framework", "adapter"),
    [
        ("transformers", "GyroscopeCallback"),
        ("accelerate", "GyroscopeTracker"),
        ("keras", "LayerRotation"),
        ("optax", "layca"),
    ],
)
def test_a_missing_framework_names_its_extra(framework: str, adapter: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, framework], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"MissingExtraError {adapter} cannot import {framework}")
    assert done.stdout.endswith(f"pip install 'gyroscope[{framework}]'\n")
