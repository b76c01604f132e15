import argparse
import json
import lzma
import os
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers import queue
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.trial import Trial

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
IMAGES = 30
KEPT = "c10-cnn1/sgd-3^-1-seed-0-89be0e81/result.json"


def loaded(name):
    sys.path.insert(0, str(TOOLS))
    try:
        loader = SourceFileLoader(name.removesuffix(".py"), str(TOOLS / name))
        module = module_from_spec(spec_from_loader(loader.name, loader))
        sys.modules[loader.name] = module  # dataclasses look for it there
        loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(TOOLS))


box_start = loaded("box_start.py")
pack_for_gpu = loaded("pack_for_gpu")


def photographs(many, labels=1, seed=0):
    """Records with smooth gradients and some noise, like photographs."""
    random = np.random.default_rng(seed)
    ramp = np.add.outer(np.arange(32), np.arange(32))[None, None] * random.uniform(0, 4, (many, 3, 1, 1))
    pixels = (ramp + random.integers(0, 9, (many, 3, 32, 32))).astype(np.uint8).reshape(many, 3072)
    return np.concatenate([random.integers(0, 10, (many, labels), dtype=np.uint8), pixels], axis=1).tobytes()


@pytest.fixture(scope="module", autouse=True)
def soon_compressed():
    """Compress the code less than is worthwhile for an upload, in a tenth of the time."""
    compress = lzma.compress
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lzma, "compress", lambda content, preset: compress(content, preset=0))
        yield


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """A folder with the queue, data and trainings of a sender, and its packs in `packs`."""
    folder = tmp_path_factory.mktemp("sender")
    data, kept = folder / "data" / "cifar-10-batches-bin", folder / "kept"
    data.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]):
        (data / name).write_bytes(photographs(IMAGES, seed=number))
    (kept / KEPT).parent.mkdir(parents=True)
    (kept / KEPT).write_bytes((ROOT / "results" / "runs" / KEPT).read_bytes())
    missing = queue.missing_trials(Lab(Archive(kept), scale="full"))
    first, second, third = [one for one in missing if one.trial.task.name == "c10-cnn1"][:3]
    another = next(one for one in missing if one.trial.task.name == "c100-resnet")
    queue.write([first, second, another], folder / "queue.md", kept=1)
    queue.write([first, third], folder / "changed.md", kept=1)
    unfinished = Archive(folder / "runs").folder(first.trial)
    unfinished.mkdir(parents=True)
    (unfinished / "checkpoint.pt").write_bytes(os.urandom(700_000))
    (unfinished / "run.sqlite").write_bytes(b"the run so far")
    (unfinished / "run.lock").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOLS)
        patch.setattr(sys, "argv", [str(TOOLS / "pack_for_gpu"), *arguments(folder, folder / "packs")])
        runpy.run_path(sys.argv[0], run_name="__main__")
    return folder


def arguments(folder, out):
    places = [f"--{name}={folder / name}" for name in ("data", "runs", "kept")]
    queued = f"--queue={folder / 'queue.md'}"
    return [str(out), *places, queued, "--tasks", "c10-cnn1", "--minutes", "3", "--limit-mib", "0.5"]


def started(folder, *given, python=sys.executable, **environment):
    command = ["bash", str(folder / "start.sh"), *map(str, given)]
    clean = {name: value for name, value in os.environ.items() if name not in ("OUT", "PYTHONPATH")}
    its = clean | {"PYTHON": str(python)} | environment
    return subprocess.run(command, cwd=folder, env=its, capture_output=True, text=True, check=False)


@pytest.fixture
def received(sent, tmp_path):
    """A copy of the uploaded files: the packs and start.sh, not the manifest."""
    for path in (sent / "packs").iterdir():
        if path.name != "manifest.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_the_tool_can_be_started_by_its_name():
    assert os.access(TOOLS / "pack_for_gpu", os.X_OK)
    assert (TOOLS / "pack_for_gpu").read_text().startswith("#!/usr/bin/env python3\n")


