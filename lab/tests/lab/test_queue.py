from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.beyond import transfer
from gyroscope_lab.papers.catalogue import studies
from gyroscope_lab.papers.queue import GROUPS, missing_trials, read, write
from gyroscope_lab.papers.rotation.recipes import adapt_copy, lars, layca, sgd
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.trial import Trial
from lab.made_lab import made

QUEUE = Path(__file__).parents[3] / "results" / "queue.md"
CNN1, RESNET = task("c10-cnn1"), task("c100-resnet")
BEST = Trial(CNN1, layca(-3), precision="bf16")
RARE = Trial(RESNET, sgd(RESNET, -3), precision="bf16")  # few studies use it
OPEN = Trial(RESNET, lars(-3), precision="bf16")  # few studies too, but one seed decides nothing
COPIES = {one.name: Trial(*adapt_copy(one), precision="bf16") for one in (CNN1, RESNET)}
KEPT = [BEST, RARE, OPEN, COPIES["c10-cnn1"].source, COPIES["c100-resnet"].source]


def keep(archive, trial, *, rates=False):
    folder = archive.folder(trial)
    folder.mkdir(parents=True)
    made(trial).write(folder / "result.json", trial.description)
    if rates:
        (folder / "rates.pt").touch()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A laboratory with three trainings, and with AdaptCopy's sources, one of which has its rates."""
    archive = Archive(tmp_path_factory.mktemp("kept"))
    for one in KEPT:
        keep(archive, one, rates=one == COPIES["c100-resnet"].source)
    return Lab(archive, "full")


@pytest.fixture(scope="module")
def entries(lab):
    return missing_trials(lab)


@pytest.fixture
def queue(entries, tmp_path):
    write(entries, tmp_path / "queue.md", kept=len(KEPT))
    return tmp_path / "queue.md"


def place(entries, trial):
    return [one.trial.key for one in entries].index(trial.key)


def test_the_queue_has_every_trial_of_the_studies_that_is_not_kept_once(lab, entries):
    wanted = {
        replace(trial, precision=trial.task.precision or "bf16").key: name
        for name, study in studies().items()
        for trial in study.trials(lab)
    }
    listed = [one.trial.key for one in entries]
    assert len(set(listed)) == len(listed)
    kept = {trial.key for trial in KEPT}
    assert set(wanted) - set(listed) == kept - {COPIES["c10-cnn1"].source.key}  # whose rates are to be made again
    for one in entries:
        if one.trial.key in wanted:
            assert wanted[one.trial.key] in one.studies


def test_groups_come_in_the_order_of_value_and_each_stands_together(entries):
    titles = [title for title, _ in groupby(one.group for one in entries)]
    assert len(set(titles)) == len(titles)
    assert titles[: len(GROUPS)] == [one.title for one in GROUPS]
    assert titles[-1].startswith("Trainings on Tiny ImageNet and ImageNet")
    last, *_ = [one for one in entries if one.group == titles[-1]]
    assert all(one.trial.task.source.name.endswith("imagenet") for one in entries[place(entries, last.trial) :])
    assert not any(one.trial.task.source.name.endswith("imagenet") for one in entries[: place(entries, last.trial)])


def test_the_first_trials_are_those_that_the_paper_leaves_open(entries):
    names = [one.trial.recipe.name for one in entries if one.group == entries[0].group]
    rates = ["Adam-Layca 3^-5", "Adam-Layca 3^-4.5", "Adam-Layca 3^-4.3", "Adam-Layca 3^-4"]
    assert [name for name in names if name != "Layca 3^-3"] == rates
    assert {one.trial.task.name for one in entries[: len(names)]} == {"c100-resnet"}


@pytest.mark.parametrize("group", GROUPS, ids=[one.title for one in GROUPS])
def test_every_study_that_a_group_names_exists_and_has_trials(lab, group):
    for name in group.studies:
        if "*" not in name:
            assert studies()[name].trials(lab)


