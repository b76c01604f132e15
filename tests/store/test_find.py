import logging

import numpy as np
import pytest
from runs_for_tests import rows, write, writer

from gyroscope.errors import StoreError
from gyroscope.store import load, runs

NAMES = [
    "with space",
    "what? 100 %",
    "50%20off",
    "a#b&c=d;e",
    "größe-日本",
    'it\'s "so"',
    "x:y|z",
    "mode=ro?cache=shared",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_may_hold_any_characters(tmp_path, name):
    path = write(tmp_path / name, rows(0, 1))
    with writer(path, step=1) as w:
        w.put(rows(2))
        w.flush()
        assert len(load(path).steps) == 3
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert load(str(path)).name == name
    np.testing.assert_array_equal(load(path).series("rotation")[:, 0], [0, 1, 2])


def test_a_run_that_is_open_can_be_loaded_again(tmp_path):
    with writer(tmp_path / "run") as w:
        w.put(rows(0))
        w.flush()
        before = load(w.path)
        assert before.steps.tolist() == [0]
        w.put(rows(1))
        w.flush()
        assert load(before).steps.tolist() == [0, 1]
        assert before.steps.tolist() == [0]
    assert load(load(w.path)).state == "ended"


def test_a_relative_path_means_the_same_after_changing_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with writer("run") as w:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        w.put(rows(0))
        w.flush()
    run = load("../run")
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(run.steps, [0])


def test_a_run_is_also_found_by_its_file(tmp_path):
    path = write(tmp_path / "run", rows(0))
    assert load(path / "run.sqlite").path == path


def test_runs_are_found_three_folders_deep_in_the_order_they_were_started(tmp_path):
    for name in ("c", "sweep/b", "sweep/deep/a", "sweep/deep/er/lost", ".hidden/d"):
        write(tmp_path / name, rows(0))
    assert [run.name for run in runs(tmp_path)] == ["c", "b", "a"]
    assert [run.name for run in runs(tmp_path / "c")] == ["c"]
    assert runs(tmp_path / "sweep" / "deep" / "er" / "lost")[0].name == "lost"


def test_a_folder_without_runs_gives_none_and_no_folder_is_refused(tmp_path):
    assert runs(tmp_path) == []
    with pytest.raises(StoreError, match="There is no folder"):
        runs(tmp_path / "nowhere")


def test_a_broken_run_is_told_or_listed_and_hides_no_other(tmp_path, caplog):
    write(tmp_path / "good", rows(0))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.sqlite").write_bytes(b"scribble" * 1000)
    with caplog.at_level(logging.WARNING, logger="gyroscope"):
        assert [run.name for run in runs(tmp_path)] == ["good"]
    assert "bad/run.sqlite is not a run" in caplog.text
    broken = []
    assert [run.name for run in runs(tmp_path, broken=broken)] == ["good"]
    assert len(broken) == 1
    assert "bad/run.sqlite is not a run" in str(broken[0])


@pytest.mark.parametrize("path", [3, None, b"run", "a\0b"])
@pytest.mark.parametrize("act", [load, runs, lambda path: writer(path)], ids=["load", "runs", "Writer"])
def test_what_is_no_path_is_refused_in_words(act, path):
    with pytest.raises(StoreError, match=r"The folder .* must be a (valid )?path, got"):
        act(path)


def test_a_file_is_no_folder_of_runs(tmp_path):
    path = write(tmp_path / "run", rows(0))
    with pytest.raises(StoreError, match=r"run.sqlite is a file. Pass the folder"):
        runs(path / "run.sqlite")


def test_a_folder_whose_name_is_too_long_is_refused_in_words(tmp_path):
    with pytest.raises(StoreError, match="File name too long"):
        writer(tmp_path / ("x" * 5000))
