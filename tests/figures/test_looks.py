import numpy as np
import pytest

from gyroscope.figures.drawing import own_axes
from gyroscope.figures.log_axis import log_ticks, plain, power
from gyroscope.figures.looks import Look, frame, limits, look_of, settle, short_names, spread, stride
from gyroscope.store import QuantityInfo


@pytest.mark.parametrize(
    ("largest", "end"), [(0.2, 1.0), (1.0, 1.0), (1.004, 1.0), (1.01, 1.1), (1.45, 1.5), (1.99, 2.0), (2.0, 2.0)]
)
def test_rotation_goes_to_one_and_further_only_if_a_layer_does(largest, end):
    assert limits(look_of("rotation"), [0.0, largest]) == (0.0, pytest.approx(end))


def test_a_right_angle_is_marked_where_the_axis_goes_beyond_it():
    ax = own_axes()
    frame(ax, look_of("rotation"), [0.0, 1.4])
    assert [line.get_ydata() for line in ax.lines] == [[1, 1]]


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


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.02, 0.7, ["0.02", "0.05", "0.1", "0.2", "0.5"]),
        (1e-6, 1e-2, ["$10^{-6}$", "$10^{-5}$", "$10^{-4}$", "$10^{-3}$", "$10^{-2}$"]),
        (0.9, 2e4, ["1", "10", "100", "1,000", "10,000"]),
    ],
)
def test_logarithmic_axes_have_round_numbers_written_one_way(low, high, ticks):
    ax = own_axes()
    ax.set_yscale("log")
    ax.set_ylim(low, high)
    log_ticks(ax.yaxis, low, high)
    ax.figure.canvas.draw()
    inside = zip(ax.get_yticks(), ax.get_yticklabels(), strict=True)
    assert [label.get_text() for tick, label in inside if low <= tick <= high] == ticks


def test_numbers_in_full_and_as_powers():
    assert [plain(value) for value in (0.002, 1, 5000)] == ["0.002", "1", "5,000"]
    assert power(5e-7) == r"$5{\times}10^{-7}$"


def test_names_that_differ_in_the_middle_alone_stay_apart():
    blocks = [f"transformer.encoder.layers.{i}.attention.projection.weight" for i in range(3)]
    assert short_names(blocks) == ["…0…", "…1…", "…2…"]
    assert len(set(short_names([*blocks, "transformer.head.weight"]))) == 4
    assert len(set(short_names([*blocks, "head.weight"], longest=18))) == 4
    mixed = [f"transformer.encoder.layers.{i}.{part}.projection" for i in range(2) for part in ("key", "value")]
    assert short_names(mixed, longest=20) == ["…0.key…", "…0.value…", "…1.key…", "…1.value…"]


def test_condition_numbers_are_labelled_by_their_share_and_matrix():
    assert look_of("kappa_g_p12.5") == Look(r"$\kappa_{12.5\%}(\Sigma_{\nabla h})$", "log", noisy=True)


def test_names_lose_what_they_share_and_keep_both_ends():
    assert short_names(["a.weight", "b.weight"]) == ["a", "b"]
    assert short_names(["a.weight", "b.weight_ih"]) == ["a.weight", "b.weight_ih"]
    [short] = short_names(["transformer.encoder.layer.10.attention.query"], longest=20)
    assert (len(short), short[:5], short[-5:]) == (20, "trans", "query")


def test_labels_are_thinned_evenly():
    assert stride(34, 12) == list(range(0, 34, 3))
    assert stride(3, 12) == [0, 1, 2]
    assert spread(1202, 3) == [0, 600, 1201]
