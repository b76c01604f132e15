import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from gyroscope.lab.archive import Archive
from gyroscope.lab.errors import LabError
from gyroscope.lab.laboratory import Lab
from gyroscope.lab.schedule import Schedule
from gyroscope.lab.studies.dynamics.loop import kept
from gyroscope.lab.studies.dynamics.twins import Twins
from gyroscope.lab.whole_file import write_whole


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


def test_a_measurement_that_is_damaged_is_named(tmp_path):
    lab = Lab(Archive(tmp_path))
    kept(lab, "example", Schedule(), lambda: {"loss": [0.5]})
    [path] = tmp_path.rglob("*.json")
    assert json.loads(path.read_bytes())["found"] == {"loss": [0.5]}
    path.unlink()
    path.mkdir()
    with pytest.raises(LabError, match=r"\.json cannot be read \(.*Is a directory.*; delete it to measure again"):
        kept(lab, "example", Schedule(), dict)
