import hashlib
from urllib.parse import urlparse

import pytest

from gyroscope_lab.data.catalogue import DATASETS, Dataset, File, Piece, check, dataset, find, missing, wrong
from gyroscope_lab.data.cifar import CIFAR_10, CIFAR_100
from gyroscope_lab.data.mnist import read_mnist
from gyroscope_lab.data.source import NAMES as SOURCES
from gyroscope_lab.errors import LabError
from lab.made import NAMES, write

FILES = [(known.name, file) for known in DATASETS for piece in known.pieces for part in piece.parts for file in part]
DOWNLOADS = [(known.name, piece.download) for known in DATASETS for piece in known.pieces if piece.download]


def named(files):
    return pytest.mark.parametrize(
        ("of", "file"), files, ids=[f"{number}-{file.name}" for number, (_, file) in enumerate(files)]
    )


def checksum(content, kind="md5"):
    return f"{kind}:{hashlib.new(kind, content).hexdigest()}"


def made(*contents, within=("", "made")):
    files = [File(f"{number}.bin", len(content), checksum(content)) for number, content in enumerate(contents)]
    piece = Piece(File("made.tar.gz", 3, checksum(b"tar")), tuple((file,) for file in files))
    return Dataset("made", "Made", "made", within, (piece,), "nobody's")


@named([*FILES, *DOWNLOADS])
def test_every_checksum_has_the_length_of_its_kind(of, file):
    if file.checksum:
        kind, digits = file.checksum.split(":")
        assert len(bytes.fromhex(digits)) == hashlib.new(kind).digest_size


@named(DOWNLOADS)
def test_every_download_has_a_size_a_checksum_and_addresses_over_the_web(of, file):
    assert file.size
    assert file.checksum
    assert file.urls
    assert all(urlparse(url).scheme in ("http", "https") for url in file.urls)
    assert urlparse(file.urls[0]).scheme == "https"


def test_names_are_unique_and_those_by_hand_say_how():
    assert len({known.name for known in DATASETS}) == len(DATASETS)
    for known in DATASETS:
        assert bool(known.by_hand) == any(piece.download is None for piece in known.pieces)
        assert known.note


def test_every_source_that_needs_files_can_be_asked_for_and_every_dataset_is_read():
    assert {known.source for known in DATASETS} == set(SOURCES) - {"digits", "made-text"}


@pytest.mark.parametrize(
    ("name", "part", "size"),
    [
        # The idx format: four bytes, four a dimension, one an element.
        ("mnist", "train-images-idx3-ubyte", 16 + 60_000 * 28 * 28),
        ("mnist", "train-labels-idx1-ubyte", 8 + 60_000),
        ("mnist", "t10k-images-idx3-ubyte", 16 + 10_000 * 28 * 28),
        ("mnist", "t10k-labels-idx1-ubyte", 8 + 10_000),
        # CIFAR's: a byte a kind of label, and three planes.
        *(("cifar-10", f"{batch}.bin", 10_000 * (1 + 3 * 32 * 32)) for batch in (*CIFAR_10.train, CIFAR_10.test)),
        ("cifar-100", "train.bin", 50_000 * (2 + 3 * 32 * 32)),
        ("cifar-100", "test.bin", 10_000 * (2 + 3 * 32 * 32)),
    ],
)
def test_sizes_are_those_of_the_formats(name, part, size):
    assert [file.size for of, file in FILES if (of, file.name) == (name, part)] == [size]


@pytest.mark.parametrize("within", dataset("mnist").within)
def test_mnist_is_found_where_its_reader_finds_it(tmp_path, within):
    write(tmp_path / within, packed=NAMES[1:3])
    assert len(read_mnist(tmp_path).x_train) == 7
    assert missing(dataset("mnist"), tmp_path) == []


def test_mnist_is_found_in_the_other_spelling(tmp_path):
    write(tmp_path, packed=NAMES[1:3])
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / path.name.replace("-idx", ".idx"))
    assert missing(dataset("mnist"), tmp_path) == []


@pytest.mark.parametrize(("edition", "name"), [(CIFAR_10, "cifar-10"), (CIFAR_100, "cifar-100")])
def test_cifar_is_where_and_what_its_reader_looks_for(edition, name):
    for number, (known, ending) in enumerate([(dataset(name), ".bin"), (dataset(f"{name}-python"), "")]):
        (piece,) = known.pieces
        assert [part[0].name for part in piece.parts] == edition.files(ending)
        assert known.within == ("", edition.folders[number])
        assert piece.archive.name == edition.archives[number]
        assert known.source == name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cifar10", "No dataset is called 'cifar10'. Did you mean cifar-10[?] There are: mnist, cifar-10, "),
        ("", "No dataset is called ''. There are: mnist, cifar-10, "),
    ],
)
def test_an_unknown_name_is_refused_with_those_there_are(name, says):
    with pytest.raises(LabError, match=says):
        dataset(name)


