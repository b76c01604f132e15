"""Predictions for networks that are really trained, against what was measured of them."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from predict_runs import made, train
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from gyroscope.diagnosis import dominated, stalled
from gyroscope.diagnosis.predict import Prediction, in_words, predictions
from gyroscope.errors import MonitorError
from gyroscope.store.record import LayerInfo

IMAGE, VECTOR = (2, 8, 8), (24,)


def sgd(**options):
    return lambda params: torch.optim.SGD(params, **{"lr": 0.05, **options})


# Each network with the shape of its input, and which of its layers are scale-invariant.
NETWORKS = {
    "conv, BN": (
        lambda: [
            nn.Conv2d(2, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
        ],
        IMAGE,
        [True, True, False],
    ),
    "conv": (
        lambda: [nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)],
        IMAGE,
        [False, False, False],
    ),
    "conv, ReLU, BN": (
        lambda: [nn.Conv2d(2, 8, 3, bias=False), nn.ReLU(), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10)],
        IMAGE,
        [True, False],
    ),
    "linear, LN": (
        lambda: [nn.Linear(24, 64, bias=False), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10)],
        VECTOR,
        [True, False],
    ),
    "LN, linear": (
        lambda: [nn.LayerNorm(24), nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 10)],
        VECTOR,
        [False, False],
    ),
    "weight norm": (
        lambda: [weight_norm(nn.Linear(24, 64)), nn.ReLU(), weight_norm(nn.Linear(64, 10))],
        VECTOR,
        [True, True],
    ),
    "wide": (
        lambda: [nn.Linear(24, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)],
        VECTOR,
        [False, False, False],
    ),
}  # fmt: skip


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "bfloat16 autocast"])
@pytest.mark.parametrize(("make", "shape", "expected"), NETWORKS.values(), ids=NETWORKS)
def test_scale_invariant_layers_are_found(make, shape, expected, amp):
    torch.manual_seed(0)
    run = train(nn.Sequential(*make()), sgd(momentum=0.9), 20, shape=shape, amp=amp)
    assert [p.scale_invariant for p in predictions(run)] == expected


def test_activations_as_small_as_epsilon_make_a_normalized_layer_not_scale_invariant():
    # BN divides by √(σ² + ε): with σ² far below ε it divides by a constant.
    torch.manual_seed(0)
    first = nn.Conv2d(2, 8, 3, bias=False)
    with torch.no_grad():
        first.weight *= 1e-4
    net = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    run = train(net, sgd(lr=1e-6), 10, shape=IMAGE)
    assert predictions(run)[0].scale_invariant is False


def normalized() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32, bias=False), nn.BatchNorm1d(32, affine=False), nn.ReLU(), nn.Linear(32, 10))


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (sgd(lr=0.1, weight_decay=5e-3), 2500),
        (sgd(lr=0.01, momentum=0.9, weight_decay=5e-3), 2500),
        (lambda params: torch.optim.AdamW(params, lr=2e-3, weight_decay=0.5, betas=(0.9, 0.95)), 2500),
    ],
    ids=["sgd", "momentum", "adamw"],
)
def test_a_normalized_layer_under_weight_decay_turns_at_the_predicted_rate(make, steps):
    run = train(normalized(), make, steps, shape=VECTOR, batch=16)
    predicted = predictions(run)[0]
    settled = round(4 * predicted.half_life)
    assert settled < steps
    rates = run.series("rate")[settled:, 0]
    assert math.sqrt(np.square(rates).mean()) == pytest.approx(predicted.equilibrium_rate, rel=0.1)
    assert run.series("weight_norm")[settled:, 0].mean() == pytest.approx(predicted.equilibrium_norm, rel=0.15)


def test_the_law_follows_a_normalized_layer_without_weight_decay():
    run = train(normalized(), sgd(lr=0.3), 1500, shape=VECTOR, batch=4)
    predicted = predictions(run)[0]
    assert predicted.law_r2 > 0.95
    assert predicted.effective_lr[-1] < 0.1 * predicted.effective_lr[0]
    assert np.median(np.abs(predicted.law / predicted.effective_lr - 1)) < 0.1
    assert np.isnan([predicted.equilibrium_rate, predicted.equilibrium_norm, predicted.half_life]).all()


def walked(optimizer: dict, *, decay: float = 0.0, cosine: float = 0.0, **series: np.ndarray):
    k = np.arange(100.0)[:, None]
    values = {
        "lr": np.full_like(k, 0.1),
        "weight_decay": np.full_like(k, decay),
        "weight_norm": (1 + k / 20) ** 0.25,
        "gradient_norm": np.ones_like(k),
        "invariance": np.full_like(k, cosine),
    }
    return made(values | series, [optimizer], [LayerInfo("w", "linear", (10, 10))])


def unknown(prediction: Prediction) -> list[str]:
    return [name for name, value in vars(prediction).items() if isinstance(value, float) and math.isnan(value)]


EQUILIBRIUM = ["equilibrium_rate", "equilibrium_norm", "half_life"]
ALL = ["law_k0", "law_r2", *EQUILIBRIUM]


@pytest.mark.parametrize(
    ("optimizer", "decay", "missing"),
    [
        ({"class": "SGD"}, 0.0, EQUILIBRIUM),
        ({"class": "SGD", "momentum": 0.9, "nesterov": True}, 1e-3, []),
        ({"class": "SGD_AMom", "momentum": 0.9}, 1e-3, []),
        ({"class": "AdamW", "betas": [0.9, 0.999]}, 1e-3, []),
        ({"class": "Adam", "betas": [0.9, 0.999], "decoupled_weight_decay": True}, 1e-3, []),
        ({"class": "Adam", "betas": [0.9, 0.999]}, 0.0, EQUILIBRIUM),
        ({"class": "Adam", "betas": [0.9, 0.999]}, 1e-3, ALL),  # λw goes through the division by √v
        ({"class": "AdamW", "betas": [0.9, 0.999], "amsgrad": True}, 1e-3, ALL),
        ({"class": "RMSprop", "momentum": 0}, 0.0, EQUILIBRIUM),
        ({"class": "SGD"}, 10.0, EQUILIBRIUM),  # αλ = 1: a step takes all of the weights
        ({"class": "SGD", "differ": ["momentum"]}, 1e-3, ALL),  # whose momentum it is, a run does not say
        ({"class": "SGD", "differ": ["lr", "weight_decay"]}, 1e-3, []),  # which it says layer by layer
        ({"class": "Lion"}, 1e-3, ALL),
        ({"class": "Layca"}, 1e-3, ALL),
        ({}, 1e-3, ALL),
    ],
)
def test_theory_speaks_where_it_knows_the_optimizer(optimizer, decay, missing):
    assert unknown(predictions(walked(optimizer, decay=decay))[0]) == missing


def test_the_learning_rate_of_layca_is_no_effective_learning_rate():
    assert np.isnan(predictions(walked({"class": "Layca"}))[0].effective_lr).all()
    assert np.isnan(predictions(walked({"class": "Layca", "differ": ["momentum"]}))[0].effective_lr).all()
    assert predictions(walked({"class": "Lion"}))[0].effective_lr[0] == pytest.approx(0.1)


def test_a_layer_whose_scale_matters_has_an_effective_learning_rate_and_no_law():
    prediction = predictions(walked({"class": "SGD"}, decay=1e-3, cosine=0.3))[0]
    assert prediction.scale_invariant is False
    assert unknown(prediction) == ALL
    assert np.isfinite(prediction.effective_lr).all()


def test_the_equilibrium_is_that_of_the_last_learning_rate_above_zero():
    lr = np.concatenate([np.full((50, 1), 0.1), np.full((49, 1), 0.01), np.zeros((1, 1))])
    prediction = predictions(walked({"class": "SGD"}, decay=1e-3, lr=lr))[0]
    assert prediction.equilibrium_rate == pytest.approx(math.sqrt(2 * 0.01 * 1e-3))


def test_layers_of_several_optimizers_follow_their_own():
    k = np.zeros((10, 2))
    values = {"lr": k + 0.1, "weight_decay": k + 0.1, "weight_norm": k + 1.0, "invariance": k}
    layers = [LayerInfo("g", "linear", (4, 4), 0), LayerInfo("d", "linear", (4, 4), 1)]
    first, second = predictions(made(values, [{"class": "SGD"}, {"class": "Layca"}], layers))
    assert first.equilibrium_rate == pytest.approx(math.sqrt(0.02))
    assert math.isnan(second.equilibrium_rate)


def test_some_layers_may_be_asked_for():
    k = np.zeros((10, 3))
    run = made(
        {"lr": k + 0.1, "weight_norm": k + 1.0}, [{"class": "SGD"}], [LayerInfo(n, "linear", (4, 4)) for n in "abc"]
    )
    assert [p.layer for p in predictions(run, ["c", "a"])] == ["a", "c"]
    assert [p.layer for p in predictions(run, "b")] == ["b"]
    assert [p.layer for p in predictions(run, iter("ab"))] == ["a", "b"]
    for unknown in (["a", "d"], "abc"):
        with pytest.raises(MonitorError, match="must name layers of the run"):
            predictions(run, unknown)


@pytest.mark.parametrize("act", [predictions, dominated, stalled])
def test_the_path_of_a_run_is_no_run(act):
    with pytest.raises(MonitorError, match=r"`run` must be a run, got str. Try gyroscope\.load"):
        act("runs/first")


def test_a_run_without_gradients_is_predicted_as_far_as_it_goes():
    run = walked({"class": "SGD"})
    del run.quantities["invariance"], run.quantities["gradient_norm"]
    prediction = predictions(run)[0]
    assert prediction.scale_invariant is None
    assert prediction.effective_lr[0] == pytest.approx(0.1)


def test_a_run_without_norms_is_refused():
    run = walked({"class": "SGD"})
    del run.quantities["weight_norm"]
    with pytest.raises(MonitorError, match="no weight norms"):
        predictions(run)


def test_every_kind_of_prediction_has_its_sentence():
    nothing = np.full(3, np.nan)
    known = Prediction("w", True, nothing, math.nan, math.nan, nothing, math.nan, math.nan, math.nan)
    said = {
        "undecided": replace(known, scale_invariant=None),
        "not scale-invariant": replace(known, scale_invariant=False),
        "0.02 rad (1.15°) per step; the half-life of the approach is 300 steps": replace(
            known, equilibrium_rate=0.02, half_life=300.0
        ),
        "at a norm of 2.5": replace(known, equilibrium_rate=0.02, half_life=300.0, equilibrium_norm=2.5),
        "does not decay": replace(known, law_k0=math.inf),
        "to a half after 60 steps (R² 0.99)": replace(known, law_k0=20.0, law_r2=0.99, kind="sgd"),
        "to a half after 60 steps": replace(known, law_k0=20.0, law_r2=0.99, kind="adamw"),
        "no theory": known,
    }
    for words, prediction in said.items():
        assert words in in_words(prediction)


def test_the_module_itself_imports_numpy_alone():
    names = [
        "gyroscope.diagnosis.scale_invariance",
        "gyroscope.theory.effective_rate",
        "gyroscope.theory.domains",
        "gyroscope.theory.effective_rate",
        "gyroscope.theory.equilibrium",
        "gyroscope.diagnosis.predict",
    ]
    code = (
        "import sys, importlib\n"
        "import gyroscope.errors, gyroscope.store.record\n"
        f"names = {names!r}\n"
        "sys.modules.update({n: None for n in ('torch', 'matplotlib', 'scipy', 'pandas')})\n"
        "[sys.modules.pop(n, None) for n in names]\n"
        "[importlib.import_module(n) for n in names]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
