"""The rules of a diagnosis: small pure functions over the course of a run, with every threshold in `LIMITS`.

A rule returns a finding, or None if the run does not show it or does not hold enough to tell. Where a threshold comes
from is written next to it. "Healthy" and "fault" there mean the first seed of the benchmark's first six networks
(docs/diagnosis.md), as it was when they were set; those runs are not kept. The other runs were not looked at.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import e, isfinite, log
from typing import Any

import numpy as np

from gyroscope.diagnosis.course import Course, Floats, Ints, Mask
from gyroscope.diagnosis.domination import MOTIONS, followed
from gyroscope.diagnosis.finding import PAGE, Finding, Severity
from gyroscope.diagnosis.stall import Stall, of_layer, picked
from gyroscope.errors import DynamicsError
from gyroscope.theory.equilibrium import Memory
from gyroscope.theory.recurrence import recurrence_of


@dataclass(frozen=True)
class Limits:
    """The thresholds of all rules.

    Attributes:
        enough: measured steps that a rule about a course needs.
        fast: ‖Δw‖/‖w‖ of the middle layer, in one step. Healthy runs stay below 0.08; a rate 300 times too large gives
            1 and more.
        leaps: number of first steps that may exceed `fast` if the loss later falls to half of its first value.
        leap: the largest ‖Δw‖/‖w‖ that such a first step may have. At 300 times the rate, a network with batch
            normalization takes a step of 12, and then learns with weights that are 100 times too large.
        rises: until then, the loss stays below this many times its first value.
        slow: radians per step of the fastest layer, at the 90th percentile of steps, below which a network does not
            learn. Fine-tuning may be as slow; then the loss falls, or layers turn by more than `unturned` in time.
        unturned: radians that no layer has turned by in a run that is too slow.
        straight, straight_rate: a layer whose successive displacements have a cosine above the first while it turns by
            less than the second moves along a line: a larger rate would lead further. With momentum 0.9 healthy runs
            reach 0.95 at 2e-3 rad per step and more.
        behind: a layer that turns this many times slower than its neighbors.
        large: ‖w‖/√(number of units) of initial weights. Common initializations give 0.1 to 2.
        apart: and this many times that of the middle layer.
        blown_up: the factor by which a norm may grow.
        calm: ‖Δw‖/‖w‖ of the middle layer in the steps before a jump.
        vanished: share of its initial norm below which a layer has all but vanished, and takes relatively long steps.
        jump: the factor by which the norm of one layer may change between two measurements, in the middle of a run.
        carried: share of a step's gradient whose sign is not that of its own backward passes. Clipping and unscaling
            leave it at exactly 0; gradients that were not cleared give 0.08 and more.
        fades: relative gradients ‖∇‖/‖w‖ of the first third of the layers over those of the last third.
        dead: share of a layer's channels that no example of a batch activates. Healthy runs reach 0.65.
        bounded: share of the hidden layers that get nothing but numbers between 0 and 1.
        branch: factor by which inputs grow, or relative gradients fall, from one block to the next in all layers alike.
        evenly: and the factor that no other two blocks may differ by.
        begins: steps within which relative gradients show that. Blocks of healthy transformers come to differ as much.
        input_rms: root mean square of what enters the first layer; standardized inputs have 1.
        same_batch: relative difference below which two batches are the same.
        halved: steps after which weight decay alone halves the weights. SGD at η = 0.1, λ = 5e-4
            and momentum 0.9 takes ln 2·(1 − 0.9)/(ηλ) = 1,400.
        pulled: λ‖w‖/‖∇‖ at the beginning, where decay passes through Adam's √v with the gradient.
        collapsed: share of its peak that the learning rate stays below for `collapsed_for` of the run.
        chance: share of log(classes) that the loss stays above.
        chance_steps: steps for which it does so.
        guessing: relative distance to log(classes) within which a loss that has fallen is that of guessing.
        informed: information about the input, in nats, that outputs must have unless it grows. With shuffled labels it
            falls to 0.005 and less; a head trained alone on random features began with 0.005, and more than doubled it.
        floor: distance to the lowest loss that probabilities, taken for logits, can reach.
        clipped: relative spread of the norm of all gradients where clipping cuts every step.
        unbalanced: the most rotated layer has this many times the rotation of the least rotated one.
    """

    enough: int = 10
    fast: float = 0.5
    leaps: int = 3
    leap: float = 5.0
    rises: float = 1.5
    slow: float = 1e-4
    unturned: float = 0.03
    straight: float = 0.96
    straight_rate: float = 1e-3
    behind: float = 50.0
    large: float = 20.0
    apart: float = 20.0
    blown_up: float = 1e3
    calm: float = 0.2
    vanished: float = 0.01
    jump: float = 10.0
    carried: float = 0.05
    fades: float = 0.01
    dead: float = 0.95
    bounded: float = 0.2
    branch: float = 4.0
    evenly: float = 2.5
    begins: int = 100
    input_rms: float = 20.0
    same_batch: float = 1e-6
    halved: float = 100.0
    pulled: float = 1.0
    collapsed: float = 1e-5
    collapsed_for: float = 0.2
    chance: float = 0.95
    chance_steps: int = 100
    guessing: float = 0.02
    informed: float = 0.005
    floor: float = 0.1
    clipped: float = 0.02
    unbalanced: float = 10.0


LIMITS = Limits()


def _finding(
    kind: str,
    severity: Severity,
    sentence: str,
    remedy: str,
    *,
    layers: Sequence[str] = (),
    since: int | None = None,
    **evidence: Any,
) -> Finding:
    plain = {key: _plain(value) for key, value in evidence.items()}
    return Finding(kind, severity, tuple(layers), since, sentence, plain, remedy, f"{PAGE}#{kind.replace('_', '-')}")


def _plain(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return float(f"{float(value):.4g}") if isfinite(value) else str(float(value))
    return int(value) if isinstance(value, np.integer) else value


def told(names: Sequence[str]) -> str:
    """Return layers in words.

    >>> told(["a"]), told(["a", "b", "c", "d", "e"])
    ('a', '5 layers (a, b, … e)')
    """
    if len(names) == 1:
        return names[0]
    some = ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]}, … {names[-1]}"
    return f"{len(names):,} layers ({some})"


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _chosen(course: Course, which: Mask) -> list[str]:
    return [course.names[i] for i in np.flatnonzero(which).tolist()]


def _quiet(reduce: Callable[..., Any], values: Floats, **options: Any) -> Any:
    """Reduce without warnings about columns that are all NaN."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        return reduce(values, **options)


# What is known from the objects.


