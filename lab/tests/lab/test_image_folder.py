import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.multiprocessing import ProcessExitedException
from torch.nn import functional

import forked
from gyroscope_lab.data import Source, image_cache
from gyroscope_lab.data.image_cache import decode
from gyroscope_lab.data.image_folder import read_imagenet, read_tiny_imagenet
from gyroscope_lab.errors import LabError

CLASSES = ["n02", "n01", "n03"]  # as wnids.txt has them; their numbers are those of the sorted names


def photograph(path, size=(64, 64), mode="RGB", seed=0):
    """An image smooth enough for JPEG, different for every seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode).save(path, "JPEG", quality=95)


def tiny(folder, each=3, tests=4):
    for number, name in enumerate(CLASSES):
        for image in range(each):
            photograph(folder / f"train/{name}/images/{name}_{image}.JPEG", seed=10 * number + image)
        (folder / f"train/{name}/{name}_boxes.txt").write_text("of no interest")
    for image in range(tests):
        photograph(folder / f"val/images/val_{image}.JPEG", seed=100 + image)
    rows = [f"val_{image}.JPEG\t{CLASSES[image % 3]}\t0\t32\t44\t62\n" for image in range(tests)]
    (folder / "val/val_annotations.txt").write_text("".join(rows))
    (folder / "wnids.txt").write_text("\n".join(CLASSES) + "\n")
    return folder


def imagenet(folder, sizes=((80, 64), (64, 100))):
    for part, seed in (("train", 0), ("val", 50)):
        for number, name in enumerate(CLASSES):
            for image, size in enumerate(sizes):
                photograph(folder / f"{part}/{name}/{name}_{image}.JPEG", size, seed=seed + 10 * number + image)
    return folder


def pixels(path):
    """[3, height, width]"""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


@pytest.fixture
def folder(tmp_path):
    return tiny(tmp_path)


@pytest.fixture
def decoded(monkeypatch):
    """Record the decoded files."""
    found = []

    def note(path, **sizes):
        found.append(Path(path).name)
        return decode(path, **sizes)

    monkeypatch.setattr("gyroscope_lab.data.image_cache.decode", note)
    return found


def read(folder, **options):
    return read_tiny_imagenet(folder, workers=1, **options)


@pytest.mark.parametrize("within", ["", "tiny-imagenet-200"])
def test_every_image_is_where_its_class_says_pixel_by_pixel(tmp_path, within):
    root = tiny(tmp_path / within)
    found = read(tmp_path)
    training = [f"train/{name}/images/{name}_{image}.JPEG" for name in sorted(CLASSES) for image in range(3)]
    assert found.x_train.dtype == found.x_test.dtype == torch.uint8
    np.testing.assert_array_equal(found.x_train, np.stack([pixels(root / path) for path in training]))
    assert found.y_train.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    testing = [f"val/images/val_{image}.JPEG" for image in range(4)]
    np.testing.assert_array_equal(found.x_test, np.stack([pixels(root / path) for path in testing]))
    assert found.y_test.tolist() == [sorted(CLASSES).index(CLASSES[image % 3]) for image in range(4)] == [1, 0, 2, 1]
    assert found.classes == 3


@pytest.mark.usefixtures("forked_workers")
def test_processes_decode_the_same_images(tmp_path):
    seen = []
    tiny(tmp_path / "one"), tiny(tmp_path / "two")
    one, two = (
        read(tmp_path / "one"),
        read_tiny_imagenet(tmp_path / "two", workers=2, on_progress=lambda done, total: seen.append((done, total))),
    )
    for name in ("x_train", "y_train", "x_test", "y_test", "counts"):
        assert torch.equal(getattr(one, name), getattr(two, name))
    assert seen == sorted(seen)
    assert seen[0] == (0, 13)
    assert seen[-1] == (13, 13)


def test_few_images_start_no_process_and_many_start_one_a_core(folder, monkeypatch):
    asked = []
    decode_all = image_cache.decode_all

    def note(batches, *, workers):
        asked.append(workers)
        return decode_all(batches, workers=1)

    monkeypatch.setattr(image_cache, "decode_all", note)
    monkeypatch.setattr(image_cache, "_cores", lambda: 5)
    read_tiny_imagenet(folder)
    monkeypatch.setattr(image_cache, "_FEW", 13)
    read_tiny_imagenet(folder, side=32)
    assert asked == [1, 5]


def test_pixels_are_counted_of_the_training_images_alone(folder):
    found = read(folder)
    for channel in range(3):
        expected = np.bincount(found.x_train[:, channel].numpy().ravel(), minlength=256)
        assert found.counts[channel].tolist() == expected.tolist()


def test_a_source_normalizes_by_what_was_counted(folder):
    split = Source("tiny-imagenet", normalization="channel", validation=1 / 3).load(folder)
    x = read(folder).x_train.numpy()
    np.testing.assert_array_equal(split.mean, x.mean((0, 2, 3), dtype=np.float64).astype(np.float32))
    np.testing.assert_array_equal(split.std, x.std((0, 2, 3), dtype=np.float64).astype(np.float32))
    assert (len(split.x_train), len(split.x_val), len(split.x_test), split.classes) == (6, 3, 4, 3)


def test_the_second_time_nothing_is_decoded(folder, decoded):
    seen = []
    first = read(folder)
    assert len(decoded) == 13
    second = read(folder, on_progress=lambda *at: seen.append(at))
    assert len(decoded) == 13
    assert seen == []
    assert torch.equal(first.x_train, second.x_train)
    assert torch.equal(first.counts, second.counts)
    assert [path.name for path in sorted((folder / "gyroscope-cache/tiny-imagenet-64").iterdir())] == [
        "images.npy",
        "index.json",
        "run.lock",
    ]


def test_the_images_are_a_map_of_the_file(folder):
    """A change of the file is visible in the images, which a copy would not show."""
    found = read(folder)
    path = folder / "gyroscope-cache/tiny-imagenet-64/images.npy"
    array = np.load(path, mmap_mode="r+")
    array[0, 0, 0, 0] ^= 255
    array.flush()
    assert found.x_train[0, 0, 0, 0] == array[0, 0, 0, 0]


@pytest.mark.parametrize("change", ["written", "touched", "added", "removed", "renamed"])
def test_a_file_that_changed_is_decoded_again_and_all_others_with_it(folder, decoded, change):
    read(folder)
    path = folder / "train/n01/images/n01_1.JPEG"
    if change == "written":
        stat = path.stat()
        photograph(path, seed=77)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert path.stat().st_size != stat.st_size
    elif change == "touched":
        os.utime(path, ns=(0, 0))
    elif change == "added":
        photograph(folder / "train/n01/images/n01_9.JPEG", seed=77)
    elif change == "removed":
        path.unlink()
    else:
        path.rename(folder / "train/n01/images/n01_0b.JPEG")
    decoded.clear()
    again = read(folder)
    assert len(decoded) == len(again.x_train) + 4
    files = sorted((folder / "train/n01/images").iterdir())
    np.testing.assert_array_equal(again.x_train[: len(files)], np.stack([pixels(path) for path in files]))


def test_images_of_several_sides_are_kept_side_by_side(folder, decoded):
    for side in (64, 32, 64, 32):
        assert read(folder, side=side).x_train.shape == (9, 3, side, side)
    assert len(decoded) == 26


def truncate(cache):
    os.truncate(cache / "images.npy", 1000)


def lengthen(cache):
    with (cache / "images.npy").open("ab") as file:
        file.write(b"more")


def overwrite(cache):
    size = (cache / "images.npy").stat().st_size
    (cache / "images.npy").write_bytes(bytes(size))


def reshape(cache):
    """Write a file of the right size, entered in the index, but of another shape."""
    np.save(cache / "images.npy", np.zeros((13, 64, 3, 64), dtype=np.uint8))
    change_index(cache, images=image_cache._identity(cache / "images.npy"))


def change_index(cache, **changes):
    index = json.loads((cache / "index.json").read_text())
    (cache / "index.json").write_text(json.dumps(index | changes))


DAMAGES = {
    "truncated": truncate,
    "longer": lengthen,
    "overwritten": overwrite,
    "of another shape": reshape,
    "without images": lambda cache: (cache / "images.npy").unlink(),
    "without index": lambda cache: (cache / "index.json").unlink(),
    "index empty": lambda cache: (cache / "index.json").write_text(""),
    "index cut": lambda cache: os.truncate(cache / "index.json", 100),
    "index a list": lambda cache: (cache / "index.json").write_text("[]"),
    "index of nothing": lambda cache: (cache / "index.json").write_text("{}"),
    "index of another version": lambda cache: change_index(cache, version=0),
    "counts of nothing": lambda cache: change_index(cache, counts=[]),
    "counts of words": lambda cache: change_index(cache, counts="many"),
    "counts too large": lambda cache: change_index(cache, counts=[[10**30] * 256] * 3),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_cache_is_built_again(folder, decoded, damage):
    first = read(folder)
    x, counts = first.x_train.clone(), first.counts
    del first
    decoded.clear()
    damage(folder / "gyroscope-cache/tiny-imagenet-64")
    again = read(folder)
    assert len(decoded) == 13
    assert torch.equal(again.x_train, x)
    assert torch.equal(again.counts, counts)
    decoded.clear()
    assert torch.equal(read(folder).x_train, x)
    assert not decoded


def build_until_killed(_, folder, enough):
    def kill(done, total):
        if done >= enough:
            os.kill(os.getpid(), signal.SIGKILL)

    read(folder, on_progress=kill)


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal")
@pytest.mark.parametrize("done", [6, 13])
def test_a_build_that_is_killed_is_none_and_the_next_one_is_whole(folder, decoded, done):
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        forked.start(build_until_killed, folder, done)
    cache = folder / "gyroscope-cache/tiny-imagenet-64"
    assert (cache / "images.npy.part").exists()
    assert not (cache / "index.json").exists()
    found = read(folder)
    assert len(decoded) == 13
    np.testing.assert_array_equal(found.x_test[3], pixels(folder / "val/images/val_3.JPEG"))
    assert sorted(path.name for path in cache.iterdir()) == ["images.npy", "index.json", "run.lock"]


def test_a_script_without_a_guard_is_told_so_and_does_not_wait_for_itself(folder):
    script = folder / "unguarded.py"
    script.write_text(f"from gyroscope_lab.data.image_folder import *\nread_tiny_imagenet({str(folder)!r}, workers=2)")
    ended = subprocess.run([sys.executable, script], stderr=subprocess.PIPE, check=False)
    assert ended.returncode == 1
    said = ended.stderr.decode().splitlines()[-1]
    assert said.startswith("gyroscope_lab.errors.LabError: A process that decodes images ended")
    assert 'outside of `if __name__ == "__main__":`' in said


CHILDREN = """
import multiprocessing, os, signal, sys
from gyroscope_lab.data.image_folder import read_tiny_imagenet

