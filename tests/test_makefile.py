"""What `make` does before there is anything to run: on a copy of the Makefile, with programs that say a version."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[1] / "Makefile"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def python(path, version):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "a clone, (odd)"
    made.mkdir()
    shutil.copy(MAKEFILE, made)
    (made / "lab").mkdir()
    for name in ("pyproject.toml", "lab/pyproject.toml", "constraints.txt"):
        (made / name).touch()
    return made


def make(folder, *arguments):
    outer = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")  # of the make that runs the tests
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("version", ["2.7", "3.9", "3.10"])
def test_a_python_that_is_too_old_is_refused_before_anything_is_made(folder, tmp_path, version):
    old = python(tmp_path / "python", version)
    done = make(folder, "demo", f"PYTHON={old}")
    assert done.returncode != 0
    assert f"{old} is {version}; name another: make PYTHON=python3.12 demo" in done.stderr
    assert not (folder / ".venv").exists()


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.20"])
def test_a_python_that_is_new_enough_is_asked_for_an_environment(folder, tmp_path, version):
    done = make(folder, "lint", f"PYTHON={python(tmp_path / 'python', version)}")
    assert "python -m venv" in done.stdout  # and then there is none, as this Python makes nothing
    assert "is needed" not in done.stderr


def test_an_environment_of_another_python_is_not_mixed_with_the_one_that_is_asked_for(folder, tmp_path):
    python(folder / ".venv/bin/python", "3.11")
    done = make(folder, "demo", f"PYTHON={python(tmp_path / 'python', '3.13')}")
    assert done.returncode != 0
    assert ".venv has Python 3.11" in done.stderr
    assert "rm -r .venv" in done.stderr


@pytest.mark.parametrize(
    ("venv", "target"), [(".venv", "demo"), (".venv-integrations", "test-integrations"), (".venv-docs", "docs")]
)
def test_the_environment_of_a_folder_that_was_moved_or_copied_is_made_anew(folder, venv, target):
    ready = folder / venv / ".ready"
    ready.parent.mkdir()
    ready.write_text(f"{folder.resolve()}\n")
    assert "-m venv" not in make(folder, "-n", target).stdout
    moved = folder.rename(folder.parent / "elsewhere")
    assert f"-m venv --clear {venv}" in make(moved, "-n", target).stdout


def test_quick_runs_tests_of_every_subpackage_of_both_packages():
    repository = MAKEFILE.parent
    shown = make(repository, "--dry-run", "quick")
    assert shown.returncode == 0, shown.stderr
    command = next(line for line in shown.stdout.splitlines() if "pytest" in line)
    files = [repository / word for word in command.split() if word.endswith(".py")]
    texts = [file.read_text() for file in files]  # each is there
    for package in (repository / "src/gyroscope", repository / "lab/src/gyroscope_lab"):
        for part in (one.parent.name for one in package.glob("*/__init__.py")):
            name = re.compile(rf"\b{package.name}(\.| import .*\b){part}\b")
            assert any(map(name.search, texts)), f"make quick has no test of {package.name}.{part}"
