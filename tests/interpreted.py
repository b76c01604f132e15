"""Kernels on the CPU: a file of cases under Triton's interpreter, in a process of its own.

Triton decides how to run kernels when it is imported, so the interpreter cannot be switched on in this process. The
server that `forked` starts has it on.
"""

import os
import sys
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest

import forked

needs_triton = pytest.mark.skipif(
    sys.platform != "linux" or find_spec("triton") is None, reason="Triton runs on Linux alone"
)


def hasten_interpreter() -> None:
    """Spare the interpreter most of its time; for files of cases, which also run on a GPU, to call.

    Its results stay the same: what is constant is kept, and what has no effect is left out.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    _patch_language_once()
    _keep_types()
    _leave_out_what_has_no_effect()


def _patch_language_once() -> None:
    """Exchange the functions of triton.language once for each module that a function sees.

    The interpreter exchanges them whenever a kernel calls a function, and puts them back after a launch.
    """
    from triton.runtime import interpreter

    real, language = interpreter._patch_lang, interpreter.tl
    patched: set[ModuleType] = set()

    @cache
    def visible(function: FunctionType) -> frozenset[ModuleType]:
        modules = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
        return frozenset(module for module in (language, language.core) if module in modules)

    def patch(function: FunctionType) -> object:
        if not visible(function) <= patched:
            real(function)
            patched.update(visible(function))
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch


def _keep_types() -> None:
    """Keep types of blocks, and what every block of a type has in common, instead of making them for each operation."""
    from triton.language import core
    from triton.runtime import interpreter

    real, make = interpreter._get_np_dtype, core.tensor.__init__
    block = core.block_type
    found: dict[str, object] = {}
    types: dict[tuple[str, ...], object] = {}
    common: dict[str, tuple[object, object]] = {}

    def get_np_dtype(dtype: Any) -> object:
        if dtype.name not in found:
            found[dtype.name] = real(dtype)
        return found[dtype.name]

    def with_element_ty(self: Any, scalar: Any) -> object:
        key = self.name, scalar.name
        if key not in types:
            types[key] = block(scalar, self.shape)
        return types[key]

    def initialize(self: Any, handle: object, type: Any) -> None:
        if type.name in common:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = common[type.name]
        else:
            make(self, handle, type)
            common[type.name] = self.numel, self.shape

    interpreter._get_np_dtype = get_np_dtype
    block.with_element_ty = with_element_ty
    block.to_ir = lambda self, builder: self  # there is no IR: the interpreter makes an equal type
    core.tensor.__init__ = initialize


def _leave_out_what_has_no_effect() -> None:
    """Leave blocks of one shape as they are, and do not compute integers again for checks that nothing reads."""
    from triton.language import semantic
    from triton.runtime import interpreter

    builder, owner = interpreter.interpreter_builder, getattr(semantic, "TritonSemantic", None)
    if owner is None:  # an older Triton: functions of the module, with other arguments
        return
    if not builder.options.debug:  # without which it asserts nothing
        builder.options = replace(builder.options, sanitize_overflow=False)
    real = owner.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        one, other = lhs.type, rhs.type
        same = one.is_block() and other.is_block() and list(one.shape) == list(other.shape)
        return (lhs, rhs) if same else real(self, lhs, rhs)

    owner.broadcast_impl_value = broadcast


def assert_cases_hold(cases: Path, *, more_than: int, backend: str = "triton") -> None:
    with TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        forked.start(_run_cases, str(cases), str(said), backend)
        assert said.read_text().count("PASSED ") > more_than, "few cases ran, or none:\n" + said.read_text()


def _run_cases(_: int, cases: str, said: str, backend: str) -> None:
    with open(said, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ["GYROSCOPE_BACKEND"] = backend
    failed = pytest.main([cases, "--tb=short", "-rA"])
    assert not failed, Path(said).read_text()
