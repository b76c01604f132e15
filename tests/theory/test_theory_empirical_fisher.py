"""The three Fisher matrices beside exact ones and beside drawn batches, and the batch size that sets the step."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from gyroscope.conditioning.fisher import fisher
from gyroscope.control.preconditioners.kfac import KFAC
from gyroscope.errors import DynamicsError
from gyroscope.theory import empirical_fisher
from gyroscope.theory.adaptive import rmsprop
from gyroscope.theory.empirical_fisher import (
    batch_law,
    fisher_diagonal,
    measured_second_moment,
    per_example_gradients,
    second_moment,
    step_gain,
)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def network() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return model, noise(10, 3), torch.arange(10) % 3


@pytest.fixture(scope="module")
def gradients() -> torch.Tensor:
    """With elements of much noise, of little, and of none."""
    return noise(60, 5) * torch.tensor([1.0, 1.0, 0.1, 0.01, 0.0], dtype=torch.float64) + torch.tensor(
        [0.0, 0.1, 0.3, 1.0, 2.0], dtype=torch.float64
    )


def test_the_true_fisher_diagonal_is_that_of_the_exact_matrix():
    model, x, t = network()
    exact = fisher(model, cross_entropy, (x, t)).matrix.diagonal()
    torch.testing.assert_close(fisher_diagonal(model, x, chunk=4), exact)


def test_the_fisher_diagonal_of_a_gaussian_is_that_of_squared_jacobians():
    model, x, _ = network()
    square = 0.0
    for one in x:
        for z in model(one):
            row = torch.autograd.grad(z, model.parameters(), retain_graph=True)
            square = square + torch.cat([g.flatten() for g in row]).square()
    torch.testing.assert_close(fisher_diagonal(model, x, likelihood="gaussian"), square / 10)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_rows_are_the_gradients_of_single_examples(reduction, chunk):
    model, x, t = network()
    rows = per_example_gradients(model, partial(cross_entropy, reduction=reduction), x, t, chunk=chunk)
    for i in range(10):
        one = torch.autograd.grad(cross_entropy(model(x[i : i + 1]), t[i : i + 1]), model.parameters())
        torch.testing.assert_close(rows[i], torch.cat([g.flatten() for g in one]))


def test_the_empirical_fisher_is_the_exact_second_moment_matrix_of_the_data():
    model, x, t = network()
    rows = per_example_gradients(model, cross_entropy, x, t)
    exact = fisher(model, cross_entropy, (x, t), labels="true").matrix
    torch.testing.assert_close(second_moment(rows, full=True), exact)
    torch.testing.assert_close(second_moment(rows), exact.diagonal())
    # And it is not the true one: gradients of the data do not look like those of the model.
    assert (second_moment(rows) / fisher_diagonal(model, x)).log().abs().max() > 0.2


def test_labels_drawn_from_the_model_make_the_empirical_fisher_the_true_one():
    model, x, _ = network()
    many = x.repeat(400, 1)
    drawn = torch.multinomial(model(many).softmax(1), 1, generator=torch.Generator().manual_seed(0))[:, 0]
    found = second_moment(per_example_gradients(model, cross_entropy, many, drawn))
    torch.testing.assert_close(found, fisher_diagonal(model, x), rtol=0.15, atol=1e-3)


def test_frozen_parameters_have_no_gradient_and_still_count():
    model, x, t = network()
    whole = per_example_gradients(model, cross_entropy, x, t)
    model[0].requires_grad_(False)
    torch.testing.assert_close(per_example_gradients(model, cross_entropy, x, t), whole[:, -15:])
    assert fisher_diagonal(model, x).shape == (15,)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("full", [False, True])
def test_the_second_moment_of_batches_is_the_mean_over_all_of_them(size, full):
    from itertools import combinations, product

    g = noise(4, 3)
    for replacement, every in ((True, product(range(4), repeat=size)), (False, combinations(range(4), size))):
        means = torch.stack([g[list(batch)].mean(0) for batch in every])
        literal = means.T @ means / len(means)
        found = second_moment(g, batch_size=size, replacement=replacement, full=full)
        torch.testing.assert_close(found, literal if full else literal.diagonal())


def test_the_full_batch_has_no_noise_left(gradients):
    mean = gradients.mean(0)
    torch.testing.assert_close(second_moment(gradients, batch_size=60, replacement=False), mean.square())


@pytest.mark.parametrize("replacement", [True, False])
def test_drawn_batches_have_the_second_moment_that_is_said(gradients, replacement):
    found = measured_second_moment(gradients, batch_size=8, draws=8000, replacement=replacement)
    expected = second_moment(gradients, batch_size=8, replacement=replacement)
    torch.testing.assert_close(found, expected, rtol=0.06, atol=0)


class Largest(TorchDispatchMode):
    """The most numbers that any tensor had that was made meanwhile."""

    def __init__(self, but: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.but, self.numbers = but, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, torch.Tensor) and tuple(one.shape) != self.but:
                self.numbers = max(self.numbers, one.numel())
        return made


def rows_of(model, x, t):
    return per_example_gradients(model, cross_entropy, x, t)


@pytest.mark.parametrize(
    ("measure", "once"), [(rows_of, 31), (lambda model, x, t: fisher_diagonal(model, x), 93)], ids=["rows", "diagonal"]
)
@pytest.mark.parametrize("examples", [1, 3])
def test_more_parameters_mean_fewer_examples_at_a_time_and_the_same_result(monkeypatch, measure, once, examples):
    model, x, t = network()  # of 31 parameters, and 3 outputs
    with Largest() as together:
        whole = measure(model, x, t)
    monkeypatch.setattr(empirical_fisher, "_HELD", once * examples + once - 1)
    with Largest(but=(10, 31)) as apart:  # which is what is asked for
        parts = measure(model, x, t)
    assert 10 * apart.numbers == examples * together.numbers
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("replacement", [True, False])
def test_drawn_batches_are_the_same_however_many_are_held_at_a_time(monkeypatch, replacement):
    g = noise(6, 50)
    whole = measured_second_moment(g, batch_size=4, draws=40, replacement=replacement)
    monkeypatch.setattr(empirical_fisher, "_HELD", 349)
    with Largest() as largest:
        parts = measured_second_moment(g, batch_size=4, draws=40, replacement=replacement)
    assert largest.numbers == 300  # the gradients of six batches; those of one's examples would be 200
    torch.testing.assert_close(parts, whole)


def test_noise_falls_as_one_over_the_batch_size_when_measured():
    g = noise(500, 20) + 0.05
    law = batch_law(g, [1, 2, 8, 32, 128], draws=1500)
    assert law.exponent == pytest.approx(-1.0, abs=0.03)
    assert law.measured == pytest.approx(law.predicted, rel=0.05)
    assert list(law.noise) == sorted(law.noise, reverse=True)
    share = 1 / 128 / (1 / 128 + 0.05**2)
    assert law.noise[-1] == pytest.approx(share, abs=0.1)


def test_rmsprop_remembers_the_second_moment_of_its_batches(gradients):
    draw = torch.Generator().manual_seed(3)
    for size in (4, 32):
        w, state = torch.zeros(5, dtype=torch.float64), None
        for _ in range(3000):
            g = gradients[torch.randint(0, 60, (size,), generator=draw)].mean(0)
            w, state = rmsprop(w, g, state, lr=0.0, beta=0.998)
        torch.testing.assert_close(state.square, second_moment(gradients, batch_size=size), rtol=0.2, atol=0)


def test_larger_batches_make_larger_steps_by_up_to_the_root_of_their_ratio(gradients):
    gain = step_gain(gradients, 4, 64)
    assert gain.most == 4.0
    assert gain.each[-1] == pytest.approx(1.0)
    assert ((gain.each >= 1) & (gain.each <= 4)).all()
    only_noise = step_gain(gradients - gradients.mean(0), 4, 64)
    assert only_noise.each[:4].tolist() == pytest.approx([4.0] * 4)
    assert only_noise.median == pytest.approx(4.0)
    assert torch.isnan(step_gain(torch.zeros(3, 2), 1, 2).each).all()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: second_moment(torch.ones(3)), r"must be a tensor \[examples, parameters\]"),
        (lambda: second_moment(torch.ones(3, 2), batch_size=0), "`batch_size` must .* got 0"),
        (lambda: second_moment(torch.ones(3, 2), batch_size=4, replacement=False), "≤ 3, the number of examples"),
        (lambda: measured_second_moment(torch.ones(3, 2), batch_size=1, draws=0), "`draws` must .* got 0"),
        (lambda: batch_law(torch.ones(3, 2), [4]), "at least two"),
        (lambda: batch_law(torch.ones(3, 2), [1, 2], draws=2), "must differ between examples"),
        (lambda: step_gain(torch.ones(3, 2), 8, 4), "`batch_size` ≤ `larger`"),
        (
            lambda: fisher_diagonal(nn.Linear(2, 2), torch.ones(1, 2), likelihood="poisson"),
            "`likelihood` must .* got 'poisson'",
        ),
        (lambda: fisher_diagonal(nn.Linear(2, 2), torch.ones(0, 2)), "at least one sample"),
        (lambda: fisher_diagonal(nn.Linear(2, 2), torch.ones(1, 2), chunk=0), "`chunk` must .* got 0"),
        (lambda: fisher_diagonal(nn.ReLU(), torch.ones(1, 2)), "No parameter of `model` requires a gradient"),
        (lambda: fisher_diagonal(nn.BatchNorm1d(2), torch.ones(3, 2)), "Put the model into eval mode"),
        (
            lambda: per_example_gradients(nn.Linear(2, 2), cross_entropy, torch.ones(3, 2), torch.ones(2)),
            "equal lengths, got 3 and 2",
        ),
    ],
)
def test_what_has_no_second_moment_is_refused(call, says):
    with pytest.raises(DynamicsError, match=says):
        call()


def test_numbers_come_as_arrays():
    law = batch_law(noise(20, 2), [1, 4], draws=50)
    assert law.batch_sizes.dtype == np.int64
    assert law.measured.shape == law.predicted.shape == law.noise.shape == (2,)


def test_units_that_are_dropped_are_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    with pytest.raises(DynamicsError, match=r"1 drops units at random. Put the model into eval mode"):
        fisher_diagonal(model, torch.ones(2, 3))


def test_instruments_that_hang_on_the_model_do_not_look():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    expected = fisher_diagonal(model, x)
    optimizer = KFAC(torch.optim.SGD(model.parameters(), lr=0.0), model, nn.functional.cross_entropy)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert torch.equal(fisher_diagonal(model, x), expected)