def test_within_a_group_tasks_stay_together_and_cheaper_trials_come_first(entries):
    for _, group in groupby(entries, key=lambda one: one.group):
        by_task = [(name, list(its)) for name, its in groupby(group, key=lambda one: one.trial.task.name)]
        assert len({name for name, _ in by_task}) == len(by_task)
        for _, its in by_task:
            prices = [one.seconds for one in its if one.seconds is not None and one.trial.source is None]
            assert prices == sorted(prices)


def test_studies_that_no_group_holds_come_cheapest_first_and_long_trainings_after_them(entries):
    rest = [one for one in entries if one.group not in {group.title for group in GROUPS}]
    *by_study, long, _ = [title for title, _ in groupby(one.group for one in rest)]
    names = [title.split(":")[0] for title in by_study]
    for place, name in enumerate(names):
        left = [one for one in rest if one.group in by_study[place:]]
        prices = {of: sum(one.seconds for one in left if of in one.studies) for of in names[place:]}
        assert prices[name] == min(prices.values())
    assert all(one.seconds > 600 for one in entries if one.group == long)
    assert {"c100-wrn", "c10-resnet-1202"} <= {one.trial.task.name for one in entries if one.group == long}


def test_a_trial_comes_after_what_it_copies_unless_its_rates_are_kept(entries):
    for name, lacks in (("c10-cnn1", True), ("c100-resnet", False)):
        copy = COPIES[name]
        assert (copy.source.key in [one.trial.key for one in entries]) is lacks
        if lacks:
            assert place(entries, copy.source) == place(entries, copy) - 1


def test_more_seeds_of_a_kept_configuration_are_listed_with_the_studies_of_the_first(lab, entries, tmp_path):
    [group] = {entries[place(entries, replace(BEST, seed=seed))].group for seed in (1, 2)}
    assert group == "Second and third seeds of kept CIFAR configurations that 6 studies or more use"
    left_open = "Second and third seeds of CIFAR configurations of which one seed leaves a claim open"
    groups = (group, left_open, "Second and third seeds of the other kept CIFAR configurations")
    seeds = [one for one in entries if one.group in groups]
    assert all((len(one.studies) >= 6) is (one.group == group) for one in seeds)
    assert all((one.trial.recipe == OPEN.recipe) is (one.group == left_open) for one in seeds)
    assert {one.trial.key for one in seeds} == {replace(one, seed=seed).key for one in KEPT for seed in (1, 2)}
    nothing = missing_trials(Lab(Archive(tmp_path)))
    first = nothing[place(nothing, BEST)]
    assert set(first.studies) == set(entries[place(entries, replace(BEST, seed=1))].studies)
    assert not {one.group for one in nothing} & set(groups)


def test_precisions_are_those_of_kept_trainings_on_any_machine(entries):
    assert {one.trial.precision for one in entries if one.trial.task.precision is None} == {"bf16"}
    assert all(one.trial.precision == (one.trial.task.precision or "bf16") for one in entries)


def test_what_is_written_is_read(lab, entries, queue):
    assert read(queue, lab) == entries
    text = queue.read_text()
    total = sum(one.seconds for one in entries if one.group == entries[0].group) / 60
    assert f"## {entries[0].group}\n\n5 trainings, {total:.1f} minutes.\n" in text
    assert f"{len(entries):,} full-scale trainings are missing, {len(KEPT)} are kept." in text
    assert "| ? | imagenet/" in text


def test_rows_may_be_moved_and_deleted(lab, entries, queue):
    lines = queue.read_text().splitlines()
    rows = [number for number, line in enumerate(lines) if line.startswith("| `")]
    lines[rows[0]], lines[rows[2]] = lines[rows[2]], lines[rows[0]]
    del lines[rows[1]]
    queue.write_text("\n".join(lines))
    assert [one.trial for one in read(queue, lab)[:2]] == [entries[2].trial, entries[0].trial]
    assert len(read(queue, lab)) == len(entries) - 1


@pytest.mark.parametrize("deleted", [False, True], ids=["moved", "deleted"])
def test_what_a_trial_copies_is_put_before_it_where_its_row_was_moved_or_deleted(lab, entries, queue, deleted):
    lines = queue.read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if COPIES["c10-cnn1"].source.key[:12] in line)
    assert COPIES["c10-cnn1"].key[:12] in lines[at + 1]
    row = lines.pop(at)
    lines[at + 1 : at + 1] = [] if deleted else [row]
    queue.write_text("\n".join(lines))
    assert read(queue, lab) == entries


