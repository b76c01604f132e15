"""Names are drawn as they are, whatever characters they hold."""

import pytest
import torch

import gyroscope
from gyroscope import figures
from gyroscope.errors import FigureError
from gyroscope.figures.looks import short_names

HALF = "$\\frac{$"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    model = torch.nn.Sequential()
    model.add_module(HALF, torch.nn.Linear(4, 4))
    model.add_module("b", torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gyroscope.watch(model, optimizer, tmp_path_factory.mktemp("runs") / HALF) as monitor:
        for _ in range(3):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            monitor.log({f"loss {HALF}": 1.0, f"accuracy {HALF}": 0.5})
    return gyroscope.load(monitor.path)


@pytest.mark.parametrize("name", ["rotation_curves", "dashboard", "rotation_heatmap", "scalars"])
def test_a_dollar_in_a_name_is_drawn_as_a_dollar(run, tmp_path, name):
    figures.save(getattr(figures, name)(run), tmp_path / "figure.png")


def test_a_dollar_in_the_names_of_compared_runs_is_drawn_as_a_dollar(run, tmp_path):
    figures.save(figures.compare([run, run], accuracy=f"accuracy {HALF}"), tmp_path / "figure.png")


def test_short_names_escape_what_matplotlib_takes_for_a_formula():
    assert short_names(["$x$.weight"]) == ["\\$x\\$"]


@pytest.mark.parametrize("longest", [18, 26])
def test_short_names_of_densenet_are_distinct(longest):
    sizes = enumerate((6, 12, 24, 16), start=1)
    within = [f"denseblock{b}.denselayer{n}.conv{c}" for b, size in sizes for n in range(1, size + 1) for c in (1, 2)]
    names = [f"features.{name}.weight" for name in ("conv0", *within, "transition1.conv")] + ["classifier.weight"]
    short = short_names(names, longest=longest)
    assert len(set(short)) == len(names)
    assert max(map(len, short)) <= longest


def test_half_a_formula_in_a_title_is_said_in_words(run, tmp_path):
    with pytest.raises(FigureError, match="cannot be drawn"):
        figures.save(figures.rotation_curves(run, title=HALF), tmp_path / "figure.png")


def test_half_a_letter_is_refused_in_a_title_and_spelled_out_in_a_name(run, tmp_path):
    with pytest.raises(FigureError, match="cannot be drawn"):
        figures.save(figures.rotation_curves(run, title="\ud83d"), tmp_path / "figure.png")
    assert short_names(["caf\udce9.weight"]) == ["caf\\udce9"]


def test_names_that_are_none_are_refused(run):
    with pytest.raises(FigureError, match="`names` must be a list"):
        figures.scalars(run, 5)
    with pytest.raises(FigureError, match="`accuracy` must be the name"):
        figures.compare([run], accuracy=[])
