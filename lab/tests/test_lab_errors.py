"""The laboratory's exceptions; each also derives from the built-in that a user would catch."""

import pickle

import pytest

from gyroscope.errors import GyroscopeError
from gyroscope_lab import models
from gyroscope_lab.data.digits import digits
from gyroscope_lab.engine.run_one import in_trial
from gyroscope_lab.errors import LabError, TrialError
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.tasks import task
from gyroscope_lab.training.trial import Trial, from_description


def test_a_lab_error_is_a_value_error_and_a_trial_error_a_runtime_error_too():
    assert issubclass(LabError, GyroscopeError)
    assert issubclass(LabError, ValueError)
    assert not issubclass(LabError, RuntimeError)
    assert issubclass(TrialError, LabError)
    assert issubclass(TrialError, RuntimeError)


def test_an_unknown_name_is_a_value_error():
    with pytest.raises(ValueError, match="The model must be one of"):
        models.make("digit-cnn", seed=0)
    with pytest.raises(LabError, match="`per_class` must be from 1 to 173 for the digits, got 0"):
        digits(per_class=0)


def test_a_failed_trial_is_a_runtime_error_and_survives_the_way_from_another_process():
    error = in_trial(Trial(task("digits"), Recipe("SGD", 0.1)), KeyError("x"))
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, RuntimeError)
    assert str(again) == "SGD, seed 0: KeyError: 'x'"


def test_a_described_trial_that_cannot_be_says_why_in_the_words_of_the_trial():
    description = Trial(task("digits"), Recipe("SGD", 0.1)).description | {"keeps": "yes"}
    with pytest.raises(LabError, match="`keeps` must be True or False, got 'yes'"):
        from_description(description)