def test_what_follows_from_kept_results_is_listed_and_read(tmp_path):
    """All rates of beyond/transfer have the same loss at seed 0.

    So the lowest counts as the best, at the edge, and the next as the second.
    """
    study, archive = studies()["beyond/transfer"], Archive(tmp_path / "kept")
    for trial in study.trials(Lab(archive, "full")):
        keep(archive, replace(trial, precision="bf16"))
    lab = Lab(archive, "full")
    following = [one for one in missing_trials(lab) if one.studies == (study.name,)]
    grids = transfer.kinds(lab).values()
    assert {one.trial.recipe.rate for one in following if one.trial.seed} == {
        rate for grid in grids for rate in grid[:2]
    }
    assert {one.trial.recipe.rate for one in following if not one.trial.seed} == {grid[0] / 2 for grid in grids}
    assert {one.trial.seed for one in following} == {0, 1, 2}
    write(following, tmp_path / "queue.md", kept=1)
    empty = Lab(Archive(tmp_path / "none"), "full")
    assert [one.trial for one in read(tmp_path / "queue.md", empty, archive)] == [one.trial for one in following]
    assert read(tmp_path / "queue.md", empty) == []  # nothing follows any more


def test_a_rate_beyond_the_edge_that_is_known_at_one_size_leaves_the_queue_whole(tmp_path):
    """As after a box that ended before the larger sizes had their turn."""
    study, archive = studies()["beyond/transfer"], Archive(tmp_path / "kept")
    listed = [replace(trial, precision="bf16") for trial in study.trials(Lab(archive, "full"))]
    for trial in listed:
        keep(archive, trial)
    lab = Lab(archive, "full")
    beyond = next(one.trial for one in missing_trials(lab) if one.trial.seed == 0 and one.studies == (study.name,))
    folder = archive.folder(beyond)
    folder.mkdir(parents=True)
    replace(made(beyond), test_losses=[0.1]).write(folder / "result.json", beyond.description)
    following = [one.trial for one in missing_trials(lab) if one.studies == (study.name,)]
    assert beyond not in following
    assert {(one.task, one.recipe) for one in following if one.seed == 1} >= {(beyond.task, beyond.recipe)}
    assert study.conclude(replace(lab, known=True)).verdicts[0].holds is None


def test_what_was_kept_since_is_not_read(entries, queue, tmp_path):
    archive = Archive(tmp_path / "since")
    keep(archive, entries[0].trial)
    found = [one.trial.key for one in read(queue, Lab(archive))]
    assert entries[0].trial.key not in found
    assert found[0] == entries[1].trial.key


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("| `0123456789ab` | c10-cnn1 | SGD | 0 | 1 | |", "0123456789ab"),
        ("| c10-cnn1 | SGD |", "c10-cnn1"),
    ],
    ids=["unknown", "damaged"],
)
def test_a_row_that_names_no_trial_is_refused(lab, queue, row, says):
    lines = queue.read_text().splitlines()
    queue.write_text("\n".join([*lines, row]))
    with pytest.raises(LabError, match=rf"Line {len(lines) + 1} of .*{says}.* Run `gyroscope reproduce --queue`"):
        read(queue, lab)


def test_a_missing_file_says_how_it_is_made(lab, tmp_path):
    with pytest.raises(LabError, match=r"none\.md cannot be read: .* Run `gyroscope reproduce --queue`"):
        read(tmp_path / "none.md", lab)


def test_the_committed_queue_names_trials_of_the_studies(tmp_path):
    found = read(QUEUE, Lab(Archive(tmp_path)), Archive(QUEUE.parent / "runs"))
    assert found[0].group in [group.title for group in GROUPS]
    text = QUEUE.read_text()
    assert all(f"| `{one.trial.key[:12]}` | {one.trial.task.name} |" in text for one in found)
