"""A recorded run explained: what is said where measurements support it, and what is said where they do not."""

import json
import sqlite3

import numpy as np
import pytest
import torch
from torch import nn

import gyroscope
from diagnosis import predict_runs
from diagnosis.explain_runs import clusters, normalized, plain, train, walk, written
from gyroscope.diagnosis.explain import TOPICS, cells, explain
from gyroscope.diagnosis.predict import predictions
from gyroscope.diagnosis.scale_invariance import orthogonality
from gyroscope.errors import DynamicsError, StoreError
from gyroscope.store.example import write_example
from gyroscope.theory.recurrence import optimizer_of

AFTER = TOPICS[1:4]  # what follows from scale invariance: effective learning rate, implicit decay, equilibrium


def sgd(**options):
    return lambda net: torch.optim.SGD(net.parameters(), **options)


def biased():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 4))


@pytest.fixture(scope="module")
def resting(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "a", normalized(), sgd(lr=0.2, weight_decay=0.05), 240)


def verdicts(entry):
    return [one.verdict for one in entry.statements]


# Networks that are really trained.


def test_a_normalized_layer_under_decay_is_said_to_rest_at_the_predicted_rate(resting):
    found = explain(resting)
    entry = found["0.weight"]
    assert entry.scale_invariant == "yes"
    assert verdicts(entry) == ["yes", "yes", "no", "yes", "yes"]  # its norm comes down from above
    assert entry.predicted_rate == pytest.approx(np.sqrt(2 * 0.2 * 0.05), rel=1e-6)
    with gyroscope.load(resting) as run:
        later = run.steps > 120
        angles, norms = (run.series(name)[later, 0].astype(float) for name in ("rate", "weight_norm"))
    assert entry.measured_rate == pytest.approx(np.sqrt(np.square(angles).mean()), rel=1e-6)
    assert entry.measured_rate == pytest.approx(entry.predicted_rate, rel=0.05)
    assert entry.measured_norm == pytest.approx(np.sqrt(np.square(norms).mean()), rel=1e-6)
    assert entry.predicted_norm == pytest.approx(entry.measured_norm, rel=0.05)
    assert entry.half_life == pytest.approx(np.log(2) / (4 * 0.2 * 0.05), rel=1e-5)
    assert entry.mechanisms == ("effective learning rate",)
    said = entry.about("equilibrium")
    assert f"{entry.measured_rate:.3g} rad per step" in said.words
    assert "√(2ηλ)" in said.words
    assert "getting there" not in said.words  # it is there
    assert said.source == "equations 23 to 25"


def test_of_the_last_layer_nothing_is_said_but_that_decay_can_regularize_it(resting):
    entry = explain(resting)["3.weight"]
    assert entry.scale_invariant == "no"
    assert entry.deviation > 0.4
    for topic in AFTER:
        said = entry.about(topic)
        assert said.verdict == "does not apply"
        assert said.words.startswith("because the layer is not scale-invariant")
    assert entry.mechanisms == ("regularization",)
    assert "C = I" in entry.about("weight decay").words
    numbers = (entry.effective_last, entry.k0, entry.predicted_rate, entry.measured_rate, entry.half_life)
    assert set(numbers) == {None}


def test_without_decay_the_law_is_fitted_and_no_equilibrium_claimed(tmp_path):
    folder = train(tmp_path / "a", normalized(), sgd(lr=0.1), 250)
    entry = explain(folder)["0.weight"]
    assert verdicts(entry) == ["yes", "yes", "yes", "does not apply", "does not apply"]
    with gyroscope.load(folder) as run:
        k, norms = run.steps.astype(float), run.series("weight_norm")[:, 0].astype(float)
    slope, start = np.polyfit(k, norms**4, 1)  # ‖w‖⁴ = ‖w₀‖⁴ (1 + k/k₀)
    assert entry.k0 == pytest.approx(start / slope, rel=1e-3)
    assert entry.implicit_factor == pytest.approx((norms[0] / norms[-1]) ** 2, rel=1e-6)
    assert entry.effective_first == pytest.approx(0.1 / norms[0] ** 2, rel=1e-6)
    assert entry.effective_last == pytest.approx(entry.effective_first * entry.implicit_factor, rel=1e-6)
    assert "weight decay is zero" in entry.about("equilibrium").words


