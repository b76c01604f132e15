from dataclasses import replace

import pytest

from gyroscope_lab.engine import laboratory as module
from gyroscope_lab.engine.laboratory import EXTRA_SEEDS, SCALES, Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.catalogue import study as study_called
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.tasks import TASKS, task
from gyroscope_lab.training.training import train
from gyroscope_lab.training.trial import Trial
from lab.made_lab import made
from lab.trainings import HELD

QUICK = replace(HELD, model="mlp-2x8", options=(("inputs", 64),)).lasting(1)
TRIALS = [Trial(QUICK, Recipe("SGD", 0.1), seed) for seed in range(3)]


def lab(folder, scale="smoke", **options):
    return Lab(Archive(folder), scale, **({"engine": "serial"} | options))


@pytest.mark.parametrize("name", TASKS)
def test_at_full_scale_a_task_is_itself(name, tmp_path):
    assert lab(tmp_path, "full").task(name) is TASKS[name]


@pytest.mark.parametrize("name", TASKS)
def test_below_full_scale_digits_stand_in_and_for_digits_nothing_does(name, tmp_path):
    small, smoke = lab(tmp_path, "small").task(name), lab(tmp_path, "smoke").task(name)
    assert small.source.name == smoke.source.name == "digits"
    assert small is TASKS[small.name]
    assert smoke == small.lasting(round(small.schedule.epochs / 4))
    if name.startswith("digits"):
        assert small.name == name


def test_what_stands_in_is_of_the_same_kind(tmp_path):
    kinds = {name: lab(tmp_path, "small").task(name).name for name in TASKS if not name.startswith("digits")}
    assert kinds.pop("c10-resnet110") == "digits-resnet"
    assert kinds.pop("c10-deep") == kinds.pop("c100-deep") == "digits-deep"
    assert kinds.pop("mnist-mlp") == "digits-mlp"
    assert kinds.pop("mnist-one-layer") == "digits-one-layer"
    assert set(kinds.values()) == {"digits"}


def test_seeds_are_one_but_where_networks_are_too_small_for_one_to_tell(tmp_path):
    assert {scale: len(lab(tmp_path, scale).seeds) for scale in SCALES} == {"smoke": 1, "small": 3, "full": 1}


def test_kept_seeds_of_a_full_scale_configuration_are_used_and_not_missed(tmp_path):
    study = study_called("rotation/fig12")
    known = lab(tmp_path, "full", known=True, only=("c10-cnn1",), precision="bf16")
    assert (list(known.seeds), list(EXTRA_SEEDS)) == ([0, 1, 2], [1, 2])
    lars, best = study.trials(replace(known, known=False))
    tests = {0: 0.88, 1: 0.89, 2: 0.90}
    for trial in (lars, *(replace(best, seed=seed) for seed in tests)):
        one = known.trial(trial)
        known.archive.folder(one).mkdir(parents=True)
        made(one, test=tests[one.seed]).write(known.archive.folder(one) / "result.json", one.description)
    assert study.not_trained(known) == []
    single, several = study.run(known).numbers["cells"]
    assert (single["test"], single["test_std"]) == (pytest.approx(88.0), None)
    assert (several["test"], several["test_std"]) == (pytest.approx(89.0), pytest.approx(1.0))
    assert "Shown in part" not in study.page(known, study.run(known))


def kept(lab, trials, **options):
    for one in map(lab.trial, trials):
        lab.archive.folder(one).mkdir(parents=True)
        made(one, **options).write(lab.archive.folder(one) / "result.json", one.description)


def test_a_verdict_over_trainings_that_are_missing_is_undecided(tmp_path):
    """On a task whose trainings are all there it is decided, and about all tasks it is not."""
    study = study_called("rotation/fig9")
    known = lab(tmp_path, "full", known=True, precision="bf16")
    wanted = study.trials(replace(known, known=False))
    rates = [one for one in wanted if one.task.name == "c10-cnn1" and not one.recipe.alpha]
    kept(known, rates)
    kept(known, [one for one in wanted if one.task.name == "c100-resnet" and one.recipe.rate < 0.1])
    [said] = study.run(known).verdicts
    assert (said.says[:9], said.word) == ("c10-cnn1:", "not shown")
    assert "missing" not in said.here
    [skewed, *_] = [one for one in wanted if one.task.name == "c10-cnn1" and one.recipe.alpha]
    kept(known, [skewed])
    assert study.run(known).verdicts == (said,)
    table = study_called("rotation/table6")
    asked = replace(known, only=("c10-cnn1",))
    kept(known, table.trials(replace(asked, known=False)))
    [said] = table.run(asked).verdicts
    assert (said.here, said.word) == ("2 of 2 (8 of 10 trainings are missing)", "undecided")
    assert table.conclude(asked).verdicts[0].holds is True


