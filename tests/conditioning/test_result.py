"""The result of an analysis: rows, a data frame, and tables that fit and lose nothing."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import re
import sys
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import gyroscope
from gyroscope.conditioning import Conditioning, LayerConditioning, Spectra, Spectrum
from gyroscope.conditioning.result import flat, kappa, number, percent, quantity, share
from gyroscope.errors import ConditioningError, MissingExtraError

P = (0.1, 0.25, 0.5, 0.75, 1.0)
KEYS = [
    "layer", "kind", "lambda_x", "lambda_g", "lambda_f", "kappa_x", "kappa_g", "kappa_f", "rank_x", "rank_g",
    "dimension_x", "dimension_g", "samples", "weight_norm", "weight_spectral", "gradient_spectral", "domination",
    "dying", "full",
]  # fmt: skip


class Odd(nn.Module):
    """Layers with brackets in their names, dead, of low rank, not treated and not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = ("a[0:3]", "[red]", "[/]", "[bold]x[/bold]", "\\[b]")
        self.parts = nn.ModuleDict({name: nn.Linear(5, 5) for name in names})
        self.first, self.unused = nn.Linear(4, 5), nn.Linear(5, 5)
        self.pairs = nn.Bilinear(5, 5, 3)
        with torch.no_grad():
            self.parts["[red]"].weight.zero_()
            self.parts["[red]"].bias.fill_(-1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts.values():
            x = x + part(x).relu()
        return self.pairs(x, x)


X, Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3
SUM = "the loss is a sum over the batch; it was divided by the number of samples"


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


@pytest.fixture(scope="module")
def odd() -> Conditioning:
    return gyroscope.condition(Odd(), summed, (X, Y))


@pytest.fixture(scope="module")
def plain() -> Conditioning:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return gyroscope.condition(net, F.cross_entropy, (X, Y), spectra=True)


def made(**changes: Any) -> LayerConditioning:
    given: dict[str, Any] = {
        "layer": "0.weight", "kind": "linear", "lambda_x": 2.0, "lambda_g": 3.0, "lambda_f": 6.0,
        "kappa_x": {0.5: 2.0, 1.0: math.inf}, "kappa_g": {0.5: None, 1.0: None}, "kappa_f": {0.5: 1.0, 1.0: 12345.0},
        "rank_x": 3, "rank_g": 0, "dimension_x": 4, "dimension_g": 5, "samples": 6, "weight_norm": 1.5,
        "weight_spectral": 1.25, "gradient_spectral": None, "domination": None, "dying": None, "full": 0.125,
        "position": 0,
    }  # fmt: skip
    return LayerConditioning(**given | changes)


def result(*entries: LayerConditioning, p: tuple[float, ...] = (0.5, 1.0), **changes: Any) -> Conditioning:
    given: dict[str, Any] = {"untreated": {}, "notes": (), "loss": 1.0, "batches": 1}
    return Conditioning(entries or (made(),), p, **given | changes)


def rendered(found: Conditioning, width: int, *, color: bool = False) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system="truecolor" if color else None, force_terminal=color).print(found)
    return file.getvalue()


def test_rows_have_these_keys_in_this_order_and_these_types(odd: Conditioning, plain: Conditioning) -> None:
    for found in (odd, plain):
        for row in found.rows():
            assert list(row) == KEYS
            assert all(type(row[key]) is str for key in ("layer", "kind"))
            for key in ("lambda_x", "lambda_g", "lambda_f", "weight_norm", "weight_spectral"):
                assert type(row[key]) is float, key
            for key in ("rank_x", "rank_g", "dimension_x", "dimension_g", "samples"):
                assert type(row[key]) is int, key
            for key in ("gradient_spectral", "domination", "dying", "full"):
                assert row[key] is None or type(row[key]) is float, key
            for key in ("kappa_x", "kappa_g", "kappa_f"):
                assert tuple(row[key]) == P
                assert all(type(one) is float for one in row[key])
                assert all(value is None or (type(value) is float and value >= 1) for value in row[key].values())
            for key in ("dying", "full"):
                assert row[key] is None or 0 <= row[key] <= 1


def test_rows_are_what_json_can_hold_but_for_infinity(plain: Conditioning, odd: Conditioning) -> None:
    for found in (plain, odd):
        finite = [
            {k: {p: None if v == math.inf else v for p, v in value.items()} if isinstance(value, dict) else value
             for k, value in row.items()}
            for row in found.rows()
        ]  # fmt: skip
        again = json.loads(json.dumps(finite, allow_nan=False))
        assert [row["lambda_f"] for row in again] == [row["lambda_f"] for row in found.rows()]
    assert any(v == math.inf for row in odd.rows() for v in row["kappa_f"].values() if v is not None)


