"""The tutorials: their code runs as it stands, and they are built as a reader expects."""

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
NAMES = ("first_run", "broken_layer", "steer", "fine_tune", "reproduce")
TUTORIALS = pytest.mark.parametrize("name", NAMES)
# `make test-integrations` runs this one, where what it needs is installed.
NEEDS = {"fine_tune": "transformers"}
# What the text says about the outputs, by the names in the cells.
CLAIMS = {
    "first_run": lambda it: not it["gyroscope"].diagnose(it["run"]),
    "broken_layer": lambda it: [one.kind for one in it["found"] if one.is_alarm] == ["large_weights"],
    "steer": lambda it: all(
        it["accuracy"][name, it["layca"]][2] > max(it["accuracy"][name, it["sgd"]]) - 0.01 for name in it["networks"]
    ),
    "fine_tune": lambda it: (
        moved_most(it["tuning"])[-1] == "transformer.wte.weight"
        and all(".attn." in name for name in moved_most(it["tuning"])[:3])
    ),
    "reproduce": lambda it: [verdict.holds for verdict in it["report"].verdicts] == [True, True, None, None],
}
CELL = re.compile(r"^```\{code-cell\} ipython3\n(?::tags: \[[\w-]+\]\n\n)?(.*?)^```$", re.MULTILINE | re.DOTALL)


def text(name):
    return (FOLDER / f"{name}.md").read_text()


def moved_most(run):
    """Return the layers of a run, the most rotated first."""
    rotation = dict(zip(run.layers, run.series("rotation")[-1], strict=True))
    return sorted(rotation, key=rotation.__getitem__, reverse=True)


def run(cell, namespace):
    """Run a cell as a notebook does, and return the pictures that it shows."""
    tree = ast.parse(cell)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "tutorial", "exec"), namespace)
    if last is None:
        return []
    value = eval(compile(ast.Expression(last.value), "tutorial", "eval"), namespace)
    if hasattr(value, "_repr_html_"):
        value._repr_html_()
    return [value._repr_png_()] if hasattr(value, "_repr_png_") else []


def test_there_are_five():
    assert {file.stem for file in FOLDER.glob("*.md")} == set(NAMES)


@TUTORIALS
def test_every_cell_runs_shows_pictures_and_what_the_text_says(name, tmp_path, monkeypatch):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    namespace = {"__name__": "tutorial"}
    pictures = [picture for cell in CELL.findall(text(name)) for picture in run(cell, namespace)]
    assert len(pictures) >= 1
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert CLAIMS[name](namespace)


@TUTORIALS
def test_no_cell_is_overlooked(name):
    assert len(CELL.findall(text(name))) == text(name).count("{code-cell}") >= 5


@TUTORIALS
def test_it_opens_as_a_notebook_and_has_a_beginning_and_an_end(name):
    header, _, page = text(name).removeprefix("---\n").partition("\n---\n")
    assert header == text("first_run").removeprefix("---\n").partition("\n---\n")[0]
    opening = page.partition("```")[0]
    assert "After this tutorial you can" in " ".join(opening.split())
    assert f"{{nb-download}}`{name}.ipynb`" in opening
    assert f"jupytext --to ipynb {name}.md" in opening
    *_, ending = page.split("\n## ")
    assert ending.startswith("Where to go next\n")


@TUTORIALS
def test_its_links_lead_somewhere(name):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", CELL.sub("", text(name)))
    assert targets
    assert [target for target in targets if not (FOLDER / target).exists()] == []
