import json
from statistics import mean, stdev

import pytest

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.conditioning import depth_table
from gyroscope_lab.papers.conditioning.by_depth import Network, network_of
from gyroscope_lab.papers.conditioning.depth_table import STUDIES, curves, further, table1_trials, table2_trials
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from lab.made_lab import MadeLab, percent, raw

FIG8, TABLE1, TABLE2 = STUDIES
SPREAD = 0.03
TOLD = {"c10": depth_table.CIFAR_10, "c100": depth_table.CIFAR_100}


@pytest.fixture
def full(tmp_path):
    return Lab(Archive(tmp_path), "full")


def test_the_papers_errors_differ_as_its_text_says():
    said = {"c10": (1.02, 0.79, 1.41, 3.74), "c100": (0.78, 1.25, 3.45, 4.98)}
    for data, gains in said.items():
        errors = TOLD[data]
        found = [errors[Network("ResNet", d)][0] - errors[Network("ResNet_LastBN", d)][0] for d in (56, 110, 230, 1202)]
        assert found == pytest.approx(gains)


@pytest.mark.parametrize(("trials", "source"), [(table1_trials, "cifar-10"), (table2_trials, "cifar-100")])
def test_at_full_scale_four_architectures_are_trained_at_four_depths_from_five_seeds(full, trials, source):
    every = trials(full)
    wanted = {
        (f"{model}-{depth}", seed)
        for model in ("resnet", "preresnet", "preresnet-v1", "resnet-lastbn")
        for depth in (56, 110, 230, 1202)
        for seed in (1, 2, 3, 4, 5)
    }
    assert len(every) == 80
    assert {(one.task.model, one.seed) for one in every} == wanted
    for one in every:
        schedule, recipe, task = one.schedule, one.recipe, one.task
        assert (schedule.epochs, schedule.batch, schedule.steps(50_000)) == (160, 128, 390)
        # From the start of the 80th and the 120th epoch, counted from 1.
        assert (schedule.milestones, schedule.factor, schedule.restarts, schedule.warmup) == ([79, 119], 10, True, 0)
        assert (recipe.rate, recipe.momentum, recipe.nesterov, recipe.weight_decay) == (0.1, 0.9, True, 1e-4)
        assert (task.source.name, task.source.normalization, task.source.validation) == (source, "channel", 0.0)
        assert (task.augmentation.per, task.augmentation.fill, task.augmentation.half) == ("batch", "reflect", True)
        assert dict(task.options) == ({"classes": 100} if source == "cifar-100" else {})


def test_shallow_networks_come_first_and_a_depth_is_whole_before_the_next(full):
    depths = [network_of(one.task).depth for one in table1_trials(full)]
    assert depths == sorted(depths)


def test_beyond_the_table_are_twice_the_decay_and_the_epochs_and_twice_the_layers(full, lab):
    found = {(one.task.model, one.recipe.weight_decay, one.schedule.epochs) for one in further(full)}
    assert found == {("resnet-lastbn-1202", 2e-4, 320), ("resnet-2402", 1e-4, 160), ("resnet-lastbn-2402", 1e-4, 160)}
    assert TABLE1.trials(full) == [*table1_trials(full), *further(full)]
    assert further(lab) == []


def test_figure_8_needs_no_training_that_table_1_has_not(full):
    assert {one.key for one in curves(full)} < {one.key for one in table1_trials(full)}
    assert [one.task.model for one in curves(full)[:2]] == ["resnet-56", "resnet-lastbn-56"]


@pytest.mark.parametrize("study", [TABLE1, TABLE2], ids=["table 1", "table 2"])
def test_the_table_has_the_errors_of_the_archive(lab, study):
    report = study.run(lab)
    layout, by_seed = report.tables
    for row, trial in zip(by_seed.rows, study.trials(lab), strict=True):
        error = 100 - percent(raw(lab, trial))[0]
        assert (row[0], row[3:]) == (str(network_of(trial.task)), (None,) * 4)
        assert row[1:3] == pytest.approx((error, error))
    assert [row[:2] for row in layout.rows[:3]] == [("ResNet", "here"), ("ResNet", "paper"), ("PreResNet", "here")]
    assert layout.rows[0][2] == f"{by_seed.rows[0][1]:.2f}"
    assert layout.rows[1][2:] == (None, None)
    assert [verdict.holds for verdict in report.verdicts] == [None] * 5


