"""Kernels on the CPU: a file of cases under Triton's interpreter, in a process of its own.

Triton decides how to run kernels when it is imported, so the interpreter cannot be switched on in this process.
"""

import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import pytest

needs_triton = pytest.mark.skipif(
    sys.platform != "linux" or find_spec("triton") is None, reason="Triton runs on Linux alone"
)


def patch_language_once() -> None:
    """Spare the interpreter half of its time; for files of cases, which also run on a GPU, to call.

    It exchanges the functions of triton.language whenever a kernel calls a function, although those that it has
    exchanged already stay as they are. Here it does so once in a launch for each module that a function sees.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    real, language = interpreter._patch_lang, interpreter.tl
    patched: set[ModuleType] = set()

    @cache
    def visible(function: FunctionType) -> frozenset[ModuleType]:
        modules = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
        return frozenset(module for module in (language, language.core) if module in modules)

    def patch(function: FunctionType) -> object:
        if patched and visible(function) <= patched:
            return SimpleNamespace(restore=lambda: None)  # a function inside a kernel
        launch = not patched
        scope = real(function)
        patched.update(visible(function))
        if launch:
            restore = scope.restore
            scope.restore = lambda: (restore(), patched.clear())
        return scope

    interpreter._patch_lang = patch


def assert_cases_hold(cases: Path, *, more_than: int) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "GYROSCOPE_BACKEND": "triton"}
    command = [sys.executable, "-m", "pytest", str(cases), "-p", "no:cacheprovider", "--tb=short", "-rA"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=cases.parents[2], timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED ") > more_than, "few cases ran, or none:\n" + done.stdout
