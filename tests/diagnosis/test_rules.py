"""Every rule on a course that it is about, and on one in which nothing is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from math import e, log

import numpy as np
import pytest

from diagnosis.courses import NAMES, STEPS, healthy
from gyroscope.diagnosis import KINDS, findings, ordered
from gyroscope.diagnosis.rules import CONSEQUENCES, LIMITS, RULES, may_be_healthy

MIDDLE = 2


def spoiled(course=None, **values):
    """The course with some series changed: by a function of the array, or with an array."""
    course = healthy() if course is None else course
    series = {name: values_.copy() for name, values_ in course.series.items()}
    if "weight_norm" in values:
        series["weight_norm_before"][:] = np.nan
    for name, change in values.items():
        series[name] = change(series[name]) if callable(change) else change
    return replace(course, series=series)


def column(change, index=MIDDLE):
    """Change one layer's column."""

    def act(values):
        values[:, index] = change(values[:, index])
        return values

    return act


def alarms(course):
    return [one for one in ordered(findings(course)) if one.is_alarm]


def first(course):
    found = alarms(course)
    assert found, "no alarm"
    return found[0]


def test_a_healthy_course_raises_no_alarm_with_or_without_its_loss():
    course = healthy()
    assert alarms(course) == []
    assert alarms(replace(course, loss=np.empty(0), loss_steps=np.empty(0, dtype=np.int64))) == []


@pytest.mark.parametrize("fact", ["frozen", "unheld"])
def test_an_untrained_layer_between_trained_ones_is_serious(fact):
    found = first(healthy(facts={fact: [NAMES[MIDDLE]]}))
    assert (found.kind, found.severity) == ({"frozen": "frozen", "unheld": "not_in_optimizer"}[fact], "serious")
    assert found.layers == (NAMES[MIDDLE],)


@pytest.mark.parametrize("fact", ["frozen", "unheld"])
def test_a_layer_that_begins_to_train_later_is_no_untrained_one(fact):
    """Its rate counts since then, and without recorded updates the facts count."""
    course = healthy(facts={fact: [NAMES[MIDDLE]], "replaced": [NAMES[MIDDLE]] * (fact == "unheld"), "foreign": 1})
    late = np.arange(61) >= 57
    later = spoiled(course, update_norm=column(lambda u: u + late), rate_per_step=column(lambda rate: rate * late))
    assert findings(later) == []
    unknown = spoiled(later, update_norm=lambda u: np.nan * u)
    assert [one.severity for one in findings(unknown)] == ["serious"]


def test_a_backbone_is_named_as_it_is_in_the_model():
    (found,) = findings(healthy(facts={"frozen": [NAMES[0]]}))
    assert found.sentence.startswith("stem.weight is not trained")


@pytest.mark.parametrize("fact", ["frozen", "unheld"])
@pytest.mark.parametrize("names", [NAMES[:2], NAMES[:4]], ids=["first layers", "all but the head"])
def test_a_backbone_that_is_not_trained_is_a_note(fact, names):
    found = ordered(findings(healthy(facts={fact: list(names)})))
    assert [one.severity for one in found if one.kind in ("frozen", "not_in_optimizer")] == ["note"]
    assert not any(one.is_alarm for one in found)


def test_layers_with_trained_adapters_are_a_note():
    course = healthy(facts={"frozen": [NAMES[0], NAMES[3]]})
    names = ["q.base.weight", "q.lora_a.weight", "q.lora_b.weight", "k.base.weight", "k.lora_b.weight"]
    table = tuple(replace(layer, name=name) for layer, name in zip(course.layers, names, strict=True))
    frozen = [name for name in names if "base" in name]
    found = ordered(findings(replace(course, layers=table, meta=course.meta | {"facts": {"frozen": frozen}})))
    assert [(one.kind, one.severity) for one in found] == [("frozen", "note")]


def test_parameters_that_were_replaced_are_named():
    facts = {"unheld": [NAMES[1]], "replaced": [NAMES[1]], "foreign": 1}
    found = first(healthy(facts=facts))
    assert (found.kind, found.layers, found.severity) == ("replaced", (NAMES[1],), "serious")