def kill(done, total):
    if done:
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    read_tiny_imagenet(sys.argv[1], workers=2, on_progress=kill)
"""


def is_running(process):
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_the_processes_of_a_build_that_is_killed_end_with_it(folder):
    (folder / "killed.py").write_text(CHILDREN)
    ended = subprocess.run([sys.executable, folder / "killed.py", folder], stdout=subprocess.PIPE, check=False)
    children = ended.stdout.decode().split()
    assert ended.returncode == -signal.SIGKILL
    assert len(children) == 2
    for _ in range(600):
        if not any(map(is_running, children)):
            return
        time.sleep(0.05)
    pytest.fail(f"{children} are still running")


@pytest.mark.parametrize("step", [0, 1], ids=["before the images", "before the index"])
def test_a_build_that_fails_between_its_two_files_is_none(folder, monkeypatch, decoded, step):
    renamed, rename = [], os.replace

    def fail(*paths):
        if len(renamed) == step:
            raise OSError(28, "No space left on device")
        renamed.append(paths)
        rename(*paths)

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(LabError, match=r"cannot be written: No space left on device\. Set GYROSCOPE_CACHE to a folder"):
        read(folder)
    monkeypatch.undo()
    cache = folder / "gyroscope-cache/tiny-imagenet-64"
    assert sorted(path.name for path in cache.iterdir()) == ["images.npy", "run.lock"][1 - step :]
    np.testing.assert_array_equal(read(folder).x_train[0], pixels(folder / "train/n01/images/n01_0.JPEG"))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("forked_workers")
def test_what_the_progress_raises_ends_the_build(folder, workers):
    class StopError(Exception):
        pass

    def stop(done, total):
        if done:
            raise StopError

    with pytest.raises(StopError):
        read_tiny_imagenet(folder, workers=workers, on_progress=stop)
    cache = folder / "gyroscope-cache/tiny-imagenet-64"
    assert [path.name for path in cache.iterdir()] == ["run.lock"]


def test_one_builds_and_another_waits_for_it(folder, decoded, monkeypatch):
    """The second process finds the lock taken, and then the images."""
    lock = image_cache.Lock
    waited = []

    def taken(path):
        if not waited:
            monkeypatch.setattr(image_cache, "Lock", lock)
            read(folder)
            monkeypatch.setattr(image_cache, "Lock", taken)
            decoded.clear()
            waited.append(path)
            raise image_cache.HeldError("is being written by another writer")
        return lock(path)

    monkeypatch.setattr(image_cache, "Lock", taken)
    monkeypatch.setattr(image_cache, "_PATIENCE", 0)
    found = read(folder)
    assert len(waited) == 1
    assert not decoded
    np.testing.assert_array_equal(found.x_test[3], pixels(folder / "val/images/val_3.JPEG"))


@pytest.mark.parametrize(
    ("content", "workers"),
    [(None, 1), (None, 2), (b"", 1), (b"<html>not found</html>", 1)],
    ids=["cut", "cut, processes", "empty", "page"],
)
@pytest.mark.usefixtures("forked_workers")
def test_a_damaged_image_is_named_and_no_cache_is_left(folder, workers, content):
    path = folder / "train/n03/images/n03_1.JPEG"
    path.write_bytes(path.read_bytes()[:400] if content is None else content)
    with pytest.raises(LabError, match=rf"{path} cannot be read as an image \(.*\). Fetch it again"):
        read_tiny_imagenet(folder, workers=workers)
    assert [p.name for p in (folder / "gyroscope-cache/tiny-imagenet-64").iterdir()] == ["run.lock"]


def test_an_image_of_another_format_is_not_opened(folder):
    """Fewer decoders are safer."""
    path = folder / "train/n03/images/n03_1.JPEG"
    Image.new("RGB", (64, 64)).save(path, "TIFF")
    with pytest.raises(LabError, match=r"n03_1\.JPEG cannot be read as an image"):
        read(folder)


def test_an_image_of_more_pixels_than_memory_is_not_decoded(folder, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 64 - 1)
    with pytest.raises(LabError, match=r"JPEG cannot be read as an image \(Image size \(4096 pixels\) exceeds limit"):
        read(folder)


def test_an_image_that_is_a_line_is_not_scaled_to_more_pixels_than_memory(tmp_path):
    Image.new("L", (60_000, 1), 7).save(tmp_path / "line.JPEG")
    with pytest.raises(LabError, match=r"line.JPEG has 60000 × 1 pixels, too many once the shorter side has 64"):
        decode(tmp_path / "line.JPEG", side=64, short=64)


def test_images_that_do_not_fit_on_the_disk_are_not_begun(folder, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 13 * 3 * 64 * 64 - 1}))
    with pytest.raises(LabError, match=r"take 0\.0 GB, and .* has 0\.0 GB left. Free some space, set GYROSCOPE_CACHE"):
        read(folder)


def test_decoded_images_are_kept_elsewhere_if_the_environment_says_so(tmp_path, monkeypatch, decoded):
    one, two = tiny(tmp_path / "one"), tiny(tmp_path / "two", each=2)
    monkeypatch.setenv("GYROSCOPE_CACHE", str(tmp_path / "kept"))
    for _ in range(2):
        assert len(read(one).x_train) == 9
        assert len(read(two).x_train) == 6
    assert len(decoded) == 13 + 10
    assert not (one / "gyroscope-cache").exists()
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_a_folder_that_cannot_be_written_says_how_to_name_another(folder, monkeypatch):
    (folder / "file").write_text("in the way")
    monkeypatch.setenv("GYROSCOPE_CACHE", str(folder / "file"))
    with pytest.raises(LabError, match=r"cannot be written: Not a directory. Set GYROSCOPE_CACHE"):
        read(folder)


@pytest.mark.parametrize("size", [(80, 64), (64, 100), (64, 64), (333, 65), (65, 64)])
@pytest.mark.parametrize("side", [28, 56])
def test_the_middle_of_the_scaled_image_is_kept(tmp_path, size, side):
    """It equals torch's scaling within one level: both round, but at different points."""
    path = tmp_path / "a.JPEG"
    photograph(path, size)
    short = side * 8 // 7
    given = torch.tensor(pixels(path).astype(np.float32))[None]
    height, width = (round(length * short / min(size)) for length in given.shape[-2:])
    scaled = functional.interpolate(given, (height, width), mode="bilinear", antialias=True)[0].round()
    top, left = (height - side) // 2, (width - side) // 2
    middle = scaled[:, top : top + side, left : left + side].numpy()
    assert np.abs(decode(path, side=side, short=short) - middle).max() <= 1


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_gray_and_printing_colors_become_rgb(tmp_path, mode):
    photograph(tmp_path / "a.JPEG", mode=mode)
    photograph(tmp_path / "b.JPEG")
    with Image.open(tmp_path / "a.JPEG") as image:
        assert image.mode == mode
    found = decode(tmp_path / "a.JPEG", side=64, short=64).astype(int)
    original = decode(tmp_path / "b.JPEG", side=64, short=64).astype(int)
    assert found.shape == (3, 64, 64)
    if mode == "L":
        weights = np.array([0.299, 0.587, 0.114])
        np.testing.assert_allclose(found[0], np.tensordot(weights, original, 1), atol=8)
        assert (found == found[0]).all()
    else:
        np.testing.assert_allclose(found, original, atol=12)


