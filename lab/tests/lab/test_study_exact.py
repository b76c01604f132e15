import json
from dataclasses import replace

import pytest

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.conditioning import exact as conditioning
from gyroscope_lab.papers.conditioning.exact import STUDIES, verdicts
from gyroscope_lab.training.archive import Archive
from lab.made import NAMES, idx, images, labels, write

SAMPLES = 30
BY_NAME = {study.name: study for study in STUDIES}


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    for scale in conditioning.SAMPLES:
        monkeypatch.setitem(conditioning.SAMPLES, scale, SAMPLES)


def test_every_figure_of_the_conditioning_paper_is_a_study_that_trains_nothing():
    assert list(BY_NAME) == [f"conditioning/{name}" for name in conditioning.PLANS]
    for study in STUDIES:
        for scale in ("smoke", "small", "full"):
            assert list(study.trials(Lab(Archive("nowhere"), scale))) == []


@pytest.mark.parametrize("name", conditioning.PLANS)
def test_a_report_holds_what_was_measured(lab, name):
    report = BY_NAME[f"conditioning/{name}"].run(lab)
    measured = conditioning.spectra(name, scale="smoke")
    assert list(report.verdicts) == verdicts(measured)
    told = {key: value for key, value in report.numbers.items() if key != "seconds"}
    assert told == {key: value for key, value in measured.numbers().items() if key != "seconds"}
    assert (told["samples"], told["settings"]["scale"]) == (SAMPLES, "smoke")
    [table] = report.tables
    at_half = table.columns.index("κ at 50 %")
    for row, line in zip(table.rows, measured.lines, strict=True):
        kappa = line.kappa[measured.p.index(0.5)]
        assert row[0] == line.network
        assert float(row[2]) == pytest.approx(line.largest, rel=5e-3)
        assert row[at_half] == ("∞" if kappa == float("inf") else f"{kappa:.3g}")
        assert row[-1] == f"{line.rank} of {line.dimension}"


def test_the_papers_one_number_stands_beside_the_whole_fisher_matrix(lab):
    rows = BY_NAME["conditioning/fig1"].run(lab).tables[0].rows
    told = {row[:2]: row[3] for row in rows if row[3] is not None}
    assert told == {("plain", "F"): "around 1e-05", ("bn", "F"): "around 1"}


def test_a_report_is_saved_whole(lab, tmp_path):
    study = BY_NAME["conditioning/fig1"]
    written = study.save(lab, study.run(lab), tmp_path)
    assert {path.name for path in written} == {"figure.png", "figure.svg", "README.md", "result.json"}
    assert json.loads((tmp_path / "conditioning/fig1/result.json").read_text())["numbers"]["data"] == "digits"


def test_mnist_is_taken_where_other_studies_take_it_and_digits_stand_in_elsewhere(lab, tmp_path, monkeypatch):
    write(tmp_path, **{NAMES[0]: idx(images(40)), NAMES[1]: idx(labels(40))})
    study = BY_NAME["conditioning/a3"]

    def taken(**settings):
        return study.conclude(replace(lab, **settings)).numbers["data"]

    assert taken(scale="small", data=tmp_path) == "MNIST"
    # The command names a folder, "data", whether it is there or not.
    assert {taken(scale=scale, data=tmp_path / "none") for scale in ("smoke", "small")} == {"digits"}
    assert taken(scale="smoke", data=tmp_path) == "digits"
    with pytest.raises(LabError, match="to look for MNIST in"):
        taken(scale="full", data=tmp_path / "none")
    monkeypatch.setenv("GYROSCOPE_DATA", str(tmp_path))
    assert taken(scale="full") == "MNIST"
    assert taken() == "digits"