def test_adamw_is_said_to_rest_at_its_own_rate(tmp_path):
    def make(net):
        return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=1.0, betas=(0.9, 0.95))

    entry = explain(train(tmp_path / "a", normalized(), make, 320))["0.weight"]
    assert entry.about("equilibrium").verdict == "yes"
    assert entry.predicted_rate == pytest.approx(np.sqrt(2 * 0.01 * 1.0 * 0.1 / 1.9), rel=1e-6)
    assert entry.measured_rate == pytest.approx(entry.predicted_rate, rel=0.2)
    assert "η/‖w‖ (" in entry.about("effective learning rate").words


def test_without_normalization_nothing_applies(tmp_path):
    found = explain(train(tmp_path / "a", plain(), sgd(lr=0.1, weight_decay=0.01), 40))
    for entry in found.entries:
        assert verdicts(entry) == ["no", *["does not apply"] * 3, "yes"]
    assert len(found.sorts()) == 1


def test_under_layca_norms_are_held_and_the_angle_is_what_was_asked(tmp_path):
    def make(net):
        return gyroscope.Layca(torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1), net)

    found = explain(train(tmp_path / "a", normalized(), make, 30))
    for entry in found.entries:
        assert verdicts(entry)[1:] == ["does not apply"] * 4
        assert entry.mechanisms == ()
        words = entry.about("equilibrium").words
        assert f"turns by {np.arctan(0.1):.3g} rad per step" in words  # ρ = 0.1
        assert "its norm is held at" in words
    assert found["0.weight"].scale_invariant == "yes"


def test_under_kfac_decay_can_act_by_the_damping(tmp_path):
    def make(net):
        inner = torch.optim.SGD(net.parameters(), lr=0.01, weight_decay=0.01)
        return gyroscope.control.KFAC(inner, net, nn.functional.cross_entropy)

    found = explain(train(tmp_path / "a", normalized(), make, 20))
    assert found["0.weight"].mechanisms == ("damping",)
    assert found["0.weight"].about("weight decay").source == "section 5.2, equation 26"
    assert found["3.weight"].mechanisms == ("regularization",)
    assert [found["0.weight"].about(topic).verdict for topic in AFTER] == ["does not apply"] * 3


def test_a_model_says_more_than_its_run_each_unit_is_invariant_by_itself(resting):
    x, y = clusters()
    net = normalized()
    found = explain(resting, model=net, loss=nn.functional.cross_entropy, batch=(x, y))
    assert [entry.scale_invariant for entry in found.entries] == ["unit", "no"]
    assert cells(found["0.weight"])[1] == "per unit"
    assert cells(explain(resting)["0.weight"])[1] == "yes (units unknown)"
    assert "each of its 12 units" in found["0.weight"].about("scale invariance").words
    given = gyroscope.invariance(net, nn.functional.cross_entropy, (x, y))
    assert explain(resting, invariance=given).rows() == found.rows()


def test_a_layer_that_only_as_a_whole_can_be_rescaled_is_said_to_be_so_where_the_model_shows_it(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(10, 12, bias=False), nn.LayerNorm(12, elementwise_affine=False), nn.Tanh(), nn.Linear(12, 4)
    )
    folder = train(tmp_path / "a", net, sgd(lr=0.1), 30)
    assert explain(folder)["0.weight"].scale_invariant == "yes"
    entry = explain(folder, model=net, loss=nn.functional.cross_entropy, batch=clusters())["0.weight"]
    assert (entry.scale_invariant, cells(entry)[1]) == ("tensor", "as a whole")


def test_a_model_that_contradicts_its_run_decides_nothing(resting):
    entry = explain(resting, model=normalized().eval(), loss=nn.functional.cross_entropy, batch=clusters())["0.weight"]
    assert entry.scale_invariant == "undecided: run and model disagree"
    assert verdicts(entry) == ["undecided"] * 5


# Too little recorded.


def test_of_too_few_steps_nothing_is_said(tmp_path):
    found = explain(train(tmp_path / "a", normalized(), sgd(lr=0.1, weight_decay=0.05), 6))
    assert {one.verdict for one in found.statements} == {"undecided"}
    assert "measured at 6 steps, and 10 are needed" in found.statements[0].words


def test_what_is_not_recorded_is_named(tmp_path):
    found = explain(train(tmp_path / "a", normalized(), sgd(lr=0.1), 3, quantities=["rotation"]))
    assert {one.verdict for one in found.statements} == {"undecided"}
    assert "no series invariance" in found["0.weight"].about("scale invariance").words
    assert "no series weight_decay" in found["0.weight"].about("weight decay").words


