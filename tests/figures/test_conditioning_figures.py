"""Figures of conditioning: over depth, as spectra, over the steps of a run."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from torch import nn
from torch.nn import functional as F  # noqa: N812

import gyroscope
from figures.made import example_run, run_of, texts
from gyroscope import figures
from gyroscope.errors import FigureError
from gyroscope.figures import conditioning_by_layer, conditioning_over_time, spectra
from gyroscope.figures.drawing import own_axes
from gyroscope.figures.log_axis import edged


def mlp(depth=3, width=8, *, bias=0.0, seed=0):
    torch.manual_seed(seed)
    layers = [part for _ in range(depth - 1) for part in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 4))
    with torch.no_grad():
        for layer in model[::2]:
            nn.init.kaiming_normal_(layer.weight)
            layer.bias.fill_(bias)
    return model


def conditioning(model, samples=64, *, scale=1.0, **options):
    x = scale * torch.randn(samples, model[0].in_features, generator=torch.Generator().manual_seed(1))
    return gyroscope.condition(model, F.cross_entropy, (x, torch.arange(samples) % 4), **options)


def named(names):
    """A perceptron whose layers have these names."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for name in names:
        inside = model
        *path, last = name.split(".")
        for part in path:
            if part not in inside._modules:
                inside.add_module(part, nn.Sequential())
            inside = inside._modules[part]
        inside.add_module(last, nn.Linear(4, 4))
    model.in_features = 4
    return model


def curves_of(ax):
    """The lines that go from layer to layer."""
    return [line for line in ax.lines if line.get_marker() == "None" and len(line.get_xdata()) > 2]


def marks_of(ax, mark):
    """Where there is such a mark: layer, y."""
    return [tuple(at) for line in ax.lines if line.get_marker() == mark for at in line.get_xydata().tolist()]


def drawn(figure, folder):
    """Written as a file, which lays it out: warnings are errors."""
    figures.save(figure, folder / "figure.png", dpi=60)
    return figure


def legend(figure):
    return texts(figure.legends[0]) if figure.legends else []


def test_the_panels_over_depth_show_the_rows_of_the_conditioning():
    found = conditioning(mlp(5))
    rows = found.rows()
    axes = conditioning_by_layer(found).axes
    for matrix, above, below in zip("xgf", axes[:3], axes[3:], strict=True):
        [line] = curves_of(above)
        assert line.get_xdata().tolist() == [1, 2, 3, 4, 5]
        np.testing.assert_array_equal(line.get_ydata(), [row[f"lambda_{matrix}"] for row in rows])
        lines = curves_of(below)
        assert len(lines) == len(found.p)
        for line, p in zip(lines, sorted(found.p), strict=True):
            kappas = np.array([row[f"kappa_{matrix}"][p] for row in rows])
            np.testing.assert_array_equal(line.get_ydata(), np.where(np.isinf(kappas), np.nan, kappas))
        assert {above.get_yscale(), below.get_yscale()} == {"log"}


def test_of_one_network_each_p_has_a_color_and_a_marker_and_the_largest_eigenvalue_neither():
    figure = conditioning_by_layer(conditioning(mlp(4), 256))
    lines = curves_of(figure.axes[3])
    colors = {line.get_color() for line in lines}
    assert len(colors) == 5
    assert curves_of(figure.axes[0])[0].get_color() not in colors
    assert legend(figure)[:5] == ["p = 10 %", "p = 25 %", "p = 50 %", "p = 75 %", "p = 100 %"]
    assert len({handle.get_marker() for handle in figure.legends[0].legend_handles}) >= 5


def test_several_networks_have_colors_of_their_own_and_dashes_for_p():
    found = {"plain": conditioning(mlp(4), 256), "other": conditioning(mlp(4, seed=1), 256)}
    figure = conditioning_by_layer(found)
    plain, other = curves_of(figure.axes[0])
    assert plain.get_color() != other.get_color()
    lines = curves_of(figure.axes[4])
    assert [line.get_color() for line in lines] == [plain.get_color()] * 2 + [other.get_color()] * 2
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-", "--"]
    assert legend(figure)[:4] == ["plain", "other", "p = 50 %", "p = 100 %"]


