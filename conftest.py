"""Which tests run where: without GYROSCOPE_TEST_DEVICE=cuda, all but those that need a GPU, on the CPU alone.

With it (`make gpu`), those marked `gpu` and those marked `any_device`, the kernels' cases among them, on the GPU.
"""

import gc
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ON_GPU = os.environ.get("GYROSCOPE_TEST_DEVICE", "cpu") != "cpu"
if not ON_GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks, so that tests are the same on all machines

import torch  # noqa: E402

# Tests write thousands of small runs, and a run waits until the disk has it. In memory there is nothing to wait for.
MEMORY = "/dev/shm"
if os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > 2**32:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
gc.disable()  # what is imported and collected stays to the end
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("tests", "lab/tests")]
torch.set_num_threads(1)
os.environ.setdefault("KERAS_BACKEND", "torch" if find_spec("jax") is None else "jax")  # not TensorFlow

# Adapters derive from classes of their frameworks. `make test-integrations` installs those.
_ADAPTERS = ("accelerate", "keras", "lightning", "optax", "optuna", "ray", "transformers")
collect_ignore = [f"src/gyroscope/integrations/{name}.py" for name in _ADAPTERS if find_spec(name) is None]


def pytest_configure(config: pytest.Config) -> None:
    """On a GPU the kernels' cases run as they are, elsewhere in Triton's interpreter."""
    if ON_GPU:
        config.addinivalue_line("python_files", "*_cases.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not for this device."""

    def is_for_this(item: pytest.Item) -> bool:
        needs_gpu = item.get_closest_marker("gpu") is not None
        return needs_gpu or item.get_closest_marker("any_device") is not None if ON_GPU else not needs_gpu

    left_out = [item for item in items if not is_for_this(item)]
    items[:] = [item for item in items if is_for_this(item)]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave modules and collected tests, which stay to the end, out of every later collection of garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # figures are garbage in cycles: one collection for many of them costs half as much
    gc.enable()
