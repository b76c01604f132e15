"""Eigenvalues of many matrices at once, compared with numpy's, one by one in float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from conditioning.devices import DEVICES
from gyroscope.conditioning import eigen
from gyroscope.conditioning.eigen import Product, eigenvalues, eigvalsh, krylov, lanczos, largest, side_by_side

F64 = torch.float64


def with_spectrum(values: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with those eigenvalues and random eigenvectors."""
    d = len(values)
    q, _ = torch.linalg.qr(torch.randn(d, d, dtype=F64, generator=torch.Generator().manual_seed(seed)))
    return (q * values.to(F64)) @ q.T


def covariance(d: int, samples: int, seed: int = 0) -> Tensor:
    x = torch.randn(samples, d, dtype=F64, generator=torch.Generator().manual_seed(seed))
    return x.T @ x / samples


def oracle(matrix: Tensor) -> float:
    """The largest eigenvalue, from all."""
    return torch.linalg.eigvalsh(matrix.double().cpu())[-1].item()


D = 400  # large enough for Lanczos iteration on every device
EYE = torch.eye(D, dtype=F64)
DOWN = torch.linspace(0.99, 0, D - 2, dtype=F64)
CLUSTER = 1 - torch.linspace(0, 1e-4, 40, dtype=F64)
HARD = {
    "identity": EYE,
    "zero": 0 * EYE,
    "rank one": torch.ones(D, D, dtype=F64),
    "one element": 3 * EYE[:, 7:8] @ EYE[7:8],
    "diagonal": torch.diag(torch.linspace(0, 1, D, dtype=F64)),
    "two equal at the top": with_spectrum(torch.cat([torch.tensor([1, 1]), DOWN])),
    "two 1e-5 apart": with_spectrum(torch.cat([torch.tensor([1 + 1e-5, 1], dtype=F64), DOWN])),
    "a cluster 1e-4 wide": with_spectrum(torch.cat([CLUSTER, DOWN[:-38] / 2])),
    "identity and 1e-5 more": EYE + 1e-5 * EYE[:, 7:8] @ EYE[7:8],
    "orthogonal to all ones": EYE - 1 / D,
    "alternating": (-1.0) ** torch.arange(D, dtype=F64)
    * torch.ones(D, 1, dtype=F64)
    * (-1.0) ** torch.arange(D)[:, None],
    "decay": with_spectrum(torch.logspace(0, -16, D, dtype=F64)),
    "few samples": covariance(D, 20),
    "many samples": covariance(D, 20 * D),
    "as many samples as dimensions": covariance(D, D),
    "blocks": torch.block_diag(covariance(100, 50), 1.0001 * covariance(100, 50), torch.zeros(200, 200, dtype=F64)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_eigenvalues_are_those_of_each_matrix_in_descending_order(device: str, dtype: torch.dtype) -> None:
    given = [covariance(d, 2 * d, seed).to(device, dtype) for seed, d in enumerate([5, 1, 64, 5, 33, 1, 64])]
    for matrix, found in zip(given, eigenvalues(given), strict=True):
        assert (found.dtype, found.device.type) == (F64, device)
        expected = np.linalg.eigvalsh(matrix.double().cpu().numpy())[::-1]
        np.testing.assert_allclose(found.cpu(), expected, rtol=0, atol=1e-13)


def test_nothing_and_matrices_without_elements_have_no_eigenvalues() -> None:
    assert eigenvalues([]) == []
    assert [v.shape for v in eigenvalues([torch.zeros(0, 0), torch.eye(2)])] == [(0,), (2,)]
    assert largest([]).shape == (0,)
    assert largest([torch.zeros(0, 0), torch.eye(2)]).tolist() == [0, 1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_matrix_that_is_not_finite_has_nan_and_spoils_no_other(device: str, bad: float) -> None:
    good, spoilt = covariance(D, D).to(device), covariance(D, D).to(device)
    spoilt[3, 4] = spoilt[4, 3] = bad
    first, second, third = eigenvalues([good, spoilt, good])
    assert torch.equal(first, third)
    assert second.isnan().all()
    assert torch.allclose(first, torch.linalg.eigvalsh(good).flip(0), rtol=0, atol=1e-12)
    assert largest([good, spoilt]).tolist() == pytest.approx([oracle(good), torch.nan], rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [2.0**-1000, 2.0**-100, 2.0**1010])
def test_eigenvalues_scale_with_the_matrix_to_the_last_bit(device: str, scale: float) -> None:
    matrices = [covariance(d, 2 * d).to(device) for d in (4, D)]
    for one, other in zip(eigenvalues(matrices), eigenvalues([m * scale for m in matrices]), strict=True):
        assert torch.equal(one * scale, other)
    assert torch.equal(largest(matrices) * scale, largest([m * scale for m in matrices]))


def test_the_given_matrices_are_left_as_they_are() -> None:
    given = [3 * covariance(d, d) for d in (4, D)]
    copies = [m.clone() for m in given]
    eigenvalues(given), largest(given)
    assert all(torch.equal(m, c) for m, c in zip(given, copies, strict=True))


def test_stacks_of_bounded_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [covariance(8, 16, seed) for seed in range(7)]
    whole = eigenvalues(given)
    monkeypatch.setattr(eigen, "_STACK_ON_CPU", 2 * 64)
    assert [len(b) for b in eigen.alike([(8, torch.device("cpu"))] * 7)] == [2, 2, 2, 1]
    assert all(torch.allclose(a, b, rtol=1e-14) for a, b in zip(whole, eigenvalues(given), strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("name", HARD)
def test_the_largest_eigenvalue_is_right_in_hard_cases(name: str, scale: float, device: str) -> None:
    matrix = HARD[name] * scale
    assert largest([matrix.to(device)]).item() == pytest.approx(oracle(matrix), rel=1e-6, abs=0)


@pytest.mark.parametrize("device", DEVICES)
def test_the_largest_eigenvalues_of_many_are_found_together_and_in_order(device: str) -> None:
    given = [m for pair in zip(HARD.values(), (covariance(d, 9, d) for d in range(1, 99)), strict=False) for m in pair]
    expected = [oracle(m) for m in given]
    np.testing.assert_allclose(largest([m.to(device) for m in given]).cpu(), expected, rtol=1e-6)


def test_matrices_that_are_filled_up_with_zeros_have_the_same_largest_eigenvalue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = [covariance(d, 2 * d + 1, d) for d in (16, 3, 0, 64, 1, 3, 100)]
    given[4] *= torch.nan
    before = [m.clone() for m in given]
    monkeypatch.setattr(eigen, "_filled", lambda size, device: max(size, 64))
    monkeypatch.setattr(eigen, "_largest", eigen.largest_by_squaring)
    expected = [torch.nan if i == 4 else oracle(m) if len(m) else 0.0 for i, m in enumerate(given)]
    assert largest(given, owned=True).tolist() == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(given, before, strict=True))


@pytest.mark.parametrize("fast", [True, False])
def test_only_gpus_with_slow_float64_do_not_form_products(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eigen, "has_fast_double", lambda device: fast)
    assert Product.suits(2048, 4096, torch.device("cuda")) is not fast
    assert Product.suits(2048, 4096, torch.device("cpu"))


@pytest.mark.parametrize("d", [1, 2, 31, 32, 33, 40, 64, 257, 500])
@pytest.mark.parametrize("samples", [1, 10, 1000])
def test_lanczos_reaches_the_largest_eigenvalue_at_every_size(d: int, samples: int) -> None:
    stack = torch.stack([covariance(d, samples, seed) for seed in range(3)])
    value, reached, vectors = lanczos(stack, residual=1e-8)
    assert reached.all()
    torch.testing.assert_close(
        torch.bmm(stack, vectors[..., None])[..., 0], value[:, None] * vectors, rtol=0, atol=1e-6
    )
    np.testing.assert_allclose(value, [oracle(m) for m in stack], rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("product", [False, True])
def test_no_large_matrix_is_decomposed_for_its_largest_eigenvalue(
    product: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = torch.randn(600, 900, dtype=F64, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = oracle(a.double() @ a.double().T)
    sizes = []

    def decompose(m: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(m.shape[-1])
        return whole(m)

    whole = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", decompose)
    monkeypatch.delattr(torch.linalg, "eigvalsh")
    assert largest([Product(a) if product else a.double() @ a.double().T]).item() == pytest.approx(expected, rel=1e-6)
    assert sizes
    assert max(sizes) < 150


def wide(values: Tensor, columns: int, seed: int = 0) -> Tensor:
    """A matrix A with those eigenvalues of AAᵀ, and random singular vectors."""
    d = len(values)
    q, _ = torch.linalg.qr(torch.randn(columns, d, dtype=F64, generator=torch.Generator().manual_seed(seed + 1)))
    u, _ = torch.linalg.qr(torch.randn(d, d, dtype=F64, generator=torch.Generator().manual_seed(seed)))
    return (u * values.to(F64).sqrt()) @ q.T


def drawn(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, dtype=F64, generator=torch.Generator().manual_seed(rows + columns))


UNFORMED = {
    "random": drawn(300, 500),
    "square": drawn(300, 300),
    "wide": drawn(300, 2400),
    "1 x 1": torch.tensor([[-3.0]], dtype=F64),
    "one row": drawn(1, 50),
    "two rows": drawn(2, 50),
    "zero": torch.zeros(300, 400, dtype=F64),
    "rank one": drawn(300, 1) @ drawn(1, 400),
    "rank deficient": drawn(300, 7) @ drawn(7, 400),
    "condition number 1e8": wide(torch.logspace(0, -8, 300, dtype=F64), 400),
    "condition number 1e8, all large but one": wide(torch.cat([torch.ones(299), torch.tensor([1e-8])]), 400),
    "equal eigenvalues": wide(torch.ones(300), 400),
    "two equal at the top": wide(torch.cat([torch.ones(2), torch.linspace(0.99, 0, 298)]), 400),
    "two 1e-5 apart": wide(torch.cat([torch.tensor([1 + 1e-5], dtype=F64), torch.linspace(1, 0, 299)]), 400),
    "a cluster 1e-4 wide": wide(torch.cat([1 - torch.linspace(0, 1e-4, 40), torch.linspace(0.5, 0, 260)]), 400),
    "slow": wide(1 - torch.linspace(0, 1, 300, dtype=F64) ** 4, 400),
    "constant": torch.ones(300, 400, dtype=F64),
    "a mean much larger than the deviations": 1e4 + drawn(300, 400),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("name", UNFORMED)
def test_the_largest_eigenvalue_of_a_product_that_is_not_formed(name: str, scale: float, device: str) -> None:
    a = UNFORMED[name] * scale
    expected = oracle(a @ a.T)
    assert largest([Product(a.to(device))]).item() == pytest.approx(expected, rel=1e-6, abs=0)
    a = (UNFORMED[name] * scale**0.5).float()
    expected = oracle(a.double() @ a.double().T)
    assert largest([Product(a.to(device))]).item() == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.parametrize("device", DEVICES)
def test_products_and_formed_matrices_are_found_together_in_order(device: str) -> None:
    given: list[Tensor | Product] = []
    expected = []
    for i, a in enumerate([drawn(270, 300), drawn(5, 9), drawn(270, 300), drawn(400, 500), 2 * drawn(270, 300)]):
        given.append(Product(a.to(device)) if i != 1 else (a @ a.T).to(device))
        expected.append(oracle(a @ a.T))
    np.testing.assert_allclose(largest(given).cpu(), expected, rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_product_that_is_not_finite_is_nan_and_spoils_no_other(device: str, bad: float) -> None:
    good, spoilt = drawn(300, 400), drawn(300, 400)
    spoilt[3, 4] = bad
    found = largest([Product(good.to(device)), Product(spoilt.to(device))]).tolist()
    assert found == pytest.approx([oracle(good @ good.T), torch.nan], rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_half_precision_are_taken_in_float64(dtype: torch.dtype) -> None:
    a = drawn(300, 400).to(dtype)
    expected = oracle(a.double() @ a.double().T)
    assert largest([Product(a)]).item() == pytest.approx(expected, rel=1e-10)
    assert len(Product.of(a.T)) == 300


def test_what_lanczos_does_not_reach_is_decomposed() -> None:
    slow = with_spectrum(1 - torch.linspace(0, 1, D, dtype=F64) ** 4)
    _, reached, _ = lanczos(slow[None], residual=1e-8)
    assert not reached
    assert largest([slow, HARD["decay"]]).tolist() == pytest.approx([1, 1], rel=1e-12)


def test_what_lanczos_calls_reached_is_accurate_whatever_the_spectrum_near_the_top() -> None:
    reaches = []
    for power in (1, 2, 3, 4, 6):
        for width in (1e-6, 1e-4, 1e-2, 1.0):
            matrix = with_spectrum(1 - width * torch.linspace(0, 1, D, dtype=F64) ** power, seed=power)
            value, reached, _ = lanczos(matrix[None], residual=1e-8)
            reaches.append(reached.item())
            assert not reached or abs(value.item() - 1) <= 1e-6
    assert set(reaches) == {True, False}


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_eigenvalue_and_is_left_as_it_is(threads: int) -> None:
    before = torch.get_num_threads()
    products = [Product(seed * drawn(200 + seed, 300)) for seed in range(1, 6)]
    stack = torch.stack([covariance(65, 130, seed) for seed in range(5)])
    try:
        torch.set_num_threads(threads)
        top, (every,) = largest(products), eigvalsh([stack])
        assert torch.get_num_threads() == threads
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == threads
    finally:
        torch.set_num_threads(before)
    np.testing.assert_allclose(top, [oracle(one.a @ one.a.T) for one in products], rtol=1e-6)
    torch.testing.assert_close(every, torch.linalg.eigvalsh(stack), rtol=1e-12, atol=1e-13)


def test_an_error_in_one_of_several_threads_is_raised_and_their_number_left_as_it_is() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(RuntimeError, match="tensor size"):
            side_by_side(lambda a: a @ torch.ones(2), [torch.ones(2), torch.ones(3)])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_random_state_of_the_program_is_not_touched() -> None:
    before = torch.get_rng_state()
    first, second = largest([HARD["few samples"]]), largest([HARD["few samples"]])
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


def test_matrices_that_belong_to_a_graph_are_taken_as_numbers() -> None:
    matrix = covariance(D, D).requires_grad_()
    assert not eigenvalues([matrix])[0].requires_grad
    assert not largest([matrix]).requires_grad


@pytest.mark.parametrize("squarings", [0, 3])
@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99])
def test_a_krylov_space_reaches_what_it_says_it_has(squarings: int, decay: float) -> None:
    matrix = with_spectrum(decay ** torch.arange(D, dtype=F64))
    value, reached = krylov(matrix[None], residual=1e-8, squarings=squarings)
    assert value.item() == pytest.approx(1, rel=1e-6) or not reached
    assert reached or decay > 0.5 + 0.45 * (squarings > 0)


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("work", [0, 2 * D**3, 2**33])
def test_squaring_follows_a_krylov_space_only_for_much_work(
    work: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices = [HARD[name], HARD["rank one"], HARD["a cluster 1e-4 wide"]]
    tried: list[tuple[int, int]] = []

    def watched(stack: Tensor, *, residual: float, squarings: int) -> tuple[Tensor, Tensor]:
        tried.append((len(stack), squarings))
        return krylov(stack, residual=residual, squarings=squarings)

    monkeypatch.setattr(eigen, "_WORK", work)
    monkeypatch.setattr(eigen, "krylov", watched)
    found = eigen._largest_on_gpu(torch.stack(matrices))
    np.testing.assert_allclose(found, [oracle(m) for m in matrices], rtol=1e-6)
    assert [squarings for _, squarings in tried] == {0: [1, 3], 2 * D**3: [1], 2**33: []}[work]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("d", [96, 512, 1000])
def test_squaring_is_accurate_for_large_matrices_and_their_worst_spectrum(d: int, device: str) -> None:
    rest = {
        "equal": torch.ones(d - 1),
        "flat near the top": 1 - torch.linspace(0, 1, d - 1, dtype=F64) ** 4,
        "worst": torch.full((d - 1,), d ** (-(2.0**-23)), dtype=F64),  # all but one add 1/√d each to tr Aⁿ
    }
    stack = torch.stack([torch.diag(torch.cat([torch.ones(1, dtype=F64), one])) for one in rest.values()])
    found = eigen.largest_by_squaring(stack.to(device)).cpu()
    np.testing.assert_allclose(found, 1, rtol=1e-6)


def test_matrices_are_overwritten_only_where_they_are_owned() -> None:
    matrix = covariance(40, 60)
    before = matrix.clone()
    assert largest([matrix]).item() == pytest.approx(oracle(before), rel=1e-12)
    assert eigenvalues([matrix])[0][0].item() == pytest.approx(oracle(before), rel=1e-12)
    assert torch.equal(matrix, before)
    assert largest([matrix], owned=True).item() == pytest.approx(oracle(before), rel=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("count", "size"), [(1, 40), (2, 40), (9, 40), (20, 65), (3, 300), (40, 16)])
def test_many_matrices_side_by_side_have_their_own_eigenvalues(count: int, size: int, device: str) -> None:
    stack = torch.stack([(i + 1) * covariance(size, 2 * size) for i in range(count)])
    found = eigvalsh([stack.to(device)])[0].cpu()
    torch.testing.assert_close(found, torch.linalg.eigvalsh(stack), rtol=1e-10, atol=1e-12)


MIXED = [20, 20, 33, 40, 65, 65, 65, 130, 130, 200, 200, 300, 400]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [1, 16])
def test_matrices_of_many_sizes_side_by_side_have_their_own_eigenvalues(threads: int, device: str) -> None:
    given = [(i + 1) * covariance(size, 2 * size, i) for i, size in enumerate(MIXED)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found, again = (eigenvalues([m.to(device) for m in given]) for _ in range(2))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for matrix, values, same in zip(given, found, again, strict=True):
        # cuBLAS promises the same bits again only where one stream is used at a time.
        assert torch.allclose(values, same, rtol=0, atol=0.0 if device == "cpu" else 1e-12)
        np.testing.assert_allclose(values.cpu(), torch.linalg.eigvalsh(matrix).flip(0), rtol=0, atol=1e-10)


class Stream:
    """A stream of a GPU that is not there."""

    def wait_stream(self, other: Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that tensors are on a GPU, and that a CPU has 16 threads."""
    monkeypatch.setattr(eigen, "_streams", lambda device: [Stream() for _ in range(1 + eigen._STREAMS)])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)


@pytest.mark.usefixtures("pretended")
def test_a_cpu_takes_small_matrices_of_a_gpu_and_all_come_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def cpu(self: Tensor) -> Tensor:
        copied.append(self.shape[-1])
        return self

    monkeypatch.setattr(Tensor, "cpu", cpu)
    given = [covariance(size, 2 * size, i) for i, size in enumerate(MIXED)]
    sizes = [400, 20, 200, 65, 33, 130, 300, 40]
    stacks = [torch.stack([m for m in given if len(m) == size]) for size in sizes]
    for stack, values in zip(stacks, eigen._eigvalsh_on_gpu(stacks), strict=True):
        torch.testing.assert_close(values, torch.linalg.eigvalsh(stack), rtol=0, atol=1e-12)
    ascending = MIXED[2:]  # the smallest are decomposed together
    assert sorted(copied) == ascending[: eigen.lent_to_cpu(ascending, 16 - eigen._STREAMS)] != []


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("size", [40, 400])
def test_an_error_of_a_cpu_or_a_gpu_is_raised(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(stack: Tensor) -> Tensor:
        if stack.shape[-1] == size:
            raise RuntimeError("did not converge")
        return stack[..., 0]

    monkeypatch.setattr(eigen, "_eigvalsh", fails)
    with pytest.raises(RuntimeError, match="did not converge"):
        eigen._eigvalsh_on_gpu([torch.zeros(3, d, d) for d in (40, 200, 400)])


@pytest.mark.parametrize("cores", [-4, 0, 1, 12, 60])
@pytest.mark.parametrize("sizes", [[], [64], [64] * 74, [512] * 31 + [1536] * 6, [33, 64, 128, 4096], MIXED[2:]])
def test_a_cpu_is_done_before_the_gpu_it_helps(sizes: list[int], cores: int) -> None:
    count = eigen.lent_to_cpu(sizes, cores)
    (gpu, growth), (core, steeper) = eigen._GPU, eigen._CORE
    workers = [0.0] * max(cores, 1)
    for size in sorted(sizes[:count], reverse=True):
        workers[workers.index(min(workers))] += core * (size / 512) ** steeper
    assert max(workers) <= sum(gpu * (size / 512) ** growth for size in sizes[count:])
    assert count == 0 or cores > 0
