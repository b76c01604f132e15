import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    # On a busy machine two threads that wait for each other make a small network many times slower.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