def test_a_png_by_another_name_is_read(tmp_path):
    """ImageNet has one such file."""
    given = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(given).save(tmp_path / "a.JPEG", "PNG")
    np.testing.assert_array_equal(decode(tmp_path / "a.JPEG", side=64, short=64), given.transpose(2, 0, 1))


@pytest.mark.parametrize("within", ["", "imagenet", "ILSVRC2012"])
def test_imagenet_is_read_by_class(tmp_path, within):
    root = imagenet(tmp_path / within)
    found = read_imagenet(tmp_path, side=56, workers=1)
    assert found.y_train.tolist() == found.y_test.tolist() == [0, 0, 1, 1, 2, 2]
    assert found.classes == 3
    for part, x in (("train", found.x_train), ("val", found.x_test)):
        for number, name in enumerate(sorted(CLASSES)):
            for image in range(2):
                path = root / f"{part}/{name}/{name}_{image}.JPEG"
                np.testing.assert_array_equal(x[2 * number + image], decode(path, side=56, short=64))


@pytest.mark.parametrize(
    ("source", "side"),
    [(Source("imagenet"), 224), (Source("imagenet", side=28), 28), (Source("tiny-imagenet"), 64)],
    ids=["224", "28", "64"],
)
def test_a_source_has_a_side(tmp_path, source, side):
    (tiny if source.name == "tiny-imagenet" else imagenet)(tmp_path)
    assert source.load(tmp_path).x_test.shape[1:] == (3, side, side)