def not_trained(course: Course) -> Finding | None:
    """A layer inside the trained region that no optimizer steps, or that needs no gradient.

    Frozen layers are healthy where they are a whole backbone (the first layers), the majority, or have trained
    adapters next to them.
    """
    which = course.untrained
    if not which.any() or which.all():
        return None
    names = _chosen(course, which)
    foreign = int(course.facts.get("foreign", 0) or 0)
    replaced = which & course.fact("replaced")
    if replaced.any() and foreign:
        found = _chosen(course, replaced)
        return _finding(
            "replaced", "serious",
            f"The optimizer steps parameters that are not in the model, in place of {told(found)}: the model's own do "
            "not train.",
            "Build the optimizer after the model is complete: after wrappers, `to`, quantization and new heads.",
            layers=found, optimizer_parameters_outside=foreign,
        )  # fmt: skip
    inside = which & _inside(course, which)
    unheld = course.fact("unheld")
    kind = "not_in_optimizer" if (inside & unheld).any() or (not inside.any() and (which & unheld).any()) else "frozen"
    if not inside.any():
        said = f"{told(names)} {_are(names)} not trained, as a backbone or next to adapters."
        return _finding(kind, "note", said, "Nothing needs to be done if this is intended.", layers=names)
    culprits = _chosen(course, inside & (unheld if kind == "not_in_optimizer" else ~unheld))
    who = told(culprits)
    clause = f"No optimizer holds {who}" if kind == "not_in_optimizer" else f"{who} {_are(culprits)} frozen"
    knob = (
        "Pass all parameters that require gradients to the optimizer."
        if kind == "not_in_optimizer"
        else "Call requires_grad_(True) on it, or freeze whole blocks from the input on."
    )
    keep = "it keeps its" if len(culprits) == 1 else "they keep their"
    return _finding(
        kind, "serious", f"{clause}, between layers that train: {keep} initial weights.", knob,
        layers=culprits, layers_untrained=int(which.sum()), layers_in_all=len(course.layers),
    )  # fmt: skip


def _inside(course: Course, which: Mask) -> Mask:
    """Return the untrained layers that lie inside a trained region [L]."""
    trained = ~which
    if which.sum() > trained.sum():
        return np.zeros_like(which)
    modules = [name.split(".") for name in course.names]
    found = np.zeros_like(which)
    for i in np.flatnonzero(which).tolist():
        before, after = trained[:i].any(), trained[i + 1 :].any()
        # An adapter is a trained layer in the same module, or in one next to it whose name says so.
        scope = modules[i][:-2]
        adapted = any(
            trained[j] and scope and modules[j][: len(scope)] == scope and _ADAPTER.search(course.names[j])
            for j in range(len(modules))
        )
        found[i] = before and after and not adapted
    return found


_ADAPTER = re.compile(r"lora|adapter|ia3|prompt|prefix|dora|hypernet", re.IGNORECASE)


def no_learning_rate(course: Course) -> Finding | None:
    """A learning rate of zero for most of the run, while the optimizer holds the layer."""
    lr = course["lr"]
    known = np.isfinite(lr)
    enough = known.sum(0) >= LIMITS.enough
    zero = enough & (((lr == 0) & known).sum(0) > 0.5 * known.sum(0)) & ~course.untrained
    if not zero.any():
        return None
    names = _chosen(course, zero)
    return _finding(
        "no_learning_rate", "serious",
        f"The learning rate of {told(names)} is 0 at most steps.",
        "Check the scheduler and the parameter groups: a warm-up must end, and a group's lr must not be 0.",
        layers=names, share_of_steps=float(((lr == 0) & known).sum() / max(1, known.sum())),
    )  # fmt: skip


def symmetric(course: Course) -> Finding | None:
    """Initial weights that are equal for all units of a layer: the units get equal gradients and stay alike."""
    which = course.fact("symmetric") & ~course.untrained
    if not which.any():
        return None
    names = _chosen(course, which)
    return _finding(
        "symmetric", "warning",
        f"All units of {told(names)} start with the same weights, so their gradients start alike too.",
        "Initialize with random weights, for example torch.nn.init.kaiming_normal_.",
        layers=names,
    )  # fmt: skip


def zero_weights(course: Course) -> Finding | None:
    """A layer that begins at zero, unlike the other layers of its kind.

    Zero is healthy for the last layer, and for a kind of layer that all begins there: the last layers of residual
    branches, the second factors of LoRA.
    """
    norm = course["weight_norm"]
    if not len(norm) or course.steps[0] != 0:
        return None
    zero = course.weights & (norm[0] == 0) & ~course.untrained
    zero[-1:] = False
    patterns = np.array([_pattern(name) for name in course.names])
    others = course.weights & (norm[0] > 0)
    which = np.array([
        bool(zero[i]) and (others & (patterns == patterns[i])).sum() > (zero & (patterns == patterns[i])).sum()
        for i in range(len(zero))
    ])  # fmt: skip
    if not which.any():
        return None
    names = _chosen(course, which)
    return _finding(
        "zero_weights", "warning",
        f"{told(names)} {'begins' if len(names) == 1 else 'begin'} at zero, unlike the other layers of the same kind.",
        "Initialize with random weights, for example torch.nn.init.kaiming_normal_. Nothing is wrong if it is meant to "
        "start as if it were not there.",
        layers=names,
    )  # fmt: skip


def _pattern(name: str) -> str:
    """Return the name of a layer without its numbers, which layers of the same kind have in common."""
    return re.sub(r"\d+", "#", name)


def large_weights(course: Course) -> Finding | None:
    """Initial weights that are far larger than those of the other layers."""
    norm = course["weight_norm"]
    if not len(norm):
        return None
    units = np.array([layer.shape[0] for layer in course.layers], dtype=float)
    size = norm[0] / np.sqrt(units)
    middle = _quiet(np.nanmedian, size[course.weights]) if course.weights.any() else np.nan
    which = course.weights & (size > LIMITS.large) & (size > LIMITS.apart * middle)
    if not which.any():
        return None
    order = np.argsort(-np.where(which, size, -1.0))[: int(which.sum())]
    names = [course.names[i] for i in order.tolist()]
    return _finding(
        "large_weights", "warning",
        f"{told(names)} began with weights of {size[order[0]]:.3g} per unit, {size[order[0]] / middle:.3g} times "
        "the middle layer's.",
        "Check its initialization: the weights of a unit should have a norm of about 1. Behind a normalizer such a "
        "layer hardly turns; without one its outputs explode.",
        layers=names, norm_per_unit=float(size[order[0]]), middle=float(middle), limit=LIMITS.large,
    )  # fmt: skip


def evaluates(course: Course) -> Finding | None:
    """Normalization layers in eval mode while the optimizer steps the layers before them."""
    flags = course["norm_evaluates"]
    rows = np.isfinite(flags).any(1)
    if not rows.any():
        return None
    last = flags[rows][-1]
    which = (last > 0.5) & ~course.untrained
    if not which.any():
        return None
    names = _chosen(course, which)
    every = which.sum() == np.isfinite(last).sum()
    return _finding(
        "eval_mode", "warning",
        f"The normalizers after {told(names)} are in eval mode during training: they use stored statistics, not those "
        "of the batch.",
        "Call model.train() before training, and again after each evaluation; to keep statistics fixed on purpose, "
        "freeze the layer before them too.",
        layers=() if every else names, normalizers=int(which.sum()), step=int(course.steps[rows][-1]),
    )  # fmt: skip


