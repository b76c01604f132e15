import json
from math import inf

import pytest

import gyroscope
from gyroscope.control import presets
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.beyond import no_tuning
from gyroscope_lab.papers.beyond.no_tuning import MOVES, STUDIES, fixed, grids, trials, tune
from gyroscope_lab.papers.beyond.problems import GPT, PROBLEMS, SEEDS, UNSEEN, problems, warmed
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from lab.made_lab import MadeLab, raw

STUDY, UNSEEN_STUDY = STUDIES
PACKAGES = ("schedule-free", "prodigy")


def made(*, test=0.9, loss=2.0):
    return Result(1.0, test, loss=[1.0], layers=["a"], rotation=[[0.0], [0.1]], test_losses=[loss + 0.1, loss])


class Made(MadeLab):
    """A laboratory whose results are made up; a class of its own, since `held` asks an archive."""

    def held(self, trials):
        return list(trials)


def lab_of(folder, make, scale="small"):
    return Made(Archive(folder), scale, make=make)


@pytest.mark.parametrize(("scale", "count"), [("smoke", 4), ("small", 6), ("full", 7)])
def test_every_problem_is_trained_once_per_scale(tmp_path, scale, count):
    lab = Lab(Archive(tmp_path), scale)
    found = problems(lab)
    assert len(found) == len({one.at(lab) for one in found}) == count
    assert len({trial.key for trial in trials(lab)}) == len(trials(lab))


def test_at_full_scale_the_problems_are_those_that_were_promised():
    names = [one.full.model for one in PROBLEMS]
    assert names == ["digits-cnn", "c10-cnn1", "resnet-32", "resnet-56", "vit-small", "gpt-small", "lstm-small"]
    augmented = [one.name for one in PROBLEMS if one.full.augmentation is not None]
    assert augmented == ["ResNet-56", "ViT"]
    assert all(one.full.schedule.cosine and one.full.test_loss and one.full.tests == "last" for one in PROBLEMS)


def test_presets_are_those_of_the_library_on_every_problem(tmp_path):
    lab = Lab(Archive(tmp_path), "full")
    for problem in problems(lab):
        ours = [recipe for _, recipe in fixed(lab, problem) if recipe.optimizer == "steer"]
        names = ("sgd", "adamw") if problem.convolutional else ("adamw", "muon")
        network = problem.full.network(0)
        assert {dict(one.options)["inner"]: one.rate for one in ours} == {
            name: gyroscope.steer(network, name).param_groups[0]["lr"] for name in names
        }
        assert all(len(one.options) == 1 for one in ours)
    gpt = next(recipe for _, recipe in fixed(lab, GPT) if recipe.name.startswith("steer adamw"))
    assert gpt.rate == pytest.approx(0.028 / 3**0.75)  # width 384


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_the_preset_is_what_the_library_takes(problem):
    preset = presets.PRESETS[problem.preset]
    optimizer = gyroscope.steer(problem.small.network(0))
    assert optimizer.param_groups[0]["lr"] == preset.rate
    assert f"Layca over {preset.inner}" in str(optimizer)


def test_headline_cells_have_all_seeds_and_steering_has_no_warm_up(tmp_path):
    lab = Lab(Archive(tmp_path), "small")
    for problem in problems(lab):
        for task, recipe in fixed(lab, problem):
            seeds = [one.seed for one in trials(lab) if (one.task, one.recipe) == (task, recipe)]
            assert seeds == list(range(SEEDS["small"]))
            own = recipe.optimizer in ("steer", *PACKAGES)
            assert task.schedule.warmup == (0.0 if own else pytest.approx(0.05 * task.schedule.epochs))


def by_rate(best_rate, best_decay):
    """Losses of a text that grow with the distance from the best rate and decay, in powers."""

    def make(trial):
        recipe = trial.recipe
        away = max(recipe.rate / best_rate, best_rate / recipe.rate)
        away *= max(recipe.weight_decay / best_decay, best_decay / recipe.weight_decay)
        return made(loss=1.0 + 0.1 * away)

    return make