def test_packs_are_no_larger_than_the_limit_and_large_files_are_cut(sent):
    packs = sorted((sent / "packs").glob("*.tar"))
    assert max(path.stat().st_size for path in packs) <= 2**19
    assert {"pack-code-01.tar", "pack-code-02.tar", "pack-runs-01.tar", "pack-runs-02.tar"} <= {p.name for p in packs}


def test_the_manifest_lists_every_pack_and_file_with_its_checksum(sent):
    manifest = json.loads((sent / "packs" / "manifest.json").read_text())
    for pack in manifest["packs"]:
        content = (sent / "packs" / pack["name"]).read_bytes()
        assert (len(content), box_start.digest(content)) == (pack["size"], pack["sha256"])
    assert {pack["name"] for pack in manifest["packs"]} == {path.name for path in (sent / "packs").glob("*.tar")}
    files = {file["path"]: file["sha256"] for item in manifest["items"] for file in item["files"]}
    assert files["data/cifar-10-batches-bin/test_batch.bin"] == box_start.digest(photographs(IMAGES, seed=5))
    assert files["src/gyroscope/__init__.py"] == box_start.digest((ROOT / "src/gyroscope/__init__.py").read_bytes())
    assert not any("__pycache__" in path or path.endswith("run.lock") for path in files)


def test_all_packs_are_unpacked_as_they_were_and_the_command_is_run_from_there(sent, received):
    shown = started(received, "--dry-run", "--minutes", "5", "--out", "results here")
    assert shown.returncode == 0, shown.stderr
    work = received / "gyroscope-box"
    for name in ("data_batch_1.bin", "test_batch.bin"):
        within = f"data/cifar-10-batches-bin/{name}"
        assert (work / within).read_bytes() == (sent / within).read_bytes()
    assert (work / "results/runs" / KEPT).read_bytes() == (sent / "kept" / KEPT).read_bytes()
    [there] = (sent / "runs").glob("*/*")
    here = work / "runs/lab" / there.relative_to(sent / "runs")
    assert sorted(path.name for path in here.iterdir()) == ["checkpoint.pt", "run.sqlite"]
    assert all(path.read_bytes() == (there / path.name).read_bytes() for path in here.iterdir())
    command = shlex.split(shown.stdout.splitlines()[-1])
    assert command[:3] == ["cd", str(work), "&&"]
    assert command[5:8] == ["-m", "gyroscope_lab", "reproduce"]
    options = dict(zip(command[8::2], command[9::2], strict=True))
    assert 4 < float(options["--minutes"]) < 5
    assert (options["--data"], options["--runs"]) == ("data", "runs/lab")
    assert Path(options["--archive"]).parent == received / "results here"


