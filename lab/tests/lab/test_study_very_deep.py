import json
import shutil
from dataclasses import replace
from math import isnan, log
from statistics import median

import numpy as np
import pytest
import torch

import gyroscope
from gyroscope.diagnosis import dominated, stalled
from gyroscope.diagnosis.standing_out import in_words
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.conditioning.by_depth import Network
from gyroscope_lab.papers.conditioning.very_deep import (
    STUDIES,
    Course,
    draw,
    of_depths,
    of_last_norm,
    of_preactivation,
    smoothed,
)
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.last_layer import FILE, Followed, followed
from gyroscope_lab.training.result import Result
from lab.made_lab import knowing

FIG6, FIG7, FIG9 = STUDIES
NAMES = ["figure 6", "figure 7", "figure 9"]
STEPS = 600


@pytest.fixture
def full(tmp_path):
    return Lab(Archive(tmp_path), "full")


def course(architecture="ResNet", depth=1202, *, stuck=300, large=900.0):
    """A loss that rises, stays at ln 10 for some steps from the 100th on, and falls; x is large, then small."""
    loss = np.where(np.arange(STEPS) < 100, np.linspace(3.0, 40.0, STEPS), 1.0)
    loss[100 : 100 + stuck] = log(10)
    x = np.full(STEPS, large)
    x[100 : 100 + stuck] = large / 1e4
    w = np.linspace(2.0, 20.0, STEPS)
    blank = np.ones(STEPS)
    followed = Followed(loss, blank, x, blank, large * blank, w if stuck else blank, blank)
    return Course(Network(architecture, depth), followed, Result(0.5, 0.4, [1.0], ["fc"], [[0.0]]))


def test_at_full_scale_the_first_2340_steps_are_followed_as_the_authors_trained(full):
    models = [[trial.task.model for trial in study.trials(full)] for study in STUDIES]
    assert models == [
        ["resnet-56", "resnet-110", "resnet-230", "resnet-1202"],
        ["resnet-1202", "resnet-lastbn-1202"],
        ["resnet-1202", "preresnet-1202", "preresnet-v1-1202"],
    ]
    for trial in (trial for study in STUDIES for trial in study.trials(full)):
        task, recipe, schedule = trial.task, trial.recipe, trial.schedule
        assert (trial.follows, trial.seed) == (True, 1)
        assert (schedule.batch, schedule.epochs * schedule.steps(50_000), schedule.milestones) == (128, 2340, [])
        assert (recipe.rate, recipe.momentum, recipe.nesterov, recipe.weight_decay) == (0.1, 0.9, True, 1e-4)
        assert (task.source.name, task.source.validation, task.decayed) == ("cifar-10", 0.0, "all")
        assert dict(task.options) == {"classifier_bias": False}
    assert FIG6.trials(full)[-1].key == FIG7.trials(full)[0].key == FIG9.trials(full)[0].key


def test_the_layer_that_is_followed_has_no_bias(lab):
    for trial in (trial for study in STUDIES for trial in study.trials(lab)):
        last = list(trial.network().modules())[-1]
        assert isinstance(last, torch.nn.Linear)
        assert last.bias is None


@pytest.mark.parametrize("study", STUDIES, ids=NAMES)
def test_the_table_has_the_numbers_that_were_followed(lab, study):
    [table] = study.run(lab).tables
    for row, trial in zip(table.rows, study.trials(lab), strict=True):
        kept = np.load(lab.archive.folder(lab.trial(trial)) / FILE)
        loss, x, w = (kept[name].tolist() for name in ("loss", "lambda_x", "weight_norm"))
        assert len(loss) == trial.schedule.epochs * trial.schedule.steps(200)
        assert row[3] == x.count(0)
        assert row[4:7] == pytest.approx((x[0], max(x), min(x)))
        assert row[7:10] == pytest.approx((max(kept["lambda_m"]), w[0], max(w)))
        assert row[10:] == pytest.approx((loss[0], max(loss), median(loss[-3:])))