@pytest.mark.parametrize("kind", ["md5", "sha256"])
def test_a_file_is_told_by_its_checksum(tmp_path, kind):
    path = tmp_path / "file"
    path.write_bytes(b"right")
    assert wrong(path, File("file", 5, checksum(b"right", kind))) is None
    expected = hashlib.new(kind, b"wrong").hexdigest()
    found = hashlib.new(kind, b"right").hexdigest()
    said = f"its {kind.upper()} is {found}, and {expected} is expected"
    assert wrong(path, File("file", 5, f"{kind}:{expected}")) == said


def test_a_large_file_is_summed_to_its_last_byte(tmp_path):
    content = bytes(3_000_001)
    (tmp_path / "file").write_bytes(content)
    assert wrong(tmp_path / "file", File("file", None, checksum(content))) is None
    assert wrong(tmp_path / "file", File("file", None, checksum(content[:-1] + b"1"))) is not None


def test_a_file_is_told_by_its_size_first(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert wrong(tmp_path / "file", File("file", 1234, "md5:0")) == "it has 5 bytes, and 1,234 are expected"
    assert wrong(tmp_path / "file", File("file", 5)) is None
    assert wrong(tmp_path / "file", File("file")) is None


def test_what_cannot_be_read_is_wrong(tmp_path):
    assert wrong(tmp_path / "none", File("none", 5)) == "it cannot be read: No such file or directory"
    assert wrong(tmp_path, File("folder", None, "md5:0")) == "it cannot be read: Is a directory"


def test_parts_are_found_in_the_first_place_that_has_them(tmp_path):
    known = made(b"one", b"two", b"three")
    (tmp_path / "made").mkdir()
    for name in ("made/0.bin", "made/1.bin", "1.bin"):
        (tmp_path / name).touch()
    found = [at and at[0].relative_to(tmp_path).as_posix() for at in find(known, known.pieces[0], tmp_path)]
    assert found == ["made/0.bin", "1.bin", None]
    assert missing(known, tmp_path) == ["2.bin"]


def test_a_folder_is_not_taken_for_a_file_nor_a_file_for_a_folder(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "test").touch()
    assert missing(dataset("cifar-100-python"), tmp_path) == ["train"]
    known = Dataset("made", "Made", "made", ("",), (Piece(None, ((File("train/"),), (File("test/"),))),), "nobody's")
    assert missing(known, tmp_path) == ["test/"]


def test_tiny_imagenet_is_not_taken_for_imagenet(tmp_path):
    for name in ("train/n01443537/images", "val/images"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("wnids.txt", "val/val_annotations.txt"):
        (tmp_path / name).touch()
    assert missing(dataset("tiny-imagenet"), tmp_path) == []
    assert list(check(dataset("imagenet"), tmp_path)) == []


def test_checking_tells_right_from_wrong_and_looks_at_the_archive_too(tmp_path):
    for name, content in (("0.bin", b"one"), ("1.bin", b"tow"), ("made.tar.gz", b"tra")):
        (tmp_path / name).write_bytes(content)
    verdicts = {verdict.path.name: verdict for verdict in check(made(b"one", b"two", b"three"), tmp_path)}
    assert list(verdicts) == ["0.bin", "1.bin", "made.tar.gz"]
    assert verdicts["0.bin"].problem is None
    assert verdicts["1.bin"].problem.startswith("its MD5 is ")
    assert verdicts["made.tar.gz"].problem.startswith("its MD5 is ")
    assert {verdict.by for verdict in verdicts.values()} == {"md5"}


def test_files_that_are_too_many_to_list_are_counted(tmp_path):
    piece = Piece(None, parts=((File("val/words.txt"),),), counts=(("train/*/*.JPEG", 3), ("val/*.JPEG", 1)))
    known = Dataset("made", "Made", "made", ("made",), (piece,), "nobody's")
    assert list(check(known, tmp_path)) == []
    for name in ("train/a/1.JPEG", "train/a/2.JPEG", "train/b/1.JPEG", "train/b/1.txt", "val/words.txt"):
        path = tmp_path / "made" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    words, train, val = check(known, tmp_path)
    assert (words.problem, words.by) == (None, "name")
    assert (train.problem, train.by, train.path) == (None, "count", tmp_path / "made" / "train/*/*.JPEG")
    assert (val.problem, val.by) == ("there are 0, and 1 are expected", "count")


def test_only_folders_are_counted_as_folders(tmp_path):
    for part in ("train", "val"):
        for name in range(1440764, 1441764):
            (tmp_path / "imagenet" / part / f"n{name:08}").mkdir(parents=True)
        (tmp_path / "imagenet" / part / "notes.txt").touch()
    assert [verdict.problem for verdict in check(dataset("imagenet"), tmp_path)] == [None] * 4
