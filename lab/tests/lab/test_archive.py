import errno
import fcntl
import json
import threading
import time
from dataclasses import replace
from math import inf, isnan, nan

import pytest
import torch

import forked
import gyroscope
from gyroscope.control.rates import Rates
from gyroscope.errors import StoreError
from gyroscope_lab.engine.engine import run_trials
from gyroscope_lab.engine.run_one import run_one
from gyroscope_lab.errors import LabError
from gyroscope_lab.training import archive as module
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.training import RATES, WEIGHTS
from gyroscope_lab.training.trial import Trial
from lab import at_once
from lab.trainings import HELD

QUICK = replace(HELD, model="mlp-2x8", options=(("inputs", 64),)).lasting(1)
SGD = Trial(QUICK, Recipe("SGD", 0.1))
RECORDED = Recipe("RMSprop", 0.01, optimizer="rmsprop", records=True)
COPY = Trial(QUICK, Recipe("copy", 1.0, control="layca", copies=RECORDED))


def renamed(trial):
    return replace(trial, task=replace(trial.task, name="others"), recipe=replace(trial.recipe, name="mine"))


def test_what_is_not_there_has_no_result_and_nothing_is_written(tmp_path):
    archive = Archive(tmp_path / "archive")
    assert archive.result(SGD) is None
    assert archive.missing([SGD, SGD]) == [SGD]
    assert not archive.root.exists()


def test_a_result_is_found_under_other_names_and_what_is_changed_is_not(tmp_path):
    archive = Archive(tmp_path)
    result = run_one(SGD, archive)
    assert archive.result(SGD) == archive.result(renamed(SGD)) == result
    assert archive.folder(renamed(SGD)) == archive.folder(SGD) == tmp_path / "digits" / SGD.slug
    assert archive.result(replace(SGD, seed=1)) is None
    assert run_one(renamed(SGD), archive) == result
    assert len(list(tmp_path.glob("*/*/result.json"))) == 1


