import json
from dataclasses import replace
from math import inf

import numpy as np
import pytest
import torch

from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.conditioning.exact import PLANS, Spectra, draw, spectra, verdicts
from gyroscope_lab.papers.conditioning.exact_spectra import (
    Choices,
    Line,
    Plan,
    center_crop,
    exact_spectra,
    measure,
    network,
    resize,
    small_images,
)
from gyroscope_lab.papers.conditioning.sensitivity import sensitivity
from lab.made import NAMES, idx, images, labels, write

FEW = Choices(samples=30)


@pytest.fixture(scope="module")
def studies():
    """All six figures on 30 digits: there are fewer gradients than weights, so that whole matrices are cheap."""
    return {figure: spectra(figure, choices=FEW) for figure in PLANS}


def literal(model, x, y, weights, *, matrix):
    """F or M one sample, one label and one gradient at a time, over the weights one after another."""
    parameters = [model.get_parameter(name) for name in weights]
    total = torch.zeros(sum(p.numel() for p in parameters), sum(p.numel() for p in parameters), dtype=torch.float64)
    log_q = model(x).log_softmax(1)
    for i, row in enumerate(log_q):
        for label in range(len(row)):
            share = row[label].exp().item() if matrix == "F" else float(label == y[i])
            if share > 0:
                found = torch.autograd.grad(-row[label], parameters, retain_graph=True)
                gradient = torch.cat([g.flatten() for g in found])
                total += share * torch.outer(gradient, gradient)
    return total / len(x)


@pytest.mark.parametrize(("matrix", "count"), [("F", 4), ("F", 50), ("M", 20)], ids=["wide F", "tall F", "M"])
@pytest.mark.parametrize("kind", ["plain", "frozen", "batch", "affine"])
def test_exact_spectra_are_those_of_the_definition_written_out(kind, matrix, count):
    """With 471 weights, 40 gradients are decomposed through their Gram matrix, and 500 gradients are not."""
    given = small_images(count)
    choices = Choices(
        statistics="batch" if kind == "batch" else "frozen",
        affine=kind == "affine",
        gain="uniform" if kind == "affine" else "ones",
    )
    model = network("mlp-3x3", given, batch_norm=kind != "plain", seed=0, choices=choices)
    weights = [f"linear{k}.weight" for k in (1, 2, 3)]
    labels_ = {"F": "model", "M": "true"}[matrix]
    found = exact_spectra(model, given.x, given.y, labels=labels_, layers=weights, whole=True)
    assert list(found) == [None, *weights]
    expected = literal(model, given.x, given.y, weights, matrix=matrix)
    blocks = dict(zip(weights, (slice(0, 432), slice(432, 441), slice(441, 471)), strict=True))
    for name in found:
        part = slice(None) if name is None else blocks[name]
        values = torch.linalg.eigvalsh(expected[part, part]).flip(0).clamp(min=0).numpy()
        np.testing.assert_allclose(found[name].full(), values, rtol=1e-9, atol=1e-13 * values[0])


def test_blocks_alone_are_the_blocks_of_the_whole():
    given = small_images(12)
    model = network("mlp-3x6", given, batch_norm=True, seed=0)
    both = [
        exact_spectra(model, given.x, given.y, labels="model", layers=["linear2.weight"], whole=whole)
        for whole in (False, True)
    ]
    assert list(both[0]) == ["linear2.weight"]
    np.testing.assert_allclose(both[0]["linear2.weight"].full(), both[1]["linear2.weight"].full(), rtol=1e-12)


@pytest.mark.parametrize("options", [{}, {"affine": True, "gain": "uniform"}], ids=["plain gain", "uniform gain"])
def test_frozen_statistics_give_the_outputs_of_training_mode(options):
    given = small_images(25)
    frozen, batch = (
        network("mlp-8x24", given, batch_norm=True, seed=3, choices=Choices(statistics=statistics, **options))
        for statistics in ("frozen", "batch")
    )
    assert not frozen.training
    assert batch.training
    torch.testing.assert_close(frozen(given.x), batch(given.x), rtol=1e-9, atol=1e-12)
    # One image alone gives what it gives among the others: its loss depends on it alone.
    torch.testing.assert_close(frozen(given.x[:1]), batch(given.x)[:1], rtol=1e-9, atol=1e-12)


