"""Whatever has become of its file, a run is read right or refused in words."""

import os
import random
import shutil
import sqlite3

import numpy as np
import pytest
from runs_for_tests import rows, write, writer

from gyroscope.errors import StoreError
from gyroscope.store import LayerInfo, Rows, load, runs
from gyroscope.store.connect import in_words
from gyroscope.store.example import write_example

STEPS = range(60)
DEEP = "[" * 100_000 + "]" * 100_000
MANY = [LayerInfo(f"layer{i}", "linear", (2, 2)) for i in range(1500)]
VALUES = np.random.default_rng(0).standard_normal((60, 1500)).astype(np.float32)


@pytest.fixture
def path(tmp_path):
    """A run with wide rows: most pages of its file are nothing but values."""
    return write(tmp_path / "run", Rows(0, np.array(STEPS), {"rotation": VALUES}), layers=MANY)


def read_all(path):
    with load(path) as run:
        values = {name: run.series(name) for name in run.quantities}
        return values, run.scalars, run.events, run.meta, run.steps


def change(path, *statements):
    connection = sqlite3.connect(path / "run.sqlite", isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def test_a_missing_folder(tmp_path):
    with pytest.raises(StoreError, match=r"no run at .*nowhere: there is no such folder"):
        load(tmp_path / "nowhere")


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(StoreError, match=r"there is no run.sqlite in it"):
        load(tmp_path)


def test_a_file_that_is_no_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(StoreError, match=r"notes.txt is a file; a run is a folder"):
        load(tmp_path / "notes.txt")
    with pytest.raises(StoreError, match=r"notes.txt is a file; a run is a folder"):
        writer(tmp_path / "notes.txt")


@pytest.mark.parametrize("content", [b"", b"not a database, but long enough to look at" * 100, b"SQLite format 3\0"])
def test_a_file_that_is_no_run(tmp_path, content):
    (tmp_path / "run.sqlite").write_bytes(content)
    with pytest.raises(StoreError, match=r"run.sqlite (is not a run|is damaged)"):
        load(tmp_path)
    with pytest.raises(StoreError, match=r"run.sqlite (is not a run|is damaged)"):
        writer(tmp_path)
    assert (tmp_path / "run.sqlite").read_bytes() == content


def test_another_programs_database(tmp_path):
    change(tmp_path, "CREATE TABLE series (x)")
    with pytest.raises(StoreError, match="another program has written"):
        load(tmp_path)
    with pytest.raises(StoreError, match="another program has written"):
        writer(tmp_path)


def test_a_newer_layout(path):
    change(path, "PRAGMA user_version = 2")
    for act in (load, writer):
        with pytest.raises(StoreError, match=r"newer Gyroscope \(layout 2; .*pip install --upgrade gyroscope"):
            act(path)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER INSERT ON series BEGIN DELETE FROM meta; END",
        "CREATE VIEW v AS SELECT * FROM series",
        "CREATE TRIGGER t AFTER INSERT ON events BEGIN SELECT load_extension('x'); END",
        "CREATE INDEX i ON series (abs(step))",
    ],
)
def test_a_file_that_would_act_is_not_opened(path, statement):
    change(path, statement)
    for act in (load, writer):
        with pytest.raises(StoreError, match=r"holds the (trigger|view|index) '[tvi]', which no run has"):
            act(path)


def test_a_view_in_place_of_a_table_is_not_opened(path):
    change(path, "ALTER TABLE meta RENAME TO other", "CREATE VIEW meta AS SELECT 1 AS key, abs(2) AS value")
    with pytest.raises(StoreError, match="which no run has"):
        load(path)


