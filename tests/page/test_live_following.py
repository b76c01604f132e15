"""Runs that are followed: every change is noticed, and nothing outside the folder is read."""

import json
import os
import shutil
import sqlite3
import time

import pytest

from gyroscope.errors import StoreError
from gyroscope.page import following as module
from gyroscope.page.following import Following, UnknownRunError
from gyroscope.store import folder as store_folder
from page.live_server import Training

pytestmark = pytest.mark.usefixtures("no_waiting")


@pytest.fixture
def no_waiting(monkeypatch):
    """Look for new runs each time, and diagnose as often as asked."""
    for name in ("_SEARCH", "_SEARCH_SHARE", "_DIAGNOSE", "_DIAGNOSE_SHARE"):
        monkeypatch.setattr(module, name, 0)


@pytest.fixture
def runs(tmp_path):
    followed = Following([tmp_path])
    yield followed
    followed.close()


def changed(runs):
    """The runs that have changed since it was called last, and whether the list did."""
    runs.look()
    now, *found = runs.since(getattr(runs, "told", 0))
    runs.told = now
    return tuple(found)


def settle(runs):
    """Look until nothing changes."""
    while changed(runs) != ([], False):
        pass


def listed(runs):
    return {one["id"]: one for one in json.loads(runs.summaries())}


def test_every_flush_is_noticed(tmp_path, runs):
    training = Training(tmp_path / "first")
    assert changed(runs) == (["first"], True)
    for step in range(5):
        training.proceed()
        assert changed(runs) == (["first"], False)
        assert listed(runs)["first"]["steps"] == step
    training.end()
    assert changed(runs) == (["first"], False)
    assert listed(runs)["first"]["state"] == "ended"
    settle(runs)


def test_a_write_that_leaves_the_same_time_and_size_is_noticed(tmp_path, runs):
    training = Training(tmp_path / "first").proceed()
    runs.look()
    training.proceed()
    file = tmp_path / "first" / "run.sqlite"
    stamps = module._stamp(file), module._stamp(file.with_name("run.sqlite-wal"))
    # As if it had looked like this before, because both were written within one tick of the file system's clock.
    runs.entry("first").seen = module.Seen(*stamps, True)
    assert changed(runs)[0] == ["first"]
    assert listed(runs)["first"]["steps"] == 1
    training.end()


def test_the_end_of_a_writer_is_noticed_although_no_file_changes(tmp_path, runs, monkeypatch):
    training = Training(tmp_path / "first").proceed()
    settle(runs)
    assert listed(runs)["first"]["state"] == "running"
    monkeypatch.setattr(module.lock, "is_held", lambda _: False)
    assert changed(runs) == (["first"], False)
    assert listed(runs)["first"]["state"] == "interrupted"
    training.end()


def test_runs_come_and_go(tmp_path, runs):
    assert listed(runs) == {}
    Training(tmp_path / "sweep" / "a").end()
    assert changed(runs) == (["sweep/a"], True)
    Training(tmp_path / "sweep" / "b").end()
    assert changed(runs)[1]
    assert sorted(listed(runs)) == ["sweep/a", "sweep/b"]
    shutil.rmtree(tmp_path / "sweep" / "a")
    assert changed(runs)[1]
    assert list(listed(runs)) == ["sweep/b"]
    with pytest.raises(UnknownRunError, match=r"^The run sweep/a was deleted or renamed\.$") as caught:
        runs.head("sweep/a")
    assert caught.value.gone


def test_a_run_that_is_deleted_between_two_looks_is_reported_as_gone(tmp_path, runs):
    Training(tmp_path / "a").proceed().end()
    settle(runs)
    runs.head("a")
    shutil.rmtree(tmp_path / "a")
    runs.entry("a").version += 1
    with pytest.raises(UnknownRunError, match="deleted"):
        runs.head("a")
    assert listed(runs) == {}


def test_a_run_in_place_of_another_is_shown(tmp_path, runs):
    Training(tmp_path / "a").proceed(3).end()
    settle(runs)
    assert (listed(runs)["a"]["steps"], json.loads(runs.head("a"))["steps"]["count"]) == (2, 3)
    shutil.rmtree(tmp_path / "a")
    Training(tmp_path / "a").proceed(7).end()
    settle(runs)
    assert (listed(runs)["a"]["steps"], json.loads(runs.head("a"))["steps"]["count"]) == (6, 7)


