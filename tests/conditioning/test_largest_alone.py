"""λmax alone (`p=()`), which large factors give without their covariances, compared with the full spectra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gyroscope
from gyroscope.conditioning import eigen, solve
from gyroscope.conditioning.factors import Factor
from gyroscope.passes import activations

NUMBERS = ("lambda_x", "lambda_g", "lambda_f", "weight_spectral", "gradient_spectral", "domination")


class Twice(nn.Module):
    """A weight that is used twice: its samples come in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(300, 300), nn.Linear(300, 5)

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.last(torch.relu(self.inner(torch.relu(self.inner(x)))))
        return last


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 250), nn.Tanh(), nn.Linear(250, 5))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 200, 3, 2, 1), nn.ReLU(), nn.Conv2d(200, 220, 1), nn.BatchNorm2d(220), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(220, 5),
    )  # fmt: skip


def unformed(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the matrices whose products are not formed, from now on."""
    shapes: list[torch.Size] = []
    whole = eigen._largest_products

    def seen(given: list[Tensor]) -> tuple[Tensor, Tensor]:
        shapes.extend(a.shape for a in given)
        return whole(given)

    monkeypatch.setattr(eigen, "_largest_products", seen)
    return shapes


def compare(net: nn.Module, batch: object, **options: object) -> None:
    every = gyroscope.condition(net, cross_entropy, batch, p=(1.0,), **options)  # type: ignore[arg-type]
    alone = gyroscope.condition(net, cross_entropy, batch, p=(), **options)  # type: ignore[arg-type]
    for one, other in zip(every.entries, alone.entries, strict=True):
        assert (one.layer, one.samples, one.dimension_x, other.rank_x) == (
            other.layer,
            other.samples,
            one.dimension_x,
            None,
        )
        for name in NUMBERS:
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-6, abs=0), (one.layer, name)


@pytest.mark.parametrize("samples", [1, 50, 250, 300, 500, 3000])
def test_it_is_that_of_the_full_spectrum_for_few_and_many_samples(samples: int) -> None:
    torch.manual_seed(samples)
    compare(mlp(), (torch.randn(samples, 300), torch.randint(5, (samples,))))


@pytest.mark.parametrize("make", [mlp, Twice])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_is_that_of_the_full_spectrum_in_other_dtypes(make: type[nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    compare(make().to(dtype), (torch.randn(400, 300, dtype=dtype), torch.randint(5, (400,))))


def test_it_is_that_of_the_full_spectrum_for_convolutions_and_shared_weights() -> None:
    torch.manual_seed(0)
    compare(cnn(), (torch.randn(9, 3, 12, 12), torch.randint(5, (9,))))
    compare(cnn(), (torch.randn(9, 3, 12, 12), torch.randint(5, (9,))), patches=True)
    compare(Twice(), (torch.randn(300, 300), torch.randint(5, (300,))))


def test_several_batches_give_the_same_as_one() -> None:
    torch.manual_seed(0)
    net, x, y = mlp(), torch.randn(400, 300), torch.randint(5, (400,))
    whole = gyroscope.condition(net, cross_entropy, (x, y), p=())
    parts = gyroscope.condition(net, cross_entropy, [(x[:150], y[:150]), (x[150:], y[150:])], p=())
    for one, other in zip(whole.entries, parts.entries, strict=True):
        assert [getattr(one, n) for n in NUMBERS] == pytest.approx([getattr(other, n) for n in NUMBERS], rel=1e-5)


@pytest.mark.parametrize("scale", [1e-20, 1e15])
def test_gradients_whose_squares_leave_the_range_of_float32_do_no_harm(scale: float) -> None:
    torch.manual_seed(0)
    net, batch = mlp(), (torch.randn(300, 300), torch.randint(5, (300,)))

    def scaled(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target) * scale

    every, alone = gyroscope.condition(net, scaled, batch, p=(1.0,)), gyroscope.condition(net, scaled, batch, p=())
    for one, other in zip(every.entries, alone.entries, strict=True):
        assert [getattr(other, n) for n in NUMBERS] == pytest.approx(
            [getattr(one, n) for n in NUMBERS], rel=1e-6, abs=0
        )


def test_units_are_counted_without_a_pass_over_what_enters_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(x: object) -> None:
        raise AssertionError

    monkeypatch.setattr(activations, "_fed", never)
    found = gyroscope.condition(mlp(), cross_entropy, (torch.randn(20, 300), torch.randint(5, (20,))), p=())
    assert all(entry.dying is not None for entry in found.entries)


def test_large_factors_and_weights_are_not_formed_and_small_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    shapes = unformed(monkeypatch)
    gyroscope.condition(mlp(), cross_entropy, (torch.randn(260, 300), torch.randint(5, (260,))), p=())
    # The inputs and output gradients of the first two layers and the input of the last, then two weights and gradients.
    factors = [(250, 260), (250, 260), (260, 300), (260, 400), (260, 400)]
    weights = [(250, 400), (250, 400), (300, 400), (300, 400)]
    assert sorted(map(tuple, shapes)) == sorted(factors + weights)


def test_whole_weights_of_a_sharded_model_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(300, 400, generator=torch.Generator().manual_seed(0))
    gram, scale = solve._reduced(weight)
    assert isinstance(gram, Tensor)
    assert gram.shape == (1, 1)
    expected = torch.linalg.svdvals(weight.double())[0].item()
    assert gram.sqrt().item() * scale.item() == pytest.approx(expected, rel=1e-6)
    torch.manual_seed(0)
    net, batch = mlp(), (torch.randn(300, 300), torch.randint(5, (300,)))
    before = gyroscope.condition(net, cross_entropy, batch, p=())
    monkeypatch.setattr(solve, "any_sharded", lambda _: True)
    for one, other in zip(before.entries, gyroscope.condition(net, cross_entropy, batch, p=()).entries, strict=True):
        assert [getattr(other, n) for n in NUMBERS] == pytest.approx([getattr(one, n) for n in NUMBERS], rel=1e-12)


def test_products_of_lower_precision_that_a_program_allows_are_not_used() -> None:
    torch.manual_seed(0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        a = torch.randn(300, 400)
        expected = torch.linalg.eigvalsh(a.double() @ a.double().T)[-1].item()
        value, reached = eigen._largest_products([a])
        assert reached.all()
        assert value.item() == pytest.approx(expected, rel=1e-6)
    finally:
        torch.set_float32_matmul_precision(before)


def test_samples_of_a_layer_whose_spectrum_is_asked_for_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.randn(300, 400, generator=torch.Generator().manual_seed(0))
    kept, formed = Factor(top=True), Factor()
    for factor in (kept, formed):
        factor.add(a)
        factor.close()
    assert (kept.holds_samples, formed.holds_samples) == (True, False)
    matrix, times = kept.take()
    assert isinstance(matrix, eigen.Product)
    expected = torch.linalg.eigvalsh(formed.mean())[-1].item()
    assert eigen.largest([matrix]).item() * times == pytest.approx(expected, rel=1e-6)


class Large(Factor):
    """A factor of 16 MiB on a GPU, according to itself."""

    bytes = 2**24  # type: ignore[assignment]
    device = torch.device("cuda")  # type: ignore[assignment]


def test_a_gpu_is_asked_for_its_memory_only_after_more_has_been_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Factor] = []
    asked: list[int] = []
    decomposed: list[int] = []

    def allocated(device: torch.device) -> int:
        asked.append(len(given))
        return 2**30 if len(given) > 9 else 0

    monkeypatch.setattr(torch.cuda, "memory_allocated", allocated)
    spectrometer = solve.Spectrometer(full=True)
    monkeypatch.setattr(spectrometer, "_decompose", lambda _: decomposed.append(len(given)))
    for _ in range(12):
        given.append(Large())
        spectrometer.take(given[-1])
    assert asked == [1, 3, 6, 9, 12]
    assert decomposed == [12]