def test_an_archive_that_was_moved_or_renamed_is_the_same(tmp_path):
    result = run_one(SGD, Archive(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "there")
    folder = Archive(tmp_path / "there").folder(SGD)
    folder.rename(folder.with_name(f"renamed-{SGD.key[:8]}"))
    assert Archive(tmp_path / "there").result(SGD) == result


def test_nothing_is_run_twice(tmp_path):
    done = []
    trials = [SGD, renamed(SGD), SGD, replace(SGD, seed=1)]
    for _ in range(2):
        results = run_trials(trials, Archive(tmp_path), engine="serial", on_done=lambda trial, _: done.append(trial))
        assert results[0] == results[1] == results[2] != results[3]
    assert done == [SGD, replace(SGD, seed=1)]


def test_what_is_copied_comes_first_and_only_if_it_is_needed(tmp_path):
    archive = Archive(tmp_path)
    echo = replace(COPY, recipe=replace(COPY.recipe, copies=replace(COPY.recipe, records=True)))
    assert archive.missing([echo]) == [echo.source.source, echo.source, echo]
    assert archive.missing([COPY, SGD, COPY.source]) == [COPY.source, COPY, SGD]
    assert len(run_trials([echo], archive, engine="serial")) == 1
    assert archive.missing([echo, echo.source, COPY.source]) == []
    # A known trial does not need what it copied any more.
    (archive.folder(echo.source) / "result.json").unlink()
    assert archive.missing([echo]) == []
    assert archive.missing([echo.source]) == [echo.source]


def test_rates_to_copy_are_those_of_the_trial_that_is_copied(tmp_path):
    archive = Archive(tmp_path)
    run_trials([COPY], archive, engine="serial")
    assert archive.rates(SGD) is None
    there = Rates.load(archive.folder(COPY.source) / RATES)
    assert torch.equal(archive.rates(COPY).tangents, there.tangents)
    (archive.folder(COPY.source) / RATES).write_bytes(b"noise")
    with pytest.raises(LabError, match=rf"(?s){RATES} does not hold recorded rates.* to run RMSprop again"):
        archive.rates(COPY)


def test_rates_of_what_was_not_run_are_said_to_be_missing(tmp_path):
    with pytest.raises(LabError, match=r"copy copies the rates of RMSprop, which is not in .*\. Run that trial first"):
        run_one(COPY, Archive(tmp_path))


def test_rates_of_which_a_bit_has_changed_are_not_copied(tmp_path):
    archive = Archive(tmp_path)
    run_one(COPY.source, archive)
    path = archive.folder(COPY.source) / RATES
    whole, tangents = path.read_bytes(), archive.rates(COPY).tangents.numpy().tobytes()
    place = whole.index(tangents)
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(LabError, match=rf"{RATES} does not hold recorded rates: .*damaged.*Delete .* to run RMSprop"):
        archive.rates(COPY)


def test_weights_are_there_where_they_were_kept(tmp_path):
    archive, kept = Archive(tmp_path), replace(SGD, keeps=True)
    run_trials([SGD, kept], archive, engine="serial")
    weights = archive.weights(kept)
    assert weights["initial"].keys() == {"linear1.weight", "linear2.weight"}
    assert weights["tested"].keys() == SGD.network().state_dict().keys()
    with pytest.raises(LabError, match=rf"{WEIGHTS} does not exist\. Run the trial with keeps=True"):
        archive.weights(SGD)
    (archive.folder(kept) / WEIGHTS).write_bytes(b"noise")
    with pytest.raises(LabError, match=rf"{WEIGHTS} cannot be read .BadZipFile.* Delete its folder"):
        archive.weights(kept)


# Results that are no numbers, damaged, or another trial's.


def test_a_result_that_is_no_number_survives_being_kept(tmp_path):
    bad = Result(
        0.1,
        nan,
        loss=[2.0, nan, inf],
        layers=["a"],
        rotation=[[0.0], [nan]],
        norms=[[1.0], [inf]],
        ended="diverged: it",
    )
    path = tmp_path / "result.json"
    bad.write(path, {"seed": 0})
    text = path.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    read = Result.from_json(json.loads(text)["result"])
    assert isnan(read.test_accuracy)
    assert read.loss[0] == 2.0
    assert all(map(isnan, [*read.loss[1:], read.rotation[1][0], read.norms[1][0]]))
    assert read.diverged
    assert read.as_json() == bad.as_json()


def test_a_training_that_diverged_is_kept_and_not_run_again(tmp_path):
    wild = replace(SGD, recipe=Recipe("SGD", 1e30))
    first = run_one(wild, Archive(tmp_path))
    assert first.diverged
    again = run_one(wild, Archive(tmp_path), tell=pytest.fail)
    assert again.ended == first.ended


def without(key):
    def change(content):
        del content["result"][key]
        return json.dumps(content)

    return change


DAMAGES = {
    "empty": lambda content: "",
    "truncated": lambda content: json.dumps(content)[:-20],
    "no JSON": lambda content: "{result}",
    "no object": lambda content: "[1, 2]",
    "a number": lambda content: "3",
    "without a result": lambda content: json.dumps({"trial": content["trial"]}),
    "without a trial": lambda content: json.dumps({"result": content["result"]}),
    "without its accuracy": without("test_accuracy"),
    "without its curves": without("rotation"),
    "words for numbers": lambda content: json.dumps(content | {"result": content["result"] | {"loss": ["low"]}}),
    "a number for a curve": lambda content: json.dumps(content | {"result": content["result"] | {"rotation": 3}}),
    "a word for accuracy": lambda content: json.dumps(content | {"result": content["result"] | {"test_accuracy": "a"}}),
    "a list for a result": lambda content: json.dumps(content | {"result": [1]}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_result_is_refused_by_name_and_nothing_is_lost(damage, tmp_path):
    archive = Archive(tmp_path)
    result = run_one(SGD, archive)
    path = archive.folder(SGD) / "result.json"
    damaged = DAMAGES[damage](json.loads(path.read_text()))
    path.write_text(damaged)
    for act in (archive.result, lambda trial: run_one(trial, archive), lambda trial: archive.missing([trial])):
        with pytest.raises(LabError, match=rf"{path} .*\. Delete it to run the trial again"):
            act(SGD)
    assert path.read_text() == damaged
    with gyroscope.load(path.parent) as run:
        assert run.scalars["loss"].values.tolist() == result.loss
    path.unlink()
    assert run_one(SGD, archive) == result


def test_a_result_of_another_trial_is_not_taken_for_ones_own(tmp_path):
    archive, other = Archive(tmp_path), replace(SGD, seed=1)
    run_one(other, archive)
    archive.folder(other).rename(tmp_path / "digits" / SGD.slug)
    with pytest.raises(LabError, match=r"result\.json holds the result of another trial\. Move it elsewhere"):
        archive.result(SGD)


def test_a_result_that_cannot_be_read_is_said(tmp_path):
    path = Archive(tmp_path).folder(SGD) / "result.json"
    path.mkdir(parents=True)
    with pytest.raises(LabError, match=rf"{path} cannot be read .*directory"):
        Archive(tmp_path).result(SGD)


def test_an_archive_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match=rf"^SGD, seed 0: .*{tmp_path}/file"):
        run_one(SGD, Archive(tmp_path / "file"))


def test_a_full_disk_is_said_and_what_was_trained_is_kept(tmp_path):
    archive = Archive(tmp_path)
    folder = archive.folder(SGD)

    def fill(note):
        (folder / "result.new").symlink_to("/dev/full")

    with pytest.raises(LabError, match=r"^SGD, seed 0: .*No space left on device"):
        run_one(SGD, archive, tell=fill)
    assert archive.result(SGD) is None
    with gyroscope.load(folder) as run:
        assert len(run.scalars["loss"].values) == 1
    (folder / "result.new").unlink()
    assert run_one(SGD, archive) == run_one(SGD, Archive(tmp_path / "other"))


# Claims.


def test_who_claims_a_trial_holds_it_alone(tmp_path):
    archive = Archive(tmp_path)
    with archive.claimed(SGD) as folder:
        assert folder == archive.folder(SGD)
        with Archive(tmp_path).claimed_if_free(renamed(SGD)) as other:
            assert other is None
        with archive.claimed_if_free(replace(SGD, seed=1)) as other:
            assert other is not None
    with archive.claimed_if_free(SGD) as free:
        assert free == folder


def test_a_claim_is_free_again_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), Archive(tmp_path).claimed(SGD):
        raise ZeroDivisionError
    with Archive(tmp_path).claimed_if_free(SGD) as folder:
        assert folder is not None


def test_who_waits_for_a_trial_finds_its_result_and_does_not_train(tmp_path, monkeypatch):
    """Two processes begin the same trial at once: the second waits until the first has ended."""
    monkeypatch.setattr(module.time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.02)))
    archive, waits, trained = Archive(tmp_path), threading.Event(), []
    claimed = Archive.claimed

    def waiting(self, trial):
        return claimed(self, trial, on_wait=waits.set)

    def second():
        monkeypatch.setattr(Archive, "claimed", waiting)
        trained.append(run_one(SGD, Archive(tmp_path), tell=lambda note: trained.append(note)))

    with claimed(archive, SGD):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(30)
        assert trained == []
        result = run_one(SGD, Archive(tmp_path / "elsewhere"))
        folder = archive.folder(SGD)
        folder.mkdir(parents=True)
        result.write(folder / "result.json", SGD.description)
    thread.join()
    assert trained == [result]


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    root = tmp_path_factory.mktemp("processes")
    forked.start(at_once.begin, str(root))
    return root, json.loads((root / "told.json").read_text())


def test_two_processes_that_run_the_same_trial_at_once_run_it_once(processes):
    root, told = processes
    assert sorted(len(one["epochs"]) for one in told["pair"]) == [0, 30]
    assert told["pair"][0]["result"] == told["pair"][1]["result"]
    [folder] = (root / "shared" / "digits").iterdir()
    with gyroscope.load(folder) as run:
        assert len(run.attempts) == 1


def test_a_claim_of_a_process_that_was_killed_is_free_again(processes):
    _, told = processes
    assert not told["during"]
    assert told["after"]


def test_a_trial_cannot_be_claimed_where_there_are_no_file_locks(tmp_path, monkeypatch):
    """The claim is rejected; it does not wait for a lock that nobody holds."""

    def flock(file, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StoreError, match="without file locks"), Archive(tmp_path).claimed(SGD):
        pass