def test_parameters_of_other_models_alone_are_no_finding():
    assert alarms(healthy(facts={"foreign": 7})) == []


def test_a_learning_rate_of_zero():
    assert first(spoiled(lr=column(lambda lr: 0 * lr))).kind == "no_learning_rate"


def test_a_warm_up_from_zero_and_a_cosine_to_zero_are_healthy():
    rise = np.minimum(1.0, np.arange(61) / 12)[:, None]
    fall = 0.5 * (1 + np.cos(np.pi * np.arange(61) / 60))[:, None]
    for shape in (rise, fall):
        assert alarms(spoiled(lr=lambda lr, shape=shape: lr * shape)) == []


def test_units_that_start_alike():
    found = first(healthy(facts={"symmetric": [NAMES[MIDDLE]]}))
    assert (found.kind, found.severity, found.layers) == ("symmetric", "warning", (NAMES[MIDDLE],))


def test_large_initial_weights():
    found = first(spoiled(weight_norm=column(lambda norm: 100 * norm)))
    assert (found.kind, found.layers) == ("large_weights", (NAMES[MIDDLE],))
    assert found.evidence["norm_per_unit"] == pytest.approx(100, rel=0.01)


def test_normalizers_in_eval_mode():
    found = first(spoiled(norm_evaluates=column(lambda flag: flag + 1)))
    assert (found.kind, found.layers) == ("eval_mode", (NAMES[MIDDLE],))
    assert "eval mode" in found.sentence
    frozen = healthy(facts={"frozen": list(NAMES[:2])})
    assert alarms(spoiled(frozen, norm_evaluates=column(lambda flag: flag + 1, index=1))) == []


def test_gradients_that_are_not_cleared():
    carried = column(lambda share: share + 0.3 * (np.arange(len(share)) > 1))
    assert first(spoiled(gradient_carried=carried)).kind == "gradients_accumulate"


def test_one_strange_sampled_step_of_several_is_not_enough():
    assert alarms(spoiled(gradient_carried=column(lambda share: share + 0.3 * (np.arange(len(share)) == 20)))) == []


def test_ranks_that_drift_apart():
    found = first(replace(healthy(), apart=((16, 0.01), (64, 0.2))))
    assert (found.kind, found.since, found.severity) == ("ranks_differ", 16, "serious")


def test_a_repeated_batch_is_recognized_by_what_enters_the_first_layer():
    def same(values):
        values[np.isfinite(values[:, 0]), 0] = 0.7
        return values

    assert first(spoiled(input_mean=same, input_rms=same)).kind == "repeated_batch"


def test_positions_that_enter_an_embedding_are_no_repeated_batch():
    course = healthy()
    table = (replace(course.layers[0], kind="embedding"), *course.layers[1:])
    at = np.isfinite(course["input_mean"][:, 0])
    positions = np.arange(32)

    def fixed(value):
        return column(lambda x: np.where(at, value, np.nan), index=0)

    mean, rms = positions.mean(), np.sqrt(np.square(positions).mean())
    assert alarms(spoiled(replace(course, layers=table), input_mean=fixed(mean), input_rms=fixed(rms))) == []


def test_inputs_of_unusual_scale():
    found = first(spoiled(input_rms=column(lambda rms: 255 * rms, index=0)))
    assert (found.kind, found.layers) == ("input_scale", NAMES[:1])


def test_weights_that_are_not_finite_name_their_layer_and_step():
    def broken(norm):
        norm[31:, MIDDLE] = np.nan
        norm[33:] = np.nan
        return norm

    found = first(spoiled(weight_norm=broken))
    assert (found.kind, found.layers, found.severity) == ("not_finite", (NAMES[MIDDLE],), "serious")
    assert found.since == healthy().steps[31]


def test_a_loss_that_is_not_finite_is_told_without_a_layer():
    course = healthy()
    loss = course.loss.copy()
    loss[200:] = np.nan
    found = first(replace(course, loss=loss))
    assert (found.kind, found.layers, found.since) == ("not_finite", (), 201)


