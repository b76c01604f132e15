"""An adapter whose framework is not installed says which extra to install, and the other integrations work."""

import pytest

import forked

PROGRAM = """
import sys
for name in ({framework!r}, "pytorch_lightning"):
    sys.modules[name] = None  # as if it were not installed
import gyroscope.integrations
theirs = {{"transformers", "accelerate", "keras", "lightning", "jax", "optax", "optuna", "ray"}}
assert not theirs & {{name for name, module in sys.modules.items() if module}}
try:
    from gyroscope.integrations.{framework} import {adapter}
except ImportError as error:
    assert type(error).__name__ == "MissingExtraError"
    assert str(error).startswith("{adapter} cannot import {framework}")
    assert str(error).endswith("pip install 'gyroscope[{framework}]'")
else:
    raise AssertionError("{framework} was imported")
"""


@pytest.mark.parametrize(
    ("framework", "adapter"),
    [
        ("transformers", "GyroscopeCallback"),
        ("accelerate", "GyroscopeTracker"),
        ("keras", "LayerRotation"),
        ("lightning", "GyroscopeCallback"),
        ("optax", "layca"),
        ("optuna", "GyroscopePruner"),
        ("ray", "FindingStopper"),
    ],
)
def test_a_missing_framework_names_its_extra(framework: str, adapter: str) -> None:
    forked.execute(PROGRAM.format(framework=framework, adapter=adapter))