@pytest.mark.parametrize(
    ("absent", "topic"),
    [
        (["weight_norm"], "effective learning rate"),
        (["weight_norm"], "implicit decay"),
        (["rate", "update_ratio"], "equilibrium"),
        (["weight_decay"], "equilibrium"),
    ],
)
def test_each_statement_names_the_series_that_it_lacks(tmp_path, absent, topic):
    series = {name: values for name, values in walk(60, decay=0.05).items() if name not in absent}
    said = explain(written(tmp_path / "a", series))["w"].about(topic)
    assert said.verdict == "undecided"
    assert f"no series {absent[0]}" in said.words


# Random walks: cases that are exact.


def test_the_law_of_a_walk_has_the_k0_of_theory(tmp_path):
    entry = explain(written(tmp_path / "a", walk(400, lr=0.05)))["w"]
    assert entry.about("implicit decay").verdict == "yes"
    assert entry.k0 == pytest.approx(1 / (2 * 0.05**2), rel=0.02)  # ‖w₀‖⁴/(2η²g̃²)


def test_a_law_of_which_only_the_beginning_was_seen_is_undecided(tmp_path):
    entry = explain(written(tmp_path / "a", walk(50, lr=0.05)))["w"]
    said = entry.about("implicit decay")
    assert (said.verdict, entry.k0) == ("undecided", None)
    assert "k₀ = 20" in said.words


def test_a_norm_that_grows_otherwise_does_not_follow_the_law(tmp_path):
    series = walk(100, lr=0.1) | {"weight_norm": np.exp(np.arange(100) / 30)}  # R² alone is 0.72
    assert explain(written(tmp_path / "a", series))["w"].about("implicit decay").verdict == "no"
    series["weight_norm"] = 1 + np.arange(100) / 30
    said = explain(written(tmp_path / "b", series))["w"].about("implicit decay")
    assert said.verdict == "no"
    assert ", does not describe the 100 measured norms: R² " in said.words
    assert "‖∇‖‖w‖ did not stay constant" in said.words


def test_a_layer_on_its_way_is_told_how_far_it_has_to_go(tmp_path):
    entry = explain(written(tmp_path / "a", walk(100, lr=0.1, decay=0.01)))["w"]
    said = entry.about("equilibrium")
    assert said.verdict == "no"
    assert "the norm still grows" in said.words
    shrinks = explain(written(tmp_path / "b", walk(100, lr=0.1, decay=0.01, start=5.0)))["w"].about("equilibrium")
    assert "the norm still shrinks" in shrinks.words
    # From here on, as many steps more as it says: then it is there.
    left = int(said.words.split("About ")[1].split(" ")[0].replace(",", ""))
    series = walk(3 * (100 + left), lr=0.1, decay=0.01)
    rests = (0.1 / (2 * 0.01)) ** 0.25  # equation 24
    assert series["weight_norm"][99 + left] == pytest.approx(0.95 * rests, rel=0.01)
    assert explain(written(tmp_path / "c", series))["w"].about("equilibrium").verdict == "yes"


@pytest.mark.parametrize(
    ("grows", "at_end", "told"),
    [(-0.5, 2.5, True), (-0.5, 1.5, False), (0.5, 1.2, True), (0.5, 2.5, False), (-0.25, 20.0, False)],
    ids=["down to it", "down, away from it", "up to it", "up, away from it", "down, but at another pace"],
)
def test_how_many_steps_are_left_is_said_where_the_norm_goes_there_at_that_pace(tmp_path, grows, at_end, told):
    # A norm that changes by a share of what decay takes, where gradients have it rest at 1.9, by equation 24.
    norm, rests = at_end * np.exp(grows * 0.1 * 0.01 * (np.arange(100) - 99)), 1.9
    series = walk(100, lr=0.1, decay=0.01) | {"weight_norm": norm, "gradient_norm": rests**2 * np.sqrt(0.2) / norm}
    entry = explain(written(tmp_path / "a", series))["w"]
    assert entry.predicted_norm == pytest.approx(rests, rel=0.01)
    said = entry.about("equilibrium")
    assert said.verdict == "no"
    assert ("more steps get it there" in said.words) == told