def test_the_packed_code_and_queue_are_those_that_run(received):
    shown = started(received, "--dry-run")
    work = received / "gyroscope-box"
    [path] = [word for word in shlex.split(shown.stdout.splitlines()[-1]) if word.startswith("PYTHONPATH=")]
    environment = os.environ | {"PYTHONPATH": path.removeprefix("PYTHONPATH=")}
    read = "import gyroscope, gyroscope_lab; print(gyroscope.__file__, gyroscope_lab.__file__)"
    said = subprocess.check_output([sys.executable, "-c", read], cwd=work, env=environment, text=True)
    packages = "src/gyroscope", "lab/src/gyroscope_lab"
    assert said.split() == [str(work / package / "__init__.py") for package in packages]
    for package in packages:
        modules = sorted(path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py"))
        assert modules == sorted(path.relative_to(work) for path in (work / package).rglob("*.py"))
        assert all((work / module).read_bytes() == (ROOT / module).read_bytes() for module in modules)
    entries = queue.read(work / "results/queue.md", Lab(Archive(work / "results/runs"), scale="full"))
    assert [one.trial.task.name for one in entries] == ["c10-cnn1", "c10-cnn1"]


def test_the_command_replaces_start_and_its_status_is_returned(received):
    """Without a GPU, `gyroscope reproduce --minutes` says so, which shows that the packed command runs."""
    shown = started(received, "--minutes", "1", CUDA_VISIBLE_DEVICES="")
    assert shown.returncode != 0
    assert "`--minutes` trains side by side on a GPU" in shown.stderr


def test_start_refuses_to_run_while_a_pack_is_missing_and_names_it(received):
    (received / "pack-code-02.tar").unlink()
    (received / "pack-cifar-10-01.tar").unlink()
    shown = started(received)
    assert shown.returncode == 1
    assert "pack-code-02.tar is missing" in shown.stderr
    assert "pack-cifar-10-01.tar is missing" in shown.stderr
    assert "pack-code-01.tar" not in shown.stderr
    assert not (received / "gyroscope-box").exists()


@pytest.mark.parametrize("harm", ["a byte", "the end"])
def test_start_refuses_a_damaged_pack_and_names_it(received, harm):
    pack = received / "pack-cifar-10-01.tar"
    content = bytearray(pack.read_bytes())
    if harm == "a byte":
        content[len(content) // 2] ^= 1
    pack.write_bytes(content if harm == "a byte" else content[:-10_240])
    shown = started(received)
    assert shown.returncode == 1
    assert "pack-cifar-10-01.tar is damaged" in shown.stderr
    assert "is missing" not in shown.stderr
    assert not (received / "gyroscope-box").exists()


def test_packs_are_found_in_several_folders_and_a_whole_one_is_preferred(received):
    first, second = received / "first", received / "second"
    first.mkdir()
    second.mkdir()
    (received / "pack-code-01.tar").rename(first / "pack-code-01.tar")
    (first / "pack-cifar-10-01.tar").write_bytes(b"half of it")
    (received / "pack-cifar-10-01.tar").rename(second / "pack-cifar-10-01.tar")
    assert started(received, first, "--dry-run").returncode == 1
    assert started(received, first, second, "--dry-run").returncode == 0


def test_the_archive_goes_to_the_folder_that_the_environment_names(received):
    shown = started(received, "--dry-run", OUT=str(received / "given"))
    assert f"--archive {received / 'given'}/box-" in shown.stdout


def test_starting_again_keeps_what_trainings_have_saved_since_and_restores_the_rest(received):
    assert started(received, "--dry-run").returncode == 0
    work = received / "gyroscope-box"
    [checkpoint] = work.glob("runs/lab/*/*/checkpoint.pt")
    checkpoint.write_bytes(b"a later epoch")
    code, data = work / "src/gyroscope/__init__.py", work / "data/cifar-10-batches-bin/test_batch.bin"
    before = code.read_bytes(), data.read_bytes()
    code.write_bytes(b"")
    data.unlink()
    assert started(received, "--dry-run").returncode == 0
    assert checkpoint.read_bytes() == b"a later epoch"
    assert (code.read_bytes(), data.read_bytes()) == before


def test_unpacking_that_was_interrupted_is_completed(sent, received):
    assert started(received, "--dry-run").returncode == 0
    work = received / "gyroscope-box"
    (work / "unpacked").unlink()
    [run] = work.glob("runs/lab/*/*/run.sqlite")
    run.unlink()
    assert started(received, "--dry-run").returncode == 0
    assert run.read_bytes() == b"the run so far"


def test_no_time_left_is_said_before_anything_is_trained(received):
    shown = started(received, "--minutes", "0.0001")
    assert shown.returncode == 1
    assert "no time is left to train" in shown.stderr


def test_a_python_that_lacks_a_package_is_refused_with_its_name(received):
    bare = received / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    shown = started(received, python=bare)
    assert shown.returncode == 1
    assert "without torch, numpy" in shown.stderr


def test_packing_again_gives_the_same_data_packs(sent, tmp_path):
    pack_for_gpu.main([*arguments(sent, tmp_path), "--queue", str(sent / "changed.md")])
    before, after = ({path.name: path.read_bytes() for path in at.glob("*.tar")} for at in (sent / "packs", tmp_path))
    assert before["pack-cifar-10-01.tar"] == after["pack-cifar-10-01.tar"]
    assert before["pack-runs-01.tar"] == after["pack-runs-01.tar"]
    assert [before[name] != after[name] for name in sorted(before) if "code" in name][-1]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--data", "no/such/folder"], "must be a folder that holds cifar-10, got no/such/folder"),
        (["--minutes", "-1"], "`--minutes` must be a finite number > 0, got -1.0"),
        (["--limit-mib", "0.01"], "`--limit-mib` must be a number ≥ 0.04, got 0.01"),
        (["--studies", "rotation/none"], "has no such trial"),
        (["--queue", "no/such/queue.md"], "The queue no/such/queue.md cannot be read"),
    ],
)
def test_what_cannot_be_packed_is_refused_in_words(sent, tmp_path, more, said):
    with pytest.raises(SystemExit) as refused:
        pack_for_gpu.main([*arguments(sent, tmp_path / "out"), *more])
    assert said in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_not_written_to(sent):
    with pytest.raises(SystemExit, match="must be an empty folder or a new one"):
        pack_for_gpu.main(arguments(sent, sent / "packs"))