@pytest.mark.parametrize(("networks", "shares"), [(1, 5), (2, 2), (3, 1), (5, 1)])
def test_the_more_networks_the_fewer_p_are_shown(networks, shares):
    figure = conditioning_by_layer([conditioning(mlp(), 256)] * networks)
    assert len([said for said in legend(figure) if said.startswith("p =")]) == shares


def test_p_that_are_asked_for_are_shown():
    found = [conditioning(mlp(), 256), conditioning(mlp(seed=1), 256)]
    figure = conditioning_by_layer(found, p=[0.25, 0.75], labels=["a", "b"])
    assert legend(figure)[:4] == ["a", "b", "p = 25 %", "p = 75 %"]
    assert legend(conditioning_by_layer(found[0], p=0.5)) == ["p = 50 %"]
    assert legend(conditioning_by_layer(found[0], p=np.float32(0.5))) == ["p = 50 %"]


def test_only_p_that_all_networks_have_are_shown():
    found = [conditioning(mlp(), 256, p=[0.2, 0.6]), conditioning(mlp(), 256, p=[0.6, 0.9])]
    assert legend(conditioning_by_layer(found)) == ["network 1", "network 2", "p = 60 %"]


def test_without_p_there_are_no_panels_for_it():
    figure = conditioning_by_layer(conditioning(mlp(), p=()))
    assert len(figure.axes) == 3
    assert figure.axes[1].get_xlabel() == "layer, in forward order"
    assert legend(figure) == []


def test_infinite_condition_numbers_are_marked_above_all_others_at_their_layers():
    found = conditioning(mlp(4), 4)  # fewer samples than dimensions
    figure = conditioning_by_layer(found, p=[0.1, 1.0])
    ax = figure.axes[3]
    kappas = [row["kappa_x"] for row in found.rows()]
    infinite = [i + 1 for i, by_p in enumerate(kappas) if np.isinf(by_p[1.0])]
    assert infinite == [1, 2, 3, 4]
    finite = [by_p[p] for by_p in kappas for p in (0.1, 1.0) if np.isfinite(by_p[p])]
    marks = marks_of(ax, "^")
    assert [x for x, _ in marks if x in infinite] == infinite
    assert all(max(finite) < y < ax.get_ylim()[1] for _, y in marks)
    assert "∞" in [text.get_text() for text in ax.texts]
    assert legend(figure)[-1] == r"infinite: $\lambda_p=0$"


def test_each_p_that_is_infinite_has_a_row_of_marks_of_its_own():
    found = conditioning(mlp(4), 2)
    ax = conditioning_by_layer(found, p=[0.5, 0.75, 1.0]).axes[3]
    assert len({y for _, y in marks_of(ax, "^")}) == 3


def silenced():
    """A network whose first layer's outputs are all zero: what follows sees nothing, what precedes gets no gradient."""
    model = mlp(4)
    with torch.no_grad():
        model[0].bias.fill_(-1e3)
    return model


def test_dead_layers_are_zero_below_and_undefined_where_there_is_no_largest_eigenvalue():
    found = conditioning(silenced())
    figure = conditioning_by_layer(found)
    rows = found.rows()
    for matrix, above, below in zip("xgf", figure.axes[:3], figure.axes[3:], strict=True):
        dead = [i + 1 for i, row in enumerate(rows) if row[f"lambda_{matrix}"] == 0]
        assert dead
        assert [x for x, _ in marks_of(above, "v")] == dead
        # Undefined for every p: one row says so.
        assert [x for x, _ in marks_of(below, "x")] == dead
        known = [row[f"lambda_{matrix}"] for row in rows if row[f"lambda_{matrix}"] > 0]
        assert all(above.get_ylim()[0] < y < min(known, default=np.inf) for _, y in marks_of(above, "v"))
    says = [r"infinite: $\lambda_p=0$", "zero", r"undefined: $\lambda_{\max}$ is 0 or not finite"]
    assert legend(figure)[5:] == says


