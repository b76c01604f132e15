import gzip
import io
import os
import pickle
import struct
import tarfile

import numpy as np
import pytest
import torch

from gyroscope_lab.data.cifar import read_cifar10, read_cifar100
from gyroscope_lab.data.plain_pickle import PlainArray, read_plain_pickle
from gyroscope_lab.errors import LabError

TEN = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
HUNDRED = ["train", "test"]
READ = {10: read_cifar10, 100: read_cifar100}
FOLDERS = {
    10: {"bin": "cifar-10-batches-bin", "py": "cifar-10-batches-py"},
    100: {"bin": "cifar-100-binary", "py": "cifar-100-python"},
}
ARCHIVES = {
    10: {"bin": "cifar-10-binary.tar.gz", "py": "cifar-10-python.tar.gz"},
    100: {"bin": "cifar-100-binary.tar.gz", "py": "cifar-100-python.tar.gz"},
}


def made(classes):
    """Pixels [n, 3072] and labels for each file: all classes are equally frequent in the training files together."""
    random = np.random.default_rng(classes)
    names, each = (TEN, 4) if classes == 10 else (HUNDRED, 200)
    sizes = [each] * (len(names) - 1) + [10 if classes == 10 else 100]
    labels = np.concatenate([random.permutation(sum(sizes[:-1])) % classes, np.arange(sizes[-1])])
    ends = np.cumsum(sizes)
    return {
        name: (random.integers(0, 256, (size, 3072), dtype=np.uint8), labels[end - size : end].astype(np.uint8))
        for name, size, end in zip(names, sizes, ends, strict=True)
    }