def result(test, train=1.0, loss=(1.0,)):
    return Result(train, test, loss=list(loss), layers=["fc"], rotation=[[0.0], [0.5]])


def as_told(trial):
    """The paper's mean, with small differences between seeds."""
    network = network_of(trial.task)
    data = trial.task.name.partition("-")[0]
    mean_error = TOLD[data].get(network, (5.0, 0.0))[0] + SPREAD * (trial.seed - 3)
    return result(1 - mean_error / 100, train=0.1 if network == Network("ResNet", 2402) else 1.0)


@pytest.mark.parametrize(("study", "data"), [(TABLE1, "c10"), (TABLE2, "c100")], ids=["table 1", "table 2"])
def test_results_like_the_papers_show_what_it_says_beside_its_numbers(tmp_path, study, data):
    report = study.run(MadeLab(Archive(tmp_path), "full", make=as_told))
    assert {verdict.holds for verdict in report.verdicts} == {True}
    layout, by_seed, *beyond = report.tables
    for row in by_seed.rows:
        network, *each, average, spread, told, told_spread, difference = row
        assert each == pytest.approx([told + SPREAD * k for k in (-2, -1, 0, 1, 2)])
        assert (average, spread) == pytest.approx((mean(each), stdev(each)))
        assert difference == pytest.approx(0.0, abs=1e-9)
        assert (told, told_spread) == next(error for one, error in TOLD[data].items() if str(one) == network)
    assert len(by_seed.rows) == 16
    told = {"c10": ("7.52 ± 0.30", "9.42 ± 3.10"), "c100": ("29.60 ± 0.41", "30.49 ± 4.44")}[data]
    assert (layout.rows[1][2], layout.rows[1][5]) == told
    if data == "c10":
        assert [row[5] for row in beyond[0].rows] == [4.79, None, 5.04]


def test_results_unlike_the_papers_are_said_to_be_so(tmp_path):
    def upside_down(trial):
        return result(1 - (40 - 100 * (1 - as_told(trial).test_accuracy)) / 100)

    for study in (TABLE1, TABLE2):
        report = study.run(MadeLab(Archive(tmp_path), "full", make=upside_down))
        assert {verdict.holds for verdict in report.verdicts} == {False}


def keep(lab, trials):
    """Put made-up results of these trials into the archive."""
    for trial in trials:
        folder = lab.archive.folder(lab.trial(trial))
        folder.mkdir(parents=True)
        as_told(trial).write(folder / "result.json", lab.trial(trial).description)


def test_what_is_known_is_shown_under_its_own_seed(tmp_path):
    lab = Lab(Archive(tmp_path), "full", known=True)
    keep(
        lab, [one for one in table1_trials(lab) if one.task.model in ("resnet-56", "resnet-110") and one.seed in (2, 4)]
    )
    report = TABLE1.run(lab)
    [shallow, deeper] = report.tables[1].rows
    assert [cell is None for cell in shallow[1:6]] == [True, False, True, False, True]
    assert shallow[2] == pytest.approx(7.52 - SPREAD)
    assert deeper[6] == pytest.approx(6.89)
    assert list(report.tables[0].columns[2:]) == ["depth 56", "depth 110"]
    assert [verdict.holds for verdict in report.verdicts] == [None] * 5
    page = TABLE1.page(lab, report)
    assert "Shown in part: 91 trainings are not there yet (c10-resnet-56: 3; " in page
    assert page.count("c10-resnet-56") == 1
    assert "`result.json` lists all, as `not_trained`." in page
    assert TABLE1.as_json(lab, report)["not_trained"].count("c10-resnet-56: SGD") == 3


def losses(trial):
    """Losses: for ResNets larger with depth before the cut; for LastBN equal, and then lower with depth."""
    network = network_of(trial.task)
    if network.architecture == "ResNet":
        return result(0.9, loss=[0.2 + network.depth / 1e4] * 79 + [0.5] * 80 + [0.081])
    return result(0.9, loss=[0.2] * 79 + [0.1] * 80 + [0.043 - network.depth / 1e5])


