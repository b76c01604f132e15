"""`tools/matrix` with interpreters that are made up: scripts that say a version, and what their tests found."""

import json
import os
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

PYTHON = """#!/bin/sh
echo "$@" >> {log}
case "$1 $2" in
"-c import sys"*) echo {version} ;;
"-c "*) echo '{{"torch": "{torch}", "triton": "3.2.0", "numpy": "2.4.6", "sympy": "1.13.1"}}' ;;
"-m venv") mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
"-m pip") exit {pip} ;;
"-m pytest") for one; do case "$one" in --junitxml=*) cp {report} "${{one#--junitxml=}}" ;; esac; done ;;
esac
"""
PASSED = '<testcase classname="tests.test_a" name="test_one"/>'
SKIPPED = '<testcase classname="tests.test_a" name="test_two"><skipped message="needs torch 2.9"/></testcase>'
FAILED = '<testcase classname="tests.test_b" name="test_three"><failure message="1 is not 2">...</failure></testcase>'
PAGE = "# Versions\n\n<!-- matrix -->\nold\n<!-- end matrix -->\n\nWhat does not work.\n"


@pytest.fixture(scope="module")
def matrix():
    path = Path(__file__).parents[1] / "tools" / "matrix"
    module = module_from_spec(spec_from_loader("matrix", SourceFileLoader("matrix", str(path))))
    module.__loader__.exec_module(module)
    return module


@pytest.fixture
def python(tmp_path):
    def made(version, *, torch="2.6.0", cases=(PASSED,), pip=0):
        report = tmp_path / f"{version}.xml"
        report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
        program = tmp_path / f"made{version}"
        log = tmp_path / "log"
        program.write_text(PYTHON.format(version=version, torch=torch, log=log, report=report, pip=pip))
        program.chmod(0o755)
        return str(program)

    return made


@pytest.fixture
def run(matrix, tmp_path):
    page, results = tmp_path / "versions.md", tmp_path / "versions.json"
    page.write_text(PAGE)

    def called(*arguments):
        places = ["--folder", tmp_path / "envs", "--page", page, "--results", results]
        with pytest.raises(SystemExit) as ended:
            matrix.main([*arguments, *map(str, places)])
        found = json.loads(results.read_text()) if results.exists() else []
        return ended.value.code, found, page.read_text()

    return called


def test_every_torch_runs_on_the_oldest_python_and_the_last_on_all(matrix):
    pythons = [("3.11", "a"), ("3.13", "b")]
    chosen = [(torch, version) for torch, (version, _) in matrix.pairs(["2.6.0", "newest"], pythons, full=False)]
    assert chosen == [("2.6.0", "3.11"), ("newest", "3.11"), ("newest", "3.13")]
    assert len(matrix.pairs(["2.6.0", "newest"], pythons, full=True)) == 4


def test_interpreters_are_sorted_and_old_or_broken_ones_are_left_out(matrix, python, tmp_path):
    shim = tmp_path / "shim"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    named = [python("3.13"), python("3.9"), str(shim), python("3.11")]
    assert matrix.interpreters(named) == [("3.11", named[3]), ("3.13", named[0])]


def test_interpreters_are_found_on_the_path_and_in_pyenv(matrix, python, tmp_path, monkeypatch):
    place = tmp_path / "pyenv" / "versions" / "3.13.0" / "bin"
    place.mkdir(parents=True)
    os.link(python("3.13"), place / "python")
    os.link(python("3.12"), tmp_path / "python3.12")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    found = dict(matrix.interpreters(None))
    assert found["3.12"] == str(tmp_path / "python3.12")
    assert found["3.13"] == str(place / "python")


def test_without_an_interpreter_it_says_so(matrix, python):
    with pytest.raises(SystemExit, match=r"no Python 3\.11 or later"):
        matrix.interpreters([python("3.9")])


def test_the_table_and_the_raw_results_are_what_the_tests_reported(run, python, tmp_path):
    program = python("3.11", cases=[PASSED, PASSED, SKIPPED, FAILED])
    status, (result,), page = run("--torch", "2.6.0", "--python", program)
    assert status == 1  # a test failed
    assert (result["passed"], result["failed"], result["skipped"]) == (2, 1, 1)
    assert result["failures"] == [{"test": "tests/test_b::test_three", "message": "1 is not 2"}]
    assert result["reasons for skipping"] == {"needs torch 2.9": 1}
    assert (result["torch"], result["python"], result["triton"]) == ("2.6.0", "3.11", "3.2.0")
    assert f"| 2.6.0 | 3.11 | 2 | 1 | 1 | {result['date']} |" in page
    assert "old" not in page
    assert page.endswith("What does not work.\n")
    assert not (tmp_path / "envs" / "python3.11-torch2.6.0").exists()


def test_what_torch_brought_is_not_replaced_by_the_pinned_versions(run, python, tmp_path):
    run("--torch", "2.6.0", "--keep", "--python", python("3.11"))
    pinned = (tmp_path / "envs" / "python3.11-torch2.6.0" / "constraints.txt").read_text().splitlines()
    assert "torch==2.6.0" in pinned
    assert not [line for line in pinned if line.startswith(("sympy", "triton", "numpy"))]
    assert [line for line in pinned if line.startswith("pytest==")]
    asked = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("-m pip install")]
    assert asked[0].endswith(" torch==2.6.0 numpy<2.4")


def test_a_torch_that_is_not_older_than_the_pinned_one_takes_the_pinned_numpy(run, python, tmp_path):
    run("--torch", "newest", "--python", python("3.13", torch="2.15.0"))
    asked = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("-m pip install")]
    assert asked[0].endswith(" torch")


def test_a_pair_that_is_run_again_replaces_its_result(run, python):
    run("--torch", "2.6.0", "--python", python("3.11", cases=[FAILED]))
    run("--torch", "newest", "--python", python("3.13", torch="2.15.0"))
    status, found, page = run("--torch", "2.6.0", "--python", python("3.11"))
    assert status == 0
    assert [(one["torch"], one["failed"]) for one in found] == [("2.6.0", 0), ("2.15.0", 0)]
    assert "| 2.15.0 (newest) | 3.13 | 1 | 0 | 0 |" in page


def test_a_torch_that_cannot_be_installed_is_a_failure_that_the_table_shows(run, python):
    status, (result,), page = run("--torch", "2.6.0", "--python", python("3.14", pip=1))
    assert status == 1
    assert "returned non-zero exit status 1" in result["error"]
    assert "| 2.6.0 | 3.14 | not run | – | – |" in page


def test_the_table_alone_runs_nothing(run, python, tmp_path):
    run("--torch", "2.6.0", "--python", python("3.11"))
    (tmp_path / "versions.md").write_text(PAGE)
    (tmp_path / "log").unlink()
    status, _, page = run("--table")
    assert status == 0
    assert "| 2.6.0 | 3.11 | 1 | 0 | 0 |" in page
    assert not (tmp_path / "log").exists()
