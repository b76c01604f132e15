"""A mean, a sum, a value a sample and a value a token are the same loss: Σ∇h is that of the mean."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import gyroscope
from gyroscope.conditioning import Conditioning
from gyroscope.errors import ConditioningError
from gyroscope.passes.losses import mean_loss, reduction_of

SUM = "the loss is a sum over the batch; it was divided by the number of samples"
NEITHER = "the loss is neither a mean nor a sum over the batch; it was taken for a mean"
UNKNOWN = "the loss could not be tested for being a mean; it was taken for one"


def mlp(out: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, out))


X = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))
Y = torch.arange(16) % 3
BITS = (torch.arange(48).reshape(16, 3) % 2).float()


def by_hand(model: nn.Sequential, values: Callable[[Tensor], Tensor]) -> dict[str, list[float]]:
    """λmax of Σ∇h, one backward pass a sample; `values` gives the loss of each sample, and the mean is meant."""
    names = ("0", "2")
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for i in range(len(X)):
        x, held = X[i : i + 1].double(), []
        for module in model.double():
            x = module(x)
            if isinstance(module, nn.Linear):
                x.retain_grad()
                held.append(x)
        values(x)[0].backward()
        for name, h in zip(names, held, strict=True):
            rows[name].append(h.grad[0])
    model.float()
    samples = {name: torch.stack(found) for name, found in rows.items()}
    return {f"{name}.weight": float(torch.linalg.eigvalsh(g.T @ g / len(g))[-1]) for name, g in samples.items()}


def assert_same_numbers(one: Conditioning, other: Conditioning) -> None:
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    for a, b in zip(one.entries, other.entries, strict=True):
        for name in ("lambda_x", "lambda_g", "lambda_f", "gradient_spectral", "domination", "rank_x", "rank_g"):
            assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-5), name


CE = F.cross_entropy
MEANS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "the function": (CE, ()),
    "the module": (nn.CrossEntropyLoss(), ()),
    "a lambda": (lambda o, t: CE(o, t), ()),
    "a partial": (functools.partial(CE, label_smoothing=0.0), ()),
    "a partial of a partial": (functools.partial(functools.partial(CE), ignore_index=-1), ()),
    "a partial of a module": (functools.partial(nn.CrossEntropyLoss()), ()),
    "a method": (nn.CrossEntropyLoss().forward, ()),
    "of shape [1]": (lambda o, t: CE(o, t).reshape(1), ()),
    "of shape [1, 1]": (lambda o, t: CE(o, t)[None, None], ()),
    "with a constant": (lambda o, t: CE(o, t) * 1.0 + 0.0 * o.sum(), ()),
    "a sum of a module": (nn.CrossEntropyLoss(reduction="sum"), ()),
    "a sum of a partial": (functools.partial(CE, reduction="sum"), ()),
    "a sum of a lambda": (lambda o, t: CE(o, t, reduction="sum"), (SUM,)),
    "a sum of a partial of a module": (functools.partial(nn.CrossEntropyLoss(reduction="sum")), (SUM,)),
    "a value a sample": (nn.CrossEntropyLoss(reduction="none"), ()),
    "a value a sample of a partial": (functools.partial(CE, reduction="none"), ()),
    "a value a sample in a column": (lambda o, t: CE(o, t, reduction="none")[:, None], ()),
}


@pytest.mark.parametrize("kind", MEANS)
def test_every_form_of_a_loss_has_the_numbers_of_the_mean(kind: str) -> None:
    model, (loss, notes) = mlp(), MEANS[kind]
    found = gyroscope.condition(model, loss, (X, Y))
    assert found.notes == notes
    assert_same_numbers(found, gyroscope.condition(model, CE, (X, Y)))


def test_gradients_of_every_form_are_those_of_one_pass_a_sample() -> None:
    model, at = mlp(), iter(Y.tolist())
    expected = by_hand(model, lambda o: CE(o, torch.tensor([next(at)]), reduction="none"))
    for reduction in ("mean", "sum", "none"):
        found = gyroscope.condition(model, functools.partial(CE, reduction=reduction), (X, Y))
        assert {e.layer: e.lambda_g for e in found.entries} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_is_said_about_a_single_value_is_believed(reduction: str) -> None:
    model = mlp()
    found = gyroscope.condition(model, lambda o, t: CE(o, t, reduction=reduction), (X, Y), reduction=reduction)
    assert found.notes == ()
    assert_same_numbers(found, gyroscope.condition(model, CE, (X, Y)))
    wrong = "sum" if reduction == "mean" else "mean"
    other = gyroscope.condition(model, lambda o, t: CE(o, t, reduction=reduction), (X, Y), reduction=wrong)
    factor = 1 / 16 if wrong == "sum" else 16
    assert other.entries[0].lambda_g == pytest.approx(found.entries[0].lambda_g * factor**2, rel=1e-5)


@pytest.mark.parametrize(
    "name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"]
)
def test_losses_of_elements_are_means_over_them(name: str) -> None:
    """The mean over samples and elements, also where each element has a value of its own."""
    model, loss = mlp(), getattr(F, name)
    mean, values, guessed = (
        gyroscope.condition(model, one, (X, BITS))
        for one in (loss, functools.partial(loss, reduction="none"), lambda o, t: loss(o, t))
    )
    assert_same_numbers(mean, values)
    assert_same_numbers(mean, guessed)
    assert mean.notes == values.notes == guessed.notes == ()


def test_a_sum_over_elements_is_a_mean_over_samples_alone() -> None:
    """Three elements a sample: their sum is three times their mean."""
    model = mlp()
    mean, summed = (gyroscope.condition(model, nn.MSELoss(reduction=how), (X, BITS)) for how in ("mean", "sum"))
    assert summed.loss == pytest.approx(3 * mean.loss, rel=1e-5)
    for one, other in zip(summed.entries, mean.entries, strict=True):
        assert one.lambda_g == pytest.approx(9 * other.lambda_g, rel=1e-5)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.hidden(self.embedding(words)).tanh())


WORDS = torch.randint(7, (8, 5), generator=torch.Generator().manual_seed(2))
NEXT = WORDS.roll(-1, 1)


def token_loss(**options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda o, t: CE(o.transpose(1, 2), t, **options)


def test_a_value_a_token_is_averaged_over_tokens() -> None:
    model = Tokens()
    mean = gyroscope.condition(model, token_loss(), (WORDS, NEXT))
    values = gyroscope.condition(model, token_loss(reduction="none"), (WORDS, NEXT))
    flat = gyroscope.condition(model, lambda o, t: CE(o.flatten(0, 1), t.flatten(), reduction="none"), (WORDS, NEXT))
    assert_same_numbers(mean, values)
    assert_same_numbers(mean, flat)
    assert mean.notes == values.notes == flat.notes == ()
    assert [entry.samples for entry in mean.entries] == [40, 40, 40]


def test_a_sum_over_tokens_is_a_mean_over_sequences() -> None:
    model = Tokens()
    mean, summed = (gyroscope.condition(model, token_loss(reduction=how), (WORDS, NEXT)) for how in ("mean", "sum"))
    assert summed.notes == (SUM,)
    assert summed.loss == pytest.approx(5 * mean.loss, rel=1e-5)
    for one, other in zip(summed.entries, mean.entries, strict=True):
        assert one.lambda_g == pytest.approx(25 * other.lambda_g, rel=1e-5)


@pytest.mark.parametrize("ignored", [slice(0, 4), slice(3, 9), slice(5, 16)])
def test_ignored_labels_have_gradients_of_zero_and_count_as_samples(ignored: slice) -> None:
    """Also where all labels that the loss is first asked about are ignored: their mean is not a number, their sum 0."""
    model, labels = mlp(), Y.clone()
    labels[ignored] = -100
    share = float((labels >= 0).float().mean())
    mean, asked, summed, sum_asked, values = (
        gyroscope.condition(model, loss, (X, labels))
        for loss in (
            CE,
            lambda o, t: CE(o, t),
            functools.partial(CE, reduction="sum"),
            lambda o, t: CE(o, t, reduction="sum"),
            functools.partial(CE, reduction="none"),
        )
    )
    assert asked.notes == ()
    assert sum_asked.notes == (SUM,)
    assert_same_numbers(mean, asked)
    assert_same_numbers(summed, sum_asked)
    assert_same_numbers(summed, values)
    # The mean is over labels that count, the mean of values over all.
    assert values.loss == pytest.approx(mean.loss * share, rel=1e-5)
    for one, other in zip(values.entries, mean.entries, strict=True):
        assert one.samples == other.samples == 16
        assert one.lambda_g == pytest.approx(other.lambda_g * share**2, rel=1e-5)


def test_a_sum_that_is_zero_for_the_first_samples_is_still_a_sum() -> None:
    model, weight = mlp(), torch.ones(16)
    weight[:4] = 0.0
    target = torch.cat([BITS, weight[:, None]], 1)
    loss = lambda o, t: ((o - t[:, :3]).square().mean(1) * t[:, 3]).sum()  # noqa: E731
    found = gyroscope.condition(model, loss, (X, target))
    assert found.notes == (SUM,)
    expected = gyroscope.condition(model, lambda o, t: (o - t[:, :3]).square().mean(1) * t[:, 3], (X, target))
    assert_same_numbers(found, expected)


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Every sample is told from all others, so that twice the batch is another task."""
    z = F.normalize(output, dim=1)
    return CE(z @ z.T / 0.1 - 1e9 * torch.eye(len(z)), torch.arange(len(z)).roll(1))


NEITHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "contrastive": contrastive,
    "the square of a sum": lambda o, t: CE(o, t, reduction="sum").square(),
    "a sum and a constant": lambda o, t: CE(o, t, reduction="sum") + 20.0,
    "the largest": lambda o, t: CE(o, t, reduction="none").logsumexp(0) - 1.0,
}


@pytest.mark.parametrize("kind", NEITHERS)
def test_what_is_neither_a_mean_nor_a_sum_is_taken_for_a_mean_and_noted(kind: str) -> None:
    model, loss = mlp(), NEITHERS[kind]
    found = gyroscope.condition(model, loss, (X, Y))
    assert found.notes == (NEITHER,)
    assert_same_numbers(found, gyroscope.condition(model, loss, (X, Y), reduction="mean"))
    assert found.loss == pytest.approx(float(loss(model(X), Y).detach()), rel=1e-5)


def test_a_loss_that_cannot_be_asked_is_taken_for_a_mean_and_noted() -> None:
    def picky(output: Tensor, target: Tensor) -> Tensor:
        assert len(output) == 16
        return CE(output, target)

    model = mlp()
    found = gyroscope.condition(model, picky, (X, Y))
    assert found.notes == (UNKNOWN,)
    assert_same_numbers(found, gyroscope.condition(model, CE, (X, Y)))