def test_rows_are_copies(plain: Conditioning) -> None:
    row = plain.rows()[0]
    row["kappa_x"].clear()
    row["layer"] = "other"
    assert plain.rows()[0]["layer"] == "0.weight"
    assert plain.rows()[0]["kappa_x"].keys() == set(P)


def test_a_result_is_a_mapping_of_names(plain: Conditioning) -> None:
    assert list(plain) == list(plain.layers) == ["0.weight", "2.weight"]
    assert len(plain) == 2
    assert "2.weight" in plain
    assert "1.weight" not in plain
    assert 0 not in plain
    assert [plain[name] for name in plain] == list(plain.entries)
    assert plain["2.weight"].layer == "2.weight"


def test_a_layer_that_is_not_there_is_an_error_in_words(odd: Conditioning) -> None:
    with pytest.raises(
        ConditioningError, match=re.escape("There is no layer 'zzz'; the layers are parts.a[0:3].weight")
    ):
        odd["zzz"]
    with pytest.raises(ConditioningError, match="There is no layer 0;"):
        odd[0]  # type: ignore[index]
    with pytest.raises(ConditioningError, match=r"'pairs.weight' was not treated: a Bilinear has two inputs\."):
        odd["pairs.weight"]


def test_what_was_not_treated_is_named_with_the_reason(odd: Conditioning) -> None:
    assert odd.untreated.keys() == {"unused.weight", "pairs.weight"}
    assert not odd.untreated.keys() & set(odd.layers)
    assert odd.notes == (SUM,)
    assert odd.p == P


def test_spectra_are_there_if_asked_for(plain: Conditioning, odd: Conditioning) -> None:
    assert odd.spectra is None
    assert plain.spectra is not None
    assert list(plain.spectra) == list(plain.layers)
    for row in plain.rows():
        spectra = plain.spectra[row["layer"]]
        assert isinstance(spectra, Spectra)
        for spectrum, letter in ((spectra.x, "x"), (spectra.g, "g")):
            assert isinstance(spectrum, Spectrum)
            assert spectrum.largest == row[f"lambda_{letter}"]
            assert spectrum.rank == row[f"rank_{letter}"]
            assert spectrum.dimension == row[f"dimension_{letter}"]
            assert {p: spectrum.kappa(p) for p in P} == row[f"kappa_{letter}"]


def test_spectra_without_p_have_ranks() -> None:
    torch.manual_seed(0)
    found = gyroscope.condition(nn.Linear(4, 3), F.cross_entropy, (X, Y), p=(), spectra=True)
    assert found.spectra is not None
    assert found.entries[0].rank_x == found.spectra["weight"].x.rank == 4


@pytest.mark.parametrize("again", [copy.deepcopy, lambda found: pickle.loads(pickle.dumps(found))])
def test_results_are_copied_and_pickled(plain: Conditioning, again: Any) -> None:
    other = again(plain)
    assert other.rows() == plain.rows()
    assert plain.spectra is not None
    for name, spectra in other.spectra.items():
        np.testing.assert_array_equal(spectra.x.values, plain.spectra[name].x.values)
    assert str(other) == str(plain)


def test_a_data_frame_has_a_column_for_each_number(odd: Conditioning) -> None:
    frame = odd.to_pandas()
    expected = [key for key in KEYS if not key.startswith("kappa")]
    at = expected.index("rank_x")
    expected[at:at] = [f"kappa_{f}_p{p}" for f in "xgf" for p in ("10", "25", "50", "75", "100")]
    assert [frame.index.name, *frame.columns] == expected
    assert list(frame.index) == list(odd.layers)
    for row in odd.rows():
        for name in ("lambda_f", "samples", "weight_norm"):
            assert frame.loc[row["layer"], name] == row[name]
        for p in P:
            value, found = row["kappa_f"][p], frame.loc[row["layer"], f"kappa_f_p{100 * p:g}"]
            assert np.isnan(found) if value is None else found == value
    kappas = [name for name in frame.columns if name.startswith("kappa")]
    assert all(frame[name].dtype == np.float64 for name in [*kappas, "lambda_x", "weight_norm"])


def test_numbers_that_are_not_known_are_missing_in_a_data_frame() -> None:
    frame = result(made(), made(layer="1.weight", domination=0.5, gradient_spectral=1.0, dying=0.25)).to_pandas()
    assert frame["domination"].isna().tolist() == [True, False]
    assert frame["dying"].isna().tolist() == [True, False]
    assert frame["kappa_g_p50"].isna().all()
    assert isinstance(frame, pandas.DataFrame)


