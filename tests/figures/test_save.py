import numpy as np
import pytest
from matplotlib.image import imread

from figures.made import example_run
from gyroscope.errors import FigureError
from gyroscope.figures import rotation_curves, rotation_heatmap, save
from gyroscope.figures.save import to_palette

BEGINS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize("form", BEGINS)
@pytest.mark.parametrize("what", ["axes", "figure"])
def test_the_ending_says_the_format_of_the_one_file_written(tmp_path, form, what):
    path = tmp_path / "new" / "folder" / f"curves.{form}"
    axes = rotation_curves(example_run(steps=5))
    assert save(axes if what == "axes" else axes.get_figure(), path) == [path]
    assert path.read_bytes().startswith(BEGINS[form])
    assert list(path.parent.iterdir()) == [path]


def test_without_an_ending_png_and_svg_are_written(tmp_path):
    written = save(rotation_curves([[0.0], [0.5]]), tmp_path / "lr0.1")
    assert written == [tmp_path / "lr0.1.png", tmp_path / "lr0.1.svg"]
    assert imread(written[0]).std() > 0


def test_both_formats_have_one_layout_and_the_figure_keeps_its_engine(tmp_path):
    figure = rotation_curves([[0.0], [0.5]]).get_figure()
    engine = figure.get_layout_engine()
    places, write = [], figure.savefig

    def savefig(*args, **options):
        write(*args, **options)
        places.append(figure.axes[0].get_position().bounds)

    figure.savefig = savefig
    save(figure, tmp_path / "curves")
    assert places[0] == places[1]
    assert figure.get_layout_engine() is engine is not None


@pytest.mark.parametrize("name", ["curves.jpg", "curves.pgn", "curves.tiff"])
def test_other_formats_are_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(FigureError, match=r"must end in \.png, \.svg, \.pdf"):
        save(rotation_curves([[0.0]]), tmp_path / "folder" / name)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_figure_is_refused(tmp_path):
    with pytest.raises(FigureError, match="`figure` must be a matplotlib figure or axes, got a str"):
        save("figure", tmp_path / "a.png")


@pytest.mark.parametrize("form", BEGINS)
def test_the_same_figure_gives_the_same_file(tmp_path, form):
    first, second = (save(rotation_curves(example_run()), tmp_path / f"{i}.{form}")[0] for i in range(2))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("form", ["svg", "pdf"])
@pytest.mark.parametrize("draw", [rotation_curves, rotation_heatmap], ids=lambda draw: draw.__name__)
def test_vector_files_of_1202_layers_stay_small(tmp_path, form, draw):
    run = example_run(layers=1202, steps=300, quantities=["rotation"])
    [path] = save(draw(run), tmp_path / f"many.{form}")
    assert path.stat().st_size < 2_000_000


def test_a_spike_of_one_layer_at_one_step_is_still_in_the_picture(tmp_path):
    calm = np.zeros((20_000, 1))
    spike = calm.copy()
    spike[12_345] = 0.9
    pixels = [imread(save(rotation_curves(y), tmp_path / f"{y.max()}.png")[0]) for y in (calm, spike)]
    assert (pixels[0] != pixels[1]).any()


@pytest.mark.parametrize("dpi", ["figure", None, np.float32(50), 50])
def test_pixels_are_counted_as_matplotlib_counts_them(tmp_path, dpi):
    figure = rotation_curves(example_run(steps=5)).get_figure()
    [path] = save(figure, tmp_path / "ours.png", dpi=dpi)
    figure.savefig(tmp_path / "theirs.png", dpi=dpi)
    assert imread(path).shape == imread(tmp_path / "theirs.png").shape


def test_a_palette_makes_a_picture_smaller_and_moves_no_color_far(tmp_path):
    run = example_run(layers=30, steps=200)
    [full] = save(rotation_heatmap(run), tmp_path / "full.png")
    [small] = save(rotation_heatmap(run), tmp_path / "small.png", palette=True)
    assert small.stat().st_size < 0.6 * full.stat().st_size
    drawn, reduced = imread(full)[..., :3], imread(small)[..., :3]
    assert np.abs(drawn - reduced).max() < 0.1
    assert np.abs(drawn - reduced).mean() < 0.005
    before = small.read_bytes()
    to_palette(small)
    assert small.read_bytes() == before


def test_a_transparent_picture_keeps_its_colors(tmp_path):
    def drawn():
        figure = rotation_curves(example_run()).get_figure()
        figure.patch.set_alpha(0.0)
        return figure

    [full], [small] = (save(drawn(), tmp_path / f"{palette}.png", palette=palette) for palette in (False, True))
    assert small.read_bytes() == full.read_bytes()