def test_a_network_without_any_signal_says_so_in_every_panel(tmp_path):
    figure = drawn(conditioning_by_layer(conditioning(mlp(3, bias=-1.0), scale=0.0)), tmp_path)
    said = [[text.get_text() for text in ax.texts] for ax in figure.axes]
    assert said[0] == ["0", "0 throughout"]
    assert said[3] == ["undefined throughout"]


def test_what_is_not_finite_is_marked_as_undefined():
    found = conditioning(mlp(3))
    last = replace(found.entries[2], lambda_g=np.nan, kappa_g=dict.fromkeys(found.p, np.nan))
    figure = conditioning_by_layer(replace(found, entries=(*found.entries[:2], last)))
    assert [x for ax in (figure.axes[1], figure.axes[4]) for x, _ in marks_of(ax, "x")] == [3, 3]


def test_a_value_between_two_that_cannot_be_drawn_is_a_dot():
    found = conditioning(silenced())
    line = conditioning_by_layer(found).axes[1]
    [last] = [row["lambda_g"] for row in found.rows() if row["lambda_g"] > 0]
    assert (4.0, last) in marks_of(line, "o")


def test_networks_of_different_depth_share_an_axis_of_numbers():
    figure = conditioning_by_layer([conditioning(mlp(3)), conditioning(mlp(6))])
    figure.canvas.draw()
    ax = figure.axes[3]
    assert ax.get_xlim() == (0.5, 6.5)
    assert {"2", "4", "6"} <= {label.get_text() for label in ax.get_xticklabels()}


def test_layers_are_named_where_networks_have_the_same():
    ax = conditioning_by_layer([conditioning(mlp(3)), conditioning(mlp(3, seed=1))]).axes[3]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "2", "4"]


def test_layers_can_be_chosen():
    found = conditioning(mlp(5))
    figure = conditioning_by_layer(found, layers=["4.*", "6.weight", "8.weight"])
    np.testing.assert_array_equal(
        curves_of(figure.axes[0])[0].get_ydata(), [row["lambda_x"] for row in found.rows()[2:]]
    )
    assert figure.axes[4].get_xlabel() == "chosen layers, in forward order"


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        (7, {}, r"must be a result of gyroscope.condition\(...\), got a int"),
        (["a", "b"], {}, "got a str"),
        ([], {}, "at least one result"),
        (6, {}, "at most 5 networks, got 6"),
        (2, {"labels": ["a"]}, r"must be 2 different texts, .*, got \['a'\]"),
        (2, {"labels": ["a", "a"]}, "2 different texts"),
        (1, {"p": 0.3}, r"measured \(0.1, 0.25, 0.5, 0.75, 1\), got 0.3. Measure it with gyroscope.condition"),
        (1, {"layers": "conv*"}, "match at least one of the 3 layers"),
    ],
)
def test_what_cannot_be_drawn_over_depth_is_refused(given, options, says):
    if given != 7 and isinstance(given, int):
        given = [conditioning(mlp())] * given
    with pytest.raises(FigureError, match=says):
        conditioning_by_layer(given, **options)


def test_panels_keep_their_width_where_a_line_has_no_value_to_show():
    found = [conditioning(mlp(4), 2), conditioning(mlp(4), 256)]
    figure = conditioning_by_layer(found, p=[1.0])
    FigureCanvasAgg(figure).draw()
    assert min(ax.get_window_extent().width for ax in figure.axes) > 0.25 * figure.bbox.width