def binary(x, y, classes):
    """A record is the coarse label if there is one, the label, and the pixels."""
    coarse = [] if classes == 10 else [y // 5]
    return np.column_stack([*coarse, y, x]).astype(np.uint8).tobytes()


def batch(x, y, classes):
    if classes == 10:
        return {"batch_label": "made", "labels": y.tolist(), "data": x}
    return {"coarse_labels": (y // 5).tolist(), "fine_labels": y.tolist(), "data": x}


def text(value):
    return b"U" + bytes([len(value)]) + value.encode()


def python2(x, y, classes):
    """A pickle as Python 2 and its numpy wrote it, opcode by opcode: strings are bytes, and it names numpy.core."""
    kind = b"cnumpy\ndtype\n" + text("u1") + b"K\0K\1\x87R"
    kind += b"(K\3" + text("|") + b"NNN" + 2 * b"J\xff\xff\xff\xff" + b"K\0tb"
    shape = b"M" + struct.pack("<H", len(x)) + b"M" + struct.pack("<H", 3072) + b"\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + text("b") + b"\x87R"
    array += b"(K\1" + shape + kind + b"\x89T" + struct.pack("<I", x.size) + x.tobytes() + b"tb"
    items = {}
    for key, value in batch(x, y, classes).items():
        if key == "data":
            items[key] = array
        elif isinstance(value, str):
            items[key] = text(value)
        else:
            items[key] = b"](" + b"".join(b"K" + bytes([label]) for label in value) + b"e"
    return b"\x80\x02}(" + b"".join(text(key) + item for key, item in items.items()) + b"u."


def old_spelling(x, y, classes):
    return pickle.dumps(batch(x, y, classes), 2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def byte_keys(x, y, classes):
    return pickle.dumps({key.encode(): value for key, value in batch(x, y, classes).items()}, 4)


def fortran(x, y, classes):
    return pickle.dumps(batch(np.asfortranarray(x), y, classes), 3)


def out_of_band(x, y, classes):
    return pickle.dumps(batch(x, y, classes), 5)


PICKLES = [python2, old_spelling, byte_keys, fortran, out_of_band]


def files(classes, kind, encode=python2):
    encode, ending = (binary, ".bin") if kind == "bin" else (encode, "")
    return {name + ending: encode(x, y, classes) for name, (x, y) in made(classes).items()}


def write(folder, contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def pack(path, contents, within):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in ({"batches.meta.txt": b"of no interest"} | contents).items():
            info = tarfile.TarInfo(f"{within}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def check(read, classes):
    """Pixel by pixel: plane, row, column; the files in the order of their numbers."""
    parts = made(classes)
    training, testing = [name for name in parts if "test" not in name], [name for name in parts if "test" in name]
    for names, x, y in ((training, read.x_train, read.y_train), (testing, read.x_test, read.y_test)):
        rows = [row for name in names for row in parts[name][0]]
        labels = [int(label) for name in names for label in parts[name][1]]
        assert y.dtype == torch.int64
        assert y.tolist() == labels
        assert x.dtype == torch.uint8
        assert x.shape == (len(rows), 3, 32, 32)
        for number in (0, len(rows) // 2, len(rows) - 1):
            for channel, row, column in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (2, 31, 31), (2, 3, 7)):
                assert x[number, channel, row, column] == rows[number][1024 * channel + 32 * row + column]
        assert torch.equal(x.flatten(1), torch.tensor(np.array(rows)))
    assert read.classes == classes


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("kind", ["bin", "py"])
@pytest.mark.parametrize("nested", [False, True], ids=["in the folder", "in its usual folder"])
def test_what_was_written_is_read(tmp_path, classes, kind, nested):
    write(tmp_path / (FOLDERS[classes][kind] if nested else ""), files(classes, kind))
    check(READ[classes](tmp_path), classes)


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("encode", PICKLES, ids=[encode.__name__ for encode in PICKLES])
def test_pickles_of_every_age_are_read(tmp_path, classes, encode):
    check(READ[classes](str(write(tmp_path, files(classes, "py", encode)))), classes)


def test_the_pickle_written_by_hand_is_what_python_2_wrote():
    """Unrestricted, Python 3 and its numpy read the same content."""
    x, y = made(10)["data_batch_1"]
    content = python2(x, y, 10).replace(b"numpy.core.multiarray", b"numpy._core.multiarray")
    read = pickle.loads(content, encoding="bytes")
    assert read[b"labels"] == y.tolist()
    assert read[b"batch_label"] == b"made"
    assert np.array_equal(read[b"data"], x)


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("kind", ["bin", "py"])
def test_archives_are_read_as_they_are_published_and_nothing_is_unpacked(tmp_path, classes, kind):
    pack(tmp_path / ARCHIVES[classes][kind], files(classes, kind), FOLDERS[classes][kind])
    check(READ[classes](tmp_path), classes)
    assert [path.name for path in tmp_path.iterdir()] == [ARCHIVES[classes][kind]]


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GYROSCOPE_DATA", str(write(tmp_path, files(10, "bin"))))
    check(read_cifar10(), 10)


def test_an_empty_folder_is_told_what_was_looked_for_and_where(tmp_path):
    with pytest.raises(LabError) as error:
        read_cifar10(tmp_path)
    for word in (str(tmp_path), *FOLDERS[10].values(), *ARCHIVES[10].values(), *(f"{name}.bin" for name in TEN)):
        assert word in str(error.value)


@pytest.mark.parametrize("missing", TEN)
def test_a_missing_file_is_named(tmp_path, missing):
    write(tmp_path, files(10, "bin"))
    (tmp_path / f"{missing}.bin").unlink()
    with pytest.raises(LabError, match=rf"CIFAR-10 is incomplete: {tmp_path} has no {missing}\.bin\. Fetch"):
        read_cifar10(tmp_path)


def test_files_of_two_formats_do_not_make_one_dataset(tmp_path):
    halves = {**dict(list(files(10, "bin").items())[:3]), **dict(list(files(10, "py").items())[3:])}
    with pytest.raises(LabError, match=r"has no data_batch_4\.bin and no .*; .* has no data_batch_1 and no"):
        read_cifar10(write(tmp_path, halves))


def test_a_whole_archive_is_read_past_an_incomplete_folder(tmp_path):
    write(tmp_path, {"data_batch_1.bin": b"half"})
    pack(tmp_path / ARCHIVES[10]["bin"], files(10, "bin"), "cifar-10-batches-bin")
    check(read_cifar10(tmp_path), 10)


def test_a_folder_of_the_name_of_a_file_is_none(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    with pytest.raises(LabError, match="CIFAR-100 is not in"):
        read_cifar100(tmp_path)


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("cut", [1, 3072])
def test_a_truncated_file_is_refused_by_name(tmp_path, classes, cut):
    contents = files(classes, "bin")
    name = list(contents)[-2]
    write(tmp_path, contents | {name: contents[name][:-cut]})
    with pytest.raises(
        LabError, match=rf"{name} is truncated, .*not a whole number of images of 3,07{3 + classes // 100}"
    ):
        READ[classes](tmp_path)


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>"], ids=["empty", "page"])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    write(tmp_path, files(10, "bin") | {"test_batch.bin": content})
    with pytest.raises(LabError, match=r"test_batch\.bin is truncated, or is not CIFAR-10: its \d+ bytes"):
        read_cifar10(tmp_path)


def test_a_file_cut_between_two_images_is_noticed(tmp_path):
    contents = files(10, "bin")
    write(tmp_path, contents | {"data_batch_5.bin": contents["data_batch_5.bin"][:-3073]})
    with pytest.raises(LabError, match=r"is incomplete: .* 2 of class . and 1 of class"):
        read_cifar10(tmp_path)


def test_a_file_under_two_names_is_noticed(tmp_path):
    contents = files(10, "bin")
    write(tmp_path, contents | {"data_batch_5.bin": contents["data_batch_1.bin"]})
    with pytest.raises(LabError, match="is truncated, or has the name of another"):
        read_cifar10(tmp_path)


@pytest.mark.parametrize(("classes", "place", "kind"), [(10, 0, "labels"), (100, 0, "coarse"), (100, 1, "fine")])
def test_a_label_out_of_range_is_refused(tmp_path, classes, place, kind):
    contents = files(classes, "bin")
    name = list(contents)[-1]
    damaged = bytearray(contents[name])
    damaged[place] = classes if kind != "coarse" else 20
    write(tmp_path, contents | {name: bytes(damaged)})
    with pytest.raises(LabError, match=rf"{name} is damaged: there is {damaged[place]} among its {kind}"):
        READ[classes](tmp_path)


X, Y = made(10)["test_batch"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (pickle.dumps([1, 2]), "holds a list, not the dictionary"),
        (pickle.dumps({}), "it holds nothing"),
        (pickle.dumps(batch(X, Y, 100)), "is not a batch of CIFAR-10, .* it holds coarse_labels, fine_labels, data"),
        (pickle.dumps({"labels": Y.tolist(), "data": X.tolist()}), "has images in an array 'data'"),
        (pickle.dumps({"labels": [str(y) for y in Y], "data": X}), "labels in a list 'labels'"),
        (pickle.dumps({"labels": Y.tolist()[1:], "data": X}), "its pixels are 10 × 3072, and it has 9 labels"),
        (pickle.dumps({"labels": Y.tolist(), "data": X[:, :-1].copy()}), "its pixels are 10 × 3071"),
        (pickle.dumps({"labels": [], "data": X[:0]}), "its pixels are 0 × 3072, and it has 0 labels"),
        (pickle.dumps({"labels": [*Y.tolist()[1:], 10], "data": X}), "there is 10 among its labels"),
        (pickle.dumps({"labels": [*Y.tolist()[1:], -1], "data": X}), "there is -1 among its labels"),
        (pickle.dumps({"labels": [*Y.tolist()[1:], 10**30], "data": X}), "there is 1000.* among its labels"),
        (pickle.dumps({"labels": Y.tolist(), "data": X.astype(np.float32)}), "array of 'f4', where bytes"),
        (pickle.dumps({"labels": Y.tolist(), "data": X})[:-9], "is damaged, or not a pickle"),
        (python2(X, Y, 10)[:-2000], "is damaged, or not a pickle"),
        (b"", "is damaged, or not a pickle"),
        (b"<html>not found</html>", "is damaged, or not a pickle"),
        (b"\x80\x02cnumpy\nndarray\n)R.", "holds a PlainArray"),
        (b"\x80\x02}" + text("data") + b"cnumpy\nndarray\n)Rs" + text("labels") + b"](K\1es.", "its pixels are 0, and"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_pickle_is_refused_with_what_is_wrong(tmp_path, content, says):
    write(tmp_path, files(10, "py") | {"test_batch": content})
    with pytest.raises(LabError, match=f"test_batch .*{says}"):
        read_cifar10(tmp_path)


class Call:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("where", ["alone", "as labels", "as a key", "in an array"])
def test_a_pickle_that_asks_for_a_command_runs_none_and_is_refused_by_the_name_of_it(tmp_path, protocol, where):
    command = Call(os.system, f"touch {tmp_path}/ran")
    content = {
        "alone": command,
        "as labels": {"labels": command, "data": X},
        "as a key": {"labels": [], "data": X, command: 1},
        "in an array": {"labels": [], "data": np.array([command], dtype=object)},
    }[where]
    write(tmp_path, files(10, "py") | {"data_batch_3": pickle.dumps(content, protocol)})
    # An array of objects is refused for its type, before or after the command is.
    with pytest.raises(LabError, match=r"data_batch_3 is .*(it asks for (posix|nt)\.system|array of 'O8')"):
        read_cifar10(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_the_same_pickle_does_run_its_command_where_nothing_restricts_it(tmp_path):
    pickle.loads(pickle.dumps(Call(os.system, f"touch {tmp_path}/ran")))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("builtins", "list"),
        ("__builtin__", "eval"),
        ("numpy", "load"),
        ("numpy", "ndarray.tofile"),
        ("numpy.core.multiarray", "scalar"),
        ("numpy._core.multiarray", "fromfile"),
        ("numpy.core.multiarray._reconstruct", "__call__"),
        ("_codecs", "decode"),
        ("copyreg", "_reconstructor"),
        ("gyroscope_lab.data.plain_pickle", "PlainArray"),
        ("os", "system"),
    ],
)
@pytest.mark.parametrize("opcode", ["global", "stack", "instance"])
def test_no_other_name_is_found(module, name, opcode):
    content = {
        "global": f"c{module}\n{name}\n.".encode(),
        "stack": b"\x80\x04" + b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name)) + b"\x93.",
        "instance": f"(i{module}\n{name}\n.".encode(),
    }[opcode]
    with pytest.raises(LabError) as error:
        read_plain_pickle(content, name="batch")
    assert str(error.value).startswith(f"batch is rejected: it asks for {module}.{name}, which")


@pytest.mark.parametrize("name", ["numpy.core.multiarray\n_reconstruct", "_codecs\nencode", "numpy\nndarray"])
@pytest.mark.parametrize("state", [b"}X\x08\0\0\0__call__Ns", b"N}X\x08\0\0\0__call__Ns\x86"], ids=["dict", "slots"])
def test_a_pickle_cannot_change_the_functions_it_is_given(name, state):
    with pytest.raises(LabError, match="damaged, or not a pickle"):
        read_plain_pickle(b"\x80\x02c" + name.encode() + b"\n" + state + b"b.", name="batch")
    x = read_plain_pickle(pickle.dumps(X, 2), name="batch")
    assert isinstance(x, PlainArray)
    assert np.array_equal(x.bytes(), X)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x80\x02U\x03oneQ.", "asks for an object outside the file, b'one'"),
        (pickle.dumps(Call(__import__("_codecs").encode, "text", "utf7")), "text in 'utf7', where latin1 is expected"),
        (pickle.dumps(Call(__import__("_codecs").encode, "\u1234", "latin1")), "UnicodeEncodeError"),
    ],
    ids=["persistent", "encoding", "characters"],
)
def test_other_ways_out_are_closed(content, says):
    with pytest.raises(LabError, match=says):
        read_plain_pickle(content, name="batch")


@pytest.mark.parametrize("shape", [(-2, -2), (2.0, 2), (True, 4), (5,), 4, None])
def test_an_array_whose_shape_is_not_that_of_its_bytes_is_refused(shape):
    array, kind = np.zeros(4, dtype=np.uint8).__reduce__(), np.dtype("u1")

    class Lies:
        def __reduce__(self):
            return array[0], array[1], (1, shape, kind, False, bytes(4))

    with pytest.raises(LabError, match="damaged, or not a pickle"):
        read_plain_pickle(pickle.dumps(Lies(), 2), name="batch")


def packed(tmp_path, contents=None):
    path = tmp_path / ARCHIVES[10]["bin"]
    pack(path, contents or files(10, "bin"), "cifar-10-batches-bin")
    return path


@pytest.mark.parametrize("keep", [0, 5, 100, 5000, 50_000, -20, -8, -1])
def test_a_truncated_archive_is_refused(tmp_path, keep):
    path = packed(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(LabError, match=rf"{path} is .*Fetch it again"):
        read_cifar10(tmp_path)


def test_a_flipped_byte_of_an_archive_is_noticed(tmp_path):
    path = packed(tmp_path)
    content = bytearray(path.read_bytes())
    content[-6] ^= 1  # of the checksum, which stands before the length
    path.write_bytes(content)
    with pytest.raises(LabError, match="damaged, or not compressed by gzip"):
        read_cifar10(tmp_path)


@pytest.mark.parametrize("content", [b"<html>not found</html>", gzip.compress(b"no archive" * 100)], ids=["page", "gz"])
def test_an_archive_that_is_none_is_refused(tmp_path, content):
    (tmp_path / ARCHIVES[10]["py"]).write_bytes(content)
    with pytest.raises(LabError, match=r"cifar-10-python\.tar\.gz is .*Fetch it again"):
        read_cifar10(tmp_path)


def test_an_archive_without_a_file_is_refused_by_the_name_of_it(tmp_path):
    contents = files(10, "bin")
    del contents["data_batch_4.bin"]
    path = packed(tmp_path, contents)
    with pytest.raises(LabError, match=rf"{path} has no data_batch_4\.bin. Fetch it again"):
        read_cifar10(tmp_path)


def test_a_link_in_an_archive_is_not_followed(tmp_path):
    contents = files(10, "bin")
    (tmp_path / "secret").write_bytes(contents.pop("test_batch.bin"))
    path = packed(tmp_path, contents)
    with gzip.open(path) as stream:
        content = stream.read()
    with tarfile.open(fileobj=io.BytesIO(content)) as old, tarfile.open(path, "w:gz") as new:
        for member in old:
            new.addfile(member, old.extractfile(member))
        link = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
        new.addfile(link)
    with pytest.raises(LabError, match=r"has no test_batch\.bin"):
        read_cifar10(tmp_path)


def test_a_file_far_too_large_is_not_read(tmp_path):
    write(tmp_path, files(10, "bin"))
    with (tmp_path / "data_batch_1.bin").open("wb") as file:
        file.truncate(2**29 + 1)
    with pytest.raises(LabError, match=r"data_batch_1\.bin has 536,870,913 bytes, more than any file of CIFAR"):
        read_cifar10(tmp_path)
