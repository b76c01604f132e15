"""Runs and processes: killed, forked, forgotten, two at once, and one that reads while another writes."""

import copy
import gc
import json
import os
import pickle
import sqlite3
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from runs_for_tests import rows, write, writer

from gyroscope.errors import StoreError
from gyroscope.store import load

pytestmark = pytest.mark.usefixtures("journal")  # whichever it is
HERE = Path(__file__).parent
TORTURE = HERE.parents[1] / "benchmarks" / "torture.py"


def python(program, *arguments, **options):
    """Run a program that may import what the tests here do."""
    program = f"import sys; sys.path.insert(0, {str(HERE)!r})\nfrom runs_for_tests import *\n{program}"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, **options)


def test_what_was_acknowledged_survives_twenty_kills_and_the_runs_resume():
    done = subprocess.run([sys.executable, TORTURE, "--kills", "20"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["kills"] == 20
    assert counts["resumed"] > 10
    assert counts["steps_acknowledged"] > 20


def test_a_run_is_read_by_another_process_while_it_is_written(tmp_path):
    program = """
writing = writer(sys.argv[1], tick=0.01)
for line in sys.stdin:
    steps = range(*map(int, line.split()))
    writing.put(rows(*steps))
    writing.flush()
    print("written", flush=True)
writing.close()
"""
    with python(program, tmp_path / "run") as process:
        run = None
        for i in range(30):
            process.stdin.write(f"{40 * i} {40 * (i + 1)}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "written\n"
            if run is None:
                run = load(tmp_path / "run")
            assert run.state == "running"
            assert len(run.steps) == max(40 * i, 40)
            run.refresh()
            np.testing.assert_array_equal(run.series("rotation")[:, 0], range(40 * (i + 1)))
    assert process.returncode == 0
    assert run.state == "ended"
    run.refresh()
    np.testing.assert_array_equal(run.series("rotation")[:, 0], range(1200))


def test_a_run_that_is_held_open_follows_a_writer_that_resumes_it(tmp_path):
    path = write(tmp_path / "run", rows(0, 1))
    run = load(path)
    assert len(run.steps) == 2
    for start in (1, 2, 3):
        with writer(path, step=start) as w:
            w.put(rows(start + 1))
            w.flush()
            run.refresh()
            np.testing.assert_array_equal(run.series("rotation")[:, 0], range(start + 2))
        run.refresh()
        np.testing.assert_array_equal(run.series("rotation")[:, 0], range(start + 2))


def test_what_is_read_fits_together_until_it_is_refreshed(tmp_path):
    with writer(tmp_path / "run") as w:
        w.put(rows(0, 1))
        w.flush()
        run = load(w.path)
        assert len(run.steps) == 2
        w.put(rows(2, 3))
        w.flush()
        assert run.series("rotation").shape == (2, 3)
        assert run.where("rotation").tolist() == [0, 1]
        run.refresh()
        assert run.series("rotation").shape == (4, 3)


def test_somebody_who_reads_for_long_neither_stops_a_log_nor_costs_it_anything(tmp_path, monkeypatch):
    monkeypatch.setenv("GYROSCOPE_JOURNAL", "wal")
    with writer(tmp_path / "run") as w:
        w.put(rows(0))
        w.flush()
        reader = sqlite3.connect(w.path / "run.sqlite", isolation_level=None)
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM series").fetchone() == (1,)
        w.put(rows(1))
    assert w.error is None
    assert reader.execute("SELECT count(*) FROM series").fetchone() == (1,)
    run = load(w.path)
    assert run.state == "ended"
    np.testing.assert_array_equal(run.steps, [0, 1])
    reader.close()
    np.testing.assert_array_equal(load(write(w.path, rows(2), step=1)).steps, [0, 1, 2])


@pytest.mark.parametrize(
    ("ending", "state"),
    [("", "ended"), ("raise ValueError", "interrupted"), ("raise KeyboardInterrupt", "interrupted")],
)
def test_a_run_that_nobody_closed_says_how_its_program_ended(tmp_path, ending, state):
    program = f"w = writer(sys.argv[1]); w.put(rows(0)); {ending}"
    with python(program, tmp_path / "run", stderr=subprocess.PIPE) as process:
        process.communicate()
    run = load(tmp_path / "run")
    assert run.state == state
    assert run.steps.tolist() == [0]
    assert [path.name for path in run.path.glob("run.sqlite*")] == ["run.sqlite"]  # all of it in one file


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_block_that_is_left_by_an_exception_interrupts_the_run(tmp_path, error):
    with suppress(ValueError, KeyboardInterrupt), writer(tmp_path / "run") as w:
        w.put(rows(0))
        if error is not None:
            raise error
    assert load(w.path).state == ("ended" if error is None else "interrupted")
    w.close()  # once more, which changes nothing
    assert load(w.path).state == ("ended" if error is None else "interrupted")
    write(w.path, rows(1))
    assert load(w.path).state == "ended"


def test_two_writers_in_one_process_are_refused(tmp_path):
    with writer(tmp_path / "run") as first:
        with pytest.raises(StoreError, match=rf"is being written by another writer \(process {os.getpid()}\)"):
            writer(tmp_path / "run")
        assert first.put(rows(0))
    with writer(tmp_path / "run", step=0) as second:
        assert second.attempt == 2


def test_two_writers_in_two_processes_are_refused_and_a_killed_one_is_no_obstacle(tmp_path):
    program = "w = writer(sys.argv[1]); w.put(rows(0)); w.flush(); print(flush=True); sys.stdin.read()"
    with python(program, tmp_path / "run") as process:
        process.stdout.readline()
        with pytest.raises(StoreError, match=rf"another writer \(process {process.pid}\)"):
            writer(tmp_path / "run")
        assert load(tmp_path / "run").state == "running"
        process.kill()
    assert load(tmp_path / "run").state == "interrupted"
    write(tmp_path / "run", rows(1))
    run = load(tmp_path / "run")
    assert run.state == "ended"
    np.testing.assert_array_equal(run.steps, [0, 1])


def test_what_was_put_is_not_lost_when_nobody_closes(tmp_path):
    program = "w = writer(sys.argv[1], tick=600)\nfor step in range(100): w.put(rows(step))"
    with python(program, tmp_path / "run") as process:
        pass
    assert process.returncode == 0
    run = load(tmp_path / "run")
    np.testing.assert_array_equal(run.steps, range(100))
    assert run.state == "ended"


def test_what_was_put_is_not_lost_when_training_ends_with_an_exception(tmp_path):
    program = "w = writer(sys.argv[1], tick=600); w.put(rows(0)); raise RuntimeError('out of memory')"
    with python(program, tmp_path / "run", stderr=subprocess.DEVNULL) as process:
        pass
    assert process.returncode == 1
    np.testing.assert_array_equal(load(tmp_path / "run").steps, [0])


def test_a_forked_child_neither_writes_nor_disturbs_its_parent(tmp_path):
    program = """
import gc, os
from gyroscope.errors import StoreError
from gyroscope.store import Event
w = writer(sys.argv[1], tick=0.01)
w.put(rows(0)); w.flush()
for way in ("os._exit", "sys.exit"):
    child = os.fork()
    if child == 0:
        assert not w.put(rows(99)) and not w.put(Event(99, "note", "from a child"))
        try:
            w.flush()
        except StoreError as error:
            assert "not by its forked children" in str(error)
        else:
            os._exit(9)
        w.close()
        del w
        gc.collect()
        if way == "os._exit":
            os._exit(0)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert w.put(rows(1)) and w.error is None
    w.flush()
w.close()
assert w.error is None
"""
    with python(program, tmp_path / "run") as process:
        pass
    assert process.returncode == 0
    with load(tmp_path / "run") as run:
        np.testing.assert_array_equal(run.steps, [0, 1])
        assert run.events == []
        run.check()


def test_a_forked_child_that_outlives_its_killed_parent_does_not_keep_the_run(tmp_path):
    program = """
import os, time
w = writer(sys.argv[1]); w.put(rows(0)); w.flush()
child = os.fork()
if child == 0:
    time.sleep(60)
print(child, flush=True)
sys.stdin.read()
"""
    with python(program, tmp_path / "run") as process:
        child = int(process.stdout.readline())
        process.kill()
        process.wait()
        try:
            write(tmp_path / "run", rows(1))
        finally:
            os.kill(child, 9)
    np.testing.assert_array_equal(load(tmp_path / "run").steps, [0, 1])


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_writer_is_not_copied(tmp_path, act):
    with writer(tmp_path / "run") as w, pytest.raises(StoreError, match="cannot be copied or pickled"):
        act(w)


def test_a_run_can_be_sent_to_another_process(tmp_path):
    run = load(write(tmp_path / "run", rows(0, 1)))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(run)).series("rotation"), run.series("rotation"))


def test_reading_many_runs_keeps_no_files_open(tmp_path):
    path = write(tmp_path / "run", rows(0))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        load(path).series("rotation")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
