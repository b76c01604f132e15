"""Which journal a run is written with, and what holds where machines share its file system: a rollback journal."""

import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from runs_for_tests import rows, write, writer

import gyroscope
from gyroscope.errors import StoreError
from gyroscope.store import LayerInfo, Rows, Scalars, load, lock
from gyroscope.store import journal as journals

TABLE = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:22 / /home rw,relatime - autofs systemd-1 rw
24 23 0:40 / /home/ada rw,relatime shared:7 master:3 - nfs4 server:/export/ada rw,vers=4.2
25 22 0:41 /sub /scratch rw - lustre 10.0.0.1@tcp:/scratch rw,flock
26 22 0:42 / /with\040space rw - cifs //server/share rw
27 22 0:43 / /mnt/over rw - nfs server:/a rw
28 27 8:1 / /mnt/over rw - xfs /dev/sda rw
29 22 0:44 / /remote rw - fuse.sshfs ada@server: rw
30 22 8:2 / /windows rw - fuseblk /dev/sdb rw
this line is none
"""


@pytest.fixture
def on(monkeypatch):
    """Call it with the type of the file system that runs are on from then on."""
    monkeypatch.delenv("GYROSCOPE_JOURNAL", raising=False)
    return lambda kind: monkeypatch.setattr(journals, "file_system", lambda folder: kind)


def kind_in(path):
    """The journal that the header of a run's file names, while nobody has it open."""
    assert not lock.is_held(path)
    read, write = (path / "run.sqlite").read_bytes()[18:20]
    assert read == write
    return {1: "rollback", 2: "wal"}[read]


def names(path):
    return sorted(file.name for file in path.iterdir())


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/", "ext4", False),
        ("/work/runs", "ext4", False),
        ("/home/grace/runs", "autofs", False),
        ("/home/ada", "nfs4", True),
        ("/home/ada/runs/first", "nfs4", True),
        ("/home/adam/runs", "autofs", False),
        ("/scratch/ada", "lustre", True),
        ("/with space/runs", "cifs", True),
        ("/mnt/over/runs", "xfs", False),
        ("/remote/runs", "fuse.sshfs", True),
        ("/windows/runs", "fuseblk", False),
    ],
)
def test_the_deepest_and_latest_mount_decides(tmp_path, path, kind, shared):
    (tmp_path / "mountinfo").write_text(TABLE)
    assert journals.file_system(Path(path), tmp_path / "mountinfo") == kind
    assert journals.is_shared(kind) is shared


def test_links_are_followed(tmp_path):
    (tmp_path / "mountinfo").write_text(f"1 1 0:1 / / rw - ext4 x rw\n2 1 0:2 / {tmp_path}/there rw - nfs x rw\n")
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    assert journals.file_system(tmp_path / "link" / "runs", tmp_path / "mountinfo") == "nfs"


def test_without_a_table_of_mounts_a_disk_counts_as_local(tmp_path):
    assert journals.file_system(tmp_path, tmp_path / "none") is None
    assert not journals.is_shared(None)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the table of Linux")
def test_the_table_of_this_machine_is_understood():
    assert journals.file_system(Path("/proc/self")) == "proc"


@pytest.mark.parametrize(
    ("file_system", "asked", "kind"),
    [
        ("ext4", None, "wal"),
        (None, None, "wal"),
        ("nfs4", None, "rollback"),
        ("lustre", "", "rollback"),
        ("nfs4", "wal", "wal"),
        ("ext4", "rollback", "rollback"),
    ],
)
def test_the_file_system_decides_unless_asked(tmp_path, on, monkeypatch, file_system, asked, kind):
    on(file_system)
    if asked is not None:
        monkeypatch.setenv("GYROSCOPE_JOURNAL", asked)
    path = write(tmp_path / "run", rows(0), meta={"lr": 0.1})
    assert kind_in(path) == kind
    said = {"journal": {"kind": "rollback", "file_system": file_system}} if kind == "rollback" else {}
    assert load(path).meta == {"lr": 0.1} | said
    assert names(path) == ["run.lock", "run.sqlite"]