LONG = [f"encoder.layers.{i}.self_attention.output_projection_{'ab'[i % 2]}" for i in range(12)]
CASES = {
    "one layer": lambda **o: conditioning(mlp(1), **o),
    "110 layers": lambda **o: conditioning(mlp(110, 4), **o),
    "dead": lambda **o: conditioning(silenced(), **o),
    "all dead": lambda **o: conditioning(mlp(3, bias=-1.0), scale=0.0, **o),
    "infinite": lambda **o: conditioning(mlp(4), 2, **o),
    "one p": lambda **o: conditioning(mlp(), p=[0.5], **o),
    "no p": lambda **o: conditioning(mlp(), p=(), **o),
    "long names": lambda **o: gyroscope.condition(
        named(LONG), F.cross_entropy, (torch.randn(32, 4), torch.arange(32) % 4), **o
    ),
}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.replace(" ", "_"))
def case(request):
    return CASES[request.param](spectra=True)


def beside(ax):
    """What stands beside the y axis, from below: numbers within it, and the names of its edges."""
    low, high = sorted(ax.get_ylim())
    ticks = [label for tick, label in zip(ax.get_yticks(), ax.get_yticklabels(), strict=True) if low <= tick <= high]
    names = [text for text in ax.texts if text.get_text() in ("0", "∞")]
    return sorted((text.get_window_extent() for text in (*ticks, *names)), key=lambda box: box.y0)


@pytest.mark.parametrize("draw", [conditioning_by_layer, spectra], ids=lambda draw: draw.__name__)
def test_every_case_can_be_drawn_with_its_texts_apart_and_inside(case, draw):
    figure = draw(case, title="a title")
    FigureCanvasAgg(figure).draw()
    for ax in figure.axes:
        assert [(a, b) for a, b in pairwise(beside(ax)) if b.y0 < a.y1 - 2] == []
        assert ax.get_label() == "<colorbar>" or ax.get_window_extent().width > 0.2 * figure.bbox.width
    for key in figure.legends:
        box = key.get_window_extent()
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert all(box.y1 <= ax.get_window_extent().y0 for ax in figure.axes)


@pytest.fixture(scope="module")
def kept():
    return conditioning(mlp(4, 10), 7, spectra=True)


def courses(ax):
    """The lines over p."""
    return [line for line in ax.lines if len(line.get_xdata()) > 2]


@pytest.mark.parametrize("which", ["x", "g", "f"])
def test_spectra_are_the_eigenvalues_in_descending_order(kept, which):
    above, below = spectra(kept, which=which).axes
    for name, line, ratio in zip(kept.layers, courses(above), courses(below), strict=True):
        both = kept.spectra[name]
        every = np.sort(np.multiply.outer(both.x.full(), both.g.full()).ravel())[::-1]
        values = {"x": both.x.full(), "g": both.g.full(), "f": every}[which]
        p = np.asarray(line.get_xdata())
        expected = [values[max(int(np.ceil(share * len(values) - 1e-9)), 1) - 1] for share in p]
        np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-12)
        np.testing.assert_allclose(ratio.get_ydata(), values[0] / np.array(expected), rtol=1e-12)
        assert p[-1] == pytest.approx((values > 0).mean(), abs=1 / 200)


def test_where_eigenvalues_are_zero_lines_end_in_marks_at_the_edges(kept):
    above, below = spectra(kept, which="x").axes
    zeros = [name for name in kept.layers if kept.spectra[name].x.rank < kept.spectra[name].x.dimension]
    assert zeros
    assert len(marks_of(above, "v")) == len(marks_of(below, "^")) == len(zeros)
    for (x, y), name in zip(marks_of(above, "v"), zeros, strict=True):
        spectrum = kept.spectra[name].x
        assert x == pytest.approx(spectrum.rank / spectrum.dimension, abs=1 / 100)
        assert y < spectrum.values[spectrum.rank - 1]


def test_full_spectra_have_no_marks():
    figure = spectra(conditioning(mlp(2, 4), 512, spectra=True), which="x")
    assert [marks_of(ax, mark) for ax in figure.axes for mark in "v^"] == [[]] * 4