def newer(file):
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: os.truncate(file, 5000), "damaged"),
        (lambda file: file.write_bytes(b"not a database" * 100), "not a run"),
        (lambda file: os.truncate(file, 0), "not a run"),
        (newer, "newer Gyroscope"),
    ],
)
def test_a_run_that_cannot_be_read_any_more_is_listed_with_the_reason(tmp_path, runs, damage, words):
    Training(tmp_path / "bad").proceed(50).end()
    Training(tmp_path / "good").proceed().end()
    settle(runs)
    assert listed(runs)["bad"]["state"] == "ended"
    damage(tmp_path / "bad" / "run.sqlite")
    assert "bad" in changed(runs)[0]
    shown = listed(runs)
    assert (shown["bad"]["state"], shown["good"]["state"]) == ("unreadable", "ended")
    assert words in shown["bad"]["error"]
    for ask in (runs.head, lambda id: runs.frame(id, "rotation", 10, None, None)):
        with pytest.raises(StoreError, match=words):
            ask("bad")


def test_whatever_fails_while_a_run_is_shown_the_others_are_listed(tmp_path, runs, monkeypatch):
    for name in ("a", "b"):
        Training(tmp_path / name).proceed().end()
    runs.look()
    summary = module.page.data.summary

    def odd(run, **given):
        if run.name == "a":
            raise ZeroDivisionError("odd")
        return summary(run, **given)

    monkeypatch.setattr(module.page.data, "summary", odd)
    shown = listed(runs)
    assert shown["b"]["state"] == "ended"
    assert shown["a"]["state"] == "unreadable"
    assert "ZeroDivisionError: odd" in shown["a"]["error"]


def test_changes_are_told_while_someone_looks_at_a_slow_disk(tmp_path, runs):
    Training(tmp_path / "a").end()
    runs.look()
    with runs._lock:
        assert runs.since(0).runs == ["a"]


def test_a_run_without_steps_is_shown(tmp_path, runs):
    training = Training(tmp_path / "empty")
    settle(runs)
    assert (listed(runs)["empty"]["steps"], json.loads(runs.head("empty"))["steps"]["count"]) == (None, 0)
    with pytest.raises(UnknownRunError, match="no series 'rotation'"):
        runs.frame("empty", "rotation", 10, None, None)
    training.end()


def test_a_folder_that_is_a_run_is_shown_by_its_name(tmp_path):
    Training(tmp_path / "only").proceed().end()
    runs = Following([tmp_path / "only"])
    runs.look()
    assert [one["name"] for one in listed(runs).values()] == ["only"]
    assert json.loads(runs.head("only"))["steps"]["count"] == 1
    runs.close()


def test_several_folders_with_runs_of_one_name_are_told_apart(tmp_path):
    for place in ("x", "y"):
        Training(tmp_path / place / "run").proceed().end()
    runs = Following([tmp_path / "x" / "run"])
    runs.add(tmp_path / "y" / "run")
    runs.look()
    assert sorted(one["name"] for one in listed(runs).values()) == ["run", "run (2)"]
    runs.close()


