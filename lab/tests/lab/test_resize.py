import numpy as np
import pytest
import torch
from PIL import Image

from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.conditioning.exact_spectra import center_crop, resize


@pytest.mark.parametrize(("before", "after"), [(20, 12), (24, 12), (28, 12), (8, 12), (12, 12), (7, 3)])
def test_resizing_is_pillows_bilinear(before, after):
    images = torch.rand(3, 1, before, before, generator=torch.Generator().manual_seed(before))
    for given, made in zip(images, resize(images, after), strict=True):
        pillows = Image.fromarray(given[0].numpy()).resize((after, after), Image.Resampling.BILINEAR)
        np.testing.assert_allclose(made[0].numpy(), np.asarray(pillows), atol=1e-6)


def test_resizing_to_the_same_size_changes_nothing_and_keeps_constants():
    images = torch.rand(2, 1, 12, 12)
    assert torch.equal(resize(images, 12), images)
    assert torch.allclose(resize(torch.full((1, 1, 20, 20), 0.3), 12), torch.tensor(0.3))


@pytest.mark.parametrize(
    ("size", "side", "first"), [((28, 28), 20, (4, 4)), ((28, 28), 24, (2, 2)), ((5, 8), 4, (0, 2))]
)
def test_the_middle_is_kept(size, side, first):
    images = torch.arange(2 * size[0] * size[1]).reshape(2, 1, *size)
    kept = center_crop(images, side)
    assert kept.shape == (2, 1, side, side)
    assert kept[1, 0, 0, 0] == images[1, 0, first[0], first[1]]
    assert kept[1, 0, -1, -1] == images[1, 0, first[0] + side - 1, first[1] + side - 1]


@pytest.mark.parametrize("side", [0, -1, 29])
def test_a_side_that_cannot_be_had_is_refused(side):
    with pytest.raises(LabError, match=f"`side` must be from 1 to 28 for images of 28×28, got {side}"):
        center_crop(torch.zeros(1, 1, 28, 28), side)


def test_no_pixels_at_all_are_refused():
    with pytest.raises(LabError, match="`side` must be a whole number ≥ 1, got 0"):
        resize(torch.zeros(1, 1, 28, 28), 0)
