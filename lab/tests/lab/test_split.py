import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch

from gyroscope_lab.data import Split, split
from gyroscope_lab.data.official import histogram, moments
from gyroscope_lab.errors import LabError


def pixels(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def made(mean=None, std=None, held_out=False):
    x, y = pixels(6, 3, 4, 5), torch.arange(6)
    x_val, y_val = (pixels(2, 3, 4, 5, seed=1), torch.arange(2)) if held_out else (None, None)
    return Split(x, y, x[:2], y[:2], x_val, y_val, mean, std, classes=6)


def test_the_inputs_are_less_the_mean_by_the_standard_deviation_pixel_by_pixel():
    whole = made(torch.tensor(120.7), torch.tensor(64.2))
    given = whole.inputs(whole.x_train[2:4])
    assert given.dtype == torch.float32
    for place in np.ndindex(2, 3, 4, 5):
        pixel = np.float32(int(whole.x_train[2:4][place]))
        assert given[place].item() == (pixel - np.float32(120.7)) / np.float32(64.2)


def test_each_channel_has_a_mean_of_its_own():
    mean, std = torch.tensor([125.3, 123.0, 113.9]), torch.tensor([63.0, 62.1, 66.7])
    whole = made(mean, std)
    given = whole.inputs(whole.x_test)
    for channel in range(3):
        alone = Split(*[whole.x_train] * 4, mean=mean[channel], std=std[channel])
        assert torch.equal(given[:, channel], alone.inputs(whole.x_test[:, channel]))


def test_without_a_mean_the_inputs_are_what_they_were():
    whole = made()
    assert whole.inputs(whole.x_train) is whole.x_train


@pytest.mark.parametrize("mean", [torch.tensor(7.0), torch.tensor([7.0, 8.0, 9.0])], ids=["scalar", "channel"])
def test_the_inputs_are_float32_whatever_the_default_type(mean):
    whole = made(mean, mean)
    expected = whole.inputs(whole.x_train)
    torch.set_default_dtype(torch.float64)
    try:
        assert whole.inputs(whole.x_train).dtype == torch.float32
        assert torch.equal(whole.inputs(whole.x_train), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mean", [torch.tensor(7.0), torch.tensor([7.0, 8.0, 9.0])], ids=["scalar", "channel"])
def test_the_inputs_depend_on_no_value_so_that_a_graph_can_hold_them(mean):
    """Tensors without values (meta) pass through: reading or waiting for a value would raise an error."""
    whole = made(mean, mean).to("meta")
    assert whole.inputs(whole.x_train).shape == (6, 3, 4, 5)


def test_every_tensor_is_moved():
    moved = made(torch.tensor(1.0), torch.tensor(2.0), held_out=True).to("meta")
    devices = {f.name: str(getattr(moved, f.name).device) for f in fields(Split) if f.name != "classes"}
    assert devices == dict.fromkeys(devices, "meta")
    assert len(devices) == 8
    assert moved.classes == 6


def test_what_is_there_already_is_not_copied():
    whole = made(torch.tensor(1.0), torch.tensor(2.0), held_out=True)
    moved = whole.to("cpu")
    for field in fields(Split):
        assert getattr(moved, field.name) is getattr(whole, field.name)


def test_inputs_that_do_not_fit_stay_and_all_else_is_moved(monkeypatch):
    whole = made(torch.tensor(1.0), torch.tensor(2.0), held_out=True)
    asked = []

    def small_ones_fit(size, device):
        asked.append((size, str(device)))
        return size < whole.x_train.nbytes

    monkeypatch.setattr(split, "fits", small_ones_fit)
    moved = whole.to("meta")
    assert moved.x_train is whole.x_train
    assert {str(x.device) for x in (moved.y_train, moved.x_test, moved.y_test, moved.x_val, moved.mean)} == {"meta"}
    assert asked == [(360, "meta"), (120, "meta"), (120, "meta")]


def test_half_of_the_free_memory_is_left():
    free = split.free_memory("cpu")
    assert free is None or split.fits(free // 3, "cpu")
    assert free is None or not split.fits(free * 2 // 3, "cpu")


@pytest.mark.parametrize(("limit", "free"), [("max", 3072), ("1000", 1000), ("9999", 3072), (None, 3072)])
def test_the_free_memory_is_what_the_system_and_the_container_allow(tmp_path, monkeypatch, limit, free):
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemFree:   1 kB\nMemAvailable:   3 kB\n")
    if limit:
        (tmp_path / "max").write_text(f"{limit}\n")
    monkeypatch.setattr(split, "_AVAILABLE", tmp_path / "meminfo")
    monkeypatch.setattr(split, "_LIMIT", tmp_path / "max")
    assert split.free_memory("cpu") == free
    assert split.fits(free // 2, "cpu")
    assert not split.fits(free // 2 + 1, "cpu")


def test_where_the_free_memory_cannot_be_told_all_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(split, "_AVAILABLE", tmp_path / "none")
    assert split.free_memory("cpu") is None
    assert split.fits(2**60, "cpu")


def test_a_split_survives_a_pickle():
    whole = made(torch.tensor(1.0), torch.tensor(2.0), held_out=True)
    again = pickle.loads(pickle.dumps(whole))
    for field in fields(Split):
        assert torch.equal(torch.as_tensor(getattr(again, field.name)), torch.as_tensor(getattr(whole, field.name)))


def test_the_moments_are_those_of_numpy_in_float64():
    x = pixels(5000, 3, 4, 5)  # more than are counted at a time
    counts = histogram(x)
    mean, std = moments(counts.sum(0))
    assert mean.item() == np.float32(x.numpy().mean(dtype=np.float64))
    assert std.item() == np.float32(x.numpy().std(dtype=np.float64))
    mean, std = moments(counts)
    np.testing.assert_array_equal(mean, x.numpy().mean((0, 2, 3), dtype=np.float64).astype(np.float32))
    np.testing.assert_array_equal(std, x.numpy().std((0, 2, 3), dtype=np.float64).astype(np.float32))


def test_the_moments_of_a_hundred_thousand_million_pixels_are_exact():
    """Doubling all counts changes nothing, although float64 sums no longer resolve one pixel."""
    counts = torch.zeros(256, dtype=torch.int64)
    counts[254], counts[255] = 10**17, 1
    mean, std = moments(counts)
    assert mean.item() == 254
    assert std.item() == pytest.approx((10**17) ** -0.5)


def test_pixels_that_are_all_equal_cannot_be_normalized():
    with pytest.raises(LabError, match="All pixels to train on are equal"):
        moments(histogram(torch.full((2, 1, 3, 3), 9, dtype=torch.uint8)))
