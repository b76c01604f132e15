"""The scratch memory that is kept from call to call takes nothing on from the first of them."""

import threading

import pytest
import torch

from gyroscope.vectors import dots


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