@pytest.mark.parametrize(("rate", "decay"), [(3e-3, 0.1), (3e-2, 0.1), (1e-3 / 3, 0.001)])
def test_a_grid_is_extended_until_its_best_lies_inside(tmp_path, rate, decay):
    lab = lab_of(tmp_path, by_rate(rate, decay))
    task = warmed(GPT.at(lab))
    tuned = tune(lab, task, grids(lab, GPT)[1])
    assert tuned.cell.recipe.rate == pytest.approx(rate)
    assert tuned.cell.recipe.weight_decay == pytest.approx(decay)
    assert tuned.inside
    assert len(tuned.cell.results) == SEEDS["small"]
    assert len(tuned.tried) >= 9 + (rate != 3e-3)


def test_a_grid_that_never_ends_is_said_to_end_at_an_edge(tmp_path):
    lab = lab_of(tmp_path, by_rate(1e9, 0.1))
    tuned = tune(lab, warmed(GPT.at(lab)), grids(lab, GPT)[1])
    assert not tuned.inside
    assert len(tuned.tried) <= 9 + 4 * MOVES


def test_decays_that_have_no_effect_are_not_tried(tmp_path):
    lab = lab_of(tmp_path, by_rate(3**-1, 1e-12))
    tuned = tune(lab, warmed(GPT.at(lab)), grids(lab, GPT)[0])
    assert min(decay for _, decay in tuned.tried) == pytest.approx(5e-6)
    assert tuned.inside


def test_of_equal_scores_the_one_with_the_least_decay_is_the_best(tmp_path):
    lab = lab_of(tmp_path, lambda trial: made(loss=2.0 + (trial.recipe.weight_decay > 0.5)))
    tuned = tune(lab, warmed(GPT.at(lab)), grids(lab, GPT)[1])
    assert tuned.cell.recipe.weight_decay == min(decay for _, decay in tuned.tried)


def test_a_training_that_diverges_is_never_the_best(tmp_path):
    lab = lab_of(tmp_path, lambda trial: made(loss=float("nan") if trial.recipe.rate > 2e-3 else 3.0))
    tuned = tune(lab, warmed(GPT.at(lab)), grids(lab, GPT)[1])
    assert tuned.cell.recipe.rate < 2e-3
    assert max(tuned.tried.values()) == inf


def with_gap(*, points, nats):
    """Results in which steering is ahead of all else by these, and behind where they are negative."""

    def make(trial):
        ahead = trial.recipe.optimizer == "steer"
        return made(test=0.9 + ahead * points / 100, loss=2.0 - ahead * nats)

    return make


@pytest.mark.parametrize(
    ("points", "nats", "expected"),
    [
        (0.2, 0.005, [True, True, True]),
        (-0.4, -0.005, [True, False, False]),
        (-0.6, 0.1, [False, False, False]),
        (0.6, -0.02, [False, True, False]),
    ],
    ids=["ahead", "close", "behind on images", "behind on texts"],
)
def test_verdicts_turn_with_the_numbers(tmp_path, points, nats, expected):
    report = STUDY.conclude(lab_of(tmp_path, with_gap(points=points, nats=nats)))
    assert [verdict.holds for verdict in report.verdicts] == expected


@pytest.mark.parametrize(
    ("points", "nats", "noise", "expected"),
    [
        (0.4, 0.008, 0.05, [True, True, True]),
        (0.4, 0.008, 1.0, [None, None, None]),
        (-0.7, -0.014, 0.05, [False, False, False]),
        (-0.7, -0.014, 1.0, [None, None, None]),
    ],
    ids=["ahead", "ahead by chance", "behind", "behind by chance"],
)
def test_gaps_that_seeds_could_turn_decide_nothing(tmp_path, points, nats, noise, expected):
    """The best and steering differ from seed to seed in opposite directions."""

    def make(trial):
        side = (-1) ** trial.seed * noise * (1 if trial.recipe.optimizer == "steer" else -1)
        ahead = trial.recipe.optimizer == "steer"
        return made(test=0.8 + (ahead * points + side) / 100, loss=2.0 - ahead * nats - side / 50)

    report = STUDY.conclude(lab_of(tmp_path, make))
    assert [verdict.holds for verdict in report.verdicts] == expected


