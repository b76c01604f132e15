"""Every Python example in the documents runs, and every link between them leads somewhere."""

import re
import runpy
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import forked
from gyroscope.diagnosis import KINDS

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]


def examples(document):
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if examples(d)], ids=lambda d: d.name)
def test_the_examples_of_a_document_run_in_order(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "example"}
    for example in examples(document):
        exec(compile(example, document.name, "exec"), namespace)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_every_link_of_a_document_leads_somewhere(document):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    missing = [t for t in targets if "://" not in t and not (document.parent / t).exists()]
    assert not missing


def anchors(document):
    """Return the anchors of the headings of a document, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_every_anchor_in_a_link_of_a_document_is_a_heading(document):
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text())
    pages = [(document.parent / path if path else document, anchor) for path, anchor in links]
    assert [(page.name, anchor) for page, anchor in pages if anchor not in anchors(page)] == []


@pytest.mark.parametrize("document", PAGES, ids=lambda d: d.name)
def test_a_page_has_one_title_and_headings_skip_no_level(document):
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later <= level + 1 for level, later in pairwise(levels))


def test_the_readme_has_examples():
    assert examples(ROOT / "README.md")


def test_the_architecture_names_every_subpackage():
    page = (ROOT / "docs" / "architecture.md").read_text()
    homes = (ROOT / "src/gyroscope", ROOT / "lab/src/gyroscope_lab")
    parts = [file.parent.name for home in homes for file in home.glob("*/__init__.py")]
    assert [part for part in parts if f"| `{part}/` |" not in page] == []


def test_the_walks_of_the_architecture_are_those_that_are_counted(tmp_path):
    forked.execute(f"""
import contextlib, runpy
with open({str(tmp_path / "told")!r}, "w") as told, contextlib.redirect_stdout(told):
    runpy.run_path({str(ROOT / "tools" / "hops")!r}, run_name="__main__")
""")
    counted = (tmp_path / "told").read_text().splitlines()
    page = (ROOT / "docs" / "architecture.md").read_text()
    for section, row, number in (("A controlled step", 2, "Eight"), ("A measured step", 4, "Ten")):
        files = re.findall(r"(\w+\.py)", counted[row])
        text = page.partition(f"## {section}")[2].partition("\n## ")[0]
        assert [file for file in files if file not in text] == []
        assert len(files) == {"Eight": 8, "Ten": 10}[number]
        assert number in text


def test_the_architecture_names_no_file_that_is_gone():
    named = set(re.findall(r"\b\w+\.py\b", (ROOT / "docs" / "architecture.md").read_text()))
    there = {f.name for folder in ("src", "lab/src", "docs") for f in (ROOT / folder).rglob("*.py")}
    assert sorted(named - there) == []


def test_every_document_is_listed_in_the_index():
    listed = set(re.findall(r"\w+", (ROOT / "docs" / "index.md").read_text()))
    assert sorted({f.stem for f in (ROOT / "docs").glob("*.md")} - {"index"} - listed) == []


def test_what_the_tables_of_dynamics_name_is_there():
    import gyroscope

    rows = [line.split("|")[-2] for line in (ROOT / "docs" / "dynamics.md").read_text().splitlines() if line[:1] == "|"]
    named = [re.match(r"[\w.]+", span).group() for row in rows for span in re.findall("`([^`]+)`", row)]
    assert len(named) > 60
    for name in named:
        first, *rest = name.removeprefix("gyroscope.").split(".")
        places = (gyroscope.theory, gyroscope.control, gyroscope.conditioning, gyroscope)
        found = next(getattr(place, first) for place in places if hasattr(place, first))
        for one in rest:
            found = getattr(found, one)
        assert found is not None


def test_the_table_of_normalizers_says_what_is_measured():
    from gyroscope.theory import comparison

    page = (ROOT / "docs" / "dynamics.md").read_text()
    table = re.search(r"<!-- normalizers -->\n(.*?)<!-- end normalizers -->", page, re.DOTALL).group(1)
    words = {"unit": "per unit", "tensor": "as a whole", True: "yes", False: "no"}
    columns = ("normalizer", "scale_invariant", "centering", "stochastic")
    measured = [[words.get(row[column], row[column]) for column in columns] for row in comparison()]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]] == measured


def test_the_tables_say_what_was_measured(monkeypatch):
    script = str(ROOT / "benchmarks" / "report.py")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    runpy.run_path(script, run_name="__main__")  # which exits if they say anything else


def test_the_front_pages_count_the_accuracies_that_agree_with_the_papers_as_the_tables_do():
    results = (ROOT / "docs" / "results.md").read_text()
    first, second = re.findall(r"^(\d+ of \d+) test accuracies are within one point", results, re.MULTILINE)
    for page in (results, (ROOT / "README.md").read_text()):
        words = " ".join(page.split())
        assert f"{first} cases on CIFAR-10, and in {second} on CIFAR-100" in words


@pytest.mark.parametrize("task", ["c10-cnn1", "c100-resnet"])
def test_the_paper_s_number_of_an_adaptive_method_under_layca_is_compared_once(task):
    page = (ROOT / "docs" / "results.md").read_text()
    table = page.partition(f"<!-- {task} -->")[2].partition(f"<!-- end {task} -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line[:1] == "|"]
    compared = [name for name, _, paper, *_ in rows[2:] if paper and "-Layca " in name]
    assert compared == {"c10-cnn1": ["RMSprop-Layca 3^-3"], "c100-resnet": ["Adam-Layca 3^-5"]}[task]


def test_every_kind_of_finding_has_its_section_and_its_picture_exists():
    page = (ROOT / "docs" / "diagnosis.md").read_text()
    sections = {
        line.removeprefix("### ").strip().lower().replace(" ", "_") for line in page.splitlines() if "### " in line
    }
    assert sections == set(KINDS)
    pictures = re.findall(r"\]\((images/[^)]+)\)", page)
    assert len(pictures) > 20
    assert all((ROOT / "docs" / picture).exists() for picture in pictures)