def test_spectra_are_named_or_numbered_by_depth():
    few = spectra(conditioning(mlp(3), spectra=True))
    assert texts(few.axes[2].get_legend()) == ["0", "2", "4"]
    many = spectra(conditioning(mlp(12), spectra=True), layers=["0.weight", "22.weight"])
    assert texts(many.axes[2].get_legend()) == ["0", "22"]
    bar = spectra(conditioning(mlp(12), spectra=True)).axes[-1]
    assert bar.get_ylabel() == "layer, in forward order"


def test_layers_without_eigenvalues_are_counted():
    above, below = spectra(conditioning(silenced(), spectra=True), which="x").axes
    assert "3 layers are 0 throughout" in [text.get_text() for text in above.texts]
    assert "3 layers are undefined" in [text.get_text() for text in below.texts]


def test_spectra_that_were_not_kept_are_refused_with_how_to_keep_them():
    with pytest.raises(FigureError, match=r"got none. Keep them with gyroscope.condition\(..., spectra=True\)"):
        spectra(conditioning(mlp()))


@pytest.mark.parametrize("which", ["h", "xg", [], ["x", "fisher"]])
def test_matrices_that_are_not_known_are_refused(kept, which):
    with pytest.raises(FigureError, match="must be one or several of 'x', 'g', 'f'"):
        spectra(kept, which=which)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "recorded"
    model = mlp(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(64, 8, generator=torch.Generator().manual_seed(2)), torch.arange(64) % 4
    with gyroscope.watch(model, optimizer, folder, conditioning=3, budget=None):
        for _ in range(12):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return folder


def test_a_recorded_run_is_drawn_as_it_was_measured(recorded, tmp_path):
    figure = drawn(conditioning_over_time(recorded), tmp_path)
    run = gyroscope.load(recorded)
    assert len(figure.axes) == 6
    names = ("lambda_x", "lambda_g", "lambda_f", "kappa_f_p50", "weight_spectral", "domination")
    for ax, name in zip(figure.axes, names, strict=True):
        values = run.series(name)
        lines = [line for line in ax.lines if len(line.get_xdata()) == (~np.isnan(values[:, 0])).sum()]
        for layer, line in enumerate(lines[:3]):
            there = ~np.isnan(values[:, layer])
            assert line.get_xdata().tolist() == run.steps[there].tolist()
            np.testing.assert_allclose(line.get_ydata(), values[there, layer])
        assert ax.get_yscale() == "log"
    assert legend(figure) == ["0", "2", "4"]


def test_kappa_of_f_nearest_to_a_half_is_shown():
    held = {f"kappa_f_p{p}": np.full((3, 2), 10.0) for p in ("10", "12.5", "40", "100")}
    [ax] = conditioning_over_time(run_of(**held)).axes
    assert ax.get_ylabel() == r"$\kappa_{40\%}(F)$"


def test_quantities_can_be_chosen_those_that_are_no_logarithms_too():
    run = example_run()
    one = conditioning_over_time(run, quantity="domination", layers="block1.*")
    assert len(one.axes[0].lines) == 2
    both = conditioning_over_time(run, quantity=["kappa_x_p50", "dying"])
    assert [ax.get_yscale() for ax in both.axes] == ["log", "linear"]


def test_zero_and_infinity_are_levels_beyond_a_dotted_line():
    kappa = np.array([[2.0, np.inf], [8.0, np.inf], [np.inf, np.inf], [4.0, np.inf]])
    size = np.array([[1.0, 0.0], [0.5, 0.0], [0.25, 0.0], [0.0, 0.0]])
    upper, lower = conditioning_over_time(
        run_of(kappa_x_p50=kappa, lambda_x=size), quantity=["kappa_x_p50", "lambda_x"]
    ).axes
    [dotted, first, second] = upper.lines
    level = second.get_ydata()[0]
    assert first.get_ydata().tolist() == [2, 8, level, 4]
    assert set(second.get_ydata()) == {level}
    assert 8 < dotted.get_ydata()[0] < level < upper.get_ylim()[1]
    [dotted, first, second] = lower.lines
    level = second.get_ydata()[0]
    assert first.get_ydata().tolist() == [1, 0.5, 0.25, level]
    assert lower.get_ylim()[0] < level < dotted.get_ydata()[0] < 0.25
    assert [[text.get_text() for text in ax.texts] for ax in (upper, lower)] == [["∞"], ["0"]]


def test_a_quantity_that_is_infinite_throughout_can_be_drawn(tmp_path):
    drawn(conditioning_over_time(run_of(kappa_f_p100=np.full((4, 3), np.inf))), tmp_path)


def test_steps_can_be_logarithmic_with_a_place_for_step_zero(tmp_path):
    run = run_of(steps=[0, 1, 10, 1000], lambda_x=[[1.0], [10.0], [5.0], [2.0]])
    [ax] = drawn(conditioning_over_time(run, log_steps=True), tmp_path).axes
    assert ax.lines[0].get_xdata().tolist() == [0, 1, 10, 1000]
    where = ax.transAxes.inverted().transform(ax.transData.transform([(s, 1) for s in (0, 1, 10, 1000)]))[:, 0]
    assert where[0] == pytest.approx(0)
    assert where[-1] == pytest.approx(1)
    assert where[1] < where[2] - where[1] < where[3] - where[2]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "10", "100", "1,000"]


