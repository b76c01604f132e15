import struct

import numpy as np
import pytest
import torch

from gyroscope_lab.data.mnist import mnist
from gyroscope_lab.errors import LabError
from lab.made import NAMES, idx, images, labels, write


def same(split):
    return (
        torch.equal(split.x_train, torch.tensor(images(7)[:, None] / np.float32(255)))
        and torch.equal(split.x_test, torch.tensor(images(5, seed=1)[:, None] / np.float32(255)))
        and split.y_train.tolist() == [0, 1, 2, 3, 4, 5, 6]
        and split.y_test.tolist() == [0, 1, 2, 3, 4]
        and split.x_train.dtype == torch.float32
        and split.y_train.dtype == torch.int64
    )


@pytest.mark.parametrize("packed", [(), NAMES, NAMES[:1], NAMES[1:3]], ids=["plain", "gz", "one gz", "two gz"])
def test_what_was_written_is_read_plain_or_compressed(tmp_path, packed):
    assert same(mnist(write(tmp_path, packed=packed)))


@pytest.mark.parametrize("within", ["", "MNIST/raw", "MNIST", "mnist"])
def test_the_files_are_found_where_others_keep_them(tmp_path, within):
    write(tmp_path / within)
    assert same(mnist(str(tmp_path)))


def test_the_other_spelling_of_the_names_is_found(tmp_path):
    write(tmp_path)
    for name in NAMES:
        (tmp_path / name).rename(tmp_path / name.replace("-idx", ".idx"))
    assert same(mnist(tmp_path))


def test_the_environment_names_the_folder_and_an_argument_wins(tmp_path, monkeypatch):
    write(tmp_path / "one")
    monkeypatch.setenv("GYROSCOPE_DATA", str(tmp_path / "one"))
    assert same(mnist())
    (tmp_path / "empty").mkdir()
    with pytest.raises(LabError, match="train-images-idx3-ubyte"):
        mnist(tmp_path / "empty")


def test_no_folder_said_says_how_to_say_one(monkeypatch):
    monkeypatch.delenv("GYROSCOPE_DATA", raising=False)
    with pytest.raises(
        LabError,
        match=r"No folder was given for MNIST\. Give one, or set GYROSCOPE_DATA to the folder of your datasets",
    ):
        mnist()


def test_a_folder_that_is_not_there_is_named_with_where_the_name_came_from(tmp_path, monkeypatch):
    monkeypatch.setenv("GYROSCOPE_DATA", str(tmp_path / "none"))
    with pytest.raises(LabError, match=r"no folder .*none \(GYROSCOPE_DATA names it\)"):
        mnist()


@pytest.mark.parametrize("missing", NAMES)
def test_a_missing_file_is_named_with_the_places_looked_in(tmp_path, missing):
    write(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(LabError, match=rf"^{missing}, plain or .gz, is neither in .* nor in its MNIST/raw, MNIST, mn"):
        mnist(tmp_path)


@pytest.mark.parametrize("packed", [(), NAMES], ids=["plain", "gz"])
@pytest.mark.parametrize("cut", [1, 784, 7 * 784 + 1, 7 * 784 + 12])
def test_a_truncated_array_is_refused(tmp_path, cut, packed):
    write(tmp_path, packed=packed, **{NAMES[0]: idx(images(7))[:-cut]})
    with pytest.raises(LabError, match=f"{NAMES[0]}.* is truncated"):
        mnist(tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 9, 200, -8, -1])
def test_a_truncated_archive_is_refused(tmp_path, keep):
    write(tmp_path, packed=NAMES[:1])
    path = tmp_path / f"{NAMES[0]}.gz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(LabError, match=rf"{NAMES[0]}\.gz is .*Fetch it again"):
        mnist(tmp_path)


def test_an_archive_that_is_none_is_refused(tmp_path):
    write(tmp_path, packed=NAMES[:1])
    (tmp_path / f"{NAMES[0]}.gz").write_bytes(idx(images(7)))
    with pytest.raises(LabError, match="damaged, or not compressed by gzip"):
        mnist(tmp_path)


def test_a_flipped_byte_of_an_archive_is_noticed(tmp_path):
    write(tmp_path, packed=NAMES[:1])
    path = tmp_path / f"{NAMES[0]}.gz"
    content = bytearray(path.read_bytes())
    content[-6] ^= 1  # of the checksum, which stands before the length
    path.write_bytes(content)
    with pytest.raises(LabError, match="damaged"):
        mnist(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (NAMES[0], b"", "it is empty"),
        (NAMES[0], b"<html>not found</html>", "it begins with 3c 68 74 6d, not with 00 00 08"),
        (NAMES[0], idx(labels(7)), "has 1 dimensions; 3 are expected"),
        (NAMES[1], idx(images(7)), "has 3 dimensions; 1 are expected"),
        (NAMES[0], idx(images(7)[:, :14, :14]), "holds an array of 7 × 14 × 14; any × 28 × 28 is expected"),
        (NAMES[0], idx(images(7)) + b"\0", "is damaged: more than the 5,488 bytes of its header follow"),
        (NAMES[0], struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 28, 28), "is damaged: its header claims 3,367,254,359,"),
        (NAMES[1], idx(labels(6)), " 6 labels. They do not belong together"),
        (NAMES[1], idx(labels(7) + 10), "has a label 16; MNIST's are 0 to 9"),
        (NAMES[1], struct.pack(">HBBI", 0, 0x0D, 1, 7) + bytes(28), "begins with 00 00 0d 01, not with 00 00 08"),
    ],
    ids=["empty", "page", "labels", "images", "size", "longer", "huge", "fewer", "classes", "floats"],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(tmp_path, name, content, says):
    write(tmp_path, **{name: content})
    with pytest.raises(LabError, match=f"{name}.*{says}"):
        mnist(tmp_path)


def test_a_file_that_cannot_be_read_is_an_error_of_ours(tmp_path, monkeypatch):
    write(tmp_path)

    def refuse(self, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(LabError, match=f"{NAMES[0]} cannot be read: Permission denied"):
        mnist(tmp_path)
