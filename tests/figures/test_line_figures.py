"""Rates, norms, any quantity, and effective learning rates with their predictions."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from figures.made import example_run, run_of, texts
from gyroscope.diagnosis import predict
from gyroscope.errors import FigureError
from gyroscope.figures import curves, effective_rates, norms, rates


def prediction(run, layer, **given):
    nothing = np.full(len(run.steps), np.nan)
    known = {"scale_invariant": True, "effective_lr": nothing, "law": nothing, "law_k0": np.nan, "law_r2": np.nan}
    known |= {"equilibrium_rate": np.nan, "equilibrium_norm": np.nan, "half_life": np.nan, "kind": "sgd"} | given
    return predict.Prediction(layer=layer, **known)


@pytest.fixture
def predicting(monkeypatch):
    def set_predictions(**given):
        def predictions(run):
            return [prediction(run, layer, **given) for layer in run.layers]

        monkeypatch.setattr(predict, "predictions", predictions)

    return set_predictions


@pytest.mark.parametrize("layers", [3, 34, 1202])
def test_there_is_one_line_a_layer_colored_by_depth(layers):
    run = example_run(layers=layers, steps=150)
    for ax in (rates(run, predictions=False), norms(run, "gradient"), curves(run, "update_ratio")):
        assert len(ax.lines) == layers
        greens = [to_rgb(line.get_color())[1] for line in ax.lines]
        assert greens == sorted(greens)
        assert ax.get_yscale() == "log"


def test_lines_of_a_few_layers_go_through_every_value():
    run = example_run(layers=3, steps=500)
    ax = norms(run, "gradient")
    for layer, line in enumerate(ax.lines):
        np.testing.assert_allclose(line.get_ydata(), run.series("gradient_norm")[:, layer])
    assert len(ax.collections) == 0


def test_of_many_noisy_layers_moving_means_are_drawn_within_the_range_of_single_values():
    run = example_run(layers=30, steps=500)
    ax = norms(run, "gradient")
    assert ax.get_xlabel() == "step (moving mean of 11; shaded: single values)"
    values = run.series("gradient_norm")
    drawn = np.array([line.get_ydata() for line in ax.lines])
    assert np.diff(np.log(drawn)).std() < np.diff(np.log(values.T)).std() / 3
    [band] = ax.collections
    corners = band.get_paths()[0].vertices[:, 1]
    assert corners.max() == pytest.approx(values.max())
    assert corners.min() == pytest.approx(values.min())
    assert len(norms(run, "weight").collections) == 0  # weights do not jump


def test_layers_that_are_zero_throughout_are_counted_where_a_logarithm_cannot_show_them():
    gradients = np.array([[0.0, 1.0, 0.0], [0.0, 0.1, 2.0]])
    ax = norms(run_of(gradient_norm=gradients), "gradient")
    assert [text.get_text() for text in ax.texts] == ["1 layer is 0 throughout"]
    assert ax.lines[2].get_xydata().tolist() == [[1, 2]]


def test_layers_that_were_not_measured_are_not_taken_for_zero():
    gradients = np.array([[np.nan, 1.0, np.nan, 0.0], [np.nan, 0.001, np.nan, 0.0]])
    ax = curves(run_of(gradient_norm=gradients), "gradient_norm")
    assert [text.get_text() for text in ax.texts] == ["1 layer is 0 throughout", "2 layers are not measured"]


def test_gradients_that_are_all_zero_can_be_drawn():
    ax = norms(run_of(gradient_norm=np.zeros((3, 2))), "gradient")
    assert ax.get_yscale() == "linear"


def test_relative_norms_start_at_one():
    ax = norms(run_of(weight_norm=[[np.nan, 5.0], [2.0, 10.0], [3.0, 20.0]]), relative=True)
    assert [line.get_ydata().tolist() for line in ax.lines] == [[1, 1.5], [1, 2, 4]]
    assert ax.get_ylabel() == "weight norm ‖w‖ / its first value"


def test_norms_that_begin_at_zero_are_counted_where_they_cannot_be_divided_by():
    some = norms(run_of(weight_norm=[[0, 1.0, 0], [3, 2.0, 0], [4, 8.0, 0]]), relative=True)
    assert [line.get_ydata().tolist() for line in some.lines if len(line.get_ydata())] == [[1.0, 2.0, 8.0]]
    assert [text.get_text() for text in some.texts] == ["2 layers are 0 at the start"]
    none = norms(run_of(weight_norm=[[0], [0]]), relative=True)
    assert np.isfinite(none.get_ylim()).all()
    assert [text.get_text() for text in none.texts] == ["1 layer is 0 at the start"]


def test_an_unknown_norm_is_refused():
    with pytest.raises(FigureError, match="`which` must be one of 'weight', 'gradient', 'update', got 'weights'"):
        norms(example_run(), "weights")


def test_the_equilibrium_is_dashed_and_within_view(predicting):
    predicting(equilibrium_rate=0.7)
    ax = rates(example_run())
    *measured, dashed = ax.lines
    assert len(measured) == 3
    assert (dashed.get_linestyle(), dashed.get_ydata()) == ("--", [0.7, 0.7])
    assert ax.get_ylim()[1] > 0.7
    assert [text.get_text() for text in ax.texts] == ["predicted equilibrium"]


def test_without_weight_decay_there_is_no_equilibrium(predicting):
    predicting()
    assert len(rates(example_run()).lines) == 3


def test_measured_is_solid_predicted_dashed_and_the_law_dotted(predicting):
    run = example_run()
    predicting(effective_lr=np.full(101, 0.01), law=np.full(101, 0.02))
    ax = effective_rates(run)
    assert [line.get_linestyle() for line in ax.lines] == ["-"] * 3 + ["--"] * 3 + [":"] * 3
    np.testing.assert_allclose(ax.lines[0].get_ydata(), run.series("effective_lr_measured")[1:, 0])
    assert set(ax.lines[3].get_ydata()) == {0.01}
    assert texts(ax.get_legend()) == ["measured", "η/‖w‖², predicted", "fitted decay law"]


def test_a_prediction_is_a_darker_shade_of_its_layer(predicting):
    predicting(effective_lr=np.full(101, 0.01))
    lines = effective_rates(example_run()).lines
    for measured, dashed in zip(lines[:3], lines[3:], strict=True):
        assert np.allclose(0.55 * np.array(to_rgb(measured.get_color())), to_rgb(dashed.get_color()))


def test_of_many_layers_six_are_predicted_and_the_others_step_back(predicting):
    predicting(effective_lr=np.full(101, 0.01))
    lines = effective_rates(example_run(layers=34)).lines
    assert len(lines) == 34 + 6
    assert [line.get_alpha() for line in lines[:34]].count(1.0) == 6
    assert lines[0].get_alpha() == lines[33].get_alpha() == 1.0


def test_steps_of_adam_are_not_compared_with_plain_gradient_steps(predicting):
    predicting(effective_lr=np.full(101, 0.01), law=np.full(101, 0.02), kind="adamw")
    run = example_run()
    ax = effective_rates(run)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), run.series("effective_lr")[:, 0])
    assert [line.get_linestyle() for line in ax.lines] == ["-"] * 3 + [":"] * 3


def test_predictions_are_left_out_where_a_run_does_not_hold_what_they_need():
    run = example_run(quantities=["effective_lr_measured"])
    assert len(effective_rates(run).lines) == 3


def test_predictions_can_be_left_out(predicting):
    predicting(effective_lr=np.full(101, 0.01), equilibrium_rate=0.1)
    assert len(effective_rates(example_run(), predictions=False).lines) == 3
    assert len(rates(example_run(), predictions=False).lines) == 3