def test_an_unknown_journal_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("GYROSCOPE_JOURNAL", "truncate")
    with pytest.raises(StoreError, match=r"`GYROSCOPE_JOURNAL` must be 'wal' or 'rollback', got 'truncate'"):
        writer(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_meta_key_that_gyroscope_uses_is_refused(tmp_path):
    with pytest.raises(StoreError, match="`meta` must not have the key 'journal'"):
        writer(tmp_path / "run", meta={"journal": "mine"})
    assert not (tmp_path / "run").exists()


def test_on_a_network_file_system_no_memory_is_shared_at_any_time(tmp_path, on):
    on("nfs4")
    seen = set()
    with writer(tmp_path / "run", tick=0.001) as w:
        for step in range(20):
            w.put(rows(step))
            w.flush()
            seen.update(names(w.path))
            with load(w.path) as run:
                assert len(run.steps) == step + 1
                seen.update(names(w.path))
    assert seen == {"run.lock", "run.sqlite", "run.sqlite-journal"}
    assert names(w.path) == ["run.lock", "run.sqlite"]


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_is_moved_between_file_systems_is_resumed_with_the_journal_of_each(tmp_path, on, killed):
    on("ext4")
    path = tmp_path / "0"
    for step, file_system in enumerate(["ext4", "nfs4", "nfs4", "ext4", "lustre", None]):
        on(file_system)
        with writer(path, step=max(0, step - 1)) as w:
            w.put(rows(step))
            w.flush()
            # What a kill leaves: the files as they are while a writer has them open.
            shutil.copytree(path, tmp_path / f"{step + 1}")
        with load(path) as run:
            np.testing.assert_array_equal(run.series("rotation")[:, 0], range(step + 1))
            run.check()
            said = {"journal": {"kind": "rollback", "file_system": file_system}}
            assert run.meta == (said if file_system in ("nfs4", "lustre") else {})
        assert kind_in(path) == ("rollback" if file_system in ("nfs4", "lustre") else "wal")
        assert names(path) == ["run.lock", "run.sqlite"]
        path = tmp_path / f"{step + 1}" if killed else path
    assert len(load(path).attempts) == 6


def test_a_run_that_watch_resumes_on_a_network_file_system_shares_no_memory(tmp_path, on):
    import torch

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    on("ext4")
    for step, file_system in enumerate(["ext4", "nfs4"]):
        on(file_system)
        monitor = gyroscope.watch(model, optimizer, tmp_path / "run", step=step)
        while_it_waits = names(tmp_path / "run")
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        monitor.flush()
        left = {name for name in (*while_it_waits, *names(tmp_path / "run")) if name.endswith(("-wal", "-shm"))}
        monitor.close()
        assert bool(left) == (file_system == "ext4")
    assert load(tmp_path / "run").steps.tolist() == [0, 1, 2]


def half_committed(path, killed):
    """Copy a run in the middle of a commit to its file, which a kill would leave like this."""
    connection = sqlite3.connect(path / "run.sqlite", isolation_level=None)
    connection.execute("PRAGMA journal_mode = TRUNCATE")
    connection.execute("PRAGMA cache_size = 2")  # so that pages go to the file before the commit
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE series SET step = step + 1000, data = zeroblob(4)")
    connection.execute("UPDATE scalars SET value = -1")
    killed.mkdir()
    for name in ("run.sqlite", "run.sqlite-journal"):
        shutil.copyfile(path / name, killed / name)
    connection.close()
    assert (killed / "run.sqlite-journal").stat().st_size > 4096
    assert (killed / "run.sqlite").read_bytes() != (path / "run.sqlite").read_bytes()
    return killed


@pytest.fixture
def half(tmp_path, on):
    """A run that was killed in the middle of a commit."""
    on("nfs4")
    layers = [LayerInfo(f"layer{i}", "linear", (2, 2)) for i in range(300)]
    records = [rows(*range(50), layers=300), *(Scalars(step, {"loss": 1.0}) for step in range(50))]
    return half_committed(write(tmp_path / "run", *records, layers=layers), tmp_path / "killed"), layers


def test_a_run_that_was_killed_in_the_middle_of_a_commit_is_read_as_it_was_before_and_left_as_it_is(half):
    path, _ = half
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with load(path) as run:
        np.testing.assert_array_equal(run.series("rotation")[:, 0], range(50))
        assert set(run.scalars["loss"].values.tolist()) == {1.0}
        run.check()
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.mark.parametrize("file_system", ["nfs4", "ext4"])
def test_a_run_that_was_killed_in_the_middle_of_a_commit_is_resumed_and_followed(half, on, file_system):
    path, layers = half
    run = load(path)
    assert len(run.steps) == 50
    on(file_system)
    with writer(path, layers, step=49) as w:
        w.put(rows(50, layers=300))
        w.flush()
        run.refresh()
        np.testing.assert_array_equal(run.series("rotation")[:, 0], range(51))
    run.refresh()
    np.testing.assert_array_equal(run.series("rotation")[:, 0], range(51))
    run.check()


READ = """
import sys
from gyroscope.store import load
most = 0
with load(sys.argv[1]) as run:
    while run.state == "running":
        run.refresh()
        [(rows, numbers)] = run._ask("SELECT (SELECT count(*) FROM series), (SELECT count(*) FROM scalars)")
        assert rows == 2 * numbers, "half of a transaction"
        values = run.series("rotation")
        assert (values[:, 0] + 1 == values[:, 1]).all(), "half of a transaction"
        if len(run.steps) > most:
            most = len(run.steps)
            print(most, flush=True)
"""


@pytest.mark.usefixtures("journal")
def test_readers_in_other_processes_see_whole_transactions_and_stop_nobody(tmp_path):
    layers = [LayerInfo(name, "linear", (2, 2), part) for part, name in enumerate("ab")]
    w = writer(tmp_path / "run", layers, tick=600)

    def put(step):
        for part in (0, 1):
            w.put(Rows(part, np.array([step]), {"rotation": np.array([[step + part]])}))
        w.put(Scalars(step, {"loss": 1.0}))
        w.flush()  # all of it in one transaction

    put(0)
    command = [sys.executable, "-c", READ, str(w.path)]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    heard = [[], []]
    threads = [threading.Thread(target=to.extend, args=[one.stdout]) for to, one in zip(heard, readers, strict=True)]
    for thread in threads:
        thread.start()
    step = 0
    while min(map(len, heard)) < 5 and all(one.poll() is None for one in readers):
        step += 1
        put(step)
        time.sleep(0.02)  # a writer's own pauses are longer
    w.close()
    assert w.error is None
    for reader, thread, seen in zip(readers, threads, heard, strict=True):
        with reader:
            thread.join()
        assert reader.returncode == 0
        assert len(seen) >= 5
        assert int(seen[-1]) <= step + 1


@pytest.fixture
def held(tmp_path, on, monkeypatch):
    """A run on a network file system, being written, and somebody who reads it and does not stop."""
    on("nfs4")
    monkeypatch.setattr(sys.modules["gyroscope.store.connect"], "PATIENCE", 0.05)
    w = writer(tmp_path / "run")
    w.put(rows(0))
    w.flush()
    reader = sqlite3.connect(w.path / "run.sqlite", isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM series").fetchone() == (1,)
    yield w, reader
    reader.close()
    w.close()


def test_somebody_who_reads_for_long_delays_a_rollback_journal_and_stops_nothing(held, caplog):
    w, reader = held
    assert w.put(rows(1))
    with pytest.raises(StoreError, match=r"was not written within 0\.5 s; the writer keeps trying"):
        w.flush(timeout=0.5)  # ten times as long as a connection waits
    assert w.put(rows(2))
    assert w.error is None
    reader.execute("COMMIT")
    w.flush()
    w.close()
    assert w.error is None
    np.testing.assert_array_equal(load(w.path).steps, [0, 1, 2])
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "Records wait until that reader is done" in record.getMessage()


def test_a_writer_that_is_closed_does_not_wait_for_readers_for_ever(held, caplog):
    w, reader = held
    w.put(rows(1))
    w.close()
    assert "has been locked by another program" in str(w.error)
    assert "Recording has stopped" in caplog.text
    reader.close()
    with load(w.path) as run:
        assert run.state == "interrupted"
        np.testing.assert_array_equal(run.steps, [0])
    np.testing.assert_array_equal(load(write(w.path, rows(1), step=0)).steps, [0, 1])


def test_a_resumed_run_is_not_read_as_if_nobody_wrote_it(tmp_path, on, monkeypatch):
    """A reader opened a finished run; while it reads, a writer takes it up and changes its pages in place."""
    on("nfs4")
    path = write(tmp_path / "run", rows(0))
    run = load(path)
    ask, took_up = run._ask, []
    opened = ask._open

    def slow():
        connection = opened()
        if not took_up:
            took_up.append(writer(path, step=0))
            took_up[0].put(rows(1))
            took_up[0].flush()
        return connection

    monkeypatch.setattr(ask, "_open", slow)
    assert run.steps.tolist() == [0, 1]
    assert ask._locks
    took_up[0].close()


def test_the_machine_of_another_writer_is_named(tmp_path, monkeypatch):
    with writer(tmp_path / "run"):
        monkeypatch.setattr(lock.platform, "node", lambda: "elsewhere")
        there = (tmp_path / "run" / "run.lock").read_text().split()[1]
        with pytest.raises(StoreError, match=rf"\(process {os.getpid()} on {there}\)"):
            writer(tmp_path / "run")


def test_a_file_that_cannot_take_its_journal_is_refused_in_words(tmp_path, on, monkeypatch):
    """A log that another process has open cannot be merged; the run is refused, and left as it is."""
    on("ext4")
    monkeypatch.setattr(sys.modules["gyroscope.store.connect"], "PATIENCE", 0.05)
    path = write(tmp_path / "run", rows(0))
    reader = sqlite3.connect(path / "run.sqlite", isolation_level=None)
    assert reader.execute("SELECT count(*) FROM series").fetchone() == (1,)
    on("nfs4")
    with pytest.raises(StoreError, match="has been locked by another program"):
        writer(path, step=0)
    reader.close()
    assert kind_in(path) == "wal"
    write(path, rows(1), step=0)
    assert kind_in(path) == "rollback"
    np.testing.assert_array_equal(load(path).steps, [0, 1])


def test_a_rank_that_does_not_write_touches_no_folder(tmp_path, monkeypatch):
    """Its machine need not see the folder at all."""
    import torch

    monkeypatch.setattr(gyroscope.monitor.resume, "rank", lambda: 1)
    (tmp_path / "file").write_text("where no folder can be")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gyroscope.watch(model, optimizer, tmp_path / "file" / "run") as monitor:
        for _ in range(3):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            monitor.log(loss=1.0)
        monitor.note("unheard")
        monitor.flush()
    assert monitor.error is None
    assert names(tmp_path) == ["file"]
