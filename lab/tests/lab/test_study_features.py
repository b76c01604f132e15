from math import sqrt

import pytest
import torch

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.rotation.features import CUTS, POWERS, ROTATIONS, STUDIES, TESTS, Features, likeness, trials
from gyroscope_lab.training.archive import Archive
from lab.pretended import full_lab, raw

[STUDY] = STUDIES


@pytest.fixture(scope="module")
def report(lab):
    return STUDY.run(lab)


def random(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(a, b):
    return float(a @ b) / sqrt(float(a @ a) * float(b @ b))


def test_the_four_rates_are_trained_as_the_protocol_says():
    its = trials(Lab(Archive("nowhere"), "full"))
    assert [trial.recipe.rate for trial in its] == pytest.approx([3**-2, 3**-2.5, 3**-3, 3**-4])
    assert [trial.schedule.milestones for trial in its] == [[90], [95], [95], []]
    assert {trial.recipe.control for trial in its} == {"layca"}
    for trial in its:
        assert (trial.schedule.epochs, trial.schedule.batch, trial.schedule.factor) == (100, 2048, 5.0)
        assert (trial.task.source.name, trial.task.source.per_class) == ("mnist", 1000)
        assert trial.schedule.steps(10_000) == 5
        assert trial.keeps


def test_all_four_start_alike_and_the_digits_have_the_papers_five_steps_an_epoch(lab):
    its = trials(lab)
    starts = [trial.network().state_dict() for trial in its]
    for start in starts[1:]:
        assert all(torch.equal(start[name], value) for name, value in starts[0].items())
    split = its[0].task.source.load()
    assert {trial.schedule.steps(len(split.y_train)) for trial in its} == {5}
    assert len(split.y_test) == 1597  # by which the report judges a difference


def test_a_neuron_is_retrievable_if_its_own_start_is_the_most_alike_of_all():
    initial, final = random(40, 9, 0), random(40, 9, 0) + 1.5 * random(40, 9, 1)
    told = sum(
        max(range(40), key=lambda j, i=i: cosine(final[i], initial[j])) == i for i in range(40)
    )  # fmt: skip
    features = Features(-2.0, initial, final)
    assert features.retrievable == pytest.approx(told / 40)
    assert 0 < told < 40
    assert features.remains == pytest.approx(sum(cosine(final[i], initial[i]) for i in range(40)) / 40)


def test_neurons_that_have_not_moved_are_all_retrievable_and_strangers_are_not():
    initial = random(200, 64, 0)
    assert Features(-2.0, initial, 3 * initial).retrievable == 1.0
    assert Features(-2.0, initial, random(200, 64, 1)).retrievable < 0.05


def test_what_is_learned_is_orthogonal_to_the_start():
    features = Features(-2.0, random(5, 7, 0), random(5, 7, 1))
    products = (features.learned * features.initial).sum(1)
    torch.testing.assert_close(products, torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_same_features_learned_to_another_extent_are_alike_and_other_features_are_not():
    start, learned = random(30, 64, 0), random(30, 64, 1)
    little, much = Features(-4.0, start, start + 0.05 * learned), Features(-2.0, start, start + 3 * learned)
    other = Features(-2.0, start, start + 3 * random(30, 64, 2))
    assert likeness(little, much) == pytest.approx((1.0, 1.0))
    same, told = likeness(little, other)
    assert abs(same) < 0.1
    assert told < 0.2


def test_the_table_is_what_the_archive_holds(lab, report):
    for power, trial, row in zip(POWERS, trials(lab), report.tables[0].rows, strict=True):
        found = raw(lab, trial)
        kept = torch.load(lab.archive.folder(lab.trial(trial)) / "weights.pt", weights_only=True)
        start, end = (kept[when]["linear1.weight"].double() for when in ("initial", "tested"))
        assert row[0] == f"3^{power:g}"
        assert row[1] == f"{100 * found['test_accuracy']:.2f}"
        assert row[3] == pytest.approx(100 * found["train_accuracy"])
        assert row[4] == pytest.approx(1 - cosine(start.flatten(), end.flatten()), abs=1e-6)
        assert row[7] == pytest.approx(sum(cosine(a, b) for a, b in zip(start, end, strict=True)) / len(start))
        assert (row[2], row[5]) == (None, None)
        assert torch.equal(start.float(), trial.network()[1].weight)


def test_rotation_decides_to_what_extent_features_are_learned_and_not_which(report):
    held = {verdict.says: verdict.holds for verdict in report.verdicts}
    assert held["all four rates learn the training set"]
    assert held["the higher the rate, the further the first layer rotates"]
    assert held["the further it rotates, the less retrievable is the initialization"]
    assert held["rotation does not decide which features are learned, but to what extent"]
    # 1,597 digits cannot tell apart what MNIST's 10,000 can.
    assert held["the further it rotates, the better the network generalizes"] is None


def test_five_neurons_are_drawn_as_they_started_and_at_each_rate(report):
    images = [ax for ax in report.figures["figure"].axes if ax.images]
    curves = [ax for ax in report.figures["figure"].axes if ax.lines]
    assert (len(images), len(curves)) == (5 * 5, 4)
    assert {ax.images[0].get_array().shape for ax in images} == {(8, 8)}


def test_a_report_is_saved_whole(lab, report, tmp_path):
    written = {path.name for path in STUDY.save(lab, report, tmp_path)}
    assert written == {"figure.png", "figure.svg", "README.md", "result.json"}


def test_at_full_scale_the_papers_numbers_stand_beside(tmp_path):
    lab, _ = full_lab(tmp_path, trials)
    for number, trial in enumerate(trials(lab)):
        start = {"linear1.weight": random(50, 784, 0).float()}
        end = {"linear1.weight": start["linear1.weight"] + (4 - number) * random(50, 784, 1).float()}
        torch.save({"initial": start, "tested": end}, lab.archive.folder(lab.trial(trial)) / "weights.pt")
    report = STUDY.conclude(lab)
    assert [row[2] for row in report.tables[0].rows] == [96.75, 96.60, 96.54, 95.81] == list(TESTS.values())
    assert [row[5] for row in report.tables[0].rows] == [0.90, 0.60, 0.30, 0.11] == list(ROTATIONS.values())
    assert list(CUTS) == list(POWERS)
    images = [ax for ax in report.figures["figure"].axes if ax.images]
    assert {ax.images[0].get_array().shape for ax in images} == {(28, 28)}
