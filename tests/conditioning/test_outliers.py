"""Outliers of the curvature from uncentered activations are exact where the hypothesis' assumptions hold."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from gyroscope.conditioning.outliers import outlier, outliers, predicted_outliers
from gyroscope.errors import DynamicsError


def unit_design(m):
    """Activations m ± √d e_i: of mean m and covariance I, exactly."""
    d = len(m)
    steps = d**0.5 * torch.eye(d, dtype=torch.float64)
    return torch.cat([m + steps, m - steps])


def linear_net(m, *, bias, seed=0):
    """A layer, and a fixed map behind it: for a squared error S = (2/3) BᵀB whatever the input."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(len(m), 3, bias), nn.Linear(3, 3)).double()
    with torch.no_grad():
        net[1].weight.copy_(torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0])
        net[1].weight.mul_(torch.tensor([[3.0], [2.0], [1.0]], dtype=torch.float64))
    return net


@pytest.mark.parametrize("bias", [True, False])
def test_prediction_is_exact_for_unit_covariance_independent_of_the_gradients(bias):
    m = torch.tensor([2.0, -1.0, 3.0, 0.5], dtype=torch.float64)
    net = linear_net(m, bias=bias)
    x = unit_design(m)
    found = outliers(net, F.mse_loss, (x, torch.zeros(len(x), 3, dtype=torch.float64)), "0")
    B = net[1].weight.detach()
    nu = 1 + 4 + 1 + 9 + 0.25
    assert found.nu == pytest.approx(nu, rel=1e-12)
    torch.testing.assert_close(found.predicted, nu * 2 / 3 * torch.linalg.eigvalsh(B.T @ B).flip(0))
    torch.testing.assert_close(found.measured, found.predicted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.cosines, torch.ones(3, dtype=torch.float64))
    # The rest of the spectrum: A is the identity on what is orthogonal to m.
    rest = (2 / 3 * torch.linalg.eigvalsh(B.T @ B).flip(0)).repeat_interleave(3)
    torch.testing.assert_close(found.spectrum[3:], rest, rtol=1e-9, atol=1e-12)


def test_the_example_of_means_of_a_tenth():
    # "suppose Σ = I and m is a vector all of whose entries are 0.1": the outlier grows with the dimension.
    assert outlier(torch.full((400,), 0.1, dtype=torch.float64)).item() == pytest.approx(5.0)


def test_predicted_vectors_are_m_kron_v_in_the_order_of_the_columns_of_the_weight():
    m = torch.tensor([1.0, 2.0], dtype=torch.float64)
    S = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    values, vectors = predicted_outliers(m, S)
    G = torch.kron(torch.eye(2, dtype=torch.float64) + torch.outer(m, m), S)
    for value, vector in zip(values, vectors, strict=True):
        vec = vector.T.reshape(-1)
        torch.testing.assert_close(vec.norm(), torch.ones((), dtype=torch.float64))
        torch.testing.assert_close(G @ vec, value * vec)


def test_centering_the_activations_takes_the_outliers_away():
    m = torch.tensor([4.0, -3.0, 5.0], dtype=torch.float64)
    net, x = linear_net(m, bias=True), unit_design(m)
    y = torch.zeros(len(x), 3, dtype=torch.float64)
    uncentered, centered = (outliers(net, F.mse_loss, (given, y), "0") for given in (x, x - m + 1e-3))
    assert uncentered.measured[0] / centered.measured[0] == pytest.approx(uncentered.nu / centered.nu, rel=1e-9)
    assert centered.nu < 1 + 1e-5


def test_outliers_of_a_hidden_relu_layer_with_a_large_mean_are_nearly_those_predicted():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 4))
    with torch.no_grad():
        net[0].bias.add_(3.0)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x, y = torch.randn(64, 6), torch.randint(4, (64,))
    found = outliers(net, F.cross_entropy, [(x[:32], y[:32]), (x[32:], y[32:])], "2", count=3)
    assert len(found.rows()) == 3
    assert found.within.min() > 0.99
    torch.testing.assert_close(found.measured, found.predicted, rtol=0.1, atol=0)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())


def test_what_cannot_be_analysed_is_refused_by_name():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    batch = (torch.ones(4, 2), torch.zeros(4, 2))
    with pytest.raises(DynamicsError, match=r"must be the name of a linear layer, got '1'. The model's are '0'"):
        outliers(net, F.mse_loss, batch, "1")
    with pytest.raises(DynamicsError, match="above the limit of 5"):
        outliers(net, F.mse_loss, batch, "0", limit=5)
    with pytest.raises(DynamicsError, match=r"`count` must be a whole number from 1 to 2, .* got 3"):
        outliers(net, F.mse_loss, batch, "0", count=3)
    with pytest.raises(DynamicsError, match="applied once"):
        outliers(net, F.mse_loss, (torch.ones(4, 3, 2), torch.zeros(4, 3, 2)), "0")


class ByName(nn.Module):
    """Calls its layer with a keyword argument."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(input=x)


def test_a_layer_that_is_called_by_keyword_is_seen():
    model, batch = ByName(), (torch.randn(6, 3), torch.arange(6) % 2)
    assert (
        outliers(model, F.cross_entropy, batch, "linear").nu
        == outliers(nn.Sequential(model.linear), F.cross_entropy, batch, "0").nu
    )


def test_outliers_are_the_same_within_inference_mode():
    model, batch = nn.Sequential(nn.Linear(3, 2)), (torch.randn(6, 3), torch.arange(6) % 2)
    expected = outliers(model, F.cross_entropy, batch, "0").measured
    with torch.inference_mode():
        assert torch.equal(outliers(model, F.cross_entropy, batch, "0").measured, expected)


def hooked():
    model = nn.Sequential(nn.Linear(3, 2))
    model.computed = model[0].weight * 2  # has a graph, and cannot be copied
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(2)), "has no values yet"),
        (lambda: nn.Sequential(nn.Linear(4, 2)), "The forward pass in float64 failed with RuntimeError"),
        (hooked, "The model cannot be copied"),
    ],
)
def test_models_that_cannot_be_run_or_copied_are_refused_in_words(make, says):
    with pytest.raises(DynamicsError, match=says):
        outliers(make(), F.cross_entropy, (torch.randn(6, 3), torch.arange(6) % 2), "0")