def test_measured_now_and_then_the_length_of_steps_gives_the_rate(tmp_path):
    series, at = walk(900, decay=0.05), np.arange(1, 901)
    thin = slice(None, None, 9)
    few = {name: values[thin] for name, values in series.items()}
    few["rate"] = 3 * few["rate"]  # since the last measured step: of nine steps in random directions
    entry = explain(written(tmp_path / "a", few, steps=at[thin]))["w"]
    assert entry.about("equilibrium").verdict == "yes"
    assert entry.measured_rate == pytest.approx(np.sqrt(2 * 0.1 * 0.05), rel=0.01)


def test_after_a_step_of_the_schedule_the_stretch_that_was_measured_long_enough_counts(tmp_path):
    lr = np.repeat([0.1, 0.01], [400, 12])
    entry = explain(written(tmp_path / "a", walk(412, lr=lr, decay=0.05)))["w"]
    assert entry.predicted_rate == pytest.approx(np.sqrt(2 * 0.1 * 0.05), rel=1e-6)
    assert "to 400, at η = 0.1" in entry.about("equilibrium").words
    assert (entry.lr_first, entry.lr_last) == pytest.approx((0.1, 0.01))
    lr = np.repeat([0.1, 0.01], [100, 300])
    entry = explain(written(tmp_path / "b", walk(400, lr=lr, decay=0.05)))["w"]
    assert entry.predicted_rate == pytest.approx(np.sqrt(2 * 0.01 * 0.05), rel=1e-6)


def test_under_a_rate_that_never_stays_the_equilibrium_is_undecided(tmp_path):
    lr = 0.05 * (1 + np.cos(np.pi * np.arange(200) / 200))
    entry = explain(written(tmp_path / "a", walk(200, lr=lr, decay=0.05)))["w"]
    assert entry.about("equilibrium").verdict == "undecided"
    assert "The learning rate must stay constant for 20 steps or more." in entry.about("equilibrium").words
    assert "Record" not in entry.about("equilibrium").words
    assert entry.about("effective learning rate").verdict == "yes"


def test_of_a_long_stretch_measured_seldom_every_step_is_to_be_recorded(tmp_path):
    series, at = walk(900, decay=0.05), np.arange(1, 901)
    thin = slice(None, None, 60)  # 15 of them: enough for the invariance, and too few in the later half
    few = {name: values[thin] for name, values in series.items()}
    said = explain(written(tmp_path / "a", few, steps=at[thin]))["w"].about("equilibrium")
    assert said.verdict == "undecided"
    assert said.words.endswith("the longest stretch lasts 840 steps. Record every step with watch(budget=None).")
    adamw = {"class": "AdamW", "betas": [0.9, 0.999]}
    said = explain(written(tmp_path / "b", series, optimizer=adamw))["w"].about("equilibrium")
    assert said.verdict == "undecided"
    assert "after the 1,000 steps that AdamW takes to settle" in said.words
    assert said.words.endswith("lasts 899 steps. The learning rate must stay constant for 1,010 steps or more.")


def test_of_a_resumed_run_only_what_came_after_is_judged(tmp_path):
    first, second = walk(300, decay=0.05), walk(8, decay=0.05)
    written(tmp_path / "a", first, optimizer={"class": "Adam", "betas": [0.9, 0.999]})
    written(tmp_path / "a", second, steps=np.arange(301, 309), step=300)
    found = explain(tmp_path / "a")
    assert found.resumed == 300
    said = found["w"].about("equilibrium")
    assert said.verdict == "undecided"
    assert "resumed at step 300" in said.words
    assert "resumed at step 300" in found["w"].about("implicit decay").words


def test_decay_that_takes_all_of_the_weights_does_not_apply(tmp_path):
    series = walk(60, lr=0.1) | {"weight_decay": np.full(60, 10.0)}
    said = explain(written(tmp_path / "a", series))["w"].about("equilibrium")
    assert said.verdict == "does not apply"
    assert "ηλ is 1:" in said.words
    assert said.source == "equation 22"


@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
def test_decay_that_is_divided_by_second_moments_is_undecided(tmp_path, name):
    entry = explain(written(tmp_path / "a", walk(60, decay=0.05), optimizer={"class": name}))["w"]
    for topic in ("implicit decay", "equilibrium"):
        assert entry.about(topic).verdict == "undecided"
        assert f"weight decay of {name}" in entry.about(topic).words


