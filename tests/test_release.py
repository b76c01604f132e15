"""A release: one version everywhere, a description that a package index can show, and clean archives."""

import io
import re
import sys
import tarfile
import tomllib
import types
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

import gyroscope
import gyroscope_lab

ROOT = Path(__file__).parents[1]


def loaded(name):
    loader = SourceFileLoader(name.partition(".")[0], str(ROOT / "tools" / name))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def found(pattern, file):
    return re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)


def test_both_packages_the_citation_and_the_changelog_have_one_version():
    version = gyroscope.__version__
    assert gyroscope_lab.__version__ == version
    assert found(r"^version: (.+)$", "CITATION.cff") == [version]
    assert found(r"^## \[(\d.*?)\] - ", "CHANGELOG.md")[0] == version
    laboratory = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    assert f"gyroscope[cli,figures,curvature]=={version}" in laboratory["dependencies"]


def test_the_version_of_a_package_is_written_once():
    for folder in ("", "lab"):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
        assert "version" in project["project"]["dynamic"]
        assert (ROOT / folder / project["tool"]["hatch"]["version"]["path"]).exists()


def test_both_packages_claim_the_same_pythons_and_the_same_license():
    library, laboratory = (tomllib.loads((ROOT / f / "pyproject.toml").read_text())["project"] for f in ("", "lab"))
    for field in ("requires-python", "license", "authors"):
        assert library[field] == laboratory[field]
    pythons = [[c for c in one["classifiers"] if c.startswith("Programming")] for one in (library, laboratory)]
    assert pythons[0] == pythons[1]
    assert (ROOT / "LICENSE").read_text() == (ROOT / "lab" / "LICENSE").read_text()


@pytest.fixture
def hook(monkeypatch):
    names = ["hatchling", "hatchling.metadata", "hatchling.metadata.plugin", "hatchling.metadata.plugin.interface"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[names[-1]].MetadataHookInterface = object  # hatchling is there only while packages are built
    return loaded("readme_hook.py")


def test_the_description_of_the_package_has_no_relative_link_or_image(hook):
    text = hook.shown((ROOT / "README.md").read_text())
    assert re.findall(r"\]\((?!https?:|mailto:)[^)]*\)|<img", text) == []
    assert "# Gyroscope" in text
    assert "gyroscope.watch(model, optimizer" in text


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("a\n\n![x](docs/x.png)\n\nb\n", "a\n\nb\n"),
        ("a\n\n![x](docs/x.png)\n\n*A caption\nof `two` lines.*\n\nb\n", "a\n\nb\n"),
        ("a\n\n![x](docs/x.png)\n\n**Bold** b\n", "a\n\n**Bold** b\n"),
        ('a\n\n<p align="center">\n<img src="x.png">\n</p>\n\nb\n', "a\n\nb\n"),
        ("see [the page](docs/x.md#y) and [PyPI](https://pypi.org)\n", "see the page and [PyPI](https://pypi.org)\n"),
    ],
)
def test_relative_images_are_left_out_and_relative_links_become_text(hook, given, left):
    assert hook.shown(given) == left


def wheel(path, *names, description="plain"):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("gyroscope-1.dist-info/METADATA", f"Name: gyroscope\n\n{description}")
        for name in names:
            file.writestr(name, "")
    return path


def sdist(path, **sizes):
    with tarfile.open(path, "w:gz", compresslevel=0) as file:
        for name, size in {"PKG-INFO": 0, **sizes}.items():
            member = tarfile.TarInfo(f"gyroscope-1/{name}")
            member.size = size
            file.addfile(member, io.BytesIO(bytes(size)))
    return path


def test_archives_that_hold_what_they_should_are_accepted(tmp_path):
    wrong = loaded("build_dists").wrong
    assert wrong(wheel(tmp_path / "gyroscope-1-py3-none-any.whl", "gyroscope/__init__.py")) == []
    assert wrong(sdist(tmp_path / "gyroscope-1.tar.gz", **{"src/gyroscope/__init__.py": 9, "README.md": 9})) == []


@pytest.mark.parametrize("name", ["gyroscope_lab/data.py", "gyroscope/page/front/app.js", "tests/test_a.py"])
def test_a_wheel_that_holds_something_else_is_refused(tmp_path, name):
    (said,) = loaded("build_dists").wrong(wheel(tmp_path / "gyroscope-1-py3-none-any.whl", name))
    assert name in said


def test_a_description_with_a_relative_link_is_refused(tmp_path):
    file = wheel(tmp_path / "gyroscope-1-py3-none-any.whl", description="see [x](docs/x.md)")
    (said,) = loaded("build_dists").wrong(file)
    assert "docs/x.md" in said


def test_an_sdist_that_is_large_or_holds_results_is_refused(tmp_path):
    file = sdist(tmp_path / "gyroscope-1.tar.gz", **{"results/run.json": 2**20 + 1})
    results, size = loaded("build_dists").wrong(file)
    assert "results/run.json" in results
    assert "bytes" in size
