from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Normal
from torch.nn import functional as F  # noqa: N812

from gyroscope.errors import ConditioningError
from gyroscope.passes.likelihood import distribution, known, sample_targets

X = torch.linspace(-2, 2, 24, dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def likelihood(loss: object, output: Tensor) -> Distribution:
    """torch's own distribution with the parameters that were found."""
    q = distribution(loss, output)
    match q.family:
        case "categorical":
            logits = output.movedim(1, -1)
            return Categorical(probs=logits.exp()) if q.log_probabilities else Categorical(logits=logits)
        case "bernoulli":
            return Bernoulli(logits=output)
        case _:
            return Normal(output, q.variance**0.5)


CASES = {
    "cross-entropy": (nn.CrossEntropyLoss, (6, 4), "sum"),
    "cross-entropy of an image": (nn.CrossEntropyLoss, (2, 4, 3), "sum"),
    "cross-entropy, one sample": (nn.CrossEntropyLoss, (1, 24), "mean"),
    "nll": (nn.NLLLoss, (6, 4), "sum"),
    "bce": (nn.BCEWithLogitsLoss, (6, 4), "sum"),
    "bce of one label": (nn.BCEWithLogitsLoss, (1, 1), "mean"),
    "squared error, sum": (nn.MSELoss, (6, 4), "sum"),
    "squared error, mean of one sample": (nn.MSELoss, (1, 4, 6), "mean"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_the_negative_log_likelihood_up_to_a_constant(case: str) -> None:
    make, shape, reduction = CASES[case]
    loss = make(reduction=reduction)
    differences = []
    for scale in (1.0, 0.3):  # the constant must not depend on the output
        output = (scale * X)[: torch.Size(shape).numel()].reshape(shape)
        output = output.log_softmax(1) if make is nn.NLLLoss else output
        q = likelihood(loss, output)
        for seed in (0, 1):
            y = sample_targets(loss, output, generator=generator(seed))
            differences.append(loss(output, y) + q.log_prob(y).sum())
    assert torch.stack(differences).std() < 1e-12


@pytest.mark.parametrize("shape", [(4000, 3), (1000, 3, 2, 2)])
def test_classes_are_drawn_as_often_as_the_softmax_says(shape: tuple[int, ...]) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0]).reshape(1, 3, *[1] * (len(shape) - 2)).expand(shape)
    y = sample_targets(F.cross_entropy, logits, generator=generator())
    frequency = torch.bincount(y.flatten(), minlength=3) / y.numel()
    assert y.shape == logits[:, 0].shape
    assert torch.allclose(frequency, torch.tensor([0.2447, 0.6652, 0.0900]), atol=0.03)


def test_classes_of_probability_zero_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(2000, 5)
    drawn = sample_targets(F.cross_entropy, logits, generator=generator())
    assert set(drawn.tolist()) == {1, 3}


def test_not_even_zero_draws_a_class_of_probability_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.zeros(shape, dtype=options["dtype"]))
    logits = torch.tensor([[-torch.inf, 0.0, 0.0]])
    assert sample_targets(F.cross_entropy, logits, generator=generator()).item() == 1


def test_one_unbatched_output_has_one_class() -> None:
    y = sample_targets(F.cross_entropy, torch.tensor([0.0, 100.0, 0.0]), generator=generator())
    assert y.shape == ()
    assert y == 1


def test_bernoulli_labels_have_the_sigmoid_as_mean() -> None:
    y = sample_targets(F.binary_cross_entropy_with_logits, torch.full((5000,), 1.0), generator=generator())
    assert set(y.tolist()) == {0.0, 1.0}
    assert abs(y.mean() - torch.sigmoid(torch.tensor(1.0))) < 0.02


@pytest.mark.parametrize(("reduction", "variance"), [("mean", 2.0), ("none", 2.0), ("sum", 0.5)])
def test_gaussian_targets_lie_around_the_output_with_the_variance_of_the_loss(reduction: str, variance: float) -> None:
    output = torch.full((5000, 4), 3.0)
    y = sample_targets(nn.MSELoss(reduction=reduction), output, generator=generator())
    assert abs(y.mean() - 3) < 0.03
    assert abs(y.var() / variance - 1) < 0.05


def test_targets_follow_the_form_of_the_true_ones() -> None:
    logits = torch.tensor([[9.0, -9.0], [-9.0, 9.0], [-9.0, 9.0]]) * 10
    draw = functools.partial(sample_targets, F.cross_entropy, logits, generator=generator())
    assert draw(like=torch.tensor([0, -100, 0])).tolist() == [0, -100, 1]
    assert draw(like=torch.tensor([0, 1, 0], dtype=torch.uint8)).dtype == torch.uint8
    soft = draw(like=torch.full((3, 2), 0.5, dtype=torch.float16))
    assert soft.dtype == torch.float16
    assert soft.tolist() == [[1, 0], [0, 1], [0, 1]]
    assert F.cross_entropy(logits.half(), soft) == 0
    y = sample_targets(F.mse_loss, logits.half(), generator=generator(), like=torch.zeros(3, 2))
    assert y.dtype == torch.float32


