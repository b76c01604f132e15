"""The public names of the room: each is what its file defines, whoever imported that file first."""

import ast
import inspect
import sys
from importlib import import_module
from types import ModuleType

import pytest

import gyroscope
from gyroscope import diagnosis, theory


def listed_for_type_checkers():
    """name: file, from the imports that only a type checker runs."""
    (block,) = [
        node
        for node in ast.parse(inspect.getsource(theory)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {name.name: node.module for node in block.body for name in node.names}


def test_a_type_checker_sees_the_names_that_are_loaded_and_no_others():
    seen = listed_for_type_checkers()
    assert sorted({*seen, "DynamicsError"}) == sorted(theory.__all__)
    for name, file in seen.items():
        there = import_module(f"{file}.{name}" if file == "gyroscope.theory" else file)
        assert getattr(theory, name) is (there if file == "gyroscope.theory" else vars(there)[name])


@pytest.mark.parametrize("name", ["equilibrium", "invariance", "reparameterize"])
def test_a_function_is_not_hidden_by_the_import_of_its_file(name, monkeypatch):
    monkeypatch.delitem(sys.modules, f"gyroscope.theory.{name}", raising=False)
    vars(theory).pop(name, None)
    try:
        assert isinstance(import_module(f"gyroscope.theory.{name}"), ModuleType)
        assert inspect.isfunction(getattr(theory, name))
    finally:
        vars(theory).pop(name, None)  # that of the file as it was before this test comes back


def test_every_public_name_is_offered_for_completion():
    assert set(theory.__all__) <= set(dir(theory))


def test_a_name_that_is_not_there_is_refused_as_of_any_module():
    with pytest.raises(AttributeError, match="no attribute 'kfak'"):
        theory.kfak  # noqa: B018


def test_the_theory_is_at_hand_from_the_library_itself():
    assert gyroscope.theory is theory
    assert gyroscope.invariance is theory.invariance
    assert gyroscope.explain is diagnosis.explain
    assert gyroscope.errors.DynamicsError is theory.DynamicsError
    assert issubclass(theory.DynamicsError, gyroscope.GyroscopeError)
