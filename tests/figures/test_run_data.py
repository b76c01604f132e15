import numpy as np
import pytest
from matplotlib.axes import Axes

from figures.made import example_run, run_of, written
from gyroscope import figures
from gyroscope.errors import FigureError, StoreError
from gyroscope.figures.run_data import find

ONE_RUN = [
    figures.rotation_curves,
    figures.rotation_heatmap,
    figures.rates,
    figures.norms,
    figures.effective_rates,
    figures.moment_percentiles,
    figures.neurons,
    figures.scalars,
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return written(tmp_path_factory.mktemp("runs") / "stored", example_run(layers=4, steps=21))


@pytest.mark.parametrize("draw", ONE_RUN, ids=lambda draw: draw.__name__)
def test_a_run_on_disk_is_drawn_like_the_same_numbers_in_memory(draw, stored):
    memory = draw(example_run(layers=4, steps=21))
    for given in (stored, stored.path, str(stored.path)):
        ax = draw(given)
        assert isinstance(ax, Axes)
        assert len(ax.lines) == len(memory.lines)
        for line, same in zip(ax.lines, memory.lines, strict=True):
            np.testing.assert_allclose(line.get_xydata(), same.get_xydata(), rtol=1e-6)
        assert ax.get_xlim() == pytest.approx(memory.get_xlim())
        assert ax.get_ylim() == pytest.approx(memory.get_ylim())


def test_a_dashboard_of_a_run_on_disk_has_the_panels_of_the_same_numbers_in_memory(stored):
    panels = [[ax.get_title() for ax in figures.dashboard(run).axes] for run in (stored, example_run(4, 21))]
    assert panels[0] == panels[1]


@pytest.mark.parametrize("draw", ONE_RUN, ids=lambda draw: draw.__name__)
def test_given_axes_are_drawn_on_and_get_no_key_for_depth(draw):
    figure = figures.rotation_curves([[0.0]]).figure
    ax = figure.axes[0]
    assert draw(example_run(layers=30, steps=21), ax=ax) is ax
    assert "layer, in forward order" not in [other.get_ylabel() for other in figure.axes]


@pytest.mark.parametrize("draw", ONE_RUN, ids=lambda draw: draw.__name__)
def test_a_run_of_one_step_can_be_drawn(draw, tmp_path):
    run = example_run(layers=3, steps=1)
    for values in run.data.values():
        values[np.isnan(values)] = 0.5
    figures.save(draw(run), tmp_path / "one.png", dpi=50)


@pytest.mark.parametrize("draw", ONE_RUN[:-1], ids=lambda draw: draw.__name__)
def test_what_a_run_does_not_hold_is_an_error_that_says_what_it_holds(draw):
    with pytest.raises(FigureError, match=r"The run 'made' has no .*; it holds custom"):
        draw(run_of(custom=np.zeros((2, 3))))


def test_values_that_are_all_unknown_are_no_values():
    with pytest.raises(FigureError, match="The run 'made' has no values of rotation yet"):
        figures.rotation_curves(run_of(rotation=np.full((2, 3), np.nan)))


def test_a_name_that_is_nearly_right_is_suggested():
    with pytest.raises(FigureError, match=r"has no gradient; .* Did you mean gradient_norm\?"):
        figures.curves(run_of(gradient_norm=np.ones((2, 3))), "gradient")


def test_steps_at_which_nothing_is_known_are_left_out_and_infinities_are_not_known():
    series = find(run_of(rate=[[np.nan, np.nan], [0.1, np.inf], [0.2, 0.3]]), "rate")
    assert series.steps.tolist() == [1, 2]
    assert np.isnan(series.values).tolist() == [[False, True], [False, False]]


def test_reading_a_run_does_not_change_it():
    run = run_of(rate=[[np.inf, 1.0]])
    figures.curves(run, "rate")
    assert run.series("rate").tolist() == [[np.inf, 1.0]]


def test_layers_are_chosen_by_patterns_and_keep_the_colors_of_their_depth():
    run = example_run(layers=10)
    every, some = figures.rotation_curves(run), figures.rotation_curves(run, layers=["block4.*", "block1.conv2.weight"])
    assert [line.get_color() for line in some.lines] == [every.lines[i].get_color() for i in (1, 6, 7)]


def test_a_pattern_without_layers_names_one_that_exists():
    with pytest.raises(FigureError, match=r"match at least one of the 3 layers, got 'conv\*'. One of them is 'block"):
        figures.rates(example_run(), layers="conv*")


def test_what_is_no_run_is_refused():
    with pytest.raises(FigureError, match="`run` must be a run or the path of one, got a int"):
        figures.rates(7)
    with pytest.raises(StoreError, match="no run at"):
        figures.rates("no/such/folder")


RUN = example_run(layers=4, steps=20)
AX = figures.rotation_curves(RUN)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda: figures.rotation_curves(RUN, layers=3), "`layers` must be glob patterns .*, got 3"),
        (lambda: figures.rotation_curves(RUN, layers=[3]), r"`layers` must be glob patterns .*, got \[3\]"),
        (lambda: figures.curves(RUN, ["rotation"]), "has no"),
        (lambda: figures.rotation_heatmap(RUN, quantity=None), "has no None"),
        (lambda: figures.rotation_heatmap(RUN, limits=3), "`limits` must be two finite numbers"),
        (lambda: figures.rotation_heatmap(RUN, limits=(0, np.nan)), "`limits` must be two finite numbers"),
        (lambda: figures.rotation_heatmap(RUN, limits=(0, "1")), "`limits` must be two finite numbers"),
        (lambda: figures.rotation_heatmap(RUN, limits=(None, np.inf)), "`limits` must be two finite numbers"),
        (lambda: figures.rotation_heatmap(RUN, limits=(0, 1, None)), "`limits` must be two finite numbers"),
        (lambda: figures.rotation_heatmap(RUN, quantity="gradient_norm", limits=(0, 1)), "logarithmic"),
        (lambda: figures.dashboard(RUN, columns=2.5), "`columns` must be .* got 2.5"),
        (lambda: figures.dashboard(RUN, columns=None), "`columns` must be .* got None"),
        (lambda: figures.dashboard(RUN, columns=True), "`columns` must be .* got True"),
        (lambda: figures.rotation_panels([figures.Panel("a", [[0.0]])], columns=0), "`columns` must be .* got 0"),
        (lambda: figures.moment_percentiles(RUN, steps=["x"]), "`steps` must be an array of numbers"),
        (lambda: figures.compare(3), "`runs` must be .*, got a int"),
        (lambda: figures.rotation_curves([["a"]]), "`curves` must be an array of numbers"),
        (lambda: figures.example_run(layers=0), "`layers` must be a whole number ≥ 1, got 0"),
        (lambda: figures.example_run(quantities=["sharpness"]), "got 'sharpness'"),
        (lambda: figures.save(AX, ""), "`path` must be .*, got ''"),
        (lambda: figures.save(AX, None), "`path` must be .*, got None"),
        (lambda: figures.save(AX, "a\0b.png"), "`path` must be the path of a file"),
        (lambda: figures.save(AX, "x.png", dpi=0), "`dpi` must be .* got 0"),
        (lambda: figures.save(AX, "x.png", dpi="200"), "`dpi` must be .* got '200'"),
    ],
)
def test_what_no_figure_takes_is_refused_in_words(tmp_path, monkeypatch, act, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FigureError, match=says):
        act()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error_of_our_own(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FigureError, match=r"a.png cannot be written"):
        figures.save(AX, tmp_path / "file" / "a.png")


