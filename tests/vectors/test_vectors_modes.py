"""The scratch memory that is kept from call to call takes nothing on from the first of them."""

import threading

import pytest
import torch

import gyroscope
from gyroscope.vectors import combine_, dots

pytestmark = pytest.mark.usefixtures("cpu_backend")


def in_a_new_thread(work):
    """Scratch memory is kept by thread, so a new one has none."""
    caught = []

    def run():
        try:
            work()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if caught:
        raise caught[0]


@pytest.mark.parametrize("first", [torch.inference_mode, lambda: torch.device("meta"), torch.no_grad])
def test_a_first_call_in_another_mode_leaves_the_next_as_it_is(first):
    def work():
        x = [torch.tensor([3.0, 4.0], device="cpu")]
        with first():
            dots({"xx": (x, x)})
        got = dots({"xx": (x, x)})
        assert got.device.type == "cpu"
        assert got.tolist() == [[25.0]]

    in_a_new_thread(work)


@pytest.mark.parametrize("size", [4, 300])
@pytest.mark.parametrize("a", [1.0, 1e-3])
def test_another_default_device_does_not_move_the_coefficients(size, a):
    x, y = [torch.ones(size, size)], [torch.ones(size, size)]
    a, b = torch.tensor([a]), torch.tensor([2.0])
    expected = a + b
    with torch.device("meta"):
        combine_(x, y, a, b)
    torch.testing.assert_close(x[0], expected.expand(size, size))


@pytest.mark.parametrize("size", [4, 300])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, gyroscope.SGD_AMom])
@pytest.mark.parametrize("grafted", [False, True])
def test_another_default_device_does_not_change_a_controlled_step(size, cls, grafted):
    def turned(device):
        torch.manual_seed(0)
        w = torch.nn.Parameter(torch.randn(size, size, device="cpu"))
        grads = torch.randn(3, size, size, device="cpu")
        with torch.device(device):
            inner = cls([w], lr=0.1)
            optimizer = gyroscope.Graft(inner, torch.optim.SGD([w])) if grafted else gyroscope.Layca(inner)
        for g, where in zip(grads, ("cpu", device, device), strict=True):  # in the first, Adam makes its own state
            with torch.device(where):
                w.grad = g
                optimizer.step()
        return w.detach()

    assert torch.equal(turned("meta"), turned("cpu"))