def test_without_pandas_or_rich_the_extra_is_named(plain: Conditioning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(MissingExtraError, match=r"gyroscope\[export\]"):
        plain.to_pandas()
    with pytest.raises(MissingExtraError, match=r"gyroscope\[cli\]"):
        plain.table()
    assert "0.weight" in str(plain)


WIDTHS = [60, 80, 200]


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_names_with_brackets_are_shown_as_they_are(odd: Conditioning, width: int, color: bool) -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", rendered(odd, width, color=color))
    for name in odd.layers:
        assert name in text
        assert name in str(odd)
    assert {"parts.a[0:3].weight", "parts.[/].weight", "parts.[red].weight"} <= set(odd.layers)


def shown(found: Conditioning) -> list[str]:
    """Every number of the table, as it is written."""
    lines = str(found).splitlines()[1 : len(found) + 1]
    return [cell for line in lines for cell in line.split()[1:]]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_table_fits_and_loses_no_number(odd: Conditioning, width: int) -> None:
    text = rendered(odd, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text
    cells = [cell for line in lines for cell in line.split()]
    for name in odd.layers:
        rows = [line.split() for line in lines if line.startswith(name)]
        assert [cell for row in rows for cell in row[1:]] == str(odd).splitlines()[1 + odd.layers.index(name)].split()[
            1:
        ]
    for cell in shown(odd):
        assert cell in cells
    for head in ("Σx", "Σ∇h", "κ50%", "κ100%", "‖W‖", "σ∇W/σW", "dying", "full", "rank"):
        assert head in text


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_undefined_infinite_untreated_or_noted_is_said(odd: Conditioning, width: int) -> None:
    for text in (rendered(odd, width), str(odd)):
        flowing = " ".join(text.split())
        assert "undefined" in text
        assert "∞" in text
        assert "not treated: pairs.weight: a Bilinear has two inputs" in flowing
        assert f"not treated: unused.weight: {odd.untreated['unused.weight']}" in flowing
        assert SUM in flowing


@pytest.mark.parametrize("width", [20, 60])
def test_a_name_longer_than_the_table_is_folded(width: int) -> None:
    name = "encoder.layers.11.blocks.3.attention.self.query.projection.dense.weight"
    text = rendered(result(made(layer=name)), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "1.23e+04" in text
    folded = [line.split()[0] for line in text.splitlines() if line.strip() and line.split()[0] in name]
    assert name in "".join(folded)


def test_a_note_with_brackets_is_shown_as_it_is() -> None:
    found = result(notes=("see [link] and \\[this]",), untreated={"a[0]": "it is [not] used"})
    text = rendered(found, 80)
    assert "see [link] and \\[this]" in text
    assert "not treated: a[0]: it is [not] used" in text


def test_no_p_hides_condition_numbers_and_ranks() -> None:
    torch.manual_seed(0)
    found = gyroscope.condition(nn.Linear(4, 3), F.cross_entropy, (X, Y), p=())
    for text in (str(found), rendered(found, 200)):
        assert "κ" not in text
        assert "rank" not in text
        assert "None" not in text
        assert "λmax" in text
    frame = found.to_pandas()
    assert not [name for name in frame.columns if name.startswith("kappa")]


def test_a_table_of_many_p_shows_the_middle_and_the_last(plain: Conditioning) -> None:
    heads = str(plain).splitlines()[0]
    assert re.findall(r"κ([\d.]+)%", heads) == ["50", "100"] * 3
    few = result(made(kappa_x={1.0: 1.0, 0.125: 2.0}, kappa_g={1.0: 1.0, 0.125: 2.0}, kappa_f={1.0: 1.0, 0.125: 2.0}),
                 p=(1.0, 0.125))  # fmt: skip
    assert re.findall(r"κ([\d.]+)%", str(few).splitlines()[0]) == ["12.5", "100"] * 3


def test_columns_of_the_plain_table_are_aligned(odd: Conditioning) -> None:
    lines = str(odd).splitlines()[: len(odd) + 1]
    assert len({len(line) for line in lines}) == 1


def test_numbers_in_words() -> None:
    assert [number(v) for v in (0.0, 1.0, 1234.5, 1e-30, math.inf, math.nan, None)] == [
        "0", "1", "1.23e+03", "1e-30", "inf", "–", "–",
    ]  # fmt: skip
    assert [kappa(v) for v in (None, math.inf, 1.0)] == ["undefined", "∞", "1"]
    assert [share(v) for v in (None, 0.0, 1.0, 0.12345)] == ["–", "0%", "100%", "12.3%"]
    assert [percent(p) for p in (0.1, 0.125, 1 / 3, 0.29, 1.0)] == ["10", "12.5", "33.33333333", "29", "100"]
    assert quantity("kappa_x", 0.07) == "kappa_x_p7"
    row = flat({"kappa_x": {0.5: None, 1.0: math.inf}, "layer": "a"})
    assert list(row) == ["kappa_x_p50", "kappa_x_p100", "layer"]
    assert math.isnan(row["kappa_x_p50"])
    assert row["kappa_x_p100"] == math.inf
