"""When the disk fails, the run says so once and training goes on."""

import logging
import os
import resource
import shutil
import stat
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from runs_for_tests import LAYERS, rows, write, writer

from gyroscope.errors import StoreError
from gyroscope.store import Event, LayerInfo, Scalars, database, load

pytestmark = pytest.mark.usefixtures("journal")  # whichever it is


@contextmanager
def files_up_to(size):
    """A disk that is full when a file is `size` bytes long; Python ignores the signal that goes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill(w):
    """Write until it fails; the last step that was acknowledged."""
    acknowledged = -1
    for step in range(0, 100_000, 8):
        w.put(rows(*range(step, step + 8)))
        try:
            w.flush()
        except StoreError:
            return acknowledged
        acknowledged = step + 7
    raise AssertionError("the disk did not fill")


def failed(w, caplog):
    """Check what every failure must look like, and return the message."""
    assert isinstance(w.error, StoreError)
    assert not w.put(rows(0))
    assert not w.put(Scalars(0, {"loss": 1.0}))
    assert not w.put(Event(0, "note", "hello"))
    with pytest.raises(StoreError):
        w.flush()
    w.close()
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert (record.name, record.getMessage()) == ("gyroscope", f"Recording has stopped, training continues: {w.error}")
    return str(w.error)


def resumes(path, acknowledged):
    """The run opens, has what was acknowledged, and can be resumed."""
    with load(path) as run:
        assert run.state == "interrupted"
        assert set(range(acknowledged + 1)) <= set(run.steps.tolist())
        run.check()
    write(path, rows(acknowledged + 1), step=acknowledged)
    with load(path) as run:
        np.testing.assert_array_equal(run.steps, range(acknowledged + 2))
        np.testing.assert_array_equal(run.series("rotation")[:, 0], range(acknowledged + 2))


def test_a_disk_that_takes_no_more(tmp_path, caplog, journal):
    w = writer(tmp_path / "run")
    # A log grows with every commit, the file itself with every page.
    with files_up_to(300_000 if journal == "wal" else (w.path / "run.sqlite").stat().st_size + 2 * 4096):
        acknowledged = fill(w)
        said = failed(w, caplog)
    assert acknowledged > 10
    assert "run.sqlite cannot be written or read: disk I/O error. Check the disk (full? removed?)" in said
    resumes(w.path, acknowledged)


def test_a_full_disk(tmp_path, caplog, monkeypatch):
    def small(file, mode, connect=database.connect):
        connection = connect(file, mode)
        connection.execute("PRAGMA max_page_count = 18")
        return connection

    monkeypatch.setattr(database, "connect", small)
    w = writer(tmp_path / "run")
    acknowledged = fill(w)
    assert acknowledged > 10
    assert "cannot be written: the disk is full. Free some space and resume the run" in failed(w, caplog)
    monkeypatch.undo()
    resumes(w.path, acknowledged)


def test_a_disk_that_is_full_at_the_beginning(tmp_path):
    with files_up_to(10_000), pytest.raises(StoreError, match=r"run\.sqlite cannot be written"):
        writer(tmp_path / "run")
    write(tmp_path / "run", rows(0))
    np.testing.assert_array_equal(load(tmp_path / "run").steps, [0])


def test_those_who_wait_hear_of_a_failure(tmp_path, monkeypatch):
    reached, go = threading.Event(), threading.Event()

    def commit(self, batch):
        reached.set()
        assert go.wait(30)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(database.Database, "commit", commit)
    told = []

    def wait():
        with pytest.raises(StoreError, match="Input/output error") as caught:
            w.flush(timeout=60)
        told.append(caught.value)

    with writer(tmp_path / "run") as w:
        w.put(rows(0))
        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert reached.wait(30)
        go.set()
        for thread in threads:
            thread.join()
    assert len(told) == 4


def test_after_a_failure_on_tick_is_still_called(tmp_path, monkeypatch):
    def commit(self, batch):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(database.Database, "commit", commit)
    ticked = threading.Semaphore(0)
    with writer(tmp_path / "run", on_tick=ticked.release, tick=0.01) as w:
        w.put(rows(0))
        with pytest.raises(StoreError):
            w.flush()
        for _ in range(5):
            assert ticked.acquire(timeout=30)


@pytest.fixture
def as_nobody():
    """Permissions hold for everybody but the superuser, as whom tests may run."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def read_only(tmp_path):
    """Makes a folder read-only, and those above it open for all to enter."""
    changed = []

    def change(folder):
        for file in folder.iterdir():
            file.chmod(0o444)
        folder.chmod(0o555)
        for above in list(folder.parents)[:-2]:
            changed.append((above, above.stat().st_mode))
            above.chmod(stat.S_IMODE(above.stat().st_mode) | 0o555)
        return folder

    yield change
    for folder, mode in changed:
        folder.chmod(mode)