def gradients_accumulate(course: Course) -> Finding | None:
    """Gradients that were not cleared: the step's gradient is not that of its own backward passes."""
    carried = _quiet(np.nanmax, course["gradient_carried"], axis=1)
    rows = np.flatnonzero(np.isfinite(carried) & (course.steps > 1))
    which = rows[carried[rows] > LIMITS.carried]
    # Nothing should be left over in the first step: there, something changes gradients on purpose, such as noise.
    changed = (carried[course.steps <= 1] > LIMITS.carried).any()
    if changed or not len(which) or len(which) < min(2, len(rows)):
        return None
    return _finding(
        "gradients_accumulate", "serious",
        f"Gradients are not cleared between steps: {100 * carried[which[-1]]:.0f} % of that of step "
        f"{course.steps[which[-1]]:,} has another sign than the step's own backward passes gave it.",
        "Call optimizer.zero_grad() once per step, before the backward pass.",
        share=float(carried[which[-1]]), limit=LIMITS.carried,
    )  # fmt: skip


def ranks_differ(course: Course) -> Finding | None:
    """Data-parallel ranks whose weights drift apart: their gradients are not averaged."""
    if not course.apart:
        return None
    since, last = course.apart[0][0], course.apart[-1][1]
    return _finding(
        "ranks_differ", "serious",
        f"The weights of data-parallel ranks differ, by {last:.2g} of their norm, since step {since:,} or before: each "
        "rank trains its own model.",
        "Call the DistributedDataParallel module in the forward pass, not the model inside it.",
        since=since, relative_difference=last,
    )  # fmt: skip


def repeated_batch(course: Course) -> Finding | None:
    """The same batch at every sampled step."""
    means, roots = course["input_mean"], course["input_rms"]
    known = np.isfinite(means) & np.isfinite(roots)
    columns = np.flatnonzero(known.any(0)).tolist()
    # Data enters at embeddings, or at the first layer: what enters the others changes with the weights before them.
    enters = [i for i in columns if course.layers[i].kind == "embedding"] or columns[:1]
    seen = [(means[known[:, i], i], roots[known[:, i], i]) for i in enters]
    seen = [(mean, rms) for mean, rms in seen if rms.max() > 0 and not _counts_up(float(mean[0]), float(rms[0]))]
    if not seen or min(len(rms) for _, rms in seen) < 3:
        return None
    spread = max(float(max(np.ptp(mean), np.ptp(rms)) / rms.max()) for mean, rms in seen)
    if spread > LIMITS.same_batch:
        return None
    count = min(len(rms) for _, rms in seen)
    return _finding(
        "repeated_batch", "warning",
        f"All {count} sampled steps saw the same batch: what enters {course.names[enters[0]]} did not change.",
        "Iterate over the data loader, and shuffle it. Nothing is wrong if one batch is all the data.",
        sampled_steps=count, relative_difference=spread, limit=LIMITS.same_batch,
    )  # fmt: skip


def _counts_up(mean: float, rms: float) -> bool:
    """Return True for the moments of 0, 1, …, T − 1: positions, which are the same for every batch."""
    last = 2 * mean
    return abs(rms**2 - last * (2 * last + 1) / 6) < 1e-4 * max(1.0, rms**2)


def input_scale(course: Course) -> Finding | None:
    """Inputs of unusual scale at the first layer."""
    rms = course["input_rms"]
    known = np.isfinite(rms)
    if not known.any():
        return None
    column = int(np.flatnonzero(known.any(0))[0])
    if course.layers[column].kind == "embedding":
        return None
    value = float(rms[known[:, column], column][0])
    if value <= LIMITS.input_rms:
        return None
    return _finding(
        "input_scale", "warning",
        f"The inputs of {course.names[column]} have a root mean square of {value:.3g}; standardized ones have 1.",
        "Standardize the inputs: subtract the mean and divide by the standard deviation of the training data.",
        layers=(course.names[column],), input_rms=value, limit=LIMITS.input_rms,
    )  # fmt: skip


# What goes wrong at a step.


def not_finite(course: Course) -> Finding | None:
    """The first layer and step whose weights are not finite."""
    if not course.known("weight_norm"):
        return None
    lr, norm = course["lr"], course["weight_norm"]
    measured = np.isfinite(lr) | ~np.isfinite(lr).any(0)
    bad = measured & ~np.isfinite(norm) & np.isfinite(norm).any(0)
    broken_loss = np.flatnonzero(~np.isfinite(course.loss))
    if not bad.any():
        if len(broken_loss) and broken_loss[-1] == len(course.loss) - 1:
            # It may have been finite again in between.
            finite = np.flatnonzero(np.isfinite(course.loss))
            start = int(finite[-1]) + 1 if len(finite) else 0
            since, first = (int(course.loss_steps[i]) for i in (start, broken_loss[0]))
            earlier = f"; it was not at step {first:,} either" if first < since else ""
            return _finding(
                "not_finite", "serious", f"The loss is not finite since step {since:,}{earlier}.",
                "Lower the learning rate, and look for divisions by zero and logarithms of zero.",
                since=since, first_step=first,
            )  # fmt: skip
        return None
    row = int(np.flatnonzero(bad.any(1))[0])
    first = bad[row]
    # A layer that was broken before the step broke the others. Without one, the layer whose norm grew most is the
    # likeliest origin of several that broke between two measurements.
    started = course["weight_norm_before"][row]
    if np.isfinite(started[first]).any():
        broken = first & ~np.isfinite(started)
        first = broken if broken.any() else first
    before = norm[:row]
    grown = np.ones(len(first))
    if row:
        grown = _quiet(np.nanmax, before[-3:], axis=0) / _quiet(np.nanmedian, before, axis=0)
    order = sorted(np.flatnonzero(first).tolist(), key=lambda i: -float(np.nan_to_num(grown[i])))
    names = [course.names[i] for i in order]
    since = int(course.steps[row])
    last = int(course.steps[row - 1]) if row else since
    at = f"at step {since:,}" if since - last <= 1 else f"between steps {last:,} and {since:,}"
    return _finding(
        "not_finite", "serious",
        f"The weights of {told(names)} became not finite {at}.",
        "Everything after that is lost: go back to a checkpoint from before. Lower the learning rate, clip gradients, "
        "and look for divisions by zero, logarithms of zero and overflow in half precision there.",
        layers=names, since=since, last_finite_step=last,
    )  # fmt: skip


_HUGE = float(np.finfo(np.float32).max)


