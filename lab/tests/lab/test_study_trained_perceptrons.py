import json
from dataclasses import replace
from math import inf, isfinite, log, nan, pi

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.conditioning.perceptron_courses import FACTORS, Course, Kind, a_layer, courses
from gyroscope_lab.papers.conditioning.trained_perceptrons import (
    PLANS,
    STUDIES,
    adam_verdicts,
    apart,
    condition_verdicts,
    ends,
    magnitude_verdicts,
    mostly,
    trials,
    unit_verdicts,
)
from gyroscope_lab.training.archive import Archive
from gyroscope_lab.training.result import Result
from lab.pretended import raw

BY_NAME = {study.name.removeprefix("conditioning/"): study for study in STUDIES}
PLAIN, BN = Kind("uniform", normalized=False), Kind("uniform", normalized=True)
HE_PLAIN, HE_BN = Kind("he_normal", normalized=False), Kind("he_normal", normalized=True)
FULL = Lab(Archive("nowhere"), "full")


@pytest.fixture(scope="module")
def reports(lab):
    return {name: study.run(lab) for name, study in BY_NAME.items()}


@pytest.fixture(scope="module")
def found(lab, reports):
    return courses(lab, trials(lab, "gradient"))


# What is trained at full scale


@pytest.mark.parametrize("name", ["fig3", "a5"])
def test_four_networks_are_trained_at_the_papers_four_rates(name):
    its = BY_NAME[name].trials(FULL)
    told = {(dict(t.task.options)["batch_norm"], dict(t.task.options)["init"], t.recipe.rate) for t in its}
    rates = (0.05, 0.1, 0.5, 1.0)
    assert told == {(bn, init, rate) for bn in (False, True) for init in ("uniform", "he_normal") for rate in rates}
    assert len(its) == 16
    for trial in its:
        assert (trial.recipe.optimizer, trial.recipe.momentum, trial.recipe.weight_decay) == ("sgd", 0.0, 0.0)
        assert (trial.task.model, trial.task.source.name, trial.task.source.per_class) == ("mlp-20x256", "mnist", None)
        assert (trial.schedule.cuts, trial.schedule.warmup) == ((), 0.0)


def test_the_full_gradient_takes_all_of_mnist_in_a_step_and_sgd_takes_1024_images():
    assert {tuple(t.schedule.batches(60_000)) for t in BY_NAME["fig3"].trials(FULL)} == {(60_000,)}
    assert {t.schedule.batch for name in ("a5", "a6", "a7") for t in BY_NAME[name].trials(FULL)} == {1024}


def test_the_networks_have_twenty_layers_without_biases_from_the_papers_weights():
    for kind, its in trials(FULL, "gradient").items():
        model = its[0].network()
        linear = [module for module in model if isinstance(module, nn.Linear)]
        assert [module.out_features for module in linear] == [256] * 19 + [10]
        assert all(module.bias is None for module in linear)
        assert sum(isinstance(module, nn.BatchNorm1d) for module in model) == (19 if kind.normalized else 0)
        weight = linear[5].weight.detach()
        if kind.init == "uniform":
            assert float(weight.abs().max()) <= 1 / 16
            assert float(weight.var()) == pytest.approx(1 / (3 * 256), rel=0.03)
        else:
            assert float(weight.var()) == pytest.approx(2 / 256, rel=0.03)


def test_figures_of_the_same_trainings_share_them():
    keys = {name: {trial.key for trial in study.trials(FULL)} for name, study in BY_NAME.items()}
    assert keys["fig5"] == keys["fig3"]
    assert keys["a6"] == keys["a5"]
    assert keys["a12"] < keys["fig3"]
    assert {dict(t.task.options)["init"] for t in BY_NAME["a12"].trials(FULL)} == {"he_normal"}


def test_adam_has_the_papers_three_rates_from_a_random_start_and_sgd_beside_it():
    adam = [trial for trial in BY_NAME["a7"].trials(FULL) if trial.recipe.optimizer == "adam"]
    assert sorted({trial.recipe.rate for trial in adam}) == [1e-4, 5e-4, 1e-3]
    assert {dict(trial.task.options)["init"] for trial in adam} == {"uniform"}
    others = {trial.key for trial in BY_NAME["a7"].trials(FULL)} - {trial.key for trial in adam}
    assert others == {trial.key for trial in trials(FULL, "sgd")[PLAIN]}


def test_without_mnist_the_small_scale_trains_as_many_networks_on_digits():
    its = BY_NAME["fig3"].trials(Lab(Archive("nowhere"), "small"))
    assert len(its) == 16
    assert {(trial.task.source.name, trial.task.model) for trial in its} == {("digits", "mlp-20x256")}
    assert its[0].network()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