def test_steps_may_be_an_array():
    ax = figures.moment_percentiles(RUN, steps=np.array([1, 10]))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["step 1", "step 10"]


@pytest.mark.parametrize("draw", ONE_RUN, ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("ax", [5, "ax", []])
def test_what_are_no_axes_is_refused(draw, ax):
    with pytest.raises(FigureError, match="`ax` must be matplotlib axes, got "):
        draw(example_run(steps=21), ax=ax)


NO_FLAG = np.ones((3, 2))


@pytest.mark.parametrize(
    ("draw", "says"),
    [
        (lambda run: figures.rotation_curves(run, legend=NO_FLAG), "`legend` must be True or False, got array"),
        (lambda run: figures.curves(run, "rate", legend="no"), "`legend` must be True or False, got 'no'"),
        (lambda run: figures.curves(run, "rate", relative=NO_FLAG), "`relative` must be True or False, got array"),
        (lambda run: figures.neurons(run, legend=[]), "`legend` must be True or False"),
        (lambda run: figures.effective_rates(run, predictions=NO_FLAG), "`predictions` must be True or False"),
        (lambda run: figures.rates(run, predictions=0.5), "`predictions` must be True or False"),
        (lambda run: figures.conditioning_over_time(run, log_steps=NO_FLAG), "`log_steps` must be True or False"),
        (lambda run: figures.save(figures.norms(run), "nowhere.png", palette=NO_FLAG), "`palette` must be True or"),
        (lambda run: figures.neurons(run, NO_FLAG), "`show` must be .*, got array"),
        (lambda run: figures.norms(run, NO_FLAG), "`which` must be .*, got array"),
        (
            lambda run: figures.conditioning_over_time(run, quantity=5),
            "`quantity` must be a name .*got 5",
        ),
        (lambda run: figures.conditioning_over_time(run, quantity=[5]), r"`quantity` must be a name .*got \[5\]"),
        (lambda run: figures.rotation_curves([[10**400]]), "`curves` must be an array of numbers"),
        (lambda run: figures.rotation_curves(run, [np.nan] * len(run.steps)), "`x` must be finite numbers"),
        (lambda run: figures.example_run(seed=-(2**70)), "got -1180591620717411303424"),
        (lambda run: figures.example_run(seed=np.nan), "`seed` must be a whole number"),
        (lambda run: figures.example_run(quantities=5), "got 5. It has rotation"),
        (lambda run: figures.example_run(quantities=[[]]), r"got \[\]. It has rotation"),
    ],
)
def test_what_a_figure_cannot_take_is_refused_in_words(draw, says):
    with pytest.raises(FigureError, match=says):
        draw(example_run(steps=21))
