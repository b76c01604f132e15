"""Small files that unpack to gigabytes are rejected before they use that memory."""

import base64
import io
import sqlite3
import tarfile
import tracemalloc
import zipfile
import zlib
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from gyroscope.base.whole_file import read_whole
from gyroscope.control.rates import Rates
from gyroscope.diagnosis.stall import stalls
from gyroscope.errors import ControlError, MonitorError, StoreError
from gyroscope.monitor.reference import read_tensors
from gyroscope.store import LayerInfo, Rows, Writer, load, query
from gyroscope.store.database import checksum
from gyroscope.store.example import write_example
from gyroscope_lab.engine.box import collect
from gyroscope_lab.errors import LabError
from gyroscope_lab.training import checkpoint
from gyroscope_lab.training.last_layer import FILE, followed
from gyroscope_lab.training.result import Result

# What a bomb unpacks to, and what may be used to find that out.
HUGE, SMALL = 1 << 26, 1 << 23


@contextmanager
def little_memory():
    """Limit the memory of Python and NumPy."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < SMALL
    finally:
        tracemalloc.stop()


def result():
    rotation = [[0.1 * epoch, 0.2 * epoch] for epoch in range(6)]
    return Result(0.5, 0.4, loss=[1.0] * 5, layers=["a", "b"], rotation=rotation).as_json(small=True)


def test_a_result_unpacks_to_one_row_per_epoch_and_no_more():
    values = result()
    assert len(Result.from_json(values).rotation) == 6
    values["rotation"]["packed"] = base64.b85encode(zlib.compress(bytes(HUGE), 9)).decode()
    with little_memory(), pytest.raises(LabError, match="its rotation has more than 80 bytes"):
        Result.from_json(values)


def test_a_result_does_not_say_itself_how_much_it_unpacks_to():
    values = result()
    values["rotation"]["shape"] = [HUGE // 16, 2]
    values["rotation"]["packed"] = base64.b85encode(zlib.compress(bytes(HUGE), 9)).decode()
    with little_memory(), pytest.raises(LabError, match=r"its rotation has shape .* for 5 epochs"):
        Result.from_json(values)


def columns(path, length=9, **others):
    """A file as a trial with `follows=True` writes it; `others` are members in place of arrays."""
    names = ("loss", "accuracy", "lambda_x", "lambda_g", "lambda_m", "weight_norm", "gradient_norm")
    np.savez_compressed(path, **{name: np.ones(length) for name in names if name not in others})
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file:
        for name, content in others.items():
            file.writestr(f"{name}.npy", content)


def npy(shape):
    with io.BytesIO() as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": shape})
        return file.getvalue()


@pytest.mark.parametrize("content", [bytes(HUGE), npy((1 << 50,)), npy((3, 3)) + bytes(72)], ids=len)
def test_columns_of_the_last_layer_are_one_number_per_step(tmp_path, content):
    with write_example(tmp_path / "run") as run:
        columns(run.path / FILE)
        assert len(followed(run.path)) == 9
        assert stalls(run) == []
        columns(run.path / FILE, weight_norm=content)
        with little_memory():
            with pytest.raises(LabError, match="cannot be read"):
                followed(run.path)
            with pytest.raises(MonitorError, match="cannot be read"):
                stalls(run)


def compressed(path, value):
    """A compressed file of `torch.save`; torch.load accepts it."""
    torch.save(value, path)
    with zipfile.ZipFile(path) as file:
        parts = {entry.filename: file.read(entry) for entry in file.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in parts.items():
            file.writestr(name, content)


def test_a_compressed_file_of_torch_is_refused_unread(tmp_path):
    compressed(tmp_path / checkpoint.FILE, {"key": "a", "epoch": 3, "weights": torch.zeros(1 << 20)})
    assert (tmp_path / checkpoint.FILE).stat().st_size < 1 << 14
    said = "bytes would unpack to .*, and torch.save does not compress"
    with pytest.raises(LabError, match=said):
        checkpoint.load(tmp_path, key="a")
    assert checkpoint.epoch(tmp_path) == 0
    compressed(tmp_path / "rates.pt", {"layers": ["a"], "tangents": torch.zeros(1 << 20, 1)})
    with pytest.raises(ControlError, match=said):
        Rates.load(tmp_path / "rates.pt")
    compressed(tmp_path / "reference.pt", {"tensors": {"a": torch.zeros(1 << 20)}, "squares": {}})
    with pytest.raises(MonitorError, match=said):
        read_tensors(tmp_path)


def test_parts_of_a_file_of_torch_that_overlap_are_refused(tmp_path):
    """Every entry of the directory points to the same bytes."""
    torch.save({f"w{i}": torch.zeros(1 << 12) for i in range(8)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as file:
        entries = file.infolist()
    large = next(entry for entry in entries if entry.filename.endswith("data/0"))
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as file:
        file.writestr(large.filename, bytes(large.file_size))
        [written] = file.infolist()
        file.filelist += [written] * 7
        file._didModify = True
    with pytest.raises(ValueError, match="bytes would unpack to"):
        read_whole(tmp_path / "b.pt")


def test_a_tensor_that_repeats_few_numbers_is_refused(tmp_path):
    expanded = torch.zeros(1).expand(1 << 36, 1 << 4)
    torch.save({"layers": ["a"] * (1 << 4), "tangents": expanded}, tmp_path / "rates.pt")
    with pytest.raises(ControlError, match=r"a tensor of shape \(68719476736, 16\) in it has fewer numbers"):
        Rates.load(tmp_path / "rates.pt")


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_a_compressed_archive_is_not_collected(tmp_path, mode):
    with tarfile.open(tmp_path / "box.tar", mode) as tar:
        entry = tarfile.TarInfo("box.json")
        entry.size = HUGE
        tar.addfile(entry, io.BytesIO(bytes(HUGE)))
    with little_memory(), pytest.raises(LabError, match="cannot be read as the archive of a box"):
        collect(tmp_path / "box.tar", tmp_path / "runs", tmp_path / "kept")


def test_a_row_that_is_longer_than_its_layers_is_not_read(tmp_path):
    path = write_example(tmp_path / "run").path
    with sqlite3.connect(path / "run.sqlite") as change:
        (key,) = change.execute("SELECT attempt, step, quantity, part FROM series WHERE step = 40 LIMIT 1")
        data = bytes(HUGE)
        change.execute(
            "UPDATE series SET data = ?, crc = ? WHERE (attempt, step, quantity, part) = (?, ?, ?, ?)",
            (data, checksum(*key, data), *key),
        )
    change.close()
    del data
    with load(path) as run, little_memory(), pytest.raises(StoreError, match="at step 40 are not those written"):
        run.series("rotation")


def test_short_rows_of_many_layers_are_read_in_pieces(tmp_path, monkeypatch):
    layers = [LayerInfo(f"{i}", "linear", (1, 1)) for i in range(100)]
    with write_example(tmp_path / "example") as example, Writer(tmp_path / "run", layers, example.quantities) as w:
        w.put(Rows(0, np.arange(50), {"rotation": np.zeros((50, 100), np.float32)}))
    monkeypatch.setattr(query, "_MOST", 1000)
    with load(tmp_path / "run") as run:
        with pytest.raises(StoreError, match=r"At most 1000 values .* got 50 steps of 100 layers. Read fewer"):
            run.series("rotation")
        assert run.series("rotation", steps=run.steps[-10:]).shape == (10, 100)
