import numpy as np
import pytest

from figures.made import Curve, example_run, run_of, texts, written
from gyroscope.errors import FigureError
from gyroscope.figures import Example, dashboard, scalars

EVERYTHING = [
    "Rotation curves",
    "Rotation heatmap",
    "Whole network",
    "Rotation rates",
    "Update sizes",
    "Effective learning rates",
    "Weight norms",
    "Gradient norms",
    "Second moments",
    "Activity of neurons",
    "Rotation of neurons",
]


def titles(figure):
    return [ax.get_title() for ax in figure.axes if ax.get_title()]


@pytest.mark.parametrize("layers", [3, 34])
def test_everything_a_run_holds_is_on_the_page(layers):
    assert titles(dashboard(example_run(layers=layers, steps=21))) == EVERYTHING


@pytest.mark.parametrize("missing", ["dying full", "moment_p50", "rate_per_step", "update_ratio"])
def test_panels_without_data_are_left_out(missing):
    held = [name for name in example_run().quantities if name not in missing.split()]
    run = example_run(steps=21, quantities=held)
    assert len(titles(dashboard(run))) == len(EVERYTHING) - 1


def test_a_quantity_without_values_is_no_data():
    run = example_run(steps=21)
    run.data["gradient_norm"][:] = np.nan
    assert "Gradient norms" not in titles(dashboard(run))


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_panels_without_data_of_the_layers_that_are_chosen_are_left_out(tmp_path, value, on_disk):
    run = example_run(steps=21)
    for name in ("gradient_norm", "effective_lr", "effective_lr_measured", "full", "moment_p50"):
        run.data[name][:, 1] = value
    run = written(tmp_path / "run", run) if on_disk else run
    left_out = {"Gradient norms", "Effective learning rates", "Second moments"}
    assert titles(dashboard(run, layers=run.layers[1])) == [title for title in EVERYTHING if title not in left_out]
    assert titles(dashboard(run)) == EVERYTHING


def test_no_axes_are_empty():
    for count in range(1, 4):
        run = example_run(steps=5, quantities=["rotation", "gradient_norm", "update_ratio"][:count])
        assert all(ax.has_data() for ax in dashboard(run).axes if ax.get_label() != "<colorbar>")


def test_the_header_names_the_run_its_size_and_its_last_scalars():
    assert dashboard(example_run(steps=21)).get_suptitle() == (
        "example\n3 layers · step 20 · loss 0.04213 · test_accuracy 0.9"
    )


def test_a_few_layers_are_named_once_and_many_have_one_color_bar():
    few, many = dashboard(example_run(3, 5)), dashboard(example_run(34, 5))
    [legend] = few.legends
    assert texts(legend) == ["block1.conv1", "block1.conv2", "block2.conv1"]
    assert [ax.get_xlabel() for ax in many.axes if ax.get_label() == "<colorbar>"].count("layer, in forward order") == 1


def test_a_run_with_nothing_to_show_is_refused():
    with pytest.raises(FigureError, match="holds nothing that a dashboard shows"):
        dashboard(run_of(custom=np.zeros((2, 2))))
    with pytest.raises(FigureError, match="`columns` must be a whole number ≥ 1, got 0"):
        dashboard(example_run(), columns=0)


def with_scalars(**values):
    curves = {name: Curve(np.arange(len(v)), np.asarray(v, dtype=float)) for name, v in values.items()}
    return Example("made", ("a",), np.arange(1), {}, curves)


def test_losses_are_on_the_left_and_accuracies_on_the_right_from_zero_to_one():
    ax = scalars(with_scalars(loss=[2.0, 1.0], train_accuracy=[0.1, 0.8], test_accuracy=[0.1, 0.7]))
    twin = ax.figure.axes[1]
    assert [line.get_label() for line in ax.lines] == ["loss"]
    assert [line.get_label() for line in twin.lines] == ["train_accuracy", "test_accuracy"]
    assert twin.get_ylim() == (0, 1)
    styles = {(line.get_linestyle(), line.get_color()) for line in (*ax.lines, *twin.lines)}
    assert len({style for style, _ in styles}) == len({color for _, color in styles}) == 3


def test_accuracies_in_percent_go_to_a_hundred_and_gaps_are_bridged():
    ax = scalars(with_scalars(accuracy=[10.0, np.nan, 80.0]))
    assert ax.get_ylim() == (0, 100)
    assert ax.lines[0].get_xydata().tolist() == [[0, 10], [2, 80]]


def test_without_losses_and_accuracies_the_first_scalars_are_drawn():
    ax = scalars(with_scalars(**{name: [1.0, 2.0] for name in "abcdefg"}))
    assert [line.get_label() for line in ax.lines] == list("abcde")


def test_scalars_that_are_not_there_are_refused():
    with pytest.raises(FigureError, match=r"has no scalar 'acc'; its scalars are: loss"):
        scalars(with_scalars(loss=[1.0]), ["acc"])
    with pytest.raises(FigureError, match=r"has no scalars; its scalars are: none"):
        scalars(with_scalars())
