"""Nothing is said of a run that its own measurements contradict."""

import numpy as np
import pytest
import torch

import gyroscope
from diagnosis.explain_runs import clusters, normalized, plain, train, walk, written
from gyroscope.control import keep_norms
from gyroscope.diagnosis.explain import TOPICS, explain


def sgd(**options):
    return lambda net: torch.optim.SGD(net.parameters(), **options)


# Implicit decay.


@pytest.mark.parametrize(("kind", "power"), [("sgd", 2), ("adamw", 1)])
@pytest.mark.parametrize(("share", "starts"), [(1.1, True), (0.9, False)], ids=["below", "above"])
def test_the_rate_starts_to_decay_where_steps_add_more_than_decay_takes(tmp_path, kind, power, share, starts):
    # ‖w‖⁴ (AdamW: ‖w‖²) under equation 23 in its first-order form, from `share` of what it adds over what it takes.
    lr, decay, steps = 0.1, 0.1, 400
    fall = 2 * power * lr * decay
    squares = [1.0]
    for _ in range(steps - 1):
        squares.append((1 - fall) * squares[-1] + share * fall)
    norms = np.array(squares) ** (0.5 / power)
    series = walk(steps, lr=lr, decay=decay) | {"weight_norm": norms}
    made = {"class": "SGD"} if kind == "sgd" else {"class": "AdamW", "betas": [0.0, 0.9]}
    entry = explain(written(tmp_path / "a", series, optimizer=made))["w"]
    said = entry.about("implicit decay")
    assert said.verdict == ("yes" if starts else "no")
    assert (norms[5] > norms[0]) == starts
    assert ("starts like" in said.words, "comes down from above" in said.words) == (starts, not starts)
    assert (entry.k0 is not None) == starts


def test_a_norm_that_comes_down_is_told_nothing_of_growth(tmp_path):
    folder = train(tmp_path / "a", normalized(), sgd(lr=0.1, weight_decay=0.05), 60)
    with gyroscope.load(folder) as run:
        norms = run.series("weight_norm")[:, 0]
    assert (np.diff(norms) < 0).mean() > 0.8
    said = explain(folder)["0.weight"].about("implicit decay")
    assert "comes down from above" in said.words
    for word in ("starts like", "slow growth", "k₀", "Record"):
        assert word not in said.words


def test_under_a_schedule_k0_counts_steps_at_the_largest_rate(tmp_path):
    lr = np.repeat([0.1, 0.01], [300, 300])
    said = explain(written(tmp_path / "a", walk(600, lr=lr)))["w"].about("implicit decay")
    assert said.verdict == "yes"
    assert "at the largest η, 0.1 (a step at η counts as (η/0.1)² steps)" in said.words
    assert "halve" not in said.words
    steady = explain(written(tmp_path / "b", walk(600, lr=0.1)))["w"].about("implicit decay")
    assert "so it halves in" in steady.words
    assert "largest" not in steady.words


def test_why_the_law_does_not_hold_is_said_where_that_was_measured(tmp_path):
    series = walk(100, lr=0.1)
    series["weight_norm"] = 1 + np.arange(100) / 30
    said = explain(written(tmp_path / "a", series))["w"].about("implicit decay")
    assert "‖∇‖‖w‖ did not stay constant" in said.words
    series["gradient_norm"] = 2 / series["weight_norm"]
    said = explain(written(tmp_path / "b", series))["w"].about("implicit decay")
    assert (said.verdict, "did not stay" in said.words) == ("no", False)
    adam = {"class": "Adam", "betas": [0.9, 0.99]}
    series["weight_norm"] = np.exp(np.arange(100) / 30)
    series["rate"] = 0.1 / series["weight_norm"]  # steps as long as ever
    said = explain(written(tmp_path / "c", series, optimizer=adam))["w"].about("implicit decay")
    assert (said.verdict, "‖∇‖" in said.words, "did not stay" in said.words) == ("no", False, False)
    series["rate"] = np.full(100, 0.1)
    said = explain(written(tmp_path / "d", series, optimizer=adam))["w"].about("implicit decay")
    assert "The length of steps across the weights, divided by η, did not stay constant" in said.words


# Weight decay.


@pytest.mark.parametrize("cosine", [0.0, 0.3, 1.0], ids=["invariant", "undecided", "not invariant"])
def test_decay_of_all_of_the_weights_is_said_to_be_that_whatever_the_layer(tmp_path, cosine):
    series = walk(60, lr=0.1, cosine=cosine) | {"weight_decay": np.full(60, 10.0)}
    entry = explain(written(tmp_path / "a", series))["w"]
    for topic in ("equilibrium", "weight decay"):
        said = entry.about(topic)
        assert (said.verdict, said.source) == ("does not apply", "equation 22")
        assert "ηλ is 1:" in said.words
    assert entry.mechanisms == ()


def test_a_stretch_in_which_decay_took_all_is_not_judged(tmp_path):
    series = walk(60, lr=0.1) | {"weight_decay": np.repeat([10.0, 0.01], [50, 10])}
    assert explain(written(tmp_path / "a", series))["w"].about("equilibrium").verdict == "undecided"