def test_of_an_optimizer_without_theory_only_the_invariance_is_said(tmp_path):
    entry = explain(written(tmp_path / "a", walk(60, decay=0.05), optimizer={"class": "Lion"}))["w"]
    assert verdicts(entry) == ["yes", *["undecided"] * 4]
    assert "no theory for Lion" in entry.about("equilibrium").words


def test_steps_that_are_too_noisy_are_said_to_be(tmp_path):
    series = walk(60, decay=0.05)
    series["rate"] = series["rate"] * np.where(np.arange(60) == 55, 30.0, 1.0)
    said = explain(written(tmp_path / "a", series))["w"].about("equilibrium")
    assert said.verdict == "undecided"
    assert "too noisy" in said.words


def test_noise_does_not_hide_a_rate_that_is_far_off(tmp_path):
    series = walk(60, decay=0.05)
    series["rate"] = 0.01 * series["rate"] * np.where(np.arange(60) > 50, 3.0, 1.0)
    assert explain(written(tmp_path / "a", series))["w"].about("equilibrium").verdict == "no"


def test_a_norm_at_rest_that_turns_at_another_rate_is_held_by_something_else(tmp_path):
    series = walk(400, decay=0.05)
    series["rate"] = 1.5 * series["rate"]
    said = explain(written(tmp_path / "a", series))["w"].about("equilibrium")
    assert said.verdict == "no"
    assert "something other than decay" in said.words


@pytest.mark.parametrize(("sway", "verdict"), [(0.4, "undecided"), (0.05, "no")])
def test_a_rate_within_two_standard_errors_of_the_predicted_one_is_undecided(tmp_path, sway, verdict):
    series = walk(400, decay=0.05)
    after = np.arange(400) >= 200
    part = np.where(after, (np.arange(400) - 200) // 40, 0)  # the five whose means the error is from
    series["rate"] = 1.12 * series["rate"] * np.where(part % 2 == 0, 1 + sway / 2, 1 - sway / 2)
    entry = explain(written(tmp_path / "a", series))["w"]
    said = entry.about("equilibrium")
    assert said.verdict == verdict
    assert ("within two standard errors" in said.words) == (verdict == "undecided")
    means = [np.square(series["rate"][part == i][-40:]).mean() for i in range(5)]
    error = np.std(means, ddof=1) / np.sqrt(5) / np.mean(means) / 2
    off = abs(entry.measured_rate - entry.predicted_rate) / entry.measured_rate
    assert (error < 0.1, off > 0.1, off < 2 * error) == (True, True, verdict == "undecided")


def test_a_gradient_that_changed_is_the_reason_where_it_was_measured(tmp_path):
    series = walk(400, decay=0.05)
    series["rate"] = 1.5 * series["rate"]
    series["gradient_norm"] = series["gradient_norm"] * np.linspace(1, 2, 400)
    said = explain(written(tmp_path / "a", series))["w"].about("equilibrium")
    assert said.verdict == "no"
    assert "‖∇‖‖w‖ did not stay constant, which the prediction assumes: over quarters of the steps" in said.words
    assert "something other" not in said.words


# What counts as orthogonal.


def test_unrelated_gradients_are_not_taken_for_orthogonal_ones():
    draw = np.random.default_rng(0)
    for _ in range(200):
        w, g = draw.standard_normal((2, 10, 64))
        cosines = (w * g).sum(1) / np.linalg.norm(w, axis=1) / np.linalg.norm(g, axis=1)
        assert orthogonality(cosines, 64).found is not True


def test_between_zero_and_unrelated_nothing_is_decided(tmp_path):
    entry = explain(written(tmp_path / "a", walk(100, cosine=0.3)))["w"]
    assert entry.scale_invariant == "undecided: nearly orthogonal"
    assert verdicts(entry) == [*["undecided"] * 4, "does not apply"]


@pytest.mark.parametrize(("most", "found"), [(0.0288, True), (0.0648, None)])
def test_a_layer_that_is_only_nearly_invariant_is_not_said_to_be(tmp_path, most, found):
    # Of nine in ten steps of a layer whose ε is felt, and of one that rescaling changes the loss of by a tenth or more.
    cosines = np.linspace(0, most / 0.9, 101)
    assert orthogonality(cosines / 8, 64).most == pytest.approx(most)
    assert orthogonality(cosines / 8, 64).found is found
    said = explain(written(tmp_path / "a", walk(101) | {"invariance": cosines / 8}))["w"].about("scale invariance")
    assert said.verdict == ("yes" if found else "undecided")
    assert f"a 90th percentile of {most} over 101 measured steps" in said.words
    assert "pass model, loss and batch" in said.words


def test_a_layer_before_batch_normalization_is_orthogonal_by_a_wide_margin(resting):
    with gyroscope.load(resting) as run:
        assert orthogonality(run.series("invariance")[:, 0].astype(float), 120).most < 0.05 / 20


def test_a_cosine_that_crosses_zero_is_not_a_gradient_that_is_orthogonal():
    assert orthogonality(np.linspace(-0.1, 0.1, 41), 100).found is not True


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (normalized, [True, False]),
        (plain, [False, False]),
        (biased, [None, False]),
    ],
    ids=["batch norm", "no norm", "a bias before layer norm"],
)
def test_explain_and_predict_agree_on_which_layers_are_scale_invariant(tmp_path, make, expected):
    folder = train(tmp_path / "a", make(), sgd(lr=0.1), 60)
    verdict = {True: "yes", False: "no", None: "undecided"}
    said = [entry.about("scale invariance").verdict for entry in explain(folder).entries]
    with gyroscope.load(folder) as run:
        assert [one.scale_invariant for one in predictions(run)] == expected
    assert said == [verdict[one] for one in expected]