def test_a_loss_that_was_finite_again_is_not_finite_since_its_last_stretch():
    course = healthy()
    loss = course.loss.copy()
    loss[[4, 298, 299]] = np.nan
    found = first(replace(course, loss=loss))
    assert (found.kind, found.since) == ("not_finite", 299)
    assert "since step 299; it was not at step 5 either" in found.sentence
    loss[299] = 0.1
    assert alarms(replace(course, loss=loss)) == []


def test_of_layers_that_broke_in_one_step_the_one_that_was_broken_before_it_is_named():
    def broken(norm):
        norm[31:] = np.nan
        return norm

    before = healthy()["weight_norm_before"]
    before[31, MIDDLE] = np.nan
    before[32:] = np.nan
    found = first(spoiled(weight_norm=broken, weight_norm_before=before))
    assert (found.kind, found.layers) == ("not_finite", (NAMES[MIDDLE],))


@pytest.mark.parametrize("after", [np.nan, 1e30], ids=["all weights break", "all norms explode"])
def test_a_layer_that_was_changed_between_two_steps_is_named_whatever_the_step_made_of_the_others(after):
    def lost(norm):
        norm[31:] *= after
        return norm

    before = healthy()["weight_norm_before"]
    before[31, MIDDLE] = 1e36
    before[32:] *= after

    def unknown(length):
        length[31:] *= after
        return length

    changed = {"weight_norm": lost, "weight_norm_before": before, "update_norm": unknown, "update_ratio": unknown}
    found = first(spoiled(**changed))
    assert (found.kind, found.layers, found.since) == ("jump", (NAMES[MIDDLE],), healthy().steps[31])


def test_layers_that_decay_has_shrunk_to_nothing_neither_jump_nor_go_too_fast():
    def shrunk(norm):
        norm *= 0.6 ** np.arange(len(norm))[:, None]
        norm[40:, MIDDLE] *= 100
        return norm

    def long(ratio):
        ratio[21:] = 3.0
        return ratio

    decays = spoiled(weight_norm=shrunk, update_ratio=long, weight_decay=lambda decay: 100 * decay)
    assert first(decays).kind == "decay_dominates"


def test_a_layer_that_begins_at_zero_unlike_the_others_of_its_kind():
    def zero(*columns):
        def act(norm):
            norm[0, list(columns)] = 0.0
            return norm

        return {"weight_norm": act}

    found = first(spoiled(**zero(MIDDLE)))
    assert (found.kind, found.severity, found.layers) == ("zero_weights", "warning", (NAMES[MIDDLE],))
    assert alarms(spoiled(**zero(4))) == []  # a new head
    assert alarms(spoiled(**zero(1, 2, 3))) == []  # all of a kind: they are meant to start as if they were not there


def test_a_jump_of_one_layer():
    found = first(spoiled(weight_norm=column(lambda norm: np.where(np.arange(len(norm)) >= 30, 1e6, 1) * norm)))
    assert (found.kind, found.layers, found.since) == ("jump", (NAMES[MIDDLE],), healthy().steps[30])


def test_a_jump_that_no_step_explains_names_its_layer_although_the_others_follow():
    def all_jump(norm):
        norm[30:] *= 1e6
        return norm

    def long_steps(length):
        length[30:, [0, 1, 3, 4]] *= 1e9
        return length

    found = first(spoiled(weight_norm=all_jump, update_norm=long_steps))
    assert (found.kind, found.layers) == ("jump", (NAMES[MIDDLE],))


def test_steps_as_long_as_the_weights():
    def long(ratio):
        ratio[2:5] = 3.0
        return ratio

    found = first(spoiled(update_ratio=long))
    assert (found.kind, found.evidence["update_ratio"]) == ("too_fast", 3.0)


