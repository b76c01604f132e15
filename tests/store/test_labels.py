import numpy as np
import pytest

from gyroscope.store import QuantityInfo
from gyroscope.store.labels import Look, limits, look_of, settle


@pytest.mark.parametrize(
    ("largest", "end"), [(0.2, 1.0), (1.0, 1.0), (1.004, 1.0), (1.01, 1.1), (1.45, 1.5), (1.99, 2.0), (2.0, 2.0)]
)
def test_rotation_goes_to_one_and_further_only_if_a_layer_does(largest, end):
    assert limits(look_of("rotation"), [0.0, largest]) == (0.0, pytest.approx(end))


def test_norms_are_logarithmic_unless_they_hardly_vary():
    assert settle(look_of("weight_norm"), [1.0, 10.0]).scale == "log"
    assert settle(look_of("weight_norm"), [1.0, 2.0]).scale == "linear"
    assert settle(look_of("weight_norm"), [0.0, np.nan]).scale == "linear"


def test_one_tiny_value_does_not_flatten_a_logarithmic_axis():
    assert limits(look_of("gradient_norm"), [1e-30, 1.0]) == (1e-8, 1.0)
    assert limits(look_of("gradient_norm"), [0.0, 2.0]) == (1.0, 4.0)


def test_quantities_of_ones_own_have_their_name_unit_and_a_scale_that_fits():
    look = look_of("edge_of_chaos", QuantityInfo("edge_of_chaos", "rad", "…"))
    assert look == Look("edge of chaos (rad)")
    assert settle(look, [1e-3, 1.0]).scale == "log"
    assert settle(look, [0.5, 1.0]).scale == "linear"
    assert settle(look, [-1.0, 1e3]).scale == "linear"


@pytest.mark.parametrize(("largest", "end"), [(0.0, 1), (0.004, 0.005), (0.3, 0.5), (0.51, 1), (1.23, 1.3)])
def test_close_to_small_fractions_the_axis_ends_at_a_round_number(largest, end):
    assert limits(look_of("rotation"), [0.0, largest], close=True) == (0, end)


def test_what_has_a_sign_is_symmetric():
    assert limits(look_of("alignment"), [0.0, 0.3]) == (-1, 1)


def test_condition_numbers_are_labeled_by_their_share_and_matrix():
    look = look_of("kappa_g_p12.5")
    assert (look.label, look.scale, look.noisy) == ("κ12.5(Σ∇h)", "log", True)
    assert look.drawn == r"$\kappa_{12.5\%}(\Sigma_{\nabla h})$"


def test_a_label_is_plain_text_and_what_is_drawn_is_the_same_or_a_formula():
    assert (look_of("$x$").label, look_of("$x$").drawn) == ("$x$", r"\$x\$")
    assert (look_of("domination").label, look_of("weight_norm").drawn) == ("σmax(∂L/∂W) / σmax(W)", "weight norm ‖w‖")