def test_those_tasks_are_taken_that_were_asked_for(tmp_path):
    names = ["c10-cnn1", "c100-resnet", "tiny-cnn"]
    chosen = lab(tmp_path, "full", only=("tiny-cnn", "c10-cnn1")).tasks(names)
    assert [one.name for one in chosen] == ["c10-cnn1", "tiny-cnn"]
    assert [one.name for one in lab(tmp_path, "full").tasks(names)] == names
    assert len(lab(tmp_path, "small").tasks(names)) == 1
    with pytest.raises(
        LabError, match=r"`only` must name tasks of this study \(c10-cnn1, c100-resnet, tiny-cnn\), got c100-wrn"
    ):
        lab(tmp_path, "full", only=("c100-wrn",)).tasks(names)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"scale": "large"}, "`scale` must be one of 'smoke', 'small', 'full', got 'large'"),
        ({"only": ("c10-cnn9",)}, "The task must be one of c10-cnn1, c10-cnn1-li.*e-layer, got 'c10-cnn9'"),
    ],
    ids=["scale", "task"],
)
def test_a_laboratory_that_cannot_be_is_refused(tmp_path, given, says):
    with pytest.raises(LabError, match=says):
        lab(tmp_path, **given)


def test_the_precision_is_the_laboratorys_or_the_tasks_or_what_suits_the_machine(tmp_path, monkeypatch):
    exact = replace(TRIALS[0], task=replace(QUICK, precision="tf32"))
    for gpu, suited in ((False, "float32"), (True, "bf16")):
        monkeypatch.setattr(module.torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert lab(tmp_path, engine="auto").trial(TRIALS[0]) == replace(TRIALS[0], precision=suited)
        assert lab(tmp_path, engine="workers").trial(TRIALS[0]) == replace(TRIALS[0], precision="float32")
        assert lab(tmp_path).trial(exact) == replace(exact, precision="tf32")
        assert lab(tmp_path, "full", known=True).trial(TRIALS[0]) == replace(TRIALS[0], precision="bf16")
        assert lab(tmp_path, "full", known=True).trial(exact) == replace(exact, precision="tf32")
        for trial in (TRIALS[0], exact):
            other = "bf16" if suited == "float32" else "float32"
            assert lab(tmp_path, precision=other).trial(trial) == replace(trial, precision=other)
    with pytest.raises(LabError, match="`precision` must be one of 'float32', 'tf32', 'bf16', got 'fp8'"):
        lab(tmp_path, precision="fp8").run(TRIALS)


def test_only_what_is_not_known_is_run_and_told_of(tmp_path):
    begun, noted, done = [], [], []
    told = {
        "on_begin": lambda trials: begun.append(list(trials)),
        "on_note": lambda note: noted.append((note.key, note.epoch, note.epochs)),
        "on_done": lambda trial, result: done.append(trial),
    }
    here = lab(tmp_path, precision="float32", **told)
    first = here.run(TRIALS[:1])
    assert first == [train(TRIALS[0], QUICK.source.load())]
    assert here.run(TRIALS)[0] == first[0]
    assert here.run(TRIALS) == here.run(TRIALS)
    assert begun == [TRIALS[:1], TRIALS[1:]]
    assert done == TRIALS
    assert noted == [(trial.key, 1, 1) for trial in TRIALS]


def test_trials_that_are_known_are_concluded_from_and_others_are_not_run(tmp_path):
    lab(tmp_path, precision="float32").run(TRIALS[:2])
    known = lab(tmp_path, precision="float32", known=True, on_begin=pytest.fail)
    assert known.held(TRIALS) == TRIALS[:2]
    assert len(known.run(TRIALS[:2])) == 2
    with pytest.raises(
        LabError, match=rf"1 of the 3 trainings that the study needs are not in {tmp_path}, such as {TRIALS[2].slug}"
    ):
        known.run(TRIALS)
    assert lab(tmp_path).held(TRIALS) == TRIALS


def test_how_trials_are_run_is_passed_on(tmp_path):
    with pytest.raises(LabError, match="`engine` must be one of auto, serial, workers, population, ray, got 'gpu'"):
        lab(tmp_path, engine="gpu").run(TRIALS)
    with pytest.raises(LabError, match="`jobs` must be a whole number ≥ 1, got 0"):
        lab(tmp_path, jobs=0).run(TRIALS)
    with pytest.raises(LabError, match=rf"(?s){tmp_path}/nowhere"):
        lab(tmp_path, "full", data=tmp_path / "nowhere").run([Trial(task("c10-cnn1"), Recipe("SGD", 0.1))])


def test_studies_that_train_nothing_run_nothing(tmp_path):
    assert lab(tmp_path / "archive", on_begin=pytest.fail).run([]) == []
    assert not (tmp_path / "archive").exists()
