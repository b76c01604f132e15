"""File systems without file locks, such as Lustre without `-o flock`: runs are read there, and not written."""

import errno
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from runs_for_tests import rows, write, writer
from typer.testing import CliRunner

import gyroscope
from gyroscope.cli import app
from gyroscope.errors import StoreError
from gyroscope.store import load, lock

pytestmark = pytest.mark.usefixtures("journal")  # whichever it is

fcntl = pytest.importorskip("fcntl")


@pytest.fixture(params=[errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK], ids=errno.errorcode.get)
def without_locks(request, monkeypatch):
    """Call it to be on such a file system from then on."""

    def flock(file, operation):
        raise OSError(request.param, os.strerror(request.param))

    return lambda: monkeypatch.setattr(fcntl, "flock", flock)


def test_a_run_is_read_where_there_are_no_locks(tmp_path, without_locks):
    path = write(tmp_path / "run", rows(0), rows(1))
    without_locks()
    with load(path) as run:
        assert run.state == "ended"
        np.testing.assert_array_equal(run.series("rotation")[:, 0], [0, 1])
    for command in ("show", "compare", "explain", "runs"):
        result = CliRunner().invoke(app, [command, str(path)])
        assert result.exit_code == 0, result.output


def test_an_unfinished_run_is_called_interrupted_where_there_are_no_locks(tmp_path, without_locks):
    w = writer(tmp_path / "run")
    w.put(rows(0))
    w.close(interrupted=True)
    without_locks()
    with load(w.path) as run:
        assert run.state == "interrupted"


def test_writing_is_refused_where_there_are_no_locks_and_nothing_is_left(tmp_path, without_locks):
    without_locks()
    with pytest.raises(StoreError, match=r"on a file system without file locks .* Write to a local disk"):
        writer(tmp_path / "a/b")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(StoreError, match="without file locks"):
        gyroscope.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_resuming_is_refused_where_there_are_no_locks_and_nothing_is_changed(tmp_path, without_locks):
    path = write(tmp_path / "run", rows(0))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    without_locks()
    with pytest.raises(StoreError, match="without file locks"):
        writer(path, step=1)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_lock_that_is_held_is_another_error_than_a_missing_lock(tmp_path):
    held = lock.Lock(tmp_path)
    with pytest.raises(lock.HeldError):
        lock.Lock(tmp_path)
    held.release()


# SQLite locks by fcntl, in C.
_NO_LOCKS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
int flock(int file, int operation) { errno = ENOSYS; return -1; }
static int without(const char *name, int file, int command, void *given) {
  if (command == F_SETLK || command == F_SETLKW || command == F_GETLK) { errno = ENOSYS; return -1; }
  return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, name))(file, command, given);
}
#define TAKEN va_list all; va_start(all, command); void *given = va_arg(all, void *); va_end(all)
int fcntl(int file, int command, ...) { TAKEN; return without("fcntl", file, command, given); }
int fcntl64(int file, int command, ...) { TAKEN; return without("fcntl64", file, command, given); }
"""
_READ = "import gyroscope, sys; run = gyroscope.load(sys.argv[1]); print(run.state, run.steps.tolist())"


@pytest.mark.skipif(not sys.platform.startswith("linux") or shutil.which("gcc") is None, reason="needs Linux and gcc")
def test_a_killed_run_is_read_where_sqlite_has_no_locks_either(tmp_path):
    w = writer(tmp_path / "run")
    w.put(rows(0, 1))
    w.flush()
    shutil.copytree(w.path, tmp_path / "killed")  # with its write-ahead file
    w.close()
    (tmp_path / "no.c").write_text(_NO_LOCKS)
    library = str(tmp_path / "no.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, str(tmp_path / "no.c"), "-ldl"], check=True)
    command = [sys.executable, "-c", _READ, str(tmp_path / "killed")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LD_PRELOAD": library})
    assert done.stdout.split(maxsplit=1) == ["interrupted", "[0, 1]\n"], done.stderr