def test_first_steps_as_long_as_the_weights_need_a_loss_that_halves():
    def long(ratio):
        ratio[1] = 3.0
        return ratio

    course = replace(spoiled(update_ratio=long), steps=np.arange(61))
    assert alarms(course) == []
    assert first(replace(course, loss=np.full(STEPS, 2.0))).kind == "too_fast"
    assert first(replace(course, loss=np.where(np.arange(STEPS) < 290, course.loss, np.nan))).kind == "too_fast"
    assert first(replace(course, steps=course.steps + 10)).kind == "too_fast"
    assert first(replace(course, loss_steps=course.loss_steps + 10)).kind == "too_fast"  # the first one may be after it


@pytest.mark.parametrize("begins", [np.inf, np.nan])
def test_a_first_loss_that_is_not_finite_excuses_no_long_first_step(begins):
    def long(ratio):
        ratio[1] = 3.0
        return ratio

    course = replace(spoiled(update_ratio=long), steps=np.arange(61))
    course = replace(course, loss=np.concatenate([[begins], course.loss[1:]]))
    assert not may_be_healthy(course)
    assert first(course).kind == "too_fast"


def test_a_first_step_of_several_times_the_weights_is_an_alarm_though_the_loss_falls():
    """As at 300 times the rate in a network with batch normalization, which learns with weights far too large."""

    def long(ratio):
        ratio[1] = 6.0
        return ratio

    course = replace(spoiled(update_ratio=long), steps=np.arange(61))
    assert course.loss[-1] < 0.5 * course.loss[0]
    assert first(course).kind == "too_fast"


def test_norms_that_blow_up_do_not_wait_for_a_loss():
    def long(ratio):
        ratio[1] = 3.0
        return ratio

    course = replace(spoiled(update_ratio=long), steps=np.arange(61))
    assert may_be_healthy(course)
    assert not may_be_healthy(replace(course, loss=course.loss[::-1]))
    assert not may_be_healthy(spoiled(course, weight_norm=lambda norm: norm * 1.35 ** np.arange(len(norm))[:, None]))


def test_layers_that_hardly_turn():
    course = spoiled(rate_per_step=lambda rate: 1e-4 * rate, rotation=lambda rotation: 1e-6 * rotation)
    course = replace(course, loss=np.full(STEPS, 2.0))
    found = first(course)
    assert (found.kind, found.severity) == ("too_slow", "serious")
    # Where the loss falls, slow layers are slow on purpose.
    assert alarms(replace(course, loss=healthy().loss)) == []


def test_slow_layers_that_keep_their_direction_could_go_faster():
    course = spoiled(rate_per_step=lambda rate: 0.02 * rate, alignment=lambda cosine: 0 * cosine + 0.99)
    assert (first(course).kind, first(course).severity) == ("too_slow", "warning")


def test_one_layer_that_is_far_behind_its_neighbors():
    found = first(spoiled(rate_per_step=column(lambda rate: 1e-3 * rate)))
    assert (found.kind, found.layers) == ("slow_layer", (NAMES[MIDDLE],))


def test_a_slow_backbone_is_no_alarm():
    def slow(rate):
        rate[:, :4] *= 1e-3
        return rate

    assert alarms(spoiled(rate_per_step=slow)) == []


def test_an_idle_expert_is_a_note():
    course = healthy()
    names = ["in.weight", "moe.experts.0.w.weight", "moe.experts.1.w.weight", "moe.experts.2.w.weight", "out.weight"]
    table = tuple(replace(layer, name=name) for layer, name in zip(course.layers, names, strict=True))
    nothing = column(lambda values: 0 * values)
    found = ordered(findings(spoiled(replace(course, layers=table), rate_per_step=nothing, gradient_norm=nothing)))
    assert [(one.kind, one.severity) for one in found] == [("idle", "note")]


def test_no_gradient_below_a_detach():
    def cut(gradient):
        gradient[:, :2] = np.nan
        return gradient

    def still(rate):
        rate[:, :2] = 0.0
        return rate

    found = first(spoiled(gradient_norm=cut, rate_per_step=still))
    assert (found.kind, found.layers) == ("no_gradient", (NAMES[1], NAMES[0]))