def test_measuring_leaves_the_network_as_it_was():
    given = small_images(20)
    model = network("mlp-3x6", given, batch_norm=True, seed=0, choices=Choices(statistics="batch"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure(model, given, Plan("mlp-3x6", layers=(2,), approximate=True), name="bn")
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_statistics_are_matters_with_batch_normalization_only():
    frozen, batch = (spectra("fig1", choices=replace(FEW, statistics=statistics)) for statistics in ("frozen", "batch"))
    assert frozen.find("plain") == batch.find("plain")
    assert frozen.find("bn").largest != pytest.approx(batch.find("bn").largest, rel=0.1)


def test_each_figure_shows_the_matrices_the_paper_shows(studies):
    shown = {name: sorted({line.symbol for line in study.lines}) for name, study in studies.items()}
    eight, four = [f"_{k}" for k in range(1, 9)], ["", *(f"_{k}" for k in range(1, 5))]
    assert shown["fig1"] == ["F", "F_3", "F_6"]
    assert shown["fig2"] == [f"F{k}" for k in eight]
    assert shown["a1"] == ["F", *(f"F{k}" for k in eight)]
    assert shown["a2"] == ["M", *(f"M{k}" for k in eight)]
    assert shown["a3"] == shown["a4"] == sorted(f"{matrix}{k}" for matrix in "FM" for k in four)
    assert {name: study.model for name, study in studies.items()} == {
        "fig1": "mlp-8x24", "fig2": "mlp-8x24", "a1": "mlp-8x24", "a2": "mlp-8x24", "a3": "mlp-4x24", "a4": "mlp-4x36"
    }  # fmt: skip
    for name, study in studies.items():
        kinds = {(line.network, line.approximate) for line in study.lines}
        assert kinds == {
            (net, near) for net in ("plain", "bn") for near in ({False, True} if name == "fig2" else {False})
        }


def test_dimensions_are_the_numbers_of_weights(studies):
    for name, size in (("a1", 7152), ("a3", 4848), ("a4", 8136)):
        lines = [line for line in studies[name].lines if line.network == "bn" and line.matrix == "F"]
        assert lines[0].dimension == sum(line.dimension for line in lines[1:]) == size


def test_figure_1_and_the_blocks_of_figure_2_are_part_of_figure_a1(studies):
    assert set(studies["fig1"].lines) < set(studies["a1"].lines)
    exact = {line for line in studies["fig2"].lines if not line.approximate}
    assert exact < set(studies["a1"].lines)


def test_no_block_is_steeper_than_the_whole_matrix(studies):
    for study in studies.values():
        for line in study.lines:
            if line.layer is not None and study.figure != "fig2":
                assert line.largest <= study.find(line.network, line.matrix).largest * (1 + 1e-9)


def test_condition_numbers_begin_at_one_or_above_and_grow_with_p(studies):
    for study in studies.values():
        for line in study.lines:
            kappa = np.array(line.kappa)
            assert len(kappa) == len(study.p)
            assert kappa[0] >= 1
            assert (kappa[1:] >= kappa[:-1]).all()
            assert np.isfinite(kappa).sum() == sum(
                int(np.ceil(round(p * line.dimension, 6))) <= line.rank for p in study.p
            )


def test_second_moments_have_a_gradient_a_sample_and_fisher_nine(studies):
    assert studies["a2"].find("bn", "M").rank == 30
    assert studies["a1"].find("bn").rank == 30 * 9


def test_the_approximation_is_exact_where_all_images_are_the_same():
    given = small_images(12)
    same = replace(given, x=given.x[:1].repeat(12, 1, 1, 1))
    plan = Plan("mlp-4x24", ("M",), whole=False, layers=(1, 2, 3, 4), approximate=True)
    lines = measure(network("mlp-4x24", same, batch_norm=False, seed=0), same, plan, name="plain")
    for exact, near in zip(lines[:4], lines[4:], strict=True):
        assert (exact.layer, near.layer, near.approximate) == (near.layer, exact.layer, True)
        assert near.largest == pytest.approx(exact.largest, rel=1e-9)
        assert (near.rank, near.dimension) == (exact.rank, exact.dimension)


def test_batch_normalization_lifts_the_gradients_and_the_conditioning_on_digits(studies):
    """The paper's two verdicts, in miniature."""
    study = studies["a1"]
    assert 1e-6 < study.find("plain").largest < 1e-4
    assert study.find("bn").largest > 1e4 * study.find("plain").largest
    # With 30 images most eigenvalues are zero in both; the first are not.
    for layer in range(2, 9):
        plain, bn = (study.find(name, layer=layer) for name in ("plain", "bn"))
        assert bn.kappa[0] < plain.kappa[0]


def test_a_seed_decides_and_nothing_else(studies):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again, other = spectra("fig1", choices=FEW), spectra("fig1", choices=FEW, seed=1)
    assert again.lines == studies["fig1"].lines
    assert other.find("bn").largest != again.find("bn").largest
    assert torch.equal(torch.get_rng_state(), before)


def test_digits_stand_in_and_the_study_says_so(studies, tmp_path):
    assert {study.data for study in studies.values()} == {"digits"}
    content = {NAMES[0]: idx(images(40)), NAMES[1]: idx(labels(40))}
    study = spectra("fig2", data=write(tmp_path, **content), choices=FEW)
    assert (study.data, study.samples) == ("MNIST", 30)
    assert "30 images of MNIST" in draw(study).get_suptitle()
    assert study.numbers()["data"] == "MNIST"


def test_images_of_mnist_are_cropped_then_resized(tmp_path):
    folder = write(tmp_path)
    found = small_images(100, data=folder, crop=24, normalization="unit")
    raw = torch.tensor(images(7)[:, None] / np.float32(255)).double()
    expected = resize(center_crop(raw, 24), 12)
    order = [int(y) for y in found.y]
    assert sorted(order) == list(range(7))
    torch.testing.assert_close(found.x, expected[order], rtol=1e-6, atol=1e-7)
    assert found.x.dtype == torch.float64


def test_fewer_images_are_the_first_of_more_and_the_same_every_time():
    torch.manual_seed(0)
    more = small_images(50, normalization="unit")
    torch.manual_seed(1)
    fewer = small_images(20, normalization="unit")
    assert torch.equal(more.x[:20], fewer.x)
    assert torch.equal(more.y[:20], fewer.y)
    assert len(small_images(5000).x) == 1797


def test_pixels_are_normalized_as_said():
    unit, centered, standard = (
        small_images(50, normalization=normalization).x for normalization in ("unit", "centered", "standard")
    )
    assert unit.min() >= 0
    assert 0.9 < unit.max() <= 1
    torch.testing.assert_close(centered, unit - unit.mean())
    torch.testing.assert_close(standard, centered / unit.std(correction=0))


def test_the_numbers_are_strict_json(studies):
    study = studies["fig1"]
    held = json.loads(json.dumps(study.numbers(), allow_nan=False))
    assert held["settings"]["normalization"] == "centered"
    assert len(held["lines"]) == len(study.lines) == 6
    for line, row in zip(study.lines, held["lines"], strict=True):
        assert row["largest"] == line.largest
        assert [inf if k == "inf" else k for k in row["kappa"]] == list(line.kappa)
    assert inf in study.lines[0].kappa


def test_each_figure_has_a_panel_of_largest_eigenvalues_and_one_a_matrix(studies):
    for name, study in studies.items():
        figure = draw(study)
        shown = [ax.get_title() for ax in figure.axes if ax.axison]
        groups = [m for m in "FM" if any(line.matrix == m for line in study.lines)]
        expected = []
        for matrix in groups:
            symbols = dict.fromkeys(line.symbol for line in study.lines if line.matrix == matrix)
            expected += [r"$\lambda_{\max}$", *(f"${symbol}$" for symbol in sorted(symbols))]
        assert shown == expected, name


def test_approximations_are_dashed_and_the_papers_numbers_dotted(studies):
    def legend(study):
        return [text.get_text() for text in draw(study).legends[0].get_texts()]

    assert [r"$\Sigma_x\otimes\Sigma_{\nabla h}$" in legend(studies[name]) for name in ("fig1", "fig2")] == [
        False,
        True,
    ]
    paper = r"$\lambda_{\max}$ in the paper, “around”"
    assert [paper in legend(studies[name]) for name in ("fig1", "fig2", "a1", "a2", "a3")] == [
        True, False, True, False, False
    ]  # fmt: skip
    panel = next(ax for ax in draw(studies["fig2"]).axes if ax.get_title() == "$F_3$")
    drawn = [line for line in panel.lines if line.get_marker() == "None" and len(line.get_xdata()) == 20]
    assert sorted(line.get_linestyle() for line in drawn) == ["-", "-", "--", "--"]


def test_a_matrix_that_is_zero_is_drawn_as_a_gap():
    dead = Line("plain", "F", None, False, 0.0, (None, None), 0, 4)
    alive = Line("bn", "F", None, False, 1.0, (2.0, inf), 2, 4)
    study = Spectra("fig1", "mlp-8x24", "digits", 9, {}, (0.5, 1.0), (dead, alive), 0.0)
    draw(study).draw_without_rendering()
    assert study.numbers()["lines"][0]["kappa"] == [None, None]
    assert "at 1 of 1 shares p" in [verdict.here for verdict in verdicts(study)]


def made(*, plain=1e-5, bn=1.0, plain_kappa=(2.0, 9.0), bn_kappa=(1.5, 5.0)):
    lines = (
        Line("plain", "F", None, False, plain, plain_kappa, 2, 2),
        Line("bn", "F", None, False, bn, bn_kappa, 2, 2),
    )
    return Spectra("fig1", "mlp-8x24", "digits", 9, {}, (0.5, 1.0), lines, 0.0)


@pytest.mark.parametrize(
    ("study", "holds"),
    [
        (made(), [True, True, True]),
        (made(plain=1.1e-4), [False, True, True]),
        (made(plain=0.9e-6), [False, True, True]),
        (made(bn=40.0), [True, False, True]),
        (made(bn_kappa=(1.5, 9.0)), [True, True, False]),
        (made(plain_kappa=(2.0, inf), bn_kappa=(1.5, inf)), [True, True, True]),
        (made(bn_kappa=(1.5, inf)), [True, True, False]),
    ],
    ids=["all", "steep", "flat", "bn", "worse", "both infinite", "bn infinite"],
)
def test_a_verdict_holds_when_it_does(study, holds):
    assert [verdict.holds for verdict in verdicts(study)] == holds


def test_approximations_are_compared_by_their_ratios():
    def line(approximate, largest, kappa):
        return Line("bn", "F", 3, approximate, largest, kappa, 2, 2)

    near = Spectra(
        "fig2", "mlp-8x24", "digits", 9, {}, (0.5, 1.0), (line(False, 2.0, (2.0, inf)), line(True, 3.0, (9.0, 8.0))), 0
    )
    largest, kappa = verdicts(near)[-2:]
    assert largest.here.startswith("1.5 times the exact one")
    assert largest.holds
    assert kappa.here == "4.5 times the exact one in the middle, 4.5 to 4.5"
    assert not kappa.holds


def test_a_line_that_is_not_there_is_refused_with_those_that_are(studies):
    with pytest.raises(LabError, match=r"fig1 has no line \('plain', 'M', None, False\); it has .*'F_6'"):
        studies["fig1"].find("plain", "M")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"choices": Choices(samples=1)}, "`samples` must be 2 or more, got 1: batch normalization needs two images"),
        ({"data": "nowhere"}, "There is no folder nowhere to look for MNIST in"),
    ],
    ids=["samples", "data"],
)
def test_images_that_do_not_exist_are_rejected(options, says):
    with pytest.raises(LabError, match=says):
        spectra("fig1", **options)