@pytest.fixture
def finished(tmp_path, read_only):
    return read_only(write(tmp_path / "run", rows(0, 1, 2), meta={"lr": 0.1}))


@pytest.fixture
def killed(tmp_path, read_only):
    with writer(tmp_path / "writing") as w:
        w.put(rows(0, 1, 2))
        w.flush()
        shutil.copytree(w.path, tmp_path / "run", ignore=shutil.ignore_patterns("*-shm"))
    return read_only(tmp_path / "run")


def test_a_run_in_a_read_only_folder_is_read(finished, as_nobody):
    with load(finished) as run:
        np.testing.assert_array_equal(run.series("rotation")[:, 0], [0, 1, 2])
        assert run.state == "ended"


def test_a_killed_run_in_a_read_only_folder_is_read_with_its_last_steps(killed, as_nobody):
    with load(killed) as run:
        np.testing.assert_array_equal(run.series("rotation")[:, 0], [0, 1, 2])
        assert run.state == "interrupted"


def test_a_read_only_folder_cannot_be_written_to(finished, as_nobody):
    with pytest.raises(StoreError, match=r"run.sqlite cannot be written or read: .*Check the permissions"):
        writer(finished)
    with pytest.raises(StoreError, match=r"run.sqlite cannot be written or read: .*Check the permissions"):
        writer(finished / "inner", layers=LAYERS)


@pytest.fixture
def closed_to_others(finished):
    (finished / "run.sqlite").chmod(0o000)
    return finished


def test_a_file_that_may_not_be_read_is_refused_in_words(closed_to_others, as_nobody):
    with pytest.raises(StoreError, match=r"run.sqlite cannot be written or read: unable to open database file"):
        load(closed_to_others)


@pytest.mark.parametrize("remade", [False, True])
def test_a_writer_whose_file_is_no_longer_its_own_acknowledges_nothing(tmp_path, caplog, journal, remade):
    w = writer(tmp_path / "run")
    w.put(rows(1))
    w.flush()
    shutil.rmtree(tmp_path / "run")
    if remade:
        write(tmp_path / "run", rows(7))
    w.put(rows(2))
    said = "run.sqlite was replaced by another file" if remade else "run.sqlite was removed"
    for _ in range(2):
        with pytest.raises(StoreError, match=said):
            w.flush()
    assert len(caplog.records) == (journal == "rollback")  # SQLite has noticed it too
    w.close()
    assert said in str(w.error)
    (record,) = caplog.records
    assert said in record.getMessage()
    if remade:
        with load(tmp_path / "run") as run:
            assert run.steps.tolist() == [7]


def test_a_run_that_is_replaced_by_a_copy_of_it_is_not_acknowledged(tmp_path):
    w = writer(tmp_path / "run")
    w.put(rows(1))
    w.flush()
    shutil.copyfile(tmp_path / "run" / "run.sqlite", tmp_path / "copy")
    os.replace(tmp_path / "copy", tmp_path / "run" / "run.sqlite")  # as a tool that synchronizes folders does
    w.put(rows(2))
    with pytest.raises(StoreError, match="was replaced by another file"):
        w.flush()
    w.close()


def test_a_thread_that_dies_tells_those_who_flush(tmp_path, caplog):
    def leave():
        raise SystemExit("made up")

    w = writer(tmp_path / "run", on_tick=leave, tick=0.01)
    w._thread.join(timeout=30)
    with pytest.raises(StoreError, match="SystemExit: made up"):
        w.flush(timeout=30)
    assert "SystemExit: made up" in failed(w, caplog)
    resumes(tmp_path / "run", -1)


@pytest.mark.parametrize("tick", [float("inf"), float("nan"), 1e10, 0, "soon"])
def test_a_tick_that_no_thread_can_wait_for_is_refused(tmp_path, tick):
    with pytest.raises(StoreError, match="`tick` must be a finite number of seconds > 0, got"):
        writer(tmp_path / "run", tick=tick)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "layer",
    [
        LayerInfo(None, "linear", (2, 2)),
        LayerInfo("a", None, (2, 2)),
        LayerInfo("a", "linear", None),
        LayerInfo("a", "linear", (2.5, 2)),
        LayerInfo("a", "linear", (2, 2), None),
    ],
)
def test_a_malformed_layer_is_refused_and_the_folder_stays_usable(tmp_path, layer):
    with pytest.raises(StoreError, match="A layer must have a name and a kind that are text"):
        writer(tmp_path / "run", [layer])
    assert not (tmp_path / "run").exists()