def test_targets_of_another_shape_are_refused() -> None:
    with pytest.raises(ConditioningError, match=r"the shape of the output, \[3, 1\], got \[3\]"):
        sample_targets(F.mse_loss, torch.zeros(3, 1), generator=generator(), like=torch.zeros(3))
    with pytest.raises(ConditioningError, match=r"must have shape \[3\] \(class indices\).*got \[4\]"):
        sample_targets(F.cross_entropy, torch.zeros(3, 2), generator=generator(), like=torch.zeros(4).long())


def test_drawing_depends_on_the_generator_alone_and_leaves_the_global_state() -> None:
    output = torch.zeros(50, 3)
    for loss in (F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits):
        before = torch.get_rng_state()
        first = sample_targets(loss, output, generator=generator(3))
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(7)
        assert torch.equal(first, sample_targets(loss, output, generator=generator(3)))
        assert not torch.equal(first, sample_targets(loss, output, generator=generator(4)))


def test_half_precision_logits_are_drawn_from_as_they_are_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(300, 7, generator=generator()).to(torch.bfloat16)
    expected = sample_targets(F.cross_entropy, logits.double(), generator=generator())
    assert torch.equal(sample_targets(F.cross_entropy, logits, generator=generator()), expected)
    monkeypatch.setattr("gyroscope.passes.likelihood._PIECE", 20)
    assert torch.equal(sample_targets(F.cross_entropy, logits, generator=generator()), expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_outputs_that_are_not_finite_still_give_classes_in_range(value: float) -> None:
    y = sample_targets(F.cross_entropy, torch.tensor([[0.0, value, 0.0]]), generator=generator())
    assert 0 <= y.item() < 3


@pytest.mark.parametrize(
    "loss",
    [F.cross_entropy, nn.CrossEntropyLoss(), functools.partial(F.cross_entropy, reduction="sum"),
     functools.partial(functools.partial(F.cross_entropy, ignore_index=7), reduction="sum")],
    ids=["function", "module", "partial", "partial of a partial"],
)  # fmt: skip
def test_a_loss_is_known_in_all_its_forms(loss: object) -> None:
    assert distribution(loss, torch.zeros(2, 3)).family == "categorical"


def test_settings_are_read_through_partials() -> None:
    inner = functools.partial(F.cross_entropy, ignore_index=7, reduction="sum")
    inner.note = "a partial with an attribute stays one inside another"
    q = distribution(functools.partial(inner, reduction="mean"), torch.zeros(2, 3))
    assert (q.ignore_index, q.reduction) == (7, "mean")


class Twice(nn.MSELoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return 2 * super().forward(input, target)


REFUSED = {
    "l1": (F.l1_loss, "l1_loss is not known"),
    "a function of the user": (lambda o, t: (o - t).mean(), "is not known"),
    "class weights": (nn.CrossEntropyLoss(weight=torch.ones(3)), "weight"),
    "positive weights": (nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)), "pos_weight"),
    "smoothing": (functools.partial(F.cross_entropy, label_smoothing=0.1), "label_smoothing=0.1"),
    "a subclass that computes something else": (Twice(), "Twice is not known"),
    "positional arguments": (functools.partial(F.mse_loss, torch.zeros(3)), "is not known"),
    "old arguments": (functools.partial(F.mse_loss, size_average=False), "is not known"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_likelihood_is_refused_and_told_what_to_do(case: str) -> None:
    loss, message = REFUSED[case]
    with pytest.raises(ConditioningError, match=message) as caught:
        sample_targets(loss, torch.zeros(2, 3), generator=generator())
    for word in ("cross_entropy", "MSELoss", "labels=", "true"):
        assert word in str(caught.value)


def test_label_smoothing_has_no_likelihood_because_its_sum_over_labels_moves_with_the_output() -> None:
    totals = []
    for output in (torch.zeros(1, 3), torch.tensor([[2.0, 0.0, -1.0]])):
        losses = [F.cross_entropy(output, torch.tensor([c]), label_smoothing=0.2) for c in range(3)]
        totals.append(sum(torch.exp(-value) for value in losses))
    assert abs(totals[0] - totals[1]) > 0.01


def test_a_weighted_loss_is_still_known_for_what_it_is() -> None:
    q = known(nn.CrossEntropyLoss(weight=torch.ones(3), ignore_index=5))
    assert q is not None
    assert (q.family, q.ignore_index) == ("categorical", 5)
    assert known(F.huber_loss) is None