def test_a_small_median_does_not_make_a_layer_with_a_bias_before_layer_norm_scale_invariant(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))
    measured = predict_runs.train(net, lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9), 60, shape=(24,))
    series = {name: measured.series(name)[:, 0] for name in measured.quantities}
    assert 0.03 < np.sqrt(24 * 64) * np.median(np.abs(series["invariance"])) < 0.1
    made = {"class": "SGD", "momentum": 0.9}
    with gyroscope.load(written(tmp_path / "a", series, optimizer=made, shape=(64, 24))) as run:
        assert predictions(run)[0].scale_invariant is None
        assert explain(run)["w"].scale_invariant == "undecided: nearly orthogonal"
    # And it is not: with its weight rescaled and not its bias, it computes something else.
    x = torch.randn(8, 24)
    before = net[:2](x)
    with torch.no_grad():
        net[0].weight *= 3
    assert (net[:2](x) - before).abs().max() > 0.01


def test_gradients_that_add_up_are_undecided_for_predict_too(tmp_path):
    cosines = np.concatenate([[1e-9], np.full(40, 0.2)])
    with gyroscope.load(written(tmp_path / "a", walk(41) | {"invariance": cosines})) as run:
        assert predictions(run)[0].scale_invariant is None
        assert explain(run)["w"].scale_invariant == "undecided: orthogonal at first"


def test_what_is_known_of_an_optimizer_follows_its_class():
    assert optimizer_of({"class": "SGD_AMom", "momentum": 0.9}).memory.total == pytest.approx(1.0)
    assert optimizer_of({"class": "AdamW", "betas": [0.9, 0.99]}).settles == 100
    assert not optimizer_of({"class": "Adam", "betas": [0.9, 0.99]}).decays
    assert optimizer_of({"class": "Adam", "betas": [0.9, 0.99], "decoupled_weight_decay": True}).decays
    assert optimizer_of({"class": "Layca", "inner": "SGD", "momentum": 0.5}, steered=False).kind == "sgd"
    assert optimizer_of({}).family == "unknown"


# The result.


def test_rows_statements_and_words_say_the_same(resting):
    found = explain(resting)
    rows = found.rows()
    assert [row["layer"] for row in rows] == list(found) == ["0.weight", "3.weight"]
    assert [(one.layer, one.topic) for one in found.statements] == [(name, topic) for name in found for topic in TOPICS]
    text = " ".join(str(found).split())
    for one in found["0.weight"].statements:
        assert " ".join(str(one).split()) in text
    assert "effective learning rate, implicit decay, equilibrium: do not apply because" in text
    assert max(map(len, str(found).splitlines())) <= 120
    json.dumps(rows, allow_nan=False)


def test_a_data_frame_has_a_row_a_layer(resting):
    pytest.importorskip("pandas")
    frame = explain(resting).to_pandas()
    assert list(frame.index) == ["0.weight", "3.weight"]
    assert frame.loc["0.weight", "at_equilibrium"] == "yes"


def test_a_run_may_be_given_open_and_stays_so(resting):
    with gyroscope.load(resting) as run:
        assert gyroscope.explain(run).rows() == explain(str(resting)).rows()
        assert len(run.series("rate"))


