"""The exceptions: one hierarchy under GyroscopeError, each also the built-in that a user would catch."""

import inspect
import pickle

import pytest
import torch
from torch import nn

import gyroscope
from gyroscope import errors
from gyroscope.conditioning.fisher import fisher
from gyroscope.passes.network import independent
from gyroscope.store.lock import HeldError
from gyroscope.theory.per_sample import passing

BUILT_IN = {
    errors.LayerError: ValueError,
    errors.VectorError: ValueError,
    errors.ControlError: ValueError,
    errors.MonitorError: ValueError,
    errors.StoreError: RuntimeError,
    errors.PageError: RuntimeError,
    errors.FigureError: ValueError,
    errors.MissingExtraError: ImportError,
    errors.ConditioningError: ValueError,
    errors.DynamicsError: ValueError,
}


def test_every_error_has_a_built_in():
    public = {one for _, one in inspect.getmembers(errors, inspect.isclass)}
    assert public - {errors.GyroscopeError} == set(BUILT_IN)


@pytest.mark.parametrize(("error", "built_in"), [*BUILT_IN.items(), (HeldError, RuntimeError)])
def test_an_error_is_one_of_ours_and_one_built_in(error, built_in):
    assert issubclass(error, errors.GyroscopeError)
    common = (ValueError, TypeError, RuntimeError, ImportError, OSError, LookupError)
    assert [one for one in common if issubclass(error, one)] == [built_in]
    again = pickle.loads(pickle.dumps(error("why")))
    assert (type(again), str(again)) == (error, "why")


def test_a_bad_argument_is_a_value_error():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="alpha"):
        gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.1), model, alpha=float("nan"))


def test_a_run_that_is_not_there_is_a_runtime_error(tmp_path):
    with pytest.raises(RuntimeError, match="nowhere"):
        gyroscope.load(tmp_path / "nowhere")


def test_our_own_error_inside_a_pass_of_the_theory_is_not_reported_as_a_failed_pass():
    with pytest.raises(errors.LayerError, match=r"^as it was$"), passing():
        raise errors.LayerError("as it was")
    with pytest.raises(errors.DynamicsError, match="A pass through the model"), passing():
        raise ValueError("of the model")


class _Network:
    """A network that fails away from its parameters."""

    def __init__(self, error):
        self.model, self.theta, self.error = nn.Linear(3, 2), {"weight": torch.ones(2, 3)}, error

    def __call__(self, theta):
        raise self.error


def test_our_own_error_inside_a_network_does_not_make_its_samples_depend_on_each_other():
    output = torch.zeros(4, 2)
    assert not independent(_Network(ValueError("of the model")), output)
    with pytest.raises(errors.LayerError, match="as it was"):
        independent(_Network(errors.LayerError("as it was")), output)


def test_our_own_error_inside_a_network_is_not_taken_for_an_operation_that_vmap_does_not_know(monkeypatch):
    def pulled(some, rows):
        raise errors.LayerError("as it was")

    monkeypatch.setattr("gyroscope.conditioning.fisher._puller", lambda f, n: pulled)
    batch = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    with pytest.raises(errors.GyroscopeError, match="as it was"):
        fisher(nn.Linear(3, 2), nn.CrossEntropyLoss(), batch)