def test_on_digits_deeper_networks_have_larger_inputs_and_the_deepest_alone_is_stuck(lab):
    report = FIG6.run(lab)
    assert [verdict.holds for verdict in report.verdicts] == [True] * 3 + [None] * 3 + [True, None]
    *shallow, deepest = report.tables[0].rows
    assert [row[2] for row in shallow] == [0, 0]
    its = np.load(lab.archive.folder(lab.trial(FIG6.trials(lab)[-1])) / FILE)
    since = len(its["loss"]) - deepest[2]
    guessing = np.median(its["loss"][since:])
    assert guessing == pytest.approx(log(10), rel=0.1)
    assert its["loss"][:since].max() > 2 * guessing
    assert its["lambda_x"][since:].max() < its["lambda_x"].max() / 10
    assert its["weight_norm"][since:].min() > 2 * its["weight_norm"][0]
    assert its["accuracy"][since:].mean() < 0.25


def test_on_digits_the_same_network_is_not_stuck_with_batch_normalization_before_its_last_layer(lab):
    assert [verdict.holds for verdict in FIG7.run(lab).verdicts] == [True, True, True, True, None]
    steady, smaller = FIG9.run(lab).verdicts[1:3]
    assert (steady.holds, smaller.holds) == (True, True)
    for study in (FIG7, FIG9):
        assert [row[2] > 0 for row in study.run(lab).tables[0].rows[:2]] == [True, False]


def test_smoothing_takes_the_median_around_each_step():
    values = np.random.default_rng(0).normal(size=40)
    values[7] = np.nan
    for step, found in enumerate(smoothed(values, 5)):
        around = [value for value in values[max(0, step - 2) : step + 3] if not isnan(value)]
        assert isnan(found) if step == 7 else found == pytest.approx(median(around))


def test_steps_at_the_loss_of_a_guess_are_counted():
    for stuck in (30, 300, STEPS - 100):
        one = course(stuck=stuck)
        assert (one.stuck, one.stall.since) == (stuck, 101)
        assert one.before == (pytest.approx(median(one.followed.loss[:13])), one.followed.loss[99])
    assert course(stuck=20).stall is None  # just passing by


def test_a_network_that_guesses_without_a_small_input_has_not_begun_to_learn():
    one = course(stuck=300)
    followed = replace(one.followed, lambda_x=np.full(STEPS, 10.0))
    assert replace(one, followed=followed).stall is None


def off(one, since, *, but=()):
    """The same course without input and gradient in the last layer from a step on, counted from 1, with exceptions."""
    where = (np.arange(1, STEPS + 1) >= since) & ~np.isin(np.arange(1, STEPS + 1), but)
    x, gradient = (np.where(where, 0.0, values) for values in (one.followed.lambda_x, one.followed.gradient_norm))
    return replace(one, followed=replace(one.followed, lambda_x=x, gradient_norm=gradient))


def test_a_network_without_gradients_to_the_end_is_dead_and_one_with_small_ones_is_dominated():
    forever = course(stuck=STEPS - 100)
    assert (forever.dead, forever.dominated) == (None, slice(100, STEPS))
    dead = off(forever, 301)
    assert (dead.dead, dead.dominated, dead.stuck) == (301, slice(100, 300), STEPS - 100)
    assert off(forever, 301, but=(400, 401, 500)).dead == 301  # an image gets through, now and then
    assert off(forever, 301, but=range(500, STEPS + 1)).dead is None
    assert off(forever, STEPS - 20).dead is None  # too little to tell
    nothing = replace(forever, followed=replace(forever.followed, gradient_norm=np.zeros(STEPS)))
    assert nothing.dead is None  # the gradient of a batch may vanish where its input does not