def test_links_that_lead_out_of_the_folder_are_not_followed(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for path in (inside / "own", outside / "secret", inside / "mixed"):
        Training(path).proceed().end()
    (inside / "folder").symlink_to(outside)
    (inside / "run").symlink_to(outside / "secret")
    (inside / "same").symlink_to(inside / "own")
    os.replace(outside / "secret" / "run.sqlite", outside / "file")
    (inside / "mixed" / "run.sqlite").unlink()
    (inside / "mixed" / "run.sqlite").symlink_to(outside / "file")
    runs = Following([inside])
    runs.look()
    shown = listed(runs)
    assert sorted(shown) == ["mixed", "own"]
    assert "leads out of the folder" in shown["mixed"]["error"]
    with pytest.raises(StoreError, match="leads out of the folder"):
        runs.head("mixed")
    runs.close()


def test_only_what_is_listed_can_be_asked_for(tmp_path):
    Training(tmp_path / "runs" / "a").end()
    Training(tmp_path / "other").end()
    runs = Following([tmp_path / "runs"])
    runs.look()
    for id in ("../other", "a/../../other", str(tmp_path / "other"), "", ".", "a/", "%61", "a\0"):
        with pytest.raises(UnknownRunError, match="There is no such run"):
            runs.entry(id)
    runs.close()


@pytest.mark.parametrize(
    "name", ["seed 0", "50%", "a%20b", "<img src=x>", "ümlaut", "a'b\"c", b"\xff\xfe", "x\x1b[2J", "#?&"]
)
def test_any_name_that_a_folder_can_have_is_shown_and_found(tmp_path, runs, name):
    name = os.fsdecode(name)
    Training(tmp_path / "sweep" / name).proceed().end()
    runs.look()
    (id, shown), *_ = listed(runs).items()
    assert id.isascii()
    assert id.isprintable()
    assert shown["name"].isprintable()
    assert json.loads(runs.head(id))["id"] == id
    assert json.loads(runs.head(f"sweep/{name}"))["id"] == id


def test_answers_are_made_once_for_each_change(tmp_path, runs, monkeypatch):
    training = Training(tmp_path / "a").proceed(3)
    settle(runs)
    made = []

    def counted(act):
        return lambda *given, **named: (made.append(act.__name__), act(*given, **named))[1]

    for name in ("summary", "head", "frame"):
        monkeypatch.setattr(module.page.data, name, counted(getattr(module.page.data, name)))
    for _ in range(3):
        runs.summaries(), runs.head("a"), runs.frame("a", "rotation", 10, None, None)
    assert sorted(made) == ["frame", "head", "summary"]
    training.proceed()
    settle(runs)
    runs.frame("a", "rotation", 10, None, None)
    assert sorted(made) == ["frame", "frame", "head", "summary"]
    training.end()


def test_runs_that_take_long_come_with_a_later_list(tmp_path, runs, monkeypatch):
    for name in ("a", "b"):
        Training(tmp_path / name).proceed().end()
    settle(runs)
    monkeypatch.setattr(module, "_PATIENCE", -1)
    assert listed(runs) == {}
    assert changed(runs) == (["a", "b"], True)
    monkeypatch.setattr(module, "_PATIENCE", 10)
    assert sorted(listed(runs)) == ["a", "b"]
    assert changed(runs) == ([], False)


def test_a_recorded_finding_is_counted_before_there_is_a_diagnosis_and_diagnosed_at_once(tmp_path, runs):
    training = Training(tmp_path / "a").proceed()
    runs.look()
    assert listed(runs)["a"]["findings"] == {"serious": 0, "warning": 0, "note": 0}
    runs.head("a")
    diagnosed = runs.entry("a").diagnosis
    training.proceed()
    settle(runs)
    runs.head("a")
    assert runs.entry("a").diagnosis is diagnosed
    training.note("serious: The loss is not finite.", "finding")
    settle(runs)
    runs.head("a")
    assert runs.entry("a").diagnosis is not diagnosed
    training.end()
    fresh = Following([tmp_path])
    fresh.look()
    assert listed(fresh)["a"]["findings"] == {"serious": 1, "warning": 0, "note": 0}
    fresh.close()


def test_runs_are_diagnosed_one_after_the_other_and_then_left_alone(tmp_path, runs):
    for name in ("a", "b"):
        Training(tmp_path / name).proceed().note("warning: odd", "finding").end()
    settle(runs)
    assert listed(runs)["a"]["findings"]["warning"] == 1
    for expected in (["a"], ["b"], []):
        runs.diagnose_one()
        assert changed(runs) == (expected, False)
    assert listed(runs)["a"]["findings"]["warning"] == 0  # the rules do not confirm what was put there


def test_a_run_that_someone_looks_at_does_not_keep_others_from_being_diagnosed(tmp_path, runs):
    for name in ("a", "b", "c"):
        Training(tmp_path / name).proceed().end()
    settle(runs)
    runs.summaries()
    diagnosed = []
    for _ in range(6):
        runs.entry("b").asked = time.monotonic()
        for entry in runs._entries.values():
            entry.version += 1  # as if all were written
        before = {id: entry.diagnosed_at for id, entry in runs._entries.items()}
        runs.diagnose_one()
        diagnosed += [id for id, entry in runs._entries.items() if entry.diagnosed_at != before[id]]
    assert diagnosed == ["b", "a", "b", "c", "b", "a"]


def test_values_that_nobody_asks_for_are_forgotten(tmp_path, runs, monkeypatch):
    Training(tmp_path / "a").proceed().end()
    settle(runs)
    runs.summaries(), runs.head("a"), runs.frame("a", "rotation", 10, None, None)
    monkeypatch.setattr(module, "_FORGET", -1)
    runs.look()
    assert list(runs.entry("a").answers) == [("summary",)]


def test_detail_is_asked_for_where_someone_writes(tmp_path, runs):
    training = Training(tmp_path / "a").proceed()
    runs.look()
    assert runs.sample("a", 20)
    assert (tmp_path / "a" / "sample").read_text() == "20\n"
    training.end()
    (tmp_path / "a" / "sample").unlink()
    assert not runs.sample("a", 20)
    assert not (tmp_path / "a" / "sample").exists()


def test_a_request_for_detail_is_never_written_through_a_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "run").mkdir()
    for name in (".sample", "sample"):
        (tmp_path / "run" / name).symlink_to(precious)
    store_folder.request(tmp_path / "run", 3)
    assert precious.read_text() == "kept"
    assert (tmp_path / "run" / "sample").read_text() == "3\n"


def test_files_of_runs_that_are_not_written_are_not_kept_open(tmp_path, runs):
    Training(tmp_path / "ended").proceed().end()
    training = Training(tmp_path / "running").proceed()
    settle(runs)
    runs.summaries(), runs.head("ended"), runs.head("running")
    for _ in range(2):
        runs.diagnose_one()
    assert [runs.entry(id).run._ask._connection is None for id in ("ended", "running")] == [True, False]
    training.end()