def jump(course: Course) -> Finding | None:
    """The norm of one layer jumps between two measurements, in the middle of a calm run."""
    norm = np.nan_to_num(course["weight_norm"], nan=np.nan, posinf=_HUGE)
    if len(norm) < LIMITS.enough:
        return None
    # The norm before a step is the norm after the last one, unless the weights were changed in between: then it tells
    # which layer it was, whatever the step made of the others.
    started = np.nan_to_num(course["weight_norm_before"], nan=np.nan, posinf=_HUGE)
    with np.errstate(all="ignore"):
        whole = np.abs(np.diff(np.log(norm), axis=0))
        between = np.abs(np.log(started[1:]) - np.log(norm[:-1]))
    between[~np.isfinite(between)] = 0.0
    change = np.maximum(np.where(np.isfinite(whole), whole, 0.0), between)
    change[: LIMITS.enough // 2] = 0.0
    # A layer that has all but vanished takes relatively long steps.
    change[norm[:-1] < LIMITS.vanished * norm[0]] = 0.0
    usual = _quiet(np.nanmedian, change, axis=0)
    # Only a calm run can show it: where every layer takes long steps, one of them is the longest.
    before = np.nan_to_num(_quiet(np.nanmedian, course["update_ratio"], axis=1))[:-1]
    calm = np.maximum.accumulate(before) < LIMITS.calm
    which = (change > log(LIMITS.jump)) & (change > 20 * usual) & calm[:, None]
    # A layer whose own steps are too short for the jump was changed by something else, whatever the others did after.
    length = np.nan_to_num(course["update_norm"], nan=_HUGE, posinf=_HUGE)
    reach = np.diff(course.steps)[:, None] * np.maximum(length[1:], np.where(length[:-1] < _HUGE, length[:-1], 0.0))
    outside = which & (np.abs(np.diff(norm, axis=0)) > 10 * reach)
    alone = np.diff(course.steps)[:, None] * length[:-1]
    changed = which & (between > log(LIMITS.jump)) & (np.abs(started[1:] - norm[:-1]) > 10 * alone)
    if changed.any() or outside.any():
        which = changed if changed.any() else outside
    else:
        which &= (which.sum(1) <= max(1, len(course.layers) // 4))[:, None]
    if not which.any():
        return None
    row = int(np.flatnonzero(which.any(1))[0])
    order = np.argsort(-np.where(which[row], change[row], -1.0))[: int(which[row].sum())]
    names = [course.names[i] for i in order.tolist()]
    since = int(course.steps[row + 1])
    factor = float(np.exp(min(change[row][order[0]], 700.0)))
    return _finding(
        "jump", "serious",
        f"The norm of {told(names)} jumped by a factor of {factor:.3g} at step {since:,}, alone among the layers.",
        "Look for a corrupted checkpoint, an assignment to the weights, or a faulty device; go back to a checkpoint "
        "from before.",
        layers=names, since=since, factor=factor, limit=LIMITS.jump,
    )  # fmt: skip


# What a whole course shows.


def too_fast(course: Course) -> Finding | None:
    """Steps as long as the weights themselves, or norms that blow up."""
    ratio = _ratio(course)
    if np.isfinite(ratio).sum(0).max(initial=0) < 3:
        return None
    middle = _quiet(np.nanmedian, ratio, axis=1)
    rows = np.flatnonzero(middle > LIMITS.fast)
    if may_be_healthy(course) and np.median(course.loss[-3:]) < 0.5 * course.loss[0]:
        rows = rows[:0]
    burst = _bursts(course)
    if not len(rows) and not len(burst):
        return None
    since = int(course.steps[min(rows[0] if len(rows) else len(ratio), burst[0] if len(burst) else len(ratio))])
    steepest = _quiet(np.nanmax, ratio, axis=0)
    order = np.argsort(-np.nan_to_num(steepest, nan=-1.0))
    names = [course.names[i] for i in order[:3].tolist()]
    most = float(np.nanmax(middle))
    if len(rows):
        said = f"A step changed the middle layer by {most:.3g} times its norm (step {since:,})."
    else:
        said = f"Half of the layers have over {LIMITS.blown_up:,.0f} times their initial norm since step {since:,}."
    return _finding(
        "too_fast", "serious", said,
        "Lower the learning rate by a factor of 10 to 100, or warm it up; check the scale of inputs and loss.",
        layers=names, since=None if since <= 2 else since, update_ratio=most, limit=LIMITS.fast,
    )  # fmt: skip


def may_be_healthy(course: Course) -> bool:
    """Return True if only the first steps are too long, and the loss, recorded from the first step on, does not rise.

    Small weights have far to go: if the loss falls to half in the end, nothing is wrong. The loss of a few batches may
    be above that of the first by chance.
    """
    middle = _quiet(np.nanmedian, _ratio(course), axis=1)
    rows = np.flatnonzero(middle > LIMITS.fast)
    early = len(rows) > 0 and bool(course.steps[rows[-1]] <= LIMITS.leaps and middle[rows].max() < LIMITS.leap)
    if not early or len(_bursts(course)) or len(course.loss) <= 5 or course.loss_steps[0] > 1:
        return False
    return 0 < float(np.median(course.loss[-3:])) < LIMITS.rises * float(course.loss[0]) < np.inf


def _bursts(course: Course) -> Ints:
    """The rows at which half of the layers have many times their initial norm."""
    norm = course["weight_norm"]
    with np.errstate(all="ignore"):
        grown = np.where(_starts(norm), norm / norm[:1], np.nan)
    return np.flatnonzero(_quiet(np.nanmedian, grown, axis=1) > LIMITS.blown_up)


def _ratio(course: Course) -> Floats:
    """‖Δw‖/‖w‖, NaN for layers that begin at zero or have all but vanished, which take long steps."""
    norm = course["weight_norm"]
    there = norm[np.maximum(np.arange(len(norm)) - 1, 0)] > LIMITS.vanished * norm[:1]
    return np.where(_starts(norm) & there, course["update_ratio"], np.nan)


def _starts(norm: Floats) -> Mask:
    """[1, layers], True for layers that do not begin at zero."""
    return norm[:1] > 0 if len(norm) else np.zeros((1, norm.shape[1]), dtype=bool)


def too_slow(course: Course) -> Finding | None:
    """No layer turns to speak of: training is wasted."""
    rate = course.rates
    if np.isfinite(rate).sum(0).max(initial=0) < LIMITS.enough:
        return None
    typical = _quiet(np.nanquantile, rate, q=0.9, axis=0)
    most = float(_quiet(np.nanmax, typical))
    turned = float(_quiet(np.nanmax, _angle(course["rotation"]))) if course.known("rotation") else 0.0
    aligned = float(_quiet(np.nanmedian, np.where(course.untrained, np.nan, course["alignment"])))
    slow = most < LIMITS.slow and turned < LIMITS.unturned
    straight = most < LIMITS.straight_rate and aligned > LIMITS.straight
    if not (slow or straight) or not isfinite(most) or (slow and _falls(course) is True):
        return None
    if most == 0.0:
        return None  # no step changes anything: other rules say why
    if slow:
        said = (
            f"The layers hardly turn: by {most:.2g} rad per step or less, and none by more than {turned:.2g} rad in "
            f"{int(course.steps[-1]):,} steps."
        )
    else:
        said = (
            f"The layers turn by at most {most:.2g} rad per step and keep their direction (the cosine between "
            f"successive steps is {aligned:.3f}): they could go much faster."
        )
    return _finding(
        "too_slow", "serious" if slow else "warning", said,
        "Raise the learning rate by a factor of 10 to 1,000; look for clipping far below the gradients' norm, for a "
        "large ε of Adam, and for gradients that were not unscaled before clipping.",
        rate_per_step=most, limit=LIMITS.slow if slow else LIMITS.straight_rate, alignment=aligned, turned=turned,
    )  # fmt: skip


def _angle(rotation: Floats) -> Floats:
    return np.arccos(np.clip(1.0 - rotation, -1.0, 1.0))


def _falls(course: Course) -> bool | None:
    """Return True if the loss has fallen by a tenth; None if it was not recorded."""
    loss = course.loss[np.isfinite(course.loss)]
    if len(loss) < 2 * LIMITS.enough:
        return None
    part = max(3, len(loss) // 10)
    first, last = float(np.median(loss[:part])), float(np.median(loss[-part:]))
    return last < 0.9 * first


def slow_layer(course: Course) -> Finding | None:
    """A layer inside the network that turns far slower than its neighbors, or not at all."""
    rate = np.where(course.weights, course.rates, np.nan)
    if np.isfinite(rate).sum(0).max(initial=0) < LIMITS.enough:
        return None
    typical = _quiet(np.nanquantile, rate, q=0.9, axis=0)
    moving = np.flatnonzero(np.isfinite(typical))
    if len(moving) < 3 or not (typical[moving] > 0).any():
        return None
    slower: dict[int, float] = {}
    for place, i in enumerate(moving.tolist()):
        neighbors = float(np.median([typical[j] for j in moving[max(0, place - 2) : place + 3].tolist() if j != i]))
        if typical[i] * LIMITS.behind < neighbors:
            slower[i] = neighbors / max(float(typical[i]), 1e-30)
    # The first layers may be slow on purpose: a backbone with a smaller rate than the new head.
    whole = _quiet(np.nanquantile, course.rates, q=0.9, axis=0)
    for i in range(len(whole)):
        if i not in slower and (np.isnan(whole[i]) or whole[i] * LIMITS.behind < np.nanmax(whole)):
            continue
        if i not in slower:
            break
        slower.pop(i)
    if not slower or len(slower) > len(moving) // 2:
        return None
    order = sorted(slower, key=lambda i: -slower[i])
    names = [course.names[i] for i in order]
    gradient = course["gradient_norm"][:, order[0]]
    none = not (np.nan_to_num(gradient) > 0).any()
    if none and _is_one_of_many(course, order):
        return _finding(
            "idle", "note", f"{told(names)} got no gradient, unlike others of their kind: not used in this run.",
            "Nothing needs to be done if it is an expert or a branch that is used seldom.", layers=names,
        )  # fmt: skip
    one, most = len(names) == 1, slower[order[0]]
    turns = f"{'turns' if one else 'turn'} {most:.3g} times slower than {'its' if one else 'their'} neighbors"
    turns = turns if most < 1e9 else f"{'does' if one else 'do'} not turn at all"
    return _finding(
        "slow_layer", "serious" if most > 1e9 else "warning",
        f"{told(names)} {turns}.",
        "Compare its learning rate, gradient and weights with those of its neighbors: a parameter group with another "
        "rate, weights that are far larger, or no path from the loss to it.",
        layers=names, rate_per_step=float(typical[order[0]]), times_slower=float(most), limit=LIMITS.behind,
    )  # fmt: skip


def _is_one_of_many(course: Course, which: Sequence[int]) -> bool:
    """Return True if other layers have the same name up to a number, as experts do, and do train."""
    kinds = {_pattern(course.names[i]) for i in which}
    others = [i for i in range(len(course.names)) if i not in set(which) and _pattern(course.names[i]) in kinds]
    parents = [{course.names[i].rsplit(".", 3)[0] for i in some} for some in (which, others)]
    return bool(parents[0] & parents[1]) and any("expert" in course.names[i].lower() for i in which)


def no_gradient(course: Course) -> Finding | None:
    """Trained layers that no gradient reaches: everything below a `detach`, or all layers."""
    gradient = course["gradient_norm"]
    trained = ~course.untrained
    recorded = "gradient_norm" in course.series  # not where weights alone are measured, as in Keras
    known = recorded and len(gradient) >= 3 and course.known("lr")
    if not known:
        return None
    stepped = np.isfinite(course["lr"]).sum(0) >= 3
    none = trained & stepped & ~(np.nan_to_num(gradient[1:]) > 0).any(0)
    if not none.any():
        return None
    if none[trained].all():
        return _finding(
            "no_gradient", "serious", "No layer gets a gradient: nothing trains.",
            "Check that the loss depends on the model's output, and that it is not cut off by detach, no_grad, "
            "argmax or saturated units.",
            layers=_chosen(course, none),
        )  # fmt: skip
    places = np.flatnonzero(trained)
    count = 0
    for i in places.tolist():
        if not none[i]:
            break
        count += 1
    if count == 0:
        return None
    names = [course.names[i] for i in places[:count].tolist()]
    return _finding(
        "no_gradient", "serious",
        f"No gradient reaches {told(names)}, the first {'layer' if count == 1 else 'layers'} of the network.",
        f"Something cuts the graph after {names[-1]}: detach, no_grad, a copy through NumPy, or units that are all "
        "dead.",
        layers=names[::-1] if count > 1 else names, layers_without_gradient=count,
    )  # fmt: skip


def schedule_collapsed(course: Course) -> Finding | None:
    """A learning rate that falls to nothing early in the run."""
    lr = _quiet(np.nanmax, course["lr"], axis=1) if course.known("lr") else np.empty(0)
    known = np.isfinite(lr)
    if known.sum() < LIMITS.enough:
        return None
    lr, steps = lr[known], course.steps[known]
    peak, low = float(lr.max()), lr < LIMITS.collapsed * float(lr.max())
    if peak <= 0 or not low[-1]:
        return None
    first = int(np.flatnonzero(~low)[-1]) + 1
    if steps[-1] - steps[first] < LIMITS.collapsed_for * steps[-1]:
        return None
    half = int(np.flatnonzero(lr >= 0.5 * peak)[-1])
    since = int(steps[half])
    return _finding(
        "schedule_collapsed", "serious",
        f"The learning rate began to fall at step {since:,} and has been below {LIMITS.collapsed:g} of its peak since "
        f"step {int(steps[first]):,}: nothing was learned after that.",
        "Step the scheduler once per epoch if it counts epochs; if it counts steps, give it the right number.",
        since=since, peak=peak, last=float(lr[-1]), limit=LIMITS.collapsed,
    )  # fmt: skip


def decay_dominates(course: Course) -> Finding | None:
    """Weight decay that shrinks weights faster than gradients can build them."""
    lr, decay = course["lr"], course["weight_decay"]
    if not (course.known("lr") and course.known("weight_decay")):
        return None
    classes = [str(course.optimizer(layer.part).get("class", "")) for layer in course.layers]
    coupled = np.array([
        name in ("Adam", "RMSprop", "Adadelta", "Adagrad", "NAdam", "RAdam", "Adamax")
        and not course.optimizer(layer.part).get("decoupled_weight_decay")
        for name, layer in zip(classes, course.layers, strict=True)
    ])  # fmt: skip
    unwrapped = np.array(["inner" not in course.optimizer(layer.part) for layer in course.layers])
    removed = np.array([_removed(course.optimizer(layer.part)) for layer in course.layers])
    with np.errstate(all="ignore"):
        share = _quiet(np.nanmedian, lr * decay, axis=0) * removed
        steps = np.where(share > 0, log(2) / share, np.inf)
        early = slice(1, 1 + max(LIMITS.enough, 20))
        pull = _quiet(np.nanmedian, (decay * course["weight_norm"] / course["gradient_norm"])[early], axis=0)
    fast = unwrapped & (steps < LIMITS.halved)
    heavy = unwrapped & coupled & (pull > LIMITS.pulled)
    which = (fast | heavy) & ~course.untrained
    if not which.any() or which.sum() < 0.5 * (~course.untrained).sum():
        return None
    names = _chosen(course, which)
    if fast.any():
        least = float(steps[which].min())
        said = f"Weight decay alone halves the weights every {least:.0f} steps."
        evidence: dict[str, Any] = {"steps_to_halve": least, "limit": LIMITS.halved}
    else:
        most = float(np.median(pull[which]))
        name = classes[int(which.argmax())]
        said = f"Weight decay pulls {most:.3g} times as hard as the gradient, and {name} divides both by √v."
        evidence = {"decay_over_gradient": most, "limit": LIMITS.pulled}
    return _finding(
        "decay_dominates", "serious", said,
        "Lower weight_decay by a factor of 100; with Adam, use AdamW, whose decay is not divided by √v.",
        layers=names if len(names) < len(course.layers) else (), **evidence,
    )  # fmt: skip


def _removed(optimizer: Mapping[str, Any]) -> float:
    """Return the share of the weights that decay removes per step, over ηλ; 0 if it is unknown or divided by √v."""
    if optimizer.get("class") in ("AdamW", "Muon") or optimizer.get("decoupled_weight_decay"):
        return 1.0  # whatever the moments are
    rule = recurrence_of(optimizer)
    if rule is None or not rule.decays:
        return 0.0
    try:
        return float(Memory.of(rule.kind, **rule.options).shrinkage(1.0, 1.0))
    except DynamicsError:  # such as momentum 1
        return 0.0


def dead_units(course: Course) -> Finding | None:
    """A layer with hardly any unit that is ever active."""
    dead, norm = course["dying_channels"], course["weight_norm"]
    # Units are seen before a step, and norms are measured after it: weights that begin at zero have no units yet.
    before = np.concatenate([norm[:1], norm[:-1]])
    known = np.isfinite(dead) & (before != 0)
    hidden = np.arange(len(course.layers)) < len(course.layers) - 1
    which = hidden & course.weights & known.any(0)
    which &= _quiet(np.nanmin, np.where(known, dead, np.nan), axis=0) >= LIMITS.dead
    if not which.any():
        return None
    share = _quiet(np.nanmin, np.where(known, dead, np.nan), axis=0)
    order = sorted(np.flatnonzero(which).tolist(), key=lambda i: -float(share[i]))
    names = [course.names[i] for i in order]
    return _finding(
        "dead_units", "serious",
        f"{100 * float(share[order[0]]):.0f} % of the units of {told(names)} are active for no example.",
        "Check its bias and the scale of its weights; a smaller learning rate or a leaky activation keeps units alive.",
        layers=names, share=float(share[order[0]]), limit=LIMITS.dead,
    )  # fmt: skip


def vanishing(course: Course) -> Finding | None:
    """Gradients that fade on their way to the first layers, of those that one optimizer steps.

    Several optimizers may follow several losses, as those of a GAN do.
    """
    parts = np.array([layer.part for layer in course.layers])
    trained = course.weights & ~course.untrained
    groups = [np.flatnonzero(trained & (parts == part)) for part in np.unique(parts)]
    if max(map(len, groups), default=0) == 1:  # one optimizer per layer
        groups = [np.flatnonzero(trained)]
    found = (_fading(course, which) for which in groups if len(which) >= 3)
    return next((one for one in found if one is not None), None)


def _fading(course: Course, which: Ints) -> Finding | None:
    with np.errstate(all="ignore"):
        relative = (course["gradient_norm"] / course["weight_norm"])[1:, which]
    if np.isfinite(relative).sum(0).max(initial=0) < LIMITS.enough:
        return None
    size = _quiet(np.nanmedian, relative[:50], axis=0)
    third = max(1, len(which) // 3)
    first, last = float(_quiet(np.nanmedian, size[:third])), float(_quiet(np.nanmedian, size[-third:]))
    if not (0 < first < LIMITS.fades * last):
        return None
    names = [course.names[i] for i in which[:third].tolist()]
    return _finding(
        "vanishing", "warning",
        f"Gradients fade toward the input: relative to the weights, those of {told(names)} are {last / first:.3g} "
        "times smaller than those of the last layers.",
        "Use ReLU-like activations, residual connections or normalizers, and an initialization that keeps variances.",
        layers=names, first=first, last=last, limit=LIMITS.fades,
    )  # fmt: skip


def saturating(course: Course) -> Finding | None:
    """Hidden layers that get nothing but numbers between 0 and 1: sigmoids everywhere."""
    low, high = course["input_low"], course["input_high"]
    known = np.isfinite(low) & np.isfinite(high)
    columns = np.flatnonzero(known.any(0) & course.weights)
    if len(columns) < 3:
        return None
    inner = columns[1:]
    bounded = np.array([bool(((low[:, i] > 0) & (high[:, i] <= 1))[known[:, i]].all()) for i in inner.tolist()])
    if bounded.sum() < 2 or bounded.mean() < LIMITS.bounded:
        return None
    names = [course.names[i] for i in inner[bounded].tolist()]
    before = [course.names[i] for i in columns[: max(1, len(columns) // 3)].tolist()]
    return _finding(
        "saturating", "warning",
        f"{told(names)} get only inputs between 0 and 1, as from sigmoids: the gradient shrinks by 4 or more at each.",
        "Use ReLU or GELU between layers, and keep sigmoids for gates and outputs.",
        layers=before, layers_with_such_inputs=int(bounded.sum()), of=len(inner),
    )  # fmt: skip


def large_branch(course: Course) -> Finding | None:
    """A block whose output dwarfs what passes by it: the blocks after it get larger inputs, or smaller gradients."""
    blocks = _blocks(course)
    if len(blocks) < 3:
        return None
    known = np.isfinite(course["input_rms"]).any(1)
    inputs = course["input_rms"][int(known.argmax())]
    early = np.flatnonzero((course.steps > 0) & (course.steps <= LIMITS.begins))[:20]
    with np.errstate(all="ignore"):
        relative = _quiet(np.nanmedian, (course["gradient_norm"] / course["weight_norm"])[early], axis=0)
    growth = _between(blocks, inputs, falls=False)
    fall = _between(blocks, relative, falls=True)
    for what, ratios in (
        ("get inputs {:.3g} times as large", growth),
        ("have relative gradients {:.3g} times smaller than", fall),
    ):
        if not np.isfinite(ratios).all():
            continue
        at = int(ratios.argmax())
        others = np.delete(ratios, at)
        if ratios[at] >= LIMITS.branch and (others < LIMITS.evenly).all():
            names = [course.names[i] for i in blocks[at].values()]
            return _finding(
                "large_branch", "warning",
                f"The layers after {told(names)} {what.format(ratios[at])} those of the blocks before: the "
                "output of this block dwarfs what passes by it.",
                "Check the factor on its residual branch and its initialization: blocks should add about as much as "
                "they get, or less.",
                layers=names, ratio=float(ratios[at]), limit=LIMITS.branch,
            )  # fmt: skip
    return None


def _blocks(course: Course) -> list[dict[str, int]]:
    """Return the repeated blocks of a network: for each, the positions of its layers by their name within it."""
    found: dict[str, dict[int, dict[str, int]]] = {}
    for i, name in enumerate(course.names):
        match = re.match(r"(.*?)(\d+)\.(.*)", name)
        if match and course.weights[i] and match[3] != "weight":
            found.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = i
    longest = max(found.values(), key=len, default={})
    return [longest[number] for number in sorted(longest)]


def _between(blocks: Sequence[dict[str, int]], values: Floats, *, falls: bool) -> Floats:
    """Return the factor by which values grow or fall from each block to the next: the median over their layers."""
    ratios = []
    for one, two in pairwise(blocks):
        common = [name for name in one if name in two]
        grows = [values[two[name]] / values[one[name]] for name in common]
        ratios.append(_quiet(np.nanmedian, np.array([1 / r for r in grows] if falls else grows)) if grows else np.nan)
    return np.array(ratios)


def double_softmax(course: Course) -> Finding | None:
    """A loss that applies a softmax to outputs that have been through one.

    The gradient of the outputs shows it at every sampled step. Without it, the loss does: it stays at the lowest value
    that probabilities reach where logits are expected.
    """
    twice = course["softmax_twice"]
    seen = twice[np.isfinite(twice)]
    if len(seen):
        if not (seen > 0.5).all():
            return None
        said = "The gradient of the outputs is that of a softmax applied twice."
        evidence: dict[str, Any] = {"sampled_steps": len(seen)}
    else:
        loss, classes = _smooth_loss(course), _classes(course)
        if loss is None or classes is None:
            return None
        floor = log(e + classes - 1) - 1
        last = float(np.median(loss[-max(3, len(loss) // 10) :]))
        near = floor - 0.01 <= float(loss.min()) and last <= floor + LIMITS.floor
        still = abs(float(np.median(loss[-len(loss) // 4 :])) - last) < 0.2 * LIMITS.floor
        if not near or not still or last >= LIMITS.chance * log(classes):
            return None
        said = (
            f"The loss stays at {last:.4g}, just above {floor:.4g}: the lowest cross-entropy of {classes:,} "
            "probabilities taken for logits."
        )
        evidence = {"loss": last, "floor": floor, "limit": LIMITS.floor}
    return _finding(
        "double_softmax", "serious", said,
        "Leave out the softmax before the loss: cross_entropy expects logits.",
        layers=course.names[-1:], **evidence,
    )  # fmt: skip


def at_chance(course: Course) -> Finding | None:
    """A loss that stays where guessing is, or outputs that say nothing about the input."""
    loss, classes = _smooth_loss(course), _classes(course)
    advice = (
        "Check that labels belong to their inputs, that the loss gets logits, and that the learning rate is neither "
        "far too high nor far too low."
    )
    if loss is not None and classes is not None:
        chance = log(classes)
        later = loss[len(loss) // 2 :]
        # A loss that has fallen may be that of a regression, unless it has fallen to that of guessing. So may one whose
        # sampled outputs show no cross-entropy.
        first = float(np.mean(course.loss[:3]))
        looked = bool(np.isfinite(course["input_rms"][:, -1]).any())
        guesses = (
            course.known("output_information")
            or (not looked and float(np.median(later)) >= 0.9 * first)
            or abs(float(np.median(later)) - chance) < LIMITS.guessing * chance
        )
        if guesses and float(later.min()) >= LIMITS.chance * chance and float(np.median(later)) <= 3 * chance:
            return _finding(
                "at_chance", "serious",
                f"The loss is {float(np.median(later)):.3g}, and guessing among the {classes:,} classes gives "
                f"{chance:.3g}: nothing has been learned.",
                advice, loss=float(np.median(later)), chance=chance, limit=LIMITS.chance,
            )  # fmt: skip
    information = _quiet(np.nanmax, course["output_information"], axis=1)
    later = information[np.isfinite(information) & (course.steps >= LIMITS.chance_steps)]
    if len(later) < 2 or float(later[-1]) >= LIMITS.informed or later[-1] > later[0]:
        return None
    return _finding(
        "at_chance", "serious",
        f"The outputs hardly depend on the inputs: they hold {float(later[-1]):.2g} nats about them, and "
        "no more than before.",
        advice, information=float(later[-1]), before=float(later[0]), limit=LIMITS.informed,
    )  # fmt: skip


def stalled(course: Course) -> Finding | None:
    """A very deep network that guesses, because the input of its last layer has become small and its weight large."""
    known = np.flatnonzero(np.isfinite(course["lambda_x"]).any(0) & (course.fan_out >= 2))
    if not len(known) or not len(course.loss):
        return None
    last = int(known[-1])
    inputs, norms = course["lambda_x"][:, last], course["weight_norm"][:, last]
    found = picked(of_layer(course.layers[last], course.steps, inputs, norms, course.loss_steps, course.loss))
    return None if found is None or found.until is not None else of_stall(found)


def of_stall(stall: Stall) -> Finding:
    """Return a stall that lasts as a finding."""
    return _finding(
        "stalled", "serious", str(stall), "Put a normalizer before the last layer: gyroscope.last_norm(model).",
        layers=(stall.layer,), since=stall.since, loss=stall.loss, guessing=stall.guessing,
    )  # fmt: skip


def dominated(course: Course) -> Finding | None:
    """Layers that hardly move because their weights are large compared with their gradients."""
    names = ["domination"] if course.known("domination") else ["gradient_norm", "weight_norm"]
    if not all(map(course.known, names)):
        return None
    rows = np.isfinite(course[names[0]]).any(1)
    series = {name: course[name][rows] for name in (*names, *MOTIONS)}
    now = [one for one in followed(course.layers, course.steps[rows], series) if one.until is None]
    if not now:
        return None
    now.sort(key=lambda one: one.since)
    layers, since = [one.layer for one in now], now[0].since
    return _finding(
        "dominated", "warning",
        f"{told(layers)} {_are(layers)} dominated by weights that are large for their gradients since step {since:,}, "
        "and hardly move.",
        "Normalize the layer, decay its weights, or steer it with Layca.",
        layers=layers, since=since, ratio=now[0].ratio, ratio_of_layers_that_move=now[0].typical,
    )  # fmt: skip


def _smooth_loss(course: Course) -> Floats | None:
    """Return the loss, averaged over a twentieth of the run; None if there is too little of it."""
    loss = course.loss
    if len(loss) < 2 * LIMITS.enough or course.loss_steps[-1] < LIMITS.chance_steps or not np.isfinite(loss).all():
        return None
    width = max(1, len(loss) // 20)
    return np.asarray(np.convolve(loss, np.ones(width) / width, mode="valid"))


def _classes(course: Course) -> int | None:
    """Return the number of outputs of the last layer, if there are several."""
    shape = course.layers[-1].shape
    return int(shape[0]) if len(shape) >= 2 and shape[0] >= 2 and course.layers[-1].kind != "embedding" else None


# Notes: true, useful and no alarms.


def clipped(course: Course) -> Finding | None:
    """Clipping that cuts every step: the norm of all gradients is the same at each."""
    gradient = course["gradient_norm"]
    rows = np.isfinite(gradient).any(1)
    if rows.sum() < 2 * LIMITS.enough:
        return None
    total = np.sqrt(np.nansum(np.square(gradient[rows]), axis=1))
    if not total.min() > 0 or len(course.layers) < 2:
        return None
    spread = float(np.std(total) / np.mean(total))
    shares = gradient[rows] / total[:, None]
    varied = float(_quiet(np.nanmedian, _quiet(np.nanstd, shares, axis=0) / _quiet(np.nanmean, shares, axis=0)))
    if spread > LIMITS.clipped or varied < 2 * spread:
        return None
    return _finding(
        "clipped", "note",
        f"The gradients of all layers together have a norm of {float(np.mean(total)):.3g} at every step: clipping cuts "
        "each of them.",
        "The learning rate then sets the length of steps alone. Raise the limit if that is not intended.",
        norm=float(np.mean(total)), spread=spread, limit=LIMITS.clipped,
    )  # fmt: skip


def large_epsilon(course: Course) -> Finding | None:
    """Adam's ε above √v: steps are those of SGD, scaled."""
    moment = course["moment_p50"]
    known = np.isfinite(moment).any(0)
    eps = course.option("eps", 0.0)
    if not known.any():
        return None
    root = np.sqrt(_quiet(np.nanmax, moment, axis=0))
    which = known & (eps > root) & (root > 0)
    if which.sum() < 0.5 * known.sum():
        return None
    names = _chosen(course, which)
    return _finding(
        "large_epsilon", "note",
        f"ε = {eps[which][0]:.3g} is larger than √v in {told(names)}: steps are proportional to the gradient there.",
        "Lower eps to 1e-8 for steps of Adam's length.",
        layers=names, eps=float(eps[which][0]), root_of_second_moment=float(np.median(root[which])),
    )  # fmt: skip


def unbalanced(course: Course) -> Finding | None:
    """Layers that have rotated by very different amounts; the papers connect balance with generalization."""
    rotation = course["rotation"]
    rows = np.flatnonzero(np.isfinite(rotation).any(1))
    if len(rows) < LIMITS.enough:
        return None
    which = course.weights & ~course.untrained
    last = np.where(which, rotation[rows[-1]], np.nan)
    known = np.flatnonzero(np.isfinite(last) & (last > 0))
    if len(known) < 2 or last[known].max() < 0.05 or last[known].max() < LIMITS.unbalanced * last[known].min():
        return None
    least, most = known[last[known].argmin()], known[last[known].argmax()]
    return _finding(
        "unbalanced", "note",
        f"{course.names[most]} has rotated by {last[most]:.3g} and {course.names[least]} by {last[least]:.3g}.",
        "Layca turns all layers alike; the papers found that to generalize best.",
        layers=(course.names[least], course.names[most]), most=float(last[most]), least=float(last[least]),
    )  # fmt: skip


Rule = Callable[[Course], Finding | None]

#: All rules, the most important first: causes before their consequences.
RULES: tuple[Rule, ...] = (
    not_trained, no_learning_rate, ranks_differ, gradients_accumulate, large_weights, zero_weights, symmetric,
    evaluates, double_softmax, repeated_batch, input_scale, schedule_collapsed, jump, too_fast, decay_dominates,
    not_finite, dead_units, no_gradient, saturating, large_branch, vanishing, slow_layer, stalled, too_slow, at_chance,
    dominated, clipped, large_epsilon, unbalanced,
)  # fmt: skip

#: The kinds of finding.
KINDS = (
    "replaced", "not_in_optimizer", "frozen", "no_learning_rate", "ranks_differ", "gradients_accumulate",
    "large_weights", "zero_weights", "symmetric", "eval_mode", "double_softmax", "repeated_batch", "input_scale",
    "schedule_collapsed", "jump", "too_fast", "decay_dominates", "not_finite", "dead_units", "no_gradient",
    "saturating", "large_branch", "vanishing", "slow_layer", "stalled", "too_slow", "at_chance", "dominated", "idle",
    "clipped", "large_epsilon", "unbalanced", "equilibrium",
)  # fmt: skip

#: Kinds that another fault may cause.
CONSEQUENCES = frozenset({
    "jump", "too_fast", "decay_dominates", "not_finite", "dead_units", "no_gradient", "saturating", "large_branch",
    "vanishing", "slow_layer", "too_slow", "at_chance", "stalled", "dominated",
})  # fmt: skip
