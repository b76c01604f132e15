import errno
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gyroscope.base.whole_file import write_whole
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.dynamics.exponential import Twins
from gyroscope_lab.papers.dynamics.measurements import kept
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.schedule import Schedule


def test_many_that_write_one_file_at_once_leave_it_whole_and_nothing_else(tmp_path):
    path = tmp_path / "study" / "pair.json"
    pairs = [Twins([0], [float(i)] * 5000, 1.0, ([], []), ([], []), (0.0, 0.0)) for i in range(8)]
    with ThreadPoolExecutor(8) as together:
        for _ in range(5):
            assert list(together.map(lambda pair: pair.write(path), pairs)) == [None] * 8
            assert Twins.read(path) in pairs
    assert list(path.parent.iterdir()) == [path]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "ρ")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_bytes().decode() == "ρ"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one_and_so_do_the_permissions_of_what_it_leads_to(tmp_path):
    there = tmp_path / "there.json"
    there.write_text("before")
    there.chmod(0o640)
    (tmp_path / "link.json").symlink_to(there)
    write_whole(tmp_path / "link.json", "after")
    assert (tmp_path / "link.json").is_symlink()
    assert (there.read_text(), stat.S_IMODE(there.stat().st_mode)) == ("after", 0o640)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        got = reader.submit(pipe.read_text)
        write_whole(pipe, "ρ")
        assert got.result(30) == "ρ"
    assert list(tmp_path.iterdir()) == [pipe]
    assert pipe.is_fifo()


def test_where_no_file_may_be_made_one_that_is_there_is_written_to(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("before")
    opened = Path.open

    def refused(self, mode="r", *more, **options):
        if mode == "x":  # permissions of folders do not hold for the superuser, as whom tests may run
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return opened(self, mode, *more, **options)

    monkeypatch.setattr(Path, "open", refused)
    write_whole(path, "after")
    assert path.read_text() == "after"
    with pytest.raises(PermissionError, match=r"Permission denied: '.*other\.json'"):
        write_whole(tmp_path / "other.json", "after")


def test_a_name_may_be_as_long_as_the_disk_allows(tmp_path):
    path = tmp_path / ("a" * 250 + ".json")
    write_whole(path, "all")
    assert path.read_text() == "all"


def test_a_measurement_that_is_damaged_is_named(tmp_path):
    lab = Lab(Archive(tmp_path))
    kept(lab, "example", Schedule(), lambda: {"loss": [0.5]})
    [path] = tmp_path.rglob("*.json")
    assert json.loads(path.read_bytes())["found"] == {"loss": [0.5]}
    path.unlink()
    path.mkdir()
    with pytest.raises(LabError, match=r"\.json cannot be read \(.*Is a directory.*\. Delete it to measure again"):
        kept(lab, "example", Schedule(), dict)