def test_a_network_that_learned_has_escaped_a_dead_one_has_not_and_is_undecided_while_anything_reaches_its_weights():
    moves = course(stuck=STEPS - 100)
    its = {"learned": course(stuck=300), "moves": moves, "dead": off(moves, 301)}
    its["nearly dead"] = off(moves, 301, but=(400, 401, 500))
    found = {name: of_depths([one], full=True)[-2:] for name, one in its.items()}
    assert {name: (stuck.holds, escapes.holds) for name, (stuck, escapes) in found.items()} == {
        "learned": (True, True), "moves": (True, None), "dead": (True, False), "nearly dead": (True, None),
    }  # fmt: skip
    told = "dead since step 301: x = 0 and ∂L/∂W = 0 in 300 of 300 batches; test accuracy 40.0 %"
    assert found["dead"][1].here == told
    assert of_depths([its["dead"]], full=False)[-1].holds is None
    at_once = of_depths([off(moves, 101)], full=True)[-2]
    assert (at_once.holds, at_once.here) == (False, "dead from step 101 on")  # no weight domination was seen


def test_steps_at_which_a_quantity_is_exactly_0_are_marked_below_the_logarithmic_axis():
    one = off(course(stuck=STEPS - 100), 301, but=(400,))
    figure = draw({"1202": one, "56": course(depth=56)}, heading="")
    marked = [[line for line in ax.lines if line.get_marker() == "|"] for ax in figure.axes]
    assert [len(rows) for rows in marked] == [0, 1, 0, 0]
    [row] = marked[1]
    assert row.get_xdata().tolist() == [step for step in range(301, STEPS + 1) if step != 400]
    assert 0 < row.get_ydata()[0] < one.followed.lambda_x[one.followed.lambda_x > 0].min()
    assert "exactly 0" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_courses_like_the_papers_show_what_it_says():
    depths = [course(depth=depth, large=10.0 * depth, stuck=depth // 3) for depth in (110, 230, 1202)]
    rising = [
        replace(one, followed=replace(one.followed, loss=one.followed.loss + bump(n), weight_norm=grown(n)))
        for n, one in enumerate(depths)
    ]
    assert [verdict.holds for verdict in of_depths(rising, full=True)] == [True] * 10
    steady = course("ResNet_LastBN", stuck=0, large=5.0)
    steady = replace(steady, followed=replace(steady.followed, loss=np.linspace(3.0, 0.5, STEPS)))
    assert [verdict.holds for verdict in of_last_norm([course(), steady], full=True)] == [True] * 5
    normal = replace(steady, network=Network("PreResNet", 1202))
    without = course("PreResNet_v1", stuck=100)
    assert [verdict.holds for verdict in of_preactivation([course(), normal, without], full=True)] == [True] * 5


def bump(height):
    """One step with a larger loss."""
    return np.where(np.arange(STEPS) == 50, 10.0 * height, 0.0)


def grown(by):
    return np.linspace(2.0, 20.0 + by, STEPS)


def test_courses_unlike_the_papers_are_said_to_be_so_at_full_scale_and_undecided_below():
    same = [course(depth=depth, stuck=0) for depth in (56, 110)]
    assert [verdict.holds for verdict in of_depths(same, full=True)] == [False] * 6
    assert [verdict.holds for verdict in of_depths(same, full=False)] == [False] * 3 + [None] * 3
    assert [verdict.holds for verdict in of_depths(same[:1], full=True)] == [None] * 4 + [False]
    plain, stuck = course(stuck=0), course("ResNet_LastBN", large=1000.0)
    assert [verdict.holds for verdict in of_last_norm([plain, stuck], full=True)] == [False] * 4
    assert of_last_norm([plain], full=True) == of_preactivation([plain, stuck], full=True) == []


def test_a_network_that_is_stuck_where_resnet_is_contradicts_the_paper_at_any_scale():
    longer = [course(), course("PreResNet"), course("PreResNet_v1", stuck=400)]
    assert [verdict.holds for verdict in of_preactivation(longer, full=False)[:2]] == [False, False]
    never = [course(stuck=0), course("PreResNet", stuck=0), course("PreResNet_v1", stuck=0)]
    assert [verdict.holds for verdict in of_preactivation(never, full=False)[:2]] == [None, None]


def test_the_report_tells_when_and_how_a_network_was_stuck():
    told, escaped = (verdict.here for verdict in of_depths([course()], full=True)[-2:])
    assert escaped == "at step 401; loss 1 in the end"
    assert "for 300 of 600 steps, from step 101, at a loss of 2.3" in told
    assert "λmax(Σx) fell from 900 to 0.09" in told


@pytest.mark.parametrize("study", STUDIES, ids=NAMES)
def test_the_figure_has_four_panels_with_logarithmic_axes_and_a_curve_of_each_network(lab, study):
    axes = study.run(lab).figures["figure"].axes
    assert [ax.get_title()[:3] for ax in axes] == ["(a)", "(b)", "(c)", "(d)"]
    trials = study.trials(lab)
    for quantity, ax in zip(("loss", "lambda_x", "lambda_m", "weight_norm"), axes, strict=True):
        assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
        for line, trial in zip(ax.lines, trials, strict=False):
            kept = np.load(lab.archive.folder(lab.trial(trial)) / FILE)[quantity]
            assert line.get_ydata().tolist() == kept.tolist()
            assert line.get_xdata().tolist() == list(range(1, len(kept) + 1))
    assert axes[0].lines[-1].get_ydata() == [log(10)] * 2


def test_saving_writes_the_figure_the_page_and_curves_over_steps(lab, tmp_path):
    names = {path.name for path in FIG6.save(lab, FIG6.run(lab), tmp_path)}
    assert names == {"figure.png", "figure.svg", "README.md", "result.json"}
    kept = json.loads((tmp_path / "conditioning/fig6/result.json").read_text())["numbers"]["courses"]
    assert [one["network"] for one in kept] == ["resnet-8", "resnet-20", "resnet-56"]
    whole = np.load(lab.archive.folder(lab.trial(FIG6.trials(lab)[2])) / FILE)["lambda_x"]
    at = np.array(kept[2]["at"])
    assert kept[2]["lambda_x"] == pytest.approx(whole[at - 1].tolist(), rel=1e-4)


def test_of_what_is_known_the_networks_whose_course_was_kept_are_shown(lab, tmp_path):
    trials = FIG6.trials(lab)[:2]
    known = knowing(lab, tmp_path, trials)
    with pytest.raises(LabError, match="known"):
        FIG6.run(known)
    first = lab.trial(trials[0])
    shutil.copy(lab.archive.folder(first) / FILE, known.archive.folder(first))
    report = FIG6.run(known)
    assert [row[0] for row in report.tables[0].rows] == ["ResNet, 8 layers"]
    assert report.verdicts[0].holds is None


@pytest.mark.parametrize(("model", "stalls"), [("resnet-56", True), ("resnet-lastbn-56", False)])
def test_a_residual_network_trained_as_in_the_paper_stalls_unless_its_last_input_is_normalized(lab, model, stalls):
    [trial] = [lab.trial(trial) for trial in FIG7.trials(lab) if trial.task.model == model]
    lab.run([trial])
    folder = lab.archive.folder(trial)
    course = followed(folder)
    with gyroscope.load(folder) as run:
        found, dominations, words = stalled(run), dominated(run), in_words(run)
    if not stalls:
        assert (found, dominations) == (None, [])
        assert "guess" not in words
        assert course.loss[-5:].max() < 1.0
        return
    assert found is not None
    assert found.layer == "classifier.weight"
    end = len(course) if found.until is None else found.until - 1
    assert np.median(course.loss[found.since - 1 : end]) == pytest.approx(log(10), rel=0.05)
    assert course.loss[: found.since].max() > 2 * log(10)  # it has risen before
    assert np.median(course.lambda_x[found.since - 1 : end]) < 0.1 * course.lambda_x.max()
    assert course.weight_norm[end - 1] > 4 * course.weight_norm[0]
    assert [(one.layer, one.since, one.stall) for one in dominations] == [("classifier.weight", found.since, found)]
    assert str(found) in words