def test_rates_that_a_trial_copies_are_packed_and_other_finished_runs_are_not(tmp_path):
    recorded = Recipe("RMSprop", 0.01, optimizer="rmsprop", records=True)
    copy = Trial(task("digits"), Recipe("copy", 1.0, control="layca", copies=recorded))
    source, other = copy.source, replace(copy.source, seed=1)
    runs = Archive(tmp_path)
    for trial in (source, other):
        runs.folder(trial).mkdir(parents=True)
        for name in ("result.json", "rates.pt", "run.sqlite"):
            (runs.folder(trial) / name).write_text(name)
    folder = f"runs/lab/digits/{source.slug}"
    assert [item.name for item in pack_for_gpu.run_items([copy], runs)] == [
        f"{folder}/result.json",
        f"{folder}/rates.pt",
    ]


def test_a_text_is_found_under_both_of_its_names_and_packed(tmp_path):
    for folder, name in (
        (tmp_path / "one", "tinyshakespeare.txt"),
        (tmp_path / "two" / "tinyshakespeare", "input.txt"),
    ):
        folder.mkdir(parents=True)
        (folder / name).write_text("to be " * 1000)
    assert pack_for_gpu.data_files("shakespeare", tmp_path / "one") == [tmp_path / "one" / "tinyshakespeare.txt"]
    [path] = pack_for_gpu.data_files("shakespeare", tmp_path / "two")
    item = pack_for_gpu.data_item("shakespeare", path, argparse.Namespace(data=tmp_path / "two", codec="small"))
    assert (item.name, item.coding) == ("data/tinyshakespeare/input.txt", "xz")
    assert lzma.decompress(item.content).decode() == "to be " * 1000
    with pytest.raises(pack_for_gpu.LabError, match="gyroscope data get shakespeare"):
        pack_for_gpu.data_files("shakespeare", tmp_path)


def test_the_trials_of_twice_the_minutes_are_prepared_for():
    trial = Trial(task("digits"), Recipe("SGD", 0.1))
    entries = [queue.Entry(replace(trial, seed=i), 60.0, ("a",), "b") for i in range(9)]
    assert len(pack_for_gpu.in_time(entries, 2)) == 5


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(st.integers(0, 5), st.integers(1, 2), st.data())
def test_images_are_packed_without_loss(many, labels, data):
    size = many * (labels + 3072)
    smooth, seed = data.draw(st.booleans()), data.draw(st.integers(0, 99))
    content = photographs(many, labels, seed) if smooth else np.random.default_rng(seed).bytes(size)
    assert len(content) == size
    assert box_start.decode_images(box_start.encode_images(content, labels)) == content


@pytest.mark.parametrize("value", [0, 127, 128, 255])
def test_extreme_images_are_packed_without_loss(value):
    striped = np.zeros((3, 3073), dtype=np.uint8)
    striped[:, ::2] = value
    content = striped.tobytes()
    assert box_start.decode_images(box_start.encode_images(content, 1)) == content


def test_images_are_packed_in_blocks(monkeypatch):
    monkeypatch.setattr(box_start, "BLOCK", 4)
    content = photographs(10, labels=2)
    assert box_start.decode_images(box_start.encode_images(content, 2)) == content


def test_smooth_images_become_small():
    content = photographs(500)
    assert len(box_start.encode_images(content, 1)) < 0.6 * len(content)