def test_an_output_without_rows_cannot_be_taken_twice() -> None:
    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).square().mean()

    found = gyroscope.condition(Total(), lambda o, t: o, (X, None))
    assert found.notes == (UNKNOWN,)
    with pytest.raises(ConditioningError, match="no tensor whose length is the number of samples"):
        gyroscope.condition(Total(), lambda o, t: o, (X, None), reduction="sum")


Out = namedtuple("Out", ["logits", "extra"])


class Several(nn.Module):
    """Puts out its logits among other things."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.form = nn.Linear(5, 3), form

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        forms = {"tuple": (h, h.mean()), "list": [h, "text"], "dict": {"logits": h, "n": 3}, "named": Out(h, None)}
        return forms[self.form]


PICK: dict[str, Callable[[Any], Tensor]] = {
    "tuple": lambda o: o[0],
    "list": lambda o: o[0],
    "dict": lambda o: o["logits"],
    "named": lambda o: o.logits,
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("form", PICK)
def test_outputs_of_several_parts_have_the_numbers_of_the_part_that_counts(form: str, reduction: str) -> None:
    model, pick = Several(form), PICK[form]
    found = gyroscope.condition(model, lambda o, t: CE(pick(o), t, reduction=reduction), (X, Y))
    expected = gyroscope.condition(model.linear, CE, (X, Y))
    assert found.entries[0].lambda_f == pytest.approx(expected.entries[0].lambda_f, rel=1e-5)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.notes == ((SUM,) if reduction == "sum" else ())


def test_a_loss_without_targets_is_asked_as_well() -> None:
    model = mlp()
    mean, summed = (
        gyroscope.condition(model, loss, (X, None))
        for loss in (lambda o, _: o.square().sum(1).mean(), lambda o, _: o.square().sum())
    )
    assert mean.notes == ()
    assert summed.notes == (SUM,)
    assert_same_numbers(mean, summed)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_small_batches_are_understood(n: int, reduction: str) -> None:
    model = mlp()
    found = gyroscope.condition(model, lambda o, t: CE(o, t, reduction=reduction), (X[:n], Y[:n]))
    assert_same_numbers(found, gyroscope.condition(model, CE, (X[:n], Y[:n])))


def test_a_loss_that_writes_to_its_arguments_is_asked_on_copies() -> None:
    model = mlp()

    def writes(output: Tensor, target: Tensor) -> Tensor:
        return output.sub_(target).square().sum()

    found = gyroscope.condition(model, writes, (X, BITS))
    assert found.notes == (SUM,)
    assert_same_numbers(found, gyroscope.condition(model, nn.MSELoss(reduction="sum"), (X, BITS)))


def test_a_module_with_an_attribute_of_that_name_is_asked() -> None:
    class Custom(nn.Module):
        def __init__(self, reduction: Any) -> None:
            super().__init__()
            self.reduction = reduction

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return CE(output, target, reduction="sum")

    model = mlp()
    for told in (nn.Linear(2, 2), None, "batchmean", np.ones(2), torch.ones(2)):
        found = gyroscope.condition(model, Custom(told), (X, Y))
        assert found.notes == (SUM,)
    assert gyroscope.condition(model, nn.KLDivLoss(reduction="batchmean"), (X, BITS)).notes == ()


def test_random_losses_do_not_move_the_random_numbers_outside() -> None:
    model, before = mlp(), torch.get_rng_state()
    found = gyroscope.condition(model, lambda o, t: CE(o + torch.randn_like(o), t), (X, Y))
    assert torch.equal(before, torch.get_rng_state())
    assert found.loss > 0


def test_means_over_batches_of_other_sizes_are_weighted_by_them() -> None:
    model = mlp()
    parts = [(X[:3], Y[:3]), (X[3:4], Y[3:4]), (X[4:], Y[4:])]
    for reduction in ("mean", "sum", "none"):
        found = gyroscope.condition(model, functools.partial(CE, reduction=reduction), iter(parts))
        assert_same_numbers(found, gyroscope.condition(model, CE, (X, Y)))
        assert found.batches == 3


def test_mean_loss_is_the_mean_with_its_graph() -> None:
    output = torch.randn(6, 3, requires_grad=True)
    for reduction in ("mean", "sum", "none"):
        value, _ = mean_loss(lambda o, t, how=reduction: CE(o, t, reduction=how), output, Y[:6])
        assert value.shape == ()
        (gradient,) = torch.autograd.grad(value, output)
        (expected,) = torch.autograd.grad(CE(output, Y[:6]), output)
        torch.testing.assert_close(gradient, expected)


TOLD: dict[str, tuple[Any, Tensor, str]] = {
    "an attribute": (nn.CrossEntropyLoss(reduction="sum"), torch.full((6,), -100), "sum"),
    "a known function": (CE, torch.full((6,), -100), "mean"),
    "a mean": (lambda o, t: CE(o, t), Y[:6], "mean"),
    "a sum": (lambda o, t: CE(o, t, reduction="sum"), Y[:6], "sum"),
    "a value a sample": (nn.CrossEntropyLoss(reduction="none"), Y[:6], "mean"),
    "a mean of no labels": (lambda o, t: CE(o, t), torch.full((6,), -100), "auto"),
    "a sum of no labels": (lambda o, t: CE(o, t, reduction="sum"), torch.full((6,), -100), "auto"),
    "an infinite sum": (lambda o, t: CE(o, t, reduction="sum") * torch.inf, Y[:6], "auto"),
    "neither": (NEITHERS["the square of a sum"], Y[:6], "auto"),
    "one that cannot be asked": (lambda o, t: CE(o[:6], t) if len(o) == 6 else None, Y[:6], "auto"),
}


@pytest.mark.parametrize("kind", TOLD)
def test_a_reduction_is_said_only_where_it_is_known(kind: str) -> None:
    loss, target, expected = TOLD[kind]
    assert reduction_of(loss, mlp()(X[:6]), target) == expected


WEIGHTS = torch.tensor([1.0, 0.1, 5.0, 2.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "loss",
    [
        CE,
        nn.CrossEntropyLoss(ignore_index=7),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(weight=WEIGHTS),
        nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=7, label_smoothing=0.2),
        nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"),
        functools.partial(CE, weight=WEIGHTS),
    ],
)
@pytest.mark.parametrize("width", [5, 40])  # more samples than dimensions, and fewer
def test_batches_with_ignored_labels_give_the_numbers_of_one_batch(loss, width):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 4)).double()
    x, y = torch.randn(24, 7, dtype=torch.float64), torch.randint(4, (24,))
    y[:6] = getattr(loss, "ignore_index", -100)
    whole = gyroscope.condition(model, loss, (x, y))
    cut = gyroscope.condition(model, loss, [(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)])
    assert cut.loss == pytest.approx(whole.loss)
    for name in ("0.weight", "2.weight"):
        for quantity in ("lambda_x", "lambda_g", "lambda_f", "gradient_spectral", "domination"):
            assert getattr(cut[name], quantity) == pytest.approx(getattr(whole[name], quantity)), (name, quantity)


def squared(output, target):
    return (output[:, 0] - target).square().mean()


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: CE(output, target),
        lambda output, target: CE(output, target, weight=WEIGHTS),
        lambda output, target: squared(output, target).sqrt(),
    ],
    ids=["ignored labels", "class weights", "no mean"],
)
def test_a_function_that_hides_how_samples_count_is_refused_over_batches(loss):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    x, y = torch.randn(200, 7, dtype=torch.float64), torch.randint(4, (200,))
    y[torch.randperm(200)[:40]] = -100  # all over the batches, so that their halves have about as many
    batches = [(x[:100], y[:100]), (x[100:], y[100:])]
    with pytest.raises(ConditioningError, match="The samples do not all count the same in the loss"):
        gyroscope.condition(model, loss, batches)
    assert gyroscope.condition(model, loss, (x, y)).batches == 1
    assert gyroscope.condition(model, loss, [(x, y)]).batches == 1
    assert gyroscope.condition(model, loss, batches, reduction="mean").batches == 2


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: CE(output, target),
        lambda output, target: CE(output, target, reduction="sum"),
        lambda output, target: CE(output, target, reduction="none"),
        squared,
        nn.L1Loss(),
    ],
    ids=["mean", "sum", "values", "squares", "module"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_function_in_which_all_samples_count_the_same_has_the_numbers_of_one_batch(loss, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 4)).to(dtype)
    x, y = torch.randn(24, 7, dtype=dtype), torch.randint(4, (24,))
    y = torch.randn(24, 4, dtype=dtype) if isinstance(loss, nn.L1Loss) else y
    whole = gyroscope.condition(model, loss, (x, y))
    cut = gyroscope.condition(model, loss, [(x[:5], y[:5]), (x[5:], y[5:])])
    assert cut["0.weight"].lambda_g == pytest.approx(
        whole["0.weight"].lambda_g, rel=0.05 if dtype.itemsize < 4 else 1e-4
    )