def test_no_gradient_at_all():
    course = spoiled(gradient_norm=lambda g: 0 * g, rate_per_step=lambda r: 0 * r)
    assert first(course).kind == "no_gradient"
    assert "nothing trains" in first(course).sentence


def test_a_run_that_records_no_gradients_says_nothing_about_them():
    course = healthy()
    weights = {name: values for name, values in course.series.items() if name != "gradient_norm"}
    assert "no_gradient" not in {one.kind for one in findings(replace(course, series=weights))}


def test_a_schedule_that_collapses():
    shape = np.where(np.arange(61) < 12, 1.0, 0.9 ** (5.0 * (np.arange(61) - 12)))[:, None]
    found = first(spoiled(lr=lambda lr: lr * shape))
    assert found.kind == "schedule_collapsed"
    assert abs(found.since - 60) <= 10


def test_decay_that_halves_the_weights_in_a_few_steps():
    assert first(spoiled(weight_decay=lambda decay: 100 * decay)).kind == "decay_dominates"


def test_decay_that_adam_divides_with_the_gradient():
    adam = {"class": "Adam", "lr": 1e-3, "weight_decay": 1.0}
    course = healthy(optimizer=adam)
    pulled = spoiled(course, weight_decay=lambda decay: 0 * decay + 1.0, lr=lambda lr: 0.01 * lr)
    assert first(pulled).kind == "decay_dominates"
    decoupled = adam | {"class": "AdamW", "decoupled_weight_decay": True}
    assert alarms(replace(pulled, meta={"optimizers": [decoupled]})) == []


@pytest.mark.parametrize(
    ("options", "share", "dominates"),
    [
        ({"class": "SGD", "momentum": 0.9}, 1e-3, True),
        ({"class": "SGD", "momentum": 0.9, "dampening": 0.9}, 1e-3, False),
        ({"class": "SGD", "momentum": 1.0}, 1e-3, False),
        ({"class": "AdamW"}, 1e-2, True),
        ({"class": "AdamW", "amsgrad": True}, 1e-2, True),
        ({"class": "Muon"}, 1e-2, True),
        ({"class": "Adadelta"}, 1e-2, False),
        ({"class": "Prodigy"}, 1e-2, False),
    ],
    ids=["SGD", "dampened", "momentum 1", "AdamW", "amsgrad", "Muon", "Adadelta", "Prodigy"],
)
def test_decay_halves_the_weights_only_under_an_optimizer_that_is_known_to_do_so(options, share, dominates):
    """At a learning rate times decay of `share`: with momentum 0.9 in 69 steps, as with ten times the share without."""
    course = spoiled(healthy(optimizer=options), weight_decay=lambda decay: 0 * decay + share / 0.1)
    assert ("decay_dominates" in [one.kind for one in findings(course)]) == dominates


def test_decay_of_layers_of_which_none_trains_is_no_finding():
    course = healthy(facts={"frozen": list(NAMES)})
    assert "decay_dominates" not in [one.kind for one in findings(course)]


def test_dead_units():
    found = first(spoiled(dying_channels=column(lambda share: 0 * share + 1.0)))
    assert (found.kind, found.layers) == ("dead_units", (NAMES[MIDDLE],))
    assert alarms(spoiled(dying_channels=column(lambda share: 0 * share + 0.6))) == []


def test_weights_that_begin_at_zero_have_no_dead_units_yet():
    """B of LoRA, in a run that is too short to look at its units again."""

    def once(dead):
        return np.where(np.arange(len(dead)) == 1, 1.0, np.nan)

    def from_zero(norm):
        return np.where(np.arange(len(norm)) == 0, 0.0, norm)

    course = spoiled(dying_channels=column(once))
    assert [one.kind for one in findings(course)] == ["dead_units"]
    course = spoiled(dying_channels=column(once), weight_norm=column(from_zero))
    assert "dead_units" not in [one.kind for one in findings(course)]


