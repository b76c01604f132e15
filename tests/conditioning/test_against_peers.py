"""Conditioning compared with curvlinops and nngeometry (optional: needs curvlinops-for-pytorch and nngeometry).

Their factors come the way that benchmarks/conditioning_peers.py gets them, which says how the scales differ.
"""

import importlib.util
import math
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gyroscope
from gyroscope.conditioning.curvature import top_eigenvalue
from gyroscope.conditioning.fisher import fisher

_PATH = Path(__file__).parents[2] / "benchmarks" / "conditioning_peers.py"
_SPEC = importlib.util.spec_from_file_location("conditioning_peers", _PATH)
conditioning_peers = sys.modules["conditioning_peers"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(conditioning_peers)


def imported(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their own, when they are compiled and imported for the first time
        return pytest.importorskip(name)


@pytest.fixture(params=["curvlinops", "nngeometry"])
def peer(request):
    imported(request.param)
    return conditioning_peers.PEERS[request.param]


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.up, self.head = nn.Embedding(11, 8), nn.Linear(8, 12), nn.Linear(12, 11, bias=False)

    def forward(self, x):
        return self.head(torch.tanh(self.up(self.embedding(x)))).transpose(1, 2)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 1)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x):
        first = self.first(x).relu()
        return self.head((first + self.norm(self.inner(first))).relu().mean((2, 3)))


def perceptron():
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(),
        nn.Conv2d(5, 6, (2, 3), stride=2, padding=(0, 1), dilation=(1, 2), bias=False), nn.ReLU(),
        nn.Flatten(), nn.Linear(6 * 4 * 4, 4),
    )  # fmt: skip


def images(count, channels, side):
    return lambda: torch.randn(count, channels, side, side, dtype=torch.float64)


NETWORKS = {
    "perceptron": (perceptron, lambda: torch.randn(32, 6, dtype=torch.float64), (32,), 4),
    "fewer samples than dimensions": (perceptron, lambda: torch.randn(3, 6, dtype=torch.float64), (3,), 4),
    "convolutions": (convolutional, images(7, 3, 9), (7,), 4),
    "batch statistics and a shortcut": (Residual, images(6, 2, 5), (6,), 3),
    "sequences": (Sequences, lambda: torch.randint(11, (4, 5)), (4, 5), 11),
}


def made(name):
    torch.manual_seed(0)
    make, inputs, labels, classes = NETWORKS[name]
    return make().double(), inputs(), torch.randint(classes, labels)


def skip_where_it_has_no_factors(peer, name):
    if name == "sequences" and peer.distribution == "nngeometry":
        pytest.skip("nngeometry differentiates with respect to the batch, which tokens do not allow")


@pytest.mark.parametrize("name", NETWORKS)
def test_spectra_of_patches_are_those_of_the_other_library_in_one_scale(peer, name):
    skip_where_it_has_no_factors(peer, name)
    model, x, y = made(name)
    ours = gyroscope.condition(model, cross_entropy, (x, y), patches=True, spectra=True)
    rows = {row["layer"].removesuffix(".weight"): row["samples"] for row in ours.rows()}
    theirs = peer.as_ours(model, x, y, rows)
    assert {f"{layer}.weight" for layer in theirs} == {r["layer"] for r in ours.rows() if r["kind"] != "embedding"}
    for layer, (values_x, values_g) in theirs.items():
        found = ours.spectra[f"{layer}.weight"]
        for spectrum, values in ((found.x, values_x), (found.g, values_g)):
            np.testing.assert_allclose(spectrum.full(), values.numpy(), rtol=0, atol=1e-13 * float(values.max()))


@pytest.mark.parametrize("name", ["perceptron", "convolutions"])
def test_largest_eigenvalues_and_condition_numbers_follow_from_the_others_factors(name):
    imported("curvlinops")
    model, x, y = made(name)
    p = (0.25, 0.5)
    ours = gyroscope.condition(model, cross_entropy, (x, y), patches=True, p=p)
    alone = gyroscope.condition(model, cross_entropy, (x, y), patches=True, p=())
    factors = conditioning_peers.curvlinops_factors(model, x, y)
    for row, fast in zip(ours.rows(), alone.rows(), strict=True):
        a, g = (torch.linalg.eigvalsh(m).flip(0).numpy() for m in factors[row["layer"].removesuffix(".weight")])
        f = np.sort(np.multiply.outer(a, g), axis=None)[::-1]
        positions = row["samples"] / len(x)
        for key, values, scale in (("x", a, 1), ("g", g, positions), ("f", f, positions)):
            assert row[f"lambda_{key}"] == pytest.approx(scale * values[0], rel=1e-12)
            assert fast[f"lambda_{key}"] == pytest.approx(scale * values[0], rel=1e-10)
            for share in p:
                at = values[math.ceil(share * len(values)) - 1]
                expected = values[0] / at if at > 1e-13 * values[0] else math.inf
                assert row[f"kappa_{key}"][share] == pytest.approx(expected, rel=1e-9)


def operator(of, model, x, y, parameters):
    options = {"check_deterministic": False}
    return getattr(imported("curvlinops"), of)(model, nn.CrossEntropyLoss(), parameters, [(x, y)], **options)


def dense(operator):
    return operator @ torch.eye(operator.shape[1], dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # curvlinops uses what torch is to drop
@pytest.mark.parametrize(("labels", "of"), [("model", "GGNLinearOperator"), ("true", "EFLinearOperator")])
@pytest.mark.parametrize("name", ["perceptron", "convolutions"])
def test_exact_matrices_are_those_of_curvlinops(name, labels, of):
    imported("curvlinops")
    model, x, y = made(name)
    ours = fisher(model, cross_entropy, (x, y), labels=labels)
    weights = dict(model.named_parameters())
    theirs = dense(operator(of, model, x, y, [weights[name] for name in ours.parameters]))
    torch.testing.assert_close(ours.matrix, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    ("matrix", "of"),
    [
        ("fisher", "GGNLinearOperator"),
        ("gauss_newton", "GGNLinearOperator"),
        ("second_moment", "EFLinearOperator"),
        ("hessian", "HessianLinearOperator"),
    ],
)
def test_top_eigenvalues_are_those_of_curvlinops(matrix, of):
    imported("curvlinops")
    model, x, y = made("convolutions")
    expected = torch.linalg.eigvalsh(dense(operator(of, model, x, y, list(model.parameters()))))[-1]
    found = top_eigenvalue(model, cross_entropy, (x, y), matrix=matrix, tolerance=1e-10)
    assert found == pytest.approx(float(expected), rel=1e-8)
