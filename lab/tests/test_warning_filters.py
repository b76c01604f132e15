"""Warnings of our own code are errors, and warnings raised inside torch, Triton or NumPy are not."""

import warnings

import pytest

from gyroscope_lab.engine.captured import _compiling


def warn(module, message="this is going away"):
    warnings.warn_explicit(message, DeprecationWarning, "file.py", 1, module=module, registry={})


@pytest.mark.parametrize("module", ["torch", "torch._inductor.graph", "triton.runtime", "numpy.lib"])
def test_a_warning_inside_another_library_is_no_error(module):
    with warnings.catch_warnings(record=True):
        warn(module)


@pytest.mark.parametrize("module", ["gyroscope_lab.training.training", "gyroscope", "torchlike"])
def test_a_warning_of_ours_is_an_error(module):
    with pytest.raises(DeprecationWarning):
        warn(module)


def test_a_warning_about_tf32_is_no_error_wherever_torch_places_it():
    with warnings.catch_warnings(record=True):
        warn("gyroscope_lab.training.training", "Please use the new API settings to control TF32 behavior")


def test_a_warning_while_a_network_is_compiled_ends_no_trial():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("error")
        with _compiling():
            warn("gyroscope_lab.training.training")
        with pytest.raises(DeprecationWarning):
            warn("gyroscope_lab.training.training")
    assert len(seen) <= 1
