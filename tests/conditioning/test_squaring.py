"""λmax by squaring, against spectra that are known."""

import pytest
import torch

from conditioning.devices import DEVICES
from gyroscope.conditioning import largest_by_squaring

SPECTRA = {
    "a ramp": torch.linspace(0, 1, 96),
    "equal eigenvalues": torch.ones(96),
    "rank one": torch.eye(96)[0],
    "a cluster that squaring hardly tells apart": 1 - torch.arange(96) * 2.4e-7,
    "a cluster it tells apart": 1 - torch.arange(96) * 1e-5,
    "falling by halves": 0.5 ** torch.arange(96),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SPECTRA)
def test_squaring_finds_the_largest_eigenvalue_to_one_in_a_million(name, device):
    values = SPECTRA[name].double()
    q = torch.linalg.qr(torch.randn(96, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    found = largest_by_squaring(((q * values) @ q.T)[None].to(device))
    assert found.item() == pytest.approx(values.max().item(), rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_matrices_of_a_stack_do_not_disturb_each_other(device):
    stack = torch.stack([torch.zeros(3, 3), torch.diag(torch.tensor([3.0, 1.0, 2.0])), 1e-3 * torch.ones(3, 3)])
    found = largest_by_squaring(stack.double().to(device)).cpu()
    torch.testing.assert_close(found, torch.tensor([0.0, 3.0, 3e-3], dtype=torch.float64))
