"""What a notebook shows of a run, a conditioning, a diagnosis and an optimizer: small, safe, complete in itself."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch

import gyroscope
from gyroscope.base import markup
from gyroscope.conditioning.result import Conditioning, LayerConditioning
from gyroscope.control import block_normalized, hyperball, lars
from gyroscope.control.preconditioners.kfac import KFAC
from gyroscope.diagnosis.finding import Diagnosis, Finding
from gyroscope.store import Event, LayerInfo, QuantityInfo, Rows, Scalars, Writer, load

HOSTILE = '<script src="http://evil"></script><img src=x onerror=alert(1)> & "quoted" \'too\' \u202e\ud800\x00'
SMALL = 30_000


def shown(thing):
    """The page as a tree, after the checks that every page must pass."""
    page = thing._repr_html_()
    assert len(page.encode()) < SMALL
    tree = ElementTree.fromstring(f"<page>{page}</page>")  # every tag is closed, everything else escaped
    allowed = {"page", "p", "b", "table", "thead", "tbody", "tr", "th", "td", "svg", "path"}
    assert {one.tag for one in tree.iter()} <= allowed
    for one in tree.iter():
        assert not {name for name in one.attrib if name.startswith("on") or name in ("href", "src", "class", "id")}
        assert "url(" not in one.get("style", "")
        assert "color" not in one.get("style", "")  # those of the page around it
    return tree


def cells(tree):
    return [["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")]


def words(tree):
    return ["".join(one.itertext()) for one in tree.iter("p")]


def written(path, layers, steps, *records, rotation=None):
    about = {name: QuantityInfo(name, "1", "") for name in ("rotation", "rate_per_step", "weight_norm")}
    if rotation is None:
        rotation = np.outer(np.linspace(0, 0.8, steps), np.linspace(0.5, 1, len(layers)))
    with Writer(path, layers, about) as writer:
        values = {"rotation": rotation, "rate_per_step": rotation / 100, "weight_norm": rotation + 1}
        writer.put(Rows(0, np.arange(steps) * 10, values))
        for record in records:
            writer.put(record)
    return load(path)


def test_a_run_shows_its_state_its_numbers_and_its_layers(tmp_path):
    layers = [LayerInfo("conv.weight", "conv", (8, 3, 3, 3)), LayerInfo("head.weight", "linear", (10, 8))]
    records = [Scalars(s, {"loss": 2.0 - s / 100, "accuracy": s / 100}) for s in (0, 50)]
    run = written(tmp_path / "first", layers, 11, *records, Event(10, "finding", "warning: slow"))
    tree = shown(run)
    assert words(tree) == [
        "first: ended, 2 layers, 11 measured steps from 0 to 100, 1 finding",
        "Logged last: accuracy 0.5, loss 1.5",
    ]
    assert cells(tree) == [
        ["layer", "shape", "rotation, 0 to 0.8", "last rotation", "rotation rate, rad/step", "‖w‖"],
        ["conv.weight", "8 × 3 × 3 × 3", "", "0.4", "0.004", "1.4"],
        ["head.weight", "10 × 8", "", "0.8", "0.008", "1.8"],
    ]
    first, last = (path.get("d") for path in tree.iter("path"))
    assert first.startswith("M1,19L")
    assert first.endswith("L95,10")
    assert last.endswith("L95,1")


def test_a_run_of_many_layers_steps_and_numbers_with_hostile_names_is_small_and_safe(tmp_path):
    names = [(f"{i} {HOSTILE}" * 9).encode("utf-8", "replace").decode() for i in range(1202)]
    layers = [LayerInfo(name, "linear", (10, 8)) for name in names]
    numbers = {f"{i} {HOSTILE}" * 9: 1e-300 for i in range(100)}
    run = written(tmp_path / "&<b>bold", layers, 500, Scalars(0, numbers))
    tree = shown(run)
    assert words(tree)[0].startswith("&<b>bold: ended, 1,202 layers")
    rows = cells(tree)
    assert len(rows) == 1 + markup.FIRST + markup.LAST + 1
    assert rows[1 + markup.FIRST] == ["… 1,172 more …"]
    assert rows[-1][0].startswith("1201 <script")
    assert all(len(row[0]) <= 64 for row in rows)
    assert words(tree)[1].endswith("88 more")


def test_unknown_values_are_gaps_in_a_curve_and_the_last_known_value_is_shown(tmp_path):
    rotation = np.array([[0, 0], [0.5, np.nan], [1.0, np.nan], [np.nan, np.nan]], dtype=np.float32)
    run = written(tmp_path / "run", [LayerInfo(n, "linear", (2, 2)) for n in "ab"], 4, rotation=rotation)
    tree = shown(run)
    assert [path.get("d") for path in tree.iter("path")] == ["M1,19L48,10L95,1", "M1,19"]
    assert [row[3] for row in cells(tree)[1:]] == ["1", "0"]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_hardly_begun_is_shown(tmp_path, steps):
    run = written(tmp_path / "run", [LayerInfo("a", "linear", (2, 2))], steps)
    assert [row[0] for row in cells(shown(run))] == ["layer", "a"]


def test_a_run_whose_rotation_never_was_measured_is_shown(tmp_path):
    with Writer(tmp_path / "run", [LayerInfo("a", "linear", (2, 2))], {"rate": QuantityInfo("rate", "", "")}) as writer:
        writer.put(Rows(0, np.array([0]), {"rate": np.ones((1, 1))}))
    assert cells(shown(load(tmp_path / "run"))) == [["layer", "shape"], ["a", "2 × 2"]]


def test_a_conditioning_shows_its_table():
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    batch = torch.randn(20, 6), torch.arange(20) % 3
    found = gyroscope.condition(model, torch.nn.functional.cross_entropy, batch)
    tree = shown(found)
    heads, lines = found._cells()
    assert cells(tree) == [heads, *lines]
    assert words(tree) == list(found.notes)


def test_a_conditioning_of_many_layers_with_hostile_names_is_small_and_safe():
    kappas = {0.5: 1e300, 1.0: None}
    entries = tuple(
        LayerConditioning(
            f"{i} {HOSTILE}", "linear", 1e-300, 1e-300, 1e-300, kappas, kappas, kappas, 1, 1, 2, 2, 3, 1.0, 1.0, None,
            None, None, None, i,
        )
        for i in range(1000)
    )  # fmt: skip
    untreated = {f"{i} {HOSTILE}": HOSTILE * 100 for i in range(1000)}
    tree = shown(Conditioning(entries, (0.5, 1.0), untreated, (), 1.0, 1))
    assert len(cells(tree)) == 1 + markup.FIRST + 1 + markup.LAST
    assert words(tree)[-1] == "… and 990 more remarks"


def test_a_diagnosis_shows_its_findings():
    findings = tuple(Finding("too_fast", "serious", (), 3, f"{HOSTILE} is too fast.", {}, HOSTILE) for _ in range(5))
    tree = shown(Diagnosis(f"run {HOSTILE}", findings, ("It has 3 measured steps.",)))
    assert cells(tree)[0] == ["severity", "finding", "what to try"]
    assert len(cells(tree)) == 6
    assert words(tree)[-1] == "It has 3 measured steps."


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def step(model, optimizer):
    model(torch.randn(16, 4)).square().sum().backward()
    optimizer.step()


def test_layca_shows_what_turns_how_far_and_what_happens_to_the_rest(model):
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.1), model, others_lr=0.5, multipliers=[1, 0.5])
    norms = [f"{model[i].weight.norm():.3g}" for i in (0, 2)]
    for norm in (["–", "–"], norms):
        tree = shown(optimizer)
        assert words(tree) == [
            "Layca over SGD",
            "Each step turns a layer by arctan ρ, and holds its norm at ‖w₀‖.",
            "2 other parameters are stepped by SGD at lr 0.5.",
        ]
        assert cells(tree) == [
            ["layer", "shape", "ρ", "turns per step", "‖w₀‖"],
            ["0.weight", "8 × 4", "0.1", "5.71°", norm[0]],
            ["2.weight", "2 × 8", "0.05", "2.86°", norm[1]],
        ]
        step(model, optimizer)
    resumed = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.1), model)
    resumed.load_state_dict(optimizer.state_dict())
    assert [row[-1] for row in cells(shown(resumed))] == ["‖w₀‖", *norms]


def test_the_angle_that_layca_shows_is_the_angle_of_a_step(model):
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.1), model)
    before = model[0].weight.detach().clone()
    step(model, optimizer)
    cosine = torch.cosine_similarity(before.double().flatten(), model[0].weight.double().flatten(), dim=0)
    assert cells(shown(optimizer))[1][3] == f"{torch.rad2deg(torch.arccos(cosine)):.3g}°"


def test_other_parameters_that_are_frozen_are_said_to_be(model):
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.1), model, others="frozen")
    assert words(shown(optimizer))[-1] == "2 other parameters are left as they are."
    alone = gyroscope.Layca(torch.optim.SGD([model[0].weight], lr=0.1))
    assert len(words(shown(alone))) == 2


@pytest.mark.parametrize(
    ("relative", "law"),
    [
        (hyperball, "Each step of a layer is ρ‖w‖ long; its norm is then set back to ‖w₀‖."),
        (lars, "Each step of a layer is ρ‖w‖ long; its norm grows by at most 0.0001 ‖w₀‖ per step."),
        (block_normalized, "Each step of a layer is ρ long; its norm is free."),
    ],
)
def test_its_relatives_say_their_own_law(model, relative, law):
    tree = shown(relative(torch.optim.SGD(model.parameters(), lr=0.1), model))
    assert words(tree)[1] == law
    assert "turns per step" not in cells(tree)[0]


def test_layers_in_rows_show_some_of_their_norms(model):
    rows = gyroscope.layers(model, granularity="row")
    optimizer = gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=0.1), rows)
    first = model[0].weight.norm(dim=1)[0]
    step(model, optimizer)
    assert re.fullmatch(rf"{first:.3g}, .*, .* and 5 more", cells(shown(optimizer))[1][-1])


def test_wrappers_that_turn_nothing_are_shown_too(model):
    graft = gyroscope.Graft(torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters()))
    assert words(shown(graft)) == [
        "Graft over SGD",
        "Each parameter moves as far as SGD proposes, in the direction that Adam proposes.",
    ]
    assert cells(shown(graft)) == [["group", "parameters", "lr"], ["0", "4", "0.1"]]
    kfac = KFAC(torch.optim.SGD(model.parameters(), lr=0.1), model, labels="true")
    assert words(shown(gyroscope.Layca(kfac, model)))[0] == "Layca over KFAC over SGD"
    assert words(shown(kfac))[1] == "Preconditions the gradients of 0, 2."
    kfac.close()


def test_an_optimizer_of_many_layers_is_small():
    many = torch.nn.ModuleDict({f"layer{i:04}" + "<&" * 100: torch.nn.Linear(2, 2, bias=False) for i in range(300)})
    optimizer = gyroscope.Layca(torch.optim.SGD(many.parameters(), lr=0.1), many)
    assert len(cells(shown(optimizer))) == 1 + markup.FIRST + 1 + markup.LAST