# What is measured


def literal(trial):
    """Inputs and output gradients of every linear layer, and outputs of every ReLU, at the start, per example."""
    split = trial.task.source.load()
    x, y = split.inputs(split.x_train).double(), split.y_train
    model = trial.network().double().train()
    inputs, outputs, active = [], [], []
    for module in model:
        if isinstance(module, nn.Linear):
            inputs.append(x.detach())
            x = module(x)
            x.retain_grad()
            outputs.append(x)
        else:
            x = module(x)
        if isinstance(module, nn.ReLU):
            active.append(x.detach() > 0)
    F.cross_entropy(x, y, reduction="sum").backward()
    return inputs, [h.grad for h in outputs], active


@pytest.mark.parametrize("kind", [PLAIN, HE_BN], ids=["plain", "bn"])
def test_the_first_analysis_is_that_of_the_network_at_its_start(lab, found, kind):
    inputs, gradients, active = literal(trials(lab, "gradient")[kind][0])
    one = found[kind]
    assert one.steps[0] == 1
    for name, samples in (("x", inputs), ("g", gradients)):
        for layer, rows in enumerate(samples):
            spectrum = torch.linalg.eigvalsh(rows.T @ rows / len(rows)).flip(0)
            assert one.lambdas[name][0, layer] == pytest.approx(float(spectrum[0]), rel=1e-3)
            half = spectrum[len(spectrum) // 2 - 1]
            if half > 1e-6 * spectrum[0]:
                assert one.kappas[name][0.5][0, layer] == pytest.approx(float(spectrum[0] / half), rel=1e-2)
    for layer, where in enumerate(active):
        assert one.units["dying"][0, layer] == int((~where).all(dim=0).sum())
        assert one.units["full"][0, layer] == int(where.all(dim=0).sum())


def test_of_the_rates_that_with_the_lowest_last_loss_is_shown(lab, found):
    for kind, its in trials(lab, "gradient").items():
        ends = {trial.recipe.rate: raw(lab, trial)["loss"][-1] for trial in its}
        known = {rate: loss for rate, loss in ends.items() if loss is not None and isfinite(loss)}
        assert found[kind].rate == min(known, key=known.get)
        assert found[kind].loss == min(known.values())


def test_a_factor_a_layer_is_the_slope_of_a_fitted_line():
    values = np.random.default_rng(0).lognormal(size=9)
    slope = np.polyfit(np.arange(8), np.log(values[1:]), 1)[0]
    assert a_layer(values, forward=True) == pytest.approx(np.exp(slope))
    slope = np.polyfit(np.arange(8), np.log(values[:8]), 1)[0]
    assert a_layer(values, forward=False) == pytest.approx(np.exp(-slope))
    assert np.isnan(a_layer(np.array([1.0, 0.0, 2.0]), forward=True))


# The smoke test


def held(report):
    return {verdict.says: verdict.holds for verdict in report.verdicts}


@pytest.mark.parametrize("name", ["fig3", "a5"])
def test_magnitudes_decay_in_the_plain_network_from_a_random_start_alone(reports, name):
    told = held(reports[name])
    assert len(told) == 9
    # Training moves the inputs of so small a network apart, from He's start too. Backwards, gradients of a normalized
    # network grow by nearly π/(π − 1) a layer.
    assert {says for says, holds in told.items() if not holds} - {
        "from He's start the magnitude of the layer input of Plain is stable across layers"
    } == {
        "BN preserves the magnitude of the layer output gradient for both initializations, to a factor of 10 between "
        "layers"
    }


def test_gradients_of_a_normalized_network_grow_backwards_by_nearly_as_much_as_those_of_a_wide_one(found):
    for kind in (BN, HE_BN):
        assert ends(found[kind], "g")[0] == pytest.approx(pi / (pi - 1), rel=0.15)


def test_the_factor_between_layers_is_that_of_the_largest_to_the_smallest_but_for_images_and_outputs(found):
    for one in found.values():
        x, g = one.lambdas["x"][:, 1:], one.lambdas["g"][:, :-1]
        for name, values in (("x", x), ("g", g)):
            assert apart(one, name) == pytest.approx([max(row) / min(row) for row in values.tolist()])


def test_a_random_start_loses_a_factor_of_six_a_layer(found):
    assert ends(found[PLAIN], "x")[0] == pytest.approx(1 / 6, rel=0.15)
    assert ends(found[PLAIN], "g")[0] == pytest.approx(1 / 6, rel=0.15)
    assert ends(found[BN], "x")[0] == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize("name", ["fig5", "a6", "a7"])
def test_normalized_networks_start_better_conditioned_and_their_inputs_stay_so(reports, name):
    told = {
        says: holds
        for says, holds in held(reports[name]).items()
        if says.endswith("at first") or ("layer input" in says and says.endswith("over the training"))
    }
    assert len(told) == (3 if name == "a7" else 6)
    assert all(told.values())


def test_adam_makes_up_for_a_random_start_and_sgd_does_not(reports):
    adjusted = [holds for says, holds in held(reports["a7"]).items() if says.startswith("Adam adjusts")]
    assert adjusted == [True, True]


def test_dying_and_full_neurons_are_those_of_deep_plain_layers(reports):
    assert len(reports["a12"].verdicts) == 5
    assert all(held(reports["a12"]).values())


def test_the_table_of_losses_has_every_rate_of_every_network(lab, reports):
    table = reports["fig3"].tables[0]
    assert table.columns[2:-2] == tuple(f"rate {rate:g}" for rate in PLANS["smoke"].rates)
    for row, its in zip(table.rows, trials(lab, "gradient").values(), strict=True):
        assert row[2:-2] == tuple(f"{raw(lab, trial)['loss'][-1]:.3g}" for trial in its)
        assert row[-1] is None


def test_the_numbers_of_a_report_are_those_that_its_figure_shows(reports, found):
    for told, one in zip(reports["fig5"].numbers["networks"], found.values(), strict=True):
        for name in FACTORS:
            np.testing.assert_allclose(told[f"kappa_{name}"]["50"], one.kappas[name][0.5], rtol=1e-3)
    shown = reports["fig3"].figures["figure"].axes[0].lines
    drawn = np.concatenate([line.get_ydata() for line in shown if len(line.get_ydata()) > 2])
    for at in (0, -1):
        assert np.isin(found[PLAIN].lambdas["x"][at], drawn).all()


def test_a_report_is_saved_whole(lab, reports, tmp_path):
    written = {path.name for path in BY_NAME["a12"].save(lab, reports["a12"], tmp_path)}
    assert written == {"figure.png", "figure.svg", "README.md", "result.json"}


@pytest.mark.parametrize("name", BY_NAME)
def test_every_number_can_be_kept_as_strict_json(lab, reports, name):
    kept = json.loads(json.dumps(BY_NAME[name].as_json(lab, reports[name]), allow_nan=False))
    assert [one["holds"] for one in kept["findings"]] == [one.holds for one in reports[name].verdicts]
    assert len(kept["numbers"]["networks"]) == (2 if name in ("a7", "a12") else 4)


def test_figures_of_magnitudes_have_the_papers_panels(reports):
    for name in ("fig3", "a5"):
        axes = reports[name].figures["figure"].axes
        assert [ax.get_title()[:3] for ax in axes] == ["(a)", "(b)", "(c)", "(d)", "(e)", "(f)"]
        assert [ax.get_xlabel() for ax in axes[:3]] == ["layer", "layer", "iteration" if name == "fig3" else "epoch"]
    assert [ax.get_title()[:3] for ax in reports["a7"].figures["figure"].axes][:5] == [
        "(a)",
        "(b)",
        "(c)",
        "(d)",
        "(e)",
    ]


# What would not be so


def made(kind, *, loss, factor=1.0, kappa=10.0, dying=0):
    """A course of two analyses in which λmax changes by `factor` per layer, forward and backward."""
    forward = np.tile(factor ** np.arange(6.0), (2, 1))
    result = Result(0.5, 0.5, loss=[2.3, loss], layers=["l"] * 6, rotation=[[0.0] * 6])
    kappas = {name: {0.5: np.full((2, 6), kappa)} for name in ("x", "g")}
    counts = np.tile(dying * np.arange(5.0), (2, 1))
    return Course(
        kind, 0.1, result, {0.1: loss}, [1, 2], {"x": forward, "g": forward[:, ::-1]}, kappas, [1, 2],
        {"dying": counts, "full": counts},
    )  # fmt: skip


def verdicts(*its, of=magnitude_verdicts):
    return [verdict.holds for verdict in of({one.kind: one for one in its})]


def test_a_plain_network_that_keeps_magnitudes_or_trains_is_told_apart():
    assert verdicts(made(PLAIN, loss=2.3, factor=0.2), made(BN, loss=0.1)) == [True] * 7
    assert verdicts(made(PLAIN, loss=2.3, factor=0.6), made(BN, loss=0.1)) == [False, False, *[True] * 5]
    assert verdicts(made(PLAIN, loss=0.5, factor=0.2), made(BN, loss=0.1))[-1] is False
    assert verdicts(made(PLAIN, loss=2.3, factor=0.2), made(BN, loss=0.6 * log(10)))[-1] is False
    assert verdicts(made(HE_PLAIN, loss=1.0, factor=0.3)) == [False, False]


def test_a_factor_that_looks_small_a_layer_is_not_stable_over_all_of_them():
    """With six layers, five are compared, with four factors between them."""
    for factor, holds in ((1.7, True), (1 / 1.7, True), (1.8, False), (1 / 1.8, False), (0.0, False), (nan, False)):
        assert verdicts(made(HE_PLAIN, loss=1.0, factor=factor)) == [holds] * 2
        assert verdicts(made(HE_BN, loss=1.0, factor=factor)) == [holds] * 2
    even, in_the_end = np.ones((2, 6)), np.stack([np.ones(6), 1.8 ** np.arange(6.0)])
    assert verdicts(replace(made(HE_BN, loss=1.0), lambdas={"x": even, "g": in_the_end})) == [True, False]


def test_a_plain_network_that_is_uneven_only_in_between_is_not_stable():
    lambdas = np.stack([np.ones(6), 1.8 ** np.arange(6.0), np.ones(6)])
    one = replace(made(HE_PLAIN, loss=1.0), lambdas={"x": lambdas, "g": np.ones((3, 6))})
    assert verdicts(one) == [False, True]


def test_normalization_preserves_more_than_the_plain_network_with_half_its_orders_of_magnitude():
    """Plain loses a factor of 4 per layer: 256 over the four steps between five layers, and 16 is its root."""
    plain = made(PLAIN, loss=2.3, factor=1 / 4)
    for factor, relative, absolute in ((1.7, True, True), (1.9, True, False), (2.1, False, False)):
        said = magnitude_verdicts({PLAIN: plain, BN: made(BN, loss=0.1, factor=factor)})
        assert [one.holds for one in said if "far better than Plain" in one.says] == [relative] * 2
        assert [one.holds for one in said if "for both initializations" in one.says] == [absolute] * 2


def test_adam_adjusts_magnitudes_where_its_layers_are_far_less_apart_than_those_of_sgd():
    sgd = made(PLAIN, loss=2.3, factor=1 / 4)
    for factor, holds in ((1.9, True), (2.1, False), (0.0, False)):
        said = adam_verdicts({PLAIN: made(PLAIN, loss=1.0, factor=factor)}, sgd)
        assert [one.holds for one in said if one.says.startswith("Adam adjusts")] == [holds] * 2


def test_conditioning_is_better_where_it_is_lower_in_nearly_all_layers():
    plain = made(PLAIN, loss=2.3, kappa=20.0)
    assert verdicts(plain, made(BN, loss=0.1), of=condition_verdicts) == [*[True] * 4, None]
    assert verdicts(plain, made(BN, loss=0.1, kappa=inf), of=condition_verdicts) == [*[False] * 4, None]
    for layers, holds in ((1, None), (3, False)):  # of five
        worse = made(BN, loss=0.1)
        worse.kappas["x"][0.5][:, -layers:] = nan  # undefined is as bad as infinite
        assert verdicts(plain, worse, of=condition_verdicts) == [holds, holds, True, True, None]


@pytest.mark.parametrize(
    ("better", "of", "layers", "holds"),
    [
        (18, 19, 19, True),
        (17, 19, 19, None),
        (16, 19, 19, False),
        (170, 200, 20, None),  # ten cases of each layer
        (169, 200, 20, False),
        (0, 1, 1, None),
        (0, 0, 5, None),
    ],
)
def test_one_layer_does_not_turn_a_claim_that_is_shown_into_one_that_is_not(better, of, layers, holds):
    assert mostly(better, of, layers=layers) is holds


def test_conditioning_that_turns_over_in_training_is_told_of():
    plain, normalized = made(PLAIN, loss=2.3, kappa=20.0), made(BN, loss=0.1)
    normalized.kappas["g"][0.5][-1] = 90.0
    its = {one.kind: one for one in (plain, normalized)}
    at_first, throughout = condition_verdicts(its)[2:4]
    assert (at_first.holds, throughout.holds) == (True, False)
    assert throughout.here.startswith("κ_50%(Σ∇h) lower in 5 of 10 layers and analyses; 10 and 20 in the middle")
    assert throughout.here.endswith("in the last analysis in 0 of 5, 90 and 20")


def learning(kind, losses, kappas):
    """A course with an analysis in each of its steps, and κ of all layers at each."""
    result = Result(0.5, 0.5, loss=losses, layers=["l"] * 6, rotation=[[0.0] * 6])
    values = np.tile(np.array(kappas)[:, None], (1, 6))
    kept = {name: {0.5: values} for name in ("x", "g")}
    return replace(made(kind, loss=losses[-1]), result=result, steps=list(range(1, len(losses) + 1)), kappas=kept)


@pytest.mark.parametrize(
    ("losses", "plain", "lower", "holds"),
    [
        ([2.3, 1.0, 0.5, 0.1], [30.0, 60.0, 90.0, 510.0], "15 of 15", True),  # κ is higher at each loss
        ([2.3, 1.0, 0.5, 0.1], [30.0, 60.0, 90.0, 490.0], "10 of 15", False),
        ([2.3, 1.0, 0.5, 0.1], [30.0, 40.0, 70.0, 490.0], "0 of 15", False),
        ([2.3, 2.2, 1.0, 0.5], [30.0, 40.0, 60.0, 90.0], "10 of 10", None),  # two analyses tell little
    ],
)
def test_conditioning_is_compared_where_both_networks_have_learned_as_much(losses, plain, lower, holds):
    """Losses of 1, 0.5 and 0.1 are those of the first steps of the normalized network, which goes on to 0.01."""
    normalized = learning(BN, [1.0, 0.5, 0.1, 0.01], [50.0, 80.0, 500.0, 5000.0])
    its = {PLAIN: learning(PLAIN, losses, plain), BN: normalized}
    throughout, equal = condition_verdicts(its)[-2:]
    assert throughout.holds is False
    assert (equal.says.endswith("at training losses as low or lower"), equal.holds) == (True, holds)
    analyses = sum(loss <= 1.0 for loss in losses)
    assert equal.here == f"κ_50%(Σ∇h) lower in {lower} layers and analyses of Plain, against {analyses} of BN"


def test_the_normalized_network_is_compared_at_the_next_lower_loss_even_if_a_higher_one_is_closer():
    """Plain's losses of 0.98 and 0.4 are compared with 0.5 and 0.1, although 1.0 and 0.5 are closer."""
    normalized = learning(BN, [1.0, 0.5, 0.1, 0.01], [10.0, 80.0, 500.0, 5000.0])
    for kappas, lower in (([9.0, 9.0, 81.0, 501.0], 10), ([9.0, 9.0, 79.0, 499.0], 0)):
        its = {PLAIN: learning(PLAIN, [2.3, 2.2, 0.98, 0.4], kappas), BN: normalized}
        assert f"lower in {lower} of 10 layers" in condition_verdicts(its)[-1].here


def test_analyses_of_plain_that_share_one_of_the_normalized_network_are_told():
    normalized = learning(BN, [1.5, 0.2, 0.1, 0.01], [10.0, 20.0, 500.0, 5000.0])
    its = {PLAIN: learning(PLAIN, [1.4, 1.2, 0.9, 0.6], [30.0] * 4), BN: normalized}
    assert condition_verdicts(its)[-1].here.endswith("lower in 20 of 20 layers and analyses of Plain, against 1 of BN")


@pytest.mark.parametrize("losses", [[2.3] * 4, [0.004] * 4, [nan] * 4], ids=["guesses", "lower", "diverged"])
def test_networks_that_never_have_the_same_loss_are_undecided_at_equal_losses(losses):
    its = {PLAIN: learning(PLAIN, losses, [9.0] * 4), BN: learning(BN, [2.31, 0.5, 0.1, 0.01], [1.0] * 4)}
    equal = condition_verdicts(its)[-1]
    assert (equal.says.endswith("at training losses as low or lower"), equal.holds) == (True, None)
    assert equal.here == "the losses do not overlap below 2.07, nine tenths of that of guessing"


def test_dying_neurons_of_a_normalized_network_are_not_passed_over():
    grows = made(HE_PLAIN, loss=1.0, dying=2)
    assert verdicts(grows, of=unit_verdicts) == [True, False, True, False]
    assert verdicts(made(HE_BN, loss=1.0, dying=1), of=unit_verdicts) == [False]
    assert verdicts(made(HE_BN, loss=1.0), of=unit_verdicts) == [True]


def test_adam_is_steadier_with_normalization_only_if_no_rate_is_worse():
    plain, normalized = made(PLAIN, loss=1.0), made(BN, loss=0.1)
    its = {PLAIN: plain, BN: normalized}
    assert next(one for one in adam_verdicts(its, None) if "stabilizes" in one.says).holds
    worse = {PLAIN: plain, BN: replace(normalized, tried={0.1: 0.1, 0.2: nan})}
    assert not next(one for one in adam_verdicts(worse, None) if "stabilizes" in one.says).holds