def test_a_table_that_is_missing(path):
    change(path, "DROP TABLE events")
    with pytest.raises(StoreError, match="is damaged: it has no events"):
        load(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file(path, share):
    file = path / "run.sqlite"
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(StoreError, match=r"run.sqlite is damaged: .*\.recover"):
        read_all(path)


def test_values_that_were_changed_on_disk_are_never_shown(path):
    file = path / "run.sqlite"
    content = file.read_bytes()
    value = VALUES[30, 100:200].tobytes()
    assert content.count(value) == 1
    file.write_bytes(content.replace(value, bytes(400)))
    run = load(path)
    with pytest.raises(StoreError, match=r"is damaged: the values of 'rotation' at step 30 are not those written"):
        run.series("rotation")
    np.testing.assert_array_equal(run.series("rotation", steps=[29, 31]), VALUES[[29, 31]])
    with pytest.raises(StoreError, match="is damaged"):
        run.check()


@pytest.mark.parametrize("seed", range(40))
def test_a_file_scribbled_over_is_read_right_or_refused(path, seed):
    chance = random.Random(seed)
    file = path / "run.sqlite"
    content = bytearray(file.read_bytes())
    for _ in range(chance.choice([1, 3])):
        length = chance.choice([16, 512, 4096])
        where = chance.randrange(0, len(content) - length)
        content[where : where + length] = chance.randbytes(length)
    file.write_bytes(content)
    try:
        with load(path) as run:
            steps, rotation = run.steps, run.series("rotation")
    except StoreError:
        return
    known = ~np.isnan(rotation).all(axis=1)
    np.testing.assert_array_equal(rotation[known], VALUES[steps[known]])


def test_a_run_whose_file_is_damaged_says_so_when_it_is_resumed(path):
    file = path / "run.sqlite"
    content = bytearray(file.read_bytes())
    content[4096:] = bytes(len(content) - 4096)
    file.write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        writer(path, layers=MANY)


def test_without_its_write_ahead_file_a_killed_run_still_opens(tmp_path):
    killed = tmp_path / "killed"
    killed.mkdir()
    with writer(tmp_path / "run") as w:
        w.put(rows(0))
        w.flush()
        # What a kill leaves: the files as they are while a writer has them open.
        for name in ("run.sqlite", "run.sqlite-wal"):
            shutil.copy(w.path / name, killed)
    with load(killed) as run:
        np.testing.assert_array_equal(run.steps, [0])
        assert run.state == "interrupted"
    for name in ("run.sqlite-wal", "run.sqlite-shm"):
        (killed / name).unlink()
    with load(killed) as run:
        assert len(run.steps) == 0
        assert run.layers == ("conv1.weight", "conv2.weight", "head.weight")
    write(killed, rows(5))
    np.testing.assert_array_equal(load(killed).steps, [5])


def test_a_journal_without_its_run_is_not_mixed_into_a_new_one(tmp_path, journal):
    with writer(tmp_path / "run") as w:
        w.flush()
        shutil.copytree(w.path, tmp_path / "left", ignore=shutil.ignore_patterns("run.sqlite"))
    left = {"wal": "run.sqlite-shm, run.sqlite-wal", "rollback": "run.sqlite-journal"}[journal]
    with pytest.raises(StoreError, match=rf"holds {left} and no run"):
        writer(tmp_path / "left")


def test_a_folder_that_holds_other_things_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match=r"holds thesis.tex and no run"):
        writer(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_a_writer_leaves_that_was_killed_at_the_very_beginning_is_no_obstacle(tmp_path):
    for name in ("run.lock", "run.sqlite.new", "run.sqlite.new-journal"):
        (tmp_path / name).write_bytes(b"half")
    write(tmp_path, rows(0))
    np.testing.assert_array_equal(load(tmp_path).steps, [0])


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE layers SET name = NULL",
        "UPDATE layers SET part = 'x'",
        "UPDATE attempts SET time = 'x'",
        "UPDATE attempts SET time = 1e300",
        "UPDATE attempts SET time = NULL",
        "UPDATE attempts SET ended = 'x'",
        "UPDATE scalars SET name = X'ff' WHERE step = 10",
        "UPDATE events SET text = X'ff00'",
        "UPDATE events SET kind = NULL",
        "UPDATE quantities SET name = NULL",
        "UPDATE quantities SET meaning = X'ff'",
        "DELETE FROM layers",
        'UPDATE layers SET shape = \'["a", "b"]\'',
        f"UPDATE layers SET shape = '{DEEP}'",
        f"INSERT INTO meta VALUES ('x', '{DEEP}')",
        "INSERT INTO meta VALUES ('x', 'NaN')",
        "UPDATE events SET time = 9e999",
    ],
)
def test_what_cannot_have_been_written_is_damage_and_hides_no_other_run(tmp_path, statement):
    write_example(tmp_path / "bad").close()
    write_example(tmp_path / "good").close()
    change(tmp_path / "bad", statement)
    with pytest.raises(StoreError, match=r"is damaged: .*cannot be understood"), load(tmp_path / "bad") as run:
        _ = run.layer_table, run.quantities, run.attempts, run.scalars, run.events, run.meta
    broken = []
    listed = [run.name for run in runs(tmp_path, broken=broken)]
    # Runs are listed by when they began, and nothing else of them is read for it.
    dated = "attempts" in statement
    assert listed == (["good"] if dated else ["bad", "good"])
    assert [str(error).partition(":")[0] for error in broken] == [f"{tmp_path}/bad/run.sqlite is damaged"] * dated


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="links are followed here")
def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_is_left_as_it_is(tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.lock").symlink_to("../precious.txt")
    with pytest.raises(StoreError, match=r"run\.lock is a link"):
        writer(folder)
    assert precious.read_text() == "precious"
    assert [file.name for file in folder.iterdir()] == ["run.lock"]


def test_values_that_are_null_are_damage(tmp_path):
    write_example(tmp_path / "run").close()
    change(tmp_path / "run", "UPDATE series SET data = NULL")
    with pytest.raises(StoreError, match="is damaged"), load(tmp_path / "run") as run:
        run.where("rotation")


def test_a_file_that_ends_too_early_is_damaged_however_sqlite_says_so(tmp_path):
    short = sqlite3.OperationalError("disk I/O error")
    short.sqlite_errorname = "SQLITE_IOERR_SHORT_READ"
    assert "run.sqlite is damaged: disk I/O error" in str(in_words(short, tmp_path / "run.sqlite"))