@pytest.mark.parametrize("source", [{"name": "mnist", "side": 28}, {"name": "imagenet", "side": 0}], ids=["mnist", "0"])
def test_a_side_of_what_has_none_is_refused(source):
    with pytest.raises(
        LabError, match=r"`side` must be a whole number ≥ 1 for tiny-imagenet, imagenet, and None for others"
    ):
        Source(**source)


@pytest.mark.parametrize("wrong", [{"side": 0}, {"workers": 0}, {"workers": -1}], ids=str)
def test_no_side_and_no_workers_are_refused(folder, wrong):
    with pytest.raises(LabError, match="`side` and `workers` must be ≥ 1"):
        read_tiny_imagenet(folder, **wrong)


@pytest.mark.parametrize("reader", [read_tiny_imagenet, read_imagenet], ids=["tiny", "imagenet"])
def test_an_empty_folder_is_told_what_was_looked_for_and_where(tmp_path, reader):
    with pytest.raises(LabError, match=rf"not in {tmp_path}: neither there nor in its .* are .*train, val side"):
        reader(tmp_path)


def test_imagenet_is_not_tiny_imagenet(folder):
    with pytest.raises(LabError, match="one folder of images per class, the same in both; there are 3 and 1"):
        read_imagenet(folder)


def test_a_val_that_is_not_sorted_into_classes_is_refused(tmp_path):
    imagenet(tmp_path)
    for name in CLASSES:
        for path in (tmp_path / "val" / name).iterdir():
            path.rename(tmp_path / "val" / path.name)
        (tmp_path / "val" / name).rmdir()
    with pytest.raises(LabError, match=r"there are 3 and 0\. Sort the images of val into such folders"):
        read_imagenet(tmp_path)