def test_gradients_that_fade_toward_the_input():
    found = first(spoiled(gradient_norm=lambda g: g * np.array([1e-4, 1e-3, 1e-2, 0.1, 1.0])))
    assert found.kind == "vanishing"
    assert found.layers[0] == NAMES[0]


def test_gradients_of_layers_that_another_optimizer_steps_are_not_compared():
    course = spoiled(gradient_norm=lambda g: g * np.array([1e-4, 1e-4, 1.0, 1.0, 1.0]))
    assert first(course).kind == "vanishing"
    table = tuple(replace(layer, part=int(i > 1)) for i, layer in enumerate(course.layers))
    known = 2 * course.meta["optimizers"]
    assert alarms(replace(course, layers=table, meta={**course.meta, "optimizers": known})) == []


def test_inputs_between_zero_and_one_everywhere():
    def between(low, high):
        return {
            "input_low": lambda values: np.where(np.isfinite(values), low, np.nan),
            "input_high": lambda values: np.where(np.isfinite(values), high, np.nan),
        }

    assert first(spoiled(**between(0.1, 0.9))).kind == "saturating"
    assert alarms(spoiled(**between(0.0, 0.9))) == []  # after ReLUs, some inputs are exactly zero


def test_a_block_that_dwarfs_what_passes_by_it():
    def larger(rms):
        rms[:, 3:] *= 10
        return rms

    found = first(spoiled(input_rms=larger))
    assert (found.kind, found.layers) == ("large_branch", (NAMES[2],))


def test_gradients_that_fall_from_block_to_block_are_reported_if_they_do_so_at_the_start():
    def smaller(norms):
        norms[:, 3:] /= 10
        return norms

    course = spoiled(gradient_norm=smaller)
    assert [one.kind for one in alarms(course)] == ["large_branch"]
    assert alarms(replace(course, steps=101 * course.steps)) == []