@pytest.mark.parametrize(
    ("name", "given", "accepted"),
    [
        ("statistics", "running", "'frozen' or 'batch'"),
        ("approximate_labels", "model", "'true' or 'sampled'"),
        ("normalization", "none", "'unit' or 'centered' or 'standard'"),
    ],
)
def test_choices_that_do_not_exist_are_rejected(name, given, accepted):
    with pytest.raises(LabError, match=f"`{name}` must be {accepted}, got '{given}'."):
        Choices(**{name: given})


def test_sensitivity_gives_what_the_study_does_and_writes_it(tmp_path, studies):
    changes = {"plain": [{}], "bn": [{}, {"gain": "uniform", "affine": True}]}
    rows = sensitivity(samples=30, seeds=[0, 1], changes=changes, out=tmp_path)
    for row in rows[:2]:
        expected = studies["fig1"].find(row.network)
        assert row.values["largest F"][0] == pytest.approx(expected.largest, rel=1e-3)
        for layer in (3, 6):
            block = studies["fig1"].find(row.network, layer=layer)
            assert row.values[f"largest F_{layer}"][0] == pytest.approx(block.largest, rel=1e-9)
            assert row.values[f"kappa_50 F_{layer}"][0] == pytest.approx(block.kappa[9], rel=1e-6)
    held = json.loads((tmp_path / "sensitivity.json").read_text())
    assert [row["change"] for row in held["rows"]] == [{}, {}, {"gain": "uniform", "affine": True}]
    assert held["rows"][0]["values"]["largest F"] == rows[0].values["largest F"]
    assert rows[1].values["largest F"] != rows[2].values["largest F"]