def test_what_is_said_of_a_resumed_run_is_of_the_optimizer_that_is_known(tmp_path):
    net = normalized()

    def adamw(net):
        return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.5)

    train(tmp_path / "a", net, adamw, 30)
    entry = explain(train(tmp_path / "a", net, sgd(lr=0.1, weight_decay=0.05), 40))["0.weight"]
    with gyroscope.load(tmp_path / "a") as run:
        lr, norms = (run.series(name)[:, 0].astype(float) for name in ("lr", "weight_norm"))
        first = int(np.flatnonzero(np.isclose(lr, 0.1))[0])
        assert run.steps[first] == 31
    assert entry.about("effective learning rate").words.startswith("From step 31 to 70, η stayed at 0.1 while")
    assert (entry.lr_first, entry.lr_last) == pytest.approx((0.1, 0.1))
    assert entry.implicit_factor == pytest.approx((norms[first] / norms[-1]) ** 2)


def test_a_layer_that_became_nan_is_not_told_when_it_arrives(tmp_path):
    net, (x, y) = normalized(), clusters()
    optimizer = sgd(lr=0.1, weight_decay=0.05)(net)
    with gyroscope.watch(net, optimizer, tmp_path / "a", budget=None, activations=False):
        for k in range(80):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x[:64]), y[:64]).backward()
            if k == 60:
                net[0].weight.grad[0, 0] = float("nan")
            optimizer.step()
    entry = explain(tmp_path / "a")["0.weight"]
    for topic in TOPICS[1:4]:
        assert "norm is not finite from step 61 on." in entry.about(topic).words
        assert "more steps" not in entry.about(topic).words
    assert entry.at_equilibrium == "no"


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        (
            ["weight_norm", "gradient_norm", "invariance"],
            "Its norm is not finite from step 8 on; before that, its gradient",
        ),
        (["gradient_norm", "invariance"], "It has no finite gradient from step 8 on; before that, its gradient"),
    ],
    ids=["norm", "gradient"],
)
def test_a_layer_that_became_nan_early_is_not_told_to_be_recorded_more(tmp_path, lost, says):
    series = walk(60)
    for name in lost:
        series[name][7:] = np.nan
    entry = explain(written(tmp_path / "a", series))["w"]
    said = entry.about("scale invariance")
    assert (said.verdict, said.words) == ("undecided", f"{says} was measured at 7 steps, and 10 are needed.")
    assert entry.scale_invariant == "undecided: not finite"


def test_a_gradient_that_was_measured_once_was_measured_at_one_step(tmp_path):
    said = explain(written(tmp_path / "a", walk(1)))["w"].about("scale invariance")
    assert "measured at 1 step, and" in said.words


def test_a_norm_that_is_kept_is_not_put_down_to_decay(tmp_path):
    def make(net):
        optimizer = sgd(lr=0.1, weight_decay=0.05)(net)
        keep_norms(optimizer, gyroscope.layers(net, include="0*"))
        return optimizer

    entry = explain(train(tmp_path / "a", normalized(), make, 60))["0.weight"]
    rate, law, decay = (entry.about(topic) for topic in ("effective learning rate", "implicit decay", "weight decay"))
    assert "stayed at 0.00833" in rate.words
    assert (law.verdict, "stayed at 3.46" in law.words, "decay" in law.words) == ("does not apply", True, False)
    assert (decay.verdict, entry.mechanisms) == ("does not apply", ())
    assert "something other than decay and steps holds it" in decay.words


def test_a_norm_that_decay_and_steps_hold_together_is_not_taken_for_one_that_is_kept(tmp_path):
    lr, decay = 0.1, 0.05
    rests = (lr**2 / (1 - (1 - lr * decay) ** 2)) ** 0.25  # the fixed point of equation 23, where the walk stays
    entry = explain(written(tmp_path / "a", walk(100, lr=lr, decay=decay, start=rests)))["w"]
    assert entry.about("equilibrium").verdict == "yes"
    assert entry.mechanisms == ("effective learning rate",)


def test_of_a_layer_that_no_optimizer_holds_that_is_all_that_is_said(tmp_path):
    net = normalized()
    net[0].weight.requires_grad_(False)

    def make(net):
        return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, weight_decay=0.05)

    entry = explain(train(tmp_path / "a", net, make, 20))["0.weight"]
    for topic in TOPICS[1:]:
        assert (entry.about(topic).verdict, entry.about(topic).words) == (
            "does not apply",
            "because no optimizer steps it.",
        )


def test_a_layer_whose_gradient_is_zero_is_said_to_be_dead_and_not_measured_too_seldom(tmp_path):
    net = plain()
    with torch.no_grad():
        net[0].bias.fill_(-1000.0)
    folder = train(tmp_path / "run", net, lambda net: torch.optim.SGD(net.parameters(), lr=0.1), 30)
    said = gyroscope.explain(folder)["0.weight"].about("scale invariance")
    assert said.verdict == "undecided"
    assert said.words.startswith("Its gradient was zero at 30 steps and nonzero at 0 steps; 10 are needed.")