def test_gradients_fade_also_where_each_layer_has_an_optimizer():
    """As in a backward pass that steps each layer as soon as its gradient is there."""

    def fading(gradient):
        gradient[:, :3] *= 1e-4
        return gradient

    course = spoiled(gradient_norm=fading)
    alone, pairs = (tuple(replace(one, part=i // n) for i, one in enumerate(course.layers)) for n in (1, 2))
    assert first(course).kind == first(replace(course, layers=alone)).kind == "vanishing"
    assert alarms(replace(course, layers=pairs)) == []  # several small networks, with losses of their own


def test_a_loss_at_chance():
    course = replace(healthy(), loss=np.full(STEPS, log(10)) + 0.02 * np.sin(np.arange(STEPS)))
    assert (first(course).kind, first(course).severity) == ("at_chance", "serious")


def test_a_loss_that_has_fallen_is_that_of_a_regression_unless_outputs_or_its_value_say_otherwise():
    def unknown(course):
        return spoiled(course, output_information=lambda nats: np.nan * nats)

    falls = replace(healthy(), loss=2.6 + 10 * np.exp(-np.arange(STEPS) / 10))
    assert first(falls).kind == "at_chance"
    assert alarms(unknown(falls)) == []
    assert first(unknown(replace(falls, loss=falls.loss - 2.6 + log(10)))).kind == "at_chance"
    still = spoiled(healthy(), output_information=lambda nats: np.nan * nats)
    assert first(replace(still, loss=np.full(STEPS, log(10)))).kind == "at_chance"


def test_a_loss_above_chance_that_hardly_falls_may_be_that_of_a_regression_if_the_outputs_were_seen():
    seen = spoiled(output_information=lambda nats: np.nan * nats)
    unseen = spoiled(seen, input_rms=lambda rms: np.nan * rms)
    above = np.full(STEPS, 1.5 * log(10))
    assert alarms(replace(seen, loss=above)) == []
    assert first(replace(unseen, loss=above)).kind == "at_chance"


def test_a_loss_at_the_floor_of_a_second_softmax():
    floor = log(e + 9) - 1
    course = replace(healthy(), loss=floor + 0.02 + 0.8 * np.exp(-np.arange(STEPS) / 30))
    assert alarms(course) == []  # the gradient of the outputs says that it is none
    course = spoiled(course, softmax_twice=lambda twice: np.nan * twice)
    assert (first(course).kind, first(course).layers) == ("double_softmax", (NAMES[-1],))


def test_a_gradient_of_the_outputs_that_is_that_of_a_second_softmax():
    found = first(spoiled(softmax_twice=lambda twice: twice + 1))
    assert (found.kind, found.layers, found.severity) == ("double_softmax", (NAMES[-1],), "serious")
    assert alarms(spoiled(softmax_twice=lambda twice: twice + (np.arange(len(twice)) > 20)[:, None])) == []


def test_outputs_that_say_nothing_about_the_inputs():
    def nats(*values):
        def act(series):
            series[[20, 40], -1] = values
            return series

        return spoiled(output_information=act)

    found = first(nats(4e-3, 1e-3))
    assert (found.kind, found.severity, found.layers) == ("at_chance", "serious", ())
    assert alarms(nats(1e-3, 4e-3)) == []  # it begins to learn
    assert alarms(nats(0.4, 0.1)) == []
    assert alarms(nats(np.nan, 1e-3)) == []  # one sampled step is not enough


def test_a_loss_of_a_regression_is_not_compared_with_chance():
    course = healthy()
    table = (*course.layers[:-1], replace(course.layers[-1], shape=(1, 16)))
    assert alarms(replace(course, layers=table, loss=np.full(STEPS, 2.3))) == []


def test_clipping_epsilon_and_balance_are_notes():
    course = healthy(optimizer={"class": "Adam", "lr": 1e-3, "eps": 1.0})

    def clipped(gradient):
        return gradient / np.sqrt(np.nansum(np.square(gradient), axis=1, keepdims=True))

    def unequal(rotation):
        rotation[:, 0] *= 0.01
        return rotation

    found = ordered(findings(spoiled(course, gradient_norm=clipped, rotation=unequal)))
    assert {one.kind for one in found} == {"clipped", "large_epsilon", "unbalanced"}
    assert not any(one.is_alarm for one in found)


def test_a_consequence_of_an_alarm_is_a_note():
    course = spoiled(
        healthy(facts={"symmetric": [NAMES[1]]}), dying_channels=column(lambda share: 0 * share + 1.0)
    )  # fmt: skip
    found = ordered(findings(course))
    assert [(one.kind, one.severity) for one in found] == [("symmetric", "warning"), ("dead_units", "note")]
    assert found[1].sentence.startswith("Likely a consequence: ")


def test_a_muted_kind_neither_speaks_nor_hides_its_consequences():
    course = spoiled(
        healthy(facts={"symmetric": [NAMES[1]]}), dying_channels=column(lambda share: 0 * share + 1.0)
    )  # fmt: skip
    assert [(one.kind, one.severity) for one in ordered(findings(course), ["symmetric"])] == [("dead_units", "serious")]


def test_a_course_of_three_steps_states_facts_only():
    course = healthy(facts={"symmetric": [NAMES[1]]})
    short = replace(
        course, steps=course.steps[:3], series={name: values[:3] for name, values in course.series.items()},
        loss=course.loss[:3], loss_steps=course.loss_steps[:3],
    )  # fmt: skip
    assert [one.kind for one in findings(short)] == ["symmetric"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("filled", [np.nan, 0.0, np.inf])
def test_no_rule_fails_on_a_course_that_says_nothing(rule, filled):
    course = healthy()
    empty = replace(course, series={name: np.full_like(v, filled) for name, v in course.series.items()})
    with np.errstate(all="ignore"):
        rule(empty)
        rule(replace(empty, series={}))
        rule(replace(empty, meta={"optimizers": "?", "facts": [1]}))


def test_findings_are_data():
    found = first(spoiled(weight_norm=column(lambda norm: 100 * norm)))
    assert found.kind in KINDS
    assert set(KINDS) > CONSEQUENCES
    assert found.link == "diagnosis.md#large-weights"
    assert json.loads(json.dumps(dict(found.evidence)))["limit"] == LIMITS.large