def test_layers_are_chosen_by_pattern(resting):
    assert explain(resting, layers="3*").layers == ("3.weight",)
    assert explain(resting, layers=["0*", "3*"]).layers == ("0.weight", "3.weight")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"layers": "conv*"}, r"got 'conv\*'. It has 0.weight, 3.weight"),
        ({"model": nn.Linear(2, 2)}, "without a loss or a batch"),
        ({"loss": nn.functional.cross_entropy}, "without a model"),
    ],
)
def test_what_cannot_be_treated_is_refused(resting, given, says):
    with pytest.raises(DynamicsError, match=says):
        explain(resting, **given)


def test_a_model_of_other_layers_is_refused(resting):
    other = nn.Sequential(nn.Flatten(), nn.Linear(10, 4))
    with pytest.raises(DynamicsError, match="another model"):
        explain(resting, model=other, loss=nn.functional.cross_entropy, batch=clusters())


def test_a_model_of_other_shapes_is_refused(resting):
    x, y = clusters()
    other = nn.Sequential(nn.Linear(x.shape[1], 7), nn.ReLU(), nn.Identity(), nn.Linear(7, int(y.max()) + 1))
    with pytest.raises(DynamicsError, match=r"0\.weight has shape \(7, .* in the run"):
        explain(resting, model=other, loss=nn.functional.cross_entropy, batch=(x, y))


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(StoreError, match="There is no run"):
        explain(tmp_path)
    with pytest.raises(DynamicsError, match=r"`run` must be a run or its folder, got int. Try gyroscope\.load"):
        explain(3)


def test_unknown_layers_and_topics_are_named(resting):
    found = explain(resting)
    with pytest.raises(DynamicsError, match=r"the layers are 0\.weight, 3\.weight"):
        found["conv1"]
    with pytest.raises(DynamicsError, match="must be one of scale invariance"):
        found["0.weight"].about("norms")


def test_a_run_that_diverged_is_explained_as_far_as_it_was_finite(tmp_path):
    series = walk(60, lr=0.1)
    series["weight_norm"][50:] = np.inf
    said = explain(written(tmp_path / "a", series))["w"].about("effective learning rate")
    assert said.words.startswith("From step 1 to 50, ")


def test_groups_of_other_momentum_leave_the_equilibrium_undecided(tmp_path):
    def make(net):
        first, rest = [net[0].weight], [net[1].weight, net[1].bias, *net[3].parameters()]
        groups = [{"params": rest}, {"params": first, "momentum": 0.9}]
        return torch.optim.SGD(groups, lr=0.05, weight_decay=0.01)

    said = gyroscope.explain(train(tmp_path / "run", normalized(), make, 40))["0.weight"]
    assert said.about("equilibrium").verdict in ("undecided", "does not apply")
    assert "groups differ in momentum" in said.about("equilibrium").words


@pytest.mark.parametrize("optimizers", ["5", '["a"]', '{"class": "SGD"}'])
def test_optimizers_that_are_not_described_are_not_known(tmp_path, optimizers):
    write_example(tmp_path / "run").close()
    with sqlite3.connect(tmp_path / "run" / "run.sqlite") as file:
        file.execute("INSERT OR REPLACE INTO meta VALUES ('optimizers', ?)", (optimizers,))
    file.close()
    assert explain(tmp_path / "run").entries


def test_gradients_of_zero_are_not_called_not_finite(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model[2].bias.data.fill_(-50)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(16, 6)
    with gyroscope.watch(model, optimizer, tmp_path / "run", every=7) as monitor:
        for _ in range(30):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    said = explain(monitor.path)["0.weight"].about("scale invariance")
    assert said.verdict == "undecided"
    assert "Its gradient was zero" in said.words
    assert "finite" not in said.words


@pytest.mark.parametrize(("zeroed", "verdict"), [(True, "yes"), (False, "undecided")])
def test_gradients_that_add_up_do_not_make_a_layer_depend_on_its_scale(tmp_path, zeroed, verdict):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(256, 20), torch.randint(3, (256,))
    with gyroscope.watch(model, optimizer, tmp_path / "run", budget=None) as monitor:
        for _ in range(30):
            if zeroed:
                optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    said = explain(monitor.path)["0.weight"].about("scale invariance")
    assert said.verdict == verdict
    assert ("zero_grad" in said.words) != zeroed
