"""The gallery: every picture has its file and caption, and what a caption says is found again when it is made anew."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

FOLDER = Path(__file__).parents[2] / "docs" / "gallery"
PAGE = (FOLDER / "index.md").read_text()
CAPTIONS = {
    re.search(r"\]\((\w+)\.png\)", section).group(1): section
    for section in re.split("^### ", PAGE, flags=re.MULTILINE)[1:]
}


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    import make

    return make


def test_every_picture_has_a_file_and_a_caption_in_order(make):
    assert list(CAPTIONS) == list(make.PICTURES)
    assert {file.stem for file in FOLDER.glob("*.png")} == set(make.PICTURES)
    assert len(CAPTIONS) == 12


@pytest.mark.parametrize("name", CAPTIONS)
def test_a_caption_says_what_you_see_why_and_what_to_do_and_links_the_finding(make, name):
    caption, kind = CAPTIONS[name], make.PICTURES[name].finds
    assert re.findall(r"\*\*(.*?)\*\*", caption) == ["What you see.", "Why.", "What to do."]
    if kind not in (None, "equilibrium"):  # a note, which has a page of its own
        assert f"(../diagnosis.md#{kind.replace('_', '-')})" in caption
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", caption)
    assert len(targets) >= 2, "the picture, and a page to read on"
    assert [target for target in targets if not (FOLDER / target).exists()] == []


@pytest.mark.parametrize("name", CAPTIONS)
def test_a_picture_is_small_and_not_too_wide(name):
    file = FOLDER / f"{name}.png"
    assert file.stat().st_size < 60_000
    with Image.open(file) as image:
        assert image.width <= 1100


def test_pictures_are_made_again_and_their_claims_hold(make, tmp_path):
    make.main(["not_finite", "fine_tuning", "--out", str(tmp_path)])
    for name in ("not_finite", "fine_tuning"):
        with Image.open(tmp_path / f"{name}.png") as new, Image.open(FOLDER / f"{name}.png") as kept:
            assert new.size == kept.size


def test_a_picture_whose_finding_is_another_is_not_written(make, tmp_path, monkeypatch):
    monkeypatch.setitem(make.PICTURES, "not_finite", replace(make.PICTURES["not_finite"], finds="frozen"))
    with pytest.raises(AssertionError, match="frozen is not the first finding of not_finite"):
        make.main(["not_finite", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())