def without_images(folder):
    for path in (folder / "train/n02/images").iterdir():
        path.unlink()


def append(path, text):
    path.write_text(path.read_text() + text)


WRONGS = {
    "no images": (without_images, "There are no images (.JPEG) in {}/train/n02/images"),
    "no folder": (
        lambda folder: (folder / "train/n02").rename(folder / "gone"),
        "{}/train/n02/images cannot be read: No such file or directory",
    ),
    "a file for a folder": (
        lambda folder: ((folder / "train").rename(folder / "gone"), (folder / "train").touch()),
        "{}/train cannot be read: Not a directory. Unpack the dataset again",
    ),
    "unknown class": (
        lambda folder: (folder / "train/n77").mkdir(),
        "{0}/train has n77, a class that {0}/wnids.txt does not name",
    ),
    "no names": (lambda folder: (folder / "wnids.txt").write_text("\n"), "{}/wnids.txt is empty"),
    "no text": (lambda folder: (folder / "wnids.txt").write_bytes(b"\xff\xfe"), "{}/wnids.txt cannot be read"),
    "not annotated": (
        lambda folder: photograph(folder / "val/images/val_9.JPEG"),
        "The class of {0}/val/images/val_9.JPEG is not known: {0}/val/val_annotations.txt does not name it",
    ),
    "annotated and not there": (
        lambda folder: append(folder / "val/val_annotations.txt", "val_9.JPEG\tn01\t0\n"),
        "{0}/val/val_annotations.txt names val_9.JPEG, which is not in {0}/val/images",
    ),
    "annotated as nothing": (
        lambda folder: append(folder / "val/val_annotations.txt", "val_3.JPEG\n"),
        "The class of {0}/val/images/val_3.JPEG is not known: {0}/val/val_annotations.txt says '', which is not",
    ),
    "no annotations": (
        lambda folder: (folder / "val/val_annotations.txt").unlink(),
        "{}/val/val_annotations.txt cannot be read",
    ),
}


@pytest.mark.parametrize(("break_", "says"), WRONGS.values(), ids=WRONGS)
def test_a_folder_that_is_not_whole_is_refused_with_what_is_wrong(folder, break_, says):
    break_(folder)
    with pytest.raises(LabError) as error:
        read(folder)
    assert says.format(folder) in str(error.value)


def test_hidden_files_are_no_images(folder):
    (folder / "train/n01/images/._n01_0.JPEG").write_bytes(b"what an archive made on a Mac has beside each file")
    (folder / "train/.cache").mkdir()
    assert len(read(folder).x_train) == 9