def test_figure_8_shows_losses_by_epoch_and_what_the_paper_says_of_them(tmp_path):
    report = FIG8.run(MadeLab(Archive(tmp_path), "full", make=losses))
    assert [verdict.holds for verdict in report.verdicts] == [True] * 4
    first, second = report.tables[0].rows[:2]
    assert first == ("ResNet, 56 layers", "0.081", "0.081", f"{0.2 + 56 / 1e4:.3g}", 5)
    assert second[2:] == ("0.043", "0.2", 5)
    left, right = report.figures["figure"].axes
    assert [len(left.lines), len(right.lines)] == [4, 4]
    assert left.lines[0].get_ydata().tolist() == pytest.approx(
        losses(FIG8.trials(Lab(Archive(tmp_path), "full"))[0]).loss
    )

    def swapped(trial):
        other = Network({"ResNet": "ResNet_LastBN", "ResNet_LastBN": "ResNet"}[network_of(trial.task).architecture], 0)
        depth = 2000 - network_of(trial.task).depth
        if other.architecture == "ResNet":
            return result(0.9, loss=[depth / 1e3] * 160)
        return result(0.9, loss=[depth / 1e4] * 160)

    report = FIG8.run(MadeLab(Archive(tmp_path), "full", make=swapped))
    assert [verdict.holds for verdict in report.verdicts] == [False, False, True, False]


@pytest.mark.parametrize(
    ("seeds", "spread", "holds"),
    [((1,), 0.0, [None] * 4), ((1, 2, 3, 4, 5), 0.002, [True] * 4), ((1, 2, 3, 4, 5), 0.8, [None] * 4)],
    ids=["one seed", "sure", "chance"],
)
def test_losses_are_compared_with_what_seeds_of_a_network_differ_by(tmp_path, seeds, spread, holds):
    def shaken(trial):
        factor = 1 + spread * (trial.seed - 3) / 2
        return result(0.9, loss=[factor * loss for loss in losses(trial).loss])

    class Few(MadeLab):
        def held(self, trials):
            return [one for one in trials if one.seed in seeds]

    report = FIG8.conclude(Few(Archive(tmp_path), "full", known=True, make=shaken))
    assert [verdict.holds for verdict in report.verdicts] == holds


def test_saving_writes_the_figure_the_page_and_all_numbers(lab, tmp_path):
    names = {path.name for path in FIG8.save(lab, FIG8.run(lab), tmp_path)}
    assert names == {"figure.png", "figure.svg", "README.md", "result.json"}
    kept = json.loads((tmp_path / "conditioning/fig8/result.json").read_text())["numbers"]["cells"]
    assert [(one["architecture"], one["depth"]) for one in kept[:2]] == [("ResNet", 8), ("ResNet_LastBN", 8)]
    assert kept[0]["loss"] == pytest.approx(raw(lab, FIG8.trials(lab)[0])["loss"], abs=1e-4)
    assert {path.name for path in TABLE1.save(lab, TABLE1.run(lab), tmp_path)} == {"README.md", "result.json"}


@pytest.mark.parametrize(
    ("gains", "seeds", "holds"),
    [
        ((2.0, 1.0), 1, True),
        ((2.0, 0.5), 1, None),  # one depth may be chance, however sure the other is
        ((2.0, -0.2), 1, None),  # twenty images of ten thousand may be chance
        ((0.2, 0.2), 1, None),
        ((0.2, 0.2), 5, True),  # where five seeds agree to a twentieth of a point
        ((0.2, 0.02), 5, None),
        ((2.0, -1.0), 1, False),
    ],
)
def test_errors_of_few_images_and_seeds_decide_nothing_that_may_be_chance(tmp_path, gains, seeds, holds):
    gained = dict(zip((56, 110), gains, strict=True))

    def errors(trial):
        network = network_of(trial.task)
        better = gained[network.depth] if network.architecture == "ResNet_LastBN" else 0.0
        return result(0.93 + (better + 0.02 * (trial.seed - 3)) / 100)

    class Few(MadeLab):
        def held(self, trials):
            return [one for one in trials if one.seed <= seeds and network_of(one.task).depth in gained]

    lab = Few(Archive(tmp_path), "full", known=True, make=errors)
    assert TABLE1.conclude(lab).verdicts[0].holds is holds
    # Two of four depths decide nothing about every depth.
    assert TABLE1.run(lab).verdicts[0].holds is None


def test_losses_until_the_cut_are_compared_as_a_whole_and_not_at_one_epoch(tmp_path):
    def crossing(trial):
        network = network_of(trial.task)
        early = [0.5 + network.depth / 1e3] * 78 + [0.2 - network.depth / 1e5]
        return result(0.9, loss=early + [0.1] * 81)

    report = FIG8.run(MadeLab(Archive(tmp_path), "full", make=crossing))
    says, holds = report.verdicts[0].says, report.verdicts[0].holds
    assert "until the rate is cut" in says
    assert holds