def test_unseen_problems_share_neither_data_nor_tasks_with_those_that_presets_were_chosen_on(tmp_path):
    lab = Lab(Archive(tmp_path), "small")
    seen = {problem.at(lab) for problem in PROBLEMS}
    assert {problem.at(lab).source.name for problem in UNSEEN}.isdisjoint({task.source.name for task in seen})
    assert {trial.task.name for trial in UNSEEN_STUDY.trials(lab)}.isdisjoint({task.name for task in seen})
    full = Lab(Archive(tmp_path), "full")
    assert UNSEEN_STUDY.trials(full) == []
    with pytest.raises(LabError, match="no full scale"):
        UNSEEN_STUDY.conclude(full)


def test_unseen_problems_are_judged_as_the_others_are(tmp_path):
    report = UNSEEN_STUDY.conclude(lab_of(tmp_path, with_gap(points=0.2, nats=0.0)))
    assert [verdict.holds for verdict in report.verdicts] == [True, True, True]
    assert [table.title.split(":")[0] for table in report.tables] == [problem.name for problem in UNSEEN]
    worse = UNSEEN_STUDY.conclude(lab_of(tmp_path, with_gap(points=-0.6, nats=0.0)))
    assert [verdict.holds for verdict in worse.verdicts] == [False, False, False]


def test_a_smoke_test_decides_nothing_and_has_the_numbers_of_the_archive(lab, tmp_path):
    for package in ("schedulefree", "prodigyopt"):
        pytest.importorskip(package)
    report = STUDY.run(lab)
    assert {verdict.holds for verdict in report.verdicts} == {None}
    first = next(cell for cell in report.numbers["cells"] if cell["recipe"] == "steer sgd")
    trial = next(one for one in trials(lab) if one.recipe.name == "steer sgd")
    assert first["seeds"][0]["test"] == raw(lab, trial)["test_accuracy"]
    assert first["seeds"][0]["best_test_loss"] == min(raw(lab, trial)["test_losses"])
    names = {path.name for path in STUDY.save(lab, report, tmp_path)}
    assert names == {"README.md", "result.json", "figure.png", "figure.svg"}
    kept = json.loads((tmp_path / STUDY.name / "result.json").read_text())
    assert len(kept["numbers"]["grids"]) == 4 * 4


def test_the_table_has_best_and_final_losses_and_where_a_grid_ends(tmp_path):
    report = no_tuning.conclude(lab_of(tmp_path, with_gap(points=1.0, nats=0.1)))
    table = next(one for one in report.tables if one.title.startswith("LSTM"))
    row = next(row for row in table.rows if row[0] == "steer muon")
    assert row[3:6] == ("1.900", "1.900", "-0.100")
    assert row[-1] == SEEDS["small"]


def test_a_problem_is_left_out_until_its_preset_is_known_and_verdicts_wait_for_seeds(tmp_path):
    make = with_gap(points=0.2, nats=0.005)

    class Partly(Made):
        """Has no training of the preset for the GPT, and one seed of everything else."""

        def held(self, trials):
            text = GPT.small
            return [t for t in trials if t.seed == 0 and (t.task != text or t.recipe.name != "steer muon")]

    lab = Partly(Archive(tmp_path), "small", make=make)
    assert GPT not in [line.problem for line in no_tuning.compared(lab)]
    assert [verdict.holds for verdict in STUDY.conclude(lab).verdicts] == [None, None, None]