def test_first_steps_of_a_long_run_are_kept_on_logarithmic_steps():
    values = np.ones((50_000, 1))
    values[3] = 7.0
    line = conditioning_over_time(run_of(lambda_x=values), log_steps=True).axes[0].lines[0]
    assert line.get_xdata()[:5].tolist() == [0, 0, 0, 1, 1]
    assert line.get_ydata()[np.asarray(line.get_xdata()) == 3].tolist() == [7.0, 7.0]
    assert len(line.get_xdata()) < 1010


@pytest.mark.parametrize("layers", [1, 110])
@pytest.mark.parametrize("log_steps", [False, True])
def test_one_layer_or_many_over_time(layers, log_steps, tmp_path):
    figure = drawn(conditioning_over_time(example_run(layers, 41), log_steps=log_steps), tmp_path)
    assert len(figure.axes[0].lines) == layers
    if layers == 110:
        assert figure.axes[-1].get_xlabel() == "layer, in forward order"


def test_a_run_without_conditioning_says_how_to_record_it():
    with pytest.raises(
        FigureError, match=r"'made' has no conditioning; it holds rotation. .*watch\(..., conditioning=n\)"
    ):
        conditioning_over_time(run_of(rotation=np.zeros((2, 2))))
    with pytest.raises(FigureError, match="`quantity` must be at least one name"):
        conditioning_over_time(example_run(), quantity=[])


@pytest.mark.parametrize(("above", "below"), [(0, 0), (1, 0), (0, 1), (5, 2)])
@pytest.mark.parametrize("values", [[1.0], [1.0, 1.1], [1e-180, 1e5], [3e-7, 2e4], [0.0, np.inf, np.nan]])
def test_rows_at_the_edges_are_within_the_axis_and_beyond_all_values_and_numbers(values, above, below):
    ax = own_axes()
    rows = edged(ax, values, above=above, below=below)
    known = [v for v in values if np.isfinite(v) and v > 0] or [1.0]
    order = [ax.get_ylim()[0], *rows.below[::-1], min(known), max(known), *rows.above, ax.get_ylim()[1]]
    assert order == sorted(order)
    assert (len(rows.above), len(rows.below)) == (above, below)
    assert all(tick < rows.above[0] for tick in ax.get_yticks() if above)
    assert all(tick > rows.below[0] for tick in ax.get_yticks() if below)


def test_shades_are_drawn_for_noisy_courses_only_where_nothing_is_zero_or_infinite():
    noise = np.exp(np.random.default_rng(0).standard_normal((400, 6)))
    [ax] = conditioning_over_time(run_of(lambda_g=noise)).axes
    assert any(isinstance(c, PolyCollection) for c in ax.collections)
    noise[7, 2] = 0.0
    [ax] = conditioning_over_time(run_of(lambda_g=noise)).axes
    assert len(ax.collections) == 0
