"""Where page-locked memory is refused, copies are waited for, and nothing is lost."""

import pytest
import torch

from gyroscope.base import transfer
from gyroscope.base.transfer import pinned, to_host


class Far(torch.Tensor):
    """A tensor of a device whose copies to page-locked memory fail."""

    def to(self, device, non_blocking=False):
        if non_blocking:
            raise RuntimeError("CUDA error: invalid argument\nmore of it")
        return self.as_subclass(torch.Tensor).clone()


@pytest.fixture
def refused(monkeypatch):
    def refuse(self):
        raise RuntimeError("CUDA error: invalid argument\nmore of it")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    transfer._say.cache_clear()
    yield
    transfer._say.cache_clear()


def test_values_stay_where_they_are_if_no_memory_can_be_pinned(refused):
    values = torch.arange(3)
    with pytest.warns(UserWarning, match=r"Page-locked memory is not available \(CUDA error: invalid argument\)\."):
        assert pinned(values) is values


def test_values_arrive_by_a_copy_that_is_waited_for(refused):
    values = torch.arange(3.0)
    with pytest.warns(UserWarning, match="Page-locked"):
        assert torch.equal(to_host(values.as_subclass(Far)), values)


def test_it_is_said_once(refused):
    with pytest.warns(UserWarning, match="Page-locked"):
        pinned(torch.ones(1))
    to_host(torch.ones(1).as_subclass(Far))  # another warning would be an error


def test_a_device_that_fails_altogether_is_told_of():
    class Gone(torch.Tensor):
        def to(self, device, non_blocking=False):
            raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        to_host(torch.ones(1).as_subclass(Gone))
